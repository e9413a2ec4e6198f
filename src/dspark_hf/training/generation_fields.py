"""
What a target's own generation config means for answers that are written in batches and in strides.

An answer is to be what one plain `generate` of the target says to its prompt alone. Most fields see
to that by themselves: they look at one step, or at a row without its padding. The others stand
here (Transformers 5.24), each with the value, beside `None`, at which it does nothing.
"""

from typing import Any

from transformers import PreTrainedModel

# Keywords for `generate`. They change no token; these values leave the cache, the batch and the
# form of the output to the caller, and a length to `max_new_tokens`.
SET_ASIDE = {
    "use_cache": True,
    "cache_implementation": None,
    "cache_config": None,
    "prompt_lookup_num_tokens": None,
    "assistant_early_exit": None,
    "use_mtp": None,
    "num_return_sequences": 1,
    "max_length": None,
    "output_attentions": False,
    "output_hidden_states": False,
    "output_scores": False,
    "output_logits": False,
    "return_dict_in_generate": True,
}

# Counted from where the prompt ends, or to the end of the answer: no strides.
WHOLE = {
    "min_new_tokens": 0,
    "begin_suppress_tokens": None,
    "forced_eos_token_id": None,
    "exponential_decay_length_penalty": None,
}

# A search, a state that lasts for an answer, or a look at tokens that may be padding: no strides
# and no companions.
ALONE = {
    "num_beams": 1,
    "guidance_scale": 1,
    "watermarking_config": None,
    "encoder_repetition_penalty": 1,
    "encoder_no_repeat_ngram_size": 0,
    "no_repeat_ngram_size": 0,
    "min_length": 0,
    "forced_bos_token_id": None,
    "bad_words_ids": None,
    "sequence_bias": None,
}

# Ends answers by something else than a token or their length, rewrites prompts, or needs code
# from elsewhere.
REFUSED = {
    "stop_strings": None,
    "max_time": None,
    "is_assistant": False,
    "token_healing": False,
    "penalty_alpha": 0,
    "dola_layers": None,
    "num_beam_groups": 1,
    "constraints": None,
    "force_words_ids": None,
}


def fields_set(target: PreTrainedModel, fields: dict[str, Any]) -> dict[str, Any]:
    """Those of some fields that do something in a target's generation config."""
    own = {name: getattr(target.generation_config, name, None) for name in fields}
    return {name: v for name, v in own.items() if v is not None and v != fields[name]}


def check_generation_config(target: PreTrainedModel) -> None:
    """
    Raises `ValueError` where answers would not be those of the target's plain `generate`.
    """
    refused = fields_set(target, REFUSED)
    # The other caches hold the keys and values that the target computes.
    if target.generation_config.cache_implementation == "quantized":
        refused["cache_implementation"] = "quantized"
    if refused:
        found = ", ".join(f"{name} {value!r}" for name, value in refused.items())
        raise ValueError(
            f"The target's generation config has {found}, which cannot be obeyed here, so the "
            "answers would not be the target's own. Use a copy of the target whose "
            "generation_config.json (config.json, if it has none) does without."
        )

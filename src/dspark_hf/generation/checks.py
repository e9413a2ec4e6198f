"""
What is refused before any compute: pairs that do not fit, and modes that speculation cannot keep
exact.
"""

import logging
import weakref
from typing import TYPE_CHECKING

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel
from transformers.generation import GenerationMode
from transformers.generation.logits_process import (
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from .v4_cache import has_rewindable_cache

if TYPE_CHECKING:
    from ..modeling_drafter import DrafterModel
    from .statistics import Statistics

logger = logging.getLogger(__name__)

_WARNED_PAIRS: "weakref.WeakSet[DrafterModel]" = weakref.WeakSet()
_WARNED_USELESS: "weakref.WeakSet[DrafterModel]" = weakref.WeakSet()
# Rounds without a single accepted token before a drafter is called useless.
_ROUNDS_TO_JUDGE = 8

# Processors that keep state from call to call and would see drafted tokens that are then rejected.
_STATEFUL_PROCESSORS = (
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
)


def check_pairing(target: PreTrainedModel, drafter: "DrafterModel") -> None:
    """
    Compare the facts a drafter was trained with and the target it is given.

    Raises:
        `ValueError`: the pair cannot work; both values and the remedy are named.
    """
    config = drafter.config
    if target.config.is_encoder_decoder:
        raise ValueError(
            f"{type(target).__name__} is an encoder-decoder model; DSpark drafters work with "
            "decoder-only targets. Generate without assistant_model, or use a decoder-only "
            "target."
        )
    text = target.config.get_text_config(decoder=True)
    # PEFT puts its own method in place of the target's while it generates.
    owner = getattr(target.prepare_inputs_for_generation, "__self__", target)
    if getattr(getattr(owner, "active_peft_config", None), "is_prompt_learning", False):
        raise ValueError(
            f"The target's {type(owner.active_peft_config).__name__} puts positions in front of "
            "the text that are in none of its inputs, so they cannot be kept. Use an "
            "adapter that changes weights (LoRA and its kin), or generate without assistant_model."
        )
    if getattr(text, "altup_num_inputs", None):
        raise ValueError(
            f"{type(target).__name__} passes {text.altup_num_inputs} residual streams from layer "
            "to layer, and which of them a drafter reads is not settled. Generate without "
            "assistant_model."
        )
    if drafter.device.type == "meta":
        raise ValueError(
            "The drafter has no weights in memory (device 'meta'): it was never loaded, or its "
            "layers are offloaded. Load it to the device of the target; it runs in every round."
        )
    facts = (
        ("decoder layers", text.num_hidden_layers, config.num_target_layers),
        ("hidden size", text.hidden_size, config.target_hidden_size),
        ("vocabulary", text.vocab_size, config.vocab_size),
    )
    for name, found, expected in facts:
        # Not every published layout records the target's depth.
        if expected is not None and found != expected:
            raise ValueError(
                f"This drafter was trained for another target: the target's {name} is {found}, "
                f"the drafter expects {expected}. Load the target named in the drafter's model "
                "card, or a drafter made for "
                f"{target.config.name_or_path or type(target).__name__}."
            )
    deepest = max(config.target_layer_ids)
    if deepest >= text.num_hidden_layers:
        raise ValueError(
            f"This drafter reads the output of layer {deepest}, and the target has layers 0 to "
            f"{text.num_hidden_layers - 1}. Load the target named in the drafter's model card."
        )
    stop_ids = _as_set(getattr(text, "eos_token_id", None)) | _as_set(
        target.generation_config.eos_token_id
    )
    if config.mask_token_id in stop_ids:
        raise ValueError(
            f"The drafter's mask_token_id {config.mask_token_id} is a stop token of this target "
            f"({sorted(stop_ids)}). The pair does not belong together, or one of the two configs "
            "was edited."
        )
    own_stop_ids = _as_set(config.eos_token_id)
    if own_stop_ids and stop_ids and not own_stop_ids & stop_ids and drafter not in _WARNED_PAIRS:
        _WARNED_PAIRS.add(drafter)
        logger.warning(
            "The drafter was trained with stop tokens %s and this target stops at %s: perhaps "
            "another version of the target. The output is the target's own all the same; expect "
            "fewer accepted tokens.",
            sorted(own_stop_ids),
            sorted(stop_ids),
        )


def check_generation_mode(generation_config: GenerationConfig, mode: GenerationMode) -> None:
    """Raise `ValueError` for generation modes that cannot run with a drafter."""
    config = generation_config
    if (config.num_beams or 1) > 1:
        raise ValueError(
            f"num_beams={config.num_beams} cannot be combined with a DSpark drafter; speculation "
            "covers greedy decoding and sampling. Set num_beams=1, or drop assistant_model."
        )
    if config.use_cache is False:
        raise ValueError(
            "use_cache=False cannot be combined with a DSpark drafter. Remove it, or drop "
            "assistant_model."
        )
    others = {
        "prompt_lookup_num_tokens": config.prompt_lookup_num_tokens,
        "assistant_early_exit": config.assistant_early_exit,
        "use_mtp": config.use_mtp or None,
        "speculation_type": config.speculation_type,
    }
    for name, value in others.items():
        if value is not None:
            raise ValueError(
                f"{name}={value!r} and a DSpark drafter both draft tokens; use one of the two."
            )
    if config.dola_layers is not None:
        raise ValueError(
            f"dola_layers={config.dola_layers!r} cannot be combined with a DSpark drafter; "
            "speculation covers greedy decoding and sampling. Remove it, or drop assistant_model."
        )
    if config.assistant_ensemble_weight is not None:
        raise ValueError(
            f"assistant_ensemble_weight={config.assistant_ensemble_weight} changes the output "
            "distribution, and a DSpark drafter never does. Remove it."
        )
    if mode not in (
        GenerationMode.ASSISTED_GENERATION,
        GenerationMode.GREEDY_SEARCH,
        GenerationMode.SAMPLE,
    ):
        raise ValueError(
            f"Generation mode {mode.value!r} cannot be combined with a DSpark drafter; "
            "speculation covers greedy decoding and sampling."
        )


def check_offloading(target: PreTrainedModel, config: GenerationConfig) -> None:
    """Raise `ValueError` for an offloaded cache where there is nothing to offload from."""
    name = config.cache_implementation or ""
    if name.startswith("offloaded") and target.device.type != "cuda":
        raise ValueError(
            f"cache_implementation={name!r} moves the cache between a CUDA device and the CPU, and "
            f"this target is on {target.device.type!r}. Leave it unset, or choose "
            f"{'static' if 'static' in name else 'dynamic'!r}."
        )


def plain_mode(config: GenerationConfig) -> GenerationMode:
    """The mode that a call would have without its drafter."""
    return GenerationMode.SAMPLE if config.do_sample else GenerationMode.GREEDY_SEARCH


def check_processors(logits_processor: LogitsProcessorList) -> None:
    """Raise `ValueError` for processors that keep state from one call to the next."""
    for processor in logits_processor:
        if isinstance(processor, _STATEFUL_PROCESSORS):
            raise ValueError(
                f"{type(processor).__name__} keeps state from token to token, which drafted and "
                "then rejected tokens would spoil. Remove guidance_scale or watermarking_config, "
                "or drop assistant_model."
            )


def check_batch(input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> None:
    """Raise `ValueError` for a batch without rows, a mask of other rows, or a row without text."""
    if input_ids.shape[0] == 0:
        raise ValueError("input_ids has no rows; there is nothing to generate.")
    if attention_mask is not None:
        if attention_mask.shape[0] != input_ids.shape[0]:
            raise ValueError(
                f"attention_mask has {attention_mask.shape[0]} rows and the batch has "
                f"{input_ids.shape[0]}. Give one row of it for each prompt."
            )
        empty = (attention_mask.sum(dim=-1) == 0).nonzero().flatten().tolist()
        if empty:
            raise ValueError(
                f"attention_mask hides every token of row {', '.join(map(str, empty))}. Leave such "
                "rows out of the batch, or give them a token to start from."
            )


def check_padding(target: PreTrainedModel, attention_mask: torch.Tensor | None) -> None:
    """
    Refuse padding on DeepSeek-V4.

    Its compressed layers take padding for text, in plain `generate` as well, and show it to
    forwards over one and over several tokens differently. Raises `ValueError`.
    """
    if attention_mask is None or not has_rewindable_cache(target):
        return
    if not bool(attention_mask.bool().all()):
        raise ValueError(
            f"The attention mask takes out positions, and {type(target).__name__} compresses "
            "padding together with text. Give rows of equal length, or one row at a time, without "
            "padding. If nothing here is padding, pass an attention_mask of ones: without one, the "
            "host takes it from the pad tokens."
        )


def warn_if_useless(drafter: "DrafterModel", statistics: "Statistics") -> None:
    """Say once per drafter that it never got a token accepted, or never proposed one."""
    if statistics.rounds < _ROUNDS_TO_JUDGE or statistics.accepted or drafter in _WARNED_USELESS:
        return
    if statistics.drafted and not statistics.verified:
        return  # Everything was cut by the threshold, as asked for.
    _WARNED_USELESS.add(drafter)
    if not statistics.drafted:
        logger.warning(
            "The drafter proposed nothing in %d rounds; decoding ran at plain speed.",
            statistics.rounds,
        )
        return
    logger.warning(
        "None of %d drafted tokens was accepted in %d rounds, so the drafter only costs time "
        "here. The text is the target's own all the same. Usual causes: a drafter made for "
        "another version or mode of the target, or a wrong layout; `dspark-hf inspect` and "
        "`dspark-hf check` tell.",
        statistics.verified,
        statistics.rounds,
    )


def _as_set(token_ids: int | list[int] | torch.Tensor | None) -> set[int]:
    if token_ids is None:
        return set()
    if isinstance(token_ids, int):
        return {token_ids}
    return {int(token) for token in token_ids}

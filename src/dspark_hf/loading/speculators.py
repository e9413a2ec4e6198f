"""
The speculators container: a nested config, layer ids that count hidden states, a vocabulary that
may be reduced.
"""

from typing import Any

from transformers import AutoConfig

from ..configuration_dspark import DSparkConfig
from ..configuration_eagle3 import Eagle3Config
from .qwen3_body import BODY_KEYS, check_layer_types, read_rotary
from .reading import (
    ConfigReader,
    Reading,
    block_layout,
    check_depth,
    draft_vocabulary,
    hidden_state_taps,
    refuse_block_layout,
    stored_matrices,
    taps_by_rule,
    vocabulary_tensors,
)

_BODY = "transformer_layer_config"
_BODY_TYPES = ("qwen3", "llama")
_CONTAINER_KEYS = (
    "architectures",
    "auto_map",
    "model_type",
    "speculators_model_type",
    "speculators_version",
    "tie_word_embeddings",
    "transformers_version",
    "max_anchors",
    "dtype",
    "torch_dtype",
    "speculators_config.algorithm",
    "speculators_config.verifier",
)
# The rotary base of a config that leaves it out, in the package that wrote it.
_DEFAULT_THETA = 10_000.0


def read_speculators(reader: ConfigReader, layout: str | None) -> Reading:
    """
    The drafter that a speculators DSpark or DFlash checkpoint describes.

    Raises:
        `ValueError`: a required key is missing, or keys contradict each other.
    """
    reader.ignore(*_CONTAINER_KEYS)
    is_dspark = reader.raw["speculators_model_type"] == "dspark"
    body = _read_body(reader)
    width = reader.require("block_width", "block_size")
    shape = block_layout(reader, width, _anchor_predicts(reader, width, layout), layout)
    target_width = reader.get("target_hidden_size", "target_hidden_size")
    matrices: dict[str, Any] = stored_matrices(reader)
    config = DSparkConfig(
        backbone_config=body,
        mask_token_id=reader.require("mask_token_id", "mask_token_id"),
        target_layer_ids=_taps(reader, "aux_hidden_state_layer_ids"),
        num_target_layers=reader.get("num_target_layers", "num_target_layers"),
        target_hidden_size=target_width or body["hidden_size"],
        vocab_size=body["vocab_size"],
        # The default of the container's class, which a file may leave out.
        draft_vocab_size=draft_vocabulary(reader, body["vocab_size"], default=32_000),
        causal_layers=_causal_layers(reader, body),
        # Heads of this container were trained on plain embedding rows whatever the target does.
        unscaled_input_embeddings=True,
        **matrices,
        architectures=["DSparkDrafter"],
        dtype=reader.get("dtype", "dtype") or reader.get("dtype", "torch_dtype"),
        **shape,
        **_read_heads(reader, is_dspark),
    )
    reader.by_rule("unscaled_input_embeddings", "speculators embeds with plain rows")
    vocabulary = vocabulary_tensors(reader, config.draft_vocab_size)
    return Reading(config, greedy_drafts=not is_dspark, **vocabulary)


def read_speculators_eagle3(reader: ConfigReader, layout: str | None, depth: int | None) -> Reading:
    """
    The drafter that a speculators Eagle3 checkpoint describes.

    Args:
        depth (`int`, *optional*):
            Decoder layers of the target, for files that leave the taps to a rule over them: those
            of the package's own converter.

    Raises:
        `ValueError`: a required key is missing, or keys contradict each other.
    """
    refuse_block_layout(reader, layout)
    reader.ignore(*_CONTAINER_KEYS, "embed_requires_grad")
    body = _read_body(reader)
    model_type = reader.section(_BODY).get("model_type", "qwen3")
    target_width = reader.get("target_hidden_size", "target_hidden_size")
    norm_before_residual = reader.flag("norm_before_residual", "norm_before_residual")
    if norm_before_residual is None:
        norm_before_residual = True
        reader.by_rule("norm_before_residual", "absent is true, as in vLLM and in the trainer")
        reader.warn(
            "norm_before_residual is absent: read as true, as its trainer and vLLM do; the class "
            "of the speculators package would read false."
        )
    joint = reader.flag("feature_norm", "norm_before_fc")
    per_tap = reader.flag("feature_norm", "fc_norm")
    if joint and per_tap:
        raise ValueError(
            f"{reader.source}: norm_before_fc and fc_norm exclude each other, and config.json has "
            "both. Take it from the original checkpoint."
        )
    proposed = _speculative_tokens(reader)
    if type(proposed) is not int:
        raise ValueError(
            f"{reader.source}: speculators_config does not say how many tokens are proposed "
            f"(speculative_tokens is {proposed!r}). Add the number that it was trained for."
        )
    reader.origins["block_size"] = "speculators_config.proposal_methods"
    stated = reader.get("num_target_layers", "num_target_layers")
    key = "eagle_aux_hidden_state_layer_ids"
    has_taps = reader.raw.get(key) is not None
    config = Eagle3Config(
        backbone_config={**body, "model_type": model_type},
        feature_norm="joint" if joint else "per_tap" if per_tap else None,
        norm_before_residual=norm_before_residual,
        recycles_normed_output=bool(reader.flag("recycles_normed_output", "norm_output")),
        block_size=proposed,
        target_layer_ids=_taps(reader, key) if has_taps else taps_by_rule(reader, stated or depth),
        num_target_layers=stated or depth,
        target_hidden_size=target_width or body["hidden_size"],
        vocab_size=body["vocab_size"],
        draft_vocab_size=draft_vocabulary(reader, body["vocab_size"], default=32_000),
        **stored_matrices(reader),
        architectures=["Eagle3Drafter"],
        dtype=reader.get("dtype", "dtype") or reader.get("dtype", "torch_dtype"),
    )
    return Reading(config, **vocabulary_tensors(reader, config.draft_vocab_size))


def _read_body(reader: ConfigReader) -> dict[str, Any]:
    """
    `transformer_layer_config` is a difference to the defaults of its class, so the class fills the
    gaps: that is what the writing package does when it loads the file.
    """
    raw = reader.section(_BODY)
    if not raw:
        raise ValueError(
            f"{reader.source}: config.json lacks {_BODY}, which describes the draft layers. Take "
            "it from the original checkpoint."
        )
    model_type = raw.get("model_type", "qwen3")
    if model_type not in _BODY_TYPES:
        raise ValueError(
            f"{reader.source}: {_BODY}.model_type is {model_type!r}; speculators draft layers are "
            f"read over {' or '.join(_BODY_TYPES)} configs."
        )
    reader.ignore(*(f"{_BODY}.{key}" for key in (*BODY_KEYS, "model_type", "vocab_size")))
    if "num_hidden_layers" in raw:
        check_depth(reader, raw["num_hidden_layers"])
    rope = read_rotary(reader, prefix=f"{_BODY}.", default_theta=_DEFAULT_THETA)
    plain = {
        key: value for key, value in raw.items() if not key.startswith(("rope_", "model_type"))
    }
    complete = AutoConfig.for_model(model_type, **plain)
    values = ((key, getattr(complete, key, None)) for key in (*BODY_KEYS, "vocab_size"))
    fields: dict[str, Any] = {key: value for key, value in values if value is not None}
    # The host forgets the window of a config without `use_sliding_window`; so does the package that
    # wrote it, and its layers then see everything in both directions.
    if not fields.get("sliding_window") and "sliding_attention" in fields.get("layer_types", ()):
        reader.warn(
            "layer_types has sliding_attention layers, but no window is in force "
            "(use_sliding_window or sliding_window is unset): read as full attention, as "
            "speculators does."
        )
        raw = {key: value for key, value in raw.items() if key != "layer_types"}
        fields["layer_types"] = ["full_attention"] * fields["num_hidden_layers"]
    fields.setdefault("layer_types", ["full_attention"] * fields["num_hidden_layers"])
    check_layer_types(reader, fields)
    for key in fields:
        reader.origins[key] = f"{_BODY}.{key}" if key in raw else f"= default of {model_type}"
    return {**fields, "model_type": "qwen3", "rope_parameters": rope}


def _taps(reader: ConfigReader, key: str) -> list[int]:
    """Ids of this container count hidden states."""
    taps = hidden_state_taps(reader, key)
    offset = reader.get("aux_hidden_state_layer_offset", "aux_hidden_state_layer_offset")
    if offset:
        raise ValueError(
            f"{reader.source}: aux_hidden_state_layer_offset is {offset}, a correction for one "
            "engine that moves every layer id. Add it to aux_hidden_state_layer_ids or remove it, "
            "whichever the author trained with."
        )
    return taps


def _anchor_predicts(reader: ConfigReader, width: Any, layout: str | None) -> bool:
    """
    Whether the anchor slot predicts.

    The flag counts; without it, W minus the number of proposed tokens; without that either, the
    layout of the time before the flag, which is infill.
    """
    flag = reader.flag("anchor_predicts", "sample_from_anchor")
    proposed = _speculative_tokens(reader)
    shift = width - proposed if type(width) is int and type(proposed) is int else None
    if flag is not None:
        if shift is not None and shift != (0 if flag else 1):
            reader.warn(
                f"sample_from_anchor is {flag}, but {proposed} of {width} block tokens are "
                "proposed; the flag counts (the speculators converter writes block_size - 1 for "
                "every drafter)."
            )
        return flag
    if shift in (0, 1):
        reader.by_rule("anchor_predicts", f"block_size minus {proposed} speculative_tokens")
    else:
        reader.by_rule("anchor_predicts", "files without sample_from_anchor are infill")
    if layout is None:
        reader.warn(
            "sample_from_anchor is absent: the block is read as "
            f"{'anchor-first' if shift == 0 else 'infill'}. If acceptance is poor, compare both "
            "with `dspark-hf probe` and pass block_layout='anchor_first' or 'infill'."
        )
    return shift == 0


def _speculative_tokens(reader: ConfigReader) -> Any:
    section = reader.section("speculators_config")
    reader.ignore(
        "speculators_config.proposal_methods", "speculators_config.default_proposal_method"
    )
    methods = section.get("proposal_methods")
    methods = [m for m in methods if isinstance(m, dict)] if isinstance(methods, list) else []
    default = section.get("default_proposal_method")
    chosen = [m for m in methods if m.get("proposal_type") == default] or methods
    return chosen[0].get("speculative_tokens") if chosen else None


def _causal_layers(reader: ConfigReader, body: dict[str, Any]) -> list[int]:
    """Sliding layers are causal inside the block unless the config says otherwise."""
    sliding = [i for i, kind in enumerate(body["layer_types"]) if kind == "sliding_attention"]
    non_causal = reader.flag("causal", "sliding_window_non_causal")
    if non_causal is None and sliding:
        reader.by_rule("causal", "an absent sliding_window_non_causal is non-causal, as in vLLM")
        reader.warn(
            "sliding_window_non_causal is absent: sliding layers are read as bidirectional inside "
            "the block, as vLLM does; newer speculators releases would read them as causal."
        )
        return []
    return [] if non_causal else sliding


def _read_heads(reader: ConfigReader, is_dspark: bool) -> dict[str, Any]:
    if not is_dspark:
        return {}
    # Defaults of the container's class: a file leaves out what equals them.
    rank = reader.get("markov_rank", "markov_rank", default=256)
    head_type = reader.get("markov_head_type", "markov_head_type", default="vanilla")
    has_confidence = bool(reader.flag("confidence_head", "enable_confidence_head", default=True))
    with_markov = bool(
        reader.flag("confidence_head_with_markov", "confidence_head_with_markov", default=True)
    )
    return {
        "markov_head_type": head_type if rank else None,
        "markov_rank": rank,
        "confidence_head": has_confidence,
        "confidence_head_with_markov": has_confidence and with_markov,
        "confidence_head_bias": "confidence_head.proj.bias" in reader.tensors,
    }

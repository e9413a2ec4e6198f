"""
The DFlash family: z-lab DFlash and the DSpark trainers that grew from it.

One container, `dflash_config`, with the same facts under the same names; what differs is the block
layout, a few tensor names and LiquidAI's rotary pairs. Keys are read from `dflash_config` and from
the top level, where some uploads repeat them; a repetition that says something else is refused.
"""

from typing import Any

from ..configuration_dspark import DSparkConfig
from .deepspec import common_facts
from .detection import DFLASH, FORK, LFM2, MODELOPT
from .qwen3_body import read_body
from .reading import (
    ConfigReader,
    Reading,
    block_layout,
    draft_vocabulary,
    refuse_negative_taps,
    stated_layout,
    vocabulary_tensors,
)

_SECTION = "dflash_config"
# Tensor names that differ from ours, by the start of the name.
_RENAMED = {
    "logit_head.": "markov_head.",
    "markov_w1.": "markov_head.markov_w1.",
    "markov_w2.": "markov_head.markov_w2.",
    "gate_proj.": "markov_head.gate_proj.",
    "joint_proj.": "markov_head.joint_proj.",
    "confidence_proj.": "confidence_head.proj.",
}
# Names that a trainer has for a head type of ours.
_HEAD_TYPES = {"classical": "vanilla"}
_TRAINING_KEYS = (
    "auto_map",
    "num_anchors",
    "confidence_head_alpha",
    f"{_SECTION}.confidence_head_alpha",
    f"{_SECTION}.projector_type",
    f"{_SECTION}.attention_mode",
    "projector_type",
)


def read_dflash_family(reader: ConfigReader, dialect: str, layout: str | None) -> Reading:
    """
    The drafter that a checkpoint with a `dflash_config` describes.

    Raises:
        `ValueError`: a required key is missing, keys contradict each other, or the block layout
            cannot be told.
    """
    reader.section(_SECTION)
    reader.ignore(*_TRAINING_KEYS)
    renames = {
        name: new + name.removeprefix(old)
        for name in reader.tensors
        for old, new in _RENAMED.items()
        if name.startswith(old)
    }
    body = read_body(reader)
    depth = _require(reader, "num_target_layers")
    taps = _require(reader, "target_layer_ids")
    refuse_negative_taps(reader, taps)
    _refuse_last_layer(reader, taps, depth)
    width = _require(reader, "block_size", "block_width")
    shape = block_layout(reader, width, _anchor_predicts(reader, dialect, renames), layout)
    body, causal = _attention(reader, body)
    heads = _read_heads(reader, body["hidden_size"], renames)
    config = DSparkConfig(
        backbone_config=body,
        mask_token_id=_require(reader, "mask_token_id"),
        target_layer_ids=taps,
        num_target_layers=depth,
        target_hidden_size=body["hidden_size"],
        vocab_size=body["vocab_size"],
        draft_vocab_size=draft_vocabulary(reader, body["vocab_size"]),
        # z-lab's reference hands the window to the attention kernel, which measures it from each
        # query; the trainers of the others mask it from the anchor.
        sliding_window_per_slot=dialect == DFLASH,
        causal_layers=list(range(body["num_hidden_layers"])) if causal else None,
        final_logit_softcapping=_get(reader, "final_logit_softcapping"),
        **shape,
        **heads,
        **common_facts(reader),
    )
    _report_idle_window(reader, config.backbone_config.layer_types)
    if dialect == LFM2:
        reader.require("interleaved_rotary", "rope_is_neox_style")
    vocabulary = vocabulary_tensors(reader, config.draft_vocab_size)
    vocabulary["renames"] |= renames
    return Reading(config, greedy_drafts=config.markov_head_type is None, **vocabulary)


def _get(reader: ConfigReader, key: str, field: str | None = None, default: Any = None) -> Any:
    return reader.get(field or key, f"{_SECTION}.{key}", key, default=default)


def _flag(reader: ConfigReader, key: str, field: str) -> bool | None:
    return reader.flag(field, f"{_SECTION}.{key}", key)


def _require(reader: ConfigReader, key: str, field: str | None = None) -> Any:
    return reader.require(field or key, f"{_SECTION}.{key}", key)


def _anchor_predicts(reader: ConfigReader, dialect: str, renames: dict[str, str]) -> bool | None:
    """Whether the anchor slot predicts, by dialect; `None` where it cannot be told."""
    told = stated_layout(reader)
    if told is not None:
        return told
    if dialect == FORK:
        return _fork_layout(reader, renames)
    anchor_first = dialect not in (DFLASH, MODELOPT)
    reader.by_rule("anchor_predicts", f"blocks of the {dialect} layout")
    return anchor_first


def _fork_layout(reader: ConfigReader, renames: dict[str, str]) -> bool | None:
    """
    DSpark weights under a DFlash label: with both heads they are DeepSpec's, anchor-first; with a
    Markov head alone they may be either.
    """
    trained, width = _get(reader, "training_block_size"), _get(reader, "block_size")
    if trained not in (None, width):
        return None
    names = {renames.get(name, name) for name in reader.tensors}
    if reader.tensors and not any(name.startswith("confidence_head.") for name in names):
        return None
    reader.by_rule("anchor_predicts", "a Markov and a confidence head, as DeepSpec trains them")
    return True


def _attention(reader: ConfigReader, body: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """The body with ModelOpt's window on every layer, and whether blocks are causal."""
    places = (f"{_SECTION}.causal", "is_causal", f"{_SECTION}.is_causal")
    causal = bool(reader.flag("causal", *places))
    if _flag(reader, "use_swa", "use_swa"):
        window = _get(reader, "swa_window_size", "sliding_window")
        other = reader.raw.get("sliding_window")
        if window and other and window != other:
            reader.warn(
                f"swa_window_size is {window} and sliding_window {other}: the first is read."
            )
        window = window or reader.get("sliding_window", "sliding_window")
        if not window:
            raise ValueError(
                f"{reader.source}: dflash_config.use_swa is set, but neither swa_window_size nor "
                "sliding_window gives the window. Add the one that the drafter was trained with."
            )
        body = {
            **body,
            "layer_types": ["sliding_attention"] * body["num_hidden_layers"],
            "sliding_window": window,
            "use_sliding_window": True,
        }
    return body, causal


def _report_idle_window(reader: ConfigReader, kinds: list[str]) -> None:
    """Say that a window is stated which no layer has; copies of a target's config switch it off."""
    if "sliding_attention" in kinds:
        return
    window = _get(reader, "swa_window_size", "sliding_window")
    window = window or reader.get("sliding_window", "sliding_window")
    is_off = False in (_flag(reader, "use_swa", "use_swa"), reader.raw.get("use_sliding_window"))
    if window and not is_off:
        reader.warn(
            f"a window of {window} is stated and no layer slides: read as full attention. In files "
            "of ModelOpt it holds for every layer; set dflash_config.use_swa if this is one."
        )


def _read_heads(reader: ConfigReader, hidden_size: int, renames: dict[str, str]) -> dict[str, Any]:
    """
    The two heads. What config.json leaves out is taken from the tensors, which decide without
    doubt: which head types exist follows from their names, rank and inputs from their shapes.
    """
    shapes = {renames.get(name, name): tensor.shape for name, tensor in reader.tensors.items()}
    rank = _get(reader, "markov_rank")
    markov = shapes.get("markov_head.markov_w1.weight")
    if rank is None:
        rank = markov[-1] if markov else 0
        reader.by_rule("markov_rank", "width of markov_w1, 0 without one")
    head_type = _get(reader, "markov_head_type")
    if head_type is None and rank:
        head_type = "vanilla"
        if "markov_head.gate_proj.weight" in shapes:
            head_type = "gated"
        elif "markov_head.joint_proj.weight" in shapes:
            head_type = "rnn"
        reader.by_rule("markov_head_type", "tensor names of the Markov head")
    stated = reader.flag(
        "confidence_head",
        *(f"{prefix}{key}" for prefix in (f"{_SECTION}.", "") for key in _CONFIDENCE_KEYS),
    )
    proj = shapes.get("confidence_head.proj.weight")
    has_confidence = stated if stated is not None else proj is not None
    if stated is None:
        reader.by_rule("confidence_head", "tensors of a confidence head")
    with_markov = _flag(reader, "confidence_head_with_markov", "confidence_head_with_markov")
    if proj is not None and with_markov is None:
        with_markov = bool(rank) and proj[-1] == hidden_size + rank
        reader.by_rule("confidence_head_with_markov", "width of the confidence projection")
    return {
        "markov_head_type": _HEAD_TYPES.get(head_type, head_type) if rank else None,
        "markov_rank": rank,
        "confidence_head": has_confidence,
        "confidence_head_with_markov": has_confidence and bool(with_markov),
        "confidence_head_bias": "confidence_head.proj.bias" in shapes,
        "architectures": ["DSparkDrafter"],
    }


_CONFIDENCE_KEYS = ("enable_confidence_head", "use_confidence_head")


def _refuse_last_layer(reader: ConfigReader, taps: Any, depth: Any) -> None:
    # Their references read `hidden_states`, whose last entry is normed; their trainers' caches hold
    # the raw output. The config does not say which of the two the projection was trained on.
    if isinstance(taps, list) and isinstance(depth, int) and depth - 1 in taps:
        raise ValueError(
            f"{reader.source}: target_layer_ids contains {depth - 1}, the target's last layer. In "
            "this layout that is its normed or its raw output, depending on who trained it, and "
            "the two are not interchangeable. Use a drafter with other taps."
        )

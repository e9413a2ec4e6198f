"""DeepSpec DSpark and DFlash: a flat copy of the target's config with the drafter's keys added."""

from typing import Any

from ..configuration_dspark import DSparkConfig
from .detection import DEEPSPEC_BACKBONES, architecture_of
from .qwen3_body import read_body
from .reading import (
    ConfigReader,
    Reading,
    block_layout,
    check_depth,
    draft_vocabulary,
    stated_layout,
    stored_matrices,
    vocabulary_tensors,
)

# Host model types under which DeepSpec drafters are published (the config is a copy of the
# target's; heads for Qwen3.5 targets keep that target's type over a stock Qwen3 body).
_MODEL_TYPES = {
    "qwen3": ("qwen3", "qwen3_5", "qwen3_5_text"),
    "gemma4_text": ("gemma4_text", "gemma4_unified_text"),
}
_GEMMA4_REQUIRED = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "global_head_dim",
    "attention_k_eq_v",
)
_GEMMA4_OPTIONAL = (
    "num_global_key_value_heads",
    "hidden_activation",
    "max_position_embeddings",
    "initializer_range",
    "attention_bias",
    "attention_dropout",
    "sliding_window",
)
_TRAINING_KEYS = (
    "num_anchors",
    "target_model_type",
    "target_text_model_type",
    "transformers_version",
)


def read_deepspec(reader: ConfigReader, layout: str | None) -> Reading:
    """
    The drafter that a DeepSpec checkpoint describes.

    Raises:
        `ValueError`: a required key is missing, or keys contradict each other.
    """
    backbone = DEEPSPEC_BACKBONES[str(architecture_of(reader.raw))]
    width = reader.require("block_width", "block_size", "dflash_config.block_size")
    facts = {
        "mask_token_id": reader.require(
            "mask_token_id", "mask_token_id", "dflash_config.mask_token_id"
        ),
        "target_layer_ids": reader.require(
            "target_layer_ids", "target_layer_ids", "dflash_config.target_layer_ids"
        ),
        "num_target_layers": reader.require("num_target_layers", "num_target_layers"),
        "vocab_size": reader.require("vocab_size", "vocab_size"),
    }
    heads = _read_heads(reader)
    body = deepspec_body(reader, backbone)
    reader.by_rule("anchor_predicts", "DeepSpec blocks are anchor-first, DFlash included")
    if stated_layout(reader) is False and layout is None:
        raise ValueError(
            f"{reader.source}: blocks of a {architecture_of(reader.raw)} are anchor-first, and "
            "config.json says that the anchor slot does not predict (sample_from_anchor or "
            "shift_label is false). Ask the author which holds, and pass block_layout='infill' or "
            "'anchor_first'."
        )
    shape = block_layout(reader, width, True, layout)
    # A drafter of Qwen3 layers has none, whatever a copied config says.
    is_gemma = backbone == "gemma4_text"
    cap = reader.get("final_logit_softcapping", "final_logit_softcapping") if is_gemma else None
    # Not DeepSpec's key: a SpecForge drafter that was repacked in this layout brings it along.
    places = ("is_causal", "dflash_config.is_causal", "dflash_config.causal")
    causal = reader.flag("causal", *places)
    draft_vocab_size = draft_vocabulary(reader, facts["vocab_size"])
    config = DSparkConfig(
        backbone_config=body,
        target_hidden_size=body["hidden_size"],
        draft_vocab_size=draft_vocab_size,
        final_logit_softcapping=cap,
        causal_layers=list(range(body["num_hidden_layers"])) if causal else None,
        **shape,
        **facts,
        **heads,
        **common_facts(reader),
    )
    return Reading(config, **vocabulary_tensors(reader, draft_vocab_size))


def deepspec_body(reader: ConfigReader, backbone: str) -> dict[str, Any]:
    """
    Config fields of the draft layers of a DeepSpec drafter, `"qwen3"` or `"gemma4_text"`.

    Raises:
        `ValueError`: a key is missing, or contradicts the architecture.
    """
    model_type = reader.get("model_type", "model_type")
    if model_type not in _MODEL_TYPES[backbone]:
        raise ValueError(
            f"{reader.source}: architecture {architecture_of(reader.raw)} goes with model_type "
            f"{' or '.join(_MODEL_TYPES[backbone])}, found {model_type!r}. The config.json was "
            "edited or belongs to another checkpoint."
        )
    return read_body(reader) if backbone == "qwen3" else _gemma4_body(reader)


def common_facts(reader: ConfigReader) -> dict[str, Any]:
    """What every flat layout states alike: stored matrices, precision, special tokens."""
    reader.ignore("architectures", "model_type", "tie_word_embeddings", *_TRAINING_KEYS)
    return {
        **stored_matrices(reader),
        "dtype": reader.get("dtype", "dtype") or reader.get("dtype", "torch_dtype"),
        **{key: reader.get(key, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")},
    }


def _read_heads(reader: ConfigReader) -> dict[str, Any]:
    rank = reader.require("markov_rank", "markov_rank", "dflash_config.markov_rank")
    enabled = ("enable_confidence_head", "dflash_config.enable_confidence_head")
    reader.require("confidence_head", *enabled)
    has_confidence = bool(reader.flag("confidence_head", *enabled))
    head_type = with_markov = None
    if rank:
        head_type = reader.require(
            "markov_head_type", "markov_head_type", "dflash_config.markov_head_type"
        )
    if has_confidence:
        reads = ("confidence_head_with_markov", "dflash_config.confidence_head_with_markov")
        reader.require("confidence_head_with_markov", *reads)
        with_markov = reader.flag("confidence_head_with_markov", *reads)
    reader.ignore("markov_head_type", "confidence_head_with_markov")
    return {
        "markov_head_type": head_type,
        "markov_rank": rank,
        "confidence_head": has_confidence,
        "confidence_head_with_markov": bool(with_markov),
        "confidence_head_bias": "confidence_head.proj.bias" in reader.tensors,
        "architectures": ["DSparkDrafter"],
    }


def _gemma4_body(reader: ConfigReader) -> dict[str, Any]:
    moe = reader.get("enable_moe_block", "enable_moe_block")
    per_layer = reader.get("hidden_size_per_layer_input", "hidden_size_per_layer_input")
    if moe or per_layer:
        raise ValueError(
            f"{reader.source}: Gemma 4 drafters have no MoE blocks and no per-layer inputs, but "
            f"config.json says enable_moe_block={moe}, hidden_size_per_layer_input={per_layer}."
        )
    fields = {key: reader.require(key, key) for key in _GEMMA4_REQUIRED}
    check_depth(reader, fields["num_hidden_layers"])
    optional = {key: reader.get(key, key) for key in _GEMMA4_OPTIONAL}
    fields |= {key: value for key, value in optional.items() if value is not None}
    if fields["attention_k_eq_v"]:
        reader.require("num_global_key_value_heads", "num_global_key_value_heads")
    reader.require("rope", "rope_parameters")
    rope = reader.section("rope_parameters").get("full_attention")
    if not isinstance(rope, dict) or rope.get("rope_theta") is None:
        raise ValueError(
            f"{reader.source}: rope_parameters.full_attention.rope_theta is missing; Gemma 4 draft "
            "layers are full-attention layers and need it."
        )
    # The reference builds every draft layer as a full-attention layer, whatever the target's
    # pattern is.
    reader.ignore("layer_types")
    return {
        "model_type": "gemma4_text",
        "vocab_size": reader.require("vocab_size", "vocab_size"),
        "hidden_size_per_layer_input": 0,
        "tie_word_embeddings": False,
        **fields,
        "layer_types": ["full_attention"] * fields["num_hidden_layers"],
        "rope_parameters": {"full_attention": rope},
    }

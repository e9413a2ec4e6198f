"""
Which layout a checkpoint is in, and its facts in our normal form.

Detection looks at the raw config.json (and at tensor names where they are known) in a fixed order,
because the same strings mean different things in different layouts. Nothing is guessed: an unknown
layout is refused.
"""

from collections.abc import Collection
from typing import Any

from ..configuration_dspark import DSparkConfig
from ..configuration_eagle3 import Eagle3Config
from . import deepseek_v4
from .deepseek_v4 import DEEPSEEK_V4

DSPARK = "dspark"
DEEPSPEC = "deepspec"
EAGLE3 = "dspark_eagle3"
DEEPSPEC_EAGLE3 = "deepspec_eagle3"
# Layouts that `Eagle3Drafter` reads; the others are `DSparkDrafter`'s.
EAGLE3_DIALECTS = (EAGLE3, DEEPSPEC_EAGLE3)

DEEPSPEC_BACKBONES = {"Qwen3DSparkModel": "qwen3", "Gemma4DSparkModel": "gemma4_text"}
DEEPSPEC_EAGLE3_BACKBONES = {"Qwen3Eagle3Model": "qwen3", "Gemma4Eagle3Model": "gemma4_text"}

# Drafters of other layouts that their architecture alone gives away, for messages.
FOREIGN_ARCHITECTURES = {
    "Lfm2DSparkDraftModel": "a LiquidAI LFM2 DSpark drafter",
    "K3DSparkModel": "a Kimi K3 DSpark drafter",
    "Qwen35DSparkModel": "a gated-attention Qwen3.5 DSpark drafter",
    "DFlashDraftModel": "a z-lab DFlash drafter or a relative of it",
    "DSparkDraftModel": "a DSpark drafter of another trainer",
    "LlamaForCausalLMEagle3": "an EAGLE-3 drafter",
    "Eagle3LlamaForCausalLM": "an EAGLE-3 drafter",
    "Eagle3DeepseekV2ForCausalLM": "an EAGLE-3 drafter",
    "Eagle3DraftModel": "an EAGLE-3 drafter",
}

# Host model types under which DeepSpec drafters are published (the config is a copy of the
# target's).
_DEEPSPEC_MODEL_TYPES = {
    "qwen3": ("qwen3",),
    "gemma4_text": ("gemma4_text", "gemma4_unified_text"),
}

_QWEN3_KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "hidden_act",
    "max_position_embeddings",
    "initializer_range",
    "attention_bias",
    "attention_dropout",
    "layer_types",
    "sliding_window",
    "use_sliding_window",
    "max_window_layers",
    "rope_parameters",
    "rope_theta",
    "rope_scaling",
)
_GEMMA4_KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "num_global_key_value_heads",
    "head_dim",
    "global_head_dim",
    "attention_k_eq_v",
    "rms_norm_eps",
    "hidden_activation",
    "max_position_embeddings",
    "initializer_range",
    "attention_bias",
    "attention_dropout",
    "sliding_window",
    "rope_parameters",
)
_REQUIRED_DRAFTER_KEYS = (
    "block_size",
    "mask_token_id",
    "target_layer_ids",
    "num_target_layers",
    "vocab_size",
    "markov_rank",
    "enable_confidence_head",
)
_REQUIRED_BACKBONE_KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
)
_DEEPSPEC_TRAINING_KEYS = ("num_anchors", "target_model_type", "target_text_model_type")
_DEEPSPEC_EAGLE3_KEYS = (
    "draft_num_hidden_layers",
    "step_loss_decay",
    "target_model_name_or_path",
    "ttt_length",
)


class UnsupportedCheckpointError(ValueError):
    """
    The checkpoint is not a drafter layout that this version reads; the message names what it is.
    """


def detect_dialect(
    raw: dict[str, Any], source: str, tensor_names: Collection[str] | None = None
) -> str:
    """
    The layout of a checkpoint: `"dspark"` and `"dspark_eagle3"` (this library's), `"deepspec"`,
    `"deepspec_eagle3"` or `"deepseek_v4"` (embedded in a target).

    Args:
        raw (`dict`): config.json as it is.
        source (`str`): repository or folder, for messages.
        tensor_names (collection of `str`, *optional*): names of the stored tensors, where known.

    Raises:
        [`UnsupportedCheckpointError`]: any other layout, named.
    """
    for config_class, dialect in ((DSparkConfig, DSPARK), (Eagle3Config, EAGLE3)):
        if raw.get("model_type") == config_class.model_type:
            return dialect
    refusal = deepseek_v4.refusal(raw, tensor_names)
    if refusal is None and deepseek_v4.is_target(raw):
        return DEEPSEEK_V4
    refusal = refusal or _foreign_dialect(raw, tensor_names or ())
    if refusal is None and _architecture(raw) in DEEPSPEC_BACKBONES:
        return DEEPSPEC
    if refusal is None and deepspec_eagle3_backbone(raw):
        return DEEPSPEC_EAGLE3
    if refusal is None:
        refusal = (
            f"an unknown layout (architectures {raw.get('architectures')!r}, model_type "
            f"{raw.get('model_type')!r}). If it is an ordinary model, load it with "
            "AutoModelForCausalLM"
        )
        if "auto_map" in raw:
            refusal += "; it ships its own code, and this library never runs code of a repository"
    raise UnsupportedCheckpointError(
        f"{source} is {refusal}. This version reads its own layout and DeepSpec DSpark, DFlash and "
        f"Eagle3 drafters ({', '.join((*DEEPSPEC_BACKBONES, *DEEPSPEC_EAGLE3_BACKBONES))}), and drafters "
        "inside DeepSeek-V4 targets."
    )


def is_foreign_drafter(raw: dict[str, Any]) -> bool:
    """
    Whether a config.json describes a drafter in somebody else's layout, supported or not.

    Ours is not foreign, and what the host runs by itself is not ours to judge.
    """
    if is_own_layout(raw) or raw.get("model_type") == "muse_glimmer_assistant":
        return False
    is_deepspec = _architecture(raw) in DEEPSPEC_BACKBONES or bool(deepspec_eagle3_backbone(raw))
    return is_deepspec or _foreign_dialect(raw, ()) is not None


def is_own_layout(raw: dict[str, Any]) -> bool:
    """Whether a config.json was written by this library."""
    return raw.get("model_type") in (DSparkConfig.model_type, Eagle3Config.model_type)


def is_eagle3(raw: dict[str, Any]) -> bool:
    """Whether a config.json describes a drafter that `Eagle3Drafter` reads."""
    return raw.get("model_type") == Eagle3Config.model_type or bool(deepspec_eagle3_backbone(raw))


def deepspec_eagle3_backbone(raw: dict[str, Any]) -> str | None:
    """Backbone of a DeepSpec Eagle3 drafter; `None` for everything else."""
    architecture = _architecture(raw)
    if architecture == "Eagle3DraftModel" and "ttt_length" in raw:
        is_gemma = raw.get("model_type") in _DEEPSPEC_MODEL_TYPES["gemma4_text"]
        return "gemma4_text" if is_gemma else "qwen3"
    return DEEPSPEC_EAGLE3_BACKBONES.get(architecture or "")


def normalise(
    raw: dict[str, Any], dialect: str, source: str, tensor_names: Collection[str]
) -> DSparkConfig:
    """
    The checkpoint's facts as a [`DSparkConfig`].

    Embedding, head and confidence bias are decided by the presence of their tensors, in every
    dialect.

    Raises:
        `ValueError`: a required key is missing, or keys contradict each other.
    """
    if dialect == DSPARK:
        require_keys(raw, ("backbone_config",), source)
        return DSparkConfig.from_dict(raw)
    require_keys(raw, _REQUIRED_DRAFTER_KEYS, source)
    rank, has_confidence = raw["markov_rank"], bool(raw["enable_confidence_head"])
    if rank:
        require_keys(raw, ("markov_head_type",), source)
    if has_confidence:
        require_keys(raw, ("confidence_head_with_markov",), source)
    backbone = DEEPSPEC_BACKBONES[raw["architectures"][0]]
    return DSparkConfig(
        backbone_config=deepspec_backbone(raw, backbone, source),
        block_size=raw["block_size"],
        mask_token_id=raw["mask_token_id"],
        target_layer_ids=raw["target_layer_ids"],
        num_target_layers=raw["num_target_layers"],
        target_hidden_size=raw["hidden_size"],
        vocab_size=raw["vocab_size"],
        anchor_predicts=True,
        markov_head_type=raw["markov_head_type"] if rank else None,
        markov_rank=rank,
        confidence_head=has_confidence,
        confidence_head_with_markov=has_confidence and bool(raw["confidence_head_with_markov"]),
        confidence_head_bias="confidence_head.proj.bias" in tensor_names,
        final_logit_softcapping=raw.get("final_logit_softcapping")
        if backbone == "gemma4_text"
        else None,
        stores_input_embeddings="embed_tokens.weight" in tensor_names,
        stores_output_embeddings="lm_head.weight" in tensor_names,
        architectures=["DSparkDrafter"],
        dtype=raw.get("dtype", raw.get("torch_dtype")),
        **{key: raw.get(key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")},
    )


def ignored_keys(raw: dict[str, Any], dialect: str) -> list[str]:
    """Keys of a foreign config.json that this library does not read, for `dspark-hf inspect`."""
    if dialect in (DSPARK, EAGLE3, DEEPSEEK_V4):
        # The config of a target is for the most part about the target.
        return []
    read = set(_QWEN3_KEYS + _GEMMA4_KEYS + _REQUIRED_DRAFTER_KEYS + _DEEPSPEC_TRAINING_KEYS)
    if dialect == DEEPSPEC_EAGLE3:
        read |= set(_DEEPSPEC_EAGLE3_KEYS)
    read |= {
        "architectures",
        "model_type",
        "markov_head_type",
        "confidence_head_with_markov",
        "dtype",
        "torch_dtype",
        "final_logit_softcapping",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
    }
    return sorted(set(raw) - read)


def _architecture(raw: dict[str, Any]) -> str | None:
    architectures = raw.get("architectures")
    first = architectures[0] if isinstance(architectures, list) and architectures else None
    return first if isinstance(first, str) else None


def _foreign_dialect(raw: dict[str, Any], tensor_names: Collection[str]) -> str | None:
    """
    Rules 1 to 11 of the detection order, for layouts that are recognised in order to be refused.
    """
    architecture, dflash = _architecture(raw), raw.get("dflash_config")
    dflash = dflash if isinstance(dflash, dict) else {}
    if "speculators_model_type" in raw:
        return (
            f"a speculators checkpoint (speculators_model_type {raw['speculators_model_type']!r})"
        )
    if any(key.startswith("dspark_") for key in raw) or any(
        name.startswith(("mtp.", "mtp_dspark.")) for name in tensor_names
    ):
        return "a target with an embedded DSpark drafter (dspark_* keys or mtp.* tensors)"
    if architecture in DEEPSPEC_BACKBONES or deepspec_eagle3_backbone(raw):
        return None
    if "projector_type" in dflash:
        projector = dflash["projector_type"]
        return f"a drafter with dflash_config.projector_type {projector!r} (SpecForge or ModelOpt)"
    if architecture in FOREIGN_ARCHITECTURES:
        return f"{FOREIGN_ARCHITECTURES[architecture]} ({architecture})"
    if raw.get("model_type") == "k3_dspark":
        return "a Kimi K3 DSpark drafter (model_type 'k3_dspark')"
    if raw.get("model_type") == "muse_glimmer_assistant":
        return "a Muse Glimmer assistant, which the host library loads and runs itself"
    if dflash:
        return "a DFlash drafter without a known architecture (dflash_config)"
    if architecture == "LlamaForCausalLM" and "draft_vocab_size" in raw:
        return "an EAGLE-3 drafter (LlamaForCausalLM with draft_vocab_size)"
    if any(name.startswith("midlayer.") for name in tensor_names):
        return "an EAGLE-3 drafter (midlayer.* tensors)"
    return None


def require_keys(raw: dict[str, Any], keys: Collection[str], source: str) -> None:
    """Raise `ValueError` naming the keys that config.json lacks."""
    missing = [key for key in keys if raw.get(key) is None]
    if missing:
        raise ValueError(
            f"{source}: config.json lacks {', '.join(missing)}. These were fixed when the drafter "
            "was trained and are not guessed; take them from the original checkpoint."
        )


def deepspec_backbone(raw: dict[str, Any], backbone: str, source: str) -> dict[str, Any]:
    """
    Config fields of the draft layers of a DeepSpec drafter, `"qwen3"` or `"gemma4_text"`.

    Raises:
        `ValueError`: a key is missing, or contradicts the architecture.
    """
    require_keys(raw, _REQUIRED_BACKBONE_KEYS, source)
    if raw.get("model_type") not in _DEEPSPEC_MODEL_TYPES[backbone]:
        raise ValueError(
            f"{source}: architecture {_architecture(raw)} goes with model_type "
            f"{' or '.join(_DEEPSPEC_MODEL_TYPES[backbone])}, found "
            f"{raw.get('model_type')!r}. The config.json was edited or belongs to another "
            "checkpoint."
        )
    return _qwen3_backbone(raw, source) if backbone == "qwen3" else _gemma4_backbone(raw, source)


def _qwen3_backbone(raw: dict[str, Any], source: str) -> dict[str, Any]:
    fields = {key: raw[key] for key in _QWEN3_KEYS if key in raw}
    rope = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    if rope.get("rope_theta") is None and raw.get("rope_theta") is None:
        raise ValueError(
            f"{source}: config.json states no rope_theta (looked in rope_parameters, rope_scaling "
            "and at top level). It must be the value the drafter was trained with; add it."
        )
    layer_types = set(raw.get("layer_types") or ())
    if not layer_types <= {"full_attention", "sliding_attention"}:
        raise ValueError(
            f"{source}: layer_types has {sorted(layer_types)}; Qwen3 draft layers are "
            "full_attention or sliding_attention. The list was copied from another model."
        )
    # The host ignores the window of a sliding layer unless both other keys are set.
    window, use_window = raw.get("sliding_window"), raw.get("use_sliding_window")
    if "sliding_attention" in layer_types and not (window and use_window):
        raise ValueError(
            f"{source}: layer_types has sliding_attention layers but sliding_window is "
            f"{window!r} and use_sliding_window is {use_window!r}. Give the window the drafter "
            "was trained with, and use_sliding_window true."
        )
    return {"model_type": "qwen3", "vocab_size": raw["vocab_size"], **fields}


def _gemma4_backbone(raw: dict[str, Any], source: str) -> dict[str, Any]:
    if raw.get("enable_moe_block") or raw.get("hidden_size_per_layer_input"):
        raise ValueError(
            f"{source}: Gemma 4 drafters have no MoE blocks and no per-layer inputs, but "
            f"config.json says enable_moe_block={raw.get('enable_moe_block')}, "
            f"hidden_size_per_layer_input={raw.get('hidden_size_per_layer_input')}."
        )
    require_keys(raw, ("global_head_dim", "attention_k_eq_v", "rope_parameters"), source)
    if raw["attention_k_eq_v"]:
        require_keys(raw, ("num_global_key_value_heads",), source)
    rope = raw["rope_parameters"].get("full_attention")
    if not isinstance(rope, dict) or rope.get("rope_theta") is None:
        raise ValueError(
            f"{source}: rope_parameters.full_attention.rope_theta is missing; Gemma 4 draft "
            "layers are full-attention layers and need it."
        )
    fields = {key: raw[key] for key in _GEMMA4_KEYS if key in raw}
    # The reference builds every draft layer as a full-attention layer, whatever the target's
    # pattern is.
    fields["layer_types"] = ["full_attention"] * raw["num_hidden_layers"]
    fields["rope_parameters"] = {"full_attention": rope}
    return {
        "model_type": "gemma4_text",
        "vocab_size": raw["vocab_size"],
        "hidden_size_per_layer_input": 0,
        "tie_word_embeddings": False,
        **fields,
    }

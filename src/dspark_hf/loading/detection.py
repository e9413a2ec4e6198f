"""
Which layout a checkpoint is in.

Detection looks at the raw config.json, and at tensor names where they are known, in a fixed order,
because the same strings mean different things in different layouts. Nothing is guessed: an unknown
layout is refused, and a known one that is not read is refused by name.
"""

from collections.abc import Collection
from typing import Any

# This library's own layouts; the names are the model types in config.json.
DSPARK = "dspark"
EAGLE3 = "dspark_eagle3"
OWN_LAYOUTS = (DSPARK, EAGLE3)
DEEPSPEC = "deepspec"
DEEPSPEC_EAGLE3 = "deepspec_eagle3"
SPECULATORS = "speculators"
SPECULATORS_EAGLE3 = "speculators_eagle3"
CHAIN_EAGLE3 = "eagle3"
SPECFORGE = "specforge"
MODELOPT = "modelopt"
LFM2 = "lfm2"
DFLASH = "dflash"
FORK = "fork"
# A drafter inside its target's checkpoint.
DEEPSEEK_V4 = "deepseek_v4"

# Layouts that `Eagle3Drafter` reads; the others are `DSparkDrafter`'s.
EAGLE3_DIALECTS = (EAGLE3, DEEPSPEC_EAGLE3, SPECULATORS_EAGLE3, CHAIN_EAGLE3)

READ_LAYOUTS = (
    "its own layout, DeepSpec DSpark, DFlash and Eagle3, speculators DSpark, DFlash and Eagle3, "
    "SpecForge DSpark, ModelOpt DSpark, LiquidAI LFM2.5 DSpark, z-lab DFlash with its relatives, "
    "EAGLE-3 of SafeAILab, SpecForge and ModelOpt, and the DSpark drafters inside DeepSeek-V4 "
    "targets"
)

DEEPSPEC_BACKBONES = {"Qwen3DSparkModel": "qwen3", "Gemma4DSparkModel": "gemma4_text"}
_DEEPSPEC_EAGLE3_BACKBONES = {"Qwen3Eagle3Model": "qwen3", "Gemma4Eagle3Model": "gemma4_text"}
_GEMMA4_MODEL_TYPES = ("gemma4_text", "gemma4_unified_text")

_EAGLE3 = "an EAGLE-3 drafter"
_CHAIN_ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
HOST_MODELS = ("muse_glimmer_assistant",)

# Architectures of drafters, for the host's auto classes and for messages.
DRAFTER_ARCHITECTURES = {
    **dict.fromkeys(DEEPSPEC_BACKBONES, "a DeepSpec drafter"),
    "DSparkSpeculator": "a speculators DSpark drafter",
    "DFlashSpeculator": "a speculators DFlash drafter",
    "Eagle3Speculator": "a speculators EAGLE-3 drafter",
    "Lfm2DSparkDraftModel": "a LiquidAI LFM2 DSpark drafter",
    "DFlashDraftModel": "a DFlash drafter or a relative of it",
    "DSparkDraftModel": "a DSpark drafter of another trainer",
    "K3DSparkModel": "a Kimi K3 DSpark drafter with latent attention",
    "Qwen35DSparkModel": "a gated-attention Qwen3.5 DSpark drafter",
    "DSparkV41Model": "a DSpark V4.1 drafter",
    "DominoDraftModel": "a Domino drafter",
    "DFlash2DraftModel": "a DFlash2 drafter",
    "DFlareDraftModel": "a DFlare drafter",
    "DFlyDraftModel": "a DFly drafter",
    "Qwen3Eagle3Model": "a DeepSpec Eagle3 drafter",
    "Gemma4Eagle3Model": "a DeepSpec Eagle3 drafter",
    "LlamaForCausalLMEagle3": _EAGLE3,
    "Eagle3LlamaForCausalLM": _EAGLE3,
    "Eagle3DeepseekV2ForCausalLM": _EAGLE3,
    "Eagle3DraftModel": _EAGLE3,
}

# Architectures that are recognised in order to be refused, and what to use instead.
_REFUSED_ARCHITECTURES = {
    "K3DSparkModel": "latent attention is not built; serve it with SGLang or TensorRT-LLM",
    "Qwen35DSparkModel": "gated attention is not built; take a DeepSpec drafter for the target",
    "DSparkV41Model": "its layout is not published; use the engine of its author",
    "DominoDraftModel": "another algorithm; serve it with SGLang",
    "DFlash2DraftModel": "another algorithm; serve it with vLLM",
    "DFlareDraftModel": "another algorithm; use the engine of its author",
    "DFlyDraftModel": "another algorithm; use the engine of its author",
    "Eagle3DeepseekV2ForCausalLM": "latent attention is not built; serve it with vLLM",
    "Eagle3DraftModel": "its layout is not known without ttt_length; serve it with SGLang",
}

# Keys that no ordinary model has.
_DRAFTER_KEYS = ("markov_rank", "target_layer_ids", "ttt_length", "draft_vocab_size")
# What names of a Markov head's tensors start with.
_MARKOV_HEADS = ("markov_head.", "markov_w1.", "logit_head.")

# What names of EAGLE-3's one layer start with, and no model's.
_EAGLE3_LAYER = ("midlayer.", "layers.0.hidden_norm.")

# Other algorithms in the speculators container.
_REFUSED_SPECULATORS = {
    "eagle": "an EAGLE drafter",
    "peagle": "a P-EAGLE drafter",
    "mtp": "a multi-token-prediction head",
    "dflash2": "a DFlash2 drafter",
    "dsv4_dspark": "a DSpark drafter of DeepSeek-V4 shape",
    "kv_native_dspark": "a KV-native DSpark drafter",
    "dflare": "a DFlare drafter",
    "dfly": "a DFly drafter",
}


class UnsupportedCheckpointError(ValueError):
    """
    The checkpoint is not a drafter layout that this version reads; the message names what it is.
    """


def detect_dialect(
    raw: dict[str, Any], source: str, tensor_names: Collection[str] | None = None
) -> str:
    """
    The layout of a checkpoint, one of the constants of this module.

    Args:
        raw (`dict`): config.json as it is.
        source (`str`): repository or folder, for messages.
        tensor_names (collection of `str`, *optional*):
            Names of the stored tensors, where known. Without them, layouts that only their tensors
            tell apart pass as the commoner one.

    Raises:
        [`UnsupportedCheckpointError`]: any other layout, named.
    """
    names = tensor_names or ()
    refusal = refused_layout(raw, names)
    if refusal is not None:
        what, instead = refusal
        raise UnsupportedCheckpointError(
            f"{source} is {what}, which is not read: {instead}. This version reads {READ_LAYOUTS}."
        )
    dialect = _readable_dialect(raw, names)
    if dialect is not None:
        return dialect
    marks = [key for key in _DRAFTER_KEYS if key in raw]
    hint = "If it is an ordinary model, load it with AutoModelForCausalLM"
    if marks:
        hint = (
            f"It has keys of a drafter ({', '.join(marks)}), and architectures does not say whose: "
            "set it to what its author published"
        )
    if "auto_map" in raw:
        hint += "; it ships its own code, and this library never runs code of a repository"
    raise UnsupportedCheckpointError(
        f"{source} is in an unknown layout (architectures {raw.get('architectures')!r}, model_type "
        f"{raw.get('model_type')!r}). {hint}. This version reads {READ_LAYOUTS}."
    )


def is_foreign_drafter(raw: dict[str, Any], names: Collection[str] = ()) -> bool:
    """
    Whether a config.json describes a drafter in somebody else's layout, supported or not.

    Ours is not foreign, and what the host runs by itself is not ours to judge.
    """
    if is_own_layout(raw) or raw.get("model_type") in HOST_MODELS:
        return False
    return refused_layout(raw, names) is not None or _readable_dialect(raw, names) is not None


def may_be_eagle3(raw: dict[str, Any]) -> bool:
    """
    Whether a config.json is that of a Llama with one layer, which an EAGLE-3 drafter may have too:
    only tensor names tell them apart.
    """
    is_llama = raw.get("model_type") == "llama" and raw.get("num_hidden_layers") == 1
    return is_llama and architecture_of(raw) in (None, "LlamaForCausalLM")


def drafter_of_tensors(names: Collection[str]) -> tuple[str, bool] | None:
    """
    A name that gives a drafter away whose config.json does not, and whether it is an EAGLE-3 one;
    `None` for the tensors of ordinary models.
    """
    if "fc.weight" not in names:
        return None
    if _has(names, *_EAGLE3_LAYER):
        return next(name for name in sorted(names) if name.startswith(_EAGLE3_LAYER)), True
    return ("hidden_norm.weight", False) if "hidden_norm.weight" in names else None


def is_own_layout(raw: dict[str, Any]) -> bool:
    """
    Whether a config.json was written by this library. Its model type alone does not tell: some of
    SpecForge's files say `dspark` too.
    """
    is_others = "speculators_model_type" in raw or architecture_of(raw) in DRAFTER_ARCHITECTURES
    return raw.get("model_type") in OWN_LAYOUTS and not is_others


def is_eagle3(raw: dict[str, Any], names: Collection[str] = ()) -> bool:
    """Whether a config.json describes a drafter that `Eagle3Drafter` reads."""
    return refused_layout(raw, names) is None and _readable_dialect(raw, names) in EAGLE3_DIALECTS


def deepspec_eagle3_backbone(raw: dict[str, Any]) -> str | None:
    """Backbone of a DeepSpec Eagle3 drafter; `None` for everything else."""
    architecture = architecture_of(raw)
    if architecture == "Eagle3DraftModel" and "ttt_length" in raw:
        return "gemma4_text" if raw.get("model_type") in _GEMMA4_MODEL_TYPES else "qwen3"
    return _DEEPSPEC_EAGLE3_BACKBONES.get(architecture or "")


def architecture_of(raw: dict[str, Any]) -> str | None:
    """The first entry of `architectures`, if there is a sensible one."""
    architectures = raw.get("architectures")
    first = architectures[0] if isinstance(architectures, list) and architectures else None
    return first if isinstance(first, str) else None


def dflash_section(raw: dict[str, Any]) -> dict[str, Any]:
    """`dflash_config`, empty if absent or not an object."""
    section = raw.get("dflash_config")
    return section if isinstance(section, dict) else {}


def _readable_dialect(raw: dict[str, Any], names: Collection[str]) -> str | None:
    """The layout of a checkpoint that nothing refuses."""
    architecture, dflash = architecture_of(raw), dflash_section(raw)
    if is_own_layout(raw):
        return str(raw["model_type"])
    if raw.get("model_type") == DEEPSEEK_V4:
        return DEEPSEEK_V4
    if "speculators_model_type" in raw:
        is_eagle3 = raw["speculators_model_type"] == "eagle3"
        return SPECULATORS_EAGLE3 if is_eagle3 else SPECULATORS
    if architecture in DEEPSPEC_BACKBONES:
        return DEEPSPEC
    if deepspec_eagle3_backbone(raw):
        return DEEPSPEC_EAGLE3
    if dflash.get("projector_type") == "dspark":
        flat = "shift_label" in dflash or "markov_w1.weight" in names
        return MODELOPT if flat else SPECFORGE
    if architecture == "Lfm2DSparkDraftModel":
        return LFM2
    if architecture in ("DFlashDraftModel", "DSparkDraftModel"):
        has_markov = raw.get("markov_rank") or dflash.get("markov_rank")
        # A DSpark model is no DFlash one without its Markov head: its blocks may be of either kind.
        is_dspark = architecture == "DSparkDraftModel" or _has(names, *_MARKOV_HEADS)
        return FORK if has_markov or is_dspark else DFLASH
    is_reduced_llama = architecture == "LlamaForCausalLM" and "draft_vocab_size" in raw
    if architecture in _CHAIN_ARCHITECTURES or is_reduced_llama or _has(names, *_EAGLE3_LAYER):
        return CHAIN_EAGLE3
    return None


def refused_layout(raw: dict[str, Any], names: Collection[str]) -> tuple[str, str] | None:
    """What a checkpoint is and what to use instead, if it is of a kind that is not read."""
    architecture, dflash = architecture_of(raw), dflash_section(raw)
    if is_own_layout(raw):
        return None
    if "speculators_model_type" in raw:
        return _refused_speculators(raw["speculators_model_type"])
    if any(name.startswith("deepseek_v4") for name in _model_types(raw)):
        return _refused_deepseek_v4(raw, names)
    if any(key.startswith("dspark_") for key in raw) or _has(names, "mtp.", "mtp_dspark."):
        return (
            "a target with an embedded DSpark drafter (dspark_* keys or mtp.* tensors)",
            "load it as a target",
        )
    if "log_snr_conditioning" in raw:
        return "a Bonsai drafter (log_snr_conditioning)", "use the engine of its author"
    if architecture in DEEPSPEC_BACKBONES or deepspec_eagle3_backbone(raw):
        return None
    projector = dflash.get("projector_type")
    if projector not in (None, "dspark", "dflash"):
        return (
            f"a drafter with dflash_config.projector_type {projector!r}",
            "another algorithm; use the engine of its author",
        )
    if raw.get("model_type") == "k3_dspark":
        architecture = "K3DSparkModel"
    if raw.get("enable_qwen35_gated_q_proj"):
        architecture = "Qwen35DSparkModel"
    if architecture in _REFUSED_ARCHITECTURES:
        what = f"{DRAFTER_ARCHITECTURES[architecture]} ({architecture})"
        return what, _REFUSED_ARCHITECTURES[architecture]
    if raw.get("model_type") in HOST_MODELS:
        return (
            "a Muse Glimmer assistant",
            "the host library loads and runs it itself, with AutoModelForCausalLM and "
            "speculation_type='dflash'",
        )
    if "aux_hidden_norms" in dflash or _has(names, "aux_hidden_norms.", ".qkv_proj.", ".g_proj."):
        return "a Laguna DFlash drafter (fused and gated attention)", "serve it with vLLM"
    known = ("DFlashDraftModel", "DSparkDraftModel", "Lfm2DSparkDraftModel")
    if dflash and architecture not in known and projector != "dspark":
        return (
            "a DFlash drafter without a known architecture (dflash_config)",
            "set architectures to what its author trained",
        )
    return None


def _refused_speculators(kind: Any) -> tuple[str, str] | None:
    if kind in ("dspark", "dflash", "eagle3"):
        return None
    name = _REFUSED_SPECULATORS.get(str(kind), "a drafter of an unknown algorithm")
    return (
        f"{name} in a speculators checkpoint (speculators_model_type {kind!r})",
        "serve it with vLLM",
    )


# The tensor that a DSpark drafter has, and an ordinary multi-token-prediction block has not.
_DEEPSEEK_V4_MARK = "mtp.0.main_proj.weight"


def _model_types(raw: dict[str, Any]) -> tuple[str, str]:
    text = raw.get("text_config")
    nested = text.get("model_type") if isinstance(text, dict) else None
    return str(raw.get("model_type")), str(nested)


def _refused_deepseek_v4(raw: dict[str, Any], names: Collection[str]) -> tuple[str, str] | None:
    if any(name.startswith("deepseek_v41") for name in _model_types(raw)):
        return (
            "a DeepSeek-V4.1 checkpoint",
            "its drafter is built otherwise (taps before the layer, hyper-connections shifted by "
            "one, other quantisation blocks); serve it with vLLM or SGLang",
        )
    instead = (
        "take the repository whose name ends in -DSpark, or Flash-0731, Pro-0813 or "
        "Flash-Vision-Exp"
    )
    if not raw.get("dspark_block_size"):
        return "a DeepSeek-V4 target without dspark_block_size, so without a drafter", instead
    if names and _DEEPSEEK_V4_MARK not in names:
        return (
            f"a DeepSeek-V4 target whose mtp.* tensors lack {_DEEPSEEK_V4_MARK}, an ordinary "
            "multi-token-prediction block",
            instead,
        )
    return None


def _has(names: Collection[str], *parts: str) -> bool:
    """Whether a tensor name starts with one of `parts`, or contains one that starts with a dot."""
    return any(
        part in name if part.startswith(".") else name.startswith(part)
        for name in names
        for part in parts
    )

"""Eagle3 checkpoints in our normal form: DeepSpec's, and the chain drafters of other trainers."""

from typing import Any

from ..configuration_eagle3 import Eagle3Config
from .deepspec import common_facts, deepspec_body
from .detection import UnsupportedCheckpointError, deepspec_eagle3_backbone
from .qwen3_body import read_body
from .reading import (
    ConfigReader,
    Reading,
    draft_vocabulary,
    hidden_state_taps,
    refuse_block_layout,
    refuse_negative_taps,
    taps_by_rule,
    vocabulary_tensors,
)

_TRAINING_KEYS = ("draft_num_hidden_layers", "step_loss_decay", "target_model_name_or_path")
# Steps that the trainers of this family unroll, which few files record.
_UNROLLED = 7
# The rotary base of the original trainer, whatever the target's is.
_ORIGINAL_THETA = 10_000.0


def read_eagle3(reader: ConfigReader, layout: str | None) -> Reading:
    """
    The drafter that a DeepSpec Eagle3 checkpoint describes.

    Embedding and head are decided by the presence of their tensors.

    Raises:
        `ValueError`: a required key is missing, or keys contradict each other.
    """
    refuse_block_layout(reader, layout)
    reader.ignore(*_TRAINING_KEYS)
    block_size = reader.require("block_size", "ttt_length")
    taps = reader.require("target_layer_ids", "target_layer_ids")
    refuse_negative_taps(reader, taps)
    depth = reader.require("num_target_layers", "num_target_layers")
    vocab_size = reader.require("vocab_size", "vocab_size")
    size = reader.get("draft_vocab_size", "draft_vocab_size")
    if size not in (None, vocab_size):
        raise ValueError(
            f"{reader.source}: DeepSpec Eagle3 drafters draft every token of their target, but "
            f"draft_vocab_size is {size} and vocab_size {vocab_size}. The config.json was edited "
            "or belongs to another checkpoint."
        )
    backbone = str(deepspec_eagle3_backbone(reader.raw))
    body = deepspec_body(reader, backbone)
    is_gemma = backbone == "gemma4_text"
    cap = reader.get("final_logit_softcapping", "final_logit_softcapping") if is_gemma else None
    config = Eagle3Config(
        backbone_config=body,
        block_size=block_size,
        target_layer_ids=taps,
        num_target_layers=depth,
        target_hidden_size=body["hidden_size"],
        vocab_size=vocab_size,
        final_logit_softcapping=cap,
        architectures=["Eagle3Drafter"],
        **common_facts(reader),
    )
    return Reading(config)


def read_chain_eagle3(reader: ConfigReader, layout: str | None, depth: int | None) -> Reading:
    """
    The drafter that an EAGLE-3 checkpoint of SafeAILab, SpecForge or ModelOpt describes.

    Their engines draft trees with it; here it drafts one chain.

    Args:
        depth (`int`, *optional*):
            Decoder layers of the target, for files that leave the taps to a rule over them.

    Raises:
        `ValueError`: a required key is missing, keys contradict each other, or the taps need the
            target's depth.
    """
    refuse_block_layout(reader, layout)
    renames = {
        name: "layers.0." + name.removeprefix("midlayer.")
        for name in reader.tensors
        if name.startswith("midlayer.")
    }
    names = {renames.get(name, name) for name in reader.tensors}
    body = _chain_body(reader, names)
    stated = reader.get("num_target_layers", "num_target_layers")
    _refuse_variants(reader)
    if reader.flag("features", "eagle_config.use_aux_hidden_state") is False:
        raise UnsupportedCheckpointError(
            f"{reader.source} is an EAGLE-3 drafter of the target's last hidden state alone "
            "(eagle_config.use_aux_hidden_state is false), which is not read: it has no taps. "
            "Serve it with SGLang."
        )
    draft_vocab_size = draft_vocabulary(reader, body["vocab_size"])
    vocabulary = vocabulary_tensors(reader, draft_vocab_size)
    vocabulary["renames"] |= renames
    block_size = reader.get("block_size", "ttt_length")
    if block_size is None:
        block_size = _UNROLLED
        reader.by_rule("block_size", f"{_UNROLLED} steps, which these trainers unroll")
    config = Eagle3Config(
        backbone_config=body,
        feature_norm=_feature_norm(reader, names),
        norm_before_residual=bool(
            reader.flag(
                "norm_before_residual", "norm_before_residual", "eagle_config.norm_before_residual"
            )
        ),
        recycles_normed_output=_recycles_normed_output(reader),
        block_size=block_size,
        target_layer_ids=_chain_taps(reader, stated or depth),
        num_target_layers=stated or depth,
        target_hidden_size=reader.get("target_hidden_size", "target_hidden_size")
        or body["hidden_size"],
        vocab_size=body["vocab_size"],
        draft_vocab_size=draft_vocab_size,
        architectures=["Eagle3Drafter"],
        **common_facts(reader),
    )
    return Reading(config, **vocabulary)


def _refuse_variants(reader: ConfigReader) -> None:
    """ModelOpt's switches for another layer or another algorithm, whatever tensors there are."""
    steps = reader.get("parallel_draft_step", "eagle_config.parallel_draft_step", default=1)
    found = [] if steps == 1 else [f"parallel_draft_step {steps!r}"]
    for key in ("use_input_layernorm_in_first_layer", "use_last_layernorm"):
        if reader.flag(key, f"eagle_config.{key}") is False:
            found.append(f"{key} false")
    if found:
        raise UnsupportedCheckpointError(
            f"{reader.source} is an EAGLE-3 drafter with eagle_config.{', '.join(found)}, which is "
            "not read: its rows are computed otherwise. Serve it with TensorRT-LLM or vLLM."
        )


def _feature_norm(reader: ConfigReader, names: set[str]) -> str | None:
    """Which norm stands in front of the context projection: the tensors tell, and keys agree."""
    kinds = {
        "fc_norm": any(name.startswith("fc_norm.") for name in names),
        "norm_before_fc": "input_norm.weight" in names,
    }
    for key, stored in kinds.items():
        stated = reader.flag("feature_norm", key, f"eagle_config.{key}")
        if stated is not None and stated != stored:
            raise ValueError(
                f"{reader.source}: config.json says {key} = {stated!r}, and the weights "
                f"{'hold' if stored else 'lack'} the tensors of that norm. The two come from "
                "different checkpoints."
            )
    reader.by_rule("feature_norm", "fc_norm.* and input_norm tensors")
    return "per_tap" if kinds["fc_norm"] else "joint" if kinds["norm_before_fc"] else None


def _recycles_normed_output(reader: ConfigReader) -> bool:
    """
    The engines' meaning of `norm_output`, and of SpecForge since its pull request 879. Before,
    SpecForge's key said whether the head reads normed states, which an EAGLE-3 head always does.
    """
    stated = reader.flag("recycles_normed_output", "norm_output", "eagle_config.norm_output")
    if stated is not None:
        reader.warn(
            f"norm_output is {stated}: read as the engines do, that the row behind a drafted token "
            f"takes the {'normed' if stated else 'un-normed'} output. In files of SpecForge from "
            "before September 2026 the key is about the head instead; if acceptance is poor, "
            "remove it."
        )
    return bool(stated)


def _chain_body(reader: ConfigReader, names: set[str]) -> dict[str, Any]:
    """One Llama layer, or one with query and key norms if the file has them."""
    body = read_body(reader, defaults=_chain_defaults(reader), default_theta=_ORIGINAL_THETA)
    has_norms = "layers.0.self_attn.k_norm.weight" in names
    reader.by_rule("backbone", "q_norm and k_norm tensors")
    if body["num_hidden_layers"] != 1:
        reader.warn(
            f"num_hidden_layers is {body['num_hidden_layers']}; this layout has one layer, and it "
            "is what is read."
        )
    if "sliding_attention" in body.get("layer_types", ()):
        reader.warn(
            "layer_types has sliding_attention; the one layer of this layout attends to all "
            "positions, as its references run it."
        )
    # A copied list of the target's layers says nothing about the one layer here.
    fields = {key: value for key, value in body.items() if key != "layer_types"}
    return {**fields, "num_hidden_layers": 1, "model_type": "qwen3" if has_norms else "llama"}


def _chain_defaults(reader: ConfigReader) -> dict[str, Any]:
    """What the reference derives: a Llama layer's head size, and as many key as query heads."""
    width, heads = reader.raw.get("hidden_size"), reader.raw.get("num_attention_heads")
    if not isinstance(width, int) or not isinstance(heads, int) or heads < 1:
        return {}
    return {"head_dim": width // heads, "num_key_value_heads": heads}


def _chain_taps(reader: ConfigReader, depth: int | None) -> list[int]:
    # At the top level ids count hidden states, inside `eagle_config` layer outputs.
    key = "eagle_aux_hidden_state_layer_ids"
    flat = None if reader.raw.get(key) is None else hidden_state_taps(reader, key)
    nested = reader.get("target_layer_ids", f"eagle_config.{key}", "target_layer_ids")
    refuse_negative_taps(reader, nested)
    if nested is None:
        return taps_by_rule(reader, depth) if flat is None else flat
    if flat not in (None, nested):
        raise ValueError(
            f"{reader.source}: {reader.origins['target_layer_ids']} is {nested}, which counts "
            f"layer outputs, and {key} is {reader.raw[key]}, which counts hidden states and should "
            "be one more each. Keep the one that the drafter was trained with."
        )
    if flat is None and nested[:1] == [2]:
        reader.warn(
            f"{reader.origins['target_layer_ids']} begins with 2: read as layer outputs, as "
            "SpecForge and ModelOpt write them. Some files count hidden states there (2, L/2, "
            "L - 3): `dspark-hf probe` tells; then subtract 1 from each."
        )
    return nested

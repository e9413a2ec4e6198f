"""config.json of an Eagle3 drafter in the layouts of other trainers and engines."""

from typing import Any

from ..loading.detection import CHAIN_EAGLE3
from ..modeling_eagle3 import Eagle3Drafter
from .layouts import (
    Target,
    deepspec_container,
    deepspec_obstacles,
    dtype_name,
    layer_keys,
    refuse,
    special_tokens,
    speculators_container,
)

# Taps that DeepSpec's trainer and the classes of the original layout are built for.
_DEEPSPEC_TAPS, _CHAIN_TAPS = 5, 3


def chain_config(drafter: Eagle3Drafter, target: Target) -> dict[str, Any]:
    """
    config.json of the original EAGLE-3 layout, in the words of SpecForge, which SGLang reads.

    Raises:
        `ValueError`: the drafter has something that the layout or the engine cannot say.
    """
    config, body = drafter.config, drafter.config.backbone_config
    biased = getattr(body, "attention_bias", False) or getattr(body, "mlp_bias", False)
    refuse(
        {
            f"a {body.model_type} layer (the layer of this layout is Llama's, without norms of "
            "queries and keys)": body.model_type != "llama",
            f"{len(config.target_layer_ids)} taps (the layout has {_CHAIN_TAPS})": (
                len(config.target_layer_ids) != _CHAIN_TAPS
            ),
            "one norm over all taps": config.feature_norm == "joint",
            "a residual that starts from the normed state": config.norm_before_residual,
            "biases": biased,
            "a logit soft-cap": config.final_logit_softcapping is not None,
        },
        CHAIN_EAGLE3,
    )
    has_head = drafter.get_output_embeddings() is not None or target.model is not None
    rope = {key: value for key, value in body.rope_parameters.items() if key != "rope_theta"}
    raw = {
        **layer_keys(body),
        # The old spelling too: classes that do not find it rotate by 10,000.
        "rope_theta": body.rope_parameters["rope_theta"],
        "rope_scaling": None if rope.get("rope_type") == "default" else rope,
        "architectures": ["LlamaForCausalLMEagle3"],
        # Without a head in the file, null makes the engine take the target's.
        "draft_vocab_size": config.num_draftable_tokens if has_head else None,
        "dtype": dtype_name(drafter),
        # Inside `eagle_config` ids count layer outputs; at the top level they would be one more.
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": list(config.target_layer_ids),
            "use_aux_hidden_state": True,
        },
        "fc_norm": config.feature_norm == "per_tap",
        "target_hidden_size": config.target_hidden_size,
        "tie_word_embeddings": False,
        # Not a key of this layout, and no class of it minds one: how many steps were unrolled.
        "ttt_length": config.block_size,
        "vocab_size": config.vocab_size,
        **special_tokens(config),
    }
    if config.recycles_normed_output:
        # Left out otherwise: the key has had two meanings, and without it there is one.
        raw["norm_output"] = True
    depth = config.num_target_layers or target.depth
    return raw if depth is None else {**raw, "num_target_layers": depth}


def deepspec_eagle3_config(drafter: Eagle3Drafter, target: Target) -> dict[str, Any]:
    """
    config.json of DeepSpec's Eagle3 layout.

    Raises:
        `ValueError`: the drafter has something that the layout cannot say.
    """
    config = drafter.config
    refuse(
        {
            **deepspec_obstacles(drafter, target),
            f"{len(config.target_layer_ids)} taps (DeepSpec's Eagle3 has {_DEEPSPEC_TAPS})": (
                len(config.target_layer_ids) != _DEEPSPEC_TAPS
            ),
            "a tap of the embedding (DeepSpec's own data keep layer outputs)": (
                min(config.target_layer_ids) < 0
            ),
            "a norm in front of the context projection": config.feature_norm is not None,
            "a residual that starts from the normed state": config.norm_before_residual,
            "a normed output that is recycled": config.recycles_normed_output,
        },
        "DeepSpec",
    )
    return {
        **deepspec_container(drafter, target, "Eagle3Model"),
        "draft_num_hidden_layers": 1,
        "target_model_name_or_path": target.name,
        "ttt_length": config.block_size,
    }


def speculators_eagle3_config(drafter: Eagle3Drafter, target: Target) -> dict[str, Any]:
    """
    config.json of a speculators Eagle3 drafter.

    Raises:
        `ValueError`: the drafter has something that the layout cannot say, or the target's name is
            not known.
    """
    config, body = drafter.config, drafter.config.backbone_config
    refuse(
        {
            f"a {body.model_type} layer (speculators layers are llama or qwen3)": (
                body.model_type not in ("llama", "qwen3")
            ),
            "a logit soft-cap": config.final_logit_softcapping is not None,
            "features of another width than the draft layer": (
                config.target_hidden_size != config.hidden_size
            ),
            "no name of its target (pass target_name)": target.name is None,
        },
        "speculators",
    )
    return {
        **speculators_container(drafter, target, "eagle3", "Eagle3Speculator"),
        "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in config.target_layer_ids],
        "embed_requires_grad": False,
        "fc_norm": config.feature_norm == "per_tap",
        "norm_before_fc": config.feature_norm == "joint",
        "norm_before_residual": config.norm_before_residual,
        "norm_output": config.recycles_normed_output,
    }

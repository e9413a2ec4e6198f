"""
A drafter as config.json and tensors of another layout.

Each function takes a drafter and gives what the files hold, or raises for a drafter that the layout
cannot express: nothing is dropped or approximated.
"""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from ..configuration_drafter import DrafterConfig
from ..loading.detection import CHAIN_EAGLE3, DEEPSPEC, SPECULATORS
from ..modeling_drafter import DrafterModel
from ..modeling_dspark import DSparkDrafter

LAYOUTS = (DEEPSPEC, SPECULATORS, CHAIN_EAGLE3)
# Release of the speculators package whose layout is written.
SPECULATORS_VERSION = "0.9.0"

EMBEDDING, HEAD, MAP = "embed_tokens.weight", "lm_head.weight", "draft_to_target"
_CONFIDENCE, _CONFIDENCE_BIAS = "confidence_head.proj.weight", "confidence_head.proj.bias"
_DEEPSPEC_FAMILIES = {"qwen3": "Qwen3", "gemma4_text": "Gemma4"}
_SCALED = "a target whose embedding scales what it looks up"
# Keys of the host's configs that say nothing about the drafter's layers.
_NOT_LAYERS = (
    "_name_or_path",
    "architectures",
    "chunk_size_feed_forward",
    "dtype",
    "id2label",
    "is_encoder_decoder",
    "label2id",
    "output_attentions",
    "output_hidden_states",
    "problem_type",
    "return_dict",
    "transformers_version",
)


@dataclass(frozen=True)
class Target:
    """
    What an export needs to know of the target.

    Attributes:
        name (`str`, *optional*): Hub id or path that engines load the target from.
        model (`PreTrainedModel`, *optional*):
            the target itself, to copy the embedding and the head from that the drafter shares.
        architectures (`list[str]`): class names in the target's config.
    """

    name: str | None = None
    model: PreTrainedModel | None = None
    architectures: tuple[str, ...] = ()

    @property
    def depth(self) -> int | None:
        """Number of decoder layers, if the target is at hand."""
        if self.model is None:
            return None
        return self.model.config.get_text_config(decoder=True).num_hidden_layers


def deepspec_config(drafter: DSparkDrafter, target: Target) -> dict[str, Any]:
    """
    config.json of the DeepSpec layout, for DSpark drafters and headless ones (DFlash).

    Raises:
        `ValueError`: the drafter has something that the layout cannot say.
    """
    config = drafter.config
    kinds = getattr(config.backbone_config, "layer_types", None) or ["full_attention"]
    obstacles = {
        **deepspec_obstacles(drafter, target),
        "an infill block (the anchor slot of DeepSpec blocks predicts)": not config.anchor_predicts,
        "causal draft layers": bool(config.causal_layers),
        "sliding draft layers": "sliding_attention" in kinds,
        _SCALED: config.backbone_config.model_type == "qwen3" and _scales(drafter, target),
        "plain rows of an embedding that it shares with its target (pass the target)": (
            config.unscaled_input_embeddings and _embedding(drafter, target) is None
        ),
    }
    refuse(obstacles, "DeepSpec")
    raw = {
        **deepspec_container(drafter, target, "DSparkModel"),
        "block_size": config.block_size,
        "enable_confidence_head": config.confidence_head,
        "markov_rank": config.markov_rank,
        "mask_token_id": config.mask_token_id,
    }
    if config.markov_head_type:
        raw["markov_head_type"] = config.markov_head_type
    if config.confidence_head:
        raw["confidence_head_with_markov"] = config.confidence_head_with_markov
    return raw


def deepspec_obstacles(drafter: DrafterModel, target: Target) -> dict[str, bool]:
    """What no DeepSpec layout can say, and whether this drafter has it."""
    config, kind = drafter.config, drafter.config.backbone_config.model_type
    is_gemma = kind == "gemma4_text"
    return {
        f"{kind} layers (DeepSpec draft layers are Qwen3's or Gemma 4's)": (
            kind not in _DEEPSPEC_FAMILIES
        ),
        "a reduced draft vocabulary": config.draft_vocab_size is not None,
        "features of another width than the draft layers": (
            config.target_hidden_size != config.hidden_size
        ),
        "a logit soft-cap over Qwen3 layers": (
            config.final_logit_softcapping is not None and not is_gemma
        ),
        "no record of the target's depth (pass the target)": (
            config.num_target_layers is None and target.depth is None
        ),
    }


def deepspec_container(drafter: DrafterModel, target: Target, architecture: str) -> dict[str, Any]:
    """What every config.json of a DeepSpec layout holds; `architecture` is named without family."""
    config, body = drafter.config, drafter.config.backbone_config
    raw = {
        **layer_keys(body),
        "architectures": [_DEEPSPEC_FAMILIES[body.model_type] + architecture],
        "dtype": dtype_name(drafter),
        "num_target_layers": config.num_target_layers or target.depth,
        "target_layer_ids": list(config.target_layer_ids),
        "tie_word_embeddings": False,
        "vocab_size": config.vocab_size,
        **special_tokens(config),
    }
    if body.model_type == "gemma4_text":
        raw["final_logit_softcapping"] = config.final_logit_softcapping
    return raw


def speculators_config(drafter: DSparkDrafter, target: Target) -> dict[str, Any]:
    """
    config.json of the speculators layout, for DSpark drafters and headless ones (DFlash).

    Raises:
        `ValueError`: the drafter has something that the layout cannot say, or the target's name is
            not known.
    """
    config, body = drafter.config, drafter.config.backbone_config
    kinds = list(getattr(body, "layer_types", None) or [])
    sliding = [i for i, kind in enumerate(kinds) if kind == "sliding_attention"]
    obstacles = {
        f"{body.model_type} layers (speculators draft layers are qwen3)": body.model_type
        != "qwen3",
        "causal layers that are not exactly its sliding layers": (
            config.causal_layers not in ([], sliding)
        ),
        "a window that is measured from each slot": (
            config.sliding_window_per_slot and bool(sliding)
        ),
        "a logit soft-cap": config.final_logit_softcapping is not None,
        "features of another width than the draft layers": (
            config.target_hidden_size != config.hidden_size
        ),
        _SCALED: _scales(drafter, target),
        "no name of its target (pass target_name)": target.name is None,
    }
    refuse(obstacles, "speculators")
    is_dspark = bool(config.markov_head_type or config.confidence_head)
    algorithm, architecture = (
        ("dspark", "DSparkSpeculator") if is_dspark else ("dflash", "DFlashSpeculator")
    )
    raw = {
        **speculators_container(drafter, target, algorithm, architecture),
        "aux_hidden_state_layer_ids": [layer + 1 for layer in config.target_layer_ids],
        "block_size": config.block_width,
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": config.anchor_predicts,
        "sliding_window_non_causal": bool(sliding) and not config.causal_layers,
    }
    if is_dspark:
        raw |= {
            "confidence_head_with_markov": config.confidence_head_with_markov,
            "enable_confidence_head": config.confidence_head,
            "markov_head_type": config.markov_head_type or "vanilla",
            "markov_rank": config.markov_rank,
        }
    return raw


def speculators_container(
    drafter: DrafterModel, target: Target, algorithm: str, architecture: str
) -> dict[str, Any]:
    """What every config.json of the speculators layout holds."""
    config = drafter.config
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": config.block_size,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    raw = {
        "architectures": [architecture],
        "draft_vocab_size": config.num_draftable_tokens,
        "dtype": dtype_name(drafter),
        "speculators_config": {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {
                "name_or_path": target.name,
                "architectures": list(target.architectures),
            },
        },
        "speculators_model_type": algorithm,
        "speculators_version": SPECULATORS_VERSION,
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "transformer_layer_config": {
            **layer_keys(config.backbone_config),
            "vocab_size": config.vocab_size,
        },
    }
    depth = config.num_target_layers or target.depth
    # Not a key of the layout, which allows others; it lets a loader check the pair.
    return raw if depth is None else {**raw, "num_target_layers": depth}


def layout_tensors(drafter: DrafterModel, layout: str, target: Target) -> dict[str, torch.Tensor]:
    """
    Tensors under the names of a layout, on the CPU.

    The embedding and the head are the drafter's own, or copies of those it shares with the target;
    where there are neither, they are left out and an engine lends the target's.

    Raises:
        `ValueError`: a reduced vocabulary without the rows of the head, which engines cannot find
            out.
    """
    tensors = {name: value.detach().cpu() for name, value in drafter.state_dict().items()}
    embedding, head = _embedding(drafter, target), drafter.get_output_embeddings()
    if target.model is not None:
        head = head if head is not None else target.model.get_output_embeddings()
    ids = tensors.pop(MAP, None)
    if EMBEDDING not in tensors and embedding is not None:
        tensors[EMBEDDING] = embedding.weight.detach().cpu()[: drafter.config.vocab_size]
    if HEAD not in tensors and head is not None:
        if not head.weight.is_floating_point() or getattr(head, "bias", None) is not None:
            raise ValueError(
                f"The drafter shares its target's head, and this one ({type(head).__name__}) is "
                "quantised or has a bias, which files of other layouts do not hold. Give a target "
                "with a plain head, or export in this library's own layout."
            )
        rows = head.weight.detach().cpu()
        tensors[HEAD] = rows if ids is None else rows[ids]
    if ids is not None and HEAD not in tensors:
        raise ValueError(
            "The drafter has a reduced vocabulary and shares the target's head. Engines need its "
            "rows in the file: pass the target (`--copy-from`)."
        )
    if ids is not None:
        # Offsets, and a membership list, over ascending ids.
        order = ids.argsort()
        for name in (HEAD, "markov_head.markov_w2.weight"):
            if name in tensors:
                tensors[name] = tensors[name][order]
        ids = ids[order]
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(drafter.config.vocab_size, dtype=torch.bool)
        tensors["t2d"][ids] = True
    if _CONFIDENCE in tensors and _CONFIDENCE_BIAS not in tensors:
        # These layouts have a bias; one of zero is none.
        tensors[_CONFIDENCE_BIAS] = tensors[_CONFIDENCE].new_zeros(1)
    if layout == CHAIN_EAGLE3:
        tensors = {name.replace("layers.0.", "midlayer."): value for name, value in tensors.items()}
    dtype = drafter.dtype
    # Copies, because a target may tie the two matrices and files hold each name by itself.
    return {
        name: value.to(dtype if value.is_floating_point() else value.dtype).clone().contiguous()
        for name, value in tensors.items()
    }


def refuse(obstacles: dict[str, bool], layout: str) -> None:
    """Raise `ValueError` naming those obstacles that are there."""
    found = [what for what, present in obstacles.items() if present]
    if found:
        raise ValueError(
            f"This drafter cannot be written in the {layout} layout: it has {'; '.join(found)}. "
            "Save it in this library's own layout, or in another one."
        )


def layer_keys(body: PreTrainedConfig) -> dict[str, Any]:
    """The draft layers' config without what the host adds to every config."""
    raw = {key: value for key, value in body.to_dict().items() if key not in _NOT_LAYERS}
    # The host keeps Gemma 4's full-attention sizes by layer; published files name them.
    by_layer = raw.pop("per_layer_config", None) or {}
    if body.model_type == "gemma4_text":
        own: dict[str, Any] = next(iter(by_layer.values()), {})
        raw["global_head_dim"] = own.get("head_dim", raw.get("head_dim"))
        raw["num_global_key_value_heads"] = own.get(
            "num_key_value_heads", raw.get("num_key_value_heads")
        )
    return {**raw, "model_type": body.model_type}


def special_tokens(config: DrafterConfig) -> dict[str, Any]:
    """The target's special tokens, as flat layouts repeat them."""
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {name: getattr(config, name) for name in names}


def dtype_name(drafter: DrafterModel) -> str:
    """The drafter's precision as config.json names it."""
    return str(drafter.dtype).removeprefix("torch.")


def _scales(drafter: DSparkDrafter, target: Target) -> bool:
    """Whether the drafter takes embeddings that are scaled, which a copy of the rows would not."""
    is_scaled = hasattr(_embedding(drafter, target), "embed_scale")
    return is_scaled and not drafter.config.unscaled_input_embeddings


def _embedding(drafter: DrafterModel, target: Target) -> torch.nn.Module | None:
    """The drafter's embedding, its own or one of its target as far as that is at hand."""
    module = drafter.get_input_embeddings()
    if module is None and target.model is not None:
        module = target.model.get_input_embeddings()
    return module

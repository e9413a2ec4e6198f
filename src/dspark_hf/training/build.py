"""A new drafter for a target, from scratch or warm-started from another one."""

import itertools
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel, Qwen3Config

from ..configuration_dspark import DSparkConfig
from ..configuration_eagle3 import Eagle3Config
from ..modeling_dspark import DSparkDrafter
from ..modeling_eagle3 import Eagle3Drafter
from .data import DraftDataset

# What a draft layer takes from the target's layers unless it is told otherwise.
_LAYER_FIELDS = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "rms_norm_eps",
    "max_position_embeddings",
)

# Facts that weights were trained with, though no shape gives them away.
_MEANING = (
    "target_layer_ids",
    "mask_token_id",
    "vocab_size",
    "target_hidden_size",
    "anchor_predicts",
    "final_logit_softcapping",
    "feature_norm",
    "norm_before_residual",
    "recycles_normed_output",
)
_LAYER_MEANING = (
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "attention_bias",
    "rope_parameters",
)
_W2 = "markov_head.markov_w2.weight"


def spread_taps(num_target_layers: int, num_taps: int) -> list[int]:
    """
    Taps at even distances from the second layer to the third last one, as the released drafters
    have them (for 36 layers and five taps: 1, 9, 17, 25, 33).
    """
    last = num_target_layers - 3
    if last < num_taps:
        return list(range(max(0, num_target_layers - num_taps), num_target_layers))
    return [round(1 + i * (last - 1) / max(1, num_taps - 1)) for i in range(num_taps)]


def build_drafter(
    target: PreTrainedModel,
    mask_token_id: int,
    num_layers: int = 5,
    block_size: int = 7,
    target_layer_ids: list[int] | None = None,
    markov_head_type: str | None = "vanilla",
    markov_rank: int = 256,
    confidence_head: bool = True,
    anchor_predicts: bool = True,
    draft_vocabulary: torch.Tensor | None = None,
    **layer_fields: Any,
) -> DSparkDrafter:
    """
    A drafter of Qwen3 layers with random weights, of the width of the target.

    Args:
        target (`PreTrainedModel`): gives widths, heads, rotary frequencies and vocabulary.
        mask_token_id (`int`):
            Fills the block. Take a token that text never contains: one of the tokenizer's reserved
            ones.
        num_layers (`int`): draft layers.
        block_size (`int`): γ.
        target_layer_ids (`list[int]`, *optional*): taps; five at even distances by default.
        markov_head_type (`str`, *optional*): `None` makes a DFlash drafter.
        markov_rank (`int`): r.
        confidence_head (`bool`): whether to predict acceptance.
        anchor_predicts (`bool`):
            Block layout; `False` (the anchor is context only) to start from a drafter that has it.
        draft_vocabulary (`torch.Tensor`, *optional*): ids that can be drafted; all by default.
        **layer_fields: of the layers' config, in place of the target's.

    Raises:
        `ValueError`: a fact does not fit the target; see [`DSparkConfig`].
    """
    config = DSparkConfig(
        **_target_facts(target, num_layers, target_layer_ids, draft_vocabulary, layer_fields),
        block_size=block_size,
        mask_token_id=mask_token_id,
        markov_head_type=markov_head_type,
        markov_rank=markov_rank if markov_head_type else 0,
        confidence_head=confidence_head,
        anchor_predicts=anchor_predicts,
        confidence_head_with_markov=confidence_head and markov_head_type is not None,
    )
    return _finish(DSparkDrafter(config), target, draft_vocabulary)


def build_eagle3(
    target: PreTrainedModel,
    block_size: int = 7,
    target_layer_ids: list[int] | None = None,
    draft_vocabulary: torch.Tensor | None = None,
    **layer_fields: Any,
) -> Eagle3Drafter:
    """
    An Eagle3 drafter of one Qwen3 layer with random weights, of the width of the target.

    Arguments are those of [`build_drafter`]; `block_size` is the number of unrolled steps.
    """
    facts = _target_facts(target, 1, target_layer_ids, draft_vocabulary, layer_fields)
    drafter = Eagle3Drafter(Eagle3Config(**facts, block_size=block_size))
    return _finish(drafter, target, draft_vocabulary)


def _target_facts(
    target: PreTrainedModel,
    num_layers: int,
    target_layer_ids: list[int] | None,
    draft_vocabulary: torch.Tensor | None,
    layer_fields: dict[str, Any],
) -> dict[str, Any]:
    """What a new drafter takes over from its target: widths, heads, rotary base, vocabulary."""
    text = target.config.get_text_config(decoder=True)
    unknown = sorted(set(layer_fields) - set(Qwen3Config().to_dict()))
    if unknown:
        raise ValueError(
            f"Neither the builder nor the config of the draft layers knows {', '.join(unknown)}."
        )
    heads = text.num_attention_heads
    fields = {
        # For targets whose config names them differently or not at all.
        "intermediate_size": 4 * text.hidden_size,
        "num_key_value_heads": heads,
        **{name: getattr(text, name) for name in _LAYER_FIELDS if hasattr(text, name)},
    }
    fields["head_dim"] = getattr(text, "head_dim", None) or text.hidden_size // heads
    fields.update(vocab_size=text.vocab_size, num_hidden_layers=num_layers)
    theta = _rope_theta(text)
    if theta is not None:
        fields["rope_parameters"] = {"rope_type": "default", "rope_theta": theta}
    return {
        "backbone_config": {"model_type": "qwen3", **fields, **layer_fields},
        "target_layer_ids": target_layer_ids or spread_taps(text.num_hidden_layers, 5),
        "num_target_layers": text.num_hidden_layers,
        "target_hidden_size": text.hidden_size,
        "vocab_size": text.vocab_size,
        "draft_vocab_size": None if draft_vocabulary is None else len(draft_vocabulary),
        "final_logit_softcapping": getattr(text, "final_logit_softcapping", None),
        "stores_input_embeddings": False,
        "stores_output_embeddings": False,
        "bos_token_id": text.bos_token_id,
        "eos_token_id": text.eos_token_id,
        "pad_token_id": text.pad_token_id,
    }


def _finish(drafter: Any, target: PreTrainedModel, draft_vocabulary: torch.Tensor | None) -> Any:
    if draft_vocabulary is not None:
        drafter.draft_to_target.copy_(draft_vocabulary.sort().values)
    return drafter.bind(target)


def _rope_theta(text: PreTrainedConfig) -> float | None:
    parameters = getattr(text, "rope_parameters", None) or {}
    parameters = parameters.get("full_attention", parameters)
    return parameters.get("rope_theta")


def frequent_tokens(
    dataset: DraftDataset, size: int, vocab_size: int
) -> tuple[torch.Tensor, float]:
    """
    A draft vocabulary: the tokens that the target writes most often, filled up with the lowest ids,
    which are the most frequent tokens of byte-pair vocabularies.

    Returns:
        `size` ids in ascending order and the share of the answers that they cover.

    Raises:
        `ValueError`: the vocabulary is not larger than that.
    """
    if size >= vocab_size:
        raise ValueError(
            f"draft_vocab_size is {size}, but the target has {vocab_size} tokens. Leave it out to "
            "draft all of them."
        )
    counts: Counter[int] = Counter()
    for example in dataset.examples:
        counts.update(
            i for i, learn in zip(example.input_ids, example.loss_mask, strict=True) if learn
        )
    chosen = {token for token, _ in counts.most_common(size)}
    fillers = (token for token in range(vocab_size) if token not in chosen)
    chosen.update(itertools.islice(fillers, size - len(chosen)))
    covered = sum(number for token, number in counts.items() if token in chosen)
    return torch.tensor(sorted(chosen)), covered / max(1, counts.total())


@dataclass(frozen=True)
class WarmStart:
    """
    What did not come along.

    Attributes:
        new (`list[str]`): parameters that keep their random start, and of how many rows if not all.
        left_out (`list[str]`): weights of the source that have no place, likewise.
    """

    new: list[str]
    left_out: list[str]


@torch.no_grad()
def warm_start(
    drafter: DSparkDrafter | Eagle3Drafter, source: DSparkDrafter | Eagle3Drafter
) -> WarmStart:
    """
    Copy every weight of `source` that has a place in `drafter`; DFlash and DSpark drafters mix.

    Rows of W2 follow their tokens; those of tokens that the source cannot draft start anew. An
    embedding or a head that is the one the drafter is bound to counts as taken over.

    Raises:
        `ValueError`: the two read the target differently, weights would mean something else in the
            drafter, or no layer fits.
    """
    _check_same_meaning(drafter, source)
    state, own = source.state_dict(), drafter.state_dict()
    new_rows = left_rows = 0
    if _W2 in state and _W2 in own and state[_W2].shape[1] == own[_W2].shape[1]:
        rows = _rows_of(drafter, source)
        is_known = rows >= 0
        new_rows = int((~is_known).sum())
        left_rows = len(state[_W2]) - int(is_known.sum())
        state[_W2] = torch.where(is_known[:, None], state[_W2][rows], own[_W2])
    fitting = {
        name: tensor
        for name, tensor in state.items()
        if name in own and tensor.shape == own[name].shape and name != "draft_to_target"
    }
    # A layer is taken over whole: norms of a layer whose projections do not fit are of no use.
    torn = tuple(f"{_layer(name)}." for name in own if _layer(name) and name not in fitting)
    fitting = {name: tensor for name, tensor in fitting.items() if not name.startswith(torn)}
    if not any(name.startswith("layers.") for name in fitting):
        raise ValueError("Cannot warm-start: no draft layer of the source has a fitting shape.")
    drafter.load_state_dict({**own, **fitting})
    new = set(own) - set(fitting) - {"draft_to_target"}
    left_out = set(state) - set(fitting) - {"draft_to_target"} - _bound_alike(drafter, state)
    if _W2 in fitting:
        size = len(source.state_dict()[_W2])
        new |= {f"{_W2} ({new_rows:,} of {len(own[_W2]):,} rows)"} if new_rows else set()
        left_out |= {f"{_W2} ({left_rows:,} of {size:,} rows)"} if left_rows else set()
    return WarmStart(sorted(new), sorted(left_out))


def _check_same_meaning(drafter: Any, source: Any) -> None:
    """Shapes say nothing about these; with other values the copied weights compute other things."""
    kind, other = (x.config.backbone_config.model_type for x in (drafter, source))
    if kind != other:
        raise ValueError(
            f"Cannot warm-start {kind} layers from {other} layers; they compute differently."
        )
    shared = min(x.config.backbone_config.num_hidden_layers for x in (drafter, source))
    is_scaled = hasattr(drafter.get_input_embeddings(), "embed_scale")
    ours, theirs = (_meaning(x.config, shared, is_scaled) for x in (drafter, source))
    for name, expected in ours.items():
        found = theirs.get(name)
        if found != expected:
            raise ValueError(
                f"Cannot warm-start: {name} is {found} in the source and {expected} in the new "
                "drafter. Use the source's value."
            )


def _meaning(config: Any, num_layers: int, is_scaled: bool) -> dict[str, Any]:
    """What the weights of a drafter's first layers were trained to compute with."""
    backbone = config.backbone_config
    facts = {name: getattr(config, name) for name in _MEANING if hasattr(config, name)}
    facts |= {name: getattr(backbone, name, None) for name in _LAYER_MEANING}
    types = (backbone.layer_types or ["full_attention"] * num_layers)[:num_layers]
    slides = "sliding_attention" in types
    return {
        **facts,
        "layer_types": types,
        "causal_layers": [i for i in getattr(config, "causal_layers", ()) if i < num_layers],
        "sliding_window": backbone.sliding_window if slides else None,
        "sliding_window_per_slot": slides and getattr(config, "sliding_window_per_slot", False),
        "unscaled_input_embeddings": is_scaled
        and getattr(config, "unscaled_input_embeddings", False),
    }


def _bound_alike(drafter: Any, state: dict[str, torch.Tensor]) -> set[str]:
    """Which of the source's own embedding and head are copies of those the drafter is bound to."""
    context = drafter.new_context(batch_size=1)
    bound = {
        "embed_tokens.weight": context.input_embeddings.weight,
        "lm_head.weight": context.output_embeddings.weight,
    }
    return {
        name
        for name, weight in bound.items()
        if name in state and torch.equal(state[name], weight.to(state[name]))
    }


def _layer(name: str) -> str | None:
    """`layers.3` of the weights of a layer."""
    parts = name.split(".")
    return ".".join(parts[:2]) if parts[0] == "layers" else None


def _rows_of(drafter: DSparkDrafter, source: DSparkDrafter) -> torch.Tensor:
    """
    Which row of the source's W2 belongs to each of the drafter's draftable tokens `(V_d,)`; -1 for
    tokens that the source lacks.
    """
    size = source.config.vocab_size
    wanted, known = (
        torch.arange(size) if x.config.draft_vocab_size is None else x.draft_to_target.cpu()
        for x in (drafter, source)
    )
    place = torch.full((size,), -1)
    place[known] = torch.arange(len(known))
    return place[wanted]

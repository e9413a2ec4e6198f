"""A new drafter for a target, from scratch or warm-started from another one."""

import itertools
from collections import Counter
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


@torch.no_grad()
def warm_start(drafter: DSparkDrafter, source: DSparkDrafter) -> list[str]:
    """
    Copy every weight of `source` that has a place in `drafter`; DFlash and DSpark drafters mix.

    Rows of W2 follow their tokens; those of tokens that the source cannot draft start anew.

    Returns:
        Names of parameters that keep their random start, and of how many rows if not all.

    Raises:
        `ValueError`: the two read the target differently, or no layer fits.
    """
    for name in ("target_layer_ids", "mask_token_id", "vocab_size", "target_hidden_size"):
        ours, theirs = getattr(drafter.config, name), getattr(source.config, name)
        if ours != theirs:
            raise ValueError(
                f"Cannot warm-start: {name} is {theirs} in the source and {ours} in the new "
                "drafter. Use the source's value."
            )
    kind, other = (x.config.backbone_config.model_type for x in (drafter, source))
    if kind != other:
        raise ValueError(
            f"Cannot warm-start {kind} layers from {other} layers; they compute differently."
        )
    state, own = source.state_dict(), drafter.state_dict()
    w2, anew = "markov_head.markov_w2.weight", 0
    if w2 in state and w2 in own and state[w2].shape[1] == own[w2].shape[1]:
        rows = _rows_of(drafter, source)
        is_known = rows >= 0
        anew = int((~is_known).sum())
        state[w2] = torch.where(is_known[:, None], state[w2][rows], own[w2])
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
    fresh = set(own) - set(fitting) - {"draft_to_target"}
    if w2 in fitting and anew:
        fresh.add(f"{w2} ({anew:,} of {len(own[w2]):,} rows)")
    return sorted(fresh)


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

"""
How a drafter's blocks are laid out and where its taps are, found by drafting along a text that the
target wrote.

A wrong layout, tap or mask never fails: it only lowers the accepted length. So each reading of the
checkpoint drafts greedily behind the same anchors of a transcript, and the tokens are compared with
what the target wrote there.
"""

import copy
import math
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from .generation.checks import check_pairing
from .generation.taps import TargetTaps
from .modeling_drafter import DrafterModel
from .modeling_dspark import DSparkDrafter

# Differences below so many standard errors decide nothing.
_CLEAR = 2.0


@dataclass(frozen=True)
class LayoutReading:
    """
    One way to read a checkpoint.

    Attributes:
        anchor_predicts (`bool`): whether the anchor slot predicts the first draft token.
        tap_offset (`int`): added to every tap of the drafter's config.
        causal (`bool`): whether slots see earlier slots of their block only.

    A drafter of one token after the other is both by its nature; only its taps can be read wrongly.
    """

    anchor_predicts: bool
    tap_offset: int
    causal: bool


@dataclass(frozen=True)
class Evidence:
    """
    What a reading is worth on a transcript.

    Attributes:
        reading ([`LayoutReading`]): the reading.
        accepted_length (`float`):
            mean over anchors of 1 + the drafted tokens that agree with the text up to the first
            that does not; only as many tokens count as every layout drafts.
        agreement (`list[float]`): share of anchors whose token at each position agrees.
        lengths (`list[int]`): agreeing tokens of each anchor.
    """

    reading: LayoutReading
    accepted_length: float
    agreement: list[float]
    lengths: list[int] = field(repr=False)


@dataclass(frozen=True)
class ProbeResult:
    """
    All readings that were tried.

    Attributes:
        stated ([`LayoutReading`]): how the drafter is read now.
        best ([`LayoutReading`]):
            the reading with the longest agreement; the stated one if none leads it beyond chance.
        decided (`bool`):
            whether `best` leads every reading of another block layout (where there is one layout
            only: of other taps) by more than twice the standard error of the difference.
        evidence (`list[Evidence]`): every reading, best first.
    """

    stated: LayoutReading
    best: LayoutReading
    decided: bool
    evidence: list[Evidence]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, without the lengths of single anchors."""
        rows = []
        for item in self.evidence:
            row = asdict(item)
            row.pop("lengths")
            rows.append({**row, "num_anchors": len(item.lengths)})
        return {
            "stated": asdict(self.stated),
            "best": asdict(self.best),
            "decided": self.decided,
            "evidence": rows,
        }


@torch.no_grad()
def probe_layout(
    target: PreTrainedModel,
    drafter: DrafterModel,
    token_ids: torch.Tensor,
    first_anchor: int = 1,
    num_anchors: int = 64,
) -> ProbeResult:
    """
    Compare readings of a drafter by their agreement with a text of the target.

    Readings are tried one fact at a time, each with the best value of the facts before it: block
    layout, taps one layer up or down, causal or not; of an Eagle3 drafter the taps alone. Nothing
    of the drafter or the target changes.

    Args:
        target (`PreTrainedModel`): the drafter's target.
        drafter ([`DSparkDrafter`] or [`Eagle3Drafter`]): the drafter, read in any way.
        token_ids (`torch.Tensor` of shape `(1, L)`): a text that the target wrote greedily.
        first_anchor (`int`, *optional*, defaults to 1):
            Position of the first anchor: the last token of the prompt.
        num_anchors (`int`, *optional*, defaults to 64): most anchors to draft behind.

    Raises:
        `ValueError`: the pair does not fit, or the text is too short for one block.
    """
    check_pairing(target, drafter)
    config: Any = drafter.config
    is_block = isinstance(drafter, DSparkDrafter)
    # The tokens that both layouts draft.
    counted = max(config.block_width - 1, 1) if is_block else config.block_size
    is_text = token_ids.dim() == 2 and token_ids.shape[0] == 1
    last = token_ids.shape[-1] - 1 - counted
    if not is_text or last < max(first_anchor, 1):
        raise ValueError(
            f"The probe needs one text (1, L) with at least {counted} tokens behind the anchor at "
            f"{first_anchor}, found shape {tuple(token_ids.shape)}. Let the target write more."
        )
    anchors = torch.linspace(max(first_anchor, 1), last, min(num_anchors, last)).long().unique()
    depth = target.config.get_text_config(decoder=True).num_hidden_layers
    stated = LayoutReading(True, 0, True)
    if is_block:
        stated = LayoutReading(config.anchor_predicts, 0, bool(config.causal_layers))
    offsets = [
        offset
        for offset in (-1, 0, 1)
        if min(config.target_layer_ids) + offset >= -1
        and max(config.target_layer_ids) + offset < depth
    ]
    features = _features(target, drafter, token_ids, offsets)
    tried: dict[LayoutReading, Evidence] = {}

    def measure(reading: LayoutReading) -> Evidence:
        if reading not in tried:
            tried[reading] = _agreement(
                _read_as(drafter, reading),
                reading,
                target,
                features[reading.tap_offset],
                token_ids,
                anchors,
                counted,
            )
        return tried[reading]

    best = measure(stated)
    alternatives: list[tuple[str, list[Any]]] = [("tap_offset", offsets)]
    if is_block:
        layouts = [True, False] if config.block_width > 1 else [True]
        alternatives.insert(0, ("anchor_predicts", layouts))
        alternatives.append(("causal", [True, False]))
    for name, values in alternatives:
        found = [measure(replace(best.reading, **{name: value})) for value in values]
        best = max([best, *found], key=lambda evidence: evidence.accepted_length)
    return _judge(stated, list(tried.values()))


def combine(results: list[ProbeResult]) -> ProbeResult:
    """One result over the anchors of several texts; readings that were tried on all of them."""
    rows = [{evidence.reading: evidence for evidence in result.evidence} for result in results]
    shared = [reading for reading in rows[0] if all(reading in row for row in rows)]
    return _judge(results[0].stated, [_pool([row[reading] for row in rows]) for reading in shared])


def _pool(parts: list[Evidence]) -> Evidence:
    lengths = [length for part in parts for length in part.lengths]
    weights = [len(part.lengths) / len(lengths) for part in parts]
    agreement = [
        sum(weight * share for weight, share in zip(weights, shares, strict=True))
        for shares in zip(*(part.agreement for part in parts), strict=True)
    ]
    return Evidence(parts[0].reading, 1 + sum(lengths) / len(lengths), agreement, lengths)


def _judge(stated: LayoutReading, tried: list[Evidence]) -> ProbeResult:
    evidence = sorted(tried, key=lambda e: (-e.accepted_length, e.reading != stated))
    best = evidence[0]
    own = next(e for e in evidence if e.reading == stated)
    best = best if _leads(best, own) else own
    others = [e for e in evidence if e.reading.anchor_predicts != best.reading.anchor_predicts]
    others = others or [e for e in evidence if e.reading.tap_offset != best.reading.tap_offset]
    return ProbeResult(stated, best.reading, all(_leads(best, other) for other in others), evidence)


def _read_as(drafter: DrafterModel, reading: LayoutReading) -> Any:
    """The same modules under another reading; the drafter itself is left as it is."""
    if not isinstance(drafter, DSparkDrafter):
        return drafter
    width = drafter.config.block_width
    variant = copy.copy(drafter)
    variant.config = copy.deepcopy(drafter.config)
    variant.config.anchor_predicts = reading.anchor_predicts
    variant.config.block_size = width if reading.anchor_predicts else width - 1
    if not reading.causal:
        variant.config.causal_layers = []
    elif not drafter.config.causal_layers:
        variant.config.causal_layers = list(range(len(drafter.layers)))
    return variant


def _features(
    target: PreTrainedModel, drafter: DrafterModel, token_ids: torch.Tensor, offsets: list[int]
) -> dict[int, torch.Tensor]:
    """Context features `(1, L, n·H)` of the text, for every offset of the taps."""
    taps = drafter.config.target_layer_ids
    layers = sorted({layer + offset for layer in taps for offset in offsets})
    with TargetTaps(target, layers) as reader:
        target(token_ids.to(target.device), use_cache=False, logits_to_keep=1)
        states = dict(zip(layers, reader.take().chunk(len(layers), dim=-1), strict=True))
    return {
        offset: torch.cat([states[layer + offset] for layer in taps], dim=-1) for offset in offsets
    }


def _agreement(
    drafter: Any,
    reading: LayoutReading,
    target: PreTrainedModel,
    features: torch.Tensor,
    token_ids: torch.Tensor,
    anchors: torch.Tensor,
    counted: int,
) -> Evidence:
    context, position, matches = drafter.new_context(1, target=target), 0, []
    for anchor in anchors.tolist():
        # A token-by-token drafter reads each position with the token behind it.
        following = token_ids[:, position + 1 : anchor + 1].to(drafter.device)
        paired = {"token_ids": following} if drafter.is_autoregressive else {}
        drafter.extend(context, features[:, position:anchor], **paired)
        position = anchor
        drafted = drafter.draft(context, token_ids[:, anchor]).tokens[0, :counted]
        text = token_ids[0, anchor + 1 : anchor + 1 + counted].to(drafted.device)
        matches.append((drafted == text[: len(drafted)]).cpu())
    hits = torch.stack(matches)
    lengths = hits.cumprod(dim=1).sum(dim=1)
    return Evidence(
        reading,
        1 + lengths.double().mean().item(),
        hits.double().mean(dim=0).tolist(),
        lengths.tolist(),
    )


def _leads(one: Evidence, other: Evidence) -> bool:
    """Whether `one` agrees longer than `other` on the same anchors, beyond chance."""
    gaps = torch.tensor(one.lengths).double() - torch.tensor(other.lengths).double()
    if len(gaps) < 2:
        return False
    error = gaps.std().item() / math.sqrt(len(gaps))
    return gaps.mean().item() > _CLEAR * error

"""Is a pair lossless on this machine? Measurements that a user can run on their own models."""

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Divergence:
    """
    The first place where two texts differ.

    Attributes:
        position (`int`): index of the new token.
        expected, found (`int`): the token of plain decoding and the one found instead.
        logit_gap (`float`): target logit of the expected token minus that of the found one.
    """

    position: int
    expected: int
    found: int
    logit_gap: float


@torch.no_grad()
def greedy_gaps(target: Any, sequences: torch.Tensor, prompt_length: int) -> torch.Tensor:
    """
    How far each generated token is from the target's argmax, by one forward over the whole text.

    Zero everywhere means that the text is what this forward would choose. In low precision a
    forward over many positions and one over a single position differ in the last bits, so small
    gaps are near-ties and not errors.

    Args:
        target (`PreTrainedModel`): the model.
        sequences (`torch.Tensor` of shape `(R, length)`): prompt and generated tokens.
        prompt_length (`int`): P.

    Returns:
        `torch.Tensor` of shape `(R, length - P)`: best logit minus the emitted token's, in float32.
    """
    logits = target(sequences).logits[:, prompt_length - 1 : -1].float()
    emitted = logits.gather(-1, sequences[:, prompt_length:, None]).squeeze(-1)
    return logits.amax(dim=-1) - emitted


def first_divergence(
    target: Any, plain: torch.Tensor, drafted: torch.Tensor, prompt_length: int
) -> Divergence | None:
    """Where `drafted` leaves `plain` (both `(1, length)`), or `None` if they are the same text."""
    length = min(plain.shape[1], drafted.shape[1])
    differs = (plain[0, :length] != drafted[0, :length]).nonzero()
    if not len(differs):
        return None
    at = int(differs[0])
    with torch.no_grad():
        logits = target(plain[:, :at]).logits[0, -1].float()
    expected, found = int(plain[0, at]), int(drafted[0, at])
    gap = float(logits[expected] - logits[found])
    return Divergence(at - prompt_length, expected, found, gap)


@torch.no_grad()
def pair_probabilities(
    target: Any, input_ids: torch.Tensor, top_k: int
) -> dict[tuple[int, int], float]:
    """
    Exact probabilities of the next two tokens `(x, y)` after `(1, P)` ids under top-k sampling.
    """

    def next_token(ids: torch.Tensor) -> tuple[list[int], list[float]]:
        best = target(ids).logits[0, -1].float().topk(top_k)
        return best.indices.tolist(), best.values.softmax(dim=-1).tolist()

    pairs = {}
    for x, p_x in zip(*next_token(input_ids), strict=True):
        extended = torch.cat((input_ids, input_ids.new_tensor([[x]])), dim=1)
        for y, p_y in zip(*next_token(extended), strict=True):
            pairs[(x, y)] = p_x * p_y
    return pairs


def sampling_distance(
    probabilities: dict[tuple[int, int], float],
    drawn: list[tuple[int, int]],
    seed: int = 0,
    simulations: int = 2000,
) -> tuple[float, float]:
    """
    Total variation distance between drawn token pairs and their exact probabilities.

    Returns:
        The distance, and the distance that an exact sampler stays below in 99.9 % of runs of the
        same size (by simulation).
    """
    p = torch.tensor(list(probabilities.values()), dtype=torch.float64)
    index = {pair: i for i, pair in enumerate(probabilities)}
    counts = torch.zeros(len(p) + 1, dtype=torch.float64)
    for pair in drawn:
        counts[index.get(pair, len(p))] += 1  # The last cell counts what cannot happen.
    distance = float((counts / len(drawn) - torch.cat((p, p.new_zeros(1)))).abs().sum() / 2)
    generator = torch.Generator().manual_seed(seed)
    draws = torch.multinomial(
        p.expand(simulations, -1), len(drawn), replacement=True, generator=generator
    )
    simulated = torch.zeros(simulations, len(p), dtype=torch.float64)
    simulated.scatter_add_(1, draws, torch.ones_like(draws, dtype=torch.float64))
    null = (simulated / len(drawn) - p).abs().sum(dim=1) / 2
    return distance, float(null.quantile(0.999))

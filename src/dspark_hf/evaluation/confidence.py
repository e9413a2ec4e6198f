"""
How good the confidences are: calibration and ranking, per position of the block.

The prediction for position k of a round is the *cumulative product* of the conditional confidences
up to it, Π_{j≤k} c_j, the estimated survival a_k (paper section 3.2.1); the label is whether draft
tokens 0…k were all accepted. Only positions that the target verified count. N pairs at a position.
"""

from collections.abc import Iterable
from typing import Any

import torch

from ..generation.statistics import RoundRecord

NUM_BINS = 20


def survival_pairs(rounds: Iterable[RoundRecord]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """
    Predicted survival and what happened, per position.

    Returns:
        For each position, predictions and labels, both float64 of shape `(N,)`. Empty without a
        confidence head.
    """
    predictions: list[list[float]] = []
    labels: list[list[float]] = []
    for record in rounds:
        survival = 1.0
        for k, confidence in enumerate((record.confidences or [])[: record.num_verified]):
            if k == len(predictions):
                predictions.append([])
                labels.append([])
            survival *= confidence
            predictions[k].append(survival)
            labels[k].append(float(record.num_accepted > k))
    return [
        (torch.tensor(p, dtype=torch.float64), torch.tensor(y, dtype=torch.float64))
        for p, y in zip(predictions, labels, strict=True)
    ]


def reliability(
    predictions: torch.Tensor, labels: torch.Tensor, num_bins: int = NUM_BINS
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """
    A reliability diagram's numbers, in equal-width bins of [0, 1].

    Args:
        predictions, labels (`torch.Tensor` of shape `(N,)`): probabilities, and 0 or 1.
        num_bins (`int`, *optional*, defaults to 20): a prediction of 1 belongs to the last bin.

    Returns:
        Count, mean prediction and mean label per bin, each `(num_bins,)`; NaN means in empty bins.
    """
    index = (predictions * num_bins).long().clamp(0, num_bins - 1)
    counts = torch.bincount(index, minlength=num_bins)
    sums = [torch.bincount(index, weights=x, minlength=num_bins) for x in (predictions, labels)]
    return counts, sums[0] / counts, sums[1] / counts


def expected_calibration_error(
    predictions: torch.Tensor, labels: torch.Tensor, num_bins: int = NUM_BINS
) -> torch.Tensor:
    """ECE: |mean prediction - mean label| per bin, weighted by its count. NaN without pairs."""
    counts, predicted, observed = reliability(predictions, labels, num_bins)
    gaps = (counts * (predicted - observed).abs()).nan_to_num(0.0)
    return gaps.sum() / counts.sum()


def roc_auc(predictions: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """
    Probability that an accepted position was predicted higher than a rejected one, ties counting
    half. NaN if all labels are equal.
    """
    accepted, rejected = predictions[labels > 0], predictions[labels <= 0].sort().values
    below = torch.searchsorted(rejected, accepted, right=False)
    not_above = torch.searchsorted(rejected, accepted, right=True)
    wins = (below + not_above).double().sum() / 2
    return wins / (len(accepted) * len(rejected))


def brier_score(predictions: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean squared difference of prediction and label. NaN without pairs."""
    return (predictions - labels).square().mean()


def confidence_figures(rounds: Iterable[RoundRecord]) -> dict[str, Any] | None:
    """
    Counts, ECE, ROC-AUC, Brier score and diagram per position, and their means weighted by count.

    `None` if no round carries confidences.
    """
    pairs = survival_pairs(rounds)
    if not pairs:
        return None
    counts = torch.tensor([float(len(p)) for p, _ in pairs], dtype=torch.float64)
    figures: dict[str, Any] = {"num_bins": NUM_BINS, "counts": [len(p) for p, _ in pairs]}
    for name, measure in (
        ("ece", expected_calibration_error),
        ("roc_auc", roc_auc),
        ("brier", brier_score),
    ):
        values = torch.stack([measure(p, y) for p, y in pairs])
        known = ~values.isnan()
        figures[name] = values.tolist()
        figures[f"mean_{name}"] = float((values * counts)[known].sum() / counts[known].sum())
    figures["reliability"] = [
        dict(
            zip(
                ("counts", "predicted", "observed"),
                (x.tolist() for x in reliability(p, y)),
                strict=True,
            )
        )
        for p, y in pairs
    ]
    return figures

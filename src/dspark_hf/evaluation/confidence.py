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
from ..scheduling.reliability import (
    NUM_BINS,
    bin_totals,
    brier_score,
    expected_calibration_error,
    ranking_quality,
)


def survival_pairs(rounds: Iterable[RoundRecord]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """
    Predicted survival and what happened, per position.

    Returns:
        For each position, predictions (float64) and labels (bool), both of shape `(N,)`. Empty
        without a confidence head.
    """
    predictions: list[list[float]] = []
    labels: list[list[bool]] = []
    for record in rounds:
        survival = 1.0
        for k, confidence in enumerate((record.confidences or [])[: record.num_verified]):
            if k == len(predictions):
                predictions.append([])
                labels.append([])
            survival *= confidence
            predictions[k].append(survival)
            labels[k].append(record.num_accepted > k)
    return [
        (torch.tensor(p, dtype=torch.float64), torch.tensor(y, dtype=torch.bool))
        for p, y in zip(predictions, labels, strict=True)
    ]


def reliability(
    predictions: torch.Tensor, labels: torch.Tensor, num_bins: int = NUM_BINS
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """
    A reliability diagram's numbers, in equal-width bins of [0, 1].

    Args:
        predictions (`torch.Tensor` of shape `(N,)`): probabilities.
        labels (`torch.Tensor` of shape `(N,)`): bool.
        num_bins (`int`, *optional*, defaults to 20): a prediction of 1 belongs to the last bin.

    Returns:
        Count, mean prediction and mean label per bin, each `(num_bins,)`; NaN means in empty bins.
    """
    counts, predicted, observed = bin_totals(predictions, labels, num_bins).unbind(-1)
    return counts.long(), predicted / counts, observed / counts


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
        ("roc_auc", ranking_quality),
        ("brier", brier_score),
    ):
        values = torch.tensor([float(measure(p, y)) for p, y in pairs], dtype=torch.float64)
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

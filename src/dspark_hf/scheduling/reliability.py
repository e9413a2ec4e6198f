"""
How far predicted probabilities can be trusted: expected calibration error, ranking, Brier score.

N predictions in [0, 1] and N outcomes. Nothing to judge gives NaN, and so does a ranking of one
class.
"""

import torch

NUM_BINS = 20


def bin_totals(
    predictions: torch.Tensor, outcomes: torch.Tensor, num_bins: int = NUM_BINS
) -> torch.Tensor:
    """
    Count, sum of predictions and sum of outcomes in equal-width bins.

    Args:
        predictions (`torch.Tensor` of shape `(..., N)`): probabilities; 1 falls into the last bin.
        outcomes (`torch.Tensor` of shape `(N,)`): bool.

    Returns:
        `torch.Tensor` of shape `(..., num_bins, 3)`, float64.
    """
    predictions = predictions.double()
    bins = (predictions * num_bins).long().clamp(0, num_bins - 1)
    values = torch.stack(
        (torch.ones_like(predictions), predictions, outcomes.double().expand_as(predictions)), -1
    )
    totals = values.new_zeros(*predictions.shape[:-1], num_bins, 3)
    return totals.scatter_add_(-2, bins[..., None].expand_as(values), values)


def expected_calibration_error(
    predictions: torch.Tensor, outcomes: torch.Tensor, num_bins: int = NUM_BINS
) -> torch.Tensor:
    """
    Mean distance between predicted and observed share, over equal-width bins weighted by count.

    Args:
        predictions (`torch.Tensor` of shape `(..., N)`): probabilities.
        outcomes (`torch.Tensor` of shape `(N,)`): bool.

    Returns:
        `torch.Tensor` of shape `(...)`; NaN without predictions.
    """
    count, predicted, observed = bin_totals(predictions, outcomes, num_bins).unbind(-1)
    return (predicted - observed).abs().sum(dim=-1) / count.sum(dim=-1)


def ranking_quality(predictions: torch.Tensor, outcomes: torch.Tensor) -> float:
    """
    Area under the ROC curve: probability that a positive is ranked above a negative, ties counting
    half. `(N,)` and `(N,)`; NaN if one class is empty.
    """
    values, inverse = predictions.double().unique(return_inverse=True)
    positives = torch.zeros(len(values), dtype=torch.float64)
    positives.scatter_add_(0, inverse, outcomes.double())
    negatives = torch.zeros_like(positives).scatter_add_(0, inverse, (~outcomes).double())
    below = negatives.cumsum(0) - negatives / 2
    pairs = positives.sum() * negatives.sum()
    return float((positives * below).sum() / pairs) if pairs else float("nan")


def brier_score(predictions: torch.Tensor, outcomes: torch.Tensor) -> float:
    """Mean squared error of `(N,)` predictions; NaN without any."""
    return float((predictions.double() - outcomes.double()).square().mean())

"""
Sequential temperature scaling (STS, paper section 4): tensors in, tensors out.

Position by position, one temperature divides the confidence logit so that the *cumulative* product
up to there, the survival that the scheduler uses, is as often right as it says. Temperatures do not
change the order of the confidences at a position, and cutting by them is as lossless as without:
they are constants. So are offsets, which are added behind them.
"""

from dataclasses import dataclass, replace
from statistics import mean

import torch

from .acceptance import AcceptanceRecords
from .prefix_scheduler import calibrated_logits, survival_probabilities
from .reliability import brier_score, expected_calibration_error, ranking_quality

# 1/8 to 8 in steps of 4.4 %; the paper gives no grid. 1 is on it.
TEMPERATURE_GRID = torch.tensor([2.0 ** (i / 16) for i in range(-48, 49)], dtype=torch.float64)

# Bounds of an offset and how often that range is halved: to 1e-6.
_MOST_OFFSET, _HALVINGS = 8.0, 24
# One round that was thought impossible must not decide alone.
_LEAST_PROBABILITY = 1e-6

# Fewest rounds of either outcome that say anything about a temperature.
_MIN_OUTCOMES = 20


def survival_predictions(
    confidence_logits: torch.Tensor,
    temperatures: torch.Tensor | None = None,
    offsets: torch.Tensor | None = None,
) -> torch.Tensor:
    """
    Predicted survival of every prefix.

    Args:
        confidence_logits (`torch.Tensor` of shape `(N, γ)`): raw.
        temperatures, offsets (`torch.Tensor` of shape `(γ,)`, *optional*): 1 and 0 by default.

    Returns:
        `torch.Tensor` of shape `(N, γ)`, float64.
    """
    logits = calibrated_logits(confidence_logits.double(), temperatures, offsets)
    return survival_probabilities(logits)


def fit_temperatures(records: AcceptanceRecords) -> torch.Tensor:
    """
    Temperatures by STS: for k = 1…γ in order, the one of the grid with the smallest expected
    calibration error of the cumulative product, earlier ones fixed. Equals go to the one closest to
    1; a position that fewer than 20 rounds survived, or fewer than 20 did not, keeps 1.

    Returns:
        `torch.Tensor` of shape `(γ,)`, float64.
    """
    return _fit(records, with_offsets=False)[0]


def fit_with_offsets(records: AcceptanceRecords) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Temperatures, each with the offset that makes the mean prediction right: beyond the paper, for
    confidences that are off by a constant, which no temperature can take away.

    In order and on the cumulative product, as in STS, but of the grid the temperature with the
    greatest likelihood is taken. Once the mean is right, the calibration error alone would be
    content with the highest temperature, under which a confidence says nothing any more. The order
    of the confidences at a position stays as it was. A position that fewer than 20 rounds survived,
    or fewer than 20 did not, keeps 1 and 0.

    Returns:
        Temperatures and offsets, each `torch.Tensor` of shape `(γ,)`, float64.
    """
    return _fit(records, with_offsets=True)


def _fit(records: AcceptanceRecords, with_offsets: bool) -> tuple[torch.Tensor, torch.Tensor]:
    temperatures = torch.ones(records.block_size, dtype=torch.float64)
    offsets = torch.zeros(records.block_size, dtype=torch.float64)
    prefix = torch.ones(len(records), dtype=torch.float64)
    # Closest to 1 first: the minimum is taken at its first occurrence.
    grid = TEMPERATURE_GRID[TEMPERATURE_GRID.log().abs().argsort(stable=True)]
    for k in range(records.block_size):
        logits = records.confidence_logits[:, k].double()
        judged = records.judged(k)
        outcomes = records.survived(k)[judged]
        if min(int(outcomes.sum()), int((~outcomes).sum())) >= _MIN_OUTCOMES:
            scaled, before = logits[judged] / grid[:, None], prefix[judged]
            if with_offsets:
                shifts = _mean_matching(scaled, before, outcomes.double().mean())
                loss = _log_loss(before * (scaled + shifts[:, None]).sigmoid(), outcomes)
            else:
                shifts = torch.zeros_like(grid)
                loss = expected_calibration_error(before * scaled.sigmoid(), outcomes)
            best = loss.argmin()
            temperatures[k], offsets[k] = grid[best], shifts[best]
        prefix = prefix * (logits / temperatures[k] + offsets[k]).sigmoid()
    return temperatures, offsets


def _log_loss(predictions: torch.Tensor, outcomes: torch.Tensor) -> torch.Tensor:
    """Mean negative log-likelihood `(G,)` of `(G, N)` predictions."""
    right = predictions.where(outcomes, 1 - predictions)
    return -right.clamp(min=_LEAST_PROBABILITY).log().mean(dim=1)


def _mean_matching(
    logits: torch.Tensor, prefix: torch.Tensor, observed: torch.Tensor
) -> torch.Tensor:
    """
    Offsets `(G,)` at which the mean of `prefix · σ(logits + offset)`, of `(N,)` and `(G, N)`, is
    `observed`, or as near as the range allows. The mean rises with the offset, so the range is
    halved.
    """
    low, high = (logits.new_full((logits.shape[0],), end) for end in (-_MOST_OFFSET, _MOST_OFFSET))
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        too_low = (prefix * (logits + middle[:, None]).sigmoid()).mean(dim=1) < observed
        low, high = middle.where(too_low, low), high.where(too_low, middle)
    return (low + high) / 2


@dataclass(frozen=True)
class PositionReport:
    """
    How good the predicted survival of one position is.

    Attributes:
        position (`int`): 0-based.
        count (`int`): rounds that judged it.
        survival (`float`): share of them in which it was accepted, with everything before.
        ece, brier, auc (`float`):
            Expected calibration error (20 bins), mean squared error, area under the ROC curve; NaN
            where there is nothing to measure.
    """

    position: int
    count: int
    survival: float
    ece: float
    brier: float
    auc: float


def assess(
    records: AcceptanceRecords,
    temperatures: torch.Tensor | None = None,
    offsets: torch.Tensor | None = None,
) -> list[PositionReport]:
    """Reports of all γ positions, with temperatures and offsets `(γ,)` or without."""
    predictions = survival_predictions(records.confidence_logits, temperatures, offsets)
    reports = []
    for k in range(records.block_size):
        judged = records.judged(k)
        predicted, survived = predictions[judged, k], records.survived(k)[judged]
        reports.append(
            PositionReport(
                position=k,
                count=int(judged.sum()),
                survival=float(survived.double().mean()),
                ece=float(expected_calibration_error(predicted, survived)),
                brier=brier_score(predicted, survived),
                auc=ranking_quality(predicted, survived),
            )
        )
    return reports


def mean_ece(reports: list[PositionReport]) -> float:
    """Expected calibration error over all positions, weighted by their counts."""
    total = sum(report.count for report in reports)
    weighted = sum(report.ece * report.count for report in reports if report.count)
    return weighted / total if total else float("nan")


def chance_ece(
    records: AcceptanceRecords,
    temperatures: torch.Tensor | None = None,
    offsets: torch.Tensor | None = None,
    num_draws: int = 20,
) -> float:
    """
    The mean ECE that perfect confidences would show on so many rounds, which tells an error from
    chance: the outcomes are drawn from the predictions themselves. The same in every call.
    """
    logits = calibrated_logits(records.confidence_logits.double(), temperatures, offsets)
    generator = torch.Generator().manual_seed(0)
    errors = []
    for _ in range(num_draws):
        draws = torch.rand(logits.shape, generator=generator, dtype=torch.float64)
        accepted = (draws < logits.sigmoid()).long().cumprod(dim=1).sum(dim=1)
        drawn = replace(records, num_accepted=accepted.minimum(records.num_verified))
        errors.append(mean_ece(assess(drawn, temperatures, offsets)))
    return mean(errors)

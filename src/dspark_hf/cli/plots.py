"""Figures of the scheduling commands."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..scheduling.acceptance import AcceptanceRecords
from ..scheduling.calibration import Calibration
from ..scheduling.recommendation import PolicyOutcome
from ..scheduling.reliability import bin_totals
from ..scheduling.settings import FULL, LAGGED, THRESHOLD
from ..scheduling.temperature_scaling import assess, survival_predictions
from ..scheduling.throughput_profile import ThroughputProfile

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's palette, which colour-blind readers can tell apart.
BLUE, ORANGE, GREEN, PURPLE, GREY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#999999"
_PLOT_BINS = 10
_MIN_COUNT = 10
_MIN_SURVIVORS = 20


def plotting() -> Any:
    """
    Matplotlib's pyplot, without a window.

    Raises:
        `OSError`: it is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise OSError(
            "A plot needs matplotlib. Install it with: pip install 'dspark-hf[plots]'"
        ) from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def plot_profile(profile: ThroughputProfile, path: Path) -> None:
    """Time of a step, and tokens per second, by tokens in the step."""
    plt = plotting()
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    counts = np.arange(1, profile.tokens[-1] + 1)
    measured = 1000 / np.array(profile.steps_per_second)
    seconds = profile.step_seconds(counts)
    left.plot(profile.tokens, measured, "o", color=BLUE, markersize=4, label="measured")
    left.plot(counts, 1000 * seconds, color=ORANGE, linewidth=1.5, label="used (never falls)")
    left.set(xlabel="tokens in the step, B", ylabel="ms per target step")
    if profile.draft_seconds:
        left.axhline(
            1000 * profile.draft_seconds, color=GREEN, linestyle="--", label="drafting a block"
        )
    left.legend(frameon=False)
    right.plot(counts, counts / seconds, color=BLUE)
    right.set(xlabel="tokens in the step, B", ylabel="tokens per second, B · SPS(B)")
    for axes in (left, right):
        _tidy(axes)
        axes.set_ylim(bottom=0)
    figure.suptitle(_title(profile.target, profile.device, profile.dtype), fontsize=9)
    _save(plt, figure, path)


def plot_reliability(records: AcceptanceRecords, calibration: Calibration, path: Path) -> None:
    """Observed against predicted survival, raw and calibrated (figure 6 of the paper)."""
    plt = plotting()
    # Positions that hardly any round survives have nothing to show.
    told = [r.position for r in assess(records) if r.count * r.survival >= _MIN_SURVIVORS]
    positions = [told[i] for i in _spread(len(told), 4)] or [0]
    figure, panels = plt.subplots(
        1, len(positions), figsize=(3.1 * len(positions), 3.3), layout="constrained", squeeze=False
    )
    fitted = [torch.tensor(calibration.temperatures)]
    method = "after STS"
    if calibration.offsets is not None:
        fitted, method = [*fitted, torch.tensor(calibration.offsets)], "after STS with offsets"
    for axes, k in zip(panels[0], positions, strict=True):
        axes.plot([0, 1], [0, 1], color=GREY, linewidth=1, linestyle=":")
        survived = records.survived(k)[records.judged(k)]
        for scale, colour, marker, name in (
            ((), ORANGE, "o", "raw"),
            (fitted, BLUE, "s", method),
        ):
            report = assess(records, *scale)[k]
            survival = survival_predictions(records.confidence_logits, *scale)
            predicted = survival[records.judged(k), k]
            count, total, observed = bin_totals(predicted, survived, _PLOT_BINS).unbind(-1)
            # A bin of a few rounds is noise and would draw the eye.
            shown = count >= _MIN_COUNT
            axes.plot(
                (total / count)[shown],
                (observed / count)[shown],
                color=colour,
                marker=marker,
                markersize=4,
                linewidth=1.2,
                label=f"{name}: ECE {100 * report.ece:.1f} %",
            )
        axes.set_title(f"draft token {k + 1}  (AUC {report.auc:.2f})", fontsize=9)
        axes.set(xlabel="predicted survival", xlim=(0, 1), ylim=(0, 1))
        axes.legend(frameon=False, fontsize=7, loc="upper left")
        _tidy(axes)
    panels[0][0].set_ylabel("observed survival")
    _save(plt, figure, path)


def plot_thresholds(outcomes: list[PolicyOutcome], path: Path) -> None:
    """Acceptance rate, verified tokens and τ by confidence threshold (figure 5 of the paper)."""
    plt = plotting()
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
    cuts = [outcome.settings.confidence_threshold for outcome in outcomes]
    left.plot(cuts, [100 * one.acceptance_rate for one in outcomes], color=BLUE, marker="o")
    left.set(ylabel="accepted share of verified tokens, %", ylim=(0, 100))
    right.plot(cuts, [one.accepted_length for one in outcomes], color=BLUE, marker="o", label="τ")
    right.plot(
        cuts, [one.mean_verified for one in outcomes], color=ORANGE, marker="s", label="verified ℓ"
    )
    right.set(ylabel="tokens per round", ylim=(0, None))
    right.legend(frameon=False)
    for axes in (left, right):
        axes.set_xlabel("confidence threshold")
        _tidy(axes)
    _save(plt, figure, path)


def plot_loads(outcomes: dict[int, list[PolicyOutcome]], path: Path) -> None:
    """Verified tokens and speed-up by load (figure 8 of the paper), of `compare_policies`."""
    names = (
        "everything verified",
        "best fixed ℓ",
        "best threshold",
        "scheduled, early stop",
        "scheduled, lagged",
    )
    plot_verified(
        list(outcomes),
        {
            name: [(rules[i].mean_verified, rules[i].speedup) for rules in outcomes.values()]
            for i, name in enumerate(names)
        },
        path,
    )


def plot_verified(
    loads: list[int], by_rule: dict[str, list[tuple[float, float]]], path: Path
) -> None:
    """Verified tokens, and speed over plain decoding, of up to five rules at each of `loads`."""
    plt = plotting()
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    styles = ((GREY, "-"), (GREEN, "-"), (PURPLE, "-"), (BLUE, "-"), (ORANGE, "--"))
    for (name, cells), (colour, line) in zip(by_rule.items(), styles, strict=False):
        verified, speed = zip(*cells, strict=True)
        style = {"color": colour, "label": name, "linewidth": 1.6, "linestyle": line}
        left.plot(loads, verified, **style)
        right.plot(loads, speed, **style)
    left.set(ylabel="draft tokens verified per row", ylim=(0, None))
    right.axhline(1, color="black", linewidth=0.8, linestyle=":")
    right.set(ylabel="tokens per second, over plain decoding")
    right.legend(frameon=False, fontsize=8)
    for axes in (left, right):
        axes.set_xlabel("load, tokens of other work in the step")
        _tidy(axes)
    _save(plt, figure, path)


def name_of(outcome: PolicyOutcome) -> str:
    """How tables call a rule."""
    settings = outcome.settings
    if settings.verification == FULL:
        return f"fixed ℓ = {outcome.num_draft_tokens}"
    if settings.verification == THRESHOLD:
        return f"threshold {settings.confidence_threshold:g}"
    return f"scheduled, {'lagged' if settings.scheduler == LAGGED else 'early stop'}"


def _spread(count: int, most: int) -> list[int]:
    """Up to `most` indices from the first to the last of `count`."""
    return sorted({round(i) for i in np.linspace(0, count - 1, min(most, count))})


def _title(*parts: str | None) -> str:
    return "  ·  ".join(part for part in parts if part)


def _tidy(axes: "Axes") -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)


def _save(plt: Any, figure: Any, path: Path) -> None:
    figure.savefig(path, dpi=150)
    plt.close(figure)

"""
Plots of results: conditional acceptance by position (paper figure 2), τ against draft depth or
block length (figures 3 and 4), and reliability diagrams of the confidences (figure 6).
"""

import importlib.util
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .tasks import DOMAINS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which colour-blind readers can tell apart, with a marker each.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
_MARKERS = "osD^vPX"
_Z_95 = 1.96
SWEEPS = {"layers": ("num_layers", "draft layers"), "block-size": ("block_size", "block length γ")}


def can_plot() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def draw_plots(results: dict[str, Any], folder: Path) -> list[str]:
    """
    Draw what an evaluation can show into PNG files.

    Args:
        results (`dict`): of [`summarise`].
        folder (`Path`): an existing folder.

    Returns:
        Names of the files: per temperature, acceptance by position of all drafters, and a
        reliability diagram of each drafter with a confidence head.
    """
    names = []
    for temperature in dict.fromkeys(result["temperature"] for result in results["results"]):
        here = [r for r in results["results"] if r["temperature"] == temperature]
        figure = acceptance_figure(here, results["settings"]["target"], temperature)
        names.append(f"acceptance_t{temperature:g}.png")
        figure.savefig(folder / names[-1])
        for result in here:
            confidence = result["pooled"]["confidence"]
            if confidence is not None:
                title = f"{result['drafter']}, temperature {temperature:g}"
                drafter = re.sub(r"[^\w.-]+", "-", result["drafter"])
                names.append(f"reliability_{drafter}_t{temperature:g}.png")
                reliability_figure(confidence, title).savefig(folder / names[-1])
    return names


def acceptance_figure(
    results: Sequence[dict[str, Any]], target: str, temperature: float
) -> "Figure":
    """
    Conditional acceptance by position, a line per drafter with 95 % Wilson intervals, and a panel
    per domain if the sets are the paper's.
    """
    panels = _domain_panels([figures["name"] for figures in results[0]["sets"]])
    figure = _new_figure(len(panels))
    axes = figure.subplots(1, len(panels), sharex=True, sharey=True, squeeze=False)[0]
    lowest = 1.0
    for axis, (title, names) in zip(axes, panels.items(), strict=True):
        for i, result in enumerate(results):
            chosen = [figures for figures in result["sets"] if figures["name"] in names]
            accepted, reached = (
                _sum_by_position(chosen, f"{x}_at") for x in ("accepted", "reached")
            )
            known = [k for k, n in enumerate(reached) if n]
            intervals = [wilson_interval(accepted[k], reached[k]) for k in known]
            positions = [k + 1 for k in known]
            rates = [accepted[k] / reached[k] for k in known]
            axis.fill_between(
                positions,
                [low for low, _ in intervals],
                [high for _, high in intervals],
                color=_COLOURS[i % len(_COLOURS)],
                alpha=0.12,
                linewidth=0,
            )
            axis.plot(positions, rates, label=result["drafter"], **_line_style(i))
            lowest = min([lowest, *rates])
        axis.set_title(title)
        axis.set_xlabel("position in the block")
    axes[0].set_ylabel("conditional acceptance")
    axes[0].set_ylim(max(0.0, math.floor(10 * lowest) / 10), 1.0)
    width = max(len(result["pooled"]["verified_at"]) for result in results)
    axes[0].set_xlim(0.7, width + 0.3)
    axes[0].set_xticks(range(1, width + 1, 1 + width // 10))
    axes[0].yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
    _finish(figure, axes, f"{target}, temperature {temperature:g}")
    return figure


def reliability_figure(confidence: dict[str, Any], title: str) -> "Figure":
    """
    Predicted against observed survival at up to four positions. A point is a bin; its size grows
    with the bin's count, and the line through it is a 95 % Wilson interval.
    """
    width = len(confidence["counts"])
    shown = sorted({round(i * (width - 1) / 3) for i in range(4)}) if width > 1 else [0]
    figure = _new_figure(len(shown))
    axes = figure.subplots(1, len(shown), sharey=True, squeeze=False)[0]
    for axis, k in zip(axes, shown, strict=True):
        bins = confidence["reliability"][k]
        filled = [i for i, count in enumerate(bins["counts"]) if count]
        axis.plot([0, 1], [0, 1], color="0.6", linewidth=1, linestyle=(0, (4, 3)))
        predicted = [bins["predicted"][i] for i in filled]
        observed = [bins["observed"][i] for i in filled]
        trials = [bins["counts"][i] for i in filled]
        intervals = [wilson_interval(y * n, n) for y, n in zip(observed, trials, strict=True)]
        lows, highs = zip(*intervals, strict=True)
        axis.vlines(predicted, lows, highs, color=_COLOURS[0], linewidth=1.2, alpha=0.35)
        axis.scatter(
            predicted,
            observed,
            s=[14 + 100 * n / max(trials) for n in trials],
            color=_COLOURS[0],
            edgecolor="white",
            linewidth=0.8,
            zorder=3,
            clip_on=False,
        )
        axis.set(title=f"position {k + 1}", xlabel="predicted survival", xlim=(0, 1), ylim=(0, 1))
        axis.set_aspect("equal")
        auc = confidence["roc_auc"][k]
        text = f"ECE {100 * confidence['ece'][k]:.1f} %\n"
        text += "" if auc is None or math.isnan(auc) else f"AUC {auc:.2f}\n"
        text += f"n = {confidence['counts'][k]:,}"
        box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 2}
        axis.text(
            0.04, 0.96, text, transform=axis.transAxes, va="top", fontsize=9, color="0.2", bbox=box
        )
    axes[0].set_ylabel("observed survival")
    _finish(figure, axes, title, with_legend=False)
    return figure


def sweep_figure(results: Sequence[dict[str, Any]], by: str, temperature: float) -> "Figure":
    """
    Macro τ of many drafters against one of their dimensions, a line per method and a panel per
    domain if the sets are the paper's.

    Args:
        results (`Sequence[dict]`): results of [`summarise`] on one target, one or several runs.
        by (`str`): `"layers"` or `"block-size"`.
        temperature (`float`): which results to show.

    Raises:
        `ValueError`: different targets, different sets, or nothing at this temperature.
    """
    fact, label = SWEEPS[by]
    points = _sweep_points(results, fact, temperature)
    panels = _domain_panels(list(points[0][2]))
    figure = _new_figure(len(panels))
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, (title, names) in zip(axes, panels.items(), strict=True):
        for i, method in enumerate(dict.fromkeys(point[0] for point in points)):
            line = sorted(
                (value, sum(taus[name] for name in names) / len(names))
                for method_, value, taus in points
                if method_ == method
            )
            axis.plot(
                [x for x, _ in line], [tau for _, tau in line], label=method, **_line_style(i)
            )
        axis.set_title(title)
        axis.set_xlabel(label)
        axis.set_xticks(sorted({point[1] for point in points}))
    axes[0].set_ylabel("accepted length τ")
    target = results[0]["settings"]["target"]
    _finish(figure, axes, f"{target}, temperature {temperature:g}")
    return figure


def wilson_interval(successes: float, trials: float) -> tuple[float, float]:
    """95 % interval of a rate (Wilson score), sensible for few trials and rates near 0 and 1."""
    rate, z2 = successes / trials, _Z_95**2 / trials
    centre = (rate + z2 / 2) / (1 + z2)
    half = math.sqrt(rate * (1 - rate) * z2 + z2**2 / 4) / (1 + z2)
    return max(0.0, centre - half), min(1.0, centre + half)


def _sweep_points(
    results: Sequence[dict[str, Any]], fact: str, temperature: float
) -> list[tuple[str, int, dict[str, float]]]:
    """Method, dimension and τ by set of every drafter."""
    targets = {result["settings"]["target_fingerprint"] for result in results}
    if len(targets) > 1:
        names = sorted({result["settings"]["target"] for result in results})
        raise ValueError(
            f"The results are of different targets, or of one in several precisions "
            f"({', '.join(names)})."
        )
    for name in ("max_new_tokens", "confidence_threshold", "thinking"):
        values = sorted({str(result["settings"][name]) for result in results})
        if len(values) > 1:
            raise ValueError(
                f"The results were measured with different {name} ({', '.join(values)}), so their "
                "accepted lengths do not compare."
            )
    points, sizes = [], set[tuple[tuple[str, int], ...]]()
    for result in results:
        facts = {drafter["name"]: drafter for drafter in result["drafters"]}
        for row in result["results"]:
            if row["temperature"] == temperature:
                drafter = facts[row["drafter"]]
                if drafter[fact] is None:
                    raise ValueError(f"The {fact} of drafter {drafter['name']!r} is not known.")
                taus = {figures["name"]: figures["accepted_length"] for figures in row["sets"]}
                sizes.add(tuple(sorted((s["name"], s["num_prompts"]) for s in row["sets"])))
                if None in taus.values():
                    raise ValueError(
                        f"Drafter {drafter['name']!r} has no round in a set: every answer ended "
                        "with its first token."
                    )
                points.append((drafter["method"], drafter[fact], taus))
    if not points:
        raise ValueError(f"The results hold nothing at temperature {temperature:g}.")
    if len(sizes) > 1:
        listed = "; ".join(", ".join(f"{n} ({k})" for n, k in sets) for sets in sorted(sizes))
        raise ValueError(
            "The results are on different sets, or different numbers of prompts of them, which do "
            f"not compare: {listed}."
        )
    return points


def _domain_panels(names: Sequence[str]) -> dict[str, list[str]]:
    """Panels and their sets: the paper's domains, or everything at once."""
    domains = {
        domain: [name for name in members if name in names] for domain, members in DOMAINS.items()
    }
    domains = {domain: members for domain, members in domains.items() if members}
    if len(domains) < 2 or sum(map(len, domains.values())) < len(names):
        return {f"{len(names)} set{'s' if len(names) > 1 else ''}": list(names)}
    return domains


def _sum_by_position(sets: Sequence[dict[str, Any]], name: str) -> list[int]:
    width = max(len(figures[name]) for figures in sets)
    return [
        sum(figures[name][k] for figures in sets if k < len(figures[name])) for k in range(width)
    ]


def _line_style(i: int) -> dict[str, Any]:
    colour, marker = _COLOURS[i % len(_COLOURS)], _MARKERS[i % len(_MARKERS)]
    return {
        "color": colour,
        "marker": marker,
        "markersize": 5.5,
        "linewidth": 1.8,
        "markeredgecolor": "white",
        "markeredgewidth": 0.8,
        "clip_on": False,
    }


def _new_figure(num_panels: int) -> "Figure":
    # The object interface: no windows, no global state.
    from matplotlib.figure import Figure

    width = 4.8 if num_panels == 1 else 1.0 + 2.9 * num_panels
    return Figure(figsize=(width, 3.6), dpi=160, layout="constrained")


def _finish(figure: "Figure", axes: Sequence["Axes"], title: str, with_legend: bool = True) -> None:
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(color="0.9", linewidth=0.8)
        axis.set_axisbelow(True)
        axis.title.set_fontsize(11)
    figure.suptitle(title, fontsize=12)
    if with_legend:
        handles, labels = axes[0].get_legend_handles_labels()
        # As many as stand beside each other without being cut off.
        columns = min(len(labels), 4 if len(axes) > 1 else 2)
        figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)

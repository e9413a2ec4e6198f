"""Results as files: JSON for programs, Markdown for people."""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..loading.saving import save_atomically
from .plotting import draw_plots

_DEFINITIONS = """\
τ: tokens committed per round (one target forward), bonus token included, ratio of sums; the first \
token of a text comes from the prefill and is not counted. ±: one standard error over prompts. \
Macro: mean over sets. Speed-up: tokens per second of `generate` over those of plain `generate` on \
the same prompts, taking turns with it. Acceptance at position k: *prefix*, of the rounds that \
verified token k, those that accepted all tokens up to it; *conditional*, of those, the ones that \
had accepted all tokens before it. Confidence: predicted survival (cumulative product) against \
prefix acceptance; ECE in 20 bins, mean over positions weighted by count. Positions and confidence \
are pooled over all sets."""


def read_evaluation(path: Path) -> dict[str, Any]:
    """
    A `results.json` written by [`write_json`].

    Raises:
        `ValueError`: not such a file.
    """
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}).") from error
    keys = ("settings", "drafters", "results")
    if not isinstance(results, dict) or any(key not in results for key in keys):
        raise ValueError(
            f"{path} is not the result of an evaluation: it needs {', '.join(keys)}. Name the "
            "results.json of an output folder of `dspark-hf evaluate`."
        )
    return results


def write_reports(results: dict[str, Any], folder: Path, with_plots: bool = True) -> list[Path]:
    """
    Write `results.json`, `report.md` and the plots into a folder, all of them or none.

    Args:
        results (`dict`): of [`summarise`].
        folder (`Path`): created if needed.
        with_plots (`bool`, *optional*, defaults to `True`): needs matplotlib.

    Returns:
        The files written.
    """
    with save_atomically(folder) as temporary:
        plots = draw_plots(results, temporary) if with_plots else []
        content = json.dumps(_without_nan(results), indent=2, allow_nan=False) + "\n"
        (temporary / "results.json").write_text(content, encoding="utf-8")
        (temporary / "report.md").write_text(markdown_report(results, plots), encoding="utf-8")
        names = sorted(file.name for file in temporary.iterdir())
    return [folder / name for name in names]


def markdown_report(results: dict[str, Any], plots: Sequence[str] = ()) -> str:
    """
    Tables of sets by drafters, positions, confidence, and what the figures depend on.

    Args:
        results (`dict`): of [`summarise`].
        plots (`Sequence[str]`, *optional*): image files to show, named relative to the report.
    """
    settings = results["settings"]
    parts = [f"# Evaluation on {settings['target']}", _settings_line(settings)]
    parts.append(_drafters_table(results["drafters"]))
    for temperature in dict.fromkeys(result["temperature"] for result in results["results"]):
        here = [r for r in results["results"] if r["temperature"] == temperature]
        mode = "greedy" if temperature == 0 else "sampled"
        parts.append(f"## Temperature {temperature:g} ({mode})")
        parts.append("### Accepted length τ\n\n" + _tau_table(here))
        if here[0]["pooled"]["same_text_as_plain"] is not None:
            parts.append(_same_texts_line(here))
        parts.append("### Speed\n\n" + _speed_table(here))
        parts.append("### Acceptance by position\n\n" + _position_table(here))
        if any(result["pooled"]["confidence"] for result in here):
            parts.append("### Confidence\n\n" + _confidence_table(here))
    if plots:
        parts.append("## Plots\n\n" + "\n\n".join(f"![{Path(p).stem}]({p})" for p in plots))
    parts.append("## Definitions\n\n" + _DEFINITIONS)
    if "provenance" in results:
        rows = [[key, f"`{value}`"] for key, value in results["provenance"].items()]
        parts.append("## Provenance\n\n" + _table(["", ""], rows))
    return "\n\n".join(parts) + "\n"


def gain(results: Sequence[dict[str, Any]]) -> list[float]:
    """How far the first drafter's macro τ is above each one's, as the paper quotes its gains."""
    first = results[0]["macro"]["accepted_length"]
    return [first / result["macro"]["accepted_length"] - 1 for result in results]


def _settings_line(settings: dict[str, Any]) -> str:
    threshold = settings["confidence_threshold"]
    policy = f"blocks cut at confidence {threshold:g}" if threshold else "whole blocks verified"
    return (
        f"{settings['processor']} ({settings['device']}), {settings['threads']} thread(s), "
        f"{settings['dtype']}, {settings['attention']} attention; one sequence at a time, up to "
        f"{settings['max_new_tokens']} new tokens, first user turn, thinking off, {policy}, seed "
        f"{settings['seed']} + prompt index. dspark-hf {settings['dspark_hf']}, Transformers "
        f"{settings['transformers']}, torch {settings['torch']}."
    )


def _drafters_table(drafters: Sequence[dict[str, Any]]) -> str:
    rows = [
        [
            drafter["name"],
            drafter["method"],
            str(drafter["block_size"]),
            str(drafter["num_layers"] or "–"),
            f"{drafter['num_parameters'] / 1e6:.1f} M",
            f"`{drafter['id']}`",
        ]
        for drafter in drafters
    ]
    return _table(["drafter", "method", "γ", "layers", "parameters", "id"], rows)


def _tau_table(results: Sequence[dict[str, Any]]) -> str:
    def cell(figures: dict[str, Any]) -> str:
        error = figures["accepted_length_error"]
        tau = _number(figures["accepted_length"])
        return tau if math.isnan(error) else f"{tau} ± {error:.2f}"

    rows = _grid(results, cell)
    if len(results) > 1:
        gains = [f"{100 * value:+.1f} %" for value in gain(results)[1:]]
        rows.append([f"{results[0]['drafter']} over it", "", "", *gains])
    return _table(["set", "prompts", *(r["drafter"] for r in results)], rows)


def _same_texts_line(results: Sequence[dict[str, Any]]) -> str:
    counts = ", ".join(
        f"{result['drafter']} {result['pooled']['same_text_as_plain']} of "
        f"{result['pooled']['num_prompts']}"
        for result in results
    )
    return (
        f"Answers equal to plain decoding's, token for token: {counts}. In float32 that is all of "
        "them; in lower precision, near-ties can part the texts."
    )


def _speed_table(results: Sequence[dict[str, Any]]) -> str:
    def cell(figures: dict[str, Any]) -> str:
        speed = f"{figures['tokens_per_second']:.1f}"
        speedup = figures["speedup"]
        return speed if math.isnan(speedup) else f"{speed} ({speedup:.2f} ×)"

    rows = _grid(results, cell)
    plain = [*results[0]["sets"], results[0]["macro"]]
    for row, figures in zip(rows, plain, strict=True):
        row.insert(2, _number(figures["plain_tokens_per_second"], 1))
    names = [result["drafter"] for result in results]
    return "Tokens per second (speed-up over plain).\n\n" + _table(
        ["set", "prompts", "plain", *names], rows
    )


def _grid(
    results: Sequence[dict[str, Any]], cell: Callable[[dict[str, Any]], str]
) -> list[list[str]]:
    """A row per set and one for the macro average; name, prompts, and a cell per drafter."""
    rows = [
        [figures["name"], str(figures["num_prompts"]), *(cell(r["sets"][i]) for r in results)]
        for i, figures in enumerate(results[0]["sets"])
    ]
    prompts = str(sum(figures["num_prompts"] for figures in results[0]["sets"]))
    return [*rows, ["**macro**", prompts, *(f"**{cell(r['macro'])}**" for r in results)]]


def _position_table(results: Sequence[dict[str, Any]]) -> str:
    width = max(len(result["pooled"]["verified_at"]) for result in results)
    rows = []
    for result in results:
        for kind in ("conditional", "prefix"):
            values = result["pooled"][f"{kind}_acceptance"]
            cells = [_percent(value) for value in values]
            rows.append([result["drafter"], kind, *cells, *[""] * (width - len(cells))])
        pooled = result["pooled"]
        rows[-1].extend([_number(pooled["verify_rate"]), _percent(pooled["acceptance_rate"])])
        rows[-2].extend(["", ""])
    positions = [str(k + 1) for k in range(width)]
    return _table(["drafter", "", *positions, "verify rate", "accepted of verified"], rows)


def _confidence_table(results: Sequence[dict[str, Any]]) -> str:
    measured = [result for result in results if result["pooled"]["confidence"]]
    width = max(len(result["pooled"]["confidence"]["counts"]) for result in measured)
    rows = []
    for result in measured:
        confidence = result["pooled"]["confidence"]
        for label, name in (("ECE", "ece"), ("ROC-AUC", "roc_auc"), ("Brier", "brier")):
            cells = [_number(value, 3) for value in confidence[name]]
            cells += [""] * (width - len(cells))
            mean = _number(confidence[f"mean_{name}"], 3)
            rows.append([result["drafter"], label, *cells, mean])
    return _table(["drafter", "", *(str(k + 1) for k in range(width)), "mean"], rows)


def _table(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    ruler = ["---"] * len(heading)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heading, ruler, *rows))


def _number(value: float, digits: int = 2) -> str:
    return "–" if math.isnan(value) else f"{value:.{digits}f}"


def _percent(value: float) -> str:
    return "–" if math.isnan(value) else f"{100 * value:.1f} %"


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

"""`dspark-hf calibrate`: temperatures that make a drafter's confidence mean what it says."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from ..scheduling.acceptance import AcceptanceRecords
from ..scheduling.calibration import Calibration, collect_acceptance, confidence_fingerprint
from ..scheduling.profiling import profile_facts
from ..scheduling.recommendation import PolicyOutcome, replay
from ..scheduling.settings import THRESHOLD, SchedulingSettings
from ..scheduling.temperature_scaling import (
    PositionReport,
    assess,
    chance_ece,
    fit_temperatures,
    fit_with_offsets,
    mean_ece,
)
from ..scheduling.throughput_profile import ThroughputProfile
from . import plots
from .models import Pair, load_pair, machine_facts, read_prompts


def run_calibrate(
    console: Console,
    target: str,
    drafter: str,
    prompts: list[Path],
    output: Path,
    *,
    num_prompts: int,
    num_held_out: int,
    with_offsets: bool,
    batch_size: int,
    max_new_tokens: int,
    temperature: float,
    dtype: str,
    threads: int,
    records_path: Path | None,
    save_into: Path | None,
    plot: Path | None,
    sweep_plot: Path | None,
) -> Calibration:
    """Record rounds, fit temperatures on some prompts and judge them on others."""
    if plot is not None or sweep_plot is not None:
        plots.plotting()
    fitted_on, held_out = split_prompts(prompts, num_prompts, num_held_out)
    pair = load_pair(target, drafter, dtype, threads)
    fingerprint = confidence_fingerprint(pair.drafter)
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": temperature > 0}
    if temperature > 0:
        options |= {"temperature": temperature, "top_k": 0, "top_p": 1.0}
    measured = profile_facts(pair.target, pair.drafter)
    facts = {
        "target": target,
        "prompts": [path.name for path in prompts],
        **options,
        "machine": machine_facts(pair),
        # What a profile and a calibration that are used together with the rounds have to fit.
        "confidence_head": fingerprint,
        "pair": {name: measured[name] for name in ("target", "drafter")},
    }
    fit, held = _collect(console, pair, (fitted_on, held_out), batch_size, options, facts)
    temperatures, offsets = fit_with_offsets(fit) if with_offsets else (fit_temperatures(fit), None)
    before, after = assess(held), assess(held, temperatures, offsets)
    chance = chance_ece(held, temperatures, offsets)
    calibration = Calibration(
        temperatures=tuple(temperatures.tolist()),
        block_size=fit.block_size,
        drafter=fingerprint,
        num_rounds=len(fit),
        ece_before=mean_ece(before),
        ece_after=mean_ece(after),
        offsets=None if offsets is None else tuple(offsets.tolist()),
        facts={**facts, "ece_of_perfect_confidences": chance},
    )
    calibration.save(output)
    console.print(_calibration_table(calibration, before, after, chance))
    if records_path is not None:
        held.save(records_path)
    if save_into is not None:
        calibration.apply_to(pair.drafter)
        pair.drafter.save_pretrained(save_into)
    if plot is not None:
        plots.plot_reliability(held, calibration, plot)
    if sweep_plot is not None:
        plots.plot_thresholds(sweep_thresholds(held, calibration), sweep_plot)
    for path in (output, records_path, save_into, plot, sweep_plot):
        if path is not None:
            console.print(f"written: {path}")
    return calibration


def split_prompts(
    files: list[Path], num_fitted: int, num_held_out: int
) -> tuple[list[str], list[str]]:
    """
    Prompts to fit on, the first of every file, and those to judge on, the next ones. A prompt that
    is among both, of one file or of two, is fitted on only.

    Raises:
        `ValueError`: a file has none left to judge on, or all of them were fitted on.
    """
    fitted_on, held_out = [], []
    for path in files:
        texts = read_prompts(path, num_fitted + num_held_out)
        if len(texts) <= num_fitted:
            raise ValueError(
                f"No prompts of {path} are left to judge the temperatures on: it holds "
                f"{len(texts)}, and --num-prompts {num_fitted} takes the first ones to fit on. "
                "Lower it."
            )
        fitted_on += texts[:num_fitted]
        held_out += texts[num_fitted:]
    held_out = [text for text in held_out if text not in fitted_on]
    if not held_out:
        raise ValueError(
            "Every prompt to judge on is among those to fit on as well. Give files without "
            "repeated prompts."
        )
    return fitted_on, held_out


def _collect(
    console: Console,
    pair: Pair,
    parts: tuple[list[str], list[str]],
    batch_size: int,
    options: dict[str, Any],
    facts: dict[str, Any],
) -> list[AcceptanceRecords]:
    records = []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("generating", total=sum(map(len, parts)))
        for texts in parts:
            # Prompts of a like length share a batch, which saves padding.
            texts = sorted(texts, key=len)
            batches = [texts[i : i + batch_size] for i in range(0, len(texts), batch_size)]
            rounds = collect_acceptance(
                pair.target,
                pair.drafter,
                [pair.encode_batch(batch) for batch in batches],
                on_prompts=lambda count: progress.advance(task, count),
                **options,
            )
            records.append(replace(rounds, facts=facts))
    return records


def sweep_thresholds(records: AcceptanceRecords, calibration: Calibration) -> list[PolicyOutcome]:
    """What each confidence threshold would have verified and accepted, from 0 to 0.95."""
    # Costs play no part in what is verified.
    free = ThroughputProfile((1,), (1.0,))
    return [
        replay(
            records,
            free,
            SchedulingSettings(
                verification=THRESHOLD,
                confidence_threshold=i / 20,
                temperatures=calibration.temperatures,
                offsets=calibration.offsets,
            ),
        )
        for i in range(20)
    ]


def _calibration_table(
    calibration: Calibration,
    before: list[PositionReport],
    after: list[PositionReport],
    chance: float,
) -> Table:
    method = "STS" if calibration.offsets is None else "STS with offsets"
    table = Table(
        title=f"{method} on {calibration.num_rounds} rounds; judged on held-out prompts: mean ECE "
        f"{100 * mean_ece(before):.1f} % → {100 * mean_ece(after):.1f} %",
        title_justify="left",
    )
    table.caption = f"perfect confidences would show {100 * chance:.1f} % on so many rounds"
    has_offsets = calibration.offsets is not None
    headings = ("token", "rounds", "survival", "T", *(["offset"] if has_offsets else []))
    for heading in (*headings, "ECE %", "Brier", "AUC"):
        table.add_column(heading, justify="right")
    for k, (raw, fitted) in enumerate(zip(before, after, strict=True)):
        table.add_row(
            str(k + 1),
            str(raw.count),
            f"{raw.survival:.2f}",
            f"{calibration.temperatures[k]:.2f}",
            *([] if calibration.offsets is None else [f"{calibration.offsets[k]:+.2f}"]),
            f"{100 * raw.ece:.1f} → {100 * fitted.ece:.1f}",
            f"{raw.brier:.3f} → {fitted.brier:.3f}",
            f"{raw.auc:.3f} → {fitted.auc:.3f}",
        )
    return table

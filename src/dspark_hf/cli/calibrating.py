"""`dspark-hf calibrate`: temperatures that make a drafter's confidence mean what it says."""

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from ..scheduling.acceptance import AcceptanceRecords
from ..scheduling.calibration import (
    Calibration,
    PositionReport,
    assess,
    collect_acceptance,
    confidence_fingerprint,
    fit_temperatures,
    mean_ece,
)
from ..scheduling.recommendation import PolicyOutcome, replay
from ..scheduling.settings import THRESHOLD, SchedulingSettings
from ..scheduling.throughput_profile import ThroughputProfile
from . import plots
from .models import load_pair, machine_facts, read_prompts


def run_calibrate(
    console: Console,
    target: str,
    drafter: str,
    prompts: list[Path],
    output: Path,
    *,
    num_prompts: int,
    num_held_out: int,
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
    texts = [read_prompts(path, num_prompts + num_held_out) for path in prompts]
    fitted_on = [text for rows in texts for text in rows[:num_prompts]]
    held_out = [text for rows in texts for text in rows[num_prompts:]]
    if not held_out:
        raise ValueError(
            f"No prompts are left to judge the temperatures on: the files hold at most "
            f"{max(map(len, texts))} each. Lower --num-prompts."
        )
    pair = load_pair(target, drafter, dtype, threads)
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": temperature > 0}
    if temperature > 0:
        options |= {"temperature": temperature, "top_k": 0, "top_p": 1.0}
    facts = {"target": target, "prompts": [path.name for path in prompts], **options}
    facts["machine"] = machine_facts(pair)
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("generating", total=len(fitted_on) + len(held_out))
        fit, held = (
            collect_acceptance(
                pair.target,
                pair.drafter,
                [pair.encode(text) for text in part],
                on_prompt=lambda: progress.advance(task),
                **options,
            )
            for part in (fitted_on, held_out)
        )
    temperatures = fit_temperatures(fit)
    before, after = assess(held), assess(held, temperatures)
    calibration = Calibration(
        temperatures=tuple(temperatures.tolist()),
        block_size=fit.block_size,
        drafter=confidence_fingerprint(pair.drafter),
        num_rounds=len(fit),
        ece_before=mean_ece(before),
        ece_after=mean_ece(after),
        facts=facts,
    )
    calibration.save(output)
    console.print(_calibration_table(calibration, before, after))
    console.print(f"written: {output}")
    if records_path is not None:
        AcceptanceRecords(held.confidence_logits, held.num_accepted, held.num_verified, facts).save(
            records_path
        )
        console.print(f"written: {records_path}")
    if save_into is not None:
        calibration.apply_to(pair.drafter)
        pair.drafter.save_pretrained(save_into)
        console.print(f"written: {save_into}")
    if plot is not None:
        plots.plot_reliability(held, temperatures, plot)
        console.print(f"written: {plot}")
    if sweep_plot is not None:
        plots.plot_thresholds(sweep_thresholds(held, calibration.temperatures), sweep_plot)
        console.print(f"written: {sweep_plot}")
    return calibration


def sweep_thresholds(
    records: AcceptanceRecords, temperatures: tuple[float, ...] | None
) -> list[PolicyOutcome]:
    """What each confidence threshold would have verified and accepted, from 0 to 0.95."""
    # Costs play no part in what is verified.
    free = ThroughputProfile((1,), (1.0,))
    return [
        replay(
            records,
            free,
            SchedulingSettings(
                verification=THRESHOLD, confidence_threshold=i / 20, temperatures=temperatures
            ),
        )
        for i in range(20)
    ]


def _calibration_table(
    calibration: Calibration, before: list[PositionReport], after: list[PositionReport]
) -> Table:
    table = Table(
        title=f"STS on {calibration.num_rounds} rounds; judged on held-out prompts: mean ECE "
        f"{100 * mean_ece(before):.1f} % → {100 * mean_ece(after):.1f} %",
        title_justify="left",
    )
    headings = ("token", "rounds", "survival", "temperature", "ECE %", "after", "Brier", "after")
    for heading in (*headings, "AUC", "after"):
        table.add_column(heading, justify="right")
    for raw, fitted in zip(before, after, strict=True):
        table.add_row(
            str(raw.position + 1),
            str(raw.count),
            f"{raw.survival:.2f}",
            f"{calibration.temperatures[raw.position]:.2f}",
            f"{100 * raw.ece:.1f}",
            f"{100 * fitted.ece:.1f}",
            f"{raw.brier:.3f}",
            f"{fitted.brier:.3f}",
            f"{raw.auc:.3f}",
            f"{fitted.auc:.3f}",
        )
    return table

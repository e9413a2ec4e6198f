"""`dspark-hf recommend`: which rule pays here, or that no drafter does."""

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ..scheduling.acceptance import AcceptanceRecords
from ..scheduling.calibration import Calibration
from ..scheduling.recommendation import PolicyOutcome, compare_policies, recommend
from ..scheduling.settings import SCHEDULED
from ..scheduling.throughput_profile import ThroughputProfile
from . import plots

# Loads that a plot shows, as multiples of the rows.
_LOADS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


def run_recommend(
    console: Console,
    profile_path: Path,
    records_path: Path,
    calibration_path: Path | None,
    *,
    rows: int,
    load: int,
    layout: str,
    plot: Path | None,
) -> dict[str, Any]:
    """Say which rule pays here, from measurements alone."""
    if plot is not None:
        plots.plotting()
    profile = ThroughputProfile.load(profile_path)
    if not profile.draft_seconds:
        raise ValueError(
            f"{profile_path} does not say what a draft costs. Measure it with "
            "`dspark-hf profile --drafter …`."
        )
    records = AcceptanceRecords.load(records_path)
    facts = records.facts or {}
    profile.check(facts.get("pair", {}))
    conditions: dict[str, Any] = {"rows": rows, "layout": layout}
    if calibration_path is not None:
        calibration = _calibration_of(records, calibration_path)
        conditions |= {"temperatures": calibration.temperatures, "offsets": calibration.offsets}
    outcomes = compare_policies(records, profile, load=load, **conditions)
    choice = recommend(outcomes)
    console.print(_outcome_table(outcomes, rows, load))
    if choice is None:
        console.print("[bold]No drafter pays here:[/] generate without assistant_model.")
    else:
        options = dict(choice.options)
        if choice.settings.verification == SCHEDULED:
            options["dspark_throughput_profile"] = str(profile_path)
        keywords = ", ".join(f"{name}={value!r}" for name, value in options.items())
        console.print(
            f"[bold]Use[/] {keywords}: {choice.speedup:.2f}x plain decoding.", highlight=False
        )
    if plot is not None:
        by_load = {
            rows * scale: compare_policies(records, profile, load=rows * scale, **conditions)
            for scale in _LOADS
        }
        plots.plot_loads(by_load, plot)
        console.print(f"written: {plot}")
    return {
        "rows": rows,
        "load": load,
        "layout": layout,
        "speedups": {plots.name_of(outcome): outcome.speedup for outcome in outcomes},
        "recommended": None if choice is None else choice.options,
    }


def _calibration_of(records: AcceptanceRecords, path: Path) -> Calibration:
    """The calibration, of the drafter that the rounds were recorded with."""
    calibration = Calibration.load(path)
    recorded = (records.block_size, (records.facts or {}).get("confidence_head"))
    found = (calibration.block_size, calibration.drafter if recorded[1] else None)
    if found != recorded:
        raise ValueError(
            f"{path} is for a drafter of γ = {found[0]} with confidence head {found[1]}, and the "
            f"rounds are from one of γ = {recorded[0]} with {recorded[1]}. Take both from one run "
            "of `dspark-hf calibrate`."
        )
    return calibration


def _outcome_table(outcomes: list[PolicyOutcome], rows: int, load: int) -> Table:
    table = Table(title=f"{rows} row(s), load {load}", title_justify="left")
    for heading in ("rule", "τ", "verified", "accepted share", "x plain"):
        table.add_column(heading, justify="left" if heading == "rule" else "right")
    for outcome in outcomes:
        table.add_row(
            plots.name_of(outcome),
            f"{outcome.accepted_length:.2f}",
            f"{outcome.mean_verified:.2f}",
            f"{outcome.acceptance_rate:.2f}",
            f"{outcome.speedup:.2f}",
        )
    return table

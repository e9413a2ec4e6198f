"""`dspark-hf profile`: SPS(B) of a target on this machine."""

import time
from pathlib import Path

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from ..scheduling.profiling import default_token_counts, measure_throughput
from ..scheduling.throughput_profile import ThroughputProfile
from . import plots
from .models import load_target
from .probing import load_drafter


def run_profile(
    console: Console,
    target: str,
    drafter: str | None,
    output: Path,
    *,
    max_tokens: int,
    context_length: int,
    rows: int,
    repeats: int,
    dtype: str,
    threads: int,
    cpu_time: bool,
    plot: Path | None,
) -> ThroughputProfile:
    """Measure SPS(B), write it, print and plot it."""
    if plot is not None:
        plots.plotting()
    if cpu_time and threads != 1:
        raise typer.BadParameter("--cpu-time is right on one thread only; add --threads 1")
    counts = default_token_counts(max_tokens, rows)
    model, source = load_target(target, dtype, threads)
    draft_model = None
    if drafter is not None:
        draft_model, _ = load_drafter(drafter, model.dtype, source)
        draft_model = draft_model.to(model.device)
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("measuring", total=None)
        profile = measure_throughput(
            model,
            draft_model,
            token_counts=counts,
            context_length=context_length,
            rows=rows,
            repeats=repeats,
            clock=time.process_time if cpu_time else time.perf_counter,
            on_forward=lambda: progress.advance(task),
        )
    profile.save(output)
    console.print(_profile_table(profile))
    console.print(f"written: {output}")
    if plot is not None:
        plots.plot_profile(profile, plot)
        console.print(f"written: {plot}")
    return profile


def _profile_table(profile: ThroughputProfile) -> Table:
    table = Table(
        title=f"{profile.target}\n{profile.device}, {profile.dtype}, context "
        f"{profile.context_length}, rows {profile.rows}",
        title_justify="left",
    )
    for heading in ("tokens B", "ms per step", "steps/s", "tokens/s", "x one token"):
        table.add_column(heading, justify="right")
    one = float(profile.step_seconds(1))
    for count, rate in zip(profile.tokens, profile.steps_per_second, strict=True):
        table.add_row(
            str(count),
            f"{1000 / rate:.2f}",
            f"{rate:.1f}",
            f"{count * rate:.0f}",
            f"{float(profile.step_seconds(count)) / one:.2f}",
        )
    if profile.draft_seconds:
        table.caption = f"drafting one block: {1000 * profile.draft_seconds:.2f} ms"
    return table

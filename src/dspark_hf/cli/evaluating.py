"""`dspark-hf evaluate` and `dspark-hf sweep`."""

import shlex
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ..evaluation.plotting import can_plot, sweep_figure
from ..evaluation.prompts import PromptSet, read_folder
from ..evaluation.provenance import code_revision
from ..evaluation.reporting import read_evaluation, write_reports
from ..evaluation.running import EvaluationSettings, evaluate
from ..evaluation.tasks import TASKS, load_tasks
from .models import load_models
from .tables import evaluation_tables

_NO_PLOTS = "Plots need matplotlib, which is not installed: pip install matplotlib"


def run_evaluate(
    console: Console,
    target: str,
    drafters: Sequence[str],
    output: Path,
    data: Path | None,
    tasks: Sequence[str],
    max_prompts: int | None,
    settings: EvaluationSettings,
    dtype: str,
    threads: int,
) -> dict[str, Any]:
    """Evaluate drafters side by side, write the reports and print the tables."""
    names = short_names(drafters)
    prompt_sets = load_sets(data, tasks, max_prompts)
    model, tokenizer, loaded = load_models(target, drafters, dtype, threads)
    started = datetime.now(UTC)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    try:
        with Progress(*columns, console=console, transient=True) as progress:
            bar = progress.add_task("evaluate", total=None)

            def on_step(done: int, total: int, name: str) -> None:
                progress.update(bar, completed=done, total=total, description=name)

            results = evaluate(
                model,
                tokenizer,
                dict(zip(names, loaded, strict=True)),
                prompt_sets,
                output,
                settings,
                # Where a folder lies says nothing about the model, and its weights are compared.
                Path(target).resolve().name if Path(target).is_dir() else target,
                on_step,
            )
    except KeyboardInterrupt:
        console.print(f"Interrupted. {output} keeps the answers; the same command continues.")
        raise typer.Exit(130) from None
    results["sources"] = {prompt_set.name: prompt_set.source for prompt_set in prompt_sets}
    results["provenance"] = {
        "command": shlex.join(["dspark-hf", *sys.argv[1:]]),
        "revision": code_revision() or "installed package",
        "started": started.isoformat(timespec="seconds"),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    if not can_plot():
        console.print(_NO_PLOTS)
    written = write_reports(results, output, with_plots=can_plot())
    for table in evaluation_tables(results):
        console.print(table)
    console.print(f"written to {output}: {', '.join(path.name for path in written)}")
    return results


def load_sets(data: Path | None, tasks: Sequence[str], max_prompts: int | None) -> list[PromptSet]:
    """Sets of a folder, or of the Hub; in the order asked for, else in the paper's."""
    if data is None:
        return load_tasks(tasks, max_prompts)
    sets, order = read_folder(data, tasks, max_prompts), [*tasks] or [*TASKS]
    return sorted(sets, key=lambda s: order.index(s.name) if s.name in order else len(order))


def short_names(drafters: Sequence[str]) -> list[str]:
    """The last part of each path or Hub id where that tells them apart, else all of it."""
    names = [Path(drafter).name or drafter for drafter in drafters]
    if len(set(drafters)) < len(drafters):
        raise ValueError(f"Drafters are {', '.join(drafters)}; give each one once.")
    return [
        name if names.count(name) == 1 else drafter
        for name, drafter in zip(names, drafters, strict=True)
    ]


def run_sweep(
    console: Console, paths: Sequence[Path], by: str, temperature: float, output: Path
) -> None:
    """Draw τ against depth or block length of the drafters in several results."""
    if not can_plot():
        raise ValueError(_NO_PLOTS)
    sweep_figure([read_evaluation(path) for path in paths], by, temperature).savefig(output)
    console.print(f"written: {output}")

"""Commands for load-aware verification: `profile`, `calibrate` and `recommend`."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from .options import (
    Drafter,
    Dtype,
    DtypeOption,
    Json,
    NewTokens,
    NumPrompts,
    OutputFile,
    Plot,
    PromptFiles,
    Rows,
    Target,
    Temperature,
    Threads,
    drawable,
    folder,
    writable,
    write_json,
)

commands = typer.Typer()
console = Console()


class Layout(StrEnum):
    """How a target step holds rows of different lengths."""

    padded = "padded"
    packed = "packed"


@commands.command()
def profile(
    target: Target,
    output: OutputFile,
    drafter: Annotated[
        str | None, typer.Option(help="Also measure what a draft of this drafter costs.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens in a step.")] = 64,
    context_length: Annotated[int, typer.Option(min=1, help="Positions in the cache.")] = 256,
    rows: Rows = 1,
    repeats: Annotated[int, typer.Option(min=1, help="Repetitions; the median counts.")] = 7,
    dtype: DtypeOption = Dtype.auto,
    threads: Threads = 0,
    cpu_time: Annotated[
        bool, typer.Option("--cpu-time", help="Count CPU time: for one thread of a shared CPU.")
    ] = False,
    plot: Plot = None,
) -> None:
    """Measure how many target steps per second this machine makes, by tokens in the step."""
    from .profiling import run_profile

    run_profile(
        console,
        target,
        drafter,
        output,
        max_tokens=max_tokens,
        context_length=context_length,
        rows=rows,
        repeats=repeats,
        dtype=dtype.value,
        threads=threads,
        cpu_time=cpu_time,
        plot=plot,
    )


@commands.command()
def calibrate(
    target: Target,
    drafter: Drafter,
    prompts: PromptFiles,
    output: OutputFile,
    num_prompts: NumPrompts = 16,
    num_held_out: Annotated[
        int, typer.Option(min=1, help="Further prompts of each file, to judge on.")
    ] = 16,
    offsets: Annotated[
        bool, typer.Option("--offsets", help="Also fit an offset per position (not in the paper).")
    ] = False,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts answered together.")] = 1,
    max_new_tokens: NewTokens = 128,
    temperature: Temperature = 1.0,
    dtype: DtypeOption = Dtype.auto,
    threads: Threads = 0,
    records: Annotated[
        Path | None,
        typer.Option(callback=writable, help="Keep the held-out rounds here, for recommend."),
    ] = None,
    save_into: Annotated[
        Path | None,
        typer.Option(callback=folder, help="Save the calibrated drafter in this folder."),
    ] = None,
    plot: Plot = None,
    sweep_plot: Annotated[
        Path | None,
        typer.Option(callback=drawable, help="Picture of what each threshold would do."),
    ] = None,
) -> None:
    """Fit temperatures that make the drafter's confidence mean what it says (STS)."""
    from .calibrating import run_calibrate

    run_calibrate(
        console,
        target,
        drafter,
        prompts,
        output,
        num_prompts=num_prompts,
        num_held_out=num_held_out,
        with_offsets=offsets,
        batch_size=batch_size,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        dtype=dtype.value,
        threads=threads,
        records_path=records,
        save_into=save_into,
        plot=plot,
        sweep_plot=sweep_plot,
    )


@commands.command()
def recommend(
    profile_path: Annotated[Path, typer.Option("--profile", help="What `profile` wrote.")],
    records: Annotated[Path, typer.Option(help="What `calibrate --records` wrote.")],
    calibration: Annotated[Path | None, typer.Option(help="What `calibrate` wrote.")] = None,
    rows: Rows = 1,
    load: Annotated[
        int, typer.Option(min=0, max=10**9, help="Tokens of other work in a step.")
    ] = 0,
    layout: Annotated[Layout, typer.Option(help="How a step holds rows.")] = Layout.padded,
    plot: Plot = None,
    json_path: Json = None,
) -> None:
    """Say which block length and rule pay here, or that no drafter does. Runs no model."""
    from .recommending import run_recommend

    result = run_recommend(
        console,
        profile_path,
        records,
        calibration,
        rows=rows,
        load=load,
        layout=layout.value,
        plot=plot,
    )
    write_json(console, json_path, result)

"""Commands of `dspark-hf`: arguments in, calls into the library, tables out."""

import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

app = typer.Typer(
    name="dspark-hf",
    help="DSpark speculative decoding inside Hugging Face generate().",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)
console = Console()
errors = Console(stderr=True)


class Dtype(StrEnum):
    """Precisions that a target is loaded in."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"
    auto = "auto"


class Layout(StrEnum):
    """How a target step holds rows of different lengths."""

    padded = "padded"
    packed = "packed"


Target = Annotated[str, typer.Option(help="Target model: Hub id or folder.")]
Drafter = Annotated[str, typer.Option(help="Drafter: Hub id or folder.")]
DtypeOption = Annotated[Dtype, typer.Option(help="Precision of target and drafter.")]
Threads = Annotated[int, typer.Option(min=0, help="CPU threads; 0 leaves torch's choice.")]
NewTokens = Annotated[int, typer.Option(min=1, help="Tokens to generate.")]
Threshold = Annotated[
    float | None,
    typer.Option(min=0, max=1, help="Confidence that cuts a block; default: the drafter's own."),
]


def _writable(path: Path | None) -> Path | None:
    """Known before the models load, and not after the whole run."""
    if path is not None and not path.absolute().parent.is_dir():
        raise typer.BadParameter(f"the folder of {path} does not exist")
    return path


Json = Annotated[
    Path | None,
    typer.Option("--json", callback=_writable, help="Also write the result as JSON here."),
]

Plot = Annotated[
    Path | None, typer.Option(callback=_writable, help="Also draw a picture here (PNG, SVG, PDF).")
]


def main() -> None:
    """Entry point: expected failures end in one line on stderr, not in a traceback."""
    try:
        app()
    except (OSError, ValueError) as error:
        errors.print(f"[bold red]error:[/] {type(error).__name__}: ", end="")
        errors.print(str(error), markup=False, highlight=False)
        sys.exit(1)


@app.command()
def generate(
    target: Target,
    drafter: Drafter,
    prompt: Annotated[str, typer.Argument(help="User message, or raw text with --raw.")],
    max_new_tokens: NewTokens = 256,
    dtype: DtypeOption = Dtype.auto,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    num_draft_tokens: Annotated[
        int | None, typer.Option(min=0, help="Most tokens verified.")
    ] = None,
    threshold: Threshold = None,
    raw: Annotated[bool, typer.Option("--raw", help="Do not apply the chat template.")] = False,
    compare: Annotated[bool, typer.Option("--compare", help="Time a plain run as well.")] = False,
    threads: Threads = 0,
) -> None:
    """Generate text; accepted draft tokens are green."""
    from .generating import run_generate
    from .models import load_pair

    pair = load_pair(target, drafter, dtype.value, threads)
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": temperature > 0}
    if temperature > 0:
        options["temperature"] = temperature
    if num_draft_tokens is not None:
        options["num_assistant_tokens"] = num_draft_tokens
    if threshold is not None:
        options["dspark_confidence_threshold"] = threshold
    run_generate(console, pair, pair.encode(prompt, raw), options, compare)


@app.command()
def inspect(
    source: Annotated[str, typer.Argument(help="Drafter: Hub id or folder.")],
    revision: Annotated[str | None, typer.Option(help="Hub revision.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what a drafter checkpoint is, reading only its config and tensor headers."""
    from ..loading.description import describe
    from .tables import description_table

    description = describe(source, **({"revision": revision} if revision else {}))
    if as_json:
        typer.echo(json.dumps(description, indent=2))
    else:
        console.print(description_table(description))


@app.command()
def check(
    target: Target,
    drafter: Drafter,
    prompts: Annotated[Path | None, typer.Option(help="JSONL with `turns` or `prompt`.")] = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="Prompts to use.")] = 4,
    max_new_tokens: NewTokens = 64,
    dtype: Annotated[Dtype, typer.Option(help="Low precision to check.")] = Dtype.bfloat16,
    draws: Annotated[int, typer.Option(min=0, help="Sampled continuations; 0 skips.")] = 200,
    threads: Threads = 0,
    json_path: Json = None,
) -> None:
    """Check that this pair is lossless here. Exits with 1 if it is not."""
    from .checking import run_check

    result = run_check(
        console,
        target,
        drafter,
        prompts=prompts,
        num_prompts=num_prompts,
        max_new_tokens=max_new_tokens,
        low_dtype=dtype.value,
        draws=draws,
        threads=threads,
    )
    _write_json(json_path, result)
    raise typer.Exit(0 if result["lossless"] else 1)


@app.command()
def bench(
    target: Target,
    drafter: Drafter,
    prompts: Annotated[list[Path], typer.Option(help="JSONL files, one per set; repeatable.")],
    num_prompts: Annotated[int, typer.Option(min=1, help="Prompts per set.")] = 5,
    max_new_tokens: NewTokens = 128,
    dtype: DtypeOption = Dtype.bfloat16,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    threshold: Threshold = None,
    threads: Threads = 1,
    json_path: Json = None,
) -> None:
    """Compare plain decoding, prompt look-up and the drafter on the same prompts, interleaved."""
    from .benchmarking import run_bench
    from .tables import bench_table

    result = run_bench(
        target,
        drafter,
        prompts=prompts,
        num_prompts=num_prompts,
        max_new_tokens=max_new_tokens,
        dtype=dtype.value,
        temperature=temperature,
        threshold=threshold,
        threads=threads,
    )
    console.print(bench_table(result))
    _write_json(json_path, result)


@app.command()
def profile(
    target: Target,
    output: Annotated[Path, typer.Option("--output", "-o", callback=_writable, help="JSON file.")],
    drafter: Annotated[
        str | None, typer.Option(help="Also measure what a draft of this drafter costs.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens in a step.")] = 64,
    context_length: Annotated[int, typer.Option(min=1, help="Positions in the cache.")] = 256,
    rows: Annotated[int, typer.Option(min=1, help="Rows that the tokens are spread over.")] = 1,
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


@app.command()
def calibrate(
    target: Target,
    drafter: Drafter,
    prompts: Annotated[list[Path], typer.Option(help="JSONL files, one per set; repeatable.")],
    output: Annotated[Path, typer.Option("--output", "-o", callback=_writable, help="JSON file.")],
    num_prompts: Annotated[int, typer.Option(min=1, help="Prompts per set to fit on.")] = 16,
    num_held_out: Annotated[int, typer.Option(min=1, help="Prompts per set to judge on.")] = 8,
    max_new_tokens: NewTokens = 128,
    temperature: Annotated[float, typer.Option(min=0, help="Of the target; 0 is greedy.")] = 1.0,
    dtype: DtypeOption = Dtype.auto,
    threads: Threads = 0,
    records: Annotated[
        Path | None,
        typer.Option(callback=_writable, help="Keep the held-out rounds here, for recommend."),
    ] = None,
    save_into: Annotated[
        Path | None, typer.Option(help="Save the drafter with its temperatures in this folder.")
    ] = None,
    plot: Plot = None,
    sweep_plot: Annotated[
        Path | None,
        typer.Option(callback=_writable, help="Picture of what each threshold would do."),
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
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        dtype=dtype.value,
        threads=threads,
        records_path=records,
        save_into=save_into,
        plot=plot,
        sweep_plot=sweep_plot,
    )


@app.command()
def recommend(
    profile_path: Annotated[Path, typer.Option("--profile", help="What `profile` wrote.")],
    records: Annotated[Path, typer.Option(help="What `calibrate --records` wrote.")],
    calibration: Annotated[Path | None, typer.Option(help="What `calibrate` wrote.")] = None,
    rows: Annotated[int, typer.Option(min=1, help="Rows of a batch.")] = 1,
    load: Annotated[int, typer.Option(min=0, help="Tokens of other work in a step.")] = 0,
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
    _write_json(json_path, result)


@app.command()
def demo(
    prompt: Annotated[
        str, typer.Argument(help="User message.")
    ] = "Write a Python function that checks whether a string is a palindrome.",
    max_new_tokens: NewTokens = 128,
    dtype: DtypeOption = Dtype.bfloat16,
    threads: Threads = 1,
) -> None:
    """Answer a prompt with and without the drafter that ships with this package."""
    from .demonstrating import run_demo

    run_demo(console, prompt, max_new_tokens, dtype.value, threads)


def _write_json(path: Path | None, result: dict) -> None:
    if path is not None:
        path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        console.print(f"written: {path}")

"""Commands of `dspark-hf`: arguments in, calls into the library, tables out."""

import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from .options import (
    DepthOption,
    Drafter,
    Dtype,
    DtypeOption,
    Json,
    NewTokens,
    NumPrompts,
    OwnPrompts,
    PromptFiles,
    Target,
    Temperature,
    Threads,
    Threshold,
    drawable,
    write_json,
)
from .scheduling import commands as scheduling_commands

app = typer.Typer(
    name="dspark-hf",
    help="DSpark speculative decoding inside Hugging Face generate().",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)
app.add_typer(scheduling_commands)
console = Console()
errors = Console(stderr=True)


class ExportLayout(StrEnum):
    """Layouts that a drafter is written in."""

    deepspec = "deepspec"
    speculators = "speculators"
    eagle3 = "eagle3"
    dspark = "dspark"


class SweepAxis(StrEnum):
    """What the drafters of a sweep differ in."""

    layers = "layers"
    block_size = "block-size"


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
    temperature: Temperature = 0.0,
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
    layout: Annotated[
        str | None,
        typer.Option(help="anchor_first or infill, over what the checkpoint says."),
    ] = None,
    num_target_layers: DepthOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what a drafter checkpoint is, reading only its config and tensor headers."""
    from ..loading.description import describe
    from .tables import description_table

    hub = {"revision": revision} if revision else {}
    description = describe(source, block_layout=layout, num_target_layers=num_target_layers, **hub)
    if as_json:
        typer.echo(json.dumps(description, indent=2))
    else:
        console.print(description_table(description))


@app.command()
def probe(
    target: Target,
    drafter: Drafter,
    prompts: OwnPrompts = None,
    num_prompts: NumPrompts = 2,
    max_new_tokens: NewTokens = 96,
    num_anchors: Annotated[int, typer.Option(min=2, help="Anchors to draft behind.")] = 64,
    dtype: DtypeOption = Dtype.auto,
    threads: Threads = 0,
    json_path: Json = None,
) -> None:
    """Find out a drafter's block layout and taps, by drafting along the target's own text."""
    from .probing import run_probe

    result = run_probe(
        console,
        target,
        drafter,
        prompts=prompts,
        num_prompts=num_prompts,
        max_new_tokens=max_new_tokens,
        num_anchors=num_anchors,
        dtype=dtype.value,
        threads=threads,
    )
    write_json(console, json_path, result)


@app.command()
def export(
    drafter: Annotated[str, typer.Argument(help="Drafter: Hub id or folder.")],
    folder: Annotated[Path, typer.Argument(help="Folder to write.")],
    layout: Annotated[
        ExportLayout,
        typer.Option(
            help="deepspec: vLLM, SGLang. speculators: vLLM. eagle3 (Eagle3): SGLang. dspark: ours."
        ),
    ] = ExportLayout.deepspec,
    target_name: Annotated[
        str | None, typer.Option(help="Where engines find the target: Hub id or folder.")
    ] = None,
    copy_from: Annotated[
        str | None,
        typer.Option(help="Target to copy embedding and head from; else engines lend theirs."),
    ] = None,
    result: Annotated[
        list[Path] | None,
        typer.Option(help="JSON of `evaluate`, `bench` or `train`, for the card; repeatable."),
    ] = None,
    license: Annotated[str | None, typer.Option(help="Licence, for the card.")] = None,
    push: Annotated[str | None, typer.Option(help="Hub repository to upload to.")] = None,
    private: Annotated[bool, typer.Option("--private", help="Create it as private.")] = False,
    block_layout: Annotated[
        str | None,
        typer.Option(help="anchor_first or infill, over what the drafter's files say."),
    ] = None,
    num_target_layers: DepthOption = None,
) -> None:
    """Write a drafter in a layout that other engines serve, with a model card."""
    from .exporting import run_export

    run_export(
        console,
        drafter,
        folder,
        layout.value,
        target_name=target_name,
        copy_from=copy_from,
        results=result or [],
        license=license,
        push=push,
        private=private,
        block_layout=block_layout,
        num_target_layers=num_target_layers,
    )


@app.command()
def check(
    target: Target,
    drafter: Drafter,
    prompts: OwnPrompts = None,
    num_prompts: NumPrompts = 4,
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
    write_json(console, json_path, result)
    raise typer.Exit(0 if result["lossless"] else 1)


@app.command()
def bench(
    target: Target,
    drafter: Drafter,
    prompts: PromptFiles,
    num_prompts: NumPrompts = 5,
    max_new_tokens: NewTokens = 128,
    dtype: DtypeOption = Dtype.bfloat16,
    temperature: Temperature = 0.0,
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
    write_json(console, json_path, result)


@app.command()
def evaluate(
    target: Annotated[str, typer.Argument(help="Target model: Hub id or folder.")],
    drafters: Annotated[list[str], typer.Argument(help="Drafters: Hub ids or folders.")],
    output: Annotated[Path, typer.Option(help="Folder for the results; continued if it exists.")],
    data: Annotated[
        Path | None, typer.Option(help="Folder with a JSONL file per set; default: the Hub.")
    ] = None,
    task: Annotated[
        list[str] | None,
        typer.Option(help="Set to use, repeatable; default: all of the folder, or the paper's."),
    ] = None,
    max_prompts: Annotated[int | None, typer.Option(min=1, help="Most prompts per set.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Most new tokens per prompt.")] = 2048,
    temperature: Annotated[
        list[float] | None, typer.Option(min=0, help="0 is greedy; repeatable; default: 1.")
    ] = None,
    threshold: Annotated[
        float, typer.Option(min=0, max=1, help="Confidence that cuts a block; 0 verifies all.")
    ] = 0.0,
    plain: Annotated[bool, typer.Option(help="Run plain decoding too, for the speed-up.")] = True,
    seed: Annotated[int, typer.Option(help="The prompt's index is added to it.")] = 980406,
    dtype: DtypeOption = Dtype.bfloat16,
    threads: Threads = 0,
) -> None:
    """Measure accepted length, speed and calibration on prompt sets; tables, JSON and plots."""
    from ..evaluation.running import EvaluationSettings
    from .evaluating import run_evaluate

    settings = EvaluationSettings(
        temperatures=tuple(temperature or (1.0,)),
        max_new_tokens=max_new_tokens,
        seed=seed,
        confidence_threshold=threshold,
        with_plain=plain,
    )
    run_evaluate(
        console,
        target,
        drafters,
        output=output,
        data=data,
        tasks=task or (),
        max_prompts=max_prompts,
        settings=settings,
        dtype=dtype.value,
        threads=threads,
    )


@app.command()
def sweep(
    results: Annotated[list[Path], typer.Argument(help="results.json files of evaluations.")],
    output: Annotated[Path, typer.Option(help="PNG, PDF or SVG file.", callback=drawable)],
    by: Annotated[SweepAxis, typer.Option(help="What the drafters differ in.")] = SweepAxis.layers,
    temperature: Annotated[float, typer.Option(min=0, help="Which results to show.")] = 1.0,
) -> None:
    """Plot the accepted length of several evaluations against draft depth or block length."""
    from .evaluating import run_sweep

    run_sweep(console, results, by.value, temperature, output)


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


@app.command()
def data(
    target: Target,
    output: Annotated[Path, typer.Option(help="Folder of rows and provenance; resumed.")],
    prompts: Annotated[
        list[str] | None,
        typer.Option(
            help="JSONL of conversations, prompts or turns, or a dataset, id:split; repeatable."
        ),
    ] = None,
    invent: Annotated[
        int, typer.Option(min=0, help="Prompts that the target invents, beside or without files.")
    ] = 0,
    starters: Annotated[
        Path | None,
        typer.Option(help="Text file: beginnings of invented prompts, one per line."),
    ] = None,
    temperature: Annotated[
        list[float] | None,
        typer.Option(min=0, help="Every prompt is answered at each; default 0 and 1."),
    ] = None,
    top_p: Annotated[float, typer.Option(min=0, max=1)] = 1.0,
    top_k: Annotated[int, typer.Option(min=0)] = 0,
    max_new_tokens: NewTokens = 512,
    thinking: Annotated[
        bool | None, typer.Option(help="What the chat template is told; default: nothing.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Answers written together.")] = 64,
    validation_share: Annotated[float, typer.Option(min=0, max=0.5)] = 0.05,
    skip_malformed: Annotated[bool, typer.Option(help="Report bad rows and go on.")] = False,
    seed: Annotated[int, typer.Option()] = 0,
    dtype: Annotated[Dtype, typer.Option(help="Precision of the target.")] = Dtype.bfloat16,
    threads: Threads = 0,
) -> None:
    """Let the target answer prompts: the on-policy rows that a drafter learns from."""
    from ..training.collecting import CollectionPlan
    from .training import run_data

    plan = CollectionPlan(
        target,
        tuple(temperature or (0.0, 1.0)),
        top_p,
        top_k,
        max_new_tokens,
        thinking,
        validation_share,
        seed,
    )
    run_data(
        console,
        plan,
        prompts=prompts or [],
        invent=invent,
        starters=starters,
        output=output,
        batch_size=batch_size,
        skip_malformed=skip_malformed,
        dtype=dtype.value,
        threads=threads,
    )


@app.command()
def train(
    config: Annotated[Path, typer.Argument(help="YAML file that describes the run.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask before filling a disk.")] = False,
    threads: Threads = 0,
) -> None:
    """Train a drafter; an interrupted run goes on from its last checkpoint."""
    from .training import run_train

    run_train(console, config, yes, threads)

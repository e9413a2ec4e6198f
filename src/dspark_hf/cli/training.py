"""`dspark-hf data` and `dspark-hf train`."""

from itertools import chain
from pathlib import Path

import torch
import typer
from jinja2 import TemplateError
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, AutoTokenizer

from ..training.answers import check_prompt, questions_of
from ..training.collecting import CollectionPlan, collect, read_prompts
from ..training.inventing import invented_prompts
from ..training.run import RunConfig, run_training
from ..training.sources import DatasetRows, open_source
from .models import load_target, target_source


def run_data(
    console: Console,
    plan: CollectionPlan,
    prompts: list[str],
    invent: int,
    starters: Path | None,
    output: Path,
    batch_size: int,
    skip_malformed: bool,
    dtype: str,
    threads: int,
) -> None:
    """Fill a data folder."""
    if not prompts and not invent:
        raise ValueError(
            "No prompts: give --prompts FILE or dataset, or --invent N for prompts of the target."
        )
    if output.is_file():
        raise ValueError(f"{output} is a file; give a folder for the rows.")
    beginnings = _starters(starters, invent)
    source = target_source(plan.target)
    tokenizer, config = AutoTokenizer.from_pretrained(source), AutoConfig.from_pretrained(source)
    if not tokenizer.chat_template:
        raise ValueError(
            f"The tokenizer of {plan.target} has no chat template, so prompts cannot be put to it. "
            "Save one with the tokenizer (tokenizer.chat_template), or train on rows with `text`."
        )

    template = {} if plan.thinking is None else {"enable_thinking": plan.thinking}

    def check(messages: list[dict[str, str]]) -> None:
        asked, *later = questions_of(messages)
        # What the target will say in between is not known yet.
        answer = {"role": "assistant", "content": "."}
        whole = [*asked, *(turn for question in later for turn in (answer, *question))]
        try:
            prompt = tokenizer.apply_chat_template(
                asked, add_generation_prompt=True, return_dict=False, **template
            )
            tokenizer.apply_chat_template(
                whole, add_generation_prompt=True, tokenize=False, **template
            )
        except TemplateError as error:
            raise ValueError(f"the target's chat template refuses it ({error}).") from error
        check_prompt(prompt, config, plan.max_new_tokens)

    total = invent
    opened = [open_source(name) for name in prompts]
    for name, prompt_source in zip(prompts, opened, strict=True):
        # Every row is looked at before the target is loaded.
        quiet = Console(quiet=True)
        found = sum(1 for _ in read_prompts([prompt_source], skip_malformed, quiet, check))
        if not found:
            raise ValueError(f"{name} holds no prompt.")
        total += found
    target, _ = load_target(plan.target, dtype, threads)
    target.eval()
    sources = {
        name: f"prompts, revision {prompt_source.revision}"
        if isinstance(prompt_source, DatasetRows) and prompt_source.revision
        else "prompts"
        for name, prompt_source in zip(prompts, opened, strict=True)
    }
    if invent:
        sources["invented by the target"] = f"{invent} from {len(beginnings)} starters"
    conversations = chain(
        read_prompts(opened, skip_malformed, console, check),
        invented_prompts(target, tokenizer, invent, beginnings, batch_size, plan.seed, output),
    )
    try:
        figures = collect(
            target, tokenizer, conversations, output, plan, batch_size, sources, total
        )
    except KeyboardInterrupt:
        console.print(f"Interrupted. {output} keeps the rows; the same command goes on.")
        raise typer.Exit(130) from None
    console.print(str(output), soft_wrap=True, highlight=False)
    table = Table("", "rows", "answer tokens")
    for part in ("train", "validation"):
        table.add_row(part, f"{figures[part + '_rows']:,}", f"{figures[part + '_answer_tokens']:,}")
    console.print(table)
    if plan.validation_share and not figures["validation_rows"]:
        console.print(
            f"No prompt fell on the validation side (share {plan.validation_share:g}); for reports "
            "during training, collect more prompts or use another folder with a larger "
            "--validation-share."
        )


def _starters(path: Path | None, invent: int) -> list[str]:
    if path is None:
        return [""]
    if not invent:
        raise ValueError("--starters begin prompts that the target invents; give --invent N too.")
    # A line is one starter; line breaks inside it are written as \n.
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line]
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 ({error}). Save it as UTF-8.") from error
    if not lines:
        raise ValueError(f"{path} holds no starter.")
    return [line.replace("\\n", "\n") for line in lines]


def run_train(console: Console, path: Path, assume_yes: bool, threads: int) -> None:
    """Train by a config file."""
    config = RunConfig.load(path)
    config.target = target_source(config.target)
    if threads:
        torch.set_num_threads(threads)
    try:
        result = run_training(config, console, assume_yes)
    except KeyboardInterrupt:
        console.print(
            f"Interrupted. The same command goes on from the last checkpoint in {config.output}."
        )
        raise typer.Exit(130) from None
    console.print(config.output, soft_wrap=True, highlight=False)
    if not result["evaluation"]:
        console.print("The data has no validation rows, so the drafter was not evaluated.")
        return
    table = Table("evaluation", "")
    for name, value in result["evaluation"].items():
        table.add_row(name.removeprefix("eval_"), f"{value:.3f}")
    console.print(table)

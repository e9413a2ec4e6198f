"""`dspark-hf data` and `dspark-hf train`."""

from itertools import chain
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

from ..training.collecting import CollectionPlan, collect, read_prompts
from ..training.inventing import invented_prompts
from ..training.run import RunConfig, run_training


def run_data(
    console: Console,
    plan: CollectionPlan,
    prompts: list[Path],
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
            "No prompts: give --prompts FILE, or --invent N for prompts of the target."
        )
    beginnings = [""]
    if starters is not None:
        beginnings = [line for line in starters.read_text(encoding="utf-8").splitlines() if line]
        # A line is one starter; line breaks inside it are written as \n.
        beginnings = [line.replace("\\n", "\n") for line in beginnings]
    if not beginnings:
        raise ValueError(f"{starters} holds no starter.")
    total = invent
    for path in prompts:
        # Every row is looked at before the target is loaded.
        found = sum(1 for _ in read_prompts([path], skip_malformed, Console(quiet=True)))
        if not found:
            raise ValueError(f"{path} holds no prompt.")
        total += found
    if threads:
        torch.set_num_threads(threads)
    tokenizer = AutoTokenizer.from_pretrained(plan.target)
    target = AutoModelForCausalLM.from_pretrained(plan.target, dtype=dtype).eval()
    sources = {str(path): "prompts" for path in prompts}
    if invent:
        sources["invented by the target"] = f"{invent} from {len(beginnings)} starters"
    conversations = chain(
        read_prompts(prompts, skip_malformed, console),
        invented_prompts(target, tokenizer, invent, beginnings, batch_size, plan.seed, output),
    )
    figures = collect(target, tokenizer, conversations, output, plan, batch_size, sources, total)
    table = Table("", "rows", "answer tokens", title=str(output), title_justify="left")
    for part in ("train", "validation"):
        table.add_row(part, f"{figures[part + '_rows']:,}", f"{figures[part + '_answer_tokens']:,}")
    console.print(table)


def run_train(console: Console, path: Path, assume_yes: bool, threads: int) -> None:
    """Train by a config file."""
    config = RunConfig.load(path)
    if threads:
        torch.set_num_threads(threads)
    result = run_training(config, console, assume_yes)
    table = Table("evaluation", "", title=config.output, title_justify="left")
    for name, value in result["evaluation"].items():
        table.add_row(name.removeprefix("eval_"), f"{value:.3f}")
    console.print(table)

"""Prompt sets, from files and folders, and how a prompt becomes model inputs."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .._jsonl import MalformedRow, parse_row, read_lines

_EXPECTED = 'expected {"turns": ["…"]} or {"prompt": "…"} with some text'


@dataclass(frozen=True)
class PromptSet:
    """
    One evaluation set.

    Attributes:
        name (`str`): as it stands in reports.
        prompts (`tuple[str, ...]`): first user turns.
        source (`str`): where they come from, for the record.
    """

    name: str
    prompts: tuple[str, ...]
    source: str


def read_prompts(path: Path, limit: int | None = None) -> list[str]:
    """
    First user turns of a JSONL file: objects with `turns` (a list) or `prompt` (a string).

    Args:
        path (`Path`): the file; empty lines are skipped.
        limit (`int`, *optional*): stop after so many prompts, and read no further.

    Raises:
        `ValueError`: a line is neither, or has no text; file and line are named.
        `FileNotFoundError`: there is no such file.
    """
    prompts: list[str] = []
    for where, line in read_lines(path):
        if len(prompts) == limit:
            break
        row = parse_row(line, where)
        turns = row["turns"] if "turns" in row else [row["prompt"]] if "prompt" in row else None
        if not isinstance(turns, list) or not turns:
            raise MalformedRow(f"{where}: {_EXPECTED}, found {str(row)[:80]}.")
        prompt = turns[0]
        if not isinstance(prompt, str) or not prompt.strip():
            raise MalformedRow(f"{where}: {_EXPECTED}, found {prompt!r}.")
        prompts.append(prompt)
    if not prompts:
        raise ValueError(f"{path} has no prompts: {_EXPECTED} on every line.")
    return prompts


def read_folder(
    folder: Path, names: Sequence[str] = (), limit: int | None = None
) -> list[PromptSet]:
    """
    The sets of a folder: one JSONL file each, named by it, in alphabetical order.

    Args:
        folder (`Path`): where the files are.
        names (`Sequence[str]`, *optional*): which sets, in this order; all of them by default.
        limit (`int`, *optional*): at most so many prompts a set, from the top of its file.

    Raises:
        `ValueError`: no such folder, no files in it, no file of a name, or a malformed line.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder. Name one that holds a JSONL file per set.")
    files = {path.stem: path for path in sorted(folder.glob("*.jsonl"))}
    if not files:
        raise ValueError(f"{folder} holds no *.jsonl file; every set is one file of that kind.")
    unknown = [name for name in names if name not in files]
    if unknown:
        raise ValueError(
            f"{folder} has no set {', '.join(map(repr, unknown))}. It has: {', '.join(files)}."
        )
    return [
        PromptSet(name, tuple(read_prompts(files[name], limit)), files[name].name)
        for name in names or files
    ]


def encode_prompt(
    tokenizer: Any, prompt: str, device: torch.device | str, raw: bool = False
) -> dict[str, torch.Tensor]:
    """
    Model inputs for one user turn, through the chat template unless `raw` or there is none.

    No system prompt is added to what the template itself says. Thinking is off where a template
    knows it: drafters are published for that mode.

    Returns:
        `input_ids` and `attention_mask`, each `(1, P)`.

    Raises:
        `ValueError`: the prompt has no tokens.
    """
    if raw or not tokenizer.chat_template:
        encoded = tokenizer(prompt, return_tensors="pt")
    else:
        encoded = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}],
            add_generation_prompt=True,
            enable_thinking=False,
            return_tensors="pt",
            return_dict=True,
        )
    if encoded["input_ids"].shape[1] == 0:
        raise ValueError("The prompt has no tokens; give some text.")
    return {name: encoded[name].to(device) for name in ("input_ids", "attention_mask")}

"""
Prompts that the target writes itself, for targets whose users' prompts are not at hand.

They cost about as much as short answers, so a data folder keeps them in `invented.jsonl`, a line
per batch, and a resumed run reads them there.
"""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .._jsonl import append_line, drop_torn_line, parse_row, read_lines
from .answers import invent_prompts

INVENTED = "invented.jsonl"

# Batches without anything new before the target is given up.
_PATIENCE = 20


def invented_prompts(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    count: int,
    starters: Sequence[str],
    batch_size: int,
    seed: int,
    folder: Path,
) -> Iterator[list[dict[str, str]]]:
    """
    `count` different conversations of one user message each, written by the target.

    Args:
        target (`PreTrainedModel`), tokenizer: who writes them.
        count (`int`): how many.
        starters (`list[str]`): beginnings of messages; one is drawn for each attempt.
        batch_size (`int`): attempts at a time.
        seed (`int`): of starters and sampling; the same prompts come again.
        folder (`Path`): of the data; batches that an earlier run wrote are taken from there.

    Raises:
        `ValueError`: the target repeats itself, or the folder's prompts had other batches.
    """
    if not count:
        return
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / INVENTED
    path.touch()
    drop_torn_line(path)
    known = [(where, parse_row(line, where)) for where, line in read_lines(path)]
    chooser, seen, batch = random.Random(seed), set[str](), 0
    while len(seen) < count:
        chosen = [chooser.choice(starters) for _ in range(batch_size)]
        if batch < len(known):
            where, row = known[batch]
            if row.get("starters") != chosen:
                raise ValueError(
                    f"{where} was invented with other starters, another --batch-size or another "
                    "--seed. Use those to go on, or another folder."
                )
            texts = row["prompts"]
        else:
            torch.manual_seed(seed + batch)
            texts = list(invent_prompts(target, tokenizer, chosen))
            append_line(path, {"starters": chosen, "prompts": texts})
        batch += 1
        before = len(seen)
        for text in texts:
            if text not in seen and len(seen) < count:
                seen.add(text)
                yield [{"role": "user", "content": text}]
        if len(seen) == before and batch > _PATIENCE:
            raise ValueError(
                f"The target invented only {len(seen)} different prompts in {batch} batches. Give "
                "prompts from files, or more varied starters."
            )

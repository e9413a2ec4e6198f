"""Batches of prompts, and drafters that are right a different number of times in each row."""

import dataclasses

import torch

from dspark_hf import DSparkDrafter, collect_statistics
from tiny import make_drafter, make_prompt

# Config fields of small layers that `tiny.make_drafter` drafts for.
SMALL_LAYERS = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
    "initializer_range": 0.4,
}


def make_prompts(lengths: list[int], seed: int = 3) -> list[torch.Tensor]:
    """Prompts (1, length), all different."""
    return [make_prompt(length, seed=seed + i) for i, length in enumerate(lengths)]


def pad_left(prompts: list[torch.Tensor], extra: int = 0) -> dict[str, torch.Tensor]:
    """One batch: `input_ids` and `attention_mask`, `extra` columns wider than need be."""
    width = max(prompt.shape[1] for prompt in prompts) + extra
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for i, prompt in enumerate(prompts):
        ids[i, width - prompt.shape[1] :] = prompt[0]
        mask[i, width - prompt.shape[1] :] = 1
    return {"input_ids": ids, "attention_mask": mask}


def script_rows(
    drafter: DSparkDrafter, texts: list[torch.Tensor], num_right: list[int]
) -> DSparkDrafter:
    """
    Replace the drafter's proposals row by row: the first `num_right` tokens of a block are those of
    the row's text, the rest are wrong. Rows are told apart by their texts `(length,)`, prompt
    included, so they may leave the batch; a row that has left its text is not helped any more.
    """
    draft, width = drafter.draft, drafter.config.block_size

    def scripted(context, anchor_ids, **kwargs):
        block = draft(context, anchor_ids, **kwargs)
        tokens, free = torch.zeros_like(block.tokens), list(range(len(texts)))
        for i, length in enumerate((context.lengths + 1).tolist()):
            seen = kwargs["input_ids"][i, -length:]
            row = next((r for r in free if torch.equal(texts[r][:length], seen)), None)
            if row is None:
                continue
            free.remove(row)
            known = texts[row][length : length + width]
            tokens[i, : len(known)] = known
            tokens[i, num_right[row] :] += 1
        return dataclasses.replace(block, tokens=tokens % drafter.config.vocab_size)

    drafter.draft = scripted
    return drafter


def new_tokens(sequences: torch.Tensor, prompt_length: int) -> list[list[int]]:
    """The rows' new tokens, padding included."""
    return sequences[:, prompt_length:].tolist()


def check_rows(target, num_rows=3, new_tokens=14, prompts=None, drafter=None, **options):
    """Greedy equals plain generate for rows that are right 4, 0 and 2 times."""
    prompts = prompts or make_prompts([6, 3, 8][:num_rows])
    batch = pad_left(prompts)
    options = {"max_new_tokens": new_tokens, "do_sample": False, **options}
    expected = target.generate(**batch, **options)
    width = batch["input_ids"].shape[1]
    texts = [row[width - p.shape[1] :] for row, p in zip(expected, prompts, strict=True)]
    drafter = script_rows(drafter or make_drafter(), texts, [4, 0, 2])
    with collect_statistics() as statistics:
        found = target.generate(**batch, assistant_model=drafter, **options)
    assert torch.equal(found, expected)
    assert statistics.accepted >= new_tokens // 2
    return statistics

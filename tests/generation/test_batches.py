"""Many rows: each equals its own single-row run, whatever the others do."""

import functools

import pytest
import torch

from batches import make_prompts, new_tokens, pad_left, script_rows
from dspark_hf import collect_statistics
from tiny import FAMILIES_AND_KERNELS, make_drafter, make_target

NEW_TOKENS = 24
LENGTHS = [6, 2, 9, 1, 12, 6, 3, 7]
# Never right, half right, always right, and in between.
RIGHT = [4, 0, 2, 4, 1, 0, 3, 2]


@functools.cache
def target_of(family, attention="sdpa"):
    return make_target(family, attention=attention)


@functools.cache
def singles(family, attention, new_tokens=NEW_TOKENS, eos=None):
    """Prompts and the texts that plain single-row decoding makes of them."""
    target = target_of(family, attention)
    prompts = make_prompts(LENGTHS)
    options = {"max_new_tokens": new_tokens, "do_sample": False, "eos_token_id": eos}
    return prompts, [target.generate(prompt, **options)[0] for prompt in prompts]


def run(target, prompts, texts, num_right, extra=0, block_size=4, **options):
    drafter = script_rows(make_drafter(block_size=block_size), texts, num_right)
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, **options}
    with collect_statistics() as statistics:
        output = target.generate(**pad_left(prompts, extra), assistant_model=drafter, **options)
    return output, statistics


@pytest.mark.parametrize(("family", "attention"), FAMILIES_AND_KERNELS)
@pytest.mark.parametrize("num_rows", [2, 3, 8])
def test_rows_with_good_and_bad_drafts_equal_their_single_runs(family, attention, num_rows):
    """B055, B056, B057."""
    prompts, texts = singles(family, attention)
    prompts, texts = prompts[:num_rows], texts[:num_rows]
    output, statistics = run(target_of(family, attention), prompts, texts, RIGHT)
    width = max(LENGTHS[:num_rows])
    for row, prompt, text in zip(
        new_tokens(output, width), prompts, texts, strict=True
    ):
        assert row == text[prompt.shape[1] :].tolist()
    assert statistics.new_tokens == NEW_TOKENS * num_rows
    assert 1.5 < statistics.accepted_length < 4.5

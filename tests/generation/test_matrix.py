"""Families, caches, attention implementations and precisions, all with all."""

import functools

import pytest
import torch

from batches import make_prompts, pad_left, script_rows
from dspark_hf import collect_statistics
from dspark_hf.losslessness import greedy_gaps
from tiny import FAMILIES_AND_KERNELS, make_drafter, make_target

PROMPTS = make_prompts([6, 2, 9])
BATCH = pad_left(PROMPTS)
CACHES = {
    "dynamic": {},
    "static": {"cache_implementation": "static"},
    "fp8": {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}},
}
SLIDING = ("gemma2", "gemma3", "mistral_swa")
CELLS = [
    (family, attention, cache, dtype)
    for family, attention in FAMILIES_AND_KERNELS
    for cache in CACHES
    for dtype in (torch.float32, torch.bfloat16)
    # The host quantises caches of full attention only, and what its rounding makes of a near-tie
    # in bfloat16 cannot be told from outside.
    if cache != "fp8" or (family not in SLIDING and dtype == torch.float32)
]
# Behind the window of the families that slide.
OPTIONS = {"max_new_tokens": 16, "do_sample": False}


@functools.cache
def target_of(family, attention, dtype):
    return make_target(family, attention=attention).to(dtype)


@pytest.mark.parametrize(("family", "attention", "cache", "dtype"), CELLS, ids=str)
def test_rows_that_are_right_four_times_never_and_twice(family, attention, cache, dtype):
    """
    B015, B041, B042, B053, B055: float32 equals plain generate; in bfloat16 every token is the
    target's argmax up to rounding.
    """
    target = target_of(family, attention, dtype)
    expected = target.generate(**BATCH, **OPTIONS, **CACHES[cache])
    texts = [row[9 - p.shape[1] :] for row, p in zip(expected, PROMPTS, strict=True)]
    drafter = script_rows(make_drafter(), texts, [4, 0, 2])
    with collect_statistics() as statistics:
        found = target.generate(**BATCH, assistant_model=drafter, **OPTIONS, **CACHES[cache])
    if dtype == torch.float32:
        assert torch.equal(found, expected)
        # Every row in as many rounds as it takes alone.
        assert statistics.rounds == 3 + 15 + 5
    for row, prompt in zip(found, PROMPTS, strict=True):
        text = row[9 - prompt.shape[1] :][None]
        if dtype == torch.bfloat16:
            assert float(greedy_gaps(target, text, prompt.shape[1]).max()) <= 0.125

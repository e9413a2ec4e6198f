"""Which keys the slots of a block see (B089, B090, T13)."""

import pytest
import torch

from dspark_hf.backbones.block_mask import additive, block_mask


def rows(*text):
    return torch.tensor([[c == "x" for c in row.replace("|", "")] for row in text])


def uniform(num_context, width, window, causal, per_slot):
    """One row whose layer holds the window, if there is one, and no more."""
    first = 0 if window is None else max(0, num_context - window)
    lengths = torch.tensor([num_context])
    return block_mask(lengths, first, width, window, causal, per_slot)[0]


@pytest.mark.parametrize(
    ("window", "causal", "per_slot", "expected"),
    [
        (None, False, False, ("xxxx|xxx", "xxxx|xxx", "xxxx|xxx")),
        (None, True, False, ("xxxx|x..", "xxxx|xx.", "xxxx|xxx")),
        # Measured from the anchor: the same context for every slot.
        (4, False, False, ("xxxx|xxx", "xxxx|xxx", "xxxx|xxx")),
        (2, False, False, ("xx|xxx", "xx|xxx", "xx|xxx")),
        (4, True, False, ("xxxx|x..", "xxxx|xx.", "xxxx|xxx")),
        (4, False, True, (".xxx|xxx", "..xx|xxx", "...x|xxx")),
        (2, False, True, (".x|xx.", "..|xxx", "..|.xx")),
        (4, True, True, (".xxx|x..", "..xx|xx.", "...x|xxx")),
    ],
)
def test_visible_keys(window, causal, per_slot, expected):
    assert torch.equal(uniform(4, 3, window, causal, per_slot), rows(*expected))


@pytest.mark.parametrize(
    ("window", "causal", "short"),
    [
        (None, False, ("x..|xx", "x..|xx")),
        (None, True, ("x..|x.", "x..|xx")),
        (2, True, ("x..|x.", "x..|xx")),
    ],
)
def test_rows_of_different_lengths(window, causal, short):
    """A short row has no keys between its context and the block; its window is its own."""
    mask = block_mask(torch.tensor([3, 1]), 0, 2, window, causal, False)
    assert torch.equal(mask[1], rows(*short))
    first_keys = mask[0, :, 0].tolist()
    assert first_keys == [window is None] * 2


def test_without_context():
    assert torch.equal(uniform(0, 2, None, True, False), rows("x.", "xx"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_additive_form(dtype):
    mask = additive(rows("x.", "xx")[None], torch.zeros(1, 2, 4, dtype=dtype))
    assert mask.shape == (1, 1, 2, 2)
    assert mask.dtype == dtype
    assert torch.softmax(mask.float(), dim=-1)[0, 0, 0].tolist() == [1.0, 0.0]

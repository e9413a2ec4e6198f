"""Which keys the slots of a block see (B089, B090, T13)."""

import pytest
import torch

from dspark_hf.backbones.block_mask import additive, block_mask


def rows(*text):
    return torch.tensor([[c == "x" for c in row.replace("|", "")] for row in text])


@pytest.mark.parametrize(
    ("window", "causal", "per_slot", "expected"),
    [
        (None, False, False, ("xxxx|xxx", "xxxx|xxx", "xxxx|xxx")),
        (None, True, False, ("xxxx|x..", "xxxx|xx.", "xxxx|xxx")),
        # Measured from the anchor, the cache already holds the window and no more.
        (4, False, False, ("xxxx|xxx", "xxxx|xxx", "xxxx|xxx")),
        (4, True, False, ("xxxx|x..", "xxxx|xx.", "xxxx|xxx")),
        (4, False, True, (".xxx|xxx", "..xx|xxx", "...x|xxx")),
        (2, False, True, ("...x|xx.", "....|xxx", "....|.xx")),
        (4, True, True, (".xxx|x..", "..xx|xx.", "...x|xxx")),
    ],
)
def test_visible_keys(window, causal, per_slot, expected):
    assert torch.equal(block_mask(4, 3, window, causal, per_slot), rows(*expected))


def test_without_context():
    assert torch.equal(block_mask(0, 2, None, True, False), rows("x.", "xx"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_additive_form(dtype):
    mask = additive(rows("x.", "xx"), torch.zeros(1, 2, 4, dtype=dtype))
    assert mask.shape == (1, 1, 2, 2)
    assert mask.dtype == dtype
    assert torch.softmax(mask.float(), dim=-1)[0, 0, 0].tolist() == [1.0, 0.0]

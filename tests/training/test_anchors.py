"""Which positions become anchors, what their blocks learn, and what they see."""

import pytest
import torch

from dspark_hf.training.anchors import (
    block_targets,
    decay_weights,
    many_anchor_mask,
    sample_anchors,
)


def masks(*rows):
    return torch.tensor([[character == "x" for character in row] for row in rows])


def test_only_supervised_positions_with_a_supervised_successor_are_drawn():
    loss_mask = masks("..xxx.x.xx", "..........")
    for _ in range(20):
        anchors, is_kept = sample_anchors(loss_mask, 2)
        assert is_kept.tolist() == [[True, True], [False, False]]
        first = anchors[0].tolist()
        assert first == sorted(set(first))
        assert set(first) <= {2, 3, 8}
        assert anchors[1].tolist() == [0, 0]


def test_every_candidate_is_drawn_as_often_as_another():
    """Chi-square of 6 candidates over 3,000 draws of two: 3 standard deviations of each count."""
    counts = torch.zeros(8)
    for _ in range(3000):
        anchors, _ = sample_anchors(masks(".xxxxxxx"), 2)
        counts[anchors[0]] += 1
    expected = 3000 * 2 / 6
    assert counts[0] == counts[7] == 0
    assert ((counts[1:7] - expected).abs() < 3 * (expected * (1 - 1 / 3)) ** 0.5).all()


def test_documents_have_budgets_of_their_own():
    """B129: a short conversation beside a long one is not starved."""
    loss_mask = masks("." * 10 + "x" * 10 + "." * 180, "x" * 200)
    anchors, is_kept = sample_anchors(loss_mask, 9)
    assert is_kept.sum(dim=1).tolist() == [9, 9]
    assert ((anchors[0] >= 10) & (anchors[0] < 19)).all()


def test_draws_follow_the_global_seed():
    draws = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        draws.append(sample_anchors(torch.ones(2, 50, dtype=torch.bool), 5)[0])
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


@pytest.mark.parametrize("row", ["x", ".", "xx", "x.x"])
def test_sequences_shorter_than_a_block(row):
    anchors, is_kept = sample_anchors(masks(row), 4)
    assert is_kept.sum().item() == row.count("xx")
    labels, previous, is_supervised = block_targets(
        torch.arange(len(row))[None], masks(row), anchors, is_kept, 5
    )
    assert labels.shape == previous.shape == is_supervised.shape == (1, anchors.shape[1], 5)
    assert is_supervised.sum().item() == row.count("xx")


def test_supervision_ends_at_the_first_slot_that_is_not_the_targets():
    """Also at the end of the sequence; B130: nothing is learned beyond it."""
    input_ids = torch.arange(100, 110)[None]
    loss_mask = masks("xxx.xxxxxx")
    anchors, is_kept = torch.tensor([[0, 4, 7, 0]]), torch.tensor([[True, True, True, False]])
    labels, previous, is_supervised = block_targets(input_ids, loss_mask, anchors, is_kept, 4)
    assert previous[0, 1].tolist() == [104, 105, 106, 107]
    assert labels[0, 1].tolist() == [105, 106, 107, 108]
    assert is_supervised[0].tolist() == [
        [True, True, False, False],  # Position 3 is not the target's; 4 is, and comes too late.
        [True, True, True, True],
        [True, True, False, False],  # The sequence ends.
        [False] * 4,
    ]


def test_decay_is_that_of_the_released_drafters():
    """B144: exp(-k / 4), k from 0; the paper would write the block size for 4."""
    is_supervised = torch.tensor([[True, True, True, False]])
    weights = decay_weights(is_supervised, 4.0)
    torch.testing.assert_close(weights, torch.tensor([[1.0, 0.77880, 0.60653, 0.0]]))
    torch.testing.assert_close(decay_weights(is_supervised, 7.0)[0, 1], torch.tensor(0.86688))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 3])
def test_mask_by_enumeration(window, causal):
    """B127: context strictly before the anchor, the own block, nothing else."""
    anchors, is_kept = torch.tensor([[2, 5], [4, 0]]), torch.tensor([[True, True], [True, False]])
    is_text = torch.ones(2, 7, dtype=torch.bool)
    is_text[1, 3:] = False
    width = 3
    mask = many_anchor_mask(anchors, is_kept, is_text, width, window, causal)
    assert mask.shape == (2, 1, 6, 7 + 6)
    for row in range(2):
        for query in range(6):
            block = query // width
            anchor, kept = int(anchors[row, block]), bool(is_kept[row, block])
            for key in range(13):
                if key < 7:
                    expected = kept and key < anchor and bool(is_text[row, key])
                    expected &= window is None or key >= anchor - window
                else:
                    expected = (key - 7) // width == block
                    expected &= not causal or key - 7 <= query
                assert mask[row, 0, query, key].item() == expected, (row, query, key)

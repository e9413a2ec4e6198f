"""Verification: tensors in, tensors out, and the output distribution is the target's."""

import pytest
import torch
from scipy import stats

from dspark_hf.drafting import probabilities, sample
from dspark_hf.generation import verification
from dspark_hf.generation.verification import (
    residual,
    threshold_lengths,
    verify_greedy,
    verify_sampling,
)

LENGTH, VOCAB = 4, 6


def one_hot(tokens, vocab=VOCAB):
    return torch.nn.functional.one_hot(torch.as_tensor(tokens), vocab).float()


def lengths(*values):
    return torch.tensor(values)


# -- truth tables ----------------------------------------------------------------------------------


def table(num_right):
    """Drafts of which the first `num_right` are the target's, and the target's tokens."""
    target = torch.tensor([[1, 2, 3, 4, 5]])
    drafts = target[:, :LENGTH].clone()
    drafts[:, num_right:] = 0
    return target, drafts


@pytest.mark.parametrize("num_right", range(LENGTH + 1))
def test_greedy_truth_table(num_right):
    """B009, B012, B014: target row k judges draft k, the row behind gives the next token."""
    target, drafts = table(num_right)
    result = verify_greedy(3.0 * one_hot(target), drafts, lengths(LENGTH))
    assert result.num_accepted.tolist() == [num_right]
    assert torch.equal(result.tokens[:, : num_right + 1], target[:, : num_right + 1])
    assert result.is_valid.all()


@pytest.mark.parametrize("one_hot_q", [True, False])
@pytest.mark.parametrize("num_right", range(LENGTH + 1))
def test_sampling_truth_table_for_certain_distributions(num_right, one_hot_q):
    """B001, B003, B009, B014: with one-hot p and q nothing is left to chance."""
    target, drafts = table(num_right)
    q = None if one_hot_q else one_hot(drafts)
    for _ in range(5):
        result = verify_sampling(one_hot(target), drafts, q, lengths(LENGTH))
        assert result.num_accepted.tolist() == [num_right]
        assert torch.equal(result.tokens[:, : num_right + 1], target[:, : num_right + 1])


@pytest.mark.parametrize("rule", ["greedy", "sampling", "sampling_one_hot"])
def test_rows_submit_different_numbers_of_tokens(rule):
    """B056, B118: what lies behind a row's own length is never looked at; length 0 is legal."""
    target = torch.tensor([[1, 2, 3, 4, 5]]).repeat(6, 1)
    drafts = target[:, :LENGTH].clone()
    drafts[4, 1] = drafts[5, 3] = 0
    verify_lengths = lengths(0, 1, 3, 4, 3, 3)
    p, q = one_hot(target), one_hot(drafts)
    # Garbage behind the submitted columns must not matter.
    q[0] = q[1, 1:] = 0.5
    if rule == "greedy":
        result = verify_greedy(p, drafts, verify_lengths)
    else:
        result = verify_sampling(p, drafts, None if rule.endswith("hot") else q, verify_lengths)
    assert result.num_accepted.tolist() == [0, 1, 3, 4, 1, 3]
    for row, count in enumerate(result.num_accepted.tolist()):
        assert torch.equal(result.tokens[row, : count + 1], target[row, : count + 1])


def test_a_cut_row_draws_its_last_token_from_the_target_itself():
    """B021, B118: no rejection happened, so there is no residual, whatever q says."""
    p = torch.tensor([[[0.5, 0.5, 0.0], [0.0, 0.0, 1.0]]])
    q = torch.tensor([[[1.0, 0.0, 0.0]]])
    drafts = torch.tensor([[0]])
    drawn = {int(verify_sampling(p, drafts, q, lengths(0)).tokens[0, 0]) for _ in range(60)}
    assert drawn == {0, 1}


def test_no_drafts_at_all_is_plain_decoding():
    """B118: an empty proposal."""
    p = one_hot([[3], [1]])
    drafts = torch.zeros(2, 0, dtype=torch.long)
    for result in (
        verify_greedy(p, drafts, lengths(0, 0)),
        verify_sampling(p, drafts, None, lengths(0, 0)),
        verify_sampling(p, drafts, torch.zeros(2, 0, VOCAB), lengths(0, 0)),
    ):
        assert result.tokens.tolist() == [[3], [1]]
        assert result.num_accepted.tolist() == [0, 0]


def test_greedy_ties_go_to_the_first_token():
    """B013: the same winner as plain argmax."""
    logits = torch.tensor([[[0.0, 2.0, 2.0, 1.0], [2.0, 0.0, 0.0, 2.0]]])
    result = verify_greedy(logits, torch.tensor([[1]]), lengths(1))
    assert result.tokens.tolist() == logits.argmax(dim=-1).tolist() == [[1, 0]]
    assert result.num_accepted.tolist() == [1]


# -- the residual ----------------------------------------------------------------------------------


def test_residual_by_value():
    """Equation of the residual: max(0, p - q), normalised."""
    p, q = torch.tensor([[0.5, 0.3, 0.2]]), torch.tensor([[0.2, 0.2, 0.6]])
    torch.testing.assert_close(residual(p, q), torch.tensor([[0.75, 0.25, 0.0]]))


def test_residual_without_mass_is_the_target(monkeypatch):
    """B010: p equal to q and a rejection all the same."""
    p = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.2, 0.7]])
    assert torch.equal(residual(p, p.clone()), p)
    # Draws above one force the rejection that rounding can bring about.
    monkeypatch.setattr(torch, "rand_like", lambda x: torch.full_like(x, 1.5))
    target = p[:, None].expand(2, 2, 3)
    result = verify_sampling(target, torch.tensor([[0], [2]]), p[:, None], lengths(1, 1))
    assert result.num_accepted.tolist() == [0, 0]
    assert result.is_valid.all()
    assert ((result.tokens[:, 0] >= 0) & (result.tokens[:, 0] < 3)).all()


def test_residual_of_tiny_differences_stays_a_distribution():
    """B010: mass of the size of a rounding error."""
    p = torch.tensor([[0.5 + 1e-7, 0.5 - 1e-7]])
    result = residual(p, p.flip(-1))
    assert result.isfinite().all()
    torch.testing.assert_close(result.sum(), torch.tensor(1.0))


def test_a_rejected_one_hot_draft_is_never_emitted():
    """B003: q one-hot, so the residual is p without the drafted token."""
    p = torch.tensor([0.999, 0.0005, 0.0005]).expand(4000, 2, 3)
    drafts = torch.ones(4000, 1, dtype=torch.long)
    result = verify_sampling(p, drafts, None, torch.ones(4000, dtype=torch.long))
    rejected = result.num_accepted == 0
    assert rejected.any()
    assert not (result.tokens[rejected, 0] == 1).any()


# -- properties ------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_bounds_hold_for_any_distributions(seed):
    """B009: accepted counts are in range, tokens are tokens, p of what is emitted is not zero."""
    generator = torch.Generator().manual_seed(seed)
    rows = 64
    # Sharp logits: many probabilities underflow to exactly 0 and 1.
    p = torch.softmax(60 * torch.randn(rows, LENGTH + 1, VOCAB, generator=generator), dim=-1)
    q = torch.softmax(60 * torch.randn(rows, LENGTH, VOCAB, generator=generator), dim=-1)
    q[::3] = p[::3, :LENGTH]
    p[1::3] = one_hot(torch.randint(VOCAB, (rows, LENGTH + 1), generator=generator)[1::3])
    drafts = sample(q.reshape(-1, VOCAB)).view(rows, LENGTH)
    q[2::3] = one_hot(drafts[2::3])
    verify_lengths = torch.randint(LENGTH + 1, (rows,), generator=generator)
    for draft_probs in (q, None):
        result = verify_sampling(p, drafts, draft_probs, verify_lengths)
        assert (result.num_accepted >= 0).all()
        assert (result.num_accepted <= verify_lengths).all()
        assert result.is_valid.all()
        for row, count in enumerate(result.num_accepted.tolist()):
            assert torch.equal(result.tokens[row, :count], drafts[row, :count])
            assert p[row, count, result.tokens[row, count]] > 0


@pytest.mark.parametrize("rule", ["greedy", "sampling"])
def test_a_row_without_a_distribution_is_flagged(rule):
    """B010: NaN of the target is told, row by row, and never crashes the draw."""
    logits = 3.0 * one_hot([[1, 2], [1, 2], [1, 2]])
    logits[1, 1] = torch.nan
    drafts = torch.tensor([[1], [1], [1]])
    if rule == "greedy":
        result = verify_greedy(logits, drafts, lengths(1, 1, 1))
    else:
        result = verify_sampling(probabilities(logits), drafts, None, lengths(1, 1, 1))
    assert result.is_valid.tolist() == [True, False, True]


# -- the output distribution -----------------------------------------------------------------------

DRAWS = 50_000
PAIRS = {
    "overlapping": ([0.5, 0.2, 0.2, 0.1], [0.1, 0.4, 0.3, 0.2]),
    "equal": ([0.4, 0.3, 0.2, 0.1], [0.4, 0.3, 0.2, 0.1]),
    "draft_too_sure": ([0.4, 0.3, 0.2, 0.1], [0.97, 0.01, 0.01, 0.01]),
    "target_cut_by_top_k": ([0.7, 0.3, 0.0, 0.0], [0.25, 0.25, 0.25, 0.25]),
    "draft_cut_by_top_k": ([0.25, 0.25, 0.25, 0.25], [0.0, 0.0, 0.6, 0.4]),
    "disjoint": ([0.6, 0.4, 0.0, 0.0], [0.0, 0.0, 0.5, 0.5]),
}


def assert_distributed(tokens, p):
    """Chi-square against p; a right sampler fails this once in ten thousand seeds."""
    counts = torch.bincount(tokens, minlength=len(p)).double().numpy()
    expected = p.double().numpy() * len(tokens)
    assert not counts[expected == 0].any()
    keep = expected > 0
    total = expected[keep].sum()
    p_value = stats.chisquare(counts[keep], expected[keep] * counts.sum() / total).pvalue
    assert p_value > 1e-4, (counts / len(tokens), p)


@pytest.mark.parametrize("one_hot_q", [False, True])
@pytest.mark.parametrize("pair", PAIRS)
def test_emitted_tokens_are_distributed_as_the_target(pair, one_hot_q):
    """B001, B003, B004, B006: two positions, chi-square over 50 000 rows each."""
    p, q = (torch.tensor(values) for values in PAIRS[pair])
    # The second position has the two swapped, the bonus is uniform.
    uniform = torch.full((4,), 0.25)
    target = torch.stack((p, q, uniform)).expand(DRAWS, 3, 4)
    draft = torch.stack((q, p)).expand(DRAWS, 2, 4)
    if one_hot_q:
        drafts = draft[0].argmax(dim=-1).expand(DRAWS, 2).contiguous()
        result = verify_sampling(target, drafts, None, torch.full((DRAWS,), 2))
        accept = p[q.argmax()]
    else:
        drafts = sample(draft.reshape(-1, 4)).view(DRAWS, 2)
        result = verify_sampling(target, drafts, draft, torch.full((DRAWS,), 2))
        accept = torch.minimum(p, q).sum()
    assert_distributed(result.tokens[:, 0], p)
    second = result.tokens[result.num_accepted >= 1, 1]
    if len(second) > 1000:
        assert_distributed(second, q)
    third = result.tokens[result.num_accepted == 2, 2]
    if len(third) > 1000:
        assert_distributed(third, uniform)
    # B004: as often as possible, which is the overlap of the two.
    accepted = (result.num_accepted >= 1).float().mean()
    assert abs(accepted - accept) < 4 * (0.25 / DRAWS) ** 0.5 + 1e-6


def test_the_test_would_see_a_wrong_rule():
    """The bound above is tight: drawing the rejected token from p itself is found out."""
    p, q = (torch.tensor(values) for values in PAIRS["overlapping"])
    drafts = sample(q.expand(DRAWS, 4))
    accepted = torch.rand(DRAWS) < p[drafts] / q[drafts]
    tokens = torch.where(accepted, drafts, sample(p.expand(DRAWS, 4)))
    with pytest.raises(AssertionError):
        assert_distributed(tokens, p)


def test_cutting_by_an_earlier_confidence_keeps_the_distribution():
    """B021: a length that depends on nothing but earlier tokens."""
    p, q = (torch.tensor(values) for values in PAIRS["overlapping"])
    target = torch.stack((p, p, p)).expand(DRAWS, 3, 4)
    draft = torch.stack((q, q)).expand(DRAWS, 2, 4)
    drafts = sample(draft.reshape(-1, 4)).view(DRAWS, 2)
    # The second token is submitted only behind a first token that is even.
    verify_lengths = torch.where(drafts[:, 0] % 2 == 0, 2, 1)
    result = verify_sampling(target, drafts, draft, verify_lengths)
    assert_distributed(result.tokens[:, 0], p)
    for first in range(4):
        rows = (result.tokens[:, 0] == first) & (result.num_accepted >= 1)
        assert_distributed(result.tokens[rows, 1], p)


def test_one_function_makes_the_probabilities():
    """B002: low-precision logits become float32 once; drawing and the ratio share the result."""
    logits = torch.randn(3, 11).bfloat16()
    probs = probabilities(logits)
    assert probs.dtype == torch.float32
    assert torch.equal(probs, torch.softmax(logits.float(), dim=-1))
    assert verification.sample is sample


# -- the threshold ---------------------------------------------------------------------------------


def logits_of(*rows):
    return torch.tensor(rows).logit()


def test_the_first_confidence_below_the_threshold_cuts():
    """B116: conditional confidences, not their product."""
    confidences = logits_of([0.9, 0.4, 0.99])
    assert threshold_lengths(confidences, 0.5).tolist() == [1]
    assert threshold_lengths(confidences, 0.35).tolist() == [3]
    assert threshold_lengths(confidences, 0.95).tolist() == [0]
    # The product of .9 and .7 is .63: a cumulative rule would cut here.
    assert threshold_lengths(logits_of([0.9, 0.7, 0.99]), 0.65).tolist() == [3]


def test_a_threshold_of_zero_keeps_everything():
    """B095, B117."""
    confidences = torch.tensor([[-1e4, 0.0, 1e4], [-torch.inf, -torch.inf, -torch.inf]])
    assert threshold_lengths(confidences, 0.0).tolist() == [3, 3]


def test_a_threshold_of_one_keeps_nothing_uncertain():
    """B118."""
    assert threshold_lengths(torch.tensor([[5.0, 5.0], [40.0, 5.0]]), 1.0).tolist() == [0, 1]


def test_the_threshold_works_row_by_row():
    """B113: each row has its own length."""
    confidences = logits_of([0.9, 0.9, 0.9], [0.1, 0.9, 0.9], [0.9, 0.9, 0.1])
    assert threshold_lengths(confidences, 0.5).tolist() == [3, 0, 2]

"""Verification as pure functions: truth tables, bounds, distributions."""

import pytest
import torch
from scipy.stats import chisquare

from dspark_hf import drafting
from dspark_hf.generation import verification
from dspark_hf.generation.verification import (
    residual,
    threshold_lengths,
    verify_greedy,
    verify_sampling,
)

VOCAB = 11


def one_hot(tokens):
    return torch.nn.functional.one_hot(torch.tensor(tokens), VOCAB).float()


@pytest.mark.parametrize("accepted", range(5))
def test_greedy_truth_table(accepted):
    """B012, B014: row i judges draft i; the token behind the accepted ones is the target's."""
    best = [3, 1, 4, 1, 5]
    drafts = [*best[:accepted], *[9] * (4 - accepted)]
    result = verify_greedy(one_hot([best]), torch.tensor([drafts]), torch.tensor([4]))
    assert result.num_accepted.tolist() == [accepted]
    assert result.tokens[0, : accepted + 1].tolist() == best[: accepted + 1]
    assert result.is_valid.tolist() == [True]


def test_rows_of_different_lengths():
    """B009, B055: what a row did not submit is never accepted."""
    best = [[3, 1, 4], [3, 1, 4], [3, 1, 4]]
    result = verify_greedy(one_hot(best), torch.tensor([[3, 1]] * 3), torch.tensor([0, 1, 2]))
    assert result.num_accepted.tolist() == [0, 1, 2]
    probs = one_hot(best)
    sampled = verify_sampling(probs, torch.tensor([[3, 1]] * 3), None, torch.tensor([0, 1, 2]))
    assert sampled.num_accepted.tolist() == [0, 1, 2]
    assert [sampled.tokens[r, r].item() for r in range(3)] == [3, 1, 4]


def test_no_drafts_at_all():
    """B118: the empty proposal is a step of plain decoding."""
    empty, lengths = torch.zeros(1, 0, dtype=torch.long), torch.tensor([0])
    assert verify_greedy(one_hot([[7]]), empty, lengths).tokens.tolist() == [[7]]
    assert verify_sampling(one_hot([[7]]), empty, None, lengths).tokens.tolist() == [[7]]


def test_residual_without_mass_is_the_target():
    """B010: p = q makes max(0, p - q) zero everywhere."""
    p = torch.tensor([[0.5, 0.3, 0.2], [0.5, 0.3, 0.2]])
    q = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.3, 0.5]])
    assert torch.equal(residual(p, q)[0], p[0])
    torch.testing.assert_close(residual(p, q)[1], torch.tensor([1.0, 0.0, 0.0]))


def test_a_forced_rejection_with_equal_distributions_gives_a_token(monkeypatch):
    """B010: rounding can reject where probability says never."""
    monkeypatch.setattr(torch, "rand_like", lambda x: torch.full_like(x, 2.0))
    p = torch.tensor([0.5, 0.3, 0.2]).expand(1, 2, 3)
    result = verify_sampling(p, torch.tensor([[0]]), p[:, :1], torch.tensor([1]))
    assert result.num_accepted.tolist() == [0]
    assert 0 <= result.tokens[0, 0] < 3


@pytest.mark.parametrize("seed", range(20))
def test_counts_stay_in_bounds(seed):
    """B009: random p and q, one-hot rows included."""
    generator = torch.Generator().manual_seed(seed)
    rows, length = 64, 5
    p = torch.rand(rows, length + 1, VOCAB, generator=generator).pow(8)
    q = torch.rand(rows, length, VOCAB, generator=generator).pow(8)
    p[::3] = one_hot(torch.randint(VOCAB, (len(p[::3]), length + 1), generator=generator).tolist())
    q[::5] = one_hot(torch.randint(VOCAB, (len(q[::5]), length), generator=generator).tolist())
    p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    flat = torch.multinomial(q.reshape(-1, VOCAB), 1, generator=generator)
    drafts = flat.reshape(rows, length)
    lengths = torch.randint(0, length + 1, (rows,), generator=generator)
    result = verify_sampling(p, drafts, q, lengths)
    assert bool(((result.num_accepted >= 0) & (result.num_accepted <= lengths)).all())
    index = torch.arange(rows)
    token = result.tokens[index, result.num_accepted]
    assert bool((p[index, result.num_accepted, token] > 0).all())
    for r in range(rows):
        n = int(result.num_accepted[r])
        assert torch.equal(result.tokens[r, :n], drafts[r, :n])


def test_nan_is_flagged_per_row():
    """B009: one broken row, one sound one; nothing raises inside."""
    logits = one_hot([[1, 2], [1, 2]])
    logits[1, 0, 4] = float("nan")
    drafts, lengths = torch.tensor([[1], [1]]), torch.tensor([1, 1])
    assert verify_greedy(logits, drafts, lengths).is_valid.tolist() == [True, False]
    result = verify_sampling(logits.softmax(-1), drafts, None, lengths)
    assert result.is_valid.tolist() == [True, False]


PAIRS = {
    "overlapping": ([0.5, 0.3, 0.15, 0.05], [0.2, 0.2, 0.3, 0.3]),
    "equal": ([0.4, 0.3, 0.2, 0.1], [0.4, 0.3, 0.2, 0.1]),
    "disjoint": ([0.6, 0.4, 0.0, 0.0], [0.0, 0.0, 0.5, 0.5]),
    "one-hot q": ([0.1, 0.2, 0.3, 0.4], [0.0, 1.0, 0.0, 0.0]),
    "peaked p": ([0.97, 0.01, 0.01, 0.01], [0.25, 0.25, 0.25, 0.25]),
}


@pytest.mark.parametrize("name", PAIRS)
def test_the_first_emitted_token_is_distributed_as_p(name):
    """B001, B003: 50,000 rows; a correct implementation fails with probability 1e-4 per pair."""
    p, q = (torch.tensor(values) for values in PAIRS[name])
    draws = 50_000
    drafts = torch.multinomial(q.expand(draws, -1), 1)
    draft_probs = None if name == "one-hot q" else q.expand(draws, 1, 4)
    result = verify_sampling(
        p.expand(draws, 2, 4), drafts, draft_probs, torch.ones(draws, dtype=torch.long)
    )
    counts = torch.bincount(result.tokens[:, 0], minlength=4).double()
    assert not counts[p == 0].any()
    keep = p > 0
    expected = p[keep].double() * draws
    pvalue = chisquare(counts[keep].numpy(), expected.numpy(), sum_check=False).pvalue
    assert pvalue > 1e-4
    overlap = float(torch.minimum(p, q).sum())
    # Four standard errors of a share of 50,000.
    assert abs(float(result.num_accepted.float().mean()) - overlap) < 0.009


@pytest.mark.parametrize(
    ("threshold", "kept"), [(0.0, 3), (0.5, 1), (0.95, 0), (0.39, 3), (1.0, 0)]
)
def test_threshold_cuts_at_the_first_position_below(threshold, kept):
    """B116: conditional confidences .9, .4, .99; not their product, and not the last one only."""
    logits = torch.tensor([[0.9, 0.4, 0.99]]).logit()
    assert threshold_lengths(logits, threshold).tolist() == [kept]


@pytest.mark.parametrize("one_hot_q", [True, False])
@pytest.mark.parametrize("accepted", range(5))
def test_sampling_truth_table_for_certain_distributions(accepted, one_hot_q):
    """B001, B003, B009, B014: with one-hot p and q nothing is left to chance."""
    best = [3, 1, 4, 1, 5]
    drafts = [[*best[:accepted], *[9] * (4 - accepted)]]
    q = None if one_hot_q else one_hot(drafts)
    for _ in range(5):
        result = verify_sampling(one_hot([best]), torch.tensor(drafts), q, torch.tensor([4]))
        assert result.num_accepted.tolist() == [accepted]
        assert result.tokens[0, : accepted + 1].tolist() == best[: accepted + 1]


def test_what_lies_behind_a_rows_length_is_never_looked_at():
    """B056: neither the tokens nor their q."""
    best, drafts = [[3, 1, 4, 1]] * 3, torch.tensor([[3, 1, 4]] * 3)
    q = one_hot(drafts.tolist())
    q[0] = q[1, 1:] = torch.nan
    drafts[0, 0] = drafts[1, 1] = 9
    result = verify_sampling(one_hot(best), drafts, q, torch.tensor([0, 1, 3]))
    assert result.num_accepted.tolist() == [0, 1, 3]
    assert [result.tokens[r, n].item() for r, n in enumerate([0, 1, 3])] == [3, 1, 1]


def test_a_cut_row_draws_its_last_token_from_the_target_itself():
    """B021, B118: nothing was rejected, so there is no residual, whatever q says."""
    p = torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.0, 1.0]]).expand(4000, 2, 3)
    q = torch.tensor([[1.0, 0.0, 0.0]]).expand(4000, 1, 3)
    drafts = torch.zeros(4000, 1, dtype=torch.long)
    for draft_probs in (q, None):
        tokens = verify_sampling(p, drafts, draft_probs, torch.zeros(4000)).tokens[:, 0]
        assert abs((tokens == 0).float().mean() - 0.5) < 0.04
        assert not (tokens == 2).any()


def test_a_rejected_one_hot_draft_is_never_emitted():
    """B003: q is one-hot, so the residual is p without the drafted token."""
    p = torch.tensor([0.999, 0.0005, 0.0005]).expand(4000, 2, 3)
    drafts = torch.ones(4000, 1, dtype=torch.long)
    result = verify_sampling(p, drafts, None, torch.ones(4000, dtype=torch.long))
    rejected = result.num_accepted == 0
    assert rejected.any()
    assert not (result.tokens[rejected, 0] == 1).any()


def assert_distributed(tokens, p):
    counts = torch.bincount(tokens, minlength=len(p)).double()
    expected = p.double() / p.double().sum() * len(tokens)
    assert chisquare(counts.numpy(), expected.numpy(), sum_check=False).pvalue > 1e-4


def test_later_tokens_are_distributed_as_p_whatever_came_before():
    """B004, B021: behind each first token, and where an even first token decides what is submitted
    after it."""
    p, q = (torch.tensor(values) for values in PAIRS["overlapping"])
    draws = 50_000
    drafts = torch.multinomial(q.expand(2 * draws, -1), 1).view(draws, 2)
    lengths = torch.where(drafts[:, 0] % 2 == 0, 2, 1)
    result = verify_sampling(p.expand(draws, 3, 4), drafts, q.expand(draws, 2, 4), lengths)
    assert_distributed(result.tokens[:, 0], p)
    for first in range(4):
        rows = (result.tokens[:, 0] == first) & (result.num_accepted >= 1)
        assert_distributed(result.tokens[rows, 1], p)


def test_the_chi_square_tests_would_see_a_wrong_rule():
    """A negative control: drawing the rejected token from p itself is found out."""
    p, q = (torch.tensor(values) for values in PAIRS["overlapping"])
    drafts = torch.multinomial(q.expand(50_000, -1), 1)[:, 0]
    accepted = torch.rand(50_000) < p[drafts] / q[drafts]
    tokens = torch.where(accepted, drafts, torch.multinomial(p.expand(50_000, -1), 1)[:, 0])
    with pytest.raises(AssertionError):
        assert_distributed(tokens, p)


def test_greedy_ties_go_to_the_first_token():
    """B013: the same winner as plain argmax."""
    logits = torch.tensor([[[0.0, 2.0, 2.0, 1.0], [2.0, 0.0, 0.0, 2.0]]])
    result = verify_greedy(logits, torch.tensor([[1]]), torch.tensor([1]))
    assert result.tokens.tolist() == [[1, 0]]
    assert result.num_accepted.tolist() == [1]


def test_one_function_makes_the_probabilities():
    """B002: low-precision logits become float32 once, and the same draw serves both sides."""
    logits = torch.randn(3, 11).bfloat16()
    probs = drafting.probabilities(logits)
    assert probs.dtype == torch.float32
    assert torch.equal(probs, torch.softmax(logits.float(), dim=-1))
    assert verification.sample is drafting.sample


def test_each_row_is_cut_by_its_own_confidences():
    """B095, B113, B117, B118: certain positions pass any threshold, 0 keeps even the hopeless, a
    confidence equal to the threshold is kept."""
    inf = torch.inf
    logits = torch.tensor([[2.0, 2.0, 2.0], [-2.0, 2.0, 2.0], [0.0, inf, -inf], [inf, inf, 5.0]])
    assert threshold_lengths(logits, 0.5).tolist() == [3, 0, 2, 3]
    assert threshold_lengths(logits, 1.0).tolist() == [0, 0, 0, 2]
    assert threshold_lengths(logits, 0.0).tolist() == [3, 3, 3, 3]
    # The product of .9 and .7 is .63: a cumulative rule would cut here.
    assert threshold_lengths(torch.tensor([[0.9, 0.7, 0.99]]).logit(), 0.65).tolist() == [3]

"""
Every policy keeps the target's distribution: the paper's counterexample in the real loop, and
random tables with confidences that depend on the drafted tokens.
"""

import math

import pytest
import torch
from scipy.stats import binomtest, chisquare, combine_pvalues
from transformers import LogitsProcessor, LogitsProcessorList

from dspark_hf import DraftBlock, collect_statistics
from dspark_hf.generation.verification import verify_sampling
from dspark_hf.scheduling import policy as policy_module
from dspark_hf.scheduling.policy import VerificationPolicy
from dspark_hf.scheduling.prefix_scheduler import best_count
from dspark_hf.scheduling.settings import SchedulingSettings
from dspark_hf.scheduling.throughput_profile import ThroughputProfile
from tiny import VOCAB, make_drafter, make_prompt, make_scripted, make_target

A, B = 5, 6
# The paper's costs (appendix A).
PROFILE = {"tokens": [1, 2, 3], "steps_per_second": [1.0, 0.5, 0.45]}


class TwoTokens(LogitsProcessor):
    """The target says A with 0.7 and B with 0.3, whatever came before."""

    def __call__(self, input_ids, scores):
        scores = torch.full_like(scores, -torch.inf)
        scores[:, A], scores[:, B] = math.log(0.7), math.log(0.3)
        return scores


def counterexample_drafter():
    """Drafts A or B with even odds; after A the second token looks good, after B hopeless."""
    drafter = make_drafter(block_size=2)
    q = torch.full((1, 2, VOCAB), -torch.inf)
    q[..., [A, B]] = math.log(0.5)

    def draft(context, anchor_ids, **kwargs):
        tokens = torch.where(torch.rand(1, 2) < 0.5, A, B)
        second = 0.9 if int(tokens[0, 0]) == A else 0.0
        confidence = torch.tensor([[0.8, second]]).logit()
        return DraftBlock(tokens, q, q, torch.zeros(1, 2, 1), confidence)

    drafter.draft = draft
    return drafter


def first_tokens(num_tokens, **options):
    """How many rounds began with A, and how many there were."""
    firsts = []
    with collect_statistics(on_round=lambda record: firsts.append(record.tokens[0])) as statistics:
        make_target("qwen3").generate(
            make_prompt(4),
            max_new_tokens=num_tokens,
            do_sample=True,
            top_k=0,
            logits_processor=LogitsProcessorList([TwoTokens()]),
            assistant_model=counterexample_drafter(),
            dspark_verification="scheduled",
            dspark_throughput_profile=PROFILE,
            **options,
        )
    # The last rounds are short of room, which takes tokens away without regard to what they are.
    return firsts.count(A), len(firsts), statistics


@pytest.mark.parametrize("scheduler", ["early_stop", "lagged"])
def test_the_papers_counterexample_in_the_real_loop(scheduler):
    """Appendix A: P(A) stays 0.70; a correct rule fails with probability 1e-3."""
    num_a, rounds, statistics = first_tokens(400, dspark_scheduler=scheduler)
    assert binomtest(num_a, rounds, 0.7).pvalue > 1e-3
    # Algorithm 1 verifies nothing at these costs; the lagged capacity reaches past the cliff.
    assert set(statistics.verify_lengths) == ({0} if scheduler == "early_stop" else {0, 1, 2})


def test_an_unconstrained_search_of_the_same_round_is_biased(monkeypatch):
    """
    Appendix A: why Algorithm 1 stops early. Whether x₁ is submitted is decided by c₂, and c₂ by
    x₁: a drafted A is always submitted and always accepted, a drafted B never submitted, and then
    the target draws again. P(A) = 0.5 + 0.5 · 0.7.
    """
    monkeypatch.setattr(policy_module, "early_stop", best_count)
    num_a, rounds, _ = first_tokens(500)
    assert binomtest(num_a, rounds, 0.7).pvalue < 1e-6
    assert binomtest(num_a, rounds, 0.85).pvalue > 1e-3


# P(A) behind A and behind B.
AFTER = {A: 0.7, B: 0.6}
# The first column pays where both rows are confident, the others where their tokens are all A.
JAGGED = {"tokens": [1, 2, 4, 6, 8], "steps_per_second": [1.0, 1.0, 1 / 1.9, 1 / 2.3, 1 / 2.9]}


class Chain(LogitsProcessor):
    """The target says A with a probability that depends on the token before."""

    def __call__(self, input_ids, scores):
        scores = torch.full_like(scores, -torch.inf)
        p = torch.where(input_ids[:, -1] == A, AFTER[A], AFTER[B])
        scores[:, A], scores[:, B] = p.log(), (1 - p).log()
        return scores


def chain_drafter():
    """Drafts A or B with even odds; what follows an A looks good, what follows a B hopeless."""
    drafter = make_drafter(block_size=3)

    def draft(context, anchor_ids, **kwargs):
        rows = len(anchor_ids)
        q = torch.full((rows, 3, VOCAB), -torch.inf)
        q[..., [A, B]] = math.log(0.5)
        tokens = torch.where(torch.rand(rows, 3) < 0.5, A, B)
        first = torch.where(anchor_ids == A, 0.97, 0.8)[:, None]
        confidence = torch.cat((first, torch.where(tokens[:, :2] == A, 0.9, 0.0)), dim=1)
        return DraftBlock(tokens, q, q, torch.zeros(rows, 3, 1), confidence.logit())

    drafter.draft = draft
    return drafter


@pytest.mark.parametrize("scheduler", ["early_stop", "lagged", "peeking"])
def test_two_rows_on_a_jagged_curve_in_the_real_loop(scheduler, monkeypatch):
    """
    The first tokens of a round, of both rows together, behind each pair of anchors: four chi-square
    tests, combined. A correct rule fails with probability 1e-3; the search without early stop, the
    negative control, does not pass.
    """
    target = make_target("qwen3", max_position_embeddings=2048)
    drafter, records, num_tokens = chain_drafter(), [], 1000
    if scheduler == "peeking":
        monkeypatch.setattr(policy_module, "early_stop", best_count)
    torch.manual_seed(5)
    with collect_statistics(on_round=records.append) as statistics:
        output = target.generate(
            torch.tensor([[9, 9, A], [9, 9, B]]),
            max_new_tokens=num_tokens,
            do_sample=True,
            top_k=0,
            logits_processor=LogitsProcessorList([Chain()]),
            assistant_model=drafter,
            dspark_verification="scheduled",
            dspark_throughput_profile=JAGGED,
            dspark_scheduler="lagged" if scheduler == "lagged" else "early_stop",
        )
    anchors, ends = output[:, 3].tolist(), [1, 1]
    counts = {(a, b): torch.zeros(2, 2) for a in AFTER for b in AFTER}
    for both in zip(records[::2], records[1::2], strict=False):
        # Rows near their end leave, and are short of room before that.
        if max(ends) > num_tokens - 4:
            break
        counts[tuple(anchors)][both[0].tokens[0] - A, both[1].tokens[0] - A] += 1
        anchors = [record.tokens[-1] for record in both]
        ends = [end + len(record.tokens) for end, record in zip(ends, both, strict=True)]
    found = []
    for pair, table in counts.items():
        first, second = (torch.tensor([AFTER[a], 1 - AFTER[a]]).double() for a in pair)
        expected = torch.outer(first, second) * table.sum()
        found.append(chisquare(table.flatten(), expected.flatten(), sum_check=False).pvalue)
    combined = combine_pvalues(found).pvalue
    assert combined < 1e-5 if scheduler == "peeking" else combined > 1e-3
    assert set(statistics.verify_lengths) == {0, 1, 2, 3}


def normalised(table):
    """Distributions over the last axis, all of them possible."""
    table = table.pow(2) + 0.02
    return table / table.sum(-1, keepdim=True)


SMOOTH = ThroughputProfile(tuple(range(1, 17)), tuple(1 / (1 + 0.11 * b) for b in range(16)))
STAIRS = ThroughputProfile(
    tuple(range(1, 17)), tuple(1 / (1 + 0.45 * (b >= 4) + 0.5 * (b >= 7)) for b in range(16))
)
SCHEDULED = {"verification": "scheduled"}
CASES = {
    "early stop, packed, smooth": (SCHEDULED, SMOOTH, "packed"),
    "early stop, padded, stairs": (SCHEDULED, STAIRS, "padded"),
    "early stop, packed, stairs, ceiling": (SCHEDULED | {"max_verify_tokens": 6}, STAIRS, "packed"),
    "lagged, packed, stairs": (SCHEDULED | {"scheduler": "lagged"}, STAIRS, "packed"),
    "lagged, padded, smooth": (SCHEDULED | {"scheduler": "lagged"}, SMOOTH, "padded"),
    "threshold, ceiling": (
        {"verification": "threshold", "confidence_threshold": 0.4, "max_verify_tokens": 8},
        None,
        "packed",
    ),
    "full, ceiling": ({"max_verify_tokens": 8}, None, "packed"),
}


def emitted(settings, profile, layout, trials, seed=0):
    """
    Three rows, three draft tokens, four words; p, q and the confidences depend on the word before.

    Returns p of the first word by row, the words emitted first and second (-1: none), and lengths.
    """
    torch.manual_seed(seed)
    rows, block, vocabulary = 3, 3, 4
    p = normalised(torch.rand(rows, block + 1, vocabulary, vocabulary))
    q = normalised(torch.rand(rows, block, vocabulary, vocabulary))
    # Confident or hopeless, depending on the word before: the temptation to peek is large.
    confidence = torch.where(torch.rand(rows, block, vocabulary) < 0.5, 0.97, 0.03)
    confidence[:, 0] = 0.75
    row = torch.arange(rows)
    policy = VerificationPolicy(SchedulingSettings(**settings), block, profile, layout)
    tokens = torch.empty(trials, rows, block, dtype=torch.long)
    p_path = torch.empty(trials, rows, block + 1, vocabulary)
    q_path = torch.empty(trials, rows, block, vocabulary)
    logits = torch.empty(trials, rows, block)
    previous = torch.zeros(trials, rows, dtype=torch.long)
    for k in range(block + 1):
        p_path[:, :, k] = p[row, k, previous]
        if k < block:
            q_path[:, :, k] = q[row, k, previous]
            logits[:, :, k] = confidence[row, k, previous].logit()
            previous = torch.multinomial(q_path[:, :, k].flatten(0, 1), 1).view(trials, rows)
            tokens[:, :, k] = previous
    limits = torch.full((rows,), block)
    lengths = torch.stack([policy.verify_lengths(logits[i], limits) for i in range(trials)])
    result = verify_sampling(
        p_path.flatten(0, 1), tokens.flatten(0, 1), q_path.flatten(0, 1), lengths.flatten()
    )
    accepted = result.num_accepted.view(trials, rows)
    words = result.tokens.view(trials, rows, -1)
    return p, words[..., 0], torch.where(accepted > 0, words[..., 1], -1), lengths


def p_values(p, first, second):
    """Of the first word by row, of pairs of rows, and of the second word behind each first."""
    found = []
    for r in range(3):
        expected = p[r, 0, 0].double()
        counts = torch.bincount(first[:, r], minlength=4)
        found.append(chisquare(counts, expected * len(first), sum_check=False).pvalue)
        other = (r + 1) % 3
        joint = torch.outer(expected, p[other, 0, 0].double()).flatten()
        counts = torch.bincount(first[:, r] * 4 + first[:, other], minlength=16)
        found.append(chisquare(counts, joint * len(first), sum_check=False).pvalue)
        for word in range(4):
            behind = second[(first[:, r] == word) & (second[:, r] >= 0), r]
            if len(behind) >= 100:
                expected = p[r, 1, word].double() * len(behind)
                counts = torch.bincount(behind, minlength=4)
                found.append(chisquare(counts, expected, sum_check=False).pvalue)
    return found


@pytest.mark.parametrize("name", CASES)
def test_emitted_words_are_distributed_as_the_target(name):
    """B013, B095: about 18 tests a case; all pass a correct policy with probability 0.998."""
    p, first, second, lengths = emitted(*CASES[name], trials=1500)
    assert min(p_values(p, first, second)) > 1e-4
    # The rule is at work: rows are cut, and not all alike.
    assert len(lengths.flatten().unique()) > 1


def test_the_tables_would_see_a_rule_that_peeks(monkeypatch):
    """A negative control: the search without early stop, in the round it decides."""
    monkeypatch.setattr(policy_module, "early_stop", best_count)
    cliff = ThroughputProfile((1, 3, 4, 16), (1.0, 1.0, 1 / 1.9, 1 / 1.9))
    p, first, second, _ = emitted(SCHEDULED, cliff, "packed", trials=1500)
    assert min(p_values(p, first, second)) < 1e-6


GREEDY = {
    "early stop": {"dspark_verification": "scheduled"},
    "lagged": {"dspark_verification": "scheduled", "dspark_scheduler": "lagged"},
    "loaded": {"dspark_verification": "scheduled", "dspark_load": 3},
    "ceiling": {"dspark_max_verify_tokens": 3},
    "threshold and temperatures": {
        "dspark_confidence_threshold": 0.5,
        "dspark_sts_temperatures": [0.5, 1.0, 2.0, 4.0],
    },
    "skipping": {"dspark_draft_skipping": True},
}


@pytest.mark.parametrize("num_right", [0, 2, 4])
@pytest.mark.parametrize("name", GREEDY)
def test_greedy_text_is_the_targets_own(name, num_right):
    """B015: EXACT for every policy, with drafters that are right, half right and never right."""
    target, prompt = make_target("qwen3"), make_prompt(6)
    expected = target.generate(prompt, max_new_tokens=40, do_sample=False)
    profile = {
        "tokens": [1, 2, 3, 4, 5],
        "steps_per_second": [10.0, 9.0, 8.7, 6.0, 5.9],
        "draft_seconds": 0.2,
    }
    with collect_statistics() as statistics:
        found = target.generate(
            prompt,
            max_new_tokens=40,
            do_sample=False,
            assistant_model=make_scripted(make_drafter(), expected, num_right),
            dspark_throughput_profile=profile,
            **GREEDY[name],
        )
    assert torch.equal(found, expected)
    assert any(length < 4 for length in statistics.verify_lengths)

"""
Sampling keeps the target's distribution: chi-square tests with fixed seeds.

Error bound: every test fails a correct implementation with probability 1e-4 over the choice of the
seed; with about 20 of them, 0.2 % for the file. The loop's parts are run on 20,000 rows at once,
composed as the loop composes them, and the composition itself on 2,000 real calls.
"""

import itertools

import pytest
import torch
from scipy.stats import chisquare
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from dspark_hf.drafting import probabilities
from dspark_hf.generation.settings import DraftSettings
from dspark_hf.generation.verification import threshold_lengths, verify_sampling
from tiny import make_drafter, make_target

VOCAB, DRAWS, ALPHA = 8, 20_000, 1e-4
PROMPT = torch.tensor([[3, 5, 4, 6]])
ANCHOR = 2

WARPERS = {
    "plain": LogitsProcessorList(),
    "temperature": LogitsProcessorList([TemperatureLogitsWarper(0.5)]),
    "top_k": LogitsProcessorList([TopKLogitsWarper(3)]),
    "top_p": LogitsProcessorList([TopPLogitsWarper(0.7)]),
    "min_p": LogitsProcessorList([MinPLogitsWarper(0.2)]),
    "repetition_penalty": LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.5)]),
}


def small_target():
    return make_target("qwen3", vocab_size=VOCAB, initializer_range=0.25)


def small_drafter(**options):
    return make_drafter(vocab_size=VOCAB, block_size=3, **options)


def next_probs(target, ids, processors):
    """Exact p of the next token after `ids` (N, length)."""
    with torch.no_grad():
        logits = target(ids).logits[:, -1].float()
    return probabilities(processors(ids, logits))


def exact_paths(target, processors, length):
    """Exact probability of every continuation of `PROMPT + ANCHOR`, (VOCAB,) * length."""
    joint = torch.ones(1, dtype=torch.float64)
    ids = torch.cat((PROMPT, torch.tensor([[ANCHOR]])), dim=1)
    for _ in range(length):
        p = next_probs(target, ids, processors).double()
        joint = (joint[:, None] * p).flatten()
        tokens = torch.arange(VOCAB).repeat(len(ids))[:, None]
        ids = torch.cat((ids.repeat_interleave(VOCAB, dim=0), tokens), dim=1)
    return joint.reshape((VOCAB,) * length)


def assert_distributed_as(counts, p):
    """Chi-square of counts against p; cells that expect fewer than 5 are pooled."""
    counts, p = counts.flatten().double(), p.flatten().double()
    assert not counts[p == 0].any(), "a token was emitted that the target never emits"
    expected = p * counts.sum()
    small = expected < 5
    observed = torch.cat((counts[~small], counts[small].sum()[None]))
    expected = torch.cat((expected[~small], expected[small].sum()[None]))
    keep = expected > 0
    result = chisquare(observed[keep].numpy(), (expected[keep]).numpy(), sum_check=False)
    assert result.pvalue > ALPHA, result


def draft_rows(drafter, target, rows, processors, do_sample=True):
    """One block for each of `rows` equal rows, through the real drafter."""
    context = drafter.new_context(rows, target=target)
    with torch.no_grad():
        states = target(PROMPT, output_hidden_states=True).hidden_states
    features = torch.cat([states[i + 1] for i in drafter.config.target_layer_ids], dim=-1)
    drafter.extend(context, features.expand(rows, -1, -1))
    anchors = torch.full((rows,), ANCHOR)
    ids = torch.cat((PROMPT.expand(rows, -1), anchors[:, None]), dim=1)
    return ids, drafter.draft(context, anchors, do_sample, processors, ids)


def verify_rows(target, ids, block, processors, lengths, one_hot=False):
    """The verification of those blocks, through the real verifier."""
    path = torch.cat((ids, block.tokens), dim=1)
    unique, inverse = torch.unique(path, dim=0, return_inverse=True)
    with torch.no_grad():
        raw = target(unique).logits.float()
    start = ids.shape[1]
    scores = torch.stack(
        [
            processors(unique[:, : start + i], raw[:, start - 1 + i].clone())
            for i in range(block.tokens.shape[1] + 1)
        ],
        dim=1,
    )
    q = None if one_hot else probabilities(block.logits)
    return verify_sampling(probabilities(scores)[inverse], block.tokens, q, lengths)


def pair_counts(target, verification, processors):
    """Counts of the first two emitted tokens; the second is drawn from p where the round gave "
    "one."""
    first, second = verification.tokens[:, 0], verification.tokens[:, 1].clone()
    alone = verification.num_accepted == 0
    ids = torch.cat((PROMPT, torch.tensor([[ANCHOR]])), dim=1)
    for token in range(VOCAB):
        rows = alone & (first == token)
        if rows.any():
            p = next_probs(target, torch.cat((ids, torch.tensor([[token]])), dim=1), processors)
            second[rows] = torch.multinomial(p[0], int(rows.sum()), replacement=True)
    return torch.bincount(first * VOCAB + second, minlength=VOCAB**2)


@pytest.mark.parametrize("name", WARPERS)
@pytest.mark.parametrize("draws", ["sampled", "greedy"])
def test_first_and_second_token_have_the_targets_distribution(name, draws):
    """B001, B002, B003, B006, B039: for exact q and for one-hot q."""
    target, drafter, processors = small_target(), small_drafter(), WARPERS[name]
    sampled = draws == "sampled"
    ids, block = draft_rows(drafter, target, DRAWS, processors, do_sample=sampled)
    lengths = torch.full((DRAWS,), 3)
    verification = verify_rows(target, ids, block, processors, lengths, one_hot=not sampled)
    assert 0 < verification.num_accepted.float().mean() < 3
    counts = pair_counts(target, verification, processors)
    assert_distributed_as(counts, exact_paths(target, processors, 2))


def test_a_confidence_that_depends_on_the_drafts_cuts_without_bias():
    """B021, B113: the head reads the previous draft token, and rows submit different lengths."""
    target, drafter, processors = small_target(), small_drafter(), WARPERS["plain"]
    proj, embed = drafter.confidence_head.proj, drafter.markov_head.embed
    with torch.no_grad():
        # Sure behind the anchor, so that the first draft token always passes, and unsure behind
        # token 5: what happens to the second token is up to the first.
        sure, unsure = embed(torch.tensor([ANCHOR, 5]))
        proj.weight.zero_()
        proj.weight[0, drafter.config.hidden_size :] = sure - unsure
        proj.bias.copy_(-(sure - unsure) @ (sure + unsure) / 2)
    ids, block = draft_rows(drafter, target, DRAWS, processors)
    lengths = threshold_lengths(block.confidence_logits, 0.5)
    assert len(set(lengths.tolist())) > 1
    verification = verify_rows(target, ids, block, processors, lengths)
    assert bool((verification.num_accepted <= lengths).all())
    counts = pair_counts(target, verification, processors)
    assert_distributed_as(counts, exact_paths(target, processors, 2))


def test_choosing_the_cut_by_the_token_itself_would_be_biased():
    """B021, the control: a cut that looks at the drafted token is what this suite would catch."""
    target, drafter, processors = small_target(), small_drafter(), WARPERS["plain"]
    ids, block = draft_rows(drafter, target, DRAWS, processors)
    lengths = (block.tokens[:, 0] < VOCAB // 2).long() * 3
    verification = verify_rows(target, ids, block, processors, lengths)
    counts = torch.bincount(verification.tokens[:, 0], minlength=VOCAB)
    with pytest.raises(AssertionError, match="pvalue"):
        assert_distributed_as(counts, exact_paths(target, processors, 1))


def test_drafted_tokens_come_from_the_logits_that_are_handed_over():
    """B001: q(x) > 0 for each drafted x, and the drafts are distributed as q."""
    processors = WARPERS["top_k"]
    _, block = draft_rows(small_drafter(), small_target(), DRAWS, processors)
    q = probabilities(block.logits)
    assert bool((q.gather(-1, block.tokens[..., None]) > 0).all())
    counts = torch.bincount(block.tokens[:, 0], minlength=VOCAB)
    assert_distributed_as(counts, q[0, 0])


def test_accepted_share_is_the_overlap_of_p_and_q():
    """B004: Σ min(p, q), on two tokens."""
    p = torch.tensor([[0.7, 0.3]])
    q = torch.tensor([[0.5, 0.5]])
    tokens = torch.multinomial(q.expand(DRAWS, -1), 1)
    rows_p = p[:, None].expand(DRAWS, 2, 2)
    verification = verify_sampling(
        rows_p, tokens, q[:, None].expand(DRAWS, 1, 2), torch.ones(DRAWS, dtype=torch.long)
    )
    accepted = verification.num_accepted.float().mean().item()
    # Standard error 0.0028; four of them.
    assert abs(accepted - 0.8) < 0.0113


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.7, "top_k": 0},
        {"top_k": 4, "dspark_confidence_threshold": 0.5},
        {"top_k": 0, "dspark_draft_sampling": "greedy", "repetition_penalty": 1.5},
    ],
    ids=["temperature", "threshold", "greedy-drafts"],
)
def test_generate_itself_has_the_targets_distribution(options):
    """B001, B003, B021, B113: 2,000 calls of three tokens, all three compared."""
    target = make_target(
        "qwen3", vocab_size=VOCAB, num_hidden_layers=1, hidden_size=16, initializer_range=0.4
    )
    drafter = small_drafter(taps=(0,), num_target_layers=1, target_hidden_size=16)
    sampling = {name: value for name, value in options.items() if not name.startswith("dspark")}
    counts = torch.zeros((4,) * 3)
    pool = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])
    for _ in range(2000):
        output = target.generate(
            PROMPT, max_new_tokens=3, do_sample=True, assistant_model=drafter, **options
        )
        counts[tuple(pool[output[0, 4:]])] += 1
    processors = target._get_logits_processor(
        _prepared(target, do_sample=True, **sampling), input_ids_seq_length=4
    )
    exact = torch.zeros((4,) * 3, dtype=torch.float64)
    for path in itertools.product(range(VOCAB), repeat=2):
        ids = PROMPT
        weight = 1.0
        for token in path:
            weight *= float(next_probs(target, ids, processors)[0, token])
            ids = torch.cat((ids, torch.tensor([[token]])), dim=1)
        if weight:
            last = next_probs(target, ids, processors)[0].double()
            cell = exact[tuple(pool[list(path)])]
            cell.index_add_(0, pool, weight * last)
    assert_distributed_as(counts, exact)


def _prepared(target, **options):
    config, _ = target._prepare_generation_config(None, **options)
    target._prepare_special_tokens(config, True, device="cpu")
    return config


def test_settings_object_is_what_the_loop_uses():
    """B007: the draft side sees the target's own processors, so its temperature is the target's."""
    assert [field for field in DraftSettings.__dataclass_fields__ if "temperature" in field] == []
    target, drafter = small_target(), small_drafter()
    draft, seen = drafter.draft, []

    def recording(*args, **kwargs):
        seen.append([type(p).__name__ for p in kwargs["logits_processor"]])
        return draft(*args, **kwargs)

    drafter.draft = recording
    target.generate(
        PROMPT, max_new_tokens=3, do_sample=True, temperature=0.1, assistant_model=drafter
    )
    assert "TemperatureLogitsWarper" in seen[0]

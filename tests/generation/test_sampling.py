"""
Sampling keeps the target's distribution: chi-square tests with fixed seeds.

Error bound: every test fails a correct implementation with probability 1e-4 over the choice of the
seed; with about 30 of them, 0.3 % for the file. The loop's parts are run on 20,000 rows at once,
composed as the loop composes them, and the composition itself on 1,500 real calls.
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

from dspark_hf import collect_statistics, drafting
from dspark_hf.drafting import probabilities, sample
from dspark_hf.generation import decoding, judging
from dspark_hf.generation.settings import DraftSettings
from dspark_hf.generation.verification import threshold_lengths, verify_sampling
from tiny import make_drafter, make_target

VOCAB, DRAWS, ALPHA = 8, 20_000, 1e-4
LENGTH = 3
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


def path_counts(target, verification, processors):
    """Counts of the first three emitted tokens; those that the round did not give come from p."""
    tokens = verification.tokens[:, :LENGTH].clone()
    for i in range(1, LENGTH):
        missing = verification.num_accepted < i
        if missing.any():
            committed = torch.full((int(missing.sum()), 1), ANCHOR)
            ids = torch.cat((PROMPT.expand(len(committed), -1), committed), dim=1)
            ids = torch.cat((ids, tokens[missing, :i]), dim=1)
            unique, inverse = torch.unique(ids, dim=0, return_inverse=True)
            p = next_probs(target, unique, processors)[inverse]
            tokens[missing, i] = torch.multinomial(p, 1).squeeze(-1)
    weights = VOCAB ** torch.arange(LENGTH - 1, -1, -1)
    return torch.bincount((tokens * weights).sum(dim=1), minlength=VOCAB**LENGTH)


@pytest.mark.parametrize("name", WARPERS)
@pytest.mark.parametrize("draws", ["sampled", "greedy"])
def test_the_first_three_tokens_have_the_targets_distribution(name, draws):
    """B001, B002, B003, B006, B039: for exact q and for one-hot q."""
    target, drafter, processors = small_target(), small_drafter(), WARPERS[name]
    sampled = draws == "sampled"
    ids, block = draft_rows(drafter, target, DRAWS, processors, do_sample=sampled)
    lengths = torch.full((DRAWS,), 3)
    verification = verify_rows(target, ids, block, processors, lengths, one_hot=not sampled)
    assert 0 < verification.num_accepted.float().mean() < 3
    counts = path_counts(target, verification, processors)
    assert_distributed_as(counts, exact_paths(target, processors, LENGTH))


@pytest.mark.parametrize("num_right", range(4))
@pytest.mark.parametrize("name", ["plain", "top_k"])
def test_chosen_drafts_of_every_quality_keep_the_distribution(name, num_right):
    """B003: the target's most likely tokens up to position k, its least likely ones behind."""
    target, drafter, processors = small_target(), small_drafter(), WARPERS[name]
    ids, block = draft_rows(drafter, target, DRAWS, processors, do_sample=False)
    path = ids[:1]
    for k in range(3):
        p = next_probs(target, path, processors)[0]
        choice = p.argmax() if k < num_right else p.argmin()
        path = torch.cat((path, choice[None, None]), dim=1)
    block.tokens = path[:, -3:].expand(DRAWS, -1)
    lengths = torch.full((DRAWS,), 3)
    verification = verify_rows(target, ids, block, processors, lengths, one_hot=True)
    if name == "top_k":
        # What the target never says is never accepted.
        assert int(verification.num_accepted.max()) == num_right
    counts = path_counts(target, verification, processors)
    assert_distributed_as(counts, exact_paths(target, processors, LENGTH))


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
    counts = path_counts(target, verification, processors)
    assert_distributed_as(counts, exact_paths(target, processors, LENGTH))


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
    """B004: α = Σ min(p, q) for one position, α + α² + α³ for three, on two tokens."""
    p, q, alpha = torch.tensor([0.7, 0.3]), torch.tensor([0.5, 0.5]), 0.8
    for num_drafts in (1, 3):
        tokens = torch.multinomial(q.expand(DRAWS * num_drafts, -1), 1).reshape(DRAWS, -1)
        accepted = verify_sampling(
            p.expand(DRAWS, num_drafts + 1, 2),
            tokens,
            q.expand(DRAWS, num_drafts, 2),
            torch.full((DRAWS,), num_drafts),
        ).num_accepted.double()
        expected = sum(alpha**k for k in range(1, num_drafts + 1))
        # Four standard errors.
        assert abs(accepted.mean() - expected) < 4 * accepted.std() / DRAWS**0.5


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.7, "top_k": 4, "dspark_confidence_threshold": 0.5},
        {"top_k": 0, "dspark_draft_sampling": "greedy", "repetition_penalty": 1.5},
    ],
    ids=["sampled-drafts-threshold", "greedy-drafts"],
)
def test_generate_itself_has_the_targets_distribution(options):
    """B001, B003, B021, B113: 1,500 calls of three tokens, all three compared."""
    target = make_target(
        "qwen3", vocab_size=VOCAB, num_hidden_layers=1, hidden_size=16, initializer_range=0.4
    )
    drafter = small_drafter(taps=(0,), num_target_layers=1, target_hidden_size=16)
    sampling = {name: value for name, value in options.items() if not name.startswith("dspark")}
    counts = torch.zeros((4,) * 3)
    pool = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])
    with collect_statistics() as statistics:
        for _ in range(1500):
            output = target.generate(
                PROMPT, max_new_tokens=3, do_sample=True, assistant_model=drafter, **options
            )
            counts[tuple(pool[output[0, 4:]])] += 1
    assert 0 < statistics.accepted < statistics.verified
    if "dspark_confidence_threshold" in options:
        # Every round that drafts three tokens here can verify one of them; some were cut to none.
        assert statistics.verified < statistics.drafted // 3
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


def test_the_ratio_uses_the_very_probabilities_that_tokens_were_drawn_from(monkeypatch):
    """B002: bit for bit, in bfloat16 too."""
    drawn, used = [], []

    def drawing(probs):
        drawn.append(probs)
        return sample(probs)

    def verifying(target_probs, draft_tokens, draft_probs, verify_lengths):
        used.append(draft_probs)
        # Rounded to bfloat16, they would not add up to one.
        assert target_probs.dtype == torch.float32
        totals = target_probs.sum(dim=-1)
        torch.testing.assert_close(totals, torch.ones_like(totals), atol=1e-5, rtol=0)
        return verify_sampling(target_probs, draft_tokens, draft_probs, verify_lengths)

    monkeypatch.setattr(drafting, "sample", drawing)
    # The first token of a text is no draft.
    monkeypatch.setattr(decoding, "sample", sample)
    monkeypatch.setattr(judging, "verify_sampling", verifying)
    target, drafter = small_target().bfloat16(), small_drafter().bfloat16()
    target.generate(
        PROMPT, max_new_tokens=12, do_sample=True, temperature=0.7, assistant_model=drafter
    )
    used = [q for q in used if q is not None]
    assert len(used) >= 2
    for i, q in enumerate(used):
        assert q.dtype == torch.float32
        # The drafter draws a block of three whatever is verified of it.
        for k in range(q.shape[1]):
            assert torch.equal(q[:, k], drawn[3 * i + k])


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

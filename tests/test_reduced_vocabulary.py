"""Drafters that can draft only some of the target's tokens (B040, B081, B082)."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from scipy.stats import chisquare

from dspark_hf import DSparkDrafter, collect_statistics
from tiny import HIDDEN, VOCAB, make_drafter, make_prompt, make_scripted, make_target

DRAFTABLE = 40


def make_reduced(stored: bool = True, seed: int = 5, **options) -> DSparkDrafter:
    drafter = make_drafter(stored=stored, draft_vocab_size=DRAFTABLE, **options)
    generator = torch.Generator().manual_seed(seed)
    drafter.draft_to_target.copy_(torch.randperm(VOCAB, generator=generator)[:DRAFTABLE].sort()[0])
    return drafter


@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize("markov", ["vanilla", "gated", "rnn", None])
def test_logits_are_those_of_the_full_vocabulary_at_draftable_tokens(stored, markov):
    """The same weights with all rows draft the same logits where a token can be drafted."""
    reduced = make_reduced(stored=stored, markov=markov)
    full = make_drafter(stored=stored, markov=markov)
    state, ids = full.state_dict(), reduced.draft_to_target
    for name in ("lm_head.weight", "markov_head.markov_w2.weight"):
        if name in state:
            state[name] = state[name][ids]
    reduced.load_state_dict({**state, "draft_to_target": ids})
    target = make_target()
    features, anchor = torch.randn(1, 5, 2 * HIDDEN), torch.tensor([7])
    blocks = []
    for drafter in (reduced, full):
        context = drafter.new_context(1, target=None if stored else target)
        drafter.extend(context, features)
        blocks.append(drafter.draft(context, anchor))
    got, wanted = blocks
    assert got.logits.shape == (1, 4, VOCAB)
    assert got.base_logits.shape == (1, 4, DRAFTABLE)
    torch.testing.assert_close(got.base_logits, wanted.base_logits[..., ids])
    # The first position: later ones follow another path once the full one leaves the vocabulary.
    torch.testing.assert_close(got.logits[:, 0, ids], wanted.logits[:, 0, ids])
    undraftable = torch.ones(VOCAB, dtype=torch.bool)
    undraftable[ids] = False
    assert torch.isneginf(got.logits[..., undraftable]).all()
    assert torch.isin(got.tokens, ids).all()


@pytest.mark.parametrize("num_right", [None, 0, 2, 4])
def test_greedy_is_exact(num_right):
    target, prompt = make_target(), make_prompt()
    expected = target.generate(prompt, max_new_tokens=40, do_sample=False)
    drafter = make_reduced(stored=False)
    if num_right is not None:
        drafter = make_scripted(drafter, expected, num_right)
    output = target.generate(prompt, assistant_model=drafter, max_new_tokens=40, do_sample=False)
    assert torch.equal(output, expected)


def test_sampling_keeps_the_distribution_of_tokens_that_cannot_be_drafted():
    """Second and third token of 1,500 calls, chi-square; fails a correct loop once in 10,000."""
    size, draws = 8, 1500
    target = make_target(vocab_size=size, initializer_range=0.25)
    drafter = make_drafter(vocab_size=size, draft_vocab_size=4, stored=False)
    drafter.draft_to_target.copy_(torch.tensor([1, 3, 4, 6]))
    prompt = torch.tensor([[3, 4, 5]])
    everything = torch.cartesian_prod(*[torch.arange(size)] * 3)
    ids = torch.cat([prompt.expand(len(everything), -1), everything], dim=1)
    with torch.no_grad():
        probs = target(ids).logits[:, 2:5].double().softmax(-1)
    joint = probs.gather(-1, everything[..., None]).prod(dim=1).reshape(size, size, size).sum(0)
    counts = torch.zeros(size, size, dtype=torch.float64)
    torch.manual_seed(0)
    options = {"max_new_tokens": 3, "do_sample": True, "top_k": 0}
    with collect_statistics() as statistics:
        for _ in range(draws):
            new = target.generate(prompt, assistant_model=drafter, **options)
            counts[new[0, -2], new[0, -1]] += 1
    assert statistics.accepted > 300
    # Rare outcomes together, as the test asks for.
    is_common = joint * draws >= 5
    observed = torch.cat([counts[is_common], counts[~is_common].sum()[None]])
    expected = torch.cat([joint[is_common], joint[~is_common].sum()[None]]) * draws
    assert chisquare(observed.numpy(), expected.numpy()).pvalue > 1e-4


def test_round_trip(tmp_path):
    drafter = make_reduced()
    drafter.save_pretrained(tmp_path)
    loaded = DSparkDrafter.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert loaded.config.draft_vocab_size == DRAFTABLE
    assert loaded.draft_to_target.dtype == torch.int64
    assert torch.equal(loaded.draft_to_target, drafter.draft_to_target)
    assert loaded.lm_head.weight.shape == (DRAFTABLE, HIDDEN)


@pytest.mark.parametrize("ids", [[3] * DRAFTABLE, list(range(VOCAB - DRAFTABLE + 1, VOCAB + 1))])
def test_damaged_map(tmp_path, ids):
    make_reduced().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["draft_to_target"] = torch.tensor(ids)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="40 different token ids from 0 to 96"):
        DSparkDrafter.from_pretrained(tmp_path)


def test_missing_map(tmp_path):
    make_reduced().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["draft_to_target"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="missing draft_to_target"):
        DSparkDrafter.from_pretrained(tmp_path)


@pytest.mark.parametrize("size", [0, VOCAB, VOCAB + 1, 3.5])
def test_impossible_sizes(size):
    with pytest.raises(ValueError, match="draft_vocab_size"):
        make_drafter(draft_vocab_size=size)


def test_a_head_that_cannot_be_cut():
    drafter = make_reduced(stored=False)
    head = torch.nn.Linear(HIDDEN, VOCAB, bias=True)
    drafter.bind(input_embeddings=torch.nn.Embedding(VOCAB, HIDDEN), output_embeddings=head)
    with pytest.raises(ValueError, match="no plain weight without bias"):
        drafter.new_context(1)

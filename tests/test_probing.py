"""The layout probe: what it says about drafters whose right reading is known."""

import copy
import dataclasses
import json

import pytest
import torch

from dspark_hf import DSparkDrafter, Eagle3Drafter, probe_layout
from dspark_hf.generation.taps import TargetTaps
from dspark_hf.probing import LayoutReading, combine
from published import make_block_drafter
from tiny import VOCAB, make_drafter, make_eagle3, make_prompt, make_target

PROMPT = make_prompt(6)


def transcript(target, length=60):
    return target.generate(PROMPT, max_new_tokens=length, do_sample=False)


def make_oracle(monkeypatch, drafter, target, text, truth):
    """
    Every wrong fact of a reading costs one right token at the end of the block; which taps a
    reading has is told by the features it is given.
    """
    layers = [layer + truth.tap_offset for layer in drafter.config.target_layer_ids]
    with torch.no_grad(), TargetTaps(target, layers) as taps:
        target(text, use_cache=False)
        right_features = taps.take()
    extend, draft = DSparkDrafter.extend, DSparkDrafter.draft

    def spying(self, context, features):
        extend(self, context, features)
        known = right_features[:, context.position - 1]
        context.has_right_taps = torch.allclose(features[:, -1], known, atol=1e-5)

    def drafting(self, context, anchor_ids, **kwargs):
        block = draft(self, context, anchor_ids, **kwargs)
        config = self.config
        # Every reading runs at the trained width (T3).
        assert config.block_width == drafter.config.block_width
        wrong = int(config.anchor_predicts != truth.anchor_predicts)
        wrong += int(bool(config.causal_layers) != truth.causal)
        wrong += int(not context.has_right_taps)
        start = context.position + 1
        tokens = text[:, start : start + config.block_size].clone()
        tokens[:, 3 - wrong :] = (tokens[:, 3 - wrong :] + 1) % VOCAB
        return dataclasses.replace(block, tokens=tokens)

    monkeypatch.setattr(DSparkDrafter, "extend", spying)
    monkeypatch.setattr(DSparkDrafter, "draft", drafting)


@pytest.mark.parametrize(
    "truth",
    [
        LayoutReading(True, 0, False),
        LayoutReading(False, 0, False),
        LayoutReading(True, 1, False),
        LayoutReading(False, -1, True),
    ],
    ids=str,
)
def test_the_right_reading_is_found(monkeypatch, truth):
    """T1, T2, T13: layout, taps one up or down, causal or not, each from a wrong start."""
    target = make_target()
    text = transcript(target)
    drafter = make_drafter(stored=False, taps=(1, 2))
    before = drafter.config.to_dict()
    make_oracle(monkeypatch, drafter, target, text, truth)
    result = probe_layout(target, drafter, text, first_anchor=5, num_anchors=12)
    assert result.best == truth
    assert result.decided
    assert result.stated == LayoutReading(True, 0, False)
    assert drafter.config.to_dict() == before
    best, *rest = result.evidence
    assert best.accepted_length == 4.0
    assert best.agreement == [1.0, 1.0, 1.0]
    assert all(item.accepted_length < 4.0 for item in rest)
    json.dumps(result.to_dict())


def anchor_first_pair():
    """A target whose next token depends on the last one only, and a headless drafter that knows
    it from the embedding of the anchor's slot."""
    target = make_target()
    with torch.no_grad():
        for layer in target.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    drafter = make_drafter(stored=False, markov=None, confidence=False)
    with torch.no_grad():
        for layer in drafter.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        drafter.norm.weight.copy_(target.model.norm.weight)
    return target, drafter


@pytest.mark.parametrize("stated", [True, False])
def test_a_drafter_that_predicts_from_its_anchor_slot(stated):
    """T1, without a double: read either way, it is found to be anchor-first."""
    target, drafter = anchor_first_pair()
    if not stated:
        drafter.config.anchor_predicts, drafter.config.block_size = False, 3
    result = probe_layout(target, drafter, transcript(target), first_anchor=5)
    assert result.best == LayoutReading(True, 0, False)
    assert result.decided
    assert result.stated.anchor_predicts is stated
    by_layout = {item.reading.anchor_predicts: item for item in reversed(result.evidence)}
    assert by_layout[True].agreement[0] == 1.0
    assert by_layout[False].agreement[0] < 0.5


@pytest.mark.parametrize("offset", [-1, 0, 1])
def test_the_taps_of_an_eagle3_drafter(monkeypatch, offset):
    """T2: the two countings of `eagle_config` are told apart; nothing else is tried."""
    target = make_target()
    text = transcript(target)
    drafter = make_eagle3(taps=(1, 2), block_size=3)
    layers = [layer + offset for layer in drafter.config.target_layer_ids]
    with torch.no_grad(), TargetTaps(target, layers) as taps:
        target(text, use_cache=False)
        right_features = taps.take()
    extend, draft = Eagle3Drafter.extend, Eagle3Drafter.draft

    def spying(self, context, features, token_ids):
        start = getattr(context, "seen", 0)
        context.seen = start + features.shape[1]
        # Each position comes with the token behind it.
        assert torch.equal(token_ids, text[:, start + 1 : context.seen + 1])
        extend(self, context, features, token_ids)
        known = right_features[:, start : context.seen]
        context.is_right = torch.allclose(features, known, atol=1e-5)

    def drafting(self, context, anchor_ids, **kwargs):
        block = draft(self, context, anchor_ids, **kwargs)
        tokens = text[:, context.seen + 1 : context.seen + 4].clone()
        if not context.is_right:
            tokens[:, 1:] = (tokens[:, 1:] + 1) % VOCAB
        return dataclasses.replace(block, tokens=tokens)

    monkeypatch.setattr(Eagle3Drafter, "extend", spying)
    monkeypatch.setattr(Eagle3Drafter, "draft", drafting)
    result = probe_layout(target, drafter, text, first_anchor=5, num_anchors=12)
    assert result.best == LayoutReading(True, offset, True)
    assert result.decided
    assert [len(result.evidence), result.evidence[0].accepted_length] == [3, 4.0]


def test_a_drafter_that_knows_nothing_decides_nothing():
    """Chance is not taken for evidence, and what the checkpoint says is kept."""
    target = make_target()
    drafter = make_drafter(stored=False)
    result = probe_layout(target, drafter, transcript(target), num_anchors=8)
    assert not result.decided
    assert result.best == result.stated


def test_texts_are_pooled():
    """Weighted by their anchors."""
    target, drafter = anchor_first_pair()
    text = transcript(target)
    parts = [probe_layout(target, drafter, text, num_anchors=n) for n in (4, 12)]
    pooled = combine(parts)
    assert len(pooled.evidence[0].lengths) == 16
    first, second = (part.evidence[0] for part in parts)
    assert pooled.evidence[0].accepted_length == pytest.approx(
        (4 * first.accepted_length + 12 * second.accepted_length) / 16
    )
    assert combine(parts[:1]) == parts[0]


def test_windows_and_reduced_vocabularies_are_probed_too():
    """A variant shares the weights and leaves the drafter alone."""
    target = make_target()
    drafter = make_block_drafter((4, None), draft_vocab_size=40, causal_layers=[0])
    before = copy.deepcopy(drafter.state_dict())
    result = probe_layout(target, drafter, transcript(target), num_anchors=4)
    assert {item.reading.causal for item in result.evidence} == {True, False}
    after = drafter.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert drafter.config.causal_layers == [0]


@pytest.mark.parametrize("shape", [(1, 7), (2, 30), (30,)])
def test_texts_that_cannot_be_probed(shape):
    target, drafter = make_target(), make_drafter(stored=False)
    with pytest.raises(ValueError, match=r"one text \(1, L\) with at least 3 tokens behind"):
        probe_layout(target, drafter, torch.ones(shape, dtype=torch.long), first_anchor=5)


def test_a_pair_that_does_not_fit():
    with pytest.raises(ValueError, match="trained for another target"):
        probe_layout(make_target(hidden_size=64), make_drafter(), torch.ones(1, 30).long())

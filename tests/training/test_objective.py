"""The objective equals the reference, trains what drafting runs, and leaks nothing."""

import functools

import pytest
import torch
from safetensors.torch import load_file

from checkpoints import GATED, GEMMA4, GOLDEN, RNN, VANILLA
from dspark_hf import DSparkDrafter
from dspark_hf.training.anchors import block_targets
from dspark_hf.training.block_forward import block_hidden_states
from dspark_hf.training.objective import (
    DSparkObjective,
    ObjectiveSums,
    ObjectiveWeights,
    TargetStates,
    survival,
)
from dspark_hf.training.target_states import TargetReader
from dspark_hf.training.vocabulary_loss import Teacher
from test_reduced_vocabulary import make_reduced
from tiny import HIDDEN, make_drafter, make_prompt, make_target

HEADS = (VANILLA, GATED, RNN)


@functools.cache
def golden(name):
    return load_file(GOLDEN / name / "golden_training.safetensors")


def load(name, **options):
    return DSparkDrafter.from_pretrained(GOLDEN / name, **options)


def run_golden(drafter, name, **options):
    record = golden(name)
    states = TargetStates(record["target_features"], record["target_last_hidden"])
    teacher = Teacher(states.last_hidden[:0, 0], drafter.lm_head.weight.detach())
    return DSparkObjective(drafter, **options)(
        record["input_ids"],
        torch.ones_like(record["input_ids"]),
        record["loss_mask"].bool(),
        states,
        teacher,
        (record["anchor_positions"], record["block_keep_mask"].bool()),
    )


def draft_logits(drafter, features, input_ids, anchors, is_kept):
    """Teacher-forced logits `(B, A, G, V_d)` and confidence logits of the training path."""
    everything = torch.ones_like(input_ids, dtype=torch.bool)
    context = drafter.new_context(batch_size=1)
    hidden = block_hidden_states(
        drafter, context.input_embeddings, features, input_ids, everything, anchors, is_kept
    )
    _, previous, _ = block_targets(
        input_ids, everything, anchors, is_kept, drafter.config.block_size
    )
    logits = drafter._base_logits(context, hidden)
    embedded = None
    if drafter.markov_head is not None:
        logits = logits + drafter.markov_head.block(previous, hidden)
        embedded = drafter.markov_head.embed(previous)
    head = drafter.confidence_head
    return logits, None if head is None else head(hidden, embedded)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", HEADS)
def test_logits_of_all_anchors_equal_the_reference(name, attention):
    """B141: with every kernel that can keep anchors apart."""
    record, drafter = golden(name), load(name, attn_implementation=attention)
    anchors, is_kept = record["anchor_positions"], record["block_keep_mask"].bool()
    logits, confidence = draft_logits(
        drafter, record["target_features"], record["input_ids"], anchors, is_kept
    )
    torch.testing.assert_close(logits[is_kept], record["draft_logits"][is_kept], atol=2e-5, rtol=0)
    torch.testing.assert_close(
        confidence[is_kept], record["confidence_logits"][is_kept], atol=2e-5, rtol=0
    )


@pytest.mark.parametrize("name", HEADS)
def test_labels_and_supervision_equal_the_reference(name):
    record = golden(name)
    anchors, is_kept = record["anchor_positions"], record["block_keep_mask"].bool()
    labels, _, is_supervised = block_targets(
        record["input_ids"],
        record["loss_mask"].bool(),
        anchors,
        is_kept,
        record["eval_mask"].shape[-1],
    )
    assert torch.equal(is_supervised, record["eval_mask"].bool())
    assert torch.equal(labels[is_supervised], record["target_ids"][is_supervised])


@pytest.mark.parametrize("chunk_rows", [3, 1024])
@pytest.mark.parametrize("name", HEADS)
def test_terms_and_total_equal_the_reference(name, chunk_rows):
    record = golden(name)
    loss, sums = run_golden(load(name), name, chunk_rows=chunk_rows)
    torch.testing.assert_close(loss, record["total_loss"][0], atol=2e-5, rtol=0)
    metrics = sums.metrics()
    for metric, field in (
        ("cross_entropy", "ce_loss"),
        ("total_variation", "tv_l1_loss"),
        ("confidence_loss", "confidence_loss"),
    ):
        assert metrics[metric] == pytest.approx(record[field].item(), abs=2e-5), metric


@pytest.mark.parametrize("name", HEADS)
def test_confidence_learns_the_acceptance_of_the_reference(name):
    """Equation 8; per slot, and τ as the paper sums it up."""
    record = golden(name)
    is_supervised = record["eval_mask"].bool()
    acceptance = record["accept_rate"].where(is_supervised, torch.zeros(()))
    _, sums = run_golden(load(name), name)
    chain = acceptance.cumprod(-1)
    torch.testing.assert_close(sums.survived, chain.sum((0, 1)), atol=2e-5, rtol=0)
    before = torch.cat((torch.ones_like(chain[..., :1]), chain[..., :-1]), dim=-1)
    reached = (before * is_supervised).sum((0, 1))
    torch.testing.assert_close(sums.reached, reached, atol=2e-5, rtol=0)
    assert sums.count.tolist() == is_supervised.sum((0, 1)).tolist()
    error = (record["confidence_logits"].sigmoid() - acceptance).abs() * is_supervised
    torch.testing.assert_close(sums.confidence_error, error.sum((0, 1)), atol=2e-5, rtol=0)
    tau = 1 + acceptance.cumprod(-1).sum(-1)[is_supervised[..., 0]].mean().item()
    assert sums.metrics()["expected_tau"] == pytest.approx(tau, abs=2e-5)


def test_decay_and_weights_have_an_effect():
    """B144."""
    drafter = load(VANILLA)
    loss, sums = run_golden(drafter, VANILLA)
    other, other_sums = run_golden(drafter, VANILLA, weights=ObjectiveWeights(decay=7.0))
    assert other_sums.weight > sums.weight
    assert other != loss
    ce, ce_sums = run_golden(drafter, VANILLA, weights=ObjectiveWeights(1.0, 0.0, 0.0))
    assert ce.item() == pytest.approx(ce_sums.metrics()["cross_entropy"], rel=1e-5)


def test_the_label_of_the_confidence_carries_no_gradient():
    """B126: raising the confidence term alone must not move the output of the draft head."""
    drafter = load(VANILLA)
    loss, _ = run_golden(drafter, VANILLA, weights=ObjectiveWeights(0.0, 0.0, 1.0))
    loss.backward()
    gradient = drafter.markov_head.markov_w2.weight.grad
    assert gradient is None or not gradient.any()
    assert drafter.confidence_head.proj.weight.grad.any()
    # It does flow into the layers, as in the reference.
    assert drafter.layers[0].mlp.up_proj.weight.grad.any()


def make_gemma4():
    return load(GEMMA4).eval()


def make_sliding():
    drafter = make_drafter(stored=True)
    for layer in drafter.layers:
        layer.self_attn.sliding_window = 3
    return drafter


PATHS = {
    "vanilla": make_drafter,
    "gated": lambda: make_drafter(markov="gated"),
    "rnn": lambda: make_drafter(markov="rnn"),
    "dflash": lambda: make_drafter(markov=None, confidence=False),
    "anchor predicts nothing": lambda: make_drafter(anchor_predicts=False),
    "reduced vocabulary": make_reduced,
    "sliding window": make_sliding,
    "one causal layer": lambda: make_drafter(causal_layers=[1]),
    "gemma4": make_gemma4,
    "one layer tapped, wide block": lambda: make_drafter(block_size=9, taps=(1,)),
}


@pytest.mark.parametrize("case", PATHS)
def test_training_path_equals_drafting_path(case):
    """B128: the same anchor, features and previous tokens give the same logits on both."""
    drafter = PATHS[case]()
    config = drafter.config
    # Both rows repeat what the drafter itself says, so its own path is the teacher-forced one.
    torch.manual_seed(11)
    length, anchors = 14, torch.tensor([[1, 6, 9], [2, 5, 13]])
    features = torch.randn(2, length, drafter.fc.in_features)
    for row in range(2):
        for column, anchor in enumerate(anchors[row].tolist()):
            input_ids = torch.randint(3, config.vocab_size - 1, (2, length + config.block_size))
            context = drafter.new_context(batch_size=1)
            drafter.extend(context, features[row : row + 1, :anchor])
            block = drafter.draft(context, input_ids[row, anchor : anchor + 1])
            input_ids[row, anchor + 1 : anchor + 1 + config.block_size] = block.tokens[0]
            padded = torch.nn.functional.pad(features, (0, 0, 0, config.block_size))
            with torch.no_grad():
                logits, confidence = draft_logits(
                    drafter, padded, input_ids, anchors, torch.ones_like(anchors, dtype=torch.bool)
                )
            wanted = block.logits[0]
            if config.draft_vocab_size is not None:
                wanted = wanted[:, drafter.draft_to_target]
            torch.testing.assert_close(logits[row, column], wanted, atol=1e-5, rtol=1e-5)
            if confidence is not None:
                torch.testing.assert_close(
                    confidence[row, column], block.confidence_logits[0], atol=1e-5, rtol=1e-5
                )


@pytest.mark.parametrize("kernel", ["flash_attention_2", "flex_attention"])
def test_kernels_that_would_ignore_the_mask_are_refused(kernel):
    drafter = make_drafter()
    drafter.config._attn_implementation_internal = kernel
    with pytest.raises(ValueError, match="cannot keep the blocks of many anchors apart"):
        draft_logits(
            drafter,
            torch.randn(1, 6, 2 * HIDDEN),
            torch.arange(6)[None],
            torch.tensor([[3]]),
            torch.tensor([[True]]),
        )


@pytest.mark.parametrize("name", HEADS)
def test_no_gradient_reaches_context_at_or_after_the_anchor(name):
    """B127: by differentiating a block's loss with respect to the features."""
    record, drafter = golden(name), load(name)
    for column in range(record["anchor_positions"].shape[1]):
        features = record["target_features"].clone().requires_grad_()
        keep = record["block_keep_mask"].bool().clone()
        keep[:, [i for i in range(keep.shape[1]) if i != column]] = False
        states = TargetStates(features, record["target_last_hidden"])
        loss, sums = DSparkObjective(drafter)(
            record["input_ids"],
            torch.ones_like(record["input_ids"]),
            record["loss_mask"].bool(),
            states,
            Teacher(states.last_hidden[:0, 0], drafter.lm_head.weight.detach()),
            (record["anchor_positions"], keep),
        )
        if sums.weight == 0:
            continue
        (gradient,) = torch.autograd.grad(loss, features)
        for row, anchor in enumerate(record["anchor_positions"][:, column].tolist()):
            assert not gradient[row, anchor:].any()
            if keep[row, column] and anchor > 0:
                assert gradient[row, :anchor].abs().sum(-1).all()


def test_padding_changes_nothing():
    """The padded row of a batch gives the sums that it gives alone."""
    target, drafter = make_target(), make_drafter(stored=False)
    drafter.bind(target)
    reader, objective = TargetReader(target, [0, 2]), DSparkObjective(drafter)
    long, short = make_prompt(20), make_prompt(12, seed=4)

    def run(input_ids, attention_mask, anchors):
        loss_mask = attention_mask.bool()
        states = reader(input_ids, attention_mask)
        teacher = reader.teacher(states.last_hidden[:0, 0])
        with torch.no_grad():
            return objective(input_ids, attention_mask, loss_mask, states, teacher, anchors)[1]

    places = torch.tensor([[2, 7, 10]])
    kept = torch.ones_like(places, dtype=torch.bool)
    separate = sum(
        run(ids, torch.ones_like(ids), (places, kept)).flatten() for ids in (long, short)
    )
    padded = torch.full_like(long, 55)
    padded[:, :12] = short
    batch = torch.cat((long, padded))
    attention_mask = torch.ones_like(batch)
    attention_mask[1, 12:] = 0
    together = run(batch, attention_mask, (places.expand(2, -1), kept.expand(2, -1))).flatten()
    torch.testing.assert_close(together, separate, atol=1e-5, rtol=1e-5)


def test_a_batch_without_supervised_tokens_has_no_loss():
    drafter = make_drafter()
    ids = make_prompt(8)
    states = TargetStates(torch.randn(1, 8, 2 * HIDDEN), torch.randn(1, 8, HIDDEN))
    loss, sums = DSparkObjective(drafter)(
        ids,
        torch.ones_like(ids),
        torch.zeros_like(ids, dtype=torch.bool),
        states,
        Teacher(states.last_hidden[:0, 0], torch.randn(97, HIDDEN)),
    )
    loss.backward()
    assert loss.item() == 0
    assert all(p.grad is None or not p.grad.any() for p in drafter.parameters())
    assert all(value == value for value in sums.metrics().values())


def test_acceptance_of_a_slot_is_that_of_the_blocks_that_get_there():
    """B154: a block that is lost at once says nothing of the slots behind; τ is their product."""
    acceptance = torch.tensor([[0.9, 0.9, 0.9], [0.1, 0.5, 0.1], [0.6, 0.2, 0.0]])
    is_supervised = torch.tensor([[True] * 3, [True] * 3, [True, True, False]])
    survived, reached = survival(acceptance, is_supervised)
    zero = torch.zeros(())
    count = is_supervised.sum(0)
    metrics = ObjectiveSums(
        zero, zero, zero, zero, survived, reached, torch.zeros(3), count
    ).metrics()
    found = [metrics[f"acceptance_{k}"] for k in (1, 2, 3)]
    assert found == pytest.approx([1.6 / 3, 0.98 / 1.6, 0.734 / 0.86])
    tau = (3 + 1.6 + 0.98 + 0.734) / 3
    assert metrics["expected_tau"] == pytest.approx(tau)


def test_sums_survive_being_flattened():
    _, sums = run_golden(load(VANILLA), VANILLA)
    again = ObjectiveSums.unflatten(sums.flatten())
    assert again.metrics() == pytest.approx(sums.metrics())
    one = ObjectiveSums(*(torch.tensor(float(i)) for i in range(1, 5)), *[torch.ones(1)] * 4)
    assert ObjectiveSums.unflatten(one.flatten()).metrics() == one.metrics()

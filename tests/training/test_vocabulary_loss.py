"""Cross-entropy and total variation in chunks equal the written-out formulas."""

import dataclasses

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dspark_hf.training.vocabulary_loss import DraftHead, Teacher, vocabulary_loss

ROWS, VOCAB, WIDTH, TARGET_WIDTH, RANK = 11, 23, 6, 8, 4
CE, TV = 0.3, 0.7


def problem(
    reduced=False, markov=True, cap=None, teacher_cap=None, scale=1.0, normalised=False, rows=ROWS
):
    """Arguments of `vocabulary_loss` with leaves that want gradients."""
    torch.manual_seed(5)
    ids = torch.randperm(VOCAB)[:9].sort().values if reduced else None
    size = VOCAB if ids is None else len(ids)
    hidden = torch.randn(rows, WIDTH, requires_grad=True)
    latents = torch.randn(rows, RANK, requires_grad=True) if markov else None
    w2 = torch.randn(size, RANK, requires_grad=True) if markov else None
    teacher = Teacher(torch.randn(rows, TARGET_WIDTH), torch.randn(VOCAB, TARGET_WIDTH))
    teacher = dataclasses.replace(teacher, softcapping=teacher_cap, scale=scale)
    if normalised:
        known = teacher_logits(teacher).logsumexp(dim=-1)
        teacher = dataclasses.replace(teacher, log_normaliser=known)
    return {
        "hidden": hidden,
        "latents": latents,
        "markov_w2": w2,
        "head": DraftHead(torch.randn(size, WIDTH), cap, ids),
        "teacher": teacher,
        "labels": torch.randint(VOCAB, (rows,)),
        "weights": torch.rand(rows),
    }


def teacher_logits(teacher):
    logits = teacher.scale * teacher.hidden @ teacher.weight.T
    cap = teacher.softcapping
    return logits if cap is None else cap * torch.tanh(logits / cap)


def naive(hidden, latents, markov_w2, head, teacher, labels, weights):
    """The formulas over the whole vocabulary, differentiated by PyTorch."""
    scores = hidden @ head.weight.T
    if head.softcapping is not None:
        scores = head.softcapping * torch.tanh(scores / head.softcapping)
    if latents is not None:
        scores = scores + latents @ markov_w2.T
    if head.draft_to_target is not None:
        full = scores.new_full((len(scores), VOCAB), -torch.inf)
        scores = full.index_copy(1, head.draft_to_target, scores)
    q, p = scores.softmax(dim=-1), teacher_logits(teacher).softmax(dim=-1)
    ce = functional.cross_entropy(scores, labels, reduction="none")
    ce = torch.where(ce.isinf(), torch.zeros(()), ce)
    tv = (q - p).abs().sum(dim=-1)
    return (weights * (CE * ce + TV * tv)).sum(), (weights * ce).sum(), (weights * tv).sum(), tv


def leaves(arguments):
    names = ("hidden", "latents", "markov_w2")
    return [arguments[name] for name in names if arguments[name] is not None]


CASES = {
    "plain": {},
    "no markov head": {"markov": False},
    "soft cap": {"cap": 2.0, "teacher_cap": 3.0},
    "scaled target": {"scale": 0.25},
    "reduced": {"reduced": True},
    "reduced, no markov head": {"reduced": True, "markov": False},
    "reduced, known normaliser": {"reduced": True, "normalised": True},
    "reduced, capped, known normaliser": {
        "reduced": True,
        "normalised": True,
        "cap": 2.0,
        "teacher_cap": 3.0,
        "scale": 0.5,
    },
    "known normaliser": {"normalised": True},
}


@pytest.mark.parametrize("chunk_rows", [1, 4, ROWS, 100])
@pytest.mark.parametrize("case", CASES)
def test_chunked_equals_naive_with_gradients(case, chunk_rows):
    """B138."""
    arguments = problem(**CASES[case])
    expected, ce, tv, per_row = naive(**arguments)
    result = vocabulary_loss(**arguments, ce_weight=CE, tv_weight=TV, chunk_rows=chunk_rows)
    torch.testing.assert_close(result.loss, expected)
    torch.testing.assert_close(result.cross_entropy, ce)
    torch.testing.assert_close(result.total_variation, tv)
    torch.testing.assert_close(result.acceptance, (1 - per_row / 2).detach())
    assert not result.acceptance.requires_grad
    # A factor behind the loss, as gradient accumulation puts one there.
    wanted = torch.autograd.grad(3 * expected, leaves(arguments))
    for got, want in zip(
        torch.autograd.grad(3 * result.loss, leaves(arguments)), wanted, strict=True
    ):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_a_perfect_drafter_has_no_total_variation():
    arguments = problem(markov=False)
    arguments["teacher"] = Teacher(arguments["hidden"].detach(), arguments["head"].weight)
    result = vocabulary_loss(**arguments, ce_weight=0.0, tv_weight=1.0)
    assert result.loss.item() < 1e-5
    torch.testing.assert_close(result.acceptance, torch.ones(ROWS))


def test_no_rows_give_no_loss_and_no_gradient():
    arguments = problem(rows=0)
    result = vocabulary_loss(**arguments, ce_weight=CE, tv_weight=TV)
    assert result.loss.item() == 0
    gradients = torch.autograd.grad(result.loss, leaves(arguments))
    assert all(bool((gradient == 0).all()) for gradient in gradients)


def test_without_gradients_the_values_are_the_same():
    arguments = problem()
    expected = vocabulary_loss(**arguments, ce_weight=CE, tv_weight=TV)
    with torch.no_grad():
        result = vocabulary_loss(**arguments, ce_weight=CE, tv_weight=TV)
    assert torch.equal(result.loss, expected.loss)
    assert not result.loss.requires_grad


def test_bfloat16_autocast_stays_near_float32():
    arguments = problem(rows=200)
    expected = vocabulary_loss(**arguments, ce_weight=CE, tv_weight=TV)
    with torch.autocast("cpu", torch.bfloat16):
        result = vocabulary_loss(**arguments, ce_weight=CE, tv_weight=TV)
    assert not torch.equal(result.loss, expected.loss)
    torch.testing.assert_close(result.loss, expected.loss, rtol=2e-2, atol=0)
    for got, want in zip(
        torch.autograd.grad(result.loss, leaves(arguments)),
        torch.autograd.grad(expected.loss, leaves(arguments)),
        strict=True,
    ):
        assert got.dtype == torch.float32
        assert (got - want).norm() < 0.03 * want.norm()


class LiveBytes(TorchDispatchMode):
    """Largest tensor that any operation returns, in elements."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.largest = max(self.largest, leaf.untyped_storage().nbytes() // 4)
        return result


def vocabulary_sized_tensors_kept(rows, loss):
    """Elements of what autograd keeps for the backward pass, and the largest intermediate."""
    arguments, kept = problem(rows=rows), []
    with (
        torch.autograd.graph.saved_tensors_hooks(
            lambda x: kept.append(x.numel()) or x, lambda x: x
        ),
        LiveBytes() as live,
    ):
        loss(arguments)
    return sum(kept), live.largest


def test_memory_over_the_vocabulary_does_not_grow_with_the_rows():
    """
    B138: no tensor of (rows, vocabulary) exists and none is kept; the naive version has both.
    """

    def chunked(arguments):
        vocabulary_loss(**arguments, ce_weight=CE, tv_weight=TV, chunk_rows=8)

    kept_few, largest_few = vocabulary_sized_tensors_kept(64, chunked)
    kept, largest = vocabulary_sized_tensors_kept(1024, chunked)
    assert kept == kept_few == 0
    # The gradients of the inputs are all that grows.
    assert largest_few <= 64 * TARGET_WIDTH
    assert largest <= 1024 * TARGET_WIDTH < 1024 * VOCAB
    kept, largest = vocabulary_sized_tensors_kept(1024, lambda arguments: naive(**arguments))
    assert kept > 1024 * VOCAB
    assert largest >= 1024 * VOCAB


def test_autocast_leaves_the_sums_over_the_vocabulary_in_float32():
    """Gradients of a row's logits add up to nothing; a column of ones in the head shows it."""
    arguments = problem(rows=200)
    arguments["head"].weight[:, 0] = 1
    with torch.autocast("cpu", torch.bfloat16):
        result = vocabulary_loss(**arguments, ce_weight=0.0, tv_weight=1.0)
    (gradient,) = torch.autograd.grad(result.loss, [arguments["hidden"]])
    per_row = (gradient / arguments["weights"][:, None]).abs().mean(dim=0)
    assert per_row[0] < 5e-4 < 5e-2 < per_row[1]

"""Training-time test: unrolled like drafting, exact gradients in chunks, and it teaches."""

import pytest
import torch
from torch.nn import functional

from dspark_hf.training.eagle3_objective import eagle3_objective, supervised_steps, unroll
from tiny import HIDDEN, VOCAB, make_eagle3

STEPS = 4
LENGTH = 9


def make_batch(rows=2, length=LENGTH, num_taps=3, seed=0):
    torch.manual_seed(seed)
    ids = torch.randint(3, VOCAB - 1, (rows, length))
    return ids, torch.randn(rows, length, num_taps * HIDDEN), torch.randn(rows, length, HIDDEN)


def make_teacher(seed=0):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(VOCAB, HIDDEN, generator=generator)
    return lambda rows: rows @ weight.T


def follow(path):
    """A processor that lets nothing but the given text through."""

    def processor(input_ids, scores):
        forced = torch.full_like(scores, -torch.inf)
        forced[:, path[input_ids.shape[1]]] = 0.0
        return forced

    return processor


# -- the unrolled path -----------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_every_unrolled_step_equals_drafting_at_that_place(attention):
    """Every anchor of the sequence, every step: the same hidden states as the drafting calls."""
    drafter = make_eagle3(attn_implementation=attention)
    ids, features, _ = make_batch()
    with torch.no_grad():
        hidden = unroll(drafter, drafter.embed_tokens, ids, features, STEPS)
    assert hidden.shape == (2, LENGTH, STEPS, HIDDEN)
    for row in range(2):
        context = drafter.new_context(1)
        for t in range(LENGTH - 1 - STEPS):
            drafter.extend(
                context, features[row : row + 1, t : t + 1], ids[row : row + 1, t + 1 : t + 2]
            )
            block = drafter.draft(
                context,
                ids[row : row + 1, t + 1],
                logits_processor=follow(ids[row]),
                input_ids=ids[row : row + 1, : t + 2],
            )
            assert torch.equal(block.tokens[0], ids[row, t + 2 : t + 2 + STEPS])
            torch.testing.assert_close(block.hidden_states[0], hidden[row, t], atol=1e-5, rtol=0)


def test_padding_on_the_right_changes_nothing_before_it():
    drafter = make_eagle3()
    ids, features, _ = make_batch()
    padded = functional.pad(ids, (0, 3)), functional.pad(features, (0, 0, 0, 3), value=7.0)
    with torch.no_grad():
        short = unroll(drafter, drafter.embed_tokens, ids, features, 1)
        long = unroll(drafter, drafter.embed_tokens, *padded, 1)
    torch.testing.assert_close(long[:, : LENGTH - 1], short[:, : LENGTH - 1])


def test_supervised_steps_by_hand():
    """Anchor and every token up to the predicted one are the target's own."""
    mask = torch.tensor([[1, 1, 1, 0, 1, 1, 1, 1]])
    got = supervised_steps(mask, 3)[0]
    expected = {
        # Positions of the teacher: 1 predicts token 2, whose anchor is 1. Token 1 would have
        # anchor 0, before which there are no features.
        0: [1, 4, 5, 6],
        1: [5, 6],
        2: [6],
    }
    for step, positions in expected.items():
        assert got[:, step].nonzero().flatten().tolist() == positions


# -- the loss --------------------------------------------------------------------------------------


def naive(drafter, ids, mask, features, last_hidden, teacher, steps, decay):
    """Everything written out, row by row."""
    hidden = unroll(drafter, drafter.embed_tokens, ids, features, steps)
    token_ids = drafter.draft_to_target if drafter.config.draft_vocab_size else slice(None)
    loss = torch.zeros(())
    acceptance = [[] for _ in range(steps)]
    agreement = [[] for _ in range(steps)]
    tokens, blocks = 0.0, 0
    for row in range(ids.shape[0]):
        for t in range(ids.shape[1]):
            survival = 1.0
            for k in range(steps):
                if t + 2 + k >= ids.shape[1] or not mask[row, t + 1 : t + 3 + k].all():
                    break
                logits = drafter._base_logits(_Heads(drafter), hidden[row, t, k])
                p = teacher(last_hidden[row, t + 1 + k]).softmax(-1)
                goal = p[token_ids] / p[token_ids].sum()
                loss = loss - decay**k * (goal * logits.log_softmax(-1)).sum()
                q = torch.zeros(VOCAB)
                q[token_ids] = logits.softmax(-1).detach()
                acceptance[k].append(torch.minimum(p, q).sum())
                agreement[k].append(float(p.argmax() == q.argmax()))
                survival *= acceptance[k][-1]
                tokens += survival
                blocks += k == 0
    means = torch.tensor([sum(values) / len(values) for values in acceptance])
    agreed = torch.tensor([sum(values) / len(values) for values in agreement])
    return loss / ids.numel(), means, agreed, 1 + tokens / blocks


class _Heads:
    def __init__(self, drafter):
        self.output_embeddings = drafter.get_output_embeddings()


@pytest.mark.parametrize("chunk_rows", [1, 12, 1000])
@pytest.mark.parametrize(
    "options", [{}, {"final_logit_softcapping": 3.0}, {"draft_vocab_size": 30}], ids=str
)
def test_loss_gradients_and_metrics_equal_the_naive_ones(options, chunk_rows):
    drafter = make_eagle3(**options).requires_grad_(True)
    if drafter.config.draft_vocab_size:
        drafter.draft_to_target.copy_(torch.arange(30) * 3)
    ids, features, last_hidden = make_batch()
    mask = torch.ones_like(ids)
    mask[0, 4] = mask[1, :2] = 0
    teacher = make_teacher()
    expected, acceptance, agreement, tau = naive(
        drafter, ids, mask, features, last_hidden, teacher, STEPS, 0.8
    )
    expected.backward()
    wanted = {name: p.grad.clone() for name, p in drafter.named_parameters() if p.grad is not None}
    drafter.zero_grad()
    loss, metrics = eagle3_objective(
        drafter, ids, mask, features, last_hidden, teacher, chunk_rows=chunk_rows
    )
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(metrics["acceptance"], acceptance)
    torch.testing.assert_close(metrics["agreement"], agreement)
    torch.testing.assert_close(metrics["accepted_length"], torch.as_tensor(tau))
    loss.backward()
    got = {name: p.grad for name, p in drafter.named_parameters() if p.grad is not None}
    assert wanted.keys() == got.keys()
    assert "lm_head.weight" in got
    for name, grad in wanted.items():
        torch.testing.assert_close(got[name], grad, atol=1e-6, rtol=1e-4, msg=name)

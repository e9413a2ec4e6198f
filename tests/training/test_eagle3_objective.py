"""Training-time test: unrolled like drafting, exact gradients in chunks, and it teaches."""

import pytest
import torch
from torch.nn import functional

from dspark_hf import collect_statistics
from dspark_hf.generation.taps import TargetTaps
from dspark_hf.training.eagle3_objective import eagle3_objective, supervised_steps, unroll
from tiny import HIDDEN, VOCAB, make_eagle3, make_prompt, make_target

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


@pytest.mark.parametrize(
    "options",
    [
        {"attn_implementation": "sdpa"},
        {"attn_implementation": "eager"},
        {"recycles_normed_output": True},
        {"feature_norm": "per_tap", "norm_before_residual": True},
    ],
    ids=str,
)
def test_every_unrolled_step_equals_drafting_at_that_place(options):
    """Every anchor of the sequence, every step: the same hidden states as the drafting calls."""
    drafter = make_eagle3(**options)
    ids, features, _ = make_batch()
    with torch.no_grad():
        hidden = unroll(drafter, drafter.new_context(2), ids, features, STEPS)
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
        short = unroll(drafter, drafter.new_context(2), ids, features, 1)
        long = unroll(drafter, drafter.new_context(2), *padded, 1)
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
    hidden = unroll(drafter, drafter.new_context(len(ids)), ids, features, steps)
    token_ids = drafter.draft_to_target if drafter.config.draft_vocab_size else slice(None)
    cap = drafter.config.final_logit_softcapping
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
                logits = drafter.lm_head(hidden[row, t, k])
                if cap is not None:
                    logits = cap * torch.tanh(logits / cap)
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
    return loss, means, agreed, 1 + tokens / blocks


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
    torch.testing.assert_close(metrics["weight"], metrics["count"] @ 0.8 ** torch.arange(STEPS))
    torch.testing.assert_close(metrics["acceptance"], acceptance)
    torch.testing.assert_close(metrics["agreement"], agreement)
    torch.testing.assert_close(metrics["accepted_length"], torch.as_tensor(tau))
    loss.backward()
    got = {name: p.grad for name, p in drafter.named_parameters() if p.grad is not None}
    assert wanted.keys() == got.keys()
    assert "lm_head.weight" in got
    for name, grad in wanted.items():
        torch.testing.assert_close(got[name], grad, atol=1e-6, rtol=1e-4, msg=name)


def test_a_frozen_head_and_a_pass_without_gradients():
    """The head stays as it is, and evaluation leaves no graph."""
    drafter = make_eagle3()
    drafter.lm_head.requires_grad_(False)
    ids, features, last_hidden = make_batch()
    batch = (ids, torch.ones_like(ids), features, last_hidden, make_teacher())
    loss, metrics = eagle3_objective(drafter, *batch)
    loss.backward()
    assert drafter.lm_head.weight.grad is None
    assert drafter.fc.weight.grad.abs().sum() > 0
    assert not any(value.requires_grad for value in metrics.values())
    with torch.no_grad():
        again, _ = eagle3_objective(drafter, *batch)
    assert not again.requires_grad
    torch.testing.assert_close(again, loss.detach())


def test_bfloat16_autocast_is_close():
    """What the trainer runs on a CPU and a GPU: the same loss and gradients up to rounding."""
    drafter = make_eagle3()
    ids, features, last_hidden = make_batch()
    batch = (ids, torch.ones_like(ids), features, last_hidden, make_teacher())
    expected, _ = eagle3_objective(drafter, *batch)
    expected.backward()
    wanted = drafter.fc.weight.grad.clone()
    drafter.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = eagle3_objective(drafter, *batch)
    loss.backward()
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=0.02)
    cosine = functional.cosine_similarity(drafter.fc.weight.grad.flatten(), wanted.flatten(), 0)
    assert cosine > 0.99


def test_a_drafter_that_is_the_teacher_is_always_accepted():
    """Perfect drafts: acceptance 1 at every step, τ = K + 1 where K steps fit."""
    drafter = make_eagle3()
    ids, features, last_hidden = make_batch(rows=1)
    drafter.lm_head.weight.data.zero_()
    mask = torch.ones_like(ids)
    mask[0, 7:] = 0
    _, metrics = eagle3_objective(
        drafter, ids, mask, features, last_hidden, lambda rows: torch.zeros(len(rows), VOCAB)
    )
    torch.testing.assert_close(metrics["acceptance"], torch.ones(STEPS))
    assert metrics["count"].tolist() == [5, 4, 3, 2]
    torch.testing.assert_close(metrics["accepted_length"], torch.tensor(1 + 14 / 5))


def test_agreement_is_about_the_targets_tokens():
    """B082: the row of a reduced head is not the token's id."""
    drafter = make_eagle3(draft_vocab_size=20)
    drafter.draft_to_target.copy_(torch.arange(20) * 3 + 5)
    # All rows alike, so the first one is the argmax: token 5.
    drafter.lm_head.weight.data.zero_()
    ids, features, last_hidden = make_batch()
    for token, agreement in ((5, 1.0), (0, 0.0)):
        _, metrics = eagle3_objective(
            drafter,
            ids,
            torch.ones_like(ids),
            features,
            last_hidden,
            lambda rows, token=token: functional.one_hot(rows[:, 0].long() * 0 + token, VOCAB),
        )
        assert metrics["agreement"].tolist() == [agreement] * STEPS


def test_nothing_to_learn():
    """A batch without supervised tokens is worth zero, and harmless."""
    drafter = make_eagle3()
    ids, features, last_hidden = make_batch()
    loss, metrics = eagle3_objective(
        drafter, ids, torch.zeros_like(ids), features, last_hidden, make_teacher()
    )
    loss.backward()
    assert loss == 0
    assert metrics["count"].sum() == 0
    assert all(value.isfinite().all() for value in metrics.values())
    assert drafter.fc.weight.grad.abs().sum() == 0


def test_logits_of_the_full_vocabulary_exist_for_one_chunk_at_a_time():
    """The teacher is asked about few rows at once, and about each position once."""
    drafter, teacher, asked = make_eagle3(), make_teacher(), []
    ids, features, last_hidden = make_batch()

    def recording(rows):
        asked.append(len(rows))
        return teacher(rows)

    eagle3_objective(
        drafter, ids, torch.ones_like(ids), features, last_hidden, recording, chunk_rows=15
    )
    # Three positions with their four steps make 15 rows; seven positions a sequence are learned.
    assert asked == [3, 3, 3, 3, 2]


def test_bad_input():
    """B111: what was found, what was expected."""
    drafter = make_eagle3()
    ids, features, last_hidden = make_batch()
    mask, teacher = torch.ones_like(ids), make_teacher()
    with pytest.raises(ValueError, match=r"features covers \(2, 8\) positions .*\(2, 9\)"):
        eagle3_objective(drafter, ids, mask, features[:, 1:], last_hidden, teacher)
    with pytest.raises(ValueError, match="ttt_length must be at least 1, found 0"):
        eagle3_objective(drafter, ids, mask, features, last_hidden, teacher, ttt_length=0)
    drafter.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="'flash_attention_2', which takes no mask"):
        eagle3_objective(drafter, ids, mask, features, last_hidden, teacher)
    bound = make_eagle3(stored=False)
    bound.bind(
        input_embeddings=torch.nn.Embedding(VOCAB, HIDDEN), output_embeddings=torch.nn.Identity()
    )
    with pytest.raises(ValueError, match=r"head \(Identity\) has no plain weight"):
        eagle3_objective(bound, ids, mask, features, last_hidden, teacher)


# -- it teaches ------------------------------------------------------------------------------------


def test_training_raises_acceptance():
    """From random weights to a drafter that the target follows, in the decoding loop."""
    size = 24
    target = make_target(vocab_size=size, initializer_range=0.2).requires_grad_(False)
    drafter = make_eagle3(vocab_size=size, stored=False).bind(target)

    def accepted_length():
        torch.manual_seed(1)
        with collect_statistics() as statistics:
            target.generate(
                make_prompt(vocab_size=size, seed=100),
                max_new_tokens=150,
                do_sample=True,
                top_k=0,
                assistant_model=drafter,
            )
        return statistics.accepted_length

    before = accepted_length()
    torch.manual_seed(0)
    prompts = torch.randint(3, size - 1, (96, 3))
    ids = target.generate(prompts, max_new_tokens=21, do_sample=True, top_k=0)
    with torch.no_grad(), TargetTaps(target, drafter.config.target_layer_ids) as taps:
        last_hidden = target.model(ids).last_hidden_state
        features = taps.take()
    mask = torch.ones_like(ids)
    mask[:, :3] = 0
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=4e-3)
    for step in range(150):
        rows = slice(step * 8 % 96, step * 8 % 96 + 8)
        loss, metrics = eagle3_objective(
            drafter, ids[rows], mask[rows], features[rows], last_hidden[rows], target.lm_head
        )
        (loss / metrics["weight"]).backward()
        optimizer.step()
        optimizer.zero_grad()
    after = accepted_length()
    assert after > before + 1, (before, after)

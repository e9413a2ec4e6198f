"""Acceptance has a gate of its own: the text is right even if every draft is wrong."""

import copy

import pytest
import torch

from dspark_hf import collect_statistics
from tiny import VOCAB, make_drafter, make_prompt, make_target

PROMPT = make_prompt(6)


def memoryless_pair(block_size=4):
    """
    A target whose next token depends on the last one only, and the drafter that knows its table.

    All of the drafter's knowledge sits in the Markov head: one wrong "previous token" anywhere in
    the loop shows as lost acceptance.
    """
    target = make_target("qwen3")
    with torch.no_grad():
        for layer in target.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        table = target(torch.arange(VOCAB)[:, None]).logits[:, 0]
    drafter = make_drafter(block_size=block_size, confidence=False)
    drafter.config.markov_rank = VOCAB
    drafter.markov_head = type(drafter.markov_head)(drafter.config)
    with torch.no_grad():
        drafter.lm_head.weight.zero_()
        drafter.markov_head.markov_w1.weight.copy_(torch.eye(VOCAB))
        drafter.markov_head.markov_w2.weight.copy_(table.T)
    return target, drafter


@pytest.mark.parametrize("block_size", [1, 4, 7])
@pytest.mark.parametrize("do_sample", [False, True])
def test_a_drafter_that_knows_the_target_is_always_right(block_size, do_sample):
    """B102: τ = γ + 1, greedy and sampled (p = q, so min(1, p / q) = 1)."""
    target, drafter = memoryless_pair(block_size)
    new_tokens = 1 + 3 * (block_size + 1)
    options = {"max_new_tokens": new_tokens, "do_sample": do_sample}
    with collect_statistics() as statistics:
        output = target.generate(PROMPT, assistant_model=drafter, **options)
    if not do_sample:
        assert torch.equal(output, target.generate(PROMPT, **options))
    assert statistics.rounds == 3
    assert statistics.accepted_length == block_size + 1


def test_processors_keep_a_right_drafter_right():
    """B024, B102: penalties act on the drafted path as they will act on the verified one."""
    target, drafter = memoryless_pair()
    options = {"max_new_tokens": 16, "do_sample": False, "repetition_penalty": 1.8}
    with collect_statistics() as statistics:
        output = target.generate(PROMPT, assistant_model=drafter, **options)
    assert torch.equal(output, target.generate(PROMPT, **options))
    assert statistics.accepted_length == 5


def test_a_changed_target_lowers_acceptance_and_nothing_else():
    """B093: noise on the target after the drafter was made."""
    target, drafter = memoryless_pair()
    changed = copy.deepcopy(target)
    torch.manual_seed(1)
    with torch.no_grad():
        changed.lm_head.weight.add_(torch.randn_like(changed.lm_head.weight), alpha=0.3)
    lengths = {}
    for name, model in (("own", target), ("changed", changed)):
        options = {"max_new_tokens": 31, "do_sample": False}
        with collect_statistics() as statistics:
            output = model.generate(PROMPT, assistant_model=drafter, **options)
        assert torch.equal(output, model.generate(PROMPT, **options))
        lengths[name] = statistics.accepted_length
    assert lengths["own"] == 5
    assert 1 <= lengths["changed"] < 5


def test_ties_fall_as_in_plain_decoding():
    """B013: two identical head rows, at the first token and inside a block."""
    target = make_target("qwen3")
    options = {"max_new_tokens": 20, "do_sample": False}
    first, later = target.generate(PROMPT, **options)[0, [6, 9]].tolist()
    with torch.no_grad():
        for token in (first, later):
            target.lm_head.weight[(token + 30) % VOCAB] = target.lm_head.weight[token]
    drafter = make_drafter()
    assert torch.equal(
        target.generate(PROMPT, assistant_model=drafter, **options),
        target.generate(PROMPT, **options),
    )


def test_right_padding_is_no_context():
    """B064: text as plain decoding gives it, and the drafter reads the text's features only."""
    target, drafter = make_target("qwen3"), make_drafter()
    padded = torch.nn.functional.pad(PROMPT, (0, 2), value=0)
    mask = torch.nn.functional.pad(torch.ones_like(PROMPT), (0, 2))
    draft, lengths = drafter.draft, []

    def recording(context, *args, **kwargs):
        lengths.append(context.position)
        return draft(context, *args, **kwargs)

    drafter.draft = recording
    options = {"max_new_tokens": 8, "do_sample": False, "attention_mask": mask}
    output = target.generate(padded, assistant_model=drafter, **options)
    assert torch.equal(output, target.generate(padded, **options))
    assert lengths[0] == PROMPT.shape[1]

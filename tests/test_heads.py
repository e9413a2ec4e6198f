"""The sequential stage and the confidence head: equations, agreement of their two forms, inputs."""

import pytest
import torch

from dspark_hf import DSparkDrafter
from tiny import HIDDEN, make_drafter

HEADS = ("vanilla", "gated", "rnn")


def inputs(rows=2, length=5):
    return torch.randint(0, 97, (rows, length)), torch.randn(rows, length, HIDDEN)


@pytest.mark.parametrize("kind", HEADS)
def test_step_and_block_agree(kind):
    """B128: drafting and teacher-forced training see the same biases."""
    head = make_drafter(markov=kind).markov_head
    previous, hidden = inputs()
    state, steps = None, []
    for k in range(previous.shape[1]):
        bias, state = head.step(previous[:, k], hidden[:, k], state)
        steps.append(bias)
    torch.testing.assert_close(
        torch.stack(steps, 1), head.block(previous, hidden), atol=1e-5, rtol=0
    )


def test_vanilla_bias_is_the_product_of_two_matrices():
    """Equation 5, and nothing but the previous token matters."""
    head = make_drafter(markov="vanilla").markov_head
    previous, hidden = inputs()
    expected = head.markov_w1.weight[previous] @ head.markov_w2.weight.T
    torch.testing.assert_close(head.block(previous, hidden), expected)
    torch.testing.assert_close(head.block(previous, -hidden), expected)


def test_gate_reads_hidden_first():
    """σ(G [h ; e]) ⊙ e, in this order."""
    head = make_drafter(markov="gated").markov_head
    previous, hidden = inputs()
    embedded = head.embed(previous)
    weight = head.gate_proj.weight
    gate = torch.sigmoid(
        hidden @ weight[:, :HIDDEN].T + embedded @ weight[:, HIDDEN:].T + head.gate_proj.bias
    )
    torch.testing.assert_close(head.block(previous, hidden), head.markov_w2(gate * embedded))


def test_rnn_state_starts_at_zero_in_every_block():
    """Equation 6, written out for two steps; the output reads z and not the new state."""
    head = make_drafter(markov="rnn").markov_head
    previous, hidden = inputs(rows=1, length=2)
    state = torch.zeros(1, 8)
    for k in range(2):
        z = torch.cat((state, head.embed(previous[:, k]), hidden[:, k]), dim=-1)
        gate, candidate, output = head.joint_proj(z).chunk(3, dim=-1)
        bias = head.markov_w2(torch.tanh(output))
        torch.testing.assert_close(head.block(previous, hidden)[:, k], bias)
        state = torch.sigmoid(gate) * state + (1 - torch.sigmoid(gate)) * torch.tanh(candidate)
    first = head.block(previous, hidden)
    assert torch.equal(first, head.block(previous, hidden))


def test_confidence_reads_hidden_first_and_the_token_before():
    """Equation 7; in float32 whatever the weights are."""
    drafter = make_drafter()
    head, (previous, hidden) = drafter.confidence_head, inputs()
    embedded = drafter.markov_head.embed(previous)
    weight = head.proj.weight[0]
    expected = hidden @ weight[:HIDDEN] + embedded @ weight[HIDDEN:] + head.proj.bias
    torch.testing.assert_close(head(hidden, embedded), expected)
    assert head.bfloat16()(hidden.bfloat16(), embedded.bfloat16()).dtype == torch.float32


@pytest.mark.parametrize("with_markov", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_four_confidence_heads_survive_saving(with_markov, bias, tmp_path):
    """B115: with and without Markov input, with and without bias."""
    from dspark_hf import DSparkConfig

    config = make_drafter().config.to_dict()
    config |= {"confidence_head_with_markov": with_markov, "confidence_head_bias": bias}
    drafter = DSparkDrafter(DSparkConfig.from_dict(config)).eval()
    assert drafter.confidence_head.proj.in_features == HIDDEN + 8 * with_markov
    drafter.save_pretrained(tmp_path)
    loaded = DSparkDrafter.from_pretrained(tmp_path)
    features, anchor = torch.randn(1, 6, 64), torch.tensor([7])
    expected = drafter(features, anchor).confidence_logits
    assert torch.equal(loaded(features, anchor).confidence_logits, expected)


def test_confidence_of_a_position_ignores_its_own_token():
    """B021: c_k is fixed before token k is drawn."""
    drafter = make_drafter()
    features, anchor = torch.randn(1, 6, 64), torch.tensor([7])
    seen = {}
    for seed in range(30):
        torch.manual_seed(seed)
        block = drafter(features, anchor, do_sample=True)
        for k in range(4):
            key = (k, tuple(block.tokens[0, :k].tolist()))
            value = float(block.confidence_logits[0, k])
            assert seen.setdefault(key, value) == pytest.approx(value, abs=1e-5)
    assert len(seen) > 10


@pytest.mark.parametrize("kind", HEADS)
def test_blocks_take_further_leading_axes(kind):
    """B128: training has an anchor axis; each anchor's block is its own."""
    head = make_drafter(markov=kind).markov_head
    previous, hidden = torch.randint(0, 97, (2, 3, 5)), torch.randn(2, 3, 5, HIDDEN)
    biases = head.block(previous, hidden)
    assert biases.shape == (2, 3, 5, 97)
    torch.testing.assert_close(biases[1, 2], head.block(previous[1, 2], hidden[1, 2]))


@pytest.mark.parametrize("kind", HEADS)
def test_the_drafted_path_is_what_the_heads_were_fed(kind):
    """B081, B096: position k reads the token drafted at k - 1, the anchor at first; no state stays
    from block to block."""
    drafter = make_drafter(markov=kind)
    features, anchor = torch.randn(1, 6, 64), torch.tensor([5])
    block = drafter(features, anchor)
    previous = torch.cat((anchor[:, None], block.tokens[:, :-1]), dim=1)
    bias = drafter.markov_head.block(previous, block.hidden_states)
    torch.testing.assert_close(block.logits, block.base_logits + bias)
    confidence = drafter.confidence_head(block.hidden_states, drafter.markov_head.embed(previous))
    torch.testing.assert_close(block.confidence_logits, confidence)
    assert torch.equal(drafter(features, anchor).logits, block.logits)


def test_without_heads_the_logits_are_the_base_logits():
    """B114, B117: DFlash has neither head, and that is no error."""
    drafter = make_drafter(markov=None, confidence=False)
    block = drafter(torch.randn(1, 6, 64), torch.tensor([5]))
    assert drafter.markov_head is None
    assert block.confidence_logits is None
    assert torch.equal(block.logits, block.base_logits)

"""The sequential stage and the confidence head."""

import pytest
import torch
from transformers import LogitsProcessorList

from dspark_hf import DSparkDrafter
from dspark_hf.heads import ConfidenceHead, build_markov_head
from tiny import make_drafter

TYPES = ("vanilla", "gated", "rnn")
ROWS, BLOCK, HIDDEN, VOCAB = 3, 5, 32, 97


def make_head(kind):
    torch.manual_seed(0)
    head = build_markov_head(make_drafter(markov=kind).config)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter)
    return head


def inputs(*shape):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCAB, shape, generator=generator)
    return ids, torch.randn(*shape, HIDDEN, generator=generator)


@pytest.mark.parametrize("kind", TYPES)
def test_steps_along_a_block_equal_the_block(kind):
    """B128: drafting one position at a time is what teacher-forced training computes."""
    head = make_head(kind)
    ids, hidden = inputs(ROWS, BLOCK)
    biases, state = [], None
    for k in range(BLOCK):
        bias, state = head.step(ids[:, k], hidden[:, k], state)
        assert bias.shape == (ROWS, VOCAB)
        biases.append(bias)
    torch.testing.assert_close(torch.stack(biases, dim=1), head.block(ids, hidden))


@pytest.mark.parametrize("kind", TYPES)
def test_blocks_take_further_leading_axes(kind):
    """B128: training has an anchor axis; each anchor's block is its own."""
    head = make_head(kind)
    ids, hidden = inputs(2, 3, BLOCK)
    biases = head.block(ids, hidden)
    assert biases.shape == (2, 3, BLOCK, VOCAB)
    torch.testing.assert_close(biases[1, 2], head.block(ids[1, 2], hidden[1, 2]))


def test_the_vanilla_bias_is_a_product_of_two_matrices():
    """Equation 5: one row of W1 times W2, and nothing of the hidden states."""
    head = make_head("vanilla")
    ids, hidden = inputs(ROWS, BLOCK)
    expected = head.markov_w1.weight[ids] @ head.markov_w2.weight.T
    torch.testing.assert_close(head.block(ids, hidden), expected)
    assert torch.equal(head.block(ids, hidden), head.block(ids, hidden + 1))


def test_the_gate_reads_the_hidden_state_first():
    """`B = W2 (σ(G [h ; e]) ⊙ e)`, hidden before embedding."""
    head = make_head("gated")
    ids, hidden = inputs(ROWS)
    embedded = head.markov_w1.weight[ids]
    weight, bias = head.gate_proj.weight, head.gate_proj.bias
    gate = hidden @ weight[:, :HIDDEN].T + embedded @ weight[:, HIDDEN:].T + bias
    expected = (gate.sigmoid() * embedded) @ head.markov_w2.weight.T
    torch.testing.assert_close(head.block(ids, hidden), expected)


def test_the_recurrent_state_follows_equation_6():
    """Chunks are gate, candidate, output; the input is state, embedding, hidden; s starts at 0."""
    head = make_head("rnn")
    ids, hidden = inputs(ROWS, BLOCK)
    state, expected = torch.zeros(ROWS, 8), []
    for k in range(BLOCK):
        embedded = head.markov_w1.weight[ids[:, k]]
        joint = torch.cat((state, embedded, hidden[:, k]), dim=-1)
        gate, candidate, output = (joint @ head.joint_proj.weight.T + head.joint_proj.bias).chunk(
            3, dim=-1
        )
        state = gate.sigmoid() * state + (1 - gate.sigmoid()) * candidate.tanh()
        expected.append(output.tanh() @ head.markov_w2.weight.T)
    torch.testing.assert_close(head.block(ids, hidden), torch.stack(expected, dim=1))


def test_the_recurrent_state_starts_anew_in_every_block():
    """No state leaks from block to block, and it does matter inside one (B096)."""
    head = make_head("rnn")
    ids, hidden = inputs(ROWS, BLOCK)
    first = head.block(ids, hidden)
    assert torch.equal(first, head.block(ids, hidden))
    anew, _ = head.step(ids[:, 1], hidden[:, 1], None)
    assert (anew - first[:, 1]).abs().max() > 1e-2
    drafter = make_drafter(markov="rnn")
    features = torch.randn(1, 6, 64)
    blocks = [drafter(features, torch.tensor([5])) for _ in range(2)]
    assert torch.equal(blocks[0].logits, blocks[1].logits)


@pytest.mark.parametrize("kind", TYPES)
def test_the_drafted_path_is_what_the_head_was_fed(kind):
    """B081: the previous token of position k is the token drafted at k - 1, the anchor at first."""
    drafter = make_drafter(markov=kind)
    anchor = torch.tensor([5])
    block = drafter(torch.randn(1, 6, 64), anchor)
    previous = torch.cat((anchor[:, None], block.tokens[:, :-1]), dim=1)
    bias = drafter.markov_head.block(previous, block.hidden_states)
    torch.testing.assert_close(block.logits, block.base_logits + bias)
    confidence = drafter.confidence_head(block.hidden_states, drafter.markov_head.embed(previous))
    torch.testing.assert_close(block.confidence_logits, confidence)


def test_without_a_markov_head_the_logits_are_the_base_logits():
    """B114, B117: DFlash has neither head, and that is no error."""
    drafter = make_drafter(markov=None, confidence=False)
    block = drafter(torch.randn(1, 6, 64), torch.tensor([5]))
    assert drafter.markov_head is None
    assert block.confidence_logits is None
    assert torch.equal(block.logits, block.base_logits)


def test_confidence_features_are_hidden_first():
    """B115: hidden states in front of the Markov embedding."""
    head = ConfidenceHead(make_drafter().config)
    _, hidden = inputs(ROWS, BLOCK)
    embedded = torch.randn(ROWS, BLOCK, 8)
    weight, bias = head.proj.weight[0], head.proj.bias
    expected = hidden @ weight[:HIDDEN] + embedded @ weight[HIDDEN:] + bias
    found = head(hidden, embedded)
    assert found.shape == (ROWS, BLOCK)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("with_markov", [True, False])
def test_every_confidence_head_survives_saving(tmp_path, with_markov, bias):
    """B115: four variants, exact keys, exact values."""
    drafter = make_drafter(confidence_head_bias=bias)
    config = drafter.config
    config.confidence_head_with_markov = with_markov
    drafter = DSparkDrafter(config)
    drafter.save_pretrained(tmp_path)
    loaded, info = DSparkDrafter.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    shape = (1, HIDDEN + 8) if with_markov else (1, HIDDEN)
    assert loaded.confidence_head.proj.weight.shape == shape
    assert (loaded.confidence_head.proj.bias is not None) == bias
    features, anchor = torch.randn(1, 6, 64), torch.tensor([5])
    expected = drafter(features, anchor).confidence_logits
    assert torch.equal(loaded(features, anchor).confidence_logits, expected)


def test_confidence_logits_are_float32_in_any_dtype():
    """B115."""
    block = make_drafter().bfloat16()(torch.randn(1, 6, 64), torch.tensor([5]))
    assert block.confidence_logits.dtype == torch.float32


def test_the_confidence_head_never_sees_the_drafted_token():
    """B021: position k's confidence is the same whatever is drafted at k."""
    drafter = make_drafter()
    features, anchor = torch.randn(1, 6, 64), torch.tensor([5])
    expected = drafter(features, anchor)

    class Forbid:
        def __call__(self, input_ids, scores):
            scores[:, expected.tokens[0, -1]] = -torch.inf
            return scores

    context = drafter.new_context(batch_size=1)
    drafter.extend(context, features)
    block = drafter.draft(context, anchor, logits_processor=LogitsProcessorList([Forbid()]))
    assert block.tokens[0, -1] != expected.tokens[0, -1]
    same = (block.tokens == expected.tokens).long().cumprod(dim=1).sum()
    # Confidence k reads tokens up to k - 1.
    found, wanted = block.confidence_logits[0], expected.confidence_logits[0]
    assert torch.equal(found[: same + 1], wanted[: same + 1])

"""Eagle3 drafters compute what an independent reference computed from the same weights."""

import functools

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional

from checkpoints import EAGLE3, GOLDEN
from dspark_hf import Eagle3Config, Eagle3Drafter
from dspark_hf.backbones import dense, eagle3
from dspark_hf.modeling_drafter import DrafterModel
from tiny import make_eagle3

TOLERANCE = 2e-5
# What a wrong computation must differ by, at the least.
CLEARLY = 1e-3
ROUNDS = ("prefill", "update")
TOKENS = {"prefill": "prefill.shifted_input_ids", "update": "update.committed_tokens"}


@functools.cache
def golden():
    return load_file(GOLDEN / EAGLE3 / "golden.safetensors")


def load(**options):
    return Eagle3Drafter.from_pretrained(GOLDEN / EAGLE3, **options).eval()


def run_rounds(drafter, shift=0, edit=lambda features: features, rows=1):
    """The blocks of both rounds; token ids may be shifted against their features."""
    record, context, blocks = golden(), drafter.new_context(batch_size=rows), []
    for number, name in enumerate(ROUNDS, start=1):
        ids = record[TOKENS[name]].view(1, -1)
        features = edit(record[f"{name}.context_features"]).expand(rows, -1, -1)
        drafter.extend(context, features, token_ids=ids.roll(shift, dims=1).expand(rows, -1))
        assert context.lengths.tolist() == [int(record[f"round{number}.start_position"])] * rows
        blocks.append(drafter.draft(context, ids[:, -1].expand(rows)))
    return blocks


def assert_changed(blocks):
    record = golden()
    for number, block in enumerate(blocks, start=1):
        difference = (block.logits - record[f"round{number}.draft_logits"]).abs().max()
        assert difference > CLEARLY, (number, difference)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("rows", [1, 2])
def test_every_round_equals_the_reference(attention, rows):
    """B050, B051, B055: logits, tokens and the state that drafting starts from."""
    record, drafter = golden(), load(attn_implementation=attention)
    for number, block in enumerate(run_rounds(drafter, rows=rows), start=1):
        expected = record[f"round{number}.draft_logits"].expand(rows, -1, -1)
        torch.testing.assert_close(block.logits, expected, atol=TOLERANCE, rtol=0)
        torch.testing.assert_close(block.base_logits, expected, atol=TOLERANCE, rtol=0)
        for tokens in block.tokens:
            assert torch.equal(tokens, record[f"round{number}.greedy_tokens"][0])
        with torch.no_grad():
            first = drafter.norm(record[f"{ROUNDS[number - 1]}.last_hidden"])
        torch.testing.assert_close(block.hidden_states[:1, :1], first, atol=TOLERANCE, rtol=0)
        assert block.confidence_logits is None


def test_positions_one_by_one_equal_positions_at_once():
    """B050: the context does not depend on how rounds were cut."""
    record, drafter = golden(), load()
    features, ids = record["prefill.context_features"], record["prefill.shifted_input_ids"]
    context = drafter.new_context(batch_size=1)
    for t in range(features.shape[1]):
        drafter.extend(context, features[:, t : t + 1], token_ids=ids[:, t : t + 1])
        # No new positions: nothing happens.
        drafter.extend(context, features[:, :0], token_ids=ids[:, :0])
        # A drafted block leaves nothing behind.
        drafter.draft(context, ids[:, t])
    block = drafter.draft(context, ids[:, -1])
    torch.testing.assert_close(block.logits, record["round1.draft_logits"], atol=TOLERANCE, rtol=0)


def test_forward_drafts_from_scratch_what_the_calls_draft():
    """B128: one call, the same numbers."""
    record = golden()
    block = load()(record["prefill.context_features"], record["prefill.shifted_input_ids"])
    assert torch.equal(block.tokens, record["round1.greedy_tokens"])


# -- negative controls: each mistake that others have made is visible in the numbers ---------------


@pytest.mark.parametrize("shift", [1, -1])
def test_control_tokens_paired_with_their_own_features(shift):
    """The row of position i has the token at i + 1, neither the one at i nor that at i + 2."""
    assert_changed(run_rounds(load(), shift=shift))


@pytest.mark.parametrize("shift", [1, -1])
def test_control_drafted_rows_one_position_off(monkeypatch, shift):
    """B051: context rows at their own positions, the drafted ones beside theirs."""
    rotary = DrafterModel._rotary

    def shifted(self, x, start, length):
        return rotary(self, x, start + shift if length == 1 else start, length)

    monkeypatch.setattr(DrafterModel, "_rotary", shifted)
    assert_changed(run_rounds(load()))


def test_control_taps_in_another_order():
    """B067, B069: the taps are concatenated in the order of the config."""
    assert_changed(run_rounds(load(), edit=lambda x: torch.cat(x.split(32, dim=-1)[::-1], dim=-1)))


CONTROLS = {
    "hidden state first": lambda layer, embedded, hidden: torch.cat(
        (layer.hidden_norm(hidden), layer.input_layernorm(embedded)), dim=-1
    ),
    "hidden state not normed": lambda layer, embedded, hidden: torch.cat(
        (layer.input_layernorm(embedded), hidden), dim=-1
    ),
    "norms exchanged": lambda layer, embedded, hidden: torch.cat(
        (layer.hidden_norm(embedded), layer.input_layernorm(hidden)), dim=-1
    ),
}


@pytest.mark.parametrize("control", CONTROLS)
def test_control_attention_input(monkeypatch, control):
    monkeypatch.setattr(eagle3.DenseEagle3Layer, "attention_input", CONTROLS[control])
    assert_changed(run_rounds(load()))


def test_control_normed_state_is_recycled(monkeypatch):
    """Trap T22: the next row takes the layer's output as it is; only the head sees it normed."""
    drafter = load()
    run_row = drafter._run_row

    def recycling(context, token_ids, hidden, step, visible):
        return run_row(context, token_ids, drafter.norm(hidden) if step else hidden, step, visible)

    monkeypatch.setattr(drafter, "_run_row", recycling)
    blocks, record = run_rounds(drafter), golden()
    for number, block in enumerate(blocks, start=1):
        expected = record[f"round{number}.draft_logits"]
        # The first row has nothing to recycle.
        torch.testing.assert_close(block.logits[:, 0], expected[:, 0], atol=TOLERANCE, rtol=0)
        assert (block.logits[:, 1] - expected[:, 1]).abs().max() > CLEARLY


def test_control_drafted_rows_not_seen_by_the_next(monkeypatch):
    """Each drafted row sees the ones before it."""
    drafter = load()
    run_row = drafter._run_row

    def forgetful(context, *arguments):
        context.cache.layers[0].length = context.position - 1
        return run_row(context, *arguments)

    monkeypatch.setattr(drafter, "_run_row", forgetful)
    record = golden()
    for number, block in enumerate(run_rounds(drafter), start=1):
        expected = record[f"round{number}.draft_logits"]
        assert (block.logits[:, 1] - expected[:, 1]).abs().max() > CLEARLY


# -- Gemma 4, for which there is no published reference --------------------------------------------


def make_gemma4(**overrides):
    torch.manual_seed(2)
    backbone = {
        "model_type": "gemma4_text",
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_global_key_value_heads": 1,
        "head_dim": 8,
        "global_head_dim": 16,
        "attention_k_eq_v": True,
        "layer_types": ["full_attention"],
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.25,
            }
        },
        "hidden_size_per_layer_input": 0,
    }
    config = Eagle3Config(
        backbone_config=backbone,
        block_size=3,
        target_layer_ids=[0, 2],
        num_target_layers=4,
        target_hidden_size=32,
        vocab_size=61,
        final_logit_softcapping=4.0,
        initializer_range=0.3,
        **overrides,
    )
    drafter = Eagle3Drafter(config).eval()
    with torch.no_grad():
        drafter.layers[0].layer_scalar.fill_(0.7)
        for name, parameter in drafter.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    return drafter


def rms(x, weight=None, eps=1e-6):
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    return x if weight is None else x * weight


def rotate(x, positions):
    """Proportional rotary over (T, heads, 16): the rest of the frequencies stand still."""
    frequencies = torch.zeros(8)
    frequencies[:2] = 10000.0 ** (-torch.arange(2) * 2 / 16)
    angles = positions[:, None, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    a, b = x[..., :8], x[..., 8:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def written_out(drafter, embedded, hidden, positions):
    """One causal pass of the layer over (T, H), from the specification alone."""
    layer = drafter.layers[0]
    attention = layer.self_attn
    x = torch.cat(
        (rms(embedded, layer.input_layernorm.weight), rms(hidden, layer.hidden_norm.weight)), -1
    )
    length = len(x)
    queries = rms(attention.q_proj(x).view(length, 4, 16), attention.q_norm.weight)
    raw = attention.k_proj(x).view(length, 1, 16)
    keys = rotate(rms(raw, attention.k_norm.weight), positions)
    scores = torch.einsum("qhd,kd->hqk", rotate(queries, positions), keys[:, 0])
    scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
    attended = torch.einsum("hqk,kd->qhd", scores.softmax(-1), rms(raw)[:, 0]).flatten(1)
    hidden = hidden + rms(attention.o_proj(attended), layer.post_attention_layernorm.weight)
    x = rms(hidden, layer.pre_feedforward_layernorm.weight)
    gate = functional.gelu(layer.mlp.gate_proj(x), approximate="tanh")
    x = layer.mlp.down_proj(gate * layer.mlp.up_proj(x))
    return (hidden + rms(x, layer.post_feedforward_layernorm.weight)) * layer.layer_scalar


@torch.no_grad()
def test_gemma4_equals_the_specification_written_out():
    """B085, B086, B087: values from keys, partial rotary, sandwich norms, √H, soft-cap, scalar."""
    drafter = make_gemma4()
    features, ids = torch.randn(1, 6, 64), torch.randint(61, (1, 6))
    block = drafter(features, ids)
    hidden, tokens = drafter.fc(features[0]), ids[0]
    for k in range(3):
        embedded = drafter.embed_tokens.weight[tokens] * 32**0.5
        output = written_out(drafter, embedded, hidden, torch.arange(len(tokens)))[-1:]
        logits = drafter.lm_head(rms(output, drafter.norm.weight))
        logits = 4.0 * torch.tanh(logits / 4.0)
        torch.testing.assert_close(block.logits[:, k], logits, atol=TOLERANCE, rtol=0)
        tokens = torch.cat((tokens, logits.argmax(-1)))
        hidden = torch.cat((hidden, output))
    assert torch.equal(block.tokens[0], tokens[6:])


# -- the context -----------------------------------------------------------------------------------


def test_context_past_the_spare_rows_equals_a_fresh_one():
    """B088: growth of the buffer keeps every row, past the trained length too."""
    drafter = make_eagle3()
    features, ids = torch.randn(1, 610, 96), torch.randint(3, 90, (1, 610))
    grown = drafter.new_context(batch_size=1)
    for start in range(0, 610, 61):
        part = slice(start, start + 61)
        drafter.extend(grown, features[:, part], token_ids=ids[:, part])
        drafter.draft(grown, ids[:, start + 60])
    block = drafter.draft(grown, ids[:, -1])
    torch.testing.assert_close(block.logits, drafter(features, ids).logits, atol=1e-5, rtol=0)


def test_keys_of_context_rows_are_the_familys(monkeypatch):
    """The one function that makes context keys and values serves this drafter as well."""
    seen = []
    make = dense.context_key_values

    def recording(layer, pairs, rotary):
        seen.append(tuple(pairs.shape))
        return make(layer, pairs, rotary)

    monkeypatch.setattr(dense, "context_key_values", recording)
    run_rounds(load())
    # All rows but the last of each call, whose query `draft` runs; it joins the next call's.
    assert seen == [(1, 8, 64), (1, 3, 64)]

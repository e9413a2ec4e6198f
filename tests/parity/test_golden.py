"""Drafters compute what an independent reference computed from the same weights."""

import functools

import pytest
import torch
from safetensors.torch import load_file

from checkpoints import DFLASH, GATED, GEMMA4, GOLDEN, LAYOUTS, RNN, VANILLA
from dspark_hf import DSparkDrafter
from dspark_hf.backbones import dense
from dspark_hf.backbones.context_cache import ContextLayer
from tiny import make_drafter

TOLERANCE = 2e-5
# What a wrong computation must differ by, at the least.
CLEARLY = 1e-3
ROUNDS = (1, 2, 3)


@functools.cache
def golden(name):
    return load_file(GOLDEN / name / "golden.safetensors")


def load(name, **options):
    return DSparkDrafter.from_pretrained(GOLDEN / name, **options).eval()


def run_rounds(drafter, name, edit=None, rows=1):
    """The blocks of all rounds; `edit` may change the features of a round."""
    record, context, blocks = golden(name), drafter.new_context(batch_size=rows), []
    for number in ROUNDS:
        features = record[f"round{number}.context_features"]
        if edit is not None:
            features = edit(features, number)
        drafter.extend(context, features.expand(rows, -1, -1))
        assert context.lengths.tolist() == [int(record[f"round{number}.start_position"])] * rows
        blocks.append(drafter.draft(context, record[f"round{number}.anchor"].expand(rows)))
        assert context.lengths.tolist() == [int(record[f"round{number}.start_position"])] * rows
    return blocks


def largest_difference(blocks, name):
    """How far hidden states and logits of the rounds are from the reference, per round."""
    record = golden(name)
    return [
        max(
            (block.hidden_states - record[f"round{number}.block_hidden"]).abs().max().item(),
            (block.base_logits - record[f"round{number}.base_logits"]).abs().max().item(),
        )
        for number, block in zip(ROUNDS, blocks, strict=True)
    ]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_round_equals_the_reference(name, attention):
    """B050, B051, B071, B085, B086, B087: all published DeepSpec DSpark and DFlash layouts."""
    record = golden(name)
    blocks = run_rounds(load(name, attn_implementation=attention), name)
    for number, block in zip(ROUNDS, blocks, strict=True):
        fields = {
            "block_hidden": block.hidden_states,
            "base_logits": block.base_logits,
            "draft_logits": block.logits,
            "confidence_logits": block.confidence_logits,
        }
        for field, value in fields.items():
            expected = record.get(f"round{number}.{field}")
            if expected is None:
                assert value is None, field
                continue
            torch.testing.assert_close(value, expected, atol=TOLERANCE, rtol=0, msg=field)
        assert torch.equal(block.tokens, record[f"round{number}.greedy_tokens"])


@pytest.mark.parametrize("name", LAYOUTS)
def test_two_equal_rows_give_the_single_row_result(name):
    """B055: the row dimension."""
    for block in run_rounds(load(name), name, rows=2):
        assert torch.equal(block.tokens[0], block.tokens[1])
    blocks = run_rounds(load(name), name, rows=2)
    assert max(largest_difference(blocks, name)) < TOLERANCE


@pytest.mark.parametrize("name", [VANILLA, GEMMA4])
def test_forward_drafts_from_scratch_what_the_calls_draft(name):
    """B128: one call, the same numbers."""
    record, drafter = golden(name), load(name)
    block = drafter(record["round1.context_features"], record["round1.anchor"])
    assert torch.equal(block.tokens, record["round1.greedy_tokens"])
    torch.testing.assert_close(
        block.base_logits, record["round1.base_logits"], atol=TOLERANCE, rtol=0
    )


def test_features_in_chunks_equal_features_at_once():
    """B050: the context does not depend on how rounds were cut."""
    record, drafter = golden(VANILLA), load(VANILLA)
    features = record["round1.context_features"]
    context = drafter.new_context(batch_size=1)
    for start in range(features.shape[1]):
        drafter.extend(context, features[:, start : start + 1])
        # No new positions: nothing happens.
        drafter.extend(context, features[:, :0])
    block = drafter.draft(context, record["round1.anchor"])
    torch.testing.assert_close(
        block.base_logits, record["round1.base_logits"], atol=TOLERANCE, rtol=0
    )


# -- negative controls: each mistake that others have made is visible in the numbers ---------------


@pytest.fixture(params=[VANILLA, GATED, RNN, DFLASH])
def dense_name(request):
    return request.param


def assert_changed(blocks, name):
    differences = largest_difference(blocks, name)
    assert min(differences) > CLEARLY, differences


@pytest.mark.parametrize("shift", [1, -1])
def test_control_block_positions_off_by_one(monkeypatch, dense_name, shift):
    """B051: context at its own positions, the block one off."""
    drafter = load(dense_name)
    rotary = DSparkDrafter._rotary

    def shifted(self, x, start, length):
        is_block = length == self.config.block_width and start > 0
        return rotary(self, x, start + shift if is_block else start, length)

    monkeypatch.setattr(DSparkDrafter, "_rotary", shifted)
    assert_changed(run_rounds(drafter, dense_name), dense_name)


def test_control_context_keys_without_their_norm(monkeypatch, dense_name):
    """Context keys need `k_norm` as much as the block's do."""
    drafter, context_key_values = load(dense_name), dense.context_key_values

    def without_norm(layer, features, rotary):
        norm, layer.self_attn.k_norm = layer.self_attn.k_norm, torch.nn.Identity()
        result = context_key_values(layer, features, rotary)
        layer.self_attn.k_norm = norm
        return result

    monkeypatch.setattr(dense, "context_key_values", without_norm)
    assert_changed(run_rounds(drafter, dense_name), dense_name)


def test_control_input_norm_on_context(monkeypatch, dense_name):
    """Context features bypass the layer's input norm."""
    drafter, context_key_values = load(dense_name), dense.context_key_values

    def with_norm(layer, features, rotary):
        return context_key_values(layer, layer.input_layernorm(features), rotary)

    monkeypatch.setattr(dense, "context_key_values", with_norm)
    assert_changed(run_rounds(drafter, dense_name), dense_name)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_control_causal_block(monkeypatch, dense_name, attention):
    """B090: block rows see each other in both directions."""
    drafter = load(dense_name, attn_implementation=attention)

    def causal(layer, hidden_states, position_embeddings, cache, attention_mask=None):
        width, context = hidden_states.shape[1], cache.get_seq_length()
        mask = torch.full((width, context + width), -torch.inf).triu(context + 1)
        return layer(
            hidden_states,
            attention_mask=mask[None, None],
            position_embeddings=position_embeddings,
            cache=cache,
        )

    monkeypatch.setattr(dense, "run_layer", causal)
    assert_changed(run_rounds(drafter, dense_name), dense_name)


def test_control_infill_layout(dense_name):
    """B071: the same weights read as anchor-is-context give other tokens, from one more slot."""
    drafter = load(dense_name)
    drafter.config.anchor_predicts = False
    assert drafter.config.block_width == drafter.config.block_size + 1
    blocks = run_rounds(drafter, dense_name)
    assert blocks[0].tokens.shape == (1, drafter.config.block_size)
    assert_changed(blocks, dense_name)


def test_the_anchor_slot_of_an_infill_block_predicts_nothing(dense_name):
    """B071: slots 1 to γ of a block of γ + 1, which are those of an anchor-first block as wide."""
    infill, wide = load(dense_name), load(dense_name)
    infill.config.anchor_predicts = False
    wide.config.block_size += 1
    for found, expected in zip(
        run_rounds(infill, dense_name), run_rounds(wide, dense_name), strict=True
    ):
        assert torch.equal(found.hidden_states, expected.hidden_states[:, 1:])
        assert torch.equal(found.base_logits, expected.base_logits[:, 1:])


def test_control_taps_in_another_order(dense_name):
    """B067, B069: the taps are concatenated in the order of the config."""
    drafter = load(dense_name)
    width = drafter.config.target_hidden_size

    def reverse(features, number):
        return torch.cat(list(features.split(width, dim=-1))[::-1], dim=-1)

    assert_changed(run_rounds(drafter, dense_name, edit=reverse), dense_name)


def test_control_features_of_the_anchor(dense_name):
    """B050: the anchor's own features are not part of its context."""
    record, drafter = golden(dense_name), load(dense_name)
    context = drafter.new_context(batch_size=1)
    drafter.extend(context, record["round1.context_features"])
    # The first position committed in round 2 is the anchor of round 1.
    drafter.extend(context, record["round2.context_features"][:, :1])
    context.lengths -= 1
    block = drafter.draft(context, record["round1.anchor"])
    assert (block.base_logits - record["round1.base_logits"]).abs().max() > CLEARLY


def test_control_soft_cap_and_embedding_scale():
    """B085, B086: Gemma's cap and √H are part of the numbers."""
    drafter = load(GEMMA4)
    drafter.config.final_logit_softcapping = 1.0
    assert_changed(run_rounds(drafter, GEMMA4), GEMMA4)
    drafter = load(GEMMA4)
    drafter.embed_tokens.embed_scale.fill_(1.0)
    assert_changed(run_rounds(drafter, GEMMA4), GEMMA4)


def test_a_plain_embedding_module_is_scaled_for_gemma():
    """B085: a bound embedding that does not scale by itself gives the same block."""
    drafter = load(GEMMA4)
    plain = torch.nn.Embedding.from_pretrained(drafter.embed_tokens.weight.detach())
    drafter.bind(input_embeddings=plain)
    assert max(largest_difference(run_rounds(drafter, GEMMA4), GEMMA4)) < TOLERANCE


# -- the drafter's own cache -----------------------------------------------------------------------


def features_of(drafter, length, seed=7):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, length, drafter.fc.in_features, generator=generator)


def test_context_past_the_spare_rows_equals_a_fresh_one():
    """B050, B088: growth of the buffer keeps every row, past the trained length too."""
    drafter = make_drafter()
    features, anchor = features_of(drafter, 610), torch.tensor([5])
    grown = drafter.new_context(batch_size=1)
    capacities = set()
    for start in range(0, 610, 61):
        drafter.extend(grown, features[:, start : start + 61])
        capacities.add(grown.cache.layers[0].keys.shape[-2])
        drafter.draft(grown, anchor)
    assert len(capacities) == 2
    fresh = drafter.new_context(batch_size=1)
    drafter.extend(fresh, features)
    expected, found = drafter.draft(fresh, anchor), drafter.draft(grown, anchor)
    torch.testing.assert_close(found.base_logits, expected.base_logits, atol=1e-5, rtol=0)
    assert torch.equal(found.tokens, expected.tokens)


def test_drafting_leaves_the_context_as_it_was():
    """B050: block rows are scratch; a second draft gives the same block."""
    drafter = make_drafter()
    context = drafter.new_context(batch_size=1)
    drafter.extend(context, features_of(drafter, 5))
    first = drafter.draft(context, torch.tensor([5]))
    assert context.cache.get_seq_length() == context.position == 5
    drafter.draft(context, torch.tensor([9]))
    assert torch.equal(first.base_logits, drafter.draft(context, torch.tensor([5])).base_logits)


def windowed_drafter(window):
    drafter = make_drafter()
    for layer in drafter.layers:
        layer.self_attn.sliding_window = window
    return drafter


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_sliding_draft_layers_see_the_last_window_rows(attention):
    """B043, B089: rows before the window have no effect, rows inside it have; `None` sees all."""
    drafter = windowed_drafter(8)
    drafter.set_attn_implementation(attention)
    features = features_of(drafter, 20)
    anchor = torch.tensor([5])

    def draft(drafter, features):
        context = drafter.new_context(batch_size=1)
        drafter.extend(context, features)
        return drafter.draft(context, anchor).base_logits

    expected = draft(drafter, features)
    before, inside = features.clone(), features.clone()
    before[:, :12] = 0
    inside[:, 12] = 0
    torch.testing.assert_close(draft(drafter, before), expected)
    assert (draft(drafter, inside) - expected).abs().max() > CLEARLY
    full = windowed_drafter(None)
    assert (draft(full, before) - draft(full, features)).abs().max() > CLEARLY
    # A window that no context fills changes nothing.
    assert torch.equal(draft(windowed_drafter(20), features), draft(full, features))


def test_context_layer_returns_the_window_and_the_block():
    """B089: positions, by value."""
    layer = ContextLayer(window=3)
    rows = torch.arange(5.0).view(1, 1, 5, 1)
    layer.append(rows, -rows)
    block = torch.tensor([10.0, 11.0]).view(1, 1, 2, 1)
    for _ in range(2):
        keys, values = layer.update(block, -block)
        assert keys.flatten().tolist() == [2, 3, 4, 10, 11]
        assert values.flatten().tolist() == [-2, -3, -4, -10, -11]
    assert layer.get_seq_length() == 5
    layer.append(block, -block)
    keys, _ = layer.update(rows[:, :, :1], rows[:, :, :1])
    assert keys.flatten().tolist() == [4, 10, 11, 0]


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((1, 4, 63), r"\(1, 4, 63\).*\(1, T, 64\): 2 taps of width 32"),
        ((2, 4, 64), r"\(2, 4, 64\).*\(1, T, 64\)"),
        ((4, 64), r"\(4, 64\)"),
    ],
)
def test_misshapen_features_are_refused(shape, message):
    """B070, B111: the message has both shapes."""
    drafter = make_drafter()
    with pytest.raises(ValueError, match=message):
        drafter.extend(drafter.new_context(batch_size=1), torch.zeros(shape))


def test_features_of_another_dtype_are_cast():
    """B092: bfloat16 features into a float32 drafter, and the reverse."""
    drafter = make_drafter()
    features, anchor = features_of(drafter, 6).bfloat16(), torch.tensor([5])
    assert drafter(features, anchor).hidden_states.dtype == torch.float32
    drafter.bfloat16()
    block = drafter(features.float(), anchor)
    assert block.hidden_states.dtype == torch.bfloat16
    assert block.logits.dtype == block.confidence_logits.dtype == torch.float32


def test_a_block_is_drafted_at_its_trained_width():
    """B072: there is no way to run a shorter block; a prefix of the trained one is used."""
    drafter = make_drafter(block_size=4)
    block = drafter(features_of(drafter, 6), torch.tensor([5]))
    assert block.tokens.shape == (1, 4)
    assert block.hidden_states.shape == (1, 4, 32)
    assert block.logits.shape == block.base_logits.shape == (1, 4, 97)

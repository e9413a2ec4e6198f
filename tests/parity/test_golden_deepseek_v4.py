"""Embedded DeepSeek-V4 drafters compute what an independent reference computed; traps are seen."""

import functools

import pytest
import torch
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as host

from checkpoints import GOLDEN, read_json, same_weights
from dspark_hf import DSparkDrafter
from dspark_hf.backbones import deepseek_v4
from dspark_hf.backbones.context_cache import ContextLayer
from dspark_hf.backbones.fp8_simulation import simulate_fp8
from dspark_hf.quantised import round_to_fp8
from tiny_v4 import (
    V4,
    V4_QUANTISED,
    bind_recorded,
    golden,
    load_golden_drafter,
    make_v4_drafter,
)

TOLERANCE = 2e-5
# What a wrong computation must differ by, at the least.
CLEARLY = 1e-3
ROUNDS = (1, 2, 3, 4)
NAMES = (V4, V4_QUANTISED)
WINDOW = {V4: 16, V4_QUANTISED: 24}


def run_rounds(drafter, name, edit=None, rows=1):
    """The blocks of all rounds; `edit` may change the features of a round."""
    record, context, blocks = golden(name), drafter.new_context(batch_size=rows), []
    for number in ROUNDS:
        features = record[f"round{number}.context_features"]
        if edit is None:
            assert int(context.lengths[0]) == int(record[f"round{number}.first_position"])
        else:
            features = edit(features, number)
        drafter.extend(context, features.expand(rows, -1, -1))
        if edit is None:
            assert int(context.lengths[0]) == int(record[f"round{number}.anchor_position"])
        blocks.append(drafter.draft(context, record[f"round{number}.anchor"].expand(rows)))
    return blocks


def differences(blocks, name, field="draft_logits"):
    """How far a field of every round is from the reference."""
    values = [
        block.logits if field == "draft_logits" else block.confidence_logits for block in blocks
    ]
    return [
        (value - golden(name)[f"round{number}.{field}"]).abs().max().item()
        for number, value in zip(ROUNDS, values, strict=True)
    ]


@functools.cache
def loaded(name=V4):
    return load_golden_drafter(name)


def changed(drafter=None, edit=None, field="draft_logits"):
    """The smallest difference over the rounds that a mistake makes."""
    return min(differences(run_rounds(drafter or loaded(), V4, edit), V4, field))


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_every_round_equals_the_reference(name, rows):
    """B050, B051: plain and FP8/FP4 checkpoints, the ring wrapped, up to six rows a round."""
    blocks = run_rounds(load_golden_drafter(name), name, rows=rows)
    assert max(differences(blocks, name)) < TOLERANCE
    assert max(differences(blocks, name, "confidence_logits")) < TOLERANCE
    for number, block in zip(ROUNDS, blocks, strict=True):
        expected = golden(name)[f"round{number}.draft_tokens"]
        assert torch.equal(block.tokens, expected.expand(rows, -1))
        assert block.hidden_states.shape == (rows, 5, loaded(name).config.hidden_size)
    assert int(golden(name)["round1.anchor_position"]) > WINDOW[name]


@pytest.mark.parametrize("name", NAMES)
def test_a_short_context_and_one_at_the_window_equal_the_reference_in_chunks(name):
    """Positions below, at and above the window, however the rows arrived."""
    drafter, record = loaded(name), golden(name)
    features = record["round1.context_features"]
    for length in (1, WINDOW[name] - 1, WINDOW[name], WINDOW[name] + 1):
        whole, pieces = drafter.new_context(1), drafter.new_context(1)
        drafter.extend(whole, features[:, :length])
        for i in range(length):
            drafter.extend(pieces, features[:, i : i + 1])
        one, other = (drafter.draft(c, record["round1.anchor"]) for c in (whole, pieces))
        torch.testing.assert_close(one.logits, other.logits, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_the_block_sees_the_window_before_the_anchor(name):
    """The row at p - window is not seen by any draft row, the row after it is seen by all."""
    drafter, record = loaded(name), golden(name)
    features, anchor = record["round1.context_features"], record["round1.anchor"]
    first = features.shape[1] - WINDOW[name]
    outside, inside = features.clone(), features.clone()
    outside[:, :first] = outside[:, :first].flip(1) + 1
    inside[:, first] += 1
    expected = drafter(features, anchor).base_logits
    torch.testing.assert_close(drafter(outside, anchor).base_logits, expected, atol=1e-6, rtol=0)
    moved = (drafter(inside, anchor).base_logits - expected).abs().amax(dim=-1)
    assert moved.min() > 1e-6


def test_a_long_prompt_takes_no_more_memory_than_the_window():
    drafter = loaded()
    context = drafter.new_context(1)
    drafter.extend(context, torch.randn(1, 5000, 192))
    assert context.lengths.tolist() == [5000]
    assert context.cache.layers[0].keys.shape[-2] < 600


def test_the_order_of_the_context_rows_does_not_matter(monkeypatch):
    """Their positions are rotated into them."""
    update = ContextLayer.update

    def reversed_rows(self, keys, values, *args, **kwargs):
        keys, values = update(self, keys, values, *args, **kwargs)
        return keys.flip(2), values.flip(2)

    monkeypatch.setattr(ContextLayer, "update", reversed_rows)
    assert max(differences(run_rounds(loaded(), V4), V4)) < TOLERANCE


def test_block_rows_see_each_other_in_both_directions(monkeypatch):
    embed, drafter, record = deepseek_v4.embed, loaded(), golden()
    features, anchor = record["round1.context_features"], record["round1.anchor"]
    expected = drafter(features, anchor).base_logits

    def other_last_row(*args):
        hidden = embed(*args)
        hidden[:, -1] += 1
        return hidden

    monkeypatch.setattr(deepseek_v4, "embed", other_last_row)
    moved = (drafter(features, anchor).base_logits - expected).abs().amax(dim=-1)
    assert moved.min() > CLEARLY


def test_saved_and_loaded_in_our_layout(tmp_path):
    """Split from the target: packed experts stay packed, and nothing is lost."""
    for name in NAMES:
        drafter = load_golden_drafter(name, bound=False)
        drafter.save_pretrained(tmp_path / name)
        again = DSparkDrafter.from_pretrained(tmp_path / name, dtype=torch.float32).eval()
        assert same_weights(drafter, again)
        assert again.config.backbone_config.to_dict() == drafter.config.backbone_config.to_dict()
        assert max(differences(run_rounds(bind_recorded(again, name), name), name)) < TOLERANCE


def test_bfloat16_keeps_what_the_reference_keeps_in_float32():
    """Norms, sinks, hyper-connections; drafts agree with float32 for the most part."""
    drafter = bind_recorded(
        DSparkDrafter.from_pretrained(
            load_golden_drafter(bound=False).name_or_path, dtype=torch.bfloat16
        ).eval()
    )
    dtypes = {name: tensor.dtype for name, tensor in drafter.state_dict().items()}
    assert dtypes["layers.0.attn_hc.fn"] == dtypes["layers.1.self_attn.sinks"] == torch.float32
    assert dtypes["hc_head.hc_fn"] == dtypes["norm.weight"] == torch.float32
    assert dtypes["fc.weight"] == dtypes["layers.0.self_attn.q_a_proj.weight"] == torch.bfloat16
    assert drafter.dtype == torch.bfloat16
    blocks = run_rounds(drafter, V4)
    for number, block in zip(ROUNDS, blocks, strict=True):
        expected = golden()[f"round{number}.draft_logits"]
        cosine = torch.nn.functional.cosine_similarity(block.logits[:, 0], expected[:, 0])
        assert cosine > 0.995


@pytest.mark.parametrize("attention", ["sdpa", "flash_attention_2"])
def test_kernels_without_attention_sinks_are_refused(attention):
    """They would drop the sinks without a word."""
    with pytest.raises(ValueError, match="does not support"):
        load_golden_drafter(attn_implementation=attention)
    drafter = make_v4_drafter()
    assert drafter.config._attn_implementation == "eager"
    assert {layer.self_attn.config._attn_implementation for layer in drafter.layers} == {"eager"}


def test_the_rounding_of_the_released_kernels_can_be_simulated():
    """Nearly the same drafts; the latents lie on the FP8 grid but for their rotated channels."""
    drafter = load_golden_drafter(V4_QUANTISED)
    before = [block.base_logits for block in run_rounds(drafter, V4_QUANTISED)]
    with simulate_fp8(drafter):
        context = drafter.new_context(1)
        drafter.extend(context, golden(V4_QUANTISED)["round1.context_features"])
        blocks = run_rounds(drafter, V4_QUANTISED)
    moved = differences(blocks, V4_QUANTISED)
    assert min(moved) > CLEARLY
    for block, plain in zip(blocks, before, strict=True):
        cosine = torch.nn.functional.cosine_similarity(block.base_logits, plain, dim=-1)
        # A rounded input may flip a near-tie of the router, which moves one row.
        assert cosine.median() > 0.99
    latents = context.cache.layers[0].keys[:, 0, :24]
    assert torch.equal(round_to_fp8(latents[..., :48], 64), latents[..., :48])
    assert not torch.equal(round_to_fp8(latents[..., 48:], 64), latents[..., 48:])
    after = run_rounds(drafter, V4_QUANTISED)
    assert all(torch.equal(a.base_logits, b) for a, b in zip(after, before, strict=True))
    with pytest.raises(ValueError, match="experts in floating point"), simulate_fp8(loaded(V4)):
        pass


def on_the_fp8_grid(x, group):
    """What the spec says of `act_quant`, one group after the other."""
    parts = []
    for part in x.double().split(group, dim=-1):
        largest = part.abs().amax(dim=-1, keepdim=True).clamp(min=1e-4)
        scale = 2.0 ** torch.ceil(torch.log2(largest / 448))
        parts.append((part / scale).float().to(torch.float8_e4m3fn).double() * scale)
    return torch.cat(parts, dim=-1).to(x.dtype)


def test_the_simulation_rounds_what_the_released_kernels_round():
    """
    Inputs of every FP8 and FP4 projection in groups of 128, and of nothing else: not of the grouped
    output projection, the router, the heads and the hyper-connections.
    """
    rounded = {"fc"}
    for layer in range(3):
        attention, mlp = f"layers.{layer}.self_attn", f"layers.{layer}.mlp"
        rounded |= {f"{attention}.{name}_proj" for name in ("q_a", "q_b", "kv", "o_b")}
        rounded |= {f"{mlp}.shared_experts.{name}_proj" for name in ("gate", "up", "down")}
        rounded |= {f"{mlp}.experts", f"{mlp}.experts.down_input"}
    drafter, record = load_golden_drafter(V4_QUANTISED), golden(V4_QUANTISED)
    before, after = {}, {}

    def watch(seen):
        for name, module in drafter.named_modules():
            module.register_forward_pre_hook(
                lambda _, args, name=name: seen.setdefault(name, []).extend(args[:1])
            )

    # Hooks run in the order of their registration.
    watch(before)
    with simulate_fp8(drafter):
        watch(after)
        drafter(record["round1.context_features"], record["round1.anchor"])
    assert rounded < before.keys() == after.keys()
    for name, inputs in before.items():
        for raw, used in zip(inputs, after[name], strict=True):
            if isinstance(raw, torch.Tensor):
                expected = on_the_fp8_grid(raw, 128) if name in rounded else raw
                assert torch.equal(used, expected), name


def test_the_simulation_has_one_scale_for_64_channels_of_latents_and_128_of_inputs():
    """
    Seen where a group spans more than FP8 does. Latents but for their rotated channels, here of a
    norm that is wider than the golden one; rows of the projection of the context.
    """
    drafter = load_golden_drafter(V4_QUANTISED)
    rotated = read_json(GOLDEN / V4_QUANTISED / "config.json")["qk_rope_head_dim"]
    norm, projection = drafter.layers[2].self_attn.kv_norm, drafter.fc
    norm.weight.data = torch.ones(200)
    fading = torch.logspace(0, -12, projection.in_features)
    x, rows = (
        torch.randn(5, width) * 10.0 ** torch.randint(-6, 1, (5, width)) * fading[:width]
        for width in (200, projection.in_features)
    )
    plain, rope = norm(x).split((200 - rotated, rotated), dim=-1)
    projected = projection(on_the_fp8_grid(rows, 128))
    with simulate_fp8(drafter):
        latents, found = norm(x), projection(rows)
    assert torch.equal(latents, torch.cat((on_the_fp8_grid(plain, 64), rope), dim=-1))
    assert torch.equal(found, projected)


# -- negative controls: each mistake that others have made is visible in the numbers ---------------


def test_control_taps_in_another_order():
    assert changed(edit=lambda features, _: features.roll(64, dims=-1)) > CLEARLY


def test_control_context_missing_for_a_cached_prefix():
    def edit(features, number):
        return features[:, :0] if number == 1 else features

    assert changed(edit=edit) > CLEARLY


def test_control_a_rejected_row_in_the_context():
    def edit(features, number):
        return torch.cat((features, features[:, -1:]), dim=1)

    assert changed(edit=edit) > CLEARLY


@pytest.mark.parametrize("shift", [1, -1])
def test_control_block_positions_off_by_one(monkeypatch, shift):
    rotary = DSparkDrafter._rotary

    def shifted(self, x, start, length):
        is_block = x.dim() == 4
        return rotary(self, x, start + shift if is_block else start, length)

    monkeypatch.setattr(DSparkDrafter, "_rotary", shifted)
    assert changed() > CLEARLY


def test_control_theta_of_the_compressed_layers():
    """Theirs plays no part; in place of ours it is seen."""
    drafter = load_golden_drafter()
    theirs = 160000.0 ** -(torch.arange(0, 8, 2) / 8)
    drafter.rotary_emb.compress_inv_freq = theirs
    assert max(differences(run_rounds(drafter, V4), V4)) < TOLERANCE
    drafter.rotary_emb.main_inv_freq = theirs
    assert changed(drafter) > CLEARLY


def test_control_yarn_on_the_drafter():
    """The target's compressed layers stretch their slow pairs sixteen times, the drafter's none."""
    drafter = load_golden_drafter()
    plain = drafter.rotary_emb.main_inv_freq
    drafter.rotary_emb.main_inv_freq = torch.cat((plain[:2], plain[2:] / 16))
    assert changed(drafter) > CLEARLY


def half_split(x, cos, sin, unsqueeze_dim=1):
    cos, sin = (torch.cat((y, y), dim=-1).unsqueeze(unsqueeze_dim) for y in (cos, sin))
    plain, rotated = x[..., : -cos.shape[-1]], x[..., -cos.shape[-1] :]
    one, other = rotated.chunk(2, dim=-1)
    return torch.cat((plain, rotated * cos + torch.cat((-other, one), dim=-1) * sin), dim=-1)


def test_control_half_split_rotary(monkeypatch):
    for module in (host, deepseek_v4):
        monkeypatch.setattr(module, "apply_rotary_pos_emb", half_split)
    assert changed() > CLEARLY


def test_control_output_not_rotated_back(monkeypatch):
    rotate, calls = host.apply_rotary_pos_emb, []

    def without_third(x, cos, sin, **kwargs):
        calls.append(None)
        return x if len(calls) % 3 == 0 else rotate(x, cos, sin, **kwargs)

    monkeypatch.setattr(host, "apply_rotary_pos_emb", without_third)
    assert changed() > CLEARLY


def test_control_stream_mixing_transposed(monkeypatch):
    forward = host.DeepseekV4HyperConnection.forward

    def transposed(self, streams):
        post, comb, collapsed = forward(self, streams)
        return post, comb.transpose(-1, -2), collapsed

    monkeypatch.setattr(host.DeepseekV4HyperConnection, "forward", transposed)
    assert changed() > CLEARLY


@pytest.mark.parametrize("kind", ["causal", "sliding"])
def test_control_a_mask_inside_the_block(monkeypatch, kind):
    def masked(layer, hidden, position_embeddings, cache, mask):
        width = hidden.shape[1]
        length = min(int(cache.get_seq_length()), 16)
        query = torch.arange(width)[:, None]
        key = torch.arange(length + width)[None] - length
        hidden_keys = key > query if kind == "causal" else query - key >= 16
        mask = torch.zeros(width, length + width).masked_fill(hidden_keys, -torch.inf)
        return layer(
            hidden,
            attention_mask=mask[None, None],
            position_embeddings={"main": position_embeddings},
            position_ids=None,
            cache=cache,
        )

    monkeypatch.setattr(deepseek_v4, "run_layer", masked)
    assert changed() > CLEARLY


def test_control_sinks_left_out():
    drafter = load_golden_drafter()
    for layer in drafter.layers:
        layer.self_attn.sinks.data.fill_(-torch.inf)
    assert changed(drafter) > CLEARLY


def test_control_input_norm_on_the_context(monkeypatch):
    key_values = deepseek_v4.context_key_values

    def normed(layer, features, rotary):
        return key_values(layer, layer.input_layernorm(features), rotary)

    monkeypatch.setattr(deepseek_v4, "context_key_values", normed)
    assert changed() > CLEARLY


def test_control_the_anchor_row_dropped():
    blocks = run_rounds(loaded(), V4)
    for number, block in zip(ROUNDS, blocks, strict=True):
        expected = golden()[f"round{number}.draft_logits"]
        assert (block.logits[:, 1:] - expected[:, :-1]).abs().amax(dim=-1).min() > CLEARLY


def test_control_no_markov_bias_on_the_first_row():
    for block in run_rounds(loaded(), V4):
        assert (block.logits - block.base_logits)[:, 0].abs().max() > CLEARLY


def test_control_confidence_from_the_normed_state(monkeypatch):
    read_out = deepseek_v4.read_out
    monkeypatch.setattr(deepseek_v4, "read_out", lambda *args: (read_out(*args)[0],) * 2)
    assert changed(field="confidence_logits") > CLEARLY


def test_control_the_targets_final_norm_in_place_of_the_drafters():
    drafter = load_golden_drafter()
    drafter.norm.weight.data.fill_(1.0)
    assert changed(drafter) > CLEARLY

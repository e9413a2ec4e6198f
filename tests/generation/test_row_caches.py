"""What the target's cache and the drafting context hold, round by round, of every kind."""

import copy

import pytest
import torch
from transformers import (
    DynamicCache,
    InklingForCausalLM,
    InklingTextConfig,
    Lfm2Config,
    Lfm2ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    StaticCache,
    Zamba2Config,
    Zamba2ForCausalLM,
)
from transformers.cache_utils import (
    BaseQuantizedLayer,
    Cache,
    Fp8QuantizedLayer,
    LinearAttentionCacheLayerMixin,
    QuantizedLayer,
)
from transformers.models.qwen3_next import modeling_qwen3_next

from batches import SMALL_LAYERS, make_prompts, pad_left, script_rows
from dspark_hf import collect_statistics
from tiny import make_drafter, make_target

NEW_TOKENS = 20
# Not every kind of layers has heads of a size of their own.
SHARED = {name: value for name, value in SMALL_LAYERS.items() if name != "head_dim"}


def hybrid_target():
    """Three layers with a recurrent state and one with keys and values."""
    torch.manual_seed(0)
    config = Qwen3NextConfig(
        **SHARED,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    )
    return Qwen3NextForCausalLM(config).eval()


def convolving_target():
    """Two layers with a short convolution between two with keys and values."""
    torch.manual_seed(0)
    config = Lfm2Config(
        **SHARED, layer_types=["full_attention", "conv", "full_attention", "conv"], conv_L_cache=3
    )
    return Lfm2ForCausalLM(config).eval()


class RoundedLayer(QuantizedLayer):
    """The host's quantised layer with a residual, and rounding for a quantiser."""

    def __init__(self):
        super().__init__(residual_length=7)

    def _quantize(self, tensor, axis):
        return (tensor * 4).round()

    def _dequantize(self, qtensor):
        return qtensor / 4


KINDS = {
    "dynamic": (make_target, lambda target: DynamicCache(config=target.config)),
    "sliding": (lambda: make_target("mistral_swa"), lambda t: DynamicCache(config=t.config)),
    "mixed": (lambda: make_target("gemma3"), lambda t: DynamicCache(config=t.config)),
    "static": (make_target, lambda t: StaticCache(t.config, max_cache_len=40)),
    "static_sliding": (
        lambda: make_target("mistral_swa"),
        lambda t: StaticCache(t.config, max_cache_len=40),
    ),
    "static_mixed": (
        lambda: make_target("gemma3"),
        lambda t: StaticCache(t.config, max_cache_len=40),
    ),
    "fp8": (make_target, lambda t: Cache(layers=[Fp8QuantizedLayer() for _ in range(4)])),
    "residual": (make_target, lambda t: Cache(layers=[RoundedLayer() for _ in range(4)])),
    "recurrent": (hybrid_target, lambda t: DynamicCache(config=t.config)),
    "convolution": (convolving_target, lambda t: DynamicCache(config=t.config)),
}
# Rows commit as many tokens as the slowest.
LOCK_STEP = ("residual", "recurrent")


def greedy(target, cache, batch, **options):
    return target.generate(
        **batch, cache=cache, max_new_tokens=NEW_TOKENS, do_sample=False, **options
    )


def texts_of(sequences, prompts):
    width = max(prompt.shape[1] for prompt in prompts)
    return [row[width - prompt.shape[1] :] for row, prompt in zip(sequences, prompts, strict=True)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_right", [[0], [2], [4], [4, 0, 2]], ids=str)
def test_every_cache_is_exact(kind, num_right):
    """B041 to B044, B050, B053: greedy text over every cache, one row and several."""
    make, make_cache = KINDS[kind]
    target = make()
    prompts = make_prompts([6, 9, 3][: len(num_right)])
    batch = pad_left(prompts)
    expected = greedy(target, make_cache(target), batch)
    drafter = script_rows(make_drafter(), texts_of(expected, prompts), num_right)
    with collect_statistics() as statistics:
        found = greedy(target, make_cache(target), batch, assistant_model=drafter)
    assert torch.equal(found, expected)
    if len(num_right) == 1:
        assert statistics.accepted == sum(statistics.verified_at[: num_right[0]])
    elif kind not in LOCK_STEP:
        # 4, 19 and 7 rounds for 19 tokens each: nobody waits for the others.
        assert statistics.rounds == 30
    else:
        # What each row was right about, also where it waits for the one that is never right.
        assert statistics.prefix_acceptance == pytest.approx([2 / 3, 2 / 3, 1 / 3, 1 / 3])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stops", [False, True])
def test_caches_of_all_rows_hold_what_was_committed(kind, stops):
    """
    B019, B041: for every accepted count, each row's columns and states equal after every round
    those that plain decoding has there.
    """
    make, make_cache = KINDS[kind]
    target, prompts = make(), make_prompts([6, 9, 3, 5, 8])
    batch, seen = pad_left(prompts), set()
    plain, wanted = recorded(target, make_cache(target), batch)
    texts = texts_of(plain, prompts)
    eos = int(texts[0][len(prompts[0][0]) + 6]) if stops else None
    # Under lock-step rows that are right at different times would always commit one token.
    together = [[right] * 5 for right in ([3] if stops else range(5))]
    for num_right in together if kind in LOCK_STEP else [[4, 0, 2, 1, 3]]:
        cache, drafter = make_cache(target), script_rows(make_drafter(), texts, num_right)
        draft = drafter.draft

        def checking(context, anchor_ids, cache=cache, draft=draft, **kwargs):
            held, count = contents(cache), len(anchor_ids)
            for i, length in enumerate(context.lengths.tolist()):
                text = kwargs["input_ids"][i, -length - 1 :]
                row = next(r for r, t in enumerate(texts) if torch.equal(t[: length + 1], text))
                # Those that keep rows that have finished keep each row in its place.
                entry = i if held[0].shape[0] == count else row
                compare(held, entry, wanted[9 + length - prompts[row].shape[1]], row, length)
            return draft(context, anchor_ids, **kwargs)

        drafter.draft = checking
        with collect_statistics(on_round=lambda record: seen.add(record.num_accepted)):
            found = greedy(
                target, cache, batch, assistant_model=drafter, eos_token_id=eos, pad_token_id=0
            )
        if not stops:
            assert torch.equal(found, plain)
    assert stops or seen == set(range(5))


def recorded(target, cache, batch):
    """Text of plain decoding, and what the cache held by how many columns it had."""
    held = {}
    handle = target.register_forward_hook(
        lambda *_: held.__setitem__(int(cache.get_seq_length()), contents(cache))
    )
    text = greedy(target, cache, batch)
    handle.remove()
    return text, held


def contents(cache):
    """
    A copy of what every layer holds: keys and values `(R, heads, columns, width)` and the columns
    of a convolution as tensors of the same kind, recurrent states with one column.
    """
    found = []
    for layer in cache.layers:
        if isinstance(layer, BaseQuantizedLayer):
            parts = [layer._dequantize(q) for q in (layer._quantized_keys, layer._quantized_values)]
            rest = (layer.keys, layer.values)
            if layer.keys.dim() == 4:
                parts = [torch.cat(pair, dim=-2) for pair in zip(parts, rest, strict=True)]
            found += parts
        elif getattr(layer, "keys", None) is not None:
            width = min(int(layer.get_seq_length()), getattr(layer, "max_cache_len", 1000))
            found += [x[..., :width, :] for x in (layer.keys, layer.values)]
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            found += [s[:, None].mT for s in layer.conv_states.values() if s is not None]
            states = (s for s in layer.recurrent_states.values() if s is not None)
            found += [s.flatten(1)[:, None, None] for s in states]
    return [tensor.clone() for tensor in found]


def compare(held, entry, wanted, row, length):
    assert len(held) == len(wanted)
    for tensor, expected in zip(held, wanted, strict=True):
        # Behind padding, of which there may be more or less.
        count = min(length, expected.shape[-2])
        assert tensor.shape[-2] >= count
        close = {"atol": 1e-3, "rtol": 1e-3}
        torch.testing.assert_close(tensor[entry, :, -count:], expected[row, :, -count:], **close)


def test_a_state_that_is_lost_between_forwards_is_refused_before_compute(monkeypatch):
    """B044: a target whose recurrent layers start anew at every forward of several tokens."""
    target, rule = hybrid_target(), modeling_qwen3_next.torch_chunk_gated_delta_rule

    def forgetful(*args, initial_state=None, **kwargs):
        return rule(*args, initial_state=None, **kwargs)

    monkeypatch.setattr(modeling_qwen3_next, "torch_chunk_gated_delta_rule", forgetful)
    with pytest.raises(ValueError, match="loses its recurrent state"):
        greedy(target, None, pad_left(make_prompts([6])), assistant_model=make_drafter())


def inkling(layer_types, window):
    """Every layer has convolutions and keys and values."""
    torch.manual_seed(0)
    config = InklingTextConfig(
        **SHARED | {"initializer_range": 0.4},
        head_dim=16,
        swa_num_attention_heads=2,
        swa_num_key_value_heads=1,
        swa_head_dim=16,
        moe_intermediate_size=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        layer_types=layer_types,
        sliding_window_size=window,
    )
    target = InklingForCausalLM(config).eval()
    with torch.no_grad():
        for weight in target.parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.3)
    return target


def test_static_keys_beside_convolutions():
    """The host's `crop` of such layers takes back the convolutions alone."""
    target, prompts = inkling(["hybrid_sliding"] * 4, 64), make_prompts([6, 3])
    batch = pad_left(prompts)
    expected = greedy(target, StaticCache(target.config, max_cache_len=40), batch)
    for num_right in ([4, 0], [2, 2]):
        drafter = script_rows(make_drafter(), texts_of(expected, prompts), num_right)
        cache = StaticCache(target.config, max_cache_len=40)
        assert torch.equal(greedy(target, cache, batch, assistant_model=drafter), expected)


@pytest.mark.parametrize(
    ("kind", "window", "message"),
    [
        ("hybrid_sliding", 8, "SlidingWindowAttentionLayer of the target's cache cannot be rolled"),
        ("hybrid", 64, r"InklingForCausalLM loses.*in a static cache.*Leave cache_implementation"),
    ],
)
def test_static_keys_beside_convolutions_that_cannot_be_exact_are_refused(kind, window, message):
    """A window that is overwritten; positions that the host takes from a length that moves on."""
    target, prompt = inkling([kind] * 4, window), pad_left(make_prompts([6]))
    cache = StaticCache(target.config, max_cache_len=40)
    with pytest.raises(ValueError, match=message):
        greedy(target, cache, prompt, assistant_model=make_drafter())
    assert int(cache.get_seq_length()) == 0


def test_time_steps_that_only_blocks_limit_are_refused():
    """Single tokens are not limited, so their states would be others than those of a block."""
    config = Zamba2Config(
        **SHARED | {"num_key_value_heads": 2},
        mamba_d_state=8,
        mamba_headdim=16,
        n_mamba_heads=4,
        layers_block_type=["mamba", "hybrid"] * 2,
        num_mem_blocks=1,
    )
    target = Zamba2ForCausalLM(config).eval()
    drafter = make_drafter()
    with pytest.raises(ValueError, match=r"time steps between 0.001 and inf in forwards over sev"):
        greedy(target, None, pad_left(make_prompts([6])), assistant_model=drafter)


@pytest.mark.parametrize("given", ["whole", "embeddings", "continuation"])
def test_a_static_cache_too_short_for_the_text_is_refused(given):
    """Whatever part of the prompt the ids are: `max_length` counts from them."""
    target, batch = make_target(), pad_left(make_prompts([6]))
    cache = StaticCache(target.config, max_cache_len=16)
    if given == "embeddings":
        batch = {"inputs_embeds": target.get_input_embeddings()(batch["input_ids"]).detach()}
    if given == "continuation":
        with torch.no_grad():
            target(batch["input_ids"][:, :4], cache=cache)
        batch["input_ids"] = batch["input_ids"][:, 4:]
    with pytest.raises(ValueError, match=r"holds 16 positions.*prompt of 6 with 20.*needs 25"):
        greedy(target, cache, batch, assistant_model=make_drafter())


@pytest.mark.parametrize("spare", [0, 1, 2, 5])
def test_a_static_cache_with_little_room_for_drafts_is_enough(spare):
    """Blocks shrink towards the end of the cache."""
    target, prompts = make_target(), make_prompts([6])
    expected = greedy(target, None, pad_left(prompts))
    drafter = script_rows(make_drafter(), [expected[0]], [4])
    cache = StaticCache(target.config, max_cache_len=25 + spare)
    found = greedy(target, cache, pad_left(prompts), assistant_model=drafter)
    assert torch.equal(found, expected)


def test_the_callers_kwargs_and_tensors_are_left_alone():
    target, prompts = make_target(), make_prompts([6, 9, 3])
    batch = pad_left(prompts)
    before = copy.deepcopy(batch)
    expected = greedy(target, None, batch)
    drafter = script_rows(make_drafter(), texts_of(expected, prompts), [4, 0, 2])
    greedy(target, None, batch, assistant_model=drafter)
    assert all(torch.equal(batch[name], before[name]) for name in batch)


@pytest.mark.parametrize(("make", "per_round"), [(make_target, 1), (hybrid_target, 2)])
@pytest.mark.parametrize(("num_right", "stops"), [([0, 0], True), ([4, 4], False)], ids=str)
def test_every_rank_runs_as_many_forwards_as_the_others(
    monkeypatch, make, per_round, num_right, stops
):
    """B063: whether its states have to be replayed, and its rows ended at different places."""
    target, prompts, rounds, calls = make(), make_prompts([6, 9]), [], []
    batch = pad_left(prompts)
    plain = greedy(target, None, batch)
    eos = int(plain[0, 9 + 6]) if stops else None
    # The first call measures whether a state survives.
    greedy(target, None, batch, assistant_model=make_drafter())

    def unfinished(this_peer_finished, synced_gpus, device):
        rounds.append(not this_peer_finished)
        return len(rounds) <= 25

    monkeypatch.setattr(target, "_has_unfinished_sequences", unfinished)
    target.register_forward_pre_hook(lambda module, args: calls.append(1))
    options = {"eos_token_id": eos, "pad_token_id": 0, "return_dict_in_generate": True}
    drafter = script_rows(make_drafter(), texts_of(plain, prompts), num_right)
    greedy(target, None, batch, assistant_model=drafter, synced_gpus=True, **options)
    assert sum(rounds) < 25
    assert len(calls) == 1 + 25 * per_round + 1

"""What the target's cache and the drafting context hold, round by round, of every kind."""

import copy

import pytest
import torch
from transformers import (
    DynamicCache,
    Lfm2Config,
    Lfm2ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    StaticCache,
)
from transformers.cache_utils import Cache, Fp8QuantizedLayer, QuantizedLayer
from transformers.models.qwen3_next import modeling_qwen3_next

from batches import make_prompts, pad_left, script_rows
from dspark_hf import collect_statistics
from tiny import make_drafter, make_target

NEW_TOKENS = 20
SHARED = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
    "initializer_range": 0.4,
}


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


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("fp8", "residual")])
@pytest.mark.parametrize("stops", [False, True])
def test_caches_of_all_rows_hold_what_was_committed(kind, stops):
    """
    B019, B041: after every round each row's columns equal those of a fresh forward over its text,
    and so does what comes back at the end.
    """
    make, make_cache = KINDS[kind]
    target, prompts = make(), make_prompts([6, 9, 3])
    batch, cache = pad_left(prompts), make_cache(target)
    plain = greedy(target, make_cache(target), batch)
    texts = texts_of(plain, prompts)
    eos = int(texts[0][len(prompts[0][0]) + 6]) if stops else None
    drafter = script_rows(make_drafter(), texts, [4, 0, 2])
    draft, checked = drafter.draft, []

    def checking(context, anchor_ids, **kwargs):
        lengths = context.lengths.tolist()
        held = columns(cache)
        rows = held[0][0].shape[0] if held else 0
        for i, length in enumerate(lengths if rows else []):
            text = kwargs["input_ids"][i : i + 1, -length - 1 : -1]
            # Static caches keep rows that have finished, so a row stays where it was.
            row = i
            if rows > len(lengths):
                row = next(r for r, t in enumerate(texts) if torch.equal(t[:length], text[0]))
            compare(target, text, held, row, target_window(target))
            checked.append(length)
        return draft(context, anchor_ids, **kwargs)

    drafter.draft = checking
    found = greedy(target, cache, batch, assistant_model=drafter, eos_token_id=eos, pad_token_id=0)
    if not stops:
        assert torch.equal(found, plain)
    assert len(checked) >= 3


def columns(cache):
    """Keys and values of every attention layer, cut to what is in use."""
    found = []
    for layer in cache.layers:
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if keys is None or keys.dim() != 4:
            continue
        if hasattr(layer, "max_cache_len"):
            used = min(int(layer.get_seq_length()), layer.max_cache_len)
            keys, values = keys[:, :, :used], values[:, :, :used]
        found.append((keys, values))
    return found


def target_window(target):
    return getattr(target.config, "sliding_window", None) or 1000


def compare(target, text, held, row, window):
    fresh = DynamicCache(config=target.config)
    with torch.no_grad():
        target(text, cache=fresh)
    for (keys, values), (wanted_keys, wanted_values) in zip(held, columns(fresh), strict=True):
        count = min(wanted_keys.shape[-2], keys.shape[-2])
        assert count >= min(text.shape[1], window - 1)
        close = {"atol": 1e-3, "rtol": 1e-3}
        torch.testing.assert_close(keys[row, :, -count:], wanted_keys[0, :, -count:], **close)
        torch.testing.assert_close(values[row, :, -count:], wanted_values[0, :, -count:], **close)


def test_a_state_that_is_lost_between_forwards_is_refused_before_compute(monkeypatch):
    """B044: a target whose recurrent layers start anew at every forward of several tokens."""
    target, rule = hybrid_target(), modeling_qwen3_next.torch_chunk_gated_delta_rule

    def forgetful(*args, initial_state=None, **kwargs):
        return rule(*args, initial_state=None, **kwargs)

    monkeypatch.setattr(modeling_qwen3_next, "torch_chunk_gated_delta_rule", forgetful)
    with pytest.raises(ValueError, match="loses its recurrent state"):
        greedy(target, None, pad_left(make_prompts([6])), assistant_model=make_drafter())


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

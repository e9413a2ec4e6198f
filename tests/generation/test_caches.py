"""Target caches: rolled back exactly, or refused with the reason."""

import pytest
import torch
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    MambaConfig,
    MambaForCausalLM,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
    StaticCache,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.cache_utils import Cache, DynamicLayer
from transformers.models.minimax.modeling_minimax import MiniMaxCache

from batches import make_prompts, pad_left, script_rows
from tiny import make_drafter, make_prompt, make_scripted, make_target

PROMPT = make_prompt(6)


def greedy(target, prompt=PROMPT, new_tokens=20, **options):
    return target.generate(prompt, max_new_tokens=new_tokens, do_sample=False, **options)


@pytest.mark.parametrize("family", ["qwen3", "gpt2", "mistral_swa", "gemma3"])
@pytest.mark.parametrize("num_right", range(5))
def test_cache_in_every_round_equals_a_fresh_forward(family, num_right):
    """B019, B049, B050: the target's cache and the drafter's context hold what was committed."""
    target = make_target(family)
    expected = greedy(target)
    drafter = make_scripted(make_drafter(), expected, num_right)
    cache, draft, rounds = DynamicCache(config=target.config), drafter.draft, []

    def checking(context, anchor_ids, **kwargs):
        ids = kwargs["input_ids"]
        committed = ids.shape[1] - 1
        rounds.append(committed)
        assert context.lengths.tolist() == [committed]
        assert all(layer.get_seq_length() == committed for layer in context.cache.layers)
        assert torch.equal(ids[:, -1], anchor_ids)
        fresh = DynamicCache(config=target.config)
        with torch.no_grad():
            target(ids[:, :-1], cache=fresh)
        for layer, wanted in zip(cache.layers, fresh.layers, strict=True):
            assert layer.get_seq_length() == committed
            torch.testing.assert_close(layer.keys, wanted.keys, atol=2e-4, rtol=1e-4)
            torch.testing.assert_close(layer.values, wanted.values, atol=2e-4, rtol=1e-4)
        return draft(context, anchor_ids, **kwargs)

    drafter.draft = checking
    assert torch.equal(greedy(target, assistant_model=drafter, cache=cache), expected)
    assert len(rounds) >= 3


@pytest.mark.parametrize("family", ["qwen3", "mistral_swa"])
@pytest.mark.parametrize("first_drafted", [False, True])
@pytest.mark.parametrize("second_drafted", [False, True])
def test_a_cache_can_be_handed_on(family, first_drafted, second_drafted):
    """B049: a second turn starts from the first turn's cache; a cold drafter keeps the text."""
    target = make_target(family)
    first = greedy(target, new_tokens=8)
    more = make_prompt(5, seed=9)
    expected = greedy(target, torch.cat((first, more), dim=1), new_tokens=12)
    cache = DynamicCache(config=target.config)
    assistant = {"assistant_model": make_scripted(make_drafter(), first, 3)}
    found = greedy(target, new_tokens=8, cache=cache, **(assistant if first_drafted else {}))
    assert torch.equal(found, first)
    drafter = make_scripted(make_drafter(), expected, 3)
    draft, positions = drafter.draft, []

    def recording(context, anchor_ids, **kwargs):
        positions.append((context.position, kwargs["input_ids"].shape[1] - 1))
        return draft(context, anchor_ids, **kwargs)

    drafter.draft = recording
    assistant = {"assistant_model": drafter}
    found = greedy(
        target,
        torch.cat((found, more), dim=1),
        new_tokens=12,
        cache=cache,
        **(assistant if second_drafted else {}),
    )
    assert torch.equal(found, expected)
    assert cache.get_seq_length() == expected.shape[1] - 1
    # Rows of the first turn are unknown to the drafter; those it has sit at their true positions.
    assert all(position == committed for position, committed in positions)
    assert bool(positions) == second_drafted


@pytest.mark.parametrize("implementation", ["offloaded", "offloaded_static"])
def test_an_offloaded_cache_on_a_cpu_is_refused_before_compute(implementation):
    """B053: there is nothing to offload from, and the host says so in terms of its build."""
    target = make_target("qwen3")
    calls = forwards(target)
    with pytest.raises(ValueError, match=rf"{implementation}.*target is on 'cpu'"):
        greedy(target, cache_implementation=implementation, assistant_model=make_drafter())
    assert not calls


class Stream:
    """Stands for a CUDA stream on a machine without one."""

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def wait_stream(self, stream):
        pass


@pytest.mark.parametrize("make_cache", [DynamicCache, StaticCache])
def test_an_offloaded_cache_is_exact_and_waited_for(monkeypatch, make_cache):
    """
    B053: rows are moved in the tensors that the host copies in the background, so every forward
    ends with these copies.
    """
    waited, target, prompts = [], make_target("qwen3"), make_prompts([6, 9, 3])
    monkeypatch.setattr(torch, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device=None: Stream())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: waited.append(1))
    length = {"max_cache_len": 40} if make_cache is StaticCache else {}
    batch = pad_left(prompts)
    expected = greedy(target, batch.pop("input_ids"), **batch)
    texts = [row[9 - p.shape[1] :] for row, p in zip(expected, prompts, strict=True)]
    cache = make_cache(config=target.config, offloading=True, **length)
    calls = forwards(target)
    found = greedy(
        target,
        pad_left(prompts)["input_ids"],
        cache=cache,
        assistant_model=script_rows(make_drafter(), texts, [4, 0, 2]),
        **batch,
    )
    assert torch.equal(found, expected)
    # The prefill moves nothing.
    assert len(waited) == len(calls) - 1


def forwards(target):
    """Counts forwards of a target from now on."""
    calls = []
    target.register_forward_pre_hook(lambda module, args: calls.append(1))
    return calls


@pytest.mark.parametrize("says", [{"is_croppable": False}, {}])
def test_a_cache_that_cannot_be_rolled_back_is_refused_before_compute(says):
    """B053: by its own word, or a subclass that only inherits `crop` and may hold more."""
    kind = type("OneWayLayer", (DynamicLayer,), says)
    target = make_target("qwen3")
    calls = forwards(target)
    cache = Cache(layers=[kind() for _ in range(4)])
    with pytest.raises(ValueError, match=r"OneWayLayer.*cannot be rolled back"):
        greedy(target, cache=cache, assistant_model=make_drafter())
    assert not calls


@pytest.mark.parametrize(
    "make_cache", [MiniMaxCache, lambda: EncoderDecoderCache(DynamicCache(), DynamicCache())]
)
def test_a_cache_that_keeps_more_than_its_layers_is_refused_before_compute(make_cache):
    """B053: states beside the layers would not be rolled back."""
    target = make_target("qwen3")
    calls = forwards(target)
    with pytest.raises(ValueError, match="Cache keeps more than its layers"):
        greedy(target, cache=make_cache(), assistant_model=make_drafter())
    assert not calls


def test_a_target_that_returns_no_cache_is_refused():
    """B054."""
    config = OpenAIGPTConfig(vocab_size=97, n_positions=64, n_embd=32, n_layer=4, n_head=2)
    with pytest.raises(ValueError, match="works with none or one of its own"):
        greedy(OpenAIGPTLMHeadModel(config).eval(), assistant_model=make_drafter())


def test_no_cache_is_refused_before_compute():
    """B054."""
    target = make_target("qwen3")
    calls = forwards(target)
    with pytest.raises(ValueError, match="use_cache=False"):
        greedy(target, use_cache=False, assistant_model=make_drafter())
    assert not calls


def test_a_target_without_attention_is_refused_before_compute():
    """B160: its cache has no length to roll back to."""
    config = MambaConfig(vocab_size=97, hidden_size=32, num_hidden_layers=4, state_size=4)
    target = MambaForCausalLM(config).eval()
    calls = forwards(target)
    with pytest.raises(ValueError, match=r"MambaForCausalLM.*recurrent state"):
        greedy(target, assistant_model=make_drafter())
    assert not calls


def test_encoder_decoder_target_is_refused_before_compute():
    """B046, B157."""
    config = T5Config(
        vocab_size=97, d_model=32, d_kv=16, d_ff=48, num_layers=2, num_heads=2,
        decoder_start_token_id=0,
    )  # fmt: skip
    target = T5ForConditionalGeneration(config).eval()
    calls = forwards(target)
    with pytest.raises(ValueError, match="encoder-decoder"):
        greedy(target, assistant_model=make_drafter())
    assert not calls

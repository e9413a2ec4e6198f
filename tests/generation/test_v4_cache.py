"""The cache of a DeepSeek-V4 target goes back to exactly what it was before a rejected draft."""

import random

import pytest
import torch
from transformers import DynamicCache
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING
from transformers.models.deepseek_v4.modeling_deepseek_v4 import (
    DeepseekV4CSACache,
    DeepseekV4HCACache,
)

from dspark_hf.generation import v4_cache
from dspark_hf.generation.v4_cache import RewindableHCALayer, rewindable
from tiny_v4 import HEAVY_RATE, SPARSE_RATE, WINDOW, make_v4_target

TOLERANCE = 5e-5
STATES = ("buffer_kv", "buffer_gate", "compressed_kv", "overlap_kv", "overlap_gate")


@pytest.fixture(scope="module")
def target():
    return make_v4_target()


@torch.no_grad()
def run(target, cache, tokens):
    return target(tokens, cache=cache, use_cache=True).logits


def make_tokens(length, rows=1, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 97, (rows, length), generator=generator)


def tensors_of(layer):
    """Every tensor and counter of a cache layer, by name; what is absent is not listed."""
    # A plain sliding layer between forwards keeps what a forward needs, as every other does.
    found = {"keys": layer.keys[:, :, -WINDOW + 1 :], "length": layer.cumulative_length}
    for state in STATES:
        for name, value in getattr(layer, state, {}).items():
            if value is not None:
                found[f"{state}.{name}"] = value
    for name, value in getattr(layer, "entry_count", {}).items():
        found[f"entry_count.{name}"] = value
    return found


def assert_same_state(cache, expected):
    for layer, fresh in zip(cache.layers, expected.layers, strict=True):
        found, wanted = tensors_of(layer), tensors_of(fresh)
        # An empty compressor is None before the first forward and empty after it.
        wanted = {n: v for n, v in wanted.items() if n in found or v is None or v.numel()}
        assert found.keys() == wanted.keys()
        for name, value in found.items():
            if isinstance(value, int):
                assert value == wanted[name], name
            else:
                torch.testing.assert_close(value, wanted[name], atol=TOLERANCE, rtol=0, msg=name)


def start(target, prompt):
    """A prefilled cache of the host, ready to record."""
    cache = DynamicCache(config=target.config)
    run(target, cache, prompt)
    return cache


def check_rounds(target, rounds, prompt_length, rows=1, seed=0, width=6):
    """Rounds of `width` positions of which a random number is kept, against fresh caches."""
    chance = random.Random(seed)
    committed = make_tokens(prompt_length, rows, seed)
    cache = start(target, committed)
    with rewindable(cache):
        cache.activate_past_recording()
        for number in range(rounds):
            run(target, cache, make_tokens(width, rows, 100 + number))
            kept = chance.randint(0, width)
            cache.crop(-width)
            assert cache.get_seq_length() == committed.shape[1]
            # The round again with what is accepted, and something rejected behind it.
            block = make_tokens(width, rows, 500 + number)
            run(target, cache, block)
            cache.crop(-(width - kept))
            committed = torch.cat((committed, block[:, :kept]), dim=1)
            fresh = start(target, committed)
            assert_same_state(cache, fresh)
            probe = make_tokens(3, rows, 900 + number)
            found = run(target, cache, probe)
            cache.crop(-3)
            torch.testing.assert_close(
                found, run(target, fresh, probe), atol=TOLERANCE, rtol=0, msg=f"round {number}"
            )
    return committed.shape[1]


@pytest.mark.parametrize("seed", [0, 1])
def test_random_rollbacks_equal_a_fresh_cache(target, seed):
    """B041, B043, B044: thirty rounds, past the window and many compression boundaries."""
    length = check_rounds(target, rounds=30, prompt_length=5, seed=seed)
    assert length > 4 * max(WINDOW, HEAVY_RATE)


def test_rollbacks_from_a_prompt_of_one_token(target):
    """Before anything is compressed: the first window closes inside a round."""
    check_rounds(target, rounds=6, prompt_length=1, seed=2)


def test_several_rows_in_lock_step(target):
    check_rounds(target, rounds=8, prompt_length=7, rows=3, seed=3)


@pytest.mark.parametrize("kept", range(2 * HEAVY_RATE + 1))
def test_every_accepted_length_around_every_boundary(target, kept):
    """Blocks longer than the window and than two compression windows."""
    width = 2 * HEAVY_RATE
    prompt, block = make_tokens(SPARSE_RATE + 1), make_tokens(width, seed=8)
    cache = start(target, prompt)
    with rewindable(cache):
        cache.activate_past_recording()
        run(target, cache, block)
        cache.crop(-(width - kept))
        assert_same_state(cache, start(target, torch.cat((prompt, block[:, :kept]), dim=1)))


def test_forwards_add_up_until_the_crop(target):
    """Processors may run the target twice: everything since the last crop can be taken back."""
    prompt, first, second = make_tokens(9), make_tokens(5, seed=1), make_tokens(6, seed=2)
    cache = start(target, prompt)
    with rewindable(cache):
        cache.activate_past_recording()
        whole = torch.cat((run(target, cache, first), run(target, cache, second)), dim=1)
        expected = run(target, start(target, prompt), torch.cat((first, second), dim=1))
        torch.testing.assert_close(whole, expected, atol=TOLERANCE, rtol=0)
        cache.crop(-9)
        assert_same_state(cache, start(target, torch.cat((prompt, first[:, :2]), dim=1)))


def test_the_host_layers_come_back_with_the_state_that_was_reached(target):
    """No object of the caller is replaced or left in a state that the host cannot use."""
    prompt, block, more = make_tokens(20), make_tokens(6, seed=1), make_tokens(7, seed=2)
    cache = start(target, prompt)
    layers = list(cache.layers)
    with rewindable(cache):
        assert [type(layer) for layer in cache.layers] != [type(layer) for layer in layers]
        cache.activate_past_recording()
        run(target, cache, block)
        cache.crop(-2)
        for layer in cache.layers:
            layer.record_past = False
    assert all(layer is own for layer, own in zip(cache.layers, layers, strict=True))
    fresh = start(target, torch.cat((prompt, block[:, :4]), dim=1))
    assert_same_state(cache, fresh)
    torch.testing.assert_close(
        run(target, cache, more), run(target, fresh, more), atol=TOLERANCE, rtol=0
    )


def test_a_failure_midway_leaves_what_was_settled(target):
    """A forward that breaks after some layers: every layer goes back by itself."""
    prompt = make_tokens(20)
    cache = start(target, prompt)
    broken = target.model.layers[2].mlp.register_forward_pre_hook(lambda *args: 1 / 0)
    with rewindable(cache):
        cache.activate_past_recording()
        try:
            with pytest.raises(ZeroDivisionError):
                run(target, cache, make_tokens(6, seed=1))
        finally:
            broken.remove()
        for layer in cache.layers:
            layer.crop(-(layer.get_seq_length() - 20))
        assert_same_state(cache, start(target, prompt))


def test_a_layer_says_what_it_cannot_take_back(target):
    """The host's own layers say they can be cropped and are wrong; ours is never silently wrong."""
    cache = start(target, make_tokens(20))
    with rewindable(cache):
        layer = cache.layers[1]
        with pytest.raises(RuntimeError, match=r"2 positions .* 0 were recorded"):
            layer.crop(-2)
        cache.activate_past_recording()
        run(target, cache, make_tokens(3))
        with pytest.raises(RuntimeError, match=r"4 positions .* 3 were recorded"):
            layer.crop(-4)
        with pytest.raises(ValueError, match="negative number, got 3"):
            layer.crop(3)
        layer.crop(-3)
        assert layer.get_seq_length() == 20


def test_the_hosts_own_rollback_is_wrong(target):
    """Why this module exists: the day this fails, it can go."""
    prompt, block = make_tokens(4), make_tokens(3, seed=1)
    cache, probe = start(target, prompt), make_tokens(4, seed=2)
    run(target, cache, block)
    assert all(layer.is_croppable for layer in cache.layers)
    for layer in cache.layers:
        layer.crop(-2)
    fresh = start(target, torch.cat((prompt, block[:, :1]), dim=1))
    assert (run(target, cache, probe) - run(target, fresh, probe)).abs().max() > 0.01


def test_the_host_keeps_building_its_own_caches(target):
    """Classes of cache layers register themselves with the host; ours must not."""
    assert DYNAMIC_LAYER_TYPE_MAPPING["heavily_compressed_attention"] is DeepseekV4HCACache
    assert DYNAMIC_LAYER_TYPE_MAPPING["compressed_sparse_attention"] is DeepseekV4CSACache
    cache = DynamicCache(config=target.config)
    assert not any(isinstance(layer, RewindableHCALayer) for layer in cache.layers)


def test_other_caches_are_left_alone():
    cache = DynamicCache()
    with rewindable(cache):
        assert cache.layers == []
    with rewindable(None):
        pass


@pytest.mark.parametrize("mutant", ["overlap", "entries", "buffer", "window"])
def test_every_part_of_the_state_matters(target, monkeypatch, mutant):
    """Leaving out one part of the rollback is seen by the comparison above."""
    if mutant == "overlap":
        monkeypatch.setattr(v4_cache.RewindableCSALayer, "_restore_overlap", lambda *args: None)
    else:
        crop = RewindableHCALayer.crop

        def wrong(self, tokens_to_remove):
            entries, buffers = dict(self.entry_count), dict(self.buffer_kv)
            keys = self.keys
            crop(self, tokens_to_remove)
            if mutant == "entries":
                self.entry_count = entries
            elif mutant == "buffer":
                self.buffer_kv = buffers
            else:
                self.keys = self.values = keys[:, :, -WINDOW + 1 :]

        monkeypatch.setattr(RewindableHCALayer, "crop", wrong)
    with pytest.raises((AssertionError, RuntimeError)):
        check_rounds(target, rounds=12, prompt_length=5)

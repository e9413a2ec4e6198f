"""Scores, logits, hidden states, attentions and caches come back as plain decoding returns them."""

import functools

import pytest
import torch

from tiny import FAMILIES, make_drafter, make_prompt, make_scripted, make_target

PROMPT = make_prompt(6)
NEW_TOKENS = 14
EVERYTHING = {
    "return_dict_in_generate": True,
    "output_scores": True,
    "output_logits": True,
    "output_hidden_states": True,
    "output_attentions": True,
}


@functools.cache
def plain(family, new_tokens=NEW_TOKENS, eos=None, implementation=None):
    return make_target(family, attention="eager").generate(
        PROMPT,
        max_new_tokens=new_tokens,
        do_sample=False,
        repetition_penalty=1.2,
        eos_token_id=eos,
        cache_implementation=implementation,
        **EVERYTHING,
    )


def drafted(family, num_right, new_tokens=NEW_TOKENS, eos=None, implementation=None):
    drafter = make_scripted(make_drafter(), plain(family).sequences, num_right)
    return make_target(family, attention="eager").generate(
        PROMPT,
        max_new_tokens=new_tokens,
        do_sample=False,
        repetition_penalty=1.2,
        eos_token_id=eos,
        cache_implementation=implementation,
        assistant_model=drafter,
        **EVERYTHING,
    )


def assert_same(found, expected):
    assert torch.equal(found.sequences, expected.sequences)
    for name in ("scores", "logits"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), **CLOSE)
    for name in ("hidden_states", "attentions"):
        for step, wanted in zip(getattr(found, name), getattr(expected, name), strict=True):
            assert len(step) == len(wanted)
            for state, wanted_state in zip(step, wanted, strict=True):
                assert state.shape == wanted_state.shape
                torch.testing.assert_close(state, wanted_state, **CLOSE)


CLOSE = {"atol": 2e-4, "rtol": 1e-4}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("num_right", range(5))
def test_every_field_equals_plain_decoding(family, num_right):
    """B104: lengths, shapes and values, past the sliding window too."""
    assert_same(drafted(family, num_right), plain(family))


@pytest.mark.parametrize("num_right", [0, 2, 4])
def test_fields_end_where_the_text_ends(num_right):
    """B022, B104: a stop token inside a block cuts every field."""
    eos = int(plain("qwen3").sequences[0, 9])
    expected = plain("qwen3", eos=eos)
    assert expected.sequences.shape[1] < 6 + NEW_TOKENS
    assert_same(drafted("qwen3", num_right, eos=eos), expected)


@pytest.mark.parametrize("family", ["qwen3", "mistral_swa"])
def test_cache_is_that_of_plain_decoding(family):
    """B019: every committed token but the last, same values, usable afterwards."""
    expected = plain(family)
    for num_right in range(5):
        found = drafted(family, num_right)
        for layer, wanted in zip(found.cache.layers, expected.cache.layers, strict=True):
            assert layer.get_seq_length() == wanted.get_seq_length() == 6 + NEW_TOKENS - 1
            torch.testing.assert_close(layer.keys, wanted.keys, **CLOSE)
            torch.testing.assert_close(layer.values, wanted.values, **CLOSE)
            assert not getattr(layer, "record_past", False)


def test_static_cache_fields():
    """B042, B104: attentions span the fixed width, as in plain decoding."""
    expected = plain("qwen3", implementation="static")
    for num_right in (0, 2, 4):
        assert_same(drafted("qwen3", num_right, implementation="static"), expected)


@pytest.mark.parametrize("places", [[0, 3, 9], -1], ids=str)
def test_hidden_states_of_some_layers(places):
    """B104: what was not asked for is `None`, in every step; there is no ninth."""
    options = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True}
    target = make_target("qwen3")
    expected = target.generate(PROMPT, output_hidden_states=places, **options)
    drafter = make_scripted(make_drafter(), expected.sequences, 2)
    found = target.generate(PROMPT, output_hidden_states=places, assistant_model=drafter, **options)
    for step, wanted in zip(found.hidden_states, expected.hidden_states, strict=True):
        assert [state is None for state in step] == [state is None for state in wanted]
        states = [state for state in step if state is not None]
        assert len(states) == (2 if places != -1 else 1)
        wanted = [state for state in wanted if state is not None]
        torch.testing.assert_close(states, wanted, **CLOSE)


def test_nothing_is_returned_that_was_not_asked_for():
    """B104: the taps do not leak into the user's hidden states."""
    output = make_target("qwen3").generate(
        PROMPT,
        max_new_tokens=8,
        do_sample=False,
        assistant_model=make_drafter(),
        return_dict_in_generate=True,
    )
    for name in ("scores", "logits", "hidden_states", "attentions"):
        assert getattr(output, name) is None
    assert output.statistics.new_tokens == 8

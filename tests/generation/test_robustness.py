"""What a caller can do to a call: long rotary types, exceptions, targets run by callbacks."""

import pytest
import torch
from transformers import DynamicCache

from dspark_hf import collect_statistics
from tiny import make_drafter, make_prompt, make_scripted, make_target

PROMPT = make_prompt(6)

ROPES = {
    "dynamic": {
        "rope_type": "dynamic",
        "factor": 2.0,
        "rope_theta": 1e4,
        "original_max_position_embeddings": 16,
    },
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "original_max_position_embeddings": 16,
        "short_factor": [1.0] * 8,
        "long_factor": [4.0] * 8,
    },
    "yarn": {
        "rope_type": "yarn",
        "factor": 2.0,
        "rope_theta": 1e4,
        "original_max_position_embeddings": 16,
    },
}


@pytest.mark.parametrize("kind", ROPES)
@pytest.mark.parametrize("num_right", [None, 0, 1, 2, 3, 4])
def test_rotary_frequencies_that_depend_on_the_length(kind, num_right):
    """B051: exact over the boundary; drafts go on where they can."""

    def target():
        length = 16 if kind == "dynamic" else 32
        rope = dict(ROPES[kind])
        return make_target("llama", rope_parameters=rope, max_position_embeddings=length)

    options = {"max_new_tokens": 40, "do_sample": False}
    expected = target().generate(PROMPT, **options)
    drafter = make_drafter()
    if num_right is not None:
        drafter = make_scripted(drafter, expected, num_right)
    with collect_statistics() as statistics:
        output = target().generate(PROMPT, assistant_model=drafter, **options)
    assert torch.equal(output, expected)
    if num_right == 4:
        assert statistics.accepted > (4 if kind == "dynamic" else 20)


class Stop:
    """A streamer that fails at its n-th value."""

    def __init__(self, at):
        self.left = at

    def put(self, value):
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt

    def end(self):
        pass


@pytest.mark.parametrize("family", ["qwen3", "mistral_swa", "gemma3"])
@pytest.mark.parametrize("num_right", [0, 2, 4])
@pytest.mark.parametrize("at", [2, 5, 9])
def test_a_failing_streamer_leaves_the_callers_cache_as_plain_decoding_does(family, num_right, at):
    """B034, B049: same length, no drafts in it, and good to go on from."""
    target = make_target(family)
    options = {"max_new_tokens": 20, "do_sample": False}
    text = target.generate(PROMPT, **options)
    lengths = []
    for assistant in (None, make_scripted(make_drafter(), text, num_right)):
        cache = DynamicCache(config=target.config)
        with pytest.raises(KeyboardInterrupt):
            target.generate(
                PROMPT, cache=cache, streamer=Stop(at), assistant_model=assistant, **options
            )
        lengths.append(cache.get_seq_length())
        assert not any(getattr(layer, "record_past", False) for layer in cache.layers)
        seen = text[:, : lengths[-1] + 1]
        left = text.shape[1] - seen.shape[1]
        again = target.generate(seen, cache=cache, max_new_tokens=left, do_sample=False)
        assert torch.equal(again, text)
    assert lengths[0] == lengths[1]


@pytest.mark.parametrize("at", [1, 4, 8])
def test_a_failing_criterion_leaves_a_sound_cache(at):
    """B034: at most what plain decoding holds, and good to go on from."""
    target = make_target("qwen3")
    text = target.generate(PROMPT, max_new_tokens=20, do_sample=False)
    cache, calls = DynamicCache(config=target.config), []

    def failing(input_ids, scores, **kwargs):
        calls.append(1)
        if len(calls) == at:
            raise RuntimeError("stop here")
        return torch.tensor([False])

    with pytest.raises(RuntimeError, match="stop here"):
        target.generate(
            PROMPT,
            cache=cache,
            max_new_tokens=20,
            do_sample=False,
            stopping_criteria=[failing],
            assistant_model=make_scripted(make_drafter(), text, 3),
        )
    length = cache.get_seq_length()
    assert 6 <= length <= 6 + at - 1
    again = target.generate(
        text[:, : length + 1], cache=cache, max_new_tokens=25 - length, do_sample=False
    )
    assert torch.equal(again, text)


@pytest.mark.parametrize("rows", [1, 2])
def test_callbacks_may_run_the_target(rows):
    """B103: whatever batch size they run it with."""
    target = make_target("qwen3")
    text = target.generate(PROMPT, max_new_tokens=12, do_sample=False)

    def criterion(input_ids, scores, **kwargs):
        target(input_ids.repeat(rows, 1))
        return torch.tensor([False])

    drafter = make_scripted(make_drafter(), text, 3)
    output = target.generate(
        PROMPT,
        max_new_tokens=12,
        do_sample=False,
        stopping_criteria=[criterion],
        assistant_model=drafter,
    )
    assert torch.equal(output, text)

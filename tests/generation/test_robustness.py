"""What a caller can do to a call: long rotary types, exceptions, targets run by callbacks."""

import pytest
import torch
from transformers import DynamicCache, Phi3Config, Phi3ForCausalLM

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


@pytest.mark.parametrize("kind", ["longrope", "default"])
@pytest.mark.parametrize("num_right", [None, 0, 1, 2, 3, 4])
def test_a_target_that_gives_up_its_cache(kind, num_right):
    """B041: Phi-3 reads the whole text again at its original length, whatever its rotary type."""
    rope = {"rope_type": "default", "rope_theta": 1e4}
    if kind == "longrope":
        rope = {**ROPES["longrope"], "original_max_position_embeddings": 24}
        rope["short_factor"] = [1.0 + 0.1 * i for i in range(8)]
        rope["long_factor"] = [1.0 + i for i in range(8)]

    def target():
        torch.manual_seed(0)
        config = Phi3Config(
            vocab_size=97,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=4,
            num_attention_heads=2,
            num_key_value_heads=1,
            eos_token_id=None,
            bos_token_id=None,
            pad_token_id=0,
            initializer_range=0.4,
            max_position_embeddings=96,
            original_max_position_embeddings=24,
            rope_parameters=rope,
        )
        return Phi3ForCausalLM(config).eval()

    options = {"max_new_tokens": 40, "do_sample": False, "return_dict_in_generate": True}
    options["output_hidden_states"] = True
    plain = target().generate(PROMPT, **options)
    expected = plain.sequences
    drafter = make_drafter()
    if num_right is not None:
        drafter = make_scripted(drafter, expected, num_right)
    positions, draft = [], drafter.draft

    def recording(context, *args, **kwargs):
        positions.append((context.position, kwargs["input_ids"].shape[1] - 1))
        return draft(context, *args, **kwargs)

    drafter.draft = recording
    with collect_statistics() as statistics:
        output = target().generate(PROMPT, assistant_model=drafter, **options)
    assert torch.equal(output.sequences, expected)
    for step, wanted in zip(output.hidden_states, plain.hidden_states, strict=True):
        for state, wanted_state in zip(step, wanted, strict=True):
            torch.testing.assert_close(state, wanted_state, atol=2e-4, rtol=1e-4)
    assert output.cache.get_seq_length() == expected.shape[1] - 1
    # The drafter's context goes on where it was, on both sides of the switch.
    assert all(held == committed for held, committed in positions)
    if num_right == 4:
        assert statistics.accepted > 20


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


def stop_token():
    """A text and a token that first comes up in the middle of a block."""
    target, prompt = make_target("qwen3"), make_prompt(6, seed=8)
    text = target.generate(prompt, max_new_tokens=20, do_sample=False)
    return target, prompt, text, int(text[0, 9])


@pytest.mark.parametrize("num_right", range(5))
def test_constraints_are_not_asked_what_follows_the_stop_token(num_right):
    """B036, B039: a grammar has no answer there, and plain decoding does not ask."""
    target, prompt, text, eos = stop_token()

    def allowed(batch_id, ids):
        assert eos not in ids[6:].tolist()
        return list(range(97))

    options = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": eos}
    expected = target.generate(prompt, prefix_allowed_tokens_fn=allowed, **options)
    drafter = make_scripted(make_drafter(), text, num_right)
    output = target.generate(
        prompt, prefix_allowed_tokens_fn=allowed, assistant_model=drafter, **options
    )
    assert torch.equal(output, expected)


@pytest.mark.parametrize("new_tokens", [1, 2, 5, 18])
def test_constraints_are_not_asked_past_the_last_token(new_tokens):
    """B026, B036: a script that ends where the text ends."""
    target, prompt, text, _ = stop_token()
    script = text[0, : 6 + new_tokens].tolist()
    output = target.generate(
        prompt,
        max_new_tokens=new_tokens,
        do_sample=False,
        prefix_allowed_tokens_fn=lambda batch_id, ids: [script[len(ids)]],
        assistant_model=make_drafter(),
    )
    assert output[0].tolist() == script


def test_sampling_under_a_mask_that_ends_with_the_text():
    """B036: everything is forbidden behind the stop token, where no token is drawn."""
    target, prompt, _, eos = stop_token()

    def mask(input_ids, scores):
        ended = bool((input_ids[:, 6:] == eos).any())
        return torch.full_like(scores, -torch.inf) if ended else scores

    for seed in range(10):
        torch.manual_seed(seed)
        target.generate(
            prompt,
            max_new_tokens=20,
            do_sample=True,
            eos_token_id=eos,
            logits_processor=[mask],
            assistant_model=make_drafter(),
        )


def test_no_token_to_draw_is_said_clearly():
    """B009: also at the first token."""
    with pytest.raises(ValueError, match="allow no token"):
        make_target("qwen3").generate(
            PROMPT,
            max_new_tokens=4,
            do_sample=True,
            logits_processor=[lambda ids, scores: torch.full_like(scores, -torch.inf)],
            assistant_model=make_drafter(),
        )


def test_dola_is_refused():
    """B061: not ignored."""
    with pytest.raises(ValueError, match="dola_layers='low'"):
        make_target("qwen3").generate(
            PROMPT, max_new_tokens=4, dola_layers="low", assistant_model=make_drafter()
        )


def test_a_threshold_in_the_call_outranks_the_drafters_policy():
    """B094: setting it selects it."""
    target, drafter = make_target("qwen3"), make_drafter()
    drafter.generation_config.dspark_verification = "full"
    options = {"max_new_tokens": 12, "do_sample": False, "assistant_model": drafter}
    with collect_statistics() as statistics:
        target.generate(PROMPT, dspark_confidence_threshold=0.99999, **options)
    assert set(statistics.verify_lengths) == {0}


def test_a_compiled_drafter_is_still_a_drafter():
    """B107: recognised behind the wrapper."""
    target = make_target("qwen3")
    expected = target.generate(PROMPT, max_new_tokens=8, do_sample=False)
    compiled = torch.compile(make_drafter(), backend="eager")
    output = target.generate(PROMPT, max_new_tokens=8, do_sample=False, assistant_model=compiled)
    assert torch.equal(output, expected)


def test_taps_that_saw_nothing_are_named():
    """B107: a target that was compiled before may skip hooks."""
    from dspark_hf.generation.taps import TargetTaps

    with (
        TargetTaps(make_target("qwen3"), [0, 2]) as taps,
        pytest.raises(ValueError, match="without its tapped layers being seen"),
    ):
        taps.take()

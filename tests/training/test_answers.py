"""Answers written in batches are the answers of single rows."""

import re

import pytest
import torch
from transformers import GenerationConfig

from dspark_hf.training import answers as answers_module
from dspark_hf.training.answers import (
    SamplingOptions,
    answer_batch,
    converse,
    invent_prompts,
    stop_token_ids,
)
from dspark_hf.training.generation_fields import ALONE, REFUSED, SET_ASIDE, WHOLE
from dspark_hf.training.growing_cache import growing_cache
from small_tokenizer import PLAIN, REWRITING, THINKING, make_tokenizer
from tiny import make_target

GREEDY = SamplingOptions(temperature=0.0, max_new_tokens=40)


def make_stopping_target(family="qwen3", stops=(2, 11, 17)):
    target = make_target(family, vocab_size=80)
    target.generation_config.eos_token_id = list(stops)
    target.generation_config.pad_token_id = 3
    return target


def alone(target, prompt, limit):
    """The host's own greedy answer to one prompt."""
    ids = torch.tensor([prompt])
    output = target.generate(ids, max_new_tokens=limit, do_sample=False)
    return output[0, len(prompt) :].tolist()


PROMPTS = [[9, 12, 31], [5, 44, 71, 20, 8, 33, 60], [7], [50, 50], [66, 21, 6, 12]]


def test_prompts_that_the_target_cannot_answer_are_errors():
    target = make_stopping_target()
    for prompt, message in (
        ([80], "token 80, and the target knows 80 tokens"),
        (
            [5] * 217,
            "217 prompt tokens and 40 new ones do not fit into the target's context of 256",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            answer_batch(target, make_tokenizer(), [[9], prompt], GREEDY)


def test_a_conversation_ends_where_the_context_does():
    """The turns before are kept; others of the batch go on."""
    turn, long = ({"role": "user", "content": text} for text in ("why", "why" * 80))
    rows = converse(
        make_stopping_target(stops=(2,)),
        make_tokenizer(),
        [[turn, long], [turn]],
        SamplingOptions(0.0, max_new_tokens=40),
    )
    assert [len(row["messages"]) for row in rows] == [2, 2]
    assert all(row["input_ids"] for row in rows)


@pytest.mark.parametrize("family", ["qwen3", "llama", "gpt2", "gemma3", "mistral_swa"])
def test_batches_answer_like_single_rows(family, monkeypatch):
    """Rows stop at different times, and strides are shorter than answers."""
    monkeypatch.setattr(answers_module, "_STRIDE", 5)
    target = make_target(family, vocab_size=80)
    # What each row says at another place of its answer ends it there, if not before.
    stops = {alone(target, prompt, 40)[2 + 6 * i] for i, prompt in enumerate(PROMPTS)}
    target.generation_config.eos_token_id = sorted(stops)
    answers = answer_batch(target, make_tokenizer(), PROMPTS, GREEDY)
    lengths = {len(answer.token_ids) for answer in answers}
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert answer.token_ids == alone(target, prompt, 40)
        stopped = answer.token_ids[-1] in stops
        assert answer.finish_reason == ("stop" if stopped else "length")
    assert len(lengths) > 1
    assert (growing_cache(target.config) is None) == (family in ("gemma3", "mistral_swa"))


WATERMARK = {"greenlist_ratio": 0.25, "bias": 4.0, "seeding_scheme": "selfhash"}
OBEYED = {
    "num_beams": 3,
    "guidance_scale": 1.5,
    "watermarking_config": WATERMARK,
    "encoder_repetition_penalty": 1.5,
    "encoder_no_repeat_ngram_size": 1,
    "no_repeat_ngram_size": 1,
    "min_length": 12,
    "forced_bos_token_id": 5,
    "bad_words_ids": [[8], [9]],
    "sequence_bias": [[[13], 5.0]],
    "min_new_tokens": 7,
    "begin_suppress_tokens": list(range(40)),
    "forced_eos_token_id": 2,
    "exponential_decay_length_penalty": (1, 1.5),
    "repetition_penalty": 1.5,
    "suppress_tokens": list(range(8, 40)),
}


@pytest.mark.parametrize("name", OBEYED)
def test_what_the_targets_generation_config_asks_for_is_obeyed(monkeypatch, name):
    """Prompts of many lengths and answers longer than a stride; without the field, other text."""
    monkeypatch.setattr(answers_module, "_STRIDE", 5)
    target = make_stopping_target()
    # What the shortest prompt's answer would go through ends answers.
    stop = alone(target, PROMPTS[2], 12)[3]
    target.generation_config.update(eos_token_id=[stop], pad_token_id=stop)
    without = [alone(target, prompt, 12) for prompt in PROMPTS]
    target.generation_config.update(**{name: OBEYED[name]})
    expected = [alone(target, prompt, 12) for prompt in PROMPTS]
    assert expected != without
    answers = answer_batch(target, make_tokenizer(), PROMPTS, SamplingOptions(0, max_new_tokens=12))
    assert [answer.token_ids for answer in answers] == expected


@pytest.mark.parametrize(
    "own",
    [
        {"use_cache": False},
        {"cache_implementation": "static"},
        {"cache_implementation": "dynamic"},
        {"prompt_lookup_num_tokens": 3},
        {"do_sample": True, "num_return_sequences": 2},
        {"return_dict_in_generate": True, "output_scores": True, "output_logits": True},
        {"output_hidden_states": True, "return_dict_in_generate": True},
        {"max_length": 9},
        {"prefill_chunk_size": 2},
        {"num_beams": 1, "guidance_scale": 1.0, "num_beam_groups": 1, "penalty_alpha": 0.0},
    ],
    ids=lambda own: "+".join(map(str, own)),
)
@pytest.mark.parametrize("prompts", [PROMPTS, PROMPTS[1:2]], ids=["batch", "row"])
def test_what_changes_no_token_stands_aside(monkeypatch, own, prompts):
    monkeypatch.setattr(answers_module, "_STRIDE", 5)
    target = make_stopping_target()
    expected = [alone(target, prompt, 12) for prompt in prompts]
    target.generation_config.update(**own)
    answers = answer_batch(target, make_tokenizer(), prompts, SamplingOptions(0, max_new_tokens=12))
    assert [answer.token_ids for answer in answers] == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stop_strings", ["a"]),
        ("max_time", 5.0),
        ("is_assistant", True),
        ("token_healing", True),
        ("penalty_alpha", 0.6),
        ("dola_layers", "high"),
        ("num_beam_groups", 2),
        ("constraints", ["x"]),
        ("force_words_ids", [[5]]),
        ("cache_implementation", "quantized"),
    ],
)
def test_what_cannot_be_obeyed_is_refused_before_the_target_works(monkeypatch, name, value):
    target = make_stopping_target()
    setattr(target.generation_config, name, value)
    monkeypatch.setattr(target, "generate", lambda *args, **kwargs: pytest.fail("it works"))
    said = f"The target's generation config has {name} {value!r}, which cannot be obeyed here"
    with pytest.raises(ValueError, match=re.escape(said)):
        answer_batch(target, make_tokenizer(), PROMPTS, GREEDY)


def test_every_field_of_a_generation_config_has_been_thought_of():
    """A host with new fields fails here: do they change what a batch in strides says?"""
    each_step = {
        *("temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff"),
        *("eta_cutoff", "repetition_penalty", "suppress_tokens", "remove_invalid_values"),
        *("renormalize_logits", "do_sample", "max_new_tokens"),
    }
    special_tokens = {"bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"}
    of_beams = {"early_stopping", "length_penalty", "diversity_penalty", "low_memory"}
    of_assistants = {
        *("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_ensemble_weight"),
        *("assistant_confidence_threshold", "assistant_lookbehind", "target_lookbehind"),
        *("max_matching_ngram_size", "speculation_type"),
    }
    of_speed = {
        *("max_cache_len", "compile_config", "disable_compile", "prefill_chunk_size"),
        *("continuous_batching_config", "_from_model_config", "transformers_version"),
    }
    known = each_step | special_tokens | of_beams | of_assistants | of_speed
    tables = [SET_ASIDE, WHOLE, ALONE, REFUSED]
    assert set(GenerationConfig().to_dict()) | {"return_dict_in_generate"} == known.union(*tables)
    assert {*WHOLE, *ALONE} <= set(OBEYED)


@pytest.mark.parametrize("limit", [1, 5, 6, 12])
def test_limits_that_are_no_multiple_of_the_stride(monkeypatch, limit):
    monkeypatch.setattr(answers_module, "_STRIDE", 5)
    target = make_stopping_target(stops=(2,))
    options = SamplingOptions(0.0, max_new_tokens=limit)
    for prompt, answer in zip(
        PROMPTS, answer_batch(target, make_tokenizer(), PROMPTS, options), strict=True
    ):
        assert answer.token_ids == alone(target, prompt, limit)


def test_the_growing_cache_holds_what_the_dynamic_one_does(monkeypatch):
    """Across growths of the buffer."""
    from dspark_hf.training import growing_cache as module

    monkeypatch.setattr(module, "_GROWTH", 3)
    target = make_target()
    ids = torch.tensor(PROMPTS[1]).expand(3, -1)
    caches = [
        target.generate(
            ids,
            cache=cache,
            max_new_tokens=14,
            do_sample=False,
            return_dict_in_generate=True,
            pad_token_id=0,
        ).cache
        for cache in (growing_cache(target.config), None)
    ]
    grown, dynamic = caches
    assert grown.get_seq_length() == dynamic.get_seq_length()
    kept = torch.tensor([2, 0])
    for cache in caches:
        cache.batch_select_indices(kept)
    for one, other in zip(grown.layers, dynamic.layers, strict=True):
        assert torch.equal(one.keys, other.keys)
        assert torch.equal(one.values, other.values)


def test_sampling_has_an_effect_and_follows_the_seed():
    target, tokenizer = make_stopping_target(), make_tokenizer()
    options, draws = SamplingOptions(1.5, max_new_tokens=12), []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        draws.append(answer_batch(target, tokenizer, PROMPTS, options))
    assert draws[0] == draws[1] != draws[2]


def test_nothing_that_ends_an_answer_is_an_error():
    target, tokenizer = make_target(vocab_size=80), make_tokenizer()
    assert stop_token_ids(target, tokenizer) == {2}
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="no answer would ever end"):
        answer_batch(target, tokenizer, PROMPTS, GREEDY)


def test_a_prompt_without_tokens_is_an_error():
    with pytest.raises(ValueError, match="A prompt has no tokens"):
        answer_batch(make_stopping_target(), make_tokenizer(), [[4], []], GREEDY)


TALKS = [
    [
        {"role": "system", "content": "sys"},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "thrown away"},
        {"role": "user", "content": "two"},
    ],
    [{"role": "user", "content": "single"}],
]


def test_every_user_turn_is_answered_anew_by_the_target():
    tokenizer, target = make_tokenizer(), make_stopping_target(stops=range(2, 12))
    rows = converse(target, tokenizer, TALKS, GREEDY)
    assert [m["role"] for m in rows[0]["messages"]] == [
        "system",
        "user",
        "assistant",
        "user",
        "assistant",
    ]
    assert rows[0]["messages"][2]["content"] != "thrown away"
    for row in rows:
        start, end = row["assistant_spans"][-1]
        assert end == len(row["input_ids"])
        assert row["input_ids"][start:] == alone(target, row["input_ids"][:start], 40)


def test_system_turns_stay_where_they_are():
    """Also behind an answer and before two questions in a row, each of which is answered."""
    roles = ["assistant", "user", "assistant", "system", "user", "user", "system"]
    turns = [{"role": role, "content": str(i)} for i, role in enumerate(roles)]
    target = make_stopping_target(stops=range(2, 12))
    (row,) = converse(target, make_tokenizer(), [turns], GREEDY)
    asked = [m["content"] for m in row["messages"] if m["role"] != "assistant"]
    assert asked == ["1", "3", "4", "5"]
    assert [m["role"] for m in row["messages"]] == (
        ["user", "assistant", "system", "user", "assistant", "user", "assistant"]
    )


def test_a_conversation_ends_with_an_answer_that_was_cut_off():
    options = SamplingOptions(0.0, max_new_tokens=3)
    rows = converse(make_stopping_target(stops=(2,)), make_tokenizer(), TALKS, options)
    assert [row["finish_reason"] for row in rows] == ["length", "length"]
    assert [m["role"] for m in rows[0]["messages"]] == ["system", "user", "assistant"]


@pytest.mark.parametrize(("template", "kept"), [(PLAIN, 2), (REWRITING, 1)])
def test_earlier_answers_are_learned_where_the_prompt_repeats_them(template, kept, monkeypatch):
    """Templates may rewrite earlier turns; what the target did not see written is not learned."""
    tokenizer = make_tokenizer(template)
    answers = iter(["hello<e>", "bye<e>"])

    def answer(target, tokenizer, prompts, options):
        ids = tokenizer(next(answers))["input_ids"]
        return [answers_module.Answer(ids, "stop") for _ in prompts]

    monkeypatch.setattr(answers_module, "answer_batch", answer)
    (row,) = converse(make_stopping_target(), tokenizer, TALKS[:1], GREEDY)
    texts = [tokenizer.decode(row["input_ids"][a:b]) for a, b in row["assistant_spans"]]
    assert texts == ["hello<e>", "bye<e>"][-kept:]


def test_the_template_is_told_about_thinking():
    tokenizer, target = make_tokenizer(THINKING), make_stopping_target()
    (row,) = converse(target, tokenizer, TALKS[1:], GREEDY, enable_thinking="on")
    start = row["assistant_spans"][0][0]
    assert tokenizer.decode(row["input_ids"][:start]) == "<u>single<e><a>on"


def test_invented_prompts_continue_the_users_place():
    tokenizer, target = make_tokenizer(), make_stopping_target(stops=range(2, 20))
    torch.manual_seed(3)
    prompts = list(invent_prompts(target, tokenizer, ["Why ", "", "", "How "], 30))
    assert prompts
    assert all("<" not in text for text in prompts)
    tokenizer.chat_template = "nothing"
    with pytest.raises(ValueError, match="does not render a user's message"):
        list(invent_prompts(target, tokenizer, [""]))

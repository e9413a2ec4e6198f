"""The loop: what is run, in which order, under which options, and what is not run again."""

import json
import math

import pytest
import torch
from scripted_drafters import GAMMA, NEW_TOKENS, SETS, greedy_texts, make_pair, make_right_for

from dspark_hf.evaluation import provenance, running
from dspark_hf.evaluation.prompts import PromptSet
from dspark_hf.evaluation.running import EvaluationSettings, evaluate
from tiny import make_drafter, make_eagle3

GREEDY = EvaluationSettings((0.0,), NEW_TOKENS)
ONE = [PromptSet("gsm8k", ("buoy",), "gsm8k.jsonl")]


@pytest.fixture(scope="module")
def pair():
    target, tokenizer = make_pair()
    return target, tokenizer, greedy_texts(target, tokenizer)


def run(pair, output, drafters=None, settings=GREEDY, sets=SETS, **options):
    target, tokenizer, texts = pair
    drafters = drafters or {"oracle": make_right_for(GAMMA, texts)}
    return evaluate(target, tokenizer, drafters, sets, output, settings, "tiny", **options)


def lines(output):
    return [json.loads(line) for line in (output / "records.jsonl").read_text().splitlines()]


def result_of(results, name, temperature=0.0):
    (found,) = (
        r for r in results["results"] if (r["drafter"], r["temperature"]) == (name, temperature)
    )
    return found


def test_accepted_length_of_drafters_whose_figures_are_known(pair, tmp_path):
    """B149, B150, B154: one token from the prefill, then three rounds of five, or five of three."""
    texts = pair[2]
    drafters = {
        "oracle": make_right_for(GAMMA, texts, seed=1),
        "half": make_right_for(2, texts, seed=2),
        "wrong": make_right_for(0, texts, seed=3),
    }
    results = run(pair, tmp_path, drafters)
    oracle, half, wrong = (result_of(results, name) for name in drafters)
    for figures in (*oracle["sets"], oracle["macro"], oracle["pooled"]):
        assert figures["accepted_length"] == 5.0
        assert figures["accepted_length_without_bonus"] == 4.0
        assert figures["verify_rate"] == 1.0
        assert figures["accepted_length_error"] == 0.0
    assert half["macro"]["accepted_length"] == 3.0
    # The last of five rounds has room for two draft tokens only.
    assert half["sets"][0]["verify_rate"] == pytest.approx(15 / (18 + 5))
    assert half["pooled"]["prefix_acceptance"] == [1, 1, 0, 0]
    *conditional, unknown = half["pooled"]["conditional_acceptance"]
    assert conditional == [1, 1, 0]
    assert math.isnan(unknown)
    assert half["pooled"]["verified_at"] == [25, 25, 20, 20]
    assert wrong["macro"]["accepted_length"] == 1.0
    for result in (oracle, half, wrong):
        assert result["pooled"]["num_prompts"] == result["pooled"]["same_text_as_plain"] == 5
        assert [figures["name"] for figures in result["sets"]] == ["gsm8k", "mt-bench"]


@pytest.mark.parametrize("offset", [2, 4, 5, 6])
def test_a_stop_token_ends_the_count(pair, tmp_path, offset):
    """B150: inside an accepted run no bonus follows; a bonus that is a stop token counts."""
    target, tokenizer, texts = pair
    new = texts[-1][0, len("kelp") :].tolist()
    assert new[offset] not in new[:offset]
    target.generation_config.eos_token_id = new[offset]
    try:
        results = run((target, tokenizer, texts), tmp_path, sets=[PromptSet("a", ("kelp",), "")])
    finally:
        target.generation_config.eos_token_id = None
    figures = result_of(results, "oracle")["pooled"]
    assert figures["new_tokens"] == offset + 1
    assert figures["rounds"] == math.ceil(offset / 5)
    assert figures["accepted_length"] == offset / math.ceil(offset / 5)


def test_every_mode_meets_every_prompt_once_and_takes_turns_to_be_first(pair, tmp_path):
    """B153: interleaved prompt by prompt, each prompt once per temperature."""
    settings = EvaluationSettings((0.0, 1.0), 6)
    results = run(pair, tmp_path, {"random": make_drafter(seed=4)}, settings)
    rows = lines(tmp_path)
    drafter = results["drafters"][0]["id"]
    calls = [(row["set_name"], row["index"], row["temperature"]) for row in rows]
    assert calls[::2] == calls[1::2]
    assert len(set(calls)) == len(calls) / 2 == 10
    order = [row["drafter"] for row in rows if row["set_name"] == "mt-bench"]
    assert order == ["plain", drafter] * 2 + [drafter, "plain"] * 2 + ["plain", drafter] * 2
    assert all(row["seconds"] > 0 for row in rows)


def test_sampling_is_shaped_by_the_temperature_alone(pair, tmp_path):
    """The target's own top-k and penalties are not the paper's protocol."""
    target, _, texts = pair
    drafters = {"random": make_drafter(seed=4)}
    settings = EvaluationSettings((0.0, 1.0), 8)
    run(pair, tmp_path / "a", drafters, settings, ONE)
    own = {"do_sample": True, "top_k": 1, "min_p": 0.9, "repetition_penalty": 9.0}
    own |= {"top_h": 0.05, "suppress_tokens": [5, 6, 7, 8, 9], "min_new_tokens": 4}
    target.generation_config.update(**own)
    try:
        run(pair, tmp_path / "b", drafters, settings, ONE)
    finally:
        target.generation_config = type(target.generation_config)(pad_token_id=0)
    before, after = lines(tmp_path / "a"), lines(tmp_path / "b")
    assert [row["tokens"] for row in before] == [row["tokens"] for row in after]
    greedy, sampled = ([r["tokens"] for r in before if r["temperature"] == t] for t in (0.0, 1.0))
    assert greedy != sampled
    assert greedy[0] == texts[0][0, 4:12].tolist()


def test_draws_are_seeded_by_prompt_and_leave_the_callers_generator_alone(pair, tmp_path):
    """The same seed gives the same texts, another one others."""
    drafters, settings = {"random": make_drafter(seed=4)}, EvaluationSettings((1.0,), 8)
    twice = [PromptSet("gsm8k", ("buoy", "buoy"), "")]
    state = torch.get_rng_state()
    run(pair, tmp_path / "a", drafters, settings, twice)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(3)
    run(pair, tmp_path / "b", drafters, settings, twice)
    run(pair, tmp_path / "c", drafters, EvaluationSettings((1.0,), 8, seed=1), ONE)
    first, again, other = ([row["tokens"] for row in lines(tmp_path / x)] for x in "abc")
    assert first == again
    plain, random_, random_again, plain_again = first
    assert plain != plain_again
    assert random_ != random_again
    assert other[0] != plain


def test_an_interrupted_run_continues_where_it_stopped(pair, tmp_path, monkeypatch):
    """Nothing is answered twice, and the figures are those of a run in one go."""
    drafters = {"half": make_right_for(2, pair[2])}
    steps = []

    def interrupt(done, total, name):
        steps.append((done, total, name))
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(pair, tmp_path, drafters, on_step=interrupt)
    assert steps == [(i, 10, "gsm8k") for i in range(4)]
    assert len(lines(tmp_path)) == 3
    with open(tmp_path / "records.jsonl", "a", encoding="utf-8") as file:
        file.write('{"drafter": "pla')  # Killed while it wrote.
    timed, calls = running.timed_generate, []
    monkeypatch.setattr(running, "timed_generate", lambda *args: calls.append(args) or timed(*args))
    results = run(pair, tmp_path, drafters)
    assert len(calls) == 7 + 2  # Two of them warm up.
    assert result_of(results, "half")["macro"]["accepted_length"] == 3.0
    assert len(lines(tmp_path)) == 10
    calls.clear()
    # As text: unknown figures are NaN, which equals nothing.
    assert str(run(pair, tmp_path, drafters)) == str(results)
    assert not calls


def test_prompts_and_drafters_can_be_added_and_a_report_covers_what_was_asked(pair, tmp_path):
    """Settings are fixed; what is evaluated under them can grow."""
    texts = pair[2]
    drafters = {"half": make_right_for(2, texts, seed=2)}
    assert len(run(pair, tmp_path, drafters, sets=ONE)["results"][0]["sets"]) == 1
    drafters["oracle"] = make_right_for(GAMMA, texts)
    results = run(pair, tmp_path, drafters)
    assert [r["pooled"]["num_prompts"] for r in results["results"]] == [5, 5]
    assert len(lines(tmp_path)) == 15
    assert run(pair, tmp_path, drafters, sets=ONE)["results"][1]["pooled"]["num_prompts"] == 1


def test_without_plain_decoding_there_is_no_speed_up(pair, tmp_path):
    """Half the work for accepted lengths alone."""
    settings = EvaluationSettings((0.0,), NEW_TOKENS, with_plain=False)
    figures = run(pair, tmp_path, settings=settings, sets=ONE)["results"][0]["macro"]
    assert figures["accepted_length"] == 5.0
    assert math.isnan(figures["speedup"])
    assert figures["tokens_per_second"] > 0
    assert {row["drafter"] for row in lines(tmp_path)} != {"plain"}


def test_whole_blocks_are_verified_unless_a_threshold_is_asked_for(pair, tmp_path):
    """The drafter's own policy is overruled, in both directions."""
    drafter = make_right_for(GAMMA, pair[2])
    drafter.generation_config.dspark_confidence_threshold = 1.0
    drafter.generation_config.dspark_max_verify_tokens = 1
    figures = run(pair, tmp_path / "full", {"d": drafter}, sets=ONE)["results"][0]["pooled"]
    assert figures["accepted_length"] == 5.0
    settings = EvaluationSettings((0.0,), NEW_TOKENS, confidence_threshold=1.0)
    drafter.generation_config.dspark_confidence_threshold = None
    figures = run(pair, tmp_path / "cut", {"d": drafter}, settings, ONE)["results"][0]["pooled"]
    assert figures["accepted_length"] == 1.0
    assert figures["verified_at"] == []


def test_more_training_makes_another_drafter(pair, tmp_path):
    """Answers of the old weights are not taken for the new ones'."""
    drafter = make_drafter(seed=4)
    settings, ids = EvaluationSettings((0.0,), 4), []
    for change in (
        lambda: None,
        lambda: drafter.norm.weight.data.mul_(1.5),
        lambda: setattr(drafter.generation_config, "num_assistant_tokens", 1),
    ):
        change()
        ids.append(run(pair, tmp_path, {"d": drafter}, settings, ONE)["drafters"][0]["id"])
    assert len(set(ids)) == 3
    # What an evaluation overrules, and what only says where a model comes from.
    drafter.generation_config.dspark_confidence_threshold = 0.5
    drafter.config.backbone_config._name_or_path = drafter.config._name_or_path = "elsewhere"
    drafter.config.backbone_config.id2label = {0: "label"}
    assert provenance.drafter_facts("d", drafter)["id"] == ids[-1]
    drafter.config.backbone_config.rms_norm_eps *= 2
    assert provenance.drafter_facts("d", drafter)["id"] != ids[-1]
    assert [row["drafter"] for row in lines(tmp_path)] == ["plain", *ids]


def test_every_kind_of_drafter_is_told_from_the_others(pair, tmp_path):
    """The paper's comparison: with and without heads, and the autoregressive baseline."""
    drafters = {
        "markov": make_drafter(),
        "rnn": make_drafter(markov="rnn"),
        "dflash": make_drafter(markov=None, confidence=False),
        "eagle3": make_eagle3(),
    }
    results = run(pair, tmp_path, drafters, EvaluationSettings((0.0,), 4), ONE)
    methods = [fact["method"] for fact in results["drafters"]]
    assert methods == ["DSpark (vanilla)", "DSpark (rnn)", "DFlash", "Eagle3"]
    assert [fact["num_layers"] for fact in results["drafters"]] == [2, 2, 2, 1]
    assert all(result["pooled"]["same_text_as_plain"] == 1 for result in results["results"])
    known = [result["pooled"]["confidence"] is not None for result in results["results"]]
    assert known == [True, True, False, False]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"max_new_tokens": 8}, "max_new_tokens is 16 there and 8 now"),
        ({"seed": 7}, "seed is 980406 there and 7 now"),
        ({"confidence_threshold": 0.5}, "confidence_threshold is 0.0 there and 0.5 now"),
    ],
)
def test_other_settings_need_another_folder(pair, tmp_path, changed, message):
    """Named with both values, before anything runs."""
    run(pair, tmp_path, sets=ONE)
    settings = EvaluationSettings(**{"temperatures": (0.0,), "max_new_tokens": 16, **changed})
    with pytest.raises(ValueError, match=message):
        run(pair, tmp_path, settings=settings)
    other = make_pair()[0]
    with torch.no_grad():
        other.model.norm.weight.mul_(2)
    with pytest.raises(ValueError, match="target_fingerprint is"):
        run((other, *pair[1:]), tmp_path, {"d": make_drafter()})
    assert len(lines(tmp_path)) == 2


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        ([PromptSet("gsm8k", ("sloop",), "")], "another text as prompt 1 of set 'gsm8k'"),
        ([PromptSet("gsm8k", (), "")], r"without prompts: \['gsm8k'\]"),
        ([SETS[0], SETS[0]], "a name of its own"),
        ([], "at least one set"),
        ([PromptSet("long", ("a", "b" * 250), "")], "'long', prompt 2: 250 prompt tokens and 16"),
    ],
)
def test_sets_that_cannot_be_run_end_before_any_compute(pair, tmp_path, sets, message, monkeypatch):
    """Named, with what to do."""
    run(pair, tmp_path, sets=[PromptSet("gsm8k", ("buoy",), "")])
    monkeypatch.setattr(running, "timed_generate", None)
    with pytest.raises(ValueError, match=message):
        run(pair, tmp_path, sets=sets)


@pytest.mark.parametrize(
    ("drafters", "message"),
    [
        ({}, "no drafter"),
        ({"far": make_drafter(num_target_layers=9)}, "'far': .*decoder layers is 4.*expects 9"),
        ({"a": make_drafter(), "b": make_drafter()}, "'a' and 'b' are the same"),
    ],
)
def test_drafters_that_do_not_fit_end_before_any_compute(pair, tmp_path, drafters, message):
    """The drafter is named, and its folder is not even made."""
    target, tokenizer, _ = pair
    with pytest.raises(ValueError, match=message):
        evaluate(target, tokenizer, drafters, SETS, tmp_path / "out", GREEDY, "tiny")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperatures": ()}, "at least one"),
        ({"temperatures": (-1.0,)}, "each 0"),
        ({"temperatures": (1.0, 1.0)}, "each one once"),
        ({"max_new_tokens": 1}, "nothing to draft"),
        ({"confidence_threshold": 1.5}, "between 0 and 1"),
    ],
)
def test_impossible_settings(settings, message):
    """Values that mean nothing are refused where they are given."""
    with pytest.raises(ValueError, match=message):
        EvaluationSettings(**settings)

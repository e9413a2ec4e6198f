"""Data folders: resumed ones equal uninterrupted ones, and nothing is lost or mixed."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from dspark_hf.training import collecting
from dspark_hf.training.collecting import (
    FILES,
    PROVENANCE,
    CollectionPlan,
    collect,
    read_prompts,
)
from dspark_hf.training.data import MalformedRow
from small_runs import limited_files
from small_tokenizer import THINKING, make_tokenizer
from tiny import make_target

PLAN = CollectionPlan("tiny", (0.0, 1.0), max_new_tokens=12, validation_share=0.4, seed=3)
QUESTIONS = ["one", "two", "three", "four", "five", "six", "two"]


def make_stopping_target(seed=0):
    target = make_target(vocab_size=80, seed=seed)
    target.generation_config.eos_token_id = list(range(2, 12))
    target.generation_config.pad_token_id = 3
    return target


def make_penalising_target():
    target = make_stopping_target()
    target.generation_config.repetition_penalty = 1.2
    return target


def fill(folder, plan=PLAN, questions=QUESTIONS, tokenizer=None, sources=None, target=None, size=3):
    conversations = iter([[{"role": "user", "content": text}] for text in questions])
    return collect(
        target or make_stopping_target(),
        tokenizer or make_tokenizer(),
        conversations,
        folder,
        plan,
        batch_size=size,
        sources=sources or {"list": "prompts"},
    )


def contents(folder):
    return {name: (folder / name).read_text(encoding="utf-8") for name in FILES}


def rows_of(folder):
    return [json.loads(line) for text in contents(folder).values() for line in text.splitlines()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return folder, fill(folder)


def test_every_prompt_is_answered_once_at_each_temperature(whole):
    folder, figures = whole
    rows = rows_of(folder)
    asked = [(row["messages"][0]["content"], row["temperature"]) for row in rows]
    assert sorted(asked) == sorted((q, t) for q in QUESTIONS[:6] for t in (0.0, 1.0))
    assert figures["train_rows"] + figures["validation_rows"] == 12
    tokens = sum(b - a for row in rows for a, b in row["assistant_spans"])
    assert figures["train_answer_tokens"] + figures["validation_answer_tokens"] == tokens


def test_all_answers_to_a_prompt_are_on_one_side(whole):
    sides = [
        {json.loads(line)["messages"][0]["content"] for line in text.splitlines()}
        for text in contents(whole[0]).values()
    ]
    assert sides[0]
    assert sides[1]
    assert not sides[0] & sides[1]


def test_provenance_says_how_it_was_made(whole):
    facts = json.loads((whole[0] / PROVENANCE).read_text(encoding="utf-8"))
    assert facts["target"] == "tiny"
    assert facts["temperatures"] == [0.0, 1.0]
    assert facts["thinking"] is None
    assert facts["sources"] == {"list": "prompts"}
    assert (facts["batch_size"], facts["dtype"]) == (3, "float32")
    assert facts["stop_token_ids"] == list(range(2, 12))
    assert facts["generation_config"] == {}
    assert {"seed", "max_new_tokens", "chat_template_sha256", "versions"} <= set(facts)


@pytest.mark.parametrize("answers_before", [0, 1, 3])
@pytest.mark.parametrize("torn", [False, True])
def test_a_killed_run_goes_on_to_the_same_files(tmp_path, whole, monkeypatch, answers_before, torn):
    """Killed between batches or inside the writing of one; rows sampled at temperature 1 too."""
    converse, calls = collecting.converse, []

    def killed(*args, **kwargs):
        if len(calls) == answers_before:
            raise KeyboardInterrupt
        calls.append(args)
        return converse(*args, **kwargs)

    monkeypatch.setattr(collecting, "converse", killed)
    with pytest.raises(KeyboardInterrupt):
        fill(tmp_path)
    monkeypatch.setattr(collecting, "converse", converse)
    if torn and answers_before:
        for name in FILES:
            path = tmp_path / name
            content = path.read_bytes()
            path.write_bytes(content[: max(0, len(content) - 40)])
    assert fill(tmp_path) == whole[1]
    assert contents(tmp_path) == contents(whole[0])
    # A finished folder stays as it is, and nothing is asked again.
    monkeypatch.setattr(collecting, "converse", None)
    fill(tmp_path)
    assert contents(tmp_path) == contents(whole[0])


def test_a_full_disk_keeps_whole_rows(tmp_path, whole):
    with limited_files() as limit:
        limit(1000)
        with pytest.raises(OSError, match=r"too large.*rows before it are kept"):
            fill(tmp_path)
    fill(tmp_path)
    assert contents(tmp_path) == contents(whole[0])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"plan": CollectionPlan("tiny", (0.0,))}, r"temperatures \[0.0, 1.0\] there, \[0.0\] now"),
        ({"plan": CollectionPlan("other")}, "target 'tiny' there, 'other' now"),
        ({"tokenizer": make_tokenizer(THINKING)}, "chat_template_sha256"),
        ({"sources": {"other": "prompts"}}, "sources"),
        ({"size": 2}, "batch_size 3 there, 2 now"),
        ({"target": make_stopping_target().bfloat16()}, "dtype 'float32' there, 'bfloat16' now"),
        ({"target": make_stopping_target(seed=1)}, "target_weights '.*' there, '.*' now"),
        ({"target": make_penalising_target()}, r"generation_config .* 1\.2.* now"),
    ],
)
def test_a_folder_made_by_another_plan_is_not_added_to(tmp_path, change, named):
    fill(tmp_path, questions=QUESTIONS[:1])
    before = contents(tmp_path)
    with pytest.raises(ValueError, match=named):
        fill(tmp_path, **change)
    assert contents(tmp_path) == before


def test_a_generation_config_that_cannot_be_obeyed_leaves_no_folder(tmp_path):
    target = make_stopping_target()
    target.generation_config.stop_strings = ["x"]
    with pytest.raises(ValueError, match=r"has stop_strings \['x'\], which cannot be obeyed"):
        fill(tmp_path / "data", target=target)
    assert not (tmp_path / "data").exists()


def test_a_folder_of_an_earlier_version_says_what_it_does_not_know(tmp_path):
    fill(tmp_path, questions=QUESTIONS[:1])
    path = tmp_path / PROVENANCE
    facts = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({k: v for k, v in facts.items() if k != "dtype"}), encoding="utf-8")
    told = r'lacks dtype: an earlier version.*write into it .*"dtype": "float32"'
    with pytest.raises(ValueError, match=told):
        fill(tmp_path)
    path.write_text(json.dumps(facts), encoding="utf-8")
    fill(tmp_path)


def test_thinking_is_passed_on_and_recorded(tmp_path):
    """B133."""
    tokenizer = make_tokenizer(THINKING)
    plan = CollectionPlan("tiny", (0.0,), max_new_tokens=2, thinking=False)
    fill(tmp_path, plan, ["x"], tokenizer)
    (row,) = rows_of(tmp_path)
    assert tokenizer.decode(row["input_ids"][: row["assistant_spans"][0][0]]).endswith("<a>False")
    assert json.loads((tmp_path / PROVENANCE).read_text())["thinking"] is False


def test_both_files_are_there_even_if_one_side_is_empty(tmp_path):
    plan = CollectionPlan("tiny", (0.0,), max_new_tokens=2, validation_share=0.0)
    assert fill(tmp_path, plan, ["x"])["validation_rows"] == 0
    assert (tmp_path / FILES[1]).read_text() == ""


def write(path: Path, *lines):
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_rows_behind_a_malformed_one_are_read(tmp_path):
    path = write(
        tmp_path / "p.jsonl",
        '{"prompt": "a"}',
        "{",
        '{"turns": ["b", "c"]}',
        '{"messages": [{"role": "assistant", "content": "nobody asked"}]}',
        '{"prompt": "d"}',
        '{"messages": [{"role": "user", "content": "e"}, {"role": "tool", "content": "f"}]}',
        '{"prompt": "cut \\ud83d"}',
    )
    console = Console(record=True, width=200)
    texts = [turns[0]["content"] for turns in read_prompts([path], True, console)]
    assert texts == ["a", "b", "d"]
    report = console.export_text()
    assert "p.jsonl:2: not JSON" in report
    assert "p.jsonl:4: no user turn" in report
    assert "p.jsonl:6: a turn of a tool" in report
    assert "p.jsonl:7: not text: half of a character" in report
    with pytest.raises(MalformedRow, match=r"p\.jsonl:2"):
        list(read_prompts([path], False, console))

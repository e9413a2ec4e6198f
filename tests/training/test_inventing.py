"""Prompts by the target: different ones, the same again, and kept for a resumed run."""

import pytest

from dspark_hf.training import inventing
from dspark_hf.training.inventing import INVENTED, invented_prompts
from small_tokenizer import make_tokenizer
from tiny import make_target

STARTERS = ["", "a ", "b "]


def invent(folder, count=5, seed=1, starters=STARTERS, batch_size=4):
    target = make_target(vocab_size=80)
    target.generation_config.eos_token_id = list(range(2, 12))
    target.generation_config.pad_token_id = 3
    turns = invented_prompts(
        target, make_tokenizer(), count, starters, batch_size, seed, folder / "data"
    )
    return [conversation[0]["content"] for conversation in turns]


def test_invented_prompts_differ_and_are_the_same_again(tmp_path):
    first = invent(tmp_path / "1")
    assert len(set(first)) == len(first) == 5
    assert invent(tmp_path / "2") == first
    assert invent(tmp_path / "3", seed=2) != first


@pytest.mark.parametrize("lost", [0, 30, None])
def test_a_resumed_run_reads_what_was_written_and_makes_the_rest(tmp_path, monkeypatch, lost):
    """Whole, with a torn last line, and with one batch only of those that it takes."""
    first = invent(tmp_path, count=12)
    path = tmp_path / "data" / INVENTED
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    assert len(lines) > 1
    path.write_bytes(lines[0] if lost is None else whole[: len(whole) - lost])
    written = []

    def counted(*args, original=inventing.invent_prompts):
        written.append(args)
        return original(*args)

    monkeypatch.setattr(inventing, "invent_prompts", counted)
    assert invent(tmp_path, count=12) == first
    assert len(written) == {0: 0, 30: 1, None: len(lines) - 1}[lost]
    assert path.read_bytes() == whole


@pytest.mark.parametrize("change", [{"seed": 2}, {"starters": ["c "]}, {"batch_size": 3}])
def test_prompts_of_other_settings_are_not_mixed_in(tmp_path, change):
    invent(tmp_path)
    with pytest.raises(ValueError, match=r"invented\.jsonl:1 was invented with other starters"):
        invent(tmp_path, **change)


def test_a_target_that_invents_nothing_new_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(inventing, "invent_prompts", lambda *args: iter(["the same"]))
    with pytest.raises(ValueError, match="only 1 different prompts"):
        invent(tmp_path, count=2)

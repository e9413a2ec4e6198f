"""Sets from folders and from the Hub, and the chat template."""

import json
import sys
import types

import pytest
from test_stopping import character_tokenizer

from dspark_hf.evaluation.prompts import encode_prompt, read_folder, read_prompts
from dspark_hf.evaluation.tasks import DOMAINS, SHUFFLE_SEED, TASKS, load_tasks

REASON = "\nPlease reason step by step, and put your final answer within \\boxed{}."


def write(path, *rows):
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")


def test_a_folder_is_one_set_a_file(tmp_path):
    """First turns; names from the files; in the order asked for."""
    write(tmp_path / "b.jsonl", {"turns": ["one", "two"]}, {"turns": ["three"]})
    write(tmp_path / "a.jsonl", {"prompt": "four"})
    sets = read_folder(tmp_path)
    assert [(s.name, s.prompts) for s in sets] == [("a", ("four",)), ("b", ("one", "three"))]
    assert [s.name for s in read_folder(tmp_path, ["b", "a"])] == ["b", "a"]
    assert read_folder(tmp_path, ["b"], limit=1)[0].prompts == ("one",)


@pytest.mark.parametrize(
    ("row", "found"),
    [
        ("{}", "{}"),
        ("not json", "not JSON"),
        ('{"turns": []}', "turns"),
        ('{"turns": "no list"}', "no list"),
        ('{"turns": [""]}', "found ''"),
        ('{"turns": [null]}', "found None"),
        ('{"prompt": "  "}', "found '  '"),
        ('["text"]', "found list"),
        ("5", "found int"),
        (b'{"prompt": "\xff"}', "not UTF-8"),
        ('{"prompt": "cut \\ud83d"}', r"half of a character (\ud83d)"),
    ],
)
def test_a_row_without_text_is_named(tmp_path, row, found):
    """By file and line, with what was found."""
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"prompt": "fine"}\n\n' + (row if isinstance(row, bytes) else row.encode()))
    with pytest.raises(ValueError, match=r"bad\.jsonl:3: ") as raised:
        read_prompts(path)
    assert found in str(raised.value)
    assert read_prompts(path, limit=1) == ["fine"]


def test_folders_without_the_sets_asked_for(tmp_path):
    """What is there is listed."""
    with pytest.raises(ValueError, match="is not a folder"):
        read_folder(tmp_path / "none")
    with pytest.raises(ValueError, match="holds no"):
        read_folder(tmp_path)
    (tmp_path / "a.jsonl").write_text("\n")
    with pytest.raises(ValueError, match=r"has no set 'b'. It has: a\."):
        read_folder(tmp_path, ["b"])
    with pytest.raises(ValueError, match="has no prompts"):
        read_folder(tmp_path)


class Rows(list):
    """As much of a `datasets.Dataset` as is used."""

    def shuffle(self, seed):
        assert seed == SHUFFLE_SEED
        return Rows(reversed(self))

    def select(self, indices):
        return Rows(self[i] for i in indices)


@pytest.fixture
def hub(monkeypatch):
    """A `datasets` module with one short and one long row of every field that a set has."""
    fields = ("question", "problem", "question_content", "instruction")
    rows = Rows(
        {**dict.fromkeys(fields, text), "prompt": text, "starter_code": code, "input": more}
        for text, code, more in (("Why {x}?", "", ""), ("How?", "def f():", "the input"))
    )
    calls = []

    def load_dataset(*arguments, **options):
        calls.append((arguments, options))
        if "mt_bench" in arguments[0]:
            return Rows({"prompt": [row["prompt"], "second turn"]} for row in rows)
        return rows

    module = types.SimpleNamespace(load_dataset=load_dataset, calls=calls)
    monkeypatch.setitem(sys.modules, "datasets", module)
    return module


def test_the_nine_sets_are_worded_as_in_the_paper(hub):
    """Two rows, the second one first after shuffling."""
    sets = {prompt_set.name: prompt_set.prompts for prompt_set in load_tasks()}
    assert list(sets) == list(TASKS)
    for name in ("gsm8k", "math500", "aime25"):
        assert sets[name] == ("How?" + REASON, "Why {x}?" + REASON)
    for name in ("mbpp", "mt-bench", "arena-hard-v2"):
        assert sets[name] == ("How?", "Why {x}?")
    assert sets["alpaca"] == ("How?\n\nInput:\nthe input", "Why {x}?")
    assert sets["humaneval"][0].endswith("the tests:\n```python\nHow?\n```")
    with_code, without = sets["livecodebench"]
    assert "### Question:\nHow?\n\n### Format: Use the following code structure:" in with_code
    assert "```python\ndef f():\n```\n\n### Answer: (use the provided format" in with_code
    assert "Write your code in the following format:\n```python\n# YOUR CODE HERE\n```" in without
    assert without.startswith("You are an expert Python programmer.")
    assert [call[0][0] for call in hub.calls][:2] == ["openai/gsm8k", "HuggingFaceH4/MATH-500"]


def test_tasks_are_cut_to_what_is_asked_for(hub, monkeypatch):
    """By the caller's limit and by the protocol's."""
    assert load_tasks(["gsm8k"], limit=1)[0].prompts == ("How?" + REASON,)
    rows = Rows({"problem": str(i)} for i in range(45))
    monkeypatch.setattr(hub, "load_dataset", lambda *args, **kwargs: rows)
    (aime,) = load_tasks(["aime25"], limit=1000)
    assert len(aime.prompts) == TASKS["aime25"].max_samples == 30
    assert "MathArena/aime_2025" in aime.source


def test_unknown_tasks_and_an_unreachable_hub(hub, monkeypatch):
    """The known names are listed; a folder is the way out."""
    with pytest.raises(ValueError, match=r"Unknown task 'gsm9k'\. Known: gsm8k, math500.*folder"):
        load_tasks(["gsm9k", "gsm8k"])
    assert not hub.calls

    def unreachable(*arguments, **options):
        raise ConnectionError("no route")

    monkeypatch.setattr(hub, "load_dataset", unreachable)
    with pytest.raises(OSError, match=r"'mbpp'.*no route.*holds mbpp\.jsonl"):
        load_tasks(["mbpp"])
    monkeypatch.setattr(hub, "load_dataset", lambda *args, **kwargs: Rows([{"renamed": 1}]))
    with pytest.raises(OSError, match=r"'gsm8k'.*KeyError"):
        load_tasks(["gsm8k"])
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match="pip install datasets"):
        load_tasks(["gsm8k"])


def test_domains_are_the_nine_sets():
    """In the order of the table."""
    assert [name for names in DOMAINS.values() for name in names] == list(TASKS)


def test_the_chat_template_is_applied_without_a_system_prompt_and_without_thinking():
    """What reaches the template is one user turn."""
    tokenizer = character_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] }}0{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}1{% endif %}"
        "{% if enable_thinking is defined and not enable_thinking %}2{% endif %}"
    )
    inputs = encode_prompt(tokenizer, "sand", "cpu")
    assert tokenizer.decode(inputs["input_ids"][0]) == "user0sand12"
    raw = encode_prompt(tokenizer, "sand", "cpu", raw=True)
    assert tokenizer.decode(raw["input_ids"][0]) == "sand"
    with pytest.raises(ValueError, match="no tokens"):
        encode_prompt(tokenizer, "", "cpu", raw=True)

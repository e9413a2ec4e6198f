"""Rows of all kinds become tokens and masks; bad ones are named by file and line."""

import json

import pytest
from tokenizers import models, pre_tokenizers

from dspark_hf.training.data import (
    DraftDataset,
    Example,
    MalformedRow,
    collate,
    make_example,
    messages_of,
    usable_rows,
)
from small_tokenizer import END, MARKED, PLAIN, REWRITING, THINKING, make_tokenizer

TALK = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "sum?"},
    {"role": "assistant", "content": "four"},
]


def spans(example, tokenizer):
    """The learned runs as text."""
    runs, run = [], []
    for token, learned in [*zip(example.input_ids, example.loss_mask, strict=True), (0, False)]:
        if learned:
            run.append(token)
        elif run:
            runs.append(tokenizer.decode(run))
            run = []
    return runs


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_what_the_target_wrote_is_learned_and_nothing_else(template):
    """B132: by the real template, with and without generation marks; stop tokens included."""
    tokenizer = make_tokenizer(template)
    example = make_example({"messages": TALK}, "x:1", tokenizer, 1000)
    assert tokenizer.decode(example.input_ids) == (
        "be kind<e><u>hi<e><a>hello<e> <u>sum?<e><a>four<e> "
    )
    assert spans(example, tokenizer) == ["hello" + END, "four" + END]


def test_marks_and_no_marks_agree():
    first, second = (
        make_example({"messages": TALK}, "x:1", make_tokenizer(template), 1000)
        for template in (PLAIN, MARKED)
    )
    assert first == second


def test_a_template_that_rewrites_earlier_turns_is_refused():
    tokenizer = make_tokenizer(REWRITING)
    with pytest.raises(MalformedRow, match=r"^f\.jsonl:7: .*no generation marks.* turn 3 "):
        make_example({"messages": TALK}, "f.jsonl:7", tokenizer, 1000)
    one = make_example({"messages": TALK[1:3]}, "f.jsonl:7", tokenizer, 1000)
    assert spans(one, tokenizer) == ["hello" + END]


def test_an_answer_that_begins_like_the_template_is_learned():
    """Its first token merges with the template's last one, so tokens alone find no beginning."""
    tokenizer = make_tokenizer(PLAIN.replace("<a>", "<a> "))
    vocabulary = {**tokenizer.get_vocab(), "  ": 80}
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([])
    tokenizer.backend_tokenizer.model = models.BPE(vocabulary, [(" ", " ")], unk_token=".")
    turns = [TALK[1], {"role": "assistant", "content": "  hello"}, *TALK[3:]]
    example = make_example({"messages": turns}, "x:1", tokenizer, 1000)
    assert tokenizer.decode(example.input_ids) == "<u>hi<e><a>   hello<e> <u>sum?<e><a> four<e> "
    # Of three spaces the first two are one token, which begins in the prompt.
    assert spans(example, tokenizer) == [" hello<e>", "four<e>"]
    turns[1] = {"role": "assistant", "content": " "}
    with pytest.raises(MalformedRow, match="a turn needs a role and text"):
        make_example({"messages": turns}, "x:1", tokenizer, 1000)


def test_what_the_assistant_says_before_anybody_asks_is_context():
    """ShareGPT files often begin with its greeting."""
    tokenizer = make_tokenizer()
    for opening in ([], TALK[:1]):
        turns = [*opening, {"role": "assistant", "content": "welcome"}, *TALK[1:3]]
        example = make_example({"messages": turns}, "x:1", tokenizer, 1000)
        assert "<a>welcome<e> <u>hi<e><a>hello<e> " in tokenizer.decode(example.input_ids)
        assert spans(example, tokenizer) == ["hello" + END]


@pytest.mark.parametrize(
    ("turns", "learned"),
    [
        ([*TALK[1:2], TALK[3], TALK[4]], ["four"]),
        ([*TALK[1:3], TALK[2]], ["hello", "hello"]),
        ([*TALK[1:3], TALK[0], *TALK[3:]], ["hello", "four"]),
        ([*TALK[1:3], {"role": "tool", "content": "x"}, TALK[4]], ["hello", "four"]),
    ],
)
def test_turns_in_unusual_order(turns, learned):
    """Two of a kind in a row, a system turn or a tool's in between."""
    tokenizer = make_tokenizer()
    example = make_example({"messages": turns}, "x:1", tokenizer, 1000)
    assert spans(example, tokenizer) == [text + END for text in learned]


def test_a_conversation_that_the_template_refuses_is_named():
    refusing = "{{ raise_exception('no system role') }}"
    row = {"messages": [{"role": "user", "content": "hi"}]}
    with pytest.raises(MalformedRow, match=r"f:1: the chat template refuses it \(no system role"):
        make_example(row, "f:1", make_tokenizer(refusing), 50)


def test_template_options_are_passed_on():
    tokenizer = make_tokenizer(THINKING)
    with pytest.raises(MalformedRow):
        make_example({"messages": TALK[1:3]}, "x:1", tokenizer, 99, enable_thinking=7)
    marked = make_tokenizer(MARKED.replace("be", "{{ enable_thinking }}"))
    assert make_example({"messages": TALK}, "x:1", marked, 99, enable_thinking=7)


@pytest.mark.parametrize(
    "row",
    [
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]},
        {"messages": TALK[1:3], "prompt": "the same again"},
        {"conversation": TALK[1:3], "text": "the same, rendered"},
        {
            "messages": [
                {"role": None, "from": "human", "content": None, "value": "hi"},
                {"role": "assistant", "content": [{"type": "text", "text": "hel"}, "lo"]},
            ],
            "tools": [],
        },
    ],
)
def test_other_names_of_the_same_conversation(row):
    tokenizer = make_tokenizer()
    example = make_example(row, "x:1", tokenizer, 1000)
    assert tokenizer.decode(example.input_ids) == "<u>hi<e><a>hello<e> "


def test_prompts_and_turns_are_conversations_of_one_user_turn():
    turn = [{"role": "user", "content": "hi"}]
    for row in ({"prompt": "hi"}, {"turns": ["hi", "later"], "prompt": None}, {"prompt": turn}):
        assert messages_of(row, "x:1") == turn


def test_text_is_learned_whole_and_long_rows_are_cut():
    tokenizer = make_tokenizer()
    example = make_example({"text": "plain text"}, "x:1", tokenizer, 6)
    assert tokenizer.decode(example.input_ids) == "plain "
    assert example.loss_mask == [True] * 6


def test_prepared_rows_are_taken_as_they_are():
    row = {"input_ids": [5, 6, 7, 8, 9], "assistant_spans": [[1, 2], [3, 5]]}
    example = make_example(row, "x:1", make_tokenizer(), 4)
    assert example == Example([5, 6, 7, 8], [False, True, False, True])


BAD = {
    "{": "not JSON",
    "[1]": "expected a JSON object, found list",
    "[" * 5000: r"cannot be read \(maximum recursion",
    '{"n": ' + "1" * 5000 + "}": r"cannot be read \(Exceeds",
    '{"text": "cut \\ud83d"}': r"half of a character \(\\ud83d\)",
    '{"prompt": "cut", "messages": [{"role": "user", "content": "\\ude00"}]}': "half of a char",
    "{}": r"found \{\}",
    '{"txt": "a"}': r"found \{txt: str\}",
    '{"messages": []}': "needs a conversation",
    '{"messages": "hi"}': "needs a conversation",
    '{"messages": [{"role": "user", "content": ""}]}': "a turn needs a role and text",
    '{"messages": [{"role": "user", "content": [{"type": "image"}]}]}': "a turn needs a role",
    '{"messages": ["hi"]}': "a turn needs a role",
    '{"messages": [{"role": "assistant", "content": null}]}': "a turn needs a role",
    '{"messages": [{"role": "bot", "content": "hi"}]}': "the role 'bot'; known are assistant, ",
    '{"messages": [{"role": "user", "content": "hi", "tool_calls": [1]}]}': "`tool_calls` cannot",
    '{"prompt": "hi", "tools": [{"name": "search"}]}': "`tools` cannot be rendered",
    '{"turns": []}': "needs a conversation",
    '{"text": "  "}': "needs a conversation",
    '{"input_ids": [1, -2], "assistant_spans": []}': "list of token ids",
    '{"input_ids": [1, 900], "assistant_spans": []}': "token id 900, but the tokenizer has 80",
    '{"input_ids": [1, 2]}': r"must be \[start, end\] pairs .* found \[None\]",
    '{"input_ids": [1, 2], "assistant_spans": [[0, 3]]}': "within 2 tokens",
    '{"input_ids": [1, 2], "assistant_spans": [[1, 0]]}': "pairs in order",
    '{"input_ids": [1, 2], "assistant_spans": [[0, 1, 2]]}': "pairs in order",
    '{"input_ids": [1, 2], "assistant_spans": [["a", "b"]]}': "pairs in order",
    '{"input_ids": [1, 2], "assistant_spans": [0, 1]}': "pairs in order",
}


@pytest.mark.parametrize("line", BAD)
def test_malformed_rows_are_named_by_file_and_line(tmp_path, line):
    path, tokenizer = tmp_path / "rows.jsonl", make_tokenizer()
    good = json.dumps({"text": "good"})
    path.write_text(f"{good}\n\n{line}\n{good}\n", encoding="utf-8")

    def make(row, where):
        return make_example(row, where, tokenizer, 100)

    with pytest.raises(MalformedRow, match=rf"rows\.jsonl:3: .*{BAD[line]}"):
        list(usable_rows(path, make))
    skipped = []
    kept = list(usable_rows(path, make, skipped.append))
    # The rows behind the bad one are read all the same.
    assert len(kept) == 2
    assert len(skipped) == 1
    assert "rows.jsonl:3" in str(skipped[0])


def test_bytes_that_are_no_text_are_named(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"text": "a"}\n{"text": "\xff"}\n')
    with pytest.raises(MalformedRow, match=r"rows\.jsonl:2: not UTF-8"):
        list(usable_rows(path, lambda row, where: row))


def test_whole_emoji_and_byte_order_marks_are_text(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "\\ud83d\\ude00"}\n')
    assert list(usable_rows(path, lambda row, where: row)) == [{"text": "\N{GRINNING FACE}"}]


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no\.jsonl is not a file"):
        list(usable_rows(tmp_path / "no.jsonl", lambda row, where: row))


def test_batches_are_padded_on_the_right():
    dataset = DraftDataset([Example([4, 5, 6], [False, True, True]), Example([7], [True])])
    batch = collate([dataset[0], dataset[1]])
    assert batch["input_ids"].tolist() == [[4, 5, 6], [7, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["loss_mask"].tolist() == [[False, True, True], [True, False, False]]
    assert batch["index"].tolist() == [0, 1]

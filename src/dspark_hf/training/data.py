"""
Training rows: reading JSONL, chat templates, assistant masks, batches.

A row is one JSON object a line. Prepared rows, as `dspark-hf data` writes them, hold `input_ids`
and `assistant_spans` (the tokens that the target wrote, as `[start, end)` pairs). Rows with
`messages` or `conversations` are rendered with the chat template; rows with `text` are learned
whole.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from jinja2 import TemplateError
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from .._jsonl import MalformedRow, parse_row, read_lines

T = TypeVar("T")

_GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
# All that is read of a row.
ROW_FIELDS = (
    *("messages", "conversations", "conversation", "prompt", "turns", "text", "tools"),
    *("input_ids", "assistant_spans"),
)
_CONVERSATIONS = ROW_FIELDS[:3]
_ROLES = {name: name for name in ("system", "developer", "user", "assistant", "tool")}
# ShareGPT's names of the roles.
_ROLES |= {"human": "user", "gpt": "assistant", "chatgpt": "assistant"}
# What templates of thinking targets read beside the content.
_THOUGHTS = ("reasoning_content", "thinking")
_INSTEAD_OF_TOOLS = "give conversations without tools, or `input_ids` with `assistant_spans`."


@dataclass(frozen=True)
class Example:
    """
    Attributes:
        input_ids (`list[int]`): S tokens.
        loss_mask (`list[bool]`): which of them the target wrote.
    """

    input_ids: list[int]
    loss_mask: list[bool]


class DraftDataset(Dataset):
    """
    Examples in memory. `index` goes along, so that stored target states can be found.

    Attributes:
        examples (`list[Example]`): what it holds.
        revision (`str`, *optional*): commit of the dataset on the Hub that they were made of.
    """

    def __init__(self, examples: Sequence[Example], revision: str | None = None):
        self.examples = list(examples)
        self.revision = revision

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        example = self.examples[index]
        return {
            "input_ids": example.input_ids,
            "loss_mask": example.loss_mask,
            "index": index,
        }


def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """
    Pad on the right: `input_ids`, `attention_mask`, `loss_mask` `(B, S)`, and `index` `(B,)` if the
    rows have one.

    Raises:
        `ValueError`: the rows are no examples.
    """
    for row in rows:
        if "input_ids" not in row or len(row["input_ids"]) != len(row.get("loss_mask", ())):
            raise ValueError(
                "An example to train on holds `input_ids` and a `loss_mask` of the same length, as "
                f"`make_example` of dspark_hf.training.data makes them; found {', '.join(row)}."
            )
    width = max(len(row["input_ids"]) for row in rows)
    batch = {
        "input_ids": torch.zeros(len(rows), width, dtype=torch.long),
        "attention_mask": torch.zeros(len(rows), width, dtype=torch.long),
        "loss_mask": torch.zeros(len(rows), width, dtype=torch.bool),
    }
    if "index" in rows[0]:
        batch["index"] = torch.tensor([row["index"] for row in rows])
    for i, row in enumerate(rows):
        length = len(row["input_ids"])
        batch["input_ids"][i, :length] = torch.tensor(row["input_ids"])
        batch["attention_mask"][i, :length] = 1
        batch["loss_mask"][i, :length] = torch.tensor(row["loss_mask"])
    return batch


def usable_rows(
    source: str | Path | Iterable[tuple[str, dict[str, Any]]],
    make: Callable[[dict[str, Any], str], T],
    on_malformed: Callable[[MalformedRow], None] | None = None,
) -> Iterator[T]:
    """
    What `make` makes of rows, given each row and where it stands.

    Args:
        source: a JSONL file, whose rows are named `file:line`, or rows with their names, such as a
            [`DatasetRows`].
        on_malformed (`Callable`, *optional*):
            Told of rows that cannot be used, which are left out then; by default they are fatal.

    Raises:
        [`MalformedRow`]: see `on_malformed`.
        `FileNotFoundError`: there is no such file.
    """
    rows: Iterable[tuple[str, Any]]
    rows = read_lines(source) if isinstance(source, str | Path) else source
    for where, row in rows:
        try:
            made = make(parse_row(row, where) if isinstance(row, bytes) else row, where)
        except MalformedRow as error:
            if on_malformed is None:
                raise
            on_malformed(error)
        else:
            yield made


def messages_of(row: dict[str, Any], where: str) -> list[dict[str, str]]:
    """
    The conversation of a row in the host's form.

    Raises:
        [`MalformedRow`]: no known field, an empty conversation, a turn without text or with a role
            that is not known, or calls of tools.
    """
    turns = _first(row, _CONVERSATIONS)
    if turns is None:
        # Rows with the whole conversation often repeat its first message as `prompt`.
        turns = _first(row, ("prompt", "turns"))
        texts = [turns] if isinstance(turns, str) else turns
        if isinstance(texts, list) and texts and isinstance(texts[0], str):
            turns = [{"role": "user", "content": texts[0]}]
    if not isinstance(turns, list) or not turns:
        fields = ", ".join(f"{name}: {type(value).__name__}" for name, value in row.items())
        raise MalformedRow(
            f"{where}: needs a conversation: {', '.join(map('`{}`'.format, _CONVERSATIONS))} (a "
            "list of turns), `turns` (a list of texts) or `prompt` (either, or a text), none of "
            f"them empty; found {{{fields}}}. To train on, `text`, or `input_ids` with "
            "`assistant_spans`, will do as well."
        )
    if row.get("tools") not in (None, [], "", "[]"):
        raise MalformedRow(f"{where}: `tools` cannot be rendered; {_INSTEAD_OF_TOOLS}")
    return [_message(turn, where) for turn in turns]


def _message(turn: Any, where: str) -> dict[str, str]:
    fields = turn if isinstance(turn, dict) else {}
    role, content = _first(fields, ("role", "from")), _first(fields, ("content", "value"))
    if fields.get("tool_calls"):
        raise MalformedRow(f"{where}: `tool_calls` cannot be rendered; {_INSTEAD_OF_TOOLS}")
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) else part for part in content]
        is_text = all(isinstance(part, str) for part in parts)
        content = "".join(map(str, parts)) if is_text else None
    if not isinstance(role, str) or not isinstance(content, str) or not content.strip():
        raise MalformedRow(f"{where}: a turn needs a role and text, found {turn!r}.")
    if role not in _ROLES:
        raise MalformedRow(
            f"{where}: a turn has the role {role!r}; known are {', '.join(sorted(_ROLES))}."
        )
    thoughts = {name: turn[name] for name in _THOUGHTS if turn.get(name)}
    return {"role": _ROLES[role], "content": content, **thoughts}


def _first(row: dict[str, Any], names: Sequence[str]) -> Any:
    """What stands under the first of the names that has anything; tables fill up with `None`."""
    return next((row[name] for name in names if row.get(name) is not None), None)


def make_example(
    row: dict[str, Any],
    where: str,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    **template_options: Any,
) -> Example:
    """
    Tokens and assistant mask of a row, cut at `max_length`.

    The mask comes from the real template: its generation marks if it has them, otherwise each
    assistant turn is what rendering adds behind the prompt that generation would start from. What
    it said before the first user turn answers nobody, and is context only.

    Raises:
        [`MalformedRow`]: see [`messages_of`]; ids outside of the vocabulary; a conversation that
            the template refuses; or a template without marks that renders it differently
            once more turns follow.
    """
    if row.get("input_ids") is not None:
        ids, spans = _prepared(row, where, len(tokenizer))
    elif _is_text(row):
        ids = tokenizer(row["text"])["input_ids"]
        spans = [(0, len(ids))]
    else:
        messages = messages_of(row, where)
        try:
            ids, spans = _rendered(messages, where, tokenizer, template_options)
        except TemplateError as error:
            raise MalformedRow(f"{where}: the chat template refuses it ({error}).") from error
    mask = [False] * len(ids)
    for start, end in spans:
        mask[start:end] = [True] * (end - start)
    return Example(ids[:max_length], mask[:max_length])


def _is_text(row: dict[str, Any]) -> bool:
    """Tables of conversations often hold their rendering as `text` too, which has no mask."""
    text = row.get("text")
    return _first(row, _CONVERSATIONS) is None and isinstance(text, str) and bool(text.strip())


def _prepared(
    row: dict[str, Any], where: str, vocab_size: int
) -> tuple[list[int], list[tuple[int, int]]]:
    ids, spans = row["input_ids"], row.get("assistant_spans")
    if not isinstance(ids, list) or not all(isinstance(i, int) and i >= 0 for i in ids):
        raise MalformedRow(f"{where}: `input_ids` must be a list of token ids.")
    if ids and max(ids) >= vocab_size:
        raise MalformedRow(
            f"{where}: token id {max(ids)}, but the tokenizer has {vocab_size} tokens. The row was "
            "made with another tokenizer."
        )
    spans = spans if isinstance(spans, list) else [spans]
    in_order: list[Any] = [0]
    for span in spans:
        is_pair = isinstance(span, list) and [type(x) for x in span] == [int, int]
        in_order += span if is_pair else [-1]
    if sorted(in_order) != in_order or in_order[-1] > len(ids):
        raise MalformedRow(
            f"{where}: `assistant_spans` must be [start, end] pairs in order within "
            f"{len(ids)} tokens, found {spans!r}."
        )
    return ids, [(start, end) for start, end in spans]


def _rendered(
    messages: list[dict[str, str]],
    where: str,
    tokenizer: PreTrainedTokenizerBase,
    options: dict[str, Any],
) -> tuple[list[int], list[tuple[int, int]]]:
    template = tokenizer.get_chat_template()
    if _GENERATION_MARK.search(template):
        rendered = tokenizer.apply_chat_template(
            messages, return_dict=True, return_assistant_tokens_mask=True, **options
        )
        mask = rendered["assistant_masks"]
        edges = [
            i
            for i in range(len(mask) + 1)
            if (i > 0 and mask[i - 1]) != (i < len(mask) and mask[i])
        ]
        return rendered["input_ids"], list(zip(edges[::2], edges[1::2], strict=True))

    def render(turns: list[dict[str, str]], **how: Any) -> Any:
        return tokenizer.apply_chat_template(turns, return_dict=False, **how, **options)

    full = render(messages)
    spans, is_asked = [], False
    for i, message in enumerate(messages):
        is_asked = is_asked or message["role"] == "user"
        if message["role"] != "assistant" or not is_asked:
            continue
        before = render(messages[:i], add_generation_prompt=True)
        until = render(messages[: i + 1])
        start, end = _shared(full, before), _shared(full, until)
        if start < len(before) or end < len(until):
            # Tokens that reach over the edge of a turn, or another text?
            text = render(messages, tokenize=False)
            prompt = render(messages[:i], add_generation_prompt=True, tokenize=False)
            answered = render(messages[: i + 1], tokenize=False)
            if not (text.startswith(prompt) and text.startswith(answered)):
                raise MalformedRow(
                    f"{where}: the chat template has no generation marks ({{% generation %}}), and "
                    f"it renders turn {i + 1} differently depending on what follows, so the "
                    "assistant's tokens cannot be told apart. Use a template with marks, or "
                    "prepared rows (`dspark-hf data`)."
                )
            # The target writes none that begins in the prompt.
            start += start < len(before)
        end = min(end, _answer_end(until, start, tokenizer.eos_token_id))
        spans.append((start, max(start, end)))
    return full, spans


def _shared(one: list[int], other: list[int]) -> int:
    """How many tokens two lists begin with alike."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def _answer_end(ids: list[int], start: int, stop_id: int | None) -> int:
    """Behind the stop token: what templates put after it (a line break) the target never writes."""
    end = len(ids)
    if stop_id in ids[start:]:
        end -= ids[::-1].index(stop_id)
    return end

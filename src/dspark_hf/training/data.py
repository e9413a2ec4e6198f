"""
Training rows: reading JSONL, chat templates, assistant masks, batches.

A row is one JSON object a line. Prepared rows, as `dspark-hf data` writes them, hold `input_ids`
and `assistant_spans` (the tokens that the target wrote, as `[start, end)` pairs). Rows with
`messages` or `conversations` are rendered with the chat template; rows with `text` are learned
whole.
"""

import re
from collections.abc import Callable, Iterator, Sequence
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
# ShareGPT's names of the roles.
_ROLES = {"human": "user", "gpt": "assistant"}


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
    """Examples in memory. `index` goes along, so that stored target states can be found."""

    def __init__(self, examples: Sequence[Example]):
        self.examples = list(examples)

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
    """Pad on the right: `input_ids`, `attention_mask`, `loss_mask` `(B, S)` and `index` `(B,)`."""
    width = max(len(row["input_ids"]) for row in rows)
    batch = {
        "input_ids": torch.zeros(len(rows), width, dtype=torch.long),
        "attention_mask": torch.zeros(len(rows), width, dtype=torch.long),
        "loss_mask": torch.zeros(len(rows), width, dtype=torch.bool),
        "index": torch.tensor([row["index"] for row in rows]),
    }
    for i, row in enumerate(rows):
        length = len(row["input_ids"])
        batch["input_ids"][i, :length] = torch.tensor(row["input_ids"])
        batch["attention_mask"][i, :length] = 1
        batch["loss_mask"][i, :length] = torch.tensor(row["loss_mask"])
    return batch


def usable_rows(
    path: str | Path,
    make: Callable[[dict[str, Any], str], T],
    on_malformed: Callable[[MalformedRow], None] | None = None,
) -> Iterator[T]:
    """
    What `make` makes of the rows of a JSONL file, given a row and its `file:line`.

    Args:
        on_malformed (`Callable`, *optional*):
            Told of rows that cannot be used, which are left out then; by default they are fatal.

    Raises:
        [`MalformedRow`]: see `on_malformed`.
        `FileNotFoundError`: there is no such file.
    """
    for where, line in read_lines(path):
        try:
            made = make(parse_row(line, where), where)
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
        [`MalformedRow`]: no known field, an empty conversation, or a turn without text.
    """
    # Rows with the whole conversation often repeat its first message as `prompt`.
    turns: Any = row.get("messages", row.get("conversations"))
    if turns is None and isinstance(row.get("prompt"), str):
        turns = [{"role": "user", "content": row["prompt"]}]
    elif turns is None and isinstance(row.get("turns"), list):
        turns = [{"role": "user", "content": turn} for turn in row["turns"][:1]]
    if not isinstance(turns, list) or not turns:
        fields = ", ".join(f"{name}: {type(value).__name__}" for name, value in row.items())
        raise MalformedRow(
            f"{where}: needs a conversation: `messages` or `conversations` (a list of turns), "
            "`turns` (a list of texts) or `prompt` (a text), none of them empty; found "
            f"{{{fields}}}. To train on, `text`, or `input_ids` with `assistant_spans`, will do as "
            "well."
        )
    messages = []
    for turn in turns:
        role = turn.get("role", turn.get("from")) if isinstance(turn, dict) else None
        content = turn.get("content", turn.get("value")) if isinstance(turn, dict) else None
        if not isinstance(role, str) or not isinstance(content, str) or not content.strip():
            raise MalformedRow(f"{where}: a turn needs a role and text, found {turn!r}.")
        messages.append({"role": _ROLES.get(role, role), "content": content})
    return messages


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
    assistant turn is what rendering adds behind the prompt that generation would start from.

    Raises:
        [`MalformedRow`]: see [`messages_of`]; ids outside of the vocabulary; a conversation that
            the template refuses; or a template without marks that renders it differently
            once more turns follow.
    """
    if "input_ids" in row:
        ids, spans = _prepared(row, where, len(tokenizer))
    elif isinstance(row.get("text"), str) and row["text"].strip():
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
    full = tokenizer.apply_chat_template(messages, return_dict=False, **options)
    spans = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = tokenizer.apply_chat_template(
            messages[:i], add_generation_prompt=True, return_dict=False, **options
        )
        until = tokenizer.apply_chat_template(messages[: i + 1], return_dict=False, **options)
        if full[: len(before)] != before or full[: len(until)] != until:
            raise MalformedRow(
                f"{where}: the chat template has no generation marks ({{% generation %}}), and it "
                "renders turn "
                f"{i + 1} differently depending on what follows, so the assistant's tokens cannot "
                "be told apart. Use a template with marks, or prepared rows (`dspark-hf data`)."
            )
        spans.append((len(before), _answer_end(until, len(before), tokenizer.eos_token_id)))
    return full, spans


def _answer_end(ids: list[int], start: int, stop_id: int | None) -> int:
    """Behind the stop token: what templates put after it (a line break) the target never writes."""
    end = len(ids)
    if stop_id in ids[start:]:
        end -= ids[::-1].index(stop_id)
    return end

"""JSONL: one JSON object a line, each named by file and line when it cannot be used."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class MalformedRow(ValueError):
    """A row that cannot be used; the message names where it stands: file and line."""


def read_lines(path: str | Path) -> Iterator[tuple[str, bytes]]:
    """
    The lines of a JSONL file that are not empty, each with `file:line` for messages.

    Raises:
        `FileNotFoundError`: there is no such file.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not a file; give a JSONL file.")
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield f"{path}:{number}", line


def parse_row(line: bytes, where: str) -> dict[str, Any]:
    """
    A line as an object.

    Raises:
        [`MalformedRow`]: it is none, or holds half of a character, which no tokenizer takes.
    """
    try:
        # Editors of one system begin a file with a byte order mark.
        row = json.loads(line.decode("utf-8-sig"))
    except json.JSONDecodeError as error:
        raise MalformedRow(f"{where}: not JSON ({error.msg} at column {error.colno}).") from error
    except UnicodeDecodeError as error:
        raise MalformedRow(f"{where}: not UTF-8 (byte {error.start}).") from error
    except (ValueError, RecursionError) as error:  # Endless integers, endless nesting.
        raise MalformedRow(f"{where}: JSON that cannot be read ({error}).") from error
    if not isinstance(row, dict):
        raise MalformedRow(f"{where}: expected a JSON object, found {type(row).__name__}.")
    if b"\\u" in line:
        try:
            json.dumps(row, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = error.object[error.start].encode("ascii", "backslashreplace").decode()
            raise MalformedRow(
                f"{where}: not text: half of a character ({half}), as where an emoji was cut in "
                "two. Cut it off whole."
            ) from error
    return row


def append_line(path: Path, row: dict[str, Any]) -> None:
    """
    Write a row behind the others.

    Raises:
        `OSError`: the disk is full; the rows before it are whole.
    """
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
    except OSError as error:
        raise OSError(
            f"Writing to {path} failed ({error}). The rows before it are kept: free some space and "
            "start again, it goes on behind them."
        ) from error


def drop_torn_line(path: Path) -> None:
    """A run killed while it wrote leaves a line without an end; what it held is made again."""
    content = path.read_bytes()
    if content and not content.endswith(b"\n"):
        path.write_bytes(content[: content.rfind(b"\n") + 1])

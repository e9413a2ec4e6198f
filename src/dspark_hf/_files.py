"""Writing files that are complete or not there: a torn one would later be read as a whole one."""

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def replacing(path: str | os.PathLike) -> Iterator[Path]:
    """A temporary file beside `path` that takes its place if nothing goes wrong."""
    path = Path(path)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        # What the umask grants, which a temporary file does not have.
        temporary.chmod(0o666 & ~_umask())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: str | os.PathLike, content: Any) -> None:
    """Indented JSON, complete or not at all."""
    text = json.dumps(content, indent=2) + "\n"
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask

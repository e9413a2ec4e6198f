"""Saving a checkpoint so that it is either complete or not there."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def save_atomically(directory: str | os.PathLike) -> Iterator[Path]:
    """
    Yield an empty folder beside `directory`; what is written there moves into `directory` at the
    end.

    Raises:
        `OSError`: writing failed (full disk, no permission). `directory` is then as it was before.
    """
    target = Path(directory).absolute()
    if target.is_file():
        raise OSError(f"{target} is a file; give a folder to save the checkpoint to.")
    created = not target.exists()
    target.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=".saving-", dir=target))
    try:
        yield temporary
        for file in temporary.iterdir():
            os.replace(file, target / file.name)
    except OSError as error:
        if created:
            shutil.rmtree(target, ignore_errors=True)
        raise OSError(
            f"Saving to {target} failed ({error}). Nothing was left there; free some space or "
            "choose another "
            "folder and save again."
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)

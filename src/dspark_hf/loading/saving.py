"""Saving a checkpoint so that it is either complete or not there."""

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

_WEIGHT_FILE = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")


@contextmanager
def save_atomically(directory: str | os.PathLike) -> Iterator[Path]:
    """
    Yield an empty folder inside `directory`; what is written there moves into `directory` at the
    end. Weight files of an earlier save that the new one does not replace are removed.

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
        written = {file.name for file in temporary.iterdir()}
        for name in written:
            os.replace(temporary / name, target / name)
        # The host reads `model.safetensors` before an index: one that stayed would be loaded.
        if any(map(_WEIGHT_FILE.fullmatch, written)):
            for file in target.iterdir():
                if _WEIGHT_FILE.fullmatch(file.name) and file.name not in written:
                    file.unlink()
    except (OSError, SafetensorError) as error:
        raise OSError(
            f"Saving to {target} failed ({error}). The folder is as it was before; free some "
            "space or choose another folder and save again."
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if created and not any(target.iterdir()):
            target.rmdir()

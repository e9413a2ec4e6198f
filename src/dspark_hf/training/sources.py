"""
Where rows come from: JSONL files, and tables of the library `datasets`, local or on the Hub.

A table is spelled `PATH_OR_ID[@REVISION][:CONFIGURATION][:SPLIT][[:N]]`, for instance
`HuggingFaceH4/ultrachat_200k:train_sft[:2000]`; `[:N]` takes the first N rows and, from the Hub,
reads no further.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from .data import ROW_FIELDS

_SPELLING = re.compile(
    r"(?P<path>[^@:\[\]]+)(@(?P<revision>[^:\[\]]+))?"
    r"(:(?P<config>[^:\[\]]+)(?=:))?(:(?P<split>[^:\[\]]+))?(\[:(?P<head>\d+)\])?"
)
_SPELLED = "PATH_OR_ID[@REVISION][:CONFIGURATION][:SPLIT][[:N]]"
_COMMIT = re.compile("[0-9a-f]{40}")
# Files that the library reads, by the names of its readers.
_TABLE_FILES = {".parquet": "parquet", ".arrow": "arrow"}
# What `save_to_disk` writes: of one table, and of several splits.
_SAVED = ("state.json", "dataset_dict.json")
_OTHER_FILES = (".jsonl", ".json", ".csv", ".txt", ".gz", ".yaml")


@dataclass(frozen=True)
class DatasetRows:
    """
    Rows of a dataset, each with `dataset, row number` for messages; counted from 0, as there.

    Attributes:
        name (`str`): as it was asked for.
        revision (`str`, *optional*): commit, if it came from the Hub.
        rows (`datasets.Dataset` or `IterableDataset`): only the columns that are read.
    """

    name: str
    revision: str | None
    rows: Any

    def __str__(self) -> str:
        return self.name if self.revision is None else f"{self.name}, revision {self.revision}"

    def __iter__(self) -> Iterator[tuple[str, dict[str, Any]]]:
        try:
            for number, row in enumerate(self.rows):
                yield f"{self.name}, row {number}", row
        except Exception as error:  # Network, cache and file formats fail in many classes.
            raise OSError(_unreadable(self.name, error)) from error


def open_source(name: str) -> Path | DatasetRows:
    """
    The JSONL file or the table of a name.

    Raises:
        `FileNotFoundError`: neither a file, nor a folder, nor the id of a dataset.
        `ValueError`: a split is missing or not there, no column can be used, or `datasets` is not
            installed.
        `OSError`: the table cannot be read, or the Hub does not answer.
    """
    path = Path(name)
    if path.is_file() and path.suffix not in _TABLE_FILES:
        return path
    spelled = {"path": name} if path.exists() else _spelled(name)
    try:
        import datasets
    except ImportError as error:
        raise ValueError(
            f"{name} is not a JSONL file, and tables need the package datasets: pip install "
            "datasets."
        ) from error
    is_saved = any((Path(spelled["path"]) / f).is_file() for f in _SAVED)
    table = (_saved if is_saved else _loaded)(datasets, name, **spelled)
    columns = table.rows.column_names
    if columns is None:
        return table
    used = [column for column in columns if column in ROW_FIELDS]
    if not used:
        raise ValueError(
            f"{name} has the columns {', '.join(columns)}; it needs one of {', '.join(ROW_FIELDS)}."
        )
    # Others can be large, or pictures that would be decoded.
    return DatasetRows(table.name, table.revision, table.rows.select_columns(used))


def _spelled(name: str) -> dict[str, Any]:
    found = _SPELLING.fullmatch(name)
    fields = found.groupdict() if found else {"path": name}
    path = fields["path"]
    if Path(path).exists():
        if fields["revision"]:
            raise ValueError(
                f"{name}: only datasets on the Hub have revisions, and {path} is here."
            )
        return fields
    try:
        validate_repo_id(path)
    except HFValidationError:
        path = ""
    if found is None or "/" not in path or path.endswith(_OTHER_FILES):
        raise FileNotFoundError(
            f"{name} is not a file: neither a JSONL file nor a dataset of the library datasets "
            f"(a folder, or an id owner/name), spelled {_SPELLED}."
        )
    return fields


def _loaded(
    datasets: Any,
    name: str,
    path: str,
    revision: str | None = None,
    config: str | None = None,
    split: str | None = None,
    head: str | None = None,
) -> DatasetRows:
    """Through the library's readers; only a part of a split is read as a stream."""
    is_file = Path(path).is_file()
    reader, files = (_TABLE_FILES[Path(path).suffix], path) if is_file else (path, None)
    try:
        builder = datasets.load_dataset_builder(reader, config, revision=revision, data_files=files)
        splits = list(builder.info.splits or builder.as_streaming_dataset())
    except Exception as error:
        raise OSError(_unreadable(name, error)) from error
    split = _chosen(name, split, splits)
    if revision is not None and _COMMIT.fullmatch(revision) and revision != builder.hash:
        # Without the Hub the library takes whatever its cache holds.
        raise OSError(
            f"{name}: the cache of datasets holds commit {builder.hash} only. Connect to the Hub."
        )
    try:
        if head is None:
            builder.download_and_prepare()
            rows = builder.as_dataset(split)
        else:
            rows = builder.as_streaming_dataset(split).take(int(head))
    except Exception as error:
        raise OSError(_unreadable(name, error)) from error
    return DatasetRows(name, None if Path(path).exists() else builder.hash, rows)


def _saved(
    datasets: Any,
    name: str,
    path: str,
    revision: None = None,
    config: str | None = None,
    split: str | None = None,
    head: str | None = None,
) -> DatasetRows:
    """What `save_to_disk` wrote."""
    try:
        rows = datasets.load_from_disk(path)
    except Exception as error:
        raise OSError(_unreadable(name, error)) from error
    if config is not None or (split is not None and not isinstance(rows, dict)):
        raise ValueError(f"{path} was saved without the {config or split!r} that {name} asks for.")
    if isinstance(rows, dict):
        rows = rows[_chosen(name, split, list(rows))]
    return DatasetRows(
        name, None, rows if head is None else rows.select(range(min(int(head), len(rows))))
    )


def _chosen(name: str, split: str | None, splits: list[str]) -> str:
    if split is None and len(splits) == 1:
        return splits[0]
    if split not in splits:
        raise ValueError(
            f"{name}: {'which split' if split is None else f'no split {split!r}'}? There are "
            f"{', '.join(splits)}; name one as in {name.split(':')[0]}:{splits[0]}."
        )
    return split


def _unreadable(name: str, error: Exception) -> str:
    return (
        f"{name} could not be read as a dataset: {type(error).__name__}: {error}. It is spelled "
        f"{_SPELLED}; on the Hub, or a folder of save_to_disk, Parquet, Arrow or JSON files."
    )

"""
Finding a checkpoint's files in a folder or on the Hub, and reading safetensors headers without
weights.
"""

import errno
import json
import math
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import (
    get_safetensors_metadata,
    is_offline_mode,
    parse_safetensors_file_metadata,
)
from huggingface_hub.errors import HFValidationError, NotASafetensorsRepoError
from huggingface_hub.utils import validate_repo_id
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from .detection import may_be_eagle3

HUB_ARGUMENTS = (
    "cache_dir",
    "force_download",
    "local_files_only",
    "proxies",
    "revision",
    "subfolder",
    "token",
)

# Bytes per element of the types a drafter's weights may be stored in. Anything else is quantised.
FLOAT_BYTES = {"F32": 4, "BF16": 2, "F16": 2, "F64": 8}
# Those of the map of a reduced vocabulary.
ID_TYPES = ("I64", "I32", "I16")
_ID_BYTES = {"I64": 8, "I32": 4, "BOOL": 1, "U8": 1, "I8": 1, "I16": 2}
# FP8 weights and their scales, where a layout knows them.
_FP8_BYTES = {"F8_E4M3": 1, "F8_E8M0": 1}

_NOT_WRITABLE = (errno.EACCES, errno.EEXIST, errno.ENOTDIR, errno.EROFS)


@dataclass(frozen=True)
class TensorInfo:
    """
    Name-less facts of a stored tensor: safetensors dtype string, shape and file, and the bytes of
    all tensors in that file.
    """

    dtype: str
    shape: tuple[int, ...]
    file: str
    file_bytes: int


def read_config(source: str, **hub: Any) -> dict[str, Any]:
    """
    The checkpoint's config.json, as it is.

    Raises:
        `OSError`: the repository or the file does not exist or cannot be reached.
        `ValueError`: the file is not a JSON object.
    """
    path = fetch(source, "config.json", **hub)
    if path is None:
        raise OSError(
            f"No config.json of {source} was found: it is not a folder with one, and the Hub has "
            "none under this id, or cannot be reached and the cache has none. Check the path or "
            "id."
        )
    return read_object(path)


def read_object(path: str | os.PathLike) -> dict[str, Any]:
    """The JSON object in a file. Raises `ValueError` for anything else, naming the file."""
    try:
        raw = json.loads(Path(path).read_text(encoding="utf-8"), object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}). Download the file again.") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{path} holds a JSON {type(raw).__name__}, expected an object.")
    return raw


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object whose keys do not contradict each other; the parser would take the last."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if found.setdefault(key, value) != value:
            raise ValueError(f"{key} is there twice, as {found[key]!r} and {value!r}")
    return found


def read_tensors(
    source: str, wanted: Callable[[str], bool] | None = None, **hub: Any
) -> dict[str, TensorInfo]:
    """
    Headers of all weight files, downloading the files if they are on the Hub.

    Args:
        source (`str`): folder or Hub id.
        wanted (`Callable`, *optional*):
            Tells the names of tensors that matter; shards without any are not asked for.

    Raises:
        `OSError`: no safetensors weights, or a shard of the index is missing.
        `ValueError`: a file is cut short or its header is damaged, or index and shards disagree.
    """
    # The order in which the host looks: where there are both, it loads the single file.
    single_path = fetch(source, SAFE_WEIGHTS_NAME, **hub)
    if single_path is not None:
        return _only(read_header(single_path), wanted)
    index_path = fetch(source, SAFE_WEIGHTS_INDEX_NAME, **hub)
    if index_path is None:
        raise OSError(_missing_weights(source, SAFE_WEIGHTS_NAME, indexed=False))
    index = _only(read_index(index_path), wanted)
    tensors: dict[str, TensorInfo] = {}
    for name in sorted(set(index.values())):
        path = fetch(source, name, **hub)
        if path is None:
            raise OSError(_missing_weights(source, name, indexed=True))
        part = _only(read_header(path), wanted)
        twice = sorted(set(part) & set(tensors))
        if twice:
            raise ValueError(
                f"{twice[0]} of {source} is stored twice, in {tensors[twice[0]].file} and {name}. "
                "The files come from different saves; download or save the checkpoint again."
            )
        tensors.update(part)
    if set(index) != set(tensors):
        odd = sorted(set(index) ^ set(tensors))
        raise ValueError(
            f"{index_path} and its shards disagree about {len(odd)} tensors, for example "
            f"{odd[0]}. The files come from different saves; download or save the checkpoint "
            "again."
        )
    return tensors


def read_header(path: str | os.PathLike) -> dict[str, TensorInfo]:
    """
    Header of one safetensors file, checked against the file's size.

    Raises:
        `ValueError`: not a safetensors file, or cut short.
    """
    damaged = f"{path} is damaged ({{}}). Download it again, or save the checkpoint again."
    size = os.path.getsize(path)
    with open(path, "rb") as content:
        length = int.from_bytes(content.read(8), "little")
        if size < 8 or length > size - 8:
            raise ValueError(
                damaged.format(f"its header claims {length} bytes, the file has {size}")
            )
        try:
            header = json.loads(content.read(length))
            header.pop("__metadata__", None)
            end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
            file = os.path.basename(path)
            tensors = {
                name: TensorInfo(entry["dtype"], tuple(entry["shape"]), file, end)
                for name, entry in header.items()
            }
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(damaged.format("its header is not a safetensors header")) from error
    if size != 8 + length + end:
        raise ValueError(damaged.format(f"{size} bytes found, {8 + length + end} expected"))
    return tensors


def read_tensors_remotely(
    source: str, wanted: Callable[[str], bool] | None = None, **hub: Any
) -> dict[str, TensorInfo]:
    """Like `read_tensors`, but for a Hub repository only the headers travel."""
    if (
        os.path.isdir(source)
        or is_offline_mode()
        or hub.get("local_files_only")
        or hub.get("subfolder")
    ):
        return read_tensors(source, wanted, **hub)
    access = {"revision": hub.get("revision"), "token": hub.get("token")}
    index_path = None if wanted is None else fetch(source, SAFE_WEIGHTS_INDEX_NAME, **hub)
    try:
        if index_path is None:
            files_metadata = get_safetensors_metadata(source, **access).files_metadata
        else:
            files_metadata = {
                name: parse_safetensors_file_metadata(source, name, **access)
                for name in sorted(set(_only(read_index(index_path), wanted).values()))
            }
    except NotASafetensorsRepoError as error:
        raise OSError(_missing_weights(source, SAFE_WEIGHTS_NAME, indexed=False)) from error
    tensors: dict[str, TensorInfo] = {}
    for file, content in files_metadata.items():
        end = max((info.data_offsets[1] for info in content.tensors.values()), default=0)
        for name, info in content.tensors.items():
            tensors[name] = TensorInfo(str(info.dtype), tuple(info.shape), file, end)
    return _only(tensors, wanted)


def names_that_tell(raw: dict[str, Any], source: str, **hub: Any) -> Collection[str]:
    """
    Names of the stored tensors where config.json does not say by itself what the checkpoint is,
    from the headers alone; empty where it does, or where no safetensors are to be had.
    """
    if not may_be_eagle3(raw):
        return ()
    try:
        return read_tensors_remotely(source, **hub)
    except OSError:
        return ()


def num_bytes(tensor: TensorInfo) -> int:
    """Stored size of a tensor in bytes."""
    return math.prod(tensor.shape) * {**FLOAT_BYTES, **_ID_BYTES, **_FP8_BYTES}[tensor.dtype]


def _only(tensors: dict[str, Any], wanted: Callable[[str], bool] | None) -> dict[str, Any]:
    return {name: value for name, value in tensors.items() if wanted is None or wanted(name)}


def read_index(path: str | os.PathLike) -> dict[str, str]:
    """
    Files of the tensors, by name. Raises `ValueError`: not an index, or one that leaves the folder.
    """
    try:
        weight_map = json.loads(Path(path).read_text(encoding="utf-8"))["weight_map"]
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError("an empty weight_map")
        for name in weight_map.values():
            # Other files of the machine are nobody's weights.
            if not isinstance(name, str) or os.path.isabs(name) or ".." in Path(name).parts:
                raise ValueError(f"{name!r} is no file of the checkpoint")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is not a safetensors index ({error}). Download the file again."
        ) from error
    return weight_map


def _missing_weights(source: str, name: str, indexed: bool) -> str:
    if indexed:
        return (
            f"{source} is incomplete: its index lists {name}, and that file is missing. "
            "Download it again."
        )
    return (
        f"{source} has no {name}. Only safetensors weights are read; pickled ones "
        "(pytorch_model.bin, *.pt) are not opened, because loading them can run code. Ask the "
        "author for safetensors, or convert the file in an environment you trust."
    )


def fetch(source: str, name: str, **hub: Any) -> str | None:
    """
    Local path of a file of the checkpoint, or `None` if it has no such file.

    Raises:
        `OSError`: no such folder or Hub id, or the cache cannot be written.
    """
    if os.path.isdir(source):
        path = os.path.join(source, hub.get("subfolder") or "", name)
        return path if os.path.isfile(path) else None
    if os.path.exists(source):
        raise OSError(
            f"{source} is a file; give the folder that holds config.json and the weights."
        )
    try:
        validate_repo_id(source)
    except HFValidationError as error:
        raise OSError(
            f"{source} is neither an existing folder nor a Hub id (owner/name). Check the path."
        ) from error
    try:
        return cached_file(source, name, _raise_exceptions_for_missing_entries=False, **hub)
    except OSError as error:
        if error.errno not in _NOT_WRITABLE:
            raise
        raise OSError(
            f"The Hub cache cannot be written ({error}). Pass cache_dir=… or set HF_HOME to a "
            "writable folder."
        ) from error

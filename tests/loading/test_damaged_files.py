"""Files that are missing, damaged or of another save, and disks that are full while saving."""

import errno
import json

import pytest
import safetensors.torch
import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from checkpoints import (
    GOLDEN,
    VANILLA,
    copy_checkpoint,
    no_weights_loaded,
    read_json,
    shard,
)
from dspark_hf import DSparkDrafter
from tiny import make_drafter


def refuse(source, message, error=ValueError, **options):
    with no_weights_loaded(), pytest.raises(error, match=message) as caught:
        DSparkDrafter.from_pretrained(source, **options)
    return str(caught.value)


# -- files -----------------------------------------------------------------------------------------


def test_a_missing_shard(tmp_path):
    """An index names a file that is not there."""
    folder = copy_checkpoint(tmp_path)
    missing = shard(folder)[1]
    (folder / missing).unlink()
    refuse(folder, f"incomplete: its index lists {missing}.*Download it again", OSError)


@pytest.mark.parametrize("cut", [1, 4000, "all but the header", 4])
def test_a_file_cut_short(tmp_path, cut):
    """Also where only the last byte is missing, and where not even the header is whole."""
    file = copy_checkpoint(tmp_path) / "model.safetensors"
    content = file.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    keep = {1: -1, 4000: -4000, 4: 4}.get(cut, header)
    file.write_bytes(content[:keep])
    refuse(tmp_path, rf"{file} is damaged \(.*\d+ bytes.*\)\. Download it again")


def test_a_file_with_something_behind_its_end(tmp_path):
    """Two downloads in one file."""
    file = copy_checkpoint(tmp_path) / "model.safetensors"
    size = file.stat().st_size
    file.write_bytes(file.read_bytes() + b"more")
    refuse(tmp_path, f"is damaged .{size + 4} bytes found, {size} expected")


@pytest.mark.parametrize(
    "header",
    [b"{not json", b"[]", b'{"fc.weight": 3}', b'{"fc.weight": {"dtype": "F32"}}', b"\xff\xfe"],
)
def test_a_corrupt_header(tmp_path, header):
    """The header is not a safetensors header."""
    file = copy_checkpoint(tmp_path) / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    refuse(tmp_path, "is damaged .its header is not a safetensors header")


def test_a_page_saved_under_the_name_of_the_weights(tmp_path):
    """An error page of a proxy, a Git LFS pointer."""
    file = copy_checkpoint(tmp_path) / "model.safetensors"
    file.write_text("version https://git-lfs.github.com/spec/v1\nsize 2790000000\n")
    refuse(tmp_path, "is damaged .its header claims")


def test_an_empty_weight_file(tmp_path):
    """Zero bytes."""
    (copy_checkpoint(tmp_path) / "model.safetensors").write_bytes(b"")
    refuse(tmp_path, "is damaged .* the file has 0")


@pytest.mark.parametrize("kind", ["lacks", "adds"])
def test_index_and_shards_disagree(tmp_path, kind):
    """The files come from different saves."""
    folder = copy_checkpoint(tmp_path)
    name = shard(folder)[0]
    path = folder / "model.safetensors.index.json"
    index = read_json(path)
    if kind == "lacks":
        del index["weight_map"]["fc.weight"]
    else:
        index["weight_map"]["ghost.weight"] = name
    path.write_text(json.dumps(index), encoding="utf-8")
    tensor = {"lacks": "fc.weight", "adds": "ghost.weight"}[kind]
    refuse(folder, f"disagree about 1 tensors, for example {tensor}.*different saves")


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "{}",
        '{"weight_map": {}}',
        '{"weight_map": [1]}',
        '{"weight_map": {"fc.weight": 5}}',
        '{"weight_map": {"fc.weight": "/etc/hosts"}}',
        '{"weight_map": {"fc.weight": "../model.safetensors"}}',
    ],
)
def test_an_index_that_is_none(tmp_path, text):
    """Not JSON, not an index, or one that names files outside the checkpoint."""
    folder = copy_checkpoint(tmp_path)
    shard(folder)
    (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")
    refuse(folder, "is not a safetensors index .*Download the file again")


def test_a_tensor_that_two_shards_hold(tmp_path):
    """Which of the two is loaded would be chance."""
    folder = copy_checkpoint(tmp_path)
    first, second, *_ = shard(folder)
    parts = [load_file(folder / name) for name in (first, second)]
    name = next(iter(parts[0]))
    parts[1][name] = parts[0][name] + 1
    save_file(parts[1], folder / second, metadata={"format": "pt"})
    refuse(folder, f"{name} of .* is stored twice, in {first} and {second}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"block_size": 5, "block_size": 3}', "block_size is there twice, as 5 and 3"),
        ("[" * 100_000, "recursion depth"),
    ],
    ids=["twice", "deep"],
)
def test_a_config_that_the_parser_takes_wrongly(tmp_path, text, message):
    """The last of two values would win, whatever the other says."""
    (copy_checkpoint(tmp_path) / "config.json").write_text(text, encoding="utf-8")
    refuse(tmp_path, f"config.json is not valid JSON .*{message}")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.pth"])
def test_pickled_weights_are_not_opened(tmp_path, name):
    """Loading a pickle can run code."""
    folder = copy_checkpoint(tmp_path)
    (folder / "model.safetensors").unlink()
    marker = tmp_path / "was_run"

    class Evil:
        def __reduce__(self):
            return (open, (str(marker), "w"))

    torch.save(Evil(), folder / name)
    message = r"has no model\.safetensors\. Only safetensors .*pickled.*Ask the author"
    refuse(folder, message, OSError)
    assert not marker.exists()


def test_a_folder_without_a_config(tmp_path):
    """Weights alone say nothing."""
    (copy_checkpoint(tmp_path) / "config.json").unlink()
    refuse(tmp_path, r"No config\.json of .*Check the path", OSError)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"config\.json is not valid JSON .*Download the file again"),
        ("", r"config\.json is not valid JSON"),
        ('{"a": 1,}', r"config\.json is not valid JSON"),
        ("[1]", "holds a JSON list, expected an object"),
        ("null", "holds a JSON NoneType, expected an object"),
        ('"qwen3"', "holds a JSON str, expected an object"),
    ],
)
def test_a_config_that_is_no_json_object(tmp_path, text, message):
    """The file is named."""
    (copy_checkpoint(tmp_path) / "config.json").write_text(text, encoding="utf-8")
    refuse(tmp_path, message)


def test_a_path_that_is_a_file():
    """The weights instead of their folder."""
    file = GOLDEN / VANILLA / "model.safetensors"
    refuse(file, rf"{file} is a file; give the folder", OSError)


def test_a_path_that_does_not_exist(tmp_path):
    """Not taken for the name of a repository."""
    missing = tmp_path / "no" / "such"
    refuse(missing, f"{missing} is neither an existing folder nor a Hub id", OSError)


def test_an_unknown_repository_without_a_network(tmp_path):
    """Offline, nothing in the cache."""
    message = r"No config\.json of nobody/no-drafter was found.*Check the path or id"
    refuse("nobody/no-drafter", message, OSError, cache_dir=tmp_path)


# -- saving ----------------------------------------------------------------------------------------


def contents(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def full_disk(error):
    save = safetensors.torch.save_file

    def save_half(tensors, filename, *args, **kwargs):
        save(tensors, filename, *args, **kwargs)
        with open(filename, "r+b") as file:
            file.truncate(100)
        raise error

    return save_half


FULL_DISK = [
    OSError(errno.ENOSPC, "No space left on device"),
    SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
]


@pytest.mark.parametrize("error", FULL_DISK, ids=["os_error", "safetensors_error"])
@pytest.mark.parametrize("before", ["nothing", "empty folder", "checkpoint"])
def test_a_full_disk_leaves_everything_as_it_was(tmp_path, monkeypatch, error, before):
    """Nothing half-written, an older checkpoint untouched, and the disk may be retried."""
    folder = tmp_path / "drafter"
    if before != "nothing":
        folder.mkdir()
    if before == "checkpoint":
        make_drafter(seed=8).save_pretrained(folder, max_shard_size="20kB")
    kept = contents(folder) if folder.exists() else None
    drafter = make_drafter()
    with monkeypatch.context() as patch:
        patch.setattr(transformers.modeling_utils, "safe_save_file", full_disk(error))
        with pytest.raises(OSError, match=f"Saving to {folder} failed .*No space left.*again"):
            drafter.save_pretrained(folder)
    assert (contents(folder) if folder.exists() else None) == kept
    drafter.save_pretrained(folder)
    assert DSparkDrafter.from_pretrained(folder).config.block_size == 4


def test_any_other_failure_leaves_nothing_either(tmp_path, monkeypatch):
    """An interrupted save."""
    folder = tmp_path / "drafter"
    monkeypatch.setattr(
        transformers.modeling_utils, "safe_save_file", full_disk(KeyboardInterrupt())
    )
    with pytest.raises(KeyboardInterrupt):
        make_drafter().save_pretrained(folder)
    assert not folder.exists()


def test_saving_to_a_path_that_is_a_file(tmp_path):
    """The file stays."""
    file = tmp_path / "drafter"
    file.write_text("mine", encoding="utf-8")
    with pytest.raises(OSError, match=f"{file} is a file; give a folder"):
        make_drafter().save_pretrained(file)
    assert file.read_text(encoding="utf-8") == "mine"

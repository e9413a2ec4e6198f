"""Checkpoint folders as users meet them: the golden ones, copies of them with one thing changed."""

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from safetensors.torch import load_file, save_file

GOLDEN = Path(__file__).parent / "fixtures" / "golden"
VANILLA = "deepspec_dspark_qwen3_vanilla"
GATED = "deepspec_dspark_qwen3_gated"
RNN = "deepspec_dspark_qwen3_rnn"
DFLASH = "deepspec_dflash_qwen3"
GEMMA4 = "deepspec_dspark_gemma4"
EAGLE3 = "deepspec_eagle3_qwen3"
LAYOUTS = (VANILLA, GATED, RNN, DFLASH, GEMMA4)


def copy_checkpoint(folder: Path, name: str = VANILLA, **changes: Any) -> Path:
    """A golden checkpoint in `folder`, with config keys changed; a value of `...` drops the key."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(GOLDEN / name / "model.safetensors", folder)
    shutil.copy(GOLDEN / name / "config.json", folder)
    if changes:
        edit_config(folder, **changes)
    return folder


def read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def copy_folder(source: Path, folder: Path) -> Path:
    """config.json and weights of any checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "model.safetensors"):
        shutil.copy(source / name, folder)
    return folder


def edit_config(folder: Path, **changes: Any) -> None:
    """Change keys of config.json, nested ones by a dotted path; `...` drops the key."""
    edit_json(folder / "config.json", **changes)


def edit_json(path: Path, **changes: Any) -> None:
    """The same of any file."""
    raw = read_json(path)
    for dotted, value in changes.items():
        *outer, key = dotted.split(".")
        section = raw
        for name in outer:
            section = section[name]
        if value is ...:
            section.pop(key, None)
        else:
            section[key] = value
    path.write_text(json.dumps(raw), encoding="utf-8")


def edit_tensors(folder: Path, drop: tuple[str, ...] = (), **changes: torch.Tensor) -> None:
    """Drop, replace or add tensors of model.safetensors."""
    tensors = load_file(folder / "model.safetensors")
    tensors = {name: value for name, value in {**tensors, **changes}.items() if name not in drop}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def shard(folder: Path, num_shards: int = 3) -> list[str]:
    """Split model.safetensors into shards with an index; returns the shards' names."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = [f"model-{i + 1:05d}-of-{num_shards:05d}.safetensors" for i in range(num_shards)]
    weight_map = {tensor: names[i % num_shards] for i, tensor in enumerate(sorted(tensors))}
    for name in names:
        part = {tensor: tensors[tensor] for tensor, file in weight_map.items() if file == name}
        save_file(part, folder / name, metadata={"format": "pt"})
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return names


def same_weights(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    a, b = one.state_dict(), other.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def check_written_again(folder: Path, published: Path, target_name: str) -> None:
    """A speculators checkpoint that was read and written: same tensors and keys, another target."""
    stored, expected = (load_file(path / "model.safetensors") for path in (folder, published))
    assert stored.keys() == expected.keys()
    assert all(torch.equal(stored[name], expected[name]) for name in expected)
    written, raw = (read_json(path / "config.json") for path in (folder, published))
    raw["speculators_config"]["verifier"] = {"name_or_path": target_name, "architectures": []}
    body = raw.pop("transformer_layer_config")
    assert written["transformer_layer_config"].items() >= body.items()
    for key in set(raw) - {"architectures", "auto_map", "transformers_version"}:
        assert written[key] == raw[key], key


@contextlib.contextmanager
def no_weights_loaded() -> Iterator[None]:
    """The host's loading, which reads weights, must not be reached inside the block."""
    reached = []

    def load(*args, **kwargs):
        reached.append(args)
        raise AssertionError("weights were loaded")

    with mock.patch.object(transformers.PreTrainedModel, "from_pretrained", load):
        yield
    assert not reached


EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
ANCHOR = torch.tensor([5])


def features_of(drafter, length=6):
    generator = torch.Generator().manual_seed(11)
    return torch.randn(1, length, drafter.fc.in_features, generator=generator)


def same_drafts(one, other):
    # Equal weights; where they lie in memory may change the last bits of a product.
    features = features_of(one)
    found, expected = one(features, ANCHOR), other(features, ANCHOR)
    return torch.equal(found.tokens, expected.tokens) and torch.allclose(
        found.logits, expected.logits, rtol=0, atol=2e-5
    )

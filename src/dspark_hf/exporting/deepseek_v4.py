"""
Putting a drafter back into a DeepSeek-V4 target: `mtp.*` shards in the published number formats.

The other direction is `DSparkDrafter.from_pretrained(target)` and `save_pretrained`: a drafter of
its own, with its experts packed as they were.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from .._files import replacing, write_json
from ..generation.fields import FIELDS
from ..loading.deepseek_v4 import is_stored_part, shared_facts, stored_parts
from ..loading.detection import DEEPSEEK_V4
from ..loading.files import read_header, read_index, read_object
from ..loading.reading import ConfigReader
from ..quantised import quantise_fp8

if TYPE_CHECKING:
    from ..modeling_dspark import DSparkDrafter

logger = logging.getLogger(__name__)

# Formats of a quantised checkpoint; what is in neither list is float32.
_FP8 = (
    "attn.wq_a.weight",
    "attn.wq_b.weight",
    "attn.wkv.weight",
    "attn.wo_a.weight",
    "attn.wo_b.weight",
    "ffn.shared_experts.w1.weight",
    "ffn.shared_experts.w2.weight",
    "ffn.shared_experts.w3.weight",
    "main_proj.weight",
)
_FLOAT32 = ("attn_sink", "ffn.gate.bias", "_fn", "_base", "_scale")


def merge_into_target(drafter: "DSparkDrafter", directory: str | os.PathLike) -> list[str]:
    """
    Store a drafter inside its target: three more shards, the index and the `dspark_*` keys of
    config.json, and of inference/config.json if there is one. A drafter that the target had is
    replaced; the target's own files stay as they are. The index states the new total size, or none
    if files of the target are not there.
    Fields of the drafter's generation config (a calibration, say) have no place there and are named
    in a warning.
    Every value is stored exactly; where the largest value of an FP8 block is 224 or 448 times its
    scale, the other of the two equal codings may be taken.

    Args:
        drafter ([`DSparkDrafter`]): with DeepSeek-V4 layers, and no embedding or head of its own.
        directory (`str` or `os.PathLike`): the target's folder, with sharded weights.

    Returns:
        `list[str]`: names of the shards that were written.

    Raises:
        `ValueError`: the folder does not hold this drafter's target, or a weight of a drafter with
        packed experts has no exact FP8 or bfloat16 form, because it was changed after loading, or
        a file of the target is damaged.
        `OSError`: the folder has no config.json or no index.
    """
    folder = Path(directory)
    raw = _read(folder / "config.json", "config.json")
    index = _read(folder / SAFE_WEIGHTS_INDEX_NAME, "index of sharded weights")
    weight_map = read_index(folder / SAFE_WEIGHTS_INDEX_NAME)
    released = folder / "inference" / "config.json"
    also = read_object(released) if released.is_file() else None
    _check_pair(drafter, raw, folder)
    num_stages = drafter.config.backbone_config.num_hidden_layers
    old = {name: file for name, file in weight_map.items() if is_stored_part(name)}
    kept = {name: file for name, file in weight_map.items() if name not in old}
    files = [folder / file for file in set(kept.values())]
    num_bytes = sum(_payload(file) for file in files if file.is_file())
    written: dict[str, str] = {}
    # All shards take their places together: a weight that has no form may be in the last one.
    with ExitStack() as shards:
        for stage in range(num_stages):
            file = f"mtp-{stage + 1:05d}-of-{num_stages:05d}.safetensors"
            tensors = dict(_stage_tensors(drafter, stage))
            temporary = shards.enter_context(replacing(folder / file))
            save_file(tensors, temporary, metadata={"format": "pt"})
            written |= dict.fromkeys(tensors, file)
            num_bytes += sum(tensor.nbytes for tensor in tensors.values())
    metadata = dict(index.get("metadata") or {})
    if metadata.pop("total_size", None) is not None and all(file.is_file() for file in files):
        metadata["total_size"] = num_bytes
    content = {**index, "metadata": metadata, "weight_map": kept | written}
    write_json(folder / SAFE_WEIGHTS_INDEX_NAME, content)
    keys = _config_keys(drafter, raw)
    write_json(folder / "config.json", {**raw, **keys})
    if also is not None:
        write_json(released, {**also, **keys, "n_mtp_layers": num_stages})
    # Only now nothing refers to them.
    for file in set(old.values()) - set(kept.values()) - set(written.values()):
        (folder / file).unlink(missing_ok=True)
    if left := [name for name in FIELDS if getattr(drafter.generation_config, name) is not None]:
        logger.warning(
            "%s of the drafter's generation config cannot be kept inside of a target and %s not "
            "written. Give them to `generate`, or keep the drafter in a folder of its own.",
            ", ".join(left),
            "is" if len(left) == 1 else "are",
        )
    return sorted(set(written.values()))


def _payload(file: Path) -> int:
    """Bytes of all tensors in a file."""
    return max((tensor.file_bytes for tensor in read_header(file).values()), default=0)


def _check_pair(drafter: "DSparkDrafter", raw: dict[str, Any], folder: Path) -> None:
    config = drafter.config
    if config.backbone_config.model_type != DEEPSEEK_V4 or config.stores_input_embeddings:
        raise ValueError(
            f"Only drafters with DeepSeek-V4 layers and without an embedding of their own can be "
            f"stored inside a target; this one has {config.backbone_config.model_type!r} layers "
            f"and stores_input_embeddings={config.stores_input_embeddings}."
        )
    if raw.get("model_type") != DEEPSEEK_V4:
        raise ValueError(
            f"{folder} holds a model of type {raw.get('model_type')!r}; a DeepSeek-V4 drafter "
            "belongs into a 'deepseek_v4' target."
        )
    # Inside of a target there is one config.json for both, so a drafter that differs in any of
    # these would come back as another one.
    told = shared_facts(ConfigReader(raw, str(folder), {}))
    backbone, read = config.backbone_config, AutoConfig.for_model(**told)
    facts = {name: (getattr(read, name), getattr(backbone, name)) for name in told}
    # The other rotary embedding is that of compressed layers, and a drafter has none.
    read_rotary, own_rotary = facts.pop("rope_parameters")
    facts["rope_parameters"] = (read_rotary["main"], own_rotary["main"])
    depth = (raw.get("num_hidden_layers"), config.num_target_layers)
    for name, (found, expected) in {**facts, "num_hidden_layers": depth}.items():
        if found != expected:
            raise ValueError(
                f"{folder} is not this drafter's target: its {name} is {found}, the drafter was "
                f"trained for {expected}."
            )


def _config_keys(drafter: "DSparkDrafter", raw: dict[str, Any]) -> dict[str, Any]:
    config = drafter.config
    keys = {
        "dspark_block_size": config.block_size,
        "dspark_noise_token_id": config.mask_token_id,
        "dspark_target_layer_ids": list(config.target_layer_ids),
        "dspark_markov_rank": config.markov_rank,
    }
    ratios = raw.get("compress_ratios")
    if ratios:
        stages = config.backbone_config.num_hidden_layers
        keys["compress_ratios"] = ratios[: raw["num_hidden_layers"]] + [0] * stages
    return keys


def _stage_tensors(drafter: "DSparkDrafter", stage: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Stored name and tensor of everything under `mtp.{stage}.`."""
    backbone = drafter.config.backbone_config
    is_quantised = backbone.expert_dtype == "fp4"
    last, prefix = backbone.num_hidden_layers - 1, f"mtp.{stage}."
    for own, tensor in drafter.state_dict().items():
        parts = stored_parts(own, last, backbone.num_local_experts)
        if not parts[0][0].startswith(prefix):
            continue
        value = tensor.detach().cpu()
        if len(parts) > 1:
            for names, expert in zip(parts, value, strict=True):
                for name, rows in zip(names, expert.chunk(len(names)), strict=True):
                    yield name, _packed_type(name, rows.contiguous())
        elif is_quantised:
            yield from _published_formats(parts[0][0], value, prefix)
        else:
            yield parts[0][0], value.contiguous()


def _packed_type(name: str, rows: torch.Tensor) -> torch.Tensor:
    if rows.dtype != torch.uint8:
        return rows
    return rows.view(torch.float8_e8m0fnu if name.endswith(".scale") else torch.int8)


def _published_formats(
    name: str, value: torch.Tensor, prefix: str
) -> Iterator[tuple[str, torch.Tensor]]:
    rest = name.removeprefix(prefix)
    if rest in _FP8:
        encoded = quantise_fp8(value)
        if encoded is None:
            raise ValueError(_inexact(name, "FP8"))
        yield name, encoded[0]
        yield name.removesuffix("weight") + "scale", encoded[1]
        return
    dtype = torch.float32 if rest.endswith(_FLOAT32) else torch.bfloat16
    stored = value.to(dtype).contiguous()
    if not torch.equal(stored.to(value.dtype), value):
        raise ValueError(_inexact(name, str(dtype).removeprefix("torch.")))
    yield name, stored


def _inexact(name: str, form: str) -> str:
    return (
        f"{name} has no exact {form} form, so it was changed after it was loaded. Save the drafter "
        "in this library's layout with save_pretrained."
    )


def _read(path: Path, what: str) -> dict[str, Any]:
    if not path.is_file():
        raise OSError(
            f"{path.parent} has no {what} ({path.name}). Give the folder of a DeepSeek-V4 target "
            "whose weights are in shards."
        )
    return read_object(path)

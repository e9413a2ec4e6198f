"""From a path or Hub id to a drafter: files, dialect, tensor check, then the host's own loading."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import GenerationConfig
from transformers.utils import GENERATION_CONFIG_NAME

from ..configuration_dspark import DSparkConfig
from . import deepseek_v4
from .deepseek_v4 import DEEPSEEK_V4
from .dialects import DSPARK, detect_dialect, normalise
from .files import (
    FLOAT_BYTES,
    HUB_ARGUMENTS,
    TensorInfo,
    fetch,
    read_config,
    read_tensors,
    read_tensors_remotely,
)

# What the host's classes raise when a value of config.json has a wrong type or size.
_MALFORMED = (ArithmeticError, AttributeError, LookupError, StrictDataclassError, TypeError)


@dataclass(frozen=True)
class CheckpointFacts:
    """What is known about a checkpoint before its weights are loaded."""

    source: str
    dialect: str
    raw_config: dict[str, Any]
    config: DSparkConfig
    tensors: dict[str, TensorInfo]

    @property
    def files(self) -> list[str]:
        """Weight files that hold the drafter."""
        return sorted({tensor.file for tensor in self.tensors.values()})


def read_facts(cls: type, source: str, download_weights: bool, **hub: Any) -> CheckpointFacts:
    """
    Read and check everything but the weights.

    Args:
        cls (`type`):
            the drafter class, built on the meta device to know which tensors belong to it.
        source (`str`): folder or Hub id.
        download_weights (`bool`): fetch weight files, or only their headers.

    Raises:
        `ValueError` or `OSError`: see [`DSparkDrafter.from_pretrained`].
    """
    raw = read_config(source, **hub)
    # Refuse foreign layouts before gigabytes travel; tensor names are looked at again below.
    dialect = detect_dialect(raw, source)
    read = read_tensors if download_weights else read_tensors_remotely
    wanted = deepseek_v4.is_stored_part if dialect == DEEPSEEK_V4 else None
    tensors = read(source, wanted, **hub)
    dialect = detect_dialect(raw, source, tensors)
    try:
        config = normalise(raw, dialect, source, tensors, **hub)
        check_tensors(cls, config, tensors, source, dialect)
    except _MALFORMED as error:
        raise ValueError(
            f"{source}: config.json describes a drafter that cannot be built "
            f"({type(error).__name__}: {error}). Take config.json from the original checkpoint."
        ) from error
    return CheckpointFacts(source, dialect, raw, config, tensors)


def check_tensors(
    cls: type, config: DSparkConfig, tensors: dict[str, TensorInfo], source: str, dialect: str
) -> None:
    """
    Compare stored tensors with what the drafter consists of. Raises `ValueError` listing the
    differences.
    """
    own = _own_tensors(cls, config)
    expected = {name: tuple(tensor.shape) for name, tensor in own.items()}
    quantised = []
    if dialect == DEEPSEEK_V4:
        deepseek_v4.check_dtypes(tensors, source)
        expected = deepseek_v4.stored_shapes(expected, config, tensors)
    else:
        # Experts that stay packed are bytes in our own layout too.
        quantised = sorted(
            name
            for name in set(expected) & set(tensors)
            if tensors[name].dtype not in (FLOAT_BYTES if own[name].is_floating_point() else ("U8",))
        )
    if quantised:
        raise ValueError(
            f"{source}: {len(quantised)} tensors are stored as {tensors[quantised[0]].dtype}, for "
            f"example {quantised[0]}. Quantised drafters of this layout are not read; use the "
            "unquantised checkpoint."
        )
    problems = [f"missing {name} {expected[name]}" for name in sorted(set(expected) - set(tensors))]
    problems += [
        f"unexpected {name} {tensors[name].shape}" for name in sorted(set(tensors) - set(expected))
    ]
    problems += [
        f"{name} has shape {tensors[name].shape}, config.json asks for {expected[name]}"
        for name in sorted(set(expected) & set(tensors))
        if tensors[name].shape != expected[name]
    ]
    if problems:
        more = f" … and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise ValueError(
            f"{source}: the weights do not fit config.json: {'; '.join(problems[:8])}{more}. "
            "The two come from different checkpoints, or the files are incomplete."
        )


def _own_tensors(cls: type, config: DSparkConfig) -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        return cls(config).state_dict()


def load_drafter(
    cls: type,
    host_from_pretrained: Callable[..., Any],
    source: str | os.PathLike,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """`DSparkDrafter.from_pretrained`; `host_from_pretrained` is the host's own classmethod."""
    if kwargs.get("trust_remote_code"):
        raise ValueError(
            "trust_remote_code=True is not supported: this library never runs code of a repository."
        )
    if kwargs.get("use_safetensors") is False:
        raise ValueError(
            "use_safetensors=False is not supported: only safetensors weights are read."
        )
    if kwargs.get("variant") is not None:
        raise ValueError(
            f"variant={kwargs['variant']!r} is not supported: one set of weights is read, and "
            "dtype converts it."
        )
    if kwargs.get("quantization_config") is not None:
        raise ValueError(
            "Drafters are not quantised on loading; leave quantization_config to the target."
        )
    source = os.fspath(source)
    hub = {name: kwargs[name] for name in HUB_ARGUMENTS if kwargs.get(name) is not None}
    facts = read_facts(cls, source, download_weights=True, **hub)
    # An auto class hands over the config that it read; a caller may have changed it on purpose.
    given = kwargs.pop("config", None)
    config = given if isinstance(given, DSparkConfig) and facts.dialect == DSPARK else facts.config
    generation_config = kwargs.pop("generation_config", None)
    stored = fetch(source, GENERATION_CONFIG_NAME, **hub) if generation_config is None else None
    if stored is not None:
        generation_config = GenerationConfig.from_pretrained(os.path.dirname(stored))
    want_info = kwargs.pop("output_loading_info", False)
    origin: str | None = source
    if facts.dialect == DEEPSEEK_V4:
        origin, kwargs["state_dict"] = None, _read_embedded(cls, facts, **hub)
        for name in HUB_ARGUMENTS:
            kwargs.pop(name, None)
    drafter, info = host_from_pretrained(
        origin, *args, config=config, output_loading_info=True, **kwargs
    )
    drafter.config.name_or_path = source
    missing = sorted(info["missing_keys"])
    if missing:
        raise ValueError(
            f"{source}: the host library did not find {missing} when loading; it would be random."
        )
    if generation_config is not None:
        drafter.generation_config = generation_config
    return (drafter, info) if want_info else drafter


def _read_embedded(cls: type, facts: CheckpointFacts, **hub: Any) -> dict[str, torch.Tensor]:
    local = {file: fetch(facts.source, file, **hub) for file in facts.files}
    paths = {name: str(local[tensor.file]) for name, tensor in facts.tensors.items()}
    with deepseek_v4.StoredDrafter(paths) as stored:
        return stored.state_dict(_own_tensors(cls, facts.config), facts.config)

"""From a path or Hub id to a drafter: files, dialect, tensor check, then the host's own loading."""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import safe_open
from transformers import GenerationConfig, PreTrainedConfig
from transformers.utils import GENERATION_CONFIG_NAME

from ..configuration_drafter import DrafterConfig
from . import deepseek_v4
from .adapting import adapt_weights
from .detection import (
    DEEPSEEK_V4,
    EAGLE3_DIALECTS,
    UnsupportedCheckpointError,
    detect_dialect,
)
from .dialects import read_dialect, refuse_stated
from .files import (
    FLOAT_BYTES,
    HUB_ARGUMENTS,
    ID_TYPES,
    TensorInfo,
    fetch,
    names_that_tell,
    read_config,
    read_tensors,
    read_tensors_remotely,
)
from .reading import ConfigReader, Reading

logger = logging.getLogger(__name__)

# The one tensor of a drafter that holds token ids.
DRAFT_TO_TARGET = "draft_to_target"

_PRECISIONS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

# What the host's classes and torch raise when a value of config.json has a wrong type or size.
_MALFORMED = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RuntimeError,
    StrictDataclassError,
    TypeError,
)


@dataclass(frozen=True)
class CheckpointFacts:
    """What is known about a checkpoint before its weights are loaded."""

    source: str
    dialect: str
    raw_config: dict[str, Any]
    reading: Reading
    tensors: dict[str, TensorInfo]

    @property
    def config(self) -> DrafterConfig:
        """The trained facts in the normal form."""
        return self.reading.config


def read_facts(
    cls: Any,
    source: str,
    download_weights: bool,
    block_layout: str | None = None,
    num_target_layers: int | None = None,
    **hub: Any,
) -> CheckpointFacts:
    """
    Read and check everything but the weights.

    Args:
        cls (`type`):
            the drafter class, built on the meta device to know which tensors belong to it.
        source (`str`): folder or Hub id.
        download_weights (`bool`): fetch weight files, or only their headers.
        block_layout (`str`, *optional*):
            `"anchor_first"` or `"infill"`, over what the checkpoint says.
        num_target_layers (`int`, *optional*):
            Depth of the target, for EAGLE-3 files that leave their taps to a rule over it.

    Raises:
        `ValueError` or `OSError`: see [`DSparkDrafter.from_pretrained`].
    """
    raw = read_config(source, **hub)
    # Refuse foreign layouts before gigabytes travel; tensor names are looked at again below.
    dialect = detect_dialect(raw, source, names_that_tell(raw, source, **hub))
    _check_kind(cls, dialect, raw, source)
    wanted = deepseek_v4.is_stored_part if dialect == DEEPSEEK_V4 else None
    tensors = (read_tensors if download_weights else read_tensors_remotely)(source, wanted, **hub)
    dialect = detect_dialect(raw, source, tensors)
    try:
        if dialect == DEEPSEEK_V4:
            refuse_stated(source, dialect, block_layout, num_target_layers)
            reading = deepseek_v4.read_deepseek_v4(ConfigReader(raw, source, tensors), **hub)
            own = meta_state(cls, reading.config)
            deepseek_v4.check_stored(own, reading.config, tensors, source)
        else:
            reading = read_dialect(raw, dialect, source, tensors, block_layout, num_target_layers)
            check_tensors(cls, reading, tensors, source)
    except _MALFORMED as error:
        raise ValueError(
            f"{source}: config.json describes a drafter that cannot be built "
            f"({type(error).__name__}: {error}). Take config.json from the original checkpoint."
        ) from error
    _check_dtype(reading.config, source)
    return CheckpointFacts(source, dialect, raw, reading, tensors)


def _check_dtype(config: DrafterConfig, source: str) -> None:
    """Refuse a precision that the draft layers do not compute in; loading would end deep inside."""
    if config.dtype not in (None, *_PRECISIONS):
        raise ValueError(
            f"{source}: config.json says dtype {config.dtype!r}; drafters are in one of "
            f"{', '.join(map(str, _PRECISIONS))}. Take it from the original checkpoint."
        )


def _check_kind(cls: Any, dialect: str, raw: dict[str, Any], source: str) -> None:
    """Refuse a drafter of the other kind."""
    is_eagle3 = dialect in EAGLE3_DIALECTS
    if is_eagle3 == cls.is_autoregressive:
        return
    kind, loader = (
        ("an Eagle3 drafter", "Eagle3Drafter")
        if is_eagle3
        else ("a block drafter", "DSparkDrafter")
    )
    raise UnsupportedCheckpointError(
        f"{source} is {kind} (layout {dialect}, architectures {raw.get('architectures')!r}), which "
        f"{cls.__name__} cannot be. Load it with dspark_hf.{loader}.from_pretrained({source!r})."
    )


def check_tensors(cls: Any, reading: Reading, stored: dict[str, TensorInfo], source: str) -> None:
    """
    Compare stored tensors with what the drafter consists of. Raises `ValueError` listing the
    differences, under the names that the files have.
    """
    state = meta_state(cls, reading.config)
    expected = {name: tuple(tensor.shape) for name, tensor in state.items()}
    tensors = reading.tensors_by_our_name(stored)
    file_names = {ours: theirs for theirs, ours in reading.renames.items()}
    quantised = sorted(
        name
        for name in set(expected) & set(tensors)
        # Experts that stay packed are bytes here too.
        if tensors[name].dtype not in (("U8",) if state[name].dtype == torch.uint8 else FLOAT_BYTES)
        and name != DRAFT_TO_TARGET
    )
    ids = tensors.get(DRAFT_TO_TARGET)
    if ids is not None and ids.dtype not in ID_TYPES:
        raise ValueError(
            f"{source}: {file_names.get(DRAFT_TO_TARGET, DRAFT_TO_TARGET)} is stored as "
            f"{ids.dtype}; token ids are stored as {', '.join(ID_TYPES)}. Take the file from the "
            "original checkpoint."
        )
    if quantised:
        first = quantised[0]
        raise ValueError(
            f"{source}: {len(quantised)} tensors are stored as {tensors[first].dtype}, for "
            f"example {file_names.get(first, first)}. Quantised drafters of this layout are not "
            "read; use the unquantised checkpoint."
        )
    missing, unexpected = sorted(set(expected) - set(tensors)), sorted(set(tensors) - set(expected))
    problems = [f"missing {name} {expected[name]}" for name in missing]
    problems += [
        f"unexpected {file_names.get(name, name)} {tensors[name].shape}" for name in unexpected
    ]
    problems += [
        f"{file_names.get(name, name)} has shape {tensors[name].shape}, config.json asks for "
        f"{expected[name]}"
        for name in sorted(set(expected) & set(tensors))
        if tensors[name].shape != expected[name]
    ]
    if problems:
        more = f" … and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise ValueError(
            f"{source}: the weights do not fit config.json: {'; '.join(problems[:8])}{more}. "
            "The two come from different checkpoints, or the files are incomplete."
        )


def meta_state(cls: Any, config: DrafterConfig) -> dict[str, torch.Tensor]:
    """What a drafter consists of, without its values."""
    with torch.device("meta"):
        return cls(config).state_dict()


def load_drafter(
    cls: Any,
    host_from_pretrained: Callable[..., Any],
    source: str | os.PathLike,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """A drafter's `from_pretrained`; `host_from_pretrained` is the host's own classmethod."""
    if kwargs.get("trust_remote_code"):
        raise ValueError(
            "trust_remote_code=True is not supported: this library never runs code of a repository."
        )
    if kwargs.get("use_safetensors") is False:
        raise ValueError(
            "use_safetensors=False is not supported: only safetensors weights are read."
        )
    if kwargs.get("gguf_file") is not None:
        raise ValueError("gguf_file is not supported: only safetensors weights are read.")
    if kwargs.get("variant") is not None:
        raise ValueError(
            f"variant={kwargs['variant']!r} is not supported: one set of weights is read, and "
            "dtype converts it."
        )
    if kwargs.get("state_dict") is not None:
        raise ValueError(
            "state_dict is not supported: the weights are those of the checkpoint. Load it, and "
            "call load_state_dict."
        )
    if kwargs.get("quantization_config") is not None:
        raise ValueError(
            "Drafters are not quantised on loading; leave quantization_config to the target."
        )
    source = os.fspath(source)
    hub = {name: kwargs[name] for name in HUB_ARGUMENTS if kwargs.get(name) is not None}
    told = {key: kwargs.pop(key, None) for key in ("block_layout", "num_target_layers")}
    facts = read_facts(cls, source, download_weights=True, **told, **hub)
    for warning in facts.reading.warnings:
        logger.warning("%s: %s", source, warning)
    # An auto class hands over the config that it read; a caller may have changed it on purpose.
    given = kwargs.pop("config", None)
    if given is not None and not isinstance(given, PreTrainedConfig):
        raise ValueError(
            f"config is a {type(given).__name__}; leave it out, or give a "
            f"{cls.config_class.__name__}."
        )
    is_own = facts.dialect == cls.config_class.model_type
    config = given if is_own and isinstance(given, cls.config_class) else facts.config
    generation_config = kwargs.pop("generation_config", None)
    # A target's generation config is not its drafter's.
    has_own = generation_config is None and facts.dialect != DEEPSEEK_V4
    stored = fetch(source, GENERATION_CONFIG_NAME, **hub) if has_own else None
    if stored is not None:
        generation_config = GenerationConfig.from_pretrained(os.path.dirname(stored))
    # All files are here by now; asked for once more, they would be downloaded once more.
    for options in (hub, kwargs):
        options.pop("force_download", None)
    want_info = kwargs.pop("output_loading_info", False)
    origin: str | None = source
    if facts.dialect == DEEPSEEK_V4:
        # The host would fetch the whole target.
        origin, kwargs["state_dict"] = None, _read_embedded(cls, facts, **hub)
        kwargs = {name: value for name, value in kwargs.items() if name not in HUB_ARGUMENTS}
    drafter, info = host_from_pretrained(
        origin,
        *args,
        config=config,
        output_loading_info=True,
        key_mapping=facts.reading.key_mapping,
        **kwargs,
    )
    drafter.name_or_path = drafter.config.name_or_path = source
    # The host would undo the renames on saving; what is saved is our layout.
    drafter._weight_conversions = None
    missing = sorted(info["missing_keys"])
    if missing:
        raise ValueError(
            f"{source}: the host library did not find {missing} when loading; it would be random."
        )
    adapt_weights(drafter, facts.reading, source)
    _check_draft_vocabulary(drafter, source)
    if "d2t" in facts.reading.unneeded:
        _check_full_map(fetch(source, facts.tensors["d2t"].file, **hub), source)
    elif "t2d" in facts.reading.unneeded and drafter.config.draft_vocab_size is not None:
        _check_membership(drafter, fetch(source, facts.tensors["t2d"].file, **hub), source)
    if generation_config is not None:
        drafter.generation_config = generation_config
    # A file of a published repository is its target's and knows nothing of drafts.
    is_silent = drafter.generation_config.dspark_draft_sampling is None
    if facts.reading.greedy_drafts and has_own and is_silent:
        drafter.generation_config.dspark_draft_sampling = "greedy"
    return (drafter, info) if want_info else drafter


def _read_embedded(cls: Any, facts: CheckpointFacts, **hub: Any) -> dict[str, torch.Tensor]:
    files = {tensor.file for tensor in facts.tensors.values()}
    local = {file: str(fetch(facts.source, file, **hub)) for file in files}
    paths = {name: local[tensor.file] for name, tensor in facts.tensors.items()}
    with deepseek_v4.StoredDrafter(paths) as stored:
        return stored.state_dict(meta_state(cls, facts.config), facts.config)


def _check_draft_vocabulary(drafter: Any, source: str) -> None:
    if drafter.config.draft_vocab_size is None:
        return
    ids = drafter.draft_to_target
    wrong = ids.is_floating_point() or int(ids.min()) < 0
    if wrong or int(ids.max()) >= drafter.config.vocab_size or len(ids.unique()) < len(ids):
        raise ValueError(
            f"{source}: {DRAFT_TO_TARGET} must hold {len(ids)} different token ids from 0 to "
            f"{drafter.config.vocab_size - 1} of an integer type; found {ids.dtype} from "
            f"{ids.min().item()} to {ids.max().item()}, {len(ids.unique())} of them different. "
            "Take the file from the original checkpoint."
        )


def _check_full_map(path: str | None, source: str) -> None:
    """The offsets of a vocabulary that is not reduced move no token."""
    with safe_open(str(path), framework="pt") as file:
        offsets = file.get_tensor("d2t")
    if offsets.any():
        raise ValueError(
            f"{source}: draft_vocab_size says that every token can be drafted, and d2t moves "
            f"{int(offsets.count_nonzero())} of them. The two come from different checkpoints."
        )


def _check_membership(drafter: Any, path: str | None, source: str) -> None:
    """The map of a reduced vocabulary and the stored list of its tokens must agree."""
    with safe_open(str(path), framework="pt") as file:
        members = file.get_tensor("t2d").nonzero().flatten()
    if not torch.equal(members, drafter.draft_to_target.sort().values.to(members.device)):
        raise ValueError(
            f"{source}: d2t and t2d disagree about which of the target's tokens can be drafted. "
            "The map was replaced or damaged: take the file from the original checkpoint."
        )

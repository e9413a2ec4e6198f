"""The file that describes a training run, and what is wrong with it."""

import copy
import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

import yaml
from huggingface_hub.errors import StrictDataclassError
from transformers import Qwen3Config, TrainingArguments
from transformers.integrations import get_available_reporting_integrations

from .build import build_drafter, build_eagle3
from .host_arguments import check_host_arguments, more_is_better
from .numbers import read_numbers
from .objective import ObjectiveWeights

# DFlash (paper section 7): no heads, cross-entropy alone.
DFLASH_WEIGHTS = {"ce": 1.0, "tv": 0.0, "confidence": 0.0}
DFLASH_FIELDS = {"markov_head_type": None, "confidence_head": False}

# Of the config of Qwen3 layers: what the builders have a name of their own for, or the target says.
_NOT_LAYER_FIELDS = {"num_hidden_layers", "vocab_size", "model_type", "transformers_version"}

_NOT_WITH_MUON = {"optim", "optim_args", "optim_target_modules", "fsdp"}


@dataclass
class RunConfig:
    """
    A training run. What is not given has the released recipe's value where that fits one machine.

    Attributes:
        target (`str`): path or Hub id.
        data (`str`): folder of `dspark-hf data`, or one JSONL file or dataset (5 % is set aside;
            see [`open_source`]).
        output (`str`): folder of checkpoints and of the finished drafter.
        drafter (`dict`):
            Arguments of [`build_drafter`] (`mask_token_id` is needed) or [`build_eagle3`].
            `draft_vocab_size` asks for the most frequent tokens of the data.
        family (`str`): `"dspark"`, `"dflash"` or `"eagle3"`.
        init_from (`str`, *optional*): drafter to start from.
        objective (`dict`): fields of [`ObjectiveWeights`].
        num_anchors (`int`, *optional*):
            Per example and step, 512 by default; Eagle3 learns at every position.
        max_length (`int`): longer examples are cut.
        dtype (`str`): of the target. The drafter trains in float32, or in mixed precision if the
            trainer's `bf16` is set, and is saved in the target's.
        feature_cache (`str`, *optional*): folder that keeps the target's states.
        on_error (`str`): `"raise"` or `"skip"` malformed rows.
        muon (`bool`): [`MuonWithAdamW`] in place of the host's `optim`.
        trainer (`dict`):
            Fields of the host's `TrainingArguments`; see [`check_host_arguments`] for those that
            are refused.

    Raises:
        `ValueError`: a value that cannot be, or that the family has no use for.
    """

    target: str
    data: str
    output: str
    drafter: dict[str, Any]
    family: str = "dspark"
    init_from: str | None = None
    objective: dict[str, float] = field(default_factory=dict)
    num_anchors: int | None = None
    max_length: int = 4096
    dtype: str = "bfloat16"
    feature_cache: str | None = None
    on_error: str = "raise"
    muon: bool = False
    trainer: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("target", "data", "output", "init_from", "feature_cache"):
            value = getattr(self, name)
            may_be_left_out = name in ("init_from", "feature_cache")
            if not (isinstance(value, str) and value) and not (may_be_left_out and value is None):
                raise ValueError(f"{name} must be a path or a Hub id, found {value!r}.")
        if self.num_anchors is None and self.family != "eagle3":
            self.num_anchors = 512
        for name in ("num_anchors", "max_length"):
            value = getattr(self, name)
            is_unused = name == "num_anchors" and value is None
            if not is_unused and (type(value) is not int or value < 1):
                raise ValueError(f"{name} must be an integer of at least 1, found {value!r}.")
        for name, known in (
            ("family", ("dspark", "dflash", "eagle3")),
            ("on_error", ("raise", "skip")),
            ("dtype", ("float32", "bfloat16", "float16")),
        ):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} is {getattr(self, name)!r}; known: {', '.join(known)}.")
        if not isinstance(self.muon, bool):
            raise ValueError(f"muon must be true or false, found {self.muon!r}.")
        for name in ("drafter", "objective", "trainer"):
            if not isinstance(getattr(self, name), dict):
                raise ValueError(
                    f"{name} must hold keys and values, found {getattr(self, name)!r}."
                )
        self._read_sections()
        self._check_family()
        try:
            json.dumps(dataclasses.asdict(self))
        except TypeError as error:
            raise ValueError(
                f"The run cannot be noted in its folder ({error}). Use text, numbers, lists and "
                "true or false."
            ) from error

    def _read_sections(self) -> None:
        """Turn the text in them that means numbers into numbers, and check each by itself."""
        _check_keys("objective", self.objective, ObjectiveWeights)
        _check_keys("trainer", self.trainer, TrainingArguments)
        check_host_arguments(self.trainer)
        metric, greater = map(self.trainer.get, ("metric_for_best_model", "greater_is_better"))
        if metric and greater not in (None, more_is_better(metric)):
            raise ValueError(
                f"trainer.greater_is_better is {greater!r}, which would keep the worst drafter by "
                f"{metric}. Leave it out: it follows from metric_for_best_model."
            )
        self.objective = read_numbers("objective", self.objective, get_type_hints(ObjectiveWeights))
        self.trainer = read_numbers("trainer", self.trainer, get_type_hints(TrainingArguments))
        _check_trainer(self.trainer)
        if self.muon and (other := _NOT_WITH_MUON & set(self.trainer)):
            raise ValueError(
                f"muon is an optimiser of its own, over whole matrices, and trainer has "
                f"{', '.join(sorted(other))}. Leave one of them out."
            )
        self.drafter = _read_drafter(self.family, self.drafter)

    def _check_family(self) -> None:
        """What one section says and another one has no use for."""
        if self.family == "eagle3":
            for name, reason in (
                ("objective", "weighs the terms of block drafters; eagle3 has one"),
                ("num_anchors", "is of block drafters; eagle3 learns at every position"),
            ):
                if getattr(self, name):
                    raise ValueError(f"{name} {reason}. Leave it out.")
            return
        if "mask_token_id" not in self.drafter:
            raise ValueError(
                "drafter.mask_token_id is missing. It fills the block, so take the id of a token "
                "that text never contains: a reserved one of tokenizer.added_tokens_decoder."
            )
        fields = {**self.drafter, **(DFLASH_FIELDS if self.family == "dflash" else {})}
        if "markov_rank" in fields and fields.get("markov_head_type", "vanilla") is None:
            raise ValueError("drafter.markov_rank is of a head that markov_head_type leaves out.")
        if self.objective.get("confidence") and not fields.get("confidence_head", True):
            raise ValueError(
                f"objective.confidence is {self.objective['confidence']}, and the drafter has no "
                "confidence head to learn it. Leave it out."
            )
        self.weights()

    def weights(self) -> ObjectiveWeights:
        """Of the terms: the family's, with what `objective` says in their place."""
        own = DFLASH_WEIGHTS if self.family == "dflash" else {}
        return ObjectiveWeights(**{**own, **self.objective})

    @classmethod
    def load(cls, path: str | Path) -> "RunConfig":
        """
        Read a YAML file. Raises `ValueError` naming unknown or missing keys.
        """
        try:
            content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is not YAML: {error}") from error
        if not isinstance(content, dict):
            raise ValueError(f"{path}: expected keys and values, found {type(content).__name__}.")
        fields = dataclasses.fields(cls)
        unknown = sorted(set(content) - {f.name for f in fields})
        missing = [
            f.name
            for f in fields
            if f.default is f.default_factory is dataclasses.MISSING and f.name not in content
        ]
        if unknown or missing:
            raise ValueError(
                f"{path}: unknown keys {unknown or 'none'}, missing keys {missing or 'none'}; "
                f"known are {', '.join(f.name for f in fields)}."
            )
        return cls(**content)


def _check_keys(name: str, found: dict[str, Any], known: type) -> None:
    unknown = sorted(set(found) - {f.name for f in dataclasses.fields(known)}, key=str)
    if unknown:
        raise ValueError(f"{name}: {known.__name__} has no {', '.join(map(str, unknown))}.")


def _check_trainer(found: dict[str, Any]) -> None:
    if "output_dir" in found:
        raise ValueError("trainer.output_dir is the run's own output; leave it out.")
    reports = found.get("report_to") or []
    reports = [reports] if isinstance(reports, str) else reports
    available = get_available_reporting_integrations()
    if absent := [name for name in reports if name not in ("none", "all", *available)]:
        raise ValueError(
            f"trainer.report_to: {', '.join(map(str, absent))} is not installed or not known to "
            f"Transformers; here it can be {', '.join(['none', *available])}. "
            "`pip install tensorboard` brings TensorBoard."
        )


def _read_drafter(family: str, found: dict[str, Any]) -> dict[str, Any]:
    """What the builder would refuse or the family overrule, before the target is loaded."""
    build = build_eagle3 if family == "eagle3" else build_drafter
    own = {**get_type_hints(build), "draft_vocab_size": int}
    for name in ("return", "target", "draft_vocabulary", "layer_fields"):
        del own[name]
    if family == "dflash":
        for name in (*DFLASH_FIELDS, "markov_rank"):
            del own[name]
    layer = set(Qwen3Config().to_dict()) - _NOT_LAYER_FIELDS
    if unknown := sorted(set(found) - set(own) - layer, key=str):
        raise ValueError(
            f"drafter: {family} has no {', '.join(map(str, unknown))}; known are "
            f"{', '.join(sorted(own))} and the config fields of Qwen3 layers."
        )
    types = {f.name: f.type for f in dataclasses.fields(Qwen3Config)}
    found = read_numbers("drafter", found, {**types, **own})
    for name in ("block_size", "draft_vocab_size", "num_layers", "markov_rank"):
        if found.get(name, 1) < 1:
            raise ValueError(
                f"drafter.{name} must be an integer of at least 1, found {found[name]!r}."
            )
    try:
        # The host fills up what it is given.
        Qwen3Config(**copy.deepcopy({k: v for k, v in found.items() if k not in own}))
    except StrictDataclassError as error:
        raise ValueError(f"drafter: {error}") from error
    return found

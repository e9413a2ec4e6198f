"""`dspark-hf train config.yaml`: one file describes a training run."""

import dataclasses
import inspect
import json
import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from rich.console import Console
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen3Config,
    TrainingArguments,
)
from transformers.integrations import get_available_reporting_integrations

from .. import __version__
from .._files import write_json
from ..modeling_dspark import DSparkDrafter
from ..modeling_eagle3 import Eagle3Drafter
from .build import build_drafter, build_eagle3, frequent_tokens, warm_start
from .collecting import FILES, PROVENANCE, changed_settings
from .data import DraftDataset, Example, MalformedRow, make_example, usable_rows
from .feature_cache import FeatureCache, bytes_per_token
from .objective import ObjectiveWeights
from .sources import open_source
from .target_states import TargetReader
from .trainer import DSparkTrainer, last_complete_checkpoint

RESULT = "training_result.json"
# What the run in a folder is, written before its first step.
STARTED_WITH = "training_config.json"

_NUMBER = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+")

# DFlash (paper section 7): no heads, cross-entropy alone.
_DFLASH_WEIGHTS = {"ce": 1.0, "tv": 0.0, "confidence": 0.0}
_DFLASH_FIELDS = {"markov_head_type": None, "confidence_head": False}


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
        num_anchors (`int`): per example and step.
        max_length (`int`): longer examples are cut.
        dtype (`str`): of the target. The drafter trains in float32, or in mixed precision if the
            trainer's `bf16` is set, and is saved in the target's.
        feature_cache (`str`, *optional*): folder that keeps the target's states.
        on_error (`str`): `"raise"` or `"skip"` malformed rows.
        trainer (`dict`): fields of the host's `TrainingArguments`.
    """

    target: str
    data: str
    output: str
    drafter: dict[str, Any]
    family: str = "dspark"
    init_from: str | None = None
    objective: dict[str, float] = field(default_factory=dict)
    num_anchors: int = 512
    max_length: int = 4096
    dtype: str = "bfloat16"
    feature_cache: str | None = None
    on_error: str = "raise"
    trainer: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("target", "data", "output", "init_from", "feature_cache"):
            value = getattr(self, name)
            may_be_left_out = name in ("init_from", "feature_cache")
            if not (isinstance(value, str) and value) and not (may_be_left_out and value is None):
                raise ValueError(f"{name} must be a path or a Hub id, found {value!r}.")
        for name in ("num_anchors", "max_length"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} must be an integer of at least 1, found {value!r}.")
        for name, known in (
            ("family", ("dspark", "dflash", "eagle3")),
            ("on_error", ("raise", "skip")),
            ("dtype", ("float32", "bfloat16", "float16")),
        ):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} is {getattr(self, name)!r}; known: {', '.join(known)}.")
        for name in ("drafter", "objective", "trainer"):
            if not isinstance(getattr(self, name), dict):
                raise ValueError(
                    f"{name} must hold keys and values, found {getattr(self, name)!r}."
                )
        _check_keys("objective", self.objective, ObjectiveWeights)
        _check_keys("trainer", self.trainer, TrainingArguments)
        # YAML reads 6e-4 as text; it wants 6.0e-4.
        self.objective, self.trainer = map(_with_numbers, (self.objective, self.trainer))
        ObjectiveWeights(**self.objective)
        _check_trainer(self.trainer)
        _check_drafter(self.family, self.drafter)
        if self.family == "eagle3" and self.objective:
            raise ValueError(
                "objective weighs the terms of block drafters; eagle3 has one. Leave it out."
            )
        if self.family != "eagle3" and "mask_token_id" not in self.drafter:
            raise ValueError(
                "drafter.mask_token_id is missing. It fills the block, so take the id of a token "
                "that text never contains: a reserved one of tokenizer.added_tokens_decoder."
            )

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
    unknown = sorted(set(found) - {f.name for f in dataclasses.fields(known)})
    if unknown:
        raise ValueError(f"{name}: {known.__name__} has no {', '.join(map(str, unknown))}.")


def _check_trainer(found: dict[str, Any]) -> None:
    if "output_dir" in found:
        raise ValueError("trainer.output_dir is the run's own output; leave it out.")
    for known in dataclasses.fields(TrainingArguments):
        # Numbers only: what the host writes as text, such as paths, is its own to check.
        is_number = isinstance(known.default, int | float) and not isinstance(known.default, bool)
        if is_number and isinstance(found.get(known.name), str):
            raise ValueError(f"trainer.{known.name} must be a number, found {found[known.name]!r}.")
    reports = found.get("report_to") or []
    reports = [reports] if isinstance(reports, str) else reports
    available = get_available_reporting_integrations()
    if absent := [name for name in reports if name not in ("none", "all", *available)]:
        raise ValueError(
            f"trainer.report_to: {', '.join(map(str, absent))} is not installed or not known to "
            f"Transformers; here it can be {', '.join(['none', *available])}. "
            "`pip install tensorboard` brings TensorBoard."
        )


def _check_drafter(family: str, found: dict[str, Any]) -> None:
    """What the builder would refuse or the family overrule, before the target is loaded."""
    build = build_eagle3 if family == "eagle3" else build_drafter
    own = {*inspect.signature(build).parameters, "draft_vocab_size"}
    own -= {"target", "draft_vocabulary", "layer_fields"}
    if family == "dflash":
        own -= {*_DFLASH_FIELDS, "markov_rank"}
    unknown = sorted(set(found) - own - set(Qwen3Config().to_dict()), key=str)
    if unknown:
        raise ValueError(
            f"drafter: {family} has no {', '.join(map(str, unknown))}; known are "
            f"{', '.join(sorted(own))} and the config fields of Qwen3 layers."
        )
    for name in ("block_size", "draft_vocab_size"):
        value = found.get(name, 1)
        if type(value) is not int or value < 1:
            raise ValueError(f"drafter.{name} must be an integer of at least 1, found {value!r}.")


def _with_numbers(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        name: float(value) if isinstance(value, str) and _NUMBER.fullmatch(value) else value
        for name, value in fields.items()
    }


def load_examples(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, block_size: int, console: Console
) -> tuple[DraftDataset, DraftDataset]:
    """
    Training and evaluation examples. Those with too few supervised tokens for one block are left
    out and counted.

    Raises:
        [`MalformedRow`]: a row that cannot be used, unless `on_error` is `"skip"`.
        `ValueError`: nothing is left.
    """

    def make(row: dict[str, Any], where: str) -> Example:
        return make_example(row, where, tokenizer, config.max_length)

    def skip(error: MalformedRow) -> None:
        console.print(f"skipped {error}", style="yellow", markup=False)

    folder = Path(config.data)
    collected = [folder / name for name in FILES]
    is_collected = (folder / PROVENANCE).exists() or all(map(Path.is_file, collected))
    sources = collected if is_collected else [open_source(config.data)]
    parts = []
    for source in sources:
        rows = list(usable_rows(source, make, skip if config.on_error == "skip" else None))
        examples = [example for example in rows if sum(example.loss_mask) > block_size]
        if short := len(rows) - len(examples):
            console.print(
                f"{source}: left out {short} rows with no more than {block_size} answer tokens."
            )
        parts.append(examples)
    if len(parts) == 1:
        parts = [parts[0][len(parts[0]) // 20 :], parts[0][: len(parts[0]) // 20]]
    if not parts[0]:
        raise ValueError(f"{config.data} holds no row that can be trained on.")
    revision = getattr(sources[0], "revision", None)
    return DraftDataset(parts[0], revision), DraftDataset(parts[1], revision)


def make_drafter(
    config: RunConfig, target: PreTrainedModel, train: DraftDataset, console: Console
) -> DSparkDrafter | Eagle3Drafter:
    """The drafter of a run before its first step, in float32."""
    fields = dict(config.drafter)
    if config.family == "dflash":
        fields.update(_DFLASH_FIELDS)
    size = fields.pop("draft_vocab_size", None)
    if size is not None:
        fields["draft_vocabulary"], share = frequent_tokens(
            train, size, target.config.get_text_config(decoder=True).vocab_size
        )
        console.print(f"The {size} draftable tokens cover {share:.2%} of the training answers.")
    build = build_eagle3 if config.family == "eagle3" else build_drafter
    drafter = build(target, **fields).float()
    if config.init_from is not None:
        source = type(drafter).from_pretrained(config.init_from, dtype=torch.float32)
        fresh = warm_start(drafter, source)
        console.print(f"Started from {config.init_from}; new: {', '.join(fresh) or 'nothing'}.")
    return drafter


def run_training(config: RunConfig, console: Console, assume_yes: bool = False) -> dict[str, Any]:
    """
    Train, evaluate, save the drafter in `output` and what the run was in `training_result.json`.

    A run that was interrupted goes on from its last checkpoint.

    Raises:
        `ValueError`: see [`RunConfig`], [`load_examples`], [`build_drafter`].
    """
    arguments = TrainingArguments(
        **{
            "output_dir": config.output,
            "learning_rate": 6e-4,
            "lr_scheduler_type": "cosine",
            "warmup_steps": 0.04,
            "per_device_train_batch_size": 1,
            "num_train_epochs": 10,
            "report_to": "none",
            **config.trainer,
        }
    )
    _remember(config)
    tokenizer = AutoTokenizer.from_pretrained(config.target)
    target = AutoModelForCausalLM.from_pretrained(config.target, dtype=getattr(torch, config.dtype))
    target.to(arguments.device)
    block_size = config.drafter.get("block_size", 7)
    train, validation = load_examples(config, tokenizer, block_size, console)
    _check_against_target(arguments, target, train, validation)
    facts = _card_facts(config, arguments, train)
    torch.manual_seed(arguments.seed)
    drafter = make_drafter(config, target, train, console).to(arguments.device)
    caches = _caches(config, arguments, target, drafter, (train, validation), console, assume_yes)
    weights = _DFLASH_WEIGHTS if config.family == "dflash" else {}
    trainer = DSparkTrainer(
        drafter,
        target,
        arguments,
        train,
        validation if len(validation) else None,
        ObjectiveWeights(**{**weights, **config.objective}),
        config.num_anchors,
        caches,
    )
    last = last_complete_checkpoint(config.output)
    if last:
        console.print(f"Going on from {last}.")
    started = time.perf_counter()
    trainer.train(resume_from_checkpoint=last)
    seconds = time.perf_counter() - started
    metrics = trainer.evaluate() if len(validation) else {}
    result = {
        "config": dataclasses.asdict(config),
        "versions": {
            "dspark_hf": __version__,
            "transformers": transformers.__version__,
            "torch": torch.__version__,
        },
        "training": {**facts, "steps": trainer.state.global_step},
        "processes": arguments.world_size,
        "examples": len(train),
        "answer_tokens": sum(sum(example.loss_mask) for example in train.examples),
        "steps": trainer.state.global_step,
        "seconds_of_last_session": round(seconds, 1),
        "evaluation": metrics,
        "history": trainer.state.log_history,
    }
    if trainer.is_world_process_zero():
        drafter.to(getattr(torch, config.dtype)).save_pretrained(config.output)
        write_json(Path(config.output) / RESULT, result)
    return result


def _card_facts(
    config: RunConfig, arguments: TrainingArguments, train: DraftDataset
) -> dict[str, Any]:
    """What a model card says about the training, by the words that stand in it."""
    facts: dict[str, Any] = {
        "target": _public_name(config.target),
        "precision of the target": config.dtype,
        "method": config.family,
        "started from": _public_name(config.init_from) if config.init_from else "random weights",
        "examples": len(train),
        "answer tokens": sum(sum(example.loss_mask) for example in train.examples),
        "examples per step": arguments.train_batch_size
        * arguments.gradient_accumulation_steps
        * arguments.world_size,
        "learning rate": arguments.learning_rate,
    }
    if train.revision is not None:
        facts["data"] = f"{config.data}, revision {train.revision}"
    provenance = Path(config.data) / PROVENANCE
    if provenance.is_file():
        made = json.loads(provenance.read_text(encoding="utf-8"))
        facts["answers"] = "the target's own"
        facts["temperatures of the answers"] = ", ".join(map(str, made.get("temperatures", ())))
        thinking = made.get("thinking")
        facts["thinking"] = "as the template has it" if thinking is None else thinking
    return facts


def _public_name(source: str) -> str:
    """A Hub id, or the last part of a path: where a folder lies says nothing to others."""
    return Path(source).resolve().name if Path(source).is_dir() else source


def _check_against_target(
    arguments: TrainingArguments,
    target: PreTrainedModel,
    train: DraftDataset,
    validation: DraftDataset,
) -> None:
    vocab_size = target.get_input_embeddings().num_embeddings
    largest = max(max(example.input_ids) for example in train.examples + validation.examples)
    if largest >= vocab_size:
        raise ValueError(
            f"The data holds token id {largest}, and the target embeds {vocab_size} tokens. Train "
            "on data that was made with this target and its tokenizer."
        )
    if arguments.eval_strategy != "no" and not len(validation):
        raise ValueError(
            f"trainer.eval_strategy is {arguments.eval_strategy.value!r}, and the data has no "
            "validation rows. Collect more prompts, raise --validation-share of `dspark-hf data`, "
            "or leave eval_strategy out."
        )


def _remember(config: RunConfig) -> None:
    """
    Note what the run in a folder is, so that another one does not go on from its checkpoints. The
    host compares its own arguments when it resumes. Where nothing has been trained yet, a corrected
    run file takes the place of the one that failed.
    """
    facts = {k: v for k, v in dataclasses.asdict(config).items() if k != "trainer"}
    path = Path(config.output) / STARTED_WITH
    has_results = last_complete_checkpoint(config.output) or (Path(config.output) / RESULT).exists()
    if path.exists() and has_results:
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(
                f"{path} cannot be read ({error}), so nobody knows what its checkpoints are. Use "
                "another output."
            ) from error
        if changes := changed_settings(found, facts):
            raise ValueError(
                f"{config.output} holds a run with other settings: {changes}. Use those settings "
                "to go on, or another output."
            )
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, facts)


def _caches(
    config: RunConfig,
    arguments: TrainingArguments,
    target: PreTrainedModel,
    drafter: DSparkDrafter | Eagle3Drafter,
    datasets: tuple[DraftDataset, DraftDataset],
    console: Console,
    assume_yes: bool,
) -> tuple[FeatureCache, FeatureCache] | None:
    if config.feature_cache is None:
        return None
    reduced = drafter.config.draft_vocab_size is not None
    reader = TargetReader(target, drafter.config.target_layer_ids, with_normaliser=reduced)
    tokens = sum(len(example.input_ids) for data in datasets for example in data.examples)
    size = tokens * bytes_per_token(reader)
    console.print(
        f"{config.feature_cache} will hold the target's states of {tokens:,} tokens, "
        f"{size / 1e9:,.2f} GB."
    )
    asks = arguments.process_index == 0 and not assume_yes
    if asks and not console.input("Write them? [y/N] ").strip().lower().startswith("y"):
        raise ValueError(
            "Not confirmed. Without feature_cache the states are computed as they are needed."
        )
    train, validation = (FeatureCache(config.feature_cache, reader, data) for data in datasets)
    # One process writes what the others read.
    with arguments.main_process_first():
        train.fill()
        validation.fill()
    return train, validation

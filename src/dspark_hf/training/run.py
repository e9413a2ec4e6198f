"""`dspark-hf train config.yaml`: one file describes a training run."""

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainingArguments,
)

from .. import __version__
from .._files import write_json
from ..evaluation.provenance import drafter_facts, weights_of
from ..modeling_dspark import DSparkDrafter
from ..modeling_eagle3 import Eagle3Drafter
from .build import WarmStart, build_drafter, build_eagle3, frequent_tokens, warm_start
from .collecting import FILES, PROVENANCE
from .data import DraftDataset, Example, MalformedRow, make_example, usable_rows
from .feature_cache import FeatureCache, bytes_per_token
from .host_arguments import check_host_arguments
from .muon import MuonWithAdamW
from .run_config import DFLASH_FIELDS, RunConfig
from .run_folder import RESULT, check_target, finished_result, remember_run
from .sources import open_source
from .target_states import TargetReader
from .trainer import DSparkTrainer, last_complete_checkpoint

_OWN = "the target's own"


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
) -> tuple[DSparkDrafter | Eagle3Drafter, WarmStart | None]:
    """The drafter of a run before its first step, in float32, and how it was warm-started."""
    fields = dict(config.drafter)
    if config.family == "dflash":
        fields.update(DFLASH_FIELDS)
    size = fields.pop("draft_vocab_size", None)
    if size is not None:
        fields["draft_vocabulary"], share = frequent_tokens(
            train, size, target.config.get_text_config(decoder=True).vocab_size
        )
        console.print(f"The {size} draftable tokens cover {share:.2%} of the training answers.")
    build = build_eagle3 if config.family == "eagle3" else build_drafter
    drafter = build(target, **fields).float()
    if config.init_from is None:
        return drafter, None
    source = type(drafter).from_pretrained(config.init_from, dtype=torch.float32)
    start = warm_start(drafter, source)
    console.print(
        f"Started from {config.init_from}; new: {', '.join(start.new) or 'nothing'}; "
        f"left out: {', '.join(start.left_out) or 'nothing'}."
    )
    return drafter, start


def run_training(config: RunConfig, console: Console, assume_yes: bool = False) -> dict[str, Any]:
    """
    Train, evaluate, save the drafter in `output` and what the run was in `training_result.json`.

    A run that was interrupted goes on from its last checkpoint. One that was finished is left as it
    is; with other `trainer` settings (more steps) it goes on from there.

    Raises:
        `ValueError`: see [`RunConfig`], [`load_examples`], [`build_drafter`]; or `output` holds
            another run.
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
    check_host_arguments(vars(arguments))
    tokenizer = AutoTokenizer.from_pretrained(config.target)
    block_size = config.drafter.get("block_size", 7)
    train, validation = load_examples(config, tokenizer, block_size, console)
    remember_run(config, train, validation, arguments.world_size)
    target = AutoModelForCausalLM.from_pretrained(config.target, dtype=getattr(torch, config.dtype))
    target.to(arguments.device)
    check_target(config, target)
    if finished := finished_result(config):
        console.print(f"{config.output} is finished: {finished['steps']} steps. Nothing to do.")
        return finished
    _check_against_target(arguments, target, train, validation)
    facts = _card_facts(config, arguments, target, train)
    if not (whose := facts.get("answers", _OWN)).startswith(_OWN):
        console.print(
            f"The answers in {config.data} are {whose}; a drafter does best on its target's own.",
            style="yellow",
        )
    torch.manual_seed(arguments.seed)
    drafter, start = make_drafter(config, target, train, console)
    drafter.to(arguments.device)
    caches = _caches(config, arguments, target, drafter, (train, validation), console, assume_yes)
    trainer = DSparkTrainer(
        drafter,
        target,
        arguments,
        train,
        validation if len(validation) else None,
        None if config.family == "eagle3" else config.weights(),
        config.num_anchors,
        caches,
        optimizers=(MuonWithAdamW(drafter, arguments) if config.muon else None, None),
    )
    last = last_complete_checkpoint(config.output)
    if last is None and (Path(config.output) / RESULT).is_file():
        raise ValueError(
            f"{config.output} holds a finished drafter and no checkpoint to go on from. Take "
            "another output, and init_from this one."
        )
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
        "training": facts | _steps_of(trainer),
        "warm_start": dataclasses.asdict(start) if start else None,
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
        result["drafters"] = [drafter_facts(_public_name(config.output), drafter)]
        write_json(Path(config.output) / RESULT, result)
    return result


def _steps_of(trainer: DSparkTrainer) -> dict[str, int]:
    """Steps trained, and those of the weights that were kept where these are not the last."""
    steps, kept = trainer.state.global_step, trainer.state.best_global_step
    if trainer.args.load_best_model_at_end and kept not in (None, steps):
        return {"steps": steps, "steps of the weights kept (the best)": kept}
    return {"steps": steps}


def _card_facts(
    config: RunConfig, arguments: TrainingArguments, target: PreTrainedModel, train: DraftDataset
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
        facts["answers"] = _whose(made, config, target)
        facts["temperatures of the answers"] = ", ".join(map(str, made.get("temperatures", ())))
        thinking = made.get("thinking")
        facts["thinking"] = "as the template has it" if thinking is None else thinking
    return facts


def _whose(made: dict[str, Any], config: RunConfig, target: PreTrainedModel) -> str:
    """Who wrote the answers, by the provenance of their folder."""
    author, weights, own = str(made.get("target")), made.get("target_weights"), _OWN
    if made.get("dtype") != config.dtype and "float16" in (made.get("dtype"), config.dtype):
        # Rounded to other values, so the name is all there is.
        weights, own = None, f"{_OWN}, by its name"
    if author != config.target and weights is None:
        return f"those of {_public_name(author)}"
    if weights in (None, weights_of(target)):
        return own
    return f"those of {_public_name(author)}, with other weights than the target's"


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


def _is_confirmed(console: Console) -> bool:
    try:
        return console.input("Write them? [y/N] ", markup=False).strip().lower().startswith("y")
    except EOFError:
        return False


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
    if arguments.process_index == 0 and not assume_yes and not _is_confirmed(console):
        raise ValueError(
            "Not confirmed (--yes does, where nobody can answer). Without feature_cache the states "
            "are computed as they are needed."
        )
    train, validation = (FeatureCache(config.feature_cache, reader, data) for data in datasets)
    # One process writes what the others read.
    with arguments.main_process_first():
        train.fill()
        validation.fill()
    return train, validation

"""What the run in a folder is, so that another one does not go on from its checkpoints."""

import dataclasses
import hashlib
import json
from array import array
from itertools import chain
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_NAME

from .._files import write_json
from ..evaluation.provenance import weights_of
from .collecting import changed_settings
from .data import DraftDataset
from .run_config import RunConfig
from .trainer import last_complete_checkpoint

RESULT = "training_result.json"
# Written before the first step.
STARTED_WITH = "training_config.json"
# Fields of `TrainingArguments` that may change while a run goes on.
_FREE = ("max_steps", "num_train_epochs", "report_to", "run_name", "disable_tqdm", "use_cpu")
_FREE_PREFIXES = ("save_", "eval_", "logging_", "dataloader_num_", "log_", "project")
# What runs that began before a key existed were made with.
_DEFAULTS = {
    f.name: f.default for f in dataclasses.fields(RunConfig) if f.default is not dataclasses.MISSING
}


def remember_run(
    config: RunConfig, train: DraftDataset, validation: DraftDataset, num_processes: int
) -> None:
    """
    Note what the run in a folder is, so that another one does not go on from its checkpoints. Of
    the host's arguments, how long the run is and what it reports and keeps may change: the host
    restores the rest from a checkpoint, or mixes the two. Another number of processes would make
    other steps, and meet examples again. Where nothing has been trained yet, a corrected run file
    takes the place of the one that failed.
    """
    facts = dataclasses.asdict(config)
    # A folder may be moved.
    del facts["output"]
    facts["trainer"] = {
        k: v
        for k, v in config.trainer.items()
        if not k.startswith(_FREE_PREFIXES) and k not in _FREE
    }
    facts["examples"] = {
        "train": len(train),
        "validation": len(validation),
        "sha256": _digest(train, validation),
    }
    if finished_result(config) is None:
        facts["processes"] = num_processes
    path = Path(config.output) / STARTED_WITH
    if last_complete_checkpoint(config.output) or (Path(config.output) / RESULT).exists():
        found = _DEFAULTS | {"processes": num_processes} | _started_with(path)
        if changes := changed_settings(found, facts):
            raise ValueError(
                f"{config.output} holds a run with other settings: {changes}. Use those settings "
                "to go on, or another output (init_from starts it from this run's drafter)."
            )
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, facts)


def _started_with(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (FileNotFoundError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} cannot be read ({error}), so nobody knows what the checkpoints beside it are. "
            "Use another output."
        ) from error


def check_target(config: RunConfig, target: PreTrainedModel) -> None:
    """
    Raises `ValueError` if the target has other weights than when the run was started; they may have
    changed where they lie.
    """
    path = Path(config.output) / STARTED_WITH
    found, weights = _started_with(path), weights_of(target)
    if found.get("target_weights", weights) != weights:
        raise ValueError(
            f"{config.target} holds other weights now than when {config.output} was started. Train "
            "for them in another output (init_from starts it from this run's drafter)."
        )
    if "target_weights" not in found:
        write_json(path, {**found, "target_weights": weights})


def _digest(*datasets: DraftDataset) -> str:
    """Of all tokens and masks, in their order: a resumed run finds its place by it."""
    digest = hashlib.sha256()
    for example in chain(*(dataset.examples for dataset in datasets)):
        digest.update(array("q", example.input_ids).tobytes() + bytes(example.loss_mask))
    return digest.hexdigest()[:16]


def finished_result(config: RunConfig) -> dict[str, Any] | None:
    """The result of a run that was trained to its end with all of these settings."""
    folder = Path(config.output)
    if not ((folder / RESULT).is_file() and (folder / SAFE_WEIGHTS_NAME).is_file()):
        return None
    try:
        result = json.loads((folder / RESULT).read_text(encoding="utf-8"))
    except ValueError:
        return None
    here = {"output": None}
    own = json.loads(json.dumps(dataclasses.asdict(config))) | here
    return result if _DEFAULTS | result.get("config", {}) | here == own else None

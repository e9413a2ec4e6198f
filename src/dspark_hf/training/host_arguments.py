"""Fields of the host's `TrainingArguments` that have no place in a drafter's training."""

from collections.abc import Mapping
from typing import Any

_OWN_EVALUATION = "evaluation adds up the objective's own terms and forms no predictions"
_ONE_PRECISION = "evaluation runs in the precision of training (`bf16`)"
_CHECKPOINTING = (
    "the host's way to compute activations again drops the cache that holds the context; lower "
    "num_anchors or the batch size to save memory"
)
_REFUSED = {
    "label_smoothing_factor": "the loss compares with the target's distributions, which are smooth",
    "neftune_noise_alpha": "the embedding is the target's, and drafting adds no noise to it",
    "activation_checkpointing": _CHECKPOINTING,
    "gradient_checkpointing": _CHECKPOINTING,
    "torch_compile": "the shapes of a step follow from its data, so every step would compile anew",
    "use_liger_kernel": "the host applies these kernels to models of its own only",
    "bf16_full_eval": _ONE_PRECISION,
    "fp16_full_eval": _ONE_PRECISION,
    "include_for_metrics": _OWN_EVALUATION,
    "batch_eval_metrics": _OWN_EVALUATION,
    "eval_use_gather_object": _OWN_EVALUATION,
    "deepspeed": "nothing of it was ever run with drafters; use several processes or `fsdp`",
    "parallelism_config": "batches are split over processes, and nothing else is",
    "save_only_model": "a run could not go on from such a checkpoint as if nothing had happened",
    "push_to_hub": "it uploads what lies in the run's folder; `dspark-hf export --push` uploads "
    "the finished drafter, with its card",
    "resume_from_checkpoint": "the host leaves it to scripts; `dspark-hf train` finds the last "
    "checkpoint by itself, and in Python `train(resume_from_checkpoint=…)` takes it",
}
# Of the collated batch; anything else would be looked for in vain.
LABEL_NAMES = ["loss_mask"]


def check_host_arguments(found: Mapping[str, Any]) -> None:
    """
    Raises `ValueError` for a field that would fail later or be ignored.

    Args:
        found (`Mapping`): names and values of `TrainingArguments`, all or those that were given.
    """
    for name, reason in _REFUSED.items():
        if value := found.get(name):
            raise ValueError(f"{name} of TrainingArguments is {value!r}: {reason}. Leave it out.")
    for name in ("max_steps", "num_train_epochs"):
        if found.get(name) == 0:
            raise ValueError(
                f"{name} of TrainingArguments is 0: nothing would be trained. Ask for some steps."
            )
    _check_loading(found.get("accelerator_config"))
    if (found.get("label_names") or LABEL_NAMES) != LABEL_NAMES:
        raise ValueError(
            f"label_names of TrainingArguments is {found['label_names']!r}: what a drafter learns "
            "are the tokens of its blocks. Leave it out."
        )
    if found.get("average_tokens_across_devices") is False:
        raise ValueError(
            "average_tokens_across_devices of TrainingArguments is False: the terms are always "
            "divided by what all processes learn from. Leave it out."
        )


def more_is_better(metric: str) -> bool:
    """Of a figure of an evaluation, as `metric_for_best_model` names it."""
    return "expected_tau" in metric or "acceptance_" in metric


def _check_loading(config: Any) -> None:
    """How processes share batches; a file that says so is read by the host first."""
    found = config if isinstance(config, Mapping) else getattr(config, "__dict__", {})
    for name, wanted in (
        ("split_batches", False),
        ("dispatch_batches", False),
        ("even_batches", True),
    ):
        if (value := found.get(name)) not in (None, wanted):
            raise ValueError(
                f"accelerator_config of TrainingArguments has {name}={value!r}: every process "
                "loads batches of its own here, equally many of per_device_train_batch_size. Leave "
                "it out."
            )

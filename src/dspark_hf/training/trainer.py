"""`DSparkTrainer`: the host's `Trainer` around a frozen target and a drafter."""

import copy
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, parse_flag_from_env
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
from torch.utils.data import DataLoader, Dataset, Sampler
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.trainer_utils import has_length

from ..generation.checks import check_pairing
from ..modeling_dspark import DSparkDrafter
from ..modeling_eagle3 import Eagle3Drafter
from .data import collate
from .eagle3_module import Eagle3Objective
from .feature_cache import FeatureCache
from .host_arguments import LABEL_NAMES, check_host_arguments, more_is_better
from .objective import DSparkObjective, ObjectiveSums, ObjectiveWeights, TargetStates
from .order import ResumableLengthGroups, pass_after_pass
from .target_states import TargetReader

# Anchors of an evaluation are always the same.
_EVALUATION_SEED = 0


class DSparkTrainer(Trainer):
    """
    Trains a drafter for a target that stays frozen in memory.

    A subclass of the host's `Trainer`. Its gradient accumulation, mixed precision, samplers,
    schedules, optimisers (also the 8-bit ones of bitsandbytes), checkpoints, resuming, callbacks,
    reports and `accelerate launch` work; evaluation gives the objective's figures, so there are no
    predictions. Arguments that have no place here are refused ([`check_host_arguments`]).

    Args:
        drafter ([`DSparkDrafter`] or [`Eagle3Drafter`]):
            Trained in place. Without an embedding and a head of its own it uses the target's,
            which stay as they are.
        target (`PreTrainedModel`): the model to draft for.
        args (`TrainingArguments`): of the host.
        train_dataset, eval_dataset ([`DraftDataset`]):
            Examples. Of the library `datasets`, streamed ones too (read pass after pass, up to
            `max_steps`); several sets for evaluation as a `dict`.
        weights ([`ObjectiveWeights`], *optional*): of the loss terms of block drafters.
        num_anchors (`int`, *optional*):
            Most anchors per example and step, 512 by default. Eagle3 learns at every position.
        feature_caches (`tuple`, *optional*):
            [`FeatureCache`] of the training and of the evaluation examples; by default the target
            runs on every batch.
        chunk_rows (`int`, *optional*, defaults to 256): rows scored over the vocabulary at a time.
        callbacks, optimizers, optimizer_cls_and_kwargs (*optional*): as the host takes them.

    Raises:
        `ValueError`: the drafter was made for another target, the target cannot be read (see
            [`TargetReader`]), one process sees several accelerators, an argument has no place here,
            no evaluation gives `metric_for_best_model`, several processes get a stream, or FSDP
            cannot be used as it is asked for (see [`check_sharding`]).
        `OSError`: a checkpoint could not be written; earlier ones are whole.
    """

    def __init__(
        self,
        drafter: DSparkDrafter | Eagle3Drafter,
        target: PreTrainedModel,
        args: TrainingArguments,
        train_dataset: Dataset,
        eval_dataset: Dataset | dict[str, Dataset] | None = None,
        weights: ObjectiveWeights | None = None,
        num_anchors: int | None = None,
        feature_caches: tuple[FeatureCache, FeatureCache | None] | None = None,
        chunk_rows: int = 256,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        optimizer_cls_and_kwargs: tuple[type[torch.optim.Optimizer], dict[str, Any]] | None = None,
    ):
        check_pairing(target, drafter)
        check_host_arguments(vars(args))
        if args.n_gpu > 1:
            raise ValueError(
                f"{args.n_gpu} accelerators are visible to one process. Start one process for "
                "each: `accelerate launch -m dspark_hf train config.yaml`; or show it one only."
            )
        args = copy.copy(args)
        # The collated batch holds what the objective needs; the host would drop it all.
        args.remove_unused_columns = False
        args.label_names = LABEL_NAMES
        # The order of the examples would otherwise depend on what was seeded last.
        args.data_seed = args.seed if args.data_seed is None else args.data_seed
        drafter.bind(
            input_embeddings=None if drafter.embed_tokens else target.get_input_embeddings(),
            output_embeddings=None if drafter.lm_head else target.get_output_embeddings(),
        )
        for module in (drafter.embed_tokens, drafter.lm_head):
            if module is not None:
                module.requires_grad_(False)
        objective: DSparkObjective | Eagle3Objective
        if isinstance(drafter, Eagle3Drafter):
            if weights is not None or num_anchors is not None:
                raise ValueError(
                    "weights and num_anchors are of block drafters; Eagle3 has one term and learns "
                    "at every position. Leave them out."
                )
            objective = Eagle3Objective(drafter, chunk_rows=chunk_rows)
        else:
            objective = DSparkObjective(
                drafter, weights, 512 if num_anchors is None else num_anchors, chunk_rows
            )
        super().__init__(
            model=objective,
            args=args,
            train_dataset=pass_after_pass(train_dataset),
            eval_dataset=eval_dataset,
            data_collator=collate,
            callbacks=callbacks,
            optimizers=optimizers,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
        )
        check_sharding(args, self.accelerator)
        sets = eval_dataset.values() if isinstance(eval_dataset, dict) else (eval_dataset,)
        self._check_streams(train_dataset, *sets)
        self.model_accepts_loss_kwargs = False
        self.drafter = drafter
        self.reader = TargetReader(target, drafter.config.target_layer_ids)
        self._check_best_metric(args.metric_for_best_model)
        self._epoch = 0
        self._caches = feature_caches or (None, None)
        if self.accelerator.num_processes > 1:
            objective.num_processes = self.accelerator.num_processes
            objective.sum_over_processes = lambda x: self.accelerator.reduce(x, reduction="sum")
        self._sums: torch.Tensor | None = None

    # -- steps

    def get_train_dataloader(self) -> DataLoader:
        """The host's; raises `ValueError` where it would end at once, with an untrained drafter."""
        loader = super().get_train_dataloader()
        if has_length(loader) and len(loader) == 0:
            raise ValueError(
                f"The {len(loader.dataset)} training examples fill no batch of "
                f"{self.args.train_batch_size}, and dataloader_drop_last leaves it out. Set one of "
                "the two lower."
            )
        return loader

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> Sampler | None:
        sampler = super()._get_train_sampler(train_dataset)
        if isinstance(sampler, LengthGroupedSampler):
            return ResumableLengthGroups(sampler, lambda: self.args.data_seed + self._epoch)
        return sampler

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """
        The host asks whether the last step is done behind a step, so resuming from the checkpoint
        of the last step would train one more.
        """
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return
        self._epoch = kwargs["epoch"]
        super()._run_epoch(*args, **kwargs)

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Loss of a batch; its sums are kept for the next report."""
        loss, sums = self._run(model, inputs, self._caches[0])
        vector = sums.flatten()
        self._sums = vector if self._sums is None else self._sums + vector
        return loss

    def _run(
        self, model: Any, inputs: dict[str, Any], cache: FeatureCache | None
    ) -> tuple[torch.Tensor, ObjectiveSums]:
        batch = {name: inputs[name] for name in ("input_ids", "attention_mask", "loss_mask")}
        states = self._states(inputs, cache)
        teacher = self.reader.teacher(states.last_hidden[:0, 0])
        return model(**batch, states=states, teacher_head=teacher)

    def _states(self, inputs: dict[str, Any], cache: FeatureCache | None) -> TargetStates:
        if cache is not None:
            return cache.load(inputs["index"], inputs["input_ids"].device)
        return self.reader(inputs["input_ids"], inputs["attention_mask"])

    # -- reports

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Adds acceptance and the terms of the loss to the host's reports of training."""
        if "loss" in logs and self._sums is not None:
            sums = self.accelerator.reduce(self._sums, reduction="sum")
            logs = {**logs, **self._figures(ObjectiveSums.unflatten(sums))}
            self._sums = None
        super().log(logs, *args, **kwargs)

    def _figures(self, sums: ObjectiveSums) -> dict[str, float]:
        """By name; nothing about confidences where nothing predicts them."""
        figures = sums.metrics()
        if getattr(self.drafter, "confidence_head", None) is None:
            figures = {k: v for k, v in figures.items() if not k.startswith("confidence_")}
        return figures

    def _check_streams(self, *datasets: Any) -> None:
        given = [x for x in datasets if x is not None]
        if self.accelerator.num_processes > 1 and not all(map(has_length, given)):
            raise ValueError(
                "A streamed dataset says neither how long it is nor how long its rows are, so it "
                f"cannot be dealt out evenly to {self.accelerator.num_processes} processes. Load "
                "its rows (`datasets.Dataset`), or train with one process."
            )

    def _check_best_metric(self, wanted: str | None) -> None:
        """The host would look for it at the first evaluation, with a `KeyError`."""
        slots = self.drafter.config.block_size
        known = ["loss", *self._figures(ObjectiveSums.unflatten(torch.zeros(4 + 4 * slots)))]
        if isinstance(self.eval_dataset, dict):
            known = [f"{name}_{figure}" for name in self.eval_dataset for figure in known]
        if wanted and wanted.removeprefix("eval_") not in known:
            raise ValueError(
                f"metric_for_best_model is {wanted!r}; an evaluation here gives {', '.join(known)}."
            )
        if wanted:
            # The host takes more of everything but losses for better.
            self.args.greater_is_better = more_is_better(wanted)

    @torch.no_grad()
    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """
        Terms, acceptance per slot and expected τ on the evaluation examples, at fixed anchors.

        Args:
            eval_dataset ([`DraftDataset`] or a `dict` of them, *optional*):
                Other examples than the trainer's own; of several sets each by itself.
            metric_key_prefix (`str`, *optional*, defaults to `"eval"`): of the names.
        """
        several = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(several, dict):
            return {
                figure: value
                for name, dataset in several.items()
                for figure, value in self.evaluate(
                    dataset, ignore_keys, f"{metric_key_prefix}_{name}"
                ).items()
            }
        self._check_streams(several)
        # The host keeps loaders whose workers stay, whatever they were made for; and a kept one
        # does not seed its workers anew, so the anchors would not be the same ones.
        self._eval_dataloaders: dict[str, DataLoader] = {}
        # Stored states are found by the place in their own dataset.
        cache = self._caches[1] if eval_dataset is None else None
        model = self._wrap_model(self.model, training=False)
        was_training = model.training
        model.eval()
        total: torch.Tensor | None = None
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_EVALUATION_SEED)
            for inputs in self.get_eval_dataloader(eval_dataset):
                inputs = self._without_repetitions(self._prepare_inputs(inputs))
                with self.compute_loss_context_manager():
                    vector = self._run(model, inputs, cache)[1].flatten()
                total = vector if total is None else total + vector
        model.train(was_training)
        if total is None:
            raise ValueError(
                "There are no evaluation examples: set aside some rows for it. (With "
                "dataloader_drop_last, more than a batch of them.)"
            )
        sums = ObjectiveSums.unflatten(self.accelerator.reduce(total, reduction="sum"))
        metrics = {f"{metric_key_prefix}_{k}": v for k, v in self._figures(sums).items()}
        objective = self.accelerator.unwrap_model(self.model)
        metrics[f"{metric_key_prefix}_loss"] = objective.mean_loss(sums)
        self.log(metrics)
        self.control: Any = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, metrics
        )
        return metrics

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Raises `NotImplementedError`: the objective gives sums over batches, not predictions."""
        raise NotImplementedError(
            "A drafter's training forms no predictions. Use evaluate(dataset) for its figures, and "
            "drafter.draft or generate(assistant_model=drafter) for tokens."
        )

    def _without_repetitions(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """
        Nothing to learn from the examples that fill up the last batches, so that all processes have
        equally many: they were counted where they stand.
        """
        loader = self.accelerator.gradient_state
        if not loader.end_of_dataloader or loader.remainder < 1:
            return inputs
        mask = inputs["loss_mask"]
        places = self.accelerator.process_index * len(mask) + torch.arange(len(mask))
        is_first = (places < loader.remainder).to(mask.device)
        return {**inputs, "loss_mask": mask & is_first[:, None]}

    # -- checkpoints

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        folder = output_dir or self.args.output_dir
        os.makedirs(folder, exist_ok=True)
        if state_dict is not None:
            prefix = "drafter."
            state_dict = {
                name.removeprefix(prefix): tensor
                for name, tensor in state_dict.items()
                if name.startswith(prefix)
            }
        self.drafter.save_pretrained(folder, state_dict=state_dict)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        try:
            super()._save_checkpoint(model, trial)
        except (OSError, RuntimeError) as error:
            # PyTorch reports a full disk as a RuntimeError.
            folder = Path(self._get_output_dir(trial)) / f"checkpoint-{self.state.global_step}"
            shutil.rmtree(folder, ignore_errors=True)
            raise OSError(
                f"Writing {folder} failed ({error}). Nothing of it was left there and earlier "
                "checkpoints are whole: free some space and start the run again, it goes on from "
                "the last one."
            ) from error

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        stored = type(self.drafter).from_pretrained(resume_from_checkpoint, dtype=torch.float32)
        # Also into weights that are sharded over processes.
        set_model_state_dict(
            self.drafter, stored.state_dict(), options=StateDictOptions(full_state_dict=True)
        )

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(self.state.best_model_checkpoint)


def check_sharding(args: TrainingArguments, accelerator: Accelerator) -> None:
    """
    The objective reads the projections of all layers from outside of the layers (context keys come
    before any block), so FSDP can shard it as a whole only.

    Raises:
        `ValueError`: FSDP is asked for with layers wrapped one by one, or where accelerate would
            leave it out without a word; or DeepSpeed is, by the launcher.
    """
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        raise ValueError(
            "Drafters were never trained under DeepSpeed. Launch without it: each process holds "
            "the whole drafter, or FSDP shards it."
        )
    if not args.fsdp and not parse_flag_from_env("ACCELERATE_USE_FSDP"):
        return
    if accelerator.distributed_type != DistributedType.FSDP:
        raise ValueError(
            "FSDP is asked for, and accelerate would not use it here: it shards over several "
            f"processes with an accelerator each, and found {accelerator.num_processes} on "
            f"{accelerator.device.type}. Leave fsdp out: each process holds the whole drafter."
        )
    plugin = accelerator.state.fsdp_plugin
    policy = getattr(plugin.auto_wrap_policy, "func", plugin.auto_wrap_policy)
    if plugin.transformer_cls_names_to_wrap or policy is size_based_auto_wrap_policy:
        raise ValueError(
            "FSDP is told to wrap layers one by one, and a drafter's layers are used in parts. Set "
            "fsdp_config to {auto_wrap_policy: NO_WRAP}: weights, gradients and optimiser states "
            "are sharded, and gathered for a whole step."
        )


def last_complete_checkpoint(folder: str | os.PathLike) -> str | None:
    """
    The newest checkpoint of a run that was written to its end; `None` if there is none.

    The trainer's state is what the host writes last, so a run that was killed while it saved leaves
    a checkpoint without it.
    """
    found = [path for path in Path(folder).glob("checkpoint-*") if path.name[11:].isdecimal()]
    for path in sorted(found, key=lambda path: int(path.name[11:]), reverse=True):
        try:
            json.loads((path / TRAINER_STATE_NAME).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        return str(path)
    return None

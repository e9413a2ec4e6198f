"""`DSparkTrainer`: what stays frozen, resuming, evaluation, precision, optimisers, full disks."""

import json
import math
import shutil
from dataclasses import asdict

import datasets
import pytest
import torch
from accelerate import Accelerator
from transformers import TrainerCallback

from dspark_hf import DSparkDrafter
from dspark_hf.training.objective import ObjectiveWeights
from dspark_hf.training.trainer import DSparkTrainer, last_complete_checkpoint
from small_runs import (
    arguments,
    assert_same_weights,
    limited_files,
    make_examples,
    make_trainer,
    weights,
)
from test_reduced_vocabulary import make_reduced
from tiny import make_drafter, make_eagle3, make_target


class StopAfter(TrainerCallback):
    """An interruption: the run ends behind a step, as if it had been killed."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise KeyboardInterrupt


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("stored", [False, True])
def test_embedding_and_head_and_target_stay_as_they_are(tmp_path, stored):
    """B142: bound or the drafter's own; everything else moves."""
    target, drafter = make_target(), make_drafter(stored=stored)
    before_target, before = weights(target), weights(drafter)
    make_trainer(tmp_path, drafter, target).train()
    assert_same_weights(before_target, target)
    assert all(p.grad is None for p in target.parameters())
    after = drafter.state_dict()
    for name, tensor in before.items():
        is_frozen = name.startswith(("embed_tokens", "lm_head"))
        assert torch.equal(tensor, after[name]) == is_frozen, name


def test_a_reloaded_drafter_is_frozen_again(tmp_path):
    """B142: loading gives every parameter gradients back."""
    make_drafter().save_pretrained(tmp_path / "drafter")
    drafter = DSparkDrafter.from_pretrained(tmp_path / "drafter")
    assert drafter.lm_head.weight.requires_grad
    make_trainer(tmp_path, drafter)
    frozen = {name for name, p in drafter.named_parameters() if not p.requires_grad}
    assert frozen == {"embed_tokens.weight", "lm_head.weight"}


def test_training_learns(tmp_path):
    """Four texts by heart: the expected accepted length rises far above that of chance."""
    trainer = make_trainer(
        tmp_path,
        train=make_examples(4),
        validation=make_examples(4),
        max_steps=30,
        logging_steps=10,
        trainer_num_anchors=8,
        trainer_weights=ObjectiveWeights(1.0, 0.0, 1.0),
    )
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    assert after["eval_cross_entropy"] < 0.5 * before["eval_cross_entropy"]
    history = [entry for entry in trainer.state.log_history if "expected_tau" in entry]
    assert len(history) == 3
    assert {"cross_entropy", "acceptance_1", "acceptance_4", "confidence_loss"} <= set(history[0])


def test_arguments_of_the_user_are_not_changed(tmp_path):
    args = arguments(tmp_path)
    before = args.to_dict()
    DSparkTrainer(make_drafter(stored=False), make_target(), args, make_examples())
    assert args.to_dict() == before


@pytest.mark.parametrize("accumulation", [1, 2])
def test_an_interrupted_run_ends_bit_for_bit_like_an_uninterrupted_one(tmp_path, accumulation):
    options = {
        "max_steps": 5,
        "save_strategy": "steps",
        "save_steps": 2,
        "gradient_accumulation_steps": accumulation,
        "per_device_train_batch_size": 1,
        "weight_decay": 0.1,
    }
    whole = make_trainer(tmp_path / "whole", **options)
    whole.train()
    # Three steps, of which two are in a checkpoint; in the middle of an epoch.
    broken = make_trainer(tmp_path / "broken", **options)
    broken.add_callback(StopAfter(3))
    with pytest.raises(KeyboardInterrupt):
        broken.train()
    checkpoint = last_complete_checkpoint(tmp_path / "broken")
    assert checkpoint.endswith("checkpoint-2")
    # Another start, which the checkpoint must replace.
    again = make_trainer(tmp_path / "broken", make_drafter(stored=False, seed=77), **options)
    torch.manual_seed(12345)
    again.train(resume_from_checkpoint=checkpoint)
    assert_same_weights(whole.drafter, again.drafter)
    assert losses(whole)[2:] == losses(again)[-3:]


def test_the_checkpoint_of_the_last_step_is_the_end(tmp_path):
    """In the middle of an epoch; the host would train one more step."""
    options = {"save_strategy": "steps", "save_steps": 4, "lr_scheduler_type": "constant"}
    whole = make_trainer(tmp_path, **options)
    whole.train()
    again = make_trainer(tmp_path, make_drafter(stored=False, seed=77), **options)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert again.state.global_step == 4
    assert_same_weights(whole.drafter, again.drafter)


def test_checkpoints_are_drafters(tmp_path):
    """A checkpoint loads like any drafter, and resuming a reduced vocabulary keeps its tokens."""
    drafter = make_reduced(stored=False)
    options = {"max_steps": 2, "save_strategy": "steps", "save_steps": 2}
    make_trainer(tmp_path, drafter, **options).train()
    loaded = DSparkDrafter.from_pretrained(last_complete_checkpoint(tmp_path))
    assert_same_weights(drafter, loaded)


@pytest.mark.parametrize(
    ("metric", "best_of"),
    [("confidence_error", min), ("cross_entropy", min), ("loss", min), ("expected_tau", max)],
)
def test_the_best_checkpoint_is_loaded_at_the_end(tmp_path, metric, best_of):
    """
    The host's own way looks for other names and would load nothing without a word, and takes more
    cross-entropy for better.
    """
    trainer = make_trainer(
        tmp_path,
        validation=make_examples(2),
        max_steps=3,
        # Large steps: by the first of these, the last drafter is not the best.
        learning_rate=0.3,
        lr_scheduler_type="constant",
        save_strategy="steps",
        save_steps=1,
        eval_strategy="steps",
        eval_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model=metric,
    )
    trainer.train()
    key = f"eval_{metric}"
    found = [entry[key] for entry in trainer.state.log_history if key in entry]
    best = DSparkDrafter.from_pretrained(trainer.state.best_model_checkpoint)
    assert_same_weights(best, trainer.drafter)
    assert trainer.state.best_metric == best_of(found)
    assert trainer.evaluate()[key] == pytest.approx(trainer.state.best_metric)
    step = found.index(best_of(found)) + 1
    assert trainer.state.best_model_checkpoint.endswith(f"checkpoint-{step}")
    assert step < 3 or metric != "confidence_error"


def test_evaluation_has_fixed_anchors_and_leaves_the_random_state_alone(tmp_path):
    trainer = make_trainer(tmp_path, validation=make_examples(3, length=60, seed=9))
    torch.manual_seed(4)
    first = trainer.evaluate()
    drawn = torch.rand(3)
    torch.manual_seed(5)
    second = trainer.evaluate()
    assert {k: v for k, v in first.items() if "time" not in k} == second
    torch.manual_seed(4)
    assert torch.equal(drawn, torch.rand(3))
    assert trainer.model.training


def test_evaluation_between_steps_does_not_change_training(tmp_path):
    """Its random numbers are its own; also those of the data loader."""
    plain = make_trainer(tmp_path)
    plain.train()
    evaluated = make_trainer(
        tmp_path, validation=make_examples(3), eval_strategy="steps", eval_steps=1
    )
    evaluated.train()
    assert_same_weights(plain.drafter, evaluated.drafter)
    assert sum("eval_expected_tau" in entry for entry in evaluated.state.log_history) == 4


@pytest.mark.parametrize("stay", [False, True])
def test_several_sets_are_evaluated_each_by_itself(tmp_path, stay):
    """Also with workers that stay, whose loaders the host keeps."""
    one, other = make_examples(3), make_examples(3, seed=4)
    workers = {"dataloader_num_workers": 1, "dataloader_persistent_workers": True} if stay else {}
    trainer = make_trainer(tmp_path, validation={"a": one, "b": other}, **workers)
    found = trainer.evaluate()
    assert trainer.evaluate(trainer.eval_dataset) == found
    for name, examples in (("a", one), ("b", other)):
        alone = trainer.evaluate(examples)
        assert found[f"eval_{name}_loss"] == alone["eval_loss"]
    best = {"metric_for_best_model": "eval_b_expected_tau", "max_steps": 1}
    make_trainer(tmp_path, validation=trainer.eval_dataset, **best).train()
    with pytest.raises(ValueError, match="an evaluation here gives a_loss, a_cross_entropy"):
        make_trainer(tmp_path, validation=trainer.eval_dataset, metric_for_best_model="loss")


def test_examples_can_be_streamed(tmp_path):
    """How many there are is not known then, so the host wants `max_steps`."""
    rows = datasets.Dataset.from_list([asdict(x) for x in make_examples().examples])
    trainer = make_trainer(tmp_path, train=rows.to_iterable_dataset(), max_steps=2)
    trainer.train()
    assert trainer.state.global_step == 2
    listed = make_trainer(tmp_path, train=rows, max_steps=2, train_sampling_strategy="sequential")
    listed.train()
    assert losses(trainer) == losses(listed)


def test_evaluation_without_examples_says_so(tmp_path):
    with pytest.raises(ValueError, match="evaluation"):
        make_trainer(tmp_path).evaluate()


def test_there_are_no_predictions(tmp_path):
    with pytest.raises(NotImplementedError, match=r"Use evaluate\(dataset\) for its figures"):
        make_trainer(tmp_path).predict(make_examples(2))


def test_bfloat16_autocast_trains_float32_weights(tmp_path):
    target = make_target().bfloat16()
    results = []
    for folder, options in (("mixed", {"bf16": True}), ("full", {})):
        trainer = make_trainer(tmp_path / folder, target=target, **options)
        trainer.train()
        assert trainer.drafter.dtype == torch.float32
        results.append(losses(trainer))
    mixed, full = results
    assert mixed != full
    assert mixed == pytest.approx(full, rel=0.05)


@pytest.mark.parametrize("optimiser", ["adamw_torch", "adamw_bnb_8bit", "adafactor", "sgd"])
def test_every_optimiser_does_a_step(tmp_path, optimiser):
    """B134: the confidence head is a matrix of one row. Only large weights have 8-bit states."""
    drafter, target = make_drafter(vocab_size=600, stored=False), make_target(vocab_size=600)
    before = weights(drafter)
    trainer = make_trainer(tmp_path, drafter, target, optim=optimiser, max_steps=1)
    trainer.train()
    for name, tensor in drafter.state_dict().items():
        assert not torch.equal(tensor, before[name]), name
        assert tensor.isfinite().all(), name
    state = trainer.optimizer.state[drafter.markov_head.markov_w2.weight]
    has_bytes = any(getattr(x, "dtype", None) == torch.uint8 for x in state.values())
    assert has_bytes == optimiser.endswith("8bit")


@pytest.mark.parametrize("confidence", [True, False])
def test_metrics_of_the_run_are_numbers(tmp_path, confidence):
    """Of confidences only where they are predicted."""
    drafter = make_drafter(stored=False, confidence=confidence)
    trainer = make_trainer(tmp_path, drafter, validation=make_examples(2))
    trainer.train()
    entries = [*trainer.state.log_history, trainer.evaluate()]
    assert all(math.isfinite(value) for entry in entries for value in entry.values())
    assert ("confidence_error" in entries[0]) == ("eval_confidence_error" in entries[-1])
    assert ("confidence_error" in entries[0]) == confidence


def test_loaders_whose_workers_stay_are_of_the_examples_asked_for(tmp_path):
    """The host keeps one for all; the anchors are the same every time, too."""
    own, other = make_examples(12, length=30), make_examples(12, length=30, seed=4)
    stay = {"dataloader_num_workers": 1, "dataloader_persistent_workers": True}
    trainer = make_trainer(tmp_path, validation=own, **stay)
    found = [trainer.evaluate(x)["eval_loss"] for x in (None, other, None, other, own)]
    assert found[0] == found[2] == found[4] != found[1] == found[3]


def test_streams_are_not_dealt_out_to_several_processes(tmp_path, monkeypatch):
    rows = datasets.Dataset.from_list([asdict(x) for x in make_examples().examples])
    monkeypatch.setattr(Accelerator, "num_processes", 2)
    for sets in (
        {"train": rows.to_iterable_dataset()},
        {"validation": rows.to_iterable_dataset()},
        {"validation": {"a": rows, "b": rows.to_iterable_dataset()}},
    ):
        with pytest.raises(ValueError, match=r"dealt out evenly to 2 processes\. Load its rows"):
            make_trainer(tmp_path, max_steps=1, **sets)
    trainer = make_trainer(tmp_path, train=rows, validation=rows)
    with pytest.raises(ValueError, match="dealt out evenly"):
        trainer.evaluate(rows.to_iterable_dataset())


def test_a_drafter_of_another_target_is_refused(tmp_path):
    with pytest.raises(ValueError, match="vocabulary is 97, the drafter expects 53"):
        make_trainer(tmp_path, make_drafter(vocab_size=53, stored=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha of TrainingArguments is 5.0"),
        ({"activation_checkpointing": True}, "drops the cache that holds the context"),
        ({"include_for_metrics": ["loss"]}, "forms no predictions"),
        ({"max_steps": 0}, "max_steps of TrainingArguments is 0: nothing would be trained"),
        ({"accelerator_config": {"split_batches": True}}, "has split_batches=True: every process"),
        ({"accelerator_config": {"dispatch_batches": True}}, "has dispatch_batches=True"),
        ({"accelerator_config": {"even_batches": False}}, "equally many of per_device_train"),
        ({"metric_for_best_model": "tau"}, "an evaluation here gives loss, cross_entropy, total_"),
        ({"trainer_drafter": make_eagle3(stored=False)}, "weights and num_anchors are of block"),
    ],
)
def test_what_would_be_ignored_is_refused(tmp_path, options, message):
    drafter = options.pop("trainer_drafter", None)
    with pytest.raises(ValueError, match=message):
        make_trainer(tmp_path, drafter, **options)


def test_examples_that_fill_no_batch(tmp_path):
    trainer = make_trainer(tmp_path, per_device_train_batch_size=7, dataloader_drop_last=True)
    with pytest.raises(ValueError, match="6 training examples fill no batch of 7"):
        trainer.train()


def test_several_accelerators_in_one_process_are_refused(tmp_path):
    args = arguments(tmp_path)
    args._n_gpu = 2
    with pytest.raises(ValueError, match="accelerate launch"):
        DSparkTrainer(make_drafter(stored=False), make_target(), args, make_examples())


@pytest.mark.parametrize("limit", [10_000, 150_000])
def test_a_full_disk_leaves_no_torn_checkpoint(tmp_path, limit):
    """Full while the drafter is written, or while the larger optimiser state is."""
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 1}
    trainer = make_trainer(tmp_path, **options)
    sizes = {}

    class Fill(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            folder = tmp_path / f"checkpoint-{state.global_step}"
            sizes.update({file.name: file.stat().st_size for file in folder.iterdir()})
            fill(limit)

    trainer.add_callback(Fill())
    message = r"checkpoint-2 failed .*free some space"
    with limited_files() as fill, pytest.raises(OSError, match=message):
        trainer.train()
    assert 10_000 < sizes["model.safetensors"] < 150_000 < sizes["optimizer.pt"]
    assert last_complete_checkpoint(tmp_path) == str(tmp_path / "checkpoint-1")
    assert not (tmp_path / "checkpoint-2").exists()


def test_a_checkpoint_that_was_cut_off_is_passed_over(tmp_path):
    assert last_complete_checkpoint(tmp_path / "nothing") is None
    for step in (9, 10, 100):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    (tmp_path / "checkpoint-best").mkdir()
    assert last_complete_checkpoint(tmp_path) == str(tmp_path / "checkpoint-100")
    (tmp_path / "checkpoint-100" / "trainer_state.json").write_text('{"global_')
    assert last_complete_checkpoint(tmp_path) == str(tmp_path / "checkpoint-10")
    shutil.rmtree(tmp_path / "checkpoint-10")
    assert last_complete_checkpoint(tmp_path) == str(tmp_path / "checkpoint-9")

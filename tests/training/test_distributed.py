"""Two processes take the step that one takes with all of their examples."""

import os
import socket

import pytest
import torch
from torch import multiprocessing

from dspark_hf.training.data import DraftDataset, Example
from small_runs import make_examples, make_trainer, weights
from tiny import make_drafter


def uneven_examples():
    """Four texts with 3, 16, 2 and 9 supervised tokens behind their prompts."""
    return DraftDataset(
        Example(e.input_ids, [k >= len(e.input_ids) - learned for k in range(len(e.input_ids))])
        for e, learned in zip(make_examples(4).examples, (3, 16, 2, 9), strict=True)
    )


def step(folder, rows):
    """One plain gradient step of size one; evaluation before it."""
    drafter = make_drafter(stored=False)
    before = weights(drafter)
    trainer = make_trainer(
        folder,
        drafter,
        train=uneven_examples(),
        validation=uneven_examples(),
        max_steps=1,
        per_device_train_batch_size=rows,
        per_device_eval_batch_size=rows,
        optim="sgd",
        learning_rate=1.0,
        max_grad_norm=0.0,
        lr_scheduler_type="constant",
        # More than there are candidates: chance has no part in it.
        trainer_num_anchors=32,
    )
    evaluation = trainer.evaluate()
    trainer.train()
    gradients = {name: before[name] - tensor for name, tensor in drafter.state_dict().items()}
    (report,) = [entry for entry in trainer.state.log_history if "loss" in entry]
    return gradients, evaluation, report


def run_rank(rank, port, folder):
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE="2",
        LOCAL_WORLD_SIZE="2",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    torch.save(step(folder, rows=2), os.path.join(folder, f"rank{rank}.pt"))
    torch.distributed.destroy_process_group()


def test_gradients_and_reports_of_two_processes_equal_those_of_one(tmp_path):
    """B135, B136, B137: supervised tokens differ between the two; a mean of means would show."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    multiprocessing.spawn(run_rank, (port, str(tmp_path)), nprocs=2)
    gradients, evaluation, report = step(tmp_path / "one", rows=4)
    assert any(gradient.any() for gradient in gradients.values())
    for rank in range(2):
        theirs, their_evaluation, their_report = torch.load(tmp_path / f"rank{rank}.pt")
        for name, gradient in gradients.items():
            torch.testing.assert_close(theirs[name], gradient, atol=1e-6, rtol=1e-4, msg=name)
        assert their_evaluation == pytest.approx(evaluation, rel=1e-5)
        for name in ("cross_entropy", "total_variation", "expected_tau", "acceptance_4"):
            assert their_report[name] == pytest.approx(report[name], rel=1e-5), name

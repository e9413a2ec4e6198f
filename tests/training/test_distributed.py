"""Two processes take the step that one takes with all of their examples."""

import os
import socket

import pytest
import torch
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import distributed, multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from dspark_hf.training.data import DraftDataset, Example, collate
from dspark_hf.training.objective import DSparkObjective
from dspark_hf.training.trainer import check_sharding
from small_runs import arguments, make_examples, make_trainer, weights
from tiny import make_drafter, make_eagle3


def uneven_examples(learned=(3, 16, 2, 9)):
    """Texts with so many supervised tokens behind their prompts, on both sides uneven."""
    return DraftDataset(
        Example(e.input_ids, [k >= len(e.input_ids) - count for k in range(len(e.input_ids))])
        for e, count in zip(make_examples(len(learned)).examples, learned, strict=True)
    )


def step(folder, rows, kind):
    """One plain gradient step of size one; evaluation before it, of which a row is left over."""
    drafter = kind(stored=False)
    before = weights(drafter)
    # More than there are candidates: chance has no part in it.
    num_anchors = 32 if kind is make_drafter else None
    trainer = make_trainer(
        folder,
        drafter,
        train=uneven_examples(),
        validation=uneven_examples((3, 16, 2, 9, 14)),
        max_steps=1,
        per_device_train_batch_size=rows,
        per_device_eval_batch_size=rows,
        optim="sgd",
        learning_rate=1.0,
        max_grad_norm=0.0,
        lr_scheduler_type="constant",
        trainer_num_anchors=num_anchors,
    )
    evaluation = trainer.evaluate()
    trainer.train()
    gradients = {name: before[name] - tensor for name, tensor in drafter.state_dict().items()}
    (report,) = [entry for entry in trainer.state.log_history if "loss" in entry]
    return gradients, evaluation, report


def sharded_step(folder, rank):
    """Gradients of this process's half of the examples, of weights sharded over both of them."""
    trainer = make_trainer(folder, train=uneven_examples())
    drafter = trainer.drafter
    whole = weights(drafter)
    start = os.path.join(folder, "start")
    # The first process writes.
    drafter.save_pretrained(start)
    distributed.barrier()
    objective = DSparkObjective(drafter, num_anchors=32)
    objective.num_processes = 2

    def sum_over_processes(x):
        x = x.clone()
        distributed.all_reduce(x)
        return x

    objective.sum_over_processes = sum_over_processes
    fully_shard(objective, mesh=init_device_mesh("cpu", (2,)))
    with torch.no_grad():
        for weight in objective.parameters():
            weight.zero_()
    trainer._load_from_checkpoint(start)
    loaded = {name: weight.full_tensor() for name, weight in drafter.named_parameters()}
    assert all(torch.equal(loaded[name], whole[name]) for name in loaded)
    rows = [trainer.train_dataset[i] for i in (2 * rank, 2 * rank + 1)]
    trainer._run(objective, collate(rows), None)[0].backward()
    return {name: weight.grad.full_tensor() for name, weight in drafter.named_parameters()}


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
    steps = [step(folder, rows=2, kind=kind) for kind in (make_drafter, make_eagle3)]
    torch.save((*steps, sharded_step(folder, rank)), os.path.join(folder, f"rank{rank}.pt"))
    torch.distributed.destroy_process_group()


def test_gradients_and_reports_of_two_processes_equal_those_of_one(tmp_path):
    """B135, B136, B137: supervised tokens differ between the two; a mean of means would show."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    multiprocessing.spawn(run_rank, (port, str(tmp_path)), nprocs=2)
    for place, kind in enumerate((make_drafter, make_eagle3)):
        gradients, evaluation, report = step(tmp_path / "one", rows=4, kind=kind)
        assert any(gradient.any() for gradient in gradients.values())
        for rank in range(2):
            results = torch.load(tmp_path / f"rank{rank}.pt")
            theirs, their_evaluation, their_report = results[place]
            for name, gradient in gradients.items():
                torch.testing.assert_close(theirs[name], gradient, atol=1e-6, rtol=1e-4, msg=name)
            assert their_evaluation == pytest.approx(evaluation, rel=1e-5)
            for name in ("cross_entropy", "total_variation", "expected_tau", "acceptance_4"):
                assert their_report[name] == pytest.approx(report[name], rel=1e-5), name
            if kind is make_eagle3:
                continue
            sharded = results[-1]
            assert set(sharded) == set(gradients)
            for name, gradient in sharded.items():
                torch.testing.assert_close(
                    gradient, gradients[name], atol=1e-6, rtol=1e-4, msg=name
                )


@pytest.fixture
def fsdp_variable(monkeypatch):
    """The host writes this variable when it reads `fsdp`; other tests must not find it."""
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "false")


def test_fsdp_is_refused_where_it_would_be_ignored(tmp_path, monkeypatch, fsdp_variable):
    make_trainer(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ValueError, match="found 1 on cpu"):
        make_trainer(tmp_path)


@pytest.mark.parametrize(
    ("options", "is_refused"),
    [
        ({"auto_wrap_policy": "NO_WRAP"}, False),
        ({"auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}, False),
        (
            {
                "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
                "transformer_cls_names_to_wrap": ["Qwen3DecoderLayer"],
            },
            True,
        ),
        ({"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 10}, True),
    ],
)
def test_layers_are_not_sharded_one_by_one(tmp_path, options, is_refused, fsdp_variable):
    class Accelerator:
        distributed_type = DistributedType.FSDP

        class state:
            fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=2, **options)

    args = arguments(tmp_path, fsdp=True)
    if is_refused:
        with pytest.raises(ValueError, match="NO_WRAP"):
            check_sharding(args, Accelerator())
    else:
        check_sharding(args, Accelerator())


def test_deepspeed_is_refused_however_it_is_asked_for(tmp_path):
    class Accelerator:
        distributed_type = DistributedType.DEEPSPEED

    with pytest.raises(ValueError, match="never trained under DeepSpeed"):
        check_sharding(arguments(tmp_path), Accelerator())

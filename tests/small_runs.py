"""Tiny training runs: examples, a target and its drafter, trainers in a folder."""

import contextlib
import resource

import torch
from transformers import TrainingArguments

from dspark_hf.training.data import DraftDataset, Example
from dspark_hf.training.trainer import DSparkTrainer
from tiny import make_drafter, make_target


def make_examples(count=6, length=20, seed=0, prompt=4):
    """Random texts; the first `prompt` tokens are not the target's. Lengths differ."""
    generator = torch.Generator().manual_seed(seed)
    examples = []
    for i in range(count):
        ids = torch.randint(3, 95, (length + i,), generator=generator).tolist()
        examples.append(Example(ids, [k >= prompt for k in range(len(ids))]))
    return DraftDataset(examples)


def arguments(folder, **options):
    return TrainingArguments(
        **{
            "output_dir": str(folder),
            "max_steps": 4,
            "per_device_train_batch_size": 2,
            "learning_rate": 1e-2,
            "report_to": "none",
            "save_strategy": "no",
            "logging_steps": 1,
            "disable_tqdm": True,
            "use_cpu": True,
            "dataloader_pin_memory": False,
            **options,
        }
    )


def make_trainer(folder, drafter=None, target=None, train=None, validation=None, **options):
    """A trainer over four steps; keywords of the trainer itself start with `trainer_`."""
    own = {k.removeprefix("trainer_"): v for k, v in options.items() if k.startswith("trainer_")}
    options = {k: v for k, v in options.items() if not k.startswith("trainer_")}
    return DSparkTrainer(
        drafter if drafter is not None else make_drafter(stored=False),
        target if target is not None else make_target(),
        arguments(folder, **options),
        train if train is not None else make_examples(),
        validation,
        **{"num_anchors": 3, **own},
    )


@contextlib.contextmanager
def limited_files():
    """
    What is yielded says from when on no file can grow beyond so many bytes, as on a full disk. Over
    before the test is, or the report of the test could not be written to a file either.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def weights(drafter):
    return {name: tensor.detach().clone() for name, tensor in drafter.state_dict().items()}


def assert_same_weights(one, other):
    one, other = (x if isinstance(x, dict) else x.state_dict() for x in (one, other))
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name

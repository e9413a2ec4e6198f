"""The order of examples: a run that is resumed in a later pass meets those that it had not met."""

from dataclasses import asdict
from itertools import chain

import datasets
import pytest
import torch
from torch.utils.data import IterableDataset

from dspark_hf.training.order import EndlessStream
from small_runs import assert_same_weights, make_examples, make_trainer
from tiny import make_drafter, make_eagle3


def rows():
    return datasets.Dataset.from_list([asdict(x) for x in make_examples(5).examples])


def shuffled_stream():
    return rows().to_iterable_dataset(num_shards=2).shuffle(seed=3, buffer_size=4)


def lengths_seen(trainer):
    """Lengths tell the examples apart."""
    seen, compute_loss = [], trainer.compute_loss

    def watching(model, inputs, *args, **kwargs):
        seen.append(inputs["attention_mask"].sum(dim=1).tolist())
        return compute_loss(model, inputs, *args, **kwargs)

    trainer.compute_loss = watching
    return seen


@pytest.mark.parametrize(
    ("make_rows", "options"),
    [
        (lambda: make_examples(5), {"train_sampling_strategy": "group_by_length"}),
        (lambda: make_examples(5), {"train_sampling_strategy": "random"}),
        (lambda: rows().to_iterable_dataset(), {}),
        (shuffled_stream, {"dataloader_num_workers": 1}),
    ],
)
@pytest.mark.parametrize("kind", [make_drafter, make_eagle3])
def test_a_run_interrupted_in_a_later_pass(tmp_path, make_rows, options, kind):
    """Three batches are a pass: the fifth step is the second one of the second."""
    options |= {"max_steps": 8, "save_strategy": "steps", "save_steps": 5, "seed": 1}
    if kind is make_eagle3:
        options["trainer_num_anchors"] = None
    trainers = [make_trainer(tmp_path, kind(stored=False), train=make_rows(), **options)]
    trainers.append(make_trainer(tmp_path, kind(stored=False), train=make_rows(), **options))
    whole, resumed = map(lengths_seen, trainers)
    trainers[0].train()
    torch.manual_seed(5)
    trainers[1].train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    assert resumed == whole[5:]
    assert_same_weights(trainers[0].drafter, trainers[1].drafter)


def test_passes_by_length_have_orders_of_their_own(tmp_path):
    trainer = make_trainer(
        tmp_path,
        train=make_examples(6),
        max_steps=9,
        train_sampling_strategy="group_by_length",
    )
    seen = lengths_seen(trainer)
    trainer.train()
    passes = [list(chain(*seen[i : i + 3])) for i in (0, 3, 6)]
    assert all(sorted(one) == list(range(20, 26)) for one in passes)
    assert passes[0] != passes[1] != passes[2]


def test_a_stream_is_shuffled_anew_in_every_pass_and_may_be_empty():
    stream = iter(EndlessStream(shuffled_stream()))
    passes = [[len(next(stream)["input_ids"]) for _ in range(5)] for _ in range(3)]
    assert [sorted(one) for one in passes] == [[20, 21, 22, 23, 24]] * 3
    assert passes[0] != passes[1]

    class Nothing(IterableDataset):
        def __iter__(self):
            return iter(())

    assert list(EndlessStream(Nothing())) == []

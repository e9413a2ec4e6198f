"""In which order a run meets its examples: one that a resumed run finds again."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.trainer_utils import has_length


class ResumableLengthGroups(LengthGroupedSampler):
    """
    The host's sampler, drawn from a seed. The host's own draws from the global generator, which
    stands elsewhere when a run is resumed.

    Args:
        sampler (`LengthGroupedSampler`): of the host.
        seed (`Callable`): gives the seed of the present epoch.
    """

    def __init__(self, sampler: LengthGroupedSampler, seed: Callable[[], int]):
        super().__init__(sampler.batch_size, lengths=sampler.lengths)
        self._seed = seed

    def __iter__(self) -> Iterator[int]:
        self.generator = torch.Generator().manual_seed(self._seed())
        return super().__iter__()


class EndlessStream(IterableDataset):
    """
    A streamed dataset, pass after pass. The host counts the batches of a stream from its first
    start, so the place of a run that began it anew would be lost with the run.

    Args:
        dataset (iterable): shuffled anew for every pass if it has `set_epoch`.
    """

    def __init__(self, dataset: Any):
        self._dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        number, is_empty = 0, False
        while not is_empty:
            if hasattr(self._dataset, "set_epoch"):
                self._dataset.set_epoch(number)
            number, is_empty = number + 1, True
            for example in self._dataset:
                is_empty = False
                yield example


def pass_after_pass(dataset: Any) -> Any:
    """A dataset of known length, or none, as it is; [`EndlessStream`] of any other."""
    return dataset if dataset is None or has_length(dataset) else EndlessStream(dataset)

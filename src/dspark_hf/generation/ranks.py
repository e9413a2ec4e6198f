"""Several processes that run one target together decide everything once."""

from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel


class Ranks:
    """
    Makes the ranks of a tensor-parallel target agree: what the first of them drew or decided holds
    for all. Their logits are sums in one order and equal, but random numbers and clocks are not,
    and ranks that disagree about one token wait for each other for ever.

    Args:
        target (`PreTrainedModel`): sharded over several ranks, or not.
    """

    def __init__(self, target: PreTrainedModel):
        size = getattr(target, "_tp_size", None) or 1
        self._is_needed = size > 1 and dist.is_initialized()
        mesh = getattr(target, "_device_mesh", None) if self._is_needed else None
        # The mesh of the host has a dimension for each kind of parallelism.
        self._group: Any = None if mesh is None else mesh.get_group("tp")

    def agree(self, tensor: torch.Tensor) -> torch.Tensor:
        """The first rank's `tensor`, which has the same shape on every rank."""
        if self._is_needed:
            tensor = tensor.contiguous()
            dist.broadcast(tensor, group=self._group, group_src=0)
        return tensor

    def agree_on(self, numbers: list[int], device: torch.device) -> list[int]:
        """The first rank's `numbers`."""
        if not self._is_needed:
            return numbers
        return [int(n) for n in self.agree(torch.tensor(numbers, device=device)).tolist()]

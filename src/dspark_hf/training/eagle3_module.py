"""Eagle3's objective in the form that the trainer runs."""

from collections.abc import Callable

import torch
from torch import nn

from ..modeling_eagle3 import Eagle3Drafter
from .eagle3_objective import eagle3_objective
from .objective import ObjectiveSums, TargetStates
from .vocabulary_loss import Teacher


class Eagle3Objective(nn.Module):
    """
    Loss of an Eagle3 drafter on a batch; every supervised position is an anchor.

    Args:
        drafter ([`Eagle3Drafter`]): trained; an embedding and a head of the target stay frozen.
        decay (`float`): weight of step k is `decay ** k`.
        chunk_rows (`int`): rows scored over the vocabulary at a time.
        sum_over_processes (`Callable`, *optional*), num_processes (`int`, *optional*):
            as of [`DSparkObjective`].
    """

    def __init__(
        self,
        drafter: Eagle3Drafter,
        decay: float = 0.8,
        chunk_rows: int = 256,
        sum_over_processes: Callable[[torch.Tensor], torch.Tensor] | None = None,
        num_processes: int = 1,
    ):
        super().__init__()
        self.drafter = drafter
        self.decay = decay
        self.chunk_rows = chunk_rows
        self.sum_over_processes = sum_over_processes
        self.num_processes = num_processes

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        loss_mask: torch.Tensor,
        states: TargetStates,
        teacher_head: Teacher,
    ) -> tuple[torch.Tensor, ObjectiveSums]:
        """Same arguments and results as [`DSparkObjective`]; there is no confidence to learn."""
        total, figures = eagle3_objective(
            self.drafter,
            input_ids,
            loss_mask.bool() & attention_mask.bool(),
            states.features,
            states.last_hidden,
            teacher_head.logits,
            decay=self.decay,
            chunk_rows=self.chunk_rows,
        )
        weight = figures["weight"]
        if self.sum_over_processes is not None:
            weight = self.sum_over_processes(weight)
        loss = total / (weight + 1e-6) * self.num_processes
        count, zero = figures["count"], loss.new_zeros(())
        weights = count * self.decay ** torch.arange(len(count), device=count.device)
        return loss, ObjectiveSums(
            weight=weights.sum(),
            cross_entropy=(figures["cross_entropy"] * weights).sum(),
            total_variation=(2 * (1 - figures["acceptance"]) * weights).sum(),
            confidence=zero,
            survived=figures["survived"],
            reached=figures["reached"],
            confidence_error=torch.zeros_like(count),
            count=count,
        )

    def mean_loss(self, sums: ObjectiveSums) -> float:
        """The loss of many batches together."""
        return float(sums.cross_entropy / sums.weight.clamp(min=1e-6))

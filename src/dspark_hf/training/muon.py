"""
Muon for the matrices of a drafter's layers and AdamW for the rest, as one optimiser of the host.

Muon makes the momentum of a matrix orthogonal before it is applied, so that rare directions learn
as fast as common ones. A drafter has seen little when it is trained on one machine, and learns more
from it that way (figures in docs/training.md).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import TrainingArguments

# What is looked up or scored by token, and the confidence's single row, are no maps between states.
_NOT_MATRICES = ("markov_", "confidence_head", "embed_tokens", "lm_head")


class MuonWithAdamW(torch.optim.Optimizer):
    """
    `torch.optim.Muon` and `torch.optim.AdamW` behind one interface.

    One learning rate serves both: Muon's updates are scaled to the size that AdamW's have
    (`match_rms_adamw`).

    Args:
        drafter (`torch.nn.Module`): its parameters without a gradient are left alone.
        args (`TrainingArguments`):
            `learning_rate`, `weight_decay` (of the matrices) and AdamW's `adam_*` are read.
    """

    def __init__(self, drafter: nn.Module, args: TrainingArguments):
        matrices: list[nn.Parameter] = []
        rest: list[nn.Parameter] = []
        for name, x in drafter.named_parameters():
            if x.requires_grad:
                is_matrix = x.ndim == 2 and not any(part in name for part in _NOT_MATRICES)
                (matrices if is_matrix else rest).append(x)
        rate = args.learning_rate
        betas = (args.adam_beta1, args.adam_beta2)
        self._parts = (
            torch.optim.Muon(
                matrices,
                lr=rate,
                weight_decay=args.weight_decay,
                adjust_lr_fn="match_rms_adamw",
            ),
            torch.optim.AdamW(rest, lr=rate, weight_decay=0, betas=betas, eps=args.adam_epsilon),
        )
        super().__init__([group for part in self._parts for group in part.param_groups], {})
        self._share()

    def _share(self) -> None:
        """The parts work on the groups and the state that schedules and checkpoints see."""
        for part, group in zip(self._parts, self.param_groups, strict=True):
            part.param_groups, part.state = [group], self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The state of a checkpoint."""
        super().load_state_dict(state_dict)
        self._share()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of all parameters; see `torch.optim.Optimizer.step`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self._parts:
            part.step()
        return loss

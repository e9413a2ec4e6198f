"""
The training objective: cross-entropy, total variation and confidence (paper section 6).

Shapes: B sequences, S positions, A anchors, G predicting slots (γ), n taps, D target width.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ..modeling_dspark import DSparkDrafter
from .anchors import block_targets, decay_weights, sample_anchors
from .block_forward import block_hidden_states
from .vocabulary_loss import DraftHead, Teacher, vocabulary_loss


@dataclass(frozen=True)
class ObjectiveWeights:
    """
    Weights of the terms. The defaults are the released DSpark drafters'; DFlash is (1, 0, 0).

    Attributes:
        ce (`float`): of the cross-entropy with the token that came next.
        tv (`float`): of `‖q − p‖₁`, not halved.
        confidence (`float`): of the confidence head's binary cross-entropy.
        decay (`float`): g of the slot weights `exp(−k / g)`.

    Raises:
        `ValueError`: a weight that is negative or no number, none above 0, or a decay of 0.
    """

    ce: float = 0.1
    tv: float = 0.9
    confidence: float = 1.0
    decay: float = 4.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
                raise ValueError(
                    f"objective.{name} must be a number of at least 0, found {value!r}."
                )
        if self.decay == 0 or not any((self.ce, self.tv, self.confidence)):
            raise ValueError(
                f"objective.decay and one of the weights must be above 0, found {vars(self)}."
            )


@dataclass(frozen=True)
class TargetStates:
    """
    What the target thinks of a batch.

    Attributes:
        features (`torch.Tensor` of shape `(B, S, n·D)`): tap outputs.
        last_hidden (`torch.Tensor` of shape `(B, S, D)`): states after the final norm.
        log_normaliser (`torch.Tensor` of shape `(B, S)`, *optional*): see [`Teacher`].
    """

    features: torch.Tensor
    last_hidden: torch.Tensor
    log_normaliser: torch.Tensor | None = None


@dataclass(frozen=True)
class ObjectiveSums:
    """
    Sums over a batch, so that batches and processes can be added before anything is divided.

    Attributes:
        weight, cross_entropy, total_variation, confidence (`torch.Tensor`, scalars):
            `Σ w` and the weighted terms.
        survived, reached (`torch.Tensor` of shape `(G,)`):
            Per slot k, sums over the blocks supervised there of the chance that sampling accepts
            all up to it, `Π_{j≤k} acceptance_j`, and all before it, `Π_{j<k} acceptance_j`.
        confidence_error, count (`torch.Tensor` of shape `(G,)`):
            per slot: absolute error of the confidence, supervised blocks.
    """

    weight: torch.Tensor
    cross_entropy: torch.Tensor
    total_variation: torch.Tensor
    confidence: torch.Tensor
    survived: torch.Tensor
    reached: torch.Tensor
    confidence_error: torch.Tensor
    count: torch.Tensor

    def flatten(self) -> torch.Tensor:
        """All sums in one float64 vector; see [`ObjectiveSums.unflatten`]."""
        return torch.cat([x.double().reshape(-1) for x in vars(self).values()])

    @classmethod
    def unflatten(cls, vector: torch.Tensor) -> "ObjectiveSums":
        """Inverse of `flatten`."""
        slots = (len(vector) - 4) // 4
        return cls(
            *(x.squeeze() if len(x) == 1 else x for x in vector.split([1] * 4 + [slots] * 4))
        )

    def metrics(self) -> dict[str, float]:
        """
        Means by name: the terms, expected τ, acceptance per slot, confidence error. Acceptance of
        slot k is that of the blocks in which sampling gets there, so τ is
        `1 + a_1 (1 + a_2 (1 + …))` where all blocks are supervised to their end.
        """
        weight = self.weight.clamp(min=1e-6)
        count = self.count.reshape(-1).clamp(min=1)
        survived, reached = self.survived.reshape(-1), self.reached.reshape(-1)
        acceptance = (survived / reached.clamp(min=1e-6)).tolist()
        return {
            "cross_entropy": float(self.cross_entropy / weight),
            "total_variation": float(self.total_variation / weight),
            "confidence_loss": float(self.confidence / weight),
            "confidence_error": float(self.confidence_error.sum() / count.sum()),
            "expected_tau": float((self.count.reshape(-1)[0] + survived.sum()) / count[0]),
            **{f"acceptance_{k + 1}": rate for k, rate in enumerate(acceptance)},
        }


def survival(
    acceptance: torch.Tensor, is_supervised: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    `survived` and `reached` of [`ObjectiveSums`].

    Args:
        acceptance (`torch.Tensor` of shape `(…, G)`): chance of each slot, 0 where unsupervised.
        is_supervised (`torch.Tensor` of shape `(…, G)`, boolean): a prefix of every block.
    """
    upto = acceptance.cumprod(dim=-1)
    before = torch.cat((torch.ones_like(upto[..., :1]), upto[..., :-1]), dim=-1) * is_supervised
    slots = acceptance.shape[-1]
    return upto.reshape(-1, slots).sum(0), before.reshape(-1, slots).sum(0)


class DSparkObjective(nn.Module):
    """
    Loss of a drafter on a batch. A module, so that distributed wrappers see one `forward`.

    Args:
        drafter ([`DSparkDrafter`]): trained; an embedding and a head of the target stay frozen.
        weights ([`ObjectiveWeights`]): of the terms.
        num_anchors (`int`): most anchors per sequence.
        chunk_rows (`int`): rows scored over the vocabulary at a time.
        sum_over_processes (`Callable`, *optional*):
            adds a tensor over all processes; needed when there are several.
        num_processes (`int`, *optional*, defaults to 1):
            Gradients are averaged over so many processes afterwards; the loss makes up for it.
    """

    def __init__(
        self,
        drafter: DSparkDrafter,
        weights: ObjectiveWeights | None = None,
        num_anchors: int = 512,
        chunk_rows: int = 256,
        sum_over_processes: Callable[[torch.Tensor], torch.Tensor] | None = None,
        num_processes: int = 1,
    ):
        super().__init__()
        self.drafter = drafter
        self.weights = weights or ObjectiveWeights()
        self.num_anchors = num_anchors
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
        anchors: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, ObjectiveSums]:
        """
        Args:
            input_ids, attention_mask, loss_mask (`torch.Tensor` of shape `(B, S)`): padded right.
            states ([`TargetStates`]): of the same batch.
            teacher_head ([`Teacher`]): the target's head; its `hidden` is not read.
            anchors (`tuple`, *optional*): positions and flags `(B, A)`; drawn by default.

        Returns:
            The loss, divided by the weight of all processes, and the sums of this one.
        """
        drafter, weights = self.drafter, self.weights
        is_text, is_learned = attention_mask.bool(), loss_mask.bool()
        if anchors is None:
            anchors = sample_anchors(is_learned & is_text, self.num_anchors)
        positions, is_kept = anchors
        size = drafter.config.block_size
        labels, previous, is_supervised = block_targets(
            input_ids, is_learned, positions, is_kept, size
        )
        context = drafter.new_context(batch_size=1)
        hidden = block_hidden_states(
            drafter, context.input_embeddings, states.features, input_ids, is_text, *anchors
        )
        slot_weights = decay_weights(is_supervised, weights.decay)

        head = drafter.markov_head
        latents = None if head is None else head.latents(previous, hidden)
        slots = torch.arange(size, device=positions.device)
        at = (positions[..., None] + slots).clamp(max=input_ids.shape[1] - 1)
        rows = torch.arange(len(input_ids), device=at.device)[:, None, None].expand_as(at)
        rows, at = rows[is_supervised], at[is_supervised]
        normaliser = states.log_normaliser
        result = vocabulary_loss(
            hidden[is_supervised],
            None if latents is None else latents[is_supervised],
            None if head is None else head.markov_w2.weight,
            DraftHead(
                context.output_embeddings.weight,
                drafter.config.final_logit_softcapping,
                drafter.draft_to_target if drafter.config.draft_vocab_size else None,
            ),
            Teacher(
                states.last_hidden[rows, at],
                teacher_head.weight,
                teacher_head.softcapping,
                teacher_head.scale,
                None if normaliser is None else normaliser[rows, at],
            ),
            labels[is_supervised],
            slot_weights[is_supervised],
            weights.ce,
            weights.tv,
            self.chunk_rows,
        )
        acceptance = torch.zeros_like(slot_weights).masked_scatter(is_supervised, result.acceptance)
        confidence, error = self._confidence(hidden, previous, acceptance, slot_weights)
        error = (error * is_supervised).flatten(0, 1).sum(0)
        survived, reached = survival(acceptance, is_supervised)
        sums = ObjectiveSums(
            slot_weights.sum(),
            result.cross_entropy,
            result.total_variation,
            confidence.detach(),
            survived,
            reached,
            error.detach(),
            is_supervised.flatten(0, 1).sum(0),
        )
        total = sums.weight
        if self.sum_over_processes is not None:
            total = self.sum_over_processes(total)
        loss = (result.loss + weights.confidence * confidence) / (total + 1e-6)
        return loss * self.num_processes, sums

    def mean_loss(self, sums: ObjectiveSums) -> float:
        """The loss of many batches together."""
        weights = self.weights
        total = weights.ce * sums.cross_entropy + weights.tv * sums.total_variation
        total = total + weights.confidence * sums.confidence
        return float(total / sums.weight.clamp(min=1e-6))

    def _confidence(
        self,
        hidden: torch.Tensor,
        previous: torch.Tensor,
        acceptance: torch.Tensor,
        slot_weights: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Weighted binary cross-entropy with the acceptance, and each slot's absolute error."""
        head = self.drafter.confidence_head
        if head is None:
            return slot_weights.new_zeros(()), torch.zeros_like(slot_weights)
        markov: Any = self.drafter.markov_head
        logits = head(hidden, markov.embed(previous) if head.with_markov else None)
        losses = functional.binary_cross_entropy_with_logits(logits, acceptance, reduction="none")
        return (slot_weights * losses).sum(), (torch.sigmoid(logits) - acceptance).abs()

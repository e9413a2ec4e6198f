"""
Cross-entropy and total variation over the vocabulary, in chunks of rows, with exact gradients.

Written out, draft logits, teacher logits and two softmaxes of N rows over V tokens take 16·N·V
bytes and more, and automatic differentiation keeps them all. Here a chunk of rows is scored,
differentiated and forgotten before the next one, so the memory does not grow with N.

Shapes: N rows (slots of all blocks), V vocabulary, V_d draft vocabulary, H drafter width, D target
width, r Markov rank.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional


@dataclass(frozen=True)
class DraftHead:
    """
    How hidden states become draft logits: the frozen part.

    Attributes:
        weight (`torch.Tensor` of shape `(V_d, H)`): the output head.
        softcapping (`float`, *optional*): c of `c · tanh(U / c)`, before the Markov bias.
        draft_to_target (`torch.Tensor` of shape `(V_d,)`, *optional*):
            target ids of the rows, if the draft vocabulary is reduced.
    """

    weight: torch.Tensor
    softcapping: float | None = None
    draft_to_target: torch.Tensor | None = None


@dataclass(frozen=True)
class Teacher:
    """
    The target's next-token distributions, as cheap as they can be kept.

    Attributes:
        hidden (`torch.Tensor` of shape `(N, D)`): the target's states after its final norm.
        weight (`torch.Tensor` of shape `(V, D)`): its output head.
        softcapping (`float`, *optional*): cap of its logits.
        scale (`float`): factor on its logits, before the cap.
        log_normaliser (`torch.Tensor` of shape `(N,)`, *optional*):
            log-sum-exp of the logits over V. With it a reduced draft vocabulary needs only its own
            rows of the head.
    """

    hidden: torch.Tensor
    weight: torch.Tensor
    softcapping: float | None = None
    scale: float = 1.0
    log_normaliser: torch.Tensor | None = None

    def logits(self, hidden: torch.Tensor, head: torch.Tensor | None = None) -> torch.Tensor:
        """Float32 logits behind `hidden` `(M, D)`, of the rows `head` of the head if given."""
        head = self.weight if head is None else head
        logits = functional.linear(hidden.to(head.dtype), head).float()
        return _cap(logits if self.scale == 1.0 else self.scale * logits, self.softcapping)

    def rows_of_head(self, token_ids: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        """What of the head [`Teacher.probabilities`] needs for `token_ids` (all if `None`)."""
        needs_all = token_ids is None or self.log_normaliser is None
        return (self.weight if needs_all else self.weight[token_ids]).to(dtype)

    def probabilities(
        self, rows: slice, head: torch.Tensor, token_ids: torch.Tensor | None
    ) -> torch.Tensor:
        """
        p of `rows` at `token_ids` (all if `None`), float32, in memory of its own. `head` is
        `rows_of_head(token_ids, dtype)`, and products are computed in that dtype.
        """
        logits = self.logits(self.hidden[rows], head)
        if self.log_normaliser is not None:
            return logits.sub_(self.log_normaliser[rows, None]).exp_()
        probs = torch.softmax(logits, dim=-1)
        return probs if token_ids is None else probs[:, token_ids]


@dataclass(frozen=True)
class VocabularyLoss:
    """
    Attributes:
        loss (`torch.Tensor`, scalar):
            `Σ w · (ce_weight · CE + tv_weight · ‖q − p‖₁)`, the one part with gradients.
        cross_entropy, total_variation (`torch.Tensor`, scalar): `Σ w · CE` and `Σ w · ‖q − p‖₁`.
        acceptance (`torch.Tensor` of shape `(N,)`):
            `1 − ½ ‖q − p‖₁` (equation 8), the chance that a token drawn from q is accepted.
    """

    loss: torch.Tensor
    cross_entropy: torch.Tensor
    total_variation: torch.Tensor
    acceptance: torch.Tensor


def vocabulary_loss(
    hidden: torch.Tensor,
    latents: torch.Tensor | None,
    markov_w2: torch.Tensor | None,
    head: DraftHead,
    teacher: Teacher,
    labels: torch.Tensor,
    weights: torch.Tensor,
    ce_weight: float,
    tv_weight: float,
    chunk_rows: int = 256,
) -> VocabularyLoss:
    """
    The two terms of the objective that look at the vocabulary (paper section 6).

    A label outside of a reduced draft vocabulary has no cross-entropy; what the target thinks of
    the tokens that cannot be drafted counts as total variation.

    Args:
        hidden (`torch.Tensor` of shape `(N, H)`): draft states after the final norm.
        latents (`torch.Tensor` of shape `(N, r)`, *optional*): what W2 turns into the Markov bias.
        markov_w2 (`torch.Tensor` of shape `(V_d, r)`, *optional*): W2.
        head ([`DraftHead`]): frozen.
        teacher ([`Teacher`]): the distributions p.
        labels (`torch.Tensor` of shape `(N,)`): target ids of the tokens that came next.
        weights (`torch.Tensor` of shape `(N,)`): w.
        ce_weight, tv_weight (`float`): of the sum in `loss`.
        chunk_rows (`int`): rows scored at a time.
    """
    if head.draft_to_target is None:
        draft_labels = labels
    else:
        to_draft = labels.new_full((teacher.weight.shape[0],), -1)
        to_draft[head.draft_to_target] = torch.arange(len(head.draft_to_target)).to(labels)
        draft_labels = to_draft[labels]
    outputs = _ChunkedLoss.apply(
        hidden,
        latents,
        markov_w2,
        (head, teacher, draft_labels, weights, ce_weight, tv_weight, chunk_rows),
    )
    return VocabularyLoss(*outputs)


class _ChunkedLoss(torch.autograd.Function):
    """The gradient is taken while a chunk's logits exist, so nothing is scored twice."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        latents: torch.Tensor | None,
        markov_w2: torch.Tensor | None,
        frozen: tuple,
    ) -> tuple[torch.Tensor, ...]:
        head, teacher, labels, weights, ce_weight, tv_weight, chunk_rows = frozen
        dtype = compute_dtype(hidden)
        weight = head.weight.to(dtype)
        w2 = None if markov_w2 is None else markov_w2.to(dtype)
        teacher_head = teacher.rows_of_head(head.draft_to_target, dtype)
        wants_gradient = any(ctx.needs_input_grad[:3])
        grads: list[Any] = [
            torch.zeros_like(x, dtype=torch.float32) if wants_gradient and x is not None else None
            for x in (hidden, latents, markov_w2)
        ]
        sums = hidden.new_zeros(2, dtype=torch.float32)
        acceptance = hidden.new_empty(len(hidden), dtype=torch.float32)
        for start in range(0, len(hidden), chunk_rows):
            rows = slice(start, min(start + chunk_rows, len(hidden)))
            base = functional.linear(hidden[rows].to(dtype), weight).float()
            scores = base = _cap(base, head.softcapping)
            if latents is not None:
                scores = base + functional.linear(latents[rows].to(dtype), w2).float()
            label, has_label = labels[rows].clamp(min=0)[:, None], labels[rows] >= 0
            normaliser = scores.logsumexp(dim=-1, keepdim=True)
            ce = (normaliser - scores.gather(1, label))[:, 0]
            # A pass over a chunk costs as much as a tenth of its matrix products, so what follows
            # writes over what is not needed any more.
            q = (scores - normaliser).exp_()
            p = teacher.probabilities(rows, teacher_head, head.draft_to_target)
            undraftable = 0.0 if head.draft_to_target is None else (1 - p.sum(dim=-1)).clamp(min=0)
            difference = torch.sub(q, p, out=p)
            tv = torch.linalg.vector_norm(difference, ord=1, dim=-1) + undraftable
            w = weights[rows].float()
            sums += torch.stack(((w * has_label * ce).sum(), (w * tv).sum()))
            acceptance[rows] = (1 - 0.5 * tv).clamp(0, 1)
            if not wants_gradient:
                continue
            sign = difference.sign_()
            slope = (tv_weight * w)[:, None]
            pull = (ce_weight * w * has_label)[:, None]
            # Not by a dot product: autocast would compute it in half precision.
            level = pull - slope * (q * sign).sum(dim=-1, keepdim=True)
            grad = torch.addcmul(level, slope, sign).mul_(q)
            grad.scatter_add_(1, label, -pull)
            if latents is not None:
                grads[1][rows] = (grad.to(dtype) @ w2).float()
                grads[2] += (grad.to(dtype).T @ latents[rows].to(dtype)).float()
            if head.softcapping is not None:
                grad = grad * (1 - (base / head.softcapping) ** 2)
            grads[0][rows] = (grad.to(dtype) @ weight).float()
        ctx.grads = [
            None if grad is None else grad.to(x.dtype)
            for grad, x in zip(grads, (hidden, latents, markov_w2), strict=True)
        ]
        ce_sum, tv_sum = sums
        ctx.mark_non_differentiable(ce_sum, tv_sum, acceptance)
        return ce_weight * ce_sum + tv_weight * tv_sum, ce_sum, tv_sum, acceptance

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple:
        factor = grad_outputs[0]
        return *(None if grad is None else grad * factor for grad in ctx.grads), None


def _cap(logits: torch.Tensor, cap: float | None) -> torch.Tensor:
    return logits if cap is None else cap * torch.tanh(logits / cap)


def compute_dtype(hidden: torch.Tensor) -> torch.dtype:
    """What matrix products with `hidden` are computed in: the dtype of autocast, if it is on."""
    kind = hidden.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype

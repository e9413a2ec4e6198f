"""
The training objective of Eagle3 drafters: training-time test (EAGLE-3, arXiv 2503.01840, section
3; in DeepSpec's form).

The drafter is unrolled over itself as it will be when it drafts. Step 0 runs every position on the
target's features; step k runs every position again, on its own output of step k - 1 and the token
that came next, one rotary position further on. Its queries see the rows of step 0 up to their own
position and their own rows of the later steps: what the drafter sees at its draft token k behind an
anchor at that place. All anchors of a sequence are trained at once.

Shapes: B sequences, S positions, K unrolled steps, n taps, H drafter width, D target width, V
vocabulary, V_d draft vocabulary, N positions whose next token is learned.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from ..modeling_eagle3 import Eagle3Context, Eagle3Drafter
from .objective import survival
from .vocabulary_loss import compute_dtype

# A head: rows of final hidden states (M, D) to logits (M, V), soft-capping included.
Head = Callable[[torch.Tensor], torch.Tensor]


def eagle3_objective(
    drafter: Eagle3Drafter,
    input_ids: torch.Tensor,
    loss_mask: torch.Tensor,
    features: torch.Tensor,
    last_hidden: torch.Tensor,
    teacher_head: Head,
    ttt_length: int | None = None,
    decay: float = 0.8,
    chunk_rows: int = 256,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """
    Soft cross-entropy with the target's distributions, `Σ_k decay^k · Σ_rows CE`, not divided yet.

    Draft token k behind an anchor is learned if the anchor and all tokens up to it are supervised,
    as for DSpark's blocks; DeepSpec looks at the mask two positions earlier, and divides by the
    positions of its batch, masked or not. A reduced draft vocabulary learns the target's
    distribution over the tokens that can be drafted.

    Args:
        drafter ([`Eagle3Drafter`]): with an embedding and a head, its own or bound ones.
        input_ids, loss_mask (`torch.Tensor` of shape `(B, S)`):
            tokens, padded on the right, and whether the target wrote them.
        features (`torch.Tensor` of shape `(B, S, n·D)`): tap outputs.
        last_hidden (`torch.Tensor` of shape `(B, S, D)`): the target's states after its final norm.
        teacher_head (`Callable`): the target's output head, `(M, D)` to logits `(M, V)`.
        ttt_length (`int`, *optional*): K; by default γ, the number of tokens that is drafted.
        decay (`float`): weight of step k is `decay ** k`.
        chunk_rows (`int`):
            Rows of V logits that exist at a time; each chunk is scored once, its gradient taken and
            its logits forgotten.

    Returns:
        The sum, and detached float32 tensors: `weight`, `Σ_k decay^k` of the learned rows, a
        scalar by which sums of several batches can be divided; `cross_entropy`, `acceptance`
        (`Σ_v min(p, q)`, the chance that a sampled token is accepted behind the text's own),
        `agreement` (of the argmaxes), means over the `count` learned rows of each step, `(K,)`
        each; `survived` and `reached` as in [`ObjectiveSums`]; and the scalar `accepted_length`,
        the expected τ of sampling, bonus token included (drafts behind the end of an answer count
        as rejected).

    Raises:
        `ValueError`: shapes do not fit, or the head has no plain weight.
    """
    steps = drafter.config.block_size if ttt_length is None else ttt_length
    _check_shapes(input_ids, loss_mask, features, last_hidden, steps)
    context = drafter.new_context(batch_size=len(input_ids))
    hidden = unroll(drafter, context, input_ids, features, steps)
    is_learned = supervised_steps(loss_mask, steps)
    # One row per position of the teacher, shared by all steps that predict its token.
    sequences, positions = is_learned.any(dim=-1).nonzero(as_tuple=True)
    is_learned = is_learned[sequences, positions]
    step = torch.arange(steps, device=positions.device)
    at = (positions[:, None] - 1 - step).clamp(min=0)
    weights = is_learned * decay**step
    total, *figures = _ChunkedSoftCrossEntropy.apply(
        hidden[sequences[:, None], at, step],
        *_plain_head(context.output_embeddings),
        last_hidden[sequences, positions],
        teacher_head,
        drafter.draft_to_target if drafter.config.draft_vocab_size else None,
        drafter.config.final_logit_softcapping,
        weights,
        chunk_rows,
        torch.is_grad_enabled(),
    )
    metrics = {"weight": weights.sum(), **_means(is_learned, *figures)}
    # Acceptance by anchor: draft token k behind the anchor at `at + 1`; zero where none is learned.
    by_anchor = figures[1].new_zeros(*input_ids.shape, steps)
    learned = is_learned.nonzero(as_tuple=True)
    by_anchor[sequences[learned[0]], at[learned], learned[1]] = figures[1][learned]
    is_by_anchor = torch.zeros_like(by_anchor, dtype=torch.bool)
    is_by_anchor[sequences[learned[0]], at[learned], learned[1]] = True
    survived, reached = survival(by_anchor, is_by_anchor)
    accepted = survived.sum() / metrics["count"][0].clamp(min=1)
    chain = {"survived": survived, "reached": reached, "accepted_length": 1 + accepted}
    return total, {**metrics, **chain}


def unroll(
    drafter: Eagle3Drafter,
    context: Eagle3Context,
    input_ids: torch.Tensor,
    features: torch.Tensor,
    num_steps: int,
) -> torch.Tensor:
    """
    Hidden states `(B, S, K, H)` after the final norm; `[:, t, k]` predict the token at t + 2 + k.

    Args:
        drafter ([`Eagle3Drafter`]): whose layer runs.
        context ([`Eagle3Context`]): an empty one of B rows; gives the embedding.
        input_ids (`torch.Tensor` of shape `(B, S)`): tokens; those behind the end count as 0.
        features (`torch.Tensor` of shape `(B, S, n·D)`): tap outputs.
        num_steps (`int`): K.
    """
    kernel = drafter.config._attn_implementation
    if kernel not in ("sdpa", "eager"):
        raise ValueError(
            f"attn_implementation is {kernel!r}, which takes no mask of its own. Load the drafter "
            "with attn_implementation='sdpa' to train it."
        )
    layer, length, device = drafter.layers[0], input_ids.shape[1], features.device
    hidden = drafter._project(context, features)
    # Keys and values of all steps, one after the other.
    cache = Cache(layers=[DynamicLayer()])
    visible = torch.ones(length, length, dtype=torch.bool, device=device).tril()[None, None]
    own = torch.eye(length, dtype=torch.bool, device=device)[None, None]
    outputs = []
    for step in range(num_steps):
        following = functional.pad(input_ids[:, step + 1 :], (0, min(step + 1, length)))
        embedded = drafter._embed(context.input_embeddings, following)
        rotary = drafter._rotary(hidden, step, length)
        mask = visible
        if kernel == "eager":
            mask = torch.zeros_like(visible, dtype=hidden.dtype).masked_fill(
                ~visible, torch.finfo(hidden.dtype).min
            )
        hidden = layer(embedded, hidden, rotary, cache, mask)
        outputs.append(drafter.norm(hidden))
        if drafter.config.recycles_normed_output:
            hidden = outputs[-1]
        visible = torch.cat((visible, own), dim=-1)
    return torch.stack(outputs, dim=2)


def supervised_steps(loss_mask: torch.Tensor, num_steps: int) -> torch.Tensor:
    """
    Which steps learn from the target's distribution at a position.

    Step k learns the token at p + 1 if the anchor p - k, of which there has to be a position before
    it, and everything up to that token are supervised.

    Args:
        loss_mask (`torch.Tensor` of shape `(B, S)`): whether the target wrote a token.
        num_steps (`int`): K.

    Returns:
        `torch.Tensor` of shape `(B, S, K)`, boolean.
    """
    is_target = loss_mask.bool()
    positions = torch.arange(is_target.shape[1], device=is_target.device)
    run = functional.pad(is_target[:, 1:], (0, 1))
    steps = []
    for step in range(num_steps):
        run = run & is_target.roll(step, dims=1) & (positions > step)
        steps.append(run)
    return torch.stack(steps, dim=-1)


class _ChunkedSoftCrossEntropy(torch.autograd.Function):
    """
    `Σ w · CE(p, q)` of N × K rows, and of each row its CE, `Σ min(p, q)` and whether the argmaxes
    agree. The gradient is taken while a chunk's logits exist, so nothing is scored twice.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        teacher_rows: torch.Tensor,
        teacher_head: Head,
        token_ids: torch.Tensor | None,
        cap: float | None,
        weights: torch.Tensor,
        chunk_rows: int,
        wants_gradient: bool,
    ) -> tuple[torch.Tensor, ...]:
        dtype = compute_dtype(rows)
        head, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
        ce, acceptance, agreement = (torch.zeros_like(weights) for _ in range(3))
        row_grad = torch.zeros_like(rows) if wants_gradient else None
        head_grad = torch.zeros_like(weight) if wants_gradient and weight.requires_grad else None
        # A position costs one row of teacher logits and K of draft logits.
        size = max(1, chunk_rows // (rows.shape[1] + 1))
        for start in range(0, len(rows), size):
            part = slice(start, start + size)
            logits = functional.linear(rows[part].to(dtype), head, bias).float()  # (M, K, V_d)
            if cap is not None:
                logits = cap * torch.tanh(logits / cap)
            p = torch.softmax(teacher_head(teacher_rows[part]).float(), dim=-1)[:, None]
            best, drafted = p.argmax(dim=-1), logits.argmax(dim=-1)
            if token_ids is not None:
                p, drafted = p[..., token_ids], token_ids[drafted]
            goal = p if token_ids is None else p / p.sum(dim=-1, keepdim=True)
            log_q = torch.log_softmax(logits, dim=-1)
            q = log_q.exp()
            ce[part] = -(goal * log_q).sum(dim=-1)
            acceptance[part] = torch.minimum(p, q).sum(dim=-1)
            agreement[part] = (best == drafted).float()
            if row_grad is None:
                continue
            grad = (q - goal) * weights[part, :, None]
            if cap is not None:
                grad = grad * (1 - (logits / cap) ** 2)
            grad = grad.to(dtype)
            row_grad[part] = (grad @ head).to(rows.dtype)
            if head_grad is not None:
                head_grad += (grad.flatten(0, 1).T @ rows[part].flatten(0, 1).to(dtype)).to(weight)
        ctx.grads = row_grad, head_grad
        ctx.mark_non_differentiable(ce, acceptance, agreement)
        return (weights * ce).sum(), ce, acceptance, agreement

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple:
        grads = (None if grad is None else grad * grad_outputs[0] for grad in ctx.grads)
        return *grads, *([None] * 8)


def _means(is_learned: torch.Tensor, *figures: torch.Tensor) -> dict[str, torch.Tensor]:
    count = is_learned.sum(dim=0)
    means = [(figure * is_learned).sum(dim=0) / count.clamp(min=1) for figure in figures]
    names = ("cross_entropy", "acceptance", "agreement")
    return {**dict(zip(names, means, strict=True)), "count": count.float()}


def _plain_head(head: nn.Module) -> tuple[torch.Tensor, torch.Tensor | None]:
    weight, bias = getattr(head, "weight", None), getattr(head, "bias", None)
    if weight is None or not weight.is_floating_point():
        raise ValueError(
            f"The drafter's output head ({type(head).__name__}) has no plain weight to take "
            "gradients through. Train with an unquantised head."
        )
    if bias is not None and bias.requires_grad:
        raise ValueError("The drafter's output head has a bias that is trained; freeze it.")
    return weight, bias


def _check_shapes(
    input_ids: torch.Tensor,
    loss_mask: torch.Tensor,
    features: torch.Tensor,
    last_hidden: torch.Tensor,
    num_steps: int,
) -> None:
    expected = tuple(input_ids.shape)
    found = {
        "loss_mask": tuple(loss_mask.shape),
        "features": tuple(features.shape[:2]),
        "last_hidden": tuple(last_hidden.shape[:2]),
    }
    for name, shape in found.items():
        if shape != expected:
            raise ValueError(
                f"{name} covers {shape} positions and input_ids {expected}; they describe the same "
                "sequences."
            )
    if num_steps < 1:
        raise ValueError(f"ttt_length must be at least 1, found {num_steps}.")

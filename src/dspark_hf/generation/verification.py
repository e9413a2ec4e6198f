"""
Lossless verification of drafted tokens (paper section 3): tensors in, tensors out.

R rows, L draft tokens sent to the target, V vocabulary. Target row k scores the position of draft
token k, and row L the position behind the last one. Rows may submit different numbers of tokens:
`verify_lengths` says how many of the L columns count, and what lies behind is never looked at.
"""

from dataclasses import dataclass

import torch

from ..drafting import sample


@dataclass
class Verification:
    """
    Attributes:
        tokens (`torch.Tensor` of shape `(R, L + 1)`):
            Accepted draft tokens followed by the target's own token; columns behind that are
            undefined.
        num_accepted (`torch.Tensor` of shape `(R,)`):
            Accepted draft tokens, 0 to `verify_lengths`; a row commits one token more.
        is_valid (`torch.Tensor` of shape `(R,)`):
            False where the target gave no distribution (NaN). Left to the caller to read, together
            with the tokens, because reading it waits for the device.
    """

    tokens: torch.Tensor
    num_accepted: torch.Tensor
    is_valid: torch.Tensor


def verify_greedy(
    target_logits: torch.Tensor, draft_tokens: torch.Tensor, verify_lengths: torch.Tensor
) -> Verification:
    """
    Accept drafts while they are the target's argmax; the token behind them is the target's argmax
    too.

    Args:
        target_logits (`torch.Tensor` of shape `(R, L + 1, V)`): processed logits of the target.
        draft_tokens (`torch.Tensor` of shape `(R, L)`): drafted tokens.
        verify_lengths (`torch.Tensor` of shape `(R,)`): submitted tokens per row, at most L.
    """
    best, tokens = target_logits.max(dim=-1)
    num_accepted = _leading(tokens[:, :-1] == draft_tokens, verify_lengths)
    return Verification(tokens, num_accepted, _sound(best, num_accepted))


def verify_sampling(
    target_probs: torch.Tensor,
    draft_tokens: torch.Tensor,
    draft_probs: torch.Tensor | None,
    verify_lengths: torch.Tensor,
) -> Verification:
    """
    Accept token x with probability min(1, p(x) / q(x)); at the first rejection draw from the
    normalised max(0, p - q), and from p if nothing was rejected. The emitted tokens are distributed
    as p.

    Args:
        target_probs (`torch.Tensor` of shape `(R, L + 1, V)`): p, after all processors.
        draft_tokens (`torch.Tensor` of shape `(R, L)`): drafted tokens.
        draft_probs (`torch.Tensor` of shape `(R, L, V)`, *optional*):
            q, exactly what each token was drawn from; `None` if tokens were chosen without chance
            (q is one-hot).
        verify_lengths (`torch.Tensor` of shape `(R,)`): submitted tokens per row, at most L.
    """
    # A softmax over anything that is not a distribution is NaN everywhere.
    marks = target_probs[..., 0]
    rows = torch.arange(draft_tokens.shape[0], device=draft_tokens.device)
    index = draft_tokens[..., None]
    accept_probs = target_probs[:, :-1].gather(-1, index).squeeze(-1)
    if draft_probs is not None:
        accept_probs = accept_probs / draft_probs.gather(-1, index).squeeze(-1)
    num_accepted = _leading(torch.rand_like(accept_probs) < accept_probs, verify_lengths)
    is_valid = _sound(marks, num_accepted)
    rejected = num_accepted < verify_lengths.to(num_accepted.device)
    p = target_probs[rows, num_accepted]
    if draft_tokens.shape[1] > 0:
        position = num_accepted.clamp(max=draft_tokens.shape[1] - 1)
        if draft_probs is None:
            q = torch.zeros_like(p).scatter_(-1, draft_tokens[rows, position][:, None], 1.0)
        else:
            q = draft_probs[rows, position]
        p = torch.where(rejected[:, None], residual(p, q), p)
    tokens = torch.cat((draft_tokens, draft_tokens.new_zeros(draft_tokens.shape[0], 1)), dim=1)
    tokens[rows, num_accepted] = sample(torch.where(is_valid[:, None], p, torch.ones_like(p)))
    return Verification(tokens, num_accepted, is_valid)


def residual(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """
    Normalised max(0, p - q) over the last axis, for `(R, V)` distributions.

    Where p and q agree, a rejection has probability zero and the residual no mass; rounding can
    still bring one about, and then p itself is the right distribution to draw from.
    """
    difference = (p - q).clamp(min=0)
    mass = difference.sum(dim=-1, keepdim=True)
    return torch.where(mass > 0, difference / mass.clamp(min=torch.finfo(p.dtype).tiny), p)


def threshold_lengths(confidence_logits: torch.Tensor, threshold: float) -> torch.Tensor:
    """
    How many draft tokens to submit when the first one below the threshold cuts the block.

    The confidence of token k depends on tokens before k only, so whether token k is submitted does
    not depend on token k, and cutting leaves the output distribution as it is (section 3.2.2).

    Args:
        confidence_logits (`torch.Tensor` of shape `(R, γ)`): conditional confidence, as logits.
        threshold (`float`): probability; 0 keeps everything.

    Returns:
        `torch.Tensor` of shape `(R,)`.
    """
    return _leading(confidence_logits.sigmoid() >= threshold, confidence_logits.shape[1])


def _sound(marks: torch.Tensor, num_accepted: torch.Tensor) -> torch.Tensor:
    """Rows of `(R, L + 1)` without NaN up to the token that is committed last."""
    committed = torch.arange(marks.shape[1], device=marks.device) <= num_accepted[:, None]
    return ~(marks.isnan() & committed).any(dim=-1)


def _leading(flags: torch.Tensor, limit: torch.Tensor | int) -> torch.Tensor:
    """Number of leading true flags per row of `(R, L)`, at most `limit`."""
    count = flags.long().cumprod(dim=1).sum(dim=1)
    if isinstance(limit, torch.Tensor):
        return torch.minimum(count, limit.to(count))
    return count.clamp(max=limit)

"""
The prefix scheduler (paper section 5, Algorithm 1): tensors in, tensors out.

R rows, γ draft tokens, `survival` a of shape `(R, γ)`: probability that draft tokens 1…k of a row
are all accepted; 0 marks a token that cannot be submitted. Tokens are admitted in *units*, best
first, and unit n turns a step of n - 1 units into one of n:

* packed rows: a unit is one token, N = R·γ, and the step has R + n tokens;
* padded rows: a unit is one column of all rows, N = γ, and the step has R·(1 + n) tokens, because
  every row is as wide as the widest.

What a step is worth, `Θ = τ · SPS(B)`, counts every token of other work as one token of progress:
those tokens are rows that draft nothing. Counting only our own would make a step look the cheaper
to widen the busier the machine is.

**Losslessness.** The confidence of token k depends on the tokens before k and never on k itself. A
rule keeps the output distribution if whether token k of a row is submitted is settled by what was
known before token k was drawn: by tokens before it in its row, by other rows, by earlier rounds.

* `early_stop` looks at units in order and stops at the first that does not pay. What it knew then
  are survivals of admitted tokens and of the one it refused, all of which depend on admitted tokens
  only.
* `best_count` looks at all units, hence at confidences that depend on tokens whose own admission is
  being decided: **biased** when applied to the round it decides (paper appendix A: it turns a
  probability of 0.70 into 0.85). Applied to an earlier round it yields a number that the present
  tokens had no part in.
* `admit` takes the first units in the order of survival. A token's place in the order depends on
  its own survival and on larger ones, so any count chosen as above is safe.
"""

import torch

PACKED, PADDED = "packed", "padded"


def calibrated_logits(
    confidence_logits: torch.Tensor,
    temperatures: torch.Tensor | None = None,
    offsets: torch.Tensor | None = None,
) -> torch.Tensor:
    """
    Confidence logits `c_k / T_k + b_k`; the order at each position stays as it was.

    Args:
        confidence_logits (`torch.Tensor` of shape `(R, γ)`): raw.
        temperatures (`torch.Tensor` of shape `(γ,)`, *optional*): STS (section 4); 1 by default.
        offsets (`torch.Tensor` of shape `(γ,)`, *optional*): beyond the paper; 0 by default.

    Returns:
        `torch.Tensor` of shape `(R, γ)`.
    """
    if temperatures is not None:
        confidence_logits = confidence_logits / temperatures.to(confidence_logits)
    if offsets is not None:
        confidence_logits = confidence_logits + offsets.to(confidence_logits)
    return confidence_logits


def survival_probabilities(confidence_logits: torch.Tensor) -> torch.Tensor:
    """
    Prefix survival `a_k = Π_{i ≤ k} σ(c_i)` (section 4).

    Args:
        confidence_logits (`torch.Tensor` of shape `(R, γ)`):
            calibrated conditional confidence; NaN counts as no confidence at all.

    Returns:
        `torch.Tensor` of shape `(R, γ)`, float64, not increasing along a row.
    """
    return confidence_logits.double().sigmoid().nan_to_num(nan=0.0).cumprod(dim=1)


def keep_prefix(survival: torch.Tensor, limits: torch.Tensor) -> torch.Tensor:
    """Survival `(R, γ)` with 0 behind the first `limits` `(R,)` tokens of each row."""
    columns = torch.arange(survival.shape[1], device=survival.device)
    return survival.where(columns < limits[:, None], torch.zeros_like(survival))


def admission_gains(survival: torch.Tensor, layout: str) -> torch.Tensor:
    """
    Expected tokens that each unit adds, in the order of admission: `(N,)`, not increasing.

    Args:
        survival (`torch.Tensor` of shape `(R, γ)`): a.
        layout (`str`): `"packed"` or `"padded"`.
    """
    if layout == PADDED:
        return survival.sum(dim=0)
    return _ranked(survival).values


def step_tokens(num_rows: int, block_size: int, layout: str) -> torch.Tensor:
    """Tokens of our own in a step that admits 0…N units: int64, `(N + 1,)`."""
    if layout == PADDED:
        return num_rows * torch.arange(1, block_size + 2, device="cpu")
    return num_rows + torch.arange(num_rows * block_size + 1, device="cpu")


def throughput(
    gains: torch.Tensor, steps_per_second: torch.Tensor, base: float | torch.Tensor
) -> torch.Tensor:
    """
    `Θ = τ · SPS(B)` after admitting 0…N units (Algorithm 1).

    Args:
        gains (`torch.Tensor` of shape `(N,)`): expected tokens that each unit adds.
        steps_per_second (`torch.Tensor` of shape `(N + 1,)`):
            SPS of the step with that many units, other work's tokens included.
        base (`float`): tokens that come without any draft: active rows plus load.

    Returns:
        `torch.Tensor` of shape `(N + 1,)`: tokens per second.
    """
    zero = gains.new_zeros(1)
    return (base + torch.cat((zero, gains.cumsum(dim=0)))) * steps_per_second


def early_stop(theta: torch.Tensor) -> torch.Tensor:
    """
    Units to admit by Algorithm 1: up to the first that does not raise Θ. Lossless in the round it
    decides.

    Args:
        theta (`torch.Tensor` of shape `(N + 1,)`): from `throughput`.

    Returns:
        `torch.Tensor` of shape `()`, int64.
    """
    return (theta[1:] > theta[:-1]).long().cumprod(dim=0).sum()


def best_count(theta: torch.Tensor) -> torch.Tensor:
    """
    Units at the maximum of Θ, the fewest among equals: the search without early stop. It must not
    decide the round that its confidences come from.

    Args:
        theta (`torch.Tensor` of shape `(N + 1,)`): from `throughput`.

    Returns:
        `torch.Tensor` of shape `()`, int64.
    """
    return theta.argmax()


def admit(survival: torch.Tensor, count: int | torch.Tensor, layout: str) -> torch.Tensor:
    """
    Verify lengths of the rows when the first `count` units are admitted.

    Equal survivals go by position, then by row, so that rows share fairly and repeatably.

    Args:
        survival (`torch.Tensor` of shape `(R, γ)`): a; tokens with 0 are not submitted.
        count (`int` or `torch.Tensor` of shape `()`): units.
        layout (`str`): `"packed"` or `"padded"`.

    Returns:
        `torch.Tensor` of shape `(R,)`, int64.
    """
    if layout == PADDED:
        columns = torch.arange(survival.shape[1], device=survival.device)
        return ((survival > 0) & (columns < count)).sum(dim=1)
    ranked = _ranked(survival)
    units = torch.arange(survival.numel(), device=survival.device)
    admitted = (ranked.values > 0) & (units < count)
    num_rows = survival.shape[0]
    lengths = torch.zeros(num_rows, dtype=torch.long, device=survival.device)
    return lengths.scatter_add_(0, ranked.indices % max(num_rows, 1), admitted.long())


def most_units(max_tokens: int, num_rows: int, layout: str) -> int:
    """How many units fit into a step of at most `max_tokens` tokens of our own."""
    if layout == PADDED:
        return max(max_tokens // max(num_rows, 1) - 1, 0)
    return max(max_tokens - num_rows, 0)


def _ranked(survival: torch.Tensor) -> "torch.return_types.sort":
    """All tokens, best first. Transposed and stable: equals go by position, then by row."""
    return survival.t().reshape(-1).sort(descending=True, stable=True)

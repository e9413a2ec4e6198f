"""
Which block length and which rule pay on this machine, by replaying recorded rounds.

A recorded round knows what the drafter was confident of and how much was accepted when everything
was verified. Verifying only ℓ of its tokens would have accepted min(accepted, ℓ), so every rule can
be judged on the same rounds, at any load, without running a model; the profile says what each would
have cost.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch

from .acceptance import AcceptanceRecords
from .policy import VerificationPolicy
from .prefix_scheduler import PADDED, calibrated_logits
from .settings import EARLY_STOP, FULL, LAGGED, SCHEDULED, THRESHOLD, SchedulingSettings
from .throughput_profile import ThroughputProfile

_THRESHOLDS = tuple(i / 20 for i in range(1, 20))
# A rule that decides anew in each round must beat the best fixed length by this much to be named.
_WORTH_MENTIONING = 1.01


@dataclass(frozen=True)
class PolicyOutcome:
    """
    What a rule would have done with the recorded rounds.

    Attributes:
        settings ([`SchedulingSettings`]): the rule.
        num_draft_tokens (`int`): most tokens verified, `num_assistant_tokens`.
        accepted_length (`float`): τ, bonus token included.
        mean_verified (`float`): tokens verified per row and round.
        acceptance_rate (`float`): accepted share of the verified tokens; NaN if none was.
        speedup (`float`):
            Tokens per second of everything in the step, other work included, over plain decoding.
    """

    settings: SchedulingSettings
    num_draft_tokens: int
    accepted_length: float
    mean_verified: float
    acceptance_rate: float
    speedup: float

    @property
    def options(self) -> dict:
        """Keywords of `generate` that select it; the profile is left to the caller."""
        options: dict = {"num_assistant_tokens": self.num_draft_tokens}
        settings = self.settings
        if settings.verification != FULL:
            options["dspark_verification"] = settings.verification
        if settings.verification == THRESHOLD:
            options["dspark_confidence_threshold"] = settings.confidence_threshold
        if settings.verification == SCHEDULED:
            options["dspark_scheduler"] = settings.scheduler
            if settings.load:
                options["dspark_load"] = settings.load
        return options


def replay(
    records: AcceptanceRecords,
    profile: ThroughputProfile,
    settings: SchedulingSettings,
    *,
    num_draft_tokens: int | None = None,
    rows: int = 1,
    load: int = 0,
    layout: str = PADDED,
) -> PolicyOutcome:
    """
    Apply a rule to recorded rounds.

    Args:
        records ([`AcceptanceRecords`]):
            N rounds, taken `rows` at a time as the rows of a step. If they were recorded of a batch
            of another size, the step two before is of other texts, and `"lagged"` looks no better
            than it is.
        profile ([`ThroughputProfile`]): with `draft_seconds`.
        settings ([`SchedulingSettings`]): the rule; its temperatures and offsets are applied.
        num_draft_tokens (`int`, *optional*): most tokens verified; γ by default.
        rows (`int`, *optional*, defaults to 1): R.
        load (`int`, *optional*, defaults to 0): tokens of other work in each step.
        layout (`str`, *optional*, defaults to `"padded"`): or `"packed"`.

    Raises:
        `ValueError`: fewer rounds than rows.
    """
    num_steps = len(records) // rows
    if num_steps == 0:
        raise ValueError(
            f"{len(records)} recorded rounds do not fill one step of {rows} rows; record more."
        )
    block_size = records.block_size
    logits = calibrated_logits(
        records.confidence_logits.double(),
        *(
            None if values is None else torch.tensor(values, dtype=torch.float64)
            for values in (settings.temperatures, settings.offsets)
        ),
    )
    logits = logits[: num_steps * rows].reshape(num_steps, rows, block_size)
    most = block_size if num_draft_tokens is None else num_draft_tokens
    limits = records.num_verified.clamp(max=most)[: num_steps * rows]
    limits = limits.reshape(num_steps, rows)
    policy = VerificationPolicy(settings, block_size, profile, layout)
    if settings.verification != SCHEDULED and settings.max_verify_tokens is None:
        # Rows do not compete, so all steps are decided at once.
        lengths = policy.verify_lengths(logits.flatten(0, 1), limits.flatten())
        lengths = lengths.reshape(num_steps, rows)
    else:
        steps = zip(logits, limits, strict=True)
        lengths = torch.stack([policy.verify_lengths(*step, load) for step in steps])
    accepted = records.num_accepted[: num_steps * rows].reshape(num_steps, rows).minimum(lengths)
    widest = lengths.amax(dim=1)
    held = rows * (1 + widest) if layout == PADDED else rows + lengths.sum(dim=1)
    seconds = float((1 / profile.rounds_per_second((held + load).numpy())).sum())
    progress = float(accepted.sum()) + num_steps * (rows + load)
    plain = (rows + load) / float(profile.step_seconds(rows + load))
    verified = int(lengths.sum())
    return PolicyOutcome(
        settings=replace(settings, load=load),
        num_draft_tokens=most,
        accepted_length=1 + float(accepted.double().mean()),
        mean_verified=float(lengths.double().mean()),
        acceptance_rate=float(accepted.sum()) / verified if verified else float("nan"),
        speedup=progress / seconds / plain,
    )


def compare_policies(
    records: AcceptanceRecords,
    profile: ThroughputProfile,
    temperatures: tuple[float, ...] | None = None,
    offsets: tuple[float, ...] | None = None,
    **conditions: int | str,
) -> list[PolicyOutcome]:
    """
    Everything verified, the best fixed length, the best threshold, and both schedulers, in this
    order. `conditions` are `rows`, `load` and `layout` of `replay`.
    """

    def outcome(num_draft_tokens: int | None = None, **fields: Any) -> PolicyOutcome:
        settings = SchedulingSettings(temperatures=temperatures, offsets=offsets, **fields)
        return replay(
            records,
            profile,
            settings,
            num_draft_tokens=num_draft_tokens,
            **conditions,  # type: ignore[arg-type]
        )

    def best(outcomes: list[PolicyOutcome]) -> PolicyOutcome:
        return max(outcomes, key=lambda one: one.speedup)

    return [
        outcome(),
        best([outcome(length) for length in range(1, records.block_size + 1)]),
        best([outcome(verification=THRESHOLD, confidence_threshold=cut) for cut in _THRESHOLDS]),
        outcome(verification=SCHEDULED, scheduler=EARLY_STOP),
        outcome(verification=SCHEDULED, scheduler=LAGGED),
    ]


def recommend(outcomes: list[PolicyOutcome]) -> PolicyOutcome | None:
    """
    The rule to use, or `None` if plain decoding is as fast as the best of them.

    A fixed length is preferred to a rule that is not clearly quicker: it depends on no calibration.
    """
    fixed = [one for one in outcomes if one.settings.verification == FULL]
    choice = max(fixed, key=lambda one: one.speedup)
    others = [one for one in outcomes if one.settings.verification != FULL]
    adaptive = max(others, key=lambda one: one.speedup)
    if adaptive.speedup > choice.speedup * _WORTH_MENTIONING:
        choice = adaptive
    return choice if choice.speedup > 1 else None

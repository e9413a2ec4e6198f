"""How many draft tokens of each row go to the target: one object a call, asked once a round."""

from collections import deque

import torch

from ..generation.verification import threshold_lengths
from .prefix_scheduler import (
    PADDED,
    admission_gains,
    admit,
    best_count,
    early_stop,
    keep_prefix,
    most_units,
    step_tokens,
    survival_probabilities,
    throughput,
)
from .settings import FULL, LAGGED, SCHEDULED, THRESHOLD, SchedulingSettings
from .throughput_profile import ThroughputProfile

# Rounds between the confidences that set a capacity and the round it is used in (section 5.2).
_LAG = 2


class VerificationPolicy:
    """
    Decides verify lengths (paper section 5). R rows, γ draft tokens.

    Why each rule is lossless is argued in `prefix_scheduler`; `"threshold"` cuts at the first token
    whose own confidence is too low, which depends on tokens before it only.

    Args:
        settings ([`SchedulingSettings`]): which rule, and its ceiling.
        block_size (`int`): γ.
        profile ([`ThroughputProfile`], *optional*): needed by `"scheduled"`.
        layout (`str`, *optional*, defaults to `"padded"`):
            how the target step holds rows of different lengths: `"padded"` to the widest, or
            `"packed"`.
    """

    def __init__(
        self,
        settings: SchedulingSettings,
        block_size: int,
        profile: ThroughputProfile | None = None,
        layout: str = PADDED,
    ):
        if settings.verification == SCHEDULED and profile is None:
            raise ValueError("dspark_verification='scheduled' needs a throughput profile.")
        self.settings = settings
        self.block_size = block_size
        self.layout = layout
        self._profile = profile
        self._history: deque[torch.Tensor] = deque(maxlen=_LAG)
        self._curves: dict[tuple[int, int], torch.Tensor] = {}

    def verify_lengths(
        self,
        confidence_logits: torch.Tensor | None,
        limits: torch.Tensor,
        load: int = 0,
        num_held: int | None = None,
    ) -> torch.Tensor:
        """
        Verify lengths of this round.

        Args:
            confidence_logits (`torch.Tensor` of shape `(R, γ)`, *optional*):
                Calibrated; `None` without a confidence head. `"threshold"` and `"scheduled"` need
                them.
            limits (`torch.Tensor` of shape `(R,)`):
                Most tokens of each row that can be of use. May depend on the drafted tokens as long
                as whether token k counts depends on tokens before it only.
            load (`int`, *optional*, defaults to 0): tokens of other work in the step.
            num_held (`int`, *optional*, defaults to R):
                Rows that a padded step holds, those included that have finished and cannot leave.

        Returns:
            `torch.Tensor` of shape `(R,)`, int64, on the device of `limits`.
        """
        settings = self.settings
        verification, ceiling = settings.verification, settings.max_verify_tokens
        if confidence_logits is None and verification != FULL:
            raise ValueError(f"dspark_verification={verification!r} needs confidence logits.")
        if verification == THRESHOLD:
            kept = threshold_lengths(confidence_logits, settings.confidence_threshold)
            limits = limits.minimum(kept)
        if verification != SCHEDULED and ceiling is None:
            return limits
        held = len(limits) if num_held is None else num_held
        survival = self._survival(confidence_logits, limits)
        count = torch.tensor(survival.numel(), device=survival.device)
        if self._profile is not None and verification == SCHEDULED:
            count = self._scheduled(self._profile, survival, load, held)
        if ceiling is not None:
            count = count.clamp(max=most_units(ceiling, held, self.layout))
        return admit(survival, count, self.layout)

    def select(self, rows: list[int]) -> None:
        """Go on with these of the rows; the others are finished and cost nothing any more."""
        self._history = deque((survival[rows] for survival in self._history), maxlen=_LAG)

    def _survival(
        self, confidence_logits: torch.Tensor | None, limits: torch.Tensor
    ) -> torch.Tensor:
        if confidence_logits is None:
            survival = torch.ones(
                limits.shape[0], self.block_size, dtype=torch.float64, device=limits.device
            )
        else:
            survival = survival_probabilities(confidence_logits)
        if self.settings.verification != SCHEDULED:
            # Here survival only ranks: tokens without hope are verified too while there is room.
            survival = survival.clamp(min=torch.finfo(survival.dtype).tiny)
        return keep_prefix(survival, limits)

    def _scheduled(
        self, profile: ThroughputProfile, survival: torch.Tensor, load: int, num_held: int
    ) -> torch.Tensor:
        """Units to admit. `"lagged"` searches the confidences of two rounds ago."""
        search, searched = early_stop, survival
        if self.settings.scheduler == LAGGED:
            # The first rounds have no predecessor and use the rule that needs none.
            if len(self._history) == _LAG:
                search, searched = best_count, self._history[0]
            self._history.append(survival)
        gains = admission_gains(searched, self.layout)
        curve = self._curve(profile, num_held, load).to(gains.device)
        return search(throughput(gains, curve, len(survival) + float(load)))

    def _curve(self, profile: ThroughputProfile, num_rows: int, load: int) -> torch.Tensor:
        """SPS of steps with 0…N units."""
        if (num_rows, load) not in self._curves:
            own = step_tokens(num_rows, self.block_size, self.layout)
            rates = profile.rounds_per_second(own.double().numpy() + float(load))
            self._curves[num_rows, load] = torch.from_numpy(rates)
        return self._curves[num_rows, load]

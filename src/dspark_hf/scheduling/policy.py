"""How many draft tokens of each row go to the target: one object a call, asked once a round."""

from collections import deque

import torch

from ..generation.verification import threshold_lengths
from .prefix_scheduler import (
    PACKED,
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
from .settings import FULL, LAGGED, SCHEDULED, THRESHOLD, SchedulingSettings, check_choice
from .throughput_profile import ThroughputProfile

# Rounds between the confidences that set a capacity and the round it is used in (section 5.2).
_LAG = 2


class VerificationPolicy:
    """
    Decides verify lengths (paper section 5). R rows, γ draft tokens.

    Why each rule is lossless is argued in `prefix_scheduler`; `"threshold"` cuts at the first token
    whose own confidence is too low, which depends on tokens before it only.

    Args:
        settings ([`SchedulingSettings`]):
            Of its fields, the rule, the threshold, the scheduler and the ceiling count. The others
            are the caller's: temperatures and offsets belong into the logits, `profile` and `load`
            are given apart.
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
        check_choice("layout", layout, (PACKED, PADDED))
        if settings.verification == SCHEDULED and profile is None:
            raise ValueError("dspark_verification='scheduled' needs a throughput profile.")
        self.settings = settings
        self.block_size = block_size
        self.layout = layout
        self._profile = profile
        self._history: deque[torch.Tensor] = deque(maxlen=_LAG)
        # Of the step last asked about: rows and load change less often than rounds pass.
        self._curve_key: tuple[int, int] | None = None
        self._rates = torch.empty(0)

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

        Raises:
            `ValueError`: no confidence logits, or of another shape, or a negative load.
        """
        settings = self.settings
        verification, ceiling = settings.verification, settings.max_verify_tokens
        if confidence_logits is None and verification != FULL:
            raise ValueError(f"dspark_verification={verification!r} needs confidence logits.")
        if not load >= 0:
            raise ValueError(f"load is {load!r}; it is a number of tokens, at least 0.")
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
            most = most_units(ceiling, held, self.layout)
            count = count.clamp(max=min(most, survival.numel()))
        return admit(survival, count, self.layout)

    def select(self, rows: list[int]) -> None:
        """
        Go on with these of the rows; the others are finished and cost nothing any more. Only
        `"lagged"` remembers rows: without this call, its next two capacities still count them.
        """
        self._history = deque((survival[rows] for survival in self._history), maxlen=_LAG)

    def _survival(
        self, confidence_logits: torch.Tensor | None, limits: torch.Tensor
    ) -> torch.Tensor:
        expected = (limits.shape[0], self.block_size)
        if confidence_logits is None:
            survival = torch.ones(expected, dtype=torch.float64, device=limits.device)
        elif confidence_logits.shape != expected:
            raise ValueError(
                f"confidence_logits are {tuple(confidence_logits.shape)}; expected {expected}: a "
                "row for each of limits, and γ columns."
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
        # A round of other rows has a step of its own size; its capacity is as good as any.
        held = num_held if len(searched) == len(survival) else len(searched)
        gains = admission_gains(searched, self.layout)
        curve = self._curve(profile, held, load, gains.device)
        return search(throughput(gains, curve, len(searched) + float(load)))

    def _curve(
        self, profile: ThroughputProfile, num_rows: int, load: int, device: torch.device
    ) -> torch.Tensor:
        """SPS of steps with 0…N units."""
        if self._curve_key != (num_rows, load):
            own = step_tokens(num_rows, self.block_size, self.layout)
            rates = profile.rounds_per_second(own.double().numpy() + float(load))
            self._curve_key, self._rates = (num_rows, load), torch.from_numpy(rates).to(device)
        return self._rates

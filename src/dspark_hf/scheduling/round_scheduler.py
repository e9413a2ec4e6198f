"""What a decoding loop asks in each round: whether to draft, and how much of it to verify."""

import logging
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from .load import CONCURRENT, process_load
from .policy import VerificationPolicy
from .prefix_scheduler import PADDED, calibrated_logits, most_units
from .profiling import automatic_profile, profile_facts
from .settings import AUTO, FULL, SCHEDULED, SchedulingSettings
from .skipping import DraftSkipper
from .throughput_profile import ThroughputProfile

if TYPE_CHECKING:
    from ..modeling_drafter import DrafterModel

logger = logging.getLogger(__name__)


class RoundScheduler:
    """
    One `generate` call's scheduling. A context manager: it takes part in the process's load while
    it is open, if asked to.

    Args:
        settings ([`SchedulingSettings`]): the fields of the call.
        target (`PreTrainedModel`): the model that verifies.
        drafter ([`DrafterModel`]): the model that drafts.
        num_rows (`int`): R at the start of the call.
        layout (`str`, *optional*, defaults to `"padded"`):
            how the target step holds rows of different lengths.

    Raises:
        `ValueError`: a profile of something else, or a ceiling that cannot be kept.
    """

    def __init__(
        self,
        settings: SchedulingSettings,
        target: PreTrainedModel,
        drafter: "DrafterModel",
        num_rows: int,
        layout: str = PADDED,
    ):
        ceiling = settings.max_verify_tokens
        if ceiling is not None and ceiling < num_rows:
            raise ValueError(
                f"dspark_max_verify_tokens={ceiling} cannot be kept with {num_rows} rows: each of "
                f"them verifies at least one token. Use at least {num_rows}, or fewer rows."
            )
        settings, profile = _effective(settings, target, drafter)
        self._policy = VerificationPolicy(settings, drafter.config.block_size, profile, layout)
        # On the device of the confidences, so that no round waits for a copy.
        self._temperatures, self._offsets = (
            None if values is None else torch.tensor(values, device=drafter.device)
            for values in (settings.temperatures, settings.offsets)
        )
        self._skipper = DraftSkipper(profile) if profile and settings.skips_drafts else None
        self._load = settings.load
        self._num_rows = num_rows
        self._layout = layout
        self._ceiling = ceiling
        self._submitted: int | None = None
        self._num_held = num_rows
        self._stack = ExitStack()
        self._key: object = None

    def __enter__(self) -> "RoundScheduler":
        if self._load == CONCURRENT:
            self._key = self._stack.enter_context(process_load.call(self._num_rows))
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    def read_prompts(self, num_tokens: int) -> None:
        """Tell how many tokens of prompts, padding included, the call is about to read."""
        if self._key:
            process_load.submit(self._key, num_tokens)

    @property
    def load(self) -> int:
        """Tokens of other work in the coming step."""
        return self._load if isinstance(self._load, int) else process_load.of_others(self._key)

    def should_draft(self) -> bool:
        """Whether to draft in the coming round. To be asked once a round."""
        return self._skipper is None or self._skipper.should_draft()

    def calibrated(self, confidence_logits: torch.Tensor) -> torch.Tensor:
        """Confidence logits `(R, γ)` with the call's temperatures and offsets."""
        return calibrated_logits(confidence_logits, self._temperatures, self._offsets)

    def begin(self, num_held: int) -> int | None:
        """
        A round begins. To be called once a round, before anything else.

        Args:
            num_held (`int`): rows that the target step will hold, finished ones included.

        Returns:
            Most draft tokens that one row may submit under the ceiling; `None` is any number.
        """
        self._num_held = num_held
        if self._ceiling is None or self._layout != PADDED:
            return None
        return most_units(self._ceiling, num_held, PADDED)

    def verify_lengths(
        self,
        confidence_logits: torch.Tensor | None,
        limits: torch.Tensor,
    ) -> torch.Tensor:
        """
        How many draft tokens each row submits; see [`VerificationPolicy.verify_lengths`], with the
        load of the moment.
        """
        return self._policy.verify_lengths(confidence_logits, limits, self.load, self._num_held)

    def select(self, rows: list[int]) -> None:
        """Go on with these of the rows; the others are finished."""
        self._policy.select(rows)

    def submit(self, num_columns: int, drafted: bool) -> None:
        """
        Tell what goes into the target step.

        Args:
            num_columns (`int`): tokens of the widest row, its last committed one included.
            drafted (`bool`): whether the round drafted.
        """
        num_tokens = self._num_held * num_columns
        self._submitted = num_tokens if drafted else None
        if self._key:
            process_load.submit(self._key, num_tokens)

    def record(self, num_committed: int, num_rows: int) -> None:
        """Tell how many tokens all rows together committed in the round last submitted."""
        if self._skipper is not None and self._submitted is not None:
            self._skipper.record(
                num_committed, num_rows, self._submitted, self.load, self._num_held
            )
        self._submitted = None


def _effective(
    settings: SchedulingSettings, target: PreTrainedModel, drafter: "DrafterModel"
) -> tuple[SchedulingSettings, ThroughputProfile | None]:
    """The settings without what this drafter or a missing profile makes impossible, said once."""
    if settings.verification != FULL and not _has_confidence_head(drafter):
        logger.warning(
            "dspark_verification=%r needs a confidence head, and this drafter has none; every "
            "drafted token is verified.",
            settings.verification,
        )
        settings = replace(settings, verification=FULL)
    if settings.verification != SCHEDULED and not settings.skips_drafts:
        return settings, None
    profile = _read_profile(settings.profile, target, drafter)
    if profile is None:
        # Without a cost, tokens would look free or priceless; nothing is trimmed.
        is_scheduled = settings.verification == SCHEDULED
        logger.warning(
            "%s needs dspark_throughput_profile, and none is set; %s. Set it to 'auto', or to a "
            "file that `dspark-hf profile` wrote.",
            "dspark_verification='scheduled'" if is_scheduled else "dspark_draft_skipping",
            "every drafted token is verified" if is_scheduled else "every round drafts",
        )
        verification = FULL if is_scheduled else settings.verification
        return replace(settings, verification=verification, skips_drafts=False), None
    if settings.skips_drafts and not profile.draft_seconds:
        raise ValueError(
            "dspark_draft_skipping needs the cost of a draft, and this throughput profile has no "
            "draft_seconds. Measure one with `dspark-hf profile --drafter …`, or set "
            "dspark_throughput_profile='auto'."
        )
    return settings, profile


def _has_confidence_head(drafter: "DrafterModel") -> bool:
    return getattr(drafter, "confidence_head", None) is not None


def _read_profile(
    value: Any, target: PreTrainedModel, drafter: "DrafterModel"
) -> ThroughputProfile | None:
    if value is None:
        return None
    if value == AUTO:
        return automatic_profile(target, drafter)
    if isinstance(value, dict):
        profile = ThroughputProfile.from_dict(value)
    else:
        try:
            profile = ThroughputProfile.load(value)
        except OSError as error:
            raise ValueError(
                f"dspark_throughput_profile is {value!r}, which cannot be read ({error}). Give a "
                "file that `dspark-hf profile` wrote, or 'auto'."
            ) from error
    profile.check(profile_facts(target, drafter))
    return profile

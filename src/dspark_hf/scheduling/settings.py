"""The `dspark_*` fields that decide how much is verified, checked."""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .load import CONCURRENT

FULL, THRESHOLD, SCHEDULED = "full", "threshold", "scheduled"
VERIFICATION_POLICIES = (FULL, THRESHOLD, SCHEDULED)
EARLY_STOP, LAGGED = "early_stop", "lagged"
SCHEDULERS = (EARLY_STOP, LAGGED)
AUTO = "auto"
_LEAST_TEMPERATURE = 1e-6


@dataclass(frozen=True)
class SchedulingSettings:
    """
    Attributes:
        verification (`str`): `"full"`, `"threshold"` or `"scheduled"`.
        confidence_threshold (`float`):
            conditional confidence below which `"threshold"` cuts the block; 0 is off.
        scheduler (`str`): `"early_stop"` or `"lagged"`.
        profile (`str`, `os.PathLike` or `dict`, *optional*):
            Throughput profile: a path, the profile's own dict, or `"auto"`.
        load (`int` or `str`): tokens of other work in each step; `"concurrent"` counts them.
        max_verify_tokens (`int`, *optional*): ceiling on the tokens of a step.
        temperatures (`tuple[float, ...]`, *optional*): STS, one a position.
        offsets (`tuple[float, ...]`, *optional*): what is added to each calibrated logit.
        skips_drafts (`bool`): whether drafting pauses where it does not pay.

    Raises:
        `ValueError`:
            A field has a value it cannot have. Whether there are γ temperatures and offsets is
            checked where γ is known.
    """

    verification: str = FULL
    confidence_threshold: float = 0.0
    scheduler: str = EARLY_STOP
    profile: Any = None
    load: int | str = 0
    max_verify_tokens: int | None = None
    temperatures: tuple[float, ...] | None = None
    offsets: tuple[float, ...] | None = None
    skips_drafts: bool = False

    def __post_init__(self) -> None:
        check_choice("dspark_verification", self.verification, VERIFICATION_POLICIES)
        check_choice("dspark_scheduler", self.scheduler, SCHEDULERS)
        _check_threshold(self.confidence_threshold)
        _check_profile(self.profile)
        _check_load(self.load)
        _check_max_verify_tokens(self.max_verify_tokens)


def resolve_scheduling(
    lookup: Callable[[str], Any], is_set_by_call: Callable[[str], bool], block_size: int
) -> SchedulingSettings:
    """
    Check the fields and give them their meaning.

    Args:
        lookup (callable): value of a field, or `None` if nobody set it.
        is_set_by_call (callable):
            whether a field's value comes from the call or the target, and not from the drafter.
        block_size (`int`): γ.

    Raises:
        `ValueError`: a field has a value it cannot have.
    """
    threshold = lookup("dspark_confidence_threshold")
    threshold = 0.0 if threshold is None else threshold
    _check_threshold(threshold)
    verification = lookup("dspark_verification")
    if (
        threshold > 0
        and is_set_by_call("dspark_confidence_threshold")
        and not is_set_by_call("dspark_verification")
    ):
        # A threshold that outranks the drafter's policy selects its own.
        verification = None
    if verification is None:
        verification = THRESHOLD if threshold > 0 else FULL
    scheduler, load = lookup("dspark_scheduler"), lookup("dspark_load")
    offsets = lookup("dspark_confidence_offsets")
    if is_set_by_call("dspark_sts_temperatures") and not is_set_by_call(
        "dspark_confidence_offsets"
    ):
        # The drafter's offsets were fitted together with the drafter's temperatures.
        offsets = None
    return SchedulingSettings(
        verification=verification,
        confidence_threshold=float(threshold),
        scheduler=EARLY_STOP if scheduler is None else scheduler,
        profile=lookup("dspark_throughput_profile"),
        load=0 if load is None else load,
        max_verify_tokens=lookup("dspark_max_verify_tokens"),
        temperatures=check_temperatures(lookup("dspark_sts_temperatures"), block_size),
        offsets=check_offsets(offsets, block_size),
        skips_drafts=_flag("dspark_draft_skipping", lookup("dspark_draft_skipping")),
    )


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Raise `ValueError` unless a field has one of the values it can have."""
    if value not in choices:
        *most, last = map(repr, choices)
        raise ValueError(f"{name} is {value!r}; it can be {', '.join(most)} or {last}.")


def _check_threshold(value: Any) -> None:
    if not _is_number(value) or not 0 <= value <= 1:
        raise ValueError(
            "dspark_confidence_threshold must be a probability between 0 and 1 (0 or None is "
            f"off), found {value!r}."
        )


def _check_profile(value: Any) -> None:
    if value is not None and not isinstance(value, str | os.PathLike | dict):
        raise ValueError(
            "dspark_throughput_profile must be a path, a dict (ThroughputProfile.as_dict()) or "
            f"'auto', found {type(value).__name__}."
        )


def _check_load(value: Any) -> None:
    is_count = type(value) is int and 0 <= value <= sys.maxsize
    if not is_count and not (isinstance(value, str) and value == CONCURRENT):
        raise ValueError(
            "dspark_load must be a number of tokens, an integer of at least 0 (and below 2**63), "
            f"or {CONCURRENT!r}, found {value!r}."
        )


def _check_max_verify_tokens(value: Any) -> None:
    if value is not None and (type(value) is not int or value < 1):
        raise ValueError(
            "dspark_max_verify_tokens must be an integer of at least 1 (each row verifies its last "
            f"committed token), or None, found {value!r}."
        )


def check_temperatures(value: Any, block_size: int) -> tuple[float, ...] | None:
    """
    γ temperatures as a tuple, or `None`. Raises `ValueError` for anything else, and for some that
    float32 would take for zero.
    """
    temperatures = _per_position("dspark_sts_temperatures", "temperatures", value, block_size)
    if temperatures is not None and min(temperatures) < _LEAST_TEMPERATURE:
        raise ValueError(
            f"dspark_sts_temperatures must be at least {_LEAST_TEMPERATURE}, found {list(value)!r}."
        )
    return temperatures


def check_offsets(value: Any, block_size: int) -> tuple[float, ...] | None:
    """γ finite offsets as a tuple, or `None`. Raises `ValueError` for anything else."""
    return _per_position("dspark_confidence_offsets", "offsets", value, block_size)


def _per_position(field: str, noun: str, value: Any, block_size: int) -> tuple[float, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list | tuple) or len(value) != block_size:
        found = f"{len(value)}" if isinstance(value, list | tuple) else repr(value)
        raise ValueError(
            f"{field} must be a list of {block_size} {noun}, one for each token that this drafter "
            f"drafts, found {found}. They belong to one drafter: fit them with "
            "`dspark-hf calibrate`."
        )
    # An integer may have more digits than a float can hold.
    if not all(_is_number(number) and abs(number) <= sys.float_info.max for number in value):
        raise ValueError(f"{field} must be finite numbers, found {list(value)!r}.")
    return tuple(float(number) for number in value)


def _flag(name: str, value: Any) -> bool:
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{name} must be True, False or None, found {value!r}.")
    return bool(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def everything_verified() -> dict[str, Any]:
    """Keywords of `generate` that overrule whatever would submit less than all drafted tokens."""
    return {
        "dspark_verification": FULL,
        "dspark_confidence_threshold": 0.0,
        "dspark_max_verify_tokens": None,
        "dspark_draft_skipping": False,
    }

"""
The `dspark_*` fields of a generation config: precedence and checks.

A field can be a keyword of `generate`, a field of a config passed to it, of the target's generation
config, or of the drafter's; the first of these that sets it wins. The class attributes on the
host's `GenerationConfig` are all `None`, "not set", which is what makes the host take the names as
keywords and changes nothing else.
"""

import logging
from dataclasses import dataclass
from typing import Any

from transformers import GenerationConfig

logger = logging.getLogger(__name__)

FULL, THRESHOLD = "full", "threshold"
VERIFICATION_POLICIES = (FULL, THRESHOLD)
SAMPLE, GREEDY = "sample", "greedy"
DRAFT_SAMPLING = (SAMPLE, GREEDY)


@dataclass(frozen=True)
class DraftSettings:
    """
    What one `generate` call does with its drafter.

    Attributes:
        num_draft_tokens (`int`): most draft tokens submitted per row and round, 0 to γ.
        verification (`str`): `"full"` or `"threshold"`.
        confidence_threshold (`float`):
            conditional confidence below which the block is cut; 0 is off.
        greedy_drafts (`bool`): whether drafts are argmax choices even when the target samples.
    """

    num_draft_tokens: int
    verification: str
    confidence_threshold: float
    greedy_drafts: bool


def resolve_settings(
    generation_config: GenerationConfig, drafter_config: GenerationConfig, block_size: int
) -> DraftSettings:
    """
    Merge the call's generation config with the drafter's.

    Args:
        generation_config (`GenerationConfig`):
            as the host prepared it (keyword > passed config > target's).
        drafter_config (`GenerationConfig`): the drafter's own defaults.
        block_size (`int`): γ.

    Raises:
        `ValueError`: a field has a value it cannot have.
    """
    threshold = _lookup("dspark_confidence_threshold", generation_config, drafter_config)
    threshold = 0.0 if threshold is None else threshold
    if (
        isinstance(threshold, bool)
        or not isinstance(threshold, int | float)
        or not 0 <= threshold <= 1
    ):
        raise ValueError(
            "dspark_confidence_threshold must be a probability between 0 and 1 (0 or None is "
            f"off), found {threshold!r}."
        )
    verification = _lookup("dspark_verification", generation_config, drafter_config)
    set_here = vars(generation_config)
    if "dspark_confidence_threshold" in set_here and "dspark_verification" not in set_here:
        # A threshold that outranks the drafter's policy selects its own.
        verification = None
    if verification is None:
        verification = THRESHOLD if threshold > 0 else FULL
    _check_choice("dspark_verification", verification, VERIFICATION_POLICIES)
    sampling = _lookup("dspark_draft_sampling", generation_config, drafter_config) or SAMPLE
    _check_choice("dspark_draft_sampling", sampling, DRAFT_SAMPLING)
    return DraftSettings(
        num_draft_tokens=_num_draft_tokens(generation_config, drafter_config, block_size),
        verification=verification,
        confidence_threshold=float(threshold),
        greedy_drafts=sampling == GREEDY,
    )


def _lookup(
    name: str, generation_config: GenerationConfig, drafter_config: GenerationConfig
) -> Any:
    # An instance attribute was set by somebody, be it to None; the class attribute means nobody
    # did.
    if name in vars(generation_config):
        return getattr(generation_config, name)
    return getattr(drafter_config, name, None)


def _num_draft_tokens(
    generation_config: GenerationConfig, drafter_config: GenerationConfig, block_size: int
) -> int:
    # The host fills in its own default when nobody sets the field, so that value counts as unset.
    host_default = GenerationConfig._get_default_generation_params()["num_assistant_tokens"]
    number = generation_config.num_assistant_tokens
    if number is None or (type(number) is int and number == host_default):
        number = drafter_config.num_assistant_tokens
    if number is None:
        return block_size
    if isinstance(number, bool) or not isinstance(number, int) or number < 0:
        raise ValueError(
            f"num_assistant_tokens must be an integer of at least 0, found {number!r}."
        )
    if number > block_size:
        logger.warning(
            "num_assistant_tokens is %d, but this drafter was trained to draft %d tokens; longer "
            "blocks lower the acceptance of every position, so %d are drafted.",
            number,
            block_size,
            block_size,
        )
    return min(number, block_size)


def _check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} is {value!r}; it can be {' or '.join(map(repr, choices))}.")

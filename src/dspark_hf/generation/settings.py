"""
The `dspark_*` fields of a generation config: precedence and checks.

A field can be a keyword of `generate`, a field of a config passed to it, of the target's generation
config, or of the drafter's; the first of these that sets it wins. The class attributes on the
host's `GenerationConfig` are all `None`, "not set", which is what makes the host take the names as
keywords and changes nothing else.
"""

import logging
from dataclasses import dataclass, field
from typing import Any

from transformers import GenerationConfig

from ..scheduling.settings import SchedulingSettings, check_choice, resolve_scheduling

logger = logging.getLogger(__name__)

SAMPLE, GREEDY = "sample", "greedy"
DRAFT_SAMPLING = (SAMPLE, GREEDY)


@dataclass(frozen=True)
class DraftSettings:
    """
    What one `generate` call does with its drafter.

    Attributes:
        num_draft_tokens (`int`): most draft tokens submitted per row and round, 0 to γ.
        greedy_drafts (`bool`): whether drafts are argmax choices even when the target samples.
        scheduling ([`SchedulingSettings`]): how many of them are verified.
    """

    num_draft_tokens: int
    greedy_drafts: bool = False
    scheduling: SchedulingSettings = field(default_factory=SchedulingSettings)


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

    def is_set_by_call(name: str) -> bool:
        # An instance attribute was set by somebody, be it to None; the class attribute means nobody
        # did.
        return name in vars(generation_config)

    def lookup(name: str) -> Any:
        source = generation_config if is_set_by_call(name) else drafter_config
        return getattr(source, name, None)

    sampling = lookup("dspark_draft_sampling")
    sampling = SAMPLE if sampling is None else sampling
    check_choice("dspark_draft_sampling", sampling, DRAFT_SAMPLING)
    return DraftSettings(
        num_draft_tokens=_num_draft_tokens(generation_config, drafter_config, block_size),
        greedy_drafts=sampling == GREEDY,
        scheduling=resolve_scheduling(lookup, is_set_by_call, block_size),
    )


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

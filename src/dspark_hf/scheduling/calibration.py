"""Calibrations as files, and the rounds they are fitted on; the method is `temperature_scaling`."""

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .._files import write_json
from ..generation.statistics import RoundRecord, collect_statistics
from .acceptance import AcceptanceRecords
from .settings import check_offsets, check_temperatures, everything_verified

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..modeling_drafter import DrafterModel


@dataclass(frozen=True)
class Calibration:
    """
    Temperatures of one drafter, and what they were fitted on.

    Args:
        temperatures (`tuple[float, ...]`): one a position.
        block_size (`int`): γ of the drafter.
        drafter (`str`): fingerprint of its confidence head, see `confidence_fingerprint`.
        num_rounds (`int`): rounds fitted on.
        ece_before, ece_after (`float`, *optional*): on held-out rounds.
        offsets (`tuple[float, ...]`, *optional*): one a position, where they were fitted.
        facts (`dict[str, Any]`, *optional*): target, prompts, sampling, for the record.

    Raises:
        `ValueError`: values that no fit gives.
    """

    temperatures: tuple[float, ...]
    block_size: int
    drafter: str
    num_rounds: int
    ece_before: float | None = None
    ece_after: float | None = None
    offsets: tuple[float, ...] | None = None
    facts: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        for name, least in (("block_size", 1), ("num_rounds", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ValueError(f"{name} must be an integer of at least {least}, found {value!r}.")
        if self.facts is not None and not isinstance(self.facts, dict):
            raise ValueError(f"facts must be an object or null, found {self.facts!r}.")
        # The same rules as for the fields.
        temperatures = check_temperatures(self.temperatures, self.block_size)
        if temperatures is None:
            raise ValueError("temperatures are null.")
        object.__setattr__(self, "temperatures", temperatures)
        object.__setattr__(self, "offsets", check_offsets(self.offsets, self.block_size))

    def apply_to(self, drafter: "DrafterModel") -> None:
        """
        Make temperatures and offsets the drafter's own default; `save_pretrained` keeps them.

        Raises:
            `ValueError`: fitted for another drafter or another γ.
        """
        if self.block_size != drafter.config.block_size:
            raise ValueError(
                f"This calibration is for a drafter of γ = {self.block_size}, and this one has "
                f"γ = {drafter.config.block_size}. Fit one with `dspark-hf calibrate`."
            )
        found = confidence_fingerprint(drafter)
        if self.drafter != found:
            raise ValueError(
                f"This calibration was fitted for a drafter with confidence head {self.drafter}, "
                f"and this one has {found}. Fit one with `dspark-hf calibrate`. (If this is the "
                "same drafter in float16: load it in float32 or bfloat16, which agree.)"
            )
        config = drafter.generation_config
        config.dspark_sts_temperatures = list(self.temperatures)
        config.dspark_confidence_offsets = None if self.offsets is None else list(self.offsets)

    def save(self, path: str | os.PathLike) -> None:
        """Write JSON, complete or not at all."""
        write_json(path, asdict(self))

    @classmethod
    def load(cls, path: str | os.PathLike) -> "Calibration":
        """
        Read what `save` wrote.

        Raises:
            `ValueError`: not a calibration; the file is named.
            `OSError`: the file cannot be read.
        """
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"))
            names = {spec.name for spec in fields(cls)}
            needed = {spec.name for spec in fields(cls) if spec.default is MISSING}
            if not isinstance(values, dict) or not needed <= set(values) <= names:
                raise ValueError(f"expected the entries {sorted(names)}.")
            return cls(**values)
        except ValueError as error:
            raise ValueError(
                f"{os.fspath(path)} is not a calibration file: {error} Write one with "
                "`dspark-hf calibrate`."
            ) from error


def confidence_fingerprint(drafter: "DrafterModel") -> str:
    """
    What tells drafters apart here: γ and the confidence head's weights in bfloat16, so that a
    float32 and a bfloat16 copy of a drafter are one. A float16 copy may be another: its weights
    have been rounded once already.

    Raises:
        `ValueError`: a drafter without a confidence head.
    """
    head = getattr(drafter, "confidence_head", None)
    if head is None:
        raise ValueError(
            "This drafter has no confidence head, so there is nothing to calibrate. Use a drafter "
            "that has one; `dspark-hf inspect` tells."
        )
    digest = hashlib.sha256(str(drafter.config.block_size).encode())
    for name, tensor in sorted(head.state_dict().items()):
        raw = tensor.detach().cpu().bfloat16().contiguous().view(torch.uint8)
        digest.update(name.encode() + raw.numpy().tobytes())
    return digest.hexdigest()[:16]


def collect_acceptance(
    target: "PreTrainedModel",
    drafter: "DrafterModel",
    prompts: list[dict[str, torch.Tensor]],
    on_prompts: Callable[[int], None] | None = None,
    **generate_options: Any,
) -> AcceptanceRecords:
    """
    Generate behind prompts with everything verified, and record every round.

    Args:
        target (`PreTrainedModel`): the model.
        drafter ([`DrafterModel`]): with a confidence head.
        prompts (`list[dict]`): inputs of `generate`, one call each; a call may hold many rows.
        on_prompts (callable, *optional*): called after every call with its number of rows.
        generate_options: for `generate`: `max_new_tokens`, `do_sample`, `temperature`, ….
    """
    confidence_fingerprint(drafter)
    rounds: list[RoundRecord] = []
    for inputs in prompts:
        with collect_statistics(on_round=rounds.append):
            target.generate(
                **inputs,
                **generate_options,
                assistant_model=drafter,
                num_assistant_tokens=drafter.config.block_size,
                dspark_sts_temperatures=None,
                dspark_confidence_offsets=None,
                **everything_verified(),
            )
        if on_prompts is not None:
            on_prompts(len(inputs["input_ids"]))
    return AcceptanceRecords.from_rounds(rounds)

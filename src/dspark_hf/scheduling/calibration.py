"""
Sequential temperature scaling (STS, paper section 4): confidences that mean what they say.

Position by position, one temperature divides the confidence logit so that the *cumulative* product
up to there, the survival that the scheduler uses, is as often right as it says. Temperatures do not
change the order of the confidences at a position, and cutting by them is as lossless as without:
they are constants.
"""

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..generation.statistics import RoundRecord, collect_statistics
from .acceptance import AcceptanceRecords
from .reliability import brier_score, expected_calibration_error, ranking_quality
from .settings import check_temperatures

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..modeling_drafter import DrafterModel

# 1/8 to 8 in steps of 4.4 %; the paper gives no grid. 1 is on it.
TEMPERATURE_GRID = torch.tensor([2.0 ** (i / 16) for i in range(-48, 49)], dtype=torch.float64)

# Fewest rounds of either outcome that say anything about a temperature.
_MIN_OUTCOMES = 20


def survival_predictions(
    confidence_logits: torch.Tensor, temperatures: torch.Tensor | None = None
) -> torch.Tensor:
    """
    Predicted survival of every prefix.

    Args:
        confidence_logits (`torch.Tensor` of shape `(N, γ)`): raw.
        temperatures (`torch.Tensor` of shape `(γ,)`, *optional*): all 1 by default.

    Returns:
        `torch.Tensor` of shape `(N, γ)`, float64.
    """
    logits = confidence_logits.double()
    if temperatures is not None:
        logits = logits / temperatures.double()
    return logits.sigmoid().cumprod(dim=1)


def fit_temperatures(records: AcceptanceRecords) -> torch.Tensor:
    """
    Temperatures by STS: for k = 1…γ in order, the one of the grid with the smallest expected
    calibration error of the cumulative product, earlier ones fixed. Equals go to the one closest to
    1; a position that fewer than 20 rounds survived, or fewer than 20 did not, keeps 1.

    Returns:
        `torch.Tensor` of shape `(γ,)`, float64.
    """
    temperatures = torch.ones(records.block_size, dtype=torch.float64)
    prefix = torch.ones(len(records), dtype=torch.float64)
    # Closest to 1 first: the minimum is taken at its first occurrence.
    grid = TEMPERATURE_GRID[TEMPERATURE_GRID.log().abs().argsort(stable=True)]
    for k in range(records.block_size):
        logits = records.confidence_logits[:, k].double()
        judged = records.judged(k)
        outcomes = records.survived(k)[judged]
        if min(int(outcomes.sum()), int((~outcomes).sum())) >= _MIN_OUTCOMES:
            predictions = prefix * (logits / grid[:, None]).sigmoid()
            errors = expected_calibration_error(predictions[:, judged], outcomes)
            temperatures[k] = grid[errors.argmin()]
        prefix = prefix * (logits / temperatures[k]).sigmoid()
    return temperatures


@dataclass(frozen=True)
class PositionReport:
    """
    How good the predicted survival of one position is.

    Attributes:
        position (`int`): 0-based.
        count (`int`): rounds that judged it.
        survival (`float`): share of them in which it was accepted, with everything before.
        ece, brier, auc (`float`):
            Expected calibration error (20 bins), mean squared error, area under the ROC curve; NaN
            where there is nothing to measure.
    """

    position: int
    count: int
    survival: float
    ece: float
    brier: float
    auc: float


def assess(
    records: AcceptanceRecords, temperatures: torch.Tensor | None = None
) -> list[PositionReport]:
    """Reports of all γ positions, with temperatures `(γ,)` or without."""
    predictions = survival_predictions(records.confidence_logits, temperatures)
    reports = []
    for k in range(records.block_size):
        judged = records.judged(k)
        predicted, survived = predictions[judged, k], records.survived(k)[judged]
        reports.append(
            PositionReport(
                position=k,
                count=int(judged.sum()),
                survival=float(survived.double().mean()),
                ece=float(expected_calibration_error(predicted, survived)),
                brier=brier_score(predicted, survived),
                auc=ranking_quality(predicted, survived),
            )
        )
    return reports


def mean_ece(reports: list[PositionReport]) -> float:
    """Expected calibration error over all positions, weighted by their counts."""
    total = sum(report.count for report in reports)
    weighted = sum(report.ece * report.count for report in reports if report.count)
    return weighted / total if total else float("nan")


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
        facts (`dict[str, Any]`, *optional*): target, prompts, sampling, for the record.
    """

    temperatures: tuple[float, ...]
    block_size: int
    drafter: str
    num_rounds: int
    ece_before: float | None = None
    ece_after: float | None = None
    facts: dict[str, Any] | None = None

    def apply_to(self, drafter: "DrafterModel") -> None:
        """
        Make the temperatures the drafter's own default; `save_pretrained` keeps them.

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
                f"and this one has {found}. Fit one with `dspark-hf calibrate`."
            )
        drafter.generation_config.dspark_sts_temperatures = list(self.temperatures)

    def save(self, path: str | os.PathLike) -> None:
        """Write JSON."""
        Path(path).write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

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
            if not isinstance(values, dict) or set(values) != names:
                raise ValueError(f"expected the entries {sorted(names)}.")
            # The same rules as for the field.
            temperatures = check_temperatures(values["temperatures"], values["block_size"])
        except ValueError as error:
            raise ValueError(
                f"{os.fspath(path)} is not a calibration file: {error} Write one with "
                "`dspark-hf calibrate`."
            ) from error
        return cls(**{**values, "temperatures": temperatures})


def confidence_fingerprint(drafter: "DrafterModel") -> str:
    """
    What tells drafters apart here: γ and the confidence head's weights, in bfloat16, so that the
    precision a drafter is loaded in does not matter.

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
    on_prompt: Callable[[], None] | None = None,
    **generate_options: Any,
) -> AcceptanceRecords:
    """
    Generate behind prompts with everything verified, and record every round.

    Args:
        target (`PreTrainedModel`): the model.
        drafter ([`DrafterModel`]): with a confidence head.
        prompts (`list[dict]`): inputs of `generate`, one sequence each.
        on_prompt (callable, *optional*): called after every prompt.
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
                dspark_verification="full",
                dspark_sts_temperatures=None,
                dspark_max_verify_tokens=None,
                dspark_draft_skipping=False,
            )
        if on_prompt is not None:
            on_prompt()
    return AcceptanceRecords.from_rounds(rounds)

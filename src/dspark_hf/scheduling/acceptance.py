"""Recorded rounds: what the confidence head said, and what was accepted."""

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ..generation.statistics import RoundRecord

_NAMES = ("confidence_logits", "num_accepted", "num_verified")


@dataclass(frozen=True)
class AcceptanceRecords:
    """
    N rounds of a drafter with γ draft tokens, verified whole.

    Args:
        confidence_logits (`torch.Tensor` of shape `(N, γ)`): raw, before any temperature.
        num_accepted (`torch.Tensor` of shape `(N,)`): accepted draft tokens.
        num_verified (`torch.Tensor` of shape `(N,)`):
            Tokens that were judged, fewer than γ only where the text ended.
        facts (`dict[str, Any]`, *optional*): where they come from.
    """

    confidence_logits: torch.Tensor
    num_accepted: torch.Tensor
    num_verified: torch.Tensor
    facts: dict[str, Any] | None = None

    @classmethod
    def from_rounds(
        cls, rounds: Iterable[RoundRecord], facts: dict[str, Any] | None = None
    ) -> "AcceptanceRecords":
        """
        From the records of `collect_statistics(on_round=…)`, generated without temperatures and
        with everything verified. Rounds that drafted nothing are left out.

        Raises:
            `ValueError`: no round drafted, or confidences that are no numbers.
        """
        drafted = [record for record in rounds if record.num_drafted and record.confidences]
        if not drafted:
            raise ValueError(
                "No recorded round drafted anything, so there is nothing to learn from. Generate "
                "more tokens behind every prompt (`--max-new-tokens`), or take other prompts."
            )
        confidences = torch.tensor([record.confidences for record in drafted], dtype=torch.float64)
        if bool(confidences.isnan().any()):
            raise ValueError(
                "The drafter's confidence head says NaN. Its weights or its dtype do not fit this "
                "target; try float32 or bfloat16."
            )
        return cls(
            confidences.logit().clamp(-100, 100).float(),
            torch.tensor([record.num_accepted for record in drafted], dtype=torch.long),
            torch.tensor([record.num_verified for record in drafted], dtype=torch.long),
            facts,
        )

    def __len__(self) -> int:
        return len(self.num_accepted)

    @property
    def block_size(self) -> int:
        """γ."""
        return self.confidence_logits.shape[1]

    def judged(self, position: int) -> torch.Tensor:
        """Rounds `(N,)` in which the target saw draft token `position` (0-based)."""
        return self.num_verified > position

    def survived(self, position: int) -> torch.Tensor:
        """Rounds `(N,)` in which draft tokens 0…`position` were all accepted."""
        return self.num_accepted > position

    def save(self, path: str | os.PathLike) -> None:
        """Write safetensors."""
        tensors = {name: getattr(self, name).contiguous() for name in _NAMES}
        save_file(tensors, path, metadata={"facts": json.dumps(self.facts or {})})

    @classmethod
    def load(cls, path: str | os.PathLike) -> "AcceptanceRecords":
        """
        Read what `save` wrote.

        Raises:
            `ValueError`: not such a file; what is wrong is named.
            `OSError`: the file cannot be read.
        """
        try:
            with safe_open(path, framework="pt") as file:
                found = set(file.keys())
                facts = (file.metadata() or {}).get("facts", "{}")
                tensors = {name: file.get_tensor(name) for name in _NAMES if name in found}
        except SafetensorError as error:
            raise ValueError(
                f"{os.fspath(path)} is not a safetensors file ({error}). Give the file that "
                "`dspark-hf calibrate --records` wrote."
            ) from error
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        rounds = shapes.get("confidence_logits", (0,))[0]
        if (
            found != set(_NAMES)
            or shapes["confidence_logits"][1:] == ()
            or any(shapes[name] != (rounds,) for name in _NAMES[1:])
        ):
            raise ValueError(
                f"{os.fspath(path)} holds {shapes or sorted(found)}; expected confidence_logits of "
                "shape (N, γ), num_accepted and num_verified of shape (N,), as "
                "`dspark-hf calibrate --records` writes them."
            )
        try:
            records = cls(**tensors, facts=json.loads(facts))
            records._check()
        except ValueError as error:
            raise ValueError(
                f"{os.fspath(path)} holds no recorded rounds: {error}. Record them with "
                "`dspark-hf calibrate --records`."
            ) from error
        return records

    def _check(self) -> None:
        logits, accepted, verified = (getattr(self, name) for name in _NAMES)
        if not logits.is_floating_point() or not logits.isfinite().all():
            raise ValueError("confidence_logits have to be finite floating-point numbers")
        for name, counts in (("num_accepted", accepted), ("num_verified", verified)):
            if counts.dtype != torch.long:
                raise ValueError(f"{name} is {counts.dtype}, expected torch.int64")
        facts = {} if self.facts is None else self.facts
        if not isinstance(facts, dict) or not isinstance(facts.get("pair", {}), dict):
            raise ValueError(f"its facts are {facts!r}")
        wrong = (accepted < 0) | (accepted > verified) | (verified > self.block_size)
        if wrong.any():
            row = int(wrong.long().argmax())
            raise ValueError(
                f"round {row + 1} accepts {int(accepted[row])} of {int(verified[row])} verified "
                f"tokens of {self.block_size}"
            )

"""`ThroughputProfile`: steps per second of a target as a function of the tokens in a step."""

import itertools
import json
import os
import sys
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from .._files import write_json

_REMEDY = "Measure one with `dspark-hf profile`, or set dspark_throughput_profile='auto'."
# What a profile depends on and is compared by; None is a profile that does not say.
_FACTS = ("target", "device", "dtype", "attention", "drafter")


@dataclass(frozen=True)
class ThroughputProfile:
    """
    SPS(B), measured for one target on one machine (paper section 5).

    Args:
        tokens (`tuple[int, ...]`):
            B, tokens in a target step; strictly increasing from 1.
        steps_per_second (`tuple[float, ...]`):
            target forwards per second at that many tokens, as measured.
        draft_seconds (`float`, *optional*, defaults to 0.0):
            Seconds that drafting adds to each round, whatever is verified. With it, Θ is the real
            rate of tokens; without it, a step looks cheaper than a round is and more is trimmed.
        context_length (`int`, *optional*): positions in the cache while measuring.
        rows (`int`, *optional*): B tokens were spread over `min(rows, B)` rows.
        target, device, dtype, attention (`str`, *optional*):
            What was measured and where; compared with the models of a call where given.
        drafter (`str`, *optional*): what `draft_seconds` was measured for, γ included.
        versions (`dict[str, str]`, *optional*): libraries, for the record.

    Raises:
        `ValueError`: a curve that is no curve, naming the entry.
    """

    tokens: tuple[int, ...]
    steps_per_second: tuple[float, ...]
    draft_seconds: float = 0.0
    context_length: int | None = None
    rows: int | None = None
    target: str | None = None
    device: str | None = None
    dtype: str | None = None
    attention: str | None = None
    drafter: str | None = None
    versions: dict[str, str] | None = None

    def __post_init__(self) -> None:
        for name in ("tokens", "steps_per_second"):
            values = getattr(self, name)
            if not isinstance(values, list | tuple):
                raise ValueError(f"{name} of a throughput profile must be a list, found {values!r}")
            object.__setattr__(self, name, tuple(values))
        self._validate()
        seconds = monotone([1 / rate for rate in self.steps_per_second])
        object.__setattr__(self, "_seconds", seconds)

    def step_seconds(self, tokens: Any) -> np.ndarray:
        """
        Seconds of a target step, by number of tokens (an integer or an array of them).

        Never falls with more tokens (measuring noise is averaged away), linear between measured
        points. Beyond the last one a step takes time in proportion to its tokens, as on a machine
        that is fully busy: no extrapolation may make tokens look free.
        """
        count = np.asarray(tokens, dtype=np.float64)
        seconds = np.interp(count, self.tokens, self._seconds)  # type: ignore[attr-defined]
        return seconds * np.maximum(count / self.tokens[-1], 1.0)

    def rounds_per_second(self, tokens: Any) -> np.ndarray:
        """Rounds per second at so many tokens in the target step, drafting included."""
        return 1 / (self.step_seconds(tokens) + self.draft_seconds)

    def check(self, facts: dict[str, str | None]) -> None:
        """
        Compare with the models and the machine of a call.

        Args:
            facts (`dict[str, str]`): `target`, `device`, `dtype`, `attention`, `drafter`.

        Raises:
            `ValueError`: measured for something else; both values are named.
        """
        for name in _FACTS:
            recorded, found = getattr(self, name), facts.get(name)
            if recorded is not None and found is not None and recorded != found:
                raise ValueError(
                    f"This throughput profile was measured for another {name}: {recorded}; this "
                    f"call has {found}. {_REMEDY}"
                )

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON and for `dspark_throughput_profile`; what is unknown is left out."""
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in asdict(self).items()
            if value is not None
        }

    def save(self, path: str | os.PathLike) -> None:
        """Write JSON, complete or not at all, also where several processes do so at once."""
        write_json(path, self.as_dict())

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "ThroughputProfile":
        """
        The inverse of `as_dict`; `tokens` and `steps_per_second` are enough.

        Raises:
            `ValueError`: missing or unknown entries, or no curve.
        """
        known = {spec.name for spec in fields(cls)}
        missing, unknown = {"tokens", "steps_per_second"} - set(values), set(values) - known
        if missing or unknown:
            wrong = f"lacks {sorted(missing)}" if missing else f"has {sorted(map(str, unknown))}"
            raise ValueError(
                f"A throughput profile {wrong}; its entries are {sorted(known)}. {_REMEDY}"
            )
        return cls(**values)

    @classmethod
    def load(cls, path: str | os.PathLike) -> "ThroughputProfile":
        """
        Read what `save` wrote.

        Raises:
            `ValueError`: not a profile; the file is named.
            `OSError`: the file cannot be read.
        """
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"))
            if not isinstance(values, dict):
                raise ValueError(f"expected a JSON object, found {type(values).__name__}.")
            return cls.from_dict(values)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{os.fspath(path)} is not a throughput profile: {error}") from error

    def _validate(self) -> None:
        tokens, rates = self.tokens, self.steps_per_second
        if not tokens or len(tokens) != len(rates):
            raise ValueError(
                "A throughput profile needs as many tokens as steps_per_second, at least one; "
                f"found {len(tokens)} and {len(rates)}. {_REMEDY}"
            )
        if any(type(count) is not int for count in tokens) or tokens[0] != 1:
            raise ValueError(
                "tokens of a throughput profile must be integers that start at 1, found "
                f"{list(tokens)[:8]}: without the cost of one token nothing can be compared. "
                f"{_REMEDY}"
            )
        if tokens[-1] > sys.maxsize:
            raise ValueError(
                f"tokens of a throughput profile must be at most {sys.maxsize}, found more. "
                f"{_REMEDY}"
            )
        for before, after in itertools.pairwise(tokens):
            if after <= before:
                raise ValueError(
                    f"tokens of a throughput profile must be strictly increasing, found {before} "
                    f"followed by {after}. {_REMEDY}"
                )
        for count, rate in zip(tokens, rates, strict=True):
            # The smallest whose inverse is a number, too.
            if not _is_number(rate) or rate < sys.float_info.min:
                raise ValueError(
                    "steps_per_second of a throughput profile must be positive numbers, found "
                    f"{rate!r} at {count} tokens. {_REMEDY}"
                )
        for name in ("context_length", "rows"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(
                    f"{name} of a throughput profile must be an integer of at least 1, found "
                    f"{value!r}. {_REMEDY}"
                )
        for name in _FACTS:
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise ValueError(
                    f"{name} of a throughput profile must be a text, found {value!r}. {_REMEDY}"
                )
        if not _is_number(self.draft_seconds) or self.draft_seconds < 0:
            raise ValueError(
                "draft_seconds of a throughput profile must be a number of at least 0, found "
                f"{self.draft_seconds!r}. {_REMEDY}"
            )


def monotone(values: list[float]) -> np.ndarray:
    """
    The closest non-decreasing sequence in the least-squares sense (pool adjacent violators).

    Noise makes a measured step with more tokens now and then quicker than one with fewer. Averaging
    such neighbours keeps the curve unbiased; a running maximum would push it up.
    """
    pools: list[tuple[float, int]] = []
    for value in values:
        mean, size = value, 1
        while pools and pools[-1][0] > mean:
            other, count = pools.pop()
            mean, size = (mean * size + other * count) / (size + count), size + count
        pools.append((mean, size))
    return np.repeat([mean for mean, _ in pools], [size for _, size in pools])


def _is_number(value: Any) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    # An integer may have more digits than a float can hold.
    return abs(value) <= sys.float_info.max

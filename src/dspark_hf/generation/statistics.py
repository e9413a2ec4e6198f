"""
What speculation did: counted per call, collected where asked for.

Definitions. A *round* is one target forward after the prefill; the token that the prefill yields
belongs to no round. τ (`accepted_length`) is committed tokens per round, bonus token included, as a
ratio of sums. A stop token inside an accepted run ends the round there: what was drafted behind it
counts neither as verified nor as accepted, and there is no bonus token. A row that lock-step keeps
from committing all that was accepted counts it as accepted all the same, so τ may be below the
accepted tokens per round. Position k is 0-based.
"""

import contextvars
import dataclasses
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

NUM_CONFIDENCE_BINS = 10


@dataclass(frozen=True)
class RoundRecord:
    """
    One row's share of one round, after stopping cut it.

    Attributes:
        tokens (`list[int]`): committed tokens.
        num_drafted (`int`): draft tokens proposed.
        num_verified (`int`): draft tokens sent to the target, up to a stop.
        num_accepted (`int`):
            draft tokens accepted; the committed ones, unless lock-step left some out.
        confidences (`list[float]`, *optional*): conditional confidence of each drafted token.
    """

    tokens: list[int]
    num_drafted: int
    num_verified: int
    num_accepted: int
    confidences: list[float] | None = None


@dataclass
class Statistics:
    """
    Counts of one or several `generate` calls.

    Attributes:
        calls, rounds, new_tokens, drafted, verified, accepted (`int`):
            `new_tokens` contains the first token of each call, which comes from the prefill.
        verified_at, accepted_at (`list[int]`): rounds that verified / accepted position k.
        reached_at (`list[int]`):
            Rounds that verified position k with every earlier position accepted.
        verify_lengths (`dict[int, int]`): rounds by number of tokens verified.
        draft_seconds, verify_seconds, other_seconds, total_seconds (`float`):
            Host time; on an accelerator the wait for results falls into `other_seconds`.
        confidence_bins (`list[list[float]]`):
            Reliability of the conditional confidence in equal-width bins: count, sum of
            confidences, accepted.
    """

    calls: int = 0
    rounds: int = 0
    new_tokens: int = 0
    drafted: int = 0
    verified: int = 0
    accepted: int = 0
    committed: int = 0
    verified_at: list[int] = field(default_factory=list)
    reached_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    verify_lengths: dict[int, int] = field(default_factory=dict)
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    total_seconds: float = 0.0
    confidence_bins: list[list[float]] = field(
        default_factory=lambda: [[0, 0.0, 0] for _ in range(NUM_CONFIDENCE_BINS)]
    )

    def __str__(self) -> str:
        """One line for people."""
        rates = ", ".join(f"{rate:.2f}" for rate in self.conditional_acceptance) or "none"
        return (
            f"τ {self.accepted_length:.2f}: {self.new_tokens} tokens of {self.calls} calls, "
            f"{self.rounds} rounds; {self.accepted} of {self.verified} verified draft tokens "
            f"accepted; acceptance by position, given all before: {rates}"
        )

    @property
    def accepted_length(self) -> float:
        """τ: committed tokens per round, bonus token included. NaN before the first round."""
        return self.committed / self.rounds if self.rounds else float("nan")

    @property
    def accepted_length_without_bonus(self) -> float:
        """Accepted draft tokens per round."""
        return self.accepted / self.rounds if self.rounds else float("nan")

    @property
    def verify_rate(self) -> float:
        """Committed tokens per position that the target scored: how little of its work is lost."""
        scored = self.verified + self.rounds
        return self.committed / scored if scored else float("nan")

    @property
    def other_seconds(self) -> float:
        """Time in neither draft nor verification: prefill, sampling, stopping, streaming."""
        return self.total_seconds - self.draft_seconds - self.verify_seconds

    @property
    def prefix_acceptance(self) -> list[float]:
        """Per position: share of the rounds that verified it in which it was accepted."""
        return [
            a / v if v else float("nan")
            for a, v in zip(self.accepted_at, self.verified_at, strict=True)
        ]

    @property
    def conditional_acceptance(self) -> list[float]:
        """Per position: the same among the rounds in which all earlier positions were accepted."""
        return [
            a / r if r else float("nan")
            for a, r in zip(self.accepted_at, self.reached_at, strict=True)
        ]

    def add_round(self, record: RoundRecord) -> None:
        """Count one row's round."""
        self.rounds += 1
        self.committed += len(record.tokens)
        self.drafted += record.num_drafted
        self.verified += record.num_verified
        self.accepted += record.num_accepted
        self.verify_lengths[record.num_verified] = (
            self.verify_lengths.get(record.num_verified, 0) + 1
        )
        self._widen(record.num_verified)
        for k in range(record.num_verified):
            self.verified_at[k] += 1
            self.reached_at[k] += record.num_accepted >= k
            self.accepted_at[k] += record.num_accepted > k
        if record.confidences is not None:
            self._add_confidences(record, record.confidences)

    def merge(self, other: "Statistics") -> None:
        """Add another call's counts to these."""
        self._widen(len(other.verified_at))
        for spec in dataclasses.fields(self):
            mine, theirs = getattr(self, spec.name), getattr(other, spec.name)
            if isinstance(mine, int | float):
                setattr(self, spec.name, mine + theirs)
            elif isinstance(mine, dict):
                for key, count in theirs.items():
                    mine[key] = mine.get(key, 0) + count
            elif spec.name == "confidence_bins":
                for bin_, added in zip(mine, theirs, strict=True):
                    bin_[:] = [a + b for a, b in zip(bin_, added, strict=True)]
            else:
                for k, count in enumerate(theirs):
                    mine[k] += count

    def as_dict(self) -> dict:
        """Counts and derived figures, ready for JSON."""
        return {
            **dataclasses.asdict(self),
            "accepted_length": self.accepted_length,
            "accepted_length_without_bonus": self.accepted_length_without_bonus,
            "verify_rate": self.verify_rate,
            "prefix_acceptance": self.prefix_acceptance,
            "conditional_acceptance": self.conditional_acceptance,
            "other_seconds": self.other_seconds,
        }

    def _widen(self, length: int) -> None:
        for counts in (self.verified_at, self.reached_at, self.accepted_at):
            counts.extend([0] * (length - len(counts)))

    def _add_confidences(self, record: RoundRecord, confidences: list[float]) -> None:
        # The confidence of position k speaks of rounds in which everything before it was accepted.
        reached = min(record.num_verified, record.num_accepted + 1)
        for k, confidence in enumerate(confidences[:reached]):
            if math.isnan(confidence):
                continue
            bin_ = self.confidence_bins[
                min(int(confidence * NUM_CONFIDENCE_BINS), NUM_CONFIDENCE_BINS - 1)
            ]
            bin_[0] += 1
            bin_[1] += confidence
            bin_[2] += record.num_accepted > k


@dataclass
class _Collector:
    statistics: Statistics
    on_round: Callable[[RoundRecord], None] | None


_COLLECTORS: contextvars.ContextVar[tuple[_Collector, ...]] = contextvars.ContextVar(
    "dspark_statistics_collectors", default=()
)


@contextmanager
def collect_statistics(
    on_round: Callable[[RoundRecord], None] | None = None,
) -> Iterator[Statistics]:
    """
    Collect the statistics of all `generate` calls that this thread (or async task) makes inside the
    block.

    Args:
        on_round (callable, *optional*):
            called with a [`RoundRecord`] after every round, while generating.

    Example:

    ```python
    with collect_statistics() as statistics:
        target.generate(**inputs, assistant_model=drafter)
    print(statistics)  # τ, tokens, rounds, acceptance by position
    ```
    """
    collector = _Collector(Statistics(), on_round)
    token = _COLLECTORS.set((*_COLLECTORS.get(), collector))
    try:
        yield collector.statistics
    finally:
        _COLLECTORS.reset(token)


class CallRecorder:
    """Counts one `generate` call and reports to every collector that is open around it."""

    def __init__(self) -> None:
        self.statistics = Statistics(calls=1)
        self._collectors = _COLLECTORS.get()

    def add_round(self, record: RoundRecord) -> None:
        """Count a round and tell whoever listens."""
        self.statistics.add_round(record)
        for collector in self._collectors:
            if collector.on_round is not None:
                collector.on_round(record)

    def finish(self) -> Statistics:
        """Report the finished call."""
        for collector in self._collectors:
            collector.statistics.merge(self.statistics)
        return self.statistics

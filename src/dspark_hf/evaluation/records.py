"""
What an evaluation writes while it runs: one JSON line per prompt, temperature and drafter.

Each line is complete by itself, so a run that was interrupted continues behind its last one, and
every figure of a report can be computed again from the lines.
"""

import dataclasses
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .._files import write_json
from ..generation.statistics import RoundRecord, Statistics

PLAIN = "plain"

RecordKey = tuple[str, float, str, int]


@dataclass(frozen=True)
class Record:
    """
    One `generate` call.

    Attributes:
        drafter (`str`): the drafter's `id`, or `"plain"` for decoding without one.
        temperature (`float`): 0 is greedy.
        set_name (`str`), index (`int`): which prompt.
        prompt_digest (`str`), prompt_tokens (`int`): its text, hashed, and its length P.
        tokens (`list[int]`): all new tokens; the first one comes from the prefill.
        seconds (`float`): the whole call, prefill included.
        draft_seconds, verify_seconds (`float`): of those, as [`Statistics`] counts them.
        rounds (`list[list[int]]`): committed, drafted, verified and accepted tokens of each round.
        confidences (`list[list[float]]`, *optional*):
            Conditional confidence of every verified token of each round; `None` without a head.
    """

    drafter: str
    temperature: float
    set_name: str
    index: int
    prompt_digest: str
    prompt_tokens: int
    tokens: list[int]
    seconds: float
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    rounds: list[list[int]] = field(default_factory=list)
    confidences: list[list[float]] | None = None

    @property
    def key(self) -> RecordKey:
        """What identifies this call among those of its run."""
        return (self.drafter, self.temperature, self.set_name, self.index)

    def round_records(self) -> list[RoundRecord]:
        """The rounds as they were reported."""
        records, start = [], 1
        for i, (committed, drafted, verified, accepted) in enumerate(self.rounds):
            confidences = None if self.confidences is None else self.confidences[i]
            run = self.tokens[start : start + committed]
            records.append(RoundRecord(run, drafted, verified, accepted, confidences))
            start += committed
        return records

    def statistics(self) -> Statistics:
        """The counts of this call."""
        statistics = Statistics(
            calls=1,
            new_tokens=len(self.tokens),
            draft_seconds=self.draft_seconds,
            verify_seconds=self.verify_seconds,
            total_seconds=self.seconds,
        )
        for record in self.round_records():
            statistics.add_round(record)
        return statistics


class RecordFolder:
    """
    The folder a run writes to, opened anew or continued.

    Args:
        folder (`Path`): created if needed.
        settings (`dict`): what every record in it depends on, ready for JSON.

    Raises:
        `ValueError`: it is a file, or holds other settings or a line that cannot be read.
    """

    def __init__(self, folder: Path, settings: dict[str, Any]):
        self.folder = folder
        self.records: dict[RecordKey, Record] = {}
        self._path = folder / "records.jsonl"
        if folder.is_file():
            raise ValueError(f"{folder} is a file; give a folder for the results.")
        folder.mkdir(parents=True, exist_ok=True)
        self._check_settings(folder / "settings.json", settings)
        if self._path.is_file():
            self._read()

    def append(self, record: Record) -> None:
        """
        Write a record, down to the disk.

        Raises:
            `OSError`: the disk is full; the records before it are whole.
        """
        try:
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(json.dumps(dataclasses.asdict(record)) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise OSError(
                f"Writing to {self._path} failed ({error}). The answers before it are kept: free "
                "some space and start again, it goes on behind them."
            ) from error
        self.records[record.key] = record

    def _check_settings(self, path: Path, settings: dict[str, Any]) -> None:
        if not path.is_file():
            if self._path.is_file():
                raise ValueError(
                    f"{self._path} is there and {path.name} is not, so nobody knows what its "
                    "results depend on. Use another output folder."
                )
            # Complete or not there: records beside a torn file would be lost.
            write_json(path, settings)
            return
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} is not JSON ({error}). Use another output folder.") from error
        # As they look after a round trip: tuples are lists there.
        settings = json.loads(json.dumps(settings))
        names = [name for name in {**found, **settings} if found.get(name) != settings.get(name)]
        if names:
            differences = "; ".join(
                f"{name} is {found.get(name)!r} there and {settings.get(name)!r} now"
                for name in names
            )
            raise ValueError(
                f"{self.folder} holds results of other settings, and figures of both would not "
                f"compare: {differences}. Use another output folder, or the same settings."
            )

    def _read(self) -> None:
        with open(self._path, "rb") as file:
            lines = file.read().splitlines(keepends=True)
        size = 0
        for number, line in enumerate(lines, start=1):
            if number == len(lines) and not line.endswith(b"\n"):
                # The run was killed while it wrote this one; the call is made again.
                os.truncate(self._path, size)
                break
            try:
                record = Record(**json.loads(line))
            except (ValueError, TypeError) as error:
                raise ValueError(
                    f"{self._path}, line {number}: not a record of an evaluation ({error}). "
                    "Remove the line to have that prompt run again, or use another output folder."
                ) from error
            size += len(line)
            self.records[record.key] = record

"""
Draft skipping: no drafts for a while where they cost more than they bring.

The paper pays for a draft in every round and names this as future work (its limitations section).
Here the recent rounds decide: a drafted round *gains* the tokens it committed minus those that
plain decoding would have committed in the same time, by the throughput profile. While the mean gain
is negative, drafting pauses, and then tries again for a few rounds; each failed trial doubles the
pause.

Only committed rounds are looked at, so the decision is known before anything of the round is drawn,
and a round without drafts is a step of plain decoding: lossless.
"""

from collections import deque

from .throughput_profile import ThroughputProfile

# Rounds that are judged, and the fewest that are enough to judge after a pause.
_WINDOW, _TRIAL = 16, 4
_FIRST_PAUSE, _LONGEST_PAUSE = 8, 64


class DraftSkipper:
    """
    Decides round by round whether to draft, for all rows of a call together: one drafter forward
    serves them all.

    Args:
        profile ([`ThroughputProfile`]): with `draft_seconds`.
    """

    def __init__(self, profile: ThroughputProfile):
        self._profile = profile
        self._gains: deque[float] = deque(maxlen=_WINDOW)
        self._enough = _WINDOW
        self._pause = _FIRST_PAUSE
        self._left = 0

    def should_draft(self) -> bool:
        """Whether to draft in the coming round. To be asked once a round."""
        if self._left:
            self._left -= 1
            return False
        return True

    def record(
        self,
        num_committed: int,
        num_rows: int,
        num_tokens: int,
        load: int = 0,
        num_held: int | None = None,
    ) -> None:
        """
        Tell what a drafted round brought.

        Args:
            num_committed (`int`): tokens committed by all rows, their own tokens included.
            num_rows (`int`): rows that took part.
            num_tokens (`int`): tokens that the target step held for them.
            load (`int`, *optional*, defaults to 0): tokens of other work in it.
            num_held (`int`, *optional*, defaults to `num_rows`):
                rows that a step of plain decoding would hold, finished ones included.
        """
        held = num_rows if num_held is None else num_held
        plain = float(self._profile.step_seconds(held + load))
        drafted = 1 / float(self._profile.rounds_per_second(num_tokens + load))
        # What other work commits meanwhile counts as in the prefix scheduler: a token each.
        self._gains.append(num_committed + load - (num_rows + load) * drafted / plain)
        if len(self._gains) < self._enough:
            return
        if sum(self._gains) >= 0:
            self._pause, self._enough = _FIRST_PAUSE, _WINDOW
            return
        self._left, self._enough = self._pause, _TRIAL
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        self._gains.clear()

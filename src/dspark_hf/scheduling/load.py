"""
Load: tokens that other work puts into the same target step.

A server that knows its load sets `dspark_load` to a number. `dspark_load="concurrent"` counts it:
the calls of `generate` in this process that run with that setting see each other's tokens, from any
thread. It reads what others submitted, never anything of the round being decided, so it is as
lossless as a number.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

CONCURRENT = "concurrent"


class ConcurrentLoad:
    """Tokens of several calls, each under a key of its own. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tokens: dict[object, int] = {}

    @contextmanager
    def call(self, num_rows: int) -> Iterator[object]:
        """
        Take part with a call while the block runs; yields the call's key. Until it says more, the
        call counts one token a row.
        """
        key = object()
        self.submit(key, num_rows)
        try:
            yield key
        finally:
            with self._lock:
                del self._tokens[key]

    def submit(self, key: object, num_tokens: int) -> None:
        """Say how many tokens a call puts into its next step."""
        with self._lock:
            self._tokens[key] = num_tokens

    def of_others(self, key: object) -> int:
        """Tokens of all calls but this one."""
        with self._lock:
            return sum(tokens for other, tokens in self._tokens.items() if other is not key)


process_load = ConcurrentLoad()

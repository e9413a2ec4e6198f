"""Replacing a function of the host: once, and so that it can be put back."""

import functools
from collections.abc import Callable
from typing import Any

_ORIGINAL = "dspark_original"


def wrap(owner: Any, name: str, make_wrapper: Callable[[Callable], Callable]) -> None:
    """
    Replace `owner.name` by what `make_wrapper` makes of it, unless that has happened already.

    The wrapper keeps the original's signature, from which the host reads what it may pass.
    """
    original = getattr(owner, name)
    if hasattr(original, _ORIGINAL):
        return
    wrapper = functools.wraps(original)(make_wrapper(original))
    setattr(wrapper, _ORIGINAL, original)
    setattr(owner, name, wrapper)


def unwrap(owner: Any, name: str) -> None:
    """Put the host's own function back."""
    original = getattr(getattr(owner, name), _ORIGINAL, None)
    if original is not None:
        setattr(owner, name, original)

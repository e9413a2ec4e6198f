"""Numbers and flags of run files, by the types of the fields that they are for."""

import math
import re
from collections.abc import Mapping
from types import NoneType
from typing import Any, get_args

# YAML reads 6e-4 as text; it wants 6.0e-4.
_NUMERAL = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)[eE][+-]?\d+")


def read_numbers(
    section: str, found: Mapping[str, Any], types: Mapping[str, Any]
) -> dict[str, Any]:
    """
    The values of a section, with numbers where their fields want numbers: 6e-4 in text becomes one,
    and 1e3 an integer where one is wanted. Fields that take text, and those without a type, are
    left to whoever reads them.

    Args:
        section (`str`): for messages.
        found (`Mapping`): names and values.
        types (`Mapping`): names and types; unions are fine.

    Raises:
        `ValueError`: a value is no number, no integer or no flag where one is wanted.
    """
    return {
        name: _read(f"{section}.{name}", value, types.get(name)) for name, value in found.items()
    }


def _read(name: str, value: Any, hint: Any) -> Any:
    kinds = get_args(hint) or (hint,)
    if isinstance(value, dict):
        return {key: _with_number(inner) for key, inner in value.items()}
    if str in kinds or not {bool, int, float} & set(kinds) or (value is None and NoneType in kinds):
        return value
    if int not in kinds and float not in kinds:
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be true or false, found {value!r}.")
        return value
    number = _with_number(value)
    is_number = isinstance(number, int | float) and not isinstance(number, bool)
    if not is_number or not math.isfinite(number):
        expected = "a number" if float in kinds else "an integer"
        raise ValueError(f"{name} must be {expected}, found {value!r}.")
    if float in kinds:
        return number
    if number != int(number):
        raise ValueError(f"{name} must be an integer, found {value!r}.")
    return int(number)


def _with_number(value: Any) -> Any:
    is_numeral = isinstance(value, str) and _NUMERAL.fullmatch(value)
    return float(value) if is_numeral else value

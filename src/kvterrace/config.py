"""Sizes and options, checked."""

from __future__ import annotations

import re
from typing import Any, TypeGuard

import numpy as np

from kvterrace.errors import ConfigError

__all__ = ["is_whole", "parse_nbytes", "require_flag", "require_limit", "require_seconds"]

# So few digits that no number of them is too much for `Fraction`.
_SIZE = re.compile(r"\s*(\d{1,19}(?:\.\d{1,19})?)\s*(?:([KMGTP])(i?))?(B?)\s*", re.IGNORECASE | re.ASCII)
#: The longest time that can be given: 30 years, which every clock and system call can count.
MOST_S = 1e9
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5}


def is_whole(value: object) -> TypeGuard[int | np.integer[Any]]:
    """Whether this is a whole number, of Python or NumPy; True and False are none, nor is a length of time."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, (bool, np.timedelta64))


def require_seconds(value: object, name: str) -> float:
    """A length of time in seconds. Raises ConfigError: not a number from 0 to `MOST_S`."""
    number = is_whole(value) or isinstance(value, (float, np.floating))
    if not number or not 0 <= value <= MOST_S:  # type: ignore[operator]  # NaN is neither
        raise ConfigError(f"{name}: give seconds, a number from 0 to {MOST_S:.0e}, not {value!r}")
    return float(value)  # type: ignore[arg-type]


def require_limit(value: object, name: str) -> float:
    """How long to wait, as what is left of some time: less than none is none, endless is `MOST_S`. Raises ConfigError:
    not a number.
    """
    number = is_whole(value) or isinstance(value, (float, np.floating))
    if number and value < 0:  # type: ignore[operator]
        return 0.0
    return MOST_S if number and value > MOST_S else require_seconds(value, name)  # type: ignore[operator]


def require_flag(value: object, name: str) -> bool:
    """A choice. Raises ConfigError: neither True nor False; text such as "no" would count as True."""
    if not isinstance(value, (bool, np.bool_)):
        raise ConfigError(f"{name}: give True or False, not {value!r}")
    return bool(value)


def parse_nbytes(value: int | str, name: str) -> int:
    """A size in bytes from a number or text: "4GiB" is 4 x 2**30, "4GB" is 4 x 10**9; a bare "4G" means GiB.

    Raises:
        ConfigError: not a size. `name` is the option's name, for the message.
    """
    if is_whole(value):
        nbytes = int(value)
    else:
        match = _SIZE.fullmatch(value) if isinstance(value, str) else None
        if match is None:
            raise ConfigError(f"{name}: {value!r} is no size; write bytes, or e.g. 512MiB or 4GiB")
        number, unit, binary, byte = match.groups(default="")
        base = 1000 if byte and not binary else 1024
        from fractions import Fraction  # here: it brings decimal along, and most sizes are whole numbers

        nbytes = round(Fraction(number) * base ** _POWERS[unit.upper()])
    if not 0 <= nbytes < 2**63:
        raise ConfigError(f"{name}: {value!r} is not in 0..2**63-1 bytes")
    return nbytes

"""Sizes and options, checked."""

from __future__ import annotations

import re

import numpy as np

from kvterrace.errors import ConfigError

__all__ = ["parse_nbytes"]

# So few digits that no number of them is too much for `Fraction`.
_SIZE = re.compile(r"\s*(\d{1,19}(?:\.\d{1,19})?)\s*(?:([KMGTP])(i?))?(B?)\s*", re.IGNORECASE | re.ASCII)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5}


def parse_nbytes(value: int | str, name: str) -> int:
    """A size in bytes from a number or text: "4GiB" is 4 x 2**30, "4GB" is 4 x 10**9; a bare "4G" means GiB.

    Raises:
        ConfigError: not a size. `name` is the option's name, for the message.
    """
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
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

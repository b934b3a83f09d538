"""Sizes and options, checked."""

from __future__ import annotations

import re

from kvterrace.errors import ConfigError

__all__ = ["parse_nbytes"]

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGTP]?)(i?)(B?)\s*", re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5}


def parse_nbytes(value: int | str, name: str) -> int:
    """A size in bytes from a number or text: "4GiB" is 4 x 2**30, "4GB" is 4 x 10**9; a bare "4G" means GiB.

    Raises:
        ConfigError: not a size. `name` is the option's name, for the message.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        nbytes = value
    else:
        match = _SIZE.fullmatch(str(value))
        if match is None:
            raise ConfigError(f"{name}: {value!r} is no size; write bytes, or e.g. 512MiB or 4GiB")
        number, unit, binary, byte = match.groups()
        base = 1000 if byte and not binary and unit else 1024
        nbytes = round(float(number) * base ** _POWERS[unit.upper()])
    if nbytes < 0:
        raise ConfigError(f"{name}: a size cannot be negative: {nbytes}")
    return nbytes

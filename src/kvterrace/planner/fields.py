"""Fields of a configuration, read one by one: every refusal names the field, and what nobody read can be found."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NoReturn

from kvterrace.errors import ConfigError, KVTerraceError

__all__ = ["Fields"]

#: No count of a real model or machine is beyond this.
_MOST = 10**12


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


class Fields:
    """A mapping with a memory of what was read.

    Args:
        data: the mapping, as parsed from JSON or TOML. Not changed.
        where: what it is, for messages: a file, or `file: section`.
        error: raised where a field is missing or cannot be.
    """

    def __init__(self, data: Mapping[str, object], where: str, error: type[KVTerraceError] = ConfigError) -> None:
        self.data = data
        self.where = where
        self._error = error
        self.read: set[str] = set()

    def refuse(self, name: str, why: str) -> NoReturn:
        """Raise: one line that names the field."""
        raise self._error(f"{self.where}: {name}: {why}")

    def has(self, name: str) -> bool:
        """Whether the field is there and not null. Counts as reading it."""
        self.read.add(name)
        return self.data.get(name) is not None

    def value(self, name: str) -> object:
        """The field as it is, or None."""
        self.read.add(name)
        return self.data.get(name)

    def first(self, *names: str) -> str:
        """The first of `names` that is there; the first of them if none is. All count as read."""
        self.read.update(names)
        return next((name for name in names if self.data.get(name) is not None), names[0])

    def count(self, *names: str, default: int | None = None, least: int = 1) -> int:
        """A whole number of at least `least`, under the first of `names` that is there. A list that repeats one number
        (for each layer the same) is that number.
        """
        name = self.first(*names)
        value = self.data.get(name)
        if isinstance(value, list) and value and all(one == value[0] for one in value):
            value = value[0]
        if value is None:
            if default is None:
                self.refuse(name, f"missing; a whole number of at least {least} is needed")
            return default
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _MOST:
            self.refuse(name, f"{_shown(value)} is no whole number in {least}..{_MOST}")
        return value

    def number(self, name: str, default: float | None = None, *, least: float = 0.0, most: float = 1e18) -> float:
        """A finite number in `least`..`most`."""
        value = self.value(name)
        if value is None:
            if default is None:
                self.refuse(name, "missing; a number is needed")
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            self.refuse(name, f"{_shown(value)} is no number")
        if isinstance(value, float) and not math.isfinite(value):  # an int may be too large to ask
            self.refuse(name, f"{_shown(value)} is no number")
        if not least <= value <= most:
            self.refuse(name, f"{_shown(value)} is not in {least:g}..{most:g}")
        return float(value)

    def flag(self, name: str, *, default: bool) -> bool:
        """True or false."""
        value = self.value(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.refuse(name, f"{_shown(value)} is neither true nor false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        """Text that is not empty."""
        value = self.value(name)
        if value is None:
            if default is None:
                self.refuse(name, "missing; text is needed")
            return default
        if not isinstance(value, str) or not value.strip():
            self.refuse(name, f"{_shown(value)} is no text")
        return value

    def items(self, name: str) -> list[object]:
        """A list, empty where the field is missing."""
        value = self.value(name)
        if value is None:
            return []
        if not isinstance(value, list):
            self.refuse(name, f"{_shown(value)} is no list")
        return value

    def section(self, name: str) -> Fields | None:
        """A mapping inside, or None where it is missing."""
        value = self.value(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            self.refuse(name, f"{_shown(value)} is no section of fields")
        return Fields(value, f"{self.where}: {name}", self._error)

    def unread(self) -> list[str]:
        """Fields that nobody asked for."""
        return [name for name in self.data if name not in self.read]

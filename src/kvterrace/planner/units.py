"""Figures as people read them, and as they write them. GiB are powers of two, GB powers of ten; never mixed."""

from __future__ import annotations

import math
import re

from kvterrace.errors import ConfigError

__all__ = ["bandwidth", "duration", "gb", "gib", "parse_duration", "parse_share", "parse_tokens", "share", "usd"]

_TOKENS = re.compile(r"(\d{1,12}(?:\.\d{1,6})?)\s*([km]?)", re.IGNORECASE | re.ASCII)
_DURATION = re.compile(r"(\d{1,12}(?:\.\d{1,9})?)\s*(us|ms|s|min|h)?", re.ASCII)
_SHARE = re.compile(r"(\d{1,3}(?:\.\d{1,9})?)\s*(%?)", re.ASCII)
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}


def parse_tokens(text: str, name: str) -> int:
    """`131072`, `128k` (128 x 1024, as context lengths are named) or `1m` (1024 x 1024). Raises ConfigError."""
    match = _TOKENS.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"{name}: {text!r} is no number of tokens; write e.g. 32768, 128k or 1m")
    number, unit = match.groups()
    tokens = float(number) * {"": 1, "k": 1024, "m": 1024**2}[unit.lower()]
    if tokens != int(tokens):
        raise ConfigError(f"{name}: {text!r} is no whole number of tokens")
    return int(tokens)


def parse_duration(text: str, name: str) -> float:
    """`2`, `2s`, `500ms`, `10min`: seconds. Raises ConfigError."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"{name}: {text!r} is no time; write e.g. 500ms, 2s or 10min")
    return float(match.group(1)) * _SECONDS[match.group(2) or "s"]


def parse_share(text: str, name: str) -> float:
    """`0.6` or `60%`. Raises ConfigError."""
    match = _SHARE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"{name}: {text!r} is no share; write e.g. 0.6 or 60%")
    value = float(match.group(1)) / (100 if match.group(2) else 1)
    if value > 1:
        raise ConfigError(f"{name}: {text!r} is more than all; write e.g. 0.6 or 60%")
    return value


def gib(nbytes: float) -> str:
    """Powers of two: `1.5 GiB`."""
    return _scaled(nbytes, 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"))


def gb(nbytes: float) -> str:
    """Powers of ten: `1.5 GB`."""
    return _scaled(nbytes, 1000, ("B", "kB", "MB", "GB", "TB", "PB"))


def _scaled(nbytes: float, base: int, units: tuple[str, ...]) -> str:
    for unit in units[:-1]:
        if abs(nbytes) < base:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{_three(nbytes)} {unit}"
        nbytes /= base
    return f"{_three(nbytes)} {units[-1]}"


def bandwidth(bytes_per_s: float) -> str:
    """Powers of ten: `6.3 GB/s`."""
    return f"{gb(bytes_per_s)}/s"


def duration(seconds: float) -> str:
    """In the unit that fits: `12 ms`, `3.4 s`, `2.0 h`."""
    if not math.isfinite(seconds):
        return "for ever"
    for size, unit in ((86_400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms")):
        if seconds >= (2 * size if size > 1 else size):
            return f"{_three(seconds / size)} {unit}"
    return f"{_three(seconds * 1e6)} us" if seconds else "0 s"


def share(part: float) -> str:
    """`36.4 %`."""
    return f"{_three(100 * part)} %" if part < 10 else f"{1 + part:,.0f} x"


def usd(price: float) -> str:
    """`$12,300`."""
    return f"${price:,.0f}" if price >= 100 else f"${price:,.2f}"


def _three(value: float) -> str:
    """Three digits, as far as they are behind the point."""
    if value and abs(value) < 1:
        return f"{value:.2g}" if abs(value) < 0.1 else f"{value:.2f}"
    for digits, bound in ((2, 10), (1, 100)):
        if abs(value) < bound:
            text = f"{value:.{digits}f}"
            return text.rstrip("0").rstrip(".") if "." in text else text
    return f"{value:,.0f}"

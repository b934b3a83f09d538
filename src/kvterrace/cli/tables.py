"""Plain words and safe text for the tools' tables."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvterrace.layout import KVLayout

__all__ = ["ago", "count", "date", "layout_words", "print_json", "safe", "stdout", "table"]

_UNITS = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"))
#: Columns where stdout is no terminal: wide enough that no table is cut.
_WIDTH = 150


def stdout() -> Console:
    """Where tables go. Made when used: stdout may be another one by then."""
    return Console(file=sys.stdout, highlight=False, width=None if sys.stdout.isatty() else _WIDTH)


def print_json(data: Mapping[str, object]) -> None:
    """Write one JSON object to stdout."""
    sys.stdout.write(json.dumps(data, indent=2) + "\n")
    sys.stdout.flush()


def safe(text: str) -> str:
    """Text from a drive, fit for a terminal: no control characters, no markup."""
    return escape("".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text))


def table(title: str, *columns: str) -> Table:
    """An empty table; columns whose name begins with `>` are numbers."""
    made = Table(title=title, title_justify="left")
    for column in columns:
        made.add_column(
            column.removeprefix(">"), justify="right" if column.startswith(">") else "left", overflow="fold"
        )
    return made


def count(number: int, word: str) -> str:
    """`1, "block"` -> `"1 block"`; `1200, "block"` -> `"1,200 blocks"`."""
    return f"{number:,} {word}{'' if number == 1 else 's'}"


def date(unix_ns: int) -> str:
    """A time as people write it, in UTC; empty for 0 and for what no calendar has."""
    if not unix_ns:
        return ""
    try:
        return datetime.fromtimestamp(unix_ns / 1e9, tz=UTC).strftime("%Y-%m-%d %H:%M:%SZ")
    except (OverflowError, ValueError, OSError):
        return "?"


def ago(unix_ns: int) -> str:
    """How long ago that was, in its largest unit; empty for 0."""
    if not unix_ns:
        return ""
    seconds = time.time() - unix_ns / 1e9
    for size, unit in _UNITS:
        if seconds >= size:
            return f"{seconds / size:.0f} {unit} ago"
    return "just now" if seconds > -1 else "in the future"


def layout_words(layout: KVLayout) -> str:
    """A layout in words: `32 layers x 8 KV heads x 128, bfloat16, 16 tokens a block`."""
    dims = f"{layout.head_dim}"
    if layout.value_head_dim and layout.value_head_dim != layout.head_dim:
        dims += f"/{layout.value_head_dim}"
    words = [
        f"{layout.layers} layers x {layout.kv_heads} KV heads x {dims}",
        layout.dtype,
        f"{layout.block_tokens} tokens a block",
    ]
    if layout.parts_per_layer == 1:
        words.append("K and V in one part")
    if layout.attention != "full":
        words.append(f"{layout.attention} attention")
    if layout.order != "hnd":
        words.append(f"order {layout.order}")
    if layout.tp_size > 1:
        words.append(f"rank {layout.tp_rank} of {layout.tp_size}")
    return ", ".join(words)

"""The token ids that a caller gives, checked."""

from __future__ import annotations

from typing import Any

from kvterrace.errors import ConfigError

__all__ = ["token_rows"]


def token_rows(input_ids: Any, attention_mask: Any) -> list[list[int]]:
    """Rows of equal length as plain lists. Raises ConfigError: rows of unequal length, padding, or no token."""
    rows = input_ids.tolist() if hasattr(input_ids, "tolist") else list(input_ids)
    if rows and not isinstance(rows[0], (list, tuple)):
        rows = [rows]
    lengths = {len(row) for row in rows}
    if len(lengths) > 1:
        raise ConfigError(
            f"rows of {min(lengths)} to {max(lengths)} tokens in one batch: give rows of equal length, or one row a "
            "call"
        )
    if not rows or not len(rows[0]):
        raise ConfigError("input_ids holds no token")
    if attention_mask is not None:
        mask = attention_mask.tolist() if hasattr(attention_mask, "tolist") else list(attention_mask)
        flat = [value for row in mask for value in (row if isinstance(row, (list, tuple)) else [row])]
        if not all(flat):
            raise ConfigError(
                "attention_mask masks tokens: padding is not supported: give rows of equal length, or one row a call"
            )
    return [[int(token) for token in row] for row in rows]

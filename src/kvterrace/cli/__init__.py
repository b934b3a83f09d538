"""The `kvterrace` command. Needs no inference engine until a command does."""

from __future__ import annotations

from kvterrace.cli.app import app, main

__all__ = ["app", "main"]

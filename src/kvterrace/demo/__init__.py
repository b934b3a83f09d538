"""The story of kvterrace on a real model: a long prefix, two questions, a restart, and what each first token cost.

`story.tell` runs every phase in a process of its own (`python -m kvterrace.demo.phases`), so that nothing but the SSD
carries KV across the restart. The reference phase does not use kvterrace at all.
"""

from __future__ import annotations

from kvterrace.errors import KVTerraceError

__all__ = ["DemoError"]


class DemoError(KVTerraceError):
    """The demo cannot run here. One line that says what to do."""

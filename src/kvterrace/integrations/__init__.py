"""Adapters to inference engines. Each imports its engine on its own; `import kvterrace` imports none of them.

Each adapter names the versions that it was run against and refuses others loudly, with `MissingDependencyError`.
"""

from __future__ import annotations

from kvterrace.errors import KVTerraceError

__all__ = ["MissingDependencyError"]


class MissingDependencyError(KVTerraceError, ImportError):
    """An engine is not installed, or in a version that this adapter was not run against. One line that says what to
    do."""

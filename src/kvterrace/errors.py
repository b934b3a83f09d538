"""Faults, as exceptions. Outcomes of a look-up or a transfer are values: see `types`.

Each error carries coordinates (where) and ends in what to do. All derive from `KVTerraceError`,
so that a caller can degrade to recomputation with one `except`.
"""

from __future__ import annotations

__all__ = [
    "ConfigError",
    "FormatVersionError",
    "KVTerraceError",
    "LayoutError",
    "NotAStoreError",
    "StoreClosedError",
    "StoreLockedError",
    "StoreUnusableError",
    "UnsupportedModelError",
]


class KVTerraceError(Exception):
    """Base of every error that kvterrace raises on purpose. The message is one line, fit for a CLI user."""


class ConfigError(KVTerraceError):
    """An option or argument has a value that cannot work."""


class LayoutError(KVTerraceError):
    """A layout cannot exist, or a caller's buffer does not have the shape or size that its layout asks for."""


class UnsupportedModelError(KVTerraceError):
    """A model caches in a way that kvterrace does not understand. Refused, never guessed."""


class StoreUnusableError(KVTerraceError):
    """A store's directory cannot be created, read or written."""


class NotAStoreError(StoreUnusableError):
    """A directory exists, is not empty, and is not a kvterrace store."""


class FormatVersionError(StoreUnusableError):
    """A store was written by a newer kvterrace than this one. Nothing was changed."""


class StoreLockedError(StoreUnusableError):
    """Another process writes this partition. Two writers never share one."""


class StoreClosedError(KVTerraceError):
    """The store was closed before this call."""

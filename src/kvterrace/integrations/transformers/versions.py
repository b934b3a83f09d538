"""Which Transformers this adapter was run against. Imports neither torch nor Transformers."""

from __future__ import annotations

import re
from importlib import metadata

from kvterrace.integrations import MissingDependencyError

__all__ = ["SUPPORTED_TRANSFORMERS", "check_versions", "major_minor"]

#: Versions that the tests run against, oldest and newest; the cache classes differ outside it.
SUPPORTED_TRANSFORMERS = ">=5.16,<6"

_INSTALL = "pip install 'kvterrace[transformers]'"


def major_minor(version: str) -> tuple[int, int]:
    """`"5.24.0.dev0"` -> `(5, 24)`. Raises ValueError for text that does not start so."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None:
        raise ValueError(f"{version!r} is no version number")
    return int(found[1]), int(found[2])


def check_versions() -> None:
    """Raises `MissingDependencyError` unless torch and a supported Transformers are installed."""
    for package in ("torch", "transformers"):
        try:
            version = metadata.version(package)
        except metadata.PackageNotFoundError:
            raise MissingDependencyError(f"{package} is not installed: {_INSTALL}") from None
        if package == "transformers" and not (5, 16) <= major_minor(version) < (6, 0):
            raise MissingDependencyError(
                f"transformers {version} is installed, kvterrace supports {SUPPORTED_TRANSFORMERS}: {_INSTALL}"
            )

"""What the tests of readers share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.shared import Library


@pytest.fixture
def library(tmp_path: Path) -> Iterator[Library]:
    """A writer whose blocks are at once written, six segments of seven records each, and no reader yet."""
    library = Library(tmp_path / "kv", after_s=0.0)
    yield library
    library.close()

"""No child of a crash test outlives it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.crash import kit


@pytest.fixture(autouse=True)
def _children() -> Iterator[None]:
    yield
    kit.end_children()

"""What all tests share."""

import pytest
from hypothesis import settings

# A busy machine is no failure: examples are bounded in number, whole tests in time (pytest-timeout).
settings.register_profile("kvterrace", deadline=None)
settings.load_profile("kvterrace")


@pytest.fixture
def python_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stores opened from now on do without the native passes."""
    monkeypatch.setattr("kvterrace.format.passes.native", lambda: None)


@pytest.fixture
def python_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """`open_store` takes the engine of Python threads: the only one whose system calls a test can replace."""
    monkeypatch.setenv("KVTERRACE_ENGINE", "posix")

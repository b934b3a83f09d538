"""Which engine works here: io_uring, else native threads, else the threads of Python; and why, as a value."""

from __future__ import annotations

import errno
import functools
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass

from kvterrace.errors import ConfigError
from kvterrace.io.base import IoEngine
from kvterrace.io.posix import PosixEngine

__all__ = ["ENGINES", "Choice", "best_engine", "choose", "why_not_native", "why_not_uring"]

_log = logging.getLogger(__name__)

#: Engines by name, the best first.
ENGINES = ("uring", "native-posix", "posix")
#: Environment variable that names an engine, for those who know better.
VARIABLE = "KVTERRACE_ENGINE"
#: Environment variable that does without the extension module, if it is `off`.
MODULE_VARIABLE = "KVTERRACE_NATIVE"

_REASONS = {
    errno.ENOSYS: "the kernel has none, or a seccomp filter hides it",
    errno.EPERM: "forbidden, by a seccomp filter or by /proc/sys/kernel/io_uring_disabled",
    errno.EACCES: "forbidden, by a security module",
    errno.EOPNOTSUPP: "the kernel is older than Linux 5.6",
    errno.ENOMEM: "RLIMIT_MEMLOCK leaves no room for a ring",
    errno.EMFILE: "the process has no descriptor left, see RLIMIT_NOFILE",
    errno.ENFILE: "the machine has no descriptor left",
    errno.EAGAIN: "no more threads can be started, see RLIMIT_NPROC and pids.max",
}
#: Of these, what may have passed when the next store is opened.
_PASSING = {errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EAGAIN}


@dataclass(frozen=True, slots=True)
class Choice:
    """The engine for this process, and why it is not a better one (why it is that one, if it is the best).

    Attributes:
        name: one of `ENGINES`.
        reason: one line.
        forced: whether the environment chose it.
    """

    name: str
    reason: str
    forced: bool = False

    @property
    def degraded(self) -> bool:
        """Whether this is the slow engine without anybody having asked for it."""
        return self.name == "posix" and not self.forced


@functools.cache
def why_not_native() -> str | None:
    """Why the extension module cannot be used; None if it can."""
    if os.environ.get(MODULE_VARIABLE) == "off":
        return f"{MODULE_VARIABLE}=off"
    try:
        import kvterrace._native  # noqa: F401 - that is the question
    except ImportError as error:
        return f"the extension module is not there ({error}); on Debian and Ubuntu: apt install g++, then install again"
    return None


def why_not_uring() -> str | None:
    """Why io_uring cannot be used; None if it can. Opens a ring to see, until the answer is one that stays."""
    missing = why_not_native()
    if missing is not None:
        return missing
    try:
        return _refusal()
    except OSError as error:
        return _shown("io_uring", error)


@functools.cache
def _refusal() -> str | None:
    """What of the machine forbids io_uring. Raises OSError, which is not remembered, for what may pass."""
    from kvterrace.io.native import UringEngine

    try:
        UringEngine("probe", depth=1, workers=1).close(1.0)
    except OSError as error:
        if error.errno in _PASSING:
            raise
        return _shown("io_uring", error)
    return None


def _shown(kind: str, error: OSError) -> str:
    return f"{kind}: {_REASONS.get(error.errno or 0, 'refused')} ({error.strerror})"


def choose() -> Choice:
    """The engine that `best_engine` makes. Raises ConfigError if the environment names one that does not work here."""
    wanted = os.environ.get(VARIABLE, "")
    if wanted:
        return _wanted(wanted)
    missing = why_not_native()
    if missing is not None:
        return Choice("posix", missing, forced=missing.startswith(MODULE_VARIABLE))
    refused = why_not_uring()
    if refused is not None:
        return Choice("native-posix", refused)
    return Choice("uring", "io_uring works here")


def best_engine(name: str | None = None) -> tuple[IoEngine, Choice]:
    """A new engine of the best kind that works here, called `name` (by default after its kind), and why that one.

    Warns, once in a process, where that is the slow one and nobody asked for it. Raises OSError where not even that
    one, or the one that was asked for, gets its threads and descriptors.
    """
    choice = choose()
    while True:
        try:
            engine = _maker(choice.name)(name or choice.name)
        except OSError as error:
            if choice.forced or choice.name == ENGINES[-1]:
                raise OSError(error.errno, _shown(choice.name, error)) from error
            choice = Choice(ENGINES[ENGINES.index(choice.name) + 1], _shown(choice.name, error))
            continue
        if choice.degraded:
            _warn(choice.reason)
        return engine, choice


@functools.cache
def _warn(reason: str) -> None:
    _log.warning("using the engine of Python threads, which is slower: %s", reason)


def _wanted(wanted: str) -> Choice:
    if wanted not in ENGINES:
        raise ConfigError(f"{VARIABLE}={wanted}: no such engine; one of {', '.join(ENGINES)}, or leave it unset")
    checks: dict[str, Callable[[], str | None]] = {"uring": why_not_uring, "native-posix": why_not_native}
    why_not = checks[wanted]() if wanted in checks else None
    if why_not is not None:
        raise ConfigError(f"{VARIABLE}={wanted}: {why_not}; unset it to have the best engine that works")
    return Choice(wanted, f"{VARIABLE} asks for it", forced=True)


def _maker(kind: str) -> Callable[[str], IoEngine]:
    if kind == "posix":
        return lambda name: PosixEngine(name=name)
    from kvterrace.io.native import NativePosixEngine, UringEngine

    return UringEngine if kind == "uring" else NativePosixEngine

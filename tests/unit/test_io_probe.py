"""Which engine is chosen, under filters and wishes; and why."""

from __future__ import annotations

import errno
import importlib.util
import os
import subprocess
import sys
import sysconfig
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import ClassVar

import pytest

import kvterrace
from kvterrace.errors import ConfigError
from kvterrace.io import IoEngine, PosixEngine, probe

NATIVE = importlib.util.find_spec("kvterrace._native") is not None
needs_native = pytest.mark.skipif(not NATIVE, reason="the extension module is not built: make native")

_STORE = """
    import sys
    import numpy as np
    from kvterrace import KVLayout, Namespace, chain_keys, open_store
    layout = KVLayout(layers=1, kv_heads=1, head_dim=64, dtype="float32", block_tokens=64)
    chain = chain_keys(Namespace("m", layout), range(64))
    data = np.random.default_rng(1).integers(0, 256, (1, layout.block_nbytes), np.uint8)
    with open_store(sys.argv[1], dram_bytes="4MiB", ssd_bytes="64MiB", sigterm_flush=False) as store:
        store.wait(store.put(chain, data))
        out = np.zeros_like(data)
        print(store.stats().drives[0].engine, store.wait(store.get(chain, out)), int((out == data).all()))
"""
#: Makes io_uring_setup (425 on every architecture but alpha) fail, as container runtimes do.
FILTER = """
    import ctypes, struct
    libc = ctypes.CDLL(None, use_errno=True)
    def forbid(number):
        steps = [(0x20, 0, 0, 0), (0x15, 0, 1, 425), (0x06, 0, 0, 0x00050000 | number), (0x06, 0, 0, 0x7FFF0000)]
        code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
        program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(steps), ctypes.addressof(code)))
        assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
        assert libc.prctl(22, 2, program, 0, 0) == 0, ctypes.get_errno()  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER
"""
USE = """
    import sys, tempfile
    from pathlib import Path
    from kvterrace.io import IoClass, IoKind, IoRequest, PAGE_NBYTES, probe
    from kvterrace.testing.engine_suite import aligned, noise
    engine, choice = probe.best_engine()
    with tempfile.TemporaryDirectory() as folder:
        file = engine.create(Path(folder) / "a", 4 * PAGE_NBYTES)
        data = noise(4)
        engine.submit([IoRequest(IoKind.WRITE, IoClass.DEMAND, file, 0, data)])
        assert engine.poll(10.0)[0].complete
        back = aligned(4)
        engine.submit([IoRequest(IoKind.READ, IoClass.DEMAND, file, 0, back)])
        assert engine.poll(10.0)[0].complete
        assert [one.tobytes() for one in data] == [one.tobytes() for one in back]
        assert engine.close(10.0)
    print(choice.name, type(engine).__name__, choice.degraded, choice.reason, sep="|")
"""


def run(code: str, env: Mapping[str, str] | None = None) -> str:
    variables = (probe.VARIABLE, probe.MODULE_VARIABLE)
    clean = {name: value for name, value in os.environ.items() if name not in variables} | dict(env or {})
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False, env=clean
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.strip()


@needs_native
@pytest.mark.parametrize(
    ("number", "words"), [(errno.ENOSYS, "a seccomp filter hides it"), (errno.EPERM, "forbidden, by a seccomp filter")]
)
def test_where_a_filter_forbids_io_uring_native_threads_serve(number: int, words: str) -> None:
    shown = run(textwrap.dedent(FILTER) + f"forbid({number})\n" + textwrap.dedent(USE))
    name, kind, degraded, reason = shown.split("|")
    assert (name, kind, degraded) == ("native-posix", "NativePosixEngine", "False")
    assert words in reason


def test_without_the_extension_the_engine_of_python_serves() -> None:
    hide = "import logging, sys\nlogging.getLogger('kvterrace').addHandler(logging.NullHandler())\n"
    hide += "sys.modules['kvterrace._native'] = None\n"
    name, kind, degraded, reason = run(hide + textwrap.dedent(USE)).split("|")
    assert (name, kind, degraded) == ("posix", "PosixEngine", "True")
    assert "apt install g++" in reason


def test_an_extension_that_does_not_load_is_as_one_that_is_not_there(tmp_path: Path) -> None:
    """Built for another machine, or cut short. The rest of the package is used as it is."""
    package = Path(kvterrace.__file__).parent
    copy = tmp_path / "kvterrace"
    copy.mkdir()
    for path in package.iterdir():
        if not path.name.startswith("_native"):
            (copy / path.name).symlink_to(path)
    (copy / f"_native{sysconfig.get_config_var('EXT_SUFFIX')}").write_bytes(b"no library")
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(_STORE), str(tmp_path / "kv")],
        env={**os.environ, "PYTHONPATH": str(tmp_path), "KVTERRACE_NATIVE": "auto"},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert "posix [Hit(tier=<Tier.DRAM: 1>)] 1" in ended.stdout
    assert "extension module" in ended.stderr


@pytest.mark.parametrize(
    ("wanted", "kind"),
    [
        ("posix", "PosixEngine"),
        pytest.param("native-posix", "NativePosixEngine", marks=needs_native),
        pytest.param(
            "uring",
            "UringEngine",
            marks=pytest.mark.skipif(probe.why_not_uring() is not None, reason="no io_uring here"),
        ),
    ],
)
def test_the_environment_chooses(wanted: str, kind: str) -> None:
    assert run(textwrap.dedent(USE), {probe.VARIABLE: wanted}).split("|") == [
        wanted,
        kind,
        "False",
        "KVTERRACE_ENGINE asks for it",
    ]


def test_an_engine_that_does_not_exist_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(probe.VARIABLE, "spdk")
    with pytest.raises(ConfigError, match="KVTERRACE_ENGINE=spdk: no such engine; one of uring, native-posix, posix"):
        probe.choose()


def test_an_engine_that_does_not_work_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(probe.VARIABLE, "uring")
    monkeypatch.setattr(probe, "why_not_uring", lambda: "no io_uring on the moon")
    with pytest.raises(ConfigError, match="no io_uring on the moon; unset it"):
        probe.choose()


@pytest.mark.parametrize(
    ("native", "uring", "name"),
    [(None, None, "uring"), (None, "forbidden", "native-posix"), ("not built", "not built", "posix")],
)
def test_the_best_that_works(monkeypatch: pytest.MonkeyPatch, native: str | None, uring: str | None, name: str) -> None:
    monkeypatch.delenv(probe.VARIABLE, raising=False)
    monkeypatch.setattr(probe, "why_not_native", lambda: native)
    monkeypatch.setattr(probe, "why_not_uring", lambda: uring)
    choice = probe.choose()
    assert (choice.name, choice.degraded) == (name, name == "posix")
    assert choice.reason == (native or uring or "io_uring works here")


@needs_native
@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN])
def test_what_may_pass_is_not_remembered(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    from kvterrace.io import native

    class Ring:
        answers: ClassVar[list[int]] = [number, 0]

        def __init__(self, *_: object, **__: object) -> None:
            if (code := self.answers.pop(0)) != 0:
                raise OSError(code, "for now")

        def close(self, _: float) -> bool:
            return True

    monkeypatch.setattr(probe, "why_not_native", lambda: None)
    monkeypatch.setattr(native, "UringEngine", Ring)
    probe._refusal.cache_clear()
    try:
        assert (probe.why_not_uring() or "").startswith(f"io_uring: {probe._REASONS[number]} (for now)")
        assert [probe.why_not_uring(), probe.why_not_uring()] == [None, None]  # the second without asking
    finally:
        probe._refusal.cache_clear()


def test_an_engine_that_cannot_be_made_makes_room_for_the_next_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(probe.VARIABLE, raising=False)
    monkeypatch.setattr(probe, "why_not_native", lambda: None)
    monkeypatch.setattr(probe, "why_not_uring", lambda: None)
    broken = {"uring": errno.EMFILE, "native-posix": errno.EAGAIN}
    makers = {kind: _raising(number) for kind, number in broken.items()} | {
        "posix": lambda name: PosixEngine(name=name)
    }
    monkeypatch.setattr(probe, "_maker", lambda kind: makers[kind])
    engine, choice = probe.best_engine()
    assert (engine.name, choice.name, choice.degraded) == ("posix", "posix", True)
    assert choice.reason.startswith("native-posix: no more threads can be started")
    assert engine.close(10.0)
    makers["posix"] = _raising(errno.EAGAIN)
    with pytest.raises(OSError, match="posix: no more threads can be started, see RLIMIT_NPROC") as raised:
        probe.best_engine()
    assert raised.value.errno == errno.EAGAIN


@needs_native
def test_an_engine_that_was_asked_for_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(probe.VARIABLE, "native-posix")
    monkeypatch.setattr(probe, "why_not_native", lambda: None)
    monkeypatch.setattr(probe, "_maker", lambda _: _raising(errno.EMFILE))
    with pytest.raises(OSError, match="native-posix: the process has no descriptor left") as raised:
        probe.best_engine()
    assert raised.value.errno == errno.EMFILE


def _raising(number: int) -> Callable[[str], IoEngine]:
    def make(_: str) -> IoEngine:
        raise OSError(number, os.strerror(number))

    return make


def test_the_slow_engine_is_chosen_loudly_and_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(probe.VARIABLE, raising=False)
    monkeypatch.setattr(probe, "why_not_native", lambda: "a moon without compilers")
    for _ in range(3):
        assert probe.best_engine()[0].close(10.0)
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", "using the engine of Python threads, which is slower: a moon without compilers")
    ]


def test_an_engine_bears_the_name_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(probe.VARIABLE, "posix")
    engine, choice = probe.best_engine("nvme0")
    assert isinstance(engine, PosixEngine)
    assert (engine.name, choice.forced, choice.degraded) == ("nvme0", True, False)
    assert engine.close(10.0)


def test_without_the_module_on_request_there_is_no_warning() -> None:
    name, kind, degraded, reason = run(textwrap.dedent(USE), {"KVTERRACE_NATIVE": "off"}).split("|")
    assert (name, kind, degraded, reason) == ("posix", "PosixEngine", "False", "KVTERRACE_NATIVE=off")


@needs_native
def test_the_passes_go_with_the_module() -> None:
    shown = "from kvterrace.format import passes; print(passes.native() is not None)"
    assert run(shown, {"KVTERRACE_NATIVE": "off"}) == "False"
    assert run(shown, {"KVTERRACE_NATIVE": "auto"}) == "True"

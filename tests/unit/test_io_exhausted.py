"""Engines where the process may have no more threads or descriptors, and where a drive is slow to close a file."""

from __future__ import annotations

import os
import shutil
import subprocess
import textwrap
from pathlib import Path

import pytest

pytest.importorskip("kvterrace._native", reason="the extension module is not built: make native")

from tests.unit.test_io_native import KINDS, make, run

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="a user with no other process is made by root alone")

#: What the sweeps below share: they make an engine under one limit after the other until five could be made. Each
#: attempt works or raises the one error, and leaves no thread and no descriptor.
SWEEP = """
    import ctypes
    from tests.unit.test_io_native import *
    def attempt():
        return PosixEngine() if {kind!r} == "posix" else make({kind!r})
    def use(engine):
        engine.submit([IoRequest(IoKind.CALL, IoClass.SCRUB, finish=lambda _: 7)])
        assert drain(engine, 1)[0].value == 7
        assert engine.close(10.0)
    def left():
        return native_threads(), threading.active_count(), open_descriptors()
    def settled():
        for _ in range(1000):
            if left() == before:
                return True
            time.sleep(0.01)  # a thread that was joined may still be listed
        return False
    use(attempt())
    gc.collect()
    before = left()
"""
BE_NOBODY = """
    os.setgroups([])
    os.setgid(54321)
    os.setuid(54321)
    assert ctypes.CDLL(None).prctl(4, 1, 0, 0, 0) == 0  # PR_SET_DUMPABLE: else /proc/self is not for us any more
"""


@needs_root
@pytest.mark.parametrize("kind", [*KINDS, "posix"])
def test_an_engine_that_gets_no_threads_is_an_error_and_leaves_nothing(kind: str) -> None:
    if kind != "posix":
        make(kind).close(10.0)
    code = """
    refused = made = 0
    for most in range(1, 100):
        resource.setrlimit(resource.RLIMIT_NPROC, (most, 100))
        try:
            engine = attempt()
        except OSError as error:
            assert error.errno == errno.EAGAIN, error
            refused += 1
        else:
            use(engine)
            made += 1
            del engine
        gc.collect()
        assert settled(), (most, left(), before)
        if made == 5:
            break
    print(refused > 5, made)
    """
    assert run(SWEEP.format(kind=kind) + BE_NOBODY + code) == "True 5\n"


@needs_root
@pytest.mark.parametrize("kind", KINDS)
def test_a_subscriber_without_a_thread_is_an_error_and_the_engine_closes(kind: str) -> None:
    make(kind).close(10.0)
    code = """
    engine = attempt()
    resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
    try:
        engine.subscribe(lambda: None)
    except OSError as error:
        print(errno.errorcode[error.errno])
    use(engine)
    """
    assert run(SWEEP.format(kind=kind) + BE_NOBODY + code) == "EAGAIN\n"


@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_that_gets_no_descriptors_is_an_error_and_leaves_nothing(kind: str) -> None:
    make(kind).close(10.0)
    code = (
        SWEEP.format(kind=kind)
        + """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    refused = made = 0
    for most in range(before[2], 100):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        try:
            engine = attempt()
        except OSError as error:
            assert error.errno == errno.EMFILE, error
            refused += 1
        else:
            use(engine)
            made += 1
            del engine
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        gc.collect()
        assert settled(), (most, left(), before)
        if made == 5:
            break
    print(refused > 2, made)
    """
    )
    assert run(code) == "True 5\n"


#: close(2) of a file named SLOWFILE on a native thread ends when the pipe SLOWPIPE has a byte.
SHIM = r"""
    #define _GNU_SOURCE
    #include <fcntl.h>
    #include <stdio.h>
    #include <stdlib.h>
    #include <string.h>
    #include <sys/prctl.h>
    #include <sys/syscall.h>
    #include <unistd.h>
    int close(int fd) {
      char link[64], path[512] = {0}, name[17] = {0}, byte;
      snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
      prctl(PR_GET_NAME, name);
      if (!strncmp(name, "kvt-", 4) && readlink(link, path, 511) > 0 && strstr(path, "SLOWFILE")) {
        int pipe = open(getenv("SLOWPIPE"), O_RDWR);
        if (read(pipe, &byte, 1) != 1) abort();
        syscall(SYS_close, pipe);
      }
      return (int)syscall(SYS_close, fd);
    }
"""


#: Has a native thread be the last that uses a file, and with that the one that closes it. The one thread of io_uring
#: has to be through with all else by then.
_LAST_USER = {
    "uring": """
        os.mkfifo(path)
        file = engine.reopen(path)
        engine.submit([IoRequest(IoKind.READ, IoClass.DEMAND, file, 0, [buffer])])
        assert engine.poll(0.1) == []  # begun by now
        engine.close_file(file)
        path.write_bytes(b"x")
        drain(engine, 1)
    """,
    "native-posix": """
        file = engine.create(path, 256 * PAGE)
        engine.submit([IoRequest(IoKind.READ, IoClass.DEMAND, file, 0, [buffer]) for _ in range(3000)])
        while engine._core.unfinished == 3000:
            time.sleep(0.001)
        engine.close_file(file)
        drain(engine, 3000)
    """,
}


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler to make a slow close(2) with")
@pytest.mark.parametrize("kind", KINDS)
def test_a_drive_that_is_slow_to_close_a_file_stops_nobody(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a native thread is in close(2), `close` gives up and other threads run; later it closes."""
    make(kind).close(10.0)
    (tmp_path / "shim.c").write_text(textwrap.dedent(SHIM))
    shim = tmp_path / "shim.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", shim, tmp_path / "shim.c"], check=True)
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setenv("LD_PRELOAD", str(shim))
    monkeypatch.setenv("SLOWPIPE", str(tmp_path / "pipe"))
    code = f"""
        from tests.unit.test_io_native import *
        logging.getLogger("kvterrace").addHandler(logging.NullHandler())
        path = Path(sys.argv[1]) / "SLOWFILE"
        engine = make({kind!r})
        buffer = page(0, 256)
        {_LAST_USER[kind]}
        print(engine.close(0.0))
        pipe = os.open(path.with_name("pipe"), os.O_RDWR)
        os.write(pipe, b"x")
        print(engine.close(10.0))
    """
    assert run(code, tmp_path) == "False\nTrue\n"

"""What the children of the crash tests do: `python -m tests.crash.children WHAT ...`. They report on stdout."""

from __future__ import annotations

import itertools
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from tests.crash.kit import MiB, chain_of, checked, opened, put, stored

from kvterrace import Hit, KVTerraceError, Miss, open_store


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def drives(paths: str) -> list[Path]:
    """Folders of the drives, as one argument."""
    return [Path(path) for path in paths.split(os.pathsep)]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def store(path: str, conversations: str, blocks: str, how: str) -> None:
    """Put some conversations, flush if asked to, and die."""
    kv = opened(Path(path), write_behind_s=60.0)
    for conversation in range(int(conversations)):
        stored(kv, chain_of(conversation, int(blocks)))
    if how == "flush-and-die":
        say("flushed", kv.flush())
    die()


def fill(path: str, cap: str, turn: str, how: str) -> None:
    """Put more than the cap holds."""
    kv = opened(Path(path), ssd_bytes=int(cap), write_behind_s=0.0)
    for number in range(100):
        stored(kv, chain_of(int(turn) * 1000 + number, 8))
    kv.flush()
    if how == "close":
        kv.close()
    else:
        die()


def corrupt_me(path: str) -> None:
    """Leave an unsealed segment with two chains."""
    kv = opened(Path(path), write_behind_s=60.0)
    stored(kv, chain_of(0, 6))
    kv.flush()
    stored(kv, chain_of(1, 3))
    kv.flush()
    die()


def loop(path: str, cap: str, first: str) -> None:
    """Put and flush for ever; say what a flush has covered."""
    kv = opened(drives(path), ssd_bytes=int(cap), write_behind_s=0.01)
    say("open")
    for number in itertools.count(int(first)):
        chain = chain_of(number, 1 + number % 7)
        stored(kv, chain)
        say("put", number)
        if number % 3 == 0 and kv.flush():
            say("flushed", number)


def invalidates(path: str, cap: str, first: str) -> None:
    """Put, and invalidate what was put three before, for ever; say what is gone for good."""
    kv = opened(drives(path), ssd_bytes=int(cap), write_behind_s=0.0)
    say("open")
    for number in itertools.count(int(first)):
        stored(kv, chain_of(number, 6))
        say("put", number)
        if number - 3 >= int(first):
            kv.invalidate(chain_of(number - 3, 6), start=1)
            if kv.flush():
                say("gone", number - 3)


def reopen(path: str) -> None:
    """Open and close for ever."""
    for number in itertools.count():
        say("opening")
        kv = opened(drives(path), dram_bytes=MiB)
        stored(kv, chain_of(10**6 + os.getpid() * 1000 + number % 1000, 3))
        say("closing")
        kv.close()
        say("closed")


def linger() -> None:
    """A minute in short pieces: a signal that comes just before a sleep begins is seen only after it."""
    for _ in range(600):
        time.sleep(0.1)


def sigterm(path: str, handler: str) -> None:
    """Put, say so, and wait for the end."""
    if handler == "own":
        signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
    kv = opened(Path(path), write_behind_s=60.0, sigterm_flush=True)
    stored(kv, chain_of(0, 50))
    say("ready")
    if handler == "closing":
        kv.close()
        say("closed")
    linger()


def sigterm_in_put(path: str) -> None:
    """Put without end, so that a signal finds the main thread inside."""
    kv = opened(Path(path), write_behind_s=60.0, sigterm_flush=True, ssd_bytes=256 * MiB)
    try:
        for number in itertools.count():
            stored(kv, chain_of(number, 4))
            say("put", number)
    except KVTerraceError:  # the store is closed under us by the signal's thread
        linger()


def exits(path: str, how: str) -> None:
    """End normally without closing."""

    def work() -> object:
        kv = opened(Path(path), write_behind_s=60.0)
        stored(kv, chain_of(0, 50))
        return kv if how == "kept" else None

    kept = work()
    say("done", kept is not None)


def locked(path: str) -> None:
    """Hold the partition until told to go on."""
    with opened(Path(path)) as kv:
        stored(kv, chain_of(0, 4))
        say("open")
        sys.stdin.readline()


def forks(path: str, how: str) -> None:
    """Fork while a store is open; the child ends in some way, then the parent goes on."""
    kv = opened(Path(path), write_behind_s=60.0, sigterm_flush=True)
    stored(kv, chain_of(0, 20))
    child = os.fork()
    if not child:
        if how == "exit":
            sys.exit(0)  # runs atexit
        if how == "close":
            kv.close()
            os._exit(0)
        if how == "sigterm":
            os.kill(os.getpid(), signal.SIGTERM)
        linger()
    if how == "outlives":
        stored(kv, chain_of(1, 20))
        kv.close()
        say("child", child)
        die()
    _, status = os.waitpid(child, 0)
    say("child ended", os.waitstatus_to_exitcode(status))
    sys.stdin.readline()
    stored(kv, chain_of(1, 20))
    say("closed", kv.close())


def grow(path: str) -> None:
    """Threads that put while the main thread flushes: a flush covers what came before it."""
    kv = opened(Path(path), write_behind_s=60.0, ssd_bytes=256 * MiB)
    stop = threading.Event()

    def work() -> None:
        for number in itertools.count(1000):
            if stop.is_set():
                return
            put(kv, chain_of(number, 4))

    thread = threading.Thread(target=work)
    thread.start()
    for number in range(20):
        stored(kv, chain_of(number, 2))
        say("flushed", number, kv.flush())
    stop.set()
    thread.join()
    die()


def churn(path: str, cap: str, first: str, note: str) -> None:
    """Put, flush and invalidate for ever; keep in the file `note` which conversation is the newest."""
    kv = opened(drives(path), ssd_bytes=int(cap), write_behind_s=0.01)
    mark = os.open(note, os.O_RDWR | os.O_CREAT)
    for number in itertools.count(int(first)):
        stored(kv, chain_of(0, 4))  # a prefix that stays warm, and is carried over again and again
        stored(kv, chain_of(number, 1 + number % 7))
        os.pwrite(mark, number.to_bytes(8, "little"), 0)
        if number % 5 == 0:
            kv.invalidate(chain_of(number - 3, 7), start=1)
        if number % 3 == 0:
            kv.flush()


def _open_and_deleted() -> int:
    links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return sum("(deleted)" in str(link.readlink()) for link in links if link.is_symlink())


def reads(path: str, note: str, seed: str) -> None:
    """Read what `churn` writes until told to end, every hit byte by byte; then say what was found and what is held."""
    kv = open_store(drives(path), dram_bytes=MiB, read_only=True)
    say("open")
    rng = random.Random(int(seed))
    mark = os.open(note, os.O_RDONLY)
    told = threading.Event()

    def listen() -> None:
        sys.stdin.readline()
        told.set()

    threading.Thread(target=listen, daemon=True).start()
    held = []
    while not told.is_set():
        newest = int.from_bytes(os.pread(mark, 8, 0), "little")
        number = rng.choice([0, newest - rng.randrange(60)])
        chain = chain_of(max(0, number), 4 if number <= 0 else 1 + number % 7)
        outcomes = checked(kv, chain)
        time.sleep(0.002)  # the writer is to get on
        assert all(isinstance(one, Hit | Miss) for one in outcomes), outcomes
        if rng.random() < 0.02:
            held.append(kv.pin(chain))
            for pin in held[:-3]:
                pin.release()
            del held[:-3]
    for pin in held:
        pin.release()
    stats = kv.stats()
    say(
        "hits",
        stats.get_ssd_blocks + stats.get_dram_blocks,
        "ssd",
        stats.get_ssd_blocks,
        "warm",
        kv.match(chain_of(0, 4)).blocks,
    )
    sys.stdin.readline()
    end_s = time.monotonic() + 30.0  # some looks at the folder, on a machine that may be busy
    while (deleted := _open_and_deleted()) and time.monotonic() < end_s:
        time.sleep(0.1)
    say("deleted", deleted)
    say("closed", kv.close())


ALL: dict[str, Callable[..., None]] = {
    one.__name__: one
    for one in (
        store,
        fill,
        corrupt_me,
        loop,
        invalidates,
        reopen,
        sigterm,
        sigterm_in_put,
        exits,
        locked,
        forks,
        grow,
        churn,
        reads,
    )
}

if __name__ == "__main__":
    ALL[sys.argv[1]](*sys.argv[2:])

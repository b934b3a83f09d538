"""What the crash tests share: small blocks whose bytes follow from their key, and children that die."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from kvterrace import Hit, KeyChain, KVLayout, Namespace, Present, Store, Stored, chain_keys, open_store
from kvterrace.types import GetOutcome, PutOutcome

ROOT = Path(__file__).resolve().parents[2]
#: One block: 4 parts of 1 KiB, in a record of two pages.
LAYOUT = KVLayout(layers=2, kv_heads=2, head_dim=16, dtype="float16", block_tokens=16)
RECORD_NBYTES = 8192
NAMESPACE = Namespace(model="model", layout=LAYOUT)

MiB = 1 << 20
_children: list[subprocess.Popen[str]] = []


def chain_of(conversation: int, blocks: int, namespace: Namespace = NAMESPACE, **options: Any) -> KeyChain:
    """The first blocks of a conversation; no two conversations share one."""
    tokens = (np.arange(blocks * namespace.layout.block_tokens) + conversation * 1_000_003) % 2**32
    return chain_keys(namespace, tokens, **options)


def bytes_of(chain: KeyChain, start: int = 0, stop: int | None = None) -> bytes:
    """The KV of these blocks."""
    nbytes = chain.namespace.layout.block_nbytes
    keys = [chain.key(index) for index in range(start, len(chain) if stop is None else stop)]
    return b"".join(hashlib.shake_128(key).digest(nbytes) for key in keys)


def opened(path: Path | list[Path] | None, **options: Any) -> Store:
    """A small store that nothing but the test drives by signals."""
    given: dict[str, Any] = {
        "dram_bytes": 4 * MiB,
        "ssd_bytes": 64 * MiB,
        "write_behind_s": 0.05,
        "sigterm_flush": False,
        **options,
    }
    return open_store(path, **given)


def put(store: Store, chain: KeyChain, start: int = 0, stop: int | None = None, **options: Any) -> list[PutOutcome]:
    """Store blocks and wait."""
    transfer = store.put(chain, bytes_of(chain, start, stop), start=start, stop=stop, **options)
    outcomes: list[Any] = store.wait(transfer, 60.0)
    return outcomes


def stored(store: Store, chain: KeyChain, **options: Any) -> None:
    """Store blocks; each must be taken."""
    outcomes = put(store, chain, **options)
    assert all(isinstance(outcome, (Stored, Present)) for outcome in outcomes), outcomes


def checked(store: Store, chain: KeyChain, **options: Any) -> list[GetOutcome]:
    """Read a whole chain: every Hit has the right bytes, of every other block the memory was not touched."""
    nbytes = chain.namespace.layout.block_nbytes
    # Off a page boundary: into memory that lies in pages the drive may read itself, whatever comes of it.
    memory = np.full(nbytes * len(chain) + 2 * 4096, 0xEE, np.uint8)
    start = -memory.ctypes.data % 4096 + 64
    out = memory[start : start + nbytes * len(chain)]
    outcomes: list[Any] = store.wait(store.get(chain, out, **options), 60.0)
    for index, outcome in enumerate(outcomes):
        found = out[index * nbytes : (index + 1) * nbytes].tobytes()
        want = bytes_of(chain, index, index + 1) if isinstance(outcome, Hit) else b"\xee" * nbytes
        assert found == want, f"block {index} ended in {outcome} with the wrong bytes"
    return outcomes


def all_hits(store: Store, chain: KeyChain) -> None:
    """Every block of the chain is there, with the right bytes."""
    outcomes = checked(store, chain)
    assert all(isinstance(outcome, Hit) for outcome in outcomes), outcomes


def seal(store: Store) -> None:
    """Have the open segment sealed, however little is in it; at the latest when the store is closed."""
    writers = store._mover.writers
    assert writers is not None
    assert store.flush(60.0)
    with store._driver.lock:
        for one in writers.each:
            one.seal_open()
        store._mover.pump()


def hits(outcomes: Iterable[object]) -> list[bool]:
    """Which of them are hits."""
    return [isinstance(outcome, Hit) for outcome in outcomes]


def segments(path: Path, partition: str = "main") -> list[Path]:
    """The segment files, oldest first."""
    return sorted((path / "partitions" / partition).glob("*.seg"))


def taken_nbytes(path: Path, partition: str = "main") -> int:
    """What a partition takes of the drive: every file in its folder."""
    total = 0
    with os.scandir(path / "partitions" / partition) as entries:
        for entry in entries:
            try:
                total += entry.stat(follow_symlinks=False).st_blocks * 512
            except FileNotFoundError:
                continue
    return total


def snapshot(path: Path) -> dict[str, str]:
    """Everything below `path`, with modes and hashes."""
    found = {}
    for each in sorted(path.rglob("*")):
        info = each.lstat()
        body = hashlib.sha256(each.read_bytes()).hexdigest() if each.is_file() else ""
        found[str(each.relative_to(path))] = f"{info.st_mode:o} {info.st_size} {body}"
    return found


def until(done: Callable[[], bool], limit_s: float = 60.0) -> None:
    """Wait for something that will come; failing it is a hang."""
    end = time.monotonic() + limit_s
    while not done():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.01)


def child(what: str, *arguments: object, **options: Any) -> subprocess.Popen[str]:
    """A process that runs `tests/crash/children.py`; it says on stdout how far it is."""
    command = [sys.executable, "-m", "tests.crash.children", what, *map(str, arguments)]
    process = subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )
    _children.append(process)
    return process


def end_children() -> None:
    """Kill what a test has left, and close its pipes."""
    while _children:
        with _children.pop() as process:
            process.kill()


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Wait for a child; its exit status and what it said."""
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err

"""Small stores on a drive for the tools' tests, and a second parser of their bytes: `struct` alone, by hand from
docs/design.md."""

from __future__ import annotations

import hashlib
import shutil
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from crc32c import crc32c

from kvterrace import KeyChain, KVLayout, Namespace, Store, Stored, chain_keys, open_store

PAGE = 4096
LAYOUT = KVLayout(layers=2, kv_heads=1, head_dim=64, dtype="float16", block_tokens=16)
BLOCK = 8192  # 2 layers x K and V x 1 head x 16 tokens x 64 x 2 B
RECORD = PAGE + BLOCK
NAMESPACE = Namespace("weights-1", LAYOUT, tenant="acme")


@dataclass(frozen=True)
class Record:
    path: Path
    offset: int
    kind: int
    put_seq: int
    namespace: bytes
    key: bytes
    depth: int
    sequence: bytes
    payload_nbytes: int
    created_unix_ns: int
    header_nbytes: int

    @property
    def nbytes(self) -> int:
        return self.header_nbytes + -(-self.payload_nbytes // PAGE) * PAGE


def chain(tokens: int, first: int = 0, namespace: Namespace = NAMESPACE) -> KeyChain:
    return chain_keys(namespace, np.arange(first, first + tokens))


def blocks_of(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, count * BLOCK, dtype=np.uint8)


def put(store: Store, keys: KeyChain, seed: int = 1, sequence: bytes = b"") -> None:
    ends = store.wait(store.put(keys, blocks_of(len(keys), seed), sequence=sequence), 20)
    assert all(isinstance(end, Stored) for end in ends), ends


def opened(root: Path, *, ssd: str = "1MiB", partition: str = "main") -> Store:
    return open_store(root, dram_bytes="1MiB", ssd_bytes=ssd, partition=partition, sigterm_flush=False)


def sealed_store(root: Path, blocks: int = 6, **options: str) -> Path:
    """One chain of `blocks` blocks, written and sealed; returns the root."""
    with opened(root, **options) as store:
        put(store, chain(16 * blocks), sequence=b"conv-1")
    return root


def crashed_store(root: Path, blocks: int = 6) -> Path:
    """The folder as a crash leaves it: copied while the store is open, its segment unsealed."""
    live = root.with_name(root.name + "-live")
    with opened(live, ssd="16MiB") as store:
        put(store, chain(16 * blocks))
        assert store.flush(20)
        shutil.copytree(live, root)
    shutil.rmtree(live)
    return root


def segments(root: Path) -> list[Path]:
    return sorted(root.glob("partitions/*/*.seg"))


def records(path: Path) -> list[Record]:
    """Every record of a segment, by its magic on page boundaries; one after the other."""
    data = path.read_bytes()
    found = []
    at = PAGE
    while at < len(data):
        if data[at : at + 8] != b"KVTRECRD":
            at += PAGE
            continue
        one = struct.unpack_from("<8sHHIIHH16sQQ32s32s32sII16sQQQII", data, at)
        record = Record(
            path, at, one[2], one[9], one[10], one[11], one[13], one[15], one[16], one[18], header_nbytes=one[3]
        )
        found.append(record)
        at += record.nbytes
    return found


def flip(path: Path, at: int, bit: int = 0) -> None:
    patch(path, at, bytes([path.read_bytes()[at] ^ (1 << bit)]))


def patch(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


def page_sum(path: Path, at: int, nbytes: int, crc_at: int) -> None:
    """Renew the CRC32C of the `nbytes` at `at`, whose own field lies `crc_at` behind."""
    data = bytearray(path.read_bytes()[at : at + nbytes])
    struct.pack_into("<I", data, crc_at, 0)
    patch(path, at + crc_at, struct.pack("<I", crc32c(bytes(data))))


def footer_sum(path: Path) -> tuple[int, int]:
    """Renew the CRCs of footer and trailer after a change; returns where footer and entries begin."""
    data = path.read_bytes()
    trailer = len(data) - PAGE
    _, footer, nbytes, _, namespaces = struct.unpack_from("<QQQII", data, trailer + 40)
    patch(path, trailer + 76, struct.pack("<I", crc32c(data[footer : footer + nbytes])))
    page_sum(path, trailer, PAGE, 12)
    return footer, footer + 32 * namespaces


def snapshot(root: Path) -> dict[str, tuple[int, int, int, str]]:
    """Everything about a folder that a reader might change."""
    return {
        str(path.relative_to(root)): (
            info.st_mode,
            info.st_size,
            info.st_mtime_ns,
            hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "",
        )
        for path in sorted(root.rglob("*"))
        for info in [path.lstat()]
    }

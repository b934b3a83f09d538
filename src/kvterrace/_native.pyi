"""The extension module (native/): an I/O engine's core, and hooks that run without the GIL."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvterrace.buffers import Bytes
from kvterrace.io.base import IoResult

class Hook:
    """What runs once on a native thread when an operation has completed. Made by the module itself.

    Engines without native threads call it like any other `finish`; it then runs on theirs, without the GIL.
    """

    def __call__(self, result: IoResult, /) -> None: ...

class Recorder(Hook):
    """For tests: how often it ran, and the last completion that it was given."""

    def __init__(self) -> None: ...
    @property
    def runs(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def error(self) -> int: ...

class FileTable:
    """Which files have a descriptor at the moment; at most `most` but for those in use."""

    def __init__(self, most: int) -> None: ...
    def __len__(self) -> int: ...

class File:
    """An open file. The descriptors that a call returns in a list are the caller's to close."""

    @staticmethod
    def adopt(table: FileTable, fd: int, path: bytes, flags: int, direct: bool, /) -> tuple[File, list[int]]:
        """Take `fd` over."""
    def hold(self) -> bool:
        """Keep it usable until `drop`; False after `close`."""
    def peek(self) -> int:
        """The descriptor of a held file, -1 if it has none now."""
    def offer(self, fd: int, /) -> tuple[int, list[int]]:
        """Give a held file a descriptor, unless it has one by now; returns the one it has."""
    def drop(self) -> list[int]: ...
    def close(self) -> list[int]: ...

#: id, bytes moved, errno, why it was refused ("" if it was not), started_s, ended_s, whether its deadline cut it short,
#: whether it has not ended yet (another row will follow)
Row = tuple[int, int, int, str, float, float, bool, bool]
#: id, kind, class, file, offset, buffers, finish (0 none, 1 hook, 2 Python), hook, seconds to the deadline
_Op = tuple[int, int, int, object, object, object, int, Hook | None, float | None]

class Core:
    """An engine without Python objects. Thread-safe; no call blocks, waiting is done on the eventfds."""

    def __init__(self, kind: str, depth: int, serial: bool) -> None:
        """`kind` is uring, posix, or, for tests, manual (bounds as uring) or manual-posix (as posix).

        Raises OSError where the kernel refuses, or has no descriptor or thread left.
        """
    def submit(self, ops: Sequence[_Op], /) -> bool:
        """False after `close`."""
    def take(self) -> tuple[list[Row], bool]:
        """What has ended, or was under way at its deadline, and whether a poll should return even with nothing."""
    def take_job(self, pool: int, /) -> Row | None: ...
    def job_done(self, number: int, /) -> None: ...
    def wake(self) -> None: ...
    def close(self) -> None: ...
    def end(self) -> bool:
        """After `close`: have the threads end. False while something is unfinished; then nothing more of it starts."""
    def join(self) -> None:
        """After `end` returned True. Short once `gone_fd` is readable."""
    def release_fds(self) -> None: ...
    def jobs_fd(self, pool: int, /) -> int: ...
    def register_memory(self, buffer: object, fd: int, /) -> None:
        """Answered by the eventfd: 2 if the kernel took it, 1 if not. The memory must outlive the core."""
    @property
    def ready_fd(self) -> int: ...
    @property
    def quiet_fd(self) -> int: ...
    @property
    def gone_fd(self) -> int:
        """Readable once all native threads have ended, after `end` returned True."""
    @property
    def bell_fd(self) -> int: ...
    @property
    def in_flight(self) -> int: ...
    @property
    def unfinished(self) -> int: ...
    @property
    def depth(self) -> int:
        """Pieces that the device is given at once now."""
    # of kind manual only: a device for tests
    def set_now(self, now_s: float, /) -> None: ...
    def pull(self) -> tuple[int, int, int, int, int] | None:
        """The next piece: its number, id of its operation, place in the file, bytes, buffers."""
    def place(self, number: int, /) -> int: ...
    def answer(self, number: int, answer: int, /) -> bool:
        """What the system call says (bytes, or -errno); whether the piece goes on."""
    def perform(self, number: int, /) -> None: ...
    def recalls(self) -> list[int]:
        """Pieces in the device whose deadline has passed since the last call."""

def keep_forever(one: object, /) -> None: ...

# Passes over records. `kvterrace.format.passes` has the words for what they find.

def crc32c(data: object, value: int = 0) -> int: ...
def crc32c_software(data: object, value: int = 0) -> int: ...
def crc32c_combine(crc_a: int, crc_b: int, nbytes_b: int) -> int: ...
def crc32c_kernel() -> str:
    """What `crc32c` runs on: sse4.2, armv8 or software."""

def copy_crc32c(dst: object, src: object, value: int = 0) -> int:
    """Copy `src` to `dst` (of one size, apart); the CRC32C of what is there then."""

def stream_crc32c(dst: object, src: object, value: int = 0) -> int:
    """The same, past the cache."""

class Claims:
    """As `kvterrace.engine.claims.Claims`."""

    def __init__(self, blocks: int) -> None: ...
    def __len__(self) -> int: ...
    def begin_copy(self, at: int) -> bool: ...
    def end_copy(self, at: int) -> None: ...
    def abandon_copy(self, at: int) -> None: ...
    def settle(self, at: int) -> bool: ...
    def give_up(self) -> list[int]: ...
    def is_open(self, at: int) -> bool: ...

class RecordShape:
    """What all records of a namespace have in common."""

    def __init__(
        self, namespace: bytes, epoch: int, header_nbytes: int, payload_nbytes: int, part_nbytes: Sequence[int]
    ) -> None:
        """`part_nbytes`: empty where the layout is not known; such records can only be promoted."""

class Places:
    """A caller's memory, part by part."""

    def __init__(
        self,
        arrays: list[object],
        part_nbytes: Sequence[int],
        first_part: int = 0,
        owner: object = None,
        rows: Sequence[int] = (),
    ) -> None:
        """`arrays`, `rows`: as `BlockBuffers.pieces` and `rows`. The arrays are kept alive, and so is `owner`: what
        their memory belongs to.

        Raises ValueError where they do not hold such parts.
        """
    def release(self) -> None:
        """Let go of the arrays and of `owner`. Only when every claim on the blocks is settled."""

class Landing:
    """A record on its way into memory, and what it must turn out to be."""

    def __init__(
        self,
        memory: object,
        shape: RecordShape,
        key: bytes,
        put_seq: int,
        nonce: bytes,
        offset: int,
        *,
        places: Places | None = None,
        block: int = 0,
        claims: Claims | None = None,
        claim: int = 0,
        parts: tuple[int, int] | None = None,
        base: int = 0,
        runs: list[Bytes] = ...,
    ) -> None:
        """`memory`: header, then the payload from its offset `base` on. `places`: None to promote only. `runs`: where
        the payload lands, if not in `memory`: memory of the caller's whose claim whoever submits the read holds.
        """
    @property
    def landed(self) -> int: ...
    @property
    def copied(self) -> bool: ...
    @property
    def fault(self) -> tuple[int, tuple[int, ...], bytes]: ...

class Copy:
    """A block on its way from a slot to the caller."""

    def __init__(
        self, slot: object, shape: RecordShape, *, places: Places, block: int, claims: Claims, claim: int
    ) -> None: ...
    @property
    def copied(self) -> bool: ...

class Fill:
    """A block on its way from the caller into a slot."""

    def __init__(
        self,
        slot: object,
        shape: RecordShape,
        key: bytes,
        parent: bytes,
        depth: int,
        sequence: bytes,
        put_seq: int,
        created_unix_ns: int,
        *,
        places: Places,
        block: int,
        claims: Claims,
        claim: int,
    ) -> None: ...
    @property
    def done(self) -> bool: ...

class ReadHook(Hook):
    """Verify what one read brought, and scatter what is right."""

    def __init__(self, items: list[Landing]) -> None: ...

class VerifyHook(Hook):
    """The same for bytes that are in memory already."""

    def __init__(self, items: list[Landing]) -> None: ...

class CopyHook(Hook):
    """Scatter blocks from their slots."""

    def __init__(self, items: list[Copy]) -> None: ...

class FillHook(Hook):
    """Gather blocks into their slots, sum them and write their headers."""

    def __init__(self, items: list[Fill]) -> None: ...

class Directory:
    """One tier's eviction policy over 64-bit keys of blocks (native/src/policy/directory.h). One thread at a time."""

    def request(
        self, keys: npt.NDArray[np.uint64], now_s: float, *, output_tokens: int = -1, extend: bool = False
    ) -> None: ...
    def inside(self, keys: npt.NDArray[np.uint64], /) -> npt.NDArray[np.bool_]: ...
    def take_evicted(self) -> npt.NDArray[np.uint64]: ...
    def evict(self, n: int, /) -> npt.NDArray[np.uint64]: ...
    def forget(self, keys: npt.NDArray[np.uint64], /) -> None: ...
    def resize(self, capacity: int, /) -> None: ...
    def __len__(self) -> int: ...
    @property
    def nbytes(self) -> int: ...

# Reference policies: plain, block by block (native/src/policy/references.h).

def reference(name: str, capacity: int) -> Directory:
    """A directory of a policy that decides without foresight. Raises ValueError: no such one, or no room in it."""

def numbered(keys: npt.NDArray[np.uint64]) -> tuple[npt.NDArray[np.uint32], int]:
    """Numbers from 0 on for keys, in the order in which they first come, and how many there are."""

class ReferenceReplay:
    """A trace against a ladder of one or two tiers (native/src/policy/replay.h). One thread at a time.

    Keeps the arrays.
    """

    def __init__(
        self,
        ids: npt.NDArray[np.uint32],
        offsets: npt.NDArray[np.uint64],
        tokens: npt.NDArray[np.uint32],
        distinct: int,
        block_tokens: int,
        policy: str,
        upper: int,
        lower: int,
    ) -> None:
        """`lower` 0: one tier. Raises ValueError: no such policy, or arrays that do not fit each other."""
    def run(self, requests: int) -> int:
        """Replay so many more; how many are left. Without the GIL."""
    def counts(self) -> dict[str, Any]:
        """As `Tally`, with `upper_` and `lower_` for the tiers."""
    @property
    def nbytes(self) -> int: ...

class ReturnIndex(Directory):
    """The default policy (native/src/policy/return_index.h): learned return times, and ARC where that does better.

    No threads, no I/O; the same calls give the same decisions. `request`: all blocks of the prompt, head first, at
    `now_s` of any clock that does not run backwards (an earlier time counts as the latest one seen); `extend`: the
    chain has grown in the turn that used it last. Raises ValueError where `now_s` is not finite.

    `depth_worth`: a use of a block with n blocks before it is worth 1 + n x depth_worth. 0 makes for most hits; for
    most time saved in the lowest tier, say how much more a block's recomputation takes for each block before it, as a
    share of the first one's. ValueError where it is negative or not finite.

    `take_evicted` names only keys that are outside when the request has ended; ask after each request. A new block may
    be among them.
    """

    def __init__(self, capacity: int, seed: int = 0, depth_worth: float = 0.0) -> None: ...
    def hint(self, key: int, kind: str, seconds: float, now_s: float) -> None:
        """What is known of the sequence whose last turn used block `key` last; unknown keys are ignored.

        `kind`: "closed" and "one_off" (not used again), "returns" (in about `seconds`), "shared" (others use the
        prefix that ends here), "priority" (for `seconds` its uses count more). A hint is forgotten at the sequence's
        next turn, and the policy learns how often each kind is true. Of a shared prefix itself only "shared" and
        "priority" say something. Raises ValueError for other kinds, times that are not finite, and `seconds` < 0.
        """
    @property
    def follows_arc(self) -> bool: ...

class KeyMap:
    """Ids by key (native/src/policy/key_map.h). `keys`: of every id, a column of the caller's, which may move between
    calls; for an id in the map its key there stays the same. Raises IndexError where an id is not in it.
    """

    def __init__(self) -> None: ...
    def put(self, ids: npt.NDArray[np.int32], keys: npt.NDArray[np.uint64]) -> None: ...
    def drop(self, ids: npt.NDArray[np.int32], keys: npt.NDArray[np.uint64]) -> None: ...
    def find(self, wanted: npt.NDArray[np.uint64], keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.int32]:
        """Of each key the id, or -1."""
    @property
    def nbytes(self) -> int: ...

class IndexDirectory(Directory):
    """The same without ARC, for tests."""

    def __init__(self, capacity: int, seed: int = 0, depth_worth: float = 0.0) -> None: ...
    def hint(self, key: int, kind: str, seconds: float, now_s: float) -> None: ...

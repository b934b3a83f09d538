"""The index as a radix tree whose nodes are runs: consecutive blocks of one chain that are looked up and age
together.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from kvterrace.engine.blocks import BlockTable, Ids
from kvterrace.keys import KEY_NBYTES, KeyChain

__all__ = ["Run", "RunTree", "Step"]


class Run:
    """A node: blocks `ids`, in chain order, `depth` being the place of the first in its chain.

    When it was last used stands in `RunTree.used_s[number]`: never longer ago than for any child, since who touches a
    run touches what it hangs on.
    """

    __slots__ = ("children", "depth", "ids", "namespace", "number", "parent", "sequence")

    def __init__(
        self, number: int, ids: Ids, *, depth: int, parent: Run | None, namespace: int, sequence: bytes
    ) -> None:
        self.number = number
        self.ids = ids
        self.depth = depth
        self.parent = parent
        self.namespace = namespace
        self.sequence = sequence
        self.children: set[Run] | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def __repr__(self) -> str:
        return f"<Run {self.number}: blocks {self.depth}..{self.depth + len(self) - 1}>"


#: One step of a walk: a run and how many of its blocks, from its first on, the chain shares.
Step = tuple[Run, int]


class RunTree:
    """Runs by the key of their first block. Keys are chained hashes, so equal keys mean equal prefixes.

    Not thread-safe: the ledger's owner serialises. Numbers of runs are reused.
    """

    def __init__(self, table: BlockTable) -> None:
        self.table = table
        self._heads: dict[bytes, Run] = {}  # by namespace and key of the first block
        self._prefixes: dict[bytes, bytes] = {}  # namespace digest -> how its keys begin in `_heads`
        self._runs: list[Run | None] = []
        self._free_numbers: list[int] = []
        #: When each run, by number, was last used (monotonic seconds).
        self.used_s: npt.NDArray[np.float64] = np.zeros(0)

    def __len__(self) -> int:
        return len(self._heads)

    def __iter__(self) -> Iterator[Run]:
        return iter(list(self._heads.values()))

    def run(self, number: int) -> Run:
        """The run with this number."""
        run = self._runs[number]
        assert run is not None, f"run {number} does not exist"
        return run

    def name(self, namespace: int, digest: bytes) -> None:
        """Chains of the namespace with this digest are those of runs with this number."""
        self._prefixes[digest] = _prefix(namespace)

    def walk(self, chain: KeyChain, stop: int | None = None) -> list[Step]:
        """Runs along `chain`, from its first block on, as far as the tree knows it (up to `stop` blocks).

        Runs of other namespaces are not seen, whatever their keys.
        """
        data, heads = chain.data, self._heads
        prefix = self._prefixes.get(chain.namespace.digest)
        if prefix is None:
            return []
        limit = len(chain) if stop is None else min(stop, len(chain))
        steps: list[Step] = []
        at = 0
        while at < limit:
            run = heads.get(prefix + data[at * KEY_NBYTES : (at + 1) * KEY_NBYTES])
            if run is None:
                break
            whole = len(run.ids)
            shared = 1 if whole == 1 else self._shared(run, data, at, limit)
            steps.append((run, shared))
            at += shared
            if shared < whole:
                break
        return steps

    def _shared(self, run: Run, data: bytes, at: int, limit: int) -> int:
        count = min(len(run), limit - at)
        if count == 1:
            return 1
        mine = self.table.key[run.ids[:count]]
        if mine.tobytes() == data[at * KEY_NBYTES : (at + count) * KEY_NBYTES]:
            return count
        theirs = np.frombuffer(data, np.uint8, count * KEY_NBYTES, at * KEY_NBYTES).reshape(count, KEY_NBYTES)
        return int(np.argmin((mine == theirs).all(axis=1)))

    def append(
        self, parent: Run | None, keys: bytes, *, namespace: int, sequence: bytes, depth: int, now_s: float
    ) -> tuple[Run, Ids]:
        """New blocks after the whole of `parent` (None: at the root). A childless parent of the same sequence grows
        instead.

        Returns the run that holds them and their ids. Columns other than `key` and `run` are at their start.
        """
        count = len(keys) // KEY_NBYTES
        ids = self.table.allocate(count)
        self.table.key[ids] = np.frombuffer(keys, np.uint8).reshape(count, KEY_NBYTES)
        if parent is not None and not parent.children and parent.sequence == sequence:
            parent.ids = np.concatenate([parent.ids, ids])
            self.table.run[ids] = parent.number
            return parent, ids
        run = self._new(ids, depth=depth, parent=parent, namespace=namespace, sequence=sequence, now_s=now_s)
        return run, ids

    def adopt(self, ids: Ids, *, parent: Run | None, namespace: int, sequence: bytes, depth: int, now_s: float) -> Run:
        """A run of ids that exist already (recovery)."""
        return self._new(ids, depth=depth, parent=parent, namespace=namespace, sequence=sequence, now_s=now_s)

    def _new(self, ids: Ids, *, depth: int, parent: Run | None, namespace: int, sequence: bytes, now_s: float) -> Run:
        number = self._free_numbers.pop() if self._free_numbers else len(self._runs)
        run = Run(number, ids, depth=depth, parent=parent, namespace=namespace, sequence=sequence)
        if number == len(self._runs):
            self._runs.append(run)
        else:
            self._runs[number] = run
        if number >= len(self.used_s):
            self.used_s = np.concatenate([self.used_s, np.zeros(max(1024, len(self.used_s) // 4))])
        self.used_s[number] = now_s
        head = self._head(run)
        assert head not in self._heads, "two runs begin with one key"
        self._heads[head] = run
        self.table.run[ids] = number
        if parent is not None:
            if parent.children is None:
                parent.children = set()
            parent.children.add(run)
        return run

    def _head(self, run: Run) -> bytes:
        return _prefix(run.namespace) + bytes(self.table.key[run.ids[0]])

    def split(self, run: Run, at: int) -> Run:
        """Cut `run` before its block `at`. `run` stays the head; returns the new tail, which takes the children
        over.
        """
        assert 0 < at < len(run), f"{run!r} cannot be cut at {at}"
        tail_ids = run.ids[at:].copy()
        run.ids = run.ids[:at].copy()
        children, run.children = run.children, None
        used_s = float(self.used_s[run.number])
        tail = self._new(
            tail_ids, depth=run.depth + at, parent=run, namespace=run.namespace, sequence=run.sequence, now_s=used_s
        )
        tail.children = children
        for child in children or ():
            child.parent = tail
        return tail

    def trim(self, run: Run, keep: int) -> Ids:
        """Forget the blocks of a childless run from `keep` on (0: the whole run); returns their ids, not yet
        released.
        """
        assert not run.children, f"{run!r} has children"
        gone = run.ids[keep:]
        if keep:
            run.ids = run.ids[:keep].copy()
            return gone
        del self._heads[self._head(run)]
        if run.parent is not None and run.parent.children is not None:
            run.parent.children.discard(run)
            if not run.parent.children:
                run.parent.children = None
        self._runs[run.number] = None
        self._free_numbers.append(run.number)
        run.ids = gone[:0]
        return gone

    def lineage(self, run: Run) -> list[Run]:
        """`run` and what it hangs on, leaf first."""
        line: list[Run] = []
        at: Run | None = run
        while at is not None:
            line.append(at)
            at = at.parent
        return line

    def below(self, run: Run) -> list[Run]:
        """Every run that hangs on `run`, parents before children; without `run` itself."""
        found: list[Run] = []
        todo = list(run.children or ())
        while todo:
            child = todo.pop()
            found.append(child)
            todo.extend(child.children or ())
        return found


def _prefix(namespace: int) -> bytes:
    return namespace.to_bytes(4, "little")

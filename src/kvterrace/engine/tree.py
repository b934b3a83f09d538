"""The index as a radix tree whose nodes are runs: consecutive blocks of one chain that are looked up and age
together.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import numpy as np
import numpy.typing as npt

from kvterrace.engine.blocks import BlockTable, Ids
from kvterrace.engine.sequences import SequenceRuns
from kvterrace.keys import KEY_NBYTES, KeyChain

__all__ = ["Run", "RunTree", "Step", "ids_of"]


class Run:
    """A node: blocks `ids`, in chain order, `depth` being the place of the first in its chain.

    When it was last used stands in `RunTree.used_s[number]`: never longer ago than for any child, since who touches a
    run touches what it hangs on.
    """

    __slots__ = ("_children", "depth", "ids", "namespace", "number", "parent", "sequence")

    def __init__(
        self, number: int, ids: Ids, *, depth: int, parent: Run | None, namespace: int, sequence: bytes
    ) -> None:
        self.number = number
        self.ids = ids
        self.depth = depth
        self.parent = parent
        self.namespace = namespace
        self.sequence = sequence
        self._children: Run | set[Run] | None = None  # a set only for several: of most runs hangs one, or none

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def children(self) -> Collection[Run]:
        """Runs that hang on the last block."""
        if self._children is None:
            return ()
        return (self._children,) if isinstance(self._children, Run) else self._children

    def _adopt(self, child: Run) -> None:
        if self._children is None:
            self._children = child
        elif isinstance(self._children, Run):
            self._children = {self._children, child}
        else:
            self._children.add(child)

    def _disown(self, child: Run) -> None:
        if isinstance(self._children, set):
            self._children.remove(child)
            if len(self._children) == 1:
                self._children = next(iter(self._children))
        else:
            assert self._children is child, f"{child!r} does not hang on {self!r}"
            self._children = None

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
        self._heads: dict[int, dict[bytes, Run]] = {}  # by namespace, then by the key of the first block
        self._named: dict[bytes, dict[bytes, Run]] = {}  # the same, by the digest of the namespace
        self._runs: list[Run | None] = []
        self._free_numbers: list[int] = []
        #: The last stretch that was compared, and was the same: a put walks its chain several times. A run's array of
        #: ids is never changed, only replaced, and a block keeps its key while it is in one.
        self._seen: tuple[Ids, bytes, int, int] = (np.zeros(0, np.int32), b"", 0, 0)
        #: When each run, by number, was last used (monotonic seconds).
        self.used_s: npt.NDArray[np.float64] = np.zeros(0)
        #: Namespace of each run, by number.
        self.namespaces: Ids = np.zeros(0, np.int32)
        self.sequences = SequenceRuns()

    def __len__(self) -> int:
        return len(self._runs) - len(self._free_numbers)

    def __iter__(self) -> Iterator[Run]:
        return iter([run for run in self._runs if run is not None])

    @property
    def numbers(self) -> int:
        """Every run's number is below this."""
        return len(self._runs)

    def run(self, number: int) -> Run:
        """The run with this number."""
        run = self._runs[number]
        assert run is not None, f"run {number} does not exist"
        return run

    def run_of(self, block: int) -> Run:
        """The run that a block belongs to."""
        return self.run(int(self.table.run[block]))

    def name(self, namespace: int, digest: bytes) -> None:
        """Chains of the namespace with this digest are those of runs with this number."""
        self._named[digest] = self._heads.setdefault(namespace, {})

    def walk(self, chain: KeyChain, stop: int | None = None) -> list[Step]:
        """Runs along `chain`, from its first block on, as far as the tree knows it (up to `stop` blocks).

        Runs of other namespaces are not seen, whatever their keys.
        """
        data, heads = chain.data, self._named.get(chain.namespace.digest)
        if heads is None:
            return []
        limit = len(chain) if stop is None else min(stop, len(chain))
        steps: list[Step] = []
        at = 0
        while at < limit:
            run = heads.get(data[at * KEY_NBYTES : (at + 1) * KEY_NBYTES])
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
        ids, seen, place, same = self._seen
        if ids is run.ids and seen is data and place == at and count <= same:
            return count
        mine = self.table.key[run.ids[:count]]
        if mine.tobytes() == data[at * KEY_NBYTES : (at + count) * KEY_NBYTES]:
            self._seen = run.ids, data, at, count
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

    def plant(
        self,
        ids: Ids,
        starts: npt.NDArray[np.int64],
        *,
        parents: list[int],
        namespaces: list[int],
        sequences: list[bytes],
        depths: list[int],
        used_s: npt.NDArray[np.float64],
    ) -> None:
        """Many runs at once, of ids that exist already and have their keys (recovery).

        Run `i` is `ids[starts[i]:starts[i + 1]]` and hangs on run `parents[i]` of these, which comes before it (-1: at
        the root). The tree keeps views of `ids`.
        """
        count, base = len(starts), len(self._runs)
        keys = self.table.key[ids[starts]].tobytes()
        stops = np.append(starts[1:], len(ids))
        self.table.run[ids] = np.repeat(np.arange(base, base + count, dtype=np.int32), stops - starts)
        self.used_s = np.concatenate([self.used_s[:base], used_s])
        self.namespaces = np.concatenate([self.namespaces[:base], np.array(namespaces, np.int32)])
        heads = {number: self._heads.setdefault(number, {}) for number in set(namespaces)}
        runs = self._runs
        columns = zip(starts.tolist(), stops.tolist(), parents, namespaces, sequences, depths, strict=True)
        for number, (start, stop, above, namespace, sequence, depth) in enumerate(columns, base):
            parent = None if above < 0 else runs[base + above]
            run = Run(number, ids[start:stop], depth=depth, parent=parent, namespace=namespace, sequence=sequence)
            runs.append(run)
            self.sequences.add(run)
            if parent is not None:
                parent._adopt(run)  # noqa: SLF001 - the tree is of runs
            at = (number - base) * KEY_NBYTES
            heads[namespace][keys[at : at + KEY_NBYTES]] = run
        assert sum(map(len, self._heads.values())) == len(self), "two runs begin with one key"

    def _new(self, ids: Ids, *, depth: int, parent: Run | None, namespace: int, sequence: bytes, now_s: float) -> Run:
        number = self._free_numbers.pop() if self._free_numbers else len(self._runs)
        run = Run(number, ids, depth=depth, parent=parent, namespace=namespace, sequence=sequence)
        if number == len(self._runs):
            self._runs.append(run)
        else:
            self._runs[number] = run
        if number >= len(self.used_s):
            more = max(1024, len(self.used_s) // 4)
            self.used_s = np.concatenate([self.used_s, np.zeros(more)])
            self.namespaces = np.concatenate([self.namespaces, np.zeros(more, np.int32)])
        self.used_s[number] = now_s
        self.namespaces[number] = namespace
        heads, head = self._heads.setdefault(namespace, {}), self._head(run)
        assert head not in heads, "two runs begin with one key"
        heads[head] = run
        self.sequences.add(run)
        self.table.run[ids] = number
        if parent is not None:
            parent._adopt(run)  # noqa: SLF001 - the tree is of runs
        return run

    def _head(self, run: Run) -> bytes:
        return bytes(self.table.key[run.ids[0]])

    def split(self, run: Run, at: int) -> Run:
        """Cut `run` before its block `at`. `run` stays the head; returns the new tail, which takes the children
        over.
        """
        assert 0 < at < len(run), f"{run!r} cannot be cut at {at}"
        tail_ids, run.ids = run.ids[at:].copy(), _first(run.ids, at)
        children, run._children = run._children, None  # noqa: SLF001 - as above
        used_s = float(self.used_s[run.number])
        tail = self._new(
            tail_ids, depth=run.depth + at, parent=run, namespace=run.namespace, sequence=run.sequence, now_s=used_s
        )
        tail._children = children  # noqa: SLF001 - as above
        for child in tail.children:
            child.parent = tail
        return tail

    def trim(self, run: Run, keep: int) -> Ids:
        """Forget the blocks of a childless run from `keep` on (0: the whole run); returns their ids, not yet
        released.
        """
        assert not run.children, f"{run!r} has children"
        gone = run.ids[keep:]
        if keep:
            run.ids = _first(run.ids, keep)
            return gone
        del self._heads[run.namespace][self._head(run)]
        self.sequences.remove(run)
        if run.parent is not None:
            run.parent._disown(run)  # noqa: SLF001 - as above
        self._runs[run.number] = None
        self._free_numbers.append(run.number)
        run.ids = gone[:0]
        return gone

    def lineage_of(self, number: int) -> list[Run]:
        """As `lineage`, of the run with this number."""
        return self.lineage(self.run(number))

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
        todo = list(run.children)
        while todo:
            child = todo.pop()
            found.append(child)
            todo.extend(child.children)
        return found


def _first(ids: Ids, count: int) -> Ids:
    """The first `count` of `ids`, in memory of their own once that is less than half of what they lie in: cutting a run
    down bit by bit must not copy it each time.
    """
    kept = ids[:count]
    whole = ids if ids.base is None else ids.base
    return kept.copy() if 2 * kept.nbytes < whole.nbytes else kept


def ids_of(steps: list[Step]) -> Ids:
    """The blocks that a walk has come along."""
    if not steps:
        return np.zeros(0, np.int32)
    if len(steps) == 1:
        return steps[0][0].ids[: steps[0][1]]
    last, count = steps[-1]  # of all before it, the chain shares the whole run
    return np.concatenate([*(run.ids for run, _ in steps[:-1]), last.ids[:count]])

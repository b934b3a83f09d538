"""The index and the eviction order against models that are slow and plain."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvterrace.engine.blocks import NOWHERE, BlockTable
from kvterrace.engine.tree import Run, RunTree
from kvterrace.keys import KEY_NBYTES, KeyChain, Namespace
from kvterrace.layout import KVLayout
from kvterrace.policy.eviction import LruTailFirst

_NAMESPACE = Namespace("m", KVLayout(layers=1, kv_heads=1, head_dim=1, dtype="int8", block_tokens=1))

Path = tuple[int, ...]
_paths = st.lists(st.integers(0, 2), min_size=1, max_size=9).map(tuple)


def _chain(path: Path) -> KeyChain:
    """A chain whose keys are the prefixes themselves, spelt out: no hash that model and tree could share."""
    keys = b"".join(bytes([1, *path[: n + 1]]).ljust(KEY_NBYTES, b"\xff") for n in range(len(path)))
    return KeyChain(_NAMESPACE, b"\0" * KEY_NBYTES, keys)


class TreeMachine(RuleBasedStateMachine):
    """`RunTree` against a dict from each known prefix to its block."""

    def __init__(self) -> None:
        super().__init__()
        self.table = BlockTable()
        self.tree = RunTree(self.table)
        self.tree.name(0, _NAMESPACE.digest)
        self.blocks: dict[Path, int] = {}

    def known(self, path: Path) -> int:
        count = 0
        while count < len(path) and path[: count + 1] in self.blocks:
            count += 1
        return count

    def run_of(self, path: Path) -> tuple[Run, int]:
        block = self.blocks[path]
        run = self.tree.run(int(self.table.run[block]))
        return run, run.ids.tolist().index(block)

    @rule(path=_paths, sequence=st.sampled_from([b"a", b"b"]))
    def append(self, path: Path, sequence: bytes) -> None:
        at = self.known(path)
        if at == len(path):
            return
        parent = None
        if at:
            parent, place = self.run_of(path[:at])
            if place + 1 < len(parent):
                self.tree.split(parent, place + 1)
        keys = _chain(path).data[at * KEY_NBYTES :]
        run, ids = self.tree.append(parent, keys, namespace=0, sequence=sequence, depth=at, now_s=1.0)
        for n, block in enumerate(ids.tolist()):
            assert block not in self.blocks.values()
            self.blocks[path[: at + n + 1]] = block
        assert run.ids[-len(ids) :].tolist() == ids.tolist()

    @precondition(lambda self: self.blocks)
    @rule(data=st.data())
    def split(self, data: st.DataObject) -> None:
        path = data.draw(st.sampled_from(sorted(self.blocks)))
        run, place = self.run_of(path)
        if place:
            children = set(run.children)
            tail = self.tree.split(run, place)
            assert tail.parent is run and set(run.children) == {tail}
            assert set(tail.children) == children
            assert len(run) == place

    @precondition(lambda self: self.blocks)
    @rule(data=st.data())
    def trim(self, data: st.DataObject) -> None:
        """Cut the end off a run without children."""
        leaves = [path for path in self.blocks if not any(other[:-1] == path for other in self.blocks)]
        path = data.draw(st.sampled_from(sorted(leaves)))
        run, place = self.run_of(path)
        keep = data.draw(st.integers(0, place))
        first = len(path) - 1 - place
        gone = self.tree.trim(run, keep)
        lost = [path[: first + n + 1] for n in range(keep, len(gone) + keep)]
        assert gone.tolist() == [self.blocks.pop(one) for one in lost]
        self.table.release(gone)

    @rule(path=_paths, data=st.data())
    def walk(self, path: Path, data: st.DataObject) -> None:
        stop = data.draw(st.one_of(st.none(), st.integers(0, 10)))
        steps = self.tree.walk(_chain(path), stop)
        found = [block for run, count in steps for block in run.ids[:count].tolist()]
        limit = len(path) if stop is None else min(stop, len(path))
        assert found == [self.blocks[path[: n + 1]] for n in range(min(limit, self.known(path)))]
        for (above, count), (below, _) in itertools.pairwise(steps):
            assert count == len(above) and below.parent is above
        if steps:
            assert self.tree.lineage(steps[-1][0])[::-1] == [run for run, _ in steps]

    @precondition(lambda self: self.blocks)
    @rule(data=st.data())
    def below(self, data: st.DataObject) -> None:
        path = data.draw(st.sampled_from(sorted(self.blocks)))
        run, _ = self.run_of(path)
        end = next(other for other, block in self.blocks.items() if block == int(run.ids[-1]))
        hanging = {block for other, block in self.blocks.items() if len(other) > len(end) and other[: len(end)] == end}
        runs = self.tree.below(run)
        assert {block for one in runs for block in one.ids.tolist()} == hanging
        seen = {run}
        for one in runs:
            assert one.parent in seen, "a child before its parent"
            seen.add(one)

    @invariant()
    def whole(self) -> None:
        ids = sorted(block for run in self.tree for block in run.ids.tolist())
        assert ids == sorted(self.blocks.values())
        assert self.table.used == len(ids)
        assert len(self.tree) == len(list(self.tree))
        for path, block in self.blocks.items():
            assert bytes(self.table.key[block]) == _chain(path).key(len(path) - 1)
            run, place = self.run_of(path)
            assert run.depth + place == len(path) - 1
        assert int(np.count_nonzero(self.table.run != NOWHERE)) == len(ids)


TestTree = TreeMachine.TestCase
TestTree.settings = settings(max_examples=100, stateful_step_count=30)


_ids = st.lists(st.integers(0, 8), max_size=6, unique=True)
_steps = st.lists(
    st.one_of(
        st.tuples(st.just("request"), _ids),
        st.tuples(st.just("forget"), _ids),
        st.tuples(st.just("evict"), st.integers(0, 4)),
    ),
    max_size=60,
)


@given(_steps)
@settings(max_examples=300)
def test_lru_is_a_list_from_the_least_to_the_most_recently_used(steps: list[tuple[str, object]]) -> None:
    policy = LruTailFirst()
    model: list[int] = []
    column = np.arange(9, dtype=np.uint64)
    for what, arg in steps:
        if what == "evict" and isinstance(arg, int):
            assert policy.evict(arg, column).tolist() == model[:arg]
            model = model[arg:]
        elif isinstance(arg, list):
            ids = np.array(arg, np.int32)
            model = [one for one in model if one not in arg]
            if what == "request":
                assert len(policy.request(column, ids, column, 0.0, extend=False)) == 0
                model += arg[::-1]  # what a block hangs on is younger than the block
            else:
                policy.forget(ids, column)
        assert policy.inside(np.arange(9, dtype=np.int32), column).tolist() == [one in model for one in range(9)]
    assert policy.evict(100, column).tolist() == model

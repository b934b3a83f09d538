"""What the ledger tells a policy, and what it makes of the answers. Policies here are lists; the clock is a number."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tests.harness import LARGE, SMALL, chain_of
from tests.unit.test_sim import conversations

from kvterrace.engine import reclaim
from kvterrace.engine.blocks import DramState, Ids, Keys
from kvterrace.engine.ledger import Geometry, Ledger
from kvterrace.engine.space import Segment, SegmentSpace, SegmentState
from kvterrace.format import passes
from kvterrace.keys import KEY_NBYTES, KeyChain
from kvterrace.policy.directories import DirectoryPolicy, default_policy
from kvterrace.policy.eviction import LruTailFirst
from kvterrace.sim.ladder import LedgerLadder
from kvterrace.testing.invariants import check_ledger
from kvterrace.types import Hint, Tier

RECORD = 8192

module = passes.native()
needs_module = pytest.mark.skipif(module is None, reason="the extension module is not there")


class FirstComeFirstKept:
    """Keeps what came first, and never more than fits: what comes to a full tier leaves at once."""

    name = "first"

    def __init__(self) -> None:
        self.capacity = 0
        self.kept: list[int] = []  # short keys
        self.ids: dict[int, int] = {}
        self.told: list[tuple[list[int], bool]] = []  # of each request its keys, and whether it went on with another
        self.nbytes = 0

    def request(self, chain: Keys, ids: Ids, keys: Keys, now_s: float, *, extend: bool, output_tokens: int = -1) -> Ids:
        self.told.append((chain.tolist(), extend))
        self.enter(ids, keys)
        self.kept += [key for key in chain.tolist() if key not in self.kept]
        gone, self.kept = self.kept[self.capacity :], self.kept[: self.capacity]
        return np.array([self.ids[key] for key in gone if key in self.ids], np.int32)

    def enter(self, ids: Ids, keys: Keys) -> None:
        self.ids.update(zip(keys[ids].tolist(), ids.tolist(), strict=True))

    def evict(self, count: int, keys: Keys) -> Ids:
        at = max(0, len(self.kept) - count)
        gone, self.kept = self.kept[at:][::-1], self.kept[:at]
        return np.array([self.ids[key] for key in gone if key in self.ids], np.int32)

    def inside(self, ids: Ids, keys: Keys) -> npt.NDArray[np.bool_]:
        return np.isin(keys[ids], np.array(self.kept, np.uint64))

    def forget(self, ids: Ids, keys: Keys) -> None:
        gone = set(keys[ids].tolist())
        self.kept = [key for key in self.kept if key not in gone]

    def resize(self, capacity: int) -> None:
        self.capacity = capacity


def make(policy: FirstComeFirstKept | LruTailFirst | None = None, dram_blocks: int = 8, segments: int = 0) -> Ledger:
    size = 10 * RECORD
    space = SegmentSpace(segments * size, size, lambda records, namespaces: 4096) if segments else None
    ssd_policy = FirstComeFirstKept() if segments else None
    ledger = Ledger(dram_blocks * RECORD, space, policy=policy, ssd_policy=ssd_policy)
    ledger.add_namespace(0, Geometry(4096, 256), SMALL.digest)
    return ledger


def put(ledger: Ledger, chain: KeyChain, now_s: float, start: int = 0) -> Ids:
    ids, _ = ledger.begin_put(chain, start, len(chain), namespace=0, sequence=b"", now_s=now_s)
    ledger.filled_all(ids, now_s)
    ledger.let_go_all(ids)
    check_ledger(ledger)
    return ids


def tiers(ledger: Ledger, chain: KeyChain) -> list[Tier]:
    return ledger.resident(ledger.find(chain))


A, B, C = (chain_of(SMALL, [number] * 4) for number in range(3))
EIGHT = chain_of(SMALL, [9] * 8)
LONG = chain_of(SMALL, [0] * 6)


def keys_in_dram(ledger: Ledger) -> set[bytes]:
    return {ledger.key_of(block) for block in np.flatnonzero(ledger.table.slot >= 0).tolist()}


def short_keys(chain: KeyChain) -> list[int]:
    return [int.from_bytes(chain.key(at)[:8], "little") for at in range(len(chain))]


def test_dram_alone_takes_no_more_than_the_policy_wants_and_what_is_free() -> None:
    policy = FirstComeFirstKept()
    ledger = make(policy, dram_blocks=6)
    assert len(put(ledger, A, 0.0)) == 4 and ledger.turned_away == 0
    assert len(put(ledger, B, 1.0)) == 2 and ledger.turned_away == 2
    assert (tiers(ledger, A), tiers(ledger, B)) == ([Tier.DRAM] * 4, [Tier.DRAM] * 2)
    assert len(put(ledger, C, 2.0)) == 0 and ledger.turned_away == 4
    assert ledger.table.used == 6 and ledger.dropped_blocks == 0


def test_over_an_ssd_what_the_policy_does_not_want_is_written_and_goes_first() -> None:
    policy = FirstComeFirstKept()
    ledger = make(policy, dram_blocks=8, segments=16)
    open_segment(ledger)
    put(ledger, A, 0.0)
    put(ledger, B, 1.0)
    batch = ledger.next_write(2.0, pressed=True)
    assert batch is not None
    ledger.written(batch)
    assert len(put(ledger, C, 3.0)) == 4 and policy.capacity == 8
    check_ledger(ledger)
    # C came to a full tier: it is in the line already; room for it was made from the end of B
    assert ledger.dram.line.ids().tolist() == ledger.find(C).tolist()
    assert tiers(ledger, B) == [Tier.SSD] * 4 and tiers(ledger, A) == [Tier.DRAM] * 4


@pytest.mark.parametrize("hold", ["users", "pins"])
def test_what_leaves_and_is_in_use_waits_and_goes_first_then(hold: str) -> None:
    ledger = make(dram_blocks=8)
    a = put(ledger, A, 0.0)
    put(ledger, B, 1.0)
    (ledger.hold if hold == "users" else ledger.pin)(a[2:3])
    put(ledger, chain_of(SMALL, [7]), 2.0)
    assert tiers(ledger, A) == [Tier.DRAM] * 3, "the oldest that may go"
    put(ledger, chain_of(SMALL, [8]), 3.0)
    assert ledger.table.state[a[2]] == DramState.READY, "it stays, whatever goes before it"
    assert ledger.dram.line.ids()[0] == a[2], "the first in line"
    (ledger.let_go_all if hold == "users" else ledger.unpin)(a[2:3])
    check_ledger(ledger)
    assert A.key(2) in keys_in_dram(ledger)
    put(ledger, chain_of(SMALL, [9]), 4.0)
    assert keys_in_dram(ledger) == {A.key(0), *B, *(chain_of(SMALL, [last]).key(0) for last in (7, 8, 9))}


def test_what_is_used_again_leaves_no_longer() -> None:
    ledger = make(dram_blocks=8)
    a = put(ledger, A, 0.0)
    put(ledger, B, 1.0)
    ledger.pin(a)
    put(ledger, chain_of(SMALL, [7]), 2.0)  # A is asked to leave, and cannot
    assert set(a.tolist()) & set(ledger.dram.line.ids().tolist())
    ledger.touch(A, 4, 3.0)
    assert not set(a.tolist()) & set(ledger.dram.line.ids().tolist())
    ledger.unpin(a)
    check_ledger(ledger)
    put(ledger, chain_of(SMALL, [8]), 4.0)
    assert tiers(ledger, A) == [Tier.DRAM] * 4


def test_get_and_put_of_a_prompt_are_one_turn() -> None:
    policy = FirstComeFirstKept()
    ledger = make(policy, dram_blocks=20)
    put(ledger, A, 0.0)
    assert policy.told == [(short_keys(A), False)]
    policy.told.clear()
    ledger.touch(LONG, 4, 1.0)  # a get of what is there of a longer prompt
    put(ledger, LONG, 1.5, start=4)
    assert policy.told == [(short_keys(LONG), False)], "the whole prompt, once"
    policy.told.clear()
    ledger.touch(LONG, 6, 2.0)
    ledger.touch(LONG, 6, 3.0)
    assert policy.told == [(short_keys(LONG), False)] * 2, "asked for twice"


def test_a_put_behind_what_was_got_extends_the_turn_for_a_minute() -> None:
    for later_s, extend in ((1.5, True), (62.0, False)):
        policy = FirstComeFirstKept()
        ledger = make(policy, dram_blocks=20)
        put(ledger, A, 0.0)
        policy.told.clear()
        ledger.touch(A, 4, 1.0)
        put(ledger, LONG, later_s, start=4)
        assert policy.told == [(short_keys(A), False), (short_keys(LONG), extend)]


def test_a_prompt_that_was_dropped_is_told_of_anew() -> None:
    policy = FirstComeFirstKept()
    ledger = make(policy, dram_blocks=20)
    for _ in range(2):
        ids = put(ledger, A, 0.0)
        ledger.forget(int(ids[0]))
    assert policy.told == [(short_keys(A), False)] * 2


def test_two_blocks_of_one_short_key_can_both_be_given_up() -> None:
    """A directory takes them for one; none of them may hold its slot for ever."""
    keys = [bytes([1] * 8 + [last] * (KEY_NBYTES - 8)) for last in (1, 2)]
    chains = [KeyChain(SMALL, bytes(KEY_NBYTES), key) for key in keys]
    policy = default_policy()
    ledger = Ledger(2 * RECORD, None, policy=policy)
    ledger.add_namespace(0, Geometry(4096, 256), SMALL.digest)
    for chain in chains:
        ids, _ = ledger.begin_put(chain, 0, 1, namespace=0, sequence=b"", now_s=0.0)
        assert len(ids) == 1
        ledger.filled_all(ids, 0.0)
        ledger.let_go_all(ids)
    offsets = [ledger.reserve_extent(RECORD) for _ in range(3)]
    assert sorted(one for one in offsets if one is not None) == [0, RECORD]
    assert ledger.table.used == 0


@needs_module
def test_who_asks_for_the_head_of_a_prompt_keeps_the_rest_of_it() -> None:
    """The policy hears of the whole prompt, so what is there of it leaves no longer, whatever part is asked for."""
    ledger = make(default_policy(), dram_blocks=6)  # type: ignore[arg-type]
    put(ledger, A, 0.0)
    ledger.dram.line.add(ledger.dram.policy.evict(len(A), ledger.table.words))
    assert ledger.table.leaving[ledger.find(A)].all()
    ledger.touch(A, 2, 5.0)
    assert not ledger.table.leaving[ledger.find(A)].any()
    check_ledger(ledger)


@needs_module
@pytest.mark.parametrize("seed", range(8))
def test_blocks_of_two_sizes_are_each_inside_or_leaving(seed: int) -> None:
    """The capacity in blocks follows their sizes, so that a policy lets go of some before a prompt comes."""
    rng, now_s = random.Random(seed), 0.0
    ledger = Ledger(24 * RECORD, None, policy=default_policy())
    ledger.add_namespace(0, Geometry(4096, 256), SMALL.digest)
    ledger.add_namespace(1, Geometry(4096, 12288), LARGE.digest)
    for step in range(150):
        now_s += 30.0 * rng.random()
        number = rng.randrange(2) if step % 60 < 30 else step // 60 % 2
        path = [rng.randrange(4), *(int(rng.random() < 0.1) for _ in range(rng.randrange(19)))]
        chain = chain_of((SMALL, LARGE)[number], path)
        ledger.touch(chain, rng.randrange(len(chain) + 1), now_s, put=rng.random() < 0.6)
        known = len(ledger.find(chain))
        if known < len(chain):
            ids, _ = ledger.begin_put(chain, known, len(chain), namespace=number, sequence=b"", now_s=now_s)
            ledger.filled_all(ids, now_s)
            ledger.let_go_all(ids)
        check_ledger(ledger)


@pytest.mark.parametrize("sequence", [b"a", b"b"])
def test_what_a_put_hangs_on_stays_though_it_is_not_worth_a_write(sequence: bytes) -> None:
    """What hangs on it would be forgotten with it, while the put fills it; and nothing else has to go first."""
    ledger = make(dram_blocks=8, segments=4)
    open_segment(ledger)
    ids, _ = ledger.begin_put(EIGHT, 0, 4, namespace=0, sequence=b"a", now_s=0.0)
    ledger.filled_all(ids, 0.0)
    ledger.let_go_all(ids)
    ledger.hint(b"a", Hint.CLOSED, None, 1.0)
    assert ledger.next_write(10.0, pressed=True) is None and ledger.table.spent[ids].all()
    put(ledger, B, 11.0)
    more, _ = ledger.begin_put(EIGHT, 4, 8, namespace=0, sequence=sequence, now_s=12.0)
    check_ledger(ledger)
    assert not len(more) and tiers(ledger, EIGHT) == [Tier.DRAM] * 4
    while (batch := ledger.next_write(20.0, pressed=True)) is not None:  # so that their slots can go
        ledger.written(batch)
    check_ledger(ledger)
    more, _ = ledger.begin_put(EIGHT, 4, 8, namespace=0, sequence=sequence, now_s=21.0)
    ledger.filled_all(more, 21.0)
    ledger.let_go_all(more)
    check_ledger(ledger)
    assert len(more) == 4 and len(tiers(ledger, EIGHT)) == 8 and len(tiers(ledger, B)) == 4


def test_a_prompt_that_is_only_put_is_used_each_time() -> None:
    policy = FirstComeFirstKept()
    ledger = make(dram_blocks=16, policy=policy)
    put(ledger, EIGHT, 0.0)
    told = len(policy.told)
    for now_s in (1.0, 2.0, 3.0):
        ledger.touch(EIGHT, len(EIGHT), now_s, put=True)
    assert [keys for keys, _ in policy.told[told:]] == [policy.told[0][0]] * 3


# -- the SSD's order ---------------------------------------------------------------------------------------------------


def open_segment(ledger: Ledger) -> Segment:
    assert ledger.space is not None
    segment = ledger.space.begin()
    segment.state = SegmentState.OPEN
    ledger.space.open = segment
    return segment


def sealed(ledger: Ledger, chain: KeyChain, now_s: float) -> Segment:
    """`chain` in a segment of its own, and not in DRAM."""
    segment = open_segment(ledger)
    put(ledger, chain, now_s)
    batch = ledger.next_write(now_s, pressed=True)
    assert batch is not None and ledger.space is not None
    ledger.written(batch)
    segment.state = SegmentState.SEALED
    ledger.space.open = None
    ledger.evict_idle()
    check_ledger(ledger)
    return segment


def test_the_segment_of_which_less_would_be_kept_goes_and_what_would_be_is_carried() -> None:
    ledger = make(dram_blocks=8, segments=6)
    first, second = sealed(ledger, A, 0.0), sealed(ledger, B, 0.0)
    order = ledger.ssd_order
    assert order is not None and isinstance(order.policy, FirstComeFirstKept)
    assert [int(one._space.columns.kept_blocks[one.row]) for one in (first, second)] == [4, 4]
    found = reclaim.choose(ledger, 100.0)
    assert found is not None and found[0] is first
    order.policy.kept = short_keys(A) + short_keys(B)[:1]
    order._mark(ledger.find(B)[1:], kept=False)
    check_ledger(ledger)
    assert int(second._space.columns.kept_blocks[second.row]) == 1
    found = reclaim.choose(ledger, 100.0)
    assert found is not None and found[0] is second
    assert found[1].tolist() == ledger.find(B)[:1].tolist(), "a quarter of four records: what would be kept"
    reclaim.give_up(ledger, second, np.zeros(0, np.int32), 100.0)
    check_ledger(ledger)
    assert tiers(ledger, B) == [] and tiers(ledger, A) == [Tier.SSD] * 4


def test_what_is_forgotten_is_not_kept() -> None:
    ledger = make(dram_blocks=8, segments=6)
    sealed(ledger, A, 0.0)
    ledger.forget(int(ledger.find(A)[1]))
    check_ledger(ledger)
    assert ledger.ssd_order is not None
    policy = ledger.ssd_order.policy
    assert isinstance(policy, FirstComeFirstKept) and policy.kept == short_keys(A)[:1]


# -- directories -------------------------------------------------------------------------------------------------------


@needs_module
@pytest.mark.parametrize("capacity", [30, 120])
@pytest.mark.parametrize("seed", range(3))
def test_the_ledger_holds_what_the_directory_holds(seed: int, capacity: int) -> None:
    """Hits of a ladder of DRAM alone are those of its directory, played without a ledger."""
    assert module is not None
    directory = module.ReturnIndex(capacity)
    policy = default_policy()
    assert isinstance(policy, DirectoryPolicy)
    ladder = LedgerLadder(capacity, 0, policy=policy)
    for at, ids in enumerate(conversations(seed, 700)):
        keys = np.array(ids, np.uint64) + np.uint64(1)
        inside = directory.inside(keys)
        expected = len(keys) if inside.all() else int(np.argmin(inside))
        directory.request(keys, float(at))
        assert ladder.request(np.array(ids), float(at)) == expected, f"request {at}"
        if at % 50 == 0:
            check_ledger(ladder.ledger)
            assert np.count_nonzero(ladder.ledger.table.state == DramState.READY) == len(directory)


@needs_module
def test_what_leaves_for_a_lower_capacity_and_comes_back_is_said_to_leave_once_or_not_at_all() -> None:
    """Its slot would be freed twice."""
    policy, keys, ids = default_policy(), np.arange(1, 9, dtype=np.uint64), np.arange(8, dtype=np.int32)
    for capacity, most in ((8, 8), (2, 2), (8, 8)):
        policy.resize(capacity)
        gone = policy.request(keys, ids, keys, float(most), extend=False)
        assert len(set(gone.tolist())) == len(gone) == 8 - most
        assert not policy.inside(gone, keys).any()


class Remembering:
    """A directory that holds the even keys, and remembers what it was told to forget."""

    nbytes = 0

    def __init__(self) -> None:
        self.forgotten: list[int] = []

    def inside(self, keys: Keys) -> npt.NDArray[np.bool_]:
        even: npt.NDArray[np.bool_] = keys % np.uint64(2) == 0
        return even

    def forget(self, keys: Keys) -> None:
        self.forgotten += keys.tolist()


class Told:
    """A return index, and a list of what it was told."""

    def __init__(self) -> None:
        assert module is not None
        self.index = module.ReturnIndex(1)
        self.hints: list[tuple[int, str, float, float]] = []
        self.answers: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.index, name)

    def request(self, keys: Keys, now_s: float, *, output_tokens: int = -1, extend: bool = False) -> None:
        self.answers.append(output_tokens)
        self.index.request(keys, now_s, output_tokens=output_tokens, extend=extend)

    def hint(self, key: int, kind: str, seconds: float, now_s: float) -> None:
        self.hints.append((key, kind, seconds, now_s))
        self.index.hint(key, kind, seconds, now_s)


@needs_module
def test_the_directories_of_both_tiers_are_told_of_hints_and_of_the_length_of_answers() -> None:
    assert module is not None
    dram, ssd = Told(), Told()
    space = SegmentSpace(40 * 10 * RECORD, 10 * RECORD, lambda records, namespaces: 4096)
    policies = [DirectoryPolicy("told", one, module.KeyMap()) for one in (dram, ssd)]  # type: ignore[arg-type]
    ledger = Ledger(16 * RECORD, space, policy=policies[0], ssd_policy=policies[1])
    ledger.add_namespace(0, Geometry(4096, 256), SMALL.digest)
    chain = chain_of(SMALL, [1, 1, 2])
    for start, sequence, answer in ((0, b"shared", 11), (2, b"mine", 22)):
        stop = start + 2 if start == 0 else 3
        ids, _ = ledger.begin_put(
            chain, start, stop, namespace=0, sequence=sequence, now_s=70.0 * start, output_tokens=answer
        )
        ledger.filled_all(ids, 0.0)
        ledger.let_go_all(ids)
    ledger.touch(chain, 3, 300.0, output_tokens=33)
    ledger.hint(b"mine", Hint.CLOSED, None, 400.0)
    ledger.hint(b"shared", Hint.RETURNS, 9.0, 401.0)
    ends = [int.from_bytes(chain.key(at)[:8], "little") for at in (2, 1)]
    for one in (dram, ssd):
        assert one.hints == [(ends[0], "closed", 3600.0, 400.0), (ends[1], "returns", 9.0, 401.0)]
        assert one.answers == [11, 22, 33]
    assert len(ledger.dram.line) == 0, "the policy decides"
    check_ledger(ledger)


@needs_module
def test_a_directory_forgets_only_what_is_inside() -> None:
    """Of what it has let go itself it may remember more: its ghosts, and what another of its parts still holds."""
    assert module is not None
    directory = Remembering()
    policy = DirectoryPolicy("remembering", directory, module.KeyMap())  # type: ignore[arg-type]
    policy.forget(np.array([1, 2, 5], np.int32), np.arange(6, dtype=np.uint64) + np.uint64(1))
    assert directory.forgotten == [2, 6]


@needs_module
def test_a_key_map_is_a_dict_from_keys_to_ids() -> None:
    assert module is not None
    rng = random.Random(3)
    table = np.zeros((300, 4), np.uint64)
    table[:, 0] = [rng.getrandbits(64) for _ in range(300)]
    ids, model = module.KeyMap(), {}
    for _ in range(2000):
        some = np.array(rng.sample(range(300), rng.randint(0, 20)), np.int32)
        if rng.random() < 0.6:
            ids.put(some, table[:, 0])
            model.update({int(table[one, 0]): one for one in some.tolist()})
        else:
            ids.drop(some, table[:, 0])
            for one in some.tolist():
                model.pop(int(table[one, 0]), None)
        if rng.random() < 0.1:
            table = table.copy()  # the column lies elsewhere
        wanted = np.array([*table[:, 0].tolist(), 5], np.uint64)
        assert ids.find(wanted, table[:, 0]).tolist() == [model.get(key, -1) for key in wanted.tolist()]
    table[1, 0] = table[0, 0]
    ids.drop(np.arange(2, 300, dtype=np.int32), table[:, 0])
    ids.drop(np.array([0], np.int32), table[:, 0])
    ids.put(np.array([0, 1], np.int32), table[:, 0])  # one key
    assert ids.find(table[:1, 0].copy(), table[:, 0]).tolist() == [0]
    for bad in (-1, 300):
        with pytest.raises(IndexError):
            ids.put(np.array([bad], np.int32), table[:, 0])


def test_without_the_module_it_is_least_recently_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvterrace.policy.directories.native", lambda: None)
    assert default_policy().name == "lru"

"""What cannot work is refused where it is given: with a typed error of one line, and before anything has changed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.crash.kit import LAYOUT, NAMESPACE, MiB, all_hits, bytes_of, chain_of, opened, put, snapshot

from kvterrace import (
    ConfigError,
    Hit,
    KeyChain,
    KVTerraceError,
    LayoutError,
    Namespace,
    Present,
    Store,
    StoreClosedError,
    Stored,
    Tier,
    chain_keys,
    open_store,
)
from kvterrace.clock import SystemClock
from kvterrace.io.fake import FakeDevice
from kvterrace.tiers.directory import StoreDirectory

CHAIN = chain_of(1, 4)
BLOCKS = bytes_of(CHAIN)
NBYTES = LAYOUT.block_nbytes


class Odd:
    """Of no use, and says so to nobody."""


NO_CHAINS = [None, 5, "chain", b"k" * 32, [b"k" * 32], list(CHAIN), Odd()]
NO_NUMBERS = ["1", 1.0, True, b"1", [], Odd(), float("nan"), np.bool_(True), np.float64(1.0)]
NO_BLOCKS = [-1, 5, 10**30, np.int64(-3)]
NO_TIMES = ["x", "1", -1, -1e-9, 1e300, 10**400, float("nan"), float("inf"), True, b"1", [], Odd(), np.float32("nan")]
#: What is left of some time may be less than none, or endless.
NO_LIMITS = ["x", "1", float("nan"), True, b"1", [], Odd(), np.float32("nan")]
NO_SEQUENCES = ["text", None, 5, bytearray(b"s"), memoryview(b"s"), [b"s"], Odd(), b"x" * 17]
NO_SCORES = ["x", "1234", ["1"] * 4, [None] * 4, [1.0], [[[1.0] * 4]], [-1, 0, 0, 0], [float("nan")] * 4,
             [float("inf")] * 4, [1e39] * 4, [True] * 4, [1j] * 4, 7, Odd(), [[1], [1, 2]] * 2, [3e38] * 4]  # fmt: skip
NO_MEMORY = [
    None,
    5,
    "x" * len(BLOCKS),
    b"",
    BLOCKS[:-1],
    [1, 2, 3, 4],
    [BLOCKS] * 4,
    Odd(),
    np.empty(4, object),
    np.zeros((4, NBYTES), np.uint8)[:, ::-1],
    np.zeros((4, NBYTES + 1), np.uint8)[:, :-1],
    np.zeros((5, NBYTES), np.uint8),
    np.zeros((4, NBYTES), np.float64),
    np.zeros(4, [("a", "u1"), ("b", "u8")]),
    np.broadcast_to(np.zeros(NBYTES, np.uint8), (4, NBYTES)),
    [np.zeros((4, NBYTES // 4), np.uint8)] * 3,
    [np.zeros((3, NBYTES // 4), np.uint8) for _ in range(4)],
    [np.zeros((4, NBYTES // 4), np.uint16) for _ in range(4)],
]
NOT_WRITABLE = [
    BLOCKS,
    memoryview(BLOCKS),
    [np.zeros((4, NBYTES // 4), np.uint8)] * 4,
]
NO_LAYERS: list[Any] = [0, [0], range(3), range(0), range(1, 0), range(0, 2, 2), range(-1, 1), "0", slice(0, 1), True]


def out() -> bytearray:
    return bytearray(len(BLOCKS))


#: What is given, and the calls that it is given to.
CALLS: dict[str, tuple[list[Any], dict[str, Callable[[Store, Any], object]]]] = {
    "chain": (
        NO_CHAINS,
        {
            "match": lambda store, bad: store.match(bad),
            "get": lambda store, bad: store.get(bad, out()),
            "put": lambda store, bad: store.put(bad, BLOCKS),
            "prefetch": lambda store, bad: store.prefetch(bad),
            "pin": lambda store, bad: store.pin(bad),
            "touch": lambda store, bad: store.touch(bad),
            "invalidate": lambda store, bad: store.invalidate(bad),
        },
    ),
    "start|stop|block": (
        NO_NUMBERS + NO_BLOCKS,
        {
            "get start": lambda store, bad: store.get(CHAIN, out(), start=bad),
            "get stop": lambda store, bad: store.get(CHAIN, out(), stop=bad),
            "put start": lambda store, bad: store.put(CHAIN, BLOCKS, start=bad),
            "put stop": lambda store, bad: store.put(CHAIN, BLOCKS, stop=bad),
            "prefetch start": lambda store, bad: store.prefetch(CHAIN, start=bad),
            "prefetch stop": lambda store, bad: store.prefetch(CHAIN, stop=bad),
            "invalidate": lambda store, bad: store.invalidate(CHAIN, start=bad),
        },
    ),
    "deadline_s": (
        NO_TIMES,
        {
            "get in time": lambda store, bad: store.get(CHAIN, out(), deadline_s=bad),
            "put in time": lambda store, bad: store.put(CHAIN, BLOCKS, deadline_s=bad),
        },
    ),
    "timeout_s": (
        NO_LIMITS,
        {
            "wait": lambda store, bad: store.wait(store.prefetch(CHAIN[:0]), bad),
            "flush": lambda store, bad: store.flush(bad),
            "close": lambda store, bad: store.close(bad),
        },
    ),
    "sequence": (NO_SEQUENCES, {"put": lambda store, bad: store.put(CHAIN, BLOCKS, sequence=bad)}),
    "scores": (NO_SCORES, {"touch": lambda store, bad: store.touch(CHAIN, scores=bad)}),
    "transfer": (
        [None, 5, "x", [], Odd(), Stored(Tier.DRAM)],
        {"wait": lambda store, bad: store.wait(bad, 0.0)},
    ),
    "layers": (NO_LAYERS, {"get": lambda store, bad: store.get(CHAIN, out(), layers=bad)}),
    "buffer|part|memory|array": (
        NO_MEMORY,
        {
            "put": lambda store, bad: store.put(CHAIN, bad),
            "get": lambda store, bad: store.get(CHAIN, bad),
        },
    ),
    "memory": (NOT_WRITABLE, {"get": lambda store, bad: store.get(CHAIN, bad)}),
}


@pytest.fixture(scope="module")
def store() -> Any:
    with opened(None) as store:
        assert put(store, CHAIN) == [Stored(Tier.DRAM)] * 4
        yield store


@pytest.mark.parametrize(
    ("kind", "call"), [(kind, call) for kind, (_, calls) in CALLS.items() for call in calls], ids=lambda each: each
)
def test_a_call_with_what_cannot_work_is_refused(store: Store, kind: str, call: str) -> None:
    given, calls = CALLS[kind]
    before = store.stats()
    for bad in given:
        with pytest.raises((ConfigError, LayoutError, IndexError), match=kind) as caught:
            calls[call](store, bad)
        assert "\n" not in str(caught.value), bad
    after = store.stats()
    assert {name: getattr(before, name) for name in before.__slots__} == {
        name: getattr(after, name) for name in after.__slots__
    }
    assert not store.closed
    all_hits(store, CHAIN)
    store.poll()


def test_whole_numbers_and_times_of_numpy_will_do(store: Store) -> None:
    got = bytearray(2 * NBYTES)
    transfer = store.get(CHAIN, got, start=np.int64(1), stop=np.uint8(3), deadline_s=np.float32(60.0))  # type: ignore[arg-type]
    assert store.wait(transfer, np.float64(60)) == [Hit(Tier.DRAM)] * 2
    assert got == bytes_of(CHAIN, 1, 3)
    store.touch(CHAIN, scores=np.array([1, 2, 3, 4]))
    assert put(store, CHAIN, sequence=np.bytes_(b"s"), deadline_s=1e9) == [Present(Tier.DRAM)] * 4


def test_the_greatest_scores_add_up(store: Store) -> None:
    for _ in range(100):
        store.touch(CHAIN, scores=np.full(4, 1e30))
    assert np.isfinite(store._core.ledger.table.score).all()


NO_SIZES: list[Any] = [
    -1,
    0,
    1.5,
    True,
    None,
    "much",
    float("nan"),
    2**63,
    -(2**70),
    10**400,
    "-1GiB",
    "1e3",
    "9" * 5000,
    [],
    b"1GiB",
]
NO_PATHS = [5, b"/x", "", "a\0b", [], [None], [5], {"a": 1}, {"a"}, [b"a"], 1.5, True, [""], [["a"]], ["a", "b\0"],
            Odd(), [f"n{number}" for number in range(128)]]  # fmt: skip
NO_NAMES = [None, 5, "", "..", "../up", "a/b", "main\n", "a\0", b"main", "x" * 65, ["main"], Odd(), True]
OPTIONS: dict[str, list[Any]] = {
    "path": NO_PATHS,
    "dram_bytes": NO_SIZES,
    "ssd_bytes": NO_SIZES,
    "partition": NO_NAMES,
    "write_behind_s": [*NO_TIMES, None],
    "busy_after_s": [*NO_TIMES, None],
    "sigterm_flush": [None, 0, 1, "no", "False", [], Odd()],
    "read_only": [None, 0, 1, "no", "False", [], Odd()],
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("drives", [1, 2])
def test_a_store_is_not_opened_with_what_cannot_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str, drives: int
) -> None:
    monkeypatch.chdir(tmp_path)
    threads = threading.active_count()
    good: dict[str, Any] = {"dram_bytes": MiB, "ssd_bytes": 16 * MiB, "sigterm_flush": False}
    paths: Any = ["one", "two"] if drives == 2 else "one"
    for bad in OPTIONS[option]:
        given = {"path": paths, **good, option: bad}
        with pytest.raises(ConfigError, match=option) as caught:
            open_store(**given)
        assert "\n" not in str(caught.value)
        assert snapshot(tmp_path) == {}, "nothing was made"
    assert threading.active_count() == threads


def test_an_engine_that_is_not_there_makes_no_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTERRACE_ENGINE", "magic")
    with pytest.raises(ConfigError, match="magic"):
        open_store(tmp_path / "kv", dram_bytes=MiB, ssd_bytes=16 * MiB)
    assert snapshot(tmp_path) == {}


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: chain_keys(None, [1]), "namespace"),  # type: ignore[arg-type]
        (lambda: chain_keys(LAYOUT, [1]), "namespace"),  # type: ignore[arg-type]
        (lambda: KeyChain(None, b"r" * 32, b""), "namespace"),  # type: ignore[arg-type]
        (lambda: KeyChain(NAMESPACE, "r" * 32, b""), "root"),  # type: ignore[arg-type]
        (lambda: KeyChain(NAMESPACE, b"r" * 32, "k" * 32), "data"),  # type: ignore[arg-type]
        (lambda: KeyChain(NAMESPACE, b"r" * 31, b""), "root"),
        (lambda: KeyChain(NAMESPACE, b"r" * 32, b"k" * 31), "data"),
        (lambda: Namespace(model="m", layout="l"), "layout"),  # type: ignore[arg-type]
        (lambda: chain_keys(NAMESPACE, "text"), "tokens"),  # type: ignore[arg-type]
        (lambda: chain_keys(NAMESPACE, 5), "tokens"),  # type: ignore[arg-type]
        (lambda: chain_keys(NAMESPACE, [1.5] * 16), "token"),  # type: ignore[list-item]
        (lambda: chain_keys(NAMESPACE, [-1] * 16), "token"),
        (lambda: chain_keys(NAMESPACE, [1] * 16, salt="s"), "salt"),  # type: ignore[arg-type]
        (lambda: chain_keys(NAMESPACE, [1] * 16, extra="s"), "extra"),  # type: ignore[arg-type]
    ],
)
def test_keys_are_not_made_of_what_cannot_work(call: Callable[[], object], said: str) -> None:
    with pytest.raises(KVTerraceError, match=said):
        call()


def test_what_is_left_of_some_time_may_be_less_than_none_or_endless(tmp_path: Path) -> None:
    store = opened(tmp_path / "kv")
    hanging = store.put(CHAIN, BLOCKS)
    limits: list[Any] = [-1e-9, -1, float("-inf"), 0, np.float32(-1)]
    for limit in limits:
        assert len(store.wait(hanging, limit)) == 4
    assert store.wait(hanging, float("inf")) == [Stored(Tier.DRAM)] * 4
    assert store.flush(float("inf")) and store.flush(10**400)
    store.close(-1.0)
    with pytest.raises(StoreClosedError):
        store.match(CHAIN)


def test_segments_larger_than_the_format_has_are_refused(tmp_path: Path) -> None:
    clock = SystemClock()
    directory = StoreDirectory.open(tmp_path / "kv", "main", created_unix_s=0.0)
    with pytest.raises(ConfigError, match="segment_nbytes"):
        Store(
            dram_nbytes=1 << 20, ssd_nbytes=1 << 40, directory=directory, engine=FakeDevice(clock), clock=clock,
            segment_nbytes=(1 << 30) + 4096,
        )  # fmt: skip

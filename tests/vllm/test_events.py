"""KV events through vLLM's hooks: what a router that believes them takes the ladder to hold, and what it does hold."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.vllm.machine import BLOCK, Machine, adapter, machine, plain_seed, prompt, reference
from tests.vllm.stores import between
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch

from kvterrace.keys import KeyChain, chain_keys
from kvterrace.types import Busy

PLAIN = plain_seed()
FIRST, SECOND = prompt(1, 200), prompt(2, 200)  # 12 whole blocks of 16, and 8 tokens

Extra = dict[str, Any]


class Router:
    """Believes events. `held`: hash -> tokens of its whole prefix, of each medium."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.held: dict[str, dict[Any, tuple[int, ...]]] = {"STORAGE": {}, "GPU": {}}

    def publish(self, batch: Any) -> None:
        wire = msgspec.msgpack.encode(batch)  # as vLLM's publisher sends it
        for event in msgspec.msgpack.decode(wire, type=KVEventBatch).events:
            self.events.append(event)
            if isinstance(event, AllBlocksCleared):  # vLLM's, of its own prefix cache
                self.held["GPU"].clear()
                continue
            held = self.held[event.medium]
            if isinstance(event, BlockStored):
                before = () if event.parent_block_hash is None else held[event.parent_block_hash]
                for at, name in enumerate(event.block_hashes):
                    before += tuple(event.token_ids[at * BLOCK : (at + 1) * BLOCK])
                    held[name] = before
            else:
                assert isinstance(event, BlockRemoved)
                for name in event.block_hashes:
                    del held[name]

    def prefixes(self) -> set[tuple[int, ...]]:
        return set(self.held["STORAGE"].values())

    def own(self) -> list[Any]:
        return [event for event in self.events if getattr(event, "medium", "") == "STORAGE"]


@contextmanager
def routed(model: Path, extra: Extra, **options: Any) -> Iterator[tuple[Machine, Router]]:
    with machine(model, extra, events=True, **options) as engine:
        router = Router()
        engine.scheduler.kv_event_publisher = router
        yield engine, router


def prefixes(tokens: list[int], blocks: int) -> set[tuple[int, ...]]:
    return {tuple(tokens[: BLOCK * (at + 1)]) for at in range(blocks)}


def side_of(engine: Machine, rank: int = 0) -> Any:
    return engine.workers[rank]._worker


def chain(engine: Machine, rank: int = 0) -> KeyChain:
    """That of the request that is running."""
    (tracked,) = engine.scheduler.connector._scheduler._tracked.values()
    side = side_of(engine, rank)
    space = side.namespace
    return KeyChain(space, space.root_key(), side._keys[tracked.request.request_id])


def test_what_is_stored_is_told_as_vllm_tells_its_own(tmp_path: Path, model: Path, extra: Extra) -> None:
    with routed(model, extra, blocks=60) as (engine, router):
        lora = adapter(tmp_path / "a", 1.0)
        engine.loras.use(lora)
        engine.ask(FIRST, cache_salt="salt", lora_request=lora)
        engine.ask(SECOND)
        assert router.held["STORAGE"] == router.held["GPU"]
        assert router.prefixes() == prefixes(FIRST, 12) | prefixes(SECOND, 12)
        facts = ("lora_id", "lora_name", "block_size", "group_idx", "session_id")
        theirs = [event for event in router.events if getattr(event, "medium", "") == "GPU"]
        for one, other in zip(router.own(), theirs, strict=True):
            assert [getattr(one, fact) for fact in facts] == [getattr(other, fact) for fact in facts]
            assert one.extra_keys == other.extra_keys and one.kv_cache_spec_kind == "full_attention"
            assert (one.locality, one.ownership) == ("LOCAL", "kvterrace")
        engine.ask(FIRST[:150], cache_salt="salt", lora_request=lora)
        assert len(router.own()) == len(theirs)  # nothing new


def test_what_is_found_after_a_restart_is_told_when_it_is_asked_for(model: Path, extra: Extra) -> None:
    with machine(model, extra) as engine:
        engine.ask(FIRST)
    with routed(model, extra) as (engine, router):
        turn = FIRST + prompt(3, 60)
        engine.ask(turn)
        assert router.prefixes() == prefixes(turn, 16)


@pytest.mark.parametrize("rank", [0, 1])
def test_what_one_rank_has_lost_is_told_as_removed(model: Path, extra: Extra, rank: int) -> None:
    with routed(model, extra, blocks=40, ranks=2) as (engine, router):
        engine.add("one", FIRST, answer=4)
        engine.step()
        engine.step()
        assert router.prefixes() == prefixes(FIRST, 12)
        side_of(engine, rank)._store.invalidate(chain(engine, rank), start=5)
        engine.step()
        assert router.prefixes() == prefixes(FIRST, 5)
        engine.run()


def test_what_makes_room_for_others_is_told_as_removed(model: Path, extra: Extra) -> None:
    """Ten times what the store holds. In the end the router believes just what a look-up finds."""
    with routed(model, {**extra, "dram_bytes": "192KiB", "ssd_bytes": "4MiB"}, blocks=40) as (engine, router):
        asked = [prompt(100 + seed, 200) for seed in range(120)]
        for tokens in asked:
            assert engine.ask(tokens)[0] == reference(tokens, 4, PLAIN)
        store, found = side_of(engine)._store, set[tuple[int, ...]]()
        space = side_of(engine).namespace
        for tokens in asked:
            found |= prefixes(tokens, store.match(chain_keys(space, tokens)).blocks)
        removed = [event for event in router.own() if isinstance(event, BlockRemoved)]
        assert removed and router.prefixes() == found


def test_what_was_not_taken_is_not_told(model: Path, extra: Extra, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvterrace.integrations.vllm.scheduler_side._RETRY_S", (1e9, 1e9))
    with routed(model, extra) as (engine, router):
        store = between(engine)
        store.put_outcome = lambda start, stop: Busy() if start else None
        engine.ask(FIRST)
        assert router.prefixes() == prefixes(FIRST, 8)  # of the first step, 128 tokens


def test_what_a_failed_step_left_is_not_told(model: Path, extra: Extra) -> None:
    with routed(model, extra) as (engine, router):
        side_of(engine).step_failed()
        engine.ask(FIRST)
        assert router.own() == []


def test_a_reset_removes_all(model: Path, extra: Extra) -> None:
    with routed(model, extra) as (engine, router):
        engine.ask(FIRST)
        engine.scheduler.reset_prefix_cache(reset_connector=True)
        engine.ask(SECOND)
        assert router.prefixes() == prefixes(SECOND, 12)


def test_without_a_listener_nothing_is_kept_in_mind(model: Path, extra: Extra) -> None:
    with machine(model, extra) as engine:
        engine.ask(FIRST)
        assert list(engine.scheduler.connector.take_events()) == []
        assert side_of(engine)._store._core.ledger.table._departed is None

"""Two ranks under vLLM's own scheduler: each keeps its share of the heads, and what one lacks none loads."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from tests.vllm.machine import BLOCK, Machine, machine, plain_seed, prompt, reference
from tests.vllm.stores import between

from kvterrace.integrations.vllm.namespace import rank_chain
from kvterrace.integrations.vllm.rates import Rates
from kvterrace.keys import chain_keys
from kvterrace.types import Miss

PLAIN = plain_seed()
FIRST, SECOND = prompt(1, 200), prompt(2, 200)  # 12 whole blocks of 16, and 8 tokens

Extra = dict[str, object]


@pytest.fixture(params=["one process", "sockets"])
def processes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ranks are in this process; with "sockets" they are asked as if they were not."""
    if request.param == "sockets":
        monkeypatch.setattr("kvterrace.integrations.vllm.lookup.local", {})


def test_two_ranks_keep_their_shares(model: Path, extra: Extra, processes: None) -> None:
    with machine(model, extra, blocks=14, ranks=2) as engine:
        engine.ask(FIRST)
        engine.ask(SECOND)
        assert engine.ask(FIRST) == (reference(FIRST, 4, PLAIN), 8 + 3)
    partitions = sorted(path.name for path in (Path(str(extra["path"])) / "partitions").iterdir())
    assert partitions == ["vllm-dp0-pp0-tp0", "vllm-dp0-pp0-tp1"]
    with machine(model, extra, blocks=14, ranks=2) as engine:
        assert engine.ask(FIRST) == (reference(FIRST, 4, PLAIN), 8 + 3)
        assert engine.counts["blocks.ssd"] == 2 * 12
    with machine(model, extra, blocks=14) as engine:  # one rank finds nothing of two
        assert engine.ask(FIRST) == (reference(FIRST, 4, PLAIN), 203)


def test_one_rank_in_another_process_than_its_scheduler(
    model: Path, extra: Extra, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvterrace.integrations.vllm.lookup.local", {})
    with machine(model, extra, blocks=14, backend="mp") as engine:
        engine.ask(FIRST)
        engine.ask(SECOND)
        assert engine.ask(FIRST) == (reference(FIRST, 4, PLAIN), 8 + 3)


def test_ranks_load_side_by_side_so_one_ranks_share_is_weighed(model: Path, extra: Extra, processes: None) -> None:
    with machine(model, extra, blocks=14, ranks=2) as engine:
        engine.ask(FIRST)
        engine.ask(SECOND)
        rates = engine.scheduler.connector._scheduler._rates = Rates()
        rates.computed(1000, 1.0)  # 192 tokens in 0.192 s
        rates.loaded(1 << 20, 10.0, time.monotonic())  # a rank's 12 blocks in 0.176 s, those of both in 0.352 s
        assert engine.ask(FIRST) == (reference(FIRST, 4, PLAIN), 8 + 3)


@pytest.mark.parametrize("rank", [0, 1])
def test_what_one_rank_has_lost_is_computed_on_all(model: Path, extra: Extra, rank: int, processes: None) -> None:
    with machine(model, extra, blocks=14, ranks=2) as engine:
        engine.ask(FIRST)
        engine.ask(SECOND)
        one, other = between(engine, rank), between(engine, 1 - rank)
        one.spoil, other.spoil = lambda start, stop: {4: Miss()}, lambda start, stop: {7: Miss()}
        assert engine.ask(FIRST) == (reference(FIRST, 4, PLAIN), 200 - 4 * BLOCK + 3)
        one.spoil = other.spoil = lambda start, stop: {}
        engine.ask(SECOND)
        one.store.invalidate(full_chain(engine, rank), start=6)
        assert engine.ask(FIRST) == (reference(FIRST, 4, PLAIN), 200 - 6 * BLOCK + 3)


def full_chain(engine: Machine, rank: int) -> Any:
    """The chain of FIRST as a rank keeps it."""
    spaces = [worker.get_handshake_metadata().namespace for worker in engine.workers]
    return rank_chain(spaces[rank], chain_keys(spaces[0], FIRST).data, spaces[0].digest)


def test_a_rank_whose_load_takes_longer_is_waited_for(model: Path, extra: Extra) -> None:
    with machine(model, extra, blocks=14, ranks=2) as engine:
        engine.ask(FIRST)
        engine.ask(SECOND)
        slow = between(engine, 1)
        slow.holding = True
        engine.add("waits", FIRST)
        for _ in range(20):
            engine.step()
        assert engine.answers["waits"] == []
        slow.let_go()
        engine.run()
        assert engine.answers["waits"] == reference(FIRST, 4, PLAIN)

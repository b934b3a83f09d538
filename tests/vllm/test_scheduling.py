"""Loads and saves with vLLM's own scheduler, against arithmetic in place of a model."""

from __future__ import annotations

from pathlib import Path

from tests.vllm.machine import BLOCK, machine, plain_seed, prompt, reference

PLAIN = plain_seed()


def test_what_was_computed_is_loaded_after_eviction_and_after_a_restart(model: Path, extra: dict[str, object]) -> None:
    first, second = prompt(1, 200), prompt(2, 200)
    with machine(model, extra, blocks=14) as engine:  # room for one of them
        assert engine.ask(first) == (reference(first, 4, PLAIN), 200 + 3)
        assert engine.ask(second) == (reference(second, 4, PLAIN), 200 + 3)
        # 12 whole blocks of 16: all but the last 8 tokens are there
        assert engine.ask(first) == (reference(first, 4, PLAIN), 200 - 192 + 3)
        assert engine.counts["blocks.dram"] == 12
    with machine(model, extra, blocks=14) as engine:
        assert engine.ask(second) == (reference(second, 4, PLAIN), 8 + 3)
        assert engine.counts["blocks.ssd"] == 12
        assert engine.counts["tokens.ssd"] == 192


def test_a_prompt_of_whole_blocks_leaves_its_last_block_to_compute(model: Path, extra: dict[str, object]) -> None:
    tokens = prompt(1, 6 * BLOCK)
    with machine(model, extra) as engine:
        engine.ask(tokens)
    with machine(model, extra) as engine:
        assert engine.ask(tokens) == (reference(tokens, 4, PLAIN), BLOCK + 3)

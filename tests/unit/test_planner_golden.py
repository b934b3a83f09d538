"""The golden files, worked out once more: from configurations and datasheets in numbers, with no code of the planner.

A layer here is (bytes of KV a token, window); a path is the bandwidth that each of its links leaves for KV.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parent.parent / "fixtures" / "planner"
GIB = 2**30
#: HGX H100: HBM of eight at 80 %, FLOP/s of eight at 50 %, links of eight at 75 %, two IO dies at 80 %.
H100_BYTES_PER_S, H100_FLOPS, H100_LINK = 3350e9 * 0.8, 989.4e12 * 0.5, 64e9 * 0.75
IO_DIE, DRAM = 2 * 200e9 * 0.8, 600e9 * 0.8
DRAM_2_TIB = 0.8 * 2048 * GIB


@dataclass(frozen=True)
class Case:
    """One golden file's set-up, in numbers.

    Attributes:
        layers: (number, bytes of KV a token in one layer, window).
        dense, experts, chosen: weights outside the routed experts, in them, and the share of these that a token takes.
        dense_nbytes, experts_nbytes: the same in bytes, all of them; unread: embeddings, of which a step reads none.
        active: weights that a token of a prompt passes; output: those of the output projection.
        attention: FLOPs of attention for each token attended to, in one layer: 4 x heads x head size.
        copies: ranks that hold the same KV.
        rates: bytes a second from each tier through the links that all requests share; own: its accelerators' links.
        room: of each tier, for KV, in bytes.
        delay_s: of the first byte, of each tier.
    """

    context: int
    reuse: float
    instances: int
    tp: int
    layers: tuple[tuple[int, int, int], ...]
    dense_nbytes: float
    experts_nbytes: float
    chosen: float
    unread_nbytes: float
    active: int
    output: int
    attention: int
    memory: float
    bytes_per_s: float
    flops: float
    copies: int
    links: dict[str, dict[str, float]]
    own: float
    room: dict[str, float]
    delay_s: dict[str, float]
    price: float

    @property
    def prompt(self) -> int:
        return self.context - 512

    @property
    def token(self) -> int:
        return sum(count * each for count, each, _ in self.layers)

    def sequence(self, tokens: int) -> int:
        return sum(count * each * (min(tokens, window) if window else tokens) for count, each, window in self.layers)

    def touched(self, tokens: int) -> float:
        """Bytes of weights that a step over so many tokens reads."""
        return self.dense_nbytes - self.unread_nbytes + self.experts_nbytes * (1 - (1 - self.chosen) ** tokens)

    def prefill_s(self, cached: int) -> float:
        new = self.prompt - cached
        pairs = 0.0
        for count, _, window in self.layers:
            if window:  # every token beyond the first ones attends to a full window
                short = sum(min(cached + i, window) for i in range(1, min(new, window) + 1))
                pairs += count * (short + max(0, new - window) * window)
            else:
                pairs += count * (new * cached + new * (new + 1) / 2)
        flops = 2 * new * (self.active - self.output) + 2 * self.output + self.attention * pairs
        return max(flops / (self.tp * self.flops), self.touched(new) / (self.tp * self.bytes_per_s))

    def step_s(self, local: int) -> float:
        read = self.touched(local) + local * self.copies * self.sequence(self.context)
        return read / (self.tp * self.bytes_per_s)

    def hbm_room(self) -> float:
        """For KV on one rank."""
        return 0.7 * (self.memory - (self.dense_nbytes + self.experts_nbytes) / self.tp)

    def holds(self) -> int:
        """Sequences in HBM; KV lies evenly on the ranks."""
        return self.instances * int(self.hbm_room() * self.tp / (self.copies * self.sequence(self.context)))


def _served(case: Case, running: int, tiers: list[str]) -> dict[str, float]:
    """Share of a prompt that each tier has: reuse x (1 - exp(-t / 600 s)), t = capacity / tokens a second."""
    best = case.prefill_s(int(case.reuse * case.prompt)) * -(-running // case.instances)
    tokens_per_s = running / (best + 512 * case.step_s(-(-running // case.instances))) * case.context
    whole = case.instances * case.tp * case.hbm_room() / case.copies
    capacity, before, found = 0.0, 0.0, {}
    for tier in tiers:
        free = whole - running * case.sequence(case.context) if tier == "hbm" else case.room[tier]
        capacity += max(0.0, free) / case.token
        reached = case.reuse * (1 - math.exp(-capacity / tokens_per_s / 600))
        found[tier], before = reached - before, reached
    return found


def _first_token_s(case: Case, running: int, found: dict[str, float]) -> tuple[float, int]:
    """The slower of links and accelerators works all the time, the other is passed once."""
    local = -(-running // case.instances)
    cached = int(sum(found.values()) * case.prompt)
    busy: dict[str, float] = {}
    own = delay = 0.0
    for tier, share in found.items():
        if tier == "hbm" or not share:
            continue
        moved = case.sequence(cached) * share / sum(found.values())
        own += case.copies * moved / case.own
        delay = max(delay, case.delay_s[tier])
        for link, rate in case.links[tier].items():
            busy[link] = busy.get(link, 0.0) + moved / rate
    shared, compute = max(busy.values(), default=0.0), case.prefill_s(cached)
    once = delay + max(shared, own) + compute
    return once + max((running - 1) * shared, (local - 1) * max(own, compute)), cached


LLAMA_70B_OUT = 128_256 * 8192
LLAMA_70B = 2 * LLAMA_70B_OUT + 80 * (8192 * 128 * (64 + 64 + 8 + 8) + 3 * 8192 * 28_672)
LLAMA_8B_OUT = 128_256 * 4096
LLAMA_8B = 2 * LLAMA_8B_OUT + 32 * (4096 * 128 * (32 + 32 + 8 + 8) + 3 * 4096 * 14_336)
OSS_OUT = 201_088 * 2880
OSS_EXPERT = 3 * 2880 * 2880
OSS_LAYER = 2880 * 64 * (64 + 64 + 8 + 8) + 2880 * 128  # attention and router
QWEN_OUT = 151_936 * 4096
QWEN_EXPERT = 3 * 4096 * 1536
QWEN_LAYER = 4096 * 128 * (64 + 64 + 4 + 4) + 4096 * 128
#: Four drives of 14 GB/s at 90 %; a restore crosses DRAM and the IO die twice.
FOUR_GEN5 = {"dram": {"dram": DRAM, "io": IO_DIE}, "ssd": {"ssd": 4 * 14e9 * 0.9, "dram": DRAM / 2, "io": IO_DIE / 2}}
EIGHT_H100 = (80e9, H100_BYTES_PER_S, H100_FLOPS)
DRIVES_ROOM, DRIVES_DELAY_S = {"dram": DRAM_2_TIB, "ssd": 0.9 * 4 * 7680e9}, {"dram": 20e-6, "ssd": 120e-6}
DRIVES_PRICE = 8 * 30_000 + 60_000 + 10_000 + 4 * 1100
CASES = {
    "llama-128k": Case(
        131_072, 0.6, 1, 8, ((80, 4096, 0),), 2 * LLAMA_70B, 0, 0, 2 * LLAMA_70B_OUT, LLAMA_70B - LLAMA_70B_OUT,
        LLAMA_70B_OUT, 4 * 64 * 128, *EIGHT_H100, 1, FOUR_GEN5, 8 * H100_LINK, DRIVES_ROOM,
        DRIVES_DELAY_S, DRIVES_PRICE,
    ),
    "eight-instances": Case(
        32_768, 0.5, 8, 1, ((32, 4096, 0),), 2 * LLAMA_8B, 0, 0, 2 * LLAMA_8B_OUT, LLAMA_8B - LLAMA_8B_OUT,
        LLAMA_8B_OUT, 4 * 32 * 128, *EIGHT_H100, 1, FOUR_GEN5, H100_LINK, DRIVES_ROOM,
        DRIVES_DELAY_S, DRIVES_PRICE,
    ),
    # 18 layers keep 128 tokens, 18 keep all; experts have 4.25 bits a weight, the rest 16.
    "gpt-oss-windows": Case(
        131_072, 0.6, 1, 8, ((18, 2048, 128), (18, 2048, 0)), 2 * (2 * OSS_OUT + 36 * OSS_LAYER),
        36 * 128 * OSS_EXPERT * 4.25 / 8, 4 / 128, 2 * OSS_OUT, OSS_OUT + 36 * (OSS_LAYER + 4 * OSS_EXPERT), OSS_OUT,
        4 * 64 * 64, *EIGHT_H100, 1, FOUR_GEN5, 8 * H100_LINK, DRIVES_ROOM,
        DRIVES_DELAY_S, DRIVES_PRICE,
    ),
    # 4 KV heads on 8 ranks: each is held twice, and comes up twice. The array is behind one port of 100 GbE.
    "qwen-array": Case(
        32_768, 0.8, 1, 8, ((94, 2048, 0),), 2 * (2 * QWEN_OUT + 94 * QWEN_LAYER), 2 * 94 * 128 * QWEN_EXPERT, 8 / 128,
        2 * QWEN_OUT, QWEN_OUT + 94 * (QWEN_LAYER + 8 * QWEN_EXPERT), QWEN_OUT, 4 * 64 * 128, *EIGHT_H100, 2,
        {
            "dram": {"dram": DRAM / 2, "io": IO_DIE / 2},
            "remote": {"remote": 36e9, "network": 12.5e9 * 0.9, "dram": DRAM / 3, "io": IO_DIE / 3},
        },
        8 * H100_LINK, {"dram": DRAM_2_TIB, "remote": 90_000e9}, {"dram": 20e-6, "remote": 500e-6},
        8 * 30_000 + 60_000 + 10_000 + 40_000,
    ),
    "short": Case(
        4096, 0.9, 1, 1, ((32, 4096, 0),), 2 * LLAMA_8B, 0, 0, 2 * LLAMA_8B_OUT, LLAMA_8B - LLAMA_8B_OUT, LLAMA_8B_OUT,
        4 * 32 * 128, 48e9, 864e9 * 0.8, 362e12 * 0.5, 1,
        {
            "dram": {"dram": 160e9, "io": 160e9},
            "ssd": {"ssd": 2 * 6.8e9 * 0.9, "dram": 80e9, "io": 80e9},
        },
        32e9 * 0.75, {"dram": 0.8 * 256 * GIB, "ssd": 0.9 * 2 * 3840e9}, {"dram": 20e-6, "ssd": 150e-6},
        8500 + 6000 + 1200 + 2 * 500,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_bytes(name: str) -> None:
    golden, case = json.loads((GOLDEN / f"{name}.json").read_text()), CASES[name]
    concurrency = golden["workload"]["concurrency"]
    sequence = case.sequence(case.context)
    assert golden["kv"]["nbytes_per_token"] == case.token
    assert golden["kv"]["sequence_nbytes"] == sequence
    assert golden["kv"]["sequence_held_nbytes"] == case.copies * sequence
    assert golden["kv"]["total_nbytes"] == concurrency * sequence
    assert golden["kv"]["active_nbytes"] == min(concurrency, case.holds()) * sequence
    assert golden["model"]["weights_nbytes"] == pytest.approx(case.dense_nbytes + case.experts_nbytes, abs=1)
    assert golden["hbm"]["sequences"] == case.holds()
    assert golden["hbm"]["rank_kv_nbytes"] == pytest.approx(case.hbm_room())
    assert golden["parallel"] == {"tp": case.tp, "pp": 1, "instances": case.instances}


@pytest.mark.parametrize("name", CASES)
def test_every_operating_point(name: str) -> None:
    golden, case = json.loads((GOLDEN / f"{name}.json").read_text()), CASES[name]
    for row in golden["sweep"]:
        for point in row["points"]:
            running = min(point["requests"], case.holds())
            found = _served(case, running, row["tiers"])
            assert point["found"] == pytest.approx(found, rel=1e-6, abs=1e-12)
            first_s, cached = _first_token_s(case, running, found)
            decode_s = 512 * case.step_s(-(-running // case.instances))
            rate = running / (first_s + decode_s)
            assert point["written_share"] == 1
            assert point["tpot_s"] == pytest.approx(decode_s / 512)
            assert point["ttft_s"] == pytest.approx(first_s + (point["requests"] - running) / rate)
            assert point["output_tokens_per_s"] == pytest.approx(512 * rate)
            assert point["put_bytes_per_s"] == pytest.approx(rate * (case.context - cached) * case.token)


@pytest.mark.parametrize("name", CASES)
def test_wear_and_cost(name: str) -> None:
    golden, case = json.loads((GOLDEN / f"{name}.json").read_text()), CASES[name]
    assert golden["cost"]["price_usd"] == case.price
    tokens = golden["operating_point"]["output_tokens_per_s"] * 3 * 365 * 86_400
    assert golden["cost"]["usd_per_million_output_tokens"] == pytest.approx(1e6 * case.price / tokens)
    if "ssd" not in case.room:
        assert golden["endurance"] is None
        return
    written = 1.02 * golden["operating_point"]["put_bytes_per_s"] * 86_400  # a day
    capacity = case.room["ssd"] / 0.9
    assert golden["endurance"]["life_days"] == pytest.approx(capacity * 1825 / written)
    assert golden["endurance"]["budget_bytes_per_s"] == pytest.approx(capacity / 86_400)
    assert golden["endurance"]["needed_dwpd"] == pytest.approx(written / capacity)

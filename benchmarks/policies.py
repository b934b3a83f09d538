"""Hits of the default policy's directory on request traces, and what it costs; with and without hints.

usage: python benchmarks/policies.py FOLDER [--shares 1,2,5] [--hints right|wrong] [--deep]

FOLDER holds mooncake-conversation, mooncake-synthetic and claude-code-a (.jsonl.gz). One tier, empty at the start; hits
are the blocks of the longest prefix inside, in % of all. A minute for all six capacities.

--hints: what a client of the agent trace could say when an answer has ended: back in 9 s where a tool is called, in
186 s where a person is next (medians of the trace), closed after the session's last request. wrong: 30 % of them say
one of the other two things (seeded).
--deep: count and weigh the recomputation that hits save, not hits: the share of attention in an 8B model
(16 GFLOP a token, and 0.52 MFLOP for each token before it).
"""

from __future__ import annotations

import argparse
import gzip
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvterrace._native import ReturnIndex

#: Name, blocks of the trace that make one, tokens of that.
TRACES = (("mooncake-conversation", 1, 512), ("mooncake-synthetic", 1, 512), ("claude-code-a", 4, 256))
#: What is said when an answer has ended, by why it did: kind, seconds.
SAID = {"tool_use": ("returns", 9.0), "end_turn": ("returns", 186.0), "closed": ("closed", 0.0)}
DOUBLE_TOKENS = 16e9 / 0.52e6  # depth at which a token takes twice as long


@dataclass
class Trace:
    keys: list[npt.NDArray[np.uint64]] = field(default_factory=list)
    at_s: list[float] = field(default_factory=list)
    ended_s: list[float] = field(default_factory=list)  # the answer
    output_tokens: list[int] = field(default_factory=list)
    stop: list[str] = field(default_factory=list)  # a key of SAID, or anything else: nothing is said


def read(path: Path, coarsen: int) -> Trace:
    trace, last = Trace(), dict[int, int]()
    with gzip.open(path, "rt") as lines:
        for number, row in enumerate(map(json.loads, lines)):
            runs = row.get("hash_runs", ())
            pieces = [np.arange(first, first + count) for first, count in zip(runs[::2], runs[1::2], strict=True)]
            ids = np.concatenate(pieces) if pieces else np.array(row.get("hash_ids", ()))
            trace.keys.append(ids[coarsen - 1 :: coarsen].astype(np.uint64))
            trace.at_s.append(row["timestamp"] / 1e3)
            trace.ended_s.append((row["timestamp"] + (row.get("api_ms") or 0)) / 1e3)
            trace.output_tokens.append(row["output_length"])
            trace.stop.append(row.get("stop", ""))
            if "session" in row:
                last[row["session"]] = number
    for number in last.values():
        trace.stop[number] = "closed"
    return trace


def hints(trace: Trace, wrong: float) -> Iterator[tuple[float, int, str, float]]:
    """When, of which block, kind, seconds; in order of time."""
    draw = np.random.default_rng(7)
    found = []
    for keys, ended_s, said in zip(trace.keys, trace.ended_s, trace.stop, strict=True):
        if said not in SAID or len(keys) == 0:
            continue
        if wrong and draw.random() < wrong:
            said = [other for other in SAID if other != said][draw.integers(2)]
        found.append((ended_s, int(keys[-1]), *SAID[said]))
    yield from sorted(found)


def worth(hits: int, depth_worth: float) -> float:
    """Of the first so many blocks of a chain."""
    return hits + depth_worth * hits * (hits - 1) / 2


def replay(trace: Trace, directory: ReturnIndex, wrong: float | None, depth_worth: float) -> float:
    """Share of the worth asked for that was inside."""
    told = hints(trace, wrong) if wrong is not None else iter(())
    hint = next(told, None)
    found = asked = 0.0
    for keys, at_s, output_tokens in zip(trace.keys, trace.at_s, trace.output_tokens, strict=True):
        while hint is not None and hint[0] <= at_s:
            directory.hint(hint[1], hint[2], hint[3], hint[0])
            hint = next(told, None)
        inside = directory.inside(keys)
        hits = len(keys) if inside.all() else int(inside.argmin())
        found += worth(hits, depth_worth)
        asked += worth(len(keys), depth_worth)
        directory.request(keys, at_s, output_tokens=output_tokens)
        directory.take_evicted()
    return found / asked


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shares", default="1,2,5,10,20,50", help="capacities, in %% of the trace's different blocks")
    parser.add_argument("--hints", choices=("right", "wrong"))
    parser.add_argument("--deep", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    shares = [float(share) for share in options.shares.split(",")]
    print("| trace |", *(f"{share:g} % |" for share in shares), "CPU us a request | MB |")
    print("| --- |", " ---: |" * (len(shares) + 2))
    for name, coarsen, block_tokens in TRACES:
        trace = read(options.folder / f"{name}.jsonl.gz", coarsen)
        if options.hints and not set(SAID) & set(trace.stop):
            continue
        different = len(np.unique(np.concatenate(trace.keys)))
        depth_worth = block_tokens / DOUBLE_TOKENS if options.deep else 0.0
        wrong = {None: None, "right": 0.0, "wrong": 0.3}[options.hints]
        cells, most_us, most_nbytes = [], 0.0, 0
        for share in shares:
            directory = ReturnIndex(int(share / 100 * different), options.seed, depth_worth)
            begun_s = time.process_time()
            cells.append(f"{100 * replay(trace, directory, wrong, depth_worth):.2f} |")
            most_us = max(most_us, (time.process_time() - begun_s) / len(trace.keys) * 1e6)
            most_nbytes = max(most_nbytes, directory.nbytes)
        print(f"| {name} |", *cells, f"{most_us:.0f} | {most_nbytes / 1e6:.1f} |", flush=True)


if __name__ == "__main__":
    main()

"""A life that ends by SIGKILL: `python -m tests.soak.child TASK.json`. It says on stdout what its parent must know.

One line for each event, before it can have an effect (tombstones, damage) or after it is certain (graves):
`T file keys`, `X file start end`, `G kind slot generation start known`, `D count` (so many of the oldest graves of this
life are durable), `F kind text`, `S seconds ops`.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from pathlib import Path

from tests.soak.life import Life, World
from tests.soak.mutations import apply
from tests.soak.truth import Conversation, Grave, Graves, Pool
from tests.soak.verdict import LogTap, Verdict
from tests.soak.watch import Watchdog
from tests.soak.witness import Segments


def say(*words: object) -> None:
    """One line to the parent, whole or not at all seen."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


class _Verdict(Verdict):
    def say(self, kind: str, text: str) -> None:
        say("F", kind.replace(" ", "-"), json.dumps(text))


class _Segments(Segments):
    def on_tombstones(self, name: str, keys: set[bytes]) -> None:
        say("T", name, *(key.hex() for key in keys))

    def on_untrusted(self, name: str, start: float, end: float) -> None:
        say("X", name, start, end)


class _Life(Life):
    _mine: list[Grave]
    _lock: threading.Lock

    def dig(self, grave: Grave) -> None:
        with self._lock:
            self._mine.append(grave)
            say("G", grave.one.kind, grave.one.slot, grave.one.generation, grave.start, grave.known)
            super().dig(grave)

    def made_durable(self, graves: list[Grave]) -> None:
        super().made_durable(graves)
        with self._lock:
            durable = next((at for at, one in enumerate(self._mine) if not one.durable), len(self._mine))
            say("D", durable)


def main() -> None:
    task = json.loads(Path(sys.argv[1]).read_text())
    apply(task["mutation"])
    verdict = _Verdict()
    graves = Graves()
    for kind, slot, generation, start, known in task["graves"]:
        graves.dig(Grave(Conversation(kind, slot, generation), start, known, durable=True))
    segments = _Segments()
    for name, ranges in task["ranges"].items():
        segments.ranges[name] = [tuple(one) for one in ranges]
    tap = LogTap(verdict)
    logging.getLogger("kvterrace").addHandler(tap)
    logging.getLogger("kvterrace").propagate = False

    def on_hang(text: str) -> None:
        verdict.fail("hang", text)
        os._exit(3)

    watchdog = Watchdog(on_hang)
    watchdog.start()
    _Life._mine, _Life._lock = [], threading.Lock()
    world = World(
        Path(task["folder"]),
        task["seed"],
        Pool(task["seed"], task["generations"]),
        graves,
        segments,
        verdict,
        watchdog,
        tap,
        task["every_s"],
        None,
        frozenset(task["without"]),
    )
    life = _Life(world, task["number"])
    say("S", 0, 0)
    life.start()
    second = 0
    while True:  # until killed
        threading.Event().wait(0.5)
        second += 1
        say("S", second / 2, life.ops)


if __name__ == "__main__":
    main()

"""The parent's side of a life that ends by SIGKILL."""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import sys
import threading
from pathlib import Path

from tests.soak.life import World
from tests.soak.truth import Conversation, Grave

ROOT = Path(__file__).resolve().parents[2]
#: A child that has not opened the store after this long hangs.
_OPEN_S = 60.0


def run_and_kill(world: World, number: int, seconds: float, mutation: str) -> int:
    """Run the load in a process of its own for `seconds`, kill it, and take in what it said; its operations."""
    task = world.folder.parent / "task.json"
    durable = [one for one in world.graves.each() if one.durable]
    task.write_text(
        json.dumps(
            {
                "folder": str(world.folder),
                "seed": world.seed,
                "number": number,
                "every_s": world.every_s,
                "mutation": mutation,
                "without": sorted(world.without),
                "generations": world.pool.generations,
                "graves": [
                    (one.one.kind, one.one.slot, one.one.generation, one.start, one.known)
                    for one in random.Random(number).sample(durable, min(len(durable), 500))
                ],
                "ranges": {name: [list(one) for one in ranges] for name, ranges in world.segments.ranges.items()},
            }
        )
    )
    command = [sys.executable, "-m", "tests.soak.child", str(task)]
    said: list[str] = []
    opened = threading.Event()
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        errors: list[str] = []
        readers = [
            threading.Thread(target=_read, args=(process.stdout, said, opened), daemon=True),
            threading.Thread(target=lambda stream: errors.append(stream.read()), args=(process.stderr,), daemon=True),
        ]
        for reader in readers:
            reader.start()
        try:
            if not opened.wait(_OPEN_S):
                world.verdict.fail("child", f"it has not opened the store after {_OPEN_S:.0f} s")
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(seconds)
                world.verdict.fail("child", f"it ended by itself with status {code}: {''.join(errors)[-1500:]}")
        finally:
            process.kill()
        for reader in readers:
            reader.join()
    return _take_in(world, said)


def _read(stream: object, said: list[str], opened: threading.Event) -> None:
    for line in stream:  # type: ignore[attr-defined]
        if not line.endswith("\n"):
            return  # cut off by the kill
        said.append(line)
        if line.startswith(("S ", "F ")):
            opened.set()
    opened.set()


def _take_in(world: World, said: list[str]) -> int:
    graves: list[Grave] = []
    durable = ops = 0
    for line in said:
        what, *words = line.split(maxsplit=2) if line.startswith("F") else line.split()
        match what:
            case "T":
                world.segments.note_tombstones(words[0], {bytes.fromhex(word) for word in words[1:]})
            case "X":
                world.segments.damage(words[0], float(words[1]), float(words[2]))
            case "G":
                kind, slot, generation, start, known = map(int, words)
                one = Conversation(kind, slot, generation)
                world.pool.retire(one)
                graves.append(Grave(one, start, known))
            case "D":
                durable = int(words[0])
            case "F":
                world.verdict.fail(f"{words[0]} in a child", json.loads(words[1]))
            case "S":
                ops = int(words[1])
    for at, grave in enumerate(graves):
        grave.durable = at < durable
        world.graves.dig(grave)
    lost = world.segments.lost_tombstones()
    world.graves.end_of_life(lambda grave: bool(grave.keys & lost))
    world.segments.forget_missing(world.partition)
    return ops

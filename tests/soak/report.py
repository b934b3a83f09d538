"""What is printed, and the figures as JSON."""

from __future__ import annotations

import json
import platform
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from kvterrace import __version__

if TYPE_CHECKING:
    from tests.soak.life import Life
    from tests.soak.soak import Soak

_MB = 1e6


class Report:
    """Lines on stdout."""

    def __init__(self, seed: int, seconds: float, file: Path | None, mutation: str) -> None:
        self._seed, self._seconds, self._file, self._mutation = seed, seconds, file, mutation
        self._start_s = time.monotonic()

    def say(self, text: str) -> None:
        sys.stdout.write(f"{time.monotonic() - self._start_s:7.1f} s  {text}\n")
        sys.stdout.flush()

    def progress(self, soak: Soak, life: Life | None) -> None:
        """Where the run is."""
        ops = soak.ops + (life.ops if life is not None else 0)
        nbytes = soak.nbytes + (life.seen.nbytes if life is not None else 0)
        injected = soak.injected + (life.plan.counts if life is not None else Counter())
        counts = soak.seen + (life.seen.counts if life is not None else Counter())
        outcomes = " ".join(
            f"{name.removeprefix('get_').removesuffix('_blocks')} {counts[name]}"
            for name in sorted(counts)
            if name.startswith("get_")
        )
        self.say(
            f"life {soak.lives}, killed {soak.kills}; {ops} ops ({ops / soak.elapsed_s:.0f}/s), {nbytes / 1e9:.2f} GB; "
            f"{injected.total()} faults of {len(injected)} kinds; blocks read: {outcomes}; "
            f"graves {len(soak.world.graves)}; failures {soak.world.verdict.count}"
        )

    def end(self, soak: Soak) -> int:
        """Print the figures and write the JSON; the exit status."""
        figures = self._figures(soak)
        verdict = soak.world.verdict
        for name, value in figures.items():
            if isinstance(value, dict):
                self.say(f"{name}: " + ", ".join(f"{key} {one}" for key, one in value.items()))
            elif name != "failures":
                self.say(f"{name}: {value}")
        if self._file is not None:
            self._file.write_text(json.dumps(figures, indent=2) + "\n")
        if not verdict.count:
            self.say("PASSED: no wrong bytes, no hang, no growth, every fault accounted for")
            return 0
        self.say(f"FAILED: {verdict.count} failures (seed {self._seed})")
        for kind, count in verdict.kinds.most_common():
            self.say(f"  {count} x {kind}")
        for failure in verdict.failures:
            sys.stdout.write(f"  {failure}\n")
        sys.stdout.flush()
        return 1

    def _figures(self, soak: Soak) -> dict[str, object]:
        world = soak.world
        return {
            "version": __version__,
            "python": platform.python_version(),
            "seed": self._seed,
            "mutation": self._mutation,
            "without": sorted(soak.world.without),
            "seconds": round(soak.elapsed_s, 1),
            "lives": soak.lives,
            "kills": soak.kills,
            "operations": soak.ops,
            "operations_of_killed": soak.killed_ops,
            "moved_gb": round(soak.nbytes / 1e9, 3),
            "injected": dict(sorted(soak.injected.items())),
            "met_nothing": dict(sorted(soak.unmet.items())),
            "read_faults": dict(soak.ended),
            "seen": dict(sorted(soak.seen.items())),
            "store": dict(soak.store_counts),
            "graves": {
                "dug": world.graves.dug,
                "kept": len(world.graves),
                "tombstone_destroyed_by_a_fault": world.graves.exempted,
                "not_flushed_before_the_end": world.graves.undurable,
                "forgotten": world.graves.forgotten,
            },
            "blocks_checked_after_a_clean_close": soak.kept_blocks,
            "disk_most_mb": round(soak.disk_most / _MB, 1),
            "growth": {name: f"{grown:.0f} of {bound:.0f}" for name, (grown, bound) in soak.growth().items()},
            "rss_open_mb": [round(value / _MB) for _, value in soak.rss],
            "rss_at_rest_mb": [round(value / _MB) for _, value in soak.rest_rss],
            "at_rest": [list(one) for one in sorted(set(soak.rest))],
            "longest_share_of_a_bound": [round(world.watchdog.worst[0], 3), world.watchdog.worst[1]],
            "warnings": dict(world.log.warnings.most_common()),
            "failures": world.verdict.failures,
        }

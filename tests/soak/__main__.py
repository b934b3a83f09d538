"""A long mixed load on a real store, with a fault every second or so: `python -m tests.soak --seconds 600`.

See docs/guide/soak.md. Exit status 0: nothing was wrong; 1: what is listed, or why the soak broke off.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import signal
import sys
import tempfile
from pathlib import Path

from tests.soak import drive, growth
from tests.soak.inject import ENGINE, OUTSIDE
from tests.soak.life import SSD_NBYTES, World
from tests.soak.mutations import MUTATIONS, apply
from tests.soak.report import Report
from tests.soak.soak import Soak
from tests.soak.truth import Graves, MiB, Pool
from tests.soak.verdict import LogTap, Verdict
from tests.soak.watch import Watchdog
from tests.soak.witness import Segments

#: Kinds of faults: "opening" are those that reads meet while the store is opened.
KINDS = (*ENGINE, *OUTSIDE, "opening")


def main() -> int:
    parser = argparse.ArgumentParser("python -m tests.soak", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=600.0, help="how long (600)")
    parser.add_argument(
        "--seed", type=int, default=None, help="of the load and the faults; drawn and printed otherwise"
    )
    parser.add_argument("--dir", type=Path, default=None, help="where the files go (a temporary folder)")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="figures of the run, as JSON")
    parser.add_argument("--every", type=float, default=0.7, metavar="SECONDS", help="mean pause before a fault (0.7)")
    parser.add_argument(
        "--mutate", default="", choices=sorted(MUTATIONS), help="break the library, to see it found out"
    )
    parser.add_argument(
        "--without", action="append", default=[], choices=KINDS, metavar="FAULT", help="leave a kind of faults out"
    )
    options = parser.parse_args()
    growth.one_heap()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that nothing stays mounted
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(10**6)
    with tempfile.TemporaryDirectory(prefix="kvterrace-soak-", dir=options.dir) as name:
        folder = Path(name)
        report = Report(seed, options.seconds, options.json, options.mutate)
        place, why_not = folder, "--without drive-full"
        if "drive-full" not in options.without:
            place, why_not = drive.mounted(folder, SSD_NBYTES + 24 * MiB)
        report.say(f"seed {seed}, {options.seconds:.0f} s, in {place}")
        if why_not:
            report.say(f"no file system of its own ({why_not}): the drive is not filled up from outside")
        apply(options.mutate)
        try:
            return _run(report, place, seed, options, ballast=None if why_not else place / "ballast")
        finally:
            drive.unmount(folder)


def _run(report: Report, place: Path, seed: int, options: argparse.Namespace, *, ballast: Path | None) -> int:
    verdict = Verdict()

    def on_hang(text: str) -> None:
        verdict.fail("hang", text)
        report.end(soak)
        drive.unmount(place.parent)
        os._exit(1)  # the threads that hang do not end otherwise

    watchdog = Watchdog(on_hang)
    tap = LogTap(verdict)
    logging.getLogger("kvterrace").addHandler(tap)
    logging.getLogger("kvterrace").propagate = False
    world = World(
        place / "kv",
        seed,
        Pool(seed),
        Graves(),
        Segments(),
        verdict,
        watchdog,
        tap,
        options.every,
        ballast,
        frozenset(options.without),
    )
    soak = Soak(world, report, options.seconds, options.mutate)
    watchdog.start()
    soak.run()
    watchdog.stop()
    return report.end(soak)


if __name__ == "__main__":
    sys.exit(main())

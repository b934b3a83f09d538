"""kvterrace in vLLM, measured: `make bench-vllm`. Needs vLLM's environment, see `make test-vllm`.

usage: python -m benchmarks.vllm [SECTION...] [--small] [--out bench-vllm.json]

Sections (default: all): steps, same-answers, first-token, load, nothing-shared, lmcache. Figures go to the file,
section by section; what was there of others stays. About an hour on two cores; `--small` only shows that it runs.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from benchmarks.vllm.sizes import FULL, SMALL

SECTIONS = ("steps", "same-answers", "first-token", "load", "nothing-shared", "lmcache")


def say(text: str) -> None:
    print(text, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", default=list(SECTIONS), metavar="SECTION")
    parser.add_argument("--out", type=Path, default=Path("bench-vllm.json"))
    parser.add_argument("--small", action="store_true", help="sizes that show that it runs, and no more")
    options = parser.parse_args()
    unknown = sorted(set(options.sections) - set(SECTIONS))
    if unknown:
        parser.error(f"no section {', '.join(unknown)}; there are {', '.join(SECTIONS)}")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path.cwd()), os.environ.get("PYTHONPATH")]))
    from kvterrace.demo.model import convert

    convert()
    sizes = SMALL if options.small else FULL
    found: dict[str, Any] = json.loads(options.out.read_text()) if options.out.is_file() else {}
    wrong: list[str] = []
    for section in options.sections:
        say(section)
        module = importlib.import_module(f"benchmarks.vllm.{section.replace('-', '_')}")
        found[section] = {"small": options.small, **module.measure(say, sizes)}
        wrong += found[section].get("wrong", [])
        found[section]["load_average"] = os.getloadavg()
        options.out.write_text(json.dumps(found, indent=1) + "\n")
        say(json.dumps(found[section], indent=1))
    for one in wrong:
        say(f"WRONG: {one}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

"""kvterrace in vLLM, measured: `make bench-vllm`. Needs vLLM's environment, see `make test-vllm`.

usage: python -m benchmarks.vllm [SECTION...] [--out bench-vllm.json]

Sections (default: all): steps, first-token, load. Figures go to the file, section by section; what was there of others
stays.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any


def say(text: str) -> None:
    print(text, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", default=["steps", "first-token", "load"], metavar="SECTION")
    parser.add_argument("--out", type=Path, default=Path("bench-vllm.json"))
    options = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path.cwd()), os.environ.get("PYTHONPATH")]))
    from kvterrace.demo.model import convert

    convert()
    found: dict[str, Any] = json.loads(options.out.read_text()) if options.out.is_file() else {}
    wrong: list[str] = []
    for section in options.sections:
        say(section)
        match section:
            case "steps":
                from benchmarks.vllm import steps

                found[section] = steps.measure()
            case "first-token":
                from benchmarks.vllm import first_token

                found[section] = first_token.measure(say)
            case "load":
                from benchmarks.vllm import load

                found[section] = load.measure(say)
            case _:
                parser.error(f"no section {section!r}")
        wrong += found[section].get("wrong", [])
        found[section]["load_average"] = os.getloadavg()
        options.out.write_text(json.dumps(found, indent=1) + "\n")
        say(json.dumps(found[section], indent=1))
    for one in wrong:
        say(f"WRONG: {one}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

"""The engine of `benchmarks.vllm.child`, which can also be made to fail."""

from __future__ import annotations

import itertools
import os
import signal
import sys
from typing import Any

from benchmarks.vllm.child import main

from kvterrace import opening
from kvterrace.io.base import IoKind
from kvterrace.testing.faults import Fail, FaultPlan, FaultyEngine

PLAN = FaultPlan()


def die_in_save(llm: Any, nth: int) -> dict[str, Any]:
    """Have the process killed in the `nth` save, when blocks were handed to the store and are being copied."""
    from kvterrace.integrations.vllm.saving import Saver

    settle, seen = Saver._settle, itertools.count(1)

    def settle_or_die(self: Any, *what: Any) -> bool:
        if next(seen) == nth:
            os.kill(os.getpid(), signal.SIGKILL)
        return settle(self, *what)

    Saver._settle = settle_or_die  # type: ignore[method-assign, assignment]
    return {}


def end_in_step(llm: Any, nth: int) -> dict[str, Any]:
    """Have SIGTERM come in mid-forward of the `nth` step, with what vLLM's workers do then: raise SystemExit."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    seen = itertools.count(1)

    def end(*_: Any) -> None:
        if next(seen) == nth:
            os.kill(os.getpid(), signal.SIGTERM)

    def watch(model: Any) -> None:
        model.model.layers[len(model.model.layers) // 2].register_forward_pre_hook(end)

    llm.apply_model(watch)
    return {}


def refuse_writes(llm: Any, code: int) -> dict[str, Any]:
    for kind in (IoKind.WRITE, "create"):
        PLAN.add(Fail(code), kind)
    return {}


def faulty_drives(spec: dict[str, Any]) -> None:
    """Where the child was told so, have stores open on engines that do as `PLAN` says."""
    if not spec.pop("faulty", False):
        return
    best = opening.best_engine  # type: ignore[attr-defined]

    def faulty(*what: Any, **more: Any) -> Any:
        engine, *rest = best(*what, **more)
        return FaultyEngine(engine, PLAN), *rest

    opening.best_engine = faulty  # type: ignore[attr-defined]


if __name__ == "__main__":
    main({"die_in_save": die_in_save, "end_in_step": end_in_step, "refuse_writes": refuse_writes}, faulty_drives)

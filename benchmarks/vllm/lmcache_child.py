"""The engine of `child`, with LMCache in it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.vllm.child import main


def tolerant(_: dict[str, Any]) -> None:
    """vLLM 0.32 looks through all modules for its kernels, and stumbles over an object that LMCache brings, whose
    `__dict__` is no mapping.
    """
    from vllm.triton_utils import dispatcher

    def mapping(value: Any) -> Any:
        found = vars(value)
        return found if isinstance(found, Mapping) else {}

    dispatcher.vars = mapping


if __name__ == "__main__":
    main({}, tolerant)

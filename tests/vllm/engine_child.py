"""A vLLM engine in a process of its own that does what it is told, line by line: see `engines.Child`.

Reads one JSON object a line from standard input and answers each with one line that begins with `@@`.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import time
from typing import Any

from kvterrace import opening
from kvterrace.io.base import IoKind
from kvterrace.testing.faults import Fail, FaultPlan, FaultyEngine


def main() -> None:
    spec = json.loads(sys.argv[1])
    os.environ.update(spec.pop("environment"))
    plan = faulty_drives() if spec.pop("faulty", False) else None
    from vllm import LLM, SamplingParams

    began_s = time.monotonic()
    llm = LLM(**spec)
    say({"ready_s": time.monotonic() - began_s})
    for line in sys.stdin:
        order = json.loads(line)
        match order.pop("do"):
            case "ask":
                say(ask(llm, SamplingParams, **order))
            case "load":
                say(load(llm, SamplingParams, **order))
            case "metrics":
                say(metrics(llm))
            case "reset":
                say({"reset": llm.reset_prefix_cache(**order)})
            case "call":
                say({"called": str(llm.collective_rpc(order["method"], args=tuple(order["args"])))})
            case "die_in_save":
                die_in_save(**order)
                say({})
            case "end_in_step":
                end_in_step(llm, **order)
                say({})
            case "refuse_writes":
                assert plan is not None, "only in a child that was told of it"
                for kind in (IoKind.WRITE, "create"):
                    plan.add(Fail(order["code"]), kind)
                say({})
            case "end":
                break


def ask(llm: Any, params: Any, *, prompts: list[list[int]], tokens: int, salt: str | None = None) -> dict[str, Any]:
    """All prompts at once."""
    texts = [{"prompt_token_ids": prompt} | ({} if salt is None else {"cache_salt": salt}) for prompt in prompts]
    began_s = time.monotonic()
    outputs = llm.generate(texts, params(temperature=0.0, max_tokens=tokens, ignore_eos=True), use_tqdm=False)
    return {
        "tokens": [list(one.outputs[0].token_ids) for one in outputs],
        "cached": [one.num_cached_tokens for one in outputs],
        "elapsed_s": time.monotonic() - began_s,
    }


def load(llm: Any, params: Any, *, prompts: list[list[int]], tokens: int, concurrency: int) -> dict[str, Any]:
    """`concurrency` prompts at a time, in order; seconds to each one's first token from when it was handed over."""
    sampling = params(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    engine, waiting = llm.llm_engine, list(enumerate(prompts))
    began_s: dict[str, float] = {}
    first_s: dict[str, float] = {}
    answers: dict[str, list[int]] = {}
    start_s = time.monotonic()
    while waiting or len(answers) < len(prompts):
        while waiting and len(began_s) - len(answers) < concurrency:
            number, prompt = waiting.pop(0)
            began_s[f"load {number}"] = time.monotonic()
            engine.add_request(f"load {number}", {"prompt_token_ids": prompt}, sampling)
        for output in engine.step():
            name = output.request_id
            first_s.setdefault(name, time.monotonic() - began_s[name])
            if output.finished:
                answers[name] = list(output.outputs[0].token_ids)
    names = [f"load {number}" for number in range(len(prompts))]
    return {
        "tokens": [answers[name] for name in names],
        "first_s": [first_s[name] for name in names],
        "elapsed_s": time.monotonic() - start_s,
    }


def metrics(llm: Any) -> dict[str, float]:
    """Counters of the connector, by name and last label."""
    found = {}
    for one in llm.get_metrics():
        if "kvterrace" in one.name and hasattr(one, "value"):
            own = [value for key, value in one.labels.items() if key not in ("engine", "model_name")]
            found[".".join([one.name.removeprefix("vllm:kvterrace_"), *own])] = one.value
        elif "kvterrace" in one.name:
            found[one.name.removeprefix("vllm:kvterrace_") + "_sum"] = one.sum
    return found


def die_in_save(nth: int) -> None:
    """Have the process killed in the `nth` save, when blocks were handed to the store and are being copied."""
    from kvterrace.integrations.vllm.worker_side import WorkerSide

    settle, seen = WorkerSide._settle, itertools.count(1)

    def settle_or_die(self: Any, *what: Any) -> bool:
        if next(seen) == nth:
            os.kill(os.getpid(), signal.SIGKILL)
        return settle(self, *what)

    WorkerSide._settle = settle_or_die  # type: ignore[method-assign, assignment]


def end_in_step(llm: Any, nth: int) -> None:
    """Have SIGTERM come in mid-forward of the `nth` step, with what vLLM's workers do then: raise SystemExit."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    seen = itertools.count(1)

    def end(*_: Any) -> None:
        if next(seen) == nth:
            os.kill(os.getpid(), signal.SIGTERM)

    def watch(model: Any) -> None:
        model.model.layers[len(model.model.layers) // 2].register_forward_pre_hook(end)

    llm.apply_model(watch)


def faulty_drives() -> FaultPlan:
    """Have stores open on engines that do as the plan says."""
    plan = FaultPlan()
    best = opening.best_engine  # type: ignore[attr-defined]

    def faulty(*what: Any, **more: Any) -> Any:
        engine, *rest = best(*what, **more)
        return FaultyEngine(engine, plan), *rest

    opening.best_engine = faulty  # type: ignore[attr-defined]
    return plan


def say(what: dict[str, Any]) -> None:
    sys.stdout.write("@@" + json.dumps(what) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()

"""A vLLM engine in a process of its own that does what it is told, line by line: see `engines.Child`.

Reads one JSON object a line from standard input and answers each with one line that begins with `@@`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


def main() -> None:
    spec = json.loads(sys.argv[1])
    os.environ.update(spec.pop("environment"))
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
                die_in_save()
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


def die_in_save() -> None:
    """Have the process killed when blocks were handed to the store and are being copied or written."""
    from kvterrace.integrations.vllm.worker_side import WorkerSide

    def settle(self: Any, transfer: Any) -> None:
        os.kill(os.getpid(), 9)

    WorkerSide._settle = settle  # type: ignore[method-assign]


def say(what: dict[str, Any]) -> None:
    sys.stdout.write("@@" + json.dumps(what) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()

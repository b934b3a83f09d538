"""Runs the demo's phases one after the other and compares what came out."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kvterrace.demo import DemoError
from kvterrace.demo.model import MODEL_NAME, cache_folder, converted, gguf_folder
from kvterrace.demo.phases import Spec, write_spec
from kvterrace.integrations.transformers.versions import check_versions

__all__ = ["drop_page_cache", "tell"]

_NEW_TOKENS = 16
# Each in a process of its own, with a cold page cache: one hiccup of the machine shall not decide.
_RESTARTS = 3

# For every phase alike, unless the caller has set them.
_SETTINGS = {
    # Spinning OpenMP threads on a shared machine made phases ten times slower (2 cores, load 4).
    "OMP_WAIT_POLICY": "PASSIVE",
    # Grouped queries attend to K and V as they are, not to copies for each query head: same bits, less memory traffic.
    "TRANSFORMERS_SDPA_FORCE_GQA": "1",
}

#: Told (phase, stage, tokens done, tokens in all; 0 of 0 where there is no count).
Listener = Callable[[str, str, int, int], None]


def tell(tokens: int, store: Path | None, listener: Listener) -> dict[str, Any]:
    """Run the story: a reference without kvterrace, a first process with it, and some after it ended.

    Args:
        tokens: length of the shared prefix.
        store: folder of the store; None takes one in the cache folder and removes it afterwards.

    Returns:
        What `kvterrace demo --json` writes.

    Raises:
        DemoError, MissingDependencyError: it cannot run here.
    """
    check_versions()
    if not (converted() / "config.json").is_file():
        gguf_folder()
    with contextlib.ExitStack() as stack:
        try:
            cache_folder().mkdir(parents=True, exist_ok=True)
            work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="demo-", dir=cache_folder())))
        except OSError as error:
            raise DemoError(f"cannot write {cache_folder()} ({error.strerror}): set XDG_CACHE_HOME") from error
        spec = Spec(
            store=str(store if store is not None else work / "store"),
            tokens=tokens,
            new_tokens=_NEW_TOKENS,
            salt=secrets.token_hex(16),
            dram="1GiB",
            ssd="4GiB",
        )
        write_spec(spec, work)
        _run("convert", "convert", work, listener)
        reference = _run("reference", "reference", work, listener)
        first = _run("first", "first", work, listener)
        restarts = []
        for number in range(1, _RESTARTS + 1):
            page_cache = drop_page_cache(Path(spec.store))
            restarts.append(_run("restarted", f"restarted{number}", work, listener))
        differences = _differences(work)
    return _result(spec, reference, first, restarts, differences, page_cache)


def drop_page_cache(folder: Path) -> str:
    """Take the files under `folder` out of the page cache, so that reads meet the drive; says how."""
    os.sync()
    with contextlib.suppress(OSError):
        Path("/proc/sys/vm/drop_caches").write_text("1\n", encoding="ascii")
        return "drop_caches"
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)
    return "posix_fadvise"


def _run(phase: str, name: str, work: Path, listener: Listener) -> dict[str, Any]:
    listener(name, "starting", 0, 0)
    errors = work / f"{name}.stderr"
    environment = {**_SETTINGS, **os.environ, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    with errors.open("wb") as sink:
        child = subprocess.Popen(  # noqa: S603 - our own module, no shell
            [sys.executable, "-m", "kvterrace.demo.phases", phase, str(work), name],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=sink,
            env=environment,
            text=True,
        )
    message = ""
    with child:
        try:
            assert child.stdout is not None
            for line in child.stdout:
                with contextlib.suppress(ValueError):
                    told = json.loads(line)
                    message = told.get("error", message)
                    if "stage" in told:
                        listener(name, told["stage"], told["done"], told["total"])
            status = child.wait()
        except BaseException:
            child.send_signal(signal.SIGINT)
            try:
                child.wait(timeout=30)
            except subprocess.TimeoutExpired:
                child.kill()
            raise
    if status == 130:
        raise KeyboardInterrupt
    if status:
        last = (errors.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["no message"])[-1]
        raise DemoError(message or f"phase {name} ended with status {status}: {last}")
    result: dict[str, Any] = json.loads((work / f"{name}.json").read_text(encoding="utf-8"))
    return result


def _differences(work: Path) -> dict[str, float]:
    """Largest absolute difference of logits to the reference, by run and question; inf where lengths differ."""
    found: dict[str, float] = {}
    with np.load(work / "reference.npz") as want:
        for path in sorted(work.glob("*.npz")):
            if path.stem == "reference":
                continue
            with np.load(path) as got:
                for question in want.files:
                    a, b = want[question], got[question]
                    same = a.shape == b.shape
                    found[f"{path.stem}.{question}"] = float(np.abs(a - b).max()) if same else float("inf")
    return found


def _result(
    spec: Spec,
    reference: dict[str, Any],
    first: dict[str, Any],
    restarts: list[dict[str, Any]],
    differences: dict[str, float],
    page_cache: str,
) -> dict[str, Any]:
    cold, warm = first["results"]
    from_ssd = [run["results"][0] for run in restarts]
    from_dram = [warm, *(run["results"][1] for run in restarts)]
    answers = [one["answer"] for run in (first, *restarts) for one in run["results"]]
    # The best of what was seen without the store, the middle of what was seen with it.
    recomputed_s = min(*reference["ttft_chunks_s"], *reference["ttft_one_pass_s"])
    dram_s, ssd_s = _median(from_dram, "ttft_s"), _median(from_ssd, "ttft_s")
    restored = min(one["tiers"].get("SSD", 0) for one in from_ssd)
    worst = max(differences.values())
    return {
        "model": MODEL_NAME,
        "dtype": "float32",
        "threads": reference["threads"],
        "prefix_tokens": spec.tokens,
        "restored": restored,
        "ttft_recomputed_s": recomputed_s,
        "ttft_recomputed_chunks_s": reference["ttft_chunks_s"],
        "ttft_recomputed_one_pass_s": reference["ttft_one_pass_s"],
        "ttft_first_with_store_s": cold["ttft_s"],
        "ttft_dram_s": dram_s,
        "ttft_dram_all_s": [one["ttft_s"] for one in from_dram],
        "ttft_ssd_s": ssd_s,
        "ttft_ssd_all_s": [one["ttft_s"] for one in from_ssd],
        "restore_dram_s": _median(from_dram, "restore_s"),
        "restore_ssd_s": _median(from_ssd, "restore_s"),
        "store_s": cold["store_s"],
        "speedup_dram": recomputed_s / dram_s,
        "speedup_ssd": recomputed_s / ssd_s,
        "restored_tokens_dram": min(one["tiers"].get("DRAM", 0) for one in from_dram),
        "restored_tokens_ssd": restored,
        "tokens_equal": answers == reference["answers"] * (1 + len(restarts)),
        "logits_equal": worst == 0.0,
        "logits_max_abs_diff": worst,
        "logits_max_abs_diff_by_run": differences,
        "restored_nbytes_ssd": min(one["restored_nbytes"] for one in from_ssd),
        "stored_nbytes": cold["stored_nbytes"] + warm["stored_nbytes"],
        "ssd_written_nbytes": first["ssd_written_nbytes"],
        "ssd_read_nbytes": min(run["ssd_read_nbytes"] for run in restarts),
        "missed_blocks": cold["missed_blocks"] + warm["missed_blocks"],
        "model_load_s": _median(restarts, "load_s"),
        "fingerprint_s": _median(restarts, "setup_s"),
        "page_cache": page_cache,
        "load_average": os.getloadavg()[0],
        "answer_tokens": reference["answers"],
    }


def _median(runs: list[dict[str, Any]], key: str) -> float:
    return float(statistics.median(run[key] for run in runs))

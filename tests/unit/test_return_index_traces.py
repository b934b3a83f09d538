"""Hit rates of the default policy on request traces, against those of the study that it comes from."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

native = pytest.importorskip("kvterrace._native", reason="the extension module is not built: make native")

from benchmarks.policies import read, replay  # noqa: E402  (needs the module)

TRACES = os.environ.get("KVTERRACE_TRACES")

#: % of accesses at 1, 2, 5, 10, 20 and 50 % of the different blocks: the study's return-index policy, and the best of
#: LRU tail-first, ARC, S3-FIFO and W-TinyLFU there.
STUDY = {
    "mooncake-conversation": ((10.6, 15.5, 23.4, 30.0, 34.6, 36.3), (9.0, 11.0, 21.0, 28.4, 34.5, 36.3)),
    "mooncake-synthetic": ((4.8, 8.6, 16.7, 28.3, 42.2, 62.9), (4.2, 8.2, 16.3, 26.6, 40.6, 60.3)),
    "claude-code-a": ((52.0, 72.9, 92.8, 95.3, 96.1, 96.3), (44.2, 68.3, 92.5, 95.4, 96.2, 96.3)),
}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(TRACES is None, reason="KVTERRACE_TRACES names no folder of traces")
@pytest.mark.parametrize("name", STUDY)
def test_it_hits_as_the_study_did_and_no_fixed_policy_is_better(name: str) -> None:
    assert TRACES is not None
    trace = read(Path(TRACES) / f"{name}.jsonl.gz", 4 if name == "claude-code-a" else 1)
    different = len(np.unique(np.concatenate(trace.keys)))
    for share, study, fixed in zip((1, 2, 5, 10, 20, 50), *STUDY[name], strict=True):
        hits = 100 * replay(trace, native.ReturnIndex(different * share // 100, 0), None, 0.0)
        assert hits >= max(study, fixed) - 0.5, share

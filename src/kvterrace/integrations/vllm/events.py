"""KV events: what a router may know of the ladder, in vLLM's own words.

`BlockStored` when all ranks have taken a block, or one from before a restart was found; `BlockRemoved` when a rank's
ladder has lost it. By vLLM's block hashes, so that a router sees one prefix whatever holds it. A block that comes and
goes within a step is told as gone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_events import MEDIUM_STORAGE, BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    to_event_extra_keys,
)
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

from kvterrace.integrations.vllm.messages import WorkerReport
from kvterrace.keys import KEY_NBYTES

__all__ = ["Events"]

_OWNER = "kvterrace"


@dataclass(frozen=True, slots=True)
class _Saving:
    request: Any
    keys: bytes  # of the chain up to `stop`
    start: int
    stop: int


class Events:
    """The scheduler's thread only."""

    def __init__(self, spec: Any) -> None:
        """`spec`: of the KV cache group."""
        self._width: int = spec.block_size
        self._facts: dict[str, Any] = {
            "group_idx": 0,
            "kv_cache_spec_kind": get_kv_cache_spec_kind(spec).value,
            "kv_cache_spec_sliding_window": get_kv_cache_spec_sliding_window(spec),
        }
        self._told: dict[bytes, Any] = {}  # key -> vLLM's hash, of what was told as stored and is not gone
        self._saving: dict[int, list[_Saving]] = {}  # by step
        self._queue: list[KVCacheEvent] = []

    def saving(self, step: int, request: Any, keys: bytes, start: int, stop: int) -> None:
        """Blocks `start..stop` of a request are handed over with this step; `keys` of its chain up to there."""
        self._saving.setdefault(step, []).append(_Saving(request, keys, start, stop))

    def found(self, request: Any, keys: bytes, blocks: int) -> None:
        """A look-up has found the first `blocks` blocks of a request's chain."""
        self._store(request, keys, 0, blocks)

    def take_in(self, report: WorkerReport) -> None:
        """What the workers did in a step."""
        self._remove(report.gone_before)
        for step in [step for step in self._saving if step <= report.step]:
            for one in self._saving.pop(step):
                name = one.request.request_id
                if step == report.step and name not in report.unkept:
                    stop = min(one.stop, report.unsaved.get(name, one.stop))
                    self._store(one.request, one.keys, one.start, stop)
        self._remove(report.gone_after)

    def reset(self) -> None:
        """Nothing that was told is served any more."""
        self._saving.clear()
        self._remove(b"".join(self._told))

    def take(self) -> Iterable[KVCacheEvent]:
        """Events since the last call."""
        events, self._queue = self._queue, []
        return events

    def _store(self, request: Any, keys: bytes, start: int, stop: int) -> None:
        """Tell the blocks of these that were not told: one event for each stretch of them."""
        stop = min(stop, len(request.block_hashes))
        names = [keys[KEY_NBYTES * at : KEY_NBYTES * (at + 1)] for at in range(start, stop)]
        new = [start + at for at, name in enumerate(names) if name not in self._told]
        while new:
            first = new[0]
            count = next((at for at, block in enumerate(new) if block != first + at), len(new))
            self._tell(request, first, first + count)
            new = new[count:]
        self._told.update(zip(names, map(maybe_convert_block_hash, request.block_hashes[start:stop]), strict=True))

    def _tell(self, request: Any, start: int, stop: int) -> None:
        hashes, width, lora = request.block_hashes, self._width, request.lora_request
        extra, image = [], 0
        for block in range(start, stop):
            found, image = generate_block_hash_extra_keys(request, block * width, (block + 1) * width, image)
            extra.append(found)
        self._queue.append(
            BlockStored(
                block_hashes=[maybe_convert_block_hash(one) for one in hashes[start:stop]],
                parent_block_hash=maybe_convert_block_hash(hashes[start - 1]) if start else None,
                token_ids=list(request.all_token_ids[start * width : stop * width]),
                block_size=width,
                lora_id=None if lora is None else lora.adapter_id,
                medium=MEDIUM_STORAGE,
                lora_name=None if lora is None else lora.name,
                extra_keys=to_event_extra_keys(extra),
                locality="LOCAL",
                ownership=_OWNER,
                session_id=request.session_id,
                **self._facts,
            )
        )

    def _remove(self, keys: bytes) -> None:
        names = [keys[at : at + KEY_NBYTES] for at in range(0, len(keys), KEY_NBYTES)]
        gone = [self._told.pop(name) for name in names if name in self._told]
        if gone:
            self._queue.append(
                BlockRemoved(
                    block_hashes=gone, medium=MEDIUM_STORAGE, group_idx=0, locality="LOCAL", ownership=_OWNER
                )
            )  # fmt: skip

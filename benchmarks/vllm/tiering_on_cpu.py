"""vLLM's own tiers of CPU memory and files on a machine without an accelerator, to run beside.

vLLM's worker for them refuses the CPU platform. This one copies with torch in place of CUDA; managers, tiers and files
are vLLM's. Named by `spec_name` and `spec_module_path` in `kv_connector_extra_config` of its OffloadingConnector.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class CopyingWorker(OffloadingWorker):
    """Copies at once, so that a job has ended when it was submitted."""

    def __init__(self, kv_caches: Any, region: SharedOffloadRegion, blocks_per_chunk: int) -> None:
        assert blocks_per_chunk == 1, "leave block_size of the tiers at that of the engine"
        self._region = region
        self._pages = [one.tensor.view(torch.int8).view(-1, one.page_size_bytes) for one in kv_caches.tensors]
        self._chunks = [region.create_next_worker_view(one.page_size_bytes) for one in kv_caches.tensors]
        self._ended: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, self._pages, src_spec, self._chunks, dst_spec)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, self._chunks, src_spec, self._pages, dst_spec)

    def _copy(self, job_id: int, sources: Any, src: Any, targets: Any, dst: Any) -> bool:
        began_s = time.monotonic()
        rows, places = torch.from_numpy(src.block_ids).long(), torch.from_numpy(dst.block_ids).long()
        for source, target in zip(sources, targets, strict=True):
            target[places] = source[rows]
        nbytes = len(rows) * sum(source.shape[1] for source in sources)
        elapsed_s = time.monotonic() - began_s
        self._ended.append(TransferResult(job_id, success=True, transfer_size=nbytes, transfer_time=elapsed_s))
        return True

    def get_finished(self) -> list[TransferResult]:
        ended, self._ended = self._ended, []
        return ended

    def wait(self, job_ids: set[int]) -> None:
        pass

    def shutdown(self) -> None:
        self._region.cleanup()


class TieringOnCpuSpec(TieringOffloadingSpec):
    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        if not self._worker:
            region = SharedOffloadRegion(
                engine_id=self.config.engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = CopyingWorker(kv_caches, region, self.blocks_per_chunk)
        return self._worker

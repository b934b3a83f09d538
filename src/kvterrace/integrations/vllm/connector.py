"""`KVTerraceConnector`: what vLLM makes of `--kv-transfer-config`, once in the scheduler and once in each worker."""

from __future__ import annotations

import logging
import os
import sys
import uuid
from collections.abc import Callable, Iterable
from typing import Any

from vllm.distributed.kv_events import KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
)
from vllm.lora.worker_manager import WorkerLoRAManager
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvterrace.errors import ConfigError, StoreLockedError
from kvterrace.integrations.vllm import lookup
from kvterrace.integrations.vllm.adapters import watch_adapters
from kvterrace.integrations.vllm.events import Events
from kvterrace.integrations.vllm.messages import Handshake, StepPlan, WorkerReport
from kvterrace.integrations.vllm.metrics import PromMetrics, Stats
from kvterrace.integrations.vllm.namespace import namespace_for_rank
from kvterrace.integrations.vllm.options import Options, place_of, read_options
from kvterrace.integrations.vllm.pages import pages_of
from kvterrace.integrations.vllm.scheduler_side import SchedulerSide
from kvterrace.integrations.vllm.support import check_engine, check_groups
from kvterrace.integrations.vllm.weights import watch_weights, weights_fingerprint
from kvterrace.integrations.vllm.worker_side import Loaded, WorkerSide
from kvterrace.opening import default_write_budget, open_store
from kvterrace.store import Store
from vllm import envs

__all__ = ["KVTerraceConnector"]

_log = logging.getLogger("kvterrace.vllm")

#: Seconds beyond VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS that writing what is only in DRAM may take at the end: vLLM
#: asks a worker to end, after that time again, and kills it 4 s later.
_CLOSE_MORE_S = 3.0
#: Seconds until an idle block is written. Less than the store's own default, since that end is short.
_WRITE_BEHIND_S = 0.5
#: Blocks that the DRAM tier of a rank must hold at least.
_LEAST_BLOCKS = 8


class KVTerraceConnector(KVConnectorBase_V1):
    """vLLM's way to a kvterrace store. One object for each role; the work is done by `SchedulerSide` and
    `WorkerSide`.

    Hybrid models: vLLM makes one KV cache group of full and sliding-window layers for a connector that does not name
    `SupportsHMA`, with KV of every token; what it cannot make one group of is refused.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Raises ConfigError or UnsupportedModelError: an engine that is refused, with the reason."""
        super().__init__(vllm_config, role, kv_cache_config)
        self._options: Options = read_options(vllm_config.kv_transfer_config.kv_connector_extra_config)
        check_engine(vllm_config)
        self._spec = check_groups(kv_cache_config)
        events = vllm_config.kv_events_config
        self._tells_events = events is not None and events.enable_kv_cache_events
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._server: lookup.LookupServer | None = None
        self._unwatch: list[Callable[[], None]] = []
        self._token = uuid.uuid4().hex
        self._loaded = Loaded()
        self._handled: BaseException | None = None
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerSide(self._spec.block_size, Events(self._spec) if self._tells_events else None)

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache: what is not saved is computed again."""
        return False

    # -- the scheduler's half ------------------------------------------------------------------------------------------

    @property
    def _planning(self) -> SchedulerSide:
        assert self._scheduler is not None, "the worker's connector was asked what the scheduler's is for"
        return self._scheduler

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        self._planning.connect(metadata)

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._planning.bind_pool(gpu_block_pool)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._planning.match(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._planning.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[CacheHitSource, int]:
        dram, ssd = self._planning.hit_tokens(request, num_external_tokens)
        found = {CacheHitSource.HOST: dram, CacheHitSource.DISK: ssd}
        return {source: tokens for source, tokens in found.items() if tokens}

    def build_connector_meta(self, scheduler_output: Any) -> StepPlan:
        return self._planning.plan(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, WorkerReport):
            self._planning.take_in(report)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:  # noqa: ARG002
        self._planning.finished(request.request_id)
        return False, None

    def take_events(self) -> Iterable[KVCacheEvent]:
        events = self._planning.events
        return () if events is None else events.take()

    def reset_cache(self) -> bool:
        self._planning.reset()
        return True

    # -- the worker's half ---------------------------------------------------------------------------------------------

    @property
    def _moving(self) -> WorkerSide:
        assert self._worker is not None, "vLLM has registered its KV caches before the first step"
        return self._worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Blocks: hashes the weight files where there is no commit, opens the store.

        Raises ConfigError where vLLM hands this connector to a second engine of the process: it keeps one for all.
        """
        if self._worker is not None:
            raise ConfigError("this process has an engine with kvterrace already: shut that one down first")
        config = self._vllm_config
        place = place_of(config.parallel_config, rank=config.parallel_config.rank)
        pages = pages_of(kv_caches, self._kv_cache_config)
        namespace = namespace_for_rank(
            config,
            self._spec,
            pages,
            place,
            fingerprint=weights_fingerprint(config.model_config),
            tenant=self._options.tenant,
        )
        store = _open(self._options, place.partition, place.ranks_on_host, namespace.layout.block_nbytes)
        self._worker = worker = WorkerSide(store, namespace, pages, tells_departures=self._tells_events)
        lookup.local[self._token] = worker.match
        self._unwatch = [
            watch_weights(_worker_classes(), config, worker.weights_changed),
            watch_adapters((WorkerLoRAManager,), worker.adapters.loaded),
        ]
        if config.parallel_config.distributed_executor_backend != "uni":  # the scheduler is another process
            self._server = lookup.LookupServer(worker.match)
        _log.info(
            "kvterrace: partition %s of %s, %d blocks of %d B", place.partition, self._options.paths,
            store.stats().blocks, namespace.layout.block_nbytes,
        )  # fmt: skip

    def get_handshake_metadata(self) -> Handshake:
        address = "" if self._server is None else self._server.address
        return Handshake(self._moving.namespace, os.getpid(), self._token, address)

    def bind_connector_metadata(self, connector_metadata: StepPlan) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._handled = sys.exc_info()[1]  # a caller may ask an engine for something while it handles an exception
        self._moving.begin(connector_metadata)

    def clear_connector_metadata(self) -> None:
        super().clear_connector_metadata()
        self._handled = None
        self._moving.end()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ARG002
        self._moving.load()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: loads end between steps."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: blocks are saved whole, after the step."""

    def wait_for_save(self) -> None:
        """vLLM asks for it in a `finally`, so also after a forward pass that has raised, or was ended by a signal: what
        lies in the blocks of that step then is not the KV of its tokens.
        """
        if sys.exc_info()[1] is self._handled:
            self._moving.save()
        else:
            self._moving.step_failed()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:  # noqa: ARG002
        self._loaded = self._moving.poll()
        return KVConnectorTransferResults(finished_recving=self._loaded.requests)

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._loaded.failed_rows = self._loaded.failed_rows, set()
        return failed

    def build_connector_worker_meta(self) -> WorkerReport | None:
        return self._moving.report()

    # -- both ----------------------------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> Stats | None:
        if self._worker is not None:
            stats = Stats(self._worker.take_counts())
        else:
            stats = Stats(self._scheduler.counts.take() if self._scheduler is not None else {})
        return None if stats.is_empty() else stats

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Stats:
        return Stats(data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]
    ) -> PromMetrics:
        return PromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """Blocks while the store writes what is only in DRAM."""
        for unwatch in self._unwatch:
            unwatch()
        lookup.local.pop(self._token, None)
        if self._server is not None:
            self._server.close()
        if self._scheduler is not None:
            self._scheduler.close()
        timeout_s = envs.VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS + _CLOSE_MORE_S
        if self._worker is not None and not self._worker.close(timeout_s):
            _log.warning("the store was closed before all was written: recent blocks are lost, and will be computed")


def _worker_classes() -> tuple[type, ...]:
    from vllm.v1.worker.cpu_worker import CPUWorker
    from vllm.v1.worker.gpu_worker import Worker

    return (CPUWorker, Worker)


def _open(options: Options, partition: str, ranks: int, block_nbytes: int) -> Store:
    dram_nbytes = options.dram_nbytes // ranks
    if dram_nbytes < _LEAST_BLOCKS * block_nbytes:
        raise ConfigError(
            f"dram_bytes: {options.dram_nbytes} B over {ranks} rank(s) are {dram_nbytes // block_nbytes} blocks of "
            f"{block_nbytes} B; give at least {ranks * _LEAST_BLOCKS * block_nbytes} B"
        )
    budget = default_write_budget(options.paths)  # each rank has a partition on the same drives
    try:
        return open_store(
            list(options.paths),
            dram_bytes=dram_nbytes,
            ssd_bytes=options.ssd_nbytes // ranks,
            ssd_daily_write_bytes=None if budget is None else budget // ranks,
            partition=partition,
            write_behind_s=_WRITE_BEHIND_S,
            sigterm_flush=False,
            read_only=options.read_only,
        )
    except StoreLockedError as error:
        raise StoreLockedError(
            f'{error}; another engine writes it: give this one a path of its own, or "read_only": true to use what the '
            "other keeps"
        ) from error

"""The scheduler's half: which blocks of a request to load, and which to save. Moves no KV, and waits for nobody."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvterrace.integrations.vllm.adapters import Adapters, Later, Unknown, Wait
from kvterrace.integrations.vllm.events import Events
from kvterrace.integrations.vllm.lookup import Answer, Lookup, lookup_for
from kvterrace.integrations.vllm.messages import Handshake, LoadJob, SaveJob, StepPlan, WorkerReport
from kvterrace.integrations.vllm.metrics import SchedulerCounts
from kvterrace.integrations.vllm.namespace import with_epoch
from kvterrace.integrations.vllm.rates import Rates
from kvterrace.integrations.vllm.request_keys import RequestKeys

__all__ = ["SchedulerSide"]

_log = logging.getLogger("kvterrace.vllm")

#: Seconds that the answer to a look-up is good for a request that waits for room: vLLM asks again at each step.
_ANSWER_S = 1.0
#: Seconds until blocks that found no room are handed over again, doubled each time up to the second figure.
_RETRY_S = (0.25, 8.0)


@dataclass(slots=True)
class _Tracked:
    """One request.

    Attributes:
        keys: None where its KV is neither kept nor served.
        later: whether its keys are made once the digest of its adapter is known.
        sent: blocks whose keys the workers have.
        saved: blocks that are in the store, or on the way into it.
        failed: whether a load of it has failed: it is not loaded again, so that no request waits for ever.
        planned: blocks `start, stop` that the last answer to vLLM offered.
        queried, cheaper_computed: tokens to count once vLLM has let the request in, which it may ask for many times.
        hit: tokens from DRAM and from SSD, of the load that vLLM took up last.
    """

    request: Any
    keys: RequestKeys | None
    later: bool = False
    sent: int = 0
    saved: int = 0
    failed: bool = False
    planned: tuple[int, int] = (0, 0)
    queried: int = 0
    cheaper_computed: int = 0
    hit: tuple[int, int] = (0, 0)
    answer: Answer | None = None
    answered: tuple[int, float] = (0, 0.0)  # length of the chain that was asked for, and when


class SchedulerSide:
    """The scheduler's thread only."""

    def __init__(self, block_tokens: int, events: Events | None = None) -> None:
        """`events`: None where nobody wants KV events."""
        self._width = block_tokens
        self.events = events
        self._tracked: dict[str, _Tracked] = {}
        self._adapters = Adapters()
        self._rates = Rates()
        self._lookup: Lookup | None = None
        self._pool: Any = None
        self._outdated: Any = None  # vLLM's index of cached blocks, where a reset has left it as it was
        self._told_unknown = False
        self._epoch = ""
        self._step = 0
        self._nbytes_per_block = 0
        self._loads: list[LoadJob] = []
        self._ended: list[str] = []
        self._ending: dict[str, tuple[int, int]] = {}  # by request: its last step, and what is saved if that saves all
        self._retry_at_s, self._retry_s = 0.0, _RETRY_S[0]
        self.counts = SchedulerCounts()

    def connect(self, handshakes: Mapping[tuple[int, int], Handshake], lookup: Lookup | None = None) -> None:
        """The workers are there. `handshakes` by (pipeline rank, tensor rank); before the first request."""
        ranks = [handshakes[rank] for rank in sorted(handshakes)]
        self._base = ranks[0].namespace
        # Of one rank: they load side by side, and each tells how long its own share took.
        self._nbytes_per_block = max(one.namespace.layout.block_nbytes for one in ranks)
        self._namespace = with_epoch(self._base, self._epoch)
        self._adapters.ranks = len(ranks)
        self._lookup = lookup_for(ranks) if lookup is None else lookup

    def bind_pool(self, pool: Any) -> None:
        """vLLM's pool of blocks, with its own prefix cache: looked at, never changed."""
        self._pool = pool

    # -- matching ------------------------------------------------------------------------------------------------------

    def match(self, request: Any, computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens behind `computed_tokens` (whole blocks) the ladder holds, and that they come later; (None,
        False): ask again at the next step.

        At least the last token of a prompt is left to compute, as with vLLM's own hits.
        """
        tracked = self._track(request)
        if isinstance(tracked, Wait):
            return None, False
        if computed_tokens and self._outdated is not None and self._index() is self._outdated:
            tracked.keys, tracked.later = (
                None,
                False,
            )  # begins on what vLLM has kept over a reset: of other weights, for all we know
        if tracked.keys is None or tracked.failed or request.skip_reading_prefix_cache:
            return 0, False
        if self._adapters.is_bad(request.lora_request):
            return 0, False
        start, most = computed_tokens // self._width, (request.num_tokens - 1) // self._width
        if most <= start:
            return 0, False
        answer = self._ask(tracked, most)
        if answer is None:
            return None, False
        stop = min(answer[0], most)
        tokens = (stop - start) * self._width
        if tokens <= 0:
            return 0, False
        if not self._rates.worth_loading(tokens, (stop - start) * self._nbytes_per_block, time.monotonic()):
            tracked.cheaper_computed = tokens
            return 0, False
        tracked.planned, tracked.cheaper_computed = (start, stop), 0
        return tokens, True

    def _track(self, request: Any) -> _Tracked | Wait:
        tracked = self._tracked.get(request.request_id)
        if tracked is not None:
            return tracked
        adapter = self._adapters.digest(request.lora_request)
        if isinstance(adapter, Wait):
            return adapter
        tracked = self._tracked[request.request_id] = _Tracked(request, None)
        if not request.resumable:  # a session may take tokens back
            tracked.later = isinstance(adapter, Later)
            if isinstance(adapter, bytes):
                tracked.keys = RequestKeys(request, self._namespace, adapter)
        return tracked

    def _late_keys(self, tracked: _Tracked) -> None:
        adapter = self._adapters.digest(tracked.request.lora_request)
        if isinstance(adapter, bytes):
            tracked.keys, tracked.later = RequestKeys(tracked.request, self._namespace, adapter), False
        elif isinstance(adapter, Unknown):
            tracked.later = False

    def _ask(self, tracked: _Tracked, blocks: int) -> Answer | None:
        now_s = time.monotonic()
        if tracked.answer is not None and tracked.answered[0] == blocks and now_s - tracked.answered[1] < _ANSWER_S:
            return tracked.answer
        chain = self._keys(tracked, blocks)
        assert self._lookup is not None, "vLLM has handed over the workers' handshakes before the first request"
        if chain is None:
            return 0, 0
        answer = self._lookup.ask(tracked.request.request_id, self._epoch, self._namespace.digest, chain)
        if answer is not None:
            self._lookup.forget(tracked.request.request_id)
            tracked.queried = blocks * self._width
            tracked.answer, tracked.answered = answer, (blocks, now_s)
            if self.events is not None:
                self.events.found(tracked.request, chain, answer[0])
        return answer

    def _keys(self, tracked: _Tracked, blocks: int) -> bytes | None:
        """Keys of the first `blocks` blocks, end to end; None if the request's KV turns out not to be for keeping."""
        if tracked.keys is None:
            return None
        try:
            return tracked.keys.upto(blocks).data
        except TypeError as error:
            if not self._told_unknown:
                self._told_unknown = True
                _log.warning("request %s is not cached: %s", tracked.request.request_id, error)
            tracked.keys = None
            return None

    # -- planning ------------------------------------------------------------------------------------------------------

    def allocated(self, request: Any, rows: list[int], external_tokens: int) -> None:
        """vLLM has given the request its blocks (`rows` of the pool); `external_tokens` of them are to be loaded."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return
        self.counts.queried += tracked.queried
        self.counts.cheaper_computed += tracked.cheaper_computed
        tracked.queried = tracked.cheaper_computed = 0
        if not external_tokens:
            return
        start, stop = tracked.planned
        blocks = external_tokens // self._width
        assert start + blocks <= stop, "vLLM asks for more than was offered"
        stop = start + blocks
        deadline_s = self._rates.deadline_s(external_tokens)
        self._loads.append(LoadJob(request.request_id, start, rows[start:stop], deadline_s))
        tracked.saved = max(tracked.saved, stop)
        answer = tracked.answer or (0, 0)
        in_dram = min(blocks, max(0, answer[1] - start)) * self._width
        tracked.hit = in_dram, external_tokens - in_dram
        self.counts.hit_dram += tracked.hit[0]
        self.counts.hit_ssd += tracked.hit[1]
        tracked.answer = None

    def hit_tokens(self, request: Any, external_tokens: int) -> tuple[int, int]:
        """Of the tokens that `allocated` was told of: (from DRAM, from SSD), as it was known then."""
        tracked = self._tracked.get(request.request_id)
        return tracked.hit if tracked is not None and sum(tracked.hit) == external_tokens else (0, external_tokens)

    def plan(self, scheduler_output: Any) -> StepPlan:
        """The jobs of this step: loads of what was allocated, saves of the blocks that it fills."""
        self._step += 1
        plan = StepPlan(
            self._epoch, self._namespace.digest, scheduler_output.total_num_scheduled_tokens, step=self._step,
            asks=self._adapters.asks,
        )  # fmt: skip
        plan.loads, self._loads = self._loads, []
        plan.ended, self._ended = self._ended, []
        for job in plan.loads:
            self._send_keys(plan, self._tracked[job.request_id], job.start + len(job.rows))
        if time.monotonic() >= self._retry_at_s:
            for request_id, tokens in scheduler_output.num_scheduled_tokens.items():
                self._plan_save(plan, request_id, tokens, scheduler_output.kv_connector_block_state)
        return plan

    def _plan_save(self, plan: StepPlan, request_id: str, tokens: int, block_state: Any) -> None:
        tracked = self._tracked.get(request_id)
        if tracked is not None and tracked.later:
            self._late_keys(tracked)
        if tracked is None or tracked.keys is None or self._adapters.is_bad(tracked.request.lora_request):
            return
        # Drafted or placeholder tokens are no tokens yet: only what the request knows counts.
        whole = min(tracked.request.num_computed_tokens + tokens, tracked.request.num_tokens) // self._width
        if whole <= tracked.saved or (keys := self._keys(tracked, whole)) is None:
            return
        (rows,) = block_state.get_block_ids(request_id)
        lora = tracked.request.lora_request
        number = 0 if lora is None else lora.lora_int_id
        plan.saves.append(SaveJob(request_id, tracked.saved, rows[tracked.saved : whole], number))
        self._send_keys(plan, tracked, whole)
        if self.events is not None:
            self.events.saving(plan.step, tracked.request, keys, tracked.saved, whole)
        tracked.saved = whole

    def _send_keys(self, plan: StepPlan, tracked: _Tracked, blocks: int) -> None:
        keys = self._keys(tracked, blocks)
        if keys is None or blocks <= tracked.sent:
            return
        request_id = tracked.request.request_id
        first, had = plan.keys.get(request_id, (tracked.sent, b""))
        plan.keys[request_id] = (first, had + keys[32 * tracked.sent : 32 * blocks])
        tracked.sent = blocks

    # -- what came of it -----------------------------------------------------------------------------------------------

    def take_in(self, report: WorkerReport) -> None:
        """What the workers did in a step."""
        self._adapters.take_in(report.adapters)
        if self.events is not None:
            self.events.take_in(report)
        self._rates.computed(*report.compute)
        for nbytes, elapsed_s in report.loads:
            self._rates.loaded(nbytes, elapsed_s, time.monotonic())
        for request_id, block in report.failed.items():
            tracked = self._tracked.get(request_id)
            if tracked is not None:
                tracked.failed, tracked.saved, tracked.answer = True, min(tracked.saved, block), None
        for request_id, block in report.unsaved.items():
            tracked = self._tracked.get(request_id)
            if tracked is not None:
                tracked.saved = min(tracked.saved, block)
            elif request_id in self._ending:  # it has ended with this step
                self.counts.lost_blocks += max(0, self._ending[request_id][1] - block)
        self._ending = {name: one for name, one in self._ending.items() if one[0] > report.step}
        if report.unsaved:
            self._retry_at_s = time.monotonic() + self._retry_s
            self._retry_s = min(2 * self._retry_s, _RETRY_S[1])
        elif self._retry_s > _RETRY_S[0] and time.monotonic() > self._retry_at_s + self._retry_s:
            self._retry_s = _RETRY_S[0]

    def finished(self, request_id: str) -> None:
        """The request has ended, in whatever way. A load that is under way ends by itself."""
        tracked = self._tracked.get(request_id)
        if tracked is not None and tracked.keys is not None:
            whole = min(tracked.request.num_computed_tokens, tracked.request.num_tokens) // self._width
            self.counts.lost_blocks += max(0, whole - tracked.saved)
            self._ending[request_id] = self._step, tracked.saved
        self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        tracked = self._tracked.pop(request_id, None)
        if self._lookup is not None:
            self._lookup.forget(request_id)
        if tracked is not None and tracked.sent:
            self._ended.append(request_id)

    def reset(self) -> None:
        """Nothing that was kept so far is served any more; nor is kept what running requests compute from it, or others
        from vLLM's own prefix cache, which stays as it is while any request holds blocks.
        """
        index = self._index()
        self._outdated = index if index is not None and len(index) else None
        self._epoch = uuid.uuid4().hex
        self._namespace = with_epoch(self._base, self._epoch)
        if self.events is not None:
            self.events.reset()
        for request_id, tracked in list(self._tracked.items()):
            if tracked.request.num_computed_tokens:
                tracked.keys, tracked.later = None, False
            else:
                self._forget(request_id)

    def _index(self) -> Any:
        return None if self._pool is None else self._pool.cached_block_hash_to_block

    def close(self) -> None:
        """Let go of threads and sockets."""
        if self._lookup is not None:
            self._lookup.close()

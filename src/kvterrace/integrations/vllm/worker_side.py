"""The worker's half: moves blocks between vLLM's pool of pages and the store of this rank.

Loads run on while the engine goes on; `poll` takes in what has ended. Saves end within the step that computed the
blocks: after it, their rows may be given to other requests. All of it is the worker's thread, except `match`, which the
scheduler asks from a thread of its own.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import Any

from kvterrace.buffers import PagedBlocks
from kvterrace.errors import KVTerraceError
from kvterrace.integrations.vllm.adapters import Signatures
from kvterrace.integrations.vllm.lookup import Answer
from kvterrace.integrations.vllm.messages import LoadJob, StepPlan, WorkerReport
from kvterrace.integrations.vllm.metrics import WorkerCounts
from kvterrace.integrations.vllm.namespace import rank_chain, with_epoch
from kvterrace.integrations.vllm.pages import Pages
from kvterrace.integrations.vllm.saving import Saver, WorkerStore
from kvterrace.integrations.vllm.telling import FAULTS, Teller
from kvterrace.keys import KEY_NBYTES, KeyChain, Namespace
from kvterrace.types import Expired, Hit, Tier

__all__ = ["Loaded", "WorkerSide"]

_log = logging.getLogger("kvterrace.vllm")

#: Seconds that an idle step waits for a load: a scheduler that spins would keep the store's thread from the GIL.
_IDLE_WAIT_S = 0.002
#: A load is seen to have ended only between steps. How long it took is told where that is off by less than this, in
#: seconds, or by less than half of it: else it is the length of a step that would be taken for that of loads.
_BLUR_S = 0.02
#: Seconds between looks at the store's own counts.
_LOOK_S = 1.0
#: Keys of the scheduler's that a rank with others remembers, to name what has left its ladder: about 50 MB.
_MOST_KEYS = 1 << 18


@dataclass(slots=True)
class Loaded:
    """What `poll` found.

    Attributes:
        requests: whose load has ended, well or not.
        failed_rows: rows of the pool that do not hold what they should.
    """

    requests: set[str] = field(default_factory=set)
    failed_rows: set[int] = field(default_factory=set)


@dataclass(slots=True)
class _Load:
    job: LoadJob
    transfer: Any  # None: it could not be submitted
    epoch: str
    began_s: float


class WorkerSide:
    """One rank's half."""

    def __init__(
        self, store: WorkerStore, namespace: Namespace, pages: Pages, *, tells_departures: bool = False
    ) -> None:
        """Takes over `store`, which is closed with this object. `tells_departures`: reports say which blocks have left
        the ladder.
        """
        self._store = store
        self._tells_departures = tells_departures
        self._scheduler_keys: dict[bytes, bytes] = {}  # by this rank's own, where they are others
        self._pages = pages
        self._base = namespace
        self._spaces = {"": namespace}
        self._epoch = ""
        self._dead: set[str] = set()
        self._step_failed = False
        self._keys: dict[str, bytes] = {}  # this rank's own, of the request's epoch
        self._loads: list[_Load] = []
        self._report = WorkerReport()
        self._plan: StepPlan | None = None
        self._began_s = self._step_s = self._polled_s = 0.0
        self._looked_s, self._was = 0.0, (0, 0)  # at the store's own counts: when, and what they were
        self.adapters = Signatures()
        self.counts = WorkerCounts()
        self._teller = Teller(self.counts)
        self._saver = Saver(store, pages, self.counts, self._teller)
        self._departed()  # begins it

    # -- what the scheduler asks ---------------------------------------------------------------------------------------

    @property
    def namespace(self) -> Namespace:
        """Of this rank's KV, with the weights as they were loaded."""
        return self._base

    def match(self, epoch: str, made_in: bytes, keys: bytes) -> Answer:
        """Blocks of a chain that are resident here, and how many of them, from the first on, in DRAM. Any thread."""
        if epoch in self._dead:
            return 0, 0
        try:
            found = self._store.match(rank_chain(self._space(epoch), keys, made_in)).tiers
        except (KVTerraceError, OSError) as error:
            self._teller.fault("match", error)
            return 0, 0
        return len(found), next((at for at, tier in enumerate(found) if tier is not Tier.DRAM), len(found))

    def _space(self, epoch: str) -> Namespace:
        space = self._spaces.get(epoch)
        if space is None:
            space = self._spaces[epoch] = with_epoch(self._base, epoch)
        return space

    def weights_changed(self, method: str) -> None:
        """The weights may be others from now on. What was kept under the epoch known here is not served any more, and
        nothing is kept, until the scheduler begins another."""
        if self._epoch not in self._dead:
            self._dead.add(self._epoch)
            _log.warning(
                "%s has changed the weights: the cache pauses until reset_prefix_cache(reset_connector=True) is called",
                method,
            )

    # -- a step --------------------------------------------------------------------------------------------------------

    def begin(self, plan: StepPlan) -> None:
        """A step begins: `plan` is what the scheduler wants with it."""
        self._plan, self._epoch = plan, plan.epoch
        self._report.step, self._report.asked = plan.step, plan.asks
        for request_id in plan.ended:
            self._keys.pop(request_id, None)
        space = self._space(plan.epoch)
        for request_id, (first, keys) in plan.keys.items():
            had = self._keys.get(request_id, b"")[: 32 * first]
            assert len(had) == 32 * first, "the scheduler takes keys for sent that are not here"
            mine = rank_chain(space, keys, plan.made_in).data
            self._keys[request_id] = had + mine
            if self._tells_departures and mine != keys:
                self._remember(mine, keys)
        self._began_s = time.monotonic()

    def _remember(self, mine: bytes, keys: bytes) -> None:
        for at in range(0, len(keys), KEY_NBYTES):
            self._scheduler_keys[mine[at : at + KEY_NBYTES]] = keys[at : at + KEY_NBYTES]
        while len(self._scheduler_keys) > _MOST_KEYS:
            del self._scheduler_keys[next(iter(self._scheduler_keys))]

    def load(self) -> None:
        """Begin the step's loads. Returns at once."""
        assert self._plan is not None
        for job in self._plan.loads:
            began_s, transfer = time.monotonic(), None
            if self._epoch not in self._dead:
                stop = job.start + len(job.rows)
                out = PagedBlocks(self._pages.parts, job.rows)
                try:
                    chain = self._chain(job.request_id, stop)
                    transfer = self._store.get(chain, out, start=job.start, stop=stop, deadline_s=job.deadline_s)
                except (KVTerraceError, OSError) as error:
                    self._teller.fault("load", error)
            self._loads.append(_Load(job, transfer, self._epoch, began_s))
        self._plan.loads = []

    def step_failed(self) -> None:
        """The step's forward pass has raised: its blocks hold anything, and vLLM may take them for computed if somebody
        goes on with this engine. Nothing is kept any more.
        """
        self._step_failed = True
        self._teller.warn(
            "step failed", "a step of the engine has failed: nothing more is kept until it is started again"
        )

    def save(self) -> None:
        """Store the blocks that the step has filled. When it returns, nothing reads the pool any more."""
        assert self._plan is not None
        self._step_s = time.monotonic() - self._began_s
        if self._plan.tokens:
            self._report.compute = (self._plan.tokens, self._step_s)
        jobs, self._plan.saves = self._plan.saves, []
        self._report.unkept = {job.request_id for job in jobs}
        if not jobs or self._step_failed or self._epoch in self._dead:
            return
        self._report.gone_before += self._departed()
        kept = [job for job in jobs if not self.adapters.is_changed(job.adapter)]
        chains = [self._chain(job.request_id, job.start + len(job.rows)) for job in kept]
        self._saver.save(list(zip(kept, chains, strict=True)), self._step_s, self._report)

    def poll(self) -> Loaded:
        """Take in the loads that have ended. In a step that computes nothing, wait a little for one."""
        found = Loaded()
        if self._loads and self._plan is not None and not self._plan.tokens and self._loads[0].transfer is not None:
            self._store.wait(self._loads[0].transfer, _IDLE_WAIT_S)
        still = []
        for load in self._loads:
            if load.transfer is not None and not load.transfer.done:
                still.append(load)
            else:
                self._loaded(load, found)
        self._loads = still
        self._polled_s = time.monotonic()
        return found

    def _loaded(self, load: _Load, found: Loaded) -> None:
        job = load.job
        outcomes = [] if load.transfer is None else self._store.wait(load.transfer, 0.0)
        if load.epoch != self._epoch or load.epoch in self._dead:  # of weights that are no more
            outcomes = []
        bad = [at for at in range(len(job.rows)) if at >= len(outcomes) or not isinstance(outcomes[at], Hit)]
        found.requests.add(job.request_id)
        found.failed_rows.update(job.rows[at] for at in bad)
        now_s = time.monotonic()
        elapsed_s, blur_s = now_s - load.began_s, now_s - max(load.began_s, self._polled_s)
        self.counts.load_s.append(elapsed_s)
        for outcome in outcomes:
            if isinstance(outcome, Hit):
                self.counts.blocks["dram" if outcome.tier is Tier.DRAM else "ssd"] += 1
            else:
                self.counts.blocks[FAULTS[type(outcome)]] += 1
                self._warn_load(job, outcome)
        nbytes = (len(job.rows) - len(bad)) * self._base.layout.block_nbytes
        self.counts.loaded_nbytes += nbytes
        if bad:
            self._report.failed[job.request_id] = job.start + bad[0]
        known = not bad and blur_s <= max(_BLUR_S, elapsed_s / 2)
        if known or any(isinstance(outcome, Expired) for outcome in outcomes):
            self._report.loads.append((nbytes, elapsed_s))

    def _warn_load(self, job: LoadJob, outcome: Any) -> None:
        kind = FAULTS[type(outcome)]
        self._teller.warn(
            f"load {kind}",
            "a block did not arrive (%s, request %s): it is computed. More of this kind are counted in "
            "vllm:kvterrace_blocks, and not told",
            outcome,
            job.request_id,
        )

    def report(self) -> WorkerReport | None:
        """What the scheduler should know of this step; None: nothing."""
        report, self._report = self._report, WorkerReport()
        report.adapters = self.adapters.take_news()
        report.gone_after = self._departed()
        return report or None

    def take_counts(self) -> dict[str, Any]:
        """What was done since the last call; of what the store counts itself, as it was less than a second ago."""
        now_s = time.monotonic()
        if now_s - self._looked_s >= _LOOK_S:
            self._looked_s, stats = now_s, self._store.stats()
            was, self._was = self._was, (stats.dropped_blocks, stats.ssd_write_failures)
            self.counts.blocks["dropped"] += self._was[0] - was[0]
            self.counts.write_failures += self._was[1] - was[1]
        return self.counts.take()

    def _departed(self) -> bytes:
        """Keys of blocks that have left the ladder since the last call, as the scheduler makes them."""
        if not self._tells_departures:
            return b""
        try:
            gone = self._store.take_departed()
        except (KVTerraceError, OSError) as error:
            self._teller.fault("match", error)
            return b""
        keys = (gone[at : at + KEY_NBYTES] for at in range(0, len(gone), KEY_NBYTES))
        return b"".join(self._scheduler_keys.pop(key, key) for key in keys)

    def end(self) -> None:
        """The step has ended."""
        self._plan = None

    # -- ending --------------------------------------------------------------------------------------------------------

    def close(self, timeout_s: float) -> bool:
        """End transfers and close the store; whether all was written."""
        return self._store.close(timeout_s)

    def _chain(self, request_id: str, blocks: int) -> KeyChain:
        assert self._plan is not None
        keys = self._keys[request_id][: 32 * blocks]
        assert len(keys) == 32 * blocks, "a job for blocks whose keys were not sent"
        space = self._space(self._epoch)
        return KeyChain(space, space.root_key(), keys)

"""What the two sides of the connector tell each other, by way of vLLM: plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvterrace.keys import Namespace

__all__ = ["Handshake", "LoadJob", "SaveJob", "StepPlan", "WorkerReport"]


@dataclass(frozen=True, slots=True)
class Handshake(KVConnectorHandshakeMetadata):
    """A worker to the scheduler, once, before the first request.

    Attributes:
        namespace: of this rank's KV.
        pid, token: the worker's process, and its name there (see `lookup`).
        address: of its socket for look-ups; "" where it has none.
    """

    namespace: Namespace
    pid: int
    token: str
    address: str


@dataclass(frozen=True, slots=True)
class LoadJob:
    """Read blocks `start..start + len(rows)` of a request's chain into these rows of the pool, within `deadline_s`."""

    request_id: str
    start: int
    rows: list[int]
    deadline_s: float


@dataclass(frozen=True, slots=True)
class SaveJob:
    """Store blocks `start..start + len(rows)` of a request's chain from these rows, once the step has computed them.
    `adapter` is vLLM's number of the request's LoRA adapter, 0 without one.
    """

    request_id: str
    start: int
    rows: list[int]
    adapter: int = 0


@dataclass(slots=True)
class StepPlan(KVConnectorMetadata):
    """The scheduler to the workers, with each step.

    Attributes:
        epoch: of all jobs, see `namespace.with_epoch`.
        made_in: digest of the namespace that `keys` were made in.
        keys: what a worker has not yet of the chain of a request: (number of its first block, keys end to end).
        ended: requests whose chains are not needed any more.
        tokens: how many the step computes.
        step: number of the step; the report to it has the same.
        asks: whether a report is wanted, even of nothing.
    """

    epoch: str
    made_in: bytes
    tokens: int
    keys: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    loads: list[LoadJob] = field(default_factory=list)
    saves: list[SaveJob] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    step: int = 0
    asks: bool = False


@dataclass(slots=True)
class WorkerReport(KVConnectorWorkerMetadata):
    """The workers to the scheduler, with each step's output.

    Attributes:
        unsaved: for requests with blocks that could not be taken: the first that is not in the store.
        failed: for requests whose load failed: the first block that did not arrive.
        compute: (tokens, seconds) of the step's forward pass; the slowest rank's.
        loads: (bytes, seconds) of each load that arrived and was seen to in time, or that took too long and was given
            up.
        step: of the plan that it answers.
        asked: whether that wanted a report.
        unkept: requests whose saves of this step were left out.
        gone_before, gone_after: keys, as the scheduler makes them, of blocks that have left a ladder: before the step
            saved, and since. Only where KV events are wanted.
        adapters: of each LoRA adapter that was loaded, by number: the digest on each rank, see `adapters`.
    """

    unsaved: dict[str, int] = field(default_factory=dict)
    failed: dict[str, int] = field(default_factory=dict)
    compute: tuple[int, float] = (0, 0.0)
    loads: list[tuple[int, float]] = field(default_factory=list)
    step: int = 0
    asked: bool = False
    adapters: dict[int, list[bytes]] = field(default_factory=dict)
    unkept: set[str] = field(default_factory=set)
    gone_before: bytes = b""
    gone_after: bytes = b""

    def aggregate(self, other: Any) -> WorkerReport:
        """Both in one: of what two ranks say of a request, the lesser counts."""
        return WorkerReport(
            unsaved=_least(self.unsaved, other.unsaved),
            failed=_least(self.failed, other.failed),
            compute=max(self.compute, other.compute, key=lambda one: one[1]),
            loads=[*self.loads, *other.loads],
            step=max(self.step, other.step),
            asked=self.asked or other.asked,
            unkept=self.unkept | other.unkept,
            gone_before=self.gone_before + other.gone_before,
            gone_after=self.gone_after + other.gone_after,
            adapters={
                number: self.adapters.get(number, []) + other.adapters.get(number, [])
                for number in {**self.adapters, **other.adapters}
            },
        )

    def __bool__(self) -> bool:
        told = self.unsaved or self.failed or self.loads or self.compute[0] or self.adapters or self.unkept
        return bool(told or self.asked or self.gone_before or self.gone_after)


def _least(one: dict[str, int], other: dict[str, int]) -> dict[str, int]:
    return {key: min(one.get(key, 2**62), other.get(key, 2**62)) for key in {**one, **other}}

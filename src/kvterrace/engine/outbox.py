"""Requests for several engines, handed over together."""

from __future__ import annotations

from kvterrace.io.base import IoEngine, IoRequest

__all__ = ["Outbox"]


class Outbox:
    """Collects requests; `send` submits them, one call for each engine."""

    def __init__(self) -> None:
        self._requests: dict[int, tuple[IoEngine, list[IoRequest]]] = {}

    def add(self, engine: IoEngine, request: IoRequest) -> None:
        """One more request for `engine`."""
        self._requests.setdefault(id(engine), (engine, []))[1].append(request)

    def send(self) -> None:
        """Submit what was added since the last time."""
        requests, self._requests = self._requests, {}
        for engine, some in requests.values():
            engine.submit(some)

"""How a drive is doing, and what is no longer asked of it: `breaker` (the whole drive), `quarantine` (places,
blocks).
"""

from __future__ import annotations

from kvterrace.health.breaker import Breaker, BreakerState, Fault, Side, Ticket, Transition, fault_of
from kvterrace.health.quarantine import LogWrite, Quarantine
from kvterrace.health.quarantine_log import LogFile

__all__ = [
    "Breaker",
    "BreakerState",
    "Fault",
    "LogFile",
    "LogWrite",
    "Quarantine",
    "Side",
    "Ticket",
    "Transition",
    "fault_of",
]

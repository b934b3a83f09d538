"""kvterrace: KV cache of large language models on a ladder of memories.

store = open_store("kv", dram_bytes="4GiB", ssd_bytes="200GiB")
chain = chain_keys(Namespace(model=fingerprint, layout=layout), token_ids)
store.wait(store.get(chain[: store.match(chain).blocks], buffers))
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvterrace.engine.counters import DriveStats, StoreStats
    from kvterrace.engine.transfers import Transfer
    from kvterrace.errors import (
        ConfigError,
        FormatVersionError,
        KVTerraceError,
        LayoutError,
        NotAStoreError,
        StoreClosedError,
        StoreLockedError,
        StoreUnusableError,
        UnsupportedModelError,
    )
    from kvterrace.handles import Match, Pin
    from kvterrace.keys import KeyChain, Namespace, chain_keys
    from kvterrace.layout import KVLayout
    from kvterrace.opening import open_store
    from kvterrace.store import Store
    from kvterrace.tracing.recorder import TraceRecorder
    from kvterrace.types import (
        Busy,
        Corrupt,
        DeviceFailed,
        Expired,
        GetOutcome,
        Hint,
        Hit,
        Miss,
        Pending,
        Present,
        PutOutcome,
        Rejected,
        Stale,
        Stored,
        Tier,
    )

__version__ = "0.1.0.dev0"

__all__ = [
    "Busy",
    "ConfigError",
    "Corrupt",
    "DeviceFailed",
    "DriveStats",
    "Expired",
    "FormatVersionError",
    "GetOutcome",
    "Hint",
    "Hit",
    "KVLayout",
    "KVTerraceError",
    "KeyChain",
    "LayoutError",
    "Match",
    "Miss",
    "Namespace",
    "NotAStoreError",
    "Pending",
    "Pin",
    "Present",
    "PutOutcome",
    "Rejected",
    "Stale",
    "Store",
    "StoreClosedError",
    "StoreLockedError",
    "StoreStats",
    "StoreUnusableError",
    "Stored",
    "Tier",
    "TraceRecorder",
    "Transfer",
    "UnsupportedModelError",
    "__version__",
    "chain_keys",
    "open_store",
]

#: Where each name comes from, imported when first asked for: a command that only wants the version, or a server
#: that opens a store later, does not pay for all of it at import.
_HOMES = {
    "Busy": "kvterrace.types",
    "ConfigError": "kvterrace.errors",
    "Corrupt": "kvterrace.types",
    "DeviceFailed": "kvterrace.types",
    "DriveStats": "kvterrace.engine.counters",
    "Expired": "kvterrace.types",
    "FormatVersionError": "kvterrace.errors",
    "GetOutcome": "kvterrace.types",
    "Hint": "kvterrace.types",
    "Hit": "kvterrace.types",
    "KVLayout": "kvterrace.layout",
    "KVTerraceError": "kvterrace.errors",
    "KeyChain": "kvterrace.keys",
    "LayoutError": "kvterrace.errors",
    "Match": "kvterrace.handles",
    "Miss": "kvterrace.types",
    "Namespace": "kvterrace.keys",
    "NotAStoreError": "kvterrace.errors",
    "Pending": "kvterrace.types",
    "Pin": "kvterrace.handles",
    "Present": "kvterrace.types",
    "PutOutcome": "kvterrace.types",
    "Rejected": "kvterrace.types",
    "Stale": "kvterrace.types",
    "Store": "kvterrace.store",
    "StoreClosedError": "kvterrace.errors",
    "StoreLockedError": "kvterrace.errors",
    "StoreStats": "kvterrace.engine.counters",
    "StoreUnusableError": "kvterrace.errors",
    "Stored": "kvterrace.types",
    "Tier": "kvterrace.types",
    "TraceRecorder": "kvterrace.tracing.recorder",
    "Transfer": "kvterrace.engine.transfers",
    "UnsupportedModelError": "kvterrace.errors",
    "chain_keys": "kvterrace.keys",
    "open_store": "kvterrace.opening",
}


def __getattr__(name: str) -> object:
    import importlib

    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'kvterrace' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(home), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)

"""kvterrace: KV cache of large language models on a ladder of memories.

store = open_store("kv", dram_bytes="4GiB", ssd_bytes="200GiB")
chain = chain_keys(Namespace(model=fingerprint, layout=layout), token_ids)
store.wait(store.get(chain[: store.match(chain).blocks], buffers))
"""

from kvterrace.engine.counters import StoreStats
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
from kvterrace.store import Store, open_store
from kvterrace.types import (
    Busy,
    Corrupt,
    DeviceFailed,
    Expired,
    GetOutcome,
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
    "Expired",
    "FormatVersionError",
    "GetOutcome",
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
    "Transfer",
    "UnsupportedModelError",
    "__version__",
    "chain_keys",
    "open_store",
]

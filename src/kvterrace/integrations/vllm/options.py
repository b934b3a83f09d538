"""What a user says in `kv_connector_extra_config`, checked; and what of it is one rank's share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvterrace.config import parse_nbytes
from kvterrace.errors import ConfigError

__all__ = ["Options", "Place", "place_of", "read_options"]

_DEFAULTS: Mapping[str, Any] = {
    "path": None,
    "dram_bytes": "2GiB",
    "ssd_bytes": "32GiB",
    "tenant": "",
    "read_only": False,
}


@dataclass(frozen=True, slots=True)
class Options:
    """The options of one engine.

    Attributes:
        paths: a folder on each drive.
        dram_nbytes, ssd_nbytes: of all ranks on this host together.
        tenant: who may share, see `Namespace`.
        read_only: use what another engine writes, and write nothing.
    """

    paths: tuple[Path, ...]
    dram_nbytes: int
    ssd_nbytes: int
    tenant: str
    read_only: bool


@dataclass(frozen=True, slots=True)
class Place:
    """Where one worker stands. `ranks_on_host` share the host's bytes; each writes a partition of its own."""

    data_rank: int
    pipeline_rank: int
    pipeline_size: int
    tensor_rank: int
    tensor_size: int
    ranks_on_host: int

    @property
    def partition(self) -> str:
        """Name of the partition. Without the sizes: an engine with fewer ranks goes on in the space of the old one."""
        return f"vllm-dp{self.data_rank}-pp{self.pipeline_rank}-tp{self.tensor_rank}"


def read_options(extra: Mapping[str, Any]) -> Options:
    """Raises ConfigError: an unknown key, a value that cannot work, or no path."""
    unknown = sorted(set(extra) - set(_DEFAULTS))
    if unknown:
        raise ConfigError(
            f"kv_connector_extra_config: unknown key {', '.join(map(repr, unknown))}; known: {', '.join(_DEFAULTS)}"
        )
    given = {**_DEFAULTS, **extra}
    if not isinstance(given["tenant"], str):
        raise ConfigError(f"tenant must be text, not {given['tenant']!r}")
    if not isinstance(given["read_only"], bool):
        raise ConfigError(f"read_only must be true or false, not {given['read_only']!r}")
    return Options(
        paths=_paths(given["path"]),
        dram_nbytes=parse_nbytes(given["dram_bytes"], "dram_bytes"),
        ssd_nbytes=parse_nbytes(given["ssd_bytes"], "ssd_bytes"),
        tenant=given["tenant"],
        read_only=given["read_only"],
    )


def _paths(value: object) -> tuple[Path, ...]:
    paths = [value] if isinstance(value, str) else value
    if not isinstance(paths, list) or not paths or not all(isinstance(path, str) and path for path in paths):
        raise ConfigError(
            f"kv_connector_extra_config: path is {value!r}; give the folder of the store, or a list with one on each "
            "drive"
        )
    return tuple(Path(path) for path in paths)


def place_of(parallel_config: Any, *, rank: int) -> Place:
    """Where the worker of `rank` (of the engine's world) stands."""
    tensor_size, pipeline_size = parallel_config.tensor_parallel_size, parallel_config.pipeline_parallel_size
    per_node = max(1, parallel_config.world_size // max(1, parallel_config.nnodes))
    return Place(
        data_rank=parallel_config.data_parallel_index,
        pipeline_rank=rank // tensor_size,
        pipeline_size=pipeline_size,
        tensor_rank=rank % tensor_size,
        tensor_size=tensor_size,
        ranks_on_host=per_node * max(1, parallel_config.data_parallel_size_local),
    )

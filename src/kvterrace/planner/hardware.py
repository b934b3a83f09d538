"""A machine as data: accelerators, links and tiers, from TOML. Sources of the shipped figures: data/hardware.toml."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from pathlib import Path

from kvterrace.errors import ConfigError
from kvterrace.planner.fields import Fields

__all__ = [
    "Accelerator",
    "Link",
    "Machine",
    "Storage",
    "load_machine",
    "machine_from",
    "machine_names",
    "usual_drives",
    "with_bench",
]

_GB = 1e9
_GIB = 2**30
#: Share of a tier that KV may fill, unless the machine says otherwise. Hosts need memory; drives, room for garbage.
_KV_SHARE = {"dram": 0.8, "cxl": 1.0, "ssd": 0.9, "remote": 0.9}
#: Share of the datasheet's bandwidth that many reads of a MiB reach; assumptions (DRAM: as STREAM does).
_EFFICIENCY = {"dram": 0.8, "cxl": 0.8, "ssd": 0.9, "remote": 0.9}
_FIRST_BYTE_US = {"dram": 20.0, "cxl": 20.0, "ssd": 150.0, "remote": 500.0}
_MAX_NBYTES = 16 << 20
_USUAL_DRIVE = "nvme-gen5-7680gb"


@dataclass(frozen=True, slots=True)
class Accelerator:
    """All accelerators of a machine; the figures are of one.

    Attributes:
        flops, flops_8bit: dense multiply-adds count two; 16 and 8 bit. 8 bit is 0 where it is no faster.
        compute_efficiency: share of the peak that a prefill of long prompts reaches.
        memory_efficiency: share of the memory's bandwidth that a decoding step reaches.
    """

    name: str
    count: int
    memory_nbytes: int
    memory_bytes_per_s: float
    flops: float
    flops_8bit: float
    compute_efficiency: float
    memory_efficiency: float
    price_usd: float
    source: str


@dataclass(frozen=True, slots=True)
class Link:
    """A link, in one direction. `other_bytes_per_s` is what others move over it all the time."""

    name: str
    count: int
    bytes_per_s: float
    efficiency: float
    other_bytes_per_s: float
    source: str

    @property
    def usable_bytes_per_s(self) -> float:
        """What is left for KV, over all `count`."""
        return max(0.0, self.count * self.bytes_per_s * self.efficiency - self.other_bytes_per_s)


@dataclass(frozen=True, slots=True)
class Storage:
    """A tier below HBM; the figures are of all its drives or modules together.

    Attributes:
        name: `dram`, `cxl`, `ssd` or `remote`.
        kv_share: of the capacity that KV may fill.
        read_bytes_per_s, write_bytes_per_s: what large reads and writes reach.
        read_iops: 0 where they do not limit.
        first_byte_s: from asking for a block to its first byte.
        dwpd, rated_years: drive writes a day over its rated life; 0 where writing wears nothing.
        link: the network on the way to it, if there is one.
    """

    name: str
    count: int
    capacity_nbytes: int
    kv_share: float
    read_bytes_per_s: float
    write_bytes_per_s: float
    read_iops: float
    first_byte_s: float
    dwpd: float
    rated_years: float
    price_usd: float
    source: str
    link: Link | None = None

    @property
    def kv_nbytes(self) -> int:
        """Bytes that KV may fill."""
        return int(self.capacity_nbytes * self.kv_share)


@dataclass(frozen=True, slots=True)
class Machine:
    """One machine.

    Attributes:
        storage: tiers below HBM, nearest first.
        gpudirect: drives and network reach accelerators without a copy in DRAM.
    """

    name: str
    source: str
    accelerator: Accelerator
    accelerator_link: Link
    io_die: Link
    storage: tuple[Storage, ...]
    gpudirect: bool
    host_price_usd: float

    def tier(self, name: str) -> Storage | None:
        """The tier of that name."""
        return next((one for one in self.storage if one.name == name), None)

    def without(self, *names: str) -> Machine:
        """The same machine without some tiers."""
        return replace(self, storage=tuple(one for one in self.storage if one.name not in names))

    @property
    def price_usd(self) -> float:
        """All of it."""
        parts = self.host_price_usd + sum(one.price_usd for one in self.storage)
        return parts + self.accelerator.count * self.accelerator.price_usd


def usual_drives(accelerators: int) -> Storage:
    """The drives that are assumed where a machine has none, and they are to be judged: one for two accelerators."""
    count = max(1, accelerators // 2)
    drives = _storage(Fields({"ssd": {"use": _USUAL_DRIVE, "count": count}}, "usual drives"), "ssd")
    assert drives is not None
    return drives


def machine_names() -> list[str]:
    """Machines that are shipped as data."""
    return list(_catalog()["machine"])


def load_machine(name: str, option: str = "--hardware") -> Machine:
    """A machine by its name or from a TOML file. Raises ConfigError; the message names the field."""
    machines = _catalog()["machine"]
    if name in machines:
        return machine_from(machines[name], name, f"hardware {name}")
    path = Path(name)
    if not path.is_file():
        raise ConfigError(f"{option} {name}: no file, and no known machine; known: {', '.join(machines)}")
    try:
        if path.stat().st_size > _MAX_NBYTES:
            raise ConfigError(f"{path}: larger than {_MAX_NBYTES} B: this describes no machine")
        data = tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be read as TOML: {error}") from error
    return machine_from(_over_known(data, str(path)), path.stem, str(path))


def _over_known(data: Mapping[str, object], where: str) -> Mapping[str, object]:
    """What a file changes of the known machine that its `use` names; of a section, the fields that it gives."""
    if "use" not in data:
        return data
    fields, machines = Fields(data, where), _catalog()["machine"]
    use = fields.text("use")
    if use not in machines:
        fields.refuse("use", f"{use!r} is no known machine; known: {', '.join(machines)}")
    merged: dict[str, object] = {**machines[use]}
    for name, mine in data.items():
        known = merged.get(name)
        both = isinstance(known, Mapping) and isinstance(mine, Mapping)
        merged[name] = {**known, **mine} if both else mine  # type: ignore[dict-item]
    del merged["use"]
    return merged


def machine_from(data: Mapping[str, object], name: str, where: str) -> Machine:
    """A machine from parsed TOML. Raises ConfigError; the message names the field."""
    fields = Fields(data, where)
    called = fields.text("name", name)
    accelerator = _accelerator(_part(fields, "accelerator", "accelerator"))
    link = _link(_part(fields, "accelerator_link", "link"), accelerator.count)
    io_die = _link(_part(fields, "io_die", "link"), 1)
    storage = [one for one in (_storage(fields, tier) for tier in _KV_SHARE) if one is not None]
    machine = Machine(
        called,
        fields.text("source", where),
        accelerator,
        link,
        io_die,
        tuple(storage),
        fields.flag("gpudirect", default=False),
        fields.number("host_price_usd", 0.0),
    )
    _refuse_unread(fields)
    return machine


def with_bench(machine: Machine, bench: Mapping[str, object], where: str) -> Machine:
    """The machine with what `kvterrace bench store --json` measured on its drives, in place of the datasheet's figures.

    Raises:
        ConfigError: it is no such file, or the machine has no drives.
    """
    fields = Fields(bench, where)
    schema = fields.text("schema")
    if schema != "kvterrace.bench-store/1":
        fields.refuse("schema", f"{schema!r}: give what `kvterrace bench store --json FILE` wrote")
    ssd = machine.tier("ssd")
    if ssd is None:
        raise ConfigError(f"{where}: {machine.name} has no ssd that these figures could be of")
    phases = fields.section("phases")
    if phases is None:
        fields.refuse("phases", "missing")
    rates = {}
    for phase in ("put", "get_cold"):
        section = phases.section(phase)
        if section is None:
            phases.refuse(phase, "missing")
        rates[phase] = section.number("gb_per_s", least=1e-6, most=1e6) * _GB
    measured = replace(
        ssd,
        read_bytes_per_s=rates["get_cold"],
        write_bytes_per_s=rates["put"],
        read_iops=0.0,
        source=f"measured: {where}",
    )
    return replace(machine, storage=tuple(measured if one is ssd else one for one in machine.storage))


@cache
def _catalog() -> dict[str, dict[str, Mapping[str, object]]]:
    text = resources.files("kvterrace.planner").joinpath("data/hardware.toml").read_text("utf-8")
    return tomllib.loads(text)


def _part(fields: Fields, name: str, kind: str) -> Fields:
    """A section, over the shipped part that its `use` names."""
    section = fields.section(name)
    if section is None:
        fields.refuse(name, 'missing; give a section of fields, or { use = "..." }')
    if not section.has("use"):
        return section
    use, parts = section.text("use"), _catalog()[kind]
    if use not in parts:
        section.refuse("use", f"{use!r} is no known {kind}; known: {', '.join(parts)}")
    merged = Fields({"name": use, **parts[use], **section.data}, section.where)
    merged.read.add("use")
    return merged


def _refuse_unread(fields: Fields) -> None:
    unread = fields.unread()
    if unread:
        fields.refuse(unread[0], f"unknown; known here: {', '.join(sorted(fields.read))}")


def _accelerator(fields: Fields) -> Accelerator:
    made = Accelerator(
        fields.text("name", "accelerator"),
        fields.count("count", default=1),
        _capacity(fields, "memory"),
        fields.number("memory_gb_per_s", least=1e-3, most=1e7) * _GB,
        fields.number("tflops", least=1e-3, most=1e8) * 1e12,
        fields.number("tflops_8bit", 0.0, most=1e8) * 1e12,
        fields.number("compute_efficiency", 0.5, least=0.01, most=1),
        fields.number("memory_efficiency", 0.8, least=0.01, most=1),
        fields.number("price_usd", 0.0),
        fields.text("source", fields.where),
    )
    if made.count > 4096:
        fields.refuse("count", f"{made.count}: at most 4096 accelerators are planned as one machine")
    _refuse_unread(fields)
    return made


def _link(fields: Fields, count: int) -> Link:
    made = Link(
        fields.text("name", fields.where.rpartition(": ")[2]),
        fields.count("count", default=count),
        fields.number("gb_per_s", least=1e-6, most=1e7) * _GB,
        fields.number("efficiency", 0.75, least=0.01, most=1),
        fields.number("other_gb_per_s", 0.0, most=1e7) * _GB,
        fields.text("source", fields.where),
    )
    _refuse_unread(fields)
    if not made.usable_bytes_per_s:
        fields.refuse("other_gb_per_s", "others fill this link: nothing is left for KV")
    return made


def _storage(machine: Fields, tier: str) -> Storage | None:
    if not machine.has(tier):
        return None
    fields = _part(machine, tier, "drive") if tier in {"ssd", "remote"} else machine.section(tier)
    assert fields is not None
    count = fields.count("count", default=1)
    efficiency = fields.number("efficiency", _EFFICIENCY[tier], least=0.01, most=1)
    name = fields.first("read_gb_per_s", "gb_per_s")
    read = fields.number(name, least=1e-6, most=1e7) * _GB
    wears = tier == "ssd"
    network = _link(_part(fields, "network", "link"), 1) if tier == "remote" else None
    made = Storage(
        tier,
        count,
        count * _capacity(fields, "capacity"),
        fields.number("kv_share", _KV_SHARE[tier], least=0.01, most=1),
        count * read * efficiency,
        count * fields.number("write_gb_per_s", read / _GB, least=1e-6, most=1e7) * _GB * efficiency,
        count * fields.number("read_iops", 0.0, most=1e12),
        fields.number("first_byte_us", _FIRST_BYTE_US[tier], most=1e9) / 1e6,
        fields.number("dwpd", least=1e-3, most=1000) if wears else 0.0,
        fields.number("rated_years", 5.0, least=0.1, most=50) if wears else 0.0,
        count * fields.number("price_usd", 0.0),
        fields.text("source", fields.where),
        network,
    )
    fields.value("name")
    if tier == "remote":
        for ignored in ("dwpd", "rated_years"):
            fields.value(ignored)
    _refuse_unread(fields)
    return made


def _capacity(fields: Fields, what: str) -> int:
    """Bytes, from `<what>_gb` or `<what>_gib`."""
    gb, gib = fields.has(f"{what}_gb"), fields.has(f"{what}_gib")
    if gb and gib:
        fields.refuse(f"{what}_gib", f"give {what}_gb or {what}_gib, not both")
    if gib:
        return int(fields.number(f"{what}_gib", least=1e-3, most=1e10) * _GIB)
    return int(fields.number(f"{what}_gb", least=1e-3, most=1e10) * _GB)

"""As much of JSON Schema (2020-12) as docs/reference/plan.schema.json needs, strict: no key that it does not name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "object": dict, "array": list, "string": str, "boolean": bool, "integer": int, "number": (int, float),
    "null": type(None),
}  # fmt: skip
_KNOWN = {
    "$schema", "$defs", "$ref", "title", "description", "type", "required", "properties", "additionalProperties",
    "items", "enum", "const", "minimum", "maximum", "anyOf",
}  # fmt: skip


def faults(value: object, schema: Mapping[str, Any], root: Mapping[str, Any], where: str = "") -> Iterator[str]:
    """What is wrong with `value`, one line each; nothing if it is as the schema says."""
    assert set(schema) <= _KNOWN, set(schema) - _KNOWN
    if "$ref" in schema:
        schema = root["$defs"][schema["$ref"].removeprefix("#/$defs/")]
    if "anyOf" in schema and all(list(faults(value, one, root, where)) for one in schema["anyOf"]):
        yield f"{where}: none of what it may be"
    if "const" in schema and value != schema["const"]:
        yield f"{where}: {value!r}, not {schema['const']!r}"
    if "enum" in schema and value not in schema["enum"]:
        yield f"{where}: {value!r}, not one of {schema['enum']}"
    names = schema.get("type", [])
    if names and not any(_is(value, name) for name in ([names] if isinstance(names, str) else names)):
        yield f"{where}: {value!r}, not {names}"
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        if not schema.get("minimum", value) <= value <= schema.get("maximum", value):
            yield f"{where}: {value!r}, out of range"
    elif isinstance(value, Mapping):
        yield from _of_object(value, schema, root, where)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for index, one in enumerate(value):
            yield from faults(one, schema.get("items", {}), root, f"{where}[{index}]")


def _is(value: object, name: str) -> bool:
    return isinstance(value, _TYPES[name]) and (name == "boolean" or not isinstance(value, bool))


def _of_object(
    value: Mapping[str, object], schema: Mapping[str, Any], root: Mapping[str, Any], where: str
) -> Iterator[str]:
    properties, others = schema.get("properties", {}), schema.get("additionalProperties")
    yield from (f"{where}: {name} is missing" for name in schema.get("required", ()) if name not in value)
    for name, one in value.items():
        if name in properties or others is not None:
            yield from faults(one, properties.get(name, others), root, f"{where}.{name}")
        elif properties:
            yield f"{where}: {name} is not in the schema"

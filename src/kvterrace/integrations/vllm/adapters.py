"""LoRA adapters, by the weights that vLLM has in memory.

A name and a path may stand for other weights after a restart, or at any moment: files change, and vLLM reads them when
it likes. So a worker hashes what it has just loaded, and tells the scheduler; a file is never looked at here.
"""

from __future__ import annotations

import hashlib
import logging
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from kvterrace.integrations.vllm.watching import watch

__all__ = ["Adapters", "Later", "Signatures", "Unknown", "Wait", "adapter_digest", "watch_adapters"]

_log = logging.getLogger("kvterrace.vllm")

_U32 = struct.Struct("<I")


class Wait:
    """The workers are being asked: ask again at the next step."""


class Later:
    """No worker has loaded the adapter: its digest is known after the step that does."""


class Unknown:
    """The adapter's weights cannot be told: KV computed with it is neither kept nor served."""


class Adapters:
    """The scheduler's half: digests by vLLM's number of an adapter. The scheduler's thread only."""

    def __init__(self) -> None:
        self.ranks = 1
        self._known: dict[int, bytes] = {}
        self._names: dict[str, bytes] = {}
        self._bad: set[int] = set()
        self._asked: set[int] = set()
        self._answered: set[int] = set()

    def digest(self, lora_request: Any) -> bytes | Wait | Later | Unknown:
        """What tells the adapter of a request from others; b"" for no adapter."""
        if lora_request is None:
            return b""
        number: int = lora_request.lora_int_id
        if number in self._bad:
            return Unknown()
        digest = self._known.get(number)
        if digest is not None:
            # vLLM's own prefix cache goes by the name: what it holds may be of the weights that had it before.
            if self._names.setdefault(lora_request.lora_name, digest) != digest:
                self._give_up(number, f"another one was called {lora_request.lora_name!r} before")
                return Unknown()
            return digest
        if number in self._answered:
            return Later()
        self._asked.add(number)  # a worker may have loaded it since its last report
        return Wait()

    def is_bad(self, lora_request: Any) -> bool:
        """Whether its weights turned out not to be told from others."""
        return lora_request is not None and lora_request.lora_int_id in self._bad

    @property
    def asks(self) -> bool:
        """Whether a request waits for what the workers say."""
        return bool(self._asked)

    def take_in(self, found: Mapping[int, Sequence[bytes]]) -> None:
        """What the workers say with a step: for each adapter that was loaded, one digest of each rank."""
        self._answered |= self._asked
        self._asked.clear()
        for number, digests in found.items():
            if number in self._bad:
                continue
            if len(digests) != self.ranks or not all(digests):
                self._give_up(number, "its weights cannot be told from others")
                continue
            # Ranks may hold parts of it; which has which is in the namespace of each.
            digest = hashlib.sha256(b"kvterrace/adapter/1\0" + b"".join(sorted(set(digests)))).digest()
            if self._known.setdefault(number, digest) != digest:
                self._give_up(number, "it was loaded again with other weights")

    def _give_up(self, number: int, reason: str) -> None:
        self._bad.add(number)
        _log.warning("LoRA adapter %d: %s; its KV is not kept until the engine is started again", number, reason)


class Signatures:
    """A worker's half: hashes adapters as vLLM loads them, before they are used. The worker's thread only."""

    def __init__(self) -> None:
        self._digests: dict[int, bytes] = {}
        self._changed: set[int] = set()
        self._news: dict[int, list[bytes]] = {}

    def loaded(self, adapter: Any) -> None:
        """vLLM has loaded `adapter`, a LoRAModel. Blocks: about 1 s for each GB."""
        digest = adapter_digest(adapter)
        if self._digests.setdefault(adapter.id, digest) != digest:
            self._changed.add(adapter.id)
        self._news[adapter.id] = [digest]

    def is_changed(self, number: int) -> bool:
        """Whether other weights were loaded under a number than before: which of them computed a block is not known."""
        return number in self._changed

    def take_news(self) -> dict[int, list[bytes]]:
        """The digests of what was loaded since the last call; b"" for one that cannot be told from others."""
        news, self._news = self._news, {}
        return news


def adapter_digest(adapter: Any) -> bytes:
    """SHA-256 over everything in a LoRAModel but its number; b"" where it holds something of an unknown kind."""
    hashed = hashlib.sha256(b"kvterrace/lora/1\0")
    try:
        _feed(hashed.update, {name: value for name, value in vars(adapter).items() if name != "id"})
    except TypeError as error:
        _log.warning("LoRA adapter %d: %s", adapter.id, error)
        return b""
    return hashed.digest()


def _feed(update: Callable[[Any], None], value: Any) -> None:
    """`value` in an encoding in which no two are alike."""
    match value:
        case None | bool() | int() | float() | str():
            text = f"{type(value).__name__} {value!r}".encode()
            update(b"v" + _U32.pack(len(text)) + text)
        case torch.Tensor():
            _feed(update, [str(value.dtype), *value.shape])
            update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        case list() | tuple():
            update(b"l" + _U32.pack(len(value)))
            for each in value:
                _feed(update, each)
        case dict():
            update(b"d" + _U32.pack(len(value)))
            for name in sorted(value):
                _feed(update, name)
                _feed(update, value[name])
        case _ if type(value).__module__.startswith("vllm.lora."):
            _feed(update, vars(value))
        case _:
            raise TypeError(f"it holds a {type(value).__name__}, which is not understood")


def watch_adapters(loaders: Sequence[type], on_loaded: Callable[[Any], None]) -> Callable[[], None]:
    """Have `on_loaded` told of each adapter (a LoRAModel) that an object of these classes of vLLM's has loaded, before
    it is used. Returns what ends it.
    """
    return watch(loaders, ("_load_adapter",), after=lambda _, adapter: on_loaded(adapter))

"""A `DynamicLayer` that grows in place: new tokens are written behind the old ones, not joined to a copy of them.

The plain layer joins all K and V anew at every step: for 4,096 tokens of a small model 189 MB a token, into memory
that the kernel has yet to hand out. Here a tensor has room behind its last token. Exactness does not hang on that:

* Memory that was ever shown is never written again. A room is written only behind its `filled` mark, so a tensor that
  a caller kept, or a copy of the layer, sees what it saw.
* `keys` and `values` are plain tensors, as in the plain layer: whatever Transformers does to them (crop, reorder,
  repeat, select, reset) makes other tensors. `update` sees that and joins like the plain layer, once; it makes room
  again when the next update finds its own tensors.
* Where a gradient may be wanted, a compiler is tracing, or tensors are of another kind, dtype, device or shape,
  `update` is the plain layer's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import DynamicLayer

__all__ = ["Room", "RoomyLayer"]

# Room made by growth: a quarter of what is held, so that a token is copied four times on average, however long it gets.
_GROWTH = 4
_LEAST_TOKENS = 64


class Room:
    """Memory of one tensor: `buffer` `[batch, heads, capacity, head_dim]`, of which `filled` tokens were shown."""

    __slots__ = ("buffer", "filled")

    def __init__(self, buffer: torch.Tensor, filled: int = 0) -> None:
        self.buffer = buffer
        self.filled = filled

    def shown(self) -> torch.Tensor:
        """View of what is filled, `[batch, heads, filled, head_dim]`."""
        return self.buffer[:, :, : self.filled]

    def takes(self, held: int, new: torch.Tensor) -> bool:
        """Whether `new` can be written behind `held` tokens: they are all that was shown, and there is room."""
        mine = self.buffer
        return (
            self.filled == held
            and held + new.shape[2] <= mine.shape[2]
            and (mine.shape[0], mine.shape[1], mine.shape[3]) == (new.shape[0], new.shape[1], new.shape[3])
            and mine.dtype == new.dtype
            and mine.device == new.device
            # Such memory must not be written outside of inference mode.
            and (not mine.is_inference() or torch.is_inference_mode_enabled())
        )

    def append(self, new: torch.Tensor) -> torch.Tensor:
        """Write `new` behind what is filled; what is filled then."""
        stop = self.filled + new.shape[2]
        self.buffer[:, :, self.filled : stop].copy_(new)
        self.filled = stop
        return self.shown()


class RoomyLayer(DynamicLayer):
    """One layer of a `DynamicCache`, full attention. Same tensors, bit for bit, as the plain layer shows."""

    _layer_type = None  # were it inherited, Transformers would take this class for every cache of that type

    def __init__(self, rooms: Sequence[Room] | None = None, **kwargs: Any) -> None:
        """Args:
        rooms: memory for K and V, lent for the layer's life. What is filled in them is what the layer holds.
        """
        super().__init__(**kwargs)
        self._rooms = None if rooms is None else tuple(rooms)
        self._last: tuple[Any, Any] = (None, None)  # what `update` showed last
        if self._rooms is not None and self._rooms[0].filled:
            self.lazy_initialization(self._rooms[0].buffer, self._rooms[1].buffer)
            self.keys, self.values = self._last = (self._rooms[0].shown(), self._rooms[1].shown())

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take up K and V of new tokens, `[batch, heads, new, head_dim]`; all that is held then."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        held = int(self.get_seq_length())
        mine = self._last[0] is self.keys and self._last[1] is self.values
        if _is_plain(key_states) and _is_plain(value_states) and (mine or not held):
            if mine and held:
                self._make_room(held, key_states, value_states)
            rooms = self._rooms
            if rooms is not None and rooms[0].takes(held, key_states) and rooms[1].takes(held, value_states):
                self.keys, self.values = rooms[0].append(key_states), rooms[1].append(value_states)
                self._last = (self.keys, self.values)
                return self._last
        self._rooms = None
        super().update(key_states, value_states, *args, **kwargs)
        self._last = (self.keys, self.values)
        return self._last

    def _make_room(self, held: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Move to larger rooms, if these do not take the new tokens."""
        rooms, news, olds = self._rooms, (key, value), (self.keys, self.values)
        if rooms is not None and all(room.takes(held, new) for room, new in zip(rooms, news, strict=True)):
            return
        self._rooms = None
        capacity = held + key.shape[2]
        capacity += max(_LEAST_TOKENS, capacity // _GROWTH)
        made = []
        for old, new in zip(olds, news, strict=True):
            if not _is_plain(old) or old.dtype != new.dtype or old.device != new.device:
                return
            room = Room(new.new_empty((old.shape[0], old.shape[1], capacity, old.shape[3])))
            room.append(old)
            made.append(room)
        self._rooms = tuple(made)


def _is_plain(tensor: Any) -> bool:
    return (
        type(tensor) is torch.Tensor
        and tensor.ndim == 4
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()
    )

"""How the scheduler learns what the workers' stores hold. A rank's blocks count only if all ranks have them.

In one process, the scheduler asks the store itself. Else each worker answers on a Unix socket, from a thread; the
scheduler sends, goes on, and takes the answers when it asks again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from kvterrace.errors import ConfigError
from kvterrace.integrations.vllm.messages import Handshake

__all__ = ["Answer", "LocalLookup", "Lookup", "LookupServer", "RemoteLookup", "lookup_for"]

_log = logging.getLogger("kvterrace.vllm")

#: (resident blocks of the chain, those of them in DRAM).
Answer = tuple[int, int]

#: Answers for `(epoch, digest that the keys were made in, keys)`.
Matcher = Callable[[str, bytes, bytes], Answer]

#: Seconds after which a worker that has not answered counts as having nothing.
_PATIENCE_S = 5.0

_ASK = struct.Struct("<IIH32s")  # number, bytes of keys, bytes of epoch, digest
_SAY = struct.Struct("<III")  # number, blocks, blocks in DRAM

#: Matchers of the workers in this process, by token.
local: dict[str, Matcher] = {}


class Lookup(Protocol):
    """Asks all ranks. The scheduler's thread; never blocks on a worker."""

    def ask(self, request_id: str, epoch: str, made_in: bytes, keys: bytes) -> Answer | None:
        """What all ranks hold of a chain; None: not known yet, ask again with the same arguments."""
        ...

    def forget(self, request_id: str) -> None:
        """The request is not asked for any more."""
        ...

    def close(self) -> None:
        """Let go of sockets."""
        ...


def lookup_for(handshakes: Sequence[Handshake]) -> Lookup:
    """The way to the workers that sent these. Raises ConfigError: one of them cannot be reached."""
    if all(one.pid == os.getpid() and one.token in local for one in handshakes):
        return LocalLookup([local[one.token] for one in handshakes])
    try:
        return RemoteLookup([one.address for one in handshakes])
    except OSError as error:
        raise ConfigError(
            f"a worker cannot be asked what its store holds ({error}): scheduler and workers must share a host and its "
            "folder for temporary files"
        ) from error


class LocalLookup:
    """The workers' stores are in this process."""

    def __init__(self, matchers: Sequence[Matcher]) -> None:
        self._matchers = matchers

    def ask(self, request_id: str, epoch: str, made_in: bytes, keys: bytes) -> Answer | None:  # noqa: ARG002
        return _all_of([match(epoch, made_in, keys) for match in self._matchers])

    def forget(self, request_id: str) -> None:
        pass

    def close(self) -> None:
        pass


def _all_of(answers: Sequence[Answer]) -> Answer:
    return min(blocks for blocks, _ in answers), min(dram for _, dram in answers)


class RemoteLookup:
    """The workers are other processes on this host."""

    def __init__(self, addresses: Sequence[str], *, patience_s: float = _PATIENCE_S) -> None:
        """Raises OSError: a worker cannot be reached."""
        self._patience_s = patience_s
        self._peers = [_Peer(address) for address in addresses]
        self._number = 0
        self._asked: dict[str, tuple[bytes, int, float]] = {}  # what, under which number, until when it may take
        self._answers: dict[int, dict[int, Answer]] = {}  # by number, then by peer

    def ask(self, request_id: str, epoch: str, made_in: bytes, keys: bytes) -> Answer | None:
        now_s = time.monotonic()
        what = made_in + keys
        asked = self._asked.get(request_id)
        if asked is None or asked[0] != what:
            self.forget(request_id)
            self._number = (self._number + 1) % 2**32
            self._asked[request_id] = (what, self._number, now_s + self._patience_s)
            self._answers[self._number] = {}
            text = epoch.encode()
            message = _ASK.pack(self._number, len(keys), len(text), made_in) + text + keys
            for peer in self._peers:
                peer.send(message)
            asked = self._asked[request_id]
        self._take()
        answers = self._answers[asked[1]]
        silent = [at for at, peer in enumerate(self._peers) if at not in answers and (peer.broken or now_s > asked[2])]
        for at in silent:
            if not self._peers[at].broken and not self._peers[at].told:
                self._peers[at].told = True
                _log.warning("worker %d has not answered a look-up for %.0f s: taken for a miss", at, self._patience_s)
            answers[at] = (0, 0)
        if len(answers) < len(self._peers):
            return None
        return _all_of(list(answers.values()))

    def _take(self) -> None:
        for at, peer in enumerate(self._peers):
            for number, blocks, dram in peer.receive():
                if number in self._answers:
                    self._answers[number][at] = (blocks, dram)

    def forget(self, request_id: str) -> None:
        asked = self._asked.pop(request_id, None)
        if asked is not None:
            del self._answers[asked[1]]

    def close(self) -> None:
        for peer in self._peers:
            peer.close()


class _Peer:
    """One worker's socket, from the scheduler's side; nothing waits for it."""

    def __init__(self, address: str) -> None:
        self.broken = self.told = False
        self._out, self._in = bytearray(), bytearray()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.connect(address)
        except OSError:
            self._socket.close()
            raise
        self._socket.settimeout(0.0)

    def send(self, message: bytes) -> None:
        self._out += message
        self._flush()

    def _flush(self) -> None:
        try:
            while self._out and not self.broken:
                del self._out[: self._socket.send(self._out)]
        except BlockingIOError:
            pass
        except OSError as error:
            self._break(error)

    def receive(self) -> list[tuple[int, int, int]]:
        self._flush()
        try:
            while not self.broken:
                data = self._socket.recv(1 << 16)
                if not data:
                    raise ConnectionError("it has closed its socket")
                self._in += data
        except BlockingIOError:
            pass
        except OSError as error:
            self._break(error)
        whole = len(self._in) // _SAY.size * _SAY.size
        found = [tuple(one) for one in _SAY.iter_unpack(self._in[:whole])]
        del self._in[:whole]
        return found

    def _break(self, error: OSError) -> None:
        if not self.broken:
            _log.warning("a worker answers no look-ups any more, everything counts as a miss: %s", error)
        self.broken = True

    def close(self) -> None:
        self._socket.close()


class LookupServer:
    """Answers one scheduler, from a thread of its own."""

    def __init__(self, match: Matcher) -> None:
        self._match = match
        self._folder = tempfile.mkdtemp(prefix="kvterrace-")  # 0700: whoever asks learns which prompts are cached
        self.address = str(Path(self._folder) / "lookup")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.address)
        self._listener.listen(1)
        self._connection: socket.socket | None = None
        self._thread = threading.Thread(target=self._serve, name="kvterrace-lookup", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):  # how it learns of the end: its socket is shut
            while True:
                self._connection, _ = self._listener.accept()
                self._remove_path()  # nobody else is to ask, and a worker that is killed leaves nothing behind
                with contextlib.suppress(OSError), self._connection, self._connection.makefile("rb") as stream:
                    while head := stream.read(_ASK.size):
                        number, nbytes, text_nbytes, made_in = _ASK.unpack(head)
                        body = stream.read(text_nbytes + nbytes)
                        blocks, dram = self._match(body[:text_nbytes].decode(), made_in, body[text_nbytes:])
                        self._connection.sendall(_SAY.pack(number, blocks, dram))

    def close(self) -> None:
        """End the thread."""
        for each in (self._listener, self._connection):
            if each is not None:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
        self._thread.join(5.0)
        self._listener.close()
        self._remove_path()

    def _remove_path(self) -> None:
        with contextlib.suppress(OSError):
            Path(self.address).unlink()
            Path(self._folder).rmdir()

"""A server on a raw socket: it reads requests as bytes, and answers with any bytes at all."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Self

from proxy import HOST, reset


@dataclass(frozen=True)
class Raw:
    """The bytes of an answer, endless ones as a generator; and what becomes of the connection."""

    data: bytes | Iterable[bytes]
    after: str = "close"  # or: keep (the next request), hold (no end in sight), reset


Answer = Callable[[bytes, bytes], Raw]  # from a request's head and body


class RawServer:
    """Asks `answer` for each request; `heads` and `bodies` are what came over the wire."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.heads: list[bytes] = []
        self.bodies: list[bytes] = []
        self.connections = 0
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._listener = socket.create_server((HOST, 0), backlog=64)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, name="raw-server", daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for sock in self._open:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self.connections += 1
                with self._lock:
                    self._open.add(sock)
                threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        try:
            with contextlib.suppress(OSError), sock.makefile("rb") as incoming:
                while self._one(sock, incoming.readline, incoming.read):
                    pass
        finally:
            with self._lock:
                self._open.discard(sock)
            sock.close()

    def _one(
        self, sock: socket.socket, readline: Callable[[], bytes], read: Callable[[int], bytes]
    ) -> bool:
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            line = readline()
            if not line:
                return False
            head += line
        length = re.search(rb"(?i)\r\ncontent-length: *(\d+)\r\n", head)
        body = read(int(length[1])) if length else b""
        self.heads.append(head)
        self.bodies.append(body)
        answer = self.answer(head, body)
        for piece in [answer.data] if isinstance(answer.data, bytes) else answer.data:
            sock.sendall(piece)
        if answer.after == "hold":
            while sock.recv(65536):
                pass
        elif answer.after == "reset":
            reset(sock)
        return answer.after == "keep"

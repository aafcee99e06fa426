"""A thin, long link: a TCP proxy with a round trip and a rate that all connections share."""

from __future__ import annotations

import collections
import contextlib
import heapq
import itertools
import select
import socket
import threading
import time
from typing import Self

PIECE = 1400  # a packet's worth
QUEUE = 32 * 1024  # what may wait at the link's entrance: a quarter of a second at 1 Mbit/s
WINDOW = 16 * 1024  # what our own sockets may hide


class _Way:
    """One direction: what is under way arrives in order, after the wire and the distance."""

    def __init__(self, rate: float, delay: float) -> None:
        self.rate, self.delay = rate, delay
        self.free = 0.0  # when the wire has room again
        self.passed = 0

    def send(self, now: float, size: int) -> float:
        """When the last byte of it arrives."""
        self.free = max(now, self.free) + size / self.rate
        self.passed += size
        return self.free + self.delay

    def waiting(self, now: float) -> float:
        """Bytes before the wire."""
        return max(0.0, self.free - now) * self.rate


class _Half:
    """From one socket to the other one."""

    def __init__(self, source: socket.socket, sink: socket.socket, way: _Way) -> None:
        self.source, self.sink, self.way = source, sink, way
        self.out: collections.deque[bytes] = collections.deque()
        self.ended = False  # nothing more comes
        self.flying = 0


class Link:
    """Forwards `port` to a target on this machine, `rate` bytes a second each way."""

    def __init__(self, target: int, rate: float, round_trip: float) -> None:
        self.target, self.round_trip = target, round_trip
        self.up, self.down = _Way(rate, round_trip / 2), _Way(rate, round_trip / 2)
        self._listener = socket.socket()
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, WINDOW)
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen(64)
        self.port: int = self._listener.getsockname()[1]
        self._halves: list[_Half] = []
        self._flying: list[tuple[float, int, _Half, bytes]] = []
        self._numbers = itertools.count()
        self._opened: dict[socket.socket, float] = {}
        self._stopped = False
        self._thread = threading.Thread(target=self._loop, name="link", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped = True
        self._thread.join(5)
        for half in self._halves:
            half.source.close()
        self._listener.close()

    def _loop(self) -> None:
        turn = 0
        while not self._stopped:
            now = time.monotonic()
            self._land(now)
            # Fair: whoever has something to send has its turn, a packet each.
            ready = [h for h in self._halves if not h.ended and h.way.waiting(now) < QUEUE
                     and self._opened.get(h.source, 0.0) <= now]  # fmt: skip
            turn += 1
            writers = [h.sink for h in self._halves if h.out]
            readers = [h.source for h in ready]
            wait = self._flying[0][0] - now if self._flying else 0.05
            wait = min(max(wait, 0.0005), 0.01 if len(ready) < len(self._halves) else 0.05)
            readable, writable, _ = select.select([self._listener, *readers], writers, [], wait)
            now = time.monotonic()
            if self._listener in readable:
                self._accept(now)
            for half in ready[turn % (len(ready) or 1) :] + ready[: turn % (len(ready) or 1)]:
                if half.source in readable and half.way.waiting(now) < QUEUE:
                    self._take(half, now)
            for half in list(self._halves):
                if half.sink in writable:
                    self._push(half)

    def _accept(self, now: float) -> None:
        client, _ = self._listener.accept()
        server = socket.create_connection(("127.0.0.1", self.target))
        for sock in (client, server):
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._opened[client] = now + self.round_trip  # the handshake
        self._halves += [_Half(client, server, self.up), _Half(server, client, self.down)]

    def _take(self, half: _Half, now: float) -> None:
        try:
            data = half.source.recv(PIECE)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        half.ended = not data
        half.flying += 1
        at = half.way.send(now, len(data) + 40)  # with TCP/IP's own heads
        heapq.heappush(self._flying, (at, next(self._numbers), half, data))

    def _land(self, now: float) -> None:
        while self._flying and self._flying[0][0] <= now:
            _, _, half, data = heapq.heappop(self._flying)
            half.flying -= 1
            half.out.append(data)
            self._push(half)

    def _push(self, half: _Half) -> None:
        with contextlib.suppress(BlockingIOError):
            try:
                while half.out:
                    data = half.out[0]
                    if not data:
                        half.sink.shutdown(socket.SHUT_WR)
                        half.out.popleft()
                        self._forget(half)
                        continue
                    sent = half.sink.send(data)
                    half.out.popleft()
                    if sent < len(data):
                        half.out.appendleft(data[sent:])
            except BlockingIOError:
                raise
            except OSError:
                half.out.clear()
                half.ended = True
                self._forget(half)

    def _forget(self, half: _Half) -> None:
        """Both directions are over."""
        other = next((h for h in self._halves if h.source is half.sink), None)
        if other is None or (other.ended and not other.out and not other.flying):
            for each in (half, other):
                if each in self._halves:
                    self._halves.remove(each)
                    self._opened.pop(each.source, None)
            half.source.close()
            half.sink.close()

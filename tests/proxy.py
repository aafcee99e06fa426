"""A TCP proxy that can fall silent, cut, refuse and crawl: a bad network between two real ends."""

import contextlib
import queue
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Self

HOST = "127.0.0.1"
CHUNK = 65536
# Closing with this option set sends a reset instead of an orderly end.
RESET_ON_CLOSE = struct.pack("ii", 1, 0)


def reset(sock: socket.socket) -> None:
    """Close with a TCP reset."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
    sock.close()


@contextlib.contextmanager
def blackhole() -> Iterator[str]:
    """A URL where connects neither succeed nor fail: a listener with a full backlog."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


class _Pipe:
    """One direction of one connection."""

    def __init__(self, source: socket.socket, sink: socket.socket) -> None:
        self.source = source
        self.sink = sink
        self.buffer = b""
        self.ended = False
        self.not_before = 0.0
        self.silent = False

    def pull(self, limit: int) -> None:
        self.buffer = self.source.recv(limit)
        if not self.buffer:
            self.ended = True
            with contextlib.suppress(OSError):
                self.sink.shutdown(socket.SHUT_WR)

    def push(self, limit: int) -> int:
        sent = self.sink.send(self.buffer[:limit])
        self.buffer = self.buffer[sent:]
        return sent


class Proxy:
    """Forwards `port` to the target. One thread owns all sockets: only so is a cut a real reset."""

    def __init__(self, target_host: str, target_port: int, buffer: int = 0) -> None:
        """The host: or the path of a Unix socket. `buffer`: how much the kernel may hold for it, as
        on a slow link; 0: the kernel's own."""
        self.target = (target_host, target_port)
        self._silent = False
        self._rate: float | None = None
        self._pairs: list[tuple[_Pipe, _Pipe]] = []
        self._orders: queue.SimpleQueue[tuple[Callable[[], None], threading.Event]] = (
            queue.SimpleQueue()
        )
        self._wake_read, self._wake_write = socket.socketpair()
        self._running = True
        self._listener: socket.socket | None = socket.create_server((HOST, 0))
        if buffer:
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._loop, name="proxy", daemon=True)
        self._thread.start()

    @property
    def connections(self) -> int:
        """How many are open now."""
        return len(self._pairs)

    @property
    def held_back(self) -> bool:
        """Whether something came on a silent connection, and waits there."""
        pipes = [pipe for pair in list(self._pairs) for pipe in pair]
        sources = [pipe.source for pipe in pipes if pipe.silent or self._silent]
        return bool(select.select(sources, [], [], 0)[0])

    def silent(self) -> None:
        """Keep everything open, accept more, forward nothing: what comes waits for resume()."""
        self._order(lambda: setattr(self, "_silent", True))

    def silence_open(self) -> None:
        """As silent(), but only for the connections that are open now: half-open ones."""
        self._order(self._silence_open)

    def slow(self, bytes_per_sec: float) -> None:
        """Forward, but only so fast in each direction of each connection."""
        self._order(lambda: self._set_pass(bytes_per_sec))

    def resume(self) -> None:
        """Forward everything at full speed and accept again, on the same port."""
        self._order(lambda: self._set_pass(None))

    def refuse(self) -> None:
        """Refuse new connections; those that are open go on."""
        self._order(self._close_listener)

    def cut(self) -> None:
        """Reset all open connections; new ones are treated as before."""
        self._order(self._reset_all)

    def stop(self) -> None:
        if self._thread.is_alive():
            self._order(lambda: setattr(self, "_running", False))
            self._thread.join(10)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _order(self, action: Callable[[], None]) -> None:
        """Have the thread do something, and wait until it is done."""
        done = threading.Event()
        self._orders.put((action, done))
        self._wake_write.send(b"!")
        if not done.wait(10):
            raise RuntimeError("the proxy's thread does not answer")

    def _silence_open(self) -> None:
        for pipe in (pipe for pair in self._pairs for pipe in pair):
            pipe.silent = True

    def _set_pass(self, rate: float | None) -> None:
        self._silent = False
        self._rate = rate
        for pipe in (pipe for pair in self._pairs for pipe in pair):
            pipe.not_before, pipe.silent = 0.0, False
        if self._listener is None:
            self._listener = socket.create_server((HOST, self.port))

    def _close_listener(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _reset_all(self) -> None:
        for pair in list(self._pairs):
            self._reset_pair(pair)

    def _reset_pair(self, pair: tuple[_Pipe, _Pipe]) -> None:
        self._pairs.remove(pair)
        reset(pair[0].source)
        reset(pair[0].sink)

    def _loop(self) -> None:
        while self._running:
            self._step()
        self._close_listener()
        self._reset_all()
        self._wake_read.close()

    def _step(self) -> None:
        now = time.monotonic()
        pipes = [pipe for pair in self._pairs for pipe in pair if not pipe.silent]
        pipes = [] if self._silent else pipes
        waiting = [pipe.not_before - now for pipe in pipes if pipe.not_before > now]
        due = [pipe for pipe in pipes if pipe.not_before <= now and not pipe.ended]
        readers = [self._wake_read, *(pipe.source for pipe in due if not pipe.buffer)]
        if self._listener is not None:
            readers.append(self._listener)
        writers = [pipe.sink for pipe in due if pipe.buffer]
        readable, writable, _ = select.select(readers, writers, [], min(waiting, default=None))
        for pair in list(self._pairs):
            self._serve(pair, readable, writable)
        if self._listener in readable:
            self._accept()
        if self._wake_read in readable:
            self._obey()

    def _obey(self) -> None:
        self._wake_read.recv(CHUNK)
        while not self._orders.empty():
            action, done = self._orders.get()
            action()
            done.set()

    def _accept(self) -> None:
        assert self._listener is not None
        client, _ = self._listener.accept()
        try:
            server = self._connect()
        except OSError:
            reset(client)
            return
        for sock in (client, server):
            sock.setblocking(False)
            if sock.family != socket.AF_UNIX:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._pairs.append((_Pipe(client, server), _Pipe(server, client)))

    def _connect(self) -> socket.socket:
        host, _ = self.target
        if not host.startswith("/"):
            return socket.create_connection(self.target, timeout=5)
        server = socket.socket(socket.AF_UNIX)
        server.settimeout(5)
        server.connect(host)
        return server

    def _serve(
        self,
        pair: tuple[_Pipe, _Pipe],
        readable: list[socket.socket],
        writable: list[socket.socket],
    ) -> None:
        limit = CHUNK if self._rate is None else max(1, int(self._rate / 20))
        try:
            for pipe in pair:
                if pipe.source in readable and not pipe.buffer and not pipe.ended:
                    pipe.pull(limit)
                elif pipe.sink in writable and pipe.buffer:
                    sent = pipe.push(limit)
                    if self._rate is not None:
                        pipe.not_before = time.monotonic() + sent / self._rate
        except BlockingIOError:
            return
        except OSError:
            self._reset_pair(pair)
            return
        if pair[0].ended and pair[1].ended:
            self._pairs.remove(pair)
            pair[0].source.close()
            pair[0].sink.close()

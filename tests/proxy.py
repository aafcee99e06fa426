"""A TCP proxy that can fall silent, cut, refuse and crawl: a bad network between two real ends."""

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Coroutine, Iterator
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


class _Pair:
    """Both ends of one connection."""

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self.ends = (client, server)
        self.silent = False
        self.held = 0  # directions in which something came, and waits
        self.task: asyncio.Task[None]


class Proxy:
    """Forwards `port` to the target. One thread owns all sockets: only so is a cut a real reset."""

    def __init__(self, target_host: str, target_port: int, buffer: int = 0) -> None:
        """The host: or the path of a Unix socket. `buffer`: how much the kernel may hold for it, as
        on a slow link; 0: the kernel's own."""
        self.target = (target_host, target_port)
        self._silent = False
        self._rate: float | None = None
        self._pairs: list[_Pair] = []
        self._listener: socket.socket | None = socket.create_server((HOST, 0))
        if buffer:
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        self.port: int = self._listener.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._loop.add_reader(self._listener, self._accept)
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._thread.start()

    @property
    def held_back(self) -> bool:
        """Whether something came on a silent connection, and waits there."""
        return any(pair.held for pair in list(self._pairs))

    def silent(self) -> None:
        """Keep everything open, accept more, forward nothing: what comes waits for resume()."""
        self._silent = True

    def silence_open(self) -> None:
        """As silent(), but only for the connections that are open now: half-open ones."""
        self._order(self._silence_open())

    def slow(self, bytes_per_sec: float) -> None:
        """Forward, but only so fast in each direction of each connection."""
        self._order(self._pass(bytes_per_sec))

    def resume(self) -> None:
        """Forward everything at full speed and accept again, on the same port."""
        self._order(self._pass(None))

    def refuse(self) -> None:
        """Refuse new connections; those that are open go on."""
        self._order(self._refuse())

    def cut(self) -> None:
        """Reset all open connections; new ones are treated as before."""
        self._order(self._cut())

    def stop(self) -> None:
        if self._thread.is_alive():
            self.refuse()
            self.cut()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(10)
            self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _order(self, action: Coroutine[None, None, None]) -> None:
        """Have the thread do something, and wait until it is done."""
        asyncio.run_coroutine_threadsafe(action, self._loop).result(10)

    async def _silence_open(self) -> None:
        for pair in self._pairs:
            pair.silent = True

    async def _pass(self, rate: float | None) -> None:
        self._silent, self._rate = False, rate
        for pair in self._pairs:
            pair.silent = False
        if self._listener is None:
            self._listener = socket.create_server((HOST, self.port))
            self._loop.add_reader(self._listener, self._accept)

    async def _refuse(self) -> None:
        if self._listener is not None:
            self._loop.remove_reader(self._listener)
            self._listener.close()
            self._listener = None

    async def _cut(self) -> None:
        await asyncio.sleep(0)  # what was accepted just now begins
        tasks = [pair.task for pair in self._pairs]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

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
        pair = _Pair(client, server)
        self._pairs.append(pair)
        pair.task = self._loop.create_task(self._serve(pair))

    def _connect(self) -> socket.socket:
        host, _ = self.target
        if not host.startswith("/"):
            return socket.create_connection(self.target, timeout=5)
        server = socket.socket(socket.AF_UNIX)
        server.settimeout(5)
        server.connect(host)
        return server

    async def _serve(self, pair: _Pair) -> None:
        end: Callable[[socket.socket], None] = reset
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._forward(pair, *pair.ends))
                both.create_task(self._forward(pair, *reversed(pair.ends)))
            end = socket.socket.close
        except* OSError:
            pass
        finally:
            self._pairs.remove(pair)
            for sock in pair.ends:
                end(sock)

    @property
    def _limit(self) -> int:
        return CHUNK if self._rate is None else max(1, int(self._rate / 20))

    async def _forward(self, pair: _Pair, source: socket.socket, sink: socket.socket) -> None:
        while True:
            try:
                data = await self._loop.sock_recv(source, self._limit)
            except OSError:  # silence hides that, too
                await self._heard(pair)
                raise
            await self._heard(pair)
            if not data:
                break
            while data:
                piece, data = data[: self._limit], data[self._limit :]
                await self._loop.sock_sendall(sink, piece)
                await asyncio.sleep(0 if self._rate is None else len(piece) / self._rate)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    async def _heard(self, pair: _Pair) -> None:
        pair.held += 1
        while self._silent or pair.silent:
            await asyncio.sleep(0.01)
        pair.held -= 1

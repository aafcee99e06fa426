"""The admin interface from outside: its process, a client that sends just what it is told, and a
keeper of its socket that starts it as systemd does."""

import http.client
import json
import re
import select
import socket
import tempfile
import threading
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from agent import Agent, AgentFactory

PATIENCE = 120.0  # the machine may be busy; only a test that fails ever waits so long
CHANGING = {"X-Requested-With": "tests"}
# For the sockets: a test's own directory can have too long a name.
PLACE = tempfile.TemporaryDirectory(prefix="serversync-admin-")
# What systemd does between fork and exec: the socket is descriptor 3, and meant for this process.
AS_SYSTEMD = 'export LISTEN_FDS=1 LISTEN_PID=$$; exec "$@" 3<&{fd} {fd}<&-'


@dataclass
class Got:
    """An answer."""

    status: int
    headers: http.client.HTTPMessage
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> tuple[int, str]:
        """The status and the error's code."""
        return self.status, self.json["error"]["code"]


def read_answer(connection: socket.socket, method: str = "GET") -> Got:
    """The answer that comes on a connection, which ends with it."""
    with connection, http.client.HTTPResponse(connection, method=method) as response:
        response.begin()
        body = response.read()
        assert connection.recv(1) == b"", "more than one answer"
        return Got(response.status, response.headers, body)


class Web:
    """A client: each request is a connection of its own, and nothing is added to it."""

    def __init__(self, address: str) -> None:
        self.address = address

    def connect(self) -> socket.socket:
        if self.address.startswith("/"):
            connection = socket.socket(socket.AF_UNIX)
            connection.settimeout(PATIENCE)
            connection.connect(self.address)
            return connection
        match = re.fullmatch(r"http://\[?([^\]]+)\]?:(\d+)/", self.address)
        assert match, self.address
        return socket.create_connection((match[1], int(match[2])), timeout=PATIENCE)

    def raw(self, data: bytes, method: str = "GET") -> Got:
        connection = self.connect()
        connection.sendall(data)
        return read_answer(connection, method)

    def ask(
        self,
        path: str,
        method: str = "GET",
        headers: Mapping[str, str] | None = None,
        host: str = "localhost",
    ) -> Got:
        lines = [f"{method} {path} HTTP/1.1", f"Host: {host}"]
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        return self.raw("\r\n".join([*lines, "", ""]).encode(), method)

    def post(self, path: str) -> Got:
        return self.ask(path, "POST", CHANGING)

    def delete(self, path: str) -> Got:
        return self.ask(path, "DELETE", CHANGING)


def a_place() -> str:
    """The path of a Unix socket that nobody has."""
    return f"{PLACE.name}/{uuid.uuid4()}"


def start_admin(
    agent: AgentFactory, listen: str = "", *args: str, **more: Any
) -> tuple[Agent, Web]:
    """An admin process that listens, by default on a Unix socket, and a client of it."""
    process = agent(args=("admin", "--listen", listen or a_place(), *args), **more)
    line = process.wait_log("the admin interface listens on ")
    return process, Web(line.split()[-1])


class Activation:
    """Keeps a listening socket and starts the process when somebody connects, as systemd does; and
    again, as often as it ends."""

    def __init__(self, agent: AgentFactory, host: str = "", *args: str, **more: Any) -> None:
        """On a Unix socket, or on TCP at that address."""
        self.started: list[Agent] = []
        if host:
            self.listener = socket.create_server((host, 0), backlog=4096)
            self.web = Web(f"http://{host}:{self.listener.getsockname()[1]}/")
        else:
            self.web = Web(a_place())
            self.listener = socket.socket(socket.AF_UNIX)
            self.listener.bind(self.web.address)
            self.listener.listen(4096)
        fd = self.listener.fileno()
        shell = ("bash", "-c", AS_SYSTEMD.format(fd=fd), "bash")
        self._start: Callable[[], Agent] = lambda: agent(
            args=("admin", *args), prefix=shell, pass_fds=(fd,), **more
        )
        self._stop, self._stopped = socket.socketpair()
        self._thread = threading.Thread(target=self._keep, name="activation", daemon=True)
        self._thread.start()

    def _keep(self) -> None:
        while True:
            readable, _, _ = select.select([self.listener, self._stopped], [], [])
            if self._stopped in readable:
                return
            self.started.append(self._start())
            self.started[-1].process.wait()

    def close(self) -> None:
        self._stop.send(b"!")
        while self._thread.is_alive():
            if self.started:
                self.started[-1].process.terminate()
            self._thread.join(0.1)
        for each in (self.listener, self._stop, self._stopped):
            each.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

"""Starts agents by fork, from a process that has imported the program already.

Each is a process of its own like any other, with its own pid, environment, files and end. What it
saves is the import: most of the work of a start, of which a run of all tests has thousands.
"""

import atexit
import contextlib
import json
import os
import resource
import select
import signal
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import IO

# As it is installed: a module that is compiled once. Compiling it takes half of a start.
LAUNCH = """
import importlib, os, sys
def imported(path):
    directory, name = os.path.split(path)
    sys.path.insert(0, directory)
    return importlib.import_module(name.removesuffix(".py"))
"""
MAIN = "sys.exit(imported(sys.argv.pop(1)).main())\n"
# A request: environment, working directory and arguments, with the descriptors for what is told of
# the child ("PID CODE", the code when it has ended), and for its standard input, output and error.
SERVER = f"""
import json, os, resource, signal, socket, time
{LAUNCH}
imported(sys.argv[1])
server = socket.socket(fileno=int(sys.argv[2]))
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
while True:
    request, fds, *_ = socket.recv_fds(server, 1 << 18, 4)
    if not request:
        sys.exit()
    if os.fork() == 0:
        break
    for fd in fds:
        os.close(fd)

signal.signal(signal.SIGCHLD, signal.SIG_DFL)
told, *standard = fds
if child := os.fork():
    os.write(told, b"%d " % child)
    os.closerange(0, told)
    os.closerange(told + 1, 256)
    os.write(told, b"%d" % os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    os._exit(0)

for number, fd in enumerate(standard):
    os.dup2(fd, number)
server.detach()
os.closerange(3, 256)
asked = json.loads(request)
os.chdir(asked["cwd"])
resource.setrlimit(resource.RLIMIT_NOFILE, asked["open_files"])
os.environ.clear()
os.environ.update(asked["env"])
time.tzset()
sys.argv = ["-c", *asked["argv"]]
{MAIN}
"""


@cache
def _server(python: str, program: str, _owner: int) -> socket.socket:
    """One for each process of the test run."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        command = [python, "-c", SERVER, program, str(theirs.fileno())]
        environ = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8"}
        started = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environ)
    atexit.register(started.wait)
    atexit.register(ours.close)  # its end
    return ours


class Forked:
    """A child of that process, used as a Popen."""

    def __init__(
        self, python: str, program: str, argv: Sequence[str], env: Mapping[str, str], cwd: Path,
        standard: Sequence[IO[bytes]],
    ) -> None:  # fmt: skip
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        # (What is no text is an argument, too.)
        asked: dict[str, object] = {
            "env": env,
            "cwd": str(cwd),
            "argv": list(map(os.fsdecode, argv)),
        }
        asked["open_files"] = limit
        told, tells = os.pipe()
        fds = [tells, *(file.fileno() for file in standard)]
        socket.send_fds(_server(python, program, os.getpid()), [json.dumps(asked).encode()], fds)
        os.close(tells)
        self._told = os.fdopen(told, "rb", buffering=0)
        self._said = b""
        while b" " not in self._said:
            piece = self._told.read(64)
            if not piece:  # no number at all: a kill of "-1" would be one of everything
                raise RuntimeError(f"{program} cannot be imported, or its server has ended")
            self._said += piece
        self.pid = int(self._said.split()[0])
        self.returncode: int | None = None
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        return self._ended(0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._ended(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
        return code

    def _ended(self, timeout: float | None) -> int | None:
        with self._lock:
            if self.returncode is not None:
                return self.returncode
            told = select.poll()  # (select takes no descriptor above 1023)
            told.register(self._told, select.POLLIN)
            milliseconds = None if timeout is None else timeout * 1000
            while self.returncode is None and told.poll(milliseconds):
                piece = self._told.read(64)
                self._said += piece
                if not piece:
                    self.returncode = int(self._said.split()[1])
                    self._told.close()
            return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended just now
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

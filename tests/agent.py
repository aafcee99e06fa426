"""The real agent as a process of its own: real environment, real signals, a real notify socket."""

import json
import os
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, Self

from backend import Backend
from frontend import Frontend
from nursery import LAUNCH, MAIN, Forked
from pg import Database
from waiting import wait_until

REPOSITORY = Path(__file__).resolve().parent.parent
# Relative ones are meant from the repository's root.
PYTHON = os.environ.get("SERVERSYNC_PYTHON", "/usr/bin/python3")
# Agents are forked with BUILT; a test may put another one into PROGRAM, which may import that.
PROGRAM = BUILT = os.environ.get("SERVERSYNC_PROGRAM", "serversync.py")
OPTIONS = ("SYNC_", "FRONTEND_", "DATABASE_URL", "ANNOUNCEMENT_", "NOTIFICATION_", "LOG_")

Env = Mapping[str, str]


def agent_env(
    db: Database | None,
    frontend: Frontend | None,
    backend: Backend | None,
    **overrides: Any,
) -> dict[str, str]:
    """The settings of an agent in the tests; an override None takes one away."""
    settings: dict[str, object] = {
        "DATABASE_URL": db and db.url,
        "FRONTEND_BASE_URL": frontend and frontend.url,
        "SYNC_RECORDINGS_DIR": backend and backend.recordings_dir,
        "ANNOUNCEMENT_AUDIO_DIR": backend and backend.announcements_dir,
        "SYNC_FILE_GRACE_SEC": 300,
        "SYNC_DELETE_AFTER_SEC": 0,
        "SYNC_POLL_INTERVAL_SEC": 300,
        "SYNC_LOG_LEVEL": "info",
        "SYNC_DEVICE_ID": "test-device",
        "FRONTEND_SYNC_INTERVAL_SEC": 0,
        **overrides,
    }
    return {name: str(value) for name, value in settings.items() if value is not None}


def write_env_file(path: Path, env: Env) -> Path:
    """Write KEY="VALUE" lines as systemd reads them."""
    quoted = {name: value.replace("\\", "\\\\").replace('"', '\\"') for name, value in env.items()}
    path.write_text("".join(f'{name}="{value}"\n' for name, value in quoted.items()))
    return path


class _Launch:
    """A command line and its clean environment.

    The agent's own settings go to a file; everything else (NOTIFY_SOCKET, FAKETIME, ...) can only
    come from the environment. Nothing is inherited: not SSL_CERT_FILE, not PGHOST, not PYTHONPATH.
    """

    def __init__(
        self,
        env: Env,
        args: Sequence[str],
        directory: Path,
        *,
        python: str | None = None,
        env_file: bool = True,
        prefix: Sequence[str] = (),
    ) -> None:
        home = directory / "home"
        runtime = directory / "run"
        for path in (home, runtime):
            path.mkdir(parents=True, exist_ok=True)
        self.environ = {
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "LANG": "C.UTF-8",
            "HOME": str(home),
            # Its own, so that no test meets the state file of another one.
            "RUNTIME_DIRECTORY": str(runtime),
        }
        in_file = {name: value for name, value in env.items() if name.startswith(OPTIONS)}
        if not env_file:
            in_file = {}
        self.environ |= {name: value for name, value in env.items() if name not in in_file}
        self.env_file = write_env_file(directory / "serversync.env", in_file)
        self.interpreter = str(REPOSITORY / (python or PYTHON))
        self.arguments = [str(REPOSITORY / PROGRAM), "--env-file", str(self.env_file), *args]
        self.command = [*prefix, self.interpreter, "-c", LAUNCH + MAIN, *self.arguments]
        # What a process is told before it begins.
        self.anew = bool(prefix) or any(name.startswith(("LD_", "PYTHON")) for name in self.environ)

    def start(
        self, stdin: IO[bytes], stdout: IO[bytes], stderr: IO[bytes], pass_fds: Sequence[int] = ()
    ) -> Forked | subprocess.Popen[bytes]:
        if not self.anew and not pass_fds:
            standard = (stdin, stdout, stderr)
            program = str(REPOSITORY / BUILT)
            return Forked(
                self.interpreter, program, self.arguments, self.environ, REPOSITORY, standard
            )
        return subprocess.Popen(
            self.command, env=self.environ, cwd=REPOSITORY,
            stdin=stdin, stdout=stdout, stderr=stderr, pass_fds=pass_fds,
        )  # fmt: skip


def run_once(
    env: Env,
    timeout: float = 60,
    args: Sequence[str] = ("once",),
    *,
    python: str | None = None,
    env_file: bool = True,
    stdin: str = "",
    prefix: Sequence[str] = (),
) -> subprocess.CompletedProcess[str]:
    """Run one command of the agent to its end: returncode, stdout, stderr."""
    with tempfile.TemporaryDirectory(prefix="serversync-") as directory:
        launch = _Launch(
            env, args, Path(directory), python=python, env_file=env_file, prefix=prefix
        )
        with ExitStack() as stack:
            said, out, err = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(3))
            said.write(stdin.encode())
            said.seek(0)
            process = launch.start(said, out, err)
            stack.callback(process.kill)
            code = process.wait(timeout)
            for file in (out, err):
                file.seek(0)
            texts = out.read().decode(), err.read().decode()
            return subprocess.CompletedProcess(launch.command, code, *texts)


class NotifySocket:
    """systemd's end of sd_notify: a real datagram socket and what arrived when."""

    def __init__(self) -> None:
        # Short: the path of a Unix socket has room for 107 bytes.
        self._directory = tempfile.TemporaryDirectory(prefix="serversync-notify-")
        self.path = Path(self._directory.name) / "socket"
        self.messages: list[tuple[float, str]] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(self.path))
        self._thread = threading.Thread(target=self._collect, name="notify", daemon=True)
        self._thread.start()

    def _collect(self) -> None:
        while data := self._socket.recv(65536):
            self.messages.append((time.monotonic(), data.decode()))

    def values(self, name: str) -> list[tuple[float, str]]:
        """When which value of a variable such as STATUS came."""
        return [
            (when, line.removeprefix(f"{name}="))
            for when, message in list(self.messages)
            for line in message.splitlines()
            if line.startswith(f"{name}=")
        ]

    @property
    def status(self) -> str:
        """The last STATUS sentence, or an empty text."""
        return next((value for _, value in reversed(self.values("STATUS"))), "")

    def wait_for(self, text: str, timeout: float = 20, since: float = 0) -> float:
        """Wait for a message that contains a text; when it came (`since`: only later ones)."""

        def arrived() -> float | None:
            found = (when for when, said in list(self.messages) if when > since and text in said)
            return next(found, None)

        found = wait_until(arrived, timeout, f"{text!r} on the notify socket", self._summary)
        assert found is not None
        return found

    def _summary(self) -> str:
        return f"The last messages: {[message for _, message in self.messages[-10:]]}"

    def close(self) -> None:
        if self._thread.is_alive():
            # An empty datagram ends the thread; closing the socket would not wake it.
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.sendto(b"", str(self.path))
            self._thread.join(10)
        self._socket.close()
        self._directory.cleanup()


class Agent:
    """A running agent, started at once; stdout and stderr go to one file.

    `notify`: the NotifySocket it talks to. `strace`: strace's options, its output is in
    `strace_path`; the agent is still our own child, with its own pid. `prefix`: a command before
    the agent's, such as prlimit. `pass_fds`: what it inherits beside the standard three.
    """

    def __init__(
        self,
        env: Env,
        *,
        python: str | None = None,
        args: Sequence[str] = ("run",),
        notify: NotifySocket | None = None,
        runtime_dir: Path | None = None,
        strace: Sequence[str] | None = None,
        env_file: bool = True,
        prefix: Sequence[str] = (),
        pass_fds: Sequence[int] = (),
    ) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="serversync-agent-")
        directory = Path(self._directory.name)
        self.strace_path = directory / "strace"
        self.runtime_dir = runtime_dir or directory / "run"
        extra = {"RUNTIME_DIRECTORY": str(self.runtime_dir)}
        if notify is not None:
            extra["NOTIFY_SOCKET"] = str(notify.path)
        if strace is not None:
            # -D: strace becomes the grandchild, so that our signals reach the agent.
            prefix = [*prefix, "strace", "-D", "-f", "-o", str(self.strace_path), *strace]
        launch = _Launch(
            {**extra, **env}, args, directory, python=python, env_file=env_file, prefix=prefix
        )
        self.env_file = launch.env_file
        self._log_path = directory / "log"
        with self._log_path.open("wb") as log, open(os.devnull, "rb") as nothing:
            self.process = launch.start(nothing, log, log, pass_fds)
        self.pid = self.process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    @property
    def returncode(self) -> int | None:
        return self.process.poll()

    def log(self) -> str:
        return self._log_path.read_text(errors="replace")

    def lines(self, text: str) -> list[str]:
        """The log's lines that contain a text."""
        return [line for line in self.log().splitlines() if text in line]

    def _tail(self) -> str:
        return f"The agent ended with {self.returncode}; its log:\n{self.log()[-3000:]}"

    def wait_log(self, text: str, timeout: float = 20) -> str:
        """Wait for a line that contains a text; the first one. A dead agent ends the wait."""

        def found() -> str | None:
            ended = not self.running
            if lines := self.lines(text):
                return lines[0]
            if ended:
                raise AssertionError(f"no {text!r} in the log. {self._tail()}")
            return None

        line = wait_until(found, timeout, f"{text!r} in the log", self._tail)
        assert line is not None
        return line

    def state(self) -> dict[str, Any]:
        """Its state file; a LookupError while there is none yet."""
        path = self.runtime_dir / "state.json"
        if not path.exists():
            raise LookupError(path)
        content: dict[str, Any] = json.loads(path.read_text())
        return content

    def wait_sentence(self, text: str, timeout: float = 20) -> None:
        """Wait until its state file says what it is doing, for example "all delivered"."""
        wait_until(
            lambda: text in self.state()["sentence"], timeout, f"the state {text!r}", self._tail
        )

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def hup(self) -> None:
        self.signal(signal.SIGHUP)

    def kill(self) -> None:
        """kill -9, and wait until it is gone."""
        self.process.kill()
        self.process.wait(10)

    def wait(self, timeout: float = 20) -> int:
        """Wait for the end of its own accord; the exit code."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout:g} s. {self._tail()}") from None

    def stop(self, timeout: float = 10) -> tuple[int, float]:
        """SIGTERM; the exit code, and how many seconds it took."""
        started = time.monotonic()
        self.process.terminate()
        code = self.wait(timeout)
        return code, time.monotonic() - started

    def update_env(self, env: Env) -> None:
        """Rewrite its configuration file, for a SIGHUP to be read."""
        write_env_file(self.env_file, env)

    def reload(self, env: Env) -> None:
        """Rewrite its configuration file, and have it read."""
        self.update_env(env)
        self.hup()

    def _memory(self, name: str) -> int:
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1])
        raise AssertionError(f"no {name}: the agent ended with {self.returncode}")

    def rss_kib(self) -> int:
        return self._memory("VmRSS")

    def rss_peak_kib(self) -> int:
        return self._memory("VmHWM")

    def close(self) -> None:
        """Kill it if it still runs, and remove its files."""
        if self.running:
            # A stopped or stuck one shall not outlive its test.
            self.kill()
        self._directory.cleanup()


class AgentFactory:
    """Starts agents with the test's own database, frontend and backend; ends all of them.

    Keyword arguments in capitals are settings (None takes one away), the others Agent's.
    """

    def __init__(self, db: Database, frontend: Frontend, backend: Backend) -> None:
        self._db, self._frontend, self._backend = db, frontend, backend
        self.started: list[Agent] = []

    def env(self, **overrides: Any) -> dict[str, str]:
        return agent_env(self._db, self._frontend, self._backend, **overrides)

    def __call__(self, **how: Any) -> Agent:
        overrides = {name: value for name, value in how.items() if name.isupper()}
        rest = {name: value for name, value in how.items() if name not in overrides}
        agent = Agent(self.env(**overrides), **rest)
        self.started.append(agent)
        return agent

    def once(
        self, *args: str, timeout: float = 60, **overrides: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run one command to its end; without arguments: once."""
        return run_once(self.env(**overrides), timeout, args or ("once",))

    def logs(self) -> str:
        return "\n".join(
            f"--- agent {agent.pid}, exit code {agent.returncode}\n{agent.log()}"
            for agent in self.started
        )

    def close(self) -> None:
        for agent in self.started:
            agent.close()

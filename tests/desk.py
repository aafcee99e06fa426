"""What people do: commands that they type, and the dead letters that these are about."""

import contextlib
import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import tempfile
import termios
import threading
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any, Self

from psycopg.types.json import Jsonb

from agent import REPOSITORY, AgentFactory, _Launch
from backend import Backend
from frontend import Frontend
from ledger import dead_letters
from pg import Database
from waiting import wait_until

BIDI = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
CONTROL = {chr(code) for code in (*range(0x20), *range(0x7F, 0xA0))} - {"\n"}
CONTROL |= {"\u2028", "\u2029", *BIDI}
# What there is of a dead letter as JSON, here and by REST.
MESSAGE = {
    *("id", "original_topic", "error_message", "retry_count", "max_retries", "payload", "status"),
    *("created_at", "updated_at", "last_retry_at", "outbox_id", "entity_id", "error_code"),
    *("http_status", "attempts"),
}
# A time as people are told it, of another day with its date: in a sentence, and on the page.
CLOCK = r"(\d\d \w+ )?\d\d:\d\d:\d\d"
MOMENT = r"(\d{4}-\d\d-\d\d )?\d\d:\d\d:\d\d"
# As if each had been given up: no request is needed to fill a page.
BURIED = """
    WITH letter AS (
        INSERT INTO sync_outbox (entity_type, entity_id, payload, processed_at)
        VALUES (%(topic)s, gen_random_uuid(), %(payload)s, now()) RETURNING *)
    INSERT INTO serversync.dead_letters (outbox_id, original_topic, entity_id, payload, rest,
        error_code, error_message, http_status, attempts)
    SELECT id, entity_type, entity_id, payload,
           to_jsonb(letter) - 'payload' - 'processed_at', 'BAD_REQUEST', %(error)s, 400, 1
    FROM letter RETURNING id::text
"""
BURIED_MANY = """
    WITH gone AS (
        INSERT INTO sync_outbox (entity_type, entity_id, payload, processed_at)
        SELECT (array['call_log', 'recording', 'schedule'])[1 + n %% 3], gen_random_uuid(),
               jsonb_build_object('id', n, 'name', repeat('a name ', 20)), now()
        FROM generate_series(1, %(count)s::int) n RETURNING *)
    INSERT INTO serversync.dead_letters (outbox_id, original_topic, entity_id, payload, rest,
        error_code, error_message, http_status, attempts, status, created_at)
    SELECT id, entity_type, entity_id, payload,
           jsonb_build_object('id', id, 'entity_type', entity_type, 'entity_id', entity_id,
                              'created_at', created_at),
           'BAD_REQUEST', 'HTTP 400: something in it was not as it should have been', 400, 1,
           %(status)s, now() - interval '1 hour' + id * interval '1 ms'
    FROM gone
"""


@dataclass(frozen=True)
class Letter:
    id: str
    seq: int
    entity: str


class Desk:
    """Types commands; what they say has no trace of a bug and cannot move a cursor."""

    def __init__(self, agent: AgentFactory) -> None:
        self.agent = agent

    def __call__(
        self, *args: str, code: int | None = 0, timeout: float = 120, **settings: Any
    ) -> CompletedProcess[str]:
        return checked(self.agent.once(*args, timeout=timeout, **settings), code)

    def json(self, *args: str, code: int | None = 0, **settings: Any) -> Any:
        return json.loads(self(*args, "--json", code=code, **settings).stdout)


# Runs what it is told, line by line, as if each had been typed for itself.
TYPED = """
import importlib, io, json, os, sys, time, traceback
directory, name = os.path.split(sys.argv[1])
sys.path.insert(0, directory)
serversync = importlib.import_module(name.removesuffix(".py"))
lines, answers = sys.stdin, sys.stdout
for line in lines:
    environ, args, typed = json.loads(line)
    os.environ.clear()
    os.environ.update(environ)
    time.tzset()
    sys.argv = ["serversync", *args]
    sys.stdin = io.TextIOWrapper(io.BytesIO(bytes.fromhex(typed)))
    sys.stdout, sys.stderr = out, err = io.StringIO(), io.StringIO()
    try:
        code = serversync.main(args)
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc(file=err)
        code = 1
    print(json.dumps([code, out.getvalue(), err.getvalue()]), file=answers, flush=True)
"""


class Typist(Desk):
    """The same by one process that does one command after the other: for very many of them."""

    def __init__(self, agent: AgentFactory) -> None:
        super().__init__(agent)
        self._directory = tempfile.TemporaryDirectory(prefix="serversync-typist-")
        launch, (program, *_) = self._launch((), {})
        self._process = subprocess.Popen(
            [launch.command[0], "-c", TYPED, program],
            env=launch.environ,
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __call__(
        self,
        *args: str,
        code: int | None = 0,
        timeout: float = 120,
        stdin: bytes = b"",
        **settings: Any,
    ) -> CompletedProcess[str]:
        launch, (_, *words) = self._launch(args, settings)
        assert self._process.stdin and self._process.stdout
        asked = [launch.environ, words, stdin.hex()]
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        return checked(CompletedProcess(args, *answer), code)

    def _launch(
        self, args: Sequence[str], settings: Mapping[str, Any]
    ) -> tuple[_Launch, list[str]]:
        """What would be started for this: the program with its arguments."""
        launch = _Launch(self.agent.env(**settings), args, Path(self._directory.name))
        return launch, launch.command[launch.command.index("--env-file") - 1 :]

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait(60)
        self._directory.cleanup()


def checked(done: CompletedProcess[str], code: int | None) -> CompletedProcess[str]:
    assert_plain(done.stdout + done.stderr)
    if code is not None:
        assert done.returncode == code, f"{done.returncode}: {done.stdout}{done.stderr}"
    return done


def assert_plain(text: str) -> None:
    assert "Traceback" not in text, text
    assert not CONTROL & set(text), sorted(map(hex, map(ord, CONTROL & set(text))))


def give_up(
    agent: AgentFactory, backend: Backend, frontend: Frontend, *types: str, **settings: Any
) -> list[Letter]:
    """Entries that the frontend refuses for good; later it would take them."""
    found = {}
    for entity_type in types:
        entity = str(uuid.uuid4())
        frontend.rejected[entity] = "SCHEMA"
        found[backend.enqueue(entity_type, entity_id=entity)] = entity
    assert agent.once(**settings).returncode == 1
    frontend.rejected.clear()
    letters = dead_letters(backend.db)
    return [Letter(str(letters[seq]["id"]), seq, entity) for seq, entity in found.items()]


def bury(
    db: Database, payloads: Iterable[object], topic: str = "schedule", error: str = "HTTP 400"
) -> list[str]:
    """Dead letters without an agent, by their ids; payloads are objects, or JSON as text."""
    found = []
    for payload in payloads:
        value = payload if isinstance(payload, str) else Jsonb(payload)
        params: Mapping[str, object] = {"topic": topic, "payload": value, "error": error}
        found.append(str(db.value(BURIED, params)))
    return found


def state_of(db: Database, letter: str) -> tuple[str, int]:
    """Status and retry_count of a dead letter."""
    query = "SELECT status, retry_count FROM serversync.dead_letters WHERE id = %s"
    status, retries = db.rows(query, (letter,))[0]
    return status, retries


def state_file(pid: int) -> dict[str, Any]:
    """What an agent in the middle of something writes to its state file."""
    outage = {"endpoint": "entries", "code": "X", "reason": "words", "since": 1e9, "due": 1e9}
    return {
        "pid": pid,
        "since": 1e9 + 0.5,
        "at": 1e9 + 1.5,
        "sentence": "uploading",
        "standby": False,
        "listening": True,
        "inflight": 3,
        "outages": [outage],
        "progress": {"kind": "upload", "seq": 5, "bytes": 10, "size": 100, "seconds": 2.5},
    }


# -- a terminal -----------------------------------------------------------------------------------

TOKEN = re.compile(r"\x1b\[([?0-9;]*)([A-Za-z])|\r|\n|[^\x00-\x1f\x7f-\x9f]|[\s\S]")


class Screen:
    """What a terminal shows of what was written to it; knows few sequences, and no others."""

    def __init__(self, rows: int, columns: int) -> None:
        self.rows, self.columns = rows, columns
        self.lines = [""] * rows
        self.row = self.column = 0
        self.scrolled = 0
        self.alternate = False
        self._main: tuple[list[str], int, int] = ([""] * rows, 0, 0)

    def feed(self, text: str) -> None:
        for match in TOKEN.finditer(text):
            if match[2]:
                self._sequence(match[1], match[2])
            elif match[0] == "\r":
                self.column = 0
            elif match[0] == "\n":
                self._down()
            else:
                assert match[0].isprintable() or match[0] == " ", f"{match[0]!r} in {text!r}"
                self._put(match[0])

    def _put(self, letter: str) -> None:
        if self.column == self.columns:
            self.column = 0
            self._down()
        line = self.lines[self.row].ljust(self.column)
        self.lines[self.row] = line[: self.column] + letter + line[self.column + 1 :]
        self.column += 1

    def _down(self) -> None:
        if self.row < self.rows - 1:
            self.row += 1
        else:
            self.lines = [*self.lines[1:], ""]
            self.scrolled += 1

    def _sequence(self, parameters: str, final: str) -> None:
        match parameters + final:
            case "H":
                self.row = self.column = 0
            case "J":
                self.lines[self.row] = self.lines[self.row][: self.column]
                self.lines[self.row + 1 :] = [""] * (self.rows - self.row - 1)
            case "?1049h":
                self._main = (self.lines, self.row, self.column)
                self.lines, self.alternate = [""] * self.rows, True
            case "?1049l":
                self.lines, self.row, self.column = self._main
                self.alternate = False
            case other:
                raise AssertionError(f"a sequence that nobody expected: {other}")

    @property
    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.lines).rstrip()


class Terminal:
    """A command on a terminal of its own, with a keyboard."""

    def __init__(
        self, env: Mapping[str, str], *args: str, rows: int = 24, columns: int = 80
    ) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="serversync-terminal-")
        launch = _Launch(env, args, Path(self._directory.name))
        self.written = ""
        self.frames: list[str] = []  # what was to be seen at each repaint
        self.screen = Screen(rows, columns)
        self.returncode: int | None = None
        self._failed: BaseException | None = None
        self.pid, self._master = pty.fork()
        if self.pid == 0:
            os.chdir(REPOSITORY)
            size = struct.pack("HHHH", rows, columns, 0, 0)
            fcntl.ioctl(0, termios.TIOCSWINSZ, size)
            os.execve(launch.command[0], launch.command, {**launch.environ, "TERM": "xterm"})
        self.modes = termios.tcgetattr(self._master)
        self._thread = threading.Thread(target=self._read, name="terminal", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        # EIO: nobody has it open any more.
        with contextlib.suppress(OSError):
            while data := os.read(self._master, 65536):
                self.written += data.decode()
                try:
                    for piece in re.split(r"(?=\x1b\[H)", data.decode()):
                        if piece.startswith("\x1b[H"):
                            self.frames.append(self.screen.text)
                        self.screen.feed(piece)
                except AssertionError as error:
                    self._failed = self._failed or error

    def wait_for(self, text: str, timeout: float = 60) -> str:
        """Wait until a text is to be seen; all that is."""

        def seen() -> str:
            if self._failed:
                raise self._failed
            found = self.screen.text
            return found if text in found else ""

        return wait_until(seen, timeout, f"{text!r} on the terminal", lambda: self.screen.text)

    def press(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def wait(self, timeout: float = 60) -> int:
        """Wait for its end; the exit code."""

        def ended() -> bool:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
            return bool(pid)

        if self.returncode is None:
            wait_until(ended, timeout, "its end", lambda: self.screen.text)
        assert self.returncode is not None
        self._thread.join(10)
        if self._failed:
            raise self._failed
        return self.returncode

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.returncode is None:
            os.kill(self.pid, 9)
            with contextlib.suppress(AssertionError):
                self.wait(10)
        os.close(self._master)
        self._directory.cleanup()

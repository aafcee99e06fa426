"""What all measurements share: a PostgreSQL as Debian sets it up, the receiver, processes that are
watched, and what the database counted meanwhile."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from agent import PYTHON, REPOSITORY, agent_env, write_env_file
from ledger import locked
from pg import Cluster, Database

HERE = Path(__file__).resolve().parent
CACHE = HERE / ".cache"
PEERS = HERE / "peers"
NODE_PEERS = CACHE  # copied to where their packages are: so does Node look for them
PEER_PYTHON = CACHE / "venv" / "bin" / "python"
TICKS = os.sysconf("SC_CLK_TCK")

# The program as it is installed: byte-compiled, imported by its name.
START = """
import sys
sys.path.insert(0, sys.argv.pop(1))
import serversync
raise SystemExit(serversync.main())
"""
COMPILE = "import py_compile, sys\npy_compile.compile(sys.argv[1], sys.argv[2], doraise=True)\n"

COUNTED = """
    select coalesce((select sum(calls) from pg_stat_statements
                     where dbid = %(db)s and userid = 'voicebot'::regrole), 0)::float8,
           coalesce((select sum(total_exec_time) from pg_stat_statements
                     where dbid = %(db)s and userid = 'voicebot'::regrole), 0)::float8,
           pg_current_wal_insert_lsn() - '0/0'::pg_lsn,
           (select sum(n_tup_upd + n_tup_del) from pg_stat_user_tables)::float8,
           (select wal_sync from pg_stat_wal)::float8,
           (select wal_sync_time from pg_stat_wal)::float8,
           (select wal_fpi from pg_stat_wal)::float8
"""


FILLER = "create table filler as select repeat('x', 1000) from generate_series(1, 2000000)"


@dataclass(frozen=True)
class Cost:
    """What something cost the database."""

    statements: float
    exec_ms: float
    wal: float
    dead: float
    syncs: float  # how often the log was forced to the disk
    sync_ms: float
    images: float  # whole pages in the log: the first change of each after a checkpoint

    def __sub__(self, other: Cost) -> Cost:
        return Cost(*(a - b for a, b in zip(_values(self), _values(other), strict=True)))


def _values(cost: Cost) -> tuple[float, ...]:
    return (
        cost.statements, cost.exec_ms, cost.wal, cost.dead, cost.syncs, cost.sync_ms, cost.images
    )  # fmt: skip


class Receiver:
    """The compiled frontend, a process of its own; the same for everybody."""

    def __init__(self) -> None:
        program = CACHE / "receiver"
        source = HERE / "receiver.c"
        if not program.exists() or program.stat().st_mtime < source.stat().st_mtime:
            CACHE.mkdir(exist_ok=True)
            subprocess.run(["cc", "-O2", "-o", program, source], check=True)
        self._log = Path(tempfile.mkstemp(prefix="serversync-bench-")[1])
        self.process = subprocess.Popen([program, "0", self._log], stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())
        self.url = f"http://127.0.0.1:{self.port}"
        self._asking: http.client.HTTPConnection | None = None

    def _ask(self, method: str, path: str) -> Any:
        if self._asking is None:
            self._asking = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        self._asking.request(method, path)
        return json.loads(self._asking.getresponse().read())

    def stats(self) -> dict[str, float]:
        """requests, entries, bytes, large; first and last by the clock on the wall."""
        found: dict[str, float] = self._ask("GET", "/stats")
        return found

    def reset(self, log: bool = False) -> None:
        """Counts from 0; to `log` what comes is not for measurements of speed."""
        self._ask("POST", "/reset-and-log" if log else "/reset")

    def records(self) -> Iterator[tuple[float, bytes]]:
        """When each small body was there to its last byte, and the body; of what was logged."""
        with self._log.open("rb") as file:
            while head := file.read(12):
                at, length = struct.unpack("=dI", head)
                yield at, file.read(length)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._log.unlink(missing_ok=True)


class Watched:
    """A process and its children: peak of the memory, CPU time, how often it was woken."""

    def __init__(
        self, command: Sequence[str | Path], env: Mapping[str, str], log: Path | None = None
    ) -> None:
        self.log = log or Path(tempfile.mkstemp(prefix="serversync-bench-", suffix=".log")[1])
        self._own_log = log is None
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(
                [str(word) for word in command],
                env={"PATH": os.environ["PATH"], "LANG": "C.UTF-8", "HOME": "/tmp", **env},
                cwd=REPOSITORY,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.started = time.time()
        self.peak_kib = 0
        self.cpu = 0.0
        self.switches = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._ended.wait(0.02):
            self.look()

    def look(self) -> None:
        """The figures so far. The kernel keeps the peak itself; the last look may miss its end."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            base = Path(f"/proc/{self.process.pid}")
            lines = (base / "status").read_text().splitlines()
            found = {line.split(":")[0]: (*line.split(), "")[1] for line in lines}
            if "VmHWM" in found:  # a process that has ended has none
                self.peak_kib = max(self.peak_kib, int(found["VmHWM"]))
            self.switches = int(found["voluntary_ctxt_switches"])
            fields = (base / "stat").read_text().rsplit(")", 1)[1].split()
            self.cpu = (int(fields[11]) + int(fields[12])) / TICKS

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def wait(self, timeout: float) -> int:
        return self.process.wait(timeout)

    def stop(self) -> None:
        self.look()
        self._ended.set()
        if self.running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
        self._thread.join()
        if self._own_log:
            self.log.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def said(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""


class World:
    """The ground of one run."""

    def __init__(self, *, fsync: bool, scale: float, peer_seconds: float) -> None:
        self.scale, self.peer_seconds = scale, peer_seconds
        settings = {
            "shared_preload_libraries": "pg_stat_statements",
            "pg_stat_statements.track": "top",
            "shared_buffers": "128MB",  # initdb's own default
            "wal_level": "logical",  # one peer can read the log
            "max_wal_size": "4GB",
            "min_wal_size": "4GB",
            "track_wal_io_timing": "on",
        }
        self.cluster = Cluster(fsync=fsync, settings=settings)
        self.cluster.start()
        self.cluster.prepare()
        with self.cluster.admin() as admin:  # a log that is new on the disk is slow, for all
            admin.execute(FILLER)
            admin.execute("drop table filler")
            admin.execute("checkpoint")
        self.receiver = Receiver()
        for script in PEERS.glob("*.mjs"):
            shutil.copy(script, NODE_PEERS)
        self.work = tempfile.TemporaryDirectory(prefix="serversync-bench-")
        self.directory = Path(self.work.name)
        # /run is memory on a Debian system.
        memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else self.work.name
        self.memory = tempfile.TemporaryDirectory(prefix="serversync-bench-", dir=memory)
        subprocess.run(
            [self.python, "-c", COMPILE, REPOSITORY / "serversync.py",
             self.directory / "compiled" / "serversync.pyc"],
            check=True,
        )  # fmt: skip
        with self.cluster.admin() as admin:
            admin.execute("alter role voicebot replication")

    @property
    def python(self) -> str:
        return str(REPOSITORY / PYTHON)

    def close(self) -> None:
        self.receiver.close()
        self.cluster.close()
        self.memory.cleanup()
        self.work.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def count(self, full: int, least: int = 1) -> int:
        """How many, at this run's scale."""
        return max(least, round(full * self.scale))

    # --- databases ------------------------------------------------------------------------------

    @contextlib.contextmanager
    def database(self) -> Iterator[Database]:
        """Those that are measured come as `voicebot`, by the socket; we ourselves do not, so that
        what we ask is not counted."""
        db = Database(self.cluster)
        db.url = self.cluster.socket_url(db.name, user="postgres")
        with db.admin() as admin:
            admin.execute("create extension pg_stat_statements")
        try:
            yield db
        finally:
            db.drop()

    def settle(self, db: Database) -> None:
        """As after a while of quiet: statistics and visibility known, nothing left to write."""
        with db.admin() as admin:
            admin.execute("vacuum analyze")
            admin.execute("checkpoint")
            admin.execute("select pg_stat_statements_reset()")

    def cost(self, db: Database) -> Cost:
        with db.admin() as admin:
            if admin.info.server_version >= 150000:
                admin.execute("select pg_stat_force_next_flush()")
            row = admin.execute("select oid from pg_database where datname = current_database()")
            oid = row.fetchall()[0][0]
            found = admin.execute(COUNTED, {"db": oid}).fetchall()[0]
        return Cost(*(float(value or 0) for value in found))

    # --- serversync -----------------------------------------------------------------------------

    def settings(self, db: Database, **more: Any) -> dict[str, str]:
        recordings = self.directory / "recordings"
        recordings.mkdir(exist_ok=True)
        return agent_env(
            None,
            None,
            None,
            DATABASE_URL=db.socket_url,
            **{
                "FRONTEND_BASE_URL": self.receiver.url,
                "SYNC_RECORDINGS_DIR": recordings,
                "ANNOUNCEMENT_AUDIO_DIR": recordings,
                **more,
            },
        )

    def agent(
        self, db: Database, *args: str, prefix: Sequence[str | Path] = (),
        env: Mapping[str, str] | None = None, log: Path | None = None, **settings: Any,
    ) -> Watched:  # fmt: skip
        """serversync as it is installed; `run` or `once`."""
        file = write_env_file(self.directory / f"{db.name}.env", self.settings(db, **settings))
        runtime = Path(tempfile.mkdtemp(prefix="run-", dir=self.memory.name))
        return Watched(
            [*prefix, self.python, "-c", START, self.directory / "compiled",
             "--env-file", file, *(args or ("once",))],
            {"RUNTIME_DIRECTORY": str(runtime), **(env or {})},
            log,
        )  # fmt: skip

    def agent_ready(self, db: Database, **settings: Any) -> Watched:
        """A running agent that has nothing to do and listens."""
        agent = self.agent(db, "run", **settings)
        deadline = time.monotonic() + 60
        while "started" not in agent.said() or not locked(db):
            if time.monotonic() > deadline or not agent.running:
                raise RuntimeError(f"the agent does not start: {agent.said()}")
            time.sleep(0.02)
        time.sleep(0.3)
        return agent


def progress(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)

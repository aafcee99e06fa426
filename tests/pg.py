"""A throwaway PostgreSQL cluster, and a database for each test cloned from a template."""

import contextlib
import itertools
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from random import SystemRandom
from typing import Any, Self
from urllib.parse import quote, urlencode

import psycopg
from psycopg import sql

SCHEMA = Path(__file__).with_name("schema.sql")
OWNER = "voicebot"
TEMPLATE = "backend_template"
HOST = "127.0.0.1"

# Typed as root: whoever that is, psql becomes the role that the line names, else the superuser.
SUDO = """#!/bin/sh
shift 2
exec "$@"
"""

Params = tuple[object, ...] | Mapping[str, object]


def newest_bin() -> Path:
    """The newest installed server's programs; Debian does not put them on the PATH."""
    found = sorted(
        Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3])
    )
    if not found:
        raise RuntimeError("no PostgreSQL server below /usr/lib/postgresql: apt install postgresql")
    return found[-1].parent


def free_port() -> int:
    """Below those that the kernel gives to who asks for any: nobody else takes it meanwhile."""
    while True:
        port = SystemRandom().randrange(20_000, 32_000)
        with contextlib.suppress(OSError), socket.create_server((HOST, port)):
            return port


def in_memory() -> str | None:
    """Where there is room for it: a disk takes several times as long to clone a database."""
    room = os.path.isdir("/dev/shm") and shutil.disk_usage("/dev/shm").free > 4 << 30
    return "/dev/shm" if room else None


class Cluster:
    """One server with its data in a temporary directory; role `voicebot` owns the databases."""

    def __init__(
        self,
        *,
        fsync: bool = False,
        settings: Mapping[str, str] | None = None,
        place: str | None = None,
    ) -> None:
        self.bin = newest_bin()
        self.port = free_port()
        self.directory = Path(tempfile.mkdtemp(prefix="serversync-pg-", dir=place))
        self.data = self.directory / "data"
        self.log_path = self.directory / "log"
        self._names = (f"test_{number}" for number in itertools.count(1))
        # PostgreSQL refuses to run as root.
        self._as_postgres = ["runuser", "-u", "postgres", "--"] if os.geteuid() == 0 else []
        if self._as_postgres:
            shutil.chown(self.directory, "postgres", "postgres")
        self._run("initdb", "-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C", "-N")
        self._configure(fsync, settings or {})

    def _run(self, program: str, *args: str) -> None:
        # pg_ctl's server inherits our descriptors: a pipe for its output would never end.
        with tempfile.TemporaryFile() as output:
            done = subprocess.run(
                [*self._as_postgres, str(self.bin / program), "-D", str(self.data), *args],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd="/",
                check=False,
            )
            if done.returncode:
                output.seek(0)
                said = output.read().decode(errors="replace")
                raise RuntimeError(f"{program} {' '.join(args)} failed: {said}\n{self.log()}")

    def _configure(self, fsync: bool, settings: Mapping[str, str]) -> None:
        durable = "on" if fsync else "off"
        # synchronous_commit stays on: stop("immediate") shall lose nothing that was committed.
        lines = {
            "listen_addresses": HOST,
            "port": str(self.port),
            "unix_socket_directories": str(self.directory),
            "fsync": durable,
            "full_page_writes": durable,
            "shared_buffers": "16MB",
            "max_connections": "100",
            **settings,
        }
        with (self.data / "postgresql.conf").open("a") as file:
            file.writelines(f"{name} = '{value}'\n" for name, value in lines.items())

    def log(self) -> str:
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def start(self) -> None:
        self._run("pg_ctl", "-w", "-s", "-l", str(self.log_path), "start")

    def stop(self, mode: str = "fast") -> None:
        """Stop in mode smart, fast or immediate (which is a crash); a stopped one stays stopped."""
        if self.running:
            self._run("pg_ctl", "-w", "-s", "-m", mode, "stop")

    def restart(self, mode: str = "fast") -> None:
        self.stop(mode)
        self.start()

    @property
    def running(self) -> bool:
        return (self.data / "postmaster.pid").exists()

    def close(self) -> None:
        """Stop the server and remove everything."""
        with contextlib.suppress(RuntimeError):
            self.stop("immediate")
        shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> Self:
        self.start()
        self.prepare()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def prepare(self) -> None:
        """Make the role and the template database with the backend's tables."""
        with self.admin() as admin:
            admin.execute(sql.SQL("CREATE ROLE {} LOGIN").format(sql.Identifier(OWNER)))
        self.create(template="template0", name=TEMPLATE)
        with psycopg.connect(self.url(TEMPLATE)) as owner:
            owner.execute(SCHEMA.read_text())

    def url(
        self, dbname: str, *, user: str = OWNER, port: int | None = None, **params: object
    ) -> str:
        """A URL over TCP; `port` leads through a proxy, `params` are libpq's."""
        query = f"?{urlencode(params)}" if params else ""
        name, user = quote(dbname, safe=""), quote(user, safe="")
        return f"postgresql://{user}@{HOST}:{port or self.port}/{name}{query}"

    def socket_url(self, dbname: str, *, user: str = OWNER, **params: object) -> str:
        """A URL over the Unix socket."""
        query = urlencode({"host": self.directory, "port": self.port, **params})
        return f"postgresql://{quote(user, safe='')}@/{quote(dbname, safe='')}?{query}"

    def admin(self, dbname: str = "postgres") -> psycopg.Connection[Any]:
        """A superuser's connection in autocommit mode."""
        return psycopg.connect(self.socket_url(dbname, user="postgres"), autocommit=True)

    def create(self, template: str = TEMPLATE, name: str | None = None) -> str:
        """Clone a database and return its name."""
        name = name or next(self._names)
        statement = sql.SQL("CREATE DATABASE {} TEMPLATE {} OWNER {}").format(
            *map(sql.Identifier, (name, template, OWNER))
        )
        with self.admin() as admin:
            admin.execute(statement)
        return name

    def drop(self, name: str) -> None:
        """Drop a database and end its sessions."""
        statement = sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name))
        with self.admin() as admin:
            admin.execute(statement)


class Database:
    """One test's database, with a connection of its own (autocommit, as the owner)."""

    def __init__(self, cluster: Cluster, name: str | None = None) -> None:
        self.cluster = cluster
        self.name = name or cluster.create()
        self.url = cluster.url(self.name)
        self.socket_url = cluster.socket_url(self.name)
        self._connection: psycopg.Connection[Any] | None = None

    def url_through(self, port: int, **params: Any) -> str:
        """The URL that leads through a proxy's port."""
        return self.cluster.url(self.name, port=port, **params)

    def connect(self, *, autocommit: bool = True, **params: Any) -> psycopg.Connection[Any]:
        """One more connection, which the caller closes."""
        return psycopg.connect(self.url, autocommit=autocommit, **params)

    def admin(self) -> psycopg.Connection[Any]:
        """A superuser's connection to this database, which the caller closes."""
        return self.cluster.admin(self.name)

    def paste(self, line: str, well: bool = True) -> str:
        """What this line says, as a shell of root's takes it, in an empty directory."""
        with tempfile.TemporaryDirectory(prefix="serversync-paste-") as place:
            sudo = Path(place, "bin", "sudo")
            sudo.parent.mkdir()
            sudo.write_text(SUDO)
            sudo.chmod(0o755)
            env = {"PATH": f"{sudo.parent}:{os.environ['PATH']}", "PGUSER": "postgres",
                   "PGHOST": str(self.cluster.directory), "LC_ALL": "C.UTF-8"}  # fmt: skip
            done = subprocess.run(
                ["sh", "-c", line], cwd=place, env=env, capture_output=True, text=True, check=False
            )
            assert os.listdir(place) == ["bin"], f"{line} made {os.listdir(place)}"
            assert not well or done.returncode == 0, f"{line}: {done.stdout}{done.stderr}"
            return done.stdout

    @contextlib.contextmanager
    def _cursor(self, query: str, params: Params | None) -> Iterator[psycopg.Cursor[Any]]:
        # The probe: the server may have been restarted since the last statement, which psycopg
        # notices only by failing. Repeating the caller's own statement could do it twice.
        if self._connection is not None:
            try:
                self._connection.execute("SELECT 1")
            except psycopg.OperationalError:
                self.close()
        if self._connection is None:
            self._connection = self.connect()
        with self._connection.cursor() as cursor:
            cursor.execute(query, params)
            yield cursor

    def execute(self, query: str, params: Params | None = None) -> int:
        """Run a statement; the number of rows it touched."""
        with self._cursor(query, params) as cursor:
            return cursor.rowcount

    def dicts(self, query: str, params: Params | None = None) -> list[dict[str, Any]]:
        with self._cursor(query, params) as cursor:
            names = [column.name for column in cursor.description or ()]
            return [dict(zip(names, row, strict=True)) for row in cursor]

    def rows(self, query: str, params: Params | None = None) -> list[tuple[Any, ...]]:
        with self._cursor(query, params) as cursor:
            return cursor.fetchall()

    def value(self, query: str, params: Params | None = None) -> Any:
        """The first column of the first row, or None without rows."""
        rows = self.rows(query, params)
        return rows[0][0] if rows else None

    def pending(self) -> list[int]:
        """The ids of the outbox's entries that are not marked yet, in order."""
        found = self.rows("SELECT id FROM sync_outbox WHERE processed_at IS NULL ORDER BY id")
        return [row[0] for row in found]

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def drop(self) -> None:
        self.close()
        self.cluster.drop(self.name)

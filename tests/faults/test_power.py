"""Power cuts: PostgreSQL ends at once, and what it had not yet written to its log is gone.

The database's own default is the worst one, `synchronous_commit = off` with a lazy WAL writer: a
commit that did not ask for more than that is lost. SERVERSYNC_POWER_CUTS says how many cuts.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psycopg
import pytest

from agent import Agent, agent_env
from backend import Backend, Call
from frontend import Frontend, Request
from oracle import Oracle
from pg import Cluster, Database
from waiting import wait_until

CUTS = int(os.environ.get("SERVERSYNC_POWER_CUTS", "6"))
LAZY = {"wal_writer_delay": "10s", "wal_writer_flush_after": "1GB", "commit_delay": "0"}
OFFSETS_MS = [0, 1, 2, 3, 5, 8, 13, 21, 34, 55]


@pytest.fixture(scope="module")
def lazy() -> Iterator[Cluster]:
    """A server that really writes to the disk, but late."""
    with Cluster(fsync=True, settings=LAZY) as running:
        yield running


class Mains:
    """The power, of PostgreSQL alone or (each second time) of the agent, too: what that knows in
    memory must not be needed. A row that was committed lazily just before the cut shows what a cut
    loses."""

    def __init__(self, db: Database, env: dict[str, str]) -> None:
        self.db, self.env = db, env
        self.lost = 0  # how many cuts lost the row before
        self.cuts = 0
        self.agent = Agent(env)
        self._prepare()

    def _prepare(self) -> None:
        self._connection = self.db.connect()
        self.postmaster = int((self.db.cluster.data / "postmaster.pid").read_text().split()[0])

    def cut(self) -> None:
        with suppress(psycopg.Error):  # it may be down already
            self._connection.execute("insert into last_words values (%s)", (self.cuts,))
        os.kill(self.postmaster, signal.SIGQUIT)  # what pg_ctl -m immediate sends
        if self.cuts % 2:
            self.agent.kill()

    def restore(self) -> None:
        cluster = self.db.cluster
        wait_until(lambda: not cluster.running, what="the end of PostgreSQL", state=cluster.log)
        self._connection.close()
        cluster.start()
        words = "select count(*) from last_words where number = %s"
        self.lost += self.db.value(words, (self.cuts,)) == 0
        self.cuts += 1
        self._prepare()

    def power_up(self) -> None:
        if not self.agent.running:
            self.agent.close()
            self.agent = Agent(self.env)

    def close(self) -> None:
        self.agent.close()
        self._connection.close()


@contextmanager
def scene(cluster: Cluster, directory: Path) -> Iterator[tuple[Oracle, Mains]]:
    db = Database(cluster)
    with cluster.admin() as admin:
        admin.execute(f"alter database {db.name} set synchronous_commit = off")
    db.close()
    db.execute("create table last_words (number int)")
    assert db.value("show synchronous_commit") == "off"
    with Frontend(directory / "frontend") as frontend:
        oracle = Oracle(db, frontend, Backend(db, directory / "backend"))
        mains = Mains(db, agent_env(db, frontend, oracle.backend, SYNC_POLL_INTERVAL_SEC=1))
        try:
            yield oracle, mains
        finally:
            mains.close()
    db.close()
    db.drop()


def end_call(oracle: Oracle, **how: object) -> Call:
    """A call whose own rows survive: what the backend may lose is not our matter."""
    with oracle.db.connect(autocommit=False, options="-c synchronous_commit=on") as connection:
        call = oracle.end_call(connection=connection, **how)
        connection.commit()
    return call


def check(oracle: Oracle, mains: Mains, where: object) -> None:
    mains.restore()
    assert not oracle.lost(), (oracle.lost(), where)
    mains.power_up()
    wait_until(
        lambda: not oracle.unfinished(),
        timeout=60,
        what="everything",
        state=lambda: f"{where}: {oracle.unfinished()}\n{mains.agent.log()[-2000:]}",
    )
    assert not oracle.wrong(), (oracle.wrong(), where)


def test_a_power_cut_around_a_confirmed_upload_loses_no_recording(
    lazy: Cluster, tmp_path: Path
) -> None:
    """So many ms after the frontend gave its answer to the upload."""
    with scene(lazy, tmp_path) as (oracle, mains):
        for number in range(CUTS):
            offset = OFFSETS_MS[number * len(OFFSETS_MS) // CUTS if CUTS < 10 else number % 10]
            struck = threading.Event()

            def strike(
                request: Request, after: float = offset / 1000, done: threading.Event = struck
            ) -> None:
                if request.kind == "file" and request.status == 200 and not done.is_set():
                    time.sleep(after)
                    mains.cut()
                    done.set()

            oracle.frontend.on_end = strike
            end_call(oracle, events=1, extra_files=("b_leg.wav",) if number % 3 == 2 else ())
            assert struck.wait(60), mains.agent.log()
            oracle.frontend.on_end = None
            check(oracle, mains, f"{offset} ms after the answer")
        assert mains.lost, "no cut lost a lazy commit: this shows nothing"
        assert oracle.repeated() <= 4 * mains.cuts
        print(f"{mains.cuts} power cuts, {mains.lost} of them lost a lazy commit")


def test_a_power_cut_at_the_moment_of_a_deletion_finds_the_url_in_the_database(
    lazy: Cluster, tmp_path: Path
) -> None:
    """The sharpest moment: the file has just gone, and all that is left is what was written."""
    with scene(lazy, tmp_path) as (oracle, mains):
        for number in range(CUTS):
            call = end_call(oracle, events=1)
            visible = number % 2 == 0
            with oracle.db.connect() as connection:
                row = "select from serversync.uploads where outbox_id = %s"
                seq = call.seq("recording_file")
                deadline = time.monotonic() + 60
                while call.wav.exists() and time.monotonic() < deadline:
                    with suppress(psycopg.errors.UndefinedTable):
                        if visible and connection.execute(row, (seq,)).fetchone():
                            break
                mains.cut()
            check(oracle, mains, "the row is visible" if visible else "the file is gone")
        assert mains.lost, "no cut lost a lazy commit: this shows nothing"

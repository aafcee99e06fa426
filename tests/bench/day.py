"""What a day costs, put together of what was measured: quiet with settings pulled each minute, a
call after the other, an outage. And what forty poisonous entries cost the calls that follow."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from backend import Backend
from drains import PENDING
from frontend import Frontend, Reply, Request
from pg import Database
from settings import example
from small import first_start
from waiting import wait_until
from world import TICKS, Watched, World, progress

CALLS_A_DAY, OUTAGE_SEC = 500, 3600.0
POISON = 40


@dataclass
class Spent:
    """What something cost: CPU, bytes that went to the disk, packets."""

    agent_cpu: float
    database_cpu: float
    wal: float
    database_disk: float
    own_disk: float
    log: float
    packets: float
    requests: float

    def __sub__(self, other: Spent) -> Spent:
        return self.plus(other, -1.0)

    def plus(self, other: Spent, times: float = 1.0) -> Spent:
        mine, others = vars(self), vars(other)
        return Spent(**{name: mine[name] + times * others[name] for name in mine})


class Cluster:
    """CPU seconds and bytes written to a disk, of all of the database's processes; of one that has
    ended, as it was seen last."""

    def __init__(self, db: Database) -> None:
        name = "select pid from pg_stat_activity where backend_type = 'checkpointer'"
        status = Path(f"/proc/{db.value(name)}/stat").read_text()
        self.parent = status.rsplit(")", 1)[1].split()[1]
        self.seen: dict[str, tuple[float, float]] = {}

    def look(self) -> tuple[float, float]:
        children = Path(f"/proc/{self.parent}/task/{self.parent}/children").read_text()
        for pid in children.split():
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
                cpu = (int(fields[11]) + int(fields[12])) / TICKS
                self.seen[pid] = (cpu, written(int(pid)))
        cpus, sizes = zip(*self.seen.values(), strict=True)
        return sum(cpus), sum(sizes)


def written(pid: int) -> float:
    lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    return float(dict(line.split(": ") for line in lines)["write_bytes"])


def _spent(
    world: World, db: Database, cluster: Cluster, agent: Watched, frontend: Frontend
) -> Spent:
    """Everything so far; what is dirty is on the disk first."""
    with db.admin() as admin:
        admin.execute("checkpoint")
    agent.look()
    lines = Path("/proc/net/dev").read_text().splitlines()
    loopback = next(line for line in lines if line.strip().startswith("lo:")).split()
    cpu, disk = cluster.look()
    return Spent(
        agent.cpu, cpu, world.cost(db).wal, disk, written(agent.process.pid),
        float(agent.log.stat().st_size), float(loopback[2]), float(len(frontend.requests)),
    )  # fmt: skip


@dataclass
class Day:
    minute: Spent  # of quiet
    call: Spent  # beyond the quiet
    outage: Spent  # a minute of it, beyond the quiet
    all: Spent


def day(world: World, quiet: float, calls: int, outage: float) -> Day:
    """Three pieces of a day, each with settings that are pulled once a minute. What comes of the
    making of the database here rests, or its disk shows nothing else: autovacuum, new WAL files."""
    with world.database() as db, Frontend(world.directory / "frontend-day") as frontend:
        backend = Backend(db, world.directory / "backend-day")
        example().serve(frontend)
        first_start(world, db)
        _rests(db, True)
        cluster = Cluster(db)
        settings = {"FRONTEND_BASE_URL": frontend.url, "FRONTEND_SYNC_INTERVAL_SEC": 60,
                    "SYNC_RECORDINGS_DIR": backend.recordings_dir,
                    "SYNC_DELETE_AFTER_SEC": 1}  # fmt: skip
        with world.agent_ready(db, **settings) as agent:

            def piece(act: Callable[[], None]) -> tuple[Spent, float]:
                before, began = _spent(world, db, cluster, agent, frontend), time.monotonic()
                act()
                return _spent(
                    world, db, cluster, agent, frontend
                ) - before, time.monotonic() - began

            def some_calls(number: int = calls) -> None:
                for _ in range(number):
                    backend.end_call(seconds=5, events=2)
                    wait_until(lambda: not db.value(PENDING), 60, "a call")
                    time.sleep(1)
                wait_until(lambda: not db.value("select count(*) from serversync.uploads"), 60)

            def away() -> None:
                frontend.stop()
                backend.end_call(seconds=5, events=2)
                time.sleep(outage)

            some_calls(2)  # what is written once is written
            world.settle(db)
            piece(lambda: time.sleep(quiet / 4))  # and what is left of the settling
            spent, seconds = piece(lambda: time.sleep(quiet))
            minute = _scaled(spent, 60 / seconds)
            spent, seconds = piece(some_calls)
            call = _scaled(spent.plus(minute, -seconds / 60), 1 / calls)
            spent, seconds = piece(away)
            down = _scaled(spent.plus(minute, -seconds / 60), 60 / seconds)
        _rests(db, False)
    whole = _scaled(minute, 1440).plus(call, CALLS_A_DAY).plus(down, OUTAGE_SEC / 60)
    progress(f"a day: {whole.agent_cpu:.1f} s of the agent's CPU, {whole.wal / 1e6:.1f} MB of WAL")
    return Day(minute, call, down, whole)


def _rests(db: Database, rests: bool) -> None:
    with db.admin() as admin:
        for name in ("autovacuum", "wal_init_zero"):
            admin.execute(f"alter system {f'set {name} = off' if rests else f'reset {name}'}")
        admin.execute("select pg_reload_conf()")


def _scaled(spent: Spent, times: float) -> Spent:
    return Spent(**{name: value * times for name, value in vars(spent).items()})


@dataclass
class Poison:
    seconds: float
    requests: int  # for the poisonous ones
    delays: list[float]  # of the calls that ended meanwhile: from COMMIT to their last JSON
    before: list[float]  # the same without poison


def poison(world: World, seconds: float) -> Poison:
    """Forty entries that the frontend answers with 500 stand first; a call each five seconds."""
    bad: set[str] = set()

    def on_entries(request: Request) -> Reply | None:
        hit = any(entry["entityId"] in bad for entry in request.entries)
        return Reply(500, body="no") if hit else None

    with world.database() as db, Frontend(world.directory / "frontend-poison") as frontend:
        backend = Backend(db, world.directory / "backend-poison")
        frontend.on_entries = on_entries
        settings = {"FRONTEND_BASE_URL": frontend.url,
                    "SYNC_RECORDINGS_DIR": backend.recordings_dir,
                    "FRONTEND_SYNC_INTERVAL_SEC": 0}  # fmt: skip
        with world.agent_ready(db, **settings):
            calm = [_delay(backend, frontend) for _ in range(5)]
            with db.connect() as connection, connection.transaction():
                for _ in range(POISON):
                    row = connection.execute(
                        "insert into sync_outbox (entity_type, entity_id, payload)"
                        " values ('call_log', gen_random_uuid(), '{}') returning entity_id::text"
                    ).fetchone()
                    assert row is not None
                    bad.add(row[0])
            began, delays = time.monotonic(), []
            while time.monotonic() - began < seconds:
                delays.append(_delay(backend, frontend))
                time.sleep(5)
            took = time.monotonic() - began
        hits = sum(any(e["entityId"] in bad for e in r.entries) for r in frontend.requests)
    progress(f"poison: {hits} requests in {took:.0f} s, a call waits {max(delays):.2f} s at most")
    return Poison(took, hits, delays, calm)


def _delay(backend: Backend, frontend: Frontend) -> float:
    began = time.monotonic()
    call = backend.end_call(seconds=1, events=2)
    wait_until(lambda: frontend.received(call.call_log_id), 300, "a call's JSON")
    wait_until(lambda: frontend.received(call.recording_id), 300, "a recording's JSON")
    return time.monotonic() - began

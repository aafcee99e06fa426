"""Drain a backlog: serversync, its peers, and the limit."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from backend import INSERT_CALL_LOGS
from pg import Database
from world import NODE_PEERS, PEER_PYTHON, PEERS, Cost, Watched, World, progress

NODE = ("node", "--enable-source-maps=false")
ENTRY = """json_build_object('entityType', entity_type, 'entityId', entity_id, 'payload', payload,
                             'createdAt', created_at, 'seq', id)"""
PENDING = "select count(*) from sync_outbox where processed_at is null"


@dataclass(frozen=True)
class Peer:
    """One way to drain: how its queue is filled, what runs, what is still in its queue."""

    name: str
    command: Sequence[str | Path]
    env: Mapping[str, str]
    fill: Callable[[World, Database], None]
    pending: str
    batch: int = 1
    once: bool = False  # our own


@dataclass
class Drain:
    """What one drain took. Rates are of the entries that went through, from the first request."""

    name: str
    entries: int
    seconds: float
    peak_kib: int
    cpu: float
    cost: Cost
    requests: float = 0.0
    bytes: float = 0.0
    whole: bool = True  # to the end of the backlog
    batch: int = 1

    @property
    def rate(self) -> float:
        return self.entries / self.seconds if self.seconds else 0.0


def enqueue(db: Database, count: int) -> None:
    for at in range(0, count, 100_000):
        some = {"entity_type": "call_log", "count": min(100_000, count - at), "padding": 0}
        db.execute(INSERT_CALL_LOGS, some)


def environment(world: World, db: Database, more: Mapping[str, str]) -> dict[str, str]:
    return {
        "DATABASE_URL": db.socket_url,
        "FRONTEND_BASE_URL": world.receiver.url,
        "BENCH_DATABASE": db.name,
        "BENCH_ROLE": "voicebot",
        "NODE_NO_WARNINGS": "1",
        **more,
    }


def prepare(world: World, db: Database, *command: str | Path) -> str:
    done = subprocess.run(
        [str(word) for word in command],
        env={"PATH": os.environ["PATH"], "LANG": "C.UTF-8", "HOME": "/tmp",
             **environment(world, db, {})},
        capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{command}: {done.stderr[-2000:]}")
    return done.stdout


# --- filling their queues -------------------------------------------------------------------------


def in_place(world: World, db: Database) -> None:
    pass


def into_graphile(world: World, db: Database) -> None:
    prepare(world, db, *NODE, NODE_PEERS / "graphile.mjs", "prepare")
    db.execute(
        f"""
        select graphile_worker.add_jobs(array_agg(spec)) from (
            select ('post', {ENTRY}, null, null, null, null, null, null)
                   ::graphile_worker.job_spec as spec, id / 10000 as chunk
            from sync_outbox) as of_each group by chunk order by chunk
        """
    )
    db.execute("truncate sync_outbox")


def into_outbox(world: World, db: Database) -> None:
    db.execute("set role voicebot")
    db.execute(prepare(world, db, *NODE, NODE_PEERS / "outbox.mjs", "sql"))
    db.execute("create publication outbox_pub for table public.outbox with (publish = 'insert')")
    db.execute(
        f"""
        insert into outbox (id, aggregate_type, aggregate_id, message_type, concurrency, payload)
        select gen_random_uuid(), entity_type, entity_id::text, 'upsert', 'parallel', {ENTRY}
        from sync_outbox order by id
        """
    )
    db.execute("reset role")
    db.execute("truncate sync_outbox")


def into_procrastinate(world: World, db: Database) -> None:
    prepare(world, db, PEER_PYTHON, PEERS / "procrastinate_worker.py", "prepare")
    db.execute(
        f"""
        select procrastinate_defer_jobs_v1(array_agg(job)) from (
            select ('default', 'post', 0, null, null, jsonb_build_object('entry', {ENTRY}), null)
                   ::procrastinate_job_to_defer_v1 as job, id / 10000 as chunk
            from sync_outbox) as of_each group by chunk order by chunk
        """
    )
    db.execute("truncate sync_outbox")


def into_pgqueuer(world: World, db: Database) -> None:
    prepare(world, db, PEER_PYTHON, PEERS / "pgqueuer_worker.py", "prepare")
    db.execute("truncate sync_outbox")


def serversync(batch: int) -> Peer:
    return Peer(f"serversync, batch {batch}", (), {}, in_place, PENDING, batch, True)


CLASSICAL = Peer(
    "classical loop", ("/usr/bin/python3", PEERS / "classical.py"), {}, in_place, PENDING
)
GRAPHILE = Peer(
    "graphile-worker",
    (*NODE, NODE_PEERS / "graphile.mjs"),
    {},
    into_graphile,
    "select count(*) from graphile_worker._private_jobs",
)
OUTBOX_PENDING = "select count(*) from outbox where processed_at is null"
PEERS_ALL = (
    CLASSICAL,
    Peer("pg-transactional-outbox, batch 5",
         (*NODE, NODE_PEERS / "outbox.mjs"), {"BENCH_BATCH": "5"},
         into_outbox, OUTBOX_PENDING),
    Peer("pg-transactional-outbox, batch 100", (*NODE, NODE_PEERS / "outbox.mjs"),
         {"BENCH_BATCH": "100"}, into_outbox, OUTBOX_PENDING),
    # Each by its default, and with more at the same time: the best of all is what counts.
    *(
        Peer(f"procrastinate, concurrency {n}",
             (PEER_PYTHON, PEERS / "procrastinate_worker.py"), {"BENCH_CONCURRENCY": f"{n}"},
             into_procrastinate,
             "select count(*) from procrastinate_jobs where status in ('todo', 'doing')")
        for n in (1, 10)
    ),
    *(
        Peer(f"pgqueuer, {workers} × batch {batch}",
             (PEER_PYTHON, PEERS / "pgqueuer_worker.py"),
             {"BENCH_WORKERS": f"{workers}", "BENCH_BATCH": f"{batch}"}, into_pgqueuer,
             "select count(*) from pgqueuer where status in ('queued', 'picked')")
        for workers, batch in ((5, 10), (1, 100))
    ),
    GRAPHILE,
)  # fmt: skip


# --- measuring ------------------------------------------------------------------------------------


def drain(
    world: World, peer: Peer, count: int, processed: int = 0, seconds: float = 600.0
) -> Drain:
    """Fills, settles, runs until nothing is pending (or the time is over), and counts."""
    with world.database() as db:
        if processed:
            enqueue(db, processed)
            db.execute("update sync_outbox set processed_at = now()")
        enqueue(db, count)
        peer.fill(world, db)
        if peer.once:  # its schema and its index are there after the first start
            with world.agent(db, "prune", "--yes") as first:
                first.wait(60)
            with world.agent(db, "once", FRONTEND_BASE_URL="http://127.0.0.1:9") as first:
                first.wait(600)
        world.settle(db)
        world.receiver.reset()
        before = world.cost(db)
        if peer.once:
            process = world.agent(db, "once", SYNC_BATCH_SIZE=peer.batch)
        else:
            process = Watched(peer.command, environment(world, db, peer.env))
        with process:
            until = time.monotonic() + seconds
            found, pending = _follow(world, db, peer, process, count, until)
            ended = time.time()
        cost = world.cost(db) - before
        if not found["requests"]:
            raise RuntimeError(f"{peer.name} sent nothing: {process.said()[-2000:]}")
    whole = pending == 0
    took = (ended if whole else found["last"]) - found["first"]
    through = count if whole else int(found["entries"])
    result = Drain(peer.name, through, took, process.peak_kib, process.cpu, cost,
                   found["requests"], found["bytes"], whole, peer.batch)  # fmt: skip
    progress(f"{peer.name}: {through:,} entries in {took:.2f} s, {result.rate:,.0f}/s")
    return result


def _follow(
    world: World, db: Database, peer: Peer, process: Watched, count: int, until: float
) -> tuple[dict[str, float], int]:
    """Waits until the backlog is gone; the receiver's figures and what is pending."""
    while True:
        found = world.receiver.stats()
        process.look()
        if found["entries"] >= count or not process.running or time.monotonic() > until:
            pending = int(db.value(peer.pending))
            if not pending or not process.running or time.monotonic() > until:
                return world.receiver.stats(), pending
        time.sleep(0.02)


COPY = "copy (select * from sync_outbox where processed_at is null order by id) to stdout"
MARK = "update sync_outbox set processed_at = now() where processed_at is null"


def limit(world: World, count: int) -> Drain:
    """What nobody can beat: COPY the rows out, one UPDATE marks them, and the bytes are sent."""
    with world.database() as db:
        enqueue(db, count)
        with world.agent(db, "once", FRONTEND_BASE_URL="http://127.0.0.1:9") as first:
            first.wait(600)
        world.settle(db)
        before = world.cost(db)
        with db.connect() as connection, connection.cursor() as cursor:
            started = time.time()
            with cursor.copy(COPY) as rows:
                size = sum(len(piece) for piece in rows)
            cursor.execute(MARK)
            seconds = time.time() - started
        cost = world.cost(db) - before
    result = Drain("limit: COPY and one UPDATE", count, seconds, 0, 0.0, cost, 0.0, float(size))
    progress(f"{result.name}: {count:,} in {seconds:.2f} s, {result.rate:,.0f}/s")
    return result


# --- the receiver's own limit ---------------------------------------------------------------------


def receiver_limit(world: World, body: int, seconds: float) -> float:
    """Requests a second of a trivial client that sends many at a time on one connection."""
    request = (
        b"POST /api/ingest/sync HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n" % body
    ) + b"x" * body
    at_once = max(1, min(64, 2_000_000 // len(request)))
    with socket.create_connection(("127.0.0.1", world.receiver.port)) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.sendall(request)
        answer = len(sock.recv(65536))
        done, started = 0, time.monotonic()
        while time.monotonic() - started < seconds:
            sock.sendall(request * at_once)
            left = answer * at_once
            while left > 0:
                left -= len(sock.recv(65536))
            done += at_once
        return done / (time.monotonic() - started)

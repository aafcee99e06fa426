"""COMMIT to the frontend's receipt, at a steady rate of calls."""

from __future__ import annotations

import json
import statistics
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass

import psycopg

from drains import GRAPHILE, environment, into_graphile
from pg import Database
from world import Watched, World, progress

PAYLOAD = {
    "externalCallId": "x" * 24, "sipCallId": "x" * 24, "callerNumber": "+819012345678",
    "direction": "inbound", "actionCode": "VR", "startedAt": "2025-01-01T00:00:00+00:00",
    "endedAt": "2025-01-01T00:01:00+00:00", "durationSec": 60, "endReason": "normal",
    "status": "ended",
}  # fmt: skip
INSERT = "insert into sync_outbox (entity_type, entity_id, payload) values ('call_log', %s, %s)"
ADD_JOB = "select graphile_worker.add_job('post', %s::json)"


@dataclass
class Latency:
    name: str
    calls: int
    p50: float  # ms
    p99: float
    most: float
    lost: int
    peak_kib: int


def run(
    world: World,
    name: str,
    db: Database,
    process: Watched,
    insert: Callable[[psycopg.Connection[object], str], None],
    rate: float,
    seconds: float,
) -> Latency:
    """Inserts in step with the clock, whatever becomes of them; each COMMIT is timed before it."""
    committed: dict[str, float] = {}
    with db.connect() as connection:
        _first(world, connection, insert)
        world.receiver.reset(log=True)
        begin = time.monotonic()
        for number in range(round(rate * seconds)):
            time.sleep(max(0.0, begin + number / rate - time.monotonic()))
            entity = str(uuid.uuid4())
            committed[entity] = time.time()
            insert(connection, entity)
    deadline = time.monotonic() + 30
    while world.receiver.stats()["entries"] < len(committed) and time.monotonic() < deadline:
        time.sleep(0.1)
    arrived: dict[str, float] = {}
    for at, body in world.receiver.records():
        for entry in json.loads(body)["entries"]:
            arrived.setdefault(entry["entityId"], at)
    took = sorted(1000 * (arrived[each] - at) for each, at in committed.items() if each in arrived)
    if len(took) < 2:
        raise RuntimeError(f"{name}: next to nothing arrived: {process.said()[-1000:]}")
    cuts = statistics.quantiles(took, n=100, method="inclusive")
    process.look()
    result = Latency(name, len(took), statistics.median(took), cuts[98], took[-1],
                     len(committed) - len(took), process.peak_kib)  # fmt: skip
    progress(f"{name}: p50 {result.p50:.1f} ms, p99 {result.p99:.1f} ms, most {result.most:.1f} ms")
    return result


def _first(
    world: World, connection: psycopg.Connection[object],
    insert: Callable[[psycopg.Connection[object], str], None],
) -> None:  # fmt: skip
    """Some that are not counted: connections are made, code is warm."""
    world.receiver.reset()
    deadline = time.monotonic() + 60
    for number in range(1, 21):
        insert(connection, str(uuid.uuid4()))
        while world.receiver.stats()["entries"] < number:
            if time.monotonic() > deadline:
                raise RuntimeError("the first entry does not arrive")
            time.sleep(0.01)


def latencies(world: World, rate: float, seconds: float) -> list[Latency]:
    body = json.dumps(PAYLOAD)

    def insert(connection: psycopg.Connection[object], entity: str) -> None:
        connection.execute(INSERT, (entity, body))

    def add_job(connection: psycopg.Connection[object], entity: str) -> None:
        entry = {"entityType": "call_log", "entityId": entity, "payload": PAYLOAD, "seq": 1}
        connection.execute(ADD_JOB, (json.dumps(entry),))

    with world.database() as db, world.agent_ready(db) as agent:
        ours = run(world, "serversync", db, agent, insert, rate, seconds)
    with world.database() as db:
        into_graphile(world, db)
        with Watched(GRAPHILE.command, environment(world, db, {})) as worker:
            theirs = run(world, GRAPHILE.name, db, worker, add_job, rate, seconds)
    return [ours, theirs]

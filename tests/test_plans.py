"""Plans of the statements that run all the time: what they read does not grow with the backlog.

With many pending entries and more processed ones, after ANALYZE. A plan that reads the whole table,
or all that is pending, or sorts it, shows in the rows that it touched: no time is asserted.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

import serversync
from pg import Cluster, Database
from plans import FILL, OUTBOX, PENDING_INDEX, Plan, explain

PENDING, PROCESSED, WAITING = 20_000, 100_000, 1000

# Some call logs at the far end of the backlog wait after a failure.
FAIL = """
    insert into serversync.failures (outbox_id, entity_type, is_file, lane, tries, attempts,
        successes, next_attempt_at, error_code, error)
    select id, entity_type, entity_type = 'recording_file', serversync.lane(payload, entity_id),
           3, 0, 0, now() + interval '10 minutes', 'FRONTEND_5XX', 'the frontend has trouble'
    from (select * from sync_outbox where processed_at is null and entity_type = 'call_log'
          order by id desc limit %s) o
"""


@dataclass
class Backlog:
    """A database with a backlog, a schema and an index, and where its pending entries are."""

    db: Database
    first: int = 0
    last: int = 0
    middle: int = 0
    some: list[int] = field(default_factory=list)

    def plan(self, statement: str, generic: bool = False, **params: Any) -> Plan:
        with self.db.connect() as connection:
            connection.execute(serversync.SESSION)
            return explain(connection, statement, params, generic)


def fill(db: Database, pending: int, processed: int) -> None:
    for count, done in ((processed, True), (pending, False)):
        db.execute(FILL, {"entity_type": "call_log", "count": count, "processed": done})


@pytest.fixture(scope="module")
def backlog(cluster: Cluster) -> Iterator[Backlog]:
    db = Database(cluster)
    with db.connect() as connection:
        connection.execute(serversync.CREATE_SCHEMA)
        for migration in serversync.MIGRATIONS:
            connection.execute(migration)
    fill(db, PENDING, PROCESSED)
    with db.connect() as connection:
        connection.execute(serversync.CREATE_INDEX)
    db.execute("analyze")
    found = Backlog(db)
    found.some = [row[0] for row in db.rows(
        "select id from sync_outbox where processed_at is null order by id limit 100")]  # fmt: skip
    found.first = found.some[0]
    found.last = db.value("select max(id) from sync_outbox")
    found.middle = (found.first + found.last) // 2
    yield found
    db.drop()


@pytest.fixture(scope="module")
def waiting(backlog: Backlog) -> Backlog:
    """The same, and some entries wait after a failure. Last: it changes the backlog."""
    backlog.db.execute(FAIL, (WAITING,))
    backlog.db.execute("analyze serversync.failures")
    return backlog


def fetch(where: Backlog, generic: bool, **more: Any) -> Plan:
    params = {"after": 0, "until": where.last, "size": 100, "bytes": 512 * 1024, "skip": [],
              "fresh": False, **more}  # fmt: skip
    return where.plan(serversync.FETCH, generic, **params)


kinds = pytest.mark.parametrize("generic", [False, True], ids=["custom", "generic"])


@kinds
def test_batch_is_read_off_the_pending_index_wherever_the_pass_is(
    backlog: Backlog, generic: bool
) -> None:
    for after in (0, backlog.middle, backlog.last - 50):
        plan = fetch(backlog, generic, after=after)
        assert plan.scans() == [f"Index Scan {PENDING_INDEX}"], plan.outline()
        assert plan.touched() <= 100, plan.outline()
        assert plan.sorted() == 0, plan.outline()


@kinds
def test_batch_without_the_lanes_that_are_left_out_reads_little_more(
    backlog: Backlog, generic: bool
) -> None:
    lanes = backlog.db.rows(
        "select serversync.lane(payload, entity_id) from sync_outbox where id = any (%s)",
        (backlog.some[:10],),
    )
    plan = fetch(backlog, generic, skip=[lane for (lane,) in lanes])
    assert plan.scans() == [f"Index Scan {PENDING_INDEX}"], plan.outline()
    assert plan.touched() <= 120 and plan.sorted() == 0, plan.outline()


@kinds
def test_confirming_a_batch_touches_its_own_rows(backlog: Backlog, generic: bool) -> None:
    plan = backlog.plan(
        serversync.CONFIRM, generic, seqs=backlog.some, endpoint="entries", outcome="sent",
        kind="entries", bytes=50_000, key="k", request_sha256="r", answer_sha256="a", status=200,
        seconds=0.1, lane=None, entity_id=None, url=None, directory=None, files=None,
    )  # fmt: skip
    # The primary key or the pending index, as it likes: both find one row an id.
    assert not any(scan.startswith("Seq Scan") for scan in plan.scans()), plan.outline()
    assert plan.touched() <= 2 * len(backlog.some), plan.outline()


@kinds
def test_end_and_beginning_of_what_is_pending_are_read_off_the_index(
    backlog: Backlog, generic: bool
) -> None:
    for statement, params in (
        (serversync.LAST, {}),
        (serversync.NEXT_PENDING, {"after": backlog.middle}),
        (serversync.UNFINISHED, {}),
    ):
        plan = backlog.plan(statement, generic, **params)
        assert plan.touched() <= 1, plan.outline()
        assert not any(PENDING_INDEX not in scan for scan in plan.scans()), plan.outline()


def test_head_of_a_cycle_never_reads_what_is_processed(backlog: Backlog) -> None:
    plan = backlog.plan(serversync.LOOK)
    assert not any(scan == "Seq Scan" for scan in plan.scans()), plan.outline()
    # Whether there is a recording among them, it has to look; not more than once.
    assert plan.touched() <= PENDING + 2, plan.outline()
    assert plan.sorted() == 0, plan.outline()


@kinds
def test_what_is_known_of_entries_is_found_by_their_ids(backlog: Backlog, generic: bool) -> None:
    for statement, params in (
        (serversync.PAST, {"seq": backlog.middle, "endpoint": "entries"}),
        (serversync.LANES, {"seqs": backlog.some}),
        (serversync.STILL_PENDING, {"seqs": backlog.some}),
    ):
        plan = backlog.plan(statement, generic, **params)
        assert plan.scans() and plan.touched() <= len(backlog.some), plan.outline()


def test_pruning_reads_nothing_where_nothing_is_old(backlog: Backlog) -> None:
    plan = backlog.plan(serversync.PRUNE, days=30)
    assert plan.touched() == 0, plan.outline()


def test_recordings_are_found_without_what_is_processed(backlog: Backlog) -> None:
    plan = backlog.plan(serversync.FETCH_FILES, after=0, skip=[], fresh=False, limit=20)
    assert not any(scan == "Seq Scan" for scan in plan.scans()), plan.outline()
    assert plan.touched() <= 2 * PENDING, plan.outline()


@kinds
def test_batch_beside_entries_that_wait_reads_little_more(waiting: Backlog, generic: bool) -> None:
    plan = fetch(waiting, generic)
    assert f"Index Scan {PENDING_INDEX}" in plan.scans(), plan.outline()
    assert not any(scan.startswith("Seq Scan") for scan in plan.scans()), plan.outline()
    assert plan.touched() <= 400, plan.outline()
    assert plan.touched("failures") <= WAITING, plan.outline()


@kinds
def test_next_due_time_costs_nothing_and_stale_failures_at_most_what_is_pending(
    waiting: Backlog, generic: bool
) -> None:
    due = waiting.plan(serversync.NEXT_DUE, generic, since="now")
    assert due.touched() <= 10, due.outline()
    stale = waiting.plan(serversync.DROP_STALE, generic)
    assert not any(scan == "Seq Scan" for scan in stale.scans()), stale.outline()
    assert stale.touched() <= 2 * PENDING, stale.outline()


def test_plan_that_reads_the_whole_table_is_noticed(backlog: Backlog) -> None:
    with backlog.db.connect() as connection, connection.transaction(force_rollback=True):
        connection.execute(f"drop index {PENDING_INDEX}")
        connection.execute("drop index idx_sync_outbox_pending")
        params = {"after": 0, "until": backlog.last, "size": 100, "bytes": 1 << 19, "skip": [],
                  "fresh": False}  # fmt: skip
        connection.execute(serversync.SESSION)
        plan = explain(connection, serversync.FETCH, params)
    assert plan.scans(OUTBOX) != [f"Index Scan {PENDING_INDEX}"]
    assert plan.touched() > 1000

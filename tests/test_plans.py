"""Plans of the statements that run all the time: what they read does not grow with the backlog.

With many pending entries and more processed ones, whatever the statistics say, and with entries
that wait. A plan that reads the whole table, or all that is pending, or sorts it, shows in the rows
that it touched: no time is asserted.
"""

from collections.abc import Iterator
from typing import Any

import pytest

import serversync
from pg import Cluster, Database
from plans import FILL, Plan, explain

PROCESSED, WAITING, BEHIND, PENDING, BATCH = 100_000, 1000, 200, 20_000, 100

# The backlog begins with entries that fail, and what belongs to their calls stands behind them.
DEPEND = """
    insert into sync_outbox (entity_type, entity_id, payload)
    select 'ivr_session_event', gen_random_uuid(), jsonb_build_object('callLogId', entity_id)
    from (select entity_id from sync_outbox where processed_at is null order by id limit %s) o
"""
RECORDINGS = """
    insert into sync_outbox (entity_type, entity_id, payload)
    select 'recording_file', gen_random_uuid(), jsonb_build_object('callLogId', gen_random_uuid())
    from generate_series(1, 20)
"""
FAIL = """
    insert into serversync.waiting (outbox_id, entity_id, entity_type, is_file, code, reason, tries,
        next_attempt_at)
    select id, entity_id, entity_type, false, 'FRONTEND_5XX', 'the frontend has trouble', 3,
           now() + id * interval '1 millisecond'
    from (select * from sync_outbox where processed_at is null order by id limit %s) o
"""
# Before anything is pending: as on an idle box, the planner expects to find nothing.
STATISTICS = ("at the end", "never", "before anything was pending", "while one type was drained")
DRAIN = "update sync_outbox set processed_at = now() where processed_at is null and id <= %s"


class Backlog:
    """A database with a backlog, and where its pending entries are."""

    def __init__(self, cluster: Cluster, analyzed: str, failing: int) -> None:
        self.db, self.failing = Database(cluster), failing
        with self.db.connect() as connection:
            for statement in ("create schema serversync", serversync.MIGRATIONS[0],
                              serversync.CREATE_INDEX.replace("%1$I.", "")):  # fmt: skip
                connection.execute(statement)
        for table in ("sync_outbox", "serversync.waiting"):  # nobody else analyzes in between
            self.db.execute(f"alter table {table} set (autovacuum_enabled = off)")
        self._fill(PROCESSED, True)
        if analyzed == "before anything was pending":
            self.db.execute("analyze")
        if analyzed == "while one type was drained":
            self._fill(PROCESSED, False)
            for until in (1.5 * PROCESSED, 2 * PROCESSED):
                self.db.execute(DRAIN, (until,))
                if until < 2 * PROCESSED:
                    self.db.execute("analyze")
        self._fill(WAITING, False)
        self.db.execute(DEPEND, (BEHIND,))
        self._fill(PENDING - WAITING - BEHIND - 20, False)
        self.db.execute(RECORDINGS)
        self.db.execute(FAIL, (failing,))
        if analyzed == "at the end":
            self.db.execute("analyze")
        self.pending = self.db.pending()
        # Where a batch ends: behind those that fail, and what depends on them.
        self.reached = self.pending[(failing + BEHIND if failing else 0) + BATCH - 1]

    def _fill(self, count: int, done: bool) -> None:
        self.db.execute(FILL, {"entity_type": "call_log", "count": count, "processed": done})

    def plan(self, statement: str, generic: bool, **params: Any) -> Plan:
        nothing: dict[str, Any] = {"skip": [], "travels": [], "apart": APART, "open": [], "way": ""}
        with self.db.connect() as connection:
            connection.execute(serversync.SESSION)
            return explain(connection, statement, nothing | params, generic)


APART = ["recording_file", "order"]
BESIDE = {"travels": ["7b5eb4f8-0000-4000-8000-000000000001"], "open": ["3", "4"]}  # other work


def limits(where: Backlog) -> Iterator[tuple[str, dict[str, Any], int, int]]:
    """Statement, parameters, and how many rows of the outbox and of `waiting` it may touch."""
    ids, head = where.pending, where.failing + (BEHIND if where.failing else 0)
    most = {"size": BATCH, "bytes": 512 * 1024, "most": 8 << 20}
    everything = {"after": 0, "until": ids[-1]}
    batch = ids[head : head + BATCH]
    yield "FETCH", everything | most, head + BATCH, 3 * (head + BATCH)
    for after in (ids[PENDING // 2], ids[-50]):
        yield "FETCH", {**everything, "after": after, **most}, BATCH, 3 * BATCH
    yield "FETCH", {**everything, **most, **BESIDE}, head + BATCH, 3 * (head + BATCH)
    yield (
        "HOLD_BACK",
        BESIDE | {"after": ids[-101], "until": ids[-1]},
        BATCH,
        4 * BATCH + where.failing,
    )
    yield "FETCH_ALONE", most | {"seq": ids[5], "size": 1}, 1, 0
    yield "HOLD_BACK", {"after": 0, "until": where.reached}, head + BATCH, 4 * (head + BATCH)
    yield "HOLD_BACK", {"after": ids[-101], "until": ids[-1]}, BATCH, 4 * BATCH + where.failing
    yield "NEXT_RETRY", {"before": None}, 0, 10
    yield "NEXT_RETRY", {"way": "recording_file", "before": None}, 0, 2 * where.failing
    # One pass over what is pending, and the newest hundred of it.
    yield "NEWEST_FREE", {}, PENDING + 2 * BATCH, 2 * (where.failing + 2 * BATCH)
    yield "NEXT_ID", everything, head + 1, head + 1
    yield "NEXT_ID", everything | {"way": "recording_file"}, PENDING, where.failing + 1
    # Whether an earlier entry of its call became visible late: all that is pending before it.
    yield "READ_FILE", {"seq": ids[-1]}, PENDING, 10
    yield "PAST", {"seq": ids[3], "readable": True}, 1, 1
    yield "CONFIRM", CONFIRMED | {"seqs": batch}, 2 * BATCH, 2 * where.failing
    yield "LAST", {}, 1, 0
    # Whether there is a recording among them, it has to look.
    yield "LOOK", {}, PENDING + 2, 2
    yield "SWEEP", {}, PENDING if where.failing else 0, 6 * where.failing
    yield "PRUNE", {"days": 30, "keep": []}, 0, 0


CONFIRMED = {
    "kind": "entries", "bytes": 50_000, "key": "k", "request_sha256": "r", "answer_sha256": "a",
    "status": 200, "outcome": "sent", "seconds": 0.1, "call_log_id": None, "entity_id": None,
    "url": None,
}  # fmt: skip


@pytest.mark.parametrize("analyzed", STATISTICS)
@pytest.mark.parametrize("failing", [0, WAITING], ids=["none waits", "a thousand wait"])
def test_hot_statements_touch_what_they_need_whatever_the_statistics_say(
    cluster: Cluster, analyzed: str, failing: int
) -> None:
    wrong = []
    backlog = Backlog(cluster, analyzed, failing)
    tried = [(*each, generic) for each in limits(backlog) for generic in (False, True)]
    for name, params, of_outbox, of_waiting, generic in tried:
        if (name, generic, analyzed) == ("HOLD_BACK", False, STATISTICS[-1]):
            continue  # it only runs in a pass, whose plans are generic: see NEW_PLANS
        for statement in getattr(serversync, name).split(";"):
            plan = backlog.plan(statement, generic, **params)
            touched = plan.touched(), plan.touched("waiting")
            whole = any(scan == "Seq Scan" for scan in plan.scans())
            much = touched[0] > of_outbox or touched[1] > of_waiting
            if much or whole or plan.sorted() > 2 * BATCH:
                bounds = f"{touched} of {of_outbox, of_waiting}, sorted {plan.sorted()}"
                wrong.append(f"{name} {generic} {str(params)[:200]}: {bounds}\n{plan.outline()}")
    backlog.db.drop()
    assert not wrong, "\n\n".join(wrong)

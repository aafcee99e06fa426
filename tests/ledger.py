"""What the agent wrote down of the entries, whole rows of its tables; and hours that pass."""

from typing import Any

import psycopg

from pg import Database

PASS = """
    UPDATE serversync.waiting
    SET next_attempt_at = now() - interval '1 second', waited = waited + %(hours)s * 3600
    WHERE next_attempt_at < 'infinity'
"""
HOLD = """
    UPDATE serversync.waiting SET next_attempt_at = now() + interval '100 seconds'
    WHERE next_attempt_at < 'infinity'
"""


# psycopg has no date for 'infinity', the time of what waits for another entry: None.
WAITING = """
    (SELECT (jsonb_populate_record(w, CASE WHEN next_attempt_at = 'infinity'
             THEN '{"next_attempt_at": null}'::jsonb ELSE '{}' END)).*
     FROM serversync.waiting w) w
"""

LOCKED = """
    SELECT EXISTS (SELECT FROM pg_locks JOIN pg_database d ON d.oid = database
                   WHERE locktype = 'advisory' AND granted AND datname = current_database())
"""


def locked(db: Database) -> bool:
    """Whether somebody has the senders' lock; one that was killed, until its statement ends."""
    return bool(db.value(LOCKED))


def entity_of(db: Database, seq: int) -> str:
    """The entity's id, by which the frontend of the tests knows what is poison."""
    return str(db.value("SELECT entity_id::text FROM sync_outbox WHERE id = %s", (seq,)))


def let_hours_pass(db: Database, hours: float = 0) -> None:
    """Everything that waits is due, and so many hours older; a running agent is woken."""
    db.execute(PASS, {"hours": hours})
    db.execute("NOTIFY serversync")


def let_days_pass(db: Database, days: float, last_seq: int) -> None:
    """All up to a seq was enqueued and sent so many days earlier."""
    params = {"days": days, "last": last_seq}
    db.execute(
        "UPDATE sync_outbox SET created_at = created_at - %(days)s * interval '1 day',"
        " processed_at = processed_at - %(days)s * interval '1 day' WHERE id <= %(last)s",
        params,
    )
    db.execute(
        "UPDATE serversync.deliveries SET started_at = started_at - %(days)s * interval '1 day'"
        " WHERE last_seq <= %(last)s",
        params,
    )


def hold(db: Database) -> None:
    """What waits is not due for the rest of the test (the first backoff may be next to nothing)."""
    db.execute(HOLD)


def _by_seq(db: Database, table: str) -> dict[int, dict[str, Any]]:
    try:
        rows = db.dicts(f"SELECT * FROM {table} ORDER BY outbox_id")
    except psycopg.errors.UndefinedTable:  # no agent has made its schema yet
        return {}
    return {row["outbox_id"]: row for row in rows}


def waiting(db: Database) -> dict[int, dict[str, Any]]:
    """The entries that wait after a failure, or for another one, by their seq."""
    return _by_seq(db, WAITING)


def dead_letters(db: Database) -> dict[int, dict[str, Any]]:
    """The entries that were given up, by their seq."""
    return _by_seq(db, "serversync.dead_letters")


def failures(db: Database) -> dict[int, tuple[str, int, int]]:
    """Error code, tries and charged attempts of each entry that waits, by its seq."""
    return {seq: (row["code"], row["tries"], row["attempts"]) for seq, row in waiting(db).items()}


def dead(db: Database) -> dict[int, str]:
    """The error code of each entry that was given up, by its seq."""
    return {seq: row["error_code"] for seq, row in dead_letters(db).items()}


def uploads(db: Database) -> list[int]:
    """Confirmed uploads whose local files have not been deleted yet."""
    return list(_by_seq(db, "serversync.uploads"))


def receipts(db: Database) -> list[dict[str, Any]]:
    """The receipts of confirmed requests, in order."""
    return db.dicts("SELECT * FROM serversync.deliveries ORDER BY id")


def counter(db: Database, name: str, label: str = "") -> float:
    query = "SELECT value FROM serversync.counters WHERE name = %s AND label = %s"
    return float(db.value(query, (name, label)) or 0)

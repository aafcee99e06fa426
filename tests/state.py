"""What the agent wrote down in its schema, and how tests let time pass for what waits there."""

from typing import Any

from pg import Database

# Moves all that waits into the past; the agent sees the difference to the database's now().
LET_PASS = """
    UPDATE serversync.failures
    SET next_attempt_at = now() - interval '1 second',
        first_failed_at = first_failed_at - %(hours)s * interval '1 hour'
    WHERE entity_type LIKE %(entity_type)s
"""


def let_pass(db: Database, hours: float = 0, entity_type: str = "%") -> int:
    """Everything that waits is due, and so many hours older; a running agent is woken."""
    moved = db.execute(LET_PASS, {"hours": hours, "entity_type": entity_type})
    db.execute("NOTIFY serversync")
    return moved


def _by_seq(db: Database, table: str) -> dict[int, dict[str, Any]]:
    rows = db.dicts(f"SELECT * FROM serversync.{table} ORDER BY outbox_id")
    return {row["outbox_id"]: row for row in rows}


def failures(db: Database) -> dict[int, dict[str, Any]]:
    """The entries that wait after a failure, by their outbox id."""
    return _by_seq(db, "failures")


def dead_letters(db: Database) -> dict[int, dict[str, Any]]:
    """The entries that were given up, by their outbox id."""
    return _by_seq(db, "dead_letters")


def receipts(db: Database) -> list[dict[str, Any]]:
    """The receipts of confirmed requests, in order."""
    return db.dicts("SELECT * FROM serversync.deliveries ORDER BY id")


def counter(db: Database, name: str, label: str = "") -> float:
    query = "SELECT value FROM serversync.counters WHERE name = %s AND label = %s"
    return float(db.value(query, (name, label)) or 0)

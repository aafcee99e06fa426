"""How PostgreSQL runs a statement: its plan, and how many rows of a table it touched."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql

OUTBOX = "sync_outbox"
PENDING_INDEX = "sync_outbox_serversync_pending"

FILL = """
    insert into sync_outbox (entity_type, entity_id, payload, created_at, processed_at)
    select %(entity_type)s, gen_random_uuid(),
           jsonb_build_object('callLogId', gen_random_uuid(), 'callerNumber', '+81901234567',
                              'status', 'ended', 'note', repeat('x', 150)),
           now() - interval '1 day' + n * interval '1 millisecond',
           case when %(processed)s then now() end
    from generate_series(1, %(count)s::int) n
"""


@dataclass(frozen=True)
class Plan:
    """A plan as it was run (EXPLAIN ANALYZE)."""

    root: Mapping[str, Any]
    milliseconds: float

    def nodes(self) -> Iterator[Mapping[str, Any]]:
        return _walk(self.root)

    def scans(self, table: str = OUTBOX) -> list[str]:
        """What reads the table: `Index Scan sync_outbox_serversync_pending`, `Seq Scan`."""
        return [
            f"{node['Node Type']} {node.get('Index Name', '')}".strip()
            for node in self.nodes()
            if node.get("Relation Name") == table and "Scan" in node["Node Type"]
            if node["Actual Loops"]
        ]

    def touched(self, table: str = OUTBOX) -> int:
        """Rows of the table that were looked at, those that a filter dropped among them."""
        return sum(
            _rows(node)
            for node in self.nodes()
            if node.get("Relation Name") == table and "Scan" in node["Node Type"]
        )

    def sorted(self) -> int:
        """The most rows that went through one Sort."""
        return max((_rows(node) for node in self.nodes() if node["Node Type"] == "Sort"), default=0)

    def outline(self) -> str:
        """For a test that fails."""
        lines = [
            f"{node['Node Type']} {node.get('Relation Name', '')} {node.get('Index Name', '')}"
            f" rows {node['Actual Rows']} removed {node.get('Rows Removed by Filter', 0)}"
            f" loops {node['Actual Loops']}"
            for node in self.nodes()
        ]
        return "\n".join(lines)


def _walk(node: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield node
    for inner in node.get("Plans", ()):
        yield from _walk(inner)


def _rows(node: Mapping[str, Any]) -> int:
    removed = node.get("Rows Removed by Filter", 0) + node.get("Rows Removed by Index Recheck", 0)
    rows: float = (node["Actual Rows"] + removed) * node["Actual Loops"]
    return round(rows)


def explain(
    connection: psycopg.Connection[Any],
    statement: str,
    params: Mapping[str, Any],
    generic: bool = False,
) -> Plan:
    """Runs a statement of the agent's and takes it back.

    `generic`: with the plan that PostgreSQL keeps for a statement it has prepared for any
    parameters, which is what it may turn to after the tenth time.
    """
    names: list[str] = []

    def place(found: re.Match[str]) -> str:
        if found[1] not in names:
            names.append(found[1])
        return f"${names.index(found[1]) + 1}"

    text = re.sub(r"%\((\w+)\)s", place, statement).replace("%%", "%")
    mode = "force_generic_plan" if generic else "force_custom_plan"
    values = sql.SQL(", ").join(sql.Literal(params[name]) for name in names)
    execute = sql.SQL("execute plan_test({})").format(values) if names else "execute plan_test"
    with connection.transaction(force_rollback=True):
        connection.execute(sql.SQL("set local plan_cache_mode = {}").format(mode))
        connection.execute("prepare plan_test as " + text)
        try:
            shown = connection.execute(
                sql.SQL("explain (analyze, timing off, format json) {}").format(
                    execute if isinstance(execute, sql.Composed) else sql.SQL(execute)
                )
            ).fetchall()[0][0][0]
        finally:
            if connection.info.transaction_status != psycopg.pq.TransactionStatus.INERROR:
                connection.execute("deallocate plan_test")
    return Plan(shown["Plan"], shown["Execution Time"])

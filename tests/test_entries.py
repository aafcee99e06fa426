"""JSON entries: the wire byte for byte, batches, dead letters, receipts, enqueue()."""

import hashlib
import json
import re
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

from agent import AgentFactory
from frontend import ENTRIES_PATH, FILE_PATH, Frontend, Reply, Request, script
from ledger import (
    counter,
    dead_letters,
    let_hours_pass,
    receipts,
    waiting,
)
from pg import Database
from pi import Pi

BOOM = Reply(500, {}, {"error": "boom"})

# --- the wire ---------------------------------------------------------------------------------


def nested(depth: int) -> object:
    value: object = "core"
    for level in range(depth):
        value = [value] if level % 2 else {"inner": value}
    return value


SPECIAL: list[object] = [
    "",
    "x" * 65536,
    "\u30c6\u30b9\u30c8\U0001f4de" * 5000,
    {"text": '"quoted" \\ back\\\\slash \u2028 </script> \x7f \b\f\n\r\t \x01'},
    {"": {"": [None, [], {}]}, "null": None},
    nested(200),
    {"callLogId": None, "call_log_id": {"not": "text"}},
    {"callLogId": "not a uuid", "uploadStatus": "local_only"},
    [Decimal("0.1"), 0, -1, 2**53 + 1, 2**63, 5e-324, 1.7976931348623157e308],
    {"big": 10**400, "small": 1e-300, "exact": 12345678901234567890.123},
    None,
    False,
    {"emoji \U0001f600": "\ufffd\uffff\u200b\ufeff"},
    {"key": ["x" * 1000] * 50},
]


def exact(text: str | bytes) -> Any:
    """Parsed without any loss: numbers as decimals, and every key of an object, also repeated."""
    return json.loads(text, parse_float=Decimal, parse_int=Decimal, object_pairs_hook=list)


def plain(value: object) -> str:
    return json.dumps(value, default=float)


def insert(db: Database, entries: list[tuple[str, object]]) -> list[int]:
    """All in one transaction, so that they become visible at once."""
    seqs = []
    with db.connect(autocommit=False) as connection:
        for entity_type, payload in entries:
            row = connection.execute(
                "INSERT INTO sync_outbox (entity_type, entity_id, payload)"
                " VALUES (%s, gen_random_uuid(), %s) RETURNING id",
                (entity_type, Jsonb(payload, dumps=plain)),
            ).fetchone()
            assert row is not None
            seqs.append(row[0])
    return seqs


def check_wire(db: Database, request: Request) -> list[int]:
    """The request holds, to the last digit, what PostgreSQL holds; its seqs."""
    assert request.body is not None
    assert request.headers["Content-Length"] == str(len(request.body))
    ((name, entries),) = exact(request.body)
    assert name == "entries"
    query = """
        SELECT entity_type, entity_id::text, payload::text, created_at, id
        FROM sync_outbox WHERE id = %s
    """
    seqs = []
    for entry in entries:
        keys = [key for key, _ in entry]
        assert keys == ["entityType", "entityId", "payload", "createdAt", "seq"]
        entity_type, entity_id, payload, created_at, seq = (value for _, value in entry)
        row = db.rows(query, (int(seq),))[0]
        assert (entity_type, entity_id, seq) == (row[0], row[1], row[4])
        assert payload == exact(row[2])
        assert "T" in created_at
        assert datetime.fromisoformat(created_at) == row[3]
        seqs.append(int(seq))
    return seqs


def test_strange_and_large_payloads_arrive_as_postgresql_holds_them(pi: Pi) -> None:
    seqs = insert(pi.db, [("call_log", payload) for payload in SPECIAL])
    pi.once()
    (request,) = pi.frontend.requests
    assert check_wire(pi.db, request) == seqs


def test_created_at_is_iso_8601_whatever_the_sessions_settings_are(pi: Pi) -> None:
    with pi.db.admin() as admin:
        admin.execute("ALTER ROLE voicebot SET datestyle = 'German'")
        admin.execute("ALTER ROLE voicebot SET timezone = 'Asia/Tokyo'")
    try:
        seq = pi.backend.enqueue()
        moment = datetime.fromisoformat("2024-02-29T23:59:59.000001+00:00")
        pi.db.execute("UPDATE sync_outbox SET created_at = %s", (moment,))
        done = pi.agent.once()
    finally:
        with pi.db.admin() as admin:
            admin.execute("ALTER ROLE voicebot RESET ALL")
    assert done.returncode == 0, done.stderr
    created_at = pi.frontend.entries[0]["createdAt"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)", created_at), (
        created_at
    )
    assert datetime.fromisoformat(created_at) == moment
    assert pi.frontend.seqs() == [seq]


def test_op_is_sent_where_the_outbox_has_such_a_column(pi: Pi) -> None:
    pi.db.execute("ALTER TABLE sync_outbox ADD COLUMN op varchar(10) NOT NULL DEFAULT 'upsert'")
    pi.backend.enqueue()
    pi.backend.enqueue()
    pi.backend.enqueue(payload={"text": "x" * 1_000_000})
    pi.db.execute("UPDATE sync_outbox SET op = 'delete' WHERE id > 1")
    pi.once()
    assert [entry["op"] for entry in pi.frontend.entries] == ["upsert", "delete", "delete"]
    assert list(pi.frontend.entries[0]) == [
        "entityType",
        "entityId",
        "payload",
        "createdAt",
        "seq",
        "op",
    ]


@pytest.mark.parametrize(("base_path", "slashes"), [("", ""), ("/a/b.c", "//")])
def test_the_request_has_one_plain_head_and_no_double_slash(
    pi: Pi, base_path: str, slashes: str, tmp_path: Path
) -> None:
    call = pi.backend.end_call()
    with Frontend(tmp_path / "other", base_path=base_path) as frontend:
        pi.once(
            FRONTEND_BASE_URL=frontend.url + slashes,
            SYNC_TOKEN="visible-token",
            SYNC_DEVICE_ID="raspi:1",
        )
        request, *others = frontend.requests
    assert request.path == base_path + ENTRIES_PATH
    assert request.raw_head.startswith(f"POST {request.path} HTTP/1.1\r\n".encode())
    head = {name.lower(): value for name, value in request.headers.items()}
    assert len(head) == len(request.headers.items())
    assert head["host"] == f"127.0.0.1:{frontend.port}"
    assert head["content-type"] == "application/json"
    assert head["content-length"] == str(len(request.body or b""))
    assert head["authorization"] == "Bearer visible-token"
    assert head["x-serversync-device"] == "raspi:1"
    assert len(head["idempotency-key"]) >= 32
    assert head.get("accept-encoding", "identity") == "identity"
    assert not {"transfer-encoding", "content-encoding", "expect", "cookie"} & set(head)
    # The recording, whether it is stored, and whether that question is worth anything.
    paths = [(request.method, request.path) for request in others]
    stored = f"{base_path}/api/recordings/"
    assert paths[:2] == [("POST", base_path + FILE_PATH), ("HEAD", stored + call.call_log_id)]
    assert re.fullmatch(f"HEAD {stored}[0-9a-f-]{{36}}", " ".join(paths[2])) and not paths[3:]


# --- Idempotency-Key --------------------------------------------------------------------------


def key(request: Request) -> str:
    value = request.headers["Idempotency-Key"]
    assert value is not None
    return value


def test_an_entry_that_is_sent_again_has_the_same_key_and_bytes_until_it_changes(pi: Pi) -> None:
    pi.backend.enqueue(payload={"text": "x" * 1_000_000})
    answers = script(BOOM, Reply(reset=True, store=True), BOOM)
    pi.frontend.on_entries = lambda request: answers(request) if request.entries else None
    for change in (False, False, True, False):
        if change:
            pi.db.execute("""UPDATE sync_outbox SET payload = payload || '{"more": 1}'""")
        pi.agent.once()
        let_hours_pass(pi.db)
    requests = pi.frontend.of_kind("entries")
    first, second, changed, last = ((key(request), request.body) for request in requests)
    assert first == second and changed == last
    assert first[0] != changed[0] and first[1] != changed[1]
    assert not pi.db.pending()
    # No empty request is told that it was answered before.
    empty = [key(request) for request in pi.frontend.of_kind("empty")]
    assert len({*empty, first[0], changed[0]}) == len(empty) + 2 > 3


def test_a_batch_that_is_cut_again_has_other_keys(pi: Pi) -> None:
    pi.backend.enqueue_many(4)
    pi.frontend.on_entries = lambda request: BOOM if len(request.entries) > 1 else None
    pi.agent.once()
    # The frontend is asked once whether it lives; a success doubles the next batch.
    sizes = [len(request.entries) for request in pi.frontend.requests]
    assert sizes == [4, 0, 2, 1, 2, 1, 2, 1, 1]
    assert len({key(request) for request in pi.frontend.requests}) == len(sizes)


# --- batches ----------------------------------------------------------------------------------


def test_batches_are_cut_by_count_and_by_bytes(pi: Pi) -> None:
    pi.backend.enqueue_many(20)
    pi.once(SYNC_BATCH_SIZE=7)
    assert [len(request.entries) for request in pi.frontend.requests] == [7, 7, 6]
    pi.backend.enqueue_many(100, padding=3000)
    pi.once(SYNC_BATCH_BYTES="16 KiB")
    assert pi.frontend.seqs() == list(range(1, 121))
    sizes = [request.length for request in pi.frontend.requests[3:]]
    assert max(sizes) <= 16 * 1024
    assert len(sizes) <= 26  # four or five entries a request, not one


@pytest.mark.parametrize("excess", [0, 1])
def test_no_request_is_larger_than_the_limit_envelope_included(pi: Pi, excess: int) -> None:
    """Two entries that together just fit, and two that do not, by a byte."""

    def enqueue(letters: int) -> None:
        pi.backend.enqueue(payload="x" * letters)
        # Fractions of a second are written without zeros at their end: not all of one length.
        pi.db.execute("UPDATE sync_outbox SET created_at = '2026-01-01T00:00:00Z'")

    enqueue(0)
    pi.agent.once()
    empty = pi.frontend.requests[0].length
    envelope = len('{"entries":[]}')
    enqueue(1000)
    enqueue(4096 + excess - 1000 - 2 * empty + envelope - 1)
    pi.once(SYNC_BATCH_BYTES=4096)
    sizes = [request.length for request in pi.frontend.requests[1:]]
    assert max(sizes) <= 4096
    assert sizes == [4096] if excess == 0 else len(sizes) == 2


@pytest.mark.usefixtures("schema")  # a start that had to compile the program has a higher peak
def test_a_large_entry_goes_alone_and_whole_and_its_memory_is_bounded(pi: Pi) -> None:
    """Seven mebibytes, of characters that a cut between bytes would break. It is three times in our
    memory (libpq's buffer, its result, the body), on top of the floor: what full batches take."""
    running = pi.agent()
    pi.backend.enqueue_many(1000, padding=5200)
    pi.wait_delivered()
    batches, floor = len(pi.frontend.requests), running.rss_peak_kib()
    assert max(request.length for request in pi.frontend.requests) > 500_000
    text = '\u30c6\u30b9\u30c8 "\U0001f4de" ' * (7 * 1024 * 1024 // 17)
    seqs = insert(pi.db, [("a", 1), ("b", {"text": text}), ("c", {"text": text[:50]})])
    pi.frontend.wait(lambda: len(pi.frontend.entries) == 1003, timeout=60)
    requests = pi.frontend.requests[batches:]
    assert [len(request.entries) for request in requests] == [1, 1, 1]
    assert requests[1].length > 7_000_000
    assert [seq for request in requests for seq in check_wire(pi.db, request)] == seqs
    pi.wait_delivered()
    assert running.rss_peak_kib() - floor < 3 * requests[1].length / 1024


def test_an_entry_above_the_limit_is_dead_without_being_sent(pi: Pi) -> None:
    call = {"callLogId": str(uuid.uuid4())}
    pi.backend.enqueue(payload=call)
    large = pi.backend.enqueue("schedule", {**call, "text": "\u3042" * 200_000})
    pi.backend.enqueue(payload=call)
    pi.once(code=1, SYNC_BATCH_BYTES="64 KiB", SYNC_ENTRY_MAX_BYTES="512 KiB")
    assert pi.frontend.seqs() == [1, 3]
    assert max(request.length for request in pi.frontend.requests) < 65536
    letter = dead_letters(pi.db)[large]
    assert letter["error_code"] == "TOO_LARGE"
    assert "SYNC_ENTRY_MAX_BYTES" in letter["error_message"]
    assert letter["http_status"] is None
    assert len(letter["payload"]["text"]) == 200_000
    assert not pi.db.pending()


def test_the_limit_of_an_entry_is_that_of_a_batch_too_where_it_is_the_smaller_one(pi: Pi) -> None:
    pi.backend.enqueue_many(20, padding=200)
    large = pi.backend.enqueue("schedule", {"text": "x" * 2000})
    pi.once(code=1, SYNC_ENTRY_MAX_BYTES="1 KiB")
    assert pi.frontend.seqs() == list(range(1, 21))
    assert max(request.length for request in pi.frontend.requests) <= 1024
    assert dead_letters(pi.db)[large]["error_code"] == "TOO_LARGE"


# --- what is written down ---------------------------------------------------------------------


def test_a_confirmed_request_leaves_a_receipt_and_counts(pi: Pi) -> None:
    pi.backend.enqueue_many(3, "call_log")
    pi.backend.enqueue("schedule")
    pi.backend.enqueue("schedule")
    pi.frontend.on_entries = lambda _: Reply(200, {}, b'{"ok": true}', store=True)
    pi.once(SYNC_BATCH_SIZE=4)
    written = receipts(pi.db)
    assert [(r["first_seq"], r["last_seq"], r["entries"]) for r in written] == [
        (1, 4, 4),
        (5, 5, 1),
    ]
    for receipt, request in zip(written, pi.frontend.requests, strict=True):
        assert request.body is not None
        assert receipt["kind"] == "entries"
        assert receipt["bytes"] == len(request.body)
        assert receipt["idempotency_key"] == key(request)
        assert receipt["request_sha256"] == hashlib.sha256(request.body).hexdigest()
        assert receipt["answer_sha256"] == hashlib.sha256(b'{"ok": true}').hexdigest()
        assert receipt["http_status"] == 200
        assert receipt["outcome"] == "sent"
        assert receipt["duration_ms"] >= 0
    marked = pi.db.rows("SELECT processed_at, created_at FROM sync_outbox")
    assert all(processed >= created for processed, created in marked)
    assert counter(pi.db, "sent_as", "sent") == 5
    assert counter(pi.db, "sent", "call_log") == 3
    assert counter(pi.db, "sent", "schedule") == 2
    assert (
        sum(v for (v,) in pi.db.rows("SELECT value FROM serversync.counters WHERE name = 'lag'"))
        == 5
    )


def test_a_dead_letter_holds_the_entry_and_leaves_the_outbox_in_one_transaction(pi: Pi) -> None:
    payload = {"callLogId": str(uuid.uuid4()), "name": "\u6771\u4eac"}
    entity = str(uuid.uuid4())
    seq = pi.backend.enqueue("routing_rule", payload, entity)
    after = pi.backend.enqueue("routing_rule", payload)
    pi.frontend.poison[entity] = BOOM
    pi.agent.once()
    assert list(waiting(pi.db)) == pi.db.pending() == [seq]
    assert "boom" in waiting(pi.db)[seq]["reason"]
    assert counter(pi.db, "retries", "FRONTEND_5XX") == waiting(pi.db)[seq]["tries"]
    assert pi.frontend.seqs() == [after]
    pi.frontend.poison[entity] = Reply(422, {}, {"error": "priority must not be negative"})
    let_hours_pass(pi.db)
    pi.once(code=1)
    letter = dead_letters(pi.db)[seq]
    assert letter["original_topic"] == "routing_rule"
    assert str(letter["entity_id"]) == entity
    assert letter["payload"] == payload
    assert letter["error_code"] == "BAD_REQUEST"
    assert "priority must not be negative" in letter["error_message"]
    assert letter["http_status"] == 422
    assert (letter["retry_count"], letter["max_retries"]) == (0, 3)
    assert letter["status"] == "PENDING"
    assert letter["last_retry_at"] is None
    same = """
        SELECT d.xmin::text = o.xmin::text, o.processed_at = d.created_at
        FROM serversync.dead_letters d JOIN sync_outbox o ON o.id = d.outbox_id
    """
    assert pi.db.rows(same) == [(True, True)]
    assert not waiting(pi.db)
    assert counter(pi.db, "dead", "routing_rule") == 1
    # Nobody asks for the dead one again.
    assert pi.frontend.seqs() == [after]
    assert not pi.db.pending()
    asked = len(pi.frontend.requests)
    pi.once()
    assert len(pi.frontend.requests) == asked


# --- enqueue() --------------------------------------------------------------------------------

ENQUEUE = "SELECT serversync_enqueue(%s, %s, %s, %s)"


def test_enqueue_with_the_same_key_is_one_entry_until_the_key_expires(pi: Pi) -> None:
    pi.agent.once()
    entity, another = str(uuid.uuid4()), str(uuid.uuid4())
    written = ['{"a": 1, "b": [1.0, 2]}', '{ "b":[1.0,2],"a":1 }']
    seqs = {pi.db.value(ENQUEUE, ("schedule", entity, written[n % 2], "k-1")) for n in range(10)}
    assert seqs == {pi.db.value("SELECT id FROM sync_outbox")}
    for changed in (
        ("schedule", entity, '{"a": 2}', "k-1"),
        ("schedule", another, written[0], "k-1"),
        ("announcement", entity, written[0], "k-1"),
    ):
        with pytest.raises(psycopg.errors.UniqueViolation, match="another payload"):
            pi.db.value(ENQUEUE, changed)
    other = pi.db.value(ENQUEUE, ("schedule", entity, written[0], "k-2"))
    unkeyed = {pi.db.value(ENQUEUE, ("schedule", entity, written[0], None)) for _ in range(2)}
    pi.agent.once()
    assert pi.frontend.seqs() == sorted({*seqs, other, *unkeyed})
    assert len(pi.frontend.seqs()) == 4
    # Also after it was sent.
    assert {pi.db.value(ENQUEUE, ("schedule", entity, written[0], "k-1"))} == seqs

    pi.db.execute("UPDATE serversync_keys SET expires_at = now() - interval '1 second'")
    again = pi.db.value(ENQUEUE, ("schedule", entity, '{"a": 2}', "k-1"))
    assert again == pi.db.value(ENQUEUE, ("schedule", entity, '{"a": 2}', "k-1"))
    assert pi.db.pending() == [again]


def test_enqueue_at_the_same_moment_by_many_is_one_entry(db: Database, agent: AgentFactory) -> None:
    agent.once()
    entity, count = str(uuid.uuid4()), 10
    barrier = threading.Barrier(count)

    def call(number: int) -> int:
        with db.connect(autocommit=False) as connection:
            barrier.wait(20)
            row = connection.execute(ENQUEUE, ("schedule", entity, '{"a": 1}', "k")).fetchone()
            assert row is not None
            if number == 0:  # somebody gives up: the key must not be lost with the row
                connection.rollback()
                row = connection.execute(ENQUEUE, ("schedule", entity, '{"a": 1}', "k")).fetchone()
                assert row is not None
            return int(row[0])

    with ThreadPoolExecutor(count) as pool:
        seqs = set(pool.map(call, range(count)))
    assert list(seqs) == db.pending()

"""`serversync replay`, `prune` and `enqueue`: what people put into the queue, and take from it."""

import json
import uuid
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

import pytest

from agent import AgentFactory
from backend import Backend, Call
from desk import Desk, Typist, bury, give_up
from frontend import Request
from ledger import dead_letters, let_days_pass, receipts
from pg import Database
from pi import Pi
from test_blocking import corrupt, enqueue_large
from waiting import wait_until

NOTHING = dict.fromkeys(("again", "pending", "letter", "delivered", "overtaken", "unknown"), 0)
MIB = 1 << 20


# -- replay: what is picked -----------------------------------------------------------------------


@pytest.fixture
def calls(agent: AgentFactory, backend: Backend, db: Database) -> list[Call]:
    """Three calls without recordings that were delivered, one each day, at noon UTC."""
    found = [backend.end_call(recording=False) for _ in range(3)]
    assert agent.once().returncode == 0
    for day, call in enumerate(found, 1):
        at = datetime(2026, 3, day, 12, tzinfo=UTC)
        db.execute(
            "UPDATE sync_outbox SET created_at = %s WHERE id = ANY (%s)", (at, list(call.seqs))
        )
    return found


PICKED: list[tuple[list[str], list[int]]] = [
    (["--seq", "2-5"], [2, 3, 4, 5]),
    (["--seq", "8-"], [8, 9]),
    (["--seq", "-2"], [1, 2]),
    (["--seq", "4"], [4]),
    (["--seq", "100-200"], []),
    (["--since", "2026-03-02T12:00Z"], [4, 5, 6, 7, 8, 9]),
    (["--since", "2026-03-02T21:00:01+09:00"], [7, 8, 9]),
    (["--until", "2026-03-01"], []),
    (["--since", "2026-03-01T13:00Z", "--until", "2026-03-02T12:00:00+00:00"], [4, 5, 6]),
    (["--type", "call_log", "--seq", "2-"], [4, 7]),
    (["--call", "{CALL_LOG_ID}"], [4, 5, 6]),
    (["--call", "{call_id}"], [4, 5, 6]),
    (["--call", "nobody@nowhere"], []),
]


def test_filters_pick_what_they_name_and_only_yes_does_it(
    typist: Typist, calls: list[Call], db: Database
) -> None:
    names = {"CALL_LOG_ID": calls[1].call_log_id.upper(), "call_id": calls[1].call_id}
    for args, picked in PICKED:
        args = [arg.format(**names) for arg in args]
        told = typist.json("replay", *args, *(["--yes"] if picked else []))
        assert told == {**NOTHING, "again": len(picked), "done": bool(picked)}, args
        assert db.pending() == picked, args
        db.execute("UPDATE sync_outbox SET processed_at = now()")
    assert typist.json("replay", "--seq", "1-9") == {**NOTHING, "again": 9, "done": False}
    said = typist("replay", "--seq", "1-3").stdout
    assert "3 to be sent again" in said and "--yes" in said
    assert not db.pending()
    done = typist("replay", "--seq", "1-3", "--yes").stdout
    assert "3 to be sent again" in done and "--yes" not in done
    assert db.pending() == [1, 2, 3]


def test_a_range_that_is_none_is_a_matter_of_usage(typist: Typist) -> None:
    days = ["--since", "2026-03-02", "--until", "2026-03-01"]
    wrong = [["--yes"], ["--seq", "1" * 30], ["--since", "2026-02-30"], ["--until", ""], days]
    wrong += [["--type", ""], ["--call", ""]]
    wrong += [["--seq", seq] for seq in ("x", "1-2-3", "-", "5-2")]
    wrong = [["replay", *args] for args in wrong]
    wrong += [["dlq", "list", "--page", n] for n in ("0", "9" * 20)]
    wrong += [["dlq", "list", "--page-size", "1001"], ["dlq", "retry"], ["dlq"]]
    wrong += [["prune", f"--days={n}", "--yes"] for n in ("x", "-1", "0", "", "1e3", "99999999")]
    for args in wrong:
        refused = typist(*args, code=2)
        assert "serversync" in refused.stderr and not refused.stdout, args


# -- replay: what is left out ---------------------------------------------------------------------


def test_what_must_not_be_sent_again_is_skipped_and_counted(pi: Pi, typist: Typist) -> None:
    call = pi.backend.end_call(events=0)  # call_log, recording, recording_file
    resent = pi.backend.enqueue("schedule")
    old, new = str(uuid.uuid4()), str(uuid.uuid4())
    overtaken = pi.backend.enqueue("schedule", entity_id=old)
    (letter,) = give_up(pi.agent, pi.backend, pi.frontend, "call_log")
    overtaking = pi.backend.enqueue("schedule", {"version": 2}, entity_id=old)
    by_pending = pi.backend.enqueue("schedule", entity_id=new)
    pi.once()
    pending = pi.backend.enqueue("schedule", entity_id=new)
    which = ["replay", "--seq", f"{call.seqs[0]}-{pending}", "--yes"]
    sent = [*call.seqs[:2], resent, overtaking]

    told = typist.json(*which)
    skipped = {"pending": 1, "letter": 1, "delivered": 1, "overtaken": 2}
    assert told == NOTHING | skipped | {"again": 4, "done": True}
    assert pi.db.pending() == [*sent, pending]
    assert dead_letters(pi.db)[letter.seq]["status"] == "PENDING"
    before = len(pi.frontend.seqs())
    pi.once()
    assert pi.frontend.seqs()[before:] == [*sent, pending]
    assert len(pi.frontend.of_kind("file")) == 1

    # By force also what was overtaken; what it may not be forced to stays out.
    words = typist(*which, "--force").stdout
    assert [line.strip() for line in words.splitlines()[:-1]] == [
        "7 to be sent again",
        "1 dead letters (serversync dlq retry)",
        "1 recordings whose file is delivered",
    ]
    assert pi.db.pending() == [*call.seqs[:2], resent, overtaken, overtaking, by_pending, pending]


def test_a_recording_that_was_uploaded_is_known_by_its_receipt_alone(
    pi: Pi, typist: Typist
) -> None:
    pi.backend.end_call()
    pi.once()
    pi.db.execute("UPDATE recordings SET upload_status = 'local_only'")
    told = typist.json("replay", "--type", "recording_file", "--yes", "--force")
    assert (told["again"], told["delivered"]) == (0, 1)
    pi.db.execute("DELETE FROM serversync.deliveries")
    pi.db.execute("UPDATE recordings SET upload_status = 'uploaded'")
    assert typist.json("replay", "--type", "recording_file", "--yes")["delivered"] == 1
    assert not pi.db.pending()


def test_what_may_have_been_overtaken_by_a_row_that_was_pruned_is_left_out(
    pi: Pi, typist: Typist
) -> None:
    entity = str(uuid.uuid4())
    first = pi.backend.enqueue("schedule", entity_id=entity)
    pi.backend.enqueue("schedule", entity_id=entity)
    pi.once()
    young = pi.backend.enqueue("schedule")
    pi.once()
    # As if the newer one had been pruned yesterday, and nobody knows of it.
    pi.db.execute("UPDATE sync_outbox SET processed_at = now() - interval '40 days' WHERE id = 1")
    pi.db.execute("DELETE FROM sync_outbox WHERE id = 2")
    pi.db.execute(
        "INSERT INTO serversync.counters"
        " VALUES ('pruned_until', '', extract(epoch from now() - interval '30 days'))"
    )
    told = typist.json("replay", "--seq", "1-", "--yes")
    assert (told["again"], told["unknown"]) == (1, 1) and pi.db.pending() == [young]
    assert typist.json("replay", "--seq", "1-", "--yes", "--force")["again"] == 1
    assert pi.db.pending() == [first, young]


def test_more_than_a_chunk_is_sent_again_once(desk: Desk, schema: None, db: Database) -> None:
    db.execute(
        "INSERT INTO sync_outbox (entity_type, entity_id, payload, processed_at)"
        " SELECT 'schedule', gen_random_uuid(), '{}', now() FROM generate_series(1, 25000)"
    )
    assert desk.json("replay", "--type", "schedule")["again"] == 25_000
    assert desk.json("replay", "--seq", "11-24990", "--yes")["again"] == 24_980
    pending = db.pending()
    assert (len(pending), pending[0], pending[-1]) == (24_980, 11, 24_990)


# -- prune ----------------------------------------------------------------------------------------


def test_pruning_by_hand_deletes_in_small_transactions_and_only_with_yes(
    pi: Pi, typist: Typist
) -> None:
    pi.backend.enqueue_many(2500)
    pi.once(SYNC_BATCH_SIZE=500)
    let_days_pass(pi.db, 40, 2500)
    pending = pi.backend.enqueue()
    pi.db.execute("UPDATE sync_outbox SET created_at = '2001-01-01' WHERE id = %s", (pending,))

    def rows_left() -> Any:
        return pi.db.value("SELECT count(*) FROM sync_outbox")

    said = typist("prune").stdout
    assert "deletes 2500 rows of sync_outbox" in said and "30 days" in said and "--yes" in said
    assert "no such" not in typist("prune", "--days", "41", "--yes").stdout
    shift = "UPDATE serversync.deliveries SET started_at = started_at + interval '50 days'"
    pi.db.execute(f"{shift} WHERE last_seq = 2500")
    said = typist("prune", "--yes").stdout
    assert "deleted 0 rows" in said and "2500 rows kept" in said and "clock" in said
    pi.db.execute(f"{shift.replace('+', '-')} WHERE last_seq = 2500")
    assert rows_left() == 2501

    with ThreadPoolExecutor(1) as person, pi.db.connect(autocommit=False) as call:
        call.execute("SELECT FROM sync_outbox WHERE id = 1500 FOR UPDATE")
        done = person.submit(typist, "prune", "--yes")
        wait_until(lambda: rows_left() == 1501, what="a thousand to go while the next ones wait")
        call.rollback()
        assert done.result().stdout == "deleted 2500 rows, 4 receipts, 0 letters\n"
    assert pi.db.rows("SELECT id, processed_at FROM sync_outbox") == [(pending, None)]
    assert [row["last_seq"] for row in receipts(pi.db)] == [2500], "when the last one got through"
    assert "nothing was sent yet" not in typist("status", code=None).stdout
    assert typist("prune", "--yes").stdout == "deleted 0 rows, 0 receipts, 0 letters\n"


def test_letters_that_were_resolved_long_ago_are_pruned_and_no_others(
    pi: Pi, typist: Typist
) -> None:
    pi.backend.enqueue()
    pi.once()
    ids = bury(pi.db, [{"n": n} for n in range(5)])
    states = ["RESOLVED", "RESOLVED", "PENDING", "RETRYING", "DEAD"]
    query = "UPDATE serversync.dead_letters SET status = %s, created_at = old, updated_at = old"
    query += " FROM (SELECT now() - interval '40 days' AS old) AS past WHERE id = %s"
    for letter, status in zip(ids, states, strict=True):
        pi.db.execute(query, (status, letter))
    # Old, and delivered only today.
    pi.db.execute("UPDATE serversync.dead_letters SET updated_at = now() WHERE id = %s", (ids[1],))

    warned = typist("prune").stdout
    assert "resolved letters" in warned and len(dead_letters(pi.db)) == 5
    assert typist("prune", "--yes").stdout == "deleted 0 rows, 0 receipts, 1 letter\n"
    assert [str(row["id"]) for row in dead_letters(pi.db).values()] == ids[1:]


def test_a_configuration_that_keeps_for_ever_wants_the_number_of_days(
    pi: Pi, typist: Typist
) -> None:
    seq = pi.backend.enqueue()
    pi.once()
    let_days_pass(pi.db, 3, seq)
    keep: Any = {"SYNC_RETENTION_DAYS": 0}
    assert "--days" in typist("prune", "--yes", code=2, **keep).stderr
    done = typist("prune", "--days", "2.5", "--yes", **keep)
    assert "deleted 1 row, 0 receipts" in done.stdout


# -- enqueue --------------------------------------------------------------------------------------

ENTITY = "22222222-2222-4222-8222-222222222222"


def rows(db: Database) -> list[tuple[Any, ...]]:
    return db.rows("SELECT entity_type, entity_id::text, payload FROM sync_outbox ORDER BY id")


def test_an_entry_typed_by_hand_is_sent_at_once(pi: Pi, typist: Typist) -> None:
    pi.idle(SYNC_POLL_INTERVAL_SEC=3600)
    # Without the backend's trigger: the command itself wakes the agent.
    pi.db.execute("DROP TRIGGER serversync_wake ON sync_outbox")
    payload = {"name": "日本語", "n": 12345678901234567890123, "deep": [{"a": None}]}
    topic = "日" * 30
    text = json.dumps(payload, ensure_ascii=False)
    seq = int(typist("enqueue", topic, ENTITY, stdin=text.encode()).stdout)
    pi.wait_entry(seq)
    assert pi.frontend.store[ENTITY]["payload"] == payload
    assert rows(pi.db) == [(topic, ENTITY, payload)]
    said = typist("enqueue", "schedule", ENTITY.upper(), "--json", stdin=b"{}")
    assert json.loads(said.stdout) == {"seq": seq + 1}


def test_a_key_that_comes_again_is_one_entry_and_with_something_else_it_is_refused(
    typist: Typist, schema: None, db: Database
) -> None:
    line = ("enqueue", "schedule", ENTITY, "--idempotency-key", "order 1 ä")
    for payload in ('{"a": 1, "b": [2]}', ' {"b":[2],"a":1}\n'):
        assert typist(*line, stdin=payload.encode()).stdout == "1\n"
    refused = typist(*line, stdin=b'{"a": 2}', code=1).stderr
    assert "order 1 ä" in refused and "another payload" in refused
    assert db.pending() == [1]


NO_JSON = [
    *(b"", b"{", b'{"a": 1} x', b"{'a': 1}", b'{"a": nan}', b'{"a": 1e999999}'),
    *(b'{"a": "\\u0000"}', b'{"a": "\\ud800"}', b'{"a": "\0"}', b'{"a": "\xff"}'),
    *(b"\xef\xbb\xbf{}", b"[" * 100_000 + b"]" * 100_000),
]


def test_what_makes_no_entry_is_refused_in_words(
    agent: AgentFactory, typist: Typist, schema: None, db: Database
) -> None:
    good = ["enqueue", "schedule", ENTITY]
    beyond = json.dumps({"text": "x" * (9 * MIB)}).encode()
    assert "SYNC_ENTRY_MAX_BYTES" in typist(*good, stdin=beyond, code=2).stderr
    for payload in NO_JSON:
        said = typist(*good, "--idempotency-key", "k", stdin=payload, code=2).stderr
        assert said.count("\n") == 1, (payload[:20], said)
        assert "payload" in said and "None" not in said and len(said) < 500
    wrong = [["schedule", name] for name in ("no-uuid", ENTITY[:-1], f"{{{ENTITY}}}")]
    wrong += [["x" * 31, ENTITY], ["", ENTITY], ["schedule"]]
    for key in ("", "".join(map(str, range(3000)))):
        wrong.append([*good[1:], "--idempotency-key", key])
    for args in wrong:
        said = typist("enqueue", *args, stdin=b"{}", code=2).stderr
        assert "serversync" in said and len(said) < 1000
    odd: Any = [["dlq", "list", b"\xff"], ["dlq", "show", b"\xff"], ["replay", "--type", b"\xff"]]
    odd += [["enqueue", b"\xff", ENTITY], [*good, "--idempotency-key", b"\xff"]]
    for running in [agent(args=args) for args in odd]:
        assert running.wait(60) in (0, 1, 2)
        assert "Traceback" not in running.log()
    assert rows(db) == [] and not db.value("SELECT count(*) FROM serversync_keys")


def test_without_a_database_or_its_schema_the_missing_one_is_named(typist: Typist) -> None:
    nowhere: Any = {"DATABASE_URL": "postgresql://127.0.0.1:9/x"}
    for line in ("replay --seq 1-", "prune --yes", f"enqueue schedule {ENTITY}", "dlq list"):
        for settings, words in (({}, "sudo serversync setup"), (nowhere, "database is not there")):
            told = typist(*line.split(), code=69, **settings).stderr
            assert words in told and told.count("\n") == 1, line


@pytest.mark.parametrize(
    ("command", "when"),
    [
        ("replay", "delivered"),
        ("replay", "on its way"),
        ("retry", "on its way"),
        ("retry-all", "delivered"),
    ],
)
def test_what_came_while_it_was_decided_to_send_an_older_one_again_has_the_last_word(
    pi: Pi, desk: Desk, command: str, when: str
) -> None:
    name = str(uuid.uuid4())
    running = pi.agent(SYNC_POLL_INTERVAL_SEC=3600)
    if command != "replay":
        pi.frontend.rejected[name] = "SCHEMA"
    old = pi.backend.enqueue(payload={"is": "old"}, entity_id=name)
    wait_until(lambda: not pi.db.pending(), what="the older one", state=running.log)
    pi.frontend.rejected.clear()
    args = ["replay", "--seq", str(old), "--yes"]
    if command != "replay":
        letter = [str(dead_letters(pi.db)[old]["id"])] if command == "retry" else []
        args = ["dlq", command, *letter]

    def with_the_answer_late(request: Request) -> None:
        if any(entry["payload"] == {"is": "new"} for entry in request.entries or []):
            pi.frontend.on_entries = None
            with pi.db.connect() as mine:
                pending = "SELECT processed_at IS NULL FROM sync_outbox WHERE id = %s"
                wait_until(lambda: mine.execute(pending, (old,)).fetchall()[0][0], 60)

    with ThreadPoolExecutor(1) as pool, pi.db.connect(autocommit=False) as blocker:
        # The command has looked for newer entries, and waits for this row.
        blocker.execute("SELECT FROM sync_outbox WHERE id = %s FOR UPDATE", (old,))
        done = pool.submit(desk, *args)
        waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
        wait_until(lambda: pi.db.value(waiting), 60, "the command at the lock")
        if when == "on its way":
            pi.frontend.on_entries = with_the_answer_late
        new = pi.backend.enqueue(payload={"is": "new"}, entity_id=name)
        if when == "on its way":
            pi.frontend.wait(lambda: pi.frontend.on_entries is None, what="the newer entry")
        else:
            wait_until(lambda: not pi.db.pending(), what="the newer entry", state=running.log)
        blocker.rollback()
        assert done.result().returncode == 0
    wait_until(lambda: not pi.db.pending(), 60, "both of them again", running.log)
    first = [old] if command == "replay" else []
    assert pi.frontend.seqs() == [*first, new, old, new]
    assert pi.frontend.store[name]["payload"] == {"is": "new"}


@pytest.mark.parametrize("entity_type", ["schedule", "recording_file"])
def test_a_row_that_is_corrupt_is_refused_in_words(pi: Pi, entity_type: str, schema: None) -> None:
    bad = enqueue_large(pi.backend, entity_type)
    corrupt(pi.db, bad)
    for known in (False, True):
        refused = pi.agent.once("replay", "--seq", str(bad), "--yes")
        assert refused.returncode == 1 and refused.stdout == ""
        assert refused.stderr.count("\n") == 1 and "sync_outbox is corrupt" in refused.stderr
        assert known == (f"entry {bad} ({entity_type}) cannot be read" in refused.stderr)
        assert pi.db.pending() == [bad]
        pi.once(code=75)

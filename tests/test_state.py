"""State: the schema of the agent's own, the backend's tables, rights, leftovers, exit codes."""

import contextlib
import json
import os
import re
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

import serversync
from agent import PROGRAM, PYTHON, REPOSITORY, AgentFactory
from desk import Typist, bury
from frontend import Reply
from ledger import dead, entity_of, failures, hold, let_days_pass, let_hours_pass, uploads, waiting
from pg import Database
from pi import Pi
from test_blocking import corrupt, enqueue_large
from waiting import wait_until

SCHEMA_V1 = Path(__file__).with_name("schema_v1.sql")
# What was made anew has another one.
IDENTITIES = """
    SELECT oid FROM pg_class WHERE oid >= 16384 UNION ALL SELECT oid FROM pg_trigger
    UNION ALL SELECT oid FROM pg_constraint WHERE oid >= 16384
    UNION ALL SELECT oid FROM pg_proc WHERE oid >= 16384 ORDER BY 1
"""
INDEX = "sync_outbox_serversync_pending"
INDEX_STATE = """
    SELECT i.indisvalid, pg_get_indexdef(i.indexrelid)
    FROM pg_index i WHERE i.indexrelid = to_regclass('sync_outbox_serversync_pending')
"""
TRIGGERS = "SELECT tgname FROM pg_trigger WHERE tgrelid = 'sync_outbox'::regclass"
RIGHTS_OF_AN_AGENT = (
    "GRANT SELECT, UPDATE (processed_at) ON sync_outbox TO {role}",
    "GRANT SELECT, UPDATE (upload_status, s3_url) ON recordings TO {role}",
    "GRANT SELECT ON system_settings TO {role}",
)


def shape(db: Database, *options: str) -> list[str]:
    """All that is defined, as pg_dump says it: a statement each."""
    url = db.cluster.url(db.name, user="postgres")
    command = [str(db.cluster.bin / "pg_dump"), "--schema-only", *options, url]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    text = re.sub(r"(?m)^(--|\\(un)?restrict ).*\n", "", text)
    return [statement.strip() for statement in text.split(";\n\n")]


def make_role(db: Database, *grants: str) -> tuple[str, str]:
    """A login role of this test's own, and the URL with which it comes in."""
    role = f"agent_of_{db.name}"
    with db.admin() as admin:
        admin.execute(f"CREATE ROLE {role} LOGIN")
        for grant in grants:
            admin.execute(grant.format(role=role, db=db.name))
    return role, db.cluster.url(db.name, user=role)


# -- the schema ----------------------------------------------------------------------------------


def test_first_start_makes_the_schema_and_the_second_changes_nothing(pi: Pi) -> None:
    """An invalid index, as a kill leaves it, is dropped and made again."""
    pi.backend.enqueue_many(2)
    with pytest.raises(psycopg.errors.UniqueViolation):
        pi.db.execute(f"CREATE UNIQUE INDEX CONCURRENTLY {INDEX} ON sync_outbox ((1))")
    assert pi.db.rows(INDEX_STATE)[0][0] is False
    pi.once()
    first = shape(pi.db), pi.db.rows(IDENTITIES)
    number = pi.db.value("SELECT max(number) FROM serversync.schema_version")
    assert number == serversync.SCHEMA_VERSION
    [(valid, definition)] = pi.db.rows(INDEX_STATE)
    assert valid and definition.endswith("USING btree (id) WHERE (processed_at IS NULL)")
    assert pi.db.rows(TRIGGERS) == [("serversync_wake",)]
    again = pi.once()
    assert "version" not in again.stderr
    assert (shape(pi.db), pi.db.rows(IDENTITIES)) == first
    assert pi.db.value("SELECT max(number) FROM serversync.schema_version") == number

    payloads: list[str] = []
    with pi.db.connect() as listener:
        listener.add_notify_handler(lambda notification: payloads.append(notification.payload))
        listener.execute("LISTEN serversync")
        for _ in range(2):
            with pi.db.connect(autocommit=False) as backend:
                for _ in range(3):
                    backend.execute(
                        "INSERT INTO sync_outbox (entity_type, entity_id, payload)"
                        " SELECT 'x', gen_random_uuid(), '{}' FROM generate_series(1, 10)"
                    )
        wait_until(lambda: listener.execute("SELECT 1") and len(payloads) >= 2)
        listener.execute("SELECT 1")
    # A statement-level trigger with a constant payload: one notification a transaction.
    assert payloads == ["", ""]


# As it was while the functions that others run belonged to the service's role.
OLD_TRIGGER = """
    CREATE TRIGGER serversync_wake AFTER INSERT ON sync_outbox
    FOR EACH STATEMENT EXECUTE FUNCTION serversync.wake()
"""
BACK_TO_VERSION_2 = """
    UPDATE serversync.schema_version SET number = 2;
    CREATE TABLE serversync.idempotency_keys (
        key text PRIMARY KEY, digest bytea NOT NULL, outbox_id bigint NOT NULL,
        expires_at timestamptz NOT NULL);
    CREATE FUNCTION serversync.wake() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN PERFORM pg_notify('serversync', ''); RETURN NULL; END $$;
    CREATE FUNCTION serversync.enqueue(entity_type text, entity_id uuid, payload jsonb,
        idempotency_key text DEFAULT NULL) RETURNS bigint LANGUAGE sql AS 'SELECT 0::bigint';
    ALTER TABLE serversync.settings DROP held, ADD digest text,
        ADD pulls bigint NOT NULL DEFAULT 0, ADD held_counts jsonb,
        ADD held_times int NOT NULL DEFAULT 0, ADD held_seconds float8 NOT NULL DEFAULT 0;
    ALTER TABLE serversync.audio_files DROP digests, DROP unwanted, ADD etag text,
        ADD fetched_at timestamptz, ADD files jsonb NOT NULL DEFAULT '[]', ADD unwanted float8;
"""


@pytest.mark.parametrize("version", [1, 2, 3])
def test_an_upgraded_schema_is_the_same_as_a_fresh_one(pi: Pi, version: int) -> None:
    pi.once()
    fresh = shape(pi.db)
    pi.db.execute("DROP FUNCTION serversync_wake, serversync_enqueue CASCADE")
    pi.db.execute("DROP TABLE serversync_keys")
    if version == 1:
        pi.db.execute("DROP SCHEMA serversync CASCADE")
        for statement in ("create schema serversync", SCHEMA_V1.read_text()):
            pi.db.execute(statement)
    else:
        pi.db.execute(BACK_TO_VERSION_2)
        pi.db.execute("UPDATE serversync.schema_version SET number = %s", (version,))
    pi.db.execute(OLD_TRIGGER)
    pi.once()
    assert shape(pi.db) == fresh


def test_an_upgrade_that_fails_changes_nothing(agent: AgentFactory, db: Database) -> None:
    make_version_1(db)
    before = shape(db, "--schema=serversync"), db.rows(IDENTITIES)
    db.execute("CREATE VIEW looks AS SELECT * FROM serversync.recordings")  # the last of it fails
    assert agent.once().returncode != 0
    db.execute("DROP VIEW looks")
    assert (shape(db, "--schema=serversync"), db.rows(IDENTITIES)) == before
    assert db.value("SELECT max(number) FROM serversync.schema_version") == 1
    assert agent.once().returncode == 0
    number = db.value("SELECT max(number) FROM serversync.schema_version")
    assert number == serversync.SCHEMA_VERSION


V1_SETTINGS = """
    UPDATE serversync.settings
    SET counts = '{"rules": 9}', digest = 'd', pulls = 7, held_counts = '{"rules": 1}',
        held_times = 2, held_seconds = 60, pulled_at = '2026-11-18'
    WHERE section = 'call-actions';
    INSERT INTO serversync.audio_files (name, version, fetched, fetched_at, files, etag, unwanted)
    VALUES ('a.wav', '2', '1', now(), '[{"inode": 1}, {"sha256": "a"}, {"sha256": "b"}]', 'e', 99),
           ('b.wav', '1', NULL, NULL, '[]', NULL, NULL)
"""
V1_WAITING = """
    INSERT INTO serversync.failures (outbox_id, entity_type, is_file, lane, tries, attempts,
        successes, next_attempt_at, error_code, error, http_status, first_failed_at, waited)
    SELECT id, entity_type, entity_type = 'recording_file', serversync.lane(payload, entity_id),
           7, %(attempts)s, 5, now() - interval '1 s', %(code)s, 'as it was', 500,
           now() - %(hours)s * interval '1 hour', 100
    FROM sync_outbox WHERE id = %(seq)s
"""
V1_LETTER = """
    WITH dead AS (
        UPDATE sync_outbox SET processed_at = now() WHERE id = %(seq)s RETURNING *
    )
    INSERT INTO serversync.dead_letters (outbox_id, original_topic, entity_id, payload, rest,
        error_code, error_message, attempts)
    SELECT id, entity_type, entity_id, payload,
           to_jsonb(dead) - 'payload' - 'processed_at', 'BAD_REQUEST', 'no', 1 FROM dead
"""
V1_UPLOADED = """
    WITH sent AS (
        UPDATE sync_outbox SET processed_at = now() WHERE id = ANY (%(seqs)s)
    ), kept AS (
        INSERT INTO serversync.uploads (outbox_id, directory, files, file_url)
        VALUES (%(seq)s, %(directory)s, %(files)s, 'http://frontend/mixed.wav')
    )
    INSERT INTO serversync.deliveries (kind, first_seq, last_seq, entries, bytes, outcome,
        started_at, duration_ms, lane, entity_id, url)
    SELECT 'file', id, id, 1, 1, 'sent', now(), 1, serversync.lane(payload, entity_id), entity_id,
           'http://frontend/mixed.wav'
    FROM sync_outbox WHERE id = %(seq)s
"""


def make_version_1(db: Database) -> None:
    index = serversync.CREATE_INDEX.replace("%1$I.", "")
    for statement in ("create schema serversync", SCHEMA_V1.read_text(), index, OLD_TRIGGER):
        db.execute(statement)


def test_what_version_1_wrote_down_goes_on_after_the_upgrade(pi: Pi) -> None:
    make_version_1(pi.db)
    pi.db.execute(V1_SETTINGS)
    sent = pi.backend.end_call()
    files = [serversync.signature(path.name, path.stat()) for path in (sent.wav, sent.meta)]
    params = {"seq": sent.seqs[-1], "seqs": sent.seqs, "directory": sent.call_id}
    pi.db.execute(V1_UPLOADED, params | {"files": json.dumps(files)})
    pi.db.execute("DELETE FROM recordings")  # then the receipt alone knows of the upload
    letter, over, bad = (pi.backend.enqueue() for _ in range(3))
    later = pi.backend.enqueue(entity_id=entity_of(pi.db, bad))
    call = pi.backend.end_call(meta=False)
    for seq, code, attempts, hours in ((bad, "FRONTEND_5XX", 7, 30), (over, "FRONTEND_5XX", 2, 1),
                                       (call.seqs[-1], "NOT_READY", 0, 0)):  # fmt: skip
        values = {"seq": seq, "code": code, "attempts": attempts, "hours": hours}
        pi.db.execute(V1_WAITING, values)
    pi.db.execute("UPDATE sync_outbox SET processed_at = now() WHERE id = %s", (over,))
    pi.db.execute(V1_LETTER, {"seq": letter})
    pi.frontend.poison[entity_of(pi.db, bad)] = Reply(500, body={"error": "no"})

    # The same entries wait, with what they had been charged, and what depends on them.
    pi.once(code=75)
    assert {seq: row[0] for seq, row in failures(pi.db).items()} == {
        bad: "FRONTEND_5XX", later: "WAITS_FOR", call.seqs[-1]: "NOT_READY"}  # fmt: skip
    row = waiting(pi.db)[bad]
    assert (row["tries"], row["attempts"]) == (8, 7)
    assert 30 * 3600 <= row["waited"] < 31 * 3600
    assert pi.frontend.seqs() == call.seqs[:-1]
    assert not uploads(pi.db) and not sent.directory.exists()
    assert dead(pi.db) == {letter: "BAD_REQUEST"}
    known = "SELECT counts, held, pulled_at::date::text FROM serversync.settings"
    rules = pi.db.rows(f"{known} WHERE section = 'call-actions'")
    assert rules == [({"rules": 9}, {}, "2026-11-18")]
    audio = "SELECT name, version, fetched, digests, unwanted FROM serversync.audio_files"
    assert pi.db.rows(f"{audio} ORDER BY 1") == [
        ("a.wav", "2", "1", ["a", "b"], False), ("b.wav", "1", None, [], False),
    ]  # fmt: skip

    # A letter can be sent again; the receipt still knows the recording, and that the call has one.
    letter_id = pi.db.value("SELECT id::text FROM serversync.dead_letters")
    pi.once("dlq", "retry", letter_id)
    payload = {"callLogId": sent.call_log_id, "uploadStatus": "local_only"}
    late = pi.backend.enqueue("recording", payload, sent.recording_id)
    second = pi.backend.end_call(call_log_id=sent.call_log_id)
    pi.backend.write_meta(call)
    let_hours_pass(pi.db)
    pi.once(code=1)
    assert pi.frontend.seqs()[len(call.seqs) - 1 :] == [letter, late, *second.seqs[:-1]]
    stored = pi.frontend.received(sent.recording_id)[-1]["payload"]
    assert stored == {**payload, "uploadStatus": "uploaded", "s3Url": "http://frontend/mixed.wav"}
    assert pi.frontend.playable(call.recording_id)
    assert dead(pi.db)[second.seqs[-1]] == "SECOND_RECORDING"

    # The eighth attempt is the last, and then the next word of the entity goes.
    hold(pi.db)
    for _ in range(3):
        pi.backend.enqueue()
    pi.agent.once()
    let_hours_pass(pi.db)
    pi.frontend.poison.clear()
    pi.frontend.on_entries = lambda r: Reply(500) if bad in [e["seq"] for e in r.entries] else None
    pi.once(code=1)
    assert dead(pi.db)[bad] == "FRONTEND_5XX"
    assert pi.frontend.seqs()[-1] == later
    assert not pi.db.pending() and not waiting(pi.db)


def test_an_upgrade_from_version_1_gets_past_a_corrupt_row(pi: Pi) -> None:
    make_version_1(pi.db)
    bad = enqueue_large(pi.backend, "schedule")
    pi.db.execute(V1_WAITING, {"seq": bad, "code": "FRONTEND_5XX", "attempts": 3, "hours": 1})
    call = pi.backend.end_call()
    corrupt(pi.db, bad)

    pi.once(code=75)

    assert pi.db.pending() == [bad]
    row = waiting(pi.db)[bad]
    assert (row["code"], row["attempts"], row["call_id"]) == ("ROW_CORRUPT", 3, None)
    assert pi.frontend.seqs() == call.seqs[:-1]
    assert pi.frontend.files[call.call_log_id].sha256 == call.sha256


def test_schema_of_a_newer_version_is_refused_and_left_alone(pi: Pi) -> None:
    pi.once()
    pi.db.execute("INSERT INTO serversync.schema_version VALUES (9999)")
    pi.db.execute("ALTER TABLE serversync.dead_letters RENAME attempts TO charged")
    seq = pi.backend.enqueue()
    for command in ("once", "run"):
        refused = pi.once(command, code=78)
        assert "newer version (9999)" in refused.stderr
        assert "Traceback" not in refused.stderr
    assert "run: sudo serversync doctor" in pi.once("dlq", "list", code=78).stderr
    assert pi.db.pending() == [seq] and not pi.frontend.requests


@pytest.mark.parametrize(
    "grants",
    [
        RIGHTS_OF_AN_AGENT,
        (
            "GRANT CREATE ON DATABASE {db} TO {role}",
            "GRANT SELECT ON sync_outbox, system_settings TO {role}",
            RIGHTS_OF_AN_AGENT[1],
        ),
    ],
    ids=["to make the schema", "to mark entries"],
)
def test_role_that_lacks_a_right_gets_the_line_that_helps(pi: Pi, grants: tuple[str, ...]) -> None:
    role, url = make_role(pi.db, *grants)
    call = pi.backend.end_call()
    for command in ("once", "run"):
        refused = pi.once(command, code=78, DATABASE_URL=url)
        assert role in refused.stderr and "Traceback" not in refused.stderr
    assert not pi.frontend.requests
    assert "run: sudo serversync setup" in refused.stderr
    admin_url = pi.db.cluster.url(pi.db.name, user="postgres")
    pi.once("setup", "--admin-url", admin_url, DATABASE_URL=url)
    pi.once(DATABASE_URL=url)
    assert not pi.db.pending()
    assert pi.backend.upload_status(call)[0] == "uploaded"


def test_a_right_that_the_role_lacks_is_78_and_the_line_that_grants_it_of_every_command(
    pi: Pi, schema: None, typist: Typist
) -> None:
    (letter,) = bury(pi.db, [{"n": 1}])
    role, url = make_role(pi.db)
    lines = ["dlq list", "dlq retry-all", "replay --seq 1- --yes", "prune --yes", "settings"]
    lines += [f"dlq show {letter}", f"dlq retry {letter}", f"dlq delete {letter} --yes"]
    lines += ["settings pull", "settings accept call-actions", "once"]
    rights = f"GRANT SELECT, UPDATE ON sync_outbox, recordings, system_settings TO {role}"
    for given in ("SELECT 1", rights):
        pi.db.execute(given)
        for line in lines:
            told = typist(*line.split(), code=78, DATABASE_URL=url).stderr
            assert "sudo serversync setup" in told and "LINE 1" not in told, line


def test_role_that_does_not_own_the_outbox_goes_on_by_polling_and_says_so_once(pi: Pi) -> None:
    _, url = make_role(pi.db, "GRANT CREATE ON DATABASE {db} TO {role}", *RIGHTS_OF_AN_AGENT)
    running = pi.agent(DATABASE_URL=url, SYNC_POLL_INTERVAL_SEC=0.5)
    call = pi.backend.end_call()
    pi.wait_file(call)
    assert not pi.db.rows(INDEX_STATE) and not pi.db.rows(TRIGGERS)

    end_session(pi.db)
    seq = pi.backend.enqueue()
    pi.wait_entry(seq)
    assert len(running.lines("going on with less")) == 1
    line = running.lines("going on with less")[0]
    assert "index" in line and "trigger" in line


def end_session(db: Database) -> None:
    with db.admin() as admin:
        ended = admin.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE application_name = 'serversync' AND datname = current_database()"
        ).fetchall()
    assert ended == [(True,)]


# -- index and trigger ---------------------------------------------------------------------------


@contextlib.contextmanager
def maintenance(db: Database) -> Iterator[None]:
    """A session that holds the lock of VACUUM, ANALYZE, CREATE INDEX CONCURRENTLY."""
    with db.connect(autocommit=False) as session:
        session.execute("LOCK TABLE sync_outbox IN SHARE UPDATE EXCLUSIVE MODE")
        yield


@contextlib.contextmanager
def long_transaction(db: Database) -> Iterator[None]:
    """A transaction of the backend that has inserted and does not end."""
    with db.connect(autocommit=False) as session:
        session.execute(
            "INSERT INTO sync_outbox (entity_type, entity_id, payload)"
            " VALUES ('schedule', gen_random_uuid(), '{}')"
        )
        yield
        session.rollback()


@pytest.mark.parametrize("busy", [maintenance, long_transaction])
def test_locked_outbox_holds_up_neither_the_agent_nor_the_backend(pi: Pi, busy: Any) -> None:
    """What the lock prevented is made when it has ended: by a new session, or by its own timer."""
    first = pi.backend.enqueue()
    with busy(pi.db):
        running = pi.agent()
        inserts: list[float] = []
        while first not in pi.frontend.seqs():
            assert len(inserts) < 10_000
            began = time.monotonic()
            pi.backend.enqueue()
            inserts.append(time.monotonic() - began)
        running.wait_log("going on with less")
    assert max(inserts) < 3  # promised: lock_timeout is one second
    if busy is maintenance:
        end_session(pi.db)
        wait_until(lambda: pi.db.rows(INDEX_STATE)[0][0] and pi.db.rows(TRIGGERS), what="both")
    else:
        running.wait_log("index and NOTIFY trigger are there now")
    assert pi.db.rows(INDEX_STATE)[0][0] and pi.db.rows(TRIGGERS) == [("serversync_wake",)]
    pi.wait_delivered()
    pi.wait_entry(pi.backend.enqueue())  # not a polling interval later


REBUILD = """
    BEGIN;
    CREATE TABLE rebuilt (LIKE sync_outbox INCLUDING DEFAULTS);
    INSERT INTO rebuilt SELECT * FROM sync_outbox;
    ALTER SEQUENCE sync_outbox_id_seq OWNED BY rebuilt.id;
    DROP TABLE sync_outbox;
    ALTER TABLE rebuilt RENAME TO sync_outbox;
    ALTER TABLE sync_outbox ADD PRIMARY KEY (id);
    COMMIT
"""


def test_rebuilt_outbox_has_index_and_trigger_again_within_a_minute_and_what_waited_goes_on(
    pi: Pi, alter: Callable[[str, str], None]
) -> None:
    """Nothing but its own timer, of half a minute, wakes it: a program whose timer is quicker."""
    alter("min(interval, 30.0)", "min(interval, 2.0)")
    bad = pi.poisoned(Reply(429, {"Retry-After": "3600"}))
    running = pi.agent(SYNC_POLL_INTERVAL_SEC=300)
    running.wait_sentence("1 retrying")
    pi.db.execute(REBUILD)
    assert not pi.db.rows(INDEX_STATE) and not pi.db.rows(TRIGGERS)
    wait_until(lambda: pi.db.rows(INDEX_STATE) and pi.db.rows(TRIGGERS), 30, "both", running.log)
    assert pi.db.rows(INDEX_STATE)[0][0] and pi.db.rows(TRIGGERS) == [("serversync_wake",)]
    call = pi.backend.end_call()
    pi.frontend.wait(lambda: pi.frontend.playable(call.recording_id), 5, "the call, by NOTIFY")
    pi.frontend.poison.clear()
    let_hours_pass(pi.db)
    pi.wait_entry(bad)


def test_trigger_that_fails_never_ends_the_backend_s_transaction(pi: Pi) -> None:
    pi.once()
    with pi.db.admin() as admin:
        admin.execute("REVOKE EXECUTE ON FUNCTION pg_notify(text, text) FROM PUBLIC")
    with pytest.raises(psycopg.errors.InsufficientPrivilege), pi.db.connect() as session:
        session.execute("SELECT pg_notify('serversync', '')")
    call = pi.backend.end_call()
    assert pi.db.pending() == call.seqs
    pi.once()
    assert pi.frontend.playable(call.recording_id)


def test_backend_with_a_role_that_knows_nothing_of_our_schema_can_still_insert(pi: Pi) -> None:
    pi.idle()
    _, url = make_role(
        pi.db,
        "GRANT INSERT ON sync_outbox TO {role}",
        "GRANT USAGE ON ALL SEQUENCES IN SCHEMA public TO {role}",
    )
    with psycopg.connect(url) as session:
        session.execute(
            "INSERT INTO sync_outbox (entity_type, entity_id, payload)"
            " VALUES ('schedule', gen_random_uuid(), '{}')"
        )
    pi.frontend.wait(lambda: pi.frontend.seqs(), 5, "the entry, by NOTIFY")


# -- the backend's tables ------------------------------------------------------------------------


def test_backend_s_tables_change_only_as_the_contract_says(pi: Pi) -> None:
    call = pi.backend.end_call()
    lost = pi.backend.end_call(audio=False, file_path="../x/mixed.wav")  # becomes a dead letter
    columns = {
        "sync_outbox": ("processed_at",),
        "recordings": ("upload_status", "s3_url"),
        "system_settings": (),
    }

    def content() -> dict[str, Any]:
        return {
            table: pi.db.rows(
                f"SELECT to_jsonb(t) - %s::text[] FROM {table} t ORDER BY t.id", (list(written),)
            )
            for table, written in columns.items()
        }

    before, rows = shape(pi.db, "--schema=public"), content()
    pi.once(code=1)
    assert pi.backend.upload_status(call)[0] == "uploaded"
    assert pi.backend.upload_status(lost)[0] == "upload_failed"
    after = shape(pi.db, "--schema=public")
    assert set(before) <= set(after)
    added = [statement for statement in after if statement not in before]
    assert all("serversync_" in statement for statement in added)
    made = [re.match(r"CREATE (\w+) (?:public\.)?(\w+)", statement) for statement in added]
    assert sorted(each.groups() for each in made if each) == [
        ("FUNCTION", "serversync_enqueue"),
        ("FUNCTION", "serversync_wake"),
        ("INDEX", "serversync_keys_expires_at_idx"),
        ("INDEX", INDEX),
        ("TABLE", "serversync_keys"),
        ("TRIGGER", "serversync_wake"),
    ]
    assert content() == rows
    others = "SELECT nspname FROM pg_namespace WHERE nspname !~ '^pg_' ORDER BY 1"
    assert pi.db.rows(others) == [("information_schema",), ("public",), ("serversync",)]


@pytest.mark.parametrize(
    "damage",
    [
        "DELETE FROM system_settings",
        "DROP TABLE recordings, system_settings",
    ],
)
def test_database_that_is_not_complete_still_syncs(pi: Pi, damage: str) -> None:
    call = pi.backend.end_call()
    pi.db.execute(damage)
    running = pi.agent()
    pi.wait_delivered()
    assert pi.frontend.seqs() == call.seqs[:4]
    assert pi.frontend.files[call.call_log_id].sha256 == call.sha256
    later = pi.backend.enqueue("recording", {"id": call.recording_id, "uploadStatus": "local_only"})
    pi.wait_entry(later)
    assert ("recordings" in damage) == bool(running.lines("there is no table recordings"))
    assert not running.lines("a cycle failed")


def test_recordings_that_is_created_later_is_marked_without_a_restart(pi: Pi) -> None:
    """A bare outbox at first; then the table comes, and once more another one (a restore)."""
    calls = [pi.backend.end_call()]
    pi.db.execute("ALTER TABLE recordings RENAME TO not_yet")
    running = pi.agent()
    pi.wait_file(calls[0])
    pi.wait_delivered()
    for anew in (
        "ALTER TABLE not_yet RENAME TO recordings",
        "ALTER TABLE recordings RENAME TO gone; CREATE TABLE recordings (LIKE gone INCLUDING ALL)",
    ):
        pi.db.execute(anew)
        calls.append(pi.backend.end_call())
        pi.wait_file(calls[-1])
        pi.wait_delivered()
        url = pi.frontend.file_url(pi.frontend.files[calls[-1].call_log_id])
        assert pi.backend.upload_status(calls[-1]) == ("uploaded", url)
    assert not failures(pi.db) and not running.lines("a cycle failed")
    wait_until(lambda: not any(call.directory.exists() for call in calls), state=running.log)


def test_ids_that_come_again_meet_no_old_letter_row_or_upload(pi: Pi) -> None:
    """TRUNCATE … RESTART IDENTITY: the entity tells a new entry from the old one of its id."""
    directories = []
    for name in ("old", "new"):
        dying, waits = (str(uuid.uuid4()) for _ in range(2))
        pi.frontend.poison[dying] = Reply(400, body={"error": name})
        pi.frontend.poison[waits] = Reply(500)
        assert pi.backend.enqueue("schedule", {"name": name}, dying) == 1
        if name == "old":
            assert pi.backend.enqueue(entity_id=waits) == 2
        call = pi.backend.end_call(recording=True)
        directories.append(call.directory)
        if name == "new":
            assert pi.backend.enqueue(entity_id=waits) == 7
        pi.once(code=1, SYNC_DELETE_AFTER_SEC=3600)
        assert pi.frontend.playable(call.recording_id)
        if name == "old":
            assert list(failures(pi.db)) == [2]
            hold(pi.db)
            pi.db.execute("TRUNCATE sync_outbox RESTART IDENTITY")
    assert list(failures(pi.db)) == [7]
    letters = pi.db.rows("SELECT outbox_id, payload->>'name', error_message, status"
                      " FROM serversync.dead_letters ORDER BY created_at")  # fmt: skip
    assert [letter[:2] for letter in letters] == [(1, "old"), (1, "new")]
    assert "old" in letters[0][2] and "new" in letters[1][2]
    pi.frontend.poison.clear()
    let_hours_pass(pi.db)
    pi.once(SYNC_DELETE_AFTER_SEC=0)
    assert not pi.db.pending() and not waiting(pi.db) and not uploads(pi.db)
    assert not any(directory.exists() for directory in directories)


def test_a_right_that_is_missing_after_a_reconnect_is_waited_for(pi: Pi) -> None:
    running = pi.idle()
    pi.db.execute("revoke select on system_settings from voicebot")
    end_session(pi.db)
    running.wait_log("lacks select on system_settings")
    pi.db.execute("grant select on system_settings to voicebot")
    seq = pi.backend.enqueue()
    pi.wait_entry(seq, timeout=60)
    assert running.running


def test_trigger_that_somebody_disabled_stays_disabled_and_polling_goes_on(pi: Pi) -> None:
    pi.agent.once()
    pi.db.execute("ALTER TABLE sync_outbox DISABLE TRIGGER serversync_wake")
    pi.idle(SYNC_POLL_INTERVAL_SEC=0.5)
    seq = pi.backend.enqueue()
    pi.wait_entry(seq)
    state = "SELECT tgenabled::text FROM pg_trigger WHERE tgname = 'serversync_wake'"
    assert pi.db.value(state) == "D"


# -- results that cannot be written down, power cuts, clocks --------------------------------------

# What PostgreSQL says of a full disk, at the one statement that records a confirmation.
FULL_DISK = """
    create sequence tries_to_record;  -- does not roll back: it counts what failed
    create function full_disk() returns trigger language plpgsql as $$
    begin
        perform nextval('public.tries_to_record');
        raise exception 'could not extend file: No space left on device' using errcode = '53100';
    end $$;
    create trigger full_disk before insert on serversync.deliveries
    for each row execute function full_disk();
"""


def test_a_result_that_cannot_be_recorded_is_kept_and_nothing_is_sent_before_it_is(pi: Pi) -> None:
    """Nor does a reload send it again, or begin a busy loop."""
    early = pi.backend.end_call()
    running = pi.agent(SYNC_DELETE_AFTER_SEC=6)
    pi.wait_delivered()
    pi.db.execute(FULL_DISK)

    unrecorded = pi.backend.enqueue()
    pi.wait_entry(unrecorded)
    running.wait_log("a result cannot be recorded, nothing else is sent")
    call = pi.backend.end_call()
    tries = "select last_value from tries_to_record"
    wait_until(lambda: pi.db.value(tries) >= 2, what="more tries to record it", timeout=60)
    before = pi.db.value(tries)
    for number in (1, 2):
        running.hup()
        wait_until(lambda: len(running.lines("read again")) == number, what="a reload")  # noqa: B023
    assert pi.db.value(tries) - before < 50, "a busy loop"
    assert pi.db.pending() == [unrecorded, *call.seqs]
    assert len(pi.frontend.of_kind("entries")) == 2
    assert len(pi.frontend.of_kind("file")) == 1
    wait_until(lambda: not early.directory.exists(), what="room, by its deletion", timeout=60)

    pi.db.execute("drop trigger full_disk on serversync.deliveries")
    pi.wait_delivered(60)
    assert pi.frontend.seqs().count(unrecorded) == 1
    assert pi.frontend.files[call.call_log_id].sha256 == call.sha256
    assert not failures(pi.db)


def test_who_calls_while_a_result_cannot_be_recorded_is_heard(pi: Pi) -> None:
    running = pi.idle()
    pi.db.execute(FULL_DISK)
    pi.backend.enqueue()
    running.wait_log("a result cannot be recorded, nothing else is sent")
    last = pi.backend.enqueue()
    tries = "select last_value from tries_to_record"
    before = pi.db.value(tries)
    wait_until(lambda: pi.db.value(tries) >= before + 2, what="more tries to record it", timeout=60)
    pi.db.execute("drop trigger full_disk on serversync.deliveries")
    wait_until(lambda: pi.db.pending() in ([last], []), what="the result", timeout=40)
    pi.wait_entry(last, timeout=10)  # the next look without a call is half a minute later


# Each confirmation ends the session that records it, at the first try.
DEADLY = """
    create sequence tries_to_record;
    create function deadly() returns trigger language plpgsql as $$
    begin
        if nextval('public.tries_to_record') % 2 = 1 then
            perform pg_terminate_backend(pg_backend_pid()), pg_sleep(60);
        end if;
        return new;
    end $$;
    create trigger deadly before insert on serversync.deliveries
    for each row execute function deadly();
"""


def test_a_result_whose_session_ends_is_recorded_by_the_next_one(pi: Pi) -> None:
    pi.once()  # makes the schema
    pi.db.execute(DEADLY)
    call = pi.backend.end_call()
    pi.once()
    assert pi.db.value("select last_value from tries_to_record") == 4  # of entries, and of a file
    assert not pi.db.pending() and not uploads(pi.db)
    assert pi.frontend.seqs() == call.seqs[:4]
    assert pi.frontend.files[call.call_log_id].count == 1


def test_a_mark_that_changes_nothing_is_said_and_nothing_is_sent_twice(pi: Pi) -> None:
    pi.once()
    with pi.db.admin() as admin:
        admin.execute(
            "create function no() returns trigger language plpgsql as $$ begin return null; end $$"
        )
        admin.execute(
            "create trigger no before update on sync_outbox for each row execute function no()"
        )
    seq = pi.backend.enqueue()
    running = pi.agent()
    running.wait_log("marking an entry in sync_outbox changes nothing")
    with pi.db.admin() as admin:
        admin.execute("drop trigger no on sync_outbox")
    pi.wait_delivered(60)
    assert pi.frontend.seqs() == [seq]


@pytest.mark.parametrize("shift", ["-20y", "+20y"])
def test_an_agent_with_a_wrong_clock_delivers_and_deletes(
    pi: Pi, libfaketime: Path, shift: str
) -> None:
    call = pi.backend.end_call()
    running = pi.agent(
        LD_PRELOAD=libfaketime,
        FAKETIME=shift,
        FAKETIME_DONT_FAKE_MONOTONIC=1,
        SYNC_DELETE_AFTER_SEC=1,
    )

    wait_until(lambda: not call.directory.exists(), what="the deletion", state=running.log)
    assert pi.frontend.files[call.call_log_id].sha256 == call.sha256
    assert not pi.db.pending()
    assert pi.backend.upload_status(call)[0] == "uploaded"


def test_a_retry_that_is_due_in_years_counts_as_due_at_once(pi: Pi) -> None:
    call = pi.backend.end_call(recording=False, audio=False)
    late = pi.backend.end_call(meta=False)
    pi.once(code=75)
    assert list(failures(pi.db)) == [late.seqs[-1]]
    pi.backend.write_meta(late)
    # The database's clock was years ahead when this was written, and has been set right since.
    pi.db.execute("update serversync.waiting set next_attempt_at = now() + interval '20 years'")

    pi.once()
    assert pi.frontend.files[late.call_log_id].sha256 == late.sha256
    assert pi.frontend.received(call.call_log_id)


def test_a_clock_that_jumps_ahead_by_days_uses_up_no_patience(pi: Pi) -> None:
    """Between two looks ten minutes count at most, whatever the database's clock says."""
    limits: dict[str, Any] = {"SYNC_RETRY_MAX": 3, "SYNC_RETRY_HOURS": 24}
    bad = pi.poisoned(Reply(500))
    pi.agent.once(**limits)
    for _ in range(3):
        for _ in range(3):
            pi.backend.enqueue()
        hold(pi.db)
        pi.agent.once(**limits)
        pi.db.execute("update serversync.waiting set updated_at = updated_at - interval '9 days'")
        let_hours_pass(pi.db)
        pi.once(code=75, **limits)
    row = waiting(pi.db)[bad]
    assert row["attempts"] >= 3
    assert 3 * 600 - 60 < row["waited"] < 3 * 600 + 600
    assert not dead(pi.db)


# -- rows that others delete ---------------------------------------------------------------------


def test_failure_whose_row_others_deleted_or_marked_does_not_spin_and_blocks_no_entity(
    pi: Pi,
) -> None:
    entity = str(uuid.uuid4())
    pi.frontend.on_file = lambda _: Reply(500)
    deleted, marked = pi.poisoned(Reply(500), entity), pi.poisoned(Reply(500))
    file = pi.backend.end_call().seqs[-1]
    running = pi.agent()
    gone = {deleted, marked, file}
    wait_until(lambda: gone <= set(failures(pi.db)), what="the failures", state=running.log)
    pi.db.execute("UPDATE sync_outbox SET processed_at = now() WHERE id = %s", (marked,))
    pi.db.execute("DELETE FROM sync_outbox WHERE id IN (%s, %s)", (deleted, file))
    let_hours_pass(pi.db)
    asked = len(pi.frontend.requests)
    count = "SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()"
    # A session's numbers arrive with a delay of a second, and with its next statement: ours, too.
    began = time.monotonic()
    wait_until(lambda: time.monotonic() - began > 1.5)
    pi.db.value(count)
    wait_until(lambda: time.monotonic() - began > 3)
    before = pi.db.value(count)
    wait_until(lambda: time.monotonic() - began > 4.5)
    assert pi.db.value(count) - before < 20
    assert len(pi.frontend.requests) == asked
    pi.frontend.poison.clear()
    later = pi.backend.enqueue(entity_id=entity)
    pi.wait_entry(later)
    running.stop()
    pi.once()
    assert pi.frontend.seqs()[-1] == later and not gone & set(pi.frontend.seqs())
    assert failures(pi.db) == {} and dead(pi.db) == {}


# -- pruning -------------------------------------------------------------------------------------

HELD = """
import importlib, os, sys, time
directory, name = os.path.split(sys.argv[1])
sys.path.insert(0, directory)
serversync = importlib.import_module(name.removesuffix(".py"))
environ = dict(os.environ)
config = serversync.load_config(serversync.read_env_file(None, environ))
process = serversync.Process(environ)
process.install()
agent = serversync.Agent(config, process, lambda **_: "", False)
agent.hold()
house = agent.housekeeping
"""
# As often as the agent would without a pause; when it would have been due, and is again.
PRUNE = """
for _ in range({times}):
    house.close()  # it rests no more
    early, house.prune_due = house.prune_due, 0.0
    house.step(time.monotonic(), ())
    again = round(house.prune_due - time.monotonic())
    print(round(early - time.monotonic()), again)
    if again > 2:
        break
"""


def by_hand(agent: AgentFactory, script: str, **overrides: object) -> list[str]:
    """What is printed by a script that has an agent's turns in its hand."""
    done = subprocess.run(
        [str(REPOSITORY / PYTHON), "-c", HELD + script, str(REPOSITORY / PROGRAM)],
        env={"PATH": os.environ["PATH"], **agent.env(**overrides)},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout.split()


RECORD = """
import psycopg
def write():
    print("tried")
    raise psycopg.errors.DiskFull
agent.store.record([1], write)
print("stuck" if agent.store.stuck else "free")
"""
AGAIN = """
agent.session.close()
agent.hold()
print(len(agent.store.unwritten))
"""
BETWEEN = 'agent.session.run("update serversync.sender set epoch = epoch + 1")\n'


def test_a_result_that_could_not_be_recorded_is_thrown_away_after_another_sender(
    agent: AgentFactory,
) -> None:
    # It is kept, and nothing else is sent; by a new session of the same sender, too.
    assert by_hand(agent, RECORD + AGAIN) == ["tried", "stuck", "1"]
    assert by_hand(agent, RECORD + BETWEEN + AGAIN) == ["tried", "stuck", "0"]


def prune(agent: AgentFactory, times: int = 1, **overrides: object) -> tuple[int, int]:
    """Prune now; in how many seconds it would have been due, and is again."""
    *_, first, again = map(int, by_hand(agent, PRUNE.format(times=times), **overrides))
    return first, again


def test_pruning_takes_old_processed_rows_and_receipts_and_never_a_pending_one(pi: Pi) -> None:
    """Nor a dead letter, but its row. Chunks and clocks: test_replay.py, by the same statement."""
    pi.backend.enqueue()
    pi.once()
    old, letter, recent = (pi.backend.enqueue() for _ in range(3))
    pi.frontend.rejected[entity_of(pi.db, letter)] = "SCHEMA"
    pi.once(code=1)
    pending = pi.backend.enqueue()
    let_days_pass(pi.db, 4000, letter)
    pi.db.execute("UPDATE sync_outbox SET created_at = '2001-01-01' WHERE id = %s", (pending,))
    pi.db.execute("UPDATE serversync.dead_letters SET created_at = '2020-01-01'")
    pi.db.execute(
        "INSERT INTO serversync.deliveries (kind, first_seq, last_seq, entries, bytes, outcome,"
        " started_at, duration_ms) VALUES ('entries', %s, %s, 1, 1, 'old', '2020-01-01', 1)",
        (old, old),
    )
    rows = "SELECT id FROM sync_outbox ORDER BY id"
    # Not in the first five minutes; and where all is kept nothing happens.
    due, again = prune(pi.agent, SYNC_RETENTION_DAYS=0)
    assert 200 < due <= 300 and again <= 0 and len(pi.db.rows(rows)) == 5
    assert prune(pi.agent)[1] <= 2  # there may be more
    assert 86000 < prune(pi.agent, 6)[1] <= 86400  # and then once a day
    assert pi.db.rows(rows) == [(recent,), (pending,)] and list(dead(pi.db)) == [letter]
    # The old receipt was the last one written, but pruning goes by time.
    assert pi.db.rows("SELECT outcome, last_seq FROM serversync.deliveries") == [("sent", recent)]


def test_rows_of_types_that_are_kept_are_never_pruned_by_the_service_or_by_a_person(pi: Pi) -> None:
    keep: dict[str, Any] = {"SYNC_RETENTION_KEEP": "order, payment", "SYNC_RETENTION_DAYS": 7}
    kinds = ["order", "schedule", "payment", "schedule"]
    seqs = [pi.backend.enqueue(kind) for kind in kinds]
    pi.once()
    let_days_pass(pi.db, 40, seqs[-1])
    newest = pi.backend.enqueue()
    pi.once()
    prune(pi.agent, **keep)
    left = "SELECT id FROM sync_outbox ORDER BY id"
    assert [row[0] for row in pi.db.rows(left)] == [seqs[0], seqs[2], newest]
    assert "0 rows" in pi.agent.once("prune", **keep).stdout
    pi.once("prune", "--yes", **keep)
    assert [row[0] for row in pi.db.rows(left)] == [seqs[0], seqs[2], newest]


# -- a call that comes with something else -------------------------------------------------------

CALLED = """
def idle():
    return all(job.wait.until > serversync.time.monotonic() for job in agent.jobs)
while not idle():
    agent.turn()
step = house.step
def called(*args):
    step(*args)
    agent.session.run("notify serversync")
house.step = called
agent.turn()
print(idle())
"""


def test_a_notify_that_comes_with_the_answer_to_a_statement_is_heard_before_the_next_rest(
    agent: AgentFactory,
) -> None:
    """The connection has nothing more to read then: it would be heard with the next look."""
    assert by_hand(agent, CALLED) == ["False"]


# -- exit codes ----------------------------------------------------------------------------------


def test_once_ends_with_what_became_of_the_entries(pi: Pi) -> None:
    """A dead letter is said once."""
    refused = pi.poisoned(Reply(400, body={"error": "no"}))
    sent = pi.backend.enqueue()
    waits = pi.poisoned(Reply(500))
    sent_last = pi.backend.enqueue()
    pi.once(code=1)
    assert pi.frontend.seqs() == [sent, sent_last]
    assert dead(pi.db) == {refused: "BAD_REQUEST"}
    assert pi.db.pending() == list(failures(pi.db)) == [waits]
    pi.once(code=75)


def test_once_ends_with_69_on_a_database_that_is_not_the_backend_s(pi: Pi) -> None:
    """Or on none at all."""
    ended = pi.once(code=69, DATABASE_URL=pi.db.cluster.url("no_such_database"))
    assert "no_such_database" in ended.stderr and "Traceback" not in ended.stderr
    pi.db.execute("DROP TABLE sync_outbox")
    ended = pi.once(code=69)
    assert "sync_outbox" in ended.stderr
    assert pi.db.value("SELECT to_regnamespace('serversync')") is None


def test_once_ends_with_69_when_there_are_dead_letters_and_an_outage(pi: Pi) -> None:
    entity = "77777777-7777-4777-8777-777777777777"
    pi.frontend.on_entries = lambda request: (
        Reply(400, body={"error": "no"})
        if [entry["entityId"] for entry in request.entries] == [entity]
        else Reply(500)
        if request.entries
        else None
    )
    pi.backend.enqueue(entity_id=entity)
    pi.backend.enqueue_many(30)
    pi.once(code=69)
    assert list(dead(pi.db).values()) == ["BAD_REQUEST"]

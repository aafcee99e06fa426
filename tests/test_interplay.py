"""Where two things happen at once: entries and the file of their call, a late commit and a pass."""

from __future__ import annotations

import uuid

import pytest

from agent import AgentFactory
from backend import Backend
from frontend import Frontend, Reply, Request
from ledger import dead, failures, let_hours_pass
from pg import Database
from waiting import wait_until


def test_an_entry_of_the_call_whose_file_travels_waits_for_the_answer_and_undoes_nothing(
    agent: AgentFactory, frontend: Frontend, backend: Backend
) -> None:
    call = backend.end_call()
    other: list[int] = []

    def slow_answer(request: Request) -> Reply:
        transcript = {"callLogId": call.call_log_id, "uploadStatus": "local_only", "text": "hello"}
        backend.enqueue("recording", transcript, entity_id=call.recording_id)
        other.append(backend.enqueue())
        assert request.file
        # The frontend has the file by now, and is only slow to say so.
        return Reply(200, body={"fileUrl": frontend.file_url(request.file)}, store=True, delay=4)

    frontend.on_file = slow_answer
    assert agent.once().returncode == 0
    assert frontend.store[call.recording_id]["payload"]["text"] == "hello"
    assert frontend.playable(call.recording_id), "the transcript undid the upload"
    log = frontend.log
    file = next(i for i, item in enumerate(log) if item[0] == "file")
    late = {*range(call.seqs[-1] + 1, other[0] + 2)} - set(other)
    transcript_at = next(i for i, item in enumerate(log) if item[0] == "entry" and item[2] in late)
    assert file < transcript_at
    finished = frontend.of_kind("file")[0].finished
    overtaking = next(r for r in frontend.of_kind("entries") if other[0] in seqs(r))
    assert finished and overtaking.started < finished, "another call's entry waited for the file"


def seqs(request: Request) -> list[int]:
    return [entry["seq"] for entry in request.entries or []]


def test_an_entry_that_becomes_visible_behind_the_pass_is_not_overtaken_by_a_later_one_of_its_call(
    agent: AgentFactory, frontend: Frontend, backend: Backend, db: Database
) -> None:
    assert agent.once().returncode == 0
    call, recording = str(uuid.uuid4()), str(uuid.uuid4())
    with db.connect(autocommit=False) as late:
        payload = {"callLogId": call, "text": "old"}
        first = backend.enqueue("recording", payload, recording, connection=late)
        for _ in range(3):
            backend.enqueue()
        last: list[int] = []

        def commit_behind_the_pass(_: Request) -> None:
            if not last:
                late.commit()
                payload = {"callLogId": call, "text": "new"}
                last.append(backend.enqueue("recording", payload, recording))

        frontend.on_entries = commit_behind_the_pass
        assert agent.once(SYNC_BATCH_SIZE=1).returncode == 0
    order = frontend.seqs()
    assert order.index(first) < order.index(last[0])
    assert frontend.store[recording]["payload"]["text"] == "new"


def test_a_reload_while_a_result_cannot_be_recorded_is_done_and_does_not_spin(
    agent: AgentFactory, frontend: Frontend, backend: Backend, db: Database
) -> None:
    assert agent.once().returncode == 0
    with db.admin() as admin:
        admin.execute(
            "create function no() returns trigger language plpgsql as $$ begin "
            "raise exception 'disk full' using errcode = '53100'; end $$"
        )
        admin.execute(
            "create trigger no before update on sync_outbox for each row execute function no()"
        )
    seq = backend.enqueue()
    running = agent()
    running.wait_log("cannot be recorded")
    rollbacks = "select xact_rollback from pg_stat_database where datname = current_database()"
    before = db.value(rollbacks)
    running.hup()
    running.wait_log("the configuration was read again")
    running.hup()
    wait_until(lambda: len(running.lines("read again")) == 2, what="the second reload")
    assert db.value(rollbacks) - before < 50, "a busy loop"
    with db.admin() as admin:
        admin.execute("drop trigger no on sync_outbox")
    wait_until(lambda: not db.pending(), 60, what="the result to be recorded", state=running.log)
    assert frontend.seqs() == [seq], "it was sent again"
    assert not failures(db)


@pytest.mark.parametrize("when", ["infinity", "-infinity", "4000-01-01 BC"])
def test_an_entry_of_an_odd_time_blocks_nothing(
    agent: AgentFactory, backend: Backend, db: Database, when: str
) -> None:
    seq = backend.enqueue()
    db.execute("update sync_outbox set created_at = %s where id = %s", (when, seq))
    backend.enqueue()
    assert agent.once().returncode == 0
    assert not db.pending()


@pytest.mark.slow
def test_an_entry_that_postgresql_cannot_write_out_is_set_aside_and_blocks_nothing(
    agent: AgentFactory, frontend: Frontend, backend: Backend, db: Database
) -> None:
    seq = backend.enqueue()
    # Six characters each in JSON: more than PostgreSQL's limit of 1 GB for a text.
    db.execute(
        "update sync_outbox set payload = jsonb_build_object('x', repeat(chr(1), 190000000)) "
        "where id = %s",
        (seq,),
    )
    other = backend.enqueue()
    result = agent.once(timeout=120)
    assert frontend.seqs() == [other], result.stderr
    code, _, attempts = failures(db)[seq]
    assert (code, attempts) == ("ENTRY_UNREADABLE", 0)
    assert result.returncode == 75


def test_entries_that_are_rejected_rightly_do_not_hold_their_type_back(
    agent: AgentFactory, frontend: Frontend, backend: Backend, db: Database
) -> None:
    bad = {str(uuid.uuid4()) for _ in range(11)}
    for entity_id in sorted(bad):
        backend.enqueue(entity_id=entity_id)
        frontend.poison[entity_id] = Reply(400, body={"error": "bad"})
    good = [backend.enqueue() for _ in range(5)]
    for _ in range(3):
        agent.once()
        let_hours_pass(db, 1)
    assert set(frontend.seqs()) == set(good)
    assert len(dead(db)) == len(bad)
    assert not db.pending()


def test_an_uploaded_recording_without_its_row_keeps_its_player(
    agent: AgentFactory, frontend: Frontend, backend: Backend, db: Database
) -> None:
    call = backend.end_call()
    db.execute("delete from recordings")
    assert agent.once().returncode == 0
    later = {"callLogId": call.call_log_id, "uploadStatus": "local_only"}
    backend.enqueue("recording", later, entity_id=call.recording_id)
    assert agent.once().returncode == 0
    assert frontend.playable(call.recording_id)


def test_a_mark_that_changes_nothing_is_said_and_nothing_is_sent_twice(
    agent: AgentFactory, frontend: Frontend, backend: Backend, db: Database
) -> None:
    assert agent.once().returncode == 0
    with db.admin() as admin:
        admin.execute(
            "create function no() returns trigger language plpgsql as $$ begin return null; end $$"
        )
        admin.execute(
            "create trigger no before update on sync_outbox for each row execute function no()"
        )
    seq = backend.enqueue()
    running = agent()
    running.wait_log("marking an entry in sync_outbox changes nothing")
    with db.admin() as admin:
        admin.execute("drop trigger no on sync_outbox")
    wait_until(lambda: not db.pending(), 60, what="the mark", state=running.log)
    assert frontend.seqs() == [seq]


def test_a_right_that_is_missing_after_a_reconnect_is_waited_for(
    agent: AgentFactory, frontend: Frontend, backend: Backend, db: Database
) -> None:
    running = agent()
    running.wait_sentence("idle")
    db.execute("revoke select on system_settings from voicebot")
    end = "select pg_terminate_backend(pid) from pg_stat_activity where application_name = %s"
    with db.admin() as admin:
        admin.execute(end, ("serversync",))
    running.wait_log("lacks select on system_settings")
    db.execute("grant select on system_settings to voicebot")
    seq = backend.enqueue()
    frontend.wait(lambda: seq in frontend.seqs(), 60, "the entry")
    assert running.running

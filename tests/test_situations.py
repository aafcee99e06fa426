"""Rows of the README's "What happens when…" that belong to no single part of the program."""

from pathlib import Path

import pytest

from agent import AgentFactory
from backend import Backend
from frontend import Frontend
from pg import Database
from waiting import wait_until

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


def test_a_result_that_cannot_be_recorded_is_kept_and_nothing_is_sent_before_it_is(
    agent: AgentFactory, backend: Backend, frontend: Frontend, db: Database
) -> None:
    backend.enqueue()
    running = agent()
    wait_until(lambda: not db.pending(), what="the first entry")
    db.execute(FULL_DISK)

    unrecorded = backend.enqueue()
    frontend.wait(lambda: unrecorded in frontend.seqs(), what="the entry that cannot be recorded")
    running.wait_log("a result cannot be recorded, nothing else is sent")
    call = backend.end_call()
    tries = "select last_value from tries_to_record"
    wait_until(lambda: db.value(tries) >= 2, what="more tries to record it", timeout=60)
    assert db.pending() == [unrecorded, *call.seqs]
    assert len(frontend.of_kind("entries")) == 2
    assert not frontend.of_kind("file")

    db.execute("drop trigger full_disk on serversync.deliveries")
    wait_until(lambda: not db.pending(), timeout=60, what="everything")
    assert frontend.seqs().count(unrecorded) == 1
    assert frontend.files[call.call_log_id].sha256 == call.sha256


@pytest.mark.parametrize("shift", ["-20y", "+20y"])
def test_an_agent_with_a_wrong_clock_delivers_and_deletes(
    agent: AgentFactory,
    backend: Backend,
    frontend: Frontend,
    db: Database,
    libfaketime: Path,
    shift: str,
) -> None:
    call = backend.end_call()
    running = agent(
        LD_PRELOAD=libfaketime,
        FAKETIME=shift,
        FAKETIME_DONT_FAKE_MONOTONIC=1,
        SYNC_DELETE_AFTER_SEC=1,
    )

    wait_until(lambda: not call.directory.exists(), what="the deletion", state=running.log)
    assert frontend.files[call.call_log_id].sha256 == call.sha256
    assert not db.pending()
    assert backend.upload_status(call)[0] == "uploaded"


def test_a_retry_that_is_due_in_years_counts_as_due_at_once(
    agent: AgentFactory, backend: Backend, frontend: Frontend, db: Database
) -> None:
    call = backend.end_call(recording=False, audio=False)
    late = backend.end_call(meta=False)
    assert agent.once().returncode == 75
    assert db.value("select count(*) from serversync.failures") == 1
    backend.write_meta(late)
    # The database's clock was years ahead when this was written, and has been set right since.
    db.execute("update serversync.failures set next_attempt_at = now() + interval '20 years'")

    assert agent.once().returncode == 0
    assert frontend.files[late.call_log_id].sha256 == late.sha256
    assert frontend.received(call.call_log_id)


def test_a_power_cut_in_the_middle_of_an_upload_loses_nothing(
    agent: AgentFactory, backend: Backend, frontend: Frontend, db: Database
) -> None:
    call = backend.end_call(seconds=20)
    frontend.read_rate = 100_000
    cut = agent()
    frontend.wait(lambda: frontend.of_kind("file")[0].received > 100_000, what="half an upload")
    cut.kill()
    db.cluster.restart("immediate")

    assert call.wav.exists()
    assert db.pending() == [call.seq("recording_file")]
    assert backend.upload_status(call)[0] == "local_only"
    frontend.read_rate = None
    again = agent()
    wait_until(lambda: not db.pending(), what="the upload", state=again.log)
    assert frontend.files[call.call_log_id].sha256 == call.sha256
    assert frontend.files[call.call_log_id].count == 1
    assert sorted(frontend.seqs()) == call.seqs[:-1]
    assert backend.upload_status(call)[0] == "uploaded"
    wait_until(lambda: not call.directory.exists(), what="the deletion", state=again.log)

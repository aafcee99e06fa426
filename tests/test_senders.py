"""One sender a database: two agents, standbys that take over, sessions that end in mid-work."""

import time
from collections.abc import Callable
from itertools import pairwise

import pytest

from agent import Agent, AgentFactory, NotifySocket
from backend import Backend, Call
from frontend import Frontend, Reply, Request
from ledger import uploads
from pg import Database
from proxy import Proxy
from waiting import wait_until

SENDER = """
    SELECT a.pid FROM pg_stat_activity a JOIN pg_locks l ON l.pid = a.pid
    WHERE l.locktype = 'advisory' AND l.granted AND a.datname = current_database()
      AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
"""
SESSIONS = """
    SELECT count(*) FROM pg_stat_activity
    WHERE application_name = 'serversync' AND datname = current_database()
"""


def sender(db: Database) -> int | None:
    """The server's process that holds the lock."""
    pid: int | None = db.value(SENDER)
    return pid


def end_session(db: Database, pid: int | None) -> None:
    with db.admin() as admin:
        assert admin.execute("SELECT pg_terminate_backend(%s)", (pid,)).fetchone() == (True,)
    wait_until(lambda: sender(db) != pid, what="the end of the session")


def start_pair(agent: AgentFactory) -> tuple[Agent, Agent]:
    """A sender and a standby."""
    first = agent()
    first.wait_sentence("idle")
    second = agent()
    second.wait_log("standby")
    return first, second


def upload_under_way(frontend: Frontend, backend: Backend, seconds: float = 60) -> Call:
    """A call whose recording takes a while, and is on its way."""
    frontend.read_rate = 400_000
    call = backend.end_call(seconds=seconds)
    frontend.wait(lambda: frontend.of_kind("file")[-1].received > 100_000, what="an upload")
    return call


def assert_delivered(db: Database, backend: Backend, frontend: Frontend, call: Call) -> None:
    """The final state is right on both sides, whoever brought it about."""
    frontend.wait(lambda: not db.pending() and not uploads(db), what="everything done")
    assert frontend.playable(call.recording_id)
    assert frontend.files[call.call_log_id].sha256 == call.sha256
    status, url = backend.upload_status(call)
    assert status == "uploaded" and url == frontend.file_url(frontend.files[call.call_log_id])
    assert not call.directory.exists()


# -- without kills -------------------------------------------------------------------------------


def test_two_agents_on_one_database_send_each_entry_once(
    agent: AgentFactory, backend: Backend, db: Database, frontend: Frontend
) -> None:
    running = [agent(SYNC_BATCH_SIZE=5, SYNC_POLL_INTERVAL_SEC=0.2) for _ in range(2)]
    calls = [backend.end_call(seconds=0.2) for _ in range(8)]
    backend.enqueue_many(200)
    calls += [backend.end_call(seconds=0.2) for _ in range(8)]
    frontend.wait(lambda: not db.pending() and not uploads(db), what="everything sent")
    seqs = frontend.seqs()
    assert len(seqs) == len(set(seqs)) == 200 + 4 * len(calls)
    assert sorted(file.call_log_id for file in frontend.uploads) == sorted(
        call.call_log_id for call in calls
    )
    assert sum(bool(each.lines("standby")) for each in running) == 1
    assert db.value("SELECT epoch FROM serversync.sender") == 1


def test_agents_of_two_databases_on_one_server_do_not_hinder_each_other(
    agent: AgentFactory, backend: Backend, db: Database, frontend: Frontend
) -> None:
    agent().wait_sentence("idle")
    other = Database(db.cluster)
    try:
        second = agent(DATABASE_URL=other.url)
        second.wait_sentence("idle")
        assert not second.lines("standby")
        second.close()
    finally:
        other.drop()


# -- the sender dies -----------------------------------------------------------------------------


def test_killed_sender_is_replaced_by_the_standby_within_five_seconds(
    agent: AgentFactory,
    backend: Backend,
    db: Database,
    frontend: Frontend,
    record_property: Callable[[str, object], None],
) -> None:
    first, second = start_pair(agent)
    first.kill()
    killed = time.monotonic()
    seq = backend.enqueue()
    frontend.wait(lambda: seq in frontend.seqs(), 10, "an entry by the standby")
    # Promised are five seconds; the machine may be busy with other tests.
    record_property("seconds", round(time.monotonic() - killed, 2))
    assert second.lines("the lock is ours")
    call = backend.end_call()
    assert_delivered(db, backend, frontend, call)


def test_stopped_sender_hands_over_to_the_standby(
    agent: AgentFactory, backend: Backend, frontend: Frontend
) -> None:
    first, _ = start_pair(agent)
    assert first.stop()[0] == 0
    seq = backend.enqueue()
    frontend.wait(lambda: seq in frontend.seqs(), 10, "an entry by the standby")


def test_sender_killed_in_the_middle_of_an_upload_leaves_all_to_the_standby(
    agent: AgentFactory, backend: Backend, db: Database, frontend: Frontend
) -> None:
    first, _ = start_pair(agent)
    call = upload_under_way(frontend, backend)
    first.kill()
    frontend.read_rate = None
    assert_delivered(db, backend, frontend, call)
    assert len(frontend.uploads) == 1


# -- the sender's session ends ------------------------------------------------------------------


def test_session_that_ends_in_the_middle_of_an_upload_costs_no_second_upload(
    agent: AgentFactory, backend: Backend, db: Database, frontend: Frontend
) -> None:
    running = agent()
    running.wait_sentence("idle")
    call = upload_under_way(frontend, backend)
    end_session(db, sender(db))
    assert_delivered(db, backend, frontend, call)
    assert len(frontend.of_kind("file")) == 1
    assert not running.lines("another sender came between")
    assert db.value("SELECT count(*) FROM serversync.deliveries WHERE kind = 'file'") == 1
    assert db.value(SESSIONS) == 1


def test_session_that_ends_in_the_middle_of_a_request_costs_no_second_request(
    agent: AgentFactory, backend: Backend, db: Database, frontend: Frontend
) -> None:
    frontend.on_entries = lambda request: Reply(body={"ok": True}, store=True, delay=1.5)
    agent().wait_sentence("idle")
    call = backend.end_call(recording=False)
    frontend.wait(lambda: frontend.of_kind("entries"))
    end_session(db, sender(db))
    frontend.wait(lambda: not db.pending())
    assert frontend.seqs() == call.seqs


def test_result_of_a_sender_that_lost_its_lock_in_the_middle_of_an_upload_is_thrown_away(
    agent: AgentFactory, backend: Backend, db: Database, frontend: Frontend
) -> None:
    first, second = start_pair(agent)
    call = upload_under_way(frontend, backend)

    def late(request: Request) -> Reply | None:
        if request is frontend.of_kind("file")[0]:
            return None
        assert request.file is not None
        url = frontend.file_url(request.file)
        return Reply(body={"fileUrl": url}, store=True, delay=3)

    # The second one uploads the same file, and the first one's answer comes before the second's.
    frontend.on_file = late
    end_session(db, sender(db))
    wait_until(lambda: db.value("SELECT epoch FROM serversync.sender") == 2, what="the standby")
    frontend.wait(lambda: len(frontend.of_kind("file")) == 2, what="the standby's upload")
    frontend.wait(lambda: frontend.of_kind("file")[0].finished, what="the first one's answer")
    # The first one may neither mark nor delete: the new sender still needs the file.
    first.wait_log("standby")
    assert call.wav.exists() and call.meta.exists()
    assert call.seq("recording_file") in db.pending()
    assert backend.upload_status(call) == ("local_only", None)

    frontend.read_rate = frontend.on_file = None
    assert_delivered(db, backend, frontend, call)
    assert receipts_of_files(db) == 1
    # When the lock is back with the first one, its old result is worth nothing.
    second.stop()
    first.wait_log("another sender came between")
    later = backend.end_call()
    assert_delivered(db, backend, frontend, later)
    assert_delivered(db, backend, frontend, call)
    assert receipts_of_files(db) == 2
    assert len(frontend.uploads) == 3


def receipts_of_files(db: Database) -> int:
    count: int = db.value("SELECT count(*) FROM serversync.deliveries WHERE kind = 'file'")
    return count


def test_failure_of_a_sender_that_lost_its_lock_turns_no_state_back(
    agent: AgentFactory, backend: Backend, db: Database, frontend: Frontend
) -> None:
    first, second = start_pair(agent)
    # The first one will get a rejection for what the second one delivers.
    answers = iter([Reply(400, body={"error": "no"}, delay=5)])
    frontend.on_entries = lambda request: next(answers, None)
    seq = backend.enqueue()
    frontend.wait(lambda: frontend.of_kind("entries"))
    end_session(db, sender(db))
    frontend.wait(lambda: seq in frontend.seqs(), what="the entry, by the standby")
    processed = "SELECT processed_at FROM sync_outbox WHERE id = %s"
    marked = wait_until(lambda: db.value(processed, (seq,)), what="its mark")
    frontend.wait(lambda: frontend.requests[0].finished, what="the rejection")
    first.wait_log("standby")
    second.stop()
    later = backend.enqueue()
    frontend.wait(lambda: later in frontend.seqs(), what="an entry by the first one again")
    assert db.value(processed, (seq,)) == marked
    assert db.value("SELECT count(*) FROM serversync.dead_letters") == 0
    assert db.value("SELECT count(*) FROM serversync.failures") == 0


# -- a connection that is half-open --------------------------------------------------------------


def test_connection_that_falls_silent_in_the_middle_of_work_is_replaced_within_a_minute(
    agent: AgentFactory, backend: Backend, db: Database, frontend: Frontend, proxy: Proxy
) -> None:
    running = agent(DATABASE_URL=db.url_through(proxy.port))
    running.wait_sentence("idle")
    old = sender(db)
    frontend.on_entries = lambda request: Reply(body={"ok": True}, store=True, delay=1)
    call = backend.end_call()
    frontend.wait(lambda: frontend.of_kind("entries"))
    silent = time.monotonic()
    proxy.silence_open()
    frontend.on_entries = None
    frontend.wait(lambda: frontend.playable(call.recording_id), 60, "work going on")
    assert time.monotonic() - silent < 60
    assert_delivered(db, backend, frontend, call)
    # Neither did a half-open session keep the lock, nor was a confirmed request sent again.
    assert sender(db) != old
    assert sorted(frontend.seqs()) == call.seqs[:4]
    assert db.value(SESSIONS) == 1


def test_connection_that_falls_silent_during_an_upload_costs_no_second_upload(
    agent: AgentFactory, backend: Backend, db: Database, frontend: Frontend, proxy: Proxy
) -> None:
    agent(DATABASE_URL=db.url_through(proxy.port)).wait_sentence("idle")
    call = upload_under_way(frontend, backend)
    silent = time.monotonic()
    proxy.silence_open()
    frontend.wait(lambda: frontend.uploads, 60)
    frontend.wait(lambda: not db.pending(), 60, "work going on")
    assert time.monotonic() - silent < 60
    assert_delivered(db, backend, frontend, call)
    assert len(frontend.of_kind("file")) == 1


@pytest.mark.slow
def test_connection_that_falls_silent_while_idle_is_replaced_within_a_minute_and_pings_go_on(
    agent: AgentFactory,
    backend: Backend,
    db: Database,
    frontend: Frontend,
    proxy: Proxy,
    notify: NotifySocket,
    record_property: Callable[[str, object], None],
) -> None:
    watchdog = 41.0  # the shortest one that is accepted
    running = agent(
        notify=notify,
        WATCHDOG_USEC=int(watchdog * 1e6),
        SYNC_TIMEOUT_SEC=10,
        DATABASE_URL=db.url_through(proxy.port),
    )
    running.wait_sentence("idle")
    silent = time.monotonic()
    proxy.silence_open()
    call = backend.end_call()  # its NOTIFY is lost
    frontend.wait(lambda: frontend.playable(call.recording_id), 65, "work going on")
    record_property("seconds", round(time.monotonic() - silent, 1))
    assert_delivered(db, backend, frontend, call)
    pings = [when for when, _ in notify.values("WATCHDOG")]
    assert len(pings) >= 3
    assert max(after - before for before, after in pairwise(pings)) < watchdog * 0.75

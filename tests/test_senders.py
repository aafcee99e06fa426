"""One sender a database: two agents, standbys that take over, sessions that end in mid-work."""

import signal
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from agent import Agent, AgentFactory, NotifySocket
from backend import Call
from frontend import Reply, Request
from ledger import dead_letters, receipts, uploads, waiting
from pg import Database
from pi import Pi
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


def start_pair(agent: AgentFactory, **settings: Any) -> tuple[Agent, Agent]:
    """A sender with these settings, and a standby."""
    first = agent(SYNC_DEVICE_ID="first", **settings)
    first.wait_sentence("all delivered")
    second = agent(SYNC_DEVICE_ID="second")
    second.wait_log("standby")
    return first, second


def take_over(db: Database, proxy: Proxy) -> None:
    """Ends the sender's session, and keeps it out (it is behind the proxy) until the standby has
    the lock: it would be back at once."""
    proxy.refuse()
    end_session(db, sender(db))
    wait_until(lambda: db.value("SELECT epoch FROM serversync.sender") == 2, what="the standby")
    proxy.resume()


class Patience:
    """A hook that answers a device's requests not before it is told to."""

    def __init__(self, reply: Reply | None = None) -> None:
        self.reply = reply  # what the first request gets
        self.told: set[str] = set()

    def __call__(self, request: Request) -> Reply | None:
        wait_until(lambda: device(request) in self.told, 60, "the test to let it go on")
        reply, self.reply = self.reply, None
        return reply


def device(request: Request) -> str:
    return str(request.headers["X-Serversync-Device"])


def upload_under_way(pi: Pi, seconds: float = 60) -> Call:
    """A call whose recording takes a while, and is on its way."""
    pi.frontend.read_rate = 400_000
    call = pi.backend.end_call(seconds=seconds)
    pi.frontend.wait(lambda: pi.frontend.of_kind("file")[-1].received > 100_000, what="an upload")
    return call


def assert_delivered(pi: Pi, call: Call) -> None:
    """The final state is right on both sides, whoever brought it about."""
    pi.frontend.wait(lambda: not pi.db.pending() and not uploads(pi.db), what="everything done")
    assert pi.frontend.playable(call.recording_id)
    assert pi.frontend.files[call.call_log_id].sha256 == call.sha256
    status, url = pi.backend.upload_status(call)
    assert status == "uploaded" and url == pi.frontend.file_url(pi.frontend.files[call.call_log_id])
    assert not call.directory.exists()


# -- without kills -------------------------------------------------------------------------------


def test_two_agents_on_one_database_send_each_entry_once(pi: Pi) -> None:
    running = [pi.agent(SYNC_BATCH_SIZE=5, SYNC_POLL_INTERVAL_SEC=0.2) for _ in range(2)]
    calls = [pi.backend.end_call(seconds=0.2) for _ in range(8)]
    pi.backend.enqueue_many(200)
    calls += [pi.backend.end_call(seconds=0.2) for _ in range(8)]
    pi.frontend.wait(lambda: not pi.db.pending() and not uploads(pi.db), what="everything sent")
    seqs = pi.frontend.seqs()
    assert len(seqs) == len(set(seqs)) == 200 + 4 * len(calls)
    assert sorted(file.call_log_id for file in pi.frontend.uploads) == sorted(
        call.call_log_id for call in calls
    )
    assert sum(bool(each.lines("standby")) for each in running) == 1
    assert pi.db.value("SELECT epoch FROM serversync.sender") == 1


# -- the sender dies -----------------------------------------------------------------------------


def test_killed_sender_is_replaced_by_the_standby_within_five_seconds(
    pi: Pi, record_property: Callable[[str, object], None]
) -> None:
    first, second = start_pair(pi.agent)
    call = upload_under_way(pi)
    first.kill()
    pi.frontend.read_rate = None
    killed = time.monotonic()
    seq = pi.backend.enqueue()
    pi.wait_entry(seq)
    # Promised are five seconds; the machine may be busy with other tests.
    record_property("seconds", round(time.monotonic() - killed, 2))
    assert second.lines("the lock is ours")
    assert_delivered(pi, call)
    assert len(pi.frontend.uploads) == 1


# -- the sender's session ends ------------------------------------------------------------------


def test_session_that_ends_in_the_middle_of_an_upload_costs_no_second_upload(pi: Pi) -> None:
    running = pi.idle()
    call = upload_under_way(pi)
    end_session(pi.db, sender(pi.db))
    assert_delivered(pi, call)
    assert len(pi.frontend.of_kind("file")) == 1
    assert not running.lines("another sender came between")
    assert receipts_of_files(pi.db) == 1
    assert pi.db.value(SESSIONS) == 1


def test_session_that_ends_in_the_middle_of_a_request_costs_no_second_request(pi: Pi) -> None:
    pi.frontend.on_entries = lambda request: Reply(body={"ok": True}, store=True, delay=1.5)
    pi.idle()
    call = pi.backend.end_call(recording=False)
    pi.frontend.wait(lambda: pi.frontend.of_kind("entries"))
    end_session(pi.db, sender(pi.db))
    pi.wait_delivered()
    assert pi.frontend.seqs() == call.seqs


def test_result_of_a_sender_that_lost_its_lock_in_the_middle_of_an_upload_is_thrown_away(
    pi: Pi, proxy: Proxy
) -> None:
    first, second = start_pair(pi.agent, DATABASE_URL=pi.db.url_through(proxy.port))
    # The second one uploads the same file, and the first one's answer comes in the middle of that.
    pi.frontend.on_file = patience = Patience()
    call = pi.backend.end_call()
    pi.frontend.wait(lambda: pi.frontend.of_kind("file")[0].file, what="an upload")
    take_over(pi.db, proxy)
    pi.frontend.wait(lambda: pi.frontend.of_kind("file")[1].file, what="the standby's upload")
    patience.told.add("first")
    pi.frontend.wait(lambda: pi.frontend.of_kind("file")[0].finished, what="the first one's answer")
    # The first one may neither mark nor delete: the new sender still needs the file.
    first.wait_log("standby")
    assert call.wav.exists() and call.meta.exists()
    assert call.seq("recording_file") in pi.db.pending()
    assert pi.backend.upload_status(call) == ("local_only", None)
    # Nor when it has its lock again: nobody knows what the other one did.
    second.kill()
    patience.told.add("second")
    first.wait_log("another sender came between")
    assert_delivered(pi, call)
    assert receipts_of_files(pi.db) == 1
    assert len([r for r in pi.frontend.of_kind("file") if device(r) == "first"]) == 2


def receipts_of_files(db: Database) -> int:
    count: int = db.value("SELECT count(*) FROM serversync.deliveries WHERE kind = 'file'")
    return count


@pytest.mark.parametrize("answer", [Reply(500), Reply(body={"ok": True}), Reply(reset=True)])
def test_sender_that_lost_its_lock_sends_nothing_more_and_its_result_turns_no_state_back(
    pi: Pi, proxy: Proxy, answer: Reply
) -> None:
    first, second = start_pair(pi.agent, DATABASE_URL=pi.db.url_through(proxy.port))
    seqs = [pi.backend.enqueue()]
    pi.wait_entry(seqs[0])
    pi.frontend.requests.clear()  # the connection stays
    # The first one gets another answer for what the second one delivers.
    pi.frontend.on_entries = patience = Patience(answer)
    seqs += pi.backend.enqueue_many(2)
    pi.frontend.wait(lambda: pi.frontend.of_kind("entries"))
    if answer.reset:  # by itself it would only say that the connection was stale
        first.signal(signal.SIGSTOP)
    take_over(pi.db, proxy)
    patience.told.add("first")
    pi.frontend.wait(lambda: pi.frontend.requests[0].finished, what="that answer")
    patience.told.add("second")
    pi.frontend.wait(lambda: pi.frontend.seqs() == seqs, what="the entries, by the standby")
    marks = "SELECT id, processed_at FROM sync_outbox WHERE processed_at IS NOT NULL ORDER BY id"
    marked = wait_until(lambda: len(rows := pi.db.rows(marks)) == 3 and rows, what="their marks")
    first.signal(signal.SIGCONT)
    first.wait_log("standby")
    free = time.monotonic()
    second.stop()
    later = pi.backend.enqueue()
    pi.wait_entry(later)
    # No question whether the frontend lives, and no smaller batch, before it had its lock again.
    again = [request for request in pi.frontend.requests[1:] if device(request) == "first"]
    assert min(request.started for request in again) > free
    assert pi.frontend.seqs() == [*seqs, later]
    assert pi.db.rows(marks)[:3] == marked
    assert not waiting(pi.db) and not dead_letters(pi.db)
    wait_until(lambda: len(receipts(pi.db)) == 3, what="one receipt of each request")


def test_sender_that_was_frozen_in_the_middle_of_a_body_and_is_told_to_stop_sends_nothing_more(
    pi: Pi, proxy: Proxy
) -> None:
    first, _ = start_pair(pi.agent, DATABASE_URL=pi.db.url_through(proxy.port))
    pi.frontend.read_rate = 100_000
    large = "update sync_outbox set payload = payload || jsonb_build_object('text', %s::text)"
    with pi.db.connect(autocommit=False) as connection:
        call = pi.backend.end_call(seconds=0.01, connection=connection)
        connection.execute(f"{large} where entity_type = 'recording'", ("x" * 7_500_000,))
    pi.frontend.wait(lambda: pi.frontend.of_kind("entries")[-1].received > 10_000)
    first.signal(signal.SIGSTOP)
    take_over(pi.db, proxy)
    pi.frontend.read_rate = None
    assert_delivered(pi, call)
    first.signal(signal.SIGTERM)
    first.signal(signal.SIGCONT)
    first.wait()
    pi.frontend.wait(lambda: all(request.finished for request in pi.frontend.requests))
    assert pi.frontend.playable(call.recording_id)


# -- a connection that is half-open --------------------------------------------------------------


def test_an_answer_that_comes_after_a_move_to_another_database_concerns_none_of_its_entries(
    pi: Pi,
) -> None:
    running = pi.idle()
    told = threading.Event()

    def hook(request: Request) -> Reply | None:
        if told.is_set() or not request.entries:
            return None
        told.wait(20)
        return Reply(400, {}, {"error": "not like this"})

    pi.frontend.on_entries = hook
    old = pi.backend.enqueue()
    second = Database(pi.db.cluster)
    try:
        pi.frontend.wait(lambda: pi.frontend.of_kind("entries"), what="a request")
        second.execute(
            "insert into sync_outbox (entity_type, entity_id, payload)"
            " select 'schedule', gen_random_uuid(), '{}' from generate_series(1, 3)"
        )
        running.reload(pi.agent.env(DATABASE_URL=second.url))
        running.wait_log("another sender came between")
        told.set()
        pi.frontend.wait(lambda: not second.pending(), what="all of the other database")
        assert pi.frontend.seqs() == [1, 2, 3] and not dead_letters(second)
        assert pi.db.pending() == [old] and pi.db.value(SESSIONS) == 0
        running.close()
    finally:
        told.set()
        second.drop()


def test_connection_that_falls_silent_during_an_upload_costs_no_second_upload(
    pi: Pi, proxy: Proxy
) -> None:
    """Nor a second request of entries: its metadata went before."""
    pi.agent(DATABASE_URL=pi.db.url_through(proxy.port)).wait_sentence("all delivered")
    old = sender(pi.db)
    call = upload_under_way(pi)
    silent = time.monotonic()
    proxy.silence_open()
    pi.frontend.wait(lambda: pi.frontend.uploads, 60)
    pi.wait_delivered(60)
    assert time.monotonic() - silent < 60
    assert_delivered(pi, call)
    assert len(pi.frontend.of_kind("file")) == 1
    assert pi.frontend.seqs() == call.seqs[:4]
    # No half-open session kept the lock.
    assert sender(pi.db) != old and pi.db.value(SESSIONS) == 1


@pytest.mark.slow
def test_connection_that_falls_silent_while_idle_is_replaced_within_a_minute_and_pings_go_on(
    pi: Pi,
    proxy: Proxy,
    notify: NotifySocket,
    record_property: Callable[[str, object], None],
) -> None:
    watchdog = 12.0  # shorter than the database's deadline
    running = pi.agent(
        notify=notify,
        WATCHDOG_USEC=int(watchdog * 1e6),
        DATABASE_URL=pi.db.url_through(proxy.port),
    )
    running.wait_sentence("all delivered")
    silent = time.monotonic()
    proxy.silence_open()
    call = pi.backend.end_call()  # its NOTIFY is lost
    pi.frontend.wait(lambda: pi.frontend.playable(call.recording_id), 65, "work going on")
    record_property("seconds", round(time.monotonic() - silent, 1))
    assert_delivered(pi, call)
    pings = [when for when, _ in notify.values("WATCHDOG")]
    assert len(pings) >= 3
    assert max(after - before for before, after in pairwise(pings)) < watchdog * 0.75

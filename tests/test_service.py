"""The agent as a service: waking up, notifying systemd, stopping, reloading, reconnecting."""

import contextlib
import json
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from agent import Agent, NotifySocket
from frontend import Frontend, Reply, Request
from ledger import hold, uploads, waiting
from machine import in_mounts, needs_root
from pg import Database
from pi import Pi
from proxy import Proxy, blackhole
from waiting import wait_until

WATCHDOG_SEC = 6.0  # the unit has 90; shorter than every deadline
WATCHDOG: dict[str, Any] = {"WATCHDOG_USEC": int(WATCHDOG_SEC * 1e6)}
# Promised are two seconds; the machine may be busy with other tests.
STOP_WITHIN = 4.0
KINDS = pytest.mark.parametrize("kind", ["entries", "file"])


def set_interval(db: Database, value: str) -> None:
    """Set system_settings.extra.syncIntervalSec to some JSON, and let the agent look."""
    db.execute(
        "UPDATE system_settings SET extra = jsonb_build_object('syncIntervalSec', %s::jsonb)",
        (value,),
    )
    db.execute("NOTIFY serversync")


# -- waking up -----------------------------------------------------------------------------------


def test_call_that_ends_is_on_the_frontend_within_two_seconds(pi: Pi) -> None:
    pi.idle()
    call = pi.backend.end_call()
    pi.frontend.wait(lambda: pi.frontend.playable(call.recording_id), 2, "the whole call")
    json_seqs = [seq for seq in call.seqs if seq != call.seq("recording_file")]
    assert pi.frontend.seqs() == json_seqs
    assert pi.frontend.files[call.call_log_id].sha256 == call.sha256


def test_stopped_agent_sends_nothing_and_catches_up_oldest_first_when_started_again(pi: Pi) -> None:
    running = pi.agent()
    pi.backend.end_call(recording=False)
    pi.wait_delivered()
    running.stop()
    before = len(pi.frontend.requests)

    first, last = pi.backend.enqueue_many(120)
    call = pi.backend.end_call()
    assert len(pi.frontend.requests) == before
    assert pi.db.pending() == [*range(first, last + 1), *call.seqs]

    pi.agent(SYNC_BATCH_SIZE=10)  # and a polling interval of 300 s: not one batch an interval
    pi.wait_delivered()
    assert pi.frontend.seqs()[-124:] == [*range(first, last + 1), *call.seqs[:4]]
    assert pi.frontend.files[call.call_log_id].sha256 == call.sha256


def test_interval_in_system_settings_counts_without_a_restart_unless_it_is_nonsense(
    pi: Pi,
) -> None:
    log_statements(pi.db)
    running = pi.idle(SYNC_POLL_INTERVAL_SEC=300)
    pi.db.execute("DROP TRIGGER serversync_wake ON sync_outbox")
    set_interval(pi.db, "0.3")
    for _ in range(3):
        pi.wait_entry(pi.backend.enqueue())
    running.reload(pi.agent.env(SYNC_POLL_INTERVAL_SEC=0.7))
    for value in ("0", '"soon"', "null", "true", "1e300", "1e-9"):
        set_interval(pi.db, value)
        pi.wait_entry(pi.backend.enqueue())
        before = statements(pi.db)
        pause(0.7)
        assert statements(pi.db) - before < 30, f"a busy loop with {value}"
    assert not running.lines("failed")


# -- what idleness costs -------------------------------------------------------------------------


def log_statements(db: Database) -> None:
    """Have the server log each statement of sessions that begin after this."""
    with db.admin() as admin:
        admin.execute(f"ALTER DATABASE {db.name} SET log_statement = 'all'")


def statements(db: Database) -> int:
    """How many statements the agent's present session has run so far."""
    pid = db.value(
        "SELECT pid FROM pg_stat_activity WHERE application_name = 'serversync'"
        " AND datname = current_database()"
    )
    lines = db.cluster.log().splitlines()
    return sum(f"[{pid}]" in line and "LOG:  " in line for line in lines)


def pause(seconds: float) -> None:
    """Let time pass in which nothing, or little, must happen."""
    threading.Event().wait(seconds)


def test_idle_agent_runs_one_statement_a_polling_interval(
    pi: Pi, record_property: Callable[[str, object], None]
) -> None:
    log_statements(pi.db)
    pi.idle(SYNC_POLL_INTERVAL_SEC=1)
    pause(1.5)  # what comes once after the start
    before, began = statements(pi.db), time.monotonic()
    pause(4)
    during, took = statements(pi.db) - before, time.monotonic() - began
    record_property("statements_in_4_intervals", during)
    assert 2 <= during <= took + 1


def test_idle_agent_on_a_unix_socket_is_asleep(
    pi: Pi, record_property: Callable[[str, object], None]
) -> None:
    log_statements(pi.db)
    running = pi.idle(DATABASE_URL=pi.db.socket_url, strace=["-e", "trace=all"])
    before, calls = statements(pi.db), running.strace_path.stat().st_size
    pause(3)
    assert statements(pi.db) == before
    grown = running.strace_path.stat().st_size - calls
    record_property("bytes_of_strace_in_3_seconds", grown)
    assert grown < 1000, running.strace_path.read_text()[-grown:]


# -- systemd -------------------------------------------------------------------------------------


def test_service_tells_systemd_ready_then_its_sentence_then_stopping(
    pi: Pi, notify: NotifySocket
) -> None:
    running = pi.agent(notify=notify)
    ready = notify.wait_for("READY=1")
    idle = notify.wait_for("STATUS=all delivered", since=ready)
    pi.backend.end_call(recording=False)
    sent = notify.wait_for("STATUS=all delivered; last: 3 entries", since=idle)
    assert running.stop()[0] == 0
    notify.wait_for("STOPPING=1", since=sent)


# -- SIGHUP --------------------------------------------------------------------------------------


def test_sighup_takes_a_good_configuration_and_tells_systemd(
    pi: Pi, notify: NotifySocket, tmp_path: Path
) -> None:
    running = pi.idle(notify=notify)
    with Frontend(tmp_path / "other") as other:
        running.update_env(pi.agent.env(FRONTEND_BASE_URL=other.url, SYNC_BATCH_SIZE=1))
        asked = time.monotonic()
        running.hup()
        reloading = notify.wait_for("RELOADING=1", since=asked)
        notify.wait_for("READY=1", since=reloading)
        stamps = [int(value) / 1e6 for _, value in notify.values("MONOTONIC_USEC")]
        assert len(stamps) == 1 and asked <= stamps[0] <= reloading
        together = [m for _, m in notify.messages if "RELOADING=1" in m]
        assert "MONOTONIC_USEC=" in together[0]

        call = pi.backend.end_call(recording=False)
        other.wait(lambda: other.seqs() == call.seqs)
        assert [len(request.entries) for request in other.requests] == [1, 1, 1]
    assert not pi.frontend.requests


def test_sighup_refuses_a_bad_configuration_with_all_reasons_and_keeps_the_old_one(
    pi: Pi, notify: NotifySocket
) -> None:
    running = pi.idle(notify=notify)
    running.update_env(
        pi.agent.env(SYNC_BATCH_SIZE=0, SYNC_BACH_BYTES=1, FRONTEND_BASE_URL="ftp://elsewhere")
    )
    asked = time.monotonic()
    running.hup()
    notify.wait_for("READY=1", since=notify.wait_for("RELOADING=1", since=asked))
    said = "\n".join(running.lines("the old configuration stays"))
    assert "SYNC_BATCH_SIZE must be" in said
    assert "did you mean SYNC_BATCH_BYTES?" in said
    assert "FRONTEND_BASE_URL must be" in said
    mistake = "the old configuration stays: SYNC_BACH_BYTES is unknown: did you mean"
    notify.wait_for(f"STATUS={mistake}", since=asked)
    call = pi.backend.end_call()
    pi.wait_file(call)
    running.wait_sentence(mistake)  # until it is mended
    running.reload(pi.agent.env())
    running.wait_sentence("all delivered; last: ")


def test_sighup_that_ends_the_session_makes_everything_due_all_the_same(pi: Pi) -> None:
    seq = pi.poisoned(Reply(500))
    running = pi.agent()
    wait_until(lambda: waiting(pi.db), what="its row")
    hold(pi.db)
    pi.frontend.poison.clear()
    running.reload(pi.agent.env(SYNC_DEVICE_ID="another"))
    pi.wait_entry(seq)


def seqs_of(request: Request) -> list[int]:
    return [entry["seq"] for entry in request.entries]


class Held:
    """A frontend whose answers of a kind wait until the test lets them go; those that have `begun`
    after their heads."""

    def __init__(self, frontend: Frontend, kind: str, begun: bool = False) -> None:
        self.kind, self.frontend, self.begun = kind, frontend, begun
        self.told = threading.Event()
        setattr(frontend, f"on_{kind}", self._hold)

    def _hold(self, request: Request) -> Reply | None:
        if self.told.is_set() or not self.begun:
            self.told.wait(60)
            return None
        answer = self.frontend.file_reply(request.file) if request.file else {"ok": True}
        text = json.dumps(answer).encode()
        connection: Any = threading.current_thread()
        connection.sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(text))
        self.told.wait(60)
        return Reply(raw=text, store=True)

    def wait(self) -> None:
        """Until the first request is complete, and waits for its answer."""

        def complete() -> bool:
            first = self.frontend.of_kind(self.kind)[0]
            return bool(first.entries or first.file)

        self.frontend.wait(complete, what=f"a request of kind {self.kind}")


@KINDS
def test_sighup_during_once_is_for_what_follows_and_what_is_under_way_goes_on(
    pi: Pi, tmp_path: Path, kind: str
) -> None:
    held = Held(pi.frontend, kind)
    calls = [pi.backend.end_call(seconds=0.1) for _ in range(2)]
    running = pi.agent(args=("once",), SYNC_BATCH_SIZE=1)
    held.wait()
    with Frontend(tmp_path / "other") as other:
        running.reload(pi.agent.env(FRONTEND_BASE_URL=other.url, SYNC_BATCH_SIZE=100))
        running.wait_log("was read again")
        held.told.set()
        assert running.wait() == 0
        assert not pi.db.pending() and not uploads(pi.db)
        assert len(pi.frontend.of_kind(kind)) == 1
        seqs = [seq for call in calls for seq in call.seqs[:4]]
        here = seqs[:1] if kind == "entries" else seqs
        assert pi.frontend.seqs() == here
        # As one batch: the rest of the configuration counts from now on, too.
        batches = [seqs_of(request) for request in other.of_kind("entries")]
        assert batches == ([seqs[1:]] if kind == "entries" else [])
        files = [file.call_log_id for file in [*pi.frontend.uploads, *other.uploads]]
        assert files == [call.call_log_id for call in calls]
        assert len(other.uploads) == (2 if kind == "entries" else 1)


def test_once_ends_with_its_exit_code_whatever_a_sighup_made_due(pi: Pi) -> None:
    bad = pi.poisoned(Reply(500))
    good = pi.backend.enqueue()
    goes_on = threading.Event()

    def hook(request: Request) -> None:
        if good in seqs_of(request):
            goes_on.wait(60)

    pi.frontend.on_entries = hook
    running = pi.agent(args=("once",), SYNC_BATCH_SIZE=1)
    wait_until(lambda: bad in waiting(pi.db), what="its row")
    pi.frontend.wait(lambda: good in seqs_of(pi.frontend.of_kind("entries")[-1]))
    running.reload(pi.agent.env(SYNC_BATCH_SIZE=0))
    running.wait_log("the old configuration stays")
    running.reload(pi.agent.env())
    running.wait_log("was read again")
    goes_on.set()
    assert running.wait() == 75
    assert pi.db.pending() == [bad] and pi.frontend.seqs() == [good]
    assert len(pi.frontend.of_kind("entries")) == 2, "what it made due is for the next one"


# -- the end -------------------------------------------------------------------------------------


@contextlib.contextmanager
def silent_listener() -> Iterator[str]:
    """A URL whose server accepts and then never says a word: no TLS handshake comes to its end."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"https://127.0.0.1:{listener.getsockname()[1]}"


def has_socket_to(agent: Agent, url: str, kind: str) -> bool:
    """Whether one of its own sockets to that port is in a state (01 open, 02 connecting)."""
    port = int(url.rpartition(":")[2])
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    found = {row[9] for row in rows if row[2].endswith(f":{port:04X}") and row[3] == kind}
    own = set()
    for name in os.listdir(f"/proc/{agent.pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed since
            own.add(os.readlink(f"/proc/{agent.pid}/fd/{name}"))
    return any(f"socket:[{inode}]" in own for inode in found)


class Stage:
    """What a situation needs: everything of one test, and the settings of its agent."""

    def __init__(self, pi: Pi, **settings: Any) -> None:
        self.start = partial(pi.agent, **settings)
        self.frontend, self.backend, self.db = pi.frontend, pi.backend, pi.db
        self.stack = contextlib.ExitStack()

    def start_until(self, there: Callable[[], object], **settings: Any) -> Agent:
        running = self.start(**settings)
        self.frontend.wait(there, what="the situation")
        return running


def in_a_hanging_request(stage: Stage) -> Agent:
    stage.frontend.on_entries = lambda request: Reply(stall=60)
    return stage.start_until(lambda: stage.frontend.requests[0].entries)


def in_an_answer_that_trickles(stage: Stage) -> Agent:
    stage.frontend.on_entries = lambda request: Reply(body={"ok": True}, trickle=0.4)
    return stage.start_until(lambda: stage.frontend.requests[0].finished)


def in_an_upload(stage: Stage) -> Agent:
    stage.frontend.on_head = lambda request: (
        None if request.kind != "file" else setattr(stage.frontend, "read_rate", 100_000)
    )
    return stage.start_until(lambda: stage.frontend.of_kind("file")[0].received > 50_000)


def in_a_stalled_upload(stage: Stage) -> Agent:
    stage.frontend.on_head = lambda request: Reply(stall=60) if request.kind == "file" else None
    return stage.start_until(lambda: stage.frontend.of_kind("file"))


def in_the_wait_for_an_upload_s_answer(stage: Stage) -> Agent:
    stage.frontend.on_file = lambda request: Reply(stall=60)
    return stage.start_until(lambda: stage.frontend.of_kind("file")[0].file)


def in_a_connect_that_hangs(stage: Stage) -> Agent:
    url = stage.stack.enter_context(blackhole())
    running = stage.start(FRONTEND_BASE_URL=url)
    wait_until(lambda: has_socket_to(running, url, "02"), what="a connect under way")
    return running


def in_a_tls_handshake_that_hangs(stage: Stage) -> Agent:
    url = stage.stack.enter_context(silent_listener())
    running = stage.start(FRONTEND_BASE_URL=url)
    wait_until(lambda: has_socket_to(running, url, "01"), what="a connection")
    return running


def without_a_database(stage: Stage) -> Agent:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    running = stage.start(DATABASE_URL=f"postgresql://voicebot@127.0.0.1:{port}/x")
    running.wait_log("the database is not there")
    return running


def in_a_database_connect_that_hangs(stage: Stage) -> Agent:
    url = stage.stack.enter_context(silent_listener())
    running = stage.start(DATABASE_URL=url.replace("https://", "postgresql://voicebot@") + "/x")
    wait_until(lambda: has_socket_to(running, url, "01"), what="a connection")
    return running


def in_a_statement_that_hangs(stage: Stage) -> Agent:
    db = stage.db
    proxy = stage.stack.enter_context(Proxy("127.0.0.1", db.cluster.port))
    url = db.url_through(proxy.port)
    running = stage.start(DATABASE_URL=url, SYNC_POLL_INTERVAL_SEC=0.5)
    stage.frontend.wait(lambda: not db.pending() and not uploads(db))
    running.wait_sentence("all delivered")
    proxy.silence_open()
    wait_until(lambda: proxy.held_back, what="a statement that nobody answers")
    return running


def with_a_locked_table(stage: Stage) -> Agent:
    lock = stage.stack.enter_context(stage.db.connect(autocommit=False))
    running = stage.start()
    stage.frontend.wait(lambda: not stage.db.pending())
    lock.execute("LOCK TABLE sync_outbox")
    stage.db.execute("NOTIFY serversync")
    running.wait_log("somebody has locked a table")
    return running


def in_a_look_up(stage: Stage, **settings: Any) -> Agent:
    """On a machine whose three name servers get every question, and never say a word."""
    servers = []
    for number in (1, 2, 3):
        server = stage.stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        server.bind((f"127.53.{os.getpid() % 250}.{number}", 53))
        servers.append(server)
    directory = Path(stage.stack.enter_context(tempfile.TemporaryDirectory()))
    lines = [f"nameserver {server.getsockname()[0]}\n" for server in servers]
    (directory / "resolv.conf").write_text("".join(lines) + "search a.example b.example\n")
    (directory / "nsswitch.conf").write_text("hosts: files dns\n")
    mounts = "\n".join(f"mount --bind {path} /etc/{path.name}" for path in directory.iterdir())
    running = stage.start(prefix=in_mounts(mounts), **settings)
    servers[0].settimeout(20)
    servers[0].recv(512)
    return running


def in_a_look_up_of_the_frontend(stage: Stage) -> Agent:
    return in_a_look_up(stage, FRONTEND_BASE_URL="http://voice.example.com")


def in_a_look_up_of_the_database(stage: Stage) -> Agent:
    return in_a_look_up(stage, DATABASE_URL="postgresql://voicebot@db.example.com/voicebot")


def idle(stage: Stage) -> Agent:
    return stage.start_until(lambda: not stage.db.pending())


def as_standby(stage: Stage) -> Agent:
    idle(stage)
    running = stage.start()
    running.wait_log("standby")
    return running


DELIVERED = (in_a_statement_that_hangs, with_a_locked_table, idle, as_standby)
LOOK_UPS = (in_a_look_up_of_the_frontend, in_a_look_up_of_the_database)
HANGING = (
    in_a_hanging_request,
    in_a_stalled_upload,
    in_the_wait_for_an_upload_s_answer,
    in_a_connect_that_hangs,
    in_a_tls_handshake_that_hangs,
    in_a_database_connect_that_hangs,
    in_a_statement_that_hangs,
    *LOOK_UPS,
)


@pytest.mark.parametrize(
    "situation",
    [
        *(pytest.param(each, marks=[needs_root] * (each in LOOK_UPS)) for each in HANGING),
        in_an_answer_that_trickles,
        in_an_upload,
        without_a_database,
        with_a_locked_table,
        idle,
        as_standby,
    ],
)
def test_sigterm_ends_the_agent_within_two_seconds_and_nothing_is_half_marked(
    pi: Pi,
    notify: NotifySocket,
    situation: Callable[[Stage], Agent],
    record_property: Callable[[str, object], None],
) -> None:
    """Where something hangs, the watchdog was fed meanwhile: for longer than it may be silent, and
    with a time-out of a hundred times that."""
    call = pi.backend.end_call(seconds=60)
    stage = Stage(pi, notify=notify, SYNC_TIMEOUT_SEC=600, **WATCHDOG)
    with stage.stack:
        running = situation(stage)
        if situation in HANGING:
            began = time.monotonic()
            pause(0.75 * WATCHDOG_SEC + 0.5)
            pings = [began, *(when for when, _ in notify.values("WATCHDOG") if when > began)]
            gaps = [after - before for before, after in pairwise([*pings, time.monotonic()])]
            record_property("longest_gap", round(max(gaps), 2))
            assert max(gaps) < 0.75 * WATCHDOG_SEC
        code, seconds = running.stop()
    record_property("seconds", round(seconds, 2))
    assert code == 0
    assert seconds < STOP_WITHIN
    assert "stopped" in running.log() and "Traceback" not in running.log()
    if situation in DELIVERED:
        return
    # What had not been confirmed is untouched, and goes out later as if nothing had been.
    json_seqs = call.seqs[:4] if "upload" not in situation.__name__ else []
    assert pi.db.pending() == [*json_seqs, call.seq("recording_file")]
    assert pi.backend.upload_status(call) == ("local_only", None)
    assert call.wav.exists() and call.meta.exists()
    assert not waiting(pi.db) and not uploads(pi.db)
    for hook in ("on_head", "on_entries", "on_file", "read_rate"):
        setattr(pi.frontend, hook, None)
    pi.once()
    assert pi.frontend.files[call.call_log_id].sha256 == call.sha256
    assert sorted(set(pi.frontend.seqs())) == call.seqs[:4]


@KINDS
@pytest.mark.parametrize(
    ("command", "number", "begun"),
    [("run", signal.SIGTERM, False), ("run", signal.SIGINT, True), ("once", signal.SIGTERM, False)],
    ids=["all of it", "the rest of it", "of once"],
)
def test_what_is_answered_just_after_a_stop_is_written_down_and_nothing_more_is_begun(
    pi: Pi, command: str, number: int, kind: str, begun: bool
) -> None:
    held = Held(pi.frontend, kind, begun)
    calls = [pi.backend.end_call() for _ in range(2)]
    running = pi.agent(args=(command,), SYNC_BATCH_SIZE=1)
    held.wait()
    before = pi.db.pending()
    running.signal(number)
    held.told.set()
    assert running.wait() == (75 if command == "once" else 0)
    assert pi.db.pending() == before[1:]
    assert len(pi.frontend.of_kind(kind)) == 1
    if kind == "file":
        assert pi.backend.upload_status(calls[0])[0] == "uploaded"
        assert uploads(pi.db) == before[:1], "it is noted for deletion"

    pi.once()
    assert not pi.db.pending() and not uploads(pi.db)
    assert pi.frontend.seqs() == [seq for call in calls for seq in call.seqs[:4]]
    assert [file.call_log_id for file in pi.frontend.uploads] == [
        call.call_log_id for call in calls
    ]


def test_the_rest_of_a_paced_upload_that_ends_just_after_a_stop_is_written_down(pi: Pi) -> None:
    pi.backend.end_call(seconds=10)
    running = pi.agent(SYNC_UPLOAD_KBPS=2200)  # half a second of it
    pi.frontend.wait(lambda: pi.frontend.of_kind("file")[0].received)
    assert running.stop()[0] == 0
    assert not pi.db.pending()


def test_once_ends_however_long_it_took(pi: Pi, hurry: Callable[..., None]) -> None:
    """Old rows are pruned five minutes after a start, but not by `once`."""
    hurry(PRUNE_AFTER=0.5)
    pi.backend.end_call()
    pi.frontend.on_entries = lambda _: Reply(200, {}, {"ok": True}, delay=1, store=True)
    pi.once()


def test_once_that_met_a_lock_goes_on_to_the_end_of_the_backlog(
    pi: Pi, hurry: Callable[..., None]
) -> None:
    """Its patience is for what is still locked, not for all."""
    hurry(LOCK_PATIENCE=4)
    first, last = pi.backend.enqueue_many(20)
    owner = pi.db.connect(autocommit=False)
    owner.execute("select from sync_outbox where id = %s for update", (first,))

    def hook(request: Request) -> Reply | None:
        if last in seqs_of(request):
            return Reply(200, {}, {"ok": True}, delay=5, store=True)
        if first + 3 in seqs_of(request):
            threading.Timer(1, owner.rollback).start()
        return None

    pi.frontend.on_entries = hook
    pi.once(SYNC_BATCH_SIZE=1, SYNC_TIMEOUT_SEC=60)
    assert not pi.db.pending()
    owner.close()


# -- the state file ------------------------------------------------------------------------------


def test_without_a_runtime_directory_there_is_no_state_file_and_all_works(pi: Pi) -> None:
    running = pi.agent(RUNTIME_DIRECTORY="")
    seq = pi.backend.enqueue()
    pi.wait_entry(seq)
    assert not list(running.runtime_dir.glob("state*"))


# -- the database comes and goes -----------------------------------------------------------------


def test_database_restart_is_survived_and_wakes_work_again(pi: Pi) -> None:
    running = pi.idle()
    pi.db.cluster.restart("immediate")
    call = pi.backend.end_call()
    pi.wait_file(call)
    # Let the cycle end, so that only a NOTIFY can bring what follows.
    pi.frontend.wait(lambda: not pi.db.value("SELECT count(*) FROM serversync.uploads"))
    seq = pi.backend.enqueue()
    pi.wait_entry(seq)
    assert running.running and "Traceback" not in running.log()


def test_database_that_is_absent_at_start_is_a_state_and_not_a_failure(
    pi: Pi, proxy: Proxy, notify: NotifySocket
) -> None:
    proxy.refuse()
    seq = pi.backend.enqueue()
    running = pi.agent(notify=notify, DATABASE_URL=pi.db.url_through(proxy.port))
    notify.wait_for("READY=1")
    notify.wait_for("STATUS=the database is not there")
    wait_until(lambda: "the database is not there" in running.state()["sentence"])
    proxy.resume()
    pi.wait_entry(seq)
    notify.wait_for("STATUS=all delivered; last: 1 entry")
    running.wait_log("the database is there")


def test_database_that_is_absent_for_hours_is_asked_every_quarter_of_a_minute_and_then_found(
    pi: Pi, proxy: Proxy, alter: Callable[[str, str], None]
) -> None:
    """More than a thousand failed connections: the same program, but its pauses take no time."""
    paused = 'print(f"paused {self.failures} times: {self.pause_after(error)}", flush=True)'
    alter("resume_at = time.monotonic() + self.pause_after(error)", paused)
    proxy.refuse()
    seq = pi.backend.enqueue()
    running = pi.agent(DATABASE_URL=pi.db.url_through(proxy.port))
    last = running.wait_log("paused 1100 times")
    assert 7 < float(last.split()[-1]) <= 15
    proxy.resume()
    pi.wait_entry(seq)
    assert "Traceback" not in running.log()


# -- an outage ends ------------------------------------------------------------------------------


def test_end_of_an_outage_makes_due_what_failed_in_it_and_nothing_else(
    pi: Pi, hurry: Callable[..., None]
) -> None:
    """An hour of backoff is not waited for, once the frontend is back."""
    hurry(ALIVE_SEC=0.01)
    broken = Reply(500)
    pi.agent()
    poison = pi.poisoned(broken)
    wait_until(lambda: poison in waiting(pi.db), what="a failure outside of any outage")
    hold(pi.db)  # or its retry is one of those that fail in the outage
    pi.wait_entry(pi.backend.enqueue())  # one that was under way is over
    hold(pi.db)

    def break_down(_: Request) -> Reply:
        pi.frontend.on_entries = lambda _: broken
        return broken

    pi.frontend.on_file = break_down
    call = pi.backend.end_call()
    file = call.seq("recording_file")
    wait_until(lambda: file in waiting(pi.db), what="a recording that failed in the outage")
    entry = pi.backend.enqueue()
    wait_until(lambda: entry in waiting(pi.db), 40, "an entry that failed in the outage")
    hold(pi.db)
    pi.frontend.on_entries = pi.frontend.on_file = None
    later = pi.backend.enqueue()
    pi.frontend.wait(lambda: {entry, later} <= set(pi.frontend.seqs()), 40, "the entries")
    pi.wait_file(call)
    wait_until(lambda: list(waiting(pi.db)) == [poison], what="the end of what waited")
    left = waiting(pi.db)[poison]["next_attempt_at"].timestamp() - time.time()
    assert left > 30, "it did not fail in the outage"

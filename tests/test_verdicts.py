"""The table of verdicts, row by row: what becomes of an entry, and of those beside it."""

import email.utils
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from frontend import Frontend, Hook, Reply, Request, script
from ledger import counter, dead_letters, entity_of, let_hours_pass, receipts, waiting
from pi import Pi
from test_state import end_session
from waiting import wait_until

HTML = "<html><body>Welcome to the hotel's wireless network</body></html>"
OK: dict[str, Any] = {"ok": True}
DONE, PERSON, UNAVAILABLE, LATER = 0, 1, 69, 75  # exit codes
INTERIM = [b"HTTP/1.1 102 Processing\r\n\r\n", b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n"]
PAUSE = Reply(429, {"Retry-After": "3600"})


def raw_200(length: str) -> bytes:
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
    return head.encode("latin-1") + b'{"ok": true}'


def to_entries(hook: Hook) -> Hook:
    """What misbehaves only when there are entries: the empty request is answered as it should."""
    return lambda request: hook(request) if request.entries else None


# What the frontend answers, and the code that the agent shall write down.
Rows = list[tuple[str, Reply]]
SENT: Rows = [
    ("sent", Reply(200, {}, OK)),
    ("sent", Reply(201, {}, {"ok": True, "rejected": [], "stored": 1})),
    ("conflict_processed", Reply(409, {}, OK)),
    ("conflict_processed", Reply(409, {}, {"ok": False, "code": "ALREADY_PROCESSED"})),
    ("sent", Reply(raw=b"".join([*INTERIM, raw_200("12")]))),
]
DEAD: Rows = [
    ("BAD_REQUEST", Reply(400, {}, {"error": "entries[0] is not valid"})),
    ("BAD_REQUEST", Reply(422, {}, {"detail": []})),
]
# One of each kind, and whatever is not HTTP as it should be: test_policy.py has all the others.
SUSPECT: Rows = [
    ("BAD_RESPONSE", Reply(200, {}, HTML)),
    ("BAD_RESPONSE", Reply(204, {"Content-Length": "0"})),
    ("BAD_RESPONSE", Reply(200, {}, {"ok": True, "text": "x" * 1_000_000})),
    ("BAD_RESPONSE", Reply(400, {}, HTML)),
    ("BAD_RESPONSE", Reply(raw=b"SSH-2.0-OpenSSH_9.2\r\n")),
    ("BAD_RESPONSE", Reply(raw=raw_200("\u00b2"))),
    ("REDIRECTED", Reply(304)),
    ("UNAUTHORIZED", Reply(403, {}, HTML)),
    ("NOT_FOUND", Reply(405, {"Allow": "GET"}, HTML)),
    ("CONFLICT", Reply(409, {}, {"ok": False, "code": "IN_PROGRESS"})),
    ("FRONTEND_5XX", Reply(500, {}, {"error": "boom"})),
    ("RATE_LIMITED", Reply(503, {"Retry-After": "3600"}, HTML)),
    ("RATE_LIMITED", PAUSE),
    ("TOO_LARGE", Reply(413, {}, HTML)),
    ("NETWORK_TIMEOUT", Reply(408, {}, {"error": "too slow"})),
    ("NETWORK_RESET", Reply(reset=True)),
    ("NETWORK_RESET", Reply(raw=b"")),
    ("NETWORK_RESET", Reply(200, {}, OK, half=True)),
    ("UNKNOWN", Reply(600, {}, OK)),
    ("NETWORK_TIMEOUT", Reply(stall=60)),
]
rows = pytest.mark.parametrize


def test_an_entry_that_the_frontend_has_is_sent(pi: Pi) -> None:
    pi.backend.enqueue_many(2 * len(SENT))
    pi.frontend.on_entries = script(*(reply for _, reply in SENT))
    pi.once(code=DONE, SYNC_BATCH_SIZE=2)
    assert not pi.db.pending()
    written = [(receipt["entries"], receipt["outcome"]) for receipt in receipts(pi.db)]
    assert written == [(2, outcome) for outcome, _ in SENT]
    assert len(pi.frontend.requests) == len(SENT)


def test_an_entry_at_fault_dies_and_the_rest_of_its_batch_arrives(pi: Pi) -> None:
    bad = _some_among_a_hundred(pi, DEAD, PERSON)
    # For each a hundred, its halves and so on down to one.
    assert len(pi.frontend.requests) <= 2 * 2 * 8
    letters = dead_letters(pi.db)
    assert {seq: (row["error_code"], row["http_status"]) for seq, row in letters.items()} == {
        seq: (code, reply.status) for seq, (code, reply) in bad.items()
    }
    assert not pi.db.pending()
    assert not waiting(pi.db)


def test_a_suspect_entry_waits_uncharged_and_the_rest_of_its_batch_arrives(pi: Pi) -> None:
    bad = _some_among_a_hundred(pi, SUSPECT, LATER)
    failures = waiting(pi.db)
    assert {seq: row["code"] for seq, row in failures.items()} == {
        seq: code for seq, (code, _) in bad.items()
    }
    assert list(failures) == pi.db.pending()
    for seq, (code, reply) in bad.items():
        whole = code != "NETWORK_RESET" and reply.raw is None and not reply.stall
        assert failures[seq]["http_status"] == (reply.status if whole else None), reply
        # Not charged at first; a short first backoff may have made it due again meanwhile.
        assert failures[seq]["attempts"] < failures[seq]["tries"]
    assert not dead_letters(pi.db)


def _some_among_a_hundred(pi: Pi, bad: Rows, code: int) -> dict[int, tuple[str, Reply]]:
    """Bad entries, the first at the head, between good ones; their seqs."""
    seqs = {}
    for row in bad:
        seqs[pi.poisoned(row[1])] = row
        pi.backend.enqueue_many(99 // len(bad))
    done = pi.once(code=code, SYNC_TIMEOUT_SEC=5)
    assert "Traceback" not in done.stderr
    good = [seq for (seq,) in pi.db.rows("SELECT id FROM sync_outbox ORDER BY id")]
    assert sorted(pi.frontend.seqs()) == [seq for seq in good if seq not in seqs]
    return seqs


def test_a_409_with_our_own_key_means_that_the_frontend_has_it_unless_it_says_more(pi: Pi) -> None:
    """Beside a word of trouble it may mean that the first one is still under way."""
    words: list[dict[str, Any]] = [
        {},
        {"code": "ALREADY_PROCESSED", "ok": False},
        {"code": "IN_PROGRESS", "ok": False},
        {"status": "running"},
        {"error": "busy"},
    ]
    pi.backend.enqueue_many(len(words))
    pi.frontend.on_entries = to_entries(
        lambda request: Reply(
            409,
            {},
            {"idempotencyKey": request.headers["Idempotency-Key"]}
            | words[request.entries[0]["seq"] - 1],
        )
    )
    pi.once(code=LATER, SYNC_BATCH_SIZE=1)
    assert pi.db.pending() == [3, 4, 5]
    assert counter(pi.db, "sent_as", "conflict_processed") == 2
    assert {row["code"] for row in waiting(pi.db).values()} == {"CONFLICT"}


def test_a_redirect_is_never_followed_and_the_token_goes_nowhere_else(
    pi: Pi, tmp_path: Path
) -> None:
    """Not of entries, nor of a recording, nor when it is asked whether that was stored."""
    with Frontend(tmp_path / "elsewhere") as elsewhere:
        call, other = pi.backend.end_call(), pi.backend.end_call()

        def redirect(request: Request) -> Reply:
            return Reply(308, {"Location": elsewhere.url + request.path})

        pi.frontend.on_entries = redirect
        ended = pi.once(code=UNAVAILABLE, SYNC_TOKEN="secret-token")
        assert "a redirect, which is never followed" in ended.stderr
        assert not waiting(pi.db) and len(pi.frontend.requests) == 2

        pi.frontend.on_entries, pi.frontend.on_file = None, redirect
        pi.once(code=LATER, SYNC_TOKEN="secret-token")
        files = [call.seq("recording_file"), other.seq("recording_file")]
        assert list(waiting(pi.db)) == pi.db.pending() == files
        assert {row["code"] for row in waiting(pi.db).values()} == {"REDIRECTED"}

        pi.frontend.on_file = None
        pi.frontend.on_head = lambda request: (
            redirect(request) if request.path.endswith(other.call_log_id) else None
        )
        let_hours_pass(pi.db)
        pi.once(code=LATER, SYNC_TOKEN="secret-token")
        assert pi.db.pending() == files[1:] and other.wav.exists()
        assert not elsewhere.connections
    sent = {request.headers["Authorization"] for request in pi.frontend.requests}
    assert sent == {"Bearer secret-token"}


# --- outages that show themselves at once -----------------------------------------------------


@rows(
    ("count", "base", "words"),
    [
        (1, "", "cannot be reached"),  # refused
        (100, "", "cannot be reached"),
        (100, "http://frontend.invalid", "cannot be reached"),
        (100, "https", "TLS"),
    ],
)
def test_a_connection_that_cannot_be_made_is_an_outage_that_names_its_reason_and_nobodys_fault(
    pi: Pi, count: int, base: str, words: str
) -> None:
    pi.backend.enqueue_many(count)
    pi.frontend.idle_timeout = 0.5  # it waits for the end of what it takes for a head
    url = pi.frontend.url.replace("http", "https") if base == "https" else base
    if not base:
        pi.frontend.stop()
    settings = {"FRONTEND_BASE_URL": url or pi.frontend.url, "SYNC_TIMEOUT_SEC": 5}
    log = pi.once(code=UNAVAILABLE, **settings).stderr
    [told] = [line for line in log.splitlines() if "outage, nothing is lost" in line]
    assert words in told and "clock" not in told
    assert "is retried" not in log
    assert not waiting(pi.db) and not dead_letters(pi.db)
    if not base:
        pi.frontend.start()
    pi.once(code=DONE)
    assert pi.frontend.seqs() == list(range(1, count + 1))


@rows("limit", [0, 14], ids=["everything", "all but the empty request"])
def test_a_proxy_that_finds_everything_too_large_is_an_outage_and_nothing_dies(
    pi: Pi, limit: int
) -> None:
    call = pi.backend.end_call(seconds=0.01)
    pi.backend.enqueue_many(40)
    pending = pi.db.pending()
    pi.frontend.on_head = lambda request: (
        Reply(413, {"Connection": "close"}, HTML) if request.length > limit else None
    )
    for _ in range(2):
        done = pi.once(code=UNAVAILABLE)
        told = next(line for line in done.stderr.splitlines() if "outage, nothing is lost" in line)
        assert re.search(r"client_max_body_size\): HTTP 413 to [1-9]\d* bytes", told)
        let_hours_pass(pi.db, hours=30)
    assert pi.db.pending() == pending
    assert not dead_letters(pi.db)
    assert pi.backend.upload_status(call)[0] == "local_only"
    pi.frontend.on_head = None
    pi.once(code=DONE)
    assert call.call_log_id in pi.frontend.files
    assert sorted(pi.frontend.seqs()) == [
        seq for seq in pending if seq != call.seq("recording_file")
    ]


# --- 429 --------------------------------------------------------------------------------------


@rows(("count", "status"), [(1, 429), (100, 503)])
def test_a_pause_that_the_empty_request_is_told_too_is_an_outage_after_two_requests(
    pi: Pi, count: int, status: int
) -> None:
    pi.backend.enqueue_many(count)
    pi.backend.end_call(seconds=0.01)
    pi.frontend.on_entries = lambda _: Reply(status, {"Retry-After": "30"})
    pi.once(code=UNAVAILABLE, SYNC_BATCH_SIZE=count)
    assert [request.kind for request in pi.frontend.requests] == ["entries", "empty"]
    assert [row["code"] for row in waiting(pi.db).values()] == ["RATE_LIMITED"] * (count == 1)
    assert not dead_letters(pi.db)


def _in_seconds(seconds: float) -> str:
    return email.utils.formatdate(time.time() + seconds, usegmt=True)


@rows(("form", "kind"), [("seconds", "entries"), ("date", "file")])
def test_nothing_at_all_is_sent_before_the_pause_has_passed_that_was_asked_for(
    pi: Pi, form: str, kind: str
) -> None:
    """Whoever is told to wait, entries or files: both do; a NOTIFY does not shorten it."""
    call = pi.backend.end_call(seconds=0.01)
    asked: list[str] = []

    def hook(request: Request) -> Reply | None:
        """One of the kind is told to wait, and the empty request behind it."""
        if (not asked and request.kind != kind) or len(asked) == 2:
            return None
        asked.append(request.kind)
        # A date knows no fractions of a second: the pause lies between three and four.
        return Reply(429, {"Retry-After": "3" if form == "seconds" else _in_seconds(4)})

    pi.frontend.on_entries = pi.frontend.on_file = hook
    running = pi.agent()
    running.wait_log("outage, nothing is lost: the frontend asks for a pause")
    pi.db.execute("notify serversync")
    time.sleep(0.5)  # it looks: perhaps there is not an entry
    pi.backend.enqueue()
    second = pi.backend.end_call(seconds=0.01)
    running.wait_log("recovered")
    pi.frontend.wait(lambda: {call.call_log_id, second.call_log_id} == set(pi.frontend.files))
    pi.wait_delivered()
    refused = [request for request in pi.frontend.requests if request.status == 429]
    later = [r.started for r in pi.frontend.requests if r.started > refused[-1].started]
    assert asked == [kind, "empty"]
    assert refused[-1].finished is not None
    assert min(later) - refused[-1].finished >= 2.9
    assert not waiting(pi.db)


def test_entries_that_are_told_to_wait_wait_so_long_and_the_others_only_for_seconds(pi: Pi) -> None:
    """More of them in a row than make an outage, and the newest entry of all, which is the first to
    be tried then. The good ones stand between, and no new one shows that the frontend lives."""
    first, last = pi.backend.enqueue_many(40)
    calls = [pi.backend.end_call(seconds=0.01) for _ in range(3)]
    poisonous = [*range(first, last + 1), pi.backend.enqueue()]
    for seq in poisonous:
        pi.frontend.poison[entity_of(pi.db, seq)] = PAUSE
    running = pi.agent()
    wait_until(lambda: pi.db.pending() == poisonous, timeout=30, what="others", state=running.log)
    assert {call.call_log_id for call in calls} == set(pi.frontend.files)
    wait_until(lambda: list(waiting(pi.db)) == poisonous, what="all rows", state=running.log)
    late = pi.backend.end_call(seconds=0.01)
    pi.frontend.wait(lambda: late.call_log_id in pi.frontend.files, timeout=10)
    # Each had its own request once; what waits is not asked for before its time.
    alone = [r.entries[0]["seq"] for r in pi.frontend.requests if len(r.entries) == 1]
    assert sorted(seq for seq in alone if seq in poisonous) == poisonous
    due = "SELECT extract(epoch FROM min(next_attempt_at) - now()) FROM serversync.waiting"
    assert pi.db.value(due) > 3500
    assert {(row["code"], row["attempts"]) for row in waiting(pi.db).values()} == {
        ("RATE_LIMITED", 0)
    }


def test_recordings_that_are_told_to_wait_hold_up_no_entry_and_no_other_recording(pi: Pi) -> None:
    bad = [pi.backend.end_call(seconds=0.01) for _ in range(2)]
    good = pi.backend.end_call(seconds=0.01)

    def crash(request: Request) -> Reply | None:
        assert request.file is not None
        return None if request.file.call_log_id == good.call_log_id else PAUSE

    pi.frontend.on_file = crash
    running = pi.agent()
    seqs = [call.seq("recording_file") for call in bad]
    wait_until(lambda: pi.db.pending() == seqs, what="the others", state=running.log)
    assert [request.status for request in pi.frontend.of_kind("file")].count(429) == 2
    # From the third in a row on it is an outage of the recordings, never of the entries.
    bad += [pi.backend.end_call(seconds=0.01) for _ in range(2)]
    good = pi.backend.end_call(seconds=0.01)
    pi.frontend.on_file = lambda _: PAUSE
    running.wait_log("files: outage, nothing is lost: the frontend asks for a pause")
    late = pi.backend.enqueue()
    wait_until(lambda: late in pi.frontend.seqs(), what="an entry", state=running.log)
    assert not running.lines("entries: outage")


@rows("verify", ["", "/api/recordings/{callLogId}"])
def test_a_pause_during_an_upload_lets_it_end_and_holds_back_all_that_would_follow(
    pi: Pi, verify: str
) -> None:
    """The upload that travels may end: its success, at once where nothing is verified, does not end
    the pause. Whether it is stored as it should be is asked afterwards; it is not sent again."""
    call = pi.backend.end_call(seconds=20, events=0)
    pi.frontend.read_rate = 100_000
    running = pi.agent(SYNC_VERIFY_PATH=verify)
    pi.frontend.wait(lambda: pi.frontend.of_kind("file")[0].received > 1000, what="half an upload")
    pause = Reply(429, {"Retry-After": "3"})
    pi.frontend.on_entries = script(pause, pause)
    late = pi.backend.enqueue()
    running.wait_log("outage, nothing is lost: the frontend asks for a pause")
    upload = pi.frontend.of_kind("file")[0]
    assert upload.finished is None, "the upload was too fast for this test"
    pi.frontend.read_rate = None
    later = pi.backend.end_call(seconds=0.01)
    pi.wait_delivered(60)
    refused = [request for request in pi.frontend.requests if request.status == 429]
    assert refused[-1].finished is not None
    assert upload.finished is not None
    assert upload.finished - refused[-1].finished < 2.9, "the upload was too slow for this test"
    follow = [r.started for r in pi.frontend.requests if r.started > refused[-1].started]
    assert min(follow) - refused[-1].finished >= 2.9
    assert len(refused) == 2
    assert pi.frontend.files[call.call_log_id].count == 1
    assert pi.backend.upload_status(call)[0] == "uploaded"
    assert late in pi.frontend.seqs()
    assert later.call_log_id in pi.frontend.files


def test_what_was_asked_before_a_pause_and_fails_during_it_does_not_shorten_it(pi: Pi) -> None:
    """A recording and an entry fail side by side, and for both it is asked whether the frontend
    lives: the entry's question is told to pause, and then the recording's gets a 500."""
    asked, paused = threading.Event(), threading.Event()

    def answer(request: Request) -> Reply:
        if request.kind == "entries":
            assert asked.wait(2.5), "nobody asks because of the recording"
        elif not asked.is_set():
            asked.set()
            assert paused.wait(20), "nobody asks because of the entry"
        else:
            return PAUSE
        return Reply(500, {}, {"error": "boom"})

    def fail(_: Request) -> Reply:
        pi.frontend.on_file, pi.frontend.on_entries = None, answer
        known = len(pi.frontend.of_kind("entries"))
        pi.backend.enqueue()
        wait_until(lambda: len(pi.frontend.of_kind("entries")) > known, what="the entry")
        return Reply(500, {}, {"error": "boom"})

    pi.frontend.on_file = fail
    pi.backend.end_call(seconds=0.01, events=0)
    running = pi.agent()
    told = running.wait_log("outage, nothing is lost: the frontend asks for a pause")
    pi.frontend.on_entries = None
    paused.set()
    wait_until(lambda: any(row["is_file"] for row in waiting(pi.db).values()), what="its row")
    end_session(pi.db)  # a new one looks at everything anew
    running.wait_log("the lock is ours")
    looked = time.time()
    pi.db.execute("NOTIFY serversync")
    state = wait_until(lambda: (now := running.state())["at"] > looked and now, what="a look")
    outages = state["outages"]
    assert [(each["endpoint"], each["code"]) for each in outages] == [
        ("entries", "RATE_LIMITED"),
        ("files", "RATE_LIMITED"),
    ]
    assert min(each["due"] for each in outages) > looked + 3000
    assert running.lines("outage, nothing is lost") == [told]
    assert [request.status for request in pi.frontend.requests] == [200, 500, 500, 500, 429]

    running.hup()
    pi.wait_delivered()


def test_a_recording_that_fails_beside_a_request_of_entries_does_not_mix_up_the_answers(
    pi: Pi,
) -> None:
    """Whether the frontend lives is asked on another connection than the entries travel on: on
    theirs its answer could be taken for theirs."""
    running = pi.agent()
    pi.backend.enqueue()
    pi.frontend.wait(lambda: pi.frontend.seqs() == [1])  # a connection that is kept

    def fail_meanwhile(_: Request) -> Reply:
        pi.frontend.on_entries = to_entries(lambda _: Reply(500, {}, {"error": "boom"}, delay=2))
        known = len(pi.frontend.of_kind("entries"))
        if not seqs:
            seqs.append(pi.backend.enqueue())
            wait_until(lambda: len(pi.frontend.of_kind("entries")) > known, what="the entry")
        return Reply(500, {}, {"error": "boom"})

    seqs: list[int] = []
    pi.frontend.on_file = fail_meanwhile
    call = pi.backend.end_call(seconds=0.01)
    pi.frontend.wait(lambda: pi.frontend.of_kind("file") and seqs)
    [seq] = seqs
    pending = [call.seq("recording_file"), seq]
    wait_until(lambda: list(waiting(pi.db)) == pending, what="both rows", state=running.log)
    entries = next(r for r in pi.frontend.of_kind("entries") if r.entries[0]["seq"] == seq)
    empty = pi.frontend.of_kind("empty")[0]
    assert entries.finished is not None and empty.finished is not None
    assert entries.started < empty.started < empty.finished < entries.finished
    assert pi.db.pending() == pending


# --- connections ------------------------------------------------------------------------------


@rows("broken", [Reply(reset=True), Reply(raw=b"")], ids=["reset", "closed"])
def test_a_reset_on_a_reused_connection_is_tried_once_more_on_a_fresh_one(
    pi: Pi, broken: Reply
) -> None:
    pi.backend.enqueue_many(2)
    pi.frontend.on_entries = script(None, broken)
    pi.once(code=DONE, SYNC_BATCH_SIZE=1)
    assert [request.entries[0]["seq"] for request in pi.frontend.requests] == [1, 2, 2]
    assert pi.frontend.connections == 2
    keys = [request.headers["Idempotency-Key"] for request in pi.frontend.requests]
    assert keys[1] == keys[2] != keys[0]


def test_answers_that_trickle_end_at_the_deadline_and_confirm_nothing(pi: Pi) -> None:
    """A byte each 0.3 s would outlive every socket time limit of 1 s."""
    pi.backend.enqueue()
    answer = Reply(200, {}, {"ok": True, "text": "x" * 200}, trickle=0.3)
    pi.frontend.on_entries = to_entries(lambda _: answer)
    pi.once(code=LATER, SYNC_TIMEOUT_SEC=1, timeout=20)
    assert waiting(pi.db)[1]["code"] == "NETWORK_TIMEOUT"


# --- the `rejected` extension -----------------------------------------------------------------


def test_rejected_entries_die_and_the_others_are_sent_by_the_same_request(pi: Pi) -> None:
    pi.backend.enqueue_many(100)
    refused = {3: "INVALID_NUMBER", 77: "GONE"}
    for seq, code in refused.items():
        entity = entity_of(pi.db, seq)
        pi.frontend.rejected[entity] = code
    pi.once(code=PERSON)
    assert len(pi.frontend.requests) == 1
    assert pi.frontend.seqs() == [seq for seq in range(1, 101) if seq not in refused]
    assert not pi.db.pending()
    letters = dead_letters(pi.db)
    assert list(letters) == list(refused)
    for seq, code in refused.items():
        assert letters[seq]["error_code"] == "REJECTED"
        assert code in letters[seq]["error_message"]
        assert "refused for good" in letters[seq]["error_message"]
    assert receipts(pi.db)[0]["entries"] == 98

"""The table of verdicts, row by row: what becomes of an entry, and of those beside it."""

import email.utils
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from frontend import Frontend, Hook, Reply, Request, script
from ledger import counter, dead_letters, entity_of, let_hours_pass, receipts, waiting
from pi import Pi
from waiting import wait_until

HTML = "<html><body>Welcome to the hotel's wireless network</body></html>"
OK: dict[str, Any] = {"ok": True}
DONE, PERSON, UNAVAILABLE, LATER = 0, 1, 69, 75  # exit codes
INTERIM = [b"HTTP/1.1 102 Processing\r\n\r\n", b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n"]
PAUSE = Reply(429, {"Retry-After": "3600"})


def raw_200(length: str) -> bytes:
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
    return head.encode("latin-1") + b'{"ok": true}'


END_SESSION = """
    select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'serversync'
"""


def to_entries(hook: Hook) -> Hook:
    """What misbehaves only when there are entries: the empty request is answered as it should."""
    return lambda request: hook(request) if request.entries else None


@dataclass(frozen=True)
class Row:
    """What the frontend answers, and the code that the agent shall write down."""

    name: str
    code: str
    reply: Reply
    timeout: str = "30"

    def __str__(self) -> str:
        return self.name


SENT = [
    Row("200", "sent", Reply(200, {}, OK)),
    Row("201", "sent", Reply(201, {}, OK)),
    Row("200 with more", "sent", Reply(200, {}, {"ok": True, "rejected": [], "stored": 1})),
    Row("409 ok", "conflict_processed", Reply(409, {}, OK)),
    Row("409 code", "conflict_processed", Reply(409, {}, {"code": "ALREADY_PROCESSED"})),
    Row(
        "409 error code",
        "conflict_processed",
        Reply(409, {}, {"ok": False, "error": {"code": "ALREADY_PROCESSED", "message": "twice"}}),
    ),
    Row("200 after 102 and 103", "sent", Reply(raw=b"".join([*INTERIM, raw_200("12")]))),
]
DEAD = [
    Row("400 JSON", "BAD_REQUEST", Reply(400, {}, {"error": "entries[0] is not valid"})),
    Row("422 JSON", "BAD_REQUEST", Reply(422, {}, {"detail": []})),
]
SUSPECT = [
    Row("200 HTML", "BAD_RESPONSE", Reply(200, {}, HTML)),
    Row("200 empty", "BAD_RESPONSE", Reply(200)),
    Row("204", "BAD_RESPONSE", Reply(204, {"Content-Length": "0"})),
    Row("200 not ok", "BAD_RESPONSE", Reply(200, {}, {"ok": False})),
    Row("200 ok as text", "BAD_RESPONSE", Reply(200, {}, {"ok": "true"})),
    Row("200 list", "BAD_RESPONSE", Reply(200, {}, b'[{"ok": true}]')),
    Row("200 cut JSON", "BAD_RESPONSE", Reply(200, {}, b'{"ok": tru')),
    Row("400 HTML", "BAD_RESPONSE", Reply(400, {}, HTML)),
    Row("400 list", "BAD_RESPONSE", Reply(400, {}, b'["no"]')),
    Row("422 empty", "BAD_RESPONSE", Reply(422)),
    Row("not HTTP", "BAD_RESPONSE", Reply(raw=b"SSH-2.0-OpenSSH_9.2\r\n")),
    Row("a length that is none", "BAD_RESPONSE", Reply(raw=raw_200("\u00b2"))),
    Row("302", "REDIRECTED", Reply(302, {"Location": "/login"}, HTML)),
    Row("308", "REDIRECTED", Reply(308, {"Location": "/api/ingest/sync"})),
    Row("304", "REDIRECTED", Reply(304)),
    Row("401", "UNAUTHORIZED", Reply(401, {}, {"error": "unauthorized"})),
    Row("403", "UNAUTHORIZED", Reply(403, {}, HTML)),
    Row("404", "NOT_FOUND", Reply(404, {}, {"error": "not found"})),
    Row("405", "NOT_FOUND", Reply(405, {"Allow": "GET"}, HTML)),
    Row("409 empty object", "CONFLICT", Reply(409, {}, {})),
    Row("409 HTML", "CONFLICT", Reply(409, {}, HTML)),
    Row("409 running", "CONFLICT", Reply(409, {}, {"code": "IN_PROGRESS"})),
    Row("409 running, not ok", "CONFLICT", Reply(409, {}, {"ok": False, "code": "IN_PROGRESS"})),
    Row("409 foreign key", "CONFLICT", Reply(409, {}, {"idempotencyKey": "another"})),
    Row("500", "FRONTEND_5XX", Reply(500, {}, {"error": "boom"})),
    Row("502", "FRONTEND_5XX", Reply(502, {}, HTML)),
    Row("503", "FRONTEND_5XX", Reply(503, {}, HTML)),
    Row("503 for a while", "RATE_LIMITED", Reply(503, {"Retry-After": "3600"}, HTML)),
    Row("429", "RATE_LIMITED", PAUSE),
    Row("429 for no time", "RATE_LIMITED", Reply(429)),
    Row("413", "TOO_LARGE", Reply(413, {}, HTML)),
    Row("507", "FRONTEND_5XX", Reply(507)),
    Row("408", "NETWORK_TIMEOUT", Reply(408, {}, {"error": "too slow"})),
    Row("time-out", "NETWORK_TIMEOUT", Reply(stall=60), "0.5"),
    Row("reset", "NETWORK_RESET", Reply(reset=True)),
    Row("end without an answer", "NETWORK_RESET", Reply(raw=b"")),
    Row("half an answer", "NETWORK_RESET", Reply(200, {}, OK, half=True)),
    Row("418", "UNKNOWN", Reply(418, {}, {"ok": True})),
    Row("402", "UNKNOWN", Reply(402, {}, {"error": "pay"})),
    Row("600", "UNKNOWN", Reply(600, {}, OK)),
]
rows = pytest.mark.parametrize


@rows("row", SENT, ids=str)
def test_an_entry_that_the_frontend_has_is_sent(pi: Pi, row: Row) -> None:
    pi.backend.enqueue_many(101)
    pi.frontend.on_entries = lambda _: row.reply
    pi.once(code=DONE)
    assert not pi.db.pending()
    written = [(receipt["entries"], receipt["outcome"]) for receipt in receipts(pi.db)]
    assert written == [(100, row.code), (1, row.code)]
    assert len(pi.frontend.requests) == 2


@rows("row", DEAD, ids=str)
def test_an_entry_at_fault_dies_and_the_rest_of_its_batch_arrives(pi: Pi, row: Row) -> None:
    bad = _two_among_a_hundred(pi, row, PERSON)
    letters = dead_letters(pi.db)
    assert list(letters) == bad
    for letter in letters.values():
        assert letter["error_code"] == row.code
        assert letter["http_status"] == row.reply.status
    assert not pi.db.pending()
    assert not waiting(pi.db)


@rows("row", SUSPECT, ids=str)
def test_a_suspect_entry_waits_uncharged_and_the_rest_of_its_batch_arrives(
    pi: Pi, row: Row
) -> None:
    bad = _two_among_a_hundred(pi, row, LATER)
    failures = waiting(pi.db)
    assert list(failures) == pi.db.pending() == bad
    for failure in failures.values():
        assert failure["code"] == row.code
        assert failure["http_status"] == (None if row.code == "NETWORK_RESET" else _status(row))
        # Not charged at first; a short first backoff may have made it due again meanwhile.
        assert failure["attempts"] < failure["tries"]
    assert not dead_letters(pi.db)


def _status(row: Row) -> int | None:
    """The status of a whole answer; without one there is none."""
    return None if row.reply.raw is not None or row.reply.stall else row.reply.status


def _two_among_a_hundred(pi: Pi, row: Row, code: int) -> list[int]:
    """Bad entries, one at the head and one in the middle of a hundred; their seqs."""
    bad = [pi.poisoned(row.reply)]
    first, _ = pi.backend.enqueue_many(36)
    bad.append(pi.poisoned(row.reply))
    _, last = pi.backend.enqueue_many(62)
    assert "Traceback" not in pi.once(code=code, SYNC_TIMEOUT_SEC=row.timeout).stderr
    good = [seq for seq in range(first, last + 1) if seq not in bad]
    assert sorted(pi.frontend.seqs()) == good
    # For each a hundred, its halves and so on down to one; a reset on a reused connection is tried
    # twice.
    assert len(pi.frontend.requests) <= 2 * 2 * 16
    return bad


@rows(
    ("words", "sent"),
    [
        ({}, True),
        ({"code": "ALREADY_PROCESSED", "ok": False}, True),
        ({"code": "IN_PROGRESS", "ok": False}, False),
        ({"status": "running"}, False),
        ({"error": "busy"}, False),
    ],
    ids=str,
)
def test_a_409_with_our_own_key_means_that_the_frontend_has_it_unless_it_says_more(
    pi: Pi, words: dict[str, Any], sent: bool
) -> None:
    """Beside a word of trouble it may mean that the first one is still under way."""
    pi.backend.enqueue()
    pi.frontend.on_entries = to_entries(
        lambda request: Reply(
            409, {}, {"idempotencyKey": request.headers["Idempotency-Key"], **words}
        )
    )
    pi.once(code=DONE if sent else LATER)
    assert pi.db.pending() == ([] if sent else [1])
    assert counter(pi.db, "sent_as", "conflict_processed") == sent
    assert [row["code"] for row in waiting(pi.db).values()] == ([] if sent else ["CONFLICT"])


@rows("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_never_followed_and_the_token_goes_nowhere_else(
    pi: Pi, status: int, tmp_path: Path
) -> None:
    pi.backend.enqueue()
    with Frontend(tmp_path / "elsewhere") as elsewhere:
        pi.frontend.on_entries = lambda request: Reply(
            status, {"Location": elsewhere.url + request.path}
        )
        pi.once(code=UNAVAILABLE, SYNC_TOKEN="secret-token")
    assert not elsewhere.connections
    assert [request.kind for request in pi.frontend.requests] == ["entries", "empty"]
    assert pi.db.pending() == [1]


# --- outages that show themselves at once -----------------------------------------------------


@rows("count", [1, 100])
def test_a_refused_connection_is_an_outage_and_nobodys_fault(pi: Pi, count: int) -> None:
    pi.backend.enqueue_many(count)
    pi.frontend.stop()
    done = pi.once(code=UNAVAILABLE)
    assert (
        len([line for line in done.stderr.splitlines() if "outage, nothing is lost" in line]) == 1
    )
    assert "is retried" not in done.stderr
    assert not waiting(pi.db)
    pi.frontend.start()
    pi.once(code=DONE)
    assert pi.frontend.seqs() == list(range(1, count + 1))


@rows("url", ["http://frontend.invalid", "http://127.0.0.1:1"])
def test_a_frontend_that_cannot_be_found_is_an_outage(pi: Pi, url: str) -> None:
    pi.backend.enqueue_many(100)
    done = pi.once(code=UNAVAILABLE, FRONTEND_BASE_URL=url, SYNC_TIMEOUT_SEC=5)
    assert "cannot be reached" in done.stderr
    assert not waiting(pi.db)
    assert not dead_letters(pi.db)


def test_a_tls_failure_is_an_outage_and_names_its_own_reason(pi: Pi) -> None:
    pi.backend.enqueue_many(100)
    done = pi.once(code=UNAVAILABLE, FRONTEND_BASE_URL=pi.frontend.url.replace("http:", "https:"))
    assert "TLS" in done.stderr
    assert "clock" not in done.stderr
    assert not waiting(pi.db)


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


@rows("refusal", [Reply(500, {}, {"error": "no"}), Reply(400, {}, HTML)], ids=["500", "400"])
def test_a_frontend_that_refuses_the_empty_request_gets_everything_all_the_same(
    pi: Pi, refusal: Reply
) -> None:
    pi.backend.enqueue_many(30)
    poison = pi.backend.enqueue()
    call = pi.backend.end_call(seconds=0.01)
    pi.frontend.on_entries = lambda request: None if request.entries else refusal
    pi.frontend.poison[entity_of(pi.db, poison)] = Reply(500, {}, {"error": "boom"})
    running = pi.agent()
    wait_until(lambda: pi.db.pending() == [poison], what="all others", state=running.log)
    assert call.call_log_id in pi.frontend.files
    # Once it cost an outage; from then on the frontend is not asked so any more.
    assert len(running.lines("it is not asked so any more")) == 1
    assert len(pi.frontend.of_kind("empty")) == 2
    told = running.lines("outage, nothing is lost")
    let_hours_pass(pi.db)
    wait_until(lambda: waiting(pi.db)[poison]["tries"] > 1, what="another try", state=running.log)
    late = pi.backend.enqueue()
    wait_until(lambda: late in pi.frontend.seqs(), timeout=5, what="a new one", state=running.log)
    assert running.lines("outage, nothing is lost") == told
    assert len(pi.frontend.of_kind("empty")) == 2


# --- 429 --------------------------------------------------------------------------------------


@rows("status", [429, 503])
@rows("count", [1, 100])
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


@rows("form", ["seconds", "date"])
@rows("kind", ["entries", "file"])
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


@rows("value", ["soon", "\u0663"])  # all other values: test_policy.py
def test_a_retry_after_that_makes_no_sense_is_an_ordinary_outage(pi: Pi, value: str) -> None:
    pi.backend.enqueue()
    refusal = Reply(429, {"Retry-After": value.encode().decode("latin-1")})
    pi.frontend.on_entries = script(refusal, refusal)
    running = pi.agent()
    pi.frontend.wait(lambda: pi.frontend.seqs() == [1])
    line = running.wait_log("recovered")
    assert "RATE_LIMITED" in line
    wait_until(lambda: not waiting(pi.db), what="its end", state=running.log)


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
    with pi.db.admin() as admin:  # a new session looks at everything anew
        admin.execute(END_SESSION)
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


def test_a_connection_that_the_frontend_closed_meanwhile_costs_nothing(pi: Pi) -> None:
    running = pi.agent()
    pi.backend.enqueue()
    pi.frontend.wait(lambda: pi.frontend.seqs() == [1])
    pi.wait_delivered()
    pi.frontend.hang_up()
    pi.backend.enqueue()
    pi.frontend.wait(lambda: pi.frontend.seqs() == [1, 2])
    pi.wait_delivered()
    assert not waiting(pi.db)
    assert not running.lines("is retried")


def test_answers_that_trickle_end_at_the_deadline_and_confirm_nothing(pi: Pi) -> None:
    """A byte each 0.3 s would outlive every socket time limit of 1 s."""
    pi.backend.enqueue()
    answer = Reply(200, {}, {"ok": True, "text": "x" * 200}, trickle=0.3)
    pi.frontend.on_entries = to_entries(lambda _: answer)
    pi.once(code=LATER, SYNC_TIMEOUT_SEC=1, timeout=20)
    assert waiting(pi.db)[1]["code"] == "NETWORK_TIMEOUT"


def test_an_answer_before_the_end_of_the_body_confirms_nothing(pi: Pi) -> None:
    """A 200 that came after a part of the request cannot speak for all of it."""
    pi.backend.enqueue(payload={"text": "x" * 7_000_000})
    early = Reply(200, {"Connection": "close"}, OK, after=100_000)
    pi.frontend.on_head = lambda request: early if request.length > 1000 else None
    pi.once(code=LATER)
    assert pi.db.pending() == [1]
    pi.frontend.on_head = None
    let_hours_pass(pi.db)
    pi.once(code=DONE)
    assert pi.frontend.seqs() == [1]


def test_an_answer_that_is_too_long_confirms_nothing(pi: Pi) -> None:
    pi.backend.enqueue()
    answer = Reply(200, {}, {"ok": True, "text": "x" * 1_000_000})
    pi.frontend.on_entries = to_entries(lambda _: answer)
    pi.once(code=LATER)
    assert waiting(pi.db)[1]["code"] == "BAD_RESPONSE"


def test_text_from_the_frontend_is_cleaned_and_masked_before_it_is_cut_and_stored(pi: Pi) -> None:
    """An error page that echoes the token, also where a text is cut: no piece of it is kept."""
    token = "5Kw9ZtPq2LxVb7NcRj4GhDf8YsMu3EaT"
    pages: list[Reply] = [
        Reply(500, {}, b"\x00\xff\xed\xa0\x80 Authorization: Bearer abcdefgh " + b"y" * 5000),
        Reply(400, {}, {"error": f"no such token: {token}"}),
    ]
    for offset in (300, *range(900, 1040, 20), 4000, 4020, 4060, 4090):
        pages.append(Reply(500, {}, "y" * offset + token + "z" * 5000))
    for page in pages:
        pi.frontend.poison[entity_of(pi.db, pi.backend.enqueue())] = page
    done = pi.once(code=PERSON, SYNC_TOKEN=token)
    kept = [row["reason"] for row in waiting(pi.db).values()]
    kept += [letter["error_message"] for letter in dead_letters(pi.db).values()]
    assert len(kept) == len(pages)
    assert max(len(reason) for reason in kept) <= 1024
    assert all(re.search("HTTP [45]00", reason) for reason in kept)
    for text in [done.stderr, *kept]:
        assert "abcdefgh" not in text
        assert not [token[at : at + 4] for at in range(29) if token[at : at + 4] in text]


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


def nonsense() -> Iterator[tuple[str, object]]:
    item = {"seq": 1, "code": "NO", "message": "no"}
    yield "repeated seq", [item, item]
    yield "unknown seq", [{**item, "seq": 4711}]
    yield "seq as text", [{**item, "seq": "1"}]
    yield "seq as true", [{**item, "seq": True}]
    yield "seq as fraction", [{**item, "seq": 1.0}]
    yield "no seq", [{"code": "NO"}]
    yield "numbers", [1]
    yield "no list", {"1": item}
    yield "text", "1"


@rows(("name", "rejected"), list(nonsense()), ids=[name for name, _ in nonsense()])
def test_a_list_of_rejected_entries_that_makes_no_sense_confirms_nothing(
    pi: Pi, name: str, rejected: object
) -> None:
    pi.backend.enqueue_many(2)
    pi.frontend.on_entries = lambda _: Reply(200, {}, {"ok": True, "rejected": rejected})
    # For the parts of the batch the same list could make sense: one request for each is enough.
    assert pi.agent.once(SYNC_BATCH_SIZE=2).returncode in (LATER, PERSON)
    assert pi.frontend.requests[0].status == 200
    assert [len(request.entries) for request in pi.frontend.requests[:4]] == [2, 0, 1, 1]
    assert waiting(pi.db)[2]["code"] == "BAD_RESPONSE"

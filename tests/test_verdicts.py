"""The table of verdicts, row by row: an entry alone, and one among a hundred."""

import email.utils
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from agent import AgentFactory, NotifySocket
from backend import Backend
from frontend import Frontend, Hook, Reply, Request, script
from ledger import counter, dead_letters, entity_of, hold, let_hours_pass, receipts, waiting
from pg import Database
from waiting import wait_until

HTML = "<html><body>Welcome to the hotel's wireless network</body></html>"
OK: dict[str, Any] = {"ok": True}
DONE, PERSON, UNAVAILABLE, LATER = 0, 1, 69, 75  # exit codes


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
]
DEAD = [
    Row("400 JSON", "BAD_REQUEST", Reply(400, {}, {"error": "entries[0] is not valid"})),
    Row("422 JSON", "BAD_REQUEST", Reply(422, {}, {"detail": []})),
    Row("413", "TOO_LARGE", Reply(413, {}, HTML)),
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
    Row("409 foreign key", "CONFLICT", Reply(409, {}, {"idempotencyKey": "another"})),
    Row("500", "FRONTEND_5XX", Reply(500, {}, {"error": "boom"})),
    Row("502", "FRONTEND_5XX", Reply(502, {}, HTML)),
    Row("503", "FRONTEND_5XX", Reply(503, {"Retry-After": "3600"}, HTML)),
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
def test_an_entry_that_the_frontend_has_is_sent(
    row: Row, db: Database, frontend: Frontend, backend: Backend, agent: AgentFactory
) -> None:
    backend.enqueue()
    frontend.on_entries = lambda _: row.reply
    assert agent.once().returncode == DONE
    assert not db.pending()
    assert [receipt["outcome"] for receipt in receipts(db)] == [row.code]
    backend.enqueue_many(100)
    assert agent.once().returncode == DONE
    assert not db.pending()
    assert [receipt["entries"] for receipt in receipts(db)] == [1, 100]
    assert len(frontend.requests) == 2


@rows("row", DEAD, ids=str)
def test_an_entry_at_fault_dies_and_the_rest_of_its_batch_arrives(
    row: Row, db: Database, frontend: Frontend, backend: Backend, agent: AgentFactory
) -> None:
    alone, among = _alone_and_among_a_hundred(row, PERSON, db, frontend, backend, agent)
    letters = dead_letters(db)
    assert list(letters) == [alone, among]
    for letter in letters.values():
        assert letter["error_code"] == row.code
        assert letter["http_status"] == row.reply.status
    assert not db.pending()
    assert not waiting(db)


@rows("row", SUSPECT, ids=str)
def test_a_suspect_entry_is_set_aside_uncharged_and_the_rest_of_its_batch_arrives(
    row: Row, db: Database, frontend: Frontend, backend: Backend, agent: AgentFactory
) -> None:
    alone, among = _alone_and_among_a_hundred(row, LATER, db, frontend, backend, agent)
    failures = waiting(db)
    assert list(failures) == db.pending() == [alone, among]
    for failure in failures.values():
        assert failure["error_code"] == row.code
        assert failure["http_status"] == (None if row.code == "NETWORK_RESET" else _status(row))
    # Not charged at first; a short first backoff may have made it due again in the same cycle.
    assert failures[among]["attempts"] < failures[among]["tries"]
    assert not dead_letters(db)


def _status(row: Row) -> int | None:
    """The status of a whole answer; without one there is none."""
    return None if row.reply.raw is not None or row.reply.stall else row.reply.status


def _alone_and_among_a_hundred(
    row: Row,
    code: int,
    db: Database,
    frontend: Frontend,
    backend: Backend,
    agent: AgentFactory,
) -> tuple[int, int]:
    """First one bad entry, then another one in the middle of a hundred; both seqs."""

    def bad() -> int:
        seq = backend.enqueue()
        entity = entity_of(db, seq)
        frontend.poison[entity] = row.reply
        return seq

    alone = bad()
    assert agent.once(SYNC_TIMEOUT_SEC=row.timeout).returncode == code
    assert not frontend.entries
    hold(db)
    first, last = backend.enqueue_many(36)
    among = bad()
    backend.enqueue_many(63)
    asked = len(frontend.requests)
    assert agent.once(SYNC_TIMEOUT_SEC=row.timeout).returncode == code
    assert frontend.seqs() == [*range(first, last + 1), *range(among + 1, among + 64)]
    # A hundred, its halves and so on down to one; a reset on a reused connection is tried twice.
    assert len(frontend.requests) - asked <= 2 * 16
    return alone, among


def test_a_409_with_our_own_key_means_that_the_frontend_has_it(
    db: Database, frontend: Frontend, backend: Backend, agent: AgentFactory
) -> None:
    backend.enqueue_many(100)
    frontend.on_entries = lambda request: Reply(
        409, {}, {"idempotencyKey": request.headers["Idempotency-Key"]}
    )
    assert agent.once().returncode == DONE
    assert not db.pending()
    assert counter(db, "sent_as", "conflict_processed") == 100


@rows("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_never_followed_and_the_token_goes_nowhere_else(
    status: int,
    db: Database,
    frontend: Frontend,
    backend: Backend,
    agent: AgentFactory,
    tmp_path: Path,
) -> None:
    backend.enqueue()
    with Frontend(tmp_path / "elsewhere") as elsewhere:
        frontend.on_entries = lambda request: Reply(
            status, {"Location": elsewhere.url + request.path}
        )
        assert agent.once(SYNC_TOKEN="secret-token").returncode == LATER
        assert not elsewhere.requests
    assert not elsewhere.connections
    assert len(frontend.requests) == 1
    assert db.pending() == [1]


# --- outages that show themselves at once -----------------------------------------------------


@rows("count", [1, 100])
def test_a_refused_connection_is_an_outage_and_nobodys_fault(
    count: int, db: Database, frontend: Frontend, backend: Backend, agent: AgentFactory
) -> None:
    backend.enqueue_many(count)
    frontend.stop()
    done = agent.once()
    assert done.returncode == UNAVAILABLE
    assert (
        len([line for line in done.stderr.splitlines() if "outage, nothing is lost" in line]) == 1
    )
    assert "set aside" not in done.stderr
    assert not waiting(db)
    frontend.start()
    assert agent.once().returncode == DONE
    assert frontend.seqs() == list(range(1, count + 1))


@rows("url", ["http://frontend.invalid", "http://127.0.0.1:1"])
def test_a_frontend_that_cannot_be_found_is_an_outage(
    url: str, db: Database, backend: Backend, agent: AgentFactory
) -> None:
    backend.enqueue_many(100)
    done = agent.once(FRONTEND_BASE_URL=url, SYNC_TIMEOUT_SEC=5)
    assert done.returncode == UNAVAILABLE
    assert "cannot be reached" in done.stderr
    assert not waiting(db)
    assert not dead_letters(db)


def test_a_tls_failure_is_an_outage_and_names_the_clock(
    db: Database, frontend: Frontend, backend: Backend, agent: AgentFactory
) -> None:
    backend.enqueue_many(100)
    done = agent.once(FRONTEND_BASE_URL=frontend.url.replace("http:", "https:"))
    assert done.returncode == UNAVAILABLE
    assert "TLS" in done.stderr
    assert "clock" in done.stderr
    assert not waiting(db)


# --- 429 --------------------------------------------------------------------------------------


@rows("count", [1, 100])
def test_a_429_is_one_request_and_an_outage_without_any_failure(
    count: int, db: Database, frontend: Frontend, backend: Backend, agent: AgentFactory
) -> None:
    backend.enqueue_many(count)
    backend.end_call(seconds=0.01)
    frontend.on_entries = lambda _: Reply(429, {"Retry-After": "30"})
    assert agent.once().returncode == UNAVAILABLE
    assert len(frontend.requests) == 1
    assert not waiting(db)
    assert not dead_letters(db)


def _in_seconds(seconds: float) -> str:
    return email.utils.formatdate(time.time() + seconds, usegmt=True)


@rows("form", ["seconds", "date"])
@rows("kind", ["entries", "file"])
def test_nothing_at_all_is_sent_before_retry_after_has_passed(
    form: str,
    kind: str,
    db: Database,
    frontend: Frontend,
    backend: Backend,
    agent: AgentFactory,
) -> None:
    """Whoever is told to wait, entries or files: both do."""
    # A date knows no fractions of a second: the pause lies between three and four.
    frontend_hook = _pause_hook("3" if form == "seconds" else None)
    call = backend.end_call(seconds=0.01)
    if kind == "entries":
        frontend.on_entries = frontend_hook
    else:
        frontend.on_file = frontend_hook
    running = agent()
    running.wait_log("outage")
    backend.enqueue()
    backend.end_call(seconds=0.01)
    running.wait_log("recovered")
    frontend.wait(lambda: len(frontend.files) == 2)
    refused = next(request for request in frontend.requests if request.status == 429)
    later = [r for r in frontend.requests if r.started > refused.started and r is not refused]
    assert refused.kind == kind
    assert refused.finished is not None
    assert min(request.started for request in later) - refused.finished >= 2.9
    assert not waiting(db)
    assert call.call_log_id in frontend.files


def _pause_hook(seconds: str | None) -> Hook:
    """429 once; without seconds a date that is computed when the request comes."""
    asked: list[Request] = []

    def hook(request: Request) -> Reply | None:
        asked.append(request)
        return Reply(429, {"Retry-After": seconds or _in_seconds(4)}) if len(asked) == 1 else None

    return hook


@rows("value", ["soon", "-5", "1e3", "", "Wed, 99 Foo 2099 99:99:99 GMT", "3 seconds", "\u0663"])
def test_a_retry_after_that_makes_no_sense_is_an_ordinary_outage(
    value: str, db: Database, frontend: Frontend, backend: Backend, agent: AgentFactory
) -> None:
    backend.enqueue()
    headers = {"Retry-After": value.encode().decode("latin-1")}
    frontend.on_entries = script(Reply(429, headers))
    running = agent()
    frontend.wait(lambda: frontend.seqs() == [1])
    line = running.wait_log("recovered")
    assert "RATE_LIMITED" in line
    assert not waiting(db)


@rows("value", ["86400", "999999999", "date"])
def test_a_retry_after_of_days_counts_as_one_hour(
    value: str, frontend: Frontend, backend: Backend, agent: AgentFactory
) -> None:
    backend.enqueue()
    value = _in_seconds(30 * 86400) if value == "date" else value
    frontend.on_entries = lambda _: Reply(429, {"Retry-After": value})
    said = re.search(r"next try in (\d+) s", agent.once().stderr)
    assert said and 3600 <= int(said[1]) <= 3960  # the random part comes on top


def test_a_429_to_an_entry_during_an_upload_holds_the_next_upload_back(
    frontend: Frontend, backend: Backend, agent: AgentFactory, notify: NotifySocket
) -> None:
    """The upload that travels may end; its success does not end the pause."""
    first = backend.end_call(seconds=40)
    backend.end_call(seconds=0.01)
    frontend.read_rate = 500_000
    running = agent(notify=notify, SYNC_UPLOAD_KBPS=8000)
    frontend.wait(lambda: frontend.of_kind("file") and frontend.of_kind("file")[0].received > 100)
    frontend.on_entries = lambda _: Reply(429, {"Retry-After": "3600"})
    backend.enqueue()
    frontend.wait(lambda: any(request.status == 429 for request in frontend.requests))
    uploading = frontend.of_kind("file")[0]
    assert uploading.finished is None, "the upload was too fast for this test"
    frontend.wait(lambda: first.call_log_id in frontend.files)
    notify.wait_for("outage since")
    running.stop()
    assert len(frontend.of_kind("file")) == 1
    assert len([request for request in frontend.requests if request.status == 429]) == 1


# --- connections ------------------------------------------------------------------------------


@rows("broken", [Reply(reset=True), Reply(raw=b"")], ids=["reset", "closed"])
def test_a_reset_on_a_reused_connection_is_tried_once_more_on_a_fresh_one(
    broken: Reply, db: Database, frontend: Frontend, backend: Backend, agent: AgentFactory
) -> None:
    backend.enqueue_many(2)
    frontend.on_entries = script(None, broken)
    assert agent.once(SYNC_BATCH_SIZE=1).returncode == DONE
    assert [request.entries[0]["seq"] for request in frontend.requests] == [1, 2, 2]
    assert frontend.connections == 2
    keys = [request.headers["Idempotency-Key"] for request in frontend.requests]
    assert keys[1] == keys[2] != keys[0]


def test_a_connection_that_the_frontend_closed_meanwhile_costs_nothing(
    db: Database, frontend: Frontend, backend: Backend, agent: AgentFactory
) -> None:
    running = agent()
    backend.enqueue()
    frontend.wait(lambda: frontend.seqs() == [1])
    wait_until(lambda: not db.pending())
    frontend.hang_up()
    backend.enqueue()
    frontend.wait(lambda: frontend.seqs() == [1, 2])
    wait_until(lambda: not db.pending())
    assert not waiting(db)
    assert not running.lines("set aside")


def test_answers_that_trickle_end_at_the_deadline_and_confirm_nothing(
    db: Database, frontend: Frontend, backend: Backend, agent: AgentFactory
) -> None:
    """A byte each 0.3 s would outlive every socket time limit of 1 s."""
    backend.enqueue()
    frontend.on_entries = lambda _: Reply(200, {}, {"ok": True, "text": "x" * 200}, trickle=0.3)
    assert agent.once(SYNC_TIMEOUT_SEC=1, timeout=20).returncode == LATER
    assert waiting(db)[1]["error_code"] == "NETWORK_TIMEOUT"


def test_an_answer_before_the_end_of_the_body_confirms_nothing(
    db: Database, frontend: Frontend, backend: Backend, agent: AgentFactory
) -> None:
    """A 200 that came after a part of the request cannot speak for all of it."""
    backend.enqueue(payload={"text": "x" * 7_000_000})
    frontend.on_head = lambda _: Reply(200, {"Connection": "close"}, OK, after=100_000)
    assert agent.once().returncode == LATER
    assert db.pending() == [1]
    frontend.on_head = None
    let_hours_pass(db)
    assert agent.once().returncode == DONE
    assert frontend.seqs() == [1]


def test_an_answer_that_is_too_long_confirms_nothing(
    db: Database, frontend: Frontend, backend: Backend, agent: AgentFactory
) -> None:
    backend.enqueue()
    frontend.on_entries = lambda _: Reply(200, {}, {"ok": True, "text": "x" * 1_000_000})
    assert agent.once().returncode == LATER
    assert waiting(db)[1]["error_code"] == "BAD_RESPONSE"


def test_text_from_the_frontend_is_cleaned_before_it_is_stored(
    db: Database, frontend: Frontend, backend: Backend, agent: AgentFactory
) -> None:
    backend.enqueue()
    text = b"\x00\xff\xed\xa0\x80 Authorization: Bearer abcdefgh " + b"y" * 5000
    frontend.on_entries = lambda _: Reply(500, {}, text)
    assert agent.once().returncode == LATER
    error = waiting(db)[1]["error"]
    assert "abcdefgh" not in error
    assert "HTTP 500" in error
    assert len(error.encode()) <= 1024


# --- the `rejected` extension -----------------------------------------------------------------


def test_rejected_entries_die_and_the_others_are_sent_by_the_same_request(
    db: Database, frontend: Frontend, backend: Backend, agent: AgentFactory
) -> None:
    backend.enqueue_many(100)
    refused = {3: "INVALID_NUMBER", 77: "GONE"}
    for seq, code in refused.items():
        entity = entity_of(db, seq)
        frontend.rejected[entity] = code
    assert agent.once().returncode == PERSON
    assert len(frontend.requests) == 1
    assert frontend.seqs() == [seq for seq in range(1, 101) if seq not in refused]
    assert not db.pending()
    letters = dead_letters(db)
    assert list(letters) == list(refused)
    for seq, code in refused.items():
        assert letters[seq]["error_code"] == "REJECTED"
        assert code in letters[seq]["error_message"]
        assert "refused for good" in letters[seq]["error_message"]
    assert receipts(db)[0]["entries"] == 98


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
    name: str,
    rejected: object,
    db: Database,
    frontend: Frontend,
    backend: Backend,
    agent: AgentFactory,
) -> None:
    backend.enqueue_many(2)
    frontend.on_entries = lambda _: Reply(200, {}, {"ok": True, "rejected": rejected})
    # For the parts of the batch the same list could make sense: one request for each is enough.
    assert agent.once(SYNC_BATCH_SIZE=2).returncode in (LATER, PERSON)
    assert frontend.requests[0].status == 200
    assert len(frontend.requests) == 3
    assert waiting(db)[2]["error_code"] == "BAD_RESPONSE"

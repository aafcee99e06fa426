"""Uploads: what goes over the wire, what counts as a confirmation, and what may go wrong."""

import dataclasses
import hashlib
import json
import os
import random
import re
import shutil
import threading
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from agent import Agent
from backend import Call
from frontend import FILE_PATH, Frontend, Reply, Request
from ledger import dead, failures, hold, let_hours_pass, uploads, waiting
from pg import Database
from pi import Pi
from waiting import wait_until

LONG = 60.0  # seconds of audio, 1.9 MB: more than all buffers on the way hold
CRAWL = 20_000  # bytes a second: such an upload goes on until the test lets it go
IMPATIENT: dict[str, Any] = {"SYNC_RETRY_MAX": 1, "SYNC_RETRY_HOURS": 0}


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def wait_for_upload(frontend: Frontend) -> Request:
    """Until the first upload is under way."""
    frontend.wait(lambda: frontend.of_kind("file")[0].received, what="an upload")
    return frontend.of_kind("file")[0]


def is_long(request: Request) -> bool:
    return request.kind == "file" and request.length > 300_000


def long_uploads(frontend: Frontend) -> list[Request]:
    return [request for request in list(frontend.requests) if is_long(request)]


def wait_until_aside(db: Database, running: Agent, call: Call, code: str, tries: int) -> None:
    """Until its upload was set aside so often, for this reason, and never charged."""
    seq = call.seq("recording_file")

    def aside() -> bool:
        now = failures(db)[seq]
        return now[0] == code and now[1] >= tries and now[2] == 0

    wait_until(  # a retry of a slow upload is followed by nine times its time
        aside,
        timeout=90,
        what=f"{code} for entry {seq}, {tries} times",
        state=lambda: f"{failures(db)}, dead: {dead(db)}\n{running.log()}",
    )


def assert_not_uploaded(pi: Pi, call: Call) -> None:
    assert call.seq("recording_file") in pi.db.pending()
    assert pi.backend.upload_status(call) == ("local_only", None)
    assert call.seq("recording_file") not in uploads(pi.db)
    assert call.wav.is_file() and call.meta.is_file()


# -- the wire -------------------------------------------------------------------------------------


def test_the_wire_is_the_contracts_byte_for_byte(pi: Pi) -> None:
    pi.frontend.keep_bodies = True
    metas = [
        b'{"callId": "x"}',
        b'\r\n{\r\n  "a": [1.50, 1e3, null],\t"b": "\\u00e9"\r\n}\r\n\r\n',
        '{"caller": "通話 \U0001f4de", "a": "--serversync-0\\r\\n"}'.encode(),
        b"[]",
        json.dumps({"transcript": "x" * 200_000}).encode(),
    ]
    names = ["8HnT2kQ-a3x9..", "-rf@192.168.1.20", 'q"; filename="evil', "a\r\nX: 1", "é通%2e"]
    calls = []
    for number, (call_id, meta) in enumerate(zip(names, metas, strict=True)):
        name = "mixed.mp3" if number == 3 else "mixed.wav"
        call = pi.backend.end_call(events=0, call_id=call_id, name=name, seconds=number)
        call.meta.write_bytes(meta)
        if number == 0:  # what looks like the end of the body, and line breaks of all kinds
            call.wav.write_bytes(b"\r\n--serversync-\r\n\r\n--\n\r\0\r\n")
        calls.append((call, meta, call.wav.read_bytes()))

    pi.once(SYNC_TOKEN="a-secret-token", SYNC_DEVICE_ID="pi.kitchen")

    requests = pi.frontend.of_kind("file")
    assert len(requests) == len(calls)
    for request, (call, meta, audio) in zip(requests, calls, strict=True):
        filename = call.wav.name
        kind, _, boundary = request.headers["Content-Type"].partition("; boundary=")
        assert kind == "multipart/form-data"
        assert re.fullmatch(r"[A-Za-z0-9-]{1,70}", boundary)
        line = b"--" + boundary.encode() + b"\r\nContent-Disposition: form-data; name="
        assert request.body == (
            line + b'"callLogId"\r\nContent-Type: text/plain\r\n\r\n'
            + call.call_log_id.encode() + b"\r\n"
            + line + b'"recordingId"\r\nContent-Type: text/plain\r\n\r\n'
            + call.recording_id.encode() + b"\r\n"
            + line + b'"meta"; filename="meta.json"\r\nContent-Type: application/json\r\n\r\n'
            + meta + b"\r\n"
            + line + b'"audio"; filename="' + filename.encode()
            + b'"\r\nContent-Type: application/octet-stream\r\n\r\n'
            + audio + b"\r\n--" + boundary.encode() + b"--\r\n"
        )  # fmt: skip
        assert boundary.encode() not in meta + audio
        assert request.headers.get_all("Content-Length") == [str(len(request.body))]
        assert request.raw_head.startswith(f"POST {FILE_PATH} HTTP/1.1\r\n".encode())
        for name in ("Transfer-Encoding", "Content-Encoding", "Expect"):
            assert name not in request.headers
        assert request.headers["Authorization"] == "Bearer a-secret-token"
        assert request.headers["X-Serversync-Device"] == "pi.kitchen"
        assert request.headers["Idempotency-Key"]
        assert not call.directory.exists()
    assert len({request.headers["Idempotency-Key"] for request in requests}) == len(requests)


def test_the_same_file_has_the_same_key_and_a_changed_one_another(pi: Pi) -> None:
    call = pi.backend.end_call(events=0)
    pi.frontend.on_file = lambda request: Reply(503)
    for _ in range(2):
        pi.once(code=75)
        let_hours_pass(pi.db, 72)
    os.utime(call.wav)
    pi.once(code=75)
    first, second, third = (r.headers["Idempotency-Key"] for r in pi.frontend.of_kind("file"))
    assert first == second != third


# -- confirm and record ---------------------------------------------------------------------------


def test_a_confirmed_upload_is_recorded_as_a_whole_and_durably(pi: Pi) -> None:
    with pi.db.admin() as admin:
        admin.execute(f'alter database "{pi.db.name}" set synchronous_commit = off')
    pi.db.execute("create table seen (durable text)")
    pi.db.execute("""
        create function see() returns trigger language plpgsql as $$ begin
            insert into seen values (current_setting('synchronous_commit')); return new;
        end $$""")
    pi.db.execute(
        "create trigger see after update on recordings for each row execute function see()"
    )
    call = pi.backend.end_call(events=0)

    pi.once(SYNC_DELETE_AFTER_SEC=3600)

    seq = call.seq("recording_file")
    url = pi.frontend.file_url(pi.frontend.files[call.call_log_id])
    assert pi.backend.upload_status(call) == ("uploaded", url)
    assert not pi.db.pending() and not failures(pi.db)
    assert pi.db.rows("select durable from seen") == [("on",)]
    [row] = pi.db.dicts("select * from serversync.uploads")
    assert (row["outbox_id"], row["directory"]) == (seq, call.call_id)
    assert row["files"] == [
        {
            "name": path.name,
            "inode": path.stat().st_ino,
            "size": path.stat().st_size,
            "mtime_ns": path.stat().st_mtime_ns,
        }
        for path in (call.wav, call.meta)
    ]
    [receipt] = pi.db.dicts("select * from serversync.deliveries where kind = 'file'")
    assert (receipt["first_seq"], receipt["last_seq"], receipt["bytes"]) == (seq, seq, call.size)
    assert (receipt["http_status"], receipt["outcome"], receipt["url"]) == (200, "sent", url)
    assert receipt["idempotency_key"] == pi.frontend.of_kind("file")[0].headers["Idempotency-Key"]
    # It waits for its quiet time, and is not sent again.
    pi.once(SYNC_DELETE_AFTER_SEC=3600)
    assert len(pi.frontend.of_kind("file")) == 1 and call.wav.is_file()
    # Other columns of the backend's are nobody's business.
    assert pi.db.rows("select synced_at from recordings") == [(None,)]


URL = "https://frontend.example/storage/recordings/x/mixed.wav"
# One of each kind: all others are rows of test_policy.py.
UNCONFIRMED: list[tuple[str, Reply]] = [
    ("BAD_RESPONSE", Reply(200, {}, {"ok": True})),
    ("BAD_RESPONSE", Reply(200, {}, {"ok": False, "fileUrl": URL})),
    ("BAD_RESPONSE", Reply(200, {}, b"")),
    ("BAD_RESPONSE", Reply(200, {}, {"fileUrl": URL, "sizeBytes": 31})),
    ("BAD_RESPONSE", Reply(200, {}, {"fileUrl": URL, "sha256": hashlib.sha256(b"").hexdigest()})),
    ("BAD_RESPONSE", Reply(200, {}, {"fileUrl": URL, "sha256": "no digest"})),
    ("REDIRECTED", Reply(307, {"Location": FILE_PATH})),
    ("CONFLICT", Reply(409, {}, {"error": "CONFLICT", "fileUrl": URL})),
    ("CONFLICT", Reply(409, {}, {"ok": True, "code": "ALREADY_PROCESSED"})),
    ("FRONTEND_5XX", Reply(500, {}, {"fileUrl": URL})),
]


def test_only_an_answer_in_the_contracts_words_is_a_confirmation(pi: Pi) -> None:
    bad: list[tuple[Call, str]] = []
    good: list[Call] = []
    replies: dict[str, Reply] = {}
    for code, reply in UNCONFIRMED:
        bad.append((pi.backend.end_call(events=0, seconds=0.1), code))
        good.append(pi.backend.end_call(events=0, seconds=0.1))  # so that it is no outage
        replies[bad[-1][0].call_log_id] = reply

    def answer(request: Request) -> Reply | None:
        file = request.file
        assert file is not None
        hold(pi.db)  # none is tried again meanwhile: three in a row would be an outage
        said = {"fileUrl": URL, "sizeBytes": file.size, "sha256": file.sha256.upper()}
        return replies.get(file.call_log_id) or Reply(200, {}, said, store=True)

    pi.frontend.on_file = answer
    pi.once(code=75)

    for call in good:
        assert pi.backend.upload_status(call) == ("uploaded", URL)
    assert not dead(pi.db)
    for call, code in bad:
        assert_not_uploaded(pi, call)
        assert failures(pi.db)[call.seq("recording_file")][0] == code, replies[call.call_log_id]

    pi.frontend.on_file = None
    let_hours_pass(pi.db, 72)
    pi.once()
    assert not pi.db.pending() and not dead(pi.db)
    for call, _ in bad:
        assert pi.frontend.files[call.call_log_id].sha256 == call.sha256
        assert not call.directory.exists()


def heads(frontend: Frontend, call: Call | None = None) -> list[Request]:
    """Those for this call; for calls that nobody knows."""
    asked = [request for request in list(frontend.requests) if request.method == "HEAD"]
    if call is not None:
        return [request for request in asked if request.path.endswith(call.call_log_id)]
    return [request for request in asked if request.status == 404]


def test_half_of_the_audio_with_a_200_is_not_confirmed_by_the_default_configuration(pi: Pi) -> None:
    short, good = pi.backend.end_call(events=0), pi.backend.end_call(events=0)

    def store_half(request: Request) -> None:
        assert request.file is not None
        if request.file.call_log_id == short.call_log_id:
            os.truncate(request.file.path, short.size // 2)

    pi.frontend.on_file = store_half
    for _ in range(2):  # from the very first upload on
        pi.once(code=75)
        assert_not_uploaded(pi, short)
        [row] = waiting(pi.db).values()
        assert row["code"] == "BAD_RESPONSE"
        assert f"{short.size // 2} of {short.size} bytes" in row["reason"]
        assert pi.backend.upload_status(good)[0] == "uploaded" and not good.directory.exists()
        let_hours_pass(pi.db)
    assert len(heads(pi.frontend, short)) == 2 and len(heads(pi.frontend, good)) == 1
    assert len(heads(pi.frontend)) == 2  # once after each start, for a call that is not there

    pi.frontend.on_file = None
    pi.once()
    assert pi.frontend.files[short.call_log_id].count == 3
    assert pi.backend.upload_status(short)[0] == "uploaded" and not short.directory.exists()


@pytest.mark.parametrize(
    ("reply", "most"),
    [
        (Reply(200, {"Content-Length": "1234"}), 4),  # a single-page application
        (Reply(404), 4),
        (Reply(401, {}, {"error": "sign in"}), 6),
    ],
    ids=["a page for everything", "no such page", "a login"],
)
def test_a_head_that_never_agrees_costs_nothing_but_a_line(pi: Pi, reply: Reply, most: int) -> None:
    pi.frontend.on_head = lambda request: reply if request.method == "HEAD" else None
    calls = [pi.backend.end_call(events=0) for _ in range(5)]

    result = pi.once()

    assert not uploads(pi.db) and not any(call.directory.exists() for call in calls)
    assert len(pi.frontend.of_kind("file")) == 5
    asked = [request for request in pi.frontend.requests if request.method == "HEAD"]
    assert len(asked) <= most
    assert result.stderr.count("uploads are not verified") == 1


def test_an_upload_that_the_frontend_has_lost_shows_after_a_restart_too(pi: Pi) -> None:
    """By the one before there is such a page: that it has none of this one is no such thing."""
    pi.backend.end_call(events=0)
    pi.once()
    lost = pi.backend.end_call(events=0)
    pi.frontend.on_file = lambda _: Reply(body={"ok": True, "fileUrl": "http://frontend/x.wav"})
    pi.once(code=75)
    assert_not_uploaded(pi, lost)
    [row] = waiting(pi.db).values()
    assert f"it has none of {lost.size} bytes" in row["reason"]
    pi.frontend.on_file = None
    let_hours_pass(pi.db)
    pi.once()
    assert pi.frontend.files[lost.call_log_id].sha256 == lost.sha256


def test_an_answer_that_never_ends_ends_the_upload(pi: Pi) -> None:
    call = pi.backend.end_call(events=0)
    text = {"ok": True, "fileUrl": "http://frontend/x.wav", "more": "x" * 500}
    pi.frontend.on_file = lambda _: Reply(body=text, store=True, trickle=0.01)
    pi.once(code=75, SYNC_TIMEOUT_SEC=1)
    assert_not_uploaded(pi, call)
    [row] = waiting(pi.db).values()
    assert row["code"] == "NETWORK_TIMEOUT"


def test_a_page_of_another_length_is_an_outage_of_files_that_names_it(pi: Pi) -> None:
    def page(request: Request) -> Reply | None:
        known = request.path.rpartition("/")[2] in pi.frontend.files
        return Reply(200, {"Content-Length": "17"}) if request.method == "HEAD" and known else None

    pi.frontend.on_head = page
    running = pi.agent(**IMPATIENT)
    calls = [pi.backend.end_call(events=0) for _ in range(5)]
    assert "SYNC_VERIFY_PATH" in running.wait_log("files: outage")
    before, _, _ = running.log().partition("files: outage")
    assert len(set(re.findall(r"entry (\d+) \(recording_file\) is retried", before))) == 3
    for _ in range(3):  # entries go on, and nothing dies of it
        pi.wait_entry(pi.backend.enqueue())
        let_hours_pass(pi.db, 72)
    wait_until(lambda: "SYNC_VERIFY_PATH" in running.state()["outages"][0]["reason"])
    assert {state[2] for state in failures(pi.db).values()} == {0}
    for call in calls:
        assert_not_uploaded(pi, call)
    # Another try is one file, and less and less often: 2, 4, 8, … seconds.
    wait_until(lambda: len(running.lines("files: outage")) == 1, what="one line")
    wait_until(lambda: running.state()["outages"][0]["due"] > time.time() + 5, 60, "a long pause")
    assert running.state()["outages"][0]["code"] == "BAD_RESPONSE"
    tries, until = len(pi.frontend.of_kind("file")), time.monotonic() + 3
    wait_until(lambda: time.monotonic() > until)
    assert len(pi.frontend.of_kind("file")) == tries

    running.reload(pi.agent.env(SYNC_VERIFY_PATH=""))
    pi.wait_delivered()
    running.wait_log("files: recovered after")
    assert not dead(pi.db)


def test_a_look_that_tells_nothing_is_taken_again_before_the_upload_is(pi: Pi) -> None:
    first = pi.backend.end_call(events=0)  # by this one HEAD is found to be worth something
    short, long = pi.backend.end_call(events=0), pi.backend.end_call(events=0)
    vague = [
        Reply(503),
        Reply(200, raw=b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"),
        Reply(500, raw=b"garbage\r\n\r\n"),
    ]
    answers = {short.call_log_id: iter(vague[:2]), long.call_log_id: iter(vague)}

    def look(request: Request) -> Reply | None:
        rest = answers.get(request.path.rpartition("/")[2])
        if rest and request.method == "HEAD":
            pi.backend.enqueue()  # entries that get through do not shorten the pause
            return next(rest, None)
        return None

    pi.frontend.on_head = look
    pi.once(code=75)

    assert not first.directory.exists() and not short.directory.exists()
    assert pi.frontend.files[short.call_log_id].count == 1 and len(heads(pi.frontend, short)) == 3
    assert_not_uploaded(pi, long)
    assert (
        set(failures(pi.db)) == {long.seq("recording_file")} and len(heads(pi.frontend, long)) == 3
    )
    times = [request.started for request in heads(pi.frontend, long)]
    assert all(later - earlier > 0.9 for earlier, later in pairwise(times))

    let_hours_pass(pi.db)
    pi.once()
    assert pi.frontend.files[long.call_log_id].count == 2 and not long.directory.exists()


def test_a_rejected_file_is_dead_and_shown_as_failed_unless_it_is_uploaded(pi: Pi) -> None:
    new, known = (pi.backend.end_call(events=0) for _ in range(2))
    kept = "https://frontend.example/earlier.wav"
    pi.db.execute(
        "update recordings set upload_status = 'uploaded', s3_url = %s where id = %s",
        (kept, known.recording_id),
    )
    pi.frontend.on_file = lambda _: Reply(400, {}, {"error": "no such call log"})

    pi.once(code=1)

    assert dead(pi.db) == {call.seq("recording_file"): "BAD_REQUEST" for call in (new, known)}
    assert all(call.wav.is_file() and call.meta.is_file() for call in (new, known))
    assert pi.backend.upload_status(new) == ("upload_failed", None)
    assert pi.backend.upload_status(known) == ("uploaded", kept)
    assert not pi.db.pending() and not uploads(pi.db)


# -- files that change ----------------------------------------------------------------------------


def shrink(call: Call) -> None:
    os.truncate(call.wav, call.wav.stat().st_size // 2)


def rewrite(call: Call) -> None:
    with call.wav.open("r+b") as file:
        file.seek(100)
        file.write(random.randbytes(100))


def replace(call: Call) -> None:
    shutil.copy2(call.wav, call.directory / "new")  # even with the same time
    with (call.directory / "new").open("r+b") as file:
        file.write(b"RIFF")
    os.replace(call.directory / "new", call.wav)


@pytest.mark.parametrize("change", [shrink, rewrite, replace])
def test_a_file_that_changes_during_its_upload_is_set_aside_and_sent_again(
    pi: Pi, change: Callable[[Call], None]
) -> None:
    call = pi.backend.end_call(events=0, seconds=LONG)
    gate = threading.Semaphore(0)  # each upload of the long file waits for its permit

    def wait_at_gate(request: Request) -> None:
        if is_long(request):
            gate.acquire()

    pi.frontend.on_head = wait_at_gate
    running = pi.agent(**IMPATIENT)
    for number in (1, 2):
        pi.frontend.wait(partial(lambda wanted: long_uploads(pi.frontend)[wanted], number - 1))
        change(call)
        # What vouches for the endpoint does not make it the file's fault. (It may go before the
        # next try of the file, or behind it.)
        pi.backend.end_call(events=0, seconds=0.1)
        gate.release()
        wait_until_aside(pi.db, running, call, "FILE_CHANGED", number)
        assert_not_uploaded(pi, call)
        let_hours_pass(pi.db, 72)
    final = sha256(call.wav)
    gate.release()
    pi.wait_delivered()
    assert pi.frontend.files[call.call_log_id].sha256 == final
    assert not dead(pi.db) and pi.backend.upload_status(call)[0] == "uploaded"
    wait_until(lambda: not uploads(pi.db) and not call.wav.exists(), what="the deletion")


# -- speed, and what goes on meanwhile ------------------------------------------------------------


def test_after_a_stall_the_bandwidth_limit_is_kept(pi: Pi) -> None:
    rate = 800 * 125
    pi.backend.end_call(events=0, seconds=LONG)
    pi.agent(SYNC_UPLOAD_KBPS=800)
    request = wait_for_upload(pi.frontend)
    pi.frontend.read_rate = 1  # nothing is read until what lies between is full
    stalled = time.monotonic()
    pi.frontend.wait(lambda: time.monotonic() > stalled + 8)
    pi.frontend.read_rate, seen, released = None, request.received, time.monotonic()
    pi.frontend.wait(
        lambda: request.received > seen + 1_100_000, 60, "what was on the way, and more"
    )
    # Two buffers were full: all beyond them comes at the rate, but for the bucket of one second.
    assert time.monotonic() - released >= (1_100_000 - 600_000) / rate - 1.2


def test_the_bandwidth_limit_is_lifted_and_said_for_a_file_it_would_keep_too_long(pi: Pi) -> None:
    large = pi.backend.end_call(events=0, seconds=30)  # 7680 s at 1 kbit/s

    result = pi.once(SYNC_UPLOAD_KBPS=1)

    assert f"recording {large.seq('recording_file')} is too large for SYNC_UPLOAD_KBPS" in (
        result.stderr
    )
    assert pi.frontend.files[large.call_log_id].sha256 == large.sha256


def test_new_entries_arrive_while_a_large_file_travels_slowly(pi: Pi) -> None:
    pi.frontend.read_rate = CRAWL
    large = pi.backend.end_call(events=0, seconds=LONG)
    running = pi.agent(SYNC_POLL_INTERVAL_SEC=2)
    request = wait_for_upload(pi.frontend)
    for trigger in (True, False):
        if not trigger:  # polling is the net
            pi.db.execute("alter table sync_outbox disable trigger serversync_wake")
        for _ in range(2):
            call = pi.backend.end_call(seconds=0.1)
            pi.wait_entry(call.seq("recording"))
    assert request.finished is None, running.log()
    assert request.received < request.length
    pi.frontend.read_rate = None
    pi.wait_delivered()
    assert pi.frontend.files[large.call_log_id].sha256 == large.sha256
    assert pi.frontend.uploads[0].call_log_id == large.call_log_id
    assert len(pi.frontend.of_kind("file")) == 5  # none of them twice


def test_after_one_time_out_entries_wait_for_the_end_of_the_upload(pi: Pi) -> None:
    pi.frontend.read_rate = CRAWL
    large = pi.backend.end_call(events=0, seconds=LONG)
    running = pi.agent()
    request = wait_for_upload(pi.frontend)
    before = len(pi.frontend.of_kind("entries"))
    pi.frontend.on_entries = lambda _: Reply(stall=3.5) if request.finished is None else None
    seqs = [pi.backend.enqueue()]
    pi.frontend.wait(lambda: len(pi.frontend.of_kind("entries")) > before, what="the first entry")
    stalled = pi.frontend.of_kind("entries")[-1]
    pi.frontend.wait(lambda: stalled.finished, what="its end")
    # From here on for longer than two looks: bytes move, entries are not tried.
    seqs.append(pi.backend.enqueue())
    mark = request.received
    pi.frontend.wait(lambda: request.received > mark + 5 * CRAWL, 60, "progress of the upload")
    assert len(pi.frontend.of_kind("entries")) == before + 1, running.log()
    assert request.finished is None
    pi.frontend.read_rate = None
    pi.wait_entry(*seqs)
    pi.wait_delivered()
    assert len(pi.frontend.of_kind("file")) == 1 and request.status == 200
    assert pi.frontend.files[large.call_log_id].sha256 == large.sha256
    assert not running.lines("outage") and not running.lines("is retried"), "nothing is concluded"


# -- answers that come early, late or not at all --------------------------------------------------


def test_an_answer_that_comes_a_byte_at_a_time_ends_at_the_deadline(pi: Pi) -> None:
    pi.frontend.on_file = lambda _: Reply(body={"fileUrl": "http://f/x"}, trickle=0.4)
    call = pi.backend.end_call(events=0)
    pi.once(code=75, SYNC_TIMEOUT_SEC=2)
    assert failures(pi.db)[call.seq("recording_file")][0] == "NETWORK_TIMEOUT"
    assert_not_uploaded(pi, call)


def test_what_ends_an_upload_early_is_no_confirmation(pi: Pi) -> None:
    early = {
        "TOO_LARGE": Reply(413, {}, {"error": "too large"}, close=True),
        "BAD_RESPONSE": Reply(200, {}, {"fileUrl": "https://f/x"}, close=True),
        "CONFLICT": Reply(409, {}, {"fileUrl": "https://f/x", "code": "CONFLICT"}),
        "NETWORK_RESET": Reply(reset=True),
        "FRONTEND_5XX": Reply(507, {}, {"error": "No space left on device"}),
    }
    calls, replies = [], {}
    for number, reply in enumerate(early.values()):
        calls.append(pi.backend.end_call(events=0, seconds=LONG + number))
        replies[calls[-1].size] = dataclasses.replace(reply, after=200_000)
        pi.backend.end_call(events=0, seconds=0.1)  # so that it is no outage
    # They are known by their size, as nobody has read their parts.
    pi.frontend.on_head = lambda request: (
        next(replies[size] for size in replies if 0 < request.length - size < 2000)
        if is_long(request)
        else None
    )
    running = pi.agent(SYNC_VERIFY_PATH="")  # a HEAD would show it, too
    waits = [call.seq("recording_file") for call in calls]
    wait_until(lambda: pi.db.pending() == list(failures(pi.db)) == waits, state=running.log)
    assert [code for code, _, _ in failures(pi.db).values()] == list(early)
    assert all(request.received < request.length for request in long_uploads(pi.frontend))
    for call in calls:
        assert_not_uploaded(pi, call)


def test_a_body_that_was_moving_until_the_frontend_gave_up_is_never_charged(
    pi: Pi, hurry: Callable[..., None]
) -> None:
    hurry(SHARE=1)  # after a retry that took seconds there is none for as long
    call = pi.backend.end_call(events=0, seconds=LONG)
    pi.frontend.body_timeout = 2.0
    pi.frontend.read_rate = CRAWL
    running = pi.agent(**IMPATIENT)
    for number in (1, 2, 3):
        # Others go as soon as it is set aside, and vouch for the frontend.
        other = pi.backend.end_call(events=0, seconds=0.1)
        wait_until_aside(pi.db, running, call, "TOO_SLOW", number)
        assert_not_uploaded(pi, call)
        pi.wait_file(other)
        let_hours_pass(pi.db, 72)
    assert {request.status for request in long_uploads(pi.frontend) if request.finished} == {408}
    pi.frontend.body_timeout, pi.frontend.read_rate = 300.0, None
    let_hours_pass(pi.db, 72)
    pi.wait_delivered(90)
    assert pi.frontend.files[call.call_log_id].sha256 == call.sha256
    assert not dead(pi.db)


@pytest.mark.slow
def test_an_upload_that_does_not_move_for_a_minute_ends_and_entries_go_on(
    pi: Pi, hurry: Callable[..., None]
) -> None:
    hurry(STALL_SEC=4)  # a short one
    released = threading.Event()

    def stop_reading(request: Request) -> None:
        if is_long(request):
            released.wait(120)

    pi.frontend.on_head = stop_reading
    call = pi.backend.end_call(events=0, seconds=LONG)
    running = pi.agent(**IMPATIENT)
    request = pi.frontend.wait(lambda: long_uploads(pi.frontend)[0])
    pi.wait_entry(pi.backend.enqueue())

    def aside() -> bool:
        return failures(pi.db)[call.seq("recording_file")] == ("NETWORK_TIMEOUT", 1, 0)

    wait_until(aside, 90, "the end of the upload", running.log)
    assert time.monotonic() - request.started >= 3.5
    assert_not_uploaded(pi, call)
    released.set()
    pi.frontend.on_head = None
    let_hours_pass(pi.db, 72)
    pi.wait_delivered()
    assert pi.frontend.files[call.call_log_id].sha256 == call.sha256
    assert not dead(pi.db)


@pytest.mark.slow
def test_a_limit_below_the_rate_that_counts_as_stuck_does_not_end_an_upload(
    pi: Pi, hurry: Callable[..., None]
) -> None:
    hurry(STALL_SEC=1)
    call = pi.backend.end_call(events=0, seconds=0.02)  # 5 s at 250 bytes/s

    pi.once(SYNC_UPLOAD_KBPS=2, timeout=150)

    [request] = pi.frontend.of_kind("file")
    assert request.finished is not None and request.finished - request.started > 3
    assert pi.frontend.files[call.call_log_id].sha256 == call.sha256

"""The pure decisions, by tables: whose fault is an answer, what becomes of an entry, which file."""

import json
import time
from dataclasses import replace
from datetime import UTC, datetime
from email.utils import formatdate
from typing import Any

import pytest

import serversync
from serversync import (
    ALIVE,
    RULES,
    Answer,
    Endpoint,
    EntryTrouble,
    Fate,
    Outage,
    Past,
    Trouble,
    Verdict,
    backoff,
    classify,
    confirm_entries,
    confirm_length,
    confirm_upload,
    grace_is_over,
    health_of,
    judge,
    locate,
    retry_after,
)
from virtual import CONFIG

KEY = "5e" * 32
SEQS = [17, 18, 19]
SIZE = 1_920_044
URL = "https://voice.example.com/storage/recordings/8a3e/mixed.wav"
PORTAL = "<!DOCTYPE html><html><title>Welcome to the Wi-Fi of Hotel Sakura</title></html>"
ROOT = "/opt/virtual-voicebot/storage/recordings"
BOTH = {"ok": True, "fileUrl": URL}  # in the contract's words for entries and for files
HOUR, DAY = 3600.0, 86400.0


def got(status: int | None = None, body: object = b"", **more: Any) -> Answer:
    """An answer as it came: text and bytes as they are, anything else as JSON."""
    if isinstance(body, str):
        body = body.encode()
    return Answer(status, body if isinstance(body, bytes) else json.dumps(body).encode(), **more)


def shown(value: object) -> str:
    return ascii(value)[:60]


# --- the table of verdicts ------------------------------------------------------------------------

# A 409 may mean: the first one is still running.
RUNNING: list[dict[str, Any]] = [
    *({"ok": False}, {"ok": 1}, {"code": "IN_PROGRESS"}, {"key": "ab" * 32}, {"key": ""}),
    *({"key": KEY, "ok": False}, {"key": KEY, "error": "x"}, {"key": KEY, "code": "IN_PROGRESS"}),
    *({"key": KEY, "status": 1}, {"ok": False, "code": "IN_PROGRESS", "idempotencyKey": KEY}),
]
# The verdict, and what gets it: the same for entries and for files.
UNCONFIRMED: dict[tuple[str, Fate], list[Answer]] = {
    ("BAD_RESPONSE", Fate.SUSPECT): [
        got(trouble=Trouble.GARBLED),
        # A success, but not in the contract's words, or before the body was out.
        *(got(200, body) for body in (b"", PORTAL, [BOTH], '"ok"', "null", '{"ok": true, "fileU')),
        *(got(200, body) for body in ('{"ok": true} <br>', b"\xff\xfe\x00\x80", "[" * 100_000)),
        *(got(200, body) for body in ({"ok": False}, {"ok": False, "fileUrl": URL})),
        *(got(200, {"ok": ok}) for ok in (1, 1.0, "true", [True], {"ok": True}, None, 0, "")),
        got(200, BOTH, complete=False),
        got(201, PORTAL),
        got(204),
        # Rejected by somebody else.
        *(got(400, body) for body in (b"", "<h1>Bad Request</h1>", ["no"])),
        got(422, "<h1>no</h1>"),
    ],
    ("REDIRECTED", Fate.SUSPECT): [
        got(status, BOTH) for status in (300, 301, 302, 303, 304, 307, 308, 399)
    ],
    ("BAD_REQUEST", Fate.REJECTED): [
        *(got(400, body) for body in ({"error": "entries[3]"}, {}, BOTH)),
        got(422, {"error": "no"}),
    ],
    ("UNAUTHORIZED", Fate.SUSPECT): [got(401, {"error": "token"}), got(403, PORTAL)],
    ("NOT_FOUND", Fate.SUSPECT): [got(404, {"error": "no such route"}), got(405)],
    ("NETWORK_TIMEOUT", Fate.SUSPECT): [
        got(408),
        got(trouble=Trouble.TIMEOUT),
        got(trouble=Trouble.TIMEOUT, steady=True),
    ],
    ("TOO_SLOW", Fate.WAITS): [got(408, steady=True)],
    ("TOO_LARGE", Fate.SUSPECT): [got(413, {"error": "too large"}), got(413, "<h1>413</h1>")],
    ("RATE_LIMITED", Fate.SUSPECT): [
        got(429, {"error": "slow down"}),
        got(503, PORTAL, headers={"retry-after": "60"}),
    ],
    ("FRONTEND_5XX", Fate.SUSPECT): [
        *(got(status, BOTH) for status in (500, 501, 502, 503, 504, 507, 599)),
        got(503, PORTAL, headers={"retry-after": "soon"}),
    ],
    ("CONFLICT", Fate.SUSPECT): [
        *(got(409, body) for body in (b"", "<h1>Conflict</h1>", [BOTH])),
        *(got(409, {"fileUrl": URL} | said) for said in RUNNING),
    ],
    ("NETWORK_ERROR", Fate.OUTAGE): [got(trouble=Trouble.UNREACHABLE)],
    ("TLS_ERROR", Fate.OUTAGE): [
        got(trouble=Trouble.TLS, detail=detail) for detail in ("", "certificate is not yet valid")
    ],
    ("NETWORK_RESET", Fate.SUSPECT): [got(trouble=Trouble.RESET)],
    ("UNKNOWN", Fate.SUSPECT): [
        *(got(status, BOTH) for status in (100, 101, 402, 406, 410, 411, 414, 415, 418, 425)),
        *(got(status, BOTH) for status in (431, 451, 499, 600, 999)),
        got(),
    ],
}


@pytest.mark.parametrize(
    ("verdict", "answers"), UNCONFIRMED.items(), ids=[k[0] + "-" + k[1].value for k in UNCONFIRMED]
)
def test_an_answer_that_confirms_nothing_gets_its_row_of_the_table(
    verdict: tuple[str, Fate], answers: list[Answer]
) -> None:
    for answer in answers:
        entries, rejected = confirm_entries(answer, KEY, SEQS)
        upload, url = confirm_upload(answer, KEY, SIZE)
        for found in (classify(answer), entries, upload):
            assert (found.code, found.fate, found.status) == (*verdict, answer.status), answer
        assert (rejected, url) == ({}, "")


def test_every_row_of_the_rules_is_the_verdict_of_some_answer_and_none_hides_another() -> None:
    used = set()
    for answer in (answer for each in UNCONFIRMED.values() for answer in each):
        fits = [row for row, rule in enumerate(RULES) if serversync._kind(answer) in rule[0]]
        assert len(fits) <= 1, answer
        used.update(fits)
    assert used == set(range(len(RULES)))


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (got(500, {"error": "disk full"}), ["HTTP 500", "disk full"]),
        (got(500, "x" * 5000 + " the end"), ["the end"]),  # it is masked before it is cut
        (got(413, sent=250), ["HTTP 413", "250 bytes", "client_max_body_size"]),
        (got(trouble=Trouble.TLS, detail="certificate is not yet valid"), ["clock", "not yet"]),
        (got(trouble=Trouble.TLS, detail="certificate has expired"), ["clock", "expired"]),
        (got(trouble=Trouble.TLS, detail="unknown CA"), ["unknown CA"]),
    ],
    ids=shown,
)
def test_the_reason_tells_what_came_back_and_what_helps(answer: Answer, words: list[str]) -> None:
    reason = classify(answer).reason
    assert [word for word in words if word not in reason] == []
    assert ("clock" in reason) == ("clock" in words)


# --- entries --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "said", "code"),
    [
        (200, {"ok": True}, ""),
        (200, {"ok": True, "stored": 3, "at": None}, ""),
        (200, b'\xef\xbb\xbf{"ok": true}', ""),  # a byte order mark
        (201, {"ok": True}, ""),
        (299, {"ok": True}, ""),
        (200, {"ok": True, "rejected": []}, ""),
        (200, {"ok": True, "rejected": None}, ""),
        (409, {"ok": True}, "CONFLICT_PROCESSED"),
        (409, {"code": "ALREADY_PROCESSED"}, "CONFLICT_PROCESSED"),
        (409, {"ok": False, "code": "ALREADY_PROCESSED"}, "CONFLICT_PROCESSED"),
        (409, {"error": "ALREADY_PROCESSED"}, "CONFLICT_PROCESSED"),
        (409, {"error": {"code": "ALREADY_PROCESSED", "message": "seen"}}, "CONFLICT_PROCESSED"),
        (409, {"idempotencyKey": KEY}, "CONFLICT_PROCESSED"),
        (409, {"idempotency_key": KEY, "message": "seen"}, "CONFLICT_PROCESSED"),
        (409, {"key": KEY}, "CONFLICT_PROCESSED"),
    ],
    ids=shown,
)
def test_entries_that_are_confirmed_in_the_contracts_words_are_sent(
    status: int, said: object, code: str
) -> None:
    verdict, rejected = confirm_entries(got(status, said), KEY, SEQS)
    assert (verdict.fate, verdict.code, verdict.status) == (Fate.SENT, code, status)
    assert rejected == {}


@pytest.mark.parametrize("status", [200, 409])
@pytest.mark.parametrize(
    "listed",
    [
        [{"seq": 18, "code": "BAD_UUID", "message": "no such call"}, {"seq": 17}],
        [{"seq": seq, "code": "NO"} for seq in SEQS],
    ],
    ids=["some", "all"],
)
def test_rejected_entries_are_told_from_the_stored_ones_with_their_reasons(
    status: int, listed: list[dict[str, Any]]
) -> None:
    verdict, rejected = confirm_entries(got(status, {"ok": True, "rejected": listed}), KEY, SEQS)
    assert verdict.fate is Fate.SENT
    assert rejected.keys() == {item["seq"] for item in listed}
    assert all(item.get("message", "") in rejected[item["seq"]] for item in listed)
    assert all(item.get("code", "") in rejected[item["seq"]] for item in listed)


NONSENSE: list[object] = [
    *([{"seq": 17}, {"seq": seq}] for seq in (17, 99)),
    *([{"seq": seq}] for seq in (99, "17", 17.0, None, True)),
    *([item] for item in ({"code": "NO"}, 17, None, [17])),
    *({"seq": 17}, {}, "17", "", 17, 0, False, True),
]


@pytest.mark.parametrize("listed", NONSENSE, ids=repr)
@pytest.mark.parametrize("status", [200, 409])
def test_a_list_of_rejected_entries_that_makes_no_sense_confirms_nothing(
    status: int, listed: object
) -> None:
    answer = got(status, {"ok": True, "rejected": listed})
    verdict, rejected = confirm_entries(answer, KEY, [1, *SEQS])
    code = "CONFLICT" if status == 409 else "BAD_RESPONSE"
    assert (verdict.fate, verdict.code) == (Fate.SUSPECT, code)
    assert (verdict.status, rejected) == (status, {})


# --- uploads --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "said", "code"),
    [
        (200, {"fileUrl": URL}, ""),
        (201, {"fileUrl": "http://localhost:3000/storage/recordings/8a3e/mixed.wav"}, ""),
        (200, {"fileUrl": "http://[::1]:3000/mixed.wav"}, ""),
        (200, BOTH | {"sizeBytes": SIZE, "more": []}, ""),
        (200, {"fileUrl": URL, "sizeBytes": None}, ""),
        (409, BOTH, "CONFLICT_PROCESSED"),
        (409, {"code": "ALREADY_PROCESSED", "fileUrl": URL}, "CONFLICT_PROCESSED"),
        (409, {"idempotencyKey": KEY, "fileUrl": URL, "sizeBytes": SIZE}, "CONFLICT_PROCESSED"),
    ],
    ids=shown,
)
def test_an_upload_that_is_confirmed_is_sent_with_its_url(
    status: int, said: dict[str, Any], code: str
) -> None:
    verdict, url = confirm_upload(got(status, said), KEY, SIZE)
    assert (verdict.fate, verdict.code) == (Fate.SENT, code)
    assert url == said["fileUrl"]


BAD_URLS: list[object] = [
    *("", " ", None, 7, True, [URL], {"url": URL}, "mixed.wav", " " + URL, "see " + URL),
    *("/storage/recordings/8a3e/mixed.wav", "//voice.example.com/mixed.wav", "javascript:alert(1)"),
    *("ftp://voice.example.com/mixed.wav", "file:///storage/mixed.wav", "http://"),
    *("http:/voice.example.com/mixed.wav", "https:///mixed.wav", "http:// voice.example.com/a.wav"),
    *(f"https://voice.example.com/{path}" for path in ("a b.wav", "\na.wav", "a\0", "\ud800.wav")),
    "https://voice.example.com/" + "a" * 100_000,
]


@pytest.mark.parametrize(("status", "code"), [(200, "BAD_RESPONSE"), (409, "CONFLICT")])
def test_an_upload_without_a_usable_url_is_not_confirmed(status: int, code: str) -> None:
    for said in [{"ok": True}, *({"ok": True, "fileUrl": url} for url in BAD_URLS)]:
        verdict, stored = confirm_upload(got(status, said), KEY, SIZE)
        assert (verdict.fate, verdict.code, stored) == (Fate.SUSPECT, code, ""), said
        assert "fileUrl" in verdict.reason


@pytest.mark.parametrize("stored", [0, 1, SIZE - 1, SIZE + 1, -SIZE, str(SIZE - 1), [SIZE], {}])
@pytest.mark.parametrize("status", [200, 409])
def test_an_upload_stored_with_another_size_is_not_confirmed(status: int, stored: object) -> None:
    verdict, url = confirm_upload(got(status, BOTH | {"sizeBytes": stored}), KEY, SIZE)
    assert (verdict.fate, url) == (Fate.SUSPECT, "")
    assert str(SIZE) in verdict.reason


@pytest.mark.parametrize(
    ("look", "fate", "code"),
    [
        (got(200, headers={"content-length": str(SIZE)}), Fate.SENT, ""),
        (got(200, headers={"content-length": str(SIZE - 1)}), Fate.SUSPECT, "BAD_RESPONSE"),
        (got(404), Fate.SUSPECT, "BAD_RESPONSE"),
        # Nothing is told.
        (got(200), Fate.SUSPECT, "BAD_RESPONSE"),
        (got(401), Fate.SUSPECT, "UNAUTHORIZED"),
        (got(503), Fate.SUSPECT, "FRONTEND_5XX"),
        (got(400, {}), Fate.SUSPECT, "BAD_REQUEST"),
        (got(trouble=Trouble.UNREACHABLE), Fate.SUSPECT, "NETWORK_ERROR"),
    ],
    ids=shown,
)
def test_an_upload_is_confirmed_by_the_length_that_head_tells(
    look: Answer, fate: Fate, code: str
) -> None:
    verdict = confirm_length(look, SIZE)
    assert (verdict.fate, verdict.code) == (fate, code)
    assert fate is Fate.SENT or "SYNC_VERIFY_PATH" in verdict.reason


# --- the empty request ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "alive"),
    [
        (got(200, {"ok": True}), True),
        (got(400, {"error": "at least one entry"}), True),
        (got(422, {}), True),
        (got(200, {"ok": True, "rejected": [{"seq": 1}]}), True),
        *((got(status, {"ok": True}), False) for status in (302, 401, 404, 413, 429, 500, 503)),
        *((got(409, said), False) for said in RUNNING),
        *((got(200, body), False) for body in (b"", PORTAL, {}, {"ok": False}, {"ok": 1}, [True])),
        (got(200, {"ok": True}, complete=False), False),
        (got(400, PORTAL), False),
        *((got(trouble=trouble), False) for trouble in Trouble),
    ],
    ids=shown,
)
def test_the_frontend_lives_if_it_answers_the_empty_request_in_its_own_words(
    answer: Answer, alive: bool
) -> None:
    verdict, _ = confirm_entries(answer, KEY, [])
    assert (verdict.fate in ALIVE) is alive


# --- Retry-After ----------------------------------------------------------------------------------

NOW = 1_790_000_000.0
NO_PAUSE = (None, "", "soon", "-5", "1.5", "0x10", "1e9", "１２０", "<html>")


@pytest.mark.parametrize(
    ("text", "pause"),
    [
        *(("0", 0.0), ("1", 1.0), ("120", 120.0), (" 30 ", 30.0), ("3600", 3600.0)),
        *((text, 3600.0) for text in ("3601", "999999999", "99999999999999999999", "9" * 400)),
        (formatdate(NOW + 90, usegmt=True), 90.0),
        (formatdate(NOW + 90, localtime=False), 90.0),
        (formatdate(NOW - 90, usegmt=True), 0.0),
        (formatdate(NOW + 86400, usegmt=True), 3600.0),
        ("Fri, 31 Dec 9999 23:59:59 GMT", 3600.0),
        ("Thu, 01 Jan 1970 00:00:00 GMT", 0.0),
        *((text, None) for text in (*NO_PAUSE, "Fri, 99 Foo 2026 25:61:61 GMT")),
    ],
    ids=shown,
)
def test_retry_after_is_read_as_seconds_or_a_date_and_never_exceeds_an_hour(
    text: str | None, pause: float | None
) -> None:
    assert retry_after(text, NOW) == pause
    for status in (429, 503, 302, 413, 500):
        verdict = classify(got(status, {}, headers={"retry-after": text}), NOW)
        assert verdict.retry_after == (pause if status in (429, 503) else None)
        told = status == 429 or (status == 503 and pause is not None)
        assert (verdict.code == "RATE_LIMITED") is told


def test_a_retry_after_date_without_a_zone_is_meant_in_gmt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        text = time.strftime("%a %b %d %H:%M:%S %Y", time.gmtime(NOW + 90))
        assert retry_after(text, NOW) == 90.0
    finally:
        monkeypatch.undo()
        time.tzset()


def test_boxes_that_were_told_the_same_pause_come_back_at_moments_of_their_own() -> None:
    waits = [backoff(1, jitter / 100, 60.0) for jitter in range(101)]
    assert (min(waits), max(waits), len(set(waits))) == (60.0, 120.0, 101)
    assert backoff(1, 1.0, 3600.0) == pytest.approx(3960.0)


# --- what becomes of one entry that failed --------------------------------------------------------

SUSPECT = Verdict(Fate.SUSPECT, "FRONTEND_5XX", "HTTP 500", 500)
REJECTED = Verdict(Fate.REJECTED, "BAD_REQUEST", "no", 400)
NEVER = Past("call_log", None)
WORN = Past("call_log", None, tries=50, attempts=7, type_sent=5, waited=DAY, sent_now=8)
A_MONTH = replace(WORN, tries=5000, waited=30 * DAY)


def step(
    past: Past, verdict: Verdict = SUSPECT, retry_max: int = 8, retry_hours: float = 24,
    jitter: float = 1.0, charge: bool = True,
) -> serversync.Step:  # fmt: skip
    config = replace(CONFIG, retry_max=retry_max, retry_hours=retry_hours)
    return judge(past, verdict, config, jitter, charge)


@pytest.mark.parametrize(
    ("past", "verdict", "charged", "dead"),
    [
        # Never before: nothing says that it is the entry's fault, however healthy the endpoint.
        (NEVER, SUSPECT, False, False),
        (replace(NEVER, sent_now=1_000_000, waited=30 * DAY), SUSPECT, False, False),
        # Charged only after three others of its type got through since its last failure.
        *(
            (replace(WORN, attempts=0, sent_now=sent), SUSPECT, sent >= 8, False)
            for sent in (4, 5, 7, 8, 500)
        ),
        # Both SYNC_RETRY_MAX and SYNC_RETRY_HOURS must be reached, by a failure that is charged.
        (replace(WORN, attempts=6), SUSPECT, True, False),
        (replace(WORN, waited=DAY - 1), SUSPECT, True, False),
        (WORN, SUSPECT, True, True),
        (replace(WORN, attempts=40), SUSPECT, True, True),
        # Time alone, or tries alone, kill nothing: a month without network.
        (replace(A_MONTH, attempts=40, sent_now=7), SUSPECT, False, False),
        (replace(A_MONTH, attempts=0), SUSPECT, True, False),
        # Nobody's fault: never charged, never dead.
        (WORN, Verdict(Fate.WAITS, "FILE_CHANGED", "changed"), False, False),
        (WORN, Verdict(Fate.OUTAGE, "NETWORK_ERROR", "refused"), False, False),
        # Rejected: dead at once. A type that is only ever rejected is the frontend's fault: the
        # tenth of it is a suspect like any other.
        (NEVER, REJECTED, False, True),
        (replace(NEVER, rejected=8), REJECTED, False, True),
        (replace(NEVER, rejected=9), REJECTED, False, False),
        (replace(NEVER, rejected=500), REJECTED, False, False),
        (replace(WORN, rejected=9), REJECTED, True, True),
        (replace(WORN, rejected=9, attempts=6), REJECTED, True, False),
        # What cannot be sent is dead for reasons that lie here.
        (replace(NEVER, rejected=500), Verdict(Fate.DEAD, "FILE_MISSING", "gone"), False, True),
    ],
)
def test_what_becomes_of_an_entry_that_failed(
    past: Past, verdict: Verdict, charged: bool, dead: bool
) -> None:
    now = step(past, verdict)
    assert (now.dead, now.tries, now.attempts) == (dead, past.tries + 1, past.attempts + charged)
    in_an_outage = step(past, verdict, charge=False)
    assert in_an_outage.dead is (verdict.fate is Fate.DEAD)
    assert in_an_outage.attempts == past.attempts


def test_the_limits_are_those_of_the_configuration() -> None:
    last = replace(WORN, attempts=2, waited=2.5 * HOUR)
    assert step(last, retry_max=3, retry_hours=2.5).dead
    assert not step(last, retry_max=4, retry_hours=2.5).dead
    assert not step(last, retry_max=3, retry_hours=2.6).dead
    assert step(replace(WORN, attempts=0, waited=0.0), retry_max=1, retry_hours=0).dead


# --- time -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tries", "outage", "entry"),
    [
        *((1, 2, 2), (2, 4, 4), (7, 128, 128), (8, 256, 256), (9, 256, 512), (11, 256, 2048)),
        *((12, 256, 3600), (10**6, 256, 3600)),
    ],
)
def test_the_backoff_doubles_to_its_cap_and_the_jitter_comes_after_it(
    tries: int, outage: float, entry: float
) -> None:
    assert [backoff(tries, jitter) for jitter in (1.0, 0.5, 0.0)] == [outage, outage / 2, 0.0]
    assert step(replace(NEVER, tries=tries - 1), jitter=0.25).delay == entry / 4


@pytest.mark.parametrize(
    ("pause", "jitter", "delay"),
    [(600.0, 0.0, 600.0), (600.0, 1.0, 660.0), (3600.0, 1.0, 3600.0), (None, 0.0, 0.0)],
)
def test_an_entry_that_was_told_when_to_come_again_is_not_tried_before(
    pause: float | None, jitter: float, delay: float
) -> None:
    told = replace(SUSPECT, code="RATE_LIMITED", retry_after=pause)
    assert step(NEVER, told, jitter=jitter).delay == pytest.approx(delay)


@pytest.mark.parametrize(
    ("tries", "waited", "over"),
    [
        (0, 0, False),
        (0, 10**6, False),
        (3, 10**6, False),
        (4, 299.9, False),
        (4, 300, True),
        (100, 299.9, False),
        (100, 300, True),
    ],
)
def test_the_grace_time_needs_five_looks_and_our_own_running_time(
    tries: int, waited: float, over: bool
) -> None:
    assert grace_is_over(tries, waited, 300) is over


# --- an endpoint ----------------------------------------------------------------------------------

TIMED_OUT = Verdict(Fate.SUSPECT, "NETWORK_TIMEOUT", "no answer in time")


@pytest.mark.parametrize(
    ("size", "most", "gentle", "number", "after"),
    [
        *((1, 100, False, 1, 2), (50, 100, False, 50, 100), (64, 100, False, 64, 100)),
        *((100, 100, False, 100, 100), (1, 1, False, 1, 1), (50, 100, False, 49, 50)),
        *((1, 100, True, 1, 2), (10, 100, True, 10, 11), (50, 100, True, 50, 55)),
        *((99, 100, True, 99, 100), (100, 100, True, 100, 100), (1, 1, True, 1, 1)),
    ],
)
def test_full_batches_make_the_next_twice_as_large_and_after_a_timeout_by_a_tenth(
    size: int, most: int, gentle: bool, number: int, after: int
) -> None:
    endpoint = Endpoint("entries", most, 30, size, gentle)
    endpoint.succeeded(number)
    assert endpoint.size == after


@pytest.mark.parametrize(("verdict", "gentle"), [(SUSPECT, False), (TIMED_OUT, True)])
def test_a_batch_that_failed_comes_again_half_as_large(verdict: Verdict, gentle: bool) -> None:
    endpoint = Endpoint("entries", 100, 30, 100)
    sizes = []
    while endpoint.size > 1:
        endpoint.failed_together(endpoint.size, verdict)
        sizes.append(endpoint.size)
    assert sizes == [50, 25, 12, 6, 3, 1]
    assert endpoint.gentle is gentle


def test_an_outage_counts_its_tries_and_a_success_ends_it_with_a_batch_that_grows_from_one() -> (
    None
):
    endpoint = Endpoint("entries", 100, 30, 100, hasty=True)
    for tries in range(1, 12):
        endpoint.begin_outage(SUSPECT, 1000.0 * tries, 1.0, by_entries=True)
        assert endpoint.outage
        assert (endpoint.outage.tries, endpoint.outage.since) == (tries, 1000.0)
        assert endpoint.outage.due == 1000.0 * tries + min(256, 2**tries)
    assert (endpoint.size, endpoint.hasty) == (1, False)
    outage, endpoint.hasty = endpoint.outage, True
    assert endpoint.succeeded(1) is outage
    assert (endpoint.outage, endpoint.hasty, endpoint.size) == (None, False, 1)
    assert endpoint.succeeded(1) is None and endpoint.size == 2


def test_somebody_who_says_try_now_is_heard() -> None:
    told = Outage("RATE_LIMITED", "a pause", 0.0, 3, 3600.0, False)
    endpoint = Endpoint("entries", 100, 30, 1, True, True, None, {7}, 9, 5000.0)
    endpoint.forget()
    assert endpoint == Endpoint("entries", 100, 30, 100)
    endpoint = Endpoint("entries", 100, 30, 1, outage=told)
    endpoint.forget()
    at_once = replace(told, tries=0, due=0.0)  # it ends with what gets through
    assert endpoint == Endpoint("entries", 100, 30, 100, outage=at_once)


# --- the sentence about health --------------------------------------------------------------------

MORNING = time.mktime((2026, 3, 5, 5, 7, 30, 0, 0, -1))
LAST = {"entries": 3, "files": 1, "at": f"{datetime.fromtimestamp(MORNING - 573, UTC)}"}
YESTERDAY = f"{datetime.fromtimestamp(MORNING - 86400, UTC)}"
FIRST = {"why": "the frontend has trouble: HTTP 500", "at": MORNING + 70}
DENIED = {"code": "UNAUTHORIZED", "reason": "the frontend answers 401"}
DENIED |= {"since": serversync.iso(MORNING - 18), "next_try_at": serversync.iso(MORNING + 70)}
OF_ENTRIES, OF_FILES = {"endpoint": "entries"} | DENIED, {"endpoint": "files"} | DENIED


def letters(number: int) -> dict[str, Any]:
    return {"dead_letters": {"PENDING": number, "RETRYING": 3, "RESOLVED": 9, "DEAD": 0}}


NONE = {"reasons": {}, "first": None, "deletions_failed": 0, "held": {}, "last": LAST, **letters(0)}
NO_ONE = "nothing gets through since 05:07:12: the frontend answers 401; next try 05:08:40"


@pytest.mark.parametrize(
    ("found", "outages", "others", "pending", "state", "sentence"),
    [
        ({"last": LAST}, [], [], 0, "good",
         "all delivered; last: 3 entries and 1 recording at 04:57:57"),
        ({"last": LAST | {"files": 0, "entries": 1}}, [], [], 0, "good",
         "all delivered; last: 1 entry at 04:57:57"),
        ({"last": LAST | {"entries": 0, "at": YESTERDAY}}, [], [], 0, "good",
         "all delivered; last: 1 recording at 04 Mar 05:07:30"),
        ({"last": None}, [], [], 0, "good", "all delivered; nothing was sent yet"),
        ({"last": LAST}, [], [], 2, "busy", "2 waiting"),
        ({"reasons": {"NOT_READY": 1}}, [], [], 1, "busy", "1 waiting"),
        ({"reasons": {"FRONTEND_5XX": 1, "WAITS_FOR": 2}, "first": FIRST}, [], [], 0, "waiting",
         "2 waiting, 1 retrying: the frontend has trouble: HTTP 500; next try 05:08:40"),
        ({"reasons": {"FRONTEND_5XX": 1}, "first": FIRST | {"at": 0.0}}, [], [], 1, "waiting",
         "1 retrying: the frontend has trouble: HTTP 500; next try 05:07:30"),
        ({**letters(1), "last": LAST}, [], [], 0, "person", "1 dead letter needs you"),
        ({**letters(2), "reasons": {"ROW_CORRUPT": 1}}, [], [], 1, "person",
         "2 dead letters need you; 1 corrupt row needs you"),
        ({"deletions_failed": 2}, [], [("waiting", "no settings")], 0, "person",
         "2 uploaded recordings cannot be deleted; no settings"),
        ({**letters(1), "reasons": {"UNAUTHORIZED": 4}},
         [OF_ENTRIES, OF_FILES], [], 9, "outage",
         f"{NO_ONE}; 1 dead letter needs you"),
        ({}, [OF_ENTRIES], [], 0, "outage", NO_ONE.replace("nothing", "no entry")),
        ({}, [OF_FILES], [], 0, "outage", NO_ONE.replace("nothing", "no recording")),
        ({}, [DENIED | {"endpoint": f"route {name}"} for name in "ab"], [], 0, "outage",
         "; ".join(NO_ONE.replace("nothing", f"nothing by route {name}") for name in "ab")),
        ({"held": {"call-actions": [{"rules": 9}, {"rules": 0}]}}, [], [], 0, "person",
         "settings: call-actions held back: 0 rules came, 9 rules are there"),
        (None, [], [("stopped", "no agent runs")], 0, "stopped", "no agent runs"),
        ({}, [], [("busy", "sending 3 of 5")], 0, "busy", "sending 3 of 5"),
    ],
)  # fmt: skip
def test_the_sentence_tells_whether_all_is_through_and_if_not_why(
    found: dict[str, Any] | None, outages: Any, others: Any, pending: int, state: str, sentence: str
) -> None:
    told = health_of(found if found is None else NONE | found, outages, others, MORNING, pending)
    assert told == {"state": state, "sentence": sentence}


def test_the_worst_decides_and_a_long_reason_hides_nothing() -> None:
    outage = OF_ENTRIES | {"reason": "x" * 5000, "next_try_at": serversync.iso(MORNING - 1)}
    told = health_of(NONE | letters(3), [outage], [("stopped", "s")], MORNING)
    assert told["state"] == "stopped" and told["sentence"].startswith("s; no entry gets through")
    assert told["sentence"].endswith("next try 05:07:30; 3 dead letters need you")


# --- where a recording lies -----------------------------------------------------------------------

LIES = ["x1", "a b%2e%2e", "x" * 255, "8HnT2kQ-a3x9..", "a84b4c@192.0.2.7", "...x_", "....", ".h"]


def test_a_recording_lies_one_level_below_the_root() -> None:
    for directory in [*LIES, "通話"]:
        for name in ("mixed.wav", "mixed.mp3", "MIXED.WAV", "b_leg.wav"):
            for above in (
                "storage/recordings/",
                f"{ROOT}/",
                "recordings/",
                "./storage//recordings/",
            ):
                path, where = f"{above}{directory}/{name}", (directory, name)
                assert locate(path, None, ROOT) == locate(path, "ignored", ROOT + "/") == where
        assert locate(None, directory, ROOT) == (directory, "mixed.wav")
    assert locate("x1/mixed.wav", None, ROOT) == ("x1", "mixed.wav")
    assert locate("data/audio/x1/mixed.wav", None, "/srv/audio/") == ("x1", "mixed.wav")


UNSAFE = ["", "/", ".", "..", "mixed.wav", "/mixed.wav", "/x1/mixed.wav", "/etc/x1/mixed.wav"]
UNSAFE += ["../recordings/x1/mixed.wav", "storage/other/x1/mixed.wav", "data/audio/x1/mixed.wav"]
UNSAFE += ["storage/recordings/" + rest for rest in (
    "mixed.wav/", "/mixed.wav", "./mixed.wav", "../mixed.wav", "../x1/mixed.wav", "x1/", "x1/.",
    "x1/..", "x1/../mixed.wav", "x1/deeper/mixed.wav", "x1/mixed\0.wav", "x1\0/mixed.wav",
    "x" * 256 + "/mixed.wav", "話" * 86 + "/mixed.wav", "x1/" + "x" * 252 + ".wav",
    ".serversync-trash/mixed.wav", ".serversync-root/mixed.wav",
)]  # fmt: skip
REFUSED: list[tuple[str, str | None, str | None]] = [("FILE_UNSAFE", path, None) for path in UNSAFE]
REFUSED += [
    ("FILE_UNSAFE", None, call_id)
    for call_id in ("", ".", "..", "a/b", "../x1", "/etc", "x\0", ".serversync-x")
]
REFUSED += [
    ("BAD_PAYLOAD", f"storage/recordings/x1/{name}", None)
    for name in ("mixed", "mixed.txt", "meta.json", "mixed.wav.exe", "wav", "-")
]


@pytest.mark.parametrize(
    ("code", "path", "call_id"), [*REFUSED, ("BAD_PAYLOAD", None, None)], ids=shown
)
def test_a_path_that_leads_elsewhere_or_to_no_audio_is_dead(
    code: str, path: str | None, call_id: str | None
) -> None:
    with pytest.raises(EntryTrouble) as trouble:
        locate(path, call_id, ROOT)
    assert (trouble.value.verdict.fate, trouble.value.verdict.code) == (Fate.DEAD, code)

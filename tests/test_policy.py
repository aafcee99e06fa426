"""The pure decisions, by tables: whose fault is an answer, what becomes of an entry, which file."""

import json
import random
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from email.utils import formatdate
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import serversync
from serversync import (
    BODY_HEAD,
    BODY_TAIL,
    RULES,
    Answer,
    Batch,
    EntryTrouble,
    Fate,
    Next,
    Outage,
    Past,
    Tally,
    Transition,
    Trouble,
    Verdict,
    backoff,
    classify,
    confirm_entries,
    confirm_upload,
    grace_is_over,
    locate,
    next_size,
    next_state,
    retry_after,
    sentence_of,
)

KEY = "5e" * 32
SEQS = [17, 18, 19]
SIZE = 1_920_044
URL = "https://voice.example.com/storage/recordings/8a3e/mixed.wav"
PORTAL = "<!DOCTYPE html><html><title>Welcome to the Wi-Fi of Hotel Sakura</title></html>"
ROOT = "/opt/virtual-voicebot/storage/recordings"


def got(status: int | None = None, body: object = b"", **more: Any) -> Answer:
    """An answer as it came: text and bytes as they are, anything else as JSON."""
    if isinstance(body, str):
        body = body.encode()
    return Answer(status, body if isinstance(body, bytes) else json.dumps(body).encode(), **more)


# --- the table of verdicts ------------------------------------------------------------------------

# What came back, and the verdict on it: the same for entries and for files.
UNCONFIRMED: list[tuple[str, Answer, str, Fate]] = [
    # A success, but not in the contract's words.
    ("200 with a captive portal", got(200, PORTAL), "BAD_RESPONSE", Fate.SUSPECT),
    ("200 and nothing", got(200), "BAD_RESPONSE", Fate.SUSPECT),
    ("200 with a list", got(200, [{"ok": True, "fileUrl": URL}]), "BAD_RESPONSE", Fate.SUSPECT),
    ("200 with a text", got(200, '"ok"'), "BAD_RESPONSE", Fate.SUSPECT),
    ("200 with null", got(200, "null"), "BAD_RESPONSE", Fate.SUSPECT),
    ("200 with half of it", got(200, '{"ok": true, "fileU'), "BAD_RESPONSE", Fate.SUSPECT),
    ("200 with text after it", got(200, '{"ok": true} <br>'), "BAD_RESPONSE", Fate.SUSPECT),
    ("200 with bytes", got(200, b"\xff\xfe\x00\x80"), "BAD_RESPONSE", Fate.SUSPECT),
    ("200 too deep", got(200, "[" * 100_000), "BAD_RESPONSE", Fate.SUSPECT),
    ("200, ok false", got(200, {"ok": False}), "BAD_RESPONSE", Fate.SUSPECT),
    ("200, ok false, URL", got(200, {"ok": False, "fileUrl": URL}), "BAD_RESPONSE", Fate.SUSPECT),
    ("201 with a portal", got(201, PORTAL), "BAD_RESPONSE", Fate.SUSPECT),
    ("204", got(204), "BAD_RESPONSE", Fate.SUSPECT),
    (
        "200 before the body was out",
        got(200, {"ok": True, "fileUrl": URL}, complete=False),
        "BAD_RESPONSE",
        Fate.SUSPECT,
    ),
    # A redirect is never followed.
    *(
        (f"{status}", got(status, {"ok": True, "fileUrl": URL}), "REDIRECTED", Fate.SUSPECT)
        for status in (300, 301, 302, 303, 304, 307, 308, 399)
    ),
    # Rejected, by our frontend or by somebody else.
    ("400 with JSON", got(400, {"error": "entries[3]"}), "BAD_REQUEST", Fate.DEAD),
    ("400 with an empty object", got(400, {}), "BAD_REQUEST", Fate.DEAD),
    ("400 with ok true", got(400, {"ok": True, "fileUrl": URL}), "BAD_REQUEST", Fate.DEAD),
    ("422 with JSON", got(422, {"error": "no"}), "BAD_REQUEST", Fate.DEAD),
    ("400 with HTML", got(400, "<h1>Bad Request</h1>"), "BAD_RESPONSE", Fate.SUSPECT),
    ("400 and nothing", got(400), "BAD_RESPONSE", Fate.SUSPECT),
    ("400 with a list", got(400, ["no"]), "BAD_RESPONSE", Fate.SUSPECT),
    ("422 with HTML", got(422, "<h1>no</h1>"), "BAD_RESPONSE", Fate.SUSPECT),
    ("401", got(401, {"error": "token"}), "UNAUTHORIZED", Fate.SUSPECT),
    ("403", got(403, PORTAL), "UNAUTHORIZED", Fate.SUSPECT),
    ("404", got(404, {"error": "no such route"}), "NOT_FOUND", Fate.SUSPECT),
    ("405", got(405), "NOT_FOUND", Fate.SUSPECT),
    ("408", got(408), "NETWORK_TIMEOUT", Fate.SUSPECT),
    ("408 after steady progress", got(408, steady=True), "TOO_SLOW", Fate.ASIDE),
    ("413 with JSON", got(413, {"error": "too large"}), "TOO_LARGE", Fate.DEAD),
    ("413 of the proxy in front", got(413, "<h1>413</h1>"), "TOO_LARGE", Fate.DEAD),
    ("429", got(429, {"error": "slow down"}), "RATE_LIMITED", Fate.OUTAGE),
    ("503, seconds", got(503, PORTAL, retry_after="60"), "RATE_LIMITED", Fate.OUTAGE),
    ("503, nonsense", got(503, PORTAL, retry_after="soon"), "FRONTEND_5XX", Fate.SUSPECT),
    *(
        (f"{status}", got(status, {"ok": True, "fileUrl": URL}), "FRONTEND_5XX", Fate.SUSPECT)
        for status in (500, 501, 502, 503, 504, 507, 599)
    ),
    # It may mean: the first one is still running.
    ("409 with HTML", got(409, "<h1>Conflict</h1>"), "CONFLICT", Fate.SUSPECT),
    ("409 and nothing", got(409), "CONFLICT", Fate.SUSPECT),
    ("409 with a list", got(409, [{"ok": True}]), "CONFLICT", Fate.SUSPECT),
    ("409, ok false", got(409, {"ok": False, "fileUrl": URL}), "CONFLICT", Fate.SUSPECT),
    ("409, ok 1", got(409, {"ok": 1, "fileUrl": URL}), "CONFLICT", Fate.SUSPECT),
    ("409, running", got(409, {"code": "IN_PROGRESS", "fileUrl": URL}), "CONFLICT", Fate.SUSPECT),
    ("409, another key", got(409, {"key": "ab" * 32, "fileUrl": URL}), "CONFLICT", Fate.SUSPECT),
    ("409, no key", got(409, {"key": "", "fileUrl": URL}), "CONFLICT", Fate.SUSPECT),
    # No answer at all.
    ("refused", got(trouble=Trouble.UNREACHABLE), "NETWORK_ERROR", Fate.OUTAGE),
    ("bad certificate", got(trouble=Trouble.TLS), "TLS_ERROR", Fate.OUTAGE),
    ("silence", got(trouble=Trouble.TIMEOUT), "NETWORK_TIMEOUT", Fate.SUSPECT),
    ("silence, steady", got(trouble=Trouble.TIMEOUT, steady=True), "NETWORK_TIMEOUT", Fate.SUSPECT),
    ("reset", got(trouble=Trouble.RESET), "NETWORK_RESET", Fate.SUSPECT),
    ("not HTTP", got(trouble=Trouble.GARBLED), "BAD_RESPONSE", Fate.SUSPECT),
    # Anything else.
    *(
        (f"{status}", got(status, {"ok": True, "fileUrl": URL}), "UNKNOWN", Fate.SUSPECT)
        for status in (100, 101, 402, 406, 410, 411, 414, 415, 418, 425, 431, 451, 499, 600, 999)
    ),
    ("nothing at all", got(), "UNKNOWN", Fate.SUSPECT),
]
UNCONFIRMED_IDS = [row[0] for row in UNCONFIRMED]
UNCONFIRMED_ROWS = [row[1:] for row in UNCONFIRMED]


@pytest.mark.parametrize(("answer", "code", "fate"), UNCONFIRMED_ROWS, ids=UNCONFIRMED_IDS)
def test_an_answer_that_confirms_nothing_gets_its_row_of_the_table(
    answer: Answer, code: str, fate: Fate
) -> None:
    entries, rejected = confirm_entries(answer, KEY, SEQS)
    upload, url = confirm_upload(answer, KEY, SIZE)
    for verdict in (classify(answer), entries, upload):
        assert (verdict.code, verdict.fate) == (code, fate)
        assert verdict.status == answer.status
    assert (rejected, url) == ({}, "")


def test_every_row_of_the_rules_is_the_verdict_of_some_answer_and_the_last_catches_all() -> None:
    answers = [row[1] for row in UNCONFIRMED]
    used = {next(i for i, rule in enumerate(RULES) if rule.when(answer)) for answer in answers}
    assert used == set(range(len(RULES)))
    assert (RULES[-1].code, RULES[-1].fate) == ("UNKNOWN", Fate.SUSPECT)
    assert all(RULES[-1].when(answer) for answer in answers)


def test_the_reason_tells_the_status_and_the_beginning_of_what_was_said() -> None:
    reason = classify(got(500, {"error": "disk full", "more": "x" * 5000})).reason
    assert "HTTP 500" in reason
    assert "disk full" in reason
    assert len(reason) < 500


def test_a_tls_error_says_that_the_clock_may_be_wrong() -> None:
    assert "clock" in classify(got(trouble=Trouble.TLS, detail="not yet valid")).reason


# --- entries --------------------------------------------------------------------------------------

CONFIRMED_ENTRIES: list[tuple[str, Answer, str]] = [
    ("200", got(200, {"ok": True}), ""),
    ("200 with more in it", got(200, {"ok": True, "stored": 3, "at": None}), ""),
    ("200 with a byte order mark", got(200, b'\xef\xbb\xbf{"ok": true}'), ""),
    ("201", got(201, {"ok": True}), ""),
    ("299", got(299, {"ok": True}), ""),
    ("an empty list of rejected", got(200, {"ok": True, "rejected": []}), ""),
    ("rejected is null", got(200, {"ok": True, "rejected": None}), ""),
    ("409 with ok", got(409, {"ok": True}), "CONFLICT_PROCESSED"),
    ("409 with a code", got(409, {"code": "ALREADY_PROCESSED"}), "CONFLICT_PROCESSED"),
    ("409, an error", got(409, {"error": "ALREADY_PROCESSED"}), "CONFLICT_PROCESSED"),
    (
        "409, an error's code",
        got(409, {"error": {"code": "ALREADY_PROCESSED", "message": "seen"}}),
        "CONFLICT_PROCESSED",
    ),
    ("409 with our key", got(409, {"idempotencyKey": KEY}), "CONFLICT_PROCESSED"),
    ("409 with our key_", got(409, {"idempotency_key": KEY}), "CONFLICT_PROCESSED"),
]


@pytest.mark.parametrize(
    ("answer", "code"),
    [row[1:] for row in CONFIRMED_ENTRIES],
    ids=[row[0] for row in CONFIRMED_ENTRIES],
)
def test_entries_that_are_confirmed_in_the_contracts_words_are_sent(
    answer: Answer, code: str
) -> None:
    verdict, rejected = confirm_entries(answer, KEY, SEQS)
    assert (verdict.fate, verdict.code) == (Fate.SENT, code)
    assert verdict.status == answer.status
    assert rejected == {}


@pytest.mark.parametrize("ok", [1, 1.0, "true", "True", "yes", [True], {"ok": True}, None, 0, ""])
def test_an_ok_that_is_not_exactly_true_confirms_no_entries(ok: object) -> None:
    verdict, _ = confirm_entries(got(200, {"ok": ok}), KEY, SEQS)
    assert (verdict.fate, verdict.code) == (Fate.SUSPECT, "BAD_RESPONSE")


def test_a_file_url_alone_confirms_no_entries() -> None:
    verdict, _ = confirm_entries(got(200, {"fileUrl": URL}), KEY, SEQS)
    assert (verdict.fate, verdict.code) == (Fate.SUSPECT, "BAD_RESPONSE")


@pytest.mark.parametrize("status", [200, 409])
def test_rejected_entries_are_told_from_the_stored_ones_with_their_reasons(status: int) -> None:
    listed = [{"seq": 18, "code": "BAD_UUID", "message": "no such call"}, {"seq": 17}]
    verdict, rejected = confirm_entries(got(status, {"ok": True, "rejected": listed}), KEY, SEQS)
    assert verdict.fate is Fate.SENT
    assert set(rejected) == {17, 18}
    assert "BAD_UUID" in rejected[18]
    assert "no such call" in rejected[18]


def test_all_entries_may_be_rejected() -> None:
    listed = [{"seq": seq, "code": "NO"} for seq in SEQS]
    verdict, rejected = confirm_entries(got(200, {"ok": True, "rejected": listed}), KEY, SEQS)
    assert verdict.fate is Fate.SENT
    assert set(rejected) == set(SEQS)


@pytest.mark.parametrize(
    "listed",
    [
        [{"seq": 17}, {"seq": 17}],
        [{"seq": 99}],
        [{"seq": 17}, {"seq": 99}],
        [{"seq": "17"}],
        [{"seq": 17.0}],
        [{"seq": None}],
        [{"code": "NO"}],
        [17],
        [None],
        [[17]],
        {"seq": 17},
        {},
        "17",
        "",
        17,
        0,
        False,
        True,
    ],
    ids=repr,
)
@pytest.mark.parametrize("status", [200, 409])
def test_a_list_of_rejected_entries_that_makes_no_sense_confirms_nothing(
    status: int, listed: object
) -> None:
    verdict, rejected = confirm_entries(got(status, {"ok": True, "rejected": listed}), KEY, SEQS)
    assert verdict.fate is Fate.SUSPECT
    assert verdict.code in ("BAD_RESPONSE", "CONFLICT" if status == 409 else "BAD_RESPONSE")
    assert (verdict.status, rejected) == (status, {})


def test_a_rejected_seq_of_true_is_not_the_entry_number_one() -> None:
    answer = got(200, {"ok": True, "rejected": [{"seq": True, "code": "NO"}]})
    verdict, rejected = confirm_entries(answer, KEY, [1, 2])
    assert (verdict.fate, verdict.code) == (Fate.SUSPECT, "BAD_RESPONSE")
    assert rejected == {}


# --- uploads --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (got(200, {"fileUrl": URL}), ""),
        (got(201, {"fileUrl": "http://localhost:3000/storage/recordings/8a3e/mixed.wav"}), ""),
        (got(200, {"fileUrl": "http://[::1]:3000/mixed.wav"}), ""),
        (got(200, {"ok": True, "fileUrl": URL, "sizeBytes": SIZE, "more": []}), ""),
        (got(200, {"fileUrl": URL, "sizeBytes": None}), ""),
        (got(409, {"ok": True, "fileUrl": URL}), "CONFLICT_PROCESSED"),
        (got(409, {"code": "ALREADY_PROCESSED", "fileUrl": URL}), "CONFLICT_PROCESSED"),
        (
            got(409, {"idempotencyKey": KEY, "fileUrl": URL, "sizeBytes": SIZE}),
            "CONFLICT_PROCESSED",
        ),
    ],
    ids=lambda value: value.body.decode() if isinstance(value, Answer) else value,
)
def test_an_upload_that_is_confirmed_is_sent_with_its_url(answer: Answer, code: str) -> None:
    verdict, url = confirm_upload(answer, KEY, SIZE)
    assert (verdict.fate, verdict.code) == (Fate.SENT, code)
    assert url == json.loads(answer.body)["fileUrl"]


BAD_URLS: list[object] = [
    "",
    " ",
    None,
    7,
    True,
    [URL],
    {"url": URL},
    "mixed.wav",
    "/storage/recordings/8a3e/mixed.wav",
    "//voice.example.com/mixed.wav",
    "ftp://voice.example.com/mixed.wav",
    "file:///storage/mixed.wav",
    "javascript:alert(1)",
    "http:/voice.example.com/mixed.wav",
    "http://",
    "https:///mixed.wav",
    "http:// voice.example.com/mixed.wav",
    "https://voice.example.com/a b.wav",
    "https://voice.example.com/\nmixed.wav",
    "https://voice.example.com/mixed.wav\0",
    "https://voice.example.com/\ud800.wav",
    " " + URL,
    "see " + URL,
    "https://voice.example.com/" + "a" * 100_000,
]


@pytest.mark.parametrize("url", BAD_URLS, ids=lambda url: ascii(url)[:40])
@pytest.mark.parametrize(("status", "code"), [(200, "BAD_RESPONSE"), (409, "CONFLICT")])
def test_an_upload_without_a_usable_url_is_not_confirmed(
    url: object, status: int, code: str
) -> None:
    verdict, stored = confirm_upload(got(status, {"ok": True, "fileUrl": url}), KEY, SIZE)
    assert (verdict.fate, verdict.code, stored) == (Fate.SUSPECT, code, "")


def test_an_upload_that_only_says_ok_is_not_confirmed() -> None:
    verdict, url = confirm_upload(got(200, {"ok": True}), KEY, SIZE)
    assert (verdict.fate, verdict.code, url) == (Fate.SUSPECT, "BAD_RESPONSE", "")
    assert "fileUrl" in verdict.reason


@pytest.mark.parametrize("stored", [0, 1, SIZE - 1, SIZE + 1, -SIZE, str(SIZE - 1), [SIZE], {}])
@pytest.mark.parametrize("status", [200, 409])
def test_an_upload_stored_with_another_size_is_not_confirmed(status: int, stored: object) -> None:
    answer = got(status, {"ok": True, "fileUrl": URL, "sizeBytes": stored})
    verdict, url = confirm_upload(answer, KEY, SIZE)
    assert (verdict.fate, url) == (Fate.SUSPECT, "")
    assert str(SIZE) in verdict.reason


# --- Retry-After ----------------------------------------------------------------------------------

NOW = 1_790_000_000.0


@pytest.mark.parametrize(
    ("text", "pause"),
    [
        ("0", 0.0),
        ("1", 1.0),
        ("120", 120.0),
        (" 30 ", 30.0),
        ("3600", 3600.0),
        ("3601", 3600.0),
        ("999999999", 3600.0),
        ("99999999999999999999", 3600.0),
        ("9" * 400, 3600.0),
        (formatdate(NOW + 90, usegmt=True), 90.0),
        (formatdate(NOW + 90, localtime=False), 90.0),
        (formatdate(NOW - 90, usegmt=True), 0.0),
        (formatdate(NOW + 86400, usegmt=True), 3600.0),
        ("Fri, 31 Dec 9999 23:59:59 GMT", 3600.0),
        ("Thu, 01 Jan 1970 00:00:00 GMT", 0.0),
        (None, None),
        ("", None),
        ("soon", None),
        ("-5", None),
        ("1.5", None),
        ("0x10", None),
        ("1e9", None),
        ("１２０", None),
        ("Fri, 99 Foo 2026 25:61:61 GMT", None),
        ("<html>", None),
    ],
    ids=lambda value: ascii(value)[:30],
)
def test_retry_after_is_read_as_seconds_or_a_date_and_never_exceeds_an_hour(
    text: str | None, pause: float | None
) -> None:
    assert retry_after(text, NOW) == pause
    verdict = classify(got(429, {}, retry_after=text), NOW)
    assert (verdict.fate, verdict.code) == (Fate.OUTAGE, "RATE_LIMITED")
    assert verdict.retry_after == pause
    verdict = classify(got(503, {}, retry_after=text), NOW)
    plain = (Fate.SUSPECT, "FRONTEND_5XX")
    asked = plain if pause is None else (Fate.OUTAGE, "RATE_LIMITED")
    assert (verdict.fate, verdict.code, verdict.retry_after) == (*asked, pause)


def test_a_retry_after_date_without_a_zone_is_meant_in_gmt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        text = time.strftime("%a %b %d %H:%M:%S %Y", time.gmtime(NOW + 90))
        assert retry_after(text, NOW) == 90.0
    finally:
        monkeypatch.undo()
        time.tzset()


@given(st.text(max_size=60), st.floats(-1e12, 1e12))
def test_any_retry_after_is_nothing_or_up_to_an_hour(text: str, now: float) -> None:
    pause = retry_after(text, now)
    assert pause is None or 0.0 <= pause <= 3600.0


@pytest.mark.parametrize("status", [200, 302, 413, 500, 502, 504])
def test_retry_after_counts_only_with_429_and_503(status: int) -> None:
    assert classify(got(status, {}, retry_after="120"), NOW).retry_after is None


PAUSE = Verdict(Fate.OUTAGE, "RATE_LIMITED", "a pause", 503, 60.0)
PLAIN = (Fate.SUSPECT, "FRONTEND_5XX")
THROUGH = Verdict(Fate.SENT, "", "confirmed", 200)


class Door:
    """What is remembered of pauses, and the verdicts on one request after another."""

    def __init__(self, most: int = serversync.PAUSES_IN_ROW) -> None:
        self.most, self.paused = most, dict[int, int]()

    def hears(self, verdict: Verdict, *seqs: int) -> tuple[Fate, str]:
        heard = serversync.heed(verdict, seqs, self.paused, self.most)
        return heard.fate, heard.code


def test_the_fourth_pause_of_the_same_entries_in_a_row_is_a_plain_503() -> None:
    door = Door()
    heard = [door.hears(PAUSE, 1, 2, 3) for _ in range(5)]
    assert heard == [(Fate.OUTAGE, "RATE_LIMITED")] * 3 + [PLAIN] * 2


def test_a_poisonous_entry_is_found_although_others_get_through_between_its_pauses() -> None:
    """As it goes: one alone after each pause, then two, then four."""
    door = Door()
    for end in (16, 8, 6):
        assert door.hears(PAUSE, *range(1, end)) == (Fate.OUTAGE, "RATE_LIMITED")
        assert door.hears(THROUGH, end - 2)[0] is Fate.SENT
    assert door.hears(PAUSE, 3, 4) == PLAIN
    assert door.hears(PAUSE, 3) == PLAIN
    assert door.hears(THROUGH, 4)[0] is Fate.SENT
    assert door.hears(THROUGH, *range(100, 200))[0] is Fate.SENT
    assert door.hears(PAUSE, 3, 200, 201) == PLAIN, "hours later it holds nobody up"


def test_poisonous_entries_do_not_make_each_other_forgotten() -> None:
    door = Door()
    heard = [door.hears(PAUSE, seq) for _ in range(5) for seq in (1, 2, 3)]
    assert heard == [(Fate.OUTAGE, "RATE_LIMITED")] * 9 + [PLAIN] * 6


def test_what_is_remembered_of_pauses_has_a_bound() -> None:
    door = Door()
    for first in range(1, 100_000, 1000):
        door.hears(PAUSE, *range(first, first + 1000))
    assert len(door.paused) <= 1024


def test_pauses_of_other_entries_or_after_their_success_are_counted_anew() -> None:
    door = Door()
    for first in range(1, 100, 2):
        assert door.hears(PAUSE, first, first + 1) == (Fate.OUTAGE, "RATE_LIMITED")
    for _ in range(10):
        assert door.hears(PAUSE, 1, 2) == (Fate.OUTAGE, "RATE_LIMITED")
        assert door.hears(THROUGH, 1)[0] is door.hears(THROUGH, 2)[0] is Fate.SENT


def test_a_429_is_a_pause_however_often_it_comes_and_a_plain_503_none() -> None:
    door = Door()
    often = [door.hears(replace(PAUSE, status=429), 1) for _ in range(50)]
    assert set(often) == {(Fate.OUTAGE, "RATE_LIMITED")}
    assert door.hears(Verdict(*PLAIN, "trouble", 503), 1) == PLAIN
    assert not door.paused


def test_one_who_waits_for_nothing_takes_the_first_pause_of_a_503_for_a_plain_one() -> None:
    assert Door(most=0).hears(PAUSE, 1, 2) == PLAIN


@pytest.mark.parametrize(
    ("status", "tries", "holds"), [(503, 1, True), (503, 3, True), (503, 4, False), (429, 99, True)]
)
def test_a_pause_that_the_settings_were_told_holds_for_all_a_503_not_for_ever(
    status: int, tries: int, holds: bool
) -> None:
    assert serversync.speaks_for_all(replace(PAUSE, status=status), tries) is holds
    assert not serversync.speaks_for_all(Verdict(*PLAIN, "trouble", 503), tries)


@given(st.integers(1, 1000), st.floats(0, 3600), st.floats(0, 1))
def test_a_wait_is_the_backoff_and_at_least_the_pause_that_was_asked_for(
    tries: int, pause: float, jitter: float
) -> None:
    wait = serversync.patience(tries, pause, jitter)
    assert max(pause, backoff(tries, jitter)) <= wait
    assert wait <= max(256, 1.1 * pause)
    assert serversync.patience(tries, None, jitter) == backoff(tries, jitter)


def test_boxes_that_were_told_the_same_pause_come_back_at_moments_of_their_own() -> None:
    waits = [serversync.patience(1, 60.0, jitter / 100) for jitter in range(101)]
    assert (min(waits), max(waits)) == (60.0, 120.0)
    assert len(set(waits)) == 101


def test_the_longest_pause_has_a_random_part_too_but_for_what_would_count_as_due() -> None:
    assert serversync.patience(1, 3600.0, 1.0) == pytest.approx(3960.0)
    told = Verdict(*PLAIN, "trouble", 503, 3600.0)
    assert next_state(Past(), told, 0, 0, 8, 24, 1.0).delay == 3600.0


def test_an_entry_that_was_told_when_to_come_again_is_not_tried_before() -> None:
    told = Verdict(*PLAIN, "trouble", 503, 600.0)
    assert next_state(Past(), told, 0, 0, 8, 24, 0.0).delay == 600.0
    assert next_state(Past(), told, 0, 0, 8, 24, 1.0).delay == pytest.approx(660.0)


# --- any answer at all ----------------------------------------------------------------------------

CODES = {rule.code for rule in RULES} | {"", "CONFLICT_PROCESSED"}
PIECES: st.SearchStrategy[Any] = st.sampled_from(
    [True, False, None, 0, 1, 17, 18, 99, "", "true", "ALREADY_PROCESSED", KEY, URL, "ftp://x/y"]
)
VALUES: st.SearchStrategy[Any] = st.recursive(
    PIECES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["seq", "code", "message", "key"]), inner, max_size=3)
    ),
    max_leaves=6,
)
OBJECTS = st.dictionaries(
    st.sampled_from(
        ["ok", "rejected", "code", "error", "key", "idempotencyKey", "fileUrl", "sizeBytes"]
    ),
    VALUES,
    max_size=5,
)
HONEST = st.fixed_dictionaries(
    {"ok": st.just(True)},
    optional={
        "fileUrl": st.just(URL),
        "sizeBytes": st.just(SIZE),
        "rejected": st.lists(st.fixed_dictionaries({"seq": st.sampled_from([17, 18])}), max_size=2),
    },
)
BODIES = (
    (OBJECTS | HONEST | VALUES).map(lambda value: json.dumps(value).encode())
    | st.binary(max_size=40)
    | st.just(PORTAL.encode())
)
STATUSES = st.sampled_from([200, 201, 204, 409, 409, 400, 408, 413, 422, 429]) | st.integers(
    100, 599
)
ANSWERS = st.builds(
    Answer,
    status=STATUSES,
    body=BODIES,
    retry_after=st.none() | st.text(max_size=10) | st.sampled_from(["5", "Fri"]),
    detail=st.sampled_from(["", "detail"]),
    steady=st.booleans(),
    complete=st.booleans(),
) | st.builds(Answer, trouble=st.none() | st.sampled_from(Trouble), steady=st.booleans())


def parsed(answer: Answer) -> dict[str, Any]:
    try:
        said = json.loads(answer.body)
    except ValueError:
        return {}
    return said if isinstance(said, dict) else {}


def has_it_already(said: dict[str, Any]) -> bool:
    words = json.dumps([said.get("code"), said.get("error")])
    named = [said.get(name) for name in ("key", "idempotencyKey", "idempotency_key")]
    return said.get("ok") is True or '"ALREADY_PROCESSED"' in words or KEY in named


def sensible(listed: Any) -> bool:
    if listed is None:
        return True
    if not isinstance(listed, list) or not all(isinstance(item, dict) for item in listed):
        return False
    seqs = [item.get("seq") for item in listed]
    return all(type(seq) is int and seq in SEQS and seqs.count(seq) == 1 for seq in seqs)


@settings(max_examples=200)
@given(ANSWERS)
def test_any_answer_gets_one_verdict_and_entries_are_sent_only_if_it_says_so(
    answer: Answer,
) -> None:
    verdict, rejected = confirm_entries(answer, KEY, SEQS, NOW)
    assert verdict.code in CODES
    assert verdict.reason
    assert verdict.status == answer.status
    said, status = parsed(answer), answer.status or 0
    if verdict.fate is Fate.SENT:
        success = 200 <= status <= 299 and answer.complete and said.get("ok") is True
        assert success or (status == 409 and has_it_already(said))
        assert sensible(said.get("rejected"))
        assert set(rejected) == {item["seq"] for item in said.get("rejected") or []}
    else:
        plain = classify(answer, NOW)
        assert verdict.code in (plain.code, "BAD_RESPONSE")
        assert verdict.fate is plain.fate
        assert not rejected


@settings(max_examples=200)
@given(ANSWERS)
def test_any_answer_gets_one_verdict_and_a_file_is_sent_only_with_its_url_and_its_size(
    answer: Answer,
) -> None:
    verdict, url = confirm_upload(answer, KEY, SIZE, NOW)
    assert verdict.code in CODES
    assert verdict.reason
    assert verdict.status == answer.status
    said, status = parsed(answer), answer.status or 0
    if verdict.fate is Fate.SENT:
        success = 200 <= status <= 299 and answer.complete and said.get("ok", True) is True
        assert success or (status == 409 and has_it_already(said))
        assert url == said["fileUrl"] == URL
        assert said.get("sizeBytes") in (None, SIZE)
    else:
        assert url == ""


# --- what becomes of one entry that failed --------------------------------------------------------

SUSPECT = Verdict(Fate.SUSPECT, "FRONTEND_5XX", "HTTP 500")
DAY = 86400.0


def step(
    past: Past,
    verdict: Verdict = SUSPECT,
    successes: int = 0,
    deaths: int = 0,
    retry_max: int = 8,
    retry_hours: float = 24,
    jitter: float = 1.0,
) -> Transition:
    return next_state(past, verdict, successes, deaths, retry_max, retry_hours, jitter)


def dead(code: str) -> Verdict:
    return Verdict(Fate.DEAD, code, "rejected")


@pytest.mark.parametrize(
    ("past", "successes", "to", "attempts"),
    [
        # Never before: nothing says that it is the entry's fault, however healthy the endpoint.
        (Past(), 0, Next.WAITS, 0),
        (Past(), 1_000_000, Next.WAITS, 0),
        (Past(age=30 * DAY), 1_000_000, Next.WAITS, 0),
        # Charged only after a success since its last failure.
        (Past(1, 0, 5), 5, Next.WAITS, 0),
        (Past(1, 0, 5), 4, Next.WAITS, 0),
        (Past(1, 0, 5), 6, Next.WAITS, 1),
        (Past(1, 0, 0), 1, Next.WAITS, 1),
        (Past(50, 3, 5), 5, Next.WAITS, 3),
        (Past(50, 3, 5), 500, Next.WAITS, 4),
        # Both SYNC_RETRY_MAX and SYNC_RETRY_HOURS must be reached.
        (Past(9, 6, 5, 2 * DAY), 6, Next.WAITS, 7),
        (Past(9, 7, 5, DAY - 1), 6, Next.WAITS, 8),
        (Past(9, 7, 5, DAY), 6, Next.DEAD, 8),
        (Past(99, 40, 5, DAY - 1), 6, Next.WAITS, 41),
        (Past(99, 40, 5, DAY), 6, Next.DEAD, 41),
        # Time alone, or tries alone, kill nothing: a month without network.
        (Past(5000, 0, 5, 30 * DAY), 5, Next.WAITS, 0),
        (Past(5000, 7, 5, 30 * DAY), 5, Next.WAITS, 7),
        (Past(5000, 8, 5, 30 * DAY), 5, Next.WAITS, 8),
        (Past(5000, 0, 5, 30 * DAY), 6, Next.WAITS, 1),
    ],
)
def test_a_suspect_is_charged_after_a_success_and_dead_by_attempts_and_hours(
    past: Past, successes: int, to: Next, attempts: int
) -> None:
    now = step(past, successes=successes)
    assert (now.to, now.attempts, now.tries) == (to, attempts, past.tries + 1)
    assert now.charged == (attempts > past.attempts)


@pytest.mark.parametrize(("retry_max", "retry_hours"), [(1, 0.0), (3, 0.0), (1, 1.0), (3, 2.5)])
def test_the_limits_are_those_of_the_configuration(retry_max: int, retry_hours: float) -> None:
    last, age = retry_max - 1, retry_hours * 3600
    limits: dict[str, Any] = {"retry_max": retry_max, "retry_hours": retry_hours, "successes": 2}
    assert step(Past(9, last, 1, age), **limits).to is Next.DEAD
    if retry_max > 1:
        assert step(Past(9, last - 1, 1, age), **limits).to is Next.WAITS
    if retry_hours:
        assert step(Past(9, last, 1, age - 1), **limits).to is Next.WAITS


@pytest.mark.parametrize("fate", [Fate.ASIDE, Fate.OUTAGE])
def test_what_is_nobodys_fault_is_never_charged_and_never_dead(fate: Fate) -> None:
    past = Past(5000, 7, 5, 30 * DAY)
    now = step(past, Verdict(fate, "FILE_CHANGED", "changed"), successes=1000)
    assert (now.to, now.attempts, now.charged) == (Next.WAITS, 7, False)


@pytest.mark.parametrize("code", ["BAD_REQUEST", "REJECTED", "TOO_LARGE", "FILE_MISSING"])
def test_a_deadly_verdict_is_dead_at_once(code: str) -> None:
    now = step(Past(), dead(code))
    assert (now.to, now.attempts, now.charged) == (Next.DEAD, 0, False)


@pytest.mark.parametrize("code", ["BAD_REQUEST", "REJECTED", "FRONTEND_5XX"])
@pytest.mark.parametrize(
    ("deaths", "to"), [(0, Next.DEAD), (8, Next.DEAD), (9, Next.HELD), (500, Next.HELD)]
)
def test_the_tenth_death_of_a_type_in_a_row_does_not_happen(
    code: str, deaths: int, to: Next
) -> None:
    verdict = SUSPECT if code == SUSPECT.code else dead(code)
    now = step(Past(20, 9, 5, 2 * DAY), verdict, successes=6, deaths=deaths)
    assert now.to is to
    if to is Next.HELD:
        assert (now.attempts, now.charged) == (9, False)


@pytest.mark.parametrize(
    "code", ["FILE_MISSING", "FILE_UNSAFE", "BAD_PAYLOAD", "SECOND_RECORDING", "TOO_LARGE"]
)
def test_local_deaths_and_too_large_are_not_held_back(code: str) -> None:
    assert code in serversync.LOCAL_CODES
    assert step(Past(), dead(code), deaths=500).to is Next.DEAD


FAILURES = st.lists(st.integers(0, 3), max_size=40)


@given(FAILURES, st.floats(0, 100 * DAY), st.integers(1, 10), st.floats(0, 100))
def test_an_entry_is_never_charged_more_often_than_successes_came_between_its_failures(
    between: list[int], age: float, retry_max: int, retry_hours: float
) -> None:
    past, successes = Past(age=age), 0
    for new in between:
        successes += new
        now = step(past, successes=successes, retry_max=retry_max, retry_hours=retry_hours)
        assert now.charged == bool(new and past.tries)
        if now.to is Next.DEAD:
            assert now.attempts >= retry_max
            assert age >= retry_hours * 3600
            return
        past = Past(now.tries, now.attempts, successes, age)
    assert past.attempts <= sum(1 for new in between[1:] if new)


# --- time ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tries", "longest"),
    [(1, 2), (2, 4), (3, 8), (4, 16), (5, 32), (6, 64), (7, 128), (8, 256), (9, 256), (10**6, 256)],
)
def test_the_backoff_doubles_to_its_cap_and_the_jitter_comes_after_it(
    tries: int, longest: float
) -> None:
    assert backoff(tries, 1.0) == longest
    assert backoff(tries, 0.5) == longest / 2
    assert backoff(tries, 0.0) == 0.0
    waits = step(Past(tries - 1, 0, 1), jitter=0.25)
    assert waits.delay == longest / 4


@pytest.mark.parametrize(
    ("size", "most", "gentle", "after"),
    [
        (1, 100, False, 2),
        (50, 100, False, 100),
        (64, 100, False, 100),
        (100, 100, False, 100),
        (1, 1, False, 1),
        (1, 100, True, 2),
        (10, 100, True, 11),
        (50, 100, True, 55),
        (99, 100, True, 100),
        (100, 100, True, 100),
        (1, 1, True, 1),
    ],
)
def test_the_batch_doubles_and_after_a_timeout_grows_by_a_tenth(
    size: int, most: int, gentle: bool, after: int
) -> None:
    assert next_size(size, most, gentle) == after


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


# --- a frontend that flaps ------------------------------------------------------------------------


def flap(chance: random.Random, spells: bool) -> tuple[int, int, int]:
    """A day of calls, and a frontend that fails at random with p = 0.7.

    The worst case for the entries: nothing is taken for an outage, each failure counts. With
    `spells` it is down for whole minutes, else each request has its own fate. Returns how many
    entries died, how many still wait, and the most attempts that one was charged.
    """
    arrivals = sorted(chance.uniform(0, DAY) for _ in range(400))
    down: dict[int, bool] = {}
    successes = died = most = 0
    waiting = [(at, number, at, Past()) for number, at in enumerate(arrivals)]
    while waiting:
        due, number, since, past = min(waiting)
        waiting.remove((due, number, since, past))
        spell = int(due // 60)
        fails = chance.random() < 0.7
        if spells:
            fails = down.setdefault(spell, fails)
        if not fails:
            successes += 1
            continue
        past = replace(past, age=due - since if past.tries else 0.0)
        now = step(past, successes=successes, jitter=chance.random())
        died += now.to is not Next.WAITS
        most = max(most, now.attempts)
        if due + now.delay < 2 * DAY and now.to is Next.WAITS:
            later = Past(now.tries, now.attempts, successes)
            waiting.append((due + now.delay, number, since if past.tries else due, later))
    return died, len(waiting), most


@settings(max_examples=8)
@given(st.integers(0, 2**32), st.booleans())
def test_a_frontend_that_flaps_for_a_day_makes_no_dead_letter(seed: int, spells: bool) -> None:
    died, left, _ = flap(random.Random(seed), spells)
    assert (died, left) == (0, 0)


def test_the_flapping_frontend_charges_entries_beyond_their_attempts_and_hours_save_them() -> None:
    """The simulation is worth something: without the hours, entries would have died."""
    assert max(flap(random.Random(seed), False)[2] for seed in range(3)) >= 8


# --- the sentence of a cycle ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tally", "sentence"),
    [
        (Tally(), "idle: nothing to send"),
        (Tally(entries=1), "sent 1 entry"),
        (Tally(entries=12), "sent 12 entries"),
        (Tally(files=1, bytes=999), "uploaded 1 recording (999 bytes)"),
        (Tally(files=2, bytes=3_840_088), "uploaded 2 recordings (3.8 MB)"),
        (Tally(files=9, bytes=2 * 10**9), "uploaded 9 recordings (2.0 GB)"),
        (Tally(removed=1), "removed 1 uploaded recording from the disk"),
        (Tally(aside=2), "set 2 entries aside"),
        (Tally(dead=1), "gave up 1 entry (dead letters)"),
        (Tally(entries=3, aside=1), "sent 3 entries; set 1 entry aside"),
    ],
)
def test_the_sentence_tells_what_the_cycle_did(tally: Tally, sentence: str) -> None:
    assert sentence_of(tally, [], 0.0) == sentence


def test_the_sentence_tells_the_outage_its_age_and_the_next_try() -> None:
    outage = Outage("NETWORK_ERROR", "the frontend cannot be reached", 100.0, 3, 172.0)
    sentence = sentence_of(Tally(entries=2), [outage], 160.0)
    assert "sent 2 entries" in sentence
    assert "outage since 60 s, next try in 12 s: the frontend cannot be reached" in sentence
    assert "next try in 0 s" in sentence_of(Tally(), [outage], 500.0)


def test_the_sentence_stays_short() -> None:
    outage = Outage("UNKNOWN", "x" * 5000, 0.0)
    assert len(sentence_of(Tally(entries=3), [outage, outage], 1.0)) <= 400


# --- parts of a batch -----------------------------------------------------------------------------

JSON_VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
TRICKY = st.sampled_from(['"},{"', "]}", '{"entries":[', "\\", ",", "日本語", "\u0000", "é" * 9])
ENTRIES = st.lists(
    st.fixed_dictionaries({"entityType": TRICKY, "payload": JSON_VALUES | TRICKY}), max_size=12
)


def batch_of(entries: Sequence[object], first: int = 100) -> Batch:
    texts = [json.dumps(entry, ensure_ascii=False).encode() for entry in entries]
    seqs = [first + 3 * number for number in range(len(texts))]
    return Batch(seqs, [len(text) for text in texts], BODY_HEAD + b",".join(texts) + BODY_TAIL)


@given(st.data(), ENTRIES)
def test_any_part_of_a_batch_is_valid_json_with_exactly_these_entries_in_order(
    data: st.DataObject, entries: list[object]
) -> None:
    numbers = st.lists(st.sampled_from(range(max(1, len(entries)))), unique=True)
    picked = sorted(data.draw(numbers)) if entries else []
    whole = batch_of(entries)
    part = whole.part(picked)
    assert json.loads(part.body) == {"entries": [entries[i] for i in picked]}
    assert part.seqs == [whole.seqs[i] for i in picked]
    again = part.part(range(0, len(picked), 2))
    assert json.loads(again.body) == {"entries": [entries[i] for i in picked[::2]]}
    assert again.seqs == part.seqs[::2]


def test_the_part_that_is_everything_is_the_same_text() -> None:
    whole = batch_of([{"a": 1}, {"b": "]}"}])
    assert whole.part([0, 1]) == whole


def test_a_part_of_an_entry_that_is_too_large_for_one_piece_has_no_text_either() -> None:
    assert Batch([7], [9_000_000], b"").part([0]) == Batch([7], [9_000_000], b"")


# --- where a recording lies -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "where"),
    [
        ("storage/recordings/8HnT2kQ-a3x9/mixed.wav", ("8HnT2kQ-a3x9", "mixed.wav")),
        ("storage/recordings/8HnT2kQ-a3x9../mixed.wav", ("8HnT2kQ-a3x9..", "mixed.wav")),
        ("storage/recordings/a84b4c@192.0.2.7/mixed.wav", ("a84b4c@192.0.2.7", "mixed.wav")),
        ("storage/recordings/...x_/mixed.mp3", ("...x_", "mixed.mp3")),
        ("storage/recordings/..../mixed.wav", ("....", "mixed.wav")),
        ("storage/recordings/.hidden/mixed.wav", (".hidden", "mixed.wav")),
        ("storage/recordings/a b%2e%2e/MIXED.WAV", ("a b%2e%2e", "MIXED.WAV")),
        ("storage/recordings/通話/b_leg.wav", ("通話", "b_leg.wav")),
        (f"{ROOT}/x1/mixed.wav", ("x1", "mixed.wav")),
        ("recordings/x1/mixed.wav", ("x1", "mixed.wav")),
        ("./storage//recordings/x1/mixed.wav", ("x1", "mixed.wav")),
        ("x1/mixed.wav", ("x1", "mixed.wav")),
        ("recordings/" + "x" * 255 + "/mixed.wav", ("x" * 255, "mixed.wav")),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_recording_lies_one_level_below_the_root(path: str, where: tuple[str, str]) -> None:
    assert locate(path, None, ROOT) == where
    assert locate(path, "ignored", ROOT + "/") == where


def test_the_component_above_may_be_the_roots_own_name() -> None:
    assert locate("data/audio/x1/mixed.wav", None, "/srv/audio/") == ("x1", "mixed.wav")
    with pytest.raises(EntryTrouble):
        locate("data/audio/x1/mixed.wav", None, ROOT)


def test_without_a_path_the_call_id_names_the_directory() -> None:
    assert locate(None, "8HnT2kQ-a3x9..", ROOT) == ("8HnT2kQ-a3x9..", "mixed.wav")


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/",
        ".",
        "..",
        "mixed.wav",
        "/mixed.wav",
        "/x1/mixed.wav",
        "/etc/x1/mixed.wav",
        "storage/recordings/mixed.wav/",
        "storage/recordings//mixed.wav",
        "storage/recordings/./mixed.wav",
        "storage/recordings/../mixed.wav",
        "storage/recordings/../x1/mixed.wav",
        "../recordings/x1/mixed.wav",
        "storage/recordings/x1/../mixed.wav",
        "storage/recordings/x1/..",
        "storage/recordings/x1/.",
        "storage/recordings/x1/",
        "storage/recordings/x1/deeper/mixed.wav",
        "storage/other/x1/mixed.wav",
        "storage/recordings/x1/mixed\0.wav",
        "storage/recordings/x1\0/mixed.wav",
        "storage/recordings/" + "x" * 256 + "/mixed.wav",
        "storage/recordings/" + "話" * 86 + "/mixed.wav",
        "storage/recordings/x1/" + "x" * 252 + ".wav",
        "storage/recordings/.serversync-trash/mixed.wav",
        "storage/recordings/.serversync-root/mixed.wav",
    ],
    ids=lambda path: ascii(path)[:50],
)
def test_an_unsafe_path_is_refused(path: str) -> None:
    with pytest.raises(EntryTrouble) as trouble:
        locate(path, None, ROOT)
    verdict = trouble.value.verdict
    assert (verdict.fate, verdict.code) == (Fate.DEAD, "FILE_UNSAFE")


@pytest.mark.parametrize("call_id", ["", ".", "..", "a/b", "../x1", "/etc", "x\0", ".serversync-x"])
def test_an_unsafe_call_id_is_refused(call_id: str) -> None:
    with pytest.raises(EntryTrouble) as trouble:
        locate(None, call_id, ROOT)
    assert trouble.value.verdict.code == "FILE_UNSAFE"


@pytest.mark.parametrize("name", ["mixed", "mixed.txt", "meta.json", "mixed.wav.exe", "wav", "-"])
def test_a_file_that_is_neither_wav_nor_mp3_is_a_bad_payload(name: str) -> None:
    with pytest.raises(EntryTrouble) as trouble:
        locate(f"storage/recordings/x1/{name}", None, ROOT)
    assert (trouble.value.verdict.fate, trouble.value.verdict.code) == (Fate.DEAD, "BAD_PAYLOAD")


def test_neither_path_nor_call_id_is_a_bad_payload() -> None:
    with pytest.raises(EntryTrouble) as trouble:
        locate(None, None, ROOT)
    assert (trouble.value.verdict.fate, trouble.value.verdict.code) == (Fate.DEAD, "BAD_PAYLOAD")


SEGMENTS = (
    st.sampled_from(["", ".", "..", "...", "x1", "a@b", "recordings", "storage", "~", "\0"])
    | st.sampled_from(["mixed.wav", "x.mp3", "meta.json", ".wav", "..wav", "x" * 256])
    | st.sampled_from([".serversync-trash", ".serversync-root"])
)
PATHS = st.lists(SEGMENTS | st.text(max_size=6), max_size=6).map("/".join)


@settings(max_examples=200)
@given(st.none() | PATHS, st.none() | PATHS, st.sampled_from([ROOT, ROOT + "/", "/", "/srv/a"]))
def test_any_path_yields_two_plain_names_or_a_deadly_verdict(
    path: str | None, call_id: str | None, root: str
) -> None:
    try:
        directory, name = locate(path, call_id, root)
    except EntryTrouble as trouble:
        assert trouble.verdict.fate is Fate.DEAD
        assert trouble.verdict.code in ("FILE_UNSAFE", "BAD_PAYLOAD")
        return
    for part in (directory, name):
        assert part not in ("", ".", "..")
        assert not set(part) & {"/", "\0"}
        assert len(part.encode()) <= 255
    assert directory not in (serversync.TRASH, serversync.MARKER)
    assert re.search(r"(?i)\.(wav|mp3)$", name)

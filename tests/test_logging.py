"""What leaves through the log: sentences with fields, masked, at most once a minute the same."""

import itertools
import json
import logging
import os
import re
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st
from systemd import journal

import serversync
from agent import PROGRAM, PYTHON, REPOSITORY
from frontend import Reply
from pi import Pi
from serversync import (
    Answer,
    Repeats,
    Trouble,
    classify,
    clean,
    load_config,
    mask,
    say,
)

TOKEN = "Tk-4711.correct~horse+battery/staple="
PASSWORD = "s3cr3t hunter2 Pa55"
KEY_BODY = "MIIEvgIBADANBgkqhkiG9w0BAQEFAASC"

# Text that holds a secret, and the part that must not leave.
SECRETS: list[tuple[str, str]] = [
    ("Authorization: Bearer abc.def-123/456+789=", "abc.def-123/456+789="),
    ("{'authorization': 'bearer abc.def-123'}", "abc.def-123"),
    ("Authorization: hunter2 is wrong", "hunter2"),
    ('{"Authorization": "ApiKey hunter2 is long"}', "is long"),
    ('{\\"Authorization\\": \\"Token hunter2 is long\\", \\"x\\": 1}', "is long"),
    ('Authorization: Digest username="u", response="hunter2"', "hunter2"),
    ("Proxy-Authorization: Basic dXNlcjpwYXNz", "dXNlcjpwYXNz"),
    ("connecting to postgresql://voicebot:hunter2@db.example.com/voicebot", "hunter2"),
    ("http://user:pa/ss@proxy.example.com:3128/", "pa/ss"),
    ("redis://:hunter2@cache/0", "hunter2"),
    ("postgresql://voicebot:p@ss/w@hunter2@db/voicebot?x=1", "hunter2"),
    ("http://me@example.com:hunter2@proxy/", "hunter2"),
    ("host=db user=voicebot password=hunter2 dbname=voicebot", "hunter2"),
    ("host=db password='hunter2 is long' dbname=voicebot", "is long"),
    ('{"password": "hunter2 is long"}', "is long"),
    ('{"api_key":"hunter2"}', "hunter2"),
    ('{"password": "a\\"b, hunter2", "x": 1}', "hunter2"),
    ('"token": "ends with\\\\", "password": "hunter2"', "hunter2"),
    ("host=db password='it\\'s hunter2' dbname=voicebot", "hunter2"),
    ("password='it''s hunter2'", "hunter2"),
    ('password=a\\"hunter2 x', "hunter2"),
    ('{"body": "{\\"secret\\": \\"a\\\\\\"b, hunter2\\"}"}', "hunter2"),
    ("https://voice.example.com/x?token=hunter2&page=1", "hunter2"),
    ("client_secret: hunter2", "hunter2"),
    ('{"token": ["a], b", "hunter2"], "x": 1}', "hunter2"),
    ("{'secret': {'name': 'hunter2'}, 'x': 1}", "hunter2"),
    ('cut: {"secret": {"deep": [1], "name": "hunter2"}}', "hunter2"),
    ('cut: {\\"token\\": [\\"a]\\", \\"hunter2\\"]}', "hunter2"),
    ('{"password": 47114711}', "47114711"),
    ("aws_access_key_id AKIAIOSFODNN7EXAMPLE", "AKIAIOSFODNN7EXAMPLE"),
    ("temporary ASIAIOSFODNN7EXAMPLE", "ASIAIOSFODNN7EXAMPLE"),
    ("aws_secret_access_key = wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY", "wJalrXUtnFEMI"),
    ("remote: ghp_16C7e42F292c6912E7710c838347Ae178B4a", "16C7e42F292c6912E7710c838347Ae178B4a"),
    ("github_pat_11ABCDEFG0123456789_abcdefghijklmnop", "11ABCDEFG0123456789"),
    ("slack xoxb-123456789012-1234567890123-AbCdEf", "1234567890123"),
    ("slack xapp-1-A0123456789-0123456789", "A0123456789"),
    (
        "jwt eyJhbGciOiJIUzI1NiIsInR5cCI6IkpXVCJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmN",
        "eyJzdWIiOiIxMjM0NTY3ODkwIn0",
    ),
    (f"-----BEGIN PRIVATE KEY-----\n{KEY_BODY}\n-----END PRIVATE KEY-----", KEY_BODY),
    (f"cut: -----BEGIN RSA PRIVATE KEY-----\n{KEY_BODY}\n", KEY_BODY),
    (f"what we know: {TOKEN}", TOKEN),
    (f"and know: {PASSWORD}", PASSWORD),
]
IDS = [text.split("\n")[0][:30] for text, _ in SECRETS]
HARMLESS = [
    "sent 12 entries, seq 5 to 16, in 31 ms",
    "uploaded recording 17 (3.8 MB) in 4.1 s",
    "https://voice.example.com:8443/storage/recordings/8a3e/mixed.wav",
    "postgresql:///voicebot",
    "a84b4c@192.0.2.7 has no usable meta.json",
    "outage since 60 s, next try in 12 s: the frontend cannot be reached",
    "8HnT2kQ-a3x9.. is not there",
]


@pytest.fixture
def known() -> Iterator[None]:
    """The agent's own secrets, as its configuration made them known."""
    before, level = serversync.KNOWN[:], serversync.log.level
    url = f"postgresql://voicebot:{PASSWORD.replace(' ', '%20')}@db/voicebot"
    settings = {"DATABASE_URL": url, "FRONTEND_BASE_URL": "http://h", "SYNC_TOKEN": TOKEN}
    serversync.configure_logging(load_config(settings))
    yield
    serversync.KNOWN[:] = before
    serversync.log.setLevel(level)


Sent = list[tuple[str, dict[str, Any]]]


@pytest.fixture
def sent(known: None) -> Iterator[Sent]:
    """What the agent's own filter lets through to the journal handler's sender."""
    collected: Sent = []

    def sender(MESSAGE: str, **fields: Any) -> None:  # as systemd's own: fields hold a `message`
        collected.append((MESSAGE, fields))

    handler = journal.JournalHandler(sender_function=sender, SYSLOG_IDENTIFIER="serversync")
    handler.addFilter(serversync.cleaned)
    level = serversync.log.level
    serversync.log.addHandler(handler)
    serversync.log.setLevel(logging.DEBUG)
    yield collected
    serversync.log.removeHandler(handler)
    serversync.log.setLevel(level)


def leaks(sent: Sent, secret: str) -> list[str]:
    """Where a secret is in what was sent."""
    found = []
    for message, fields in sent:
        everything = {"MESSAGE": message} | fields
        found += [key for key, value in everything.items() if secret in str(value)]
        found += [f"repr {key}" for key, value in everything.items() if secret in repr(value)]
    return found


# --- masking --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "secret"), SECRETS, ids=IDS)
def test_a_secret_is_masked_in_a_message_its_arguments_its_fields_and_its_exception(
    sent: Sent, text: str, secret: str
) -> None:
    log = serversync.log
    log.warning(f"as a message: {text}")
    log.warning("as an argument: %s", text)
    log.warning("as an argument's repr: %r", {"error": text})
    log.warning("as a named argument: %(text)s", {"text": text})
    say(logging.WARNING, "event", f"as a sentence: {text}")
    say(logging.WARNING, "event", "as fields", ERROR_CODE=text, CALL_ID=text, ANYTHING_ELSE=text)
    try:
        try:
            raise ValueError(text)
        except ValueError as error:
            raise RuntimeError(f"because of {text}") from error
    except RuntimeError:
        log.exception("as an exception: %s", text)
    assert len(sent) == 7
    assert leaks(sent, secret) == []
    assert not any({"CODE_ARGS", "EXCEPTION_INFO"} & {*fields} for _, fields in sent)
    assert all("***" in message + str(fields) for message, fields in sent)
    exception = sent[-1][1]["EXCEPTION_TEXT"]
    assert "ValueError" in exception
    if not text.startswith("cut: "):  # a key without an end, or what nests, hides all behind
        assert "RuntimeError: because of" in exception


@pytest.mark.parametrize("text", HARMLESS)
def test_what_is_no_secret_stays_readable(sent: Sent, text: str) -> None:
    say(logging.INFO, "event", text)
    assert sent[0][0] == mask(text) == clean(text) == text


def test_the_reasons_of_the_verdicts_stay_readable() -> None:
    answers = [Answer(status) for status in range(100, 600)]
    answers += [Answer(408, steady=True), *(Answer(trouble=trouble) for trouble in Trouble)]
    reasons = {classify(answer).reason for answer in answers}
    assert {mask(reason) for reason in reasons} == reasons


@pytest.mark.usefixtures("known")
def test_the_words_around_a_secret_stay_readable() -> None:
    text = "request to https://u:hunter2@h/x failed: Bearer abc123, password=hunter2, then more"
    masked = mask(text)
    for words in ("request to https://u:", "@h/x failed: Bearer ", "password=", ", then more"):
        assert words in masked
    assert mask('{"token": ["is, a"], "seq": 5}') == '{"token": ***, "seq": 5}'


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize("order", [*itertools.permutations(["abcd", "abcd-efgh-ijkl", "cd-ef"], 2)])
def test_known_secrets_that_contain_each_other_are_masked_in_any_order(
    order: tuple[str, ...],
) -> None:
    settings = {"DATABASE_URL": f"postgresql://u:{order[0]}@h/d", "SYNC_TOKEN": order[1]}
    config = load_config(settings | {"FRONTEND_BASE_URL": "http://h"})
    serversync.configure_logging(config)
    assert mask(f"it is {max(order, key=len)}") == "it is ***"


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize("form", ["{}", "Authorization: Token {} x", "postgresql://u:{}@h/d"])
@given(st.sampled_from([400, 1024, 4096]), st.integers(-5, 80))
def test_a_secret_at_the_place_where_a_text_is_cut_does_not_leave_in_part(
    form: str, cut: int, back: int
) -> None:
    serversync.KNOWN[:] = [TOKEN] if form == "{}" else []
    for before in ("", "password="):  # all of that becomes three stars
        text = before + "x" * (cut - back - 30) + " " + form.format(TOKEN) + " y" * 500
        for limit in (100, 400, 1024, 4096, 1 << 20):
            assert TOKEN[:6] not in clean(text, limit)


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize("write", [json.dumps, repr, lambda text: text.replace("/", "\\/"), quote])
def test_a_known_secret_is_masked_however_it_is_written(write: Callable[[str], str]) -> None:
    for secret in (TOKEN, PASSWORD):
        masked = clean(f"we got {write(secret)} from you")
        assert masked.replace("'", "").replace('"', "") == "we got *** from you"


HOSTILE = [
    *("://", "://a:", "://a:b@", "eyJaaaaaaaa-", "eyJaaaaaaaa.", "bearer ", "bearer", "token ="),
    *(
        "authorization: a b=c, ",
        "-----BEGIN A",
        "-----END A",
        'password="',
        "token=\\",
        "\\\\",
        "''",
    ),
    *("token=[", 'secret={"a', "pwd=['a', ", 'token=[""', "token={}"),
    *("sk-", "AKIA", '<p class="x">a = b</p>\n', 'token=\\"\\\\\\"'),
]


@pytest.mark.parametrize("before", ["", "authorization: a ", 'password="', "-----BEGIN A-----"])
def test_a_long_text_is_cleaned_in_moments_whatever_it_is_made_of(before: str) -> None:
    for piece in HOSTILE:
        text = before + piece * (5 * serversync.ANSWER_MAX // len(piece))
        began = time.process_time()
        clean(text)
        assert time.process_time() - began < 1.5, piece  # what is quadratic takes minutes


@pytest.mark.usefixtures("known")
@given(st.text(max_size=200), st.sampled_from(SECRETS), st.text(max_size=200))
def test_masking_twice_changes_nothing_more(
    before: str, secret: tuple[str, str], after: str
) -> None:
    once = mask(f"{before} {secret[0]} {after}")
    assert mask(once) == once
    assert secret[1] not in once or secret[1] in before + after


# --- text from outside ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("", ""),
        ("日本語 é", "日本語 é"),
        ("a\0b\0", "a b "),
        ("a\ud800b\udfffc", "a?b?c"),
        ("a\u061cb\u200ec\u200fd\u202ae\u202ef\u2066g\u2069h", "a b c d e f g h"),
        ("x" * 5000, "x" * 1024),
        ("話" * 5000, "話" * 1024),
    ],
    ids=lambda text: ascii(text)[:20],
)
def test_text_from_outside_is_cleaned_and_cut(text: str, cleaned: str) -> None:
    assert clean(text) == cleaned


@given(st.text(st.characters(), max_size=3000), st.integers(1, 2000))
def test_any_text_is_fit_for_sql_and_the_journal(text: str, limit: int) -> None:
    cleaned = clean(text, limit)
    assert "\0" not in cleaned
    assert len(cleaned) <= limit
    cleaned.encode()


def test_a_message_with_everything_bad_in_it_reaches_the_journal_short_and_clean(
    sent: Sent,
) -> None:
    serversync.log.error("%s", "a\0\ud800" + "x" * 100_000, extra={"ERROR_CODE": "y\0" * 90_000})
    ((message, fields),) = sent
    message.encode()
    assert len(message) <= 4096
    assert "\0" not in message
    assert len(fields["ERROR_CODE"]) <= 1024


# --- the agent's own messages ---------------------------------------------------------------------

# Runs the program with the journal handler's documented parameter, and writes down what it sends.
WRITE_DOWN = """
import functools, importlib, json, os, sys, types
directory, name = os.path.split(sys.argv.pop(1))
sys.path.insert(0, directory)
serversync = importlib.import_module(name.removesuffix(".py"))
out = open(sys.argv.pop(1), "a", encoding="utf-8")
def sender(MESSAGE, **fields):
    print(json.dumps({"MESSAGE": MESSAGE} | fields, default=repr), file=out, flush=True)
handler = functools.partial(serversync.journal.JournalHandler, sender_function=sender)
serversync.journal = types.SimpleNamespace(JournalHandler=handler)
sys.exit(serversync.main(sys.argv[1:]))
"""


FIELDS = {"ENTITY_TYPE", "CALL_ID", "ERROR_CODE", "HTTP_STATUS", "ATTEMPT", "STATUS_FROM"}
FIELDS |= {"STATUS_TO", "IDEMPOTENCY_KEY", "DURATION_MS"}


class JournalRun:
    """One command with a real stream socket as its standard error."""

    def __init__(self, env: dict[str, str], directory: Path, stream: str | None = None) -> None:
        """`stream`: JOURNAL_STREAM instead of the socket's own."""
        path, program = directory / "sent", str(REPOSITORY / PROGRAM)
        path.touch()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        plain: list[bytes] = []
        with ours, theirs:
            status = os.fstat(theirs.fileno())
            own = f"{status.st_dev}:{status.st_ino}"
            process = subprocess.Popen(
                [str(REPOSITORY / PYTHON), "-c", WRITE_DOWN, program, str(path), "once"],
                env={"PATH": os.environ["PATH"], "JOURNAL_STREAM": stream or own} | env,
                cwd=REPOSITORY,
                stdin=subprocess.DEVNULL,
                stderr=theirs.fileno(),
            )
            theirs.close()
            reader = threading.Thread(
                target=lambda: plain.extend(iter(lambda: ours.recv(9999), b""))
            )
            reader.start()
            self.returncode = process.wait(60)
            reader.join(20)
        self.plain = b"".join(plain).decode()
        self.sent: list[dict[str, Any]] = [
            json.loads(line) for line in path.read_text().splitlines()
        ]

    def event(self, name: str) -> dict[str, Any]:
        (found,) = (fields for fields in self.sent if fields.get("EVENT") == name)
        return found


def test_the_agents_messages_reach_the_journal_with_their_fields(pi: Pi, tmp_path: Path) -> None:
    call = pi.backend.end_call(events=1)
    bad = pi.poisoned(Reply(400, body={"error": f"entries[0]: Bearer {TOKEN}"}))
    done = JournalRun(pi.agent.env(SYNC_TOKEN=TOKEN), tmp_path)
    assert done.returncode == 1
    assert done.plain == ""
    for fields in done.sent:
        assert TOKEN not in json.dumps(fields)
        assert fields["SYSLOG_IDENTIFIER"] == "serversync"
        assert all(isinstance(fields[key], str) for key in {"EVENT", "SEQ", *FIELDS} & set(fields))
        assert "None" not in fields.values()
    dead = done.event("entry_dead")
    assert dead["SEQ"] == str(bad)
    assert (dead["ENTITY_TYPE"], dead["ERROR_CODE"]) == ("schedule", "BAD_REQUEST")
    assert (dead["HTTP_STATUS"], dead["ATTEMPT"]) == ("400", "0")
    assert (dead["STATUS_FROM"], dead["STATUS_TO"]) == ("sending", "dead")
    assert "Bearer ***" in dead["MESSAGE"]
    batches = [fields for fields in done.sent if fields.get("EVENT") == "entries_sent"]
    assert batches[0]["SEQ"] == str(call.seqs[0])
    assert {int(fields["SEQ_LAST"]) for fields in batches} & set(call.seqs)
    for fields in batches:
        assert re.fullmatch(r"[0-9a-f]{64}", fields["IDEMPOTENCY_KEY"])
        assert fields["DURATION_MS"].isdigit()
        assert (fields["STATUS_FROM"], fields["STATUS_TO"]) == ("queued", "sent")
    upload = done.event("file_uploaded")
    assert upload["SEQ"] == str(call.seq("recording_file"))
    assert (upload["ENTITY_TYPE"], upload["CALL_ID"]) == ("recording_file", call.call_id)
    assert upload["HTTP_STATUS"] == "200"
    assert upload["DURATION_MS"].isdigit()


def test_a_journal_stream_that_is_not_standard_error_means_plain_lines(
    pi: Pi, tmp_path: Path
) -> None:
    pi.backend.enqueue()
    done = JournalRun(pi.agent.env(), tmp_path, "1:1")
    assert (done.returncode, done.sent) == (0, [])
    assert re.search(r"(?m)^sent 1 entry, seq \d+, in \d+ ms$", done.plain)


@pytest.mark.parametrize(("level", "warned"), [("warning", True), ("error", False)])
def test_the_log_level_is_the_least_that_is_shown(pi: Pi, level: str, warned: bool) -> None:
    pi.backend.enqueue()
    poisoned = pi.poisoned(Reply(400, body={"error": "no"}))
    shown = pi.once(code=1, SYNC_LOG_LEVEL=level).stderr
    assert "sent 1 entry" not in shown
    assert (f"entry {poisoned} (schedule) given up" in shown) == warned


# --- repeats --------------------------------------------------------------------------------------

Clock = Callable[[float], None]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Moves the monotonic clock of the module; nothing else is made up."""
    now = [1000.0]

    def move(seconds: float) -> None:
        now[0] += seconds

    fake = SimpleNamespace(monotonic=lambda: now[0], time=lambda: now[0] + 1.79e9)
    monkeypatch.setattr(serversync, "time", fake)
    return move


def complain(repeats: Repeats, key: str = "refused", topic: str = "entries") -> None:
    repeats.say(topic, key, logging.WARNING, "outage", f"outage: {key}", ERROR_CODE=key)


def test_what_only_repeats_is_said_once_a_minute_with_a_count(sent: Sent, clock: Clock) -> None:
    """Each topic for itself."""
    repeats = Repeats()
    for _ in range(185):  # once a second, for three minutes and a bit
        for topic in ("entries", "files"):
            complain(repeats, topic=topic)
        clock(1)
    messages = [message for message, _ in sent]
    assert messages[:2] == ["outage: refused"] * 2
    assert len(messages) == 2 * 4
    for message in messages[2:]:
        counted = re.fullmatch(r"outage: refused \((\d+) times since\)", message)
        assert counted
        assert int(counted[1]) in (59, 60, 61)
    assert all(fields["ERROR_CODE"] == "refused" for _, fields in sent)


def test_a_change_and_what_repeats_after_more_than_a_minute_is_said_at_once_without_a_count(
    sent: Sent, clock: Clock
) -> None:
    repeats = Repeats()
    for key, pause in (("refused", 1), ("refused", 1), ("timeout", 61), ("timeout", 1),
                       ("timeout", 1), ("refused", 1)):  # fmt: skip
        complain(repeats, key)
        clock(pause)
    said = ["refused", "timeout", "timeout", "refused"]
    assert [message for message, _ in sent] == [f"outage: {key}" for key in said]


@pytest.mark.usefixtures("clock")
def test_what_is_over_is_known_once_and_said_again_when_it_comes_back(sent: Sent) -> None:
    repeats = Repeats()
    assert not repeats.over("entries")
    complain(repeats)
    assert repeats.over("entries")
    assert not repeats.over("entries")
    complain(repeats)
    assert len(sent) == 2
    for number in range(5000):  # any number of topics costs no memory
        complain(repeats, topic=f"deletion {number}")
    assert len(repeats._said) <= 300


def test_an_outage_is_one_line_and_then_recovered_after_so_long(pi: Pi) -> None:
    pi.frontend.stop()
    pi.backend.enqueue()
    running = pi.agent()
    running.wait_log("outage, nothing is lost")
    pi.frontend.start()
    line = running.wait_log("recovered after")
    assert re.search(r"entries: recovered after \d+ s \(NETWORK_ERROR\)", line)
    running.stop()
    assert pi.db.pending() == []
    assert len(running.lines("outage, nothing is lost")) == 1
    assert len(running.lines("recovered after")) == 1


def test_the_state_file_is_in_the_first_directory_that_systemd_names(tmp_path: Path) -> None:
    state = serversync.StateFile({"RUNTIME_DIRECTORY": f"{tmp_path}:/nonexistent"})
    state.write(sentence="日本語")
    assert json.loads((tmp_path / "state.json").read_text())["sentence"] == "日本語"
    assert [path.name for path in tmp_path.iterdir()] == ["state.json"]

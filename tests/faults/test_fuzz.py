"""Bad input, by the thousand: answers of the frontend, and what stands in the outbox and on disk.

Whatever comes: never a crash, never a hang, never more than 64 KiB of an answer in memory, never a
false "sent".
"""

from __future__ import annotations

import gzip
import http.client
import io
import json
import os
import re
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import serversync
from agent import AgentFactory
from backend import Backend
from chance import examples
from frontend import Frontend
from ledger import dead, let_hours_pass, uploads, waiting
from pg import Database
from raw import Raw, RawServer
from serversync import Answer, Fate, Trouble, Verdict
from waiting import wait_until

T = TypeVar("T")

TIMEOUT = 0.5
KEY = "a key"
URL = "https://voice.example.com/storage/recordings/x/mixed.wav"
OK = b"HTTP/1.1 200 OK\r\n"
NOWHERE = b"HTTP/1.1 404 Not Found\r\n"
DOORS: dict[str, dict[str, Any]] = {"entries": {"ok": True}, "files": {"fileUrl": URL}}
# A bug of ours shows itself by one of these.
CRASHES = ("Traceback", "a cycle failed", "a bug:")

many = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


def drawn(strategy: st.SearchStrategy[T], number: int) -> list[T]:
    """So many of them at once, for one run of the agent: that of the usual length."""
    found: list[T] = []

    @settings(many, max_examples=number, phases=[Phase.generate])
    @given(strategy)
    def take(example: T) -> None:
        found.append(example)

    take()
    return found


# --------------------------------------------------------------------------------------------------
# Answers
# --------------------------------------------------------------------------------------------------

LONE: Any = ("Cs",)
plain = st.text(st.characters(blacklist_categories=LONE, blacklist_characters="\0"), max_size=30)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | plain,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(plain, inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
header_values = st.text(st.characters(max_codepoint=255, blacklist_characters="\r\n"), max_size=40)
headers = st.lists(st.tuples(st.from_regex(r"X-[A-Za-z-]{1,10}", fullmatch=True), header_values),
                   max_size=4)  # fmt: skip


def head(status: object = 200, fields: list[tuple[str, str]] | None = None) -> bytes:
    lines = [f"HTTP/1.1 {status} Whatever", *(f"{name}: {value}" for name, value in fields or [])]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n"


def with_length(top: bytes, body: bytes, length: object = None) -> bytes:
    shown = len(body) if length is None else length
    return top + f"Content-Length: {shown}\r\n\r\n".encode() + body


def until_end(top: bytes, body: bytes) -> bytes:
    return top + b"Connection: close\r\n\r\n" + body


def in_chunks(top: bytes, body: bytes, pieces: int = 1, extension: str = "") -> bytes:
    step = max(1, -(-len(body) // pieces))
    parts = [body[at : at + step] for at in range(0, len(body), step)]
    chunks = [f"{len(part):x}{extension}\r\n".encode() + part + b"\r\n" for part in parts]
    return top + b"Transfer-Encoding: chunked\r\n\r\n" + b"".join(chunks) + b"0\r\n\r\n"


INTERIM = [
    b"HTTP/1.1 100 Continue\r\n\r\n",
    b"HTTP/1.1 103 Early Hints\r\nLink: </x>; rel=preload\r\n\r\n",
]
RESERVED = ("ok", "fileUrl", "rejected", "sizeBytes", "sha256")


@st.composite
def good_bodies(draw: st.DrawFn, words: dict[str, Any]) -> bytes:
    """The contract's words, as any JSON library may write them, with more than we know."""
    extra = draw(st.dictionaries(plain, json_values, max_size=3))
    document = {k: v for k, v in extra.items() if k not in RESERVED} | words
    if draw(st.booleans()):
        document = dict(reversed(document.items()))
    text = json.dumps(
        document, ensure_ascii=draw(st.booleans()), indent=draw(st.sampled_from([None, 2]))
    )
    return draw(st.sampled_from(["", " ", "\r\n\t"])).encode() + text.encode()


@st.composite
def good_answers(draw: st.DrawFn, words: dict[str, Any]) -> bytes:
    """In all the ways that HTTP has for it."""
    before = draw(st.sampled_from([0, 0, 0, 1, 20])) * draw(st.sampled_from(INTERIM))
    top = before + head(draw(st.sampled_from([200, 200, 201, 202, 299])), draw(headers))
    body = draw(good_bodies(words))
    framing = draw(st.sampled_from(["length", "end", "chunks"]))
    if framing == "length":
        return with_length(top, body)
    if framing == "end":
        return until_end(top, body)
    return in_chunks(
        top, body, draw(st.integers(1, 7)), draw(st.sampled_from(["", ";a=b", ' ;a="b;"']))
    )


def bad_documents(words: dict[str, Any]) -> list[bytes]:
    """What looks like a yes, and is none."""
    (name,) = words
    yes = json.dumps(words).encode()
    wrong: list[object] = [1, "true", None, False, [True], {"ok": True}, "", 0, "yes", "/relative"]
    wrong += ["ftp://x/y", "http://", "https:///x", "https://h\0st/", "https://h/\r\nX: y", "http"]
    documents: list[object] = [{name: value} for value in wrong]
    documents += [[words], {"data": words}, "ok", 200, True, None, {}, []]
    not_true: list[Any] = [False, "true", 1, None]
    documents += [words | {"ok": value} for value in not_true]
    rejected: list[object] = ["x", 1, {}, [1], [{}], [{"seq": 2}], [{"seq": "1"}], [{"seq": True}]]
    rejected += [[{"seq": 1}, {"seq": 1}], [None]]
    not_ten: list[Any] = [0, 3, "10", [], 1e9]
    documents += [words | {"sizeBytes": value} for value in not_ten]
    if name == "ok":
        documents = [d for d in documents if d != words and not _sized(d)]
        documents += [words | {"rejected": value} for value in rejected]
    texts = [json.dumps(document).encode() for document in documents]
    cut = [yes[:-1], yes[1:], yes + b"x", yes + yes, b"\0" + yes, yes + b"\0", yes[:4] + b"\0"]
    pages = [b"", b" ", b"<html>ok</html>", b"ok: true", yes.replace(b'"', b"'"), b"\xff" + yes]
    deep = [b"[" * 50_000, b'{"ok":' * 9_000 + b"true", yes[:-1] + b',"n":' + b"[" * 50_000]
    coded = [gzip.compress(yes), gzip.compress(b" " * 1_000_000 + yes)]
    return [*texts, *cut, *pages, *deep, *coded, yes.decode().encode("utf-16-le")[1:]]


def _sized(document: object) -> bool:
    return isinstance(document, dict) and "sizeBytes" in document


def bad_answers(words: dict[str, Any], calm: bool = False) -> st.SearchStrategy[bytes]:
    """Everything but the contract's words. `calm`: nothing that asks for a pause of all traffic."""
    return odd_answers(words, calm).filter(lambda raw: not says_yes(raw, words))


@st.composite
def odd_answers(draw: st.DrawFn, words: dict[str, Any], calm: bool) -> bytes:
    body = draw(good_bodies(words))
    top = head(200, draw(headers))
    kind = draw(st.sampled_from(["status", "line", "document", "length", "chunks", "coded", "any"]))
    if kind == "status":
        status = draw(st.integers(101, 199) | st.integers(300, 999).filter(lambda n: n != 409))
        if calm and status == 429:
            status = 430
        more = [("Retry-After", draw(header_values | st.sampled_from(RETRY_AFTER)))]
        return with_length(head(status, draw(headers) + more), body)
    if kind == "line":
        return draw(st.sampled_from(STATUS_LINES)) + b"\r\n" + with_length(b"", body)
    if kind == "document":
        text = draw(st.sampled_from(bad_documents(words)))
        framing = draw(st.sampled_from([with_length, until_end, in_chunks]))
        return framing(top, text)
    if kind == "length":
        shorter = st.integers(0, max(0, len(body) - 1))
        longer = st.integers(len(body) + 1, 10**12)
        return with_length(top, body, draw(shorter | longer))
    if kind == "chunks":
        size = draw(st.sampled_from(CHUNK_SIZES))
        chunk = size + b"\r\n" + body + b"\r\n0\r\n\r\n"
        return top + b"Transfer-Encoding: chunked\r\n\r\n" + chunk
    if kind == "coded":
        code = draw(st.sampled_from(["gzip", "x-gzip", "deflate", "br", "gzip, gzip"]))
        return with_length(head(200, [("Content-Encoding", code)]), BOMB + gzip.compress(body))
    return draw(st.binary(max_size=300))


class _Wire:
    """As much of a socket as http.client reads an answer from."""

    def __init__(self, raw: bytes) -> None:
        self._raw = raw

    def makefile(self, _: str) -> io.BytesIO:
        return io.BytesIO(self._raw)


def says_yes(raw: bytes, words: dict[str, Any]) -> bool:
    """Whether it is a good answer after all, by chance (0x1e5 is the size of 485 bytes)."""
    try:
        answer = http.client.HTTPResponse(_Wire(raw))  # type: ignore[arg-type]
        answer.begin()
        document = json.loads(answer.read())
        document = document if isinstance(document, dict) else {}
    except (http.client.HTTPException, ValueError, OverflowError, RecursionError):
        return False
    if answer.status // 100 != 2 or answer.getheader("Content-Encoding"):
        return False
    said = {name: document[name] for name in RESERVED if name in document}
    return json.dumps(said) == json.dumps(words)


BOMB = gzip.compress(b" " * 50_000_000)  # what follows it unpacks to the same text
STATUS_LINES = [
    b"", b"\0", b"HTTP", b"HTTP/1.1", b"HTTP/1.1 ", b"HTTP/1.1 2", b"HTTP/1.1 abc OK", b"200 OK",
    b"HTTP/2 200 OK", b"HTTP/3.0 200 OK", b"ICY 200 OK", b"HTTP/1.1 -200 OK",
    b"HTTP/1.1 2000 OK", b"HTTP/1.1 200OK", b"\0HTTP/1.1 200 OK",
    b"\xff\xfe", b"SSH-2.0-OpenSSH_9.2", b"220 mail ESMTP", b"\x15\x03\x01\x00\x02\x02\x50",
    b"HTTP/1.1 \xb2\xb2\xb2 OK", b"HTTP/1.1 1e2 OK", b"HTTP/1.1 0x200 OK", b"HTTP/1.1 20",
    b"H" * 70_000, b'{"ok": true}', b"HTTP/1.1 " + b"2" * 5000,
]  # fmt: skip
CHUNK_SIZES = [
    b"-1", b"-5", b"-ffffffff", b"zz", b"", b" ", b"\0", b"ffffffffffff", b"f" * 5000, b"1e5",
    b";", b"0xZ", b"7fffffffffffffff", b"a" * 70_000, b"\xb2",
]  # fmt: skip
RETRY_AFTER = [
    "0", "-1", "1", "9" * 400, "1e9", "Wed, 21 Oct 2015 07:28:00 GMT", "Fri, 31 Dec 9999 23:59:59",
    "Mon, 99 Foo 99999 99:99:99 +9999", "Thu, 01 Jan 0000 00:00:00 GMT", "now", "", ", , ,", "12:",
    "Wed, 21 Oct 2015 07:28:00 -99999999", "\xb2", "3 3", "NaN", "Infinity", "1" * 30_000,
]  # fmt: skip


@st.composite
def spoilt_answers(draw: st.DrawFn, words: dict[str, Any]) -> bytes:
    """A good one with a few bytes changed, left out, put in, or cut off."""
    framing = draw(st.sampled_from([with_length, until_end, in_chunks]))
    raw = bytearray(framing(head(200, draw(headers)), json.dumps(words).encode()))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(raw) - 1)))
        how = draw(st.sampled_from(["change", "drop", "insert", "cut", "double"]))
        if how == "change":
            raw[at : at + 1] = draw(st.binary(min_size=1, max_size=1))
        elif how == "drop":
            del raw[at : at + draw(st.integers(1, 9))]
        elif how == "insert":
            raw[at:at] = draw(st.binary(min_size=1, max_size=9))
        elif how == "cut":
            del raw[at:]
        else:
            raw[at:at] = raw[at : at + draw(st.integers(1, 60))]
    return bytes(raw)


def may_count(raw: bytes, words: dict[str, Any]) -> bool:
    """Whether somebody lenient could still read a yes in it."""
    line = re.search(rb"HTTP/1[^\r\n]*?\D(2\d\d|409)\D", raw + b"\n")
    (name, value) = next(iter(words.items()))
    said = json.dumps(name).encode() in raw
    return bool(line) and said and (b"true" in raw if value is True else b"http" in raw)


class Client:
    """The product's own HTTP adapter, in this process, before a server that says anything."""

    def __init__(self, directory: Path) -> None:
        self.next: list[Raw] = []
        self.server = RawServer(lambda head, body: self.next.pop(0))
        keys = {
            "DATABASE_URL": "postgresql:///nowhere",
            "FRONTEND_BASE_URL": self.server.url,
            "SYNC_TIMEOUT_SEC": str(TIMEOUT),
        }
        self.process = serversync.Process({})
        self.process.install()
        self.frontend = serversync.Frontend(serversync.load_config(keys), self.process)
        audio = directory / "mixed.wav"
        audio.write_bytes(b"0123456789")
        self.fd = os.open(audio, os.O_RDONLY)
        self.folder = os.open(directory, os.O_RDONLY)
        self.ready = serversync.Ready(self.fd, "call", audio.name, 10, [], self.folder, b"{}", KEY)
        self.entry = serversync.FileEntry(
            1, str(uuid.uuid4()), str(uuid.uuid4()), None, None,
            0, 0.0, False, False, None, False,
        )  # fmt: skip

    def send(self, door: str, raw: Raw, *more: Raw) -> tuple[Verdict, Answer]:
        """One request, and how this answer is understood (`more`: for what is tried again)."""
        self.next[:] = [raw, *more, Raw(b""), Raw(b"")]
        if door == "entries":
            answer = serversync.drive(
                self.frontend.entries.post("/", b"{}", KEY, 60.0), self.process
            )
            return serversync.confirm_entries(answer, KEY, [1], time.time())[0], answer
        steps = self.frontend.upload(self.entry, self.ready, 0.0)
        answer = serversync.drive(steps, self.process)
        return serversync.confirm_upload(answer, KEY, 10, time.time())[0], answer

    def close(self) -> None:
        self.frontend.entries.close()
        self.server.close()
        os.close(self.fd)
        os.close(self.folder)


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    """Its deadlines use this process's own timer: such tests need `thread` as pytest's time-out."""
    signals = (signal.SIGALRM, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in signals}
    made = Client(tmp_path)
    yield made
    made.close()
    signal.set_wakeup_fd(-1)
    for number, handler in before.items():
        signal.signal(number, handler)


own_timer = pytest.mark.timeout(examples(300), method="thread")
each_door = pytest.mark.parametrize("door", DOORS)


def check_verdict(verdict: Verdict) -> None:
    """Whatever it is, it can be recorded."""
    assert verdict.code or verdict.fate is Fate.SENT
    assert verdict.retry_after is None or 0 <= verdict.retry_after <= 3600
    assert verdict.status is None or 100 <= verdict.status <= 999
    assert len(serversync.clean(verdict.reason)) <= 1024


@own_timer
@each_door
def test_an_answer_in_the_contracts_words_counts_in_whatever_way_http_carries_it(
    client: Client, door: str
) -> None:
    @settings(many, max_examples=examples(250))
    @given(good_answers(DOORS[door]), st.sampled_from(["close", "keep"]))
    def check(raw: bytes, after: str) -> None:
        ends = b"\r\nConnection: close" in raw
        verdict, answer = client.send(door, Raw(raw, "close" if ends else after))
        assert verdict.fate is Fate.SENT, (verdict, answer)

    check()


@own_timer
@each_door
def test_an_answer_in_other_words_never_counts(client: Client, door: str) -> None:
    @settings(many, max_examples=examples(1200))
    @given(bad_answers(DOORS[door]), st.sampled_from(["close", "close", "reset"]))
    def check(raw: bytes, after: str) -> None:
        verdict, answer = client.send(door, Raw(raw, after))
        assert verdict.fate is not Fate.SENT, answer
        check_verdict(verdict)
        assert len(answer.body) <= 64 * 1024 + 1

    check()


@own_timer
@each_door
def test_an_answer_that_was_spoilt_on_its_way_counts_only_while_it_still_says_so(
    client: Client, door: str
) -> None:
    words = DOORS[door]

    @settings(many, max_examples=examples(500))
    @given(spoilt_answers(words))
    def check(raw: bytes) -> None:
        verdict, answer = client.send(door, Raw(raw))
        check_verdict(verdict)
        if verdict.fate is Fate.SENT:
            assert may_count(raw, words), answer

    check()


PARTS = [b"", b"HTTP", OK, OK + b"Content-Length: 50\r\n\r\n" + b'{"ok": true}',
         OK + b"Transfer-Encoding: chunked\r\n\r\nc\r\n" + b'{"ok": true}\r\n']  # fmt: skip


@own_timer
@pytest.mark.parametrize("part", PARTS, ids=range(len(PARTS)))
def test_an_answer_that_never_ends_is_a_time_out(client: Client, part: bytes) -> None:
    started = time.monotonic()
    verdict, answer = client.send("entries", Raw(part, "hold"))
    assert answer.trouble is Trouble.TIMEOUT, answer
    assert verdict.code == "NETWORK_TIMEOUT"
    assert time.monotonic() - started < 2 * TIMEOUT + 5


def drip(first: bytes) -> Iterator[bytes]:
    """An answer that looks whole, and goes on with a space at a time."""
    yield first
    for _ in range(1000):
        time.sleep(0.05)
        yield b" "


@own_timer
@pytest.mark.parametrize(
    "first",
    [
        until_end(OK, b'{"ok": true}'),
        in_chunks(OK, b'{"ok": true}').removesuffix(b"\r\n") + b"X-Trailer: ",
        with_length(OK, b'{"ok": true}', 5000),
    ],
    ids=["without_length", "in_its_trailers", "with_length"],
)
def test_an_answer_that_the_deadline_cut_off_does_not_count(client: Client, first: bytes) -> None:
    verdict, answer = client.send("entries", Raw(drip(first)))
    assert verdict.fate is not Fate.SENT, answer


@own_timer
def test_an_answer_that_is_cut_at_64_kib_does_not_count(client: Client) -> None:
    body = b'{"ok": true}' + b" " * 70_000
    for tail in (b"", b"<html>not at all</html>"):
        verdict, answer = client.send("entries", Raw(with_length(OK, body + tail)))
        assert verdict.fate is not Fate.SENT, answer.detail


@own_timer
@each_door
@pytest.mark.parametrize(
    "first",
    [
        with_length(head(500), b"{}"),
        with_length(head(503), b""),
        with_length(head(204), b""),
        head(304) + b"\r\n",
        with_length(OK, b"no"),
        in_chunks(OK, b"no"),
    ],
    ids=["500", "503", "204", "304", "no", "no_in_chunks"],
)
def test_a_second_answer_sent_along_is_never_taken_for_that_to_the_next_request(
    client: Client, door: str, first: bytes
) -> None:
    yes = with_length(OK, json.dumps(DOORS[door]).encode())
    understood_one, whole = threading.Event(), threading.Event()

    def in_two() -> Iterator[bytes]:
        yield first
        understood_one.wait(20)
        yield yes
        whole.set()  # what was sent on the loopback device has arrived

    for answer in (first + yes, in_two()):
        verdict, _ = client.send(door, Raw(answer, "keep"))
        assert verdict.fate is not Fate.SENT
        if not isinstance(answer, bytes):
            understood_one.set()
            assert door == "files" or whole.wait(20)  # a file's connection was reset by now
        verdict, understood = client.send(door, Raw(with_length(head(500), b"{}"), "keep"))
        assert verdict.fate is not Fate.SENT, (first, understood)
    # One that comes in the middle of the next request cannot be told from its own.
    assert door == "entries" or client.server.connections == 4


# --------------------------------------------------------------------------------------------------
# The same through the real agent
# --------------------------------------------------------------------------------------------------


class Alternating:
    """Answers an entry or a recording by its number: odd ones well, even ones by a bad answer."""

    def __init__(self, answers: list[bytes | Callable[[], Iterator[bytes]]]) -> None:
        self.answers = answers
        self.bad: dict[str, int] = {}  # which answer an entry or a recording gets

    def __call__(self, head: bytes, body: bytes) -> Raw:
        if body == b'{"entries":[]}':
            return Raw(with_length(OK, b'{"ok": true}'), "keep")
        if head.startswith(b"HEAD"):
            return Raw(with_length(NOWHERE, b""), "keep")
        if b"/recording-file" in head:
            match = re.search(rb'name="recordingId".*?\r\n\r\n([0-9a-f-]{36})\r\n', body, re.S)
            words: dict[str, Any] = DOORS["files"]
        else:
            match = re.search(rb'"entityId":"([0-9a-f-]{36})"', body)
            words = DOORS["entries"]
        assert match
        number = self.bad.get(match[1].decode())
        if number is None:
            return Raw(with_length(OK, json.dumps(words).encode()), "keep")
        answer = self.answers[number]
        return Raw(answer if isinstance(answer, bytes) else answer())

    def entity(self, number: int) -> str:
        """A new entity that gets this answer, or a good one if there is none."""
        entity_id = str(uuid.uuid4())
        if 0 <= number < len(self.answers):
            self.bad[entity_id] = number
        return entity_id


def test_an_agent_that_gets_hundreds_of_bad_answers_marks_only_what_was_confirmed(
    agent: AgentFactory, db: Database, backend: Backend
) -> None:
    answers = [raw for raw in drawn(bad_answers(DOORS["entries"], calm=True), 250)
               if not re.match(rb"HTTP/1\.\d +(413|422|400)\b", raw)]  # fmt: skip
    alternating = Alternating(list(answers))
    good, bad = [], []
    for number in range(len(answers)):
        bad.append(backend.enqueue(entity_id=alternating.entity(number)))
        good.append(backend.enqueue(entity_id=alternating.entity(-1)))
    with RawServer(alternating) as server:
        done = agent.once(
            FRONTEND_BASE_URL=server.url, SYNC_BATCH_SIZE=1, SYNC_TIMEOUT_SEC=2, timeout=120
        )
    assert done.returncode == 75, done.stderr[-2000:]
    assert db.pending() == bad
    assert sorted(waiting(db)) == bad
    assert not [line for line in CRASHES if line in done.stderr], done.stderr[-3000:]


LONG = b"a" * 65_000


def endless(top: bytes, piece: bytes) -> Callable[[], Iterator[bytes]]:
    def pieces() -> Iterator[bytes]:
        yield top
        while True:
            yield piece

    return pieces


CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
ENDLESS = b"HTTP/1.1 100 Continue\r\n" + (b"X: " + LONG + b"\r\n") * 98 + b"\r\n"
YES = b'{"ok": true, "fileUrl": "https://voice.example.com/x"}'
LONG_ANSWERS: dict[str, bytes | Callable[[], Iterator[bytes]]] = {
    "a body without end": endless(OK + b"\r\n", LONG),
    "a body of 10 GB": endless(OK + b"Content-Length: 10000000000\r\n\r\n", LONG),
    "a chunk of 10 GB": endless(CHUNKED + b"2540be400\r\n", LONG),
    "a chunk of -1 bytes": endless(CHUNKED + b"-1\r\n", LONG),
    "a chunk's size without end": endless(CHUNKED + b"1;", LONG),
    "chunks without end": endless(CHUNKED, b"fde8\r\n" + LONG + b"\r\n"),
    "trailers without end": endless(CHUNKED + b"2\r\nno\r\n0\r\n", b"X: " + LONG + b"\r\n"),
    "a status line without end": endless(b"HTTP/1.1 200 ", LONG),
    "a header without end": endless(OK + b"X: ", LONG),
    "headers without end": endless(OK, b"X: " + LONG + b"\r\n"),
    "six megabytes of headers": OK + (b"X: " + LONG + b"\r\n") * 98 + with_length(b"", b"no"),
    "interim answers without end": endless(b"", ENDLESS),
    "a gzip bomb": with_length(
        head(200, [("Content-Encoding", "gzip")]), BOMB + gzip.compress(YES)
    ),
}


@pytest.mark.parametrize("door", DOORS)
def test_no_answer_however_long_costs_memory_or_counts(
    agent: AgentFactory, db: Database, backend: Backend, door: str
) -> None:
    """Each long answer is followed by a good one: none of this is an outage."""
    names = list(LONG_ANSWERS)
    alternating = Alternating(list(LONG_ANSWERS.values()))
    with RawServer(alternating) as server:

        def add(number: int) -> int:
            entity_id = alternating.entity(number)
            if door == "entries":
                return backend.enqueue(entity_id=entity_id)
            call = backend.end_call(recording=True, events=0)
            alternating.bad.pop(call.recording_id, None)
            if entity_id in alternating.bad:
                alternating.bad[call.recording_id] = alternating.bad.pop(entity_id)
            db.execute(
                "delete from sync_outbox where id = any(%s)", ([*call.seqs[:-1]],)
            )  # only its file matters here
            return call.seq("recording_file")

        for _ in range(10):
            add(-1)
        running = agent(
            # Should it ever fail: not at the machine's expense.
            prefix=("prlimit", f"--as={1 << 30}"),
            FRONTEND_BASE_URL=server.url,
            SYNC_BATCH_SIZE=1,
            SYNC_TIMEOUT_SEC=1,
        )
        wait_until(lambda: not db.pending(), what="good answers", state=running.log)
        before = running.rss_peak_kib()
        bad = {}
        with db.connect(autocommit=False):
            for number in range(len(names)):
                bad[add(number)] = names[number]
                last = add(-1)
        wait_until(
            lambda: last not in db.pending() and set(waiting(db)) >= set(bad),
            timeout=120,
            what="the last good answer",
            state=running.log,
        )
        grown = running.rss_peak_kib() - before
    assert set(db.pending()) == set(bad), [bad.get(seq, seq) for seq in bad]
    assert grown < 2048, f"{grown} KiB more\n{running.log()[-2000:]}"
    assert not [line for line in CRASHES if line in running.log()], running.log()[-3000:]
    assert running.running


# --------------------------------------------------------------------------------------------------
# The outbox and the disk
# --------------------------------------------------------------------------------------------------

INSERT = "insert into sync_outbox (entity_type, entity_id, payload) values (%s, %s, %s::jsonb)"
names = ["id", "callLogId", "call_log_id", "callId", "filePath", "s3Url", "uploadStatus", "op"]
payloads = st.one_of(
    json_values,
    st.dictionaries(st.sampled_from(names) | plain, json_values, max_size=5),
    st.sampled_from(
        [{}, [], "", None, 0, {"callLogId": {"callLogId": [1]}}, 10**300, -0.0, 1e-300]
    ),
)
entity_types = st.text(
    st.characters(blacklist_categories=LONE, blacklist_characters="\0"),
    min_size=1,
    max_size=30,
).filter(lambda name: name != "recording_file") | st.sampled_from(
    ["call_log", "recording", "ivr_session_event", "a\r\nb", '"', "\\", "'; drop table sync_outbox"]
)


def test_any_payload_of_any_type_arrives_as_the_database_has_it(
    agent: AgentFactory, db: Database, frontend: Frontend
) -> None:
    rows = [
        (kind, uuid.uuid4(), json.dumps(payload))
        for kind, payload in drawn(st.tuples(entity_types, payloads), 1500)
    ]
    with db.connect() as connection, connection.cursor() as cursor:
        cursor.executemany(INSERT, rows)
    done = agent.once(timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert not db.pending()
    assert frontend.seqs() == [row[0] for row in db.rows("select id from sync_outbox order by id")]
    stored = db.rows("select entity_type, entity_id::text, payload::text from sync_outbox")
    for kind, entity_id, text in stored:
        (entry,) = frontend.received(entity_id)
        assert entry["entityType"] == kind
        assert json.dumps(entry["payload"]) == json.dumps(json.loads(text)), kind
    assert not [line for line in CRASHES if line in done.stderr], done.stderr[-3000:]


file_names = st.text(
    st.characters(blacklist_categories=LONE, blacklist_characters="\0/"),
    min_size=1,
    max_size=40,
).filter(lambda n: n not in (".", "..") and not n.startswith(".serversync"))
metas = st.one_of(
    json_values.map(lambda value: json.dumps(value).encode()),
    st.binary(max_size=100),
    st.sampled_from([b"", b"{", b"\0", b"[" * 100_000, b'"' + b"x" * 300_000 + b'"', b"NaN",
                     b'{"a": "\r\n--serversync-\r\nContent-Disposition: form-data; name=x"}',
                     b"9" * 5000, "{}".encode("utf-16"), b"\xef\xbb\xbf{}"]),
)  # fmt: skip


def paths(directories: list[str]) -> st.SearchStrategy[object]:
    """Paths that are put together from all that could lead somewhere."""
    part = st.sampled_from([
        "..", ".", "", "storage", "recordings", "mixed.wav", "secret.wav", "outside", "link",
        "linked", ".serversync-trash", ".serversync-root", "~", "%2e%2e", "..%2f", "\\..\\",
        "a" * 300,
        "\n", "*", "?", "$HOME", "mixed.wav\n", "MIXED.WAV", "-rf", "etc", "passwd", "proc", "self",
    ]) | st.sampled_from(directories) | file_names  # fmt: skip
    joined = st.lists(part, max_size=6).map("/".join)
    absolute = joined.map(lambda path: "/" + path)
    ending = joined.map(lambda path: path + "/mixed.wav")
    return joined | absolute | ending | json_values


def no_constant(name: str) -> None:
    raise ValueError(name)


def is_json(text: bytes) -> bool:
    """Strictly: UTF-8, no BOM, no NaN."""
    try:
        json.loads(text.decode(), parse_constant=no_constant)
    except (ValueError, RecursionError):
        return False
    return len(text) <= 256 * 1024


def test_any_file_path_and_any_meta_json_ends_in_the_root_or_in_the_dead_letters(
    agent: AgentFactory, db: Database, backend: Backend, frontend: Frontend
) -> None:
    root = backend.recordings_dir
    outside = root.parent / "outside"
    secrets = [outside / "mixed.wav", outside / "secret.wav", root / "mixed.wav"]
    for path in secrets:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"SECRET " + os.urandom(20))
    (root / "linked").symlink_to(outside)
    (root / "link").mkdir()
    (root / "link" / "mixed.wav").symlink_to(outside / "secret.wav")
    named = drawn(st.tuples(file_names, metas), 150)
    calls = {name: meta for name, meta in named if len(name.encode()) < 200}
    whole = {}
    rows: list[tuple[str, uuid.UUID, str]] = []
    for name, meta in calls.items():
        directory = root / name
        if directory.exists():
            continue
        directory.mkdir()
        (directory / "mixed.wav").write_bytes(os.urandom(30))
        (directory / "meta.json").write_bytes(meta)
        call_log_id = str(uuid.uuid4())
        whole[call_log_id] = (sha256((directory / "mixed.wav").read_bytes()).hexdigest(), meta)
        payload = {"callLogId": call_log_id, "recordingId": str(uuid.uuid4()),
                   "filePath": f"storage/recordings/{name}/mixed.wav"}  # fmt: skip
        rows.append(("recording_file", uuid.uuid4(), json.dumps(payload)))
    known = {*(digest for digest, _ in whole.values())}
    ids = st.uuids().map(str) | json_values | st.just("x\r\ny")
    odd = st.fixed_dictionaries(
        {"callLogId": st.uuids().map(str) | ids, "recordingId": st.uuids().map(str) | ids},
        optional={"filePath": paths(list(calls)), "callId": paths(list(calls)),
                  "file_path": paths(list(calls)), "metaPath": paths(list(calls))},
    )  # fmt: skip
    rows += [
        ("recording_file", uuid.uuid4(), json.dumps(payload))
        for payload in [*drawn(odd, 500), *drawn(payloads, 100)]
    ]
    with db.connect() as connection, connection.cursor() as cursor:
        cursor.executemany(INSERT, rows)
    # Deletion off, so that every look finds the same disk; five looks until a file is missing.
    for _ in range(25):
        if not db.pending():
            break
        done = agent.once(SYNC_FILE_GRACE_SEC=0, SYNC_DELETE_AFTER_SEC=86400, timeout=120)
        assert not [line for line in CRASHES if line in done.stderr], done.stderr[-3000:]
        let_hours_pass(db, 1)

    assert not db.pending(), waiting(db)
    allowed = {"FILE_UNSAFE", "BAD_PAYLOAD", "FILE_MISSING", "SECOND_RECORDING"}
    assert set(dead(db).values()) <= allowed
    assert {file.sha256 for file in frontend.uploads} <= known
    for call_log_id, (digest, meta) in whole.items():
        file = frontend.files[call_log_id]
        assert file.sha256 == digest
        if is_json(meta):
            assert file.meta == meta
        else:
            assert json.loads(file.meta)["generatedBy"] == "serversync"
    for path in secrets:
        assert path.read_bytes().startswith(b"SECRET")

    # Now with deletion: whatever its path was, what arrived goes, and nothing else.
    for _ in range(5):
        if not uploads(db):
            break
        let_hours_pass(db)
        done = agent.once(SYNC_DELETE_AFTER_SEC=0, timeout=120)
        assert not [line for line in CRASHES if line in done.stderr], done.stderr[-3000:]
    assert not uploads(db)
    there = [*root.rglob("*"), *outside.rglob("*")]
    left = {path for path in there if path.is_symlink() or not path.is_dir()}
    kept = {root / ".serversync-root", root / "linked", root / "link" / "mixed.wav", *secrets}
    kept |= {
        root / name / "meta.json" for name, meta in calls.items() if meta and not is_json(meta)
    }
    assert left == kept
    for path in secrets:
        assert path.read_bytes().startswith(b"SECRET")

#!/usr/bin/python3
"""serversync: drains a voicebot's outbox to its web frontend, and cleans up behind it.

      voicebot --INSERT--> PostgreSQL: sync_outbox --.
         |                                           |  POST /api/ingest/sync            (JSON)
         '--writes--> storage/recordings/<callId>/ --+--> frontend
                              ^                      |  POST /api/ingest/recording-file  (audio)
                              '------- deletes ------'  once the frontend has confirmed

      backend's tables <-- settings, checked item by item -- GET /api/… <-- what people change

Promises
  Can an entry be lost?   No. It is marked, and a file is deleted, only after the frontend has
                          confirmed it in the contract's own words. An outage uses up nothing.
  Can one be sent twice?  Only what was under way when its answer did not come (a kill, a time-out,
                          a reset). Receivers tell by seq, entityId and Idempotency-Key.
  In order?               By id; after a failure an entry never passes an earlier one of the same
                          entity, nor its call's own entry.
  What blocks the rest?   Nothing. What fails waits alone, with what depends on it, and has a row in
                          serversync.waiting that says why; what is pending is never deleted.

Can a recording be lost? Five functions answer it
  Files._upload           what is sent, and that it is still the same file afterwards
  Files._stored           what the frontend says that it has (HEAD), before anything is marked
  Store.confirm           marked, and noted for deletion, in one durable transaction
  Store.settle            a result that cannot be written down is kept, before all else
  Recordings.remove       file by file into the trash, compared there with what was sent

Map: three rooms, each of which names nothing of a later one
  1 Delivering (from the outbox to the frontend)
      configuration . vocabulary . logging and systemd . policy (pure decisions) . SQL . store .
      HTTP . recordings . jobs: what they share . entries . files . deletions . the agent
  2 Settings (from the frontend to the backend)
      what the answers mean (pure) . the tables . announcements' audio . in the agent's loop
  3 For people (other processes, no lock)
      the desk . metrics . commands . doctor . the admin interface . the status page .
      command line

Exit codes, the first that applies
   2  usage
  78  configuration (every problem is listed)
  69  the database or the frontend is not there
   1  something needs a person: dead letters were made
  75  not everything is through yet, or another agent holds the lock: try later
   0  done
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import difflib
import errno
import fcntl
import hashlib
import hmac
import http.client
import io
import ipaddress
import json
import logging
import os
import platform
import pwd
import random
import re
import select
import shlex
import signal
import socket
import ssl
import stat
import subprocess
import sys
import termios
import threading
import time
import traceback
import uuid
from collections import deque
from collections.abc import Callable, Container, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from email.utils import formatdate, parsedate_to_datetime
from enum import Enum
from functools import cached_property, partial
from itertools import islice
from types import NoneType
from typing import Any, Final, NoReturn, TextIO, TypeVar
from urllib.parse import parse_qsl, quote, unquote_to_bytes

import psycopg
import urllib3
from psycopg import generators
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from systemd import daemon, journal
from urllib3.filepost import encode_multipart_formdata
from urllib3.util import parse_url

__version__ = "0.2.0"

# ==================================================================================================
# ROOM 1: Delivering
# From the outbox to the frontend. It names nothing of rooms 2 and 3, and works without them.
# ==================================================================================================

# ==================================================================================================
# Configuration
# One table, the fields of Config: from it come the validation, --help and the checks of the README.
# ==================================================================================================

ENV_FILE: Final = "/etc/serversync.env"
EX_OK, EX_PERSON, EX_USAGE, EX_UNAVAILABLE, EX_TEMPFAIL, EX_CONFIG = 0, 1, 2, 69, 75, 78


class ConfigError(Exception):
    """Something only a person can change; carries every problem, not just the first."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = list(problems)


Parse = Callable[[str], Any]


def _like(pattern: str, what: str, read: Parse = str, bounds: Any = None) -> Parse:
    """Reads what is written like this and lies in these bounds; else it says what is allowed."""

    def parse(text: str) -> Any:
        value = read(text) if re.fullmatch(pattern, text) else None
        if value is None or (bounds and not bounds[0] <= value <= bounds[1]):
            raise ValueError(f"must be {what}")
        return value

    return parse


def _number(low: float, high: float) -> Callable[[str], float]:
    what = f"a number from {low:.12g} to {high:.12g}"
    return _like(r"[0-9]{1,12}(\.[0-9]{1,9})?", what, float, (low, high))


def _whole(low: int, high: int) -> Callable[[str], int]:
    return _like("[0-9]{1,12}", f"a whole number from {low} to {high}", int, (low, high))


def _size(high: int, cut: int = 0) -> Callable[[str], int]:
    """A size; one up to `cut`, which an earlier edition took, becomes the largest there is."""

    def read(text: str) -> int:
        number, unit = int(text.rstrip("KMiB ")), text.lstrip("0123456789 ")
        size = number << {"": 0, "KiB": 10, "MiB": 20}[unit]
        if not high < size <= cut:
            return size
        log.warning("a size of %s is more than is possible: %s MiB is used", text, high >> 20)
        return high

    what = f"a size from 1 KiB to {high >> 20} MiB"
    return _like("[0-9]{1,12} ?(KiB|MiB)?", what, read, (1024, high))


def _choice(*allowed: str) -> Callable[[str], str]:
    return _like("|".join(allowed), f"one of: {', '.join(allowed)}")


def _database(value: str) -> str:
    try:
        conninfo_to_dict(value)
    except psycopg.Error:
        raise ValueError("must be a libpq URL such as postgresql:///voicebot") from None
    return value


def _frontend(value: str) -> str:
    visible = re.fullmatch(r"(?ai)https?://[\w!$%&'()*+,./:;=~\[\]-]+", value)
    with contextlib.suppress(urllib3.exceptions.HTTPError):
        if visible and parse_url(value).host:
            return value.rstrip("/")
    raise ValueError("must be an http(s) URL such as https://voice.example.com, without a password")


_absolute = _like(r"/[\s\S]*", "an absolute path")
_device = _like("[A-Za-z0-9._:-]{1,64}", "1 to 64 letters, digits, and any of . _ : -")
_day = _number(0, 86400)
_VERIFY: Final = "/api/recordings/{callLogId}"
_path = _like(r"(?a)/([\w./~-]|\{callLogId\}|\{recordingId\})*", f"a path such as {_VERIFY}")
_RECORDINGS: Final = "/opt/virtual-voicebot/storage/recordings"
_AUDIO: Final = "/opt/virtual-voicebot/data/announcements"


def _row(default: str | None, parse: Parse, text: str) -> Any:
    """A row of the option table. A default of None: required; an empty one: not set."""
    return field(metadata={"default": default, "parse": parse, "text": text})


@dataclass(frozen=True)
class Config:
    """The option table: every key with its default, its bounds and what it is for."""

    database_url: str = _row(None, _database, "libpq URL, such as postgresql:///voicebot")
    frontend_base_url: str = _row(None, _frontend, "http(s) URL of the frontend, without /api/…")
    poll_interval_sec: float = _row("300", _number(0.1, 86400), "between looks; 30 s at most")
    batch_size: int = _row("100", _whole(1, 10000), "entries a request")
    batch_bytes: int = _row("512 KiB", _size(4 << 20), "bytes a request")
    entry_max_bytes: int = _row("8 MiB", _size(32 << 20, 256 << 20), "a larger entry dies at once")
    timeout_sec: float = _row("30", _number(0.5, 600), "to connect, for progress, for an answer")
    retry_max: int = _row("8", _whole(1, 1000), "a dead letter needs so many charged attempts")
    retry_hours: float = _row("24", _number(0, 8760), "a dead letter needs so many hours, too")
    recordings_dir: str = _row(_RECORDINGS, _absolute, "where the backend writes its recordings")
    file_grace_sec: float = _row("300", _day, "how long a missing file is waited for")
    delete_after_sec: float = _row("60", _day, "how long a call's files must be quiet")
    extra_files: str = _row("keep", _choice("keep", "delete"), "files that were never uploaded")
    upload_kbps: float = _row("0", _number(0, 10_000_000), "limit of uploads, 1000 bit/s; 0: none")
    verify_path: str = _row(_VERIFY, _path, "HEAD here must confirm an upload; empty: never asked")
    retention_days: float = _row("30", _number(0, 36500), "processed rows are kept; 0: for ever")
    token_file: str = _row("", _absolute, "file with the bearer token")
    token: str = _row("", str, "the bearer token itself (better: the file)")
    admin_token_file: str = _row("", _absolute, "token of the admin interface on TCP")
    ca_file: str = _row("", _absolute, "PEM file of a private CA")
    client_cert: str = _row("", _absolute, "PEM client certificate")
    client_key: str = _row("", _absolute, "PEM key, if not in the above")
    device_id: str = _row("", _device, "name of this sender; derived from the machine id")
    log_level: str = _row("info", _choice("debug", "info", "warning", "error"), "least level shown")
    frontend_sync_interval_sec: float = _row("60", _day, "between settings pulls; 0: none")
    local_numbers: str = _row("keep", _choice("keep", "replace"), "numbers that never had a group")
    announcements_dir: str = _row(_AUDIO, _absolute, "where announcements' audio goes")


# By the variable: SYNC_ and the field's name, where that has no prefix of its own.
OPTIONS: Final = {
    re.sub("^(?!database_|frontend_)", "sync_", option.name).upper(): option
    for option in fields(Config)
}

# As systemd reads an EnvironmentFile: pieces in quotes may be glued together, and a backslash keeps
# what follows it, or joins two lines.
_ENV_LINE: Final = re.compile(
    r"""[#;][^\r\n]*
      | (?P<key>[A-Za-z_][A-Za-z0-9_]*)[ \t]*=[ \t]*
        (?P<quoted>(?:(?:'[^']*'|"(?:[^"\\]|\\[\s\S])*")[ \t]*)*)
        (?:(?P<endless>['"][\s\S]*)|(?P<bare>(?:[ \t]*(?:\\[\s\S]?|[^ \t\r\n\\]))*))
      | (?P<odd>[^ \t\r\n][^\r\n]*)""",
    re.VERBOSE,
)
_ENV_QUOTED: Final = re.compile(r"""'([^']*)'|"((?:[^"\\]|\\[\s\S])*)\"""")


def parse_env_file(text: str, name: str = "env file") -> dict[str, str]:
    """KEY=VALUE with comments, quotes and continued lines."""
    found: dict[str, str] = {}
    problems = [f"{name}: a NUL character: this is no text"] if "\0" in text else []
    for match in _ENV_LINE.finditer(text):
        if match["bare"] is not None:
            value = ""
            for single, double in _ENV_QUOTED.findall(match["quoted"]):
                value += single + re.sub(r'\\(["\\`$])|\\\n', r"\1", double)
            bare = re.sub(r"\\([^\r\n])|\\[\r\n]?", r"\1", match["bare"])
            found[match["key"]] = value + bare
        elif match["odd"] or match["endless"]:
            # Never the line itself: it may be a piece of a secret.
            what = "is not KEY=VALUE" if match["odd"] else "has a quote that is not closed"
            line = text.count("\n", 0, match.start()) + 1
            problems.append(f"{name}: line {line} {what}")
    if problems:
        raise ConfigError(problems)
    return found


def read_text(path: str, named_by: str = "") -> str:
    try:
        with open(path or os.devnull, encoding="utf-8") as file:
            return file.read(1 << 20)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", "not UTF-8 text")  # no colon: "token: …" is masked
        raise ConfigError([f"{named_by}cannot read {path} ({reason})"]) from None


def read_env_file(path: str | None, environ: Mapping[str, str]) -> dict[str, str]:
    """The settings as text: the file's, and over them those of the environment."""
    path = path or (ENV_FILE if os.path.exists(ENV_FILE) else os.devnull)
    ours = {k: v for k, v in environ.items() if k in OPTIONS or k.startswith("SYNC_")}
    found = parse_env_file(read_text(path), path) | ours
    return {k: v for k, v in found.items() if v.strip() or k == "SYNC_VERIFY_PATH"}


def load_config(settings: Mapping[str, str], environ: Mapping[str, str]) -> Config:
    """A checked Config, or a ConfigError with all that is wrong and what is allowed."""
    problems = []
    for key in sorted(settings.keys() - OPTIONS.keys()):
        if key.startswith("SYNC_"):
            near = difflib.get_close_matches(key, OPTIONS, 1)
            hint = f"did you mean {near[0]}?" if near else "see serversync --help"
            problems.append(f"{key} is unknown: {hint}")
    values: dict[str, Any] = {}
    for name, option in OPTIONS.items():
        text = settings.get(name, option.metadata["default"])
        try:
            if text is None:
                raise ValueError(f"is required: {option.metadata['text']}")
            values[option.name] = option.metadata["parse"](text.strip()) if text else text
        except ValueError as error:  # the value is not shown: it may be a secret in a wrong place
            problems.append(f"{name} {error}")
    values["device_id"] = values.get("device_id") or derived_device_id()
    try:
        values["token"] = _find_token(values, environ)
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(problems)
    config = Config(**values)
    if config.ca_file or config.client_cert or config.client_key:  # to try it takes 50 ms
        tls_context(config)
    return config


def _find_token(values: Mapping[str, str], environ: Mapping[str, str]) -> str:
    """The systemd credential if it is not empty, then the file, then the variable."""
    credential = os.path.join(environ.get("CREDENTIALS_DIRECTORY") or "/nonexistent", "token")
    path = credential if os.path.exists(credential) else ""
    token = read_text(path, "credential: ").strip()
    token = token or read_text(values.get("token_file", ""), "SYNC_TOKEN_FILE: ").strip()
    token = token or values["token"]
    if not re.fullmatch(r"[!-~]*", token):
        raise ConfigError(["the token must be one line of visible ASCII characters"])
    return token


def tls_context(config: Config) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=config.ca_file or None)
        if config.client_cert or config.client_key:
            # An empty pass phrase: OpenSSL would ask for it on the terminal.
            context.load_cert_chain(config.client_cert, config.client_key or None, password="")
        return context
    except OSError as error:
        names = "SYNC_CA_FILE, SYNC_CLIENT_CERT, SYNC_CLIENT_KEY"
        hint = "is each there, readable, PEM, and the key without a pass phrase?"
        why = f"{names} cannot be used: {error.strerror or error} ({hint})"
        raise ConfigError([why]) from None


def derived_device_id() -> str:
    """Stable, and not the machine id itself, which is confidential (machine-id(5))."""
    seed = socket.gethostname()
    with contextlib.suppress(OSError), open("/etc/machine-id", encoding="ascii") as file:
        seed = file.read().strip()
    return hashlib.sha256(b"serversync" + seed.encode()).hexdigest()[:16]


# ==================================================================================================
# Vocabulary
# One word for one thing: entry, try, attempt (a charged try), waiting, outage, endpoint, dead.
# ==================================================================================================


class Fate(Enum):
    """What becomes of that which was sent."""

    SENT = "sent"
    REJECTED = "rejected"  # the frontend says that it will never take it
    SUSPECT = "suspect"  # perhaps the entry's fault, perhaps the frontend's
    WAITS = "waits"  # nobody's fault, or ours: is never charged
    OUTAGE = "outage"  # surely not the entry's fault
    DEAD = "dead"  # it cannot be sent, and that lies here


# Why there is no answer. What each means stands in the table of verdicts.
Trouble = Enum("Trouble", ["UNREACHABLE", "TLS", "TIMEOUT", "RESET", "GARBLED"])


@dataclass(frozen=True)
class Verdict:
    fate: Fate
    code: str
    reason: str
    status: int | None = None
    retry_after: float | None = None


@dataclass(frozen=True)
class Answer:
    """What one request brought: a status and a body, or the trouble instead."""

    status: int | None = None
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)  # by their names in lower case
    trouble: Trouble | None = None
    detail: str = ""
    steady: bool = False  # bytes moved until the end: slow, not stuck
    complete: bool = True  # the whole body went out before the answer came
    sent: int = 0  # bytes of the request's body
    duration: float = 0.0

    @cached_property
    def said(self) -> dict[str, Any] | None:
        """Its body, where that is a JSON object."""
        try:
            said = json.loads(self.body)
        except (ValueError, RecursionError):
            return None
        return said if isinstance(said, dict) else None


@dataclass(frozen=True)
class Past:
    """What is known of an entry's earlier tries."""

    entity_type: str
    call_id: str | None
    tries: int = 0
    attempts: int = 0
    type_sent: int | None = None  # how many of its type were sent at its last failure
    waited: float = 0.0
    sent_now: int = 0  # how many of its type were sent until now
    rejected: int = 0  # of its type, in a row


@dataclass(frozen=True)
class Step:
    dead: bool
    tries: int
    attempts: int
    delay: float


@dataclass(frozen=True)
class Batch:
    """Entries in the order in which they go, as the body that PostgreSQL wrote."""

    seqs: list[int]
    size: int  # of the largest of them
    body: bytes  # {"entries":[…]}; empty when the only entry is larger than SYNC_ENTRY_MAX_BYTES
    key: str  # the same entries and bytes have the same key


@dataclass(frozen=True)
class FileEntry:
    """A recording_file entry, with what is known of its earlier looks and of its recording."""

    seq: int
    call_log_id: str  # empty: what the payload says is no UUID
    recording_id: str
    file_path: str | None
    call_id: str | None
    tries: int
    waited: float
    uploaded: bool
    second: bool
    waits_for: int | None
    early: bool  # an entry before it has not been tried: both came to light behind the pass


@dataclass(frozen=True)
class Receipt:
    """What is written down of a request that was confirmed."""

    kind: str
    bytes: int
    key: str
    request_sha256: str | None
    answer: Answer
    outcome: str
    call_log_id: str | None = None
    entity_id: str | None = None
    url: str | None = None
    directory: str | None = None
    files: str = "[]"  # what may be deleted now, as JSON


@dataclass
class Result:
    """What a request brought, until it is written down."""

    seqs: Sequence[int]
    write: Callable[[], object]
    file: FileEntry | None  # that was uploaded
    locked: bool = False  # it waits for a lock


@dataclass
class Outage:
    """Nothing gets through, and it is no entry's fault."""

    code: str
    reason: str
    since: float
    tries: int
    due: float
    by_entries: bool  # so many of them failed: nothing else says so, and a new one is worth a try


@dataclass
class Tally:
    """What was done since the last rest; the sentence is made of it."""

    entries: int = 0
    files: int = 0
    bytes: int = 0
    removed: int = 0
    waiting: int = 0
    dead: int = 0
    started: float = field(default_factory=time.monotonic)


class Lost(Exception):
    """The database connection, and with it the lock, is gone: reconnect before going on."""


class Stopping(Exception):
    """A signal asked for the end: unwind, mark nothing."""


class Unavailable(Exception):
    """The database is not there, or not as it must be; a state, not a failure."""


class NotRecorded(Unavailable):
    """A result that the database does not take."""


class EntryTrouble(Exception):
    """A local reason against sending one recording; carries its verdict."""

    def __init__(self, fate: Fate, code: str, reason: str) -> None:
        super().__init__(reason)
        self.verdict = Verdict(fate, code, reason)


# ==================================================================================================
# Logging and systemd
# Sentences with fields, masked before they leave; signals, deadlines and the watchdog.
# ==================================================================================================

log: Final = logging.getLogger("serversync")

# A value in quotes, with what is escaped in it, also where all of it was escaped once more (JSON in
# JSON, or in a repr); without its end: to the end. One in brackets; where these nest: to the end.
_NO_END: Final = r"(?![\s,;:)}\]&]|\Z)"
_IN_QUOTES: Final = (
    rf"\*\*\*|\"(?:[^\"\\]|\\.|(?<=\\)\"{_NO_END})*\"?|'(?:[^'\\]|\\.|''|(?<=\\)'{_NO_END})*'?"
    r"|(?P<mark>\\+[\"'])(?:(?!(?<!\\)(?P=mark)).)*(?:(?P=mark))?"
)
_BRACKETS: Final = r"[\[{](?:[^\[\]{}\"'\\]|\"[^\"\\]*\"|'[^'\\]*')*+[\]}]|[\[{].*"
_WORD: Final = r"(?:\\+[\"']?|[^\s\"'&,;\\])+"
_IS: Final = r"\\*[\"']?\s*[=:]\s*"
_NAMES: Final = "password|passwd|pwd|secret|token|api[_-]?key|access[_-]?key"
_TOKENS: Final = "gh[pousr]_|github_pat_|glpat-|sk[-_]|xox|xapp-|AIza|AKIA|ASIA|eyJ"
_SECRETS: Final = [
    (re.compile(pattern), instead)
    for pattern, instead in (
        (r"(?s)-----BEGIN [A-Z ]+-----.*?(?:-----END [A-Z ]+-----|\Z)", "***"),
        # Whatever the scheme is: without quotes, all of the line.
        (rf"(?is)(authorization{_IS})(?:{_IN_QUOTES}|[^\r\n]*)", r"\1***"),
        (r"(?i)\b(bearer|basic)\s+[^\s\"',;]+", r"\1 ***"),
        # A password may hold any character but a blank: up to the last @ before a quote.
        (r"(://[^/\s:]{0,500}:)[^\s@]{0,1000}@(?:[^\s\"'<>]{0,1000}@)?", r"\1***@"),
        (rf"(?is)((?:{_NAMES}){_IS})(?:{_IN_QUOTES}|{_BRACKETS}|{_WORD})", r"\1***"),
        (rf"\b(?:{_TOKENS})[\w.-]{{16,}}", "***"),
    )
]
KNOWN: Final[list[str]] = []  # our own secrets, the longest first: one may be a part of another
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
_CONTROL_BUT_BREAKS: Final = re.compile(rf"{_CONTROL.pattern}(?<!\n)")


def mask(text: str) -> str:
    """The text without secrets: our own, and all that look like one."""
    for secret in KNOWN:
        text = text.replace(secret, "***")
    for pattern, instead in _SECRETS:
        text = pattern.sub(instead, text)
    return text


def clean(text: str, limit: int = 1024, lines: bool = False) -> str:
    """Text from outside, fit for SQL, the journal and sd_notify, where a line break would begin
    another variable: no control or bidi character, no surrogate, no secret, short.

    It is masked before it is cut: half a secret would look like none.
    """
    text = text.encode("utf-8", "replace").decode("utf-8")
    text = (_CONTROL_BUT_BREAKS if lines else _CONTROL).sub(" ", text)
    return mask(text)[:limit]


def cleaned(record: logging.LogRecord) -> bool:
    """The journal handler also sends record.args and extra fields: the record itself is masked."""
    record.msg = clean(record.getMessage(), 4096)
    record.args = ()
    if record.exc_info:
        trace = "".join(traceback.format_exception(*record.exc_info))
        record.exc_text = clean(trace, 8192, lines=True)
        record.exc_info = None
    for key, value in list(vars(record).items()):
        if key.isupper():
            setattr(record, key, str(value) if type(value) is int else clean(str(value)))
    return True


def start_logging(environ: Mapping[str, str]) -> None:
    """To the journal with fields when standard error is the journal, else plain lines."""
    handler: logging.Handler = logging.StreamHandler()
    with contextlib.suppress(OSError):
        status = os.fstat(2)
        if environ.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}":
            handler = journal.JournalHandler(SYSLOG_IDENTIFIER="serversync")
    handler.addFilter(cleaned)
    logging.raiseExceptions = False  # a full journal must not print tracebacks
    logging.root.handlers[:] = [handler]
    logging.getLogger("urllib3").setLevel(logging.CRITICAL)


def configure_logging(config: Config) -> None:
    """Its level; and its secrets, as they are, and as JSON or a query writes them."""
    known: set[str] = set()
    for secret in (config.token, str(conninfo_to_dict(config.database_url).get("password") or "")):
        text = json.dumps(secret)[1:-1]
        known.add(_CONTROL.sub(" ", secret))  # as `clean` has left it
        known |= {secret, text, text.replace("/", "\\/"), quote(secret), quote(secret, safe="")}
    KNOWN[:] = sorted((each for each in known if len(each) >= 4), key=len, reverse=True)
    log.setLevel(config.log_level.upper())


def say(level: int, event: str, sentence: str, exc_info: bool = False, **more: Any) -> None:
    """One sentence with its fields; a field that is None is left out."""
    extra = {key: value for key, value in more.items() if value is not None}
    extra["EVENT"] = event
    log.log(level, "%s", sentence, extra=extra, stacklevel=2, exc_info=exc_info)


class Repeats:
    """Says a thing when it changes, and when it only repeats once a minute, with a count."""

    def __init__(self) -> None:
        self._said: dict[str, tuple[str, float, int]] = {}

    def say(self, topic: str, key: str, level: int, event: str, text: str, **more: Any) -> None:
        last, at, count = self._said.get(topic, ("", 0.0, 0))
        now = time.monotonic()
        if last == key and now - at < 60:
            self._said[topic] = (last, at, count + 1)
            return
        if last == key and count:
            text += f" ({count + 1} times since)"
        self.over(topic)  # the newest stands last, and of too many the oldest is forgotten
        self._said[topic] = (key, now, 0)
        if len(self._said) > 256:
            del self._said[next(iter(self._said))]
        say(level, event, text, **more)

    def over(self, topic: str) -> bool:
        """True once for a topic that was spoken of."""
        return self._said.pop(topic, None) is not None


STOP_GRACE: Final = 0.8  # a request under way may still end by itself; the whole stop takes < 2 s
TICK: Final = 0.5


class Process:
    """Everything that interrupts: signals, deadlines, and the watchdog that progress feeds."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.stop_at = float("inf")
        self.reload = False
        self._wake_r, self._wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._limit: tuple[float, Callable[[], None] | None] | None = None
        self._interval = int(environ.get("WATCHDOG_USEC") or 0) / 1e6 / 4
        self._fed = 0.0

    def install(self) -> None:
        signal.set_wakeup_fd(self._wake_w, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self._on_stop)
        signal.signal(signal.SIGINT, self._on_stop)
        signal.signal(signal.SIGHUP, self._on_reload)
        signal.signal(signal.SIGALRM, self._on_tick)

    def _on_stop(self, *_: object) -> None:
        self.stop_at = min(self.stop_at, time.monotonic())

    def _on_reload(self, *_: object) -> None:
        self.reload = True

    def _on_tick(self, *_: object) -> None:
        """Runs twice a second while something blocks: feeds the watchdog until the deadline."""
        if self._limit is None:
            return
        until, shut = self._limit
        if time.monotonic() < min(until, self.stop_at + STOP_GRACE):
            self.progress()
        elif shut is None:
            raise TimeoutError
        else:
            shut()

    @contextlib.contextmanager
    def deadline(self, seconds: float, shut: Callable[[], None] | None) -> Iterator[None]:
        """Ends what blocks: shuts its socket, or raises TimeoutError where there is none yet. There
        is never one within another.

        Socket time limits are not deadlines: an answer of a byte every 0.4 s outlives a limit of
        1 s, and a signal alone does not end a recv (PEP 475).
        """
        self._limit = (time.monotonic() + seconds, shut)
        signal.setitimer(signal.ITIMER_REAL, TICK, TICK)
        try:
            yield
        finally:
            try:
                self._limit = None  # no TimeoutError from here on
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)

    def check(self, grace: float = 0.0) -> None:
        if time.monotonic() >= self.stop_at + grace:
            raise Stopping

    def progress(self) -> None:
        """Feeds the watchdog. Called from progress and around bounded waits, never by a thread."""
        now = time.monotonic()
        if self._interval and now - self._fed >= self._interval:
            self._fed = now
            daemon.notify("WATCHDOG=1")

    def wait(self, until: float, sockets: Iterable[tuple[int, int]] = ()) -> set[int]:
        """Until that time at most, or half the watchdog's, for the events of these sockets, and for
        signals through the wake-up pipe. Returns what is ready."""
        poller = select.poll()
        for fd, events in (*sockets, (self._wake_r, select.POLLIN)):
            poller.register(fd, events)
        left = min(until - time.monotonic(), 2 * self._interval or 3600.0)
        ready = {fd for fd, _ in poller.poll(max(0.0, left) * 1000)}
        if self._wake_r in ready:
            os.read(self._wake_r, 4096)
        return ready


def shut_socket(fd: int) -> None:
    """Ends whatever blocks on the socket."""
    with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
        same = socket.socket(fileno=fd)
        stack.callback(same.detach)
        same.shutdown(socket.SHUT_RDWR)


def look_up(host: str) -> None:
    """Raises what getaddrinfo does. That cannot be interrupted, and silent name servers take it ten
    seconds: a thread asks, and is left behind when a deadline or the end comes first."""
    errors: list[OSError | UnicodeError] = []

    def ask() -> None:
        try:
            socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            errors.append(error)

    if not re.fullmatch(r"[\d.]*|.*[:/,].*", host):  # one name: no address, no directory
        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join()
    if errors:
        raise errors[0]


# ==================================================================================================
# Policy: pure decisions
# No clock, no I/O: whose fault is it, what becomes of an entry, when is an endpoint asked again.
# ==================================================================================================

BACKOFF_CAP: Final = 256.0
HOUR: Final = 3600.0
REJECTED_IN_ROW: Final = 9  # a type that is only ever rejected is the frontend's fault, not ours
SENT_SINCE: Final = 3  # so many others of its type must get through before a failure is charged
ENTRIES_IN_ROW, FILES_IN_ROW = 30, 3  # distinct ones that failed without a success: an outage
ALIVE: Final = (Fate.SENT, Fate.REJECTED)  # the empty request: some want at least one entry
ALIVE_SEC: Final = 10.0  # how long the answer to the empty request is believed
SHARE: Final = 9  # after a retry that took t seconds, none for 9 t
HASTY_SEC: Final = 5.0  # for a request after a time-out, until one gets through
BESIDE_SEC: Final = 3.0  # for a request while a file travels: perhaps that fills the line
LOOKS_MIN: Final = 5
PRUNE_AFTER: Final = 300.0  # old rows, the first time after a start
LIFT_LIMIT_SEC: Final = 240.0  # frontends answer 408 when a body took longer than 300 s


def backoff(tries: int, jitter: float, pause: float = 0.0, cap: float = BACKOFF_CAP) -> float:
    """2, 4, 8, … 256 s, and full jitter. At least the pause that was asked for (an hour at most),
    and a random part: up to as long again within the cap, a tenth of what is longer. All who were
    told the same, or whose power returned at the same moment, would else come back together."""
    pause = min(pause, HOUR)
    most = max(min(2 * pause, BACKOFF_CAP), 1.1 * pause)
    return max(jitter * min(cap, 2.0 ** min(tries, 16)), pause + jitter * (most - pause))


def _kind(answer: Answer) -> object:
    """What decides: the trouble or the status, or a word where it takes more than that."""
    if answer.trouble is Trouble.TLS and re.search("not yet valid|has expired", answer.detail):
        return "clock"
    if answer.status == 408 and answer.steady:
        return "slow"
    if answer.status == 503 and retry_after(answer.headers.get("retry-after"), 0.0) is not None:
        return "later"
    if answer.status in (400, 422) and answer.said is not None:
        return "rejected"
    return answer.trouble or answer.status


_CLOCK: Final = "TLS with the frontend failed (if its certificate is good: is this clock right?)"
_LATE: Final = "the frontend did not answer in time"
_PROXY: Final = "too large for the frontend, or for a proxy before it (nginx: client_max_body_size)"
_DENIED: Final = "the frontend does not accept our credentials, or forbids it to them"
_REDIRECT: Final = "a redirect, which is never followed: a login page?"
_NOT_OURS: Final = "a success, but not in the contract's words: not our frontend?"
# What is sent does not stand here: only those that confirm it know the contract's words.
RULES: Final[Sequence[tuple[Container[object], Fate, str, str]]] = (
    ((Trouble.UNREACHABLE,), Fate.OUTAGE, "NETWORK_ERROR", "the frontend cannot be reached"),
    (("clock",), Fate.OUTAGE, "TLS_ERROR", _CLOCK),
    ((Trouble.TLS,), Fate.OUTAGE, "TLS_ERROR", "TLS with the frontend failed"),
    ((Trouble.TIMEOUT, 408), Fate.SUSPECT, "NETWORK_TIMEOUT", _LATE),
    (("slow",), Fate.WAITS, "TOO_SLOW", "the frontend gave up on a body that was moving"),
    ((Trouble.RESET,), Fate.SUSPECT, "NETWORK_RESET", "the frontend closed the connection"),
    ((Trouble.GARBLED,), Fate.SUSPECT, "BAD_RESPONSE", "what came back is not HTTP"),
    (range(200, 300), Fate.SUSPECT, "BAD_RESPONSE", _NOT_OURS),
    (range(300, 400), Fate.SUSPECT, "REDIRECTED", _REDIRECT),
    ((401, 403), Fate.SUSPECT, "UNAUTHORIZED", _DENIED),
    ((404, 405), Fate.SUSPECT, "NOT_FOUND", "no such address: not deployed, or a wrong base URL?"),
    ((409,), Fate.SUSPECT, "CONFLICT", "the frontend says conflict, but not that it has it"),
    ((413,), Fate.SUSPECT, "TOO_LARGE", _PROXY),
    ((429, "later"), Fate.SUSPECT, "RATE_LIMITED", "the frontend asks for a pause"),
    (("rejected",), Fate.REJECTED, "BAD_REQUEST", "the frontend rejects it"),
    ((400, 422), Fate.SUSPECT, "BAD_RESPONSE", "rejected, but not by our frontend"),
    (range(500, 600), Fate.SUSPECT, "FRONTEND_5XX", "the frontend has trouble"),
)
UNEXPECTED: Final = (Fate.SUSPECT, "UNKNOWN", "an answer that nobody expected")


def classify(answer: Answer, now: float = 0.0) -> Verdict:
    """Whose fault is an answer that was not confirmed?"""
    kind = _kind(answer)
    fate, code, reason = next((row[1:] for row in RULES if kind in row[0]), UNEXPECTED)
    status = f"HTTP {answer.status}" if answer.status is not None else ""
    if code == "TOO_LARGE":
        status += f" to {human(answer.sent)}"
    # As a whole: it is masked before it is cut.
    words = answer.detail or answer.body.decode("utf-8", "replace")
    reason = ": ".join(filter(None, (reason, status, words)))
    told = answer.headers.get("retry-after") if code == "RATE_LIMITED" else None
    pause = retry_after(told, now)
    return Verdict(fate, code, reason, answer.status, pause)


def retry_after(text: str | None, now: float) -> float | None:
    """Seconds or a date; nonsense is None; never more than an hour, whatever the clocks say."""
    text = (text or "").strip()
    if re.fullmatch(r"[0-9]+", text):
        return min(float(text), HOUR)
    try:
        date = parsedate_to_datetime(text)  # without a zone: HTTP's dates are GMT
        wait = (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp() - now
    except (TypeError, ValueError, OverflowError):
        return None
    return min(max(wait, 0.0), HOUR)


def _has_it(answer: Answer, key: str, ok: bool | None = None) -> bool:
    """Whether it says that all of the request was taken. `ok` is meant where that is not said."""
    said = answer.said or {}
    if answer.status != 409:  # a success before the end of the body confirms nothing
        success = 200 <= (answer.status or 0) <= 299 and answer.complete
        return success and said.get("ok", ok) is True
    # I have it, or: the first one is still running?
    error = said.get("error")
    codes = [said.get("code"), error.get("code") if isinstance(error, dict) else error]
    if said.get("ok") is True or "ALREADY_PROCESSED" in codes:
        return True
    keys = [said.get("idempotencyKey"), said.get("idempotency_key"), said.get("key")]
    return key in keys and not {"ok", "error", "code", "status"} & said.keys()


def _sent(answer: Answer) -> Verdict:
    code = "CONFLICT_PROCESSED" if answer.status == 409 else ""
    return Verdict(Fate.SENT, code, "confirmed", answer.status)


def confirm_entries(
    answer: Answer, key: str, seqs: Sequence[int], now: float = 0.0
) -> tuple[Verdict, dict[int, str]]:
    """The verdict on a request of entries, and those that were refused for good with the reason."""
    if not _has_it(answer, key):
        return classify(answer, now), {}
    listed = (answer.said or {}).get("rejected") if seqs else None  # an empty request has no list
    rejected: dict[int, str] = {}
    for item in listed if isinstance(listed, list) else []:
        seq = item.get("seq") if isinstance(item, dict) else None
        if type(seq) is int and seq in seqs:
            rejected[seq] = f"{item.get('code') or 'rejected'}: {item.get('message') or ''}"
    if listed is not None and (not isinstance(listed, list) or len(rejected) != len(listed)):
        problem = "its list of rejected entries makes no sense"
        return classify(replace(answer, detail=problem), now), {}
    return _sent(answer), rejected


_FILE_URL: Final = re.compile(r"(?i)https?://[!-.0-~][!-~\u00a1-\ud7ff\ue000-\U0010ffff]{0,2040}")


def confirm_upload(answer: Answer, key: str, size: int, now: float = 0.0) -> tuple[Verdict, str]:
    """The verdict on an upload, and the URL under which the frontend has it."""
    if not _has_it(answer, key, ok=True):
        return classify(answer, now), ""
    said = answer.said or {}
    url, stored, problem = said.get("fileUrl"), said.get("sizeBytes"), ""
    if not isinstance(url, str) or not _FILE_URL.fullmatch(url):
        problem = "without a usable fileUrl"
    elif stored not in (None, size):
        problem = f"it stored {stored} of {size} bytes"
    if problem:
        return classify(replace(answer, detail=problem), now), ""
    return _sent(answer), str(url)


def confirm_length(look: Answer, size: int) -> Verdict:
    """What a HEAD says of an upload, where it can be trusted."""
    length = look.headers.get("content-length", "")
    told = look.status == 200 and length.isdigit()
    if told and length == str(size):
        return _sent(look)
    if told or look.status == 404:
        has = length if told else "none"
        found = f"SYNC_VERIFY_PATH says that it has {has} of {size} bytes"
        reason = f"stored, but not as it was sent: {found}"
        return Verdict(Fate.SUSPECT, "BAD_RESPONSE", reason, look.status)
    detail = look.detail or "SYNC_VERIFY_PATH does not tell what it has"
    return replace(classify(replace(look, detail=detail)), fate=Fate.SUSPECT)


def judge(past: Past, verdict: Verdict, config: Config, jitter: float, charge: bool = True) -> Step:
    """What becomes of one entry that failed alone.

    A suspect is charged only if others of its type got through since its last failure: without
    them nothing says that it is the entry's fault. In an outage (not `charge`) nothing dies, nor
    waits for an hour later because of it.
    """
    fate = verdict.fate
    if fate is Fate.REJECTED and (not charge or past.rejected >= REJECTED_IN_ROW):
        fate = Fate.SUSPECT
    others = 0 if past.type_sent is None else past.sent_now - past.type_sent
    charged = charge and fate is Fate.SUSPECT and others >= SENT_SINCE
    tries = past.tries + 1 if charge else max(past.tries, min(past.tries + 1, 8))
    attempts = past.attempts + charged
    long = past.waited >= config.retry_hours * HOUR
    worn_out = charged and attempts >= config.retry_max and long
    dead = fate in (Fate.REJECTED, Fate.DEAD) or worn_out
    cap = HOUR if tries > 8 else BACKOFF_CAP
    delay = min(backoff(tries, jitter, verdict.retry_after or 0.0, cap), HOUR)
    return Step(dead, tries, attempts, delay)


@dataclass
class Endpoint:
    """What the agent remembers of one of the frontend's endpoints; a restart may forget it."""

    name: str
    most: int  # entries a request
    in_row: int  # so many distinct failures without a success are an outage
    size: int = 1
    gentle: bool = False  # after a time-out it grows by a tenth, not by doubling
    hasty: bool = False  # after a time-out with the frontend alive: until one gets through
    outage: Outage | None = None
    failing: set[int] = field(default_factory=set)  # in a row, without a success between
    seen: int = 0  # the newest entry at the last try of an outage
    retry_at: float = 0.0

    def succeeded(self, number: int) -> Outage | None:
        """So many got through; the outage that this ended."""
        ended, self.outage = self.outage, None
        self.failing.clear()
        self.hasty = False
        if number >= self.size:
            grown = self.size + max(1, self.size // 10) if self.gentle else 2 * number
            self.size = min(self.most, grown)
        return ended

    def failed_together(self, number: int, verdict: Verdict) -> None:
        """A batch of several failed, and the frontend lives: fetched again, half as large."""
        self.size = max(1, number // 2)
        self.gentle = self.gentle or verdict.code in ("NETWORK_TIMEOUT", "TOO_LARGE")

    def failed_alone(self, seq: int) -> bool:
        """Whether so many in a row are an outage, whatever the empty request is told."""
        self.failing.add(seq)
        return len(self.failing) >= self.in_row

    def begin_outage(self, verdict: Verdict, now: float, jitter: float, by_entries: bool) -> Outage:
        """What came back decides when the next try is; the first one tells since when."""
        tries, since = (self.outage.tries + 1, self.outage.since) if self.outage else (1, now)
        pause = 0.0 if by_entries else verdict.retry_after or 0.0  # else it was told to an entry
        due = now + backoff(tries, jitter, pause)
        self.outage = Outage(verdict.code, verdict.reason, since, tries, due, by_entries)
        self.size, self.gentle, self.hasty = 1, False, False
        return self.outage

    def retried(self, now: float, took: float) -> None:
        """In vain. Such retries never take more than a tenth of the time."""
        self.retry_at = now + min(SHARE * took, HOUR)

    def forget(self) -> None:
        """Somebody mended something: try now. What gets through ends an outage."""
        if self.outage is not None:
            self.outage.tries, self.outage.due = 0, 0.0
        self.size, self.retry_at, self.seen = self.most, 0.0, 0
        self.gentle = self.hasty = False
        self.failing.clear()


def grace_is_over(tries: int, waited: float, grace: float) -> bool:
    """A file may be called missing: so many looks, so much of our own running time."""
    return tries + 1 >= LOOKS_MIN and waited >= grace


def human(size: float) -> str:
    for unit in ("bytes", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"


def count(number: float, word: str, plural: str = "") -> str:
    return f"{number:.10g} {word if number == 1 else plural or word + 's'}"


IDLE: Final = "idle: nothing to send"


def sentence_of(tally: Tally, outages: Sequence[Outage], now: float) -> str:
    """What was done, or why nothing was done, in one sentence; empty if there is neither."""
    parts = (
        (tally.entries, f"sent {count(tally.entries, 'entry', 'entries')}"),
        (tally.files, f"uploaded {count(tally.files, 'recording')} ({human(tally.bytes)})"),
        (tally.removed, f"removed {count(tally.removed, 'uploaded recording')} from the disk"),
        (tally.waiting, f"{count(tally.waiting, 'entry waits', 'entries wait')} for a retry"),
        (tally.dead, f"gave up {count(tally.dead, 'entry', 'entries')} (dead letters)"),
    )
    done = [words for number, words in parts if number]
    for outage in {each.reason: each for each in outages}.values():  # mostly the same for both
        wait = max(0.0, outage.due - now)
        told = f"outage since {now - outage.since:.0f} s, next try in {wait:.0f} s"
        done.append(f"{told}: {outage.reason}")
    return "; ".join(done)[:400]


# ==================================================================================================
# SQL: the schema `serversync`
# Everything of the agent's own, made or brought up to date by the one that holds the lock.
# ==================================================================================================

SCHEMA_VERSION: Final = 3

TABLES: Final = """
create table serversync.schema_version (number int primary key);

-- Confirmed uploads whose local files still exist: deletion works from this table alone. (Ids may
-- come again, TRUNCATE … RESTART IDENTITY: here and below, what stands beside them tells.)
create table serversync.uploads (
    outbox_id bigint,
    directory text not null,
    files jsonb not null,                  -- [{name, inode, size, mtime_ns}] as they were sent
    uploaded_at timestamptz not null default now(),
    tries int not null default 0,
    error text,
    root_id text,
    primary key (outbox_id, directory)
);

create table serversync.dead_letters (
    id uuid primary key default gen_random_uuid(),
    outbox_id bigint not null,
    original_topic text not null,
    entity_id uuid not null,
    payload jsonb not null,
    rest jsonb not null,                   -- the outbox row's other columns: it may come back
    error_code text not null,
    error_message text not null,
    http_status int,
    attempts int not null,
    retry_count int not null default 0,
    max_retries int not null default 3,
    status text not null default 'PENDING'
        check (status in ('PENDING', 'RETRYING', 'RESOLVED', 'DEAD')),
    created_at timestamptz not null default now(),
    updated_at timestamptz not null default now(),
    last_retry_at timestamptz,
    unique (outbox_id, entity_id)
);
create index on serversync.dead_letters (original_topic, created_at);
create index on serversync.dead_letters (outbox_id) where status = 'RETRYING';

-- A receipt for each confirmed request. Entity and call only for files: a call has one recording.
create table serversync.deliveries (
    id bigint generated always as identity primary key,
    kind text not null,
    first_seq bigint not null,
    last_seq bigint not null,
    entries int not null,
    bytes bigint not null,
    idempotency_key text,
    request_sha256 text,
    answer_sha256 text,
    http_status int,
    outcome text not null,
    started_at timestamptz not null,
    duration_ms int not null,
    entity_id uuid,
    url text,
    call_id uuid
);
create index on serversync.deliveries (started_at);
create index on serversync.deliveries (entity_id) where entity_id is not null;
create index on serversync.deliveries (call_id) where call_id is not null;

create table serversync.counters (
    name text, label text, value double precision not null, primary key (name, label)
) with (fillfactor = 50);

create table serversync.sender (
    only_row boolean primary key default true check (only_row),
    id uuid not null default gen_random_uuid(),  -- tells this database from any other
    epoch bigint not null default 0,
    device text,
    root_id text
);
insert into serversync.sender default values;
"""
# An entry has a row here while it is not simply next, and the row says why.
WAITING_TABLE: Final = """
create table serversync.waiting (
    outbox_id bigint primary key,
    entity_id uuid not null,
    entity_type text not null,
    call_id uuid,                          -- its call, so that retries never touch a payload
    is_file boolean not null,
    code text not null,
    reason text not null,
    http_status int,
    waits_for bigint,                      -- the seq that must be through first (WAITS_FOR)
    tries int not null default 0,          -- drives the backoff
    attempts int not null default 0,       -- what was charged
    type_sent bigint,                      -- how many of its type had been sent at this failure
    next_attempt_at timestamptz not null,
    in_outage boolean not null default false,
    waited double precision not null default 0,  -- seconds; each gap between two looks counts
    created_at timestamptz not null default now(),
    updated_at timestamptz not null default now()
);
create index on serversync.waiting (entity_id, outbox_id);
create index on serversync.waiting (call_id) where is_file;
create index on serversync.waiting (next_attempt_at, updated_at);
"""
# Those that name one of the backend's tables are PL/pgSQL, which plans a statement when it comes to
# it and not before: recordings and system_settings may be missing, or come later.
FUNCTIONS: Final = """
-- Text from outside as a uuid, or null.
create or replace function serversync.to_uuid(name text) returns uuid
language sql immutable parallel safe as $$
    select case when name ~* '^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$' then name::uuid end
$$;

create or replace function serversync.call_of(payload jsonb) returns uuid
language sql immutable parallel safe as $$
    select serversync.to_uuid(coalesce(payload->>'callLogId', payload->>'call_log_id'))
$$;

-- An uploaded recording says so even in an older snapshot: by the backend's row, or where that is
-- gone by our receipt.
create or replace function serversync.uploaded(recording uuid) returns jsonb
language plpgsql stable as $$
declare
    status text;
    url text;
begin
    if to_regclass('recordings') is not null then
        select r.upload_status, r.s3_url into status, url from recordings r where r.id = recording;
    end if;
    if status is null then
        select 'uploaded', d.url into status, url from serversync.deliveries d
        where d.entity_id = recording order by d.id desc limit 1;
    end if;
    return case when status = 'uploaded'
                then jsonb_build_object('uploadStatus', status, 's3Url', url) end;
end $$;

-- Whether the frontend has another recording of the same call.
create or replace function serversync.has_another(call uuid, recording uuid) returns boolean
language plpgsql stable as $$
begin
    perform from serversync.deliveries d where d.call_id = call and d.entity_id <> recording;
    if not found and to_regclass('recordings') is not null then
        perform from recordings r
        where r.call_log_id = call and r.upload_status = 'uploaded' and r.id <> recording;
    end if;
    return found;
end $$;

-- What the backend sees of a recording; one that is uploaded stays so.
create or replace function serversync.show_recording(recording uuid, status text, url text)
returns void language plpgsql as $$
begin
    if to_regclass('recordings') is not null then
        update recordings r set upload_status = status, s3_url = coalesce(url, r.s3_url)
        where r.id = recording and (status = 'uploaded' or r.upload_status <> 'uploaded');
    end if;
end $$;

create or replace function serversync.sync_interval(out seconds double precision)
language plpgsql stable as $$
begin
    if to_regclass('system_settings') is not null then
        select case when jsonb_typeof(extra->'syncIntervalSec') = 'number' then
            greatest(-1, least((extra->>'syncIntervalSec')::numeric, 1e6))::float8 end
        into seconds from system_settings where id = 1;
    end if;
end $$;
"""
# What version 1 has, and wrote down: `failures` was what is `waiting` now, and stand-ins (always
# empty) took the place of the backend's tables. `call_of_row` survives a payload that cannot be
# read: an installation with a corrupt row can be brought up to date, too.
FROM_VERSION_1: Final = """
create function serversync.call_of_row(seq bigint) returns uuid language plpgsql stable as $$
begin
    return (select serversync.call_of(payload) from sync_outbox where id = seq);
exception when others then
    return null;
end $$;

insert into serversync.waiting (outbox_id, entity_id, entity_type, call_id, is_file, code, reason,
    http_status, tries, attempts, next_attempt_at, waited, created_at, updated_at)
select f.outbox_id, o.entity_id, f.entity_type, serversync.call_of_row(f.outbox_id), f.is_file,
       f.error_code, f.error, f.http_status, f.tries, f.attempts, f.next_attempt_at,
       greatest(f.waited, extract(epoch from now() - f.first_failed_at)), f.first_failed_at,
       f.updated_at
from serversync.failures f
join sync_outbox o on o.id = f.outbox_id and o.processed_at is null;

alter table serversync.dead_letters drop constraint dead_letters_outbox_id_key,
    add unique (outbox_id, entity_id);
alter table serversync.uploads drop constraint uploads_pkey, add primary key (outbox_id, directory),
    add root_id text, drop file_url;
update serversync.uploads set root_id = (select root_id from serversync.sender);
alter table serversync.deliveries drop lane, add call_id uuid;
update serversync.deliveries set call_id = serversync.call_of_row(first_seq) where kind = 'file';
create index on serversync.deliveries (call_id) where call_id is not null;

drop table serversync.failures, serversync.revived, serversync.recordings,
    serversync.system_settings;
drop function serversync.call_of_row, serversync.entry, serversync.lane, serversync.locked;
"""
# By the version that is there (0: none), what makes it this one; the other rooms add what only they
# need. Several statements, all or none.
_NUMBERED: Final = f"insert into serversync.schema_version values ({SCHEMA_VERSION});"
MIGRATIONS: Final = {
    0: TABLES + WAITING_TABLE + FUNCTIONS + _NUMBERED,
    1: WAITING_TABLE + FUNCTIONS + FROM_VERSION_1 + _NUMBERED,
    2: _NUMBERED,
}

# ==================================================================================================
# SQL: statements
# Whole, named, each with what it does, its lock and its index. "Pending" is processed_at is null.
# ==================================================================================================

LOCK_KEY: Final = 0x7365727673796E63  # "servsync"; an advisory lock counts for one database

# Settles the session: a silent peer is noticed; a lock is waited for less long than the backend's
# deadlock_timeout.
SESSION: Final = """
select set_config('timezone', 'UTC', false),
       set_config('datestyle', 'ISO', false),
       set_config('statement_timeout', '18s', false),
       set_config('lock_timeout', '400ms', false),
       set_config('jit', 'off', false),  -- it takes 250 ms for what then takes 2
       set_config('tcp_keepalives_idle', '20', false),
       set_config('tcp_keepalives_interval', '5', false),
       set_config('tcp_keepalives_count', '4', false)
"""
# Who this session is, so that a later one can end it.
IDENTITY: Final = "select pid, backend_start from pg_stat_activity where pid = pg_backend_pid()"
# Ends our previous session: half-open, it would hold the lock for hours.
END_PREVIOUS: Final = """
select pg_terminate_backend(pid) from pg_stat_activity
where pid = %(pid)s and backend_start = %(start)s and usename = current_user
"""
# The try form: the blocking one would pin xmin for as long as the standby waits.
TRY_LOCK: Final = "select pg_try_advisory_lock(%(key)s::bigint)"
# What is there, and which rights this role lacks on it. No lock.
RIGHTS: Final = """
select outbox is not null, recordings::text, to_regnamespace('serversync') is not null,
       to_regclass(case when has_schema_privilege(to_regnamespace('serversync'), 'usage')
                        then 'serversync.schema_version' end) is not null,
       quote_ident(current_user), current_database()::text,
       array_remove(array[
           case when not (has_table_privilege(outbox, 'select')
                          and has_column_privilege(outbox, 'processed_at', 'update'))
                then 'select, update (processed_at) on sync_outbox' end,
           case when not (has_table_privilege(recordings, 'select')
                          and has_column_privilege(recordings, 'upload_status', 'update')
                          and has_column_privilege(recordings, 's3_url', 'update'))
                then 'select, update (upload_status, s3_url) on recordings' end,
           case when not has_table_privilege(settings, 'select')
                then 'select on system_settings' end], null),
       current_setting('server_encoding')
from (select to_regclass('sync_outbox') as outbox, to_regclass('recordings') as recordings,
             to_regclass('system_settings') as settings) backend
"""
VERSION: Final = "select coalesce(max(number), 0) from serversync.schema_version"
# A new holder of the lock: results of an older epoch are worth nothing. Durable, whatever the
# database's default: an epoch that a power cut takes back would come twice.
TAKE_OVER: Final = """
update serversync.sender set epoch = epoch + 1, device = %(device)s
from (select set_config('synchronous_commit', 'on', true)) durable
returning sender.id::text, epoch, root_id
"""
ADOPT_ROOT: Final = "update serversync.sender set root_id = %(root_id)s"

# The hot index and the wake-up. Optional: without them slower, and polling only.
OUTBOX: Final = "to_regclass('sync_outbox')"
INDEX_STATE: Final = f"""
select indisvalid from pg_index join pg_class on pg_class.oid = indexrelid
where indrelid = {OUTBOX} and relname = 'sync_outbox_serversync_pending'
"""
DROP_INDEX: Final = "drop index concurrently if exists sync_outbox_serversync_pending"
# CONCURRENTLY: a plain one would block the backend's INSERT.
CREATE_INDEX: Final = """
create index concurrently sync_outbox_serversync_pending on sync_outbox (id)
where processed_at is null
"""
# One that is disabled was disabled by somebody who meant it.
TRIGGER_STATE: Final = f"""
select tgenabled <> 'D'
from pg_trigger join pg_class c on c.oid = tgrelid join pg_proc p on p.oid = tgfoid
where tgrelid = {OUTBOX} and tgname = 'serversync_wake'
  and (tgenabled = 'D' or (p.proowner, p.pronamespace) = (c.relowner, c.relnamespace))
"""
# Who owns a function rules its callers: ours are the outbox's owner's (%2$I), beside it (%1$I).
BESIDE: Final = f"""
select format(%(sql)s::text, n.nspname, pg_get_userbyid(relowner), coalesce(%(role)s, current_user))
from pg_class c join pg_namespace n on n.oid = c.relnamespace where c.oid = {OUTBOX}
"""
# A constant payload: PostgreSQL folds a transaction's notifications into one. A trigger that fails
# would end the backend's transaction: whatever goes wrong here, the call can still end.
CREATE_TRIGGER: Final = """
create or replace function %1$I.serversync_wake() returns trigger
language plpgsql set search_path = pg_catalog, pg_temp as $$ begin
    perform pg_notify('serversync', ''); return null;
exception when others then return null; end $$;
alter function %1$I.serversync_wake() owner to %2$I;
drop trigger if exists serversync_wake on %1$I.sync_outbox;
create trigger serversync_wake after insert on %1$I.sync_outbox
for each statement execute function %1$I.serversync_wake();
do $$ begin drop routine if exists serversync.wake() cascade;
exception when others then null; end $$
"""

# What the statements below share. `o` is a row of the outbox, `w` one of `waiting`.
PENDING_ENTRY: Final = "o.processed_at is null and o.entity_type <> 'recording_file'"
PENDING_FILE: Final = "o.processed_at is null and o.entity_type = 'recording_file'"
IN_PASS: Final = "o.id > %(after)s::bigint and o.id <= %(until)s::bigint"
CALL: Final = "serversync.call_of(o.payload)"
CALL_ID: Final = "left(coalesce(payload->>'callId', payload->>'call_id'), 1024)"
FILE_PATH: Final = "left(coalesce(payload->>'filePath', payload->>'file_path'), 4096)"
RECORDING: Final = """serversync.to_uuid(
    coalesce(payload->>'recordingId', payload->>'recording_id', entity_id::text))"""
# What `w` (or a letter) is about is pending still.
HAS_ENTRY: Final = """exists (
    select from sync_outbox o
    where o.id = w.outbox_id and o.entity_id = w.entity_id and o.processed_at is null)"""
READABLE: Final = """
    o.id not in (select outbox_id from serversync.waiting where code = 'ROW_CORRUPT')"""
NO_ROW: Final = "not exists (select from serversync.waiting w where w.outbox_id = o.id)"
# How long a row has waited. Of the time since it was looked at last ten minutes count at most, of a
# recording that is not ready one: a clock that was stepped kills nothing, and `once` counts, too.
WAITED: Final = """
    coalesce(w.waited + least(case w.code when 'NOT_READY' then 60 else 600 end,
             greatest(0, extract(epoch from now() - w.updated_at))), 0)::float8"""


def _first(entity: str, call: str, before: str) -> str:
    """The seq that must be through first: of its entity's that wait the first, or of its call's
    own; if that waits, too, the one for which it does. None: null. (Look-ups, not anti-joins: their
    plan does not change with what the tables hold.)"""
    look_up = """(
        select coalesce(e.waits_for, e.outbox_id) from serversync.waiting e
        where e.entity_id = {} and e.outbox_id {} and not e.is_file
        order by e.outbox_id limit 1)"""
    return f"coalesce({look_up.format(entity, before)}, {look_up.format(call, before)})"


def _may_go(row: str, seq: str, call: str) -> str:
    """It is not confirmed already (a lock keeps that from being written down), and would not write
    over a recording whose file travels, until that is written down."""
    return f"""{row}.{seq} <> all (%(skip)s::bigint[])
  and not (%(travels)s::uuid[] <> '{{}}' and {row}.entity_type = 'recording'
           and array[{row}.entity_id, {call}] && %(travels)s::uuid[])"""


# All in one statement: the only one of an idle agent. Partial indexes. In order, not by `exists`:
# the planner would look through the table from its beginning.
LOOK: Final = f"""
select serversync.sync_interval(),
       (select o.id from sync_outbox o where {PENDING_ENTRY} order by o.id limit 1) is not null,
       (select o.id from sync_outbox o where {PENDING_FILE} order by o.id limit 1) is not null,
       exists (select from serversync.waiting)
           or exists (select from serversync.dead_letters where status = 'RETRYING'),
       not coalesce(({INDEX_STATE}), false) or not exists ({TRIGGER_STATE})
"""
# Letters whose entry vanished while it was retried; a due time more than an hour ahead (a clock
# that was wrong); rows that count no more, for their entry is through, gone or another one; then
# those that waited for them. Several statements, all or none.
SWEEP: Final = f"""
update serversync.dead_letters w set status = 'PENDING', updated_at = now()
where w.status = 'RETRYING' and not {HAS_ENTRY};
update serversync.waiting set next_attempt_at = now()
where next_attempt_at > now() + interval '1 hour' and next_attempt_at < 'infinity';
delete from serversync.waiting w where not {HAS_ENTRY};
delete from serversync.waiting w
where w.code = 'WAITS_FOR'
  and not exists (select from serversync.waiting e where e.outbox_id = w.waits_for)
"""
# Somebody says "try now": all is due. The end of an outage: what failed during it is, but for what
# was told its time.
MAKE_DUE: Final = """
update serversync.waiting set next_attempt_at = now(), in_outage = false
where next_attempt_at < 'infinity' and (%(everything)s or in_outage and code <> 'RATE_LIMITED')
"""
# Where a pass ends: what is inserted later waits for the next one. Else it could overtake an older
# entry of its call that became visible behind the pass.
# (Not by max(): with statistics of an idle box that reads all that is pending.)
LAST: Final = "select id from sync_outbox where processed_at is null order by id desc limit 1"
# One plan for many batches, made of the tables as they are then: to plan each anew costs as much as
# to carry it out. A pass begins with new ones: a plan of an empty table is of no use to a full one.
NEW_PLANS: Final = "set plan_cache_mode = force_generic_plan; discard plans"
# The next pending entry, or recording, without a row; never touches a payload: it may be corrupt.
NEXT_ID: Final = f"""
select o.id from sync_outbox o
where o.processed_at is null and (o.entity_type = 'recording_file') = %(files)s::boolean
  and {IN_PASS} and o.id <> all (%(skip)s::bigint[]) and {NO_ROW}
order by o.id limit 1
"""


def _write_out(which: str) -> str:
    """The next batch as finished JSON. No row lock is taken; the partial index gives the order.
      picked    the entries, each with the stored size up to it: a first cut by that, so that large
                payloads are not all written out
      written   the entries as text (`offset 0`: once, not once for each use; one concat(), as ||
                copies the text each time)
      measured  with a running total: the batch ends at so many bytes
    A first entry that is larger comes alone; without its text if it is larger than may be. The
    index's order is kept all the way up: `order by` in `measured` and the aggregates would sort."""
    return f"""
with picked as (
    select o.*, pg_column_size(o.payload) as stored,
           sum(pg_column_size(o.payload)) over (order by id rows unbounded preceding) as up_to
    from (select null::text as op) as absent  -- `op` below is the outbox's, where it has one
    cross join lateral (
        select id, entity_type, entity_id, payload, created_at, op::text as op
        from sync_outbox o where {which}
        order by id limit %(size)s::int) as o
), written as (
    select id, entry, coalesce(octet_length(entry), stored) as size
    from (select id, stored, case when stored <= %(most)s::bigint then concat(
              '{{"entityType":', to_json(entity_type), ',"entityId":"', entity_id, '","payload":',
              coalesce(payload || case when entity_type = 'recording'
                                        and jsonb_typeof(payload) = 'object'
                                       then serversync.uploaded(entity_id) end, payload),
              ',"createdAt":', to_json(created_at), ',"seq":', id,
              case when op is not null then concat(',"op":', to_json(op)) end, '}}') end as entry
          from picked where up_to - stored < %(bytes)s::bigint offset 0) as each
    offset 0
), measured as (
    select id, entry, size, sum(size + 1) over (rows unbounded preceding) - 1 as total
    from written
)
select string_agg(id::text, ','), max(size),
       case when max(size) <= %(most)s::bigint then
           '{{"entries":[' || string_agg(entry, ',') || ']}}' end
from measured where total <= %(bytes)s::bigint or total = size
"""


# Those that neither have a row nor depend on one that has.
FETCH: Final = _write_out(f"""{PENDING_ENTRY} and {IN_PASS} and {_may_go("o", "id", CALL)}
  and (not exists (select from serversync.waiting)
       or {_first("o.entity_id", CALL, "<= o.id")} is null)""")
FETCH_ALONE: Final = _write_out("o.processed_at is null and o.id = %(seq)s::bigint")
# What a batch passed over gets its row: later ones of the same entity must wait for it, too. The
# first of the chain is named: when that is through, all that wait for it are free at once.
HOLD_BACK: Final = f"""
insert into serversync.waiting (outbox_id, entity_id, entity_type, call_id, is_file, code, reason,
                                waits_for, next_attempt_at)
select id, entity_id, entity_type, call, false, 'WAITS_FOR', 'waits for seq ' || first, first,
       'infinity'
from (
    select o.id, o.entity_id, o.entity_type, {CALL} as call,
           {_first("o.entity_id", CALL, "< o.id")} as first
    from sync_outbox o
    where {PENDING_ENTRY} and {IN_PASS} and {NO_ROW}
    offset 0  -- what has a row is left out first: the look-ups cost 10 us each
) held
where first is not null
returning 1
"""
# The retry that is due first, and in how many seconds: none that an earlier one of its entity, or
# its call's own, must go before. Never touches a payload.
NEXT_RETRY: Final = f"""
select w.outbox_id, greatest(0, extract(epoch from w.next_attempt_at - now()))::float8
from serversync.waiting w
where w.is_file = %(files)s::boolean and w.next_attempt_at < 'infinity'
  and (%(before)s::timestamptz is null or w.updated_at < %(before)s::timestamptz)
  and {_may_go("w", "outbox_id", "w.call_id")}
  and (w.is_file or {_first("w.entity_id", "w.call_id", "< w.outbox_id")} is null)
order by w.next_attempt_at, w.updated_at limit 1
"""
# The newest entry that nothing unsent precedes, of the newest hundred: what fails stands together,
# and is old. One pass over what is pending.
NEWEST_FREE: Final = f"""
with newest as materialized (
    select o.id, o.entity_id, {CALL} as call from sync_outbox o
    where {PENDING_ENTRY} and {_may_go("o", "id", CALL)} and {NO_ROW}
    order by o.id desc limit 100
), earliest as materialized (
    select o.entity_id, min(o.id) as id from sync_outbox o
    where {PENDING_ENTRY}
      and o.entity_id in (select entity_id from newest union select call from newest)
    group by 1
)
select max(n.id) from newest n
where not exists (select from earliest e where e.entity_id in (n.entity_id, n.call) and e.id < n.id)
"""

# All that is known of one recording, and the earlier entry that must be through before: its
# recording's or its call's own, never an event's; or an earlier recording of the same call.
READ_FILE: Final = f"""
with file as (
    select id, entity_id, {FILE_PATH} as file_path, {CALL_ID} as call_id, {CALL} as call,
           {RECORDING} as recording
    from sync_outbox o where {PENDING_FILE} and id = %(seq)s::bigint
)
select o.id, coalesce(o.call::text, ''), coalesce(o.recording::text, ''), o.file_path, o.call_id,
       coalesce(w.tries, 0), {WAITED},
       serversync.uploaded(o.recording) is not null, serversync.has_another(o.call, o.recording),
       least({_first("o.recording", "o.call", "< o.id")},
             (select min(e.outbox_id) from serversync.waiting e  -- else the first were the second
              where e.call_id = o.call and e.outbox_id < o.id and e.is_file)),
       w.outbox_id is null and exists (
        select from sync_outbox e
        where e.processed_at is null and e.id < o.id and e.entity_type <> 'recording_file'
          and e.entity_id in (o.recording, o.call) and e.id <> all (%(skip)s::bigint[]))
from file o
left join serversync.waiting w on w.outbox_id = o.id and w.entity_id = o.entity_id
"""
# Confirmed uploads whose files are still here.
UPLOADS: Final = """
select outbox_id, directory, files, tries, root_id from serversync.uploads
where outbox_id > %(after)s::bigint order by outbox_id limit %(limit)s::int
"""
# Who else may name a file of this directory: pending recordings, those given up, other uploads. The
# exact look is the agent's.
RIVALS: Final = f"""
select path, call, pending
from (select {FILE_PATH} as path, {CALL_ID} as call, true as pending
      from sync_outbox o where {PENDING_FILE} and {READABLE}
      union all
      select {FILE_PATH}, {CALL_ID}, false from serversync.dead_letters
      where original_topic = 'recording_file' and status <> 'RESOLVED'
      union all
      select null, directory, false from serversync.uploads where outbox_id <> %(seq)s) rival
where position(%(directory)s in coalesce(path, '')) > 0 or call = %(directory)s
"""
FORGET_UPLOAD: Final = """
delete from serversync.uploads where outbox_id = %(seq)s and directory = %(directory)s
"""
DELETION_FAILED: Final = """
update serversync.uploads set tries = tries + 1, error = %(error)s
where outbox_id = %(seq)s and directory = %(directory)s
"""

# All that decides what becomes of one entry that failed. A payload that may be corrupt is not read.
PAST: Final = f"""
select o.entity_type,
       (case when w.outbox_id is not null then w.call_id
             when %(readable)s::boolean then {CALL} end)::text,
       coalesce(w.tries, 0), coalesce(w.attempts, 0), w.type_sent, {WAITED},
       coalesce(sent.value, 0)::bigint, coalesce(deaths.value, 0)::int
from sync_outbox o
left join serversync.waiting w on w.outbox_id = o.id and w.entity_id = o.entity_id
left join serversync.counters sent on sent.name = 'sent' and sent.label = o.entity_type
left join serversync.counters deaths
    on deaths.name = 'deaths_in_row' and deaths.label = o.entity_type
where o.id = %(seq)s::bigint and o.processed_at is null
"""
# A confirmed request: marked, its rows and letters settled, receipt and counters, all or nothing.
# Row locks on the entries; a second run (after a lost COMMIT) changes nothing. `is true`: else a
# stale plan would walk the backend's own index of pending rows.
CONFIRM: Final = """
with sent as (
    update sync_outbox set processed_at = now()
    where id = any (%(seqs)s::bigint[]) and (processed_at is null) is true
    returning id, entity_type, entity_id,
        case when isfinite(created_at)  -- date_part: extract() is numeric, and slow
        then greatest(0, date_part('epoch', now() - created_at)) else 0 end as lag
), settled as (
    delete from serversync.waiting
    where outbox_id = any (%(seqs)s::bigint[]) and exists (select from serversync.waiting)
    returning outbox_id, tries
), tally as materialized (  -- all that is counted of the entries, in one pass over them
    select entity_type, width_bucket(lag, '{1,5,30,60,300,3600,86400}'::float8[]) as bucket,
           coalesce(tries, 0) as tries, count(*) as entries, sum(lag) as lag,
           min(id) as first, max(id) as last
    from sent left join settled on outbox_id = id group by 1, 2, 3
), total as materialized (
    select sum(entries)::bigint as entries, sum(lag) as lag, sum(tries * entries) as tries,
           min(first) as first, max(last) as last
    from tally having count(*) > 0
), resolved as (
    update serversync.dead_letters d set status = 'RESOLVED', updated_at = now()
    from sent s
    where exists (select from serversync.dead_letters)  -- else not even looked for
      and d.outbox_id = s.id and d.entity_id = s.entity_id and d.status <> 'RESOLVED'
), accepted as (
    delete from serversync.counters
    where name = 'deaths_in_row' and label in (select entity_type from tally)
), receipt as (
    insert into serversync.deliveries (kind, first_seq, last_seq, entries, bytes, idempotency_key,
        request_sha256, answer_sha256, http_status, outcome, started_at, duration_ms, call_id,
        entity_id, url)
    select %(kind)s, first, last, entries, %(bytes)s::bigint, %(key)s, %(request_sha256)s::text,
           %(answer_sha256)s, %(status)s::int, %(outcome)s,
           clock_timestamp() - %(seconds)s::float8 * interval '1 second',
           %(seconds)s::float8 * 1000, %(call_log_id)s::uuid, %(entity_id)s::uuid, %(url)s::text
    from total
), counted as (
    insert into serversync.counters as c (name, label, value)
    select 'sent', entity_type, sum(entries) from tally group by entity_type
    union all select 'lag', bucket::text, sum(entries) from tally group by bucket
    union all select 'tries', least(tries, 9)::text, sum(entries) from tally group by 2
    union all select 'sent_as', %(outcome)s, entries from total
    union all select 'lag_sum', '', lag from total
    union all select 'tries_sum', '', tries from total where tries > 0
    union all select 'upload_bytes', '', %(bytes)s::bigint from total where %(kind)s = 'file'
    on conflict (name, label) do update set value = c.value + excluded.value
)
select coalesce((select entries from total), 0)
"""
# With the CONFIRM of a recording, in one transaction that survives a power cut, whatever the
# database's default: what is to be deleted now, and what the backend sees. Not of an entry that
# somebody else took away.
KEEP_UPLOAD: Final = """
with kept as (
    insert into serversync.uploads (outbox_id, directory, files, root_id)
    select o.id, %(directory)s::text, %(files)s::jsonb, s.root_id
    from sync_outbox o cross join serversync.sender s
    where o.id = any (%(seqs)s::bigint[]) and o.processed_at is not null
    on conflict (outbox_id, directory) do update set files = excluded.files,
        root_id = excluded.root_id, uploaded_at = now(), tries = 0, error = null
    returning 1
)
select serversync.show_recording(%(entity_id)s::uuid, 'uploaded', %(url)s)
from (select set_config('synchronous_commit', 'on', true)) durable cross join kept
"""
# An entry that failed and waits.
SET_WAITING: Final = f"""
with counted as (
    insert into serversync.counters as c (name, label, value)
    select 'retries', %(code)s, 1 where not exists (  -- once, also after a lost COMMIT
        select from serversync.waiting where outbox_id = %(seq)s and tries >= %(tries)s)
    on conflict (name, label) do update set value = c.value + 1
)
insert into serversync.waiting as w (outbox_id, entity_id, entity_type, call_id, is_file, code,
    reason, http_status, waits_for, tries, attempts, type_sent, next_attempt_at, in_outage)
select id, entity_id, entity_type, %(call_id)s::uuid, entity_type = 'recording_file', %(code)s,
       %(reason)s, %(status)s::int, %(waits_for)s::bigint, %(tries)s, %(attempts)s,
       %(type_sent)s::bigint, case when %(waits_for)s::bigint is not null then 'infinity'
       else now() + %(delay)s::float8 * interval '1 second' end, %(in_outage)s
from sync_outbox where id = %(seq)s and processed_at is null
on conflict (outbox_id) do update set entity_id = excluded.entity_id, code = excluded.code,
    reason = excluded.reason, http_status = excluded.http_status, waits_for = excluded.waits_for,
    tries = excluded.tries, attempts = excluded.attempts, type_sent = excluded.type_sent,
    next_attempt_at = excluded.next_attempt_at, in_outage = w.in_outage or excluded.in_outage,
    waited = {WAITED}, updated_at = now()
"""
# An entry that is given up. It leaves the hot index in the same transaction, payload and all; a
# dead recording is shown as failed, unless it is uploaded.
BURY: Final = f"""
with dead as (
    update sync_outbox set processed_at = now() where id = %(seq)s and processed_at is null
    returning id, entity_type, entity_id, payload,
              to_jsonb(jsonb_populate_record(sync_outbox, '{{"payload": null}}'))
                  - 'payload' - 'processed_at' as rest
), settled as (
    delete from serversync.waiting where outbox_id = %(seq)s
), counted as (
    insert into serversync.counters as c (name, label, value)
    select 'dead', entity_type, 1 from dead
    union all select 'deaths_in_row', entity_type, 1 from dead where %(blamed)s::boolean
    on conflict (name, label) do update set value = c.value + 1
), letter as (
    insert into serversync.dead_letters as d (outbox_id, original_topic, entity_id, payload, rest,
        error_code, error_message, http_status, attempts)
    select id, entity_type, entity_id, payload, rest, %(code)s, %(reason)s, %(status)s::int,
           %(attempts)s
    from dead
    on conflict (outbox_id, entity_id) do update set
        retry_count = d.retry_count + (d.status = 'RETRYING')::int, updated_at = now(),
        status = case when d.retry_count + (d.status = 'RETRYING')::int >= d.max_retries
                      then 'DEAD' else 'PENDING' end,
        error_code = excluded.error_code, error_message = excluded.error_message,
        http_status = excluded.http_status, attempts = excluded.attempts
)
select serversync.show_recording({RECORDING}, 'upload_failed', null)
from dead where entity_type = 'recording_file'
"""
# Old rows, in chunks: processed ones only, and nothing while the clock is behind the last receipt.
# By the primary key, up to the last row that an old receipt or letter names: where nothing is old
# nothing is read. `pruned_until` tells a retry what may have been forgotten.
PRUNE: Final = """
with old as (
    select now() - %(days)s::float8 * interval '1 day' as age
    from (select started_at from serversync.deliveries order by id desc limit 1) last
    where now() >= last.started_at
), rows as (
    delete from sync_outbox where processed_at is not null and id in (
        select id from sync_outbox
        where id <= greatest((select max(last_seq) from serversync.deliveries
                              where started_at < (select age from old)),
                             (select max(outbox_id) from serversync.dead_letters
                              where created_at < (select age from old)))
          and processed_at < (select age from old)
        order by id limit 1000)
    returning 1
), noted as (
    insert into serversync.counters as c (name, label, value)
    select 'pruned_until', '', extract(epoch from age) from old where exists (select from rows)
    on conflict (name, label) do update set value = greatest(c.value, excluded.value)
), receipts as (
    delete from serversync.deliveries where id in (
        select id from serversync.deliveries
        where started_at < (select age from old)
          and not exists (select from rows)  -- they tell where the old rows end
        order by id limit 1000)
    returning 1
), letters as (
    delete from serversync.dead_letters
    where status = 'RESOLVED' and updated_at < (select age from old)
    returning 1
)
select (select count(*) from rows), (select count(*) from receipts),
       (select count(*) from letters)
"""

# ==================================================================================================
# Store
# One connection that holds the lock, LISTENs and does all the work; and what the jobs ask of it.
# ==================================================================================================

DB_DEADLINE: Final = 20.0  # above statement_timeout: the server's own words are better than ours
INDEX_DEADLINE: Final = 600.0
CORRUPT: Final = ("XX000", "XX001", "XX002")
LOCKED: Final = ("55P03", "57014")  # somebody holds a row: later
RESULTS_ASIDE: Final = 8  # so many may wait for a lock, before nothing else is sent
BODY_FRAME: Final = b'{"entries":[]}'  # the empty request, and what stands around the entries
# What the agent makes of the backend's outbox: whether it is there, and how it is made.
OPTIONAL: Final = [
    ("index", f"select coalesce(({INDEX_STATE}), false)", [DROP_INDEX, CREATE_INDEX]),
    ("NOTIFY trigger", f"select exists ({TRIGGER_STATE})", [CREATE_TRIGGER]),
]


class Hot:
    """A statement of every batch, as libpq's own prepared one: by a cursor, prepared or not, the
    whole of a batch would take a twelfth longer."""

    def __init__(self, name: str, sql: str) -> None:
        self.name = name.encode()
        self.params = list(dict.fromkeys(re.findall(r"%\((\w+)\)s", sql)))
        numbers = {param: f"${number}" for number, param in enumerate(self.params, 1)}
        self.prepare = f"prepare {name} as {sql % numbers}"

    def run(self, session: Session, params: Mapping[str, object]) -> list[bytes]:
        """Its row, as binary. (psycopg waits: a signal ends no wait inside libpq.)"""
        texts = [self._text(params[name]) for name in self.params]
        with session.session() as conn:
            conn.pgconn.send_query_prepared(
                self.name, texts, result_format=psycopg.pq.Format.BINARY
            )
            result = conn.wait(generators.execute(conn.pgconn))[-1]
            if result.status == psycopg.pq.ExecStatus.FATAL_ERROR:
                raise psycopg.errors.error_from_result(result)
        return [result.get_value(0, column) or b"" for column in range(result.nfields)]

    @staticmethod
    def _text(value: object) -> bytes | None:
        if isinstance(value, list):
            value = "{" + ",".join(map(str, value)) + "}"
        return None if value is None else str(value).encode()


HOT_FETCH: Final = Hot("serversync_fetch", FETCH)
HOT_FETCH_ALONE: Final = Hot("serversync_fetch_alone", FETCH_ALONE)
HOT_CONFIRM: Final = Hot("serversync_confirm", CONFIRM)


class Session:
    """The connection: made, locked, watched, and given up when it is lost."""

    def __init__(self, url: str, device: str, process: Process) -> None:
        self.url, self.device, self.process = url, device, process
        self.conn: psycopg.Connection[Any] | None = None
        self.locked = False
        self.generation = 0  # another sender came between: older results are worth nothing
        self.root_id: str | None = None
        self._epoch = ("", 0)  # of this database
        self._identity: dict[str, Any] = {}
        self._calls: list[object] = []
        self._hints: list[str] = []

    def connect(self) -> None:
        """A new session, after the end of the previous one. Raises Unavailable."""
        try:
            where = conninfo_to_dict(self.url)
            with self.process.deadline(DB_DEADLINE, None):
                look_up(str(where.get("hostaddr") or where.get("host") or ""))
                self.conn = psycopg.connect(
                    self.url,
                    autocommit=True,
                    connect_timeout=10,
                    client_encoding="UTF8",
                    prepare_threshold=None,
                    fallback_application_name="serversync",
                )
            self.conn.add_notify_handler(self._calls.append)
            self.run(SESSION)
            if self._identity and self.run(END_PREVIOUS, **self._identity):
                time.sleep(0.2)  # until its lock is free
            self._identity = dict(zip(("pid", "start"), self.run(IDENTITY)[0], strict=True))
        except (psycopg.Error, Lost, OSError, UnicodeError) as error:
            self.process.check()
            why = str(error) or "it does not answer"
            raise Unavailable(f"the database is not there: {why}") from None

    def use(self, url: str, device: str) -> None:
        """Another URL or name: from the next connection on. A result that waits stays valid only
        if it is the same database still."""
        if (self.url, self.device) != (url, device):
            self.close()
            self.url, self.device = url, device

    def close(self) -> None:
        if self.conn is not None:
            self.conn.close()
        self.conn, self.locked = None, False

    @contextlib.contextmanager
    def session(self, seconds: float = DB_DEADLINE) -> Iterator[psycopg.Connection[Any]]:
        """The connection for several statements, within one deadline. Tells a lost connection
        (Lost) from a statement that failed (psycopg.Error)."""
        if self.conn is None:
            raise Lost
        conn = self.conn
        try:
            with self.process.deadline(seconds, partial(shut_socket, conn.fileno())):
                yield conn
        except (psycopg.Error, OSError) as error:
            # conn.closed stays False after the server ended the session: ask libpq.
            if conn.pgconn.status != psycopg.pq.ConnStatus.OK:
                self.close()
                raise Lost(str(error)) from None
            raise

    def run(self, sql: str, limit: float = DB_DEADLINE, /, **params: Any) -> list[tuple[Any, ...]]:
        """One statement, in a transaction of its own. Raises Lost or psycopg.Error."""
        with self.session(limit) as conn:
            cursor = conn.execute(sql, params or None, binary=bool(params))
            return [] if cursor.rownumber is None else cursor.fetchall()

    def take_lock(self) -> bool:
        """True when this session is the one sender. Then, and only then, the schema is made."""
        if not self.run(TRY_LOCK, key=LOCK_KEY)[0][0]:
            return False
        self.prepare()
        for statement in (HOT_FETCH, HOT_FETCH_ALONE, HOT_CONFIRM):
            self.run(statement.prepare)
        self.run("listen serversync")
        database, epoch, self.root_id = self.run(TAKE_OVER, device=self.device)[0]
        if self._epoch != (database, epoch - 1):
            self.generation += 1
        self._epoch = (database, epoch)
        self.locked = True
        return True

    def prepare(self) -> None:
        """Makes what is the agent's own; says what is missing of the rest."""
        outbox, recordings, schema, ours, role, name, missing, encoding = self.run(RIGHTS)[0]
        if not outbox:
            raise Unavailable(f"database {name} has no table sync_outbox: is it the backend's?")
        if encoding not in ("UTF8", "SQL_ASCII"):
            raise ConfigError([f"database {name}: its encoding is {encoding}, it must be UTF8"])
        who, how = f"database {name}: role {role}", "run: sudo serversync setup"
        if missing:
            raise ConfigError([f"{who} lacks {what}: {how}" for what in missing])
        try:
            if not schema:
                self.run("create schema serversync")
            known = self.run(VERSION)[0][0] if ours else 0
            if known < SCHEMA_VERSION:
                self.run("set local statement_timeout = 0;" + MIGRATIONS[known], INDEX_DEADLINE)
                now = f"schema serversync is now at version {SCHEMA_VERSION}"
                say(logging.INFO, "migrated", now)
        except psycopg.errors.InsufficientPrivilege:
            raise ConfigError([f"{who} may not make its tables: {how}"]) from None
        if known > SCHEMA_VERSION:
            newer = f"the schema serversync is of a newer version ({known}) than this program"
            raise ConfigError([newer])
        hints = self.make_optional()
        if recordings is None:
            hints.append("there is no table recordings: none is marked as uploaded")
        if hints and hints != self._hints:
            say(logging.WARNING, "reduced", f"going on with less: {'; '.join(hints)}")
        self._hints = hints

    def make_optional(self) -> list[str]:
        """Index and trigger, where the role may; where not, why. While one of them waits for the
        table, the backend's INSERT waits behind it: a second at most."""
        hints = []
        for what, is_there, statements in OPTIONAL:
            if self.run(is_there)[0][0]:
                continue
            self.run("set lock_timeout = '1s'; set statement_timeout = 0")
            try:
                for statement in statements:
                    for (sql,) in self.run(BESIDE, sql=statement, role=None):
                        self.run(sql, INDEX_DEADLINE)
            except psycopg.Error as error:
                hints.append(f"no {what}: {error.diag.message_primary or error}")
            self.run(SESSION)  # its limits again
        return hints

    def news(self) -> bool:
        """Whether somebody called since this was asked last. It never waits; a session that was
        ended shows here (Lost): others send now."""
        with self.session() as conn:
            conn.pgconn.consume_input()
            while call := conn.pgconn.notifies():
                self._calls.append(call)
        called = bool(self._calls)
        self._calls.clear()
        return called


@dataclass(frozen=True)
class Look:
    interval: float | None
    entries: bool
    files: bool
    waiting: bool
    lacking: bool  # the index or the trigger


class Store:
    def __init__(self, session: Session) -> None:
        self.session = session
        self.run = session.run
        self.rows = True  # there may be some in `waiting`
        self.before: datetime | None = None  # `once` retries what failed before it began
        self.travelling: FileEntry | None = None  # the file under way
        self.unwritten: list[Result] = []
        self._again_at = 0.0

    def _left_out(self) -> dict[str, Any]:
        """Through at the frontend, but not written down yet; and whose file travels."""
        skip = [seq for result in self.unwritten for seq in result.seqs]
        files = [self.travelling, *(result.file for result in self.unwritten)]
        travels = [name for each in files if each for name in (each.recording_id, each.call_log_id)]
        return {"skip": skip, "travels": travels}

    def first(self, sql: str, **params: Any) -> tuple[Any, ...] | None:
        """Its first row; what is left out now it may name."""
        rows = self.run(sql, **params, **self._left_out())
        return rows[0] if rows else None

    def value(self, sql: str, **params: Any) -> Any:
        """The one value of its first row, or None."""
        row = self.first(sql, **params)
        return row[0] if row else None

    def fetch(self, after: int, until: int, size: int, most: int, at_all: int) -> Batch:
        """The next entries, as one body of so many bytes; a larger one alone, if it may go."""
        most = min(most, at_all) - len(BODY_FRAME)
        return self._batch(HOT_FETCH, after=after, until=until, size=size, bytes=most, most=at_all)

    def fetch_alone(self, seq: int, most: int) -> Batch:
        return self._batch(HOT_FETCH_ALONE, seq=seq, size=1, bytes=most, most=most)

    def _batch(self, statement: Hot, **params: Any) -> Batch:
        seqs, size, body = statement.run(self.session, params | self._left_out())
        found = list(map(int, seqs.split(b","))) if seqs else []
        return Batch(found, int.from_bytes(size, "big"), body, hashlib.sha256(body).hexdigest())

    def past(self, seq: int, readable: bool = True) -> Past | None:
        row = self.first(PAST, seq=seq, readable=readable)
        return Past(*row) if row else None

    def confirm(self, seqs: Sequence[int], receipt: Receipt) -> None:
        """A recording's survives a power cut, whatever the database's default."""
        answer = receipt.answer
        digest = hashlib.sha256(answer.body).hexdigest() if answer.body else None
        params = vars(receipt) | {"status": answer.status, "seconds": answer.duration}
        params |= {"seqs": list(seqs), "answer_sha256": digest}
        if receipt.kind == "file":
            with self.session.session() as conn:  # one message: both, or neither
                both = psycopg.ClientCursor(conn).execute(f"{CONFIRM}; {KEEP_UPLOAD}", params)
                marked = both.fetchall()[0][0]
        else:
            marked = int.from_bytes(HOT_CONFIRM.run(self.session, params)[0], "big")
        if marked < len(seqs) and any(self.past(seq, readable=False) for seq in seqs):
            # It would be sent again at once, and again.
            raise psycopg.errors.ObjectNotInPrerequisiteState(
                "marking an entry in sync_outbox changes nothing: a trigger, a rule, a policy?"
            )

    def set_waiting(self, seq: int, past: Past, verdict: Verdict, step: Step, in_outage: bool,
                    waits_for: int | None = None) -> None:  # fmt: skip
        suspect = verdict.fate in (Fate.SUSPECT, Fate.REJECTED)
        type_sent = past.sent_now if suspect else past.type_sent
        more = {"type_sent": type_sent, "in_outage": in_outage, "waits_for": waits_for}
        self.run(SET_WAITING, seq=seq, call_id=past.call_id, **vars(verdict), **vars(step), **more)
        self.rows = True

    def bury(self, seq: int, verdict: Verdict, step: Step) -> None:
        blamed = verdict.fate is Fate.REJECTED
        self.run(BURY, seq=seq, blamed=blamed, **vars(verdict), **vars(step))

    def record(
        self, seqs: Sequence[int], write: Callable[[], object], file: FileEntry | None = None
    ) -> None:
        """A result must be written down. One that cannot be is kept, and nothing else is sent
        before it; one that only waits for a lock lets the others go on. The last thing in a step:
        if it fails, the loop comes back to it before anything else."""
        self.unwritten.append(Result(seqs, write, file))
        with contextlib.suppress(NotRecorded, Lost):
            self.settle()

    @property
    def stuck(self) -> bool:
        waiting = self.unwritten
        return len(waiting) >= RESULTS_ASIDE or not all(each.locked for each in waiting)

    @property
    def settle_at(self) -> float:
        """When a result that waits for a lock is tried again."""
        return self._again_at if any(each.locked for each in self.unwritten) else float("inf")

    def settle(self) -> None:
        """Raises what keeps a result from being written. It may take for ever."""
        began = time.monotonic()
        again = began >= self._again_at
        for result in [each for each in self.unwritten if again or not each.locked]:
            try:
                result.write()
            except Lost:
                raise
            except Exception as error:
                state = getattr(error, "sqlstate", None)
                result.locked = state in LOCKED
                if result.locked:
                    continue
                if state:
                    raise NotRecorded(str(error)) from error
                self.unwritten.remove(result)  # a bug of ours: it would be so for ever
                raise
            self.unwritten.remove(result)
        if began >= self.settle_at:
            now = time.monotonic()
            self._again_at = now + max(1.0, SHARE * (now - began))


# ==================================================================================================
# HTTP
# One request in, one Answer out, pushed by whoever drives the generator; http.client reads the
# answer. Decides nothing, follows nothing.
# ==================================================================================================

ANSWER_MAX: Final = 64 * 1024
HEAD_MAX: Final = 16 * 1024
IDLE_MAX: Final = 4.0  # frontends close a kept-alive connection after 5 s of idleness
READ_SEC: Final = 5.0  # for the head of an answer, and for each piece: all others wait meanwhile
STALL_SEC: Final = 60.0
STALL_RATE: Final = 1000  # less than 1 kB/s for 60 s ends an upload
LEAST_RATE: Final = 5000  # bytes a second: how long entries may take at most
TURN_SEC: Final = 0.1  # so long a body is pushed before others have their turn
PIECE, PIECE_TLS = 256 * 1024, 16 * 1024
NOTSENT_LOWAT: Final = 256 * 1024  # keeps our own buffers from hiding how fast the link is


@dataclass(frozen=True)
class Wait:
    """When a job goes on: at that time, or when its socket is ready."""

    until: float = 0.0
    fd: int = -1
    events: int = 0


AT_ONCE: Final = Wait()
T = TypeVar("T")
Steps = Generator[Wait, None, T]
Sink = Callable[[bytes], object]


class Source(io.RawIOBase):
    """The socket as http.client reads it: up to a limit, until a deadline. http.client alone takes
    heads of 6 MB, and reads without end after a chunk size of -1."""

    def __init__(self, sock: socket.socket, process: Process, most: int) -> None:
        self.until = 0.0
        self._sock, self._process, self._left = sock, process, most
        self._early: bytes | None = None  # what was read to know whether it is there

    def makefile(self, *_: object) -> io.BufferedReader:
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def arrived(self) -> bool:
        """Whether there is something to read, if only the end. Under TLS a readable socket may
        only hold session tickets: it is read to know."""
        if self._early is None:
            with contextlib.suppress(BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                self._early = self._sock.recv(8192)
        return self._early is not None

    def readinto(self, buffer: Any) -> int:
        """The deadline is one for all that is read: a byte every 0.4 s outlives a socket's own
        time-out, and a signal does not end a recv (PEP 475)."""
        if self._left <= 0:
            raise http.client.HTTPException("an answer that is too long, or of no length")
        while not self.arrived():
            if time.monotonic() >= self.until:
                raise TimeoutError("the answer did not end in time")
            select.select([self._sock], [], [], TICK)
            self._process.check(STOP_GRACE)
            self._process.progress()
        early = self._early or b""
        got = min(len(buffer), len(early), self._left)
        buffer[:got], self._early = early[:got], early[got:] or None
        self._left -= got
        return got


class Wire:
    """The way to the frontend: one connection, and the requests on it, one after the other."""

    def __init__(self, config: Config, process: Process, keep: bool = True) -> None:
        self.process, self.keep = process, keep
        self.patience = config.timeout_sec  # to connect, without progress, and for the answer
        self.url = parse_url(config.frontend_base_url)
        self.tls = tls_context(config) if self.url.scheme == "https" else None
        self.sock: socket.socket | None = None
        self.used = 0.0  # when it was used last
        self.sent = 0  # of the request under way
        self._headers = {
            "Host": self.url.netloc or "",
            "User-Agent": f"serversync/{__version__}",
            "Accept": "application/json",
            "Accept-Encoding": "identity",
            "X-Serversync-Device": config.device_id,
        }
        if config.token:
            self._headers["Authorization"] = f"Bearer {config.token}"

    def close(self) -> None:
        if self.sock is not None:
            self.sock.close()
            self.sock = None

    def exchange(self, asked: Outgoing) -> Steps[Answer]:
        """One request; a reset on a kept connection is tried once more on a fresh one."""
        if time.monotonic() - self.used > IDLE_MAX:
            self.close()
        kept = self.sock is not None
        answer = yield from Exchange(self, asked).run()
        if kept and answer.trouble is Trouble.RESET:
            answer = yield from Exchange(self, asked).run()
        return answer

    def head(self, asked: Outgoing) -> bytes:
        """Paths are checked by the configuration or quoted, values are ours."""
        headers = {**self._headers, **asked.headers}
        if asked.method == "POST":
            headers["Content-Length"] = str(asked.length)
        path = (self.url.path or "").rstrip("/") + asked.path
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        return f"{asked.method} {path} HTTP/1.1\r\n{lines}\r\n".encode("ascii")

    def connected(self, asked: Outgoing) -> socket.socket:
        """The socket, non-blocking; made where there is none."""
        if self.sock is None:
            host = (self.url.host or "").strip("[]")
            port = self.url.port or (443 if self.tls else 80)
            limit = min(self.patience, asked.most)
            with self.process.deadline(limit, None):
                look_up(host)
                sock = socket.create_connection((host, port), limit)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, NOTSENT_LOWAT)
                if asked.rate < float("inf"):  # no burst into a buffer
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, int(asked.rate))
                if self.tls is not None:
                    sock = self.tls.wrap_socket(sock, server_hostname=host.rstrip("."))
            sock.setblocking(False)
            self.sock = sock
        return self.sock


@dataclass(frozen=True)
class Outgoing:
    """What is asked, and how long that may take."""

    method: str
    path: str
    headers: Mapping[str, str]
    most: float = float("inf")  # for all of it
    body: bytes = b""
    file: Ready | None = None  # follows the body
    tail: bytes = b""
    rate: float = float("inf")  # bytes a second, at most
    answer_max: int = ANSWER_MAX
    sink: Sink | None = None  # takes the body of a 200 in pieces

    @property
    def length(self) -> int:
        return len(self.body) + (self.file.size if self.file else 0) + len(self.tail)


class Exchange:
    """One request on its way: how far it has come."""

    def __init__(self, wire: Wire, asked: Outgoing) -> None:
        head = wire.head(asked)
        self.wire, self.asked, self.size = wire, asked, len(head) + asked.length
        self.pieces = self._pieces(head, PIECE if wire.tls is None else PIECE_TLS)
        self.piece = next(self.pieces)
        self.due = 0.0  # when the rate allows it
        self.started = self.moved_at = time.monotonic()
        self.moved = wire.sent = 0  # what the other side had taken by then; what we gave
        self.steady = self.reusable = False

    def run(self) -> Steps[Answer]:
        """On the connection that is there, or a new one; it stays if the next one may follow."""
        wire, kept = self.wire, self.wire.sock is not None
        try:
            sock = wire.connected(self.asked)
            source = Source(sock, wire.process, HEAD_MAX + self.asked.answer_max)
            if kept and source.arrived():
                raise ConnectionResetError("what nobody asked for, or the end")
            yield self._push(sock)
            while not source.arrived():
                self._check(sock)
                yield self._push(sock)
            answer = yield from self._answer(sock, source)
        except (OSError, ValueError, http.client.HTTPException) as error:
            wire.process.check()
            said = getattr(error, "verify_message", "") or getattr(error, "strerror", "")
            detail = str(said or error) or "time is up"
            answer = Answer(trouble=trouble_of(error, wire.sock is not None), detail=detail)
        finally:
            wire.used = time.monotonic()
            if not self.reusable:
                wire.close()
        took = time.monotonic() - self.started
        return replace(answer, steady=self.steady, sent=self.asked.length, duration=took)

    def _pieces(self, head: bytes, most: int) -> Iterator[bytes]:
        """What is sent, as much as is sent at once: a small body in one packet with its head."""
        body, file = self.asked.body, self.asked.file
        most = max(1, int(min(most, self.asked.rate / 4)))
        yield head + body[:most]
        for at in range(most, len(body), most):
            yield body[at : at + most]
        if file is None:
            return
        for at in range(0, file.size, most):
            want = min(most, file.size - at)
            try:
                piece = os.pread(file.fd, want, at)
            except OSError as error:
                raise local_trouble(error, file.name) from None
            if len(piece) < want:
                raise EntryTrouble(Fate.WAITS, "FILE_CHANGED", "the file shrank while it was sent")
            yield piece
        yield self.asked.tail

    def _push(self, sock: socket.socket) -> Wait:
        """Sends as much as the socket takes in one turn; returns when to go on."""
        fd, began = sock.fileno(), time.monotonic()
        while self.piece:
            now = time.monotonic()
            if self.due > now or now > began + TURN_SEC:
                return Wait(self.due, fd, select.POLLIN)
            try:
                sent = sock.send(self.piece)
            except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
                return Wait(now + TICK, fd, select.POLLIN | select.POLLOUT)
            except OSError:  # an answer may be there all the same
                self.piece = b""
                break
            self.wire.sent += sent
            self.due = max(self.due, now - 1.0) + sent / self.asked.rate  # no burst after a stall
            self.piece = self.piece[sent:] or next(self.pieces, b"")
        return Wait(began + TICK, fd, select.POLLIN)

    def _check(self, sock: socket.socket) -> None:
        """Whether it goes on: by what the other side has taken, not by what our buffers did."""
        now = time.monotonic()
        self.steady = self.steady or bool(self.piece)
        unconfirmed = fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4))
        taken = self.wire.sent - int.from_bytes(unconfirmed, sys.byteorder)
        patience, least, awaited = self.wire.patience, 1.0, "progress"
        if taken == self.size:  # a second for each 10 MB: it is stored
            patience, awaited = patience + self.size / 10_000_000, "answer"
        elif self.asked.file is not None:
            patience, least = STALL_SEC, STALL_SEC * min(STALL_RATE, self.asked.rate / 2)
        if taken - self.moved >= least:
            self.moved, self.moved_at = taken, now
        if now > min(self.moved_at + patience, self.started + self.asked.most):
            raise TimeoutError(f"no {awaited} for {now - self.moved_at:.0f} s")

    def _answer(self, sock: socket.socket, source: Source) -> Steps[Answer]:
        """Reads it, in turns with all others."""
        until = self.started + self.asked.most
        source.until = min(time.monotonic() + READ_SEC, until)
        response = http.client.HTTPResponse(source, method=self.asked.method)  # type: ignore[arg-type]
        response.begin()
        while 100 <= response.status < 200:  # 102, 103: the answer follows
            response.headers = None  # type: ignore[assignment]  # else it has begun
            response.begin()
        headers = response.headers
        length = headers.get("Content-Length")
        if length is not None and not length.strip().isdecimal():
            # http.client would read to the connection's end.
            raise http.client.HTTPException(f"a length that is no number: {length}")
        text, size = bytearray(), 0
        take = self.asked.sink if self.asked.sink and response.status == 200 else text.extend
        while size <= self.asked.answer_max and not response.isclosed():
            if size:
                yield Wait(0.0, sock.fileno(), select.POLLIN)
            source.until = min(time.monotonic() + READ_SEC, until)
            piece = response.read(min(8192, self.asked.answer_max + 1 - size))
            size += len(piece)
            take(piece)
        whole = size <= self.asked.answer_max
        if whole and response.length:
            raise http.client.IncompleteRead(bytes(text))
        complete = whole and self.wire.sent >= self.size
        # What comes next on a connection must be the next answer.
        self.reusable = complete and self.wire.keep and not response.will_close
        return Answer(
            status=response.status,
            body=bytes(text),
            headers={name.lower(): value for name, value in headers.items()},
            detail="" if whole else f"an answer longer than {self.asked.answer_max // 1024} KiB",
            complete=complete,
        )


def trouble_of(error: Exception, connected: bool) -> Trouble:
    hung_up = connected and isinstance(error, (ssl.SSLEOFError, ssl.SSLZeroReturnError))
    if isinstance(error, ssl.SSLError) and not hung_up:
        return Trouble.TLS  # under TLS 1.3 our certificate is refused after the handshake
    if not connected:
        return Trouble.UNREACHABLE
    if isinstance(error, TimeoutError):
        return Trouble.TIMEOUT
    if isinstance(error, (OSError, http.client.IncompleteRead)):
        return Trouble.RESET
    return Trouble.GARBLED


class Frontend:
    """The frontend's interface as CONTRACT has it: entries, files, and a look at a stored file."""

    def __init__(self, config: Config, process: Process) -> None:
        self.config = config
        self.entries, self.settings = Wire(config, process), Wire(config, process)
        # Each upload has a connection of its own: a stray second answer on a kept one would
        # confirm the next recording.
        self.files = Wire(config, process, keep=False)
        # Whether HEAD tells what was stored; None: not known yet.
        self.trusted = None if config.verify_path else False

    def post(self, body: bytes, key: str, most: float, wire: Wire | None = None) -> Steps[Answer]:
        """Entries; an empty list asks whether the frontend lives."""
        headers = {"Content-Type": "application/json", "Idempotency-Key": key}
        most = min(2 * self.config.timeout_sec + len(body) / LEAST_RATE, most)
        request = Outgoing("POST", "/api/ingest/sync", headers, most, body)
        return (wire or self.entries).exchange(request)

    def upload(self, entry: FileEntry, ready: Ready, rate: float) -> Steps[Answer]:
        """A recording, `rate` bytes a second at most (0: no limit)."""
        fields: dict[str, Any] = {
            "callLogId": (None, entry.call_log_id, "text/plain"),
            "recordingId": (None, entry.recording_id, "text/plain"),
            "meta": ("meta.json", ready.meta, "application/json"),
            "audio": (f"mixed.{ready.name[-3:].lower()}", b"", "application/octet-stream"),
        }
        form, kind = encode_multipart_formdata(fields)
        end = form.rindex(b"\r\n--")  # before it the audio
        request = Outgoing(
            "POST",
            "/api/ingest/recording-file",
            {"Content-Type": kind, "Idempotency-Key": ready.key},
            body=form[:end],
            file=ready,
            tail=form[end:],
            rate=rate or float("inf"),
        )
        return self.files.exchange(request)

    def stored_length(self, call_log_id: str, recording_id: str) -> Steps[Answer]:
        path = self.config.verify_path.format(callLogId=call_log_id, recordingId=recording_id)
        return self.files.exchange(Outgoing("HEAD", path, {}, 10.0))


# ==================================================================================================
# Recordings
# Paths, readiness, deletion: by directory descriptors, following no link, one level below the root.
# ==================================================================================================

MARKER: Final = ".serversync-root"
TRASH: Final = ".serversync-trash"
MOVED: Final = "moved on purpose: update serversync.sender set root_id = null, and restart"
META: Final = "meta.json"
META_MAX: Final = 256 * 1024
WATCHED_MAX: Final = 10_000  # directories: others are watched when these are through
_OPEN_DIR: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_OPEN_FILE: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK


@dataclass(frozen=True)
class Upload:
    """A confirmed upload whose local files still exist."""

    seq: int
    directory: str
    files: list[dict[str, Any]]
    tries: int
    root_id: str | None  # of the root at its upload

    def place(self, file: dict[str, Any]) -> str:
        """The file's name in the trash."""
        return f"{self.seq}-{file['inode']}"


@dataclass(frozen=True)
class Ready:
    """An opened recording: what is sent, and what it must still be afterwards."""

    fd: int
    directory: str
    name: str
    size: int
    files: list[dict[str, Any]]  # signatures of the audio and, where it was sent, of meta.json
    folder: int
    meta: bytes
    key: str


def signature(name: str, status: os.stat_result) -> dict[str, Any]:
    return {
        "name": name,
        "inode": status.st_ino,
        "size": status.st_size,
        "mtime_ns": status.st_mtime_ns,
    }


def locate(file_path: str | None, call_id: str | None, root: str) -> tuple[str, str]:
    """The directory below the root and the file in it; raises EntryTrouble for anything else."""
    if file_path is None and call_id is None:
        raise EntryTrouble(Fate.DEAD, "BAD_PAYLOAD", "neither filePath nor callId in the payload")
    path = file_path if file_path is not None else f"{call_id}/mixed.wav"
    parts = path.split("/")
    *parents, directory, name = ["", *parts]
    above = [part for part in parents if part not in ("", ".")]
    # The component above is the root's own name (or the backend's word for it), or absent.
    roots = (os.path.basename(root.rstrip("/")), "recordings")
    if (
        (above[-1] not in roots if above else path.startswith("/"))
        or ".." in parts
        or "\0" in path
        or directory.startswith(".serversync")
        or any(part in ("", ".") or len(part.encode()) > 255 for part in (directory, name))
    ):
        text = f"{path[:200]!r} does not lie one level below the recordings"
        raise EntryTrouble(Fate.DEAD, "FILE_UNSAFE", text)
    if not name.lower().endswith((".wav", ".mp3")):
        raise EntryTrouble(Fate.DEAD, "BAD_PAYLOAD", f"{name[:100]!r} is neither .wav nor .mp3")
    return directory, name


def local_trouble(error: OSError, name: str) -> EntryTrouble:
    """What an error of the disk means: a link is an attack, all else is nobody's fault."""
    if error.errno in (errno.ELOOP, errno.ENOTDIR):
        text = f"{name!r} is a link, or not a plain file of one name in a directory"
        return EntryTrouble(Fate.DEAD, "FILE_UNSAFE", text)
    return EntryTrouble(Fate.WAITS, "FILE_UNREADABLE", f"{name!r}: {error.strerror}")


@contextlib.contextmanager
def held(fd: int) -> Iterator[int]:
    try:
        yield fd
    finally:
        os.close(fd)


def subdirectory(root: int, name: str, mode: int) -> int:
    """Opened, and made where it is not there."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, mode, dir_fd=root)
    return os.open(name, _OPEN_DIR, dir_fd=root)


def open_plain(folder: int, name: str) -> int:
    """A plain file of one name; ELOOP for all that is none, as for a link."""
    fd = os.open(name, _OPEN_FILE, dir_fd=folder)
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
        os.close(fd)
        raise OSError(errno.ELOOP, "not a plain file of one name")
    return fd


def read_plain(folder: int, name: str, most: int) -> tuple[os.stat_result, bytes]:
    with held(open_plain(folder, name)) as fd:
        return os.fstat(fd), os.read(fd, most)


def mount_of(fd: int) -> str:
    """Not st_dev: on an overlay that of a file is its layer's."""
    with open(f"/proc/self/fdinfo/{fd}", encoding="ascii") as info:
        return next(line for line in info if line.startswith("mnt_id:"))


def check_sent(where: int, files: Mapping[str, Mapping[str, Any]]) -> None:
    """OSError if one of these files, by the names that they have there, is not what was sent."""
    for name, file in files.items():
        if signature(file["name"], os.stat(name, dir_fd=where, follow_symlinks=False)) != file:
            raise OSError(errno.EBUSY, f"{file['name']} changed after its upload")


def minimal_meta(entry: FileEntry, directory: str) -> bytes:
    """In place of a meta.json that is not usable, and said."""
    text = f"recording {entry.seq} has no usable meta.json: sent with a minimal one"
    say(logging.WARNING, "meta_made_up", text, SEQ=entry.seq, CALL_ID=directory)
    known = {
        "callId": directory,
        "callLogId": entry.call_log_id,
        "recordingId": entry.recording_id,
        "generatedBy": "serversync",
    }
    return json.dumps(known).encode()


class Recordings:
    """The backend's directory of recordings, and our trash in it."""

    def __init__(self, root: str) -> None:
        self.path = root
        self._watched: dict[str, tuple[int, float]] = {}  # what was seen, and since when

    @contextlib.contextmanager
    def root(self, known: str | None, adopt: Callable[[str], object]) -> Iterator[int]:
        """The opened root, if it is the one the database knows; else ROOT_MISSING.

        An unmounted mount point is just an empty directory: without the marker every recording
        in it would look missing, and die.
        """
        with contextlib.ExitStack() as stack:
            try:
                fd = stack.enter_context(held(os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)))
                found = self._marker(fd, make=known is None)
                if known not in (None, found):
                    what = "another one" if found else "not there"
                    raise OSError(errno.ENODEV, f"{what}: not mounted? ({MOVED})", MARKER)
            except OSError as error:
                why = f"{error.filename or MARKER}: {error.strerror}"
                text = f"the recordings directory {self.path} is not the one we know: {why}"
                raise EntryTrouble(Fate.OUTAGE, "ROOT_MISSING", text) from None
            if known is None:
                adopt(found)
                with contextlib.suppress(OSError):  # now: a full disk has no room for it
                    os.mkdir(TRASH, 0o700, dir_fd=fd)
            yield fd

    @staticmethod
    def _marker(root: int, make: bool) -> str:
        found = ""
        with contextlib.suppress(FileNotFoundError):
            found = read_plain(root, MARKER, 64)[1].decode("ascii", "replace").strip()
        if make and not found:
            found, flags = uuid.uuid4().hex, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW
            with held(os.open(MARKER, flags, 0o644, dir_fd=root)) as fd:
                os.write(fd, f"{found}\n".encode())
                os.fsync(fd)
            os.fsync(root)
        return found

    @contextlib.contextmanager
    def opened(self, root: int, entry: FileEntry, grace_over: bool) -> Iterator[Ready]:
        """The recording, opened and complete; EntryTrouble says what is wrong with it."""
        directory, name = locate(entry.file_path, entry.call_id, self.path)
        missing = (Fate.DEAD, "FILE_MISSING") if grace_over else (Fate.WAITS, "NOT_READY")
        with contextlib.ExitStack() as stack:
            try:
                folder = stack.enter_context(held(os.open(directory, _OPEN_DIR, dir_fd=root)))
                fd = stack.enter_context(held(open_plain(folder, name)))
            except FileNotFoundError as error:
                raise EntryTrouble(*missing, f"{directory}/{name} is not there") from error
            except OSError as error:
                raise local_trouble(error, f"{directory}/{name}") from None
            if not mount_of(root) == mount_of(folder) == mount_of(fd):
                raise EntryTrouble(Fate.DEAD, "FILE_UNSAFE", f"{name!r} is on another file system")
            files = [signature(name, os.fstat(fd))]
            if not (size := files[0]["size"]):
                raise EntryTrouble(*missing, f"{directory}/{name} is empty")
            meta = self._meta(folder, files)
            if meta is None and not grace_over:
                raise EntryTrouble(*missing, f"{directory}/{META} is not there yet")
            meta = meta or minimal_meta(entry, directory)
            text = f"{entry.seq} {entry.recording_id} {files[0]}".encode()
            key = hashlib.sha256(text + meta).hexdigest()
            yield Ready(fd, directory, name, size, files, folder, meta, key)

    @staticmethod
    def _meta(folder: int, files: list[dict[str, Any]]) -> bytes | None:
        """meta.json verbatim, or None when it is missing or broken (of a long one we read a part).
        An empty one holds nothing to lose and may go with the recording; a broken one stays."""
        try:
            status, text = read_plain(folder, META, META_MAX)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ELOOP):
                return None
            raise local_trouble(error, META) from None
        usable = False
        with contextlib.suppress(ValueError, RecursionError):
            # By the letter: json itself takes UTF-16, a BOM, and NaN (which int refuses).
            json.loads(text.decode(), parse_constant=int)
            usable = True
        if usable or not text:
            files.append(signature(META, status))
        return text if usable else None

    def until_quiet(self, root: int, directory: str, quiet: float, once: bool) -> float:
        """How long the directory must still be watched unchanged. (`once` does not live to see
        that: there the newest time stamp in it must be so old.)"""
        looks, gone = list[os.stat_result](), contextlib.suppress(FileNotFoundError)
        with gone, held(os.open(directory, _OPEN_DIR, dir_fd=root)) as folder:
            for name in sorted(os.listdir(folder)):
                with gone:
                    looks.append(os.stat(name, dir_fd=folder, follow_symlinks=False))
            looks.append(os.fstat(folder))  # the last: it shows what came and went meanwhile
        if once:
            changed = max((look.st_mtime for look in looks), default=0.0)
            return max(0.0, quiet - max(0.0, time.time() - changed))
        state = hash(tuple((s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for s in looks))
        now = time.monotonic()
        seen, since = self._watched.pop(directory, (None, now))
        since = since if seen == state else now
        left = max(0.0, since + quiet - now)
        if left and len(self._watched) < WATCHED_MAX:
            self._watched[directory] = (state, since)
        return left

    def remove(self, root: int, upload: Upload, whole: bool) -> None:
        """Deletes what was uploaded, and (`whole`) all else in its directory. OSError says why not.
        May be called again after a kill."""
        with held(subdirectory(root, TRASH, 0o700)) as trash, contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):  # an earlier edition moved the directory as a whole
                os.rename(str(upload.seq), upload.directory, src_dir_fd=trash, dst_dir_fd=root)
            folder = stack.enter_context(held(subdirectory(root, upload.directory, 0o777)))
            self._empty(folder, trash, upload)  # what an earlier try left there is finished
            present = set(os.listdir(folder))
            ours = {file["name"]: file for file in upload.files if file["name"] in present}
            check_sent(folder, ours)
            if whole and ours:  # before what was sent goes, which shows whose directory it is
                for name in present - set(ours):
                    with contextlib.suppress(IsADirectoryError):
                        os.unlink(name, dir_fd=folder)
            for name, file in ours.items():
                os.rename(name, upload.place(file), src_dir_fd=folder, dst_dir_fd=trash)
            self._empty(folder, trash, upload)
            if not os.listdir(folder):  # else others' files stay, and so does it
                os.rmdir(upload.directory, dir_fd=root)
            os.fsync(trash)
        os.fsync(root)

    @staticmethod
    def _empty(folder: int, trash: int, upload: Upload) -> None:
        """Removes from the trash what was sent, if all of it is as it was sent there, too; else all
        of it goes back, over nothing: a new recording may be there."""
        present = set(os.listdir(trash))
        taken = {upload.place(f): f for f in upload.files if upload.place(f) in present}
        try:
            check_sent(trash, taken)
        except OSError:
            for place, file in taken.items():
                if file["name"] in os.listdir(folder):
                    raise OSError(errno.EEXIST, f"{file['name']} is there already") from None
                os.rename(place, file["name"], src_dir_fd=trash, dst_dir_fd=folder)
            raise
        for place in taken:
            os.unlink(place, dir_fd=trash)


# ==================================================================================================
# Jobs: what they share
# A job does one bounded piece of work at a time; the agent's loop drives all of them. What they
# share: the endpoints' health, and a voice.
# ==================================================================================================


class Job:
    """A generator that says after each piece of work when it wants to go on."""

    sentence = ""  # what a person should know of it; empty while all is well

    def __init__(self) -> None:
        self.wait = AT_ONCE
        self._woken = False  # while it worked: it looks again before it rests
        self.failures = 0  # in a row: it alone waits
        self._turns = self.turns()

    def turns(self) -> Steps[None]:
        raise NotImplementedError

    def step(self, now: float, ready: Container[int]) -> None:
        """One piece of work, if it is time for it. After an error the next step begins anew."""
        if self.wait.until > now and self.wait.fd not in ready:
            return
        try:
            self.wait = next(self._turns)
        except BaseException:
            self.close()
            raise
        self.failures = 0
        if self._woken and not self.under_way and self.wait.until > now:
            self._woken, self.wait = False, AT_ONCE

    @property
    def under_way(self) -> bool:
        return self.wait.fd >= 0

    def wake(self) -> None:
        if self.under_way or self.failures or self.wait.until <= time.monotonic():
            self._woken = True
        else:
            self.wait = AT_ONCE

    def reload(self) -> None:
        """Another configuration, or somebody who says: try now."""
        self.wake()

    def published(self) -> dict[str, object]:
        """What the state file says of it."""
        return {}

    def close(self) -> None:
        self._turns.close()
        self._turns, self.wait = self.turns(), AT_ONCE


class Health:
    """Whether the frontend is there: of each endpoint, and of all."""

    def __init__(self, config: Config) -> None:
        self.entries = Endpoint("entries", config.batch_size, ENTRIES_IN_ROW, config.batch_size)
        self.files = Endpoint("files", 1, FILES_IN_ROW)
        self.endpoints = (self.entries, self.files)
        self.alive_until = 0.0  # so long it is not asked; never, where it refuses to be
        self.quiet_until = 0.0  # the frontend asked for a pause of all traffic
        self.untried = True  # somebody said: try now


class Voice:
    """What the agent says of itself: the unit's status, the state file, the journal."""

    def __init__(self, show: Callable[..., None], session: Session, health: Health) -> None:
        self.show, self.session, self.health = show, session, health
        self.repeats = Repeats()
        self.tally = Tally()
        self.deaths = 0
        self.done = IDLE  # the sentence of what was done since the last look for entries
        self.sentence = ""
        self.jobs: Sequence[Job] = ()
        self.inflight = 0  # entries of the request that is under way
        self._busy_at = 0.0

    def rest(self) -> None:
        if any(job.failures for job in self.jobs):
            return  # what failed was told, and stands
        outages = [each.outage for each in self.health.endpoints if each.outage]
        self.done = sentence_of(self.tally, outages, time.monotonic()) or self.done
        self.tally = Tally()
        self.report("; ".join([self.done, *(job.sentence for job in self.jobs if job.sentence)]))

    def busy(self, sentence: str, **progress: object) -> None:
        """What is going on in the middle; at most once a second."""
        if time.monotonic() - self._busy_at >= 1:
            self._busy_at = time.monotonic()
            self.report(sentence, progress)

    def report(self, sentence: str, progress: dict[str, object] | None = None) -> None:
        sentence = clean(sentence)
        wall = time.time() - time.monotonic()
        outages = [
            {"endpoint": each.name, "code": each.outage.code, "reason": each.outage.reason}
            | {"since": wall + each.outage.since, "due": wall + each.outage.due}
            for each in self.health.endpoints
            if each.outage
        ]
        state = {"sentence": sentence, "standby": sentence == STANDBY, "outages": outages}
        state |= {"listening": self.session.locked, "progress": progress, "inflight": self.inflight}
        for job in self.jobs:
            state |= job.published()
        self.show(**state)
        if sentence != self.sentence:
            self.sentence = sentence
            daemon.notify(f"STATUS={sentence}")
            say(logging.DEBUG, "cycle", sentence)

    def failed(self, seq: int, past: Past, verdict: Verdict, step: Step) -> None:
        self.tally.waiting += not step.dead
        self.tally.dead += step.dead
        self.deaths += step.dead
        quiet = verdict.code == "NOT_READY" and step.tries > 1
        level = logging.DEBUG if quiet else logging.WARNING
        words = f"is retried in {step.delay:.0f} s"
        words = "given up: it is in serversync.dead_letters" if step.dead else words
        text = f"entry {seq} ({past.entity_type}) {words}: {verdict.reason}"
        more = {"SEQ": seq, "ENTITY_TYPE": past.entity_type, "CALL_ID": past.call_id}
        more |= {"ERROR_CODE": verdict.code, "HTTP_STATUS": verdict.status}
        more |= {"ATTEMPT": step.attempts, "STATUS_FROM": "sending"}
        more |= {"STATUS_TO": "dead" if step.dead else "failed"}
        say(level, "entry_dead" if step.dead else "entry_set_aside", text, False, **more)


class Delivery(Job):
    """What entries and files have in common: whose fault it is, and what becomes of it."""

    def __init__(self, agent: Agent, endpoint: Endpoint) -> None:
        super().__init__()
        self.agent, self.endpoint, self.health = agent, endpoint, agent.health
        self.store, self.voice = agent.store, agent.voice

    def succeeded(self, number: int) -> None:
        """It speaks for the frontend, and ends every outage but one that only entries of the other
        endpoint say. What was under way ends no pause that was asked for meanwhile."""
        agent, health = self.agent, self.health
        if time.monotonic() < health.quiet_until:
            return
        ended, name = self.endpoint.succeeded(number), self.endpoint.name
        others = [each for each in health.endpoints if each.outage and not each.outage.by_entries]
        for other in others:
            other.succeeded(1)
            self.voice.repeats.over(other.name)
        if ended or others:
            agent.store.record([], partial(agent.store.run, MAKE_DUE, everything=False))
            agent.entries.wake()
            agent.files.wake()
        if ended:
            self.voice.repeats.over(name)
            text = f"{name}: recovered after {time.monotonic() - ended.since:.0f} s ({ended.code})"
            say(logging.INFO, "recovered", text, ERROR_CODE=ended.code)

    def begin_outage(self, verdict: Verdict, of_all: bool = False) -> None:
        """Of this endpoint alone, or of everything. What was under way changes no pause."""
        health, now, jitter = self.health, time.monotonic(), random.random()
        if now < health.quiet_until:
            return
        verdict = replace(verdict, reason=clean(verdict.reason))  # it may hold all of an answer
        for endpoint in health.endpoints if of_all else [self.endpoint]:
            outage = endpoint.begin_outage(verdict, now, jitter, by_entries=not of_all)
            if of_all and verdict.code == "RATE_LIMITED":
                health.quiet_until = max(health.quiet_until, outage.due)
            refused = of_all and verdict.code in ("BAD_RESPONSE", "FRONTEND_5XX")
            if refused and self.agent.once and outage.tries == 1:  # perhaps only for being empty,
                outage.due = now  # and it does not live to see the next try
            if endpoint is self.endpoint:  # told when it begins, and when its reason is another
                name, key = endpoint.name, f"{verdict.code} {verdict.status}"
                words = f"{verdict.reason} (next try in {outage.due - now:.0f} s)"
                text = f"{name}: outage, nothing is lost: {words}"
                more = {"ERROR_CODE": verdict.code, "HTTP_STATUS": verdict.status}
                self.voice.repeats.say(name, key, logging.WARNING, "outage", text, **more)

    def ask(self, most: float = float("inf")) -> Steps[Verdict | None]:
        """Is it the frontend? An empty request shows; None: it lives."""
        frontend, health, key = self.agent.frontend, self.health, uuid.uuid4().hex
        # On a wire of its own: a request of entries may be under way while a file fails.
        wire = frontend.files if self.endpoint is health.files else frontend.entries
        answer = yield from frontend.post(BODY_FRAME, key, most, wire)
        verdict, _ = confirm_entries(answer, key, [], time.time())
        if verdict.fate not in ALIVE:
            return verdict
        health.alive_until = max(health.alive_until, time.monotonic() + ALIVE_SEC)
        return None

    def conclude(self, seqs: Sequence[int], verdict: Verdict, charge: bool = True) -> Steps[None]:
        """The frontend did not take these: is it to blame, or one of them? A probe in an outage
        that it answers otherwise well leaves the outage to the entries."""
        probing, health = self.endpoint.outage is not None, self.health
        down = verdict if verdict.fate is Fate.OUTAGE else None
        if down is None:
            yield AT_ONCE
            if time.monotonic() >= max(health.alive_until, health.quiet_until):
                down = yield from self.ask()
        if len(seqs) > 1:
            self.endpoint.failed_together(len(seqs), verdict)
        if down is not None:
            self.begin_outage(down, of_all=True)
        elif probing and self.endpoint.outage is not None:
            self.begin_outage(verdict)
        if len(seqs) == 1 and down is not verdict:
            self.failed(seqs[0], verdict, charge and down is None and not probing)

    def pause(self) -> Steps[None]:
        while (until := self.agent.health.quiet_until) > time.monotonic():
            yield Wait(until)

    def failed(self, seq: int, verdict: Verdict, charge: bool = True) -> None:
        """One entry, alone, did not get through: it is given up, or waits with the reason."""
        unreadable = verdict.code in ("ROW_CORRUPT", "ENTRY_UNREADABLE", "SESSION_LOST")
        past = self.store.past(seq, readable=not unreadable)
        if past is None:
            return
        verdict = replace(verdict, reason=clean(verdict.reason))  # it may hold all of an answer
        step = judge(past, verdict, self.agent.config, random.random(), charge)
        in_outage = self.endpoint.outage is not None
        waits = partial(self.store.set_waiting, seq, past, verdict, step, in_outage)
        buried = partial(self.store.bury, seq, verdict, step)
        self.store.record([seq], buried if step.dead else waits)
        self.voice.failed(seq, past, verdict, step)
        blamed = verdict.fate in (Fate.SUSPECT, Fate.REJECTED) and not step.dead
        if blamed and self.endpoint.failed_alone(seq) and not self.endpoint.outage:
            self.begin_outage(verdict)

    def why_unreadable(self, seq: int, error: psycopg.Error) -> Verdict:
        """Raises it, where no entry may be to blame: by bad data, a limit of the program's, of
        memory or time, or a bad disk."""
        state = error.sqlstate or ""
        if not (state[:2] in ("22", "54") or state in ("53200", "57014", *CORRUPT)):
            raise error
        if state in CORRUPT:
            return Verdict(Fate.WAITS, "ROW_CORRUPT", f"its row in sync_outbox is corrupt: {error}")
        fate = Fate.WAITS
        try:
            sql = "select length(payload::text) from sync_outbox where id = %(seq)s"
            self.store.run(sql, seq=seq)
        except psycopg.Error as again:
            if (again.sqlstate or "")[:2] in ("22", "54"):
                fate = Fate.DEAD
        return Verdict(fate, "ENTRY_UNREADABLE", f"PostgreSQL cannot write it out: {error}")

    def next_retry(self, files: bool) -> tuple[int, float]:
        """The one that is due first, and when; 0: none, or none before that time. In an outage, and
        in `once`, retries may take all the time there is."""
        now, endpoint = time.monotonic(), self.endpoint
        if now < endpoint.retry_at and not (endpoint.outage or self.agent.once):
            return 0, endpoint.retry_at
        params = {"files": files, "before": self.store.before}
        row = self.store.first(NEXT_RETRY, **params) if self.store.rows else None
        seq, left = row or (0, float("inf"))
        return seq, now + (left if left > 0.01 else 0.0)


def say_sent(event: str, text: str, answer: Answer, key: str | None, **more: Any) -> None:
    more |= {"HTTP_STATUS": answer.status, "DURATION_MS": round(answer.duration * 1000)}
    more |= {"IDEMPOTENCY_KEY": key, "STATUS_FROM": "queued", "STATUS_TO": "sent"}
    say(logging.INFO, event, text, **more)


# ==================================================================================================
# Entries
# A pass by id, one retry between two batches, and in an outage one entry at a time.
# ==================================================================================================

PLANS_LAST: Final = 100  # batches
CAREFUL: Final = 100  # entries that go one by one, until batches are tried again
LOST_MAX: Final = 3  # sessions in a row that ended while one entry was read


class Entries(Delivery):
    """Sends the entries. `careful`: one by one, so that the one is found which cannot be read, or
    which ends the session that reads it."""

    def __init__(self, agent: Agent) -> None:
        super().__init__(agent, agent.health.entries)
        self.careful = 0  # so many more
        self.blind = False  # an upload fills the line: nothing is concluded until it is over
        self.lost = deque[int](maxlen=LOST_MAX)  # what was read when sessions ended (0: several)

    def turns(self) -> Steps[None]:
        agent = self.agent
        while True:
            look = agent.look()
            if look.waiting:
                self.store.run(SWEEP)
            if not look.entries:
                self.endpoint.outage = None
                agent.passed(self.store.value(LAST) if look.files else 0)
            elif self.endpoint.outage is not None:
                yield from self._probe(self.endpoint.outage)
            else:
                yield from self._pass()
            # What the backend's settings say goes first. Half a minute at most: a line that went
            # silent is only noticed by asking, and a table that was rebuilt has lost its trigger.
            said = look.interval or 0.0
            interval = max(said, 0.1) if 0 < said <= 86400 else agent.config.poll_interval_sec
            until = time.monotonic() + min(interval, 30.0)
            outage = self.endpoint.outage
            due = outage.due if outage else self.next_retry(files=False)[1]
            yield Wait(until if self.blind else min(until, due))

    def _pass(self) -> Steps[None]:
        """From the lowest id on: lower ids may appear late. What comes during it waits for the
        next one."""
        until = self.store.value(LAST) or 0
        after, number = 0, 0
        while not self._stopped():
            if number % PLANS_LAST == 0:
                self.store.run(NEW_PLANS)
            number += 1
            batch = self._fetch(after, until)
            if batch is None:
                yield AT_ONCE
                continue
            if not batch.seqs:
                self.agent.passed(until)
                yield from self._retry()
                return
            verdict = yield from self._deliver(batch)
            if verdict.fate is Fate.SENT or len(batch.seqs) == 1:
                after = batch.seqs[-1]
            yield AT_ONCE
            yield from self._retry()

    def _stopped(self) -> bool:
        return self.endpoint.outage is not None or self.blind

    def _fetch(self, after: int, until: int) -> Batch | None:
        """The next batch. None: an entry that cannot be read was found, or is looked for."""
        if not self.careful:
            return self._read(partial(self._fetch_in_order, after, until, self.endpoint.size))
        self.careful -= 1
        seq = self.store.value(NEXT_ID, after=after, until=until, files=False)
        if not seq:
            return Batch([], 0, b"", "")
        batch = self._read(partial(self._fetch_in_order, seq - 1, seq, 1), seq)
        return batch if batch and batch.seqs else None  # it depends on another: it has its row now

    def _fetch_in_order(self, after: int, until: int, size: int) -> Batch:
        """What was passed over gets its row first: of the same entity, later ones must wait."""
        config = self.agent.config
        while True:
            batch = self.store.fetch(after, until, size, config.batch_bytes, config.entry_max_bytes)
            last = batch.seqs[-1] if batch.seqs else until
            if not self.store.rows or not self.store.value(HOLD_BACK, after=after, until=last):
                return batch

    def _read(self, fetch: Callable[[], Batch], seq: int = 0) -> Batch | None:
        """Several entries, or one by its seq. None: one cannot be read, or sent: that was noted, or
        of several it is looked for."""
        if seq and self.lost.count(seq) == LOST_MAX:
            reason = "the database session was lost three times while this entry was read"
            self.failed(seq, Verdict(Fate.WAITS, "SESSION_LOST", reason))
            self.lost.clear()
            self.careful = self.agent.failures = 0  # the cause is known
            return None
        try:
            batch = fetch()
        except Lost:
            self.lost.append(seq)
            self.careful = CAREFUL
            raise
        except psycopg.Error as error:
            verdict = self.why_unreadable(seq, error)
            if seq:
                self.failed(seq, verdict)
            self.careful = 0 if seq else CAREFUL
            return None
        if batch.seqs and not batch.body:
            limit = human(self.agent.config.entry_max_bytes)
            reason = f"{human(batch.size)} is more than SYNC_ENTRY_MAX_BYTES ({limit})"
            self.failed(batch.seqs[0], Verdict(Fate.DEAD, "TOO_LARGE", reason))
            return None
        return batch

    def _deliver(self, batch: Batch) -> Steps[Verdict]:
        most = HASTY_SEC if self.endpoint.hasty else float("inf")
        most = BESIDE_SEC if self.store.travelling else most
        verdict = yield from self._send(batch, most)
        if verdict.fate is Fate.SENT:
            return verdict
        slow = ("NETWORK_TIMEOUT", "NETWORK_ERROR")
        if self.store.travelling and verdict.code in slow:  # does it fill the line?
            down = yield from self.ask(BESIDE_SEC)
            if self.store.travelling and down is not None and down.code in slow:
                self.blind = True
                return verdict
        late = verdict.code == "NETWORK_TIMEOUT"
        yield from self.conclude(batch.seqs, verdict, charge=not late or most == float("inf"))
        if self.endpoint.outage is None:
            self.endpoint.hasty = self.endpoint.hasty or late
        return verdict

    def _send(self, batch: Batch, most: float) -> Steps[Verdict]:
        """One request; what was confirmed is recorded before anything else happens."""
        agent, voice, seqs = self.agent, self.voice, batch.seqs
        done, since = voice.tally.entries, time.monotonic() - voice.tally.started
        voice.inflight = len(seqs)
        if self.endpoint.outage is None:
            voice.busy(f"sending entries: {done} so far", kind="drain", entries=done, seconds=since)
        try:
            answer = yield from agent.frontend.post(batch.body, batch.key, most)
        finally:
            voice.inflight = 0
        verdict, rejected = confirm_entries(answer, batch.key, seqs, time.time())
        if len(rejected) == len(seqs) == 1:  # as any other rejection
            return Verdict(Fate.REJECTED, "REJECTED", rejected[seqs[0]], verdict.status)
        if verdict.fate is Fate.SENT:
            outcome = "conflict_processed" if verdict.code else "sent"
            stored = [seq for seq in seqs if seq not in rejected]
            receipt = Receipt("entries", len(batch.body), batch.key, batch.key, answer, outcome)
            agent.store.record(stored, partial(self.store.confirm, stored, receipt))
            if stored:
                self.succeeded(len(seqs))
            voice.tally.entries += len(stored)
            ends = f"seq {seqs[0]}" if len(seqs) == 1 else f"seq {seqs[0]} to {seqs[-1]}"
            took = f"in {answer.duration * 1000:.0f} ms"
            text = f"sent {count(len(stored), 'entry', 'entries')}, {ends}, {took}"
            say_sent("entries_sent", text, answer, batch.key, SEQ=seqs[0], SEQ_LAST=seqs[-1])
            for seq, reason in rejected.items():
                self.failed(seq, Verdict(Fate.REJECTED, "REJECTED", reason, verdict.status))
        return verdict

    def _alone(self, seq: int, until: int = 0) -> Steps[Verdict | None]:
        """One entry in full time: by its seq, or (0) the first that may go. None: not sent."""
        self.endpoint.hasty = False
        by_seq = partial(self.store.fetch_alone, seq, self.agent.config.entry_max_bytes)
        batch = self._read(by_seq, seq) if seq else self._fetch(0, until)
        return (yield from self._deliver(batch)) if batch and batch.seqs else None

    def _retry(self) -> Steps[None]:
        seq, due = (0, 0.0) if self._stopped() else self.next_retry(files=False)
        began = time.monotonic()
        if not seq or due > began:
            return
        verdict = yield from self._alone(seq)
        if verdict is None or verdict.fate is not Fate.SENT:
            self.endpoint.retried(time.monotonic(), time.monotonic() - began)
        self.wake()  # what waited for it may be free

    def _probe(self, outage: Outage) -> Steps[None]:
        """In an outage one entry goes: the newest that nothing unsent precedes, else the one that
        has waited longest. It kills nothing."""
        newest, health = self.store.value(LAST) or 0, self.health
        is_new = outage.by_entries and newest > self.endpoint.seen
        if self.blind or (time.monotonic() < outage.due and not is_new):
            return
        self.endpoint.seen = newest
        try:
            seq = self.store.value(NEWEST_FREE) or self.next_retry(files=False)[0]
        except psycopg.Error as error:  # one of them cannot be read
            self.why_unreadable(0, error)
            seq = 0
        verdict = yield from self._alone(seq, newest)
        if verdict is None:  # nothing was asked: another one soon
            outage.due = max(outage.due, time.monotonic() + 1.0)
            return
        if verdict.fate is not Fate.SENT:
            return
        self.wake()
        if outage.by_entries or health.alive_until == float("inf"):
            return
        down = yield from self.ask()  # an entry got through: is the empty request refused still?
        if down and down.fate is not Fate.OUTAGE and down.code != "RATE_LIMITED":  # full for now
            health.alive_until = float("inf")
            text = "the frontend takes entries, but no empty request: it is not asked so any more"
            say(logging.INFO, "empty_request_refused", text)


# ==================================================================================================
# Files
# Find, ready, stream, confirm, record. (Recordings that were uploaded are deleted further below.)
# ==================================================================================================


class Files(Delivery):
    """Uploads the recordings, one after the other, in turns with all other jobs."""

    def __init__(self, agent: Agent) -> None:
        super().__init__(agent, agent.health.files)
        self.reached = 0  # the last id of the last completed pass of the entries

    def turns(self) -> Steps[None]:
        while True:
            outage = self.endpoint.outage
            due = max(outage.due if outage else 0.0, self.health.quiet_until)
            if due <= time.monotonic():
                seq, due = self._next()
                if seq:
                    yield from self._deliver(seq)
                elif outage and due == float("inf") and not self.agent.once:
                    self.endpoint.outage = None
            yield Wait(due)

    def _next(self) -> tuple[int, float]:
        """The retry that is due, else the next one without a row (in an outage first that one: it
        has not failed). Else 0, and when there is something to do."""
        seq, due = self.next_retry(files=True)
        now = time.monotonic()
        if self.reached and (due > now or self.endpoint.outage):
            new = self.store.value(NEXT_ID, after=0, until=self.reached, files=True)
            if new:
                return new, now
        return (seq, now) if due <= now else (0, due)

    def _deliver(self, seq: int) -> Steps[None]:
        began, entry, verdict = time.monotonic(), None, None
        try:
            entry = self._read(seq)
            if entry is None:
                return
            verdict = yield from self._upload(entry)
        except (Stopping, Lost, Unavailable):
            raise
        except Exception as error:
            self._not_sent(seq, error, entry is not None and entry.uploaded)
        finally:
            if self.store.travelling:  # what waited for its end goes on
                self.store.travelling = None
                self.agent.entries.blind = False
                self.agent.entries.wake()
        if verdict is not None:
            if verdict.fate is Fate.SENT:
                return
            yield from self.conclude([seq], verdict)
        if entry is not None and entry.tries:
            self.endpoint.retried(time.monotonic(), time.monotonic() - began)

    def _read(self, seq: int) -> FileEntry | None:
        """What is known of it; None: it is gone, or waits for an entry."""
        row = self.store.first(READ_FILE, seq=seq)
        if row is None:
            self.store.run(SWEEP)  # somebody took it away: its row must not come up again
            return None
        entry = FileEntry(*row)
        if entry.waits_for is not None:  # its recording's entry, its call's, or an earlier file
            past = self.store.past(seq)
            if past is not None:
                verdict = Verdict(Fate.WAITS, "WAITS_FOR", f"waits for seq {entry.waits_for}")
                step = Step(False, past.tries, past.attempts, 0.0)
                self.store.set_waiting(seq, past, verdict, step, False, entry.waits_for)
            return None
        if entry.early:
            self.reached = seq - 1
            self.agent.entries.wake()
            return None
        return entry

    def _not_sent(self, seq: int, error: Exception, uploaded: bool) -> None:
        """The reason lies here."""
        if uploaded and isinstance(error.__cause__, FileNotFoundError):  # we removed it
            receipt = Receipt("none", 0, "", None, Answer(), "already_uploaded")
            self.store.record([seq], partial(self.store.confirm, [seq], receipt))
            text = f"recording {seq} was uploaded before"
            say_sent("file_already_uploaded", text, receipt.answer, None, SEQ=seq)
            return
        if isinstance(error, EntryTrouble):
            verdict = error.verdict
        elif isinstance(error, psycopg.Error):
            verdict = self.why_unreadable(seq, error)
        else:
            log.exception("a bug: recording %s cannot be handled", seq)
            reason = "an error of serversync's own: see the journal"
            verdict = Verdict(Fate.WAITS, "UNKNOWN", reason)
        if verdict.code == "ROOT_MISSING":
            self.begin_outage(verdict)
        else:
            self.failed(seq, verdict)

    def _upload(self, entry: FileEntry) -> Steps[Verdict]:
        """Steps 1 to 5 of a recording: find, ready, stream, confirm, record."""
        for name, value in (("callLogId", entry.call_log_id), ("recordingId", entry.recording_id)):
            if not value:
                raise EntryTrouble(Fate.DEAD, "BAD_PAYLOAD", f"its {name} is not a UUID")
        if entry.second:
            reason = "the frontend has another recording of this call"
            raise EntryTrouble(Fate.DEAD, "SECOND_RECORDING", reason)
        agent = self.agent
        grace_over = grace_is_over(entry.tries, entry.waited, agent.config.file_grace_sec)
        with (
            agent.recordings.root(agent.session.root_id, agent.adopt_root) as root,
            agent.recordings.opened(root, entry, grace_over) as ready,
        ):
            self.store.travelling = entry
            while agent.entries.under_way:  # it may hold what this would be written over by
                yield Wait(time.monotonic() + 0.2)
            yield from self.pause()
            verdict, url, answer = yield from self._transfer(entry, ready)
            if verdict.fate is Fate.SENT:
                try:
                    check_sent(ready.folder, {ready.name: ready.files[0]})
                except OSError:
                    reason = "the file changed while it was sent"
                    raise EntryTrouble(Fate.WAITS, "FILE_CHANGED", reason) from None
                self._confirmed(entry, ready, verdict, url, answer)
            return verdict

    def _transfer(self, entry: FileEntry, ready: Ready) -> Steps[tuple[Verdict, str, Answer]]:
        """Uploads the file, and asks whether it is there."""
        frontend, rate = self.agent.frontend, self.agent.config.upload_kbps * 125.0
        if rate and ready.size / rate > LIFT_LIMIT_SEC:
            rate = 0.0
            text = "is too large for SYNC_UPLOAD_KBPS: sent without the limit"
            say(logging.WARNING, "limit_lifted", f"recording {entry.seq} {text}", SEQ=entry.seq)
        answer = yield from self._shown(frontend.upload(entry, ready, rate), entry, ready)
        verdict, url = confirm_upload(answer, ready.key, ready.size, time.time())
        if verdict.fate is Fate.SENT and not (yield from self._same_digest(ready, answer)):
            verdict = classify(replace(answer, detail="it stored other bytes (sha256)"))
        if verdict.fate is Fate.SENT and frontend.trusted is not False:
            look = yield from self._stored(frontend, entry, ready)
            verdict = verdict if look.fate is Fate.SENT else look
        return verdict, url, answer

    def _shown(self, steps: Steps[Answer], entry: FileEntry, ready: Ready) -> Steps[Answer]:
        """What is uploaded, with its progress."""
        began, text = time.monotonic(), f"uploading recording {entry.seq}"
        wire = self.agent.frontend.files  # a reload makes others
        more: dict[str, object] = {"kind": "upload", "seq": entry.seq, "size": ready.size}
        while True:
            try:
                wait = next(steps)
            except StopIteration as end:
                answer: Answer = end.value
                return answer
            sent, seconds = wire.sent, time.monotonic() - began
            more |= {"bytes": min(sent, ready.size), "seconds": seconds}
            self.voice.busy(f"{text}: {human(sent)} of {human(ready.size)}", **more)
            yield wait

    def _stored(self, frontend: Frontend, entry: FileEntry, ready: Ready) -> Steps[Verdict]:
        """What HEAD says of the upload. Whether that can be trusted shows the first one: a page
        that has a length for what was never uploaded tells nothing."""
        yield from self.pause()
        for _ in range(3):  # an answer that tells nothing is asked for again
            look = yield from frontend.stored_length(entry.call_log_id, entry.recording_id)
            told = look.status == 200 and look.headers.get("content-length", "").isdigit()
            if told or look.status == 404:
                break
            until = time.monotonic() + 1.0
            while time.monotonic() < until:  # whoever wakes this job
                yield Wait(until)
        if frontend.trusted is None:
            nobody = str(uuid.uuid4())
            other = yield from frontend.stored_length(nobody, nobody)
            if other.status == 404 and told:
                frontend.trusted = True
            # With one of these the page may be there later.
            elif not {None, 429, 500, 502, 503, 504} & {look.status, other.status}:
                frontend.trusted = False
                text = "the frontend has no page that tells what it has: uploads are not verified"
                say(logging.INFO, "not_verified", f"{text} (SYNC_VERIFY_PATH)")
        if not frontend.trusted:
            return Verdict(Fate.SENT, "", "confirmed")
        return confirm_length(look, ready.size)

    def _same_digest(self, ready: Ready, answer: Answer) -> Steps[bool]:
        """Compares with the digest in the answer, if there is one; most frontends give none."""
        claimed = (answer.said or {}).get("sha256")
        if claimed is None:
            return True
        digest, at = hashlib.sha256(), 0
        while piece := os.pread(ready.fd, PIECE, at):
            digest.update(piece)
            at += len(piece)
            yield AT_ONCE
        return str(claimed).lower() == digest.hexdigest()

    def _confirmed(
        self, entry: FileEntry, ready: Ready, verdict: Verdict, url: str, answer: Answer
    ) -> None:
        outcome = "conflict_processed" if verdict.code else "sent"
        receipt = Receipt(
            "file", ready.size, ready.key, None, answer, outcome, entry.call_log_id,
            entry.recording_id, url, ready.directory, json.dumps(ready.files),
        )  # fmt: skip

        def write() -> None:
            self.store.confirm([entry.seq], receipt)
            self.agent.deletions.wake()  # now: it may have waited for a lock

        self.store.record([entry.seq], write, entry)
        self.succeeded(1)
        self.voice.tally.files += 1
        self.voice.tally.bytes += ready.size
        text = f"uploaded recording {entry.seq} ({human(ready.size)}) in {answer.duration:.1f} s"
        more = {"SEQ": entry.seq, "ENTITY_TYPE": "recording_file", "CALL_ID": ready.directory}
        say_sent("file_uploaded", text, answer, ready.key, **more)


# ==================================================================================================
# Deletions
# Step 6 of a recording, from the table of confirmed uploads alone.
# ==================================================================================================


class Deletions(Job):
    """Removes what was uploaded, one recording a step."""

    def __init__(self, agent: Agent) -> None:
        super().__init__()
        self.agent, self.store, self.repeats = agent, agent.store, agent.voice.repeats

    def turns(self) -> Steps[None]:
        while True:
            due, after = float("inf"), 0
            try:
                while rows := self.store.run(UPLOADS, after=after, limit=100):
                    for upload in (Upload(*row) for row in rows):
                        due = min(due, time.monotonic() + self._try(upload))
                        after = upload.seq
                        yield AT_ONCE
                self.repeats.over("root")
            except EntryTrouble as trouble:
                due = time.monotonic() + 60.0
                text = f"uploaded recordings cannot be deleted: {trouble}"
                self.repeats.say("root", str(trouble), logging.WARNING, "root_missing", text)
            # Not anew for each upload: a round looks at all that are watched.
            soon = time.monotonic() + self.agent.config.delete_after_sec / 10
            yield Wait(max(due, soon))
            while time.monotonic() < soon:
                yield Wait(soon)

    def _try(self, upload: Upload) -> float:
        """In how many seconds it is to be looked at again; never, when it is gone."""
        agent, quiet = self.agent, self.agent.config.delete_after_sec
        where, seq = upload.directory, upload.seq
        with agent.recordings.root(agent.session.root_id, agent.adopt_root) as root:
            try:
                if upload.root_id not in (None, agent.session.root_id):
                    raise OSError(errno.EXDEV, "left on the old disk, of which it was uploaded")
                if wait := agent.recordings.until_quiet(root, where, quiet, agent.once):
                    return wait
                rivals = list(self._rivals(upload))
                if any(rivals):
                    return 60.0
                everything = agent.config.extra_files == "delete" and not rivals
                agent.recordings.remove(root, upload, everything)
            except (OSError, psycopg.Error, KeyError, TypeError) as met:  # deliveries go on
                why = clean(f"{where}: {getattr(met, 'strerror', None) or repr(met)}")
                self.store.run(DELETION_FAILED, seq=seq, directory=where, error=why)
                text = f"uploaded recording {seq} cannot be deleted, tried again later: {why}"
                topic, about = f"deletion {seq}", {"SEQ": seq, "CALL_ID": where}
                self.repeats.say(topic, why, logging.WARNING, "deletion_failed", text, **about)
                return backoff(upload.tries + 1, 1.0)
        self.store.run(FORGET_UPLOAD, seq=seq, directory=where)
        agent.voice.tally.removed += 1
        self.repeats.over(f"deletion {seq}")
        return float("inf")

    def _rivals(self, upload: Upload) -> Iterator[bool]:
        """Who else needs this directory (a Call-ID can come twice), and whether that is pending. Of
        one that was given up, or uploaded, too, no file but those uploaded may go."""
        rivals = self.store.run(RIVALS, directory=upload.directory, seq=upload.seq)
        for file_path, call_id, pending in rivals:
            with contextlib.suppress(EntryTrouble):
                where = locate(file_path, call_id, self.agent.config.recordings_dir)[0]
                if where == upload.directory:
                    yield pending


class Housekeeping(Job):
    """Old rows, and what a rebuilt table has lost."""

    def __init__(self, agent: Agent) -> None:
        super().__init__()
        self.agent = agent
        self.prune_due = time.monotonic() + PRUNE_AFTER
        self.lacking = False  # the index or the trigger: tried once a minute

    def turns(self) -> Steps[None]:
        while True:
            if self.lacking and not self.agent.session.make_optional():
                say(logging.INFO, "recovered", "index and NOTIFY trigger are there now")
            now, days = time.monotonic(), self.agent.config.retention_days
            if days and now >= self.prune_due:
                self.prune_due = now + (1.0 if self._prune(days) else 86400.0)
            yield Wait(min(self.prune_due if days else float("inf"), now + 60.0))

    def _prune(self, days: float) -> bool:
        """A chunk of them, where there is one; an unprocessed row never, however old."""
        try:
            pruned = self.agent.store.run(PRUNE, days=days)[0]
        except psycopg.Error as error:
            text = f"old rows cannot be pruned: {error}"
            self.agent.voice.repeats.say("prune", str(error), logging.WARNING, "prune_failed", text)
            return False
        if any(pruned):
            text = "pruned {} old rows of the outbox, {} receipts and {} letters"
            say(logging.INFO, "pruned", text.format(*pruned))
        return any(pruned)


# ==================================================================================================
# The agent
# Connect, lock, LISTEN; every job has its turn; one wait point.
# ==================================================================================================

STANDBY: Final = "standby: another agent holds the lock"
LOCK_PATIENCE: Final = 30.0  # `once` waits so long for what somebody else has locked


class Busy(Exception):
    """Another agent holds the lock."""


# What keeps the loop, or a job, from going on; the first that fits: level, event, text.
TROUBLES: Final = (
    (Busy, logging.INFO, "standby", STANDBY),
    (Lost, logging.WARNING, "database_lost", "the database connection is lost: {error}"),
    (NotRecorded, logging.ERROR, "not_recorded",
     "a result cannot be recorded, nothing else is sent: {error}"),
    (Unavailable, logging.WARNING, "database_outage", "{error}"),
    (psycopg.errors.LockNotAvailable, logging.WARNING, "database_locked",
     "somebody has locked a table of the database: nothing is sent until that ends"),
    (Exception, logging.ERROR, "cycle_failed", "a cycle failed, and is tried again: {error!r}"),
)  # fmt: skip


class Agent:
    """Holds the lock, and gives every job its turn."""

    def __init__(
        self, config: Config, process: Process, show: Callable[..., None], once: bool,
        more: Sequence[Callable[[Agent], Job]] = (),
    ) -> None:  # fmt: skip
        self.config, self.process, self.once = config, process, once
        self.session = Session(config.database_url, config.device_id, process)
        self.store = Store(self.session)
        self.frontend = Frontend(config, process)
        self.recordings = Recordings(config.recordings_dir)
        self.health = Health(config)
        self.voice = Voice(show, self.session, self.health)
        self.entries, self.files = Entries(self), Files(self)
        self.deletions, self.housekeeping = Deletions(self), Housekeeping(self)
        jobs = [self.entries, self.deletions, self.files, *(make(self) for make in more)]
        self.jobs: list[Job] = [*jobs, self.housekeeping]
        self.voice.jobs = self.jobs
        self.failures = 0  # of the loop, in a row, until all is at rest

    def look(self) -> Look:
        """What there is to do; wakes whom that concerns."""
        look = Look(*self.store.run(LOOK)[0])
        self.voice.done = IDLE  # unless there is more to say
        self.store.rows = look.waiting
        if look.lacking and not self.housekeeping.lacking:
            self.housekeeping.wake()
        self.housekeeping.lacking = look.lacking
        return look

    def passed(self, until: int) -> None:
        """A pass of the entries is complete: recordings up to this id may go."""
        self.files.reached = until
        if until:
            self.files.wake()

    def adopt_root(self, root_id: str) -> None:
        self.session.run(ADOPT_ROOT, root_id=root_id)
        self.session.root_id = root_id
        say(logging.INFO, "root_marked", f"{self.recordings.path} is the recordings directory")

    def _loop(self) -> None:
        """Until a signal asks for the end; `once` until there is nothing to do at once. It waits
        for what somebody else has locked, too, but not for ever."""
        ready: set[int] = set()
        resume_at, give_up_at = 0.0, float("inf")
        while True:
            try:
                self.process.check()
                if self.process.reload:
                    self.reload()
                    resume_at = 0.0
                if time.monotonic() >= resume_at:
                    self.hold()
                    self.turn(ready)
                    now = time.monotonic()
                    waits = self.once and self.store.settle_at < float("inf")
                    give_up_at = min(give_up_at, now + LOCK_PATIENCE) if waits else float("inf")
                    if self.idle() or now > give_up_at:
                        self.failures = 0
                        self.voice.rest()
                        if self.once:
                            return
                ready = self.rest(resume_at)
            except Exception as error:
                enough = self.once and (self.failures >= 5 or not isinstance(error, Lost))
                if enough or isinstance(error, (Stopping, ConfigError)):
                    raise
                resume_at = time.monotonic() + self.pause_after(error)

    def hold(self) -> None:
        """Returns with the connection made and the lock taken; raises Unavailable, or Busy."""
        if self.session.locked:
            return
        generation = self.session.generation
        try:
            if self.session.conn is None:
                self.session.connect()
            if not self.session.take_lock():
                raise Busy(STANDBY)
        except (Unavailable, Lost, psycopg.Error, ConfigError) as error:
            self.session.close()
            if isinstance(error, ConfigError) and not generation:
                raise  # later it is a state: a restore may be under way
            raise Unavailable(" ".join(str(error).split())) from None
        if self.session.generation != generation:  # the rows may be others
            if self.store.unwritten or any(job.under_way for job in self.jobs):
                say(logging.WARNING, "fenced", "another sender came between: a result is discarded")
            self.store.unwritten.clear()
            for job in self.jobs:
                job.close()
        self.files.reached, self.store.rows = 0, True
        for job in self.jobs:
            job.wake()
        if self.once:
            self.store.before = self.store.before or self.session.run("select now()")[0][0]
        elif self.health.untried:
            self.try_now()
        troubles = ("standby", "database_lost", "database_outage")
        over = [self.voice.repeats.over(trouble) for trouble in troubles]
        if any(over):
            say(logging.INFO, "recovered", "the database is there, and the lock is ours")

    def turn(self, ready: Container[int] = ()) -> None:
        """Every job has its turn; what was confirmed is written down before anything else."""
        for job in self.jobs:
            self.process.check()
            self.store.settle()
            if self.store.stuck:
                break
            try:
                job.step(time.monotonic(), ready)
            except Exception as error:
                if self.once or isinstance(error, (Stopping, Lost, ConfigError)):
                    raise
                self._met(error)
                job.failures += 1  # by an error of its own: the other jobs go on
                job.wait = Wait(time.monotonic() + backoff(min(job.failures, 5), 1.0))
        if self.session.news():  # last: what came with a statement's answer wakes no poll
            self.entries.wake()

    def idle(self) -> bool:
        now = time.monotonic()
        resting = all(not job.under_way and job.wait.until > now for job in self.jobs)
        return resting and not self.store.travelling and self.store.settle_at == float("inf")

    def rest(self, resume_at: float) -> set[int]:
        """The one wait point: the database's socket, those of the requests under way, and signals;
        until something is due. Returns what is ready."""
        self.process.progress()
        if time.monotonic() < resume_at:
            return self.process.wait(resume_at)
        jobs = [] if self.store.stuck else self.jobs
        sockets = [(job.wait.fd, job.wait.events) for job in jobs if job.under_way]
        if self.session.conn is not None:
            sockets.append((self.session.conn.fileno(), select.POLLIN))
        until = min([self.store.settle_at, *(job.wait.until for job in jobs)])
        return self.process.wait(until, sockets)

    def pause_after(self, error: Exception) -> float:
        """It keeps the loop from going on: in how many seconds that is tried again."""
        self._met(error)
        if isinstance(error, Busy):
            return 2.0
        self.failures += 1
        return backoff(self.failures - 1, 0.5 + random.random() / 2, cap=15.0)

    def _met(self, error: Exception) -> None:
        """What went wrong is said, once a minute."""
        _, level, event, text = next(row for row in TROUBLES if isinstance(error, row[0]))
        text, bug = text.format(error=error), event == "cycle_failed"
        self.voice.repeats.say(event, text, level, event, text, exc_info=bug)
        self.voice.report(text)
        if getattr(error.__cause__ or error, "sqlstate", None) in ("3F000", "42P01", "42883"):
            self.session.close()  # our schema is gone (a restore?): made anew with the lock

    def reload(self) -> None:
        """SIGHUP: a good configuration takes over, a bad one is refused with its reasons."""
        self.process.reload = False
        daemon.notify(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")
        try:
            self._use(self.reread())
            say(logging.INFO, "reloaded", "the configuration was read again")
        except ConfigError as error:
            for problem in error.problems:
                say(logging.ERROR, "bad_configuration", f"the old configuration stays: {problem}")
        finally:
            daemon.notify("READY=1")

    reread: Callable[[], Config]

    def _use(self, config: Config) -> None:
        """All that is remembered of an outage is forgotten: perhaps this was the cure. What is
        under way goes on with what it began with."""
        frontend = Frontend(config, self.process)  # the one that can fail, by its TLS files
        configure_logging(config)
        self.session.use(config.database_url, config.device_id)
        self.frontend, self.config = frontend, config
        self.recordings = Recordings(config.recordings_dir)
        self.health.entries.most = config.batch_size
        self.try_now()
        for job in self.jobs:
            job.reload()

    def try_now(self) -> None:
        """Every outage and pause ends, and what waits for its time is due."""
        self.health.alive_until = self.health.quiet_until = 0.0
        for endpoint in self.health.endpoints:
            endpoint.forget()
            self.voice.repeats.over(endpoint.name)
        self.health.untried = not self.session.locked  # then as soon as it is
        if self.session.locked:
            self.store.record([], partial(self.session.run, MAKE_DUE, everything=True))

    def serve(self) -> int:
        """`run`: until a signal asks for the end."""
        daemon.notify("READY=1")
        say(logging.INFO, "started", f"serversync {__version__} started")
        with contextlib.suppress(Stopping):
            self._loop()
        self._finish()
        daemon.notify("STOPPING=1\nSTATUS=stopped")
        say(logging.INFO, "stopped", "stopped; what is pending waits in the outbox")
        self.close()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # while Python ends, they would kill
        return EX_OK

    def _finish(self) -> None:
        """What is under way may still end by itself, for a moment."""
        until = time.monotonic() + STOP_GRACE
        busy: list[Job] = [self.entries, self.files]
        with contextlib.suppress(Lost, Unavailable, Stopping, psycopg.Error):
            while (busy := [job for job in busy if job.under_way]) and time.monotonic() < until:
                due = min(until, *(job.wait.until for job in busy))
                self.process.wait(due, [(job.wait.fd, job.wait.events) for job in busy])
                for job in busy:
                    job.step(float("inf"), ())

    def run_once(self) -> int:
        """`once`: delivers what is due, and says by its exit code how that went."""
        try:
            self._loop()
            look = self.look()
        except Busy:
            say(logging.WARNING, "busy", "another agent holds the lock: try later")
            return EX_TEMPFAIL
        except (Unavailable, Lost, psycopg.Error) as error:
            say(logging.ERROR, "unavailable", str(error))
            return EX_UNAVAILABLE
        except Stopping:
            self._finish()
            say(logging.WARNING, "stopped", "stopped before the end")
            return EX_TEMPFAIL
        finally:
            self.close()
        say(logging.INFO, "done", self.voice.sentence)
        outages = [each.outage for each in self.health.endpoints if each.outage]
        if any(outage.code != "ROOT_MISSING" for outage in outages):
            return EX_UNAVAILABLE
        if self.voice.deaths:
            return EX_PERSON
        return EX_TEMPFAIL if look.entries or look.files else EX_OK

    def close(self) -> None:
        for job in self.jobs:
            job.close()
        self.session.close()


# ==================================================================================================
# ROOM 2: Settings
# From the frontend to the backend. It names nothing of room 3.
# ==================================================================================================

# ==================================================================================================
# Settings pull: what the answers mean
# From the frontend to the backend. Pure: four answers are checked item by item and become rows;
# what cannot become one is skipped, with the reason.
# ==================================================================================================


class NotNow(Exception):
    """The frontend gave no settings, or the database takes none: later; carries the verdict."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.reason)
        self.verdict = verdict


class BadItem(Exception):
    """One item cannot become a row; says why."""


@dataclass(frozen=True)
class Remark:
    """What is said of one item: it was skipped, or mended."""

    item: str
    reason: str
    skipped: bool = True


@dataclass
class Section:
    """One of the four, as it will stand in the backend's tables."""

    name: str
    counts: dict[str, int]  # what was found good, by its word: the first is the section's items
    tables: dict[str, Any]  # rows as JSON, by their table
    remarks: list[Remark]

    @property
    def digest(self) -> str:
        text = json.dumps(self.tables, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


SETTINGS_MAX: Final = 2 * 1024 * 1024  # parsed it takes many times that, and the unit has 128 MB
# Each section's address, and the list that its answer must have.
SOURCES: Final = {
    "number-groups": ("/api/number-groups", "callerGroups"),
    "call-actions": ("/api/call-actions", "rules"),
    "announcements": ("/api/announcements", "announcements"),
    "ivr-flows": ("/api/ivr-flows/export", "flows"),
}
Sounds = Mapping[str, tuple[str | None, str | None]]  # announcement: its audio's URL, its text
_UUID: Final = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")

ANNOUNCEMENT_TYPES: Final = ("greeting", "hold", "ivr", "closed", "recording_notice", "custom")
AUDIO_URL: Final = "/audio/announcements/"
ACTIONS: Final = {  # where the answer has none
    "anonymousAction": {"actionType": "deny", "actionConfig": {"actionCode": "BZ"}},
    "defaultAction": {"actionType": "allow", "actionConfig": {"actionCode": "VR"}},
}
# Whose audio the exit of a route plays: by its action.
EXIT_SOUND: Final = {
    "AN": "announcementId",
    "VM": "announcementId",
    "VB": "welcomeAnnouncementId",
}
HOLD_TIMES, HOLD_SEC = 3, 600.0
_UNFIT: Final = re.compile("[\0\ud800-\udfff]")  # PostgreSQL takes neither
_WIDE: Final = re.compile("[０-９＋＊＃]")
_NARROW: Final = str.maketrans("０１２３４５６７８９＋－（）＊＃", "0123456789+-()*#")
INT4: Final = (1 << 31) - 1


def settings_answer(name: str, answer: Answer) -> dict[str, Any]:
    """What the frontend says of a section; NotNow for anything but the contract's words."""
    said: Any = None
    with contextlib.suppress(ValueError, RecursionError):
        said = json.loads(answer.body, parse_constant=int)  # which refuses NaN
    key = SOURCES[name][1]
    good = answer.status == 200 and answer.complete and isinstance(said, dict)
    if not good or said.get("ok") is not True:
        raise NotNow(classify(answer, time.time()))
    if not isinstance(said.get(key), list):
        raise NotNow(classify(replace(answer, detail=f"it has no list {key!r}")))
    return dict(said)


def fit(value: Any) -> Any:
    """JSON as jsonb takes it: no NUL, no half surrogate; BadItem for a number without end."""
    if isinstance(value, str):
        return _UNFIT.sub("", value)
    if isinstance(value, dict):
        return {fit(key): fit(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [fit(inner) for inner in value]
    if isinstance(value, float) and value - value != 0:
        raise BadItem("a number in it is too large")
    return value


class Item:
    """An object from outside, field by field; BadItem where one is not as the tables want it."""

    def __init__(self, value: object) -> None:
        if not isinstance(value, dict):
            raise BadItem("it is not an object")
        self.fields: dict[str, Any] = value

    def text(self, key: str, most: int = 0, needed: bool = False) -> str | None:
        value = self.fields.get(key)
        if value is None and not needed:
            return None
        if not isinstance(value, str):
            raise BadItem(f"{key} is {'missing' if value is None else 'not text'}")
        value = fit(value)
        if most and len(value) > most:
            raise BadItem(f"{key} is longer than {most} characters")
        return str(value)

    def uuid(self, key: str, needed: bool = False) -> str | None:
        value = self.fields.get(key)
        if value is None and not needed:
            return None
        if not isinstance(value, str) or not _UUID.fullmatch(value):
            raise BadItem(f"{key} is {'missing' if value is None else 'no UUID'}")
        return value.lower()

    def flag(self, key: str) -> bool:
        value = self.fields.get(key, True)
        if not isinstance(value, bool):
            raise BadItem(f"{key} is neither true nor false")
        return value

    def number(self, key: str) -> int | float | None:
        value = self.fields.get(key)
        if value is not None and (type(value) not in (int, float) or not -INT4 <= value <= INT4):
            raise BadItem(f"{key} is no number that fits")
        return value

    def whole(self, key: str) -> int | None:
        value = self.number(key)
        if value is not None and value != int(value):
            raise BadItem(f"{key} is not a whole number ({value})")
        return None if value is None else int(value)

    def time(self, key: str) -> str | None:
        value = self.text(key)
        if value is None:
            return None
        try:
            at = datetime.fromisoformat(value)
            at = at if at.tzinfo else at.replace(tzinfo=UTC)
            return at.astimezone(UTC).isoformat()
        except (ValueError, OverflowError):
            raise BadItem(f"{key} is no time") from None

    def mapping(self, key: str) -> dict[str, Any]:
        value = self.fields.get(key)
        if not isinstance(value, dict):
            raise BadItem(f"{key} is {'missing' if value is None else 'not an object'}")
        return dict(fit(value))


def _has_unfit(value: Any) -> bool:
    return bool(re.search(r"\\u0000|\\ud[89a-f]", json.dumps(value))) and fit(value) != value


def label_of(value: object, position: int) -> str:
    """How people find the item: by its place in the list, and its name."""
    fields = value if isinstance(value, dict) else {}
    name = fields.get("name") or fields.get("id") or "?"
    return f"{position + 1}. {str(name)[:60]!r}"


@contextlib.contextmanager
def skipping(remarks: list[Remark], item: str, value: object = None) -> Iterator[None]:
    """One bad item is skipped and said; the others go on."""
    try:
        if isinstance(value, dict):
            own = {k: v for k, v in value.items() if k not in ("phoneNumbers", "routes")}
            if _has_unfit(own):
                text = "NUL characters or half surrogates were dropped from it"
                remarks.append(Remark(item, text, skipped=False))
        yield
    except BadItem as why:
        remarks.append(Remark(item, str(why)))
    except RecursionError:
        remarks.append(Remark(item, "it is nested too deeply"))


def phone_number(text: object) -> str:
    """A number as the backend keeps it."""
    if not isinstance(text, str):
        raise BadItem("a phone number is not text")
    number = re.sub(r"[-()\s]", "", text.translate(_NARROW))
    if number.startswith("0"):
        number = "+81" + number[1:]
    if not re.fullmatch(r"\+[1-9][0-9]{1,14}", number):
        raise BadItem("it is no phone number such as +81312345678 or 03-1234-5678")
    return number


def read_groups(said: Mapping[str, Any]) -> tuple[Section, set[str]]:
    """The number groups, and their ids. A number in several groups belongs to the last one."""
    remarks: list[Remark] = []
    names: dict[str, str] = {}
    owner: dict[str, str] = {}
    for at, value in enumerate(said["callerGroups"]):
        label = label_of(value, at)
        with skipping(remarks, label, value):
            item = Item(value)
            group, name = str(item.uuid("id", True)), str(item.text("name", 255, True))
            numbers = item.fields.get("phoneNumbers")
            if not isinstance(numbers, list):
                raise BadItem("phoneNumbers is not a list")
            if group in names:
                raise BadItem(f"its id is that of an earlier group ({names[group][:60]!r})")
            names[group] = name
            for text in numbers:
                shown = str(text)[:60]
                with skipping(remarks, f"{label}: {shown!r}"):
                    owner[phone_number(text)] = group
                    if _WIDE.search(str(text)):
                        note = "full-width characters were made plain ones"
                        remarks.append(Remark(f"{label}: {shown!r}", note, skipped=False))
    members: dict[str, list[str]] = {}
    for number, group in sorted(owner.items()):
        members.setdefault(group, []).append(number)
    rows = [
        {"group_id": group, "group_name": names[group], "numbers": members[group]}
        for group in sorted(members)
    ]
    counts = {"groups": len(names), "numbers": len(owner)}
    return Section("number-groups", counts, {"registered_numbers": rows}, remarks), set(names)


def read_action(value: object) -> dict[str, Any]:
    """allow or deny, and how."""
    item = Item(value)
    kind = item.text("actionType", 0, True)
    if kind not in ("allow", "deny"):
        raise BadItem("actionType is neither allow nor deny")
    return {"actionType": kind, "actionConfig": item.mapping("actionConfig")}


def read_rules(said: Mapping[str, Any], groups: set[str] | None) -> Section:
    """The call actions. Without groups (their section is held) it is not asked which there are."""
    remarks: list[Remark] = []
    rows: dict[str, dict[str, Any]] = {}
    for at, value in enumerate(said["rules"]):
        with skipping(remarks, label_of(value, at), value):
            item = Item(value)
            rule, group = str(item.uuid("id", True)), item.uuid("callerGroupId")
            if rule in rows:
                raise BadItem(f"its id is that of an earlier rule ({rows[rule]['name'][:60]!r})")
            if group is not None and groups is not None and group not in groups:
                raise BadItem(f"there is no number group {group}")
            action = read_action(value)
            rows[rule] = {
                "id": rule,
                "name": item.text("name", 255, True),
                "caller_group_id": group,
                "action_type": action["actionType"],
                "action_config": action["actionConfig"],
                "priority": at,
                "is_active": item.flag("isActive"),
            }
    extra = {}
    for key, default in ACTIONS.items():
        with skipping(remarks, key, said.get(key)):
            extra[key] = default if said.get(key) is None else read_action(said[key])
    tables = {"call_action_rules": list(rows.values()), "system_settings": extra}
    return Section("call-actions", {"rules": len(rows)}, tables, remarks)


def audio_name(url: str) -> str:
    """The file's name in the announcements directory; BadItem for what could lead elsewhere."""
    name = url.removeprefix(AUDIO_URL)
    unsafe = name == url or bool(re.search(r"[/%\\?#\x00-\x1f\x7f-\x9f\u2028\u2029]", name))
    unsafe = unsafe or name in ("", ".", "..") or name.startswith(TEMPORARY)
    if unsafe or len(name.encode("utf-8", "replace")) > 255:
        raise BadItem(f"audioFileUrl is not {AUDIO_URL}<name>")
    return name


def rounded(number: float) -> int:
    """Half away from zero. (The fraction of a float is exact; adding 0.5 to it is not.)"""
    whole = int(number)
    return whole + ((number > 0) - (number < 0)) * (abs(number - whole) >= 0.5)


def read_announcements(said: Mapping[str, Any]) -> Section:
    remarks: list[Remark] = []
    rows: dict[str, dict[str, Any]] = {}
    for at, value in enumerate(said["announcements"]):
        with skipping(remarks, label_of(value, at), value):
            item = Item(value)
            announcement, name = str(item.uuid("id", True)), item.text("name", 100, True)
            if announcement in rows:
                raise BadItem("its id is that of an earlier announcement")
            url, text = item.text("audioFileUrl") or None, item.text("ttsText") or None
            if url is not None:
                audio_name(url)
            if url is None and text is None:
                raise BadItem("it has neither audioFileUrl nor ttsText")
            kind, seconds = item.text("announcementType"), item.number("durationSec")
            rows[announcement] = {
                "id": announcement,
                "name": name,
                "description": item.text("description"),
                "announcement_type": kind if kind in ANNOUNCEMENT_TYPES else "custom",
                "is_active": item.flag("isActive"),
                "audio_file_url": url,
                "tts_text": text,
                "duration_sec": None if seconds is None else rounded(seconds),
                "language": item.text("language", 10) or "ja",
                "updated_at": item.time("updatedAt"),
            }
    ordered = [rows[key] for key in sorted(rows)]
    counts = {"announcements": len(rows)}
    return Section("announcements", counts, {"announcements": ordered}, remarks)


def sounds_of(section: Section) -> Sounds:
    rows = section.tables["announcements"]
    return {row["id"]: (row["audio_file_url"], row["tts_text"]) for row in rows}


def audio_of(section: Section) -> list[dict[str, str]]:
    """The files that the announcements want, each with what tells a new version from an old one."""
    newest: dict[str, str] = {}
    for row in section.tables["announcements"]:
        if row["audio_file_url"]:
            name = audio_name(row["audio_file_url"])
            newest[name] = max(newest.get(name, ""), row["updated_at"] or "")
    return [{"name": name, "version": newest[name]} for name in sorted(newest)]


@dataclass
class Exit:
    """What a key of a flow leads to; without a key: what no key and a wrong one lead to."""

    key: str
    label: str
    code: str
    audio: str | None
    options: dict[str, Any]

    @property
    def flow(self) -> str | None:
        return self.options.get("ivrFlowId")


@dataclass
class Flow:
    id: str
    label: str
    row: dict[str, Any]
    audio: str | None
    text: str | None
    timeout: int
    retries: int
    exits: list[Exit]


def sound_of(item: Item, key: str, sounds: Sounds) -> tuple[str | None, str | None]:
    announcement = item.uuid(key)
    if announcement is None:
        return None, None
    if announcement not in sounds:
        raise BadItem(f"there is no announcement {announcement}")
    return sounds[announcement]


def read_exit(value: object, key: str, label: str, sounds: Sounds) -> Exit:
    item = Item(value)
    code = item.text("actionCode", 2, True)
    if not code:
        raise BadItem("actionCode is empty")
    options: dict[str, Any] = {"ivrFlowId": item.uuid("ivrFlowId")}
    scenario = item.fields.get("scenarioId")
    if scenario is not None and type(scenario) not in (str, int):
        raise BadItem("scenarioId is not text")
    options["scenarioId"] = fit(scenario)
    for name in ("recordingEnabled", "includeAnnouncement"):
        options[name] = None if item.fields.get(name) is None else item.flag(name)
    options = {name: option for name, option in options.items() if option is not None}
    audio = sound_of(item, EXIT_SOUND[code], sounds)[0] if code in EXIT_SOUND else None
    return Exit(key, label, code, audio, options)


def read_flow(value: object, label: str, sounds: Sounds, remarks: list[Remark]) -> Flow:
    item = Item(value)
    flow, name = str(item.uuid("id", True)), item.text("name", 100, True)
    row: dict[str, Any] = {"id": flow, "name": name, "description": item.text("description")}
    row["is_active"] = item.flag("isActive")
    audio, text = sound_of(item, "announcementId", sounds)
    timeout, retries = item.whole("timeoutSec"), item.whole("maxRetries")
    timeout = 10 if timeout is None or timeout <= 0 else timeout
    retries = 3 if retries is None else 2 if retries < 0 else retries
    routes = item.fields.get("routes")
    if routes is not None and not isinstance(routes, list):
        raise BadItem("routes is not a list")
    exits = []
    for at, route in enumerate(routes or []):
        where = f"{label}, route {at + 1}"
        with skipping(remarks, where, route):
            given = Item(route)
            key = str(given.text("dtmfKey", 0, True))
            if _WIDE.search(key):
                note = "full-width characters were made plain ones"
                remarks.append(Remark(where, note, skipped=False))
            key = key.translate(_NARROW)
            if not 1 <= len(key) <= 5:
                raise BadItem("dtmfKey has not 1 to 5 characters")
            exits.append(read_exit(given.fields.get("destination"), key, where, sounds))
    fallback = item.fields.get("fallbackAction")
    if fallback is not None:
        where = f"{label}, fallbackAction"
        with skipping(remarks, where, fallback):
            exits.append(read_exit(fallback, "", where, sounds))
    return Flow(flow, label, row, audio, text, timeout, retries, exits)


def closing_edges(edges: Mapping[str, Sequence[tuple[str, str]]]) -> set[tuple[str, str]]:
    """The exits (flow, key) that lead back into a flow that leads here: found from the first flow
    on, in the order of the lists. Not recursive: a chain of flows may be long."""
    closing: set[tuple[str, str]] = set()
    open_: dict[str, bool] = {}  # met: still on the way, or done
    for start in edges:
        way = [] if start in open_ else [(start, iter(edges[start]))]
        open_.setdefault(start, True)
        while way:
            flow, rest = way[-1]
            for key, target in rest:
                if open_.get(target):
                    closing.add((flow, key))
                elif target not in open_:
                    open_[target] = True
                    way.append((target, iter(edges[target])))
                    break
            else:
                open_[flow] = False
                way.pop()
        open_[start] = False
    return closing


def _drop_exits(flows: Mapping[str, Flow], remarks: list[Remark]) -> None:
    """Exits into flows that are not there, second ones of a key, and those that close a cycle."""
    for flow in flows.values():
        good: dict[str, Exit] = {}
        for each in flow.exits:
            if each.flow is not None and each.flow not in flows:
                remarks.append(Remark(each.label, f"there is no flow {each.flow}"))
            elif each.key in good:
                text = f"key {each.key!r} has a route already: the first one counts"
                remarks.append(Remark(each.label, text))
            else:
                good[each.key] = each
        flow.exits = list(good.values())
    edges = {
        flow.id: [(each.key, each.flow) for each in flow.exits if each.flow]
        for flow in flows.values()
    }
    closing = closing_edges(edges)
    for flow in flows.values():
        for each in flow.exits:
            if (flow.id, each.key) in closing:
                text = f"it leads back: flow {each.flow} leads here"
                remarks.append(Remark(each.label, text))
        flow.exits = [each for each in flow.exits if (flow.id, each.key) not in closing]


def read_flows(said: Mapping[str, Any], sounds: Sounds) -> Section:
    remarks: list[Remark] = []
    flows: dict[str, Flow] = {}
    for at, value in enumerate(said["flows"]):
        label = label_of(value, at)
        with skipping(remarks, label, value):
            flow = read_flow(value, label, sounds, remarks)
            if flow.id in flows:
                raise BadItem("its id is that of an earlier flow")
            flows[flow.id] = flow
    _drop_exits(flows, remarks)
    tables: dict[str, Any] = {"ivr_flows": [], "ivr_nodes": [], "ivr_transitions": []}
    for key in sorted(flows):
        tables["ivr_flows"].append(flows[key].row)
        nodes, transitions = flow_rows(flows[key])
        tables["ivr_nodes"] += nodes
        tables["ivr_transitions"] += transitions
    return Section("ivr-flows", {"flows": len(flows)}, tables, remarks)


def flow_rows(flow: Flow) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Its nodes and transitions. An id is a function of flow, role and key: a change of one route
    leaves all other rows as they are, also while a call is in them."""

    def made(role: str, key: str = "") -> str:
        return str(uuid.uuid5(uuid.UUID(flow.id), f"{role} {key}".strip()))

    def node(role: str, kind: str, depth: int, key: str = "", **more: Any) -> dict[str, Any]:
        parent = {0: None, 1: made("announce"), 2: made("keypad")}[depth]
        row = {"id": made(role, key), "flow_id": flow.id, "parent_id": parent, "node_type": kind}
        row |= {"action_code": None, "audio_file_url": None, "tts_text": None}
        return row | {"timeout_sec": 10, "max_retries": 3, "depth": depth} | more

    nodes = [
        node("announce", "ANNOUNCE", 0, audio_file_url=flow.audio,
             tts_text=None if flow.audio else flow.text),
        node("keypad", "KEYPAD", 1, timeout_sec=flow.timeout, max_retries=flow.retries),
    ]  # fmt: skip
    transitions = []
    for each in flow.exits:
        text = json.dumps(each.options, ensure_ascii=False, separators=(",", ":"))
        role = "exit" if each.key else "fallback"
        nodes.append(
            node(role, "EXIT", 2, each.key, action_code=each.code, audio_file_url=each.audio,
                 tts_text=text if each.options else None)
        )  # fmt: skip
        for kind in ("DTMF",) if each.key else ("TIMEOUT", "INVALID"):
            transitions.append(
                {
                    "id": made(kind, each.key),
                    "from_node_id": made("keypad"),
                    "input_type": kind,
                    "dtmf_key": each.key or None,
                    "to_node_id": made(role, each.key),
                }
            )
    return nodes, transitions


def shrunk(before: Mapping[str, int], now: Mapping[str, int]) -> bool:
    """Empty where it was not, or less than half of it: has the frontend lost its store?"""
    return any(2 * now.get(word, 0) < number for word, number in before.items())


def counted(counts: Mapping[str, int]) -> str:
    return ", ".join(count(number, word[:-1]) for word, number in counts.items())


def hold_on(known: Known, counts: Mapping[str, int], elapsed: float) -> tuple[bool, int, float]:
    """Whether a section is held, how often it came like this in a row, and over how long (of the
    agent's own running time, whatever the database's clock did)."""
    if not shrunk(known.counts, counts):
        return False, 0, 0.0
    times = known.held_times + 1
    seconds = known.held_seconds + (elapsed if known.held_times else 0.0)
    return times < HOLD_TIMES or seconds < HOLD_SEC, times, seconds


# ==================================================================================================
# Settings pull: the tables
# Each statement finds the difference between what is wanted and what is there, and (really) makes
# it: a row that is as it should be is not touched, and gets no new id.
# ==================================================================================================

# Ours: made with all the others.
MIGRATIONS[0] += """
-- What came back from the frontend: a row a section.
create table serversync.settings (
    section text primary key,
    position int not null,
    pulls bigint not null default 0,       -- tells whether another pull came between
    digest text,                           -- of the rows as they were applied last; null: never
    counts jsonb not null default '{}',    -- what these were, {"groups": 3, "numbers": 12}
    remarks jsonb not null default '[]',   -- [{item, reason, skipped}] of the last answer
    skipped int not null default 0,
    pulled_at timestamptz,
    changed_at timestamptz,
    error text,                            -- why the last answer was not applied
    held_counts jsonb,                     -- what came when it looked like a loss; null: not held
    held_times int not null default 0,     -- in a row
    held_seconds double precision not null default 0  -- of the agent's own running time
) with (fillfactor = 50);
insert into serversync.settings (section, position)
values ('number-groups', 1), ('call-actions', 2), ('announcements', 3), ('ivr-flows', 4);

-- The announcements' audio: what is wanted, and what the agent itself put there.
create table serversync.audio_files (
    name text primary key,
    version text not null,                 -- the frontend's updatedAt
    fetched text,                          -- the version that is there
    fetched_at timestamptz,
    files jsonb not null default '[]',     -- [{inode, size, mtime_ns, sha256}] as they were written
    etag text,
    tries int not null default 0,
    next_attempt_at timestamptz not null default now(),
    error text,
    unwanted double precision              -- seconds of the agent's own running time; null: wanted
);
"""
# The backend's tables that are there, and the rights on them that this role lacks. No lock.
SETTINGS_TABLES: Final = """
select t.name, c.oid is not null, array(
    select r.name from unnest(t.rights) r (name) where not has_table_privilege(c.oid, r.name)
    union all
    select 'update (' || a.attname || ')' from pg_attribute a
    where t.name = 'system_settings' and a.attrelid = c.oid and a.attname in ('extra', 'updated_at')
      and not has_column_privilege(c.oid, a.attnum, 'update'))
from (values ('registered_numbers', '{select,insert,update}'::text[]),
             ('call_action_rules', '{select,insert,update,delete}'),
             ('system_settings', '{select}'),
             ('announcements', '{select,insert,update,delete}'),
             ('ivr_flows', '{select,insert,update,delete}'),
             ('ivr_nodes', '{select,insert,update,delete}'),
             ('ivr_transitions', '{select,insert,update,delete}')) t (name, rights)
left join pg_class c on c.oid = to_regclass(t.name)
"""
# What is known of each section. (Read at the beginning of a pull: `pulls` tells at its end whether
# another one came between.)
SETTINGS_KNOWN: Final = """
select section, digest, counts, remarks, skipped, held_times, held_seconds, held_counts, error,
       pulls, extract(epoch from now() - pulled_at)::float8
from serversync.settings order by position
"""
SETTINGS_LOCK: Final = """
select coalesce(max(pulls), 0) from (select pulls from serversync.settings for update) s
"""
# How long a merge may wait for the backend, and take: calls go on meanwhile.
SETTINGS_BOUNDS: Final = "set local lock_timeout = '400ms'; set local statement_timeout = '8s'"
SETTINGS_SAME: Final = """
update serversync.settings set pulled_at = now(), pulls = pulls + 1
"""
SETTINGS_SAVE: Final = """
update serversync.settings
set pulled_at = now(), pulls = pulls + 1, remarks = %(remarks)s, skipped = %(skipped)s,
    digest = coalesce(%(digest)s, digest), counts = coalesce(%(counts)s::jsonb, counts),
    changed_at = case when %(changed)s then now() else changed_at end, error = %(error)s,
    held_times = %(held_times)s, held_seconds = %(held_seconds)s, held_counts = %(held_counts)s
where section = %(section)s
"""
# A person says that a section may be as small as it is now: that is what the next is compared with.
SETTINGS_ACCEPT: Final = """
update serversync.settings
set counts = held_counts, digest = coalesce(digest, ''), pulls = pulls + 1,
    held_times = 0, held_seconds = 0, held_counts = null
where section = %(section)s and held_counts is not null returning 1
"""
# What a section is compared with that was never applied: what is in the backend's tables.
SETTINGS_THERE: Final = {
    "number-groups": """
select jsonb_build_object('groups', count(distinct group_id), 'numbers', count(*))
from registered_numbers where deleted_at is null and group_id is not null
""",
    "call-actions": "select jsonb_build_object('rules', count(*)) from call_action_rules",
    "announcements": "select jsonb_build_object('announcements', count(*)) from announcements",
    "ivr-flows": "select jsonb_build_object('flows', count(*)) from ivr_flows",
}
# The announcements as they are, while their section is held.
SOUNDS_THERE: Final = "select id::text, audio_file_url, tts_text from announcements"
# Numbers that are in no group any more are deleted softly, and come back under their old id. Those
# that never had a group stay, unless %(replace)s. Reads the whole table; row locks on what changes.
MERGE_NUMBERS: Final = """
with wanted as (
    select g.group_id, g.group_name, n.phone_number
    from jsonb_to_recordset(%(rows)s::jsonb) g (group_id uuid, group_name text, numbers text[])
    cross join lateral unnest(g.numbers) n (phone_number)
), live as (
    select * from registered_numbers where deleted_at is null
), once as (
    select distinct on (phone_number) id, phone_number from registered_numbers
    where deleted_at is not null order by phone_number, deleted_at desc, id
), changes as materialized (
    select case when w.phone_number is null then 'delete' when l.id is not null then 'update'
                when o.id is not null then 'revive' else 'insert' end as action,
           coalesce(l.id, o.id) as id, coalesce(w.phone_number, l.phone_number) as phone_number,
           w.group_id, w.group_name
    from wanted w
    full join live l on l.phone_number = w.phone_number
    left join once o on l.id is null and o.phone_number = w.phone_number
    where case when w.phone_number is null then l.group_id is not null or %(replace)s::boolean
               else (l.group_id, l.group_name) is distinct from (w.group_id, w.group_name) end
), deleted as (
    update registered_numbers r
    set deleted_at = now(), updated_at = now(), version = coalesce(r.version, 0) + 1
    from changes c where %(really)s::boolean and c.action = 'delete' and r.id = c.id
), updated as (
    update registered_numbers r
    set group_id = c.group_id, group_name = c.group_name, deleted_at = null, updated_at = now(),
        version = coalesce(r.version, 0) + 1
    from changes c where %(really)s::boolean and c.action in ('update', 'revive') and r.id = c.id
), inserted as (
    insert into registered_numbers
        (id, phone_number, group_id, group_name, version, created_at, updated_at)
    select gen_random_uuid(), phone_number, group_id, group_name, 1, now(), now() from changes
    where %(really)s::boolean and action = 'insert'
)
select action, count(*), (array_agg(phone_number::text order by phone_number))[1:%(most)s::int]
from changes group by 1 order by 1
"""
MERGE_RULES: Final = """
with wanted as (
    select * from jsonb_to_recordset(%(rows)s::jsonb) w
        (id uuid, name text, caller_group_id uuid, action_type text, action_config jsonb,
         priority int, is_active boolean)
), changes as materialized (
    select case when t.id is null then 'insert' when w.id is null then 'delete' else 'update' end
               as action, coalesce(t.id, w.id) as key, coalesce(w.name, t.name) as label, w.*
    from wanted w full join call_action_rules t on t.id = w.id
    where (w.id, w.name, w.caller_group_id, w.action_type, w.action_config, w.priority, w.is_active)
        is distinct from (t.id, t.name, t.caller_group_id, t.action_type, t.action_config,
                          t.priority, t.is_active)
), deleted as (
    delete from call_action_rules t using changes c
    where %(really)s::boolean and c.action = 'delete' and t.id = c.key
), updated as (
    update call_action_rules t
    set name = c.name, caller_group_id = c.caller_group_id, action_type = c.action_type,
        action_config = c.action_config, priority = c.priority, is_active = c.is_active,
        updated_at = now()
    from changes c where %(really)s::boolean and c.action = 'update' and t.id = c.key
), inserted as (
    insert into call_action_rules (id, name, caller_group_id, action_type, action_config, priority,
                                   is_active, created_at, updated_at)
    select id, name, caller_group_id, action_type, action_config, priority, is_active, now(), now()
    from changes where %(really)s::boolean and action = 'insert'
)
select action, count(*), (array_agg(label::text order by label))[1:%(most)s::int]
from changes group by 1 order by 1
"""
# One UPDATE: the other keys stay.
MERGE_EXTRA: Final = """
with changes as materialized (
    select id, extra || %(rows)s::jsonb as extra from system_settings
    where id = 1 and jsonb_typeof(extra) = 'object'
      and extra || %(rows)s::jsonb is distinct from extra
), updated as (
    update system_settings t set extra = c.extra, updated_at = now()
    from changes c where %(really)s::boolean and t.id = c.id
)
select 'update', count(*), array['extra'] from changes having count(*) > 0
"""
MERGE_ANNOUNCEMENTS: Final = """
with wanted as (
    select * from jsonb_to_recordset(%(rows)s::jsonb) w
        (id uuid, name text, description text, announcement_type text, is_active boolean,
         audio_file_url text, tts_text text, duration_sec int, language text,
         updated_at timestamptz)
), changes as materialized (
    select case when t.id is null then 'insert' when w.id is null then 'delete' else 'update' end
               as action, coalesce(t.id, w.id) as key, coalesce(w.name, t.name) as label, w.*
    from wanted w full join announcements t on t.id = w.id
    where (w.id, w.name, w.description, w.announcement_type, w.is_active, w.audio_file_url,
           w.tts_text, w.duration_sec, w.language, coalesce(w.updated_at, t.updated_at))
        is distinct from (t.id, t.name, t.description, t.announcement_type, t.is_active,
                          t.audio_file_url, t.tts_text, t.duration_sec, t.language, t.updated_at)
), deleted as (
    delete from announcements t using changes c
    where %(really)s::boolean and c.action = 'delete' and t.id = c.key
), updated as (
    update announcements t
    set name = c.name, description = c.description, announcement_type = c.announcement_type,
        is_active = c.is_active, audio_file_url = c.audio_file_url, tts_text = c.tts_text,
        duration_sec = c.duration_sec, language = c.language, version = coalesce(t.version, 0) + 1,
        updated_at = coalesce(c.updated_at, t.updated_at)
    from changes c where %(really)s::boolean and c.action = 'update' and t.id = c.key
), inserted as (
    insert into announcements (id, name, description, announcement_type, is_active, audio_file_url,
                               tts_text, duration_sec, language, version, created_at, updated_at)
    select id, name, description, announcement_type, is_active, audio_file_url, tts_text,
           duration_sec, language, 1, now(), coalesce(updated_at, now())
    from changes where %(really)s::boolean and action = 'insert'
)
select action, count(*), (array_agg(label::text order by label))[1:%(most)s::int]
from changes group by 1 order by 1
"""
# Before its nodes: with a flow that goes all that is in it goes, by the backend's cascade.
MERGE_FLOWS: Final = """
with wanted as (
    select * from jsonb_to_recordset(%(rows)s::jsonb) w
        (id uuid, name text, description text, is_active boolean)
), changes as materialized (
    select case when t.id is null then 'insert' when w.id is null then 'delete' else 'update' end
               as action, coalesce(t.id, w.id) as key, coalesce(w.name, t.name) as label, w.*
    from wanted w full join ivr_flows t on t.id = w.id
    where (w.id, w.name, w.description, w.is_active)
        is distinct from (t.id, t.name, t.description, t.is_active)
), deleted as (
    delete from ivr_flows t using changes c
    where %(really)s::boolean and c.action = 'delete' and t.id = c.key
), updated as (
    update ivr_flows t set name = c.name, description = c.description, is_active = c.is_active,
                           updated_at = now()
    from changes c where %(really)s::boolean and c.action = 'update' and t.id = c.key
), inserted as (
    insert into ivr_flows (id, name, description, is_active, created_at, updated_at)
    select id, name, description, is_active, now(), now()
    from changes where %(really)s::boolean and action = 'insert'
)
select action, count(*), (array_agg(label::text order by label))[1:%(most)s::int]
from changes group by 1 order by 1
"""
MERGE_NODES: Final = """
with wanted as (
    select * from jsonb_to_recordset(%(rows)s::jsonb) w
        (id uuid, flow_id uuid, parent_id uuid, node_type text, action_code text,
         audio_file_url text, tts_text text, timeout_sec int, max_retries int, depth smallint)
), changes as materialized (
    select case when t.id is null then 'insert' when w.id is null then 'delete' else 'update' end
               as action, coalesce(t.id, w.id) as key,
           coalesce(w.node_type, t.node_type) || ' ' || coalesce(t.id, w.id) as label, w.*
    from wanted w full join ivr_nodes t on t.id = w.id
    where (w.id, w.flow_id, w.parent_id, w.node_type, w.action_code, w.audio_file_url, w.tts_text,
           w.timeout_sec, w.max_retries, w.depth)
        is distinct from (t.id, t.flow_id, t.parent_id, t.node_type, t.action_code,
                          t.audio_file_url, t.tts_text, t.timeout_sec, t.max_retries, t.depth)
), deleted as (
    delete from ivr_nodes t using changes c
    where %(really)s::boolean and c.action = 'delete' and t.id = c.key
), updated as (
    update ivr_nodes t
    set flow_id = c.flow_id, parent_id = c.parent_id, node_type = c.node_type,
        action_code = c.action_code, audio_file_url = c.audio_file_url, tts_text = c.tts_text,
        timeout_sec = c.timeout_sec, max_retries = c.max_retries, depth = c.depth,
        updated_at = now()
    from changes c where %(really)s::boolean and c.action = 'update' and t.id = c.key
), inserted as (
    insert into ivr_nodes (id, flow_id, parent_id, node_type, action_code, audio_file_url, tts_text,
                           timeout_sec, max_retries, depth, created_at, updated_at)
    select id, flow_id, parent_id, node_type, action_code, audio_file_url, tts_text, timeout_sec,
           max_retries, depth, now(), now()
    from changes where %(really)s::boolean and action = 'insert'
)
select action, count(*), (array_agg(label::text order by label))[1:%(most)s::int]
from changes group by 1 order by 1
"""
MERGE_TRANSITIONS: Final = """
with wanted as (
    select * from jsonb_to_recordset(%(rows)s::jsonb) w
        (id uuid, from_node_id uuid, input_type text, dtmf_key text, to_node_id uuid)
), changes as materialized (
    select case when t.id is null then 'insert' when w.id is null then 'delete' else 'update' end
               as action, coalesce(t.id, w.id) as key,
           concat_ws(' ', coalesce(w.input_type, t.input_type), coalesce(w.dtmf_key, t.dtmf_key),
                     coalesce(t.id, w.id)) as label, w.*
    from wanted w full join ivr_transitions t on t.id = w.id
    where (w.id, w.from_node_id, w.input_type, w.dtmf_key, w.to_node_id)
        is distinct from (t.id, t.from_node_id, t.input_type, t.dtmf_key, t.to_node_id)
), deleted as (
    delete from ivr_transitions t using changes c
    where %(really)s::boolean and c.action = 'delete' and t.id = c.key
), updated as (
    update ivr_transitions t
    set from_node_id = c.from_node_id, input_type = c.input_type, dtmf_key = c.dtmf_key,
        to_node_id = c.to_node_id
    from changes c where %(really)s::boolean and c.action = 'update' and t.id = c.key
), inserted as (
    insert into ivr_transitions (id, from_node_id, input_type, dtmf_key, to_node_id, created_at)
    select id, from_node_id, input_type, dtmf_key, to_node_id, now()
    from changes where %(really)s::boolean and action = 'insert'
)
select action, count(*), (array_agg(label::text order by label))[1:%(most)s::int]
from changes group by 1 order by 1
"""
# In this order: what others point at comes first.
MERGES: Final = {
    "number-groups": (("registered_numbers", MERGE_NUMBERS),),
    "call-actions": (("call_action_rules", MERGE_RULES), ("system_settings", MERGE_EXTRA)),
    "announcements": (("announcements", MERGE_ANNOUNCEMENTS),),
    "ivr-flows": (
        ("ivr_flows", MERGE_FLOWS),
        ("ivr_nodes", MERGE_NODES),
        ("ivr_transitions", MERGE_TRANSITIONS),
    ),
}
# The backend's dashboard reads the newest updated_at as the time of the last pull: always the same
# row is touched, and brought back from a future that a wrong clock gave it.
RULES_HEARTBEAT: Final = """
update call_action_rules set updated_at = now()
where id = (select id from call_action_rules order by updated_at desc nulls last, id limit 1)
returning 1
"""
SETTINGS_HEARTBEAT: Final = "update system_settings set updated_at = now() where id = 1"

# Which files the announcements want. A new version is fetched at once.
AUDIO_WANTED: Final = """
with wanted as (
    select * from jsonb_to_recordset(%(rows)s::jsonb) w (name text, version text)
), gone as (
    update serversync.audio_files f set unwanted = 0
    where unwanted is null and not exists (select from wanted w where w.name = f.name)
)
insert into serversync.audio_files as f (name, version) select name, version from wanted
on conflict (name) do update
set version = excluded.version, unwanted = null, tries = 0, error = null, next_attempt_at = now()
where (f.version, f.unwanted) is distinct from (excluded.version, null::float8)
"""
# Seconds of the agent's own running time since a file was wanted last.
AUDIO_AGE: Final = """
update serversync.audio_files set unwanted = unwanted + %(elapsed)s::float8 where unwanted >= 0
"""
# The file that is next: to be fetched, or to go; and in how many seconds. A due time more than an
# hour ahead is a wrong clock's.
AUDIO_NEXT: Final = """
select name, version, fetched, files, etag, tries, coalesce(unwanted >= %(unwanted)s, false), wait
from (select *, case when next_attempt_at > now() + interval '1 hour' then 0
                else greatest(0, extract(epoch from next_attempt_at - now())) end::float8 as wait
      from serversync.audio_files
      where unwanted >= %(unwanted)s or unwanted is null and fetched is distinct from version) f
order by wait, next_attempt_at, name limit 1
"""
# What we are about to put there, before it is there: after a kill between the two, or a power cut,
# it is still ours.
AUDIO_WRITING: Final = """
update serversync.audio_files set files = %(files)s
from (select set_config('synchronous_commit', 'on', true)) durable
where name = %(name)s
"""
AUDIO_FETCHED: Final = """
update serversync.audio_files
set fetched = %(version)s, files = %(files)s, etag = %(etag)s, tries = 0, error = null,
    fetched_at = now()
where name = %(name)s
"""
AUDIO_FAILED: Final = """
update serversync.audio_files
set tries = tries + 1, error = %(error)s, next_attempt_at = now() + %(wait)s * interval '1 second'
where name = %(name)s
"""
AUDIO_FORGET: Final = "delete from serversync.audio_files where name = %(name)s"
AUDIO_THERE: Final = """
select name from serversync.audio_files where fetched is not null and unwanted is null
"""
AUDIO_LOST: Final = """
update serversync.audio_files set fetched = null, etag = null, next_attempt_at = now()
where name = any (%(names)s)
"""

Connect = Callable[[], contextlib.AbstractContextManager["psycopg.Connection[Any]"]]


@dataclass(frozen=True)
class Known:
    """A section's row of serversync.settings."""

    name: str
    digest: str | None
    counts: dict[str, int]
    remarks: list[dict[str, Any]]
    skipped: int
    held_times: int
    held_seconds: float
    held_counts: dict[str, int] | None
    error: str | None
    pulls: int
    age: float | None


@dataclass
class Outcome:
    """What became of a section: applied, held, or why not."""

    section: Section
    known: Known
    held: tuple[bool, int, float] = (False, 0, 0.0)
    changes: list[tuple[str, str, int, list[str]]] = field(default_factory=list)
    error: str = ""
    applied: bool = False

    @property
    def remarks(self) -> list[dict[str, Any]]:
        """As they are stored and shown."""
        tidy = partial(clean, limit=200)
        first = sorted(self.section.remarks, key=lambda remark: not remark.skipped)
        return [
            {"item": tidy(each.item), "reason": tidy(each.reason), "skipped": each.skipped}
            for each in first[:REMARKS_MAX]
        ]

    @property
    def skipped(self) -> int:
        return sum(remark.skipped for remark in self.section.remarks)


REMARKS_MAX: Final = 100


class SettingsStore:
    """The tables, by the agent's connection or a person's; one method a statement."""

    def __init__(self, session: Connect) -> None:
        self.session = session

    def run(self, sql: str, /, **params: Any) -> list[tuple[Any, ...]]:
        with self.session() as conn:
            return self._rows(conn, sql, **params)

    @staticmethod
    def _rows(conn: psycopg.Connection[Any], sql: str, /, **params: Any) -> list[tuple[Any, ...]]:
        cursor = conn.execute(sql, params or None)
        return cursor.fetchall() if cursor.description else []

    def known(self) -> dict[str, Known]:
        return {row[0]: Known(*row) for row in self.run(SETTINGS_KNOWN)}

    def missing(self) -> dict[str, str]:
        """Why tables cannot be written, by their names."""
        found = {}
        for name, there, lacking in self.run(SETTINGS_TABLES):
            if not there:
                found[name] = f"there is no table {name}"
            elif lacking:
                rights = ", ".join(lacking)
                found[name] = f"no right to {rights} on {name}: run: sudo serversync setup"
        return found

    def there(self, name: str) -> dict[str, int]:
        return dict(self.run(SETTINGS_THERE[name])[0][0])

    def sounds(self) -> Sounds:
        return {row[0]: (row[1], row[2]) for row in self.run(SOUNDS_THERE)}

    def apply(self, work: Callable[[psycopg.Connection[Any]], None], pulls: int) -> None:
        """One transaction for the snapshot, on what is still the state that it began with."""
        with self.session() as conn, conn.transaction():
            conn.execute(SETTINGS_BOUNDS)
            if conn.execute(SETTINGS_LOCK).fetchall()[0][0] != pulls:
                text = "another pull came between: this one begins anew"
                raise NotNow(Verdict(Fate.WAITS, "OVERTAKEN", text))
            work(conn)

    def merge(self, conn: psycopg.Connection[Any], outcome: Outcome, missing: Mapping[str, str],
              replaced: bool, really: bool, most: int) -> None:  # fmt: skip
        """A section in a savepoint of its own: what cannot be stored leaves it as it was."""
        merges = MERGES[outcome.section.name]
        whys = [missing[name] for name, _ in merges if name in missing]
        if whys and outcome.section.name == "ivr-flows":  # none of its tables is of use alone
            merges = ()
        try:
            with conn.transaction():
                for name, sql in merges:
                    if name in missing:
                        continue
                    rows = json.dumps(outcome.section.tables[name])
                    params = {"rows": rows, "replace": replaced, "really": really, "most": most}
                    found = conn.execute(sql, params).fetchall()
                    outcome.changes += [(name, row[0], row[1], row[2]) for row in found]
        except psycopg.Error as error:
            if conn.broken or conn.pgconn.status != psycopg.pq.ConnStatus.OK:
                raise
            whys = [f"the database refuses it: {error.diag.message_primary or error}"]
            outcome.changes = []
        outcome.error = clean("; ".join(whys))
        outcome.applied = not whys

    def heartbeat(self, conn: psycopg.Connection[Any], missing: Mapping[str, str]) -> None:
        rules, settings = "call_action_rules" in missing, "system_settings" in missing
        in_use = (psycopg.errors.LockNotAvailable, psycopg.errors.QueryCanceled)
        with contextlib.suppress(*in_use), conn.transaction():
            if not rules and conn.execute(RULES_HEARTBEAT).fetchall():
                return
            if not settings:
                conn.execute(SETTINGS_HEARTBEAT)

    def save(self, conn: psycopg.Connection[Any], outcome: Outcome) -> None:
        held, times, seconds = outcome.held
        section = outcome.section
        params = {
            "section": section.name,
            "remarks": json.dumps(outcome.remarks),
            "skipped": outcome.skipped,
            "digest": section.digest if outcome.applied else None,
            "counts": json.dumps(section.counts) if outcome.applied else None,
            "changed": bool(outcome.changes),
            "error": outcome.error or None,
            "held_times": times if held else 0,
            "held_seconds": seconds if held else 0.0,
            "held_counts": json.dumps(section.counts) if held else None,
        }
        conn.execute(SETTINGS_SAVE, params)


def get(
    frontend: Frontend, path: str, etag: str = "", most: int = ANSWER_MAX, sink: Sink | None = None
) -> Steps[Answer]:
    """A page of the settings, or (into the sink) a file; 304 when it is still the ETag's."""
    headers = {"Accept": "*/*"} if sink else {}
    if re.fullmatch(r'(?:W/)?"[!#-~]{0,1000}"', etag):
        headers["If-None-Match"] = etag
    limit = 10.0
    if sink is not None:
        frontend.settings.close()  # a request on a kept connection may be repeated
        limit += most / AUDIO_RATE
    request = Outgoing("GET", path, headers, limit, answer_max=most, sink=sink)
    return frontend.settings.exchange(request)


class Pull:
    """One snapshot: fetched request by request, then applied at once."""

    def __init__(
        self, config: Config, frontend: Frontend, store: SettingsStore,
        etags: Mapping[str, str], whole: bool,
    ) -> None:  # fmt: skip
        self.config, self.frontend, self.store = config, frontend, store
        self.etags = etags  # of what stands in the tables; empty: everything is wanted
        self.whole = whole  # everything is merged, so that what others changed is put back
        self.began = time.monotonic()
        self.known = store.known()
        self.todo = list(SOURCES)
        self.same: list[str] = []
        self.bodies: dict[str, bytes] = {}
        self.found: dict[str, str] = {}

    def fetch(self) -> Steps[bool]:
        """One request; True when that was the last one. NotNow: the frontend gives none."""
        name = self.todo[0]
        etag = self.etags.get(name, "")
        answer = yield from get(self.frontend, SOURCES[name][0], etag, SETTINGS_MAX)
        if answer.status == 304 and etag:
            self.same.append(name)
        else:
            settings_answer(name, answer)
            self.bodies[name], self.found[name] = answer.body, answer.headers.get("etag", "")
        self.todo.pop(0)
        if not self.todo and self.bodies and self.same:  # sections point at each other
            self.todo, self.same, self.etags = self.same, [], {}
        return not self.todo

    @property
    def unchanged(self) -> bool:
        return not self.bodies

    @property
    def pulls(self) -> int:
        return max(known.pulls for known in self.known.values())

    def _said(self, name: str) -> dict[str, Any]:
        return settings_answer(name, Answer(status=200, body=self.bodies.pop(name)))

    def _outcome(self, section: Section, missing: Mapping[str, str], elapsed: float) -> Outcome:
        known = self.known[section.name]
        tables = [name for name, _ in MERGES[section.name]]
        if known.digest is None and tables[0] not in missing:
            known = replace(known, counts=self.store.there(section.name))
        return Outcome(section, known, hold_on(known, section.counts, elapsed))

    def outcomes(self, missing: Mapping[str, str], elapsed: float) -> list[Outcome]:
        """What the answers mean. What a held section would change is as if it had not come."""
        groups, ids = read_groups(self._said("number-groups"))
        first = self._outcome(groups, missing, elapsed)
        announcements = read_announcements(self._said("announcements"))
        second = self._outcome(announcements, missing, elapsed)
        there = second.held[0] and "announcements" not in missing
        sounds = self.store.sounds() if there else sounds_of(announcements)
        rules = read_rules(self._said("call-actions"), None if first.held[0] else ids)
        flows = read_flows(self._said("ivr-flows"), sounds)
        return [
            first,
            self._outcome(rules, missing, elapsed),
            second,
            self._outcome(flows, missing, elapsed),
        ]

    def apply(self, elapsed: float = 0.0, really: bool = True, most: int = 5) -> list[Outcome]:
        """Merges what is new, or everything."""
        missing = self.store.missing()
        outcomes = self.outcomes(missing, elapsed)
        replaced = self.config.local_numbers == "replace"

        def work(conn: psycopg.Connection[Any]) -> None:
            for outcome in outcomes:
                known = outcome.known
                new = known.digest != outcome.section.digest or known.error is not None
                if not outcome.held[0] and (self.whole or new):
                    self.store.merge(conn, outcome, missing, replaced, really, most)
                if really:
                    self.store.save(conn, outcome)
                if outcome.section.name == "announcements" and outcome.applied and really:
                    rows = json.dumps(audio_of(outcome.section))
                    conn.execute(AUDIO_WANTED, {"rows": rows})
            if really and self.whole:
                self.store.heartbeat(conn, missing)

        if really:
            self.store.apply(work, self.pulls)
        else:
            with self.store.session() as conn, conn.transaction():
                work(conn)
        return outcomes


# ==================================================================================================
# Settings pull: the announcements' audio
# One file a request, streamed beside its place and renamed into it. What the agent did not write it
# neither overwrites nor deletes.
# ==================================================================================================

TEMPORARY: Final = ".serversync-"  # in the announcements directory: a file that is not complete
UNWANTED_SEC: Final = 3600.0
AUDIO_MAX: Final = 10 * 1024 * 1024
AUDIO_RATE: Final = 20_000  # bytes a second: less is given up, and tried again later


STRANGER: Final = "a file of this name that we did not write is there"


class AudioTrouble(Exception):
    """This file cannot be stored; says why."""


@dataclass(frozen=True)
class AudioFile:
    """A row of serversync.audio_files: a file that is wanted, or must go."""

    name: str
    version: str
    fetched: str | None
    files: list[dict[str, Any]]  # what we put there: signatures, with their digests
    etag: str | None
    tries: int
    unwanted: bool
    wait: float


class Download:
    """The file on its way: written under another name, counted, its digest taken."""

    def __init__(self, folder: int) -> None:
        self.folder = folder
        self.name = TEMPORARY + uuid.uuid4().hex
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self.fd = os.open(self.name, flags, 0o644, dir_fd=folder)
        self.size = 0
        self.head = b""
        self.digest = hashlib.sha256()

    def take(self, piece: bytes) -> None:
        if len(self.head) < 12:
            self.head = (self.head + piece)[:12]
        self.size += len(piece)
        self.digest.update(piece)
        rest = memoryview(piece)
        try:
            while rest:
                rest = rest[os.write(self.fd, rest) :]
        except OSError as error:
            raise AudioTrouble(f"it cannot be written: {error.strerror}") from None

    def check(self) -> None:
        """RIFF….WAVE, and as long as it says of itself."""
        if self.head[:4] != b"RIFF" or self.head[8:] != b"WAVE" or self.size < 44:
            raise AudioTrouble("what came is no WAV file")
        said = int.from_bytes(self.head[4:8], "little") + 8
        if said > self.size and said < 0x7FFFFF00:  # a recorder into a pipe cannot know
            raise AudioTrouble(f"what came is cut: {self.size} of {said} bytes")

    def finish(self) -> dict[str, Any]:
        """On the disk, readable for the backend; its signature."""
        # The unit's UMask= is 0077, and a file of mode 0600 would void the directory's default ACL.
        os.fchmod(self.fd, 0o644)
        os.fsync(self.fd)
        found = signature("", os.fstat(self.fd)) | {"sha256": self.digest.hexdigest()}
        return {key: value for key, value in found.items() if key != "name"}

    def close(self) -> None:
        os.close(self.fd)
        with contextlib.suppress(OSError):
            os.unlink(self.name, dir_fd=self.folder)


class AudioStore:
    """The announcements directory, by its descriptor."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._swept = False

    @contextlib.contextmanager
    def folder(self) -> Iterator[int]:
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise AudioTrouble(f"{self.path}: {error.strerror}") from None
        try:
            if not self._swept:
                self._sweep(fd)
            yield fd
        except OSError as error:
            raise AudioTrouble(f"{self.path}: {error.strerror or error}") from None
        finally:
            os.close(fd)

    def _sweep(self, folder: int) -> None:
        """What a kill left behind; not what a command is just fetching."""
        self._swept = True
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.startswith(TEMPORARY) and entry.is_file(follow_symlinks=False):
                    changed = entry.stat(follow_symlinks=False).st_mtime
                    if abs(time.time() - changed) > 60:
                        os.unlink(entry.name, dir_fd=folder)

    @staticmethod
    def is_ours(folder: int, name: str, files: Sequence[Mapping[str, Any]]) -> bool | None:
        """Whether what stands there is what we wrote (by inode, size and time, or else by its
        digest: a restored backup has other inodes); None: nothing stands there."""
        try:
            fd = os.open(name, _OPEN_FILE, dir_fd=folder)
        except FileNotFoundError:
            return None
        except OSError:
            return False  # a link, a directory, not ours to read
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            os.close(fd)
            return False
        with open(fd, "rb") as file:
            found = signature("", status)
            if any(all(known.get(k) == found[k] for k in found if k != "name") for known in files):
                return True
            same = {known.get("sha256") for known in files if known.get("size") == status.st_size}
            return bool(same) and hashlib.file_digest(file, "sha256").hexdigest() in same

    def missing(self, names: Iterable[str]) -> list[str]:
        with self.folder() as folder:
            there = set(os.listdir(folder))
        return [name for name in names if name not in there]

    def put(self, folder: int, download: Download, file: AudioFile) -> None:
        """In its place, at once; over nothing but our own earlier version."""
        ours = self.is_ours(folder, file.name, file.files)
        try:
            if not ours:
                os.link(download.name, file.name, src_dir_fd=folder, dst_dir_fd=folder)
        except FileExistsError:
            raise AudioTrouble(STRANGER) from None
        except OSError as error:
            if ours is False or error.errno not in (errno.EPERM, errno.EOPNOTSUPP):
                raise
            ours = True  # nothing is there, on a file system without links
        if ours:
            os.rename(download.name, file.name, src_dir_fd=folder, dst_dir_fd=folder)
        os.fsync(folder)


class Audio:
    """Brings and removes the announcements' audio, one file at a time."""

    def __init__(self, frontend: Frontend, store: SettingsStore, path: str) -> None:
        self.frontend, self.store = frontend, store
        self.files = AudioStore(path)

    def next(self) -> AudioFile | None:
        rows = self.store.run(AUDIO_NEXT, unwanted=UNWANTED_SEC)
        return AudioFile(*rows[0]) if rows else None

    def look(self) -> None:
        """Files that somebody deleted are fetched again."""
        names = [row[0] for row in self.store.run(AUDIO_THERE)]
        if gone := self.files.missing(names):
            self.store.run(AUDIO_LOST, names=gone)

    def handle(self, file: AudioFile) -> Steps[None]:
        """One file, at most one request. AudioTrouble: this one not; NotNow: none."""
        with self.files.folder() as folder:
            if file.unwanted:
                self._remove(folder, file)
                return
            ours = self.files.is_ours(folder, file.name, file.files)
            if ours is False:
                raise AudioTrouble(STRANGER)
            yield from self._fetch(folder, file, bool(ours))

    def failed(self, file: AudioFile, reason: str) -> str:
        """It waits; returns why, as it is stored."""
        error = clean(reason)
        wait = backoff(file.tries + 1, 0.5 + random.random() / 2)
        self.store.run(AUDIO_FAILED, name=file.name, error=error, wait=wait)
        return error

    def _fetch(self, folder: int, file: AudioFile, there: bool) -> Steps[None]:
        etag = file.etag if there else None
        download = Download(folder)
        try:
            path = AUDIO_URL + quote(file.name)
            answer = yield from get(self.frontend, path, etag or "", AUDIO_MAX, download.take)
            if answer.status == 304 and etag:
                self._done(file, file.files, etag, "is as it was")
                return
            if answer.status != 200 or not answer.complete:
                self._refuse(answer)
            download.check()
            made = download.finish()
            # Before it is there: a kill between the two must not make a stranger of it, nor of the
            # one that is there.
            ours = [*file.files[-9:], made]
            self.store.run(AUDIO_WRITING, name=file.name, files=json.dumps(ours))
            self.files.put(folder, download, file)
            self._done(
                file, [made], answer.headers.get("etag"), f"fetched ({human(download.size)})"
            )
        finally:
            download.close()

    @staticmethod
    def _refuse(answer: Answer) -> NoReturn:
        if answer.status in (404, 405):
            raise AudioTrouble(f"the frontend does not have it yet: HTTP {answer.status}")
        verdict = classify(answer, time.time())
        if answer.trouble or answer.status in (401, 403, 429, 502, 503, 504):
            raise NotNow(verdict)
        raise AudioTrouble(verdict.reason)

    def _done(
        self, file: AudioFile, files: Sequence[dict[str, Any]], etag: str | None, what: str
    ) -> None:
        self.store.run(
            AUDIO_FETCHED,
            name=file.name,
            version=file.version,
            files=json.dumps(files),
            etag=etag,
        )
        text = f"announcement audio {file.name} {what}"
        say(logging.INFO, "audio_fetched", text, FILE=file.name)

    def _remove(self, folder: int, file: AudioFile) -> None:
        ours = self.files.is_ours(folder, file.name, file.files)
        if ours:
            os.unlink(file.name, dir_fd=folder)
            os.fsync(folder)
        self.store.run(AUDIO_FORGET, name=file.name)
        if ours:
            text = f"announcement audio {file.name} removed: unreferenced for an hour"
            say(logging.INFO, "audio_removed", text, FILE=file.name)


# ==================================================================================================
# Settings pull: in the agent's loop
# One request a turn, beside the deliveries, and its own backoff: what goes wrong here is
# no outage of the deliveries.
# ==================================================================================================

WHOLE_SEC: Final = 290.0  # everything is fetched, compared and its heartbeat given: each 5 min


class Settings(Job):
    """The pull as a job; a restart may forget what it knows."""

    def __init__(self, agent: Agent) -> None:
        super().__init__()
        self.agent = agent
        self.store = SettingsStore(agent.session.session)
        self.trouble: Verdict | None = None
        self.since = 0.0
        self.held: dict[str, str] = {}
        self.finished: float | None = None  # the last pull of ours
        self.reload()

    def reload(self) -> None:
        """A configuration: perhaps of another frontend."""
        agent = self.agent
        self.audio = Audio(agent.frontend, self.store, agent.config.announcements_dir)
        self.pull: Pull | None = None
        self.etags: dict[str, str] = {}
        self.tries = self.audio_tries = 0
        self.due = self.audio_due = 0.0
        self.whole_at = float("-inf")
        if not agent.config.frontend_sync_interval_sec:
            self.trouble, self.held = None, {}
        self.wake()

    @property
    def next_turn(self) -> float:
        if not self.agent.config.frontend_sync_interval_sec or self.agent.once:
            return float("inf")
        return max(min(self.due, self.audio_due), self.agent.health.quiet_until)

    @property
    def sentence(self) -> str:  # type: ignore[override]
        said = [f"settings: {name} held back: {why}" for name, why in self.held.items()]
        if self.trouble is not None:
            lasted = time.monotonic() - self.since
            said.append(f"no settings since {lasted:.0f} s: {self.trouble.reason[:100]}")
        return "; ".join(said)

    def published(self) -> dict[str, object]:
        since = time.time() - (time.monotonic() - self.since)
        trouble = self.trouble and {"code": self.trouble.code, "reason": self.trouble.reason}
        return {"settings": {"trouble": trouble and trouble | {"since": since}, "held": self.held}}

    def turns(self) -> Steps[None]:
        """One request a turn. Whatever goes wrong with the settings ends here."""
        while True:
            while self.next_turn > time.monotonic():
                yield Wait(self.next_turn)
            try:
                if self.pull is not None or self.due <= time.monotonic():
                    yield from self._pull()
                else:
                    yield from self._audio()
            except NotNow as why:
                self._not_now(why.verdict)
            except (Stopping, Lost):
                self.pull = None
                raise
            except psycopg.Error as error:
                text = f"the database refuses the settings: {error.diag.message_primary or error}"
                self._not_now(Verdict(Fate.WAITS, "DATABASE", text))
            except Exception as error:
                log.exception("a bug: the settings cannot be handled")
                text = f"an error of serversync's own: {error!r}"
                self._not_now(Verdict(Fate.WAITS, "UNKNOWN", text))
            yield AT_ONCE

    def _not_now(self, verdict: Verdict) -> None:
        """Said when it changes; never an outage of the deliveries, nor charged to them."""
        self.pull = None
        now = time.monotonic()
        if verdict.code == "OVERTAKEN":
            self.due = now
            return
        self.tries += 1
        wait = backoff(self.tries, random.random(), verdict.retry_after or 0.0)
        self._rest(now, 60.0)
        self.due = self.audio_due = max(self.due, now + wait)
        reason = clean(verdict.reason)
        if self.trouble is None:
            self.since = now
        self.trouble = replace(verdict, reason=reason)
        text = f"no settings now, the last good ones stay: {reason}"
        self.agent.voice.repeats.say(
            "settings", verdict.code, logging.WARNING, "settings_failed", text,
            ERROR_CODE=verdict.code, HTTP_STATUS=verdict.status,
        )  # fmt: skip

    def _rest(self, since: float, apart: float) -> None:
        """The next pull; what began or failed together, as after a power cut, does not stay so."""
        interval = self.agent.config.frontend_sync_interval_sec
        self.due = since + interval + random.random() * min(apart, interval)

    # --- the snapshot ---------------------------------------------------------------------------

    def _pull(self) -> Steps[None]:
        now = time.monotonic()
        if self.pull is None:
            config = self.agent.config
            whole = now - self.whole_at + config.frontend_sync_interval_sec > WHOLE_SEC
            etags = {} if whole or self.held else self.etags
            self.pull = Pull(config, self.agent.frontend, self.store, etags, whole)
        pull = self.pull
        if not (yield from pull.fetch()):
            return
        if self.pull is not pull:  # a reload came between
            return
        self.pull = None
        elapsed = 0.0 if self.finished is None else now - self.finished
        self._finish(pull, elapsed)
        self._rest(pull.began, 300.0 if self.finished is None else 0.0)
        self.tries, self.finished = 0, now
        self.store.run(AUDIO_AGE, elapsed=elapsed)
        self.audio_due = 0.0
        if self.trouble is not None:
            say(logging.INFO, "recovered", f"settings: recovered after {now - self.since:.0f} s")
            self.agent.voice.repeats.over("settings")
            self.trouble = None

    def _finish(self, pull: Pull, elapsed: float) -> None:
        if pull.unchanged:
            self.store.run(SETTINGS_SAME)
            return
        outcomes = pull.apply(elapsed)
        for outcome in outcomes:
            self._tell(outcome)
        well = all(not outcome.error and not outcome.held[0] for outcome in outcomes)
        tags = {name: etag for name, etag in pull.found.items() if etag}
        self.etags = tags if well and len(tags) == len(SOURCES) else {}
        if pull.whole:
            self.whole_at = pull.began
            with contextlib.suppress(AudioTrouble):  # said when there is a file to be put there
                self.audio.look()

    def _tell(self, outcome: Outcome) -> None:
        """What changed with this pull; what is as it was before is not said again."""
        name, known = outcome.section.name, outcome.known
        if outcome.changes:
            text = f"settings: {name} changed: {changes_text(outcome.changes)}"
            say(logging.INFO, "settings_changed", text, SECTION=name)
        if outcome.skipped and outcome.remarks != known.remarks:
            text = f"settings: {name}: {count(outcome.skipped, 'item')} skipped: "
            say(logging.WARNING, "settings_skipped", text + remarks_text(outcome.remarks),
                SECTION=name)  # fmt: skip
        if outcome.error and outcome.error != known.error:
            text = f"settings: {name} cannot be applied: {outcome.error}"
            say(logging.WARNING, "settings_failed", text, SECTION=name)
        self._tell_held(outcome)

    def _tell_held(self, outcome: Outcome) -> None:
        name = outcome.section.name
        was_held = name in self.held or outcome.known.held_counts is not None
        if outcome.held[0]:
            why = held_text(outcome.known.counts, outcome.section.counts)
            self.held[name] = why
            if not was_held:
                text = f"settings: {name} held back: {why}; if that is meant: {accept_hint(name)}"
                say(logging.WARNING, "settings_held", text, SECTION=name)
        elif was_held:
            self.held.pop(name, None)
            text = f"settings: {name} is no longer held back"
            say(logging.INFO, "recovered", text, SECTION=name)

    # --- its audio ------------------------------------------------------------------------------

    def _audio(self) -> Steps[None]:
        file = self.audio.next()
        if file is None or file.wait > 0:
            wait = self.agent.config.frontend_sync_interval_sec if file is None else file.wait
            self.audio_due = time.monotonic() + wait
            return
        try:
            yield from self.audio.handle(file)
            self.audio_tries = 0
            self.agent.voice.repeats.over(f"audio {file.name}")
        except AudioTrouble as trouble:
            self._audio_failed(file, str(trouble))
        except NotNow as why:  # of all files: an outage, a token
            self._audio_failed(file, why.verdict.reason)
            self.audio_tries += 1
            wait = backoff(self.audio_tries, random.random(), why.verdict.retry_after or 1.0)
            self.audio_due = time.monotonic() + wait

    def _audio_failed(self, file: AudioFile, reason: str) -> None:
        error = self.audio.failed(file, reason)
        text = f"announcement audio {file.name} has to wait: {error}"
        self.agent.voice.repeats.say(
            f"audio {file.name}", error, logging.WARNING, "audio_failed", text, FILE=file.name
        )


def changes_text(changes: Sequence[tuple[str, str, int, Sequence[str]]]) -> str:
    words = {"insert": "new", "update": "changed", "delete": "gone", "revive": "back again"}
    return ", ".join(f"{table}: {number} {words[what]}" for table, what, number, _ in changes)


def remarks_text(remarks: Sequence[Mapping[str, Any]], most: int = 3) -> str:
    shown = [f"{each['item']}: {each['reason']}" for each in remarks[:most]]
    rest = [f"and {len(remarks) - most} more"] if len(remarks) > most else []
    return "; ".join([*shown, *rest])


def held_text(before: Mapping[str, int], now: Mapping[str, int]) -> str:
    return f"{counted(now)} came, {counted(before)} are there"


def accept_hint(name: str) -> str:
    return f"sudo serversync settings accept {shlex.quote(name)}"


# ==================================================================================================
# ROOM 3: For people
# Other processes, without the lock: what there is to see, and what a person may do.
# ==================================================================================================

# ==================================================================================================
# For people: the desk
# Short connections without the lock, for commands and the admin process: what there is to see, and
# what a person may do. Whatever goes out again goes through the queue, under its old id.
# ==================================================================================================

SCHEMA_MISSING: Final = "the schema serversync is not there: run: sudo serversync setup"
DESK_LIMIT: Final = 5  # seconds to connect

# What only people's commands call: made with all the others. (Up to version 2 enqueue was, too.)
FOR_PEOPLE: Final = """
drop function if exists serversync.enqueue;
drop table if exists serversync.idempotency_keys;

create or replace function serversync.file_size(recording uuid, out bytes bigint)
language plpgsql stable as $$
begin
    if to_regclass('recordings') is not null then
        select file_size_bytes into bytes from recordings where id = recording;
    end if;
end $$;
"""
MIGRATIONS.update({version: sql + FOR_PEOPLE for version, sql in MIGRATIONS.items()})
# What other programs call, with their rights: its keys are the owner's, too, for what the service's
# role hangs on a table of its own runs as whoever writes there. The same key ten times is one row;
# the same key with something else is an error.
CREATE_ENQUEUE: Final = """
drop table if exists %1$I.serversync_keys;
create table %1$I.serversync_keys (
    key text primary key, digest bytea not null, outbox_id bigint not null,
    expires_at timestamptz not null
);
create index on %1$I.serversync_keys (expires_at);
alter table %1$I.serversync_keys owner to %2$I;
grant select, insert, update, delete on %1$I.serversync_keys to %3$I;
create or replace function %1$I.serversync_enqueue(
    entity_type text, entity_id uuid, payload jsonb, idempotency_key text default null
) returns bigint language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
    mine bytea := sha256(convert_to(entity_type || ' ' || entity_id || ' ' || payload, 'UTF8'));
    seq bigint;
    known record;
begin
    delete from %1$I.serversync_keys where key in (
        select k.key from %1$I.serversync_keys k where k.expires_at < now()
        order by k.expires_at limit 10 for update skip locked);
    insert into %1$I.serversync_keys as k (key, digest, outbox_id, expires_at)
    select idempotency_key, mine, 0, '-infinity' where idempotency_key is not null
    on conflict (key) do update set key = excluded.key  -- locks the row of the first caller
    returning * into known;
    if known.expires_at > now() then
        if known.digest <> mine then
            raise exception 'idempotency key %% was used with another payload', idempotency_key
                using errcode = 'unique_violation';
        end if;
        return known.outbox_id;
    end if;
    insert into %1$I.sync_outbox (entity_type, entity_id, payload) values ($1, $2, $3)
    returning id into seq;
    update %1$I.serversync_keys k
    set outbox_id = seq, digest = mine, expires_at = now() + interval '30 days'
    where k.key = idempotency_key;
    return seq;
end $$;
alter function %1$I.serversync_enqueue(text, uuid, jsonb, text) owner to %2$I
"""
ENQUEUE_STATE: Final = f"""
select exists (
    select from pg_proc p join pg_class c on (proowner, pronamespace) = (relowner, relnamespace)
    where c.oid = {OUTBOX} and proname = 'serversync_enqueue')
"""
OPTIONAL.append(("enqueue", ENQUEUE_STATE, [CREATE_ENQUEUE]))
# The whole of the outbox, the letters and the receipts, in one look. No lock; the partial index of
# pending entries, the index of receipts by time.
SURVEY: Final = f"""
select json_build_object(
    'outbox', (
        select json_build_object('pending', coalesce(sum(n), 0), 'oldest_at', min(oldest),
                   'oldest_seconds', coalesce(extract(epoch from now() - min(oldest)), 0),
                   'by_type',
                   coalesce(json_object_agg(entity_type, n order by entity_type), '{{}}'))
        from (select entity_type, count(*) as n,
                     min(created_at) filter (where isfinite(created_at)) as oldest
              from sync_outbox where processed_at is null group by 1) t)::jsonb
        || (select jsonb_build_object('waiting', coalesce(sum(n), 0),
                       'reasons', coalesce(jsonb_object_agg(code, n), '{{}}'))
            from (select w.code, count(*) as n
                  from serversync.waiting w
                  join sync_outbox o on o.id = w.outbox_id and o.entity_id = w.entity_id
                                    and o.processed_at is null
                  group by 1) w),
    'recordings', (
        select json_build_object('waiting', count(*),
                   'waiting_bytes', sum(serversync.file_size(coalesce(serversync.to_uuid(coalesce(
                       o.payload->>'recordingId', o.payload->>'recording_id')), o.entity_id))),
                   'deletions_waiting', (select count(*) from serversync.uploads),
                   'deletions_failed', (select count(*) from serversync.uploads where tries > 0))
        from sync_outbox o
        where {PENDING_FILE} and {READABLE}),
    'dead_letters', (
        select json_object_agg(s.status, coalesce(d.n, 0))
        from unnest('{{PENDING,RETRYING,RESOLVED,DEAD}}'::text[]) s(status)
        left join (select status, count(*) as n from serversync.dead_letters group by 1) d
            using (status)),
    'deliveries', (
        select json_build_object(
            'last_success_at', (select started_at + duration_ms * interval '1 ms'
                                from serversync.deliveries order by id desc limit 1),
            'hour', json_build_object(
                'entries', coalesce(sum(entries) filter (where recent and kind = 'entries'), 0),
                'files', coalesce(sum(entries) filter (where recent and kind = 'file'), 0),
                'bytes', coalesce(sum(bytes) filter (where recent), 0)),
            'day', json_build_object(
                'entries', coalesce(sum(entries) filter (where kind = 'entries'), 0),
                'files', coalesce(sum(entries) filter (where kind = 'file'), 0),
                'bytes', coalesce(sum(bytes), 0)))
        from (select *, started_at > now() - interval '1 hour' as recent
              from serversync.deliveries where started_at > now() - interval '1 day') d))
"""
# Whether anybody holds the sender's lock.
IS_LOCKED: Final = """
select exists (
    select from pg_locks l join pg_database b on b.oid = l.database
    where l.locktype = 'advisory' and l.granted and b.datname = current_database()
      and (l.classid::bigint << 32 | l.objid::bigint) = %(key)s)
"""
# Quarters of an hour of the last day: what was delivered, and how much was left at the end of each.
# Only rows that were there then are read: from the lowest id that a receipt of that day names.
HISTORY: Final = """
with slots as (
    select at, at + interval '15 minutes' as till
    from generate_series(date_bin('15 minutes', now(), 'epoch') - interval '23 hours 45 minutes',
                         now(), interval '15 minutes') at
), sent as (
    select date_bin('15 minutes', started_at, 'epoch') as at,
           sum(entries) filter (where kind = 'entries') as entries,
           sum(entries) filter (where kind = 'file') as files, sum(bytes) as bytes
    from serversync.deliveries where started_at > now() - interval '1 day' group by 1
), rows as (
    select created_at as at, 1 as step from sync_outbox where processed_at is null
    union all
    select unnest(array[least(created_at, processed_at), processed_at]), unnest(array[1, -1])
    from sync_outbox
    where processed_at > now() - interval '1 day'
      and id >= (select min(first_seq) from serversync.deliveries
                 where started_at > now() - interval '1 day')
), steps as (
    select date_bin('15 minutes', greatest(least(at, now()), (select min(at) from slots)), 'epoch')
               as at, sum(step) as step
    from rows where isfinite(at) group by 1
)
select json_agg(json_build_object('at', s.at, 'entries', coalesce(t.entries, 0),
                    'files', coalesce(t.files, 0), 'bytes', coalesce(t.bytes, 0),
                    'backlog', s.backlog) order by s.at)
from (select at, coalesce((sum(step) over (order by at))::bigint, 0) as backlog
      from slots left join steps using (at)) s
left join sent t using (at)
"""
# What came back from the frontend, and the announcements' audio.
SETTINGS_VIEW: Final = """
select json_build_object(
    'sections', (
        select json_agg(json_build_object('section', section, 'items', counts,
                   'skipped', skipped, 'remarks', remarks, 'held', held_counts,
                   'held_times', held_times, 'held_seconds', held_seconds, 'error', error,
                   'pulled_at', pulled_at, 'changed_at', changed_at) order by position)
        from serversync.settings),
    'audio', (
        select json_build_object(
            'files', count(*) filter (where fetched is not null and unwanted is null),
            'waiting', count(*) filter (where unwanted is null
                                          and fetched is distinct from version),
            'problems', coalesce(json_object_agg(name, error order by name)
                                     filter (where error is not null and n <= 20), '{}'))
        from (select *, row_number() over (partition by error is null order by name) as n
              from serversync.audio_files) f))
"""
COUNTERS: Final = "select name, label, value from serversync.counters"
TOPICS: Final = """
select original_topic, count(*), count(*) filter (where status = 'PENDING'),
       count(*) filter (where status = 'RETRYING'), count(*) filter (where status = 'RESOLVED'),
       count(*) filter (where status = 'DEAD')
from serversync.dead_letters group by 1 order by 1
"""
# A page of letters, newest first; or one by its id. A large payload is not shown whole.
LETTERS: Final = """
select id::text, original_topic, error_message, retry_count, max_retries,
       case when bytes <= %(most)s then text end, status, created_at, updated_at, last_retry_at,
       outbox_id, entity_id::text, error_code, http_status, attempts, bytes
from (select * from serversync.dead_letters
      where (%(topic)s::text is null or original_topic = %(topic)s)
        and (%(id)s::uuid is null or id = %(id)s::uuid)
      order by created_at desc, id limit %(size)s offset %(skip)s) d
cross join lateral (  -- of what PostgreSQL cannot write out, only the size on its disk
    select case when error_code <> 'ENTRY_UNREADABLE' then payload::text end as text) t
cross join lateral (select coalesce(octet_length(text), pg_column_size(payload)) as bytes) b
order by created_at desc, id
"""
LETTER_COUNT: Final = """
select count(*) from serversync.dead_letters
where %(topic)s::text is null or original_topic = %(topic)s
"""
# Where the planner takes thousands of rows for one, it would look for newer entries row by row.
NO_LOOPS: Final = "set enable_nestloop = off"
# Letters that a person wants to send again, with what speaks against it. The rows are locked: two
# people, or a person and the agent, decide one after the other.
#   newer     a later entry of the same entity: it has overtaken this one, or will; not one that is
#             a dead letter itself
#   unknown   so old that a later one may have been pruned
#   taken     its id belongs to another entry (the table was emptied, and counted from 1 again)
JUDGE_LETTERS: Final = """
with picked as materialized (
    select * from serversync.dead_letters
    where (%(ids)s::uuid[] is null or id = any (%(ids)s::uuid[]))
      and (%(topic)s::text is null or original_topic = %(topic)s)
      and (%(ids)s::uuid[] is not null or status in ('PENDING', 'DEAD'))
      and outbox_id > %(after)s
    order by outbox_id limit 5000 for update
), newer as (
    select p.id, max(o.id) as seq
    from picked p
    join sync_outbox o on o.entity_id = p.entity_id and o.entity_type = p.original_topic
                      and o.id > p.outbox_id
    where o.id > (select min(outbox_id) from picked)
      and not exists (select from serversync.dead_letters d
                      where d.outbox_id = o.id and d.entity_id = o.entity_id
                        and d.status in ('PENDING', 'DEAD'))
    group by 1
)
select p.id::text, p.outbox_id, p.status, p.retry_count, p.max_retries, n.seq,
       p.created_at < to_timestamp(coalesce((select value from serversync.counters
                                             where name = 'pruned_until'), 0)),
       exists (select from sync_outbox o where o.id = p.outbox_id and o.entity_id <> p.entity_id)
from picked p left join newer n using (id) order by p.outbox_id
"""
# Back into the queue under the old id; a row that was pruned is written anew.
REVIVE: Final = """
with letter as (
    update serversync.dead_letters
    set status = 'RETRYING', last_retry_at = now(), updated_at = now()
    where id = any (%(ids)s::uuid[]) returning outbox_id, entity_id, payload, rest
), revived as (
    update sync_outbox o set processed_at = null from letter l
    where o.id = l.outbox_id and o.entity_id = l.entity_id returning o.id
)
insert into sync_outbox
select r.* from letter l
cross join lateral jsonb_populate_record(
    null::sync_outbox, l.rest || jsonb_build_object('payload', l.payload)) r
where l.outbox_id not in (select id from revived)
"""
# What is newer than an entry that was just put back, and was delivered while that was decided: it
# is sent once more, behind the older one, which must not have the last word.
SEND_LAST: Final = """
with old as (
    select entity_type, entity_id, min(id) as id from sync_outbox
    where id = any (%(seqs)s::bigint[]) group by 1, 2
), newer as (
    select o.id, o.processed_at from sync_outbox o join old using (entity_type, entity_id)
    where o.id > old.id and o.id <> all (%(seqs)s::bigint[])
      and (o.processed_at is null or o.processed_at >= %(began)s::timestamptz)
      and not exists (select from serversync.dead_letters d
                      where d.outbox_id = o.id and d.entity_id = o.entity_id
                        and d.status in ('PENDING', 'DEAD'))
), again as (
    update sync_outbox o set processed_at = null from newer n
    where o.id = n.id and o.processed_at is not null returning o.id
)
select exists (select from newer where processed_at is null)
"""
# Deletes a letter and its row of the outbox: nothing sends it again, a replay neither. One that is
# in the queue is taken out of it.
DELETE_LETTER: Final = """
with letter as (
    delete from serversync.dead_letters where id = %(id)s::uuid
    returning outbox_id, entity_id, original_topic, status
), settled as (
    delete from serversync.waiting
    where (outbox_id, entity_id) in (select outbox_id, entity_id from letter)
), gone as (
    delete from sync_outbox o using letter l
    where o.id = l.outbox_id and o.entity_id = l.entity_id and l.status <> 'RESOLVED'
)
select outbox_id, original_topic, status from letter
"""
# Sends what was sent again: a chunk of rows, judged and (where wanted) put back into the queue.
REPLAY: Final = """
with calls as materialized (
    select serversync.to_uuid(%(call)s::text) as call
    union all select entity_id from sync_outbox
    where entity_type = 'call_log'
      and %(call)s::text in (payload->>'sipCallId', payload->>'externalCallId')
), picked as materialized (
    select id, entity_type, entity_id, processed_at,
           serversync.to_uuid(coalesce(payload->>'recordingId', payload->>'recording_id',
                                       entity_id::text)) as recording
    from sync_outbox
    where id > %(after)s::bigint and id <= %(last)s::bigint
      and (%(since)s::timestamptz is null or created_at >= %(since)s::timestamptz)
      and (%(until)s::timestamptz is null or created_at <= %(until)s::timestamptz)
      and (%(type)s::text is null or entity_type = %(type)s)
      and (%(call)s::text is null
           or entity_id in (select call from calls)
           or serversync.call_of(payload) in (select call from calls))
    order by id limit 10000
), newer as (
    select distinct p.id
    from picked p
    join sync_outbox o on o.entity_id = p.entity_id and o.entity_type = p.entity_type
                      and o.id > p.id
    where o.id > (select min(id) from picked)
      and not exists (select from serversync.dead_letters d
                      where d.outbox_id = o.id and d.entity_id = o.entity_id
                        and d.status in ('PENDING', 'DEAD'))
), judged as materialized (
    select p.id, case
        when p.processed_at is null then 'pending'
        when exists (select from serversync.dead_letters d
                     where d.outbox_id = p.id and d.entity_id = p.entity_id
                       and d.status <> 'RESOLVED') then 'letter'
        when p.entity_type = 'recording_file' and (
             serversync.uploaded(p.recording) is not null
             or exists (select from serversync.deliveries d where d.entity_id = p.recording))
             then 'delivered'
        when %(force)s then 'again'
        when n.id is not null then 'overtaken'
        when p.processed_at < to_timestamp(coalesce((select value from serversync.counters
                                                     where name = 'pruned_until'), 0))
             then 'unknown'
        else 'again' end as verdict
    from picked p left join newer n using (id)
), revived as (
    update sync_outbox o set processed_at = null from judged j
    where %(really)s and j.verdict = 'again' and o.id = j.id and o.processed_at is not null
    returning o.id
)
select verdict, count(*), max(id), array_agg(id) from judged group by 1
"""
PRUNABLE: Final = """
select count(*) from sync_outbox
where processed_at < now() - %(days)s::float8 * interval '1 day'
"""
ENQUEUE: Final = """
select serversync_enqueue(%(type)s::text, %(id)s::uuid, %(payload)s::jsonb, %(key)s::text)
"""


class Refused(Exception):
    """What a person asked for cannot be done; its sentence says why, and what to do."""

    def __init__(self, kind: str, sentence: str) -> None:
        super().__init__(sentence)
        self.kind = kind  # not_found, invalid, conflict


class Unfit(Unavailable):
    """The database is there, and a person must change something in it first."""


def as_root() -> str:
    return shlex.join(["sudo", "serversync", *sys.argv[1:]])


def not_there(error: psycopg.Error) -> Unavailable:
    """A connection that could not be made; whom the database does not know it may know as root."""
    stranger = os.geteuid() != 0 and re.search(r'authentication failed|role "', str(error))
    hint = f": run: {as_root()}" if stranger else ""
    return Unavailable(f"the database is not there: {str(error).strip()}{hint}")


class Desk:
    """A person's connection: short, without the lock."""

    def __init__(self, config: Config, name: str) -> None:
        self._silence: threading.Timer | None = None
        # For the requests of the agent's that are settled: an entry's, and an empty one.
        self.patience = 2 * config.timeout_sec + 1
        try:
            self.conn = psycopg.connect(
                config.database_url,
                autocommit=True,
                connect_timeout=DESK_LIMIT,
                tcp_user_timeout=20_000,
                client_encoding="UTF8",
                application_name=f"serversync {name}",
            )
            self._listen_for(DB_DEADLINE)
            self.conn.execute(SESSION)
            self.conn.execute("set lock_timeout = '5s'")  # a person waits where the agent goes on
        except psycopg.Error as error:
            if self._silence is not None:
                self._silence.cancel()
                self.conn.close()
            raise not_there(error) from None

    def _listen_for(self, seconds: float) -> None:
        """No statement waits longer for a server that is silent: statement_timeout is the server's,
        and tcp_user_timeout only sees a dead line. (A thread: signals are the main thread's.)"""
        if self._silence is not None:
            self._silence.cancel()
        self._silence = threading.Timer(seconds, shut_socket, (self.conn.fileno(),))
        self._silence.daemon = True
        self._silence.start()

    def run(self, sql: str, /, **params: Any) -> list[tuple[Any, ...]]:
        """One statement; its rows. Raises Unavailable in words for what a person can mend."""
        try:
            with self.session() as conn:
                cursor = conn.execute(sql, params or None)
                return cursor.fetchall() if cursor.description else []
        except psycopg.OperationalError as error:
            if (error.sqlstate or "").startswith("54"):  # a program limit: what was asked for
                raise
            raise Unavailable(f"the database does not answer: {error}") from None

    def pages(self, sql: str, /, **params: Any) -> Iterator[tuple[Any, ...]]:
        """The rows of a result that may be long: the server keeps it, and we read it in pages."""
        with self.session() as conn, conn.transaction(), conn.cursor("pages") as rows:
            rows.execute(sql, params)
            while page := rows.fetchmany(1000):
                self._listen_for(DB_DEADLINE)
                yield from page

    @contextlib.contextmanager
    def session(self) -> Iterator[psycopg.Connection[Any]]:
        """The connection for several statements."""
        self._listen_for(DB_DEADLINE)
        try:
            yield self.conn
        except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName) as error:
            missing = SCHEMA_MISSING if "serversync." in str(error) else str(error)
            raise Unavailable(missing) from None
        except psycopg.errors.InsufficientPrivilege as error:
            raise Unfit(f"{error.diag.message_primary}: run: sudo serversync setup") from None
        finally:
            self._relax()

    def _relax(self) -> None:
        """Between two statements silence is no fault; within a transaction a COMMIT follows."""
        if self._silence is not None and not self.conn.info.transaction_status:
            self._silence.cancel()

    def __enter__(self) -> Desk:
        return self

    def __exit__(self, *_: object) -> None:
        if self._silence is not None:
            self._silence.cancel()
        self.conn.close()


# --- looking --------------------------------------------------------------------------------------


class StateFile:
    """/run/serversync/state.json, for those who look from outside."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.directory = environ.get("RUNTIME_DIRECTORY", "").split(":")[0]
        self.started = time.monotonic()

    def write(self, **state: object) -> None:
        if not self.directory:
            return
        now = time.time()  # by the clock as it is now: at the start it may have been wrong
        since = now - (time.monotonic() - self.started)
        who: dict[str, object] = {"pid": os.getpid(), "since": since, "at": now}
        path = os.path.join(self.directory, "state.json")
        with contextlib.suppress(OSError):  # a full /run must not stop deliveries
            with open(f"{path}.new", "w", encoding="utf-8") as file:
                file.write(json.dumps(who | state) + "\n")
            os.replace(f"{path}.new", path)


def state_path(environ: Mapping[str, str]) -> str:
    directory = environ.get("RUNTIME_DIRECTORY", "").split(":")[0] or "/run/serversync"
    return os.path.join(directory, "state.json")


# What the state file may hold; another shape is another version's, or nobody's.
_TIME: Final = (int, float)
_PROGRESS: Final = {
    "upload": {"kind": str, "seq": int, "bytes": int, "size": int, "seconds": _TIME},
    "drain": {"kind": str, "entries": int, "seconds": _TIME},
}
_STATE: Final[dict[str, Any]] = {
    "pid": int, "since": _TIME, "at": _TIME, "sentence": str, "standby": bool, "listening": bool,
    "inflight": int, "outages": list, "progress": (dict, NoneType),
}  # fmt: skip
_SETTINGS: Final = {"trouble": (dict, NoneType), "held": dict}
_TROUBLE: Final = {"code": str, "reason": str, "since": _TIME}
_OUTAGE: Final = {"endpoint": str, "code": str, "reason": str, "since": _TIME, "due": _TIME}


def is_like(value: Any, shape: Mapping[str, Any]) -> bool:
    """Has these keys, each of its kind; numbers are such as a clock or a counter shows."""
    if not isinstance(value, dict) or not shape.keys() <= value.keys():
        return False
    return all(
        isinstance(value[key], kind)
        and (not isinstance(value[key], _TIME) or -1e9 < value[key] < 2e11)
        for key, kind in shape.items()
    )


def is_state(state: Any) -> bool:
    if not is_like(state, _STATE):
        return False
    progress, settings = state["progress"], state.get("settings")
    kind = str((progress or {}).get("kind"))
    return (
        all(is_like(outage, _OUTAGE) for outage in state["outages"])
        and (not progress or (kind in _PROGRESS and is_like(progress, _PROGRESS[kind])))
        and (settings is None or is_like(settings, _SETTINGS))
        and (not settings or not settings["trouble"] or is_like(settings["trouble"], _TROUBLE))
    )


def read_state(environ: Mapping[str, str]) -> dict[str, Any] | None:
    """What the running agent says of itself; None where there is none."""
    try:
        fd = os.open(state_path(environ), _OPEN_FILE)
        with open(fd, encoding="utf-8") as file:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                return None
            state = json.loads(file.read(1 << 20))
        if not is_state(state) or not state["pid"]:
            return None
        with contextlib.suppress(PermissionError):  # another's: it is there
            os.kill(state["pid"], 0)  # /proc may hide it: the admin unit's own does
        return dict(state)
    except (OSError, ValueError, RecursionError, OverflowError):
        return None


def survey(config: Config, environ: Mapping[str, str]) -> dict[str, Any]:
    """All there is to see, of the database, the agent's state file and the disk."""
    state = read_state(environ)
    seen: dict[str, Any] = {"outbox": None, "recordings": {}, "dead_letters": None}
    seen |= {"deliveries": None, "locked": False, "settings": {"sections": [], "audio": None}}
    error = None
    try:
        with Desk(config, "status") as desk:
            seen |= desk.run(SURVEY)[0][0]
            seen["locked"] = desk.run(IS_LOCKED, key=LOCK_KEY)[0][0]
            seen["settings"] = desk.run(SETTINGS_VIEW)[0][0]
    except (Unavailable, psycopg.Error) as met:
        error = clean(" ".join(str(met).split()))
    state = state or {}
    # Elsewhere: the lock is held, but by none that we see. Perhaps of another machine.
    kind = "standby" if state.get("standby") else "running"
    return {
        "version": __version__,
        "device": config.device_id,
        "at": iso(time.time()),
        "frontend": config.frontend_base_url,
        "agent": {
            "state": kind if state else "elsewhere" if seen["locked"] else "stopped",
            "pid": state.get("pid"),
            "since": iso(state.get("since")),
            "sentence": state.get("sentence"),
            "seen_at": iso(state.get("at")),
            "inflight": state.get("inflight"),
        },
        "database": {"ok": error is None, "error": error},
        "outbox": seen["outbox"],
        "recordings": seen["recordings"] | disk_of(config.recordings_dir),
        "outages": [
            {key: outage[key] for key in ("endpoint", "code", "reason")}
            | {"since": iso(outage["since"]), "next_try_at": iso(outage["due"])}
            for outage in state.get("outages") or []
        ],
        "dead_letters": seen["dead_letters"],
        "deliveries": seen["deliveries"],
        "settings": {
            "interval": config.frontend_sync_interval_sec,
            "trouble": settings_trouble(state),
            **seen["settings"],
        },
        "progress": progress_of(state, seen["outbox"]),
        "checks": {"listening": state.get("listening")},
    }


def settings_trouble(state: Mapping[str, Any]) -> dict[str, Any] | None:
    """Why the running agent gets no settings."""
    trouble: dict[str, Any] | None = (state.get("settings") or {}).get("trouble")
    return trouble and trouble | {"since": iso(trouble["since"])}


def iso(at: float | None) -> str | None:
    return None if at is None else datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds")


def progress_of(
    state: Mapping[str, Any], outbox: Mapping[str, Any] | None
) -> dict[str, Any] | None:
    """What is under way, how fast it goes and how long it will take."""
    progress: dict[str, Any] | None = state.get("progress")
    if not progress:
        return None
    done = "bytes" if progress["kind"] == "upload" else "entries"
    left = progress.get("size", 0) - progress[done]
    if progress["kind"] == "drain":
        left = int(outbox["pending"]) if outbox else 0
        progress = progress | {"total": progress["entries"] + left}
    rate = progress[done] / max(progress["seconds"], 0.001)
    progress = {key: value for key, value in progress.items() if key != "seconds"}
    return progress | {"rate": rate, "left_seconds": left / rate if rate else None}


def disk_of(directory: str) -> dict[str, Any]:
    """The recordings' directory: its size, and what is free. None: nobody may know."""
    found: dict[str, Any] = {"directory": directory, "bytes": None}
    found |= {"disk_free": None, "disk_total": None}
    with contextlib.suppress(OSError):
        disk = os.statvfs(directory)
        found["disk_free"] = disk.f_bavail * disk.f_frsize
        found["disk_total"] = disk.f_blocks * disk.f_frsize
        found["bytes"] = size_of(directory, time.monotonic() + 3)
    return found


def size_of(directory: str, until: float, depth: int = 2) -> int | None:
    """The bytes in a directory and in those below it; None where that would take too long."""
    total = 0
    with os.scandir(directory) as entries:
        for entry in entries:
            inner: int | None = 0
            with contextlib.suppress(OSError):
                if entry.is_dir(follow_symlinks=False) and depth > 1:
                    inner = size_of(entry.path, until, depth - 1)
                elif not entry.is_dir(follow_symlinks=False):
                    inner = entry.stat(follow_symlinks=False).st_size
            if inner is None or time.monotonic() > until:
                return None
            total += inner
    return total


def history(desk: Desk) -> list[dict[str, Any]]:
    return list(desk.run(HISTORY)[0][0] or [])


def counters(desk: Desk) -> dict[tuple[str, str], float]:
    return {(name, label): value for name, label, value in desk.run(COUNTERS)}


# --- dead letters ---------------------------------------------------------------------------------

PAYLOAD_IN_LIST, PAYLOAD_ALONE = 4096, 1 << 20
# The columns of LETTERS.
_MESSAGE: Final = (
    *("id", "original_topic", "error_message", "retry_count", "max_retries", "payload", "status"),
    *("created_at", "updated_at", "last_retry_at", "outbox_id", "entity_id", "error_code"),
    *("http_status", "attempts", "payload_bytes"),
)
AGAINST: Final = {
    "RESOLVED": "it has been delivered",
    "RETRYING": "it is in the queue already",
    "taken": "its seq belongs to another entry by now",
    "used_up": "its {max_retries} retries are used up",
    "overtaken": "a newer entry of the same entity (seq {newer}) takes its place",
    "unknown": "it is so old that a newer entry of the same entity may have been pruned",
}


def topics(desk: Desk) -> list[dict[str, Any]]:
    names = ("topic", "total", "pending", "retrying", "resolved", "dead")
    return [dict(zip(names, row, strict=True)) for row in desk.run(TOPICS)]


def letters(desk: Desk, topic: str | None, page: int, size: int) -> dict[str, Any]:
    """A page of dead letters, newest first."""
    total = desk.run(LETTER_COUNT, topic=topic)[0][0]
    skip = (page - 1) * size
    rows = desk.run(
        LETTERS, topic=topic, id=None, size=size, skip=min(skip, 1 << 62), most=PAYLOAD_IN_LIST
    )
    pages = {"total_count": total, "page": page, "page_size": size}
    return {
        "messages": [_message(row) for row in rows],
        "pagination": pages | {"has_next": skip + size < total},
    }


def letter(desk: Desk, name: str) -> dict[str, Any]:
    rows = desk.run(LETTERS, topic=None, id=_letter_id(name), size=1, skip=0, most=PAYLOAD_ALONE)
    if not rows:
        raise Refused("not_found", f"there is no dead letter {name}")
    return _message(rows[0])


def _letter_id(name: str) -> str:
    if not _UUID.fullmatch(name):
        raise Refused("invalid", f"{name[:80]!r} is not the id of a dead letter (a UUID)")
    return name


def _message(row: Sequence[Any]) -> dict[str, Any]:
    message = dict(zip(_MESSAGE, row, strict=True))
    for key in ("created_at", "updated_at", "last_retry_at"):
        message[key] = message[key] and message[key].isoformat()
    text = message["payload"]
    if text is not None:
        message["payload"] = mask(text)  # too deep, a number too long: as text
        with contextlib.suppress(RecursionError, ValueError):
            message["payload"] = without_secrets(json.loads(text), hides=object)
    return message


_SECRET_KEY: Final = re.compile(f"(?i){_NAMES}")


def without_secrets(value: Any, hides: type = str) -> Any:
    """As it may be shown: what looks like a secret is masked, and what a secret's name stands for:
    in a payload whatever it is, in our own views only texts (numbers count what has that name)."""
    if isinstance(value, dict):
        return {
            mask(key): "***"
            if inner is not None and isinstance(inner, hides) and _SECRET_KEY.search(key)
            else without_secrets(inner, hides)
            for key, inner in value.items()
        }
    if isinstance(value, list):
        return [without_secrets(inner, hides) for inner in value]
    return mask(value) if isinstance(value, str) else value


def _against(row: Sequence[Any], force: bool) -> str | None:
    """What speaks against sending a letter again. `force` overrules all but its state."""
    _, _, status, retries, most, newer, unknown, taken = row
    if taken or status in ("RESOLVED", "RETRYING"):
        return AGAINST["taken" if taken else status]
    if force:
        return None
    if newer is not None:
        return AGAINST["overtaken"].format(newer=newer)
    if unknown:
        return AGAINST["unknown"]
    return AGAINST["used_up"].format(max_retries=most) if retries >= most else None


@contextlib.contextmanager
def put_back(desk: Desk) -> Iterator[list[int]]:
    """Around all that puts entries back into the queue, and names them in the list: what is newer
    and on its way just now is waited for once, however many they are."""
    desk.run(NO_LOOPS)
    began = desk.run("select clock_timestamp()")[0][0]
    seqs: list[int] = []
    try:
        yield seqs
    finally:  # for those before one that fails, too
        until = time.monotonic() + desk.patience
        while seqs:
            newer = desk.run(SEND_LAST, seqs=seqs, began=began)[0][0]
            desk.run("notify serversync")
            under_way = newer and desk.run(IS_LOCKED, key=LOCK_KEY)[0][0]
            if not under_way or time.monotonic() > until:
                break
            time.sleep(0.2)


def retry_letter(desk: Desk, name: str, force: bool) -> dict[str, Any]:
    """Puts a letter back into the queue; the agent does the rest."""
    with put_back(desk) as seqs:
        return revive(desk, name, force, seqs)


def revive(desk: Desk, name: str, force: bool, seqs: list[int]) -> dict[str, Any]:
    ids = [_letter_id(name)]
    with desk.conn.transaction():
        rows = desk.run(JUDGE_LETTERS, ids=ids, topic=None, after=0)
        if not rows:
            raise Refused("not_found", f"there is no dead letter {name}")
        against = _against(rows[0], force)
        if against:
            raise Refused("conflict", f"dead letter {name} is not sent again: {against}")
        desk.run(REVIVE, ids=ids)
    seqs.append(rows[0][1])
    message = f"entry {rows[0][1]} is in the queue again"
    return {"id": name, "status": "RETRYING", "message": message}


def retry_all(
    desk: Desk, topic: str | None, force: bool, seconds: float = float("inf")
) -> dict[str, Any]:
    """Puts all that can go back into the queue, in chunks; of very many, as many as the time
    allows: what is left is asked for again."""
    retried, after, until = 0, 0, time.monotonic() + seconds
    refused: dict[str, int] = {}
    more = False
    while not more:
        with put_back(desk) as seqs, desk.conn.transaction():
            rows = desk.run(JUDGE_LETTERS, ids=None, topic=topic, after=after)
            good = []
            for row in rows:
                against = _against(row, force)
                if against:
                    kind = re.sub(r" \(seq \d+\)", "", against)
                    refused[kind] = refused.get(kind, 0) + 1
                else:
                    good.append(row[0])
                    seqs.append(row[1])
            desk.run(REVIVE, ids=good)
        if not rows:
            break
        retried, after = retried + len(good), rows[-1][1]
        more = bool(good) and time.monotonic() > until
    message = f"{count(retried, 'entry', 'entries')} back in the queue"
    message += "".join(f"; {number} not: {kind}" for kind, number in refused.items())
    message += "; there may be more: ask again" if more else ""
    number = sum(refused.values())
    return {"retried": retried, "refused": number, "more": more, "message": message}


def delete_letter(desk: Desk, name: str) -> dict[str, Any]:
    rows = desk.run(DELETE_LETTER, id=_letter_id(name))
    if not rows:
        raise Refused("not_found", f"there is no dead letter {name}")
    more = "; its recording stays on the disk" if rows[0][1] == "recording_file" else ""
    if rows[0][2] == "RETRYING":
        more += "; it was in the queue, and may have been sent"
    return {"success": True, "message": f"dead letter {name} is deleted{more}"}


# ==================================================================================================
# Metrics
# Prometheus text of what survey() saw and the counters counted. What is not known is skipped: a 0
# would be a lie, and for a counter a restart.
# ==================================================================================================

# Name, type, text: in the order in which they are printed.
METRICS: Final = (
    ("serversync_build_info", "gauge", "Versions, as labels."),
    ("serversync_snapshot_timestamp_seconds", "gauge", "When these numbers were taken."),
    ("serversync_up", "gauge", "Whether an agent runs here, be it as standby."),
    ("serversync_database_up", "gauge", "Whether the database answers."),
    ("serversync_listener_connected", "gauge", "Whether a NOTIFY wakes the agent; else it polls."),
    ("serversync_outage", "gauge", "Whether nothing gets through, by endpoint."),
    ("serversync_outage_seconds", "gauge", "For how long nothing has got through, by endpoint."),
    ("serversync_pending_entries", "gauge", "Entries not yet delivered."),
    ("serversync_oldest_pending_seconds", "gauge", "Age of the oldest entry not yet delivered."),
    ("serversync_waiting_entries", "gauge", "Entries that wait after a failure, by its code."),
    ("serversync_dead_letters", "gauge", "Entries given up, by what became of them since."),
    (
        "serversync_last_success_timestamp_seconds",
        "gauge",
        "When the frontend last confirmed anything.",
    ),
    ("serversync_deletions_waiting", "gauge", "Uploaded recordings still on the disk."),
    ("serversync_deletions_failed", "gauge", "Those of them whose deletion has failed."),
    ("serversync_recordings_bytes", "gauge", "What is in the recordings directory."),
    ("serversync_disk_free_bytes", "gauge", "Free space where the recordings are."),
    ("serversync_disk_size_bytes", "gauge", "All space where the recordings are."),
    (
        "serversync_settings_last_pull_timestamp_seconds",
        "gauge",
        "When the frontend last gave its settings.",
    ),
    ("serversync_settings_failing", "gauge", "Whether the agent gets no settings now."),
    ("serversync_settings_items", "gauge", "What was applied last, by its kind."),
    (
        "serversync_settings_skipped",
        "gauge",
        "Items of the last answer that were skipped, by section.",
    ),
    ("serversync_settings_held", "gauge", "Whether a section is held back: too much was gone."),
    ("serversync_settings_refused", "gauge", "Whether a section could not be applied."),
    ("serversync_settings_audio_waiting", "gauge", "Announcements' audio still to be fetched."),
    ("serversync_upload_bytes_total", "counter", "Bytes of confirmed uploads."),
    ("outbox_inflight", "gauge", "Entries and files in the request under way."),
    ("outbox_dequeue_total", "counter", "Entries taken from the queue, by what became of them."),
    (
        "outbox_send_total",
        "counter",
        "Entries by the outcome of sending them; retry: it failed alone in its request.",
    ),
    ("outbox_lag_seconds", "histogram", "From an entry's creation to its confirmation."),
    ("outbox_retry_count", "histogram", "How often an entry had failed until it got through."),
)
LAG_BOUNDS: Final = (1, 5, 30, 60, 300, 3600, 86400)  # seconds, those of CONFIRM
TRIES_BOUNDS: Final = tuple(range(9))
# Failures before anything left: no sending that is retried.
NOT_SENT: Final = (
    "NOT_READY", "FILE_UNREADABLE", "ENTRY_UNREADABLE", "ROW_CORRUPT", "SESSION_LOST",
)  # fmt: skip

Samples = Mapping[str, float | None]  # what follows the name (suffix and labels): its value


def metrics_text(view: dict[str, Any], counts: dict[tuple[str, str], float]) -> str:
    """All metrics that are known, in the text format 0.0.4."""
    samples = _of_agent(view) | _of_work(view) | _of_settings(view)
    if view["database"]["ok"]:
        samples |= _counters(counts)
    lines = []
    for name, kind, text in METRICS:
        known = {key: value for key, value in samples.get(name, {}).items() if value is not None}
        lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"] if known else []
        for key, value in known.items():
            lines.append(f"{name}{key} {repr(float(value)).removesuffix('.0')}")
    return "\n".join(lines) + "\n"


def labels(**pairs: object) -> str:
    """{name="value",…}: masked, without control characters, escaped."""
    shown = {key: clean(str(value), 128) for key, value in pairs.items()}
    escaped = {key: re.sub(r'(["\\])', r"\\\1", value) for key, value in shown.items()}
    return "{" + ",".join(f'{key}="{value}"' for key, value in escaped.items()) + "}"


def labelled(name: str, values: Mapping[str, float]) -> Samples:
    """A sample for each value of one label."""
    return {labels(**{name: key}): value for key, value in values.items()}


def _seconds(text: str | None) -> float | None:
    return datetime.fromisoformat(text).timestamp() if text else None


def _of_agent(view: Mapping[str, Any]) -> dict[str, Samples]:
    """Who is there, and whether anything gets through."""
    agent, now = view["agent"], _seconds(view["at"]) or 0.0
    build = labels(
        version=__version__,
        python=platform.python_version(),
        psycopg=psycopg.__version__,
        urllib3=urllib3.__version__,  # type: ignore[attr-defined]
    )
    found: dict[str, Samples] = {
        "serversync_build_info": {build: 1},
        "serversync_snapshot_timestamp_seconds": {"": now},
        "serversync_up": {"": agent["state"] in ("running", "standby")},
        "serversync_database_up": {"": view["database"]["ok"]},
        "serversync_listener_connected": {"": (view["checks"] or {}).get("listening")},
        "outbox_inflight": {"": agent["inflight"]},
    }
    if agent["pid"] and agent["state"] == "running":  # a standby does not know of outages
        since = {outage["endpoint"]: _seconds(outage["since"]) for outage in view["outages"]}
        lasted = {door: max(0.0, now - (since.get(door) or now)) for door in ("entries", "files")}
        out = {door: door in since for door in lasted}
        found["serversync_outage"] = labelled("endpoint", out)
        found["serversync_outage_seconds"] = labelled("endpoint", lasted)
    return found


def _of_work(view: Mapping[str, Any]) -> dict[str, Samples]:
    """What is there to do, what failed, and the disk."""
    outbox, recordings = view["outbox"] or {}, view["recordings"] or {}
    oldest = outbox.get("oldest_seconds") if outbox.get("pending") else outbox.get("pending")
    last = (view["deliveries"] or {}).get("last_success_at")
    return {
        "serversync_pending_entries": {"": outbox.get("pending")},
        "serversync_oldest_pending_seconds": {"": oldest},
        "serversync_waiting_entries": labelled("code", outbox.get("reasons") or {}),
        "serversync_dead_letters": labelled("status", view["dead_letters"] or {}),
        "serversync_last_success_timestamp_seconds": {"": _seconds(last)},
        "serversync_deletions_waiting": {"": recordings.get("deletions_waiting")},
        "serversync_deletions_failed": {"": recordings.get("deletions_failed")},
        "serversync_recordings_bytes": {"": recordings.get("bytes")},
        "serversync_disk_free_bytes": {"": recordings.get("disk_free")},
        "serversync_disk_size_bytes": {"": recordings.get("disk_total")},
    }


def _of_settings(view: Mapping[str, Any]) -> dict[str, Samples]:
    """Nothing where none were ever pulled."""
    settings = view["settings"]
    sections = [each for each in settings["sections"] if each["pulled_at"]]
    if not sections:
        return {}
    items = {word: number for each in sections for word, number in each["items"].items()}
    by_name = {each["section"]: each for each in sections}
    last = max(str(each["pulled_at"]) for each in sections)
    found: dict[str, Samples] = {
        "serversync_settings_last_pull_timestamp_seconds": {"": _seconds(last)},
        "serversync_settings_items": labelled("kind", items),
        "serversync_settings_audio_waiting": {"": settings["audio"]["waiting"]},
    }
    for name, key in (("skipped", "skipped"), ("held", "held"), ("refused", "error")):
        values = {section: float(each[key] or 0) if key == "skipped" else bool(each[key])
                  for section, each in by_name.items()}  # fmt: skip
        found[f"serversync_settings_{name}"] = labelled("section", values)
    if view["agent"]["pid"] and view["agent"]["state"] == "running":
        found["serversync_settings_failing"] = {"": settings["trouble"] is not None}
    return found


def _counters(counts: Mapping[tuple[str, str], float]) -> dict[str, Samples]:
    """What was counted in the very transactions that did it, since the schema was made."""
    of: dict[str, dict[str, float]] = {}
    for (name, label), value in counts.items():
        of.setdefault(name, {})[label] = value
    total = {name: sum(by_label.values()) for name, by_label in of.items()}
    retries, sent_as = of.get("retries", {}), of.get("sent_as", {})
    retries.pop("WAITS_FOR", None)  # for another entry: nothing was taken from the queue
    taken = {"sent": total.get("sent", 0), "set_aside": sum(retries.values())}
    taken["dead"] = dead = total.get("dead", 0)
    outcomes = {
        "success": sent_as.get("sent", 0),
        "retry": sum(value for code, value in retries.items() if code not in NOT_SENT),
        "dead": dead,
        "conflict_processed": sent_as.get("conflict_processed", 0),
    }
    lag = histogram(of.get("lag", {}), LAG_BOUNDS, total.get("lag_sum", 0))
    tries = histogram(of.get("tries", {}), TRIES_BOUNDS, total.get("tries_sum", 0))
    return {
        "serversync_upload_bytes_total": {"": total.get("upload_bytes", 0)},
        "outbox_dequeue_total": labelled("result", taken),
        "outbox_send_total": labelled("outcome", outcomes),
        "outbox_lag_seconds": lag,
        "outbox_retry_count": tries,
    }


def histogram(buckets: Mapping[str, float], bounds: Sequence[int], total: float) -> Samples:
    """Cumulative; `buckets` counts by the number of the first bound that was not passed."""
    samples: dict[str, float | None] = {}
    below = 0.0
    for number, bound in enumerate((*bounds, "+Inf")):
        below += buckets.get(str(number), 0)
        samples["_bucket" + labels(le=bound)] = below
    return samples | {"_sum": total, "_count": below}


# ==================================================================================================
# Commands
# What people type. Each prints a screen, a table or JSON, and returns an exit code.
# ==================================================================================================

# What a least-privilege role needs, whether it has it, and the SQL (written by PostgreSQL, so that
# names are quoted by it). In the order in which it must be done; what is absent needs no grant.
SETUP: Final = """
with role as (
    select %(role)s::text as name, (select oid from pg_roles where rolname = %(role)s) as oid
), outbox as (
    select c.oid, c.oid::regclass::text as name, n.oid as schema_oid, n.nspname as schema,
           pg_get_serial_sequence(c.oid::regclass::text, 'id') as sequence
    from pg_class c join pg_namespace n on n.oid = c.relnamespace
    where n.nspname = %(schema)s and c.relname = 'sync_outbox'
), other as (
    select c.oid, c.oid::regclass::text as name, c.relname, i.indisvalid
    from pg_class c join outbox o on o.schema_oid = c.relnamespace
    left join pg_index i on i.indexrelid = c.oid
), steps (number, name, done, sql) as (
    select 1, 'role', oid is not null, format('create role %%I login', name) from role
    union all
    select 2, 'connect', has_database_privilege(oid, current_database(), 'connect'),
           format('grant connect on database %%I to %%I', current_database(), name) from role
    union all
    select 3, 'schema of the backend', has_schema_privilege(r.oid, o.schema_oid, 'usage'),
           format('grant usage on schema %%I to %%I', o.schema, r.name) from role r, outbox o
    union all
    select 4, 'search_path', %(finds)s,
           format('alter role %%I in database %%I set search_path = %%I', r.name,
                  current_database(), o.schema) from role r, outbox o
    union all
    select 5, 'sync_outbox', has_table_privilege(r.oid, o.oid, 'select')
               and has_table_privilege(r.oid, o.oid, 'insert')
               and has_table_privilege(r.oid, o.oid, 'delete')
               and has_column_privilege(r.oid, o.oid, 'processed_at', 'update'),
           format('grant select, insert, delete, update (processed_at) on %%s to %%I', o.name,
                  r.name) from role r, outbox o
    union all
    select 6, 'its sequence', has_sequence_privilege(r.oid, o.sequence, 'usage'),
           format('grant usage on sequence %%s to %%I', o.sequence, r.name)
    from role r, outbox o where o.sequence is not null
    union all
    select 7, 'recordings', has_table_privilege(r.oid, t.oid, 'select')
               and has_column_privilege(r.oid, t.oid, 'upload_status', 'update')
               and has_column_privilege(r.oid, t.oid, 's3_url', 'update'),
           format('grant select, update (upload_status, s3_url) on %%s to %%I', t.oid::regclass,
                  r.name) from role r, other t where t.relname = 'recordings'
    union all
    select 8, 'system_settings', has_table_privilege(r.oid, t.oid, 'select')
               and bool_and(has_column_privilege(r.oid, t.oid, a.attnum, 'update')),
           format('grant select, update (%%s) on %%s to %%I', string_agg(a.attname, ', '),
                  t.oid::regclass, r.name)
    from role r, other t join pg_attribute a on a.attrelid = t.oid
    where t.relname = 'system_settings' and a.attname in ('extra', 'updated_at')
    group by r.oid, r.name, t.oid
    union all
    select 8, t.relname, (
               select bool_and(has_table_privilege(r.oid, t.oid, w)) from unnest(n.rights) w),
           format('grant %%s on %%s to %%I', array_to_string(n.rights, ', '), t.oid::regclass,
                  r.name)
    from role r, other t join (
        values ('registered_numbers', '{select,insert,update}'::text[]),
               ('call_action_rules', '{select,insert,update,delete}'),
               ('announcements', '{select,insert,update,delete}'),
               ('ivr_flows', '{select,insert,update,delete}'),
               ('ivr_nodes', '{select,insert,update,delete}'),
               ('ivr_transitions', '{select,insert,update,delete}'),
               ('serversync_keys', '{select,insert,update,delete}')) n (name, rights)
        on n.name = t.relname
    union all
    select 9, 'schema serversync', exists (
               select from pg_namespace n where n.nspname = 'serversync'
               and pg_has_role(r.oid, n.nspowner, 'usage')),
           case when to_regnamespace('serversync') is null
                then format('create schema serversync authorization %%I', name)
                else format('alter schema serversync owner to %%I', name) end from role r
    union all
    select 10, 'owner of its tables', count(*) = 0,  -- where another role was the agent's before
           string_agg(format('alter %%s %%s owner to %%I', o.kind, o.name, r.name), '; ')
    from role r, (
        select 'table' as kind, oid::regclass::text as name, relowner as owner from pg_class
        where relnamespace = to_regnamespace('serversync') and relkind = 'r'
        union all
        select 'function', oid::regprocedure::text, proowner from pg_proc
        where pronamespace = to_regnamespace('serversync')) o
    where not coalesce(pg_has_role(r.oid, o.owner, 'usage'), false)
    union all
    select 101, 'an invalid index dropped', false, format('drop index concurrently %%s', name)
    from other where relname = 'sync_outbox_serversync_pending' and not indisvalid
    union all
    select 102, 'index of pending entries', exists (
               select from other where relname = 'sync_outbox_serversync_pending' and indisvalid),
           format('create index concurrently sync_outbox_serversync_pending on %%s (id) '
                  'where processed_at is null', name) from outbox
)
select number, name, coalesce(done, false), sql from steps order by number, name
"""
# The schemas that hold an outbox (in the role's own schema, or a temporary one, it is not the
# backend's); whether what is set for the role in this database names it first; and, where nothing
# is set for the role or the database, whether it is public.
OUTBOXES: Final = """
with setting as (
    select unnest(s.setconfig) || ', ' as path, s.setrole > 0 and s.setdatabase > 0 as exact
    from pg_db_role_setting s left join pg_roles r on r.oid = s.setrole
    left join pg_database d on d.oid = s.setdatabase
    where (s.setrole = 0 or r.rolname = %(role)s)
      and (s.setdatabase = 0 or d.datname = current_database())
)
select n.nspname, coalesce(bool_or(starts_with(
           path, 'search_path=' || quote_ident(n.nspname) || ', ') and exact), false),
       n.nspname = 'public' and bool_or(starts_with(path, 'search_path=')) is not true
from pg_class c join pg_namespace n on n.oid = c.relnamespace left join setting on true
where c.relname = 'sync_outbox' and c.relkind in ('r', 'p') and c.relpersistence <> 't'
  and n.nspname <> 'serversync'
group by 1 order by 2 desc, 1
"""
SERVICE_USER: Final = "serversync"
SUPERUSER: Final = "postgres"
COLOURS: Final = {"good": "32", "warn": "33", "bad": "31", "dim": "2"}
ESCAPE: Final = uuid.uuid4().hex  # begins our own sequences: no text from outside can hold it


def to_stdout(text: str, instead: TextIO | None = None) -> None:
    """The one way to a terminal, which obeys no character of the text but a line break."""
    text = _CONTROL_BUT_BREAKS.sub(" ", text).replace(ESCAPE, "\x1b[")
    (instead or sys.stdout).write(text + "\n")


def as_json(value: object, indent: int | None = 2) -> str:
    """What `to_stdout` would change is escaped: a value stays what it is."""
    poor = getattr(sys.stdout, "encoding", None) not in (None, "utf-8")
    text = json.dumps(value, indent=indent, ensure_ascii=poor, default=str)
    odd = rf"{_CONTROL_BUT_BREAKS.pattern}|[\ud800-\udfff]"
    return re.sub(odd, lambda found: f"\\u{ord(found[0]):04x}", text)


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns as wide as they must be; no line break within them begins another row."""
    texts = [header, *([clean("" if c is None else str(c), limit=80) for c in r] for r in rows)]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in texts)
    return "\n".join(lines)


def paint(kind: str, text: str) -> str:
    plain = not sys.stdout.isatty() or os.environ.get("NO_COLOR") or kind not in COLOURS
    return text if plain else f"{ESCAPE}{COLOURS[kind]}m{text}{ESCAPE}0m"


def span(seconds: float) -> str:
    """How long, in the largest unit that says enough."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0, seconds):.0f} s"


def since(text: str | None) -> str:
    """How long ago a time of the survey was."""
    if text is None:
        return "never"
    with contextlib.suppress(ValueError):
        return span(time.time() - datetime.fromisoformat(text).timestamp())
    return text  # 'infinity' is a date, too


# --- who acts -------------------------------------------------------------------------------------


def service_user(environ: Mapping[str, str]) -> pwd.struct_passwd | None:
    """Who the service is: the unit's user; without a unit the running agent's, or the package's."""
    unit = unit_properties("LoadState", "User")
    with contextlib.suppress(OSError, KeyError):
        if unit.get("LoadState") == "loaded":
            return pwd.getpwnam(unit["User"] or "root")
        state = read_state(environ)
        if state:
            return pwd.getpwuid(os.stat(f"/proc/{state['pid']}").st_uid)
    with contextlib.suppress(KeyError):
        return pwd.getpwnam(SERVICE_USER)
    return None


def unit_properties(*names: str) -> dict[str, str]:
    """What systemd knows of the service; nothing where there is no systemd."""
    if not os.path.isdir("/run/systemd/system"):
        return {}
    show = ["systemctl", "show", f"--property={','.join(names)}", "serversync.service"]
    clean_environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C"}
    try:
        shown = subprocess.run(
            show, env=clean_environment, capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(line.split("=", 1) for line in shown.stdout.splitlines() if "=" in line)


def become(user: pwd.struct_passwd) -> None:
    """For good: peer authentication and the files then work as they do for the service."""
    os.initgroups(user.pw_name, user.pw_gid)
    os.setgid(user.pw_gid)
    os.setuid(user.pw_uid)
    os.environ["HOME"] = user.pw_dir  # libpq looks there for .pgpass and certificates


def become_service_user(environ: Mapping[str, str]) -> None:
    """Commands that root types act as the service does."""
    user = service_user(environ) if os.geteuid() == 0 else None
    if user is not None and user.pw_uid != 0:
        become(user)


# --- status ---------------------------------------------------------------------------------------


def status_screen(view: Mapping[str, Any]) -> str:
    """One screen for a person; what is missing is said in its place."""
    lines = [f"serversync {view['version']}, device {view['device']}, to {view['frontend']}", ""]
    for title, words in _status_rows(view):
        lines.append(f"{title:<13}{clean(words, 4096)}")  # one line, whatever is in it
    return "\n".join(lines)


def _status_rows(view: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    agent = view["agent"]
    words = {"running": paint("good", "running"), "standby": paint("warn", "standby")}
    words["elsewhere"] = paint("warn", "not seen here, but another session holds the lock")
    text = words.get(agent["state"], paint("bad", "not running: sudo systemctl start serversync"))
    if agent["since"]:
        text += f" for {since(agent['since'])} (pid {agent['pid']})"
    yield "agent", text
    if agent["sentence"]:
        yield "", agent["sentence"]
    for outage in outages_of(view):
        wait = max(0.0, datetime.fromisoformat(outage["next_try_at"]).timestamp() - time.time())
        text = f"{outage['endpoint']}, for {since(outage['since'])}, next try in {span(wait)}"
        yield paint("bad", "outage") + " " * 7, f"{text}: {outage['reason']}"
    if not view["database"]["ok"]:
        yield "database", paint("bad", str(view["database"]["error"]))
    else:
        yield from _status_counts(view)
    yield from _status_recordings(view["recordings"])
    yield from _status_settings(view["settings"])
    yield from _status_progress(view["progress"])


def outages_of(view: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One for each reason: mostly it is the same for both endpoints."""
    found: dict[str, dict[str, Any]] = {}
    for outage in view["outages"]:
        known = found.setdefault(outage["reason"], dict(outage, endpoint=""))
        known["endpoint"] += (" and " if known["endpoint"] else "") + outage["endpoint"]
    return list(found.values())


def _status_counts(view: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    outbox, letters_, sent = view["outbox"], view["dead_letters"], view["deliveries"]

    def listed(counts: Mapping[str, int]) -> str:
        most = sorted(counts, key=lambda name: -counts[name])[:6]
        rest = [f"and {len(counts) - 6} more"] if len(counts) > 6 else []
        return ", ".join([*(f"{clean(name, limit=30)} {counts[name]}" for name in most), *rest])

    text = paint("good", "nothing pending")
    if outbox["pending"]:
        text = f"{outbox['pending']} pending, the oldest for {span(outbox['oldest_seconds'])}"
        text += f": {listed(outbox['by_type'])}"
    yield "outbox", text
    if outbox["waiting"]:
        yield "", f"{outbox['waiting']} of them wait for a retry: {listed(outbox['reasons'])}"
    open_letters = letters_["PENDING"] + letters_["DEAD"]
    states = ", ".join(f"{n} {name}" for name, n in letters_.items() if n) or "none"
    yield "dead letters", paint("bad" if open_letters else "", states)
    hour = sent["hour"]
    text = f"last {since(sent['last_success_at'])} ago" if sent["last_success_at"] else "never yet"
    text += f"; in the last hour {count(hour['entries'], 'entry', 'entries')}"
    text += f" and {count(hour['files'], 'recording')} ({human(hour['bytes'])})"
    yield "delivered", text


def _status_recordings(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    words = []
    if "waiting" in found:
        size = found["waiting_bytes"]
        words.append(f"{found['waiting']} to upload" + (f" ({human(size)})" if size else ""))
        words.append(f"{found['deletions_waiting']} to delete")
        if found["deletions_failed"]:
            words.append(paint("bad", f"{found['deletions_failed']} cannot be deleted"))
    if found["disk_free"] is None:
        words.append(paint("warn", f"{found['directory']} cannot be read"))
    else:
        size = found["bytes"]
        words.append("" if size is None else f"{human(size)} on the disk")
        words.append(f"{human(found['disk_free'])} of {human(found['disk_total'])} free")
    yield "recordings", ", ".join(filter(None, words))


def _status_settings(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    sections = [each for each in settings["sections"] if each["pulled_at"]]
    if not settings["interval"] or not (sections or settings["trouble"]):
        return
    words = ["never pulled yet"]
    if sections:
        items = {word: number for each in sections for word, number in each["items"].items()}
        ago = since(max(str(each["pulled_at"]) for each in sections))
        words = [f"last pull {ago} ago", counted(items) or "nothing applied yet"]
        skipped = sum(each["skipped"] for each in sections)
        words += [paint("warn", f"{skipped} skipped")] if skipped else []
        waiting = settings["audio"]["waiting"]
        words += [f"{count(waiting, 'audio file')} to fetch"] if waiting else []
    yield "settings", "; ".join(words)
    for each in sections:
        if each["held"]:
            why = held_text(each["items"], each["held"])
            hint = accept_hint(each["section"])
            yield "", paint("bad", f"{each['section']} held back: {why}: {hint}")
        if each["error"]:
            yield "", paint("bad", f"{each['section']} cannot be applied: {each['error']}")
    if settings["trouble"]:
        trouble = settings["trouble"]
        text = f"none for {since(trouble['since'])}: {trouble['reason']}"
        yield "", paint("bad", text)


def _status_progress(progress: Mapping[str, Any] | None) -> Iterator[tuple[str, str]]:
    if progress is None:
        return
    upload = progress["kind"] == "upload"
    done, total = (progress[k] for k in (("bytes", "size") if upload else ("entries", "total")))
    share = done / max(total, 1)
    filled = round(10 * share)
    left = progress["left_seconds"]
    rate = f"{human(progress['rate'])}/s" if upload else f"{progress['rate']:.0f}/s"
    shown = f"{human(done)} of {human(total)}" if upload else f"{done} of {total} entries"
    bar = "#" * filled + "." * (10 - filled)
    ends = "" if left is None else f", {span(left)} left"
    yield progress["kind"], f"[{bar}] {100 * share:3.0f} % {shown}, {rate}{ends}"


def do_status(config: Config, arguments: argparse.Namespace, environ: Mapping[str, str]) -> int:
    if arguments.watch and not arguments.json:
        return watch(config, environ)
    view = survey(config, environ)
    to_stdout(as_json(view) if arguments.json else status_screen(view))
    there = view["database"]["ok"] and view["agent"]["state"] in ("running", "standby")
    return EX_OK if there else EX_UNAVAILABLE


def watch(config: Config, environ: Mapping[str, str]) -> int:
    """Repaints once a second, until Ctrl-C; leaves the last screen behind."""
    screen, there = "", sys.stdout.isatty()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    try:
        if there:
            sys.stdout.write("\x1b[?1049h")
        while True:
            screen = status_screen(survey(config, environ))
            painted = "\n".join(f"{line}{ESCAPE}K" for line in screen.split("\n"))
            to_stdout(f"{ESCAPE}H{painted}{ESCAPE}J" if there else screen)
            sys.stdout.flush()
            time.sleep(1)
    except KeyboardInterrupt:
        return EX_OK
    finally:
        if there:
            to_stdout(f"{ESCAPE}?1049l{screen}")


# --- dead letters, replay, prune, enqueue ---------------------------------------------------------


def do_dlq(config: Config, arguments: argparse.Namespace, environ: Mapping[str, str]) -> int:
    with Desk(config, "dlq") as desk:
        return int(DLQ[arguments.action](desk, arguments))


def _dlq_list(desk: Desk, arguments: argparse.Namespace) -> int:
    found = letters(desk, arguments.topic, arguments.page, arguments.page_size)
    if arguments.json:
        to_stdout(as_json(found))
        return EX_OK
    keys = ("id", "original_topic", "status", "retry_count", "error_code", "created_at")
    for message in found["messages"]:
        at = datetime.fromisoformat(message["created_at"]).astimezone()  # as --since reads it
        message["created_at"] = at.isoformat(timespec="seconds")[:19]
    rows = [[m[k] for k in keys] + [m["error_message"]] for m in found["messages"]]
    header = ("ID", "TOPIC", "STATUS", "RETRIES", "CODE", "SINCE", "MESSAGE")
    pages = found["pagination"]
    if rows:
        to_stdout(table(header, rows))
    if pages["has_next"]:
        topic = [arguments.topic] if arguments.topic else []
        numbers = ["--page", str(pages["page"] + 1), "--page-size", str(pages["page_size"])]
        more = shlex.join(["serversync", "dlq", "list", *topic, *numbers])
        to_stdout(f"{pages['total_count']} in all; the next page: {more}")
    elif not rows:
        to_stdout(f"{pages['total_count']} in all, none on this page"
                  if pages["total_count"] else "no dead letters")  # fmt: skip
    return EX_OK


def _dlq_show(desk: Desk, arguments: argparse.Namespace) -> int:
    message = letter(desk, arguments.id)
    if arguments.json:
        to_stdout(as_json(message))
        return EX_OK
    payload = message.pop("payload")
    if payload is None:
        payload = f"{human(message['payload_bytes'])}: too large to be shown"
    lines = [f"{k:<16}{clean(str(v), limit=2000)}" for k, v in message.items() if v is not None]
    shown = payload if isinstance(payload, str) else as_json(payload)
    to_stdout("\n".join([*lines, "", shown]))
    return EX_OK


def _each(arguments: argparse.Namespace, act: Callable[[str], dict[str, Any]]) -> int:
    """One after the other; what is refused does not stop the rest."""
    code, answers = EX_OK, []
    for name in arguments.ids:
        try:
            answers.append(act(name))
        except Refused as refused:
            code = EX_PERSON
            answers.append({"id": name, "error": refused.kind, "message": str(refused)})
    told = as_json(answers) if arguments.json else "\n".join(a["message"] for a in answers)
    to_stdout(told)
    return code


def _dlq_retry(desk: Desk, arguments: argparse.Namespace) -> int:
    with put_back(desk) as seqs:
        return _each(arguments, lambda name: revive(desk, name, arguments.force, seqs))


def _dlq_delete(desk: Desk, arguments: argparse.Namespace) -> int:
    number = count(len(arguments.ids), "dead letter")
    if not confirmed(arguments, f"This deletes {number}: what they hold is never sent."):
        return EX_OK
    return _each(arguments, lambda name: delete_letter(desk, name))


def _dlq_retry_all(desk: Desk, arguments: argparse.Namespace) -> int:
    answer = retry_all(desk, arguments.topic, arguments.force)
    to_stdout(as_json(answer) if arguments.json else answer["message"])
    return EX_PERSON if answer["refused"] else EX_OK


DLQ: Final = {
    "list": _dlq_list,
    "show": _dlq_show,
    "retry": _dlq_retry,
    "retry-all": _dlq_retry_all,
    "delete": _dlq_delete,
}


def confirmed(arguments: argparse.Namespace, sentence: str) -> bool:
    """Destructive commands say what they will do, and want --yes; of programs at once."""
    if not arguments.yes and "json" in arguments and arguments.json:
        raise Refused("invalid", f"{sentence} To do it, add --yes.")
    if not arguments.yes:
        to_stdout(f"{sentence} To do it, add --yes.")
    return bool(arguments.yes)


REPLAY_WORDS: Final = {
    "again": "to be sent again",
    "pending": "pending already",
    "letter": "dead letters (serversync dlq retry)",
    "delivered": "recordings whose file is delivered",
    "overtaken": "overtaken by a newer entry of the same entity (--force)",
    "unknown": "so old that a newer entry may have been pruned (--force)",
}


def _replay_some(
    desk: Desk, arguments: argparse.Namespace, after: int, last: int
) -> list[tuple[Any, ...]]:
    with put_back(desk) as seqs:
        rows = desk.run(
            REPLAY, after=after, last=last, since=arguments.since, until=arguments.until,
            type=arguments.type, call=arguments.call, force=arguments.force, really=arguments.yes,
        )  # fmt: skip
        for verdict, _, _, picked in rows:
            seqs += picked if verdict == "again" and arguments.yes else []
    return rows


def do_replay(config: Config, arguments: argparse.Namespace, environ: Mapping[str, str]) -> int:
    first, last = arguments.seq or (1, 1 << 62)
    wanted = (arguments.seq, arguments.since, arguments.until, arguments.type, arguments.call)
    if not any(wanted):
        raise Refused("invalid", "say what: --seq, --since, --until, --type or --call")
    if arguments.since and arguments.until and arguments.since > arguments.until:
        raise Refused("invalid", "--since is later than --until")
    totals = dict.fromkeys(REPLAY_WORDS, 0)
    after = first - 1
    with Desk(config, "replay") as desk:
        while rows := _replay_some(desk, arguments, after, last):
            for verdict, number, highest, _ in rows:
                totals[verdict] += number
                after = max(after, highest)
    if arguments.json:
        to_stdout(as_json(totals | {"done": arguments.yes}))
        return EX_OK
    for verdict, number in totals.items():
        if number or verdict == "again":
            to_stdout(f"{number:>9} {REPLAY_WORDS[verdict]}")
    if arguments.yes:
        to_stdout("They are in the queue.")
    else:
        confirmed(arguments, "Nothing is done yet.")
    return EX_OK


def do_prune(config: Config, arguments: argparse.Namespace, environ: Mapping[str, str]) -> int:
    days = config.retention_days if arguments.days is None else arguments.days
    if not days:
        raise Refused("invalid", "SYNC_RETENTION_DAYS is 0 (keep for ever): say --days N")
    with Desk(config, "prune") as desk:
        number = desk.run(PRUNABLE, days=days)[0][0]
        what = (
            f"{count(number, 'row')} of sync_outbox, processed {count(days, 'day')} ago or earlier"
        )
        if not confirmed(arguments, f"This deletes {what}, and old receipts and resolved letters."):
            return EX_OK
        rows = receipts = resolved = 0
        while any(gone := desk.run(PRUNE, days=days)[0]):
            rows, receipts, resolved = rows + gone[0], receipts + gone[1], resolved + gone[2]
    kept = number - rows
    what = ", ".join((count(rows, "row"), count(receipts, "receipt"), count(resolved, "letter")))
    to_stdout(f"deleted {what}")
    if kept > 0:
        text = f"{count(kept, 'row')} kept: the clock is behind the last receipt, or no receipt"
        to_stdout(f"{text} says that what stands before them is old")
    return EX_OK


def do_enqueue(config: Config, arguments: argparse.Namespace, environ: Mapping[str, str]) -> int:
    payload = sys.stdin.buffer.read(config.entry_max_bytes + 1)
    if len(payload) > config.entry_max_bytes:
        raise Refused("invalid", "the payload is larger than SYNC_ENTRY_MAX_BYTES")
    with Desk(config, "enqueue") as desk:
        try:
            seq = desk.run(
                ENQUEUE,
                type=arguments.type,
                id=arguments.id,
                payload=payload.decode("utf-8"),
                key=arguments.idempotency_key,
            )[0][0]
        except psycopg.errors.UndefinedFunction:
            missing = "serversync_enqueue is not there: run: sudo serversync setup"
            raise Unavailable(missing) from None
        except UnicodeDecodeError:
            raise Refused("invalid", "the payload is not UTF-8") from None
        except psycopg.errors.UniqueViolation as error:
            raise Refused("conflict", str(error.diag.message_primary)) from None
        except (psycopg.DataError, psycopg.OperationalError) as error:
            why = error.diag.message_detail or error.diag.message_primary or error
            raise Refused("invalid", f"standard input is not a JSON payload: {why}") from None
        desk.run("notify serversync")
    to_stdout(as_json({"seq": seq}) if arguments.json else f"{seq}")
    return EX_OK


# --- settings -------------------------------------------------------------------------------------


def do_settings(config: Config, arguments: argparse.Namespace, environ: Mapping[str, str]) -> int:
    if arguments.action == "accept":
        with Desk(config, "settings") as desk:
            if not desk.run(SETTINGS_ACCEPT, section=arguments.section):
                raise Refused("conflict", f"{arguments.section} is not held back")
        if not arguments.json:
            to_stdout(f"{arguments.section} may be as small as that now; this pull, or the next:")
        arguments.dry_run = False
    if arguments.action in ("pull", "accept"):
        return _settings_pull(config, arguments, environ)
    with Desk(config, "settings") as desk:
        view = desk.run(SETTINGS_VIEW)[0][0]
    to_stdout(as_json(view) if arguments.json else _settings_screen(view))
    return EX_OK


def _settings_screen(view: Mapping[str, Any]) -> str:
    rows, remarks = [], []
    for each in view["sections"]:
        name, state = each["section"], "applied" if each["changed_at"] else "-"
        if each["held"]:
            state = f"held back: {held_text(each['items'], each['held'])}"
        state = each["error"] or state
        times = [
            f"{since(at)} ago" if at else "never" for at in (each["pulled_at"], each["changed_at"])
        ]
        rows.append([name, counted(each["items"]), each["skipped"], *times, state])
        for remark in each["remarks"]:
            what = "skipped" if remark["skipped"] else "mended"
            remarks.append([name, what, remark["item"], remark["reason"]])
    header = ["SECTION", "ITEMS", "SKIPPED", "LAST PULL", "LAST CHANGE", "STATE"]
    screen = [table(header, rows)]
    if remarks:
        screen += ["", table(["SECTION", "", "ITEM", "REASON"], remarks)]
    audio = view["audio"]
    text = f"announcement audio: {count(audio['files'], 'file')}, {audio['waiting']} to fetch"
    screen += ["", text, *(clean(f"  {n}: {why}") for n, why in audio["problems"].items())]
    return "\n".join(screen)


def _settings_pull(
    config: Config, arguments: argparse.Namespace, environ: Mapping[str, str]
) -> int:
    """By the command itself, whether an agent runs or not: what is applied is one short
    transaction, and of two pulls the one that began earlier begins anew."""
    process = Process(environ)
    process.install()
    frontend = Frontend(config, process)
    really = not arguments.dry_run
    try:
        with Desk(config, "settings") as desk:
            store = SettingsStore(desk.session)
            outcomes = pull_now(config, frontend, store, really, process)
            audio = Audio(frontend, store, config.announcements_dir)
            problems = _audio_now(audio, process) if really else iter(())
            before = dict(problems) if arguments.json else {}  # one JSON text
            to_stdout(_pull_shown(outcomes, before, arguments))
            for name, why in problems:
                to_stdout(f"{name}: {why}")
    except NotNow as why:
        raise Unavailable(f"no settings now, the last good ones stay: {why}") from None
    except Stopping:
        return EX_TEMPFAIL
    well = all(not outcome.held[0] and not outcome.error for outcome in outcomes)
    return EX_OK if well else EX_PERSON


def drive(steps: Steps[T], process: Process) -> T:
    """Drives one generator to its end, where there is nothing else to do."""
    while True:
        try:
            wait = next(steps)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        process.check()
        process.progress()
        process.wait(wait.until, [(wait.fd, wait.events)] if wait.fd >= 0 else ())


def pull_now(
    config: Config, frontend: Frontend, store: SettingsStore, really: bool, process: Process
) -> list[Outcome]:
    for _ in range(5):
        pull = Pull(config, frontend, store, {}, whole=True)
        while not drive(pull.fetch(), process):
            pass
        try:
            return pull.apply(really=really, most=1000)
        except NotNow as why:
            overtaken = why
    raise overtaken


def _audio_now(audio: Audio, process: Process) -> Iterator[tuple[str, str]]:
    """All that is due, one after the other; what the agent does meanwhile does no harm. Yields
    what is not there now, and why."""
    with contextlib.suppress(AudioTrouble):
        audio.look()
    while (file := audio.next()) is not None and file.wait <= 0:
        process.check()
        try:
            drive(audio.handle(file), process)
        except AudioTrouble as trouble:
            yield file.name, audio.failed(file, str(trouble))
        except NotNow as why:
            yield file.name, audio.failed(file, str(why))
            return


def _pull_shown(
    outcomes: Sequence[Outcome], problems: Mapping[str, str], arguments: argparse.Namespace
) -> str:
    """What was changed, or (--dry-run) would be."""
    if arguments.json:
        shown = [
            {"section": each.section.name, "items": each.section.counts, "held": each.held[0]}
            | {"skipped": each.skipped, "remarks": each.remarks, "error": each.error or None}
            | {"changes": [dict(zip(("table", "action", "count", "items"), change, strict=True))
                           for change in each.changes]}
            for each in outcomes
        ]  # fmt: skip
        audio = {"problems": problems}
        return as_json({"dry_run": arguments.dry_run, "sections": shown, "audio": audio})
    rows, notes = [], []
    for each in outcomes:
        name = each.section.name
        for where, what, number, labels_ in each.changes:
            rows += [[name, where, what, label] for label in labels_]
            if number > len(labels_):
                rows.append([name, where, what, f"and {number - len(labels_)} more"])
        if each.held[0]:
            why = held_text(each.known.counts, each.section.counts)
            notes.append(f"{name} held back: {why}; if that is meant: {accept_hint(name)}")
        if each.error:
            notes.append(f"{name} cannot be applied: {each.error}")
        if each.skipped:
            notes.append(f"{name}: {each.skipped} skipped: {remarks_text(each.remarks, 20)}")
    nothing = "nothing would change" if arguments.dry_run else "nothing to change"
    changed = table(["SECTION", "TABLE", "CHANGE", "ITEM"], rows) if rows else nothing
    return "\n".join([changed, *(clean(note, 8192) for note in notes)])


def do_metrics(config: Config, arguments: argparse.Namespace, environ: Mapping[str, str]) -> int:
    to_stdout(metrics_of(config, environ).rstrip("\n"))
    return EX_OK


def metrics_of(config: Config, environ: Mapping[str, str]) -> str:
    """What is known, also without a database: a 0 in place of a counter would be a restart."""
    view = survey(config, environ)
    counts: dict[tuple[str, str], float] = {}
    try:
        with Desk(config, "metrics") as desk:
            counts = counters(desk)
    except (Unavailable, psycopg.Error) as error:
        view["database"] = {"ok": False, "error": str(error)}
    return metrics_text(view, counts)


# --- setup ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def owner_connection(config: Config, url: str | None) -> Iterator[psycopg.Connection[Any]]:
    """Somebody who may grant: by the URL that was given; for root the superuser, by the peer
    authentication of a Unix socket; else whoever the configuration names."""
    parts = conninfo_to_dict(config.database_url)
    local = str(parts.get("host") or "/").startswith("/") and "service" not in parts
    root = url is None and local and os.geteuid() == 0
    try:
        if root:
            user = pwd.getpwnam(SUPERUSER)
            os.seteuid(user.pw_uid)
            parts = {k: v for k, v in parts.items() if k in ("host", "port", "dbname")}
            url = make_conninfo(user=SUPERUSER, **parts)  # type: ignore[arg-type]
        conn = psycopg.connect(
            url or config.database_url, autocommit=True, connect_timeout=DESK_LIMIT
        )
    except KeyError:
        raise Unavailable("there is no user postgres here: use --admin-url") from None
    except psycopg.OperationalError as error:
        raise not_there(error) from None
    finally:
        os.seteuid(os.getuid())
    with conn:
        yield conn


def setup_role(config: Config, environ: Mapping[str, str]) -> str:
    """The role that the agent will be: the URL's, or (peer authentication) its user's."""
    named = conninfo_to_dict(config.database_url).get("user")
    if named:
        return str(named)
    user = service_user(environ) if os.geteuid() == 0 else pwd.getpwuid(os.geteuid())
    if user is None:
        how = "name it in DATABASE_URL (postgresql://USER@/DATABASE), or install the unit first"
        raise ConfigError([f"as which user does the service run? {how}"])
    return user.pw_name


def outbox_schema(conn: psycopg.Connection[Any], role: str) -> tuple[str, bool]:
    """Where the backend's outbox is, and whether the role finds it there."""
    found = conn.execute(OUTBOXES, {"role": role}).fetchall()
    if not found:
        raise Unavailable(f"{conn.info.dbname} has no table sync_outbox: is it the backend's?")
    schema, named, usual = found[0]
    if len(found) > 1 and not named:
        names = ", ".join(f"{name}.sync_outbox" for name, *_ in found)
        known = conn.execute("select from pg_roles where rolname = %s", (role,)).rowcount
        make, name = "" if known else "create role {0} login; ", psycopg.sql.Identifier
        say = psycopg.sql.SQL(make + "alter role {0} in database {1} set search_path = {2};")
        choices = [say.format(name(role), name(conn.info.dbname), name(each[0])) for each in found]
        lines = [choice.as_string(conn) for choice in choices]
        raise ConfigError([f"{names}: which is the backend's? One of these, as postgres:", *lines])
    return schema, named or usual


def do_setup(config: Config, arguments: argparse.Namespace, environ: Mapping[str, str]) -> int:
    role = setup_role(config, environ)
    with owner_connection(config, arguments.admin_url) as conn:
        # A superuser's session: no name may lead to what others made in a schema of theirs, and
        # nothing is read or run here that the role owns.
        conn.execute("set search_path = pg_catalog, pg_temp")
        schema, finds = outbox_schema(conn, role)
        conn.execute("set lock_timeout = '5s'")
        try:
            for name, done, make in _setup_steps(conn, role, schema, finds):
                if not arguments.print_sql:
                    if not done:
                        conn.execute(make)
                    to_stdout(f"{'there' if done else 'made':<6} {name}")
                elif not done:
                    to_stdout(f"-- {name}\n{make.strip()};")
        except psycopg.errors.InsufficientPrivilege as error:
            how = "as root: sudo serversync setup; or with --admin-url and a superuser's URL"
            raise ConfigError([f"{error.diag.message_primary}: run it {how}"]) from None
        except psycopg.errors.LockNotAvailable as error:
            how = "a transaction in the database lasts: try again"
            raise Unavailable(f"{error.diag.message_primary}: {how}") from None
    return EX_OK if arguments.print_sql else _setup_root(config, environ)


def _setup_steps(
    conn: psycopg.Connection[Any], role: str, schema: str, finds: bool
) -> Iterator[tuple[str, bool, str]]:
    """What the agent needs in its database: the name, whether it is there, and its SQL."""
    params = {"role": role, "schema": schema, "finds": finds}
    steps = conn.execute(SETUP, params).fetchall()
    yield from (step[1:] for step in steps)
    outbox = f"{psycopg.sql.Identifier(schema).as_string(conn)}.sync_outbox"
    here = f"to_regclass({psycopg.sql.Literal(outbox).as_string(conn)})"
    for name, is_there, (make,) in OPTIONAL[1:]:
        done = conn.execute(is_there.replace(OUTBOX, here)).fetchall()[0][0]
        make = make.replace("$$", f"$x{uuid.uuid4().hex}$")  # no name may end the body
        steps = conn.execute(BESIDE.replace(OUTBOX, here), params | {"sql": make}).fetchall()
        yield name, done, f"set client_min_messages = warning;{steps[0][0]}"


def _setup_root(config: Config, environ: Mapping[str, str]) -> int:
    """The last steps, as the service's user and role: what the agent makes at its start (unless
    one runs: then it did), and the recordings' marker."""
    sys.stdout.flush()  # the log's lines come after it
    become_service_user(environ)
    process = Process(environ)
    process.install()
    recordings = Recordings(config.recordings_dir)
    with contextlib.closing(Session(config.database_url, config.device_id, process)) as session:
        session.connect()
        if session.run(TRY_LOCK, key=LOCK_KEY)[0][0]:
            session.prepare()
        known = session.run(ROOT_ID)[0][0]
        try:
            with recordings.root(known, lambda name: session.run(ADOPT_ROOT, root_id=name)):
                to_stdout(f"{'there' if known else 'made':<6} marker in {config.recordings_dir}")
        except EntryTrouble as trouble:
            to_stdout(f"failed {trouble}")
            if "denied" in str(trouble):
                to_stdout(f"       run: {setup_hint(config.recordings_dir)}")
            return EX_PERSON
    return EX_OK


def setup_hint(directory: str) -> str:
    return f"sudo serversync setup --recordings {shlex.quote(directory)}"


# --- setup: the rights on the recordings ----------------------------------------------------------

TMPFILES: Final = "/etc/tmpfiles.d/serversync.conf"
DROP_IN: Final = "/etc/systemd/system/serversync.service.d/recordings.conf"
WRITABLE: Final = "/opt/virtual-voicebot/"  # the unit's ReadWritePaths=
HOMES: Final = tuple(f"/{each}/" for each in ("home", "root"))  # ProtectHome= of the unit
# Nothing that tmpfiles.d(5) or a unit reads in another way: no blank, quote, backslash, %, $ or :.
_PLAIN: Final = re.compile(r"(?:/(?!\.\.?(?:/|$))[\w.@+,=~-]+)+", re.ASCII)
_SYSTEM: Final = re.compile(
    "(?:/home|/var)?/[^/]*|/(?:bin|boot|dev|etc|lib[^/]*|proc|run|sbin|sys|usr)/.*", re.DOTALL
)


def setup_rights(arguments: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Opens the backend's directories to the service, whatever the backend's user and umask are,
    and for what it creates later, too: by default ACLs, which systemd-tmpfiles renews at each boot.
    Needs no database and no configuration."""
    if os.geteuid() != 0:
        raise ConfigError([f"only root may give rights: {as_root()}"])
    user = service_user(environ)
    if user is None:
        raise ConfigError([f"there is no user {SERVICE_USER}: install the package first"])
    named = {"--recordings": arguments.recordings, "--announcements": arguments.announcements}
    problems, places, name = list[str](), dict[str, Place](), arguments.backend_user
    for option, path in named.items():
        try:
            places |= {option: _place(path)} if path else {}
        except ValueError as error:
            problems.append(f"{option} {path!r}: {error}")
    try:
        reader = pwd.getpwnam(name).pw_uid if name else None
    except KeyError:
        problems.append(f"--backend-user {name!r}: there is no such user")
    if problems:
        raise ConfigError(problems)
    rights = {option: _rights(option, place, user, reader) for option, place in places.items()}
    _merge(TMPFILES, rights)
    applied = _root_runs("systemd-tmpfiles", "--create", TMPFILES)
    _merge(DROP_IN, {option: _sandbox(place.path) for option, place in places.items()})
    _root_runs("systemctl", "daemon-reload")
    return max(_said(place, user, applied) for place in places.values())


@dataclass(frozen=True)
class Place:
    """A directory of the backend's as it was looked at, once: this very text is what is written."""

    path: str
    status: os.stat_result
    acls: bool
    closed: Sequence[str]  # those above it that others may not enter


def _place(path: str) -> Place:
    """Goes there from / by descriptors, and through no link. Nobody but root and its owner can put
    another one there later; and what that one puts there, systemd-tmpfiles does not follow."""
    path, above, acls = path.rstrip("/") or "/", list[tuple[str, os.stat_result]](), True
    homes = (f"{user.pw_dir}/" for user in pwd.getpwall())
    if _SYSTEM.fullmatch(path) or any(home.startswith(f"{path}/") for home in homes):
        raise ValueError("a directory of its own is needed, not a home, nor one of the system's")
    if not _PLAIN.fullmatch(path):
        raise ValueError("must be an absolute path of letters, digits and ./@+,=~-_")
    with contextlib.ExitStack() as stack:
        fd, up = stack.enter_context(held(os.open("/", _OPEN_DIR))), ""
        for name in path.split("/")[1:]:
            above.append((up, os.fstat(fd)))
            up += f"/{name}"
            try:
                fd = stack.enter_context(held(os.open(name, _OPEN_DIR, dir_fd=fd)))
            except (FileNotFoundError, NotADirectoryError) as error:
                mend = "start the backend once" if error.errno == errno.ENOENT else "is it a link?"
                raise ValueError(f"{up} is no directory: {mend} (readlink -f {up})") from None
        own = os.fstat(fd)
        try:
            os.getxattr(fd, "system.posix_acl_access")
        except OSError as error:
            acls = error.errno == errno.ENODATA
    for up, status in above:
        if status.st_uid not in (0, own.st_uid) or status.st_mode & 0o022:
            text = f"{up} (mode {status.st_mode & 0o7777:o}, user {status.st_uid}) lets others put"
            must = f"only root and its owner, user {own.st_uid}, may write there"
            raise ValueError(f"{text} another directory in its place: {must}")
    closed = [up for up, status in above if up and not status.st_mode & stat.S_IXOTH]
    return Place(path, own, acls, closed)


def _rights(option: str, place: Place, user: pwd.struct_passwd, heir: int | None) -> list[str]:
    """x on the parents that are closed to others; all, and by default, from the directory on down.
    Where there are no ACLs, by the service's group, which new directories inherit.

    Not rwX: systemd 252 ignores such a line. An x on files does no harm.
    """
    lines = [f"a+ {up} - - - - u:{user.pw_name}:x" for up in place.closed]
    if not place.acls:
        mode = 0o2770 | place.status.st_mode & 0o5
        return [*lines, f"Z {place.path} ~{mode:o} - {user.pw_gid}"]
    acl = f"u:{user.pw_name}:rwx,d:u:{user.pw_name}:rwx"
    heir = place.status.st_uid if heir is None else heir
    if option == "--announcements" and heir not in (0, user.pw_uid):
        acl += f",d:u:{heir}:rwx"  # what the agent writes there is for the backend
    return [*lines, f"A+ {place.path} - - - - {acl}"]


def _sandbox(path: str) -> Sequence[str]:
    """Nothing for what the shipped unit opens already."""
    if path.startswith(HOMES):
        return "[Service]", "ProtectHome=tmpfs", f"BindPaths=-{path}"
    return () if path.startswith(WRITABLE) else ("[Service]", f"ReadWritePaths=-{path}")


def _merge(path: str, ours: Mapping[str, Sequence[str]]) -> None:
    """Writes what these options are for, as a whole or not at all; what another one, or somebody
    else, wrote stays, byte for byte."""
    before = "# Written by serversync setup, a part for each option.\n"
    with contextlib.suppress(FileNotFoundError), open(path, encoding="latin-1") as file:
        before = file.read().rstrip("\n") + "\n"
    first, *rest = re.split(r"^# (--\w+)\n", before, flags=re.MULTILINE)
    parts = dict(zip(rest[::2], rest[1::2], strict=True))
    parts |= {option: "".join(f"{line}\n" for line in lines) for option, lines in ours.items()}
    text = first + "".join(f"# {option}\n{lines}" for option, lines in parts.items() if lines)
    if text != before:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(f"{path}.new", "w", encoding="latin-1") as new:
            os.fchmod(new.fileno(), 0o644)
            new.write(text)
        os.replace(f"{path}.new", path)
        to_stdout(f"made   {path}")


def _root_runs(*command: str) -> str:
    """What it complained about; nothing where all is well."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    return done.stderr.strip()


def cannot_delete(path: str) -> list[str]:
    """What keeps this user from deleting the recordings there."""
    us, above = os.geteuid(), os.stat(path)
    if os.statvfs(path).f_flag & os.ST_RDONLY:
        return [f"{path} is read-only here"]
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK, effective_ids=True):
        return [f"nothing can be deleted in {path}: user {us} may not write there"]
    problems = []
    with os.scandir(path) as entries:
        for entry in islice(entries, 20):
            status = entry.stat(follow_symlinks=False)
            if not stat.S_ISDIR(status.st_mode):
                continue
            sticky = above.st_mode & stat.S_ISVTX and us not in (0, above.st_uid, status.st_uid)
            if status.st_dev != above.st_dev:
                problems.append(f"{entry.name!r} is on another device than {path}")
            elif sticky and entry.name != TRASH:
                problems.append(f"{entry.name!r} cannot be moved by user {us}: {path} is sticky")
            elif not os.access(entry.path, os.R_OK | os.W_OK | os.X_OK, effective_ids=True):
                who = f"mode {status.st_mode & 0o7777:o}, owner {status.st_uid}"
                problems.append(f"{entry.name!r} ({who}) cannot be read and written by user {us}")
    return problems[:5]


def _said(place: Place, user: pwd.struct_passwd, complaint: str) -> int:
    """Whether the service's user can write here now, by trying it in a process of that user's."""
    sys.stdout.flush()  # or the child would print it once more
    child = os.fork()
    if child == 0:
        try:
            become(user)
            problems = cannot_delete(place.path)
        except OSError as error:
            problems = [f"{place.path}: {error.strerror}"]
        for problem in problems:
            to_stdout(f"failed {problem}")
        sys.stdout.flush()
        os._exit(EX_PERSON if problems else EX_OK)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != EX_OK:
        to_stdout(f"       {clean(complaint) or f'namei -l {place.path}'}")
        return EX_PERSON
    to_stdout(f"there  {user.pw_name} may write and delete in {place.path}")
    if not place.acls:
        to_stdout("       no ACLs there, so by group: the backend's unit needs UMask=0002 (README)")
    return EX_OK


# ==================================================================================================
# Doctor
# Named checks, each with a hint to paste. They leave everything as it is; none ends the others.
# ==================================================================================================

# What RIGHTS does not ask: rights that only some commands need, and tables of the backend that are
# not there (ours stand in for them). No lock.
MORE_RIGHTS: Final = """
select what, without, well is not null
from (values
    ('delete on sync_outbox', 'old rows are not pruned',
     has_table_privilege('sync_outbox', 'delete')),
    ('insert on sync_outbox', 'what was pruned cannot be retried, nothing be enqueued by hand',
     has_table_privilege('sync_outbox', 'insert')
     and has_sequence_privilege(pg_get_serial_sequence('sync_outbox', 'id'), 'usage')
         is not false),
    ('recordings', 'the backend does not see what was uploaded',
     to_regclass('recordings') is not null or null),
    ('system_settings', 'the interval is SYNC_POLL_INTERVAL_SEC',
     to_regclass('system_settings') is not null or null)) as needs (what, without, well)
where well is not true
"""
ENABLE_TRIGGER: Final = "alter table sync_outbox enable trigger serversync_wake;"
TRIGGER_WRONG: Final = f"""
select coalesce(min('failed'), 'warning'), coalesce(
    min('with each INSERT serversync_wake runs ' || tgfoid::regprocedure
        || ', which does not belong to the owner of sync_outbox'),
    'serversync_wake is not there: polling only') from pg_trigger
where tgrelid = {OUTBOX} and tgname = 'serversync_wake'
"""
ROOT_ID: Final = "select root_id from serversync.sender"
# The directories that a pending or dead recording, or an upload, has to do with. Reads all pending
# rows, as the next one does.
KNOWN_DIRECTORIES: Final = f"""
select coalesce(substring(coalesce(payload->>'filePath', payload->>'file_path')
                          from '([^/]*)/[^/]*$'), payload->>'callId', payload->>'call_id', '')
from (select payload from sync_outbox o where {PENDING_FILE} and {READABLE}
      union all
      select payload from serversync.dead_letters
      where original_topic = 'recording_file' and status <> 'RESOLVED') as named
union all select directory from serversync.uploads
"""
# Pending recordings that were waited for long enough.
OVERDUE_FILES: Final = f"""
select o.id, left(coalesce(o.payload->>'filePath', o.payload->>'file_path'), 4096),
       left(coalesce(o.payload->>'callId', o.payload->>'call_id'), 1024)
from sync_outbox o
where {PENDING_FILE} and {READABLE}
  and o.created_at < now() - %(grace)s::float8 * interval '1 second'
  and serversync.uploaded(serversync.to_uuid(coalesce(
      o.payload->>'recordingId', o.payload->>'recording_id', o.entity_id::text))) is null
"""
# Nobody but a person can decide what becomes of them.
CORRUPT_ROWS: Final = """
select outbox_id, entity_type from serversync.waiting
where code in ('ROW_CORRUPT', 'SESSION_LOST') order by outbox_id limit 9
"""
GIVE_UP: Final = "update sync_outbox set processed_at = now() where id = {};"
FAILED_DELETIONS: Final = """
select count(*) over (), outbox_id, directory, error from serversync.uploads
where error is not null order by outbox_id limit 1
"""
LAST_URL: Final = """
select url from serversync.deliveries where url is not null order by id desc limit 1
"""
# When the newest entry, and the newest recording, were enqueued. The primary key, backwards.
LAST_ENQUEUED: Final = """
select extract(epoch from (select created_at from sync_outbox order by id desc limit 1))::float8,
       extract(epoch from (select created_at from sync_outbox where entity_type = 'recording_file'
                           order by id desc limit 1))::float8,
       coalesce((select value from serversync.counters where name = 'pruned_until'), 0)
"""
LOCK_HOLDERS: Final = """
select a.* from pg_locks l join pg_stat_activity a using (pid) where l.locktype = 'advisory';
"""

DAY: Final = 86400.0
WALK_SEC: Final = 20.0  # for a look at all directories, or at all entries
EARLY: Final = " (not all were looked at)"
CONFIGURE: Final = f"sudo nano {ENV_FILE}; sudo systemctl restart serversync"
JOURNAL: Final = "serversync status; journalctl -u serversync -n 20"
CMDLINE: Final = "/boot/firmware/cmdline.txt"


@dataclass(frozen=True)
class Check:
    name: str
    status: str  # ok, warning, failed or skipped
    text: str
    hint: str = ""


Finding = tuple[str, str, str]  # status, text, hint
Findings = Generator[Finding, None, str]  # what is wrong; returns what is said when nothing was


class Skip(Exception):
    """A check that cannot be made; says why."""


def corrupt_row(row: Sequence[Any]) -> Finding:
    """(The role's tables may be anything by now: a number in a hint is one.)"""
    text = f"entry {row[0]} ({row[1]}) cannot be read, its row in sync_outbox is corrupt"
    return "failed", f"{text}: restore it, or give it up", GIVE_UP.format(int(row[0]))


class Doctor:
    """The checks, in the order in which they are made, and what they share."""

    def __init__(
        self, config: Config | ConfigError, environ: Mapping[str, str], origins: Mapping[str, str]
    ) -> None:
        self._config, self.environ, self.origins = config, environ, origins
        self._desk: Desk | None = None
        self._schema = False
        self._answer = Answer()
        self.process = Process(environ)
        self.process.install()

    def findings(self, look: Callable[[Doctor], Findings]) -> Iterator[Finding]:
        said = False
        try:
            self.process.check()
            if look is not Doctor.configuration and isinstance(self._config, ConfigError):
                raise Skip("the configuration is not usable")
            found = look(self)
            while True:
                yield next(found)
                said = True
        except StopIteration as end:
            if not said:
                yield "ok", str(end.value), ""
        except Stopping:
            raise
        except (Skip, EntryTrouble) as why:
            if not said:
                yield "skipped", str(why), ""
        except Exception as error:
            hint = "sudo serversync setup" if "setup" in str(error) else JOURNAL
            yield "failed", f"cannot be checked: {error or repr(error)}", hint

    @property
    def config(self) -> Config:
        assert isinstance(self._config, Config)
        return self._config

    @cached_property
    def view(self) -> dict[str, Any]:
        return survey(self.config, self.environ)

    @property
    def desk(self) -> Desk:
        if self._desk is None:
            raise Skip("the database is not there")
        return self._desk

    @property
    def ledger(self) -> Desk:
        if self.desk and not self._schema:
            raise Skip("the schema serversync is not there")
        return self.desk

    @property
    def answer(self) -> Answer:
        if self._answer.status is None:
            raise Skip("the frontend cannot be reached")
        return self._answer

    @contextlib.contextmanager
    def root(self) -> Iterator[int]:
        """The recordings directory. Skip or EntryTrouble: it is not the one we know."""
        known = self.ledger.run(ROOT_ID)[0][0]
        path = self.config.recordings_dir
        if known is None and os.path.isdir(path):
            if not os.access(path, os.W_OK | os.X_OK, effective_ids=True):
                text = f"{path} cannot be marked: user {os.geteuid()} may not write there"
                raise EntryTrouble(Fate.OUTAGE, "ROOT_MISSING", text)
            raise Skip(f"{path} is not marked yet: by the agent's start")
        with Recordings(path).root(known or "", lambda _: None) as root:
            yield root

    # --- configuration and database -------------------------------------------------------------

    def configuration(self) -> Findings:
        if isinstance(self._config, ConfigError):
            for problem in self._config.problems:
                yield "failed", problem, CONFIGURE
            return ""
        found: dict[str, list[str]] = {}
        for name, option in OPTIONS.items():
            value = getattr(self.config, option.name)
            if option.name == "database_url":
                parts = conninfo_to_dict(value)
                value = {k: parts[k] for k in ("host", "port", "user", "dbname") if k in parts}
            text = f"{value:.12g}" if isinstance(value, float) else str(value)
            text = "(not shown)" if value and option.name == "token" else text or "(not set)"
            found.setdefault(self.origins.get(name, "default"), []).append(f"{name} {text}")
        for origin, shown in found.items():
            yield "ok", f"from {origin}: {', '.join(shown)}", ""
        return ""

    def database(self) -> Findings:
        try:
            self._desk = Desk(self.config, "doctor")
        except Unavailable as error:
            yield "failed", str(error), "pg_lsclusters; sudo serversync setup"
            return ""
        info = self._desk.conn.info
        version = info.parameter_status("server_version")
        return f"{info.dbname} at {info.host} as {info.user}, PostgreSQL {version}"

    def rights(self) -> Findings:
        outbox, _, _, _, role, name, missing, encoding = self.desk.run(RIGHTS)[0]
        if not outbox:
            yield "failed", f"database {name} has no table sync_outbox", CONFIGURE
            return ""
        for what in missing:
            yield "failed", f"no right to {what}", f"grant {what} to {role};"
        if not self.desk.run(ENQUEUE_STATE)[0][0]:
            yield "warning", "no serversync_enqueue to enqueue by hand", "sudo serversync setup"
        for what, without, right in self.desk.run(MORE_RIGHTS):
            text = f"no {'right to' if right else 'table'} {what}: {without}"
            yield "warning", text, f"grant {what} to {role};" if right else rf"\d *.{what}"
        if encoding not in ("UTF8", "SQL_ASCII"):
            hint = "create database voicebot encoding 'UTF8' template template0;"
            yield "failed", f"the encoding of {name} is {encoding}, it must be UTF8", hint
        return f"role {role} may do all that is needed"

    def schema(self) -> Findings:
        known = self.desk.run(VERSION)[0][0] if self.desk.run(RIGHTS)[0][3] else 0
        self._schema = known > 0
        if known != SCHEMA_VERSION:
            text = f"version {known}, this program wants {SCHEMA_VERSION}"
            newer = "sudo apt install --only-upgrade serversync"
            yield "failed", text, newer if known > SCHEMA_VERSION else "sudo serversync setup"
        return f"version {known}"

    def index(self) -> Findings:
        state = self.desk.run(INDEX_STATE)
        if state != [(True,)]:
            text = "is not valid: it costs and serves nobody" if state else "is not there: slower"
            hint = f"{DROP_INDEX}; {CREATE_INDEX};"
            yield "warning", f"sync_outbox_serversync_pending {text}", hint
        return "sync_outbox_serversync_pending is valid"

    def trigger(self) -> Findings:
        state = self.desk.run(TRIGGER_STATE)
        if not state:
            status, text = self.desk.run(TRIGGER_WRONG)[0]
            yield status, text, "sudo serversync setup"
        elif state != [(True,)]:
            yield "warning", "serversync_wake is disabled: polling only", ENABLE_TRIGGER
        return "serversync_wake is enabled"

    def notify(self) -> Findings:
        """A round trip between two sessions: a pooler between us and them would keep it."""
        word, heard, until = uuid.uuid4().hex, list[str](), time.monotonic() + 2.0
        self.desk.conn.add_notify_handler(lambda notify: heard.append(notify.payload))
        self.desk.run("listen serversync_doctor")
        with Desk(self.config, "doctor") as other:
            other.run("select pg_notify('serversync_doctor', %(word)s::text)", word=word)
        while word not in heard and time.monotonic() < until:
            self.desk.run("select pg_sleep(0.02)")
        if word not in heard:
            text = "a NOTIFY does not arrive within 2 s (a pooler?): polling only"
            yield "warning", text, CONFIGURE
        if self.view["agent"]["state"] == "running" and self.view["checks"]["listening"] is False:
            yield "warning", "the agent does not listen", JOURNAL
        return "a NOTIFY arrives"

    # --- the frontend ---------------------------------------------------------------------------

    def frontend(self) -> Findings:
        """By a question that changes nothing; posting no entries rewrites the frontend's store."""
        url = f"{self.config.frontend_base_url}/api/number-groups"
        asked = get(Frontend(self.config, self.process), "/api/number-groups")
        self._answer = answer = drive(asked, self.process)
        well = isinstance(answer.said, dict) and answer.said.get("ok") is True
        long = answer.status == 200 and not answer.complete and answer.body[:1] == b"{"
        if not well and not long and answer.status not in (401, 403):
            hint = f"curl -sSi {shlex.quote(url)}; timedatectl"
            # Entries arrive: then it is there, and only the pages of its settings are not.
            sent = (self.view["deliveries"] or {}).get("last_success_at")
            there = answer.status == 404 and self.gets_through and sent
            yield "warning" if there else "failed", f"{url}: {classify(answer).reason}", hint
        return f"{url} answered HTTP {answer.status} in {answer.duration:.2f} s"

    @property
    def gets_through(self) -> bool:
        return self.view["agent"]["state"] == "running" and not self.view["outages"]

    def token(self) -> Findings:
        if self.answer.status in (401, 403) and not self.config.token and self.gets_through:
            raise Skip("the service has one of its own (a systemd credential), and gets through")
        if self.answer.status in (401, 403):
            text = "none is set here (a systemd credential is seen by the service alone)"
            text = "the frontend does not accept ours" if self.config.token else text
            yield "failed", f"HTTP {self.answer.status}: {text}", CONFIGURE
        if self.answer.status != 200:
            raise Skip("the frontend does not say")
        return "accepted" if self.config.token else "none is set, and none is wanted"

    def certificate(self) -> Findings:
        url = parse_url(self.config.frontend_base_url)
        host, port, limit = (url.host or "").strip("[]"), url.port or 443, self.config.timeout_sec
        if url.scheme != "https":
            if self.config.token and not is_loopback(host):
                text = "without TLS everybody on the way can read the token"
                yield "warning", text, f"curl -I https://{host}/"
            raise Skip("the frontend's URL begins with http:")
        with (
            self.process.deadline(limit if self.answer else 0, None),
            socket.create_connection((host, port), limit) as plain,
            tls_context(self.config).wrap_socket(plain, server_hostname=host) as tls,
        ):
            until = str((tls.getpeercert() or {})["notAfter"])
        days = int((ssl.cert_time_to_seconds(until) - time.time()) / DAY)
        if days < 14:
            ask = f"openssl s_client -connect {shlex.quote(host)}:{port} </dev/null"
            text = f"the frontend's certificate ends in {count(days, 'day')}"
            yield "warning", text, f"{ask} | openssl x509 -noout -dates"
        return f"good for {count(days, 'day')}"

    def clock(self) -> Findings:
        try:
            off = (
                time.time() - parsedate_to_datetime(self.answer.headers.get("date", "")).timestamp()
            )
        except ValueError:
            raise Skip("the frontend's answer has no date") from None
        text = f"{abs(off):.0f} s {'ahead of' if off > 0 else 'behind'} the frontend's"
        severe = abs(off) > 300 and self.config.frontend_base_url.startswith("https")
        if abs(off) > 30:
            hint = "timedatectl; sudo timedatectl set-ntp true"
            yield "failed" if severe else "warning", text, hint
        return text

    # --- recordings -----------------------------------------------------------------------------

    def recordings(self) -> Findings:
        path = shlex.quote(self.config.recordings_dir)
        whose = f"as user {os.geteuid()} sees it here; the service may see it otherwise"
        try:
            with self.root():
                problems = cannot_delete(self.config.recordings_dir)
        except EntryTrouble as trouble:
            look = f"findmnt -T {path}; ls -la {path}"
            rights = setup_hint(self.config.recordings_dir)
            yield "failed", str(trouble), rights if "may not" in str(trouble) else look
            return ""
        for problem in problems:
            hint = f"findmnt -T {path}; systemctl show serversync -p ReadWritePaths"
            if re.search("denied|by user|may not", problem):
                sticky = f"sudo chmod -t {path}; " if "sticky" in problem else ""
                hint = f"{sticky}{setup_hint(self.config.recordings_dir)}"
            yield "failed", f"{problem} ({whose})", hint
        return f"{self.config.recordings_dir} is the right one and deletable, {whose}"

    @cached_property
    def known(self) -> Sieve:
        """Directories that entries know of. Asked once: there may be many."""
        return Sieve(name for (name,) in self.ledger.pages(KNOWN_DIRECTORIES))

    def orphans(self) -> Findings:
        number, size, names, now = 0, 0, list[str](), time.time()
        until = time.monotonic() + WALK_SEC
        with self.root() as root:
            for name, changed in calls_on_disk(root):
                if now - changed > DAY and name not in self.known:
                    with contextlib.suppress(FileNotFoundError):  # deleted while we look
                        size += bytes_in(os.path.join(self.config.recordings_dir, name))
                        number += 1
                        names += [name] if number <= 3 else []
                if time.monotonic() > until:
                    break
        early = EARLY if time.monotonic() > until else ""
        if number:
            text = f"{count(number, 'directory', 'directories')} ({human(size)}) no entry knows of"
            hint = f"cd {shlex.quote(self.config.recordings_dir)} && ls -la -- {shlex.join(names)}"
            yield "warning", f"{text}, older than a day{early}: {', '.join(names)}", hint
        return f"none is older than a day{early}"

    def missing_files(self) -> Findings:
        number, seqs, until = 0, list[int](), time.monotonic() + WALK_SEC
        with self.root() as root:
            for seq, path, call in self.ledger.pages(
                OVERDUE_FILES, grace=self.config.file_grace_sec
            ):
                if self._is_gone(root, path, call):
                    number += 1
                    seqs += [seq] if number <= 3 else []
                if time.monotonic() > until:
                    break
        early = EARLY if time.monotonic() > until else ""
        if number:
            text = f"{count(number, 'pending recording')} without a file on disk{early}: {seqs}"
            yield "warning", text, f"select * from sync_outbox where id = any (array{seqs});"
        return f"each pending recording has its file{early}"

    def _is_gone(self, root: int, path: str | None, call: str | None) -> bool:
        try:
            where = "/".join(locate(path, call, self.config.recordings_dir))
            os.stat(where, dir_fd=root, follow_symlinks=False)
        except (EntryTrouble, OSError) as error:
            return isinstance(error, FileNotFoundError)
        return False

    def deletions(self) -> Findings:
        for number, seq, directory, error in self.ledger.run(FAILED_DELETIONS):
            where = shlex.quote(os.path.join(self.config.recordings_dir, directory))
            text = f"{count(number, 'uploaded recording')} cannot be deleted: {seq}: {error}"
            yield "failed", text, f"namei -l {where}; ls -la {where}"
        return "none fails"

    def disk(self) -> Findings:
        path, disk = self.config.recordings_dir, self.view["recordings"]
        if not disk["disk_total"]:
            raise Skip(f"nothing is known of the disk of {path}")
        part = disk["disk_free"] / disk["disk_total"]
        text = f"{human(disk['disk_free'])} ({100 * part:.0f} %) are free"
        if part < 0.15:
            hint = f"df -h {shlex.quote(path)}; serversync status"
            yield "failed" if part < 0.05 else "warning", text, hint
        return text

    def arrivals(self) -> Findings:
        """Recordings of the last hour do not count: their calls may be going on. Nor do those that
        an entry knows, nor what is older than what was pruned."""
        least = time.time() - 3600
        *enqueued, pruned = self.ledger.run(LAST_ENQUEUED)[0]
        for what, at in zip(("entry", "recording_file"), enqueued, strict=True):
            since = max(at or 0.0, pruned) + 6 * 3600
            with self.root() as root:
                names = (name for name, _ in calls_on_disk(root))
                late = (name for name in names if since < audio_time(root, name) < least)
                unknown = any(name not in self.known for name in late)
            if unknown:
                text = f"recordings on disk are hours newer than the newest {what} of the outbox"
                hint = "select entity_type, max(created_at) from sync_outbox group by 1;"
                yield "warning", f"{text}: does the backend write it?", hint
        return "what is recorded is enqueued"

    def file_urls(self) -> Findings:
        ours = parse_url(self.config.frontend_base_url).host or ""
        for (url,) in self.ledger.run(LAST_URL):
            host = parse_url(url).host or ""
            inner = is_loopback(host) or not re.search(r"[.:]", host)
            if inner and host != ours and not is_loopback(ours):
                text = f"the frontend says {url}: only the frontend itself can reach {host}"
                yield "warning", text, f"curl -sSI {shlex.quote(mask(url))}  # as its users would"
        return "the last one can be reached from outside, or there is none"

    def settings(self) -> Findings:
        view, directory = self.view["settings"], self.config.announcements_dir
        if not self.config.frontend_sync_interval_sec:
            raise Skip("FRONTEND_SYNC_INTERVAL_SEC is 0: they are not pulled")
        for why in SettingsStore(self.ledger.session).missing().values():
            rights = "sudo serversync setup" if "setup" in why else r"\d"
            yield "warning", f"{why.partition(': run')[0]}: it stays as it is", rights
        if not os.access(directory, os.W_OK | os.X_OK, effective_ids=True):
            text = f"user {os.geteuid()} cannot write announcements' audio to {directory}"
            hint = f"sudo serversync setup --announcements {shlex.quote(directory)}"
            yield "warning", text, hint
        for each in view["sections"]:
            name = each["section"]
            if each["held"]:
                text = f"{name} is held back: {held_text(each['items'], each['held'])}"
                yield "failed", text, f"serversync settings; {accept_hint(name)}"
            if each["error"]:
                text = f"{name} cannot be applied: {each['error']}"
                yield "warning", text, "serversync settings pull --dry-run"
            if each["skipped"]:
                text = f"{name}: {count(each['skipped'], 'item')} skipped: "
                yield "warning", text + remarks_text(each["remarks"]), "serversync settings"
        for name, why in ((view["audio"] or {}).get("problems") or {}).items():
            yield "warning", f"announcement audio {name}: {why}", "serversync settings"
        if view["trouble"]:
            text = f"none since {view['trouble']['since']}: {view['trouble']['reason']}"
            yield "failed", text, "serversync settings pull --dry-run"
        pulled = max((str(each["pulled_at"] or "") for each in view["sections"]), default="")
        return f"last pull {since(pulled)} ago" if pulled else "none were pulled yet"

    # --- the agent and its machine --------------------------------------------------------------

    def agent(self) -> Findings:
        agent = self.view["agent"]
        if agent["state"] == "stopped":
            yield "failed", "no agent runs", f"sudo systemctl start serversync; {JOURNAL}"
        elif agent["state"] == "standby":
            yield "warning", "a standby: another agent holds the lock", LOCK_HOLDERS
        elif agent["state"] == "elsewhere":
            yield "warning", "none is seen here, but another session holds the lock", LOCK_HOLDERS
        return f"running since {agent['since']}: {agent['sentence']}"

    def unit(self) -> Findings:
        keys = ("UnitFileState", "ActiveState", "WatchdogUSec", "NRestarts", "Result")
        unit = unit_properties("LoadState", *keys)
        if not unit:
            raise Skip("there is no systemd here")
        if unit["LoadState"] == "not-found":
            raise Skip("there is no serversync.service")
        if not unit["UnitFileState"].startswith("enabled"):
            yield "warning", "it does not start at boot", "sudo systemctl enable serversync"
        if unit["ActiveState"] != "active":
            text = f"{unit['ActiveState']}: {unit['Result']}"
            yield "failed", text, f"sudo systemctl start serversync; {JOURNAL}"
        if unit["WatchdogUSec"] in ("0", "infinity"):
            text = "its watchdog is off, by WatchdogSec= in a drop-in"
            yield "warning", text, "systemctl cat serversync"
        if unit["NRestarts"] != "0":
            yield "warning", f"systemd restarted it {unit['NRestarts']} times", JOURNAL
        return "enabled, active, watched"

    def memory_cgroup(self) -> Findings:
        text = ""
        for path in ("/sys/fs/cgroup/cgroup.controllers", "/proc/cgroups"):
            with contextlib.suppress(OSError), open(path, encoding="ascii") as file:
                text += file.read()
        if not re.search(r"\bmemory\b(?!\s+\d+\s+\d+\s+0$)", text, re.M):
            hint = f"sudo sed -i '1{{/cgroup_enable=memory/!s/$/ cgroup_enable=memory/}}' {CMDLINE}"
            text = (
                "the kernel has none, and MemoryMax= does nothing; with this, from the next boot on"
            )
            yield "warning", text, hint
        return "the kernel has it"

    def outage(self) -> Findings:
        if self.view["agent"]["state"] != "running":
            raise Skip("no running agent is seen here")
        for outage in outages_of(self.view):
            text = f"{outage['endpoint']}, since {outage['since']}: {outage['reason']}"
            yield "failed", text, JOURNAL
        return "none"

    def backlog(self) -> Findings:
        outbox = self.view["outbox"]
        if outbox is None:
            raise Skip("the database is not there, or not set up")
        text = f"{outbox['pending']} pending"
        if outbox["oldest_seconds"] > 3600:
            text += f", the oldest for {outbox['oldest_seconds'] / 3600:.1f} h"
            yield "warning", f"{text}: {outbox['reasons'] or 'no failures'}", "serversync status"
        return text

    def corrupt_rows(self) -> Findings:
        yield from map(corrupt_row, self.ledger.run(CORRUPT_ROWS))
        return "none"

    def dead_letters(self) -> Findings:
        letters = self.view["dead_letters"]
        if letters is None:
            raise Skip("the database is not there, or not set up")
        number = letters["PENDING"] + letters["DEAD"]
        if number:
            yield "warning", f"{count(number, 'entry', 'entries')} given up", "serversync dlq list"
        return "none"


CHECKS: Final = (
    Doctor.configuration, Doctor.database, Doctor.rights, Doctor.schema, Doctor.index,
    Doctor.trigger, Doctor.notify, Doctor.frontend, Doctor.token, Doctor.certificate, Doctor.clock,
    Doctor.recordings, Doctor.orphans, Doctor.missing_files, Doctor.deletions, Doctor.disk,
    Doctor.arrivals, Doctor.file_urls, Doctor.settings, Doctor.agent, Doctor.unit,
    Doctor.memory_cgroup, Doctor.outage, Doctor.backlog, Doctor.corrupt_rows,
    Doctor.dead_letters,
)  # fmt: skip


def is_loopback(host: str) -> bool:
    return bool(re.fullmatch(r"localhost|127\..*|\[?::1\]?|0\.0\.0\.0", host))


class Sieve:
    """Which names were added, in one megabyte however many they are (bits of a hash, after Bloom).
    With 200,000 in it, one of 3000 others is taken for one of them."""

    def __init__(self, names: Iterable[str]) -> None:
        self._bits = bytearray(1 << 20)
        for name in names:
            for at, bit in self._places(name):
                self._bits[at] |= bit

    @staticmethod
    def _places(name: str) -> list[tuple[int, int]]:
        number = hash(name)
        return [(number >> n & 0xFFFFF, 1 << (number >> n + 20 & 7)) for n in (0, 20, 40)]

    def __contains__(self, name: str) -> bool:
        return all(self._bits[at] & bit for at, bit in self._places(name))


def bytes_in(path: str) -> int:
    """The bytes of a call's files; FileNotFoundError if it is gone."""
    with contextlib.suppress(PermissionError):
        return size_of(path, float("inf"), 1) or 0
    return 0


def calls_on_disk(root: int) -> Iterator[tuple[str, float]]:
    """The directories of calls and their mtimes, one at a time: there may be 100,000."""
    with os.scandir(root) as entries:
        for entry in entries:
            if not entry.name.startswith(".serversync") and entry.is_dir(follow_symlinks=False):
                with contextlib.suppress(FileNotFoundError):  # deleted while we look
                    yield entry.name, entry.stat(follow_symlinks=False).st_mtime


def audio_time(root: int, name: str) -> float:
    """When a call's audio was written. Not the directory's time: our own deletions change that."""
    for audio in ("mixed.wav", "mixed.mp3"):
        with contextlib.suppress(OSError):
            return os.stat(f"{name}/{audio}", dir_fd=root, follow_symlinks=False).st_mtime
    return 0.0


def doctor(
    config: Config | ConfigError, environ: Mapping[str, str], origins: Mapping[str, str]
) -> Iterator[Check]:
    if isinstance(config, Config):
        configure_logging(config)
    made = Doctor(config, environ, origins)
    for look in CHECKS:
        for status, text, hint in made.findings(look):
            name = look.__name__.replace("_", " ")
            # Not masked: what is pasted must stay quoted as it is.
            hint = _CONTROL.sub(" ", hint).strip()
            hint = hint.encode("utf-8", "replace").decode()
            yield Check(name, status, clean(text, 4096), hint)


def print_checks(checks: Iterable[Check], for_programs: bool) -> int:
    """As they come, and a verdict at the end; returns the exit code."""
    colours = {"ok": "good", "warning": "warn", "failed": "bad", "skipped": "dim"}
    seen = []
    for check in checks:
        seen.append(check)
        status = paint(colours[check.status], f"{check.status:<8}")
        hint = f"\n{'':<9}{check.hint}" if check.hint else ""
        if not for_programs:
            to_stdout(f"{status} {check.name}: {check.text}{hint}")
            sys.stdout.flush()
    failed, warnings = (
        len({check.name for check in seen if check.status == status})
        for status in ("failed", "warning")
    )
    said = [f"{count(failed, 'check')} failed"] if failed else []
    said += [count(warnings, "warning")] if warnings else []
    verdict = ", ".join(said) or "all is well"
    shown = {"verdict": verdict, "checks": [asdict(check) for check in seen]}
    to_stdout(as_json(shown) if for_programs else verdict)
    return EX_PERSON if failed else EX_OK


def origins_of(path: str | None, environ: Mapping[str, str]) -> dict[str, str]:
    """Where each setting that is not the default comes from."""
    found = {}
    with contextlib.suppress(ConfigError):
        found = dict.fromkeys(read_env_file(path, {}), "file")
    found |= {name: "environment" for name in OPTIONS if environ.get(name, "").strip()}
    if "SYNC_TOKEN_FILE" in found:
        found["SYNC_TOKEN"] = found["SYNC_TOKEN_FILE"]
    credential = os.path.join(environ.get("CREDENTIALS_DIRECTORY") or "/nonexistent", "token")
    with contextlib.suppress(OSError):
        if os.path.getsize(credential) > 1:
            found["SYNC_TOKEN"] = "credential"
    return found


def do_doctor(
    read: Callable[[], Config], arguments: argparse.Namespace, environ: Mapping[str, str]
) -> int:
    config: Config | ConfigError
    become_service_user(environ)  # before: it shall see what the service sees
    try:
        config = read()
    except ConfigError as error:
        config = error
    origins = origins_of(arguments.env_file, environ)
    try:
        return print_checks(doctor(config, environ, origins), arguments.json)
    except Stopping:
        return EX_TEMPFAIL


# ==================================================================================================
# The admin interface
# A process of its own: one answer a connection, a deadline on everything. One loop reads and writes
# at the pace of those who ask; four workers find the answers. Its socket is systemd's: the process
# ends when nobody asks, and the next one finds what came meanwhile.
# ==================================================================================================

ADMIN_LISTEN: Final = "/run/serversync/admin.sock"
ADMIN_IDLE: Final = 60.0
WORKERS: Final = 4
OPEN_MOST: Final = 512  # connections; others wait in the backlog until one has gone
REQUEST_SEC, ANSWER_SEC, LINGER_SEC = 5.0, 10.0, 2.0  # for all of it, not for a byte
LINGER_MAX: Final = 64 * 1024
RETRY_ALL_SEC: Final = 10.0  # a browser waits for it
HUNG_SEC: Final = 60.0  # a worker that takes longer keeps the watchdog from being fed
JOIN_SEC: Final = 25.0  # for the requests at hand, when it is to end
NO_TOKEN: Final = (
    "on TCP every request needs a token, and none is configured: set SYNC_ADMIN_TOKEN_FILE, or"
    f" listen on a Unix socket ({ADMIN_LISTEN})"
)
_REQUEST_LINE: Final = re.compile(r"([A-Z]{1,16}) (/[!-~]*) HTTP/1\.[01]")
_FIELD: Final = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([\t -~\x80-\xff]*?)[ \t]*")
_BARE_LF: Final = re.compile(rb"(?<!\r)\n")
_HOST: Final = re.compile(r"(?:\[([0-9a-f:.]+)\]|([a-z0-9._-]+))(?::[0-9]{1,5})?")
_LISTEN: Final = re.compile(r"(?:\[([0-9a-fA-F:.]+)\]|([A-Za-z0-9.-]+)):([0-9]{1,5})")
# A second one could be what another reader (a proxy) goes by.
_ONCE: Final = ("host", "content-length", "transfer-encoding", "authorization", "origin")
_ALWAYS: Final = {
    "Connection": "close",  # a second request on it could meet the idle exit
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
}


@dataclass
class Reply:
    status: int
    body: bytes
    kind: str = "application/json"
    headers: dict[str, str] = field(default_factory=dict)
    message: str = ""  # for the log, if the request was to change something

    def wire(self, with_body: bool) -> bytes:
        own = {"Content-Type": self.kind, "Content-Length": str(len(self.body))}
        headers = _ALWAYS | {"Date": formatdate(usegmt=True)} | own | self.headers
        lines = [f"HTTP/1.1 {self.status} {http.client.responses[self.status]}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        return "\r\n".join([*lines, "", ""]).encode() + (self.body if with_body else b"")


def json_reply(content: Any, status: int = 200) -> Reply:
    return Reply(status, f"{as_json(content, indent=None)}\n".encode())


class Denied(Exception):
    """A request that gets an error for its answer."""

    def __init__(self, status: int, code: str, text: str, **headers: str) -> None:
        message = clean(text, 4096)
        self.reply = json_reply({"error": {"code": code, "message": message}}, status)
        self.reply.headers = {name.replace("_", "-"): value for name, value in headers.items()}
        self.reply.message = message


def bad_request(text: str, status: int = 400) -> Denied:
    return Denied(status, "SYS_BAD_REQUEST", text)


def not_valid(text: str) -> Denied:
    return Denied(400, "SYS_DLQ_VALIDATION_ERROR", text)


@dataclass
class Request:
    method: str
    path: str
    query: str
    headers: dict[str, str]
    name: str = ""  # what stands in the path where its route has a gap

    @property
    def changes(self) -> bool:
        return self.method not in ("GET", "HEAD")

    @property
    def topic(self) -> str:
        topic = unquote_to_bytes(self.name).decode("utf-8", "replace")
        # A slash comes as %2F: the path was split before this.
        if not (len(topic) <= 30 and re.fullmatch(r"[^\ufffd]*[^./\ufffd ][^\ufffd]*", topic)):
            raise not_valid("a topic has 1 to 30 characters")
        if not topic.isprintable():
            raise not_valid("a topic has no control characters")
        return topic

    def number(self, key: str, default: int, most: int) -> int:
        try:
            text = dict(parse_qsl(self.query, True, max_num_fields=20)).get(key, str(default))
            return _whole(1, most)(text)
        except ValueError:
            raise not_valid(f"{key} must be a whole number from 1 to {most}") from None


# --- a request comes in ---------------------------------------------------------------------------

Wish = tuple[int, float]  # events of a connection, and until when; no events: for its answer


def read_head(connection: socket.socket) -> Generator[Wish, None, bytes]:
    """Up to the empty line. What follows is never read as a request."""
    data, until = b"", time.monotonic() + REQUEST_SEC
    while b"\r\n\r\n" not in data and len(data) <= HEAD_MAX:
        if _BARE_LF.search(data):
            raise bad_request("a line does not end in CR LF")
        yield select.POLLIN, until
        chunk = connection.recv(4096) if time.monotonic() < until else b""
        if not chunk and data:
            raise bad_request("the head of the request did not come in time", 408)
        if not chunk:
            raise ConnectionResetError  # a browser that connects in advance: nobody waits
        data += chunk
    head, _, _ = data.partition(b"\r\n\r\n")
    if len(head) > HEAD_MAX:
        raise bad_request("the head of the request is too large", 431)
    return head


def send(connection: socket.socket, data: bytes) -> Iterator[Wish]:
    rest, until = memoryview(data), time.monotonic() + ANSWER_SEC
    while rest:
        yield select.POLLOUT, until
        if time.monotonic() >= until:
            raise TimeoutError
        rest = rest[connection.send(rest) :]


def linger(connection: socket.socket) -> Iterator[Wish]:
    """Takes in what else was sent: a reset, for bytes left unread, would overtake our answer."""
    connection.shutdown(socket.SHUT_WR)
    size, until = 0, time.monotonic() + LINGER_SEC
    while size < LINGER_MAX and time.monotonic() < until:
        yield select.POLLIN, until
        chunk = connection.recv(4096)
        if not chunk:
            return
        size += len(chunk)


def parse_request(head: bytes) -> Request:
    """Strict: what two readers could read in two ways is no request."""
    first, *lines = head.decode("latin-1").split("\r\n")
    line = _REQUEST_LINE.fullmatch(first)
    found = [match for match in map(_FIELD.fullmatch, lines) if match]
    if not line or len(found) < len(lines):
        raise bad_request("this is no request of HTTP/1.1")
    names = [match[1].lower() for match in found]
    twice = [name for name in _ONCE if names.count(name) > 1]
    headers = dict(zip(names, (match[2] for match in found), strict=True))
    length = headers.get("content-length", "0")
    both = "content-length" in headers and "transfer-encoding" in headers
    if twice or both or not re.fullmatch(r"[0-9]{1,18}", length):
        raise bad_request("a header came twice, or the length of the body is not clear")
    path, _, query = line[2].partition("?")
    return Request(line[1], path, query, headers)


def own_address(connection: socket.socket) -> str:
    """The address of ours that the peer came to; of a Unix socket: empty."""
    if connection.family == socket.AF_UNIX:
        return ""
    address = ipaddress.ip_address(connection.getsockname()[0].partition("%")[0])
    return str(getattr(address, "ipv4_mapped", None) or address)


def peer_of(connection: socket.socket) -> str:
    if connection.family != socket.AF_UNIX:
        return str(connection.getpeername()[0])
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return f"uid {int.from_bytes(credentials[4:8], sys.byteorder)}"


def check_host(request: Request, address: str) -> None:
    """Against DNS rebinding: a stranger's name that leads here is not ours."""
    if "host" not in request.headers:
        raise bad_request("the header Host is missing")
    match = _HOST.fullmatch(request.headers["host"].lower())
    mine = socket.gethostname().lower()
    ours = {"localhost", "127.0.0.1", "::1", address, mine, f"{mine}.local"}
    if not match or (match[1] or match[2]) not in ours:
        raise bad_request(f"ask for localhost, {mine} or an address of this machine's", 421)


def check_intent(request: Request) -> None:
    """Against forms on other sites: none of them can send this header, or our Origin."""
    if "x-requested-with" not in request.headers:
        raise Denied(403, "SYS_FORBIDDEN", "the header X-Requested-With is missing")
    _, _, origin = request.headers.get("origin", "").lower().partition("://")
    if "origin" in request.headers and origin != request.headers["host"].lower():
        raise Denied(403, "SYS_FORBIDDEN", "the request comes from another site")


def admin_token(config: Config) -> str:
    return read_text(config.admin_token_file, "SYNC_ADMIN_TOKEN_FILE: ").strip()


def check_token(request: Request, token: str) -> None:
    """As a bearer token, or, for browsers, as the password of any user."""
    if not token:
        raise Denied(503, "SYS_CONFIG", NO_TOKEN)
    scheme, _, text = request.headers.get("authorization", "").partition(" ")
    given = text.strip() if scheme.lower() == "bearer" else ""
    if scheme.lower() == "basic":
        with contextlib.suppress(ValueError):
            given = base64.b64decode(text).decode("latin-1").partition(":")[2]
    if not hmac.compare_digest(given.encode(), token.encode()):
        text, realm = "the token is missing or wrong", 'Basic realm="serversync"'
        raise Denied(401, "SYS_UNAUTHORIZED", text, WWW_Authenticate=realm)


# --- what is answered -----------------------------------------------------------------------------

Handler = Callable[[Config, Mapping[str, str], Request], Reply]


def _page(_config: Config, _environ: Mapping[str, str], _request: Request) -> Reply:
    """The page and its policy: its own style and script run, by their hashes, and nothing else."""
    rules = ["default-src 'none'", "connect-src 'self'", "img-src data:", "base-uri 'none'"]
    rules += ["form-action 'none'", "frame-ancestors 'none'"]
    for tag, content in re.findall(r"<(style|script)>(.*?)</\1>", PAGE, re.S):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        rules.append(f"{tag}-src 'sha256-{digest}'")
    policy = {"Content-Security-Policy": "; ".join(rules)}
    return Reply(200, PAGE.encode(), "text/html; charset=utf-8", policy)


def _health(_config: Config, _environ: Mapping[str, str], _request: Request) -> Reply:
    return json_reply({"status": "ok"})


def _status(config: Config, environ: Mapping[str, str], _request: Request) -> Reply:
    return json_reply(without_secrets(survey(config, environ)))


def _ready(config: Config, environ: Mapping[str, str], _request: Request) -> Reply:
    view = without_secrets(survey(config, environ))
    state = view["agent"]["state"]
    reasons = [] if state in ("running", "standby") else [f"the agent is {state}"]
    if not view["database"]["ok"]:
        reasons.append(f"the database: {view['database']['error']}")
    reasons += [f"outage ({outage['endpoint']}): {outage['reason']}" for outage in view["outages"]]
    return json_reply({"ready": not reasons, "reasons": reasons}, 503 if reasons else 200)


def _metrics(config: Config, environ: Mapping[str, str], _request: Request) -> Reply:
    text = metrics_of(config, environ)
    return Reply(200, text.encode("utf-8", "replace"), "text/plain; version=0.0.4; charset=utf-8")


def _letters(desk: Desk, request: Request) -> Any:
    page, size = request.number("page", 1, 10**9), request.number("page_size", 20, 100)
    return letters(desk, request.topic, page, size)


def _at_desk(work: Callable[[Desk, Request], Any]) -> Handler:
    def handler(config: Config, _environ: Mapping[str, str], request: Request) -> Reply:
        with Desk(config, "admin") as desk:
            content = work(desk, request)
        return replace(json_reply(content), message=content["message"] if request.changes else "")

    return handler


# The first path that matches: messages/… comes before {topic}/….
ROUTES: Final[dict[str, dict[str, Handler]]] = {
    r"/": {"GET": _page},
    r"/healthz": {"GET": _health},
    r"/readyz": {"GET": _ready},
    r"/metrics": {"GET": _metrics},
    r"/api/v1/status": {"GET": _status},
    r"/api/v1/history": {"GET": _at_desk(lambda desk, _: history(desk))},
    r"/api/v1/dlq": {"GET": _at_desk(lambda desk, _: {"topics": topics(desk)})},
    r"/api/v1/dlq/messages/([^/]+)": {
        "GET": _at_desk(lambda desk, request: letter(desk, request.name)),
        "DELETE": _at_desk(lambda desk, request: delete_letter(desk, request.name)),
    },
    r"/api/v1/dlq/messages/([^/]+)/retry": {
        "POST": _at_desk(lambda desk, request: retry_letter(desk, request.name, force=False))
    },
    r"/api/v1/dlq/([^/]+)/retry-all": {
        "POST": _at_desk(lambda desk, request: retry_all(desk, request.topic, False, RETRY_ALL_SEC))
    },
    r"/api/v1/dlq/([^/]+)": {"GET": _at_desk(_letters)},
}
REFUSALS: Final = {
    "not_found": (404, "SYS_DLQ_NOT_FOUND"),
    "invalid": (400, "SYS_DLQ_VALIDATION_ERROR"),
    "conflict": (409, "SYS_DLQ_CONFLICT"),
}


def route(request: Request) -> Handler:
    for pattern, methods in ROUTES.items():
        match = re.fullmatch(pattern, request.path)
        if match is None:
            continue
        request.name = match[1] if match.groups() else ""
        handler = methods.get("GET" if request.method == "HEAD" else request.method)
        if handler is not None:
            return handler
        allowed = ", ".join([*methods, "HEAD"] if "GET" in methods else methods)
        raise Denied(405, "SYS_METHOD_NOT_ALLOWED", f"allowed here: {allowed}", Allow=allowed)
    raise Denied(404, "SYS_NOT_FOUND", "there is nothing at this address")


def not_configured(request: Request, problems: Sequence[str], trusted: bool) -> Reply:
    """The reasons; not on TCP: whether they know the token there cannot be told now."""
    reasons = problems if trusted else ["the reasons are in the journal, and on a Unix socket"]
    if request.path != "/":
        return Denied(503, "SYS_CONFIG", "; ".join(reasons)).reply
    lines = ["serversync is not configured:", "", *(f"- {reason}" for reason in reasons), ""]
    text = clean("\n".join(lines), 65536, lines=True)
    return Reply(503, text.encode(), "text/plain; charset=utf-8")


class Admin:
    """The loop, and what the workers share: the configuration, and since when each is at work."""

    def __init__(
        self,
        reader: Callable[[], Config],
        environ: Mapping[str, str],
        listeners: Sequence[socket.socket],
    ) -> None:
        self.reader, self.environ, self.listeners = reader, environ, listeners
        self._reading = threading.Lock()
        self._read: Config | ConfigError = ConfigError([])
        self._read_at = float("-inf")
        self._repeats = Repeats()
        self._visits: dict[socket.socket, tuple[Iterator[Wish], int, float]] = {}
        self._used = time.monotonic()
        self._workers = ThreadPoolExecutor(WORKERS)
        self._busy: dict[int, float] = {}  # since when a worker has had its request
        self._answered = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def config(self) -> Config:
        """As it is on the disk, at most a second old: once repaired, it needs no restart."""
        with self._reading:
            if time.monotonic() - self._read_at > 1:
                try:
                    self._read = self.reader()
                    configure_logging(self._read)
                    if self._repeats.over("config"):
                        say(logging.INFO, "configured", "the configuration is good now")
                except ConfigError as error:
                    self._read = error
                    text = f"not configured: {error}"
                    self._repeats.say("config", text, logging.ERROR, "bad_configuration", text)
                self._read_at = time.monotonic()
            if isinstance(self._read, ConfigError):
                raise ConfigError(self._read.problems)
            return self._read

    # --- the loop -------------------------------------------------------------------------------

    def serve(self, process: Process, idle: float) -> None:
        """Until a signal, or until nobody has asked for so long; what is at hand is finished. Who
        comes a moment later waits in the backlog of systemd's socket, for the next process."""
        while self._visits or time.monotonic() < self._used + idle:
            self._turn(process, self._used + idle)
            if process.stop_at < float("inf"):
                break
        daemon.notify("STOPPING=1")
        self.listeners = []
        while self._visits and time.monotonic() < process.stop_at + JOIN_SEC:
            self._turn(process, 0.0)
        self._workers.shutdown(wait=False, cancel_futures=True)

    def _turn(self, process: Process, until: float) -> None:
        """Waits for all connections at once, and goes on with those whose time has come."""
        doors = self.listeners if len(self._visits) < OPEN_MOST else []
        waits = [(each.fileno(), events) for each, (_, events, _) in self._visits.items() if events]
        waits += [(fd, select.POLLIN) for fd in (self._answered, *map(socket.socket.fileno, doors))]
        ready = process.wait(min([due for _, _, due in self._visits.values()] or [until]), waits)
        if all(time.monotonic() - since < HUNG_SEC for since in [*self._busy.values()]):
            process.progress()
        if self._answered in ready:
            os.eventfd_read(self._answered)
        for connection, (turns, events, due) in [*self._visits.items()]:
            if not events or connection.fileno() in ready or time.monotonic() >= due:
                self._go_on(connection, turns)
        for listener in doors:
            with contextlib.suppress(OSError):  # nobody is there, or not any more
                connection, _ = listener.accept()
                connection.setblocking(False)
                self._go_on(connection, self._converse(connection))

    def _go_on(self, connection: socket.socket, turns: Iterator[Wish]) -> None:
        try:
            self._visits[connection] = (turns, *next(turns))
            return
        except (StopIteration, OSError):
            pass
        except Exception as error:  # MemoryError, say: the next request finds us here
            say(logging.ERROR, "admin_failed", f"a request ended in {error!r}")
        self._visits.pop(connection, None)
        connection.close()
        self._used = time.monotonic()

    def _converse(self, connection: socket.socket) -> Iterator[Wish]:
        """One request, one answer."""
        request, peer = None, peer_of(connection)
        try:
            request = parse_request((yield from read_head(connection)))
            answer = self._workers.submit(self._answer, request, own_address(connection))
            answer.add_done_callback(lambda _: os.eventfd_write(self._answered, 1))
            while not answer.done():
                yield 0, time.monotonic() + 1.0
            reply = answer.result()
        except Denied as denied:
            reply = denied.reply
        if request and request.changes:
            what = f"{request.method} {request.path[:200]}: {reply.status} {reply.message}"
            say(logging.INFO, "admin", f"{peer}: {what}", HTTP_STATUS=reply.status)
        yield from send(connection, reply.wire(not request or request.method != "HEAD"))
        if not request or {"content-length", "transfer-encoding"} & request.headers.keys():
            yield from linger(connection)

    # --- the workers ----------------------------------------------------------------------------

    def _answer(self, request: Request, address: str) -> Reply:
        self._busy[threading.get_ident()] = time.monotonic()
        try:
            check_host(request, address)
            config = self.config()
            if address:
                check_token(request, admin_token(config))
            handler = route(request)
            if request.changes:
                check_intent(request)
            return handler(config, self.environ, request)
        except Denied:
            raise
        except ConfigError as error:
            return not_configured(request, error.problems, trusted=not address)
        except Refused as refused:
            raise Denied(*REFUSALS[refused.kind], str(refused)) from None
        except (Unavailable, psycopg.OperationalError) as error:
            raise Denied(503, "SYS_UNAVAILABLE", str(error)) from None
        except Exception:
            say(logging.ERROR, "admin_failed", f"cannot answer {request.path[:200]}", exc_info=True)
            text = "this failed, and should not have: see the journal"
            raise Denied(500, "SYS_DLQ_INTERNAL_ERROR", text) from None
        finally:
            del self._busy[threading.get_ident()]


# --- where it listens -----------------------------------------------------------------------------


def bind_unix(path: str) -> socket.socket:
    """For its owner and group. The socket that a killed process left is replaced."""
    listener = socket.socket(socket.AF_UNIX)
    if os.path.exists(path) and stat.S_ISSOCK(os.lstat(path).st_mode):
        with socket.socket(socket.AF_UNIX) as probe:
            if probe.connect_ex(path) == errno.ECONNREFUSED:
                os.unlink(path)
    before = os.umask(0o117)
    try:
        listener.bind(path)
    finally:
        os.umask(before)
    listener.listen(1024)
    return listener


def bind_tcp(listen: str, reader: Callable[[], Config]) -> socket.socket:
    match = _LISTEN.fullmatch(listen)
    if not match or int(match[3]) > 65535:
        raise ConfigError([f"--listen {listen}: must be ADDRESS:PORT, [ADDRESS]:PORT or a path"])
    if not admin_token(reader()):
        raise ConfigError([f"--listen {listen}: {NO_TOKEN}"])
    found = socket.getaddrinfo(match[1] or match[2], int(match[3]), type=socket.SOCK_STREAM)
    family, address = found[0][0], found[0][4]
    return socket.create_server(address, family=family, backlog=1024)


def place_of(listener: socket.socket) -> str:
    if listener.family == socket.AF_UNIX:
        return str(listener.getsockname())
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"


def admin(
    config_reader: Callable[[], Config],
    listen: str | None,
    environ: Mapping[str, str],
    idle: float = ADMIN_IDLE,
) -> int:
    """Answers until SIGTERM; on systemd's socket only until nobody has asked for a minute."""
    process = Process(environ)
    process.install()
    become_service_user(environ)  # before: the directory of the socket is not root's
    where = listen or ADMIN_LISTEN
    listeners = [socket.socket(fileno=fd) for fd in daemon.listen_fds()]
    activated = bool(listeners)
    if not activated:
        try:
            listeners = [bind_unix(where) if "/" in where else bind_tcp(where, config_reader)]
        except OSError as error:
            raise ConfigError([f"--listen {where}: {error.strerror or error}"]) from None
    for listener in listeners:
        listener.setblocking(False)
    log.setLevel(logging.INFO)  # until a configuration says otherwise
    interface = Admin(config_reader, environ, listeners)
    with contextlib.suppress(ConfigError):  # it is answered, and said
        interface.config()
    names = " and ".join(map(place_of, listeners))
    say(logging.INFO, "started", f"the admin interface listens on {names}")
    daemon.notify("READY=1\nSTATUS=answering")
    interface.serve(process, idle if activated else float("inf"))
    if not activated and "/" in where:
        with contextlib.suppress(OSError):
            os.unlink(where)
    return EX_OK


# ==================================================================================================
# The status page
# One document, served as it stands; its style and its script are allowed by their hashes.
# ==================================================================================================

PAGE: Final = r"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>serversync</title>
<link rel="icon" href="data:image/svg+xml,<svg xmlns='http://www.w3.org/2000/svg'
  viewBox='0 0 16 16'><path fill='%231c5fc4' d='M8 1l6 6h-4v8H6V7H2z'/></svg>">
<style>
:root {
  color-scheme: light dark;
  --ground: #f4f6f8; --card: #fff; --edge: #d9dfe6; --track: #e4e9ef; --text: #18212b;
  --soft: #55616e; --accent: #1c5fc4; --on: #fff; --blue: #e7effc; --good: #146c3c;
  --warn: #8a4b00; --bad: #b3261e; --good-bg: #e5f5eb; --warn-bg: #fdf1de; --bad-bg: #fdeae8;
}
@media (prefers-color-scheme: dark) { :root {
  --ground: #0e1318; --card: #171e26; --edge: #2c3742; --track: #2a3540; --text: #e8edf2;
  --soft: #a3b0bd; --accent: #82b4ff; --on: #0b1624; --blue: #17293f; --good: #6fd69b;
  --warn: #f3bb66; --bad: #ff9b92; --good-bg: #14301f; --warn-bg: #35270f; --bad-bg: #3d1a17;
} }
* { box-sizing: border-box; margin: 0; padding: 0; overflow-wrap: anywhere; unicode-bidi: isolate; }
[hidden], .stack:empty, nav:empty { display: none !important; }
html { scroll-padding-block: 1rem 7rem; }
body { background: var(--ground); color: var(--text);
  font: 16px/1.5 system-ui, "Segoe UI", Roboto, "Noto Sans", sans-serif; }
h1 { font-size: 1.15rem; } h2 { font-size: 1.05rem; } h3 { font-size: 1rem; }
.wrap { max-width: 72rem; margin-inline: auto; padding-inline: 1.25rem; }
.row { display: flex; flex-wrap: wrap; align-items: center; gap: .5rem 1rem; }
.grow { flex: 1 1 14rem; min-width: 0; }
.soft { color: var(--soft); font-size: .875rem; }
header { background: var(--card); border-bottom: 1px solid var(--edge); padding-block: .75rem; }
main, .stack { display: flex; flex-direction: column; gap: 1.25rem; }
main { padding-block: 1.5rem; }
footer { padding-bottom: 2rem; }
.card { background: var(--card); border: 1px solid var(--edge); border-radius: .75rem;
  padding: 1.25rem; }
.old .card, .old.card { filter: grayscale(1); border-style: dashed; }
.hero { display: flex; gap: 1.1rem; }
.hero h2 { font-size: 1.5rem; line-height: 1.3; letter-spacing: -.015em; }
.hero div p:first-of-type { font-size: 1.05rem; }
.sign { flex: none; width: 2.75rem; height: 2.75rem; border-radius: 50%; display: grid;
  place-items: center; font: 700 1.3rem/1 sans-serif; }
.good { color: var(--good); } .warn { color: var(--warn); } .bad { color: var(--bad); }
.sign.good, .chip.good { background: var(--good-bg); }
.sign.warn, .chip.warn, .notice.warn { background: var(--warn-bg); }
.sign.bad, .chip.bad, .notice.bad { background: var(--bad-bg); }
.chip { font-size: .75rem; font-weight: 700; padding: .1rem .6rem; border-radius: 1rem; }
.chip.blue, [aria-pressed=true] { background: var(--blue) !important; color: var(--accent); }
.notice { border: 1px solid; border-left-width: .35rem; border-radius: .6rem; padding: .8rem 1rem; }
.notice p { color: var(--text); }
.tiles { display: grid; gap: 1.25rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 15rem), 1fr)); }
.tiles h3 { font-size: .95rem; color: var(--soft); }
.big { font-size: 2.1rem; font-weight: 650; line-height: 1.25; }
dl { margin-top: .75rem; border-top: 1px solid var(--edge); padding-top: .6rem; font-size: .9rem; }
dl div { display: flex; justify-content: space-between; gap: 1rem; padding-block: .1rem; }
dt { color: var(--soft); } dd { white-space: nowrap; font-variant-numeric: tabular-nums; }
dd.warn, dd.bad { font-weight: 700; }
progress, meter { appearance: none; display: block; width: 100%; height: .6rem; margin-top: .6rem;
  border: 0; border-radius: 1rem; overflow: hidden; background: var(--track); }
::-webkit-progress-bar, ::-webkit-meter-bar { background: var(--track); border: 0; height: .6rem; }
::-webkit-progress-value { background: var(--accent); transition: inline-size .4s; }
::-webkit-meter-optimum-value { background: var(--accent); }
::-webkit-meter-suboptimum-value { background: var(--bad); }
::-moz-progress-bar, ::-moz-meter-bar { background: var(--accent); }
:-moz-meter-sub-optimum::-moz-meter-bar { background: var(--bad); }
svg { display: block; width: 100%; margin-top: .75rem; }
svg text { font-size: 12px; fill: var(--soft); }
svg .name { font-weight: 600; fill: var(--text); }
.grid { stroke: var(--edge); } .bars { fill: var(--accent); } .hit { fill: #0000; }
.hit:hover { fill: var(--text); fill-opacity: .08; }
.line { fill: none; stroke: var(--warn); stroke-width: 2; stroke-linejoin: round; }
.area { fill: var(--warn); fill-opacity: .13; }
button { font: inherit; font-size: .9rem; font-weight: 550; min-height: 2.25rem; cursor: pointer;
  padding: .3rem .9rem; color: var(--text); background: var(--card); border-radius: .5rem;
  border: 1px solid var(--soft); }
button:hover { background: var(--track); }
button.main { background: var(--accent); border-color: var(--accent); color: var(--on); }
button.risk { color: var(--bad); border-color: currentColor; }
[aria-disabled=true] { color: var(--soft); border-style: dashed; cursor: default; }
[data-all] { margin-left: auto; }
:focus-visible { outline: 3px solid var(--accent); outline-offset: 2px; }
summary { cursor: pointer; width: fit-content; padding-block: .3rem; color: var(--accent);
  font-size: .9rem; align-content: center; }
pre { padding: .9rem; background: var(--ground); border: 1px solid var(--edge); overflow: auto;
  max-height: 24rem; border-radius: .5rem; white-space: pre-wrap; font-size: .8rem; }
.scroll { overflow: auto; max-height: 24rem; }
table { border-collapse: collapse; width: 100%; font-size: .85rem; }
th, td { text-align: right; padding: .25rem .4rem; border-bottom: 1px solid var(--edge);
  white-space: nowrap; }
th:first-child { text-align: left; }
#list > li { list-style: none; border-top: 1px solid var(--edge); padding-block: 1rem;
  align-items: flex-start; }
.said { position: sticky; bottom: .75rem; background: var(--card); border: 1px solid;
  font-weight: 600; border-radius: .6rem; padding: .6rem 1rem; box-shadow: 0 .4rem 1.2rem #0003; }
.said:empty { margin-top: -1.25rem; padding: 0; border: 0; box-shadow: none; }
dialog { width: min(32rem, 100vw - 2rem); margin: auto; padding: 1.5rem; border-radius: .9rem;
  border: 1px solid var(--edge); background: var(--card); color: var(--text); }
dialog::backdrop { background: #000a; }
dialog p { margin-block: .6rem 1.25rem; }
@media (max-width: 40rem) { .wrap { padding-inline: .8rem; } .card { padding: 1rem; } }
@media (pointer: coarse), (max-width: 40rem) { button, summary { min-height: 2.75rem; } }
@media (prefers-reduced-motion: reduce) { * { transition: none !important; } }
</style>
<header><div class="wrap row">
  <div class="grow"><h1>serversync</h1><p class="soft" id="who"></p></div>
  <p class="soft" id="fresh">Loading …</p><button type="button" id="refresh">Refresh</button>
</div></header>
<main class="wrap" id="main">
  <noscript><p class="notice warn">This page needs JavaScript. In a terminal: serversync status
  </noscript>
  <div id="lost" role="alert" class="stack"></div>
  <section class="card hero" id="hero" aria-labelledby="state" hidden></section>
  <div class="stack" id="notices"></div>
  <section class="card" id="progress" aria-label="Under way" hidden></section>
  <section class="tiles" id="tiles" aria-label="Figures"></section>
  <section class="card" id="day" aria-labelledby="day-title" hidden>
    <h2 id="day-title">Last 24 hours</h2>
    <div id="plot"></div>
    <details><summary>The same as a table</summary>
    <div class="scroll" tabindex="0" role="region" aria-labelledby="day-title"><table>
      <thead><tr><th scope="col">From<th scope="col">Entries<th scope="col">Recordings
        <th scope="col">Size<th scope="col">Backlog
      <tbody id="hours"></table></div></details>
  </section>
  <section class="card stack" id="dead" aria-labelledby="dead-title" hidden>
    <div><h2 id="dead-title" tabindex="-1">Dead letters</h2><p class="soft" id="dead-note"></div>
    <nav class="row" id="topics" aria-label="Topics"></nav>
    <ul id="list"></ul>
    <nav class="row" id="pages" aria-label="Pages"></nav>
    <p class="said" id="said" role="status" aria-live="polite"></p>
  </section>
</main>
<footer class="wrap soft">Refreshed every 10 s while this page is visible.</footer>
<dialog id="sure" aria-labelledby="sure-title" aria-describedby="sure-text">
  <h2 id="sure-title"></h2><p id="sure-text"></p>
  <div class="row"><button type="button" id="no">Cancel</button>
  <button type="button" id="yes" class="risk">Delete for good</button></div>
</dialog>
<script>
"use strict";
const EVERY = 10, SIZE = 10, $ = (id) => document.getElementById(id);
let latest = null, past = [], pastAt = 0, topic = null, page = 1;
let timer = 0, busy = false, again = false, working = false, hurry = 0;

// --- text and elements ---------------------------------------------------------------------------
// Whatever comes from outside becomes text; characters that could hide or turn it are shown.
const plain = (text) => String(text).replace(/(?![\n\t])[\p{Cc}\p{Cf}\p{Zl}\p{Zp}]/gu,
  (c) => "\\u" + c.codePointAt(0).toString(16).padStart(4, "0"));

function build(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes))
    if (value != null && value !== false) node.setAttribute(name, value);
  node.append(...children.flat().filter((c) => c != null && c !== false && c !== "")
    .map((c) => c instanceof Node ? c : plain(c)));
  return node;
}
const el = (tag, attributes, ...children) =>
  build(document.createElement(tag), attributes, children);
const draw = (tag, attributes, ...children) =>
  build(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
const p = (look, ...text) => el("p", {class: look}, text.filter(Boolean).join(" · "));
const button = (key, label, more) =>
  el("button", {type: "button", "data-key": key, ...more}, label);
const keyed = (host, key) => [...host.querySelectorAll("[data-key]")].find((n) =>
  n.dataset.key === key);

function put(host, ...children) {  // only what has changed: a selection and the focus stay
  const fresh = build(host.cloneNode(false), {}, children);
  if (fresh.isEqualNode(host)) return;
  const key = host.contains(document.activeElement) && document.activeElement.dataset.key;
  host.replaceChildren(...fresh.childNodes);
  if (key) keyed(host, key)?.focus();
}

const number = (n) => n == null ? "–" : Math.round(n).toLocaleString("en");
const many = (n, one, more = one + "s") => `${number(n)} ${n === 1 ? one : more}`;
function bytes(n) {
  if (n == null || n < 1000) return n == null ? "–" : `${Math.round(n)} bytes`;
  const power = Math.min(4, Math.floor(Math.log10(n) / 3));
  return `${(n / 1000 ** power).toFixed(1)} ${["", "kB", "MB", "GB", "TB"][power]}`;
}
function span(s) {
  s = Math.max(0, Math.round(s));
  if (s < 120) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min`;
  if (s < 172800) return `${Math.floor(s / 3600)} h ${Math.floor(s % 3600 / 60)} min`;
  return `${Math.floor(s / 86400)} days`;
}
const between = (from, to) => (Date.parse(to) - Date.parse(from)) / 1000;
const ago = (iso) => iso ? `${span(between(iso, latest.at))} ago` : "never";  // the server's clock
const clock = (at) => new Date(at).toLocaleTimeString("en-GB");
const minute = (at) => clock(at).slice(0, 5);
const moment = (at) => new Date(at).toLocaleDateString("en-GB", {day: "numeric", month: "short"})
  + `, ${clock(at)}`;

async function ask(path, method = "GET") {
  const headers = method === "GET" ? {} : {"X-Requested-With": "serversync"};
  const signal = AbortSignal.timeout(30000);
  const answer = await fetch("api/v1/" + path, {method, headers, signal, cache: "no-store"})
    .catch(() => { throw new Error("The server does not answer."); });
  const said = await answer.json().catch(() => null);
  if (said && answer.ok) return said;
  const words = said?.error?.message ?? `The server answered with HTTP ${answer.status}.`;
  throw Object.assign(new Error(words), {conflict: answer.status === 409});
}

// --- the state -----------------------------------------------------------------------------------
const STATES = {
  running: ["good", "✓", "Running"], standby: ["warn", "=", "Standby"],
  stopped: ["bad", "■", "Stopped"], elsewhere: ["warn", "?", "Not seen here"],
  outage: ["warn", "!", "Running, in an outage"],
};
const HINTS = {
  standby: "Another agent holds the lock; this one takes over when that one ends.",
  elsewhere: "No agent is seen on this machine, but another session holds the lock.",
  stopped: "No agent runs: nothing is sent. Start it with: systemctl start serversync",
};

function showState({agent, outages, device, version, frontend}) {
  const state = agent.state === "running" && outages?.length ? "outage" : agent.state;
  const [kind, sign, word] = STATES[state] ?? ["warn", "?", state];
  const since = agent.since && `since ${moment(agent.since)} (${ago(agent.since)})`;
  put($("who"), [device, version, `to ${frontend}`].filter(Boolean).join(" · "));
  put($("hero"), el("span", {class: `sign ${kind}`, "aria-hidden": "true"}, sign),
    el("div", {class: "grow"}, el("h2", {id: "state"}, word),
      p("", HINTS[agent.state] ?? agent.sentence),
      p("soft", since, agent.pid && `process ${agent.pid}`)));
  document.title = `${word} · ${device} · serversync`;
}

const notice = (kind, title, ...lines) =>
  el("div", {class: `notice ${kind}`}, el("h2", {}, title), lines.map((line) => p("", line)));

function showNotices({database, outages, checks, at}) {
  const boxes = outages.map((o) => notice("warn",
    `Outage: ${o.endpoint === "files" ? "recordings" : "entries"} do not get through`,
    `${o.reason} (${o.code})`, `Since ${moment(o.since)} (${span(between(o.since, at))}). Next try `
    + `in ${span(between(at, o.next_try_at))}. Nothing is lost: everything waits.`));
  if (!database.ok) boxes.unshift(notice("bad", "The database is not there", database.error,
    "The outbox, the deliveries and the dead letters cannot be shown until it is back."));
  if (checks?.listening === false) boxes.push(notice("warn", "New entries are noticed late",
    "The database does not tell the agent of them; it looks only from time to time."));
  put($("notices"), boxes);
}

function showProgress(under) {
  $("progress").hidden = !under;
  if (!under) return;
  const upload = under.kind === "upload", show = upload ? bytes : number;
  const [done, all] = upload ? [under.bytes, under.size] : [under.entries, under.total];
  const title = upload ? `Uploading a recording (entry ${under.seq})` : "Sending entries";
  put($("progress"), el("div", {class: "row"}, el("h2", {class: "grow"}, title),
    p("soft", `${show(done)} of ${show(all)}`, `${show(under.rate)}/s`,
      under.left_seconds != null && `about ${span(under.left_seconds)} left`)),
    el("progress", {max: Math.max(1, all), value: done, "aria-label": title}));
}

function tile(name, big, under, lines, ...more) {
  const row = ([title, value, kind]) =>
    el("div", {}, el("dt", {}, title), el("dd", {class: kind}, value));
  return el("section", {class: "card", "aria-label": name}, el("h3", {}, name),
    p("big", number(big)), p("soft", under), lines && el("dl", {}, lines.map(row)), more);
}

function showTiles({outbox, deliveries: sent, recordings: r, dead_letters: dead}) {
  const counts = (all) => Object.entries(all ?? {}).map(([name, n]) => [name, number(n)]);
  const flag = (n, kind) => [number(n), n > 0 && kind];
  const used = r.disk_total ? 1 - r.disk_free / r.disk_total : null;
  put($("tiles"),
    tile("Outbox", outbox?.pending, outbox?.pending === 1 ? "entry pending" : "entries pending",
      outbox && [["Oldest", outbox.oldest_at ? span(outbox.oldest_seconds) : "–"],
        ...counts(outbox.by_type), ["Waiting for a retry", ...flag(outbox.waiting, "warn")],
        ...counts(outbox.reasons)]),
    tile("Delivered", sent?.hour.entries, "entries in the last hour",
      sent && [["Last success", ago(sent.last_success_at)],
        ["Recordings", number(sent.hour.files)], ["Size", bytes(sent.hour.bytes)],
        ["Entries in a day", number(sent.day.entries)],
        ["Recordings in a day", number(sent.day.files)], ["Size in a day", bytes(sent.day.bytes)]]),
    tile("Recordings", r.waiting, "waiting for their upload",
      [["Their size", bytes(r.waiting_bytes)], ["All on the disk", bytes(r.bytes)],
        ["To be deleted", number(r.deletions_waiting)],
        ["Deletions that fail", ...flag(r.deletions_failed, "bad")],
        ["Disk free", bytes(r.disk_free), used > .9 && "bad"]],
      used != null && el("meter", {max: 1, value: used, high: .9, "aria-label": "Disk used",
        low: .89, optimum: 0})),
    tile("Dead letters", dead && dead.PENDING + dead.DEAD, "need a person",
      dead && [["Pending", ...flag(dead.PENDING, "warn")],
        ["In the queue again", number(dead.RETRYING)],
        ["Delivered after all", number(dead.RESOLVED)], ["Given up", ...flag(dead.DEAD, "bad")]]));
}

// --- the last 24 hours ---------------------------------------------------------------------------
function together(quarters, size) {
  return Array.from({length: Math.ceil(quarters.length / size)}, (_, i) => {
    const part = quarters.slice(i * size, i * size + size);
    const sum = (name) => part.reduce((all, q) => all + (q[name] ?? 0), 0);
    return {at: part[0].at, entries: sum("entries"), files: sum("files"), bytes: sum("bytes"),
      backlog: part.at(-1).backlog ?? 0};
  });
}

function showPlot() {
  const width = $("plot").clientWidth, wide = width > 600, steps = together(past, wide ? 1 : 4);
  if (!width || !steps.length) return;
  const out = [], left = 44, each = (width - left - 4) / steps.length, x = (i) => left + each * i;
  const hour = (i) => new Date(steps[i].at).getHours();
  function panel(name, field, top, height) {  // its name and its lines with numbers; its scale
    const most = Math.max(1, ...steps.map((s) => s[field]));
    const ten = 10 ** Math.floor(Math.log10(most));
    const end = [1, 2, 5, 10].map((f) => f * ten).find((n) => n >= most);
    const y = (n) => top + height - height * n / end;
    out.push(draw("text", {class: "name", y: top - 12}, name));
    for (const n of end % 2 ? [0, end] : [0, end / 2, end])
      out.push(draw("path", {class: "grid", d: `M${left} ${y(n)}H${width - 4}`}),
        draw("text", {x: left - 8, y: y(n) + 4, "text-anchor": "end"},
          n < 10000 ? number(n) : n.toLocaleString("en", {notation: "compact"})));
    return y;
  }
  const bar = panel(`Delivered entries per ${wide ? "15 min" : "hour"}`, "entries", 28, 110);
  const level = panel("Backlog (entries pending)", "backlog", 186, 64);
  const line = "M" + steps.map((s, i) => `${x(i + .5)} ${level(s.backlog)}`).join("L");
  out.push(draw("path", {class: "area", d: `${line}V250H${x(.5)}Z`}),
    draw("path", {class: "line", d: line}));
  steps.forEach((s, i) => {
    if (s.entries) out.push(draw("rect", {class: "bars", x: x(i) + .5, y: bar(s.entries),
      width: Math.max(1, each - 2), height: 138 - bar(s.entries), rx: 1.5}));
    if (i && hour(i) !== hour(i - 1) && hour(i) % (wide ? 3 : 6) === 0)
      out.push(draw("text", {x: x(i), y: 270, "text-anchor": "middle"}, `${hour(i)}:00`));
    out.push(draw("rect", {class: "hit", x: x(i), y: 20, width: each, height: 232},
      draw("title", {}, `From ${minute(s.at)}: ${number(s.entries)} delivered, `
        + `${many(s.files, "recording")}, ${number(s.backlog)} pending`)));
  });
  const total = steps.reduce((all, s) => all + s.entries, 0);
  if (!total) out.push(draw("text", {x: width / 2, y: 88, "text-anchor": "middle"},
    "Nothing was delivered."));
  put($("plot"), draw("svg", {viewBox: `0 0 ${width} 276`, role: "img", "aria-label":
    `${many(total, "entry", "entries")} delivered in the last 24 hours, `
    + `${number(steps.at(-1).backlog)} pending now`}, out));
}

async function showPast() {
  if (Date.now() - pastAt < 60000) return;
  past = await ask("history");
  pastAt = Date.now();
  $("day").hidden = false;
  showPlot();
  put($("hours"), together(past, 4).map((h) => el("tr", {}, el("th", {scope: "row"}, minute(h.at)),
    [number(h.entries), number(h.files), bytes(h.bytes), number(h.backlog)]
      .map((text) => el("td", {}, text)))));
}

// --- dead letters --------------------------------------------------------------------------------
const STATUS = {
  PENDING: ["warn", "waits for a person"], RETRYING: ["blue", "in the queue again"],
  RESOLVED: ["good", "delivered after all"], DEAD: ["bad", "given up after its retries"],
};

function card(m, before) {
  const [kind, words] = STATUS[m.status] ?? ["blue", ""], name = `entry ${m.outbox_id}`;
  const act = (what, label, look) => button(`${what} ${m.id}`, label,
    {class: look, "data-do": what, "aria-label": `${label} ${name}`});
  return el("li", {class: "row", "data-id": m.id, "data-sum": JSON.stringify(m),
    "data-name": name, "data-status": m.status},
    el("div", {class: "grow"},
      el("div", {class: "row"}, el("h3", {}, `Entry ${m.outbox_id} · ${m.error_code}`),
        el("span", {class: `chip ${kind}`}, m.status), el("span", {class: "soft"}, words)),
      p("", m.error_message),
      p("soft", moment(m.created_at), m.http_status && `HTTP ${m.http_status}`,
        many(m.attempts, "attempt"), `retried ${m.retry_count} of ${m.max_retries}`,
        `entity ${m.entity_id}`),
      m.status === "DEAD" && p("soft", `To send it: serversync dlq retry --force ${m.id}`),
      before?.querySelector("details") ?? el("details", {}, el("summary",
        {"data-key": `payload ${m.id}`, "aria-label": `Payload of ${name}`}, "Payload"))),
    m.status === "PENDING" && act("retry", "Retry", "main"),
    m.status !== "RETRYING" && act("delete", "Delete", "risk"));
}

function showLetters(messages) {
  const list = $("list"), old = [...list.children], held = document.activeElement;
  const cards = messages.map((m) => {
    const before = old.find((li) => li.dataset.id === m.id);
    if (before?.dataset.sum === JSON.stringify(m)) return before;
    const was = before && JSON.parse(before.dataset.sum);
    if (was && was.status !== m.status && m.status === "RESOLVED")
      say("good", `Entry ${m.outbox_id} is RESOLVED: it was delivered.`);
    if (m.retry_count > was?.retry_count)
      say("bad", `Entry ${m.outbox_id} is ${m.status}: it failed again.`);
    return card(m, before);
  });
  if (cards.length === old.length && cards.every((li, i) => li === old[i])) return;
  const at = old.findIndex((li) => li.contains(held)), key = held?.dataset.key;
  list.replaceChildren(...cards);
  if (at < 0) return;
  const same = cards.find((li) => li.dataset.id === old[at].dataset.id);
  const near = same ?? cards[Math.min(at, cards.length - 1)];
  (keyed(list, key) ?? near?.querySelector("[data-key]") ?? $("dead-title")).focus();
}

function showTopics(topics) {
  put($("dead-note"), topics.length ? "Entries that were given up; kept until a person decides."
    : "There are none. What the frontend refuses for good is kept here.");
  put($("topics"), topics.map((t) => button(`topic ${t.topic}`, `${t.topic} (${number(t.total)})`,
    {"data-topic": t.topic, "aria-pressed": t.topic === topic ? "true" : "false"})),
    topic != null && button("all", `Retry all of ${topic}`, {"data-all": ""}));
}

async function showDead() {
  const {topics} = await ask("dlq");
  $("dead").hidden = false;
  if (!topics.some((t) => t.topic === topic)) [topic, page] = [topics[0]?.topic, 1];
  showTopics(topics);
  const asked = topic, of = page, path = `dlq/${encodeURIComponent(asked)}`;
  const found = asked == null ? {messages: [], pagination: {total_count: 0}}
    : await ask(`${path}?page=${of}&page_size=${SIZE}`);
  if (asked !== topic || of !== page) return;
  const count = found.pagination.total_count, pages = Math.max(1, Math.ceil(count / SIZE));
  if (page > pages) [page, again] = [pages, true];
  showLetters(found.messages);
  const go = (to, label) => button(label, label,
    {"data-page": to, "aria-disabled": to < 1 || to > pages ? "true" : "false"});
  put($("pages"), pages > 1 && [go(page - 1, "Newer"), go(page + 1, "Older"),
    el("span", {class: "soft"}, `Page ${page} of ${number(pages)}, ${many(count, "letter")}`)]);
}

// --- asking and doing ----------------------------------------------------------------------------
async function refresh() {
  clearTimeout(timer);
  if (document.hidden) return;  // a request would keep the admin process running
  if (busy) return void (again = true);
  busy = true;
  again = false;
  const lost = new Set();
  try {
    latest = await ask("status");
    showState(latest);
    showNotices(latest);
    showProgress(latest.progress);
    showTiles(latest);
    $("hero").hidden = false;
    put($("fresh"), `Updated ${clock(Date.now())}`);
    if (latest.database.ok) await Promise.all([showPast(), showDead()]);
  } catch (error) {
    lost.add(error.message).add(`Asked again every ${EVERY} s. `
      + (latest ? "What you see below may be old." : ""));
  }
  put($("lost"), lost.size > 0 && notice("bad", "No news from serversync", ...lost));
  $("main").classList.toggle("old", lost.size > 0);
  for (const id of ["day", "dead"]) $(id).classList.toggle("old", !latest?.database.ok);
  busy = false;
  if (again) return refresh();
  timer = setTimeout(refresh, hurry-- > 0 ? 1000 : EVERY * 1000);
}

function say(kind, text) {
  $("said").className = `said ${kind}`;
  put($("said"), text);
}

async function act(method, path) {
  if (working) return;
  working = true;
  say("", "Working …");
  try {
    say("good", (await ask(path, method)).message);
    hurry = 10;  // the agent is at work: look more often for a while
  } catch (error) {
    say("bad", `${error.conflict ? "Not done" : "That did not work"}: ${error.message}`);
  }
  working = false;
  refresh();
}

function askFirst({id, name, status}) {
  put($("sure-title"), `Delete the letter of ${name}?`);
  put($("sure-text"), status === "RESOLVED" ? "It was delivered: only this record of it is lost."
    : `Its payload is lost: ${name} (${topic}) was not delivered, and the frontend will never get `
      + `it.${topic === "recording_file" ? " Its recording stays on the disk." : ""} `
      + "This cannot be undone.");
  $("yes").onclick = () => { $("sure").close(); act("DELETE", `dlq/messages/${id}`); };
  $("sure").showModal();
  $("no").focus();
}

async function showPayload({target: details}) {
  if (!details.open) return;
  const id = details.closest("li").dataset.id;
  const words = await ask(`dlq/messages/${id}`).then(({payload, payload_bytes: size}) =>
    payload == null && size ? `${bytes(size)} are too many to be shown here.`
      : JSON.stringify(payload, null, 2), (error) => error.message);
  details.querySelector("pre")?.remove();
  details.append(el("pre", {tabindex: 0, role: "region", "aria-label": "Payload"}, words));
}

$("refresh").onclick = () => { pastAt = 0; refresh(); };
$("no").onclick = () => $("sure").close();
$("list").addEventListener("toggle", showPayload, true);
$("list").onclick = ({target}) => {
  const {id, name, status} = target.closest("li")?.dataset ?? {};
  if (target.dataset.do === "retry") act("POST", `dlq/messages/${id}/retry`);
  if (target.dataset.do === "delete") askFirst({id, name, status});
};
$("topics").onclick = ({target: {dataset}}) => {
  if (dataset.all != null) act("POST", `dlq/${encodeURIComponent(topic)}/retry-all`);
  if (dataset.topic == null) return;
  [topic, page] = [dataset.topic, 1];
  refresh();
};
$("pages").onclick = ({target}) => {
  if (!target.dataset.page || target.getAttribute("aria-disabled") === "true") return;
  page = Number(target.dataset.page);
  refresh();
};
document.onkeydown = ({key}) => { if (key === "Escape" && !$("sure").open) say("", ""); };
$("said").onclick = () => say("", "");
document.addEventListener("visibilitychange", refresh);
new ResizeObserver(showPlot).observe($("plot"));
refresh();
</script>
</html>
"""


# ==================================================================================================
# Command line
# ==================================================================================================

Parser = argparse.ArgumentParser


def _sequence(text: str) -> tuple[int, int]:
    """A-B, A-, -B or A."""
    match = re.fullmatch(r"(?=.*[0-9])([0-9]{0,18})(?:(-)([0-9]{0,18}))?", text)
    first = int(match[1] or 1) if match else 0
    last = int(match[3] or (1 << 62)) if match and match[2] else first
    if not match or last < first:
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is not a range of seqs such as 100-200")
    return first, last


def _moment(text: str) -> str:
    """A time; without a zone it is this machine's."""
    try:
        return datetime.fromisoformat(text).astimezone(UTC).isoformat()
    except (ValueError, OverflowError):
        words = "is not a time such as 2026-11-18 or 2026-11-18T09:30"
        raise argparse.ArgumentTypeError(f"{text!r} {words}") from None


def _uuid(text: str) -> str:
    if not _UUID.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is not a UUID")
    return text


def _of(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """A parser of the option table, for arguments."""

    def parsed(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parsed


def _up_to(most: int) -> Callable[[str], str]:
    def parsed(text: str) -> str:
        if not 0 < len(text) <= most:
            raise argparse.ArgumentTypeError(f"must have 1 to {most} characters")
        return text

    return parsed


def build_parser() -> Parser:
    rows = []
    for name, option in OPTIONS.items():
        default = option.metadata["default"]
        shown = "required" if default is None else default or "not set"
        rows.append(f"  {name:<27} {option.metadata['text']} [{shown}]")
    parser = Parser(
        prog="serversync",
        description="Drains a voicebot's outbox to its web frontend, and cleans up behind it.",
        epilog="configuration (in the environment, or in the env file):\n"
        + "\n".join(rows)
        + "\n\nexit codes: 0 done, 1 something needs a person, 2 usage, 69 database, frontend or\n"
        "agent not there, 75 not everything is through yet, 78 configuration",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"serversync {__version__}")
    parser.add_argument("--env-file", metavar="FILE", help=f"default: {ENV_FILE}, where it exists")
    add = partial(_add, parser.add_subparsers(dest="command", required=True, metavar="COMMAND"))
    add("run", "the service: deliver until stopped")
    add("once", "deliver what is due, and exit")
    status = add("status", "one screen: what it does, what waits, what is wrong", "--json")
    status.add_argument("--watch", action="store_true", help="repaint once a second")
    add("doctor", "check everything, with a hint for each problem", "--json")
    _add_setup(add("setup", "prepare the database and the recordings' directory"))
    enqueue = add("enqueue", "put an entry into the outbox; its payload comes by stdin", "--json")
    enqueue.add_argument("type", metavar="TYPE", type=_up_to(30), help="its entity type")
    enqueue.add_argument("id", metavar="UUID", type=_uuid, help="its entity's id")
    enqueue.add_argument(
        "--idempotency-key", metavar="KEY", type=_up_to(200), help="the same key: the same entry"
    )
    _add_dlq(add("dlq", "entries that were given up: look, send again, delete"))
    _add_replay(add("replay", "send again what was sent", "--json", "--force", "--yes"))
    prune = add("prune", "delete old rows that were sent", "--yes")
    prune.add_argument(
        "--days",
        metavar="N",
        type=_of(_number(0.001, 36500)),
        help="instead of SYNC_RETENTION_DAYS",
    )
    _add_settings(add("settings", "what came back from the frontend", "--json"))
    add("metrics", "print the metrics, as Prometheus reads them")
    admin = add("admin", "answer HTTP requests: status page, dead letters, metrics, health")
    where = f"ADDRESS:PORT or the path of a Unix socket; default: {ADMIN_LISTEN}"
    admin.add_argument("--listen", metavar="WHERE", help=where)
    admin.add_argument("--idle", type=float, default=ADMIN_IDLE, help=argparse.SUPPRESS)
    return parser


SHARED: Final = {
    "--json": "print JSON",
    "--yes": "do it; without this it only says what it would do",
    "--force": "also what a newer entry has overtaken, or whose retries are used up",
}


def _add(commands: Any, name: str, text: str, *shared: str) -> Parser:
    command: Parser = commands.add_parser(name, help=text, description=text)
    command.add_argument("--env-file", metavar="FILE", default=argparse.SUPPRESS)
    for each in shared:
        command.add_argument(each, action="store_true", help=SHARED[each])
    return command


def _add_setup(setup: Parser) -> None:
    setup.add_argument("--print-sql", action="store_true", help="only print what is missing")
    setup.add_argument("--admin-url", metavar="URL", help="connect so, instead of as postgres")
    setup.add_argument(
        "--recordings",
        metavar="DIR",
        help="instead, open this directory of the backend's to serversync",
    )
    setup.add_argument("--announcements", metavar="DIR", help="and this one")
    setup.add_argument(
        "--backend-user", metavar="USER", help="who reads what it puts there; default: the owner"
    )


def _add_replay(replay: Parser) -> None:
    replay.add_argument("--seq", metavar="A-B", type=_sequence, help="from seq A to seq B")
    replay.add_argument("--since", metavar="TIME", type=_moment, help="enqueued at TIME or later")
    replay.add_argument("--until", metavar="TIME", type=_moment, help="enqueued until TIME")
    replay.add_argument("--type", metavar="TYPE", help="of this entity type")
    replay.add_argument("--call", metavar="ID", help="of this call: its log's UUID, or Call-ID")


def _add_dlq(dlq: Parser) -> None:
    add = partial(_add, dlq.add_subparsers(dest="action", required=True, metavar="ACTION"))
    listing = add("list", "a page of dead letters, newest first", "--json")
    listing.add_argument("topic", metavar="TOPIC", nargs="?", help="of this entity type only")
    listing.add_argument("--page", type=_of(_whole(1, 10**9)), default=1, metavar="N")
    listing.add_argument("--page-size", type=_of(_whole(1, 1000)), default=20, metavar="N")
    show = add("show", "one dead letter, with its payload", "--json")
    show.add_argument("id", metavar="ID", type=_uuid)
    retry = add("retry", "send dead letters again, under their old seq", "--json", "--force")
    retry.add_argument("ids", metavar="ID", nargs="+", type=_uuid)
    every = add("retry-all", "send all that can be sent again", "--json", "--force")
    every.add_argument("topic", metavar="TOPIC", nargs="?", help="of this entity type only")
    delete = add("delete", "delete dead letters: they are never sent", "--json", "--yes")
    delete.add_argument("ids", metavar="ID", nargs="+", type=_uuid)


def _add_settings(settings: Parser) -> None:
    add = partial(_add, settings.add_subparsers(dest="action", metavar="ACTION"))
    pull = add("pull", "fetch and apply them now")
    pull.add_argument("--dry-run", action="store_true", help="only show what would change")
    accept = add("accept", "apply a section that was held back, because so much of it was gone")
    accept.add_argument("section", metavar="SECTION", choices=tuple(SOURCES), help="its name")
    for action in (pull, accept):  # also before the action: no default may hide it
        action.add_argument(
            "--json", action="store_true", default=argparse.SUPPRESS, help=SHARED["--json"]
        )


COMMANDS: Final[dict[str, Callable[[Config, argparse.Namespace, Mapping[str, str]], int]]] = {
    "status": do_status,
    "setup": do_setup,
    "enqueue": do_enqueue,
    "dlq": do_dlq,
    "replay": do_replay,
    "prune": do_prune,
    "settings": do_settings,
    "metrics": do_metrics,
}


def refuse(error: ConfigError) -> int:
    """Every problem on a line of its own, and a sentence for `systemctl status`."""
    for problem in error.problems:
        to_stdout(f"serversync: {clean(problem, 4096)}", sys.stderr)
    more = f" (and {len(error.problems) - 1} more)" if len(error.problems) > 1 else ""
    sentence = clean(f"not configured: {error.problems[0]}{more}")
    daemon.notify(f"STATUS={sentence}")
    return EX_CONFIG


def complain(error: Exception) -> None:
    text = clean(" ".join(str(error).split()))
    to_stdout(f"serversync: {text}", sys.stderr)


def main(argv: Sequence[str] | None = None) -> int:
    if isinstance(sys.stdout, io.TextIOWrapper):  # what its encoding lacks; of stderr it is so
        sys.stdout.reconfigure(errors="backslashreplace")
    parser = build_parser()
    arguments = parser.parse_args(argv)
    try:
        "".join(argv or sys.argv).encode()
    except UnicodeEncodeError:
        parser.error("an argument is not UTF-8 text")
    # A resolver without network must not hold up a stop: getaddrinfo cannot be interrupted.
    os.environ.setdefault("RES_OPTIONS", "timeout:2 attempts:1")
    environ = dict(os.environ)
    start_logging(environ)
    try:
        return dispatch(arguments, environ)
    except ConfigError as error:
        return refuse(error)
    except (psycopg.errors.UndefinedColumn, psycopg.errors.UndefinedFunction) as error:
        why = f"the schema serversync is of another version: {error.diag.message_primary}"
        return refuse(ConfigError([f"{why}: run: sudo serversync doctor"]))
    except (Unavailable, psycopg.Error) as error:
        complain(error)
        return EX_CONFIG if isinstance(error, Unfit) else EX_UNAVAILABLE
    except Refused as error:
        complain(error)
        return EX_USAGE if error.kind == "invalid" else EX_PERSON
    except KeyboardInterrupt:
        return 130
    except OSError as error:  # of `serversync dlq list | head`, or of a full disk behind `> file`
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  nothing more can be said
        if isinstance(error, BrokenPipeError):
            return EX_OK
        complain(error)
        return EX_PERSON
    finally:
        try:
            if sys.stderr:  # closed at the start: None
                sys.stderr.flush()
        except OSError:
            sys.stderr = open(os.devnull, "w")  # noqa: SIM115  a full disk is no exit code (120)


def dispatch(arguments: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """The service, one round of it, or a command of a person's (who then acts as the service)."""

    def read() -> Config:
        try:
            return load_config(read_env_file(arguments.env_file, environ), environ)
        except ConfigError as error:
            if isinstance(error.__context__, PermissionError):  # of the file; root may read it
                raise ConfigError([f"{error}: run: {as_root()}"]) from None
            raise

    if arguments.command == "admin":  # a bad configuration is answered, and ends nothing
        return admin(read, arguments.listen, environ, arguments.idle)
    if arguments.command == "doctor":
        return do_doctor(read, arguments, environ)
    if arguments.command == "setup" and (arguments.recordings or arguments.announcements):
        if arguments.print_sql:
            raise Refused(
                "invalid", "--print-sql prints what the database needs: name no directory"
            )
        return setup_rights(arguments, environ)  # before there is any configuration
    config = read()
    configure_logging(config)
    if arguments.command != "setup":
        become_service_user(environ)
    typed = os.isatty(0) or "SUDO_UID" in environ  # not by systemd, nor in a container
    if arguments.command == "run" and typed and os.geteuid() == 0:
        how = f"install the package, whose user is {SERVICE_USER}, or start it as another user"
        raise ConfigError([f"run does not stay root: {how}"])
    if arguments.command in COMMANDS:
        code = COMMANDS[arguments.command](config, arguments, environ)
        sys.stdout.flush()
        return code
    process = Process(environ)
    process.install()
    once = arguments.command == "once"
    state = StateFile({} if once else environ)
    agent = Agent(config, process, state.write, once, (Settings,))
    agent.reread = read
    return agent.run_once() if once else agent.serve()


def _entry_point() -> NoReturn:
    sys.exit(main())


if __name__ == "__main__":
    _entry_point()

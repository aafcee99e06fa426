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
      the console . metrics . commands . doctor . the admin interface . the status page .
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
import asyncio
import base64
import contextlib
import difflib
import errno
import fcntl
import hashlib
import hmac
import http.client
import io
import json
import logging
import os
import platform
import pwd
import queue
import random
import re
import select
import shlex
import signal
import socket
import ssl
import stat
import struct
import subprocess
import sys
import termios
import textwrap
import threading
import time
import traceback
import tty
import uuid
from collections import Counter, deque
from collections.abc import Callable, Container, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from email.utils import formatdate, parsedate_to_datetime
from enum import Enum
from functools import cache, cached_property, partial
from itertools import islice
from shutil import get_terminal_size
from typing import Any, Final, NoReturn, Protocol, TextIO, TypeVar
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
# One table, the fields of Config: from it come the validation, --help and the checks of the manual.
# ==================================================================================================

ENV_FILE: Final = "/etc/serversync.env"
TOKEN_FILE: Final = "/etc/serversync.token"
EX_OK, EX_PERSON, EX_USAGE, EX_UNAVAILABLE, EX_TEMPFAIL, EX_CONFIG = 0, 1, 2, 69, 75, 78


class ConfigError(Exception):
    """Something only a person can change; carries every problem, not just the first."""

    def __init__(self, problems: Sequence[str], right: Config | None = None) -> None:
        super().__init__("; ".join(problems))
        self.problems = list(problems)
        self.right = right  # what is right of a configuration; the rest is by default


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
    url = re.match(r"(?s)postgres(?:ql)?://(?:(.*)@)?", value)
    if url and set("/?@") & set(url[1] or ""):
        # libpq would take a piece of the password for a host, a port or a name, and show it.
        raise ValueError("must have each @ / ? of a password or a value written as %40 %2F %3F")
    try:
        conninfo_to_dict(value)
    except psycopg.Error:
        known = {option.keyword.decode() for option in psycopg.pq.Conninfo.get_defaults()}
        odd = {name for name, _ in parse_qsl(value.partition("?")[2])} - known
        why = f"; libpq has no parameter {', '.join(sorted(odd))}" if odd and url else ""
        raise ValueError(f"must be a libpq URL such as postgresql:///voicebot{why}") from None
    return value


def _url(value: str) -> str:
    visible = re.fullmatch(r"(?ai)https?://[\w!$%&'()*+,./:;=~\[\]-]+", value)
    with contextlib.suppress(urllib3.exceptions.HTTPError):
        if visible and parse_url(value).host:
            return value
    raise ValueError("must be an http(s) URL such as https://voice.example.com, without a password")


_absolute = _like(r"/[\s\S]*", "an absolute path")  # of secrets: a wrong one is not shown


def _frontend(value: str) -> str:
    url = _url(value).rstrip("/")
    right = re.sub("(?<![:/])/+api(/+ingest(/+sync)?)?$", "", url)
    if right != url:
        raise ValueError(f"must be without /api…: {right}")
    return url


_local = _like(r"(?!~|\w+:)[^\0]+", "a path; a relative one is meant from the working directory")
_words = re.compile("[, ]+").split
_types = _like(r"[\w.-]+([, ]+[\w.-]+)*", "entity types, with commas between", _words)
_device = _like("[A-Za-z0-9._:-]{1,64}", "1 to 64 letters, digits, and any of . _ : -")
_day = _number(0, 86400)
_VERIFY: Final = "/api/recordings/{callLogId}"
_path = _like(r"(?a)/([\w./~-]|\{callLogId\}|\{recordingId\})*", f"a path such as {_VERIFY}")
_OF_TYPE: Final = "SYNC_ROUTE_<TYPE>"
BACKEND: Final = "/opt/virtual-voicebot"
_RECORDINGS: Final = f"{BACKEND}/storage/recordings"
_AUDIO: Final = f"{BACKEND}/data/announcements"


def _row(default: str | None, parse: Parse, text: str, name: str = "") -> Any:
    """A row of the option table. A default of None: required; an empty one: not set."""
    return field(metadata={"default": default, "parse": parse, "text": text, "name": name})


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
    recordings_dir: str = _row(_RECORDINGS, _local, "where the backend writes its recordings")
    file_grace_sec: float = _row("300", _day, "how long a missing file is waited for")
    delete_after_sec: float = _row("60", _day, "how long a call's files must be quiet")
    extra_files: str = _row("keep", _choice("keep", "delete"), "files that were never uploaded")
    upload_kbps: float = _row("0", _number(0, 10_000_000), "limit of uploads, 1000 bit/s; 0: none")
    verify_path: str = _row(_VERIFY, _path, "HEAD here must confirm an upload; empty: never asked")
    retention_days: float = _row("30", _number(0, 36500), "processed rows are kept; 0: for ever")
    retention_keep: Sequence[str] = _row("", _types, "entity types whose rows are never pruned")
    token_file: str = _row("", _absolute, f"bearer token; else {TOKEN_FILE}, if there")
    token: str = _row("", str, "the bearer token itself (better: the file)")
    admin_token_file: str = _row("", _absolute, "token of the admin interface on TCP")
    ca_file: str = _row("", _absolute, "PEM file of a private CA")
    client_cert: str = _row("", _absolute, "PEM client certificate")
    client_key: str = _row("", _absolute, "PEM key, if not in the above")
    device_id: str = _row("", _device, "name of this sender; derived from the machine id")
    log_level: str = _row("info", _choice("debug", "info", "warning", "error"), "least level shown")
    frontend_sync_interval_sec: float = _row("60", _day, "between settings pulls; 0: none")
    local_numbers: str = _row("keep", _choice("keep", "replace"), "numbers that never had a group")
    announcement_audio_dir: str = _row(_AUDIO, _local, "where announcements' audio goes")
    notification_queue_file: str = _row("", _local, "where the backend announces incoming calls")
    notify_max_age_sec: float = _row("120", _number(1, 86400), "an older announcement is dropped")
    routes: Mapping[str, str] = _row(
        "", _url, "entries of this type go to this URL instead", _OF_TYPE
    )
    route_token_files: Mapping[str, str] = _row(
        "", _absolute, "file with its token", f"{_OF_TYPE}_TOKEN_FILE"
    )
    route_tokens: Mapping[str, str] = field(default_factory=dict)
    not_used: Sequence[str] = ()  # what stands in the file for the author's own program


# By the variable: SYNC_ and the field's name, where that has no prefix of its own.
_PREFIX: Final = "^(?!database_|frontend_|announcement_|notification_)"
OPTIONS: Final = {
    option.metadata["name"] or re.sub(_PREFIX, "sync_", option.name).upper(): option
    for option in fields(Config)
    if option.metadata
}
_CALL_ROUTE: Final = re.compile(r"SYNC_ROUTE_(?i:call_log|recording(_file)?)(_TOKEN_FILE)?\Z")
_ROUTE: Final = re.compile(rf"(?!{_CALL_ROUTE.pattern})SYNC_ROUTE_(\w+?)(_TOKEN_FILE)?")
FORMER: Final = {"SYNC_ANNOUNCEMENTS_DIR": "ANNOUNCEMENT_AUDIO_DIR"}  # names of the first edition
NOT_OURS: Final = ("LOG_", "RUST_")  # what his own program reads, and the backend may

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
    given = {k: v for k, v in found.items() if v.strip() or k == "SYNC_VERIFY_PATH"}
    return {FORMER[k]: given.pop(k) for k in FORMER.keys() & given.keys()} | given


def _placed(path: str, given: bool, where: str) -> str:
    """Relative paths are meant from the working directory; so are the defaults, if the backend has
    its directories there: it may be a checkout of his."""
    here = os.path.join(where, path if given else path.removeprefix(f"{BACKEND}/"))
    return here if given or os.path.isdir(here) else path


def load_config(settings: Mapping[str, str], where: Callable[[], str] = os.getcwd) -> Config:
    """A checked Config, or a ConfigError with all that is wrong and what is allowed."""
    problems, options, types = [], dict(OPTIONS), {}
    for key in sorted(settings.keys() - OPTIONS.keys()):
        if match := _ROUTE.fullmatch(key):  # of the type in small letters, if it is in capitals
            *_, kind, suffix = match.groups("")
            types[key] = kind.lower() if kind.isupper() else kind
            options[key] = OPTIONS[f"{_OF_TYPE}{suffix}"]
        elif key.startswith("SYNC_"):
            near = difflib.get_close_matches(key, OPTIONS, 1)
            hint = f"did you mean {near[0]}?" if near else "see serversync --help"
            if _CALL_ROUTE.match(key):
                hint = "what makes a call goes to the frontend, in order, and nowhere else"
            problems.append(f"{key} is unknown: {hint}")
    values: dict[str, Any] = {}
    for name, option in options.items():
        text, parse = settings.get(name, option.metadata["default"]), option.metadata["parse"]
        try:
            if text is None:
                raise ValueError(f"is required: {option.metadata['text']}")
            value = parse(text.strip()) if text else text
            if parse is _local and value:
                value = _placed(value, name in settings, where())
            if name in types:
                if types[name] in (values[option.name] or {}):
                    raise ValueError(f"names the type {types[name]} a second time")
                value = {**(values[option.name] or {}), types[name]: value}
            values[option.name] = value
        except ValueError as error:  # the value is not shown: it may be a secret in a wrong place
            problems.append(f"{name} {error}")
            default = option.metadata["default"]
            values[option.name] = parse(default) if default else ""
    values["device_id"] = values["device_id"] or derived_device_id()
    values["not_used"] = sorted(key for key in settings if key.startswith(NOT_OURS))
    path = values["token_file"] or (TOKEN_FILE if os.path.exists(TOKEN_FILE) else "")
    values["route_tokens"] = tokens = dict[str, str]()
    try:
        values["token"] = _token(read_text(path, "SYNC_TOKEN_FILE: ").strip() or values["token"])
        for route, path in dict(values["route_token_files"] or {}).items():
            tokens[route] = _token(read_text(path, f"the token file of {route}: "))
            if route not in values["routes"]:
                problems.append(f"{_OF_TYPE}_TOKEN_FILE: {route} has no {_OF_TYPE}")
    except ConfigError as error:
        problems += error.problems
    config = Config(**values)
    if problems:
        raise ConfigError(problems, config)
    if config.ca_file or config.client_cert or config.client_key:  # to try it takes 50 ms
        tls_context(config)
    return config


def _token(text: str) -> str:
    if not re.fullmatch(r"[!-~]*", text.strip()):
        raise ConfigError(["the token must be one line of visible ASCII characters"])
    return text.strip()


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
    waits_for: int | None = None  # the seq that must be through first


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

    @property
    def length(self) -> str:
        """What it says of the length of a page that is there, in digits."""
        length = self.headers.get("content-length", "")
        return length if self.status == 200 and length.isdigit() else ""


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
class Order:
    """An entry that goes elsewhere."""

    seq: int
    tries: int
    waits_for: int | None
    entity_id: str
    key: str | None  # the payload's own
    payload: str | None  # None: it is too large


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
    password = str(conninfo_to_dict(config.database_url).get("password") or "")
    for secret in (config.token, password, *config.route_tokens.values()):
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


def confirm_order(answer: Answer, *keys: str, now: float = 0.0) -> Verdict:
    """The verdict on an entry that went elsewhere: a JSON object that does not contradict. (What is
    only called `key` may be anything's.) `keys`: its key as the header has it, and the payload."""
    said, taken = answer.said, any(_has_it(answer, key) for key in keys)
    if said is not None and 200 <= (answer.status or 0) <= 299:
        echoes = [said[name] for name in ("idempotencyKey", "idempotency_key") if name in said]
        ours = all(str(echo) in keys for echo in echoes)
        taken = answer.complete and said.get("ok") is not False and ours
    return _sent(answer) if taken else classify(answer, now)


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
    if look.length == str(size):
        return _sent(look)
    if look.length or look.status == 404:
        found = f"SYNC_VERIFY_PATH says that it has {look.length or 'none'} of {size} bytes"
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
    way: str = ""  # the type of its entries, where they do not go with all others

    def succeeded(self, number: int) -> Outage | None:
        """So many got through; the outage that this ended."""
        ended, self.outage = self.outage, None
        self.failing.clear()
        self.hasty = False
        if ended is None and number >= self.size:
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


def paused_until(endpoints: Sequence[Endpoint]) -> float:
    """The end of the pause that was asked for."""
    told = [each.outage for each in endpoints if each.outage and not each.outage.by_entries]
    return max((outage.due for outage in told if outage.code == "RATE_LIMITED"), default=0.0)


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


def clock(at: float, now: float) -> str:
    """The time of day here; of another day with its date."""
    then = time.localtime(at)
    today = then[:3] == time.localtime(now)[:3]
    return time.strftime("%H:%M:%S" if today else "%d %b %H:%M:%S", then)


# ==================================================================================================
# SQL: the schema `serversync`
# Everything of the agent's own, made or brought up to date by the one that holds the lock.
# ==================================================================================================

SCHEMA_VERSION: Final = 4

TABLES: Final = """
do $$ begin if to_regnamespace('serversync') is null then create schema serversync; end if; end $$;
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
    **dict.fromkeys((2, 3), _NUMBERED),
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
# What the role needs: the rights on a relation (a column: to be updated; `usage`: of its sequence),
# whether nothing goes on without them where it is there, and what is lost. Other rooms add theirs.
NEEDS: Final = [
    ("sync_outbox", "select, update (processed_at)", True, "nothing is sent"),
    ("recordings", "select, update (upload_status), update (s3_url)", True, "none is marked"),
    ("system_settings", "select", True, "the interval is SYNC_POLL_INTERVAL_SEC"),
    ("sync_outbox", "delete", False, "old rows are not pruned"),
]
# Each of them: where it is (by the search_path, or in this schema), and what this role, or another,
# lacks of it. No lock.
LACKS: Final = r"""
select need->>0 as relation, object::text, (
    select string_agg(each, ', ') from unnest(string_to_array(need->>1, ', ')) as each
    left join pg_attribute on attrelid = object and attname = substring(each from '\((.*)\)')
    where not case
        when each like 'update (%%' then has_column_privilege(who, object, attnum, 'update')
        when each <> 'usage' then has_table_privilege(who, object, each)
        else has_sequence_privilege(who, pg_get_serial_sequence(object::text, 'id'), each) end
    ) as lacks, (need->>2)::bool, need->>3
from json_array_elements(%(needs)s::json) with ordinality needs (need, number)
cross join to_regclass(concat(quote_ident(%(schema)s::text) || '.', need->>0)) as object
cross join coalesce(%(who)s::name, current_user) as who order by number
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
DROP_INDEX: Final = "drop index concurrently if exists %1$I.sync_outbox_serversync_pending"
# CONCURRENTLY: a plain one would block the backend's INSERT.
CREATE_INDEX: Final = """
create index concurrently sync_outbox_serversync_pending on %1$I.sync_outbox (id)
where processed_at is null
"""
# One that is disabled was disabled by somebody who meant it.
TRIGGER_STATE: Final = f"""
select tgenabled <> 'D'
from pg_trigger join pg_class c on c.oid = tgrelid join pg_proc p on p.oid = tgfoid
where tgrelid = {OUTBOX} and tgname = 'serversync_wake'
  and (p.proowner, p.pronamespace) = (c.relowner, c.relnamespace)
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

# What the statements below share. `o` is a row of the outbox, `w` one of `waiting`. (`|| ''`: of an
# expression no statistics are kept. By those of few types the planner would sort all, each time.)
PENDING_ENTRY: Final = "o.processed_at is null and o.entity_type || '' <> all (%(apart)s::text[])"
PENDING_FILE: Final = "o.processed_at is null and o.entity_type = 'recording_file'"
IN_PASS: Final = "o.id > %(after)s::bigint and o.id <= %(until)s::bigint"
CALL: Final = "serversync.call_of(o.payload)"
CALL_ID: Final = "left(coalesce(payload->>'callId', payload->>'call_id'), 1024)"
FILE_PATH: Final = "left(coalesce(payload->>'filePath', payload->>'file_path'), 4096)"
RECORDING: Final = """serversync.to_uuid(
    coalesce(payload->>'recordingId', payload->>'recording_id', entity_id::text))"""
# Of this endpoint: the type that goes a way of its own, or (none) all others. (Of a `case` the
# planner thinks that it is true of every second row, of an equation of one in two hundred.)
WAY: Final = """case when {0}.entity_type = any (%(apart)s::text[])
    then {0}.entity_type = %(way)s::text else %(way)s::text = '' end"""
# It would write over a recording whose file travels, until that is written down.
UNDOES: Final = """(%(travels)s::uuid[] <> '{{}}' and {0}.entity_type = 'recording'
           and array[{0}.entity_id, {1}] && %(travels)s::uuid[])"""
# What `w` (or a letter) is about is pending still.
HAS_ENTRY: Final = """exists (
    select from sync_outbox o
    where o.id = w.outbox_id and o.entity_id = w.entity_id and o.processed_at is null)"""
READABLE: Final = """o.id not in (
    select outbox_id from serversync.waiting where code in ('ROW_CORRUPT', 'SESSION_LOST'))"""
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
        where e.entity_id = {} and e.outbox_id {} and {}
        order by e.outbox_id limit 1)"""
    way = WAY.format("e")
    return f"coalesce({look_up.format(entity, before, way)}, {look_up.format(call, before, way)})"


def _may_go(row: str, seq: str, call: str) -> str:
    """It is not confirmed already (a lock keeps that from being written down); undoes nothing."""
    return f"{row}.{seq} <> all (%(skip)s::bigint[]) and not {UNDOES.format(row, call)}"


# All in one statement: the only one of an idle agent. Partial indexes. In order, not by `exists` or
# max(): the planner would look through the table from its beginning, or read all that is pending.
LAST: Final = "select id from sync_outbox where processed_at is null order by id desc limit 1"
LOOK: Final = f"""
select serversync.sync_interval(),
       (select o.id from sync_outbox o where {PENDING_ENTRY} order by o.id limit 1) is not null,
       (select o.id from sync_outbox o where {PENDING_FILE} order by o.id limit 1) is not null,
       not coalesce(({INDEX_STATE}), false) or not exists ({TRIGGER_STATE}),
       ({LAST}),
       exists (select from serversync.waiting) or %(travels)s::uuid[] <> '{{}}'
           or exists (select from serversync.dead_letters where status = 'RETRYING'),
       exists (select from pg_locks where relation = {OUTBOX} and mode = 'RowExclusiveLock')
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
# Between two sweeps, as a pass may be under way: what waited for one that is through, or gone.
FREE: Final = "delete from serversync.waiting where %(seq)s::bigint in (outbox_id, waits_for)"
# Somebody says "try now": all is due. The end of an outage: what failed during it is, but for what
# was told its time.
MAKE_DUE: Final = """
update serversync.waiting set next_attempt_at = now(), in_outage = false
where next_attempt_at < 'infinity' and (%(everything)s or in_outage and code <> 'RATE_LIMITED')
"""
# One plan for many batches, made of the tables as they are then: to plan each anew costs as much as
# to carry it out. A pass begins with new ones: a plan of an empty table is of no use to a full one.
NEW_PLANS: Final = "set plan_cache_mode = force_generic_plan; discard plans"
# The next pending entry of an endpoint's without a row; never touches a payload: it may be corrupt.
NEXT_ID: Final = f"""
select o.id from sync_outbox o
where o.processed_at is null and {WAY.format("o")}
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
# first of the chain is named: when that is through, all that wait for it are free at once. (0: an
# upload is under way; the next pass looks again.)
HOLD_BACK: Final = f"""
insert into serversync.waiting (outbox_id, entity_id, entity_type, call_id, is_file, code, reason,
                                waits_for, next_attempt_at)
select id, entity_id, entity_type, call, false, 'WAITS_FOR',
       case first when 0 then 'waits for an upload' else 'waits for seq ' || first end, first,
       'infinity'
from (
    select o.id, o.entity_id, o.entity_type, {CALL} as call,
           case when {UNDOES.format("o", CALL)} then 0
           else {_first("o.entity_id", CALL, "< o.id")} end as first
    from sync_outbox o
    where {PENDING_ENTRY} and {IN_PASS} and {NO_ROW} and o.id <> all (%(skip)s::bigint[])
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
where {WAY.format("w")} and w.next_attempt_at < 'infinity'
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
        where e.processed_at is null and e.id < o.id and e.entity_type <> all (%(apart)s::text[])
          and e.entity_id in (o.recording, o.call) and e.id <> all (%(skip)s::bigint[]))
from file o
left join serversync.waiting w on w.outbox_id = o.id and w.entity_id = o.entity_id
"""
LAST_UPLOAD: Final = """
select call_id::text, entity_id::text from serversync.deliveries
where call_id is not null order by id desc limit 1
"""
# An entry that goes elsewhere, and the earlier one of its entity's that must be through before.
# What is stored is compressed: the text has the limit, too.
READ_ORDER: Final = """
select o.id, coalesce(w.tries, 0),
       (select min(e.outbox_id) from serversync.waiting e
        where e.entity_id = o.entity_id and e.entity_type = o.entity_type and e.outbox_id < o.id),
       o.entity_id::text, coalesce(payload->>'idempotency_key', payload->>'idempotencyKey'),
       case when octet_length(text) <= %(most)s::bigint then text end
from sync_outbox o
left join serversync.waiting w on w.outbox_id = o.id and w.entity_id = o.entity_id
cross join lateral (
    select case when pg_column_size(payload) <= %(most)s::bigint then payload::text end as text
    offset 0) written
where o.processed_at is null and o.id = %(seq)s::bigint
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
      union all  -- it may be this directory
      select null, %(directory)s, false from serversync.waiting
      where is_file and code in ('ROW_CORRUPT', 'SESSION_LOST')
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

# Incoming calls: what became of their lines, and how far the file was read.
CALLS_READ: Final = """
insert into serversync.counters as c (name, label, value)
select 'calls', outcome, lines::float8 from jsonb_each_text(%(counts)s::jsonb) each (outcome, lines)
union all select 'calls_offset', '', %(offset)s::bigint
on conflict (name, label) do update
set value = excluded.value + case when c.name = 'calls' then c.value else 0 end
"""
CALLS_OFFSET: Final = "select value::bigint from serversync.counters where name = 'calls_offset'"

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
          and processed_at < (select age from old) and entity_type <> all (%(keep)s::text[])
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
          and started_at < (select max(started_at) from serversync.deliveries)  -- the last success
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
CORRUPT: Final = ("XX000", "XX001", "XX002", "58030", "58P01")  # a bad sector, a lost file
LOCKED: Final = ("55P03", "57014")  # somebody holds a row: later
RESULTS_ASIDE: Final = 8  # so many may wait for a lock, before nothing else is sent
BODY_FRAME: Final = b'{"entries":[]}'  # the empty request, and what stands around the entries
# What the agent makes of the backend's outbox: whether it is there, and how it is made.
OPTIONAL: Final = [
    ("index of pending entries", f"select ({INDEX_STATE}) is true", [DROP_INDEX, CREATE_INDEX]),
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
            # In quotes: there may be a type of the name null. (None has one in it.)
            value = "{" + ",".join(f'"{each}"' for each in value) + "}"
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
        self.called: Callable[[], None] = lambda: None  # by NOTIFY
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
            self.conn.add_notify_handler(lambda _: self.called())
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
        with self.session() as conn:
            name, encoding = conn.info.dbname, conn.info.parameter_status("server_encoding")
            who, how = f"database {name}: role {conn.info.user}", "run: sudo serversync setup"
        needs = self.run(LACKS, needs=json.dumps(NEEDS), who=None, schema=None)
        if not needs[0][1]:
            raise Unavailable(f"database {name} has no table sync_outbox: is it the backend's?")
        if encoding not in ("UTF8", "SQL_ASCII"):
            raise ConfigError([f"database {name}: its encoding is {encoding}, it must be UTF8"])
        missing = [f"{lacks} on {of}" for of, _, lacks, required, _ in needs if lacks and required]
        if missing:
            raise ConfigError([f"{who} lacks {what}: {how}" for what in missing])
        known = 0
        try:
            with contextlib.suppress(psycopg.errors.UndefinedTable):
                known = self.run(VERSION)[0][0]
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
        absent = [need for need in needs if need[3] and not need[1]]
        hints += [f"there is no table {need[0]}: {need[4]}" for need in absent]
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

    def news(self) -> None:
        """Tells if somebody called. It never waits; a session that was ended shows here (Lost):
        others send now."""
        with self.session() as conn:
            conn.pgconn.consume_input()
            conn.pgconn.consume_input()  # the end, behind the server's last words
            while conn.pgconn.notifies():
                self.called()


class Store:
    def __init__(self, session: Session) -> None:
        self.session = session
        self.run = session.run
        self.rows = True  # there may be some in `waiting`, or what gets one: a file travels
        self.changed = True  # something was written down since the last rest
        self.before: datetime | None = None  # `once` retries what failed before it began
        self.travelling: FileEntry | None = None  # the file under way
        self.apart: list[str] = []  # entity types that do not go with all others
        self.unwritten: list[Result] = []
        self._again_at = 0.0

    def _left_out(self) -> dict[str, Any]:
        """Through, but not written down yet; whose file travels; and what goes another way."""
        skip = [seq for result in self.unwritten for seq in result.seqs]
        files = [self.travelling, *(result.file for result in self.unwritten)]
        travels = [name for each in files if each for name in (each.recording_id, each.call_log_id)]
        return {"skip": skip, "travels": travels, "apart": self.apart, "way": ""}

    def first(self, sql: str, **params: Any) -> tuple[Any, ...] | None:
        """Its first row; what is left out now it may name."""
        return next(iter(self.run(sql, **(self._left_out() | params))), None)

    def value(self, sql: str, **params: Any) -> Any:
        """The one value of its first row, or None."""
        return (self.first(sql, **params) or (None,))[0]

    def fetch(self, after: int, until: int, size: int, most: int, at_all: int) -> Batch:
        """The next entries, as one body of so many bytes; a larger one alone, if it may go."""
        most = min(most, at_all) - len(BODY_FRAME)
        return self._batch(HOT_FETCH, after=after, until=until, size=size, bytes=most, most=at_all)

    def fetch_alone(self, seq: int, most: int) -> Batch:
        return self._batch(HOT_FETCH_ALONE, seq=seq, size=1, bytes=most, most=most)

    def _batch(self, statement: Hot, **params: Any) -> Batch:
        seqs, size, body = statement.run(self.session, self._left_out() | params)
        found = list(map(int, seqs.split(b","))) if seqs else []
        return Batch(found, int.from_bytes(size, "big"), body, hashlib.sha256(body).hexdigest())

    def past(self, seq: int, readable: bool = True) -> Past | None:
        row = self.first(PAST, seq=seq, readable=readable)
        return Past(*row) if row else None

    def confirm(
        self, seqs: Sequence[int], kind: str, answer: Answer, key: str = "", size: int = 0,
        request_sha256: str | None = None, **file: str,
    ) -> None:  # fmt: skip
        """A request that was confirmed. `file`: what receipt and deletion need of a recording."""
        digest = hashlib.sha256(answer.body).hexdigest() if answer.body else None
        known = {None: "already_uploaded", 409: "conflict_processed"}
        params = {"seqs": list(seqs), "kind": kind, "bytes": size, "key": key}
        params |= {"request_sha256": request_sha256, "answer_sha256": digest}
        params |= {"status": answer.status, "outcome": known.get(answer.status, "sent")}
        params |= {"seconds": answer.duration, "call_log_id": None, "entity_id": None, "url": None}
        params |= file
        if file:
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

    def set_aside(self, seq: int, past: Past, verdict: Verdict, step: Step, outage: bool) -> None:
        """It waits, or it is given up."""
        blamed = verdict.fate is Fate.REJECTED
        type_sent = past.sent_now if blamed or verdict.fate is Fate.SUSPECT else past.type_sent
        more = {"type_sent": type_sent, "in_outage": outage, "blamed": blamed}
        about = {"seq": seq, "call_id": past.call_id, **vars(verdict), **vars(step)}
        self.run(BURY if step.dead else SET_WAITING, **about, **more)
        self.rows = True

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
            self.changed = True
        if began >= self.settle_at:
            now = time.monotonic()
            self._again_at = now + max(1.0, SHARE * (now - began))


# ==================================================================================================
# HTTP
# One request in, one Answer out, pushed by whoever drives the generator; http.client reads the
# answer. Decides nothing, follows nothing.
# ==================================================================================================

SYNC: Final = "/api/ingest/sync"  # entries; an empty list asks whether the frontend lives
ANSWER_MAX: Final = 64 * 1024
HEAD_MAX: Final = 16 * 1024
IDLE_MAX: Final = 4.0  # frontends close a kept-alive connection after 5 s of idleness
READ_SEC: Final = 5.0  # for the head of an answer, for each piece: all others wait meanwhile
STALL_SEC: Final = 60.0
STALL_RATE: Final = 1000  # less than 1 kB/s for 60 s ends an upload
CALL_SEC: Final = 5.0  # for the announcement of a call
ROUTE_SEC: Final = 3.0  # to connect where a route leads: all others wait meanwhile
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
        """The deadline is one for all that is read: see Process.deadline."""
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
    """The way to the frontend, or where a route leads: one connection, and the requests on it, one
    after the other."""

    def __init__(self, config: Config, process: Process, keep: bool = True, to: str = "") -> None:
        self.process, self.keep = process, keep
        self.patience = config.timeout_sec  # to connect, without progress, and for the answer
        self.reach = ROUTE_SEC if to else self.patience
        self.url = parse_url(config.routes[to] if to else config.frontend_base_url)
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
        token = config.route_tokens.get(to) if to else config.token
        if token:
            self._headers["Authorization"] = f"Bearer {token}"

    def close(self) -> None:
        if self.sock is not None:
            self.sock.close()
            self.sock = None

    def post(self, path: str, body: bytes, key: str, most: float) -> Steps[Answer]:
        headers = {"Content-Type": "application/json", "Idempotency-Key": key}
        most = min(2 * self.patience + len(body) / LEAST_RATE, most)
        return self.exchange(Outgoing("POST", path, headers, most, body))

    def exchange(self, asked: Outgoing) -> Steps[Answer]:
        """One request; a reset on a kept connection is tried once more on a fresh one."""
        if time.monotonic() - self.used > IDLE_MAX:
            self.close()
        kept = self.sock is not None
        answer = yield from Exchange(self, asked).run()
        if kept and answer.trouble is Trouble.RESET:
            begun, again = self.sent, (yield from Exchange(self, asked).run())
            answer = answer if begun and again.trouble is Trouble.UNREACHABLE else again  # by this?
        return answer

    def head(self, asked: Outgoing) -> bytes:
        """Paths are checked by the configuration or quoted, values are ours."""
        headers = {**self._headers, **asked.headers}
        if asked.method == "POST":
            headers["Content-Length"] = str(asked.length)
        path = (self.url.path or "") + asked.path or "/"
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        return f"{asked.method} {path} HTTP/1.1\r\n{lines}\r\n".encode("ascii")

    def connected(self, asked: Outgoing) -> socket.socket:
        """The socket, non-blocking; made where there is none."""
        if self.sock is None:
            host = (self.url.host or "").strip("[]")
            port = self.url.port or (443 if self.tls else 80)
            limit = min(self.patience, self.reach, asked.most)
            with self.process.deadline(limit, None):
                look_up(host)
                sock = socket.create_connection((host, port), limit)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, NOTSENT_LOWAT)
                # What is given up shall not arrive later: a close is a reset.
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                if asked.rate < float("inf"):  # no burst into a buffer
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, int(asked.rate))
                if self.tls is not None:
                    sock = self.tls.wrap_socket(sock, server_hostname=host.rstrip("."))
            sock.setblocking(False)
            self.sock = sock
        return self.sock


def header_text(text: str) -> str:
    """Text from outside as a header's value."""
    return quote(text[:255], safe="".join(map(chr, range(0x21, 0x7F))), errors="replace")


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
    sink: Callable[[bytes], object] | None = None  # takes the body of a 200 in pieces

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
        patience = float("inf") if self.asked.sink else self.wire.patience
        until = min(self.started + self.asked.most, time.monotonic() + patience)
        source.until = min(time.monotonic() + READ_SEC, until)
        response = http.client.HTTPResponse(source, method=self.asked.method)  # type: ignore[arg-type]
        response.begin()
        while 100 <= response.status < 200:  # 102, 103: the answer follows
            response.headers = None  # type: ignore[assignment]  # else it has begun
            response.begin()
        length = response.headers.get("Content-Length")
        if length is not None and not length.strip().isdecimal():
            # http.client would read to the connection's end.
            raise http.client.HTTPException(f"a length that is no number: {length}")
        text, size = bytearray(), 0
        take = self.asked.sink if self.asked.sink and response.status == 200 else text.extend
        while size <= self.asked.answer_max and not response.isclosed() and response.length != 0:
            source.until = min(time.monotonic() + READ_SEC, until)
            if size:  # of a chunked answer http.client may hold the rest
                there = response.chunked or source.arrived()
                yield Wait(0.0 if there else source.until, sock.fileno(), select.POLLIN)
            piece = response.read1(min(8192, self.asked.answer_max + 1 - size))
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
            headers={name.lower(): value for name, value in response.headers.items()},
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
        self.entries, self.settings, self.calls = (Wire(config, process) for _ in range(3))
        # Each upload has a connection of its own: a stray second answer on a kept one would
        # confirm the next recording.
        self.files = Wire(config, process, keep=False)
        self.calls_refused: Sequence[tuple[str, str]] = ()  # why, as the last of them was
        self.routes = {route: Wire(config, process, to=route) for route in config.routes}
        # Whether HEAD tells what was stored; None: not known yet.
        self.trusted = None if config.verify_path else False

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


def open_plain(folder: int | None, name: str) -> int:
    """A plain file of one name; ELOOP for all that is none, as for a link."""
    fd = os.open(name, _OPEN_FILE, dir_fd=folder)
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
        os.close(fd)
        raise OSError(errno.ELOOP, "not a plain file of one name", name)
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

    troubles: Sequence[tuple[str, str]] = ()  # what a person should know, with its state

    def __init__(self, agent: Agent) -> None:
        self.agent, self.store = agent, agent.store
        self.voice, self.repeats = agent.voice, agent.voice.repeats
        self.wait = AT_ONCE
        self._woken = False  # while it worked: it looks again before it rests
        self.failures = 0  # in a row: it alone waits
        self._turns = self.turns()

    def turns(self) -> Steps[None]:
        raise NotImplementedError

    def step(self, now: float, ready: Container[int]) -> bool:
        """One piece of work, if it is time for it; whether there was something to do. After an
        error the next step begins anew."""
        if self.wait.until > now and self.wait.fd not in ready:
            return False
        try:
            self.wait = next(self._turns)
        except BaseException:
            self.close()
            raise
        self.failures = 0
        if self._woken and not self.under_way and self.wait.until > now:
            self._woken, self.wait = False, AT_ONCE
        return True

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

    def told(self) -> list[tuple[str, str]]:
        """Its troubles: nothing while all is well."""
        return list(self.troubles)

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
        self.files = Endpoint("files", 1, FILES_IN_ROW, way="recording_file")
        self.frontend = (self.entries, self.files)
        self.endpoints = [*self.frontend]  # and those of the routes
        self.alive_until = 0.0  # so long it is not asked; never, where it refuses to be
        self.untried = True  # somebody said: try now

    @property
    def quiet_until(self) -> float:
        """The frontend asked for a pause of all its traffic."""
        return paused_until(self.frontend)

    def pause(self, seconds: float = 0.0) -> Steps[None]:
        """At least so long, whoever wakes the job, and until the frontend's own pause is over."""
        due = time.monotonic() + seconds
        while (until := max(due, self.quiet_until)) > time.monotonic():
            yield Wait(until)


class Voice:
    """What the agent says of itself: what those show who look from outside, and the journal."""

    def __init__(self, agent: Agent, show: Callable[..., str]) -> None:
        self.agent, self.show = agent, show
        self.repeats = Repeats()
        self.deaths = 0
        self.mistake = ""  # in a configuration that was refused
        self.sentence = ""
        self.sent, self.began = 0, time.monotonic()  # entries since the last rest
        self.inflight = 0  # entries of the request that is under way
        self._busy_at = 0.0

    def rest(self, changed: bool) -> None:
        if not any(job.failures for job in self.agent.jobs):  # what failed was told, and stands
            self.sent, self.began = 0, time.monotonic()
            self.report(look=self.agent.session.run, changed=changed)

    def busy(self, sentence: str, **progress: object) -> None:
        """What is going on in the middle; at most once a second."""
        if time.monotonic() - self._busy_at >= 1:
            self._busy_at = time.monotonic()
            self.report(("busy", sentence), progress=progress)

    def report(self, *now: tuple[str, str], **more: object) -> None:
        """What there is to tell, each with its state; what is made of it is the sentence."""
        wall = time.time() - time.monotonic()
        outages = [
            {"endpoint": each.name, "code": each.outage.code, "reason": each.outage.reason}
            | {"since": wall + each.outage.since, "due": wall + each.outage.due}
            for each in self.agent.health.endpoints
            if each.outage
        ]
        told = [*now, *(each for job in self.agent.jobs for each in job.told())]
        told += [("person", f"the old configuration stays: {self.mistake}")] if self.mistake else []
        if locked := sum(each.locked for each in self.agent.store.unwritten):
            text = f"{count(locked, 'result')} cannot be written down: somebody holds a lock"
            told.append(("outage" if self.agent.store.stuck else "waiting", text))
        state = {"told": [(kind, clean(text)) for kind, text in told], "outages": outages}
        state |= {"standby": ("waiting", STANDBY) in now, "listening": self.agent.session.locked}
        state |= {"progress": None, "inflight": self.inflight}
        for job in self.agent.jobs:
            state |= job.published()
        self.sentence = self.show(**state | more)

    def failed(self, seq: int, past: Past, verdict: Verdict, step: Step) -> None:
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
        super().__init__(agent)
        self.endpoint, self.health = endpoint, agent.health
        self.together: Sequence[Endpoint] = agent.health.frontend  # what answers for this one, too
        self.lost = deque[int](maxlen=LOST_MAX)  # what was read when sessions ended (0: several)

    def succeeded(self, number: int) -> None:
        """It speaks for the frontend, and ends every outage but one that only entries of the other
        endpoint say. What was under way ends no pause that was asked for meanwhile."""
        agent = self.agent
        if time.monotonic() < paused_until(self.together):
            return
        ended, name = self.endpoint.succeeded(number), self.endpoint.name
        others = [each for each in self.together if each.outage and not each.outage.by_entries]
        for other in others:
            other.succeeded(1)
            self.repeats.over(other.name)
        if ended or others:
            agent.store.record([], partial(agent.store.run, MAKE_DUE, everything=False))
            agent.entries.wake()
            agent.files.wake()
        if ended:
            self.repeats.over(name)
            text = f"{name}: recovered after {time.monotonic() - ended.since:.0f} s ({ended.code})"
            say(logging.INFO, "recovered", text, ERROR_CODE=ended.code)

    def begin_outage(self, verdict: Verdict, of_all: bool = False) -> None:
        """Of this endpoint alone, or of everything. What was under way changes no pause."""
        now, jitter = time.monotonic(), random.random()
        if now < paused_until(self.together):
            return
        verdict = replace(verdict, reason=clean(verdict.reason))  # it may hold all of an answer
        of_all = of_all or len(self.together) == 1  # a pause that a route asks for is one of all
        for endpoint in self.together if of_all else [self.endpoint]:
            outage = endpoint.begin_outage(verdict, now, jitter, by_entries=not of_all)
            refused = of_all and verdict.code in ("BAD_RESPONSE", "FRONTEND_5XX")
            if refused and self.agent.once and outage.tries == 1:  # perhaps only for being empty,
                outage.due = now  # and it does not live to see the next try
            if endpoint is self.endpoint:  # told when it begins, and when its reason is another
                # Where there is no status, the words: expired, of an unknown CA, refused.
                name, words = endpoint.name, re.sub(r"\d+", "", verdict.reason)
                key = f"{verdict.code} {verdict.status or words}"
                words = f"{verdict.reason} (next try in {outage.due - now:.0f} s)"
                text = f"{name}: outage, nothing is lost: {words}"
                more = {"ERROR_CODE": verdict.code, "HTTP_STATUS": verdict.status}
                self.repeats.say(name, key, logging.WARNING, "outage", text, **more)

    def ask(self, most: float = float("inf")) -> Steps[Verdict | None]:
        """Is it the frontend? An empty request shows; None: it lives."""
        frontend, health, key = self.agent.frontend, self.health, uuid.uuid4().hex
        # On a wire of its own: a request of entries may be under way while a file fails.
        wire = frontend.files if self.endpoint is health.files else frontend.entries
        answer = yield from wire.post(SYNC, BODY_FRAME, key, most)
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
            unknown = time.monotonic() >= max(health.alive_until, health.quiet_until)
            if unknown and self.together is health.frontend:  # of a route there is nobody to ask
                down = yield from self.ask()
        if len(seqs) > 1:
            self.endpoint.failed_together(len(seqs), verdict)
        if down is not None:
            self.begin_outage(down, of_all=True)
        elif probing and self.endpoint.outage is not None:
            self.begin_outage(verdict)
        if len(seqs) == 1 and down is not verdict:
            self.failed(seqs[0], verdict, charge and down is None and not probing)

    def failed(self, seq: int, verdict: Verdict, charge: bool = True) -> None:
        """One entry, alone, did not get through: it is given up, or waits with the reason."""
        unreadable = verdict.code in ("ROW_CORRUPT", "ENTRY_UNREADABLE", "SESSION_LOST")
        past = self.store.past(seq, readable=not unreadable)
        if past is None:
            return
        verdict = replace(verdict, reason=clean(verdict.reason))  # it may hold all of an answer
        step = judge(past, verdict, self.agent.config, random.random(), charge)
        about = (seq, past, verdict, step, self.endpoint.outage is not None)
        self.store.record([seq], partial(self.store.set_aside, *about))
        if verdict.waits_for is None:
            self.voice.failed(seq, past, verdict, step)
        blamed = verdict.fate in (Fate.SUSPECT, Fate.REJECTED) and not step.dead
        if blamed and self.endpoint.failed_alone(seq) and not self.endpoint.outage:
            self.begin_outage(verdict)

    def read(self, seq: int, fetch: Callable[[], T]) -> T:
        """Counts the sessions that end meanwhile: it may be the entry that ends them."""
        if seq and self.lost.count(seq) == LOST_MAX:
            self.lost.clear()
            self.agent.failures = 0  # the cause is known
            reason = "the database session was lost three times while this entry was read"
            raise EntryTrouble(Fate.WAITS, "SESSION_LOST", reason)
        try:
            return fetch()
        except Lost:
            self.lost.append(seq)
            self.careful = CAREFUL
            raise

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

    def next_retry(self) -> tuple[int, float]:
        """The one that is due first, and when; 0: none, or none before that time. In an outage, and
        in `once`, retries may take all the time there is."""
        now, endpoint = time.monotonic(), self.endpoint
        if now < endpoint.retry_at and not (endpoint.outage or self.agent.once):
            return 0, endpoint.retry_at
        params = {"way": endpoint.way, "before": self.store.before}
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

    def turns(self) -> Steps[None]:
        agent = self.agent
        while True:
            look = self.store.first(LOOK) or ()
            said, entries, files, lacking, newest, self.store.rows, crowded = look
            agent.wake(Route)
            if lacking and not agent.housekeeping.lacking:
                agent.housekeeping.wake()
            agent.housekeeping.lacking = lacking
            if self.store.rows:
                self.store.run(SWEEP)
            if not entries:
                self.endpoint.outage = None
                agent.passed(newest if files else 0)
            elif self.endpoint.outage is not None:
                yield from self._probe(self.endpoint.outage, newest)
            elif time.monotonic() >= self.health.quiet_until:
                yield from self._pass(newest, crowded)
            # What the backend's settings say goes first. Half a minute at most: a line that went
            # silent is only noticed by asking, and a table that was rebuilt has lost its trigger.
            valid = said is not None and 0 < said <= 86400
            interval = max(said, 0.1) if valid else agent.config.poll_interval_sec
            until = time.monotonic() + min(interval, 30.0)
            outage = self.endpoint.outage
            due = outage.due if outage else max(self.next_retry()[1], self.health.quiet_until)
            yield Wait(until if self.blind else min(until, due))

    def _pass(self, until: int, crowded: bool) -> Steps[None]:
        """From the lowest id on: lower ids may appear late. What comes during it waits: it could
        overtake an older one of its call. `crowded`: somebody was writing as it began. What he
        committed behind it goes first: all from the lowest id again."""
        after, number = 0, 0
        while not self._stopped():
            if number % PLANS_LAST == 0:
                self.store.run(NEW_PLANS)
            number += 1
            batch = self._fetch(after, until)
            late = crowded and self.store.value(NEXT_ID, after=0, until=after)
            if batch is None or late:
                after = 0 if late else after
                yield AT_ONCE
                continue
            if not batch.seqs:
                self.agent.passed(until)
                yield from self._retry()
                return
            verdict = yield from self._deliver(batch)
            if verdict.fate is Fate.OUTAGE or self.blind:
                return  # it has no row, whoever ends the outage meanwhile
            if verdict.fate is Fate.SENT or len(batch.seqs) == 1:
                after = batch.seqs[-1]
            del batch  # the next one's body is not beside it
            yield AT_ONCE
            if not (crowded and self.store.value(NEXT_ID, after=0, until=after)):
                yield from self._retry()

    def _stopped(self) -> bool:
        return self.endpoint.outage is not None or self.blind

    def _fetch(self, after: int, until: int) -> Batch | None:
        """The next batch. None: an entry that cannot be read was found, or is looked for."""
        if not self.careful:
            return self._read(partial(self._fetch_in_order, after, until, self.endpoint.size))
        self.careful -= 1
        seq = self.store.value(NEXT_ID, after=after, until=until)
        if not seq:
            self.careful = 0  # all of them were read
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
        try:
            batch = self.read(seq, fetch)
        except EntryTrouble as trouble:
            self.failed(seq, trouble.verdict)
            self.careful = 0
            return None
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
        done, since = voice.sent, time.monotonic() - voice.began
        voice.inflight = len(seqs)
        if self.endpoint.outage is None:
            voice.busy(f"sending entries: {done} so far", kind="drain", entries=done, seconds=since)
        try:
            answer = yield from agent.frontend.entries.post(SYNC, batch.body, batch.key, most)
        finally:
            voice.inflight = 0
        verdict, rejected = confirm_entries(answer, batch.key, seqs, time.time())
        if len(rejected) == len(seqs) == 1:  # as any other rejection
            return Verdict(Fate.REJECTED, "REJECTED", rejected[seqs[0]], verdict.status)
        if verdict.fate is Fate.SENT:
            stored = [seq for seq in seqs if seq not in rejected]
            about = ("entries", answer, batch.key, len(batch.body), batch.key)
            agent.store.record(stored, partial(self.store.confirm, stored, *about))
            if stored:
                self.succeeded(len(seqs))
            voice.sent += len(stored)
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
        seq, due = (0, 0.0) if self._stopped() else self.next_retry()
        began = time.monotonic()
        if not seq or due > began:
            return
        verdict = yield from self._alone(seq)
        if verdict is None or verdict.fate is not Fate.SENT:
            self.endpoint.retried(time.monotonic(), time.monotonic() - began)
        self.wake()  # what waited for it may be free

    def _probe(self, outage: Outage, newest: int) -> Steps[None]:
        """In an outage one entry goes: the newest that nothing unsent precedes, else the one that
        has waited longest. It kills nothing."""
        health = self.health
        is_new = outage.by_entries and newest > self.endpoint.seen
        if self.blind or (time.monotonic() < outage.due and not is_new):
            return
        self.endpoint.seen = newest
        try:
            fresh = partial(self.store.value, NEWEST_FREE)
            seq = 0 if self.careful else self.read(0, fresh) or self.next_retry()[0]
        except psycopg.Error as error:  # one of them cannot be read
            self.why_unreadable(0, error)
            seq = 0
        verdict = yield from self._alone(seq, newest)
        if verdict is None:  # nothing was asked: another one soon
            outage.due = max(outage.due, time.monotonic() + 1.0)
            return
        if verdict.fate is not Fate.SENT or outage.by_entries or health.alive_until == float("inf"):
            return
        down = yield from self.ask()  # an entry got through: is the empty request refused still?
        if down and down.retry_after:
            self.begin_outage(down, of_all=True)  # it asks for another pause
        elif down and down.fate is not Fate.OUTAGE and down.code != "RATE_LIMITED":  # full for now
            health.alive_until = float("inf")
            text = "the frontend takes entries, but no empty request: it is not asked so any more"
            say(logging.INFO, "empty_request_refused", text)


# ==================================================================================================
# One at a time
# What files, and entries that go elsewhere, have in common.
# ==================================================================================================


class Single(Delivery):
    """Sends the entries of a type, one after the other, in turns with all other jobs."""

    reached = 1 << 62  # the last id that may go
    statement: str  # what is known of an entry
    kind: type[Any]  # and as what

    def turns(self) -> Steps[None]:
        while True:
            outage = self.endpoint.outage
            due = max(outage.due if outage else 0.0, paused_until(self.together))
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
        seq, due = self.next_retry()
        now = time.monotonic()
        if self.reached and (due > now or self.endpoint.outage):
            way = self.endpoint.way
            if new := self.store.value(NEXT_ID, after=0, until=self.reached, way=way):
                return new, now
        return (seq, now) if due <= now else (0, due)

    def _deliver(self, seq: int) -> Steps[None]:
        began, tries = time.monotonic(), 0
        verdict = trouble = None  # what the frontend says; what there is to say against it here
        try:
            most = self.agent.config.entry_max_bytes
            row = self.read(seq, partial(self.store.first, self.statement, seq=seq, most=most))
            if row is None:  # somebody took it away: its row must not come up again
                self.store.run(FREE, seq=seq)
                return
            entry = self.kind(*row)
            if (first := entry.waits_for) is not None:  # an earlier entry
                reason = f"waits for seq {first}" if first else "waits for an upload"
                self.failed(seq, Verdict(Fate.WAITS, "WAITS_FOR", reason, waits_for=first))
                return
            tries = entry.tries
            verdict = yield from self._send(entry)
        except (Stopping, Lost, Unavailable):
            raise
        except EntryTrouble as error:
            trouble = error.verdict
        except psycopg.Error as error:
            trouble = self.why_unreadable(seq, error)
        except Exception:
            log.exception("a bug: entry %s cannot be handled", seq)
            trouble = Verdict(Fate.WAITS, "UNKNOWN", "an error of the agent's own: see the journal")
        if trouble is not None and trouble.code == "ROOT_MISSING":
            self.begin_outage(trouble)
        elif trouble is not None:
            self.failed(seq, trouble)
        elif verdict is not None and verdict.fate is not Fate.SENT:
            yield from self.conclude([seq], verdict)
        if tries and (verdict is None or verdict.fate is not Fate.SENT):
            self.endpoint.retried(time.monotonic(), time.monotonic() - began)

    def _send(self, entry: Any) -> Steps[Verdict | None]:
        raise NotImplementedError


class Route(Single):
    """Entries of a type that go elsewhere: the payload itself is the body. (One whose route is gone
    finds nothing.)"""

    statement, kind = READ_ORDER, Order

    def __init__(self, agent: Agent, entity_type: str) -> None:
        endpoint = Endpoint(f"route {entity_type}", 1, FILES_IN_ROW, way=entity_type)
        super().__init__(agent, endpoint)
        self.together = [endpoint]
        agent.health.endpoints.append(endpoint)

    def _send(self, order: Order) -> Steps[Verdict | None]:
        receiver = self.endpoint.name
        if order.payload is None:
            raise EntryTrouble(Fate.DEAD, "TOO_LARGE", "larger than SYNC_ENTRY_MAX_BYTES")
        body = order.payload.encode()
        own = hashlib.sha256(f"{order.seq} {order.entity_id} ".encode() + body).hexdigest()
        key = header_text(order.key) if order.key else own
        if self.endpoint.outage is None:
            self.voice.busy(f"sending entry {order.seq} by {receiver}")
        wire = self.agent.frontend.routes[self.endpoint.way]
        answer = yield from wire.post("", body, key, float("inf"))
        verdict = confirm_order(answer, key, order.key or key, now=time.time())
        if verdict.fate is not Fate.SENT:
            return replace(verdict, reason=verdict.reason.replace("the frontend", receiver, 1))
        about = ("entries", answer, key, len(body), hashlib.sha256(body).hexdigest())
        self.store.record([order.seq], partial(self.store.confirm, [order.seq], *about))
        if order.tries:
            self.store.run(FREE, seq=order.seq)
        self.succeeded(1)
        self.voice.sent += 1
        text = f"sent entry {order.seq} by {receiver} in {answer.duration * 1000:.0f} ms"
        more = {"SEQ": order.seq, "ENTITY_TYPE": self.endpoint.way}
        say_sent("entries_sent", text, answer, key, **more)
        return verdict


# ==================================================================================================
# Files
# Find, ready, stream, confirm, record. (Recordings that were uploaded are deleted further below.)
# ==================================================================================================


class Files(Single):
    """Uploads the recordings."""

    reached = 0  # the last id of the last completed pass of the entries
    statement, kind = READ_FILE, FileEntry

    def _send(self, entry: FileEntry) -> Steps[Verdict | None]:
        if entry.early:
            self.reached = entry.seq - 1
            self.agent.entries.wake()
            return None
        try:
            return (yield from self._upload(entry))
        except EntryTrouble as error:
            if not (entry.uploaded and isinstance(error.__cause__, FileNotFoundError)):
                raise
            seqs = [entry.seq]  # we removed it
            self.store.record(seqs, partial(self.store.confirm, seqs, "none", Answer()))
            text = f"recording {entry.seq} was uploaded before"
            say_sent("file_already_uploaded", text, Answer(), None, SEQ=entry.seq)
            return Verdict(Fate.SENT, "", "uploaded before")
        finally:
            if self.store.travelling:  # what waited for its end goes on
                self.store.travelling = None
                self.agent.entries.blind = False
                self.agent.entries.wake()

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
            self.store.travelling, self.store.rows = entry, True
            while agent.entries.under_way:  # it may hold what this would be written over by
                yield Wait(time.monotonic() + 0.2)
            yield from self.health.pause()
            verdict, url, answer = yield from self._transfer(entry, ready)
            if verdict.fate is Fate.SENT:
                try:
                    check_sent(ready.folder, {ready.name: ready.files[0]})
                except OSError:
                    reason = "the file changed while it was sent"
                    raise EntryTrouble(Fate.WAITS, "FILE_CHANGED", reason) from None
                self._confirmed(entry, ready, url, answer)
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
        that has a length for what was never uploaded tells nothing. One that has none of this
        upload may have lost it: the one before shows whether there is such a page."""
        yield from self.health.pause()
        for _ in range(3):  # an answer that tells nothing is asked for again
            look = yield from frontend.stored_length(entry.call_log_id, entry.recording_id)
            if look.length or look.status == 404:
                break
            yield from self.health.pause(1.0)
        if frontend.trusted is None:
            nobody, there = str(uuid.uuid4()), look
            other = yield from frontend.stored_length(nobody, nobody)
            if not look.length and (before := self.store.first(LAST_UPLOAD)):
                there = yield from frontend.stored_length(*before)
            if other.status == 404 and there.length:
                frontend.trusted = True
            # With one of these the page may be there later.
            elif not {None, 429, 500, 502, 503, 504} & {look.status, other.status, there.status}:
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

    def _confirmed(self, entry: FileEntry, ready: Ready, url: str, answer: Answer) -> None:
        def write() -> None:
            self.store.confirm(
                [entry.seq], "file", answer, ready.key, ready.size, call_log_id=entry.call_log_id,
                entity_id=entry.recording_id, url=url, directory=ready.directory,
                files=json.dumps(ready.files),
            )  # fmt: skip
            for job in (self.agent.deletions, self.agent.entries):  # it may have waited for a lock
                job.wake()

        self.store.record([entry.seq], write, entry)
        self.succeeded(1)
        text = f"uploaded recording {entry.seq} ({human(ready.size)}) in {answer.duration:.1f} s"
        more = {"SEQ": entry.seq, "ENTITY_TYPE": "recording_file", "CALL_ID": ready.directory}
        say_sent("file_uploaded", text, answer, ready.key, **more)


# ==================================================================================================
# Deletions
# Step 6 of a recording, from the table of confirmed uploads alone.
# ==================================================================================================


class Deletions(Job):
    """Removes what was uploaded, one recording a step."""

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
                self.store.changed = True
                text = f"uploaded recording {seq} cannot be deleted, tried again later: {why}"
                topic, about = f"deletion {seq}", {"SEQ": seq, "CALL_ID": where}
                self.repeats.say(topic, why, logging.WARNING, "deletion_failed", text, **about)
                return backoff(upload.tries + 1, 1.0)
        self.store.run(FORGET_UPLOAD, seq=seq, directory=where)
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
        super().__init__(agent)
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
        keep = list(self.agent.config.retention_keep)
        try:
            pruned = self.store.run(PRUNE, days=days, keep=keep)[0]
        except psycopg.Error as error:
            text = f"old rows cannot be pruned: {error}"
            self.repeats.say("prune", str(error), logging.WARNING, "prune_failed", text)
            return False
        if any(pruned):
            text = "pruned {} old rows of the outbox, {} receipts and {} letters"
            say(logging.INFO, "pruned", text.format(*pruned))
        return any(pruned)


# ==================================================================================================
# Incoming calls
# A line of the backend's queue file each, for a pop-up: worth something for seconds.
# ==================================================================================================

CALL_CAP: Final = 4.0  # seconds between two tries
LINE_MAX, LINES_MAX = 64 * 1024, 500  # so many are read at once
LATE_SEC: Final = 2.0  # so long after its end, who opened the file before it was renamed may write


class Calls(Job):
    """Announces them in order. A kill repeats one at most: how far the file is read is in the
    database. (`once` lives too short for it.)"""

    def step(self, now: float, ready: Container[int]) -> bool:
        """A look in vain, once a second, is none that anybody else hears of."""
        before = self.troubles
        return super().step(now, ready) and (self.under_way or self.troubles != before)

    def turns(self) -> Steps[None]:
        while True:
            path, wait = self.agent.config.notification_queue_file, 0.0
            taken = f"{path}.processing"
            try:
                if not path or self.agent.once:
                    self.troubles, wait = (), float("inf")
                elif os.path.lexists(taken):
                    yield from self._read(taken)
                elif os.path.lexists(path):
                    os.close(open_plain(None, path))
                    self.store.run(CALLS_READ, offset=0, counts="{}")  # before: a kill may follow
                    os.rename(path, taken)  # the backend begins another file
                else:  # nothing to read
                    os.stat(os.path.join(os.path.dirname(path), "."))  # could it be seen?
                    self.troubles, wait = self.agent.frontend.calls_refused, 1.0
            except OSError as error:
                wait = 1.0
                self._failed("person", f"{error.filename or path}: {error.strerror}")
            yield Wait(time.monotonic() + wait)

    def _failed(self, state: str, why: str, key: str = "") -> None:
        text = clean(f"incoming calls are not announced: {why}")
        self.troubles = [(state, text)]
        self.repeats.say("calls", key, logging.WARNING, "calls_failed", text)

    def _read(self, path: str) -> Steps[None]:
        """All of it, and what comes late; then it goes."""
        at, ended, counts = self.store.value(CALLS_OFFSET) or 0, False, Counter[str]()
        with open(open_plain(None, path), "rb") as file:
            while True:
                file.seek(at)
                line = file.readline(LINE_MAX)
                if not (line.endswith(b"\n") or len(line) == LINE_MAX or ended):
                    ended = True
                    yield from self.agent.health.pause(LATE_SEC)
                    continue
                if not line:
                    break
                ended, outcome = False, (yield from self._announce(line))
                at += len(line)
                counts[outcome] += 1
                if outcome == "sent" or counts.total() >= LINES_MAX:
                    self._note(at, counts)
                    yield AT_ONCE
        self._note(at, counts)
        os.unlink(path)
        self._note(0, counts)

    def _note(self, at: int, counts: Counter[str]) -> None:
        note = partial(self.store.run, CALLS_READ, offset=at, counts=json.dumps(counts))
        self.store.record([], note)
        del counts["sent"]
        if counts:
            text = "incoming calls are not announced any more: "
            text += ", ".join(f"{number} {outcome}" for outcome, number in counts.items())
            self.repeats.say("dropped", "", logging.WARNING, "calls_dropped", text)
        counts.clear()

    def _announce(self, line: bytes) -> Steps[str]:
        """What becomes of a line: sent, or nobody needs it."""
        try:
            call = json.loads(line)
            key = header_text(call["call_id"])
            came_in = datetime.fromisoformat(call["receivedAt"]).timestamp()
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            return "bad"
        began, tries, pause = time.monotonic(), 0, 0.0
        while True:
            yield from self.agent.health.pause(pause)
            # By a clock that was stepped back it came in tomorrow: not tried until then.
            age = max(time.time() - came_in, time.monotonic() - began)
            if age > self.agent.config.notify_max_age_sec:
                return "stale"
            door, where = self.agent.frontend, "/api/ingest/incoming-call"
            answer = yield from door.calls.post(where, line.strip(), key, CALL_SEC)
            if _has_it(answer, key):
                say_sent("call_announced", "announced an incoming call", answer, key)
                door.calls_refused = ()
                return "sent"
            verdict = classify(answer, time.time())
            self._failed("waiting", verdict.reason, verdict.code)
            if 400 <= (answer.status or 0) < 500 and answer.status not in (408, 429):
                door.calls_refused = () if verdict.code == "BAD_REQUEST" else self.troubles
                return "refused"
            tries += 1
            pause = backoff(tries, 1.0, verdict.retry_after or 0.0, CALL_CAP)


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
    (psycopg.Error, logging.ERROR, "cycle_failed", "the database refuses, tried again: {error}"),
    (Exception, logging.ERROR, "cycle_failed", "a cycle failed, and is tried again: {error!r}"),
)  # fmt: skip


class Agent:
    """Holds the lock, and gives every job its turn."""

    def __init__(
        self, config: Config, process: Process, show: Callable[..., str], once: bool,
        more: Sequence[Callable[[Agent], Job]] = (),
    ) -> None:  # fmt: skip
        self.config, self.process, self.once = config, process, once
        self.session = Session(config.database_url, config.device_id, process)
        self.session.called = self.called
        self.store = Store(self.session)
        self.frontend = Frontend(config, process)
        self.recordings = Recordings(config.recordings_dir)
        self.health = Health(config)
        self.voice = Voice(self, show)
        self.entries, self.files = Entries(self), Files(self, self.health.files)
        self.deletions, self.housekeeping = Deletions(self), Housekeeping(self)
        self.jobs: list[Job] = [self.deletions, Calls(self), self.entries, self.files]
        self.jobs += [*(make(self) for make in more), self.housekeeping]
        self.use_routes()
        self.failures = 0  # of the loop, in a row, until all is at rest

    def use_routes(self) -> None:
        """A job for each type that goes elsewhere."""
        known = {job.endpoint.way for job in self.jobs if isinstance(job, Route)}
        self.store.apart = ["recording_file", *self.config.routes]
        self.jobs += [Route(self, route) for route in self.config.routes if route not in known]

    def wake(self, kind: type[Job] = Job) -> None:
        for job in self.jobs:
            if isinstance(job, kind):
                job.wake()

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
        stirred = True  # a job had something to do since the last rest
        while True:
            try:
                self.process.check()
                if self.process.reload:
                    self.reload()
                    resume_at, stirred = 0.0, True
                if time.monotonic() >= resume_at:
                    self.hold()
                    stirred |= self.turn(ready)
                    now, store = time.monotonic(), self.store
                    busy = any(job.under_way or job.wait.until <= now for job in self.jobs)
                    waits = self.once and store.settle_at < float("inf")
                    give_up_at = min(give_up_at, now + LOCK_PATIENCE) if waits else float("inf")
                    if not (busy or waits or store.travelling) or now > give_up_at:
                        self.failures = 0
                        if stirred or store.changed:
                            self.voice.rest(store.changed or store.rows)
                        stirred = store.changed = False
                        if self.once:
                            return
                        self.session.news()  # it came with the answer to that
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
        self.wake()
        if self.once:
            self.store.before = self.store.before or self.session.run("select now()")[0][0]
        elif self.health.untried:
            self.try_now()
        troubles = ("standby", "database_lost", "database_outage")
        over = [self.voice.repeats.over(trouble) for trouble in troubles]
        if any(over):
            say(logging.INFO, "recovered", "the database is there, and the lock is ours")

    def turn(self, ready: Container[int] = ()) -> bool:
        """A turn for each job, after what was confirmed is written down. Whether one had work."""
        stirred = False
        self.session.news()  # whose session ended sends nothing more
        for job in self.jobs:
            self.process.check()
            if job is not self.deletions:  # they make room, where that is missing
                self.store.settle()
                if self.store.stuck:
                    self.voice.report()
                    break
            try:
                stirred |= job.step(time.monotonic(), ready)
            except Exception as error:
                if self.once or isinstance(error, (Stopping, Lost, ConfigError)):
                    raise
                self._met(error)
                stirred = True
                job.failures += 1  # by an error of its own: the other jobs go on
                job.wait = Wait(time.monotonic() + backoff(min(job.failures, 5), 1.0))
        self.session.news()  # what came with a statement's answer wakes no poll
        return stirred

    def called(self) -> None:
        self.entries.wake()
        self.wake(Route)

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
        text, bug = clean(text.format(error=error)), "error!r" in text
        self.voice.repeats.say(event, text, level, event, text, exc_info=bug)
        self.voice.report(("waiting" if event == "standby" else "outage", text))
        if getattr(error.__cause__ or error, "sqlstate", None) in ("3F000", "42P01", "42883"):
            self.session.close()  # our schema is gone (a restore?): made anew with the lock

    def reload(self) -> None:
        """SIGHUP: a good configuration takes over, a bad one is refused with its reasons."""
        self.process.reload = False
        daemon.notify(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")
        try:
            self._use(self.reread())
            self.voice.mistake = ""
            say(logging.INFO, "reloaded", "the configuration was read again")
        except ConfigError as error:
            self.voice.mistake = error.problems[0]
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
        self.use_routes()
        self.try_now()
        for job in self.jobs:
            job.reload()

    def try_now(self) -> None:
        """Every outage and pause ends, and what waits for its time is due."""
        self.health.alive_until = 0.0
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
        if names := ", ".join(self.config.not_used):
            say(logging.INFO, "not_used", f"{names}: not used by serversync (see SYNC_LOG_LEVEL)")
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
        busy = [job for job in self.jobs if isinstance(job, (Calls, Delivery))]
        with contextlib.suppress(Lost, Unavailable, Stopping, psycopg.Error):
            while (busy := [job for job in busy if job.under_way]) and time.monotonic() < until:
                due = min(until, *(job.wait.until for job in busy))
                self.process.wait(due, [(job.wait.fd, job.wait.events) for job in busy])
                self.session.news()  # whose session ended sends nothing more
                for job in busy:
                    job.step(float("inf"), ())

    def run_once(self) -> int:
        """`once`: delivers what is due, and says by its exit code how that went."""
        try:
            self._loop()
            pending = self.store.value(LAST)
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
        return EX_TEMPFAIL if pending else EX_OK

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
# Pure: four answers are checked item by item and become rows. What cannot become one is said, and
# what is stored of it stays as it is.
# ==================================================================================================


class NotNow(Exception):
    """The frontend gave no settings, or the database takes none: later; carries the verdict."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.reason)
        self.verdict = verdict


class BadItem(Exception):
    """One item cannot become a row, or one audio file not be stored; says why."""


Kind = Callable[[Any], Any]  # of a field: the value as it is stored, or BadItem
Fields = Mapping[str, tuple[str, Kind, Any]]  # column: key, kind, what stands there without the key
Row = dict[str, Any]
Sounds = Mapping[str, tuple[str | None, str | None]]  # announcement: its audio's URL, its text

NEEDED: Final = object()
SETTINGS_MAX: Final = 2 * 1024 * 1024
VALUES_MAX: Final = 90_000  # in one answer: parsed, each may take a hundred bytes
REMARKS_MAX: Final = 100
HOLD_TIMES, HOLD_SEC = 3, 600.0
AUDIO_URL: Final = "/audio/announcements/"
URL_MAX: Final = len(AUDIO_URL) + 255
TEMPORARY: Final = ".serversync-"  # in the announcements directory: a file that is not complete
_UUID: Final = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_AUDIO_SAFE: Final = re.compile(
    AUDIO_URL + rf"(?!\.\.?\Z|{re.escape(TEMPORARY)})[^/%\\?#\x00-\x1f\x7f-\x9f\u2028\u2029]+"
)
_UNFIT: Final = re.compile("[\0\ud800-\udfff]")  # PostgreSQL takes neither
_NARROW: Final = str.maketrans("０１２３４５６７８９＋－（）＊＃", "0123456789+-()*#")


def settings_answer(key: str, answer: Answer) -> dict[str, Any]:
    """What has this list; NotNow for anything but the contract's words."""
    said: Any = None
    if sum(map(answer.body.count, (b",", b":", b"[", b"{"))) > VALUES_MAX:
        raise NotNow(classify(replace(answer, detail=f"it has more than {VALUES_MAX} values")))
    with contextlib.suppress(ValueError, RecursionError):
        # int refuses NaN; of a number without end as much as is needed to call it too large.
        said = json.loads(answer.body, parse_constant=int, parse_int=lambda n: int(n[:400]))
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


# --- the kinds of fields --------------------------------------------------------------------------


def must(good: Kind, words: str, then: Kind = lambda value: value) -> Kind:
    def kind(value: Any) -> Any:
        if not good(value):
            raise BadItem(words)
        return then(value)

    return kind


def up_to(most: int) -> Kind:
    return must(lambda text: len(TEXT(text)) <= most, f"is longer than {most} characters")


def rounded(value: float) -> int:
    """Half away from zero. (The fraction of a float is exact; adding 0.5 to it is not.)"""
    whole = int(NUMBER(value))
    return whole + ((value > 0) - (value < 0)) * (abs(value - whole) >= 0.5)


def utc(text: Any) -> str:
    try:
        at = datetime.fromisoformat(TEXT(text))
        return (at if at.tzinfo else at.replace(tzinfo=UTC)).astimezone(UTC).isoformat()
    except (ValueError, OverflowError):
        raise BadItem("is no time") from None


def phone_number(text: Any) -> str:
    """A number as the backend keeps it."""
    number = re.sub(r"[-()\s]", "", TEXT(text).translate(_NARROW))
    number = re.sub("^0", "+81", number)
    if not re.fullmatch(r"\+[1-9][0-9]{1,14}", number):
        raise BadItem("it is no phone number such as +81312345678 or 03-1234-5678")
    return number


def reference(value: Any) -> str | None:
    """To an announcement or a flow; it may lead nowhere."""
    return str(value).lower() or None


def pressed(key: str) -> str:
    """A key of a telephone, as it was meant."""
    return key.translate(_NARROW).strip()


TEXT: Final = must(lambda value: isinstance(value, str), "is not text")
SCENARIO: Final = must(lambda value: type(value) in (str, int), "is not text")
AN_ID: Final = must(lambda v: isinstance(v, str) and _UUID.fullmatch(v), "is no UUID", str.lower)
FLAG: Final = must(lambda value: isinstance(value, bool), "is neither true nor false")
OBJECT: Final = must(lambda value: isinstance(value, dict), "is not an object")
LIST: Final = must(lambda value: isinstance(value, list), "is not a list")
NUMBER: Final = must(  # of an int4, rounded too
    lambda value: type(value) in (int, float) and abs(value) < 2**31 - 1, "is no number that fits"
)
WHOLE: Final = must(lambda value: NUMBER(value) == int(value), "is not a whole number", int)
ALLOWED: Final = must(lambda value: value in ("allow", "deny"), "is neither allow nor deny")
CODE: Final = must(lambda text: 1 <= len(TEXT(text)) <= 2, "has not 1 or 2 characters", str.upper)
KEY: Final = must(lambda k: 1 <= len(pressed(TEXT(k))) <= 5, "has not 1 to 5 characters", pressed)
# A file in the announcements directory, and nothing that leads elsewhere.
AUDIO: Final = must(
    lambda url: not TEXT(url) or (_AUDIO_SAFE.fullmatch(url) and len(url.encode()) <= URL_MAX),
    f"is not {AUDIO_URL}<name>",
    lambda url: url or None,
)
ANNOUNCEMENT_TYPES: Final = ("greeting", "hold", "ivr", "closed", "recording_notice", "custom")


# --- the items, field by field --------------------------------------------------------------------

ACTION: Final[Fields] = {
    "actionType": ("actionType", ALLOWED, NEEDED),
    "actionConfig": ("actionConfig", OBJECT, NEEDED),
}
ACTIONS: Final = {  # where the answer has none
    "anonymousAction": {"actionType": "deny", "actionConfig": {"actionCode": "BZ"}},
    "defaultAction": {"actionType": "allow", "actionConfig": {"actionCode": "VR"}},
}
GROUP: Final[Fields] = {
    "group_name": ("name", up_to(255), NEEDED),
    "numbers": ("phoneNumbers", LIST, NEEDED),
}
RULE: Final[Fields] = {
    "name": ("name", up_to(255), NEEDED),
    "caller_group_id": ("callerGroupId", AN_ID, None),
    "action_type": ACTION["actionType"],
    "action_config": ACTION["actionConfig"],
    "is_active": ("isActive", FLAG, True),
}
ANNOUNCEMENT: Final[Fields] = {
    "name": ("name", up_to(100), NEEDED),
    "description": ("description", TEXT, None),
    "announcement_type": (
        "announcementType", lambda t: t if t in ANNOUNCEMENT_TYPES else "custom", "custom"
    ),
    "is_active": ("isActive", FLAG, True),
    "audio_file_url": ("audioFileUrl", AUDIO, None),
    "tts_text": ("ttsText", lambda text: TEXT(text) or None, None),
    "duration_sec": ("durationSec", rounded, None),
    "language": ("language", lambda name: up_to(10)(name) or "ja", "ja"),
    "updated_at": ("updatedAt", utc, None),
}  # fmt: skip
FLOW: Final[Fields] = {
    "name": ("name", up_to(100), NEEDED),
    "description": ("description", TEXT, None),
    "is_active": ("isActive", FLAG, True),
}
MENU: Final[Fields] = {  # the same object: what its nodes become
    "announcement": ("announcementId", reference, None),
    "timeout_sec": ("timeoutSec", lambda given: WHOLE(given) if WHOLE(given) > 0 else 10, 10),
    "max_retries": ("maxRetries", lambda given: WHOLE(given) if WHOLE(given) >= 0 else 2, 2),
    "routes": ("routes", LIST, NEEDED),
}
ROUTE: Final[Fields] = {"key": ("dtmfKey", KEY, NEEDED)}
EXIT: Final[Fields] = {
    "action_code": ("actionCode", CODE, NEEDED),
    "announcement": ("announcementId", reference, None),
    "welcome": ("welcomeAnnouncementId", reference, None),
}
EXIT_OPTIONS: Final[Fields] = {  # of an exit: they stand in its node as they are
    "ivrFlowId": ("ivrFlowId", reference, None),
    "scenarioId": ("scenarioId", SCENARIO, None),
    "recordingEnabled": ("recordingEnabled", FLAG, None),
    "includeAnnouncement": ("includeAnnouncement", FLAG, None),
}
FALLBACK: Final = {"actionCode": "VR"}
# Columns that no field stands for alone.
NODE: Final = (
    "flow_id", "parent_id", "node_type", "action_code", "audio_file_url", "tts_text",
    "timeout_sec", "max_retries", "depth",
)  # fmt: skip


def row_of(value: object, fields: Fields) -> Row:
    """An object from outside as a row."""
    if not isinstance(value, dict):
        raise BadItem("it is not an object")
    row = {}
    for column, (key, kind, default) in fields.items():
        given = value.get(key)
        if given is None and default is NEEDED:
            raise BadItem(f"{key} is missing")
        try:
            row[column] = default if given is None else kind(given)
        except BadItem as why:
            raise BadItem(f"{key} {why}") from None
    return row


def label_of(value: object, position: int) -> str:
    """How people find the item: by its place in the list, and its name."""
    fields = value if isinstance(value, dict) else {}
    name = fields.get("name") or fields.get("id") or "?"
    return f"{position + 1}. {str(name)[:60]!r}"


@dataclass
class Section:
    """One of the four, as it will stand in the backend's tables."""

    name: str
    rows: dict[str, Row] = field(default_factory=dict)  # the good items, by their ids
    kept: set[str] = field(default_factory=set)  # the ids whose rows stay as they are
    counts: dict[str, int] = field(default_factory=dict)  # by their word: first the items
    tables: dict[str, Any] = field(default_factory=dict)  # rows as JSON, by their table
    remarks: list[dict[str, Any]] = field(default_factory=list)  # the first hundred
    skipped: int = 0
    known: dict[str, Any] = field(default_factory=dict)  # its row of serversync.settings
    there: dict[str, int] = field(default_factory=dict)  # what stands in the tables
    held: dict[str, Any] = field(default_factory=dict)  # why it has to wait, if it has
    changes: list[tuple[str, str, int, list[str]]] = field(default_factory=list)
    why: str = ""
    error: str = ""

    def remark(self, item: str, reason: str, skipped: bool = False) -> None:
        """Of an item that was skipped, or is not quite as it came."""
        self.skipped += skipped
        if len(self.remarks) < REMARKS_MAX:
            said = {"item": clean(item, 200), "reason": clean(reason, 200), "skipped": skipped}
            self.remarks.append(said)

    @contextlib.contextmanager
    def skipping(self, item: str) -> Iterator[None]:
        """What cannot be used is said; the others go on."""
        try:
            yield
        except BadItem as why:
            self.remark(item, str(why), skipped=True)
        except RecursionError:
            self.remark(item, "it is nested too deeply", skipped=True)

    def read(self, items: Sequence[object], word: str, read: Callable[[Row, int], Row]) -> None:
        """Every item on its own; of one id the first that is good."""
        for at, value in enumerate(items):
            label = label_of(value, at)
            with self.skipping(label):
                own = row_of(value, {"id": ("id", AN_ID, NEEDED)})["id"]
                self.kept.add(own)
                fitting = fit(value)
                if fitting != value:
                    self.remark(label, "NUL characters or half surrogates were dropped from it")
                if own in self.rows:
                    raise BadItem("its id is that of an earlier item")
                self.rows[own] = {"id": own} | read(fitting, at)
        self.kept -= self.rows.keys()
        self.counts[word] = len(self.rows) + len(self.kept)

    def hold(self, elapsed: float, lost: bool) -> None:
        """What is less than half of what is there waits, and for how often and how long it came
        like this in a row (of the agent's own running time); what a frontend without its store says
        waits for a person, also when somebody begins to enter there anew."""
        if not any(2 * came < self.there.get(word, 0) for word, came in self.counts.items()):
            return
        last = self.known["held"] or {"times": 0, "seconds": -elapsed, "lost": False}
        times, seconds = last["times"] + 1, last["seconds"] + elapsed
        lost = lost or last["lost"]
        if lost or times < HOLD_TIMES or seconds < HOLD_SEC:
            self.held = {"counts": self.counts, "times": times, "seconds": seconds, "lost": lost}
            self.why = held_text(self.there, self.counts)


def read_groups(said: Mapping[str, Any]) -> Section:
    """The number groups. A number in several groups belongs to the last one."""
    section = Section("number-groups")

    def read(value: Row, at: int) -> Row:
        row, numbers = row_of(value, GROUP), []
        for text in row["numbers"]:
            with section.skipping(f"{label_of(value, at)}: {str(text)[:60]!r}"):
                numbers.append(phone_number(text))
        return row | {"numbers": numbers}

    section.read(said["callerGroups"], "groups", read)
    owner = {number: group for group, row in section.rows.items() for number in row["numbers"]}
    for group, row in section.rows.items():
        row["numbers"] = sorted({number for number in row["numbers"] if owner[number] == group})
    section.tables["registered_numbers"] = list(section.rows.values())
    if not section.kept:  # what bad groups have stays, and nobody knows how many that are
        section.counts["numbers"] = len(owner)
    return section


def read_rules(said: Mapping[str, Any]) -> Section:
    """The call actions; a rule's place in the list is its priority."""
    section = Section("call-actions")
    section.read(said["rules"], "rules", lambda rule, at: row_of(rule, RULE) | {"priority": at})
    extra = {}
    for key, default in ACTIONS.items():
        given = said.get(key)
        with section.skipping(key):
            extra[key] = row_of(fit(default if given is None else given), ACTION)
    section.tables = {"call_action_rules": list(section.rows.values()), "system_settings": extra}
    return section


def read_announcements(said: Mapping[str, Any]) -> Section:
    section = Section("announcements")

    def read(value: Row, _: int) -> Row:
        row = row_of(value, ANNOUNCEMENT)
        if row["audio_file_url"] is None and row["tts_text"] is None:
            raise BadItem("it has neither audioFileUrl nor ttsText")
        if row["updated_at"] is None:
            del row["updated_at"]  # what stands there stays
        return row

    section.read(said["announcements"], "announcements", read)
    section.tables["announcements"] = list(section.rows.values())
    return section


def read_exit(value: object) -> Row:
    """What a key leads to. An announcement or a flow that is not there is no reason to drop it."""
    row, options = row_of(value, EXIT), row_of(value, EXIT_OPTIONS)
    welcome = row["welcome"] if row["action_code"] == "VB" else None
    plays = row["action_code"] in ("AN", "VM", "VB")
    given = {name: option for name, option in options.items() if option is not None}
    text = json.dumps(given, ensure_ascii=False, separators=(",", ":")) if given else None
    return row | {"sound": (welcome or row["announcement"]) if plays else None, "tts_text": text}


def read_flows(said: Mapping[str, Any]) -> Section:
    """The flows. What they play is known only when the announcements are there: fill_flows. Of an
    exit that cannot be read, what is stored stays, if anything is."""
    section = Section("ivr-flows")

    def read(value: Row, at: int) -> Row:
        flow, label = row_of(value, FLOW) | row_of(value, MENU), label_of(value, at)
        exits: dict[str, Row] = {}
        stays = {""}
        for number, route in enumerate(flow["routes"], 1):
            with section.skipping(f"{label}, route {number}"):
                key = row_of(route, ROUTE)["key"]
                if key in exits:
                    raise BadItem(f"key {key!r} has a route already: the first one counts")
                stays.add(key)
                exits[key] = read_exit(route.get("destination"))
        given = value.get("fallbackAction")
        with section.skipping(f"{label}, fallbackAction"):
            exits[""] = read_exit(FALLBACK if given is None else given)
        stays -= exits.keys()
        return flow | {"stays": stays, "exits": {"": read_exit(FALLBACK)} | exits}

    section.read(said["flows"], "flows", read)
    for flow in section.rows.values():
        for way in ways_of(flow["id"], flow["stays"]):
            section.kept |= {way["id"], way["to_node_id"]}
    return section


def made(flow: str, role: str, key: str = "") -> str:
    """An id is a function of flow, role and key: a change of one route leaves all other rows as
    they are, also while a call is in them."""
    return str(uuid.uuid5(uuid.UUID(flow), f"{role} {key}".strip()))


def nodes_of(flow: Row, sounds: Sounds) -> Iterator[Row]:
    own, silence = flow["id"], (None, None)
    root, keypad = made(own, "announce"), made(own, "keypad")
    audio, text = sounds.get(flow["announcement"], silence)
    node: Row = dict.fromkeys(NODE)
    node |= {"flow_id": own, "timeout_sec": flow["timeout_sec"], "max_retries": flow["max_retries"]}
    first = {"id": root, "node_type": "ANNOUNCE", "depth": 0}
    yield node | first | {"audio_file_url": audio, "tts_text": None if audio else text}
    yield node | {"id": keypad, "parent_id": root, "node_type": "KEYPAD", "depth": 1}
    leaf = node | {"parent_id": keypad, "node_type": "EXIT", "depth": 2}
    for key, each in flow["exits"].items():
        audio, _ = sounds.get(each["sound"], silence)
        role = "exit" if key else "fallback"
        yield leaf | each | {"id": made(own, role, key), "audio_file_url": audio}


def ways_of(own: str, keys: Iterable[str]) -> Iterator[Row]:
    for key in keys:
        for kind in ("DTMF",) if key else ("TIMEOUT", "INVALID"):
            yield {
                "id": made(own, kind, key),
                "from_node_id": made(own, "keypad"),
                "input_type": kind,
                "dtmf_key": key or None,
                "to_node_id": made(own, "exit" if key else "fallback", key),
            }


def fill_flows(section: Section, sounds: Sounds) -> None:
    flows = section.rows.values()
    section.tables = {
        "ivr_flows": [{column: flow[column] for column in ("id", *FLOW)} for flow in flows],
        "ivr_nodes": [node for flow in flows for node in nodes_of(flow, sounds)],
        "ivr_transitions": [way for flow in flows for way in ways_of(flow["id"], flow["exits"])],
    }
    for flow in flows:
        plays = {flow["announcement"], *(each["sound"] for each in flow["exits"].values())}
        for lost in sorted(plays - {*sounds, None}):
            section.remark(flow["name"], f"there is no announcement {lost}: silence instead")


# Each section's address, the list that its answer must have, and who reads it. What refers to
# something is asked for before that: what is added between two questions is not missed.
SOURCES: Final = {
    "call-actions": ("/api/call-actions", "rules", read_rules),
    "number-groups": ("/api/number-groups", "callerGroups", read_groups),
    "ivr-flows": ("/api/ivr-flows/export", "flows", read_flows),
    "announcements": ("/api/announcements", "announcements", read_announcements),
}


def counted(counts: Mapping[str, int]) -> str:
    return ", ".join(count(number, word[:-1]) for word, number in counts.items())


# ==================================================================================================
# Settings pull: the tables
# Each statement finds the difference between what is wanted and what is there, and makes it: a row
# that is as it should be is not touched, and gets no new id.
# ==================================================================================================

# Ours: made with all the others.
MIGRATIONS[0] += """
-- What came back from the frontend: a row a section.
create table serversync.settings (
    section text primary key,
    position int not null,                 -- of those that are applied: flows play announcements
    counts jsonb not null default '{}',    -- what is in the tables, {"groups": 3, "numbers": 12}
    remarks jsonb not null default '[]',   -- [{item, reason, skipped}] of the last answer
    skipped int not null default 0,
    pulled_at timestamptz,
    changed_at timestamptz,
    error text,                            -- why the last answer was not applied
    held jsonb not null default '{}'       -- {counts, times, seconds, lost}, if it waits
) with (fillfactor = 50);
insert into serversync.settings (section, position)
values ('number-groups', 1), ('call-actions', 2), ('announcements', 3), ('ivr-flows', 4);

-- The announcements' audio: what is wanted, and what the agent itself put there.
create table serversync.audio_files (
    name text primary key,
    version text not null,                 -- the frontend's updatedAt
    fetched text,                          -- the version that is there
    tries int not null default 0,
    next_attempt_at timestamptz not null default now(),
    error text,
    digests text[] not null default '{}',  -- sha256 of what we put there, the newest first
    unwanted boolean not null default false  -- it goes when it is due
);
"""
_UPGRADED: Final = """
alter table serversync.settings drop digest, drop pulls, drop held_counts, drop held_times,
    drop held_seconds, add held jsonb not null default '{}';
alter table serversync.audio_files drop etag, drop fetched_at, drop unwanted,
    add digests text[] not null default '{}', add unwanted boolean not null default false;
update serversync.audio_files set digests = array(
    select f ->> 'sha256' from jsonb_array_elements(files) f where f ? 'sha256');
alter table serversync.audio_files drop files;
"""
MIGRATIONS.update({known: MIGRATIONS[known] + _UPGRADED for known in (1, 2, 3)})
# What is known of each section; the agent and a person pull one after the other.
SETTINGS_KNOWN: Final = """
select section, to_jsonb(s) from serversync.settings s order by position for update
"""
# How long a merge may wait for the backend, and take: calls go on meanwhile.
SETTINGS_BOUNDS: Final = "set local lock_timeout = '400ms'; set local statement_timeout = '8s'"
SETTINGS_SAVE: Final = """
update serversync.settings s
set pulled_at = now(), changed_at = case when %(changed)s then now() else s.changed_at end,
    counts = r.counts, remarks = r.remarks, skipped = r.skipped, error = r.error, held = r.held
from jsonb_populate_record(null::serversync.settings, %(row)s) r where s.section = %(section)s
"""
# A person says that a section may be as small as it is now: that is what the next is compared with.
SETTINGS_ACCEPT: Final = """
update serversync.settings set counts = held -> 'counts', held = '{}'
where section = %(section)s and held <> '{}' returning 1
"""
# What a section is compared with: what is in the backend's tables.
SETTINGS_THERE: Final = {
    "number-groups": """
select jsonb_build_object('groups', count(distinct group_id), 'numbers', count(*))
from registered_numbers where deleted_at is null and group_id is not null
""",
    "call-actions": "select jsonb_build_object('rules', count(*)) from call_action_rules",
    "announcements": "select jsonb_build_object('announcements', count(*)) from announcements",
    "ivr-flows": "select jsonb_build_object('flows', count(*)) from ivr_flows",
}
# The announcements as they are now: what flows play.
SOUNDS_THERE: Final = "select id::text, audio_file_url, tts_text from announcements"
# Numbers that are in no group any more are deleted softly, and come back under their old id. Those
# that never had a group stay, unless %(replace)s. Reads the whole table; row locks on what changes.
MERGE_NUMBERS: Final = """
with wanted as (
    select g.id as group_id, g.group_name, n.phone_number
    from jsonb_to_recordset(%(rows)s::jsonb) g (id uuid, group_name text, numbers text[])
    cross join lateral unnest(g.numbers) n (phone_number)
), once as (
    select distinct on (phone_number) id, phone_number from registered_numbers
    where deleted_at is not null order by phone_number, deleted_at desc, id
), changes as materialized (
    select case when w.phone_number is null then 'delete' when l.id is not null then 'update'
                when o.id is not null then 'revive' else 'insert' end as action,
           coalesce(l.id, o.id) as id, coalesce(w.phone_number, l.phone_number) as phone_number,
           w.group_id, w.group_name
    from wanted w
    full join (select * from registered_numbers where deleted_at is null) l
        on l.phone_number = w.phone_number
    left join once o on l.id is null and o.phone_number = w.phone_number
    where case when w.phone_number is null then l.group_id is not null or %(replace)s::boolean
               else (l.group_id, l.group_name) is distinct from (w.group_id, w.group_name) end
      and (l.group_id = any (%(kept)s::uuid[])) is not true
), updated as (
    update registered_numbers r
    set group_id = coalesce(c.group_id, r.group_id), updated_at = now(),
        group_name = coalesce(c.group_name, r.group_name), version = coalesce(r.version, 0) + 1,
        deleted_at = case when c.action = 'delete' then now() end
    from changes c where r.id = c.id
), inserted as (
    insert into registered_numbers
        (id, phone_number, group_id, group_name, version, created_at, updated_at)
    select gen_random_uuid(), phone_number, group_id, group_name, 1, now(), now() from changes
    where action = 'insert'
)
select action, count(*), (array_agg(phone_number::text order by phone_number))[1:1000]
from changes group by 1 order by 1
"""
# The other tables of rows. What is wanted (`r`) is laid over the row that is there (`t`); where
# that makes a difference it becomes `c`, with what each change brings with it. {columns} are those
# that are written. What is kept stays, by its own id or by {owner}'s. Reads the whole table; row
# locks on what changes.
MERGE_ROWS: Final = """
with wanted as (
    select (value ->> 'id')::uuid as id, value from jsonb_array_elements(%(rows)s::jsonb)
), changes as materialized (
    select case when t.id is null then 'insert' when r.id is null then 'delete' else 'update' end
               as action, c.*
    from wanted r full join {table} t on t.id = r.id
    cross join lateral jsonb_populate_record(t, r.value || jsonb_build_object('updated_at',
        coalesce(r.value -> 'updated_at', to_jsonb(now())),
        'version', coalesce((to_jsonb(t) ->> 'version')::int, 0) + 1)) c
    where (r.id is null or jsonb_populate_record(t, r.value) is distinct from t)
      and not array[t.id, {owner}] && %(kept)s::uuid[]
), deleted as (
    delete from {table} t using changes c where c.action = 'delete' and t.id = c.id
), updated as (
    update {table} t set ({columns}) = row (c.{of_changes})
    from changes c where c.action = 'update' and t.id = c.id
), inserted as (
    insert into {table} (id, created_at, {columns}) select c.id, now(), c.{of_changes}
    from changes c where c.action = 'insert'
)
select action, count(*), (array_agg(label order by label))[1:1000]
from (select action, concat_ws(' ', {label}) as label from changes) c group by 1 order by 1
"""
# One UPDATE: the other keys stay.
MERGE_EXTRA: Final = """
with changes as (
    update system_settings set extra = extra || %(rows)s::jsonb, updated_at = now()
    where id = 1 and jsonb_typeof(extra) = 'object'
      and extra || %(rows)s::jsonb is distinct from extra
    returning 1
)
select 'update', count(*), array['extra'] from changes having count(*) > 0
"""


def merge_rows(
    table: str, columns: Sequence[str], label: str = "name", owner: str = "null"
) -> dict[str, str]:
    of_changes = ", c.".join(columns)
    return {table: MERGE_ROWS.format(
        table=table, columns=", ".join(columns), of_changes=of_changes, label=label, owner=owner
    )}  # fmt: skip


# By the table. What others point at comes first. With a flow that goes all that is in it goes, by
# the backend's cascade; with one that is kept all that is in it stays.
MERGES: Final = {
    "number-groups": {"registered_numbers": MERGE_NUMBERS},
    "call-actions": merge_rows("call_action_rules", [*RULE, "priority", "updated_at"])
    | {"system_settings": MERGE_EXTRA},
    "announcements": merge_rows("announcements", [*ANNOUNCEMENT, "version"]),
    "ivr-flows": merge_rows("ivr_flows", [*FLOW, "updated_at"])
    | merge_rows("ivr_nodes", [*NODE, "updated_at"], "node_type, id", owner="t.flow_id")
    | merge_rows(
        "ivr_transitions",
        ["from_node_id", "input_type", "dtmf_key", "to_node_id"],
        "input_type, dtmf_key, id",
        owner="(select flow_id from ivr_nodes n where n.id = t.from_node_id)",
    ),
}
# The backend's dashboard reads the newest updated_at as the time of the last pull (without rules,
# that of the settings), and warns after ten minutes. Always the same row is touched, and brought
# back from a future that a wrong clock gave it.
HEARTBEAT: Final = """
with rules as (
    update call_action_rules set updated_at = now()
    where id = (select id from call_action_rules order by updated_at desc nulls last, id limit 1)
      and updated_at between now() - interval '5 minutes' and now() is not true
)
update system_settings set updated_at = now()
where id = 1 and updated_at between now() - interval '5 minutes' and now() is not true
"""

# Which files the announcements want. A new version is fetched at once.
AUDIO_WANTED: Final = f"""
insert into serversync.audio_files as f (name, version)
select substr(audio_file_url, length('{AUDIO_URL}') + 1),
       coalesce(to_jsonb(max(updated_at) at time zone 'UTC') #>> '{{}}', '') || '+00:00'
from announcements where audio_file_url ~ '^{AUDIO_URL}[^/%\\\\]+$' group by 1
on conflict (name) do update
set version = excluded.version, unwanted = false, tries = 0, error = null, next_attempt_at = now()
where (f.version, f.unwanted) is distinct from (excluded.version, false)
"""
# What nothing plays any more, no flow either that is kept as it was, goes in an hour: a call may
# just play it.
AUDIO_GONE: Final = f"""
update serversync.audio_files
set unwanted = true, tries = 0, error = null, next_attempt_at = now() + interval '1 hour'
where not unwanted and '{AUDIO_URL}' || name not in
    (select coalesce(audio_file_url, '') from announcements
     union select coalesce(audio_file_url, '') from ivr_nodes)
"""
# The file that is next, and in how many seconds. One that somebody deleted is not among %(there)s
# (null: nobody knows). A due time more than two hours ahead is a wrong clock's.
AUDIO_NEXT: Final = """
select name, version, digests, tries, unwanted, wait
from (select *, case when next_attempt_at > now() + interval '2 hours' then 0
                else greatest(0, extract(epoch from next_attempt_at - now())) end::float8 as wait
      from serversync.audio_files
      where unwanted or fetched is distinct from version or name <> all (%(there)s::text[])) f
order by wait, next_attempt_at, name limit 1
"""
# What we are about to put there, before it is there: after a kill between the two, or a power cut,
# it is still ours.
AUDIO_WRITING: Final = """
update serversync.audio_files set digests = (%(digest)s::text || digests)[1:10]
from (select set_config('synchronous_commit', 'on', true)) durable
where name = %(name)s returning digests
"""
AUDIO_FETCHED: Final = """
update serversync.audio_files
set fetched = %(version)s, digests = array[%(digest)s], tries = 0, error = null
where name = %(name)s
"""
AUDIO_FAILED: Final = """
update serversync.audio_files
set tries = tries + 1, error = %(error)s, next_attempt_at = now() + %(wait)s * interval '1 second'
where name = %(name)s
"""
AUDIO_FORGET: Final = "delete from serversync.audio_files where name = %(name)s"


class Tables(Protocol):
    """The database, by the agent's connection or a person's."""

    def run(self, sql: str, /, **params: Any) -> list[tuple[Any, ...]]: ...

    def session(self) -> contextlib.AbstractContextManager[psycopg.Connection[Any]]: ...


def get(frontend: Frontend, path: str) -> Steps[Answer]:
    """A page of the settings."""
    return frontend.settings.exchange(Outgoing("GET", path, {}, 10.0, answer_max=SETTINGS_MAX))


def tried(conn: psycopg.Connection[Any], sql: str) -> list[tuple[Any, ...]] | None:
    """What it finds, in a savepoint of its own; None where a table or a right is missing."""
    with contextlib.suppress(psycopg.Error), conn.transaction():
        found = conn.execute(sql)
        return found.fetchall() if found.description else []
    return None


class Pull:
    """One snapshot: fetched request by request, then applied at once."""

    def __init__(self, config: Config, frontend: Frontend, tables: Tables) -> None:
        self.config, self.frontend, self.tables = config, frontend, tables
        self.sections: dict[str, Section] = {}

    def fetch(self) -> Steps[bool]:
        """One request; True when that was the last one. NotNow: the frontend gives none."""
        name = next(name for name in SOURCES if name not in self.sections)
        path, key, read = SOURCES[name]
        answer = yield from get(self.frontend, path)
        self.sections[name] = read(settings_answer(key, answer))
        return len(self.sections) == len(SOURCES)

    def apply(self, elapsed: float = 0.0, really: bool = True) -> list[Section]:
        """Merges all that is not held, in one transaction. (Not really: then nothing stays.)"""
        with self.tables.session() as conn, conn.transaction() as snapshot:
            conn.execute(SETTINGS_BOUNDS)
            known = dict(conn.execute(SETTINGS_KNOWN).fetchall())
            sections = [self.sections[name] for name in known]
            stored = {name: tried(conn, sql) or [({},)] for name, sql in SETTINGS_THERE.items()}
            for section in sections:
                section.known = known[section.name]  # without counts: it was never applied
                section.there = section.known["counts"] or stored[section.name][0][0]
            # All that had rows come empty together: nobody wishes that.
            had = [section for section in sections if any(section.there.values())]
            lost = bool(had) and not any(any(section.counts.values()) for section in had)
            for section in had:
                section.hold(elapsed, lost)
            lost = any(section.held.get("lost") for section in had)
            for section in sections:
                if section.name == "ivr-flows":
                    fill_flows(section, self._sounds(conn))
                rows = [*stored[section.name][0][0].values(), *section.counts.values()]
                if lost and not section.held and not any(rows):
                    section.error = "it is empty, and waits with what is held back"
                elif not section.held:
                    self._merge(conn, section)
                saved = {name: getattr(section, name) for name in ("remarks", "skipped", "held")}
                saved |= {"counts": section.there, "error": section.error or None}
                about = {"section": section.name, "changed": bool(section.changes)}
                conn.execute(SETTINGS_SAVE, about | {"row": json.dumps(saved)})
            for last in (AUDIO_WANTED, AUDIO_GONE, HEARTBEAT):
                tried(conn, last)
            if not really:
                raise psycopg.Rollback(snapshot)
        return sections

    def _merge(self, conn: psycopg.Connection[Any], section: Section) -> None:
        """A section in a savepoint of its own: what cannot be stored leaves it as it was."""
        params = {"kept": list(section.kept), "replace": self.config.local_numbers == "replace"}
        changes = []
        try:
            with conn.transaction():
                for name, sql in MERGES[section.name].items():
                    rows = json.dumps(section.tables[name])
                    changes += [(name, *row) for row in conn.execute(sql, params | {"rows": rows})]
                [(section.there,)] = conn.execute(SETTINGS_THERE[section.name])
            section.changes = changes
        except psycopg.Error as error:
            refused = isinstance(error, psycopg.errors.InsufficientPrivilege)
            why = f"the database refuses it: {error.diag.message_primary or error}"
            section.error = clean(why + (": run: sudo serversync setup" if refused else ""))

    def _sounds(self, conn: psycopg.Connection[Any]) -> Sounds:
        """As the announcements stand now; where they cannot be read, as they came."""
        rows, came = tried(conn, SOUNDS_THERE), self.sections["announcements"].rows
        if rows is not None:
            return {row[0]: (row[1], row[2]) for row in rows}
        return {own: (row["audio_file_url"], row["tts_text"]) for own, row in came.items()}


# ==================================================================================================
# Settings pull: the announcements' audio
# One file at a time, streamed beside its place and renamed into it. What the agent did not write it
# neither overwrites nor deletes: ours is what has one of our digests.
# ==================================================================================================

AUDIO_MAX: Final = 10 * 1024 * 1024
AUDIO_SEC: Final = 524.0  # slower than 20 kB/s is given up, and tried again later
STRANGER: Final = "a file of this name that we did not write is there"


@dataclass(frozen=True)
class AudioFile:
    """A row of serversync.audio_files: a file that is wanted, or must go."""

    name: str
    version: str
    digests: list[str]  # of what we put there
    tries: int
    unwanted: bool
    wait: float


def check_audio(file: io.BufferedRandom | io.BufferedReader) -> str:
    """RIFF….WAVE, and as long as it says of itself; returns its digest."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    head = file.read(12)
    if head[:4] != b"RIFF" or head[8:] != b"WAVE" or size < 44:
        raise BadItem("what came is no WAV file")
    said = int.from_bytes(head[4:8], "little") + 8
    if said > size and said < 0x7FFFFF00:  # a recorder into a pipe cannot know
        raise BadItem(f"what came is cut: {size} of {said} bytes")
    return digest_of(file)


def digest_of(file: io.BufferedRandom | io.BufferedReader) -> str:
    file.seek(0)
    return hashlib.file_digest(file, "sha256").hexdigest()


class Audio:
    """Brings and removes the announcements' audio, one file at a time."""

    def __init__(self, frontend: Frontend, tables: Tables, path: str) -> None:
        # No kept connection: what fails on one is tried again, and would be in the file twice.
        self.wire = Wire(frontend.config, frontend.settings.process, keep=False)
        self.tables, self.path = tables, path

    def next(self) -> AudioFile | None:
        there = None
        with contextlib.suppress(OSError):
            there = [name.decode(errors="replace") for name in os.listdir(os.fsencode(self.path))]
        rows = self.tables.run(AUDIO_NEXT, there=there)
        return AudioFile(*rows[0]) if rows else None

    def handle(self, file: AudioFile) -> Steps[None]:
        """One file, at most one request. BadItem: this one not; NotNow: none."""
        try:
            with held(os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)) as folder:
                self._sweep(folder)
                ours = self.is_ours(folder, file)
                if file.unwanted:
                    self._remove(folder, file, bool(ours))
                elif ours is False:
                    raise BadItem(STRANGER)
                else:
                    yield from self._fetch(folder, file)
        except OSError as error:
            raise BadItem(f"{self.path}: {error.strerror or error}") from None

    def failed(self, file: AudioFile, reason: str) -> str:
        """It waits; returns why, as it is stored."""
        error = clean(reason)
        wait = backoff(file.tries + 1, 0.5 + random.random() / 2)
        self.tables.run(AUDIO_FAILED, name=file.name, error=error, wait=wait)
        return error

    def _sweep(self, folder: int) -> None:
        """What a kill left behind; not what a command is just fetching."""
        for name in os.listdir(folder):
            if name.startswith(TEMPORARY):
                with contextlib.suppress(OSError):  # another's, or a directory
                    status = os.stat(name, dir_fd=folder, follow_symlinks=False)
                    if abs(time.time() - status.st_mtime) > 60:
                        os.unlink(name, dir_fd=folder)

    @staticmethod
    def is_ours(folder: int, file: AudioFile) -> bool | None:
        """Whether what stands there is what we wrote; None: nothing stands there."""
        try:
            fd = os.open(file.name, _OPEN_FILE, dir_fd=folder)
        except FileNotFoundError:
            return None
        except OSError:
            return False  # a link, not ours to read
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size > AUDIO_MAX:
            os.close(fd)
            return False
        with open(fd, "rb") as there:
            return digest_of(there) in file.digests

    def _fetch(self, folder: int, file: AudioFile) -> Steps[None]:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        temporary = TEMPORARY + uuid.uuid4().hex
        # The unit's UMask= is 0077, and a file of mode 0600 would void the directory's default ACL.
        fd = os.open(temporary, flags, 0o644, dir_fd=folder)
        try:
            with open(fd, "w+b") as copy:
                os.fchmod(fd, 0o644)
                size = yield from self._receive(file, copy)
                digest = check_audio(copy)
                os.fsync(fd)
            # Before it is there: a kill between the two must not make a stranger of it, nor of the
            # one that is there.
            [(digests,)] = self.tables.run(AUDIO_WRITING, name=file.name, digest=digest)
            if self.is_ours(folder, replace(file, digests=digests)) is False:
                raise BadItem(STRANGER)
            os.rename(temporary, file.name, src_dir_fd=folder, dst_dir_fd=folder)
            os.fsync(folder)
            self.tables.run(AUDIO_FETCHED, name=file.name, version=file.version, digest=digest)
        finally:
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=folder)
        text = f"announcement audio {file.name} fetched ({human(size)})"
        say(logging.INFO, "audio_fetched", text, FILE=file.name)

    def _receive(self, file: AudioFile, copy: io.BufferedRandom) -> Steps[int]:
        def take(piece: bytes) -> None:
            try:
                copy.write(piece)
            except OSError as error:
                raise BadItem(f"it cannot be written: {error.strerror}") from None

        path, headers = AUDIO_URL + quote(file.name), {"Accept": "*/*"}
        request = Outgoing("GET", path, headers, AUDIO_SEC, answer_max=AUDIO_MAX, sink=take)
        answer = yield from self.wire.exchange(request)
        if answer.status in (404, 405):
            raise BadItem(f"the frontend does not have it yet: HTTP {answer.status}")
        if answer.status != 200 or not answer.complete:
            raise NotNow(classify(answer, time.time()))
        return copy.tell()

    def _remove(self, folder: int, file: AudioFile, ours: bool) -> None:
        if ours:
            os.unlink(file.name, dir_fd=folder)
            os.fsync(folder)
            text = f"announcement audio {file.name} removed: unreferenced for an hour"
            say(logging.INFO, "audio_removed", text, FILE=file.name)
        self.tables.run(AUDIO_FORGET, name=file.name)


# ==================================================================================================
# Settings pull: in the agent's loop
# One request a turn, beside the deliveries, and its own backoff: what goes wrong here is
# no outage of the deliveries.
# ==================================================================================================


class Settings(Job):
    """The pull, one request a turn. A restart may forget what it knows."""

    def __init__(self, agent: Agent) -> None:
        super().__init__(agent)
        self.tries = 0
        self.trouble: Verdict | None = None
        self.since = 0.0

    def reload(self) -> None:
        self.tries = 0
        self.close()  # another frontend, perhaps

    def told(self) -> list[tuple[str, str]]:
        outages = [each.outage for each in self.agent.health.frontend if each.outage]
        if self.trouble is None or not all(outage.by_entries for outage in outages):
            return []  # that nothing gets through is told already
        now = time.time()
        since = clock(now - (time.monotonic() - self.since), now)
        return [("waiting", f"no settings since {since}: {self.trouble.reason[:100]}")]

    def published(self) -> dict[str, object]:
        since = time.time() - (time.monotonic() - self.since)
        trouble = self.trouble and {"code": self.trouble.code, "reason": self.trouble.reason}
        return {"settings": {"trouble": trouble and trouble | {"since": since}}}

    def turns(self) -> Steps[None]:
        agent, finished = self.agent, 0.0
        while True:
            interval = agent.config.frontend_sync_interval_sec
            if agent.once or not interval:
                self.trouble = None
                yield Wait(float("inf"))
                continue
            yield AT_ONCE
            yield from agent.health.pause()
            began, jitter = time.monotonic(), random.random()
            # What starts or fails together, as after a power cut, does not stay together.
            apart, wait = jitter * min(interval, 300.0), 0.0
            try:
                yield from self.pull(began - finished if finished else 0.0)
                apart = 0.0 if finished else apart
                self.tries, finished = 0, began
            except (NotNow, psycopg.Error) as error:
                self.tries += 1
                wait = backoff(self.tries, jitter, self._failed(error))
            yield from agent.health.pause(began + max(interval + apart, wait) - time.monotonic())

    def pull(self, elapsed: float) -> Steps[None]:
        agent = self.agent
        pull = Pull(agent.config, agent.frontend, agent.session)
        while not (yield from pull.fetch()):
            yield from agent.health.pause()
        sections = pull.apply(elapsed)
        for section in sections:
            tell(section)
        agent.store.changed = True  # the sentence says what is held
        for job in agent.jobs:
            if isinstance(job, Announcements):
                job.wake()
        if self.trouble is not None:
            lasted = time.monotonic() - self.since
            say(logging.INFO, "recovered", f"settings: recovered after {lasted:.0f} s")
            self.repeats.over("settings")
            self.trouble = None

    def _failed(self, error: NotNow | psycopg.Error) -> float:
        """Said when it changes; never an outage of the deliveries, nor charged to them."""
        if not isinstance(error, NotNow):
            text = f"the database refuses the settings: {error.diag.message_primary or error}"
            error = NotNow(Verdict(Fate.WAITS, "DATABASE", text))
        if self.trouble is None:
            self.since = time.monotonic()
        self.trouble = verdict = replace(error.verdict, reason=clean(str(error)))
        text = f"no settings now, the last good ones stay: {verdict.reason}"
        more = {"ERROR_CODE": verdict.code, "HTTP_STATUS": verdict.status}
        self.repeats.say("settings", verdict.code, logging.WARNING, "settings_failed", text, **more)
        return verdict.retry_after or 0.0


class Announcements(Job):
    """Their audio, a file at a time."""

    def reload(self) -> None:
        self.close()

    def turns(self) -> Steps[None]:
        agent, repeats, tries = self.agent, self.repeats, 0
        audio = Audio(agent.frontend, agent.session, agent.config.announcement_audio_dir)
        while True:
            yield AT_ONCE
            yield from agent.health.pause()
            on = agent.config.frontend_sync_interval_sec and not agent.once
            file = audio.next() if on else None
            if file is None or file.wait > 0:
                yield Wait(time.monotonic() + file.wait if file else float("inf"))
                continue
            about = f"audio {file.name}"
            try:
                yield from audio.handle(file)
                repeats.over(about)
                tries = 0
            except (BadItem, NotNow) as why:
                error = audio.failed(file, str(why))
                text = f"announcement {about} has to wait: {error}"
                repeats.say(about, error, logging.WARNING, "audio_failed", text, FILE=file.name)
                if isinstance(why, NotNow):  # of all files: an outage, a token
                    tries += 1
                    wait = backoff(tries, random.random(), why.verdict.retry_after or 1.0)
                    yield from agent.health.pause(wait)


def tell(section: Section) -> None:
    """What changed with this pull; what is as it was before is not said again."""
    name, known, about = section.name, section.known, f"settings: {section.name}"
    if section.changes:
        text = f"{about} changed: {changes_text(section.changes)}"
        say(logging.INFO, "settings_changed", text, SECTION=name)
    if section.skipped and section.remarks != known["remarks"]:
        text = f"{about}: {count(section.skipped, 'item')} skipped: {remarks_text(section.remarks)}"
        say(logging.WARNING, "settings_skipped", text, SECTION=name)
    if section.error and section.error != known["error"]:
        text = f"{about} cannot be applied: {section.error}"
        say(logging.WARNING, "settings_failed", text, SECTION=name)
    if section.held and not known["held"]:
        text = f"{about} held back: {section.why}; if that is meant: {accept_hint(name)}"
        say(logging.WARNING, "settings_held", text, SECTION=name)
    elif known["held"] and not section.held:
        say(logging.INFO, "recovered", f"{about} is no longer held back", SECTION=name)


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
CONSOLE_LIMIT: Final = 5  # seconds to connect

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
# Ours, exactly: another one of the same name may be chosen by a call that casts nothing.
_ENQUEUES: Final = f"""
from pg_proc where proname = 'serversync_enqueue' and (
    replace(oidvectortypes(proargtypes), '"', '') = 'text, uuid, jsonb, text'
    and (proowner, pronamespace) in (select relowner, relnamespace from pg_class
                                     where oid = {OUTBOX}))"""
ENQUEUE_STATE: Final = f"select exists (select {_ENQUEUES})"
ENQUEUE_OTHERS: Final = f"""
select format('%s of role %s', oid::regprocedure, pg_get_userbyid(proowner)) {_ENQUEUES} is not true
"""
OPTIONAL.append(("enqueue", ENQUEUE_STATE, [CREATE_ENQUEUE]))
BY_HAND: Final = "what was pruned cannot be retried, nothing be enqueued by hand"
ALL_RIGHTS: Final = "select, insert, update, delete"
NEEDS.extend([
    ("sync_outbox", "insert", False, BY_HAND),
    ("sync_outbox", "usage", False, BY_HAND),
    ("serversync_keys", ALL_RIGHTS, False, "no entry has an idempotency key"),
    ("registered_numbers", "select, insert, update", False, "number groups are not applied"),
    ("call_action_rules", ALL_RIGHTS, False, "call actions are not applied"),
    ("system_settings", "update (extra), update (updated_at)", False, "defaults are not applied"),
    ("announcements", ALL_RIGHTS, False, "announcements are not applied"),
    ("ivr_flows", ALL_RIGHTS, False, "IVR flows are not applied"),
    ("ivr_nodes", ALL_RIGHTS, False, "IVR flows are not applied"),
    ("ivr_transitions", ALL_RIGHTS, False, "IVR flows are not applied"),
])  # fmt: skip
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
              from sync_outbox where processed_at is null group by 1) t),
    'recordings', (
        select json_build_object('waiting', count(*),
                   'waiting_bytes', sum(serversync.file_size(coalesce(serversync.to_uuid(coalesce(
                       o.payload->>'recordingId', o.payload->>'recording_id')), o.entity_id))),
                   'deletions_waiting', (select count(*) from serversync.uploads))
        from sync_outbox o
        where {PENDING_FILE} and {READABLE}),
    'deliveries', (
        select json_object_agg(name, d)
        from (values ('hour', interval '1 hour'), ('day', '1 day')) spans (name, long)
        cross join lateral (
            select coalesce(sum(entries) filter (where kind = 'entries'), 0) as entries,
                   coalesce(sum(entries) filter (where kind = 'file'), 0) as files,
                   coalesce(sum(bytes), 0) as bytes
            from serversync.deliveries where started_at > now() - long) d))
"""
# What health is told by: what waits, by its code, and which of it is tried first; what needs a
# person; what the last minute of deliveries delivered. No lock; indexes, but for the letters.
HEALTH: Final = f"""
select json_build_object(
    'reasons', (
        select coalesce(json_object_agg(code, n order by code), '{{}}')
        from (select code, count(*) as n from serversync.waiting w where {HAS_ENTRY} group by 1) c),
    'first', (
        select json_build_object('why', left(reason, 200),
                                 'at', extract(epoch from next_attempt_at)::float8)
        from serversync.waiting w
        where code <> all ('{{WAITS_FOR,NOT_READY}}') and isfinite(next_attempt_at) and {HAS_ENTRY}
        order by next_attempt_at limit 1),
    'dead_letters', (
        select json_object_agg(s.status, coalesce(d.n, 0))
        from unnest('{{PENDING,RETRYING,RESOLVED,DEAD}}'::text[]) s(status)
        left join (select status, count(*) as n from serversync.dead_letters group by 1) d
            using (status)),
    'deletions_failed', (select count(*) from serversync.uploads where tries > 0),
    'held', (
        select coalesce(json_object_agg(section, array[counts, held -> 'counts']), '{{}}')
        from serversync.settings where held <> '{{}}'),
    'last', (
        select json_build_object(
            'entries', coalesce(sum(entries) filter (where kind = 'entries'), 0),
            'files', coalesce(sum(entries) filter (where kind = 'file'), 0),
            'at', max(started_at + duration_ms * interval '1 ms'))
        from serversync.deliveries
        where started_at > (select max(started_at) from serversync.deliveries) - interval '1 min'
        having count(*) > 0))
"""
# Whether anybody holds the sender's lock.
IS_LOCKED: Final = """
select min(pid) from pg_locks l join pg_database b on b.oid = l.database
where l.locktype = 'advisory' and l.granted and b.datname = current_database()
  and (l.classid::bigint << 32 | l.objid::bigint) = %(key)s
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
                   'skipped', skipped, 'remarks', remarks, 'held', held -> 'counts', 'error', error,
                   'held_times', coalesce((held -> 'times')::int, 0), 'held_seconds',
                   coalesce((held -> 'seconds')::float8, 0), 'pulled_at', pulled_at,
                   'changed_at', changed_at) order by position)
        from serversync.settings),
    'pulled_at', (select max(pulled_at) from serversync.settings),
    'items', (
        select coalesce(json_object_agg(key, value order by position), '{}')
        from serversync.settings, jsonb_each(counts) where pulled_at is not null),
    'audio', (
        select json_build_object(
            'files', count(*) filter (where fetched is not null and not unwanted),
            'waiting', count(*) filter (where not unwanted and fetched is distinct from version),
            'problems', coalesce(json_object_agg(name, error order by name)
                                     filter (where error is not null and n <= 20), '{}'))
        from (select *, row_number() over (partition by error is null order by name) as n
              from serversync.audio_files) f))
"""
COUNTERS: Final = """
select coalesce(json_object_agg(name, by_label), '{}')
from (select name, json_object_agg(label, value) as by_label
      from serversync.counters group by name) c
"""
TOPICS: Final = """
select json_build_object('topic', original_topic, 'total', count(*),
           'pending', count(*) filter (where status = 'PENDING'),
           'retrying', count(*) filter (where status = 'RETRYING'),
           'resolved', count(*) filter (where status = 'RESOLVED'),
           'dead', count(*) filter (where status = 'DEAD'))
from serversync.dead_letters group by original_topic order by original_topic
"""
# A page of letters, newest first; or one by its id. A large payload is not shown whole.
LETTERS: Final = """
select json_build_object('id', id, 'original_topic', original_topic, 'error_message', error_message,
           'retry_count', retry_count, 'max_retries', max_retries,
           'payload', case when bytes <= %(most)s then text end, 'status', status,
           'created_at', created_at, 'updated_at', updated_at, 'last_retry_at', last_retry_at,
           'outbox_id', outbox_id, 'entity_id', entity_id, 'error_code', error_code,
           'http_status', http_status, 'attempts', attempts, 'payload_bytes', bytes)
from (select * from serversync.dead_letters
      where (%(topic)s::text is null or original_topic = %(topic)s)
        and (%(id)s::uuid is null or id = %(id)s::uuid)
        and (%(resolved)s or status <> 'RESOLVED')
      order by created_at desc, id limit %(size)s offset %(skip)s) d
cross join lateral (  -- of what PostgreSQL cannot write out, only the size on its disk
    select case when error_code <> 'ENTRY_UNREADABLE' then payload::text end as text) t
cross join lateral (select coalesce(octet_length(text), pg_column_size(payload)) as bytes) b
order by created_at desc, id
"""
# What they have in common, where they are many.
LETTERS_BY_CODE: Final = """
select error_code, original_topic, count(*)
from serversync.dead_letters
where (%(topic)s::text is null or original_topic = %(topic)s)
  and (%(resolved)s or status <> 'RESOLVED')
group by 1, 2 order by 3 desc, 1, 2 limit 20
"""
# Those that may be meant: by the seq that the journal shows, or by the beginning of the id.
LETTERS_NAMED: Final = """
select id::text, outbox_id from serversync.dead_letters
where outbox_id::text = %(name)s::text
   or (starts_with(id::text, %(name)s::text) and length(%(name)s::text) >= 4)
order by outbox_id limit 5
"""
HAS_TYPE: Final = "select 1 from sync_outbox where entity_type = %(topic)s limit 1"
# One that is a dead letter itself overtakes nothing.
NOT_GIVEN_UP: Final = """not exists (
          select from serversync.dead_letters d
          where d.outbox_id = o.id and d.entity_id = o.entity_id
            and d.status in ('PENDING', 'DEAD'))"""
# For those that are picked, to go out again, the latest entry of the same entity behind them.
NEWER: Final = f"""newer as (
    select p.seq, max(o.id) as newest
    from picked p
    join sync_outbox o on o.entity_id = p.entity_id and o.entity_type = p.entity_type
                      and o.id > p.seq
    where o.id > (select min(seq) from picked)
      and {NOT_GIVEN_UP}
    group by 1
)"""
# What was processed before it may be gone.
PRUNED: Final = """to_timestamp(
    coalesce((select value from serversync.counters where name = 'pruned_until'), 0))"""
# Where the planner takes thousands of rows for one, it would look for newer entries row by row.
NO_LOOPS: Final = "set enable_nestloop = off"
# Letters that a person wants to send again, with what speaks against it. The rows are locked: two
# people, or a person and the agent, decide one after the other.
#   taken      its id belongs to another entry (the table was emptied, and counted from 1 again)
#   overtaken  by a later entry of the same entity that was sent, or will be; not by a dead letter
#   unknown    so old that a later one may have been pruned
JUDGE_LETTERS: Final = f"""
with picked as materialized (
    select *, outbox_id as seq, original_topic as entity_type from serversync.dead_letters
    where (%(ids)s::uuid[] is null or id = any (%(ids)s::uuid[]))
      and (%(topic)s::text is null or original_topic = %(topic)s)
      and (%(ids)s::uuid[] is not null or status in ('PENDING', 'DEAD'))
      and outbox_id > %(after)s
    order by outbox_id limit 5000 for update
), {NEWER}
select p.id::text, seq, case
           when exists (select from sync_outbox o where o.id = seq and o.entity_id <> p.entity_id)
               then 'taken'
           when p.status in ('RESOLVED', 'RETRYING') then p.status
           when %(force)s then null
           when newest is not null then 'overtaken'
           when p.created_at < {PRUNED} then 'unknown'
           when p.retry_count >= p.max_retries then 'used_up' end,
       newest, p.max_retries
from picked p left join newer n using (seq) order by seq
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
SEND_LAST: Final = f"""
with old as (
    select entity_type, entity_id, min(id) as id from sync_outbox
    where id = any (%(seqs)s::bigint[]) group by 1, 2
), newer as (
    select o.id, o.processed_at from sync_outbox o join old using (entity_type, entity_id)
    where o.id > old.id and o.id <> all (%(seqs)s::bigint[])
      and (o.processed_at is null or o.processed_at >= %(began)s::timestamptz)
      and {NOT_GIVEN_UP}
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
REPLAY: Final = f"""
with calls as materialized (
    select serversync.to_uuid(%(call)s::text) as call
    union all select entity_id from sync_outbox
    where entity_type = 'call_log'
      and %(call)s::text in (payload->>'sipCallId', payload->>'externalCallId')
), picked as materialized (
    select id as seq, entity_type, entity_id, processed_at,
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
), {NEWER}, judged as materialized (
    select seq, case
        when p.processed_at is null then 'pending'
        when exists (select from serversync.dead_letters d
                     where d.outbox_id = seq and d.entity_id = p.entity_id
                       and d.status <> 'RESOLVED') then 'letter'
        when p.entity_type = 'recording_file' and (
             serversync.uploaded(p.recording) is not null
             or exists (select from serversync.deliveries d where d.entity_id = p.recording))
             then 'delivered'
        when %(force)s then 'again'
        when newest is not null then 'overtaken'
        when p.processed_at < {PRUNED} then 'unknown'
        else 'again' end as verdict
    from picked p left join newer using (seq)
), revived as (
    update sync_outbox o set processed_at = null from judged j
    where %(yes)s and j.verdict = 'again' and o.id = j.seq and o.processed_at is not null
    returning o.id
)
select verdict, count(*), max(seq), array_agg(seq) from judged group by 1
"""
PRUNABLE: Final = """
select count(*) from sync_outbox
where processed_at < now() - %(days)s::float8 * interval '1 day'
  and entity_type <> all (%(keep)s::text[])
"""
ENQUEUE: Final = """
select serversync_enqueue(%(type)s::text, %(id)s::uuid, %(payload)s::jsonb,
                          %(idempotency_key)s::text)
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


def psql(conn: psycopg.Connection[Any], sql: str, *names: str, user: str = "") -> str:
    """A line to paste: this SQL, with these names, as our role, so that what it has put in the way
    is run by nobody else; what a superuser must do names no more than catalogs. (The database's
    name is written as a connection string: else one that looks like one would be one.)"""
    named = psycopg.sql.SQL(sql).format(*map(psycopg.sql.Identifier, names)).as_string(conn)
    keys = ("host", "port") if user else ("host", "port", "user")
    where = {key: value for key, value in conn.info.get_parameters().items() if key in keys}
    if user and is_loopback(where.get("host", "")):
        del where["host"]  # the Unix socket knows who it is
    url = make_conninfo(**where, dbname=conn.info.dbname)
    who = user or f"#{os.geteuid()}"  # as sudo takes it, where there is no name, in a container
    with contextlib.suppress(KeyError):
        who = user or pwd.getpwuid(os.geteuid()).pw_name
    return shlex.join(["sudo", "-u", who, "psql", "-d", url, "-c", named])


def not_there(error: psycopg.Error) -> Unavailable:
    """A connection that could not be made; whom the database does not know it may know as root."""
    text, hint = str(error).strip(), ""
    if os.geteuid() != 0 and re.search(r'authentication failed|role "', text):
        user = service_user(os.environ)
        hint = f": run: {as_root()}"
        if user and user.pw_uid == os.geteuid():  # root has become it: that would end here again
            hint = f": run: {MEND}" if "does not exist" in text else ""
    return Unavailable(f"the database is not there: {text}{hint}")


class Console:
    """A person's connection: short, without the lock."""

    def __init__(self, config: Config, name: str) -> None:
        self._silence = threading.Timer(DB_DEADLINE, int)  # none yet
        # For the requests of the agent's that are settled: an entry's, and an empty one.
        self.patience = 2 * config.timeout_sec + 1
        try:
            self.conn = psycopg.connect(
                config.database_url,
                autocommit=True,
                connect_timeout=CONSOLE_LIMIT,
                tcp_user_timeout=20_000,
                client_encoding="UTF8",
                application_name=f"serversync {name}",
            )
            self.psql = partial(psql, self.conn)
            self._set_deadline()
            self.conn.execute(SESSION)
            self.conn.execute("set lock_timeout = '5s'")  # a person waits where the agent goes on
        except psycopg.Error as error:
            if hasattr(self, "conn"):
                self.__exit__()
            raise not_there(error) from None

    def _set_deadline(self) -> None:
        """No statement waits longer for a server that is silent: statement_timeout is the server's,
        and tcp_user_timeout only sees a dead line. (A thread: signals are the main thread's.)"""
        self._silence.cancel()
        self._silence = threading.Timer(DB_DEADLINE, shut_socket, (self.conn.fileno(),))
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

    @contextlib.contextmanager
    def session(self) -> Iterator[psycopg.Connection[Any]]:
        """The connection for several statements."""
        self._set_deadline()
        try:
            yield self.conn
        except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName) as error:
            missing = SCHEMA_MISSING if "serversync." in str(error) else str(error)
            raise Unavailable(missing) from None
        except psycopg.errors.InsufficientPrivilege as error:
            raise Unfit(f"{error.diag.message_primary}: run: sudo serversync setup") from None
        finally:  # between two statements silence is no fault; in a transaction a COMMIT follows
            if not self.conn.info.transaction_status:
                self._silence.cancel()

    def __enter__(self) -> Console:
        return self

    def __exit__(self, *_: object) -> None:
        self._silence.cancel()
        self.conn.close()


# --- looking --------------------------------------------------------------------------------------


# Of all that is told the worst decides, and stands first.
STATES: Final = ("stopped", "outage", "person", "waiting", "busy", "good")
PATIENT: Final = ("WAITS_FOR", "NOT_READY")  # these did not fail
CORRUPT_CODES: Final = ("ROW_CORRUPT", "SESSION_LOST")  # nobody but a person can mend these


def outages_told(
    outages: Iterable[Mapping[str, Any]], now: float
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """One for each reason: mostly it is the same for both endpoints. Each route has its own."""
    named = {"entries": "no entry", "files": "no recording"}
    same: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for outage in outages:
        route = "" if outage["endpoint"] in named else outage["endpoint"]
        same.setdefault((route, outage["reason"]), []).append(outage)
    for (route, reason), those in same.items():
        what = "nothing" if those[1:] else named.get(those[0]["endpoint"], f"nothing by {route}")
        times = (min(each[key] for each in those) for key in ("since", "next_try_at"))
        since, due = (datetime.fromisoformat(at).timestamp() for at in times)
        text = f"{what} gets through since {clock(since, now)}: {reason[:200]}"
        yield f"{text}; next try {clock(max(due, now), now)}", those[0]


def health_of(
    found: Mapping[str, Any] | None, outages: Iterable[Mapping[str, Any]],
    others: Iterable[tuple[str, str]], now: float, pending: int = 0,
) -> dict[str, str]:  # fmt: skip
    """Is all through that should be, and if not, why? By what HEALTH found (None: nobody knows),
    the outages, and what else there is to tell, with its state. The sentence is the same wherever
    people see one."""
    told = [*others, *(("outage", text) for text, _ in outages_told(outages, now))]
    if found is not None:
        codes, stay = found["reasons"], count(found["deletions_failed"], "uploaded recording")
        corrupt = sum(codes.get(code, 0) for code in CORRUPT_CODES)
        letters_ = open_letters(found)
        told += [("person", needs_you(letters_, "dead letter"))] if letters_ else []
        told += [("person", needs_you(corrupt, "corrupt row"))] if corrupt else []
        told += [("person", f"{stay} cannot be deleted")] if found["deletions_failed"] else []
        for name, counts in found["held"].items():
            told.append(("person", f"settings: {name} held back: {held_text(*counts)}"))
        if all(state != "outage" for state, _ in told):  # else it is that for which they wait
            rows = sum(codes.values()) - corrupt
            retrying = rows - sum(codes.get(code, 0) for code in PATIENT)
            told += waits_told(max(pending - corrupt, rows) - retrying, retrying, found, now)
        told = told or [("good", delivered(found["last"], now))]
    told.sort(key=lambda each: STATES.index(each[0]))
    sentence = "; ".join(text for _, text in told)[:600]
    return {"state": told[0][0] if told else "busy", "sentence": sentence or "starting"}


def open_letters(found: Mapping[str, Any]) -> int:
    """Those about which a person has to decide."""
    return int(found["dead_letters"]["PENDING"] + found["dead_letters"]["DEAD"])


def needs_you(number: int, what: str) -> str:
    return f"{count(number, what)} {'needs' if number == 1 else 'need'} you"


def waits_told(
    waiting: int, retrying: int, found: Mapping[str, Any], now: float
) -> Iterator[tuple[str, str]]:
    parts = [f"{waiting} waiting"] if waiting else []
    if retrying:
        first = found["first"] or {"why": "it failed", "at": now}
        text = f"{retrying} retrying: {first['why']}"
        parts.append(f"{text}; next try {clock(max(first['at'], now), now)}")
    if parts:
        yield "waiting" if retrying else "busy", ", ".join(parts)


def delivered(last: Mapping[str, Any] | None, now: float) -> str:
    if last is None:
        return "all delivered; nothing was sent yet"
    parts = [count(last["entries"], "entry", "entries")] if last["entries"] else []
    parts += [count(last["files"], "recording")] if last["files"] else []
    at = clock(datetime.fromisoformat(last["at"]).timestamp(), now)
    return f"all delivered; last: {' and '.join(parts)} at {at}"


class StateFile:
    """What the agent says of itself: the unit's status, and /run/serversync/state.json for those
    who look from outside."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.directory = environ.get("RUNTIME_DIRECTORY", "").split(":")[0]
        self.started = time.monotonic()
        self.found: Mapping[str, Any] | None = None
        self.look_at = 0.0
        self.sentence = ""

    def show(
        self, told: Sequence[tuple[str, str]], outages: Sequence[Mapping[str, Any]],
        look: Callable[[str], list[tuple[Any, ...]]] | None = None, changed: bool = False,
        **state: object,
    ) -> str:  # fmt: skip
        """Returns the sentence. `look` asks the database anew; with very much that waits this takes
        a tenth of the time at most. What needs a person may be mended without the agent."""
        began = time.monotonic()
        found = self.found
        person = found and (open_letters(found) or found["deletions_failed"] or found["held"])
        if look is not None and (changed or not found or person) and began >= self.look_at:
            with contextlib.suppress(psycopg.Error):  # somebody has locked a table: as it was
                self.found = look(HEALTH)[0][0]
            took = time.monotonic() - began
            self.look_at = began + (SHARE * took if took > 0.1 else 0.0)
        seen = [*map(outage_seen, outages)]
        sentence = clean(health_of(self.found, seen, told, time.time())["sentence"])
        if sentence != self.sentence:
            self.sentence = sentence
            daemon.notify(f"STATUS={sentence}")
            say(logging.DEBUG, "cycle", sentence)
        self.write(sentence=sentence, told=told, outages=outages, **state)
        return sentence

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


def read_state(environ: Mapping[str, str]) -> dict[str, Any] | None:
    """What the running agent says of itself, and whose word that is; None where there is none."""
    directory = environ.get("RUNTIME_DIRECTORY", "").split(":")[0] or "/run/serversync"
    try:
        fd = os.open(os.path.join(directory, "state.json"), _OPEN_FILE)
        with open(fd, encoding="utf-8") as file:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                return None
            state = json.loads(file.read(1 << 20), parse_constant=int)  # which refuses NaN
        with contextlib.suppress(PermissionError):  # another's: it is there
            os.kill(state["pid"], 0)  # /proc may hide it: the admin unit's own does
        return {**state, "owner": status.st_uid} if state["pid"] else None
    except (OSError, KeyError, TypeError, ValueError, RecursionError, OverflowError):
        return None


def survey(
    config: Config, environ: Mapping[str, str], mistakes: Sequence[str] = (), counted: bool = False
) -> dict[str, Any]:
    """All there is to see, of the database, the agent's state file and the disk; with the counters,
    of which only the metrics tell."""
    state, disk = read_state(environ), disk_of(config.recordings_dir)
    unknown = dict.fromkeys(("pid", "since", "sentence", "seen_at", "inflight"))
    view: dict[str, Any] = {
        "version": __version__,
        "device": config.device_id,
        "host": socket.gethostname(),
        "at": iso(time.time()),
        "utc_offset": time.localtime().tm_gmtoff,  # of the times of day in the sentence
        "frontend": config.frontend_base_url,
        "agent": {"state": "stopped", **unknown},
        "database": {"ok": True, "error": None},
        "outages": [],
        "progress": None,
        "checks": {"listening": None},
        **dict.fromkeys(("outbox", "dead_letters", "deliveries")),
        "recordings": disk,
        "settings": {"trouble": None, "sections": [], "audio": None, "pulled_at": None},
    }
    view["settings"] |= {"interval": config.frontend_sync_interval_sec, "items": {}}
    seen = None
    try:
        if not config.database_url:
            raise Unavailable("the database is not known")
        with Console(config, "status") as desk:
            found, seen = desk.run(SURVEY)[0][0], desk.run(HEALTH)[0][0]
            found["outbox"]["waiting"] = sum(seen["reasons"].values())
            found["outbox"]["reasons"] = seen["reasons"]
            found["recordings"] |= disk | {"deletions_failed": seen["deletions_failed"]}
            found["deliveries"]["last_success_at"] = seen["last"] and seen["last"]["at"]
            found["dead_letters"] = seen["dead_letters"]
            view |= found
            if desk.run(IS_LOCKED, key=LOCK_KEY)[0][0]:  # by none that we see: of another machine?
                view["agent"]["state"] = "elsewhere"
            view["settings"] |= desk.run(SETTINGS_VIEW)[0][0]
            if counted:
                view["counters"] = desk.run(COUNTERS)[0][0]
    except (Unavailable, psycopg.Error) as met:
        view["database"] = {"ok": False, "error": clean(" ".join(str(met).split()))}
    if state is not None:
        # A state file of another version, or of nobody's, is that of no agent.
        with contextlib.suppress(AttributeError, KeyError, TypeError, ValueError, OverflowError):
            view |= said_by_agent(state, view)
    return view | {"health": health_in(view, seen, mistakes)}


def is_there(view: Mapping[str, Any]) -> bool:
    return view["database"]["ok"] and view["agent"]["state"] in ("running", "standby")


def settings_told(settings: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """What is wrong with them: how bad, a text and a line to paste."""
    for each in settings["sections"]:
        name = each["section"]
        if each["held"]:
            text = f"{name} is held back: {held_text(each['items'], each['held'])}"
            yield "failed", text, f"serversync settings; {accept_hint(name)}"
        if each["error"]:
            dry_run = "serversync settings pull --dry-run"
            yield "warning", f"{name} cannot be applied: {each['error']}", dry_run
        if each["skipped"]:
            text = f"{name}: {count(each['skipped'], 'item')} skipped: "
            yield "warning", text + remarks_text(each["remarks"]), "serversync settings"


NOT_HERE: Final = {
    "elsewhere": ("waiting", "the agent is not seen here, but another session holds the lock"),
    "stopped": ("stopped", "the agent is not running: sudo systemctl start serversync"),
}


def health_in(
    view: dict[str, Any], seen: Mapping[str, Any] | None, mistakes: Sequence[str]
) -> dict[str, str]:
    """By what the database says (None: it is not there), and the agent of itself."""
    state = view["agent"]["state"]
    told = [NOT_HERE[state]] if state in NOT_HERE else []
    told += [("person", f"the configuration has a mistake: {text}") for text in mistakes]
    said = view.pop("told", ())
    if seen is None:  # the agent says it without the line that helps
        told.append(("outage", str(view["database"]["error"])))
        said = [each for each in said if not each[1].startswith("the database is not there")]
    pending = 0 if view["progress"] else (view["outbox"] or {}).get("pending", 0)
    return health_of(seen, view["outages"], [*told, *said], time.time(), pending)


def said_by_agent(state: Mapping[str, Any], view: Mapping[str, Any]) -> dict[str, Any]:
    """Its part of the survey."""
    agent = {
        "state": "standby" if state["standby"] else "running",
        "pid": state["pid"],
        "since": iso(state["since"]),
        "sentence": str(state["sentence"]),
        "seen_at": iso(state["at"]),
        "inflight": int(state["inflight"]),
    }
    trouble, progress = (state.get("settings") or {}).get("trouble"), state["progress"]
    if trouble:
        said = {key: str(trouble[key]) for key in ("code", "reason")}
        trouble = said | {"since": iso(trouble["since"])}
    return {
        "agent": agent,
        "told": [(kind, str(text)) for kind, text in state.get("told", ()) if kind in STATES],
        "outages": [outage_seen(each) for each in state["outages"]],
        "progress": progress_of(progress, view["outbox"]) if progress else None,
        "checks": {"listening": bool(state["listening"])},
        "settings": view["settings"] | {"trouble": trouble or None},
    }


def outage_seen(outage: Mapping[str, Any]) -> dict[str, str]:
    said = {key: str(outage[key]) for key in ("endpoint", "code", "reason")}
    return said | {"since": iso(outage["since"]), "next_try_at": iso(outage["due"])}


def iso(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds")


def progress_of(
    progress: Mapping[str, Any], outbox: Mapping[str, Any] | None
) -> dict[str, Any] | None:
    """What is under way, how fast it goes and how long it will take."""
    found: dict[str, Any]
    if progress["kind"] == "upload":
        found = {"kind": "upload", **{k: int(progress[k]) for k in ("seq", "bytes", "size")}}
        done, left = found["bytes"], found["size"] - found["bytes"]
    else:
        done, left = int(progress["entries"]), int(outbox["pending"]) if outbox else 0
        if not done + left:
            return None
        found = {"kind": "drain", "entries": done, "total": done + left}
    rate = done / max(float(progress["seconds"]), 0.001)
    return found | {"rate": rate, "left_seconds": left / rate if rate else None}


def disk_of(directory: str) -> dict[str, Any]:
    """The recordings' directory: its size, and what is free. None: nobody may know."""
    found = {"directory": directory, **dict.fromkeys(("bytes", "disk_free", "disk_total"))}
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


# --- dead letters ---------------------------------------------------------------------------------

PAYLOAD_IN_LIST, PAYLOAD_ALONE = 4096, 1 << 20
AGAINST: Final = {
    "RESOLVED": "it has been delivered",
    "RETRYING": "it is in the queue already",
    "taken": "its seq belongs to another entry by now",
    "used_up": "its {max_retries} retries are used up",
    "overtaken": "a newer entry of the same entity (seq {newer}) takes its place",
    "unknown": "it is so old that a newer entry of the same entity may have been pruned",
}


def letters(
    desk: Console, topic: str | None, page: int, size: int, resolved: bool = True
) -> dict[str, Any]:
    """A page of dead letters, newest first."""
    found = [each for (each,) in desk.run(TOPICS) if topic in (None, each["topic"])]
    total = sum(each["total"] - (0 if resolved else each["resolved"]) for each in found)
    skip = (page - 1) * size
    which = {"topic": topic, "id": None, "resolved": resolved, "most": PAYLOAD_IN_LIST}
    rows = desk.run(LETTERS, size=size, skip=min(skip, 1 << 62), **which)
    pages = {"total_count": total, "page": page, "page_size": size}
    return {
        "messages": [_message(found) for (found,) in rows],
        "pagination": pages | {"has_next": skip + size < total},
    }


def letter(desk: Console, name: str) -> dict[str, Any]:
    which = {"topic": None, "id": _letter_id(name), "resolved": True, "most": PAYLOAD_ALONE}
    rows = desk.run(LETTERS, size=1, skip=0, **which)
    if not rows:
        raise Refused("not_found", f"there is no dead letter {name}")
    return _message(rows[0][0])


def _letter_id(name: str) -> str:
    if not _UUID.fullmatch(name):
        raise Refused("invalid", f"{name[:80]!r} is not the id of a dead letter (a UUID)")
    return name


def _message(message: dict[str, Any]) -> dict[str, Any]:
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


@contextlib.contextmanager
def put_back(desk: Console) -> Iterator[list[int]]:
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


def _revive(desk: Console, force: bool, seqs: list[int], **which: Any) -> list[tuple[Any, ...]]:
    """Puts letters back into the queue; the agent does the rest. Returns what was judged of each:
    its id, its seq, and what speaks against it (`force` overrules all but its state)."""
    with desk.conn.transaction():
        rows = desk.run(JUDGE_LETTERS, force=force, **which)
        good = {row[0]: row[1] for row in rows if row[2] is None}
        desk.run(REVIVE, ids=[*good])
    seqs += good.values()
    return rows


def retry(desk: Console, name: str, force: bool, seqs: list[int]) -> dict[str, Any]:
    rows = _revive(desk, force, seqs, ids=[_letter_id(name)], topic=None, after=0)
    if not rows:
        raise Refused("not_found", f"there is no dead letter {name}")
    _, seq, against, newer, most = rows[0]
    if against:
        why = AGAINST[against].format(newer=newer, max_retries=most)
        raise Refused("conflict", f"dead letter {name} is not sent again: {why}")
    return {"id": name, "status": "RETRYING", "message": f"entry {seq} is in the queue again"}


def retry_all(
    desk: Console, topic: str | None, force: bool, seconds: float = float("inf")
) -> dict[str, Any]:
    """Puts all that can go back into the queue, in chunks; of very many, as many as the time
    allows: what is left is asked for again."""
    retried, after, until = 0, 0, time.monotonic() + seconds
    refused = Counter[str]()
    more = False
    while not more:
        with put_back(desk) as seqs:
            rows = _revive(desk, force, seqs, ids=None, topic=topic, after=after)
        if not rows:
            break
        for _, _, against, _, most in rows:
            if against:
                words = AGAINST[against].replace(" (seq {newer})", "")
                refused[words.format(max_retries=most)] += 1
        retried, after = retried + len(seqs), rows[-1][1]
        more = bool(seqs) and time.monotonic() > until
    message = f"{count(retried, 'entry', 'entries')} back in the queue"
    message += "".join(f"; {number} not: {why}" for why, number in refused.items())
    message += "; there may be more: ask again" if more else ""
    return {"retried": retried, "refused": refused.total(), "more": more, "message": message}


def delete_letter(desk: Console, name: str) -> dict[str, Any]:
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

# Where it stands in the survey, with the label of what stands there (or it is made below), and its
# text; in the order in which they are printed.
METRICS: Final = {
    "serversync_build_info": ("", "Versions, as labels."),
    "serversync_snapshot_timestamp_seconds": ("at", "When these numbers were taken."),
    "serversync_up": ("", "Whether an agent runs here, be it as standby."),
    "serversync_database_up": ("database.ok", "Whether the database answers."),
    "serversync_listener_connected": (
        "checks.listening", "Whether a NOTIFY wakes the agent; else it polls."),
    "serversync_outage": ("", "Whether nothing gets through, by endpoint."),
    "serversync_outage_seconds": ("", "For how long nothing has got through, by endpoint."),
    "serversync_pending_entries": ("outbox.pending", "Entries not yet delivered."),
    "serversync_oldest_pending_seconds": (
        "outbox.oldest_seconds", "Age of the oldest entry not yet delivered."),
    "serversync_waiting_entries": (
        "outbox.reasons{code}", "Entries that wait, by the code of the reason."),
    "serversync_dead_letters": (
        "dead_letters{status}", "Entries given up, by what became of them since."),
    "serversync_last_success_timestamp_seconds": (
        "deliveries.last_success_at", "When the frontend last confirmed anything."),
    "serversync_deletions_waiting": (
        "recordings.deletions_waiting", "Uploaded recordings still on the disk."),
    "serversync_deletions_failed": (
        "recordings.deletions_failed", "Those of them whose deletion has failed."),
    "serversync_recordings_bytes": ("recordings.bytes", "What is in the recordings directory."),
    "serversync_disk_free_bytes": ("recordings.disk_free", "Free space where the recordings are."),
    "serversync_disk_size_bytes": ("recordings.disk_total", "All space where the recordings are."),
    "serversync_settings_last_pull_timestamp_seconds": (
        "settings.pulled_at", "When the frontend last gave its settings."),
    "serversync_settings_failing": ("", "Whether the agent gets no settings now."),
    "serversync_settings_items": (
        "settings.items{kind}", "What stands in the tables, by its kind."),
    "serversync_settings_skipped": (
        "settings.sections.skipped{section}",
        "Items of the last answer that were skipped, by section."),
    "serversync_settings_held": (
        "settings.sections.held{section}", "Whether a section is held back: too much was gone."),
    "serversync_settings_refused": (
        "settings.sections.error{section}", "Whether a section could not be applied."),
    "serversync_settings_audio_waiting": ("", "Announcements' audio still to be fetched."),
    "serversync_upload_bytes_total": ("", "Bytes of confirmed uploads."),
    "serversync_incoming_calls_total": ("", "Lines of the queue file, by what became of them."),
    "serversync_sent_total": ("", "Entries delivered, by their type."),
    "outbox_inflight": ("agent.inflight", "Entries and files in the request under way."),
    "outbox_dequeue_total": ("", "Entries taken from the queue, by what became of them."),
    "outbox_send_total": (
        "", "Entries by the outcome of sending them; retry: it failed alone in its request."),
    "outbox_lag_seconds": ("", "From an entry's creation to its confirmation."),
    "outbox_retry_count": ("", "How often an entry had failed until it got through."),
}  # fmt: skip
LAG_BOUNDS: Final = (1, 5, 30, 60, 300, 3600, 86400)  # seconds, those of CONFIRM
TRIES_BOUNDS: Final = tuple(range(9))
# Failures before anything left: no sending that is retried.
NOT_SENT: Final = (
    "NOT_READY", "FILE_UNREADABLE", "ENTRY_UNREADABLE", "ROW_CORRUPT", "SESSION_LOST",
)  # fmt: skip

Samples = Mapping[str, float | None]  # what follows the name (suffix and labels): its value


def metrics_text(config: Config, environ: Mapping[str, str]) -> str:
    """All metrics that are known, in the text format 0.0.4."""
    view = survey(config, environ, counted=True)
    made = _of_agent(view) | (_counters(view["counters"]) if "counters" in view else {})
    lines = []
    for name, (where, text) in METRICS.items():
        samples = seen_at(where, view) if where else made.get(name, {})
        known = {key: value for key, value in samples.items() if value is not None}
        kind = "counter" if name.endswith("_total") else "histogram" if "_sum" in known else "gauge"
        lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"] if known else []
        for key, value in known.items():
            lines.append(f"{name}{key} {repr(float(value)).removesuffix('.0')}")
    return "\n".join(lines) + "\n"


def seen_at(where: str, view: Mapping[str, Any]) -> Samples:
    """What stands there, a date as seconds; of several, or of each section, with its label."""
    keys, _, label = where.rstrip("}").partition("{")
    found: Any = view
    for key in keys.split("."):
        if isinstance(found, list):
            found = {each["section"]: each[key] for each in found if each["pulled_at"]}
        else:
            found = found and found.get(key)
    if isinstance(found, dict):  # a text, and what is held: whether there is any
        known = {k: v if isinstance(v, int) else bool(v) for k, v in found.items()}
        return labelled(label, known)
    return {"": _seconds(found) if isinstance(found, str) else found}


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
    agent, settings, now = view["agent"], view["settings"], _seconds(view["at"]) or 0.0
    build = labels(
        version=__version__,
        python=platform.python_version(),
        psycopg=psycopg.__version__,
        urllib3=urllib3.__version__,  # type: ignore[attr-defined]
    )
    found: dict[str, Samples] = {
        "serversync_build_info": {build: 1},
        "serversync_up": {"": agent["state"] in ("running", "standby")},
    }
    if settings["pulled_at"]:
        found["serversync_settings_audio_waiting"] = {"": settings["audio"]["waiting"]}
    if agent["state"] == "running":  # a standby does not know of outages
        since = {outage["endpoint"]: _seconds(outage["since"]) for outage in view["outages"]}
        doors = ("entries", "files", *since)
        lasted = {door: max(0.0, now - (since.get(door) or now)) for door in doors}
        found["serversync_outage"] = labelled("endpoint", {door: door in since for door in doors})
        found["serversync_outage_seconds"] = labelled("endpoint", lasted)
        if settings["pulled_at"]:
            found["serversync_settings_failing"] = {"": settings["trouble"] is not None}
    return found


def _counters(of: Mapping[str, dict[str, float]]) -> dict[str, Samples]:
    """What was counted in the very transactions that did it, since the schema was made."""
    total = {name: sum(by_label.values()) for name, by_label in of.items()}
    sent_as, retries = of.get("sent_as", {}), dict(of.get("retries", {}))
    retries.pop("WAITS_FOR", None)  # for another entry: nothing was taken from the queue
    taken = {"sent": total.get("sent", 0), "set_aside": sum(retries.values())}
    taken["dead"] = dead = total.get("dead", 0)
    outcomes = {
        "success": sent_as.get("sent", 0),
        "retry": sum(value for code, value in retries.items() if code not in NOT_SENT),
        "dead": dead,
        "conflict_processed": sent_as.get("conflict_processed", 0),
    }
    calls = dict.fromkeys(("sent", "stale", "bad", "refused"), 0.0)
    lag = histogram(of.get("lag", {}), LAG_BOUNDS, total.get("lag_sum", 0))
    tries = histogram(of.get("tries", {}), TRIES_BOUNDS, total.get("tries_sum", 0))
    return {
        "serversync_upload_bytes_total": {"": total.get("upload_bytes", 0)},
        "serversync_incoming_calls_total": labelled("outcome", calls | of.get("calls", {})),
        "serversync_sent_total": labelled("type", of.get("sent", {})),
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
SETUP: Final = f"""
with role as (
    select %(role)s::text as name, (select oid from pg_roles where rolname = %(role)s) as oid
), outbox as (
    select c.oid, c.oid::regclass::text as name, n.oid as schema_oid, n.nspname as schema
    from pg_class c join pg_namespace n on n.oid = c.relnamespace
    where n.nspname = %(schema)s and c.relname = 'sync_outbox'
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
    select 5, relation, count(lacks) = 0, string_agg('grant ' || lacks || ' on ' || case lacks
               when 'usage' then 'sequence ' || pg_get_serial_sequence(object, 'id')
               else object end || format(' to %%I', r.name), '; ')
    from role r, ({LACKS}) as needs where object is not null group by 2
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
        select 'routine', oid::regprocedure::text, proowner from pg_proc
        where pronamespace = to_regnamespace('serversync')) o
    where not coalesce(pg_has_role(r.oid, o.owner, 'usage'), false)
)
select number, name, coalesce(done, false), sql from steps order by number, name
"""
# The schemas that hold an outbox (in the role's own schema, or a temporary one, it is not the
# backend's); whether what is set for the role in this database names it first; where nothing is set
# for the role or the database, whether it is public; and whether it is the role's own: its
# search_path is, too, and could lead setup there.
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
       n.nspname = 'public' and bool_or(starts_with(path, 'search_path=')) is not true,
       exists (select from pg_roles r where r.rolname = %(role)s
               and pg_has_role(r.oid, c.relowner, 'member'))
from pg_class c join pg_namespace n on n.oid = c.relnamespace left join setting on true
where c.relname = 'sync_outbox' and c.relkind in ('r', 'p') and c.relpersistence <> 't'
  and n.nspname <> 'serversync'
group by n.nspname, c.relowner order by 2 desc, 1
"""
SERVICE_USER: Final = "serversync"
SUPERUSER: Final = "postgres"
WIDE: Final = 100_000  # where nobody counts columns or lines


def to_stdout(text: str, instead: TextIO | None = None) -> None:
    """The one way to a terminal, which obeys no character of the text but a line break."""
    (instead or sys.stdout).write(_CONTROL_BUT_BREAKS.sub(" ", text) + "\n")


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
    unit = unit_properties()
    with contextlib.suppress(OSError, KeyError):
        if unit.get("LoadState") == "loaded":
            return pwd.getpwnam(unit["User"] or "root")
        state = read_state(environ)
        if state and os.stat(f"/proc/{state['pid']}").st_uid == state["owner"]:
            return pwd.getpwuid(state["owner"])
    with contextlib.suppress(KeyError):
        return pwd.getpwnam(SERVICE_USER)
    return None


@cache
def unit_properties() -> Mapping[str, str]:
    """What systemd knows of the service, asked once; nothing where there is no systemd."""
    if not os.path.isdir("/run/systemd/system"):
        return {}
    names = "LoadState,User,WorkingDirectory,FragmentPath,UnitFileState,ActiveState,Result"
    names += ",NRestarts,WatchdogUSec,ControlGroup,MemoryMax"
    show = ["systemctl", "show", f"--property={names}", "serversync.service"]
    clean_environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C"}
    try:
        shown = subprocess.run(
            show, env=clean_environment, capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(line.split("=", 1) for line in shown.stdout.splitlines() if "=" in line)


def working_directory() -> str:
    """The service's, wherever a command is typed."""
    known = unit_properties().get("WorkingDirectory", "")
    return known.lstrip("!") or os.getcwd()  # "!": it may be missing


def become(user: pwd.struct_passwd) -> None:
    """For good: peer authentication and the files then work as they do for the service."""
    os.initgroups(user.pw_name, user.pw_gid)
    os.setgid(user.pw_gid)
    os.setuid(user.pw_uid)
    os.environ["HOME"] = user.pw_dir  # libpq looks there for .pgpass and certificates


def become_service_user(environ: Mapping[str, str], command: str = "") -> None:
    """Commands that root types act as the service does. Those that work for long, or on files of
    others, do not stay root; by systemd, or in a container, they may."""
    user = service_user(environ) if os.geteuid() == 0 else None
    if user is not None and user.pw_uid != 0:
        become(user)
    typed = os.isatty(0) or "SUDO_UID" in environ
    if command in ("run", "once", "settings", "admin") and typed and os.geteuid() == 0:
        how = f"install the package, whose user is {SERVICE_USER}, or start it as another user"
        raise ConfigError([f"{command} does not stay root: {how}"])


# --- status ---------------------------------------------------------------------------------------


def status_screen(view: Mapping[str, Any], width: int = WIDE) -> str:
    """One screen for a person; what is missing is said in its place."""
    lines = [f"serversync {view['version']}, device {view['device']}, to {view['frontend']}", ""]
    for title, words in _status_rows(view):
        words = clean(words, 4096)  # one line, whatever is in it, or those that it needs
        for line in textwrap.wrap(words, max(width, 40) - 13):
            lines.append(f"{title:<13}{line}")
            title = ""
    return "\n".join(lines)


Line = tuple[str, str]  # title and words


def _status_rows(view: Mapping[str, Any]) -> Iterator[Line]:
    agent, health = view["agent"], view["health"]
    yield "health", health["sentence"]
    if agent["since"]:
        yield "agent", f"{agent['state']} for {since(agent['since'])} (pid {agent['pid']})"
    if view["outbox"]:
        yield from _status_counts(view)
    yield from _status_recordings(view["recordings"])
    yield from _status_settings(view["settings"])
    yield from _status_progress(view["progress"])


def _status_counts(view: Mapping[str, Any]) -> Iterator[Line]:
    outbox, letters_, sent = view["outbox"], view["dead_letters"], view["deliveries"]

    def listed(counts: Mapping[str, int]) -> str:
        most = sorted(counts, key=lambda name: -counts[name])[:6]
        rest = [f"and {len(counts) - 6} more"] if len(counts) > 6 else []
        return ", ".join([*(f"{clean(name, limit=30)} {counts[name]}" for name in most), *rest])

    text = "nothing pending"
    if outbox["pending"]:
        text = f"{outbox['pending']} pending, the oldest for {span(outbox['oldest_seconds'])}"
        text += f": {listed(outbox['by_type'])}"
    yield "outbox", text
    if outbox["waiting"]:
        yield "", f"{outbox['waiting']} of them failed, or wait: {listed(outbox['reasons'])}"
    yield "dead letters", ", ".join(f"{n} {name}" for name, n in letters_.items() if n) or "none"
    hour = sent["hour"]
    text = f"last {since(sent['last_success_at'])} ago" if sent["last_success_at"] else "never yet"
    text += f"; in the last hour {count(hour['entries'], 'entry', 'entries')}"
    text += f" and {count(hour['files'], 'recording')} ({human(hour['bytes'])})"
    yield "delivered", text


def _status_recordings(found: Mapping[str, Any]) -> Iterator[Line]:
    words = []
    if "waiting" in found:
        size = found["waiting_bytes"]
        words.append(f"{found['waiting']} to upload" + (f" ({human(size)})" if size else ""))
        words.append(f"{found['deletions_waiting']} to delete")
        if found["deletions_failed"]:
            words.append(f"{found['deletions_failed']} cannot be deleted")
    if found["disk_free"] is None:
        words.append(f"{found['directory']} cannot be read")
    else:
        size = found["bytes"]
        words.append("" if size is None else f"{human(size)} on the disk")
        words.append(f"{human(found['disk_free'])} of {human(found['disk_total'])} free")
    yield "recordings", ", ".join(filter(None, words))


def _status_settings(settings: Mapping[str, Any]) -> Iterator[Line]:
    if not settings["interval"] or not (settings["pulled_at"] or settings["trouble"]):
        return
    words = ["never pulled yet"]
    if settings["pulled_at"]:
        items = counted(settings["items"]) or "nothing applied yet"
        words = [f"last pull {since(settings['pulled_at'])} ago", items]
        waiting = settings["audio"]["waiting"]
        words += [f"{count(waiting, 'audio file')} to fetch"] if waiting else []
    yield "settings", "; ".join(words)
    for kind, text, hint in settings_told(settings):
        yield "", f"{text}: {hint}" if kind == "failed" else text


def _status_progress(progress: Mapping[str, Any] | None) -> Iterator[Line]:
    if progress is None:
        return
    upload = progress["kind"] == "upload"
    done, total = (progress[k] for k in (("bytes", "size") if upload else ("entries", "total")))
    share = min(max(done, 0) / max(total, 1), 1)
    filled = round(10 * share)
    left = progress["left_seconds"]
    rate = f"{human(progress['rate'])}/s" if upload else f"{progress['rate']:.0f}/s"
    shown = f"{human(done)} of {human(total)}" if upload else f"{done} of {total} entries"
    bar = "#" * filled + "." * (10 - filled)
    ends = "" if left is None else f", {span(left)} left"
    yield progress["kind"], f"[{bar}] {100 * share:3.0f} % {shown}, {rate}{ends}"


def do_status(
    read: Callable[[], Config], arguments: argparse.Namespace, environ: Mapping[str, str]
) -> int:
    mistakes: Sequence[str] = ()
    try:
        config = read()
    except ConfigError as error:
        if as_root() in str(error):  # root may read the file
            raise
        config, mistakes = as_far_as_right(error), error.problems
    configure_logging(config)
    become_service_user(environ)
    look = partial(survey, config, environ, mistakes=mistakes)
    if arguments.watch and not arguments.json:
        return watch(look)
    view = look()
    width, _ = get_terminal_size((WIDE, WIDE))
    to_stdout(as_json(view) if arguments.json else status_screen(view, width))
    sys.stdout.flush()
    return EX_CONFIG if mistakes else EX_OK if is_there(view) else EX_UNAVAILABLE


def as_far_as_right(error: ConfigError) -> Config:
    """Of a file that nobody can read nothing is."""
    try:
        return error.right or load_config({})
    except ConfigError as bare:
        return as_far_as_right(bare)


def watch(look: Callable[[], Mapping[str, Any]]) -> int:
    """Repaints once a second, until q or Ctrl-C; leaves the last screen behind."""
    screen, there, keys = "", sys.stdout.isatty(), sys.stdin.isatty()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    modes = termios.tcgetattr(0) if keys else []
    try:
        if keys:
            tty.setcbreak(0)
        sys.stdout.write("\x1b[?1049h" if there else "")  # the other screen
        while True:
            width, height = get_terminal_size((WIDE, WIDE))
            screen = "\n".join(status_screen(look(), width).split("\n")[: height - 1])
            sys.stdout.write("\x1b[H\x1b[J" if there else "")  # goes with the first line
            to_stdout(screen)
            sys.stdout.flush()
            if select.select([0] if keys else [], [], [], 1)[0] and os.read(0, 64) in (b"q", b""):
                return EX_OK
    except KeyboardInterrupt:
        return EX_OK
    finally:
        if keys:
            termios.tcsetattr(0, termios.TCSADRAIN, modes)
        if there:
            sys.stdout.write("\x1b[?1049l")
            to_stdout(screen)


# --- dead letters, replay, prune, enqueue ---------------------------------------------------------


def do_dlq(config: Config, arguments: argparse.Namespace, environ: Mapping[str, str]) -> int:
    with Console(config, "dlq") as desk:
        topic = getattr(arguments, "topic", None)
        known = [] if topic is None else [each["topic"] for (each,) in desk.run(TOPICS)]
        if topic not in (None, *known) and not desk.run(HAS_TYPE, topic=topic):
            of = ", ".join(known)
            there = f"there are dead letters of: {of}" if of else "there are no dead letters"
            raise Refused("not_found", f"there is no topic {topic}; {there}")
        return int(COMMANDS[f"dlq {arguments.action}"][2](desk, arguments))


def _dlq_list(desk: Console, arguments: argparse.Namespace) -> int:
    topic, page, size = arguments.topic, arguments.page, arguments.page_size
    resolved = arguments.all
    found = letters(desk, topic, page, size, resolved)
    if arguments.json:
        to_stdout(as_json(found))
        return EX_OK
    total, more = found["pagination"]["total_count"], found["pagination"]["has_next"]
    if more and page == 1:
        groups = desk.run(LETTERS_BY_CODE, topic=topic, resolved=resolved)
        to_stdout(table(("CODE", "TOPIC", "LETTERS"), groups) + "\n")
    if messages := found["messages"]:
        for m in messages:
            at = datetime.fromisoformat(m["created_at"]).astimezone()  # as --since reads it
            m |= {"id": m["id"][:8], "created_at": at.isoformat(timespec="seconds")[:19]}
        keys = ("id", "outbox_id", "original_topic", "status", "retry_count", "error_code")
        rows = [[m[key] for key in (*keys, "created_at", "error_message")] for m in messages]
        header = ("ID", "SEQ", "TOPIC", "STATUS", "RETRIES", "CODE", "SINCE", "MESSAGE")
        to_stdout(table(header, rows))
    if more:
        words = ["serversync", "dlq", "list", *([topic] if topic else [])]
        words += [*(["--all"] if resolved else []), f"--page={page + 1}", f"--page-size={size}"]
        to_stdout(f"{total} in all; the next page: {shlex.join(words)}")
    elif not messages:
        to_stdout(f"{total} in all, none on this page" if total else "no dead letters")
    return EX_OK


def _named(desk: Console, name: str) -> str:
    """The id of the one letter that is meant."""
    found = desk.run(LETTERS_NAMED, name=name.lower())
    if not found:
        raise Refused("not_found", f"there is no dead letter {name}")
    if len(found) > 1:
        which = ", ".join(f"{each} (seq {seq})" for each, seq in found)
        raise Refused("conflict", f"{name} may be {which}: say more of it")
    return str(found[0][0])


def _dlq_show(desk: Console, arguments: argparse.Namespace) -> int:
    message = letter(desk, _named(desk, arguments.letter))
    if arguments.json:
        to_stdout(as_json(message))
        return EX_OK
    number = message["attempts"]
    message["attempts"] = (
        f"{number} charged; what failed while nothing else of its type got through is not"
        if number else "none charged: it was given up at once")  # fmt: skip
    payload = message.pop("payload")
    if payload is None:
        payload = f"{human(message['payload_bytes'])}: too large to be shown"
    lines = [f"{k:<16}{clean(str(v), limit=2000)}" for k, v in message.items() if v is not None]
    plain = isinstance(payload, str) and payload.isprintable()
    to_stdout("\n".join([*lines, "", payload if plain else as_json(payload)]))
    return EX_OK


def _each(
    desk: Console, arguments: argparse.Namespace, act: Callable[[str], dict[str, Any]]
) -> int:
    """One after the other; what is refused does not stop the rest."""
    code, answers = EX_OK, []
    for name in arguments.letters:
        try:
            answers.append(act(_named(desk, name)))
        except Refused as refused:
            code = EX_PERSON
            answers.append({"id": name, "error": refused.kind, "message": str(refused)})
    to_stdout(as_json(answers) if arguments.json else "\n".join(a["message"] for a in answers))
    return code


def _dlq_retry(desk: Console, arguments: argparse.Namespace) -> int:
    with put_back(desk) as seqs:
        return _each(desk, arguments, lambda name: retry(desk, name, arguments.force, seqs))


def _dlq_delete(desk: Console, arguments: argparse.Namespace) -> int:
    number = count(len(arguments.letters), "dead letter")
    if not confirmed(arguments, f"This deletes {number}: what they hold is never sent."):
        return EX_OK
    return _each(desk, arguments, lambda name: delete_letter(desk, name))


def _dlq_retry_all(desk: Console, arguments: argparse.Namespace) -> int:
    answer = retry_all(desk, arguments.topic, arguments.force)
    to_stdout(as_json(answer) if arguments.json else answer["message"])
    return EX_PERSON if answer["refused"] else EX_OK


def confirmed(arguments: argparse.Namespace, sentence: str) -> bool:
    """Destructive commands say what they will do, and want --yes; of programs at once."""
    if not arguments.yes and arguments.json:
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
    desk: Console, arguments: argparse.Namespace, after: int, last: int
) -> list[tuple[Any, ...]]:
    try:
        with put_back(desk) as seqs:
            rows = desk.run(REPLAY, after=after, last=last, **vars(arguments))
            for verdict, _, _, picked in rows:
                seqs += picked if verdict == "again" and arguments.yes else []
    except psycopg.InternalError as error:
        if error.sqlstate not in CORRUPT:
            raise
        known = [corrupt_row(*row) for row in desk.run(CORRUPT_ROWS)]
        why = f"a row in sync_outbox is corrupt: {error.diag.message_primary}"
        raise Refused("conflict", "; ".join(known) or why) from None
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
    with Console(config, "replay") as desk:
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
    if confirmed(arguments, "Nothing is done yet."):
        to_stdout("They are in the queue.")
    return EX_OK


def do_prune(config: Config, arguments: argparse.Namespace, environ: Mapping[str, str]) -> int:
    days = config.retention_days if arguments.days is None else arguments.days
    if not days:
        raise Refused("invalid", "SYNC_RETENTION_DAYS is 0 (keep for ever): say --days N")
    with Console(config, "prune") as desk:
        which = {"days": days, "keep": list(config.retention_keep)}
        number = desk.run(PRUNABLE, **which)[0][0]
        what = (
            f"{count(number, 'row')} of sync_outbox, processed {count(days, 'day')} ago or earlier"
        )
        if not confirmed(arguments, f"This deletes {what}, and old receipts and resolved letters."):
            return EX_OK
        rows = receipts = resolved = 0
        while any(gone := desk.run(PRUNE, **which)[0]):
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
    with Console(config, "enqueue") as desk:
        try:
            seq = desk.run(ENQUEUE, **vars(arguments), payload=payload.decode("utf-8"))[0][0]
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
        with Console(config, "settings") as desk:
            if not desk.run(SETTINGS_ACCEPT, section=arguments.section):
                raise Refused("conflict", f"{arguments.section} is not held back")
        if not arguments.json:
            to_stdout(f"{arguments.section} may be as small as that now; this pull, or the next:")
    if arguments.action in ("pull", "accept"):
        return _settings_pull(config, arguments, environ)
    with Console(config, "settings") as desk:
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
        with Console(config, "settings") as desk:
            outcomes = pull_now(config, frontend, desk, really, process)
            audio = Audio(frontend, desk, config.announcement_audio_dir)
            problems = _audio_now(audio, process) if really else iter(())
            before = dict(problems) if arguments.json else {}  # one JSON text
            to_stdout(_pull_shown(outcomes, before, arguments))
            for name, why in problems:
                to_stdout(f"{name}: {why}")
    except NotNow as why:
        raise Unavailable(f"no settings now, the last good ones stay: {why}") from None
    except Stopping:
        return EX_TEMPFAIL
    well = all(not outcome.held and not outcome.error for outcome in outcomes)
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
    config: Config, frontend: Frontend, tables: Tables, really: bool, process: Process
) -> list[Section]:
    tables.run(SETTINGS_KNOWN)  # what is wrong here is said before the frontend is asked
    pull = Pull(config, frontend, tables)
    while not drive(pull.fetch(), process):
        pass
    return pull.apply(really=really)


def _audio_now(audio: Audio, process: Process) -> Iterator[tuple[str, str]]:
    """All that is due, one after the other; what the agent does meanwhile does no harm. Yields
    what is not there now, and why."""
    while (file := audio.next()) is not None and file.wait <= 0:
        process.check()
        try:
            drive(audio.handle(file), process)
        except BadItem as trouble:
            yield file.name, audio.failed(file, str(trouble))
        except NotNow as why:
            yield file.name, audio.failed(file, str(why))
            return


def _pull_shown(
    outcomes: Sequence[Section], problems: Mapping[str, str], arguments: argparse.Namespace
) -> str:
    """What was changed, or (--dry-run) would be."""
    if arguments.json:
        shown = [
            {"section": each.name, "items": each.counts, "held": bool(each.held)}
            | {"skipped": each.skipped, "remarks": each.remarks}
            | {"error": each.error or None}
            | {"changes": [dict(zip(("table", "action", "count", "items"), change, strict=True))
                           for change in each.changes]}
            for each in outcomes
        ]  # fmt: skip
        audio = {"problems": problems}
        return as_json({"dry_run": arguments.dry_run, "sections": shown, "audio": audio})
    rows, notes = [], []
    for each in outcomes:
        name = each.name
        for where, what, number, labels_ in each.changes:
            rows += [[name, where, what, label] for label in labels_]
            if number > len(labels_):
                rows.append([name, where, what, f"and {number - len(labels_)} more"])
        if each.held:
            notes.append(f"{name} held back: {each.why}; if that is meant: {accept_hint(name)}")
        if each.error:
            notes.append(f"{name} cannot be applied: {each.error}")
        if each.skipped:
            said = remarks_text(each.remarks, 20)
            notes.append(f"{name}: {each.skipped} skipped: {said}")
    nothing = "nothing would change" if arguments.dry_run else "nothing to change"
    changed = table(["SECTION", "TABLE", "CHANGE", "ITEM"], rows) if rows else nothing
    return "\n".join([changed, *(clean(note, 8192) for note in notes)])


def do_metrics(config: Config, arguments: argparse.Namespace, environ: Mapping[str, str]) -> int:
    to_stdout(metrics_text(config, environ).rstrip("\n"))
    return EX_OK


# --- setup ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def owner_connection(config: Config, url: str | None) -> Iterator[psycopg.Connection[Any]]:
    """Somebody who may grant: by the URL that was given; for root the superuser, by the peer
    authentication of a Unix socket; else whoever the configuration names."""
    parts = conninfo_to_dict(url or config.database_url)
    local = str(parts.get("host") or "/").startswith("/") and "service" not in parts
    root = url is None and local and os.geteuid() == 0
    try:
        if root:
            user = pwd.getpwnam(SUPERUSER)
            os.seteuid(user.pw_uid)
            parts = {k: v for k, v in parts.items() if k in ("host", "port", "dbname")}
            parts["user"] = SUPERUSER
        parts |= {"client_encoding": "UTF8", "connect_timeout": CONSOLE_LIMIT}
        conn = psycopg.connect(make_conninfo("", **parts), autocommit=True)
    except KeyError:
        raise Unavailable("there is no user postgres here: use --admin-url") from None
    except psycopg.OperationalError as error:
        raise not_there(error) from None
    finally:
        os.seteuid(os.getuid())
    with conn:
        # A superuser's session: no name may lead to what others made in a schema of theirs, and
        # nothing is read or run by it that the role owns.
        conn.execute("set search_path = pg_catalog, pg_temp; set lock_timeout = '5s'")
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
    schema, named, usual, _ = found[0]
    trusted = [each for each in found if not each[3]] or found
    if len(found) > 1 and not (named and found[0] in trusted):
        names = ", ".join(f"{name}.sync_outbox" for name, *_ in found)
        known = conn.execute("select from pg_roles where rolname = %s", (role,)).rowcount
        say = "" if known else "create role {0} login; "
        say += "alter role {0} in database {1} set search_path = {2}"
        of = partial(psql, conn, say, role, conn.info.dbname, user=SUPERUSER)
        # What looks like a secret would be masked, and its quotes with it.
        lines = [line for each in trusted if (line := of(each[0])) == clean(line, 4096)]
        raise ConfigError([f"{names}: which is the backend's? Run one of these:", *lines])
    return schema, named or usual


# Sessions that keep this one waiting; then what stands beside the outbox under a name of ours.
BLOCKING: Final = """
select pid, usename::text, state from pg_stat_activity where pid = any (pg_blocking_pids(%s))
"""
STRANGERS: Final = """
select pg_describe_object(kind, id, 0), pg_get_userbyid(owner) from (
    select tableoid, oid, relnamespace, relname, relowner from pg_class
    union all select tableoid, oid, pronamespace, proname, proowner from pg_proc
    union all select tableoid, oid, typnamespace, typname, typowner from pg_type where typrelid = 0
) found (kind, id, beside, name, owner)
join pg_class c on c.oid = to_regclass(%(outbox)s) and c.relnamespace = beside
where owner <> relowner and name in ('serversync_wake', 'serversync_enqueue', 'serversync_keys',
                                     'sync_outbox_serversync_pending')
"""


@contextlib.contextmanager
def naming_who_blocks(pid: int, other: psycopg.Connection[Any], role: str) -> Iterator[None]:
    """Asked by another session while this one waits: afterwards nobody can tell."""
    over, found = threading.Event(), list[tuple[int, str, str]]()

    def look() -> None:
        with contextlib.suppress(psycopg.Error):
            while not over.wait(0.1):
                found[:] = other.execute(BLOCKING, (pid,)).fetchall() or found

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        yield
    except psycopg.errors.LockNotAvailable as error:
        held = ", ".join(f"pid {each} (role {whose}, {state})" for each, whose, state in found[:3])
        held += f" and {len(found) - 3} more" if len(found) > 3 else ""
        how = f"{held or 'a transaction in the database'} holds it: try again when that is over"
        if ours := [int(each) for each, whose, _ in found if whose == role][:40]:
            user = "" if other.info.user == role else SUPERUSER
            sql = f"select pg_catalog.pg_terminate_backend(p) from pg_catalog.unnest(array{ours}) p"
            end = psql(other, sql, user=user)
            how += f", or end it: {end}" if clean(end) == end else ""  # no half a quote
        raise Unavailable(f"{error.diag.message_primary}: {how}") from None
    finally:
        over.set()
        watcher.join()


def do_setup(config: Config, arguments: argparse.Namespace, environ: Mapping[str, str]) -> int:
    role = setup_role(config, environ)
    connect = partial(owner_connection, config, arguments.admin_url)
    with connect() as conn, connect() as other:
        encoding = conn.info.parameter_status("server_encoding")
        if encoding not in ("UTF8", "SQL_ASCII"):
            text = f"database {conn.info.dbname}: its encoding is {encoding}, it must be UTF8"
            how = "pg_dump it, and load that into a new one (createdb -E UTF8 -T template0)"
            raise ConfigError([f"{text}: {how}"])
        schema, finds = outbox_schema(conn, role)
        outbox = psycopg.sql.Identifier(schema, "sync_outbox").as_string(conn)
        params = {"role": role, "schema": schema, "finds": finds, "outbox": outbox}
        try:
            with naming_who_blocks(conn.info.backend_pid, other, role):
                steps = list(_setup_steps(conn, params))
                missing = [make for _, done, make in steps if not done]
                alone = [sql for sql in missing if sql.startswith(("create index", "drop index"))]
                rest = ";".join(sql for sql in missing if sql not in alone)  # all, or nothing
                for make in [] if arguments.print_sql else [*alone, rest]:
                    conn.execute(make)
        except psycopg.errors.InsufficientPrivilege as error:
            how = "as root: sudo serversync setup; or with --admin-url and a superuser's URL"
            raise ConfigError([f"{error.diag.message_primary}: run it {how}"]) from None
        except (psycopg.ProgrammingError, psycopg.InternalError) as error:
            found = [f"{what} of role {owner}" for what, owner in conn.execute(STRANGERS, params)]
            if not found:
                raise
            how = "which has a name that setup needs: rename or drop what is not needed"
            text = f"{error.diag.message_primary}: there is {', '.join(found)}, {how}"
            raise ConfigError([text]) from None
    if arguments.print_sql:
        for name, make in ((name, make) for name, done, make in steps if not done):
            to_stdout(f"-- {name}\n{make};")
        return EX_OK
    for name, done in {name: done for name, done, _ in steps}.items():
        to_stdout(f"{'there' if done else 'made':<6} {name}")
    return _setup_root(config, environ)


def _setup_steps(
    conn: psycopg.Connection[Any], params: Mapping[str, object]
) -> Iterator[tuple[str, bool, str]]:
    """What the agent needs in its database: the name, whether it is there, and its SQL."""
    known = conn.execute("select from pg_roles where rolname = %(role)s", params).rowcount
    who = {"needs": json.dumps(NEEDS), "who": params["role"] if known else "public"}
    yield from (step[1:] for step in conn.execute(SETUP, {**params, **who}))
    here = "to_regclass(%(outbox)s::text)"
    invalid = conn.execute(INDEX_STATE.replace(OUTBOX, here), params).rowcount
    for name, is_there, statements in (OPTIONAL[0], *OPTIONAL[:0:-1]):  # inserts wait for the last
        done = conn.execute(is_there.replace(OUTBOX, here), params).fetchall()[0][0]
        for make in statements if invalid else statements[-1:]:
            make = make.replace("$$", f"$x{uuid.uuid4().hex}$")  # no name may end the body
            rows = conn.execute(BESIDE.replace(OUTBOX, here), {**params, "sql": make}).fetchall()
            quiet = "" if is_there is OPTIONAL[0][1] else "set client_min_messages = warning;"
            yield name, done, quiet + rows[0][0].strip()


def _setup_root(config: Config, environ: Mapping[str, str]) -> int:
    """The last steps, as the service's user and role: what the agent makes at its start (unless
    one runs: then it did), and the recordings' marker."""
    sys.stdout.flush()  # the log's lines come after it
    become_service_user(environ)
    process = Process(environ)
    process.install()
    recordings = Recordings(config.recordings_dir)
    with contextlib.ExitStack() as stack:
        session = Session(config.database_url, config.device_id, process)
        stack.callback(session.close)
        session.connect()
        watch = psycopg.connect(config.database_url, autocommit=True, client_encoding="UTF8")
        other = stack.enter_context(watch)
        pid = session.run(IDENTITY)[0][0]
        stack.enter_context(naming_who_blocks(pid, other, other.info.user))
        if session.run(TRY_LOCK, key=LOCK_KEY)[0][0]:
            session.prepare()
        try:
            known = session.run(ROOT_ID)[0][0]
            there = known or os.path.lexists(f"{config.recordings_dir}/{MARKER}")
            with recordings.root(known, lambda name: session.run(ADOPT_ROOT, root_id=name)):
                to_stdout(f"{'there' if there else 'made':<6} marker in {config.recordings_dir}")
        except psycopg.errors.UndefinedTable:
            (holder,) = session.run(IS_LOCKED, key=LOCK_KEY)[0]
            how = "has not made the tables: stop it, and try again"
            raise Unavailable(f"pid {holder} of the database holds the lock, and {how}") from None
        except EntryTrouble as trouble:
            to_stdout(f"failed {trouble}")
            if "denied" in str(trouble):
                to_stdout(f"       run: {setup_hint(config)}")
            return EX_PERSON
    return EX_OK


def setup_hint(config: Config, sticky: bool = False) -> str:
    """With both directories: all that the service needs, in one line."""
    path = shlex.quote(config.recordings_dir)
    # As its owner, who may have put a link to a directory of root's there by then.
    owner = os.stat(config.recordings_dir).st_uid if sticky else 0
    chmod = f"sudo -u '#{owner}' chmod -t {path}; " if sticky else ""
    hint = f"{chmod}sudo serversync setup --recordings {path}"
    if os.path.isdir(config.announcement_audio_dir):
        hint += f" --announcements {shlex.quote(config.announcement_audio_dir)}"
    return hint


# --- setup: the rights on the recordings ----------------------------------------------------------

# Not serversync.conf: that would hide the package's own file of this name.
TMPFILES: Final = "/etc/tmpfiles.d/serversync-recordings.conf"
DROP_IN: Final = "/etc/systemd/system/serversync.service.d/recordings.conf"
WRITABLE: Final = "/opt/virtual-voicebot/"  # the unit's ReadWritePaths=
# Nothing that tmpfiles.d(5) or a unit reads in another way: no blank, quote, backslash, %, $ or :.
_PLAIN: Final = re.compile(r"(?:/(?!\.\.?(?:/|$))[\w.@+,=~-]+)+", re.ASCII)
# Below /var there are places for all; but not where Debian's own programs have theirs.
_SYSTEM: Final = re.compile(
    "(?:/home|/var)?/[^/]*|/(?:bin|boot|dev|etc|lib[^/]*|proc|root|run|sbin|sys|usr)/.*"
    "|/var/(?!lib/|local/|opt/|spool/|www/).*|/var/(?:lib|spool)/(?:NetworkManager|anacron|apt|"
    "bluetooth|cron|cups|dbus|dpkg|exim4|initramfs-tools|mail|misc|pam|polkit-1|postfix|postgresql|"
    "python|rsyslog|sudo|systemd|ucf)(?:/.*)?",
    re.DOTALL,
)


def setup_rights(arguments: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Opens the backend's directories to the service, whatever the backend's user and umask are,
    and for what it creates later, too: by default ACLs, renewed at each boot. Needs no database and
    no configuration."""
    if os.geteuid() != 0:
        raise ConfigError([f"only root may give rights: {as_root()}"])
    user = service_user(environ)
    if user is None:
        raise ConfigError([f"there is no user {SERVICE_USER}: install the package first"])
    named = {"--recordings": arguments.recordings, "--announcements": arguments.announcements}
    problems, places, name = list[str](), dict[str, Place](), arguments.backend_user
    for option, path in named.items():
        try:
            places |= {option: _place(path)} if path is not None else {}
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
    applied = _runs("systemd-tmpfiles", "--create", TMPFILES)
    _merge(DROP_IN, {option: _sandbox(place.path) for option, place in places.items()})
    _runs("systemctl", "daemon-reload")
    for option, place in places.items():
        applied += _open_inside(place, rights[option][-1], user.pw_gid)
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
    another one there later; and what that one puts there, only recursive lines would follow."""
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
    """x on the parents that are closed to others; all, and by default, on the directory (the last
    line). Where there are no ACLs, by the service's group, which new directories inherit.

    Not rwX: systemd 252 ignores such a line. An x on files does no harm.
    """
    lines = [f"a+ {up} - - - - u:{user.pw_name}:x" for up in place.closed]
    if not place.acls:
        mode = 0o2770 | place.status.st_mode & 0o5
        return [*lines, f"z {place.path} ~{mode:o} - {user.pw_gid}"]
    acl = f"u:{user.pw_name}:rwx,d:u:{user.pw_name}:rwx"
    heir = place.status.st_uid if heir is None else heir
    if option == "--announcements" and heir not in (0, user.pw_uid):
        acl += f",d:u:{heir}:rwx"  # what the agent writes there is for the backend
    return [*lines, f"a+ {place.path} - - - - {acl}"]


def _sandbox(path: str) -> Sequence[str]:
    """Nothing for what the shipped unit opens already."""
    if path.startswith("/home/"):
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


def _open_inside(place: Place, line: str, group: int) -> str:
    """The same for what is in the directory already, once, in a process that is its owner's: what
    he puts in the place of a parent meanwhile gets nothing that he could not give himself. Its
    group is the service's: it may give files to that, and he may not trace it."""
    who: dict[str, Any] = {"user": place.status.st_uid, "group": group, "extra_groups": []}
    with contextlib.suppress(KeyError):
        owner = pwd.getpwuid(place.status.st_uid)
        who["extra_groups"] = os.getgrouplist(owner.pw_name, owner.pw_gid)
    return _runs("systemd-tmpfiles", "--create", "-", input=line[0].upper() + line[1:], **who)


def _runs(*command: str, **how: Any) -> str:
    """What it complained about, a line each. Apart from root's terminal."""
    how |= {"capture_output": True, "text": True, "start_new_session": True}
    try:
        return str(subprocess.run(command, timeout=600, check=False, **how).stderr)
    except (OSError, subprocess.SubprocessError) as error:
        return f"{error}\n"


def cannot_delete(path: str, most: int | None = 20) -> list[str]:
    """What keeps this user from deleting the recordings there: the first ones, or all."""
    us, above, problems = os.geteuid(), os.stat(path), list[str]()
    if os.statvfs(path).f_flag & os.ST_RDONLY:
        return [f"{path} is read-only here"]
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK, effective_ids=True):
        return [f"nothing can be deleted in {path}: user {us} may not write there"]
    with os.scandir(path) as entries:
        for entry in islice(entries, most):
            with contextlib.suppress(FileNotFoundError):  # it just went
                problems += _cannot_take(path, entry, above)
    return problems[:5]


def _cannot_take(path: str, entry: os.DirEntry[str], above: os.stat_result) -> Iterator[str]:
    us, status = os.geteuid(), entry.stat(follow_symlinks=False)
    if not stat.S_ISDIR(status.st_mode):
        return
    sticky = above.st_mode & stat.S_ISVTX and us not in (0, above.st_uid, status.st_uid)
    if status.st_dev != above.st_dev:
        yield f"{entry.name!r} is on another device than {path}"
    elif sticky and entry.name != TRASH:
        yield f"{entry.name!r} cannot be moved by user {us}: {path} is sticky"
    elif not os.access(entry.path, os.R_OK | os.W_OK | os.X_OK, effective_ids=True):
        who = f"mode {status.st_mode & 0o7777:o}, owner {status.st_uid}"
        yield f"{entry.name!r} ({who}) cannot be read and written by user {us}"
    else:
        for file in os.listdir(entry.path):
            if not os.access(f"{entry.path}/{file}", os.R_OK, effective_ids=True):
                yield f"{f'{entry.name}/{file}'!r} cannot be read by user {us}"


def _said(place: Place, user: pwd.struct_passwd, complaint: str) -> int:
    """Whether the service's user can write here now, by trying it in a process of that user's."""
    sys.stdout.flush()  # or the child would print it once more
    child = os.fork()
    if child == 0:
        try:
            become(user)
            problems = cannot_delete(place.path, None)
        except OSError as error:
            problems = [f"{place.path}: {error.strerror}"]
        for problem in problems:
            to_stdout(f"failed {problem}")
        sys.stdout.flush()
        os._exit(EX_PERSON if problems else EX_OK)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != EX_OK:
        to_stdout(f"       {clean(complaint.strip()) or f'namei -l {place.path}'}")
        others = f"sudo find {place.path} ! -uid {place.status.st_uid}"
        to_stdout(f"       what does not belong to the directory's owner stays closed: {others}")
        return EX_PERSON
    to_stdout(f"there  {user.pw_name} may write and delete in {place.path}")
    if not place.acls:
        to_stdout("       no ACLs there, so by group: the backend's unit needs UMask=0002 (manual)")
    return EX_OK


# ==================================================================================================
# Doctor
# Named checks, each with a hint to paste. They leave everything as it is; none ends the others.
# ==================================================================================================

OUTBOX_SCHEMA: Final = f"""
select nspname from pg_namespace n join pg_class c on n.oid = relnamespace where c.oid = {OUTBOX}
"""
ENABLE_TRIGGER: Final = "alter table {}.sync_outbox enable trigger serversync_wake"
TRIGGER_WRONG: Final = f"""
select coalesce(min('failed'), 'warning'), coalesce(
    min('with each INSERT serversync_wake runs ' || tgfoid::regprocedure
        || ', which does not belong to the owner of sync_outbox'),
    'serversync_wake is not there: polling only') from pg_trigger
where tgrelid = {OUTBOX} and tgname = 'serversync_wake'
"""
ROOT_ID: Final = "select root_id from serversync.sender"
# Those of these directories that no pending or dead recording, and no upload, has to do with. Reads
# all pending rows, as FAILING does.
UNKNOWN_DIRECTORIES: Final = f"""
select unnest(%(names)s::text[]) except (
select coalesce(substring(coalesce(payload->>'filePath', payload->>'file_path')
                          from '([^/]*)/[^/]*$'), payload->>'callId', payload->>'call_id', '')
from (select payload from sync_outbox o where {PENDING_FILE} and {READABLE}
      union all
      select payload from serversync.dead_letters
      where original_topic = 'recording_file' and status <> 'RESOLVED') as named
union all select directory from serversync.uploads)
"""
# What failed and waits, by its reason: how many, and the first of them.
FAILING: Final = f"""
select code, http_status, min(reason), count(*), min(outbox_id), min(entity_type)
from serversync.waiting w
where code <> all (%(known)s::text[]) and {HAS_ENTRY}
group by code, http_status, case when entity_type = any (%(routes)s::text[]) then entity_type end
order by count(*) desc limit 9
"""
# Nobody but a person can decide what becomes of them.
CORRUPT_ROWS: Final = """
select outbox_id, entity_type from serversync.waiting
where code in ('ROW_CORRUPT', 'SESSION_LOST') order by outbox_id limit 9
"""
GIVE_UP: Final = "update sync_outbox set processed_at = now() where id = {}"
FAILED_DELETIONS: Final = """
select count(*) over (), outbox_id, directory, error from serversync.uploads
where error is not null order by outbox_id limit 1
"""
BACKEND_TABLES: Final = r"\d *.(recordings|system_settings)"
CREATE_DATABASE: Final = "create database voicebot_utf8 encoding 'UTF8' template template0"
LOCK_HOLDERS: Final = (
    "select a.* from pg_locks l join pg_stat_activity a using (pid) where locktype = 'advisory'"
)

READ_ONLY: Final = """
select case when pg_is_in_recovery() then 'it is a standby' else 'default_transaction_read_only' end
where current_setting('transaction_read_only') = 'on'
"""
MAKE_WRITABLE: Final = (
    "begin read write; alter database {} reset default_transaction_read_only; commit"
)

LOOK_AT: Final = "/api/number-groups"  # posting no entries would rewrite the frontend's store
DAY: Final = 86400.0
LOOK_MOST: Final = 5000  # directories or entries; more would be kept in memory
MEND: Final = "sudo serversync setup"
CONFIGURE: Final = f"sudo nano {ENV_FILE}; sudo systemctl restart serversync"
JOURNAL: Final = "serversync status; journalctl -u serversync -n 20"
CMDLINE: Final = "/boot/firmware/cmdline.txt"
PACKAGED: Final = "/usr/lib/systemd/system/serversync.service"


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


def need(thing: T | None, otherwise: str) -> T:
    if not thing:
        raise Skip(otherwise)
    return thing


# What mends it, or whose it is, by the code and the reason; the first that fits. (A comment is a
# line for a shell, too.)
REMEDIES: Final = (
    ("^DATABASE.*(refused|No such file|starting up)",
     "sudo systemctl start postgresql; pg_lsclusters"),
    ("^DATABASE.*(role .* does not exist|authentication)", MEND),
    ("^DATABASE.*database .* does not exist", "{configure}"),
    ("^DATABASE", f"pg_lsclusters; {MEND}"),
    ("^UNAUTHORIZED", "{token}"),
    ("not yet valid", "sudo timedatectl set-ntp true; sudo systemctl reload serversync"),
    ("has expired", "timedatectl; {certificate}  # if the clock is right: its owner must renew it"),
    ("^TLS.*(WRONG_VERSION|record layer|EOF)",
     "{configure}  # FRONTEND_BASE_URL: http, not https, or its port"),
    ("^TLS", "{certificate}; {configure}  # SYNC_CA_FILE: the PEM file of the CA that signed it"),
    ("^TOO_LARGE", "# on the machine of the frontend's nginx: echo 'client_max_body_size 200m;' |"
     " sudo tee /etc/nginx/conf.d/serversync.conf && sudo nginx -s reload"),
    (" 507", "# the frontend's disk is full: whoever runs it must make room there"),
    ("^(NOT_FOUND|REDIRECTED|BAD_RESPONSE)", "{curl}; {configure}  # or the network's login page"),
    ("resolution|not known|No address", "getent hosts {host}; {configure}"),
    ("^ROOT_MISSING", "findmnt -T {recordings}; ls -la {recordings}"),
    ("^FILE_UNREADABLE", "{setup}"),
    ("^(ENTRY|FILE|TOO_SLOW)", "serversync status"),
    ("", "{curl}  # what the frontend says; whoever runs it must mend it"),
)  # fmt: skip


def corrupt_row(seq: int, entity_type: str) -> str:
    text = f"entry {seq} ({entity_type}) cannot be read, its row in sync_outbox is corrupt"
    return f"{text}: restore it, or give it up"


def token_hint(config: Config, route: str = "") -> str:
    """(A start or reload gives the usual file to the service, whoever made it.)"""
    path = config.token_file or TOKEN_FILE
    if route and not (path := dict(config.route_token_files or {}).get(route, "")):
        return f"{CONFIGURE}  # {_OF_TYPE}_TOKEN_FILE: the file with the token for {route}"
    edit = f"umask 077; nano {shlex.quote(path)}"
    return f"{shlex.join(['sudo', 'sh', '-c', edit])}; sudo systemctl reload serversync"


def remedy(
    config: Config, code: str, status: int | None, reason: str, entity_type: str = ""
) -> str:
    """What stands beside a finding of this code, at the frontend or where a route leads."""
    told = f"{code} {status} {reason}"
    line = next(line for pattern, line in REMEDIES if re.search(pattern, told, re.S))
    to = dict(config.routes or {}).get(entity_type, "")
    route = entity_type if to else ""
    url = parse_url(to or config.frontend_base_url)
    host = shlex.quote((url.host or "").strip("[]"))
    look = f"openssl s_client -connect {host}:{url.port or 443} </dev/null"
    ask = ["curl", "-fsSi", "-m", "30", *(["--cacert", config.ca_file] if config.ca_file else [])]
    curl = shlex.join([*ask, to or f"{config.frontend_base_url}{LOOK_AT}"])
    path = config.token_file or (TOKEN_FILE if os.path.exists(TOKEN_FILE) else "")
    if path := dict(config.route_token_files or {}).get(route, "") if route else path:
        curl += f' -H "Authorization: Bearer $(sudo cat {shlex.quote(path)})"'
    return line.format(
        host=host, token=token_hint(config, route), configure=CONFIGURE, curl=curl,
        certificate=f"{look} | openssl x509 -noout -dates -issuer",
        recordings=shlex.quote(config.recordings_dir), setup=setup_hint(config),
    )  # fmt: skip


def shown(config: Config) -> Iterator[str]:
    """The settings that are not those by default, without a secret."""
    for name, option in OPTIONS.items():
        value, default = getattr(config, option.name), option.metadata["default"]
        if value == (option.metadata["parse"](default) if default else default):
            continue
        if option.name == "database_url":
            parts = conninfo_to_dict(value)
            value = [f"{k}={parts[k]}" for k in ("host", "port", "user", "dbname") if k in parts]
        value = " ".join(value) if isinstance(value, (list, dict)) else value
        text = f"{value:.12g}" if isinstance(value, float) else str(value)
        yield f"{name} {'(not shown)' if option.name == 'token' else text}"


class Doctor:
    """The checks, in the order in which they are made, and what they share."""

    def __init__(self, config: Config, environ: Mapping[str, str]) -> None:
        self.config, self.environ = config, environ
        self._desk: Console | None = None
        self._schema = False
        self._answer: Answer | None = None
        self.process = Process(environ)
        self.process.install()

    def findings(self, look: Callable[[Doctor], Findings]) -> Iterator[Finding]:
        said = False
        try:
            self.process.check()
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
            hint = MEND if "setup" in str(error) else JOURNAL
            yield "failed", f"cannot be checked: {error or repr(error)}", hint

    @cached_property
    def view(self) -> dict[str, Any]:
        return survey(self.config, self.environ)

    @property
    def desk(self) -> Console:
        return need(self._desk, "the database is not there")

    @property
    def ledger(self) -> Console:
        desk = self.desk
        need(self._schema, "the schema serversync is not there")
        return desk

    @property
    def answer(self) -> Answer:
        return need(self._answer, "the frontend cannot be reached")

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
        yield "ok", f"not by default: {', '.join(shown(self.config))}", ""
        if names := ", ".join(self.config.not_used):
            yield "ok", f"not used by serversync: {names} (see SYNC_LOG_LEVEL)", ""
        return ""

    def database(self) -> Findings:
        try:
            self._desk = Console(self.config, "doctor")
        except Unavailable as error:
            yield "failed", str(error), remedy(self.config, "DATABASE", None, str(error))
            return ""
        for (why,) in self._desk.run(READ_ONLY):
            name = self._desk.conn.info.dbname
            mends = self._desk.psql(MAKE_WRITABLE, name, user=SUPERUSER)
            hint = CONFIGURE if "standby" in why else mends
            yield "failed", f"it is read-only ({why}): nothing can be sent", hint
        info = self._desk.conn.info
        version = info.parameter_status("server_version")
        return f"{info.dbname} at {info.host} as {info.user}, PostgreSQL {version}"

    def rights(self) -> Findings:
        needs = self.desk.run(LACKS, needs=json.dumps(NEEDS), who=None, schema=None)
        info = self.desk.conn.info
        if not needs[0][1]:
            yield "failed", f"database {info.dbname} has no table sync_outbox", CONFIGURE
            return ""
        for relation, there, lacks, required, lost in needs:
            if lacks:
                text = f"no right to {lacks} on {relation}: {lost}"
                yield "failed" if required else "warning", text, MEND
            elif required and not there:
                yield "warning", f"no table {relation}: {lost}", self.desk.psql(BACKEND_TABLES)
        for (other,) in self.desk.run(ENQUEUE_OTHERS):
            text = f"{other} may be called instead of ours, unless called as serversync(8) says"
            yield "warning", f"{text}: is it needed?", self.desk.psql(r"\df *.serversync_enqueue")
        if not self.desk.run(ENQUEUE_STATE)[0][0]:
            yield "warning", "no serversync_enqueue to enqueue by hand", MEND
        if (encoding := info.parameter_status("server_encoding")) not in ("UTF8", "SQL_ASCII"):
            text = f"the encoding of {info.dbname} is {encoding}, it must be UTF8"
            yield "failed", text, self.desk.psql(CREATE_DATABASE, user=SUPERUSER)
        return f"role {info.user} may do all that is needed"

    def schema(self) -> Findings:
        known = 0
        with contextlib.suppress(Unavailable):  # it is not there, or not for this role
            known = self.desk.run(VERSION)[0][0]
        self._schema = known > 0
        if known != SCHEMA_VERSION:
            hint = MEND if known < SCHEMA_VERSION else "sudo apt install --only-upgrade serversync"
            yield "failed", f"version {known}, this program wants {SCHEMA_VERSION}", hint
        return f"version {known}"

    def index(self) -> Findings:
        state = self.desk.run(INDEX_STATE)
        if state != [(True,)]:
            text = "is not valid: it costs and serves nobody" if state else "is not there: slower"
            yield "warning", f"sync_outbox_serversync_pending {text}", MEND
        return "sync_outbox_serversync_pending is valid"

    def trigger(self) -> Findings:
        state = self.desk.run(TRIGGER_STATE)
        if not state:
            status, text = self.desk.run(TRIGGER_WRONG)[0]
            yield status, text, MEND
        elif state != [(True,)]:
            hint = self.desk.psql(ENABLE_TRIGGER, *self.desk.run(OUTBOX_SCHEMA)[0], user=SUPERUSER)
            yield "warning", "serversync_wake is disabled: polling only", hint
        return "serversync_wake is enabled"

    def notify(self) -> Findings:
        if not self.view["checks"]["listening"]:
            need(self.view["agent"]["state"] == "running", "no running agent is seen here")
            yield "warning", "the agent does not listen", JOURNAL
        return "the agent listens"

    # --- the frontend ---------------------------------------------------------------------------

    def frontend(self) -> Findings:
        """By a question that changes nothing."""
        url = f"{self.config.frontend_base_url}{LOOK_AT}"
        asked = get(Frontend(self.config, self.process), LOOK_AT)
        answer = drive(asked, self.process)
        self._answer = answer if answer.status is not None else None
        well = isinstance(answer.said, dict) and answer.said.get("ok") is True
        long = answer.status == 200 and not answer.complete and answer.body[:1] == b"{"
        if not well and not long and answer.status not in (401, 403):
            verdict = classify(answer)
            # Entries arrive: then it is there, and only the pages of its settings are not.
            sent = (self.view["deliveries"] or {}).get("last_success_at")
            there = answer.status == 404 and self.gets_through and sent
            hint = remedy(self.config, verdict.code, answer.status, verdict.reason)
            yield "warning" if there else "failed", f"{url}: {verdict.reason}", hint
        return f"{url} answered HTTP {answer.status} in {answer.duration:.2f} s"

    @property
    def gets_through(self) -> bool:
        return self.view["agent"]["state"] == "running" and not self.outages

    @property
    def outages(self) -> list[Any]:
        """The frontend's own."""
        return [each for each in self.view["outages"] if each["endpoint"] in ("entries", "files")]

    def token(self) -> Findings:
        ours, status, hint = self.config.token, self.answer.status, token_hint(self.config)
        if status in (401, 403):
            need(ours or not self.gets_through, "the service has one of its own, and gets through")
            text = "the frontend does not accept ours" if ours else "none is set here"
            yield "failed", f"HTTP {status}: {text}", hint
        elif any(outage["code"] == "UNAUTHORIZED" for outage in self.outages):
            yield "failed", "accepted here, but not with the agent's entries", hint
        else:
            need(status == 200, "the frontend does not say")
        return "accepted" if ours else "none is set, and none is wanted"

    def certificate(self) -> Findings:
        url = parse_url(self.config.frontend_base_url)
        host, port, limit = (url.host or "").strip("[]"), url.port or 443, self.config.timeout_sec
        if url.scheme != "https":
            if self.config.token and not is_loopback(host):
                text = "without TLS everybody on the way can read the token"
                yield "warning", text, f"curl -I https://{host}/"
            raise Skip("the frontend's URL begins with http:")
        try:
            with (
                self.process.deadline(limit, None),
                socket.create_connection((host, port), limit) as plain,
                tls_context(self.config).wrap_socket(plain, server_hostname=host) as tls,
            ):
                until = str((tls.getpeercert() or {})["notAfter"])
        except OSError:  # its check says why
            raise Skip("the frontend cannot be reached") from None
        days = int((ssl.cert_time_to_seconds(until) - time.time()) / DAY)
        if days < 14:
            text = f"the frontend's certificate ends in {count(days, 'day')}"
            yield "warning", text, remedy(self.config, "TLS_ERROR", None, "has expired")
        return f"good for {count(days, 'day')}"

    def clock(self) -> Findings:
        date = self.answer.headers.get("date", "")
        try:
            off = time.time() - parsedate_to_datetime(date).timestamp()
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
        whose = f"as user {os.geteuid()} sees it here; the service may see it otherwise"
        look = remedy(self.config, "ROOT_MISSING", None, "")
        try:
            with self.root():
                problems = cannot_delete(self.config.recordings_dir)
        except EntryTrouble as trouble:
            denied = re.search("denied|may not", str(trouble))
            yield "failed", str(trouble), setup_hint(self.config) if denied else look
            return ""
        for problem in problems:
            hint = f"{look}; systemctl show serversync -p ReadWritePaths"
            if re.search("denied|by user|may not", problem):
                hint = setup_hint(self.config, "sticky" in problem)
            yield "failed", f"{problem} ({whose})", hint
        if self.view["recordings"].get("deletions_failed"):
            raise Skip("deletions fail, see there")
        return f"{self.config.recordings_dir} is the right one and deletable, {whose}"

    def orphans(self) -> Findings:
        """(No entry knows a name that is no UTF-8.)"""
        size, yesterday, where = 0, time.time() - DAY, self.config.recordings_dir
        with self.root() as root:
            old = (name for name, changed in calls_on_disk(root) if changed < yesterday)
            found = {n.encode("utf-8", "replace").decode(): n for n in islice(old, LOOK_MOST)}
        early = " (not all were looked at)" if len(found) == LOOK_MOST else ""
        names = [found[name] for (name,) in self.ledger.run(UNKNOWN_DIRECTORIES, names=[*found])]
        if names:
            for name in names:
                with contextlib.suppress(OSError):
                    size += size_of(os.path.join(where, name), float("inf"), 1) or 0
            text = f"{count(len(names), 'directory', 'directories')} ({human(size)})"
            text += f" no entry knows of, older than a day{early}: {', '.join(names[:3])}"
            yield "warning", text, f"cd {shlex.quote(where)} && ls -la -- {shlex.join(names[:3])}"
        return f"none is older than a day{early}"

    def deletions(self) -> Findings:
        for number, seq, directory, error in self.ledger.run(FAILED_DELETIONS):
            where = shlex.quote(os.path.join(self.config.recordings_dir, directory))
            text = f"{count(number, 'uploaded recording')} cannot be deleted: {seq}: {error}"
            yield "failed", text, f"namei -l {where}; ls -la {where}"
        return "none fails"

    def disk(self) -> Findings:
        path, disk = self.config.recordings_dir, self.view["recordings"]
        total = need(disk["disk_total"], f"nothing is known of the disk of {path}")
        part = disk["disk_free"] / total
        text = f"{human(disk['disk_free'])} ({100 * part:.0f} %) are free"
        if part < 0.15:
            hint = f"df -h {shlex.quote(path)}; serversync status"
            yield "failed" if part < 0.05 else "warning", text, hint
        return text

    def settings(self) -> Findings:
        view, directory = self.view["settings"], self.config.announcement_audio_dir
        pulled = self.config.frontend_sync_interval_sec
        need(pulled, "FRONTEND_SYNC_INTERVAL_SEC is 0: they are not pulled")
        if not os.access(directory, os.W_OK | os.X_OK, effective_ids=True):
            text = f"user {os.geteuid()} cannot write announcements' audio to {directory}"
            yield "warning", text, setup_hint(self.config)
        yield from settings_told(view)
        for name, why in ((view["audio"] or {}).get("problems") or {}).items():
            yield "warning", f"announcement audio {name}: {why}", "serversync settings"
        if view["trouble"]:
            text = f"none since {view['trouble']['since']}: {view['trouble']['reason']}"
            yield "failed", text, "serversync settings pull --dry-run"
        return f"last pull {since(view['pulled_at'])} ago" if view["pulled_at"] else "none yet"

    # --- the agent and its machine --------------------------------------------------------------

    def agent(self) -> Findings:
        agent = self.view["agent"]
        if agent["state"] == "stopped":
            yield "failed", "no agent runs", f"sudo systemctl start serversync; {JOURNAL}"
        elif agent["state"] in ("standby", "elsewhere"):
            text = {"standby": STANDBY}.get(agent["state"], NOT_HERE["elsewhere"][1])
            yield "warning", text, self.desk.psql(LOCK_HOLDERS)
        elif self.view["health"]["state"] == "outage" and not self.view["outages"]:
            yield "failed", self.view["health"]["sentence"], JOURNAL
        return f"running since {agent['since']}"

    def unit(self) -> Findings:
        unit = need(unit_properties(), "there is no systemd here")
        need(unit["LoadState"] != "not-found", "there is no serversync.service")
        state, path, restarts = unit["ActiveState"], unit.get("FragmentPath", ""), unit["NRestarts"]
        start = f"sudo systemctl start serversync; {JOURNAL}"
        for wrong, status, text, hint in (
            (not unit["UnitFileState"].startswith("enabled"), "warning",
             "it does not start at boot", "sudo systemctl enable serversync"),
            (state != "active", "failed", f"{state}: {unit['Result']}", start),
            (unit["WatchdogUSec"] in ("0", "infinity"), "warning",
             "its watchdog is off, by WatchdogSec= in a drop-in", "systemctl cat serversync"),
            (restarts != "0", "warning", f"systemd restarted it {restarts} times", JOURNAL),
            (path.startswith("/etc/") and os.path.exists(PACKAGED), "warning",
             f"{path} hides the package's", f"diff -u {PACKAGED} {shlex.quote(path)}"),
        ):  # fmt: skip
            if wrong:
                yield status, text, hint
        return "enabled, active, watched"

    def memory_cgroup(self) -> Findings:
        """What keeps MemoryMax= from doing anything."""
        text = ""
        for path in ("/sys/fs/cgroup/cgroup.controllers", "/proc/cgroups"):
            with contextlib.suppress(OSError), open(path, encoding="ascii") as file:
                text += file.read()
        unit = unit_properties()
        limit = f"/sys/fs/cgroup{unit.get('ControlGroup', '')}/memory.max"
        if not re.search(r"\bmemory\b(?!\s+\d+\s+\d+\s+0$)", text, re.M):
            hint = f"sudo sed -i '1{{/cgroup_enable=memory/!s/$/ cgroup_enable=memory/}}' {CMDLINE}"
            why = "the kernel has none, and MemoryMax= does nothing"
            yield "warning", f"{why}; with this, from the next boot on", hint
        elif unit.get("ControlGroup") and not os.path.exists(limit):
            hint = f"sudo systemctl set-property serversync MemoryMax={unit['MemoryMax']}"
            yield "warning", f"MemoryMax= is not enforced: there is no {limit}", hint
        return "the kernel has it"

    def outage(self) -> Findings:
        need(self.view["agent"]["state"] == "running", "no running agent is seen here")
        for text, outage in outages_told(self.view["outages"], time.time()):
            code, reason, where = (outage[key] for key in ("code", "reason", "endpoint"))
            hint = remedy(self.config, code, None, reason, where.removeprefix("route "))
            yield "failed", text, hint
        return "none"

    def backlog(self) -> Findings:
        outbox = need(self.view["outbox"], "the database is not there, or not set up")
        known = {*CORRUPT_CODES, *PATIENT, *(outage["code"] for outage in self.view["outages"])}
        among = {"known": [*known], "routes": [*self.config.routes]}
        for code, status, why, number, seq, kind in self.ledger.run(FAILING, **among):
            text = f"{count(number, 'entry', 'entries')} ({code}; the first is {seq}, {kind})"
            yield "warning", f"{text} retried: {why}", remedy(self.config, code, status, why, kind)
        text = f"{outbox['pending']} pending"
        if outbox["oldest_seconds"] > 3600:
            text += f", the oldest for {outbox['oldest_seconds'] / 3600:.1f} h"
            yield "warning", text, "serversync status"
        return text

    def corrupt_rows(self) -> Findings:
        for seq, entity_type in self.ledger.run(CORRUPT_ROWS):
            give_up = self.desk.psql(GIVE_UP.format(int(seq)))
            yield "failed", corrupt_row(seq, entity_type), give_up
        return "none"

    def dead_letters(self) -> Findings:
        need(self.view["dead_letters"], "the database is not there, or not set up")
        if number := open_letters(self.view):
            yield "warning", f"{count(number, 'entry', 'entries')} given up", "serversync dlq list"
        return "none"


# All of them, as they stand there.
CHECKS: Final = {
    name.replace("_", " "): look
    for name, look in vars(Doctor).items()
    if getattr(look, "__annotations__", {}).get("return") == "Findings"
}


def is_loopback(host: str) -> bool:
    return bool(re.fullmatch(r"localhost|127\..*|\[?::1\]?|0\.0\.0\.0", host))


def calls_on_disk(root: int) -> Iterator[tuple[str, float]]:
    """The directories of calls and their mtimes, one at a time: there may be 100,000."""
    with os.scandir(root) as entries:
        for entry in entries:
            if not entry.name.startswith(".serversync") and entry.is_dir(follow_symlinks=False):
                with contextlib.suppress(FileNotFoundError):  # deleted while we look
                    yield entry.name, entry.stat(follow_symlinks=False).st_mtime


def doctor(config: Config | ConfigError, environ: Mapping[str, str]) -> Iterator[Check]:
    if isinstance(config, ConfigError):
        for problem in config.problems:
            yield Check("configuration", "failed", clean(problem, 4096), CONFIGURE)
        for name in [*CHECKS][1:]:
            yield Check(name, "skipped", "the configuration is not usable")
        return
    configure_logging(config)
    made = Doctor(config, environ)
    for name, look in CHECKS.items():
        for status, text, hint in made.findings(look):
            # Not masked: what is pasted must stay quoted as it is.
            hint = _CONTROL.sub(" ", hint).strip().encode("utf-8", "replace").decode()
            yield Check(name, status, clean(text, 4096), hint)


def print_checks(checks: Iterable[Check], arguments: argparse.Namespace) -> int:
    """As they come, on a terminal only what is not well, and a verdict at the end; or in one line.
    Returns the exit code."""
    kinds = ("failed", "warning", "ok", "skipped")
    shown = kinds if arguments.all or not sys.stdout.isatty() else kinds[:2]
    seen = []
    for check in checks:
        seen.append(check)
        hint = f"\n{'':<9}{check.hint}" if check.hint else ""
        if check.status in shown and not arguments.json and not arguments.brief:
            to_stdout(f"{check.status:<8} {check.name}: {check.text}{hint}")
            sys.stdout.flush()
    named = {kind: {each.name for each in seen if each.status == kind} for kind in kinds}
    said = [f"{count(len(named['failed']), 'check')} failed"] if named["failed"] else []
    said += [count(len(named["warning"]), "warning")] if named["warning"] else []
    verdict = ", ".join(said) or "all is well"
    worst = min(seen, key=lambda check: kinds.index(check.status))
    brief = f"{verdict}; {worst.name}: {worst.text}" if said else verdict
    for_programs = {"verdict": verdict, "checks": [asdict(check) for check in seen]}
    to_stdout(as_json(for_programs) if arguments.json else brief if arguments.brief else verdict)
    return EX_PERSON if named["failed"] else EX_OK


def do_doctor(
    read: Callable[[], Config], arguments: argparse.Namespace, environ: Mapping[str, str]
) -> int:
    config: Config | ConfigError
    become_service_user(environ)  # before: it shall see what the service sees
    try:
        config = read()
    except ConfigError as error:
        config = error
    try:
        return print_checks(doctor(config, environ), arguments)
    except Stopping:
        return EX_TEMPFAIL


# ==================================================================================================
# The admin interface
# A process of its own: one answer a connection, a deadline on everything. A loop of asyncio, which
# psycopg has loaded anyway, hears all at their own pace; four threads find the answers and give
# them. Its socket is systemd's: it ends when nobody asks, and another finds what came meanwhile.
# ==================================================================================================

ADMIN_LISTEN: Final = "/run/serversync/admin.sock"
ADMIN_IDLE: Final = 60.0
WORKERS: Final = 4  # and so many answers are in memory at a time
OPEN_MOST: Final = 512  # connections
SILENT_SEC, STALLED_SEC = 1.0, 0.25  # who asks, or reads, nothing for so long makes room
REQUEST_SEC, ANSWER_SEC, LINGER_SEC = 5.0, 10.0, 2.0  # for all of it, not for a byte
LINGER_MAX: Final = 64 * 1024
RETRY_ALL_SEC: Final = 10.0  # a browser waits for it
LETTERS_SHOWN: Final = 20  # of those that are open, by the page
JOIN_SEC: Final = 25.0  # for the requests at hand, when it is to end
NO_TOKEN: Final = (
    "on TCP every request needs a token, and none is configured: set SYNC_ADMIN_TOKEN_FILE, or"
    f" listen on a Unix socket ({ADMIN_LISTEN})"
)
_REQUEST_LINE: Final = re.compile(r"([A-Z]{1,16}) (/[!-~]*) HTTP/1\.[01]")
_FIELD: Final = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([\t -~\x80-\xff]*?)[ \t]*")
_HEAD_END: Final = re.compile(rb"\r\n\r\n|(?<!\r)\n")  # a bare LF is wrong: no more is read
_PLACE: Final = re.compile(r"(?:\[([0-9a-f:.]+)\]|([a-z0-9._-]+))(?::([0-9]{1,5}))?")
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


@dataclass(eq=False)
class Reply(Exception):
    """An answer; raised where there can be no other."""

    status: int
    body: bytes
    kind: str = "application/json"
    headers: dict[str, str] = field(default_factory=dict)
    message: str = ""  # for the log, if the request was to change something

    def wire(self, with_body: bool = True) -> bytes:
        own = {"Content-Type": self.kind, "Content-Length": str(len(self.body))}
        headers = _ALWAYS | {"Date": formatdate(usegmt=True)} | own | self.headers
        lines = [f"HTTP/1.1 {self.status} {http.client.responses[self.status]}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        return "\r\n".join([*lines, "", ""]).encode() + (self.body if with_body else b"")


def json_reply(content: Any, status: int = 200, message: str = "") -> Reply:
    return Reply(status, f"{as_json(content, indent=None)}\n".encode(), message=message)


def denied(status: int, code: str, text: str, **headers: str) -> Reply:
    message = clean(text, 4096)
    reply = json_reply({"error": {"code": code, "message": message}}, status, message)
    reply.headers = {name.replace("_", "-"): value for name, value in headers.items()}
    return reply


def bad_request(text: str, status: int = 400) -> Reply:
    return denied(status, "SYS_BAD_REQUEST", text)


@dataclass
class Request:
    method: str
    path: str
    query: str
    headers: dict[str, str]
    peer: str  # who asks
    address: str  # of ours, that they came to; of a Unix socket: empty
    name: str = ""  # what stands in the path where its route has a gap

    @property
    def changes(self) -> bool:
        return self.method not in ("GET", "HEAD")

    @property
    def topic(self) -> str:
        topic = unquote_to_bytes(self.name).decode("utf-8", "replace")
        # A slash comes as %2F: the path was split before this.
        real = re.fullmatch(r"[^\ufffd]*[^./\ufffd ][^\ufffd]*", topic)
        if not real or len(topic) > 30 or not topic.isprintable():
            words = "a topic has 1 to 30 characters, and no control characters"
            raise Refused("invalid", words)
        return topic

    def number(self, key: str, default: int, most: int) -> int:
        try:
            text = dict(parse_qsl(self.query, True, max_num_fields=20)).get(key, str(default))
            return _whole(1, most)(text)
        except ValueError:
            words = f"{key} must be a whole number from 1 to {most}"
            raise Refused("invalid", words) from None


# --- a request comes in ---------------------------------------------------------------------------


async def read_head(connection: socket.socket) -> bytes:
    """Up to the empty line, or what comes in time. What follows is never read as a request."""
    data, loop = b"", asyncio.get_running_loop()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(REQUEST_SEC):
            while not _HEAD_END.search(data) and len(data) <= HEAD_MAX:
                chunk = await loop.sock_recv(connection, 4096)
                if not chunk:
                    break
                data += chunk
    return data


async def linger(connection: socket.socket) -> None:
    """Takes in what else was sent: a reset, for bytes left unread, would overtake our answer."""
    loop, size = asyncio.get_running_loop(), 0
    connection.shutdown(socket.SHUT_WR)
    async with asyncio.timeout(LINGER_SEC):
        while size < LINGER_MAX and (chunk := await loop.sock_recv(connection, 4096)):
            size += len(chunk)


def parse_request(data: bytes, peer: str, address: str) -> Request:
    """Strict: what two readers could read in two ways is no request. (http.server takes 30 of the
    35 that tests/test_admin.py has for good ones.)"""
    head, _, _ = data.partition(b"\r\n\r\n")
    if len(head) > HEAD_MAX:
        raise bad_request("the head of the request is too large", 431)
    if not _HEAD_END.search(data):
        raise bad_request("the head of the request did not come in time", 408)
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
    if twice or both or "host" not in headers or not re.fullmatch(r"[0-9]{1,18}", length):
        raise bad_request("Host is missing, a header came twice, or the body's length is not clear")
    path, _, query = line[2].partition("?")
    return Request(line[1], path, query, headers, peer, address)


def ends_of(connection: socket.socket) -> tuple[str, str]:
    """Who asks, and the address of ours that they came to."""
    if connection.family == socket.AF_UNIX:
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        return f"uid {int.from_bytes(credentials[4:8], sys.byteorder)}", ""
    mine = str(connection.getsockname()[0]).removeprefix("::ffff:")
    return str(connection.getpeername()[0]), mine.partition("%")[0]


def check_host(request: Request) -> None:
    """Against DNS rebinding: a stranger's name that leads here is not ours."""
    match, mine = _PLACE.fullmatch(request.headers["host"].lower()), socket.gethostname().lower()
    ours = {"localhost", "127.0.0.1", "::1", request.address, mine, f"{mine}.local"}
    if not match or (match[1] or match[2]) not in ours:
        raise bad_request(f"ask for localhost, {mine} or an address of this machine's", 421)


def check_intent(request: Request) -> None:
    """Against forms on other sites: none of them can send this header, or our Origin."""
    if "x-requested-with" not in request.headers:
        raise denied(403, "SYS_FORBIDDEN", "the header X-Requested-With is missing")
    _, _, origin = request.headers.get("origin", "").lower().partition("://")
    if "origin" in request.headers and origin != request.headers["host"].lower():
        raise denied(403, "SYS_FORBIDDEN", "the request comes from another site")


def admin_token(config: Config) -> str:
    return read_text(config.admin_token_file, "SYNC_ADMIN_TOKEN_FILE: ").strip()


def check_token(request: Request, token: str) -> None:
    """As a bearer token, or, for browsers, as the password of any user."""
    if not token:
        raise denied(503, "SYS_CONFIG", NO_TOKEN)
    scheme, _, text = request.headers.get("authorization", "").partition(" ")
    given = text.strip() if scheme.lower() == "bearer" else ""
    if scheme.lower() == "basic":
        with contextlib.suppress(ValueError):
            given = base64.b64decode(text).decode("latin-1").partition(":")[2]
    if not hmac.compare_digest(given.encode(), token.encode()):
        text, realm = "the token is missing or wrong", 'Basic realm="serversync"'
        raise denied(401, "SYS_UNAUTHORIZED", text, WWW_Authenticate=realm)


# --- what is answered -----------------------------------------------------------------------------

Reader = Callable[[], Config]
Handler = Callable[[Config, Mapping[str, str], Request], Reply]


def _page(*_: object) -> Reply:
    """The page and its policy: its own style and script run, by their hashes, and nothing else."""
    rules = ["default-src 'none'", "connect-src 'self'", "img-src data:", "base-uri 'none'"]
    rules += ["form-action 'none'", "frame-ancestors 'none'"]
    for tag, content in re.findall(r"<(style|script)>(.*?)</\1>", PAGE, re.S):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        rules.append(f"{tag}-src 'sha256-{digest}'")
    policy = {"Content-Security-Policy": "; ".join(rules)}
    return Reply(200, PAGE.encode(), "text/html; charset=utf-8", policy)


def _ready(config: Config, environ: Mapping[str, str], _request: Request) -> Reply:
    view = without_secrets(survey(config, environ))
    ready = is_there(view) and view["health"]["state"] != "outage"
    reasons = [] if ready else [view["health"]["sentence"]]
    return json_reply({"ready": ready, "reasons": reasons}, 200 if ready else 503)


def _metrics(config: Config, environ: Mapping[str, str], _request: Request) -> Reply:
    text = metrics_text(config, environ)
    return Reply(200, text.encode("utf-8", "replace"), "text/plain; version=0.0.4; charset=utf-8")


def _retry(desk: Console, request: Request) -> Any:
    with put_back(desk) as seqs:
        return retry(desk, request.name, False, seqs)


def _letters(desk: Console, request: Request) -> Any:
    page, size = request.number("page", 1, 10**9), request.number("page_size", 20, 100)
    return letters(desk, request.topic, page, size)


def _topics(desk: Console, _request: Request) -> Any:
    newest = letters(desk, None, 1, LETTERS_SHOWN, resolved=False)["messages"]
    return {"topics": [each for (each,) in desk.run(TOPICS)], "open": newest}


def _at_desk(work: Callable[[Console, Request], Any]) -> Handler:
    def handler(config: Config, _environ: Mapping[str, str], request: Request) -> Reply:
        with Console(config, "admin") as desk:
            content = work(desk, request)
        return json_reply(content, message=content["message"] if request.changes else "")

    return handler


# The first path that matches: messages/… comes before {topic}/….
ROUTES: Final[dict[str, dict[str, Handler]]] = {
    r"/": {"GET": _page},
    r"/healthz": {"GET": lambda *_: json_reply({"status": "ok"})},
    r"/readyz": {"GET": _ready},
    r"/metrics": {"GET": _metrics},
    r"/api/v1/status": {"GET": lambda *given: json_reply(without_secrets(survey(*given[:2])))},
    r"/api/v1/history": {"GET": _at_desk(lambda desk, _: desk.run(HISTORY)[0][0])},
    r"/api/v1/dlq": {"GET": _at_desk(_topics)},
    r"/api/v1/dlq/messages/([^/]+)": {
        "GET": _at_desk(lambda desk, request: letter(desk, request.name)),
        "DELETE": _at_desk(lambda desk, request: delete_letter(desk, request.name)),
    },
    r"/api/v1/dlq/messages/([^/]+)/retry": {"POST": _at_desk(_retry)},
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
    found = ((re.fullmatch(pattern, request.path), each) for pattern, each in ROUTES.items())
    match, methods = next((each for each in found if each[0]), (None, {}))
    if match is None:
        raise denied(404, "SYS_NOT_FOUND", "there is nothing at this address")
    request.name = match[1] if match.groups() else ""
    if handler := methods.get("GET" if request.method == "HEAD" else request.method):
        return handler
    allowed = ", ".join([*methods, "HEAD"] if "GET" in methods else methods)
    raise denied(405, "SYS_METHOD_NOT_ALLOWED", f"allowed here: {allowed}", Allow=allowed)


def not_configured(request: Request, problems: Sequence[str]) -> Reply:
    """The reasons; not on TCP: whether they know the token there cannot be told now."""
    if request.address:
        problems = ["the reasons are in the journal, and on a Unix socket"]
    if request.path != "/":
        return denied(503, "SYS_CONFIG", "; ".join(problems))
    lines = ["serversync is not configured:", "", *(f"- {problem}" for problem in problems), ""]
    text = clean("\n".join(lines), 65536, lines=True)
    return Reply(503, text.encode(), "text/plain; charset=utf-8")


class Admin:
    """The loop, its visitors, and the work for the threads."""

    def __init__(
        self, reader: Reader, environ: Mapping[str, str], listeners: Sequence[socket.socket]
    ) -> None:
        self.reader, self.environ, self.listeners = reader, environ, listeners
        self._repeats = Repeats()
        # The newest first: hundreds of requests keep no new one waiting.
        self._work: queue.LifoQueue[Callable[[], object]] = queue.LifoQueue()
        self._visits: set[asyncio.Task[None]] = set()
        self._silent: dict[socket.socket, float] = {}  # who has not asked yet, since when
        self._used = time.monotonic()

    async def serve(self, idle: float) -> None:
        """Until a signal, or until nobody has asked for so long; what is at hand is finished. Who
        comes a moment later waits in the backlog of systemd's socket, for the next process."""
        loop, stop = asyncio.get_running_loop(), asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        loop.add_signal_handler(signal.SIGHUP, int)  # the configuration is read each time
        self._open_doors()
        names = " and ".join(map(place_of, self.listeners))
        say(logging.INFO, "started", f"the admin interface listens on {names}")
        daemon.notify("READY=1\nSTATUS=answering")
        for _ in range(WORKERS):
            threading.Thread(target=self._do_work, daemon=True).start()
        watch, left = int(self.environ.get("WATCHDOG_USEC") or 0) / 2e6 or 3600.0, idle
        while (left > 0 or self._visits) and not stop.is_set():
            self._work.put(partial(daemon.notify, "WATCHDOG=1"))  # not while all threads hang
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), min(left if left > 0 else idle, watch))
            left = self._used + idle - time.monotonic()
        for listener in self.listeners:
            loop.remove_reader(listener)
        self.listeners = []
        daemon.notify("STOPPING=1")
        if self._visits:
            await asyncio.wait(self._visits, timeout=JOIN_SEC)

    def _open_doors(self) -> None:
        for listener in self.listeners:
            asyncio.get_running_loop().add_reader(listener, self._let_in, listener)

    def _let_in(self, listener: socket.socket) -> None:
        """Where it is full, the oldest goes that has asked nothing; or who comes waits a moment."""
        loop, now = asyncio.get_running_loop(), time.monotonic()
        with contextlib.suppress(OSError):  # nobody is there, or not any more
            if len(self._visits) >= OPEN_MOST:
                oldest, since = next(iter(self._silent.items()), (listener, now))
                if since + SILENT_SEC > now:
                    loop.remove_reader(listener)
                    loop.call_later(STALLED_SEC, self._open_doors)
                    return
                del self._silent[oldest]
                oldest.shutdown(socket.SHUT_RDWR)
            connection, _ = listener.accept()
            connection.setblocking(False)
            visit = loop.create_task(self._converse(connection))
            visit.add_done_callback(self._leave)
            self._visits.add(visit)

    def _leave(self, visit: asyncio.Task[None]) -> None:
        self._visits.remove(visit)
        self._used = time.monotonic()

    async def _converse(self, connection: socket.socket) -> None:
        """One request, one answer."""
        with connection, contextlib.suppress(OSError):  # who has gone wants no answer
            self._silent[connection] = time.monotonic()
            try:
                head = await read_head(connection)
            finally:
                self._silent.pop(connection, None)
            if head:  # else it was a browser that connects in advance
                answered = Future[None]()
                self._work.put(partial(self._answer, connection, head, answered))
                await asyncio.wrap_future(answered)
                await linger(connection)

    # --- in the threads -------------------------------------------------------------------------

    def _do_work(self) -> None:
        while True:
            self._work.get()()

    def _answer(self, connection: socket.socket, head: bytes, answered: Future[None]) -> None:
        try:
            request = parse_request(head, *ends_of(connection))
            reply = self._find(request)
            if request.changes:
                what = f"{request.method} {request.path[:200]}: {reply.status} {reply.message}"
                say(logging.INFO, "admin", f"{request.peer}: {what}", HTTP_STATUS=reply.status)
            self._send(connection, reply.wire(request.method != "HEAD"))
        except Reply as refusal:
            self._send(connection, refusal.wire())
        except OSError:  # who has gone has no address
            pass
        except Exception as error:  # MemoryError, say
            say(logging.ERROR, "admin_failed", f"a request ended in {error!r}")
        finally:
            answered.set_result(None)

    def _send(self, connection: socket.socket, data: bytes) -> None:
        """Who reads nothing for a while makes room for who waits."""
        connection.settimeout(STALLED_SEC)
        rest, until = memoryview(data), time.monotonic() + ANSWER_SEC
        with contextlib.suppress(OSError):
            while rest and time.monotonic() < until:
                try:
                    rest = rest[connection.send(rest) :]
                except TimeoutError:
                    if not self._work.empty():
                        break
        connection.setblocking(False)

    def _find(self, request: Request) -> Reply:
        topic = "config on TCP" if request.address else "config"
        try:
            check_host(request)
            config = self.reader()  # as it is on the disk: once repaired, it needs no restart
            token = admin_token(config) if request.address else ""
            configure_logging(config)
            if self._repeats.over(topic):
                say(logging.INFO, "configured", "the configuration is good now")
            if request.address:
                check_token(request, token)
            handler = route(request)
            if request.changes:
                check_intent(request)
            return handler(config, self.environ, request)
        except Reply as reply:
            return reply
        except ConfigError as error:
            text = f"not configured: {error}"
            self._repeats.say(topic, text, logging.ERROR, "bad_configuration", text)
            return not_configured(request, error.problems)
        except Refused as refused:
            return denied(*REFUSALS[refused.kind], str(refused))
        except (Unavailable, psycopg.OperationalError) as error:
            return denied(503, "SYS_UNAVAILABLE", str(error))
        except Exception:
            say(logging.ERROR, "admin_failed", f"cannot answer {request.path[:200]}", exc_info=True)
            text = "this failed, and should not have: see the journal"
            return denied(500, "SYS_DLQ_INTERNAL_ERROR", text)


# --- where it listens -----------------------------------------------------------------------------


def bind_unix(path: str) -> socket.socket:
    """For its owner and group. The socket that a killed process left is replaced."""
    listener = socket.socket(socket.AF_UNIX)
    if os.path.exists(path) and stat.S_ISSOCK(os.lstat(path).st_mode):
        with socket.socket(socket.AF_UNIX) as probe:
            if probe.connect_ex(path) == errno.ECONNREFUSED:
                os.unlink(path)
    os.umask(0o117)  # this process makes no other file
    listener.bind(path)
    listener.listen(1024)
    return listener


def bind_tcp(listen: str, reader: Reader) -> socket.socket:
    match = _PLACE.fullmatch(listen.lower())
    if not match or int(match[3] or 65536) > 65535:
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
    config_reader: Reader, listen: str | None, environ: Mapping[str, str], idle: float = ADMIN_IDLE
) -> int:
    """Answers until SIGTERM; on systemd's socket only until nobody has asked for a minute."""
    become_service_user(environ, "admin")  # before: the directory of the socket is not root's
    listeners = [socket.socket(fileno=fd) for fd in daemon.listen_fds()]
    where = "" if listeners else listen or ADMIN_LISTEN
    if where:
        idle = float("inf")
        try:
            listeners = [bind_unix(where) if "/" in where else bind_tcp(where, config_reader)]
        except OSError as error:
            raise ConfigError([f"--listen {where}: {error.strerror or error}"]) from None
    for listener in listeners:
        listener.setblocking(False)
    log.setLevel(logging.INFO)  # until a configuration says otherwise
    asyncio.run(Admin(config_reader, environ, listeners).serve(idle))
    if "/" in where:
        with contextlib.suppress(OSError):
            os.unlink(where)
    return EX_OK


# ==================================================================================================
# The status page
# One document, served as it stands; its style and its script are allowed by their hashes.
# ==================================================================================================

PAGE: Final = r"""<!doctype html>
<html lang="en">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>serversync</title>
<link rel="icon" id="icon" href="data:,">
<style>
:root { color-scheme: light dark;
  --ground: #f4f6f8; --card: #fff; --edge: #d9dfe6; --text: #18212b; --soft: #55616e;
  --blue: #1c5fc4; --good: #146c3c; --warn: #8a4b00; --bad: #b3261e; }
@media (prefers-color-scheme: dark) { :root {
  --ground: #0e1318; --card: #171e26; --edge: #2c3742; --text: #e8edf2; --soft: #a3b0bd;
  --blue: #82b4ff; --good: #6fd69b; --warn: #f3bb66; --bad: #ff9b92; } }
* { box-sizing: border-box; margin: 0; padding: 0; overflow-wrap: anywhere; unicode-bidi: isolate; }
[hidden], .card:empty, dl:empty { display: none !important; }
body { background: var(--ground); color: var(--text); max-width: 74rem; margin-inline: auto;
  padding-inline: .8rem; font: 16px/1.5 system-ui, "Segoe UI", Roboto, "Noto Sans", sans-serif; }
h1 { font-size: 1.4rem; margin-bottom: .3rem; } h2 { font-size: 1.05rem; } h3 { font-size: .95rem; }
header, .row { display: flex; flex-wrap: wrap; align-items: center; gap: .5rem 1rem; }
header, main, footer { padding-block: 1rem; }
main, .tiles { display: grid; gap: .8rem; }
.tiles { grid-template-columns: repeat(auto-fit, minmax(8.5rem, 1fr)); }
.grow { flex: 1 1 13rem; min-width: 0; } .ends { justify-content: space-between; }
.soft { color: var(--soft); font-size: .85rem; }
.card { background: var(--card); border: 1px solid var(--edge); border-radius: .7rem;
  padding: .9rem; min-width: 0; color: var(--text); }
.old header, .old .card, .card.old { filter: grayscale(1); border-style: dashed; }
.good { color: var(--good); } .warn { color: var(--warn); } .bad { color: var(--bad); }
#sign { width: 1.9em; border: .2rem solid; border-radius: 50%; text-align: center; }
.chip { font-size: .75rem; border: 1px solid; padding: .1rem .6rem; border-radius: 1rem; }
.big { font-size: 1.8rem; font-weight: 650; line-height: 1.25; }
dl { margin-top: .5rem; border-top: 1px solid var(--edge); padding-top: .4rem; font-size: .8rem; }
dl div { display: flex; flex-wrap: wrap; justify-content: space-between; gap: 0 .4rem; }
dt { color: var(--soft); } dd { margin-left: auto; font-variant-numeric: tabular-nums; }
progress, meter, svg { display: block; width: 100%; accent-color: var(--blue); }
svg { height: 5.5rem; border-bottom: 1px solid var(--soft); margin-bottom: .4rem; }
.blue { color: var(--blue); } .entries { fill: var(--blue); } .backlog { fill: var(--warn); }
button, summary { font: inherit; min-height: 2.75rem; padding: .3rem .9rem; cursor: pointer; }
button { color: inherit; background: none; border: 1px solid var(--soft); border-radius: .5rem; }
summary, a { color: var(--blue); padding-inline: 0; }
:focus-visible { outline: 3px solid var(--blue); outline-offset: 2px; }
pre { background: var(--ground); white-space: pre-wrap; font-size: .8rem; }
li { list-style: none; border-top: 1px solid var(--edge); padding-block: .8rem; margin-top: .8rem; }
#said { position: sticky; bottom: .75rem; font-weight: 600; border-color: currentColor; }
</style>
<header>
  <div class="grow"><h1 class="row" id="head" tabindex="-1"></h1><p id="sentence">Loading …</p>
    <div class="row" id="progress"></div></div>
  <p class="soft" id="fresh"></p><button type="button" id="refresh">Refresh</button>
</header>
<main>
  <noscript>This page needs JavaScript. In a terminal: serversync status</noscript>
  <p class="card bad" id="lost" role="alert"></p>
  <section class="card" id="dead" aria-labelledby="dead-title" hidden>
    <h2 id="dead-title">Dead letters</h2>
    <div class="row" id="topics"></div>
    <ul id="list"></ul>
  </section>
  <section class="tiles" id="tiles" aria-label="Figures"></section>
  <section class="card" id="day" aria-label="Last 24 hours"></section>
  <p class="card" id="said" role="status" aria-live="polite"></p>
</main>
<footer class="soft"><div id="who"></div>Refreshed every 10 s while it is visible.</footer>
<script>
"use strict";
const $ = (id) => document.getElementById(id), opened = new Set();  // the letters that are read
let latest = null, pastAt = 0, shown = [], timer = 0, hurry = 0, looks = Promise.resolve();
let working = false, sure = null;  // the letter that is perhaps to be deleted

// --- text and elements ---------------------------------------------------------------------------
// Whatever comes from outside becomes text; characters that could hide or turn it are shown.
const plain = (text) => String(text).replace(/(?![\n\t])[\p{Cc}\p{Cf}\p{Zl}\p{Zp}]/gu,
  (c) => "\\u" + c.codePointAt(0).toString(16).padStart(4, "0"));

function el(what, attributes, ...children) {  // a new element, or a node that there is
  const kind = /^(svg|rect)$/.test(what) ? "2000/svg" : "1999/xhtml";
  const node = what instanceof Node ? what
    : document.createElementNS("http://www.w3.org/" + kind, what);
  for (const [name, value] of Object.entries(attributes))
    if (value != null && value !== false) node.setAttribute(name, value);
  node.append(...children.flat(9).filter(Boolean).map((c) => c instanceof Node ? c : plain(c)));
  return node;
}
const soft = (...text) => el("p", {class: "soft"}, text.filter(Boolean).join(" · "));

function put(host, ...children) {  // only what has changed: a selection and the focus stay
  const fresh = el(host.cloneNode(false), {}, children);
  if (fresh.isEqualNode(host)) return;
  const key = host.contains(document.activeElement) && document.activeElement.dataset.key;
  host.replaceChildren(...fresh.childNodes);
  if (key) [...host.querySelectorAll("[data-key]")].find((n) => n.dataset.key === key)?.focus();
}

const number = (n) => n == null ? "–" : Math.round(n).toLocaleString("en");
const noun = (n, one, more = one + "s") => n === 1 ? one : more;
const bytes = (n) => n == null ? "–" : n < 1000 ? `${n} ${noun(n, "byte")}`
  : n.toLocaleString("en", {notation: "compact", maximumFractionDigits: 1})
    .replace(/[A-Z]/, (power) => ` ${power.replace("K", "k").replace("B", "G")}B`);
// By the machine's own clock, which the sentence goes by, too.
const there = (at) => new Date(Date.parse(at) + latest.utc_offset * 1000).toISOString();
const clock = (at) => there(at).slice(11, 19), date = (at) => there(at).slice(0, 10);
const moment = (at) => !at ? "never" : date(at) === date(latest.at) ? clock(at)
  : `${date(at)} ${clock(at)}`;

async function ask(path, method = "GET") {
  const answer = await fetch("api/v1/" + path, {method, cache: "no-store", signal:
    AbortSignal.timeout(30000), headers: {"X-Requested-With": "serversync"}}).catch(() => null);
  const said = await answer?.json().catch(() => null);
  if (said && answer.ok) return said;
  throw Error(said?.error?.message ?? (answer ? `The server answered with HTTP ${answer.status}.`
    : "The server does not answer."));
}

// --- what there is to see ------------------------------------------------------------------------
const STATES = {good: ["good", "✓", "all well"], busy: ["blue", "↑", "at work"],
  waiting: ["warn", "…", "waiting"], outage: ["bad", "!", "outage"],
  person: ["bad", "!", "needs you"], stopped: ["bad", "■", "stopped"],
  lost: ["warn", "?", "no news"]};

function showHead(state) {
  const [look, sign, word] = STATES[state], host = latest?.host ?? "serversync";
  put($("head"), el("span", {id: "sign", class: look, "aria-hidden": "true"}, sign), host,
    el("span", {id: "state", class: `chip ${look}`}, word));
  document.title = `${host}: ${word}`;
  $("icon").href = "data:image/svg+xml," + encodeURIComponent("<svg viewBox='0 0 16 16' "
    + `xmlns='http://www.w3.org/2000/svg' fill='${getComputedStyle($("sign")).color}'>`
    + `<text x='8' y='14' font-size='18' text-anchor='middle'>${sign}</text></svg>`);
}

function showState({health, progress: job, agent, device, version, frontend}) {
  showHead(health.state);
  put($("sentence"), health.sentence);
  put($("who"), soft(`serversync ${version}`, `as ${device}`, `to ${frontend}`,
    agent.pid && `process ${agent.pid}, since ${moment(agent.since)}`));
  const [done, all, show] = job?.kind === "upload" ? [job.bytes, job.size, bytes]
    : [job?.entries, job?.total, number];
  put($("progress"), job && [
    el("progress", {max: Math.max(1, all), value: done, "aria-label": "Under way"}),
    soft(`${show(done)} of ${show(all)}`, `${show(job.rate)}/s`)]);
}

function tile(name, big, under, rows, ...more) {
  return el("section", {class: "card", "aria-label": name}, el("h2", {}, name),
    el("p", {class: "big"}, number(big)), soft(under),
    rows && el("dl", {}, rows.filter(([, value]) => value).map(([title, value, look]) =>
      el("div", {}, el("dt", {}, title), el("dd", {class: look}, value)))), more);
}

function showTiles({outbox, deliveries: sent, recordings: r, settings: set}) {
  const some = (n, show = number) => n > 0 && show(n);
  const counts = (all, look) => Object.entries(all).map(([name, n]) => [name, number(n), look]);
  const used = r.disk_total ? 1 - r.disk_free / r.disk_total : null;
  const items = set.sections.flatMap((s) => Object.entries(s.items));
  const asked = set.sections.map((s) => s.pulled_at).filter(Boolean).sort().at(-1);
  put($("tiles"),
    tile("Waiting", outbox?.pending, noun(outbox?.pending, "entry", "entries"), outbox && [
      ["Oldest", outbox.oldest_at && moment(outbox.oldest_at)], ...counts(outbox.by_type),
      ...counts(outbox.reasons, "warn")]),
    tile("Delivered", sent?.hour.entries, "in the last hour", sent && [
      ["Last", moment(sent.last_success_at)], ["Recordings", number(sent.hour.files)],
      ["Size", bytes(sent.hour.bytes)], ["Entries, 24 h", number(sent.day.entries)],
      ["Recordings, 24 h", number(sent.day.files)], ["Size, 24 h", bytes(sent.day.bytes)]]),
    tile("Recordings", r.waiting, "to be uploaded", [
      ["Their size", some(r.waiting_bytes, bytes)], ["On disk", bytes(r.bytes)],
      ["To be deleted", some(r.deletions_waiting)],
      ["Cannot be deleted", some(r.deletions_failed), "bad"], ["Disk free", bytes(r.disk_free)],
      ["Disk used", used != null && `${Math.round(100 * used)} %`, used > .9 && "bad"]],
      used != null && el("meter", {max: 1, value: used, high: .9, low: .89, optimum: 0,
        "aria-label": "Disk used"})),
    tile("Settings", asked && items.reduce((sum, [, n]) => sum + n, 0), "from the frontend", [
      ["Asked", asked && moment(asked)], ...items.map(([name, n]) => [name, number(n)]),
      ...set.sections.map((s) => [s.section, s.held ? "held back" : s.error && "failed", "bad"]),
      ["Audio to fetch", some(set.audio?.waiting), "warn"]]));
}

function chart(past, field, title, ...notes) {
  const most = Math.max(...past.map((q) => q[field] ?? 0));
  const text = [...notes, `at most ${number(most)}`].join(", ");
  const bar = (q, x) => q[field] > 0 && el("rect", {class: field, x, width: .9,
    y: 100 - 100 * q[field] / most, height: 100 * q[field] / most});
  return [el("div", {class: "row ends"}, el("h2", {}, title), soft(text)),
    el("svg", {viewBox: `0 0 ${past.length} 100`, preserveAspectRatio: "none", role: "img",
      "aria-label": `${title}: ${text}`}, past.map(bar))];
}

async function showDay() {
  if (Date.now() - pastAt < 60000) return;
  const past = await ask("history"), sum = past.reduce((all, q) => all + q.entries, 0);
  pastAt = Date.now();
  put($("day"),
    chart(past, "entries", "Delivered per 15 min", `${number(sum)} in the last 24 hours`),
    chart(past, "backlog", "Waiting"), el("div", {class: "row ends"},
      [0, 24, 48, 72, 95].map((x) => soft(clock(past[x].at).slice(0, 5)))));
}

function card(m) {
  const name = `entry ${m.outbox_id}`;
  const note = {RETRYING: "in the queue again", DEAD: "its retries are used up"}[m.status];
  const button = (what, label, key = what) => el("button", {"data-key": `${key} ${m.id}`,
    "data-do": what, "aria-label": `${label} ${name}`}, label);
  const ways = m.id !== sure ? [m.status === "PENDING" && button("retry", "Retry"),
    m.status !== "RETRYING" && button("delete", "Delete")] : [el("p", {role: "alert"},
    `Delete ${name}? It was not delivered, and the frontend will never get it: its payload is lost.`
    + " (A recording stays on the disk.) This cannot be undone."),
    button("keep", "Cancel", "delete"), button("drop", "Delete for good")];  // focus: on Cancel
  return el("li", {class: "row", "data-id": m.id}, el("div", {class: "grow"},
    el("h3", {}, `Entry ${m.outbox_id} · ${m.original_topic} · ${m.error_code} `,
      note && el("span", {class: "chip blue"}, note)),
    el("p", {}, m.error_message),
    soft(moment(m.created_at), m.http_status && `HTTP ${m.http_status}`,
      `retried ${m.retry_count} of ${m.max_retries}`, `entity ${m.entity_id}`),
    m.status === "DEAD" && soft(`To send it: sudo serversync dlq retry --force ${m.id}`),
    el("details", {open: opened.has(m.id) && ""}, el("summary", {"data-key": `payload ${m.id}`,
      "aria-label": `Payload of ${name}`}, "Payload"), m.payload == null
      ? el("a", {href: `api/v1/dlq/messages/${m.id}`}, bytes(m.payload_bytes))
      : el("pre", {tabindex: 0}, JSON.stringify(m.payload, null, 2)))),
  el("div", {class: "row"}, ways));
}

function showLetters() {
  const list = $("list"), here = document.activeElement;
  const at = [...list.children].findIndex((li) => li.contains(here));
  put(list, shown.map(card));
  if (at < 0 || list.contains(document.activeElement)) return;
  const near = list.children[Math.min(at, shown.length - 1)];
  (near?.querySelector("[data-key]") ?? $("head")).focus();
}

async function showDead() {
  const {topics, open} = await ask("dlq"), left = topics.filter((t) => t.total > t.resolved);
  const all = left.reduce((sum, t) => sum + t.total - t.resolved, 0);
  for (const m of shown) {  // what became of those that were shown
    const now = open.find((o) => o.id === m.id) ?? await ask(`dlq/messages/${m.id}`).catch(() => m);
    if (now.status === "RESOLVED") say("good", `Entry ${m.outbox_id} was delivered.`);
    if (now.retry_count > m.retry_count) say("bad", `Entry ${m.outbox_id} failed again.`);
  }
  $("dead").hidden = !all;
  put($("topics"), all > open.length && soft(`The newest ${open.length} of ${number(all)}`),
    left.filter((t) => t.pending > 1).map((t) => el("button", {"data-key": t.topic,
      "data-all": t.topic}, `Retry all ${number(t.pending)} of ${t.topic}`)));
  shown = open;
  showLetters();
}

const refresh = () => looks = looks.then(look);  // one after the other

async function look() {
  clearTimeout(timer);
  if (document.hidden) return;  // a request would keep the admin process running
  let lost = "";
  try {
    latest = await ask("status");
    showState(latest);
    showTiles(latest);
    put($("fresh"), `Updated ${clock(latest.at)}`);
    if (latest.database.ok) await Promise.all([showDay(), showDead()]);
  } catch (error) {
    lost = `${error.message} It is asked again every 10 s. What you see below may be old.`;
    showHead("lost");
  }
  put($("lost"), lost);
  document.body.classList.toggle("old", lost);
  for (const id of ["day", "dead"]) $(id).classList.toggle("old", !latest?.database.ok);
  timer = setTimeout(refresh, hurry-- > 0 ? 1000 : 10000);
}

const say = (look, text) => put(Object.assign($("said"), {className: `card ${look}`}), text);

async function act(method, path) {
  if (working) return;
  working = true;
  say("", "Working …");
  await ask(path, method).then(({message}) => say("good", message),
    (error) => say("bad", `Not done: ${error.message}`));
  if (method === "DELETE") shown = shown.filter(({id}) => !path.endsWith(id));
  [working, hurry] = [false, 10];  // the agent is at work: look more often for a while
  refresh();
}

$("refresh").onclick = () => { pastAt = 0; refresh(); };
$("list").addEventListener("toggle", ({target}) =>
  opened[target.open ? "add" : "delete"](target.closest("li").dataset.id), true);
$("list").onclick = ({target}) => {
  const id = target.closest("li")?.dataset.id, what = target.dataset.do;
  if (what === "retry") act("POST", `dlq/messages/${id}/retry`);
  if (what === "drop") act("DELETE", `dlq/messages/${id}`);
  sure = what === "delete" ? id : null;
  showLetters();
};
$("topics").onclick = ({target: {dataset: {all}}}) =>
  all && act("POST", `dlq/${encodeURIComponent(all)}/retry-all`);
document.onkeydown = ({key}) => {
  if (key !== "Escape") return;
  say("", "");
  sure = null;
  showLetters();
};
document.addEventListener("visibilitychange", refresh);
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


def _of(parse: Parse) -> Parse:
    """A parser of the option table, for arguments. (The value is not shown: perhaps a secret.)"""

    def parsed(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parsed


def _up_to(most: int) -> Parse:
    return _of(_like(rf"[\s\S]{{1,{most}}}", f"1 to {most} characters"))


_letter = _of(_like("[0-9]{1,18}|[0-9A-Fa-f-]{4,36}", "a seq, a UUID or 4 characters of it"))


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
    parser.set_defaults(**{flag[2:].replace("-", "_"): False for flag in FLAGS})
    groups = {"": parser.add_subparsers(dest="command", required=True, metavar="COMMAND")}
    for name, (text, takes, _) in COMMANDS.items():
        group, _, word = name.rpartition(" ")
        command = groups[group].add_parser(word, help=text, description=text)
        command.add_argument("--env-file", metavar="FILE", default=argparse.SUPPRESS)
        for each in takes.split():
            if each in FLAGS:  # a default here would hide what stands before an action
                default = argparse.SUPPRESS
                command.add_argument(each, action="store_true", default=default, help=FLAGS[each])
            else:
                metavar, parse, what, *more = TAKEN[each]
                given: dict[str, Any] = more[0] if more else {}
                command.add_argument(each, metavar=metavar, type=parse, help=what, **given)
        if name in ("dlq", "settings"):
            actions: dict[str, Any] = {"dest": "action", "metavar": "ACTION"}
            groups[name] = command.add_subparsers(required=name == "dlq", **actions)
    return parser


FLAGS: Final = {
    "--json": "print JSON",
    "--yes": "do it; without this it only says what it would do",
    "--force": "also what a newer entry has overtaken, or whose retries are used up",
    "--all": "what is well, or resolved, too",
    "--brief": "one line, with the worst",
    "--watch": "repaint once a second",
    "--dry-run": "only show what would change",
    "--print-sql": "only print what is missing",
}
# All else that a command may take: how it is shown and read, what it is, and how it is counted.
TAKEN: Final[dict[str, tuple[Any, ...]]] = {
    "--admin-url": ("URL", _of(_database), "connect so, instead of as postgres"),
    "--recordings": ("DIR", str, "instead, open this directory of the backend's to serversync"),
    "--announcements": ("DIR", str, "and this one"),
    "--backend-user": ("USER", str, "who reads what it puts there; default: the owner"),
    "type": ("TYPE", _up_to(30), "its entity type"),
    "id": ("UUID", _of(_like(_UUID.pattern, "a UUID")), "its entity's id"),
    "--idempotency-key": ("KEY", _up_to(200), "the same key: the same entry"),
    "topic": ("TOPIC", str, "of this entity type only", {"nargs": "?"}),
    "--page": ("N", _of(_whole(1, 10**9)), "which; default: 1", {"default": 1}),
    "--page-size": ("N", _of(_whole(1, 1000)), "how many; default: 20", {"default": 20}),
    "letter": ("ID", _letter, "its seq, its id or the beginning of that"),
    "letters": ("ID", _letter, "their seqs, ids or the beginnings of these", {"nargs": "+"}),
    "--seq": ("A-B", _sequence, "from seq A to seq B"),
    "--since": ("TIME", _moment, "enqueued at TIME or later"),
    "--until": ("TIME", _moment, "enqueued until TIME"),
    "--type": ("TYPE", str, "of this entity type"),
    "--call": ("ID", str, "of this call: its log's UUID, or Call-ID"),
    "--days": ("N", _of(_number(0.001, 36500)), "instead of SYNC_RETENTION_DAYS"),
    "section": ("SECTION", str, "its name", {"choices": tuple(SOURCES)}),
    "--listen": ("WHERE", str, f"ADDRESS:PORT, or a Unix socket; default: {ADMIN_LISTEN}"),
    "--idle": ("SECONDS", float, argparse.SUPPRESS, {"default": ADMIN_IDLE}),
}
# What a person may type: what it is for, what it takes, and who does it (or `dispatch`).
COMMANDS: Final[dict[str, tuple[str, str, Any]]] = {
    "run": ("the service: deliver until stopped", "", None),
    "once": ("deliver what is due, and exit", "", None),
    "status": ("one screen: what it does, what waits, what is wrong", "--json --watch", None),
    "doctor": ("check everything, with a hint for each problem", "--json --all --brief", None),
    "setup": (
        "prepare the database and the recordings' directory",
        "--print-sql --admin-url --recordings --announcements --backend-user", do_setup),
    "enqueue": (
        "put an entry into the outbox; its payload comes by stdin",
        "--json type id --idempotency-key", do_enqueue),
    "dlq": ("entries that were given up: look, send again, delete", "", do_dlq),
    "dlq list": (
        "a page of dead letters, newest first", "--json topic --all --page --page-size", _dlq_list),
    "dlq show": ("one dead letter, with its payload", "--json letter", _dlq_show),
    "dlq retry": (
        "send dead letters again, under their old seq", "--json --force letters", _dlq_retry),
    "dlq retry-all": ("send all that can be sent again", "--json --force topic", _dlq_retry_all),
    "dlq delete": (
        "delete dead letters: they are never sent", "--json --yes letters", _dlq_delete),
    "replay": (
        "send again what was sent",
        "--json --force --yes --seq --since --until --type --call", do_replay),
    "prune": ("delete old rows that were sent", "--yes --days", do_prune),
    "settings": ("what came back from the frontend", "--json", do_settings),
    "settings pull": ("fetch and apply them now", "--dry-run --json", None),
    "settings accept": (
        "apply a section that was held back, because so much of it was gone",
        "section --json", None),
    "metrics": ("print the metrics, as Prometheus reads them", "", do_metrics),
    "admin": (
        "answer HTTP requests: status page, dead letters, metrics, health",
        "--listen --idle", None),
}  # fmt: skip


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

    # Where the service's relative paths are meant from. (The admin process has a unit of its own.)
    where = os.getcwd if arguments.command in ("run", "admin") else working_directory

    def read() -> Config:
        try:
            return load_config(read_env_file(arguments.env_file, environ), where)
        except ConfigError as error:
            if isinstance(error.__context__, PermissionError):  # of the file; root may read it
                raise ConfigError([f"{error}: run: {as_root()}"]) from None
            raise

    if arguments.command == "admin":  # a bad configuration is answered, and ends nothing
        return admin(read, arguments.listen, environ, arguments.idle)
    if arguments.command == "doctor":
        return do_doctor(read, arguments, environ)
    if arguments.command == "status":
        return do_status(read, arguments, environ)
    if arguments.command == "setup" and {arguments.recordings, arguments.announcements} != {None}:
        if arguments.print_sql:
            how = "--print-sql prints what the database needs: name no directory"
            raise Refused("invalid", how)
        return setup_rights(arguments, environ)  # before there is any configuration
    config = read()
    configure_logging(config)
    if arguments.command != "setup":
        become_service_user(environ, arguments.command)
    if do := COMMANDS[arguments.command][2]:
        code = int(do(config, arguments, environ))
        sys.stdout.flush()
        return code
    process = Process(environ)
    process.install()
    once = arguments.command == "once"
    state = StateFile({} if once else environ)
    agent = Agent(config, process, state.show, once, (Settings, Announcements))
    agent.reread = read
    return agent.run_once() if once else agent.serve()


def _entry_point() -> NoReturn:
    sys.exit(main())


if __name__ == "__main__":
    _entry_point()

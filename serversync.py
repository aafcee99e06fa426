#!/usr/bin/python3
"""serversync: drains a voicebot's outbox to its web frontend, and cleans up behind it.

      voicebot --INSERT--> PostgreSQL: sync_outbox --.
         |                                           |  POST /api/ingest/sync            (JSON)
         '--writes--> storage/recordings/<callId>/ --+--> frontend
                              ^                      |  POST /api/ingest/recording-file  (audio)
                              '------- deletes ------'  once the frontend has confirmed

Promises
  Can an entry be lost?   No. It is marked, and a file is deleted, only after the frontend has
                          confirmed it in the contract's own words. An outage uses up nothing.
  Can one be sent twice?  Only what was under way when its answer did not come (a kill, a time-out,
                          a reset). Receivers tell by seq, entityId and Idempotency-Key.
  In order?               The entries of one call (a lane) arrive by id; calls do not wait for
                          each other; metadata never waits behind audio.
  What blocks the rest?   Nothing. A bad entry is set aside, and in the end goes to
                          serversync.dead_letters; what is pending is never deleted.

Map
  configuration . vocabulary . logging and systemd . policy (pure decisions) . SQL . database .
  frontend . recordings . the agent: deliveries . the agent: cycle and loop . command line

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
import contextlib
import difflib
import errno
import fcntl
import hashlib
import http.client
import json
import logging
import os
import random
import re
import select
import signal
import socket
import ssl
import stat
import sys
import termios
import time
import traceback
import uuid
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from datetime import UTC
from email.utils import parsedate_to_datetime
from enum import Enum
from functools import cached_property, partial
from typing import Any, Final, NoReturn

import psycopg
import urllib3
from psycopg.conninfo import conninfo_to_dict
from systemd import daemon, journal
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.util import Timeout, parse_url

__version__ = "0.1.0"

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


def _text(value: str) -> str:
    return value


def _number(low: float, high: float) -> Callable[[str], float]:
    def parse(value: str) -> float:
        plain = re.fullmatch(r"[0-9]{1,12}(\.[0-9]{1,9})?", value)
        if not plain or not low <= float(value) <= high:
            raise ValueError(f"must be a number from {low:.12g} to {high:.12g}")
        return float(value)

    return parse


def _whole(low: int, high: int) -> Callable[[str], int]:
    def parse(value: str) -> int:
        if not re.fullmatch(r"[0-9]{1,12}", value) or not low <= int(value) <= high:
            raise ValueError(f"must be a whole number from {low} to {high}")
        return int(value)

    return parse


def _size(low: int, high: int) -> Callable[[str], int]:
    def parse(value: str) -> int:
        match = re.fullmatch(r"([0-9]{1,12}) ?(KiB|MiB)?", value)
        units = {None: 1, "KiB": 1024, "MiB": 1024 * 1024}
        size = int(match[1]) * units[match[2]] if match else -1
        if not low <= size <= high:
            raise ValueError(f"must be a size from {low // 1024} KiB to {high // 1048576} MiB")
        return size

    return parse


def _choice(*allowed: str) -> Callable[[str], str]:
    def parse(value: str) -> str:
        if value not in allowed:
            raise ValueError(f"must be one of: {', '.join(allowed)}")
        return value

    return parse


def _database(value: str) -> str:
    try:
        conninfo_to_dict(value)
    except psycopg.Error:
        raise ValueError("must be a libpq URL such as postgresql:///voicebot") from None
    return value


def _frontend(value: str) -> str:
    if "@" in value:
        raise ValueError("must not hold a user or a password: use SYNC_TOKEN_FILE")
    try:
        url = parse_url(value)
    except urllib3.exceptions.HTTPError:
        url = parse_url("")
    plain = re.fullmatch(r"[!-~]+", value) and not re.search(r"[?#\\<>\"^`{|}]", value)
    if not plain or url.scheme not in ("http", "https") or not url.host:
        raise ValueError("must be an http(s) URL such as https://voice.example.com")
    return value.rstrip("/")


def _verify_path(value: str) -> str:
    plain = value.replace("{callLogId}", "").replace("{recordingId}", "")
    if not re.fullmatch(r"/[\w./~-]*", plain, re.ASCII):
        raise ValueError("must be a path such as /api/recordings/{callLogId}")
    return value


def _device(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9._:-]{1,64}", value):
        raise ValueError("must be 1 to 64 letters, digits, dots, colons, dashes, underscores")
    return value


def _absolute(value: str) -> str:
    if not value.startswith("/"):
        raise ValueError("must be an absolute path")
    return value


def _option(name: str, default: str | None, parse: Callable[[str], Any], text: str) -> Any:
    """A row of the option table. A default of None: required; an empty one: not set."""
    return field(metadata={"name": name, "default": default, "parse": parse, "text": text})


RECORDINGS_DIR: Final = "/opt/virtual-voicebot/storage/recordings"
ANNOUNCEMENTS_DIR: Final = "/opt/virtual-voicebot/data/announcements"


@dataclass(frozen=True)
class Config:
    """The option table: every key with its default, its bounds and what it is for."""

    database_url: str = _option(
        "DATABASE_URL", None, _database, "libpq URL; postgresql:///voicebot for peer authentication"
    )
    frontend_base_url: str = _option(
        "FRONTEND_BASE_URL", None, _frontend, "http(s) URL of the frontend, without /api/…"
    )
    poll_interval: float = _option(
        "SYNC_POLL_INTERVAL_SEC", "300", _number(0.1, 86400), "longest wait between two looks"
    )
    batch_size: int = _option("SYNC_BATCH_SIZE", "100", _whole(1, 10000), "entries a request")
    batch_bytes: int = _option(
        "SYNC_BATCH_BYTES", "512 KiB", _size(1024, 4 << 20), "bytes a request"
    )
    entry_max_bytes: int = _option(
        "SYNC_ENTRY_MAX_BYTES", "8 MiB", _size(1024, 256 << 20), "a larger entry is dead at once"
    )
    timeout: float = _option(
        "SYNC_TIMEOUT_SEC", "30", _number(0.5, 300), "to connect, without progress, for an answer"
    )
    retry_max: int = _option(
        "SYNC_RETRY_MAX",
        "8",
        _whole(1, 1000),
        "charged attempts until a dead letter (and SYNC_RETRY_HOURS)",
    )
    retry_hours: float = _option(
        "SYNC_RETRY_HOURS", "24", _number(0, 8760), "hours until a dead letter (and SYNC_RETRY_MAX)"
    )
    recordings_dir: str = _option(
        "SYNC_RECORDINGS_DIR", RECORDINGS_DIR, _absolute, "where the backend writes its recordings"
    )
    file_grace: float = _option(
        "SYNC_FILE_GRACE_SEC", "300", _number(0, 86400), "how long a missing file is waited for"
    )
    delete_after: float = _option(
        "SYNC_DELETE_AFTER_SEC",
        "60",
        _number(0, 86400),
        "how long a call's directory must be quiet",
    )
    extra_files: str = _option(
        "SYNC_EXTRA_FILES",
        "keep",
        _choice("keep", "delete"),
        "what to do with files of a call that were never uploaded",
    )
    upload_kbps: float = _option(
        "SYNC_UPLOAD_KBPS", "0", _number(0, 10_000_000), "limit of uploads, 1000 bit/s; 0: none"
    )
    verify_path: str = _option(
        "SYNC_VERIFY_PATH", "", _verify_path, "HEAD here must confirm an upload's length"
    )
    retention_days: float = _option(
        "SYNC_RETENTION_DAYS", "30", _number(0, 36500), "processed rows are kept; 0: for ever"
    )
    token_file: str = _option("SYNC_TOKEN_FILE", "", _absolute, "file with the bearer token")
    token: str = _option("SYNC_TOKEN", "", _text, "the bearer token itself (better: the file)")
    ca_file: str = _option("SYNC_CA_FILE", "", _absolute, "PEM file of a private CA")
    client_cert: str = _option("SYNC_CLIENT_CERT", "", _absolute, "PEM client certificate")
    client_key: str = _option("SYNC_CLIENT_KEY", "", _absolute, "PEM key, if not in the above")
    device_id: str = _option(
        "SYNC_DEVICE_ID", "", _device, "name of this sender; derived from the machine id"
    )
    log_level: str = _option(
        "SYNC_LOG_LEVEL", "info", _choice("debug", "info", "warning", "error"), "least level shown"
    )
    settings_interval: float = _option(
        "FRONTEND_SYNC_INTERVAL_SEC", "60", _number(0, 86400), "settings pull (not in this version)"
    )
    announcements_dir: str = _option(
        "SYNC_ANNOUNCEMENTS_DIR", ANNOUNCEMENTS_DIR, _absolute, "audio of the settings pull (same)"
    )


OPTIONS: Final[tuple[Field[Any], ...]] = fields(Config)
NAMES: Final = tuple(option.metadata["name"] for option in OPTIONS)
assert all(option.default is MISSING for option in OPTIONS)


_UNQUOTED: Final = re.compile(r"(?:\\[\s\S]?|[^\\\n\r])*")
_QUOTED: Final = {
    "'": re.compile(r"'([^']*)'"),
    '"': re.compile(r'"((?:[^"\\]|\\[\s\S])*)"'),
}


def parse_env_file(text: str) -> dict[str, str]:
    """KEY=VALUE with comments, quotes and continued lines, as systemd reads an EnvironmentFile."""
    found: dict[str, str] = {}
    problems = []
    at = 0
    while at < len(text):
        head = re.compile(r"[ \t\r\n]*([#;][^\n\r]*|[^=\n\r]*)(=?)").match(text, at)
        assert head
        line = text.count("\n", 0, head.start(1)) + 1
        at, key = head.end(), head[1].rstrip()
        if not key or key[0] in "#;":
            at = head.end(1) if key else at
            continue
        if not head[2] or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", key):
            # Never the line itself: it may be a piece of a secret.
            problems.append(f"line {line} is not KEY=VALUE")
            at = _UNQUOTED.match(text, at).end()  # type: ignore[union-attr]
            continue
        try:
            found[key], at = _env_value(text, at)
        except ValueError as error:
            problems.append(f"line {line}, {key}: {error}")
            break
    if problems:
        raise ConfigError(problems)
    return found


def _env_value(text: str, at: int) -> tuple[str, int]:
    """The value that begins here, and where it ends."""
    value = ""
    while True:
        while text[at : at + 1] in (" ", "\t"):
            at += 1
        quote = text[at : at + 1]
        if quote not in _QUOTED or not quote:
            break
        piece = _QUOTED[quote].match(text, at)
        if not piece:
            raise ValueError("a quote is not closed")
        inner = piece[1]
        if quote == '"':
            inner = re.sub(r'\\(["\\`$])|\\\n', r"\1", inner)
        value, at = value + inner, piece.end()
    rest = _UNQUOTED.match(text, at)
    assert rest
    bare = re.sub(r"((?:^|[^\\])(?:\\\\)*(?:\\[ \t])?)[ \t]+$", r"\1", rest[0])
    value += re.sub(r"\\([\s\S]?)", lambda escaped: escaped[1].strip("\r\n"), bare)
    if re.search(r"[\0-\x08\x0b-\x1f\x7f]", value):
        raise ValueError("a control character in the value")
    return value, rest.end()


def read_env_file(path: str | None, environ: Mapping[str, str]) -> dict[str, str]:
    """The settings as text: the file's, and over them those of the environment."""
    settings: dict[str, str] = {}
    if path is not None or os.path.exists(ENV_FILE):
        try:
            with open(path or ENV_FILE, encoding="utf-8") as file:
                settings = parse_env_file(file.read(1 << 20))
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
            hint = " (try: sudo serversync …)" if isinstance(error, PermissionError) else ""
            raise ConfigError([f"cannot read {path or ENV_FILE}: {reason}{hint}"]) from None
        except ConfigError as error:
            raise ConfigError([f"{path or ENV_FILE}: {line}" for line in error.problems]) from None
    ours = {k: v for k, v in environ.items() if k in NAMES or k.startswith("SYNC_")}
    return {k: v for k, v in (settings | ours).items() if v.strip()}


def load_config(settings: Mapping[str, str], environ: Mapping[str, str]) -> Config:
    """A checked Config, or a ConfigError with all that is wrong and what is allowed."""
    problems = []
    for key in sorted(set(settings) - set(NAMES)):
        if key.startswith("SYNC_"):
            near = difflib.get_close_matches(key, NAMES, 1)
            hint = f"did you mean {near[0]}?" if near else "see serversync --help"
            problems.append(f"{key} is unknown: {hint}")
    values: dict[str, Any] = {}
    for option in OPTIONS:
        name, default, parse = (option.metadata[k] for k in ("name", "default", "parse"))
        text = settings.get(name, default)
        if text is None:
            problems.append(f"{name} is required: {option.metadata['text']}")
            continue
        try:
            values[option.name] = parse(text.strip()) if text else text
        except ValueError as error:
            problems.append(f"{name} {error}{_shown(name, text)}")
    if not problems:
        config = Config(**values)
        config = replace(config, device_id=config.device_id or derived_device_id())
        token = _find_token(config, environ, problems)
        config = replace(config, token=token)
        problems += _cross_checks(config, environ)
    if problems:
        raise ConfigError(problems)
    return config


def _shown(name: str, text: str) -> str:
    """A wrong value, unless it may be a secret in the wrong place."""
    secret = name in ("SYNC_TOKEN", "DATABASE_URL") or "@" in text
    if secret or (name == "SYNC_TOKEN_FILE" and not text.startswith("/")):
        return ""
    return f" (it is {mask(text)[:80]!r})"


def _find_token(config: Config, environ: Mapping[str, str], problems: list[str]) -> str:
    """The systemd credential if it is not empty, then the file, then the variable."""
    token = config.token
    credential = os.path.join(environ.get("CREDENTIALS_DIRECTORY") or "/nonexistent", "token")
    files = [("SYNC_TOKEN_FILE", config.token_file)] if config.token_file else []
    if os.path.exists(credential):
        files.append(("credential token", credential))
    for name, path in files:
        try:
            with open(path, encoding="ascii") as file:
                token = file.read(8192).strip() or token
        except (OSError, UnicodeDecodeError) as error:
            problems.append(f"{name}: cannot read {path}: {getattr(error, 'strerror', 'not text')}")
    if not re.fullmatch(r"[!-~]*", token):
        problems.append("the token must be one line of visible ASCII characters")
    return token


def _cross_checks(config: Config, environ: Mapping[str, str]) -> Iterator[str]:
    if config.entry_max_bytes < config.batch_bytes:
        yield "SYNC_ENTRY_MAX_BYTES must not be less than SYNC_BATCH_BYTES"
    if config.client_key and not config.client_cert:
        yield "SYNC_CLIENT_KEY is set without SYNC_CLIENT_CERT"
    try:
        tls_context(config)
    except (OSError, ssl.SSLError) as error:
        reason = error.strerror or error
        yield (
            f"SYNC_CA_FILE, SYNC_CLIENT_CERT, SYNC_CLIENT_KEY cannot be used: {reason} "
            "(is each there, readable, PEM, and the key without a pass phrase?)"
        )
    watchdog = int(environ.get("WATCHDOG_USEC") or 0) / 1e6
    if watchdog and max(config.timeout, DB_DEADLINE) >= watchdog / 2:
        yield (
            f"SYNC_TIMEOUT_SEC ({config.timeout:g}) and the database's {DB_DEADLINE:g} s must be "
            f"less than half of the unit's WatchdogSec ({watchdog:g})"
        )


def tls_context(config: Config) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=config.ca_file or None)
    context.sslsocket_class = _PeekedSocket
    if config.client_cert:
        # An empty pass phrase: OpenSSL would ask for it on the terminal.
        context.load_cert_chain(config.client_cert, config.client_key or None, password="")
    return context


def derived_device_id() -> str:
    """Stable, and not the machine id itself, which is confidential (machine-id(5))."""
    try:
        with open("/etc/machine-id", encoding="ascii") as file:
            seed = file.read().strip()
    except OSError:
        seed = socket.gethostname()
    return hashlib.sha256(b"serversync" + seed.encode()).hexdigest()[:16]


# ==================================================================================================
# Vocabulary
# One word for one thing: entry, try, attempt (a charged try), lane, set aside, dead, outage.
# ==================================================================================================

FILE_TYPE: Final = "recording_file"


class Fate(Enum):
    """What becomes of that which was sent."""

    SENT = "sent"
    DEAD = "dead"  # the entry's fault: no other answer will ever come
    SUSPECT = "suspect"  # perhaps the entry's fault, perhaps the frontend's
    ASIDE = "set aside"  # nobody's fault, or ours: waits, is never charged
    OUTAGE = "outage"  # surely not the entry's fault


class Trouble(Enum):
    """Why there is no answer."""

    UNREACHABLE = "cannot be reached"
    TLS = "TLS failed"
    TIMEOUT = "no answer in time"
    RESET = "connection lost"
    GARBLED = "not HTTP"


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
    retry_after: str | None = None
    length: str | None = None
    trouble: Trouble | None = None
    detail: str = ""
    steady: bool = False  # bytes moved until the end: slow, not stuck
    complete: bool = True  # the whole body went out before the answer came
    duration: float = 0.0

    @cached_property
    def said(self) -> Any:
        """Its body as JSON, or None."""
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError):
            return None


@dataclass(frozen=True)
class Past:
    """What is known of an entry's earlier tries."""

    tries: int = 0
    attempts: int = 0
    successes: int | None = None  # the endpoint's counter at the last failure; None: no failure yet
    age: float = 0.0  # seconds since the first failure


class Next(Enum):
    WAITS = "waits"
    DEAD = "dead"
    HELD = "held"  # its whole type is rejected: waits, uncharged, until one succeeds


@dataclass(frozen=True)
class Transition:
    to: Next
    tries: int
    attempts: int
    delay: float
    charged: bool


@dataclass(frozen=True)
class Batch:
    """Entries in the order in which they go, with their JSON as PostgreSQL wrote it."""

    seqs: list[int]
    sizes: list[int]
    body: bytes  # {"entries":[…]}; empty when the only entry is too large for one piece

    def part(self, picked: Sequence[int]) -> Batch:
        """Some of the entries, cut out of the same text (HEAD, entry, comma, entry, …, TAIL)."""
        starts, at = [], len(BODY_HEAD)
        for size in self.sizes:
            starts.append(at)
            at += size + 1
        text = memoryview(self.body)
        pieces = [text[starts[i] : starts[i] + self.sizes[i]] for i in picked]
        body = BODY_HEAD + b",".join(pieces) + BODY_TAIL if self.body else b""
        return Batch([self.seqs[i] for i in picked], [self.sizes[i] for i in picked], body)


BODY_HEAD: Final = b'{"entries":['
BODY_TAIL: Final = b"]}"


@dataclass(frozen=True)
class FileEntry:
    """A recording_file entry, with what is known of its earlier looks and of its recording."""

    seq: int
    lane: str
    entity_id: str
    call_log_id: str | None
    recording_id: str
    file_path: str | None
    call_id: str | None
    tries: int
    waited: float
    upload_status: str | None
    file_url: str | None
    second: bool


@dataclass(frozen=True)
class Receipt:
    """What is written down of a request that was confirmed."""

    kind: str
    size: int
    key: str
    request_sha256: str | None
    answer: Answer
    lane: str | None = None
    entity_id: str | None = None
    url: str | None = None


@dataclass
class Outage:
    """Nothing gets through, and it is no entry's fault."""

    code: str
    reason: str
    since: float
    tries: int = 0
    due: float = 0.0


@dataclass(frozen=True)
class Aside:
    """An entry that failed alone, and what follows from it."""

    seq: int
    entity_type: str
    lane: str
    call: str | None
    verdict: Verdict
    step: Transition
    successes: int
    waited: float
    recording_id: str | None


OUTAGE_LANES: Final = 3  # so many lanes set aside in a row, without a success between: an outage
OUTAGE_LANES_ONCE: Final = 10


@dataclass
class Endpoint:
    """What the agent remembers of one of the frontend's two doors; a restart may forget it."""

    name: str
    size: int
    gentle: bool = False  # after a time-out or a 413 it grows by a tenth, not by doubling
    outage: Outage | None = None
    lanes: int = OUTAGE_LANES
    aside: list[Aside] = field(default_factory=list)  # in a row, and not yet written down
    tried: dict[str, None] = field(default_factory=dict)  # lanes, in the order of their last try
    held: dict[str, int] = field(default_factory=dict)  # types, and how often they were asked
    suspected: dict[int, int] = field(default_factory=dict)  # successes at failures it hid


@dataclass
class Tally:
    """What one cycle did; its sentence is made of it."""

    entries: int = 0
    files: int = 0
    bytes: int = 0
    removed: int = 0
    aside: int = 0
    dead: int = 0
    notes: list[str] = field(default_factory=list)


class Lost(Exception):
    """The database connection, and with it the lock, is gone: reconnect before going on."""


class Stopping(Exception):
    """A signal asked for the end: unwind, mark nothing."""


class TimedOut(Exception):
    """A deadline passed where there was no socket to shut down yet."""


class Unavailable(Exception):
    """The database is not there, or not as it must be; a state, not a failure."""


class EntryTrouble(Exception):
    """A local reason against sending one recording; carries its verdict."""

    def __init__(self, fate: Fate, code: str, reason: str) -> None:
        super().__init__(reason)
        self.verdict = Verdict(fate, code, reason)


class Gone(EntryTrouble):
    """The audio is not there: perhaps because we removed it ourselves."""


# ==================================================================================================
# Logging and systemd
# Sentences with fields, masked before they leave; signals, deadlines and the watchdog.
# ==================================================================================================

log: Final = logging.getLogger("serversync")

_SECRETS: Final = (
    (re.compile(r"-----BEGIN [A-Z ]+-----.*?(?:-----END [A-Z ]+-----|\Z)", re.S), "***"),
    (re.compile(r"(?i)\b(bearer|basic)\s+[^\s\"',;]+"), r"\1 ***"),
    (re.compile(r"(://[^/\s:@]*:)[^\s@]*@"), r"\1***@"),
    (
        re.compile(
            r"(?i)((?:password|passwd|pwd|secret|token|api[_-]?key|access[_-]?key)"
            r"[\"']?\s*[=:]\s*)(?:\*\*\*|\"[^\"]*\"?|'[^']*'?|[^\s\"'&,;]+)"
        ),
        r"\1***",
    ),
    (re.compile(r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"), "***"),
    (
        re.compile(
            r"\b(?:gh[pousr]_|github_pat_|glpat-|sk[-_]|xox[a-z]-|xoxe\.|xapp-|AIza)[\w.-]{16,}"
        ),
        "***",
    ),
    (re.compile(r"\beyJ[\w-]{8,}\.[\w-]+\.[\w-]*"), "***"),
)


def mask(text: str, known: Sequence[str] = ()) -> str:
    """The text without secrets: the known ones, and all that look like one."""
    text = _without_known(text, known)
    for pattern, instead in _SECRETS:
        text = pattern.sub(instead, text)
    return text


def _without_known(text: str, known: Sequence[str]) -> str:
    for secret in sorted(known, key=len, reverse=True):
        if len(secret) >= 4:
            text = text.replace(secret, "***")
    return text


def clean(text: str, known: Sequence[str] = (), limit: int = 1024, lines: bool = False) -> str:
    """Text from outside, fit for SQL, the journal and sd_notify, where a line break would begin
    another variable: no control character, no surrogate, no secret, short."""
    text = _without_known(text[: 1 << 20], known)[: 4 * limit]
    text = text.encode("utf-8", "replace").decode("utf-8")
    unfit = r"[\x00-\x08\x0b-\x1f\x7f-\x9f]" if lines else r"[\x00-\x1f\x7f-\x9f\u2028\u2029]"
    return mask(re.sub(unfit, " ", text))[:limit]


class Masking(logging.Filter):
    """The journal handler also sends record.args and extra fields: mask the record itself."""

    def __init__(self) -> None:
        super().__init__()
        self.known: Sequence[str] = ()

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg = clean(record.getMessage(), self.known, 4096)
        record.args = ()
        if record.exc_info:
            lines = traceback.format_exception(*record.exc_info)
            record.exc_text = clean("".join(lines), self.known, 8192, lines=True)
            record.exc_info = None
        for key, value in list(vars(record).items()):
            if key.isupper():
                setattr(record, key, clean(str(value), self.known))
        return True


MASKING: Final = Masking()


def known_secrets(config: Config) -> list[str]:
    password = conninfo_to_dict(config.database_url).get("password")
    return [secret for secret in (config.token, str(password or "")) if secret]


def start_logging(environ: Mapping[str, str]) -> None:
    """To the journal with fields when standard error is the journal, else plain lines."""
    handler: logging.Handler = logging.StreamHandler()
    with contextlib.suppress(OSError):
        status = os.fstat(2)
        if environ.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}":
            handler = journal.JournalHandler(SYSLOG_IDENTIFIER="serversync")
    handler.addFilter(MASKING)
    logging.raiseExceptions = False  # a full journal must not print tracebacks
    logging.root.handlers[:] = [handler]
    logging.getLogger("urllib3").setLevel(logging.CRITICAL)


def configure_logging(config: Config) -> None:
    MASKING.known = known_secrets(config)
    log.setLevel(config.log_level.upper())


def say(level: int, event: str, sentence: str, exc_info: bool = False, **more: Any) -> None:
    """One sentence with its fields; a field that is None is left out."""
    extra = {key: str(value) for key, value in more.items() if value is not None}
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
        if topic not in self._said and len(self._said) > 256:
            self._said.clear()
        self._said[topic] = (key, now, 0)
        say(level, event, text, **more)

    def over(self, topic: str) -> bool:
        """True once for a topic that was spoken of."""
        return self._said.pop(topic, None) is not None


@dataclass
class Limit:
    """A deadline on something that blocks, and how to end it."""

    until: float
    shut: Callable[[], None] | None
    last: float = float("inf")  # no extension goes beyond
    expired: bool = False

    def extend(self, seconds: float) -> None:
        self.until = min(time.monotonic() + seconds, self.last)


def _nothing() -> None:
    pass


STOP_GRACE: Final = 0.8  # a request under way may still end by itself; the whole stop takes < 2 s
TICK: Final = 0.5


class Process:
    """Everything that interrupts: signals, deadlines, and the watchdog that progress feeds."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.stop_at: float | None = None
        self.reload = False
        self.wake_fd, self._wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._limits: list[Limit] = []
        self._interval = int(environ.get("WATCHDOG_USEC") or 0) / 1e6 / 4
        self._fed = 0.0

    @property
    def idle_limit(self) -> float:
        """The longest wait at the wait point: half the watchdog's time."""
        return 2 * self._interval or 3600.0

    def install(self) -> None:
        signal.set_wakeup_fd(self._wake_w, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self._on_stop)
        signal.signal(signal.SIGINT, self._on_stop)
        signal.signal(signal.SIGHUP, self._on_reload)
        signal.signal(signal.SIGALRM, self._on_tick)

    def _on_stop(self, *_: object) -> None:
        self.stop_at = self.stop_at or time.monotonic()

    def _on_reload(self, *_: object) -> None:
        self.reload = True

    def _on_tick(self, *_: object) -> None:
        """Runs twice a second while something blocks: feeds the watchdog until the deadline."""
        if not self._limits:
            return
        limit, now = self._limits[-1], time.monotonic()
        stopped = self.stop_at is not None and now >= self.stop_at + STOP_GRACE
        if now < limit.until and not stopped:
            self.progress()
            return
        limit.expired = True
        if limit.shut is None:
            raise TimedOut
        limit.shut()

    @contextlib.contextmanager
    def deadline(
        self, seconds: float, shut: Callable[[], None] | None, most: float = float("inf")
    ) -> Iterator[Limit]:
        """Ends what blocks: shuts its socket, or raises TimedOut where there is none yet.

        Socket time limits are not deadlines: an answer of a byte every 0.4 s outlives a limit of
        1 s, and a signal alone does not end a recv (PEP 475).
        """
        limit = Limit(0.0, shut, time.monotonic() + most)
        limit.extend(seconds)
        self._limits.append(limit)
        if len(self._limits) == 1:
            signal.setitimer(signal.ITIMER_REAL, TICK, TICK)
        try:
            yield limit
        finally:
            try:
                limit.expired, limit.shut = limit.expired, _nothing  # no TimedOut from here on
            finally:
                self._limits.remove(limit)
                if not self._limits:
                    signal.setitimer(signal.ITIMER_REAL, 0)

    def check(self) -> None:
        if self.stop_at is not None:
            raise Stopping

    def progress(self) -> None:
        """Feeds the watchdog. Called from progress and from bounded waits, never from a thread."""
        now = time.monotonic()
        if self._interval and now - self._fed >= self._interval:
            self._fed = now
            daemon.notify("WATCHDOG=1")

    def drain_wakeups(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self.wake_fd, 4096)


def shut_socket(fd: int) -> None:
    """Ends whatever blocks on the socket. By a duplicate: SSLSocket.shutdown would drop TLS."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as twin:
        twin.shutdown(socket.SHUT_RDWR)


class StateFile:
    """/run/serversync/state.json for those who look from outside; at most once a second."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        directory = environ.get("RUNTIME_DIRECTORY", "").split(":")[0]
        self.path = os.path.join(directory, "state.json") if directory else None
        self.since = time.time()
        self.unwritten: dict[str, object] | None = None
        self._next = 0.0

    def write(self, sentence: str, **progress: object) -> None:
        state = {"pid": os.getpid(), "since": self.since, "sentence": sentence}
        self.unwritten = state | {"progress": progress or None}
        self.flush()

    def wait(self) -> float:
        """In how many seconds there is something to write."""
        unwritten = self.path is not None and self.unwritten is not None
        return max(0.0, self._next - time.monotonic()) if unwritten else float("inf")

    def flush(self) -> None:
        if self.wait() > 0:
            return
        self._next = time.monotonic() + 5  # a full /run must not stop deliveries: again later
        with contextlib.suppress(OSError):
            with open(f"{self.path}.new", "w", encoding="utf-8") as file:
                file.write(json.dumps(self.unwritten) + "\n")
            os.replace(f"{self.path}.new", str(self.path))
            self.unwritten, self._next = None, self._next - 4


# ==================================================================================================
# Policy: pure decisions
# No clock, no I/O: whose fault is it, what becomes of an entry, what is said.
# ==================================================================================================

BACKOFF_CAP: Final = 256.0
RETRY_AFTER_CAP: Final = 3600.0
DEATHS_IN_ROW: Final = 9  # a type that is only ever rejected is the frontend's fault, not ours
HELD_SEC: Final = 3000.0  # how long a held type waits, but for one entry that is asked
LOOKS_MIN: Final = 5
LIFT_LIMIT_SEC: Final = 240.0  # frontends answer 408 when a body took longer than 300 s
# Deaths that say nothing of the frontend.
LOCAL_CODES: Final = frozenset(
    {"FILE_MISSING", "FILE_UNSAFE", "BAD_PAYLOAD", "SECOND_RECORDING", "TOO_LARGE"}
)


def backoff(tries: int, jitter: float) -> float:
    """2, 4, 8, … 256 s, and full jitter after the cap: never all devices at once."""
    return jitter * min(BACKOFF_CAP, 2.0 ** min(tries, 16))


@dataclass(frozen=True)
class Rule:
    """A row of the table of verdicts."""

    code: str
    fate: Fate
    reason: str
    when: Callable[[Answer], bool]


def _is_object(answer: Answer) -> bool:
    return isinstance(answer.said, dict)


def _http(low: int, high: int | None = None) -> Callable[[Answer], bool]:
    return lambda answer: low <= (answer.status or 0) <= (high or low)


def _trouble(trouble: Trouble) -> Callable[[Answer], bool]:
    return lambda answer: answer.trouble is trouble


# The first row that fits decides. SENT rows stand in confirm_entries and confirm_upload: only
# they know the contract's words.
RULES: Final = (
    Rule(
        "NETWORK_ERROR",
        Fate.OUTAGE,
        "the frontend cannot be reached",
        _trouble(Trouble.UNREACHABLE),
    ),
    Rule(
        "TLS_ERROR",
        Fate.OUTAGE,
        "TLS with the frontend failed (if its certificate is good: is this clock right?)",
        _trouble(Trouble.TLS),
    ),
    Rule(
        "NETWORK_TIMEOUT",
        Fate.SUSPECT,
        "the frontend did not answer in time",
        _trouble(Trouble.TIMEOUT),
    ),
    Rule(
        "NETWORK_RESET", Fate.SUSPECT, "the frontend closed the connection", _trouble(Trouble.RESET)
    ),
    Rule("BAD_RESPONSE", Fate.SUSPECT, "what came back is not HTTP", _trouble(Trouble.GARBLED)),
    Rule("RATE_LIMITED", Fate.OUTAGE, "the frontend asks for a pause", _http(429)),
    Rule(
        "CONFLICT", Fate.SUSPECT, "the frontend says conflict, but not that it has it", _http(409)
    ),
    Rule(
        "BAD_RESPONSE",
        Fate.SUSPECT,
        "a success, but not in the contract's words: not our frontend?",
        _http(200, 299),
    ),
    Rule(
        "REDIRECTED",
        Fate.SUSPECT,
        "a redirect, which is never followed: a login page?",
        _http(300, 399),
    ),
    Rule("UNAUTHORIZED", Fate.SUSPECT, "the frontend does not accept our credentials", _http(401)),
    Rule(
        "UNAUTHORIZED",
        Fate.SUSPECT,
        "the frontend forbids it, perhaps to these credentials",
        _http(403),
    ),
    Rule(
        "NOT_FOUND",
        Fate.SUSPECT,
        "no such address: not deployed, or a wrong base URL?",
        _http(404, 405),
    ),
    Rule(
        "TOO_SLOW",
        Fate.ASIDE,
        "the frontend gave up on a body that was moving",
        lambda answer: answer.status == 408 and answer.steady,
    ),
    Rule("NETWORK_TIMEOUT", Fate.SUSPECT, "the frontend waited in vain", _http(408)),
    Rule("TOO_LARGE", Fate.DEAD, "too large for the frontend", _http(413)),
    Rule(
        "BAD_REQUEST",
        Fate.DEAD,
        "the frontend rejects it",
        lambda answer: answer.status in (400, 422) and _is_object(answer),
    ),
    Rule("BAD_RESPONSE", Fate.SUSPECT, "rejected, but not by our frontend", _http(400)),
    Rule("BAD_RESPONSE", Fate.SUSPECT, "rejected, but not by our frontend", _http(422)),
    Rule("FRONTEND_5XX", Fate.SUSPECT, "the frontend has trouble", _http(500, 599)),
    Rule("UNKNOWN", Fate.SUSPECT, "an answer that nobody expected", lambda answer: True),
)


def classify(answer: Answer, now: float = 0.0) -> Verdict:
    """Whose fault is an answer that was not confirmed?"""
    rule = next(rule for rule in RULES if rule.when(answer))
    reason = rule.reason
    if answer.status is not None:
        reason += f": HTTP {answer.status}"
    if answer.detail:
        reason += f": {answer.detail}"
    elif answer.body:
        reason += f": {answer.body[:300].decode('utf-8', 'replace')}"
    pause = retry_after(answer.retry_after, now) if answer.status == 429 else None
    return Verdict(rule.fate, rule.code, reason, answer.status, pause)


def retry_after(text: str | None, now: float) -> float | None:
    """Seconds or a date; nonsense is None; never more than an hour, whatever the clocks say."""
    if text is None:
        return None
    if re.fullmatch(r"[0-9]+", text.strip()):
        return min(float(text.strip()[:12]), RETRY_AFTER_CAP)
    try:
        date = parsedate_to_datetime(text)  # without a zone: HTTP's dates are GMT
        wait = (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp() - now
    except (TypeError, ValueError, OverflowError):
        return None
    return min(max(wait, 0.0), RETRY_AFTER_CAP)


def _already(answer: Answer, key: str) -> bool:
    """A 409 that says in words: I have it (it may also mean: the first one is still running)."""
    said = answer.said
    if answer.status != 409 or not isinstance(said, dict):
        return False
    error = said.get("error")
    codes = [said.get("code"), error.get("code") if isinstance(error, dict) else error]
    keys = [said.get("idempotencyKey"), said.get("idempotency_key"), said.get("key")]
    return said.get("ok") is True or "ALREADY_PROCESSED" in codes or (bool(key) and key in keys)


def _success(answer: Answer) -> bool:
    """2xx, and to the whole request: a success before the end of the body confirms nothing."""
    return 200 <= (answer.status or 0) <= 299 and answer.complete


def confirm_entries(
    answer: Answer, key: str, seqs: Sequence[int], now: float = 0.0
) -> tuple[Verdict, dict[int, str]]:
    """The verdict on a request of entries, and those that were refused for good with the reason."""
    said = answer.said
    already = _already(answer, key)
    if not already and not (_success(answer) and isinstance(said, dict) and said.get("ok") is True):
        return classify(answer, now), {}
    listed = said.get("rejected")
    rejected: dict[int, str] = {}
    for item in listed if isinstance(listed, list) else []:
        seq = item.get("seq") if isinstance(item, dict) else None
        if type(seq) is int and seq in seqs and seq not in rejected:
            rejected[seq] = f"{item.get('code') or 'rejected'}: {item.get('message') or ''}"
    if listed is not None and (not isinstance(listed, list) or len(rejected) != len(listed)):
        reason = f"HTTP {answer.status}, but its list of rejected entries makes no sense"
        return Verdict(Fate.SUSPECT, "BAD_RESPONSE", reason, answer.status), {}
    return _sent(answer, already), rejected


def _sent(answer: Answer, already: bool) -> Verdict:
    return Verdict(Fate.SENT, "CONFLICT_PROCESSED" if already else "", "confirmed", answer.status)


_FILE_URL: Final = re.compile(r"(?i)https?://[!-.0-~][!-~\u00a1-\ud7ff\ue000-\U0010ffff]{0,2040}")


def confirm_upload(answer: Answer, key: str, size: int, now: float = 0.0) -> tuple[Verdict, str]:
    """The verdict on an upload, and the URL under which the frontend has it."""
    said = answer.said
    already = _already(answer, key)
    if not already and not _success(answer):
        return classify(answer, now), ""
    url = said.get("fileUrl") if isinstance(said, dict) else None
    problem = ""
    if not isinstance(url, str) or not _FILE_URL.fullmatch(url):
        problem = "without a usable fileUrl"
    elif said.get("ok", True) is not True:
        problem = "it says that it is not ok"
    elif said.get("sizeBytes") not in (None, size):
        problem = f"it stored {said['sizeBytes']} of {size} bytes"
    if problem:
        return classify(replace(answer, detail=problem), now), ""
    return _sent(answer, already), str(url)


def next_state(
    past: Past,
    verdict: Verdict,
    successes: int,
    deaths: int,
    retry_max: int,
    retry_hours: float,
    jitter: float,
) -> Transition:
    """What becomes of one entry that failed alone.

    A suspect is charged only if its endpoint has had a success since the entry's last failure:
    without one, nothing says that it is the entry's fault. `deaths` counts how many of its type
    died in a row without a success.
    """
    suspect = verdict.fate is Fate.SUSPECT
    charged = suspect and past.successes is not None and successes > past.successes
    tries, attempts = past.tries + 1, past.attempts + charged
    worn_out = charged and attempts >= retry_max and past.age >= retry_hours * 3600
    to = Next.WAITS
    if verdict.fate is Fate.DEAD or worn_out:
        broken = deaths >= DEATHS_IN_ROW and verdict.code not in LOCAL_CODES
        to = Next.HELD if broken else Next.DEAD
    if to is Next.HELD:
        charged, attempts = False, past.attempts
    return Transition(to, tries, attempts, backoff(tries, jitter), charged)


def next_size(size: int, most: int, gentle: bool) -> int:
    """The batch after a success: doubled, or a tenth larger when a time-out showed the limit."""
    return min(most, max(size + 1, size + size // 10) if gentle else size * 2)


def grace_is_over(tries: int, waited: float, grace: float) -> bool:
    """A file may be called missing: so many looks, so much of our own running time."""
    return tries + 1 >= LOOKS_MIN and waited >= grace


def remember(memory: dict[Any, Any], key: object, value: object, most: int = 256) -> None:
    """Puts it last, and forgets the first of too many: memory does not depend on the backlog."""
    memory.pop(key, None)
    memory[key] = value
    if len(memory) > most:
        del memory[next(iter(memory))]


def human(size: float) -> str:
    for unit in ("bytes", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"


def count(number: int, word: str, plural: str = "") -> str:
    return f"{number} {word if number == 1 else plural or word + 's'}"


def sentence_of(tally: Tally, outages: Sequence[Outage], now: float) -> str:
    """What the cycle did, or why it did nothing, in one sentence."""
    done = []
    if tally.entries:
        done.append(f"sent {count(tally.entries, 'entry', 'entries')}")
    if tally.files:
        done.append(f"uploaded {count(tally.files, 'recording')} ({human(tally.bytes)})")
    if tally.removed:
        done.append(f"removed {count(tally.removed, 'uploaded recording')} from the disk")
    if tally.aside:
        done.append(f"set {count(tally.aside, 'entry', 'entries')} aside")
    if tally.dead:
        done.append(f"gave up {count(tally.dead, 'entry', 'entries')} (dead letters)")
    for outage in outages:
        wait = max(0.0, outage.due - now)
        done.append(
            f"outage since {now - outage.since:.0f} s, next try in {wait:.0f} s: {outage.reason}"
        )
    done += tally.notes
    return "; ".join(done)[:400] if done else "idle: nothing to send"


# ==================================================================================================
# SQL: the schema `serversync`
# Everything of the agent's own. Applied by number, forward only, by the one that holds the lock.
# ==================================================================================================

MIGRATION_1: Final = """
create table serversync.schema_version (number int primary key);

-- All entries of one call share a lane.
create function serversync.lane(payload jsonb, entity_id uuid) returns text
language sql immutable parallel safe as $$
    select md5(lower(coalesce(payload->>'callLogId', payload->>'call_log_id', entity_id::text)))
$$;

-- Text from outside as a uuid, or null.
create function serversync.to_uuid(name text) returns uuid
language sql immutable parallel safe as $$
    select case when name ~* '^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$' then name::uuid end
$$;

-- An entry as the frontend gets it. An uploaded recording says so even in an older snapshot.
create function serversync.entry(
    seq bigint, entity_type text, entity_id uuid, payload jsonb, created_at timestamptz,
    op text, uploaded boolean, url text
) returns text language sql stable parallel safe as $$
    select '{"entityType":' || to_json(entity_type) || ',"entityId":"' || entity_id
        || '","payload":' || case when uploaded and jsonb_typeof(payload) = 'object'
               then payload || jsonb_build_object('uploadStatus', 'uploaded', 's3Url', url)
               else payload end
        || ',"createdAt":' || to_json(created_at) || ',"seq":' || seq
        || case when op is null then '' else ',"op":' || to_json(op) end || '}'
$$;

-- Entries that wait: after a failure, or because their file is not ready.
create table serversync.failures (
    outbox_id bigint primary key,
    entity_type text not null,
    is_file boolean not null,
    lane text not null,
    tries int not null,                    -- drives the backoff
    attempts int not null,                 -- what was charged
    successes bigint not null,             -- the endpoint's counter at this failure
    next_attempt_at timestamptz not null,
    error_code text not null,
    error text not null,
    http_status int,
    first_failed_at timestamptz not null default now(),
    updated_at timestamptz not null default now(),
    waited double precision not null default 0  -- seconds of the agent's own running time
);
create index on serversync.failures (lane, outbox_id);
create index on serversync.failures (next_attempt_at);

-- Confirmed uploads whose local files still exist: deletion works from this table alone.
create table serversync.uploads (
    outbox_id bigint primary key,
    directory text not null,
    files jsonb not null,                  -- [{name, inode, size, mtime_ns}] as they were sent
    file_url text not null,
    uploaded_at timestamptz not null default now(),
    tries int not null default 0,
    error text
);

create table serversync.dead_letters (
    id uuid primary key default gen_random_uuid(),
    outbox_id bigint not null unique,
    original_topic text not null,
    entity_id uuid not null,
    payload jsonb not null,
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
    last_retry_at timestamptz
);
create index on serversync.dead_letters (original_topic, created_at);

-- A receipt for each confirmed request. Lane and entity only for files: a call has one recording.
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
    lane text,
    entity_id uuid,
    url text
);
create index on serversync.deliveries (lane) where lane is not null;
create index on serversync.deliveries (entity_id) where entity_id is not null;

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

create table serversync.idempotency_keys (
    key text primary key,
    digest bytea not null,
    outbox_id bigint not null,
    expires_at timestamptz not null
);

-- The same key ten times is one row; the same key with something else is an error.
create function serversync.enqueue(
    entity_type text, entity_id uuid, payload jsonb, idempotency_key text default null
) returns bigint language plpgsql as $$
declare
    mine bytea := sha256(convert_to(entity_type || ' ' || entity_id || ' ' || payload, 'UTF8'));
    seq bigint;
    known record;
begin
    if idempotency_key is not null then
        insert into serversync.idempotency_keys as k (key, digest, outbox_id, expires_at)
        values (idempotency_key, mine, 0, now() + interval '30 days')
        on conflict (key) do update set key = excluded.key  -- locks the row of the first caller
        returning * into known;
        if known.outbox_id <> 0 and known.expires_at > now() then
            if known.digest <> mine then
                raise exception 'idempotency key % was used with another payload', idempotency_key
                    using errcode = 'unique_violation';
            end if;
            return known.outbox_id;
        end if;
    end if;
    insert into sync_outbox (entity_type, entity_id, payload)
    values (enqueue.entity_type, enqueue.entity_id, enqueue.payload) returning id into seq;
    update serversync.idempotency_keys k
    set outbox_id = seq, digest = mine, expires_at = now() + interval '30 days'
    where k.key = idempotency_key;
    return seq;
end $$;

-- A constant payload: PostgreSQL folds a transaction's notifications into one. A trigger that
-- fails would end the backend's transaction: whatever goes wrong here, the call can still end.
create function serversync.wake() returns trigger language plpgsql as $$
begin
    perform pg_notify('serversync', '');
    return null;
exception when others then
    return null;
end $$;

-- Stand-ins, always empty and last in the agent's search_path: where the backend has no such
-- table, the same statements find these.
create table serversync.recordings (
    id uuid primary key, call_log_id uuid, upload_status text, s3_url text
);
create table serversync.system_settings (id int primary key, extra jsonb);
"""
MIGRATIONS: Final = (MIGRATION_1,)

# ==================================================================================================
# SQL: statements
# Whole, named, each with what it does, its lock and its index. "Pending" is processed_at is null.
# ==================================================================================================

LOCK_KEY: Final = 0x7365727673796E63  # "servsync"; an advisory lock counts for one database

# Settles the session: names resolve in the backend's schemas first, in ours last (for a role named
# serversync, "$user" would put it first); a silent peer is noticed.
SESSION: Final = """
select set_config('search_path', array_to_string(array(
           select quote_ident(name) from unnest(current_schemas(false)) name
           where name <> 'serversync') || 'serversync'::text, ', '), false),
       set_config('timezone', 'UTC', false),
       set_config('datestyle', 'ISO', false),
       set_config('extra_float_digits', '1', false),
       set_config('statement_timeout', '18s', false),
       set_config('idle_in_transaction_session_timeout', '60s', false),
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
select to_regclass('sync_outbox') is not null, to_regclass('recordings')::text,
       to_regnamespace('serversync') is not null,
       to_regclass('serversync.schema_version') is not null,
       quote_ident(current_user), current_database()::text,
       array_remove(array[
           case when not (has_table_privilege(to_regclass('sync_outbox'), 'select')
                      and has_column_privilege(to_regclass('sync_outbox'), 'processed_at',
                                               'update'))
                then 'select, update (processed_at) on sync_outbox' end,
           case when not (has_table_privilege(to_regclass('recordings'), 'select')
                      and has_column_privilege(to_regclass('recordings'), 'upload_status', 'update')
                      and has_column_privilege(to_regclass('recordings'), 's3_url', 'update'))
                then 'select, update (upload_status, s3_url) on recordings' end,
           case when not has_table_privilege(to_regclass('system_settings'), 'select')
                then 'select on system_settings' end], null),
       has_table_privilege(to_regclass('sync_outbox'), 'delete'),
       current_setting('server_encoding')
"""
CREATE_SCHEMA: Final = "create schema serversync"
VERSION: Final = "select coalesce(max(number), 0) from serversync.schema_version"
SET_VERSION: Final = "insert into serversync.schema_version values (%(number)s)"
# A new holder of the lock: results of an older epoch are worth nothing.
TAKE_OVER: Final = """
update serversync.sender set epoch = epoch + 1, device = %(device)s
returning id::text, epoch, root_id
"""
ADOPT_ROOT: Final = "update serversync.sender set root_id = %(root_id)s"

# The hot index and the wake-up. Optional: without them slower, and polling only.
INDEX_STATE: Final = """
select indisvalid from pg_index
where indexrelid = to_regclass(
    (select quote_ident(n.nspname) || '.sync_outbox_serversync_pending'
     from pg_class c join pg_namespace n on n.oid = c.relnamespace
     where c.oid = to_regclass('sync_outbox')))
"""
DROP_INDEX: Final = "drop index concurrently if exists sync_outbox_serversync_pending"
# CONCURRENTLY: a plain one would block the backend's INSERT.
CREATE_INDEX: Final = """
create index concurrently sync_outbox_serversync_pending on sync_outbox (id)
where processed_at is null
"""
TRIGGER_STATE: Final = """
select tgenabled <> 'D' from pg_trigger
where tgrelid = to_regclass('sync_outbox') and tgname = 'serversync_wake'
"""
CREATE_TRIGGER: Final = """
create trigger serversync_wake after insert on sync_outbox
for each statement execute function serversync.wake()
"""

# The head of a cycle: what is there to do, in one statement. Partial indexes; failures' due index.
LOOK: Final = """
select (select case when jsonb_typeof(extra->'syncIntervalSec') = 'number'
                    then greatest(-1, least((extra->>'syncIntervalSec')::numeric, 1e6))::float8 end
        from system_settings where id = 1),
       exists (select from sync_outbox
               where processed_at is null and entity_type <> 'recording_file'),
       exists (select from sync_outbox
               where processed_at is null and entity_type = 'recording_file'),
       exists (select from serversync.failures),
       now()::text
"""
# The next due time, in seconds from now: of what came due since the cycle began, or will; only of
# rows that are still pending, so that a row that others deleted never makes us spin.
NEXT_DUE: Final = """
select extract(epoch from f.next_attempt_at - now())::float8
from serversync.failures f join sync_outbox o on o.id = f.outbox_id and o.processed_at is null
where f.next_attempt_at > %(since)s::timestamptz
  and f.next_attempt_at <= now() + interval '1 hour'
order by f.next_attempt_at limit 1
"""
# Failures of rows that are gone or processed (by hand, or by a retry that went through).
DROP_STALE: Final = """
delete from serversync.failures f
where not exists (
    select from sync_outbox o where o.id = f.outbox_id and o.processed_at is null)
"""

# Where a pass ends: what is inserted later waits for the next one. Else it could overtake an older
# entry of its call that became visible behind the pass.
LAST: Final = "select coalesce(max(id), 0) from sync_outbox where processed_at is null"
# The entry that a FETCH of one could not write out (or one before it, whose lane waits anyway).
NEXT_PENDING: Final = """
select coalesce(min(id), 0) from sync_outbox
where processed_at is null and entity_type <> 'recording_file' and id > %(after)s::bigint
"""
# The next batch as finished JSON. A row lock is never taken; the partial index gives the order.
#   picked    pending entries after the last id seen, none whose lane waits or is left out; an
#             entry that became due behind that id keeps its lane waiting until the next pass
#   sized     a first cut by the stored size, so that large payloads are not all written out
#   measured  the entries as text, with a running total: the batch ends at so many bytes
# A first entry that is larger than that comes alone and without its text.
FETCH: Final = """
with picked as materialized (
    select o.*, pg_column_size(o.payload) as stored
    from (select null::text as op) as absent  -- `op` below is the outbox's, where it has one
    cross join lateral (
        select id, entity_type, entity_id, payload, created_at, op::text as op
        from sync_outbox
        where processed_at is null and entity_type <> 'recording_file'
          and id > %(after)s::bigint and id <= %(until)s::bigint
          and (%(skip)s::text[] = '{}'
               or serversync.lane(payload, entity_id) <> all (%(skip)s::text[]))
          and (not exists (select from serversync.failures) or coalesce((
               select false
               from serversync.failures f
               join sync_outbox w on w.id = f.outbox_id and w.processed_at is null
               where f.lane = serversync.lane(sync_outbox.payload, sync_outbox.entity_id)
                 and f.outbox_id <= sync_outbox.id and not f.is_file
                 and (%(fresh)s::boolean or f.outbox_id <= %(after)s::bigint
                      or f.next_attempt_at > now()
                         and f.next_attempt_at <= now() + interval '1 hour')
               limit 1), true))
        order by id limit %(size)s::int) as o
), sized as (
    select *, sum(stored) over (order by id) - stored as before from picked
), texts as materialized (
    select o.id, serversync.entry(o.id, o.entity_type, o.entity_id, o.payload, o.created_at, o.op,
                                  coalesce(r.upload_status = 'uploaded', d.url is not null),
                                  coalesce(r.s3_url, d.url)) as entry
    from sized o
    left join recordings r on o.entity_type = 'recording' and r.id = o.entity_id
    left join lateral (
        select url from serversync.deliveries  -- where the backend has no row of it
        where r.id is null and o.entity_type = 'recording' and entity_id = o.entity_id
        order by id desc limit 1) d on true
    where o.before < %(bytes)s::bigint
), measured as (
    select id, entry, octet_length(entry) as size,
           sum(octet_length(entry) + 1) over (order by id) - 1 as total
    from texts
)
select string_agg(id::text, ',' order by id), string_agg(size::text, ',' order by id),
       case when max(size) <= %(bytes)s::bigint then
           convert_to('{"entries":[' || string_agg(entry, ',' order by id)
               filter (where size <= %(bytes)s::bigint) || ']}', 'UTF8') end
from measured where total <= %(bytes)s::bigint or total = size
"""
# A piece of one large entry, with the digest of the whole: all pieces must be of one text.
SLICE: Final = """
with whole as materialized (
    select convert_to(serversync.entry(o.id, o.entity_type, o.entity_id, o.payload, o.created_at,
                                       o.op, coalesce(r.upload_status = 'uploaded',
                                                      d.url is not null),
                                       coalesce(r.s3_url, d.url)), 'UTF8') as text
    from (select null::text as op) as absent
    cross join lateral (select id, entity_type, entity_id, payload, created_at, op::text as op
                        from sync_outbox where id = %(seq)s and processed_at is null) as o
    left join recordings r on o.entity_type = 'recording' and r.id = o.entity_id
    left join lateral (
        select url from serversync.deliveries
        where r.id is null and o.entity_type = 'recording' and entity_id = o.entity_id
        order by id desc limit 1) d on true
)
select encode(sha256(text), 'hex'), substring(text from %(start)s::int for %(length)s::int)
from whole
"""
# Recordings that may go now: not waiting, not behind another file of their lane, not behind any
# earlier JSON entry of it. `second`: their call already has another recording at the frontend.
FETCH_FILES: Final = """
with first_json as materialized (
    select serversync.lane(payload, entity_id) as lane, min(id) as id
    from sync_outbox where processed_at is null and entity_type <> 'recording_file' group by 1
), named as (
    select id, entity_id, serversync.lane(payload, entity_id) as lane,
           left(coalesce(payload->>'callLogId', payload->>'call_log_id'), 64) as call_log_id,
           left(coalesce(payload->>'recordingId', payload->>'recording_id', entity_id::text), 64)
               as recording_id,
           left(coalesce(payload->>'filePath', payload->>'file_path'), 4096) as file_path,
           left(coalesce(payload->>'callId', payload->>'call_id'), 1024) as call_id
    from sync_outbox
    where processed_at is null and entity_type = 'recording_file' and id > %(after)s::bigint
), files as (
    select *, serversync.to_uuid(recording_id) as recording, serversync.to_uuid(call_log_id) as call
    from named
)
select o.id, o.lane, o.entity_id::text, o.call_log_id, o.recording_id, o.file_path, o.call_id,
       coalesce(f.tries, 0), coalesce(f.waited, 0)::float8,
       r.upload_status, r.s3_url,
       exists (select from serversync.deliveries d
               where d.lane = o.lane and d.entity_id <> o.recording)
           or exists (select from recordings s where s.call_log_id = o.call
                         and s.upload_status = 'uploaded' and s.id <> o.recording)
from files o
left join serversync.failures f on f.outbox_id = o.id
left join recordings r on r.id = o.recording
where o.lane <> all (%(skip)s::text[])
  and not exists (select from first_json j where j.lane = o.lane and j.id < o.id)
  and not exists (
      select from serversync.failures w
      join sync_outbox p on p.id = w.outbox_id and p.processed_at is null
      where w.lane = o.lane and w.outbox_id <= o.id and w.is_file
        and (%(fresh)s::boolean or w.outbox_id <= %(after)s::bigint
             or w.next_attempt_at > now()
                and w.next_attempt_at <= now() + interval '1 hour'))
order by o.id limit %(limit)s::int
"""
# Lanes and types of some entries; asked only when a request of several failed.
LANES: Final = """
select id, serversync.lane(payload, entity_id), entity_type
from sync_outbox where id = any (%(seqs)s::bigint[])
"""
# All that decides what becomes of one entry that failed.
PAST: Final = """
select o.entity_type, serversync.lane(o.payload, o.entity_id),
       left(coalesce(o.payload->>'callLogId', o.payload->>'call_log_id'), 64),
       coalesce(f.tries, 0), coalesce(f.attempts, 0), f.successes,
       coalesce(extract(epoch from now() - f.first_failed_at), 0)::float8,
       coalesce((select value from serversync.counters
                 where name = 'successes' and label = %(endpoint)s), 0)::bigint,
       coalesce((select value from serversync.counters
                 where name = 'deaths_in_row' and label = o.entity_type), 0)::int
from sync_outbox o left join serversync.failures f on f.outbox_id = o.id
where o.id = %(seq)s and o.processed_at is null
"""
# A confirmed request: marked, its failures and letters settled, receipt and counters, all or
# nothing. Row locks on the entries; a second run (after a lost COMMIT) changes nothing.
CONFIRM: Final = """
with sent as (
    update sync_outbox set processed_at = now()
    where id = any (%(seqs)s::bigint[]) and processed_at is null
    returning id, entity_type, case when isfinite(created_at)
        then extract(epoch from clock_timestamp() - created_at)::float8 else 0 end as lag
), settled as (
    delete from serversync.failures where outbox_id = any (%(seqs)s::bigint[]) returning tries
), resolved as (
    update serversync.dead_letters set status = 'RESOLVED', updated_at = now()
    where outbox_id = any (%(seqs)s::bigint[]) and status <> 'RESOLVED'
), accepted as (
    delete from serversync.counters
    where name = 'deaths_in_row' and label in (select entity_type from sent)
    returning label, value
), released as (
    update serversync.failures set next_attempt_at = now()
    where entity_type in (select label from accepted where value >= 9)
      and not outbox_id = any (%(seqs)s::bigint[])
), receipt as (
    insert into serversync.deliveries (kind, first_seq, last_seq, entries, bytes, idempotency_key,
        request_sha256, answer_sha256, http_status, outcome, started_at, duration_ms, lane,
        entity_id, url)
    select %(kind)s, min(id), max(id), count(*), %(bytes)s, %(key)s, %(request_sha256)s::text,
           %(answer_sha256)s, %(status)s::int, %(outcome)s,
           clock_timestamp() - %(seconds)s::float8 * interval '1 second',
           %(seconds)s::float8 * 1000, %(lane)s::text, %(entity_id)s::uuid, %(url)s::text
    from sent having count(*) > 0
), counted as (
    insert into serversync.counters as c (name, label, value)
    select 'successes', %(endpoint)s, count(*) from sent having count(*) > 0
    union all select 'sent', entity_type, count(*) from sent group by entity_type
    union all select 'sent_as', %(outcome)s, count(*) from sent having count(*) > 0
    union all select 'lag', width_bucket(lag, '{1,5,30,60,300,3600,86400}'::float8[])::text,
                     count(*) from sent group by 2
    union all select 'lag_sum', '', sum(lag) from sent having count(*) > 0
    union all select 'tries', least(tries, 9)::text, count(*) from settled group by 2
    union all select 'upload_bytes', '', %(bytes)s from sent where %(kind)s = 'file'
    on conflict (name, label) do update set value = c.value + excluded.value
)
select count(*) from sent
"""
# Whether a row that was marked is not marked: CONFIRM cannot see that itself.
STILL_PENDING: Final = """
select exists (select from sync_outbox
               where id = any (%(seqs)s::bigint[]) and processed_at is null)
"""
# What else a confirmed upload changes; in one transaction with CONFIRM, durable.
UPLOADED: Final = """
with shown as (
    update recordings set upload_status = 'uploaded', s3_url = %(url)s
    where id = %(recording_id)s::uuid
)
insert into serversync.uploads (outbox_id, directory, files, file_url)
values (%(seq)s, %(directory)s, %(files)s::jsonb, %(url)s)
on conflict (outbox_id) do update set directory = excluded.directory, files = excluded.files,
    file_url = excluded.file_url, uploaded_at = now(), tries = 0, error = null
"""
DURABLE: Final = "set local synchronous_commit = on"
# An entry that failed and waits.
SET_ASIDE: Final = """
with counted as (
    insert into serversync.counters as c (name, label, value) values ('retries', %(code)s, 1)
    on conflict (name, label) do update set value = c.value + 1
)
insert into serversync.failures as f (outbox_id, entity_type, is_file, lane, tries, attempts,
    successes, next_attempt_at, error_code, error, http_status, waited)
select id, entity_type, entity_type = 'recording_file', serversync.lane(payload, entity_id),
       %(tries)s, %(attempts)s, %(successes)s, now() + %(delay)s::float8 * interval '1 second',
       %(code)s, %(error)s, %(status)s::int, %(waited)s::float8
from sync_outbox where id = %(seq)s and processed_at is null
on conflict (outbox_id) do update set tries = excluded.tries, attempts = excluded.attempts,
    successes = excluded.successes, next_attempt_at = excluded.next_attempt_at,
    error_code = excluded.error_code, error = excluded.error, http_status = excluded.http_status,
    updated_at = now(), waited = excluded.waited
"""
# A type that is only ever rejected: what is due of it waits for most of an hour, or until one
# succeeds (see CONFIRM). In chunks; returns the last id that was reached, if there is more.
HOLD_TYPE: Final = """
with due as materialized (
    select o.id, o.payload, o.entity_id
    from sync_outbox o left join serversync.failures f on f.outbox_id = o.id
    where o.processed_at is null and o.entity_type = %(entity_type)s and o.id <> %(seq)s
      and (f.outbox_id is null or f.next_attempt_at <= now()
           or f.next_attempt_at > now() + interval '1 hour')
    order by o.id limit 5000
), held as (
    insert into serversync.failures as f (outbox_id, entity_type, is_file, lane, tries, attempts,
        successes, next_attempt_at, error_code, error, http_status)
    select id, %(entity_type)s, %(entity_type)s = 'recording_file',
           serversync.lane(payload, entity_id), 1, 0, %(successes)s,
           now() + %(held)s::float8 * interval '1 second', %(code)s, %(error)s, %(status)s::int
    from due
    on conflict (outbox_id) do update set next_attempt_at = excluded.next_attempt_at,
        error_code = excluded.error_code, error = excluded.error,
        http_status = excluded.http_status, updated_at = now()
)
select case when count(*) = 5000 then max(id) end from due
"""
# The next one of a held type that is asked, and soon: each in its turn, so that one that is
# rejected rightly does not speak for all. The first of its lane, for the others wait for it.
PROBE_NEXT: Final = """
update serversync.failures set next_attempt_at = now() + %(delay)s::float8 * interval '1 second'
where outbox_id = (
    select f.outbox_id
    from serversync.failures f
    join sync_outbox o on o.id = f.outbox_id and o.processed_at is null
    where f.entity_type = %(entity_type)s
      and not exists (select from serversync.failures e
                      where e.lane = f.lane and e.outbox_id < f.outbox_id)
    order by f.outbox_id = %(seq)s, f.updated_at, f.outbox_id limit 1)
"""
# An entry that is given up. It leaves the hot index in the same transaction, payload and all; a
# dead recording is shown as failed, unless it is uploaded.
BURY: Final = """
with dead as (
    update sync_outbox set processed_at = now() where id = %(seq)s and processed_at is null
    returning id, entity_type, entity_id, payload
), settled as (
    delete from serversync.failures where outbox_id = %(seq)s
), shown as (
    update recordings set upload_status = 'upload_failed'
    where id = serversync.to_uuid(%(recording_id)s::text) and upload_status <> 'uploaded'
      and exists (select from dead)
), counted as (
    insert into serversync.counters as c (name, label, value)
    select 'dead', entity_type, 1 from dead
    union all select 'deaths_in_row', entity_type, 1 from dead where %(blamed)s::boolean
    on conflict (name, label) do update set value = c.value + 1
)
insert into serversync.dead_letters as d (outbox_id, original_topic, entity_id, payload,
    error_code, error_message, http_status, attempts)
select id, entity_type, entity_id, payload, %(code)s, %(error)s, %(status)s::int, %(attempts)s
from dead
on conflict (outbox_id) do update set
    retry_count = d.retry_count + 1, updated_at = now(),
    status = case when d.retry_count + 1 >= d.max_retries then 'DEAD' else 'PENDING' end,
    error_code = excluded.error_code, error_message = excluded.error_message,
    http_status = excluded.http_status, attempts = excluded.attempts
"""
# Confirmed uploads whose files are still here.
UPLOADS: Final = """
select outbox_id, directory, files, tries from serversync.uploads
where outbox_id > %(after)s::bigint order by outbox_id limit %(limit)s::int
"""
# Pending recordings that may name a file of this directory: the exact look is the agent's.
RIVALS: Final = """
select left(coalesce(payload->>'filePath', payload->>'file_path'), 4096),
       left(coalesce(payload->>'callId', payload->>'call_id'), 1024)
from sync_outbox
where processed_at is null and entity_type = 'recording_file'
  and (position(%(directory)s in coalesce(payload->>'filePath', payload->>'file_path', '')) > 0
       or coalesce(payload->>'callId', payload->>'call_id') = %(directory)s)
"""
FORGET_UPLOAD: Final = """
with counted as (
    insert into serversync.counters as c (name, label, value) values ('deletions', '', 1)
    on conflict (name, label) do update set value = c.value + 1
)
delete from serversync.uploads where outbox_id = %(seq)s
"""
DELETION_FAILED: Final = """
update serversync.uploads set tries = tries + 1, error = %(error)s
where outbox_id = %(seq)s and (tries < 8 or error is distinct from %(error)s)
"""
# Old rows, in chunks: processed ones only, and nothing while the clock is behind the last receipt.
PRUNE: Final = """
with last as (
    select started_at from serversync.deliveries order by id desc limit 1
), old as (
    select id from sync_outbox
    where processed_at < now() - %(days)s::float8 * interval '1 day'
      and now() >= (select max(l.started_at) from last l)
    order by id limit 1000
), rows as (
    delete from sync_outbox o using old where o.id = old.id and o.processed_at is not null
    returning 1
), receipts as (
    delete from serversync.deliveries where id in (
        select id from serversync.deliveries
        where started_at < now() - %(days)s::float8 * interval '1 day'
          and now() >= (select max(l.started_at) from last l)
        order by id limit 1000)
    returning 1
), keys as (
    delete from serversync.idempotency_keys where expires_at < now() - interval '1 day'
)
select (select count(*) from rows), (select count(*) from receipts)
"""
UNFINISHED: Final = "select exists (select from sync_outbox where processed_at is null)"

# ==================================================================================================
# Database
# One connection that holds the lock, LISTENs and does all the work; one method a statement.
# ==================================================================================================

DB_DEADLINE: Final = 20.0  # above statement_timeout: the server's own words are better than ours
INDEX_DEADLINE: Final = 600.0
OPTIONAL_EVERY: Final = 600.0


class Database:
    """The connection: made, locked, watched, and given up when it is lost."""

    def __init__(self, url: str, device: str, process: Process) -> None:
        self.url, self.device, self.process = url, device, process
        self.conn: psycopg.Connection[Any] | None = None
        self.locked = False
        self.epoch = 0
        self.generation = 0  # another sender came between: older results are worth nothing
        self._database = ""
        self.root_id: str | None = None
        self.used = 0.0  # when the server last answered
        self.optional_due = float("inf")  # for the index and the trigger
        self._notifications = 0
        self._identity: tuple[int, Any] | None = None
        self._hints: list[str] = []

    # --- the connection -------------------------------------------------------------------------

    def connect(self) -> None:
        """A new session, after the end of the previous one. Raises Unavailable."""
        self.close()
        try:
            with self.process.deadline(DB_DEADLINE, None):
                self.conn = psycopg.connect(
                    self.url,
                    autocommit=True,
                    connect_timeout=10,
                    client_encoding="UTF8",
                    fallback_application_name="serversync",
                )
            self.conn.add_notify_handler(self._on_notify)
            self.run(SESSION)
            if self._identity and self.run(
                END_PREVIOUS, pid=self._identity[0], start=self._identity[1]
            ):
                time.sleep(0.2)  # until its lock is free
            rows = self.run(IDENTITY)
            self._identity = (rows[0][0], rows[0][1]) if rows else None
        except TimedOut:
            self.process.check()
            raise Unavailable("the database does not answer") from None
        except (psycopg.Error, Lost) as error:
            self.close()
            raise Unavailable(f"the database is not there: {error}") from None

    def use(self, url: str, device: str) -> None:
        """Another URL or name: from the next connection on. A result that waits stays valid only
        if it is the same database still."""
        if (self.url, self.device) != (url, device):
            self.close()
            self.url, self.device = url, device

    def close(self) -> None:
        if self.conn is not None:
            with contextlib.suppress(psycopg.Error, OSError):
                self.conn.close()
        self.conn, self.locked = None, False

    @property
    def local(self) -> bool:
        """A Unix socket cannot be half-open."""
        return self.conn is not None and self.conn.info.host.startswith("/")

    def _shut(self) -> None:
        with contextlib.suppress(psycopg.Error):
            if self.conn is not None:
                shut_socket(self.conn.fileno())

    @contextlib.contextmanager
    def _guard(self, seconds: float = DB_DEADLINE) -> Iterator[psycopg.Connection[Any]]:
        """Tells a lost connection (Lost) from a statement that failed (psycopg.Error)."""
        if self.conn is None:
            raise Lost
        conn = self.conn
        try:
            with self.process.deadline(seconds, self._shut):
                yield conn
        except (psycopg.Error, OSError) as error:
            # conn.closed stays False after the server ended the session: ask libpq.
            if conn.broken or conn.pgconn.status != psycopg.pq.ConnStatus.OK:
                self.close()
                raise Lost(str(error)) from None
            raise

    def run(self, sql: str, limit: float = DB_DEADLINE, /, **params: Any) -> list[tuple[Any, ...]]:
        """One statement, in a transaction of its own. Raises Lost or psycopg.Error."""
        with self._guard(limit) as conn:
            cursor = conn.execute(sql, params or None, binary=bool(params))
            self.used = time.monotonic()
            rows = cursor.fetchall() if cursor.description else []
            if cursor.pgresult is not None:
                # A cursor is part of a cycle: its result, a batch of 500 KB, would live until
                # the collector comes by.
                cursor.pgresult.clear()
            return rows

    # --- the lock -------------------------------------------------------------------------------

    def take_lock(self) -> bool:
        """True when this session is the one sender. Then, and only then, the schema is made."""
        if not self.run(TRY_LOCK, key=LOCK_KEY)[0][0]:
            return False
        self._prepare()
        before = (self._database, self.epoch + 1)
        with self._guard() as conn, conn.transaction():
            conn.execute(DURABLE)  # an epoch that a power cut takes back would come twice
            row = conn.execute(TAKE_OVER, {"device": self.device}).fetchone()
        self._database, self.epoch, self.root_id = row or ("", 0, None)
        if (self._database, self.epoch) != before:
            self.generation += 1
        self.run("listen serversync")
        self._notifications += 1  # nobody knows what came before
        self.locked = True
        return True

    def _prepare(self) -> None:
        row = self.run(RIGHTS)[0]
        outbox, recordings, schema, ours, role, name, missing, may_delete, encoding = row
        if encoding not in ("UTF8", "SQL_ASCII"):
            raise ConfigError([f"database {name}: its encoding is {encoding}, it must be UTF8"])
        if not outbox:
            raise Unavailable(f"database {name} has no table sync_outbox: is it the backend's?")
        lines = [f"role {role} lacks rights, run: grant {what} to {role}" for what in missing]
        if lines:
            raise ConfigError([f"database {name}: {line}" for line in lines])
        try:
            if not schema:
                self.run(CREATE_SCHEMA)
            self._migrate(ours)
        except psycopg.errors.InsufficientPrivilege:
            how = f"create schema serversync authorization {role}"
            if schema:
                how = f"alter schema serversync owner to {role}"
            hint = f"as a superuser, run: {how}"
            raise ConfigError(
                [f"database {name}: role {role} may not make its tables: {hint}"]
            ) from None
        self._say_less(recordings, may_delete)

    def _migrate(self, ours: bool) -> None:
        known = self.run(VERSION)[0][0] if ours else 0
        if known > len(MIGRATIONS):
            raise ConfigError(
                [f"the schema serversync is of a newer version ({known}) than this program"]
            )
        for number in range(known + 1, len(MIGRATIONS) + 1):
            with self._guard() as conn, conn.transaction():
                conn.execute(MIGRATIONS[number - 1])
                conn.execute(SET_VERSION, {"number": number})
            say(logging.INFO, "migrated", f"schema serversync is now at version {number}")

    def _say_less(self, recordings: str | None, may_delete: bool) -> None:
        hints = self.make_optional()
        if recordings is None:
            hints.append("there is no table recordings: none is marked as uploaded")
        if not may_delete:
            hints.append("no right to delete from sync_outbox: old rows are not pruned")
        if hints != self._hints:
            self._hints = hints
            say(logging.WARNING, "reduced", f"going on with less: {'; '.join(hints)}")

    def make_optional(self) -> list[str]:
        """Index and trigger, where the role may; where not, why. Tried again after a mere lock."""
        hints = []
        self.optional_due = float("inf")
        for what, make in (("index", self._make_index), ("NOTIFY trigger", self._make_trigger)):
            try:
                make()
            except psycopg.Error as error:
                hints.append(f"no {what}: {error.diag.message_primary or error}")
                if isinstance(error, psycopg.errors.LockNotAvailable):
                    self.optional_due = time.monotonic() + OPTIONAL_EVERY
        return hints

    def _make_index(self) -> None:
        state = self.run(INDEX_STATE)
        if state and state[0][0]:
            return
        self.run("set lock_timeout = '1s'; set statement_timeout = 0")
        try:
            if state:
                self.run(DROP_INDEX, INDEX_DEADLINE)
            self.run(CREATE_INDEX, INDEX_DEADLINE)
        except psycopg.Error:
            self.run(DROP_INDEX)  # an invalid leftover costs the backend and serves nobody
            raise
        finally:
            if self.conn is not None:
                self.run("reset lock_timeout; set statement_timeout = '18s'")

    def _make_trigger(self) -> None:
        if self.run(TRIGGER_STATE) in ([(True,)], [(False,)]):
            return  # there; a disabled one was disabled by somebody who meant it
        with self._guard() as conn, conn.transaction():
            conn.execute("set local lock_timeout = '1s'")
            conn.execute(CREATE_TRIGGER)

    # --- waking up ------------------------------------------------------------------------------

    def _on_notify(self, _: object) -> None:
        self._notifications += 1

    def notifications(self) -> int:
        """How many there were, with those that are here by now: it never waits."""
        if self.conn is not None:
            with self._guard() as conn:
                conn.pgconn.consume_input()
                while conn.pgconn.notifies():
                    self._notifications += 1
        return self._notifications

    # --- entries --------------------------------------------------------------------------------

    def last(self) -> int:
        return int(self.run(LAST)[0][0])

    def next_pending(self, after: int) -> int:
        return int(self.run(NEXT_PENDING, after=after)[0][0])

    def fetch(
        self, after: int, until: int, size: int, limit: int, skip: Sequence[str], fresh: bool
    ) -> Batch:
        rows = self.run(
            FETCH,
            after=after,
            until=until,
            size=size,
            bytes=limit - len(BODY_HEAD) - len(BODY_TAIL),
            skip=list(skip),
            fresh=fresh,
        )
        seqs, sizes, body = rows[0]
        if not seqs:
            return Batch([], [], b"")
        return Batch(
            [int(seq) for seq in seqs.split(",")], [int(n) for n in sizes.split(",")], body or b""
        )

    def fetch_files(self, after: int, skip: Sequence[str], fresh: bool) -> list[FileEntry]:
        rows = self.run(FETCH_FILES, after=after, skip=list(skip), fresh=fresh, limit=20)
        return [FileEntry(*row) for row in rows]

    def slice(self, seq: int, start: int, length: int) -> tuple[str, bytes]:
        rows = self.run(SLICE, seq=seq, start=start + 1, length=length)
        return (rows[0][0], bytes(rows[0][1])) if rows else ("", b"")

    def lanes(self, seqs: Sequence[int]) -> dict[int, tuple[str, str]]:
        return {row[0]: (row[1], row[2]) for row in self.run(LANES, seqs=list(seqs))}

    def confirm(self, seqs: Sequence[int], endpoint: str, outcome: str, receipt: Receipt) -> None:
        with self._guard() as conn:
            self._confirm(conn, seqs, endpoint, outcome, receipt)

    def confirm_upload(
        self, entry: FileEntry, ready: Ready, url: str, outcome: str, receipt: Receipt
    ) -> None:
        """In one transaction that survives a power cut, whatever the database's default."""
        with self._guard() as conn, conn.transaction():
            conn.execute(DURABLE)
            self._confirm(conn, [entry.seq], "files", outcome, receipt)
            params = {
                "seq": entry.seq,
                "recording_id": entry.recording_id,
                "url": url,
                "directory": ready.directory,
                "files": json.dumps(ready.files),
            }
            conn.execute(UPLOADED, params)

    @staticmethod
    def _confirm(
        conn: psycopg.Connection[Any], seqs: Sequence[int], endpoint: str, outcome: str,
        receipt: Receipt,
    ) -> None:  # fmt: skip
        answer = receipt.answer
        params = {
            "seqs": "{" + ",".join(map(str, seqs)) + "}",
            "endpoint": endpoint,
            "outcome": outcome,
            "kind": receipt.kind,
            "bytes": receipt.size,
            "key": receipt.key,
            "request_sha256": receipt.request_sha256,
            "answer_sha256": hashlib.sha256(answer.body).hexdigest() if answer.body else None,
            "status": answer.status,
            "seconds": answer.duration,
            "lane": receipt.lane,
            "entity_id": receipt.entity_id,
            "url": receipt.url,
        }
        marked = conn.execute(CONFIRM, params, binary=True).fetchall()[0][0]
        if marked < len(seqs) and conn.execute(STILL_PENDING, params).fetchall()[0][0]:
            # It would be sent again at once, and again.
            raise psycopg.errors.ObjectNotInPrerequisiteState(
                "marking an entry in sync_outbox changes nothing: a trigger, a rule, a policy?"
            )

    def past(self, seq: int, endpoint: str) -> tuple[Any, ...] | None:
        rows = self.run(PAST, seq=seq, endpoint=endpoint)
        return rows[0] if rows else None

    def set_aside(self, aside: Aside) -> None:
        self._settle_failure(SET_ASIDE, aside)

    def hold_type(self, aside: Aside) -> int | None:
        self.set_aside(replace(aside, step=replace(aside.step, delay=HELD_SEC)))
        last: int | None = self._settle_failure(HOLD_TYPE, aside)[0][0]
        self._settle_failure(PROBE_NEXT, aside)
        return last

    def bury(self, aside: Aside) -> None:
        self._settle_failure(BURY, aside)

    def _settle_failure(self, sql: str, aside: Aside) -> list[tuple[Any, ...]]:
        return self.run(
            sql,
            seq=aside.seq,
            entity_type=aside.entity_type,
            recording_id=aside.recording_id,
            tries=aside.step.tries,
            attempts=aside.step.attempts,
            delay=aside.step.delay,
            held=HELD_SEC,
            successes=aside.successes,
            waited=aside.waited,
            code=aside.verdict.code,
            error=aside.verdict.reason,
            status=aside.verdict.status,
            blamed=aside.verdict.code not in LOCAL_CODES,
        )

    # --- deletions ------------------------------------------------------------------------------

    def uploads(self, after: int) -> list[Upload]:
        return [Upload(*row) for row in self.run(UPLOADS, after=after, limit=100)]

    def rivals(self, directory: str) -> list[tuple[str | None, str | None]]:
        return [(row[0], row[1]) for row in self.run(RIVALS, directory=directory)]


# ==================================================================================================
# Frontend
# HTTP on a real socket: one request in, one Answer out. Decides nothing, follows nothing.
# ==================================================================================================

ANSWER_MAX: Final = 64 * 1024
HEAD_MAX: Final = 16 * 1024
IDLE_MAX: Final = 4.0  # frontends close a kept-alive connection after 5 s of idleness
STALL_SEC: Final = 60.0
STALL_RATE: Final = 1000  # less than 1 kB/s for 60 s ends an upload
CHUNK_MIN, CHUNK_FIRST, CHUNK_MAX = 4 * 1024, 32 * 1024, 256 * 1024
SLICE_BYTES: Final = 256 * 1024
NOTSENT_LOWAT: Final = 256 * 1024  # keeps our own buffers from hiding how fast the link is

Piece = bytes | memoryview
# Yields the pieces; returns whether that was all of them.
Body = Callable[[Limit], Generator[Piece, None, bool]]


class _PeekedSocket(ssl.SSLSocket):
    """Under TLS a readable socket may only hold session tickets: the first byte of an answer is
    read without waiting, and given back to the reader."""

    peeked = b""

    def arrived(self) -> bool:
        limit = self.gettimeout()
        self.settimeout(0)
        try:
            self.peeked = self.peeked or self.recv(1)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return False
        except OSError:
            return True  # the reader will meet it again
        finally:
            self.settimeout(limit)
        return True

    def recv_into(self, buffer: Any, nbytes: int | None = None, flags: int = 0) -> int:
        if self.peeked:
            memoryview(buffer)[:1], self.peeked = self.peeked, b""
            return 1
        return super().recv_into(buffer, nbytes, flags)


class _Tap:
    """What both kinds of connection tell their Wire."""

    wire: Wire
    sock: Any

    def __init__(self, wire: Wire, *args: Any, **more: Any) -> None:
        self.wire = wire
        super().__init__(*args, **more)

    def connect(self) -> None:
        self.wire.phase = "connecting"
        with self.wire.process.deadline(self.wire.timeout, None):
            super().connect()  # type: ignore[misc]
        self.wire.phase, self.wire.sock = "fresh", self.sock

    def send(self, data: Any) -> None:
        try:
            super().send(data)  # type: ignore[misc]
        except (ConnectionResetError, ssl.SSLEOFError, ssl.SSLZeroReturnError):
            # After a reset an answer may still be readable; urllib3 looks for it only after EPIPE.
            raise BrokenPipeError from None


class _Metered:
    """All of an answer is read through this (interim ones, head, chunks, trailers), up to a limit:
    http.client alone takes heads of 6 MB, and reads without end after a chunk size of -1."""

    def __init__(self, file: Any) -> None:
        self._file, self._left = file, HEAD_MAX + ANSWER_MAX

    def _at_most(self, size: int) -> int:
        if size < 0 or self._left <= 0:
            raise http.client.HTTPException("an answer that is too long, or of no length")
        return min(size, self._left)

    def _count(self, text: bytes) -> bytes:
        self._left -= len(text)
        return text

    def read(self, size: int = -1) -> bytes:
        return self._count(self._file.read(self._at_most(size)))

    def readline(self, size: int = -1) -> bytes:
        return self._count(self._file.readline(self._at_most(size)))

    def readinto(self, buffer: Any) -> int:
        size = self._at_most(len(buffer))
        got: int = self._file.readinto(memoryview(buffer)[:size])
        self._left -= got
        return got

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class _Frugal(http.client.HTTPResponse):
    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.fp: Any = _Metered(self.fp)


class _Plain(_Tap, HTTPConnection):
    response_class = _Frugal


class _Secure(_Tap, HTTPSConnection):
    response_class = _Frugal


class Wire:
    """One kept-alive connection to the frontend, and the requests on it."""

    def __init__(self, config: Config, process: Process) -> None:
        self.process = process
        self.timeout = config.timeout
        self.url = parse_url(config.frontend_base_url)
        self.tls = tls_context(config) if self.url.scheme == "https" else None
        if (
            self.tls
            and not hasattr(urllib3, "BaseHTTPResponse")
            and re.fullmatch(r"[\d.]+|\[.*\]", self.url.host or "")
        ):
            # urllib3 1.26 names no host to ssl for an IP address, and compares it by itself.
            self.tls.check_hostname = False
        self.base = (self.url.path or "").rstrip("/")
        self.phase = "reused"
        self.sock: Any = None
        self.steady = False
        self._complete = False
        self._used = 0.0
        self._pool = self._new_pool()

    def _new_pool(self) -> Any:
        options = [
            *HTTPConnection.default_socket_options,
            (socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, NOTSENT_LOWAT),
        ]
        if self.tls is None:
            pool: Any = urllib3.HTTPConnectionPool(
                self.url.host or "", self.url.port, maxsize=1, socket_options=options
            )
            pool.ConnectionCls = partial(_Plain, self)
        else:
            pool = urllib3.HTTPSConnectionPool(
                self.url.host or "",
                self.url.port,
                maxsize=1,
                socket_options=options,
                ssl_context=self.tls,
            )
            pool.ConnectionCls = partial(_Secure, self)
        return pool

    def close(self) -> None:
        self._pool.close()
        self._pool = self._new_pool()

    def _shut(self) -> None:
        if self.sock is not None and self.sock.fileno() >= 0:
            shut_socket(self.sock.fileno())

    def request(
        self, method: str, path: str, headers: dict[str, str], body: Body | None, patience: float,
        most: float = float("inf"), between: Callable[[], None] | None = None,
    ) -> Answer:  # fmt: skip
        """One request; a reset on a reused connection is tried once more on a fresh one."""
        if time.monotonic() - self._used > IDLE_MAX:
            self.close()
        answer = self._request(method, path, headers, body, patience, most, between)
        if answer.trouble is Trouble.RESET and self.phase == "reused":
            self.close()
            answer = self._request(method, path, headers, body, patience, most, between)
        self._used = time.monotonic()
        return answer

    def _request(
        self, method: str, path: str, headers: dict[str, str], body: Body | None, patience: float,
        most: float, between: Callable[[], None] | None,
    ) -> Answer:  # fmt: skip
        self.phase, self.steady, self._complete = "reused", False, body is None
        started = time.monotonic()
        with self.process.deadline(self.timeout + patience, self._shut, most) as limit:
            try:
                response = self._pool.urlopen(
                    method,
                    self.base + path,
                    body=self._sending(body, limit, patience, between) if body else None,
                    headers=headers,
                    timeout=Timeout(connect=max(self.timeout, STALL_SEC), read=patience),
                    redirect=False,  # urllib3 would repeat a streamed body, empty, and report 200
                    retries=False,
                    assert_same_host=False,
                    preload_content=False,
                    decode_content=False,
                    enforce_content_length=True,
                )
                limit.extend(self.timeout)  # the whole answer, from its head on
                text = self._read(response)
            except (
                urllib3.exceptions.HTTPError,
                http.client.HTTPException,
                OSError,
                TimedOut,
                ValueError,  # http.client's own, of numbers that are none
            ) as error:
                return self._failed(error, limit, started)
            if limit.expired:  # the end that was read is the one that we made
                return self._failed(TimeoutError("the answer did not end in time"), limit, started)
        return Answer(
            status=response.status,
            body=text,
            retry_after=response.headers.get("Retry-After"),
            length=response.headers.get("Content-Length"),
            detail="" if len(text) <= ANSWER_MAX else "an answer longer than 64 KiB",
            steady=self.steady,
            complete=self._complete and len(text) <= ANSWER_MAX,
            duration=time.monotonic() - started,
        )

    def _sending(
        self, body: Body, limit: Limit, patience: float, between: Callable[[], None] | None
    ) -> Iterator[Piece]:
        """The pieces; and, where a callback is given, the wait for the answer's first byte.

        The frontend may need long to store a file: other entries go on meanwhile.
        """
        limit.extend(self.timeout)
        self._complete = yield from body(limit)
        limit.extend(patience)
        if between is None or not self._complete:
            return
        poller = select.poll()
        poller.register(self.sock.fileno(), select.POLLIN)
        poller.register(self.process.wake_fd, select.POLLIN)
        until, unsent = time.monotonic() + patience, 1 << 40
        while time.monotonic() < until:
            between()
            queued = fcntl.ioctl(self.sock.fileno(), termios.TIOCOUTQ, bytes(4))
            if 0 < int.from_bytes(queued, sys.byteorder) < unsent:  # still going out, slowly
                unsent = int.from_bytes(queued, sys.byteorder)
                until = time.monotonic() + patience
                limit.extend(patience)
            events = dict(poller.poll(TICK * 1000))
            if events.get(self.sock.fileno()) and self.answered():
                limit.extend(self.timeout)
                return

    def answered(self) -> bool:
        """Whether a readable socket holds a piece of an answer."""
        return not isinstance(self.sock, _PeekedSocket) or self.sock.arrived()

    def _read(self, response: Any) -> bytes:
        text = bytearray()
        while len(text) <= ANSWER_MAX:
            piece = response.read(min(16384, ANSWER_MAX + 1 - len(text)))
            if not piece:
                break
            text += piece
        # What comes next on a connection must be the next answer: not after an interim one (103),
        # of which http.client makes an answer of its own, nor after half of anything.
        if len(text) > ANSWER_MAX or not self._complete or response.status < 200:
            response.close()
            self.close()
        else:
            response.release_conn()
        return bytes(text)

    def _failed(self, error: Exception, limit: Limit, started: float) -> Answer:
        self.process.check()
        met = list(causes(error))

        def any_of(*kinds: type[BaseException]) -> bool:
            return any(isinstance(each, kinds) for each in met)

        trouble = Trouble.RESET
        ended = any_of(ssl.SSLEOFError, ssl.SSLZeroReturnError)
        tls = any_of(ssl.SSLError, urllib3.exceptions.SSLError)
        if self.phase == "connecting":
            trouble = Trouble.TLS if tls else Trouble.UNREACHABLE
        elif limit.expired or any_of(TimeoutError, urllib3.exceptions.TimeoutError):
            trouble = Trouble.TIMEOUT
        elif tls and not ended:  # under TLS 1.3 our certificate is refused after the handshake
            trouble = Trouble.TLS
        elif any_of(http.client.HTTPException, ValueError) and not any_of(
            http.client.RemoteDisconnected, http.client.IncompleteRead, OSError
        ):
            trouble = Trouble.GARBLED
        return Answer(
            trouble=trouble,
            detail=plain_words(error),
            steady=self.steady,
            duration=time.monotonic() - started,
        )


def causes(error: BaseException) -> Iterator[BaseException]:
    """An error and what it wraps: urllib3 hides the real one in objects and addresses."""
    kinds = (OSError, TimedOut, urllib3.exceptions.HTTPError, http.client.HTTPException)
    for _ in range(8):
        yield error
        around = (*reversed(error.args), error.__cause__, error.__context__)
        inner = next((each for each in around if isinstance(each, kinds)), None)
        if inner is None:
            return
        error = inner


def plain_words(error: BaseException) -> str:
    inner = list(causes(error))[-1]
    return str(getattr(inner, "strerror", "") or inner or "time is up")


class Stream:
    """The body of an upload: a head, the file in fixed buffers, a tail; and the waits between."""

    def __init__(
        self, wire: Wire, ready: Ready, head: bytes, tail: bytes, rate: float,
        between: Callable[[int], None],
    ) -> None:  # fmt: skip
        self.wire, self.ready, self.head, self.tail = wire, ready, head, tail
        self.rate = rate  # bytes a second; 0: no limit
        self.between = between
        self.length = len(head) + ready.size + len(tail)
        self.sent = 0
        self.chunk = CHUNK_FIRST
        self.started = self._mark_at = time.monotonic()
        self._mark_sent = 0

    def __call__(self, limit: Limit) -> Generator[Piece, None, bool]:
        """A generator: urllib3 2.x cannot be pushed. It runs between the pieces that go out."""
        self.sent = self._mark_sent = 0
        self.started = self._mark_at = time.monotonic()
        os.lseek(self.ready.fd, 0, os.SEEK_SET)
        buffer = memoryview(bytearray(CHUNK_MAX))
        yield self.head
        while self.sent < self.ready.size:
            limit.extend(STALL_SEC + 5)
            if self._early_answer():
                return False
            want = min(self._chunk(), self.ready.size - self.sent)
            got = self._fill(buffer[:want])
            at = time.monotonic()
            yield buffer[:got]
            self.sent += got
            self._learn(time.monotonic() - at)
        yield self.tail
        return True

    def _fill(self, piece: memoryview) -> int:
        try:
            got = os.readv(self.ready.fd, [piece])
        except OSError as error:
            raise local_trouble(error, self.ready.name) from None
        if not got:
            raise EntryTrouble(Fate.ASIDE, "FILE_CHANGED", "the file shrank while it was sent")
        return got

    def _chunk(self) -> int:
        if self.rate:
            return int(min(max(self.rate / 2, CHUNK_MIN), CHUNK_MAX))
        return self.chunk

    def _learn(self, took: float) -> None:
        """A chunk is half a second's worth of what the link just did."""
        if took > 0.5:
            self.chunk = max(CHUNK_MIN, self.chunk // 2)
        elif took < 0.2:
            self.chunk = min(CHUNK_MAX, self.chunk * 2)

    def _early_answer(self) -> bool:
        """Waits for room in the socket's buffer and for our turn; True: an answer is here."""
        poller = select.poll()
        poller.register(self.wire.process.wake_fd, select.POLLIN)
        fd = self.wire.sock.fileno()
        while True:
            self.between(self.sent)
            now = time.monotonic()
            turn = self.started + self.sent / self.rate if self.rate else now
            poller.register(fd, select.POLLIN | (select.POLLOUT if turn <= now else 0))
            wait = TICK if turn <= now else min(TICK, turn - now)
            events = dict(poller.poll(wait * 1000)).get(fd, 0)
            if events & select.POLLIN and self.wire.answered():
                return True
            if events & (select.POLLERR | select.POLLHUP):
                return False
            self._check_progress(time.monotonic())
            if events & select.POLLOUT:
                return False

    def _check_progress(self, now: float) -> None:
        least = min(STALL_RATE, self.rate / 2) if self.rate else STALL_RATE
        if self.sent - self._mark_sent >= least * STALL_SEC:
            self._mark_at, self._mark_sent = now, self.sent
        self.wire.steady = True
        if now - self._mark_at > STALL_SEC:
            self.wire.steady = False
            raise TimeoutError(f"less than {least:g} bytes/s for {STALL_SEC:g} s")


def answer_patience(size: int) -> float:
    return 60.0 + size / 10_000_000


class Frontend:
    """The frontend's interface as CONTRACT has it: entries, files, and a look at a stored file."""

    def __init__(self, config: Config, process: Process) -> None:
        self.config = config
        self.entries, self.files = Wire(config, process), Wire(config, process)

    def close(self) -> None:
        self.entries.close()
        self.files.close()

    def _headers(self, key: str, kind: str, length: int) -> dict[str, str]:
        headers = {
            "User-Agent": f"serversync/{__version__}",
            "Accept": "application/json",
            "Accept-Encoding": "identity",
            "X-Serversync-Device": self.config.device_id,
        }
        if key:
            headers |= {
                "Content-Type": kind,
                "Content-Length": str(length),
                "Idempotency-Key": key,
            }
        if self.config.token:
            headers["Authorization"] = f"Bearer {self.config.token}"
        return headers

    def post(self, body: Body, length: int, key: str, most: float = float("inf")) -> Answer:
        headers = self._headers(key, "application/json", length)
        self.entries.timeout = patience = min(self.config.timeout, most)
        return self.entries.request("POST", "/api/ingest/sync", headers, body, patience, most)

    def upload(
        self, entry: FileEntry, ready: Ready, rate: float, between: Callable[[int], None]
    ) -> Answer:
        boundary = f"serversync-{uuid.uuid4().hex}"
        head, tail = multipart(boundary, entry, ready)
        stream = Stream(self.files, ready, head, tail, rate, between)
        kind = f"multipart/form-data; boundary={boundary}"
        headers = self._headers(ready.key, kind, stream.length)
        patience = answer_patience(ready.size)
        return self.files.request(
            "POST",
            "/api/ingest/recording-file",
            headers,
            stream,
            patience,
            between=partial(between, ready.size),
        )

    def stored_length(self, entry: FileEntry) -> Answer:
        path = self.config.verify_path.replace("{callLogId}", entry.call_log_id or "")
        path = path.replace("{recordingId}", entry.recording_id)
        headers = self._headers("", "", 0)
        return self.files.request("HEAD", path, headers, None, self.config.timeout)


def multipart(boundary: str, entry: FileEntry, ready: Ready) -> tuple[bytes, bytes]:
    """What stands before and after the audio. Ids are checked; names are ours, never outside's."""

    def part(name: str, kind: str, filename: str = "") -> bytes:
        shown = f'; filename="{filename}"' if filename else ""
        return (
            f"--{boundary}\r\n"
            f'Content-Disposition: form-data; name="{name}"{shown}\r\n'
            f"Content-Type: {kind}\r\n\r\n"
        ).encode()

    head = b"".join(
        (
            part("callLogId", "text/plain"),
            str(entry.call_log_id).encode(),
            b"\r\n" + part("recordingId", "text/plain"),
            entry.recording_id.encode(),
            b"\r\n" + part("meta", "application/json", "meta.json"),
            ready.meta,
            b"\r\n" + part("audio", "application/octet-stream", f"mixed.{ready.format}"),
        )
    )
    return head, f"\r\n--{boundary}--\r\n".encode()


# ==================================================================================================
# Recordings
# Paths, readiness, deletion: by directory descriptors, following no link, one level below the root.
# ==================================================================================================

MARKER: Final = ".serversync-root"
TRASH: Final = ".serversync-trash"
META: Final = "meta.json"
META_MAX: Final = 256 * 1024
_OPEN_DIR: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OPEN_FILE: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_UUID: Final = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")


@dataclass(frozen=True)
class Upload:
    """A confirmed upload whose local files still exist."""

    seq: int
    directory: str
    files: list[dict[str, Any]]
    tries: int

    @property
    def names(self) -> set[str]:
        return {str(file["name"]) for file in self.files}


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
    made_up: bool
    key: str

    @property
    def format(self) -> str:
        return "mp3" if self.name.lower().endswith(".mp3") else "wav"


@dataclass(frozen=True)
class Removal:
    """What became of a deletion: done, to be looked at again in `wait` seconds, or failed."""

    done: bool = False
    wait: float = 0.0
    error: str = ""


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
    above = [part for part in parts[:-2] if part not in ("", ".")]
    unsafe = ".." in parts or "\0" in path or len(parts) < 2
    # The component above is the root's own name (or the backend's word for it), or absent.
    if above and above[-1] not in (os.path.basename(root.rstrip("/")), "recordings"):
        unsafe = True
    if path.startswith("/") and not above:
        unsafe = True
    directory, name = (parts[-2], parts[-1]) if len(parts) > 1 else ("", "")
    for part in (directory, name):
        unsafe = unsafe or part in ("", ".") or len(part.encode()) > 255
    if unsafe or directory.startswith(".serversync"):
        raise EntryTrouble(
            Fate.DEAD, "FILE_UNSAFE", f"{path[:200]!r} does not lie one level below the recordings"
        )
    if not name.lower().endswith((".wav", ".mp3")):
        raise EntryTrouble(Fate.DEAD, "BAD_PAYLOAD", f"{name[:100]!r} is neither .wav nor .mp3")
    return directory, name


def local_trouble(error: OSError, name: str) -> EntryTrouble:
    """What an error of the disk means: a link is an attack, all else is nobody's fault."""
    if error.errno in (errno.ELOOP, errno.ENOTDIR):
        return EntryTrouble(Fate.DEAD, "FILE_UNSAFE", f"{name!r} is a link or no directory")
    return EntryTrouble(Fate.ASIDE, "FILE_UNREADABLE", f"{name!r}: {error.strerror}")


def read_small(folder: int, name: str, most: int) -> tuple[os.stat_result, bytes]:
    """The beginning of a plain file of one name; EISDIR for all that is none."""
    fd = os.open(name, _OPEN_FILE, dir_fd=folder)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
            raise OSError(errno.EISDIR, "not a plain file of one name")
        return status, os.read(fd, most)
    finally:
        os.close(fd)


class Recordings:
    """The backend's directory of recordings, and our trash in it."""

    def __init__(self, root: str, extra: str) -> None:
        self.path, self.extra = root, extra
        self._watched: dict[int, tuple[int, float]] = {}
        self._clock_offset = time.time() - time.monotonic()
        self._stepped_at = float("-inf")

    # --- the root -------------------------------------------------------------------------------

    @contextlib.contextmanager
    def root(self, known: str | None, adopt: Callable[[str], None]) -> Iterator[int]:
        """The opened root, if it is the one the database knows; else ROOT_MISSING.

        An unmounted mount point is just an empty directory: without the marker every recording
        in it would look missing, and die.
        """
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise self._root_missing(str(error.strerror)) from None
        try:
            found = self._marker(fd)
            if known is None:
                adopt(found or self._mark(fd))
                with contextlib.suppress(OSError):  # now: a full disk has no room for it
                    os.close(self._subdirectory(fd, TRASH, 0o700))
            elif found != known:
                raise self._root_missing(
                    f"its {MARKER} is {'another one' if found else 'not there'}: not mounted? "
                    "(moved on purpose: update serversync.sender set root_id = null, and restart)"
                )
            yield fd
        finally:
            os.close(fd)

    def _root_missing(self, why: str) -> EntryTrouble:
        text = f"the recordings directory {self.path} is not the one we know: {why}"
        return EntryTrouble(Fate.OUTAGE, "ROOT_MISSING", text)

    def _marker(self, root: int) -> str | None:
        try:
            return read_small(root, MARKER, 64)[1].decode("ascii").strip() or None
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            raise self._root_missing(f"{MARKER}: {error}") from None

    def _mark(self, root: int) -> str:
        name, new = uuid.uuid4().hex, MARKER + ".new"
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
            fd = os.open(new, flags, 0o644, dir_fd=root)
            with open(fd, "w", encoding="ascii") as file:
                file.write(name + "\n")
                file.flush()
                os.fsync(fd)
            os.rename(new, MARKER, src_dir_fd=root, dst_dir_fd=root)
            os.fsync(root)
        except OSError as error:
            raise self._root_missing(f"cannot write {MARKER}: {error.strerror}") from None
        return name

    # --- find, and ready? -----------------------------------------------------------------------

    @contextlib.contextmanager
    def opened(self, root: int, entry: FileEntry, grace_over: bool) -> Iterator[Ready]:
        """The recording, opened and complete; EntryTrouble says what is wrong with it."""
        directory, name = locate(entry.file_path, entry.call_id, self.path)
        with contextlib.ExitStack() as stack:
            folder = self._open(directory, _OPEN_DIR, root, grace_over)
            stack.callback(os.close, folder)
            fd = self._open(name, _OPEN_FILE, folder, grace_over)
            stack.callback(os.close, fd)
            status, device = os.fstat(fd), os.fstat(root).st_dev
            if os.fstat(folder).st_dev != device or status.st_dev != device:
                raise EntryTrouble(Fate.DEAD, "FILE_UNSAFE", f"{name!r} is on another file system")
            if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
                raise EntryTrouble(
                    Fate.DEAD, "FILE_UNSAFE", f"{name!r} is not a plain file of one name"
                )
            if status.st_size == 0:
                missing = self._missing(f"{directory}/{name} is empty", grace_over).verdict
                raise EntryTrouble(missing.fate, missing.code, missing.reason)
            files = [signature(name, status)]
            meta = self._meta(folder, files)
            if meta is None and not grace_over:
                raise EntryTrouble(Fate.ASIDE, "NOT_READY", f"{directory}/{META} is not there yet")
            sent = meta if meta is not None else self._made_up_meta(entry, directory)
            text = f"{entry.seq} {entry.recording_id} {files[0]}".encode()
            key = hashlib.sha256(text + sent).hexdigest()
            yield Ready(fd, directory, name, status.st_size, files, folder, sent, meta is None, key)

    def _open(self, name: str, flags: int, where: int, grace_over: bool) -> int:
        try:
            return os.open(name, flags, dir_fd=where)
        except FileNotFoundError:
            raise self._missing(f"{name!r} is not there", grace_over) from None
        except OSError as error:
            raise local_trouble(error, name) from None

    @staticmethod
    def _missing(what: str, grace_over: bool) -> Gone:
        if grace_over:
            return Gone(Fate.DEAD, "FILE_MISSING", what)
        return Gone(Fate.ASIDE, "NOT_READY", f"{what} (yet)")

    @staticmethod
    def _meta(folder: int, files: list[dict[str, Any]]) -> bytes | None:
        """meta.json verbatim, or None when it is missing or broken. An empty one holds nothing to
        lose and may go with the recording; a broken one stays."""
        try:
            status, text = read_small(folder, META, META_MAX + 1)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ELOOP, errno.EISDIR):
                return None
            raise local_trouble(error, META) from None
        try:
            json.loads(text[:META_MAX] if len(text) <= META_MAX else b"")
        except (ValueError, RecursionError):
            if status.st_size == 0:
                files.append(signature(META, status))
            return None
        files.append(signature(META, status))
        return text

    @staticmethod
    def _made_up_meta(entry: FileEntry, directory: str) -> bytes:
        known = {
            "callId": directory,
            "callLogId": entry.call_log_id,
            "recordingId": entry.recording_id,
            "generatedBy": "serversync",
        }
        return json.dumps(known).encode()

    @staticmethod
    def unchanged(ready: Ready) -> bool:
        """Still the same file, in its place and in our hands."""
        try:
            there = os.stat(ready.name, dir_fd=ready.folder, follow_symlinks=False)
        except OSError:
            return False
        ours = os.fstat(ready.fd)
        return signature(ready.name, there) == signature(ready.name, ours) == ready.files[0]

    # --- deletion -------------------------------------------------------------------------------

    def remove(self, root: int, upload: Upload, quiet: float) -> Removal:
        """Deletes what was uploaded, and nothing else. May be called again after a kill.

        1. What an earlier try left in the trash is finished.
        2. The directory must have been quiet.
        3. One rename takes the directory (or each of our files, when others stay) into the trash.
        4. There it is compared with what was sent: the same is removed, all else goes back.
        """
        try:
            trash = self._subdirectory(root, TRASH, 0o700)
            try:
                self._empty(root, trash, upload)
                return self._remove(root, trash, upload, quiet)
            finally:
                os.close(trash)
        except OSError as error:
            return Removal(error=f"{upload.directory}: {error.strerror or error}")

    def _remove(self, root: int, trash: int, upload: Upload, quiet: float) -> Removal:
        try:
            folder = os.open(upload.directory, _OPEN_DIR, dir_fd=root)
        except FileNotFoundError:
            return Removal(done=True)
        try:
            present = set(os.listdir(folder))
            ours = present & upload.names
            wait = self._until_quiet(folder, present, upload.seq, quiet)
            if wait > 0:
                return Removal(wait=wait)
            for name in sorted(ours):
                if not self._as_sent(folder, name, upload):
                    return Removal(error=f"{upload.directory}/{name} changed after its upload")
            plain = not any(os.path.isdir(f"/proc/self/fd/{folder}/{n}") for n in present - ours)
            whole = present == ours or (self.extra == "delete" and plain)
            if whole:
                self._take(root, trash, upload, folder)
            elif ours:
                self._take_some(folder, trash, upload, ours)
            self._empty(root, trash, upload)
            if not whole:
                with contextlib.suppress(OSError):  # others' files stay, and so does it
                    os.rmdir(upload.directory, dir_fd=root)
            os.fsync(root)
            self._watched.pop(upload.seq, None)
            return Removal(done=True)
        finally:
            os.close(folder)

    @staticmethod
    def _take(root: int, trash: int, upload: Upload, folder: int) -> None:
        """The directory that was looked at, into the trash; another one of its name goes back."""
        name = str(upload.seq)
        os.rename(upload.directory, name, src_dir_fd=root, dst_dir_fd=trash)
        taken = os.stat(name, dir_fd=trash, follow_symlinks=False)
        if taken.st_ino != os.fstat(folder).st_ino:
            os.rename(name, upload.directory, src_dir_fd=trash, dst_dir_fd=root)
            raise OSError(errno.EBUSY, "the directory was exchanged for another")

    def _take_some(self, folder: int, trash: int, upload: Upload, ours: set[str]) -> None:
        try:
            self._move(folder, trash, str(upload.seq), ours, 0o700)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            for name in sorted(ours):  # no room even for the trash: compared, and gone
                if self._as_sent(folder, name, upload):
                    os.unlink(name, dir_fd=folder)

    def _until_quiet(self, folder: int, present: set[str], seq: int, quiet: float) -> float:
        """How long the directory must still be left alone: by its newest mtime where the clock can
        be trusted, else by watching it unchanged."""
        status = os.fstat(folder)
        try:
            looks = [os.stat(n, dir_fd=folder, follow_symlinks=False) for n in sorted(present)]
        except FileNotFoundError:  # it went while we looked: anything but quiet
            return max(quiet, 1.0)
        seen_now = [(s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for s in (status, *looks)]
        state = hash(tuple(seen_now))
        now = time.monotonic()
        seen, since = self._watched.get(seq, (None, now))
        if seen != state:
            since = now
            remember(self._watched, seq, (state, since), 10_000)
        watched = now - since
        newest = max(s.st_mtime for s in [status, *looks])
        age = time.time() - newest
        if age >= quiet and newest > 1.6e9 and not self._clock_stepped(quiet):
            return 0.0
        return max(0.0, quiet - watched)

    def _clock_stepped(self, within: float) -> bool:
        """Whether the wall clock was set lately: then a time stamp may say anything."""
        now = time.monotonic()
        offset = time.time() - now
        if abs(offset - self._clock_offset) > 2:
            self._clock_offset, self._stepped_at = offset, now
        return now - self._stepped_at < within

    @staticmethod
    def _as_sent(folder: int, name: str, upload: Upload) -> bool:
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
        return stat.S_ISREG(status.st_mode) and signature(name, status) in upload.files

    @staticmethod
    def _subdirectory(where: int, name: str, mode: int) -> int:
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, mode, dir_fd=where)
        return os.open(name, _OPEN_DIR, dir_fd=where)

    def _move(self, source: int, where: int, name: str, names: set[str], mode: int) -> None:
        """Renames files into where/name, over nothing."""
        target = self._subdirectory(where, name, mode)
        try:
            there = set(os.listdir(target))
            for each in sorted(names):
                if each in there:
                    raise FileExistsError(errno.EEXIST, f"{name}/{each} is there already")
                os.rename(each, each, src_dir_fd=source, dst_dir_fd=target)
        finally:
            os.close(target)

    def _empty(self, root: int, trash: int, upload: Upload) -> None:
        """Removes from the trash what was sent as it was sent; puts back all else."""
        name = str(upload.seq)
        try:
            bin_fd = os.open(name, _OPEN_DIR, dir_fd=trash)
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno in (
                errno.ELOOP,
                errno.ENOTDIR,
            ):  # a link was taken, and then came a kill
                os.rename(name, upload.directory, src_dir_fd=trash, dst_dir_fd=root)
            raise
        try:
            present = set(os.listdir(bin_fd))
            good = {n for n in present & upload.names if self._as_sent(bin_fd, n, upload)}
            changed = (present & upload.names) - good
            if changed:  # not what the frontend has: all of it goes back, and stays together
                self._put_back(root, trash, bin_fd, upload, present)
            else:
                strangers = present - upload.names
                if self.extra == "delete" and good:  # beside what was sent; else not of this call
                    strangers = set()
                if strangers:
                    self._move(bin_fd, root, upload.directory, strangers, 0o777)
                for each in sorted(present - strangers):
                    os.unlink(each, dir_fd=bin_fd)
        finally:
            os.close(bin_fd)
        with contextlib.suppress(FileNotFoundError):  # put back as a whole
            os.rmdir(name, dir_fd=trash)
        os.fsync(trash)
        if changed:
            raise OSError(errno.EBUSY, f"{sorted(changed)[0]} changed after its upload")

    def _put_back(
        self, root: int, trash: int, bin_fd: int, upload: Upload, present: set[str]
    ) -> None:
        try:
            os.rename(str(upload.seq), upload.directory, src_dir_fd=trash, dst_dir_fd=root)
        except OSError:  # a new directory of that name is there already
            self._move(bin_fd, root, upload.directory, present, 0o777)


# ==================================================================================================
# The agent: deliveries
# What is sent, and what becomes of it. Results are recorded only while the lock is held.
# ==================================================================================================

NESTED_SEC: Final = 3.0  # for entries between two chunks of an upload
NESTED_EVERY: Final = 2.0
ASK_EVERY: Final = 30.0


def unreadable(error: psycopg.Error) -> Verdict:
    reason = f"PostgreSQL cannot write it out: {error}"
    return Verdict(Fate.ASIDE, "ENTRY_UNREADABLE", reason)


def is_of_the_data(error: psycopg.Error) -> bool:
    """Whether one entry may be to blame: bad data, program limits, memory, time."""
    return (error.sqlstate or "")[:2] in ("22", "54") or error.sqlstate in ("53200", "57014")


class Busy(Exception):
    """Another agent holds the lock."""


class Agent:
    """The one loop: holds the lock, drains entries and files, deletes, rests."""

    def __init__(self, config: Config, process: Process, state: StateFile, once: bool) -> None:
        self.config, self.process, self.state, self.is_once = config, process, state, once
        self.db = Database(config.database_url, config.device_id, process)
        self.frontend = Frontend(config, process)
        self.recordings = Recordings(config.recordings_dir, config.extra_files)
        lanes = OUTAGE_LANES_ONCE if once else OUTAGE_LANES
        self.entries = Endpoint("entries", config.batch_size, lanes=lanes)
        self.files = Endpoint("files", 1, lanes=lanes)
        self.repeats = Repeats()
        self.tally = Tally()
        self.interval = config.poll_interval
        self.sentence = ""
        self.deaths = 0
        self.quiet_until = 0.0  # the frontend asked for a pause of all traffic
        self.waiting = False  # there are rows in failures
        self.looked_at = "now"  # the database's time at the head of the cycle
        self.delete_due = 0.0
        self.prune_due = time.monotonic() + 300.0
        self.stale_due = 0.0
        self._unrecorded: list[tuple[int, Callable[[], object]]] = []
        self._unverified: dict[int, tuple[str, str, Answer]] = {}
        self._looks: dict[int, float] = {}  # when a recording was last looked at
        self._nested_until = 0.0  # not 0: we are between two chunks of an upload
        self._blind = False  # until the end of this upload
        self._until = 0  # the last id of this pass
        self._travelling: list[str] = []  # the lane of the file that is being uploaded
        self._heard = self._heard_between = 0
        self._looked = self._between_at = self._busy_at = 0.0

    # --- recording results ----------------------------------------------------------------------

    def record(self, write: Callable[[], object]) -> None:
        """Writes a result down before anything else is sent. It may take for ever."""
        self._unrecorded.append((self.db.generation, write))
        self.settle()

    def settle(self) -> None:
        """A result that cannot be recorded is kept: sending it again would not make it better."""
        tries = 0
        while self._unrecorded:
            generation, write = self._unrecorded[0]
            if generation != self.db.generation:
                # Nor may anything go on that was read before: the whole cycle begins anew.
                text = "another sender came between: a result is thrown away"
                say(logging.WARNING, "fenced", text)
                self._unrecorded.clear()
                raise Lost(text)
            try:
                write()
                self._unrecorded.pop(0)
                self.repeats.over("record")
            except Lost:
                if self._nested_until:
                    raise
                self.hold()
            except Exception as error:
                if not getattr(error, "sqlstate", None):  # not the database's no: a bug of ours
                    self._unrecorded.pop(0)
                    raise
                if self._nested_until:
                    raise
                tries += 1
                text = f"a result cannot be recorded, nothing else is sent: {error}"
                self.repeats.say("record", str(error), logging.ERROR, "not_recorded", text)
                self.report(text)
                if self.is_once and tries >= 5:
                    raise Unavailable(text) from None
                self.pause(backoff(min(tries, 5), random.random()))

    # --- what an answer does to an endpoint -----------------------------------------------------

    def succeeded(self, door: Endpoint, size: int) -> None:
        if door.outage is not None:
            lasted = time.monotonic() - door.outage.since
            text = f"{door.name}: recovered after {lasted:.0f} s ({door.outage.code})"
            say(logging.INFO, "recovered", text, ERROR_CODE=door.outage.code)
            self.repeats.over(door.name)
            door.outage = None
            door.tried.clear()
        self.write_asides(door)
        if size >= door.size:
            most = self.config.batch_size if door is self.entries else 1
            door.size = next_size(door.size, most, door.gentle)

    def write_asides(self, door: Endpoint) -> None:
        """Failures that no outage explains."""
        while door.aside:
            self._write_aside(door.aside.pop(0))

    def _write_aside(self, aside: Aside) -> None:
        self.record(partial(self.db.set_aside, aside))
        self.waiting = True
        self._say_failed(aside)

    def begin_outage(self, door: Endpoint, verdict: Verdict) -> None:
        """What an outage showed is not written to the entries: when it ends, everything is due."""
        now = time.monotonic()
        before = door.outage
        tries = before.tries + 1 if before else 1
        wait = max(backoff(tries, random.random()), verdict.retry_after or 0.0)
        since = before.since if before else now
        door.outage = Outage(verdict.code, verdict.reason, since, tries, now + wait)
        for aside in door.aside:
            remember(door.suspected, aside.seq, aside.successes)
        door.aside.clear()
        door.size, door.gentle = 1, False
        self.repeats.say(
            door.name,
            verdict.code,
            logging.WARNING,
            "outage",
            f"{door.name}: outage, nothing is lost: {verdict.reason} (next try in {wait:.0f} s)",
            ERROR_CODE=verdict.code,
            HTTP_STATUS=verdict.status,
        )
        if verdict.code == "RATE_LIMITED":
            self.quiet_until = now + wait

    def failed(
        self, door: Endpoint, seq: int, verdict: Verdict, waited: float = 0.0,
        recording_id: str | None = None,
    ) -> tuple[str, str, Next] | None:  # fmt: skip
        """One entry, sent alone, did not get through: dead, or set aside. Its lane and type."""
        row = self.db.past(seq, door.name)
        if row is None:
            return None
        entity_type, lane, call, tries, attempts, at_failure, age, successes, deaths = row
        hidden = door.suspected.pop(seq, None)
        known = [n for n in (at_failure, hidden) if n is not None]
        past = Past(tries, attempts, max(known) if known else None, age)
        verdict = replace(verdict, reason=clean(verdict.reason, MASKING.known))
        retry_max, hours = self.config.retry_max, self.config.retry_hours
        step = next_state(past, verdict, successes, deaths, retry_max, hours, random.random())
        if step.to is Next.HELD:  # asked more and more rarely, whichever entry is asked
            asked = door.held.get(entity_type, 0) + 1
            remember(door.held, entity_type, asked)
            step = replace(step, delay=backoff(asked, random.random()))
        elif step.to is Next.DEAD:
            door.held.pop(entity_type, None)
        aside = Aside(seq, entity_type, lane, call, verdict, step, successes, waited, recording_id)
        remember(door.tried, lane, None)
        if step.to is Next.DEAD:
            self.record(partial(self.db.bury, aside))
            self._say_failed(aside)
        elif step.to is Next.HELD:
            self.record(partial(self._hold_type, aside))
            self._say_failed(aside)
        elif verdict.fate is Fate.SUSPECT and not step.charged:
            door.aside.append(aside)  # an outage may still explain it
        else:
            self._write_aside(aside)
        if len(door.aside) >= door.lanes:
            self.begin_outage(door, verdict)
        return lane, entity_type, step.to

    def _hold_type(self, aside: Aside) -> None:
        self.waiting = True
        reached = self.db.hold_type(aside)
        if reached is not None:  # what is not held yet would be tried in this pass
            self._until = min(self._until, reached)

    def _say_failed(self, aside: Aside) -> None:
        verdict, step, entity_type = aside.verdict, aside.step, aside.entity_type
        self.tally.aside += step.to is not Next.DEAD
        self.tally.dead += step.to is Next.DEAD
        self.deaths += step.to is Next.DEAD
        quiet = verdict.code == "NOT_READY" and step.tries > 1
        words = {
            Next.WAITS: f"set aside, next try in {step.delay:.0f} s",
            Next.DEAD: "given up: it is in serversync.dead_letters",
            Next.HELD: f"waits: the frontend rejects everything of type {entity_type}",
        }
        say(
            logging.DEBUG if quiet else logging.WARNING,
            "entry_dead" if step.to is Next.DEAD else "entry_set_aside",
            f"entry {aside.seq} ({entity_type}) {words[step.to]}: {verdict.reason}",
            SEQ=aside.seq,
            ENTITY_TYPE=entity_type,
            CALL_ID=aside.call,
            ERROR_CODE=verdict.code,
            HTTP_STATUS=verdict.status,
            ATTEMPT=step.attempts,
            STATUS_FROM="sending",
            STATUS_TO="dead" if step.to is Next.DEAD else "failed",
        )

    # --- passes ---------------------------------------------------------------------------------

    def drain(self, door: Endpoint, one_pass: Callable[[Sequence[str], bool], int]) -> None:
        """Passes from the lowest id on, until one sends nothing. Lower ids may appear late.

        In an outage, lanes that were never tried come first, then those least recently tried:
        three old poisonous lanes must not look like an outage for ever.
        """
        while not self._closed(door):
            was_out = door.outage is not None
            sent, dead = 0, self.tally.dead
            for fresh, skipping in ((True, True), (False, True), (False, False)):
                if was_out or not skipping:
                    skip = list(door.tried) if skipping else []
                    if not skipping:
                        door.tried.clear()
                    sent += one_pass(skip, fresh)
                if was_out and (sent or self._closed(door)):
                    break
            if self._closed(door) or self._nested_is_over():
                return
            self.write_asides(door)
            moved = sent or self.tally.dead > dead
            if door.outage is not None and not moved:
                # Too few lanes for an outage: each waits by its own backoff.
                door.outage = None
                self.repeats.over(door.name)
            if not moved:
                return

    def _closed(self, door: Endpoint) -> bool:
        """Nothing may be tried there now: an outage, a pause that was asked for, or a reload."""
        undecided = self._nested_until or door.outage or door.aside
        if self.process.reload and not undecided and not self.is_once:
            return True
        due = door.outage.due if door.outage else 0.0
        return max(due, self.quiet_until) > time.monotonic()

    def _nested_is_over(self) -> bool:
        return bool(self._nested_until) and (self._blind or time.monotonic() >= self._nested_until)

    def pass_entries(self, skip: Sequence[str], fresh: bool) -> int:
        """One pass over the entries: how many were sent."""
        if not self._nested_until:
            self.settle()  # what an upload before left
        sent = after = unread = 0
        self._until = self.db.last()
        door = self.entries
        was_out = door.outage is not None
        while True:
            self.process.check()
            self.process.progress()
            # An upload's own call waits for it: a `recording` that the frontend stores after the
            # file, but that was written before its answer came, would undo the upload.
            out = [*skip, *(aside.lane for aside in door.aside), *self._travelling]
            try:
                batch = self.db.fetch(
                    after, self._until, door.size, self.config.batch_bytes, out, fresh
                )
            except psycopg.Error as error:
                unread += 1
                if unread > 4 or not is_of_the_data(error):
                    raise
                door.size, after = self._unreadable(door, after, error)
                continue
            if not batch.seqs:
                return sent
            unread = 0
            after = batch.seqs[-1]
            sent += self.deliver(batch)
            if self._closed(door) or self._nested_is_over() or (was_out and sent):
                return sent

    def _unreadable(self, door: Endpoint, after: int, error: psycopg.Error) -> tuple[int, int]:
        """PostgreSQL cannot write out what comes next: it must not block the rest. Returns the next
        size, and where to go on."""
        if door.size > 1:
            return 1, after
        seq = self.db.next_pending(after)
        if not seq:
            raise error
        self.failed(door, seq, unreadable(error))
        return 1, seq

    # --- entries --------------------------------------------------------------------------------

    def deliver(self, batch: Batch) -> int:
        """Sends a batch; one that fails in its two halves, and so on down. How many were sent."""
        door = self.entries
        parts = [list(range(len(batch.seqs)))]
        known: dict[int, tuple[str, str]] = {}
        out: set[str] = set()  # lanes and types that are left out of every further part
        sent = 0
        while parts:
            self.process.check()
            picked = parts.pop()
            if out:
                picked = self._left(batch, picked, known, out)
            if door.gentle and len(picked) > door.size:  # larger ones time out: that is known now
                parts.append(picked[door.size :])
                picked = picked[: door.size]
            if not picked:
                continue
            part = batch if len(picked) == len(batch.seqs) else batch.part(picked)
            verdict, rejected = self.send(part)
            if verdict.fate is Fate.SENT:
                sent += len(part.seqs) - len(rejected)
                for seq, reason in rejected.items():
                    refusal = Verdict(Fate.DEAD, "REJECTED", reason, verdict.status)
                    self._leave_out(self.failed(door, seq, refusal), out)
            elif self._nested_until and verdict.code in ("NETWORK_TIMEOUT", "NETWORK_ERROR"):
                self._blind = True  # perhaps our own upload fills the line: nothing is concluded
            elif verdict.fate is Fate.OUTAGE:
                self.begin_outage(door, verdict)
            elif len(picked) > 1:
                known = known or self.db.lanes(batch.seqs)
                if verdict.code in ("NETWORK_TIMEOUT", "TOO_LARGE"):
                    door.size, door.gentle = max(1, len(picked) // 2), True
                middle = len(picked) // 2
                parts += [picked[middle:], picked[:middle]]
            else:
                self._leave_out(self.failed(door, part.seqs[0], verdict), out)
            if self._closed(door) or self._blind:
                break
        return sent

    @staticmethod
    def _leave_out(outcome: tuple[str, str, Next] | None, out: set[str]) -> None:
        """Its lane; of a held type all, once three lanes spoke for it: one may be truly bad."""
        if outcome is not None and outcome[2] is not Next.DEAD:
            out.add(outcome[0])
            if outcome[2] is Next.HELD:
                times = sum(each.startswith(f"type {outcome[1]} ") for each in out)
                out.add(f"type {outcome[1]} {times}" if times < 2 else f"type {outcome[1]}")

    def _left(
        self, batch: Batch, picked: list[int], known: dict[int, tuple[str, str]], out: set[str]
    ) -> list[int]:
        """Without the lanes that wait; what is held by its type makes its lane wait, too."""
        if not known:
            known.update(self.db.lanes(batch.seqs))
        left = []
        for i in picked:
            lane, entity_type = known.get(batch.seqs[i], ("", ""))
            if "type " + entity_type in out:
                out.add(lane)
            if lane not in out:
                left.append(i)
        return left

    def send(self, part: Batch) -> tuple[Verdict, dict[int, str]]:
        """One request of entries; what was confirmed is recorded before anything else happens."""
        left = max(0.5, self._nested_until - time.monotonic())
        try:
            key, length, body = self._body(part)
            most = left if self._nested_until else float("inf")
            answer = self.frontend.post(body, length, key, most)
        except EntryTrouble as trouble:
            return trouble.verdict, {}
        except psycopg.Error as error:
            if not is_of_the_data(error):
                raise
            return unreadable(error), {}
        verdict, rejected = confirm_entries(answer, key, part.seqs, time.time())
        if verdict.fate is Fate.SENT:
            digest = hashlib.sha256(part.body).hexdigest() if part.body else None
            receipt = Receipt("entries", length, key, digest, answer)
            outcome = "conflict_processed" if verdict.code else "sent"
            stored = [seq for seq in part.seqs if seq not in rejected]
            self.record(partial(self.db.confirm, stored, "entries", outcome, receipt))
            self.succeeded(self.entries, len(part.seqs))
            self.tally.entries += len(stored)
            self.busy(f"sending entries: {self.tally.entries} so far")
            self._say_sent(part.seqs, len(stored), key, answer)
        return verdict, rejected

    @staticmethod
    def _say_sent(seqs: Sequence[int], stored: int, key: str, answer: Answer) -> None:
        ends = f"seq {seqs[0]}" if len(seqs) == 1 else f"seq {seqs[0]} to {seqs[-1]}"
        ms = round(answer.duration * 1000)
        say(
            logging.INFO,
            "entries_sent",
            f"sent {count(stored, 'entry', 'entries')}, {ends}, in {ms} ms",
            SEQ=seqs[0],
            SEQ_LAST=seqs[-1],
            HTTP_STATUS=answer.status,
            IDEMPOTENCY_KEY=key,
            DURATION_MS=ms,
            STATUS_FROM="queued",
            STATUS_TO="sent",
        )

    def _body(self, part: Batch) -> tuple[str, int, Body]:
        """The key, the length and the pieces: from memory, or cut by PostgreSQL from one entry."""
        if part.body:
            text = part.body

            def whole(limit: Limit) -> Generator[Piece, None, bool]:
                yield text
                return True

            return hashlib.sha256(text).hexdigest(), len(text), whole
        size = part.sizes[0]
        if size > self.config.entry_max_bytes:
            reason = f"{human(size)} is more than SYNC_ENTRY_MAX_BYTES"
            raise EntryTrouble(Fate.DEAD, "TOO_LARGE", reason)
        seq = part.seqs[0]
        digest, first = self.db.slice(seq, 0, SLICE_BYTES)

        def sliced(limit: Limit) -> Generator[Piece, None, bool]:
            yield BODY_HEAD
            at, piece, same = 0, first, digest
            while piece and same == digest:
                yield piece
                limit.extend(self.config.timeout)
                self.process.check()
                at += len(piece)
                if at >= size:
                    break
                same, piece = self.db.slice(seq, at, SLICE_BYTES)
            if at != size:
                raise EntryTrouble(
                    Fate.ASIDE, "ENTRY_CHANGED", "the entry changed while it was sent"
                )
            yield BODY_TAIL
            return True

        key = hashlib.sha256(f"{seq} {digest}".encode()).hexdigest()
        return key, len(BODY_HEAD) + size + len(BODY_TAIL), sliced

    # --- files ----------------------------------------------------------------------------------

    def pass_files(self, skip: Sequence[str], fresh: bool) -> int:
        """One pass over the recordings; new entries go between two of them."""
        sent = after = 0
        door = self.files
        heard = self.db.notifications()
        was_out = door.outage is not None
        while entries := self.db.fetch_files(after, [*skip, *(a.lane for a in door.aside)], fresh):
            handled: set[str] = set()
            for entry in entries:
                after = entry.seq
                if entry.lane in handled:  # its turn comes in the next pass, with a new look
                    continue
                handled.add(entry.lane)
                self.process.check()
                self.process.progress()
                sent += self.deliver_file(entry)
                if self._closed(door) or (was_out and sent):
                    return sent
                self.remove_uploaded()
                if self.db.notifications() != heard:
                    heard = self.db.notifications()
                    self.drain(self.entries, self.pass_entries)
        return sent

    def deliver_file(self, entry: FileEntry) -> int:
        """Uploads one recording, if it can be; 1 when it is through."""
        self.settle()  # what an upload before left
        now = time.monotonic()  # of our own running time, whatever the database's clock did
        waited = entry.waited + now - self._looks.get(entry.seq, now)
        remember(self._looks, entry.seq, now, 10_000)
        grace_over = grace_is_over(entry.tries, waited, self.config.file_grace)
        self._travelling = [entry.lane]
        try:
            verdict = self._upload(entry, grace_over)
        except Gone as trouble:
            uploaded = entry.upload_status == "uploaded"
            verdict = self._already_there(entry) if uploaded else trouble.verdict
        except EntryTrouble as trouble:
            verdict = trouble.verdict
        except (Stopping, Lost, psycopg.Error):
            raise
        except Exception:
            log.exception("a bug: recording %s cannot be handled", entry.seq)
            verdict = Verdict(
                Fate.ASIDE, "UNKNOWN", "an error of serversync's own: see the journal"
            )
        finally:
            self._blind, self._travelling = False, []
        if verdict.fate is Fate.OUTAGE:
            self.begin_outage(self.files, verdict)
        elif verdict.fate is not Fate.SENT:
            self.failed(self.files, entry.seq, verdict, waited, entry.recording_id)
        return int(verdict.fate is Fate.SENT)

    def _already_there(self, entry: FileEntry) -> Verdict:
        """Its file is gone and its recording is shown as uploaded: that is what we left behind."""
        receipt = Receipt("none", 0, "", None, Answer())
        self.record(partial(self.db.confirm, [entry.seq], "files", "already_uploaded", receipt))
        say(logging.INFO, "file_already_uploaded", f"recording {entry.seq} was uploaded before",
            SEQ=entry.seq, STATUS_FROM="queued", STATUS_TO="sent")  # fmt: skip
        return Verdict(Fate.SENT, "", "uploaded before")

    def _upload(self, entry: FileEntry, grace_over: bool) -> Verdict:
        """Steps 1 to 5 of a recording: find, ready, stream, confirm, record."""
        for name, value in (("callLogId", entry.call_log_id), ("recordingId", entry.recording_id)):
            if not _UUID.fullmatch(value or ""):
                raise EntryTrouble(Fate.DEAD, "BAD_PAYLOAD", f"{name} is not a UUID: {value!r}")
        if entry.second:
            raise EntryTrouble(
                Fate.DEAD, "SECOND_RECORDING", "the frontend has another recording of this call"
            )
        with (
            self.recordings.root(self.db.root_id, self._adopt_root) as root,
            self.recordings.opened(root, entry, grace_over) as ready,
        ):
            if ready.made_up:
                text = f"recording {entry.seq} has no usable meta.json: sent with a minimal one"
                say(logging.WARNING, "meta_made_up", text, SEQ=entry.seq, CALL_ID=ready.directory)
            verdict, url, answer = self._transfer(entry, ready)
            if verdict.fate is not Fate.SENT:
                return verdict
            if not self.recordings.unchanged(ready):
                raise EntryTrouble(Fate.ASIDE, "FILE_CHANGED", "the file changed while it was sent")
            self._confirmed(entry, ready, verdict, url, answer)
            return verdict

    def _adopt_root(self, root_id: str) -> None:
        self.db.run(ADOPT_ROOT, root_id=root_id)
        self.db.root_id = root_id
        say(
            logging.INFO, "root_marked", f"{self.config.recordings_dir} is the recordings directory"
        )

    def _transfer(self, entry: FileEntry, ready: Ready) -> tuple[Verdict, str, Answer]:
        """Uploads the file, unless that is done and only its verification failed; then verifies."""
        key, url, answer = self._unverified.pop(entry.seq, ("", "", Answer()))
        if key != ready.key:
            self._looked = time.monotonic()
            between = partial(self._between, entry, ready)
            answer = self.frontend.upload(entry, ready, self._rate(entry, ready), between)
            verdict, url = confirm_upload(answer, ready.key, ready.size, time.time())
            if verdict.fate is Fate.SENT and not self._same_digest(ready, answer):
                strange = replace(answer, detail="it stored other bytes (sha256)")
                verdict = classify(strange)
            if verdict.fate is not Fate.SENT:
                return verdict, "", answer
        if self.config.verify_path:
            look = self.frontend.stored_length(entry)
            if look.status != 200 or not (look.length or "").isdigit():
                remember(self._unverified, entry.seq, (ready.key, url, answer), 16)
                failed = classify(replace(look, detail=f"verification by HEAD: {look.detail}"))
                fate = failed.fate if failed.fate is Fate.OUTAGE else Fate.SUSPECT
                return replace(failed, fate=fate), "", answer
            if int(look.length or 0) != ready.size:
                detail = f"verification by HEAD: it has {look.length} of {ready.size} bytes"
                return classify(replace(look, detail=detail)), "", answer
        return Verdict(Fate.SENT, "", "confirmed", answer.status), url, answer

    def _same_digest(self, ready: Ready, answer: Answer) -> bool:
        """Compares with the digest in the answer, if there is one; most frontends give none."""
        claimed = answer.said.get("sha256")
        if claimed is None:
            return True
        digest = hashlib.sha256()
        os.lseek(ready.fd, 0, os.SEEK_SET)
        while piece := os.read(ready.fd, CHUNK_MAX):
            digest.update(piece)
            self.process.check()
            self.process.progress()
        return str(claimed).lower() == digest.hexdigest()

    def _rate(self, entry: FileEntry, ready: Ready) -> float:
        rate = self.config.upload_kbps * 125.0
        if rate and ready.size / rate > LIFT_LIMIT_SEC:
            say(
                logging.WARNING,
                "limit_lifted",
                f"recording {entry.seq} is too large for SYNC_UPLOAD_KBPS: sent without the limit",
                SEQ=entry.seq,
            )
            return 0.0
        return rate

    def _between(self, entry: FileEntry, ready: Ready, sent: int) -> None:
        """Runs between two chunks: new entries must not wait behind audio."""
        self.process.check()
        self.process.drain_wakeups()
        self.process.progress()
        now = time.monotonic()
        if self._nested_until or now - self._between_at < 0.2:
            return
        self._between_at = now
        progress = {"seq": entry.seq, "bytes": sent, "size": ready.size}
        self.busy(
            f"uploading recording {entry.seq}: {human(sent)} of {human(ready.size)}", **progress
        )
        if self._blind:
            return
        try:
            heard = self.db.notifications()
            if heard != self._heard_between or now - self._looked >= NESTED_EVERY:
                self._heard_between, self._looked = heard, now
                self._nested_until = now + NESTED_SEC
                self.drain(self.entries, self.pass_entries)
        except (Lost, psycopg.Error):
            self._blind = True  # the database is settled after the upload
        finally:
            self._nested_until = 0.0

    def _confirmed(
        self, entry: FileEntry, ready: Ready, verdict: Verdict, url: str, answer: Answer
    ) -> None:
        receipt = Receipt(
            "file", ready.size, ready.key, None, answer, entry.lane, entry.recording_id, url
        )
        outcome = "conflict_processed" if verdict.code else "sent"
        self.record(partial(self.db.confirm_upload, entry, ready, url, outcome, receipt))
        self.succeeded(self.files, 1)
        self.tally.files += 1
        self.tally.bytes += ready.size
        self.delete_due = min(self.delete_due, time.monotonic() + self.config.delete_after)
        say(
            logging.INFO,
            "file_uploaded",
            f"uploaded recording {entry.seq} ({human(ready.size)}) in {answer.duration:.1f} s",
            SEQ=entry.seq,
            ENTITY_TYPE=FILE_TYPE,
            CALL_ID=ready.directory,
            HTTP_STATUS=answer.status,
            IDEMPOTENCY_KEY=ready.key,
            DURATION_MS=round(answer.duration * 1000),
            STATUS_FROM="queued",
            STATUS_TO="sent",
        )

    # --- deletions ------------------------------------------------------------------------------

    def remove_uploaded(self) -> None:
        """Step 6 of a recording: deletion, from the table of confirmed uploads alone."""
        if time.monotonic() < self.delete_due:
            return
        self.delete_due = float("inf")
        after = 0
        while uploads := self.db.uploads(after):
            after = uploads[-1].seq
            try:
                with self.recordings.root(self.db.root_id, self._adopt_root) as root:
                    for upload in uploads:
                        self.process.check()
                        self.process.progress()
                        self._remove(root, upload)
            except EntryTrouble as trouble:
                self._delete_again(60.0)
                text = f"uploaded recordings cannot be deleted: {trouble}"
                self.repeats.say("root", str(trouble), logging.WARNING, "root_missing", text)
                return
        self.repeats.over("root")

    def _remove(self, root: int, upload: Upload) -> None:
        try:
            if self._wanted(upload.directory):
                result = Removal(wait=60.0)
            else:
                result = self.recordings.remove(root, upload, self.config.delete_after)
        except (psycopg.Error, KeyError, TypeError) as met:  # must not end deliveries
            result = Removal(error=f"{upload.directory}: {met!r}")
        if result.done:
            self.db.run(FORGET_UPLOAD, seq=upload.seq)
            self.tally.removed += 1
            self.repeats.over(f"deletion {upload.seq}")
        elif result.error:
            error = clean(result.error, MASKING.known)
            self.db.run(DELETION_FAILED, seq=upload.seq, error=error)
            self._delete_again(backoff(upload.tries + 1, 1.0))
            self.repeats.say(
                f"deletion {upload.seq}",
                error,
                logging.WARNING,
                "deletion_failed",
                f"uploaded recording {upload.seq} cannot be deleted, tried again later: {error}",
                SEQ=upload.seq,
                CALL_ID=upload.directory,
            )
        else:
            self._delete_again(result.wait)

    def _wanted(self, directory: str) -> bool:
        """Whether a pending recording still needs this directory: a Call-ID can come twice."""
        for file_path, call_id in self.db.rivals(directory):
            with contextlib.suppress(EntryTrouble):
                if locate(file_path, call_id, self.config.recordings_dir)[0] == directory:
                    return True
        return False

    def _delete_again(self, seconds: float) -> None:
        self.delete_due = min(self.delete_due, time.monotonic() + seconds)

    # ==============================================================================================
    # The agent: cycle and loop
    # Connect, lock, LISTEN, delete, drain, wait. One wait point; one sentence a cycle.
    # ==============================================================================================

    def cycle(self) -> None:
        self.settle()
        self.tally = Tally()
        self._heard = self.db.notifications()  # what comes from now on wants another cycle
        interval, entries, files, self.waiting, self.looked_at = self.db.run(LOOK)[0]
        usable = interval is not None and 0 < interval <= 86400
        self.interval = max(interval, 0.1) if usable else self.config.poll_interval
        if self.waiting and time.monotonic() >= self.stale_due:
            self.stale_due = time.monotonic() + 60.0
            self.db.run(DROP_STALE)
        if time.monotonic() >= self.db.optional_due:
            self.db.make_optional()
        self.remove_uploaded()
        for door, pending, one_pass in (
            (self.entries, entries, self.pass_entries),
            (self.files, files, self.pass_files),
        ):
            if pending:
                self.drain(door, one_pass)
            else:
                door.outage = None
        self.remove_uploaded()
        self.prune()
        now = time.monotonic()
        outages = [door.outage for door in (self.entries, self.files) if door.outage]
        self.report(sentence_of(self.tally, outages, now))

    def report(self, sentence: str) -> None:
        """The sentence of a cycle: the unit's status, the state file, and (debug) the journal."""
        sentence = clean(sentence, MASKING.known)
        self.state.write(sentence)
        if sentence != self.sentence:
            self.sentence = sentence
            log.debug("%s", sentence, extra={"EVENT": "cycle"})
            if not self.is_once:
                daemon.notify(f"STATUS={sentence}")

    def busy(self, sentence: str, **progress: object) -> None:
        """What is going on in the middle of a cycle; at most once a second."""
        if time.monotonic() - self._busy_at >= 1:
            self._busy_at = time.monotonic()
            self.state.write(sentence, **progress)
            self.sentence = sentence
            if not self.is_once:
                daemon.notify(f"STATUS={sentence}")

    def prune(self) -> None:
        """Once a day, in chunks; an unprocessed row never, however old."""
        if time.monotonic() < self.prune_due or not self.config.retention_days or self.is_once:
            return
        try:
            gone = self.db.run(PRUNE, days=self.config.retention_days)[0]
        except psycopg.Error as error:
            text = f"old rows cannot be pruned: {error}"
            self.repeats.say("prune", str(error), logging.WARNING, "prune_failed", text)
            gone = (0, 0)
        self.prune_due = time.monotonic() + (1.0 if max(gone) >= 1000 else 86400.0)
        if any(gone):
            text = f"pruned {gone[0]} old rows of the outbox and {gone[1]} receipts"
            say(logging.INFO, "pruned", text)

    def hold(self) -> None:
        """Returns with the connection made and the lock held, however long that takes."""
        tries = 0
        while not self.db.locked:
            self.process.check()
            try:
                if self.db.conn is None:
                    self.db.connect()
                if self.db.take_lock():
                    break
                if self.is_once:
                    raise Busy
                self.repeats.say("lock", "standby", logging.INFO, "standby", STANDBY)
                self.report(STANDBY)
                self.pause(2.0)
            except (Unavailable, Lost, psycopg.Error, ConfigError) as error:
                self.db.close()
                if isinstance(error, ConfigError) and not self.db.epoch:
                    raise  # later it is a state: a restore may be under way
                text = clean(" ".join(str(error).split()), MASKING.known)
                if self.is_once:
                    raise Unavailable(text) from None
                tries += 1
                self.repeats.say("database", text, logging.WARNING, "database_outage", text)
                self.report(text)
                self.pause(min(0.25 * 2**tries, 15.0) * (0.5 + random.random() / 2))
        self.delete_due = 0.0
        if self.repeats.over("database") or self.repeats.over("lock"):
            say(logging.INFO, "recovered", "the database is there, and the lock is ours")

    def pause(self, seconds: float) -> None:
        """A wait for a state to change; signals end it."""
        with contextlib.suppress(Lost):
            self._wait(seconds, deaf=True)
        self.process.check()
        if self.process.reload:
            self.reload()

    def rest(self) -> None:
        """The wait at the end of a cycle: until something is due, or comes."""
        now = time.monotonic()
        waits = [self.interval, self.delete_due - now]
        waits += [self.prune_due - now] if self.config.retention_days else []
        quiet = self.quiet_until
        waits += [max(d.outage.due, quiet) - now for d in (self.entries, self.files) if d.outage]
        waits += [quiet - now] if quiet > now else []
        if self.waiting:
            due = self.db.run(NEXT_DUE, since=self.looked_at)
            waits += [due[0][0] + 0.01] if due else []
        # In an outage a NOTIFY does not shorten the wait: a dead frontend is not asked more often.
        self._wait(min(waits), deaf=self._closed(self.entries))

    def _wait(self, seconds: float, deaf: bool) -> None:
        """The one wait point: the database's socket, and signals through the wake-up pipe."""
        until = time.monotonic() + max(0.0, seconds)
        while not self.process.stop_at and not self.process.reload:
            self.process.progress()
            if self.db.notifications() != self._heard and not deaf:
                return
            left = until - time.monotonic()
            if left <= 0:
                return
            poller = select.poll()
            poller.register(self.process.wake_fd, select.POLLIN)
            if self.db.conn is not None:
                poller.register(self.db.conn.fileno(), select.POLLIN)
            self.state.flush()
            wait = min(left, self.process.idle_limit, self.state.wait())
            if self.db.locked and not self.db.local:
                wait = min(wait, self._ask_silent_peer())
            poller.poll(wait * 1000 + 1)
            self.process.drain_wakeups()

    def _ask_silent_peer(self) -> float:
        """A TCP peer that went silent is only noticed by asking, every half minute."""
        now = time.monotonic()
        if now - self.db.used >= ASK_EVERY:
            self.db.run("select 1")
        return self.db.used + ASK_EVERY - now

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
        frontend = Frontend(config, self.process)  # the one that can fail, by its TLS files
        configure_logging(config)
        self.db.use(config.database_url, config.device_id)
        self.frontend.close()
        self.frontend = frontend
        self.recordings = Recordings(config.recordings_dir, config.extra_files)
        self.config = config
        self.entries.size = min(self.entries.size, config.batch_size)
        if not self.entries.outage:
            self.entries.size = config.batch_size
        for door in (self.entries, self.files):
            if door.outage:
                door.outage.due = 0.0  # perhaps this was the cure
        self.delete_due = 0.0

    def serve(self) -> int:
        """`run`: until a signal asks for the end."""
        daemon.notify("READY=1")
        say(logging.INFO, "started", f"serversync {__version__} started")
        tries = 0
        while True:
            try:
                self.process.check()
                if tries:
                    self.pause(backoff(min(tries, 5), 1.0))
                self.hold()
                self.cycle()
                self.rest()
                tries = 0
                if self.process.reload:
                    self.reload()
            except Stopping:
                break
            except Lost as error:
                text = f"the database connection is lost: {clean(str(error), MASKING.known)}"
                self.repeats.say("database", "lost", logging.WARNING, "database_lost", text)
            except ConfigError:
                raise
            except Exception as error:
                tries += 1
                text = f"a cycle failed, and is tried again: {error!r}"
                self.repeats.say(
                    "cycle", repr(error), logging.ERROR, "cycle_failed", text, exc_info=True
                )
                self.report(f"a cycle failed: {error!r}")
        daemon.notify("STOPPING=1\nSTATUS=stopped")
        say(logging.INFO, "stopped", "stopped; what is pending waits in the outbox")
        self.close()
        return EX_OK

    def once(self) -> int:
        """`once`: drains what is due, and says by its exit code how that went."""
        try:
            self.hold()
            self.cycle()
            unfinished = self.db.run(UNFINISHED)[0][0]
        except Busy:
            say(logging.WARNING, "busy", "another agent holds the lock: try later")
            return EX_TEMPFAIL
        except (Unavailable, Lost, psycopg.Error) as error:
            say(logging.ERROR, "unavailable", clean(str(error), MASKING.known))
            return EX_UNAVAILABLE
        except Stopping:
            say(logging.WARNING, "stopped", "stopped before the end")
            return EX_TEMPFAIL
        finally:
            self.close()
        say(logging.INFO, "done", self.sentence)
        if any(d.outage and d.outage.code != "ROOT_MISSING" for d in (self.entries, self.files)):
            return EX_UNAVAILABLE
        if self.deaths:
            return EX_PERSON
        return EX_TEMPFAIL if unfinished else EX_OK

    def close(self) -> None:
        self.frontend.close()
        self.db.close()


STANDBY: Final = "standby: another agent holds the lock"


# ==================================================================================================
# Command line
# ==================================================================================================


def build_parser() -> argparse.ArgumentParser:
    rows = []
    for option in OPTIONS:
        name, default, text = (option.metadata[key] for key in ("name", "default", "text"))
        shown = "required" if default is None else default or "not set"
        rows.append(f"  {name:<27} {text} [{shown}]")
    parser = argparse.ArgumentParser(
        prog="serversync",
        description="Drains a voicebot's outbox to its web frontend, and cleans up behind it.",
        epilog="configuration (in the environment, or in the env file):\n"
        + "\n".join(rows)
        + "\n\nexit codes: 0 done, 1 something needs a person, 2 usage, 69 database or frontend\n"
        "not there, 75 not everything is through yet, 78 configuration",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"serversync {__version__}")
    parser.add_argument("--env-file", metavar="FILE", help=f"default: {ENV_FILE}, where it exists")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in (
        ("run", "the service: deliver until stopped"),
        ("once", "deliver what is due, and exit"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("--env-file", metavar="FILE", default=argparse.SUPPRESS)
    return parser


def refuse(error: ConfigError) -> int:
    """Every problem on a line of its own, and a sentence for `systemctl status`."""
    for problem in error.problems:
        print(f"serversync: {mask(problem, MASKING.known)}", file=sys.stderr)
    more = f" (and {len(error.problems) - 1} more)" if len(error.problems) > 1 else ""
    sentence = clean(f"not configured: {error.problems[0]}{more}", MASKING.known)
    daemon.notify(f"STATUS={sentence}")
    return EX_CONFIG


def main(argv: Sequence[str] | None = None) -> int:
    arguments = build_parser().parse_args(argv)
    # A resolver without network must not hold up a stop: getaddrinfo cannot be interrupted.
    os.environ.setdefault("RES_OPTIONS", "timeout:2 attempts:1")
    environ = dict(os.environ)

    def read() -> Config:
        return load_config(read_env_file(arguments.env_file, environ), environ)

    start_logging(environ)
    try:
        config = read()
        configure_logging(config)
        process = Process(environ)
        process.install()
        once = arguments.command == "once"
        state = StateFile({} if once else environ)
        agent = Agent(config, process, state, once)
        agent.reread = read
        return agent.once() if once else agent.serve()
    except ConfigError as error:
        return refuse(error)
    finally:
        try:
            if sys.stderr:  # closed at the start: None
                sys.stderr.flush()
        except OSError:
            sys.stderr = open(os.devnull, "w")  # noqa: SIM115  a full disk is no exit code (120)


def _entry_point() -> NoReturn:
    sys.exit(main())


if __name__ == "__main__":
    _entry_point()

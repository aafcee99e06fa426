"""A real frontend: an HTTP/1.1 server that keeps what it gets, and misbehaves on request.

As a library (`Frontend`) it serves the tests; as a program it is a small local frontend that really
stores: `python3 tests/frontend.py --dir DIR [--port N]` prints its URL on the first line. It needs
the standard library only, and its memory does not grow with the size of a file.
"""

import argparse
import contextlib
import hashlib
import http
import io
import json
import os
import re
import signal
import socket
import ssl
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from http.client import HTTPMessage, parse_headers
from pathlib import Path
from typing import IO, Any, Self

from proxy import reset
from waiting import wait_until

ENTRIES_PATH = "/api/ingest/sync"
FILE_PATH = "/api/ingest/recording-file"
CALL_PATH = "/api/ingest/incoming-call"
STORED_PATH = re.compile(r"/(?:api/recordings/([^/]+)|storage/recordings/([^/]+)/mixed\.\w+)")
PARTS = ["callLogId", "recordingId", "meta", "audio"]
AUDIO_NAMES = ("mixed.wav", "mixed.mp3")
CHUNK = 65536
HEAD_LIMIT = 65536
FIELD_LIMIT = 1024 * 1024
# A sender shall feel a stalled reader after a few hundred kilobytes, not after the megabytes which
# the loopback device's self-tuning buffers swallow.
RECEIVE_BUFFER = 128 * 1024

Json = dict[str, Any]


@dataclass
class StoredFile:
    """One upload. `count` says how often a file was stored for this call."""

    path: Path
    size: int
    sha256: str
    meta: bytes
    recording_id: str
    call_log_id: str
    filename: str
    count: int = 0


@dataclass(eq=False)
class Request:
    """One request, listed as soon as its head is there; `finished` is None until it is answered.

    Times are monotonic. `received` counts the body's bytes so far. `status` stays 0 when no
    regular answer was sent. `entries` and `file` are set once the body was understood.
    """

    method: str
    path: str
    headers: HTTPMessage
    raw_head: bytes
    kind: str
    length: int = 0
    body: bytes | None = None
    entries: list[Json] = field(default_factory=list)
    file: StoredFile | None = None
    received: int = 0
    started: float = field(default_factory=time.monotonic)
    finished: float | None = None
    status: int = 0


@dataclass(frozen=True)
class Reply:
    """An answer, or something worse. Without `store`, what came with the request is dropped."""

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes | str | Json | Path = b""  # text is sent as HTML, a dict as JSON, a Path streamed
    store: bool = False  # process the request as usual before giving this answer
    after: int = 0  # from on_head only: read so many bytes of the body first
    delay: float = 0.0  # seconds before anything else happens
    reset: bool = False  # a TCP reset and no answer
    stall: float = 0.0  # seconds without any answer, then the end of the connection
    trickle: float = 0.0  # seconds for each byte of the answer
    pace: float = 0.0  # seconds after each 64 KiB of a streamed file
    half: bool = False  # the head with half of the body, then the end of the connection
    raw: bytes | None = None  # these bytes instead of an HTTP answer, then the end
    close: bool = False  # end the connection after the answer without having announced it

    @property
    def ends_connection(self) -> bool:
        announced = self.headers.get("Connection", "").lower() == "close"
        return self.close or self.half or self.raw is not None or announced


Hook = Callable[[Request], Reply | None]


def script(*replies: Reply | None) -> Hook:
    """A hook that gives these replies one after the other (None: the normal one), then None."""
    rest = iter(replies)
    lock = threading.Lock()

    def hook(_: Request) -> Reply | None:
        with lock:
            return next(rest, None)

    return hook


class Multipart:
    """A push parser for multipart/form-data that holds no more than a chunk of a part's data.

    `open_part` gets a part's headers and returns where its data goes.
    """

    def __init__(
        self, boundary: str, open_part: Callable[[HTTPMessage], Callable[[bytes], object]]
    ) -> None:
        self.finished = False
        self._delimiter = b"\r\n--" + boundary.encode("latin-1")
        # As if the body began with a line break: so the first delimiter is like all others.
        self._buffer = b"\r\n"
        self._open_part = open_part
        self._sink: Callable[[bytes], object] = lambda preamble: None
        self._step: Callable[[], bool] = self._data

    def feed(self, data: bytes) -> None:
        self._buffer += data
        while self._step():
            pass

    def _data(self) -> bool:
        end = self._buffer.find(self._delimiter)
        # What may be the beginning of a delimiter stays for the next round.
        cut = end if end >= 0 else max(0, len(self._buffer) - len(self._delimiter) + 1)
        if cut:
            self._sink(self._buffer[:cut])
        self._buffer = self._buffer[cut:]
        if end < 0:
            return False
        self._buffer = self._buffer[len(self._delimiter) :]
        self._step = self._after_delimiter
        return True

    def _after_delimiter(self) -> bool:
        if len(self._buffer) < 2:
            return False
        if self._buffer.startswith(b"--"):
            self.finished = True
            self._step = self._epilogue
        elif self._buffer.startswith(b"\r\n"):
            self._step = self._part_head
        else:
            raise ValueError("a boundary is followed by something else than a line break")
        return True

    def _part_head(self) -> bool:
        # The buffer still begins with the delimiter line's own line break.
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > HEAD_LIMIT:
                raise ValueError("a part's head is too long")
            return False
        self._sink = self._open_part(parse_headers(io.BytesIO(self._buffer[2 : end + 4])))
        self._buffer = self._buffer[end + 4 :]
        self._step = self._data
        return True

    def _epilogue(self) -> bool:
        self._buffer = b""
        return False


class _Upload:
    """The parts of one upload under way: fields in memory, audio in a temporary file."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=directory)
        self._audio = os.fdopen(handle, "wb")
        self.temporary = Path(name)
        self._digest = hashlib.sha256()
        self._fields: dict[str, bytearray] = {}  # that of the audio stays empty
        self._filename: str | None = None

    def open_part(self, headers: HTTPMessage) -> Callable[[bytes], object]:
        name = str(headers.get_param("name", "", "content-disposition"))
        if [*self._fields, name] != PARTS[: len(self._fields) + 1]:
            raise ValueError(f"the part is {name!r} after {list(self._fields)}")
        content = self._fields[name] = bytearray()

        def extend(data: bytes) -> None:
            content.extend(data)
            if len(content) > FIELD_LIMIT:
                raise ValueError("a field is too long")

        if name == "audio":
            self._filename = headers.get_filename("")
        return self._write_audio if name == "audio" else extend

    def _write_audio(self, data: bytes) -> None:
        self._digest.update(data)
        self._audio.write(data)

    def finish(self) -> StoredFile:
        self._audio.close()
        if self._filename not in AUDIO_NAMES:
            raise ValueError(f"audio is called {self._filename!r}")
        return StoredFile(
            path=self.temporary,
            size=self.temporary.stat().st_size,
            sha256=self._digest.hexdigest(),
            meta=bytes(self._fields["meta"]),
            # Going through UUID also keeps a path like ../../x out.
            recording_id=str(uuid.UUID(self._fields["recordingId"].decode())),
            call_log_id=str(uuid.UUID(self._fields["callLogId"].decode())),
            filename=self._filename,
        )

    def discard(self) -> None:
        self._audio.close()
        self.temporary.unlink(missing_ok=True)


class BadRequest(ValueError):
    """What the frontend answers with 400."""


def parse_entries(body: bytes) -> list[Json]:
    """The entries of a request; BadRequest names the index of the first bad one."""
    document = json.loads(body)
    if not isinstance(document, dict) or not isinstance(document.get("entries"), list):
        raise BadRequest("no list of entries")
    entries: list[Json] = document["entries"]
    for index, entry in enumerate(entries):
        try:
            uuid.UUID(entry["entityId"])
            good = entry["entityType"] and isinstance(entry["createdAt"], str)
            good = bool(good) and "payload" in entry
        except (TypeError, ValueError, KeyError, AttributeError):
            good = False
        if not good:
            raise BadRequest(f"entries[{index}] is not valid")
    return entries


class _Stopped(Exception):
    """The server stops, or the connection cannot go on."""


class _TooSlow(Exception):
    """A body took longer than the frontend waits."""


class _Connection(threading.Thread):
    """One client: reads requests, lets the frontend decide, writes answers."""

    def __init__(self, owner: "Frontend", sock: socket.socket, stopping: threading.Event) -> None:
        super().__init__(name="frontend-connection", daemon=True)
        self.owner = owner
        self.sock = sock
        self.stopping = stopping
        self._buffer = b""

    def run(self) -> None:
        try:
            if self.owner.tls is not None:
                self.sock.settimeout(self.owner.idle_timeout)
                self.sock = self.owner.tls.wrap_socket(self.sock, server_side=True)
            while self._serve():
                pass
        except (OSError, _Stopped):
            pass
        finally:
            self.sock.close()
            self.owner.forget(self)

    def hang_up(self) -> None:
        """End the connection from another thread."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def _serve(self) -> bool:
        """Serve one request; whether the connection goes on."""
        head = self._read_head()
        if head is None:
            return False
        request = self._parse_head(head)
        self.owner.begin(request)
        try:
            goes_on = self._send(self._reply_to(request), request)
        finally:
            self.owner.end(request)
        unread = request.length - request.received
        return goes_on and not unread and request.headers.get("Connection", "").lower() != "close"

    def _read_head(self) -> bytes | None:
        self.sock.settimeout(self.owner.idle_timeout)
        while (end := self._buffer.find(b"\r\n\r\n")) < 0:
            data = self.sock.recv(CHUNK)
            self._buffer += data
            if not data or len(self._buffer) > HEAD_LIMIT:
                return None
        head, self._buffer = self._buffer[: end + 4], self._buffer[end + 4 :]
        return head

    def _parse_head(self, head: bytes) -> Request:
        line, _, rest = head.partition(b"\r\n")
        try:
            method, target, version = line.decode("latin-1").split(" ")
        except ValueError:
            raise _Stopped from None
        headers = parse_headers(io.BytesIO(rest))
        if version != "HTTP/1.1":
            headers.add_header("Connection", "close")
        length = headers.get("Content-Length", "0")
        kind = self.owner.kind_of(method, target)
        return Request(method, target, headers, head, kind, int(length) if length.isdigit() else 0)

    def body(self, request: Request, limit: int | None = None) -> Iterator[bytes]:
        """The body's bytes, or its first `limit` ones, no faster than the frontend's read rate."""
        total = request.length if limit is None else min(limit, request.length)
        while (missing := total - request.received) > 0:
            rate = self.owner.read_rate
            data = self._read(min(missing, CHUNK if rate is None else max(1, int(rate / 20))))
            request.received += len(data)
            yield data
            if rate is not None:
                self.pause(len(data) / rate)
            if time.monotonic() - request.started > self.owner.body_timeout:
                raise _TooSlow

    def _read(self, limit: int) -> bytes:
        data, self._buffer = self._buffer[:limit], self._buffer[limit:]
        if not data:
            self.sock.settimeout(self.owner.body_timeout)
            try:
                data = self.sock.recv(limit)
            except TimeoutError:
                raise _TooSlow from None
        if not data:
            raise _Stopped
        return data

    def pause(self, seconds: float) -> None:
        if self.stopping.wait(seconds):
            raise _Stopped

    def _reply_to(self, request: Request) -> Reply:
        early = self.owner.on_head and self.owner.on_head(request)
        try:
            if early:
                for _ in self.body(request, early.after):
                    pass
                return early
            return self.owner.reply_to(request, self.body(request))
        except _TooSlow:
            return Reply(408, {"Connection": "close"}, {"error": "the body took too long"})

    def _send(self, reply: Reply, request: Request) -> bool:
        """Answer, or do what the reply says instead; whether the connection goes on."""
        if reply.delay:
            self.pause(reply.delay)
        if reply.reset:
            reset(self.sock)
            return False
        if reply.stall:
            self.pause(reply.stall)
            return False
        self.sock.settimeout(self.owner.body_timeout)
        if reply.raw is None and not reply.half:
            # Before the bytes leave: a client that has its answer shall find it in the list.
            request.status = reply.status
            request.finished = time.monotonic()
        for data in self._render(reply, request):
            self._write(data, reply.trickle)
            if reply.pace:
                self.pause(reply.pace)
        return not reply.ends_connection

    def _write(self, data: bytes, seconds_per_byte: float) -> None:
        if not seconds_per_byte:
            self.sock.sendall(data)
            return
        for position in range(len(data)):
            self.sock.sendall(data[position : position + 1])
            self.pause(seconds_per_byte)

    def _render(self, reply: Reply, request: Request) -> Iterator[bytes]:
        if reply.raw is not None:
            yield reply.raw
            return
        content, kind = reply.body, "application/octet-stream"
        if isinstance(content, dict):
            content, kind = json.dumps(content), "application/json"
        elif isinstance(content, str):
            kind = "text/html; charset=utf-8"
        if isinstance(content, str):
            content = content.encode()
        size = content.stat().st_size if isinstance(content, Path) else len(content)
        headers = {"Content-Type": kind, "Content-Length": str(size), **reply.headers}
        reason = next((code.phrase for code in http.HTTPStatus if code == reply.status), "Unknown")
        lines = [
            f"HTTP/1.1 {reply.status} {reason}",
            *(f"{name}: {value}" for name, value in headers.items()),
        ]
        yield ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
        if request.method == "HEAD" or reply.status in (204, 304):
            return
        if isinstance(content, Path):
            with content.open("rb") as file:
                yield from iter(lambda: file.read(CHUNK), b"")
        else:
            yield content[: size // 2] if reply.half else content


class Frontend:
    """The server and everything it got. Hooks, knobs and lists may be used from any thread.

    Hooks get the Request and return a Reply, or None for the normal behaviour:
    `on_head` (any request, before its body is read), `on_entries` (`request.entries` is set),
    `on_file` (`request.file` is set, its path still temporary), `on_call` (an incoming call: its
    object is in `request.entries`), `on_other` (whatever else was asked, with its body).
    """

    def __init__(
        self,
        directory: Path,
        *,
        port: int = 0,
        host: str = "127.0.0.1",
        tls: ssl.SSLContext | None = None,
        base_path: str = "",
        history: bool = True,
    ) -> None:
        self.directory = directory
        self.host = host
        self.port = port
        self.tls = tls
        self.base_path = base_path
        self.history = history  # False: keep no lists, for runs without an end

        self.requests: list[Request] = []
        self.entries: list[Json] = []
        self.store: dict[str, Json] = {}
        self.files: dict[str, StoredFile] = {}
        self.uploads: list[StoredFile] = []
        self.calls: list[Json] = []
        self.log: list[tuple[Any, ...]] = []
        self.connections = 0

        self.on_head: Hook | None = None
        self.on_entries: Hook | None = None
        self.on_file: Hook | None = None
        self.on_call: Hook | None = None
        self.on_other: Hook | None = None
        self.on_end: Callable[[Request], object] | None = None
        self.poison: dict[str, Reply] = {}
        self.rejected: dict[str, str] = {}
        self.pages: dict[str, Reply | Json | bytes | Path] = {}
        self.file_reply: Callable[[StoredFile], Json] = lambda file: {
            "fileUrl": self.file_url(file)
        }
        self.require_token: str | None = None
        self.read_rate: float | None = None
        self.keep_bodies = False  # True: the whole body of an upload stays in request.body
        self.idle_timeout = 5.0
        self.body_timeout = 300.0

        self._lock = threading.RLock()
        self._open: set[_Connection] = set()
        self._listener: socket.socket | None = None
        self._kept: socket.socket | None = None
        self._acceptor: threading.Thread | None = None
        self._stopping = threading.Event()

    # -- the server -----------------------------------------------------------------------------

    @property
    def url(self) -> str:
        scheme = "https" if self.tls else "http"
        return f"{scheme}://{self.host}:{self.port}{self.base_path}"

    def file_url(self, file: StoredFile) -> str:
        return f"{self.url}/storage/recordings/{file.call_log_id}/{file.filename}"

    def start(self) -> Self:
        """Listen; after a stop, on the same port again."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self._stopping = threading.Event()
        self._listener = self._kept or socket.create_server((self.host, self.port))
        self._kept = None
        self._listener.listen(64)
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER)
        self.port = self._listener.getsockname()[1]
        self._acceptor = threading.Thread(
            target=self._accept, args=(self._listener, self._stopping), daemon=True
        )
        self._acceptor.start()
        return self

    def stop(self) -> None:
        """End all connections and listen no more: the next client is refused."""
        if self._listener is None or self._acceptor is None:
            return
        self._stopping.set()
        # shutdown() wakes the blocked accept(); close() alone would leave the port open until then.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._acceptor.join(10)
        self._listener.close()
        # The port stays ours: tests beside this one would be given it, and get what is sent to us.
        self._kept = socket.socket(self._listener.family)
        self._kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._kept.bind((self.host, self.port))
        self._listener = None
        self.hang_up()
        for connection in set(self._open) - {threading.current_thread()}:
            connection.join(10)

    def hang_up(self) -> None:
        """End all open connections, but go on listening."""
        with self._lock:
            connections = list(self._open)
        for connection in connections:
            connection.hang_up()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _accept(self, listener: socket.socket, stopping: threading.Event) -> None:
        while not stopping.is_set():
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection = _Connection(self, sock, stopping)
            with self._lock:
                self.connections += 1
                self._open.add(connection)
            connection.start()

    def forget(self, connection: _Connection) -> None:
        with self._lock:
            self._open.discard(connection)

    # -- what the tests ask ---------------------------------------------------------------------

    def of_kind(self, kind: str) -> list[Request]:
        """The requests of kind entries, file, call or other."""
        return [request for request in list(self.requests) if request.kind == kind]

    def received(self, entity_id: str | uuid.UUID) -> list[Json]:
        """All accepted entries of this entity, in order."""
        return [entry for entry in list(self.entries) if entry["entityId"] == str(entity_id)]

    def seqs(self) -> list[int]:
        """The outbox ids of all accepted entries, in order of arrival."""
        return [entry["seq"] for entry in list(self.entries)]

    def playable(self, recording_id: str | uuid.UUID) -> bool:
        """Whether the frontend's users see a player for this recording."""
        payload = self.store.get(str(recording_id), {}).get("payload")
        return isinstance(payload, dict) and payload.get("uploadStatus") == "uploaded"

    def summary(self) -> str:
        last = [
            f"{request.method} {request.path} {request.status}" for request in self.requests[-5:]
        ]
        return (
            f"The frontend has {len(self.requests)} requests, {len(self.entries)} entries, "
            f"{len(self.uploads)} uploads; last requests: {last}"
        )

    def wait(
        self, predicate: Callable[[], Any], timeout: float = 20.0, what: str = "the condition"
    ) -> Any:
        """Wait until `predicate` is true; its value. LookupErrors in it mean "not yet"."""
        return wait_until(predicate, timeout, what, self.summary)

    # -- what the connections ask ---------------------------------------------------------------

    def kind_of(self, method: str, target: str) -> str:
        if method != "POST":
            return "other"
        kinds = {ENTRIES_PATH: "entries", FILE_PATH: "file", CALL_PATH: "call"}
        ours = target.startswith(self.base_path)
        return kinds.get(target.removeprefix(self.base_path), "other") if ours else "other"

    def begin(self, request: Request) -> None:
        if self.history:
            self.requests.append(request)

    def end(self, request: Request) -> None:
        request.finished = time.monotonic()
        if self.on_end is not None:
            self.on_end(request)

    def reply_to(self, request: Request, body: Iterable[bytes]) -> Reply:
        """Read the body and decide."""
        token = request.headers.get("Authorization")
        if self.require_token is not None and token != f"Bearer {self.require_token}":
            return Reply(401, {}, {"error": "unauthorized"})
        if "Transfer-Encoding" in request.headers:
            return Reply(411, {"Connection": "close"}, {"error": "Content-Length required"})
        if "Content-Encoding" in request.headers:
            return Reply(415, {"Connection": "close"}, {"error": "no compressed bodies"})
        if request.kind == "file":
            return self._take_file(request, body)
        request.body = b"".join(body)
        if request.kind == "entries":
            return self._take_entries(request)
        if request.kind == "call":
            return self._take_call(request)
        return self._page(request)

    def _take_call(self, request: Request) -> Reply:
        """Not idempotent: the same call twice is two pop-ups."""
        assert request.body is not None
        call = json.loads(request.body)
        request.entries = [call]
        reply = self.on_call(request) if self.on_call is not None else None
        if reply is None or reply.store:
            self.calls.append(call)
        return reply or Reply(200, {}, {"ok": True, "id": str(uuid.uuid4())})

    def _take_entries(self, request: Request) -> Reply:
        assert request.body is not None
        try:
            request.entries = parse_entries(request.body)
        except ValueError as error:
            return Reply(400, {}, {"error": str(error)})
        if not request.entries:
            request.kind = "empty"  # only asks whether we live
        reply = self.on_entries(request) if self.on_entries is not None else None
        if reply is None:
            poisons = (self.poison.get(entry["entityId"]) for entry in request.entries)
            reply = next((poison for poison in poisons if poison is not None), None)
        if reply is not None and not reply.store:
            return reply
        answer = self._store_entries(request.entries)
        return reply or Reply(200, {}, answer)

    def _store_entries(self, entries: list[Json]) -> Json:
        refused = [entry for entry in entries if entry["entityId"] in self.rejected]
        with self._lock, (self.directory / "entries.jsonl").open("a") as journal:
            for entry in entries:
                if entry["entityId"] not in self.rejected:
                    self._store_entry(entry, journal)
        if not refused:
            return {"ok": True}
        return {"ok": True, "rejected": [self._rejection(entry) for entry in refused]}

    def _rejection(self, entry: Json) -> Json:
        code = self.rejected[entry["entityId"]]
        return {"seq": entry.get("seq"), "code": code, "message": "refused for good"}

    def _store_entry(self, entry: Json, journal: IO[str]) -> None:
        payload = entry["payload"]
        # A copy: an upload changes the store, but not the history.
        self.store[entry["entityId"]] = {
            **entry,
            "payload": dict(payload) if isinstance(payload, dict) else payload,
        }
        journal.write(json.dumps(entry) + "\n")
        if self.history:
            self.entries.append(entry)
            self.log.append(("entry", entry["entityId"], entry.get("seq")))

    def _take_file(self, request: Request, body: Iterable[bytes]) -> Reply:
        upload = _Upload(self.directory / "incoming")
        if self.keep_bodies:
            request.body = b"".join(body)
            body = [request.body]
        try:
            request.file = self._parse_file(request, body, upload)
            reply = self.on_file(request) if self.on_file is not None else None
            if reply is not None and not reply.store:
                return reply
            self._store_file(request.file)
            return reply or Reply(200, {}, self.file_reply(request.file))
        except ValueError as error:
            return Reply(400, {}, {"error": str(error)})
        finally:
            upload.discard()

    def _parse_file(self, request: Request, body: Iterable[bytes], upload: _Upload) -> StoredFile:
        boundary = request.headers.get_boundary()
        if request.headers.get_content_type() != "multipart/form-data" or not boundary:
            raise ValueError("not multipart/form-data")
        parser = Multipart(boundary, upload.open_part)
        for data in body:
            parser.feed(data)
        if not parser.finished:
            raise ValueError("the body ends before its last boundary")
        return upload.finish()

    def _store_file(self, file: StoredFile) -> None:
        with self._lock:
            directory = self.directory / "recordings" / file.call_log_id
            directory.mkdir(parents=True, exist_ok=True)
            (directory / "meta.json").write_bytes(file.meta)
            file.path = file.path.rename(directory / file.filename)
            before = self.files.get(file.call_log_id)
            file.count = before.count + 1 if before else 1
            self.files[file.call_log_id] = file
            payload = self.store.get(file.recording_id, {}).get("payload")
            if isinstance(payload, dict):
                payload.update(uploadStatus="uploaded", s3Url=self.file_url(file))
            if self.history:
                self.uploads.append(file)
                self.log.append(("file", file.call_log_id, file.recording_id))

    def _page(self, request: Request) -> Reply:
        reply = self.on_other(request) if self.on_other is not None else None
        if reply is not None:
            return reply
        path = request.path.removeprefix(self.base_path)
        page = self.pages.get(path)
        if isinstance(page, Reply):
            return page
        if page is not None:
            return Reply(200, {}, page)
        if path in (ENTRIES_PATH, FILE_PATH, CALL_PATH):
            return Reply(405, {"Allow": "POST"}, {"error": "method not allowed"})
        match = STORED_PATH.fullmatch(path)
        file = self.files.get(match[1] or match[2]) if match else None
        if file is None or request.method not in ("GET", "HEAD"):
            return Reply(404, {}, {"error": "not found"})
        return Reply(200, {}, file.path)


def main() -> int:
    parser = argparse.ArgumentParser(description="A small frontend that stores what it gets.")
    parser.add_argument("--dir", type=Path, required=True, help="where entries and files go")
    parser.add_argument("--port", type=int, default=0, help="default: any free one")
    parser.add_argument("--token", help="the bearer token to insist on")
    parser.add_argument(
        "--page",
        type=Path,
        action="append",
        default=[],
        metavar="PATH",
        help="a path that it answers with the file of that path below DIR/pages",
    )
    options = parser.parse_args()
    # Blocked before any thread starts, so that only sigwait() gets them.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM])
    frontend = Frontend(options.dir, port=options.port, history=False)
    frontend.require_token = options.token
    frontend.pages = {
        str(page): options.dir / "pages" / page.relative_to("/") for page in options.page
    }
    frontend.on_end = lambda request: print(
        request.method,
        request.path,
        request.status,
        f"{len(request.entries)} entries" if request.kind == "entries" else "",
        f"{request.file.size} bytes of audio" if request.file else "",
        file=sys.stderr,
        flush=True,
    )
    with frontend:
        print(frontend.url, flush=True)
        signal.sigwait([signal.SIGINT, signal.SIGTERM])
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""A frontend whose answers go wrong at random, and which remembers which of them were lost."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from http.client import HTTPMessage
from pathlib import Path
from typing import IO, Any

from frontend import Frontend, Json, Reply, Request, StoredFile

TCP_ESTABLISHED = 1
PATIENCE = 0.4  # under the least time that an agent gives a request of entries
NOTHING = HTTPMessage()
OVERLAY = ("uploadStatus", "s3Url")  # what the agent may change in a payload

Era = Callable[[Request], Reply]


def digest(payload: Any) -> str:
    """Of a payload, without what the agent may change in it."""
    if isinstance(payload, dict):
        payload = {name: value for name, value in payload.items() if name not in OVERLAY}
    return hashlib.sha256(json.dumps(payload, sort_keys=True).encode()).hexdigest()


@dataclass
class Spells:
    """When something was out of order."""

    spells: list[list[float]] = field(default_factory=list)

    @contextlib.contextmanager
    def spell(self, after: float = 0.3) -> Iterator[None]:
        """While this goes on, and a moment longer."""
        lasting = [time.monotonic() - 0.05, float("inf")]
        self.spells.append(lasting)
        try:
            yield
        finally:
            lasting[1] = time.monotonic() + after

    def overlaps(self, start: float, end: float) -> bool:
        return any(begun <= end and start <= ended for begun, ended in list(self.spells))


@dataclass(eq=False)
class Fate:
    """What became of one request, as the frontend sees it."""

    device: str
    sock: socket.socket
    request: Request
    fault: str = ""
    stored: bool = False
    answer_lost: bool = False
    pause: float = 0.0  # that it was asked for
    known: float = 0.0  # of an upload: when its sender had asked by HEAD whether it is there

    def established(self) -> bool:
        """Whether the sender still holds its end of the connection."""
        try:
            state = self.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
        except OSError:
            return False
        return state == TCP_ESTABLISHED


@dataclass(frozen=True)
class Repeat:
    """Something arrived once more: what became of it before, and now."""

    before: Fate
    now: Fate
    what: str


class Weather(Frontend):
    """The frontend. `kill` ends a device, `disconnect` its database session; `via_radio` says whose
    connections are not direct."""

    def __init__(
        self,
        directory: Path,
        rng: random.Random,
        kill: Callable[[str], None],
        disconnect: Callable[[str], None],
        via_radio: Callable[[str], bool],
    ) -> None:
        super().__init__(directory)
        self.rng, self._kill, self._disconnect = rng, kill, disconnect
        self._via_radio = via_radio
        self.trouble = 0.2
        self.era: Era | None = None  # what everybody gets
        self.sick: dict[str, float] = {}  # entities that it cannot take before that moment
        self.faults: Counter[str] = Counter()
        self.repeats: list[Repeat] = []
        self.digests: dict[int, set[str]] = {}
        self.count_requests = self.lost_answers = self.made_up = 0
        self.last_pause = (0.0, 0.0)  # when a Retry-After was sent last, and of how many seconds
        # Who did not wait for so long, what it had been told when, and when it sent what.
        self.impatient: list[tuple[str, float, float, str]] = []
        self._quiet: dict[str, tuple[float, float]] = {}
        self._mended: dict[str, float] = {}  # who was told to try now, and when
        self._uploads: dict[tuple[str, str], Fate] = {}  # the last one, by device and call
        self._under_way: dict[Request, Fate] = {}
        self._arrived: dict[str, Fate] = {}
        self._keys: set[str] = set()
        self._local = threading.local()
        self._counting = threading.Lock()
        self.on_head = self._at_head
        self.on_entries = self.on_file = self._at_body

    # -- what others ask -------------------------------------------------------------------------

    def waiting(self) -> dict[str, list[Request]]:
        """By device: requests that were not answered yet, and whose sender waits for it."""
        found: dict[str, list[Request]] = {}
        for fate in list(self._under_way.values()):
            # After half an answer the sender may have enough before we know that it has gone out;
            # and of a connection through the radio we do not see the other end.
            clear = "half" not in fate.fault and "garbage" not in fate.fault
            clear = clear and not self._via_radio(fate.device)
            if clear and fate.request.finished is None and fate.established():
                found.setdefault(fate.device, []).append(fate.request)
        return found

    def is_asked_by(self, device: str) -> bool:
        """Whether a request of this device is under way."""
        return any(fate.device == device for fate in list(self._under_way.values()))

    # -- bookkeeping -----------------------------------------------------------------------------

    def begin(self, request: Request) -> None:
        """No list of requests: a run may be long."""
        device = str(request.headers.get("X-Serversync-Device"))
        sock = threading.current_thread().sock  # type: ignore[attr-defined]
        self._local.fate = self._under_way[request] = Fate(device, sock, request)
        with self._counting:
            self.count_requests += 1
        told, until = self._quiet.get(device, (0.0, 0.0))
        early = until - request.started
        if early > 0.2 and request.method == "HEAD":  # the end of an upload that was begun before
            self.faults["verified within a pause"] += 1
        elif early > 0.2 and request.started > told + 0.3:  # not on its way already
            what = f"{request.method} {request.path} {early:.1f} s before the pause was over"
            self.impatient.append((device, told, request.started, what))

    def end(self, request: Request) -> None:
        fate = self._under_way.pop(request)
        late = request.kind == "entries" and time.monotonic() - request.started > PATIENCE
        there = fate.established()
        # What was asked before somebody said "try now" tells nothing of what came after it.
        mended = request.started - self._mended.get(fate.device, -9.0) < 3
        asked = request.kind == "empty" and request.status == 429 and not mended
        if asked and there and not late and not self._via_radio(fate.device):
            now = time.monotonic()
            self._quiet[fate.device] = (now, now + fate.pause)
        if request.method == "HEAD":
            self._looked_at(request, fate, there)
        fate.answer_lost |= late or request.status not in (200, 409) or not there
        with self._counting:
            self.lost_answers += fate.stored and fate.answer_lost
        super().end(request)
        request.body, request.entries, request.raw_head, request.headers = None, [], b"", NOTHING

    def try_now(self, device: str) -> None:
        """It is told so: pauses end."""
        self._mended[device] = time.monotonic()
        self._quiet.pop(device, None)

    def _looked_at(self, request: Request, fate: Fate, there: bool) -> None:
        """An upload counts when a look at what is stored says so, too."""
        upload = self._uploads.get((fate.device, request.path.rpartition("/")[2]))
        if upload is not None:
            upload.known = time.monotonic()
            upload.answer_lost = request.status != 200 or not there

    def _arrives(self, name: str, what: str) -> None:
        fate: Fate = self._local.fate
        before = self._arrived.get(name)
        if before is not None:
            self.repeats.append(Repeat(before, fate, what))
        self._arrived[name] = fate

    def _store_entries(self, entries: list[Json]) -> Json:
        fate: Fate = self._local.fate
        fate.stored = True
        with self._counting:
            for entry in entries:
                self._arrives(f"entry {entry['seq']}", "entry")
        answer = super()._store_entries(entries)
        # Only now: a standby may send the same again meanwhile, and is told that it is here.
        self._keys.add(str(fate.request.headers.get("Idempotency-Key")))
        return answer

    def _store_entry(self, entry: Json, journal: IO[str]) -> None:
        payload = entry["payload"]
        self.digests.setdefault(entry["seq"], set()).add(digest(payload))
        if isinstance(payload, dict):  # in short: a run may be long
            payload = {
                name: value[:100] if isinstance(value, str) else value
                for name, value in payload.items()
            }
        super()._store_entry({**entry, "payload": payload}, journal)

    def _store_file(self, file: StoredFile) -> None:
        fate: Fate = self._local.fate
        fate.stored = True
        self._uploads[fate.device, file.call_log_id] = fate
        with self._counting:
            self._arrives(f"file {file.recording_id}", "file")
            self.made_up += b"generatedBy" in file.meta
        json.loads(file.meta)
        super()._store_file(file)
        file.meta, file.part_headers = b"", {}
        # Of its length still, for those who ask by HEAD, but empty: a run may be long.
        os.truncate(file.path, 0)
        os.truncate(file.path, file.size)

    # -- the faults ------------------------------------------------------------------------------

    def _meets(self, fault: str, lost: bool = False) -> None:
        fate: Fate = self._local.fate
        fate.fault, fate.answer_lost = fault, lost
        with self._counting:
            self.faults[fault] += 1

    def _kill_it(self) -> None:
        self._kill(self._local.fate.device)

    def _pause(self, seconds: str) -> dict[str, str]:
        if seconds.isdigit():
            self._local.fate.pause = float(seconds)
            self.last_pause = (time.monotonic(), float(seconds))
        return {"Retry-After": seconds}

    def rate_limited(self) -> Reply:
        pauses = ("1", "2", "5", "soon", "Wed, 21 Oct 2015 07:28:00 GMT")
        return Reply(429, self._pause(self.rng.choice(pauses)), {})

    def _at_head(self, request: Request) -> Reply | None:
        if self.era is not None:
            self._meets("an era of it")
            return replace(self.era(request), after=request.length)
        if self.rng.random() >= self.trouble / 4:
            return None
        part = self.rng.randrange(max(1, request.length))
        seconds = self.rng.uniform(0.5, 2.5)
        faults = {
            "reset at once": Reply(reset=True),
            "reset in the body": Reply(reset=True, after=part),
            "stall in the body": Reply(stall=seconds, after=part),
            "early 503": Reply(503, {"Connection": "close"}, "busy", after=part, close=True),
            "killed in the body": Reply(reset=True, after=part),
            "killed in the body, too": Reply(reset=True, after=part),
        }
        fault = self.rng.choice(list(faults))
        self._meets(fault.removesuffix(", too"))
        if "killed" in fault:
            self._kill_it()
        return faults[fault]

    def _good(self, request: Request) -> Json:
        if request.file is not None:
            return self.file_reply(request.file)
        refused = [entry for entry in request.entries if entry["entityId"] in self.rejected]
        if not refused:
            return {"ok": True}
        return {"ok": True, "rejected": [self._rejection(entry) for entry in refused]}

    def _at_body(self, request: Request) -> Reply | None:
        fate: Fate = self._local.fate
        late = time.monotonic() - request.started > 0.75 * PATIENCE
        blind = request.kind == "entries" and self._via_radio(fate.device)
        if late and (blind or not fate.established()):
            # Its sender may have given up long ago. To store it now would undo what came later.
            self._meets("sender had gone")
            return Reply(reset=True)
        if any(entry["entityId"] in self.poison for entry in request.entries):
            return None
        now = time.monotonic()
        if any(self.sick.get(entry["entityId"], 0.0) > now for entry in request.entries):
            self._meets("500 because of one entry")
            return Reply(500, {}, {"error": "entries: one of them, for now"})
        key = request.headers.get("Idempotency-Key")
        if key in self._keys and self.rng.random() < 0.5:
            with self._counting:
                self.faults["409: I have it"] += 1
            return Reply(409, {}, {"code": "ALREADY_PROCESSED", **self._good(request)})
        if self.rng.random() >= self.trouble:
            return None
        return self._stored_in_vain(request) if self.rng.random() < 0.4 else self._refused(request)

    def _refused(self, request: Request) -> Reply:
        """Nothing is stored."""
        status = self.rng.choice((500, 502, 503, 504))
        good = self._good(request)
        faults = {
            "HTTP 5xx": Reply(status, {}, "<html>trouble</html>"),
            "stall": Reply(stall=self.rng.uniform(0.5, 2.5)),
            "half an answer": Reply(200, {}, {**good, "padding": "x" * 99}, half=True),
            "trickle": Reply(500, {}, "<html>trouble</html>", trickle=0.3),
            "200 with HTML": Reply(200, {}, "<html>please log in</html>"),
            "200 with nothing": Reply(200),
            "429": Reply(429),
            "302": Reply(302, {"Location": "/login"}, "<html>login</html>"),
            "401": Reply(401, {}, {"error": "unauthorized"}),
            "404": Reply(404, {}, "<html>not found</html>"),
            "400 with HTML": Reply(400, {}, "<html>bad request</html>"),
            "409 that says nothing": Reply(409, {}, {"error": "still running"}),
            "not ok": Reply(200, {}, {"ok": False}),
            "garbage": Reply(raw=b"\x00\xff garbage\r\n\r\n"),
            "reset": Reply(reset=True),
            "killed at the request": Reply(reset=True),
            "killed at the request, too": Reply(reset=True),
        }
        fault = self.rng.choice(list(faults))
        self._meets(fault.removesuffix(", too"))
        if "killed" in fault:
            self._kill_it()
        return self.rate_limited() if fault == "429" else faults[fault]

    def _stored_in_vain(self, request: Request) -> Reply:
        """All is stored, but the answer is lost, late, or not what the contract says."""
        good = self._good(request)
        faults = {
            "stored, reset": Reply(store=True, reset=True),
            "stored, stall": Reply(store=True, stall=self.rng.uniform(0.5, 2.5)),
            "stored, late": Reply(200, {}, good, store=True, delay=self.rng.uniform(0.1, 2.5)),
            "stored, half": Reply(200, {}, {**good, "more": "x" * 99}, store=True, half=True),
            "stored, trickle": Reply(200, {}, good, store=True, trickle=self.rng.uniform(0, 0.1)),
            "stored, 500": Reply(500, {}, "<html>trouble</html>", store=True),
            "stored, HTML": Reply(200, {}, "<html>welcome</html>", store=True),
            "stored, closed": Reply(200, {}, good, store=True, close=True),
            "stored, killed": Reply(store=True, reset=True),
            "stored, answered, killed": Reply(200, {}, good, store=True),
            "stored, answered, killed, too": Reply(200, {}, good, store=True),
            "stored, answered, its database session ended": Reply(200, {}, good, store=True),
        }
        last = "stored, answered, its database session ended, killed"
        faults[last] = Reply(200, {}, good, store=True)
        # The moment of truth for a recording: what is deleted must have been written down.
        fault = self.rng.choice(list(faults) + [last] * (12 if request.file is not None else 0))
        arrives = fault == "stored, closed" or "answered" in fault
        self._meets(fault.removesuffix(", too"), lost=not arrives)
        if fault == "stored, killed":
            self._kill_it()
        elif "answered" in fault:
            device, most = self._local.fate.device, 0.02
            if "session ended" in fault:  # a new session takes a moment
                self._disconnect(device)
                most = 0.2
            if "killed" in fault:
                threading.Timer(self.rng.uniform(0, most), self._kill, [device]).start()
        return faults[fault]

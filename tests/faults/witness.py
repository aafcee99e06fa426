"""A witness at the frontend's door: what it said to whom, and so what may be marked, deleted,
given up or sent again."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from agent import NotifySocket
from backend import Backend, Call
from frontend import Frontend, Request
from oracle import TRASH, in_trash
from pg import Database
from waiting import wait_until

FILE_TYPE = "recording_file"
LATE_SEC = 0.4  # an answer that took longer may have come too late (the least time limit is 0.5 s)
MOST_DEATHS = 9  # of a type in a row; the next one waits, for the frontend is broken
SENT_SINCE = 3  # so many of its type got through since its last failure: it is charged
REFUSALS = {"BAD_REQUEST", "REJECTED"}
# Codes that are never an entry's fault, however often they come.
HARMLESS = {
    "NETWORK_ERROR", "TLS_ERROR", "RATE_LIMITED", "TOO_SLOW", "FILE_CHANGED", "FILE_UNREADABLE",
    "ROOT_MISSING", "NOT_READY", "UNKNOWN", "FILE_UNSAFE", "BAD_PAYLOAD", "WAITS_FOR",
}  # fmt: skip

SETTLED = """
    select o.id, o.processed_at is not null, d.error_code
    from sync_outbox o left join serversync.dead_letters d on d.outbox_id = o.id
    where o.processed_at is not null or d.outbox_id is not null
"""


@dataclass
class Row:
    """A row of the outbox. `begun` and `done` tell when its transaction was committed."""

    seq: int
    call: str  # its call, or its own entity
    entity_type: str
    entity_id: str
    begun: float
    done: float = float("inf")

    def visible_before(self, other: Row) -> bool:
        return self.begun == other.begun or self.done < other.begun

    @property
    def name(self) -> str:
        """Under which the frontend knows it: a file by its recording."""
        return self.entity_id if self.entity_type == FILE_TYPE else str(self.seq)


@dataclass(eq=False)
class Said:
    """The frontend has confirmed something in the contract's own words."""

    device: str
    url: str = ""
    sha256: str = ""
    excused: bool = False  # the answer may be lost, or could not be written down


@dataclass(frozen=True)
class Pause:
    """An agent was told to wait: the request that was answered so began at `asked`."""

    asked: float
    until: float


@dataclass
class Tries:
    """How often something was tried in a request of its own, and what that may have cost."""

    hours: float  # that had passed by then
    sent: int  # of its type, when it may have been charged last
    charged: int = 0  # at most


@dataclass
class Witness:
    """Listens to what the model does, and to what the frontend hears and says."""

    db: Database
    frontend: Frontend
    backend: Backend
    notify: NotifySocket  # on which the service tells of its reloads
    retry_max: int
    retry_hours: float
    calls: list[Call] = field(default_factory=list)
    kept: list[Path] = field(default_factory=list)  # files that are nobody's to delete
    missing: set[str] = field(default_factory=set)  # recordings without a file, for ever
    grace_is_over: bool = False
    hours: float = 0.0
    stops: int = 0  # of the frontend: what was under way then, it never heard of
    repeated: int = 0

    def __post_init__(self) -> None:
        self.lock = threading.RLock()
        self.rows: dict[int, Row] = {}
        self.said: dict[str, list[Said]] = {}
        self.refused: set[tuple[str, str]] = set()
        self.tries: dict[str, Tries] = {}
        self.sent: Counter[str] = Counter()  # by type
        self.problems: list[str] = []
        self.busy = 0
        self.active = time.monotonic()
        self._ticks = itertools.count(1)
        self._last: dict[tuple[str, str], Said] = {}
        self._answering: dict[Request, Said] = {}
        self._unreliable: set[str] = set()
        self._unordered: list[tuple[Row, Row]] = []
        self._repeats: list[tuple[str, str, list[Said]]] = []
        self._pauses: dict[str, Pause] = {}
        self._hasty: list[tuple[Pause, Request]] = []  # these came before the pause was over

    # -- producers -------------------------------------------------------------------------------

    def tick(self) -> float:
        return float(next(self._ticks))

    def expect(self, rows: Iterable[Row]) -> None:
        with self.lock:
            self.rows |= {row.seq: row for row in rows}

    def forget(self, rows: Iterable[Row]) -> None:
        with self.lock:
            for row in rows:
                self.rows.pop(row.seq, None)

    def recordings(self, recording_id: str) -> list[Row]:
        return [
            row
            for row in list(self.rows.values())
            if row.entity_id == recording_id and row.entity_type == FILE_TYPE
        ]

    # -- what arrives ----------------------------------------------------------------------------

    def began(self, request: Request) -> None:
        """At a request's head."""
        with self.lock:
            self.busy += 1
            pause = self._pauses.get(device_of(request))
            early = pause is not None and request.started < pause.until - 0.05
            if pause is not None and early and request.method != "HEAD":  # the end of an upload
                self._hasty.append((pause, request))

    def arrived(self, request: Request) -> None:
        """The whole of it is here; nothing is stored or said yet."""
        with self.lock:
            if request.file is not None:
                self._file_arrived(request)
                return
            rows = [self.rows.get(entry["seq"]) for entry in request.entries]
            known = [row for row in rows if row is not None]
            if len(known) < len(rows):
                self.problems.append(f"never committed: {[e['seq'] for e in request.entries]}")
            before: set[int] = set()
            for row in known:
                self._in_turn(row, before)
                before.add(row.seq)
                told = self.said.get(row.name, [])
                self.repeated += bool(told)
                self._repeats.append((device_of(request), f"entry {row.seq}", list(told)))
            if len(known) == 1:
                self._alone(known[0])

    def _file_arrived(self, request: Request) -> None:
        assert request.file is not None
        recording_id = request.file.recording_id
        rows = self.recordings(recording_id)
        if not rows:
            self.problems.append(f"an upload of recording {recording_id}, which nobody enqueued")
            return
        self._in_turn(min(rows, key=lambda row: row.seq), set())
        # Each of its entries means an upload.
        told = self.said.get(recording_id, [])
        self.repeated += bool(told)
        reliable = [said for said in told if not said.excused]
        if len(reliable) >= len(rows):
            self._repeats.append((device_of(request), f"file of {recording_id}", reliable))
        for other in list(self.rows.values()):
            others = other.entity_type == FILE_TYPE and other.call == rows[0].call
            if others and other.name != recording_id:
                told = list(self.said.get(other.name, []))
                self._repeats.append((device_of(request), f"a recording of {other.call}", told))
        self._alone(rows[0])

    def _in_turn(self, row: Row, before: set[int]) -> None:
        """What it must not pass: an earlier one of its entity, its call's own entry."""
        for other in list(self.rows.values()):
            if (
                other.entity_id in (row.entity_id, row.call)
                and other.seq < row.seq
                and other.entity_type != FILE_TYPE
                and other.seq not in before
                and other.name not in self.said
                and other.visible_before(row)
            ):
                self._unordered.append((other, row))

    def _alone(self, row: Row) -> None:
        """A failure is charged if three of its type got through since the one before."""
        now = self.sent[row.entity_type]
        tries = self.tries.setdefault(row.name, Tries(self.hours, now))
        if now - tries.sent >= SENT_SINCE:
            tries.charged += 1
            tries.sent = now

    # -- what is said ----------------------------------------------------------------------------

    def confirms(self, request: Request, refused: Iterable[int] = ()) -> None:
        """A good answer goes out next (or one that refuses some entries for good)."""
        device = device_of(request)
        with self.lock:
            said = Said(device, excused=device in self._unreliable)
            self._answering[request] = self._last[device, request.kind] = said
            if request.file is not None:
                self.sent[FILE_TYPE] += 1
                said.sha256, said.url = request.file.sha256, self.frontend.file_url(request.file)
                self.said.setdefault(request.file.recording_id, []).append(said)
            for entry in request.entries:
                if entry["seq"] in refused:
                    self.refused.add((str(entry["seq"]), "REJECTED"))
                else:
                    self.sent[entry["entityType"]] += 1
                    self.said.setdefault(str(entry["seq"]), []).append(said)

    def refuses(self, request: Request, code: str) -> None:
        """It is rejected for good: that counts for what is alone in its request."""
        with self.lock:
            if request.file is not None:
                self.refused.add((request.file.recording_id, code))
            elif len(request.entries) == 1:
                self.refused.add((str(request.entries[0]["seq"]), code))

    def ended(self, request: Request, delivered: bool, pause: float) -> None:
        """Its answer has gone out, or never will."""
        with self.lock:
            self.busy -= 1
            self.active = time.monotonic()
            said = self._answering.pop(request, None)
            late = request.file is None and time.monotonic() - request.started > LATE_SEC
            if said is not None and (late or not delivered):
                said.excused = True
            if pause and request.finished is not None and delivered:
                until = time.monotonic() + pause
                self._pauses[device_of(request)] = Pause(request.started, until)

    def _reloaded(self, since: float, until: float) -> bool:
        """By the agent's own word, which it gives before it forgets what it was told."""
        told = self.notify.values("MONOTONIC_USEC")
        return any(since <= int(micros) / 1e6 <= until for _, micros in told)

    def _is_hasty(self, pause: Pause, request: Request) -> bool:
        """A reload ends every pause, also one that is being asked for."""
        with contextlib.suppress(AssertionError):  # the agent's word may still be on its way
            wait_until(lambda: self._reloaded(pause.asked, request.started), 2)
            return False
        return True

    def excuse(self, device: str) -> None:
        """From its last request on, this agent may not write down what it is told."""
        with self.lock:
            self._unreliable.add(device)
            for kind in ("entries", "file"):
                if (device, kind) in self._last:
                    self._last[device, kind].excused = True

    # -- what must hold --------------------------------------------------------------------------

    def _settled(self) -> tuple[set[int], dict[int, str]]:
        """What is marked, and what is dead, at one moment."""
        rows = self.db.rows(SETTLED)
        marked = {seq for seq, is_marked, _ in rows if is_marked}
        return marked, {seq: code for seq, _, code in rows if code is not None}

    def wrong(self) -> list[str]:
        """What is wrong at this very moment, also in the middle of a fault."""
        # In this order: what is gone, shown or marked by now must have been confirmed by now.
        gone = [call for call in list(self.calls) if call.size and not self.on_disk(call)]
        uploaded = "select id::text, s3_url from recordings where upload_status = 'uploaded'"
        urls = dict(self.db.rows(uploaded))
        marked, dead = self._settled()
        with self.lock:
            hasty, self._hasty = self._hasty, []
        self.problems += [
            f"{device_of(request)} was asked for a pause, and came "
            f"{pause.until - request.started:.2f} s early"
            for pause, request in hasty
            if self._is_hasty(pause, request)
        ]
        with self.lock:
            return [
                *self.problems,
                *self._wrong_marks(marked, dead),
                *self._wrong_deaths(dead),
                *self._wrong_files(gone, urls),
                *self._wrong_order(dead),
            ]

    def _wrong_marks(self, marked: set[int], dead: dict[int, str]) -> Iterator[str]:
        for seq in sorted(marked - set(dead)):
            row = self.rows.get(seq)
            if row is None:
                yield f"entry {seq} is marked, and was never committed"
            elif row.name not in self.said:
                yield f"entry {seq} ({row.entity_type}) is marked, and was never confirmed"
        for seq in sorted(set(dead) - marked):
            yield f"entry {seq} is dead, and not marked"

    def _wrong_deaths(self, dead: dict[int, str]) -> Iterator[str]:
        types: dict[str, int] = {}
        for seq, code in dead.items():
            row = self.rows.get(seq)
            if row is None or not self._justified(row, code):
                tries = self.tries.get(row.name) if row else None
                yield f"entry {seq} is dead without a reason: {code} ({tries}, {self.hours} h)"
            if row is not None and row.entity_type.startswith("type-"):
                types[row.entity_type] = types.get(row.entity_type, 0) + 1
        for name, number in types.items():
            if number > MOST_DEATHS:
                yield f"{number} entries of {name} died: the frontend rejects all of them"

    def _justified(self, row: Row, code: str) -> bool:
        if code in REFUSALS:
            return (row.name, code) in self.refused
        if code == "FILE_MISSING":
            return self.grace_is_over and row.entity_id in self.missing
        if code == "SECOND_RECORDING":
            first = min(self.recordings(row.name), key=lambda each: each.seq)
            return any(
                other.entity_type == FILE_TYPE
                and other.call == row.call
                and other.name != row.name
                and other.name in self.said
                and not (first.seq < other.seq and first.visible_before(other))
                for other in self.rows.values()
            )
        tries = self.tries.get(row.name)
        if tries is None or code in HARMLESS:
            return False
        enough = tries.charged + self.stops >= self.retry_max
        return enough and self.hours - tries.hours >= self.retry_hours

    def _wrong_files(self, gone: list[Call], urls: dict[str, str]) -> Iterator[str]:
        for call in gone:
            told = self.said.get(call.recording_id, [])
            if call.sha256 not in {said.sha256 for said in told}:
                yield f"{call.call_id}: the file is gone, and was never confirmed"
            if call.recording_id not in urls:
                yield f"{call.call_id}: the file is gone, the database has no URL"
        for recording_id, url in urls.items():
            if url not in {said.url for said in self.said.get(recording_id, [])}:
                yield f"recording {recording_id} is shown as uploaded, and was never confirmed"
            elif recording_id in self.frontend.store and not self.frontend.playable(recording_id):
                yield f"recording {recording_id} is uploaded, and has no player"
        for path in self.kept:
            if not self._exists(path):
                yield f"{path} is gone, and was not ours to delete"

    def _wrong_order(self, dead: dict[int, str]) -> Iterator[str]:
        for lower, row in self._unordered:
            if lower.seq not in dead:
                yield f"entry {row.seq} ({row.entity_type}) came before {lower.seq}: not its turn"
        for device, what, told in self._repeats:
            reliable = [said.device for said in told if not said.excused]
            if reliable:
                yield f"{what} comes again from {device}: {reliable} had its answer"

    @property
    def away(self) -> Path:
        """Where the recordings are while another directory is in their place."""
        return self.backend.recordings_dir.with_name("away")

    def _exists(self, path: Path) -> bool:
        return path.exists() or (self.away / path.relative_to(self.backend.recordings_dir)).exists()

    def on_disk(self, call: Call) -> bool:
        rows = self.recordings(call.recording_id)
        roots = (self.backend.recordings_dir, self.away)
        return (
            self._exists(call.wav)
            or any(in_trash(root, row.seq, call) for root in roots for row in rows)
            or self._exists(call.wav)  # it may have gone back
        )

    def unfinished(self) -> list[str]:
        """What is not through yet; empty when the faults have stopped and time has passed."""
        problems = [f"entry {seq} is pending" for seq in self.db.pending()]
        _, dead = self._settled()
        changed = 0
        for call in self.calls:
            told = {said.sha256 for said in self.said.get(call.recording_id, [])}
            dying = all(row.seq in dead for row in self.recordings(call.recording_id))
            if call.wav.exists() and not dying:
                if told and call.sha256 not in told:
                    changed += 1  # after its upload: it stays, and is spoken of
                else:
                    problems.append(f"{call.call_id}: uploaded, and still on the disk")
        trash = self.backend.recordings_dir / TRASH
        problems += [f"left in the trash: {path.name}" for path in trash.glob("*")]
        left = self.db.value("select count(*) from serversync.uploads")
        if left > changed:
            problems.append(f"{left} deletions wait, {changed} of them with a reason")
        return problems

    def missed(self) -> list[str]:
        """What never arrived, when all is over."""
        _, dead = self._settled()
        problems = [
            f"entry {row.seq} ({row.entity_type}) never arrived"
            for row in self.rows.values()
            if row.seq not in dead and row.name not in self.said
        ]
        for call in self.calls:
            through = call.recording_id in self.said
            known = call.recording_id in self.frontend.store
            if through and known and not self.frontend.playable(call.recording_id):
                problems.append(f"{call.call_id}: no player at the frontend")
            if not through and call.size and not call.wav.exists():
                problems.append(f"{call.call_id}: given up, and its file is gone")
            status, _ = self.backend.upload_status(call)
            if status != ("uploaded" if through else "upload_failed"):
                problems.append(f"{call.call_id}: shown as {status}")
        return problems


def device_of(request: Request) -> str:
    return str(request.headers.get("X-Serversync-Device"))

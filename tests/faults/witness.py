"""A witness at the frontend's door: what it said to whom, and so what may be marked, deleted,
given up or sent again."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field

from frontend import Request
from oracle import FILE_TYPE, UPLOADED, Oracle, name_of

LATE_SEC = 0.4  # an answer that took longer may have come too late (the least time limit is 0.5 s)
SENT_SINCE = 3  # so many of its type got through since its last failure: it is charged
REFUSALS = {"BAD_REQUEST", "REJECTED"}


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
        return name_of(self.seq, self.entity_type, self.entity_id)


@dataclass(eq=False)
class Said:
    """The frontend has confirmed something in the contract's own words."""

    url: str = ""
    sha256: str = ""
    heard: bool = False  # by an agent that could write it down


@dataclass
class Tries:
    """How often something was tried in a request of its own, and what that may have cost."""

    hours: float  # that had passed by then
    sent: int  # of its type, when it may have been charged last
    charged: int = 0  # at most


@dataclass
class Witness(Oracle):
    """Listens to what the model does, and to what the frontend hears and says."""

    retry_max: int = 0
    retry_hours: float = 0.0
    missing: set[str] = field(default_factory=set)  # recordings without a file, for ever
    grace_is_over: bool = False
    hours: float = 0.0
    stops: int = 0  # of the frontend: what was under way then, it never heard of

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

    # -- producers -------------------------------------------------------------------------------

    def tick(self) -> float:
        return float(next(self._ticks))

    def recordings(self, recording_id: str) -> list[Row]:
        return [
            row
            for row in list(self.rows.values())
            if row.entity_id == recording_id and row.entity_type == FILE_TYPE
        ]

    # -- what arrives ----------------------------------------------------------------------------

    def began(self) -> None:
        """At a request's head."""
        with self.lock:
            self.busy += 1

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
                self._is_due(request, row.name)
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
        self._is_due(request, recording_id, len(rows))  # each of its entries means an upload
        for other in list(self.rows.values()):
            others = other.entity_type == FILE_TYPE and other.call == rows[0].call
            if others and other.name != recording_id:
                self._is_due(request, other.name)
        self._alone(rows[0])

    def _is_due(self, request: Request, name: str, times: int = 1) -> None:
        """Nobody who could write it down was told so often that it is here."""
        if sum(said.heard for said in self.said.get(name, [])) >= times:
            self.problems.append(f"{name} comes again, from {device_of(request)}")

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
        with self.lock:
            said = Said()
            self._answering[request] = self._last[device_of(request), request.kind] = said
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

    def ended(self, request: Request, delivered: bool) -> None:
        """Its answer has gone out, or never will."""
        with self.lock:
            self.busy -= 1
            self.active = time.monotonic()
            said = self._answering.pop(request, None)
            late = request.file is None and time.monotonic() - request.started > LATE_SEC
            if said is not None and delivered and not late:
                said.heard = device_of(request) not in self._unreliable

    def excuse(self, device: str) -> None:
        """From its last request on, this agent may not write down what it is told."""
        with self.lock:
            self._unreliable.add(device)
            for kind in ("entries", "file"):
                if (device, kind) in self._last:
                    self._last[device, kind].heard = False

    def lapses(self, request: Request, recording_id: str) -> None:
        """Its file has changed: the agent may see that before it writes down what it is told."""
        with self.lock:
            self._answering.pop(request, None)
            for said in self.said.get(recording_id, [])[-1:]:
                said.heard = False

    # -- what must hold --------------------------------------------------------------------------

    def uploaded(self) -> set[tuple[str, str]]:
        """Of each recording, the digests of what was confirmed."""
        with self.lock:
            return {(name, each.sha256) for name, told in self.said.items() for each in told}

    def through(self) -> set[str]:
        with self.lock:
            return set(self.said)

    def what_is_wrong(self) -> list[str]:
        """At this very moment, also in the middle of a fault."""
        lost = self.lost()
        urls = dict(self.db.rows(UPLOADED))
        with self.lock:
            unordered = list(self._unordered)  # first: what was dead by then let them go
        dead = {seq: reason.partition(":")[0] for seq, *_, reason in self.settled() if reason}
        with self.lock:
            return [
                *self.problems,
                *lost,
                *self._wrong_deaths(dead),
                *(
                    f"recording {recording_id} is shown as uploaded, and was never confirmed"
                    for recording_id, url in urls.items()
                    if url not in {said.url for said in self.said.get(recording_id, [])}
                ),
                *(
                    f"entry {row.seq} ({row.entity_type}) came before {lower.seq}: not its turn"
                    for lower, row in unordered
                    if lower.seq not in dead
                ),
            ]

    def _wrong_deaths(self, dead: dict[int, str]) -> Iterator[str]:
        for seq, code in dead.items():
            row = self.rows.get(seq)
            if row is None or not self._justified(row, code, dead):
                tries = self.tries.get(row.name) if row else None
                yield f"entry {seq} is dead without a reason: {code} ({tries}, {self.hours} h)"

    def _justified(self, row: Row, code: str, dead: Container[int]) -> bool:
        if code in REFUSALS:
            return (row.name, code) in self.refused
        if code == "FILE_MISSING":
            return self.grace_is_over and row.entity_id in self.missing
        if code == "SECOND_RECORDING":
            # Of its entries the first that was not given up before it, for whatever reason.
            left = [each for each in self.recordings(row.name) if each.seq not in dead]
            first = min([*left, row], key=lambda each: each.seq)
            return any(
                other.entity_type == FILE_TYPE
                and other.call == row.call
                and other.name != row.name
                and other.name in self.said
                and not (first.seq < other.seq and first.visible_before(other))
                for other in self.rows.values()
            )
        tries = self.tries.get(row.name)
        if tries is None:
            return False
        enough = tries.charged + self.stops >= self.retry_max
        return enough and self.hours - tries.hours >= self.retry_hours

    def missed(self) -> list[str]:
        """What never arrived, when all is over. Of what nobody heard, a repeat may have failed."""
        problems = self.altered()
        for call in self.calls:
            heard = any(said.heard for said in self.said.get(call.recording_id, []))
            status, _ = self.backend.upload_status(call)
            if status != "uploaded" and (heard or status != "upload_failed"):
                problems.append(f"{call.call_id}: shown as {status}")
        return problems


def device_of(request: Request) -> str:
    return str(request.headers.get("X-Serversync-Device"))

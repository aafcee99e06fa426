"""An agent by a virtual clock: it and all of its policy run as they are. Modelled are the outbox
with `waiting` (what the statements of Store say), the frontend, the clock and the jitter."""

import hashlib
import heapq
import json
from bisect import bisect_left, bisect_right, insort
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from time import localtime, strftime
from typing import Any, NamedTuple, cast

import serversync
from serversync import Answer, Batch, Past, Session, Step, Steps, Store, Verdict

REQUEST_SEC = 0.02
CONFIG = serversync.load_config(
    {"DATABASE_URL": "postgresql:///nowhere", "FRONTEND_BASE_URL": "http://localhost"}
)
PROCESS = serversync.Process({})
SILENCE = Answer(trouble=serversync.Trouble.TIMEOUT, duration=float("inf"))
Answers = Callable[[float, list[int]], Answer]  # by the time and the seqs; none: the empty request


class Entry(NamedTuple):
    at: float
    seq: int
    kind: str
    entity: str
    call: str | None = None


class Row(NamedTuple):
    """A row of `waiting`."""

    past: Past
    since: float
    due: float = float("inf")
    waits_for: int | None = None
    in_outage: bool = False


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now

    time = monotonic
    localtime, strftime = staticmethod(localtime), staticmethod(strftime)


class Connection(Session):
    """It holds the lock, and tells of what came."""

    heard = True

    def news(self) -> None:
        if not self.heard:
            self.heard = True
            self.called()


class Outbox(Store):
    """sync_outbox, `waiting` and the counters."""

    def __init__(self, session: Session, clock: Clock) -> None:
        super().__init__(session)
        self.clock, self.run = clock, self.statement
        self.models: dict[str, Callable[..., object]] = {
            serversync.NEW_PLANS: lambda: None,
            serversync.LOOK: self.look,
            serversync.SWEEP: self.sweep,
            serversync.HOLD_BACK: self.hold_back,
            serversync.NEWEST_FREE: self.newest_free,
            serversync.NEXT_RETRY: self.retry,
            serversync.MAKE_DUE: self.make_due,
        }
        self.pending: dict[int, Entry] = {}
        self.waiting: dict[int, Row] = {}
        self.fresh: list[int] = []  # pending without a row
        self.pending_of: defaultdict[str | None, list[int]] = defaultdict(list)
        self.waiting_of: defaultdict[str | None, list[int]] = defaultdict(list)
        self.due: list[tuple[float, int]] = []  # a heap; what is true no more is passed over
        self.sent_at: dict[int, float] = {}
        self.sent, self.rejected, self.dead = Counter[str](), Counter[str](), Counter[str]()
        self.charged = self.overtaken = 0

    def insert(self, entry: Entry) -> None:
        self.pending[entry.seq] = entry
        insort(self.fresh, entry.seq)
        insort(self.pending_of[entry.entity], entry.seq)

    def statement(self, sql: str, limit: float = 0, /, **params: Any) -> list[tuple[Any, ...]]:
        for name in ("skip", "travels", "before", "apart", "open", "way"):
            params.pop(name, None)
        found = self.models[sql](**params)
        return [found if isinstance(found, tuple) else (found,)] if found is not None else []

    def make_due(self, everything: bool) -> None:
        for seq, row in list(self.waiting.items()):
            if (everything or row.in_outage) and row.waits_for is None:
                self._keep(seq, row._replace(in_outage=False, due=self.clock.now))

    def look(self) -> tuple[object, ...]:
        newest = max(self.pending, default=0)
        return None, bool(self.pending), False, False, newest, bool(self.waiting), []

    def sweep(self) -> None:
        for seq, row in list(self.waiting.items()):
            if row.waits_for is not None and row.waits_for not in self.waiting:
                self._settle(seq)
                insort(self.fresh, seq)

    def fetch(self, after: int, until: int, size: int, most: int, at_all: int) -> Batch:
        free = (seq for seq in self._between(after, until) if not self._first_before(seq))
        return self._batch_of(list(islice(free, size)))

    def fetch_alone(self, seq: int, most: int) -> Batch:
        return self._batch_of([seq])

    def hold_back(self, after: int, until: int) -> bool:
        found = [(seq, self._first_before(seq)) for seq in self._between(after, until)]
        for seq, first in found:
            if first:
                self._keep(seq, Row(self.past(seq), self.clock.now, waits_for=first))
        return any(first for _, first in found)

    def retry(self) -> tuple[int, float] | None:
        passed, found = [], None
        while self.due and found is None:
            due, seq = heapq.heappop(self.due)
            if seq in self.waiting and self.waiting[seq].due == due:
                passed.append((due, seq))
                if not self._first_before(seq):
                    found = (seq, max(0.0, due - self.clock.now))
        for each in passed:
            heapq.heappush(self.due, each)
        return found

    def newest_free(self) -> int:
        newest = islice(reversed(self.fresh), 100)
        return next((seq for seq in newest if not self._overtakes(seq)), 0)

    def past(self, seq: int, readable: bool = True) -> Past:
        kind, row = self.pending[seq].kind, self.waiting.get(seq)
        past, since = (row.past, row.since) if row else (Past(kind, None), self.clock.now)
        waited = past.waited + min(600.0, self.clock.now - since)
        now, rejected = self.sent[kind], self.rejected[kind]
        return replace(past, waited=waited, sent_now=now, rejected=rejected)

    def confirm(self, seqs: Sequence[int], *_: object, **__: object) -> None:
        for seq in seqs:
            self.overtaken += self._overtakes(seq)
            self.sent_at[seq] = self.clock.now
            kind = self._leave(seq)
            self.sent[kind] += 1
            self.rejected[kind] = 0

    def set_aside(self, seq: int, past: Past, verdict: Verdict, step: Step, outage: bool) -> None:
        if step.dead:
            kind = self._leave(seq)
            self.dead[kind] += 1
            self.rejected[kind] += verdict.fate is serversync.Fate.REJECTED
            return
        self.charged += step.attempts - past.attempts
        outage = outage or (seq in self.waiting and self.waiting[seq].in_outage)
        past = replace(past, tries=step.tries, attempts=step.attempts, type_sent=past.sent_now)
        due = self.clock.now + step.delay
        self._keep(seq, Row(past, self.clock.now, due, in_outage=outage))
        self.rows = True

    def _between(self, after: int, until: int) -> Iterator[int]:
        low, high = bisect_right(self.fresh, after), bisect_right(self.fresh, until)
        return islice(self.fresh, low, high)

    def _overtakes(self, seq: int) -> bool:
        """Whether an earlier one of its entity is pending, or its call's own."""
        entry = self.pending[seq]
        own, call = self.pending_of[entry.entity], self.pending_of.get(entry.call)
        return own[0] < seq or bool(call and call[0] < seq)

    def _first_before(self, seq: int) -> int:
        """What it must wait for: an earlier one of its entity that waits, or its call's own."""
        entry = self.pending[seq]
        rows = [self.waiting_of.get(entry.entity), self.waiting_of.get(entry.call)]
        firsts = [row[0] for row in rows if row and row[0] < seq]
        return min((self.waiting[first].waits_for or first for first in firsts), default=0)

    def _batch_of(self, seqs: list[int]) -> Batch:
        body = json.dumps({"entries": seqs}).encode() if seqs else b""
        return Batch(seqs, 300, body, hashlib.sha256(body).hexdigest())

    def _keep(self, seq: int, row: Row) -> None:
        if seq not in self.waiting:
            del self.fresh[bisect_left(self.fresh, seq)]
            insort(self.waiting_of[self.pending[seq].entity], seq)
        self.waiting[seq] = row
        if row.waits_for is None:
            heapq.heappush(self.due, (row.due, seq))

    def _settle(self, seq: int) -> None:
        del self.waiting[seq]
        self.waiting_of[self.pending[seq].entity].remove(seq)

    def _leave(self, seq: int) -> str:
        if seq in self.waiting:
            self._settle(seq)
        else:
            del self.fresh[bisect_left(self.fresh, seq)]
        entry = self.pending.pop(seq)
        self.pending_of[entry.entity].remove(seq)
        return entry.kind


class Frontend(serversync.Frontend):
    def __init__(self, answers: Answers, clock: Clock) -> None:
        super().__init__(CONFIG, PROCESS)
        self.answers, self.clock, self.requests = answers, clock, 0
        self.entries = self.files = cast(serversync.Wire, self)

    def post(self, path: str, body: bytes, key: str, most: float = float("inf")) -> Steps[Answer]:
        self.requests += 1
        answer = self.answers(self.clock.now, json.loads(body)["entries"])
        limit = min(CONFIG.timeout_sec, most)
        yield serversync.AT_ONCE
        self.clock.now += min(limit, answer.duration or REQUEST_SEC)
        return SILENCE if answer.duration > limit else answer


class Box(serversync.Agent):
    """An agent whose outbox, frontend and clock are models; it has nothing but entries to do."""

    def __init__(self, clock: Clock, answers: Answers, entries: Iterable[Entry]) -> None:
        super().__init__(CONFIG, PROCESS, lambda **_: "", False)
        self.coming = sorted(entries, reverse=True)
        self.born = {entry.seq: entry for entry in self.coming}
        self.clock, self.connection = clock, Connection("", "", PROCESS)
        self.session, self.session.locked = self.connection, True
        self.session.called = self.called
        self.store = self.outbox = Outbox(self.session, clock)
        self.frontend = self.line = Frontend(answers, clock)
        self.entries = serversync.Entries(self)
        self.jobs = [self.entries]

    def live(self, until: float) -> None:
        while self.clock.now < until:
            while self.coming and self.coming[-1].at <= self.clock.now:
                self.outbox.insert(self.coming.pop())
                self.connection.heard = False
            self.turn()
            rest = min(until, self.entries.wait.until, *(each.at for each in self.coming[-1:]))
            self.clock.now = max(self.clock.now, rest)

    def delays(self, *kinds: str) -> list[float]:
        """How long those waited that are through, of these types or of all."""
        sent = [(self.born[seq], at) for seq, at in self.outbox.sent_at.items()]
        return [at - entry.at for entry, at in sent if not kinds or entry.kind in kinds]

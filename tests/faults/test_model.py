"""A model: calls, answers, kills, crashes and clocks in any order; the witness looks at each step.

The same examples every time. SERVERSYNC_MODEL_EXAMPLES=200 tries so many new ones, from a seed
that it prints; SERVERSYNC_MODEL_SEED repeats them.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from hashlib import file_digest
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import psycopg
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from agent import Agent, AgentFactory, agent_env
from backend import Backend, Call, write_wav
from frontend import Frontend, Reply, Request
from ledger import let_hours_pass, locked
from oracle import FILE_TYPE
from pg import Cluster, Database
from proxy import Proxy
from waiting import wait_until
from witness import Row, Witness, device_of

SHARDS = 2
MORE = os.environ.get("SERVERSYNC_MODEL_EXAMPLES")
EXAMPLES = -(-int(MORE or 4) // SHARDS)
SEED = int(os.environ.get("SERVERSYNC_MODEL_SEED", random.SystemRandom().getrandbits(32)))
ROUNDS = 4
RETRY_MAX, RETRY_HOURS, GRACE_HOURS = 2, 1, 24
LIBFAKETIME = next(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"), None)
NOW, LAST_YEAR, NEXT_YEAR, BOOT = "+0", "-1y", "+1y", "@1970-01-01 00:00:10"
END_SESSIONS = """
    select pg_terminate_backend(pid) from pg_stat_activity
    where application_name = 'serversync' and datname = %s
"""
EMPTY = len(b'{"entries":[]}')  # the request that only asks whether the frontend lives
HTML = "<html>please log in</html>"
EARLY = {"ok": True, "fileUrl": "http://127.0.0.1/early.wav"}
# Instead of a good answer; nothing is stored unless it says so.
REPLIES = {
    "500": Reply(500, {}, "<html>trouble</html>"),
    "503, slowly": Reply(503, {}, "<html>trouble</html>", trickle=0.02),
    "a portal": Reply(200, {}, HTML),
    "a login": Reply(302, {"Location": "/login"}, HTML),
    "401": Reply(401, {}, {"error": "unauthorized"}),
    "404": Reply(404, {}, "<html>not found</html>"),
    "413": Reply(413, {}, "<html>too large</html>"),
    "429": Reply(429, {"Retry-After": "1"}, {}),
    "400, not ours": Reply(400, {}, "<html>bad request</html>"),
    "409, still running": Reply(409, {}, {"error": "the first one is still running"}),
    "not ok": Reply(200, {}, {"ok": False, "fileUrl": "http://127.0.0.1/x.wav"}),
    "no words": Reply(200, {}, {}),
    "a reset": Reply(reset=True),
    "a stall": Reply(stall=1.3),
    "half an answer": Reply(200, {}, {**EARLY, "more": "x" * 99}, half=True),
    "a byte a second": Reply(200, {}, EARLY, trickle=1),
    "nonsense": Reply(raw=b"\x00\xff\r\n\r\n"),
    "stored, a reset": Reply(store=True, reset=True),
    "stored, a stall": Reply(store=True, stall=1.3),
    "stored, 500": Reply(500, {}, "<html>trouble</html>", store=True),
    "stored, a portal": Reply(200, {}, HTML, store=True),
    "stored, half an answer": Reply(200, {}, {**EARLY, "more": "x" * 99}, store=True, half=True),
}
# Before the body is through.
HEADS = {
    "a reset in the body": Reply(reset=True, after=1000),
    "an early 503": Reply(503, {"Connection": "close"}, "busy", after=1000, close=True),
    "an early 200": Reply(200, {"Connection": "close"}, EARLY, after=1000, close=True),
    "an early reset": Reply(reset=True),
    "accepted, silent": Reply(stall=1.3),
    "a stall in the body": Reply(stall=1.3, after=1000),
}
REFUSALS = {
    "400": ("BAD_REQUEST", Reply(400, {}, {"error": "not valid"})),
    "422": ("BAD_REQUEST", Reply(422, {}, {"error": "not valid"})),
}
# What a frontend may have against one entry, whenever it meets it.
GRUDGES = ["400", "422", "413", "rejected", "500", "400, not ours", "a portal"]
WEATHERS = ["500", "a portal", "a login", "401", "404", "a reset", "409, still running", "not ok"]
DATABASE_EVENTS = [
    "session ends", "session ends", "crash", "database cut", "database silent", "database away",
]  # fmt: skip
PRODUCER_EVENTS = ["a call ends", "the call goes on", "late commits", "the file changes"]
EVENTS = ["kill", "stop", *DATABASE_EVENTS, *PRODUCER_EVENTS]
WHEN = ["before", "stored", "stored", "answered"]
Meets = str | tuple[str, str]
ALL_MEETS = {*REPLIES, *HEADS, *REFUSALS} | {str((what, when)) for what in EVENTS for when in WHEN}
Step = tuple[str, dict[str, Any]]
MEETS = st.one_of(
    st.sampled_from([*REPLIES, *HEADS, "good", "wrong size", "wrong digest", "409, done"]),
    st.sampled_from([*REFUSALS, "good", "good", "good", "good", "good"]),
    st.tuples(st.sampled_from(EVENTS), st.sampled_from(WHEN)),
    st.tuples(st.sampled_from(PRODUCER_EVENTS), st.sampled_from(WHEN)),
)
PLANS = st.lists(MEETS, min_size=2, max_size=8)
NUMBERS = st.integers(0, 99)
BARE = 50
FILES = ["all", "all", "all", "transferred", "meta is late", "meta is broken", "late", "never"]
SMALL_THINGS = [
    "a_late_commit", "a_late_commit", "a_rollback", "a_call_goes_on", "a_call_goes_on",
    "a_file_is_enqueued_again", "late_files_come", "a_file_changes", "a_bad_entry", "a_bad_entry",
    "the_recordings_directory_goes", "the_frontend_goes_or_comes",
    "hours_pass", "the_clock_steps", "the_service_ends", "the_service_ends",
]  # fmt: skip


class Enough(BaseException):
    """So many examples were played."""


class Broken(BaseException):
    """A promise was broken. Nothing for hypothesis to catch: what is not the same again when it is
    tried again (kills, crashes and time-outs are not) it would report as flaky, and hide."""


class Transaction:
    """The rows of one transaction that is still open, or was never committed."""

    def __init__(self, connection: psycopg.Connection[Any], calls: list[Call]) -> None:
        self.connection, self.calls = connection, calls
        self.rows: list[tuple[int, str, str, str]] = [
            (seq, call.call_log_id, kind, self.entity_of(call, kind, seq))
            for call in calls
            for seq, kind in zip(call.seqs, call.types, strict=True)
        ]

    @staticmethod
    def entity_of(call: Call, kind: str, seq: int) -> str:
        """An event is an entity of its own, whose name does not matter here."""
        owners = {"call_log": call.call_log_id, "ivr_session_event": f"event {seq}"}
        return owners.get(kind, call.recording_id)


class World:
    """What there is, and what can happen to it. All steps are possible at all times."""

    seen: ClassVar[Counter[str]] = Counter()  # of all examples: what the model has really met

    def __init__(self, cluster: Cluster, directory: Path) -> None:
        self.cluster = cluster
        self.db = Database(cluster)
        self.proxy = Proxy("127.0.0.1", cluster.port)
        self.directory = directory / self.db.name
        self.frontend = Frontend(self.directory / "frontend").start()
        self.backend = Backend(self.db, self.directory / "backend")
        self.witness = Witness(
            self.db, self.frontend, self.backend, retry_max=RETRY_MAX, retry_hours=RETRY_HOURS
        )
        self.calls = self.witness.calls
        self.open: list[Transaction] = []
        self.late: list[tuple[Call, str]] = []
        self.grudges: dict[str, str] = {}  # by entity
        self.weather: dict[str, str] = {}  # by kind of request
        self.plan: list[Meets] = []
        self.thrifty = False  # what no request has met is kept for the next ones
        self.asked_too = False  # the empty request meets the plan, too
        self.agents: dict[str, Agent] = {}
        self.slow: dict[str, bool] = {}  # those with a bandwidth limit
        self.service: str | None = None
        self.alone = True  # there is no second agent that could take over
        self.crashed = False
        self.steady = threading.Event()  # the database is not being restarted
        self.steady.set()
        self.story: list[str] = []
        self._lock = threading.RLock()
        self._met: dict[Request, Meets] = {}
        self._keys: set[str] = set()
        self._ended: set[str] = set()
        self._timers: list[threading.Timer] = []
        self.frontend.on_head = self._at_head
        self.frontend.on_entries = self.frontend.on_file = self._at_body
        self.frontend.on_end = self._at_end

    def _step(self, *what: object) -> None:
        self.story.append(" ".join(map(str, what)))

    # -- producers -------------------------------------------------------------------------------

    def some_calls_have_ended(self) -> None:
        """An agent has been here: it knows the recordings directory."""
        self._end_call(0.05)
        self._finish(self._start())
        self._end_call(1)

    def a_call_ends(
        self, seconds: float, events: int, files: str, late: bool, again: bool, grudge: str | None
    ) -> None:
        self._step("a call ends:", seconds, events, files, f"{late=} {again=} {grudge=}")
        self._end_call(seconds, events, files, late=late, again=again, grudge=grudge)

    def _end_call(
        self,
        seconds: float,
        events: int = 1,
        files: str = "all",
        *,
        late: bool = False,
        again: bool = False,
        grudge: str | None = None,
    ) -> None:
        with self._lock:
            self._root_is(True)
            first = self.calls[-1] if again and self.calls else None
            transaction = self._begin(seconds, events, files, first)
            if grudge is not None:
                self.grudges[transaction.calls[0].call_log_id] = grudge
            self.open.append(transaction)
            if not late:
                self._commit(-1)

    def _begin(self, seconds: float, events: int, files: str, first: Call | None) -> Transaction:
        connection = self.db.connect(autocommit=False)
        there = files in ("all", "transferred")
        call = self.backend.end_call(
            seconds=seconds,
            events=events,
            meta=there,
            audio=files not in ("late", "never"),
            extra_files=("b_leg.wav",) if files == "transferred" else (),
            call_log_id=first.call_log_id if first else None,
            connection=connection,
        )
        if files == "transferred":
            self.witness.kept.append(call.directory / "b_leg.wav")
        elif files == "never":
            self.witness.missing.add(call.recording_id)
        elif not there:
            if files == "meta is broken":
                call.meta.write_text('{"callId": ')
            self.late.append((call, files))
        return Transaction(connection, [call])

    def _commit(self, which: int) -> None:
        """As several may be open, rows become visible in another order than that of their ids."""
        transaction = self.open.pop(which)
        began = self.witness.tick()
        rows = [Row(*row, begun=began) for row in transaction.rows]
        with self.witness.lock:
            self.witness.rows |= {row.seq: row for row in rows}
        try:
            transaction.connection.commit()
        except psycopg.OperationalError:  # the database crashed since
            self.steady.wait(60)
            if not self._is_there(rows):
                with self.witness.lock:
                    for row in rows:
                        del self.witness.rows[row.seq]
                self._never_came(transaction)
                return
        finally:
            transaction.connection.close()
        done = self.witness.tick()
        for row in rows:
            row.done = done
        self.calls += transaction.calls

    def _is_there(self, rows: Sequence[Row]) -> bool:
        with self.db.connect() as connection:
            query = "select exists (select from sync_outbox where id = any (%s))"
            row = connection.execute(query, ([row.seq for row in rows],)).fetchone()
            return bool(row and row[0])

    def _never_came(self, transaction: Transaction) -> None:
        for call in transaction.calls:
            self.witness.kept += [call.wav] if call.size else []
            self.late = [(late, files) for late, files in self.late if late is not call]

    def a_late_commit(self, which: int) -> None:
        with self._lock:
            if self.open:
                self._commit(which % len(self.open))

    def a_rollback(self, which: int) -> None:
        with self._lock:
            if self.open:
                transaction = self.open.pop(which % len(self.open))
                transaction.connection.close()
                self._never_came(transaction)

    def _enqueue(self, kind: str, payload: dict[str, Any], entity_id: str, call_id: str) -> int:
        """One entry in a transaction of its own."""
        connection = self.db.connect(autocommit=False)
        seq = self.backend.enqueue(kind, payload, entity_id, connection)
        transaction = Transaction(connection, [])
        transaction.rows = [(seq, call_id, kind, entity_id)]
        self.open.append(transaction)
        self._commit(-1)
        return seq

    def _goes_on(self, call: Call, bare: bool = False) -> None:
        """A later snapshot of the recording, with a transcript; a bare one does not name the call,
        and depends on it all the same if an earlier one does."""
        payload = {"uploadStatus": "local_only", "transcript": "?"}
        payload |= {} if bare else {"callLogId": call.call_log_id}
        owner = call.recording_id if bare else call.call_log_id
        self._enqueue("recording", payload, call.recording_id, owner)

    def a_call_goes_on(self, which: int) -> None:
        with self._lock:
            call = self.calls[which % BARE % len(self.calls)]
            self._goes_on(call, which >= BARE)

    def a_file_is_enqueued_again(self, which: int) -> None:
        with self._lock:
            call = self.calls[which % len(self.calls)]
            path = f"storage/recordings/{call.call_id}/{call.wav.name}"
            payload = {
                "callLogId": call.call_log_id,
                "recordingId": call.recording_id,
                "filePath": path,
            }
            call.seqs.append(self._enqueue(FILE_TYPE, payload, call.recording_id, call.call_log_id))
            call.types.append(FILE_TYPE)

    def a_bad_entry(self, which: int) -> None:
        entity_id = str(uuid.uuid4())
        with self._lock:
            self.grudges[entity_id] = GRUDGES[which % len(GRUDGES)]
            self._enqueue("schedule", {"id": entity_id}, entity_id, entity_id)

    def late_files_come(self, which: int) -> None:
        with self._lock:
            if self.late:
                self._files_come(*self.late.pop(which % len(self.late)))

    def _files_come(self, call: Call, files: str) -> None:
        self._root_is(True)
        if not call.directory.exists():
            self.witness.problems.append(f"{call.call_id}: its directory went before it was ready")
            return
        if files == "late":
            write_wav(call.wav, 0.1)
            self._measure(call)
        self.backend.write_meta(call)

    @staticmethod
    def _measure(call: Call) -> None:
        with call.wav.open("rb") as file:
            call.sha256, call.size = (
                file_digest(file, "sha256").hexdigest(),
                call.wav.stat().st_size,
            )

    def a_file_changes(self, which: int) -> None:
        """Before its upload, or after: what the frontend never saw must stay."""
        with self._lock:
            call = self.calls[which % len(self.calls)]
            if self.service is None:
                self._change(call)

    def _change(self, call: Call) -> None:
        with contextlib.suppress(FileNotFoundError), call.wav.open("r+b") as file:
            file.seek(0, os.SEEK_END)
            file.write(b"more")
            file.flush()
            self._measure(call)

    # -- the disk, the frontend, time ------------------------------------------------------------

    def the_recordings_directory_goes(self, which: int) -> None:
        """Like a disk that is unmounted: an empty directory is in its place."""
        with self._lock:
            self._root_is(which % 4 == 3)

    def _root_is(self, there: bool) -> None:
        root = self.backend.recordings_dir
        away = self.witness.away
        if there and away.exists():
            if left := list(root.iterdir()):
                self.witness.problems.append(
                    f"made in a directory that is not the known one: {left}"
                )
            shutil.rmtree(root)
            away.rename(root)
        elif not there and not away.exists():
            root.rename(away)
            root.mkdir()

    def the_frontend_goes_or_comes(self, _: int) -> None:
        if self.frontend._listener is not None:
            self.witness.stops += 1
            self.frontend.stop()
        else:
            self._come_up()

    def _come_up(self) -> None:
        def up() -> bool:
            try:
                self.frontend.start()
            except OSError as error:
                raise LookupError from error
            return True

        if self.frontend._listener is None:
            wait_until(up, 20, "the frontend's port")

    def hours_pass(self, which: int) -> None:
        self._pass(which % 3)

    def _pass(self, hours: float = 0) -> None:
        """Fewer than the grace time of a file that is missing."""
        hours = min(hours, GRACE_HOURS - 1 - self.witness.hours)
        self.witness.hours += hours
        if self.db.value("select to_regclass('serversync.waiting')") is not None:
            let_hours_pass(self.db, hours)

    def a_while_passes(self, _: int) -> None:
        """As long as a short outage; nobody says: try now."""
        with contextlib.suppress(AssertionError):
            wait_until(lambda: not self.db.pending(), 4)

    def the_clock_steps(self, which: int) -> None:
        """The service's, while it runs."""
        self._set_clock([NOW, LAST_YEAR, NEXT_YEAR, BOOT][which % 4])

    def _set_clock(self, clock: str) -> Path:
        path = self.directory / "clock"
        new = path.with_suffix(".new")
        new.write_text(clock + "\n")
        new.rename(path)
        return path

    # -- what a request meets --------------------------------------------------------------------

    def _at_head(self, request: Request) -> Reply | None:
        self.witness.began()
        with self._lock:
            met = self._next(request)
        World.seen[str(met)] += 1
        self._met[request] = met
        if isinstance(met, tuple) and met[1] == "before":
            self._event(met[0], request)
            return Reply(reset=True) if met[0] == "kill" else None
        if met == "an early 200":
            # Only a body that is surely still on its way: what was sent may have been read.
            slow = self.slow.get(device_of(request)) and request.length > 60_000
            self._met[request] = met = met if slow else "an early 503"
        return HEADS.get(met) if isinstance(met, str) else None

    def _next(self, request: Request) -> Meets:
        kind = "empty" if request.length == EMPTY else request.kind
        if kind == "other":  # a look at what is stored
            return "good"
        if self.plan and (kind != "empty" or self.asked_too):
            return self.plan.pop(0)
        return self.weather.get(kind, "good")

    def _at_body(self, request: Request) -> Reply | None:
        self.witness.arrived(request)
        met = self._met[request]
        if isinstance(met, str):
            return self._answer(request, met)
        what, when = met
        if when != "stored":
            if when == "answered":
                timer = threading.Timer(0.003, self._event, [what, request])
                self._timers.append(timer)
                timer.start()
            return self._good(request)
        self._event(what, request)
        if what == "kill":
            return Reply(store=True, reset=True)
        if what == "the file changes" and request.file is not None:
            return Reply(200, {}, self.frontend.file_reply(request.file), store=True)
        # Time for what came meanwhile: a file is stored before its answer goes out.
        delay = 0.7 if what == "the call goes on" and request.file is not None else 0
        return self._good(request, delay)

    def _answer(self, request: Request, met: str) -> Reply | None:
        if met in REPLIES:
            if REPLIES[met].store:
                self._keys.add(str(request.headers["Idempotency-Key"]))
            return REPLIES[met]
        if met in REFUSALS:
            code, reply = REFUSALS[met]
            self.witness.refuses(request, code)
            return reply
        if request.file is not None and met.startswith("wrong"):
            lie = {"sizeBytes": 44} if met == "wrong size" else {"sha256": "0" * 64}
            return Reply(200, {}, {**self.frontend.file_reply(request.file), **lie}, store=True)
        if met == "409, done" and str(request.headers["Idempotency-Key"]) in self._keys:
            self.witness.confirms(request)
            good = {"ok": True} if request.file is None else self.frontend.file_reply(request.file)
            return Reply(409, {}, {**good, "code": "ALREADY_PROCESSED"})
        return self._good(request)

    def _good(self, request: Request, delay: float = 0) -> Reply | None:
        """What a frontend says that is well, unless it has something against an entry."""
        found = [self.grudges.get(entry["entityId"], "") for entry in request.entries]
        for grudge in found:
            if grudge and grudge != "rejected":
                return self._answer(request, grudge)
        self._keys.add(str(request.headers["Idempotency-Key"]))
        refused = [
            entry["seq"]
            for entry, grudge in zip(request.entries, found, strict=True)
            if grudge == "rejected"
        ]
        self.frontend.rejected = {
            entity: "no" for entity, grudge in self.grudges.items() if grudge == "rejected"
        }
        self.witness.confirms(request, refused)
        if request.file is None:
            return None
        file = request.file
        good = {"sizeBytes": file.size, "sha256": file.sha256, **self.frontend.file_reply(file)}
        return Reply(200, {}, good, store=True, delay=delay)

    def _at_end(self, request: Request) -> None:
        sock = threading.current_thread().sock  # type: ignore[attr-defined]
        try:
            delivered = request.status in (200, 409, 429) and sock.getpeername() is not None
        except OSError:
            delivered = False
        self.witness.ended(request, delivered)

    # -- events while a request is under way -----------------------------------------------------

    def _event(self, what: str, request: Request) -> None:
        device = device_of(request)
        agent = self.agents[device]
        acts: dict[str, Callable[[], object]] = {
            "kill": lambda: agent.signal(signal.SIGKILL),
            "stop": lambda: agent.signal(signal.SIGTERM),
            "session ends": self._end_sessions,
            "crash": self._crash,
            "database cut": self.proxy.cut,
            "database silent": self._silence,
            "database away": self._away,
            "a call ends": lambda: self._end_call(0.05),
            "the call goes on": lambda: self._goes_on(self._call_of(request)),
            "late commits": self._commit_late,
            "the file changes": lambda: self._change_of(request),
        }
        if what in ("kill", "stop"):
            self._ended.add(device)
        # What it is told now may not be written down: it ends, or another takes over.
        lone_service = self.alone and device == self.service
        if what in ("kill", "stop") or (what in DATABASE_EVENTS and not lone_service):
            self.witness.excuse(device)
        if what in PRODUCER_EVENTS:
            with self._lock:
                acts[what]()
        else:
            acts[what]()

    def _change_of(self, request: Request) -> None:
        if request.file is not None:
            self.witness.lapses(request, request.file.recording_id)
            self._change(self._call_of(request))

    def _call_of(self, request: Request) -> Call:
        ids = {entry["entityId"] for entry in request.entries}
        ids |= {request.file.recording_id} if request.file else set()
        for call in self.calls:
            if ids & {call.recording_id, call.call_log_id}:
                return call
        return self.calls[-1]

    def _commit_late(self) -> None:
        """What was open comes, and at once something newer of the same calls."""
        calls = [call for transaction in self.open for call in transaction.calls]
        while self.open:
            self._commit(0)
        for call in calls:
            if call in self.calls:
                self._goes_on(call)

    def _end_sessions(self) -> None:
        self.steady.wait(60)
        with contextlib.suppress(psycopg.OperationalError), self.cluster.admin() as admin:
            admin.execute(END_SESSIONS, (self.db.name,))

    def _later(self, seconds: float, act: Callable[[], object]) -> None:
        timer = threading.Timer(seconds, act)
        self._timers.append(timer)
        timer.start()

    def _silence(self) -> None:
        self.proxy.silent()
        self._later(0.6, self.proxy.resume)

    def _away(self) -> None:
        self.proxy.refuse()
        self.proxy.cut()
        self._later(0.5, self.proxy.resume)

    def _crash(self) -> None:
        """The database's, once an example: it costs a second. Nobody else has begun anything."""
        with self._lock:
            crashed, self.crashed = self.crashed, True
            if not crashed:
                World.seen["crashes"] += 1
                self.steady.clear()
                try:
                    self.cluster.restart("immediate")
                finally:
                    self.steady.set()
        if crashed:
            self._end_sessions()

    # -- agents ----------------------------------------------------------------------------------

    def _start(self, clock: str = NOW, args: Sequence[str] = ("once",), **options: Any) -> str:
        device = f"agent-{len(self.agents)}"
        if LIBFAKETIME is not None and (clock != NOW or args == ("run",)):
            World.seen[f"clock {clock}"] += 1
            options |= {"LD_PRELOAD": LIBFAKETIME, "FAKETIME_DONT_FAKE_MONOTONIC": 1}
            if args == ("run",):
                file = self._set_clock(clock)
                options |= {"FAKETIME_TIMESTAMP_FILE": file, "FAKETIME_NO_CACHE": 1}
            else:
                options["FAKETIME"] = clock
        shared = {
            "DATABASE_URL": self.db.url_through(self.proxy.port),
            "SYNC_DEVICE_ID": device,
            "SYNC_TIMEOUT_SEC": 1,
            "SYNC_RETRY_MAX": RETRY_MAX,
            "SYNC_RETRY_HOURS": RETRY_HOURS,
            "SYNC_FILE_GRACE_SEC": GRACE_HOURS * 3600,
            "PYTHONFAULTHANDLER": 1,
        }
        env = agent_env(None, self.frontend, self.backend, **(shared | options))
        self.agents[device] = Agent(env, args=args)
        self.slow[device] = bool(options.get("SYNC_UPLOAD_KBPS"))
        return device

    def _finish(self, device: str) -> int:
        """Waits for the end of an agent; it ends for a reason, and never by a bug."""
        agent = self.agents[device]
        try:
            code = agent.wait(60)
        except AssertionError as error:
            agent.signal(signal.SIGABRT)  # its stack, into its log
            agent.process.wait(10)
            self._break(f"{error} {agent.log()} {self.frontend.summary()}")
        self.steady.wait(60)
        log = agent.log()
        agent.close()
        if device == self.service:
            self.service = None
        World.seen[f"exit code {code}"] += 1
        expected = {0, 1, 69, 75} | ({-signal.SIGKILL, -signal.SIGTERM} & {code})
        if code < 0 and device not in self._ended:
            self._break(f"an agent ended with {code}: {log}")
        if code not in expected or "Traceback" in log or "a bug" in log:
            self._break(f"an agent ended with {code}: {log}")
        return code

    def agents_run(
        self, plan: list[Meets], how: str, clock: str, size: int, quiet: int, kbps: int, asked: bool
    ) -> None:
        """`plan` is what their requests meet, one after the other. Where the service runs, another
        one finds the lock taken."""
        self._step("agents run:", how, clock, f"{size=} {quiet=} {kbps=} {asked=} {plan=}")
        self.asked_too = asked
        self._agents_run(plan, how, clock, size, quiet, kbps)

    def _agents_run(
        self, plan: list[Meets], how: str = "once", clock: str = NOW, size: int = 100,
        quiet: int = 0, kbps: int = 0,
    ) -> None:  # fmt: skip
        watched = quiet and clock != NEXT_YEAR and self.service is None
        before = {call.call_id for call in self.calls if call.wav.exists()}
        options: dict[str, Any] = {
            "SYNC_BATCH_SIZE": size,
            "SYNC_DELETE_AFTER_SEC": quiet,
            "SYNC_UPLOAD_KBPS": kbps,
        }
        self.alone = how != "two" and self.service is None
        self.plan = [*(self.plan if self.thrifty else []), *plan][-12:]
        if self.service is not None:  # a session that ended is there again: the lock is its own
            with contextlib.suppress(AssertionError):
                wait_until(lambda: locked(self.db), 20)
        for device in [self._start(clock, **options) for _ in range(1 + (how == "two"))]:
            self._finish(device)
        self._settle()
        if watched:
            for call in self.calls:
                if call.call_id in before and not call.wav.exists():
                    self._break(f"{call.call_id}: deleted before it was quiet for {quiet} s")

    def the_service_works(
        self, plan: list[Meets], clock: str, size: int, kbps: int, asked: bool
    ) -> None:
        """It lives on until something ends it."""
        self._step("the service works:", clock, f"{size=} {kbps=} {asked=} {plan=}")
        self.asked_too = asked
        self._serve(plan, clock, size, kbps)

    def _serve(self, plan: list[Meets], clock: str = NOW, size: int = 100, kbps: int = 0) -> None:
        self.alone = True
        self.plan = [*(self.plan if self.thrifty else []), *plan][-12:]
        if self.service is None:
            options: dict[str, Any] = {"SYNC_BATCH_SIZE": size, "SYNC_UPLOAD_KBPS": kbps}
            self.service = self._start(clock, ("run",), **options)
            self.agents[self.service].wait_log("started")
        else:
            self._try_now(self.service)
        self._settle()
        for _ in plan:
            if self.plan and self.service is not None:
                self._try_now(self.service)
                self._settle()

    def _try_now(self, service: str) -> None:
        """An outage's pause is over."""
        self._pass()
        self.agents[service].hup()

    def _settle(self) -> None:
        """Until the service has done what it can."""
        begun = time.monotonic()

        def calm() -> bool:
            now = time.monotonic()
            quiet = 1.0 if self.plan else 0.4  # what shall be met may take a moment
            still = not self.witness.busy and now - max(self.witness.active, begun) > quiet
            return still or now - begun > 4

        if self.service is not None:
            wait_until(calm, 20, "the service to be at rest")
            self.steady.wait(60)
            agent = self.agents[self.service]
            if not agent.running:
                code = self._finish(str(self.service))
                if code not in (0, -signal.SIGKILL):
                    self._break(f"the service ended with {code}")

    def the_service_ends(self, which: int) -> None:
        self._end_service([signal.SIGTERM, signal.SIGKILL][which % 2])

    def _end_service(self, number: int) -> None:
        if self.service is not None:
            # One that was told to stop already may be past its handlers.
            usual = {0 if number == signal.SIGTERM else -number}
            if self.service in self._ended:
                usual |= {0, -number}
            self._ended.add(self.service)
            self.witness.excuse(self.service)
            self.agents[self.service].signal(number)
            code = self._finish(self.service)
            if code not in usual:
                self._break(f"the service ended with {code} by signal {number}")

    def an_outage(self, weather: str, doors: list[str], serve: bool) -> None:
        """For hours: nothing may die of it."""
        self._step("an outage:", weather, doors, f"{serve=}")
        self.weather = dict.fromkeys(doors, weather)
        for _ in range(3):
            if "entries" not in doors:  # they go on, and vouch for no file
                for which in range(3):
                    self.a_call_goes_on(which)
            if serve or self.service is not None:
                self._serve([])
            else:
                self._agents_run([])
            self._pass(1)
        self.weather = {}

    def small_things_happen(self, things: list[tuple[str, int]]) -> None:
        for what, which in things:
            self._step(what.replace("_", " "), which)
            World.seen[what] += 1
            getattr(self, what)(which)
            self.nothing_is_wrong()

    # -- what must hold --------------------------------------------------------------------------

    def _break(self, what: str) -> NoReturn:
        logs = [
            f"--- {name}\n{agent.log()}" for name, agent in self.agents.items() if agent.running
        ]
        self.story.append(f"BROKEN: {what}")
        raise Broken("\n".join([*self.story, *logs]))

    def nothing_is_wrong(self) -> None:
        with self._lock:  # no crash of the database meanwhile
            problems = self.witness.what_is_wrong()
        if problems:
            self._break("; ".join(problems))

    def close(self) -> None:
        for timer in self._timers:
            timer.join()
        for agent in self.agents.values():
            agent.close()
        for transaction in self.open:
            transaction.connection.close()
        self.frontend.stop()
        self.proxy.stop()
        self.steady.wait(60)
        self.db.drop()
        shutil.rmtree(self.directory, ignore_errors=True)

    def play(self, story: Sequence[Step]) -> None:
        self.some_calls_have_ended()
        for what, how in story:
            getattr(self, what)(**how)
            self.nothing_is_wrong()
        self.the_faults_stop()

    def the_faults_stop(self) -> None:
        """The faults stop: everything goes through, in order, and so does a fresh call."""
        self._step("the faults stop")
        self._end_service(signal.SIGTERM)
        self.plan = []
        self._come_up()
        self.proxy.resume()
        with self._lock:
            while self.open:
                self._commit(0)
            for call, files in self.late:
                if files == "late":
                    self._files_come(call, files)
                elif files == "meta is broken":
                    self.witness.kept.append(call.meta)
            self._end_call(0.05)
        # What is rejected rightly stays so; what the frontend was broken by does not.
        lasting = {"400", "422", "rejected"}
        self.grudges = {
            entity: grudge for entity, grudge in self.grudges.items() if grudge in lasting
        }
        self.nothing_is_wrong()
        self.witness.grace_is_over = True
        options: dict[str, Any] = {
            "SYNC_TIMEOUT_SEC": 20,
            "SYNC_FILE_GRACE_SEC": 0,
            "SYNC_POLL_INTERVAL_SEC": 1,
        }
        self.alone = True
        self.service = self._start(NOW, ("run",), **options)
        agent = self.agents[self.service]
        agent.wait_log("started")

        def through() -> bool:
            self._pass()
            time.sleep(0.1)
            return not self.witness.unfinished()

        try:
            wait_until(through, 60, "the end")
        except AssertionError:
            self._break(f"not through: {self.witness.unfinished()}\n{agent.log()[-5000:]}")
        self._end_service(signal.SIGTERM)
        self.nothing_is_wrong()
        if problems := self.witness.missed():
            self._break("; ".join(problems))
        World.seen["examples"] += 1
        World.seen["calls"] += len(self.calls)
        World.seen["agents"] += len(self.agents)


def step(name: str, **how: st.SearchStrategy[Any]) -> st.SearchStrategy[Step]:
    return st.tuples(st.just(name), st.fixed_dictionaries(how))


A_CALL_ENDS = step(
    "a_call_ends",
    seconds=st.sampled_from([0.05, 0.05, 1, 2]),
    events=st.integers(0, 2),
    files=st.sampled_from(FILES),
    late=st.sampled_from([False, False, True]),
    again=st.sampled_from([False, False, False, True]),
    grudge=st.sampled_from([None, None, None, None, *GRUDGES]),
)
SMALL = step(
    "small_things_happen",
    things=st.lists(st.tuples(st.sampled_from(SMALL_THINGS), NUMBERS), min_size=1, max_size=4),
)
AGENTS_RUN = step(
    "agents_run",
    plan=PLANS,
    how=st.sampled_from(["once", "once", "once", "two"]),
    clock=st.sampled_from([NOW, NOW, NOW, LAST_YEAR, NEXT_YEAR, BOOT]),
    size=st.sampled_from([1, 1, 3, 100]),
    quiet=st.sampled_from([0, 0, 60]),
    kbps=st.sampled_from([0, 0, 500]),
    asked=st.booleans(),
)
THE_SERVICE_WORKS = step(
    "the_service_works",
    plan=PLANS,
    clock=st.sampled_from([NOW, NOW, LAST_YEAR, BOOT]),
    size=st.sampled_from([1, 1, 3, 100]),
    kbps=st.sampled_from([0, 500]),
    asked=st.booleans(),
)
AN_OUTAGE = step(
    "an_outage",
    weather=st.sampled_from(WEATHERS),
    doors=st.sampled_from(
        [["empty", "entries", "file"], ["empty", "entries"], ["entries"], ["file"]]
    ),
    serve=st.sampled_from([True, True, False]),
)
WORK = st.one_of(AGENTS_RUN, AGENTS_RUN, THE_SERVICE_WORKS, THE_SERVICE_WORKS, AN_OUTAGE)
# What happens is drawn as a whole, and only then played: so it depends on nothing that a busy
# machine may change, and no example is given up half-way.
STORY = st.tuples(*[A_CALL_ENDS, A_CALL_ENDS, SMALL, WORK] * ROUNDS)


def varied(story: Sequence[Step]) -> bool:
    """Hypothesis begins with the simplest examples, which are all alike."""
    things = [thing for _, how in story for thing in [*how.get("plan", ()), *how.get("things", ())]]
    return len(set(map(str, things))) >= 4 * ROUNDS


# -- stories that must be among them: each needs several things to meet ----------------------------


def call(**how: object) -> Step:
    usual = {
        "seconds": 0.05,
        "events": 1,
        "files": "all",
        "late": False,
        "again": False,
        "grudge": None,
    }
    return "a_call_ends", usual | how


def agents(*plan: Meets, **how: object) -> Step:
    usual = {"how": "once", "clock": NOW, "size": 100, "quiet": 0, "kbps": 0}
    usual |= {"asked": False}
    return "agents_run", {"plan": list(plan)} | usual | how


def service(
    *plan: Meets, size: int = 100, kbps: int = 0, clock: str = NOW, asked: bool = False
) -> Step:
    how = {"size": size, "kbps": kbps, "clock": clock, "asked": asked}
    return "the_service_works", {"plan": list(plan)} | how


def outage(weather: str, *doors: str) -> Step:
    return "an_outage", {"weather": weather, "doors": list(doors), "serve": True}


def small(*things: str, which: int = 0) -> Step:
    return "small_things_happen", {"things": [(thing, which) for thing in things]}


TALES: dict[str, list[Step]] = {
    "false confirmations of entries": [
        call(),
        agents("a portal", "a portal", "a portal", "a portal"),
        small("hours_pass"),
        agents(*["409, still running"] * 8),
        small("hours_pass"),
        agents(*["not ok"] * 8),
        small("hours_pass"),
        agents(*["stored, a portal"] * 4),
        small("hours_pass"),
        agents(*["400, not ours"] * 8),
    ],
    "false confirmations of files": [
        agents(),
        call(seconds=2),
        # One plan: between two of them it might be sent, on a machine that is busy.
        service(
            "good",
            "an early 200",
            "wrong size",
            "wrong digest",
            "a portal",
            "409, still running",
            "not ok",
            "no words",
            "half an answer",
            "stored, half an answer",
            kbps=500,
        ),
    ],
    "nothing dies of an outage": [
        call(),
        outage("500", "entries"),
        outage("500", "entries", "empty"),
        outage("a portal", "file"),
        outage("a portal", "file"),
        call(),
        call(),
        call(),
        call(),
        outage("a login", "entries", "empty", "file"),
    ],
    "files vouch for files, hours must pass": [
        call(),
        service(),
        call(),
        call(),
        service("good", "500", "500"),
        call(),
        service("good", "500", "500", "500"),
        call(grudge="500"),
        service(),
        *[call(), call(), call(), service()] * 3,
        call(grudge="413"),
        service(),
        service(),
        small("hours_pass", which=2),
        *[call(), call(), call(), service()] * 3,
        service(),
    ],
    "a late snapshot keeps the player": [
        call(),
        service("good", ("the call goes on", "stored")),
        small("a_call_goes_on", which=2),
        service(),
        small("a_call_goes_on", "a_file_is_enqueued_again", which=0),
        service(),
        small("the_service_ends"),  # else the call may be through before the plan is there
        call(seconds=2),
        service("good", ("the call goes on", "before"), kbps=500),
    ],
    "a call that becomes visible behind the pass": [
        call(late=True),
        call(),
        call(),
        agents("good", "good", "good", ("late commits", "stored"), size=1),
        call(late=True),
        call(events=2),
        service("good", ("late commits", "stored"), size=1),
    ],
    "a file changes while it is sent": [
        call(),
        agents("good", ("the file changes", "stored")),
        small("hours_pass"),
        agents(),
    ],
    "a file changes after it was sent": [
        call(),
        agents(quiet=60),
        small("a_file_changes", which=2),
        agents(),
    ],
    "the disk is away when files could be deleted": [
        call(),
        agents(quiet=60),
        call(files="late"),
        small("the_recordings_directory_goes"),
        agents(),
        service(),
    ],
    "deletion waits": [
        call(files="transferred"),
        agents(quiet=60),
        agents(quiet=60, clock=LAST_YEAR),
        agents(quiet=60, clock=BOOT),
        call(files="transferred"),
        service(clock=BOOT),
        small("the_clock_steps", which=1),
        call(),
        service(),
    ],
    "the database goes when something is confirmed": [
        call(),
        agents(("database away", "stored")),
        *[call(), agents("good", ("database away", "stored"))] * 4,
        call(),
        agents(("kill", "stored")),
        call(),
        agents(("kill", "answered")),
        call(),
        service(("session ends", "stored"), ("database away", "stored")),
        call(),
        service(("session ends", "stored"), ("session ends", "stored")),
        call(),
        service(("crash", "answered"), ("kill", "answered")),
    ],
    "the database falls silent": [
        call(),
        agents(("database silent", "stored"), "good", ("database silent", "stored")),
        call(),
        agents(("database silent", "before"), size=1),
        call(),
        agents(("kill", "stored")),
        service(("database silent", "stored"), ("database silent", "before")),
        call(seconds=2),
        service("good", ("database silent", "answered"), kbps=500),
    ],
    "what is bad, and what stands behind it": [
        call(events=2, grudge="rejected"),
        agents(),
        call(events=2, grudge="500"),
        call(events=2, grudge="rejected"),
        call(events=2, grudge="413"),
        agents(),
        agents(size=1),
        call(events=2, grudge="a portal"),
        call(events=2, grudge="422"),
        service(size=1),
        small("hours_pass", which=2),
        service(),
    ],
    "a second recording": [
        call(),
        call(again=True),
        service("good", "good", "500"),
        service(),
        service(),
        call(),
        agents(),
        call(again=True),
        call(),
        call(again=True),
        service(),
    ],
    "files that are late or never come": [
        call(files="meta is late"),
        call(files="late"),
        call(files="never"),
        call(files="meta is broken"),
        agents(),
        *[service() for _ in range(5)],
        small("late_files_come", "late_files_come"),
        service(),
    ],
    "an entry of a call that waits, and what depends on it": [
        call(events=2, grudge="500"),
        small("a_call_goes_on", which=BARE + 2),
        service(size=3),
        call(grudge="a portal"),
        small("a_call_goes_on", which=3),
        small("a_call_goes_on", which=BARE + 3),
        service(size=1),
        small("a_call_goes_on", which=BARE + 2),
        small("a_call_goes_on", which=3),
        service(size=3),
        agents(),
        service(),
    ],
    "an outage that a probe ends": [
        call(events=2),
        call(),
        service("500", "500", asked=True),
        small("a_while_passes"),
        call(),
        service("good", "500", "500", asked=True, size=1),
        small("a_while_passes"),
    ],
    "two agents at once": [
        call(),
        call(),
        agents(how="two", size=1),
        call(),
        agents("good", ("session ends", "stored"), how="two", size=1),
        service(),
        call(),
        agents(size=1),
    ],
}


def play(world: World, story: Sequence[Step]) -> None:
    try:
        world.play(story)
    finally:
        world.close()


@pytest.mark.parametrize("tale", TALES)
def test_a_story_that_needs_several_things_to_meet_breaks_no_promise(
    cluster: Cluster, tmp_path: Path, tale: str
) -> None:
    World.seen.clear()
    try:
        play(World(cluster, tmp_path), TALES[tale])
    except Broken as broken:
        pytest.fail(str(broken), pytrace=False)
    told = {str(each) for _, how in TALES[tale] for each in how.get("plan", ())}
    told |= {how["weather"] for _, how in TALES[tale] if "weather" in how}
    assert not told - set(World.seen), "no request met this: the tale is not told"


def test_no_transaction_is_open_while_the_frontend_thinks(
    agent: AgentFactory, backend: Backend, frontend: Frontend, db: Database
) -> None:
    states = "select state from pg_stat_activity where datname = %s and application_name = %s"
    seen = set()

    def hook(request: Request) -> None:
        with db.connect() as own:
            params = (db.name, "serversync")
            wait_until(lambda: own.execute(states, params).fetchall() == [("idle",)])
        seen.add(request.kind)

    frontend.on_entries = frontend.on_file = hook
    backend.end_call()
    assert agent.once().returncode == 0
    assert seen == {"entries", "file"}


def test_a_pause_that_is_asked_for_when_an_entry_got_through_is_kept(
    agent: AgentFactory, backend: Backend, frontend: Frontend
) -> None:
    """The first entry and the empty request are told to wait; then the probe gets through, and the
    empty request behind it is told to wait longer."""
    pauses = iter(["1", "1", "", "3"])

    def hook(_: Request) -> Reply | None:
        seconds = next(pauses, "")
        return Reply(429, {"Retry-After": seconds}) if seconds else None

    frontend.on_entries = hook
    backend.enqueue_many(3)
    agent(SYNC_BATCH_SIZE=1)
    frontend.wait(lambda: len(frontend.entries) == 3)
    told, after = frontend.requests[3:5]
    assert told.status == 429 and told.finished is not None
    assert after.started - told.finished >= 2.9


@pytest.mark.timeout(36_000 if MORE else 600)
@pytest.mark.parametrize("shard", range(SHARDS))
def test_whatever_happens_in_whatever_order_nothing_is_lost(
    cluster: Cluster, tmp_path: Path, shard: int
) -> None:
    World.seen.clear()
    number = (SEED if MORE else 0) + shard

    @seed(number)
    @settings(
        max_examples=1_000_000,  # of which few are varied
        deadline=None,
        database=None,
        # No shrinking: an example takes seconds. Its steps are shown as they were.
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(story=STORY)
    def tell(story: Sequence[Step]) -> None:
        if varied(story):
            world = World(cluster, tmp_path)
            world.thrifty = True
            play(world, story)
            if World.seen["examples"] == EXAMPLES:
                raise Enough

    try:
        tell()
    except Broken as broken:
        pytest.fail(f"{broken}\n(seed {number})", pytrace=False)
    except Enough:
        print(f"seed {number}")
        print("\n".join(f"{what}: {count}" for what, count in sorted(World.seen.items())))
    assert World.seen["examples"] == EXAMPLES
    assert World.seen["calls"] >= 2 * ROUNDS * EXAMPLES
    different = ALL_MEETS & set(World.seen)
    assert len(different) >= min(5 * EXAMPLES, EXAMPLES + 20, 0.8 * len(ALL_MEETS)), sorted(
        different
    )

"""Everything at once, at random, from a seed: calls that end, and all that can go wrong meanwhile.

A pretended backend ends calls, a frontend misbehaves (weather.py), agents are killed, stopped,
frozen and given wrong clocks (crew.py), their database sessions end, PostgreSQL restarts, networks
fall silent, the recordings' disk goes. Then the faults stop, and the oracle has to be content.
`soak` beside this file runs it; the tests run a short one.
"""

from __future__ import annotations

import argparse
import contextlib
import operator
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg

import agent as agent_module
from backend import Backend, Call, random_call_id
from crew import GRACE_SEC, LIBFAKETIME, Crew, Device, Vitals, Way
from frontend import Reply, Request
from ledger import let_hours_pass
from oracle import Oracle
from pg import Cluster, Database
from proxy import Proxy
from waiting import wait_until
from weather import Repeat, Spells, Weather, digest

CALLS_PER_MINUTE = 280  # at most, in a hurry; else twice as many: to the end
FAULTS_PER_MINUTE = 3  # of the frontend, at least, on the slowest machine; usually some dozens
PENDING_MAX = 1500  # the backend of one house does not end more calls than that in an outage
BACKOFF_CAP = 256.0
DRAIN_SEC = 120.0
HURRY_SEC = 300.0
MARATHON_EVERY = 240.0  # an agent that may live for a minute
PRODUCERS = 7
MARKER = ".serversync-root"

SESSIONS = """
    select application_name, pid, state, xact_start::text, left(query, 60),
           extract(epoch from clock_timestamp() - xact_start)::float8,
           extract(epoch from clock_timestamp() - state_change)::float8
    from pg_stat_activity
    where datname = %s and application_name like 'agent-%%' and xact_start is not null
"""
END_SENDER = """
    select pg_terminate_backend(a.pid) from pg_stat_activity a join pg_locks l on l.pid = a.pid
    where l.locktype = 'advisory' and l.granted and a.datname = %s
      and a.application_name like 'agent-%%'
"""
END_ONE = "select pg_terminate_backend(pid) from pg_stat_activity where application_name = %s"
TABLES = """
    select c.relname, s.tuple_count, s.dead_tuple_count
    from pg_class c join pg_namespace n on n.oid = c.relnamespace, pgstattuple(c.oid) s
    where c.relkind = 'r' and (n.nspname = 'serversync' or c.relname = 'sync_outbox')
"""
CHARGES = """
    select (select coalesce(sum(value), 0)::bigint from serversync.counters
            where name = 'sent'),
           (select coalesce(array_agg(array[outbox_id, attempts]), '{}') from serversync.waiting)
"""
A_YEAR_AHEAD = """
    update serversync.waiting set next_attempt_at = next_attempt_at + interval '1 year'
    where outbox_id % 2 = 0 and next_attempt_at < 'infinity'
"""
DEAD = """
    select d.outbox_id, d.error_code, r.upload_status
    from serversync.dead_letters d
    left join recordings r on d.original_topic = 'recording_file' and r.id = d.entity_id
"""
# How long after an answer its sender may still try to write it down: a statement's deadline.
RECORDING_SEC = 20.0
LOOK_SEC = 8.0
BUSY_SEC = 2.0
# Between two statements of a transaction: as long as a busy machine may keep a process waiting. (A
# transaction during a request is found as such.)
IDLE_SEC = 1.0
UNNOTICED_SEC = 5.0
# When a stop ends what blocks, the request or the recording of its answer: after SIGTERM.
STOP_SEC = (0.8, 2.0)


@dataclass
class Sampler:
    """Looks at the agents' sessions while everything goes on."""

    database: Database
    frontend: Weather
    crew: Crew
    problems: list[str]
    samples: int = 0
    during: int = 0  # of these while a request was under way
    idle_seen: int = 0
    idle_while_frozen: int = 0
    longest_idle: float = 0.0
    _suspects: dict[tuple[str, int, str, Request], str] = field(default_factory=dict)

    def look(self) -> None:
        """Idle in a transaction, or in one older than the request, while a request is under way.

        Entries that are streamed, and those that go between two chunks of a recording, come by
        statements of their own: short, and younger than the request.
        """
        before = self.frontend.waiting()
        rows = self.database.rows(SESSIONS, (self.database.name,))
        now = time.monotonic()
        after = self.frontend.waiting()
        self.samples += 1
        self.during += any(before.values())
        suspects: dict[tuple[str, int, str, Request], str] = {}
        for name, pid, state, began, query, age, idle in rows:
            is_idle = str(state).startswith("idle in transaction")
            if is_idle:
                self._idle(name, now, idle)
            for request in before.get(name, []):
                # A busy frontend reads a request later than it is sent.
                older = now - age < request.started - BUSY_SEC
                if request in after.get(name, []) and (is_idle or older):
                    text = f"{state} since {idle:.3f} s, in a transaction since {began}: {query}"
                    suspects[name, pid, began, request] = text
        # Twice in a row: an answer may be on its way while the frontend still thinks of it.
        for name, pid, began, request in suspects.keys() & self._suspects.keys():
            age = time.monotonic() - request.started
            self.problems.append(
                f"{name}: its session was in a transaction during {request.method} "
                f"{request.path} of {age:.3f} s: {suspects[name, pid, began, request]}"
            )
        self._suspects = suspects

    def _idle(self, name: str, now: float, idle: float) -> None:
        """Between two statements of one transaction; a process that is stopped there stays so."""
        self.idle_seen += 1
        device = self.crew.all.get(name)
        ended = device is None or device.killed_at is not None
        if ended or (device is not None and device.frozen.overlaps(now - idle, now)):
            self.idle_while_frozen += 1
        else:
            self.longest_idle = max(self.longest_idle, idle)


class Soak:
    """One run: the actors, each with its own stream of chance, and what they count."""

    def __init__(self, directory: Path, cluster: Cluster, seed: int, minutes: float) -> None:
        self.cluster, self.seed, self.minutes = cluster, seed, minutes
        self.over = threading.Event()
        self.problems: list[str] = []
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        random.seed(seed)  # the backend's Call-IDs
        self.name = cluster.create()
        with cluster.admin(self.name) as admin, contextlib.suppress(psycopg.Error):
            admin.execute("create extension pgstattuple schema pg_catalog")
        self.proxy = Proxy("127.0.0.1", cluster.port)
        self.crew = Crew(self._way, self.over, self.count, self.problems)
        self.frontend = Weather(
            directory / "frontend", self.chance("answers"), self.crew.strike,
            self.end_session, self.crew.via_radio,
        )  # fmt: skip
        self.start_frontend()
        self.radio = Proxy("127.0.0.1", self.frontend.port)  # some agents' way to the frontend
        self.backend = Backend(self.database(), directory / "backend")
        self.mount = self._mount(self.backend.recordings_dir.parent)
        self.oracle = Oracle(self.database(), self.frontend, self.backend)
        self.database_spells, self.frontend_spells = Spells(), Spells()
        self.sampler = Sampler(self.database(), self.frontend, self.crew, self.problems)
        self.tokens, self.token_file = 0, directory / "token"
        self.renew_token()
        self.token_file.write_text(self.frontend.require_token or "")
        # Held by who writes to the recordings' disk or looks at it, and while it is away.
        self.disk = threading.Lock()
        self.doubtful: list[Call] = []  # the COMMIT was lost: there, or not
        self.doomed: dict[tuple[int, str], str] = {}  # entries that must die, and of what
        self.late_metas: list[tuple[float, Call]] = []
        self.waves: list[Vitals] = []
        self.marathons: list[str] = []
        self.radio_spells = Spells()  # of those whose way it is
        self.busy_until = float("inf")
        self._next_marathon = time.monotonic() + min(MARATHON_EVERY, minutes * 60) / 3

    def _way(self) -> Way:
        return Way(
            self.name, self.cluster, self.proxy, self.radio, self.frontend, self.backend,
            self.token_file,
        )  # fmt: skip

    @staticmethod
    def _mount(place: Path) -> Path | None:
        """Over itself, so that it can be made read-only; only root may."""
        if os.geteuid() != 0:
            return None
        subprocess.run(["mount", "--bind", place, place], check=True)
        return place

    def chance(self, actor: str) -> random.Random:
        return random.Random(f"{self.seed} {actor}")

    def database(self) -> Database:
        """A connection of one thread's own."""
        return Database(self.cluster, self.name)

    def count(self, what: str, by: int = 1) -> None:
        with self._lock:
            self._counts[what] += by

    def counts(self) -> Counter[str]:
        with self._lock:
            return Counter(self._counts)

    # -- the actors ------------------------------------------------------------------------------

    def actors(self, calls: int) -> list[threading.Thread]:
        acts: dict[str, Callable[[random.Random], None]] = {
            **{f"producer {n}": lambda rng: self.produce(rng, calls) for n in range(PRODUCERS)},
            "sender": lambda rng: self.drive_agent(rng, 3.0),
            "standby": lambda rng: self.drive_agent(rng, 2.5),
            "another standby": lambda rng: self.drive_agent(rng, 2.5),
            "database": self.shake_database,
            "weather": self.change_weather,
            "eras": self.change_era,
            "frontend's power": self.shake_frontend,
            "radio": self.shake_radio,
            "disk": self.shake_disk,
            "time": self.move_due_times,
            "sampler": self.watch,
        }
        return [
            threading.Thread(target=self._act, args=(name, act), name=name, daemon=True)
            for name, act in acts.items()
        ]

    def _act(self, name: str, act: Callable[[random.Random], None]) -> None:
        rng = self.chance(name)
        while not self.over.is_set():
            try:
                act(rng)
            except psycopg.Error:
                self.over.wait(0.2)  # the database is being restarted
            except Exception:
                self.problems.append(f"the soak's own {name} failed:\n{traceback.format_exc()}")
                return

    def pauses(self, rng: random.Random, mean: float) -> Iterator[None]:
        while not self.over.wait(min(rng.expovariate(1 / mean), 8 * mean)):
            yield

    # -- the backend -----------------------------------------------------------------------------

    def produce(self, rng: random.Random, calls: int) -> None:
        db = self.database()
        acts = {self.end_call: 16, self.end_odd_call: 1, self.say_more: 1, self.enqueue_one: 2}
        try:
            for _ in self.pauses(rng, 0.25):
                self.write_late_metas()
                if time.monotonic() > self.busy_until:
                    continue
                if len(self.oracle.calls) >= calls or len(db.pending()) > PENDING_MAX:
                    continue
                rng.choices(list(acts), list(acts.values()))[0](rng, db)
        finally:
            db.close()

    def end_call(self, rng: random.Random, db: Database) -> None:
        """One call in one transaction: mostly committed at once, at times late, or never."""
        call_log_id, call_id = str(uuid.UUID(int=rng.getrandbits(128))), random_call_id()
        recording = rng.random() < 0.45
        meta = rng.choices(("there", "late", "absent", "broken", "empty"), (60, 6, 1, 1, 1))[0]
        extra = ("b_leg.wav",) if recording and rng.random() < 0.15 else ()
        fate = rng.choices(("commit", "late", "roll back"), (7, 3, 1))[0]
        directory = self.backend.recordings_dir / call_id
        with contextlib.ExitStack() as stack:
            stack.callback(self._never_came, call_log_id, directory)
            with db.connect(autocommit=False) as connection:
                with self.disk:
                    call = self.backend.end_call(
                        recording=recording,
                        seconds=rng.choices((0.1, 0.5, 2, 10, 40), (60, 20, 10, 5, 1))[0],
                        events=rng.randrange(3),
                        call_id=call_id,
                        meta=meta == "there",
                        connection=connection,
                        call_log_id=call_log_id,
                        extra_files=extra,
                        seed=call_id,
                    )
                    self.oracle.kept += [directory / name for name in extra]
                    if recording and meta == "broken":
                        call.meta.write_text('{"callId": "')
                        self.oracle.kept.append(call.meta)
                    elif recording and meta == "empty":
                        call.meta.touch()
                if "ivr_session_event" in call.types and rng.random() < 0.06:
                    self.poison(rng, connection, call.seq("ivr_session_event"))
                elif rng.random() < 0.08:
                    self.frontend.sick[call_log_id] = time.monotonic() + rng.uniform(2, 15)
                    self.count("calls whose first entry gets 500 for a while")
                if fate != "commit":
                    self.over.wait(rng.uniform(0.05, 3))
                if fate == "roll back":
                    connection.rollback()
                    self.count("calls rolled back")
                    return
                stack.pop_all()
                self._commit(connection, call)
            self.count("calls committed late" if fate == "late" else "calls committed at once")
            self._after_the_call(rng, call, meta)

    def _after_the_call(self, rng: random.Random, call: Call, meta: str) -> None:
        if not call.size:
            return
        if meta == "late":
            self.late_metas.append((time.monotonic() + rng.uniform(0.2, 4), call))
        if meta != "there":
            self.count(f"meta.json {meta}")
        elif rng.random() < 0.15:
            self.write_leg(rng, call)

    def poison(self, rng: random.Random, connection: psycopg.Connection[Any], seq: int) -> None:
        """The frontend rejects this entry for good: the request, or it alone."""
        row = connection.execute(
            "select entity_id::text from sync_outbox where id = %s", (seq,)
        ).fetchone()
        assert row is not None
        if rng.random() < 0.5:
            self.frontend.poison[row[0]] = Reply(400, {}, {"error": "never"})
            self._doom(seq, row[0], "BAD_REQUEST")
        else:
            self.frontend.rejected[row[0]] = "NEVER"
            self._doom(seq, row[0], "REJECTED")

    def _doom(self, seq: int, entity_id: str, code: str) -> None:
        """If it is committed: a crash may take the number back, and give it to another one."""
        self.doomed[seq, entity_id] = code
        self.count(f"doomed: {code}")

    def end_odd_call(self, rng: random.Random, db: Database) -> None:
        """A call whose recording can never be delivered: it dies alone, and its files stay."""
        odd = rng.choice(("no file", "no directory", "empty", "outside", "second", "second"))
        first = self._done(rng)
        if odd == "second" and first is None:
            return
        with db.connect(autocommit=False) as connection:
            with self.disk:
                call = self.backend.end_call(
                    seconds=0.1,
                    connection=connection,
                    audio=odd not in ("no file", "no directory"),
                    meta=odd != "no directory",
                    call_log_id=first.call_log_id if odd == "second" and first else None,
                    file_path="storage/recordings/../x/mixed.wav" if odd == "outside" else None,
                )
                call.size = 0  # the oracle shall not expect it
                if odd == "empty":
                    os.truncate(call.wav, 0)
                if odd == "no directory":
                    call.directory.rmdir()
                else:
                    self.oracle.kept += list(call.directory.iterdir())
            codes = {"second": "SECOND_RECORDING", "outside": "FILE_UNSAFE"}
            seq, code = call.seq("recording_file"), codes.get(odd, "FILE_MISSING")
            self._doom(seq, call.recording_id, code)
            self._commit(connection, call)
        self.count(f"calls with a bad recording: {odd}")

    def _never_came(self, call_log_id: str, directory: Path) -> None:
        """What was written for it is not the agent's to touch."""
        self.oracle.never.add(call_log_id)
        with self.disk:
            if directory.exists():
                self.oracle.kept += list(directory.iterdir())

    def _commit(self, connection: psycopg.Connection[Any], call: Call) -> None:
        try:
            connection.commit()
        except psycopg.Error:
            self.doubtful.append(call)
            self.count("calls with a lost COMMIT")
            raise
        self.oracle.calls.append(call)

    def write_late_metas(self) -> None:
        with self._lock:
            due = [item for item in self.late_metas if item[0] <= time.monotonic()]
            self.late_metas = [item for item in self.late_metas if item not in due]
        for _, call in due:
            # Its directory may be gone: after the grace time it was sent with a meta.json made up.
            with self.disk, contextlib.suppress(FileNotFoundError):
                self.backend.write_meta(call)

    def write_leg(self, rng: random.Random, call: Call) -> None:
        """The backend's background task: another track, at a bad moment."""
        self.over.wait(rng.uniform(0, 1.5))
        path = call.directory / "a_leg.wav"
        with self.disk, contextlib.suppress(FileNotFoundError), path.open("xb") as file:
            file.write(b"a leg")
            self.oracle.kept.append(path)
            self.count("tracks written beside a recording")

    def _done(self, rng: random.Random) -> Call | None:
        done = [call for call in self.oracle.calls[-50:] if call.size]
        return rng.choice(done) if done else None

    def say_more(self, rng: random.Random, db: Database) -> None:
        """A recording again, from a snapshot of before its upload."""
        call = self._done(rng)
        if call is None:
            return
        payload = {
            "id": call.recording_id,
            "callLogId": call.call_log_id,
            "uploadStatus": "local_only",
            "transcript": "ring " * rng.choice((1, 100, 20_000)),
        }
        with db.connect(autocommit=False) as connection:
            self.backend.enqueue("recording", payload, call.recording_id, connection)
            connection.commit()
        self.count("recordings enqueued again")

    def enqueue_one(self, rng: random.Random, db: Database) -> None:
        """A settings entity; one in eight is rejected for good, some are too large."""
        entity_id = str(uuid.UUID(int=rng.getrandbits(128)))
        sizes, often = (10, 5_000, 700_000, 1_200_000), (10, 5, 4, 1)
        size = rng.choices(sizes, often)[0]
        payload = {"id": entity_id, "text": "x" * size}
        with db.connect(autocommit=False) as connection:
            seq = self.backend.enqueue("schedule", payload, entity_id, connection)
            if size > 1_000_000:
                self._doom(seq, entity_id, "TOO_LARGE")
            elif rng.random() < 1 / 8:
                self.poison(rng, connection, seq)
            connection.commit()
        self.count("settings entries")

    # -- the agents ------------------------------------------------------------------------------

    def drive_agent(self, rng: random.Random, mean: float) -> None:
        """One agent after the other; the last one goes on when everything is over."""
        for _ in self.pauses(rng, 0.15):
            device = self.crew.start(rng)
            if rng.random() < 0.75:  # the others may end while they start
                while device.agent.running and not device.started() and not self.over.wait(0.03):
                    pass
            life = time.monotonic() + rng.expovariate(1 / mean)
            if time.monotonic() > self._next_marathon:
                self._next_marathon = time.monotonic() + MARATHON_EVERY
                device.spared = True
                life = time.monotonic() + min(40.0, self.minutes * 6)
            first: Vitals | None = None
            while device.agent.running and not self.over.wait(0.05):
                chance = rng.random()
                if time.monotonic() > life:
                    self._end_agent(rng, device, first)
                elif chance < 0.005:
                    self.crew.reload(device)
                elif chance < 0.008:
                    self.crew.freeze(device, rng.uniform(0.3, 4))
                elif chance < 0.02:
                    self.crew.set_clock(device, rng)
                if device.spared and first is None and time.monotonic() > life - 35:
                    with contextlib.suppress(OSError):
                        first = Vitals.of(device.agent) if device.started() else None
            if not device.agent.running:
                self.crew.reap(device)

    def _end_agent(self, rng: random.Random, device: Device, first: Vitals | None) -> None:
        if first is not None:
            last = Vitals.of(device.agent)
            self.marathons.append(f"{first.rss_kib} to {last.rss_kib}")
            # In the middle of its work it has some directories open.
            if last.rss_kib > 1.3 * first.rss_kib + 8192 or last.fds > self.first.fds + 8:
                self.problems.append(f"{device.name}: not flat: {first}, later {last}")
        if rng.random() < 0.88:
            self.crew.kill(device)
        else:
            self.crew.terminate(device)
        with contextlib.suppress(AssertionError):
            device.agent.wait(30)

    # -- the surroundings ------------------------------------------------------------------------

    def shake_database(self, rng: random.Random) -> None:
        for _ in self.pauses(rng, 5.0):
            acts: dict[str, tuple[int, Callable[[], object]]] = {
                "sessions of the sender ended": (12, self._end_sender),
                "database connections cut": (6, self.proxy.cut),
                "database silent for a while": (3, lambda: self._silent(rng.uniform(0.5, 5))),
                "database connections half-open": (3, lambda: self._half_open(rng.uniform(1, 6))),
                "database slow for a while": (3, lambda: self._slow(rng.uniform(0.5, 3))),
                "database restarts (fast)": (1, lambda: self.cluster.restart("fast")),
                "database crashes": (2, lambda: self.cluster.restart("immediate")),
            }
            what = rng.choices(list(acts), [weight for weight, _ in acts.values()])[0]
            self.count(what)
            with self.database_spells.spell():
                acts[what][1]()

    def end_session(self, device: str) -> None:
        """At a bad moment: its answer is on the way."""
        with (
            contextlib.suppress(psycopg.Error),
            self.database_spells.spell(),
            self.cluster.admin() as admin,
        ):
            self.count("sessions ended", admin.execute(END_ONE, (device,)).rowcount)

    def _end_sender(self) -> None:
        with self.cluster.admin() as admin:
            ended = admin.execute(END_SENDER, (self.name,)).rowcount
        self.count("sessions ended", ended)

    def _silent(self, seconds: float) -> None:
        self.proxy.silent()
        self.over.wait(seconds)
        self.proxy.resume()

    def _half_open(self, seconds: float) -> None:
        """New connections are good; the old ones end when keepalives would have noticed."""
        self.proxy.silence_open()
        self.over.wait(seconds)
        self.proxy.cut()

    def _slow(self, seconds: float) -> None:
        self.proxy.slow(20_000)
        self.over.wait(seconds)
        self.proxy.resume()

    def change_weather(self, rng: random.Random) -> None:
        for _ in self.pauses(rng, 1.5):
            self.frontend.trouble = rng.choice((0.0, 0.1, 0.3, 0.5, 0.8))

    def change_era(self, rng: random.Random) -> None:
        """For some seconds everybody gets the same answer: nobody's entries are to blame."""
        for _ in self.pauses(rng, 25.0):
            eras: dict[str, Callable[[Request], Reply]] = {
                "captive portal": lambda _: Reply(200, {}, "<html>please pay</html>"),
                "captive portal that redirects": lambda _: Reply(302, {"Location": "/pay"}, "pay"),
                "everything is 503": lambda _: Reply(503, {}, "<html>busy</html>"),
                "everything is 404": lambda _: Reply(404, {}, "<html>not here</html>"),
                "everything is 429": lambda _: self.frontend.rate_limited(),
                "nothing answers": lambda _: Reply(stall=3),
            }
            what = rng.choice([*eras, "token expired", "token expired"])
            self.count(f"era: {what}")
            with self._charge_nobody(what, rng.uniform(1, 7)):
                if what == "token expired":
                    self.renew_token()
                else:
                    self.frontend.era = eras[what]
            if what == "token expired":
                self.hand_out_token()
            self.frontend.era = None

    @contextlib.contextmanager
    def _charge_nobody(self, what: str, seconds: float) -> Iterator[None]:
        """Without a success in between an entry is charged once at most, for what was before."""
        db = self.database()
        try:
            yield
            self.over.wait(0.7)
            sent, before = self._charges(db)
            self.over.wait(seconds)
            later, after = self._charges(db)
        finally:
            db.close()
        if sent != later:
            return  # what was under way when it began
        self.count("eras without any success")
        for seq, attempts in after.items():
            if attempts - before.get(seq, 0) > 1:
                self.problems.append(
                    f"{what}: entry {seq} was charged: {before.get(seq)} attempts, then {attempts}"
                )

    @staticmethod
    def _charges(db: Database) -> tuple[int, dict[int, int]]:
        sent, waiting = db.rows(CHARGES)[0]
        return sent, dict(waiting)

    def renew_token(self) -> None:
        self.tokens += 1
        self.frontend.require_token = f"token-{self.seed}-{self.tokens}"

    def hand_out_token(self) -> None:
        new = self.token_file.with_suffix(".new")
        new.write_text(self.frontend.require_token or "")
        new.rename(self.token_file)
        for device in list(self.crew.running.values()):
            self.crew.reload(device)

    def shake_frontend(self, rng: random.Random) -> None:
        for _ in self.pauses(rng, 14.0):
            with self.frontend_spells.spell():
                if rng.random() < 0.3:
                    self.count("frontend hung up on everybody")
                    self.frontend.hang_up()
                else:
                    self.count("frontend stopped for a while")
                    self.frontend.stop()
                    self.over.wait(rng.uniform(0.2, 3))
                    self.start_frontend()

    def start_frontend(self) -> None:
        def started() -> bool:
            try:
                self.frontend.start()
            except OSError as error:  # an agent's own connection may hold the port for a moment
                raise LookupError from error
            return True

        wait_until(started, 30, "the frontend's port")

    def shake_radio(self, rng: random.Random) -> None:
        """The network to the frontend. What it held back is dropped: late, it would be a fault of
        the network's that no sender can mend."""
        for _ in self.pauses(rng, 8.0):
            acts: dict[str, Callable[[], object]] = {
                "radio silent for a while": self.radio.silent,
                "radio connections half-open": self.radio.silence_open,
                "radio slow for a while": lambda: self.radio.slow(100_000),
                "radio gone for a while": self.radio.refuse,
                "radio connections cut": lambda: None,
            }
            what = rng.choice(list(acts))
            self.count(what)
            with self.radio_spells.spell():
                acts[what]()
                if "cut" not in what:
                    self.over.wait(rng.uniform(0.5, 4))
                self.radio.cut()
                self.radio.resume()

    def shake_disk(self, rng: random.Random) -> None:
        for _ in self.pauses(rng, 20.0):
            with self.disk:
                # At times for longer than the grace time of a missing file.
                seconds = GRACE_SEC * 1.6 if rng.random() < 0.1 else rng.uniform(0.2, 3)
                if self.mount is None or rng.random() < 0.6:
                    self._take_away_root(rng, seconds)
                else:
                    self._read_only(self.mount, seconds)

    def _take_away_root(self, rng: random.Random, seconds: float) -> None:
        """Not mounted: an empty directory, or one with another root's marker."""
        root = self.backend.recordings_dir
        away = root.with_name("away")
        self.count("recordings root away for a while")
        root.rename(away)
        root.mkdir()
        marker = root / MARKER
        if rng.random() < 0.3:
            marker.write_text("of another root\n")
        self.over.wait(seconds)
        marker.unlink(missing_ok=True)
        strange = list(root.iterdir())
        if strange:
            self.problems.append(f"somebody wrote into the mount point: {strange}")
        for path in strange:
            path.rename(away / f"strange-{path.name}")
        root.rmdir()
        away.rename(root)

    def _read_only(self, mount: Path, seconds: float) -> None:
        if self._remount(mount, "ro"):
            self.count("recordings read-only for a while")
            self.over.wait(seconds)
            wait_until(lambda: self._remount(mount, "rw"), 20, "the disk to be writable")

    @staticmethod
    def _remount(mount: Path, how: str) -> bool:
        command = ["mount", "-o", f"remount,bind,{how}", str(mount)]
        return not subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode

    def move_due_times(self, rng: random.Random) -> None:
        """So that backoff does not cost minutes. As if a clock had been set back, too."""
        db = self.database()
        try:
            for _ in self.pauses(rng, 2.5):
                with contextlib.suppress(psycopg.errors.UndefinedTable):
                    let_hours_pass(db)
                    if rng.random() < 0.2:
                        self.count("due times that lie a year ahead", db.execute(A_YEAR_AHEAD))
        finally:
            db.close()

    # -- watching --------------------------------------------------------------------------------

    def watch(self, _: random.Random) -> None:
        due = time.monotonic() + 1
        while not self.over.wait(0.05):
            self.sampler.look()
            if time.monotonic() >= due:
                due = time.monotonic() + 6
                self.check_losses()
                self.measure()

    def check_losses(self) -> None:
        with self.disk:
            lost = self.oracle.lost(anew=False)
        self.count("looks of the oracle in the middle of it")
        if lost:
            self.problems += [f"in the middle of it: {problem}" for problem in lost[:5]]

    def measure(self) -> None:
        for device in list(self.crew.running.values()):
            with contextlib.suppress(OSError, AssertionError):
                if device.started():
                    fds = Vitals.of(device.agent).fds
                    self.waves.append(Vitals(device.agent.rss_peak_kib(), fds))

    def tuples(self) -> dict[str, tuple[int, int]]:
        """Live and dead ones of the agent's tables and of the outbox."""
        try:
            with self.cluster.admin(self.name) as admin:
                return {name: (live, dead) for name, live, dead in admin.execute(TABLES)}
        except psycopg.errors.UndefinedFunction:
            return {}

    # -- the run ---------------------------------------------------------------------------------

    def run(self, hurry: bool, at_least: tuple[int, int]) -> bool:
        """The storm, the calm after it, the verdict and the summary; whether all is well."""
        if hurry:  # the last third is for what has piled up: it shall meet the faults, too
            self.busy_until = time.monotonic() + self.minutes * 40
        trouble, self.frontend.trouble = self.frontend.trouble, 0.0
        first, tuples = self.first_call(), self.tuples()
        self.first = first
        self.frontend.trouble = trouble
        actors = self.actors(int(self.minutes * CALLS_PER_MINUTE * (1 if hurry else 2)))
        for actor in actors:
            actor.start()
        self._storm(at_least)
        self.over.set()
        for actor in actors:
            actor.join(120)
            if actor.is_alive():
                self.problems.append(f"the soak's own {actor.name} does not end")
        took = self.settle(hurry)
        self.lonely()
        repeats = self.judge()
        last, after = self.fresh_call(), self.tuples()
        reached = len(self.oracle.calls), self.counts()["kills (SIGKILL)"]
        enough = sum(self.frontend.faults.values()) >= self.minutes * FAULTS_PER_MINUTE
        if not enough or any(map(operator.lt, reached, at_least)):
            self.problems.append(f"too few faults, calls or kills ({reached}): this says nothing")
        if LIBFAKETIME is None:
            self.problems.append("no libfaketime: all clocks were right")
        if not self.sampler.during:
            self.problems.append("no look at the sessions met a request under way")
        if self.sampler.longest_idle > IDLE_SEC:
            self.problems.append(f"idle in a transaction for {self.sampler.longest_idle:.3f} s")
        if not last.is_flat_beside(first):
            self.problems.append(f"not flat: {first} at the start, {last} at the end")
        self.stop_agents()
        print(Summary(self, took, repeats, first, last, tuples, after).text())
        return not self.problems

    def _storm(self, at_least: tuple[int, int]) -> None:
        """So many minutes; up to a fifth more until there were so many calls and kills."""
        began = time.monotonic()
        end = began + self.minutes * 60
        while time.monotonic() < end:
            self.over.wait(min(60, end - time.monotonic()))
            self._say_how_far()
            reached = len(self.oracle.calls), self.counts()["kills (SIGKILL)"]
            if any(map(operator.lt, reached, at_least)) and time.monotonic() >= end:
                end = min(time.monotonic() + 30, began + self.minutes * 72)
        self.lasted = (time.monotonic() - began) / 60

    def _say_how_far(self) -> None:
        counts = self.counts()
        print(
            f"{time.strftime('%H:%M:%S')} calls {len(self.oracle.calls)}, kills "
            f"{counts['kills (SIGKILL)']}, requests {self.frontend.count_requests}, "
            f"problems {len(self.problems)} {self.problems[:1]}",
            flush=True,
        )

    def first_call(self) -> Vitals:
        """Of the second agent: the first one compiles the program."""
        for _ in range(2):
            device = self.crew.start(self.chance("first"), calm=True)
            call = self.oracle.end_call(seconds=0.5)
            wait_until(lambda: not call.directory.exists(), 60, "the first call", device.agent.log)  # noqa: B023
            vitals = Vitals.at_rest(device.agent)
            self.crew.terminate(device)
            self.crew.reap(device)
        return vitals

    def settle(self, hurry: bool) -> float:
        """The faults stop: how long until everything is through."""
        if not self.cluster.running:
            self.cluster.start()
        self.proxy.cut()
        self.proxy.resume()
        self.radio.cut()
        self.radio.resume()
        self.frontend.trouble, self.frontend.era = 0.0, None
        self.crew.set_clocks_right()
        # Any token will do: to hand out a new one would wake who waits after an outage.
        self.frontend.require_token = None
        self.late_metas = [(0.0, call) for _, call in self.late_metas]
        self.write_late_metas()
        self.resolve_doubts()
        for entity_type in ("schedule", "ivr_session_event"):
            self.backend.enqueue(entity_type)  # nine rejected in a row: the tenth waits for one
        self.frontend.sick.clear()
        calm = self.crew.start(self.chance("last"), calm=True)
        began = time.monotonic()
        wait_until(calm.started, 60, "the last agent")
        looked = 0.0

        def finished() -> bool:
            nonlocal looked
            if time.monotonic() - looked < 1:
                return False
            looked = time.monotonic()
            let_hours_pass(self.oracle.db)  # an entry's own pause may be an hour by now
            if hurry:
                self.try_now()
            return not self.oracle.unfinished()

        pause = max(0.0, sum(self.frontend.last_pause) - began)
        self.allowed = HURRY_SEC if hurry else max(BACKOFF_CAP, pause) + DRAIN_SEC
        try:
            wait_until(finished, self.allowed, "the rest")
        except AssertionError:
            left = self.oracle.unfinished()
            logs = "\n".join(
                re.sub("the configuration was read again\n", "", device.agent.log())[-1500:]
                for device in self.crew.running.values()
            )
            self.problems += [f"not through at the end: {left[:10]} ({len(left)})\n{logs}"]
        return time.monotonic() - began

    def lonely(self) -> None:
        """One entry alone, while everybody gets 503: no attempt of it is used up."""
        self.frontend.era = lambda _: Reply(503, {}, "<html>busy</html>")
        seq = self.backend.enqueue()
        query = "select tries, attempts from serversync.waiting where outbox_id = %s"

        def tried() -> tuple[int, int] | None:
            self.try_now()
            time.sleep(0.3)
            rows = self.oracle.db.rows(query, (seq,))
            return rows[0] if rows and rows[0][0] >= 5 else None

        try:
            tries, attempts = wait_until(tried, 60, "some tries of an entry") or (0, 0)
            if attempts > 1:
                self.problems.append(f"charged {attempts} of {tries} tries in an outage")
        except AssertionError as error:
            self.problems.append(str(error))
        self.frontend.era = None

        def through() -> bool:
            self.try_now()
            time.sleep(0.3)
            return not self.oracle.db.pending()

        try:
            wait_until(through, 60, "the lonely entry")
        except AssertionError as error:
            self.problems.append(str(error))

    def try_now(self) -> None:
        for device in list(self.crew.running.values()):
            self.crew.reload(device)

    def resolve_doubts(self) -> None:
        """A COMMIT whose answer was lost: the database knows."""
        query = "select count(*) from sync_outbox where id = %s and entity_id = %s"
        for call in self.doubtful:
            if self.oracle.db.value(query, (call.seqs[0], call.call_log_id)):
                self.oracle.calls.append(call)
            elif call.size:
                self._never_came(call.call_log_id, call.directory)
        there = set(self.oracle.db.rows("select id, entity_id::text from sync_outbox"))
        self.doomed = {entry: code for entry, code in self.doomed.items() if entry in there}
        self.oracle.doomed = {seq for seq, _ in self.doomed}

    def judge(self) -> Counter[str]:
        """The oracle's verdict, and why something arrived twice."""
        wrong = self.oracle.wrong() + self.wrong_deaths() + self.wrong_payloads()
        # Whose session ended has thrown away what it was told.
        wrong += [
            f"{name}: {what}"
            for name, told, sent, what in self.frontend.impatient
            if not (self.database_spells.overlaps(told - 1.0, sent) or self.crew.all[name].fenced)
        ]
        self.problems += wrong[:20]
        if len(wrong) > 20:
            self.problems.append(f"and {len(wrong) - 20} more")
        for device in list(self.crew.running.values()):
            self.crew.read(device, device.agent.log())
        why: Counter[str] = Counter()
        for repeat in self.frontend.repeats:
            reason = self.reason(repeat)
            why[reason] += 1
            if reason == "without a reason":
                before, now = repeat.before, repeat.now
                sender = self.crew.all[before.device]
                self.problems.append(
                    f"a {repeat.what} was sent again by {now.device} at {now.request.started:.2f}; "
                    f"{before.device} had its answer at {before.request.finished:.2f} "
                    f"({before.request.status}, {before.fault or 'no fault'}), was asked to stop "
                    f"at {sender.terminated_at}, killed at {sender.killed_at}, and said at last:\n"
                    f"{sender.last_words}"
                )
        return why

    def reason(self, repeat: Repeat) -> str:
        """Why its sender could not know, or not write down, that it had arrived."""
        before, again = repeat.before, repeat.now.request.started
        start, end = before.request.started, before.request.finished or before.request.started
        if repeat.what == "file":  # its sender asks by HEAD, three times if need be
            end = max(end, before.known) + LOOK_SEC
        device = self.crew.all[before.device]
        soon = min(again, end + RECORDING_SEC)
        if before.answer_lost:
            return "after an answer that was lost or is not the contract's"
        # (It may have sent that before: what a dead one sent is still read.)
        if device.killed_at is not None and device.killed_at <= again:
            return "after a kill before the answer was written down"
        stop = device.terminated_at
        if stop is not None and start <= stop + STOP_SEC[1] and stop + STOP_SEC[0] <= again:
            return "after a stop that could not wait until the answer was written down"
        radio = device.radio and self.radio_spells.overlaps(start, end + 0.3)
        if radio or self.frontend_spells.overlaps(start, end + 0.3):
            return "after the network to the frontend broke"
        if self.database_spells.overlaps(start, soon) or device.fenced:
            return "after the database was lost before the answer was written down"
        if device.frozen.overlaps(start, end):
            return "after its sender stood still, and the time was up"
        # Who is in the middle of a request does not see that its session has ended, and that
        # another one has taken over: the two of them send the same.
        first = min(start, again)
        if before.device != repeat.now.device and self.database_spells.overlaps(
            first - UNNOTICED_SEC, max(start, again)
        ):
            return "at a take-over after a session was lost"
        return "without a reason"

    def wrong_deaths(self) -> list[str]:
        """Who had to die is dead, of the right reason, and its recording is shown as failed."""
        problems = []
        dead = {seq: (code, status) for seq, code, status in self.oracle.db.rows(DEAD)}
        for (seq, _), code in self.doomed.items():
            if dead.get(seq, ("",))[0] != code:
                problems.append(f"entry {seq} should be dead by {code}, but: {dead.get(seq)}")
        for seq, (code, status) in dead.items():
            if status not in (None, "upload_failed"):
                problems.append(f"recording {seq} is dead ({code}), its row says {status}")
        return problems

    def wrong_payloads(self) -> list[str]:
        """What arrived is what was committed, in each of its arrivals."""
        problems = []
        query = "select id, payload from sync_outbox where entity_type <> 'recording_file'"
        with (
            self.oracle.db.connect(autocommit=False) as connection,
            connection.cursor("payloads") as cursor,
        ):
            cursor.itersize = 200
            for seq, payload in cursor.execute(query):
                if self.frontend.digests.get(seq, set()) - {digest(payload)}:
                    problems.append(f"entry {seq} arrived as something else")
        return problems

    def fresh_call(self) -> Vitals:
        """Goes through as if nothing had been."""
        running = [each.agent for each in self.crew.running.values() if each.agent.running]
        if not running:
            self.problems.append("no agent runs at the end")
            return Vitals(0, 0)
        call = self.oracle.end_call(seconds=0.5)
        try:
            wait_until(
                lambda: self.oracle.confirmed(call) and not call.directory.exists(),
                30,
                "a fresh call",
                running[0].log,
            )
        except AssertionError as error:
            self.problems.append(str(error)[-3000:])
        return max(map(Vitals.at_rest, running), key=lambda vitals: vitals.rss_kib)

    def stop_agents(self) -> None:
        for device in list(self.crew.running.values()):
            if device.agent.running:
                self.crew.terminate(device)
            self.crew.reap(device)

    def close(self) -> None:
        self.over.set()
        self.crew.close()
        self.frontend.stop()
        self.radio.stop()
        self.proxy.stop()
        if self.mount is not None:
            subprocess.run(["umount", "-l", self.mount], check=False)


@dataclass
class Summary:
    """What is printed at the end: everything, and a table in Markdown."""

    soak: Soak
    took: float
    repeats: Counter[str]
    first: Vitals
    last: Vitals
    before: dict[str, tuple[int, int]]
    after: dict[str, tuple[int, int]]

    def text(self) -> str:
        soak, faults = self.soak, self.soak.frontend.faults
        odd = [*soak.crew.odd[:5], *(f"{n}: {line}" for line, n in soak.crew.said.items())]
        lines = [
            "",
            *(f"  {what}: {number}" for what, number in sorted(soak.counts().items())),
            f"  faults of the frontend: {sum(faults.values())}",
            *self._columns([f"{fault} {number}" for fault, number in sorted(faults.items())]),
            f"  requests that were stored and whose answer was lost: {soak.frontend.lost_answers}",
            f"  recordings that arrived with a meta.json made up: {soak.frontend.made_up}",
            f"  live and dead tuples at the start: {self.before}",
            f"  live and dead tuples at the end: {self.after}",
            f"  RSS of agents that lived for a minute, KiB: {', '.join(soak.marathons) or 'none'}",
            f"  slowest stop {soak.crew.slowest_stop:.1f} s",
            *(f"  odd: {text}" for text in odd),
            "",
            "| | |",
            "|---|---|",
            *(f"| {name} | {value} |" for name, value in self._table().items()),
            "",
            *(f"PROBLEM: {problem}" for problem in soak.problems[:30]),
            f"{'FAILED' if soak.problems else 'passed'}: {len(soak.problems)} problems",
        ]
        return "\n".join(lines)

    def _table(self) -> dict[str, object]:
        soak, counts = self.soak, self.soak.counts()
        calls, frontend, sampler = soak.oracle.calls, soak.frontend, soak.sampler
        eras = sum(number for what, number in counts.items() if what.startswith("era:"))
        surroundings = ("database", "radio", "frontend", "recordings", "clocks", "agents frozen")
        around = sum(number for what, number in counts.items() if what.startswith(surroundings))
        peak = max(soak.waves, key=lambda vitals: vitals.rss_kib, default=self.last).rss_kib
        most = max((vitals.fds for vitals in soak.waves), default=0)
        lost = [p for p in soak.problems if "never arrived" in p and "recording" not in p]
        gone = [p for p in soak.problems if "file is gone" in p or "its recording never" in p]
        justified = sum(self.repeats.values()) - self.repeats["without a reason"]
        reasons = ", ".join(f"{n} {why}" for why, n in sorted(self.repeats.items()))
        idle = sampler.idle_seen - sampler.idle_while_frozen
        return {
            "minutes of faults; seed": f"{soak.lasted:.0f}; {soak.seed}",
            "calls": f"{len(calls)}, with a recording {sum(bool(c.size) for c in calls)}",
            "entries accepted by the frontend": len(frontend.entries),
            "recordings accepted": len(frontend.uploads),
            "HTTP requests": frontend.count_requests,
            "faults of the frontend": sum(frontend.faults.values()),
            "of all surroundings (databases, networks, disks, clocks, processes)": around,
            "spells of the same bad answer for everybody (portal, 401, 429, 5xx)": eras,
            "kill -9": f"{counts['kills (SIGKILL)']}, while a request was under way "
            f"{counts['kills while a request was under way']}",
            "SIGTERM, SIGHUP, frozen": f"{counts['stops (SIGTERM)']}, "
            f"{counts['reloads (SIGHUP)']}, {counts['agents frozen for a while']}",
            "database sessions ended; crashes; restarts": f"{counts['sessions ended']}; "
            f"{counts['database crashes']}; {counts['database restarts (fast)']}",
            "lost entries": len(lost),
            "lost recordings": len(gone),
            "dead letters, all of them due": len(soak.doomed),
            "arrived twice": f"{sum(self.repeats.values())}, with a reason {justified}: {reasons}",
            "looks at the sessions, those while a request was under way; in a transaction since "
            "before it, or idle in one": f"{sampler.samples}, {sampler.during}; "
            f"{sum('in a transaction during' in p for p in soak.problems)}",
            "idle between two statements of a transaction": f"{idle} times, "
            f"{sampler.longest_idle * 1000:.0f} ms at most",
            "RSS of an agent at the start, most, at the end": f"{self.first.rss_kib}, {peak}, "
            f"{self.last.rss_kib} KiB",
            "descriptors at the start, most, at the end": f"{self.first.fds}, {most}, "
            f"{self.last.fds}",
            "dead tuples at the start, at the end": f"{self._dead(self.before)}, "
            f"{self._dead(self.after)} (beside {self._live(self.after)} live ones)",
            "from the last fault until all was through": f"{self.took:.0f} s "
            f"(allowed: {soak.allowed:.0f} s)",
        }

    @staticmethod
    def _dead(tables: dict[str, tuple[int, int]]) -> int:
        return sum(dead for _, dead in tables.values())

    @staticmethod
    def _live(tables: dict[str, tuple[int, int]]) -> int:
        return sum(live for live, _ in tables.values())

    @staticmethod
    def _columns(items: list[str]) -> list[str]:
        rows = [items[at : at + 5] for at in range(0, len(items), 5)]
        return ["    " + ", ".join(row) for row in rows]


def soak(minutes: float, seed: int, hurry: bool, at_least: tuple[int, int] = (0, 0)) -> bool:
    """Run it in a cluster and a directory of its own; whether nothing was lost and all is well."""
    command = f"tests/faults/soak {minutes:g} --seed {seed}{' --hurry' if hurry else ''}"
    print(f"seed {seed}; again: {command}", flush=True)
    with tempfile.TemporaryDirectory(prefix="serversync-soak-") as directory, Cluster() as cluster:
        run = Soak(Path(directory), cluster, seed, minutes)
        try:
            return run.run(hurry, at_least)
        finally:
            run.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("minutes", type=float, metavar="MINUTES", help="how long the faults last")
    parser.add_argument("--seed", type=int, default=None, help="default: a new one, printed")
    parser.add_argument(
        "--hurry", action="store_true", help="move due times at the end instead of waiting for them"
    )
    parser.add_argument(
        "--at-least", type=int, nargs=2, default=(0, 0), metavar=("CALLS", "KILLS"),
        help="go on, up to a fifth longer, until there were so many",
    )  # fmt: skip
    parser.add_argument(
        "--program", type=Path, metavar="PATH", help="the agent; default: this tree's serversync.py"
    )
    options = parser.parse_args()
    if options.program is not None:
        agent_module.PROGRAM = str(options.program.resolve())
    # So that an end from outside takes along everything that was started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    seed = options.seed if options.seed is not None else random.SystemRandom().getrandbits(32)
    at_least = (options.at_least[0], options.at_least[1])
    return 0 if soak(options.minutes, seed, options.hurry, at_least) else 1


if __name__ == "__main__":
    sys.exit(main())

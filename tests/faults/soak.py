"""Everything at once, at random, from a seed: calls that end, and all that can go wrong meanwhile.

A pretended backend ends calls, a frontend misbehaves, agents are killed, stopped and frozen,
their database sessions end, PostgreSQL restarts, the network before it falls silent. Then the
faults stop, and the oracle has to be content. `soak` beside this file runs it; the tests run a
short one.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import signal
import socket
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

from agent import Agent, agent_env
from backend import Backend, Call, random_call_id
from frontend import Frontend, Json, Reply, Request
from ledger import let_hours_pass
from oracle import Oracle
from pg import Cluster, Database
from proxy import Proxy
from waiting import wait_until

TCP_ESTABLISHED = 1
CALLS_PER_MINUTE = 220  # at most
FAULTS_PER_MINUTE = 20  # of the frontend, at least; usually several times as many
PENDING_MAX = 400  # the backend of one house does not end more calls than that in an outage
BACKOFF_CAP = 256.0
DRAIN_SEC = 120.0
HURRY_SEC = 90.0  # where due times are moved instead of waited for
STOP_MAX = 10.0  # the machine may be busy; the promise of 2 s has its own test

SESSIONS = """
    select application_name, pid, state, xact_start::text,
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
TABLES = """
    select c.relname, (pgstattuple(c.oid)).dead_tuple_count
    from pg_class c join pg_namespace n on n.oid = c.relnamespace
    where c.relkind = 'r' and (n.nspname = 'serversync' or c.relname = 'sync_outbox')
"""


@dataclass(eq=False)
class Fate:
    """What became of one request, as the frontend sees it."""

    device: str
    sock: socket.socket
    request: Request
    fault: str = ""
    stored: bool = False
    answer_lost: bool = False

    def established(self) -> bool:
        """Whether the sender still holds its end of the connection."""
        try:
            state = self.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
        except OSError:
            return False
        return state == TCP_ESTABLISHED


class Weather(Frontend):
    """A frontend whose answers go wrong now and then; it remembers which of them were lost."""

    def __init__(self, directory: Path, rng: random.Random, kill: Callable[[str], None]) -> None:
        super().__init__(directory)
        self.rng, self._kill = rng, kill
        self.trouble = 0.2
        self.faults: Counter[str] = Counter()
        self.repeats: list[tuple[Fate, str, int]] = []  # the earlier arrival, the device now, seq
        self.lost_answers = 0
        self._under_way: dict[Request, Fate] = {}
        self._arrived: dict[int, Fate] = {}
        self._keys: set[str] = set()
        self._local = threading.local()
        self._counting = threading.Lock()
        self.on_head = self._at_head
        self.on_entries = self.on_file = self._at_body

    # -- what the sampler asks -------------------------------------------------------------------

    def waiting(self) -> dict[str, list[Request]]:
        """By device: requests that were not answered yet, and whose sender waits for it."""
        found: dict[str, list[Request]] = {}
        for fate in list(self._under_way.values()):
            # After half an answer the sender may have enough before we know that it has gone out.
            clear = "half" not in fate.fault and "garbage" not in fate.fault
            if clear and fate.request.finished is None and fate.established():
                found.setdefault(fate.device, []).append(fate.request)
        return found

    # -- bookkeeping -----------------------------------------------------------------------------

    def begin(self, request: Request) -> None:
        device = str(request.headers.get("X-Serversync-Device"))
        sock = threading.current_thread().sock  # type: ignore[attr-defined]
        self._local.fate = self._under_way[request] = Fate(device, sock, request)
        super().begin(request)

    def end(self, request: Request) -> None:
        fate = self._under_way.pop(request)
        late = time.monotonic() - request.started > 0.4  # under the least SYNC_TIMEOUT_SEC
        fate.answer_lost |= late or request.status not in (200, 409) or not fate.established()
        with self._counting:
            self.lost_answers += fate.stored and fate.answer_lost
        super().end(request)
        request.body = None

    def _store_entries(self, entries: list[Json]) -> Json:
        fate: Fate = self._local.fate
        fate.stored = True
        with self._counting:
            self._keys.add(str(fate.request.headers.get("Idempotency-Key")))
            for entry in entries:
                before = self._arrived.get(entry["seq"])
                if before is not None:
                    self.repeats.append((before, fate.device, entry["seq"]))
                self._arrived[entry["seq"]] = fate
        return super()._store_entries(entries)

    # -- the faults ------------------------------------------------------------------------------

    def _meets(self, request: Request, fault: str, lost: bool = False) -> None:
        fate: Fate = self._local.fate
        fate.fault, fate.answer_lost = fault, lost
        with self._counting:
            self.faults[fault] += 1

    def _at_head(self, request: Request) -> Reply | None:
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
        }
        fault = self.rng.choice(list(faults))
        self._meets(request, fault)
        if "killed" in fault:
            self._kill(self._local.fate.device)
        return faults[fault]

    def _good(self, request: Request) -> Json:
        return {"ok": True} if request.file is None else self.file_reply(request.file)

    def _at_body(self, request: Request) -> Reply | None:
        fate: Fate = self._local.fate
        if time.monotonic() - request.started > 0.3 and not fate.established():
            # Its sender has given up long ago. To store it now would undo what came later.
            self._meets(request, "sender had gone")
            return Reply(reset=True)
        key = request.headers.get("Idempotency-Key")
        if key in self._keys and self.rng.random() < 0.5:
            with self._counting:
                self.faults["409: I have it"] += 1
            return Reply(409, {}, {"code": "ALREADY_PROCESSED", **self._good(request)})
        if self.rng.random() >= self.trouble:
            return None
        if any(entry["entityId"] in self.poison for entry in request.entries):
            return None
        return self._stored_in_vain(request) if self.rng.random() < 0.4 else self._refused(request)

    def _refused(self, request: Request) -> Reply:
        """Nothing is stored."""
        status = self.rng.choice((500, 502, 503, 504))
        pause = self.rng.choice(("1", "2", "soon", "Wed, 21 Oct 2015 07:28:00 GMT"))
        good = self._good(request)
        faults = {
            "HTTP 5xx": Reply(status, {}, "<html>trouble</html>"),
            "stall": Reply(stall=self.rng.uniform(0.5, 2.5)),
            "half an answer": Reply(200, {}, {**good, "padding": "x" * 99}, half=True),
            "trickle": Reply(500, {}, "<html>trouble</html>", trickle=0.3),
            "200 with HTML": Reply(200, {}, "<html>please log in</html>"),
            "429": Reply(429, {"Retry-After": pause}, {}),
            "302": Reply(302, {"Location": "/login"}, "<html>login</html>"),
            "401": Reply(401, {}, {"error": "unauthorized"}),
            "404": Reply(404, {}, "<html>not found</html>"),
            "400 with HTML": Reply(400, {}, "<html>bad request</html>"),
            "409 that says nothing": Reply(409, {}, {"error": "still running"}),
            "not ok": Reply(200, {}, {"ok": False}),
            "garbage": Reply(raw=b"\x00\xff garbage\r\n\r\n"),
            "reset": Reply(reset=True),
            "killed at the request": Reply(reset=True),
        }
        fault = self.rng.choice(list(faults))
        self._meets(request, fault)
        if "killed" in fault:
            self._kill(self._local.fate.device)
        return faults[fault]

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
        }
        fault = self.rng.choice(list(faults))
        self._meets(
            request, fault, lost=fault not in ("stored, closed", "stored, answered, killed")
        )
        if fault == "stored, killed":
            self._kill(self._local.fate.device)
        elif "killed" in fault:
            device = self._local.fate.device
            threading.Timer(self.rng.uniform(0, 0.02), self._kill, [device]).start()
        return faults[fault]


# A device, its session, since when that is in a transaction, and the request of the device.
Suspect = tuple[str, int, str, Request]


@dataclass
class Sampler:
    """Looks at the agents' sessions and processes while everything goes on."""

    database: Database
    frontend: Weather
    problems: list[str]
    samples: int = 0
    idle_seen: int = 0
    longest_idle: float = 0.0
    _suspects: set[Suspect] = field(default_factory=set)

    def look(self) -> None:
        """Idle in a transaction, or in one older than the request, while a request is under way."""
        before = self.frontend.waiting()
        rows = self.database.rows(SESSIONS, (self.database.name,))
        now = time.monotonic()
        after = self.frontend.waiting()
        self.samples += 1
        suspects: set[Suspect] = set()
        for device, pid, state, began, age, idle in rows:
            is_idle = str(state).startswith("idle in transaction")
            if is_idle:
                self.idle_seen += 1
                self.longest_idle = max(self.longest_idle, idle)
            for request in before.get(device, []):
                older = now - age < request.started
                if request in after.get(device, []) and (is_idle or older):
                    suspects.add((device, pid, began, request))
        # Twice in a row: an answer may be on its way while the frontend still thinks of it.
        for device, pid, began, request in suspects & self._suspects:
            self.problems.append(
                f"{device}: its session {pid} was in a transaction (since {began}) "
                f"during {request.method} {request.path}"
            )
        self._suspects = suspects


@dataclass
class Vitals:
    """An agent's memory and descriptors."""

    rss_kib: int
    fds: int

    @classmethod
    def of(cls, agent: Agent) -> Vitals:
        return cls(agent.rss_kib(), len(os.listdir(f"/proc/{agent.pid}/fd")))

    @classmethod
    def at_rest(cls, agent: Agent) -> Vitals:
        """The least of a second: a look at a directory opens some for a moment."""
        looks = []
        for _ in range(20):
            looks.append(cls.of(agent))
            time.sleep(0.05)
        return min(looks, key=lambda vitals: vitals.fds)


class Crew:
    """Starts agents, and ends them in every way; a device is one process."""

    def __init__(self, soak: Soak) -> None:
        self.soak = soak
        self.agents: dict[str, Agent] = {}  # those that may run
        self.killed: set[str] = set()
        self.terminated: dict[str, float] = {}
        self.fenced: set[str] = set()
        self.slowest_stop = 0.0
        self._numbers = iter(range(1, 1_000_000))
        self._lock = threading.Lock()

    def start(self, rng: random.Random, calm: bool = False) -> str:
        with self._lock:
            device = f"agent-{next(self._numbers)}"
        soak = self.soak
        way = "proxy" if calm else rng.choice(("proxy", "proxy", "tcp", "socket"))
        port = soak.proxy.port if way == "proxy" else soak.cluster.port
        url = soak.cluster.url(soak.name, port=port, application_name=device)
        if way == "socket":
            url = soak.cluster.socket_url(soak.name, application_name=device)
        env = agent_env(
            None,
            soak.frontend,
            soak.backend,
            DATABASE_URL=url,
            SYNC_DEVICE_ID=device,
            SYNC_TIMEOUT_SEC=round(rng.uniform(1, 2), 1),
            SYNC_POLL_INTERVAL_SEC=1,
            SYNC_BATCH_SIZE=rng.choice((1, 5, 20, 100)),
            SYNC_BATCH_BYTES=rng.choice((4096, 512 * 1024)),
            SYNC_DELETE_AFTER_SEC=rng.choice((0, 0, 1)),
            SYNC_UPLOAD_KBPS=rng.choice((0, 0, 0, 4000)),
            SYNC_VERIFY_PATH=rng.choice((None, None, "/api/recordings/{callLogId}")),
        )
        self.agents[device] = Agent(env)
        soak.count("agents started")
        return device

    def kill(self, device: str) -> None:
        agent = self.agents.get(device)
        if agent is not None and agent.running:
            self.killed.add(device)
            agent.signal(signal.SIGKILL)

    def reload(self, device: str) -> None:
        """SIGHUP; never before it is ready for one, and systemd does not do that either."""
        agent = self.agents[device]
        if agent.running and agent.lines(" started"):
            self.soak.count("reloads (SIGHUP)")
            agent.hup()

    def freeze(self, device: str, seconds: float) -> None:
        agent = self.agents[device]
        agent.signal(signal.SIGSTOP)
        try:
            self.soak.over.wait(seconds)
        finally:
            agent.signal(signal.SIGCONT)

    def terminate(self, device: str) -> None:
        self.terminated[device] = time.monotonic()
        self.agents[device].signal(signal.SIGTERM)

    def reap(self, device: str) -> None:
        """Waits for the end of an agent that was told to, and looks at how it went."""
        agent = self.agents[device]
        try:
            code = agent.wait(30)
        except AssertionError as error:
            self.soak.problems.append(f"{device} does not end: {error}")
            agent.kill()
            code = 0
        self.judge(device, agent, code)
        del self.agents[device]
        agent.close()

    def judge(self, device: str, agent: Agent, code: int) -> None:
        log = agent.log()
        soak = self.soak
        if device in self.killed:
            soak.count("kills (SIGKILL)")
        elif device in self.terminated:
            soak.count("stops (SIGTERM)")
            took = time.monotonic() - self.terminated[device]
            self.slowest_stop = max(self.slowest_stop, took)
            early = code == -signal.SIGTERM and "started" not in log
            if (code and not early) or took > STOP_MAX:
                soak.problems.append(
                    f"{device}: SIGTERM: code {code} after {took:.1f} s:\n{log[-900:]}"
                )
        else:
            soak.problems.append(f"{device} ended by itself with {code}:\n{log[-2000:]}")
        if "another sender came between" in log:
            self.fenced.add(device)
            soak.count("results thrown away: another sender came between")
        for line in re.findall(r".*(?:a bug:|a cycle failed).*", log):
            soak.count(f"log: {line[:100]}")
        for trace in re.findall(r"(?:a bug:|Traceback).*?(?=\n\S+ ?:? |\Z)", log, re.S):
            soak.odd.append(f"{device}: {trace[:1500]}")


class Soak:
    """One run: the actors, each with its own stream of chance, and what they count."""

    def __init__(self, directory: Path, cluster: Cluster, seed: int) -> None:
        self.cluster, self.seed = cluster, seed
        self.over = threading.Event()
        self.problems: list[str] = []
        self.odd: list[str] = []
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        random.seed(seed)  # the backend's Call-IDs
        self.name = cluster.create()
        with cluster.admin(self.name) as admin, contextlib.suppress(psycopg.Error):
            admin.execute("create extension pgstattuple schema pg_catalog")
        self.proxy = Proxy("127.0.0.1", cluster.port)
        self.crew = Crew(self)
        self.frontend = Weather(directory / "frontend", self.chance("answers"), self.crew.kill)
        self.backend = Backend(self.database(), directory / "backend")
        self.oracle = Oracle(self.database(), self.frontend, self.backend)
        self.sampler = Sampler(self.database(), self.frontend, self.problems)
        self.doubtful: list[Call] = []  # the COMMIT was lost: there, or not
        self.late_metas: list[tuple[float, Call]] = []
        self.waves: list[Vitals] = []

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
            **{f"producer {n}": lambda rng: self.produce(rng, calls) for n in range(4)},
            "sender": lambda rng: self.drive_agent(rng, 1.5),
            "standby": lambda rng: self.drive_agent(rng, 3.0),
            "database": self.shake_database,
            "weather": self.change_weather,
            "frontend's power": self.shake_frontend,
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
        try:
            for _ in self.pauses(rng, 0.5):
                self.write_late_metas()
                if len(self.oracle.calls) >= calls or len(db.pending()) > PENDING_MAX:
                    continue
                act = rng.choices((self.end_call, self.say_more, self.enqueue_one), (8, 1, 2))[0]
                act(rng, db)
        finally:
            db.close()

    def end_call(self, rng: random.Random, db: Database) -> None:
        """One call in one transaction: mostly committed at once, at times late, or never."""
        call_log_id, call_id = str(uuid.UUID(int=rng.getrandbits(128))), random_call_id()
        recording = rng.random() < 0.85
        late_meta = recording and rng.random() < 0.15
        extra = ("b_leg.wav",) if recording and rng.random() < 0.15 else ()
        fate = rng.choices(("commit", "late", "roll back"), (7, 3, 1))[0]
        directory = self.backend.recordings_dir / call_id
        self.oracle.kept += [directory / name for name in extra]
        with contextlib.ExitStack() as stack:
            stack.callback(self._never_came, call_log_id, directory)
            with db.connect(autocommit=False) as connection:
                call = self.backend.end_call(
                    recording=recording,
                    seconds=rng.choice((0.1, 0.5, 2, 2, 10)),
                    events=rng.randrange(4),
                    call_id=call_id,
                    meta=not late_meta,
                    connection=connection,
                    call_log_id=call_log_id,
                    extra_files=extra,
                    seed=call_id,
                )
                if fate != "commit":
                    self.over.wait(rng.uniform(0.05, 3))
                if fate == "roll back":
                    connection.rollback()
                    self.count("calls rolled back")
                    return
                stack.pop_all()
                self._commit(connection, call)
            self.count("calls committed late" if fate == "late" else "calls committed at once")
            if late_meta:
                self.late_metas.append((time.monotonic() + rng.uniform(0.2, 4), call))
                self.count("meta.json written late")
            elif recording and rng.random() < 0.15:
                self.write_leg(rng, call)

    def _never_came(self, call_log_id: str, directory: Path) -> None:
        """What was written for it is not the agent's to touch."""
        self.oracle.never.add(call_log_id)
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
            self.backend.write_meta(call)

    def write_leg(self, rng: random.Random, call: Call) -> None:
        """The backend's background task: another track, at a bad moment."""
        self.over.wait(rng.uniform(0, 1.5))
        path = call.directory / "a_leg.wav"
        with contextlib.suppress(FileNotFoundError), path.open("xb") as file:
            file.write(b"a leg")
            self.oracle.kept.append(path)
            self.count("tracks written beside a recording")

    def say_more(self, rng: random.Random, db: Database) -> None:
        """A recording again, from a snapshot of before its upload."""
        done = [call for call in list(self.oracle.calls)[-50:] if call.size]
        if not done:
            return
        call = rng.choice(done)
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
        """A settings entity; one in eight is rejected for good."""
        entity_id = str(uuid.UUID(int=rng.getrandbits(128)))
        if rng.random() < 1 / 8:
            self.frontend.poison[entity_id] = Reply(400, {}, {"error": "never"})
            self.count("entries that are rejected for good")
        payload = {"id": entity_id, "text": "x" * rng.choice((10, 10, 5_000, 700_000))}
        with db.connect(autocommit=False) as connection:
            self.backend.enqueue("schedule", payload, entity_id, connection)
            connection.commit()
        self.count("settings entries")

    # -- the agents ------------------------------------------------------------------------------

    def drive_agent(self, rng: random.Random, mean: float) -> None:
        """One agent after the other; the last one goes on when everything is over."""
        for _ in self.pauses(rng, 0.3):
            device = self.crew.start(rng)
            agent = self.crew.agents[device]
            # Some live long, so that what grows has time to grow.
            mean_life = mean * 20 if rng.random() < 0.08 else mean
            life = time.monotonic() + rng.expovariate(1 / mean_life)
            while agent.running and not self.over.wait(0.05):
                if time.monotonic() > life:
                    self.end_agent(rng, device)
                elif rng.random() < 0.005:
                    self.crew.reload(device)
                elif rng.random() < 0.003:
                    self.count("agents frozen for a while")
                    self.crew.freeze(device, rng.uniform(0.3, 4))
            if not agent.running:
                self.crew.reap(device)

    def end_agent(self, rng: random.Random, device: str) -> None:
        if rng.random() < 0.8:
            self.crew.kill(device)
        else:
            self.crew.terminate(device)
        with contextlib.suppress(AssertionError):
            self.crew.agents[device].wait(30)

    # -- the surroundings ------------------------------------------------------------------------

    def shake_database(self, rng: random.Random) -> None:
        for _ in self.pauses(rng, 3.0):
            acts: dict[str, tuple[int, Callable[[], object]]] = {
                "sessions of the sender ended": (6, self._end_sender),
                "database connections cut": (3, self.proxy.cut),
                "database silent for a while": (2, lambda: self._silent(rng.uniform(0.5, 5))),
                "database slow for a while": (1, lambda: self._slow(rng.uniform(0.5, 3))),
                "database restarts (fast)": (1, lambda: self.cluster.restart("fast")),
                "database restarts (immediate)": (1, lambda: self.cluster.restart("immediate")),
            }
            what = rng.choices(list(acts), [weight for weight, _ in acts.values()])[0]
            self.count(what)
            acts[what][1]()

    def _end_sender(self) -> None:
        with self.cluster.admin() as admin:
            admin.execute(END_SENDER, (self.name,))

    def _silent(self, seconds: float) -> None:
        self.proxy.silent()
        self.over.wait(seconds)
        self.proxy.resume()

    def _slow(self, seconds: float) -> None:
        self.proxy.slow(20_000)
        self.over.wait(seconds)
        self.proxy.resume()

    def change_weather(self, rng: random.Random) -> None:
        for _ in self.pauses(rng, 1.5):
            self.frontend.trouble = rng.choice((0.0, 0.05, 0.2, 0.4, 0.8))

    def shake_frontend(self, rng: random.Random) -> None:
        for _ in self.pauses(rng, 7.0):
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

    def move_due_times(self, rng: random.Random) -> None:
        """So that backoff does not cost minutes."""
        db = self.database()
        try:
            for _ in self.pauses(rng, 1.5):
                with contextlib.suppress(psycopg.errors.UndefinedTable):
                    let_hours_pass(db)
        finally:
            db.close()

    # -- watching --------------------------------------------------------------------------------

    def watch(self, _: random.Random) -> None:
        due = time.monotonic() + 1
        while not self.over.wait(0.02):
            self.sampler.look()
            if time.monotonic() >= due:
                due = time.monotonic() + 3
                self.check_losses()
                self.measure()

    def check_losses(self) -> None:
        lost = self.oracle.lost()
        self.count("looks of the oracle in the middle of it")
        if lost:
            self.problems += [f"in the middle of it: {problem}" for problem in lost[:5]]

    def measure(self) -> None:
        for agent in list(self.crew.agents.values()):
            with contextlib.suppress(OSError, AssertionError):
                if "started" in agent.log():
                    self.waves.append(Vitals.of(agent))

    def dead_tuples(self) -> dict[str, int]:
        try:
            with self.cluster.admin(self.name) as admin:
                return {row[0]: row[1] for row in admin.execute(TABLES)}
        except psycopg.errors.UndefinedFunction:
            return {}

    # -- the run ---------------------------------------------------------------------------------

    def run(self, minutes: float, hurry: bool) -> bool:
        """The storm, the calm after it, the verdict and the summary; whether all is well."""
        self.start_frontend()
        trouble, self.frontend.trouble = self.frontend.trouble, 0.0
        device = self.crew.start(self.chance("first"), calm=True)
        first = self.crew.agents[device]
        call = self.oracle.end_call(seconds=0.5)
        wait_until(lambda: not call.directory.exists(), 60, "the first call", first.log)
        vitals, tuples = Vitals.at_rest(first), self.dead_tuples()
        self.crew.terminate(device)
        self.crew.reap(device)

        self.frontend.trouble = trouble
        actors = self.actors(int(minutes * CALLS_PER_MINUTE))
        for actor in actors:
            actor.start()
        self.over.wait(minutes * 60)
        self.over.set()
        for actor in actors:
            actor.join(120)
            if actor.is_alive():
                self.problems.append(f"the soak's own {actor.name} does not end")
        took = self.settle(hurry)
        repeats = self.judge(hurry)
        last, after = self.fresh_call(), self.dead_tuples()
        if sum(self.frontend.faults.values()) < minutes * FAULTS_PER_MINUTE:
            self.problems.append("too few faults: this run says nothing")
        flat = last.rss_kib <= 1.3 * vitals.rss_kib and last.fds <= vitals.fds + 3
        if not flat:
            self.problems.append(f"not flat: {vitals} at the start, {last} at the end")
        self.stop_agents()
        print(self.summary(minutes, took, repeats, vitals, last, tuples, after))
        return not self.problems

    def settle(self, hurry: bool) -> float:
        """The faults stop: how long until everything is through."""
        if not self.cluster.running:
            self.cluster.start()
        self.proxy.resume()
        self.frontend.trouble = 0.0
        self.late_metas = [(0.0, call) for _, call in self.late_metas]
        self.write_late_metas()
        self.resolve_doubts()
        self.backend.enqueue()  # types that were only ever rejected wait for one that succeeds
        if not any(agent.running for agent in self.crew.agents.values()):
            self.crew.start(self.chance("last"), calm=True)
        self.doom()
        began = time.monotonic()
        nudged = 0.0

        def finished() -> bool:
            nonlocal nudged
            if hurry and time.monotonic() - nudged > 2:
                nudged = time.monotonic()
                let_hours_pass(self.oracle.db)
                for device in list(self.crew.agents):
                    self.crew.reload(device)
            return not self.oracle.unfinished()

        try:
            wait_until(finished, HURRY_SEC if hurry else BACKOFF_CAP + DRAIN_SEC, "the rest")
        except AssertionError:
            left = self.oracle.unfinished()
            logs = "\n".join(agent.log()[-1500:] for agent in self.crew.agents.values())
            self.problems += [f"not through at the end: {left[:10]} ({len(left)})\n{logs}"]
        return time.monotonic() - began

    def resolve_doubts(self) -> None:
        """A COMMIT whose answer was lost: the database knows."""
        query = "select count(*) from sync_outbox where entity_id = %s"
        for call in self.doubtful:
            if self.oracle.db.value(query, (call.call_log_id,)):
                self.oracle.calls.append(call)
            else:
                self._never_came(call.call_log_id, call.directory)

    def doom(self) -> None:
        """Entries that the frontend rejects for good may die, and no others."""
        query = "select id from sync_outbox where entity_id = any (%s::uuid[])"
        rows = self.oracle.db.rows(query, (list(self.frontend.poison),))
        self.oracle.doomed = {row[0] for row in rows}

    def judge(self, hurry: bool) -> Counter[str]:
        """The oracle's verdict, and why entries arrived twice."""
        wrong = self.oracle.wrong()
        self.problems += wrong[:20]
        if len(wrong) > 20:
            self.problems.append(f"and {len(wrong) - 20} more")
        for agent in self.crew.agents.values():
            if "another sender came between" in agent.log():
                self.crew.fenced.update(d for d, a in self.crew.agents.items() if a is agent)
        why: Counter[str] = Counter()
        for before, device, seq in self.frontend.repeats:
            if before.answer_lost:
                why["after an answer that was lost"] += 1
            elif before.device != device:
                why["after a kill or a lost session, by the next sender"] += 1
            elif device in self.crew.fenced:
                why["after another sender came between"] += 1
            else:
                why["without a reason"] += 1
                self.problems.append(
                    f"entry {seq} was sent again by {device}, which had its answer "
                    f"({before.request.status}, {before.fault or 'no fault'})"
                )
        return why

    def fresh_call(self) -> Vitals:
        """Goes through as if nothing had been."""
        running = [agent for agent in self.crew.agents.values() if agent.running]
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
        for device in list(self.crew.agents):
            if self.crew.agents[device].running:
                self.crew.terminate(device)
            self.crew.reap(device)

    def summary(
        self, minutes: float, took: float, repeats: Counter[str], first: Vitals, last: Vitals,
        before: dict[str, int], after: dict[str, int],
    ) -> str:  # fmt: skip
        calls = self.oracle.calls
        counts = self.counts()
        peak = max((vitals.rss_kib for vitals in self.waves), default=0)
        most = max((vitals.fds for vitals in self.waves), default=0)
        dead = {n: (before.get(n, 0), after[n]) for n in sorted(after) if after[n] or before.get(n)}
        faults = self.frontend.faults
        twice = ", ".join(f"{number} {why}" for why, number in repeats.items())
        lines = [
            f"soak: seed {self.seed}, {minutes:g} minutes of faults; through {took:.0f} s later",
            f"  calls {len(calls)} (with a recording {sum(bool(c.size) for c in calls)}), entries "
            f"accepted {len(self.frontend.entries)}, files {len(self.frontend.uploads)}, "
            f"requests {len(self.frontend.requests)}",
            *(f"  {what}: {number}" for what, number in sorted(counts.items())),
            f"  faults of the frontend: {sum(faults.values())}",
            *self._columns([f"{fault} {number}" for fault, number in sorted(faults.items())]),
            f"  requests that were stored and whose answer was lost: {self.frontend.lost_answers}",
            f"  entries sent twice: {sum(repeats.values())} ({twice or 'none'})",
            f"  dead letters {len(self.oracle.doomed)} at most, all of them rejected for good",
            f"  agent: RSS {first.rss_kib} KiB at the start, {last.rss_kib} at the end, {peak} at "
            f"most; descriptors {first.fds}, {last.fds}, {most}",
            f"  dead tuples, start and end: {dead}",
            f"  sessions looked at {self.sampler.samples} times: idle in transaction "
            f"{self.sampler.idle_seen} times, {self.sampler.longest_idle * 1000:.0f} ms at most",
            f"  slowest stop {self.crew.slowest_stop:.1f} s",
            f"  lost {sum('gone' in p or 'never arrived' in p for p in self.problems)}",
            *(f"  odd: {text}" for text in self.odd[:5]),
            *(f"  PROBLEM: {problem}" for problem in self.problems[:30]),
            f"{'FAILED' if self.problems else 'passed'}: {len(self.problems)} problems",
        ]
        return "\n".join(lines)

    @staticmethod
    def _columns(items: list[str]) -> list[str]:
        rows = [items[at : at + 5] for at in range(0, len(items), 5)]
        return ["    " + ", ".join(row) for row in rows]

    def close(self) -> None:
        self.over.set()
        for agent in list(self.crew.agents.values()):
            agent.close()
        self.frontend.stop()
        self.proxy.stop()


def soak(minutes: float, seed: int, hurry: bool) -> bool:
    """Run it in a cluster and a directory of its own; whether nothing was lost and all is well."""
    print(f"seed {seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="serversync-soak-") as directory, Cluster() as cluster:
        run = Soak(Path(directory), cluster, seed)
        try:
            return run.run(minutes, hurry)
        finally:
            run.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("minutes", type=float, metavar="MINUTES", help="how long the faults last")
    parser.add_argument("--seed", type=int, default=None, help="default: a new one, printed")
    parser.add_argument(
        "--hurry", action="store_true", help="move due times at the end instead of waiting for them"
    )
    options = parser.parse_args()
    # So that an end from outside takes along everything that was started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    seed = options.seed if options.seed is not None else random.SystemRandom().getrandbits(32)
    return 0 if soak(options.minutes, seed, options.hurry) else 1


if __name__ == "__main__":
    sys.exit(main())

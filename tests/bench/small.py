"""The agent alone: a slow link, idleness, instructions, the start, an SD card, and a profile."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import statistics
import subprocess
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agent import REPOSITORY, NotifySocket, write_env_file
from backend import Backend
from drains import PENDING, enqueue
from latency import INSERT, PAYLOAD
from ledger import locked
from link import Link
from pg import Database
from plans import Plan, explain
from world import Watched, World, progress

RATE, ROUND_TRIP = 125_000.0, 0.2  # 1 Mbit/s, 200 ms
NOWHERE = "http://127.0.0.1:9"  # nobody listens there


def first_start(world: World, db: Database) -> None:
    """Schema, index and trigger are there afterwards."""
    with world.agent(db, "once", FRONTEND_BASE_URL=NOWHERE) as agent:
        agent.wait(600)


# --- a slow link ----------------------------------------------------------------------------------


@dataclass
class Slow:
    batch: int
    entries: int
    seconds: float
    size: float  # bytes of the bodies
    requests: float

    @property
    def of_the_link(self) -> float:
        return self.size / self.seconds / RATE

    @property
    def of_the_possible(self) -> float:
        """Of what one request at a time can do: its bytes on the wire, and a round trip."""
        wire = (self.size + 700 * self.requests) * (1 + 40 / 1400)
        return (wire / RATE + self.requests * ROUND_TRIP + 2 * ROUND_TRIP) / self.seconds


def slow_drain(world: World, count: int, batch: int) -> Slow:
    with world.database() as db, Link(world.receiver.port, RATE, ROUND_TRIP) as link:
        enqueue(db, count)
        first_start(world, db)
        world.receiver.reset()
        url = f"http://127.0.0.1:{link.port}"
        with world.agent(db, "once", FRONTEND_BASE_URL=url, SYNC_BATCH_SIZE=batch) as agent:
            agent.wait(3600)
        found, pending = world.receiver.stats(), db.value(PENDING)
        if pending:
            raise RuntimeError(f"{pending} are left on the slow link")
        seconds = db.value(
            "select extract(epoch from max(started_at + duration_ms * interval '1 ms')"
            " - min(started_at))::float8 from serversync.deliveries"
        )
    result = Slow(batch, count, seconds, found["bytes"], found["requests"])
    progress(f"slow link, batch {batch}: {count} entries in {seconds:.1f} s, "
             f"{result.of_the_link:.0%} of the link")  # fmt: skip
    return result


@dataclass
class SlowUpload:
    size: int
    seconds: float
    goodput: float  # of the link
    fresh: list[float]  # seconds from COMMIT to receipt of the calls that ended meanwhile
    lost: int


def slow_upload(world: World, size: int) -> SlowUpload:
    """A recording, and every three seconds a call that ends meanwhile."""
    body, sent = json.dumps(PAYLOAD), dict[str, float]()
    with world.database() as db, Link(world.receiver.port, RATE, ROUND_TRIP) as link:
        backend = Backend(db, world.directory / f"backend-slow-{uuid.uuid4().hex[:6]}")
        settings = {"FRONTEND_BASE_URL": f"http://127.0.0.1:{link.port}",
                    "SYNC_RECORDINGS_DIR": backend.recordings_dir,
                    "SYNC_DELETE_AFTER_SEC": 86400}  # fmt: skip
        with world.agent_ready(db, **settings) as agent:
            world.receiver.reset(log=True)
            call = backend.end_call(seconds=size / 32_000)
            started = time.time()
            pending = "select count(*) from sync_outbox where processed_at is null and id = %s"
            seq = call.seq("recording_file")
            with db.connect() as connection:
                while db.value(pending, (seq,)):
                    time.sleep(3)
                    entity = str(uuid.uuid4())
                    if db.value(pending, (seq,)):
                        sent[entity] = time.time()
                        connection.execute(INSERT, (entity, body))
                    if time.time() - started > 60 + 20 * size / RATE or not agent.running:
                        raise RuntimeError(f"the upload does not end: {agent.said()[-2000:]}")
            until = time.monotonic() + 30
            while db.value(PENDING) and time.monotonic() < until:
                time.sleep(0.1)
        seconds = db.value(
            "select duration_ms / 1000.0 from serversync.deliveries where kind = 'file'"
        )
    arrived = {
        entry["entityId"]: at
        for at, text in world.receiver.records()
        if text.startswith(b'{"entries"')
        for entry in json.loads(text)["entries"]
    }
    fresh = [arrived[each] - at for each, at in sent.items() if each in arrived]
    result = SlowUpload(call.size, float(seconds), call.size / float(seconds) / RATE, fresh,
                        len(sent) - len(fresh))  # fmt: skip
    progress(f"slow link, upload of {size / 1e6:.1f} MB: {result.goodput:.0%} of the link, "
             f"oldest JSON {max(fresh, default=0):.1f} s")  # fmt: skip
    shutil.rmtree(backend.directory)
    return result


# --- idle -----------------------------------------------------------------------------------------

WATCHDOG_USEC = 180_000_000


@dataclass
class Idle:
    seconds: float
    cpu: float
    switches: int  # how often it was woken, or gave the processor away by waiting
    statements: float
    calls: dict[str, int]  # system calls
    peak_kib: int


def idle(world: World, seconds: float) -> Idle:
    """Two agents with nothing to do: one is left alone, the other one under strace -c."""
    notify = NotifySocket()
    env = {"NOTIFY_SOCKET": str(notify.path), "WATCHDOG_USEC": str(WATCHDOG_USEC)}
    counts = world.directory / "strace"
    with world.database() as db, world.database() as traced_db:
        agent = world.agent(db, "run", env=env)
        # -D: strace is the grandchild, the signals go to the agent.
        traced = world.agent(traced_db, "run", env=env,
                             prefix=["strace", "-f", "-o", str(counts)])  # fmt: skip
        with agent, traced:
            deadline = time.monotonic() + 60
            for each in (agent, traced):
                while "started" not in each.said():
                    if time.monotonic() > deadline:
                        raise RuntimeError(f"it does not start: {each.said()}")
                    time.sleep(0.05)
            time.sleep(8)  # what is done once after the start
            world.settle(db)
            time.sleep(2)
            agent.look()
            cpu, switches, before = agent.cpu, agent.switches, world.cost(db)
            lines = _lines(counts)
            begin = time.monotonic()
            time.sleep(seconds)
            agent.look()
            took = time.monotonic() - begin
            cost = world.cost(db) - before
            calls: dict[str, int] = {}
            for name in _lines(counts)[len(lines) :]:
                calls[name] = calls.get(name, 0) + 1
            result = Idle(took, agent.cpu - cpu, agent.switches - switches,
                          max(0.0, cost.statements), calls, agent.peak_kib)  # fmt: skip
    notify.close()
    progress(f"idle {took:.0f} s: {result.cpu:.2f} s of CPU, {result.switches} wake-ups, "
             f"{sum(calls.values())} system calls")  # fmt: skip
    return result


def _lines(path: Path) -> list[str]:
    """The system calls' names, one a call."""
    if not path.exists():
        return []
    text = path.read_text(errors="replace")
    return re.findall(r"^\d+ +(?:<\.\.\. )?(\w+)(?:\(| resumed)", text, re.MULTILINE)


# --- instructions ---------------------------------------------------------------------------------


@dataclass
class Instructions:
    entry: float
    batch1000: float
    mb: float
    start: float


def _instructions(world: World, db: Database, around: Sequence[str] = (), **settings: Any) -> int:
    """Instructions of one `once`, start and end included; the same every time but for timers."""
    with world.agent(
        db, "once",
        prefix=[*around, "valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null"],
        env={"PYTHONHASHSEED": "0"}, SYNC_TIMEOUT_SEC=300, SYNC_DELETE_AFTER_SEC=86400, **settings,
    ) as agent:  # fmt: skip
        code = agent.wait(1800)
        said = agent.said()
    found = re.search(r"Collected : (\d+)", said)
    if not found or code:
        raise RuntimeError(f"callgrind: {code}: {said[-2000:]}")
    return int(found[1])


def instructions(
    world: World, entries: int, megabytes: int, around: Sequence[str] = ()
) -> Instructions:
    """By the difference of a small and a larger amount: what the start costs falls out."""
    found: dict[tuple[int, int], int] = {}
    for batch in (100, 1000):
        for count in (1000, 1000 + entries):
            with world.database() as db:
                enqueue(db, count)
                first_start(world, db)
                found[batch, count] = _instructions(world, db, around, SYNC_BATCH_SIZE=batch)
    with world.database() as db:
        first_start(world, db)
        start = _instructions(world, db, around)
        sizes = []
        for size in (1, 1 + megabytes):
            backend = Backend(db, world.directory / f"backend-callgrind-{size}")
            call = backend.end_call(seconds=size * 1e6 / 32_000)
            db.execute("update serversync.sender set root_id = null")
            settings = {"SYNC_RECORDINGS_DIR": backend.recordings_dir}
            sizes.append((call.size, _instructions(world, db, around, **settings)))
            shutil.rmtree(backend.directory)
    (small, few), (large, many) = sizes
    result = Instructions(
        (found[100, 1000 + entries] - found[100, 1000]) / entries,
        (found[1000, 1000 + entries] - found[1000, 1000]) / entries,
        (many - few) / ((large - small) / 1e6),
        start,
    )
    progress(f"instructions: {result.entry:,.0f} an entry, {result.mb:,.0f} a MB")
    return result


# --- the start ------------------------------------------------------------------------------------


@dataclass
class Start:
    imports: float
    ready: float
    first_sent: float  # from the start to the receipt of an entry that waited
    slowest: list[tuple[str, float]] = field(default_factory=list)  # imports, ms


IMPORTS = """
import ast, sys
tree = ast.parse(open(sys.argv[1]).read())
for node in tree.body:
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        print(ast.unparse(node))
"""


def start(world: World, rounds: int) -> Start:
    """From the start of the process to READY=1, and what the imports alone take; in turns."""
    source = REPOSITORY / "serversync.py"
    lines = subprocess.run([world.python, "-c", IMPORTS, str(source)], capture_output=True,
                           text=True, check=True).stdout  # fmt: skip
    alone, ready, sent = [], [], []
    for _ in range(rounds):
        begin = time.monotonic()
        subprocess.run([world.python, "-c", lines], check=True)
        alone.append(time.monotonic() - begin)
        with world.database() as db:
            first_start(world, db)
            enqueue(db, 1)
            world.receiver.reset()
            notify = NotifySocket()
            begin, wall = time.monotonic(), time.time()
            with world.agent(db, "run", env={"NOTIFY_SOCKET": str(notify.path)}):
                ready.append(notify.wait_for("READY=1", 60) - begin)
                deadline = time.monotonic() + 60
                while not world.receiver.stats()["requests"] and time.monotonic() < deadline:
                    time.sleep(0.005)
                sent.append(world.receiver.stats()["last"] - wall)
            notify.close()
    said = subprocess.run([world.python, "-X", "importtime", "-c", lines], capture_output=True,
                          text=True, check=True).stderr  # fmt: skip
    found = re.findall(r"import time:\s+\d+ \|\s+(\d+) \| (\S.*)", said)
    slowest = sorted(((name, int(us) / 1000) for us, name in found), key=lambda each: -each[1])
    result = Start(statistics.median(alone), statistics.median(ready), statistics.median(sent),
                   slowest[:12])  # fmt: skip
    progress(f"start: imports {result.imports:.3f} s, READY {result.ready:.3f} s")
    return result


def import_floor(world: World, around: Sequence[str] = ()) -> int:
    """Peak of a process that has only imported what the agent needs, in KiB."""
    code = ("import psycopg, urllib3, systemd.daemon, systemd.journal\n"
            "for line in open('/proc/self/status'):\n"
            "    if line.startswith('VmHWM:'):\n        print(line.split()[1])\n")  # fmt: skip
    run = [*around, world.python, "-c", code]
    return min(int(subprocess.check_output(run, text=True)) for _ in range(3))


# --- an SD card -----------------------------------------------------------------------------------


@dataclass
class Card:
    """Bytes written for so many calls: what the backend's own transactions cost, and what ours."""

    calls: int
    backend_wal: float
    agent_wal: float
    journal: int
    lines: int
    own: int  # what the agent itself had written to a disk
    states: int  # how often it wrote its state file, which is in memory
    syncs: float  # how often the log was forced to the disk, beyond the backend's own commits
    images: float  # whole pages in the log, the backend's own among them


@contextlib.contextmanager
def fake_journal(directory: Path) -> Iterator[list[int]]:
    """A socket as journald's; the sizes of what came."""
    directory.mkdir()
    sizes: list[int] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(directory / "socket"))

        def collect() -> None:
            with contextlib.suppress(OSError):
                while data := sock.recv(1 << 20):
                    sizes.append(len(data))

        thread = threading.Thread(target=collect, daemon=True)
        thread.start()
        yield sizes
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as last:
            last.sendto(b"", str(directory / "socket"))
        thread.join(5)


def _audio_in(root: Path) -> bool:
    for directory in root.iterdir():
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # deleted meanwhile
            if any(name.endswith(".wav") for name in os.listdir(directory)):
                return True
    return False


def card(world: World, calls: int) -> Card:
    """Call after call, each delivered, uploaded and deleted before the next one: as on a Pi.

    A call comes every three minutes there, a checkpoint every five: after every second call here.
    """
    journal = world.directory / f"journal-{uuid.uuid4().hex[:6]}"
    states = world.directory / "states"
    with fake_journal(journal) as sizes, world.database() as db:
        backend = Backend(db, world.directory / f"backend-card-{uuid.uuid4().hex[:6]}")
        log = world.directory / "card.log"
        log.write_text("")
        inode = os.stat(log)
        # In a mount namespace of its own the journal is ours.
        enter = ["unshare", "-m", "sh", "-c",
                 'mkdir -p /run/systemd/journal && mount --bind "$0" /run/systemd/journal'
                 ' && exec "$@"', str(journal)]  # fmt: skip
        agent = world.agent(
            db, "run",
            prefix=[*enter, "strace", "-f", "-o", str(states), "-e", "trace=rename,renameat2"],
            env={"JOURNAL_STREAM": f"{inode.st_dev}:{inode.st_ino}"},
            log=log, SYNC_RECORDINGS_DIR=backend.recordings_dir, SYNC_DELETE_AFTER_SEC=0,
        )  # fmt: skip
        with agent:
            deadline = time.monotonic() + 60
            while not sizes or not locked(db):
                if time.monotonic() > deadline or not agent.running:
                    raise RuntimeError(f"it does not start: {agent.said()}")
                time.sleep(0.05)
            time.sleep(1)
            world.settle(db)
            backend_wal = agent_wal = 0.0
            begun = len(sizes)
            io = _written(agent)
            before = world.cost(db)
            for number in range(calls):
                if number % 2 == 0:
                    with db.admin() as admin:
                        admin.execute("checkpoint")
                at = _lsn(db)
                backend.end_call(seconds=0.1, events=2)
                half = _lsn(db)
                deadline = time.monotonic() + 60
                while db.value(PENDING) or _audio_in(backend.recordings_dir):
                    if time.monotonic() > deadline:
                        raise RuntimeError(f"a call is stuck: {agent.said()[-1000:]}")
                    time.sleep(0.01)
                time.sleep(0.05)
                backend_wal += half - at
                agent_wal += _lsn(db) - half
            cost = world.cost(db) - before
            own = _written(agent) - io
            journal_bytes, lines = sum(sizes[begun:]), len(sizes) - begun
        renames = states.read_text(errors="replace").count("state.json.new")
    shutil.rmtree(backend.directory)
    result = Card(calls, backend_wal, agent_wal, journal_bytes, lines, own, renames,
                  cost.syncs - calls, cost.images)  # fmt: skip
    progress(f"SD card, a call: {agent_wal / calls:,.0f} bytes of WAL (the backend itself "
             f"{backend_wal / calls:,.0f}), journal {journal_bytes / calls:,.0f}")  # fmt: skip
    return result


def _lsn(db: Database) -> float:
    return float(db.value("select (pg_current_wal_insert_lsn() - '0/0'::pg_lsn)::float8"))


def _written(agent: Watched) -> int:
    """Bytes that went to a disk, by the kernel's count; of strace's child, the agent."""
    total = 0
    for path in Path("/proc").glob("[0-9]*/io"):
        with contextlib.suppress(OSError):
            command = (path.parent / "cmdline").read_bytes()
            if b"import serversync" in command and b"strace" not in command[:10]:
                fields = dict(line.split(": ") for line in path.read_text().splitlines())
                if os.getpgid(int(path.parent.name)) == agent.process.pid:
                    total += int(fields["write_bytes"])
    return total


# --- plans at full size ---------------------------------------------------------------------------


def plans(world: World, pending: int, processed: int) -> list[tuple[str, Plan]]:
    """EXPLAIN of what runs all the time, with so many rows."""
    import serversync

    many = """
        insert into sync_outbox (entity_type, entity_id, payload, processed_at)
        select 'call_log', gen_random_uuid(),
               jsonb_build_object('callLogId', gen_random_uuid(), 'n', n), now()
        from generate_series(1, %s::int) n
    """
    with world.database() as db:
        db.execute(many, (processed,))
        enqueue(db, pending)
        first_start(world, db)
        world.settle(db)
        first = db.value("select min(id) from sync_outbox where processed_at is null")
        last = db.value("select max(id) from sync_outbox")
        seqs = list(range(first, first + 100))
        apart = ["recording_file"]
        free: dict[str, Any] = {"skip": [], "travels": [], "apart": apart, "way": ""}
        fetch = (
            free | {"after": 0, "until": last} | {"size": 100, "bytes": 1 << 19, "most": 8 << 20}
        )
        confirm = {"seqs": seqs, "outcome": "sent", "kind": "entries", "bytes": 1, "key": "",
                   "request_sha256": "", "answer_sha256": "", "status": 200, "seconds": 0.1,
                   "call_log_id": None, "entity_id": None, "url": None}  # fmt: skip
        wanted: Sequence[tuple[str, str, dict[str, Any]]] = (
            ("LOOK", serversync.LOOK, free),
            ("LAST", serversync.LAST, {}),
            ("FETCH, first", serversync.FETCH, fetch),
            ("FETCH, in the middle", serversync.FETCH, {**fetch, "after": (first + last) // 2}),
            ("CONFIRM", serversync.CONFIRM, confirm),
            (
                "HOLD_BACK, 100",
                serversync.HOLD_BACK,
                free | {"after": first - 1, "until": first + 99},
            ),
            (
                "NEXT_ID, files",
                serversync.NEXT_ID,
                free | {"way": "recording_file", "after": 0, "until": last},
            ),
            ("READ_FILE", serversync.READ_FILE, free | {"seq": last}),
            ("NEXT_RETRY", serversync.NEXT_RETRY, {"before": None, **free}),
            ("NEWEST_FREE", serversync.NEWEST_FREE, free),
            *(("SWEEP", part, {}) for part in serversync.SWEEP.split(";")),
            ("PAST", serversync.PAST, {"seq": first, "readable": True}),
            ("PRUNE", serversync.PRUNE, {"days": 30, "keep": []}),
        )
        found = []
        with db.connect() as connection:
            connection.execute(serversync.SESSION)
            for name, statement, params in wanted:
                found.append((name, explain(connection, statement, params)))
    return found


# --- what the time goes into ----------------------------------------------------------------------

PROFILED = """
import cProfile, pstats, sys
sys.path.insert(0, sys.argv.pop(1))
import serversync
profile = cProfile.Profile()
try:
    code = profile.runcall(serversync.main)
finally:
    pstats.Stats(profile).strip_dirs().sort_stats("tottime").print_stats(25)
"""


@dataclass
class Profile:
    """Where a drain's time goes, in ms a batch of so many."""

    batch: int
    batches: int
    wall: float
    agent_cpu: float
    statements: list[tuple[str, float, float]]  # name, calls a batch, ms a batch
    calls: dict[str, float]  # system calls a batch
    sync_ms: float  # forcing the log to the disk
    functions: str = ""


def profile(world: World, count: int, batch: int) -> Profile:
    named = ("FETCH", "with picked"), ("CONFIRM", "with sent as"), ("LAST", "order by id desc")
    with world.database() as db:
        enqueue(db, count)
        first_start(world, db)
        world.settle(db)
        world.receiver.reset()
        before = world.cost(db)
        with world.agent(db, "once", SYNC_BATCH_SIZE=batch) as agent:
            agent.wait(600)
        cost = world.cost(db) - before
        found = world.receiver.stats()
        batches = int(found["requests"])
        with db.admin() as admin:
            rows = admin.execute(
                "select query, calls, total_exec_time from pg_stat_statements"
                " order by total_exec_time desc limit 12"
            ).fetchall()
        statements = [
            (next((name for name, text in named if text in query), query.strip()[:40]),
             calls / batches, ms / batches)
            for query, calls, ms in rows
        ]  # fmt: skip
        cpu = agent.cpu
        wall = 1000 * (found["last"] - found["first"]) / batches
    counts = world.directory / "strace-profile"
    with world.database() as db:
        enqueue(db, count)
        first_start(world, db)
        with world.agent(db, "once", prefix=["strace", "-f", "-o", str(counts)],
                         SYNC_BATCH_SIZE=batch) as agent:  # fmt: skip
            agent.wait(600)
        text = counts.read_text(errors="replace")
    begun = text.find("POST /api/ingest/sync")  # what comes before is the start
    calls: dict[str, float] = {}
    for name in re.findall(r"^\d+ +(\w+)\(", text[max(begun, 0) :], re.MULTILINE):
        calls[name] = calls.get(name, 0) + 1 / batches
    with world.database() as db:
        enqueue(db, count)
        first_start(world, db)
        env = world.directory / "profile.env"
        write_env_file(env, world.settings(db, SYNC_BATCH_SIZE=batch, SYNC_LOG_LEVEL="warning"))
        done = subprocess.run(
            [world.python, "-c", PROFILED, str(world.directory / "compiled"),
             "--env-file", str(env), "once"],
            capture_output=True, text=True, check=False, cwd="/",
            env={"PATH": os.environ["PATH"], "LANG": "C.UTF-8"},
        )  # fmt: skip
    return Profile(batch, batches, wall, 1000 * cpu / batches, statements, calls,
                   cost.sync_ms / batches, done.stdout)  # fmt: skip

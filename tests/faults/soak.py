#!/usr/bin/python3
"""Weeks of weather in minutes: everything at once, at random, and the promise at the end.

    tests/faults/soak.py MINUTES

Calls end; a frontend answers wrongly, late or never; three agents beside each other are killed,
stopped, frozen, reloaded and given wrong clocks, but for one, which lives through it all; database
sessions end, PostgreSQL restarts and crashes, networks fall silent, the recordings' disk goes. In
the middle of it the oracle is asked what is lost. Then the faults stop, and all must be through.

What one fault does, alone and in a known order, is for test_model.py and test_kills.py to say.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import psycopg

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from agent import Agent, agent_env  # noqa: E402
from backend import Backend, Call  # noqa: E402
from frontend import Frontend, Reply, Request  # noqa: E402
from ledger import let_hours_pass  # noqa: E402
from oracle import Oracle  # noqa: E402
from pg import Cluster, Database  # noqa: E402
from proxy import Proxy  # noqa: E402
from test_model import BOOT, HEADS, LAST_YEAR, LIBFAKETIME, NEXT_YEAR, NOW, REPLIES  # noqa: E402
from waiting import wait_until  # noqa: E402
from witness import device_of  # noqa: E402

CALLS_PER_MINUTE, KILLS_PER_MINUTE = 40, 5  # at least: with fewer a run says nothing
PENDING_MAX = 1500  # the backend of one house does not end more calls than that in an outage
DRAIN_SEC = 300.0  # from the last fault until all is through, on a busy machine
STOP_MAX = 10.0  # the machine may be busy; the promise of 2 s has its own test
GRACE_SEC = 5
IDLE_SEC = 1.0  # between two statements of a transaction: as long as a busy machine may take
# A request of entries that is older, and whose sender may have gone: to store what it brought would
# undo what came later, which is a fault that no sender can mend.
STALE_SEC = 0.3
# In the name of an agent: it has no proxy before its database; it has one before the frontend.
DIRECT, REMOTE = "direct", "remote"
# An early 200 is an answer in the contract's words, if the whole body had been sent by then.
TOO_EARLY = [reply for name, reply in HEADS.items() if name != "an early 200"]
ERAS = [reply for reply in REPLIES.values() if not reply.store]

END_SENDER = """
    select pg_terminate_backend(a.pid) from pg_stat_activity a join pg_locks l on l.pid = a.pid
    where l.locktype = 'advisory' and l.granted and a.datname = %s
      and a.application_name like 'agent-%%'
"""
# No transaction is open while a request is under way: many of the weather take a second or more.
OPEN = """
    select application_name || ': ' || left(query, 60) from pg_stat_activity
    where datname = %s and state like 'idle in transaction%%' and application_name like %s
      and clock_timestamp() - state_change > %s * interval '1 second'
"""


def sender_is_there() -> bool:
    """Whether whose request this thread serves still holds its end of the connection."""
    sock = threading.current_thread().sock  # type: ignore[attr-defined]
    state: int = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
    return state == 1  # TCP_ESTABLISHED


class Soak:
    """The actors, each a thread, and what they count."""

    def __init__(self, directory: Path, cluster: Cluster) -> None:
        self.cluster, self.name = cluster, cluster.create()
        self.over = threading.Event()
        self.problems: list[str] = []
        self.counts: Counter[str] = Counter()
        self.trouble = 0.0  # how much of what is asked goes wrong
        self.era: Reply | None = None  # what everybody gets
        self.sick: list[str] = []  # entities that the frontend cannot take for a while
        self.doomed: set[str] = set()  # entities that it never takes
        self.recorded: list[Call] = []  # what is said of them again comes after what was said first
        self.agents: dict[str, Agent] = {}
        self.told: dict[str, set[int]] = {}  # the signals that were to end them
        self.veteran = ""  # the one that lives through it all
        self.disk = threading.Lock()  # of who writes to the recordings' disk, or takes it away
        self.still = threading.Lock()  # held while an agent is frozen
        self.frontend = Frontend(directory / "frontend").start()
        self.frontend.on_head, self.frontend.on_end = self._at_head, self._at_end
        self.frontend.on_entries = self.frontend.on_file = self._at_body
        self.networks = {
            "database": Proxy("127.0.0.1", cluster.port),
            "frontend": Proxy("127.0.0.1", self.frontend.port),
        }
        self.backend = Backend(Database(cluster, self.name), directory / "backend")
        self.oracle = Oracle(Database(cluster, self.name), self.frontend, self.backend)
        self.clock = directory / "clock"
        self.clock.write_text(NOW)
        self._numbers = itertools.count(1)

    # -- the backend -----------------------------------------------------------------------------

    def produce(self, db: Database) -> None:
        acts = {self.end_call: 8, self.say_more: 1, self.enqueue_one: 1}
        if len(db.pending()) < PENDING_MAX:
            random.choices(list(acts), list(acts.values()))[0]()

    def end_call(self) -> None:
        """One call in one transaction: mostly committed at once, at times late, or never."""
        meta = random.choices(("there", "late", "absent", "broken"), (60, 6, 1, 1))[0]
        audio = random.random() < 0.97
        extra = ("b_leg.wav",) if random.random() < 0.15 else ()
        with self.backend.db.connect(autocommit=False) as connection:
            with self.disk:
                call = self.backend.end_call(
                    recording=random.random() < 0.45,
                    seconds=random.choices((0.1, 0.5, 2, 10, 40), (60, 20, 10, 5, 1))[0],
                    events=random.randrange(3),
                    meta=meta == "there",
                    audio=audio,
                    extra_files=extra,
                    connection=connection,
                )
                if call.size:
                    self.oracle.kept += [call.directory / name for name in extra]
                if call.size and meta == "broken":
                    call.meta.write_text('{"callId": "')
                    self.oracle.kept.append(call.meta)
            if not audio:
                self.doomed.add(call.recording_id)
            if random.random() < 0.08:
                self.frontend.poison[call.call_log_id] = Reply(500, {}, {"error": "not now"})
                self.sick.append(call.call_log_id)
            self.oracle.calls.append(call)  # whether it is committed is sorted out at the end
            if random.random() < 0.3:
                self.over.wait(random.uniform(0.05, 3))
            if random.random() < 0.05:
                connection.rollback()
                return
        if call.size:
            self.recorded.append(call)
        if call.size and meta == "late":
            threading.Timer(random.uniform(0.2, 4), self._write_meta, [call]).start()

    def _write_meta(self, call: Call) -> None:
        # Its directory may be gone: after the grace time it was sent with a meta.json made up.
        with self.disk, contextlib.suppress(FileNotFoundError):
            self.backend.write_meta(call)

    def say_more(self) -> None:
        """A recording again, from a snapshot of before its upload."""
        if self.recorded:
            call = random.choice(self.recorded[-30:])
            payload = {"id": call.recording_id, "callLogId": call.call_log_id}
            payload |= {"uploadStatus": "local_only", "transcript": "ring " * 9000}
            self.backend.enqueue("recording", payload, call.recording_id)

    def enqueue_one(self) -> None:
        """A settings entity; one in eight is rejected for good, some are large."""
        entity_id = str(uuid.uuid4())
        chance = random.random()
        if chance < 1 / 8:
            self.doomed.add(entity_id)
        if chance < 1 / 16:
            self.frontend.poison[entity_id] = Reply(400, {}, {"error": "never"})
        elif chance < 1 / 8:
            self.frontend.rejected[entity_id] = "NEVER"
        text = "x" * random.choice((10, 5_000, 100_000))
        self.backend.enqueue("schedule", {"id": entity_id, "text": text}, entity_id)

    # -- the frontend's weather ------------------------------------------------------------------

    def _at_head(self, _: Request) -> Reply | None:
        if random.random() >= self.trouble / 4:
            return None
        self.counts["answers of the weather"] += 1
        return random.choice(TOO_EARLY)

    def _at_body(self, request: Request) -> Reply | None:
        if not self.trouble:
            return None
        stale = request.kind == "entries" and time.monotonic() - request.started > STALE_SEC
        if stale and (REMOTE in device_of(request) or not sender_is_there()):
            return Reply(reset=True)
        # The moment of truth for a recording: what is deleted must have been written down.
        if random.random() < self.trouble * (0.5 if request.file else 0.2):
            return self._strike(device_of(request))
        bad = any(entry["entityId"] in self.frontend.poison for entry in request.entries)
        if self.era is None and (bad or random.random() >= self.trouble):
            return None
        self.counts["answers of the weather"] += 1
        return self.era or random.choice(list(REPLIES.values()))

    def _strike(self, device: str) -> Reply | None:
        """Its sender loses its session, or is killed, or both: before what it sent is stored, or
        just after the answer."""
        acts = random.choice(("session", "kill", "session and kill"))
        answered = random.random() < 0.6
        if "session" in acts:
            threading.Timer(random.uniform(0, 0.02) * answered, self._end_sender).start()
        if "kill" in acts:
            after = random.uniform(0, 0.2 if "session" in acts else 0.02) * answered
            threading.Timer(after, self.end, [device, signal.SIGKILL]).start()
        return None if answered else Reply(reset=True)

    def _at_end(self, _: Request) -> None:
        self.counts["HTTP requests"] += 1
        self.frontend.requests.clear()  # a run may be long

    def change_weather(self, _: Database) -> None:
        self.trouble = random.choice((0.0, 0.1, 0.3, 0.5, 0.8))
        healed, self.sick = self.sick[:-20], self.sick[-20:]
        for entity_id in healed:
            self.frontend.poison.pop(entity_id, None)

    def change_era(self, _: Database) -> None:
        """For some seconds everybody gets the same answer: nobody's entries are to blame."""
        self.counts["spells of one bad answer for all"] += 1
        self.era = random.choice(ERAS)
        self.over.wait(random.uniform(1, 7))
        self.era = None

    def shake_frontend(self, _: Database) -> None:
        def up() -> bool:
            with contextlib.suppress(OSError):  # an agent's own connection may hold the port
                self.frontend.start()
                return True
            return False

        self.frontend.stop()
        self.over.wait(random.uniform(0.2, 3))
        wait_until(up, 30, "the frontend's port")

    # -- the agents ------------------------------------------------------------------------------

    def start(self, lasting: bool = False) -> str:
        """The one that lasts needs no network, and its clock is right."""
        direct = lasting or random.random() < 0.4
        remote = not lasting and random.random() < 0.4
        device = f"agent-{next(self._numbers)}{DIRECT if direct else ''}{REMOTE if remote else ''}"
        port = None if direct else self.networks["database"].port
        env = agent_env(
            None, self.frontend, self.backend,
            DATABASE_URL=self.cluster.url(self.name, port=port, application_name=device),
            SYNC_DEVICE_ID=device,
            SYNC_TIMEOUT_SEC=1,
            SYNC_POLL_INTERVAL_SEC=1,
            SYNC_BATCH_SIZE=random.choice((1, 20, 100, 100)),
            SYNC_FILE_GRACE_SEC=GRACE_SEC,
            SYNC_DELETE_AFTER_SEC=random.choice((0, 0, 1)),
            SYNC_UPLOAD_KBPS=random.choice((0, 0, 0, 4000)),
        )  # fmt: skip
        if remote:
            env["FRONTEND_BASE_URL"] = f"http://127.0.0.1:{self.networks['frontend'].port}"
        if not lasting and random.random() < 0.3:
            env |= {"LD_PRELOAD": str(LIBFAKETIME), "FAKETIME_TIMESTAMP_FILE": str(self.clock)}
            env |= {"FAKETIME_NO_CACHE": "1", "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
            self.counts["agents with a clock that steps"] += 1
        self.told[device] = set()
        self.agents[device] = Agent(env)
        return device

    def live(self, _: Database) -> None:
        """One agent, from its start to its end."""
        device = self.start()
        agent = self.agents[device]
        if random.random() < 0.75:  # the others may end while they start
            while agent.running and not agent.lines(" started") and not self.over.wait(0.05):
                pass
        until = time.monotonic() + random.expovariate(1 / 3)
        while agent.running and time.monotonic() < until and not self.over.wait(0.1):
            self.bother(device)
        self.end(device, random.choices((signal.SIGKILL, signal.SIGTERM), (9, 1))[0])
        self.reap(device)

    def bother(self, device: str) -> None:
        agent, chance = self.agents[device], random.random()
        if chance > 0.015 or not agent.lines(" started"):
            return
        if chance < 0.01:
            self.counts["SIGHUP"] += 1
            agent.hup()
            return
        with self.still:
            self.counts["frozen for a while"] += 1
            agent.signal(signal.SIGSTOP)
            self.over.wait(random.uniform(0.3, 4))
            agent.signal(signal.SIGCONT)
            time.sleep(0.2)

    def end(self, device: str, number: int) -> None:
        if device != self.veteran or self.over.is_set():
            self.told[device].add(number)
            self.agents[device].signal(number)

    def reap(self, device: str) -> None:
        """It ends as it was told to, in time, and never by a bug."""
        agent, told = self.agents[device], self.told[device]
        try:
            code = agent.wait(STOP_MAX)
        except AssertionError as error:
            self.problems.append(f"{device} does not end: {error}")
        else:
            log = agent.log()
            self.counts["kill -9" if code == -signal.SIGKILL else "SIGTERM"] += 1
            # One that is told to stop before it listens ends by the signal.
            due = {-number for number in told} | ({0} if signal.SIGTERM in told else set())
            if code not in due or "Traceback" in log or "a bug" in log:
                self.problems.append(f"{device} ended with {code}, told {told}:\n{log[-2000:]}")
        agent.close()

    # -- the surroundings ------------------------------------------------------------------------

    def shake_network(self, _: Database) -> None:
        """What it held back is dropped: late, it would be a fault that no sender can mend."""
        proxy = random.choice(list(self.networks.values()))
        faults: list[Callable[[], object]] = [
            proxy.silent, proxy.silence_open, proxy.refuse, lambda: proxy.slow(50_000), proxy.cut,
        ]  # fmt: skip
        self.counts["spells of a bad network"] += 1
        random.choice(faults)()
        self.over.wait(random.uniform(0.5, 5))
        proxy.cut()
        proxy.resume()

    def _end_sender(self) -> None:
        with contextlib.suppress(psycopg.Error), self.cluster.admin() as admin:
            ended = admin.execute(END_SENDER, (self.name,))
            self.counts["database sessions ended"] += ended.rowcount

    def shake_database(self, _: Database) -> None:
        chance = random.random()
        if chance < 0.75:
            self._end_sender()
            return
        mode = "immediate" if chance < 0.92 else "fast"
        self.counts["database crashes" if mode == "immediate" else "database restarts"] += 1
        self.cluster.restart(mode)

    def take_away_disk(self, _: Database) -> None:
        """Like one that is not mounted: an empty directory is in its place."""
        root = self.backend.recordings_dir
        away = root.with_name("away")
        with self.disk:
            self.counts["recordings' disk away"] += 1
            root.rename(away)
            root.mkdir()
            # At times for longer than the grace time of a missing file.
            self.over.wait(GRACE_SEC * 1.6 if random.random() < 0.1 else random.uniform(0.2, 3))
            root.rmdir()  # nobody has made anything in it
            away.rename(root)

    def step_clock(self, _: Database) -> None:
        new = self.clock.with_suffix(".new")
        new.write_text(random.choice((NOW, LAST_YEAR, NEXT_YEAR, BOOT)))
        new.rename(self.clock)

    def look(self, db: Database) -> None:
        """In the middle of it: nothing is lost, and no transaction is open during a request."""
        self.counts["looks in the middle of it"] += 1
        with self.disk:
            self.problems += [f"in the middle of it: {lost}" for lost in self.oracle.lost()[:5]]
        with self.still:
            idle = db.rows(OPEN, (self.name, f"%{DIRECT}%", IDLE_SEC))
        self.problems += [f"its transaction is open: {name}" for (name,) in idle]

    # -- the run ---------------------------------------------------------------------------------

    def actors(self) -> list[threading.Thread]:
        """Each with the mean of its pauses, in seconds."""
        acts: list[tuple[float, Callable[[Database], object]]] = [
            *[(0.3, self.produce)] * 5, *[(0.15, self.live)] * 2,
            (0.1, lambda _: self.bother(self.veteran)),
            (1.5, self.change_weather), (20, self.change_era), (14, self.shake_frontend),
            (4, self.shake_network), (4, self.shake_database), (20, self.take_away_disk),
            (4, self.step_clock), (5, self.look),
            (2.5, let_hours_pass),  # so that backoff does not cost minutes
        ]  # fmt: skip
        return [threading.Thread(target=self._act, args=each, daemon=True) for each in acts]

    def _act(self, mean: float, act: Callable[[Database], object]) -> None:
        db = Database(self.cluster, self.name)
        while not self.over.wait(random.expovariate(1 / mean)):
            try:
                act(db)
            except psycopg.Error:
                self.over.wait(0.2)  # the database is being restarted
            except Exception:
                self.problems.append(f"the soak itself failed:\n{traceback.format_exc()}")
                return

    def run(self, minutes: float) -> bool:
        """The storm, the calm after it, and the verdict."""
        self.veteran = self.start(lasting=True)
        self.oracle.end_call()
        self.settle()
        first = self.vitals()
        actors, end = self.actors(), time.monotonic() + minutes * 60
        for actor in actors:
            actor.start()
        while time.monotonic() < end:
            self.over.wait(min(60, end - time.monotonic()))
            so_far = {what: self.counts[what] for what in ("HTTP requests", "kill -9")}
            print(len(self.oracle.calls), "calls", so_far, self.problems[:1], flush=True)
        self.over.set()
        for actor in actors:
            actor.join(60)
        self.calm()
        took = self.settle()
        self.problems += self.oracle.wrong()
        last = self.vitals()
        if last[0] > 1.3 * first[0] or last[1] > first[1] + 3:
            self.problems.append(f"not flat: KiB and descriptors {first}, later {last}")
        self.end(self.veteran, signal.SIGTERM)
        self.reap(self.veteran)
        calls, kills = len(self.oracle.calls), self.counts["kill -9"]
        if calls < CALLS_PER_MINUTE * minutes or kills < KILLS_PER_MINUTE * minutes:
            self.problems.append(f"too few calls or kills ({calls}, {kills}): this says nothing")
        self.sum_up({
            "minutes": minutes,
            "KiB and descriptors of the agent that lived through it": f"{first}, later {last}",
            "seconds from the last fault until all was through": round(took),
        })  # fmt: skip
        return not self.problems

    def vitals(self) -> tuple[int, int]:
        """The memory of the one that lasts, and its descriptors: at rest, the least of a second."""
        agent = self.agents[self.veteran]
        looks = []
        for _ in range(20):
            looks.append(len(list(Path(f"/proc/{agent.pid}/fd").iterdir())))
            time.sleep(0.05)
        return agent.rss_kib(), min(looks)

    def calm(self) -> None:
        """The faults stop, and the one that lasts is told so. What was committed, only the database
        knows: transactions were rolled back, or lost."""
        self.trouble = 0.0
        for entity_id in self.sick:
            self.frontend.poison.pop(entity_id, None)
        there = set(self.oracle.db.rows("select id, entity_id::text from sync_outbox"))
        for call in list(self.oracle.calls):
            if (call.seqs[0], call.call_log_id) not in there:
                self.oracle.calls.remove(call)
                self.oracle.never.add(call.call_log_id)
                self.oracle.kept += [call.wav] if call.size else []
        self.oracle.doomed = {seq for seq, entity_id in there if entity_id in self.doomed}
        self.backend.enqueue("schedule")  # nine rejected in a row: the tenth waits for one
        self.oracle.end_call()
        self.agents[self.veteran].hup()

    def settle(self) -> float:
        """How long it takes until all is through."""
        began = time.monotonic()

        def through() -> bool:
            with contextlib.suppress(psycopg.errors.UndefinedTable):  # no agent has been here yet
                let_hours_pass(self.oracle.db)  # an entry's own pause may be an hour by now
            time.sleep(0.3)
            return not self.oracle.unfinished()

        try:
            wait_until(through, DRAIN_SEC, "the rest", self.agents[self.veteran].log)
        except AssertionError as error:
            left = self.oracle.unfinished()
            self.problems.append(f"not through: {left[:10]} ({len(left)})\n{str(error)[-2000:]}")
        return time.monotonic() - began

    def sum_up(self, more: dict[str, object]) -> None:
        calls, uploads = self.oracle.calls, self.frontend.uploads
        lost = [problem for problem in self.problems if "arrived" in problem or "gone" in problem]
        twice = len(uploads) - len({file.recording_id for file in uploads})
        table = {
            "calls, with a recording": f"{len(calls)}, {sum(bool(call.size) for call in calls)}",
            **dict(sorted(self.counts.items())),
            "lost": len(lost),
            "dead letters, all of them due": len(self.oracle.doomed),
            "entries, recordings sent twice": f"{self.oracle.repeated()}, {twice}",
            **more,
        }
        print("\n| | |\n|---|---|")
        print("\n".join(f"| {what} | {value} |" for what, value in table.items()))
        print("\n".join(f"PROBLEM: {problem}" for problem in self.problems[:30]))
        print(f"{'FAILED' if self.problems else 'passed'}: {len(self.problems)} problems")

    def close(self) -> None:
        self.over.set()
        for agent in self.agents.values():
            agent.close()
        self.frontend.stop()
        for proxy in self.networks.values():
            proxy.stop()


def main() -> int:
    # So that an end from outside takes along everything that was started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory(prefix="serversync-soak-") as directory, Cluster() as cluster:
        soak = Soak(Path(directory), cluster)
        try:
            return 0 if soak.run(float(sys.argv[1])) else 1
        finally:
            soak.close()


if __name__ == "__main__":
    sys.exit(main())

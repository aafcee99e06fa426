#!/usr/bin/python3
"""Weeks of weather in minutes: everything at once, at random, and the promise at the end.

    tests/faults/soak.py MINUTES

Calls end; a frontend answers wrongly, late or never; three agents beside each other are killed,
stopped and frozen, but for one, which is reloaded, and lives through it all; database sessions end,
PostgreSQL restarts and crashes, and the network before it falls silent. In the middle of it the
oracle is asked what is lost. Then the faults stop, and all must be through.

What one fault does, alone and in a known order, is for test_model.py and test_kills.py to say.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import signal
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
from backend import Backend  # noqa: E402
from frontend import Frontend, Reply, Request  # noqa: E402
from ledger import let_hours_pass  # noqa: E402
from oracle import Oracle  # noqa: E402
from pg import Cluster, Database  # noqa: E402
from proxy import Proxy  # noqa: E402
from test_model import REPLIES  # noqa: E402
from waiting import wait_until  # noqa: E402
from witness import device_of  # noqa: E402

CALLS_PER_MINUTE, KILLS_PER_MINUTE = 40, 5  # at least: with fewer a run says nothing
PENDING_MAX = 1500  # the backend of one house does not end more calls than that in an outage
DRAIN_SEC = 300.0  # from the last fault until all is through, on a busy machine
STOP_MAX = 10.0  # the machine may be busy; the promise of 2 s has its own test
LIES = [REPLIES[name] for name in ("a portal", "not ok", "no words", "409, still running")]
WEATHER = [*REPLIES.values(), *LIES * 3]
ERAS = [reply for reply in REPLIES.values() if not reply.store]
VETERAN = "veteran"

END_SENDER = """
    select pg_terminate_backend(a.pid) from pg_stat_activity a join pg_locks l on l.pid = a.pid
    where l.locktype = 'advisory' and l.granted and a.datname = %s
"""


class Soak:
    """The actors, each a thread, and what they count."""

    def __init__(self, directory: Path, cluster: Cluster) -> None:
        self.cluster, self.name = cluster, cluster.create()
        self.over = threading.Event()
        self.problems: list[str] = []
        self.counts: Counter[str] = Counter()
        self.trouble = 0.0  # how much of what is asked goes wrong
        self.era: Reply | None = None  # what everybody gets: nobody's entries are to blame
        self.agents: dict[str, Agent] = {}
        self.frontend = Frontend(directory / "frontend").start()
        self.frontend.on_end = lambda _: self.frontend.requests.clear()  # a run may be long
        self.frontend.on_entries = self.frontend.on_file = self._at_body
        self.network = Proxy("127.0.0.1", cluster.port)
        self.backend = Backend(Database(cluster, self.name), directory / "backend")
        self.oracle = Oracle(Database(cluster, self.name), self.frontend, self.backend)
        self._numbers = itertools.count(1)

    # -- the backend -----------------------------------------------------------------------------

    def produce(self, db: Database) -> None:
        if len(db.pending()) < PENDING_MAX:
            random.choices((self.end_call, self.enqueue_one), (8, 1))[0]()

    def end_call(self) -> None:
        """One call in one transaction: mostly committed at once, at times late, or never."""
        extra = ("b_leg.wav",) if random.random() < 0.15 else ()
        with self.backend.db.connect(autocommit=False) as connection:
            call = self.backend.end_call(
                recording=random.random() < 0.45,
                seconds=random.choices((0.1, 0.5, 2, 10, 40), (60, 20, 10, 5, 1))[0],
                events=random.randrange(3),
                extra_files=extra,
                connection=connection,
            )
            self.oracle.kept += [call.directory / name for name in extra if call.size]
            if random.random() < 0.3:
                self.over.wait(random.uniform(0.05, 3))
            if random.random() < 0.05:
                connection.rollback()
                self.oracle.kept += [call.wav] if call.size else []
                return
            connection.commit()  # if this fails, only the outbox knows whether it was
        self.oracle.calls.append(call)

    def enqueue_one(self) -> None:
        """A settings entity, perhaps a large one; one in eight is rejected for good."""
        entity_id = str(uuid.uuid4())
        if random.random() < 1 / 8:
            self.oracle.doomed.add(entity_id)
            self.frontend.rejected[entity_id] = "NEVER"
        text = "x" * random.choice((10, 5_000, 100_000))
        self.backend.enqueue("schedule", {"id": entity_id, "text": text}, entity_id)

    # -- the frontend's weather ------------------------------------------------------------------

    def _at_body(self, request: Request) -> Reply | None:
        # The moment of truth for a recording: what is deleted must have been written down.
        if random.random() < self.trouble * (0.5 if request.file else 0.2):
            return self._strike(device_of(request))
        if self.era or random.random() < self.trouble:
            return self.era or random.choice(WEATHER)
        return None

    def _strike(self, device: str) -> Reply | None:
        """Its sender loses its session, or is killed, or both: before what it sent is stored, or
        just after the answer."""
        acts = random.choice(("session", "kill", "session and kill"))
        answered = random.random() < 0.6
        if "session" in acts:
            threading.Timer(random.uniform(0, 0.02) * answered, self._end_sender).start()
        if "kill" in acts and device != VETERAN:
            after = random.uniform(0, 0.2 if "session" in acts else 0.02) * answered
            threading.Timer(after, self.agents[device].signal, [signal.SIGKILL]).start()
        return None if answered else Reply(reset=True)

    def change_weather(self, _: Database) -> None:
        self.trouble = random.choice((0.0, 0.1, 0.3, 0.5, 0.8))
        self.era = random.choice(ERAS) if random.random() < 0.1 else None

    # -- the agents ------------------------------------------------------------------------------

    def start(self, device: str) -> Agent:
        """The veteran needs no network."""
        port = self.network.port if device != VETERAN else None
        env = agent_env(
            None, self.frontend, self.backend,
            DATABASE_URL=self.cluster.url(self.name, port=port, application_name=device),
            SYNC_DEVICE_ID=device,
            SYNC_TIMEOUT_SEC=1,
            SYNC_POLL_INTERVAL_SEC=1,
            SYNC_BATCH_SIZE=random.choice((1, 20, 100, 100)),
            SYNC_DELETE_AFTER_SEC=random.choice((0, 0, 1)),
            SYNC_UPLOAD_KBPS=random.choice((0, 0, 0, 4000)),
        )  # fmt: skip
        self.agents[device] = agent = Agent(env)
        return agent

    def live(self, _: Database) -> None:
        """One agent, from its start to its end, which may come while it starts."""
        agent = self.start(f"agent-{next(self._numbers)}")
        until = time.monotonic() + random.expovariate(1 / 3)
        while agent.running and time.monotonic() < until and not self.over.wait(0.1):
            if random.random() < 0.01:  # another takes over, and then it goes on where it was
                agent.signal(signal.SIGSTOP)
                self.over.wait(random.uniform(0.3, 4))
                agent.signal(signal.SIGCONT)
        agent.signal(random.choices((signal.SIGKILL, signal.SIGTERM), (9, 1))[0])
        self.reap(agent)

    def reap(self, agent: Agent) -> None:
        """It ends as it was told to, in time, and never by a bug."""
        code, log = agent.wait(STOP_MAX), agent.log()
        self.counts["kill -9" if code == -signal.SIGKILL else "SIGTERM"] += 1
        # One that is told to stop before it listens ends by the signal.
        usual = code in (0, -signal.SIGTERM, -signal.SIGKILL)
        if not usual or "Traceback" in log or "a bug" in log:
            self.problems.append(f"an agent ended with {code}:\n{log[-2000:]}")
        agent.close()

    # -- the surroundings ------------------------------------------------------------------------

    def shake_network(self, _: Database) -> None:
        """What it held back is dropped: late, it would be a fault that no sender can mend."""
        network = self.network
        random.choice((network.silent, network.silence_open, network.refuse, network.cut))()
        self.over.wait(random.uniform(0.5, 5))
        network.cut()
        network.resume()

    def _end_sender(self) -> None:
        with contextlib.suppress(psycopg.Error), self.cluster.admin() as admin:
            self.counts["sessions ended"] += admin.execute(END_SENDER, (self.name,)).rowcount

    def shake_database(self, _: Database) -> None:
        chance = random.random()
        if chance < 0.75:
            self._end_sender()
        else:
            self.counts["database crashes and restarts"] += 1
            self.cluster.restart("immediate" if chance < 0.92 else "fast")

    def look(self, _: Database) -> None:
        self.problems += [f"in the middle of it: {lost}" for lost in self.oracle.lost()[:5]]

    # -- the run ---------------------------------------------------------------------------------

    def actors(self) -> list[threading.Thread]:
        """Each with the mean of its pauses, in seconds."""
        acts: list[tuple[float, Callable[[Database], object]]] = [
            *[(0.3, self.produce)] * 5, *[(0.15, self.live)] * 2,
            (10, lambda _: self.agents[VETERAN].hup()),
            (1.5, self.change_weather), (4, self.shake_network), (4, self.shake_database),
            (5, self.look),
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
        veteran = self.start(VETERAN)
        self.oracle.end_call()
        self.settle()
        first = self.vitals(veteran)
        actors = self.actors()
        for actor in actors:
            actor.start()
        self.over.wait(minutes * 60)
        self.over.set()
        for actor in actors:
            actor.join(60)
        self.trouble, self.era = 0.0, None
        self.backend.enqueue("schedule")  # nine rejected in a row: the tenth waits for one
        self.oracle.end_call()
        veteran.hup()
        took = self.settle()
        self.problems += self.oracle.wrong()
        last = self.vitals(veteran)
        if last[0] > 1.3 * first[0] or last[1] > first[1] + 3:  # connections are kept for a while
            self.problems.append(f"not flat: KiB and descriptors {first}, later {last}")
        veteran.signal(signal.SIGTERM)
        self.reap(veteran)
        calls, kills = self.oracle.calls, self.counts["kill -9"]
        if len(calls) < CALLS_PER_MINUTE * minutes or kills < KILLS_PER_MINUTE * minutes:
            self.problems.append("too few calls or kills: this says nothing")
        uploads = self.frontend.uploads
        twice = len(uploads) - len({file.recording_id for file in uploads})
        table = {
            "minutes": minutes,
            "calls, with a recording": f"{len(calls)}, {sum(bool(call.size) for call in calls)}",
            **dict(sorted(self.counts.items())),
            "lost": sum("arrived" in each or "gone" in each for each in self.problems),
            "dead letters, all of them due": len(self.oracle.dead()),
            "entries, recordings sent twice": f"{self.oracle.repeated()}, {twice}",
            "KiB and descriptors of the agent that lived through it": f"{first}, later {last}",
            "seconds from the last fault until all was through": round(took),
        }
        print("\n| | |\n|---|---|")
        print("\n".join(f"| {what} | {value} |" for what, value in table.items()))
        print("\n".join(f"PROBLEM: {problem}" for problem in self.problems[:30]))
        print(f"{'FAILED' if self.problems else 'passed'}: {len(self.problems)} problems")
        return not self.problems

    @staticmethod
    def vitals(agent: Agent) -> tuple[int, int]:
        """Its memory, and its descriptors."""
        return agent.rss_kib(), len(list(Path(f"/proc/{agent.pid}/fd").iterdir()))

    def settle(self) -> float:
        """How long it takes until all is through."""
        began = time.monotonic()

        def through() -> bool:
            with contextlib.suppress(psycopg.errors.UndefinedTable):  # no agent has been here yet
                let_hours_pass(self.oracle.db)  # an entry's own pause may be an hour by now
            time.sleep(0.3)
            return not self.oracle.unfinished()

        def left() -> str:
            return f"{self.oracle.unfinished()[:10]}\n{self.agents[VETERAN].log()[-2000:]}"

        wait_until(through, DRAIN_SEC, "the rest", left)
        return time.monotonic() - began

    def close(self) -> None:
        self.over.set()
        for agent in self.agents.values():
            agent.close()
        self.frontend.stop()
        self.network.stop()


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

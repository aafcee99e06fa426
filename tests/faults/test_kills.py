"""A kill -9 at every system call: nothing is lost, and the next start finishes it.

The plan is read off a traced run, so that a new step of the agent is covered without a change
here. Every step-th point is struck (SERVERSYNC_KILL_STEP, 1 for all of them).
"""

from __future__ import annotations

import os
import re
import signal
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psycopg
import pytest

from agent import Agent, agent_env, run_once
from backend import Backend
from frontend import Frontend, Reply
from ledger import dead, failures, let_hours_pass, locked
from oracle import Oracle
from pg import Cluster, Database
from waiting import wait_until

STEP = int(os.environ.get("SERVERSYNC_KILL_STEP", "16"))
CALLS = "trace=%file,%network,%desc"
PATIENCE_SEC = 300 + 6000 // STEP  # some 130 points a shard, and the machine may be busy
Strace = tuple[str, ...]


class Scene:
    """Three calls that ended, one of them with a file that is not ours to delete; and `once`."""

    step, shards = STEP, 8
    at_once = 1  # requests that may be under way

    def __init__(self, oracle: Oracle) -> None:
        self.oracle, self.db = oracle, oracle.db
        self.env = agent_env(self.db, oracle.frontend, oracle.backend, SYNC_DELETE_AFTER_SEC=0)
        for extra in ((), (), ("b_leg.wav",)):
            oracle.end_call(events=1, extra_files=extra)

    def play(self, strace: Strace) -> int:
        return run_once(self.env, prefix=strace).returncode

    def finish(self) -> None:
        """The next start does the rest."""
        done = run_once(self.env)
        assert done.returncode == 0, done.stdout + done.stderr
        assert not self.oracle.unfinished() + self.oracle.wrong()


class Trouble(Scene):
    """With an entry that is rejected for good, one that is retried, and a large one; and `run`."""

    step, shards = 4 * STEP, 2
    at_once = 2  # entries go while a file travels

    def __init__(self, oracle: Oracle) -> None:
        super().__init__(oracle)
        self.bad, _ = self._poison(400)
        self.sick, self.name = self._poison(500)
        oracle.doomed.add(self.bad)
        oracle.backend.enqueue("schedule", {"text": "x" * 700_000})
        oracle.end_call(events=1)

    def _poison(self, status: int) -> tuple[int, str]:
        name = str(uuid.uuid4())
        self.oracle.frontend.poison[name] = Reply(status, {}, {"error": "this one"})
        return self.oracle.backend.enqueue(entity_id=name), name

    def play(self, strace: Strace) -> int:
        """Until all is through but what is tried again and again."""
        with Agent(self.env, prefix=strace) as agent:

            def through() -> bool:
                tries = failures(self.db).get(self.sick, ("", 0, 0))[1]
                if 0 < tries < 3:
                    let_hours_pass(self.db)
                left = self.oracle.unfinished()
                return tries >= 3 and left == [f"entry {self.sick} is pending"]

            wait_until(lambda: not agent.running or through(), 60, "the rest", agent.log)
            if agent.running:
                agent.signal(signal.SIGTERM)
            return agent.wait()

    def finish(self) -> None:
        del self.oracle.frontend.poison[self.name]
        with suppress(psycopg.errors.UndefinedTable):  # no agent has made its schema yet
            let_hours_pass(self.db)
        assert run_once(self.env).returncode in (0, 1)  # 1: it made the dead letter
        assert not self.oracle.unfinished() + self.oracle.wrong()
        assert dead(self.db) == {self.bad: "BAD_REQUEST"}


@contextmanager
def scene(kind: type[Scene], cluster: Cluster, directory: Path) -> Iterator[Scene]:
    db = Database(cluster)
    try:
        with Frontend(directory / "frontend") as frontend:
            yield kind(Oracle(db, frontend, Backend(db, directory / "backend")))
    finally:
        db.close()
        db.drop()


def trace(made: Scene, log: Path, *options: str) -> tuple[int, str]:
    """The exit code of a traced run, and the trace. -D: signals reach the agent. No -f: strace
    counts the calls of a child, as the imports have some, apart."""
    code = made.play(("strace", "-D", "-o", str(log), "-e", CALLS, *options))
    wait_until(lambda: "\n+++ " in log.read_text(errors="replace"), what="strace's last words")
    return code, log.read_text(errors="replace")


def plan(kind: type[Scene], cluster: Cluster, directory: Path) -> list[tuple[str, int]]:
    """Every system call after the imports: its name and its number among those of its name."""
    with scene(kind, cluster, directory) as made:
        code, text = trace(made, directory / "trace")
        assert code == 0
        made.finish()
    before: Counter[str] = Counter()
    points = []
    started = False
    for line in text.splitlines():
        match = re.match(r"(\w+)\(", line)
        if not match:
            continue
        started = started or ("openat" in line and "serversync.env" in line)
        before[match[1]] += 1
        if started:
            points.append((match[1], before[match[1]]))
    return points


def strike(made: Scene, log: Path, name: str, count: int) -> tuple[bool, int]:
    """Whether it was reached, and how many entries and files were sent again."""
    code, text = trace(made, log, "-e", f"inject={name}:signal=KILL:when={count}")
    where = f"killed at {name} {count}: {text[-300:]}"
    oracle = made.oracle
    assert not oracle.lost(), (oracle.lost(), where)
    wait_until(lambda: not locked(made.db), what="the end of its session")
    try:
        made.finish()
    except AssertionError as error:
        raise AssertionError(where) from error
    extra = oracle.calls[2].directory
    assert [path.name for path in extra.iterdir()] == ["b_leg.wav"], where
    entries = oracle.repeated()
    files = len(oracle.frontend.uploads) - len(oracle.calls)
    assert files <= 1 and bool(entries) + files <= made.at_once, f"more was under way: {where}"
    return code in (-9, 137), entries + files


@pytest.mark.timeout(PATIENCE_SEC)
@pytest.mark.parametrize(
    ("kind", "shard"),
    [(kind, shard) for kind in (Scene, Trouble) for shard in range(kind.shards)],
    ids=lambda value: value if isinstance(value, int) else value.__name__.lower(),
)
def test_a_kill_at_any_system_call_loses_nothing_and_the_next_start_finishes(
    cluster: Cluster, tmp_path: Path, kind: type[Scene], shard: int
) -> None:
    points = plan(kind, cluster, tmp_path)
    assert len(points) > 200, "the trace holds no cycle"
    first = dict(reversed(points))  # of each name
    repeated = 0
    points = points[shard * kind.step :: kind.step * kind.shards]
    for name, count in points:
        # A run is not quite like the one that was traced: on a machine that is less busy it has
        # fewer polls, reads, statements. Then an earlier call of that name; the first is in each.
        at, earlier = count, 1
        while True:
            place = tmp_path / f"{name}-{count}-{at}"
            with scene(kind, cluster, place) as made:
                reached, again = strike(made, place / "killed", name, at)
            repeated += again
            if reached:
                break
            print(f"{name} {at} was not reached")
            assert at > first[name]
            at, earlier = max(first[name], at - earlier), 2 * earlier
    print(f"{len(points)} points, {repeated} entries and files sent again")

"""A kill -9 at every system call of a cycle: nothing is lost, and the next start finishes it.

The plan is read off a traced run, so that a new step of the agent is covered without a change
here. Every step-th point is struck (SERVERSYNC_KILL_STEP, 1 for all of them).
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from agent import agent_env, run_once
from backend import Backend
from frontend import Frontend
from oracle import Oracle
from pg import Cluster, Database

STEP = int(os.environ.get("SERVERSYNC_KILL_STEP", "16"))
SHARDS = 8
CALLS = "trace=%file,%network,%desc"
PATIENCE_SEC = 300 + 6000 // STEP  # some 130 points a shard, and the machine may be busy


@contextmanager
def scene(cluster: Cluster, directory: Path) -> Iterator[Oracle]:
    """Three calls that ended, one of them with a file that is not ours to delete."""
    db = Database(cluster)
    try:
        with Frontend(directory / "frontend") as frontend:
            oracle = Oracle(db, frontend, Backend(db, directory / "backend"))
            for extra in ((), (), ("b_leg.wav",)):
                oracle.end_call(events=1, extra_files=extra)
            yield oracle
    finally:
        db.close()
        db.drop()


def run(oracle: Oracle, strace: tuple[str, ...] = ()) -> int:
    env = agent_env(oracle.db, oracle.frontend, oracle.backend, SYNC_DELETE_AFTER_SEC=0)
    return run_once(env, prefix=strace).returncode


def plan(cluster: Cluster, directory: Path) -> list[tuple[str, int]]:
    """Every system call after the imports: its name and its number among those of its name."""
    trace = directory / "trace"
    with scene(cluster, directory) as oracle:
        assert run(oracle, ("strace", "-f", "-o", str(trace), "-e", CALLS)) == 0
        assert not oracle.wrong() and not oracle.unfinished()
    before: Counter[str] = Counter()
    points = []
    started = False
    for line in trace.read_text(errors="replace").splitlines():
        match = re.match(r"\d+ +(\w+)\(", line)
        if not match:
            continue
        started = started or ("openat" in line and "serversync.env" in line)
        before[match[1]] += 1
        if started:
            points.append((match[1], before[match[1]]))
    return points


@pytest.mark.timeout(PATIENCE_SEC)
@pytest.mark.parametrize("shard", range(SHARDS))
def test_a_kill_at_any_system_call_loses_nothing_and_the_next_start_finishes(
    cluster: Cluster, tmp_path: Path, shard: int
) -> None:
    points = plan(cluster, tmp_path)
    assert len(points) > 200, "the trace holds no cycle"
    killed = repeated = 0
    points = points[shard * STEP :: STEP * SHARDS]
    for number, (name, count) in enumerate(points):
        with scene(cluster, tmp_path / str(number)) as oracle:
            inject = f"inject={name}:signal=KILL:when={count}"
            log = tmp_path / "killed"
            code = run(oracle, ("strace", "-f", "-o", str(log), "-e", CALLS, "-e", inject))
            killed += code in (-9, 137)
            where = f"killed at {name} {count}: {log.read_text(errors='replace')[-300:]}"
            assert not oracle.lost(), (oracle.lost(), where)
            assert run(oracle) == 0, where
            assert not oracle.unfinished() + oracle.wrong(), where
            extra = oracle.calls[2].directory
            assert [path.name for path in extra.iterdir()] == ["b_leg.wav"], where
            entries = oracle.repeated()
            files = len(oracle.frontend.uploads) - len(oracle.calls)
            assert bool(entries) + files <= 1, f"only one request was under way: {where}"
            repeated += entries + files
    print(f"{len(points)} points, {killed} kills, {repeated} entries and files sent again")
    # The rest was not reached: a run is not quite like the one that was traced.
    assert len(points) - killed <= 1 + len(points) // 8

"""A model: calls, answers, kills, crashes and clocks in any order; the oracle looks at each step.

Run by its path: pytest tests/faults/model.py. The same examples every time;
SERVERSYNC_MODEL_EXAMPLES=200 tries so many new ones.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import psycopg
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from agent import Agent, agent_env
from backend import Backend, Call
from frontend import Frontend, Reply, Request
from ledger import let_hours_pass
from oracle import Oracle
from pg import Cluster, Database
from proxy import Proxy
from waiting import wait_until

MORE = os.environ.get("SERVERSYNC_MODEL_EXAMPLES")
EXAMPLES = int(MORE or 5)
LIBFAKETIME = next(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"), None)
CLOCKS = [None, None, None, "-1y", "+1y", "@1970-01-01 00:00:10"]
END_SESSIONS = """
    select pg_terminate_backend(pid) from pg_stat_activity
    where application_name = 'serversync' and datname = %s
"""
REPLIES = {
    "500": Reply(500, {}, "<html>trouble</html>"),
    "a portal": Reply(200, {}, "<html>please log in</html>"),
    "a login": Reply(302, {"Location": "/login"}, "<html>login</html>"),
    "429": Reply(429, {"Retry-After": "1"}, {}),
    "a reset": Reply(reset=True),
    "a stall": Reply(stall=2),
    "half an answer": Reply(200, {}, {"ok": True, "more": "x" * 99}, half=True),
    "a trickle": Reply(503, {}, "<html>trouble</html>", trickle=0.3),
    "nonsense": Reply(raw=b"\x00\xff\r\n\r\n"),
    "stored, a reset": Reply(store=True, reset=True),
    "stored, a stall": Reply(store=True, stall=2),
    "stored, 500": Reply(500, {}, "<html>trouble</html>", store=True),
    "stored, a portal": Reply(200, {}, "<html>welcome</html>", store=True),
}
HEADS = {
    "a reset in the body": Reply(reset=True, after=1000),
    "an early answer": Reply(503, {"Connection": "close"}, "busy", after=1000, close=True),
    "a stall in the body": Reply(stall=2, after=1000),
}
EVENTS = ["kill", "stop", "session ends", "crash", "database cut", "database silent"]
Meets = str | tuple[str, str]
LENGTHS = st.sampled_from([0.05, 0.05, 1])
MEETS = st.one_of(
    st.sampled_from([*REPLIES, *HEADS, "good"]),
    st.tuples(st.sampled_from(EVENTS), st.sampled_from(["before", "stored", "answered"])),
)
PLANS = st.lists(MEETS, min_size=3, max_size=8)


class Enough(BaseException):
    """So many whole examples were tried: hypothesis itself also counts those that are empty."""


class World(RuleBasedStateMachine):
    """What there is, and what can happen to it."""

    seen: ClassVar[Counter[str]] = Counter()  # of all examples: what the model has really met

    def __init__(self, cluster: Cluster, directory: Path) -> None:
        super().__init__()
        self.cluster = cluster
        self.db = Database(cluster)
        self.proxy = Proxy("127.0.0.1", cluster.port)
        self.frontend = Frontend(directory / self.db.name / "frontend").start()
        self.backend = Backend(self.db, directory / self.db.name / "backend")
        self.oracle = Oracle(self.db, self.frontend, self.backend)
        self.open: list[tuple[psycopg.Connection[object], Call]] = []
        self.without_meta: list[Call] = []
        self.plan: list[Meets] = []
        self.agents: dict[str, Agent] = {}
        self.crashed = False
        self.steady = threading.Event()  # the database is not being restarted
        self.steady.set()
        self._met: dict[Request, Meets] = {}
        self._ended: set[str] = set()
        self.frontend.on_head = self._at_head
        self.frontend.on_entries = self.frontend.on_file = self._at_body

    # -- producers -------------------------------------------------------------------------------

    @initialize()
    def some_calls_have_ended(self) -> None:
        for seconds in (0.05, 1):
            self.a_call_ends(seconds, 1, True, False)

    @rule(seconds=LENGTHS, events=st.integers(0, 2), meta=st.booleans(), late=st.booleans())
    def a_call_ends(self, seconds: float, events: int, meta: bool, late: bool) -> None:
        connection = self.db.connect(autocommit=False)
        call = self.backend.end_call(
            seconds=seconds, events=events, meta=meta, connection=connection
        )
        if not meta:
            self.without_meta.append(call)
        self.open.append((connection, call))
        if not late:
            self._commit(-1)

    def _commit(self, which: int) -> None:
        connection, call = self.open.pop(which)
        try:
            connection.commit()
            self.oracle.calls.append(call)
        except psycopg.OperationalError:  # the database crashed since
            self._never_came(call)
        finally:
            connection.close()

    def _never_came(self, call: Call) -> None:
        self.oracle.never.add(call.call_log_id)
        self.oracle.kept.append(call.wav)

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 9))
    def a_late_commit(self, which: int) -> None:
        self._commit(which % len(self.open))

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 9))
    def a_rollback(self, which: int) -> None:
        connection, call = self.open.pop(which % len(self.open))
        connection.close()
        self._never_came(call)

    @precondition(lambda self: self.without_meta)
    @rule()
    def a_late_meta(self) -> None:
        self.backend.write_meta(self.without_meta.pop())

    @precondition(lambda self: self.oracle.calls)
    @rule(which=st.integers(0, 99))
    def a_recording_is_enqueued_again(self, which: int) -> None:
        call = self.oracle.calls[which % len(self.oracle.calls)]
        payload = {"callLogId": call.call_log_id, "uploadStatus": "local_only", "transcript": "?"}
        self.backend.enqueue("recording", payload, call.recording_id)

    # -- frontend, network, database -------------------------------------------------------------

    @rule()
    def the_frontend_goes_or_comes(self) -> None:
        if self._is_up():
            self.frontend.stop()
        else:
            self._come_up()

    def _is_up(self) -> bool:
        return self.frontend._listener is not None

    def _come_up(self) -> None:
        def up() -> bool:
            try:
                self.frontend.start()
            except OSError as error:
                raise LookupError from error
            return True

        wait_until(up, 20, "the frontend's port")

    @rule()
    def due_times_come(self) -> None:
        if self.db.value("select to_regclass('serversync.failures')") is not None:
            let_hours_pass(self.db)

    def _at_head(self, request: Request) -> Reply | None:
        met = self.plan.pop(0) if self.plan else "good"
        World.seen[str(met)] += 1
        self._met[request] = met
        if isinstance(met, tuple) and met[1] == "before":
            self._event(met[0], request)
            return Reply(reset=True) if met[0] == "kill" else None
        return HEADS.get(met) if isinstance(met, str) else None

    def _at_body(self, request: Request) -> Reply | None:
        met = self._met[request]
        if isinstance(met, str):
            return REPLIES.get(met)
        good = {"ok": True} if request.file is None else self.frontend.file_reply(request.file)
        what, when = met
        if when == "answered":
            threading.Timer(0.003, self._event, [what, request]).start()
        if when == "stored":
            self._event(what, request)
            return Reply(store=True, reset=True)
        return Reply(200, {}, good, store=True)

    def _event(self, what: str, request: Request) -> None:
        """Something happens to the sender or to the database while a request is under way."""
        device = str(request.headers["X-Serversync-Device"])
        agent = self.agents[device]
        acts: dict[str, Callable[[], object]] = {
            "kill": lambda: agent.signal(signal.SIGKILL),
            "stop": lambda: agent.signal(signal.SIGTERM),
            "session ends": self._end_sessions,
            "crash": self._crash,
            "database cut": self.proxy.cut,
            "database silent": self._silence,
        }
        if what in ("kill", "stop"):
            self._ended.add(device)
        acts[what]()

    def _end_sessions(self) -> None:
        with self.cluster.admin() as admin:
            admin.execute(END_SESSIONS, (self.db.name,))

    def _silence(self) -> None:
        self.proxy.silent()
        threading.Timer(0.7, self.proxy.resume).start()

    def _crash(self) -> None:
        """The database's, once an example: it costs a second."""
        if not self.crashed:
            self.crashed = True
            self.steady.clear()
            self.cluster.restart("immediate")
            self.steady.set()

    # -- agents ----------------------------------------------------------------------------------

    def _start(self, clock: str | None = None, **options: object) -> str:
        device = f"agent-{len(self.agents)}"
        if clock is not None and LIBFAKETIME is not None:
            World.seen[f"clock {clock}"] += 1
            options |= {
                "LD_PRELOAD": LIBFAKETIME,
                "FAKETIME": clock,
                "FAKETIME_DONT_FAKE_MONOTONIC": 1,
            }
        url = self.db.url_through(self.proxy.port)
        shared = {"DATABASE_URL": url, "SYNC_DEVICE_ID": device, "SYNC_TIMEOUT_SEC": 1}
        env = agent_env(None, self.frontend, self.backend, **(shared | options))
        self.agents[device] = Agent(env, args=("once",))
        return device

    def _finish(self, device: str) -> int:
        """Waits for the end of an agent; it ends for a reason, and never by a bug."""
        agent = self.agents[device]
        code = agent.wait(60)
        self.steady.wait(60)
        log = agent.log()
        agent.close()
        World.seen[f"exit code {code}"] += 1
        expected = {0, 69, 75} | ({-signal.SIGKILL, -signal.SIGTERM} & {code})
        assert device in self._ended or code >= 0, (code, log)
        assert code in expected and "Traceback" not in log and "a bug" not in log, (code, log)
        return code

    @rule(plan=PLANS, clock=st.sampled_from(CLOCKS), size=st.sampled_from([1, 3, 100]))
    def an_agent_runs(self, plan: list[Meets], clock: str | None, size: int) -> None:
        """`plan` is what its requests meet, one after the other."""
        self.plan = list(plan)
        self._finish(self._start(clock, SYNC_BATCH_SIZE=size))

    @rule(plan=PLANS, seconds=LENGTHS)
    def an_agent_runs_while_a_call_ends(self, plan: list[Meets], seconds: float) -> None:
        """With a bandwidth limit and small batches, so that entries go between two chunks."""
        self.plan = list(plan)
        device = self._start(SYNC_UPLOAD_KBPS=500, SYNC_BATCH_BYTES=1024)
        self.a_call_ends(seconds, 1, True, False)
        self._finish(device)

    @rule(plan=PLANS)
    def two_agents_run(self, plan: list[Meets]) -> None:
        self.plan = list(plan)
        for device in [self._start(), self._start()]:
            self._finish(device)

    # -- what must hold --------------------------------------------------------------------------

    @invariant()
    def nothing_is_lost(self) -> None:
        lost = self.oracle.lost()
        assert not lost, lost

    def teardown(self) -> None:
        try:
            # Not after a step that failed, and not where no agent ever ran.
            if sys.exc_info()[0] is None and self.agents:
                self._calm_down()
        finally:
            for agent in self.agents.values():
                agent.close()
            for connection, _ in self.open:
                connection.close()
            self.frontend.stop()
            self.proxy.stop()
            self.db.drop()
        if World.seen["examples"] >= EXAMPLES:
            raise Enough

    def _calm_down(self) -> None:
        """The faults stop: everything goes through, in order, and so does a fresh call."""
        self.plan.clear()
        if not self._is_up():
            self._come_up()
        while self.open:
            self._commit(0)
        while self.without_meta:
            self.backend.write_meta(self.without_meta.pop())
        self.proxy.resume()
        for attempt in range(6):
            self.due_times_come()
            if attempt == 1:
                self.oracle.end_call(seconds=0.05)
            self._finish(self._start(SYNC_TIMEOUT_SEC=10))
            if attempt and not self.oracle.unfinished():
                break
        problems = self.oracle.unfinished() + self.oracle.wrong()
        assert not problems, (problems, list(self.agents))
        World.seen["examples"] += 1
        World.seen["calls"] += len(self.oracle.calls)
        World.seen["entries sent twice"] += self.oracle.repeated()


def test_whatever_happens_in_whatever_order_nothing_is_lost(
    cluster: Cluster, tmp_path: Path
) -> None:
    World.seen.clear()

    class Here(World):
        def __init__(self) -> None:
            super().__init__(cluster, tmp_path)

    with pytest.raises(Enough):
        run_state_machine_as_test(
            Here,
            settings=settings(
                max_examples=100_000,
                stateful_step_count=12,
                derandomize=MORE is None,
                deadline=None,
                # No shrinking: an example takes seconds. Its steps are printed as they were.
                phases=[Phase.generate],
                report_multiple_bugs=False,
                suppress_health_check=list(HealthCheck),
                print_blob=True,
            ),
        )
    print("\n".join(f"{what}: {number}" for what, number in sorted(World.seen.items())))
    assert World.seen["calls"] > 10

"""Order where order matters: in a call by id, files after their metadata, the last word last."""

import json
import uuid
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st

from agent import AgentFactory
from backend import Backend, Call
from frontend import Frontend, Reply, Request
from ledger import dead_letters, hold, let_hours_pass, waiting
from pg import Database
from waiting import wait_until

BOOM = Reply(500, {}, {"error": "boom"})

# How one entity's requests go wrong during one cycle.
KINDS = {
    "error": BOOM,
    "portal": Reply(200, {}, "<html>log in</html>"),
    "token": Reply(401, {}, {"error": "unauthorized"}),
    "reset": Reply(reset=True),
    "answer lost": Reply(reset=True, store=True),
    "answer useless": Reply(502, {}, "<html>bad gateway</html>", store=True),
    "rejected": Reply(400, {}, {"error": "never"}),
}


@dataclass(frozen=True)
class Cycle:
    """One `once`: which entity fails how, and with which batch size."""

    batch: int
    failing: dict[int, str]
    file_fails: bool
    all_due: bool


@dataclass(frozen=True)
class Plan:
    """Entities (by number) as their entries come, in lanes of three, and what goes wrong."""

    entities: list[int]
    cycles: list[Cycle]

    @staticmethod
    def lane(entity: int) -> int:
        return entity // 3


cycles = st.builds(
    Cycle,
    batch=st.sampled_from([1, 2, 3, 100]),
    failing=st.dictionaries(st.integers(0, 8), st.sampled_from(sorted(KINDS)), max_size=5),
    file_fails=st.booleans(),
    all_due=st.booleans(),
)
plans = st.builds(
    Plan,
    entities=st.lists(st.integers(0, 8), min_size=4, max_size=16),
    cycles=st.lists(cycles, min_size=1, max_size=3),
)


class Run:
    """One example: its own entities, and one call with a recording among them."""

    def __init__(self, plan: Plan, db: Database, frontend: Frontend, backend: Backend) -> None:
        self.plan, self.db, self.frontend = plan, db, frontend
        for seen in (frontend.requests, frontend.entries, frontend.uploads, frontend.log):
            seen.clear()
        frontend.store.clear()
        self.ids = [str(uuid.uuid4()) for _ in range(9)]
        self.calls = [str(uuid.uuid4()) for _ in range(3)]
        self.before = db.value("SELECT coalesce(max(id), 0) FROM sync_outbox")
        half = len(plan.entities) // 2
        for number, entity in enumerate(plan.entities[:half]):
            self.enqueue(backend, number, entity)
        # Its lane is that of the entities 0 to 2: JSON entries come before and after the file's.
        self.call = backend.end_call(call_log_id=self.calls[0], seconds=0.01, events=1)
        for number, entity in enumerate(plan.entities[half:], half):
            self.enqueue(backend, number, entity)
        # A late word on the recording, which knows nothing of the upload.
        payload = {"callLogId": self.call.call_log_id, "uploadStatus": "local_only", "text": "hi"}
        backend.enqueue("recording", payload, self.call.recording_id)

    def enqueue(self, backend: Backend, number: int, entity: int) -> None:
        payload = {"callLogId": self.calls[self.plan.lane(entity)], "version": number}
        backend.enqueue("call_log", payload, self.ids[entity])

    def disturb(self, cycle: Cycle) -> None:
        self.frontend.poison.clear()
        for entity, kind in cycle.failing.items():
            self.frontend.poison[self.ids[entity]] = KINDS[kind]
        self.frontend.on_file = (lambda _: BOOM) if cycle.file_fails else None

    def heal(self) -> None:
        self.frontend.poison.clear()
        self.frontend.on_file = None

    def outbox(self) -> list[dict[str, Any]]:
        query = """
            SELECT id, entity_type, entity_id::text, payload,
                   coalesce(payload->>'callLogId', entity_id::text) AS lane
            FROM sync_outbox WHERE id > %s ORDER BY id
        """
        return self.db.dicts(query, (self.before,))

    def check_arrivals(self) -> None:
        """Nothing arrives before all that its call has waiting before it."""
        arrived = set(dead_letters(self.db))
        rows = self.outbox()
        lanes = defaultdict(list)
        for row in rows:
            lanes[row["lane"]].append(row)
        for what, _, which in self.frontend.log:
            if what == "entry":
                row = next(row for row in rows if row["id"] == which)
            else:
                found = (row for row in rows if row["entity_type"] == "recording_file")
                row = next(row for row in found if row["entity_id"] == which)
            earlier = (
                other["id"]
                for other in lanes[row["lane"]]
                if other["id"] < row["id"] and other["entity_type"] != "recording_file"
            )
            missing = [seq for seq in earlier if seq not in arrived]
            assert not missing, f"{what} {row['id']} came before {missing}: {self.frontend.log}"
            arrived.add(row["id"])

    def check_last_word(self) -> None:
        """On a frontend that overwrites, each entity is as its last entry says."""
        dead = dead_letters(self.db)
        expected: dict[str, Any] = {}
        for row in self.outbox():
            if row["entity_type"] != "recording_file" and row["id"] not in dead:
                expected[row["entity_id"]] = row["payload"]
        url = self.frontend.file_url(self.frontend.files[self.call.call_log_id])
        expected[self.call.recording_id] |= {"uploadStatus": "uploaded", "s3Url": url}
        stored = {key: value["payload"] for key, value in self.frontend.store.items()}
        # What was stored and then rejected (a dead letter) may have left its trace.
        touched = {str(letter["entity_id"]) for letter in dead.values()}
        for entity_id in set(expected) - touched:
            assert stored[entity_id] == expected[entity_id]
        assert self.frontend.playable(self.call.recording_id)


@settings(
    max_examples=10,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
@given(plan=plans)
def test_random_failures_on_random_entries_disturb_neither_order_nor_the_last_word(
    plan: Plan, db: Database, frontend: Frontend, backend: Backend, agent: AgentFactory
) -> None:
    run = Run(plan, db, frontend, backend)
    for cycle in plan.cycles:
        run.disturb(cycle)
        note(agent.once(SYNC_BATCH_SIZE=cycle.batch).stderr)
        if cycle.all_due:
            let_hours_pass(db)
        run.check_arrivals()
    run.heal()
    let_hours_pass(db)
    note(agent.once().stderr)
    assert not db.pending()
    assert not waiting(db)
    run.check_arrivals()
    run.check_last_word()


def test_a_failed_entry_that_is_due_again_during_a_long_pass_keeps_its_place(
    db: Database, frontend: Frontend, backend: Backend, agent: AgentFactory
) -> None:
    """The first retry comes within two seconds; the pass below takes longer than that."""
    lane = {"callLogId": str(uuid.uuid4())}
    first = str(uuid.uuid4())
    backend.enqueue("call_log", lane, first)
    for _ in range(3):
        backend.enqueue()
    backend.enqueue("call_log", lane)
    frontend.poison[first] = BOOM

    def slow(request: Request) -> Reply | None:
        if request.entries[0]["seq"] != 3:
            return None
        frontend.poison.clear()
        return Reply(200, {}, {"ok": True}, store=True, delay=2.2)

    frontend.on_entries = slow
    agent.once(SYNC_BATCH_SIZE=1)
    assert frontend.seqs()[:3] == [2, 3, 4]
    let_hours_pass(db)
    agent.once()
    assert frontend.seqs()[3:] == [1, 5]


def test_entries_of_one_call_wait_behind_their_failed_one_and_other_calls_go_on(
    db: Database, frontend: Frontend, backend: Backend, agent: AgentFactory
) -> None:
    stuck = backend.end_call(seconds=0.01)
    other = backend.end_call(seconds=0.01)
    frontend.poison[stuck.call_log_id] = BOOM
    agent.once()
    assert frontend.seqs() == other.seqs[:-1]
    assert list(frontend.files) == [other.call_log_id]
    assert db.pending() == stuck.seqs
    assert list(waiting(db)) == stuck.seqs[:1]
    # A fresh call, while the first one still waits.
    hold(db)
    fresh = backend.end_call(seconds=0.01)
    requests = len(frontend.requests)
    agent.once()
    assert frontend.seqs() == other.seqs[:-1] + fresh.seqs[:-1]
    assert db.pending() == stuck.seqs
    assert len(frontend.requests) == requests + 2
    frontend.poison.clear()
    let_hours_pass(db)
    assert agent.once().returncode == 0
    assert frontend.seqs()[-4:] == stuck.seqs[:-1]
    assert frontend.log[-1] == ("file", stuck.call_log_id, stuck.recording_id)


def test_a_file_that_waits_holds_no_json_entry_of_its_call(
    db: Database, frontend: Frontend, backend: Backend, agent: AgentFactory
) -> None:
    call = backend.end_call(seconds=0.01)
    frontend.on_file = lambda _: BOOM
    agent.once()
    hold(db)
    later = backend.enqueue("call_log", {"callLogId": call.call_log_id}, call.call_log_id)
    agent.once()
    assert frontend.seqs() == [*call.seqs[:-1], later]
    assert db.pending() == [call.seq("recording_file")]


def test_lanes_are_found_by_any_name_and_writing_of_the_call(
    db: Database, frontend: Frontend, backend: Backend, agent: AgentFactory
) -> None:
    """callLogId, call_log_id and the call's own id, in any case, name one lane."""
    call = str(uuid.uuid4())
    poisonous = backend.enqueue("call_log", {"id": call}, call)
    behind = [
        backend.enqueue("ivr_session_event", {"callLogId": call.upper()}),
        backend.enqueue("ivr_session_event", {"call_log_id": call}),
    ]
    free = backend.enqueue("ivr_session_event", {"callLogId": None, "other": call})
    frontend.poison[call] = BOOM
    agent.once()
    assert frontend.seqs() == [free]
    assert db.pending() == [poisonous, *behind]


@pytest.mark.parametrize("payload_of", [dict, lambda p: {**p, "uploadStatus": "upload_failed"}])
def test_a_recording_sent_again_after_its_upload_still_carries_the_url(
    payload_of: Callable[[dict[str, Any]], dict[str, Any]],
    db: Database,
    frontend: Frontend,
    backend: Backend,
    agent: AgentFactory,
) -> None:
    call = backend.end_call(seconds=0.01)
    agent.once()
    status, url = backend.upload_status(call)
    assert status == "uploaded"
    snapshot = frontend.received(call.recording_id)[0]["payload"]
    assert snapshot["uploadStatus"] == "local_only"
    late = payload_of({**snapshot, "transcript": "moshi moshi"})
    seq = backend.enqueue("recording", late, call.recording_id)
    agent.once()
    again = frontend.received(call.recording_id)[1]
    assert again["seq"] == seq
    assert again["payload"] == {**late, "uploadStatus": "uploaded", "s3Url": url}
    assert frontend.playable(call.recording_id)
    # The outbox itself keeps what the backend wrote.
    assert db.value("SELECT payload FROM sync_outbox WHERE id = %s", (seq,)) == late


def test_a_recording_that_is_no_object_is_sent_as_it_is_after_its_upload(
    db: Database, frontend: Frontend, backend: Backend, agent: AgentFactory
) -> None:
    call = backend.end_call(seconds=0.01)
    agent.once()
    backend.enqueue("recording", ["strange"], call.recording_id)
    assert agent.once().returncode == 0
    assert frontend.received(call.recording_id)[-1]["payload"] == ["strange"]


def held_back(db: Database, backend: Backend) -> tuple[Callable[[], None], int]:
    """An entry with a low id, in a transaction that is still open: its end, and the id."""
    connection = db.connect(autocommit=False)
    seq = backend.enqueue(connection=connection)

    def commit() -> None:
        connection.commit()
        connection.close()

    return commit, seq


def test_an_id_that_becomes_visible_late_is_delivered(
    db: Database, frontend: Frontend, backend: Backend, agent: AgentFactory
) -> None:
    agent.once()  # makes the NOTIFY trigger: a transaction that is open would be in its way
    agent()
    commit, late = held_back(db, backend)
    early = [backend.enqueue() for _ in range(3)]
    frontend.wait(lambda: frontend.seqs() == early)
    commit()
    frontend.wait(lambda: frontend.seqs() == [*early, late])
    wait_until(lambda: not db.pending())


def test_an_id_that_becomes_visible_behind_the_pass_is_delivered_by_the_same_cycle(
    db: Database, frontend: Frontend, backend: Backend, agent: AgentFactory
) -> None:
    commit, late = held_back(db, backend)
    early = [backend.enqueue() for _ in range(3)]

    def commit_behind(request: Request) -> None:
        if request.entries[0]["seq"] == early[1]:
            commit()

    frontend.on_entries = commit_behind
    assert agent.once(SYNC_BATCH_SIZE=1).returncode == 0
    assert frontend.seqs() == [*early, late]


def test_a_call_of_many_batches_arrives_in_order_while_its_batches_fail(
    db: Database, frontend: Frontend, backend: Backend, agent: AgentFactory
) -> None:
    """Every third request fails, whatever it holds."""
    lane = {"callLogId": str(uuid.uuid4())}
    calls: list[Call] = [backend.end_call(seconds=0.01, events=5) for _ in range(4)]
    own = [backend.enqueue("ivr_session_event", lane) for _ in range(40)]

    def every_third(request: Request) -> Reply | None:
        return BOOM if len(frontend.requests) % 3 == 0 else None

    frontend.on_entries = every_third

    def moved_on(count: int) -> bool:
        return len(frontend.requests) > count or not db.pending()

    running = agent(SYNC_BATCH_SIZE=10)
    frontend.wait(lambda: frontend.requests)
    while db.pending():
        count = len(frontend.requests)
        let_hours_pass(db)
        running.hup()  # an outage, too, is asked again at once
        frontend.wait(partial(moved_on, count))
    assert [seq for seq in frontend.seqs() if seq in own] == own
    for call in calls:
        assert [seq for seq in frontend.seqs() if seq in call.seqs] == call.seqs[:-1]
    sent = [json.loads(request.body or b"") for request in frontend.of_kind("entries")]
    assert max(len(body["entries"]) for body in sent) <= 10

"""Whose fault is it? Outages use up nothing, poisonous entries die, and nothing blocks the rest."""

import itertools
import random
import time
import uuid
from collections.abc import Iterator
from functools import partial

import pytest

from agent import Agent, AgentFactory, NotifySocket
from backend import Backend
from frontend import Frontend, Reply, Request
from ledger import dead_letters, entity_of, let_hours_pass, waiting
from pg import Database
from waiting import wait_until

BOOM = Reply(500, {}, {"error": "boom"})
REJECTED = Reply(400, {}, {"error": "not like this"})
HTML = "<html><body>Please log in to the hotel's network</body></html>"


def poison(db: Database, frontend: Frontend, seq: int, reply: Reply = BOOM) -> None:
    entity = entity_of(db, seq)
    frontend.poison[entity] = reply


def again(running: Agent, frontend: Frontend, db: Database, hours: float = 0) -> None:
    """Time passes for what waits, and the agent looks again; also in an outage (SIGHUP)."""
    frontend.wait(lambda: frontend.requests)  # from then on there is a schema
    asked = len(frontend.requests)
    let_hours_pass(db, hours)
    running.hup()
    frontend.wait(lambda: len(frontend.requests) > asked or not db.pending(), what="a new cycle")


# --- everything fails -------------------------------------------------------------------------


OUTAGES: dict[str, tuple[Reply, int, int]] = {
    "401 for an hour": (Reply(401, {}, {"error": "unauthorized"}), 1, 30),
    "404 for three days": (Reply(404, {}, {"error": "not found"}), 72, 2),
    "a captive portal for a month": (Reply(200, {}, HTML), 720, 30),
    "302 for three days": (Reply(302, {"Location": "/login"}), 72, 2),
    "500 for three days": (BOOM, 72, 30),
    "500 for three days, of few lanes": (BOOM, 72, 2),
    "resets for three days": (Reply(reset=True), 72, 30),
}


@pytest.mark.parametrize(("reply", "hours", "lanes"), OUTAGES.values(), ids=OUTAGES.keys())
def test_an_outage_of_hours_or_days_kills_nothing_and_everything_arrives_afterwards(
    reply: Reply,
    hours: int,
    lanes: int,
    db: Database,
    frontend: Frontend,
    backend: Backend,
    agent: AgentFactory,
) -> None:
    """Nine tries are more than the eight attempts that an entry has."""
    backend.enqueue_many(lanes)
    call = backend.end_call(seconds=0.01)
    frontend.on_head = lambda _: reply
    for _ in range(9):
        assert agent.once().returncode == (69 if lanes > 10 else 75)
        let_hours_pass(db, hours / 9)
    assert all(failure["attempts"] == 0 for failure in waiting(db).values())
    assert not dead_letters(db)
    frontend.on_head = None
    assert agent.once().returncode == 0
    assert frontend.seqs() == [*range(1, lanes + 1), *call.seqs[:-1]]
    assert call.call_log_id in frontend.files
    assert not db.pending()
    assert not waiting(db)


def test_a_wrong_token_holds_everything_until_it_is_right(
    db: Database, frontend: Frontend, backend: Backend, agent: AgentFactory
) -> None:
    backend.enqueue_many(20)
    frontend.require_token = "the-new-token"
    for _ in range(3):
        done = agent.once(SYNC_TOKEN="the-old-token")
        assert done.returncode == 69
        assert "HTTP 401" in done.stderr
        assert "the-old-token" not in done.stderr
    assert not waiting(db)
    assert agent.once(SYNC_TOKEN="the-new-token").returncode == 0
    assert frontend.seqs() == list(range(1, 21))


def test_a_frontend_that_flaps_at_random_kills_nothing_within_a_day(
    db: Database, frontend: Frontend, backend: Backend, agent: AgentFactory
) -> None:
    """Seven of ten requests fail, for 23 hours; charged attempts alone are not enough to die."""
    chance = random.Random(11)
    backend.enqueue_many(40)
    frontend.on_entries = lambda _: BOOM if chance.random() < 0.7 else None
    charged = 0
    for _ in range(8):
        agent.once(SYNC_RETRY_MAX=1)
        charged = max([charged, *(row["attempts"] for row in waiting(db).values())])
        backend.enqueue_many(5)
        let_hours_pass(db, 23 / 8)
    assert not dead_letters(db)
    assert charged >= 1, "the test is worth nothing: nobody was charged"
    frontend.on_entries = None
    assert agent.once().returncode == 0
    assert sorted(frontend.seqs()) == list(range(1, 81))


def _lanes(requests: list[Request]) -> list[int]:
    return [entry["seq"] for request in requests for entry in request.entries]


def test_a_dead_frontend_costs_a_dozen_requests_first_and_three_a_cycle_later(
    db: Database, frontend: Frontend, backend: Backend, agent: AgentFactory, notify: NotifySocket
) -> None:
    backend.enqueue_many(100)
    frontend.on_entries = lambda _: BOOM
    running = agent(notify=notify)
    notify.wait_for("outage since")
    first = len(frontend.requests)
    assert first <= 12
    tried = {request.entries[0]["seq"] for request in frontend.requests if _single(request)}
    assert len(tried) == 3

    # Each SIGHUP is handled between two cycles, and said: so a request knows its cycle.
    cycles: list[int] = []

    def note_the_cycle(_: Request) -> Reply:
        cycles.append(len(running.lines("the configuration was read again")))
        return BOOM

    frontend.on_entries = note_the_cycle
    for cycle in range(1, 9):
        running.hup()
        wait_until(partial(cycles.count, cycle), what=f"cycle {cycle}")
    later = [request for request in frontend.requests[first:] if request.entries]
    # The agent's own timer may have added a cycle, but each one is of three requests.
    assert all(cycles.count(cycle) % 3 == 0 for cycle in range(1, 8)), cycles
    assert all(_single(request) for request in later)
    # Each cycle begins with lanes that have not been tried: no lane twice while there are others.
    seqs = _lanes(later)
    assert len(set(seqs)) == len(seqs)
    assert not tried & set(seqs)
    assert not waiting(db)
    assert len(db.pending()) == 100


def _single(request: Request) -> bool:
    return len(request.entries) == 1


def test_a_new_entry_does_not_hurry_a_dead_frontend(
    db: Database, frontend: Frontend, backend: Backend, agent: AgentFactory, notify: NotifySocket
) -> None:
    backend.enqueue_many(30)
    frontend.on_entries = lambda _: BOOM
    agent(notify=notify)
    notify.wait_for("outage since")
    started, asked = time.monotonic(), len(frontend.requests)
    while time.monotonic() < started + 1.5:
        backend.enqueue()
    # Full jitter: waits of up to 2, 4, 8 s, so a few cycles may fall into this time.
    assert len(frontend.requests) - asked <= 3 * 12
    assert len(frontend.requests) - asked < db.value("SELECT count(*) FROM sync_outbox") - 30


def test_after_an_outage_the_batches_grow_by_doubling(
    db: Database, frontend: Frontend, backend: Backend, agent: AgentFactory, notify: NotifySocket
) -> None:
    backend.enqueue_many(400)
    frontend.on_entries = lambda _: BOOM
    running = agent(notify=notify)
    notify.wait_for("outage since")
    frontend.on_entries = None
    running.hup()
    accepted: list[int] = []

    def all_through() -> bool:  # its status is known a moment after its entries
        accepted[:] = [len(r.entries) for r in frontend.requests if r.status == 200]
        return sum(accepted) >= 400

    frontend.wait(all_through)
    assert accepted == [1, 2, 4, 8, 16, 32, 64, 100, 100, 73]
    assert sorted(frontend.seqs()) == list(range(1, 401))


def test_after_a_time_out_the_batches_grow_by_a_tenth(
    db: Database, frontend: Frontend, backend: Backend, agent: AgentFactory
) -> None:
    """A frontend that is too slow for more than 20 entries; doubling would hit that ever again."""
    backend.enqueue_many(300)
    frontend.on_entries = lambda r: Reply(stall=60) if len(r.entries) > 20 else None
    assert agent.once(SYNC_TIMEOUT_SEC=0.5).returncode == 0
    assert sorted(frontend.seqs()) == list(range(1, 301))
    sizes = [(len(request.entries), request.status) for request in frontend.requests]
    in_vain = [size for size, status in sizes if not status]
    assert in_vain[:3] == [100, 50, 25]
    # Once the first batch is through, every time-out buys more than one batch.
    first = next(n for n in range(len(sizes)) if sum(s for s, ok in sizes[:n] if ok) >= 100)
    later = sizes[first:]
    assert len([size for size, status in later if not status]) <= len(later) / 4, sizes
    accepted = [size for size, status in later if status]
    assert all(after <= before + 2 for before, after in itertools.pairwise(accepted)), sizes


# --- one is poisonous -------------------------------------------------------------------------


def test_one_poisonous_entry_among_a_thousand_delays_no_other_and_dies_in_the_end(
    db: Database, frontend: Frontend, backend: Backend, agent: AgentFactory
) -> None:
    backend.enqueue_many(456)
    bad = backend.enqueue()
    backend.enqueue_many(544)
    poison(db, frontend, bad)
    running = agent()
    good = [seq for seq in range(1, 1002) if seq != bad]
    frontend.wait(lambda: len(frontend.entries) == 1000)
    assert sorted(frontend.seqs()) == good
    assert len(frontend.requests) <= 11 + 40
    wait_until(lambda: db.pending() == [bad])
    before = waiting(db)[bad]["attempts"]
    # Charged again and again, but younger than a day: eight attempts alone do not kill.
    for _ in range(10):
        _one_more_try(running, frontend, db, backend, bad, hours=1)
    failure = waiting(db)[bad]
    assert failure["attempts"] >= before + 9
    assert failure["error_code"] == "FRONTEND_5XX"
    assert not dead_letters(db)
    good.append(backend.enqueue())
    frontend.wait(lambda: good[-1] in frontend.seqs())
    let_hours_pass(db, 20)
    wait_until(lambda: list(dead_letters(db)) == [bad])
    letter = dead_letters(db)[bad]
    assert letter["error_code"] == "FRONTEND_5XX"
    assert letter["http_status"] == 500
    assert letter["attempts"] >= before + 10
    wait_until(lambda: not db.pending())
    assert not waiting(db)


def _arrived(frontend: Frontend, seq: int) -> bool:
    return seq in frontend.seqs()


def _one_more_try(
    running: Agent, frontend: Frontend, db: Database, backend: Backend, bad: int, hours: float
) -> None:
    """A good entry arrives, and then the poisonous one is tried, and fails, once more."""
    good = backend.enqueue()
    frontend.wait(lambda: good in frontend.seqs())
    tries = waiting(db)[bad]["tries"]
    let_hours_pass(db, hours)
    wait_until(lambda: waiting(db)[bad]["tries"] > tries, what="one more try")
    assert running.running


def test_age_alone_does_not_kill(
    db: Database, frontend: Frontend, backend: Backend, agent: AgentFactory
) -> None:
    """Days old, but charged only a few times; the eighth charged attempt is the last."""
    bad = backend.enqueue()
    poison(db, frontend, bad)
    running = agent()
    wait_until(lambda: db.value("SELECT to_regclass('serversync.failures')"))
    wait_until(lambda: bad in waiting(db))
    attempts = 0
    while attempts < 7:
        _one_more_try(running, frontend, db, backend, bad, hours=100)
        attempts = waiting(db)[bad]["attempts"]
        assert not dead_letters(db)
    backend.enqueue()
    wait_until(lambda: len(db.pending()) == 1)
    let_hours_pass(db)
    wait_until(lambda: dead_letters(db))
    assert dead_letters(db)[bad]["attempts"] == 8


def test_without_a_success_between_a_poisonous_entry_is_never_charged(
    db: Database, frontend: Frontend, backend: Backend, agent: AgentFactory
) -> None:
    bad = backend.enqueue()
    poison(db, frontend, bad)
    for _ in range(9):
        assert agent.once().returncode == 75
        let_hours_pass(db, 30)
    failure = waiting(db)[bad]
    assert failure["tries"] >= 9
    assert failure["attempts"] == 0
    assert not dead_letters(db)


def test_a_success_of_files_vouches_for_no_entry(
    db: Database, frontend: Frontend, backend: Backend, agent: AgentFactory
) -> None:
    """Health is judged for each endpoint: uploads go on, entries do not."""
    calls = [backend.end_call(seconds=0.01) for _ in range(4)]
    frontend.on_file = lambda _: BOOM
    agent.once()
    frontend.on_file = None
    bad = backend.enqueue()
    frontend.on_entries = lambda _: BOOM
    for call in calls:
        # One file after the other becomes due, and succeeds.
        db.execute("UPDATE serversync.failures SET next_attempt_at = now() + interval '100 s'")
        db.execute(
            "UPDATE serversync.failures SET next_attempt_at = now() WHERE outbox_id IN (%s, %s)",
            (call.seq("recording_file"), bad),
        )
        agent.once()
        assert call.call_log_id in frontend.files
    failure = waiting(db)[bad]
    assert failure["tries"] >= 4
    assert failure["attempts"] == 0


@pytest.mark.parametrize("count", [3, 12])
def test_poisonous_lanes_that_are_the_oldest_look_like_an_outage_but_not_for_ever(
    count: int, db: Database, frontend: Frontend, backend: Backend, agent: AgentFactory
) -> None:
    bad = [backend.enqueue() for _ in range(count)]
    for seq in bad:
        poison(db, frontend, seq)
    first, last = backend.enqueue_many(50)
    running = agent()
    good = list(range(first, last + 1))
    for _ in range(count):
        if len(frontend.entries) < len(good):
            again(running, frontend, db)
    frontend.wait(lambda: sorted(frontend.seqs()) == good)
    wait_until(lambda: db.pending() == bad)
    assert not dead_letters(db)


def test_one_type_that_fails_for_six_hours_kills_nothing_and_holds_no_other_type_up(
    db: Database, frontend: Frontend, backend: Backend, agent: AgentFactory
) -> None:
    failing = [backend.enqueue("call_log") for _ in range(6)]

    def one_type(request: Request) -> Reply | None:
        types = {entry["entityType"] for entry in request.entries}
        return BOOM if "call_log" in types else None

    frontend.on_entries = one_type
    running = agent()
    for number in range(12):
        other = backend.enqueue("schedule")
        if number % 4 == 0:
            failing.append(backend.enqueue("call_log"))
        frontend.wait(partial(_arrived, frontend, other), timeout=30)
        again(running, frontend, db, 0.5)
    assert not dead_letters(db)
    wait_until(lambda: db.pending() == failing)
    attempts = [row["attempts"] for row in waiting(db).values()]
    assert max(attempts) >= 8, "the test is worth nothing: nobody was charged"
    frontend.on_entries = None

    def drained() -> bool:
        let_hours_pass(db)  # again and again: a pass under way still sets aside what it was told
        return not db.pending()

    wait_until(drained, what="the end of it")
    assert not dead_letters(db)


# --- limits and rejections --------------------------------------------------------------------


@pytest.mark.parametrize("early", [False, True])
def test_a_frontend_that_takes_64_kib_gets_everything_but_what_is_larger(
    early: bool, db: Database, frontend: Frontend, backend: Backend, agent: AgentFactory
) -> None:
    """413; also before the body's end, followed by a reset, as proxies do."""
    too_large = Reply(413, {"Connection": "close"}, HTML, after=1000 if early else 10**9)
    frontend.on_head = lambda request: too_large if request.length > 65536 else None
    backend.enqueue_many(150, padding=2000)
    alone = backend.enqueue(payload={"text": "x" * 100_000})
    sliced = backend.enqueue(payload={"text": "x" * 1_000_000})
    backend.enqueue_many(50, padding=2000)
    assert agent.once().returncode == 1
    assert sorted(frontend.seqs()) == [*range(1, 151), *range(153, 203)]
    letters = dead_letters(db)
    assert list(letters) == [alone, sliced]
    assert {letter["error_code"] for letter in letters.values()} == {"TOO_LARGE"}
    assert {letter["http_status"] for letter in letters.values()} == {413}
    assert not db.pending()
    assert not waiting(db)


def answers() -> Iterator[tuple[str, Reply | None]]:
    yield "400", REJECTED
    yield "422", Reply(422, {}, {"detail": []})
    yield "rejected", None


@pytest.mark.parametrize(("name", "reply"), list(answers()), ids=[name for name, _ in answers()])
def test_a_frontend_that_rejects_everything_kills_nine_of_a_type_and_the_rest_arrives_later(
    name: str,
    reply: Reply | None,
    db: Database,
    frontend: Frontend,
    backend: Backend,
    agent: AgentFactory,
) -> None:
    def reject(request: Request) -> Reply:
        items = [{"seq": e["seq"], "code": "NO", "message": "no"} for e in request.entries]
        return reply or Reply(200, {}, {"ok": True, "rejected": items})

    backend.enqueue_many(60, "call_log")
    backend.enqueue_many(40, "schedule")
    backend.enqueue_many(5, "announcement")
    frontend.on_entries = reject
    assert agent.once().returncode == 1
    asked = len(frontend.requests)
    for _ in range(3):
        let_hours_pass(db, 30)
        backend.enqueue("call_log")
        assert agent.once().returncode in (1, 75)
    assert len(frontend.requests) - asked <= 3 * 30
    deaths = db.rows("""
        SELECT original_topic, count(*) FROM serversync.dead_letters GROUP BY 1 ORDER BY 1
    """)
    assert deaths == [("announcement", 5), ("call_log", 9), ("schedule", 9)]
    assert len(db.pending()) == 108 - 23
    assert all(row["attempts"] == 0 for row in waiting(db).values())
    # Mended: everything that waits goes, and the type may be rejected again.
    frontend.on_entries = None
    let_hours_pass(db, 30)
    agent.once()
    assert not db.pending()
    assert len(frontend.entries) == 108 - 23
    bad = backend.enqueue("call_log")
    poison(db, frontend, bad, REJECTED)
    assert agent.once().returncode == 1
    assert bad in dead_letters(db)


def test_nine_deaths_and_a_success_and_nine_deaths_are_eighteen(
    db: Database, frontend: Frontend, backend: Backend, agent: AgentFactory
) -> None:
    """Only deaths in a row without a success of the type speak against the frontend."""
    bad = []
    for _ in range(2):
        for _ in range(9):
            bad.append(backend.enqueue())
            poison(db, frontend, bad[-1], REJECTED)
        backend.enqueue()
    assert agent.once().returncode == 1
    assert list(dead_letters(db)) == bad
    assert not db.pending()


def test_a_held_type_holds_neither_other_types_nor_other_lanes(
    db: Database, frontend: Frontend, backend: Backend, agent: AgentFactory
) -> None:
    def no_schedules(request: Request) -> Reply | None:
        types = {entry["entityType"] for entry in request.entries}
        return REJECTED if "schedule" in types else None

    frontend.on_entries = no_schedules
    lanes = [str(uuid.uuid4()) for _ in range(15)]
    held = [backend.enqueue("schedule", {"callLogId": lane}) for lane in lanes]
    behind = [backend.enqueue("call_log", {"callLogId": lane}) for lane in lanes]
    free = [backend.enqueue("call_log") for _ in range(5)]
    agent.once()
    dead = list(dead_letters(db))
    assert len(dead) == 9
    through = [seq for seq, schedule in zip(behind, held, strict=True) if schedule in dead]
    assert sorted(frontend.seqs()) == through + free
    assert not set(db.pending()) & set(free)
    frontend.on_entries = None
    let_hours_pass(db)
    agent.once()
    assert not db.pending()
    for schedule, call in zip(held, behind, strict=True):
        seqs = frontend.seqs()
        assert schedule in dead or seqs.index(schedule) < seqs.index(call)

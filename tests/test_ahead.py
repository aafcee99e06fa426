"""The look ahead: while the frontend answers, PostgreSQL writes out the next batch. What it found
is only used if nothing but a confirmation came between; what fails then fails without it, too."""

import re

from agent import AgentFactory
from backend import Backend
from frontend import Frontend, Reply, Request
from ledger import dead, failures, let_hours_pass
from pg import Database
from serversync import PLAN_AS_USUAL, PLAN_ONCE
from waiting import wait_until

BOOM = Reply(500, {}, {"error": "boom"})
SESSION = """
    select pid, state from pg_stat_activity
    where application_name = 'serversync' and datname = current_database()
"""
OPEN = SESSION.replace("pid, state", "state, xact_start is not null")
# An entry that cannot be written out, as large ones cannot; the others can.
SPOIL = """
    create or replace function serversync.entry(
        seq bigint, entity_type text, entity_id uuid, payload jsonb, created_at timestamptz,
        op text, uploaded jsonb
    ) returns text language sql stable as $$
        select json_build_object('entityType', entity_type, 'entityId', entity_id,
            'payload', payload, 'createdAt', created_at, 'seq', seq / (seq - %d))::text
    $$
"""
REFUSE = """
    create function refuse() returns trigger language plpgsql as $$
        begin raise exception 'not now'; end $$;
    create trigger refuse before update on sync_outbox execute function refuse()
"""
# All from one on take their time.
SLOW = """
    create or replace function serversync.entry(
        seq bigint, entity_type text, entity_id uuid, payload jsonb, created_at timestamptz,
        op text, uploaded jsonb
    ) returns text language plpgsql stable as $$
    begin
        if seq >= {seq} then
            perform pg_sleep({seconds});
        end if;
        return json_build_object('entityType', entity_type, 'entityId', entity_id,
            'payload', payload, 'createdAt', created_at, 'seq', seq);
    end $$
"""


def log_statements(db: Database) -> None:
    with db.admin() as admin:
        admin.execute(f"alter database {db.name} set log_statement = 'all'")


def batches_asked_for(db: Database) -> int:
    pid = db.rows(SESSION)[0][0]
    lines = db.cluster.log().splitlines()
    return sum(f"[{pid}]" in line and "execute serversync_fetch" in line for line in lines)


def until_asked_for(db: Database, batches: int) -> int:
    wait_until(lambda: batches_asked_for(db) >= batches)
    return batches_asked_for(db)


def test_next_batch_is_written_out_while_the_frontend_answers(
    agent: AgentFactory, backend: Backend, db: Database, frontend: Frontend
) -> None:
    log_statements(db)
    backend.enqueue_many(5)
    asked: list[int] = []

    def look(_: Request) -> None:
        asked.append(until_asked_for(db, len(asked) + 2))  # this one, and one more

    frontend.on_entries = look
    assert agent.once(SYNC_BATCH_SIZE=2).returncode == 0
    assert [len(request.entries) for request in frontend.requests] == [2, 2, 1]
    assert frontend.seqs() == [1, 2, 3, 4, 5]


def test_next_batch_is_no_open_transaction_however_large_it_is_and_long_the_frontend_takes(
    agent: AgentFactory, backend: Backend, db: Database, frontend: Frontend
) -> None:
    """More than the socket to PostgreSQL holds: unread, it would keep the statement going."""
    log_statements(db)
    backend.enqueue_many(6, padding=150_000)
    found: list[tuple[object, ...]] = []

    def look(_: Request) -> None:
        if not found:
            until_asked_for(db, 2)
            wait_until(lambda: db.rows(OPEN) == [("idle", False)], 20)
            found.extend(db.rows(OPEN))

    frontend.on_entries = look
    done = agent.once(SYNC_BATCH_SIZE=3, DATABASE_URL=db.socket_url)
    assert done.returncode == 0 and found, done.stderr
    assert [len(request.entries) for request in frontend.requests] == [3, 3]
    assert min(len(request.body or b"") for request in frontend.requests) > 400_000


def times_planned(db: Database) -> int:
    """How often PostgreSQL planned a batch."""
    return len(re.findall(r"STATEMENT:  \n\twith picked as", db.cluster.log()))


def test_batches_of_a_long_backlog_are_planned_once_but_not_where_lanes_are_left_out(
    agent: AgentFactory, backend: Backend, db: Database, frontend: Frontend
) -> None:
    """As PostgreSQL does with a million entries of its own accord, it plans each batch here."""
    with db.admin() as admin:
        admin.execute(f"alter database {db.name} set log_planner_stats = on")
        admin.execute(f"alter database {db.name} set log_statement = 'all'")
        admin.execute(f"alter database {db.name} set plan_cache_mode = force_custom_plan")
    before, so_far = times_planned(db), len(db.cluster.log())
    backend.enqueue_many(80)
    assert agent.once(SYNC_BATCH_SIZE=2).returncode == 0
    assert 10 < times_planned(db) - before < 20
    poisonous = backend.enqueue_many(80)[0] + 40
    frontend.on_entries = lambda request: BOOM if poisonous in seqs(request) else None
    agent.once(SYNC_BATCH_SIZE=2)
    assert db.pending() == [poisonous]
    # Once more with the lane left out, and from then on again: its entry is known to wait.
    log = db.cluster.log()[so_far:]
    assert log.count(f"statement: {PLAN_ONCE}") == log.count(f"statement: {PLAN_AS_USUAL}") == 3


def seqs(request: Request) -> list[int]:
    return [entry["seq"] for entry in request.entries or []]


def test_what_was_looked_up_ahead_of_a_failure_is_forgotten(
    agent: AgentFactory, backend: Backend, db: Database, frontend: Frontend
) -> None:
    """The call of the entry that failed waits, also where its next entry was already fetched."""
    poisonous = backend.enqueue(payload={"callLogId": "a"})
    frontend.on_entries = lambda request: BOOM if poisonous in seqs(request) else None
    backend.enqueue(payload={"callLogId": "b"})
    agent.once(SYNC_BATCH_SIZE=2)  # from now on it is charged, and that is written down at once
    backend.enqueue(payload={"callLogId": "b"})
    of_its_call = backend.enqueue(payload={"callLogId": "a"})
    last = backend.enqueue(payload={"callLogId": "b"})
    let_hours_pass(db)
    agent.once(SYNC_BATCH_SIZE=2)
    assert db.pending() == [poisonous, of_its_call]
    assert failures(db)[poisonous] == ("FRONTEND_5XX", 2, 1)
    frontend.on_entries = None
    let_hours_pass(db)
    assert agent.once(SYNC_BATCH_SIZE=2).returncode == 0
    assert frontend.seqs()[-3:] == [last, poisonous, of_its_call]


def test_what_was_looked_up_ahead_of_the_end_of_a_failure_is_forgotten(
    agent: AgentFactory, backend: Backend, db: Database, frontend: Frontend
) -> None:
    """Its call waited until then, but is next now: none of its entries may overtake another."""
    of_a = [backend.enqueue(payload={"callLogId": "a"})]
    frontend.on_entries = lambda request: BOOM if of_a[0] in seqs(request) else None
    backend.enqueue(payload={"callLogId": "b"})
    agent.once(SYNC_BATCH_SIZE=2)
    assert list(failures(db)) == of_a
    frontend.on_entries = None
    for call in "babba":
        seq = backend.enqueue(payload={"callLogId": call})
        of_a += [seq] if call == "a" else []
    let_hours_pass(db)
    before = len(frontend.requests)
    assert agent.once(SYNC_BATCH_SIZE=2).returncode == 0
    sent = [seq for request in frontend.requests[before:] for seq in seqs(request)]
    assert sorted(sent) == sent and [seq for seq in sent if seq in of_a] == of_a
    assert not db.pending()


def test_what_was_looked_up_ahead_of_a_result_that_cannot_be_recorded_is_forgotten(
    agent: AgentFactory, backend: Backend, db: Database, frontend: Frontend
) -> None:
    """Until it can be, others may have taken what would be next."""
    backend.enqueue_many(4)

    def spoil(_: Request) -> None:
        frontend.on_entries = None
        db.execute(REFUSE)

    frontend.on_entries = spoil
    running = agent(SYNC_BATCH_SIZE=2)
    wait_until(lambda: "cannot be recorded" in running.log(), 30, state=running.log)
    with db.connect(autocommit=False) as connection:
        connection.execute("drop trigger refuse on sync_outbox")
        connection.execute("update sync_outbox set processed_at = now() where id > 2")
    wait_until(lambda: not db.pending(), 60, state=running.log)
    last = backend.enqueue()
    wait_until(lambda: last in frontend.seqs(), 30, state=running.log)
    assert frontend.seqs() == [1, 2, last]


def test_what_was_looked_up_ahead_of_a_rejection_is_forgotten(
    agent: AgentFactory, backend: Backend, db: Database, frontend: Frontend
) -> None:
    """A death changes what is pending, and perhaps what is held."""
    log_statements(db)
    backend.enqueue_many(4)
    asked: list[int] = []

    def refuse(request: Request) -> Reply | None:
        asked.append(until_asked_for(db, 2 * len(asked) + 2))  # the second one anew
        if 1 not in seqs(request):
            return None
        return Reply(200, {}, {"ok": True, "rejected": [{"seq": 1, "reason": "never"}]})

    frontend.on_entries = refuse
    agent.once(SYNC_BATCH_SIZE=2)
    assert dead(db) == {1: "REJECTED"}
    assert not db.pending()
    assert asked == [2, 4]


def test_an_entry_that_spoils_the_look_ahead_spoils_nothing_else(
    agent: AgentFactory, backend: Backend, db: Database, frontend: Frontend
) -> None:
    backend.enqueue()
    assert agent.once().returncode == 0
    first, _ = backend.enqueue_many(5)
    db.execute(SPOIL % (first + 2))
    result = agent.once(SYNC_BATCH_SIZE=2)
    assert db.pending() == [first + 2], result.stderr
    assert failures(db)[first + 2][0] == "ENTRY_UNREADABLE"
    assert "cannot be recorded" not in result.stderr  # the confirmation is not to blame
    assert [len(request.entries) for request in frontend.requests] == [1, 2, 1, 1]


def test_the_session_is_ended_while_it_looks_ahead(
    agent: AgentFactory, backend: Backend, db: Database, frontend: Frontend
) -> None:
    """The answer of the request under way is of a session that is over; all the same all arrive."""
    backend.enqueue_many(6)

    def end_it(_: Request) -> None:
        frontend.on_entries = None
        db.execute(f"select pg_terminate_backend(pid) from ({SESSION}) as it")

    frontend.on_entries = end_it
    running = agent(SYNC_BATCH_SIZE=2)
    wait_until(lambda: not db.pending(), 60, state=running.log)
    seqs = frontend.seqs()
    assert set(seqs) == {1, 2, 3, 4, 5, 6}
    assert not [seq for seq in (3, 4, 5, 6) if seqs.count(seq) > 1], seqs


def test_a_confirmation_waits_for_a_slow_look_ahead(
    agent: AgentFactory, backend: Backend, db: Database, frontend: Frontend
) -> None:
    backend.enqueue()
    assert agent.once().returncode == 0
    first, last = backend.enqueue_many(4)
    db.execute(SLOW.format(seconds=1.5, seq=first + 2))
    assert agent.once(SYNC_BATCH_SIZE=2).returncode == 0
    assert frontend.seqs() == list(range(1, last + 1))
    assert not db.pending()


def test_a_look_ahead_that_hangs_does_not_hold_up_the_end(
    agent: AgentFactory, backend: Backend, db: Database, frontend: Frontend
) -> None:
    backend.enqueue()
    assert agent.once().returncode == 0
    first, last = backend.enqueue_many(4)
    db.execute(SLOW.format(seconds=60, seq=first + 2))
    running = agent(SYNC_BATCH_SIZE=2)
    wait_until(lambda: len(frontend.seqs()) == 3, state=running.log)
    code, took = running.stop()
    assert code == 0 and took < 8, running.log()
    db.execute(SLOW.format(seconds=0, seq=0))
    wait_until(lambda: not db.rows(SESSION), 30)  # PostgreSQL notices when its statement ends
    assert agent.once(SYNC_BATCH_SIZE=2).returncode == 0
    assert not db.pending()
    # What was answered, but not written down, comes again; nothing else does.
    assert frontend.seqs() == [1, first, first + 1, *range(first, last + 1)]

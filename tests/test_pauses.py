"""A pause that the frontend asked for holds for all traffic, whatever is going on."""

from agent import AgentFactory
from backend import Backend
from frontend import Frontend, Reply, Request, script
from ledger import entity_of, let_hours_pass, waiting
from pg import Database
from waiting import wait_until

SHED = Reply(503, {"Retry-After": "1"}, "<html>busy</html>")


def test_an_upload_that_ends_within_a_pause_is_verified_after_it_and_not_sent_again(
    db: Database, frontend: Frontend, backend: Backend, agent: AgentFactory
) -> None:
    frontend.read_rate = 100_000
    frontend.on_entries = script(None, Reply(429, {"Retry-After": "2"}))
    call = backend.end_call(seconds=20, events=0)
    running = agent(SYNC_VERIFY_PATH="/api/recordings/{callLogId}")
    frontend.wait(lambda: frontend.of_kind("file")[0].received > 1000, what="half an upload")

    late = backend.enqueue()

    asked = wait_until(lambda: [r for r in frontend.requests if r.status == 429], what="the pause")
    assert frontend.of_kind("file")[0].finished is None, "the upload was too fast for this test"
    frontend.read_rate = None
    wait_until(lambda: not db.pending(), what="everything", state=running.log)

    (head,) = (request for request in frontend.requests if request.method == "HEAD")
    assert asked[0].finished and head.started - asked[0].finished >= 1.9
    assert frontend.files[call.call_log_id].count == 1
    assert frontend.seqs()[-1] == late
    assert backend.upload_status(call)[0] == "uploaded"


def test_a_503_with_retry_after_holds_all_traffic_back_for_so_long_and_halves_nothing(
    db: Database, frontend: Frontend, backend: Backend, agent: AgentFactory
) -> None:
    frontend.on_entries = script(SHED)
    backend.enqueue_many(40)
    backend.end_call(seconds=0.01)

    running = agent()
    running.wait_log("outage, nothing is lost: the frontend asks for a pause")
    backend.enqueue()  # a NOTIFY does not shorten it
    wait_until(lambda: not db.pending(), what="everything", state=running.log)

    refused, after = frontend.requests[:2]
    assert [request.status for request in frontend.requests].count(503) == 1
    assert refused.finished and after.started - refused.finished >= 0.9
    assert not waiting(db)


def test_a_poisonous_entry_whose_crash_looks_like_a_pause_is_found_and_the_rest_arrives(
    db: Database, frontend: Frontend, backend: Backend, agent: AgentFactory
) -> None:
    """A proxy that answers each crash with 503 and Retry-After: believed three times."""
    backend.enqueue_many(6)
    poison = backend.enqueue()
    last = backend.enqueue_many(5)[1]
    frontend.poison[entity_of(db, poison)] = SHED

    running = agent()
    wait_until(lambda: db.pending() == [poison], what="all others", state=running.log)
    wait_until(lambda: list(waiting(db)) == [poison], what="the failure", state=running.log)

    assert frontend.seqs()[-1] == last
    assert waiting(db)[poison]["error_code"] == "FRONTEND_5XX"
    told = "outage, nothing is lost: the frontend asks for a pause"
    pauses = len(running.lines(told))
    assert 1 <= pauses <= 3

    # When its time comes again, it is set aside at once: it holds nobody up.
    asked = len(frontend.requests)
    let_hours_pass(db)
    late = backend.enqueue()
    wait_until(lambda: db.pending() == [poison], what="the late one", state=running.log)
    wait_until(lambda: waiting(db)[poison]["tries"] == 2, what="its turn", state=running.log)
    assert frontend.seqs()[-1] == late
    assert len(running.lines(told)) == pauses
    assert len(frontend.requests) - asked <= 4


def test_a_poisonous_recording_whose_crash_looks_like_a_pause_lets_the_others_go(
    db: Database, frontend: Frontend, backend: Backend, agent: AgentFactory
) -> None:
    calls = [backend.end_call(seconds=0.01) for _ in range(3)]
    bad = calls[0]

    def crash(request: Request) -> Reply | None:
        assert request.file is not None
        return SHED if request.file.call_log_id == bad.call_log_id else None

    frontend.on_file = crash
    running = agent()
    seq = bad.seq("recording_file")
    wait_until(lambda: db.pending() == [seq], what="the others", state=running.log)
    wait_until(lambda: list(waiting(db)) == [seq], what="the failure", state=running.log)
    assert [r.status for r in frontend.of_kind("file")].count(503) == 4


def test_a_store_of_files_that_asks_for_pauses_all_the_time_does_not_hold_the_entries_for_ever(
    db: Database, frontend: Frontend, backend: Backend, agent: AgentFactory
) -> None:
    """Three in a row hold all traffic; later ones, of whichever file, only the files."""
    for _ in range(3):
        backend.end_call(seconds=0.01)

    def refused() -> int:
        return [request.status for request in frontend.of_kind("file")].count(503)

    def maintenance(_: Request) -> Reply:
        return Reply(503, {"Retry-After": "0" if refused() < 4 else "3000"}, "")

    frontend.on_file = maintenance
    running = agent()
    # Three pauses of the first, then it is set aside; the next one is told to wait for long.
    wait_until(lambda: refused() == 5, timeout=60, what="a long pause", state=running.log)

    late = backend.enqueue()
    wait_until(lambda: late in frontend.seqs(), what="an entry meanwhile", state=running.log)


def test_once_does_not_take_a_503_for_a_pause_and_finds_the_poisonous_entry(
    db: Database, frontend: Frontend, backend: Backend, agent: AgentFactory
) -> None:
    """The next run would have forgotten the pauses of this one, and nothing would ever go."""
    poison = backend.enqueue()
    backend.enqueue_many(5)
    frontend.poison[entity_of(db, poison)] = SHED
    assert agent.once().returncode == 75
    assert db.pending() == [poison]

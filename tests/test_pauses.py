"""A pause that the frontend asked for holds for all traffic, whatever is going on."""

from agent import AgentFactory
from backend import Backend
from frontend import Frontend, Reply, script
from pg import Database
from waiting import wait_until


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

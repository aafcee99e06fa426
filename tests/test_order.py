"""Order where order matters: of an entity, of a call's own entry, of a file after its metadata."""

import contextlib
import threading
import time
import uuid

import pytest

from frontend import Reply, Request
from ledger import hold, let_hours_pass, waiting
from pi import Pi
from proxy import Proxy
from waiting import wait_until

BOOM = Reply(500, {}, {"error": "boom"})


def test_a_failed_entry_that_is_due_again_during_a_long_pass_goes_before_what_waits_for_it(
    pi: Pi,
) -> None:
    """The first retry comes within two seconds; the pass below takes longer than that."""
    entity = str(uuid.uuid4())
    first = pi.backend.enqueue(entity_id=entity)
    others = [pi.backend.enqueue() for _ in range(3)]
    last = pi.backend.enqueue(entity_id=entity)
    pi.frontend.poison[entity] = BOOM

    def slow(request: Request) -> Reply | None:
        if [entry["seq"] for entry in request.entries] != others[1:2]:
            return None
        pi.frontend.poison.clear()
        return Reply(200, {}, {"ok": True}, store=True, delay=2.2)

    pi.frontend.on_entries = slow
    pi.agent(SYNC_BATCH_SIZE=1)
    pi.frontend.wait(lambda: len(pi.frontend.seqs()) == 5, 40)
    assert pi.frontend.seqs()[:2] == others[:2]
    assert sorted(pi.frontend.seqs()) == [first, *others, last]
    assert pi.frontend.seqs().index(first) < pi.frontend.seqs().index(last)


@pytest.mark.parametrize(
    ("poisonous", "waiting_too"),
    [
        ("call_log", ["ivr_session_event", "ivr_session_event", "recording", "recording_file"]),
        ("ivr_session_event", []),
        ("recording", ["recording_file"]),
        ("recording_file", []),
    ],
)
def test_what_depends_on_a_failed_entry_waits_behind_it_and_all_else_goes_on(
    pi: Pi, poisonous: str, waiting_too: list[str]
) -> None:
    call, other = (pi.backend.end_call(seconds=0.01) for _ in range(2))
    bad = call.seq(poisonous)
    is_file = poisonous == "recording_file"
    entity = pi.db.value("SELECT entity_id::text FROM sync_outbox WHERE id = %s", (bad,))

    def refuse(request: Request) -> Reply | None:
        file = request.file and request.file.call_log_id == call.call_log_id
        return BOOM if (file if is_file else bad in seqs(request)) else None

    pi.frontend.on_entries = pi.frontend.on_file = refuse
    pi.agent.once()
    stuck = [s for s, what in zip(call.seqs, call.types, strict=True) if what in waiting_too]
    stuck.insert(0, bad)
    assert pi.db.pending() == sorted(waiting(pi.db)) == stuck
    assert {row["code"] for seq, row in waiting(pi.db).items() if seq != bad} <= {"WAITS_FOR"}
    assert pi.frontend.seqs() == [s for s in (*call.seqs[:-1], *other.seqs[:-1]) if s not in stuck]
    assert other.call_log_id in pi.frontend.files
    # While it waits: a fresh call, a later word of the same entity, and of one that arrived.
    hold(pi.db)
    fresh = pi.backend.end_call(seconds=0.01)
    again = pi.backend.enqueue(poisonous if not is_file else "recording", {"id": entity}, entity)
    arrived = pi.backend.enqueue("call_log", {}, other.call_log_id)
    before = len(pi.frontend.seqs())
    pi.agent.once()
    late = [*fresh.seqs[:-1], *([again] if is_file else []), arrived]
    assert pi.frontend.seqs()[before:] == late
    assert fresh.call_log_id in pi.frontend.files
    pi.frontend.on_entries = pi.frontend.on_file = None
    let_hours_pass(pi.db)
    pi.once()
    left = [seq for seq in stuck if seq != call.seq("recording_file")]
    assert pi.frontend.seqs()[before + len(late) :] == left + ([] if is_file else [again])
    assert pi.frontend.playable(call.recording_id)
    assert not waiting(pi.db)


def seqs(request: Request) -> list[int]:
    return [entry["seq"] for entry in request.entries]


def test_the_call_is_found_by_either_name_in_any_writing_and_never_where_it_is_not(pi: Pi) -> None:
    call = str(uuid.uuid4())
    poisonous = pi.backend.enqueue("call_log", {"id": call}, call)
    behind = [
        pi.backend.enqueue("ivr_session_event", {"callLogId": call.upper()}),
        pi.backend.enqueue("ivr_session_event", {"call_log_id": call}),
    ]
    payloads = [{"callLogId": None, "other": call}, {"callLogId": [call]}, {"callLogId": "x"},
                [call], call, 1]  # fmt: skip
    free = [pi.backend.enqueue("ivr_session_event", payload) for payload in payloads]
    pi.frontend.poison[call] = BOOM
    pi.agent.once()
    assert pi.frontend.seqs() == free
    assert pi.db.pending() == [poisonous, *behind]


def test_an_entry_of_the_call_whose_file_travels_waits_for_the_answer_and_undoes_nothing(
    pi: Pi,
) -> None:
    call = pi.backend.end_call()
    late: list[int] = []

    def slow_answer(request: Request) -> Reply:
        transcript = {"callLogId": call.call_log_id, "uploadStatus": "local_only", "text": "hello"}
        late.append(pi.backend.enqueue("recording", transcript, entity_id=call.recording_id))
        late.append(pi.backend.enqueue())
        assert request.file
        # The frontend has the file by now, and is only slow to say so.
        return Reply(200, body={"fileUrl": pi.frontend.file_url(request.file)}, store=True, delay=4)

    pi.frontend.on_file = slow_answer
    pi.once()
    assert pi.frontend.store[call.recording_id]["payload"]["text"] == "hello"
    assert pi.frontend.playable(call.recording_id), "the transcript undid the upload"
    arrived = [item[2] for item in pi.frontend.log]
    assert arrived.index(call.recording_id) < arrived.index(late[0])
    finished = pi.frontend.of_kind("file")[0].finished
    overtaking = next(r for r in pi.frontend.of_kind("entries") if late[1] in seqs(r))
    assert finished and overtaking.started < finished, "another call's entry waited for the file"


@pytest.mark.parametrize("another", [False, True], ids=["its own", "another of its call"])
def test_what_a_file_that_travels_holds_up_goes_before_what_is_newer_when_it_ends_during_a_pass(
    pi: Pi, another: bool
) -> None:
    """The newer one of another recording does not name the call, and depends on it all the same."""
    call = pi.backend.end_call()
    recording = str(uuid.uuid4()) if another else call.recording_id
    snapshots: list[int] = []
    between: list[int] = []
    through = threading.Event()

    def wait_for_the_pass(_: Request) -> None:
        with pi.db.connect(autocommit=False) as connection:
            for text in ("old", "new"):
                named = {} if another and text == "new" else {"callLogId": call.call_log_id}
                snapshot = ("recording", {**named, "text": text}, recording, connection)
                snapshots.append(pi.backend.enqueue(*snapshot))
                between.append(pi.backend.enqueue(connection=connection))
        assert through.wait(20)

    def let_the_file_end(request: Request) -> None:
        if seqs(request) == between[:1]:
            through.set()
            wait_until(lambda: call.seq("recording_file") not in pi.db.pending())

    pi.frontend.on_file, pi.frontend.on_entries = wait_for_the_pass, let_the_file_end
    pi.once(SYNC_BATCH_SIZE=1)
    assert through.is_set()
    order = pi.frontend.seqs()
    assert order.index(snapshots[0]) < order.index(snapshots[1])
    assert pi.frontend.store[recording]["payload"]["text"] == "new"


def test_what_waits_for_an_upload_whose_mark_waits_for_a_lock_goes_with_it(pi: Pi) -> None:
    call = pi.backend.end_call(seconds=0.01)
    backend = pi.db.connect(autocommit=False)
    backend.execute("SELECT FROM recordings WHERE id = %s FOR UPDATE", (call.recording_id,))
    late: list[int] = []

    def a_transcript_comes(_: Request) -> None:
        transcript = {"callLogId": call.call_log_id, "text": "hello"}
        late.append(pi.backend.enqueue("recording", transcript, call.recording_id))
        threading.Timer(3, backend.close).start()

    pi.frontend.on_file = a_transcript_comes
    pi.once()
    assert pi.frontend.seqs()[-1:] == late


@pytest.mark.parametrize(("row", "said"), [("there", "local_only"), ("gone", "upload_failed")])
def test_a_recording_sent_again_after_its_upload_still_carries_the_url(
    pi: Pi, row: str, said: str
) -> None:
    call = pi.backend.end_call(seconds=0.01)
    pi.agent.once()
    status, url = pi.backend.upload_status(call)
    assert status == "uploaded"
    snapshot = pi.frontend.received(call.recording_id)[0]["payload"]
    assert snapshot["uploadStatus"] == "local_only"
    if row == "gone":  # then our receipt knows
        pi.db.execute("DELETE FROM recordings")
    late = {**snapshot, "uploadStatus": said, "transcript": "moshi moshi"}
    seq = pi.backend.enqueue("recording", late, call.recording_id)
    pi.agent.once()
    again = pi.frontend.received(call.recording_id)[1]
    assert again["seq"] == seq
    assert again["payload"] == {**late, "uploadStatus": "uploaded", "s3Url": url}
    assert pi.frontend.playable(call.recording_id)
    # The outbox itself keeps what the backend wrote.
    assert pi.db.value("SELECT payload FROM sync_outbox WHERE id = %s", (seq,)) == late
    # What is no object is sent as it is.
    pi.backend.enqueue("recording", ["strange"], call.recording_id)
    pi.once()
    assert pi.frontend.received(call.recording_id)[-1]["payload"] == ["strange"]


@pytest.mark.parametrize("failing", [False, True])
@pytest.mark.parametrize("together", ["", "plain", "savepoints"])
def test_an_entry_that_becomes_visible_behind_the_pass_is_not_overtaken_by_a_later_one(
    pi: Pi, failing: bool, together: str
) -> None:
    """Also where another entry waits: then the pass writes down what it passed over. Together: of
    one transaction, with ids of another one between them, as of two calls that end at once."""
    pi.once()
    recording = str(uuid.uuid4())
    if failing:
        bad = str(uuid.uuid4())
        pi.backend.enqueue(entity_id=bad)
        pi.frontend.poison[bad] = BOOM
    late = pi.db.connect(autocommit=False)
    late.execute("select pg_current_xact_id()")
    nested = late.transaction if together == "savepoints" else contextlib.nullcontext
    with nested():
        first = pi.backend.enqueue("recording", {"text": "old"}, recording, connection=late)
    for _ in range(3):
        pi.backend.enqueue()
    newer, last = ("recording", {"text": "new"}, recording), list[int]()
    if together:
        with nested():
            last.append(pi.backend.enqueue(*newer, connection=late))
        pi.backend.enqueue()

    def commit_behind_the_pass(request: Request) -> None:
        if max(seqs(request), default=0) > first:
            late.commit()
            if not last:
                last.append(pi.backend.enqueue(*newer))

    pi.frontend.on_entries = commit_behind_the_pass
    with late:
        pi.once(code=75 if failing else 0, SYNC_BATCH_SIZE=1)
    order = pi.frontend.seqs()
    assert order.index(first) < order.index(last[0])
    assert pi.frontend.store[recording]["payload"]["text"] == "new"


def test_who_begins_to_write_during_a_pass_is_not_overtaken_by_what_comes_behind_it(pi: Pi) -> None:
    entity, late, last = str(uuid.uuid4()), pi.db.connect(autocommit=False), list[int]()
    first = pi.backend.enqueue()

    def write(request: Request) -> None:
        if seqs(request) == [first]:
            last.append(pi.backend.enqueue("recording", {"text": "old"}, entity, connection=late))
            last.append(pi.backend.enqueue())
            last.append(pi.backend.enqueue("recording", {"text": "new"}, entity, connection=late))
        elif seqs(request) == last[1:2]:
            late.commit()

    pi.frontend.on_entries = write
    pi.backend.enqueue()
    with late:
        pi.agent(SYNC_BATCH_SIZE=1)
        pi.frontend.wait(lambda: len(pi.frontend.received(entity)) == 2)
    assert pi.frontend.store[entity]["payload"]["text"] == "new"


def test_a_retry_does_not_overtake_what_became_visible_behind_the_pass(pi: Pi) -> None:
    pi.idle()
    entity, late = str(uuid.uuid4()), pi.db.connect(autocommit=False)
    old = pi.backend.enqueue("recording", {"text": "old"}, entity, connection=late)
    pi.frontend.poison[entity] = BOOM
    new = pi.backend.enqueue("recording", {"text": "new"}, entity)
    wait_until(lambda: new in waiting(pi.db), what="its row")
    hold(pi.db)
    filler: list[int] = []

    def commit(request: Request) -> None:
        if filler == seqs(request):
            let_hours_pass(pi.db)
            late.commit()
            pi.frontend.poison.clear()

    pi.frontend.on_entries = commit
    with late, pi.db.connect(autocommit=False) as connection:
        filler.append(pi.backend.enqueue(connection=connection))
        connection.commit()
        pi.wait_entry(old, new)
    assert pi.frontend.store[entity]["payload"]["text"] == "new"


def test_a_file_does_not_go_before_what_came_to_light_behind_the_pass(pi: Pi) -> None:
    """The other upload ends while the entries are under way."""
    pi.idle(SYNC_BATCH_SIZE=1)
    late, go = pi.db.connect(autocommit=False), threading.Event()

    def commit(_: Request) -> None:
        if not go.is_set():
            late.commit()
            go.wait(20)

    def slow(request: Request) -> None:
        if call.seqs[0] in seqs(request):
            go.set()
            time.sleep(1.5)

    pi.frontend.on_file, pi.frontend.on_entries = commit, slow
    with late:
        call = pi.backend.end_call(seconds=0.01, connection=late)
        pi.backend.end_call(seconds=0.01)
        pi.wait_file(call)
    log = [kind for kind, *names in pi.frontend.log if call.recording_id in names]
    assert log == ["entry", "file"]


@pytest.mark.parametrize("killed", [False, True])
def test_a_request_that_was_given_up_does_not_arrive_after_the_upload(pi: Pi, killed: bool) -> None:
    """On a line that is gone for a while the kernel holds the rest of it, whoever closed it."""
    with Proxy("127.0.0.1", pi.frontend.port, buffer=4096) as line:
        way = {"FRONTEND_BASE_URL": f"http://127.0.0.1:{line.port}"}
        first = pi.agent(SYNC_TIMEOUT_SEC=60 if killed else 1, **way)
        pi.wait_entry(pi.backend.enqueue())
        line.silence_open()
        with pi.db.connect(autocommit=False) as connection:
            pi.backend.enqueue("schedule", {"text": "x" * 100_000}, connection=connection)
            call = pi.backend.end_call(seconds=0.01, connection=connection)
        wait_until(lambda: line.held_back, what="the beginning of a request")
        if killed:
            first.kill()
            pi.agent(**way)
        pi.wait_file(call, timeout=40)
        pi.wait_delivered(40)
        line.resume()
        pi.wait_entry(pi.backend.enqueue())  # behind the rest, if that still comes
        pi.frontend.wait(lambda: all(request.finished for request in pi.frontend.requests))
        assert pi.frontend.playable(call.recording_id)

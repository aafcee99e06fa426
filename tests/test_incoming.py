"""Incoming calls: a line of the backend's queue file each, announced while the call rings."""

import contextlib
import json
import os
import threading
import time
from collections import Counter
from pathlib import Path

import psycopg
import pytest

from agent import Agent, AgentFactory
from backend import Backend
from frontend import Frontend, Reply, Request, script
from ledger import counter
from pg import Database
from pi import Pi
from waiting import wait_until

MIB = 1024 * 1024


@pytest.fixture
def announcer(agent: AgentFactory, backend: Backend) -> Agent:
    return agent(NOTIFICATION_QUEUE_FILE=backend.queue_file)


def processing(backend: Backend) -> Path:
    return Path(f"{backend.queue_file}.processing")


def call_ids(frontend: Frontend) -> list[str]:
    return [call["call_id"] for call in list(frontend.calls)]


def tried(frontend: Frontend) -> list[str | None]:
    return [request.headers["Idempotency-Key"] for request in frontend.of_kind("call")]


def dropped(db: Database) -> dict[str, int]:
    outcomes = ("sent", "stale", "bad", "refused")
    with contextlib.suppress(psycopg.errors.UndefinedTable):  # no agent has made its schema yet
        return {each: number for each in outcomes if (number := int(counter(db, "calls", each)))}
    return {}


def wait_read(backend: Backend) -> None:
    """Until the file has been read to its end, and what could come late has not come."""
    wait_until(lambda: not backend.queue_file.exists() and not processing(backend).exists())


def test_calls_are_announced_in_order_as_they_were_written_with_their_id_as_key(pi: Pi) -> None:
    data = {"dwellTimeSec": 12, "dtmfHistory": ["1", "3"]}
    comes = [
        pi.backend.call_comes_in(),
        pi.backend.call_comes_in(trigger="ivr_transfer", ivrData=data),
    ]
    lines = [json.loads(line) for line in pi.backend.queue_file.read_text().splitlines()]
    pi.agent(NOTIFICATION_QUEUE_FILE=pi.backend.queue_file)
    pi.frontend.wait(lambda: len(pi.frontend.calls) == 2)
    wait_read(pi.backend)
    comes.append(pi.backend.call_comes_in())
    pi.frontend.wait(lambda: len(pi.frontend.calls) == 3)
    assert call_ids(pi.frontend) == tried(pi.frontend) == comes
    assert pi.frontend.calls[:2] == lines
    wait_until(lambda: dropped(pi.db) == {"sent": 3})


def test_a_call_is_announced_within_two_seconds_while_a_recording_of_100_mb_is_uploaded(
    pi: Pi,
) -> None:
    call = pi.backend.end_call()
    os.truncate(call.wav, 100 * MIB)
    pi.frontend.read_rate = 4 * MIB
    running = pi.agent(NOTIFICATION_QUEUE_FILE=pi.backend.queue_file)
    pi.frontend.wait(lambda: pi.frontend.of_kind("file")[0].received > MIB)
    took = []
    for number in range(1, 4):
        began = time.monotonic()
        pi.backend.call_comes_in()
        pi.frontend.wait(lambda number=number: len(pi.frontend.calls) == number)  # type: ignore[misc]
        took.append(time.monotonic() - began)
        wait_until(lambda: not processing(pi.backend).exists())
    (upload,) = pi.frontend.of_kind("file")
    assert upload.finished is None, "the upload was over before"
    assert max(took) < 2, took
    assert running.running


def test_what_waits_for_a_frontend_that_is_down_is_announced_when_it_is_back(
    pi: Pi, announcer: Agent
) -> None:
    pi.frontend.stop()
    comes = [pi.backend.call_comes_in(), pi.backend.call_comes_in()]
    announcer.wait_log("incoming calls are not announced: the frontend cannot be reached")
    assert processing(pi.backend).exists()
    comes.append(pi.backend.call_comes_in())
    pi.frontend.start()
    pi.frontend.wait(lambda: len(pi.frontend.calls) == 3)
    assert call_ids(pi.frontend) == comes


def test_what_the_frontend_did_not_take_is_tried_again_before_the_next(
    pi: Pi, announcer: Agent
) -> None:
    answers = [
        Reply(408),
        Reply(200, body="<html>not ours</html>"),
        Reply(429, {"Retry-After": "1"}),
        Reply(reset=True),
    ]
    pi.frontend.on_call = script(*(each for answer in answers for each in (answer, None)))
    comes = [pi.backend.call_comes_in() for _ in answers]
    last = pi.backend.call_comes_in()
    pi.frontend.wait(lambda: len(pi.frontend.calls) == len(answers) + 1, 40)
    assert tried(pi.frontend) == [*(each for call in comes for each in (call, call)), last]
    assert announcer.running


def test_nobody_hears_of_yesterday_s_call(pi: Pi, announcer: Agent) -> None:
    pi.backend.call_comes_in(age=86400)
    pi.backend.call_comes_in(age=121)
    fresh = pi.backend.call_comes_in(age=60)
    pi.frontend.wait(lambda: pi.frontend.calls)
    assert tried(pi.frontend) == [fresh]
    wait_until(lambda: dropped(pi.db) == {"sent": 1, "stale": 2})
    assert "2 stale" in announcer.wait_log("not announced any more")


def test_a_call_of_tomorrow_that_is_never_taken_blocks_nothing_for_longer_than_one_of_today(
    pi: Pi,
) -> None:
    """The clock was wrong when it came in."""
    strange = pi.backend.call_comes_in(age=-86400)
    fresh = pi.backend.call_comes_in(age=-30)
    pi.frontend.on_call = lambda request: (
        Reply(500) if request.headers["Idempotency-Key"] == strange else None
    )
    pi.agent(NOTIFICATION_QUEUE_FILE=pi.backend.queue_file, SYNC_NOTIFY_MAX_AGE_SEC=3)
    pi.frontend.wait(lambda: call_ids(pi.frontend) == [fresh])
    wait_until(lambda: dropped(pi.db) == {"stale": 1, "sent": 1})


BAD = [
    "",
    "no JSON",
    "null",
    "7",
    "[]",
    '{"call_id": 7, "receivedAt": "2026-01-01T00:00:00Z"}',
    '{"call_id": "a"}',
    '{"call_id": "a", "receivedAt": "today"}',
    '{"call_id": "a", "receivedAt": 1e400}',
    '{"receivedAt": "2026-01-01T00:00:00Z"}',
    "[" * 100_000,
    '{"call_id": "\xff',
]


def test_a_bad_line_blocks_nothing(pi: Pi, announcer: Agent) -> None:
    comes = []
    for line in BAD:
        pi.backend.write_line(line)
        comes.append(pi.backend.call_comes_in())
    pi.frontend.wait(lambda: len(pi.frontend.calls) == len(BAD))
    assert call_ids(pi.frontend) == comes
    wait_read(pi.backend)
    counts = dropped(pi.db)
    assert counts.pop("sent") == len(BAD)
    assert counts.pop("bad") == len(BAD) + 1  # the long one is read in two pieces
    assert not counts and announcer.running


def test_a_call_that_the_frontend_refuses_blocks_nothing(pi: Pi, announcer: Agent) -> None:
    refusals = (400, 401, 404, 409, 413, 422)
    pi.frontend.on_call = script(
        *(each for status in refusals for each in (Reply(status, body={"error": "no"}), None)),
        Reply(409, body={"code": "ALREADY_PROCESSED"}),  # it has this one
    )
    comes = [pi.backend.call_comes_in() for _ in range(2 * len(refusals) + 1)]
    pi.frontend.wait(lambda: len(pi.frontend.calls) == len(refusals))
    assert call_ids(pi.frontend) == comes[1::2]
    wait_until(lambda: dropped(pi.db) == {"sent": 7, "refused": 6})
    assert tried(pi.frontend) == comes
    for status in refusals:
        assert any(f"HTTP {status}" in line for line in announcer.lines("are not announced"))


def test_that_the_last_call_was_refused_stays_said_until_one_gets_through(
    pi: Pi, announcer: Agent
) -> None:
    said = "incoming calls are not announced: the frontend does not accept our credentials"
    pi.frontend.on_call = lambda _: Reply(401, body={"error": "no"})
    pi.backend.call_comes_in()
    announcer.wait_sentence(said)
    wait_read(pi.backend)
    pi.wait_entry(pi.backend.enqueue())
    pi.wait_delivered()
    threading.Event().wait(2.5)  # it looks for another call each second
    assert said in announcer.state()["sentence"]
    announcer.hup()  # perhaps that was the cure
    announcer.wait_sentence("all delivered")
    pi.backend.call_comes_in()
    announcer.wait_sentence(said)
    pi.frontend.on_call = lambda _: Reply(400, body={"error": "this one"})
    pi.backend.call_comes_in()
    announcer.wait_sentence("all delivered")  # its own fault, and it is gone


def test_a_queue_file_where_no_directory_is_or_that_is_none_is_said_and_left_alone(pi: Pi) -> None:
    directory = pi.backend.queue_file.parent
    nowhere = directory.parent / "notification" / "pending.jsonl"
    running = pi.agent(NOTIFICATION_QUEUE_FILE=nowhere)
    running.wait_sentence(f"not announced: {nowhere.parent}/.: No such file or directory")
    running.reload(pi.agent.env(NOTIFICATION_QUEUE_FILE=directory))
    running.wait_sentence(f"not announced: {directory}: not a plain file")
    assert directory.is_dir(), "the backend's directory was renamed"
    running.reload(pi.agent.env(NOTIFICATION_QUEUE_FILE=pi.backend.queue_file))
    running.wait_sentence("all delivered")
    pi.backend.call_comes_in()
    pi.frontend.wait(lambda: pi.frontend.calls)
    running.wait_sentence("all delivered")


def test_a_call_id_may_hold_anything(pi: Pi, announcer: Agent) -> None:
    names = ["a\r\nX-Evil: 1", "é電話 \ud800", "x" * 5000, "8HnT2kQ-a3x9..@192.0.2.7"]
    for name in names:
        pi.backend.call_comes_in(name)
    pi.frontend.wait(lambda: len(pi.frontend.calls) == len(names))
    assert call_ids(pi.frontend) == names
    assert all("X-Evil" not in request.headers for request in pi.frontend.of_kind("call"))
    assert tried(pi.frontend)[3] == names[3]
    assert announcer.running


def test_a_line_that_is_written_late_or_in_pieces_is_read(pi: Pi, announcer: Agent) -> None:
    """By a writer that opened the file before it was renamed."""
    first = pi.backend.call_comes_in()
    line = pi.backend.queue_file.read_text().replace(first, "late")
    with pi.backend.queue_file.open("a") as late:
        pi.frontend.wait(lambda: pi.frontend.calls)
        wait_until(lambda: dropped(pi.db) == {"sent": 1})
        assert not pi.backend.queue_file.exists()
        late.write(line[:20])
        late.flush()
        second = pi.backend.call_comes_in()  # a new file
        late.write(line[20:])
    pi.frontend.wait(lambda: len(pi.frontend.calls) == 3)
    assert call_ids(pi.frontend) == [first, "late", second]
    wait_read(pi.backend)
    assert announcer.running


def test_a_writer_that_never_rests_loses_nothing(pi: Pi, announcer: Agent) -> None:
    """It opens the file for each line while that is read and renamed."""
    comes: list[str] = []

    def write() -> None:
        while len(comes) < 1500:
            comes.append(pi.backend.call_comes_in(f"{len(comes)}"))
            time.sleep(0.002)

    writer = threading.Thread(target=write)
    writer.start()
    pi.frontend.wait(lambda: len(pi.frontend.calls) >= 1500, 60)
    writer.join()
    wait_read(pi.backend)
    assert call_ids(pi.frontend) == comes
    assert announcer.running


def test_a_file_of_20_mb_that_grew_meanwhile_takes_no_memory_and_old_calls_are_dropped(
    pi: Pi,
) -> None:
    pi.backend.call_comes_in(age=3600)
    line = pi.backend.queue_file.read_bytes()
    with pi.backend.queue_file.open("ab") as file:
        for _ in range(20):
            file.write(line * (MIB // len(line)))
    old = pi.backend.queue_file.stat().st_size // len(line)
    fresh = pi.backend.call_comes_in()
    running = pi.idle(NOTIFICATION_QUEUE_FILE="", SYNC_LOG_LEVEL="error")
    before = running.rss_peak_kib()
    running.reload(pi.agent.env(NOTIFICATION_QUEUE_FILE=pi.backend.queue_file))
    pi.frontend.wait(lambda: pi.frontend.of_kind("call") or processing(pi.backend).exists())
    pi.backend.end_call(recording=False)
    pi.frontend.wait(lambda: len(pi.frontend.entries) == 3)  # entries go on meanwhile
    pi.frontend.wait(lambda: call_ids(pi.frontend) == [fresh], 120)
    wait_until(lambda: dropped(pi.db) == {"sent": 1, "stale": old})
    assert running.rss_peak_kib() - before < 4096


def test_while_no_call_comes_in_the_agent_only_looks_for_the_file(pi: Pi) -> None:
    """Not even what waits, or needs a person, has it ask the database, or write, each second."""
    pi.backend.enqueue()
    running = pi.agent(NOTIFICATION_QUEUE_FILE=pi.backend.queue_file)
    pi.wait_delivered()
    letter = """
        insert into serversync.dead_letters (outbox_id, original_topic, entity_id, payload, rest,
            error_code, error_message, attempts)
        values (7, 'schedule', gen_random_uuid(), '{}', '{}', 'BAD_REQUEST', 'no', 1)
    """
    pi.db.execute(letter)
    pi.backend.enqueue()
    running.wait_sentence("1 dead letter needs you")
    statement = "select query_start from pg_stat_activity where application_name = 'serversync'"
    mine = f"{statement} and datname = current_database()"
    state = running.runtime_dir / "state.json"

    def seen() -> tuple[object, int]:
        return pi.db.value(mine), state.stat().st_ino

    def quiet_for_three_looks() -> bool:
        before = seen()
        threading.Event().wait(3.5)
        return seen() == before

    assert quiet_for_three_looks() or quiet_for_three_looks()  # its own look each 30 s
    pi.backend.call_comes_in()
    wait_until(lambda: dropped(pi.db) == {"sent": 1})


# Calls of the system: the agent is killed at the first of its kind that counts, at a later one, …
STEPS = {
    "rename": (1, 1),
    "unlink": (1, 1),
    "connect": (1, 1),
    "sendto": (20, 5),
    "recvfrom": (20, 5),
}


@pytest.mark.parametrize("step", STEPS)
def test_a_kill_at_any_step_loses_no_call_and_repeats_one_at_most(pi: Pi, step: str) -> None:
    comes: list[str] = []
    kills, (first, apart) = 0, STEPS[step]
    for number in range(5):
        comes += [pi.backend.call_comes_in(f"{len(comes) + each}") for each in range(2)]
        when = first + number * apart
        armed = ["-e", f"trace={step}", "-e", f"inject={step}:signal=KILL:when={when}"]
        running = pi.agent(NOTIFICATION_QUEUE_FILE=pi.backend.queue_file, strace=armed)
        wait_until(
            lambda running=running: (
                not running.running  # type: ignore[misc]
                or not (pi.backend.queue_file.exists() or processing(pi.backend).exists())
            )
        )
        if running.running:
            running.kill()
            break  # nor does another one come to a later call of its kind
        kills += 1
    pi.agent(NOTIFICATION_QUEUE_FILE=pi.backend.queue_file)
    pi.frontend.wait(lambda: set(call_ids(pi.frontend)) == set(comes), 30)
    wait_read(pi.backend)
    assert kills
    often = Counter(call_ids(pi.frontend))
    assert sum(often.values()) - len(often) <= kills
    firsts = list(dict.fromkeys(call_ids(pi.frontend)))
    assert firsts == comes


def test_a_kill_between_answer_and_note_repeats_one_call_and_no_other(pi: Pi) -> None:
    comes = [pi.backend.call_comes_in(str(number)) for number in range(5)]
    started: list[Agent] = []

    def kill(request: Request) -> None:
        if request.kind == "call" and len(started) == 1 and len(pi.frontend.calls) == 3:
            started[0].kill()

    pi.frontend.on_call = lambda request: (
        Reply(body={"ok": True}, store=True) if kill(request) is None else None  # type: ignore[func-returns-value]
    )
    started.append(pi.agent(NOTIFICATION_QUEUE_FILE=pi.backend.queue_file))
    wait_until(lambda: not started[0].running)
    started.append(pi.agent(NOTIFICATION_QUEUE_FILE=pi.backend.queue_file))
    pi.frontend.wait(lambda: call_ids(pi.frontend)[-1:] == comes[-1:])
    assert call_ids(pi.frontend) == ["0", "1", "2", "3", "3", "4"]


def test_a_stop_ends_the_announcement_under_way_and_it_is_not_repeated(pi: Pi) -> None:
    pi.frontend.on_call = script(Reply(body={"ok": True}, store=True, delay=0.3))
    comes = [pi.backend.call_comes_in(), pi.backend.call_comes_in()]
    running = pi.agent(NOTIFICATION_QUEUE_FILE=pi.backend.queue_file)
    pi.frontend.wait(lambda: pi.frontend.of_kind("call"))
    assert running.stop()[0] == 0
    pi.agent(NOTIFICATION_QUEUE_FILE=pi.backend.queue_file)
    pi.frontend.wait(lambda: len(pi.frontend.calls) == 2)
    assert call_ids(pi.frontend) == comes


def test_rights_that_are_missing_are_said_and_deliveries_go_on(pi: Pi, public: Path) -> None:
    directory = public / "notifications"
    directory.mkdir()
    os.chown(directory, 65534, 65534)
    directory.chmod(0o700)
    pi.backend.enqueue()
    running = pi.agent(
        NOTIFICATION_QUEUE_FILE=directory / "pending.jsonl",
        prefix=["setpriv", "--bounding-set=-all", "--inh-caps=-all"],  # a root without its powers
    )
    pi.backend.call_comes_in()
    pi.backend.queue_file.rename(directory / "pending.jsonl")
    running.wait_log(f"incoming calls are not announced: {directory}/.: Permission denied")
    directory.chmod(0o755)  # now it is seen, and cannot be renamed
    running.wait_sentence(
        f"incoming calls are not announced: {directory}/pending.jsonl: Permission denied"
    )
    pi.frontend.wait(lambda: pi.frontend.entries)
    os.chown(directory, 0, 0)
    pi.frontend.wait(lambda: pi.frontend.calls)
    wait_until(lambda: "Permission denied" not in running.state()["sentence"])


def test_a_pause_that_the_frontend_asked_for_holds_for_calls_too(pi: Pi, announcer: Agent) -> None:
    pi.frontend.on_entries = lambda _: Reply(429, {"Retry-After": "3600"})
    pi.backend.enqueue()
    announcer.wait_log("outage, nothing is lost")
    pi.backend.call_comes_in()
    wait_until(lambda: processing(pi.backend).exists())
    pi.backend.enqueue()
    assert not pi.frontend.of_kind("call")
    pi.frontend.on_entries = None
    announcer.hup()
    pi.frontend.wait(lambda: pi.frontend.calls)


def test_a_queue_that_is_switched_off_is_no_trouble_any_more_and_left_alone(pi: Pi) -> None:
    processing(pi.backend).mkdir(parents=True)  # nothing that could be read
    running = pi.agent(NOTIFICATION_QUEUE_FILE=pi.backend.queue_file)
    running.wait_sentence(
        f"incoming calls are not announced: {processing(pi.backend)}: not a plain"
    )
    assert running.state()["told"][0][0] == "person"
    running.reload(pi.agent.env())
    running.wait_sentence("all delivered")
    pi.backend.call_comes_in()
    pi.backend.enqueue()
    pi.frontend.wait(lambda: pi.frontend.entries)
    assert pi.backend.queue_file.exists() and not pi.frontend.of_kind("call")

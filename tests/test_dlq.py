"""`serversync dlq`: what is shown of the dead letters, and what may be done with them."""

import contextlib
import json
import shlex
import uuid
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from agent import AgentFactory
from backend import Backend
from desk import BIDI, BURIED_MANY, Desk, Letter, Typist, bury, give_up, state_of
from frontend import Frontend, Reply
from ledger import dead_letters, let_hours_pass
from pg import Database
from waiting import wait_until

NOBODY = "00000000-0000-4000-8000-000000000000"
MIB = 1 << 20
TOKYO = timezone(timedelta(hours=9))


@pytest.fixture
def letter(agent: AgentFactory, backend: Backend, frontend: Frontend) -> Letter:
    """An entry that the frontend refused; now it would take it."""
    return give_up(agent, backend, frontend, "schedule")[0]


# -- from one state to the next -------------------------------------------------------------------


def test_a_retried_letter_is_in_the_queue_and_resolved_when_it_is_delivered(
    desk: Desk, letter: Letter, agent: AgentFactory, frontend: Frontend, db: Database
) -> None:
    assert state_of(db, letter.id) == ("PENDING", 0)
    shown = desk.json("dlq", "retry", letter.id)
    assert shown == [{"id": letter.id, "status": "RETRYING", "message": shown[0]["message"]}]
    assert str(letter.seq) in shown[0]["message"]
    assert state_of(db, letter.id) == ("RETRYING", 0) and db.pending() == [letter.seq]
    assert desk.json("dlq", "show", letter.id)["last_retry_at"] is not None

    again = desk("dlq", "retry", letter.id, code=1)
    assert "in the queue already" in again.stdout and letter.id in again.stdout

    assert agent.once().returncode == 0
    assert state_of(db, letter.id) == ("RESOLVED", 0)
    assert frontend.seqs() == [letter.seq] and not db.pending()
    (refused,) = desk.json("dlq", "retry", letter.id, "--force", code=1)
    assert refused["error"] == "conflict" and "delivered" in refused["message"]
    assert not db.pending()


def test_a_letter_that_fails_three_retries_is_dead_and_only_force_sends_it_again(
    typist: Typist, letter: Letter, agent: AgentFactory, frontend: Frontend, db: Database
) -> None:
    frontend.rejected[letter.entity] = "SCHEMA"
    for number in (1, 2, 3):
        typist("dlq", "retry", letter.id)
        assert agent.once().returncode == 1
        assert state_of(db, letter.id) == ("DEAD" if number == 3 else "PENDING", number)
    refused = typist("dlq", "retry", letter.id, code=1)
    assert "3 retries are used up" in refused.stdout
    assert typist("dlq", "retry-all", code=1).stdout.startswith("0 entries back")
    assert state_of(db, letter.id) == ("DEAD", 3) and not db.pending()

    typist("dlq", "retry", letter.id, "--force")
    assert state_of(db, letter.id) == ("RETRYING", 3)
    assert agent.once().returncode == 1
    assert state_of(db, letter.id) == ("DEAD", 4)
    frontend.rejected.clear()
    typist("dlq", "retry-all", "--force")
    assert agent.once().returncode == 0
    assert state_of(db, letter.id) == ("RESOLVED", 4)


def test_a_letter_whose_row_vanishes_while_it_is_retried_is_pending_again(
    desk: Desk, letter: Letter, agent: AgentFactory, frontend: Frontend, db: Database
) -> None:
    desk("dlq", "retry", letter.id)
    db.execute("DELETE FROM sync_outbox WHERE id = %s", (letter.seq,))
    assert agent.once().returncode == 0
    assert state_of(db, letter.id) == ("PENDING", 0)
    desk("dlq", "retry", letter.id)
    assert agent.once().returncode == 0
    assert state_of(db, letter.id) == ("RESOLVED", 0) and frontend.seqs() == [letter.seq]


def test_a_letter_whose_seq_another_entry_has_by_now_concerns_only_itself(
    desk: Desk, letter: Letter, backend: Backend, db: Database
) -> None:
    db.execute("TRUNCATE sync_outbox RESTART IDENTITY")
    while backend.enqueue() < letter.seq:
        pass
    pending = db.pending()
    assert "belongs to another entry" in desk("dlq", "retry", letter.id, "--force", code=1).stdout
    assert "1 not: its seq belongs to another" in desk("dlq", "retry-all", code=None).stdout
    assert state_of(db, letter.id) == ("PENDING", 0)
    desk("dlq", "delete", letter.id, "--yes")
    assert db.pending() == pending and not dead_letters(db)


def test_a_retry_wakes_an_agent_that_would_not_look_for_an_hour(
    desk: Desk, letter: Letter, agent: AgentFactory, frontend: Frontend, db: Database
) -> None:
    running = agent(SYNC_POLL_INTERVAL_SEC=3600)
    running.wait_sentence("1 dead letter needs you")
    # Without the backend's trigger: the command itself wakes the agent.
    db.execute("DROP TRIGGER serversync_wake ON sync_outbox")
    desk("dlq", "retry", letter.id)
    frontend.wait(lambda: letter.seq in frontend.seqs(), what="the retried entry")
    wait_until(lambda: state_of(db, letter.id)[0] == "RESOLVED", what="the end of the letter")

    (other,) = bury(db, [{"n": 1}])
    desk("dlq", "retry-all", "schedule")
    wait_until(lambda: state_of(db, other)[0] == "RESOLVED", what="the end of the other letter")


def test_a_retried_entry_goes_before_the_later_ones_of_its_call(
    desk: Desk, agent: AgentFactory, backend: Backend, frontend: Frontend, db: Database
) -> None:
    call_log_id = str(uuid.uuid4())
    frontend.rejected[call_log_id] = "SCHEMA"
    call = backend.end_call(call_log_id=call_log_id, events=0)
    first = call.seqs[0]
    frontend.on_entries = lambda request: Reply(503) if len(request.entries) == 1 else None
    frontend.on_file = lambda request: Reply(503)
    agent.once()
    assert list(dead_letters(db)) == [first]
    waiting = [backend.enqueue("ivr_session_event", {"callLogId": call_log_id}) for _ in range(2)]
    frontend.rejected.clear()
    frontend.on_entries = frontend.on_file = None
    frontend.log.clear()
    desk("dlq", "retry", str(dead_letters(db)[first]["id"]))
    before = len(frontend.seqs())
    let_hours_pass(db)
    assert agent.once().returncode == 0
    seqs = frontend.seqs()[before:]
    assert seqs[0] == first and seqs[-2:] == waiting and seqs == sorted(seqs)
    assert frontend.log[0][0] == "entry" and frontend.playable(call.recording_id)


def test_a_retried_recording_is_uploaded_and_shown_as_uploaded(
    desk: Desk, agent: AgentFactory, backend: Backend, frontend: Frontend, db: Database
) -> None:
    frontend.on_file = lambda request: Reply(400, body={"error": "no such call"})
    call = backend.end_call()
    assert agent.once().returncode == 1
    assert backend.upload_status(call) == ("upload_failed", None)
    assert call.wav.exists()
    (dead,) = dead_letters(db).values()
    assert dead["original_topic"] == "recording_file"

    frontend.on_file = None
    desk("dlq", "retry", str(dead["id"]))
    assert agent.once().returncode == 0
    assert state_of(db, str(dead["id"])) == ("RESOLVED", 0)
    status, url = backend.upload_status(call)
    assert status == "uploaded" and url
    assert frontend.files[call.call_log_id].sha256 == call.sha256
    assert not call.directory.exists()


def test_eight_people_retry_a_letter_at_once_and_one_of_them_does(
    desk: Desk, letter: Letter, db: Database
) -> None:
    with ThreadPoolExecutor(8) as people:
        ends = [people.submit(desk, "dlq", "retry", letter.id, code=None) for _ in range(8)]
        done = [each.result() for each in ends]
    assert sorted(each.returncode for each in done) == [0] + [1] * 7
    assert state_of(db, letter.id) == ("RETRYING", 0) and db.pending() == [letter.seq]


def test_six_people_retry_all_beside_the_agent_and_each_entry_goes_once(
    schema: None, agent: AgentFactory, frontend: Frontend, db: Database
) -> None:
    agent().wait_sentence("all delivered")
    db.execute(BURIED_MANY, {"count": 300, "status": "PENDING"})
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(6) as people:
        typists = [stack.enter_context(contextlib.closing(Typist(agent))) for _ in range(6)]
        for each in typists:
            each("dlq", "list")  # it has started
        ends = [people.submit(each.json, "dlq", "retry-all", code=None) for each in typists]
        done = [each.result() for each in ends]
    assert sum(each["retried"] for each in done) == 300
    resolved = "SELECT count(*) FROM serversync.dead_letters WHERE status = 'RESOLVED'"
    wait_until(lambda: db.value(resolved) == 300, 60, "all of them")
    assert len(frontend.seqs()) == len({*frontend.seqs()}) == 300 and not db.pending()


# -- what has been overtaken ----------------------------------------------------------------------


@pytest.mark.parametrize("newer", ["delivered", "pending"])
def test_a_letter_that_a_newer_entry_has_overtaken_is_only_sent_by_force(
    desk: Desk,
    typist: Typist,
    letter: Letter,
    agent: AgentFactory,
    backend: Backend,
    frontend: Frontend,
    db: Database,
    newer: str,
) -> None:
    later = backend.enqueue("schedule", entity_id=letter.entity)
    pending = [later]
    if newer == "delivered":
        assert agent.once().returncode == 0
        pending = []
    refused = typist("dlq", "retry", letter.id, code=1)
    assert f"newer entry of the same entity (seq {later})" in refused.stdout
    (told,) = typist.json("dlq", "retry", letter.id, code=1)
    assert told["id"] == letter.id and told["error"] == "conflict"
    everything = typist.json("dlq", "retry-all", code=1)
    assert (everything["retried"], everything["refused"]) == (0, 1)
    assert "newer entry" in everything["message"]
    assert state_of(db, letter.id) == ("PENDING", 0) and db.pending() == pending

    # No agent runs, so none can be sending the newer one: nothing is waited for.
    desk("dlq", "retry", letter.id, "--force", SYNC_TIMEOUT_SEC=300, timeout=60)
    assert db.pending() == [letter.seq, *pending]


def test_only_the_same_type_of_the_same_entity_overtakes(
    desk: Desk, letter: Letter, backend: Backend
) -> None:
    backend.enqueue("call_log", entity_id=letter.entity)
    backend.enqueue("schedule")
    desk("dlq", "retry", letter.id)


def test_a_newer_dead_letter_overtakes_nobody_until_it_is_in_the_queue_and_both_go_in_order(
    desk: Desk, agent: AgentFactory, backend: Backend, frontend: Frontend, db: Database
) -> None:
    """Two of one entity."""
    entity = str(uuid.uuid4())
    frontend.rejected[entity] = "SCHEMA"
    for _ in range(2):
        backend.enqueue("schedule", entity_id=entity)
        assert agent.once().returncode == 1
    frontend.rejected.clear()
    older, newer = (str(row["id"]) for row in dead_letters(db).values())
    # The agent may be sending the newer one at this moment: the older one would arrive behind it.
    desk("dlq", "retry", newer)
    assert "newer entry" in desk("dlq", "retry", older, code=1).stdout
    assert state_of(db, older) == ("PENDING", 0)
    frontend.rejected[entity] = "SCHEMA"
    assert agent.once().returncode == 1
    frontend.rejected.clear()

    assert desk.json("dlq", "retry-all") == {
        "retried": 2,
        "refused": 0,
        "more": False,
        "message": "2 entries back in the queue",
    }
    assert agent.once().returncode == 0
    assert frontend.seqs() == sorted(frontend.seqs()) and len(frontend.seqs()) == 2
    assert state_of(db, older)[0] == state_of(db, newer)[0] == "RESOLVED"


# -- what has been pruned -------------------------------------------------------------------------


def prune_away(db: Database, desk: Desk, agent: AgentFactory, backend: Backend) -> None:
    """Forty days pass, and pruning."""
    backend.enqueue()
    assert agent.once().returncode == 0
    db.execute("UPDATE sync_outbox SET processed_at = processed_at - interval '40 days'")
    for table, column in (("deliveries", "started_at"), ("dead_letters", "created_at")):
        db.execute(f"UPDATE serversync.{table} SET {column} = {column} - interval '40 days'")
    assert "deleted 2 rows" in desk("prune", "--yes").stdout
    assert not db.value("SELECT count(*) FROM sync_outbox")


def test_a_row_that_was_pruned_comes_back_under_its_id_with_all_its_columns(
    desk: Desk, agent: AgentFactory, backend: Backend, frontend: Frontend, db: Database
) -> None:
    db.execute("ALTER TABLE sync_outbox ADD COLUMN op text")
    entity = str(uuid.uuid4())
    frontend.rejected[entity] = "SCHEMA"
    seq = backend.enqueue("schedule", {"name": "日本語", "big": 10**30}, entity)
    db.execute("UPDATE sync_outbox SET op = 'delete', created_at = created_at - interval '99 days'")
    before = db.rows("SELECT id, entity_type, entity_id, payload, created_at, op FROM sync_outbox")
    assert agent.once().returncode == 1
    frontend.rejected.clear()
    letter = str(dead_letters(db)[seq]["id"])
    prune_away(db, desk, agent, backend)

    refused = desk("dlq", "retry", letter, code=1)
    assert "may have been pruned" in refused.stdout
    assert not db.pending()
    desk("dlq", "retry", letter, "--force")
    after = db.rows("SELECT id, entity_type, entity_id, payload, created_at, op FROM sync_outbox")
    assert after == before and db.pending() == [seq]
    assert agent.once().returncode == 0
    (sent,) = frontend.received(entity)
    assert (sent["seq"], sent["op"]) == (seq, "delete")
    assert datetime.fromisoformat(sent["createdAt"]) == before[0][4]
    assert state_of(db, letter) == ("RESOLVED", 0)


def test_a_letter_younger_than_what_was_pruned_is_sent_without_force(
    desk: Desk, letter: Letter, agent: AgentFactory, backend: Backend, db: Database
) -> None:
    prune_away(db, desk, agent, backend)
    (young,) = bury(db, [{"n": 1}])
    told = desk.json("dlq", "retry-all", code=1)
    assert (told["retried"], told["refused"]) == (1, 1)
    assert state_of(db, young) == ("RETRYING", 0) and state_of(db, letter.id) == ("PENDING", 0)


# -- several --------------------------------------------------------------------------------------


def test_what_is_refused_does_not_stop_the_rest(
    desk: Desk, agent: AgentFactory, backend: Backend, frontend: Frontend, db: Database
) -> None:
    first, second, third = give_up(agent, backend, frontend, "schedule", "call_log", "schedule")
    backend.enqueue("call_log", entity_id=second.entity)
    told = desk.json("dlq", "retry", first.id, second.id, NOBODY, third.id, code=1)
    assert [each["id"] for each in told] == [first.id, second.id, NOBODY, third.id]
    assert [each.get("error") for each in told] == [None, "conflict", "not_found", None]
    states = [state_of(db, each.id)[0] for each in (first, second, third)]
    assert states == ["RETRYING", "PENDING", "RETRYING"]


def test_newer_entries_that_wait_in_an_outage_are_waited_for_once_not_for_each_letter(
    agent: AgentFactory, backend: Backend, frontend: Frontend, db: Database
) -> None:
    letters = give_up(agent, backend, frontend, *["schedule"] * 3)
    frontend.on_entries = lambda request: Reply(503)
    running = agent()
    for letter in letters:
        backend.enqueue("schedule", entity_id=letter.entity, payload={"is": "new"})
    running.wait_log("outage, nothing is lost")
    ids = [letter.id for letter in letters]
    patient = agent(args=["dlq", "retry", "--force", *ids], SYNC_TIMEOUT_SEC=600)
    in_queue = "SELECT count(*) FROM serversync.dead_letters WHERE status = 'RETRYING'"
    wait_until(lambda: db.value(in_queue) == 3, 60, "all of them in the queue", patient.log)
    assert patient.running  # perhaps a newer one is on its way just now
    frontend.on_entries = None
    running.hup()
    assert patient.wait(60) == 0, patient.log()
    wait_until(lambda: not db.pending(), 60, "all of them", running.log)
    for letter in letters:
        assert frontend.store[letter.entity]["payload"] == {"is": "new"}


def test_retry_all_takes_one_topic_where_it_is_named_and_goes_on_beyond_a_chunk(
    typist: Typist, schema: None, db: Database
) -> None:
    db.execute(BURIED_MANY, {"count": 3000, "status": "PENDING"})
    told = typist.json("dlq", "retry-all", "recording")
    assert (told["retried"], told["refused"]) == (1000, 0)
    counts = "SELECT original_topic, status, count(*) FROM serversync.dead_letters GROUP BY 1, 2"
    assert set(db.rows(counts)) == {
        ("call_log", "PENDING", 1000),
        ("recording", "RETRYING", 1000),
        ("schedule", "PENDING", 1000),
    }
    again = typist.json("dlq", "retry-all")
    assert (again["retried"], again["refused"]) == (2000, 0)
    assert len(db.pending()) == 3000
    for line in (("retry-all",), ("list",), ("list", "--json")):
        unknown = typist("dlq", line[0], "no_such_topic", *line[1:], code=1)
        assert unknown.stdout == ""
        assert "of: call_log, recording, schedule" in unknown.stderr
    # One that has entries, and no dead letter.
    db.execute("DELETE FROM serversync.dead_letters WHERE original_topic = 'call_log'")
    assert typist("dlq", "list", "call_log").stdout == "no dead letters\n"


# -- deleting -------------------------------------------------------------------------------------


def test_deleting_says_what_it_will_do_and_does_it_only_with_yes(
    typist: Typist, schema: None, db: Database
) -> None:
    first, second, third = bury(db, [{"n": 1}, {"n": 2}, {"n": 3}])
    warned = typist("dlq", "delete", first, second)
    assert "deletes 2 dead letters" in warned.stdout and "--yes" in warned.stdout
    refused = typist("dlq", "delete", first, second, "--json", code=2)  # a program shall notice
    assert refused.stdout == "" and "--yes" in refused.stderr
    assert len(dead_letters(db)) == 3
    told = typist.json("dlq", "delete", first, second, "--yes")
    assert [each["success"] for each in told] == [True, True]
    assert [str(row["id"]) for row in dead_letters(db).values()] == [third]
    assert not db.pending()
    assert "no dead letter" in typist("dlq", "delete", first, "--yes", code=1).stdout


def test_a_deleted_letter_leaves_the_queue_and_no_replay_brings_it_back(
    desk: Desk, schema: None, db: Database, agent: AgentFactory, frontend: Frontend
) -> None:
    letter, other = bury(db, [{"n": 1}, {"n": 2}])
    desk("dlq", "retry", letter)
    assert "in the queue" in desk("dlq", "delete", letter, "--yes").stdout
    desk("dlq", "delete", other, "--yes")
    assert not db.pending()
    desk("replay", "--seq", "1-", "--yes")
    assert agent.once().returncode == 0
    assert frontend.seqs() == []


# -- looking --------------------------------------------------------------------------------------


def test_the_list_shows_each_letter_once_on_its_pages_newest_first(
    typist: Typist, schema: None, db: Database
) -> None:
    ids = bury(db, [{"n": n} for n in range(5)]) + bury(db, [{"n": 5}], "call_log")
    ids.reverse()
    pages = [typist.json("dlq", "list", "--page", str(n), "--page-size", "4") for n in (1, 2)]
    assert [each["id"] for page in pages for each in page["messages"]] == ids
    assert [page["pagination"] for page in pages] == [
        {"total_count": 6, "page": 1, "page_size": 4, "has_next": True},
        {"total_count": 6, "page": 2, "page_size": 4, "has_next": False},
    ]
    assert pages[0]["messages"][0]["payload"] == {"n": 5}
    of_topic = typist.json("dlq", "list", "schedule")
    assert [each["id"] for each in of_topic["messages"]] == ids[1:]

    shown = typist("dlq", "list").stdout.splitlines()
    assert [line.split()[0] for line in shown] == ["ID", *(each[:8] for each in ids)]
    assert [line.split()[1:6] for line in shown[1:3]] == [
        ["6", "call_log", "PENDING", "0", "BAD_REQUEST"],
        ["5", "schedule", "PENDING", "0", "BAD_REQUEST"],
    ]


def test_resolved_letters_are_listed_only_with_all(
    typist: Typist, schema: None, db: Database
) -> None:
    first, second = bury(db, [{"n": 1}, {"n": 2}])
    db.execute("UPDATE serversync.dead_letters SET status = 'RESOLVED' WHERE id = %s", (second,))
    for options, listed in (((), [first]), (("--all",), [second, first])):
        page = typist.json("dlq", "list", *options)
        assert [each["id"] for each in page["messages"]] == listed
        assert page["pagination"]["total_count"] == len(listed)
    assert second[:8] not in typist("dlq", "list").stdout


def test_many_letters_are_counted_by_their_code_before_the_newest_are_shown(
    typist: Typist, schema: None, db: Database
) -> None:
    db.execute(BURIED_MANY, {"count": 60, "status": "PENDING"})
    db.execute("UPDATE serversync.dead_letters SET error_code = 'REJECTED' WHERE outbox_id < 10")
    groups, newest = typist("dlq", "list").stdout.split("\n\n")
    rows = [line.split()[:3] for line in groups.splitlines()]
    assert rows[0] == ["CODE", "TOPIC", "LETTERS"]
    assert sum(int(number) for _, _, number in rows[1:]) == 60
    assert ["BAD_REQUEST", "call_log", "17"] in rows and ["REJECTED", "call_log", "3"] in rows
    assert len(newest.splitlines()) == 1 + 20 + 1
    assert "LETTERS" not in typist("dlq", "list", "--page", "2").stdout


def test_a_letter_is_named_by_its_seq_or_by_the_beginning_of_its_id(
    typist: Typist, schema: None, db: Database
) -> None:
    ids = bury(db, [{"n": n} for n in range(4)])
    rename = "UPDATE serversync.dead_letters SET id = %s WHERE id = %s"
    alike = [f"0003abcd-0000-4000-8000-00000000000{n}" for n in range(2)]
    for new, old in zip(alike, ids, strict=False):
        db.execute(rename, (new, old))
    for name in ("3", ids[2][:8], ids[2].upper(), ids[2][:4]):
        assert typist.json("dlq", "show", name)["id"] == ids[2], name
    retried = typist.json("dlq", "retry", "1", ids[3][:9])
    assert [each["id"] for each in retried] == [alike[0], ids[3]]
    # What may be two says which, and nothing is done.
    unclear = typist("dlq", "delete", "0003AB", "--yes", code=1).stdout
    assert all(f"{each} (seq {seq})" in unclear for seq, each in enumerate(alike, 1))
    assert len(dead_letters(db)) == 4
    # Three characters are a seq, or nothing.
    assert "no dead letter 000" in typist("dlq", "show", "000", code=1).stderr


def test_how_many_attempts_were_charged_is_said_in_words(
    typist: Typist, letter: Letter, db: Database
) -> None:
    assert "none charged: it was given up at once" in typist("dlq", "show", letter.id).stdout
    db.execute("UPDATE serversync.dead_letters SET attempts = 8")
    assert "8 charged; what failed while" in typist("dlq", "show", letter.id).stdout
    assert typist.json("dlq", "show", letter.id)["attempts"] == 8


def test_times_in_the_list_are_those_of_the_machine_and_replay_reads_them_so(
    desk: Desk, letter: Letter, db: Database
) -> None:
    tokyo: dict[str, Any] = {"TZ": "Asia/Tokyo"}
    at = desk.json("dlq", "show", letter.id)["created_at"]
    line = desk("dlq", "list", **tokyo).stdout.splitlines()[1]
    since = line.split()[6]
    assert since == str(datetime.fromisoformat(at).astimezone(TOKYO))[:19].replace(" ", "T")
    db.execute("UPDATE sync_outbox SET created_at = %s", (at,))
    assert desk.json("replay", "--since", since, **tokyo)["letter"] == 1
    assert desk.json("replay", "--until", since, **tokyo)["letter"] == 0


def test_the_line_for_the_next_page_can_be_pasted(desk: Desk, schema: None, db: Database) -> None:
    ids = bury(db, [{"n": n} for n in range(5)])
    bury(db, [{"n": 9}] * 2, "call_log")
    first = desk("dlq", "list", "schedule", "--page-size", "2").stdout
    assert "5 in all" in first
    line = first.splitlines()[-1].partition("serversync ")[2]
    second = desk(*shlex.split(line)).stdout
    assert [text.split()[0] for text in second.splitlines()[1:3]] == [ids[2][:8], ids[1][:8]]


def test_a_page_behind_the_last_one_does_not_say_that_there_are_no_letters(
    desk: Desk, schema: None, db: Database
) -> None:
    assert desk("dlq", "list").stdout == "no dead letters\n"
    bury(db, [{"n": 1}])
    shown = desk("dlq", "list", "--page", "1000000000", "--page-size", "1000").stdout
    assert "no dead letters" not in shown and "1 in all" in shown


def test_a_letter_is_shown_with_all_that_is_known_of_it(
    desk: Desk, letter: Letter, db: Database
) -> None:
    shown = desk.json("dlq", "show", letter.id)
    assert set(shown) == {
        *("id", "original_topic", "error_message", "retry_count", "max_retries", "payload"),
        *("status", "created_at", "updated_at", "last_retry_at", "outbox_id", "entity_id"),
        *("error_code", "http_status", "attempts", "payload_bytes"),
    }
    assert (shown["id"], shown["outbox_id"], shown["entity_id"]) == (
        letter.id,
        letter.seq,
        letter.entity,
    )
    assert (shown["status"], shown["retry_count"], shown["max_retries"]) == ("PENDING", 0, 3)
    assert shown["payload"] == {"id": letter.entity, "name": "a schedule"}
    assert "SCHEMA" in shown["error_message"] and shown["error_code"] == "REJECTED"
    assert datetime.fromisoformat(shown["created_at"]).tzinfo is not None
    text = desk("dlq", "show", letter.id.upper()).stdout
    assert letter.id in text and '"name": "a schedule"' in text and "REJECTED" in text


@pytest.mark.parametrize("action", ["show", "retry", "delete"])
def test_an_id_that_is_none_is_told_from_one_that_is_not_there(
    typist: Typist, schema: None, db: Database, action: str
) -> None:
    more = ["--yes"] if action == "delete" else []
    unknown = typist("dlq", action, NOBODY, *more, code=1)
    assert NOBODY in unknown.stdout + unknown.stderr
    (good,) = bury(db, [{"n": 1}])
    names = ["; drop table", *([good] if action != "show" else [])]
    for name in names[:1], names:
        refused = typist("dlq", action, *name, *more, code=2)
        assert "UUID" in refused.stdout + refused.stderr
    assert state_of(db, good) == ("PENDING", 0)


def test_nonsense_is_a_matter_of_usage(typist: Typist) -> None:
    for line in (
        "dlq list --page 0",
        "dlq list --page-size 0",
        "dlq list --page-size 1001",
        "dlq list --page 99999999999999999999",
        "dlq retry",
        "dlq",
    ):
        assert "usage:" in typist(*line.split(), code=2).stderr, line


# -- payloads of all kinds ------------------------------------------------------------------------


def test_secrets_in_payloads_are_not_shown(typist: Typist, schema: None, db: Database) -> None:
    deep: object = {"password": "hunter-deep", "note": "Bearer abcdef0123456789"}
    for _ in range(700):
        deep = [deep]
    payloads: list[Any] = [
        {
            "password": "hunter-1",
            "inner": [{"api_key": "hunter-2", "n": 1}],
            "note": "Authorization: Bearer hunter-3-0123456789 and our-own-token",
            "our-own-token": 1,
            "tokens": ["hunter-4"],
            "secrets": {"of_yours": ["hunter-5"]},
            "pwd": 47114711,
            "no_password": None,
            "name": "visible",
        },
        deep,
    ]
    ids = bury(db, payloads)
    settings: dict[str, Any] = {"SYNC_TOKEN": "our-own-token"}
    texts = [typist("dlq", "list", "--json", **settings).stdout]
    for letter in ids:
        texts += [
            typist("dlq", "show", letter, *how, **settings).stdout for how in ([], ["--json"])
        ]
    for secret in ("hunter", "our-own-token", "abcdef0123456789", "47114711"):
        assert [text for text in texts if secret in text] == []
    assert "visible" in texts[0] and '"no_password": null' in texts[0]


def test_a_large_payload_is_not_shown_whole(typist: Typist, schema: None, db: Database) -> None:
    small, middle, large = bury(db, [{"a": "x" * n} for n in (4000, 5000, 5 * MIB)])
    listed = typist("dlq", "list", "--json").stdout
    assert len(listed) < 20_000
    by_id = {each["id"]: each for each in json.loads(listed)["messages"]}
    assert by_id[small]["payload"] == {"a": "x" * 4000}
    assert by_id[middle]["payload"] is None and by_id[large]["payload"] is None
    assert by_id[large]["payload_bytes"] >= 5 * MIB
    assert typist.json("dlq", "show", middle)["payload"] == {"a": "x" * 5000}
    shown = typist("dlq", "show", large).stdout
    assert len(shown) < 5000 and "too large to be shown" in shown and "5.2 MB" in shown
    assert typist.json("dlq", "show", large)["payload"] is None


def test_nesting_of_any_depth_is_shown_somehow(typist: Typist, schema: None, db: Database) -> None:
    lists = [f"{'[' * depth}{depth}{']' * depth}" for depth in range(100, 1100, 9)]
    objects = ['{"a":' * depth + str(depth) + "}" * depth for depth in range(100, 500, 9)]
    deepest = ['{"a":[' * 2_500 + "1" + "]}" * 2_500, "[" * 5_000 + "]" * 5_000]
    ids = bury(db, [*lists, *objects, *deepest])
    found = typist.json("dlq", "list", "--page-size", "1000")["messages"]
    assert len(found) == len(ids)
    for letter in (*ids[-2:], ids[len(lists) - 1]):
        assert "[[[" in "".join(typist("dlq", "show", letter).stdout.split()).replace('{"a":', "[")
        assert typist.json("dlq", "show", letter)["id"] == letter


def test_a_number_of_any_length_is_shown(typist: Typist, schema: None, db: Database) -> None:
    for digits in (4000, 5000, 100_000):
        (letter,) = bury(db, [f'{{"n": {"7" * digits}}}'])
        assert "7" * digits in typist("dlq", "show", letter).stdout
        assert "7" * 1000 in typist("dlq", "show", letter, "--json").stdout
    typist("dlq", "list", "--json")


def test_hostile_text_never_reaches_the_terminal(
    typist: Typist, schema: None, db: Database
) -> None:
    hostile = f"\x1b[2J\x9b31m\r\n\x07\u2028 ä日本{BIDI}"
    payload = {hostile: [hostile]}
    (letter,) = bury(db, [payload], topic=hostile, error=f"HTTP 400: {hostile}")
    # Desk looks at every answer: of both kinds, and of each command.
    assert "日本" in typist("dlq", "list").stdout
    assert len(typist("dlq", "list").stdout.splitlines()) == 2
    (listed,) = typist.json("dlq", "list")["messages"]
    assert listed["payload"] == payload
    typist("dlq", "list", hostile, "--page-size", "1")
    assert "日本" in typist("dlq", "show", letter).stdout
    assert typist.json("dlq", "show", letter)["original_topic"].startswith("\x1b[2J")
    (text,) = bury(db, [json.dumps(f"text{hostile}")])
    assert r"text\u001b[2J\u009b31m\r\n\u0007\u2028 ä日本" in typist("dlq", "show", text).stdout
    typist("dlq", "retry", hostile, code=None)
    typist("dlq", "retry", letter)
    typist("status", code=None)
    typist("status", "--json", code=None)


@pytest.mark.parametrize("encoding", ["latin-1", "ascii"])
def test_a_terminal_that_lacks_letters_gets_them_escaped(
    desk: Desk, schema: None, db: Database, encoding: str
) -> None:
    text = "日本 \U0001f600"
    (letter,) = bury(db, [{"name": text}], topic=text, error=text)
    poor: dict[str, Any] = {"PYTHONIOENCODING": encoding}
    assert desk.json("dlq", "show", letter, **poor)["payload"] == {"name": text}
    (listed,) = desk.json("dlq", "list", **poor)["messages"]
    assert listed["original_topic"] == listed["error_message"] == text
    for line in (["dlq", "list"], ["dlq", "show", letter], ["dlq", "retry", letter]):
        desk(*line, **poor)
    assert "\\u65e5" in desk("status", code=69, **poor).stdout
    desk("doctor", code=1, **poor)
    desk("--help", **poor)
    assert "no dead letter" in desk("dlq", "show", NOBODY, code=1, **poor).stderr


def test_an_argument_that_is_no_text_is_refused_in_words(
    agent: AgentFactory, schema: None, backend: Backend
) -> None:
    for args in (["list", b"\xff"], ["retry-all", b"\xff"], ["show", b"\xff"]):
        odd = agent(args=["dlq", *args])
        assert odd.wait(60) in (0, 1, 2)
        assert "Traceback" not in odd.log()


def test_a_reader_that_goes_away_is_no_error(
    desk: Desk, schema: None, db: Database, agent: AgentFactory
) -> None:
    bury(db, [{"n": n, "text": "x" * 3000} for n in range(50)])
    for args in (["dlq", "list", "--json"], ["status"]):
        pipe = ["bash", "-c", '"$@" | head -c 1; echo " ${PIPESTATUS[0]}"', "bash"]
        running = agent(args=args, prefix=pipe)
        running.wait(60)
        assert "Traceback" not in running.log() and "Broken" not in running.log()
        assert running.log().split()[-1] in ("0", "69")

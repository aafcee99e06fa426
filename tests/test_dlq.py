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
from desk import BIDI, BURIED_MANY, MESSAGE, Desk, Letter, Typist, bury, give_up, state_of
from frontend import Reply
from ledger import dead_letters, let_hours_pass
from pg import Database
from pi import Pi
from waiting import wait_until

NOBODY = "00000000-0000-4000-8000-000000000000"
MIB = 1 << 20
TOKYO = timezone(timedelta(hours=9))


def given_up(pi: Pi, *types: str) -> list[Letter]:
    """Entries that the frontend refused; now it would take them."""
    return give_up(pi.agent, pi.backend, pi.frontend, *types)


@pytest.fixture
def letter(pi: Pi) -> Letter:
    return given_up(pi, "schedule")[0]


# -- from one state to the next -------------------------------------------------------------------


def test_a_retried_letter_is_in_the_queue_and_resolved_when_it_is_delivered(
    typist: Typist, letter: Letter, pi: Pi
) -> None:
    typist("dlq", "retry", letter.id)
    pi.db.execute("DELETE FROM sync_outbox WHERE id = %s", (letter.seq,))
    pi.once()
    assert state_of(pi.db, letter.id) == ("PENDING", 0)  # its row has vanished

    (shown,) = typist.json("dlq", "retry", letter.id)
    assert shown == {"id": letter.id, "status": "RETRYING", "message": shown["message"]}
    assert str(letter.seq) in shown["message"]
    assert state_of(pi.db, letter.id) == ("RETRYING", 0) and pi.db.pending() == [letter.seq]
    assert typist.json("dlq", "show", letter.id)["last_retry_at"] is not None
    again = typist("dlq", "retry", letter.id, code=1)
    assert "in the queue already" in again.stdout and letter.id in again.stdout

    pi.once()
    assert state_of(pi.db, letter.id) == ("RESOLVED", 0)
    assert pi.frontend.seqs() == [letter.seq] and not pi.db.pending()
    (refused,) = typist.json("dlq", "retry", letter.id, "--force", code=1)
    assert refused["error"] == "conflict" and "delivered" in refused["message"]
    assert not pi.db.pending()
    # From now on it is an entry like any other.
    assert typist.json("replay", "--seq", str(letter.seq), "--yes")["again"] == 1
    assert pi.db.pending() == [letter.seq]


def test_a_letter_that_fails_three_retries_is_dead_and_only_force_sends_it_again(
    typist: Typist, letter: Letter, pi: Pi
) -> None:
    pi.frontend.rejected[letter.entity] = "SCHEMA"
    for number in (1, 2, 3):
        typist("dlq", "retry", letter.id)
        pi.once(code=1)
        assert state_of(pi.db, letter.id) == ("DEAD" if number == 3 else "PENDING", number)
    refused = typist("dlq", "retry", letter.id, code=1)
    assert "3 retries are used up" in refused.stdout
    assert typist("dlq", "retry-all", code=1).stdout.startswith("0 entries back")
    assert state_of(pi.db, letter.id) == ("DEAD", 3) and not pi.db.pending()

    typist("dlq", "retry", letter.id, "--force")
    assert state_of(pi.db, letter.id) == ("RETRYING", 3)
    pi.once(code=1)
    assert state_of(pi.db, letter.id) == ("DEAD", 4)
    pi.frontend.rejected.clear()
    typist("dlq", "retry-all", "--force")
    pi.once()
    assert state_of(pi.db, letter.id) == ("RESOLVED", 4)


def test_a_letter_whose_seq_another_entry_has_by_now_concerns_only_itself(
    typist: Typist, letter: Letter, pi: Pi
) -> None:
    pi.db.execute("TRUNCATE sync_outbox RESTART IDENTITY")
    while pi.backend.enqueue() < letter.seq:
        pass
    pending = pi.db.pending()
    assert "belongs to another entry" in typist("dlq", "retry", letter.id, "--force", code=1).stdout
    assert "1 not: its seq belongs to another" in typist("dlq", "retry-all", code=1).stdout
    assert state_of(pi.db, letter.id) == ("PENDING", 0)
    typist("dlq", "delete", letter.id, "--yes")
    assert pi.db.pending() == pending and not dead_letters(pi.db)


def test_a_retry_wakes_an_agent_that_would_not_look_for_an_hour(
    typist: Typist, letter: Letter, pi: Pi
) -> None:
    pi.agent(SYNC_POLL_INTERVAL_SEC=3600).wait_sentence("1 dead letter needs you")
    # Without the backend's trigger: the command itself wakes the agent.
    pi.db.execute("DROP TRIGGER serversync_wake ON sync_outbox")
    typist("dlq", "retry", letter.id)
    wait_until(lambda: state_of(pi.db, letter.id)[0] == "RESOLVED", what="the end of the letter")
    assert pi.frontend.seqs() == [letter.seq]


def test_a_retried_entry_goes_before_the_later_ones_of_its_call(typist: Typist, pi: Pi) -> None:
    call_log_id = str(uuid.uuid4())
    pi.frontend.rejected[call_log_id] = "SCHEMA"
    call = pi.backend.end_call(call_log_id=call_log_id, events=0)
    first = call.seqs[0]
    pi.frontend.on_entries = lambda request: Reply(503) if len(request.entries) == 1 else None
    pi.frontend.on_file = lambda request: Reply(503)
    pi.agent.once()
    assert list(dead_letters(pi.db)) == [first]
    later = [pi.backend.enqueue("ivr_session_event", {"callLogId": call_log_id}) for _ in range(2)]
    pi.frontend.rejected.clear()
    pi.frontend.on_entries = pi.frontend.on_file = None
    pi.frontend.log.clear()
    typist("dlq", "retry", str(first))
    before = len(pi.frontend.seqs())
    let_hours_pass(pi.db)
    pi.once()
    seqs = pi.frontend.seqs()[before:]
    assert seqs[0] == first and seqs[-2:] == later and seqs == sorted(seqs)
    assert pi.frontend.log[0][0] == "entry" and pi.frontend.playable(call.recording_id)


def test_a_retried_recording_is_uploaded_and_shown_as_uploaded(typist: Typist, pi: Pi) -> None:
    pi.frontend.on_file = lambda request: Reply(400, body={"error": "no such call"})
    call = pi.backend.end_call()
    pi.once(code=1)
    assert pi.backend.upload_status(call) == ("upload_failed", None) and call.wav.exists()
    (dead,) = dead_letters(pi.db).values()
    assert dead["original_topic"] == "recording_file"

    pi.frontend.on_file = None
    typist("dlq", "retry", str(dead["id"]))
    pi.once()
    assert state_of(pi.db, str(dead["id"])) == ("RESOLVED", 0)
    pi.assert_stored(call)
    assert not call.directory.exists()


def test_six_people_at_once_beside_the_agent_and_each_entry_goes_once(schema: None, pi: Pi) -> None:
    (letter,) = bury(pi.db, [{"n": 1}])
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(6) as people:
        typists = [stack.enter_context(contextlib.closing(Typist(pi.agent))) for _ in range(6)]
        for each in typists:
            each("dlq", "list")  # it has started
        ends = [people.submit(each, "dlq", "retry", letter, code=None) for each in typists]
        assert sorted(each.result().returncode for each in ends) == [0] + [1] * 5
        assert state_of(pi.db, letter) == ("RETRYING", 0) and len(pi.db.pending()) == 1
        pi.idle()
        pi.db.execute(BURIED_MANY, {"count": 300, "status": "PENDING"})
        told = [people.submit(each.json, "dlq", "retry-all", code=None) for each in typists]
        assert sum(each.result()["retried"] for each in told) == 300
    resolved = "SELECT count(*) FROM serversync.dead_letters WHERE status = 'RESOLVED'"
    wait_until(lambda: pi.db.value(resolved) == 301, 60, "all of them")
    assert len(pi.frontend.seqs()) == len({*pi.frontend.seqs()}) == 301 and not pi.db.pending()


# -- what has been overtaken ----------------------------------------------------------------------


@pytest.mark.parametrize("newer", ["delivered", "pending"])
def test_a_letter_that_a_newer_entry_has_overtaken_is_only_sent_by_force(
    typist: Typist, letter: Letter, pi: Pi, newer: str
) -> None:
    pending = [later := pi.backend.enqueue("schedule", entity_id=letter.entity)]
    if newer == "delivered":
        pi.once()
        pending = []
    refused = typist("dlq", "retry", letter.id, code=1)
    assert f"newer entry of the same entity (seq {later})" in refused.stdout
    (told,) = typist.json("dlq", "retry", letter.id, code=1)
    assert told["id"] == letter.id and told["error"] == "conflict"
    everything = typist.json("dlq", "retry-all", code=1)
    assert (everything["retried"], everything["refused"]) == (0, 1)
    assert "newer entry" in everything["message"]
    assert state_of(pi.db, letter.id) == ("PENDING", 0) and pi.db.pending() == pending

    # No agent runs, so none can be sending the newer one: nothing is waited for.
    pi.once("dlq", "retry", letter.id, "--force", SYNC_TIMEOUT_SEC=300)
    assert pi.db.pending() == [letter.seq, *pending]


def test_a_newer_dead_letter_overtakes_nobody_until_it_is_in_the_queue_and_both_go_in_order(
    typist: Typist, pi: Pi
) -> None:
    """Two of one entity."""
    entity = str(uuid.uuid4())
    pi.frontend.rejected[entity] = "SCHEMA"
    for _ in range(2):
        pi.backend.enqueue("schedule", entity_id=entity)
        pi.once(code=1)
    older, newer = (str(row["id"]) for row in dead_letters(pi.db).values())
    # The agent may be sending the newer one at this moment: the older one would arrive behind it.
    typist("dlq", "retry", newer)
    assert "newer entry" in typist("dlq", "retry", older, code=1).stdout
    assert state_of(pi.db, older) == ("PENDING", 0)
    pi.once(code=1)
    pi.frontend.rejected.clear()

    assert typist.json("dlq", "retry-all") == {
        "retried": 2,
        "refused": 0,
        "more": False,
        "message": "2 entries back in the queue",
    }
    pi.once()
    assert pi.frontend.seqs() == sorted(pi.frontend.seqs()) and len(pi.frontend.seqs()) == 2
    assert state_of(pi.db, older)[0] == state_of(pi.db, newer)[0] == "RESOLVED"


def test_what_is_refused_does_not_stop_the_rest_and_only_the_same_type_overtakes(
    typist: Typist, pi: Pi
) -> None:
    first, second, third = given_up(pi, "schedule", "call_log", "schedule")
    for each in (first, second):
        pi.backend.enqueue("call_log", entity_id=each.entity)
    told = typist.json("dlq", "retry", first.id, second.id, NOBODY, third.id, code=1)
    assert [each["id"] for each in told] == [first.id, second.id, NOBODY, third.id]
    assert [each.get("error") for each in told] == [None, "conflict", "not_found", None]
    states = [state_of(pi.db, each.id)[0] for each in (first, second, third)]
    assert states == ["RETRYING", "PENDING", "RETRYING"]


def test_newer_entries_that_wait_in_an_outage_are_waited_for_once_not_for_each_letter(
    pi: Pi,
) -> None:
    letters = given_up(pi, *["schedule"] * 3)
    pi.frontend.on_entries = lambda request: Reply(503)
    running = pi.agent()
    for letter in letters:
        pi.backend.enqueue("schedule", entity_id=letter.entity, payload={"is": "new"})
    running.wait_log("outage, nothing is lost")
    ids = [letter.id for letter in letters]
    patient = pi.agent(args=["dlq", "retry", "--force", *ids], SYNC_TIMEOUT_SEC=600)
    in_queue = "SELECT count(*) FROM serversync.dead_letters WHERE status = 'RETRYING'"
    wait_until(lambda: pi.db.value(in_queue) == 3, 60, "all of them in the queue", patient.log)
    assert patient.running  # perhaps a newer one is on its way just now
    pi.frontend.on_entries = None
    running.hup()
    assert patient.wait(60) == 0, patient.log()
    wait_until(lambda: not pi.db.pending(), 60, "all of them", running.log)
    for letter in letters:
        assert pi.frontend.store[letter.entity]["payload"] == {"is": "new"}


def test_a_row_that_was_pruned_comes_back_under_its_id_with_all_its_columns(
    typist: Typist, pi: Pi
) -> None:
    pi.db.execute("ALTER TABLE sync_outbox ADD COLUMN op text")
    entity = str(uuid.uuid4())
    pi.frontend.rejected[entity] = "SCHEMA"
    seq = pi.backend.enqueue("schedule", {"name": "日本語", "big": 10**30}, entity)
    pi.db.execute("UPDATE sync_outbox SET op = 'delete', created_at = now() - interval '99 days'")
    columns = "SELECT id, entity_type, entity_id, payload, created_at, op FROM sync_outbox"
    before = pi.db.rows(columns)
    pi.once(code=1)
    pi.frontend.rejected.clear()
    letter = str(dead_letters(pi.db)[seq]["id"])
    pi.backend.enqueue()
    pi.once()
    pi.db.execute("UPDATE sync_outbox SET processed_at = processed_at - interval '40 days'")
    for table, column in (("deliveries", "started_at"), ("dead_letters", "created_at")):
        pi.db.execute(f"UPDATE serversync.{table} SET {column} = {column} - interval '40 days'")
    assert "deleted 2 rows" in typist("prune", "--yes").stdout
    assert not pi.db.rows(columns)

    # Of what came later than what was pruned all is known.
    (young,) = bury(pi.db, [{"n": 1}])
    told = typist.json("dlq", "retry-all", code=1)
    assert (told["retried"], told["refused"]) == (1, 1)
    assert state_of(pi.db, young) == ("RETRYING", 0) and state_of(pi.db, letter) == ("PENDING", 0)
    pi.once()
    refused = typist("dlq", "retry", letter, code=1)
    assert "may have been pruned" in refused.stdout
    assert not pi.db.pending()
    typist("dlq", "retry", letter, "--force")
    assert pi.db.rows(f"{columns} WHERE id = {seq}") == before and pi.db.pending() == [seq]
    pi.once()
    (sent,) = pi.frontend.received(entity)
    assert (sent["seq"], sent["op"]) == (seq, "delete")
    assert datetime.fromisoformat(sent["createdAt"]) == before[0][4]
    assert state_of(pi.db, letter) == ("RESOLVED", 0)


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
    for line in (("retry-all",), ("list",)):
        unknown = typist("dlq", *line, "no_such_topic", code=1)
        assert unknown.stdout == ""
        assert "of: call_log, recording, schedule" in unknown.stderr
    # One that has entries, and no dead letter.
    db.execute("DELETE FROM serversync.dead_letters WHERE original_topic = 'call_log'")
    assert typist("dlq", "list", "call_log").stdout == "no dead letters\n"


def test_deleting_says_what_it_will_do_does_it_only_with_yes_and_no_replay_brings_it_back(
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
    assert "no dead letter" in typist("dlq", "delete", first, "--yes", code=1).stdout
    typist("dlq", "retry", third)
    assert "in the queue" in typist("dlq", "delete", third, "--yes").stdout
    typist("replay", "--seq", "1-", "--yes")
    assert not db.pending()


# -- looking --------------------------------------------------------------------------------------


def test_the_list_shows_each_open_letter_once_on_its_pages_newest_first(
    typist: Typist, schema: None, db: Database
) -> None:
    assert typist("dlq", "list").stdout == "no dead letters\n"
    ids = bury(db, [{"n": n} for n in range(5)]) + bury(db, [{"n": 5}], "call_log")
    ids.reverse()
    shown = typist("dlq", "list").stdout.splitlines()
    assert [line.split()[0] for line in shown] == ["ID", *(each[:8] for each in ids)]
    assert [line.split()[1:6] for line in shown[1:3]] == [
        ["6", "call_log", "PENDING", "0", "BAD_REQUEST"],
        ["5", "schedule", "PENDING", "0", "BAD_REQUEST"],
    ]
    # Of one topic; the line for the next page can be pasted.
    first = typist("dlq", "list", "schedule", "--page-size", "2").stdout
    assert "5 in all" in first
    line = first.splitlines()[-1].partition("serversync ")[2]
    second = typist(*shlex.split(line)).stdout
    assert [text.split()[0] for text in second.splitlines()[1:3]] == [ids[3][:8], ids[4][:8]]
    behind = typist("dlq", "list", "--page", "1000000000", "--page-size", "1000").stdout
    assert "no dead letters" not in behind and "6 in all" in behind

    db.execute("UPDATE serversync.dead_letters SET status = 'RESOLVED' WHERE id = %s", (ids[0],))
    for options, listed in (((), ids[1:]), (("--all",), ids)):
        page = typist.json("dlq", "list", *options, "--page-size", "5")
        assert [each["id"] for each in page["messages"]] == listed[:5]
        assert page["pagination"] == {
            "total_count": len(listed), "page": 1, "page_size": 5, "has_next": listed == ids
        }  # fmt: skip
    assert ids[0][:8] not in typist("dlq", "list").stdout


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


def test_a_letter_is_shown_with_all_that_is_known_of_it(
    typist: Typist, letter: Letter, db: Database
) -> None:
    shown = typist.json("dlq", "show", letter.id)
    assert set(shown) == MESSAGE | {"payload_bytes"}
    names = (shown["id"], shown["outbox_id"], shown["entity_id"])
    assert names == (letter.id, letter.seq, letter.entity)
    assert (shown["status"], shown["retry_count"], shown["max_retries"]) == ("PENDING", 0, 3)
    assert shown["payload"] == {"id": letter.entity, "name": "a schedule"}
    assert "SCHEMA" in shown["error_message"] and shown["error_code"] == "REJECTED"
    text = typist("dlq", "show", letter.id.upper()).stdout
    assert letter.id in text and '"name": "a schedule"' in text and "REJECTED" in text
    assert "none charged: it was given up at once" in text
    db.execute("UPDATE serversync.dead_letters SET attempts = 8")
    assert "8 charged; what failed while" in typist("dlq", "show", letter.id).stdout
    assert typist.json("dlq", "show", letter.id)["attempts"] == 8

    # Times are those of the machine, and replay reads them so.
    at = datetime.fromisoformat(shown["created_at"])
    assert at.tzinfo is not None
    tokyo: dict[str, Any] = {"TZ": "Asia/Tokyo"}
    since = typist("dlq", "list", **tokyo).stdout.splitlines()[1].split()[6]
    assert since == str(at.astimezone(TOKYO))[:19].replace(" ", "T")
    db.execute("UPDATE sync_outbox SET created_at = %s", (at,))
    assert typist.json("replay", "--since", since, **tokyo)["letter"] == 1
    assert typist.json("replay", "--until", since, **tokyo)["letter"] == 0


def test_an_id_that_is_none_is_told_from_one_that_is_not_there(
    typist: Typist, schema: None, db: Database
) -> None:
    (good,) = bury(db, [{"n": 1}])
    for action, more in (("show", []), ("retry", []), ("delete", ["--yes"])):
        unknown = typist("dlq", action, NOBODY, *more, code=1)
        assert NOBODY in unknown.stdout + unknown.stderr
        names = ["; drop table", *([good] if action != "show" else [])]
        refused = typist("dlq", action, *names, *more, code=2)
        assert "UUID" in refused.stdout + refused.stderr
        assert state_of(db, good) == ("PENDING", 0)


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


def test_nesting_of_any_depth_and_numbers_of_any_length_are_shown_somehow(
    typist: Typist, schema: None, db: Database
) -> None:
    lists = [f"{'[' * depth}{depth}{']' * depth}" for depth in range(100, 1100, 45)]
    objects = ['{"a":' * depth + str(depth) + "}" * depth for depth in range(100, 500, 45)]
    deepest = ['{"a":[' * 2_500 + "1" + "]}" * 2_500, "[" * 5_000 + "]" * 5_000]
    ids = bury(db, [*lists, *objects, *deepest])
    for letter in (*ids[-2:], ids[len(lists) - 1]):
        assert "[[[" in "".join(typist("dlq", "show", letter).stdout.split()).replace('{"a":', "[")
        assert typist.json("dlq", "show", letter)["id"] == letter
    for digits in (4000, 5000, 100_000):
        ids += bury(db, [f'{{"n": {"7" * digits}}}'])
        assert "7" * digits in typist("dlq", "show", ids[-1]).stdout
        assert "7" * 1000 in typist("dlq", "show", ids[-1], "--json").stdout
    assert len(typist.json("dlq", "list", "--page-size", "1000")["messages"]) == len(ids)


def test_hostile_text_never_reaches_the_terminal(
    typist: Typist, schema: None, db: Database
) -> None:
    hostile = f"\x1b[2J\x9b31m\r\n\x07\u2028 ä日本{BIDI}"
    payload = {hostile: [hostile]}
    (letter,) = bury(db, [payload], topic=hostile, error=f"HTTP 400: {hostile}")
    # Desk looks at every answer: of both kinds, and of each command.
    shown = typist("dlq", "list").stdout
    assert "日本" in shown and len(shown.splitlines()) == 2
    (listed,) = typist.json("dlq", "list")["messages"]
    assert listed["payload"] == payload
    typist("dlq", "list", hostile, "--page-size", "1")
    assert "日本" in typist("dlq", "show", letter).stdout
    assert typist.json("dlq", "show", letter)["original_topic"].startswith("\x1b[2J")
    (text,) = bury(db, [json.dumps(f"text{hostile}")])
    assert r"text\u001b[2J\u009b31m\r\n\u0007\u2028 ä日本" in typist("dlq", "show", text).stdout
    typist("dlq", "retry", hostile, code=None)
    typist("dlq", "retry", letter)
    assert "ä日本" in typist("status", code=None).stdout  # as a type that is pending
    typist("status", "--json", code=None)


def test_a_terminal_that_lacks_letters_gets_them_escaped(
    desk: Desk, schema: None, db: Database
) -> None:
    text = "日本 \U0001f600"
    (letter,) = bury(db, [{"name": text}], topic=text, error=text)
    poor: dict[str, Any] = {"PYTHONIOENCODING": "latin-1"}
    assert desk.json("dlq", "show", letter, **poor)["payload"] == {"name": text}
    (listed,) = desk.json("dlq", "list", **poor)["messages"]
    assert listed["original_topic"] == listed["error_message"] == text
    desk("--help", **poor)
    desk("dlq", "retry", letter, **poor)
    assert "\\u65e5" in desk("status", code=69, **poor).stdout
    assert "no dead letter" in desk("dlq", "show", NOBODY, code=1, **poor).stderr


def test_a_reader_that_goes_away_is_no_error(
    schema: None, db: Database, agent: AgentFactory
) -> None:
    bury(db, [{"n": n, "text": "x" * 3000} for n in range(50)])
    pipe = ["bash", "-c", '"$@" | head -c 1; echo " ${PIPESTATUS[0]}"', "bash"]
    running = agent(args=["dlq", "list", "--json"], prefix=pipe)
    running.wait(60)
    assert "Traceback" not in running.log() and "Broken" not in running.log()
    assert running.log().split()[-1] == "0"

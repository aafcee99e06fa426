"""The settings pull: what people change in the frontend reaches the backend's tables."""

import json
import re
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import pytest

import serversync
from agent import Agent
from desk import Desk
from frontend import Frontend, Json, Reply, Request, script
from pg import Database
from pi import Pi
from settings import (
    AUDIO,
    BUSY,
    PATHS,
    SECTIONS,
    Desired,
    Office,
    Puller,
    announcement,
    asked,
    example,
    flow,
    group,
    make_schema,
    new_id,
    places,
    route,
    rule,
    sections,
    skipped,
    tables,
    wait_pulls,
)
from waiting import wait_until

NO_WAV = b"no WAV: that is another test's"


@pytest.fixture
def office(pi: Pi) -> Office:
    return Office(pi)


def pulling(pi: Pi, interval: float = 0.1) -> Agent:
    """An agent that has pulled what the frontend has."""
    running = pi.agent(FRONTEND_SYNC_INTERVAL_SEC=interval)
    running.wait_log("ivr-flows changed")
    return running


# -- bad items ------------------------------------------------------------------------------------

GROUPS = [
    ("110", "no phone number"),
    ("notanumber", "no phone number"),
    ("+0123456789", "no phone number"),
    ("+81312345678901234", "no phone number"),
    ("", "no phone number"),
    (17, "not text"),
    (None, "not text"),
]
NO_NAMES = ["", "..", "../x.wav", "a/b.wav", "a%2fb.wav", "a\\b.wav", "a.wav?v=2", "a\nb.wav"]
NO_NAMES += [".serversync-x", "ö" * 128]
ITEMS: list[tuple[str, Any, str]] = [
    ("number-groups", None, "not an object"),
    ("number-groups", group(id="grp-1"), "id is no UUID"),
    ("number-groups", {"id": new_id(), "phoneNumbers": []}, "name is missing"),
    ("number-groups", group(name="x" * 256), "longer than 255"),
    ("number-groups", group() | {"phoneNumbers": None}, "phoneNumbers is missing"),
    ("number-groups", group() | {"phoneNumbers": "110"}, "phoneNumbers is not a list"),
    ("call-actions", rule(callerGroupId="all"), "callerGroupId is no UUID"),
    ("call-actions", rule(actionType="maybe"), "neither allow nor deny"),
    ("call-actions", rule(actionConfig=["VR"]), "actionConfig is not an object"),
    ("call-actions", rule(actionConfig={"a": [1e999]}), "too large"),
    ("call-actions", rule(isActive="yes"), "neither true nor false"),
    ("announcements", announcement(ttsText=None), "neither audioFileUrl nor ttsText"),
    ("announcements", announcement(ttsText="", audioFileUrl=""), "neither audioFileUrl"),
    ("announcements", announcement(language="x" * 11), "longer than 10"),
    ("announcements", announcement(durationSec="3"), "no number"),
    ("announcements", announcement(durationSec=1e300), "no number that fits"),
    ("announcements", announcement(durationSec=True), "no number"),
    ("announcements", announcement(updatedAt="yesterday"), "no time"),
    ("announcements", announcement(updatedAt="0001-01-01T00:00:00+14:00"), "no time"),
    *(
        ("announcements", announcement(audioFileUrl=url), "audioFileUrl is not")
        for url in ("http://elsewhere.example/a.wav", "/etc/passwd", *map(AUDIO.__add__, NO_NAMES))
    ),
    ("ivr-flows", flow(id=17), "id is no UUID"),
    ("ivr-flows", flow(name="x" * 101), "longer than 100"),
    ("ivr-flows", flow(timeoutSec=7.5), "not a whole number"),
    ("ivr-flows", flow(timeoutSec=1 << 31), "no number that fits"),
    ("ivr-flows", flow(timeoutSec=4711), "no number that fits"),  # 5000 digits on its way
    ("ivr-flows", flow(timeoutSec="7"), "no number"),
    ("ivr-flows", flow() | {"routes": None}, "routes is missing"),
]
ROUTES: list[tuple[Any, str]] = [
    (None, "not an object"),
    (route("8") | {"destination": None}, "not an object"),
    (route("8", None), "actionCode is missing"),
    (route("8", "VRX"), "not 1 or 2 characters"),
    (route("8", ""), "not 1 or 2 characters"),
    (route(None), "dtmfKey is missing"),
    (route(1), "dtmfKey is not text"),
    (route("123456"), "1 to 5 characters"),
    (route(""), "1 to 5 characters"),
    (route("\u3000"), "1 to 5 characters"),
    (route("8", recordingEnabled="yes"), "neither true nor false"),
    (route("8", scenarioId=[]), "scenarioId is not text"),
]


def test_of_very_many_bad_items_the_first_hundred_are_said_and_all_are_counted() -> None:
    items = [*[None] * 300, group("0312345678"), group(*"x" * 300)]
    section = serversync.read_groups({"callerGroups": items})
    assert (len(section.remarks), section.skipped, section.counts["groups"]) == (100, 600, 2)


def test_a_bad_action_stays_as_it_was(office: Office) -> None:
    office.db.execute('UPDATE system_settings SET extra = \'{"other": {"a": [1, 2]}}\'')
    actions, mine = office.wanted.actions, {"actionType": "deny", "actionConfig": BUSY}
    actions["defaultAction"] = mine
    office.apply()
    before = tables(office.db)
    ((extra,),) = before["extra"]
    assert extra == {"other": {"a": [1, 2]}, "defaultAction": mine, "anonymousAction": mine}
    bad: Any
    for bad in ({}, [], "", 0, False, {"actionType": "allow", "actionConfig": "AN"}):
        actions["defaultAction"] = office.wanted.flows[0]["fallbackAction"] = bad
        office.apply()
        assert tables(office.db) == before
        assert len(skipped(office.db, "call-actions")) == 1
        assert len(skipped(office.db, "ivr-flows")) == 1


def test_all_kinds_of_bad_items_at_once_leave_the_good_ones_in_the_tables(
    pi: Pi, office: Office
) -> None:
    """What PostgreSQL cannot hold is dropped from a good one, and said."""
    wanted, before = office.wanted, tables(pi.db)
    lists = (wanted.groups, wanted.rules, wanted.announcements, wanted.flows)
    expected = {"number-groups": [*GROUPS], "ivr-flows": [*ROUTES]}
    wanted.groups[0]["phoneNumbers"] += [number for number, _ in GROUPS]
    wanted.flows[0]["routes"] += [item for item, _ in ROUTES]
    for name, items in zip(SECTIONS, lists, strict=True):
        twice = items[0] | {"name": "second", "id": items[0]["id"].upper()}
        bad = [(item, why) for section, item, why in ITEMS if section == name]
        bad.append((twice, "id is that of an earlier item"))
        items[0]["name"] += "\0\ud800"
        items += [item for item, _ in bad]
        expected[name] = expected.get(name, []) + bad
    wanted.rules[0]["actionConfig"] = {"action\0Code": "V\udfffR"}
    wanted.serve(pi.frontend)
    for path in PATHS.values():  # what Python's json writes and nobody should
        page = json.dumps(pi.frontend.pages[path]).replace("Infinity", "1e999")
        pi.frontend.pages[path] = page.replace(": 4711", ": " + "9" * 5000).encode()
    shown = office.desk("settings", "pull").stdout

    assert tables(pi.db) == before
    assert "skipped: " in shown and "no phone number" in shown
    for name, row in sections(pi.db).items():
        said = skipped(pi.db, name)
        assert row["skipped"] == len(said) == len(expected[name])
        assert [each for each, text in zip(expected[name], said, strict=True)
                if each[1] not in text] == []  # fmt: skip
        assert any("dropped from it" in each["reason"] for each in row["remarks"])
    screen = office.desk("settings").stdout
    assert re.search(r"^number-groups +1 group, 2 numbers +14 ", screen, re.M)
    assert "'110'" in screen and "is longer than 100 characters" in screen
    running = pi.agent(FRONTEND_SYNC_INTERVAL_SEC=0.2)
    wait_pulls(pi.db, 3)
    assert not running.lines("skipped"), "said again although nothing changed"


REFERS = """
    CREATE TABLE routing_rules (
        id int PRIMARY KEY, ivr_flow_id uuid REFERENCES ivr_flows ON DELETE SET NULL);
    INSERT INTO routing_rules SELECT row_number() OVER (), id FROM ivr_flows
"""
SPOILT: dict[str, tuple[str, Any]] = {
    "an announcement that a flow plays": ("announcements", {"name": "x" * 101}),
    "an announcement without anything": ("announcements", {"ttsText": None}),
    "a group whose numbers are none": ("groups", {"phoneNumbers": "03-1234-5678"}),
    "a rule": ("rules", {"actionType": "maybe"}),
    "a flow's time": ("flows", {"timeoutSec": 2.5}),
    "a flow's routes": ("flows", {"routes": "none"}),
    "a flow's way out": ("flows", {"fallbackAction": {"actionCode": "much too long"}}),
}


@pytest.mark.parametrize("what", SPOILT)
def test_a_bad_item_never_costs_a_good_row(office: Office, what: str) -> None:
    db, (section, bad) = office.db, SPOILT[what]
    db.execute(REFERS)
    before = tables(db)
    items = getattr(office.wanted, section)
    items[0] |= bad
    for _ in range(2):
        outcomes = office.apply()
    assert tables(db) == before
    assert not db.rows("SELECT FROM routing_rules WHERE ivr_flow_id IS NULL")
    assert sum(outcome.skipped for outcome in outcomes.values()) == 1
    items.clear()  # what is not in the answer any more goes all the same
    office.apply()
    for name in office.held():
        assert db.execute(serversync.SETTINGS_ACCEPT, {"section": name})
    office()
    table = {"groups": "registered_numbers", "rules": "call_action_rules", "flows": "ivr_flows"}
    assert not tables(db)[table.get(section, section)]


def test_a_bad_route_leaves_the_stored_one_and_a_new_flow_has_a_way_out_all_the_same(
    office: Office,
) -> None:
    db, wanted = office.db, office.wanted
    before = places(db)
    routes = wanted.flows[0]["routes"]
    routes[0]["destination"]["actionCode"] = None
    wanted.flows.append(flow(route("1", None), fallbackAction={"actionCode": None}))
    office.apply()
    assert {row[1] for row in before - places(db)} <= {rule["id"] for rule in wanted.rules}
    made = db.dicts("SELECT * FROM ivr_nodes WHERE flow_id = %s", (wanted.flows[-1]["id"],))
    assert sorted((row["depth"], row["action_code"]) for row in made) == [
        (0, None), (1, None), (2, "VR"),
    ]  # fmt: skip
    routes[0]["destination"]["actionCode"] = "AA"
    del routes[1]
    office.apply()
    ways = "SELECT dtmf_key, action_code FROM ivr_transitions t JOIN ivr_nodes n"
    ways += " ON n.id = t.to_node_id WHERE n.flow_id = %s AND dtmf_key IS NOT NULL"
    assert db.rows(ways, (wanted.flows[0]["id"],)) == [("1", "AA")]


def test_what_leads_nowhere_stays_and_is_silent(office: Office) -> None:
    url, wanted = f"{AUDIO}a.wav", office.wanted
    office.frontend.pages[url] = NO_WAV
    sound = announcement("sound", audioFileUrl=url)
    wanted.announcements.append(sound)
    wanted.flows[0] |= {"announcementId": sound["id"]}
    wanted.flows[0]["fallbackAction"] = {"actionCode": "AN", "announcementId": sound["id"]}
    office.apply()
    before = tables(office.db)
    wanted.announcements.remove(sound)
    wanted.rules[0]["callerGroupId"] = gone = new_id()
    wanted.flows[1]["routes"] += [
        route("7", "IV", ivrFlowId=gone),
        route("8", "AN", announcementId="no-uuid"),
        route("9", "IV", ivrFlowId=wanted.flows[0]["id"]),
    ]
    office.apply()
    after = tables(office.db)

    assert gone in {row[2] for row in after["call_action_rules"]}
    assert after["ivr_flows"] == before["ivr_flows"]
    assert {row[0] for row in before["ivr_nodes"]} < {row[0] for row in after["ivr_nodes"]}
    assert len(after["ivr_transitions"]) == len(before["ivr_transitions"]) + 3
    sounds = [[row[5] for row in found["ivr_nodes"]].count(url) for found in (before, after)]
    assert sounds == [2, 0]
    remarks = sections(office.db)["ivr-flows"]["remarks"]
    assert not any(each["skipped"] for each in remarks)
    assert {each["reason"] for each in remarks} == {
        f"there is no announcement {each}: silence instead" for each in (sound["id"], "no-uuid")
    }


def test_what_comes_between_two_questions_takes_no_rule_out_and_makes_no_flow_silent(
    office: Office,
) -> None:
    wanted, paths = office.wanted, list[str]()
    new, sound = group("0312345670", name="new"), announcement("new")

    def hook(request: Request) -> None:
        """Before the second answer a rule gets a new group, before the last a flow its sound."""
        paths.append(request.path)
        if len(paths) == 2:
            wanted.groups.append(new)
            wanted.rules[0]["callerGroupId"] = new["id"]
        if len(paths) == len(SECTIONS):
            wanted.announcements.append(sound)
            wanted.flows[0]["announcementId"] = sound["id"]
        wanted.serve(office.frontend)

    office.frontend.on_head = hook
    outcomes = office()
    assert paths == [PATHS[name] for name in serversync.SOURCES]
    found = tables(office.db)
    groups = {None, *(row[1] for row in found["registered_numbers"])}
    assert {row[2] for row in found["call_action_rules"]} <= groups, "a rule of no numbers"
    assert len(found["call_action_rules"]) == 2 and not outcomes["call-actions"].remarks
    assert not outcomes["ivr-flows"].remarks
    assert not office()["ivr-flows"].remarks
    assert new["id"] in {row[2] for row in tables(office.db)["call_action_rules"]}


def test_a_key_that_stands_twice_stops_no_other_flow(office: Office) -> None:
    """Of two routes for one key the first good one counts."""
    same = ["1", "１", "1 ", "1\u3000"]
    menus = [flow(route("1", None), route("1", "AA"), route(key, "BB")) for key in same]
    office.wanted.flows += menus
    office.wanted.flows[0]["name"] = "another name"
    for _ in range(2):
        assert not any(outcome.error for outcome in office.apply().values())
        found = tables(office.db)
        assert "another name" in {row[1] for row in found["ivr_flows"]}
        for each in menus:
            codes = [row[4] for row in found["ivr_nodes"] if row[1] == each["id"]]
            assert sorted(filter(None, codes)) == ["AA", "VM"]
        said = skipped(office.db, "ivr-flows")
        twice = "key '1' has a route already: the first one counts"
        assert said == ["actionCode is missing", twice] * len(same)


@pytest.mark.parametrize("at", ["infinity", None])
def test_a_stored_time_that_is_none_stops_nothing(office: Office, at: str | None) -> None:
    db = office.db
    db.execute("ALTER TABLE announcements ALTER updated_at DROP NOT NULL")
    db.execute("UPDATE announcements SET audio_file_url = %s, updated_at = %s", (AUDIO + "a", at))
    office.wanted.announcements[0]["name"] = "x" * 101  # as it is stored
    office.wanted.flows[0]["name"] = "another name"
    assert not any(outcome.error for outcome in office.apply().values())
    assert "another name" in {row[1] for row in tables(db)["ivr_flows"]}


# -- unchanged means untouched --------------------------------------------------------------------


def test_what_did_not_change_is_not_touched(pi: Pi) -> None:
    example().serve(pi.frontend)
    running = pulling(pi)
    wait_pulls(pi.db)
    before = places(pi.db)  # the heartbeat, too
    wait_pulls(pi.db, 5)

    assert places(pi.db) == before
    assert len(running.lines("changed: ")) == 4
    assert not pi.db.rows("SELECT FROM sync_outbox"), "the agent adds no entries"


def test_a_pull_moves_the_heartbeat_when_it_is_due_and_touches_nothing_else(office: Office) -> None:
    db = office.db
    db.execute("UPDATE call_action_rules SET updated_at = '2026-01-01'")
    db.execute("UPDATE call_action_rules SET updated_at = '2036-01-01' WHERE priority = 1")
    before = places(db)
    office()
    moved = before ^ places(db)
    assert {place[0] for place in moved} == {"call_action_rules"} and len(moved) == 2
    age = "SELECT extract(epoch FROM now() - max(updated_at)) FROM "
    assert 0 <= db.value(f"{age} call_action_rules") < 60, "that in the future hides no silence"
    assert db.value("SELECT count(*) FROM call_action_rules WHERE updated_at = '2026-01-01'") == 1
    # Without rules it is that of system_settings.
    db.execute("DELETE FROM call_action_rules")
    db.execute("UPDATE system_settings SET updated_at = '2026-01-01'")
    office.wanted.rules.clear()
    office.apply()
    assert 0 <= db.value(f"{age} system_settings") < 60


def test_what_others_changed_is_put_back(office: Office) -> None:
    before = tables(office.db)
    for statement in (
        "UPDATE registered_numbers SET group_name = 'x' WHERE phone_number = '+81312345678'",
        "UPDATE registered_numbers SET deleted_at = now() WHERE phone_number = '+819012345678'",
        "UPDATE call_action_rules SET action_type = 'deny'",
        "DELETE FROM announcements WHERE name = 'closed'",
        "DELETE FROM ivr_nodes WHERE depth = 1",
        "UPDATE system_settings SET extra = '{}'",
    ):
        office.db.execute(statement)
    office()
    assert tables(office.db) == before


def test_a_change_of_one_route_leaves_all_other_rows_as_they_are(office: Office) -> None:
    routes = office.wanted.flows[0]["routes"]

    def rows() -> dict[str, tuple[str, ...]]:
        """Those of the flows, each with its place."""
        return {row[1]: row[2:] for row in places(office.db) if row[0].startswith("ivr_")}

    before = rows()
    routes[0]["destination"]["actionCode"] = "VR"
    office.apply()
    after = rows()
    assert set(after) == set(before)
    assert len([key for key in after if after[key] != before[key]]) == 1

    routes.reverse()  # their order means nothing
    routes.insert(0, route("3"))
    office.apply()
    later = rows()
    assert {key: later[key] for key in after} == after
    assert len(later) == len(after) + 2


# -- numbers --------------------------------------------------------------------------------------

LOCAL = """
    INSERT INTO registered_numbers (id, phone_number, name, created_at, updated_at)
    VALUES (gen_random_uuid(), '+81399999999', 'mine', now(), now()),
           (gen_random_uuid(), '+81312345678', 'both', now(), now())
"""


@pytest.mark.parametrize("mode", ["keep", "replace"])
def test_numbers_that_did_not_come_from_the_frontend_stay_or_go(pi: Pi, mode: str) -> None:
    pi.db.execute(LOCAL)
    example().serve(pi.frontend)
    Puller(pi)(SYNC_LOCAL_NUMBERS=mode)
    live = "SELECT phone_number, name FROM registered_numbers WHERE deleted_at IS NULL ORDER BY 1"
    kept = [("+81399999999", "mine")] if mode == "keep" else []
    assert pi.db.rows(live) == [("+81312345678", "both"), *kept, ("+819012345678", None)]


def test_a_number_that_leaves_its_groups_is_deleted_softly_and_comes_back_under_its_id(
    office: Office,
) -> None:
    db, numbers = office.db, office.wanted.groups[0]["phoneNumbers"]
    query = "SELECT id, deleted_at IS NULL FROM registered_numbers WHERE phone_number = %s"
    [(own, _)] = db.rows(query, ("+819012345678",))
    gone = numbers.pop()
    office.apply()
    assert db.rows(query, (gone,)) == [(own, False)]
    db.execute(
        "INSERT INTO registered_numbers (id, phone_number, deleted_at, created_at, updated_at)"
        " SELECT gen_random_uuid(), phone_number, '2026-01-01', now(), now()"
        " FROM registered_numbers WHERE id = %s",
        (own,),
    )
    numbers.append(gone)
    (change,) = office.apply()["number-groups"].changes
    assert change == ("registered_numbers", "revive", 1, [gone])
    assert (own, True) in db.rows(query, (gone,))


# -- a frontend that has lost its store -----------------------------------------------------------


def ten() -> Desired:
    return Desired([group(*(f"03-1234-567{n}" for n in range(10)))], [rule() for _ in range(10)])


TEN, NINE = {"rules": 10}, {"rules": 9}
HELD = [  # what is there and what came; how often, how long it was held, and of a lost store
    (TEN, {"rules": 5}, 0, 0, False, False),
    (TEN, {"rules": 4}, 0, 0, False, True),
    ({"rules": 1}, {"rules": 0}, 0, 0, False, True),
    ({"rules": 0}, {"rules": 0}, 0, 0, True, False),
    ({"groups": 3, "numbers": 9}, {"groups": 3, "numbers": 0}, 0, 0, False, True),
    (NINE, {"rules": 1}, 1, 900, False, True),
    (NINE, {"rules": 1}, 2, 530, False, True),
    (NINE, {"rules": 1}, 2, 550, False, False),
    (NINE, {"rules": 1}, 9, 9999, True, True),
    (NINE, {"rules": 5}, 9, 9999, True, False),
]


@pytest.mark.parametrize(("there", "now", "times", "seconds", "lost", "held"), HELD)
def test_less_than_half_is_held_three_times_and_ten_minutes_and_a_lost_store_for_ever(
    there: dict[str, int], now: dict[str, int], times: int, seconds: float, lost: bool, held: bool
) -> None:
    known = {"held": {"times": times, "seconds": seconds, "lost": False} if times else {}}
    section = serversync.Section("a section", counts=now, there=there, known=known)
    section.hold(60, lost)
    assert bool(section.held) is held


def held_for(db: Database, seconds: float) -> None:
    """What is held has been so for so long."""
    db.execute(
        "UPDATE serversync.settings SET held = held || %s WHERE held <> '{}'",
        (json.dumps({"times": 99, "seconds": seconds}),),
    )


def test_a_lost_store_does_not_wipe_the_backend(pi: Pi) -> None:
    desk, frontend, db = Desk(pi.agent), pi.frontend, pi.db
    wanted = example()
    wanted.serve(frontend)
    running = pulling(pi, 0.2)
    wait_pulls(db)
    before, there = tables(db), places(db)
    Desired().serve(frontend)  # ok: true, and nothing in it
    for name in SECTIONS:
        running.wait_log(f"settings: {name} held back: 0 ")
    wait_pulls(db, 5)
    running.wait_sentence("number-groups held back: 0 groups, 0 numbers came, 1 group, 2 numbers")

    assert tables(db) == before
    assert len(places(db) ^ there) <= 2, "no more than a heartbeat"
    assert [row["held"]["times"] > 3 for row in sections(db).values()] == [True] * 4
    assert len(running.lines("held back")) == 4, "said once"
    env: dict[str, Any] = {"RUNTIME_DIRECTORY": running.runtime_dir}
    env["FRONTEND_SYNC_INTERVAL_SEC"] = 1
    held = [status for text, status in doctor(desk).items() if "held back" in text]
    assert held == ["failed"] * 4
    assert 'serversync_settings_held{section="ivr-flows"} 1' in desk("metrics").stdout
    assert "accept ivr-flows" in desk("status", **env).stdout
    assert "held back" in desk("settings").stdout

    # All of it at once is no wish of anybody's: that waits for a person, however long.
    held_for(db, 99999)
    wait_pulls(db, 3)
    assert tables(db) == before

    # A restart forgets nothing; the time that counts is the agent's own.
    assert running.stop()[0] == 0
    db.execute("UPDATE serversync.settings SET held = held || '{\"lost\": false}'")
    held_for(db, 590)
    wanted.serve(frontend)  # all is there again, but for the rules
    frontend.pages[PATHS["call-actions"]] = {"ok": True, "rules": []}
    running = pi.agent(FRONTEND_SYNC_INTERVAL_SEC=0.2)
    running.wait_log("ivr-flows is no longer held back")
    wait_pulls(db)
    assert not running.lines("held back: "), "it was said before the restart"
    assert tables(db) == before
    held_for(db, 601)
    running.wait_log("call-actions is no longer held back")
    assert tables(db) == before | {"call_action_rules": []}


def doctor(desk: Desk, **settings: Any) -> dict[str, str]:
    """What doctor says of the settings, each with how bad it is."""
    settings = {"FRONTEND_SYNC_INTERVAL_SEC": 1} | settings
    checks = desk.json("doctor", code=None, **settings)["checks"]
    return {check["text"]: check["status"] for check in checks if check["name"] == "settings"}


def test_a_lost_store_changes_nothing_of_what_has_no_rows_to_compare(pi: Pi) -> None:
    """What is done with calls by default, and numbers that never had a group."""
    busy = {"actionType": "deny", "actionConfig": {"actionCode": "BZ"}}
    office = Office(
        pi, Desired(announcements=[announcement("one")], actions={"defaultAction": busy})
    )
    pi.db.execute(
        "INSERT INTO registered_numbers (id, phone_number, created_at, updated_at)"
        " VALUES (gen_random_uuid(), '+81312345678', now(), now())"
    )
    before = tables(pi.db)
    office.wanted = Desired()
    office.wanted.serve(office.frontend)
    for _ in range(2):
        outcomes = office(SYNC_LOCAL_NUMBERS="replace")
    assert tables(pi.db) == before
    assert [name for name, outcome in outcomes.items() if outcome.held] == ["announcements"]
    for name in ("number-groups", "call-actions", "ivr-flows"):
        assert outcomes[name].error == "it is empty, and waits with what is held back"
    assert "waits with what is held back" in office.desk("settings").stdout

    office.desk("settings", "accept", "announcements", SYNC_LOCAL_NUMBERS="replace")
    after = tables(pi.db)
    assert not after["announcements"] and not after["registered_numbers"]
    assert after["extra"] == [(serversync.ACTIONS,)]
    assert not any(outcome.error for outcome in office().values())


def test_a_lost_store_in_which_somebody_begins_anew_waits_for_a_person_too(
    office: Office,
) -> None:
    office.wanted.announcements.append(announcement("third"))
    office.apply()
    before = tables(office.db)
    office.wanted = Desired()
    for _ in range(3):
        assert office.held() == SECTIONS
    office.desk("settings", "accept", "call-actions", code=None)  # the others wait all the same
    assert not tables(office.db)["call_action_rules"]
    before = tables(office.db)
    held_for(office.db, 9999)
    office.wanted = Desired(announcements=[announcement("the first again")])
    assert office.held() == [name for name in SECTIONS if name != "call-actions"]
    assert tables(office.db) == before


def test_what_a_held_section_is_pointed_at_for_is_still_there(office: Office) -> None:
    before = tables(office.db)
    for name in ("number-groups", "announcements"):
        office.frontend.pages[PATHS[name]] = Desired().answers[name]
    office()
    assert tables(office.db) == before
    assert not any(skipped(office.db, name) for name in SECTIONS)


def test_an_operator_accepts_a_section_and_only_what_was_seen(pi: Pi) -> None:
    accept = ("settings", "accept", "call-actions")
    office = Office(pi, ten())

    def number() -> int:
        return len(tables(office.db)["call_action_rules"])

    assert "not held back" in office.desk(*accept, code=1).stderr
    nine, seen = office.wanted.rules[:9], office.wanted.rules[:3]
    for rules, held in ((seen, ["call-actions"]), (nine, []), (seen, ["call-actions"])):
        left = number()
        office.wanted.rules[:] = rules
        assert office.held() == held and number() == (left if held else 9)
        times = sections(pi.db)["call-actions"]["held"].get("times")
        assert times == (1 if held else None), "the count begins anew"
    office.wanted.rules.clear()
    office.wanted.serve(office.frontend)
    office.desk(*accept, code=1)  # it is not what was looked at
    assert number() == 9
    office.wanted.rules[:] = seen
    office.apply()
    assert number() == 3

    office.wanted.rules.clear()
    assert office.held() == ["call-actions"]
    assert "call_action_rules  delete" in office.desk(*accept).stdout
    assert number() == 0

    # Where nobody answers it is for the agent's next pull.
    office.wanted.groups[0]["phoneNumbers"].clear()
    assert office.held() == ["number-groups"]
    pi.frontend.stop()
    office.desk("settings", "accept", "number-groups", code=69)
    pi.frontend.start()
    pi.agent(FRONTEND_SYNC_INTERVAL_SEC=0.2).wait_log("number-groups changed")
    assert not tables(pi.db)["registered_numbers"]


def test_what_stays_of_bad_items_counts_and_does_not_hold_back_the_others(office: Office) -> None:
    db, wanted = office.db, office.wanted
    wanted.groups += [group(*(f"03-1234-56{n}" for n in range(10, 40)), name="large")]
    office.apply()
    wanted.groups[1]["name"] = "x" * 256
    wanted.groups[0]["phoneNumbers"].append("03-1234-5679")
    for _ in range(2):
        assert not office.held()
    assert len(tables(db)["registered_numbers"]) == 33
    assert sections(db)["number-groups"]["counts"] == {"groups": 2, "numbers": 33}
    for item in (*wanted.groups, *wanted.rules, *wanted.announcements, *wanted.flows):
        item["name"] = "x" * 256
    before = tables(db)
    assert not office.held() and tables(db) == before
    office.wanted = Desired()
    assert office.held() == SECTIONS and tables(db) == before


def test_a_first_pull_is_compared_with_what_is_in_the_tables(office: Office) -> None:
    before = tables(office.db)
    office.db.execute("DROP SCHEMA serversync CASCADE")
    make_schema(office.db)
    office.wanted = Desired()
    assert office.held() == SECTIONS and tables(office.db) == before


# -- faults ---------------------------------------------------------------------------------------

FAULTS: dict[str, Reply | Json | bytes] = {
    "ok: 1": {"ok": 1, "flows": []},
    "a list of another kind": {"ok": True, "flows": {}},
    "no object": b"[]",
    "not JSON": b'{"ok": true, "flows": [NaN]}',
    "too deep": b'{"ok": true, "flows": ' + b"[" * 90_000 + b"]" * 90_000 + b"}",
    "500 in good words": Reply(500, {}, {"ok": True, "flows": []}),
    "cut where it is whole": Reply(200, {}, '{"ok": true, "flows": []}' + " " * 40, half=True),
    "timeout": Reply(stall=30),
    "too long": b'{"ok": true, "flows": []}' + b" " * serversync.SETTINGS_MAX,
}


def test_a_fault_in_the_middle_leaves_the_last_good_settings(office: Office) -> None:
    office.db.execute("UPDATE call_action_rules SET updated_at = '2026-01-01'")  # one is due
    there = places(office.db)
    example().serve(office.frontend)
    for fault, answer in FAULTS.items():
        office.frontend.pages[PATHS["ivr-flows"]] = answer  # the third of the four
        with pytest.raises(serversync.NotNow):
            office(SYNC_TIMEOUT_SEC=1)
        assert places(office.db) == there, fault
    trickle = Reply(200, {}, {"ok": True, "flows": []}, trickle=0.3)  # only a deadline ends it
    office.frontend.pages[PATHS["ivr-flows"]] = trickle
    error = office.desk("settings", "pull", code=69, SYNC_TIMEOUT_SEC=1).stderr
    assert "no settings now, the last good ones stay" in error
    assert places(office.db) == there


def test_a_frontend_that_is_away_is_told_once_not_for_the_settings_too(pi: Pi) -> None:
    example().serve(pi.frontend)
    running = pi.idle(FRONTEND_SYNC_INTERVAL_SEC=0.1)
    pi.frontend.stop()
    running.wait_sentence("no settings since")
    pi.backend.enqueue()
    running.wait_sentence("nothing gets through since")
    wait_until(lambda: "no settings" not in running.state()["sentence"], what="one sentence")
    assert running.state()["settings"]["trouble"]["code"] == "NETWORK_ERROR"


def test_a_pull_that_fails_is_said_once_backs_off_and_is_no_outage_of_the_deliveries(
    pi: Pi,
) -> None:
    pi.frontend.pages[PATHS["announcements"]] = Reply(500)
    running = pi.agent(FRONTEND_SYNC_INTERVAL_SEC=0.1)
    running.wait_log("no settings now, the last good ones stay: ")
    running.wait_sentence("no settings since")
    pi.wait_entry(*(pi.backend.enqueue() for _ in range(3)))
    pi.wait_delivered()
    assert not pi.db.rows("SELECT FROM serversync.waiting")
    example().serve(pi.frontend)
    running.wait_log("settings: recovered after", 30)
    assert len(asked(pi.frontend, "number-groups")) < 10
    running.wait_log("ivr-flows changed")
    assert len(running.lines("no settings now")) == 1
    assert not running.lines("outage")
    running.wait_sentence("all delivered")


SLOW = {
    "hangs": Reply(stall=60),
    "trickles": Reply(200, {}, example().answers["ivr-flows"] | {"more": "x" * 2000}, trickle=0.02),
}


@pytest.mark.parametrize("page", SLOW)
def test_neither_calls_nor_recordings_nor_a_stop_wait_for_a_slow_page_of_the_settings(
    pi: Pi, page: str
) -> None:
    example().serve(pi.frontend)
    pi.frontend.pages[PATHS["ivr-flows"]] = SLOW[page]
    running = pi.agent(FRONTEND_SYNC_INTERVAL_SEC=0.1)
    pi.frontend.wait(lambda: asked(pi.frontend, "ivr-flows"), what="the question")
    pi.wait_file(pi.backend.end_call())
    assert not running.lines("no settings now"), "the question was over before"
    if page == "trickles":  # only the deadline of all of it ends that
        running.wait_log("no settings now", 60)
    code, seconds = running.stop()
    assert code == 0 and seconds < 10


def test_a_pause_that_the_deliveries_were_told_is_kept_by_the_settings(pi: Pi) -> None:
    Desired().serve(pi.frontend)
    pause = Reply(429, {"Retry-After": "3"})
    pi.frontend.on_entries = script(pause, pause)  # of the entry, and of the empty request
    pi.agent(FRONTEND_SYNC_INTERVAL_SEC=0.1)
    pi.frontend.wait(lambda: len(asked(pi.frontend)) > 8, what="two pulls")
    pi.wait_entry(pi.backend.enqueue())
    told = pi.frontend.of_kind("empty")[0].finished or 0.0
    accepted = pi.frontend.of_kind("entries")[-1].started
    assert accepted - told > 1.5
    # (What was asked while the answer was on its way is none.)
    assert not [r for r in asked(pi.frontend) if told + 0.2 < r.started < told + 1.5]
    pi.frontend.wait(lambda: asked(pi.frontend)[-1].started > accepted, what="a pull behind it")


def test_a_pause_that_the_settings_were_told_is_theirs_alone(pi: Pi) -> None:
    pi.frontend.pages[PATHS["call-actions"]] = Reply(429, {"Retry-After": "3"})
    running = pi.agent(FRONTEND_SYNC_INTERVAL_SEC=0.1)
    running.wait_log("no settings now")
    pi.wait_entry(pi.backend.enqueue())
    assert len(asked(pi.frontend)) == 1
    pi.frontend.wait(lambda: len(asked(pi.frontend)) > 1, what="the next pull")
    first, second = asked(pi.frontend)[:2]
    assert second.started - (first.finished or 0) >= 2.5


def test_settings_come_while_a_long_backlog_goes_out(pi: Pi) -> None:
    example().serve(pi.frontend)
    pi.backend.enqueue_many(400)
    pi.frontend.on_entries = lambda request: Reply(store=True, body={"ok": True}, delay=0.05)
    pi.agent(FRONTEND_SYNC_INTERVAL_SEC=0.2, SYNC_BATCH_SIZE=1)
    wait_until(lambda: pi.frontend.entries, what="the first entry")
    wait_until(lambda: tables(pi.db)["ivr_flows"], what="the settings")
    assert len(pi.db.pending()) > 100


def test_settings_come_while_a_recording_goes_out(pi: Pi) -> None:
    example().serve(pi.frontend)
    pi.frontend.read_rate = 200_000
    call = pi.backend.end_call(seconds=60)
    running = pi.agent(FRONTEND_SYNC_INTERVAL_SEC=1)
    wait_until(lambda: (running.state()["progress"] or {}).get("bytes"), what="the upload")
    seen = len(running.lines("ivr-flows changed"))
    example().serve(pi.frontend)
    wait_until(lambda: len(running.lines("ivr-flows changed")) > seen, what="the settings")
    assert call.call_log_id not in pi.frontend.files, "the upload was over before"
    pi.frontend.read_rate = None
    pi.wait_file(call)
    assert len(pi.frontend.of_kind("file")) == 1


def test_a_reload_leads_to_another_frontend_and_off(pi: Pi, tmp_path: Path) -> None:
    example().serve(pi.frontend)
    running = pulling(pi, 60)
    with Frontend(tmp_path / "other") as other:
        wanted = example()
        wanted.serve(other)
        settings = pi.agent.env(FRONTEND_SYNC_INTERVAL_SEC=60, FRONTEND_BASE_URL=other.url)
        running.reload(settings)
        wait_until(
            lambda: wanted.flows[0]["id"] in {row[0] for row in tables(pi.db)["ivr_flows"]},
            what="the other's settings",
        )
        running.reload(settings | {"FRONTEND_SYNC_INTERVAL_SEC": "0"})
        wait_until(lambda: len(running.lines("read again")) == 2, what="the reload")
        before = len(other.requests)
        example().serve(other)
        pi.db.execute("NOTIFY serversync")
        running.stop()
        assert len(other.requests) == before


# -- the database ---------------------------------------------------------------------------------

READ_FLOW = """
    SELECT (SELECT count(*) FROM ivr_nodes), (SELECT count(*) FROM ivr_transitions),
           (SELECT string_agg(name, ',') FROM ivr_flows)
"""


def test_a_reader_never_sees_a_flow_half_built(pi: Pi) -> None:
    own = new_id()
    small = Desired(flows=[flow(route("1"), id=own, name="small")])
    large = Desired(flows=[flow(*(route(str(n)) for n in range(60)), id=own, name="large")])
    expected = {(0, 0, None), (4, 3, "small"), (63, 62, "large")}
    seen: set[tuple[Any, ...]] = set()
    over = threading.Event()

    def look() -> None:
        with pi.db.connect() as connection:
            while not over.is_set():
                seen.update(connection.execute(READ_FLOW).fetchall())

    readers = [threading.Thread(target=look) for _ in range(2)]
    for reader in readers:
        reader.start()
    running = pi.agent(FRONTEND_SYNC_INTERVAL_SEC=0.1)
    for wanted in (small, large) * 4:
        wanted.serve(pi.frontend)
        name = wanted.flows[0]["name"]
        wait_until(lambda name=name: pi.db.rows(READ_FLOW)[0][2] == name, what=name)  # type: ignore[misc]
    over.set()
    for reader in readers:
        reader.join()
    assert {(4, 3, "small"), (63, 62, "large")} <= seen <= expected, running.log()


DAMAGE = {
    "ALTER TABLE ivr_nodes ADD CHECK (action_code IS DISTINCT FROM 'XX')": {"ivr-flows": "new row"},
    "ALTER TABLE registered_numbers DROP COLUMN group_id": {"number-groups": "column "},
    "ALTER TABLE announcements DROP COLUMN tts_text": {"announcements": "column "},
    "DROP TABLE announcements, system_settings": {
        "call-actions": 'relation "system_settings" does not exist',
        "announcements": 'relation "announcements" does not exist',
    },
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_section_that_the_database_refuses_stays_as_it_was_and_the_others_are_applied(
    pi: Pi, damage: str
) -> None:
    refused = {
        name: f"{name} cannot be applied: the database refuses it: {why}"
        for name, why in DAMAGE[damage].items()
    }
    pi.frontend.pages[f"{AUDIO}a.wav"] = NO_WAV
    wanted = example()
    wanted.announcements[0]["audioFileUrl"] = f"{AUDIO}a.wav"
    wanted.flows[1]["routes"][0]["destination"]["actionCode"] = "XX"
    wanted.serve(pi.frontend)
    pi.db.execute(damage)
    running = pi.agent(FRONTEND_SYNC_INTERVAL_SEC=0.2)
    for told in refused.values():
        running.wait_log(told)
    wait_pulls(pi.db)
    errors = {name: row["error"] for name, row in sections(pi.db).items()}
    assert [name for name, error in errors.items() if error] == list(refused), errors
    if "number-groups" not in refused:
        assert pi.db.value("SELECT count(*) FROM registered_numbers") == 2
    counts = "SELECT (SELECT count(*) FROM ivr_flows), count(*), count(audio_file_url)"
    flows = pi.db.rows(f"{counts} FROM ivr_nodes")
    # What flows play is known from the answer where it is not from the table.
    assert flows == [(0, 0, 0) if "ivr-flows" in refused else (2, 9, 2)]
    assert len(running.lines("cannot be applied")) == len(refused)
    said = doctor(Desk(pi.agent))
    assert all(any(text.startswith(told) for text in said) for told in refused.values()), said
    if "ivr-flows" in refused:
        pi.db.execute("ALTER TABLE ivr_nodes DROP CONSTRAINT ivr_nodes_action_code_check")
        running.wait_log("ivr-flows changed")
        wait_until(lambda: not sections(pi.db)["ivr-flows"]["error"], what="the end of it")


def test_a_backend_that_waits_for_us_while_we_wait_for_it_is_not_ended_as_a_deadlock(
    office: Office,
) -> None:
    """Nor do we wait for it: the other sections are applied, and this one with the next pull."""
    wanted = office.wanted
    wanted.rules[0]["name"] = wanted.announcements[0]["name"] = "another name"
    wanted.flows[0]["name"] = "another name"
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
    errors: list[str] = []
    with office.db.connect(autocommit=False) as backend:
        backend.execute("SELECT FROM announcements FOR UPDATE")
        puller = threading.Thread(
            target=lambda: errors.append(office.apply()["announcements"].error)
        )
        puller.start()
        wait_until(lambda: office.db.value(waiting), what="the pull's wait")
        backend.execute("UPDATE call_action_rules SET is_active = is_active")
        backend.commit()
    puller.join()
    assert errors[0].startswith("the database refuses it: canceling statement due to lock timeout")
    assert "another name" in {row[1] for row in tables(office.db)["ivr_flows"]}
    office()
    assert "another name" in {row[1] for row in tables(office.db)["announcements"]}


def test_many_numbers_are_one_short_statement_in_bounded_memory(pi: Pi) -> None:
    numbers = [f"+8190{n:08}" for n in range(60_000)]
    Desired([group(*numbers[:30_000]), group(*numbers[30_000:])]).serve(pi.frontend)
    running = pi.agent(FRONTEND_SYNC_INTERVAL_SEC=1)
    running.wait_log("number-groups changed", 60)
    assert pi.db.value("SELECT count(*) FROM registered_numbers") == 60_000
    assert running.rss_peak_kib() < 110 * 1024


# -- commands -------------------------------------------------------------------------------------


def test_a_dry_run_shows_the_difference_and_writes_nothing(office: Office) -> None:
    desk, db, wanted = office.desk, office.db, office.wanted
    dry_run = ("settings", "pull", "--dry-run")
    state = "SELECT ctid, xmin, section FROM serversync.settings ORDER BY 3"
    before, known = places(db), db.rows(state)
    assert desk(*dry_run).stdout == "nothing would change\n"
    gone = wanted.groups[0]["phoneNumbers"].pop()
    wanted.rules[0]["name"] = "buddies"
    wanted.flows[0]["routes"].append(route("9"))
    wanted.serve(office.frontend)
    shown = desk(*dry_run).stdout.splitlines()

    assert [line.split()[:4] for line in shown if line][1:5] == [
        ["number-groups", "registered_numbers", "delete", gone],
        ["call-actions", "call_action_rules", "update", "buddies"],
        ["ivr-flows", "ivr_nodes", "insert", "EXIT"],
        ["ivr-flows", "ivr_transitions", "insert", "DTMF"],
    ]
    as_json = desk.json(*dry_run)
    assert as_json["dry_run"] and as_json["sections"][0]["changes"] == [
        {"table": "registered_numbers", "action": "delete", "count": 1, "items": [gone]}
    ]
    assert places(db) == before and db.rows(state) == known


def test_as_json_a_pull_is_one_text_with_the_audio_that_is_missing_in_it(pi: Pi) -> None:
    gone = announcement("gone", audioFileUrl=f"{AUDIO}gone.wav")
    office = Office(pi, Desired(announcements=[gone]))
    told = office.desk.json("settings", "pull")
    assert list(told["audio"]["problems"]) == ["gone.wav"]
    office.db.execute("UPDATE serversync.audio_files SET next_attempt_at = now()")
    lines = office.desk("settings", "pull").stdout.splitlines()
    assert lines[-1].startswith("gone.wav: the frontend does not have it yet")


def test_settings_without_a_schema_or_a_frontend_say_so(pi: Pi) -> None:
    desk = Desk(pi.agent)
    pi.frontend.stop()
    assert "the schema serversync is not there" in desk("settings", code=69).stderr
    desk("once")
    assert "never" in desk("settings").stdout
    assert "cannot be reached" in desk("settings", "pull", code=69).stderr
    parser = serversync.build_parser()
    with pytest.raises(SystemExit):
        parser.parse_args(["settings", "accept", "everything"])


def test_metrics_status_and_doctor_tell_of_the_settings(pi: Pi) -> None:
    desk = Desk(pi.agent)
    desk("once")
    assert "serversync_settings" not in desk("metrics").stdout
    wanted = example()
    wanted.groups[0]["phoneNumbers"].append("110")
    wanted.serve(pi.frontend)
    running = pulling(pi, 0.5)
    env: dict[str, Any] = {"RUNTIME_DIRECTORY": running.runtime_dir}
    env["FRONTEND_SYNC_INTERVAL_SEC"] = 0.5
    running.wait_sentence("all delivered")

    text = desk("metrics", **env).stdout
    for line in (
        'serversync_settings_items{kind="numbers"} 2',
        'serversync_settings_items{kind="flows"} 2',
        'serversync_settings_skipped{section="number-groups"} 1',
        'serversync_settings_held{section="number-groups"} 0',
        'serversync_settings_refused{section="ivr-flows"} 0',
        "serversync_settings_audio_waiting 0",
        "serversync_settings_failing 0",
    ):
        assert line in text.splitlines()
    (last,) = re.findall(r"^serversync_settings_last_pull_timestamp_seconds (.*)$", text, re.M)
    assert abs(time.time() - float(last)) < 300
    assert "1 group, 2 numbers, 2 rules" in desk("status", **env).stdout
    view = desk.json("status", **env)["settings"]
    assert (view["interval"], view["trouble"], len(view["sections"])) == (0.5, None, 4)
    pi.frontend.pages[PATHS["call-actions"]] = Reply(401)
    running.wait_log("no settings now")
    running.wait_sentence("no settings since")
    assert "serversync_settings_failing 1" in desk("metrics", **env).stdout
    assert "the frontend does not accept our credentials" in desk("status", **env).stdout
    texts = doctor(desk, **env)
    assert any("1 item skipped: 1. 'friends': '110'" in text for text in texts), texts
    assert any("none since" in text for text in texts)


def test_ids_are_functions_of_flow_role_and_key() -> None:
    own = uuid.UUID(int=7)
    section = serversync.read_flows({"flows": [flow(route("1"), id=str(own))]})
    serversync.fill_flows(section, {})
    for table, roles in (
        ("ivr_nodes", ("announce", "keypad", "exit 1", "fallback")),
        ("ivr_transitions", ("DTMF 1", "TIMEOUT", "INVALID")),
    ):
        made = {str(uuid.uuid5(own, role)) for role in roles}
        assert {row["id"] for row in section.tables[table]} == made

"""The settings pull: what people change in the frontend reaches the backend's tables."""

import json
import re
import threading
import time
import uuid
from itertools import pairwise
from typing import Any

import psycopg
import pytest

import serversync
from agent import AgentFactory
from backend import Backend
from desk import Desk
from frontend import Frontend, Json, Reply, script
from pg import Database
from settings import (
    BUSY,
    PATHS,
    SECTIONS,
    VOICE,
    Desired,
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
    with_etags,
)
from waiting import wait_until


@pytest.fixture
def pull(db: Database, frontend: Frontend, backend: Backend) -> Puller:
    return Puller(db, frontend, backend)


@pytest.fixture
def desk(pull: Puller, agent: AgentFactory) -> Desk:
    return Desk(agent)


def wait_pulls(db: Database, more: int = 2) -> None:
    """Until so many pulls more were finished: the last of them began after this call."""

    def pulls() -> int:
        try:
            return int(min(row["pulls"] for row in sections(db).values()))
        except psycopg.errors.UndefinedTable:
            raise LookupError from None

    first = wait_until(lambda: pulls() + 1, what="the schema") - 1
    wait_until(lambda: pulls() >= first + more, what=f"{more} pulls")


# -- where it goes --------------------------------------------------------------------------------


def test_what_people_change_reaches_the_tables_within_the_interval(
    agent: AgentFactory, frontend: Frontend, db: Database
) -> None:
    wanted = example()
    wanted.serve(frontend)
    agent(FRONTEND_SYNC_INTERVAL_SEC=0.3).wait_log("ivr-flows changed")
    first, second = wanted.flows
    (friends,), (one, two), (greeting, closed) = wanted.groups, wanted.rules, wanted.announcements
    found = tables(db)

    assert found["registered_numbers"] == [
        ("+81312345678", friends["id"], "friends"),
        ("+819012345678", friends["id"], "friends"),
    ]
    assert sorted(found["call_action_rules"], key=lambda row: row[5]) == [
        (one["id"], "friends", friends["id"], "allow", VOICE, 0, True),
        (two["id"], "all", None, "deny", VOICE, 1, True),
    ]
    assert sorted(row[1:] for row in found["announcements"]) == [
        ("closed", None, "closed", True, None, "Hello.", 3, "ja"),
        ("greeting", None, "greeting", True, None, "Hello.", 3, "ja"),
    ]
    assert {row[0] for row in found["announcements"]} == {greeting["id"], closed["id"]}
    assert {row[0] for row in found["ivr_flows"]} == {first["id"], second["id"]}
    assert found["extra"][0][0] == {
        "anonymousAction": {"actionType": "deny", "actionConfig": BUSY},
        "defaultAction": {"actionType": "allow", "actionConfig": VOICE},
    }
    times = "SELECT updated_at FROM announcements WHERE updated_at <> '2026-11-18 09:00:00+00'"
    assert not db.rows(times)

    wanted.rules.reverse()
    wanted.groups[0]["phoneNumbers"].append("03(1234)5679")
    wanted.serve(frontend)
    wait_until(lambda: len(tables(db)["registered_numbers"]) == 3, what="the new number")
    assert sorted((row[5], row[0]) for row in tables(db)["call_action_rules"]) == [
        (0, two["id"]),
        (1, one["id"]),
    ]


def test_a_flow_becomes_an_announce_root_a_keypad_and_an_exit_for_each_route(
    pull: Puller, frontend: Frontend, db: Database
) -> None:
    sound = announcement("sound", audioFileUrl="/audio/announcements/a.wav", ttsText=None)
    spoken = announcement("spoken", ttsText="Good day.")
    inner = flow(name="inner", announcementId=spoken["id"], fallbackAction=None)
    outer = flow(
        route("1", "AN", announcementId=sound["id"]),
        route("2", "VB", welcomeAnnouncementId=sound["id"], scenarioId="s1"),
        route("#", "IV", ivrFlowId=inner["id"].upper(), includeAnnouncement=False),
        route("4", "VR", announcementId=sound["id"], recordingEnabled=True),
        announcementId=sound["id"],
        timeoutSec=0,
        maxRetries=-1,
        fallbackAction={"actionCode": "VM", "announcementId": sound["id"]},
    )
    frontend.pages["/audio/announcements/a.wav"] = b"no WAV: that is another test's"
    Desired(announcements=[sound, spoken], flows=[outer, inner]).serve(frontend)
    pull()

    nodes = {row["id"]: row for row in db.dicts("SELECT * FROM ivr_nodes")}
    of_outer = [row for row in nodes.values() if str(row["flow_id"]) == outer["id"]]
    (root,) = [row for row in of_outer if row["depth"] == 0]
    (keypad,) = [row for row in of_outer if row["depth"] == 1]
    url = sound["audioFileUrl"]
    assert (root["node_type"], root["audio_file_url"], root["parent_id"]) == ("ANNOUNCE", url, None)
    assert (keypad["node_type"], keypad["parent_id"]) == ("KEYPAD", root["id"])
    assert (keypad["timeout_sec"], keypad["max_retries"]) == (10, 2)
    exits = {
        (way["input_type"], way["dtmf_key"]): nodes[way["to_node_id"]]
        for way in db.dicts("SELECT * FROM ivr_transitions")
        if way["from_node_id"] == keypad["id"]
    }
    assert {
        key: (node["action_code"], node["audio_file_url"], node["tts_text"])
        for key, node in exits.items()
    } == {
        ("DTMF", "1"): ("AN", url, None),
        ("DTMF", "2"): ("VB", url, '{"scenarioId":"s1"}'),
        ("DTMF", "#"): ("IV", None, f'{{"ivrFlowId":"{inner["id"]}","includeAnnouncement":false}}'),
        ("DTMF", "4"): ("VR", None, '{"recordingEnabled":true}'),
        ("TIMEOUT", None): ("VM", url, None),
        ("INVALID", None): ("VM", url, None),
    }
    assert exits["TIMEOUT", None]["id"] == exits["INVALID", None]["id"]
    for node in exits.values():
        assert (node["node_type"], node["depth"]) == ("EXIT", 2)
        assert (node["parent_id"], node["exit_action"]) == (keypad["id"], "IE")
    (quiet,) = [row for row in nodes.values() if row["depth"] == 0 and row not in of_outer]
    assert (quiet["audio_file_url"], quiet["tts_text"]) == (None, "Good day.")
    assert len(nodes) == 7 + 2


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (2.5, 3),
        (-2.5, -3),
        (2.4999, 2),
        (0.49999999999999994, 0),
        (7, 7),
        (None, None),
    ],
)
def test_a_duration_is_rounded_half_away_from_zero(given: float | None, kept: int | None) -> None:
    section = serversync.read_announcements({"announcements": [announcement(durationSec=given)]})
    assert [row["duration_sec"] for row in section.tables["announcements"]] == [kept]


def test_numbers_are_normalised_and_belong_to_their_last_group(
    pull: Puller, frontend: Frontend, db: Database
) -> None:
    first = group("03-1234-5678", "０９０（１２３４）５６７８", "+1 (212) 555 0100", name="first")
    second = group("+81 3 1234 5678", "0312345678", name="second")
    Desired([first, second]).serve(frontend)
    pull()

    assert tables(db)["registered_numbers"] == [
        ("+12125550100", first["id"], "first"),
        ("+81312345678", second["id"], "second"),
        ("+819012345678", first["id"], "first"),
    ]
    (mended,) = sections(db)["number-groups"]["remarks"]
    assert not mended["skipped"] and "full-width" in mended["reason"]
    defaults = "SELECT DISTINCT category, action_code, version FROM registered_numbers"
    assert db.rows(defaults) == [("general", "VR", 1)]


# -- bad items ------------------------------------------------------------------------------------

A_FLOW = flow(name="f")
GROUPS = [
    ("110", "no phone number"),
    ("notanumber", "no phone number"),
    ("+0123456789", "no phone number"),
    ("+81312345678901234", "no phone number"),
    ("", "no phone number"),
    (17, "not text"),
    (None, "not text"),
]
ITEMS: list[tuple[str, Any, str]] = [
    ("number-groups", None, "not an object"),
    ("number-groups", group(id="grp-1"), "id is no UUID"),
    ("number-groups", {"id": new_id(), "phoneNumbers": []}, "name is missing"),
    ("number-groups", group(name="x" * 256), "longer than 255"),
    ("number-groups", group() | {"phoneNumbers": None}, "phoneNumbers is not a list"),
    ("call-actions", [], "not an object"),
    ("call-actions", rule(id=17), "id is no UUID"),
    ("call-actions", rule("x" * 256), "longer than 255"),
    ("call-actions", rule(name=None), "name is missing"),
    ("call-actions", rule(callerGroupId=new_id()), "there is no number group"),
    ("call-actions", rule(callerGroupId="all"), "callerGroupId is no UUID"),
    ("call-actions", rule(actionType="maybe"), "neither allow nor deny"),
    ("call-actions", rule(actionConfig=None), "actionConfig is missing"),
    ("call-actions", rule(actionConfig=["VR"]), "actionConfig is not an object"),
    ("call-actions", rule(actionConfig={"a": [1e999]}), "too large"),
    ("call-actions", rule(isActive="yes"), "neither true nor false"),
    ("announcements", announcement(name="x" * 101), "longer than 100"),
    ("announcements", announcement(id="new"), "id is no UUID"),
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
        for url in (
            "/audio/announcements/../x.wav",
            "/audio/announcements/..",
            "/audio/announcements/",
            "/audio/announcements/a/b.wav",
            "/audio/announcements/a%2fb.wav",
            "/audio/announcements/a\\b.wav",
            "/audio/announcements/a.wav?v=2",
            "/audio/announcements/.serversync-x",
            "/audio/announcements/a\nb.wav",
            f"/audio/announcements/{'ö' * 128}",
            "http://elsewhere.example/a.wav",
            "/etc/passwd",
        )
    ),
    ("ivr-flows", flow(id="flow-1"), "id is no UUID"),
    ("ivr-flows", flow(name="x" * 101), "longer than 100"),
    ("ivr-flows", flow(timeoutSec=7.5), "not a whole number"),
    ("ivr-flows", flow(maxRetries=0.5), "not a whole number"),
    ("ivr-flows", flow(timeoutSec=1 << 31), "no number that fits"),
    ("ivr-flows", flow(timeoutSec="7"), "no number"),
    ("ivr-flows", flow(announcementId=new_id()), "there is no announcement"),
    ("ivr-flows", flow(routes={}), "routes is not a list"),
]
ROUTES: list[tuple[Any, str]] = [
    (None, "not an object"),
    (route("1") | {"destination": None}, "not an object"),
    (route("1", None), "actionCode is missing"),
    (route("1", "VRX"), "longer than 2"),
    (route("1", ""), "actionCode is empty"),
    (route(None), "dtmfKey is missing"),
    (route(1), "dtmfKey is not text"),
    (route("123456"), "1 to 5 characters"),
    (route(""), "1 to 5 characters"),
    (route("1", "AN", announcementId=new_id()), "there is no announcement"),
    (route("1", "VB", welcomeAnnouncementId="x"), "is no UUID"),
    (route("1", "IV", ivrFlowId=new_id()), "there is no flow"),
    (route("1", "IV", ivrFlowId="flow-2"), "is no UUID"),
    (route("1", recordingEnabled="yes"), "neither true nor false"),
    (route("1", scenarioId=[]), "scenarioId is not text"),
]
READERS: dict[str, Any] = {
    "number-groups": lambda said: serversync.read_groups(said)[0],
    "call-actions": lambda said: serversync.read_rules(said, set()),
    "announcements": serversync.read_announcements,
    "ivr-flows": lambda said: serversync.read_flows(said, {}),
}
GOOD: dict[str, Any] = {
    "number-groups": group("0312345678"),
    "call-actions": rule(),
    "announcements": announcement(),
    "ivr-flows": flow(route("1")),
}


def read(name: str, *items: Any) -> Any:
    return READERS[name]({serversync.SOURCES[name][1]: list(items)})


def reasons(section: Any) -> list[str]:
    return [remark.reason for remark in section.remarks if remark.skipped]


@pytest.mark.parametrize(("name", "item", "reason"), ITEMS)
def test_a_bad_item_is_skipped_with_its_reason_and_the_others_stay(
    name: str, item: Any, reason: str
) -> None:
    good, other = GOOD[name], dict(GOOD[name], id=new_id())
    section = read(name, good, item, other)

    (said,) = reasons(section)
    assert reason in said
    alone = read(name, good, other)
    if name == "call-actions":  # a rule's place in the list is its priority
        assert [row.pop("priority") for row in section.tables["call_action_rules"]] == [0, 2]
        assert [row.pop("priority") for row in alone.tables["call_action_rules"]] == [0, 1]
    assert section.tables == alone.tables and section.counts == alone.counts


@pytest.mark.parametrize(("number", "reason"), GROUPS)
def test_a_bad_number_is_skipped_and_its_group_stays(number: object, reason: str) -> None:
    section = read("number-groups", group("0312345678", number, "0312345679", name="a group"))
    assert section.counts == {"groups": 1, "numbers": 2}
    (remark,) = section.remarks
    assert reason in remark.reason and "a group" in remark.item


@pytest.mark.parametrize(("bad", "reason"), ROUTES)
def test_a_bad_route_is_skipped_and_its_flow_stays(bad: Any, reason: str) -> None:
    good = [route("8"), route("9")]
    section = read("ivr-flows", flow(good[0], bad, good[1], id=A_FLOW["id"]))
    (said,) = reasons(section)
    assert reason in said
    assert (
        section.tables["ivr_nodes"]
        == read("ivr-flows", flow(*good, id=A_FLOW["id"])).tables["ivr_nodes"]
    )


@pytest.mark.parametrize("name", SECTIONS)
def test_of_two_items_with_one_id_the_first_counts(name: str) -> None:
    good, second = GOOD[name], dict(GOOD[name], name="second", id=GOOD[name]["id"].upper())
    section = read(name, good, second)
    (said,) = reasons(section)
    assert "id is that of an earlier" in said
    assert section.tables == read(name, good).tables


def test_of_two_routes_for_one_key_the_first_good_one_counts() -> None:
    broken, first, second = (
        route("1", "IV", ivrFlowId=new_id()),
        route("1", "AA"),
        route("１", "BB"),
    )
    section = read("ivr-flows", flow(broken, first, second, fallbackAction=None))
    codes = [row["action_code"] for row in section.tables["ivr_nodes"] if row["depth"] == 2]
    assert codes == ["AA"]
    assert [("no flow" in said, "already" in said) for said in reasons(section)] == [
        (True, False),
        (False, True),
    ]


def test_the_route_that_closes_a_cycle_of_flows_is_skipped() -> None:
    a, b, c = new_id(), new_id(), new_id()

    def leads_to(own: str, *others: str) -> Json:
        ways = [route(str(n), "IV", ivrFlowId=other) for n, other in enumerate(others)]
        return flow(*ways, id=own, name=own[:4])

    section = read("ivr-flows", leads_to(a, b, c), leads_to(b, c), leads_to(c, a, c))
    assert section.counts == {"flows": 3}
    assert [remark.reason.partition(":")[0] for remark in section.remarks] == ["it leads back"] * 2
    assert all(c[:4] in remark.item for remark in section.remarks)
    assert sum(row["depth"] == 2 for row in section.tables["ivr_nodes"]) == 3 + 3  # and fallbacks


def test_a_long_chain_of_flows_is_no_cycle_and_no_recursion() -> None:
    ids = [new_id() for _ in range(3000)]
    chain = [flow(route("1", "IV", ivrFlowId=after), id=own) for own, after in pairwise(ids)]
    section = read("ivr-flows", *chain, flow(id=ids[-1]))
    assert not section.remarks and section.counts == {"flows": 3000}


def test_a_bad_action_stays_as_it_was(pull: Puller, frontend: Frontend, db: Database) -> None:
    mine = {"actionType": "allow", "actionConfig": {"actionCode": "AN"}}
    db.execute('UPDATE system_settings SET extra = \'{"other": {"a": [1, 2]}}\'')
    Desired(actions={"anonymousAction": mine}).serve(frontend)
    pull()
    bad = {"actionType": "allow", "actionConfig": "AN"}
    Desired(actions={"anonymousAction": bad, "defaultAction": mine}).serve(frontend)
    pull()

    (extra,) = tables(db)["extra"][0]
    assert extra == {"other": {"a": [1, 2]}, "anonymousAction": mine, "defaultAction": mine}
    assert skipped(db, "call-actions") == ["actionConfig is not an object"]


def test_all_kinds_of_bad_items_at_once_leave_the_good_ones_in_the_tables(
    pull: Puller, desk: Desk, agent: AgentFactory, frontend: Frontend, db: Database
) -> None:
    wanted = example()
    wanted.serve(frontend)
    pull()
    before = tables(db)
    lists = (wanted.groups, wanted.rules, wanted.announcements, wanted.flows)
    for name, item, _ in ITEMS:
        lists[SECTIONS.index(name)].append(item)
    wanted.groups[0]["phoneNumbers"] += [number for number, _ in GROUPS]
    wanted.flows[0]["routes"] += [item for item, _ in ROUTES]
    wanted.serve(frontend)
    for path in PATHS.values():  # what Python's json writes and nobody should
        frontend.pages[path] = (
            json.dumps(frontend.pages[path]).replace("Infinity", "1e999").encode()
        )
    shown = desk("settings", "pull").stdout
    after = tables(db)

    assert after == before
    assert "skipped: " in shown and "no phone number" in shown
    counted = {name: row["skipped"] for name, row in sections(db).items()}
    expected = {name: sum(each == name for each, _, _ in ITEMS) for name in SECTIONS}
    expected["number-groups"] += len(GROUPS)
    expected["ivr-flows"] += len(ROUTES)
    assert counted == expected
    screen = desk("settings").stdout
    assert re.search(r"^number-groups +1 group, 2 numbers +12 ", screen, re.M)
    assert "'110'" in screen and "there is no announcement" in screen
    running = agent(FRONTEND_SYNC_INTERVAL_SEC=0.2)
    wait_pulls(db, 3)
    assert not running.lines("skipped"), "said again although nothing changed"


def test_nul_characters_and_half_surrogates_are_dropped_and_said(
    pull: Puller, frontend: Frontend, db: Database
) -> None:
    nasty = "a\0b\ud800c😀"
    wanted = example()
    wanted.groups[0]["name"] = wanted.rules[0]["name"] = nasty
    wanted.rules[0]["actionConfig"] = {nasty: [nasty]}
    wanted.announcements[0] |= {"name": nasty, "ttsText": nasty}
    wanted.flows[0] |= {"name": nasty}
    wanted.flows[0]["routes"][0]["destination"]["scenarioId"] = nasty
    wanted.serve(frontend)
    pull()
    found = tables(db)

    clean = "abc😀"
    assert {row[2] for row in found["registered_numbers"]} == {clean}
    assert clean in {row[1] for row in found["call_action_rules"]}
    assert {clean: [clean]} in [row[4] for row in found["call_action_rules"]]
    assert clean in {row[1] for row in found["announcements"]}
    assert clean in {row[6] for row in found["announcements"]}
    assert any(clean in (row[6] or "") for row in found["ivr_nodes"])
    for row in sections(db).values():
        assert any("dropped from it" in each["reason"] for each in row["remarks"])
        assert row["skipped"] == 0


# -- unchanged means untouched --------------------------------------------------------------------


def heartbeat(db: Database) -> Any:
    return db.value("SELECT max(updated_at) FROM call_action_rules")


@pytest.mark.parametrize("etags", [False, True], ids=["without ETag", "with ETag"])
def test_what_did_not_change_is_not_touched(
    agent: AgentFactory, frontend: Frontend, db: Database, etags: bool
) -> None:
    frontend.on_head = with_etags(frontend) if etags else None
    example().serve(frontend)
    running = agent(FRONTEND_SYNC_INTERVAL_SEC=0.1)
    running.wait_log("ivr-flows changed")
    wait_pulls(db)
    before, times = places(db), heartbeat(db)
    wait_pulls(db, 5)

    assert places(db) == before and heartbeat(db) == times
    statuses = [request.status for request in asked(frontend)[8:]]
    assert set(statuses) <= ({304, 0} if etags else {200, 0})
    assert len(running.lines("changed: ")) == 4
    assert not db.rows("SELECT FROM sync_outbox"), "the agent adds no entries"


def test_with_etags_a_change_of_one_section_is_applied_with_all(
    agent: AgentFactory, frontend: Frontend, db: Database
) -> None:
    frontend.on_head = with_etags(frontend)
    wanted = example()
    wanted.serve(frontend)
    running = agent(FRONTEND_SYNC_INTERVAL_SEC=0.1)
    running.wait_log("ivr-flows changed")
    wait_until(lambda: any(request.status == 304 for request in asked(frontend)), what="304")
    wanted.flows[0]["name"] = "another name"
    wanted.serve(frontend)
    wait_until(lambda: len(running.lines("ivr-flows changed")) == 2, what="the change")
    assert running.lines("ivr-flows changed")[1].endswith("ivr_flows: 1 changed")


def test_a_full_pull_compares_all_moves_the_heartbeat_and_touches_nothing_else(
    pull: Puller, frontend: Frontend, db: Database
) -> None:
    example().serve(frontend)
    pull()
    db.execute("UPDATE call_action_rules SET updated_at = '2026-01-01'")
    db.execute("UPDATE call_action_rules SET updated_at = '2036-01-01' WHERE priority = 1")
    before = places(db)
    pull()
    moved = before ^ places(db)

    assert {place[0] for place in moved} == {"call_action_rules"} and len(moved) == 2
    age = "SELECT extract(epoch FROM now() - max(updated_at)) FROM call_action_rules"
    assert 0 <= db.value(age) < 60, "a time in the future would hide that no pull comes"
    assert db.value("SELECT count(*) FROM call_action_rules WHERE updated_at = '2026-01-01'") == 1


def test_without_rules_the_heartbeat_is_that_of_system_settings(
    pull: Puller, frontend: Frontend, db: Database
) -> None:
    Desired().serve(frontend)
    pull()
    db.execute("UPDATE system_settings SET updated_at = '2026-01-01'")
    pull()
    assert db.value("SELECT now() - updated_at < interval '1 minute' FROM system_settings")


def test_the_agent_moves_the_heartbeat_when_it_is_due_and_not_when_the_pull_fails(
    agent: AgentFactory, frontend: Frontend, db: Database
) -> None:
    example().serve(frontend)
    running = agent(FRONTEND_SYNC_INTERVAL_SEC=0.1)
    running.wait_log("ivr-flows changed")
    assert running.stop()[0] == 0
    db.execute("UPDATE call_action_rules SET updated_at = '2026-01-01'")
    good = frontend.pages.pop(PATHS["ivr-flows"])
    running = agent(FRONTEND_SYNC_INTERVAL_SEC=0.1)
    running.wait_log("no settings now")
    assert db.value("SELECT max(updated_at) = '2026-01-01' FROM call_action_rules")
    frontend.pages[PATHS["ivr-flows"]] = good
    running.hup()
    wait_until(
        lambda: db.value("SELECT max(updated_at) > '2026-01-02' FROM call_action_rules"),
        what="the heartbeat",
    )
    assert serversync.WHOLE_SEC < 300, "every five minutes, with the default interval"


def test_what_others_changed_is_put_back(pull: Puller, frontend: Frontend, db: Database) -> None:
    example().serve(frontend)
    pull()
    before = tables(db)
    for statement in (
        "UPDATE registered_numbers SET group_name = 'x' WHERE phone_number = '+81312345678'",
        "UPDATE registered_numbers SET deleted_at = now() WHERE phone_number = '+819012345678'",
        "UPDATE call_action_rules SET action_type = 'deny'",
        "DELETE FROM announcements WHERE name = 'closed'",
        "DELETE FROM ivr_nodes WHERE depth = 1",
        "UPDATE system_settings SET extra = '{}'",
    ):
        db.execute(statement)
    pull()
    assert tables(db) == before


def test_a_change_of_one_route_leaves_all_other_rows_as_they_are(
    pull: Puller, frontend: Frontend, db: Database
) -> None:
    wanted = example()
    wanted.serve(frontend)
    pull()
    nodes = "SELECT id, ctid, xmin FROM ivr_nodes UNION ALL SELECT id, ctid, xmin FROM ivr_flows"
    nodes += " UNION ALL SELECT id, ctid, xmin FROM ivr_transitions"
    before = {row[0]: row[1:] for row in db.rows(nodes)}
    wanted.flows[0]["routes"][0]["destination"]["actionCode"] = "VR"
    wanted.serve(frontend)
    pull()
    after = {row[0]: row[1:] for row in db.rows(nodes)}
    assert set(after) == set(before)
    assert len([key for key in after if after[key] != before[key]]) == 1

    wanted.flows[0]["routes"].reverse()  # their order means nothing
    wanted.flows[0]["routes"].insert(0, route("3"))
    wanted.serve(frontend)
    pull()
    later = {row[0]: row[1:] for row in db.rows(nodes)}
    assert {key: later[key] for key in after} == after
    assert len(later) == len(after) + 2


# -- numbers --------------------------------------------------------------------------------------

LOCAL = """
    INSERT INTO registered_numbers (id, phone_number, name, created_at, updated_at)
    VALUES (gen_random_uuid(), '+81399999999', 'mine', now(), now()),
           (gen_random_uuid(), '+81312345678', 'both', now(), now())
"""


@pytest.mark.parametrize("mode", ["keep", "replace"])
def test_numbers_that_did_not_come_from_the_frontend_stay_or_go(
    pull: Puller, frontend: Frontend, db: Database, mode: str
) -> None:
    db.execute(LOCAL)
    example().serve(frontend)
    pull(SYNC_LOCAL_NUMBERS=mode)
    live = "SELECT phone_number, name FROM registered_numbers WHERE deleted_at IS NULL ORDER BY 1"
    kept = [("+81399999999", "mine")] if mode == "keep" else []
    assert db.rows(live) == [("+81312345678", "both"), *kept, ("+819012345678", None)]


def test_a_number_that_leaves_its_groups_is_deleted_softly_and_comes_back_under_its_id(
    pull: Puller, frontend: Frontend, db: Database
) -> None:
    wanted = example()
    numbers = wanted.groups[0]["phoneNumbers"]
    wanted.serve(frontend)
    pull()
    query = "SELECT id, deleted_at IS NULL FROM registered_numbers WHERE phone_number = %s"
    own, _ = db.rows(query, ("+819012345678",))[0]
    gone = numbers.pop()
    wanted.serve(frontend)
    pull()
    assert db.rows(query, (gone,)) == [(own, False)]
    db.execute(
        "INSERT INTO registered_numbers (id, phone_number, deleted_at, created_at, updated_at)"
        " SELECT gen_random_uuid(), phone_number, '2026-01-01', now(), now()"
        " FROM registered_numbers WHERE id = %s",
        (own,),
    )
    numbers.append(gone)
    wanted.serve(frontend)
    (change,) = pull()["number-groups"].changes
    assert change == ("registered_numbers", "revive", 1, [gone])
    assert (own, True) in db.rows(query, (gone,))


# -- a frontend that has lost its store -----------------------------------------------------------


def ten() -> Desired:
    return Desired([group(*(f"03-1234-567{n}" for n in range(10)))], [rule() for _ in range(10)])


def test_half_of_a_section_may_go_at_once_and_more_is_held() -> None:
    for before, now, held in ((10, 5, False), (10, 4, True), (1, 0, True), (0, 0, False)):
        assert serversync.shrunk({"rules": before}, {"rules": now}) is held
    assert serversync.shrunk({"groups": 3, "numbers": 9}, {"groups": 3, "numbers": 0})


@pytest.mark.parametrize(
    ("times", "seconds", "elapsed", "held"),
    [(0, 0, 900, True), (1, 900, 60, True), (2, 530, 60, True), (2, 550, 60, False)],
)
def test_what_shrank_is_held_three_times_and_ten_minutes(
    times: int, seconds: float, elapsed: float, held: bool
) -> None:
    known = serversync.Known(
        "x", "d", {"rules": 9}, [], 0, times, seconds, {"rules": 0} if times else None, None, 1, 60
    )
    assert serversync.hold_on(known, {"rules": 1}, elapsed)[0] is held
    assert serversync.hold_on(known, {"rules": 5}, elapsed) == (False, 0, 0.0)


def test_a_lost_store_does_not_wipe_the_backend(
    desk: Desk, agent: AgentFactory, frontend: Frontend, db: Database
) -> None:
    wanted = example()
    wanted.serve(frontend)
    running = agent(FRONTEND_SYNC_INTERVAL_SEC=0.2)
    running.wait_log("ivr-flows changed")
    wait_pulls(db)
    before, there = tables(db), places(db)
    Desired().serve(frontend)  # ok: true, and nothing in it
    for name in SECTIONS:
        running.wait_log(f"settings: {name} held back: 0 ")
    wait_pulls(db, 5)
    running.wait_sentence("number-groups held back: 0 groups, 0 numbers came, 1 group, 2 numbers")

    assert tables(db) == before
    assert len(places(db) ^ there) <= 2, "no more than a heartbeat"
    assert [row["held_times"] > 3 for row in sections(db).values()] == [True] * 4
    assert len(running.lines("held back")) == 4, "said once"
    checks = desk.json("doctor", code=None, FRONTEND_SYNC_INTERVAL_SEC=1)["checks"]
    found = [check for check in checks if check["name"] == "settings"]
    assert [check["status"] for check in found if "held back" in check["text"]] == ["failed"] * 4
    assert 'serversync_settings_held{section="ivr-flows"} 1' in desk("metrics").stdout
    env: dict[str, Any] = {"RUNTIME_DIRECTORY": running.runtime_dir}
    env["FRONTEND_SYNC_INTERVAL_SEC"] = 1
    assert "accept ivr-flows" in desk("status", **env).stdout
    assert "held back" in desk("settings").stdout

    # A restart forgets nothing; the time that counts is the agent's own.
    assert running.stop()[0] == 0
    db.execute("UPDATE serversync.settings SET held_seconds = 590 WHERE section = 'call-actions'")
    wanted.serve(frontend)  # all is there again, but for the rules
    frontend.pages[PATHS["call-actions"]] = {"ok": True, "rules": []}
    running = agent(FRONTEND_SYNC_INTERVAL_SEC=0.2)
    running.wait_log("ivr-flows is no longer held back")
    wait_pulls(db)
    assert not running.lines("held back: "), "it was said before the restart"
    assert tables(db) == before
    db.execute("UPDATE serversync.settings SET held_seconds = 601 WHERE section = 'call-actions'")
    running.wait_log("call-actions is no longer held back")
    assert not tables(db)["call_action_rules"]
    after = tables(db)
    assert {k: v for k, v in after.items() if v} == {
        k: v for k, v in before.items() if k != "call_action_rules"
    }


def test_a_section_comes_back_before_its_time_and_the_count_begins_anew(
    agent: AgentFactory, frontend: Frontend, db: Database
) -> None:
    wanted = ten()
    wanted.serve(frontend)
    running = agent(FRONTEND_SYNC_INTERVAL_SEC=0.2)
    running.wait_log("call-actions changed")
    rules = wanted.rules[:]
    del wanted.rules[4:]
    wanted.serve(frontend)
    running.wait_log("call-actions held back: 4 rules came, 10 rules are there")
    del rules[9:]
    wanted.rules[:] = rules
    wanted.serve(frontend)
    running.wait_log("call-actions is no longer held back")
    wait_pulls(db)
    row = sections(db)["call-actions"]
    assert (row["held_times"], row["held_seconds"], row["held_counts"]) == (0, 0, None)
    assert len(tables(db)["call_action_rules"]) == 9


def test_what_a_held_section_is_pointed_at_for_is_still_there(
    pull: Puller, frontend: Frontend, db: Database
) -> None:
    wanted = example()
    wanted.serve(frontend)
    pull()
    before = tables(db)
    for name in ("number-groups", "announcements"):
        frontend.pages[PATHS[name]] = Desired().answers[name]
    pull()
    assert tables(db) == before and not any(skipped(db, name) for name in SECTIONS)


def test_an_operator_accepts_a_section_and_only_what_was_seen(
    pull: Puller, desk: Desk, frontend: Frontend, db: Database
) -> None:
    wanted = ten()
    wanted.serve(frontend)
    pull()
    assert "not held back" in desk("settings", "accept", "call-actions", code=1).stderr
    del wanted.rules[3:]
    wanted.serve(frontend)
    assert pull.held() == ["call-actions"]
    assert len(tables(db)["call_action_rules"]) == 10
    kept = wanted.rules[:]
    wanted.rules.clear()
    wanted.serve(frontend)
    desk("settings", "accept", "call-actions", code=1)  # it is not what was looked at
    assert len(tables(db)["call_action_rules"]) == 10
    wanted.rules[:] = kept
    wanted.serve(frontend)
    pull()
    assert len(tables(db)["call_action_rules"]) == 3

    wanted.rules.clear()
    wanted.serve(frontend)
    assert pull.held() == ["call-actions"]
    shown = desk("settings", "accept", "call-actions").stdout
    assert "call_action_rules  delete" in shown
    assert not tables(db)["call_action_rules"]


def test_an_accepted_section_is_applied_by_the_agent_when_the_frontend_is_back(
    pull: Puller, desk: Desk, agent: AgentFactory, frontend: Frontend, db: Database
) -> None:
    wanted = ten()
    wanted.serve(frontend)
    pull()
    wanted.rules.clear()
    wanted.serve(frontend)
    pull()
    frontend.stop()
    desk("settings", "accept", "call-actions", code=69)  # nobody answers: the next pull
    frontend.start()
    agent(FRONTEND_SYNC_INTERVAL_SEC=0.2).wait_log("call-actions changed")
    assert not tables(db)["call_action_rules"]


def test_a_first_pull_is_compared_with_what_is_in_the_tables(
    pull: Puller, frontend: Frontend, db: Database
) -> None:
    example().serve(frontend)
    pull()
    before = tables(db)
    db.execute("DROP SCHEMA serversync CASCADE")
    make_schema(db)
    Desired().serve(frontend)
    assert pull.held() == SECTIONS and tables(db) == before


# -- faults ---------------------------------------------------------------------------------------

OK: Json = {"ok": True}
HALF = Reply(200, {}, example().answers["ivr-flows"], half=True)
FAULTS: dict[str, Reply | Json | bytes] = {
    "HTML": Reply(200, {}, "<html>log in</html>"),
    "ok: false": {"ok": False, "flows": []},
    "ok: 1": {"ok": 1, "flows": []},
    "no list": OK,
    "a list of another kind": OK | {"flows": {}},
    "no object": b"[]",
    "not JSON": b'{"ok": true, "flows": [NaN]}',
    "too deep": b'{"ok": true, "flows": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "empty": b"",
    "500": Reply(500, {}, {"error": "x"}),
    "404": Reply(404, {}, {"error": "x"}),
    "401": Reply(401, {}, {"error": "x"}),
    "redirect": Reply(302, {"Location": "/login"}),
    "304 without a question": Reply(304),
    "cut": HALF,
    "reset": Reply(reset=True),
    "timeout": Reply(stall=30),
    "a byte at a time": Reply(200, {}, {"ok": True, "flows": []}, trickle=0.3),
    "too long": b'{"ok": true, "flows": []' + b" " * serversync.SETTINGS_MAX + b"}",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_middle_leaves_the_last_good_settings(
    pull: Puller, desk: Desk, frontend: Frontend, db: Database, fault: str
) -> None:
    wanted = example()
    wanted.serve(frontend)
    pull()
    before, there = tables(db), places(db)
    example().serve(frontend)
    frontend.pages[PATHS["ivr-flows"]] = FAULTS[fault]  # the last of the four
    if fault == "a byte at a time":  # only a deadline ends it
        error = desk("settings", "pull", code=69, SYNC_TIMEOUT_SEC=1).stderr
        assert "no settings now, the last good ones stay" in error
    else:
        with pytest.raises(serversync.NotNow):
            pull(SYNC_TIMEOUT_SEC=1)
    assert tables(db) == before and places(db) == there


def test_half_of_the_sections_are_not_applied(
    pull: Puller, frontend: Frontend, db: Database
) -> None:
    example().serve(frontend)
    pull()
    there = places(db)
    example().serve(frontend)
    for name in ("number-groups", "announcements"):
        frontend.pages[PATHS[name]] = Reply(503)
    with pytest.raises(serversync.NotNow):
        pull()
    assert places(db) == there


def test_a_pull_that_fails_is_said_once_and_is_no_outage_of_the_deliveries(
    agent: AgentFactory, backend: Backend, frontend: Frontend, db: Database
) -> None:
    frontend.pages[PATHS["announcements"]] = Reply(500)
    running = agent(FRONTEND_SYNC_INTERVAL_SEC=0.1)
    running.wait_log("no settings now, the last good ones stay: ")
    seqs = [backend.enqueue() for _ in range(3)]
    frontend.wait(lambda: set(seqs) <= set(frontend.seqs()), what="the entries")
    wait_until(lambda: not db.pending(), what="their marks")
    assert not db.rows("SELECT FROM serversync.waiting")
    example().serve(frontend)
    running.hup()
    running.wait_log("ivr-flows changed")
    assert len(running.lines("no settings now")) == 1
    assert not running.lines("outage")


def test_a_failing_pull_backs_off_and_a_recovery_is_said(
    agent: AgentFactory, frontend: Frontend, db: Database
) -> None:
    running = agent(FRONTEND_SYNC_INTERVAL_SEC=0.1)  # nothing is deployed: 404
    running.wait_log("no settings now")
    running.wait_sentence("no settings since")
    example().serve(frontend)
    running.wait_log("settings: recovered after", 30)
    gaps = asked(frontend, "number-groups")
    assert len(gaps) < 10
    running.wait_sentence("idle")


def test_entries_do_not_wait_for_a_page_of_the_settings_that_hangs(
    agent: AgentFactory, backend: Backend, frontend: Frontend
) -> None:
    example().serve(frontend)
    running = agent(FRONTEND_SYNC_INTERVAL_SEC=0.1)
    running.wait_log("ivr-flows changed")
    order: list[str] = []
    release = threading.Event()

    def hook(request: Any) -> Reply | None:
        order.append(request.kind)
        if request.kind == "other":
            release.wait(20)
        return None

    frontend.on_head = hook
    wait_until(lambda: order, what="a question")
    backend.enqueue()
    frontend.wait(lambda: frontend.entries, what="the entry")
    assert order == ["other", "entries"]
    release.set()


def test_a_stop_does_not_wait_for_the_settings(agent: AgentFactory, frontend: Frontend) -> None:
    frontend.pages[PATHS["number-groups"]] = Reply(stall=60)
    running = agent(FRONTEND_SYNC_INTERVAL_SEC=1)
    frontend.wait(lambda: asked(frontend))
    code, seconds = running.stop()
    assert code == 0 and seconds < 10


def test_a_pause_that_the_deliveries_were_told_is_kept_by_the_settings(
    agent: AgentFactory, backend: Backend, frontend: Frontend
) -> None:
    Desired().serve(frontend)
    pause = Reply(429, {"Retry-After": "3"})
    frontend.on_entries = script(pause, pause)  # of the entry, and of the empty request
    agent(FRONTEND_SYNC_INTERVAL_SEC=0.1)
    frontend.wait(lambda: len(asked(frontend)) > 8, what="two pulls")
    backend.enqueue()
    frontend.wait(lambda: frontend.entries)
    empty = frontend.of_kind("empty")[0]
    accepted = frontend.of_kind("entries")[-1]
    told = empty.finished or 0.0
    assert accepted.started - told > 1.5
    assert not [r for r in asked(frontend) if told < r.started < told + 1.5]
    frontend.wait(lambda: asked(frontend)[-1].started > accepted.started, what="a pull behind it")


def test_a_pause_that_the_settings_were_told_is_theirs_alone(
    agent: AgentFactory, backend: Backend, frontend: Frontend
) -> None:
    frontend.pages[PATHS["number-groups"]] = Reply(429, {"Retry-After": "3"})
    running = agent(FRONTEND_SYNC_INTERVAL_SEC=0.1)
    running.wait_log("no settings now")
    backend.enqueue()
    frontend.wait(lambda: frontend.entries)
    assert len(asked(frontend)) == 1
    frontend.wait(lambda: len(asked(frontend)) > 1, what="the next pull")
    first, second = asked(frontend)[:2]
    assert second.started - (first.finished or 0) >= 2.5


def test_settings_come_while_a_long_backlog_goes_out(
    agent: AgentFactory, backend: Backend, frontend: Frontend, db: Database
) -> None:
    example().serve(frontend)
    backend.enqueue_many(400)
    frontend.on_entries = lambda request: Reply(store=True, body={"ok": True}, delay=0.05)
    agent(FRONTEND_SYNC_INTERVAL_SEC=0.2, SYNC_BATCH_SIZE=1)
    wait_until(lambda: frontend.entries, what="the first entry")
    wait_until(lambda: tables(db)["ivr_flows"], what="the settings")
    assert len(db.pending()) > 100


def test_settings_come_while_a_recording_goes_out(
    agent: AgentFactory, backend: Backend, frontend: Frontend, db: Database
) -> None:
    example().serve(frontend)
    frontend.read_rate = 200_000
    call = backend.end_call(seconds=60)
    running = agent(FRONTEND_SYNC_INTERVAL_SEC=1)
    wait_until(lambda: (running.state()["progress"] or {}).get("bytes"), what="the upload")
    seen = len(running.lines("ivr-flows changed"))
    wanted = example()
    wanted.serve(frontend)
    wait_until(lambda: len(running.lines("ivr-flows changed")) > seen, what="the settings")
    assert call.call_log_id not in frontend.files, "the upload was over before"
    frontend.read_rate = None
    frontend.wait(lambda: frontend.playable(call.recording_id))
    assert len(frontend.of_kind("file")) == 1


def test_a_reload_leads_to_another_frontend_and_off(
    agent: AgentFactory, frontend: Frontend, db: Database, tmp_path: Any
) -> None:
    example().serve(frontend)
    running = agent(FRONTEND_SYNC_INTERVAL_SEC=60)
    running.wait_log("ivr-flows changed")
    with Frontend(tmp_path / "other") as other:
        wanted = example()
        wanted.serve(other)
        settings = agent.env(FRONTEND_SYNC_INTERVAL_SEC=60, FRONTEND_BASE_URL=other.url)
        running.update_env(settings)
        running.hup()
        wait_until(
            lambda: wanted.flows[0]["id"] in {row[0] for row in tables(db)["ivr_flows"]},
            what="the other's settings",
        )
        running.update_env(settings | {"FRONTEND_SYNC_INTERVAL_SEC": "0"})
        running.hup()
        wait_until(lambda: len(running.lines("read again")) == 2, what="the reload")
        before = len(other.requests)
        example().serve(other)
        db.execute("NOTIFY serversync")
        running.stop()
        assert len(other.requests) == before


def test_with_an_interval_of_0_nothing_is_asked(
    agent: AgentFactory, backend: Backend, frontend: Frontend, db: Database
) -> None:
    running = agent(FRONTEND_SYNC_INTERVAL_SEC=0)
    backend.enqueue()
    frontend.wait(lambda: frontend.entries)
    running.wait_sentence("sent 1 entry")
    assert not asked(frontend)


# -- the database ---------------------------------------------------------------------------------

READ_FLOW = """
    SELECT (SELECT count(*) FROM ivr_nodes), (SELECT count(*) FROM ivr_transitions),
           (SELECT string_agg(name, ',') FROM ivr_flows)
"""


def test_a_reader_never_sees_a_flow_half_built(
    agent: AgentFactory, frontend: Frontend, db: Database
) -> None:
    own = new_id()
    small = Desired(flows=[flow(route("1"), id=own, name="small")])
    large = Desired(flows=[flow(*(route(str(n)) for n in range(60)), id=own, name="large")])
    expected = {(0, 0, None), (4, 3, "small"), (63, 62, "large")}
    seen: set[tuple[Any, ...]] = set()
    over = threading.Event()

    def look() -> None:
        with db.connect() as connection:
            while not over.is_set():
                seen.update(connection.execute(READ_FLOW).fetchall())

    readers = [threading.Thread(target=look) for _ in range(2)]
    for reader in readers:
        reader.start()
    running = agent(FRONTEND_SYNC_INTERVAL_SEC=0.1)
    for turn in range(8):
        (small, large)[turn % 2].serve(frontend)
        name = ("small", "large")[turn % 2]
        wait_until(lambda name=name: db.rows(READ_FLOW)[0][2] == name, what=name)  # type: ignore[misc]
    over.set()
    for reader in readers:
        reader.join()
    assert {(4, 3, "small"), (63, 62, "large")} <= seen <= expected, running.log()


def test_a_section_that_the_database_refuses_stays_as_it_was_and_the_others_are_applied(
    pull: Puller, agent: AgentFactory, frontend: Frontend, db: Database
) -> None:
    example().serve(frontend)
    pull()
    before = tables(db)
    db.execute("ALTER TABLE ivr_nodes ADD CHECK (action_code IS DISTINCT FROM 'XX')")
    wanted = example()
    wanted.flows[1]["routes"][0]["destination"]["actionCode"] = "XX"
    wanted.serve(frontend)
    running = agent(FRONTEND_SYNC_INTERVAL_SEC=0.2)
    running.wait_log("ivr-flows cannot be applied: the database refuses it: new row for relation")
    wait_pulls(db)

    after = tables(db)
    assert {name for name in after if after[name] == before[name]} == {
        *("ivr_flows", "ivr_nodes", "ivr_transitions", "extra"),
    }
    assert len(running.lines("cannot be applied")) == 1
    assert "violates check constraint" in sections(db)["ivr-flows"]["error"]
    db.execute("ALTER TABLE ivr_nodes DROP CONSTRAINT ivr_nodes_action_code_check")
    running.wait_log("ivr-flows changed")
    assert sections(db)["ivr-flows"]["error"] is None


def test_a_table_that_is_missing_is_said_and_the_others_are_applied(
    desk: Desk, agent: AgentFactory, frontend: Frontend, db: Database
) -> None:
    wanted = example()
    wanted.serve(frontend)
    db.execute("DROP TABLE announcements, system_settings")
    running = agent(FRONTEND_SYNC_INTERVAL_SEC=0.2)
    running.wait_log("announcements cannot be applied: there is no table announcements")
    running.wait_log("call-actions cannot be applied: there is no table system_settings")
    counts = [
        db.value(f"SELECT count(*) FROM {name}") for name in ("call_action_rules", "ivr_nodes")
    ]
    assert counts == [2, 9]
    checks = desk.json("doctor", code=None, FRONTEND_SYNC_INTERVAL_SEC=1)["checks"]
    said = [check["text"] for check in checks if check["name"] == "settings"]
    assert "there is no table announcements: it stays as it is" in said


def test_a_right_that_is_missing_is_said_and_setup_grants_it(
    desk: Desk, pull: Puller, frontend: Frontend, db: Database
) -> None:
    example().serve(frontend)
    with db.admin() as admin:  # as a least-privilege role has it: its own
        admin.execute("DROP SCHEMA serversync CASCADE")
    role = f"poor_{db.name}"
    admin_url = db.cluster.url(db.name, user="postgres")
    url = db.cluster.url(db.name, user=role)
    setup = ("setup", "--admin-url", admin_url)
    try:
        desk(*setup, DATABASE_URL=url)
        with db.admin() as admin:
            admin.execute(f"REVOKE DELETE ON ivr_nodes FROM {role}")
            admin.execute(f"REVOKE UPDATE (extra) ON system_settings FROM {role}")
        outcomes = pull(DATABASE_URL=url)
        assert "no right to delete on ivr_nodes" in outcomes["ivr-flows"].error
        assert "no right to update (extra) on system_settings" in outcomes["call-actions"].error
        counts = {name: len(rows) for name, rows in tables(db).items()}
        assert (counts["call_action_rules"], counts["ivr_flows"]) == (2, 0)
        made = desk(*setup, DATABASE_URL=url).stdout.splitlines()
        assert [line.split()[1] for line in made if line.startswith("made")] == [
            *("ivr_nodes", "system_settings"),
        ]
        assert not any(outcome.error for outcome in pull(DATABASE_URL=url).values())
        found = tables(db)
        assert all(found.values()) and len(found["ivr_nodes"]) == 9
    finally:
        with db.admin() as admin:
            admin.execute(f"DROP OWNED BY {role} CASCADE")
            admin.execute(f"DROP ROLE {role}")


def test_a_row_that_the_backend_holds_is_not_waited_for(
    pull: Puller, frontend: Frontend, db: Database
) -> None:
    wanted = example()
    wanted.serve(frontend)
    pull()
    wanted.announcements[0]["name"] = "another name"
    wanted.flows[0]["name"] = "another name"
    wanted.serve(frontend)
    with db.connect(autocommit=False) as backend:
        backend.execute("SELECT FROM announcements FOR UPDATE")
        error = pull()["announcements"].error
        assert error.startswith("the database refuses it: canceling statement due to lock timeout")
        assert "another name" in {row[1] for row in tables(db)["ivr_flows"]}
    pull()
    assert "another name" in {row[1] for row in tables(db)["announcements"]}


def test_a_pull_that_was_overtaken_begins_anew(
    pull: Puller, frontend: Frontend, db: Database
) -> None:
    wanted = example()
    wanted.serve(frontend)
    pull()
    wanted.rules[0]["name"] = "older"
    wanted.serve(frontend)
    older = dict(frontend.pages)
    turns: list[str] = []

    def overtake(request: Any) -> Reply | None:
        """While the last answer is on its way, another pull applies something newer."""
        if request.path == PATHS["ivr-flows"] and not turns:
            turns.append(request.path)
            wanted.rules[0]["name"] = "newer"
            wanted.serve(frontend)
            pull()
        elif len(turns) == 1 and request.path == PATHS["number-groups"]:
            turns.append("again")
        return None

    frontend.on_head = overtake
    pull()
    assert older[PATHS["call-actions"]] != frontend.pages[PATHS["call-actions"]]
    assert "newer" in {row[1] for row in tables(db)["call_action_rules"]}
    assert turns == [PATHS["ivr-flows"], "again"]


def test_many_numbers_are_one_short_statement_in_bounded_memory(
    agent: AgentFactory, frontend: Frontend, db: Database
) -> None:
    numbers = [f"+8190{n:08}" for n in range(60_000)]
    Desired([group(*numbers[:30_000]), group(*numbers[30_000:])]).serve(frontend)
    running = agent(FRONTEND_SYNC_INTERVAL_SEC=1)
    running.wait_log("number-groups changed", 60)
    assert db.value("SELECT count(*) FROM registered_numbers") == 60_000
    assert running.rss_peak_kib() < 110 * 1024


# -- commands -------------------------------------------------------------------------------------


def test_a_dry_run_shows_the_difference_and_writes_nothing(
    pull: Puller, desk: Desk, frontend: Frontend, db: Database
) -> None:
    wanted = example()
    wanted.serve(frontend)
    pull()
    state = "SELECT ctid, xmin, section FROM serversync.settings ORDER BY 3"
    before, known = places(db), db.rows(state)
    assert desk("settings", "pull", "--dry-run").stdout == "nothing would change\n"
    gone = wanted.groups[0]["phoneNumbers"].pop()
    wanted.rules[0]["name"] = "buddies"
    wanted.flows[0]["routes"].append(route("9"))
    wanted.serve(frontend)
    shown = desk("settings", "pull", "--dry-run").stdout.splitlines()

    assert [line.split()[:4] for line in shown if line][1:5] == [
        ["number-groups", "registered_numbers", "delete", gone],
        ["call-actions", "call_action_rules", "update", "buddies"],
        *[["ivr-flows", table, "insert", kind] for table, kind in (
            ("ivr_nodes", "EXIT"), ("ivr_transitions", "DTMF"))],
    ]  # fmt: skip
    as_json = desk.json("settings", "pull", "--dry-run")
    assert as_json["dry_run"] and as_json["sections"][0]["changes"] == [
        {"table": "registered_numbers", "action": "delete", "count": 1, "items": [gone]}
    ]
    assert places(db) == before and db.rows(state) == known


def test_as_json_a_pull_is_one_text_with_the_audio_that_is_missing_in_it(
    desk: Desk, frontend: Frontend, db: Database
) -> None:
    gone = announcement("gone", audioFileUrl="/audio/announcements/gone.wav")
    Desired(announcements=[gone]).serve(frontend)
    told = desk.json("settings", "pull")
    assert list(told["audio"]["problems"]) == ["gone.wav"]
    db.execute("UPDATE serversync.audio_files SET next_attempt_at = now()")
    lines = desk("settings", "pull").stdout.splitlines()
    assert lines[-1].startswith("gone.wav: the frontend does not have it yet")


def test_settings_without_a_schema_or_a_frontend_say_so(
    agent: AgentFactory, frontend: Frontend
) -> None:
    desk = Desk(agent)
    frontend.stop()
    assert "the schema serversync is not there" in desk("settings", code=69).stderr
    desk("once")
    assert "never" in desk("settings").stdout
    assert "cannot be reached" in desk("settings", "pull", code=69).stderr
    parser = serversync.build_parser()
    with pytest.raises(SystemExit):
        parser.parse_args(["settings", "accept", "everything"])


def test_metrics_status_and_doctor_tell_of_the_settings(
    desk: Desk, agent: AgentFactory, frontend: Frontend, db: Database
) -> None:
    assert "serversync_settings" not in desk("metrics").stdout
    wanted = example()
    wanted.groups[0]["phoneNumbers"].append("110")
    wanted.serve(frontend)
    running = agent(FRONTEND_SYNC_INTERVAL_SEC=0.5)
    running.wait_log("ivr-flows changed")
    env: dict[str, Any] = {"RUNTIME_DIRECTORY": running.runtime_dir}
    env["FRONTEND_SYNC_INTERVAL_SEC"] = 0.5
    running.wait_sentence("idle")

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
    frontend.pages[PATHS["call-actions"]] = Reply(401)
    running.wait_log("no settings now")
    running.wait_sentence("no settings since")
    assert "serversync_settings_failing 1" in desk("metrics", **env).stdout
    assert "the frontend does not accept our credentials" in desk("status", **env).stdout
    checks = desk.json("doctor", code=None, **env)["checks"]
    texts = [check["text"] for check in checks if check["name"] == "settings"]
    assert any("1 item skipped: 1. 'friends': '110'" in text for text in texts), texts
    assert any("none since" in text for text in texts)


def test_ids_are_functions_of_flow_role_and_key() -> None:
    own = str(uuid.UUID(int=7))
    section = read("ivr-flows", flow(route("1"), id=own))
    made = {
        uuid.uuid5(uuid.UUID(own), role) for role in ("announce", "keypad", "exit 1", "fallback")
    }
    assert {uuid.UUID(row["id"]) for row in section.tables["ivr_nodes"]} == made
    ways = {uuid.uuid5(uuid.UUID(own), role) for role in ("DTMF 1", "TIMEOUT", "INVALID")}
    assert {uuid.UUID(row["id"]) for row in section.tables["ivr_transitions"]} == ways

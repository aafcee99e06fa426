"""Any sequence of snapshots ends in the tables that the last describes, minus what was skipped.

The model is written from the contract, without the program's own readers: it says which items are
good, and which rows follow from them. (Ids of nodes and transitions are the program's; the model
knows a node by its flow and what leads to it.)
"""

import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import serversync
from backend import Backend
from frontend import Frontend
from pg import Database
from settings import Puller, tables

ROUNDS = 12


# Few ids, names and numbers, so that sections repeat, contradict and point at each other.
IDS = [f"00000000-0000-4000-8000-{n:012}" for n in range(4)]
GOOD_AND_BAD: dict[str, tuple[list[Any], list[Any]]] = {
    "id": (IDS, [IDS[0].upper(), "flow-1", None, 7]),
    "link": ([*IDS, None, None], [IDS[0].upper(), "flow-1", 7]),
    "name": (["a", "b", "x" * 100, "n\0ul"], ["y" * 101, "z" * 256, None, 5]),
    "number": (
        ["0312345678", "+81312345678", "03 (1234) 5679", "０３１２３４５６７８", "+12125550100"],
        ["110", "no", "", None, 3],
    ),
    "flag": ([True, False], ["yes", None]),
    "code": (["VR", "AN", "VM", "VB", "IV"], ["XXX", "", None]),
    "whole": ([0, -1, 3, 7.0, None], [7.5, "3", 1 << 40]),
    "config": ([{"actionCode": "VR"}, {"a": [1, None, {"b": 2.5}]}], [None, "VR"]),
    "allow": (["allow", "deny"], ["maybe"]),
    "url": ([None, "", "/audio/announcements/a.wav"], ["/audio/announcements/../a.wav"]),
    "text": (["Hello.", "Bye."], [None, ""]),
    "seconds": ([None, 0.5, 1.5, -2.5, 2.4], ["2"]),
    "language": ([None, "en"], ["x" * 11]),
    "time": (["2026-11-18T09:00:00Z"], ["soon"]),
    "key": (["1", "2", "１", "#"], ["123456", None]),
    "kind": (["hold", "new kind", None], ["hold"]),
    "description": ([None, "text"], [None]),
}


class Author:
    """Writes snapshots by a seed. Of twenty values one is bad: an item has many."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def one(self, kind: str) -> Any:
        return self.random.choice(GOOD_AND_BAD[kind][self.random.random() < 0.05])

    def some(self, most: int, write: Callable[[], Any]) -> list[Any]:
        number = 0 if self.random.random() < 0.1 else self.random.randint(most // 2, most)
        return [None if self.random.random() < 0.02 else write() for _ in range(number)]

    def item(self, **kinds: str) -> dict[str, Any]:
        return {key: self.one(kind) for key, kind in kinds.items()}

    def group(self) -> dict[str, Any]:
        numbers = [self.one("number") for _ in range(self.random.randint(0, 5))]
        return self.item(id="id", name="name") | {"phoneNumbers": numbers}

    def rule(self) -> dict[str, Any]:
        return self.item(
            id="id", name="name", callerGroupId="link", isActive="flag", actionType="allow",
            actionConfig="config",
        )  # fmt: skip

    def announcement(self) -> dict[str, Any]:
        return self.item(
            id="id", name="name", description="description", isActive="flag", updatedAt="time",
            announcementType="kind", audioFileUrl="url", ttsText="text", durationSec="seconds",
            language="language",
        )  # fmt: skip

    def destination(self) -> dict[str, Any]:
        more = {
            "announcementId": "link", "welcomeAnnouncementId": "link", "ivrFlowId": "link",
            "recordingEnabled": "flag", "scenarioId": "text",
        }  # fmt: skip
        given = {key: kind for key, kind in more.items() if self.random.random() < 0.4}
        return self.item(actionCode="code", **given)

    def flow(self) -> dict[str, Any]:
        routes = [
            self.item(dtmfKey="key") | {"destination": self.destination()}
            for _ in range(self.random.randint(0, 5))
        ]
        fallback = self.destination() if self.random.random() < 0.7 else None
        return self.item(
            id="id", name="name", isActive="flag", announcementId="link", timeoutSec="whole",
            maxRetries="whole",
        ) | {"description": None, "routes": routes, "fallbackAction": fallback}  # fmt: skip

    def snapshot(self) -> dict[str, Any]:
        actions = {
            key: self.item(actionType="allow", actionConfig="config")
            for key in serversync.ACTIONS
            if self.random.random() < 0.5
        }
        return actions | {
            "groups": self.some(5, self.group),
            "rules": self.some(5, self.rule),
            "announcements": self.some(6, self.announcement),
            "flows": self.some(6, self.flow),
        }


snapshots = st.integers(1, 1 << 40).map(lambda seed: Author(seed).snapshot())

Row = tuple[Any, ...]


def is_id(value: Any) -> bool:
    return isinstance(value, str) and len(value) == 36


def text_fits(value: Any, most: int) -> bool:
    return isinstance(value, str) and len(value.replace("\0", "")) <= most


def plain(value: str | None) -> str | None:
    return value and value.replace("\0", "")


def number(value: Any) -> str | None:
    if not isinstance(value, str):
        return None
    wide = {chr(0xFF10 + n): str(n) for n in range(10)}
    digits = "".join(wide.get(c, c) for c in value if c not in "-() ")
    digits = "+81" + digits[1:] if digits[:1] == "0" else digits
    return digits if re.fullmatch(r"\+[1-9]\d{1,14}", digits, re.ASCII) else None


def good_rows(listed: list[Any], good: Any) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """The good items with their places and ids; of one id the first."""
    seen = set()
    for at, item in enumerate(listed):
        if item is not None and is_id(item["id"]) and item["id"].lower() not in seen and good(item):
            seen.add(item["id"].lower())
            yield at, item["id"].lower(), item


def flag(item: dict[str, Any], key: str = "isActive") -> bool:
    return isinstance(item[key], bool)


class Model:
    """The tables that one snapshot describes."""

    def __init__(self, snapshot: dict[str, Any]) -> None:
        self.groups = {
            key: item
            for _, key, item in good_rows(
                snapshot["groups"],
                lambda item: (
                    text_fits(item["name"], 255) and isinstance(item["phoneNumbers"], list)
                ),
            )
        }
        owners = {
            good: key
            for key, item in self.groups.items()
            for each in item["phoneNumbers"]
            if (good := number(each))
        }
        self.numbers = [(n, g, plain(self.groups[g]["name"])) for n, g in sorted(owners.items())]
        self.rules = [
            (key, plain(item["name"]), item["callerGroupId"] and item["callerGroupId"].lower(),
             item["actionType"], item["actionConfig"], at, item["isActive"])
            for at, key, item in good_rows(snapshot["rules"], self._good_rule)
        ]  # fmt: skip
        self.sounds: dict[str, Any] = {}
        self.announcements = [
            self._announcement(key, item)
            for _, key, item in good_rows(snapshot["announcements"], self._good_announcement)
        ]
        self.flows = {key: item for _, key, item in good_rows(snapshot["flows"], self._good_flow)}

    def _good_rule(self, item: dict[str, Any]) -> bool:
        group = item["callerGroupId"]
        known = group is None or (is_id(group) and group.lower() in self.groups)
        allowed = item["actionType"] != "maybe" and isinstance(item["actionConfig"], dict)
        return text_fits(item["name"], 255) and known and allowed and flag(item)

    @staticmethod
    def _good_announcement(item: dict[str, Any]) -> bool:
        url = item["audioFileUrl"] or None
        good = url in (None, "/audio/announcements/a.wav") and bool(url or item["ttsText"])
        good = good and item["durationSec"] != "2" and item["language"] != "x" * 11
        return good and text_fits(item["name"], 100) and flag(item) and item["updatedAt"] != "soon"

    def _announcement(self, key: str, item: dict[str, Any]) -> Row:
        url, text = item["audioFileUrl"] or None, item["ttsText"] or None
        self.sounds[key] = (url, text)
        kind = "hold" if item["announcementType"] == "hold" else "custom"
        seconds = {0.5: 1, 1.5: 2, -2.5: -3, 2.4: 2}.get(item["durationSec"])
        language = item["language"] or "ja"
        return (key, plain(item["name"]), item["description"], kind, item["isActive"], url, text,
                seconds, language)  # fmt: skip

    def _good_flow(self, item: dict[str, Any]) -> bool:
        whole = all(item[key] in (0, -1, 3, 7, None) for key in ("timeoutSec", "maxRetries"))
        sound = item["announcementId"]
        known = sound is None or (is_id(sound) and sound.lower() in self.sounds)
        return text_fits(item["name"], 100) and whole and known and flag(item)

    def _exit(self, item: dict[str, Any]) -> tuple[Row, str | None] | None:
        """action, audio and what else is said of an exit; and the flow it leads to."""
        code, said = item["actionCode"], []
        if code in ("XXX", "", None):
            return None
        target = item.get("ivrFlowId")
        if target is not None:
            if not is_id(target) or target.lower() not in self.flows:
                return None
            said.append(f'"ivrFlowId":"{target.lower()}"')
        if item.get("scenarioId") is not None:
            said.append(f'"scenarioId":"{item["scenarioId"]}"')
        recording = item.get("recordingEnabled")
        if recording not in (True, False, None):
            return None
        if recording is not None:
            said.append(f'"recordingEnabled":{str(recording).lower()}')
        key = {"AN": "announcementId", "VM": "announcementId", "VB": "welcomeAnnouncementId"}.get(
            code
        )
        sound = item.get(key) if key else None
        if sound is not None and (not is_id(sound) or sound.lower() not in self.sounds):
            return None
        audio = self.sounds[sound.lower()][0] if sound else None
        return (
            code,
            audio,
            "{" + ",".join(said) + "}" if said else None,
        ), target and target.lower()

    def exits(self, flow: dict[str, Any]) -> dict[str, tuple[Row, str | None]]:
        """By their keys; the fallback's is empty. Those that close a cycle are still among them."""
        found = {}
        ways = [(each["dtmfKey"], each["destination"]) for each in flow["routes"]]
        ways += [("", flow["fallbackAction"])] if flow["fallbackAction"] else []
        for key, destination in ways:
            made = self._exit(destination) if key is not None and len(key) <= 5 else None
            key = "1" if key == "１" else key
            if made is not None and key not in found:
                found[key] = made
        return found


def built(found: dict[str, list[Row]], flow: str) -> dict[str, Any]:
    """What stands in the tables of one flow: its root, its keypad, and what its keys lead to."""
    nodes = {row[0]: row for row in found["ivr_nodes"] if row[1] == flow}
    (root,) = [row for row in nodes.values() if row[3] == "ANNOUNCE"]
    (keypad,) = [row for row in nodes.values() if row[3] == "KEYPAD"]
    assert root[2] is None and root[9] == 0 and keypad[2] == root[0] and keypad[9] == 1
    ways: dict[tuple[str, str | None], Row] = {}
    for _, source, kind, key, target in found["ivr_transitions"]:
        if source in nodes:
            assert source == keypad[0] and nodes[target][2] == keypad[0]
            assert (nodes[target][3], nodes[target][9]) == ("EXIT", 2)
            ways[kind, key] = nodes[target][4:7]
    if ("TIMEOUT", None) in ways:
        assert ways.pop(("INVALID", None)) == ways[("TIMEOUT", None)]
    assert len(nodes) == 2 + len(ways)
    exits = {key or "": row for (_, key), row in ways.items()}
    return {"root": root[5:7], "keypad": keypad[7:9], "exits": exits}


def assert_acyclic(edges: dict[str, set[str]]) -> None:
    left = dict(edges)
    while left:
        ends = [flow for flow, targets in left.items() if not targets & set(left)]
        assert ends, f"a cycle among {left}"
        for flow in ends:
            del left[flow]


def reaches(edges: dict[str, set[str]], start: str, goal: str) -> bool:
    seen, todo = set(), [start]
    while todo:
        flow = todo.pop()
        if flow == goal:
            return True
        if flow not in seen:
            seen.add(flow)
            todo += edges[flow]
    return False


def check(db: Database, snapshot: dict[str, Any]) -> None:
    model, found = Model(snapshot), tables(db)
    assert found["registered_numbers"] == model.numbers
    assert found["call_action_rules"] == sorted(model.rules)
    assert found["announcements"] == sorted(model.announcements)
    assert found["ivr_flows"] == sorted(
        (key, plain(item["name"]), None, item["isActive"]) for key, item in model.flows.items()
    )
    edges: dict[str, set[str]] = {key: set() for key in model.flows}
    dropped = []
    for key, item in model.flows.items():
        seen, wanted = built(found, key), model.exits(item)
        sound = item["announcementId"] and model.sounds[item["announcementId"].lower()]
        audio, text = sound or (None, None)
        assert seen["root"] == (audio, None if audio else text)
        timeout, retries = item["timeoutSec"], item["maxRetries"]
        assert seen["keypad"] == (
            10 if timeout is None or timeout <= 0 else timeout,
            3 if retries is None else 2 if retries < 0 else retries,
        )
        assert seen["exits"] == {k: wanted[k][0] for k in seen["exits"]}
        for dtmf, (_, target) in wanted.items():
            if dtmf in seen["exits"]:
                edges[key] |= {target} if target else set()
            else:
                assert target, f"a good exit is missing: {dtmf!r} of {key}"
                dropped.append((key, target))
    assert_acyclic(edges)
    for source, target in dropped:
        assert reaches(edges, target, source), "it closed no cycle"


def answers(snapshot: dict[str, Any]) -> dict[str, Any]:
    given_actions = {key: snapshot[key] for key in serversync.ACTIONS if key in snapshot}
    return {
        "/api/number-groups": {"ok": True, "callerGroups": snapshot["groups"]},
        "/api/call-actions": {"ok": True, "rules": snapshot["rules"], **given_actions},
        "/api/announcements": {"ok": True, "announcements": snapshot["announcements"]},
        "/api/ivr-flows/export": {"ok": True, "flows": snapshot["flows"]},
    }


@pytest.fixture
def pull(db: Database, frontend: Frontend, backend: Backend) -> Puller:
    return Puller(db, frontend, backend)


@settings(
    max_examples=ROUNDS,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(story=st.lists(snapshots, min_size=2, max_size=4))
def test_any_sequence_of_snapshots_ends_in_the_tables_of_the_last_one(
    pull: Puller, frontend: Frontend, db: Database, story: list[dict[str, Any]]
) -> None:
    for snapshot in story:
        frontend.pages.update(answers(snapshot))
        for outcome in pull().values():
            assert not outcome.error
        # What is much smaller than before is held: that has its own tests.
        for name in serversync.SOURCES:
            if db.execute(serversync.SETTINGS_ACCEPT, {"section": name}):
                pull()
    check(db, story[-1])
    (extra,) = tables(db)["extra"][0]
    for key in serversync.ACTIONS:
        given_action = story[-1].get(key)
        if given_action is None:
            assert extra[key] == serversync.ACTIONS[key]
        elif given_action["actionType"] != "maybe" and isinstance(
            given_action["actionConfig"], dict
        ):
            assert extra[key] == given_action
    assert not db.rows("SELECT FROM sync_outbox")

"""Any sequence of snapshots ends in the tables that the last describes; of what is bad in it, the
rows stay that stood there before.

The model is written from the contract, without the program's own readers: it says which items are
good, and which rows follow from them. (Ids of nodes and transitions are the program's; the model
knows a node by its flow and what leads to it.)
"""

import random
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import serversync
from chance import examples
from pg import Database
from pi import Pi
from settings import AUDIO, Desired, Puller, tables

# Few ids, names and numbers, so that sections repeat, contradict and point at each other.
IDS = [f"00000000-0000-4000-8000-{n:012}" for n in range(4)]
GOOD_AND_BAD: dict[str, tuple[list[Any], list[Any]]] = {
    "id": (IDS, [IDS[0].upper(), "flow-1", None, 7]),
    "link": ([*IDS, IDS[0].upper(), None, None], ["flow-1", 7]),
    "name": (["a", "b", "x" * 100, "n\0ul 😀"], ["y" * 101, "z" * 256, None, 5]),
    "number": (
        ["0312345678", "+81312345678", "03 (1234) 5679", "０３（１２３４）５６７８", "+1212555"],
        ["110", "no", "", None, 3],
    ),
    "flag": ([True, False, None], ["yes"]),
    "code": (["VR", "AN", "VM", "vb", "vb", "IV"], ["XXX", "", None]),
    "whole": ([0, -1, 3, 7.0, None], [7.5, "3", 1 << 40]),
    "config": ([{"actionCode": "VR"}, {"a": [1, None, {"b": 2.5}]}], [None, "VR"]),
    "allow": (["allow", "deny"], ["maybe"]),
    "url": ([None, "", f"{AUDIO}a.wav", f"{AUDIO}b.wav"], [f"{AUDIO}../a.wav"]),
    "text": (["Hello.", "Bye."], [None, ""]),
    "seconds": ([None, 0.5, 1.5, -2.5, 2.4, 0.49999999999999994], ["2"]),
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
            "recordingEnabled": "flag", "includeAnnouncement": "flag", "scenarioId": "text",
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

    def snapshot(self) -> Desired:
        actions = {
            key: self.item(actionType="allow", actionConfig="config")
            for key in serversync.ACTIONS
            if self.random.random() < 0.5
        }
        return Desired(
            self.some(5, self.group),
            self.some(5, self.rule),
            self.some(6, self.announcement),
            self.some(6, self.flow),
            actions,
        )


snapshots = st.integers(1, 1 << 40).map(lambda seed: Author(seed).snapshot())

Row = tuple[Any, ...]


def is_id(value: Any) -> bool:
    return isinstance(value, str) and len(value) == 36


def text_fits(value: Any, most: int) -> bool:
    return isinstance(value, str) and len(value.replace("\0", "")) <= most


def plain(value: str | None) -> str | None:
    return value and value.replace("\0", "")


def lower(value: Any) -> str | None:
    return None if value is None else str(value).lower()


def number(value: Any) -> str | None:
    if not isinstance(value, str):
        return None
    wide = {chr(0xFF10 + n): str(n) for n in range(10)}
    digits = "".join(wide.get(c, c) for c in value if c not in "-() （）")
    digits = "+81" + digits[1:] if digits[:1] == "0" else digits
    return digits if re.fullmatch(r"\+[1-9]\d{1,14}", digits, re.ASCII) else None


def flag(item: dict[str, Any]) -> bool:
    return item["isActive"] in (True, False, None)


def active(item: dict[str, Any]) -> bool:
    return item["isActive"] is not False


class Model:
    """The tables after each snapshot: what is good in it is there, what is bad stays as it was,
    what is not in it is gone."""

    def __init__(self) -> None:
        self.numbers: dict[str, Row] = {}
        self.rules: dict[str, Row] = {}
        self.announcements: dict[str, Row] = {}
        self.flows: dict[str, Row] = {}
        self.built: dict[str, dict[str, Any]] = {}

    @staticmethod
    def merged(
        stored: dict[str, Any], listed: list[Any], made: Callable[[dict[str, Any], int], Any]
    ) -> dict[str, Any]:
        """Of one id the first good item counts, and else what is stored."""
        found: dict[str, Any] = {}
        named = [(at, x) for at, x in enumerate(listed) if x is not None and is_id(x["id"])]
        for at, item in named:
            key = item["id"].lower()
            row = made(item, at) if key not in found else None
            if row is not None:
                found[key] = row
        kept = {x["id"].lower() for _, x in named} - found.keys()
        return found | {key: stored[key] for key in kept & stored.keys()}

    def take(self, snapshot: Desired) -> None:
        self._groups(snapshot.groups)
        self.rules = self.merged(self.rules, snapshot.rules, self._rule)
        self.announcements = self.merged(
            self.announcements, snapshot.announcements, self._announcement
        )
        self.sounds = {row[0]: (row[5], row[6]) for row in self.announcements.values()}
        stored = self.built
        self.built = self.merged(stored, snapshot.flows, lambda item, _: self._built(item, stored))
        self.flows = self.merged(self.flows, snapshot.flows, self._flow)

    def _groups(self, listed: list[Any]) -> None:
        groups = self.merged({}, listed, lambda x, _: x if text_fits(x["name"], 255) else None)
        ids = {x["id"].lower() for x in listed if x is not None and is_id(x["id"])}
        unreadable = ids - groups.keys()
        kept = {n: row for n, row in self.numbers.items() if row[1] in unreadable}
        owners = {
            good: key
            for key, item in groups.items()
            for each in item["phoneNumbers"]
            if (good := number(each))
        }
        named = {n: (n, key, plain(groups[key]["name"])) for n, key in owners.items()}
        self.numbers = named | kept

    @staticmethod
    def _rule(item: dict[str, Any], at: int) -> Row | None:
        group = item["callerGroupId"]
        good = (group is None or is_id(group)) and text_fits(item["name"], 255) and flag(item)
        if not good or item["actionType"] == "maybe" or not isinstance(item["actionConfig"], dict):
            return None
        return (item["id"].lower(), plain(item["name"]), lower(group), item["actionType"],
                item["actionConfig"], at, active(item))  # fmt: skip

    @staticmethod
    def _announcement(item: dict[str, Any], _: int) -> Row | None:
        url, text = item["audioFileUrl"] or None, item["ttsText"] or None
        good = url in (None, f"{AUDIO}a.wav", f"{AUDIO}b.wav") and bool(url or text)
        good = good and item["durationSec"] != "2" and item["language"] != "x" * 11
        if not (good and text_fits(item["name"], 100) and flag(item)):
            return None
        if item["updatedAt"] == "soon":
            return None
        kind = "hold" if item["announcementType"] == "hold" else "custom"
        rounded = {0.5: 1, 1.5: 2, -2.5: -3, 2.4: 2, 0.49999999999999994: 0}
        seconds = rounded.get(item["durationSec"])
        return (item["id"].lower(), plain(item["name"]), item["description"], kind, active(item),
                url, text, seconds, item["language"] or "ja")  # fmt: skip

    @staticmethod
    def _flow(item: dict[str, Any], _: int) -> Row | None:
        whole = all(item[key] in (0, -1, 3, 7, None) for key in ("timeoutSec", "maxRetries"))
        if not (text_fits(item["name"], 100) and whole and flag(item)):
            return None
        return item["id"].lower(), plain(item["name"]), None, active(item)

    def _built(self, item: dict[str, Any], stored: dict[str, Any]) -> dict[str, Any] | None:
        if self._flow(item, 0) is None:
            return None
        before = stored.get(item["id"].lower(), {"exits": {}})["exits"]
        audio, text = self.sounds.get(lower(item["announcementId"]), (None, None))
        timeout, retries = item["timeoutSec"], item["maxRetries"]
        times = (
            10 if timeout is None or timeout <= 0 else timeout,
            2 if retries is None or retries < 0 else retries,
        )  # of every node; one that is kept keeps its own
        exits: dict[str, Row] = {}
        bad = set()
        for each in item["routes"]:
            key = "1" if each["dtmfKey"] == "１" else each["dtmfKey"]
            if key is None or len(key) > 5 or key in exits:
                continue
            made = self._exit(each["destination"])
            if made is None:
                bad.add(key)
            else:
                exits[key] = made + times
        fallback = self._exit(item["fallbackAction"] or {"actionCode": "VR"})
        default = before.get("", ("VR", None, None, *times))
        exits[""] = fallback + times if fallback else default
        exits |= {key: before[key] for key in (bad & before.keys()) - exits.keys()}
        return {
            "root": (audio, None if audio else text),
            "keypad": times,
            "exits": exits,
        }

    def _exit(self, item: dict[str, Any]) -> Row | None:
        """action, audio and what else is said of an exit."""
        code, said = item["actionCode"], []
        if code in ("XXX", "", None):
            return None
        if item.get("ivrFlowId") is not None:
            said.append(f'"ivrFlowId":"{lower(item["ivrFlowId"])}"')
        if item.get("scenarioId") is not None:
            said.append(f'"scenarioId":"{item["scenarioId"]}"')
        for key in ("recordingEnabled", "includeAnnouncement"):
            if item.get(key) not in (True, False, None):
                return None
            if item.get(key) is not None:
                said.append(f'"{key}":{str(item[key]).lower()}')
        sound = item.get("announcementId") if code in ("AN", "VM", "vb") else None
        if code == "vb" and item.get("welcomeAnnouncementId") is not None:
            sound = item["welcomeAnnouncementId"]
        audio = self.sounds.get(lower(sound), (None, None))[0]
        return code.upper(), audio, "{" + ",".join(said) + "}" if said else None


def built(found: dict[str, list[Row]], flow: str) -> dict[str, Any]:
    """What stands in the tables of one flow: its root, its keypad, and what its keys lead to."""
    nodes = {row[0]: row for row in found["ivr_nodes"] if row[1] == flow}
    (root,) = [row for row in nodes.values() if row[3] == "ANNOUNCE"]
    (keypad,) = [row for row in nodes.values() if row[3] == "KEYPAD"]
    assert (root[2], root[9], keypad[2], keypad[9]) == (None, 0, root[0], 1)
    assert root[7:9] == keypad[7:9], "all nodes have the flow's timeout and retries"
    ways: dict[tuple[str, str | None], Row] = {}
    for _, source, kind, key, target in found["ivr_transitions"]:
        if source in nodes:
            assert source == keypad[0] and nodes[target][2] == keypad[0]
            assert nodes[target][3] == "EXIT" and nodes[target][9:] == (2, "IE")
            ways[kind, key] = nodes[target][4:9]
    assert ways.pop(("INVALID", None)) == ways[("TIMEOUT", None)], "a fallback always exists"
    assert len(nodes) == 2 + len(ways)
    exits = {key or "": row for (_, key), row in ways.items()}
    return {"root": root[5:7], "keypad": keypad[7:9], "exits": exits}


def check(db: Database, model: Model) -> None:
    found = tables(db)
    assert found["registered_numbers"] == sorted(model.numbers.values())
    assert found["call_action_rules"] == sorted(model.rules.values())
    assert found["announcements"] == sorted(model.announcements.values())
    assert found["ivr_flows"] == sorted(model.flows.values())
    assert {key: built(found, key) for key in model.flows} == model.built


@pytest.fixture
def pull(pi: Pi) -> Puller:
    return Puller(pi)


@settings(
    max_examples=examples(18),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(story=st.lists(snapshots, min_size=2, max_size=4))
def test_any_sequence_of_snapshots_ends_in_the_tables_of_the_last_one(
    pull: Puller, story: list[Desired]
) -> None:
    db = pull.db
    db.execute("TRUNCATE registered_numbers, call_action_rules, announcements, ivr_flows CASCADE")
    db.execute("UPDATE serversync.settings SET counts = '{}', held = '{}'")
    model = Model()
    for snapshot in story:
        snapshot.serve(pull.frontend)
        for outcome in pull().values():
            assert not outcome.error
        # What is much smaller than before is held: that has its own tests.
        for name in serversync.SOURCES:
            if db.execute(serversync.SETTINGS_ACCEPT, {"section": name}):
                pull()
        model.take(snapshot)
        check(db, model)
    (extra,) = tables(db)["extra"][0]
    for key in serversync.ACTIONS:
        given_action = story[-1].actions.get(key)
        if given_action is None:
            assert extra[key] == serversync.ACTIONS[key]
        elif given_action["actionType"] != "maybe" and isinstance(
            given_action["actionConfig"], dict
        ):
            assert extra[key] == given_action
    assert not db.rows("SELECT FROM sync_outbox"), "the agent adds no entries"
    other = "(category, action_code) <> ('general', 'VR') OR version < 1"
    assert not db.rows(f"SELECT FROM registered_numbers WHERE {other}")
    assert not db.rows("SELECT FROM announcements WHERE updated_at <> '2026-11-18 09:00:00+00'")

"""The settings that people keep in the frontend, and what the backend's tables hold of them."""

import json
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

import psycopg

import serversync
from agent import agent_env
from desk import Desk
from frontend import Frontend, Json, Request
from pg import Database
from pi import Pi
from waiting import wait_until

PATHS = {
    "number-groups": "/api/number-groups",
    "call-actions": "/api/call-actions",
    "announcements": "/api/announcements",
    "ivr-flows": "/api/ivr-flows/export",
}
AUDIO = "/audio/announcements/"
SECTIONS = list(PATHS)
BUSY = {"actionCode": "BZ"}
VOICE = {"actionCode": "VR"}
# Each table with the columns that the frontend decides, in an order that does not vary.
COLUMNS = {
    "registered_numbers": "phone_number, group_id::text, group_name",
    "call_action_rules": "id::text, name, caller_group_id::text, action_type, action_config,"
    " priority, is_active",
    "announcements": "id::text, name, description, announcement_type, is_active, audio_file_url,"
    " tts_text, duration_sec, language",
    "ivr_flows": "id::text, name, description, is_active",
    "ivr_nodes": "id::text, flow_id::text, parent_id::text, node_type, action_code,"
    " audio_file_url, tts_text, timeout_sec, max_retries, depth, exit_action",
    "ivr_transitions": "id::text, from_node_id::text, input_type, dtmf_key, to_node_id::text",
}
# Where each row lies, and by which transaction: any write of it, even of the same, changes this.
PLACES = "SELECT '{0}', id::text, ctid::text, xmin::text FROM {0}"


def new_id() -> str:
    return str(uuid.uuid4())


def group(*numbers: object, name: object = "a group", id: object = None) -> Json:
    return {"id": id or new_id(), "name": name, "description": None, "phoneNumbers": list(numbers)}


def rule(name: object = "a rule", **more: Any) -> Json:
    fields: Json = {"id": new_id(), "name": name, "callerGroupId": None, "actionType": "allow"}
    return fields | {"actionConfig": dict(VOICE), "isActive": True} | more


def announcement(name: object = "a text", **more: Any) -> Json:
    fields: Json = {"id": new_id(), "name": name, "description": None, "isActive": True}
    fields |= {"announcementType": "greeting", "audioFileUrl": None, "ttsText": "Hello."}
    fields |= {"durationSec": 2.5, "language": "ja", "updatedAt": "2026-11-18T09:00:00.000Z"}
    return fields | more


def route(key: object, code: object = "VR", **more: Any) -> Json:
    return {"dtmfKey": key, "label": f"key {key}", "destination": {"actionCode": code} | more}


def flow(*routes: Json, name: object = "a flow", **more: Any) -> Json:
    fields: Json = {"id": new_id(), "name": name, "description": None, "isActive": True}
    fields |= {"announcementId": None, "timeoutSec": 7, "maxRetries": 1, "routes": list(routes)}
    return fields | {"fallbackAction": {"actionCode": "VM"}} | more


@dataclass
class Desired:
    """What people have entered; `serve` makes the frontend answer with it."""

    groups: list[Any] = field(default_factory=list)
    rules: list[Any] = field(default_factory=list)
    announcements: list[Any] = field(default_factory=list)
    flows: list[Any] = field(default_factory=list)
    actions: Json = field(default_factory=dict)

    @property
    def answers(self) -> dict[str, Json]:
        return {
            "number-groups": {"ok": True, "callerGroups": self.groups},
            "call-actions": {"ok": True, "rules": self.rules, **self.actions},
            "announcements": {"ok": True, "announcements": self.announcements},
            "ivr-flows": {"ok": True, "flows": self.flows},
        }

    def serve(self, frontend: Frontend) -> None:
        for name, answer in self.answers.items():
            frontend.pages[PATHS[name]] = json.loads(json.dumps(answer))


def example() -> Desired:
    """A small office: every table gets rows."""
    friends = group("03-1234-5678", "+819012345678", name="friends")
    greeting = announcement("greeting")
    closed = announcement("closed", announcementType="closed")
    second = flow(route("1", "VM", announcementId=closed["id"]), name="second")
    first = flow(
        route("1", "VB", welcomeAnnouncementId=greeting["id"], recordingEnabled=True),
        route("2", "IV", ivrFlowId=second["id"]),
        name="first",
        announcementId=greeting["id"],
    )
    return Desired(
        [friends],
        [rule("friends", callerGroupId=friends["id"]), rule("all", actionType="deny")],
        [greeting, closed],
        [first, second],
        {"defaultAction": {"actionType": "allow", "actionConfig": VOICE}},
    )


def tables(db: Database) -> dict[str, list[tuple[Any, ...]]]:
    """What the frontend decides of each table, in order."""
    found = {}
    for name, columns in COLUMNS.items():
        live = "WHERE deleted_at IS NULL" if name == "registered_numbers" else ""
        found[name] = db.rows(f"SELECT {columns} FROM {name} {live} ORDER BY 1")
    found["extra"] = db.rows("SELECT extra FROM system_settings WHERE id = 1")
    return found


def places(db: Database) -> set[tuple[str, ...]]:
    """Every row of every table with its place; a heartbeat moves one."""
    return set(db.rows(" UNION ALL ".join(PLACES.format(name) for name in COLUMNS)))


def sections(db: Database) -> dict[str, dict[str, Any]]:
    """What the agent knows of each section."""
    rows = db.dicts("SELECT * FROM serversync.settings ORDER BY position")
    return {row["section"]: row for row in rows}


def skipped(db: Database, name: str) -> list[str]:
    """Why items of a section were skipped."""
    return [each["reason"] for each in sections(db)[name]["remarks"] if each["skipped"]]


def asked(frontend: Frontend, name: str = "") -> list[Request]:
    """The questions for a section, or for all."""
    paths = [PATHS[name]] if name else list(PATHS.values())
    return [request for request in frontend.of_kind("other") if request.path in paths]


def wait_pulls(db: Database, more: int = 2) -> None:
    """Until so many pulls more were finished: the last of them began after this call."""

    def last() -> Any:
        try:
            return db.value("SELECT max(pulled_at) FROM serversync.settings")
        except psycopg.errors.UndefinedTable:
            return None

    for _ in range(more):
        before = last()
        wait_until(lambda: last() != before, what="a pull")  # noqa: B023


def make_schema(db: Database) -> None:
    """The agent's tables, as its first start makes them."""
    db.execute("create schema serversync")
    db.execute(serversync.MIGRATIONS[0])


class _Unhurried(serversync.Process):
    """Without the timer of the deadlines, which is that of pytest-timeout; sockets have their own
    limits."""

    @contextmanager
    def deadline(self, seconds: float, shut: Callable[[], None] | None) -> Iterator[None]:
        yield


class Puller:
    """Pulls as the command does, by real HTTP into a real database, but within the test."""

    def __init__(self, pi: Pi) -> None:
        self.db, self.frontend, self._backend = pi.db, pi.frontend, pi.backend
        self.process = _Unhurried({})
        make_schema(pi.db)

    @contextmanager
    def _tools(
        self, **settings: Any
    ) -> Iterator[tuple[serversync.Config, serversync.Frontend, serversync.Console]]:
        env = agent_env(self.db, self.frontend, self._backend, **settings)
        config = serversync.load_config(env)
        source = serversync.Frontend(config, self.process)
        with closing(source.settings), serversync.Console(config, "tests") as desk:
            yield config, source, desk

    def __call__(self, **settings: Any) -> dict[str, serversync.Section]:
        """One pull that compares everything; what became of each section."""
        with self._tools(**settings) as tools:
            pulled = serversync.pull_now(*tools, True, self.process)
        return {section.name: section for section in pulled}

    def audio(self, between: Callable[[], object] = lambda: None, **settings: Any) -> list[str]:
        """All audio that is due, a try each; what went wrong."""
        troubles = []
        with self._tools(**settings) as (config, source, store):
            audio = serversync.Audio(source, store, config.announcement_audio_dir)
            while (file := audio.next()) is not None and file.wait <= 0:

                def steps(file: serversync.AudioFile = file) -> serversync.Steps[None]:
                    for wait in audio.handle(file):
                        between()
                        yield wait

                try:
                    serversync.drive(steps(), self.process)
                except (serversync.BadItem, serversync.NotNow) as trouble:
                    troubles.append(audio.failed(file, str(trouble)))
        return troubles


class Office(Puller):
    """Pulls for an office: what its people want is in the tables already."""

    def __init__(self, pi: Pi, wanted: Desired | None = None) -> None:
        super().__init__(pi)
        self.desk, self.wanted = Desk(pi.agent), wanted or example()
        self.apply()

    def apply(self) -> dict[str, serversync.Section]:
        """What people want now is pulled."""
        self.wanted.serve(self.frontend)
        return self()

    def held(self) -> list[str]:
        """The sections that are held after that."""
        return [name for name, section in self.apply().items() if section.held]

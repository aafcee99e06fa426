"""What holds for every command: how it ends, and what it makes of an odd state file."""

import fcntl
import json
import os
import re
import signal
import struct
import termios
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import serversync
from agent import Agent, AgentFactory, agent_env
from desk import BIDI, CONTROL, Desk, Terminal, Typist, assert_plain, bury, state_file
from frontend import Frontend, Reply
from pg import Database
from waiting import wait_until

ENTITY = "22222222-2222-4222-8222-222222222222"
# As a terminal leaves it: what runs in the background may have been told to ignore it.
INTERRUPTIBLE = ("env", "--default-signal=INT")
NO_SERVER = "postgresql:///x?host=/nonexistent"
FULL = ("sh", "-c", 'exec "$@" >/dev/full', "sh")


# -- how it ends ----------------------------------------------------------------------------------


def assert_interrupted(command: Agent) -> None:
    command.signal(signal.SIGINT)
    assert command.wait(60) == 130, command.log()
    assert command.log() == ""


def test_ctrl_c_while_the_database_keeps_it_waiting_ends_a_command_without_a_word(
    agent: AgentFactory, schema: None, db: Database
) -> None:
    (letter,) = bury(db, [{"n": 1}])
    lines = [
        ["status"],
        ["dlq", "retry", letter],
        ["replay", "--seq", "1-", "--yes"],
        ["prune", "--yes"],
    ]
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
    with db.connect(autocommit=False) as blocker:
        blocker.execute("LOCK TABLE sync_outbox, serversync.dead_letters, serversync.counters")
        commands = [agent(args=line, prefix=INTERRUPTIBLE) for line in lines]
        wait_until(lambda: db.value(waiting) == len(lines), 60, "all of them at the lock")
        for command in commands:
            assert_interrupted(command)
    assert not db.pending()


def test_ctrl_c_while_it_waits_for_its_payload_ends_enqueue_and_enqueues_nothing(
    agent: AgentFactory, schema: None, db: Database, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "typed")
    with (tmp_path / "typed").open("r+b", buffering=0) as typed:
        typed.write(b'{"half": ')
        reader = (*INTERRUPTIBLE, "sh", "-c", f'exec "$@" <{tmp_path}/typed', "sh")
        command = agent(args=["enqueue", "schedule", ENTITY], prefix=reader)

        def unread() -> int:
            left: int = struct.unpack("i", fcntl.ioctl(typed, termios.FIONREAD, bytes(4)))[0]
            return left

        wait_until(lambda: unread() == 0, 60, "its reading", command.log)
        assert_interrupted(command)
    assert not db.value("SELECT count(*) FROM sync_outbox")


def test_ctrl_c_while_the_frontend_keeps_it_waiting_ends_the_doctor_without_a_verdict(
    agent: AgentFactory, schema: None, frontend: Frontend
) -> None:
    frontend.pages["/api/number-groups"] = Reply(stall=60)
    doctor = agent(args=["doctor"], prefix=INTERRUPTIBLE)
    frontend.wait(lambda: frontend.of_kind("other"), 60, "its question")
    doctor.signal(signal.SIGINT)
    assert doctor.wait(20) == 75
    assert_plain(doctor.log())
    assert doctor.log().splitlines()[-1].startswith("skipped  notify: ")


def test_a_full_disk_behind_the_output_is_one_sentence_and_an_exit_code(
    agent: AgentFactory, schema: None, db: Database
) -> None:
    bury(db, [{"n": 1}])
    lines = ["status"], ["doctor"], ["metrics"], ["dlq", "list"], ["replay", "--seq", "1-"]
    commands = [agent(args=line, prefix=FULL) for line in lines]
    for command in commands:
        assert command.wait(60) == 1, command.log()
        assert_plain(command.log())
        assert command.log() == "serversync: [Errno 28] No space left on device\n"


# -- what it says ---------------------------------------------------------------------------------


def test_whatever_is_in_the_state_file_no_character_of_it_is_obeyed(
    agent: AgentFactory, schema: None, tmp_path: Path
) -> None:
    hostile = f"\x1b]0;title\x07\x1b[32m\x9b2J{BIDI}\ud800\r\ndatabase     well"
    outage = STATE["outages"][0] | {"reason": hostile, "endpoint": hostile}
    state = STATE | {"sentence": hostile, "outages": [outage], "told": [["busy", hostile]]}
    (tmp_path / "state.json").write_text(json.dumps(state))
    desk = Desk(agent)
    here: dict[str, Any] = {"RUNTIME_DIRECTORY": tmp_path}
    # Desk looks at every character of it.
    lines = desk("status", **here).stdout.splitlines()
    # What the agent told, and of the outage where and why.
    assert sum(line.count("database     well") for line in lines) == 3
    assert not any(line.startswith("database     well") for line in lines)
    assert "title" in desk("doctor", code=1, **here).stdout
    view = desk.json("status", **here)
    assert view["agent"]["sentence"] == view["outages"][0]["reason"] == hostile
    texts = [check["text"] for check in desk.json("doctor", code=1, **here)["checks"]]
    assert any("title" in text for text in texts)
    for line in (["status"], ["status", "--watch"], ["doctor"]):
        with Terminal(agent.env(**here), *line, rows=60, columns=250) as terminal:
            terminal.wait_for("title")
        plain = re.sub(r"\x1b\[([JH]|\?1049[hl])|\r\n", "", terminal.written)
        assert not CONTROL & set(plain), (line, plain)
        assert "\x1b[32m\x9b" not in terminal.written


def test_a_schema_of_a_newer_version_is_78_and_the_doctor_knows_what_to_do(
    schema: None, typist: Typist, db: Database
) -> None:
    db.execute("INSERT INTO serversync.schema_version VALUES (99)")
    db.execute("ALTER TABLE serversync.dead_letters RENAME attempts TO charged")
    assert "run: sudo serversync doctor" in typist("dlq", "list", code=78).stderr
    assert "newer version" in typist("once", code=78).stderr
    assert "version 99" in typist("doctor", code=1).stdout


def test_whoever_only_wants_sql_to_be_printed_opens_no_directory(
    typist: Typist, tmp_path: Path
) -> None:
    for option in ("--recordings", "--announcements"):
        refused = typist("setup", "--print-sql", option, str(tmp_path), code=2)
        assert refused.stdout == "" and "name no directory" in refused.stderr


def test_a_right_that_the_role_lacks_is_78_and_the_line_that_grants_it_of_every_command(
    agent: AgentFactory, schema: None, typist: Typist, db: Database
) -> None:
    (letter,) = bury(db, [{"n": 1}])
    name = f"{db.name}_poor"
    with db.admin() as admin:
        admin.execute(f"CREATE ROLE {name} LOGIN")
    try:
        poor: dict[str, Any] = {"DATABASE_URL": db.cluster.url(db.name, user=name)}
        lines = ["dlq list", "dlq retry-all", "replay --seq 1- --yes", "prune --yes", "settings"]
        lines += [f"dlq show {letter}", f"dlq retry {letter}", f"dlq delete {letter} --yes"]
        lines += ["settings pull", "settings accept call-actions", "once"]
        for rights in ("", f"GRANT SELECT, UPDATE ON sync_outbox, recordings, system_settings"
                           f" TO {name}"):  # fmt: skip
            with db.admin() as admin:
                admin.execute(rights or "SELECT 1")
            for line in lines:
                told = typist(*line.split(), code=78, **poor).stderr
                assert "sudo serversync setup" in told and "LINE 1" not in told, line
    finally:
        with db.admin() as admin:
            admin.execute(f"DROP OWNED BY {name}; DROP ROLE {name}")


# -- its connection -------------------------------------------------------------------------------


def test_a_connection_that_could_not_be_prepared_leaves_nothing_behind(
    agent: AgentFactory, db: Database
) -> None:
    """Its number goes to the next socket, which must not be shut in its place 20 s later."""
    with db.admin() as admin:
        admin.execute("REVOKE EXECUTE ON FUNCTION pg_catalog.set_config FROM public")
    settings = agent.env()
    config = serversync.load_config(settings)

    with pytest.raises(serversync.Unavailable, match="set_config"):
        serversync.Console(config, "tests")

    def timers() -> list[threading.Thread]:
        return [each for each in threading.enumerate() if isinstance(each, threading.Timer)]

    wait_until(lambda: not timers(), 10, "the end of its timer")
    query = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'serversync tests'"
    wait_until(lambda: not db.value(query), 10, "the end of its session")


def test_a_number_that_is_no_socket_any_more_is_left_alone_and_nothing_leaks() -> None:
    def open_now() -> set[str]:
        return set(os.listdir("/proc/self/fd"))

    read, write = os.pipe()
    before = open_now()
    serversync.shut_socket(read)
    assert len(open_now()) == len(before)
    os.write(write, b"x")
    assert os.read(read, 1) == b"x"
    os.close(read)
    os.close(write)
    serversync.shut_socket(read)


# -- the state file: only the service's account can write it, and everybody reads it --------------


STATE = state_file(os.getpid())


def odd_files(directory: Path) -> Iterator[Path]:
    """Directories with what may stand in its place, and is none."""

    def named(name: str) -> Path:
        (directory / name).mkdir()
        return directory / name / "state.json"

    good = json.dumps(STATE)
    os.mkfifo(named("a fifo"))
    real = named("a link")
    (real.parent / "another").write_text(good)
    real.symlink_to("another")
    named("a directory").mkdir()
    with named("too large").open("w") as file:
        file.write(good)
        file.truncate(3 << 30)
    named("too deep").write_text(f'{good[:-1]}, "more": {"[" * 200_000}')
    yield from sorted(directory.iterdir())


def test_what_is_no_state_file_keeps_nobody_waiting_and_is_no_agent(
    agent: AgentFactory, schema: None, tmp_path: Path
) -> None:
    (tmp_path / "odd").mkdir()
    found = list(odd_files(tmp_path / "odd"))
    commands = {path: agent(args=["status", "--json"], runtime_dir=path) for path in found}
    for path, command in commands.items():
        assert command.wait(60) == 69, (path, command.log())
        assert json.loads(command.log())["agent"]["state"] == "stopped", path
    # These, too, ask as root whose agent runs.
    for line, code in ((["doctor"], 1), (["metrics"], 0), (["dlq", "list"], 0)):
        command = agent(args=line, runtime_dir=tmp_path / "odd" / "a fifo")
        assert command.wait(60) == code, command.log()
        assert_plain(command.log())


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to each value in it."""
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    for key, each in inner:
        yield (*path, key)
        if isinstance(each, dict | list):
            yield from places(each, (*path, key))


GONE = object()


def with_change(path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    """The state with another value in one place, or with none there."""
    changed: dict[str, Any] = json.loads(json.dumps(STATE))
    place: Any = changed
    for key in path[:-1]:
        place = place[key]
    if value is GONE:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return changed


@pytest.fixture
def alone() -> serversync.Config:
    """A configuration that leads to no database."""
    settings = agent_env(None, None, None, DATABASE_URL=NO_SERVER, FRONTEND_BASE_URL="http://x")
    return serversync.load_config(settings)


def test_a_state_file_of_another_version_is_shown_as_far_as_it_goes(
    alone: serversync.Config, tmp_path: Path
) -> None:
    here = {"RUNTIME_DIRECTORY": str(tmp_path)}

    def assert_shown(state: Any) -> str:
        """People get their screen, machines their JSON and their metrics."""
        text = state if isinstance(state, str) else json.dumps(state)
        (tmp_path / "state.json").write_text(text)
        view = serversync.survey(alone, here)
        assert json.loads(serversync.as_json(view))["agent"] == view["agent"]
        assert serversync.status_screen(view).startswith("serversync ")
        assert "serversync_up " in serversync.metrics_text(alone, here)
        return str(view["agent"]["state"])

    assert assert_shown(STATE) == "running"
    assert assert_shown(STATE | {"of_a_later_version": [{}]}) == "running"
    for nonsense in ("", "{", "[1]", "null", '{"pid": "x"}', '{"since": 1}'):
        assert assert_shown(nonsense) == "stopped", nonsense
    odd = [GONE, None, True, -1, 1e300, "", "text", [], [{}], [None], {}, {"x": [1]}]
    for path in list(places(STATE)):
        for value in odd:
            assert_shown(with_change(path, value))

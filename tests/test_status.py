"""`serversync status`: one screen, its JSON, and the screen that repaints itself; how every command
ends, and what it makes of an odd state file."""

import json
import os
import re
import signal
import termios
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pytest

import serversync
from agent import Agent, AgentFactory, agent_env, run_once, write_env_file
from backend import Backend
from desk import (
    BIDI,
    CLOCK,
    CONTROL,
    Desk,
    Terminal,
    Typist,
    assert_plain,
    bury,
    give_up,
    state_file,
)
from frontend import Frontend, Reply, Request
from ledger import hold, locked, uploads, waiting
from machine import NOBODY, NOBODY_APART, in_mounts, needs_root
from pg import Database
from pi import Pi
from proxy import Proxy
from waiting import wait_until

SHAPE = {
    "version": 0,
    "device": 0,
    "host": 0,
    "utc_offset": 0,
    "at": 0,
    "frontend": 0,
    "outages": 0,
    "progress": 0,
    "agent": {"state", "pid", "since", "sentence", "seen_at", "inflight"},
    "database": {"ok", "error"},
    "outbox": {"pending", "oldest_at", "oldest_seconds", "by_type", "waiting", "reasons"},
    "recordings": {
        *("waiting", "waiting_bytes", "deletions_waiting", "deletions_failed"),
        *("directory", "bytes", "disk_free", "disk_total"),
    },
    "dead_letters": {"PENDING", "RETRYING", "RESOLVED", "DEAD"},
    "deliveries": {"last_success_at", "hour", "day"},
    "settings": {"interval", "trouble", "sections", "audio", "pulled_at", "items"},
    "checks": {"listening"},
    "health": {"state", "sentence"},
}


def beside(running: Agent) -> dict[str, Any]:
    """The settings of a command that finds this agent's state file."""
    return {"RUNTIME_DIRECTORY": running.runtime_dir}


MANY_ROWS = """
    INSERT INTO sync_outbox (entity_type, entity_id, payload, processed_at)
    SELECT (array['call_log', 'recording', 'schedule'])[1 + n %% 3], gen_random_uuid(),
           jsonb_build_object('id', n, 'name', repeat('a name ', 20)),
           CASE WHEN n %% 2 = 0 THEN now() END
    FROM generate_series(1, %(count)s::int) n
"""


def rows_of(text: str) -> dict[str, str]:
    """The screen's words by their titles; what goes on below a title belongs to it."""
    rows: dict[str, str] = {}
    title = ""
    for line in text.splitlines()[2:]:
        title = line[:13].strip() or title
        rows[title] = f"{rows.get(title, '')} {line[13:]}".strip()
    return rows


def moment(text: str) -> float:
    at = datetime.fromisoformat(text)
    assert at.tzinfo is not None
    return at.timestamp()


# -- the agent ------------------------------------------------------------------------------------


def test_a_running_agent_with_nothing_to_do(pi: Pi, desk: Desk) -> None:
    before = time.time()
    running = pi.idle()

    screen = desk("status", **beside(running)).stdout
    first = " ".join(screen.splitlines()[0].split())
    assert first == f"serversync {serversync.__version__}, device test-device, to {pi.frontend.url}"
    rows = rows_of(screen)
    assert set(rows) == {"health", "agent", "outbox", "dead letters", "delivered", "recordings"}
    assert rows["health"] == "all delivered; nothing was sent yet"
    assert re.fullmatch(rf"running for \d+ (s|min) \(pid {running.pid}\)", rows["agent"])
    assert rows["outbox"] == "nothing pending" and rows["dead letters"] == "none"
    assert rows["delivered"].startswith("never yet; in the last hour 0 entries and 0 recordings")
    assert rows["recordings"].startswith("0 to upload, 0 to delete, ")
    assert re.search(r"\d GB of [\d.]+ GB free$", rows["recordings"])

    view = desk.json("status", **beside(running))
    assert set(view) == set(SHAPE)
    for part, keys in SHAPE.items():
        if isinstance(keys, set):
            assert set(view[part]) == keys, part
    assert (view["version"], view["device"]) == (serversync.__version__, "test-device")
    assert view["frontend"] == pi.frontend.url
    assert before - 1 <= moment(view["at"]) <= time.time()
    seen = view["agent"]
    assert (seen["state"], seen["pid"], seen["inflight"]) == ("running", running.pid, 0)
    assert before - 1 <= moment(seen["since"]) <= moment(seen["seen_at"]) <= time.time()
    assert seen["sentence"] == "all delivered; nothing was sent yet"
    assert view["database"] == {"ok": True, "error": None}
    numbers = dict.fromkeys(("pending", "oldest_seconds", "waiting"), 0)
    assert view["outbox"] == numbers | {"oldest_at": None, "by_type": {}, "reasons": {}}
    assert view["recordings"]["directory"] == str(pi.backend.recordings_dir)
    assert view["dead_letters"] == dict.fromkeys(SHAPE["dead_letters"], 0)  # type: ignore[call-overload]
    nothing = {"entries": 0, "files": 0, "bytes": 0}
    assert view["deliveries"] == {"last_success_at": None, "hour": nothing, "day": nothing}
    assert view["checks"] == {"listening": True}
    assert view["outages"] == [] and view["progress"] is None
    assert view["health"] == {"state": "good", "sentence": seen["sentence"]}


def test_a_standby_is_shown_as_one_and_without_an_agent_the_exit_code_says_so(
    pi: Pi, typist: Typist
) -> None:
    running, second = pi.idle(), pi.agent()
    second.wait_sentence("standby")
    rows = rows_of(typist("status", **beside(second)).stdout)
    assert rows["agent"].startswith("standby for ")
    assert rows["health"] == "standby: another agent holds the lock"
    assert typist.json("status", **beside(second))["agent"]["state"] == "standby"
    second.kill()
    assert "another agent" in typist("once", code=75).stderr
    # Another host, or another /run: the database knows that there is one.
    rows = rows_of(typist("status", code=69).stdout)
    assert rows["health"] == "the agent is not seen here, but another session holds the lock"
    assert typist.json("status", code=69)["agent"] == {
        "state": "elsewhere",
        **dict.fromkeys(("pid", "since", "sentence", "seen_at", "inflight")),
    }
    running.kill()
    wait_until(lambda: not locked(pi.db), what="the end of its session")
    pi.backend.enqueue()
    # Its state file is still there.
    rows = rows_of(typist("status", code=69, **beside(running)).stdout)
    assert rows["health"].startswith("the agent is not running: sudo systemctl start serversync")
    assert rows["health"].endswith("; 1 waiting")
    assert re.fullmatch(r"1 pending, the oldest for \d+ (s|min): schedule 1", rows["outbox"])
    view = typist.json("status", code=69, **beside(running))
    assert view["agent"]["state"] == "stopped" and view["outbox"]["pending"] == 1
    assert view["agent"]["pid"] is view["agent"]["sentence"] is None


@needs_root
@pytest.mark.parametrize("who", [NOBODY_APART, NOBODY], ids=["the same user apart", "another user"])
def test_an_agent_that_proc_hides_is_seen_all_the_same(
    agent: AgentFactory, public: Path, who: tuple[str, ...]
) -> None:
    """ProtectProc=invisible hides a process in another user namespace even from its own user: so
    the admin interface's unit would never see the agent's."""
    owner = NOBODY if who is NOBODY_APART else ()
    running = agent(prefix=owner, runtime_dir=public)
    running.wait_sentence("all delivered")
    settings = write_env_file(public / "settings", agent.env())
    hidden = f"! test -e /proc/{running.pid}"
    prefix = (
        *in_mounts("mount -t proc -o hidepid=invisible proc /proc"),
        *(*who, "sh", "-e", "-c", f'{hidden}\nexec "$@"', "sh"),
    )

    args = ("--env-file", str(settings), "status", "--json")
    done = run_once({"RUNTIME_DIRECTORY": str(public)}, args=args, env_file=False, prefix=prefix)

    seen = json.loads(done.stdout)["agent"]
    assert (seen["state"], seen["pid"]) == ("running", running.pid)
    assert seen["sentence"] == "all delivered; nothing was sent yet"
    assert done.returncode == 0


def test_a_clock_that_is_set_right_after_the_start_changes_no_age(
    desk: Desk, agent: AgentFactory, backend: Backend, libfaketime: Path, tmp_path: Path
) -> None:
    """Without a battery it is 1970, or the last shutdown, until NTP has answered."""
    clock = tmp_path / "clock"
    clock.write_text("-20000d\n")
    running = agent(
        LD_PRELOAD=libfaketime,
        FAKETIME_TIMESTAMP_FILE=clock,
        FAKETIME_NO_CACHE=1,
        FAKETIME_DONT_FAKE_MONOTONIC=1,
    )
    running.wait_sentence("all delivered")
    assert running.state()["since"] < time.time() - 19_999 * 86_400
    clock.write_text("+0\n")
    backend.enqueue()
    running.wait_sentence("last: 1 entry")
    assert time.time() - 300 < running.state()["since"] <= time.time()
    agent_row = rows_of(desk("status", **beside(running)).stdout)["agent"]
    assert re.match(r"running for \d+ (s|min) ", agent_row), agent_row


# -- the database ---------------------------------------------------------------------------------


def test_without_a_database_it_says_so_and_shows_what_else_there_is(
    desk: Desk, agent: AgentFactory, db: Database, proxy: Proxy
) -> None:
    url: dict[str, Any] = {"DATABASE_URL": db.url_through(proxy.port)}
    running = agent(**url)
    running.wait_sentence("all delivered")
    proxy.refuse()
    proxy.cut()
    running.wait_sentence("the database is not there")

    rows = rows_of(desk("status", code=69, **beside(running), **url).stdout)
    assert set(rows) == {"health", "agent", "recordings"}
    assert "running" in rows["agent"]
    assert rows["health"].startswith("the database is not there: ")
    assert rows["health"].count("the database is not there") == 1
    assert rows["recordings"].endswith(" free")
    view = desk.json("status", code=69, **beside(running), **url)
    assert view["database"]["ok"] is False and "not there" in view["database"]["error"]
    assert view["outbox"] is view["dead_letters"] is view["deliveries"] is None
    assert view["agent"]["state"] == "running" and view["recordings"]["disk_free"] > 0
    assert view["checks"]["listening"] is False


def test_without_the_schema_it_names_the_command_that_makes_it_and_never_a_password(
    typist: Typist,
) -> None:
    rows = rows_of(typist("status", code=69).stdout)
    assert "sudo serversync setup" in rows["health"]
    assert rows["health"].startswith("the agent is not running")
    url = "postgresql://someone:hunter-of-9@127.0.0.1:9/x"
    for how in ([], ["--json"]):
        assert "hunter-of-9" not in typist("status", *how, code=69, DATABASE_URL=url).stdout


def test_a_recordings_directory_that_is_not_there_is_named_and_entries_of_no_date_are_counted(
    pi: Pi, typist: Typist, tmp_path: Path
) -> None:
    pi.agent.once()
    pi.backend.enqueue()
    missing: dict[str, Any] = {"SYNC_RECORDINGS_DIR": tmp_path / "unmounted"}
    for when in ("infinity", "-infinity"):
        pi.db.execute("UPDATE sync_outbox SET created_at = %s", (when,))
        shown = typist("status", code=69, **missing).stdout
        assert "1 pending" in shown
        assert f"{tmp_path / 'unmounted'} cannot be read" in rows_of(shown)["recordings"]
        view = typist.json("status", code=69, **missing)
        assert view["outbox"]["pending"] == 1
        assert view["recordings"]["bytes"] is view["recordings"]["disk_free"] is None


# -- what waits, and why --------------------------------------------------------------------------


def test_everything_that_waits_is_counted_with_its_reasons(pi: Pi, desk: Desk) -> None:
    (letter,) = give_up(pi.agent, pi.backend, pi.frontend, "schedule")
    pi.backend.end_call()  # is uploaded, and cannot be deleted
    (pi.backend.recordings_dir / ".serversync-trash").write_text("in the way of each deletion")
    pi.once()
    bad = uuid.uuid4()
    pi.frontend.poison[str(bad)] = Reply(500)
    pi.backend.enqueue("call_log", entity_id=str(bad))
    pi.frontend.on_file = lambda request: Reply(502)
    late = pi.backend.end_call(seconds=3)
    pi.agent.once()
    pi.db.execute("UPDATE sync_outbox SET created_at = now() - interval '3 hours'")
    pi.db.execute(
        "UPDATE serversync.deliveries SET started_at = started_at - interval '2 hours'"
        " WHERE id = (SELECT min(id) FROM serversync.deliveries)"
    )
    assert len(waiting(pi.db)) == 2 and len(uploads(pi.db)) == 1
    hold(pi.db)

    rows = rows_of(desk("status", code=69).stdout)
    assert rows["outbox"] == (
        "2 pending, the oldest for 3 h: call_log 1, recording_file 1"
        " 2 of them failed, or wait: FRONTEND_5XX 2"
    )
    assert rows["dead letters"] == "1 PENDING"
    assert rows["recordings"].startswith("1 to upload (96.0 kB), 1 to delete, 1 cannot be deleted,")
    line = r"last \d+ (s|min) ago; in the last hour \d+ entries and 1 recording \([\d.]+ kB\)"
    assert re.fullmatch(line, rows["delivered"])

    view = desk.json("status", code=69)
    health = view["health"]
    assert health["state"] == "stopped" and re.fullmatch(
        "the agent is not running: sudo systemctl start serversync; 1 dead letter needs you;"
        " 1 uploaded recording cannot be deleted; 2 retrying: the frontend has trouble: HTTP 50."
        rf".*; next try {CLOCK}",
        health["sentence"],
    )
    outbox = view["outbox"]
    assert 3 * 3600 <= outbox.pop("oldest_seconds") < 3 * 3600 + 600
    assert abs(moment(outbox.pop("oldest_at")) - (time.time() - 3 * 3600)) < 600
    assert outbox == {
        "pending": 2,
        "by_type": {"call_log": 1, "recording_file": 1},
        "waiting": 2,
        "reasons": {"FRONTEND_5XX": 2},
    }
    found = view["recordings"]
    assert (found["waiting"], found["waiting_bytes"]) == (1, late.size)
    assert (found["deletions_waiting"], found["deletions_failed"]) == (1, 1)
    assert 0 < found["bytes"] < found["disk_free"] < found["disk_total"]  # test_metrics.py has them
    assert view["dead_letters"] == {"PENDING": 1, "RETRYING": 0, "RESOLVED": 0, "DEAD": 0}
    sent = pi.db.dicts(
        "SELECT kind, sum(entries) AS n, sum(bytes) AS bytes, max(started_at) AS last,"
        " min(started_at) < now() - interval '1 hour' AS old FROM serversync.deliveries GROUP BY 1"
    )
    by_kind = {row["kind"]: row for row in sent}
    day, hour = view["deliveries"]["day"], view["deliveries"]["hour"]
    assert (day["entries"], day["files"]) == (by_kind["entries"]["n"], by_kind["file"]["n"])
    assert day["bytes"] == by_kind["entries"]["bytes"] + by_kind["file"]["bytes"]
    assert hour["entries"] < day["entries"] and hour["files"] == day["files"] == 1
    assert moment(view["deliveries"]["last_success_at"]) >= by_kind["entries"]["last"].timestamp()
    assert letter.id not in json.dumps(view)


def test_an_outage_is_shown_with_its_age_its_reason_and_the_next_try_on_sixty_columns(
    pi: Pi, desk: Desk
) -> None:
    pi.frontend.on_entries = lambda request: Reply(429, {"Retry-After": "3600"}, body="x" * 100)
    pi.backend.enqueue()
    running = pi.agent()
    wait_until(lambda: running.state()["outages"], what="the outage", state=running.log)

    rows = rows_of(desk("status", **beside(running)).stdout)
    why = "the frontend asks for a pause: .*429.*"
    line = rf"nothing gets through since {CLOCK}: {why}; next try {CLOCK}"
    assert re.fullmatch(line, rows["health"]), rows
    outages = desk.json("status", **beside(running))["outages"]
    assert [outage["endpoint"] for outage in outages] == ["entries", "files"]
    for outage in outages:
        assert set(outage) == {"endpoint", "code", "reason", "since", "next_try_at"}
        assert outage["code"] == "RATE_LIMITED" and outage["reason"] in rows["health"]
        assert moment(outage["since"]) <= time.time()
        lasts = moment(outage["next_try_at"]) - moment(outage["since"])
        assert 3500 <= lasts <= 4020  # the random part

    env = pi.agent.env(**beside(running))
    with Terminal(env, "status", "--watch", rows=30, columns=60) as terminal:
        terminal.wait_for("next try")
        assert terminal.screen.scrolled == 0 and terminal.screen.text.count("serversync 0") == 1
        wait_until(lambda: len(terminal.frames) >= 3, 60, "some screens")
        columns = [line[:13].strip() for line in terminal.screen.text.splitlines()[2:]]
        assert [title for title in columns if title][:3] == ["health", "agent", "outbox"]
        before = terminal.modes
        terminal.press("q")
        assert terminal.wait() == 0
        assert termios.tcgetattr(terminal._master) == before


# -- on a terminal --------------------------------------------------------------------------------


BAR = re.compile(r"^drain +\[(#*)(\.*)\] +(\d+) % +(.*)$", re.M)


def bars(frames: list[str]) -> list[tuple[int, str]]:
    """Of each frame with a bar: its per cent, and the words behind it."""
    found, widths = [], set()
    for frame in frames:
        if match := BAR.search(frame):
            full, width = len(match[1]), len(match[1] + match[2])
            widths.add(width)
            # The nearest place, and the nearest per cent.
            assert abs(full / width - int(match[3]) / 100) <= 0.5 / width + 0.006
            found.append((int(match[3]), match[4]))
    assert len(widths) <= 1
    assert [full for full, _ in found] == sorted(full for full, _ in found)
    return found


def assert_restored(terminal: Terminal) -> None:
    """The terminal is as it was, and the last screen stays; all were painted in place: on the
    alternate screen, from its first corner on, and nothing has moved away."""
    assert not terminal.screen.alternate
    assert terminal.screen.column == 0
    assert "serversync" in terminal.screen.text and "Traceback" not in terminal.written
    assert terminal.written.startswith("\x1b[?1049h\x1b[H")
    assert terminal.written.count("\x1b[?1049h") == terminal.written.count("\x1b[?1049l") == 1
    assert terminal.written.count("\x1b[H") >= 3
    assert "\x1b[2J" not in terminal.written  # would flicker
    assert terminal.screen.scrolled == 0


def end(terminal: Terminal) -> None:
    """Ctrl-C."""
    terminal.press("\x03")
    assert terminal.wait() == 0
    assert_restored(terminal)


def test_watching_shows_how_far_a_drain_is_and_then_that_it_is_over(pi: Pi) -> None:
    go_on: list[bool] = []

    def slowly(request: Request) -> None:
        if not go_on:
            time.sleep(0.1)

    pi.frontend.on_entries = slowly
    pi.backend.enqueue_many(1000)
    running = pi.agent(SYNC_BATCH_SIZE=10)
    with Terminal(pi.agent.env(**beside(running)), "status", "--watch") as terminal:
        wait_until(
            lambda: len({full for full, _ in bars(terminal.frames)}) >= 3,
            90,
            "a bar that grows",
            lambda: terminal.screen.text,
        )
        go_on.append(True)
        terminal.wait_for("nothing pending")
        wait_until(lambda: not BAR.search(terminal.screen.text), what="the end of the bar")
        end(terminal)
    words = r"\d+ of (\d+) entries, \d+/s(, \d+ (s|min) left)?"
    totals = [re.fullmatch(words, text) for _, text in bars(terminal.frames)]
    # What was sent since the agent last wrote its state file is in neither part of the total.
    assert all(match and int(match[1]) <= 1000 for match in totals)
    assert any(match and match[2] for match in totals)


def test_watching_goes_on_while_the_database_comes_and_goes(
    agent: AgentFactory, db: Database, proxy: Proxy, hurry: Callable[..., None]
) -> None:
    hurry(CONSOLE_LIMIT=2)
    agent.once()
    proxy.refuse()
    env = agent.env(DATABASE_URL=db.url_through(proxy.port))
    with Terminal(env, "status", "--watch") as terminal:
        terminal.wait_for("Connection refused")
        proxy.resume()
        terminal.wait_for("nothing pending")
        assert "database" not in terminal.screen.text
        proxy.silent()
        painted = len(terminal.frames)
        wait_until(lambda: len(terminal.frames) > painted, 60, "another screen")
        end(terminal)


def test_the_screen_fits_however_many_types_wait_and_a_signal_leaves_the_terminal_as_it_was(
    pi: Pi, typist: Typist
) -> None:
    pi.agent.once()
    for number in range(120):
        pi.backend.enqueue(f"{number:03} an entity type as long")
    # One screen: for whoever types it, and in place for whoever watches.
    with Terminal(pi.agent.env(), "status") as terminal:
        terminal.wait()
        assert "120 pending" in terminal.screen.text and terminal.screen.scrolled == 0
    with Terminal(pi.agent.env(), "status", "--watch") as terminal:
        terminal.wait_for("120 pending")
        wait_until(lambda: len(terminal.frames) >= 3, 60, "some screens")
        os.kill(terminal.pid, signal.SIGTERM)
        terminal.wait()
        assert_restored(terminal)
    assert len(typist.json("status", code=69)["outbox"]["by_type"]) == 120


def test_a_mistake_in_the_file_hides_nothing_else(
    desk: Desk, agent: AgentFactory, backend: Backend
) -> None:
    running = agent()
    running.wait_sentence("all delivered")
    done = desk("status", code=78, SYNC_BATCH_SIZE="many", SYNC_BACH_SIZE=1, **beside(running))
    rows = rows_of(done.stdout)
    said = r"the configuration has a mistake: SYNC_BACH_SIZE is unknown: .*SYNC_BATCH_SIZE must be"
    assert re.match(said, rows["health"]) and rows["outbox"] == "nothing pending"
    assert rows["agent"].startswith("running")
    rows = rows_of(desk("status", code=78, DATABASE_URL="mysql:", **beside(running)).stdout)
    assert "DATABASE_URL must" in rows["health"] and rows["agent"].startswith("running")
    view = desk.json("status", code=78, DATABASE_URL="mysql:")
    assert view["database"] == {"ok": False, "error": "the database is not known"}
    assert view["health"]["state"] == "stopped"


def test_watching_into_a_pipe_prints_plain_screens_until_nobody_reads(agent: AgentFactory) -> None:
    agent.once()
    reader = ["bash", "-c", '"$@" | head -20; echo "${PIPESTATUS[0]}"', "bash"]
    watching = agent(args=["status", "--watch"], prefix=reader)
    watching.wait(60)
    lines = watching.log().splitlines()
    assert sum(line.startswith("serversync ") for line in lines) >= 2 and "\x1b" not in lines[0]
    assert "Traceback" not in watching.log() and lines[-1] == "0"


# -- a large outbox -------------------------------------------------------------------------------


def test_status_doctor_and_metrics_are_quick_beside_a_million_rows_half_of_them_pending(
    desk: Desk, schema: None, db: Database
) -> None:
    def seconds(command: str) -> float:
        started = time.monotonic()
        run_once(desk.agent.env(), 120, (command,), prefix=("env",))  # with all of its start
        return time.monotonic() - started

    commands = ("status", "doctor", "metrics")
    db.execute(MANY_ROWS, {"count": 1000})
    few = {command: min(seconds(command) for _ in range(3)) for command in commands}
    db.execute(MANY_ROWS, {"count": 1_000_000})
    for command in commands:
        most = 10 * few[command]
        assert any(seconds(command) < most for _ in range(3)), f"{command}: {few[command]:.2f}"


# -- how every command ends -----------------------------------------------------------------------


# As a terminal leaves it: what runs in the background may have been told to ignore it.
INTERRUPTIBLE = ("env", "--default-signal=INT")
FULL = ("sh", "-c", 'exec "$@" >/dev/full', "sh")


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
            command.signal(signal.SIGINT)
            assert command.wait(60) == 130, command.log()
            assert command.log() == ""
    assert not db.pending()


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


def test_whoever_only_wants_sql_to_be_printed_opens_no_directory(
    typist: Typist, tmp_path: Path
) -> None:
    for option in ("--recordings", "--announcements"):
        refused = typist("setup", "--print-sql", option, str(tmp_path), code=2)
        assert refused.stdout == "" and "name no directory" in refused.stderr


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


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to each value in it."""
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    for key, each in inner:
        yield (*path, key)
        if isinstance(each, dict | list):
            yield from places(each, (*path, key))


def test_a_state_file_of_another_version_is_shown_as_far_as_it_goes_and_what_is_none_is_no_agent(
    agent: AgentFactory, schema: None, tmp_path: Path
) -> None:
    nowhere = {"DATABASE_URL": "postgresql:///x?host=/nonexistent", "FRONTEND_BASE_URL": "http://x"}
    alone = serversync.load_config(agent_env(None, None, None, **nowhere))
    (mine := tmp_path / "mine").mkdir()

    def shown(directory: Path) -> str:
        """People get their screen, machines their JSON and their metrics."""
        here = {"RUNTIME_DIRECTORY": str(directory)}
        view = serversync.survey(alone, here)
        assert json.loads(serversync.as_json(view))["agent"] == view["agent"]
        assert serversync.status_screen(view).startswith("serversync ")
        assert "serversync_up " in serversync.metrics_text(alone, here)
        return str(view["agent"]["state"])

    def shown_of(state: Any) -> str:
        (mine / "state.json").write_text(state if isinstance(state, str) else json.dumps(state))
        return shown(mine)

    assert shown_of(STATE) == "running"
    assert shown_of(STATE | {"of_a_later_version": [{}]}) == "running"
    for nonsense in ("", "{", "[1]", "null", '{"pid": "x"}', '{"since": 1}'):
        assert shown_of(nonsense) == "stopped", nonsense
    odd: list[Any] = [None, True, -1, 1e300, "", "text", [], [{}], [None], {}, {"x": [1]}]
    for *way, last in list(places(STATE)):
        changed = json.loads(json.dumps(STATE))
        place = reduce(getitem, way, changed)
        for value in odd:
            place[last] = value
            shown_of(changed)
        del place[last]
        shown_of(changed)
    (tmp_path / "odd").mkdir()
    for directory in odd_files(tmp_path / "odd"):
        assert shown(directory) == "stopped", directory
    # These, too, ask as root whose agent runs; nothing keeps them waiting.
    for line, code in ((["status"], 69), (["doctor"], 1), (["metrics"], 0), (["dlq", "list"], 0)):
        command = agent(args=line, runtime_dir=tmp_path / "odd" / "a fifo")
        assert command.wait(60) == code, command.log()
        assert_plain(command.log())

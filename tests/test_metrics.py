"""`serversync metrics`: what it prints, what it counts; and the alerts and the dashboard on it."""

import json
import os
import re
import shutil
import subprocess
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import serversync
from agent import REPOSITORY, Agent, AgentFactory
from frontend import Reply
from ledger import entity_of, hold, let_hours_pass
from pg import Database
from pi import Pi
from settings import example, sections
from waiting import wait_until

RULES = REPOSITORY / "packaging" / "prometheus" / "serversync.rules.yml"
RULES_TEST = RULES.with_name("serversync.rules.test.yml")
DASHBOARD = REPOSITORY / "packaging" / "grafana" / "serversync.json"
UNPACKED = REPOSITORY / ".venv" / "debian"  # by tests/run
SAMPLE = re.compile(r'([a-z_]+)(?:\{((?:[a-z0-9_]+="(?:[^"\\]|\\.)*",?)*)\})? (\S+)')
LABEL = re.compile(r'([a-z0-9_]+)="((?:[^"\\]|\\.)*)"')
NAME = re.compile(r"\b(?:serversync|outbox)_[a-z_]+")

Sample = tuple[str, ...]  # the name and the values of its labels


class Scrape(dict[Sample, float]):
    """What `serversync metrics` printed: scrape("name", "value of a label")."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text
        self.types = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.M))
        for line in text.splitlines():
            if not line.startswith("#"):
                match = SAMPLE.fullmatch(line)
                assert match, line
                key = (match[1], *(value for _, value in LABEL.findall(match[2] or "")))
                assert key not in self, line
                self[key] = float(match[3])

    def __call__(self, *key: str) -> float:
        return self[key]

    @property
    def names(self) -> set[str]:
        return {key[0] for key in self}

    def series(self, name: str) -> dict[str, float]:
        """A name's samples by the value of its label."""
        return {key[1]: value for key, value in self.items() if key[0] == name and len(key) == 2}

    def counted(self) -> dict[Sample, float]:
        """What may only grow: the samples of counters and histograms."""
        growing = {name for name, kind in self.types.items() if kind != "gauge"}
        endings = {name: re.sub(r"_(bucket|sum|count)$", "", name) for name in self.names}
        names = growing | {name for name, family in endings.items() if family in growing}
        return {key: value for key, value in self.items() if key[0] in names}


def scrape(agent: AgentFactory, running: Agent | None = None, **settings: Any) -> Scrape:
    """What is printed now; `running`: the agent whose state file is there to be read."""
    if running is not None:
        settings["RUNTIME_DIRECTORY"] = running.runtime_dir
    done = agent.once("metrics", **settings)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return Scrape(done.stdout)


@dataclass
class Numbers:
    """Looks without starting a program for each look."""

    config: serversync.Config

    def scrape(self, running: Agent | None = None) -> Scrape:
        directory = str(running.runtime_dir if running else "/nonexistent")
        return Scrape(serversync.metrics_text(self.config, {"RUNTIME_DIRECTORY": directory}))

    def backlog(self) -> list[int]:
        """How many entries waited at the end of each quarter of an hour of the day until now."""
        with serversync.Console(self.config, "tests") as desk:
            return [slot["backlog"] for slot in desk.run(serversync.HISTORY)[0][0]]


@pytest.fixture
def numbers(agent: AgentFactory) -> Numbers:
    settings = agent.env()
    return Numbers(serversync.load_config(settings))


@pytest.fixture(scope="session")
def promtool() -> str:
    found = shutil.which("promtool", path=f"{UNPACKED}:{os.environ['PATH']}")
    if found is None:
        pytest.fail("no promtool: tests/run unpacks it from Debian's package prometheus")
    return found


def check(promtool: str, *args: str | Path, stdin: str = "") -> str:
    done = subprocess.run(
        [promtool, *args], input=stdin, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


# -- the text -------------------------------------------------------------------------------------


def test_every_metric_is_there_as_promtool_alerts_and_dashboard_want_it_and_says_what_is_so(
    pi: Pi, promtool: str
) -> None:
    """Deliveries, a retry, a death and a deletion that fails; then an agent that still runs, and
    has pulled the settings."""
    before = time.time()
    example().serve(pi.frontend)
    pi.backend.enqueue_many(5)
    pi.poisoned(Reply(500))
    dead = str(uuid.uuid4())
    pi.frontend.rejected[dead] = "SCHEMA"
    pi.backend.enqueue(entity_id=dead)
    pi.backend.end_call()
    (pi.backend.recordings_dir / ".serversync-trash").write_text("in the way of each deletion")
    pi.once(code=1)
    hold(pi.db)
    running = pi.agent(FRONTEND_SYNC_INTERVAL_SEC=60)
    running.wait_sentence("1 retrying: the frontend has trouble")
    wait_until(lambda: all(row["pulled_at"] for row in sections(pi.db).values()), what="settings")
    pi.db.execute("update sync_outbox set created_at = now() - interval '1 hour'")

    seen = scrape(pi.agent, running)

    assert check(promtool, "check", "metrics", stdin=seen.text) == ""
    assert list(seen.types) == [*serversync.METRICS]
    others = {name: kind for name, kind in seen.types.items() if kind != "gauge"}
    histograms = {"outbox_lag_seconds", "outbox_retry_count"}
    counters = {name for name in serversync.METRICS if name.endswith("_total")}
    assert others == dict.fromkeys(counters, "counter") | dict.fromkeys(histograms, "histogram")
    assert seen.text.endswith("\n") and "\n\n" not in seen.text
    for name, kind in seen.types.items():
        assert re.search(rf"^# HELP {name} \S.+\.\n# TYPE {name} {kind}\n{name}", seen.text, re.M)

    # Alerts and dashboard name nothing else; and of it all but what is only there for alerts.
    for path in (RULES, RULES_TEST, DASHBOARD):
        named = set(NAME.findall(path.read_text()))
        assert named and named <= seen.names, path
    asked = set(NAME.findall(" ".join(expressions())))
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in asked}
    assert families | {"serversync_outage", "outbox_retry_count"} >= {*serversync.METRICS}

    # What the database and the disk say.
    assert seen("serversync_pending_entries") == len(pi.db.pending()) == 1
    assert 3600 <= seen("serversync_oldest_pending_seconds") < 3900
    assert seen.series("serversync_waiting_entries") == {"FRONTEND_5XX": 1}
    letters = {"PENDING": 1, "RETRYING": 0, "RESOLVED": 0, "DEAD": 0}
    assert seen.series("serversync_dead_letters") == letters
    assert seen("serversync_deletions_waiting") == seen("serversync_deletions_failed") == 1
    assert before < seen("serversync_last_success_timestamp_seconds") < time.time()
    assert before - 1 < seen("serversync_snapshot_timestamp_seconds") < time.time()
    sizes = [path.stat().st_size for path in pi.backend.recordings_dir.rglob("*") if path.is_file()]
    assert seen("serversync_recordings_bytes") == sum(sizes)
    disk = os.statvfs(pi.backend.recordings_dir)
    assert seen("serversync_disk_size_bytes") == disk.f_blocks * disk.f_frsize
    assert 0 < seen("serversync_disk_free_bytes") < seen("serversync_disk_size_bytes")
    (build,) = (key for key in seen if key[0] == "serversync_build_info")
    assert build[1] == serversync.__version__
    assert all(re.match(r"\d+\.\d+", version) for version in build[1:]) and len(build) == 5


def test_an_untouched_database_counts_zero_and_of_a_directory_that_is_not_there_nothing_is_said(
    agent: AgentFactory, schema: None, tmp_path: Path
) -> None:
    seen = scrape(agent, SYNC_RECORDINGS_DIR=tmp_path / "unmounted")

    assert seen("serversync_database_up") == 1
    assert seen("serversync_pending_entries") == seen("serversync_oldest_pending_seconds") == 0
    assert len(seen.counted()) == 3 + 4 + 1 + 4 + (8 + 2) + (10 + 2)
    assert set(seen.counted().values()) == {0}
    gone = {f"serversync_{name}_bytes" for name in ("recordings", "disk_free", "disk_size")}
    assert not seen.names & {"serversync_last_success_timestamp_seconds", *gone}


@pytest.mark.parametrize("why", ["no server", "no schema yet"])
def test_without_its_tables_what_is_not_known_is_left_out(
    db: Database, agent: AgentFactory, promtool: str, why: str
) -> None:
    # Port 9: nobody listens there.
    settings: dict[str, Any] = (
        {} if why == "no schema yet" else {"DATABASE_URL": "postgresql://127.0.0.1:9/x"}
    )

    seen = scrape(agent, **settings)

    assert seen("serversync_up") == 0
    assert seen("serversync_database_up") == 0
    assert seen("serversync_disk_free_bytes") > 0
    local = ("up", "database_up", "build_info", "snapshot", "disk", "recordings_bytes")
    assert all(name.startswith(tuple(f"serversync_{n}" for n in local)) for name in seen.names)
    assert check(promtool, "check", "metrics", stdin=seen.text) == ""


def test_labels_from_outside_are_escaped_and_hold_no_secret(pi: Pi, promtool: str) -> None:
    pi.poisoned(Reply(500))
    pi.agent.once()
    hostile = 'a"} 1\nevil_total{x="\\ Bearer abcdef0123456789 hunter2hunter2 \x01\u2028ä'
    pi.db.execute("update serversync.waiting set code = %s", (hostile,))

    seen = scrape(pi.agent, SYNC_TOKEN="hunter2hunter2")

    assert check(promtool, "check", "metrics", stdin=seen.text) == ""
    assert list(seen.series("serversync_waiting_entries")) == [
        'a\\"} 1 evil_total{x=\\"\\\\ Bearer *** ***   ä'
    ]
    assert "evil_total" not in seen.names


# -- who is there ---------------------------------------------------------------------------------


NO_OUTAGE = {"entries": 0, "files": 0}


def test_an_agent_is_up_while_its_state_file_says_so_and_only_who_sends_speaks_of_outages(
    agent: AgentFactory, numbers: Numbers
) -> None:
    running = agent()
    running.wait_sentence("all delivered")
    standby = agent()
    standby.wait_sentence("standby")
    of_outages = {"serversync_outage", "serversync_outage_seconds"}
    told = {*of_outages, "outbox_inflight", "serversync_listener_connected"}

    seen = numbers.scrape(running)
    assert seen("serversync_up") == seen("serversync_listener_connected") == 1
    assert seen("outbox_inflight") == 0
    assert seen.series("serversync_outage") == NO_OUTAGE
    assert seen.series("serversync_outage_seconds") == NO_OUTAGE
    seen = numbers.scrape(standby)
    assert seen("serversync_up") == 1 and not seen.names & of_outages
    elsewhere = numbers.scrape()  # another host, or another /run: only the database knows of it
    assert elsewhere("serversync_up") == 0 and not elsewhere.names & told

    standby.kill()
    running.kill()
    ended = numbers.scrape(running)
    assert ended("serversync_up") == 0 and not ended.names & told


def test_an_outage_shows_its_endpoint_and_how_long_it_lasts_until_it_ends(
    pi: Pi, numbers: Numbers
) -> None:
    pi.frontend.on_entries = lambda request: Reply(429, {"Retry-After": "3600"})
    pi.backend.enqueue()
    running = pi.agent()
    running.wait_log("outage")
    wait_until(lambda: running.state()["outages"], what="the outage", state=running.log)

    def lasted() -> dict[str, float]:
        return numbers.scrape(running).series("serversync_outage_seconds")

    wait_until(lambda: lasted()["entries"] >= 1, what="a second of it")
    seen = numbers.scrape(running)
    # The empty request was told the same: it is the frontend, and nothing gets through.
    assert seen.series("serversync_outage") == {"entries": 1, "files": 1}
    assert all(1 <= age < 600 for age in seen.series("serversync_outage_seconds").values())
    # The entry that found it out waits.
    assert seen.series("outbox_dequeue_total") == {"sent": 0, "set_aside": 1, "dead": 0}
    assert seen.series("serversync_waiting_entries") == {"RATE_LIMITED": 1}

    pi.frontend.on_entries = None
    running.stop()
    running = pi.agent()
    running.wait_sentence("last: 1 entry")

    seen = numbers.scrape(running)
    assert seen.series("serversync_outage") == NO_OUTAGE
    assert seen.series("serversync_outage_seconds") == NO_OUTAGE


# -- counting -------------------------------------------------------------------------------------


def test_everything_is_counted_once_as_the_frontend_got_it_and_no_counter_ever_goes_down(
    pi: Pi, numbers: Numbers
) -> None:
    last: dict[Sample, float] = {}

    def look(running: Agent | None = None) -> Scrape:
        seen = numbers.scrape(running)
        lower = {key: (last[key], seen.get(key)) for key in last if seen.get(key, -1) < last[key]}
        assert not lower
        last.update(seen.counted())
        return seen

    bad, dead = str(uuid.uuid4()), [str(uuid.uuid4()) for _ in range(2)]
    pi.backend.enqueue_many(20)
    calls = [pi.backend.end_call(), pi.backend.end_call(seconds=2)]
    for entity in (bad, *dead):
        pi.backend.enqueue(entity_id=entity)
    pi.frontend.rejected = dict.fromkeys(dead, "SCHEMA")
    pi.frontend.poison[bad] = Reply(503)
    pi.once(code=1)
    look()
    let_hours_pass(pi.db)
    pi.once(code=75)
    look()
    pi.frontend.poison.clear()
    let_hours_pass(pi.db)
    pi.once()

    seen = look()

    entries, files = len(pi.frontend.entries), len(pi.frontend.uploads)
    assert (entries, files) == (20 + 2 * 4 + 1, 2)
    alone = [request for request in pi.frontend.of_kind("entries") if request.status == 503]
    failed = sum(len(request.entries) == 1 for request in alone)
    taken = {"sent": entries + files, "set_aside": failed, "dead": 2}
    assert seen.series("outbox_dequeue_total") == taken
    outcomes = {"success": entries + files, "retry": failed, "dead": 2, "conflict_processed": 0}
    assert seen.series("outbox_send_total") == outcomes
    assert seen("serversync_upload_bytes_total") == sum(call.size for call in calls)
    assert seen("outbox_lag_seconds_count") == seen("outbox_retry_count_count") == entries + files
    assert seen("outbox_retry_count_sum") == failed
    assert seen("outbox_retry_count_bucket", "0") == entries + files - 1
    assert seen("serversync_pending_entries") == 0
    # Looking changes nothing.
    assert look().counted() == seen.counted()

    # What died dies again, and then goes through; and a clock was set back.
    pi.once("dlq", "retry-all")
    pi.once(code=1)
    look()
    pi.frontend.rejected.clear()
    pi.once("dlq", "retry-all")
    pi.backend.enqueue()
    pi.db.execute("update sync_outbox set created_at = now() + interval '30 d'")
    pi.once()
    look()
    # Rows that are gone; an agent that starts and ends.
    pi.db.execute("update sync_outbox set processed_at = processed_at - interval '40 days'")
    pi.db.execute("update serversync.deliveries set started_at = started_at - interval '40 days'")
    pi.once("prune", "--yes")
    assert pi.db.value("select count(*) from sync_outbox") == 0
    look()
    pi.db.execute("delete from serversync.dead_letters")
    running = pi.idle()
    look(running)
    running.kill()
    taken = {"sent": entries + files + 3, "set_aside": failed, "dead": 4}
    assert look().series("outbox_dequeue_total") == taken


def test_what_was_there_already_and_looks_at_a_file_are_no_sendings(
    pi: Pi, numbers: Numbers
) -> None:
    pi.frontend.on_entries = lambda request: Reply(409, {}, {"ok": True})
    pi.backend.enqueue_many(3)
    pi.once()
    seen = numbers.scrape()
    assert seen.series("outbox_dequeue_total") == {"sent": 3, "set_aside": 0, "dead": 0}
    outcomes = {"success": 0, "retry": 0, "dead": 0, "conflict_processed": 3}
    assert seen.series("outbox_send_total") == outcomes

    # A file that was uploaded before leaves the queue without a sending.
    pi.frontend.on_entries = None
    call = pi.backend.end_call(events=0)
    pi.once()
    before = numbers.scrape()
    again = "update sync_outbox set processed_at = null where id = %s"
    pi.db.execute(again, (call.seq("recording_file"),))
    pi.once()
    seen = numbers.scrape()
    sent = before("outbox_dequeue_total", "sent")
    assert seen("outbox_dequeue_total", "sent") == sent + 1 == 7
    assert seen.series("outbox_send_total") == before.series("outbox_send_total")
    assert seen("serversync_upload_bytes_total") == call.size

    # One that is not ready is only looked at.
    pi.backend.end_call(meta=False, events=0)
    looks = 3
    for _ in range(looks):
        pi.once(code=75)
        hold(pi.db)
        let_hours_pass(pi.db)
    seen = numbers.scrape()
    assert seen.series("outbox_dequeue_total")["set_aside"] >= looks
    assert seen.series("outbox_send_total")["retry"] == 0
    assert seen.series("serversync_waiting_entries") == {"NOT_READY": 1}
    assert len(pi.frontend.uploads) == 1


def test_entries_of_every_age_and_with_failures_before_success_fall_into_their_buckets(
    pi: Pi, numbers: Numbers
) -> None:
    # Just above each bound, for the clock runs on; and one from the future, as after a clock that
    # was set back: of no age at all.
    ages = [-86400, 6, 31, 61, 301, 3601, 86401]
    tries = [1, 8, 9]  # of the oldest
    pi.once()
    first, last = pi.backend.enqueue_many(len(ages))
    pi.db.execute(
        "update sync_outbox set created_at = now() - (%s::int[])[id - %s + 1] * interval '1 s'",
        (ages, first),
    )
    failing = range(last - len(tries) + 1, last + 1)
    pi.frontend.poison = {entity_of(pi.db, seq): Reply(500) for seq in failing}
    pi.once(code=75)
    query = "update serversync.waiting set tries = %s where outbox_id = %s"
    for seq, number in zip(failing, tries, strict=True):
        pi.db.execute(query, (number, seq))
    pi.frontend.poison.clear()
    let_hours_pass(pi.db)
    pi.once()

    seen = numbers.scrape()

    buckets = seen.series("outbox_lag_seconds_bucket")
    assert list(buckets) == ["1", "5", "30", "60", "300", "3600", "86400", "+Inf"]
    assert list(buckets.values()) == [1, 1, 2, 3, 4, 5, 6, 7]
    assert seen("outbox_lag_seconds_count") == seen("outbox_retry_count_count") == 7
    assert sum(ages[1:]) <= seen("outbox_lag_seconds_sum") < sum(ages[1:]) + 6 * 25
    buckets = seen.series("outbox_retry_count_bucket")
    assert list(buckets) == [*map(str, range(9)), "+Inf"]
    assert list(buckets.values()) == [4, 5, 5, 5, 5, 5, 5, 5, 6, 7]
    assert seen("outbox_retry_count_sum") == sum(tries)


def test_entries_under_way_are_in_flight_and_those_whose_answer_a_kill_ate_are_counted_once(
    pi: Pi, numbers: Numbers
) -> None:
    pi.backend.enqueue_many(10)
    pi.frontend.on_entries = lambda request: Reply(store=True, delay=60)
    running = pi.agent(SYNC_TIMEOUT_SEC=60)
    wait_until(lambda: running.state().get("inflight"), what="the request", state=running.log)
    pi.frontend.wait(lambda: len(pi.frontend.requests) == 1, what="the request")
    seen = numbers.scrape(running)
    assert seen("outbox_inflight") == seen("serversync_pending_entries") == 10
    running.kill()
    pi.frontend.hang_up()
    assert set(numbers.scrape().series("outbox_dequeue_total").values()) <= {0}
    pi.frontend.on_entries = None
    pi.once()

    seen = numbers.scrape()

    assert len(pi.frontend.entries) == 20
    assert seen.series("outbox_dequeue_total")["sent"] == 10
    assert seen("outbox_lag_seconds_count") == 10


def test_entries_of_an_odd_time_are_in_the_backlog_and_hide_and_block_nothing(
    pi: Pi, numbers: Numbers, promtool: str
) -> None:
    pi.once()
    first, last = pi.backend.enqueue_many(4)
    pi.db.execute("update sync_outbox set created_at = now() + interval '1 hour'")

    backlog = numbers.backlog()
    assert backlog[-1] == 4 and set(backlog[:-2]) == {0}
    assert numbers.scrape()("serversync_pending_entries") == 4

    odd = ("infinity", "-infinity", "4000-01-01 BC")
    for seq, when in zip(range(first, last), odd, strict=True):
        pi.db.execute("update sync_outbox set created_at = %s where id = %s", (when, seq))
    seen = numbers.scrape()
    assert seen("serversync_pending_entries") == 4
    assert seen("serversync_database_up") == 1
    assert check(promtool, "check", "metrics", stdin=seen.text) == ""
    pi.once()
    assert not pi.db.pending()


# -- alerts ---------------------------------------------------------------------------------------


# What the issue wants to be told of.
WANTED = {
    "more than 1000 pending": "serversync_pending_entries > 1000",
    "oldest over one hour": "serversync_oldest_pending_seconds > 3600",
    "dead letters": "serversync_dead_letters",
    "deletions that fail": "serversync_deletions_failed > 0",
    "disk filling": "predict_linear(serversync_disk_free_bytes",
    "no agent": "serversync_up == 0",
    "no agent, and no numbers": "absent(serversync_up)",
    "an outage over an hour": "serversync_outage_seconds > 3600",
}


def test_each_alert_has_a_case_says_what_to_do_and_fires_as_promtool_sees_it(promtool: str) -> None:
    _, *blocks = re.split(r"^ *- alert: ", RULES.read_text(), flags=re.M)
    assert f"{len(blocks)} rules found" in check(promtool, "check", "rules", RULES)
    assert "SUCCESS" in check(promtool, "test", "rules", RULES_TEST)
    case = RULES_TEST.read_text()
    for block in blocks:
        name, _, text = block.partition("\n")
        assert re.search(r"^ +for: \d+[mh]$", text, re.M), name
        assert re.search(r"^ +severity: (warning|critical)$", text, re.M), name
        found = re.search(r"^ +summary: (.*?)\n +description: >-\n(.*)", text, re.M | re.S)
        assert found, name
        assert name == "ServersyncAbsent" or "{{ $labels.instance }}" in found[1]
        to_do = r"serversync (status|doctor|dlq|metrics)|systemctl|serversync-admin"
        assert re.search(to_do, found[2]), name
        assert f'alertname="{name}", alertstate="firing"' in case
    for what, expression in WANTED.items():
        assert any(expression in block for block in blocks), what


# -- the dashboard --------------------------------------------------------------------------------


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(DASHBOARD.read_text())["panels"]
    return found


def expressions() -> list[str]:
    return [target["expr"] for panel in panels() for target in panel["targets"]]


def test_every_panel_has_its_place_and_asks_the_chosen_source_for_the_chosen_devices(
    promtool: str, tmp_path: Path
) -> None:
    """As promtool understands it; without holes between the places."""
    listed = json.loads(DASHBOARD.read_text())["templating"]["list"]
    variables = {each["name"]: each for each in listed}
    assert list(variables) == ["datasource", "instance"]
    assert variables["instance"]["multi"] and variables["instance"]["includeAll"]
    assert len({panel["id"] for panel in panels()}) == len(panels())
    assert "Dead letters" in [panel["title"] for panel in panels()]
    taken: list[tuple[int, int]] = []
    for panel in panels():
        place = panel["gridPos"]
        across, down = (range(place[a], place[a] + place[b]) for a, b in ("xw", "yh"))
        assert place["x"] >= 0 and across.stop <= 24
        taken += [(x, y) for x in across for y in down]
        assert panel["description"] and panel["type"] in ("stat", "timeseries", "table")
        references = [target["refId"] for target in panel["targets"]]
        assert len(set(references)) == len(references) > 0
        for part in (panel, *panel["targets"]):
            assert part["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    assert len(taken) == len(set(taken)) == 24 * (max(y for _, y in taken) + 1)
    rules = []
    for number, expression in enumerate(expressions()):
        selectors = expression.count('instance=~"$instance"')
        assert selectors == len(NAME.findall(expression)) > 0, expression
        text = expression.replace("$__rate_interval", "5m")
        rules.append({"record": f"panel:{number}", "expr": text})
    path = tmp_path / "rules.yml"
    path.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    assert f"{len(rules)} rules found" in check(promtool, "check", "rules", path)

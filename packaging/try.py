"""The tour that `packaging/try` shows: every step is real, and every claim is checked."""

import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from agent import PROGRAM, PYTHON, REPOSITORY, Agent, agent_env
from backend import Backend, Call
from pg import Cluster, Database
from settings import PATHS, Desired, group, rule
from waiting import wait_until

DELETE_AFTER = 2
PATIENCE = 40.0


class NotSo(Exception):
    """A check failed."""


class Signals:
    """Ctrl-C and SIGTERM end the tour, but never between the making of a thing and its entry in
    the list of what is to be removed."""

    def __init__(self) -> None:
        self._held = 0
        self._came = False
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._on_signal)

    def _on_signal(self, *_: object) -> None:
        self._came = True
        if not self._held:
            self._held += 1  # a second one must not disturb the cleaning up
            raise KeyboardInterrupt

    def hold(self) -> None:
        self._held += 1

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1
        if self._came and not self._held:
            self._held += 1
            raise KeyboardInterrupt


class Remote:
    """The frontend as a process of its own; what it has is read from its directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.port = 0
        self.url = ""
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-B", str(REPOSITORY / "tests" / "frontend.py")),
                *("--dir", str(self.directory), "--port", str(self.port)),
                *(f"--page={path}" for path in PATHS.values()),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()
        self.port = int(self.url.rpartition(":")[2] or 0)

    def stop(self) -> None:
        if self.process is not None:
            self.process.terminate()
            self.process.communicate()
            self.process = None

    def people_want(self, desired: Desired) -> None:
        """What it answers from now on, when it is asked for the settings."""
        for name, answer in desired.answers.items():
            page = self.directory / "pages" / PATHS[name].removeprefix("/")
            page.parent.mkdir(parents=True, exist_ok=True)
            page.with_suffix(".new").write_text(json.dumps(answer))
            page.with_suffix(".new").rename(page)

    def entries(self) -> list[dict[str, Any]]:
        """What it was given, in the order in which it came."""
        try:
            lines = (self.directory / "entries.jsonl").read_text().splitlines(keepends=True)
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def seqs(self) -> list[int]:
        return [entry["seq"] for entry in self.entries()]

    def has(self, seq: int) -> bool:
        return seq in self.seqs()

    def audio(self, call: Call) -> Path:
        return self.directory / "recordings" / call.call_log_id / call.wav.name


class Tour:
    def __init__(self, things: contextlib.ExitStack, signals: Signals) -> None:
        self.things, self.signals = things, signals
        self.checks = 0
        self._steps = 0
        self._log_seen = 0
        self.pids: list[int] = []

    # --- showing and checking -------------------------------------------------------------------

    def heading(self, text: str) -> None:
        self._steps += 1
        title = f"{self._steps}. {text}"
        print(f"\n{title}\n{'=' * len(title)}", flush=True)

    def say(self, text: str = "") -> None:
        print(f"   {text}".rstrip(), flush=True)

    def check(self, good: object, claim: str) -> None:
        if not good:
            raise NotSo(claim)
        self.checks += 1
        print(f"   [ok] {claim}", flush=True)

    def wait(self, condition: Callable[[], object], claim: str) -> None:
        """A check that may take a while; an agent that has ended will not make it true."""

        def settled() -> bool:
            ended = not self.agent.running
            return bool(condition()) or ended

        with contextlib.suppress(AssertionError):
            wait_until(settled, PATIENCE)
        self.check(condition(), claim)

    def log(self) -> None:
        """What the agent has said since the last time."""
        lines = self.agent.log().splitlines()
        if lines[self._log_seen :]:
            self.say("The agent says:")
        for line in lines[self._log_seen :]:
            self.say(f"  | {line[:200]}")
        self._log_seen = len(lines)

    def table(self) -> None:
        """Every entry of the outbox, and where it is."""
        there = set(self.remote.seqs())
        self.say(f"{'seq':>4}  {'entity_type':<18} {'entity':<9} {'outbox':<9} frontend")
        for seq, kind, entity, done in self.db.rows(
            "select id, entity_type, entity_id::text, processed_at is not null"
            " from sync_outbox order by id"
        ):
            state = "processed" if done else "pending"
            has = "has it" if seq in there else "-"
            if kind == "recording_file":
                has = "has the audio" if entity in self.stored_recordings() else "-"
            self.say(f"{seq:>4}  {kind:<18} {entity[:8]:<9} {state:<9} {has}")

    def stored_recordings(self) -> set[str]:
        return {call.recording_id for call in self.calls if self.remote.audio(call).exists()}

    # --- the tour -------------------------------------------------------------------------------

    def run(self) -> None:
        self.prepare()
        self.calls_end_without_agent()
        self.agent_delivers()
        self.files_on_both_sides()
        self.directories_go()
        self.a_call_while_it_runs()
        self.settings_come_back()
        self.frontend_down_and_up()
        self.the_end()

    def prepare(self) -> None:
        self.heading("A PostgreSQL, a frontend and a backend, for this tour only")
        with self.signals.held():
            top = Path(tempfile.mkdtemp(prefix="serversync-try-"))
            self.things.callback(shutil.rmtree, top, ignore_errors=True)
            top.chmod(0o711)  # PostgreSQL runs as another user
            tempfile.tempdir = str(top)
            self.top = top
            self.cluster = Cluster()
            self.things.callback(self.cluster.close)
            self.cluster.start()
            self.pids.append(int((self.cluster.data / "postmaster.pid").read_text().split()[0]))
            self.cluster.prepare()
        self.db = Database(self.cluster, self.cluster.create(name="voicebot"))
        self.things.callback(self.db.close)
        self.say(f"PostgreSQL {self.db.value('show server_version')}, port {self.cluster.port}")
        self.remote = Remote(top / "frontend")
        self.remote.people_want(Desired())
        self.things.callback(self.remote.stop)
        self.start_frontend()
        self.backend = Backend(self.db, top / "backend")
        self.calls: list[Call] = []
        self.say(f"recordings are written below {self.backend.recordings_dir}")
        self.check(self.remote.port, f"the frontend listens: {self.remote.url}")

    def start_frontend(self) -> None:
        with self.signals.held():
            self.remote.start()
            if self.remote.process is not None:
                self.pids.append(self.remote.process.pid)

    def end_call(self, **how: Any) -> tuple[Call, float]:
        """A call ends; when its transaction was about to be committed."""
        with self.db.connect(autocommit=False) as transaction:
            call = self.backend.end_call(connection=transaction, **how)
            before = time.monotonic()
            transaction.commit()
        self.calls.append(call)
        return call, before

    def pending(self) -> list[int]:
        return self.db.pending()

    def show_files(self) -> None:
        for call in self.calls:
            if call.size:
                self.say(f"{call.call_id}/{call.wav.name}  {call.size} bytes  {call.sha256[:16]}…")

    def calls_end_without_agent(self) -> None:
        self.heading("Three calls end while no agent runs")
        self.end_call(seconds=3)
        self.end_call(seconds=20)
        self.end_call(recording=False, events=1)
        self.table()
        self.say()
        self.show_files()
        entries = self.db.value("select count(*) from sync_outbox")
        self.check(len(self.pending()) == entries == 12, "12 entries wait in the outbox")
        self.check(not self.remote.entries(), "the frontend has none of them")

    def agent_delivers(self) -> None:
        self.heading(f"The agent starts: {PYTHON} {PROGRAM} run")
        settings = agent_env(
            self.db,
            None,
            self.backend,
            FRONTEND_BASE_URL=self.remote.url,
            SYNC_DELETE_AFTER_SEC=DELETE_AFTER,
            SYNC_DEVICE_ID="the-tour",
            FRONTEND_SYNC_INTERVAL_SEC=1,
        )
        started = time.monotonic()
        with self.signals.held():
            self.agent = Agent(settings, prefix=["env"])  # begun anew, as a user would
            self.things.callback(self.agent.close)
            self.pids.append(self.agent.pid)
        self.wait(lambda: not self.pending(), "no entry is pending any more")
        self.say(f"({time.monotonic() - started:.1f} s after the start of the process)")
        self.log()
        self.say()
        self.table()
        self.check_entries()

    def check_entries(self) -> None:
        """All JSON entries once, as they stand in the outbox, and none before its call's own. (The
        newest call shows after an outage that the frontend is there.)"""
        expected = self.db.rows(
            "select id, entity_type, entity_id::text, payload from sync_outbox"
            " where entity_type <> 'recording_file' order by id"
        )
        came = self.remote.entries()
        got = sorted(came, key=lambda entry: entry["seq"])
        self.check(
            [entry["seq"] for entry in got] == [row[0] for row in expected],
            f"the frontend got {len(got)} JSON entries: each once",
        )
        first: dict[str, str] = {}
        for entry in came:
            call = entry["payload"].get("callLogId", entry["entityId"])
            first.setdefault(call, entry["entityType"])
        self.check(set(first.values()) == {"call_log"}, "of each call its own entry came first")
        same = [
            (row[1], row[2], without_upload(row[3]))
            == (entry["entityType"], entry["entityId"], without_upload(entry["payload"]))
            for row, entry in zip(expected, got, strict=True)
        ]
        self.check(all(same), "their payloads are those of the outbox")

    def files_on_both_sides(self) -> None:
        self.heading("The recordings, on both sides")
        for call in self.calls:
            if not call.size:
                continue
            stored = self.remote.audio(call)
            self.say(f"written   {call.sha256}  {call.call_id}/{call.wav.name}")
            digest = hashlib.sha256(stored.read_bytes()).hexdigest() if stored.exists() else "-"
            self.say(f"frontend  {digest}  {stored.relative_to(self.remote.directory)}")
            self.check(digest == call.sha256, "the frontend stored the very same bytes")
            status, url = self.backend.upload_status(call)
            self.check(status == "uploaded", f"recordings.upload_status is {status!r}")
            with urllib.request.urlopen(str(url), timeout=10) as answer:
                served = hashlib.sha256(answer.read()).hexdigest()
            self.check(served == call.sha256, f"s3_url serves them: {url}")

    def directories_go(self) -> None:
        self.heading(f"Confirmed and {DELETE_AFTER} s quiet: the local recordings are deleted")
        directories = [call.directory for call in self.calls if call.size]
        self.wait(
            lambda: not any(directory.exists() for directory in directories),
            f"the {len(directories)} directories of these calls are gone",
        )
        left = sorted(path.name for path in self.backend.recordings_dir.iterdir())
        self.say(f"left in the recordings directory: {', '.join(left)} (the agent's own)")
        self.check(all(name.startswith(".serversync-") for name in left), "nothing else is there")

    def a_call_while_it_runs(self) -> None:
        self.heading("A call ends while the agent runs (three times)")
        times = []
        for _ in range(3):
            call, committed = self.end_call(seconds=1)
            self.arrives(partial(self.remote.has, call.seq("recording")))
            times.append(time.monotonic() - committed)
            self.arrives(self.remote.audio(call).exists)
            with_audio = time.monotonic() - committed
            self.say(
                f"from its COMMIT to the frontend: {times[-1] * 1000:.0f} ms, "
                f"its audio {with_audio * 1000:.0f} ms"
            )
        middle = sorted(times)[1]
        self.check(middle < 1, f"a call appears within a second: {middle * 1000:.0f} ms")
        self.wait(lambda: not self.pending(), "no entry is pending")
        self.log()

    def arrives(self, condition: Callable[[], object]) -> None:
        """A wait without a line of its own, so that what is measured is not the printing."""
        with contextlib.suppress(AssertionError):
            wait_until(lambda: condition() or not self.agent.running, PATIENCE)
        if not condition():
            raise NotSo("a call that ends while the agent runs arrives")

    def settings_come_back(self) -> None:
        self.heading("People change settings in the frontend")
        friends = group("03-1234-5678", "０９０１２３４５６７８", "110", name="friends")
        deny = rule("not the friends", callerGroupId=friends["id"], actionType="deny")
        self.remote.people_want(Desired([friends], [deny]))
        query = "select phone_number, group_name from registered_numbers order by 1"
        self.wait(lambda: len(self.db.rows(query)) == 2, "two numbers reach the backend's table")
        for number, name in self.db.rows(query):
            self.say(f"{number}  {name}")
        rules = self.db.rows("select name, action_type from call_action_rules")
        self.check(rules == [(deny["name"], "deny")], "and a rule for them")
        self.wait(lambda: self.agent.lines("skipped"), "110 is no number: it is skipped, and said")
        self.log()

    def frontend_down_and_up(self) -> None:
        self.heading("The frontend goes down, calls end, it comes up again")
        before = len(self.agent.lines("outage"))
        self.remote.stop()
        self.say("The frontend is stopped. Two calls end:")
        during = [self.end_call(seconds=2)[0] for _ in range(2)]
        self.wait(lambda: len(self.agent.lines("outage")) > before, "the agent notices an outage")
        self.log()
        waiting = sorted(seq for call in during for seq in call.seqs)
        self.check(self.pending() == waiting, f"their {len(waiting)} entries wait in the outbox")
        self.check(all(call.wav.exists() for call in during), "their recordings are still here")
        charged = self.db.value("select count(*) from serversync.waiting where attempts > 0")
        self.check(charged == 0, "the outage is charged to no entry")
        self.start_frontend()
        again = time.monotonic()
        self.say("The frontend is started again.")
        self.wait(lambda: not self.pending(), "everything has caught up")
        self.say(f"({time.monotonic() - again:.1f} s after its start)")
        self.log()
        for call in during:
            digest = hashlib.sha256(self.remote.audio(call).read_bytes()).hexdigest()
            self.check(digest == call.sha256, f"the audio of {call.call_id} is there")
        self.check_entries()

    def the_end(self) -> None:
        self.heading("The end")
        self.wait(
            lambda: not any(call.directory.exists() for call in self.calls),
            "every local recording is gone",
        )
        dead = self.db.value("select count(*) from serversync.dead_letters")
        self.check(dead == 0, "there are no dead letters")
        code, seconds = self.agent.stop()
        self.log()
        self.check(code == 0 and seconds < 10, f"SIGTERM ends the agent ({seconds:.1f} s, code 0)")


def without_upload(payload: Any) -> Any:
    """A `recording` may carry the newest uploadStatus and s3Url instead of its snapshot's."""
    return {k: v for k, v in payload.items() if k not in ("uploadStatus", "s3Url")}


def runs(pid: int) -> bool:
    """Whether there is such a process, and it is more than an exit code nobody has asked for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def main() -> int:
    signals = Signals()
    things = contextlib.ExitStack()
    tour = Tour(things, signals)
    code = 1
    try:
        tour.run()
        code = 0
    except NotSo as error:
        print(f"\n   [NOT SO] {error}", flush=True)
        if hasattr(tour, "agent"):
            tour.log()
            print(f"   (the agent's exit code so far: {tour.agent.returncode})", flush=True)
    except KeyboardInterrupt:
        print("\ninterrupted: cleaning up", flush=True)
        code = 130
    finally:
        signals.hold()
        things.close()
    if code == 0:
        with contextlib.suppress(AssertionError):
            wait_until(lambda: not any(map(runs, tour.pids)), 10)
        left = [*filter(runs, tour.pids), *filter(Path.exists, [tour.top])]
        if left:
            print(f"   [NOT SO] nothing is left behind: {left}")
            return 1
        print("   [ok] PostgreSQL, the frontend and all files of this tour are gone")
        print(f"\nAll of it is so: {tour.checks + 1} checks.")
    return code


if __name__ == "__main__":
    os.umask(0o022)
    sys.exit(main())

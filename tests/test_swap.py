"""In the place of the author's own program: his file, his paths, his queue, on a running system."""

import json
import threading
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import agent as agent_module
from agent import REPOSITORY, Agent, run_once
from backend import Backend, write_wav
from frontend import Frontend
from machine import booted, needs_root
from pg import Database
from settings import AUDIO, announcement, example
from waiting import wait_until

# As his installation has it: one file for both programs, relative paths.
HIS_FILE = """\
# virtual-voicebot
DATABASE_URL={database}
FRONTEND_BASE_URL={frontend}
FRONTEND_SYNC_INTERVAL_SEC=1
ANNOUNCEMENT_AUDIO_DIR=data/announcements
NOTIFICATION_QUEUE_FILE=storage/notifications/pending.jsonl
SIP_PORT=5060
LOG_FORMAT=json
LOG_LEVEL=info
RUST_LOG=info,sqlx=warn
"""


class His:
    """What the author's program does with outbox and queue: one entry a request, each marked after
    its 200; the queue's lines in order, until one fails."""

    def __init__(self, db: Database, backend: Backend, frontend: Frontend) -> None:
        self.db, self.backend, self.frontend = db, backend, frontend
        self.stopping = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while not self.stopping.wait(0.05):
            for seq in self.db.pending():
                if self.stopping.is_set():
                    break
                self._send(seq)
            self._announce()

    def _send(self, seq: int) -> None:
        query = "select entity_type, entity_id::text, payload, created_at from sync_outbox"
        query += " where id = %s"
        kind, entity, payload, created = self.db.rows(query, (seq,))[0]
        if kind == "recording_file":  # it takes longer: what is left is for the next program
            return
        entry = {"entityType": kind, "entityId": entity, "payload": payload}
        entry["createdAt"] = created.isoformat()
        self._post("/api/ingest/sync", {"entries": [entry]})
        self.db.execute("update sync_outbox set processed_at = now() where id = %s", (seq,))

    def _announce(self) -> None:
        queue = self.backend.queue_file
        if not queue.exists():
            return
        taken = queue.rename(f"{queue}.processing")
        for line in taken.read_text().splitlines():
            self._post("/api/ingest/incoming-call", json.loads(line))
        taken.unlink()

    def _post(self, path: str, body: object) -> None:
        headers = {"Content-Type": "application/json"}
        data = json.dumps(body).encode()
        request = urllib.request.Request(f"{self.frontend.url}{path}", data, headers)
        with urllib.request.urlopen(request, timeout=10) as answer:
            assert answer.status == 200

    def stop(self) -> None:
        self.stopping.set()
        self.thread.join(20)


@pytest.fixture
def checkout(backend: Backend) -> Path:
    """The backend's directory, which is the working directory of both programs."""
    return backend.directory


@pytest.fixture
def ours(
    db: Database, frontend: Frontend, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[Agent]]:
    """serversync in its place: his file and his working directory, and nothing else."""
    (checkout / ".env").write_text(HIS_FILE.format(database=db.url, frontend=frontend.url))
    monkeypatch.setattr(agent_module, "PROGRAM", str(REPOSITORY / agent_module.PROGRAM))
    started: list[Agent] = []
    yield started
    for agent in started:
        agent.close()


def start(ours: list[Agent], checkout: Path) -> Agent:
    prefix = ["env", "--chdir", str(checkout)]
    agent = Agent({}, args=("--env-file", ".env", "run"), prefix=prefix)
    ours.append(agent)
    return agent


def test_from_the_start_to_the_first_call_with_nothing_but_the_author_s_own_file(
    ours: list[Agent], checkout: Path, backend: Backend, frontend: Frontend, db: Database
) -> None:
    wanted = example()
    sound = announcement("spoken", audioFileUrl=f"{AUDIO}hello.wav", ttsText=None)
    wanted.announcements.append(sound)
    wanted.serve(frontend)
    write_wav(checkout / "hello.wav", 0.1)
    frontend.pages[f"{AUDIO}hello.wav"] = (checkout / "hello.wav").read_bytes()
    running = start(ours, checkout)
    running.wait_log("LOG_FORMAT, LOG_LEVEL, RUST_LOG: not used by serversync")
    ringing = backend.call_comes_in()
    frontend.wait(lambda: frontend.calls)
    call = backend.end_call()
    frontend.wait(lambda: call.call_log_id in frontend.files)
    wait_until(lambda: not db.pending())
    assert [each["call_id"] for each in frontend.calls] == [ringing]
    assert frontend.files[call.call_log_id].sha256 == call.sha256
    assert frontend.playable(call.recording_id)
    assert backend.upload_status(call)[0] == "uploaded"
    audio = checkout / "data" / "announcements" / "hello.wav"
    wait_until(audio.exists)
    assert db.value("select count(*) from registered_numbers") == 2
    assert {entry["entityType"] for entry in frontend.entries} == {
        "call_log", "ivr_session_event", "recording"
    }  # fmt: skip


def test_the_swap_on_a_running_system_loses_nothing_and_sends_nothing_twice(
    ours: list[Agent], checkout: Path, backend: Backend, frontend: Frontend, db: Database
) -> None:
    """Calls go on all the time: those that come while neither program runs, too."""
    his = His(db, backend, frontend)
    calls, ringing = [], []

    def one_more() -> None:
        ringing.append(backend.call_comes_in())
        calls.append(backend.end_call(seconds=0.1))

    for _ in range(3):
        one_more()
    frontend.wait(lambda: len(frontend.calls) == 3)
    his.stop()
    for _ in range(2):
        one_more()
    running = start(ours, checkout)
    for _ in range(3):
        one_more()
    wait_until(lambda: not db.pending(), 60)
    frontend.wait(lambda: len(frontend.calls) == len(ringing))
    assert [each["call_id"] for each in frontend.calls] == ringing
    often = Counter(entry["entityId"] for entry in frontend.entries)
    assert set(often.values()) == {1}
    assert len(often) == db.value(
        "select count(*) from sync_outbox where entity_type <> 'recording_file'"
    )
    assert {call.call_log_id for call in calls} == set(frontend.files)
    assert {file.count for file in frontend.files.values()} == {1}
    # And back again, and once more: what one has marked the other does not send.
    assert running.stop()[0] == 0
    his = His(db, backend, frontend)
    ringing.append(backend.call_comes_in())
    backend.end_call(recording=False)
    frontend.wait(lambda: len(frontend.calls) == len(ringing))
    wait_until(lambda: not db.pending())
    his.stop()
    start(ours, checkout)
    calls.append(backend.end_call(seconds=0.1))
    wait_until(lambda: not db.pending())
    often = Counter(entry["entityId"] for entry in frontend.entries)
    assert set(often.values()) == {1}
    assert [each["call_id"] for each in frontend.calls] == ringing


@needs_root
def test_a_command_that_is_typed_elsewhere_finds_the_same_directories(
    ours: list[Agent], checkout: Path, backend: Backend, frontend: Frontend, db: Database,
    tmp_path: Path,
) -> None:  # fmt: skip
    """The unit says where its relative paths are meant from; `!`: it may be missing."""
    env = {"DATABASE_URL": db.url, "FRONTEND_BASE_URL": frontend.url}
    unit = {"LoadState": "loaded", "User": "root", "WorkingDirectory": f"!{checkout}"}
    shown = run_once(env, args=("status", "--json"), prefix=booted(tmp_path, **unit))
    found = json.loads(shown.stdout)["recordings"]["directory"]
    assert found == str(backend.recordings_dir) == f"{checkout}/storage/recordings"
    elsewhere = json.loads(run_once(env, args=("status", "--json")).stdout)["recordings"]
    assert elsewhere["directory"] == "/opt/virtual-voicebot/storage/recordings"
    assert not ours

"""Recordings on the disk: which may be sent, when they are ready, and whose directory it is."""

import json
import os
import shutil
import stat
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from agent import Agent, AgentFactory, run_once
from backend import Backend, Call
from frontend import Frontend
from ledger import dead, failures, let_hours_pass, uploads
from pg import Database
from waiting import wait_until

MARKER = ".serversync-root"
# Mounts of the agent's own: nobody else sees them, and they are gone when it ends.
MOUNTING = ("unshare", "--mount", "sh", "-c")

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A directory that is none of our business, with something that looks like a recording."""
    directory = tmp_path / "outside"
    directory.mkdir()
    (directory / "mixed.wav").write_bytes(b"RIFF: a secret")
    (directory / "meta.json").write_text('{"secret": true}')
    return directory


def assert_dead_and_kept(db: Database, backend: Backend, call: Call, code: str) -> None:
    """Its entry is a dead letter, the backend sees a failed upload, its directory is untouched."""
    assert dead(db).get(call.seq("recording_file")) == code, call
    assert backend.upload_status(call) == ("upload_failed", None)
    assert call.directory.is_dir()


# -- paths ----------------------------------------------------------------------------------------


def test_paths_that_lead_elsewhere_are_dead_and_nothing_is_sent(
    db: Database, frontend: Frontend, backend: Backend, agent: AgentFactory, outside: Path
) -> None:
    up = os.path.relpath(outside, backend.recordings_dir)
    paths = [
        f"storage/recordings/{up}/mixed.wav",
        f"storage/recordings/call/../{up}/mixed.wav",
        "storage/recordings/../mixed.wav",
        "storage/recordings/call/../mixed.wav",
        "storage/recordings/call/..",
        "storage/recordings/./mixed.wav",
        "storage/recordings//mixed.wav",
        "storage/recordings/a/call/mixed.wav",
        "storage/elsewhere/call/mixed.wav",
        f"storage/recordings/{'x' * 300}/mixed.wav",
        "storage/recordings/.serversync-trash/mixed.wav",
        f"{outside}/mixed.wav",
        "/call/mixed.wav",
        "/mixed.wav",
        "mixed.wav",
        "..",
        "",
    ]
    calls = [backend.end_call(events=0, seconds=0.1, file_path=path) for path in paths if path]
    for payload in (
        {"callId": ".."},
        {"call_id": "../../outside"},
        {"callId": str(outside)},
        {"filePath": "", "callId": "call"},
    ):
        known = {"callLogId": str(uuid.uuid4()), **payload}
        calls.append(backend.end_call(events=0, seconds=0.1, file_payload=known))

    result = agent.once()

    assert result.returncode == 1, result.stderr
    assert not frontend.of_kind("file")
    assert {call.seq("recording_file") for call in calls} == set(dead(db))
    for call in calls:
        assert_dead_and_kept(db, backend, call, "FILE_UNSAFE")
        assert call.wav.is_file() and call.meta.is_file()
    assert len(frontend.seqs()) == 2 * len(calls)
    assert (outside / "mixed.wav").read_bytes() == b"RIFF: a secret"


def test_links_hard_links_and_other_kinds_of_files_are_dead_and_nothing_outside_is_opened(
    db: Database, frontend: Frontend, backend: Backend, agent: AgentFactory, outside: Path,
    tmp_path: Path,
) -> None:  # fmt: skip
    def linked_directory(call: Call) -> None:
        call.directory.symlink_to(outside)

    def linked_file(call: Call) -> None:
        call.wav.symlink_to(outside / "mixed.wav")

    def linked_to_a_neighbour(call: Call) -> None:
        call.wav.symlink_to(f"../{neighbour.call_id}/mixed.wav")

    def hard_link(call: Call) -> None:
        call.wav.hardlink_to(outside / "mixed.wav")

    def pipe(call: Call) -> None:
        os.mkfifo(call.wav)

    def directory(call: Call) -> None:
        call.wav.mkdir()

    def file_as_directory(call: Call) -> None:
        call.directory.write_text("no directory")

    neighbour = backend.end_call(call_id="neighbour..")
    calls = []
    for make in (
        linked_directory, linked_file, linked_to_a_neighbour, hard_link, pipe, directory,
        file_as_directory,
    ):  # fmt: skip
        call = backend.end_call(events=0, audio=False, call_id=make.__name__)
        if make in (linked_directory, file_as_directory):
            shutil.rmtree(call.directory)
        make(call)
        calls.append(call)
    # A linked meta.json never makes its recording ready, nor is it read.
    waiting = backend.end_call(events=0, meta=False)
    waiting.meta.symlink_to(outside / "meta.json")

    trace = tmp_path / "trace"
    prefix = ("strace", "-f", "-y", "-e", "trace=%file,%desc", "-o", str(trace))
    result = run_once(agent.env(), prefix=prefix)

    assert result.returncode == 1, result.stderr
    for call in calls:
        code = dead(db).get(call.seq("recording_file"))
        assert code == "FILE_UNSAFE", call
        assert backend.upload_status(call) == ("upload_failed", None)
    assert [file.recording_id for file in frontend.uploads] == [neighbour.recording_id]
    assert failures(db)[waiting.seq("recording_file")][0] == "NOT_READY"
    # strace names the file behind each descriptor: no name leads there, by whatever way.
    assert str(neighbour.directory) in trace.read_text()
    assert str(outside) not in trace.read_text()
    assert stat.S_ISFIFO((backend.recordings_dir / "pipe" / "mixed.wav").stat().st_mode)


@needs_root
def test_a_recording_on_another_file_system_is_dead(
    db: Database, frontend: Frontend, backend: Backend, agent: AgentFactory
) -> None:
    mounted = backend.end_call(events=0, call_id="a directory")
    bound = backend.end_call(events=0, call_id="a file")
    good = backend.end_call(events=0)
    script = f"""
        set -e
        cd '{backend.recordings_dir}'
        mount -t tmpfs none /mnt
        cp -a 'a directory/.' 'a file/mixed.wav' /mnt
        mount --bind '/mnt/mixed.wav' 'a file/mixed.wav'
        mount --bind /mnt 'a directory'
        exec "$@"
    """

    result = run_once(agent.env(), prefix=(*MOUNTING, script, "sh"))

    assert result.returncode == 1, result.stderr
    assert [file.recording_id for file in frontend.uploads] == [good.recording_id]
    for call in (mounted, bound):
        assert_dead_and_kept(db, backend, call, "FILE_UNSAFE")
        assert call.wav.is_file() and call.meta.is_file()


def test_names_as_sip_makes_them_are_delivered_and_deleted(
    db: Database, frontend: Frontend, backend: Backend, agent: AgentFactory
) -> None:
    names = [
        "8HnT2kQ-a3x9..",
        "..8HnT2kQ",
        "...",
        "a84b4c76e66710@192.168.1.20",
        "@",
        "-rf",
        "~",
        "%2e%2e",
        "recordings",
        'x"; filename="evil.sh',
        "a\r\nb: c",
        "a b\\c'*?",
        "通話-é",
        "y" * 255,
    ]
    calls = [backend.end_call(events=0, seconds=0.1, call_id=name) for name in names]

    result = agent.once()

    assert result.returncode == 0, result.stderr
    for call in calls:
        stored = frontend.files[call.call_log_id]
        assert (stored.sha256, stored.recording_id) == (call.sha256, call.recording_id)
        assert json.loads(stored.meta)["callId"] == call.call_id
        assert not call.directory.exists()
    assert not dead(db) and not db.pending() and not uploads(db)


def test_rows_written_by_hand_are_found_and_meta_path_is_ignored(
    frontend: Frontend, backend: Backend, agent: AgentFactory, outside: Path
) -> None:
    secret = str(outside / "meta.json")
    places: list[dict[str, str]] = [
        {"call_log_id": "", "recording_id": "", "file_path": "storage/recordings/0/mixed.wav"},
        {"call_log_id": "", "call_id": "1"},
        {"callLogId": "", "recordingId": "", "callId": "2", "metaPath": secret},
        {"callLogId": "", "filePath": "3/mixed.wav", "meta_path": secret},
        {"callLogId": "", "filePath": str(backend.recordings_dir / "4" / "mixed.wav")},
        {"callLogId": "", "filePath": "recordings/5/mixed.wav", "callId": "elsewhere"},
    ]
    calls = []
    for number, place in enumerate(places):
        payload = {name: value or str(uuid.uuid4()) for name, value in place.items()}
        call = backend.end_call(events=0, call_id=str(number), file_payload=payload)
        call.call_log_id = payload.get("callLogId") or payload["call_log_id"]
        calls.append(call)

    result = agent.once()

    for call in calls:
        assert frontend.files[call.call_log_id].sha256 == call.sha256, result.stderr
        assert json.loads(frontend.files[call.call_log_id].meta)["callId"] == call.call_id


def test_payloads_without_ids_or_a_place_are_dead_and_the_recording_is_shown_as_failed(
    db: Database, frontend: Frontend, backend: Backend, agent: AgentFactory
) -> None:
    path = "storage/recordings/x/mixed.wav"
    payloads: list[dict[str, object]] = [
        {},
        {"filePath": path},
        {"callLogId": "../../etc", "filePath": path},
        {"callLogId": f'{uuid.uuid4()}"\r\nX: y', "filePath": path},
        {"callLogId": str(uuid.uuid4())},
        {"callLogId": str(uuid.uuid4()), "filePath": None, "callId": None},
        {"callLogId": str(uuid.uuid4()), "filePath": "storage/recordings/x/passwd"},
    ]
    calls = [backend.end_call(events=0, file_payload=payload) for payload in payloads]
    alien = backend.end_call(
        events=0,
        file_payload={"callLogId": str(uuid.uuid4()), "recordingId": "1 or 1=1", "filePath": path},
    )

    result = agent.once()

    assert result.returncode == 1, result.stderr
    for call in calls:
        assert_dead_and_kept(db, backend, call, "BAD_PAYLOAD")
    assert dead(db)[alien.seq("recording_file")] == "BAD_PAYLOAD"
    assert not frontend.of_kind("file")


def test_behind_a_dead_recording_the_next_one_of_its_call_goes_at_once(
    db: Database, frontend: Frontend, backend: Backend, agent: AgentFactory
) -> None:
    call_log_id = str(uuid.uuid4())
    bad = [backend.end_call(call_log_id=call_log_id, file_path="../mixed.wav") for _ in range(3)]
    good = backend.end_call(call_log_id=call_log_id)

    result = agent.once()

    assert result.returncode == 1, result.stderr
    assert dead(db) == {call.seq("recording_file"): "FILE_UNSAFE" for call in bad}
    assert frontend.files[call_log_id].recording_id == good.recording_id
    assert not db.pending()


# -- readiness ------------------------------------------------------------------------------------


def empty_meta(call: Call) -> None:
    call.meta.write_bytes(b"")


def broken_meta(call: Call) -> None:
    call.meta.write_text('{"callId": "cut off he')


def deep_meta(call: Call) -> None:
    call.meta.write_text("[" * 100_000)


def binary_meta(call: Call) -> None:
    call.meta.write_bytes(b"\xff\xfe\xfd")


def not_a_number(call: Call) -> None:
    call.meta.write_text('{"durationSec": NaN}')


def byte_order_mark(call: Call) -> None:
    call.meta.write_text('{"callId": "x"}', encoding="utf-8-sig")


def utf_16(call: Call) -> None:
    call.meta.write_text('{"callId": "x"}', encoding="utf-16")


def huge_meta(call: Call) -> None:
    call.meta.write_text(json.dumps({"padding": "x" * 1_000_000}))


def directory_as_meta(call: Call) -> None:
    call.meta.unlink()
    call.meta.mkdir()


def no_meta(call: Call) -> None:
    call.meta.unlink()


def no_audio(call: Call) -> None:
    call.wav.unlink()


def empty_audio(call: Call) -> None:
    os.truncate(call.wav, 0)


def no_directory(call: Call) -> None:
    shutil.rmtree(call.directory)


Break = Callable[[Call], None]
WITHOUT_META: tuple[Break, ...] = (
    no_meta, empty_meta, broken_meta, deep_meta, binary_meta, huge_meta, directory_as_meta,
    not_a_number, byte_order_mark, utf_16,
)  # fmt: skip
WITHOUT_AUDIO: tuple[Break, ...] = (no_audio, empty_audio, no_directory)


def broken_calls(backend: Backend, breaks: tuple[Break, ...]) -> list[Call]:
    calls = []
    for harm in breaks:
        call = backend.end_call(events=0, seconds=0.1, call_id=harm.__name__)
        harm(call)
        calls.append(call)
    return calls


def wait_for_looks(db: Database, running: Agent, calls: list[Call], number: int) -> None:
    """Until each of these recordings was looked at so often, and still waits."""
    seqs = [call.seq("recording_file") for call in calls]

    def looked() -> bool:
        assert running.running
        found = failures(db)
        return all(found[seq][1] >= number for seq in seqs)

    wait_until(looked, what=f"look {number}", state=lambda: str(failures(db)))


def test_incomplete_recordings_wait_for_the_grace_time_however_often_they_are_looked_at(
    db: Database, frontend: Frontend, backend: Backend, agent: AgentFactory
) -> None:
    lame, lost = broken_calls(backend, WITHOUT_META), broken_calls(backend, WITHOUT_AUDIO)
    running = agent(SYNC_FILE_GRACE_SEC=7200, SYNC_RETRY_MAX=1, SYNC_RETRY_HOURS=0)
    # A clock that jumped counts as ten minutes.
    for number in range(1, 7):
        wait_for_looks(db, running, lame + lost, number)
        db.execute("update serversync.waiting set updated_at = updated_at - interval '3 days'")
        let_hours_pass(db)
    wait_for_looks(db, running, lame + lost, 7)
    assert {state[0] for state in failures(db).values()} == {"NOT_READY"}
    assert {state[2] for state in failures(db).values()} == {0}
    assert not dead(db) and not frontend.of_kind("file")

    # What comes in time is sent as it is.
    late = lame.pop(0)
    backend.write_meta(late)
    let_hours_pass(db)
    frontend.wait(lambda: frontend.files[late.call_log_id])
    assert json.loads(frontend.files[late.call_log_id].meta)["recordingId"] == late.recording_id

    wait_for_looks(db, running, lame + lost, 8)
    let_hours_pass(db, 2)
    wait_until(lambda: not db.pending(), what="the end of the grace", state=running.log)
    for call in lame:
        stored = frontend.files[call.call_log_id]
        assert stored.sha256 == call.sha256
        assert json.loads(stored.meta)["callId"] == call.call_id
        assert json.loads(stored.meta)["recordingId"] == call.recording_id
        assert backend.upload_status(call)[0] == "uploaded"
        wait_until(partial(lambda wav: not wav.exists(), call.wav), what="the deletion")
        assert running.lines(f"recording {call.seq('recording_file')} has no usable meta.json")
    for call in lost:
        assert dead(db)[call.seq("recording_file")] == "FILE_MISSING"
        assert backend.upload_status(call) == ("upload_failed", None)
    # An empty meta.json holds nothing to lose; what is merely not understood stays.
    kept = {call.call_id for call in lame if call.meta.exists()}
    assert kept == {call.call_id for call in lame} - {"empty_meta"}
    assert (backend.recordings_dir / "no_audio" / "meta.json").is_file()


def test_incomplete_recordings_are_looked_at_five_times_however_short_the_grace_is(
    db: Database, frontend: Frontend, backend: Backend, agent: AgentFactory
) -> None:
    lame, lost = broken_calls(backend, (no_meta,)), broken_calls(backend, (no_audio,))
    running = agent(SYNC_FILE_GRACE_SEC=0)
    for number in range(1, 5):
        wait_for_looks(db, running, lame + lost, number)
        assert not dead(db) and not frontend.of_kind("file")
        let_hours_pass(db, 72)
    wait_until(lambda: not db.pending(), what="the fifth look", state=running.log)
    assert dead(db) == {lost[0].seq("recording_file"): "FILE_MISSING"}
    assert list(frontend.files) == [lame[0].call_log_id]


def test_a_file_that_is_gone_from_an_uploaded_recording_counts_as_sent(
    db: Database, frontend: Frontend, backend: Backend, agent: AgentFactory
) -> None:
    url = "https://frontend.example/kept.wav"
    gone = [backend.end_call(events=0) for _ in range(2)]
    shutil.rmtree(gone[0].directory)
    gone[1].wav.unlink()
    # But a pending recording_file always means upload, when there is something to upload.
    there = backend.end_call(events=0)
    unready = backend.end_call(events=0, meta=False)
    for call in (*gone, there, unready):
        db.execute(
            "update recordings set upload_status = 'uploaded', s3_url = %s where id = %s",
            (url, call.recording_id),
        )

    result = agent.once()

    assert result.returncode == 75, result.stderr
    assert db.pending() == [unready.seq("recording_file")]
    assert [file.recording_id for file in frontend.uploads] == [there.recording_id]
    assert not dead(db)
    for call in gone:
        assert backend.upload_status(call) == ("uploaded", url)
    assert gone[1].meta.is_file()

    backend.write_meta(unready)
    let_hours_pass(db, 72)
    assert agent.once().returncode == 0
    assert frontend.files[unready.call_log_id].sha256 == unready.sha256


@pytest.mark.parametrize(
    ("call", "error", "fault"),
    [
        ("pread64,preadv,preadv2", "EIO", "Input/output error"),
        ("openat", "EACCES", "Permission denied"),
    ],
)
def test_a_file_that_cannot_be_read_is_set_aside_and_never_dead(
    db: Database, frontend: Frontend, backend: Backend, agent: AgentFactory,
    call: str, error: str, fault: str, tmp_path: Path,
) -> None:  # fmt: skip
    bad = backend.end_call(events=0, name="unreadable.wav")
    others = [backend.end_call(events=0) for _ in range(2)]
    # By its name alone, as it is opened below a directory; else by the path of its descriptor.
    where = str(bad.wav) if error == "EIO" else "unreadable.wav"
    trace = ("-o", str(tmp_path / "trace"), "-e", f"trace={call}")
    prefix = ("strace", "-f", *trace, "-P", where, "-e", f"inject={call}:error={error}")
    settings = {"SYNC_RETRY_MAX": 1, "SYNC_RETRY_HOURS": 0}

    for _ in range(3):
        result = run_once(agent.env(**settings), prefix=prefix)
        assert result.returncode == 75, result.stderr
        [(code, _, attempts)] = failures(db).values()
        assert (code, attempts) == ("FILE_UNREADABLE", 0)
        assert db.value("select reason from serversync.waiting").endswith(fault)
        assert len(frontend.uploads) == len(others)  # others are not held up
        assert not dead(db)
        others.append(backend.end_call(events=0))
        let_hours_pass(db, 72)
    assert bad.wav.is_file()

    assert agent.once().returncode == 0
    assert frontend.files[bad.call_log_id].sha256 == bad.sha256


def test_a_second_recording_of_a_call_is_not_sent_and_keeps_its_files(
    db: Database, frontend: Frontend, backend: Backend, agent: AgentFactory
) -> None:
    first = backend.end_call(events=0)
    second = backend.end_call(events=0, call_log_id=first.call_log_id)

    result = agent.once()

    assert result.returncode == 1, result.stderr
    assert [file.recording_id for file in frontend.uploads] == [first.recording_id]
    assert backend.upload_status(first)[0] == "uploaded"
    assert_dead_and_kept(db, backend, second, "SECOND_RECORDING")
    assert second.wav.is_file() and second.meta.is_file()
    # Also long after the first, whose receipt may have been pruned.
    db.execute("delete from serversync.deliveries")
    third = backend.end_call(events=0, call_log_id=first.call_log_id.upper())
    assert agent.once().returncode == 1
    assert_dead_and_kept(db, backend, third, "SECOND_RECORDING")
    assert frontend.files[first.call_log_id].count == 1


# -- the root -------------------------------------------------------------------------------------


def root_id(db: Database) -> str | None:
    found: str | None = db.value("select root_id from serversync.sender")
    return found


def test_the_root_is_marked_once_and_a_new_database_adopts_the_mark(
    db: Database, frontend: Frontend, backend: Backend, agent: AgentFactory
) -> None:
    backend.end_call(events=0)
    assert agent.once().returncode == 0
    marker = backend.recordings_dir / MARKER
    mark = marker.read_text().strip()
    assert mark and root_id(db) == mark

    # A database that was restored or made anew knows no root, but the recordings are the same.
    db.execute("drop schema serversync cascade")
    backend.end_call(events=0)
    assert agent.once().returncode == 0
    assert marker.read_text().strip() == mark == root_id(db)
    assert len(frontend.uploads) == 2


def has_entry(frontend: Frontend, seq: int) -> bool:
    return seq in frontend.seqs()


def unmounted(root: Path) -> None:
    """What an unmounted mount point looks like: an empty directory."""
    root.rename(root.with_name("elsewhere"))
    root.mkdir()


def another(root: Path) -> None:
    """Another one's recordings are mounted, with the same calls in it."""
    root.rename(root.with_name("elsewhere"))
    shutil.copytree(root.with_name("elsewhere"), root)
    (root / MARKER).write_text(uuid.uuid4().hex)


def nothing(root: Path) -> None:
    root.rename(root.with_name("elsewhere"))


@pytest.mark.parametrize("vanish", [unmounted, another, nothing])
def test_a_root_that_is_not_ours_is_an_outage_for_files_only(
    db: Database, frontend: Frontend, backend: Backend, agent: AgentFactory,
    vanish: Callable[[Path], None],
) -> None:  # fmt: skip
    root = backend.recordings_dir
    first = backend.end_call(events=0)
    running = agent(SYNC_FILE_GRACE_SEC=0, SYNC_RETRY_MAX=1, SYNC_RETRY_HOURS=0)
    wait_until(
        lambda: not first.directory.exists() and not uploads(db), what="the first recording's end"
    )
    # In one transaction with the rename before: it is never seen in the right root.
    with db.connect(autocommit=False) as connection:
        calls = [backend.end_call(events=0, connection=connection) for _ in range(6)]
        vanish(root)

    running.wait_log("files: outage")
    waiting = [call.seq("recording_file") for call in calls]
    wait_until(lambda: db.pending() == waiting, what="the entries", state=running.log)
    for _ in range(5):
        seq = backend.enqueue()
        frontend.wait(partial(has_entry, frontend, seq), what="an entry")
    assert len(running.lines("not the one we know")) == 1
    assert running.lines("recordings directory")
    assert not dead(db) and not failures(db) and len(frontend.uploads) == 1
    assert {backend.upload_status(call)[0] for call in calls} == {"local_only"}

    if root.exists():
        shutil.rmtree(root)
    root.with_name("elsewhere").rename(root)
    # What waits is the longest once; SIGHUP says that somebody did something about it.
    running.hup()
    wait_until(lambda: not db.pending(), what="the recordings", state=running.log)
    assert running.wait_log("files: recovered after")
    for call in calls:
        assert frontend.files[call.call_log_id].sha256 == call.sha256
    assert not dead(db)


def test_once_says_that_the_root_is_not_there_and_leaves_it_alone(
    db: Database, frontend: Frontend, backend: Backend, agent: AgentFactory
) -> None:
    backend.end_call(events=0)
    assert agent.once().returncode == 0
    (backend.recordings_dir / MARKER).unlink()
    call = backend.end_call(events=0)
    before = sorted(os.listdir(backend.recordings_dir))

    result = agent.once()

    assert result.returncode == 75
    assert "not the one we know" in result.stderr
    assert db.pending() == [call.seq("recording_file")]
    assert sorted(os.listdir(backend.recordings_dir)) == before
    assert len(frontend.uploads) == 1

"""Recordings on the disk: which may be sent, when they are ready, and whose directory it is."""

import json
import os
import shutil
import stat
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from agent import Agent, run_once
from backend import Backend, Call
from ledger import dead, failures, let_hours_pass, uploads
from pg import Database
from pi import Pi
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


def assert_dead_and_kept(pi: Pi, call: Call, code: str) -> None:
    """Its entry is a dead letter, the backend sees a failed upload, its directory is untouched."""
    assert dead(pi.db).get(call.seq("recording_file")) == code, call
    assert pi.backend.upload_status(call) == ("upload_failed", None)
    assert call.directory.is_dir()


# -- paths ----------------------------------------------------------------------------------------


def test_paths_that_lead_elsewhere_are_dead_and_nothing_is_sent(pi: Pi, outside: Path) -> None:
    up = os.path.relpath(outside, pi.backend.recordings_dir)
    paths = [  # all others: test_policy.py
        f"storage/recordings/{up}/mixed.wav",
        "storage/recordings/.serversync-trash/mixed.wav",
        f"{outside}/mixed.wav",
    ]
    path = "storage/recordings/x/mixed.wav"
    known = {"callLogId": str(uuid.uuid4())}
    payloads: list[tuple[str, dict[str, Any]]] = [
        ("FILE_UNSAFE", {**known, "call_id": "../../outside"}),
        ("FILE_UNSAFE", {**known, "filePath": "", "callId": "call"}),
        # Without ids, or a place.
        ("BAD_PAYLOAD", {}),
        ("BAD_PAYLOAD", {"filePath": path}),
        ("BAD_PAYLOAD", {"callLogId": f'{uuid.uuid4()}"\r\nX: y', "filePath": path}),
        ("BAD_PAYLOAD", {**known, "filePath": None, "callId": None}),
    ]
    brief: dict[str, Any] = {"events": 0, "seconds": 0.1}
    calls = [("FILE_UNSAFE", pi.backend.end_call(file_path=path, **brief)) for path in paths]
    for code, payload in payloads:
        calls.append((code, pi.backend.end_call(file_payload=payload, **brief)))
    alien = {**known, "recordingId": "1 or 1=1", "filePath": path}
    last = pi.backend.enqueue("recording_file", alien)

    pi.once(code=1)

    assert not pi.frontend.of_kind("file")
    assert dead(pi.db).keys() == {*(call.seq("recording_file") for _, call in calls), last}
    assert dead(pi.db)[last] == "BAD_PAYLOAD"
    for code, call in calls:
        assert_dead_and_kept(pi, call, code)
        assert call.wav.is_file() and call.meta.is_file()
    assert len(pi.frontend.seqs()) == 2 * len(calls)
    assert (outside / "mixed.wav").read_bytes() == b"RIFF: a secret"


def test_links_hard_links_and_other_kinds_of_files_are_dead_and_nothing_outside_is_opened(
    pi: Pi, outside: Path, tmp_path: Path
) -> None:
    neighbour = pi.backend.end_call(call_id="neighbour..")
    makes: Breaks = {
        "linked file": lambda call: call.wav.symlink_to(outside / "mixed.wav"),
        "linked to a neighbour": lambda call: call.wav.symlink_to("../neighbour../mixed.wav"),
        "hard link": lambda call: call.wav.hardlink_to(outside / "mixed.wav"),
        "pipe": lambda call: os.mkfifo(call.wav),
        "directory": lambda call: call.wav.mkdir(),
        # These instead of its directory.
        "linked directory": lambda call: call.directory.symlink_to(outside),
        "a file as directory": lambda call: call.directory.write_text("no directory"),
    }
    calls = []
    for name, make in makes.items():
        call = pi.backend.end_call(events=0, audio=False, call_id=name)
        if name in ("linked directory", "a file as directory"):
            shutil.rmtree(call.directory)
        make(call)
        calls.append(call)
    # A linked meta.json never makes its recording ready, nor is it read.
    waiting = pi.backend.end_call(events=0, meta=False)
    waiting.meta.symlink_to(outside / "meta.json")

    trace = tmp_path / "trace"
    prefix = ("strace", "-f", "-y", "-e", "trace=%file,%desc", "-o", str(trace))
    result = run_once(pi.agent.env(), prefix=prefix)

    assert result.returncode == 1, result.stderr
    for call in calls:
        code = dead(pi.db).get(call.seq("recording_file"))
        assert code == "FILE_UNSAFE", call
        assert pi.backend.upload_status(call) == ("upload_failed", None)
    assert [file.recording_id for file in pi.frontend.uploads] == [neighbour.recording_id]
    assert failures(pi.db)[waiting.seq("recording_file")][0] == "NOT_READY"
    # strace names the file behind each descriptor: no name leads there, by whatever way.
    assert str(neighbour.directory) in trace.read_text()
    assert str(outside) not in trace.read_text()
    assert stat.S_ISFIFO((pi.backend.recordings_dir / "pipe" / "mixed.wav").stat().st_mode)


@needs_root
def test_a_recording_on_another_file_system_is_dead(pi: Pi) -> None:
    mounted = pi.backend.end_call(events=0, call_id="a directory")
    bound = pi.backend.end_call(events=0, call_id="a file")
    good = pi.backend.end_call(events=0)
    script = f"""
        set -e
        cd '{pi.backend.recordings_dir}'
        mount -t tmpfs none /mnt
        cp -a 'a directory/.' 'a file/mixed.wav' /mnt
        mount --bind '/mnt/mixed.wav' 'a file/mixed.wav'
        mount --bind /mnt 'a directory'
        exec "$@"
    """

    result = run_once(pi.agent.env(), prefix=(*MOUNTING, script, "sh"))

    assert result.returncode == 1, result.stderr
    assert [file.recording_id for file in pi.frontend.uploads] == [good.recording_id]
    for call in (mounted, bound):
        assert_dead_and_kept(pi, call, "FILE_UNSAFE")
        assert call.wav.is_file() and call.meta.is_file()


def test_rows_written_by_hand_are_found_and_meta_path_is_ignored(pi: Pi, outside: Path) -> None:
    secret = str(outside / "meta.json")
    places: list[dict[str, str]] = [
        {"call_log_id": "", "recording_id": "", "file_path": "storage/recordings/0/mixed.wav"},
        {"call_log_id": "", "call_id": "1"},
        {"callLogId": "", "recordingId": "", "callId": "2", "metaPath": secret},
        {"callLogId": "", "filePath": "3/mixed.wav", "meta_path": secret},
    ]
    calls = []
    for number, place in enumerate(places):
        payload = {name: value or str(uuid.uuid4()) for name, value in place.items()}
        call = pi.backend.end_call(events=0, call_id=str(number), file_payload=payload)
        call.call_log_id = payload.get("callLogId") or payload["call_log_id"]
        calls.append(call)

    result = pi.agent.once()

    for call in calls:
        assert pi.frontend.files[call.call_log_id].sha256 == call.sha256, result.stderr
        assert json.loads(pi.frontend.files[call.call_log_id].meta)["callId"] == call.call_id


def test_behind_a_dead_recording_the_next_one_of_its_call_goes_at_once(pi: Pi) -> None:
    call_log_id = str(uuid.uuid4())
    bad = [pi.backend.end_call(call_log_id=call_log_id, file_path="../mixed.wav") for _ in range(3)]
    good = pi.backend.end_call(call_log_id=call_log_id)

    pi.once(code=1)

    assert dead(pi.db) == {call.seq("recording_file"): "FILE_UNSAFE" for call in bad}
    assert pi.frontend.files[call_log_id].recording_id == good.recording_id
    assert not pi.db.pending()


# -- readiness ------------------------------------------------------------------------------------


def directory_as_meta(call: Call) -> None:
    call.meta.unlink()
    call.meta.mkdir()


Breaks = dict[str, Callable[[Call], object]]
WITHOUT_META: Breaks = {
    "no meta": lambda call: call.meta.unlink(),
    "empty": lambda call: call.meta.write_bytes(b""),
    "cut off": lambda call: call.meta.write_text('{"callId": "cut off he'),
    "deep": lambda call: call.meta.write_text("[" * 100_000),
    "binary": lambda call: call.meta.write_bytes(b"\xff\xfe\xfd"),
    "huge": lambda call: call.meta.write_text(json.dumps({"padding": "x" * 1_000_000})),
    "a directory": directory_as_meta,
    "not a number": lambda call: call.meta.write_text('{"durationSec": NaN}'),
    "byte order mark": lambda call: call.meta.write_text('{"callId": "x"}', encoding="utf-8-sig"),
    "UTF-16": lambda call: call.meta.write_text('{"callId": "x"}', encoding="utf-16"),
}
WITHOUT_AUDIO: Breaks = {
    "no audio": lambda call: call.wav.unlink(),
    "empty audio": lambda call: os.truncate(call.wav, 0),
    "nothing": lambda call: shutil.rmtree(call.directory),
}


def broken_calls(backend: Backend, breaks: Breaks) -> list[Call]:
    calls = []
    for name, harm in breaks.items():
        call = backend.end_call(events=0, seconds=0.1, call_id=name)
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
    pi: Pi, hurry: Callable[..., None]
) -> None:
    hurry(SHARE=0.1)  # a look is followed by a rest
    lame, lost = broken_calls(pi.backend, WITHOUT_META), broken_calls(pi.backend, WITHOUT_AUDIO)
    running = pi.agent(SYNC_FILE_GRACE_SEC=7200, SYNC_RETRY_MAX=1, SYNC_RETRY_HOURS=0)
    # A clock that jumped counts as ten minutes.
    for number in range(1, 7):
        wait_for_looks(pi.db, running, lame + lost, number)
        pi.db.execute("update serversync.waiting set updated_at = updated_at - interval '3 days'")
        let_hours_pass(pi.db)
    wait_for_looks(pi.db, running, lame + lost, 7)
    assert {state[0] for state in failures(pi.db).values()} == {"NOT_READY"}
    assert {state[2] for state in failures(pi.db).values()} == {0}
    assert not dead(pi.db) and not pi.frontend.of_kind("file")

    # What comes in time is sent as it is.
    late = lame.pop(0)
    pi.backend.write_meta(late)
    let_hours_pass(pi.db)
    pi.frontend.wait(lambda: pi.frontend.files[late.call_log_id])
    assert json.loads(pi.frontend.files[late.call_log_id].meta)["recordingId"] == late.recording_id

    wait_for_looks(pi.db, running, lame + lost, 8)
    let_hours_pass(pi.db, 2)
    pi.wait_delivered()
    for call in lame:
        stored = pi.frontend.files[call.call_log_id]
        assert stored.sha256 == call.sha256
        assert json.loads(stored.meta)["callId"] == call.call_id
        assert json.loads(stored.meta)["recordingId"] == call.recording_id
        assert pi.backend.upload_status(call)[0] == "uploaded"
        wait_until(partial(lambda wav: not wav.exists(), call.wav), what="the deletion")
        assert running.lines(f"recording {call.seq('recording_file')} has no usable meta.json")
    for call in lost:
        assert dead(pi.db)[call.seq("recording_file")] == "FILE_MISSING"
        assert pi.backend.upload_status(call) == ("upload_failed", None)
    # An empty meta.json holds nothing to lose; what is merely not understood stays.
    kept = {call.call_id for call in lame if call.meta.exists()}
    assert kept == {call.call_id for call in lame} - {"empty"}
    assert (pi.backend.recordings_dir / "no audio" / "meta.json").is_file()


def test_a_file_that_is_gone_from_an_uploaded_recording_counts_as_sent(pi: Pi) -> None:
    url = "https://frontend.example/kept.wav"
    gone = [pi.backend.end_call(events=0) for _ in range(2)]
    shutil.rmtree(gone[0].directory)
    gone[1].wav.unlink()
    # But a pending recording_file always means upload, when there is something to upload.
    there = pi.backend.end_call(events=0)
    unready = pi.backend.end_call(events=0, meta=False)
    for call in (*gone, there, unready):
        pi.db.execute(
            "update recordings set upload_status = 'uploaded', s3_url = %s where id = %s",
            (url, call.recording_id),
        )

    pi.once(code=75)

    assert pi.db.pending() == [unready.seq("recording_file")]
    assert [file.recording_id for file in pi.frontend.uploads] == [there.recording_id]
    assert not dead(pi.db)
    for call in gone:
        assert pi.backend.upload_status(call) == ("uploaded", url)
    assert gone[1].meta.is_file()

    pi.backend.write_meta(unready)
    let_hours_pass(pi.db, 72)
    pi.once()
    assert pi.frontend.files[unready.call_log_id].sha256 == unready.sha256


@pytest.mark.parametrize(
    ("call", "error", "fault"),
    [
        ("pread64,preadv,preadv2", "EIO", "Input/output error"),
        ("openat", "EACCES", "Permission denied"),
    ],
)
def test_a_file_that_cannot_be_read_is_set_aside_and_never_dead(
    pi: Pi, call: str, error: str, fault: str, tmp_path: Path
) -> None:
    bad = pi.backend.end_call(events=0, name="unreadable.wav")
    others = [pi.backend.end_call(events=0) for _ in range(2)]
    # By its name alone, as it is opened below a directory; else by the path of its descriptor.
    where = str(bad.wav) if error == "EIO" else "unreadable.wav"
    trace = ("-o", str(tmp_path / "trace"), "-e", f"trace={call}")
    prefix = ("strace", "-f", *trace, "-P", where, "-e", f"inject={call}:error={error}")
    settings = {"SYNC_RETRY_MAX": 1, "SYNC_RETRY_HOURS": 0}

    for _ in range(3):
        result = run_once(pi.agent.env(**settings), prefix=prefix)
        assert result.returncode == 75, result.stderr
        [(code, _, attempts)] = failures(pi.db).values()
        assert (code, attempts) == ("FILE_UNREADABLE", 0)
        assert pi.db.value("select reason from serversync.waiting").endswith(fault)
        assert len(pi.frontend.uploads) == len(others)  # others are not held up
        assert not dead(pi.db)
        others.append(pi.backend.end_call(events=0))
        let_hours_pass(pi.db, 72)
    assert bad.wav.is_file()

    pi.once()
    assert pi.frontend.files[bad.call_log_id].sha256 == bad.sha256


def test_a_second_recording_of_a_call_is_not_sent_and_keeps_its_files(pi: Pi) -> None:
    first = pi.backend.end_call(events=0)
    second = pi.backend.end_call(events=0, call_log_id=first.call_log_id)

    pi.once(code=1)

    assert [file.recording_id for file in pi.frontend.uploads] == [first.recording_id]
    assert pi.backend.upload_status(first)[0] == "uploaded"
    assert_dead_and_kept(pi, second, "SECOND_RECORDING")
    assert second.wav.is_file() and second.meta.is_file()
    # Also long after the first, whose receipt may have been pruned.
    pi.db.execute("delete from serversync.deliveries")
    third = pi.backend.end_call(events=0, call_log_id=first.call_log_id.upper())
    pi.once(code=1)
    assert_dead_and_kept(pi, third, "SECOND_RECORDING")
    assert pi.frontend.files[first.call_log_id].count == 1


# -- the root -------------------------------------------------------------------------------------


def root_id(db: Database) -> str | None:
    found: str | None = db.value("select root_id from serversync.sender")
    return found


def test_the_root_is_marked_once_and_a_new_database_adopts_the_mark(pi: Pi) -> None:
    pi.backend.end_call(events=0)
    pi.once()
    marker = pi.backend.recordings_dir / MARKER
    mark = marker.read_text().strip()
    assert mark and root_id(pi.db) == mark

    # A database that was restored or made anew knows no root, but the recordings are the same.
    pi.db.execute("drop schema serversync cascade")
    pi.backend.end_call(events=0)
    pi.once()
    assert marker.read_text().strip() == mark == root_id(pi.db)
    assert len(pi.frontend.uploads) == 2


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
    pi: Pi, vanish: Callable[[Path], None]
) -> None:
    root = pi.backend.recordings_dir
    first = pi.backend.end_call(events=0)
    running = pi.agent(SYNC_FILE_GRACE_SEC=0, SYNC_RETRY_MAX=1, SYNC_RETRY_HOURS=0)
    wait_until(
        lambda: not first.directory.exists() and not uploads(pi.db),
        what="the first recording's end",
    )
    # In one transaction with the rename before: it is never seen in the right root.
    with pi.db.connect(autocommit=False) as connection:
        calls = [pi.backend.end_call(events=0, connection=connection) for _ in range(6)]
        vanish(root)

    running.wait_log("files: outage")
    waiting = [call.seq("recording_file") for call in calls]
    wait_until(lambda: pi.db.pending() == waiting, what="the entries", state=running.log)
    for _ in range(5):
        pi.wait_entry(pi.backend.enqueue())
    assert len(running.lines("not the one we know")) == 1
    assert running.lines("recordings directory")
    assert not dead(pi.db) and not failures(pi.db) and len(pi.frontend.uploads) == 1
    assert {pi.backend.upload_status(call)[0] for call in calls} == {"local_only"}

    if root.exists():
        shutil.rmtree(root)
    root.with_name("elsewhere").rename(root)
    # What waits is the longest once; SIGHUP says that somebody did something about it.
    running.hup()
    pi.wait_delivered()
    assert running.wait_log("files: recovered after")
    for call in calls:
        assert pi.frontend.files[call.call_log_id].sha256 == call.sha256
    assert not dead(pi.db)

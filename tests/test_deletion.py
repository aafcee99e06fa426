"""Deletion of uploaded recordings: when, what, and what an interruption leaves to be finished."""

import os
import shutil
import subprocess
import time
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import serversync
from agent import Agent, AgentFactory, run_once
from backend import Backend, Call, write_wav
from frontend import Reply
from ledger import let_hours_pass, uploads
from pg import Database
from pi import Pi
from waiting import wait_until

MARKER, TRASH = ".serversync-root", ".serversync-trash"
LATER: dict[str, Any] = {"SYNC_DELETE_AFTER_SEC": 3600}

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may do this")


def files_of(directory: Path) -> set[str]:
    return set(os.listdir(directory)) if directory.is_dir() else set()


def wait_until_removed(running: Agent, db: Database, *paths: Path) -> None:
    wait_until(
        lambda: not uploads(db) and not any(path.exists() for path in paths),
        what=f"the deletion of {paths}",
        state=running.log,
    )


def assert_trash_is_empty(backend: Backend) -> None:
    assert not files_of(backend.recordings_dir / TRASH)


# -- when -----------------------------------------------------------------------------------------

WRITING = 'exec >> "$0/merged.wav"; while :; do echo frames; sleep 0.1; done'
TOUCHING = 'while :; do touch "$0/mixed.marker"; rm "$0/mixed.marker"; sleep 0.1; done'


def test_a_directory_in_which_another_process_works_is_left_alone_until_it_is_quiet(pi: Pi) -> None:
    quiet = 2.0
    written, touched, still = (pi.backend.end_call(events=0) for _ in range(3))
    workers = [
        subprocess.Popen(["sh", "-c", script, str(call.directory)])
        for call, script in ((written, WRITING), (touched, TOUCHING))
    ]
    try:
        running = pi.agent(SYNC_DELETE_AFTER_SEC=quiet)
        wait_until(lambda: len(uploads(pi.db)) == 3, what="the uploads", state=running.log)
        # The other one goes while these stay: so the agent did look, and more than once.
        wait_until(lambda: not still.directory.exists(), what="the other", state=running.log)
        again = pi.backend.end_call(events=0)
        wait_until(lambda: again.call_log_id in pi.frontend.files, what="one more upload")
        wait_until(lambda: not again.directory.exists(), what="one more deletion")
        assert all(path.is_file() for call in (written, touched) for path in (call.wav, call.meta))
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    last = max(
        (written.directory / "merged.wav").stat().st_mtime, touched.directory.stat().st_mtime
    )
    wait_until_removed(running, pi.db, written.wav, written.meta, touched.wav, touched.meta)
    assert time.time() - last >= quiet
    # The workers' ends may have left their files.
    assert files_of(written.directory) == {"merged.wav"}
    assert files_of(touched.directory) <= {"mixed.marker"}
    assert len(pi.frontend.uploads) == 4


def test_a_clock_that_cannot_be_trusted_does_not_shorten_the_quiet_time(pi: Pi) -> None:
    # Written before the clock was set (1970), or by a clock that was ahead (2096).
    calls = {when: pi.backend.end_call(events=0) for when in (86400, 4e9)}
    for when, call in calls.items():
        for path in (call.wav, call.meta, call.directory):
            os.utime(path, (when, when))
    pi.once(**LATER)

    started = time.monotonic()
    running = pi.agent(SYNC_DELETE_AFTER_SEC=3)
    wait_until(lambda: len(uploads(pi.db)) < 2, what="the first deletion", state=running.log)
    assert time.monotonic() - started >= 3
    wait_until_removed(running, pi.db, *(call.directory for call in calls.values()))


def test_once_goes_by_the_newest_time_stamp(pi: Pi) -> None:
    old, new = pi.backend.end_call(events=0), pi.backend.end_call(events=0)
    long_ago = time.time() - 4000
    for path in (old.wav, old.meta, old.directory, new.wav, new.directory):
        os.utime(path, (long_ago, long_ago))

    for _ in range(2):
        pi.once(SYNC_DELETE_AFTER_SEC=3600)

    assert not old.directory.exists()
    assert files_of(new.directory) == {"mixed.wav", "meta.json"}
    assert uploads(pi.db) == [new.seq("recording_file")]


def test_more_directories_than_can_be_watched_at_once_have_their_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serversync, "WATCHED_MAX", 2)
    left = [str(number) for number in range(7)]
    for name in left:
        (tmp_path / name).mkdir()
    recordings, root = serversync.Recordings(str(tmp_path)), os.open(tmp_path, os.O_RDONLY)

    def still() -> bool:
        left[:] = [name for name in left if recordings.until_quiet(root, name, 0.05, False)]
        return not left

    assert not still() and len(left) == 7
    wait_until(still, what="the last one", state=lambda: str(left))
    os.close(root)


# -- what -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("extra", [None, "delete"])
def test_files_that_were_never_uploaded_stay_unless_the_configuration_says_otherwise(
    pi: Pi, extra: str | None
) -> None:
    others = ("b_leg.wav", "a_leg.wav", "merged.wav")
    alone, transferred = pi.backend.end_call(events=0), pi.backend.end_call(extra_files=others)
    noted = pi.backend.end_call(events=0, extra_files=("b_leg.wav",))
    (noted.directory / "notes").mkdir()
    (noted.directory / "notes" / "note.txt").write_text("not ours")

    pi.once(SYNC_EXTRA_FILES=extra)

    assert not alone.directory.exists()
    # A directory in the call's directory stays, whatever was said.
    assert files_of(noted.directory / "notes") == {"note.txt"}
    if extra == "delete":
        assert not transferred.directory.exists()
        assert files_of(noted.directory) == {"notes"}
    else:
        assert files_of(transferred.directory) == set(others)
    assert not uploads(pi.db)
    assert_trash_is_empty(pi.backend)
    assert len(pi.frontend.uploads) == 3


def test_a_second_recording_of_the_directory_that_grew_after_its_upload_stays(pi: Pi) -> None:
    first = pi.backend.end_call(call_id="again..", extra_files=("b_leg.wav",))
    second = pi.backend.end_call(call_id="again..", name="mixed.mp3")
    pi.once(**LATER)
    assert len(uploads(pi.db)) == len(pi.frontend.uploads) == 2
    append(second)

    result = pi.agent.once(SYNC_EXTRA_FILES="delete")

    assert "again..: mixed.mp3 changed after its upload" in result.stderr
    assert {"mixed.mp3", "b_leg.wav"} <= files_of(first.directory)
    assert not first.wav.exists()
    assert uploads(pi.db) == [second.seq("recording_file")]
    assert_trash_is_empty(pi.backend)


@pytest.mark.parametrize("code", ["ROW_CORRUPT", "SESSION_LOST"])
def test_where_an_entry_cannot_be_read_no_file_goes_that_may_be_its_own(pi: Pi, code: str) -> None:
    pi.once()
    first = pi.backend.end_call(call_id="again..", seconds=0.01)
    second = pi.backend.end_call(call_id="again..", seconds=0.01, name="second.wav")
    pi.db.execute(
        "insert into serversync.waiting (outbox_id, entity_id, entity_type, is_file, code, reason,"
        " next_attempt_at) select id, entity_id, entity_type, true, %s, '', now() + '50 min'"
        " from sync_outbox where id = %s",
        (code, second.seq("recording_file")),
    )
    pi.once(code=75, SYNC_EXTRA_FILES="delete")
    assert not first.wav.exists() and second.wav.exists()


def test_a_call_id_used_twice_keeps_its_files_until_the_last_one_is_through(pi: Pi) -> None:
    first = pi.backend.end_call(call_id="again..", seconds=0.1)
    # A prefix of its name, and the same name elsewhere, are other directories.
    near = pi.backend.end_call(call_id="again.", seconds=0.1)
    second = pi.backend.end_call(call_id="again..", seconds=0.2)
    pi.frontend.poison[second.call_log_id] = Reply(503)  # its file waits behind its entries

    pi.once(code=75)
    assert uploads(pi.db) == [first.seq("recording_file")]
    assert files_of(first.directory) == {"mixed.wav", "meta.json"}
    assert not near.directory.exists()
    assert list(pi.frontend.files) == [first.call_log_id, near.call_log_id]
    # Also when it is named in the other way.
    pi.db.execute(
        "update sync_outbox set payload = payload - 'filePath' || %s where id = %s",
        ('{"call_id": "again.."}', second.seq("recording_file")),
    )
    pi.once(code=75)
    assert files_of(first.directory) == {"mixed.wav", "meta.json"}

    pi.frontend.poison.clear()
    let_hours_pass(pi.db, 72)
    pi.once()
    assert pi.frontend.files[second.call_log_id].sha256 == second.sha256
    assert not first.directory.exists() and not uploads(pi.db)
    assert_trash_is_empty(pi.backend)


def append(call: Call) -> None:
    with call.wav.open("ab") as file:
        file.write(b"more")


def touch(call: Call) -> None:
    os.utime(call.wav)


def exchange(call: Call) -> None:
    status = call.wav.stat()
    call.wav.rename(call.directory.parent.parent / "moved")  # its inode stays in use
    write_wav(call.wav, 1, "another")
    os.utime(call.wav, ns=(status.st_atime_ns, status.st_mtime_ns))


def transcribe(call: Call) -> None:
    call.meta.write_text('{"transcript": "written later"}')


def contents(call: Call) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in call.directory.iterdir()}


def test_a_file_that_changed_after_its_upload_is_kept_and_said(pi: Pi) -> None:
    changes = [append, touch, exchange, transcribe]
    calls = [pi.backend.end_call(events=0) for _ in changes]
    other = pi.backend.end_call(events=0)
    pi.once(**LATER)
    for change, call in zip(changes, calls, strict=True):
        change(call)
    before = [contents(call) for call in calls]

    running = pi.agent()
    for change, call in zip(changes, calls, strict=True):
        name = "meta.json" if change is transcribe else "mixed.wav"
        running.wait_log(f"{call.call_id}: {name} changed after its upload")

    wait_until(lambda: not other.directory.exists(), what="the other one", state=running.log)
    assert [contents(call) for call in calls] == before
    kept = [call.seq("recording_file") for call in calls]
    wait_until(lambda: uploads(pi.db) == kept, what="their rows", state=running.log)
    rows = "select error from serversync.uploads where tries > 0"
    wait_until(lambda: len(pi.db.rows(rows)) == 4, what="the reasons")
    assert all("changed after its upload" in error for (error,) in pi.db.rows(rows))
    assert len(pi.frontend.uploads) == 5
    assert_trash_is_empty(pi.backend)

    # What is sent again as it is now goes.
    pi.db.execute("update sync_outbox set processed_at = null where id = any(%s)", (kept,))
    running.hup()
    wait_until_removed(running, pi.db, *(call.directory for call in calls))
    for call, files in zip(calls, before, strict=True):
        assert pi.frontend.files[call.call_log_id].path.read_bytes() == files["mixed.wav"]
    assert len(pi.frontend.uploads) == 5 + 4


def test_a_file_that_changes_in_the_last_moment_comes_back_from_the_trash(pi: Pi) -> None:
    call = pi.backend.end_call(events=0)
    pi.once(**LATER)
    seq = call.seq("recording_file")
    # A second passes between the last look at the files and the rename.
    slowly = ["-e", "trace=renameat", "-e", "inject=renameat:delay_enter=1000000"]
    running = pi.agent(strace=slowly)
    trace = running.strace_path
    wait_until(lambda: trace.exists() and "mixed.wav" in trace.read_text(), what="the rename")
    append(call)
    content = call.wav.read_bytes()

    running.wait_log(f"uploaded recording {seq} cannot be deleted")

    assert "mixed.wav changed after its upload" in running.log()
    assert files_of(call.directory) == {"mixed.wav", "meta.json"}
    assert call.wav.read_bytes() == content
    moves = [line for line in trace.read_text().splitlines() if "mixed.wav" in line]
    assert len(moves) >= 2  # there and back
    assert_trash_is_empty(pi.backend)
    assert len(pi.frontend.uploads) == 1


# -- deletion forbidden ---------------------------------------------------------------------------


def a_file_is_in_the_way(backend: Backend, call: Call) -> Callable[[], object]:
    """The agent's trash cannot be made."""
    trash = backend.recordings_dir / TRASH
    trash.write_text("in the way")
    return trash.unlink


def immutable_directory(backend: Backend, call: Call) -> Callable[[], object]:
    def chattr(flag: str) -> None:
        subprocess.run(["chattr", flag, str(call.directory)], check=True, capture_output=True)

    chattr("+i")
    return partial(chattr, "-i")


@needs_root
@pytest.mark.parametrize("forbid", [a_file_is_in_the_way, immutable_directory])
def test_a_deletion_that_is_forbidden_is_said_and_repeated_but_never_as_an_upload(
    pi: Pi, forbid: Callable[[Backend, Call], Callable[[], object]]
) -> None:
    call = pi.backend.end_call(events=0)
    allow = forbid(pi.backend, call)
    try:
        running = pi.agent()
        seq = call.seq("recording_file")
        line = running.wait_log(f"uploaded recording {seq} cannot be deleted, tried again later")
        assert call.call_id in line or TRASH in line
        tries = "select tries from serversync.uploads"
        wait_until(lambda: pi.db.value(tries) >= 2, what="the second try", state=running.log)
        assert call.wav.is_file() and call.meta.is_file()
        assert pi.backend.upload_status(call)[0] == "uploaded"
        assert len(running.lines("cannot be deleted")) == 1  # a repeat is no news
        # A new start goes on with the deletion, too.
        running.stop()
        pi.once()
        assert call.wav.is_file()
    finally:
        allow()
    running = pi.agent()
    wait_until_removed(running, pi.db, call.directory)
    assert len(pi.frontend.of_kind("file")) == 1
    assert_trash_is_empty(pi.backend)


@needs_root
def test_a_read_only_file_system_keeps_files_and_does_not_stop_uploads(pi: Pi) -> None:
    pi.backend.end_call(events=0)
    pi.once()
    calls = [pi.backend.end_call(events=0) for _ in range(2)]
    script = 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" && exec "$@"'
    prefix = ("unshare", "--mount", "sh", "-c", script, str(pi.backend.recordings_dir))

    result = run_once(pi.agent.env(), prefix=prefix)

    assert result.returncode == 0, result.stderr
    assert result.stderr.count("cannot be deleted") >= 2
    assert "Read-only file system" in result.stderr
    assert len(pi.frontend.uploads) == 3
    assert all(call.wav.is_file() for call in calls)
    pi.once()
    assert not any(call.directory.exists() for call in calls) and not uploads(pi.db)
    assert len(pi.frontend.of_kind("file")) == 3


# -- what a kill leaves ---------------------------------------------------------------------------


@pytest.fixture
def uploaded(backend: Backend, agent: AgentFactory) -> Call:
    """A call that is uploaded, with its files still here, as after a kill at that moment."""
    call = backend.end_call(events=0)
    assert agent.once(**LATER).returncode == 0
    return call


def trash_place(call: Call, path: Path) -> Path:
    trash = call.directory.parent / TRASH
    trash.mkdir(mode=0o700, exist_ok=True)
    return trash / f"{call.seq('recording_file')}-{path.stat().st_ino}"


def throw_away(call: Call, *paths: Path) -> list[Path]:
    """As far as the agent comes before a kill."""
    return [path.rename(trash_place(call, path)) for path in paths]


def the_directory_as_a_whole(call: Call) -> None:
    """As the edition before did."""
    trash = call.directory.parent / TRASH
    trash.mkdir(mode=0o700, exist_ok=True)
    call.directory.rename(trash / str(call.seq("recording_file")))


def all_but_the_directory(call: Call) -> None:
    throw_away(call, call.wav, call.meta)
    call.directory.rmdir()


def nothing_but_the_directory(call: Call) -> None:
    call.wav.unlink()
    call.meta.unlink()


LEFT: dict[str, Callable[[Call], object]] = {
    "all in the trash": lambda call: throw_away(call, call.wav, call.meta),
    "no directory": all_but_the_directory,
    "half in the trash": lambda call: throw_away(call, call.wav, call.meta)[0].unlink(),
    "the directory as a whole": the_directory_as_a_whole,
    "an empty directory": nothing_but_the_directory,
    "nothing": lambda call: shutil.rmtree(call.directory),
    "one file": lambda call: throw_away(call, call.meta),
    "the other file": lambda call: throw_away(call, call.wav),
}


def test_trash_that_a_kill_left_is_finished_at_the_start(pi: Pi) -> None:
    calls = {left: pi.backend.end_call(events=0, seconds=0.1) for left in LEFT}
    pi.once(**LATER)
    for left, call in calls.items():
        LEFT[left](call)

    pi.once()

    assert [left for left, call in calls.items() if call.directory.exists()] == []
    assert not uploads(pi.db)
    assert_trash_is_empty(pi.backend)
    assert len(pi.frontend.uploads) == len(LEFT)


def test_a_whole_directory_in_the_trash_never_takes_the_place_of_a_new_recording(
    pi: Pi, uploaded: Call
) -> None:
    the_directory_as_a_whole(uploaded)
    uploaded.directory.mkdir()
    uploaded.wav.write_text("a new call's")

    result = pi.agent.once()

    assert "mixed.wav changed after its upload" in result.stderr
    assert uploaded.wav.read_text() == "a new call's"
    whole = uploaded.directory.parent / TRASH / str(uploaded.seq("recording_file"))
    assert files_of(whole) == {"mixed.wav", "meta.json"}
    assert uploads(pi.db) == [uploaded.seq("recording_file")]


@pytest.mark.parametrize(("name", "extra"), [("mixed.wav", "keep"), ("meta.json", "delete")])
def test_what_comes_while_the_trash_is_not_empty_stays(
    pi: Pi, uploaded: Call, name: str, extra: str
) -> None:
    throw_away(uploaded, uploaded.wav, uploaded.meta)
    (uploaded.directory / name).write_text("a new call's")
    (uploaded.directory / "b_leg.wav").write_text("never uploaded")

    result = pi.agent.once(SYNC_EXTRA_FILES=extra)

    assert f"{uploaded.call_id}: {name} changed after its upload" in result.stderr
    assert (uploaded.directory / name).read_text() == "a new call's"
    assert (uploaded.directory / "b_leg.wav").read_text() == "never uploaded"
    assert_trash_is_empty(pi.backend)


def test_what_changed_before_it_came_into_the_trash_goes_back_but_over_nothing_new(pi: Pi) -> None:
    free, beside, taken = calls = [pi.backend.end_call(events=0) for _ in range(3)]
    pi.once(**LATER)
    meta, trashed = taken.meta.read_text(), {}
    for call in calls:
        trashed[call.call_id] = throw_away(call, call.wav, call.meta)[0]
        trashed[call.call_id].write_text("something else")
        call.directory.rmdir()
    for call, name in ((beside, "new.wav"), (taken, "mixed.wav")):
        call.directory.mkdir()
        (call.directory / name).write_text("a new call's")

    result = pi.once()

    assert result.stderr.count("mixed.wav changed after its upload") == 2
    assert files_of(free.directory) == {"mixed.wav", "meta.json"}
    assert files_of(beside.directory) == {"mixed.wav", "meta.json", "new.wav"}
    assert free.wav.read_text() == beside.wav.read_text() == "something else"
    for _ in range(2):
        assert f"{taken.call_id}: mixed.wav is there already" in result.stderr
        assert trashed[taken.call_id].read_text() == "something else"
        assert files_of(taken.directory) == {"mixed.wav"}
        assert taken.wav.read_text() == "a new call's"
        assert meta in {path.read_text() for path in trashed[taken.call_id].parent.iterdir()}
        result = pi.once()
    assert uploads(pi.db) == [call.seq("recording_file") for call in calls]
    assert len(pi.frontend.uploads) == 3


def test_a_kill_at_any_step_of_a_deletion_is_finished_by_the_next_start(
    pi: Pi, tmp_path: Path
) -> None:
    """The others' files go first, which nobody could name afterwards; then ours are moved, and both
    are removed, and the directory."""
    settings: dict[str, Any] = {"SYNC_EXTRA_FILES": "delete"}
    for name, last in (("renameat", 2), ("unlinkat", 5)):
        for number in range(1, last + 1):
            call = pi.backend.end_call(events=0, extra_files=("a.wav", "b.wav"))
            inject = ("-e", f"trace={name}", "-e", f"inject={name}:signal=KILL:when={number}")
            prefix = ("strace", "-f", "-o", str(tmp_path / "x"), *inject)
            assert run_once(pi.agent.env(**settings), prefix=prefix).returncode < 0
            assert uploads(pi.db) == [call.seq("recording_file")]
            pi.once(**settings)
            assert not call.directory.exists() and not uploads(pi.db)
            assert pi.frontend.files[call.call_log_id].count == 1
            assert_trash_is_empty(pi.backend)


# -- traps ----------------------------------------------------------------------------------------


def linked_directory(call: Call, outside: Path) -> None:
    call.directory.rename(outside / "moved")
    call.directory.symlink_to(outside / "moved")


def linked_file(call: Call, outside: Path) -> None:
    call.wav.rename(outside / "mixed.wav")
    call.wav.symlink_to(outside / "mixed.wav")


def linked_trash(call: Call, outside: Path) -> None:
    (call.directory.parent / TRASH).rmdir()
    (call.directory.parent / TRASH).symlink_to(outside)


def linked_in_the_trash(call: Call, outside: Path) -> None:
    trash_place(call, call.wav).symlink_to(outside / "precious.wav")


@pytest.mark.parametrize(
    "traps", [[linked_directory, linked_file, linked_in_the_trash], [linked_trash]]
)
def test_a_link_that_was_swapped_in_leads_to_nothing_outside(
    pi: Pi, tmp_path: Path, traps: list[Callable[[Call, Path], None]]
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious.wav").write_text("precious")
    calls, other = [pi.backend.end_call(events=0) for _ in traps], pi.backend.end_call(events=0)
    pi.once(**LATER)
    (pi.backend.recordings_dir / TRASH).mkdir(mode=0o700, exist_ok=True)
    for trap, call in zip(traps, calls, strict=True):
        trap(call, outside)
    before = {path: path.stat().st_mtime_ns for path in outside.rglob("*")}

    result = pi.once()

    for seq in (call.seq("recording_file") for call in calls):
        assert f"uploaded recording {seq} cannot be deleted" in result.stderr
        assert seq in uploads(pi.db)
    assert {path: path.stat().st_mtime_ns for path in outside.rglob("*")} == before
    assert len(pi.frontend.uploads) == len(calls) + 1
    assert other.directory.exists() == (traps == [linked_trash])


@pytest.mark.parametrize("marker", ["", uuid.uuid4().hex], ids=["none", "another one's"])
def test_nothing_is_deleted_below_a_root_that_is_not_ours(
    pi: Pi, uploaded: Call, marker: str
) -> None:
    mark = pi.backend.recordings_dir / MARKER
    ours = mark.read_text()
    mark.write_text(marker)
    if not marker:
        mark.unlink()

    result = pi.agent.once()

    assert "uploaded recordings cannot be deleted" in result.stderr
    assert files_of(uploaded.directory) == {"mixed.wav", "meta.json"}
    assert uploads(pi.db) == [uploaded.seq("recording_file")]
    mark.write_text(ours)
    pi.once()
    assert not uploaded.directory.exists() and not uploads(pi.db)
    assert len(pi.frontend.uploads) == 1


def test_recordings_of_a_disk_that_was_exchanged_are_said_to_be_left_there(pi: Pi) -> None:
    root = pi.backend.recordings_dir
    calls = [pi.backend.end_call(events=0) for _ in range(3)]
    pi.once(**LATER)
    root.rename(root.with_name("old disk"))
    root.mkdir()
    pi.db.execute("update serversync.sender set root_id = null")
    new = pi.backend.end_call(events=0)

    for _ in range(2):
        result = pi.once()
        for call in calls:
            assert f"{call.call_id}: left on the old disk" in result.stderr
        assert "removed 3" not in result.stderr
        assert uploads(pi.db) == [call.seq("recording_file") for call in calls]
    assert not new.directory.exists() and len(pi.frontend.uploads) == 4

    root.rename(root.with_name("new disk"))
    root.with_name("old disk").rename(root)
    pi.db.execute("update serversync.sender set root_id = null")
    pi.once()
    assert not uploads(pi.db) and not any(call.directory.exists() for call in calls)

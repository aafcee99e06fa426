"""Bad disks: unplugged, read-only, full, failing. Nothing is lost, and nothing sent in a loop."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest

from agent import Agent, AgentFactory, run_once
from backend import Backend
from frontend import Frontend, Reply
from ledger import dead, failures, let_hours_pass, uploads
from oracle import TRASH, Oracle
from pg import Database
from waiting import wait_until

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")

LATER = 86400


class Disk:
    """A small file system of its own, mounted where a directory is."""

    def __init__(self, place: Path, size: str = "16m", inodes: int = 1000) -> None:
        self.place = place
        place.mkdir(parents=True, exist_ok=True)
        self._device = Path(tempfile.mkdtemp(prefix="serversync-disk-"))
        self._device.chmod(0o755)
        options = f"size={size},nr_inodes={inodes},mode=0755"
        self._run("mount", "-t", "tmpfs", "-o", options, "tmpfs", str(self._device))
        self.root = self._device / "root"
        self.root.mkdir()
        self._ballast = self._device / "ballast"
        self._ballast.mkdir()
        self.plug()

    @staticmethod
    def _run(*command: str) -> None:
        subprocess.run(command, check=True, capture_output=True)

    def plug(self) -> None:
        self._run("mount", "--bind", str(self.root), str(self.place))

    def unplug(self) -> None:
        """Who has it open still reads it; who looks again finds the empty mount point."""
        self._run("umount", "-l", str(self.place))

    def read_only(self, on: bool = True) -> None:
        self._run("mount", "-o", f"remount,bind,{'ro' if on else 'rw'}", str(self.place))

    def fill(self, *, inodes: bool = True) -> None:
        """Not a byte more, and (`inodes`) not a file more."""
        with suppress(OSError), (self._ballast / "blocks").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(65536))
        with suppress(OSError), (self._ballast / "last").open("wb", buffering=0) as file:
            while True:
                file.write(b"x" * 4096)
        with suppress(OSError):
            for number in range(100_000 if inodes else 0):
                (self._ballast / str(number)).touch(exist_ok=False)

    def free(self) -> None:
        shutil.rmtree(self._ballast)
        self._ballast.mkdir()

    def close(self) -> None:
        while os.path.ismount(self.place):
            self.unplug()
        self._run("umount", "-l", str(self._device))
        self._device.rmdir()


@pytest.fixture
def disk(backend: Backend) -> Iterator[Disk]:
    """The recordings' own file system."""
    made = Disk(backend.recordings_dir)
    yield made
    made.close()


@pytest.fixture
def oracle(db: Database, frontend: Frontend, backend: Backend) -> Oracle:
    return Oracle(db, frontend, backend)


def wait_for_the_end(oracle: Oracle, log: object = None) -> None:
    wait_until(
        lambda: not oracle.unfinished(),
        timeout=60,
        what="everything",
        state=lambda: f"{oracle.unfinished()}\n{log() if callable(log) else ''}",
    )
    assert not oracle.wrong()


def _pending_are(db: Database, seqs: list[int]) -> bool:
    return db.pending() == seqs


# --------------------------------------------------------------------------------------------------
# Unplugged, read-only
# --------------------------------------------------------------------------------------------------


def test_recordings_unmounted_in_the_middle_of_an_upload_and_mounted_again_are_all_delivered(
    agent: AgentFactory, oracle: Oracle, disk: Disk, frontend: Frontend, db: Database
) -> None:
    first = oracle.end_call(events=0)
    running = agent(SYNC_FILE_GRACE_SEC=0, SYNC_RETRY_MAX=1, SYNC_RETRY_HOURS=0)
    wait_until(lambda: not db.pending() and not first.directory.exists(), what="the first call")
    for times in range(2):
        frontend.read_rate = 200_000
        large = oracle.end_call(events=0, seconds=60)
        frontend.wait(lambda: frontend.of_kind("file")[-1].received > 100_000, what="half of it")
        # Their files are on the disk that goes; their rows come when it is gone.
        with db.connect(autocommit=False) as connection:
            late = [oracle.end_call(events=1, connection=connection) for _ in range(4)]
            disk.unplug()
        frontend.read_rate = None
        waiting = [call.seq("recording_file") for call in late]
        wait_until(partial(_pending_are, db, waiting), what="all but the files", state=running.log)
        running.wait_log("not the one we know")
        assert uploads(db) == [large.seq("recording_file")], "a deletion was called done"
        assert not dead(db) and not failures(db)
        assert not list(disk.place.iterdir()), "the mount point is not ours to write to"

        disk.plug()
        running.hup()
        wait_for_the_end(oracle, running.log)
        assert len(frontend.of_kind("file")) == 1 + 5 * (times + 1), "something was sent twice"


def test_a_disk_that_goes_and_comes_all_the_time_loses_nothing(
    agent: AgentFactory, oracle: Oracle, disk: Disk, db: Database
) -> None:
    running = agent(SYNC_POLL_INTERVAL_SEC=1, SYNC_FILE_GRACE_SEC=0)
    oracle.end_call(events=0)
    wait_for_the_end(oracle, running.log)
    for _ in range(12):
        with db.connect(autocommit=False) as connection:
            for _ in range(3):
                oracle.end_call(events=0, connection=connection)
        disk.unplug()
        running.hup()
        db.execute("notify serversync")
        assert not dead(db)
        disk.plug()
        running.hup()
    wait_for_the_end(oracle, running.log)
    assert not list(disk.root.glob("*/mixed.wav"))
    assert "is not the one we know" in running.log(), "it never saw the empty mount point"


def test_a_disk_that_turns_read_only_while_running_stops_deletions_only(
    agent: AgentFactory, oracle: Oracle, disk: Disk, frontend: Frontend, db: Database
) -> None:
    oracle.end_call(events=0)
    running = agent()
    wait_for_the_end(oracle, running.log)
    with db.connect(autocommit=False) as connection:
        calls = [oracle.end_call(events=1, connection=connection) for _ in range(3)]
        disk.read_only()
    wait_until(lambda: not db.pending(), what="the uploads", state=running.log)
    running.wait_log("Read-only file system")
    tried = "select min(tries) from serversync.uploads"
    wait_until(lambda: db.value(tried) >= 2, what="more tries", timeout=30, state=running.log)
    assert all(call.wav.exists() for call in calls)
    assert not oracle.lost()

    disk.read_only(False)
    running.hup()
    wait_for_the_end(oracle, running.log)
    assert len(frontend.of_kind("file")) == 4


# --------------------------------------------------------------------------------------------------
# Full
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("extra", [(), ("b_leg.wav",)], ids=["whole", "with_others_files"])
@pytest.mark.parametrize("before", [True, False], ids=["later", "first_deletion_ever"])
def test_a_full_disk_is_made_empty_again_by_deletions(
    agent: AgentFactory, oracle: Oracle, disk: Disk, frontend: Frontend, before: bool,
    extra: tuple[str, ...],
) -> None:  # fmt: skip
    """What is full of recordings must not stay full because there is no room for the trash."""
    if before:
        oracle.end_call(events=0)
    assert agent.once().returncode == 0  # knows the root by now
    calls = [oracle.end_call(events=0, extra_files=extra) for _ in range(3)]
    assert agent.once(SYNC_DELETE_AFTER_SEC=LATER).returncode == 0
    disk.fill()

    done = agent.once()

    assert not oracle.lost(), done.stderr
    assert not any(call.wav.exists() for call in calls), done.stderr
    assert len(frontend.of_kind("file")) == len(calls) + before
    disk.free()
    assert agent.once().returncode == 0
    assert not oracle.unfinished() + oracle.wrong()
    for call in calls:
        assert not extra or [path.name for path in call.directory.iterdir()] == [*extra]


def test_a_disk_too_full_for_the_mark_waits_and_then_goes_on(
    agent: AgentFactory, oracle: Oracle, disk: Disk, frontend: Frontend, db: Database
) -> None:
    call = oracle.end_call(events=0)
    disk.fill()
    done = agent.once()
    assert done.returncode == 75
    assert "No space left on device" in done.stderr
    assert db.pending() == [call.seq("recording_file")]
    assert not dead(db) and not frontend.of_kind("file")
    disk.free()
    assert agent.once().returncode == 0
    assert not oracle.unfinished() + oracle.wrong()


def test_a_full_disk_for_the_state_file_stops_nothing(
    agent: AgentFactory, oracle: Oracle, tmp_path: Path
) -> None:
    run = Disk(tmp_path / "run", size="64k", inodes=16)
    try:
        run.fill()
        running = agent(runtime_dir=run.place)
        for _ in range(3):
            oracle.end_call()
            wait_for_the_end(oracle, running.log)
        assert not (run.place / "state.json").exists()
        assert "Traceback" not in running.log()
        run.free()
        oracle.end_call()
        running.wait_sentence("recording")
        code, _ = running.stop()
        assert code == 0
    finally:
        run.close()


# In a mount namespace of its own: standard error is the journal's, so it says, and the journal's
# socket is there, but nobody behind it.
REFUSING = """
mount -t tmpfs tmpfs /run && mkdir -p /run/systemd/journal
"$0" -c 'import socket as s
s.socket(s.AF_UNIX, s.SOCK_DGRAM).bind("/run/systemd/journal/socket")'
export JOURNAL_STREAM="$(stat -L -c %d:%i /proc/self/fd/2)"
exec "$@"
"""
NO_SOCKET = 'export JOURNAL_STREAM="$(stat -L -c %d:%i /proc/self/fd/2)"; exec "$@"'
FULL = 'exec "$@" 2> /dev/full'
CLOSED = 'exec "$@" 2>&-'


@pytest.mark.parametrize(
    "script", [REFUSING, NO_SOCKET, FULL, CLOSED], ids=["refusing", "no_socket", "full", "closed"]
)
def test_a_log_that_takes_nothing_stops_nothing(
    agent: AgentFactory, oracle: Oracle, script: str, frontend: Frontend
) -> None:
    prefix = ("unshare", "--mount", "sh", "-c", script, sys.executable)
    running = agent(prefix=prefix)
    for _ in range(3):
        oracle.end_call()
        wait_for_the_end(oracle, running.log)
    assert frontend.seqs() == sorted(frontend.seqs())
    assert running.log() == "", "it was said elsewhere"
    code, _ = running.stop()
    assert code == 0

    bad = oracle.end_call(events=0, audio=False)
    oracle.calls.remove(bad)
    done = run_once(agent.env(), prefix=prefix)
    assert (done.returncode, done.stderr) == (75, "")


# A log that is read by nobody until the reader goes: a journal whose queue is full, a pipe.
STUCK_JOURNAL = """
mount -t tmpfs tmpfs /run && mkdir -p /run/systemd/journal
"$0" -c 'import os, socket as s, sys
journal = s.socket(s.AF_UNIX, s.SOCK_DGRAM)
journal.bind("/run/systemd/journal/socket")
os.read(0, 1)' <$END &
while [ ! -S /run/systemd/journal/socket ]; do sleep 0.1; done
export JOURNAL_STREAM="$(stat -L -c %d:%i /proc/self/fd/2)"
exec "$@"
"""
STUCK_PIPE = """
exec "$0" -c 'import fcntl, os, sys
read, write = os.pipe()
fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 4096)
if not os.fork():
    os.close(write)
    open(os.environ["END"], "rb", 0).read(1)
    os._exit(0)
os.dup2(write, 2)
os.execv(sys.argv[1], sys.argv[1:])' "$@"
"""


@pytest.mark.parametrize("script", [STUCK_JOURNAL, STUCK_PIPE], ids=["journal", "pipe"])
def test_a_log_that_nobody_reads_holds_it_up_until_its_reader_goes(
    agent: AgentFactory, backend: Backend, frontend: Frontend, script: str, tmp_path: Path
) -> None:
    end = tmp_path / "end"
    os.mkfifo(end)
    with end.open("r+b", buffering=0) as fifo:
        prefix = ("env", f"END={end}", "unshare", "--mount", "sh", "-c", script, sys.executable)
        running = agent(prefix=prefix, SYNC_BATCH_SIZE=1)
        backend.enqueue_many(400)  # a line each: far more than fits
        counts = [-2, -1]

        def stuck() -> bool:
            time.sleep(0.5)
            counts.append(len(frontend.entries))
            return 0 < counts[-2] == counts[-1] < 400

        wait_until(stuck, 60, "a log that is full", running.log)
        fifo.write(b"!")
        frontend.wait(lambda: len(frontend.entries) == 400, 60, "all entries")
    code, _ = running.stop()
    assert code == 0


# --------------------------------------------------------------------------------------------------
# Failing
# --------------------------------------------------------------------------------------------------


def failing(call: str, paths: list[Path], tmp_path: Path, when: str = "1+") -> tuple[str, ...]:
    """Under this prefix a system call on these paths says that the disk is broken."""
    where = [option for path in paths for option in ("-P", str(path))]
    trace = ("-o", str(tmp_path / "trace"), "-e", f"trace={call}")
    return ("strace", "-f", *trace, *where, "-e", f"inject={call}:error=EIO:when={when}")


@pytest.mark.parametrize(
    ("call", "extra"),
    [
        ("getdents64", ()),
        ("newfstatat", ("b_leg.wav",)),
        ("renameat", ()),
        ("renameat", ("b_leg.wav",)),
        ("unlinkat", ("b_leg.wav",)),
        ("fsync", ()),
        ("openat", ("b_leg.wav",)),
    ],
)
def test_a_disk_that_fails_during_a_deletion_loses_nothing_and_sends_nothing_again(
    agent: AgentFactory, oracle: Oracle, frontend: Frontend, backend: Backend, tmp_path: Path,
    call: str, extra: tuple[str, ...],
) -> None:  # fmt: skip
    oracle.end_call(events=0)
    assert agent.once().returncode == 0
    ended = [oracle.end_call(events=0, extra_files=extra) for _ in range(2)]
    assert agent.once(SYNC_DELETE_AFTER_SEC=LATER).returncode == 0
    root = backend.recordings_dir
    places = [root / TRASH, *(each.directory for each in ended)]
    if call == "openat":  # by the name alone, as it is opened below a directory
        places = [Path(each.call_id) for each in ended]
    for when in ("1", "1+"):
        done = run_once(agent.env(), prefix=failing(call, places, tmp_path, when))
        assert "(INJECTED)" in (tmp_path / "trace").read_text() or when == "1+"
        assert "Traceback" not in done.stderr and "a cycle failed" not in done.stderr
        assert not oracle.lost(), (when, done.stderr)
    if any(each.wav.exists() for each in ended):
        assert "Input/output error" in done.stderr
    let_hours_pass(oracle.db)
    assert agent.once().returncode == 0
    assert not oracle.unfinished() + oracle.wrong()
    assert len(frontend.of_kind("file")) == 3, "sent again"
    for each in ended:
        assert not extra or [path.name for path in each.directory.iterdir()] == [*extra]


@pytest.mark.parametrize("call", ["pread64,preadv,preadv2", "read"], ids=["audio", "meta"])
def test_a_file_that_fails_in_the_middle_is_never_confirmed_and_arrives_when_it_can_be_read(
    agent: AgentFactory, oracle: Oracle, frontend: Frontend, db: Database, tmp_path: Path, call: str
) -> None:
    bad = oracle.end_call(events=0, seconds=20)
    other = oracle.end_call(events=0)
    path, when = (bad.meta, "1") if call == "read" else (bad.wav, "3")
    done = run_once(agent.env(), prefix=failing(call, [path], tmp_path, when))
    assert done.returncode == 75, done.stderr
    assert [code for code, _, _ in failures(db).values()] == ["FILE_UNREADABLE"]
    assert oracle.confirmed(other) and not oracle.confirmed(bad)
    assert db.pending() == [bad.seq("recording_file")]
    assert bad.wav.exists() and not oracle.lost()
    begun = [each for each in frontend.of_kind("file") if each.status == 0]
    assert len(begun) == (call != "read")
    assert all(each.received < each.length for each in begun)

    let_hours_pass(db, 72)
    assert agent.once().returncode == 0
    assert not oracle.unfinished() + oracle.wrong()


@contextmanager
def full(db: Database, running: Agent, table: str) -> Iterator[Disk]:
    """PostgreSQL's own words: the table, empty by then, lies on a disk that is full."""
    place = Path(tempfile.mkdtemp(prefix="serversync-space-"))
    place.chmod(0o755)
    space = Disk(place, size="256k", inodes=64)
    try:
        shutil.chown(space.place, "postgres", "postgres")
        with db.admin() as admin:
            admin.execute(f"create tablespace {db.name} location '{space.place}'")
            admin.execute(f"grant create on tablespace {db.name} to public")
        db.execute(f"truncate {table}")
        db.execute(f"alter table {table} set tablespace {db.name}")
        space.fill(inodes=False)
        yield space
    finally:
        running.kill()  # its log is still to be shown if this fails
        db.execute(f"alter table {table} set tablespace pg_default")
        with db.admin() as admin:
            admin.execute(f"drop tablespace {db.name}")
        space.close()
        place.rmdir()


def wait_for_one_more_try(db: Database) -> None:
    rolled = "select xact_rollback from pg_stat_database where datname = current_database()"
    before = db.value(rolled)
    wait_until(lambda: db.value(rolled) > before, timeout=60, what="one more try")


def test_an_upload_that_a_full_database_cannot_record_is_kept_and_not_sent_again(
    agent: AgentFactory, oracle: Oracle, frontend: Frontend, db: Database
) -> None:
    oracle.end_call(events=0)
    running = agent()
    wait_for_the_end(oracle, running.log)
    with full(db, running, "serversync.uploads") as space:
        call = oracle.end_call()
        running.wait_log("a result cannot be recorded, nothing else is sent", timeout=60)
        assert "No space left on device" in running.log()
        late = oracle.end_call(events=0)
        running.wait_sentence("a result cannot be recorded")
        wait_for_one_more_try(db)
        assert call.wav.exists() and oracle.confirmed(call)
        assert db.pending() == [call.seq("recording_file"), *late.seqs]
        assert oracle.backend.upload_status(call)[0] == "local_only"
        assert not oracle.lost()
        assert len(frontend.of_kind("file")) == 2, "sent again"
        space.free()
        wait_for_the_end(oracle, running.log)
        assert len(frontend.of_kind("file")) == 3
        assert oracle.repeated() == 0


def test_a_dead_letter_that_a_full_database_cannot_take_is_made_when_there_is_room(
    agent: AgentFactory, oracle: Oracle, frontend: Frontend, backend: Backend, db: Database
) -> None:
    oracle.end_call(events=0)
    running = agent()
    wait_for_the_end(oracle, running.log)
    with full(db, running, "serversync.dead_letters") as space:
        entity = str(uuid.uuid4())
        frontend.poison[entity] = Reply(400, {}, {"error": "never"})
        bad = backend.enqueue(entity_id=entity)
        running.wait_log("a result cannot be recorded, nothing else is sent", timeout=60)
        assert "No space left on device" in running.log()
        late = oracle.end_call(events=0)
        wait_for_one_more_try(db)
        assert db.pending() == [bad, *late.seqs]
        assert not dead(db) and not oracle.lost()
        space.free()
        oracle.doomed.add(bad)
        wait_for_the_end(oracle, running.log)
        assert dead(db) == {bad: "BAD_REQUEST"}
        asked = [r for r in frontend.of_kind("entries") if bad in [e["seq"] for e in r.entries]]
        assert len(asked) == 1, "sent again"

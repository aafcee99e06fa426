"""Memory of the byte-compiled module, as it is installed: flat, whatever waits, however large."""

import contextlib
import os
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

import serversync
from agent import PROGRAM, PYTHON, REPOSITORY, agent_env
from backend import Backend, Call
from desk import BURIED_MANY
from frontend import Frontend, Reply, Request
from ledger import dead, failures
from pg import Database
from pi import Pi

MIB = 1024 * 1024
# How much more than a process that has only imported what the agent needs.
TIMES = 1.25
LIMIT = 48 * MIB

BARE = "import psycopg, urllib3, systemd.daemon, systemd.journal\ncode = 0\n"
AGENT = (
    "import sys\nsys.path.insert(0, sys.argv.pop(1))\nimport serversync\ncode = serversync.main()\n"
)
# The peak is gone with the process: it says it itself, last.
PEAK = """
for line in open("/proc/self/status"):
    if line.startswith("VmHWM:"):
        print("peak", line.split()[1], flush=True)
raise SystemExit(code)
"""
COMPILE = "import py_compile, sys\npy_compile.compile(sys.argv[1], sys.argv[2], doraise=True)\n"
LARGE = """
    INSERT INTO sync_outbox (entity_type, entity_id, payload)
    SELECT 'call_log', gen_random_uuid(), jsonb_build_object('text', string_agg(md5(n::text), ''))
    FROM generate_series(1, %s::int) AS n RETURNING id
"""
HUGE = """
    INSERT INTO sync_outbox (entity_type, entity_id, payload)
    VALUES ('call_log', gen_random_uuid(), jsonb_build_object('text', repeat('x', %s)))
    RETURNING id
"""
FAIL = """
    INSERT INTO serversync.waiting (outbox_id, entity_id, entity_type, call_id, is_file, tries,
        type_sent, next_attempt_at, code, reason)
    SELECT id, entity_id, entity_type, serversync.call_of(payload), false, 3, 0,
           now() + interval '10 minutes', 'FRONTEND_5XX', repeat('the frontend has trouble ', 10)
    FROM sync_outbox WHERE processed_at IS NULL
"""


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with nothing but the byte-compiled module."""
    directory = tmp_path_factory.mktemp("compiled")
    command = [str(REPOSITORY / PYTHON), "-c", COMPILE, str(REPOSITORY / PROGRAM)]
    subprocess.run([*command, directory / "serversync.pyc"], check=True)
    return directory


def python(
    code: str, *args: str, env: Mapping[str, str], prefix: Sequence[str] = ()
) -> tuple[int, int]:
    """Run some Python; its exit code and its peak RSS in KiB."""
    done = subprocess.run(
        [*prefix, str(REPOSITORY / PYTHON), "-c", code + PEAK, *args],
        env={"PATH": os.environ["PATH"], "LANG": "C.UTF-8", **env},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    print(done.stderr[-3000:])  # for the report of a test that fails
    said = done.stdout.split()
    assert said[-2:-1] == ["peak"], f"it ended with {done.returncode}: {done.stdout}"
    return done.returncode, int(said[-1])


@pytest.fixture(scope="session")
def bare(compiled: Path) -> int:
    """The least peak, in KiB, of a process that has only imported what the agent needs."""
    return min(python(BARE, env={})[1] for _ in range(3))


class Meter:
    """Runs `once` of the byte-compiled module, and compares its peak."""

    def __init__(
        self,
        compiled: Path,
        bare: int,
        env: Mapping[str, str],
        record: Callable[[str, object], None],
    ) -> None:
        self.compiled, self.bare, self.env, self.record = compiled, bare, env, record

    def once(
        self,
        prefix: Sequence[str] = (),
        args: Sequence[str] = ("once",),
        largest: int = 0,
        times: float = TIMES,
        **settings: object,
    ) -> int:
        """The exit code; the peak is within the limit, and written into the report. An entry that
        is larger than a batch goes whole: three times its size comes on top."""
        env = {**self.env, **{name: str(value) for name, value in settings.items()}}
        code, peak = python(AGENT, str(self.compiled), *args, env=env, prefix=prefix)
        self.record("bare_kib", self.bare)
        self.record("peak_kib", peak)
        self.record("times", round(peak / self.bare, 3))
        said = f"{peak} KiB is {peak / self.bare:.2f} times {self.bare}"
        assert peak <= times * self.bare + 3 * largest / 1024, said
        return code


@pytest.fixture
def meter(
    compiled: Path,
    bare: int,
    db: Database,
    frontend: Frontend,
    backend: Backend,
    record_property: Callable[[str, object], None],
) -> Meter:
    return Meter(compiled, bare, agent_env(db, frontend, backend), record_property)


class Sink:
    """A frontend's hook that reads and confirms all and keeps only numbers: it must be quick."""

    def __init__(self, frontend: Frontend) -> None:
        self.largest = 0
        self.files: list[int] = []
        frontend.history = False
        frontend.on_head = self._confirm

    def _confirm(self, request: Request) -> Reply:
        if request.kind == "file":
            self.files.append(request.length)
        else:
            self.largest = max(self.largest, request.length)
        answer = {"ok": True, "fileUrl": "https://frontend.example/mixed.wav"}
        return Reply(body=answer, after=request.length)


def end_long_call(backend: Backend, size: int) -> Call:
    """A call with a recording of that size that takes no room on the disk."""
    call = backend.end_call()
    os.truncate(call.wav, size)
    return call


def sent(db: Database) -> int:
    """How many JSON entries were confirmed."""
    count: int = db.value("SELECT sum(entries) FROM serversync.deliveries WHERE kind = 'entries'")
    return count


def wait_all(db: Database) -> None:
    """Everything pending has failed before and waits."""
    db.execute(FAIL)
    db.execute("ANALYZE serversync.waiting")


# -- each alone ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_memory_stays_flat_while_a_million_entries_are_drained(pi: Pi, meter: Meter) -> None:
    Sink(pi.frontend)
    pi.backend.enqueue_many(1_000_000)
    pi.db.execute("ANALYZE sync_outbox")
    assert meter.once(SYNC_BATCH_SIZE=1000) == 0
    assert sent(pi.db) == 1_000_000 and not pi.db.pending()


def test_memory_stays_flat_when_everything_is_rejected_at_once(pi: Pi, meter: Meter) -> None:
    page = "<html>" + "x" * 200_000
    pi.frontend.history = False
    pi.frontend.on_head = lambda request: Reply(500, body=page, after=request.length)
    pi.backend.enqueue_many(20_000)
    assert meter.once(SYNC_BATCH_SIZE=1000) == 69
    assert len(pi.db.pending()) == 20_000
    # Those that were tried after the empty request was refused: a wait may be next to nothing.
    assert len(failures(pi.db)) < 5


# -- people's commands ---------------------------------------------------------------------------

COUNTS = """
    SELECT status, count(*) FROM serversync.dead_letters GROUP BY 1;
    SELECT count(*) FROM serversync.dead_letters;
    SELECT entity_type, count(*), min(created_at) FROM sync_outbox WHERE processed_at IS NULL
    GROUP BY 1
"""
COMMANDS = (["status"], ["dlq", "list"], ["dlq", "list", "--json", "--page", "5000"], ["doctor"])


def seconds(*command: str, env: Mapping[str, str] | None = None) -> float:
    """How long a command takes."""
    started = time.monotonic()
    done = subprocess.run(command, env=env, capture_output=True, timeout=280, check=False)
    assert done.returncode in (0, 1, 69), done.stderr
    return time.monotonic() - started


def test_people_s_commands_are_small_and_quick_with_a_hundred_thousand_dead_letters(
    db: Database, meter: Meter, compiled: Path, record_property: Callable[[str, object], None]
) -> None:
    """Memory stays flat; they need a few times what psql needs for the counts."""
    assert meter.once() == 0  # makes the schema
    db.execute(BURIED_MANY, {"count": 100_000, "status": "PENDING"})
    db.execute("ANALYZE")
    for args in COMMANDS:
        assert meter.once(args=args) in (0, 1, 69)

    run = [str(REPOSITORY / PYTHON), "-c", AGENT + "raise SystemExit(code)", str(compiled)]
    env = {"PATH": os.environ["PATH"], **meter.env}
    psql = ["psql", "-X", "-q", "-d", db.url, "-c", COUNTS]
    best: dict[str, float] = {}

    def quick() -> bool:
        return max(best.values()) <= best["start"] + 6 * best["psql"]

    # In turns, and the best of each: others use the machine, too.
    for _ in range(5):
        took = {"start": seconds(*run, "--version", env=env), "psql": seconds(*psql)}
        for args in (["status"], ["dlq", "list"], ["doctor"]):
            took[" ".join(args)] = seconds(*run, *args, env=env)
        best = {name: min(value, best.get(name, value)) for name, value in took.items()}
        if quick():
            break
    for name, value in best.items():
        record_property(name, value)
    assert quick(), best


# -- all at once, and enforced -------------------------------------------------------------------


@contextlib.contextmanager
def memory_cgroup(limit: int) -> Iterator[Path | None]:
    """A memory cgroup of our own, version 1 or 2; None where there is none to be had."""
    name = f"serversync-test-{uuid.uuid4().hex[:8]}"
    root = Path("/sys/fs/cgroup")
    try:
        if (root / "memory" / "memory.limit_in_bytes").exists():
            group = root / "memory" / name
            group.mkdir()
            (group / "memory.limit_in_bytes").write_text(str(limit))
        else:
            (root / "cgroup.subtree_control").write_text("+memory")
            group = root / name
            group.mkdir()
            (group / "memory.max").write_text(str(limit))
            with contextlib.suppress(OSError):  # a kernel without swap accounting
                (group / "memory.swap.max").write_text("0")
    except OSError as error:
        print(f"no memory cgroup can be made here: {error}")
        yield None
        return
    try:
        yield group
    finally:
        group.rmdir()


def test_everything_at_once_fits_into_a_memory_cgroup_of_48_mebibytes(
    pi: Pi, meter: Meter, record_property: Callable[[str, object], None]
) -> None:
    """Many failures, a payload that is not even loaded and an upload of a gibibyte; then an entry
    of seven mebibytes beside another upload."""
    sink = Sink(pi.frontend)
    assert meter.once() == 0  # makes the schema
    pi.backend.enqueue_many(100_000)
    wait_all(pi.db)
    huge = pi.db.value(HUGE, (64 * MIB,))
    pi.backend.enqueue_many(3000)
    calls = [end_long_call(pi.backend, 1024 * MIB)]
    with memory_cgroup(LIMIT) as group:
        enter = ["sh", "-c", 'echo $$ >"$0/cgroup.procs" && exec "$@"', str(group)]
        enter = enter if group else []
        assert meter.once(prefix=enter) == 1  # the one that is too large
        assert sent(pi.db) == 3000 + 4 and sink.files[0] > 1024 * MIB
        pi.db.execute(LARGE, (7 * MIB // 32,))
        calls.append(end_long_call(pi.backend, 128 * MIB))
        assert meter.once(prefix=enter, largest=7 * MIB, SYNC_BATCH_SIZE=1000) == 75
        for file in ("memory.max_usage_in_bytes", "memory.peak", "memory.failcnt"):
            if group and (group / file).exists():
                record_property(file, int((group / file).read_text()))
        events = group and group / "memory.events"
        assert not (events and events.exists()) or "oom_kill 0" in events.read_text()
    assert dead(pi.db) == {huge: "TOO_LARGE"}, "without being loaded"
    assert sent(pi.db) == 3000 + 4 + 1 + 4 and sink.largest > 7 * MIB
    assert len(sink.files) == 2 and not any(call.directory.exists() for call in calls)
    assert len(pi.db.pending()) == 100_000


NONSENSE = [
    *(b"[]", b"{}", b'{"a":1}', b"1.5", b'"ab"', '"あいうえおかきくけこ"'.encode()),
    b'{"id":"00000000-0000-4000-8000-000000000000"}',  # a bad item
]


@pytest.mark.parametrize("inside", [False, True], ids=["a list of it", "an item of it"])
def test_settings_of_nonsense_take_no_memory(
    meter: Meter, frontend: Frontend, inside: bool
) -> None:
    """Two mebibytes of it, and as much as is read at all."""
    head, tail = (b'[{"id": 1, "phoneNumbers": [', b"]}]}") if inside else (b"[", b"]}")
    assert meter.once() == 0
    for path, key, _ in serversync.SOURCES.values():
        frontend.pages[path] = {"ok": True, key: []}
    path, key, _ = serversync.SOURCES["number-groups"]
    for each in NONSENSE:
        values, most = 1 + sum(map(each.count, (b":", b"[", b"{"))), 2_000_000 // (len(each) + 1)
        for number, codes in ((most, (0, 69)), (89_000 // values, (0,))):
            body = b",".join([each] * min(number, most))
            frontend.pages[path] = b'{"ok": true, "' + key.encode() + b'": ' + head + body + tail
            assert meter.once(args=("settings", "pull"), times=1.5) in codes, each

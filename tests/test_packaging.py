"""What is run from a checkout by somebody who has nothing yet: the tour, and an installation."""

import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import serversync
from agent import REPOSITORY, agent_env, write_env_file
from backend import Backend
from frontend import Frontend
from pg import Database
from test_debian import run
from waiting import wait_until

pytestmark = pytest.mark.slow  # not for each set of packages: all of it is Debian's own

TRY = REPOSITORY / "packaging" / "try"
MARK = "SERVERSYNC_TEST_OF_THE_TOUR"


class Tour:
    """A run of packaging/try, with a temporary directory and a mark of its own."""

    def __init__(self, directory: Path, program: str | None = None) -> None:
        # Below the directory for temporary files itself: PostgreSQL runs as another user, and
        # pytest's own directories are closed to it.
        self.temporary = directory
        self.mark = f"{MARK}={os.getpid()}-{time.monotonic_ns()}"
        name, _, value = self.mark.partition("=")
        environ = {**os.environ, "TMPDIR": str(directory), name: value}
        for key in ("SERVERSYNC_PYTHON", "SERVERSYNC_PROGRAM"):
            environ.pop(key, None)
        if program is not None:
            environ["SERVERSYNC_PROGRAM"] = program
        self.process = subprocess.Popen(
            [TRY],
            cwd="/",
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def finish(self) -> tuple[int, str]:
        said, _ = self.process.communicate(timeout=200)
        return self.process.returncode, said

    def processes(self) -> Mapping[int, str]:
        """All processes that the tour or a child of it started, by its mark or its directory."""
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                environ = (entry / "environ").read_text(errors="replace")
                command = (entry / "cmdline").read_text(errors="replace").replace("\0", " ")
            except (OSError, ProcessLookupError):
                continue
            if self.mark in environ or str(self.temporary) in command:
                found[int(entry.name)] = command
        return found

    def leaves_nothing(self) -> None:
        wait_until(lambda: not self.processes(), 10, "the end", lambda: str(self.processes()))
        assert list(self.temporary.iterdir()) == []


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="serversync-") as name:
        path = Path(name)
        path.chmod(0o711)
        yield path


@pytest.fixture
def checkout_is_left_alone() -> Iterator[None]:
    """No file of the checkout comes, goes or changes (caches aside)."""

    def files() -> dict[str, int]:
        places = (REPOSITORY / "packaging", REPOSITORY / "etc")
        every = [path for place in places for path in place.rglob("*")]
        return {str(path): path.stat().st_mtime_ns for path in every}

    before = files()
    yield
    assert files() == before


@pytest.mark.usefixtures("checkout_is_left_alone")
def test_the_tour_shows_that_all_is_so_and_leaves_nothing_behind(directory: Path) -> None:
    tour = Tour(directory)

    code, said = tour.finish()

    assert code == 0, said
    tour.leaves_nothing()
    headings = re.findall(r"^\d+\. (.*)\n=+$", said, re.M)
    assert len(headings) == 9
    checks = re.findall(r"^   \[ok\] (.*)$", said, re.M)
    assert f"All of it is so: {len(checks)} checks." in said
    assert "NOT SO" not in said
    # Each file's digest is shown as it was written and as the frontend has it.
    written = re.findall(r"^   written   ([0-9a-f]{64}) ", said, re.M)
    assert len(set(written)) == 2
    assert written == re.findall(r"^   frontend  ([0-9a-f]{64}) ", said, re.M)
    for claim in ("pending", "a call appears within a second", "are gone", "has caught up"):
        assert any(claim in check for check in checks), claim


STUBS = {
    "ends at once": "raise SystemExit(0)",
    # It looks at the outbox, marks everything, and sends nothing.
    "marks and sends nothing": """
import os, re, sys, time, psycopg
text = open(sys.argv[sys.argv.index("--env-file") + 1]).read()
url = re.search('DATABASE_URL="(.*)"', text)[1]
with psycopg.connect(url, autocommit=True) as connection:
    connection.execute("update sync_outbox set processed_at = now()")
time.sleep(600)
""",
}


@pytest.mark.parametrize("stub", STUBS)
def test_the_tour_of_a_broken_agent_fails_and_leaves_nothing_behind(
    directory: Path, tmp_path: Path, stub: str
) -> None:
    program = tmp_path / "stub.py"
    program.write_text(STUBS[stub])
    tour = Tour(directory, str(program))

    code, said = tour.finish()

    assert code == 1, said
    assert "[NOT SO] " in said
    assert "All of it is so" not in said
    tour.leaves_nothing()


def test_an_interrupted_tour_cleans_up(directory: Path, tmp_path: Path) -> None:
    program = tmp_path / "stub.py"
    program.write_text("import time\ntime.sleep(600)\n")
    tour = Tour(directory, str(program))
    wait_until(lambda: any(str(program) in c for c in tour.processes().values()), 60, "the stub")

    tour.process.send_signal(signal.SIGTERM)
    code, said = tour.finish()

    assert code == 130, said
    assert "All of it is so" not in said
    tour.leaves_nothing()


def test_a_checkout_runs_as_it_is_and_pip_installs_a_command_that_delivers(
    db: Database, frontend: Frontend, backend: Backend, tmp_path: Path
) -> None:
    # Built from a copy: pip would leave its build directory in the checkout.
    source = tmp_path / "source"
    source.mkdir()
    for name in ("serversync.py", "pyproject.toml", "README.md", "LICENSE"):
        (source / name).write_bytes((REPOSITORY / name).read_bytes())
    environment = tmp_path / "environment"

    run("/usr/bin/python3", "-m", "venv", environment)
    run(environment / "bin" / "pip", "install", "-q", source)

    command = environment / "bin" / "serversync"
    for words in (["/usr/bin/python3", REPOSITORY / "serversync.py"], [command]):
        assert run(*words, "--version") == f"serversync {serversync.__version__}\n"
    assert "SYNC_POLL_INTERVAL_SEC" in run(command, "--help")
    call = backend.end_call()
    empty = write_env_file(tmp_path / "serversync.env", {})
    run(command, "--env-file", empty, "once", **agent_env(db, frontend, backend))
    assert frontend.files[call.call_log_id].sha256 == call.sha256
    assert db.pending() == []
    assert not call.directory.exists()

"""Fixtures: everything is real, and everything is gone afterwards."""

import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import agent as agent_module
from agent import AgentFactory, NotifySocket
from backend import Backend
from chance import TIMES
from desk import Desk, Typist
from frontend import Frontend
from pg import Cluster, Database, in_memory
from pi import Pi
from proxy import Proxy

settings.load_profile("new" if TIMES else "same")


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """One PostgreSQL for each process of the test run."""
    with Cluster(place=in_memory()) as running:
        yield running


@pytest.fixture
def db(cluster: Cluster) -> Iterator[Database]:
    """A database of its own with the backend's tables."""
    database = Database(cluster)
    yield database
    if not cluster.running:
        cluster.start()
    database.drop()


@pytest.fixture
def proxy(cluster: Cluster) -> Iterator[Proxy]:
    """A proxy before PostgreSQL: `DATABASE_URL=db.url_through(proxy.port)`."""
    with Proxy("127.0.0.1", cluster.port) as running:
        yield running


@pytest.fixture
def frontend(tmp_path: Path) -> Iterator[Frontend]:
    with Frontend(tmp_path / "frontend") as running:
        yield running


@pytest.fixture
def backend(db: Database, tmp_path: Path) -> Backend:
    return Backend(db, tmp_path / "backend")


@pytest.fixture
def agent(db: Database, frontend: Frontend, backend: Backend) -> Iterator[AgentFactory]:
    """Starts agents; when the test fails, their logs are shown."""
    factory = AgentFactory(db, frontend, backend)
    yield factory
    factory.close()


@pytest.fixture
def pi(agent: AgentFactory, backend: Backend, frontend: Frontend, db: Database) -> Pi:
    return Pi(agent, backend, frontend, db)


@pytest.fixture
def schema(agent: AgentFactory) -> None:
    """The agent has been here once."""
    assert agent.once().returncode == 0


@pytest.fixture
def desk(agent: AgentFactory) -> Desk:
    return Desk(agent)


@pytest.fixture
def typist(agent: AgentFactory) -> Iterator[Typist]:
    made = Typist(agent)
    yield made
    made.close()


@pytest.fixture
def notify() -> Iterator[NotifySocket]:
    listening = NotifySocket()
    yield listening
    listening.close()


@pytest.fixture
def libfaketime() -> Path:
    """Gives a process another clock: LD_PRELOAD=libfaketime, FAKETIME=…"""
    return next(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))


HURRIED = """
import importlib, os, sys
directory, name = os.path.split({program!r})
sys.path.insert(0, directory)
program = importlib.import_module(name.removesuffix(".py"))
assert all(vars(program)[name] > value for name, value in {limits!r}.items())
vars(program).update({limits!r})
main = program.main
"""


@pytest.fixture
def hurry(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """The same program with less patience, for tests of its limits: hurry(ANSWER_SEC=0.5)."""

    def start_with(**limits: float) -> None:
        program = str(agent_module.REPOSITORY / agent_module.PROGRAM)
        hurried = tmp_path / "hurried.py"
        hurried.write_text(HURRIED.format(program=program, limits=limits))
        monkeypatch.setattr(agent_module, "PROGRAM", str(hurried))

    return start_with


@pytest.fixture
def alter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str, str], None]:
    """The same program with other words in one place, where there is no limit with a name."""

    def start_with(old: str, new: str) -> None:
        program = (agent_module.REPOSITORY / agent_module.PROGRAM).read_text()
        assert program.count(old) == 1
        altered = tmp_path / "altered.py"
        altered.write_text(program.replace(old, new))
        monkeypatch.setattr(agent_module, "PROGRAM", str(altered))

    return start_with


@pytest.fixture
def public() -> Iterator[Path]:
    """A directory that every user may read and write."""
    with tempfile.TemporaryDirectory(prefix="serversync-public-") as name:
        Path(name).chmod(0o777)
        yield Path(name)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, None]:
    outcome = yield
    report = outcome.get_result()
    factory = getattr(item, "funcargs", {}).get("agent")
    if report.when == "call" and report.failed and isinstance(factory, AgentFactory):
        report.sections.append(("the agents' logs", factory.logs()))


# Not for each set of packages: nothing in them can differ with another psycopg or urllib3.
ONCE = {
    "test_docs.py", "test_completion.py", "test_rooms.py",  # texts
    "test_policy.py", "test_flow.py", "test_fleet.py",  # decisions, in this process
    "test_entry_outages.py",  # the same over days: requests and rows like those of test_verdicts.py
    "test_deletion.py", "test_recordings.py", "test_rights.py",  # files here, and whose they are
    "test_logging.py",  # the journal
    "test_memory.py",  # measured on what runs on a Pi: Debian's packages
}  # fmt: skip


def runs_once(item: pytest.Item) -> bool:
    """Of the configuration only URLs are read by libraries: urllib3's, and libpq's."""
    name = item.path.name
    of_file = name == "test_config.py" and "url" not in item.name
    return item.path.parent.name == "faults" or name in ONCE or of_file


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The faults take minutes and are about the product: once, on Debian's libraries. What takes
    long, or is one process's alone, comes first: all others run beside it."""
    for item in items:
        if runs_once(item):
            item.add_marker(pytest.mark.slow)
    first = {
        "test_soak.py", "test_memory.py", "test_senders.py", "test_upload.py", "test_rights.py",
        "test_order.py", "test_blocking.py", "test_state.py",
    }  # fmt: skip
    items.sort(key=lambda item: (item.path.parent.name != "system", item.path.name not in first))

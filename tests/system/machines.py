"""Fixtures: a release's root, serversync installed on it, and machines that lie over that.

A plugin of the tests here, and no conftest.py: there is one already. So no test imports it.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import container
import emulator
import test_debian
from box import (
    ENV_FILE,
    RELEASES,
    Box,
    Installation,
    Release,
)
from container import Container
from emulator import Emulator
from frontend import Frontend
from settings import Desired
from test_debian import install_missing

deb, shared = test_debian.deb, test_debian.shared  # fixtures


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Each release is one worker's, from the installation to the end."""
    if "release" in metafunc.fixturenames:
        releases = [
            pytest.param(release, marks=pytest.mark.xdist_group(str(release)))
            for release in RELEASES
        ]
        metafunc.parametrize("release", releases, ids=str, scope="session")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What only a kernel of its own can show is not even skipped in a container."""
    left = [item for item in items if item.get_closest_marker("whole") and not _whole(item)]
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in left]


def _whole(item: pytest.Item) -> bool:
    release = item.callspec.params.get("release") if isinstance(item, pytest.Function) else None
    return isinstance(release, Release) and release.whole


@pytest.fixture(scope="session")
def cache(request: pytest.FixtureRequest) -> Path:
    """Of all test runs."""
    given = os.environ.get("SERVERSYNC_SYSTEM_CACHE")
    found = Path(given) if given else request.config.cache.mkdir("serversync-system")
    found.mkdir(parents=True, exist_ok=True)
    return found


@pytest.fixture(scope="session")
def base(release: Release, cache: Path) -> Path:
    """The release's root, or its disk and what belongs to it."""
    assert os.geteuid() == 0, "machines need root"
    packages = emulator.HOST_PACKAGES if release.whole else container.HOST_PACKAGES
    install_missing("mmdebstrap", "debian-archive-keyring", *packages)
    make = emulator.base_disk if release.whole else container.base_root
    return make(release, cache)


# Looked at after apt, and once more when it was set up and restarted.
LOOKS = {
    "unit": "systemctl show serversync -p ActiveState,SubState,ExecMainStatus,NRestarts",
    "enabled": "systemctl is-enabled serversync.service serversync-admin.socket || true",
    "admin": "systemctl is-active serversync-admin.socket serversync-admin.service || true",
    "status": "systemctl status serversync || true",
    "rights": f"stat -c '%U:%G %a' {ENV_FILE}",
    "conffiles": "dpkg-query -W -f '${Conffiles}' serversync",
    "user": "getent passwd serversync",
    "compiled": "ls /usr/share/serversync/__pycache__",
    "version": "serversync --version",
    "journal": "journalctl -u serversync -o cat --no-pager",
}


@pytest.fixture(scope="session")
def installed(release: Release, base: Path, deb: Path, shared: Path) -> Iterator[Installation]:
    """What all other machines lie over."""
    with a_machine(release, base, shared / f"{release}-installed") as box:
        box.boot()
        box.furnish()
        said = box.install(deb)
        idle = box.sh(LOOKS["unit"])
        box.run("systemctl", "start", "serversync", check=False)
        unconfigured = {name: box.sh(look) for name, look in LOOKS.items()}
        typed = box.set_up("http://127.0.0.1:9")
        configured = {name: box.sh(look) for name, look in LOOKS.items()}
        box.power_off()
        yield Installation(box, said, idle, unconfigured, typed, configured)


def a_machine(release: Release, base: Path, directory: Path, over: Box | None = None) -> Box:
    """Not yet booted, over the root or over another one that is switched off."""
    if release.whole:
        below = over.disk if isinstance(over, Emulator) else base / "disk.raw"
        return Emulator(release, directory, base, below)
    layers = [over.upper, base] if isinstance(over, Container) else [base]
    return Container(release, directory, layers)


class Bench:
    """The machine that the tests of a release share; after a failure the next one gets another."""

    def __init__(self, installed: Installation, base: Path, directory: Path) -> None:
        self.installed, self.base, self.directory = installed, base, directory
        self.box: Box | None = None
        self._number = 0

    def another(self) -> Box:
        self._number += 1
        place, below = self.directory / str(self._number), self.installed.box
        box = a_machine(below.release, self.base, place, below)
        try:
            box.boot()
        except BaseException:
            box.close()
            raise
        return box

    def clear(self) -> None:
        if self.box is not None:
            self.box.close()
            self.box = None


@pytest.fixture(scope="session")
def bench(installed: Installation, base: Path, shared: Path) -> Iterator[Bench]:
    bench = Bench(installed, base, shared / f"{installed.box.release}-machines")
    yield bench
    bench.clear()


@pytest.fixture
def machine(bench: Bench, frontend: Frontend, request: pytest.FixtureRequest) -> Iterator[Box]:
    """The shared one: serversync runs on it, with this test's frontend, and has nothing to do."""
    failures = request.session.testsfailed
    bench.box = box = bench.box or bench.another()
    with contextlib.ExitStack() as spoiled:
        spoiled.callback(bench.clear)
        spoiled.callback(lambda: print(box.story()))
        Desired().serve(frontend)
        box.begin(frontend.url)
        yield box
        if request.session.testsfailed == failures:
            box.tidy()
            spoiled.pop_all()


@pytest.fixture
def own(bench: Bench, frontend: Frontend) -> Iterator[Box]:
    """One for a test that leaves it in a state that no other could use."""
    with bench.another() as box:
        Desired().serve(frontend)
        box.begin(frontend.url)
        yield box
        print(box.story())


@pytest.fixture
def bare(release: Release, base: Path, tmp_path: Path) -> Iterator[Box]:
    """One without serversync."""
    with a_machine(release, base, tmp_path / "machine") as box:
        box.boot()
        yield box

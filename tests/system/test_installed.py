"""The package on real systemd: what a person who installs it on a Pi lives through."""

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import serversync
from container import (
    ENV_FILE,
    MIRROR,
    RECORDINGS,
    REPOSITORY,
    Container,
    Release,
    base_root,
    command,
    furnish,
    locked,
    prepare,
    set_up,
    until,
)
from frontend import Frontend, Reply, Request
from pg import free_port

# Set by tests/system/run: bookworm, trixie, bookworm:armhf, …
RELEASES = os.environ.get("SERVERSYNC_SYSTEM_RELEASES", "").split()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not RELEASES, reason="minutes in containers: tests/system/run"),
]

HOST_PACKAGES = "mmdebstrap systemd-container debian-archive-keyring util-linux mount"
Start = Callable[..., Container]

OWNER = "bot"
LONG = 1200.0 if any(Release.of(text).emulated for text in RELEASES) else 120.0
STOP_WITHIN = 2.0  # by systemd's own clock
DROP_IN = "/etc/systemd/system/serversync.service.d/test.conf"


# --- machines -------------------------------------------------------------------------------------


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "release" in metafunc.fixturenames:
        releases = [Release.of(text) for text in RELEASES]
        metafunc.parametrize("release", releases, ids=str, scope="session")


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One directory for all processes of this test run."""
    directory = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        directory = directory.parent
    system = directory / "system"
    system.mkdir(exist_ok=True)
    return system


@pytest.fixture(scope="session")
def host(shared: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("containers need root")
    with locked(shared / "host.lock"):
        command(
            "bash", "-euc", f"cd {REPOSITORY}; . packaging/deps.sh; install_missing {HOST_PACKAGES}"
        )


@pytest.fixture(scope="session")
def deb(shared: Path, host: None) -> Path:
    """$SERVERSYNC_DEB, or the package of this tree, built once."""
    if given := os.environ.get("SERVERSYNC_DEB"):
        return Path(given)
    with locked(shared / "deb.lock"):
        link = shared / "dist" / "serversync.deb"
        if not link.exists():
            command(REPOSITORY / "packaging" / "build", "--worktree", shared / "dist")
    return link


@pytest.fixture(scope="session")
def base(request: pytest.FixtureRequest, release: Release, host: None) -> Path:
    given = os.environ.get("SERVERSYNC_SYSTEM_CACHE")
    cache = Path(given) if given else request.config.cache.mkdir("serversync-system")
    cache.mkdir(parents=True, exist_ok=True)
    return base_root(release, cache)


@pytest.fixture(scope="session")
def prepared(release: Release, base: Path, deb: Path, shared: Path) -> list[Path]:
    """The layers of a machine with serversync installed and set up."""
    return [prepare(release, base, deb, shared / f"prepared-{release}"), base]


@pytest.fixture
def bare(release: Release, base: Path, tmp_path: Path) -> Iterator[Container]:
    """A booted machine with the backend's tables and user, without serversync."""
    with Container(release, tmp_path / "machine", [base]) as container:
        container.boot()
        furnish(container)
        yield container
        print(container.story())


@pytest.fixture
def off(release: Release, prepared: list[Path], tmp_path: Path) -> Iterator[Container]:
    """A machine with serversync set up, not yet booted."""
    with Container(release, tmp_path / "machine", prepared) as container:
        yield container
        print(container.story())


@pytest.fixture
def start(off: Container, frontend: Frontend) -> Callable[..., Container]:
    """Boots it with the frontend of this test; further settings as arguments."""

    def boot(**settings: str) -> Container:
        off.configure(FRONTEND_BASE_URL=frontend.url, **settings)
        off.boot()
        return off

    return boot


@pytest.fixture
def machine(start: Callable[..., Container]) -> Container:
    return start()


def running(machine: Container) -> bool:
    return machine.unit("ActiveState", "SubState") == {
        "ActiveState": "active",
        "SubState": "running",
    }


def sentence(machine: Container) -> str:
    """The one of systemctl status."""
    return machine.unit("StatusText")["StatusText"]


def pending(machine: Container) -> str:
    return machine.sql("select count(*) from sync_outbox where processed_at is null")


def slow_reader(frontend: Frontend) -> None:
    """An upload of some megabytes now takes minutes."""
    frontend.read_rate = 40_000


def traces(machine: Container) -> list[str]:
    """Files that speak of serversync by their names."""
    find = "find / -xdev -name '*serversync*'"
    return machine.sh(f"{find} 2>/dev/null || true").split()


# --- install --------------------------------------------------------------------------------------


def test_apt_installs_it_and_it_waits_for_its_configuration_and_then_runs(
    bare: Container, deb: Path, frontend: Frontend
) -> None:
    said = bare.install(deb)

    # Unconfigured: it says so, everywhere, and does not run in circles.
    assert "edit /etc/serversync.env" in said.lower(), said
    assert "Setting up python3-psycopg" in said
    states = bare.unit("ActiveState", "SubState", "ExecMainStatus", "NRestarts", "UnitFileState")
    assert states == {
        "ActiveState": "failed",  # and not activating: no restart is planned
        "SubState": "failed",
        "ExecMainStatus": "78",
        "NRestarts": "0",
        "UnitFileState": "enabled",
    }
    status = bare.run("systemctl", "status", "serversync", check=False).stdout
    assert re.search(r"Status: \"not configured: DATABASE_URL is required", status), status
    assert bare.sh(f"stat -c '%U:%G %a' {ENV_FILE}").strip() == "root:serversync 640"
    assert bare.sh("dpkg-query -W -f '${Conffiles}' serversync").split()[0] == ENV_FILE
    assert "serversync" in bare.sh("getent passwd serversync; id serversync")
    compiled = bare.sh("ls /usr/share/serversync/__pycache__")
    assert re.match(r"serversync\.cpython-3\d+\.pyc", compiled), compiled
    version = bare.sh("serversync --version").strip()
    assert version == f"serversync {serversync.__version__}"
    # The admin interface is there for those who ask for it.
    for unit in ("serversync-admin.socket", "serversync-admin.service"):
        assert bare.unit("ActiveState", unit=unit) == {"ActiveState": "inactive"}
    assert bare.unit("UnitFileState", unit="serversync-admin.socket")["UnitFileState"] == "disabled"

    set_up(bare, frontend.url)
    bare.run("systemctl", "restart", "serversync")

    assert running(bare)
    until(lambda: sentence(bare) == "idle: nothing to send", LONG, "the sentence")
    assert "serversync 0" in bare.messages()


@pytest.mark.parametrize("unit", ["serversync.service", "serversync-admin.service"])
def test_the_hardening_of_the_units_is_seen_by_systemd(machine: Container, unit: str) -> None:
    said = machine.run("systemd-analyze", "security", "--no-pager", unit).stdout

    exposure = re.search(r"Overall exposure level for .*: ([0-9.]+)", said)
    assert exposure and float(exposure[1]) <= 1.5, said


# --- deliver --------------------------------------------------------------------------------------


def test_a_call_of_the_backend_s_own_user_arrives_and_its_directory_goes(
    machine: Container, frontend: Frontend
) -> None:
    call = machine.voicebot("call")[0]

    frontend.wait(lambda: call["call_log_id"] in frontend.files, LONG, "the recording")
    assert frontend.files[call["call_log_id"]].sha256 == call["sha256"]
    assert {entry["seq"] for entry in frontend.entries} == set(call["seqs"][:2])
    until(lambda: not machine.path(call["directory"]).exists(), LONG, "the directory to go")
    until(lambda: pending(machine) == "0", LONG, "the outbox to be empty")
    query = f"select upload_status from recordings where id = '{call['recording_id']}'"
    assert machine.sql(query) == "uploaded"
    # The journal has fields to search by; status has the sentence.
    batch = machine.events("entries_sent")[0]
    assert batch["_SYSTEMD_UNIT"] == "serversync.service"
    assert batch["SYSLOG_IDENTIFIER"] == "serversync"
    for name in ("SEQ", "DURATION_MS", "HTTP_STATUS", "IDEMPOTENCY_KEY"):
        assert batch.get(name), (name, batch)
    told = sentence(machine)
    assert told and told in machine.run("systemctl", "status", "serversync").stdout
    assert machine.run("serversync", "doctor", check=False).stdout.count("failed   recordings") == 0


def test_a_stop_during_an_upload_is_quick_and_the_rest_goes_after_the_start(
    machine: Container, frontend: Frontend
) -> None:
    slow_reader(frontend)
    call = machine.voicebot("call", "--seconds", "120")[0]
    frontend.wait(lambda: frontend.of_kind("file")[0].received > 100_000, LONG, "the upload")

    machine.run("systemctl", "stop", "serversync")

    times = machine.unit(
        "ActiveExitTimestampMonotonic", "InactiveEnterTimestampMonotonic", "Result", "ActiveState"
    )
    assert times["ActiveState"] == "inactive" and times["Result"] == "success"
    left, gone = (
        int(times[f"{name}TimestampMonotonic"]) for name in ("ActiveExit", "InactiveEnter")
    )
    assert (gone - left) / 1e6 < STOP_WITHIN
    assert machine.path(f"{call['directory']}/mixed.wav").exists()
    frontend.read_rate = None
    machine.run("systemctl", "start", "serversync")
    frontend.wait(lambda: call["call_log_id"] in frontend.files, LONG, "the recording")
    assert frontend.files[call["call_log_id"]].sha256 == call["sha256"]
    until(lambda: not machine.path(call["directory"]).exists(), LONG, "the directory to go")


def test_recordings_below_a_closed_home_are_reached_after_setup(
    off: Container, start: Start, frontend: Frontend
) -> None:
    home = f"/home/{OWNER}"
    root = f"{home}/voicebot/storage/recordings"
    machine = start(SYNC_RECORDINGS_DIR=root)
    machine.run("systemctl", "stop", "serversync")
    machine.sh(f"mkdir -p {root}; chown -R voicebot: {home}; chmod 700 {home}; chmod 750 {root}")

    setup = ("serversync", "setup", "--recordings", root, "--backend-user", "voicebot")
    machine.run(*setup)
    machine.sql("update serversync.sender set root_id = null")
    machine.run("serversync", "setup")
    machine.run("systemctl", "restart", "serversync")

    call = machine.voicebot("call", "--root", root)[0]
    frontend.wait(lambda: call["call_log_id"] in frontend.files, LONG, "the recording")
    until(lambda: not machine.path(call["directory"]).exists(), LONG, "the directory to go")
    assert running(machine)


def test_the_service_can_run_as_the_backend_s_user_instead(
    off: Container, start: Start, frontend: Frontend
) -> None:
    """The fallback where the file system has no ACLs."""
    off.put(DROP_IN, "[Service]\nUser=voicebot\nRemoveIPC=no\n")
    machine = start()
    machine.sh("systemctl stop serversync")
    machine.sql("drop schema serversync cascade")
    machine.sh(f"rm -r {RECORDINGS}; rm /etc/tmpfiles.d/serversync.conf")
    machine.sh(f"mkdir {RECORDINGS}", user="voicebot")

    machine.sh("usermod -aG serversync voicebot")  # it may read /etc/serversync.env
    machine.run("serversync", "setup")
    machine.reboot()

    assert running(machine)
    owner = machine.sh(f"ps -o user= -p {machine.main_pid()}").strip()
    assert owner == "voicebot"
    call = machine.voicebot("call")[0]
    frontend.wait(lambda: call["call_log_id"] in frontend.files, LONG, "the recording")
    until(lambda: not machine.path(call["directory"]).exists(), LONG, "the directory to go")


def test_the_token_comes_by_a_credential(
    start: Start, frontend: Frontend, release: Release
) -> None:
    if release.emulated:
        pytest.skip("qemu-user has no credentials")
    frontend.require_token = "s3cret-of-the-frontend"
    machine = start()
    seq = machine.voicebot("bulk", "1")[0]["first"]
    frontend.wait(lambda: frontend.of_kind("entries"), LONG, "a request")
    assert frontend.entries == []

    # For root alone: systemd hands it over. A new token takes a restart.
    machine.put("/etc/serversync.token", "s3cret-of-the-frontend\n", 0o600)
    machine.run("systemctl", "restart", "serversync")

    frontend.wait(lambda: seq in frontend.seqs(), LONG, "the entry")
    environ = machine.sh(f"tr '\\0' '\\n' </proc/{machine.main_pid()}/environ")
    assert "s3cret" not in environ and "CREDENTIALS_DIRECTORY" in environ
    assert "s3cret" not in machine.sh("journalctl --no-pager; systemctl show serversync")


# --- control --------------------------------------------------------------------------------------


def test_a_reload_takes_a_good_change_and_refuses_a_bad_one(
    machine: Container, frontend: Frontend
) -> None:
    pid = machine.main_pid()
    machine.configure(SYNC_LOG_LEVEL="debug")
    machine.run("systemctl", "reload", "serversync")
    until(lambda: machine.events("reloaded"), LONG, "the reload")

    machine.configure(SYNC_LOG_LEVEL="shout")
    machine.run("systemctl", "reload", "serversync", check=False)

    until(lambda: "SYNC_LOG_LEVEL" in machine.messages(), LONG, "the refusal")
    assert running(machine) and machine.main_pid() == pid
    seq = machine.voicebot("bulk", "1")[0]["first"]
    frontend.wait(lambda: seq in frontend.seqs(), LONG, "an entry all the same")


def test_a_killed_agent_is_restarted(machine: Container, frontend: Frontend) -> None:
    pid = machine.main_pid()

    machine.run("kill", "-KILL", str(pid))

    until(lambda: machine.main_pid() not in (0, pid) and running(machine), LONG, "another one")
    assert machine.unit("NRestarts")["NRestarts"] == "1"
    seq = machine.voicebot("bulk", "1")[0]["first"]
    frontend.wait(lambda: seq in frontend.seqs(), LONG, "an entry")


def test_a_hung_agent_is_killed_by_the_watchdog_and_restarted(
    off: Container, start: Start, frontend: Frontend
) -> None:
    off.put(DROP_IN, "[Service]\nWatchdogSec=42\n")  # the shortest that it accepts
    machine = start(SYNC_TIMEOUT_SEC="10")
    assert running(machine)
    pid = machine.main_pid()

    machine.run("kill", "-STOP", str(pid))

    until(lambda: machine.main_pid() not in (0, pid) and running(machine), LONG, "another one")
    said = machine.sh("journalctl -u serversync --no-pager")
    assert "Watchdog timeout" in said
    seq = machine.voicebot("bulk", "1")[0]["first"]
    frontend.wait(lambda: seq in frontend.seqs(), LONG, "an entry")


def test_a_restart_of_postgresql_or_of_the_voicebot_leaves_the_agent_running(
    machine: Container, frontend: Frontend
) -> None:
    unit = "[Service]\nUser=voicebot\nExecStart=sleep infinity\n"
    machine.put("/etc/systemd/system/virtual-voicebot.service", unit)
    machine.sh("systemctl daemon-reload; systemctl start virtual-voicebot")
    pid = machine.main_pid()

    machine.sh("systemctl restart virtual-voicebot; systemctl stop virtual-voicebot")
    machine.run("systemctl", "restart", "postgresql")

    def added() -> int:
        with contextlib.suppress(AssertionError):  # it is not there yet
            return int(machine.voicebot("bulk", "1")[0]["first"])
        return 0

    seq = until(added, LONG, "PostgreSQL")
    frontend.wait(lambda: seq in frontend.seqs(), LONG, "an entry")
    assert machine.main_pid() == pid
    assert machine.unit("NRestarts")["NRestarts"] == "0"
    machine.sh("systemctl stop serversync; systemctl start virtual-voicebot")
    state = machine.unit("ActiveState", unit="virtual-voicebot.service")
    assert state == {"ActiveState": "active"}


def test_a_reboot_in_the_middle_of_a_backlog_loses_nothing(
    machine: Container, frontend: Frontend
) -> None:
    def slowly(_: Request) -> Reply:
        return Reply(200, {}, {"ok": True}, store=True, delay=0.5)

    frontend.on_entries = slowly
    span = machine.voicebot("bulk", "3000")[0]
    call = machine.voicebot("call", "--seconds", "60")[0]
    frontend.wait(lambda: len(frontend.seqs()) >= 100, LONG, "a part of the backlog")

    machine.reboot()

    assert int(pending(machine)) > 0 or len(set(frontend.seqs())) >= 3000
    frontend.on_entries = None
    wanted = {*range(span["first"], span["last"] + 1), *call["seqs"][:2]}
    frontend.wait(lambda: wanted <= set(frontend.seqs()), LONG, "the whole backlog")
    frontend.wait(lambda: call["call_log_id"] in frontend.files, LONG, "the recording")
    until(lambda: pending(machine) == "0", LONG, "the outbox to be empty")
    until(lambda: not machine.path(call["directory"]).exists(), LONG, "the directory to go")


def test_the_admin_interface_starts_at_the_first_request_when_its_socket_is_enabled(
    machine: Container,
) -> None:
    port = free_port()
    machine.put(
        "/etc/systemd/system/serversync-admin.socket.d/port.conf",
        f"[Socket]\nListenStream=\nListenStream=127.0.0.1:{port}\n",
    )
    machine.sh("systemctl daemon-reload; systemctl enable --now serversync-admin.socket")
    service = "serversync-admin.service"
    assert machine.unit("ActiveState", unit=service) == {"ActiveState": "inactive"}

    health = command("curl", "-sS", "--max-time", "60", f"http://127.0.0.1:{port}/healthz")
    metrics = command("curl", "-sS", "--max-time", "60", f"http://127.0.0.1:{port}/metrics")

    assert health and "serversync_up 1" in metrics, (health, metrics)
    assert machine.unit("ActiveState", unit=service) == {"ActiveState": "active"}


def test_a_machine_without_a_clock_that_starts_in_1970_delivers_and_deletes(
    off: Container, start: Start, frontend: Frontend
) -> None:
    library = next(off.path("/usr/lib").glob("*/faketime/libfaketime.so.1"))
    preload = f"/{library.relative_to(off.root)}"
    off.put(
        DROP_IN,
        "[Service]\n"
        f'Environment=LD_PRELOAD={preload} "FAKETIME=@1970-01-01 00:00:00"\n'
        "Environment=FAKETIME_DONT_FAKE_MONOTONIC=1 DONT_FAKE_MONOTONIC=1\n",
    )
    machine = start()
    assert running(machine)

    call = machine.voicebot("call")[0]

    frontend.wait(lambda: call["call_log_id"] in frontend.files, LONG, "the recording")
    until(lambda: not machine.path(call["directory"]).exists(), LONG, "the directory to go")
    state = machine.sh("cat /run/serversync/state.json")
    assert json.loads(state)["since"] < 366 * 86400, state  # it did believe that


def test_a_full_journal_stops_nothing(machine: Container, frontend: Frontend) -> None:
    # The journal is in /run, and so is the agent's state file.
    machine.sh("mount -o remount,size=24M /run; dd if=/dev/zero of=/run/full bs=64k || true")
    assert machine.sh("df --output=avail /run").split()[-1] == "0"

    calls = [machine.voicebot("call")[0] for _ in range(3)]

    logs = {call["call_log_id"] for call in calls}
    frontend.wait(lambda: logs <= frontend.files.keys(), LONG, "the recordings")
    places = [machine.path(call["directory"]) for call in calls]
    until(lambda: not any(place.exists() for place in places), LONG, "the directories to go")
    assert running(machine)
    machine.sh("rm /run/full")
    machine.run("systemctl", "stop", "serversync")
    assert machine.unit("Result") == {"Result": "success"}


# --- upgrade, remove, purge -----------------------------------------------------------------------


def newer(deb: Path, directory: Path) -> Path:
    """The package of a later version, whose program is another one."""
    tree, later = directory / "tree", directory / "later.deb"
    command("dpkg-deb", "-R", deb, tree)
    version = f"{serversync.__version__}+1"
    for name, word in (
        ("DEBIAN/control", "Version: "),
        ("usr/share/serversync/serversync.py", '"'),
    ):
        path = tree / name
        text = path.read_text()
        was, becomes = f"{word}{serversync.__version__}", f"{word}{version}"
        assert text.count(was) == 1, name
        path.write_text(text.replace(was, becomes))
    command("dpkg-deb", "--root-owner-group", "-b", tree, later)
    return later


def test_an_upgrade_keeps_the_edits_and_the_work_and_restarts_once(
    machine: Container, frontend: Frontend, deb: Path, tmp_path: Path
) -> None:
    frontend.on_entries = lambda _: Reply(200, {}, {"ok": True}, store=True, delay=0.3)
    edited = machine.path(ENV_FILE).read_text()
    span = machine.voicebot("bulk", "2000")[0]
    frontend.wait(lambda: len(frontend.seqs()) >= 100, LONG, "a part of the backlog")
    before = machine.unit("InvocationID", "MainPID")

    machine.install(newer(deb, tmp_path))  # with stdin closed

    assert machine.path(ENV_FILE).read_text() == edited
    assert machine.sh(f"stat -c '%U:%G %a' {ENV_FILE}").strip() == "root:serversync 640"
    assert running(machine)
    assert machine.unit("InvocationID", "MainPID") != before
    starts = machine.events("started")
    assert len(starts) == 2, starts
    assert f"{serversync.__version__}+1" in str(starts[-1]["MESSAGE"])
    frontend.on_entries = None
    wanted = set(range(span["first"], span["last"] + 1))
    frontend.wait(lambda: wanted <= set(frontend.seqs()), LONG, "the whole backlog")


def test_remove_keeps_the_configuration_and_purge_leaves_only_the_user(
    machine: Container, frontend: Frontend, deb: Path
) -> None:
    call = machine.voicebot("call")[0]
    frontend.wait(lambda: call["call_log_id"] in frontend.files, LONG, "the recording")
    machine.put("/etc/serversync.token", "s3cret\n", 0o600)
    machine.put(DROP_IN, "[Service]\nNice=11\n")
    until(lambda: not machine.path(call["directory"]).exists(), LONG, "the directory to go")
    kept = machine.voicebot("call")[0]
    machine.sh("systemctl enable serversync-admin.socket")

    machine.sh("apt-get remove -y serversync <&-")

    assert not running(machine)
    assert "FRONTEND_BASE_URL" in machine.path(ENV_FILE).read_text()
    assert not machine.path("/usr/share/serversync").exists()
    assert machine.path("/etc/serversync.token").exists()

    machine.sh("apt-get purge -y serversync <&-")

    assert traces(machine) == [f"{RECORDINGS}/.serversync-root"]
    # The database knows the marker; without it a new installation would take the directory for
    # another one. All that is the backend's stays, a recording that did not arrive among it.
    if kept["call_log_id"] not in frontend.files:
        assert machine.path(f"{kept['directory']}/mixed.wav").exists()
    assert machine.sql("select count(*) > 0 from sync_outbox") == "t"
    assert "serversync" in machine.sh("getent passwd serversync")

    said = machine.install(deb)

    assert "edit /etc/serversync.env" in said.lower(), said
    assert machine.unit("ExecMainStatus", "ActiveState")["ExecMainStatus"] == "78"
    set_up(machine, frontend.url)
    machine.run("systemctl", "restart", "serversync")
    until(lambda: running(machine), LONG, "the service")


def test_piuparts_finds_nothing_that_purge_leaves(
    release: Release, base: Path, deb: Path, tmp_path: Path
) -> None:
    command("bash", "-euc", f"cd {REPOSITORY}; . packaging/deps.sh; install_missing piuparts")
    arguments = (f"--existing-chroot={base}", f"--distribution={release.name}")
    where = (f"--mirror={MIRROR} main", f"--tmpdir={tmp_path}")
    # A copy of the machines' root: a database's files there are not this package's.
    loose = ("--allow-database", "--skip-logrotatefiles-test", "--no-eatmydata")

    said = command("piuparts", *arguments, *where, *loose, deb.resolve())

    assert "PASS: All tests" in said

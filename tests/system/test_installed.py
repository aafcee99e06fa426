"""The package on real systemd: what a person who installs it on a Pi lives through."""

import contextlib
import hashlib
import json
import re
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import serversync
from backend import write_wav
from box import (
    ANNOUNCEMENTS,
    DROP_IN,
    ENV_FILE,
    HERE,
    LONG,
    MARKS,
    RECORDINGS,
    REPOSITORY,
    SETUP,
    VOICEBOT,
    Box,
    Installation,
    command,
    until,
)
from frontend import Frontend, Reply, Request
from pg import free_port
from settings import AUDIO, Desired, announcement, flow, group, route, rule
from test_debian import alone, locked
from test_docs import section, sessions

pytest_plugins = ["machines"]
pytestmark = MARKS

OWNER = "bot"
STOP_WITHIN = 2.0  # by systemd's own clock
IDLE = "all delivered; "


def slow_reader(frontend: Frontend) -> None:
    """An upload of some megabytes now takes minutes."""
    frontend.read_rate = 40_000


def arrives(machine: Box, frontend: Frontend, call: dict[str, Any]) -> None:
    """The recording, whole; then its directory goes."""
    frontend.wait(lambda: call["call_log_id"] in frontend.files, LONG, "the recording")
    assert frontend.files[call["call_log_id"]].sha256 == call["sha256"]
    until(lambda: not machine.exists(call["directory"]), LONG, "the directory to go")


def delivers(machine: Box, frontend: Frontend) -> None:
    seq = machine.enqueue()
    frontend.wait(lambda: seq in frontend.seqs(), LONG, "an entry")


def sentence(machine: Box) -> str:
    """The one of systemctl status."""
    return machine.unit("StatusText")["StatusText"]


# Without a program of its own for HTTP: a minimal Debian has none.
GET = """
import http.client, socket, sys
connection = http.client.HTTPConnection("localhost")
connection.sock = socket.socket(socket.AF_UNIX)
connection.sock.connect(sys.argv[2])
connection.request("GET", sys.argv[1])
answer = connection.getresponse()
print(answer.read().decode())
sys.exit(answer.status != 200)
"""


def get(machine: Box, path: str, sock: str = "/run/serversync/admin.sock", **how: Any) -> str:
    """What the admin interface says there, with a 200."""
    return machine.run("python3", "-c", GET, path, sock, **how).stdout


# --- install --------------------------------------------------------------------------------------


def test_apt_installs_it_and_it_waits_for_its_configuration_and_then_runs(
    installed: Installation,
) -> None:
    said, seen = installed.said, installed.unconfigured

    # Unconfigured: apt names all the steps, and starts nothing that would fail.
    steps = ("sudoedit /etc/serversync.env", "/etc/serversync.token", "--recordings", "restart")
    assert [step for step in steps if step not in said] == [], said
    assert "Could not execute" not in said and "Traceback" not in said, said
    idle = ["ActiveState=inactive", "ExecMainStatus=0", "NRestarts=0", "SubState=dead"]
    assert sorted(installed.idle.split()) == idle
    # Where somebody starts it, it says so, and does not run in circles.
    assert "Setting up python3-psycopg" in said
    # Failed, and not activating: no restart is planned.
    assert sorted(seen["unit"].split()) == [
        "ActiveState=failed",
        "ExecMainStatus=78",
        "NRestarts=0",
        "SubState=failed",
    ]
    assert 'Status: "not configured: DATABASE_URL is required' in seen["status"], seen["status"]
    assert seen["rights"].strip() == "root:serversync 640"
    assert seen["conffiles"].split()[0] == ENV_FILE
    assert seen["user"].startswith("serversync:")
    assert re.match(r"serversync\.cpython-3\d+\.pyc", seen["compiled"]), seen["compiled"]
    assert seen["version"] == f"serversync {serversync.__version__}\n"
    # The admin interface is there for those who ask for it.
    assert seen["enabled"].split() == ["enabled", "disabled"]
    assert seen["admin"].split() == ["inactive", "inactive"]

    seen = installed.configured

    assert "SubState=running" in seen["unit"] and "NRestarts=0" in seen["unit"], seen["unit"]
    assert seen["rights"].strip() == "root:serversync 640"
    assert f"serversync {serversync.__version__}" in seen["journal"]


def test_the_readme_shows_what_a_person_types_and_sees(installed: Installation) -> None:
    text = section("Install on a Pi")
    typed = re.findall(r"^    \$ (.*)$", text, re.M)
    assert typed == [
        "sudo apt install ./serversync.deb",
        "sudoedit /etc/serversync.env",
        "sudo sh -c 'umask 077; nano /etc/serversync.token'",
        *installed.typed,
    ]
    shown = dict(sessions(text))
    for line in shown[typed[0]].splitlines():
        assert line == "[…]" or line in installed.said.splitlines()
    for line, said in installed.typed.items():
        assert shown[line] == said.strip(), line
    for problem in ("DATABASE_URL is required: ", "FRONTEND_BASE_URL is required: "):
        told = re.search(f"^    (serversync: {problem}.*)$", text, re.M)
        assert told and told[1] in installed.unconfigured["journal"].splitlines()


def test_the_units_are_hardened_and_limited_in_systemd_s_own_eyes(machine: Box) -> None:
    for unit in ("serversync.service", "serversync-admin.service"):
        said = machine.run("systemd-analyze", "security", "--no-pager", unit).stdout
        exposure = re.search(r"Overall exposure level for .*: ([0-9.]+)", said)
        assert exposure and float(exposure[1]) <= 1.5, said
        limits = machine.unit("MemoryMax", "TasksMax", "Nice", unit=unit)
        assert limits == {
            "MemoryMax": str(128 << 20),
            "TasksMax": "16",
            "Nice": "10",
        }
    status = machine.read(f"/proc/{machine.main_pid()}/status")
    held = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert (held["NoNewPrivs"], held["CapEff"]) == ("1", "0" * 16)
    assert int(held["Threads"]) < 16
    if not machine.release.foreign or machine.release.whole:  # qemu-user knows no filter
        assert held["Seccomp"] == "2"


def test_the_sandbox_lets_nothing_through_but_what_the_agent_needs(machine: Box) -> None:
    """A stranger's code in the agent's place; see sandboxed.py."""
    if machine.release.foreign and not machine.release.whole:
        pytest.skip("qemu-user has no sandbox")
    program = "/usr/local/lib/sandboxed.py"
    machine.copy(HERE / "sandboxed.py", program)
    machine.put(DROP_IN, f"[Service]\nExecStartPre=/usr/bin/python3 -I {program} {RECORDINGS}\n")
    machine.run("systemctl", "daemon-reload")
    machine.run("systemctl", "restart", "serversync")

    tried = [line for line in machine.messages().splitlines() if line.startswith("sandbox: ")]
    assert tried, machine.messages()
    assert [line for line in tried if not line.startswith("sandbox: as it should be: ")] == []
    assert len(tried) == 15, tried


# --- deliver --------------------------------------------------------------------------------------


def test_a_call_of_the_backend_s_own_user_arrives_and_its_directory_goes(
    machine: Box, frontend: Frontend
) -> None:
    call = machine.voicebot("call")[0]

    arrives(machine, frontend, call)
    assert {entry["seq"] for entry in frontend.entries} == set(call["seqs"][:2])
    until(lambda: machine.pending() == 0, LONG, "the outbox to be empty")
    query = f"select upload_status from recordings where id = '{call['recording_id']}'"
    assert machine.sql(query) == "uploaded"
    # The journal has fields to search by; status has the sentence.
    batch = machine.events("entries_sent")[0]
    assert batch["_SYSTEMD_UNIT"] == "serversync.service"
    assert batch["SYSLOG_IDENTIFIER"] == "serversync"
    for name in ("SEQ", "DURATION_MS", "HTTP_STATUS", "IDEMPOTENCY_KEY"):
        assert batch.get(name), (name, batch)
    told = until(lambda: sentence(machine), LONG, "a sentence")
    assert told in machine.run("systemctl", "status", "serversync").stdout
    assert "failed   recordings" not in machine.run("serversync", "doctor", check=False).stdout


def test_settings_and_their_audio_reach_the_backend(
    machine: Box, frontend: Frontend, tmp_path: Path
) -> None:
    sound = tmp_path / "welcome.wav"
    write_wav(sound, 0.2, 1)
    spoken = announcement("welcome", audioFileUrl=f"{AUDIO}{sound.name}", ttsText=None)
    frontend.pages[f"{AUDIO}{sound.name}"] = sound.read_bytes()
    numbers = group("03-1234-5678", name="friends")
    rules = [rule("friends", callerGroupId=numbers["id"])]
    Desired([numbers], rules, [spoken], [flow(route("1"))]).serve(frontend)

    machine.begin(frontend.url, FRONTEND_SYNC_INTERVAL_SEC="1")

    stored = f"{ANNOUNCEMENTS}/{sound.name}"
    until(lambda: machine.exists(stored), LONG, "the audio")
    assert (
        machine.sh(f"sha256sum <{stored}", user="voicebot").split()[0]
        == hashlib.sha256(sound.read_bytes()).hexdigest()
    )
    machine.sh(f"rm {stored}", user="voicebot")  # it is the backend's to read and to delete
    query = "select phone_number, group_name from registered_numbers where deleted_at is null"
    assert machine.sql(query) == "+81312345678|friends"
    query = "select (select count(*) from call_action_rules), (select count(*) from ivr_nodes)"
    assert machine.sql(query) == "1|4"


def test_a_stop_during_an_upload_is_quick_and_the_rest_goes_after_the_start(
    machine: Box, frontend: Frontend
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
    assert (gone - left) / 1e6 < STOP_WITHIN * machine.release.pace
    assert machine.exists(f"{call['directory']}/mixed.wav")
    frontend.read_rate = None
    machine.run("systemctl", "start", "serversync")
    arrives(machine, frontend, call)


def test_recordings_below_a_closed_home_are_reached_after_setup(
    own: Box, frontend: Frontend
) -> None:
    home = f"/home/{OWNER}"
    root = f"{home}/voicebot/storage/recordings"
    own.sh(f"mkdir -p {root}; chown -R voicebot: {home}; chmod 700 {home}; chmod 750 {root}")

    own.configure(SYNC_RECORDINGS_DIR=root)
    own.run("serversync", "setup", "--recordings", root, "--backend-user", "voicebot")
    own.sql("update serversync.sender set root_id = null")
    own.run("serversync", "setup")
    own.run("systemctl", "restart", "serversync")

    arrives(own, frontend, own.voicebot("call", "--root", root)[0])
    assert own.running


def test_a_file_system_without_acls_is_opened_by_a_group_and_the_admin_interface_is_ready(
    own: Box, frontend: Frontend
) -> None:
    own.sh(f"rm /etc/tmpfiles.d/serversync-recordings.conf; mount -t ramfs none {RECORDINGS}")
    own.sh(f"chown voicebot: {RECORDINGS}")
    own.sql("update serversync.sender set root_id = null")

    said = own.run("serversync", "setup", "--recordings", RECORDINGS).stdout
    own.run("serversync", "setup")
    own.run("systemctl", "restart", "serversync")

    assert "may write and delete" in said and "UMask=0002" in said
    # As serversync(8) has it for the backend's unit.
    call = json.loads(own.sh(f"umask 0002; python3 {VOICEBOT} call", user="voicebot"))
    arrives(own, frontend, call)
    drop_in = "/etc/systemd/system/serversync-admin.socket.d/ready.conf"
    own.put(drop_in, "[Socket]\nListenStream=\nListenStream=/run/ready.sock\n")
    own.sh("systemctl daemon-reload; systemctl start serversync-admin.socket")
    assert get(own, "/readyz", "/run/ready.sock")


def test_run_typed_by_root_is_the_service_s_user_s(machine: Box, frontend: Frontend) -> None:
    machine.run("systemctl", "stop", "serversync")
    seq = machine.enqueue()

    pid = machine.sh("serversync run </dev/null >/run/typed 2>&1 & echo $!").strip()

    frontend.wait(lambda: seq in frontend.seqs(), LONG, "the entry")
    assert machine.sh(f"stat -c '%U %G' /proc/{pid}").split() == ["serversync", "serversync"]
    machine.run("kill", pid)
    machine.sh(f"while [ -e /proc/{pid} ]; do sleep 0.1; done")
    seq = machine.enqueue()
    machine.sh("SUDO_UID=1000 serversync once </dev/null")
    assert seq in frontend.seqs()


def test_a_token_that_root_wrote_for_root_alone_is_read_at_a_reload_and_by_typed_commands(
    machine: Box, frontend: Frontend
) -> None:
    frontend.require_token = "s3cret-of-the-frontend"
    seq = machine.enqueue()
    frontend.wait(lambda: frontend.of_kind("entries"), LONG, "a request")
    assert frontend.entries == []

    machine.put("/etc/serversync.token", "s3cret-of-the-frontend\n", 0o600)
    machine.run("systemctl", "reload", "serversync")

    frontend.wait(lambda: seq in frontend.seqs(), LONG, "the entry")
    assert machine.sh("stat -c '%U %a' /etc/serversync.token").split() == ["serversync", "400"]
    checks = json.loads(machine.run("serversync", "doctor", "--json", check=False).stdout)["checks"]
    assert [c["status"] for c in checks if c["name"] == "token"] == ["ok"]
    assert "s3cret" not in machine.sh("journalctl --no-pager; systemctl show serversync")


# --- control --------------------------------------------------------------------------------------


def test_a_reload_takes_a_good_change_and_refuses_a_bad_one(
    machine: Box, frontend: Frontend
) -> None:
    pid = machine.main_pid()
    machine.configure(SYNC_LOG_LEVEL="debug")
    machine.run("systemctl", "reload", "serversync")
    until(lambda: machine.events("reloaded"), LONG, "the reload")

    machine.configure(SYNC_LOG_LEVEL="shout")
    machine.run("systemctl", "reload", "serversync", check=False)

    until(lambda: "SYNC_LOG_LEVEL" in machine.messages(), LONG, "the refusal")
    assert machine.running and machine.main_pid() == pid
    delivers(machine, frontend)


# sd_notify(3) by root, with the sender's process in place of its own: here, to cut its time.
IN_ITS_NAME = """
import socket, struct, sys
pid, message = int(sys.argv[1]), sys.argv[2].encode()
credentials = (socket.SOL_SOCKET, socket.SCM_CREDENTIALS, struct.pack("3i", pid, 0, 0))
with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
    sock.connect("/run/systemd/notify")
    sock.sendmsg([message], [credentials])
"""


def test_a_hung_agent_is_killed_by_the_watchdog_and_restarted(
    machine: Box, frontend: Frontend
) -> None:
    delivers(machine, frontend)
    pid, fed = machine.main_pid(), "WatchdogTimestampMonotonic"
    assert machine.unit("WatchdogUSec", "RestartUSec") == {
        "WatchdogUSec": "1min 30s",
        "RestartUSec": "5s",
    }
    assert int(machine.unit(fed)[fed]) > 0  # by the agent

    machine.run("kill", "-STOP", str(pid))
    if not machine.release.whole:  # nobody waits so long here
        machine.run("python3", "-c", IN_ITS_NAME, str(pid), "WATCHDOG_USEC=1000000")

    until(lambda: machine.restarted(pid), LONG, "another one")
    assert "Watchdog timeout" in machine.messages()
    delivers(machine, frontend)


@pytest.mark.whole
def test_memory_and_tasks_beyond_the_limits_are_refused_and_the_agent_returns(
    machine: Box, frontend: Frontend
) -> None:
    group = "/sys/fs/cgroup/system.slice/serversync.service"
    delivers(machine, frontend)
    pid = machine.main_pid()

    # What an agent with a leak would do.
    hog = 'data = b"x" * (400 << 20)'
    join = f"echo $$ >{group}/cgroup.procs"
    machine.sh(f"{join}; exec /usr/bin/python3 -c '{hog}'", check=False)

    until(lambda: machine.restarted(pid), LONG, "another one")
    assert "oom-kill" in machine.messages()
    delivers(machine, frontend)
    # And what a fork bomb in it would.
    fork = 'import os; [os.fork() or os.execvp("sleep", ["sleep", "9"]) for _ in range(40)]'
    said = machine.sh(f"{join}; exec /usr/bin/python3 -c '{fork}' 2>&1", check=False)
    assert "BlockingIOError" in said, said


def test_a_restart_of_postgresql_or_of_the_voicebot_leaves_the_agent_running(
    machine: Box, frontend: Frontend
) -> None:
    unit = "[Service]\nUser=voicebot\nExecStart=sleep infinity\n"
    machine.put("/etc/systemd/system/virtual-voicebot.service", unit)
    machine.sh("systemctl daemon-reload; systemctl start virtual-voicebot")
    pid = machine.main_pid()

    machine.sh("systemctl restart virtual-voicebot; systemctl stop virtual-voicebot")
    machine.run("systemctl", "restart", "postgresql")

    def added() -> int:
        with contextlib.suppress(AssertionError):  # it is not there yet
            return machine.enqueue()
        return 0

    seq = until(added, LONG, "PostgreSQL")
    frontend.wait(lambda: seq in frontend.seqs(), LONG, "an entry")
    assert machine.main_pid() == pid
    assert machine.unit("NRestarts")["NRestarts"] == "0"
    machine.sh("systemctl stop serversync; systemctl start virtual-voicebot")
    state = machine.unit("ActiveState", unit="virtual-voicebot.service")
    assert state == {"ActiveState": "active"}
    machine.sh("systemctl stop virtual-voicebot")


def test_a_reboot_in_the_middle_of_a_backlog_loses_nothing(
    machine: Box, frontend: Frontend
) -> None:
    def slowly(_: Request) -> Reply:
        return Reply(200, {}, {"ok": True}, store=True, delay=0.5)

    frontend.on_entries = slowly
    span = machine.voicebot("bulk", "3000")[0]
    call = machine.voicebot("call", "--seconds", "60")[0]
    frontend.wait(lambda: len(frontend.seqs()) >= 100, LONG, "a part of the backlog")

    machine.reboot()

    assert machine.pending() > 0 or len(set(frontend.seqs())) >= 3000
    frontend.on_entries = None
    wanted = {*range(span["first"], span["last"] + 1), *call["seqs"][:2]}
    frontend.wait(lambda: wanted <= set(frontend.seqs()), LONG, "the whole backlog")
    arrives(machine, frontend, call)
    until(lambda: machine.pending() == 0, LONG, "the outbox to be empty")


ADMIN, ADMIN_SOCKET = "serversync-admin.service", "serversync-admin.socket"
ADMIN_TIMER = "serversync-admin.timer"


def test_the_admin_interface_starts_at_the_first_request_and_sees_the_agent(machine: Box) -> None:
    machine.sh(f"systemctl enable --now {ADMIN_SOCKET}; useradd -G serversync looker")
    assert machine.unit("ActiveState", unit=ADMIN) == {"ActiveState": "inactive"}
    until(lambda: sentence(machine).startswith(IDLE), LONG, "the first cycle")

    def state() -> dict[str, Any]:
        found: dict[str, Any] = json.loads(get(machine, "/api/v1/status", user="looker"))
        return found

    assert "PermissionError" in get(machine, "/healthz", user="nobody", check=False)
    view = state()

    assert machine.unit("ActiveState", unit=ADMIN) == {"ActiveState": "active"}
    # By the agent's state file and its process, which this unit sees through its own sandbox.
    agent = view["agent"]
    assert (agent["state"], agent["pid"]) == ("running", machine.main_pid()), agent
    assert agent["sentence"] == sentence(machine)
    assert view["database"]["ok"], view["database"]
    metrics = get(machine, "/metrics", user="looker")
    assert "serversync_up 1\n" in metrics and "serversync_listener_connected 1\n" in metrics
    assert get(machine, "/healthz") and get(machine, "/readyz")

    machine.run("systemctl", "kill", "--signal=KILL", "serversync")
    assert state()["agent"]["state"] != "running" or machine.running

    # The agent's directory is where the socket lies; it stays when the agent goes.
    machine.sh("systemctl stop serversync")
    assert state()["agent"]["state"] == "stopped"
    machine.sh("systemctl start serversync")
    until(lambda: state()["agent"]["state"] == "running", LONG, "the agent's state file")
    owner = machine.sh("stat -c '%U:%G %a' /run/serversync /run/serversync/admin.sock").splitlines()
    assert owner == ["serversync:serversync 2755", "root:serversync 660"]
    machine.sh(f"systemctl disable --now {ADMIN_SOCKET}; userdel looker")


def test_an_admin_process_that_cannot_start_is_given_up_and_its_socket_comes_back(
    machine: Box,
) -> None:
    # Its socket comes back when systemd lets it start again, not before: half a minute here. (It is
    # given up ten seconds after a first start at least.)
    limit = machine.unit("StartLimitIntervalUSec", unit=ADMIN)["StartLimitIntervalUSec"]
    pause = machine.unit("TimersMonotonic", unit=ADMIN_TIMER)["TimersMonotonic"]
    assert f"OnActiveUSec={limit} ;" in pause
    drop_ins = {
        f"{ADMIN_TIMER}.d/short.conf": "[Timer]\nOnActiveSec=\nOnActiveSec=20\n",
        f"{ADMIN}.d/short.conf": "[Unit]\nStartLimitIntervalSec=30\n",
        f"{ADMIN}.d/broken.conf": "[Service]\nExecStart=\nExecStart=/bin/false\n",
    }
    for name, text in drop_ins.items():
        machine.put(f"/etc/systemd/system/{name}", text)
    machine.sh(f"systemctl daemon-reload; systemctl enable --now {ADMIN_SOCKET}")
    since = machine.sh("date '+%F %T'").strip()

    # One connection: it is dropped in the end.
    assert '"ok"' not in get(machine, "/healthz", check=False, timeout=LONG)

    state = machine.unit("ActiveState", "Result", unit=ADMIN_SOCKET)
    assert state == {"ActiveState": "failed", "Result": "service-start-limit-hit"}
    said = machine.run("journalctl", "-u", ADMIN, "--since", since, "-o", "short-unix").stdout
    starts = [float(line.split()[0]) for line in said.splitlines() if " Starting " in line]
    assert 2 <= len(starts) <= 4, said
    assert all(later - one > 4 for one, later in pairwise(starts)), said

    machine.sh(f"rm /etc/systemd/system/{ADMIN}.d/broken.conf; systemctl daemon-reload")
    until(
        lambda: machine.unit("ActiveState", unit=ADMIN_SOCKET)["ActiveState"] == "active",
        2 * LONG,
        "the socket to come back",
    )
    assert get(machine, "/healthz")
    machine.sh(f"systemctl disable --now {ADMIN_SOCKET}; rm /etc/systemd/system/*/short.conf")
    machine.sh("systemctl daemon-reload")


def test_a_machine_without_a_clock_that_starts_in_1970_delivers_and_deletes(
    machine: Box, frontend: Frontend
) -> None:
    library = machine.sh("ls /usr/lib/*/faketime/libfaketime.so.1").strip()
    machine.put(
        DROP_IN,
        "[Service]\n"
        f'Environment=LD_PRELOAD={library} "FAKETIME=@1970-01-01 00:00:00"\n'
        "Environment=FAKETIME_DONT_FAKE_MONOTONIC=1 DONT_FAKE_MONOTONIC=1\n",
    )
    machine.sh("systemctl daemon-reload; systemctl restart serversync")
    assert machine.running

    arrives(machine, frontend, machine.voicebot("call")[0])

    state = machine.read("/run/serversync/state.json")
    assert json.loads(state)["since"] < 366 * 86400, state  # it did believe that


def test_a_full_journal_stops_nothing(machine: Box, frontend: Frontend) -> None:
    # The journal is in /run, and so is the agent's state file.
    size = machine.sh("df --output=size --block-size=1 /run").split()[-1]
    machine.sh("mount -o remount,size=24M /run; dd if=/dev/zero of=/run/full bs=64k || true")
    assert machine.sh("df --output=avail /run").split()[-1] == "0"

    calls = [machine.voicebot("call")[0] for _ in range(3)]

    for call in calls:
        arrives(machine, frontend, call)
    assert machine.running
    machine.sh(f"rm /run/full; mount -o remount,size={size} /run")
    machine.run("systemctl", "stop", "serversync")
    assert machine.unit("Result") == {"Result": "success"}


# --- upgrade, remove, purge -----------------------------------------------------------------------


def newer(deb: Path, directory: Path, number: int, conffile: str = "") -> Path:
    """The package of a later version, whose program, and perhaps whose conffile, is another one."""
    tree, later = directory / f"tree-{number}", directory / f"later-{number}.deb"
    command("dpkg-deb", "-R", deb, tree)
    version = f"{serversync.__version__}+{number}"
    for name, word in (
        ("DEBIAN/control", "Version: "),
        ("usr/share/serversync/serversync.py", '"'),
    ):
        path = tree / name
        text = path.read_text()
        was, becomes = f"{word}{serversync.__version__}", f"{word}{version}"
        assert text.count(was) == 1, name
        path.write_text(text.replace(was, becomes))
    with (tree / ENV_FILE.lstrip("/")).open("a") as file:
        file.write(conffile)
    command("dpkg-deb", "--root-owner-group", "-Zgzip", "-b", tree, later)
    return later


def test_an_upgrade_keeps_the_edits_and_the_work_and_restarts_once(
    machine: Box, frontend: Frontend, deb: Path, tmp_path: Path
) -> None:
    frontend.on_entries = lambda _: Reply(200, {}, {"ok": True}, store=True, delay=0.3)
    edited = machine.read(ENV_FILE)
    span = machine.voicebot("bulk", "2000")[0]
    frontend.wait(lambda: len(frontend.seqs()) >= 100, LONG, "a part of the backlog")
    before = machine.unit("InvocationID")

    machine.install(newer(deb, tmp_path, 1))  # with stdin closed

    assert machine.read(ENV_FILE) == edited
    assert machine.sh(f"stat -c '%U:%G %a' {ENV_FILE}").strip() == "root:serversync 640"
    assert machine.running
    assert machine.unit("InvocationID") != before
    starts = machine.events("started")
    assert len(starts) == 2, starts
    assert f"{serversync.__version__}+1" in str(starts[-1]["MESSAGE"])
    frontend.on_entries = None
    wanted = set(range(span["first"], span["last"] + 1))
    frontend.wait(lambda: wanted <= set(frontend.seqs()), LONG, "the whole backlog")


def test_what_setup_wrote_for_tmpfiles_hides_nothing_and_is_harmless_after_an_upgrade(
    own: Box,
) -> None:
    directory, was = "/etc/tmpfiles.d", "serversync.conf"
    written = f"{directory}/{Path(serversync.TMPFILES).name}"
    # As earlier packages had it.
    own.sh(
        f"cd {directory}; sed 's/^a+/A+/' {written} >{was}; echo 'Z /srv/x ~2770 - 9' >>{was}; "
        f"echo 'A+ /mine - - - - g:adm:rx' >>{was}; rm {written}; "
        f"systemctl disable serversync; systemctl enable {ADMIN_SOCKET}"
    )

    own.run("dpkg", "-i", "/srv/package.deb")
    own.reboot()

    owner = own.sh("stat -c '%U:%G %a' /run/serversync /run/serversync/admin.sock").splitlines()
    assert owner == ["serversync:serversync 2755", "root:serversync 660"]
    lines = own.read(written).splitlines()
    assert [line for line in lines if line[0] in "AZ"] == ["A+ /mine - - - - g:adm:rx"]
    assert f"a+ {RECORDINGS} - - - - u:serversync:rwx,d:u:serversync:rwx" in lines
    assert "z /srv/x ~2770 - 9" in lines and not own.exists(f"{directory}/{was}")


# The last commit of the edition before this one, whose schema had version 1.
PREVIOUS = "b0565a7"
ITS_BUILD = """
git -c safe.directory="$PWD" archive "$0" | tar -x -C "$1"
git init -q "$1"
exec "$1/packaging/build" --worktree "$2"
"""


def previous(cache: Path, directory: Path) -> Path:
    """The package of the edition before this one, by its own packaging/build: once for all runs."""
    deb = cache / f"serversync-{PREVIOUS}.deb"
    with locked(cache / "previous.lock"):
        if not deb.exists():
            shutil.copy(built(directory), unfinished := cache / f"{PREVIOUS}.unfinished")
            unfinished.rename(deb)
    return deb


def built(directory: Path) -> Path:
    git = ("git", "-C", REPOSITORY, "-c", f"safe.directory={REPOSITORY}")
    known = subprocess.run([*git, "cat-file", "-e", PREVIOUS], capture_output=True, check=False)
    assert known.returncode == 0, f"no commit {PREVIOUS} in {REPOSITORY}: git fetch --unshallow"
    source = directory / "previous"
    source.mkdir()
    words = ("bash", "-euo", "pipefail", "-c", f"cd {REPOSITORY}; {ITS_BUILD}")
    with alone():
        command(*words, PREVIOUS, source, directory)
    return directory / "serversync.deb"


def test_an_upgrade_from_the_previous_edition_goes_on_with_what_it_left(
    bare: Box, frontend: Frontend, deb: Path, cache: Path, tmp_path: Path
) -> None:
    bare.furnish()
    bare.install(previous(cache, tmp_path))
    bare.set_up("http://127.0.0.1:9")
    # On TCP, where it listens for itself alone: the host's loopback is shared with other machines.
    bare.sh(
        f"sed -i s/9847/{free_port()}/ /usr/lib/systemd/system/{ADMIN_SOCKET}; "
        f"systemctl daemon-reload; systemctl enable --now {ADMIN_SOCKET}"
    )
    uploaded, waiting = (bare.voicebot("call")[0] for _ in range(2))
    dead, again = bare.enqueue(), bare.enqueue()
    bug = frontend.poison[waiting["call_log_id"]] = Reply(500, {}, {"error": "a bug"})
    entities = [
        bare.sql(f"select entity_id from sync_outbox where id = {n}") for n in (dead, again)
    ]
    frontend.rejected |= dict.fromkeys(entities, "INVALID")
    bare.begin(frontend.url, SYNC_DELETE_AFTER_SEC="3600", SYNC_ENTRY_MAX_BYTES="64 MiB")
    row = f"from serversync.failures where outbox_id = {waiting['seqs'][0]}"
    left = f"""
        select (select max(number) from serversync.schema_version), (select count(*) {row}),
            (select max(outbox_id) from serversync.uploads),
            (select count(*) from serversync.dead_letters)
    """
    until(lambda: bare.sql(left) == f"1|1|{uploaded['seqs'][2]}|2", LONG, "its work")
    del frontend.rejected[entities[1]]
    frontend.poison[entities[1]] = bug
    letter = "select id from serversync.dead_letters where outbox_id ="
    bare.sh(f"serversync dlq retry {bare.sql(f'{letter} {again}')}")
    retried = f"select count(*) from serversync.failures where outbox_id = {again}"
    until(lambda: bare.sql(retried) == "1", LONG, "a letter that is retried in vain")
    since, tries = bare.sql(f"select first_failed_at, tries {row}").split("|")

    bare.configure(SYNC_DELETE_AFTER_SEC="0")
    bare.install(newer(deb, tmp_path, 3))

    assert bare.running and len(bare.events("started")) == 2
    assert re.findall(r"^[aA]\+ \S+", bare.read(serversync.TMPFILES), re.M) == [
        f"a+ {RECORDINGS}",
        f"a+ {ANNOUNCEMENTS}",
    ]
    assert get(bare, "/healthz")
    assert "more than is possible: 32 MiB is used" in bare.messages()
    number = bare.sql("select max(number) from serversync.schema_version")
    assert number == str(serversync.SCHEMA_VERSION)
    bare.run("serversync", "setup")
    owner = "select proowner::regrole from pg_proc where proname = 'serversync_wake'"
    assert bare.sql(owner) == bare.sql("select relowner::regrole from pg_class"
                                       " where relname = 'sync_outbox'")  # fmt: skip
    query = f"select created_at from serversync.waiting where tries > {tries} and"
    query += f" outbox_id = {waiting['seqs'][0]}"
    assert until(lambda: bare.sql(query), LONG, "a retry") == since
    until(lambda: not bare.exists(uploaded["directory"]), LONG, "the directory to go")
    states = "select string_agg(status, ' ' order by outbox_id) from serversync.dead_letters"
    assert bare.sql(states) == "PENDING RETRYING"
    frontend.poison.clear()
    frontend.rejected.clear()
    bare.run("systemctl", "reload", "serversync")
    arrives(bare, frontend, waiting)
    frontend.wait(lambda: again in frontend.seqs(), LONG, "the letter that was retried")
    bare.sh(f"serversync dlq retry {bare.sql(f'{letter} {dead}')}")
    frontend.wait(lambda: dead in frontend.seqs(), LONG, "the dead letter")
    until(lambda: bare.pending() == 0, LONG, "the outbox to be empty")
    assert bare.sql(states) == "RESOLVED RESOLVED"
    assert frontend.files[uploaded["call_log_id"]].count == 1


def test_a_changed_conffile_stops_an_upgrade_that_nobody_watches_unless_dpkg_was_told(
    machine: Box, frontend: Frontend, deb: Path, tmp_path: Path
) -> None:
    """Why the conffile's text is recorded in tests/test_debian.py."""
    edited = machine.read(ENV_FILE)
    machine.copy(newer(deb, tmp_path, 2, "# One more line.\n"), "/srv/package.deb")
    unattended = 'cd /srv; exec apt-get install -y "$@" ./package.deb <&-'

    stopped = machine.run("sh", "-c", unattended, "sh", check=False)

    assert stopped.returncode != 0 and "stdin at conffile prompt" in stopped.stdout, stopped.stdout
    delivers(machine, frontend)  # the old one goes on

    keep = ("-o", "Dpkg::Options::=--force-confdef", "-o", "Dpkg::Options::=--force-confold")
    machine.run("sh", "-c", unattended, "sh", *keep)

    assert machine.read(ENV_FILE) == edited
    assert machine.read(f"{ENV_FILE}.dpkg-dist").endswith("# One more line.\n")
    assert machine.running
    delivers(machine, frontend)


# What a person has, and a container has not.
SUDO = """#!/bin/sh
[ "$1" != -u ] || { user=$2; shift 2; exec runuser -u "$user" -- "$@"; }
exec "$@"
"""


def traces(machine: Box) -> list[str]:
    """Files that speak of serversync by their names."""
    return machine.sh("find / -xdev -name '*serversync*' 2>/dev/null || true").split()


def test_remove_keeps_the_configuration_and_purge_leaves_only_the_user(
    machine: Box, frontend: Frontend, deb: Path
) -> None:
    arrives(machine, frontend, machine.voicebot("call")[0])
    machine.put("/etc/serversync.token", "s3cret\n", 0o600)
    machine.put(DROP_IN, "[Service]\nNice=11\n")
    kept = machine.voicebot("call")[0]
    machine.sh("systemctl enable serversync-admin.socket")

    machine.run("systemctl", "stop", "serversync")
    machine.enqueue()
    said = machine.sh("apt-get remove -y serversync <&-")

    pending = machine.pending()
    assert pending and f"pending in sync_outbox, and stay there: {pending}" in said
    assert not machine.running
    assert "FRONTEND_BASE_URL" in machine.read(ENV_FILE)
    assert not machine.exists("/usr/share/serversync")
    assert machine.exists("/etc/serversync.token")
    machine.sh(f"mkdir -p {RECORDINGS}/.serversync-trash/of-a-kill")
    # What the backend's user may put in the place of a directory above one that setup was told.
    above = str(Path(ANNOUNCEMENTS).parent)
    trash = f"/srv/of-root/{Path(ANNOUNCEMENTS).name}/.serversync-trash"
    machine.sh(f"mkdir -p {trash}")
    machine.sh(f"mv {above} {above}-was; ln -s /srv/of-root {above}", user="voicebot")

    said = machine.sh("apt-get purge -y serversync <&-")

    # What the administrator wrote is left, too.
    assert sorted(traces(machine)) == [
        str(Path(DROP_IN).parent),
        f"{RECORDINGS}/.serversync-root",
        trash,
    ]
    machine.sh(f"rm {above}; mv {above}-was {above}; rm -r /srv/of-root")
    # The database knows the marker; without it a new installation would take the directory for
    # another one. All that is the backend's stays, a recording that did not arrive among it.
    if kept["call_log_id"] not in frontend.files:
        assert machine.exists(f"{kept['directory']}/mixed.wav")
    assert machine.sql("select count(*) > 0 from sync_outbox") == "t"
    assert machine.sh("getent passwd serversync")

    # The lines that it printed remove the rest.
    lines = re.findall(r"^    (sudo .*)$", said, re.M)
    assert f"sudo rm {RECORDINGS}/.serversync-root" in lines
    machine.put("/usr/bin/sudo", SUDO, 0o755)
    machine.sh("cd /\n" + "\n".join(line for line in lines if "setfacl" not in line))
    assert traces(machine) == [str(Path(DROP_IN).parent)]
    assert machine.read(DROP_IN) == "[Service]\nNice=11\n"
    for catalog in ("pg_roles.rol", "pg_namespace.nsp", "pg_class.rel", "pg_proc.pro"):
        table, _, column = catalog.partition(".")
        query = f"select count(*) from {table} where {column}name ~ 'serversync'"
        assert machine.sql(query) == "0", table

    said = machine.install(deb)

    assert "sudoedit /etc/serversync.env" in said, said
    assert not machine.running
    machine.set_up(frontend.url)
    until(lambda: machine.running, LONG, "the service")
    # Once more: what is there is not made.
    for line in SETUP[:2]:
        again = machine.run(*line.split()).stdout
        assert "there " in again and "made" not in again, again

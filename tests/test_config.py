"""The configuration: one table, all errors at once, no secrets, files read as systemd does."""

import ctypes
import functools
import glob
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import serversync
from agent import Agent, AgentFactory, NotifySocket, run_once
from chance import examples
from frontend import Reply, Request
from ledger import entity_of
from machine import in_mounts, needs_root
from pg import Database
from pi import Pi
from serversync import OPTIONS, Config, ConfigError, load_config, parse_env_file
from test_tls import Authority
from waiting import wait_until

REQUIRED = {
    "DATABASE_URL": "postgresql:///voicebot",
    "FRONTEND_BASE_URL": "https://voice.example.com",
}
KIB, MIB = 1024, 1024 * 1024
TOKEN = "Tk-4711.correct~horse+battery/staple="
PASSWORD = "s3cr3t-hunter2-Pa55"


Env = Mapping[str, str]
Done = subprocess.CompletedProcess[str]


def load(settings: dict[str, str]) -> Config:
    return load_config(REQUIRED | settings)


def problems(settings: dict[str, str]) -> list[str]:
    with pytest.raises(ConfigError) as error:
        load(settings)
    return error.value.problems


def run(*args: str, environ: Env = MappingProxyType({}), prefix: tuple[str, ...] = ()) -> Done:
    """The program with this environment alone, and no --env-file but the one in `args`."""
    return run_once(environ, args=args, env_file=False, prefix=prefix)


@pytest.fixture
def env_file(tmp_path: Path) -> Path:
    """A file that is good, so that /etc/serversync.env plays no part."""
    path = tmp_path / "serversync.env"
    path.write_text("".join(f"{key}={value}\n" for key, value in REQUIRED.items()))
    return path


# --- the option table -----------------------------------------------------------------------------

# What DESIGN.md's table says of each key: its default, values that are good and what they mean,
# and values that are refused.
ABSOLUTE = ["storage", "./x", "~/x", "C:\\x", "file:///x"]
NO_PATH = ["~/x", "~voicebot/x", "C:\\x", "file:///x"]
EXPECTED: dict[str, tuple[Any, list[tuple[str, Any]], list[str]]] = {
    "DATABASE_URL": (
        None,
        [
            ("postgresql:///voicebot", "postgresql:///voicebot"),
            ("postgres://u:p@h:5433/d?sslmode=require", "postgres://u:p@h:5433/d?sslmode=require"),
            ("host=/run/postgresql dbname=voicebot", "host=/run/postgresql dbname=voicebot"),
            ("dbname=d password=a://b/c@d", "dbname=d password=a://b/c@d"),
            ("postgresql://u:a%2Fb%40@h/d", "postgresql://u:a%2Fb%40@h/d"),
        ],
        [
            "voicebot",
            "http://localhost/voicebot",
            "postgresql:///x?nonsense=1",
            "mysql://h/d",
            # libpq takes these, and a piece of the password for the port, the host or the name.
            "postgresql://u:kX3/9fQa=@db/voicebot",
            "postgresql://u:secret@123@db/voicebot",
            "postgres://u:123?host=x@db/voicebot",
        ],
    ),
    "FRONTEND_BASE_URL": (
        None,
        [
            ("http://localhost:3000", "http://localhost:3000"),
            ("https://voice.example.com/", "https://voice.example.com"),
            ("https://voice.example.com/voice/box///", "https://voice.example.com/voice/box"),
            ("http://[2001:db8::7]:8080/", "http://[2001:db8::7]:8080"),
            (" https://voice.example.com ", "https://voice.example.com"),
            ("HTTPS://Voice.Example.COM", "HTTPS://Voice.Example.COM"),
            ("https://h/my-api", "https://h/my-api"),
            ("https://api/ingest", "https://api/ingest"),
        ],
        [
            "voice.example.com",
            "ftp://voice.example.com",
            "http://",
            "http:///api",
            "http://:80",
            "https://h:99999",
            "https://h:port",
            "https://h/?a=b",
            "https://h/#top",
            "https://h/a b",
            "https://h\n.example.com",
            "https://h\\x",
            "https://u:p@h",
            "https://u@h",
            "https://[::1",
            "7",
        ],
    ),
    "SYNC_POLL_INTERVAL_SEC": (300, [("0.5", 0.5)], ["0", "-1"]),
    "SYNC_BATCH_SIZE": (100, [("7", 7)], ["1.5", "ten"]),
    "SYNC_BATCH_BYTES": (
        512 * KIB,
        [("64 KiB", 64 * KIB), ("64KiB", 64 * KIB), ("1 MiB", MIB)],
        ["64 KB", "64K", "1.5 MiB", "1 GiB", "KiB"],
    ),
    "SYNC_ENTRY_MAX_BYTES": (
        8 * MIB,
        [("33 MiB", 32 * MIB), ("256 MiB", 32 * MIB)],  # an older version took more
        ["8388608.0", "257 MiB"],
    ),
    "SYNC_TIMEOUT_SEC": (30, [("1", 1), ("0.5", 0.5), ("600", 600)], ["0", "-1", "601", "30s"]),
    "SYNC_RETRY_MAX": (8, [("1", 1), ("1000", 1000)], ["0", "-1", "8.0", "1001"]),
    "SYNC_RETRY_HOURS": (24, [("0", 0), ("0.5", 0.5), ("48", 48)], ["-1", "1 day", "8761"]),
    "SYNC_RECORDINGS_DIR": (
        "/opt/virtual-voicebot/storage/recordings",
        [("/srv/a b/é", "/srv/a b/é"), ("/", "/")],
        NO_PATH,
    ),
    "SYNC_FILE_GRACE_SEC": (300, [("0", 0), ("1.5", 1.5)], ["-1", "86401", "five"]),
    "SYNC_DELETE_AFTER_SEC": (60, [("0", 0), ("86400", 86400)], ["-1", "86401", "now"]),
    "SYNC_EXTRA_FILES": (
        "keep",
        [("keep", "keep"), ("delete", "delete")],
        ["Keep", "remove", "yes", "keep,delete"],
    ),
    "SYNC_UPLOAD_KBPS": (0, [("0", 0), ("512", 512), ("1.5", 1.5)], ["-1", "512k", "1e99"]),
    "SYNC_VERIFY_PATH": (
        "/api/recordings/{callLogId}",
        [
            ("/api/recordings/{callLogId}", "/api/recordings/{callLogId}"),
            ("/r/{recordingId}/audio.wav", "/r/{recordingId}/audio.wav"),
        ],
        ["api/recordings", "http://h/api", "/api/{other}", "/api/{}", "/a?b=c", "/a\nb", "/é"],
    ),
    "SYNC_RETENTION_DAYS": (30, [("0", 0), ("0.5", 0.5), ("365", 365)], ["-1", "36501", "30d"]),
    "SYNC_RETENTION_KEEP": (
        "",
        [("order", ["order"]), ("order, payment call_log", ["order", "payment", "call_log"])],
        ["order;payment", ",order", "*"],
    ),
    "SYNC_TOKEN_FILE": ("", [], ABSOLUTE),
    "SYNC_TOKEN": ("", [(TOKEN, TOKEN), (f" {TOKEN} ", TOKEN)], ["a b", "a\tb", "a\nb", "tökèn"]),
    "SYNC_ADMIN_TOKEN_FILE": ("", [("/etc/token", "/etc/token")], ABSOLUTE),
    "SYNC_CA_FILE": ("", [], ABSOLUTE),
    "SYNC_CLIENT_CERT": ("", [], ABSOLUTE),
    "SYNC_CLIENT_KEY": ("", [], ABSOLUTE),
    "SYNC_DEVICE_ID": (
        "",
        [("pi-7.office_2:a", "pi-7.office_2:a"), ("x" * 64, "x" * 64)],
        ["x" * 65, "a b", "a/b", "é", "a\r\nX: y"],
    ),
    "SYNC_LOG_LEVEL": (
        "info",
        [(level, level) for level in ("debug", "info", "warning", "error")],
        ["INFO", "verbose", "10", "critical"],
    ),
    "FRONTEND_SYNC_INTERVAL_SEC": (60, [("0", 0), ("3600", 3600)], ["-1", "off", "86401"]),
    "SYNC_LOCAL_NUMBERS": ("keep", [("replace", "replace")], ["delete", "KEEP", "1"]),
    "SYNC_ROUTE_<TYPE>": ("", [], []),  # see test_routes.py
    "SYNC_ROUTE_<TYPE>_TOKEN_FILE": ("", [], []),
    "NOTIFICATION_QUEUE_FILE": ("", [("/srv/p.jsonl", "/srv/p.jsonl")], NO_PATH),
    "SYNC_NOTIFY_MAX_AGE_SEC": (120, [("1", 1), ("86400", 86400)], ["0", "-1", "86401", "2 min"]),
    "ANNOUNCEMENT_AUDIO_DIR": (
        "/opt/virtual-voicebot/data/announcements",
        [("/srv/a", "/srv/a")],
        NO_PATH,
    ),
}
FIELDS = {name: option.name for name, option in OPTIONS.items()}
# None of these is a number in any notation that the table knows; white space means "not set".
NO_NUMBERS = ["nan", "inf", "-inf", "1_0", "１２", "0x1f", "1e3", "1,5", "+5", "--", "none"]
GOOD = [(key, text, value) for key, row in EXPECTED.items() for text, value in row[1]]
BAD = [(key, text) for key, row in EXPECTED.items() for text in row[2] if text]
NUMBERS = [key for key, row in EXPECTED.items() if isinstance(row[0], int)]


def short(value: object) -> str:
    return ascii(value)[:40]


def test_the_option_table_has_the_keys_of_the_design() -> None:
    assert set(OPTIONS) == set(EXPECTED)


def test_the_defaults_are_those_of_the_design() -> None:
    config = load({})
    defaults = {key: row[0] for key, row in EXPECTED.items() if row[0] is not None}
    shown = {key: getattr(config, FIELDS[key]) for key in defaults}
    assert shown | {"SYNC_DEVICE_ID": ""} == defaults
    assert {FIELDS[key]: getattr(config, FIELDS[key]) for key in REQUIRED} == {
        FIELDS[key]: value for key, value in REQUIRED.items()
    }


@pytest.mark.parametrize(("key", "text", "value"), GOOD, ids=short)
def test_a_good_value_is_taken(key: str, text: str, value: object) -> None:
    assert getattr(load({key: text}), FIELDS[key]) == value


@pytest.mark.parametrize(("key", "text"), BAD, ids=short)
def test_a_bad_value_is_refused_by_name_with_what_is_allowed(key: str, text: str) -> None:
    (problem,) = problems({key: text})
    if key == "SYNC_TOKEN":
        assert "token must be" in problem
    else:
        assert problem.startswith(f"{key} must ")


@pytest.mark.parametrize("key", NUMBERS)
@pytest.mark.parametrize("text", NO_NUMBERS)
def test_what_is_no_plain_number_is_refused(key: str, text: str) -> None:
    (problem,) = problems({key: text})
    assert problem.startswith(f"{key} must be a ")


@pytest.mark.parametrize("key", NUMBERS)
def test_the_bounds_that_a_refusal_names_are_the_bounds(key: str) -> None:
    (problem,) = problems({key: "x"})
    named = re.search(r" from ([0-9.]+)( KiB)? to ([0-9.]+)( MiB)?", problem)
    assert named, problem
    unit_low, unit_high = KIB if named[2] else 1, MIB if named[4] else 1
    low, high = float(named[1]) * unit_low, float(named[3]) * unit_high
    for bound in (low, high):
        config = load({key: f"{bound:.12g}"})
        assert getattr(config, FIELDS[key]) == bound
    if key != "SYNC_ENTRY_MAX_BYTES":  # cut, up to the maximum of an older version
        assert problems({key: f"{high + 1:.12g}"})[0].startswith(f"{key} must ")
    if low >= 1:
        assert problems({key: f"{low - 1:.12g}"})[0].startswith(f"{key} must ")
    elif low > 0:
        assert problems({key: f"{low / 2:.12g}"})[0].startswith(f"{key} must ")


@pytest.mark.parametrize("key", sorted(REQUIRED))
def test_a_required_key_that_is_missing_is_named_with_what_it_is(key: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config({k: v for k, v in REQUIRED.items() if k != key})
    (problem,) = error.value.problems
    assert problem.startswith(f"{key} is required: ")
    assert "URL" in problem


def test_an_unknown_key_is_refused_with_a_suggestion() -> None:
    for unknown, meant in (
        ("SYNC_BATCHSIZE", "SYNC_BATCH_SIZE"),
        ("SYNC_POLL_INTERVAL", "SYNC_POLL_INTERVAL_SEC"),
        ("SYNC_RECORDING_DIR", "SYNC_RECORDINGS_DIR"),
    ):
        assert problems({unknown: PASSWORD}) == [f"{unknown} is unknown: did you mean {meant}?"]
    (problem,) = problems({"SYNC_XYZZY_QUUX_PLUGH": "1"})
    assert "SYNC_XYZZY_QUUX_PLUGH is unknown" in problem and "--help" in problem


def test_a_parameter_of_another_library_in_the_database_s_url_is_named() -> None:
    (problem,) = problems({"DATABASE_URL": "postgresql://h/d?statement-cache-capacity=50"})
    assert problem.endswith("; libpq has no parameter statement-cache-capacity")


@pytest.mark.parametrize("url", ["postgresql://u:p@a?hunter=2@h/d", "postgresql:///d?hunter=@"])
def test_what_may_be_a_piece_of_a_password_is_not_named(url: str) -> None:
    (problem,) = problems({"DATABASE_URL": url})
    assert "hunter" not in problem and "%40" in problem


@pytest.mark.parametrize(
    "end", ["/api", "/api/", "/api/ingest", "//api/ingest/", "/api/ingest/sync/"]
)
@pytest.mark.parametrize("right", ["https://voice.example.com", "http://[::1]:3000/voice/box"])
def test_a_base_url_that_ends_in_api_is_an_error_with_the_right_one(right: str, end: str) -> None:
    found = problems({"FRONTEND_BASE_URL": right + end})
    assert found == [f"FRONTEND_BASE_URL must be without /api…: {right}"]


def test_a_name_of_the_first_edition_works_and_the_author_s_own_wins(env_file: Path) -> None:
    first, his = {"SYNC_ANNOUNCEMENTS_DIR": "/srv/a"}, {"ANNOUNCEMENT_AUDIO_DIR": "/srv/b"}
    for named, found in ((first, "/srv/a"), (his, "/srv/b"), (his | first, "/srv/b")):
        read = serversync.read_env_file(str(env_file), named)
        assert load_config(read).announcement_audio_dir == found


def test_relative_paths_are_meant_from_the_working_directory(tmp_path: Path) -> None:
    """In a backend's own directory the defaults are its directories."""
    given = {"SYNC_RECORDINGS_DIR": "./rec", "ANNOUNCEMENT_AUDIO_DIR": "data/announcements"}
    config = load_config(REQUIRED | given, lambda: str(tmp_path))
    assert Path(config.recordings_dir) == tmp_path / "rec"
    assert config.announcement_audio_dir == f"{tmp_path}/data/announcements"
    (tmp_path / "storage" / "recordings").mkdir(parents=True)
    config = load_config(REQUIRED, lambda: str(tmp_path))
    assert config.recordings_dir == f"{tmp_path}/storage/recordings"
    assert config.announcement_audio_dir == "/opt/virtual-voicebot/data/announcements"


def test_what_is_only_the_author_s_own_is_said_at_the_start_and_by_doctor(
    agent: AgentFactory, env_file: Path
) -> None:
    env_file.write_text("LOG_LEVEL=debug\nRUST_LOG=info\nLOG_DIR=\nVOICEBOT_PORT=5060\n")
    his = {k: v for k, v in agent.env().items() if not k.startswith("SYNC_LOG")}
    with env_file.open("a") as file:
        file.write("".join(f"{key}={value}\n" for key, value in his.items()))
    running = agent(args=("--env-file", str(env_file), "run"))
    assert "LOG_LEVEL, RUST_LOG: not used by" in running.wait_log("not used")
    shown = run("doctor", "--env-file", str(env_file)).stdout
    assert "not used by serversync: LOG_LEVEL, RUST_LOG (" in shown
    assert "LOG_DIR" not in running.log()
    assert "VOICEBOT_PORT" not in running.log() + shown


def test_a_foreign_variable_is_none_of_our_business(env_file: Path) -> None:
    """Nor is a name that only looks like ours; an empty value is none."""
    foreign = {"PGPASSWORD": "x", "LANG": "C", "VOICEBOT_SYNC_X": "1", "SYNCTHING_HOME": "/x"}
    foreign |= {"FRONTEND_OTHER": "1", "SYNC_LOG_LEVEL": ""}
    assert load(foreign)
    config = load_config(serversync.read_env_file(str(env_file), foreign))
    assert config.log_level == "info"


def test_the_device_id_is_derived_and_stable_and_not_the_machine_id() -> None:
    device = load({}).device_id
    assert re.fullmatch(r"[0-9a-f]{16}", device)
    assert device == load({}).device_id
    machine_id = Path("/etc/machine-id")
    if machine_id.exists() and machine_id.read_text().strip():
        assert device not in machine_id.read_text()


# --- all problems at once, from the program itself ------------------------------------------------


def test_every_key_that_is_wrong_is_told_at_once_each_on_a_line_and_the_code_is_78() -> None:
    wrong = {key: bad[0] for key, (_, _, bad) in EXPECTED.items() if bad and key != "SYNC_TOKEN"}
    wrong |= {"SYNC_BATCHSIZE": "5", "SYNC_NONSENSE_AT_ALL": "5"}
    done = run("once", environ=wrong)
    assert (done.returncode, done.stdout) == (78, "")
    lines = done.stderr.splitlines()
    assert len(lines) == len(wrong)
    for key in wrong:
        (line,) = (line for line in lines if line.startswith(f"serversync: {key} "))
        assert re.search(r"must |is unknown: ", line)


def test_a_service_that_is_not_configured_says_so_in_its_status(
    notify: NotifySocket, tmp_path: Path
) -> None:
    (tmp_path / "empty").touch()
    environ = {"NOTIFY_SOCKET": str(notify.path)}
    done = run("run", "--env-file", str(tmp_path / "empty"), environ=environ)
    assert done.returncode == 78
    notify.wait_for("STATUS=not configured: DATABASE_URL is required")
    assert "(and 1 more)" in notify.status
    assert not any("READY=1" in message for _, message in notify.messages)


# --- the command line -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "args",
    [(), ("ones",), ("once", "twice"), ("once", "--env-file")],
    ids=" ".join,
)
def test_a_usage_error_is_told_and_exits_with_2(args: tuple[str, ...]) -> None:
    done = run(*args, environ=REQUIRED)
    assert (done.returncode, done.stdout) == (2, "")
    assert "usage: serversync" in done.stderr


# --- the env file ---------------------------------------------------------------------------------

# As systemd.exec(5) describes EnvironmentFile=.
ENV_FILES: list[tuple[str, dict[str, str]]] = [
    ("", {}),
    ("A=1\nB=2\n", {"A": "1", "B": "2"}),
    ("A=1\nA=2\n", {"A": "2"}),
    ("  A = 1  \n", {"A": "1"}),
    ("A=1\r\nB=2\r\n", {"A": "1", "B": "2"}),
    ("# A=1\n; B=2\n  # C=3\nD=4\n", {"D": "4"}),
    ("A=1 # no comment\n", {"A": "1 # no comment"}),
    ('A=it\'s "here"\n', {"A": 'it\'s "here"'}),
    ("A='  one  '  \n", {"A": "  one  "}),
    ("A='a\\nb\\\\'\n", {"A": "a\\nb\\\\"}),
    ('A="a\\nb"\n', {"A": "a\\nb"}),
    ('A="\\"\\\\\\`\\$"\n', {"A": '"\\`$'}),
    ("A=\\a\\\\\\ b\n", {"A": "a\\ b"}),
    ("A=one\\\ntwo\n", {"A": "onetwo"}),
    ('A="one\\\ntwo"\n', {"A": "onetwo"}),
    ("A='one\\\ntwo'\n", {"A": "one\\\ntwo"}),
    ("A='one\ntwo'\nB=3\n", {"A": "one\ntwo", "B": "3"}),
    ("A='#x'\n#B=2\nC=3", {"A": "#x", "C": "3"}),
    ("A='a' \"b\" c\n", {"A": "abc"}),
    ("A=x\\ \n", {"A": "x "}),
    ("A=$HOME${B}%h\n", {"A": "$HOME${B}%h"}),
    ("A=日本語\n", {"A": "日本語"}),
    ("# the last one\\\nA=1\n", {"A": "1"}),
]


@pytest.mark.parametrize(("text", "found"), ENV_FILES, ids=short)
def test_the_env_file_is_read_as_systemd_documents_it(text: str, found: dict[str, str]) -> None:
    assert parse_env_file(text) == found


@functools.cache
def systemd_library() -> Any:
    """systemd's own shared library: load_env_file is what reads an EnvironmentFile=."""
    found = glob.glob("/usr/lib/*/systemd/libsystemd-shared-*.so")
    if not found:
        pytest.skip("no libsystemd-shared")
    library = ctypes.CDLL(found[0])
    if not hasattr(library, "load_env_file"):
        pytest.skip("libsystemd-shared without load_env_file")
    library.load_env_file.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    return library


def read_by_systemd(library: Any, text: str) -> dict[str, str]:
    lines = ctypes.POINTER(ctypes.c_char_p)()
    with open(os.memfd_create("env"), "wb") as file:
        file.write(text.encode())
        file.flush()
        path = f"/proc/self/fd/{file.fileno()}"
        code = library.load_env_file(None, path.encode(), ctypes.byref(lines))
    assert code >= 0, os.strerror(-code)
    found = {}
    for i in range(1000):
        if not lines or lines[i] is None:
            break
        key, _, value = (lines[i] or b"").decode().partition("=")
        found[key] = value
    return found


BLANKS = st.sampled_from(["", "", " ", "\t", "  "])
SINGLE = st.text(st.sampled_from('ab \t"\\$`#;=\n'), max_size=6).map(lambda text: f"'{text}'")
DOUBLE = st.lists(
    st.sampled_from(
        ["a", " ", "'", "#", "\n", "=", "\\n", "\\\\", '\\"', "\\$", "$", "\\`", "\\\n", "\\ "]
    ),
    max_size=6,
).map(lambda pieces: '"' + "".join(pieces) + '"')
BARE = st.lists(
    st.sampled_from(["a", "b", " ", "\t", "'", '"', "#", ";", "=", "$", "\\\\", "\\ ", "\\\n"]),
    max_size=8,
).map("".join)
LINES = st.tuples(
    BLANKS,
    st.sampled_from(["A", "B_2", "SYNC_TOKEN"]),
    BLANKS.map(lambda blank: f"{blank}="),
    st.lists(st.tuples(BLANKS, SINGLE | DOUBLE).map("".join), max_size=2).map("".join),
    # What follows must not open a quote that nobody closes.
    BARE.filter(lambda text: text.lstrip(" \t")[:1] not in ("'", '"')),
    st.sampled_from(["\n", "\n", "\r\n", "\n\n", "\n# a comment\n", "\n  ; 'another\n"]),
).map("".join)


@settings(max_examples=examples(300))
@given(st.lists(LINES, max_size=4).map("".join))
def test_the_env_file_is_read_as_systemd_itself_reads_it(text: str) -> None:
    assert parse_env_file(text) == read_by_systemd(systemd_library(), text)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("DATABASE_URL\n", 1),
        ("A=1\n\nexport B=2\n", 3),
        ("A=1\n# x\n- B=2\n", 3),
        ("A='x\ny'\nnonsense\n", 3),
        ("1A=2\n", 1),
        ("=2\n", 1),
        ("A='never closed\nB=2\n", 1),
        ('A=1\nB="never closed\n', 2),
    ],
    ids=short,
)
def test_a_line_that_makes_no_sense_is_told_by_its_number(text: str, line: int) -> None:
    with pytest.raises(ConfigError) as error:
        parse_env_file(text)
    assert f"line {line}" in error.value.problems[0]


@given(st.text(max_size=80))
def test_any_text_is_an_env_file_or_a_configuration_error(text: str) -> None:
    try:
        found = parse_env_file(text)
    except ConfigError as error:
        assert error.problems
        return
    for key, value in found.items():
        assert re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", key)
        assert "\0" not in value


def test_a_variable_in_the_environment_wins_over_the_file(env_file: Path) -> None:
    env_file.write_text("SYNC_BATCH_SIZE=file\nSYNC_RETRY_MAX=file\n")
    settings = serversync.read_env_file(
        str(env_file), {"SYNC_BATCH_SIZE": "7", "SYNC_LOG_LEVEL": "", "PATH": "/bin"}
    )
    assert settings == {"SYNC_BATCH_SIZE": "7", "SYNC_RETRY_MAX": "file"}


def test_an_env_file_that_may_not_be_read_is_an_error_with_a_hint(env_file: Path) -> None:
    env_file.chmod(0)
    # Without the capabilities with which root reads everything.
    weaker = ("setpriv", "--bounding-set", "-dac_override,-dac_read_search")
    done = run("once", "--env-file", str(env_file), prefix=weaker if os.geteuid() == 0 else ())
    assert done.returncode == 78
    assert f"cannot read {env_file} (Permission denied)" in done.stderr
    assert "sudo" in done.stderr


# What may be there instead of a configuration, and what is said of it, in a line each.
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"nonsense one\nA=1\nnonsense two\n", ["{file}.*line 1 ", "{file}.*line 3 "]),
        (b"SYNC_DEVICE_ID=\xff\xfe\n", ["{file}"]),  # no UTF-8
        (b"SYNC_TOKEN_FILE=/a\0b\n", ["{file}"]),
        (None, [r"cannot read {file} \(No such file or directory\)$"]),
        (Path("/"), [r"cannot read / \(Is a directory\)$"]),
    ],
    ids=short,
)
def test_what_is_wrong_with_an_env_file_is_told_in_a_line_each(
    env_file: Path, content: bytes | Path | None, words: list[str]
) -> None:
    if isinstance(content, bytes):
        env_file.write_bytes(content)
    else:
        env_file.unlink()
    done = run("run", "--env-file", str(content if isinstance(content, Path) else env_file))
    assert done.returncode == 78
    lines = done.stderr.splitlines()
    assert len(lines) == len(words)
    for line, word in zip(lines, words, strict=True):
        assert re.search(word.format(file=re.escape(str(env_file))), line)


# --- the token ------------------------------------------------------------------------------------


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token-file"
    path.write_text("from-file\n")
    return path


def test_the_file_wins_where_it_is_not_empty_and_then_the_variable(token_file: Path) -> None:
    variable = {"SYNC_TOKEN": "from-variable"}
    both = variable | {"SYNC_TOKEN_FILE": str(token_file)}
    assert load({}).token == ""
    assert load(variable).token == "from-variable"
    assert load(both).token == "from-file"
    token_file.write_text(" \n\n")
    assert load(both).token == "from-variable"


@pytest.mark.parametrize(
    "bad", [b"one\ntwo", b"one two", b"a\x00b", b"a\r\nX-Evil: 1", b"\x1b[1m", "tökèn".encode()]
)
def test_a_token_that_is_not_one_visible_line_is_refused_and_not_shown(
    token_file: Path, bad: bytes
) -> None:
    token_file.write_bytes(bad)
    (problem,) = problems({"SYNC_TOKEN_FILE": str(token_file)})
    assert "token" in problem.lower()
    assert bad.decode() not in problem


@needs_root
def test_the_usual_token_file_counts_for_the_service_and_for_a_typed_command_alike(
    pi: Pi, tmp_path: Path
) -> None:
    """A reload reads it anew, also where there was none."""
    etc = tmp_path / "etc"
    shutil.copytree("/etc", etc, symlinks=True)
    path, prefix = etc / "serversync.token", in_mounts(f"mount --bind {etc} /etc")
    pi.frontend.require_token = "first"
    running = pi.agent(prefix=prefix)
    for token in ("first", "second"):
        pi.frontend.require_token = token
        seq = pi.backend.enqueue()
        running.wait_log(f"entry {seq} (schedule) is retried")
        path.write_text(f"{token}\n")
        path.chmod(0o600)
        running.hup()
        wait_until(lambda: pi.db.pending() == [], what="its delivery", state=running.log)
    running.stop()
    seq = pi.backend.enqueue()
    assert run_once(pi.agent.env(), prefix=prefix).returncode == 0
    assert seq in pi.frontend.seqs()
    # A key names another one, which must be there.
    missing = run_once(pi.agent.env(SYNC_TOKEN_FILE=etc / "missing"), prefix=prefix)
    assert missing.returncode == 78
    assert re.search(r"SYNC_TOKEN_FILE.*etc/missing \(No such file", missing.stderr)


# --- TLS ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two certificates with their keys, and one key with a pass phrase."""
    where = tmp_path_factory.mktemp("tls") / "ours"
    ours = Authority(where, "our CA")
    one, _ = ours.issue("one"), ours.issue("two")
    locked = ("-aes128", "-passout", f"pass:{PASSWORD}", "-out", where / "locked.key")
    subprocess.run(["openssl", "ec", "-in", one.key, *locked], check=True, capture_output=True)
    (where / "nonsense.pem").write_text("this is no PEM file\n")
    (where / "both.pem").write_text(one.cert.read_text() + one.key.read_text())
    return where


@pytest.mark.parametrize(
    ("ca", "cert", "key", "good"),
    [
        ("one.pem", "", "", True),
        ("", "one.pem", "one.key", True),
        ("two.pem", "both.pem", "", True),
        ("missing.pem", "", "", False),
        ("nonsense.pem", "", "", False),
        ("", "missing.pem", "one.key", False),
        ("", "one.pem", "two.key", False),
        ("", "one.pem", "missing.key", False),
        ("", "one.pem", "", False),
        ("", "", "one.key", False),
    ],
)
def test_tls_files_that_cannot_be_used_are_told(
    tls: Path, ca: str, cert: str, key: str, good: bool
) -> None:
    files = {"SYNC_CA_FILE": ca, "SYNC_CLIENT_CERT": cert, "SYNC_CLIENT_KEY": key}
    settings = {name: str(tls / file) for name, file in files.items() if file}
    if good:
        assert load(settings)
    else:
        assert any("cannot be used" in problem for problem in problems(settings))


def test_a_key_with_a_pass_phrase_is_told_and_nobody_is_asked_for_it(
    tls: Path, env_file: Path
) -> None:
    locked = {"SYNC_CLIENT_CERT": f"{tls}/one.pem", "SYNC_CLIENT_KEY": f"{tls}/locked.key"}
    done = run("once", "--env-file", str(env_file), environ=locked)
    assert (done.returncode, done.stdout) == (78, "")
    assert "SYNC_CLIENT_KEY" in done.stderr
    assert "Enter PEM pass phrase" not in done.stderr


# --- secrets --------------------------------------------------------------------------------------


WRONG_SECRETS: list[dict[str, str]] = [
    {
        "SYNC_TOKEN": f"{TOKEN} {TOKEN}",
        "SYNC_ADMIN_TOKEN_FILE": TOKEN,
        "SYNC_TOKENFILE": TOKEN,
        "SYNC_BATCH_SIZE": f"Bearer {TOKEN}",
        "DATABASE_URL": f"postgresql://u:{PASSWORD}@h/d?nonsense=1",
        "FRONTEND_BASE_URL": f"https://u:{PASSWORD}@h",
        "SYNC_CA_FILE": f"-----BEGIN PRIVATE KEY-----\n{TOKEN}\n-----END PRIVATE KEY-----",
    },
    {
        "SYNC_TOKEN_FILE": TOKEN,
        "DATABASE_URL": f"host=h password='{PASSWORD} {PASSWORD}' nonsense=1",
        "FRONTEND_BASE_URL": f"https://u:{PASSWORD}/{PASSWORD}@h",
    },
    {"FRONTEND_BASE_URL": f"https://{TOKEN}@h"},
    {"FRONTEND_BASE_URL": f"https://h/?token={TOKEN}"},
]
WRONG_FILES: list[tuple[str, list[str]]] = [
    *(("".join(f'{key}="{value}"\n' for key, value in (REQUIRED | wrong).items()), [*wrong])
      for wrong in WRONG_SECRETS),
    (f"SYNC_TOKEN {TOKEN}\nSYNC_TOKEN: {TOKEN}\n{TOKEN}\nexport SYNC_TOKEN={TOKEN}\n"
     f"SYNC_TOKEN=\n{TOKEN}\npostgresql://u:{PASSWORD}@h/d\n", ["line "] * 6),
    (f"SYNC_TOKEN='{TOKEN}\n", ["line 1"]),
    (f'SYNC_TOKEN="{TOKEN}\nDATABASE_URL=x\n', ["line 1"]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "told"), WRONG_FILES, ids=short)
def test_no_secret_is_in_the_list_of_what_is_wrong(
    text: str, told: list[str], notify: NotifySocket, env_file: Path
) -> None:
    env_file.write_text(text)
    environ = {"NOTIFY_SOCKET": str(notify.path), "SYNC_LOG_LEVEL": "debug"}
    done = run("once", "--env-file", str(env_file), environ=environ)
    assert done.returncode == 78 and len(done.stderr.splitlines()) == len(told)
    for words in told:
        assert words.removeprefix("SYNC_").lower() in done.stderr.lower()
    notify.wait_for("STATUS=not configured")
    for shown in (done.stderr, done.stdout, notify.status):
        assert PASSWORD not in shown
        assert TOKEN.rstrip("=") not in shown


def mirror(request: Request) -> Reply:
    """A frontend that shows what it got: in the worst case, the token comes back in the body."""
    text = f"token {TOKEN} header {request.headers['Authorization']} and {PASSWORD}"
    return Reply(400, body={"error": text, "headers": dict(request.headers.items())})


def everything_stored(db: Database) -> str:
    tables = db.rows(
        "select format('%I.%I', schemaname, tablename) from pg_tables"
        " where schemaname = 'serversync'"
    )
    return "\n".join(
        str(row) for (table,) in tables for row in db.rows(f"select t::text from {table} as t")
    )


def test_neither_token_nor_password_is_in_any_output_column_or_status(
    pi: Pi, notify: NotifySocket, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text(TOKEN)
    url = pi.db.url.replace("@", f":{PASSWORD}@", 1)
    rejected = entity_of(pi.db, pi.backend.enqueue("schedule", {"n": 1}))
    # An outage, whose reason is shown in many places; wherever it is cut, a token is cut there.
    answers = iter([Reply(500, body=f"{TOKEN} " * 200), Reply(502, body=f"{PASSWORD}," * 200)])

    def answer(request: Request) -> Reply | None:
        if reply := next(answers, None):
            return reply
        named = [entry["entityId"] for entry in request.entries]
        return mirror(request) if rejected in named else None

    pi.frontend.on_entries, pi.frontend.on_file = answer, mirror
    pi.backend.end_call(events=0)
    running: Agent = pi.agent(
        notify=notify,
        DATABASE_URL=url,
        SYNC_TOKEN_FILE=tmp_path / "token",
        SYNC_LOG_LEVEL="debug",
    )
    wait_until(
        lambda: len(running.lines("given up")) >= 2, what="two dead letters", state=running.log
    )
    # The same while the database refuses the connection, and after a reload.
    running.update_env(pi.agent.env(DATABASE_URL=url + "_missing", SYNC_TOKEN=TOKEN))
    running.hup()
    running.wait_log("_missing")
    running.stop()
    assert pi.frontend.requests[0].headers["Authorization"] == f"Bearer {TOKEN}"
    shown = {
        "the log": running.log(),
        "the status": "\n".join(text for _, text in notify.messages),
        "the schema": everything_stored(pi.db),
        "the state file": "".join(
            path.read_text() for path in running.runtime_dir.iterdir() if path.is_file()
        ),
    }
    assert "400" in shown["the schema"]
    for where, text in shown.items():
        assert TOKEN[:8] not in text, where
        assert PASSWORD[:8] not in text, where

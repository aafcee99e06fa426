"""What README.md, the sample configuration and --help say is what the program does."""

import ast
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import serversync
from agent import REPOSITORY, AgentFactory, agent_env, run_once
from backend import Backend
from frontend import Frontend, Reply
from pg import Cluster, Database

README = (REPOSITORY / "README.md").read_text()
CHANGELOG = (REPOSITORY / "CHANGELOG.md").read_text()
SAMPLE = REPOSITORY / "etc" / "serversync.env"
LEAST_ROLE = "serversync"
DEAD_SEQ = 17


def section(title: str) -> str:
    """The text under a heading of the second level."""
    found = re.search(rf"^## {re.escape(title)}$(.*?)(?=^## |\Z)", README, re.M | re.S)
    assert found, f"README has no section {title!r}"
    return found[1]


def table_rows(text: str, first: str) -> list[list[str]]:
    """The cells of the table whose first heading is `first`."""
    lines = iter(text.splitlines())
    for line in lines:
        if line.startswith(f"| {first} |"):
            break
    else:
        raise AssertionError(f"no table {first!r}")
    next(lines)  # |---|---|
    rows = []
    for line in lines:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def quoted(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def sql_blocks(text: str) -> list[str]:
    return re.findall(r"^```sql\n(.*?)^```$", text, re.M | re.S)


def sql_statements(block: str) -> list[str]:
    plain = re.sub(r"--.*", "", block)
    return [statement.strip() for statement in plain.split(";\n") if statement.strip()]


@cache
def program() -> ast.Module:
    return ast.parse(Path(serversync.__file__).read_text())


@cache
def program_texts() -> list[str]:
    """Every text in the program; of an f-string, the pieces between its values."""
    return [
        node.value
        for node in ast.walk(program())
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]


def is_said(words: str) -> bool:
    """Whether each piece of a message (`…` stands for what varies) is a text of the program."""
    pieces = [piece.strip(" :") for piece in words.split("…") if len(piece.strip(" :")) > 2]
    return bool(pieces) and all(any(piece in text for text in program_texts()) for piece in pieces)


def calls_of_say() -> Iterator[tuple[ast.expr, list[ast.keyword]]]:
    """The event and the fields of every message."""
    for node in ast.walk(program()):
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Name) and node.func.id == "say":
            yield node.args[1], node.keywords
        elif isinstance(node.func, ast.Attribute) and node.func.attr == "say":
            yield node.args[3], node.keywords


def texts_in(expression: ast.expr) -> set[str]:
    return {
        node.value
        for node in ast.walk(expression)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


# --- configuration ------------------------------------------------------------------------------


def option_rows() -> list[str]:
    rows = []
    for option in serversync.OPTIONS:
        name, default, text = (option.metadata[key] for key in ("name", "default", "text"))
        shown = "required" if default is None else f"`{default}`" if default else "not set"
        rows.append(f"| `{name}` | {shown} | {text} |")
    return rows


def test_the_configuration_table_is_the_option_table() -> None:
    shown = [f"| {' | '.join(row)} |" for row in table_rows(section("Configuration"), "Key")]

    assert shown == option_rows()


def test_help_tells_every_option_with_its_default_and_every_exit_code() -> None:
    done = run_once({}, args=("--help",))

    assert done.returncode == 0
    lines = done.stdout.splitlines()
    for option in serversync.OPTIONS:
        name, default, text = (option.metadata[key] for key in ("name", "default", "text"))
        shown = "required" if default is None else default or "not set"
        wanted = re.compile(rf" +{name} +{re.escape(text)} \[{re.escape(shown)}\]")
        assert any(wanted.fullmatch(line) for line in lines), f"{name} is not in --help"
    codes = done.stdout.partition("exit codes:")[2]
    assert {int(code) for code in re.findall(r"\b(\d+) ", codes)} == EXIT_CODES


def sample_settings() -> dict[str, str]:
    """The sample as it would be with every key that it shows switched on."""
    text = re.sub(r"^#([A-Z_]+=)", r"\1", SAMPLE.read_text(), flags=re.M)
    return serversync.parse_env_file(text)


def test_the_sample_shows_keys_that_exist_at_their_defaults() -> None:
    rows = [option.metadata for option in serversync.OPTIONS]
    defaults = {row["name"]: row["default"] for row in rows}
    shown = sample_settings()

    required = {name for name, default in defaults.items() if default is None}
    assert required <= set(shown)
    for name, value in shown.items():
        assert name in defaults, f"{name} is no option"
        if name not in required:
            assert value == defaults[name], f"{name} is not shown at its default"
    settings = {name: value for name, value in shown.items() if value}
    assert serversync.load_config(settings, {}).retry_max == 8


def test_an_unedited_sample_ends_with_exit_code_78_and_names_what_is_required() -> None:
    done = run_once({}, args=("once", "--env-file", str(SAMPLE)))

    assert done.returncode == serversync.EX_CONFIG
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("serversync: DATABASE_URL is required: ")
    assert lines[1].startswith("serversync: FRONTEND_BASE_URL is required: ")
    for line in lines:
        assert line in README, "README shows another message"


# --- commands and exit codes --------------------------------------------------------------------

EXIT_CODES = {value for name, value in vars(serversync).items() if name.startswith("EX_")}


def test_every_exit_code_is_documented_in_the_order_in_which_they_apply() -> None:
    rows = table_rows(section("Commands and exit codes"), "Exit code")
    shown = [int(row[0]) for row in rows]

    assert len(EXIT_CODES) == 6
    assert set(shown) == EXIT_CODES
    in_docstring = re.findall(r"^ {2,3}(\d+)  ", serversync.__doc__ or "", re.M)
    assert shown == [int(code) for code in in_docstring]


def test_every_command_and_option_is_documented_and_no_other() -> None:
    parser = serversync.build_parser()
    text = section("Commands and exit codes")
    commands = {row[0].strip("`").split()[1] for row in table_rows(text, "Command")}
    options = {row[0].strip("`").split()[0] for row in table_rows(text, "Option")}

    usage = run_once({}, args=("--help",)).stdout
    there = set(re.findall(r"^    (\w+)  ", usage.partition("options:")[0], re.M))
    assert commands == there
    assert options == {
        option
        for action in parser._actions
        for option in action.option_strings
        if option.startswith("--")
    }
    not_yet = set(quoted(README.partition("Not yet in this version")[2].partition("##")[0]))
    assert not_yet
    assert not not_yet & there


# --- what happens when… -------------------------------------------------------------------------


def situations() -> list[Any]:
    rows = table_rows(section("What happens when…"), "What happens")
    return [pytest.param(row, id=row[0][:40]) for row in rows]


@cache
def test_names() -> set[str]:
    """`tests/<file>::<function>` of every test there is."""
    return {
        f"{path.relative_to(REPOSITORY)}::{node.name}"
        for path in (REPOSITORY / "tests").rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


test_names.__test__ = False  # type: ignore[attr-defined]  # no test, only called like one


@pytest.mark.parametrize("row", situations())
def test_a_situation_of_the_readme_has_its_test_and_quotes_the_program(row: list[str]) -> None:
    assert len(row) == 4, "a row has four cells"
    comment = re.search(r"<!-- (.*) -->$", row[3])

    assert comment, "the row names no test"
    for name in comment[1].split():
        assert name in test_names()
    for words in quoted(row[2]):
        assert is_said(words), f"the program never says {words!r}"


def test_every_verdict_of_the_program_is_in_the_table_of_situations() -> None:
    text = section("What happens when…")

    for rule in serversync.RULES:
        if rule.code not in ("BAD_REQUEST", "UNKNOWN", "CONFLICT", "NETWORK_RESET"):
            assert f"`{rule.code}`" in text, f"{rule.code} is not explained"


# --- operating and troubleshooting --------------------------------------------------------------


def test_every_event_and_field_of_the_journal_is_documented() -> None:
    events, names = {"cycle"}, {"EVENT"}
    for event, keywords in calls_of_say():
        events |= texts_in(event)
        names |= {keyword.arg for keyword in keywords if keyword.arg and keyword.arg.isupper()}
    text = section("Operating")
    listed = re.search(r"^EVENT is one of: ([^.]*)\.", text, re.M)

    assert listed
    assert {word.strip() for word in listed[1].split(",")} == events
    shown = {name for row in table_rows(text, "Field") for name in row[0].split(", ")}
    assert shown == names


def test_the_headings_of_the_troubleshooting_are_messages_of_the_program() -> None:
    headings = re.findall(r"^### (.*)$", section("Troubleshooting"), re.M)

    assert len(headings) > 10
    for heading in headings:
        assert is_said(heading.strip("`")), f"the program never says {heading}"


def test_every_query_of_the_readme_runs(
    agent: AgentFactory, backend: Backend, db: Database
) -> None:
    backend.end_call()
    assert agent.once(SYNC_DELETE_AFTER_SEC=60).returncode == 0

    texts = [section("Operating"), section("Troubleshooting")]
    statements = [s for text in texts for block in sql_blocks(text) for s in sql_statements(block)]
    assert len(statements) > 8
    for statement in statements:
        db.execute(statement)


def test_a_dead_letter_is_sent_again_by_the_readme_s_statements(
    agent: AgentFactory, backend: Backend, frontend: Frontend, db: Database
) -> None:
    db.execute(f"alter sequence sync_outbox_id_seq restart with {DEAD_SEQ}")
    call = backend.end_call(recording=False, events=0)
    assert call.seqs == [DEAD_SEQ]
    frontend.poison[call.call_log_id] = Reply(400, {}, {"error": "no"})
    assert agent.once().returncode == serversync.EX_PERSON
    block = next(b for b in sql_blocks(section("Operating")) if "RETRYING" in b)
    state = "select status, retry_count from serversync.dead_letters"

    def by_hand() -> None:
        for statement in sql_statements(block):
            db.execute(statement)

    by_hand()
    assert db.rows(state) == [("RETRYING", 0)]
    assert agent.once().returncode == serversync.EX_PERSON
    assert db.rows(state) == [("PENDING", 1)]

    frontend.poison.clear()
    by_hand()
    assert agent.once().returncode == 0
    assert db.rows(state) == [("RESOLVED", 1)]
    assert len(frontend.received(call.call_log_id)) == 1


@pytest.fixture
def least_role(cluster: Cluster) -> Iterator[str]:
    """The role that README makes: its name counts, for it is the name of the schema, too."""
    yield LEAST_ROLE
    with cluster.admin() as admin:
        admin.execute(f"drop role if exists {LEAST_ROLE}")


def test_the_least_rights_of_the_readme_are_enough_for_everything(
    cluster: Cluster, least_role: str, frontend: Frontend, tmp_path: Path
) -> None:
    database = Database(cluster)
    try:
        with database.admin() as admin:
            for statement in sql_statements(sql_blocks(section("Security"))[0]):
                admin.execute(statement)
        backend = Backend(database, tmp_path / "backend-of-others")
        call = backend.end_call()
        url = cluster.url(database.name, user=least_role)
        done = run_once(agent_env(database, frontend, backend, DATABASE_URL=url))

        assert done.returncode == 0, done.stderr
        assert "going on with less" not in done.stderr
        assert frontend.files[call.call_log_id].sha256 == call.sha256
        assert not call.directory.exists()
        assert backend.upload_status(call)[0] == "uploaded"
        trigger = "select count(*) from pg_trigger where tgname = 'serversync_wake'"
        assert database.value(trigger) == 1
        prune = "select has_table_privilege(%s, 'sync_outbox', 'delete')"
        assert database.value(prune, (least_role,)) is True
        # A later cycle, with the schema of the role's own name in the search_path from the start.
        second = backend.end_call()
        assert run_once(agent_env(database, frontend, backend, DATABASE_URL=url)).returncode == 0
        assert backend.upload_status(second)[0] == "uploaded"
    finally:
        database.drop()


def test_the_unit_of_the_readme_has_a_watchdog_that_the_defaults_allow(
    db: Database, frontend: Frontend, backend: Backend
) -> None:
    found = re.search(r"^ +WatchdogSec=(\d+)$", section("Install"), re.M)
    assert found
    env = agent_env(db, frontend, backend, WATCHDOG_USEC=int(found[1]) * 1_000_000)

    assert "SYNC_TIMEOUT_SEC" not in env
    assert run_once(env).returncode == 0


def test_the_japanese_section_has_the_commands_and_messages_of_the_others() -> None:
    japanese = section("日本語")
    others = README.replace(japanese, "")

    commands = set(re.findall(r"^    (.*)$", japanese, re.M))
    assert len(commands) == 4
    assert commands <= set(re.findall(r"^    (.*)$", others, re.M))
    for words in ("outage, nothing is lost", "recovered after", "given up: it is in serversync"):
        assert words in japanese
        assert is_said(words)


# --- the rest of the files ----------------------------------------------------------------------


def test_paths_in_the_readme_exist() -> None:
    paths = set(re.findall(r"\b(?:packaging|tests|etc)/[\w./]*\w", README))

    assert {"packaging/try", "tests/run", "etc/serversync.env"} <= paths
    for path in paths - {"etc/systemd/system/serversync.service", "etc/serversync.token"}:
        assert (REPOSITORY / path.partition("::")[0]).exists(), path


def test_the_changelog_knows_this_version() -> None:
    assert f"## [{serversync.__version__}]" in CHANGELOG


def files_of_the_project() -> list[Path]:
    """What git would commit; without git or its directory, all that is not hidden."""
    listing = ["git", "-c", f"safe.directory={REPOSITORY}", "ls-files", "-co", "--exclude-standard"]
    try:
        done = subprocess.run(listing, cwd=REPOSITORY, capture_output=True, text=True, check=True)
        names = done.stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        every = (path.relative_to(REPOSITORY) for path in REPOSITORY.rglob("*"))
        names = [str(path) for path in every if not any(part[0] in "._" for part in path.parts)]
    return [path for name in names if (path := REPOSITORY / name).is_file()]


# Written so that this file does not hold what it looks for.
MACHINE_PATHS = re.compile(r"(?<![\w.])/(?:work|root|home/\w+|Users|tmp/\w)/")
HOSTS = re.compile(r"https?://([A-Za-z0-9.-]+\.[A-Za-z]{2,})")


def test_no_file_holds_a_path_or_a_host_of_one_machine() -> None:
    files = files_of_the_project()
    assert REPOSITORY / "serversync.py" in files
    for path in files:
        text = path.read_text()
        found = MACHINE_PATHS.search(text)
        assert not found, f"{path}: {found[0] if found else ''}"
        for host in HOSTS.findall(text):
            known = ("example.com", "example.org", "example.net", "example", "invalid", "test")
            published = ("keepachangelog.com", "semver.org", "debian.org")
            assert host.endswith((*known, *published)), f"{path}: {host}"

"""What README.md, the man page, the sample configuration and --help say is what is done."""

import ast
import re
import shlex
import subprocess
import uuid
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import serversync
from agent import REPOSITORY, AgentFactory, run_once
from backend import Backend, write_wav
from commandline import options, parsers, read_synopses, synopses
from frontend import Frontend, Reply
from ledger import dead_letters
from pg import Database
from settings import AUDIO, example
from waiting import wait_until

README = (REPOSITORY / "README.md").read_text()
CHANGELOG = (REPOSITORY / "CHANGELOG.md").read_text()
SAMPLE = REPOSITORY / "etc" / "serversync.env"
MAN_PAGE = REPOSITORY / "packaging" / "debian" / "serversync.8"

# --- the program --------------------------------------------------------------------------------


@cache
def program() -> ast.Module:
    return ast.parse(Path(serversync.__file__).read_text())


def texts_in(node: ast.AST) -> Iterator[str]:
    """Every text; of an f-string, the pieces between its values."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Constant) and isinstance(inner.value, str):
            yield inner.value


@cache
def program_texts() -> list[str]:
    return list(texts_in(program()))


def is_said(words: str) -> bool:
    """Whether each piece of a message (`…` stands for what varies) is a text of the program."""
    pieces = [piece.strip(" :") for piece in words.split("…") if len(piece.strip(" :")) > 2]
    return bool(pieces) and all(any(piece in text for text in program_texts()) for piece in pieces)


def calls_of_say() -> Iterator[tuple[ast.expr, list[ast.keyword]]]:
    """The event and the fields of every message."""
    for node in ast.walk(program()):
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Name) and node.func.id in ("say", "say_sent"):
            yield node.args[node.func.id == "say"], node.keywords
        elif isinstance(node.func, ast.Attribute) and node.func.attr == "say":
            yield node.args[3], node.keywords


def shared_fields() -> Iterator[str]:
    """Those of `more`, which is made before a message is said."""
    for node in ast.walk(program()):
        if isinstance(node, ast.Assign | ast.AugAssign) and isinstance(node.value, ast.Dict):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(target, ast.Name) and target.id == "more":
                yield from (
                    str(key.value) for key in node.value.keys if isinstance(key, ast.Constant)
                )


def settings() -> list[tuple[str, str, str]]:
    """Each key, its default as it is shown, and its meaning."""
    rows = [(name, option.metadata) for name, option in serversync.OPTIONS.items()]
    shown = {None: "required", "": "not set"}
    return [(name, shown.get(r["default"], r["default"]), r["text"]) for name, r in rows]


EXIT_CODES = {value for name, value in vars(serversync).items() if name.startswith("EX_")}
CHECKS = [check.__name__.replace("_", " ") for check in serversync.CHECKS]
ROUTES = sorted(
    f"{method} {pattern.replace('([^/]+)', '{}')}"
    for pattern, methods in serversync.ROUTES.items()
    for method in methods
)


def route_shown(text: str) -> str:
    return re.sub(r"\{\w+\}", "{}", text)


# --- the README ---------------------------------------------------------------------------------


def section(title: str) -> str:
    """The text under a heading of the second or third level."""
    heading = re.search(rf"^(##+) {re.escape(title)}$", README, re.M)
    assert heading, f"README has no section {title!r}"
    rest = README[heading.end() :]
    following = re.search(rf"^#{{2,{len(heading[1])}}} ", rest, re.M)
    return rest[: following.start()] if following else rest


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


def first_cells(text: str, first: str) -> list[str]:
    return [row[0].strip("`") for row in table_rows(text, first)]


def quoted(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def sql_statements(text: str) -> list[str]:
    """Those of all SQL blocks."""
    blocks = re.findall(r"^```sql\n(.*?)^```$", text, re.M | re.S)
    plain = (re.sub(r"--.*", "", block) for block in blocks)
    return [s.strip() for block in plain for s in block.split(";\n") if s.strip()]


def sessions(text: str) -> list[tuple[str, str]]:
    """Each command that is shown with what it prints."""
    shown = re.findall(r"^    \$ (.*)\n((?:(?:    (?!\$ ).*)?\n)+)", text, re.M)
    return [(command, re.sub("^    ", "", said, flags=re.M).strip("\n")) for command, said in shown]


# --- the man page -------------------------------------------------------------------------------


def man_lines() -> Iterator[str]:
    """Its source, without what is only about fonts and spaces."""
    source = MAN_PAGE.read_text().replace("\\\n", "")
    plain = re.sub(r"\\f.|\\&", "", source).replace("\\-", "-").replace("\\(aq", "'")
    for line in plain.splitlines():
        font = re.match(r"\.([BIR]{1,2}) (.*)", line)
        if font:
            words = [word.strip('"') for word in re.findall(r'"[^"]*"|\S+', font[2])]
            line = (" " if len(font[1]) == 1 else "").join(words)
        yield line


@cache
def man_sections() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in man_lines():
        if line.startswith(".SH "):
            lines = found[line.removeprefix(".SH ")] = []
        else:
            lines.append(line)
    return found


def man_terms(title: str) -> dict[str, str]:
    """What a section explains: each term with its explanation."""
    found: dict[str, str] = {}
    text = "\n".join(man_sections()[title])
    for item in re.split(r"^\.TP\n", text, flags=re.M)[1:]:
        term, _, rest = item.partition("\n")
        found[term] = " ".join(re.split(r"^\.", rest, flags=re.M)[0].split())
    return found


MAN_TITLES = [
    *("NAME", "SYNOPSIS", "DESCRIPTION", "OPTIONS", "COMMANDS", "CONFIGURATION"),
    *("ADMIN INTERFACE", "SIGNALS", "FILES", "EXIT STATUS", "EXAMPLES", "SEE ALSO"),
]


def test_the_man_page_is_complete_and_well_formed() -> None:
    lint = subprocess.run(["mandoc", "-Tlint", MAN_PAGE], capture_output=True, text=True)

    assert (lint.returncode, lint.stdout, lint.stderr) == (0, "", "")
    assert list(man_sections()) == MAN_TITLES
    assert f'"serversync {serversync.__version__}"' in MAN_PAGE.read_text()


# --- configuration ------------------------------------------------------------------------------


def test_the_configuration_table_is_the_option_table() -> None:
    rows = table_rows(section("Configuration"), "Key")

    plain = ("required", "not set")
    assert [tuple(row) for row in rows] == [
        (f"`{name}`", shown if shown in plain else f"`{shown}`", text)
        for name, shown, text in settings()
    ]


def test_the_man_page_tells_every_option_with_its_default() -> None:
    wanted = {f"{name} [{shown}]": text for name, shown, text in settings()}

    assert list(man_terms("CONFIGURATION").items()) == list(wanted.items())


def test_help_tells_every_option_with_its_default_and_every_exit_code() -> None:
    done = run_once({}, args=("--help",))

    assert done.returncode == 0
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    for name, shown, text in settings():
        assert f"{name} {text} [{shown}]" in lines, f"{name} is not in --help"
    codes = done.stdout.partition("exit codes:")[2]
    assert {int(code) for code in re.findall(r"\b(\d+) ", codes)} == EXIT_CODES


def sample_settings() -> dict[str, str]:
    """The sample as it would be with every key that it shows switched on."""
    text = re.sub(r"^#([A-Z_]+=)", r"\1", SAMPLE.read_text(), flags=re.M)
    return serversync.parse_env_file(text)


def test_the_sample_shows_keys_that_exist_at_their_defaults() -> None:
    defaults = {name: "" if shown == "not set" else shown for name, shown, _ in settings()}
    shown = sample_settings()

    required = {name for name, default in defaults.items() if default == "required"}
    assert required <= set(shown)
    for name, value in shown.items():
        assert name in defaults, f"{name} is no option"
        if name not in required:
            assert value == defaults[name], f"{name} is not shown at its default"
    given = {name: value for name, value in shown.items() if value}
    assert serversync.load_config(given, {}).retry_max == 8


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

COMMANDS = section("Commands and exit codes")


def test_every_command_is_documented_with_what_it_takes_and_no_other() -> None:
    assert read_synopses(first_cells(COMMANDS, "Command")) == synopses()
    terms = [term for term in man_terms("COMMANDS") if not term.startswith("-")]
    assert read_synopses(terms) == synopses()


def test_every_option_before_a_command_is_documented_and_no_other() -> None:
    for shown in (first_cells(COMMANDS, "Option"), man_terms("OPTIONS")):
        assert {term.split()[0] for term in shown} == set(options(parsers()[""]))


def test_help_explains_every_command_and_every_option() -> None:
    for name, parser in parsers().items():
        text = parser.format_help()
        for option, action in options(parser).items():
            assert option in text
            assert action.help or action.metavar, f"{name} {option} is not explained"
        assert name in README
        assert parser.description, f"{name} is not explained"


def test_every_exit_code_is_documented_in_the_order_in_which_they_apply() -> None:
    in_docstring = re.findall(r"^ {2,3}(\d+)  ", serversync.__doc__ or "", re.M)

    assert len(EXIT_CODES) == len(in_docstring) == 6
    assert {int(code) for code in in_docstring} == EXIT_CODES
    assert first_cells(COMMANDS, "Exit code") == in_docstring
    assert list(man_terms("EXIT STATUS")) == in_docstring


def commands_shown() -> list[str]:
    """Command lines of ours that can be typed as they stand."""
    texts = [*re.findall("^    (.*)$", README, re.M), *re.findall("`([^`\n]+)`", README)]
    texts += man_sections()["EXAMPLES"]
    found = []
    for text in texts:
        for piece in re.split("[|;&()<>#]", text):
            ours = re.match(r"\W*(?:ssh \S+ )?(?:sudo (?:-u \w+ )?)?serversync ([a-z].*)", piece)
            if ours and "…" not in text and "[" not in text:
                found.append(ours[1].strip())
    return found


def test_every_command_line_that_is_shown_can_be_typed() -> None:
    shown = commands_shown()

    assert {"run", "setup", "doctor", "prune --days 7 --yes"} <= set(shown)
    parser = parsers()[""]
    for line in shown:
        if line not in parsers():  # only mentioned: `dlq retry`
            parser.parse_args(shlex.split(line))


def test_every_signal_is_documented() -> None:
    handled = re.findall(r"signal\.signal\(signal\.(SIG\w+)", ast.unparse(program()))
    inner = {"SIGALRM", "SIGINT"}  # a deadline's; of `status --watch` only

    shown = re.findall(r"SIG\w+", " ".join(man_terms("SIGNALS")))
    assert set(handled) - inner == set(shown) - inner
    assert "SIGINT" in shown


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

    for _, _, code, _ in serversync.RULES:
        if code not in ("BAD_REQUEST", "CONFLICT", "NETWORK_RESET"):
            assert f"`{code}`" in text, f"{code} is not explained"


# --- operating ----------------------------------------------------------------------------------

IDS = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f-]{22}")
VARYING = (
    (IDS, "ID"),
    (r"https?://\S+", "URL"),
    (r"device \S+,", "device ID,"),
    (r"\[[#.]+\]", "[BAR]"),
    (r"\d[\d.:T-]*", "N"),
    (r"N (s|min|h|d)\b", "TIME"),
    (r"N (bytes|kB|MB|GB|TB)\b", "SIZE"),
    (r" +", " "),
)


def shape(text: str) -> list[str]:
    """Without what is another one each time."""
    for pattern, name in VARYING:
        text = re.sub(pattern, name, text)
    return [line.strip() for line in text.splitlines()]


def test_the_screens_of_the_readme_are_what_the_commands_print(
    agent: AgentFactory, backend: Backend, frontend: Frontend, db: Database
) -> None:
    running = agent(SYNC_DELETE_AFTER_SEC=3600)
    for number in range(2):
        backend.end_call()
        frontend.wait(lambda number=number: len(frontend.files) > number)  # type: ignore[misc]
    entity = str(uuid.uuid4())
    frontend.poison[entity] = Reply(400, {}, {"error": "name is too long"})
    seq = backend.enqueue("schedule", {"name": "summer"}, entity_id=entity)
    wait_until(lambda: dead_letters(db), what="a dead letter")
    frontend.poison.clear()
    frontend.read_rate = 50_000  # for longer than all that follows takes
    backend.end_call(seconds=300)
    wait_until(lambda: (running.state()["progress"] or {}).get("bytes"), what="an upload")
    shown = sessions(section("Operating"))
    elsewhere = re.compile("doctor|settings")
    shown = [(command, said) for command, said in shown if not elsewhere.search(command)]

    assert len(shown) == 4
    for command, said in shown:
        parts = re.fullmatch(r"(?:echo '(.*)' \| )?sudo serversync (.*)", command)
        assert parts, command
        env = agent.env(RUNTIME_DIRECTORY=running.runtime_dir)
        done = run_once(env, args=shlex.split(parts[2]), stdin=parts[1] or "")
        assert (done.returncode, shape(done.stdout)) == (0, shape(said)), command
        if "dlq list" in command:  # and then, as the README says
            assert agent.once("dlq", "retry-all").returncode == 0
            wait_until(lambda: dead_letters(db)[seq]["status"] == "RESOLVED", 60, "delivery")


def test_the_settings_of_the_readme_are_shown_as_it_shows_them(
    agent: AgentFactory, backend: Backend, frontend: Frontend
) -> None:
    wanted = example()
    wanted.groups[0]["phoneNumbers"].append("110")
    for number, each in enumerate(wanted.announcements):
        each["audioFileUrl"] = f"{AUDIO}{number}.wav"
        path = backend.directory / "sound.wav"
        write_wav(path, 0.1)
        frontend.pages[each["audioFileUrl"]] = path.read_bytes()
    wanted.serve(frontend)
    assert agent.once().returncode == 0
    assert agent.once("settings", "pull").returncode == 0
    ((command, said),) = sessions(section("Settings: what comes back"))

    assert command == "sudo serversync settings"
    assert shape(agent.once("settings").stdout) == shape(said)


def test_the_checks_of_the_doctor_are_documented_and_shown_as_it_shows_them() -> None:
    text = section("What is wrong: doctor")
    in_man = next(t for term, t in man_terms("COMMANDS").items() if "doctor" in term)
    for where in (text, in_man):
        assert f"The checks: {', '.join(CHECKS)}." in " ".join(where.split())

    ((_, said),) = sessions(text)
    *lines, verdict = said.splitlines()
    found = [line for line in lines if not line.startswith(" " * 9)]
    names = [re.fullmatch(r"(?:failed  |warning ) ([a-z ]+): .+", line) for line in found]
    assert [CHECKS.index(name[1]) for name in names if name] == sorted(
        CHECKS.index(name[1]) for name in names if name
    )
    assert all(names) and len(lines) == 2 * len(found), "each has its hint"
    failed = sum(line.startswith("failed") for line in found)
    assert verdict == f"{failed} checks failed, {len(found) - failed} warning"


def test_the_states_and_refusals_of_dead_letters_are_documented() -> None:
    text = section("Dead letters")
    states = re.search(r"check \(status in \(([^)]*)\)\)", serversync.TABLES)
    assert states
    assert first_cells(text, "Status") == re.findall(r"\w+", states[1])
    in_man = " ".join(man_sections()["COMMANDS"])
    assert all(state in in_man for state in re.findall(r"\w+", states[1]))

    refused = [words for row in table_rows(text, "Refused") for words in quoted(row[0])]
    assert sorted(re.sub(r"\d+", "{}", words) for words in refused) == sorted(
        re.sub(r"\{\w+\}", "{}", words) for words in serversync.AGAINST.values()
    )


def test_every_route_and_error_of_the_admin_interface_is_documented() -> None:
    text = section("The admin interface")

    assert sorted(map(route_shown, first_cells(text, "Request"))) == ROUTES
    assert sorted(map(route_shown, man_terms("ADMIN INTERFACE"))) == ROUTES
    codes = {text for text in program_texts() if re.fullmatch(r"SYS_[A-Z_]+", text)}
    assert set(first_cells(text, "Code")) == codes
    for where in (serversync.ADMIN_LISTEN, "X-Requested-With"):
        assert where in text
        assert where in MAN_PAGE.read_text()


def test_every_metric_is_documented_and_no_other() -> None:
    cells = first_cells(section("Metrics, alerts, dashboard"), "Metric")
    shown = {re.sub(r"\{.*\}", "", name) for cell in cells for name in re.split("`, `", cell)}

    assert shown == {name for name, _, _ in serversync.METRICS}


def test_every_event_and_field_of_the_journal_is_documented() -> None:
    events, names = {"log_dropped"}, {"EVENT"}  # not by say()
    events |= {event for _, _, event, _ in serversync.TROUBLES}
    for event, keywords in calls_of_say():
        events |= set(texts_in(event))
        names |= {keyword.arg for keyword in keywords if keyword.arg and keyword.arg.isupper()}
    names |= {name for name in shared_fields() if name.isupper()}
    text = section("The journal")
    listed = re.search(r"^EVENT is one of: ([^.]*)\.", text, re.M)

    assert listed
    assert {word.strip() for word in listed[1].split(",")} == events
    assert {name for cell in first_cells(text, "Field") for name in cell.split(", ")} == names


def test_every_query_of_the_readme_runs(
    agent: AgentFactory, backend: Backend, db: Database
) -> None:
    backend.end_call()
    assert agent.once(SYNC_DELETE_AFTER_SEC=60).returncode == 0

    statements = sql_statements(README)
    assert len(statements) > 5
    for statement in statements:
        db.execute(statement)


# --- troubleshooting, the Japanese section ------------------------------------------------------


def test_the_headings_of_the_troubleshooting_are_messages_of_the_program() -> None:
    headings = re.findall(r"^### (.*)$", section("Troubleshooting"), re.M)

    assert len(headings) > 10
    for heading in headings:
        assert is_said(heading.strip("`")), f"the program never says {heading}"


def test_the_japanese_section_has_the_commands_and_messages_of_the_others() -> None:
    japanese = section("日本語")
    others = README.replace(japanese, "")

    commands = re.findall(r"^    (.*)$", japanese, re.M)
    typed = [line for line in commands if line.startswith("$ ")]
    assert len(typed) == 5
    assert typed == re.findall(r"^    (\$ .*)$", section("Install on a Pi"), re.M)
    assert commands == [
        line for line in re.findall(r"^    (.*)$", others, re.M) if line in commands
    ]
    for words in ("outage, nothing is lost", "recovered after", "given up: it is in serversync"):
        assert words in japanese
        assert is_said(words)


# --- the rest of the files ----------------------------------------------------------------------


def test_paths_in_the_readme_exist() -> None:
    paths = set(re.findall(r"(?<![/\w])(?:packaging|tests|etc)/[\w./-]*\w", README))

    assert {"packaging/try", "tests/run", "etc/serversync.env"} <= paths
    for path in paths:
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
EXAMPLES = ("example.com", "example.org", "example.net", "example", "invalid", "test")
PUBLISHED = ("keepachangelog.com", "semver.org", "debian.org", "www.w3.org")


def test_no_file_holds_a_path_or_a_host_of_one_machine() -> None:
    files = files_of_the_project()
    assert REPOSITORY / "serversync.py" in files
    for path in files:
        text = path.read_text()
        found = MACHINE_PATHS.search(text)
        assert not found, f"{path}: {found[0] if found else ''}"
        for host in HOSTS.findall(text):
            assert host.endswith((*EXAMPLES, *PUBLISHED)), f"{path}: {host}"

"""What README.md, the manual, the sample configuration and --help say is what is done."""

import ast
import re
import shlex
import subprocess
import uuid
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

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
SAMPLE = REPOSITORY / "etc" / "serversync.env"
SOURCES = REPOSITORY / "packaging" / "debian" / "man"
PAGES = {path.stem: path.read_text() for path in SOURCES.glob("*.md")}
MANUAL, KEYS = PAGES["serversync.8"], PAGES["serversync.env.5"]
TROUBLE, ADMIN = PAGES["serversync-trouble.7"], PAGES["serversync-admin.7"]
DOCUMENTS = {"README": README, **PAGES}

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
    """Whether each piece of a message (`...` stands for what varies) is a text of the program."""
    pieces = [piece.strip(" :()") for piece in re.split(r"\.\.\.|…", words)]
    pieces = [piece for piece in pieces if len(piece) > 2]
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
# --- Markdown -----------------------------------------------------------------------------------


def section(title: str, text: str = README) -> str:
    """The text under a heading."""
    heading = re.search(rf"^(#+) {re.escape(title)}$", text, re.M)
    assert heading, f"there is no section {title!r}"
    rest = text[heading.end() :]
    following = re.search(rf"^#{{1,{len(heading[1])}}} ", rest, re.M)
    return rest[: following.start()] if following else rest


def headings(text: str) -> list[tuple[str, str]]:
    """Those of the second level, each with what stands below it."""
    parts = re.split(r"^(#+) (.*)$", text, flags=re.M)[1:]
    rows = zip(parts[::3], parts[1::3], parts[2::3], strict=True)
    return [(title, body) for level, title, body in rows if level == "##"]


def first_cells(text: str, first: str) -> list[str]:
    """Of the table whose first heading is `first`."""
    table = text.partition(f"| {first} |")[2].partition("\n\n")[0]
    assert table, f"there is no table {first!r}"
    return [line.strip("|").split("|")[0].strip() for line in table.splitlines()[2:]]


def quoted(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def sessions(text: str) -> list[tuple[str, str]]:
    """Each command that is shown with what it prints."""
    shown = re.findall(r"^    \$ (.*)\n((?:(?:    (?!\$ ).*)?\n)+)", text, re.M)
    return [(command, re.sub("^    ", "", said, flags=re.M).strip("\n")) for command, said in shown]


# --- the documents as a whole -------------------------------------------------------------------


def test_the_readme_is_for_five_minutes_and_leads_to_every_page() -> None:
    assert len(README.splitlines()) <= 350
    assert len(section("日本語").splitlines()) <= 40
    for page in PAGES:
        name, _, number = page.rpartition(".")
        link = f"[{name}({number})]({SOURCES.relative_to(REPOSITORY)}/{page}.md)"
        assert link in section("The manual")


def test_nothing_stands_twice() -> None:
    found: Counter[str] = Counter()
    for text in DOCUMENTS.values():
        plain = re.sub(r"^( {4}|\||<!--).*$", "\n", text, flags=re.M)
        sentences = re.split(r"(?<=[.:])\s+|\n\s*\n", plain)
        found.update(" ".join(each.split()) for each in sentences)

    assert [words for words, times in found.items() if times > 1 and len(words) > 60] == []


def test_every_page_is_made_without_a_warning(tmp_path: Path) -> None:
    subprocess.run([SOURCES / "make", tmp_path], check=True)

    assert {path.name for path in tmp_path.iterdir()} == {*PAGES}
    assert len(PAGES) == 4
    for page in PAGES:
        for command in (
            ["man", "--warnings", "-l"],
            ["mandoc", "-Tlint", "-Wwarning"],
            ["lexgrog"],
        ):
            words = [*command, str(tmp_path / page)]
            done = subprocess.run(words, capture_output=True, text=True, check=False)
            assert (done.returncode, done.stderr) == (0, ""), done.stdout
        assert f'"serversync {serversync.__version__}"' in (tmp_path / page).read_text()
        assert "<!--" not in (tmp_path / page).read_text()


def test_paths_in_the_documents_exist() -> None:
    text = "".join(DOCUMENTS.values())
    paths = set(re.findall(r"(?<![/\w])(?:packaging|tests|etc)/[\w./-]*\w", text))

    assert {"packaging/try", "tests/run", "etc/serversync.env"} <= paths
    assert {
        "packaging/prometheus/serversync.rules.yml",
        "packaging/grafana/serversync.json",
    } <= paths
    for path in paths:
        assert (REPOSITORY / path).exists(), path


def test_the_japanese_section_and_the_others_have_the_same_commands_and_messages() -> None:
    japanese = section("日本語")

    typed = re.findall(r"^    (\$ .*)$", japanese, re.M)
    assert len(typed) == 6
    assert typed == re.findall(r"^    (\$ .*)$", section("Install on a Pi"), re.M)
    for words in ("outage, nothing is lost", "recovered after", "given up: it is in serversync"):
        assert words in japanese
        assert is_said(words)


# --- configuration ------------------------------------------------------------------------------


def test_the_manual_has_every_key_with_its_default_and_what_is_allowed() -> None:
    shown = {title.strip("`"): " ".join(body.split()) for title, body in headings(KEYS)}

    assert {*shown} == {*serversync.OPTIONS}
    assert {f"`{former}`" for former in serversync.FORMER} <= {*re.findall(r"`\w+`", KEYS)}
    for name, default, _ in settings():
        first = {"required": "Required.", "not set": "Default: not set"}
        assert shown[name].startswith(first.get(default, f"Default: `{default}`")), name
        with pytest.raises(ValueError, match="must be") as refusal:
            serversync.OPTIONS[name].metadata["parse"]("\0")
            raise ValueError("must be anything")
        allowed = str(refusal.value).removeprefix("must be ")
        if re.search(r"\d|one of", allowed):
            assert allowed in shown[name].replace("`", ""), name


def test_help_tells_every_option_with_its_default_and_every_exit_code() -> None:
    done = run_once({}, args=("--help",))

    assert done.returncode == 0
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    for name, shown, text in settings():
        assert f"{name} {text} [{shown}]" in lines, f"{name} is not in --help"
    codes = done.stdout.partition("exit codes:")[2]
    assert {int(code) for code in re.findall(r"\b(\d+) ", codes)} == EXIT_CODES


def test_the_sample_shows_keys_that_exist_at_their_defaults() -> None:
    defaults = {name: "" if shown == "not set" else shown for name, shown, _ in settings()}
    # As it would be with every key that it shows switched on.
    text = re.sub(r"^#([A-Z_]+=)", r"\1", SAMPLE.read_text(), flags=re.M)
    shown = serversync.parse_env_file(text)

    required = {name for name, default in defaults.items() if default == "required"}
    assert required <= set(shown)
    for name, value in shown.items():
        assert name in defaults, f"{name} is no option"
        if name not in required:
            assert value == defaults[name], f"{name} is not shown at its default"
    given = {name: value for name, value in shown.items() if value}
    assert serversync.load_config(given).retry_max == 8


def test_an_unedited_sample_ends_with_exit_code_78_and_names_what_is_required() -> None:
    done = run_once({}, args=("once", "--env-file", str(SAMPLE)))

    assert (done.returncode, done.stdout) == (serversync.EX_CONFIG, "")
    lines = done.stderr.splitlines()
    assert [line.split()[1] for line in lines] == ["DATABASE_URL", "FRONTEND_BASE_URL"]
    for line in lines:
        assert line in README, "README shows another message"


# --- commands, exit codes, signals --------------------------------------------------------------


def test_every_command_and_option_is_documented_with_what_it_takes_and_no_other() -> None:
    shown = [words for title, _ in headings(MANUAL) for words in quoted(title)]
    assert read_synopses(shown) == synopses()
    before = {quoted(cell)[0].split()[0] for cell in first_cells(MANUAL, "Option")}
    assert before == set(options(parsers()[""]))


def test_help_explains_every_command_and_every_option() -> None:
    for name, parser in parsers().items():
        text = parser.format_help()
        for option, action in options(parser).items():
            assert option in text
            assert action.help or action.metavar, f"{name} {option} is not explained"
        assert parser.description, f"{name} is not explained"


def test_every_exit_code_is_documented_in_the_order_in_which_they_apply_and_every_signal() -> None:
    in_docstring = re.findall(r"^ {2,3}(\d+)  ", serversync.__doc__ or "", re.M)
    assert len(EXIT_CODES) == len(in_docstring) == 6
    assert {int(code) for code in in_docstring} == EXIT_CODES
    assert [quoted(cell)[0] for cell in first_cells(MANUAL, "Exit code")] == in_docstring

    handled = re.findall(r"signal\.signal\(signal\.(SIG\w+)", ast.unparse(program()))
    inner = {"SIGALRM", "SIGINT"}  # a deadline's; of `status --watch` only
    shown = re.findall(r"SIG\w+", " ".join(first_cells(MANUAL, "Signal")))
    assert set(handled) - inner == set(shown) - inner
    assert "SIGINT" in shown


def test_every_command_line_that_is_shown_can_be_typed() -> None:
    shown = set()
    for text in DOCUMENTS.values():
        for line in [*re.findall("^    (.*)$", text, re.M), *re.findall("`([^`\n]+)`", text)]:
            for piece in re.split("[|;&()<>#]", line):
                ours = r"\W*(?:ssh \S+ )?(?:sudo (?:-u \w+ )?)?serversync ([a-z].*)"
                found = re.match(ours, piece)
                if found and "…" not in line and "[" not in line and "..." not in line:
                    shown.add(found[1].strip())

    assert {"setup", "doctor", "prune --days 7 --yes"} <= shown
    parser = parsers()[""]
    for line in shown:
        if line not in parsers():  # only mentioned: `dlq retry`
            parser.parse_args(shlex.split(line))


# --- trouble ------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(("title", "body"), headings(TROUBLE), ids=dict(headings(TROUBLE)))
def test_a_trouble_has_its_test_and_quotes_the_program(title: str, body: str) -> None:
    comment = re.match(r"\s*<!-- (.*) -->\n", body)

    assert comment, "it names no test"
    for name in comment[1].split():
        assert name in test_names()
    for words in quoted(title):
        assert is_said(words), f"the program never says {words!r}"


def test_every_verdict_and_every_trouble_of_the_database_has_a_heading_or_is_explained() -> None:
    for _, _, code, _ in serversync.RULES:
        assert re.search(rf"^{code}\b|\b{code}[:.,]", TROUBLE, re.M), f"{code} is not explained"
    titles = " ".join(title for title, _ in headings(TROUBLE))
    for _, _, _, text in serversync.TROUBLES:
        assert re.split(r": \{|\{", text)[0] in titles, text
    ten = first_cells(section("Ten troubles that really happen"), "You see")
    assert len(ten) == 10
    for words in quoted(" ".join(ten)):
        assert is_said(words), f"the program never says {words!r}"


# --- screens ------------------------------------------------------------------------------------

IDS = re.compile(r"\b[0-9a-f]{8}(-[0-9a-f]{4}-[0-9a-f-]{22})?\b")
VARYING = (
    (IDS, "ID"),
    (r"https?://\S+", "URL"),
    (r"device \S+,", "device ID,"),
    (r"\[[#.]+\]", "[BAR]"),
    (r"\b\d\d [A-Z][a-z]{2} (?=\d\d:)", ""),  # the date of a time of another day
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


def refused(backend: Backend, frontend: Frontend) -> int:
    """An entry that the frontend does not take; its seq."""
    entity = str(uuid.uuid4())
    frontend.poison[entity] = Reply(400, {}, {"error": "name is too long"})
    return backend.enqueue("schedule", {"name": "summer"}, entity_id=entity)


def test_the_screens_of_the_manual_are_what_the_commands_print(
    agent: AgentFactory, backend: Backend, frontend: Frontend, db: Database
) -> None:
    running = agent(SYNC_DELETE_AFTER_SEC=3600)
    for number in range(2):
        backend.end_call()
        frontend.wait(lambda number=number: len(frontend.files) > number)  # type: ignore[misc]
    seq = refused(backend, frontend)
    wait_until(lambda: dead_letters(db), what="a dead letter")
    frontend.poison.clear()
    frontend.read_rate = 50_000  # for longer than all that follows takes
    backend.end_call(seconds=300)
    wait_until(lambda: (running.state()["progress"] or {}).get("bytes"), what="an upload")
    elsewhere = re.compile("doctor|settings")
    shown = [(command, said) for command, said in sessions(MANUAL) if not elsewhere.search(command)]
    shown.sort(key=lambda screen: "replay" in screen[0])  # what was retried is sent again, too

    assert len(shown) == 4
    for command, said in shown:
        parts = re.fullmatch(r"(?:echo '(.*)' \| )?sudo serversync (.*)", command)
        assert parts, command
        env = agent.env(RUNTIME_DIRECTORY=running.runtime_dir)
        done = run_once(env, args=shlex.split(parts[2]), stdin=parts[1] or "")
        assert (done.returncode, shape(done.stdout)) == (0, shape(said)), command
        if "dlq list" in command:  # and then, as the manual says
            assert agent.once("dlq", "retry-all").returncode == 0
            wait_until(lambda: dead_letters(db)[seq]["status"] == "RESOLVED", 60, "delivery")


def test_the_first_look_of_the_readme_is_what_status_and_doctor_print(
    agent: AgentFactory, backend: Backend, frontend: Frontend
) -> None:
    text = section("A first look")
    ((command, said),) = sessions(text)
    example().serve(frontend)
    running = agent(FRONTEND_SYNC_INTERVAL_SEC=60, SYNC_DELETE_AFTER_SEC=3600)
    env = agent.env(RUNTIME_DIRECTORY=running.runtime_dir, FRONTEND_SYNC_INTERVAL_SEC=60)
    backend.end_call()

    assert command == "sudo serversync status"
    wait_until(
        lambda: shape(run_once(env, args=("status",)).stdout) == shape(said), what="that screen"
    )

    frontend.require_token = "s3cret"
    backend.enqueue("schedule", {"name": "summer"})
    found = re.search(r"^    (failed   outage: .*)\n    ( +sudo .*)$", text, re.M)
    assert found
    running.wait_log("outage, nothing is lost")
    lines = shape(run_once(env, args=("doctor",)).stdout)
    at = lines.index(shape(found[1])[0])
    assert lines[at + 1] == shape(found[2])[0]


def test_the_settings_of_the_manual_are_shown_as_it_shows_them(
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
    ((command, said),) = sessions(section("SETTINGS", MANUAL))

    assert command == "sudo serversync settings"
    assert shape(agent.once("settings").stdout) == shape(said)


def test_the_doctor_of_the_manual_is_shown_as_it_shows_it(
    agent: AgentFactory, backend: Backend, frontend: Frontend, db: Database
) -> None:
    (said,) = (said for command, said in sessions(MANUAL) if "doctor" in command)
    running = agent()
    refused(backend, frontend)
    wait_until(lambda: dead_letters(db), what="a dead letter")
    frontend.stop()
    backend.enqueue("schedule", {"name": "summer"})
    running.wait_log("outage, nothing is lost")

    done = agent.once("doctor", RUNTIME_DIRECTORY=running.runtime_dir)

    assert f"The checks: {', '.join(serversync.CHECKS)}." in " ".join(MANUAL.split())
    *wanted, verdict = shape(said)  # of what the test has made; the machine may add to it
    lines = shape(done.stdout)
    printed = [line for n in wanted[::2] for line in lines[lines.index(n) :][:2]]
    assert printed == wanted
    assert verdict == "N checks failed, N warning"


# --- dead letters, admin interface, metrics, journal --------------------------------------------


def test_the_states_and_refusals_of_dead_letters_are_documented() -> None:
    text = section("DEAD LETTERS", MANUAL)
    states = re.search(r"check \(status in \(([^)]*)\)\)", serversync.TABLES)
    assert states
    shown = [cell.strip("`") for cell in first_cells(text, "Status")]
    assert shown == re.findall(r"\w+", states[1])

    refused = {re.sub(r"\d+", "{}", words) for words in quoted(text)}
    assert {re.sub(r"\{\w+\}", "{}", words) for words in serversync.AGAINST.values()} <= refused


def test_every_route_error_and_metric_of_the_admin_interface_is_documented_and_no_other() -> None:
    routes = (
        f"{method} {pattern.replace('([^/]+)', '{}')}"
        for pattern, methods in serversync.ROUTES.items()
        for method in methods
    )
    shown = [quoted(cell)[0] for cell in first_cells(ADMIN, "Request")]
    assert sorted(re.sub(r"\{\w+\}", "{}", route) for route in shown) == sorted(routes)
    codes = {text for text in program_texts() if re.fullmatch(r"SYS_[A-Z_]+", text)}
    assert {cell.strip("`") for cell in first_cells(ADMIN, "Code")} == codes
    for where in (serversync.ADMIN_LISTEN, "X-Requested-With"):
        assert where in ADMIN
    terms = re.findall(r"^(`.*`)\n\n:   ", section("METRICS", ADMIN), re.M)
    metrics = {re.sub(r"\{.*\}", "", name) for name in quoted(" ".join(terms))}
    assert metrics == {*serversync.METRICS}


def test_every_event_and_field_of_the_journal_is_documented() -> None:
    events, names = {"log_dropped"}, {"EVENT"}  # not by say()
    events |= {event for _, _, event, _ in serversync.TROUBLES}
    for event, keywords in calls_of_say():
        events |= set(texts_in(event))
        names |= {keyword.arg for keyword in keywords if keyword.arg and keyword.arg.isupper()}
    names |= {name for name in shared_fields() if name.isupper()}
    text = section("THE JOURNAL", MANUAL)
    listed = re.search(r"^EVENT is one of: ([^.]*)\.", text, re.M)

    assert listed
    assert {word.strip() for word in listed[1].split(",")} == events
    assert {name for cell in first_cells(text, "Field") for name in quoted(cell)} == names


def test_every_query_of_the_manual_runs_and_its_backup_brings_back_the_dead_letters(
    agent: AgentFactory, backend: Backend, frontend: Frontend, db: Database
) -> None:
    refused(backend, frontend)
    backend.end_call()
    assert agent.once().returncode == 1
    before = db.rows("select * from serversync.dead_letters"), db.rows("table serversync.counters")
    text = section("BACKUP AND RESTORE", MANUAL)
    lines = re.findall("^    (sudo -u postgres .*)$", text, re.M)

    assert ["pg_dump" in line for line in lines] == [True, False, False]
    typed = "; ".join([*lines, "rm serversync.sql"]).replace("voicebot", db.name)
    said = db.paste(f"export PGPORT={db.cluster.port}; ({typed}) 2>&1")
    assert "DROP SCHEMA" in said and not re.search("error", said, re.I), said

    after = db.rows("select * from serversync.dead_letters"), db.rows("table serversync.counters")
    assert after == before and len(after[0]) == 1
    call = backend.end_call()
    assert agent.once(SYNC_DELETE_AFTER_SEC=60).returncode == 0
    assert call.call_log_id in frontend.files

    blocks = re.findall(r"^```sql\n(.*?)^```$", "".join(PAGES.values()), re.M | re.S)
    plain = (re.sub(r"--.*", "", block) for block in blocks)
    statements = [s.strip() for block in plain for s in block.split(";\n") if s.strip()]
    assert len(statements) > 5
    for statement in statements:
        db.execute(statement)


# --- the rest of the files ----------------------------------------------------------------------


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

"""`serversync doctor`: each thing that it looks at, broken on purpose, and mended with its hint."""

import json
import os
import re
import shutil
import signal
import stat
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest

from agent import PROGRAM, PYTHON, REPOSITORY, Agent, AgentFactory, run_once, write_env_file
from backend import Backend, Call
from desk import Terminal, bury
from frontend import Frontend, Reply
from ledger import dead, waiting
from machine import NOBODY, booted, in_mounts, needs_root
from pg import Database
from pi import Pi
from proxy import Proxy
from serversync import BY_HAND, CHECKS
from test_blocking import corrupt, enqueue_large
from test_memory import AGENT, COMPILE, python
from test_tls import SERVER, Authority, context
from waiting import wait_until

LOOK = "/api/number-groups"
GROUPS: dict[str, Any] = {"ok": True, "callerGroups": []}
MARKER = ".serversync-root"
TRASH = ".serversync-trash"
NAMES = [*CHECKS]  # test_docs.py compares them with the manual
# What the machine that runs the tests may lack.
MACHINE = {"disk", "unit", "memory cgroup"}
# Not this machine, and refused at once, without asking a name server.
ELSEWHERE = "http://255.255.255.255"
DAY = 86400.0
# No line to paste restarts anything but the service, ends calls or takes away what others wrote;
# and each is whole: nothing stands for a name that must be put in.
HARM = re.compile(r"revert|reboot|restart (?!serversync)|\bUSER\b")


@dataclass(frozen=True)
class Check:
    name: str
    status: str
    text: str
    hint: str


@dataclass(frozen=True)
class Report:
    """What `doctor --json` printed; looked through for what each report must be."""

    code: int
    verdict: str
    checks: list[Check]

    @staticmethod
    def of(done: subprocess.CompletedProcess[str]) -> "Report":
        assert done.stdout, f"it ended with {done.returncode}: {done.stderr}"
        said = json.loads(done.stdout)
        report = Report(done.returncode, said["verdict"], [Check(**c) for c in said["checks"]])
        seen = list(dict.fromkeys(check.name for check in report.checks))
        assert seen == NAMES, "a check is missing"
        for check in report.checks:
            assert check.status in ("ok", "warning", "failed", "skipped"), check
            assert check.text, check
            assert bool(check.hint) == (check.status in ("warning", "failed")), check
            assert not HARM.search(check.hint), check
        failed, warned = report.named("failed"), report.named("warning")
        assert report.code == (1 if failed else 0)
        assert (report.verdict == "all is well") == (not failed and not warned)
        return report

    def named(self, status: str) -> list[str]:
        return [check.name for check in self.checks if check.status == status]

    def of_name(self, name: str) -> list[Check]:
        return [check for check in self.checks if check.name == name]

    def __getitem__(self, name: str) -> Check:
        (check,) = self.of_name(name)
        return check

    def expect(self, name: str, status: str, *words: str) -> Check:
        """The one finding of a check, which says these words."""
        check = self[name]
        assert check.status == status, check
        for word in words:
            assert word in check.text, check
        return check


Examine = Callable[..., Report]


@pytest.fixture
def examine(agent: AgentFactory, frontend: Frontend) -> Examine:
    """Runs the doctor beside a running agent, or alone; settings as for an agent."""
    frontend.pages[LOOK] = GROUPS

    def run(beside: Agent | None = None, prefix: Sequence[str] = (), **settings: Any) -> Report:
        env = agent.env(**settings)
        if beside is not None:
            env["RUNTIME_DIRECTORY"] = str(beside.runtime_dir)
        return Report.of(run_once(env, args=("doctor", "--json"), prefix=prefix))

    return run


@pytest.fixture
def settled(agent: AgentFactory, backend: Backend) -> Call:
    """A database that an agent has prepared, and a call that it has delivered."""
    call = backend.end_call(events=0, seconds=0.1)
    assert agent.once().returncode == 0
    assert not call.directory.exists()
    return call


def old_call(backend: Backend, name: str, age: float, size: int = 1000) -> Path:
    """A recording on the disk that was never enqueued."""
    directory = backend.recordings_dir / name
    directory.mkdir()
    (directory / "mixed.wav").write_bytes(bytes(size))
    for path in (directory / "mixed.wav", directory):
        os.utime(path, (time.time() - age,) * 2)
    return directory


# -- the whole ------------------------------------------------------------------------------------


def test_a_healthy_installation_is_well(
    agent: AgentFactory, frontend: Frontend, examine: Examine, settled: Call, db: Database
) -> None:
    # A list that is longer than what is read of it is a good answer, too.
    groups = [{"id": str(n), "phoneNumbers": ["+819012345678"] * 20} for n in range(8000)]
    answer = {"ok": True, "callerGroups": groups}
    frontend.pages[LOOK] = Reply(headers={"Date": formatdate(usegmt=True)}, body=answer)
    running = agent()
    running.wait_sentence("all delivered")
    # Letters that need nobody any more. (Its next look would find that one has no entry.)
    running.signal(signal.SIGSTOP)
    for letter, status in zip(bury(db, [{}, {}]), ("RETRYING", "RESOLVED"), strict=True):
        query = "UPDATE serversync.dead_letters SET status = %s WHERE id = %s"
        db.execute(query, (status, letter))

    before = len(frontend.of_kind("other"))
    report = examine(running)
    running.signal(signal.SIGCONT)

    assert report.code == 0, report
    assert set(report.named("failed") + report.named("warning")) <= MACHINE, report
    assert set(report.named("skipped")) <= {"certificate", "settings", "unit"}, report
    report.expect("agent", "ok", "running since")
    report.expect("dead letters", "ok", "none")
    report.expect("recordings", "ok", "deletable", "the service may see it otherwise")
    assert {request.method for request in frontend.of_kind("other")[before:]} == {"GET"}


def test_the_text_has_a_line_and_a_hint_for_each_finding_and_a_verdict(
    pi: Pi, examine: Examine, settled: Call
) -> None:
    pi.db.execute("ALTER TABLE sync_outbox DISABLE TRIGGER serversync_wake")
    report = examine()

    done = pi.once("doctor", code=1)

    lines = done.stdout.splitlines()
    assert lines[-1] == report.verdict
    at = lines.index("warning  trigger: serversync_wake is disabled: polling only")
    assert lines[at + 1].strip() == (
        f"sudo -u postgres psql -d 'port={pi.db.cluster.port} dbname={pi.db.name}'"
        " -c 'alter table \"public\".sync_outbox enable trigger serversync_wake'"
    )
    assert "\033" not in done.stdout
    assert done.stderr == ""
    assert lines[-1].startswith("1 check failed, 1 warning")  # no agent runs
    # On a terminal only what is not well is shown; and briefly the worst.
    for options, ok in (((), False), (("--all",), True)):
        with Terminal(pi.agent.env(), "doctor", *options, rows=60, columns=200) as terminal:
            assert terminal.wait() == 1
            text = terminal.screen.text
            assert "failed   agent: no agent runs" in text
            assert ("ok       index: " in text, "skipped" in text) == (ok, ok), text
    brief = pi.once("doctor", "--brief", code=1).stdout
    assert re.fullmatch(r"1 check failed.*; agent: no agent runs\n", brief)


MANY_ROWS = """
    WITH pending AS (
        INSERT INTO sync_outbox (entity_type, entity_id, payload)
        SELECT 'recording_file', gen_random_uuid(),
               jsonb_build_object('filePath', 'storage/recordings/pending-' || n || '/mixed.wav')
        FROM generate_series(1, %(count)s) n)
    INSERT INTO serversync.dead_letters (outbox_id, original_topic, entity_id, payload, rest,
                                         error_code, error_message, attempts)
    SELECT 1000000 + n, 'recording_file', gen_random_uuid(),
           jsonb_build_object('filePath', 'storage/recordings/dead-' || n || '/mixed.wav'), '{}',
           'BAD_REQUEST', 'no', 1
    FROM generate_series(1, %(count)s) n
"""
MANY_DIRECTORIES = """
    cp -a {root}/.serversync-root /tmp/marker.$$
    mount -t tmpfs none {root}
    mv /tmp/marker.$$ {root}/.serversync-root
    cd {root}
    for kind in pending dead orphan
    do seq -f "$kind-%.0f" {count} | xargs mkdir
    done
    ls | xargs touch -d '2 days ago'
    cd /
"""


@needs_root
@pytest.mark.slow
def test_memory_stays_flat_with_very_many_directories_letters_and_rows(
    pi: Pi, settled: Call, tmp_path: Path
) -> None:
    compile_it = [str(REPOSITORY / PYTHON), "-c", COMPILE, str(REPOSITORY / PROGRAM)]
    subprocess.run([*compile_it, tmp_path / "serversync.pyc"], check=True)
    peaks = []
    for count in (10, 100_000):
        pi.db.execute("DELETE FROM sync_outbox; DELETE FROM serversync.dead_letters")
        pi.db.execute(MANY_ROWS, {"count": count})
        script = MANY_DIRECTORIES.format(root=pi.backend.recordings_dir, count=count)
        env = pi.agent.env(SYNC_FILE_GRACE_SEC=0)
        done = python(AGENT, str(tmp_path), "doctor", env=env, prefix=in_mounts(script))
        peaks.append(done[1])
    assert peaks[1] <= 1.1 * peaks[0], peaks


# -- what breaks ----------------------------------------------------------------------------------


@dataclass
class Box:
    """All that can be broken."""

    pi: Pi
    proxy: Proxy
    authority: Authority
    directory: Path
    running: Agent | None = None

    def run(self, sentence: str, **settings: Any) -> None:
        self.running = self.pi.agent(**settings)
        self.running.wait_sentence(sentence)

    def answer(self, reply: Reply, page: Any = None) -> None:
        """To everything."""
        frontend = self.pi.frontend
        frontend.pages[LOOK] = page or reply
        frontend.on_entries = frontend.on_file = lambda request: reply
        if page is None:
            frontend.on_head = lambda request: reply  # before the body is read
        self.pi.backend.enqueue()
        self.run("nothing gets through")

    def fail(self, reply: Reply) -> None:
        """The first entry alone."""
        self.pi.poisoned(reply)
        self.run("1 retrying")

    def files_fail(self, reply: Reply) -> None:
        self.pi.frontend.on_file = lambda request: reply
        self.pi.backend.end_call(events=0, seconds=0.1)
        self.run("1 retrying")

    def certified(self, begin: float, end: float, known: bool = True) -> dict[str, Any]:
        """TLS, with a certificate from then to then, in days from now."""
        times = (time.gmtime(time.time() + days * DAY) for days in (begin, end))
        valid = tuple(time.strftime("%y%m%d%H%M%SZ", moment) for moment in times)
        pair = self.authority.issue(f"server{begin}{end}", SERVER, (valid[0], valid[1]))
        self.pi.frontend.tls = context(pair)
        url = self.pi.frontend.url.replace("http:", "https:")
        ca = {"SYNC_CA_FILE": self.authority.ca.cert} if known else {}
        return {"FRONTEND_BASE_URL": url, **ca}

    def sql(self, statement: str) -> None:
        self.pi.db.execute(statement)

    def as_admin(self, statement: str) -> None:
        with self.pi.db.admin() as admin:
            admin.execute(statement)

    def stop_postgres(self) -> dict[str, Any]:
        self.proxy.stop()
        return {"DATABASE_URL": f"postgresql://voicebot@127.0.0.1:{self.proxy.port}/voicebot"}

    def hang(self) -> dict[str, Any]:
        self.pi.frontend.pages[LOOK] = Reply(stall=60)
        return {"SYNC_TIMEOUT_SEC": 1}

    def read_only(self) -> None:
        name = self.pi.db.name
        self.as_admin(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
        self.running = self.pi.agent()
        self.running.wait_log("read-only")

    def other_url(self, old: str, new: str) -> dict[str, Any]:
        return {"DATABASE_URL": self.pi.db.url.replace(old, new)}

    def http_port(self) -> dict[str, Any]:
        self.pi.frontend.idle_timeout = 0.5  # it waits for the end of what it takes for a head
        return {"FRONTEND_BASE_URL": self.pi.frontend.url.replace("http", "https")}

    def change_uploaded(self) -> None:
        call = self.pi.backend.end_call(call_id="a changed one", events=0, seconds=0.1)
        self.pi.once(SYNC_DELETE_AFTER_SEC=3600)
        with call.wav.open("ab") as wav:
            wav.write(b"more")
        self.pi.agent.once()

    def old_entry(self) -> None:
        seq = self.pi.backend.enqueue()
        query = "UPDATE sync_outbox SET created_at = now() - interval '2 hours' WHERE id = %s"
        self.pi.db.execute(query, (seq,))

    @property
    def root(self) -> Path:
        return self.pi.backend.recordings_dir


@pytest.fixture
def box(
    pi: Pi, proxy: Proxy, authority: Authority, tmp_path: Path, examine: Examine, settled: Call
) -> Box:
    return Box(pi, proxy, authority, tmp_path)


Broken = tuple[str, Callable[[Box], Any], str, str, str, str]
URL = r"http://127\.0\.0\.1:\d+"
CURL = rf"curl -fsSi -m 30 {URL}/api/number-groups"
ENV = "sudo nano /etc/serversync.env; sudo systemctl restart serversync"
TOKEN = "sudo sh -c 'umask 077; nano /etc/serversync.token'; sudo systemctl re"
NGINX = r"client_max_body_size 200m;.*nginx -s reload"
CERT = "openssl s_client -connect 127.0.0.1:"
# What is broken; what it is called, the check, the words of its finding, and the line beside it.
BROKEN: list[Broken] = [
    ("wrong token", lambda b: b.answer(Reply(401, body={"error": "no"})),
     "outage", "failed", "nothing gets through since .*HTTP 401", TOKEN),
    ("token for reading only", lambda b: b.answer(Reply(403), page=GROUPS),
     "token", "failed", "accepted here, but not with the agent's entries", TOKEN),
    ("portal", lambda b: b.answer(Reply(body="<html>Welcome to the hotel</html>")),
     "outage", "failed", "not our frontend", f"{CURL}; {ENV}"),
    ("another program", lambda b: b.answer(Reply(body={"status": "up"})),
     "frontend", "failed", "not our frontend", f"{CURL}; {ENV}"),
    ("login page", lambda b: b.answer(Reply(302, {"Location": "/login"})),
     "frontend", "failed", "redirect", f"{CURL}; {ENV}"),
    ("not deployed", lambda b: b.answer(Reply(404, body="<html>")),
     "outage", "failed", "wrong base URL", f"{CURL}; {ENV}"),
    ("413 for all", lambda b: b.answer(Reply(413)),
     "outage", "failed", r"HTTP 413 to \d+ bytes", NGINX),
    ("413 for recordings", lambda b: b.files_fail(Reply(413)),
     "backlog", "warning", r"1 entry \(TOO_LARGE; .*HTTP 413 to [\d.]+ (bytes|kB)", NGINX),
    ("507 for recordings", lambda b: b.files_fail(Reply(507)),
     "backlog", "warning", r"recording_file\) retried: .*507", "# the frontend's disk is full"),
    ("one poisonous entry", lambda b: b.fail(Reply(500)),
     "backlog", "warning", r"1 entry \(FRONTEND_5XX; the first is \d+, schedule\)", CURL),
    ("expired", lambda b: b.certified(-20, -10),
     "frontend", "failed", "certificate has expired", f"timedatectl; {CERT}"),
    ("not yet valid", lambda b: b.certified(10, 20),
     "frontend", "failed", "certificate is not yet valid", "sudo timedatectl set-ntp true"),
    ("unknown CA", lambda b: b.certified(-1, 20, known=False),
     "frontend", "failed", "local issuer|self.signed", rf"{CERT}.*SYNC_CA_FILE"),
    ("https to an http port", lambda b: b.http_port(),
     "frontend", "failed", "TLS with the frontend failed", f"{ENV} +# FRONTEND_BASE_URL: http"),
    ("no such name", lambda b: {"FRONTEND_BASE_URL": "http://nowhere.invalid"},
     "frontend", "failed", "cannot be reached", "getent hosts nowhere.invalid; "),
    ("hanging", lambda b: b.hang(), "frontend", "failed", "did not answer in time", CURL),
    ("recordings gone", lambda b: shutil.rmtree(b.root),
     "recordings", "failed", "No such file", "findmnt -T /"),
    ("another box's disk", lambda b: (b.root / MARKER).write_text("0" * 32 + "\n"),
     "recordings", "failed", "another one", "findmnt -T /"),
    ("an old backlog", lambda b: b.old_entry(),
     "backlog", "warning", r"1 pending.*2\.0 h", "^serversync status$"),
    ("a dead letter", lambda b: bury(b.pi.db, [{}]),
     "dead letters", "warning", "1 entry", "^serversync dlq list$"),
    ("a recording that changed after its upload", lambda b: b.change_uploaded(),
     "deletions", "failed", "1 uploaded recording.*changed", "recordings/a changed one"),
    ("PostgreSQL stopped", lambda b: b.stop_postgres(),
     "database", "failed", "not there", "sudo systemctl start postgresql"),
    ("no such database", lambda b: b.other_url(b.pi.db.name, "another"),
     "database", "failed", 'database "another" does not exist', ENV),
    ("no such role", lambda b: b.other_url("voicebot@", "nobody-at-all@"),
     "database", "failed", 'role "nobody-at-all" does not exist', "sudo serversync setup"),
    ("read-only", lambda b: b.read_only(),
     "database", "failed", "it is read-only", "sudo -u postgres psql .*reset default_transaction"),
    ("schema dropped", lambda b: b.sql("DROP SCHEMA serversync CASCADE"),
     "schema", "failed", "version 0", "sudo serversync setup"),
    ("schema of a newer program",
     lambda b: b.sql("INSERT INTO serversync.schema_version VALUES (99)"),
     "schema", "failed", "99", "apt"),
    ("a table of ours dropped", lambda b: b.sql("DROP TABLE serversync.uploads CASCADE"),
     "deletions", "failed", "cannot be checked", "^sudo serversync setup$"),
    ("what setup cannot mend",
     lambda b: b.sql("ALTER TABLE serversync.uploads RENAME COLUMN error TO was_error"),
     "deletions", "failed", "cannot be checked", "^(?!.*setup).*journalctl"),
    ("no outbox", lambda b: b.sql("DROP TABLE sync_outbox"), "rights", "failed", "sync_outbox", ""),
    ("trigger dropped", lambda b: b.sql("DROP TRIGGER serversync_wake ON sync_outbox"),
     "trigger", "warning", "not there", "sudo serversync setup"),
    ("trigger disabled", lambda b: b.sql("ALTER TABLE sync_outbox DISABLE TRIGGER serversync_wake"),
     "trigger", "warning", "disabled", "sudo -u postgres psql .*enable trigger"),
    ("index dropped", lambda b: b.sql("DROP INDEX sync_outbox_serversync_pending"),
     "index", "warning", "not there", "sudo serversync setup"),
    ("index not valid", lambda b: b.as_admin(
        "UPDATE pg_index SET indisvalid = false"
        " WHERE indexrelid = 'sync_outbox_serversync_pending'::regclass"),
     "index", "warning", "not valid", "sudo serversync setup"),
    ("typo", lambda b: {"SYNC_BACH_SIZE": 1},
     "configuration", "failed", "did you mean SYNC_BATCH_SIZE", ENV),
]  # fmt: skip
# Where pasting the line here mends it; the others are another machine's, or a person's.
PASTED = {"read-only", "schema dropped", "trigger dropped", "trigger disabled", "index dropped",
          "index not valid"}  # fmt: skip


@pytest.mark.parametrize(
    ("what", "breaks", "name", "status", "words", "line"), BROKEN, ids=[row[0] for row in BROKEN]
)
def test_what_is_broken_is_named_with_the_line_that_mends_it_or_whose_it_is(
    box: Box,
    examine: Examine,
    what: str,
    breaks: Callable[[Box], Any],
    name: str,
    status: str,
    words: str,
    line: str,
) -> None:
    settings = breaks(box)
    settings = settings if isinstance(settings, dict) else {}

    report = examine(box.running, **settings)

    found = report.of_name(name)
    told = [c for c in found if c.status == status and re.search(words, c.text)]
    assert told and re.search(line, told[0].hint), found
    assert "ok" not in {check.status for check in found}
    if report.code == 0:
        assert status == "warning"
    syntax = subprocess.run(["sh", "-n", "-c", told[0].hint], capture_output=True, check=False)
    assert syntax.returncode == 0, told[0].hint
    if box.running is not None:
        assert "Traceback" not in box.running.log()
    if what in PASTED:
        mend(box.pi, told[0])
        again = examine(box.running, **settings).of_name(name)
        assert {check.status for check in again} == {"ok"}, again


def test_a_role_that_is_dropped_while_it_sends_is_named_and_leaves_no_traceback(
    examine: Examine, settled: Call, agent: AgentFactory, db: Database
) -> None:
    url: dict[str, Any] = {"DATABASE_URL": db.url.replace("voicebot@", "sender@")}
    with db.admin() as admin:
        admin.execute("CREATE ROLE sender LOGIN SUPERUSER")
        running = agent(SYNC_POLL_INTERVAL_SEC=0.2, **url)
        running.wait_sentence("all delivered")
        admin.execute("DROP ROLE sender")
        wait_until(lambda: "all delivered" not in running.state()["sentence"], what="the trouble")
    hint = examine(running, **url).expect("database", "failed", "sender", "does not exist").hint
    assert hint == "sudo serversync setup" and "Traceback" not in running.log()


# -- configuration --------------------------------------------------------------------------------


def test_a_bad_configuration_fails_with_each_problem_and_the_rest_is_skipped(
    examine: Examine,
) -> None:
    report = examine(SYNC_BATCH_SIZE="many", SYNC_TIMEOUT_SECS=3, DATABASE_URL=None)

    problems = report.of_name("configuration")
    assert {check.status for check in problems} == {"failed"}
    text = " ".join(check.text for check in problems)
    for name in ("SYNC_BATCH_SIZE", "SYNC_TIMEOUT_SECS", "DATABASE_URL"):
        assert name in text
    assert "/etc/serversync.env" in problems[0].hint
    assert report.named("skipped") == NAMES[1:]
    assert "configuration" in report["database"].text


def test_settings_that_are_not_by_default_are_shown_and_no_secret(
    agent: AgentFactory, db: Database, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text("top-secret-token\n")
    url = db.url.replace("voicebot@", "voicebot:hidden-word@") + "?application_name=x"
    in_file = agent.env(DATABASE_URL=url, SYNC_TOKEN_FILE=token, SYNC_BATCH_SIZE=7)
    settings = tmp_path / "settings"
    settings.write_text("".join(f'{name}="{value}"\n' for name, value in in_file.items()))
    env = {"SYNC_RETRY_MAX": "5"}

    for form in ((), ("--json",)):
        args = ("--env-file", str(settings), "doctor", *form)
        done = run_once(env, args=args, env_file=False)

        assert "top-secret-token" not in done.stdout + done.stderr
        assert "hidden-word" not in done.stdout + done.stderr
    found = Report.of(done)["configuration"].text
    for words in ("SYNC_BATCH_SIZE 7", "SYNC_RETRY_MAX 5", "DATABASE_URL", f"dbname={db.name}"):
        assert words in found
    assert "SYNC_TOKEN (not shown)" in found
    assert "SYNC_RETRY_HOURS" not in found


@needs_root
def test_what_only_root_can_read_fails_although_root_asks(
    agent: AgentFactory, public: Path
) -> None:
    """The agent's user could not read it either: typed as root, the doctor becomes that user."""
    token = public / "token"
    token.write_text("some-token\n")
    token.chmod(0o600)
    settings = write_env_file(public / "settings", agent.env(SYNC_TOKEN_FILE=token))
    running = agent(prefix=NOBODY, runtime_dir=public)
    wait_until(lambda: running.state()["pid"], what="the agent's state")

    args = ("--env-file", str(settings), "doctor", "--json")
    done = run_once({"RUNTIME_DIRECTORY": str(public)}, args=args, env_file=False)

    Report.of(done).expect("configuration", "failed", str(token), "Permission denied")


# -- database -------------------------------------------------------------------------------------


def mend(pi: Pi, check: Check) -> None:
    """What setup does is done by the superuser."""
    if check.hint == "sudo serversync setup":
        pi.once("setup", "--admin-url", pi.db.cluster.url(pi.db.name, user="postgres"))
    else:
        pi.db.paste(check.hint)


def test_rights_that_are_missing_are_named_with_what_is_lost_and_given_by_the_hints(
    pi: Pi, examine: Examine, settled: Call
) -> None:
    pi.db.execute("REVOKE ALL ON sync_outbox, recordings FROM voicebot")
    pi.db.execute("GRANT SELECT ON sync_outbox TO voicebot")

    found = examine().of_name("rights")

    hint = "sudo serversync setup"
    assert {(check.status, check.hint) for check in found} == {("failed", hint), ("warning", hint)}
    failed = " ".join(check.text for check in found if check.status == "failed")
    assert "processed_at" in failed and "recordings" in failed
    warned = " ".join(check.text for check in found if check.status == "warning")
    assert "delete on sync_outbox" in warned and "insert on sync_outbox" in warned
    mend(pi, found[0])
    examine().expect("rights", "ok", "voicebot")

    pi.db.execute("REVOKE DELETE ON ivr_nodes FROM voicebot")
    pi.db.execute("REVOKE USAGE ON SEQUENCE sync_outbox_id_seq FROM voicebot")
    pi.agent.once()
    found = examine().of_name("rights")
    assert {(check.status, check.text) for check in found} == {
        ("warning", "no right to delete on ivr_nodes: IVR flows are not applied"),
        ("warning", f"no right to usage on sync_outbox: {BY_HAND}"),
    }
    mend(pi, found[0])
    examine().expect("rights", "ok", "voicebot")

    # Tables of the backend's, although ours stand in.
    pi.db.execute("DROP TABLE recordings, system_settings")
    found = examine().of_name("rights")
    assert [check.status for check in found] == ["warning", "warning"]
    assert "recordings" in found[0].text and "system_settings" in found[1].text
    pi.db.execute("CREATE SCHEMA other; CREATE TABLE other.recordings ()")
    assert 'Table "other.recordings"' in pi.db.paste(found[0].hint)


def test_what_needs_the_schema_or_the_frontend_is_skipped_without_it(
    pi: Pi, examine: Examine
) -> None:
    pi.frontend.stop()

    report = examine()

    assert report.expect("schema", "failed").hint == "sudo serversync setup"
    assert re.match(CURL, report.expect("frontend", "failed", "cannot be reached").hint)
    for name, missing in (
        *((each, "schema") for each in ("recordings", "orphans", "deletions")),
        *((each, "frontend") for each in ("token", "clock")),
    ):
        report.expect(name, "skipped", missing)

    # With the schema, and no recording yet: a directory that nobody marked stays unmarked.
    pi.once()
    examine().expect("recordings", "skipped", "not marked")
    assert list(pi.backend.recordings_dir.iterdir()) == []
    assert pi.db.value("SELECT root_id FROM serversync.sender") is None


# -- the frontend ---------------------------------------------------------------------------------


def test_a_token_is_accepted_refused_missing_or_only_the_service_s(
    pi: Pi, examine: Examine, settled: Call
) -> None:
    examine().expect("token", "ok", "none is set")
    pi.frontend.require_token = "right-token"
    mine: dict[str, Any] = {"SYNC_TOKEN": "right-token"}
    examine(**mine).expect("token", "ok", "accepted")
    wrong = examine(SYNC_TOKEN="wrong-token")
    wrong.expect("frontend", "ok")
    wrong.expect("token", "failed", "401")
    examine().expect("token", "failed", "none is set")
    # Others may read it on the way.
    examine(FRONTEND_BASE_URL=ELSEWHERE, **mine).expect("certificate", "warning", "TLS")
    examine(FRONTEND_BASE_URL=ELSEWHERE).expect("certificate", "skipped", "http")

    running = pi.agent(**mine)
    pi.backend.enqueue()
    running.wait_sentence("all delivered; last: ")
    report = examine(running)
    report.expect("token", "skipped", "the service has one of its own")
    report.expect("frontend", "ok")
    assert report.code == 0, report
    examine(running, SYNC_TOKEN="wrong-token").expect("token", "failed", "401")
    # While entries get through, a frontend may lack the pages of its settings.
    pi.frontend.pages[LOOK] = Reply(404, body="<html>")
    hint = examine(running, **mine).expect("frontend", "warning", "HTTP 404").hint
    assert re.match(f"{CURL};", hint), "there is no file to take the token from"
    examine(**mine).expect("frontend", "failed", "HTTP 404")  # nothing says that it is there
    # Where nothing gets through, the missing token may be why.
    pi.frontend.pages[LOOK] = GROUPS
    pi.frontend.require_token = "another-token"
    pi.backend.enqueue_many(3)
    wait_until(lambda: running.state()["outages"], what="the outage", state=running.log)
    examine(running).expect("token", "failed", "401", "none is set here")


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca") / "ours", "our CA")


def test_a_certificate_that_ends_soon_and_a_clock_that_is_wrong_are_measured(
    box: Box, examine: Examine
) -> None:
    def dated(seconds: float, **settings: Any) -> Report:
        date = formatdate(time.time() + seconds, usegmt=True)
        box.pi.frontend.pages[LOOK] = Reply(headers={"Date": date}, body=GROUPS)
        return examine(**settings)

    dated(0).expect("clock", "ok")
    assert "timedatectl" in dated(100).expect("clock", "warning", "behind").hint
    dated(-1000).expect("clock", "warning", "ahead of")
    report = dated(-1000, **box.certified(-10, 60.5))
    report.expect("clock", "failed", "ahead of")
    report.expect("certificate", "ok", "60 days")
    report.expect("frontend", "ok")
    soon = examine(**box.certified(-10, 5.5))
    assert "openssl" in soon.expect("certificate", "warning", "5 days").hint
    soon.expect("frontend", "ok")


# -- recordings -----------------------------------------------------------------------------------


@needs_root
def test_a_directory_that_this_user_may_not_write_to_is_not_deletable(
    examine: Examine, settled: Call, backend: Backend
) -> None:
    root = backend.recordings_dir
    root.chmod(0o755)
    check = examine(prefix=NOBODY).expect("recordings", "failed", "may not write there")
    assert "setup --recordings" in check.hint and str(root) in check.hint

    root.chmod(0o777)
    (root / TRASH).chmod(0o777)
    call = old_call(backend, "call of root", 10)
    call.chmod(0o755)
    examine(prefix=NOBODY).expect("recordings", "failed", "call of root", "755", "65534")

    call.chmod(0o777)
    examine(prefix=NOBODY).expect("recordings", "ok", "user 65534")

    root.chmod(0o1777)
    os.chown(root, 1, 1)
    hint = examine(prefix=NOBODY).expect("recordings", "failed", "sticky").hint
    # Who pastes the line opens nothing that its owner has put there meanwhile.
    (others := root.with_name("others")).mkdir()
    others.chmod(0o1777)
    root.rename(root.with_name("was"))
    root.symlink_to(others)
    line = hint.partition(";")[0].replace("-u '#1'", "setpriv --reuid=1 --clear-groups")
    subprocess.run(["sh", "-c", line.removeprefix("sudo ")], check=False)
    assert "chmod -t" in line and others.stat().st_mode & stat.S_ISVTX


@needs_root
def test_a_trash_or_a_call_on_another_device_is_not_deletable(
    examine: Examine, settled: Call, backend: Backend
) -> None:
    for name in (TRASH, old_call(backend, "call", 10).name):
        mount = in_mounts(f"mount -t tmpfs none {backend.recordings_dir / name}")
        check = examine(prefix=mount).expect("recordings", "failed", "another device", name)
        assert "findmnt" in check.hint


def test_what_no_entry_knows_is_counted_and_stays(pi: Pi, examine: Examine, settled: Call) -> None:
    waiting, given_up, young = (pi.backend.end_call(events=0, seconds=0.1) for _ in range(3))
    pi.db.execute("DELETE FROM sync_outbox WHERE id = ANY(%s)", (young.seqs,))
    pi.frontend.on_file = lambda request: (
        Reply(400, {}, {"error": "no"})
        if request.file and request.file.recording_id == given_up.recording_id
        else Reply(503)
    )
    pi.agent.once()
    assert given_up.seq("recording_file") in dead(pi.db)
    assert waiting.seq("recording_file") in pi.db.pending()
    for call in (waiting, given_up):
        os.utime(call.directory, (time.time() - 2 * DAY,) * 2)
    examine().expect("orphans", "ok", "none")

    hostile = ["token='$(touch pwned)'", "x password=", ";touch pwned;'\n\x1b[2J"]
    for name in [*hostile, "\udcff\udcfe@10.0.0.1"]:
        old_call(pi.backend, name, 2 * DAY, size=100_000)
    check = examine().expect("orphans", "warning", "4 directories", "400.0 kB")

    pasted = subprocess.run(["sh", "-c", check.hint], capture_output=True, text=True, check=False)
    assert "mixed.wav" in pasted.stdout and "\x1b" not in check.text + check.hint
    assert not list(pi.backend.recordings_dir.rglob("pwned"))
    assert sum(1 for path in pi.backend.recordings_dir.iterdir() if path.name[0] != ".") == 7


@needs_root
def test_a_disk_that_fills_is_a_warning_and_then_a_failure(
    examine: Examine, settled: Call, backend: Backend
) -> None:
    def filled(kib: int) -> Report:
        root = backend.recordings_dir
        fill = f"head -c {kib}k /dev/zero >{root}/full"
        return examine(prefix=in_mounts(f"mount -t tmpfs -o size=1000k none {root}\n{fill}"))

    filled(500).expect("disk", "ok", "50 %")
    filled(900).expect("disk", "warning", "10 %")
    assert "df -h" in filled(970).expect("disk", "failed", "3 %").hint


# -- the agent and its machine --------------------------------------------------------------------


def test_no_agent_fails_and_a_standby_one_elsewhere_or_one_that_hears_nothing_is_a_warning(
    pi: Pi, examine: Examine, settled: Call, proxy: Proxy
) -> None:
    assert "systemctl start" in examine().expect("agent", "failed", "no agent").hint

    first = pi.idle(DATABASE_URL=pi.db.url_through(proxy.port))
    wait_until(lambda: first.state()["listening"], what="an agent that listens")
    report = examine(first)
    report.expect("agent", "ok", "running since")
    report.expect("notify", "ok")
    beyond = examine()  # another machine's, as far as can be seen here
    held = beyond.expect("agent", "warning", "another session holds the lock")
    assert "serversync" in pi.db.paste(held.hint)
    beyond.expect("outage", "skipped", "no running agent")
    second = pi.agent()
    second.wait_sentence("standby")
    examine(second).expect("agent", "warning", "standby")

    proxy.refuse()
    proxy.cut()
    wait_until(lambda: not first.state()["listening"], what="an agent that does not listen")
    examine(first).expect("notify", "warning", "does not listen")


@needs_root
def test_the_unit_is_as_systemd_shows_it(examine: Examine, tmp_path: Path) -> None:
    well = {
        "Result": "success",
        "NRestarts": "0",
        "WatchdogUSec": "1min",
        "LoadState": "loaded",
        "ActiveState": "active",
        "UnitFileState": "enabled",
    }
    hides = {"FragmentPath": "/etc/systemd/system/serversync.service"}
    packaged = in_mounts(
        "mount -t tmpfs none /lib/systemd/system\ntouch /lib/systemd/system/serversync.service"
    )
    for shown, status, words in (
        ({}, "ok", "enabled"),
        ({"UnitFileState": "disabled"}, "warning", "boot"),
        ({"ActiveState": "failed", "Result": "watchdog"}, "failed", "watchdog"),
        ({"WatchdogUSec": "0"}, "warning", "watchdog"),
        ({"NRestarts": "3"}, "warning", "3 times"),
        (hides, "warning", "hides the package"),
        ({"LoadState": "not-found", "UnitFileState": ""}, "skipped", "serversync.service"),
    ):
        prefix = (*packaged, *booted(tmp_path, **(well | shown)))
        examine(prefix=prefix).expect("unit", status, words)
    examine(prefix=in_mounts("mount -t tmpfs none /run")).expect("unit", "skipped", "systemd")


@needs_root
def test_a_kernel_without_the_memory_controller_or_a_limit_not_enforced_is_a_warning(
    examine: Examine, tmp_path: Path
) -> None:
    head = "#subsys_name\thierarchy\tnum_cgroups\tenabled\ncpu\t1\t1\t1\n"
    listed = tmp_path / "cgroups"
    mounts = f"mount --bind {listed} /proc/cgroups\nmount -t tmpfs none /sys/fs/cgroup"
    enable = "\necho cpuset cpu io {} >/sys/fs/cgroup/cgroup.controllers"
    for cgroups, controllers, status in (
        ("memory\t0\t90\t0\n", "pids", "warning"),  # disabled
        ("memory\t4\t90\t1\n", None, "ok"),  # version 1
        ("memory\t0\t90\t0\n", "memory pids", "ok"),  # version 2
        ("", None, "warning"),  # absent
    ):
        listed.write_text(head + cgroups)
        script = mounts + (enable.format(controllers) if controllers else "")
        check = examine(prefix=in_mounts(script)).expect("memory cgroup", status)
        assert status == "ok" or "cgroup_enable=memory" in check.hint

    # The kernel has the controller, and systemd could not write the service's limit.
    unit = {"ControlGroup": "/system.slice/serversync.service", "MemoryMax": "268435456"}
    running = booted(tmp_path, **unit)
    group = f"/sys/fs/cgroup{unit['ControlGroup']}"
    script = f"{mounts}{enable.format('memory')}\nmkdir -p {group}"
    without = examine(prefix=(*in_mounts(script), *running))
    check = without.expect("memory cgroup", "warning", "MemoryMax= is not enforced", group)
    assert check.hint == "sudo systemctl set-property serversync MemoryMax=268435456"
    enforced = examine(prefix=(*in_mounts(f"{script}\ntouch {group}/memory.max"), *running))
    enforced.expect("memory cgroup", "ok")


@pytest.mark.parametrize("entity_type", ["schedule", "recording_file"])
def test_a_corrupt_row_is_named_and_hides_nothing_else(
    pi: Pi, entity_type: str, examine: Examine, settled: Call
) -> None:
    other = pi.backend.enqueue_many(30)[0]
    bad = enqueue_large(pi.backend, entity_type)
    corrupt(pi.db, bad)
    pi.once(code=75)
    assert waiting(pi.db)[bad]["code"] == "ROW_CORRUPT"
    pi.db.execute("UPDATE sync_outbox SET processed_at = null WHERE id = %s", (other,))

    report = examine()

    report.expect("database", "ok")
    report.expect("backlog", "ok", "2 pending")
    told = [check.text for check in report.checks if check.status in ("warning", "failed")]
    assert any(re.search(rf"\b{bad}\b", text) and "corrupt" in text for text in told), told
    pi.db.paste(report["corrupt rows"].hint)
    assert pi.db.pending() == [other]
    pi.db.execute("UPDATE sync_outbox SET processed_at = null WHERE id = %s", (bad,))
    view = json.loads(pi.agent.once("status", "--json").stdout)
    assert view["database"]["ok"] and view["outbox"]["pending"] == 2
    assert "2 pending" in pi.agent.once("status").stdout
    metrics = pi.agent.once("metrics").stdout
    assert "serversync_pending_entries 2" in metrics
    assert 'serversync_waiting_entries{code="ROW_CORRUPT"} 1' in metrics

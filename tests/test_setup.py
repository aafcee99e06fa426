"""`serversync setup`, which prepares a database for a role of few rights; and who acts when root or
somebody else types a command."""

import contextlib
import json
import os
import pwd
import re
import shlex
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psycopg
import pytest

import serversync
from agent import Agent, AgentFactory, agent_env, run_once, write_env_file
from backend import Backend
from desk import Desk, Typist, assert_plain, bury, state_file, state_of
from frontend import Frontend
from ledger import receipts
from machine import STRANGER, booted, in_mounts, needs_root
from pg import OWNER, SCHEMA, Cluster, Database
from pi import Pi
from settings import example, tables
from test_state import OLD_TRIGGER, SCHEMA_V1
from waiting import wait_until
from web import a_place

OTHER_USER = "nobody"
MANUAL = Path(__file__).resolve().parent.parent / "packaging/debian/man/serversync.8.md"
INDEX = """
    SELECT i.indisvalid, pg_get_indexdef(i.indexrelid)
    FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid
    WHERE c.relname = 'sync_outbox_serversync_pending'
"""
# Whatever was written anew has another xmin; what was made anew also another oid.
CATALOGS = (
    *("pg_class", "pg_attribute", "pg_attrdef", "pg_index", "pg_constraint", "pg_trigger"),
    *("pg_proc", "pg_namespace", "pg_type", "pg_description", "pg_depend", "pg_sequence"),
    *("pg_database", "pg_db_role_setting", "pg_authid", "pg_auth_members", "pg_default_acl"),
)


def catalogs(db: Database) -> dict[str, list[Any]]:
    """Every row of every catalog that setup could write to."""
    with db.admin() as admin:
        found = {}
        for name in CATALOGS:
            query = f"SELECT xmin::text, md5({name}::text) FROM {name} ORDER BY 2"
            if name in ("pg_class", "pg_index"):  # statistics are written in place
                query = f"SELECT xmin::text, {name}.ctid::text FROM {name} ORDER BY 2"
            found[name] = admin.execute(query).fetchall()
        roots = "SELECT to_regclass('serversync.sender')::text"
        if admin.execute(roots).fetchall()[0][0]:
            sender = "SELECT xmin::text, sender::text FROM serversync.sender"
            found["sender"] = admin.execute(sender).fetchall()
        return found


@pytest.fixture
def desk(typist: Typist) -> Desk:
    return typist


class Role:
    """A role of this test's own that may not be there yet, and how one comes in as it."""

    def __init__(self, db: Database, desk: Desk) -> None:
        self.db, self.desk = db, desk
        self.name = f"Role of {db.name}"
        self.url = db.cluster.url(db.name, user=self.name)
        self.admin_url = db.cluster.url(db.name, user="postgres")

    def setup(
        self, *more: str, code: int | None = 0, **settings: Any
    ) -> subprocess.CompletedProcess[str]:
        """The superuser prepares the database for it."""
        settings = {"DATABASE_URL": self.url, **settings}
        return self.desk("setup", "--admin-url", self.admin_url, *more, code=code, **settings)

    def make(self) -> None:
        """Without any rights."""
        self.superuser(f'CREATE ROLE "{self.name}" LOGIN')

    def superuser(self, *statements: str) -> None:
        with self.db.admin() as admin:
            for statement in statements:
                admin.execute(statement)

    def steps(self) -> dict[str, str]:
        """What setup does, by the name of each step."""
        return steps(self.setup().stdout)

    def refused(self, *more: str) -> subprocess.CompletedProcess[str]:
        """Setup ends with words about the configuration, and has written nothing at all."""
        before = catalogs(self.db)
        done = self.setup(*more, code=78)
        assert catalogs(self.db) == before and done.stdout == ""
        return done

    def all_is_there(self) -> None:
        """Once more: everything is there, and nothing at all is written."""
        before = catalogs(self.db)
        again = self.steps()
        assert set(again.values()) == {"there"} and len(again) >= 9
        assert self.setup("--print-sql").stdout == ""
        after = catalogs(self.db)
        for name, rows in before.items():
            assert after[name] == rows, name

    def is_set_up(self) -> None:
        self.setup()
        self.all_is_there()


@pytest.fixture
def role(db: Database, desk: Desk) -> Iterator[Role]:
    made = Role(db, desk)
    yield made
    with db.admin() as admin:
        if admin.execute("SELECT FROM pg_roles WHERE rolname = %s", (made.name,)).rowcount:
            name = psycopg.sql.Identifier(made.name)
            admin.execute(psycopg.sql.SQL("DROP OWNED BY {} CASCADE").format(name))
            admin.execute(psycopg.sql.SQL("DROP ROLE {}").format(name))


def steps(text: str) -> dict[str, str]:
    """What was done by the name of each step."""
    found = {}
    for line in text.splitlines():
        done, _, name = line.partition(" ")
        assert done in ("made", "there", "failed"), line
        found["marker" if name.strip().startswith("marker in") else name.strip()] = done
    return found


def assert_works(pi: Pi, role: Role) -> Agent:
    """An agent with this role goes on with nothing less."""
    running = pi.agent(DATABASE_URL=role.url, SYNC_POLL_INTERVAL_SEC=3600)
    running.wait_sentence("all delivered")
    call = pi.backend.end_call()
    pi.wait_file(call)
    wait_until(lambda: not call.directory.exists(), what="its deletion", state=running.log)
    wait_until(lambda: pi.backend.upload_status(call)[0] == "uploaded", what="its status")
    pi.wait_entry(pi.backend.enqueue())  # by NOTIFY
    pi.wait_delivered()
    assert not running.lines("going on with less")
    return running


def move_backend(db: Database, schema: str, path: str = "") -> None:
    with db.admin() as admin:
        admin.execute(f"CREATE SCHEMA {schema} AUTHORIZATION voicebot")
        for table in ("sync_outbox", "recordings", "system_settings"):
            admin.execute(f"ALTER TABLE {table} SET SCHEMA {schema}")
        path = path or schema
        admin.execute(f"ALTER ROLE voicebot IN DATABASE {db.name} SET search_path = {path}")
    db.close()


# -- what it makes --------------------------------------------------------------------------------


def test_setup_makes_all_that_a_new_role_needs_and_the_second_time_changes_nothing(
    pi: Pi, role: Role
) -> None:
    made = role.steps()
    there = [name for name, done in made.items() if done == "there"]
    assert "role" not in there and "sync_outbox" not in there and "marker" not in there
    assert {"role", "sync_outbox", "recordings", "schema serversync", "marker"} <= set(made)
    (index,) = pi.db.rows(INDEX)
    assert index[0] and index[1].endswith("USING btree (id) WHERE (processed_at IS NULL)")
    assert pi.db.rows("SELECT tgenabled FROM pg_trigger WHERE tgname = 'serversync_wake'") == [
        ("O",)
    ]
    rights = pi.db.rows(
        "SELECT rolsuper, rolcreatedb, rolcreaterole, rolcanlogin, rolreplication, rolbypassrls"
        " FROM pg_roles WHERE rolname = %s",
        (role.name,),
    )
    assert rights == [(False, False, False, True, False, False)]
    root_id = (pi.backend.recordings_dir / serversync.MARKER).read_text().strip()
    with pi.db.admin() as admin:
        known = admin.execute("SELECT root_id FROM serversync.sender").fetchall()
    assert known == [(root_id,)]
    role.all_is_there()

    assert_works(pi, role)
    # Nor can it do more than it needs.
    with psycopg.connect(role.url, autocommit=True) as poor:
        for statement in (
            "UPDATE sync_outbox SET payload = '{}'",
            "TRUNCATE sync_outbox",
            "DROP TABLE sync_outbox",
            "UPDATE recordings SET file_path = ''",
            "DELETE FROM recordings",
            "UPDATE system_settings SET id = 2",
            "DELETE FROM system_settings",
            "DELETE FROM registered_numbers",
        ):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                poor.execute(statement)


def test_people_s_commands_work_with_the_role_that_setup_made(
    pi: Pi, desk: Desk, role: Role
) -> None:
    url: dict[str, Any] = {"DATABASE_URL": role.url}
    role.setup()
    entity = str(uuid.uuid4())
    pi.once("enqueue", "schedule", entity, **url, code=2)  # no payload
    enqueued = run_once(pi.agent.env(**url), args=("enqueue", "schedule", entity), stdin="{}")
    assert enqueued.stdout == "1\n"
    pi.once(**url)
    desk("replay", "--seq", "1", "--yes", **url)
    pi.once(**url)
    assert len(pi.frontend.received(entity)) == 2
    role.superuser(
        "UPDATE sync_outbox SET processed_at = now() - interval '40 days'",
        "UPDATE serversync.deliveries SET started_at = now() - interval '40 days'",
    )
    assert desk("prune", "--yes", **url).stdout == "deleted 1 row, 0 receipts, 0 letters\n"
    own = Database(pi.db.cluster, pi.db.name)  # for one who may look into another role's schema
    own.url = role.admin_url
    (letter,) = bury(own, [{"n": 1}])
    own.execute("DELETE FROM sync_outbox")
    desk("dlq", "retry", letter, **url)
    pi.once(**url)
    assert state_of(own, letter) == ("RESOLVED", 0) and len(receipts(own)) == 3
    own.close()
    for command in (["dlq", "list"], ["metrics"]):
        desk(*command, **url)


def test_printed_sql_changes_nothing_by_itself_and_all_when_psql_runs_it(
    pi: Pi, role: Role
) -> None:
    """Also where the backend is in a schema of its own."""
    move_backend(pi.db, '"Voice, bot"', path='"Voice, bot", public')
    before = catalogs(pi.db)
    script = role.setup("--print-sql").stdout
    assert catalogs(pi.db) == before and not list(pi.backend.recordings_dir.iterdir())
    assert f'create role "{role.name}"' in script and "create index concurrently" in script
    command = ["psql", "-X", "-q", "-v", "ON_ERROR_STOP=1", "-d", role.admin_url]
    ran = subprocess.run(command, input=script, capture_output=True, text=True, timeout=120)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")
    assert role.setup("--print-sql").stdout == ""
    done = role.steps()
    assert {name for name, what in done.items() if what == "made"} == {"marker"}
    assert pi.db.rows(INDEX)[0][0]
    role.all_is_there()
    assert_works(pi, role)


def test_the_tables_of_an_earlier_role_are_handed_over(pi: Pi, desk: Desk, role: Role) -> None:
    """To a new name, for the old one's password is known to others; routines keep it not away."""
    seq = pi.backend.enqueue()
    pi.once()  # as the backend's own role
    for routine in (
        "PROCEDURE serversync.evil() LANGUAGE sql AS 'SELECT 1'",
        "AGGREGATE serversync.worse(*) (SFUNC = int8inc, STYPE = int8, INITCOND = 0)",
    ):
        pi.db.execute(f"CREATE {routine}")
    role.is_set_up()
    running = assert_works(pi, role)
    running.stop()
    assert "1 to be sent again" in desk("replay", "--seq", str(seq), DATABASE_URL=role.url).stdout
    owners = "SELECT DISTINCT tableowner FROM pg_tables WHERE schemaname = 'serversync'"
    assert pi.db.rows(owners) == [(role.name,)]


def test_a_transaction_that_lasts_is_named_and_what_it_left_half_done_is_finished(
    backend: Backend, db: Database, role: Role
) -> None:
    with db.connect(autocommit=False) as busy:
        backend.enqueue(connection=busy)
        refused = role.setup(code=None)
        assert refused.returncode not in (0, 2)
        assert "lock timeout" in refused.stderr and "is not there" not in refused.stderr
        # Who it is; but nobody is told to end what may be a call.
        assert f"pid {busy.info.backend_pid} (role voicebot, idle in transaction)" in refused.stderr
        assert "pg_terminate" not in refused.stderr
    assert [row[0] for row in db.rows(INDEX)] == [False]
    script = role.setup("--print-sql").stdout
    assert script.index("drop index concurrently") < script.index("create index concurrently")
    assert role.steps()["index of pending entries"] == "made"
    assert [row[0] for row in db.rows(INDEX)] == [True]
    role.all_is_there()


# -- what it cannot do ----------------------------------------------------------------------------


def one_sentence(done: subprocess.CompletedProcess[str], *words: str) -> None:
    """Refused in one line of words."""
    assert_plain(done.stdout + done.stderr)
    assert done.stderr.count("\n") == 1, done.stderr
    for word in words:
        assert word in done.stderr, done.stderr


def test_what_setup_cannot_mend_is_said_in_words(
    desk: Desk, db: Database, role: Role, tmp_path: Path
) -> None:
    nowhere = desk("setup", DATABASE_URL="postgresql://a@127.0.0.1:9/x", code=69)
    one_sentence(nowhere, "the database is not there")
    role.make()
    before = catalogs(db)
    # The configuration's own role, over TCP: it may not give itself anything.
    refused = desk("setup", DATABASE_URL=role.url, code=78)
    one_sentence(refused, "sudo serversync setup", "--admin-url")
    assert catalogs(db) == before
    role.superuser(f'ALTER ROLE "{role.name}" NOLOGIN')
    one_sentence(role.setup(code=69), role.name, "not permitted to log in")
    role.superuser(f'ALTER ROLE "{role.name}" LOGIN')
    missing = tmp_path / "missing"
    done = role.setup(SYNC_RECORDINGS_DIR=missing, code=1)
    assert done.stdout.splitlines()[-1].startswith("failed ") and str(missing) in done.stdout
    db.execute("DROP TABLE sync_outbox")
    one_sentence(role.setup(code=69), "no table sync_outbox")
    empty = db.cluster.url("postgres", user="postgres")
    none = desk("setup", "--admin-url", empty, DATABASE_URL=role.url, code=69)
    one_sentence(none, "no table sync_outbox")
    gone = desk("setup", "--admin-url", role.admin_url + "_gone", DATABASE_URL=role.url, code=69)
    one_sentence(gone, "does not exist")


def test_a_right_that_the_settings_lack_is_said_and_setup_grants_it(
    pi: Pi, desk: Desk, role: Role
) -> None:
    role.setup()
    example().serve(pi.frontend)
    role.superuser(
        f'REVOKE DELETE ON ivr_nodes FROM "{role.name}"',
        f'REVOKE UPDATE (extra) ON system_settings FROM "{role.name}"',
    )

    def refused() -> dict[str, str]:
        told = desk.json("settings", "pull", DATABASE_URL=role.url, code=None)["sections"]
        return {each["section"]: each["error"] for each in told if each["error"]}

    words = "the database refuses it: permission denied for table {}: run: sudo serversync setup"
    lacking = {"call-actions": "system_settings", "ivr-flows": "ivr_nodes"}
    assert refused() == {name: words.format(table) for name, table in lacking.items()}
    counts = {name: len(rows) for name, rows in tables(pi.db).items()}
    assert (counts["announcements"], counts["ivr_flows"]) == (2, 0)
    made = [name for name, done in role.steps().items() if done == "made"]
    assert made == ["ivr_nodes", "system_settings"] and not refused()
    assert len(tables(pi.db)["ivr_nodes"]) == 9


@contextlib.contextmanager
def encoded(role: Role, how: str) -> Iterator[Database]:
    """The role is meant for a database of another encoding."""
    name = f"{role.db.name}_encoded"
    with role.db.cluster.admin() as admin:
        how += f" LOCALE 'C' TEMPLATE template0 OWNER {OWNER}"
        admin.execute(f"CREATE DATABASE {name} ENCODING {how}")
    role.url, role.admin_url = (u.replace(role.db.name, name) for u in (role.url, role.admin_url))
    role.db = made = Database(role.db.cluster, name)
    made.execute(SCHEMA.read_text())
    yield made
    made.drop()


def test_a_database_without_an_encoding_that_quotes_all_names_is_set_up_and_delivers(
    desk: Desk, role: Role
) -> None:
    with encoded(role, "SQL_ASCII") as db:
        role.superuser(f'ALTER DATABASE "{db.name}" SET quote_all_identifiers = on')
        assert set(role.steps().values()) == {"made", "there"}
        role.all_is_there()
        columns, values = "entity_type, entity_id, payload", "'schedule', gen_random_uuid(), '{}'"
        db.execute(f"INSERT INTO sync_outbox ({columns}) VALUES ({values})")
        desk("once", DATABASE_URL=role.url)
        assert db.pending() == []


def test_a_database_of_another_encoding_is_left_alone_and_the_way_out_is_said(role: Role) -> None:
    with encoded(role, "LATIN1"):
        for more in ((), ("--print-sql",)):
            refused = role.refused(*more)
            one_sentence(refused, "its encoding is LATIN1, it must be UTF8", "pg_dump", "-E UTF8")


# -- who acts -------------------------------------------------------------------------------------

PEERS = """\
local all postgres peer map=super
local all all peer
host all all 127.0.0.1/32 trust
"""
SUPER = "super postgres postgres\nsuper root postgres\n"


@pytest.fixture(scope="module")
def peers() -> Iterator[Cluster]:
    """A server that believes whom the kernel says one is."""
    made = Cluster()
    for name, text in (("pg_hba.conf", PEERS), ("pg_ident.conf", SUPER)):
        (made.data / name).write_text(text)
    made.directory.chmod(0o755)
    with made:
        yield made


class Box:
    """A device whose service runs as another user, with peer authentication."""

    def __init__(self, peers: Cluster, frontend: Frontend) -> None:
        self.user = pwd.getpwnam(OTHER_USER)
        self.directory = Path(tempfile.mkdtemp(prefix="serversync-box-"))
        self.directory.chmod(0o755)
        self.db = Database(peers)
        self.backend = Backend(self.db, self.directory / "backend")
        self.runtime_dir = self.directory / "run"
        self.runtime_dir.mkdir()
        for directory in (self.runtime_dir, self.backend.recordings_dir):
            os.chown(directory, self.user.pw_uid, self.user.pw_gid)
        url = f"postgresql:///{self.db.name}?host={peers.directory}&port={peers.port}"
        settings = agent_env(self.db, frontend, self.backend, DATABASE_URL=url)
        self.env_file = write_env_file(self.directory / "serversync.env", settings)
        self._service: subprocess.Popen[bytes] | None = None

    def pretend_service(self) -> None:
        """A process of the service's user, as its state file would name it."""
        self._service = self._service or subprocess.Popen([*STRANGER, "sleep", "600"])
        own = Path(f"/proc/{self._service.pid}")
        wait_until(lambda: own.stat().st_uid == self.user.pw_uid, what="the other user's process")
        self.pretend_agent(self._service.pid)

    def pretend_agent(self, pid: int) -> None:
        """As it writes its state file itself."""
        (self.runtime_dir / "state.json").write_text(json.dumps(state_file(pid)))
        self.state_of(os.stat(f"/proc/{pid}").st_uid)

    def state_of(self, owner: int) -> None:
        os.chown(self.runtime_dir / "state.json", owner, -1)

    def __call__(
        self, *args: str, code: int = 0, prefix: Sequence[str] = ()
    ) -> subprocess.CompletedProcess[str]:
        environ = {"RUNTIME_DIRECTORY": str(self.runtime_dir)}
        done = run_once(environ, 120, self.command(*args), stdin="{}", prefix=prefix)
        assert_plain(done.stdout + done.stderr)
        assert done.returncode == code, f"{done.returncode}: {done.stdout}{done.stderr}"
        return done

    def command(self, *args: str) -> list[str]:
        """The usual env file lies in a directory that is closed to others."""
        return [*args, "--env-file", str(self.env_file)]

    def close(self) -> None:
        if self._service:
            self._service.kill()
            self._service.wait(10)
        self.db.drop()
        with self.db.cluster.admin() as admin:
            admin.execute(f"DROP ROLE IF EXISTS {OTHER_USER}")
        shutil.rmtree(self.directory)


@pytest.fixture
def box(peers: Cluster, frontend: Frontend) -> Iterator[Box]:
    made = Box(peers, frontend)
    yield made
    made.close()


@needs_root
def test_setup_typed_by_root_is_the_superuser_for_the_database_and_the_service_for_the_rest(
    box: Box, frontend: Frontend
) -> None:
    box.pretend_service()
    done = steps(box("setup").stdout)
    assert done["role"] == "made" and done["marker"] == "made"
    assert box.db.value("SELECT count(*) FROM pg_roles WHERE rolname = %s", (OTHER_USER,)) == 1
    assert set(steps(box("setup").stdout).values()) == {"there"}

    # Commands that root types are the service's user: root has no role there.
    assert box("enqueue", "schedule", str(uuid.uuid4())).stdout == "1\n"
    with Agent({}, args=box.command("run"), runtime_dir=box.runtime_dir) as running:
        frontend.wait(lambda: frontend.seqs() == [1], 60, "the entry")
        running.wait_sentence("all delivered", 60)
        status = Path(f"/proc/{running.pid}/status").read_text()
        mine = {*re.findall(r"^[UG]id:\t(.*)$", status, re.MULTILINE)}
        assert mine == {"\t".join(4 * [str(box.user.pw_uid)])}
        assert f"(pid {running.pid})" in box("status").stdout
    box.pretend_service()
    box("once")
    assert box("replay", "--seq", "1").stdout.split()[:2] == ["1", "to"]
    for command in (["dlq", "list"], ["prune"], ["metrics"]):
        box(*command)
    # What it makes for itself is the service's, too.
    made = {path.name: path.stat().st_uid for path in box.backend.recordings_dir.rglob("*")}
    assert serversync.MARKER in made and {*made.values()} == {box.user.pw_uid}
    # By sudo, and with nobody to become.
    for typed in (["run"], ["once"], ["settings", "pull"], ["admin", "--listen", a_place()]):
        refused = run_once({"SUDO_UID": "1000"}, 60, box.command(*typed))
        assert refused.returncode == 78
        one_sentence(refused, f"{typed[0]} does not stay root")


@needs_root
def test_a_state_file_that_names_somebody_else_s_process_does_not_say_who_root_becomes(
    box: Box,
) -> None:
    """Whom the database sees; without anybody to believe that is the package's user."""
    (users := box.directory / "passwd").write_text(
        f"{Path('/etc/passwd').read_text()}serversync:x:64999:64999::/:/bin/false\n"
    )
    installed = in_mounts(f"mount --bind {users} /etc/passwd")
    other = pwd.getpwnam("daemon").pw_uid
    for process, owner, name in (
        (box.user.pw_uid, box.user.pw_uid, box.user.pw_name),
        (box.user.pw_uid, other, "serversync"),
        (0, other, "serversync"),
    ):
        box.pretend_service() if process else box.pretend_agent(os.getpid())
        box.state_of(owner)
        refused = box("dlq", "list", prefix=installed, code=69)
        assert f'"{name}"' in refused.stderr


@needs_root
def test_somebody_who_may_not_read_the_configuration_is_told_the_line(tmp_path: Path) -> None:
    env = agent_env(None, None, None, DATABASE_URL="postgresql:///x", FRONTEND_BASE_URL="http://x")
    for args in (("status",), ("dlq", "list", "two words"), ("setup",)):
        # Its env file lies in a directory that only root may enter.
        refused = run_once(env, args=args, prefix=STRANGER)
        assert refused.returncode == 78
        one_sentence(refused, "Permission denied", "run: sudo serversync --env-file /")
        assert refused.stderr.rstrip().endswith(
            "dlq list 'two words'" if len(args) == 3 else args[0]
        )


@needs_root
def test_somebody_whom_the_database_does_not_know_is_told_the_line(box: Box) -> None:
    for args in (["dlq", "list"], ["replay", "--seq", "1"], ["enqueue", "a", str(uuid.uuid4())]):
        refused = box(*args, prefix=STRANGER, code=69)
        one_sentence(refused, ": run: sudo serversync --env-file /")
        assert refused.stderr.rstrip().endswith(shlex.join(box.command(*args)))
    assert "sudo serversync" in box("status", prefix=STRANGER, code=69).stdout
    assert box("setup", prefix=STRANGER, code=69).stderr.count("sudo serversync") == 1


@needs_root
def test_root_becomes_whom_the_unit_names_whatever_a_state_file_says(box: Box) -> None:
    """Whoever can write that file may not choose whom root becomes: itself, or the superuser."""
    superusers = int((box.db.cluster.data / "postmaster.pid").read_text().splitlines()[0])
    for pid in (1, superusers):
        box.pretend_agent(pid)
        prefix = booted(box.directory, LoadState="loaded", User=OTHER_USER)
        refused = box("dlq", "list", prefix=prefix, code=69).stderr
        assert f'role "{OTHER_USER}" does not exist' in refused
        assert refused.endswith(": run: sudo serversync setup\n")  # not what was just typed


def test_the_superuser_s_session_calls_nothing_that_the_backend_made(
    db: Database, role: Role
) -> None:
    # It fits the arguments better than pg_catalog's own, which takes any.
    db.execute(
        "CREATE FUNCTION public.format(text, name, text) RETURNS text LANGUAGE plpgsql AS $$ "
        "BEGIN RAISE EXCEPTION 'a trap'; END $$"
    )
    role.is_set_up()


# -- who owns what --------------------------------------------------------------------------------

# What a role does that wants to be more than it is: as whoever runs it.
EVIL = """
    BEGIN
        BEGIN EXECUTE 'ALTER ROLE "{role}" SUPERUSER'; EXCEPTION WHEN OTHERS THEN END;
        BEGIN EXECUTE 'GRANT ALL ON recordings TO "{role}"'; EXCEPTION WHEN OTHERS THEN END;
        RETURN {result};
    END
"""
TRAP = "CREATE OR REPLACE FUNCTION {name} RETURNS {type} LANGUAGE plpgsql AS $evil${evil}$evil$"
ROLE_MAY = """
    SELECT rolsuper OR has_table_privilege(oid, 'recordings', 'DELETE')
           OR has_table_privilege(oid, 'sync_outbox', 'TRUNCATE')
    FROM pg_roles WHERE rolname = %s
"""
ENQUEUE = "SELECT public.serversync_enqueue('x', gen_random_uuid(), '{}', %s)"


class Attacker:
    """Somebody who holds the service's role, and lays traps."""

    def __init__(self, db: Database, role: Role) -> None:
        self.db, self.role = db, role
        self.evil = EVIL.replace("{role}", role.name)

    def runs(self, *statements: str) -> None:
        with psycopg.connect(self.role.url, autocommit=True) as session:
            for statement in statements:
                session.execute(statement)

    def trap(self, name: str, kind: str = "trigger", result: str = "NULL") -> str:
        return TRAP.format(name=name, type=kind, evil=self.evil.replace("{result}", result))

    def may_not(self, *statements: str) -> None:
        for statement in statements:
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                self.runs(statement)

    def gets_nothing_from_others(self) -> None:
        """Whoever inserts, or enqueues: the superuser with any search_path, or the backend."""
        with self.db.admin() as admin, self.db.connect() as owner:
            admin.execute("SET search_path = serversync, pg_catalog, public")
            for number, session in enumerate((admin, owner)):
                session.execute(
                    "INSERT INTO public.sync_outbox (entity_type, entity_id, payload)"
                    " VALUES ('x', gen_random_uuid(), '{}')"
                )
                session.execute(ENQUEUE, (f"key {number}",))
        self.got_nothing()

    def got_nothing(self) -> None:
        assert self.db.value(ROLE_MAY, (self.role.name,)) is False

    def owns_the_trigger_s_function(self) -> None:
        """As the first edition had it."""
        with self.db.admin() as admin:
            admin.execute("DROP FUNCTION serversync_wake CASCADE")
            self.runs(self.trap("serversync.wake()"))
            admin.execute(OLD_TRIGGER)


@pytest.fixture
def attacker(db: Database, role: Role) -> Attacker:
    """Of a database that was set up."""
    role.setup()
    return Attacker(db, role)


def test_setup_runs_nothing_as_the_superuser_that_the_role_owns(
    role: Role, attacker: Attacker
) -> None:
    attacker.runs(
        attacker.trap("serversync.evil()", "int", f"{serversync.SCHEMA_VERSION}"),
        "DROP TABLE serversync.schema_version",
        "CREATE VIEW serversync.schema_version AS SELECT serversync.evil() AS number",
        "ALTER TABLE serversync.sender RENAME TO was_sender",
        "CREATE VIEW serversync.sender AS SELECT root_id FROM serversync.was_sender"
        f" WHERE serversync.evil() = {serversync.SCHEMA_VERSION}",
    )
    for more in ([], ["--print-sql"]):
        role.setup(*more)
        attacker.got_nothing()


def test_a_role_decides_nothing_of_what_others_run(role: Role, attacker: Attacker) -> None:
    enqueue = "serversync_enqueue(text, uuid, jsonb, text)"
    attacker.may_not(
        attacker.trap("public.serversync_wake()"),
        "ALTER FUNCTION public.serversync_wake() SECURITY DEFINER",
        f"ALTER FUNCTION public.{enqueue} RESET search_path",
        f"DROP FUNCTION public.{enqueue}",
        "DROP TRIGGER serversync_wake ON sync_outbox",
        "CREATE TRIGGER evil BEFORE INSERT ON serversync_keys"
        " FOR EACH ROW EXECUTE FUNCTION public.serversync_wake()",
    )
    attacker.runs(
        attacker.trap("serversync.wake()"),
        attacker.trap("serversync.pg_notify(text, text)", "void", ""),
        attacker.trap("serversync.sha256(bytea)", "bytea", "''"),
        "CREATE TABLE serversync.sync_outbox (LIKE public.sync_outbox)",
        "CREATE TABLE serversync.serversync_keys (LIKE public.serversync_keys)",
    )
    attacker.gets_nothing_from_others()


def test_an_installation_whose_role_owns_what_others_run_is_told_and_mended(
    desk: Desk, agent: AgentFactory, role: Role, attacker: Attacker, db: Database
) -> None:
    with db.admin() as admin:  # what the setup of the first edition made
        admin.execute("DROP FUNCTION serversync_wake, serversync_enqueue CASCADE")
        admin.execute("DROP TABLE serversync_keys")
        admin.execute("DROP SCHEMA serversync CASCADE")
        admin.execute(f'CREATE SCHEMA serversync AUTHORIZATION "{role.name}"')
        attacker.runs(SCHEMA_V1.read_text())
        admin.execute(OLD_TRIGGER)
    attacker.runs(
        attacker.trap("serversync.wake()"),
        "CREATE TRIGGER another BEFORE INSERT ON serversync.counters"  # would keep it from going
        " FOR EACH ROW EXECUTE FUNCTION serversync.wake()",
    )
    agent.once(DATABASE_URL=role.url)
    told = {each["name"]: each for each in checks(desk, role) if each["status"] != "ok"}
    assert told["trigger"]["status"] == "failed" and "serversync.wake()" in told["trigger"]["text"]
    assert "serversync_enqueue" in told["rights"]["text"]
    for name in ("trigger", "rights"):
        assert told[name]["hint"] == "sudo serversync setup"
    assert role.steps()["NOTIFY trigger"] == "made"
    assert {each["status"] for each in checks(desk, role)} == {"ok"}
    assert not db.rows("SELECT FROM pg_proc WHERE proname IN ('wake', 'enqueue')")
    attacker.gets_nothing_from_others()
    role.all_is_there()


def test_a_disabled_trigger_is_left_alone_only_where_its_function_is_the_owner_s(
    role: Role, attacker: Attacker, db: Database
) -> None:
    """Whoever enables it again does not look at what it runs."""
    state = "SELECT tgfoid::regproc::text, tgenabled FROM pg_trigger WHERE tgname ~ 'serversync'"
    for made, after in (("there", "D"), ("made", "O")):
        db.execute("ALTER TABLE sync_outbox DISABLE TRIGGER serversync_wake")
        assert role.steps()["NOTIFY trigger"] == made
        assert db.rows(state) == [("serversync_wake", after)]
        attacker.owns_the_trigger_s_function()
    attacker.runs(  # nor does a routine keep the mend away
        "ALTER FUNCTION serversync.wake() RENAME TO evil",
        "CREATE PROCEDURE serversync.wake() LANGUAGE sql AS 'SELECT 1'",
    )
    assert role.steps()["NOTIFY trigger"] == "made"
    attacker.gets_nothing_from_others()


def test_the_name_of_the_outbox_s_schema_is_no_command(role: Role, db: Database) -> None:
    """Its owner chooses it; the superuser's session writes it into functions, and it is shown."""
    schema = "p$$;ALTER ROLE voicebot SUPERUSER;SELECT $$a\x1b[2J\x9b31m\u202eb"
    db.execute(f'CREATE SCHEMA "{schema}"')
    db.execute(f'ALTER TABLE sync_outbox SET SCHEMA "{schema}"')
    db.execute(f"ALTER DATABASE {db.name} SET check_function_bodies = off")
    # Desk looks at every character.
    assert 'a [2J 31m b".sync_outbox' in role.setup("--print-sql").stdout
    role.setup(code=None)
    with db.admin() as admin:
        query = "SELECT rolsuper FROM pg_roles WHERE rolname = 'voicebot'"
        is_super = admin.execute(query).fetchall()
        admin.execute("ALTER ROLE voicebot NOSUPERUSER")
    assert is_super == [(False,)]


def test_a_function_of_our_name_that_fits_better_is_told_and_not_called_as_the_manual_says(
    desk: Desk, role: Role, attacker: Attacker, db: Database
) -> None:
    role.superuser(f'GRANT CREATE ON SCHEMA public TO "{role.name}"')
    # Untyped literals are text before anything else.
    better = "serversync_enqueue(text,text,text,text)"
    attacker.runs(attacker.trap(f"public.{better}", "bigint", "7"))
    assert role.steps()["enqueue"] == "there"
    told = next(each for each in checks(desk, role) if each["name"] == "rights")
    assert told["status"] == "warning" and f"{better} of role {role.name}" in told["text"]
    assert "text, text, text, text" in db.paste(told["hint"])
    call = re.search(r"^select [a-z.]*serversync_enqueue\(.*?;$", MANUAL.read_text(), re.M | re.S)
    assert call
    with db.admin() as admin:
        assert admin.execute(call[0]).fetchall() == [(1,)]
    attacker.got_nothing()


# Whatever it is written into, it would end it and do something else.
ODD = "\"';touch pwned;$(touch pwned) `touch pwned`$$%I%s\\"
ODDER = f"{ODD}\nb"


@pytest.mark.parametrize("odd_name", [ODD, ODDER], ids=["one line", "two lines"])
def test_names_of_any_characters_are_names_wherever_they_are_written(
    frontend: Frontend, tmp_path: Path, cluster: Cluster, odd_name: str
) -> None:
    odd = Database(cluster, cluster.create(name=odd_name))
    backend = Backend(odd, tmp_path / "backend")
    role = Role(odd, Desk(AgentFactory(odd, frontend, backend)))
    env = agent_env(odd, frontend, backend, DATABASE_URL=role.url, SYNC_FILE_GRACE_SEC=0)
    assert odd_name in role.name and role.setup()
    name, well = psycopg.sql.Identifier(odd_name), odd_name == ODD  # hints are of one line
    with odd.admin() as admin:
        for text in (
            "CREATE SCHEMA {0} AUTHORIZATION voicebot",
            "ALTER TABLE sync_outbox SET SCHEMA {0}",
            "ALTER TABLE recordings SET SCHEMA {0}",
            "ALTER TABLE system_settings SET SCHEMA {0}",
            "DROP FUNCTION serversync_wake, serversync_enqueue CASCADE",
            "ALTER ROLE voicebot IN DATABASE {0} SET search_path = {0}",
            "CREATE SCHEMA archive CREATE TABLE sync_outbox (id int)",
        ):
            admin.execute(psycopg.sql.SQL(text).format(name))
        refused = role.setup(code=78)
        assert "which is the backend's" in refused.stderr
        for line in refused.stderr.splitlines()[1:]:
            odd.paste(line.removeprefix("serversync: "), well)
        admin.execute("DROP SCHEMA archive CASCADE")
    odd.close()
    role.setup()
    odd.execute("ALTER TABLE sync_outbox DISABLE TRIGGER serversync_wake")
    call = backend.end_call()
    shutil.rmtree(call.directory)
    seq = run_once(env, args=("enqueue", "x", str(uuid.uuid4())), stdin="{}").stdout
    found = json.loads(run_once(env, args=("doctor", "--json")).stdout)["checks"]
    hints = {each["name"]: each["hint"] for each in found if "psql" in each["hint"]}
    assert set(hints) == {"trigger"}
    odd.paste(hints["trigger"], well)
    assert set(role.steps().values()) == {"there"}
    assert run_once(env).returncode == 75  # the recording waits for its file
    assert int(seq) in frontend.seqs()
    enabled = odd.value("SELECT tgenabled FROM pg_trigger WHERE tgname ~ 'serversync'")
    assert enabled == ("O" if well else "D")
    odd.drop()


def test_a_line_of_doctor_s_runs_nothing_of_the_role_s_but_as_the_role(
    desk: Desk, backend: Backend, role: Role, attacker: Attacker, db: Database
) -> None:
    """It may put what it likes before the tables and functions that its own sessions find."""
    shutil.rmtree(backend.end_call().directory)
    speaks = f'1"; touch pwned; $(touch pwned); ALTER ROLE "{role.name}" SUPERUSER; --\n'
    text = psycopg.sql.Literal(speaks).as_string(None)
    attacker.runs(
        attacker.trap("serversync.evil()", "int", "3"),
        attacker.trap("serversync.quote_ident(name)", "text", text),
        attacker.trap("serversync.has_table_privilege(name, regclass, text)", "boolean", "false"),
        "CREATE VIEW serversync.sync_outbox AS SELECT * FROM public.sync_outbox"
        " WHERE serversync.evil() = 3",
        f'ALTER ROLE "{role.name}" IN DATABASE {db.name}'
        " SET search_path = serversync, pg_catalog, public",
        "INSERT INTO serversync.waiting (outbox_id, entity_id, entity_type, is_file, code, reason,"
        " next_attempt_at) VALUES (99, gen_random_uuid(), 'x', false, 'ROW_CORRUPT', '', now())",
    )
    hints = lines_to_paste(desk, role)
    assert hints["rights"] == "sudo serversync setup"
    assert "psql" in hints["corrupt rows"]
    for hint in hints.values():
        assert ("psql" in hint) == hint.startswith("sudo -u"), hint
        if "psql" in hint:
            db.paste(hint)
            attacker.got_nothing()

    attacker.runs(
        "ALTER TABLE serversync.waiting RENAME TO w",
        f"CREATE VIEW serversync.waiting AS SELECT {text} AS outbox_id, code, entity_type"
        " FROM serversync.w",
    )
    hints = lines_to_paste(desk, role)
    assert hints["corrupt rows"] and not any("pwned" in hint for hint in hints.values())


def lines_to_paste(desk: Desk, role: Role) -> dict[str, str]:
    found = desk.json("doctor", code=None, DATABASE_URL=role.url, SYNC_FILE_GRACE_SEC=0)["checks"]
    return {each["name"]: each["hint"] for each in reversed(found) if each["hint"]}


def checks(desk: Desk, role: Role) -> list[dict[str, str]]:
    found = desk.json("doctor", code=None, DATABASE_URL=role.url)["checks"]
    return [each for each in found if each["name"] in ("rights", "schema", "trigger")]


def test_what_others_put_beside_the_outbox_under_our_names_is_not_used(
    role: Role, attacker: Attacker, db: Database
) -> None:
    """Up to PostgreSQL 14 everybody may make something in the schema public."""
    role.superuser(
        "DROP FUNCTION serversync_wake, serversync_enqueue CASCADE",
        "DROP TABLE serversync_keys",
        f'GRANT CREATE ON SCHEMA public TO "{role.name}"',
    )
    name = "public.serversync_enqueue(entity_type text, entity_id uuid, payload jsonb, "
    attacker.runs(
        attacker.trap("public.serversync_wake()"),
        attacker.trap(f"{name}idempotency_key text DEFAULT NULL)", "bigint", "1"),
        "CREATE TABLE public.serversync_keys (key text PRIMARY KEY, digest bytea,"
        " outbox_id bigint, expires_at timestamptz)",
        attacker.trap("serversync.evil()"),
        "CREATE TRIGGER evil BEFORE INSERT ON public.serversync_keys"
        " FOR EACH ROW EXECUTE FUNCTION serversync.evil()",
    )
    role.setup()
    attacker.gets_nothing_from_others()
    attacker.may_not(attacker.trap("public.serversync_wake()"))


FOREIGN = [
    ["CREATE VIEW public.serversync_keys AS SELECT 1"],
    ["CREATE SEQUENCE public.serversync_keys"],
    ["CREATE DOMAIN public.serversync_keys AS int"],
    [  # a table that is used
        "CREATE TABLE public.serversync_keys (a int)",
        "CREATE VIEW uses_it AS SELECT * FROM public.serversync_keys",
    ],
    ["CREATE FUNCTION public.serversync_wake() RETURNS int LANGUAGE sql AS 'SELECT 1'"],
    [
        "CREATE PROCEDURE public.serversync_enqueue(text, uuid, jsonb, text)"
        " LANGUAGE sql AS 'SELECT 1'"
    ],
    ["CREATE TABLE public.sync_outbox_serversync_pending ()"],  # the index's name
    [
        "CREATE TABLE uses_it (id int)",
        "CREATE INDEX sync_outbox_serversync_pending ON uses_it (id)",
    ],
]


def test_what_others_made_under_our_names_and_cannot_be_replaced_is_named_and_nothing_is_done(
    role: Role, attacker: Attacker
) -> None:
    role.superuser(
        "DROP FUNCTION serversync_wake, serversync_enqueue CASCADE",
        "DROP TABLE serversync_keys",
        f'REVOKE ALL ON recordings FROM "{role.name}"',  # would be granted again
    )
    for statements in FOREIGN:
        role.superuser(f'GRANT CREATE ON SCHEMA public TO "{role.name}"')
        if "pending" in statements[-1]:
            role.superuser("DROP INDEX IF EXISTS sync_outbox_serversync_pending")
        attacker.runs(*statements)
        refused = role.refused()
        names = re.findall(r"(?:public\.| )(serversync_\w+|sync_outbox_\w+)", statements[-1])
        one_sentence(refused, *set(names), f"of role {role.name}", "rename or drop")
        role.superuser(f'DROP OWNED BY "{role.name}" CASCADE')
    role.is_set_up()


def test_a_transaction_of_the_role_s_that_keeps_setup_waiting_is_named_and_ended_by_the_line(
    role: Role, attacker: Attacker, db: Database
) -> None:
    attacker.owns_the_trigger_s_function()
    # What keeps the superuser's session waiting, then the role's own.
    for statement, often in (("SELECT FROM sync_outbox LIMIT 0", 12),
                             ("LOCK TABLE serversync.sender", 1)):  # fmt: skip
        with contextlib.ExitStack() as stack:
            pids = set()
            for _ in range(often):  # the line is whole however many there are
                session = stack.enter_context(contextlib.closing(psycopg.connect(role.url)))
                session.execute(statement)
                pids.add(session.info.backend_pid)
            refused = role.setup(code=69)
            named = re.findall(r"pid (\d+) \(role (.*?), idle in transaction\)", refused.stderr)
            one_sentence(refused, " and 9 more holds it" if often > 1 else " holds it")
            assert {int(pid) for pid, _ in named} <= pids
            assert [name for _, name in named] == [role.name] * min(often, 3)
            db.paste(refused.stderr.strip().partition("or end it: ")[2])
            role.setup()
    attacker.gets_nothing_from_others()
    with contextlib.closing(psycopg.connect(role.url, autocommit=True)) as session:
        session.execute("SELECT pg_advisory_lock(%s)", (serversync.LOCK_KEY,))
        session.execute("DROP SCHEMA serversync CASCADE")
        refused = role.setup(code=69)
        assert f"pid {session.info.backend_pid} of the database holds the lock" in refused.stderr
    role.is_set_up()


# -- whose outbox ---------------------------------------------------------------------------------


@pytest.mark.parametrize("schema", ["voice", "public"])
def test_a_setting_of_something_else_is_not_taken_for_the_search_path(
    pi: Pi, role: Role, schema: str
) -> None:
    """Nor a temporary copy for the outbox."""
    role.make()
    if schema != "public":
        move_backend(pi.db, schema)
    for setting in (
        "SET search_path = archive",  # hides the outbox of public
        f"IN DATABASE postgres SET search_path = {schema}",
        f'IN DATABASE {pi.db.name} SET search_path = voice2, "a, {schema}, b"',
        f"IN DATABASE {pi.db.name} SET application_name = 'search_path={schema}'",
    ):
        role.superuser(f'ALTER ROLE "{role.name}" {setting}')
    with pi.db.connect() as other:
        other.execute(f"CREATE TEMP TABLE sync_outbox (LIKE {schema}.sync_outbox INCLUDING ALL)")
        assert role.steps()["search_path"] == "made"
        role.all_is_there()
    index = "SELECT schemaname FROM pg_indexes WHERE indexname LIKE 'sync_outbox_serv%'"
    assert pi.db.rows(index) == [(schema,)]
    seq = pi.backend.enqueue()
    pi.once(DATABASE_URL=role.url)
    assert pi.frontend.seqs() == [seq]


def is_told_which(pi: Pi, role: Role, schema: str, other: str) -> list[str]:
    """It is refused; the lines that are offered. The one for the backend's schema helps."""
    refused, *lines = role.refused().stderr.splitlines()
    assert_plain(refused)
    assert f"{other}.sync_outbox" in refused and f"{schema}.sync_outbox" in refused
    (line,) = [each for each in lines if each.endswith(f' "{schema}"\'')]
    pi.db.paste(line.removeprefix("serversync: "))
    role.is_set_up()
    seq = pi.backend.enqueue()
    pi.once(DATABASE_URL=role.url)
    assert pi.frontend.seqs() == [seq]
    return lines


@pytest.mark.parametrize("schema", ["voice", "public"])
def test_of_two_outboxes_the_role_must_be_told_which(pi: Pi, role: Role, schema: str) -> None:
    if schema != "public":
        move_backend(pi.db, schema)
    role.superuser(
        "CREATE SCHEMA archive AUTHORIZATION voicebot",
        f"CREATE TABLE archive.sync_outbox (LIKE {schema}.sync_outbox)",
    )
    assert len(is_told_which(pi, role, schema, "archive")) == 2


@pytest.mark.parametrize("schema", ["voice", "public"])
def test_a_table_of_the_role_s_own_is_not_taken_for_the_backend_s_beside_another(
    pi: Pi, role: Role, schema: str
) -> None:
    """Its search_path is its own, too; up to PostgreSQL 14 it may make tables in public."""
    if schema != "public":
        move_backend(pi.db, schema)
    other = "public" if schema == "voice" else "archive"
    role.make()
    role.superuser(
        "CREATE SCHEMA archive",
        f'GRANT CREATE, USAGE ON SCHEMA public, archive TO "{role.name}"',
    )
    Attacker(pi.db, role).runs(
        f"CREATE TABLE {other}.sync_outbox (id bigint, processed_at timestamptz)",
        f'ALTER ROLE "{role.name}" IN DATABASE {pi.db.name} SET search_path = {other}',
    )
    assert len(is_told_which(pi, role, schema, other)) == 1, "its own is not offered"


def test_an_outbox_of_the_role_s_own_is_the_backend_s_where_there_is_no_other(
    pi: Pi, role: Role
) -> None:
    role.make()
    for table in ("sync_outbox", "recordings", "system_settings"):
        role.superuser(f'ALTER TABLE {table} OWNER TO "{role.name}"')
    role.is_set_up()
    role.superuser(
        "INSERT INTO sync_outbox (entity_type, entity_id, payload)"
        " VALUES ('x', gen_random_uuid(), '{}')"
    )
    pi.once(DATABASE_URL=role.url)
    assert pi.frontend.seqs() == [1]

"""The Debian package, unpacked: what is in it, lintian's opinion, and that it is reproducible."""

import contextlib
import fcntl
import hashlib
import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import serversync
from agent import REPOSITORY
from machine import in_mounts, needs_root

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

DEBIAN = REPOSITORY / "packaging" / "debian"
UNITS = "usr/lib/systemd/system"


def run(*words: str | Path, **environ: str) -> str:
    done = subprocess.run(
        words,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **environ},
        check=False,
    )
    assert done.returncode == 0, f"{words}: {done.returncode}\n{done.stdout}"
    return done.stdout


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """One process of the test run at a time."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def alone() -> contextlib.AbstractContextManager[None]:
    """Of all processes of the test run: apt does not wait for another apt."""
    return locked(REPOSITORY / "packaging" / "deps.sh")


def install_missing(*packages: str) -> None:
    script = f"cd {REPOSITORY}; . packaging/deps.sh; install_missing {' '.join(packages)}"
    with alone():
        run("bash", "-euc", script)


def build(directory: Path, umask: str = "022", **environ: str) -> Path:
    """By packaging/build, as it is in this tree."""
    script = f'umask {umask}; exec "$0" --worktree "$1"'
    with alone():
        said = run("sh", "-c", script, REPOSITORY / "packaging" / "build", directory, **environ)
    deb = Path(said.splitlines()[-1])
    assert deb.name == f"serversync_{serversync.__version__}_all.deb"
    assert (directory / "serversync.deb").resolve() == deb.resolve()
    return deb


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One directory for all processes of this test run."""
    directory = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        directory = directory.parent
    made = directory / "shared"
    made.mkdir(exist_ok=True)
    return made


@pytest.fixture(scope="session")
def deb(shared: Path) -> Path:
    """The package of this tree, built once."""
    with locked(shared / "deb.lock"):
        link = shared / "dist" / "serversync.deb"
        return link if link.exists() else build(link.parent)


@pytest.fixture(scope="module")
def tree(deb: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package unpacked, its scripts below DEBIAN."""
    directory = tmp_path_factory.mktemp("package") / "tree"
    run("dpkg-deb", "-R", deb, directory)
    return directory


def sections(unit: Path) -> Mapping[str, list[str]]:
    """Each key of a unit with its values, in order."""
    found: dict[str, list[str]] = {}
    for line in unit.read_text().splitlines():
        key, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            found.setdefault(key, []).append(value)
    return found


def test_two_builds_by_different_people_are_the_same_bytes(deb: Path, tmp_path: Path) -> None:
    home = tmp_path / "somebody"
    home.mkdir()
    stranger = {
        "TZ": "Asia/Tokyo",
        "HOME": str(home),
        "LC_ALL": "C",
        "LANG": "de_DE.UTF-8",
        "USER": "somebody",
        "SOURCE_DATE_EPOCH": "1",
        "DEB_BUILD_OPTIONS": "noddebs parallel=4",
        "TMPDIR": str(tmp_path),
    }

    again = build(tmp_path / "dist", "077", **stranger)

    first, second = (hashlib.sha256(path.read_bytes()).hexdigest() for path in (deb, again))
    assert first == second
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dist", "somebody"]
    assert list(home.iterdir()) == []


def test_lintian_has_nothing_to_say(deb: Path) -> None:
    install_missing("lintian")

    said = run("lintian", "--pedantic", "--allow-root", "--fail-on=error,warning,pedantic", deb)

    assert said.strip() == ""


def test_the_package_holds_what_it_should_and_nothing_else(deb: Path, tree: Path) -> None:
    files = {
        str(path.relative_to(tree))
        for path in tree.rglob("*")
        if path.is_file() and path.relative_to(tree).parts[0] != "DEBIAN"
    }
    doc = "usr/share/doc/serversync"

    assert files == {
        "etc/serversync.env",
        "usr/bin/serversync",
        f"{UNITS}/serversync.service",
        f"{UNITS}/serversync-admin.service",
        f"{UNITS}/serversync-admin.socket",
        f"{UNITS}/serversync-admin.timer",
        "usr/lib/sysusers.d/serversync.conf",
        "usr/lib/tmpfiles.d/serversync.conf",
        "usr/share/bash-completion/completions/serversync",
        f"{doc}/CHANGELOG.md.gz",
        f"{doc}/README.md.gz",
        f"{doc}/changelog.gz",
        f"{doc}/copyright",
        f"{doc}/examples/serversync.env",
        f"{doc}/examples/serversync.json",
        f"{doc}/examples/serversync.rules.yml",
        "usr/share/man/man5/serversync.env.5.gz",
        "usr/share/man/man7/serversync-admin.7.gz",
        "usr/share/man/man7/serversync-trouble.7.gz",
        "usr/share/man/man8/serversync.8.gz",
        "usr/share/python3/runtime.d/serversync.rtupdate",  # compiles it for a newer Python
        "usr/share/serversync/serversync.py",
    }
    for page in ("serversync", "serversync.env", "serversync-trouble", "serversync-admin"):
        assert run("man", "-M", tree / "usr/share/man", "-w", page).strip().endswith(".gz")
    assert (tree / "DEBIAN" / "conffiles").read_text() == "/etc/serversync.env\n"
    assert run("dpkg-deb", "-f", deb, "Architecture").strip() == "all"
    assert run("dpkg-deb", "-f", deb, "Version").strip() == serversync.__version__
    for path, line in (
        (DEBIAN / "changelog", r"^serversync \((.*?)\)"),
        (REPOSITORY / "CHANGELOG.md", r"^## \[(.*?)\]"),
    ):
        newest = re.search(line, path.read_text(), re.M)
        assert newest and newest[1] == serversync.__version__
    # Only the launcher is parsed at each start; the program is compiled once, by the target.
    assert len((tree / "usr/bin/serversync").read_text().splitlines()) <= 10
    assert "py3compile -p serversync" in (tree / "DEBIAN" / "postinst").read_text()


# Of etc/serversync.env as it is released. All boxes have edited it: where another text is shipped,
# dpkg asks, and an upgrade that nobody watches fails. So another one is a decision, to be written
# down here and in CHANGELOG.md. (New keys go into the full sample, which nobody edits.)
CONFFILE = "f9fa2af89b1ec89e67ba9bcf0c2874cf45f5d8e25b66090e34c3a58122a34a2f"


def test_the_conffile_is_the_one_that_boxes_have_and_the_full_sample_has_every_key(
    tree: Path,
) -> None:
    conffile = (tree / "etc/serversync.env").read_text()
    assert hashlib.sha256(conffile.encode()).hexdigest() == CONFFILE
    assert len(conffile.splitlines()) < 60
    assert "/usr/share/doc/serversync/examples/serversync.env" in conffile
    assert conffile == (REPOSITORY / "etc" / "serversync.env").read_text()

    sample = (tree / "usr/share/doc/serversync/examples/serversync.env").read_text()
    shown = dict(re.findall(r"^#([A-Z_<>]+)=(.*)$", sample, re.M))
    options = serversync.OPTIONS.items()
    assert shown == {name: option.metadata["default"] or "" for name, option in options}
    assert serversync.parse_env_file(conffile) == serversync.parse_env_file(sample) == {}


def test_the_service_s_unit_is_as_the_design_wants_it(tree: Path) -> None:
    unit = sections(tree / UNITS / "serversync.service")
    wanted = {
        "Type": "notify",
        "Restart": "always",
        "RestartPreventExitStatus": str(serversync.EX_CONFIG),
        "StartLimitIntervalSec": "0",
        "ExecStart": "/usr/bin/serversync run",
        "Environment": '"RES_OPTIONS=timeout:2 attempts:1"',
        "User": "serversync",
        "ReadWritePaths": "-/opt/virtual-voicebot",
        "ExecStartPre": "-+/usr/bin/systemd-tmpfiles --create serversync.conf",
        "RuntimeDirectory": "serversync",
        "RuntimeDirectoryPreserve": "yes",
    }
    assert {key: unit[key] for key in wanted} == {key: [value] for key, value in wanted.items()}
    # The defaults of the program fit the unit's watchdog.
    least = 2 * max(serversync.DB_DEADLINE, 30)
    assert int(unit["WatchdogSec"][0]) > least
    for key in ("Requires", "Wants", "BindsTo", "PartOf", "EnvironmentFile"):
        assert key not in unit
    assert "postgresql.service" in unit["After"][0]


def test_each_line_of_hardening_has_its_reason(tree: Path) -> None:
    for name in ("serversync.service", "serversync-admin.service"):
        text = (tree / UNITS / name).read_text()
        lines = text[text.index("# --- What it may not do") :].splitlines()[1:]
        commented = False
        for line in lines:
            if line.startswith("[Install]"):
                break
            if line.startswith("#"):
                commented = True
            elif not line:
                commented = False
            else:
                assert commented, (name, line)


def test_the_admin_interface_is_shipped_disabled_and_may_write_nothing(tree: Path) -> None:
    socket = sections(tree / UNITS / "serversync-admin.socket")
    service = sections(tree / UNITS / "serversync-admin.service")

    timer = sections(tree / UNITS / "serversync-admin.timer")

    assert socket["ListenStream"] == [serversync.ADMIN_LISTEN]
    assert socket["SocketMode"] == ["0660"]
    assert socket["TriggerLimitIntervalSec"] == socket["StartLimitIntervalSec"] == ["0"]
    # Starts that work are a minute apart at least, and never too many.
    assert service["StartLimitIntervalSec"] == timer["OnActiveSec"] == ["2min"]
    assert int(service["StartLimitBurst"][0]) > 120 / serversync.ADMIN_IDLE + 1
    assert service["Restart"] == ["on-failure"] and "ReadWritePaths" not in service
    postinst = (tree / "DEBIAN" / "postinst").read_text()
    assert not re.search(r"was-enabled 'serversync-admin.*\n.*\n.*was-enabled defaults", postinst)
    assert not re.search(r"deb-systemd-invoke (\S+ )?start.*serversync-admin", postinst)
    agent = sections(tree / UNITS / "serversync.service")
    for key, value in agent.items():
        if key.startswith(("Protect", "Private", "SystemCall", "Memory", "Capability")):
            assert service.get(key) == value, key


@needs_root
def test_a_library_that_is_not_there_yet_is_one_sentence_and_no_traceback() -> None:
    """apt starts the service before ld knows libpq; systemd tries it again."""
    hidden = in_mounts(
        "mount -t tmpfs none /usr/share && mkdir /usr/share/serversync\n"
        f"mount --bind {REPOSITORY} /usr/share/serversync\n"
        "for each in /usr/lib/python3/dist-packages/psycopg*; do\n"
        '    [ ! -d "$each" ] || mount -t tmpfs none "$each"\n'
        "done"
    )
    words = [*hidden, str(DEBIAN / "bin/serversync"), "--version"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)

    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("serversync cannot start: ") and done.stderr.count("\n") == 1


def test_the_maintainer_scripts_are_plain_posix_shell(tree: Path) -> None:
    install_missing("shellcheck")
    for script in ("postinst", "prerm", "postrm"):
        run("dash", "-n", tree / "DEBIAN" / script)
        assert (DEBIAN / script).read_text().count("#DEBHELPER#") == 1
        run("shellcheck", "-s", "sh", DEBIAN / script)


# --- packaging/release ----------------------------------------------------------------------------


COMMIT = "git add -A; git -c user.name=nobody -c user.email=nobody@example.com commit -q -m state"
MISTAKES = {
    "not committed": "echo >>serversync.py",
    "CHANGELOG.md begins with": (
        f"sed -i '0,/^## /s/2026-12-24/unreleased/' CHANGELOG.md; {COMMIT}"
    ),
    "packaging/debian/changelog says": (
        f"sed -i '1s/(.*)/(9.9)/' packaging/debian/changelog; {COMMIT}"
    ),
    "is there already": f"git tag v{serversync.__version__}",
}


def test_a_release_is_one_command_that_leaves_what_its_checksums_say_or_names_the_mistake(
    tmp_path: Path,
) -> None:
    install_missing("lintian", "dpkg-dev", "debhelper", "dh-python")
    # This tree, committed somewhere else, with a CHANGELOG.md that is ready for a release.
    clone = tmp_path / "clone"
    dist, version = clone / "packaging" / "dist", serversync.__version__
    clone.mkdir()
    copied = """
        git -c safe.directory="$PWD" ls-files -z -co --exclude-standard |
            while IFS= read -r -d "" file; do [ ! -e "$file" ] || printf "%s\\0" "$file"; done |
            tar -c --null -T - | tar -x -C "$1"
    """
    run("bash", "-euc", f"cd {REPOSITORY}; {copied}", "bash", clone)
    changelog = clone / "CHANGELOG.md"
    ready = rf"(## \[{re.escape(version)}\] - ).*", r"\g<1>2026-12-24"
    changelog.write_text(re.sub(*ready, changelog.read_text(), count=1))

    def in_clone(script: str) -> None:
        run("bash", "-euc", f"cd {clone}; {script}")

    def release() -> subprocess.CompletedProcess[str]:
        words = [str(clone / "packaging" / "release"), "--skip-tests"]
        nothing = subprocess.DEVNULL
        return subprocess.run(words, stdin=nothing, capture_output=True, text=True, check=False)

    in_clone(f"git init -q; {COMMIT}; git branch ready")
    for mistake, script in MISTAKES.items():
        in_clone(script)
        done = release()
        assert done.returncode == 1, done.stdout + done.stderr
        assert mistake in done.stderr
        assert not dist.exists()
        in_clone(f"git reset -q --hard ready; git tag -d v{version} 2>&1 || true")

    done = release()
    assert done.returncode == 0, done.stdout + done.stderr
    names = {path.name for path in dist.iterdir()}
    package, source = f"serversync_{version}_all.deb", f"serversync-{version}.tar.gz"
    assert names == {package, source, "serversync.deb", "SHA256SUMS"}
    checked = run("sh", "-c", f"cd {dist} && sha256sum -c SHA256SUMS")
    assert checked.splitlines() == [f"{package}: OK", f"{source}: OK"]
    assert f"serversync-{version}/serversync.py" in run("tar", "-tf", dist / source)
    assert run("git", "-C", clone, "status", "--porcelain") == ""

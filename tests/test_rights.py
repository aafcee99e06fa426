"""`serversync setup --recordings`: root opens directories of others, who may be hostile.

The real program as root, with the real systemd-tmpfiles. What it writes below /etc goes into a
directory of the test's own, by mounts that nobody else sees; the service's user is nobody.
"""

import contextlib
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import serversync
from agent import run_once
from desk import assert_plain
from machine import booted, in_mounts, needs_root

pytestmark = needs_root
SERVICE, BACKEND, THIRD = (pwd.getpwnam(name) for name in ("nobody", "daemon", "bin"))
ACL = "system.posix_acl_access"
# In one step, for ever: there is always something by that name.
SWAP = """
import ctypes, sys, time
first, second = (name.encode() for name in sys.argv[1:])
while True:
    ctypes.CDLL(None).renameat2(-100, first, -100, second, 2)
    time.sleep(0.0005)
"""


class Etc:
    """A directory of the backend's, and what root wrote for it."""

    def __init__(self, place: Path) -> None:
        self.place = place  # nobody but root may change anything here
        place.chmod(0o755)
        self.written = place / "etc"
        for name in ("tmpfiles.d", "system"):
            (self.written / name).mkdir(parents=True)
        self.storage = place / "storage"
        self.storage.mkdir()
        os.chown(self.storage, BACKEND.pw_uid, BACKEND.pw_gid)

    def directory(self, name: str) -> Path:
        """One of the backend's."""
        made = self.storage / name
        made.mkdir()
        os.chown(made, BACKEND.pw_uid, BACKEND.pw_gid)
        return made

    def __call__(
        self, *args: str | Path, code: int = 0, prefix: Sequence[str] = ()
    ) -> subprocess.CompletedProcess[str]:
        mounts = in_mounts(
            f"mount --bind {self.written}/tmpfiles.d /etc/tmpfiles.d\n"
            f"mount --bind {self.written}/system /etc/systemd/system"
        )
        systemd = booted(self.place, LoadState="loaded", User=SERVICE.pw_name)
        words = ["setup", *map(str, args)]
        done = run_once({}, 180, words, prefix=(*mounts, *systemd, *prefix))
        assert done.returncode == code, f"{done.returncode}: {done.stdout}{done.stderr}"
        assert_plain(done.stdout + done.stderr)
        return done

    def refuses(self, *paths: str | Path) -> list[str]:
        """Each of them, in a line of its own; nothing is written. Nor would anything be opened."""
        said, disarmed = [], in_mounts("mount --bind /bin/true /bin/systemd-tmpfiles")
        for path in paths:
            done = self("--recordings", path, code=78, prefix=disarmed)
            assert done.stdout == "" and done.stderr.count("\n") == 1, done.stderr
            said.append(done.stderr)
        assert not any(self.files().values())
        return said

    def files(self) -> dict[str, str]:
        """Each file below /etc that is its, and its text."""
        names = (serversync.TMPFILES, serversync.DROP_IN)
        places = (
            self.written / name.split("/", 3 if "systemd" in name else 2)[-1] for name in names
        )
        return {path.name: path.read_text("latin-1") if path.exists() else "" for path in places}


@pytest.fixture
def etc() -> Iterator[Etc]:
    place = Path(tempfile.mkdtemp(prefix="serversync-", dir="/srv"))  # /tmp is everybody's
    yield Etc(place)
    shutil.rmtree(place)


@contextlib.contextmanager
def swapping(first: Path, second: Path) -> Iterator[None]:
    """Their owner, who never rests."""
    who = ("setpriv", f"--reuid={BACKEND.pw_uid}", f"--regid={BACKEND.pw_gid}", "--clear-groups")
    swapper = subprocess.Popen([*who, "/usr/bin/python3", "-c", SWAP, first, second])
    try:
        yield
    finally:
        swapper.kill()
        swapper.wait()


def test_an_owner_who_keeps_swapping_the_directory_for_a_link_gets_no_line_of_his_own(
    etc: Etc,
) -> None:
    recordings, owned = etc.directory("recordings"), etc.place / "owned"
    strange = Path(f"{etc.storage}/x\nf {owned} 0644 root root - owned\n#")
    strange.mkdir(parents=True)
    (link := etc.storage / "link").symlink_to(strange)
    os.chown(link, BACKEND.pw_uid, BACKEND.pw_gid, follow_symlinks=False)
    often = 'for i in $(seq 20); do "$@"; cat /etc/tmpfiles.d/* /etc/systemd/system/*/*; done; true'

    # After each look at it there is time for another swap.
    slowly = ("strace", "-qq", "-o", "/dev/null", "-e", "inject=%file:delay_exit=3000")
    looks = ("-P", str(recordings), "-P", recordings.name)

    with swapping(recordings, link):
        done = etc("--recordings", recordings, prefix=("sh", "-c", often, "sh", *slowly, *looks))

    assert not owned.exists() and f"f {owned}" not in done.stdout
    assert "is it a link?" in done.stderr  # seen as the one,
    assert f"a+ {recordings} - - - - " in done.stdout  # and as the other


# In the place of the real one: its caller is as far as this, and the parent goes.
SWAP_ONCE = """#!/bin/sh
if [ ! -L {parent} ]; then mv {parent} {parent}-was && ln -s {other} {parent}; fi
exec /run/real-tmpfiles "$@"
"""


@pytest.mark.parametrize("kind", ["ext4", "ramfs"])
def test_what_a_parent_is_swapped_for_is_not_opened_neither_by_setup_nor_at_boot(
    etc: Etc, kind: str
) -> None:
    parent = etc.directory("parent")
    recordings = etc.directory("parent/recordings")
    other = etc.place / "of-root"
    (secret := other / "recordings" / "call").mkdir(parents=True, mode=0o700)
    before = [path.stat().st_ctime_ns for path in (secret.parent, secret)]
    stand_in = etc.place / "swap"
    stand_in.write_text(SWAP_ONCE.format(parent=parent, other=other))
    stand_in.chmod(0o755)
    swap = (
        f"{'true' if kind != 'ramfs' else f'mount -t ramfs none {recordings}'}\n"
        f"chown {BACKEND.pw_uid}:{BACKEND.pw_gid} {recordings}\n"
        f"cp /bin/systemd-tmpfiles /run/real-tmpfiles\n"
        f"mount --bind {stand_in} /bin/systemd-tmpfiles"
    )
    boot = '"$@"; code=$?; systemd-tmpfiles --create /etc/tmpfiles.d/*; exit $code'

    again = ("sh", "-c", boot, "sh")
    done = etc("--recordings", recordings, code=1, prefix=(*in_mounts(swap), *again))

    assert parent.is_symlink() and "failed nothing can be deleted in " in done.stdout
    assert [path.stat().st_ctime_ns for path in (secret.parent, secret)] == before


def test_what_is_in_it_is_opened_and_what_is_not_the_owner_s_is_named(etc: Etc) -> None:
    """By ACLs that hold for what comes later."""
    recordings = etc.directory("recordings")
    etc.storage.chmod(0o750)
    for number in range(30):
        call = etc.directory(f"recordings/call-{number}")
        (call / "mixed.wav").touch(mode=0o600)
        os.chown(call / "mixed.wav", BACKEND.pw_uid, BACKEND.pw_gid)
    (foreign := recordings / "of-root").mkdir()
    (secret := call / "meta.json").touch(mode=0o600)

    done = etc("--recordings", recordings, code=1)

    assert "failed 'of-root' (mode 755, owner 0) cannot be read and written" in done.stdout
    assert f"failed 'call-29/meta.json' cannot be read by user {SERVICE.pw_uid}" in done.stdout
    assert f"sudo find {recordings} ! -uid {BACKEND.pw_uid}" in done.stdout
    for path in (foreign, secret):
        os.chown(path, BACKEND.pw_uid, BACKEND.pw_gid)
    for more in ((), ("--backend-user", BACKEND.pw_name)):  # what is opened by now does not matter
        done = etc("--recordings", recordings, *more)
        assert f"there  {SERVICE.pw_name} may write and delete in {recordings}" in done.stdout
    assert os.getxattr(recordings, ACL) and os.getxattr(etc.storage, ACL)


def refusal(path: object) -> str:
    """Why a directory is refused, as `refuses` shows it for some."""
    with pytest.raises(ValueError) as refused:
        serversync._place(str(path))
    return str(refused.value)


def test_who_else_could_put_another_directory_there_is_named(etc: Etc) -> None:
    recordings = etc.directory("recordings")
    etc.storage.chmod(0o775)
    by_group = refusal(recordings)
    assert f"{etc.storage} (mode 775, user {BACKEND.pw_uid}) lets others put" in by_group
    etc.storage.chmod(0o755)
    os.chown(etc.storage, THIRD.pw_uid, THIRD.pw_gid)
    (by_owner,) = etc.refuses(recordings)
    assert f"{etc.storage} (mode 755, user {THIRD.pw_uid}) lets others put" in by_owner
    assert f"only root and its owner, user {BACKEND.pw_uid}, may write there" in by_owner


def test_names_that_a_file_of_root_s_would_read_otherwise_are_refused(etc: Etc) -> None:
    odd = [etc.directory(name) for name in ("a b", "a:b", "%h", "x\nf y", "ü", "a\\b", "$x", '"')]
    letters = "must be an absolute path of letters, digits and "
    for path in (*odd, etc.storage / "..", "storage/recordings"):
        assert letters in refusal(path)
    (etc.storage / "link").symlink_to(etc.directory("real"))
    (etc.storage / "file").touch()
    for name in ("link", "link/real", "file"):
        assert "is it a link? (readlink -f " in refusal(etc.storage / name)
    newline, link, gone = etc.refuses(odd[3], etc.storage / "link", etc.storage / "gone")
    assert letters in newline and "is it a link?" in link and "start the backend once" in gone


def test_directories_of_the_system_and_homes_are_refused(etc: Etc) -> None:
    homes = {user.pw_dir for user in pwd.getpwall() if user.pw_dir.startswith("/var/")}
    system = {"/", "/etc", "/etc/systemd", "/var", "/var/lib", "/var/log", "/usr/share", "/root"}
    system |= {
        f"/proc/{os.getpid()}/{'root'}/srv/calls",
        "/proc/self/cwd/calls",
        f"/{'root'}/calls",
    }
    system |= {"/var/spool/cron/crontabs", "/var/lib/dpkg/info", "/var/lib/apt", "/var/cache/apt/x"}
    system |= {"", "/home", "/home/pi", "/opt", "/srv", "/proc/sys", "/boot/firmware", "/run/lock"}
    needed = "a directory of its own is needed"
    for path in system | homes:
        assert needed in refusal(path), path
    name = "recordings/of-nobody"
    places = ("/opt/virtual-voicebot/storage", "/srv", "/home/pi", "/var/lib/voicebot", "/mnt/usb")
    for place in (*places, "/media/pi/usb", "/data"):
        assert "start the backend once" in refusal(f"{place}/{name}"), place
    assert all(needed in said for said in etc.refuses("/etc", ""))


def test_what_the_other_option_wrote_stays_and_so_does_what_somebody_else_did(etc: Etc) -> None:
    first, second, sounds = map(etc.directory, ("first", "second", "sounds"))
    mine = etc.written / "tmpfiles.d" / "serversync-recordings.conf"
    mine.write_bytes(b"# mine, \xff\nd /run/mine")
    etc("--recordings", first)
    before = etc.files()
    etc("--announcements", sounds, "--backend-user", THIRD.pw_name)
    after = etc.files()
    for name, text in before.items():
        assert text and after[name].startswith(text) and str(sounds) in after[name]
    assert f"d:u:{THIRD.pw_uid}:rwx" in after["serversync-recordings.conf"]

    etc("--recordings", second)

    for text in etc.files().values():
        assert str(first) not in text and str(second) in text and str(sounds) in text
    assert mine.read_bytes().startswith(b"# mine, \xff\nd /run/mine\n")
    again = etc.files()
    etc("--recordings", second, "--announcements", sounds, "--backend-user", THIRD.pw_name)
    assert etc.files() == again


def test_a_file_system_without_acls_is_opened_by_the_service_s_group(etc: Etc) -> None:
    recordings, group = etc.directory("recordings"), SERVICE.pw_gid
    call = f"{recordings}/call@1"
    fill = f"mkdir -m 755 {call}; : >{call}/mixed.wav; chown -R {BACKEND.pw_uid} {recordings}"
    look = (
        f"mkdir {recordings}/later; stat -c '%a %g' {recordings} {call} {call}/* {recordings}/later"
    )
    script = f'mount -t ramfs none {recordings}; {fill}; "$@"; code=$?; {look}; exit $code'

    done = etc("--recordings", recordings, prefix=("sh", "-c", script, "sh"))

    assert f"there  {SERVICE.pw_name} may write and delete in {recordings}" in done.stdout
    assert "UMask=0002" in done.stdout
    modes = [f"2775 {group}", f"2775 {group}", f"664 {group}", f"2755 {group}"]
    assert done.stdout.splitlines()[-4:] == modes

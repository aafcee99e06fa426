"""The announcements' audio: fetched beside its place, checked, renamed into it; nobody else's file
is overwritten or deleted."""

import os
import stat
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

import serversync
from backend import write_wav
from frontend import Frontend, Reply
from pi import Pi
from settings import AUDIO, Desired, Puller, announcement, flow, wait_pulls
from waiting import wait_until

NAME = "greeting.wav"
FIRST, SECOND = "2026-11-18T09:00:00Z", "2026-11-18T10:00:00Z"  # versions of a file
A_STRANGER = "a file of this name that we did not write is there"


def wav(tmp_path: Path, seconds: float = 0.2, seed: int = 1) -> bytes:
    path = tmp_path / f"{seed}.wav"
    write_wav(path, seconds, seed)
    return path.read_bytes()


class Studio(Puller):
    """Pulls announcements with audio; the directory in which it is put, and what is known of it."""

    def __init__(self, pi: Pi, tmp_path: Path) -> None:
        super().__init__(pi)
        self.directory, self._tmp_path = pi.backend.announcements_dir, tmp_path

    def offers(self, *names: str, seed: int = 1) -> bytes:
        """The frontend has these files."""
        sound = wav(self._tmp_path, seed=seed)
        for name in names or (NAME,):
            self.frontend.pages[AUDIO + quote(name)] = sound
        return sound

    def wants(self, *names: str, at: str = FIRST) -> None:
        """The frontend has announcements with these files, of this version; that is pulled."""
        announce(self.frontend, *(names or (NAME,)), at=at)
        self()

    def files(self) -> dict[str, bytes]:
        """All that is in the directory, hidden files too."""
        return {path.name: path.read_bytes() for path in self.directory.iterdir() if path.is_file()}

    def row(self, name: str = NAME) -> dict[str, Any]:
        query = "SELECT * FROM serversync.audio_files WHERE name = %s"
        (found,) = self.db.dicts(query, (name,))
        return found

    def make_due(self) -> None:
        self.db.execute("UPDATE serversync.audio_files SET next_attempt_at = now()")

    def no_longer_wanted(self) -> None:
        """For an hour."""
        self.db.execute("UPDATE serversync.audio_files SET unwanted = true")
        self.make_due()

    def asked(self) -> list[str]:
        """The questions for files."""
        return [request.path for request in self.frontend.requests if AUDIO in request.path]


def announce(frontend: Frontend, *names: str, at: str = FIRST) -> None:
    listed = [
        announcement(name[:20], id=f"00000000-0000-4000-8000-{n:012}", updatedAt=at)
        | {"audioFileUrl": AUDIO + name, "ttsText": None}
        for n, name in enumerate(names)
    ]
    Desired(announcements=listed).serve(frontend)


@pytest.fixture
def studio(pi: Pi, tmp_path: Path) -> Studio:
    """Its frontend has one announcement with a file, which is pulled but not yet fetched."""
    made = Studio(pi, tmp_path)
    made.offers()
    made.wants()
    return made


def test_audio_is_fetched_whole_and_readable_for_the_backend(pi: Pi, tmp_path: Path) -> None:
    studio = Studio(pi, tmp_path)
    names = [NAME, "お知らせ 1.wav", "a+b&c=d.wav"]
    sounds = {name: wav(tmp_path, seed=n) for n, name in enumerate(names)}
    for name, sound in sounds.items():
        pi.frontend.pages[AUDIO + quote(name)] = sound
    announce(pi.frontend, *names)
    private = ("sh", "-c", 'umask 077; exec "$@"', "-")
    running = pi.agent(FRONTEND_SYNC_INTERVAL_SEC=0.3, prefix=private)
    for name in names:
        running.wait_log(f"announcement audio {name} fetched")
    assert studio.files() == sounds
    for path in studio.directory.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o644 and path.stat().st_nlink == 1
    wait_until(lambda: studio.row()["fetched"], what="its row")
    assert sorted(studio.asked()) == sorted(AUDIO + quote(name) for name in names), "each once"


def test_it_comes_from_below_the_base_url_with_the_token_and_never_from_elsewhere(
    pi: Pi, tmp_path: Path
) -> None:
    studio = Studio(pi, tmp_path)
    with Frontend(tmp_path / "voice", base_path="/voice") as own:
        announce(own, NAME)
        own.require_token = "secret-token"
        own.pages[AUDIO + NAME] = Reply(302, {"Location": f"{pi.frontend.url}{AUDIO}{NAME}"})
        settings: dict[str, Any] = {"FRONTEND_BASE_URL": own.url, "SYNC_TOKEN": "secret-token"}
        studio(**settings)
        (trouble,) = studio.audio(**settings)
        assert "redirect" in trouble and not pi.frontend.requests
        own.pages[AUDIO + NAME] = sound = wav(tmp_path)
        studio.make_due()
        assert studio.audio(**settings) == []
        assert studio.files() == {NAME: sound}


def test_what_is_not_the_audio_is_not_put_there_and_an_old_version_stays(
    studio: Studio, tmp_path: Path
) -> None:
    sound = wav(tmp_path, seed=2)
    longer = len(sound) + 100
    cut = sound[:4] + longer.to_bytes(4, "little") + sound[8:]
    there: dict[str, bytes] = {}
    bad: list[tuple[Reply | bytes, str]] = [
        (Reply(404), "does not have it yet: HTTP 404"),
        (Reply(200, {}, "<html>RIFF WAVE</html>"), "no WAV file"),
        (sound[:8] + b"AVI " + sound[12:], "no WAV file"),
        (cut, "cut"),  # shorter than its header says
        (Reply(200, {}, sound, half=True), "closed the connection"),
        (Reply(500), "the frontend has trouble"),
        (sound + bytes(serversync.AUDIO_MAX), "longer than 10240 KiB"),
    ]
    for number, (answer, reason) in enumerate(bad):
        studio.wants(at=f"2026-11-18T1{number}:00:00Z")
        studio.frontend.pages[AUDIO + NAME] = answer
        (trouble,) = studio.audio()
        assert reason in trouble and studio.files() == there
        assert (studio.row()["tries"], studio.row()["error"]) == (1, trouble)
        waits = "SELECT extract(epoch FROM next_attempt_at - now()) FROM serversync.audio_files"
        assert 0 < studio.db.value(waits) < 2.1
        there = {NAME: studio.offers(seed=number)}
        studio.make_due()
        assert studio.audio() == [] and studio.files() == there
        assert (studio.row()["tries"], studio.row()["error"]) == (0, None)


def test_what_is_there_of_an_unchanged_version_is_not_fetched_again(studio: Studio) -> None:
    sound = studio.offers()
    studio.frontend.pages[AUDIO + NAME] = piped = sound[:4] + b"\xff\xff\xff\xff" + sound[8:]
    for _ in range(3):
        studio()
        assert studio.audio() == []
    assert studio.files() == {NAME: piped}, "a WAV of unknown length"
    assert studio.asked() == [AUDIO + NAME]
    studio.wants(at="2026-11-18T10:00:00+00:00")
    assert studio.audio() == []
    assert studio.row()["fetched"].startswith("2026-11-18T10")
    (studio.directory / NAME).unlink()
    assert studio.audio() == [] and studio.files() == {NAME: piped}


def test_what_is_no_longer_referenced_goes_one_hour_later(pi: Pi, studio: Studio) -> None:
    names = [NAME, "other.wav", "third.wav"]
    studio.offers(*names)
    studio.wants(*names)
    assert studio.audio() == []
    before = studio.asked()
    for wanted in (names[:2], names, names[:2]):  # referenced again within the hour: it stays
        studio.wants(*wanted)
        assert studio.row("third.wav")["unwanted"] == ("third.wav" not in wanted)
    assert studio.audio() == [] and studio.asked() == before
    left = "SELECT next_attempt_at - now() FROM serversync.audio_files WHERE unwanted"
    assert timedelta(minutes=50) < pi.db.value(left) <= timedelta(hours=1)
    running = pi.agent(FRONTEND_SYNC_INTERVAL_SEC=0.2)
    wait_pulls(pi.db, 3)
    assert set(studio.files()) == set(names) and pi.db.value(left) <= timedelta(hours=1)
    pi.db.execute("UPDATE serversync.audio_files SET next_attempt_at = now() WHERE unwanted")
    running.wait_log("announcement audio third.wav removed")
    assert set(studio.files()) == set(names[:2])
    row = "SELECT FROM serversync.audio_files WHERE name = 'third.wav'"
    wait_until(lambda: not pi.db.rows(row), what="the end of its row", state=running.log)


def test_a_file_of_somebody_else_is_neither_overwritten_nor_deleted(
    studio: Studio, tmp_path: Path
) -> None:
    directory, elsewhere = studio.directory, tmp_path / "elsewhere"
    elsewhere.write_bytes(b"precious")
    (directory / NAME).write_bytes(b"recorded by hand")
    (directory / "link.wav").symlink_to(elsewhere)
    (directory / "folder.wav").mkdir()
    (directory / "unknown.wav").write_bytes(b"nobody knows")
    names = [NAME, "link.wav", "folder.wav"]
    studio.offers(*names)
    studio.wants(*names)
    before = studio.files()
    assert studio.audio() == [A_STRANGER] * 3
    assert not studio.asked()
    Desired(announcements=[announcement(), announcement()]).serve(studio.frontend)
    studio.db.execute("UPDATE serversync.audio_files SET digests = '{1}' WHERE name = 'link.wav'")
    studio()
    studio.make_due()
    assert studio.audio() == [] and not studio.db.rows("SELECT FROM serversync.audio_files")
    assert studio.files() == before and elsewhere.read_bytes() == b"precious"
    assert (directory / "link.wav").is_symlink() and (directory / "folder.wav").is_dir()


def test_a_file_that_somebody_exchanged_is_not_ours_any_more(studio: Studio) -> None:
    studio.audio()
    path = studio.directory / NAME
    same = path.read_bytes()
    path.unlink()
    path.write_bytes(same)  # as from a backup: another inode, the same bytes
    newer = studio.offers(seed=2)
    studio.wants(at=SECOND)
    assert studio.audio() == [] and path.read_bytes() == newer
    path.unlink()
    path.write_bytes(b"another one's")
    studio.no_longer_wanted()
    assert studio.audio() == [] and path.read_bytes() == b"another one's"


def test_a_file_that_appears_while_ours_is_fetched_stays(studio: Studio) -> None:
    path = studio.directory / NAME
    assert studio.audio(lambda: path.write_bytes(b"by hand")) == [A_STRANGER]
    assert studio.files() == {NAME: b"by hand"}


@pytest.mark.parametrize("renamed", [False, True], ids=["before the rename", "after it"])
def test_a_kill_around_the_rename_makes_no_stranger_of_our_file(
    studio: Studio, monkeypatch: pytest.MonkeyPatch, renamed: bool
) -> None:
    rename = os.rename

    def killed(*names: Any, **folders: Any) -> None:
        if renamed:
            rename(*names, **folders)
        raise SystemExit("killed")

    for seed, version in enumerate((FIRST, SECOND)):
        studio.wants(at=version)
        sound = studio.offers(seed=seed)
        for _ in range(2):
            with monkeypatch.context() as patch, pytest.raises(SystemExit):
                patch.setattr(os, "rename", killed)
                studio.audio()
        assert studio.audio() == [] and studio.files() == {NAME: sound}
        assert len(studio.row()["digests"]) == 1
    studio.no_longer_wanted()
    assert studio.audio() == [] and studio.files() == {}


def test_two_that_fetch_one_file_make_no_stranger_of_it(studio: Studio) -> None:
    done: list[list[str]] = []

    def as_well() -> None:
        if not done:
            done.append([])
            studio.offers(seed=2)
            done.append(studio.audio())

    assert studio.audio(as_well) == [] and done == [[], []]
    assert studio.row()["error"] is None
    sound = studio.offers(seed=3)
    studio.wants(at=SECOND)
    assert studio.audio() == [] and studio.files() == {NAME: sound}


def test_leftovers_are_removed_but_not_what_is_being_fetched(studio: Studio) -> None:
    no_text = os.fsdecode(b"\xff.wav")
    for name in (".serversync-old", ".serversync-now", ".other", no_text):
        (studio.directory / name).write_bytes(b"half")
    for name in (".serversync-old", ".other"):
        os.utime(studio.directory / name, (1, 1))
    assert studio.audio() == []
    assert set(studio.files()) == {".serversync-now", ".other", no_text, NAME}


def test_a_directory_that_is_missing_is_said_once_and_the_settings_are_applied(
    pi: Pi, tmp_path: Path
) -> None:
    studio, directory = Studio(pi, tmp_path), tmp_path / "not there"
    announce(pi.frontend, NAME)
    running = pi.agent(FRONTEND_SYNC_INTERVAL_SEC=0.2, ANNOUNCEMENT_AUDIO_DIR=directory)
    running.wait_log(f"has to wait: {directory}: No such file or directory")
    assert pi.db.value("SELECT count(*) FROM announcements") == 1
    wait_until(lambda: studio.row()["tries"] >= 2, what="another try")
    directory.mkdir()
    studio.offers()
    studio.make_due()
    wait_until((directory / NAME).exists, what="the file", state=running.log)
    assert len(running.lines("has to wait")) == 1


def test_a_call_and_its_recording_pass_a_slow_download_and_a_stop_ends_it(
    pi: Pi, tmp_path: Path
) -> None:
    sound = tmp_path / "long.wav"
    write_wav(sound, 200)
    pi.frontend.pages[AUDIO + NAME] = Reply(200, {}, sound, pace=1)  # for 100 s
    announce(pi.frontend, NAME)
    running = pi.agent(FRONTEND_SYNC_INTERVAL_SEC=60)
    directory = pi.backend.announcements_dir
    wait_until(
        lambda: any(path.stat().st_size for path in directory.glob(".serversync-*")),
        what="the download",
        state=running.log,
    )
    pi.wait_file(pi.backend.end_call())
    assert not (directory / NAME).exists(), "the download was over before"
    code, seconds = running.stop()
    assert code == 0 and seconds < 10
    assert not list(directory.iterdir())


def test_a_large_file_does_not_go_through_memory(pi: Pi, tmp_path: Path) -> None:
    pi.frontend.pages[AUDIO + NAME] = sound = wav(tmp_path, 320)
    assert len(sound) > 10_000_000
    running = pi.agent(FRONTEND_SYNC_INTERVAL_SEC=60)
    running.wait_log("no settings now")
    before = running.rss_peak_kib()
    announce(pi.frontend, NAME)
    running.hup()
    running.wait_log(f"announcement audio {NAME} fetched (10.2 MB)")
    assert (pi.backend.announcements_dir / NAME).read_bytes() == sound
    assert running.rss_peak_kib() - before < 6 * 1024


def test_the_audio_of_what_is_bad_now_stays_as_that_does(studio: Studio) -> None:
    studio.offers("newer.wav")
    sound = announcement(audioFileUrl=AUDIO + NAME)
    plays = flow(announcementId=sound["id"])

    def pull(menu: dict[str, Any], sound: dict[str, Any] = sound) -> None:
        Desired(announcements=[sound], flows=[menu]).serve(studio.frontend)
        studio()

    pull(flow())
    assert studio.audio() == []
    pull(flow(), sound | {"name": "x" * 101})
    assert not studio.row()["unwanted"]
    pull(plays)
    sound["audioFileUrl"] = AUDIO + "newer.wav"
    pull(plays | {"timeoutSec": 2.5})
    assert studio.audio() == [] and not studio.row()["unwanted"] and len(studio.files()) == 2
    pull(plays)
    assert studio.row()["unwanted"]


def test_trouble_with_the_frontend_does_not_ask_for_every_file(pi: Pi) -> None:
    names = [f"{n}.wav" for n in range(10)]
    announce(pi.frontend, *names)
    for name in names:
        pi.frontend.pages[AUDIO + name] = Reply(503)
    running = pi.agent(FRONTEND_SYNC_INTERVAL_SEC=60)
    running.wait_log("has to wait: the frontend has trouble")
    running.stop()
    assert len([request for request in pi.frontend.requests if AUDIO in request.path]) <= 2

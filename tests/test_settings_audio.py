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
from agent import AgentFactory
from backend import Backend, write_wav
from frontend import Frontend, Reply
from pg import Database
from settings import AUDIO, Desired, Puller, announcement, flow, wait_pulls
from waiting import wait_until

NAME = "greeting.wav"


@pytest.fixture
def pull(db: Database, frontend: Frontend, backend: Backend) -> Puller:
    return Puller(db, frontend, backend)


def wav(tmp_path: Path, seconds: float = 0.2, seed: int = 1) -> bytes:
    path = tmp_path / f"{seed}.wav"
    write_wav(path, seconds, seed)
    return path.read_bytes()


def wants(frontend: Frontend, *names: str, at: str = "2026-11-18T09:00:00Z") -> None:
    """The frontend has announcements with these files."""
    listed = [
        announcement(name[:20], id=f"00000000-0000-4000-8000-{n:012}", updatedAt=at)
        | {"audioFileUrl": AUDIO + name, "ttsText": None}
        for n, name in enumerate(names)
    ]
    Desired(announcements=listed).serve(frontend)


def files(backend: Backend) -> dict[str, bytes]:
    """All that is in the directory, hidden files too."""
    there = backend.announcements_dir.iterdir()
    return {path.name: path.read_bytes() for path in there if path.is_file()}


def row(db: Database, name: str = NAME) -> dict[str, Any]:
    (found,) = db.dicts("SELECT * FROM serversync.audio_files WHERE name = %s", (name,))
    return found


def make_due(db: Database) -> None:
    db.execute("UPDATE serversync.audio_files SET next_attempt_at = now()")


def no_longer_wanted(db: Database) -> None:
    """For an hour."""
    db.execute("UPDATE serversync.audio_files SET unwanted = true, next_attempt_at = now()")


def test_audio_is_fetched_whole_and_readable_for_the_backend(
    agent: AgentFactory, backend: Backend, frontend: Frontend, db: Database, tmp_path: Path
) -> None:
    names = [NAME, "お知らせ 1.wav", "a+b&c=d.wav"]
    sounds = {name: wav(tmp_path, seed=n) for n, name in enumerate(names)}
    for name, sound in sounds.items():
        frontend.pages[AUDIO + quote(name)] = sound
    wants(frontend, *names)
    running = agent(
        FRONTEND_SYNC_INTERVAL_SEC=0.3, prefix=("sh", "-c", 'umask 077; exec "$@"', "-")
    )
    wait_until(lambda: files(backend) == sounds, what="the files", state=running.log)
    running.wait_log(f"announcement audio {NAME} fetched")

    for path in backend.announcements_dir.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o644 and path.stat().st_nlink == 1
    wait_until(lambda: row(db)["fetched"], what="its row")
    asked = [request.path for request in frontend.of_kind("other") if AUDIO in request.path]
    assert sorted(asked) == sorted(AUDIO + quote(name) for name in names), "each once"


def test_it_comes_from_below_the_base_url_with_the_token_and_never_from_elsewhere(
    pull: Puller, backend: Backend, frontend: Frontend, tmp_path: Path
) -> None:
    with Frontend(tmp_path / "voice", base_path="/voice") as own:
        wants(own, NAME)
        own.require_token = "secret-token"
        own.pages[AUDIO + NAME] = Reply(302, {"Location": f"{frontend.url}{AUDIO}{NAME}"})
        settings: dict[str, Any] = {"FRONTEND_BASE_URL": own.url, "SYNC_TOKEN": "secret-token"}
        pull(**settings)
        (trouble,) = pull.audio(**settings)
        assert "redirect" in trouble and not frontend.requests
        own.pages[AUDIO + NAME] = sound = wav(tmp_path)
        make_due(pull.db)
        assert pull.audio(**settings) == []
        assert files(backend) == {NAME: sound}


def bad_answers(sound: bytes) -> dict[str, tuple[Reply | bytes, str]]:
    longer = len(sound) + 100
    cut = sound[:4] + longer.to_bytes(4, "little") + sound[8:]
    return {
        "not there yet": (Reply(404), "does not have it yet: HTTP 404"),
        "an error page with 200": (Reply(200, {}, "<html>RIFF WAVE</html>"), "no WAV file"),
        "another RIFF": (sound[:8] + b"AVI " + sound[12:], "no WAV file"),
        "empty": (b"", "no WAV file"),
        "shorter than its header says": (cut, "cut"),
        "shorter than announced": (Reply(200, {}, sound, half=True), "closed the connection"),
        "a server's error": (Reply(500), "the frontend has trouble"),
        "no answer": (Reply(stall=30), "did not answer in time"),
        "too large": (sound + bytes(serversync.AUDIO_MAX), "longer than 10240 KiB"),
    }


@pytest.mark.parametrize("bad", bad_answers(bytes(100)))
def test_what_is_not_the_audio_is_not_put_there_and_an_old_version_stays(
    pull: Puller, backend: Backend, frontend: Frontend, db: Database, tmp_path: Path, bad: str
) -> None:
    sound, newer = wav(tmp_path), wav(tmp_path, seed=2)
    answer, reason = bad_answers(newer)[bad]
    wants(frontend, NAME)
    pull()
    frontend.pages[AUDIO + NAME] = answer
    (trouble,) = pull.audio(SYNC_TIMEOUT_SEC=1)
    assert reason in trouble and files(backend) == {}
    assert (row(db)["tries"], row(db)["error"]) == (1, trouble)
    waits = "SELECT extract(epoch FROM next_attempt_at - now()) FROM serversync.audio_files"
    assert 0 < db.value(waits) < 2.1
    frontend.pages[AUDIO + NAME] = sound
    make_due(db)
    assert pull.audio() == [] and files(backend) == {NAME: sound}
    assert (row(db)["tries"], row(db)["error"]) == (0, None)

    wants(frontend, NAME, at="2026-11-18T10:00:00Z")
    pull()
    frontend.pages[AUDIO + NAME] = answer
    (trouble,) = pull.audio(SYNC_TIMEOUT_SEC=1)
    assert reason in trouble and files(backend) == {NAME: sound}
    frontend.pages[AUDIO + NAME] = newer
    make_due(db)
    assert pull.audio() == [] and files(backend) == {NAME: newer}


def test_a_wav_of_unknown_length_is_taken(
    pull: Puller, backend: Backend, frontend: Frontend, tmp_path: Path
) -> None:
    sound = wav(tmp_path)
    frontend.pages[AUDIO + NAME] = piped = sound[:4] + b"\xff\xff\xff\xff" + sound[8:]
    wants(frontend, NAME)
    pull()
    assert pull.audio() == [] and files(backend) == {NAME: piped}


def test_404_is_asked_again_more_and_more_rarely_and_said_once(
    agent: AgentFactory, backend: Backend, frontend: Frontend, db: Database, tmp_path: Path
) -> None:
    wants(frontend, NAME)
    running = agent(FRONTEND_SYNC_INTERVAL_SEC=0.2)
    running.wait_log("has to wait: the frontend does not have it yet: HTTP 404")
    wait_until(lambda: row(db)["tries"] >= 2, what="another try")
    assert len(running.lines("has to wait")) == 1
    frontend.pages[AUDIO + NAME] = sound = wav(tmp_path)
    make_due(db)
    wait_until(lambda: files(backend) == {NAME: sound}, what="the file", state=running.log)


def test_an_unchanged_version_is_not_fetched_again(
    pull: Puller, frontend: Frontend, db: Database, tmp_path: Path
) -> None:
    frontend.pages[AUDIO + NAME] = wav(tmp_path)
    wants(frontend, NAME)
    for _ in range(3):
        pull()
        assert pull.audio() == []
    paths = [request.path for request in frontend.requests]
    assert paths.count(AUDIO + NAME) == 1
    wants(frontend, NAME, at="2026-11-18T10:00:00+00:00")
    pull()
    assert pull.audio() == []
    assert row(db)["fetched"].startswith("2026-11-18T10")


def test_a_file_that_somebody_deleted_is_fetched_again(
    pull: Puller, backend: Backend, frontend: Frontend, tmp_path: Path
) -> None:
    frontend.pages[AUDIO + NAME] = wav(tmp_path)
    wants(frontend, NAME)
    pull()
    pull.audio()
    before = files(backend)
    (backend.announcements_dir / NAME).unlink()
    assert pull.audio() == [] and files(backend) == before


def test_what_is_no_longer_referenced_goes_one_hour_later(
    agent: AgentFactory, pull: Puller, backend: Backend, frontend: Frontend, db: Database,
    tmp_path: Path,
) -> None:  # fmt: skip
    names = [NAME, "other.wav", "third.wav"]
    for n, name in enumerate(names):
        frontend.pages[AUDIO + name] = wav(tmp_path, seed=n)
    wants(frontend, *names)
    pull()
    assert pull.audio() == []
    wants(frontend, *names[:2])
    pull()
    left = "SELECT next_attempt_at - now() FROM serversync.audio_files WHERE unwanted"
    assert timedelta(minutes=50) < db.value(left) <= timedelta(hours=1)
    running = agent(FRONTEND_SYNC_INTERVAL_SEC=0.2)
    wait_pulls(db, 3)
    assert set(files(backend)) == set(names) and db.value(left) <= timedelta(hours=1)
    db.execute("UPDATE serversync.audio_files SET next_attempt_at = now() WHERE unwanted")
    running.wait_log("announcement audio third.wav removed")
    assert set(files(backend)) == set(names[:2])
    assert not db.rows("SELECT FROM serversync.audio_files WHERE name = 'third.wav'")


def test_what_is_referenced_again_within_the_hour_stays(
    pull: Puller, backend: Backend, frontend: Frontend, db: Database, tmp_path: Path
) -> None:
    names = [NAME, "other.wav"]
    for name in names:
        frontend.pages[AUDIO + name] = wav(tmp_path)
    wants(frontend, *names)
    pull()
    pull.audio()
    wants(frontend, names[0])
    pull()
    assert row(db, "other.wav")["unwanted"]
    wants(frontend, *names)
    pull()
    assert not row(db, "other.wav")["unwanted"]
    asked = len(frontend.requests)
    assert pull.audio() == [] and len(frontend.requests) == asked


def test_a_file_of_somebody_else_is_neither_overwritten_nor_deleted(
    pull: Puller, backend: Backend, frontend: Frontend, db: Database, tmp_path: Path
) -> None:
    directory, elsewhere = backend.announcements_dir, tmp_path / "elsewhere"
    elsewhere.write_bytes(b"precious")
    (directory / NAME).write_bytes(b"recorded by hand")
    (directory / "link.wav").symlink_to(elsewhere)
    (directory / "folder.wav").mkdir()
    (directory / "unknown.wav").write_bytes(b"nobody knows")
    names = [NAME, "link.wav", "folder.wav"]
    for name in names:
        frontend.pages[AUDIO + name] = wav(tmp_path)
    wants(frontend, *names)
    pull()
    before = files(backend)
    troubles = pull.audio()
    assert troubles == ["a file of this name that we did not write is there"] * 3
    assert not [request for request in frontend.requests if AUDIO in request.path]
    Desired(announcements=[announcement(), announcement()]).serve(frontend)
    db.execute("UPDATE serversync.audio_files SET digests = '{1}' WHERE name = 'link.wav'")
    pull()
    make_due(db)
    assert pull.audio() == [] and not db.rows("SELECT FROM serversync.audio_files")
    assert files(backend) == before and elsewhere.read_bytes() == b"precious"
    assert (directory / "link.wav").is_symlink() and (directory / "folder.wav").is_dir()


def test_a_file_that_somebody_exchanged_is_not_ours_any_more(
    pull: Puller, backend: Backend, frontend: Frontend, db: Database, tmp_path: Path
) -> None:
    frontend.pages[AUDIO + NAME] = wav(tmp_path)
    wants(frontend, NAME)
    pull()
    pull.audio()
    path = backend.announcements_dir / NAME
    same = path.read_bytes()
    path.unlink()
    path.write_bytes(same)  # as from a backup: another inode, the same bytes
    wants(frontend, NAME, at="2026-11-18T10:00:00Z")
    frontend.pages[AUDIO + NAME] = newer = wav(tmp_path, seed=2)
    pull()
    assert pull.audio() == [] and path.read_bytes() == newer
    path.unlink()
    path.write_bytes(b"another one's")
    no_longer_wanted(db)
    assert pull.audio() == [] and path.read_bytes() == b"another one's"


def test_a_file_that_appears_while_ours_is_fetched_stays(
    pull: Puller, backend: Backend, frontend: Frontend, tmp_path: Path
) -> None:
    frontend.pages[AUDIO + NAME] = wav(tmp_path)
    wants(frontend, NAME)
    pull()
    path = backend.announcements_dir / NAME
    (trouble,) = pull.audio(lambda: path.write_bytes(b"by hand"))
    assert trouble == "a file of this name that we did not write is there"
    assert files(backend) == {NAME: b"by hand"}


@pytest.mark.parametrize("renamed", [False, True], ids=["before the rename", "after it"])
@pytest.mark.parametrize("refresh", [False, True], ids=["the first", "a new version"])
def test_a_kill_around_the_rename_makes_no_stranger_of_our_file(
    pull: Puller, backend: Backend, frontend: Frontend, db: Database, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, renamed: bool, refresh: bool,
) -> None:  # fmt: skip
    rename = os.rename

    def killed(*names: Any, **folders: Any) -> None:
        if renamed:
            rename(*names, **folders)
        raise SystemExit("killed")

    frontend.pages[AUDIO + NAME] = sound = wav(tmp_path)
    wants(frontend, NAME)
    pull()
    if refresh:
        pull.audio()
        wants(frontend, NAME, at="2026-11-18T10:00:00Z")
        frontend.pages[AUDIO + NAME] = sound = wav(tmp_path, seed=2)
        pull()
    for _ in range(2):
        with monkeypatch.context() as patch, pytest.raises(SystemExit):
            patch.setattr(os, "rename", killed)
            pull.audio()
    assert pull.audio() == [] and files(backend) == {NAME: sound}
    assert len(row(db)["digests"]) == 1
    no_longer_wanted(db)
    assert pull.audio() == [] and files(backend) == {}


def test_two_that_fetch_one_file_make_no_stranger_of_it(
    pull: Puller, backend: Backend, frontend: Frontend, db: Database, tmp_path: Path
) -> None:
    frontend.pages[AUDIO + NAME] = wav(tmp_path)
    wants(frontend, NAME)
    pull()
    done: list[list[str]] = []

    def as_well() -> None:
        if not done:
            done.append([])
            frontend.pages[AUDIO + NAME] = wav(tmp_path, seed=2)
            done.append(pull.audio())

    assert pull.audio(as_well) == [] and done == [[], []]
    assert row(db)["error"] is None
    wants(frontend, NAME, at="2026-11-18T10:00:00Z")
    frontend.pages[AUDIO + NAME] = sound = wav(tmp_path, seed=3)
    pull()
    assert pull.audio() == [] and files(backend) == {NAME: sound}


def test_names_that_are_no_text_are_no_obstacle(
    pull: Puller, backend: Backend, frontend: Frontend, tmp_path: Path
) -> None:
    frontend.pages[AUDIO + NAME] = wav(tmp_path)
    Path(os.fsdecode(os.fsencode(backend.announcements_dir) + b"/\xff.wav")).touch()
    wants(frontend, NAME)
    pull()
    assert pull.audio() == [] and len(files(backend)) == 2


def test_leftovers_are_removed_but_not_what_is_being_fetched(
    pull: Puller, backend: Backend, frontend: Frontend, tmp_path: Path
) -> None:
    directory = backend.announcements_dir
    for name in (".serversync-old", ".serversync-now", ".other"):
        (directory / name).write_bytes(b"half")
    os.utime(directory / ".serversync-old", (1, 1))
    os.utime(directory / ".other", (1, 1))
    frontend.pages[AUDIO + NAME] = wav(tmp_path)
    wants(frontend, NAME)
    pull()
    pull.audio()
    assert set(files(backend)) == {".serversync-now", ".other", NAME}


def test_a_directory_that_is_missing_is_said_and_the_settings_are_applied(
    agent: AgentFactory, frontend: Frontend, db: Database, tmp_path: Path
) -> None:
    wants(frontend, NAME)
    directory = tmp_path / "not there"
    running = agent(FRONTEND_SYNC_INTERVAL_SEC=0.2, ANNOUNCEMENT_AUDIO_DIR=directory)
    running.wait_log(f"has to wait: {directory}: No such file or directory")
    assert db.value("SELECT count(*) FROM announcements") == 1
    directory.mkdir()
    frontend.pages[AUDIO + NAME] = wav(tmp_path)
    make_due(db)
    wait_until((directory / NAME).exists, what="the file", state=running.log)


def test_a_call_and_its_recording_pass_a_slow_download_and_a_stop_ends_it(
    agent: AgentFactory, backend: Backend, frontend: Frontend, tmp_path: Path
) -> None:
    sound = tmp_path / "long.wav"
    write_wav(sound, 200)
    frontend.pages[AUDIO + NAME] = Reply(200, {}, sound, pace=1)  # for 100 s
    wants(frontend, NAME)
    running = agent(FRONTEND_SYNC_INTERVAL_SEC=60)
    directory = backend.announcements_dir
    wait_until(
        lambda: any(path.stat().st_size for path in directory.glob(".serversync-*")),
        what="the download",
        state=running.log,
    )
    call = backend.end_call()
    frontend.wait(lambda: call.call_log_id in frontend.files, what="the call's recording")
    assert NAME not in files(backend), "the download was over before"
    code, seconds = running.stop()
    assert code == 0 and seconds < 10
    assert files(backend) == {}


def test_a_large_file_does_not_go_through_memory(
    agent: AgentFactory, backend: Backend, frontend: Frontend, db: Database, tmp_path: Path
) -> None:
    frontend.pages[AUDIO + NAME] = sound = wav(tmp_path, 320)
    assert len(sound) > 10_000_000
    running = agent(FRONTEND_SYNC_INTERVAL_SEC=60)
    running.wait_log("no settings now")
    before = running.rss_peak_kib()
    wants(frontend, NAME)
    running.hup()
    running.wait_log(f"announcement audio {NAME} fetched (10.2 MB)")
    assert files(backend) == {NAME: sound}
    assert running.rss_peak_kib() - before < 6 * 1024


def test_the_audio_of_an_announcement_that_is_bad_now_stays(
    pull: Puller, backend: Backend, frontend: Frontend, db: Database, tmp_path: Path
) -> None:
    frontend.pages[AUDIO + NAME] = wav(tmp_path)
    wants(frontend, NAME)
    pull()
    pull.audio()
    wanted = frontend.pages["/api/announcements"]
    assert isinstance(wanted, dict)
    wanted["announcements"][0]["name"] = "x" * 101
    pull()
    assert not row(db)["unwanted"]
    wanted["announcements"] = [announcement()]
    pull()
    assert row(db)["unwanted"]


def test_the_audio_of_a_flow_that_is_bad_now_stays_as_the_flow_does(
    pull: Puller, backend: Backend, frontend: Frontend, db: Database, tmp_path: Path
) -> None:
    for name in (NAME, "newer.wav"):
        frontend.pages[AUDIO + name] = wav(tmp_path)
    sound = announcement(audioFileUrl=AUDIO + NAME)
    plays = flow(announcementId=sound["id"])
    Desired(announcements=[sound], flows=[plays]).serve(frontend)
    pull()
    assert pull.audio() == []
    sound["audioFileUrl"] = AUDIO + "newer.wav"
    Desired(announcements=[sound], flows=[plays | {"timeoutSec": 2.5}]).serve(frontend)
    pull()
    assert pull.audio() == [] and not row(db)["unwanted"] and len(files(backend)) == 2
    Desired(announcements=[sound], flows=[plays]).serve(frontend)
    pull()
    assert row(db)["unwanted"]


def test_trouble_with_the_frontend_does_not_ask_for_every_file(
    agent: AgentFactory, frontend: Frontend, db: Database
) -> None:
    names = [f"{n}.wav" for n in range(10)]
    wants(frontend, *names)
    for name in names:
        frontend.pages[AUDIO + name] = Reply(503)
    running = agent(FRONTEND_SYNC_INTERVAL_SEC=60)
    running.wait_log("has to wait: the frontend has trouble")
    running.stop()
    asked = [request for request in frontend.requests if AUDIO in request.path]
    assert len(asked) <= 2

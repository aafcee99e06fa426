"""The completion for bash, by a real bash, knows what the parser knows."""

import subprocess
from pathlib import Path

import pytest

from agent import REPOSITORY
from commandline import options, parsers, words

COMPLETION = REPOSITORY / "packaging" / "debian" / "serversync.bash-completion"
# As readline does: the words so far, the last one being typed, and then the registered function.
ASK = """
source "$1"
shift
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
registered=$(complete -p serversync)
[[ $registered == 'complete -F _serversync serversync' ]] || exit 3
_serversync
printf '%s\\n' "${COMPREPLY[@]}"
"""


def complete(*words: str, cwd: Path | None = None) -> list[str]:
    """What is offered for the last word."""
    done = subprocess.run(
        ["bash", "--norc", "-uc", ASK, "bash", COMPLETION, "serversync", *words],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=cwd,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


@pytest.mark.parametrize("command", parsers())
def test_a_command_is_completed_with_all_that_it_takes_and_nothing_else(command: str) -> None:
    parser = parsers()[command]

    assert sorted(complete(*command.split(), "")) == sorted(words(parser))
    assert sorted(complete(*command.split(), "--")) == sorted(options(parser))


def test_the_value_of_an_option_is_never_taken_for_a_command() -> None:
    for name, parser in parsers().items():
        for option, action in options(parser).items():
            if action.metavar is None:
                continue
            before, after = [*name.split(), option], [*name.split(), option, "status"]
            assert sorted(complete(*after, "--")) == sorted(options(parser)), after
            joined = [*before, "=", "status"]  # as bash splits --option=value
            assert sorted(complete(*joined, "--")) == sorted(options(parser)), joined
            for begun in ([""], ["--"], ["="], ["=", ""]):
                offered = set(complete(*before, *begun))
                assert not offered & {*options(parser), *words(parser)}, (before, begun)


def test_a_word_that_is_begun_is_completed() -> None:
    assert complete("dlq", "retry") == ["retry", "retry-all"]
    assert complete("--env-file", "x", "do") == ["doctor"]
    assert complete("replay", "--se") == ["--seq"]
    assert complete("dlq", "retry", "--force", "--js") == ["--json"]
    assert complete("nonsense", "--") == complete("dlq", "nonsense", "") == []


def test_files_directories_and_users_are_offered_where_they_are_wanted(tmp_path: Path) -> None:
    (tmp_path / "box.env").touch()
    (tmp_path / "boxes").mkdir()

    for before in (["--env-file"], ["--env-file", "="], ["admin", "--listen"]):
        assert sorted(complete(*before, "bo", cwd=tmp_path)) == ["box.env", "boxes"]
    assert sorted(complete("--env-file", "=", cwd=tmp_path)) == ["box.env", "boxes"]
    for option in ("--recordings", "--announcements"):
        assert complete("setup", option, "bo", cwd=tmp_path) == ["boxes"]
    assert complete("setup", "--admin-url", "bo", cwd=tmp_path) == []
    assert "root" in complete("setup", "--backend-user", "ro")

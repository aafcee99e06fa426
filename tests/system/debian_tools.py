"""Debian's own testers of packages, by tests/system/run: piuparts and autopkgtest."""

from pathlib import Path

import pytest

from box import MARKS, MIRROR, REPOSITORY, Box, Release, command
from test_debian import install_missing

pytest_plugins = ["machines"]
pytestmark = MARKS


def test_piuparts_finds_nothing_that_purge_leaves(
    release: Release, deb: Path, tmp_path: Path
) -> None:
    """On a minimal system, with systemd and nothing else."""
    if release.foreign:
        pytest.skip("the package is the same on all architectures")
    install_missing("mmdebstrap", "debian-archive-keyring", "piuparts")
    root = tmp_path / "root"
    minimal = ("--quiet", "--mode=root", "--variant=minbase", "--include=systemd-sysv")
    command("mmdebstrap", *minimal, release.name, root, MIRROR)
    arguments = (f"--existing-chroot={root}", f"--distribution={release.name}")
    where = (f"--mirror={MIRROR} main", f"--tmpdir={tmp_path}", "--no-eatmydata")
    theirs = "--ignore-regex=/var/cache/debconf/.*"  # made by debconf at the first installation

    said = command("piuparts", *arguments, *where, theirs, deb.resolve())

    assert "PASS: All tests" in said


def test_the_package_s_own_tests_pass_where_it_is_installed(
    bare: Box, deb: Path, tmp_path: Path
) -> None:
    """On a booted machine: autopkgtest … -- null."""
    source, packed = tmp_path / "source", tmp_path / "source.tar"
    command(REPOSITORY / "packaging" / "stage", "--worktree", source)
    command("tar", "-cf", packed, "-C", tmp_path, "source")
    bare.copy(deb, "/srv/package.deb")
    bare.copy(packed, "/srv/source.tar")
    bare.sh("apt-get update; apt-get install -y autopkgtest; tar -xf /srv/source.tar -C /srv")

    run = "autopkgtest --no-built-binaries --output-dir=/srv/output /srv/package.deb"
    said = bare.run("sh", "-c", f"{run} /srv/source/ -- null", check=False, timeout=1800).stdout

    assert bare.read("/srv/output/summary").split() == ["installed", "PASS"], said


def test_the_release_s_own_lintian_has_nothing_to_say(bare: Box, deb: Path) -> None:
    bare.copy(deb, "/srv/package.deb")
    bare.sh("apt-get update; apt-get install -y lintian")

    said = bare.run(
        *("lintian", "--pedantic", "--allow-root", "--fail-on=error,warning,pedantic"),
        "/srv/package.deb",
    ).stdout

    assert said.strip() == ""

"""The agent as a 32-bit program, beside the 64-bit one: in a Debian of that kind (i386), which this
processor runs as it is. What 32 bits cost is the same on a Raspberry Pi's armhf, near enough."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from drains import PENDING, enqueue
from small import first_start, import_floor, instructions
from world import CACHE, World, progress

PACKAGES = "python3-psycopg,python3-urllib3,python3-systemd,valgrind,libc6-dbg"


@dataclass
class Width:
    bits: int
    entry: float  # instructions, batches of 100
    mb: float
    start: float
    floor_kib: int
    peak_kib: int
    cpu: float  # seconds an entry


def widths(world: World, count: int, entries: int, megabytes: int) -> list[Width]:
    return [
        _width(world, bits, around, count, entries, megabytes)
        for bits, around in ((64, []), (32, _jail(world, _root())))
    ]


def _width(
    world: World, bits: int, around: Sequence[str], count: int, entries: int, megabytes: int
) -> Width:
    with world.database() as db:
        enqueue(db, count)
        first_start(world, db)
        with world.agent(db, "once", prefix=around) as agent:
            while agent.running:
                agent.look()
        if db.value(PENDING):
            raise RuntimeError(f"{bits} bits: {agent.said()[-2000:]}")
    found = instructions(world, entries, megabytes, around)
    result = Width(bits, found.entry, found.mb, found.start, import_floor(world, around),
                   agent.peak_kib, agent.cpu / count)  # fmt: skip
    progress(f"{bits} bits: {result.entry:,.0f} instructions an entry, {result.peak_kib} KiB")
    return result


def _root() -> Path:
    """Made once, of the same release and from the same mirror as this machine."""
    root = CACHE / "i386"
    if not (root / "complete").exists():
        command = ("apt-get", "indextargets", "--format", "$(CODENAME) $(REPO_URI)",
                   "Created-By: Packages")  # fmt: skip
        targets = subprocess.check_output(command, text=True).splitlines()
        release, mirror = next(line.split() for line in targets if "-" not in line.split()[0])
        subprocess.run(["rm", "-rf", root], check=True)
        subprocess.run(
            ["mmdebstrap", "--quiet", "--mode=root", "--architectures=i386", "--variant=apt",
             f"--include={PACKAGES}", release, root, f"deb {mirror} {release} main"],
            check=True,
        )  # fmt: skip
        (root / "complete").touch()
    return root


def _jail(world: World, root: Path) -> list[str]:
    """A view of the file system that ends with the process."""
    places = (world.directory, world.memory.name, world.cluster.directory, "/dev", "/proc")
    binds = "\n".join(
        f"mkdir -p {inside}; mount --rbind {outside} {inside}"
        for outside in (shlex.quote(str(place)) for place in places)
        for inside in [f"{shlex.quote(str(root))}{outside}"]
    )
    script = f'{binds}\nexec chroot {shlex.quote(str(root))} "$@"'
    return ["unshare", "--mount", "sh", "-ec", script, "sh"]

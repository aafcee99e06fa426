"""A whole machine of another architecture, with its own kernel: qemu-system-aarch64, and ssh to it.

Nothing is left out as in a container: seccomp, control groups, namespaces and credentials are the
kernel's and systemd's own. The disk is made once, in about ten minutes, and lies beside the roots
of the containers; each machine writes into an overlay of its own.
"""

import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from box import BOOT_SEC, RECIPE, Box, Release, command, make_root
from pg import free_port
from test_debian import locked

HOST_PACKAGES = ("qemu-system-arm", "qemu-utils", "qemu-user-static", "e2fsprogs", "openssh-client")
PACKAGES = ("linux-image-arm64", "initramfs-tools", "zstd", "udev", "kmod", "openssh-server")
# What it takes to mount the disk: to pack all modules takes emulation a quarter of an hour.
FEW_MODULES = """
mkdir -p "$1/etc/initramfs-tools/conf.d" "$1/usr/share/initramfs-tools/modules.d"
echo MODULES=list >"$1/etc/initramfs-tools/conf.d/few"
printf '%s\\n' virtio_pci virtio_blk ext4 crc32c >"$1/usr/share/initramfs-tools/modules.d/few"
"""
DISK_SIZE = "6G"  # sparse
HOST = "10.0.2.2"  # as the guest sees the host's loopback
NETWORK = f"""\
[Match]
Type=ether
[Network]
Address=10.0.2.15/24
Gateway={HOST}
DNS=10.0.2.3
"""
SSHD = "AuthorizedKeysFile /etc/ssh/tests.pub\nPermitRootLogin prohibit-password\nUseDNS no\n"


def base_disk(release: Release, cache: Path) -> Path:
    """A directory with disk.raw, vmlinuz, initrd.img and key, made if it is not there."""
    directory = cache / f"{release}-disk-{RECIPE}"
    with locked(cache / f"{release}.lock"):
        if not directory.exists():
            unfinished = cache / f"{release}.unfinished"
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
            root = unfinished / "root"
            make_root(release, root, PACKAGES, FEW_MODULES)
            _furnish(root, unfinished / "key")
            for name in ("vmlinuz", "initrd.img"):
                (path,) = (root / "boot").glob(f"{name}-*")
                shutil.copy(path, unfinished / name)
            disk = unfinished / "disk.raw"
            command("mke2fs", "-q", "-t", "ext4", "-d", root, disk, DISK_SIZE)
            shutil.rmtree(root)
            unfinished.rename(directory)
    return directory


def _furnish(root: Path, key: Path) -> None:
    """Network, and a way in."""
    command("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key)
    shutil.copy(f"{key}.pub", root / "etc/ssh/tests.pub")
    (root / "etc/ssh/sshd_config.d/tests.conf").write_text(SSHD)
    (root / "etc/systemd/network/ether.network").write_text(NETWORK)
    (root / "etc/resolv.conf").write_text("nameserver 10.0.2.3\n")
    (root / "etc/fstab").write_text("/dev/vda / ext4 defaults 0 1\n")
    wanted = root / "etc/systemd/system/multi-user.target.wants"
    wanted.mkdir(parents=True, exist_ok=True)
    (wanted / "systemd-networkd.service").symlink_to(
        "/usr/lib/systemd/system/systemd-networkd.service"
    )


class Emulator(Box):
    """A machine over a disk that is not changed: the base, or an overlay over it."""

    def __init__(self, release: Release, directory: Path, base: Path, below: Path) -> None:
        super().__init__(release)
        directory.mkdir(parents=True, exist_ok=True)
        self.base, self.disk, self._log = base, directory / "disk.qcow2", directory / "console.log"
        self._control = directory / "ssh"
        form = "raw" if below.suffix == ".raw" else "qcow2"
        command("qemu-img", "create", "-q", "-f", "qcow2", "-b", below, "-F", form, self.disk)
        self._qemu: subprocess.Popen[bytes] | None = None
        self._port = 0

    def boot(self) -> None:
        self._port = free_port()
        qemu: list[str | Path] = [
            *("setpriv", "--pdeathsig", "TERM", "qemu-system-aarch64"),
            *("-M", "virt", "-cpu", "cortex-a72", "-smp", "2", "-m", "1024", "-nographic"),
            *("-accel", "tcg,thread=multi", "-no-reboot"),
            *("-kernel", self.base / "vmlinuz", "-initrd", self.base / "initrd.img"),
            *("-append", "root=/dev/vda rw console=ttyAMA0 net.ifnames=0"),
            *("-drive", f"file={self.disk},if=virtio,format=qcow2,cache=unsafe"),
            *("-netdev", f"user,id=net,hostfwd=tcp:127.0.0.1:{self._port}-:22"),
            *("-device", "virtio-net-pci,netdev=net,romfile="),
            *("-device", "virtio-rng-pci"),
        ]
        with self._log.open("ab") as log:
            started = self._qemu = subprocess.Popen(
                qemu,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._wait_booted(lambda: started.poll() is None)

    def reboot(self) -> None:
        self._off("reboot")  # -no-reboot: qemu ends
        self.boot()

    def power_off(self) -> None:
        self._off("poweroff")

    def _off(self, how: str) -> None:
        assert self._qemu is not None
        self.run("systemctl", how, check=False)
        self._qemu.wait(BOOT_SEC * self.release.pace)
        self._qemu = None

    def close(self) -> None:
        if self._qemu is not None:
            self._qemu.kill()
            self._qemu.wait(30)
            self._qemu = None

    def _ssh(self, program: str) -> list[str | Path]:
        """One connection for all commands: to make it takes seconds here."""
        return [
            *(program, "-q", "-i", self.base / "key", "-o", "StrictHostKeyChecking=no"),
            *("-o", "UserKnownHostsFile=/dev/null", "-o", "BatchMode=yes"),
            *("-o", "ConnectTimeout=20", "-o", "ServerAliveInterval=60"),
            *("-o", "ControlMaster=auto", "-o", f"ControlPath={self._control}"),
            *("-o", "ControlPersist=yes"),
        ]

    def _inside(self, words: Sequence[str]) -> Sequence[str]:
        if self._qemu is None:
            raise LookupError("not booted")
        ssh = [*self._ssh("ssh"), "-p", str(self._port), "root@127.0.0.1", "--", shlex.join(words)]
        return [str(word) for word in ssh]

    def copy(self, source: Path, name: str) -> None:
        scp = self._ssh("scp")
        command(*scp, "-P", str(self._port), source, f"root@127.0.0.1:{name}")

    def console(self) -> str:
        return self._log.read_text(errors="replace")[-4000:]

    def seen(self, url: str) -> str:
        return url.replace("127.0.0.1", HOST)

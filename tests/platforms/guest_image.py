"""Disk images of guests, built from Debian's packages at this host's own speed and kept in the cache.

Everything that needs no kernel of the guest is done here, in the guest's root file system as a folder:
its Python environment is installed, its Docker engine gets the testbed's container images. Programs of
another architecture are emulated, which takes much longer.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from testbed import images
from testbed.errors import HostError
from testbed.host import cache
from testbed.images import DEBIAN_OPTIONS

REPOSITORY = Path(__file__).parents[2]
CHECKOUT = "/root/testbed"
"""The project's folder in the guest."""
VENV = "/opt/venv"
"""The guest's Python environment."""
_PYTHON = "3.13"
_GLIBC = 41
"""Minor version of trixie's glibc 2.x."""
_SIZE = "24G"
"""Size of the file system; the file is sparse."""
_BINFMT = Path("/proc/sys/fs/binfmt_misc")
_MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}

PACKAGES = (
    *("systemd", "systemd-sysv", "udev", "dbus", "libpam-systemd", "kmod", "initramfs-tools"),
    *(
        "openssh-server",
        "iproute2",
        "iptables",
        "procps",
        "ca-certificates",
        "git",
        "make",
        "gcc",
        "libc6-dev",
    ),
    *("python3", "python3-venv", "python3-torch", "mosquitto"),
)
"""Packages of every guest. PyPI's torch for this Python brings CUDA; Debian's is a CPU build."""
TEST_BUILD_PACKAGES = frozenset(("iptables", "ca-certificates", "git", "make", "gcc", "libc6-dev"))
"""Packages among them that a guest without an engine does not need."""
ENGINE_PACKAGES = ("docker.io", "docker-cli", "apparmor")
"""Packages that Debian installs for Docker by default."""
TEST_PACKAGES = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "pexpect", "setuptools")
FILES = {
    "etc/hostname": "guest\n",
    "etc/hosts": "127.0.0.1 localhost guest\n",
    "etc/fstab": "/dev/vda / ext4 noatime 0 1\n",
    # The addresses of QEMU's user-mode network.
    "etc/resolv.conf": "nameserver 10.0.2.3\n",
    "etc/systemd/network/10-eth0.network": (
        "[Match]\nName=eth0\n[Network]\nAddress=10.0.2.15/24\nGateway=10.0.2.2\n"
    ),
    # A small initial file system is read and unpacked sooner.
    "etc/initramfs-tools/conf.d/small": "MODULES=list\nCOMPRESS=lz4\n",
    "etc/initramfs-tools/modules": "virtio_pci\nvirtio_mmio\nvirtio_blk\next4\n",
}
SETUP = f"""
set -e
update-initramfs -u -k all
systemctl enable systemd-networkd ssh
systemctl disable mosquitto
systemctl mask systemd-networkd-wait-online.service e2scrub_all.timer e2scrub_reap.service \\
    fstrim.timer dpkg-db-backup.timer logrotate.timer getty@tty1.service
python3 -m venv --system-site-packages {VENV}
{VENV}/bin/python -m pip install --quiet --no-index --no-deps /wheels/*.whl
{VENV}/bin/python -m pip install --quiet --no-index --no-deps --no-build-isolation --editable {CHECKOUT}
{VENV}/bin/python -m compileall -q {CHECKOUT} || true
"""
"""Commands run in the root file system after the packages are installed."""


@dataclass(frozen=True, slots=True)
class ImageSpec:
    """Inputs of an image."""

    suite: str
    """Debian's release."""
    architecture: str
    """Debian's and Docker's name: `amd64`, `arm64`."""
    has_engine: bool

    @property
    def packages(self) -> tuple[str, ...]:
        """Debian's packages, with the kernel that has drivers for virtual machines alone."""
        kernel = f"linux-image-cloud-{self.architecture}"
        if self.has_engine:
            return (kernel, *PACKAGES, *ENGINE_PACKAGES)
        return (kernel, *(name for name in PACKAGES if name not in TEST_BUILD_PACKAGES))


@dataclass(frozen=True, slots=True)
class Image:
    """A built image: a folder of the cache."""

    folder: Path
    architecture: str

    @property
    def disk(self) -> Path:
        """An ext4 file system without partitions."""
        return self.folder / "disk.raw"

    @property
    def kernel(self) -> Path:
        return self.folder / "vmlinuz"

    @property
    def initrd(self) -> Path:
        return self.folder / "initrd.img"

    @property
    def key(self) -> Path:
        """The private ssh key that root's account accepts."""
        return self.folder / "key"

    @property
    def host_key(self) -> str:
        """The guest's public ssh key."""
        return (self.folder / "host_key.pub").read_text(encoding="utf-8")


def _is_foreign(architecture: str) -> bool:
    return os.uname().machine != _MACHINES[architecture]


def ensure(spec: ImageSpec) -> Image:
    """The image, built if it is not in the cache. Raises HostError if it cannot be built."""
    name = f"{spec.suite}-{spec.architecture}"
    image = Image(cache.folder() / "guests" / f"{name}-{_digest(spec)}", spec.architecture)
    if image.disk.exists():
        return image
    if os.geteuid() != 0:
        raise HostError("Guests' images are built in a chroot: run this as root.")
    folder = image.folder.parent
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # whoever comes second takes the first one's image
        if not image.disk.exists():
            _replace(spec, image, folder / f"build-{name}")
    return image


def _replace(spec: ImageSpec, image: Image, scratch: Path) -> None:
    """Build `image` in the folder `scratch`, and remove those that it replaces."""
    shutil.rmtree(scratch, ignore_errors=True)  # of a build that was killed
    scratch.mkdir()
    try:
        with programs_of(spec.architecture):
            _build(spec, scratch)
        for old in image.folder.parent.glob(f"{spec.suite}-{spec.architecture}-*"):
            shutil.rmtree(old)
        (scratch / "image").rename(image.folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def checkout_archive(path: Path) -> None:
    """Write a tar archive of the files of this checkout that git does not ignore, as they are now."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, check=True, capture_output=True, cwd=REPOSITORY).stdout
    names = [name for name in listed.split(b"\0") if name and (REPOSITORY / os.fsdecode(name)).exists()]
    tar = ["tar", "--create", f"--file={path}", f"--directory={REPOSITORY}", "--null", "--files-from=-"]
    subprocess.run([*tar, "--owner=root:0", "--group=root:0"], input=b"\0".join(names), check=True)


def _digest(spec: ImageSpec) -> str:
    """A hash of what the image is made of, without this checkout's code: that is copied at each boot."""
    tags = images.current_tags(images.FOLDER, images.AGENTS)
    chain = [tags["base"], tags["libraries"], tags["broker"]] if spec.has_engine else []
    parts = [asdict(spec), spec.packages, FILES, SETUP, _SIZE, _requirements(), DEBIAN_OPTIONS, chain]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]


def _requirements() -> list[str]:
    """Libraries that the project and its tests import, without torch."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = [line for line in project["dependencies"] if not line.startswith("torch=")]
    return [*needed, *TEST_PACKAGES]


def _build(spec: ImageSpec, scratch: Path) -> None:
    """Build the image in `scratch`/image."""
    root, result = scratch / "root", scratch / "image"
    result.mkdir()
    with _step("Debian's packages"):
        _bootstrap(spec, root)
    with _step("wheels"):
        _download(spec, root / "wheels")
    with _step("set-up"):
        _configure(spec, root, result)
    if spec.has_engine:
        with _step("container images"), _engine(root, scratch) as address:
            build = (sys.executable, "-m", "testbed", "images", "build")
            _run(*build, environment={"DOCKER_HOST": address})
    with _step("disk"):
        for name in ("vmlinuz", "initrd.img"):
            (file,) = (root / "boot").glob(f"{name}-*")
            shutil.copy(file, result / name)
        _run("mke2fs", "-q", "-t", "ext4", "-m", "0", "-d", str(root), str(result / "disk.raw"), _SIZE)


@contextmanager
def programs_of(architecture: str) -> Iterator[None]:
    """Let this host run programs of an architecture, by QEMU's user emulation, while it is needed.

    Raises HostError if it cannot.
    """
    emulator = f"qemu-{_MACHINES[architecture]}"
    if not _is_foreign(architecture) or (_BINFMT / emulator).exists():
        yield
        return
    is_mounted = (_BINFMT / "status").exists()
    if not is_mounted:
        _run("mount", "-t", "binfmt_misc", "binfmt_misc", str(_BINFMT))
    try:
        _run("update-binfmts", "--enable", emulator)
        yield
    finally:
        _run("update-binfmts", "--disable", emulator)
        if not is_mounted:
            _run("umount", str(_BINFMT))


def _bootstrap(spec: ImageSpec, root: Path) -> None:
    """Install the packages into the folder `root`, as `testbed.images` does for containers."""
    command = ["mmdebstrap", "--mode=root", *DEBIAN_OPTIONS, f"--architectures={spec.architecture}"]
    _run("unshare", "--mount", *command, f"--include={','.join(spec.packages)}", spec.suite, str(root))


def _download(spec: ImageSpec, folder: Path) -> None:
    """Download wheels for the guest's Python with this host's own configuration of pip."""
    options = [f"--dest={folder}", *_for_guests_python(spec)]
    _run(sys.executable, "-m", "pip", "--quiet", "download", *options, *_requirements())


def _for_guests_python(spec: ImageSpec) -> list[str]:
    """Options of this host's pip."""
    machine = _MACHINES[spec.architecture]
    tags = [f"manylinux_2_{minor}_{machine}" for minor in range(_GLIBC, 4, -1)]
    platforms = [f"--platform={tag}" for tag in (*tags, f"manylinux2014_{machine}", f"linux_{machine}")]
    return ["--only-binary=:all:", f"--python-version={_PYTHON}", *platforms]


def _configure(spec: ImageSpec, root: Path, result: Path) -> None:
    """Write the guest's files and its ssh keys, and run SETUP in it."""
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).unlink(missing_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "guest", "-f", str(result / "key"))
    (root / "root/.ssh").mkdir(mode=0o700, exist_ok=True)
    shutil.copy(result / "key.pub", root / "root/.ssh/authorized_keys")
    shutil.copy(root / "etc/ssh/ssh_host_ed25519_key.pub", result / "host_key.pub")
    checkout = root / CHECKOUT.lstrip("/")
    checkout.mkdir()
    checkout_archive(root / "checkout.tar")
    _run("tar", "--extract", f"--file={root / 'checkout.tar'}", f"--directory={checkout}")
    _run(*_ISOLATED, f'{_MOUNTS}\nexec {_CHROOT} "$0" bash', str(root), standard_input=SETUP)
    shutil.rmtree(root / "wheels")
    (root / "checkout.tar").unlink()


_ISOLATED = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "bash", "-c")
"""A shell whose mounts and processes end with it."""
_MOUNTS = """
set -e
mount --bind "$0" "$0"
mount -t proc proc "$0/proc"
mount -t sysfs sysfs "$0/sys"
mount --rbind /dev "$0/dev"
mount -t tmpfs tmpfs "$0/run"
"""
"""`$0` is the root file system's folder. The engine needs its root to be a mount point."""
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin"
_CHROOT = f"env -i HOME=/root LANG=C.UTF-8 PATH={_PATH} chroot"
_ENGINE_SOCKET = "root/engine.sock"
_ENGINE = f"""{_MOUNTS}
mount -t cgroup2 none "$0/sys/fs/cgroup"
{_CHROOT} "$0" dockerd --host unix:///{_ENGINE_SOCKET} --storage-driver overlay2 \\
    --bridge none --iptables=false --ip6tables=false --exec-opt native.cgroupdriver=cgroupfs &
read -r || true
kill "$!"
wait "$!" || true
"""
"""Run the root file system's engine, without a network, until standard input ends."""


@contextmanager
def _engine(root: Path, scratch: Path) -> Iterator[str]:
    """The guest's engine, run on this host's kernel, to fill its data folder; its address.

    It has mounts, processes, network and control groups (of version 2, without controllers) of its own.
    """
    socket = root / _ENGINE_SOCKET
    spaces = ("--mount", "--net", "--cgroup", "--pid", "--fork", "--kill-child")
    command = ["unshare", *spaces, "bash", "-c", _ENGINE, str(root)]
    with (scratch / "engine.log").open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log)
        try:
            _wait_for(socket, process, scratch / "engine.log")
            yield f"unix://{socket}"
        finally:
            process.communicate(timeout=60)
    socket.unlink(missing_ok=True)


def _wait_for(socket: Path, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 60
    while not socket.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            raise HostError(
                f"The guest's Docker engine does not start:\n{log.read_text(errors='replace')[-2000:]}"
            )
        time.sleep(0.2)


@contextmanager
def _step(what: str) -> Iterator[None]:
    """Report how long a part of the build took."""
    start = time.monotonic()
    yield
    print(f"guest image: {what}, {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)


def _run(*command: str, standard_input: str = "", environment: dict[str, str] | None = None) -> None:
    """Run a command to its end. Raises HostError with its last lines if it fails."""
    completed = subprocess.run(
        command,
        input=standard_input,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=REPOSITORY,
        env={**os.environ, **(environment or {})},
    )
    if completed.returncode:
        raise HostError(f"'{' '.join(command[:4])} ...' failed:\n{completed.stdout[-3000:]}")

"""Virtual machines in QEMU."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from testbed.errors import HostError
from testbed.host import cache
from testbed.host.processes import end
from tests.platforms.guest_image import Image

_KVM_SECONDS = 20.0
"""Seconds until a kernel under KVM must have printed something: on some hosts KVM starts guests that
never run."""
_QEMU = {"amd64": "qemu-system-x86_64", "arm64": "qemu-system-aarch64"}
_MACHINE = {"amd64": ("-machine", "q35"), "arm64": ("-machine", "virt,gic-version=3")}
_PROCESSOR = {"amd64": "Nehalem", "arm64": "cortex-a72"}
"""Emulated processors. An x86-64 with AVX takes twice as long, because its instructions are slow to
emulate; so does the pointer authentication of later ARM processors."""
_CONSOLE = {"amd64": "ttyS0", "arm64": "ttyAMA0"}
_HOST_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


@dataclass(frozen=True, slots=True)
class Vm:
    """A running virtual machine."""

    process: subprocess.Popen[bytes]
    console: Path
    """File with what its kernel and systemd print."""
    folder: Path
    """Folder for temporary files of the user of the machine."""
    port: int
    """Port of its ssh server on 127.0.0.1."""
    is_emulated: bool
    """Whether its processor is emulated (TCG), and so many times slower than this host's."""

    def check(self) -> None:
        """Raise HostError, with the console's last lines, if it has ended."""
        if self.process.poll() is not None:
            raise HostError(f"The guest has ended:\n{self.last_lines()}")

    def last_lines(self) -> str:
        """The end of what the console has shown."""
        return "\n".join(self.console.read_text(errors="replace").splitlines()[-20:])


@contextmanager
def booted(image: Image, cores: int, memory_mib: int) -> Iterator[Vm]:
    """Boot `image`; what the guest writes to its disk is lost with it. It ends on leaving."""
    is_emulated = not _kvm_works(image)
    with tempfile.TemporaryDirectory(prefix="testbed-guest-") as scratch:
        console, port = Path(scratch) / "console.log", _free_port()
        options = [
            *("-smp", str(cores), "-m", str(memory_mib)),
            *("-drive", f"file={image.disk},format=raw,if=virtio,snapshot=on"),
            *("-netdev", f"user,id=net,hostfwd=tcp:127.0.0.1:{port}-:22"),
            *("-device", "virtio-net-pci,netdev=net"),
            *("-device", "virtio-rng-pci"),
        ]
        with _qemu(image, options, console, is_emulated=is_emulated) as process:
            yield Vm(process, console, Path(scratch), port, is_emulated)


@contextmanager
def _qemu(
    image: Image, options: Sequence[str], console: Path, *, is_emulated: bool
) -> Iterator[subprocess.Popen[bytes]]:
    """QEMU with the image's kernel; its output goes to `console`. It ends with this process, too."""
    architecture = image.architecture
    kernel = f"console={_CONSOLE[architecture]} root=/dev/vda rw net.ifnames=0 panic=-1 mitigations=off"
    processor = (
        ("-accel", "tcg,thread=multi", "-cpu", _PROCESSOR[architecture])
        if is_emulated
        else ("-accel", "kvm", "-cpu", "host")
    )
    command = [
        *("setpriv", "--pdeathsig", "KILL", _QEMU[architecture], *_MACHINE[architecture], *processor),
        *("-kernel", str(image.kernel), "-initrd", str(image.initrd), "-append", kernel),
        *("-display", "none", "-monitor", "none", "-serial", "stdio", "-no-reboot", "-nodefaults"),
        *options,
    ]
    with console.open("wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    try:
        yield process
    finally:
        end(process)


def _kvm_works(image: Image) -> bool:
    """Whether the image's kernel runs under KVM; tried once, until this host is started again."""
    is_native = _HOST_ARCHITECTURES.get(os.uname().machine) == image.architecture
    if not is_native or not os.access("/dev/kvm", os.W_OK):
        return False
    known = cache.folder() / "guests" / "kvm.json"
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    with suppress(OSError, ValueError):
        of_boot, works = json.loads(known.read_bytes())
        if of_boot == boot:
            return bool(works)
    works = _speaks(image)
    cache.keep(known, json.dumps([boot, works]))
    return works


def _speaks(image: Image) -> bool:
    """Whether the image's kernel, without a disk, prints anything soon under KVM."""
    with tempfile.TemporaryDirectory(prefix="testbed-guest-") as scratch:
        console = Path(scratch) / "console.log"
        with _qemu(image, ("-m", "512"), console, is_emulated=False) as process:
            deadline = time.monotonic() + _KVM_SECONDS
            while process.poll() is None and time.monotonic() < deadline:
                if "Linux version" in console.read_text(errors="replace"):
                    return True
                time.sleep(0.2)
    return False


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])

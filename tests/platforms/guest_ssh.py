"""Commands in a guest, over ssh."""

from __future__ import annotations

import shlex
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from testbed.errors import HostError
from tests.platforms.guest_image import CHECKOUT, VENV, Image, checkout_archive
from tests.platforms.guest_qemu import Vm
from tests.platforms.machine import Completed

_SLOWNESS = 20.0
"""How much longer a command may take where the processor is emulated."""
_BOOT_SECONDS = 45.0
_LOST_SECONDS = 60.0
"""How long after its timeout a command that the guest has not ended is given up."""


class Guest:
    """A `Machine`: a booted virtual machine with its ssh server."""

    clone: Path | None = None

    def __init__(self, vm: Vm, image: Image) -> None:
        self.facts: Mapping[str, str] = {}
        self.slowness = _SLOWNESS if vm.is_emulated else 1.0
        self._vm = vm
        known = vm.folder / "known_hosts"
        known.write_text(f"[127.0.0.1]:{vm.port} {image.host_key}")
        self._ssh = [
            *("ssh", "-F", "none", "-i", str(image.key), "-p", str(vm.port), "-o", "IdentitiesOnly=yes"),
            *("-o", f"UserKnownHostsFile={known}", "-o", "LogLevel=ERROR", "-o", "BatchMode=yes"),
            *("-o", "ConnectTimeout=60", "-o", "ServerAliveInterval=60", "root@127.0.0.1"),
        ]

    def run(self, command: str, *, timeout: float) -> Completed:
        """Run `command` as `Machine.run` says. Raises HostError if the guest ends meanwhile."""
        limit = timeout * self.slowness
        path = f"{VENV}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        script = f"cd {CHECKOUT} && export PATH={path} LANG=C.UTF-8 && {{\n{command}\n}} 2>&1"
        remote = f"timeout --kill-after=15 {limit:.0f} bash -c {shlex.quote(script)}"
        return self._remote(remote, limit + _LOST_SECONDS, None)

    def wait(self) -> None:
        """Return when systemd has started everything. Raises HostError if that takes too long."""
        deadline = time.monotonic() + _BOOT_SECONDS * self.slowness
        while True:
            left = deadline - time.monotonic()
            if left < 0:
                raise HostError(f"The guest does not boot:\n{self._vm.last_lines()}")
            if self._remote("systemctl is-system-running --wait", left, None).exit_code in (0, 1):
                return
            time.sleep(3)

    def copy_checkout(self) -> None:
        """Replace the guest's files of the project by those of this checkout."""
        archive = self._vm.folder / "checkout.tar"
        checkout_archive(archive)
        # Byte code stays: it is of the same files, if these have not changed since the image was built.
        clear = f"find {CHECKOUT} -type f -not -name '*.pyc' -delete"
        completed = self._remote(f"{clear}; tar x -C {CHECKOUT}", 60 * self.slowness, archive)
        if completed.exit_code:
            raise HostError(f"The checkout cannot be copied into the guest: {completed.output}")

    def _remote(self, command: str, timeout: float, standard_input: Path | None) -> Completed:
        """Run `command` in the account's shell."""
        self._vm.check()
        start = time.monotonic()
        with (standard_input or Path("/dev/null")).open("rb") as file:
            process = subprocess.Popen(
                [*self._ssh, command], stdin=file, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
            try:
                output, _ = process.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                output, _ = process.communicate()
                return Completed(124, output.decode(errors="replace"), time.monotonic() - start)
            finally:
                process.kill()
        seconds = time.monotonic() - start
        return Completed(process.returncode, output.decode(errors="replace"), seconds)

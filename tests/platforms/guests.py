"""Virtual machines with another kernel, engine, Python, architecture or number of cores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

from tests.platforms import facts, guest_image, guest_qemu
from tests.platforms.guest_ssh import Guest
from tests.platforms.machine import Machine


@dataclass(frozen=True, slots=True)
class GuestSpec:
    """A virtual machine to build and boot."""

    image: guest_image.ImageSpec
    cores: int
    memory_mib: int = 6144


DEBIAN_13 = GuestSpec(guest_image.ImageSpec("trixie", "amd64", has_engine=True), cores=2)
GUESTS: Mapping[str, GuestSpec] = {
    "debian-13": DEBIAN_13,
    "debian-13-cores-1": replace(DEBIAN_13, cores=1),
    "debian-13-cores-4": replace(DEBIAN_13, cores=4),
    "debian-13-cores-16": replace(DEBIAN_13, cores=16),
    "debian-13-arm64": GuestSpec(guest_image.ImageSpec("trixie", "arm64", has_engine=False), cores=2),
}


@contextmanager
def guest(spec: GuestSpec) -> Iterator[Machine]:
    """Boot a guest with the files of this checkout; end it, and forget what it has written, on leaving.

    Its image is built the first time (about ten minutes) and kept in the user's cache. Raises HostError
    if it cannot be built, or does not boot.
    """
    image = guest_image.ensure(spec.image)
    with guest_qemu.booted(image, spec.cores, spec.memory_mib) as vm:
        machine = Guest(vm, image)
        machine.wait()
        machine.copy_checkout()
        machine.facts = facts.of(machine)
        yield machine

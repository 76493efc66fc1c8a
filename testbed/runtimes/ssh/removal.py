"""Removal of all that a run has on real devices, also after its controller was killed. While anything
may be left, `hosts.json` in the run's directory names the devices."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from agents.disk import files
from testbed.errors import HostError
from testbed.rundir.directory import RunDirectory
from testbed.runtimes.ssh.connection import (
    Channel,
    Connections,
    SshTarget,
    errors_of,
    in_parallel,
    shown,
)

_FILE = re.compile(r"disk/[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
_MAX_FILE_BYTES = 8 * 2**30
_MAX_FILES = 10_000
_TIMEOUT_SECONDS = 120.0


def note(directory: RunDirectory, targets: Mapping[str, SshTarget]) -> None:
    values = {name: {"host": one.host, "python": one.python} for name, one in targets.items()}
    with files.atomic_write(directory.hosts) as partial:
        partial.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def noted(directory: RunDirectory) -> dict[str, SshTarget]:
    """Devices on which something may be left. Raises HostError if the file is damaged."""
    try:
        values = json.loads(directory.hosts.read_text(encoding="utf-8"))
        return {
            str(name): SshTarget(str(one["host"]), str(one["python"])) for name, one in values.items()
        }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise HostError(f"{directory.hosts} cannot be read: {error}") from error


def remove(directory: RunDirectory) -> None:
    """End and remove everything on all noted devices, in parallel. Save logs and the clients' folders,
    from which the run can be resumed. Raises HostError if something may be left."""
    targets, connections = noted(directory), Connections()

    removed: set[str] = set()

    def remove_device(name: str, target: SshTarget) -> None:
        _remove_device(connections, directory, name, target)
        removed.add(name)

    try:
        tasks = {name: partial(remove_device, name, target) for name, target in targets.items()}
        errors = errors_of(in_parallel(tasks))
    finally:
        connections.close()
        left = {name: target for name, target in targets.items() if name not in removed}
        if left:
            note(directory, left)
        else:
            directory.hosts.unlink(missing_ok=True)
    if errors:
        reasons = "\n".join(map(str, errors))
        raise HostError(
            f"{reasons}\nProcesses and files may be left there. A device removes them itself some "
            "minutes after it has lost the run's broker. To remove them now: testbed down "
            f"{directory.path}"
        )


def _remove_device(
    connections: Connections, directory: RunDirectory, name: str, target: SshTarget
) -> None:
    request = {"run": directory.run, "device": name}
    with connections.channel(target, "remove", request, timeout=_TIMEOUT_SECONDS) as channel:
        found = channel.read_answer()
        if "failure" in found:
            raise HostError(shown(str(found["failure"])))
        _save(channel, found.get("files"), directory, name)
        channel.sink.write(b"received\n")
        channel.sink.flush()
        if channel.read_answer().get("removed") is not True:
            raise HostError("its folder could not be removed")


def _save(channel: Channel, listed: object, directory: RunDirectory, name: str) -> None:
    """Names and sizes come from the device, and are checked."""
    if not isinstance(listed, list) or len(listed) > _MAX_FILES:
        raise HostError("its list of files is not valid")
    disk, kept = directory.disk(name), set()
    for entry in listed:
        match entry:
            case ["log", int(size)] if 0 <= size <= _MAX_FILE_BYTES:
                _receive(channel, size, directory.log(name))
            case [str(file), int(size)] if _FILE.fullmatch(file) and 0 <= size <= _MAX_FILE_BYTES:
                disk.mkdir(parents=True, exist_ok=True)
                kept.add(Path(file).name)
                _receive(channel, size, disk / Path(file).name)
            case _:
                raise HostError(f"its list of files has the invalid entry {shown(str(entry))}")
    for path in disk.iterdir() if kept else ():
        if path.name not in kept:  # an update that was acknowledged since the run was resumed
            path.unlink()


def _receive(channel: Channel, size: int, to: Path) -> None:
    with files.atomic_write(to) as partial, partial.open("wb") as file:
        left = size
        while left:
            chunk = channel.source.read(min(left, 2**20))
            if not chunk:
                raise HostError("the connection broke while it sent its files")
            file.write(chunk)
            left -= len(chunk)

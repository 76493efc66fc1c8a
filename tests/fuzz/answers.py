"""Answers of a cluster's workers, and of real devices behind SSH."""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from testbed.errors import HostError, RunFailedError
from testbed.rundir.directory import RunDirectory
from testbed.runtimes.ssh import connection, inspection, removal
from testbed.runtimes.ssh.connection import SshTarget
from testbed.sweeps.clusters import Target
from testbed.sweeps.clusters.remote import CellAnswer, ClusterPool
from testbed.sweeps.worker import CellOutcome
from tests.fuzz.harness import Read
from tests.fuzz.mutations import damage, replace_value
from tests.fuzz.packs import NAMES
from tests.testbed.test_real_devices import real_device

_TOKEN = "0" * 32
_HOST = "pi@raspi-1"
_CPU = {"total": 10.0, "busy": 5.0, "stolen": 0.0, "own": 1.0, "cores": 4}
_CHECK = {
    "python": "3.11.2", "machine": "aarch64", "system": "Linux", "free": 10**11, "missing": [],
    "installed": True, "venv": True, "seen": "192.168.1.5", "reaches": [True], "unshapeable": None,
    "has_image": True,
}  # fmt: skip
_MEASURED = {"down": 1e7, "rtt": 0.01, "jitter": 0.001, "loss": 0.0, "round_trips": 10}
_REPORT: dict[str, Any] = {"kept": True, "exit": None, "uncertainty": 1000, "cpu": _CPU}


@contextmanager
def workers(folder: Path) -> Iterator[Read]:
    pool = ClusterPool(Target("dask://far:1", "dask", "far:1", {}, 2**22), folder, None)

    def read(draw: random.Random) -> object:
        shutil.rmtree(folder / "runs", ignore_errors=True)
        directory = RunDirectory.create(folder / "runs", "run")
        attempt = pool._shared / "try-1"
        shutil.rmtree(pool._shared, ignore_errors=True)
        attempt.mkdir(parents=True)
        outcome = CellOutcome(
            reason="after", validity={"valid": True}, seconds=1.5, accuracy=0.5, loss=1.0
        )
        if draw.random() < 0.2:
            outcome = CellOutcome(reason=draw.choice(["failed", "refused"]), error="far: no torch")
        answer: Any = msgspec.to_builtins(CellAnswer(asdict(outcome), "try-1"))
        if draw.random() < 0.7:
            answer |= {"place": None, "files": _archive(draw)}
        else:
            _place(attempt, draw)
        if draw.random() < 0.6:
            answer = replace_value(answer, draw)
        try:
            data: Any = msgspec.msgpack.encode(answer)
        except (OverflowError, UnicodeEncodeError):  # no such values in msgpack
            data = draw.choice(
                [b"", "text", None, damage(msgspec.msgpack.encode({"outcome": {}}), draw)]
            )
        if draw.random() < 0.2 and isinstance(data, bytes):
            data = damage(data, draw)
        answered: Future[bytes] = Future()
        answered.set_result(data)
        found = pool._outcome(answered, directory)
        if found.error is not None:  # the sweep prints it behind the name of the cell
            raise RunFailedError(f"worker: {found.error}")
        assert directory.path.is_dir()
        return found

    yield read
    pool._placing.shutdown()


def _archive(draw: random.Random) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", draw.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])) as archive:
        for name in ("manifest.json", "logs/a.log", draw.choice(["b", *NAMES])):
            info = zipfile.ZipInfo(name.encode("utf-8", "replace").decode() or "c")
            if draw.random() < 0.1:
                info.external_attr = draw.choice([0o120777, 0o040755, 0o010644]) << 16
            archive.writestr(info, b"{}" * draw.choice([0, 1, 1, 1, 10**6, 10**7]))
    return damage(made.getvalue(), draw) if draw.random() < 0.4 else made.getvalue()


def _place(attempt: Path, draw: random.Random) -> None:
    """What a worker leaves in a folder that it shares."""
    run = attempt / "run"
    match draw.randrange(4):
        case 0:
            run.symlink_to(attempt.parents[3] / "outside")
        case 1:
            run.write_bytes(b"")
        case _:
            run.mkdir()


@contextmanager
def devices(folder: Path) -> Iterator[Read]:
    os.environ["TESTBED_SSH"] = "sh -c 'cat answer; exec >&-; cat > /dev/null' sh"
    vars(connection)["secrets"] = SimpleNamespace(token_hex=lambda _: _TOKEN)
    answer, target = folder / "answer", SshTarget(_HOST)
    device = real_device(folder / "runs")
    device._configurations = list  # type: ignore[method-assign]

    def described() -> object:
        return inspection.describe([_HOST])[_HOST]

    def cleaned() -> object:
        return inspection.clean([_HOST])[_HOST]

    def installed() -> object:
        device.install(b"", [])
        return None

    def measured() -> object:
        device.probe = None
        device.measure()
        return device.probe and device.probe.probe

    def watched() -> object:
        try:
            with device._connections.channel(device.target, "watch", {}) as channel:
                device._follow(channel)
        except ValueError as error:  # `_watch` notes a gap
            raise HostError(f"{_HOST}: {error}") from error
        device._restarts = 0
        device._stopping.clear()
        return device.uncertainty, device.take_load(1.0), device.figures(), device.take_disturbances()

    def removed() -> object:
        directory = device._spec.directory
        removal.note(directory, {"pi": target})
        removal.remove(directory)
        return None

    answers: list[tuple[Callable[[], object], list[Any]]] = [
        (described, [_CHECK, _CHECK]),
        (cleaned, [{"kept": []}]),
        (installed, [{"python": "/x/bin/python", "has_image": True}]),
        (measured, [{"send": 10}, {"receive": 9}, b"123456789", {"measured": _MEASURED}]),
        (watched, [_REPORT, b"?\n", {**_REPORT, "cpu": {**_CPU, "total": 20.0}}, _REPORT]),
        (removed, [{"files": [["log", 3], ["disk/a.bin", 2]]}, b"abcde", {"removed": True}]),
    ]

    def read(draw: random.Random) -> object:
        verb, lines = draw.choice(answers)
        data = b""
        changed = draw.randrange(len(lines))
        for number, line in enumerate(lines):
            if isinstance(line, dict):
                is_changed = number == changed and draw.random() < 0.8
                line = json.dumps(replace_value(line, draw) if is_changed else line).encode() + b"\n"
            data += line
        data = damage(data, draw) if draw.random() < 0.2 else data
        answer.write_bytes(draw.choice([b"", b"Welcome!\n"]) + f"{_TOKEN}\n".encode() + data)
        found = verb()
        if isinstance(found, HostError):  # of `in_parallel`
            raise found
        assert not isinstance(found, str) or found.isprintable(), found
        return found

    yield read

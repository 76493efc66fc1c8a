"""The sweep's file and topology in the sweep's folder, with which the sweep can be run again.

Paths in the copies are absolute, except for the user's own code, of which there is a copy beside them.
They have a folder of their own, so that no file of the user is replaced if a sweep's folder is the
user's.
"""

from __future__ import annotations

import fcntl
import shutil
import tempfile
from pathlib import Path

from agents.disk import files
from testbed.errors import BadInputError
from testbed.plan.measurements import FILE as MEASURED
from testbed.sweeps import Sweep
from testbed.topology import fleets, paths, units, yamlfile
from testbed.topology.draw_settings import population_names
from testbed.topology.profiles import FILE as PROFILES
from testbed.topology.profiles import Profiles

FOLDER = "sweep"
"""Folder in the sweep's folder."""
FILE = "sweep.yaml"
TOPOLOGY = "topology.yaml"
BESIDE = (PROFILES, MEASURED, fleets.FILE)
"""Files beside the topology that planning reads."""
LOCK = ".lock"
"""File that is locked while the sweep is executed."""
_CODE = "code"


def keep(sweep: Sweep, folder: Path) -> None:
    made = Path(tempfile.mkdtemp(prefix=f".{FOLDER}-", dir=folder))
    try:
        made.chmod(0o755)
        _write(sweep, made)
        target = folder / FOLDER
        if (target / FILE).is_file():
            shutil.rmtree(target)
        made.rename(target)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _write(sweep: Sweep, folder: Path) -> None:
    base = Path(sweep.base.source.name).parent.absolute()
    names: dict[str, str] = {}
    for cell in sweep.cells:
        code = cell.topology.user_code
        if code is not None and str(code.path) not in names:
            names[str(code.path)] = name = f"{_CODE}-{len(names) + 1}" if names else _CODE
            code.copy(folder / name)

    def change(key: str, text: str) -> str | None:
        path = str(base / text)
        if key == _CODE:
            return names.get(path)
        if text in population_names() or not (base / text).exists():
            return None
        return path

    study = paths.replace(sweep.document.data, change) | {"topology": TOPOLOGY}
    (folder / FILE).write_text(yamlfile.write(study), encoding="utf-8")
    topology = yamlfile.write(paths.replace(sweep.base.data, change))
    (folder / TOPOLOGY).write_text(topology, encoding="utf-8")
    devices = {name: one for cell in sweep.cells for name, one in cell.plan.profiles.devices.items()}
    links = {name: one for cell in sweep.cells for name, one in cell.plan.profiles.links.items()}
    if devices or links:
        found = Profiles(devices=devices, links=links).model_dump(mode="json", exclude_defaults=True)
        (folder / PROFILES).write_text(yamlfile.write(found), encoding="utf-8")
    for name in (MEASURED, fleets.FILE):
        if (base / name).is_file():
            shutil.copyfile(base / name, folder / name)


def target(folder: Path) -> float | None:
    """Raises BadInputError."""
    path = folder / FOLDER / FILE
    if not path.is_file():
        return None
    data = yamlfile.read(path).data
    value = data.get("target") if isinstance(data, dict) else None
    try:
        return None if value is None else units.share_as_typed(value)
    except ValueError as error:
        raise BadInputError(f"{path}: target: {error}") from error


def check_not_running(folder: Path) -> None:
    """Raises BadInputError."""
    path = folder / LOCK
    if not path.is_file():
        return
    with files.open_regular(path) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            raise BadInputError(f"a sweep is running in {folder}: wait until it has ended") from None

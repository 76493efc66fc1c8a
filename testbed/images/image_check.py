"""Check of a user's own image. The check runs inside a container of that image. The image's own Python
runs the text of this file (`python3 -c`), so this file imports nothing of the testbed. The check writes
what is missing as JSON to standard output."""

import hashlib
import importlib
import json
import shutil
import sys
from pathlib import Path

LEAST_PYTHON = (3, 11)
MODULES = ("torch", "numpy", "msgspec", "paho.mqtt.client", "safetensors.numpy")
PROGRAMS = ("ip", "tc")


def digest(package: Path) -> str:
    found = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        found.update(f"{path.relative_to(package)}\0".encode() + path.read_bytes() + b"\0")
    return found.hexdigest()


def main() -> None:
    lacks = []
    if sys.version_info[:2] < LEAST_PYTHON:
        lacks.append("Python {}.{} or newer (it has {}.{})".format(*LEAST_PYTHON, *sys.version_info[:2]))
    for module in MODULES:
        try:
            importlib.import_module(module)
        except Exception as error:  # noqa: BLE001  # whatever a foreign package raises
            reason = " ".join(str(error).split())[:200]
            lacks.append(f"{module.partition('.')[0]} ({type(error).__name__}: {reason})")
    lacks += [f"the program {program}" for program in PROGRAMS if shutil.which(program) is None]
    agents = None
    try:
        agents = digest(Path(importlib.import_module("agents").__file__ or "").parent)
    except Exception:  # noqa: BLE001
        lacks.append("the agents' code")
    sys.stdout.write(json.dumps({"lacks": lacks, "agents": agents}) + "\n")


if __name__ == "__main__":
    main()

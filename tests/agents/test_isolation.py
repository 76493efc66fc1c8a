"""The agent image holds `agents` alone, and not all of it needs torch."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import agents


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a copy of the package `agents` and nothing else."""
    folder = tmp_path_factory.mktemp("image")
    source = Path(agents.__file__).parent
    shutil.copytree(source, folder / "agents", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def _python(code: str, folder: Path) -> str:
    # An installed package would be found elsewhere: only the folder and the libraries count.
    prelude = f"""
import sys
sys.path.insert(0, {str(folder)!r})
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("testbed", "analysis", "tests"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
"""
    command = [sys.executable, "-P", "-W", "error", "-c", prelude + code]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("agent", ["client", "aggregator", "device"])
def test_agent_programs_import_only_the_agents_package(agent: str, alone: Path) -> None:
    module = f"agents.{agent}.main"
    out = _python(f"import {module}, agents; print(agents.__file__)", alone)
    assert out.strip() == str(alone / "agents" / "__init__.py")


def test_shared_modules_do_not_import_torch_or_paho(alone: Path) -> None:
    """The command line and the analysis start in a moment; the cores do no I/O."""
    light = (
        "agents.config, agents.events, agents.rules, agents.tasks, agents.mqtt.topics, "
        "agents.wire.payloads, agents.aggregator.core, agents.client.core"
    )
    out = _python(f"import {light}; print(sorted({{'torch', 'paho'}} & set(sys.modules)))", alone)
    assert out.strip() == "[]"


def test_device_and_connecting_client_do_not_import_torch(alone: Path) -> None:
    """PID 1 stays small, and a client connects before it imports torch."""
    out = _python("import agents.device.main, agents.client.main; print('torch' in sys.modules)", alone)
    assert out.strip() == "False"

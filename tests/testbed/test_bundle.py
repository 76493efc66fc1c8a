"""`agents` and `analysis` are ours, or an error says why not; what an import leaves out."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from testbed import bundle


def python(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run `code` where `folder` comes first among the places of modules."""
    program = f"import sys; sys.path[:0] = [{str(folder)!r}, {str(bundle.ROOT)!r}]\n{code}"
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)


def foreign(folder: Path) -> Path:
    package = folder / "agents"
    package.mkdir()
    (package / "__init__.py").write_text("")
    return package


def test_bundled_package_precedes_another_of_its_name(tmp_path: Path) -> None:
    foreign(tmp_path)
    told = python("import testbed, agents; print(agents.__file__)", tmp_path).stdout
    assert told.strip() == str(bundle.AGENTS / "__init__.py")


def test_foreign_package_already_imported_is_named(tmp_path: Path) -> None:
    package = foreign(tmp_path)
    ended = python("import agents, testbed", tmp_path)
    error = ended.stderr.splitlines()[-1]
    assert error.startswith("ImportError: testbed needs its own package 'agents'")
    assert f"{package}/__init__.py" in error
    assert "Import testbed first" in error


def test_bundled_package_may_already_be_imported(tmp_path: Path) -> None:
    told = python("import agents, analysis, testbed; print(agents.__file__)", tmp_path)
    assert told.stdout.strip() == str(bundle.AGENTS / "__init__.py"), told.stderr


@pytest.mark.parametrize(
    ("imports", "heavy"),
    [
        ("testbed", "agents numpy pandas pydantic rich torch typer yaml"),
        ("testbed.topology, testbed.plan.rounds", "torch docker datasets pandas sklearn"),
        ("testbed.dashboard.first_page", "bokeh numpy"),
        ("testbed.dashboard.web_server", "scipy torch"),
    ],
)
def test_import_is_light(imports: str, heavy: str, tmp_path: Path) -> None:
    """On a busy host one second of CPU time can take ten."""
    done = python(f"import {imports}; print({{*{heavy.split()!r}}} & {{*sys.modules}})", tmp_path)
    assert (done.stdout, done.stderr) == ("set()\n", "")

"""The build step that pyproject.toml cannot say: what a checkout has beside the package `testbed` goes
into the wheel below `testbed/_bundled/` (testbed/bundle.py)."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

ROOT = Path(__file__).parent
BUNDLED = ("agents", "analysis", "images", "topologies")
COMMIT = "COMMIT"


class Build(build_py):
    def run(self) -> None:
        super().run()
        if self.editable_mode:  # a checkout
            return
        target = Path(self.build_lib, "testbed", "_bundled")
        shutil.rmtree(target, ignore_errors=True)  # of an earlier version
        for name in BUNDLED:
            ignored = shutil.ignore_patterns("__pycache__", "*.py[co]", ".*", "runs")
            shutil.copytree(ROOT / name, target / name, ignore=ignored)
        write_commit(target)


class Source(sdist):
    def make_release_tree(self, base_dir: str, files: Any) -> None:
        super().make_release_tree(base_dir, files)
        write_commit(Path(base_dir))


def write_commit(folder: Path) -> None:
    """Keep in `folder` which commit this is, as far as that is known (testbed/run/provenance.py)."""
    if (ROOT / COMMIT).is_file():  # an unpacked source distribution
        shutil.copy(ROOT / COMMIT, folder / COMMIT)
        return
    try:
        git("ls-files", "--error-unmatch", "setup.py")  # it may lie in another project's checkout
        changed = git("status", "--porcelain", "--untracked-files=no")
        text = git("rev-parse", "HEAD").strip() + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return
    (folder / COMMIT).write_text(text + "\n", encoding="ascii")


def git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


setup(cmdclass={"build_py": Build, "sdist": Source})

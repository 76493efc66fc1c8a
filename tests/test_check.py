"""`make check` stays quick enough for a hook before each commit: what it runs has a cache, or reads the
source alone."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
CACHED = {"lint-imports", "mypy", "ruff"}
PLAIN_WORDS = "tests/test_plain_words.py"


def test_every_part_of_make_check_has_a_cache_or_reads_source_alone() -> None:
    make = ["make", "--dry-run", "--no-print-directory", "--old-file=.venv/.installed-dev", "check"]
    printed = subprocess.run(make, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    commands = [line.split() for line in printed.splitlines()]
    assert {Path(words[0]).name for words in commands} == {*CACHED, "python"}
    assert not [one for words in commands for one in words if "cache" in one or "incremental" in one]
    pytest, budget = (words for words in commands if Path(words[0]).name == "python")
    assert pytest[1:] == ["-m", "pytest", "--quiet", "--noconftest", PLAIN_WORDS]
    assert budget[1:] == ["-m", "tests.budget"]  # reads the source and imports the schema: 2 s
    tree = ast.parse((ROOT / PLAIN_WORDS).read_text())
    imported = {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    for node in ast.walk(tree):
        imported |= {alias.name for alias in node.names} if isinstance(node, ast.Import) else set()
    assert {name.partition(".")[0] for name in imported} <= {*sys.stdlib_module_names, "pytest"}


def test_commit_hook_is_make_check_and_needs_no_network() -> None:
    settings = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    (repository,) = settings["repos"]
    (hook,) = repository["hooks"]
    assert repository["repo"] == "local"
    assert (hook["language"], hook["entry"]) == ("system", "make --no-print-directory check")

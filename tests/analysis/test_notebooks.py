"""Every notebook runs from its first cell to its last, without warnings, and is kept without outputs."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from shutil import copytree

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat import NotebookNode

NOTEBOOKS = Path(__file__).parents[2] / "analysis" / "notebooks"
NAMES = sorted(path.name for path in NOTEBOOKS.glob("*.ipynb"))


def test_there_are_five() -> None:
    assert [name[0] for name in NAMES] == ["1", "2", "3", "4", "5"]


@pytest.fixture(scope="module")
def executions(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[NotebookNode]]]:
    """All notebooks, two at a time: a kernel is idle while it starts."""
    with ThreadPoolExecutor(max_workers=2) as pool:
        folders = {name: tmp_path_factory.mktemp("notebooks") for name in NAMES}
        yield {name: pool.submit(_executed, name, folder) for name, folder in folders.items()}


def _executed(name: str, folder: Path) -> NotebookNode:
    beside = copytree(NOTEBOOKS, folder, dirs_exist_ok=True)  # their runs are left there
    notebook = nbformat.read(beside / name, nbformat.NO_CONVERT)  # type: ignore[no-untyped-call]
    client = NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(beside)}})
    return asyncio.run(client.async_execute())  # `execute` would leave its loop open


@pytest.mark.parametrize("name", NAMES)
def test_it_runs(executions: dict[str, Future[NotebookNode]], name: str) -> None:
    notebook = executions[name].result()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert not [output.text for output in outputs if output.output_type == "stream"]
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 1


@pytest.mark.parametrize("name", NAMES)
def test_it_is_kept_as_source_that_uses_public_names(name: str) -> None:
    notebook = nbformat.read(NOTEBOOKS / name, nbformat.NO_CONVERT)  # type: ignore[no-untyped-call]
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not [cell for cell in code if cell.outputs or cell.execution_count]
    assert not re.findall(r"(?:\.|import )_[a-z]\w*", "\n".join(cell.source for cell in code))

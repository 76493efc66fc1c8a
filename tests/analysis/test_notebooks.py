"""Every notebook runs from its first cell to its last, without warnings, and is kept without outputs."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from shutil import copytree

import nbformat
import pytest
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat import NotebookNode

NOTEBOOKS = Path(__file__).parents[2] / "analysis" / "notebooks"
NAMES = sorted(path.name for path in NOTEBOOKS.glob("*.ipynb"))
SHORTER = {
    "2-who-waits-for-whom.ipynb": {"90s": "30s", "48s": "24s"},
    "3-staleness-and-bias.ipynb": {"{after: 60s}": "{after: 20s}", '"updates": 1000': '"updates": 100'},
    "4-comparing-rules.ipynb": {"range(4)": "range(2)"},
}
"""Texts of a notebook and what takes their place, so that its runs take less."""
Executed = NotebookNode | CellExecutionError


@pytest.fixture(scope="module")
def executions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Executed]:
    """All notebooks, in a copy of their folder, which also receives their runs."""
    folder = copytree(NOTEBOOKS, tmp_path_factory.mktemp("all") / "notebooks")
    predicted = folder / "docker" / "topology.yaml"
    predicted.write_text(predicted.read_text(encoding="utf-8").replace("after: 40s", "after: 6s"))
    return asyncio.run(_executed(folder))


async def _executed(folder: Path) -> dict[str, Executed]:
    """Run the notebooks in one kernel, because each new kernel would import everything again. Each
    starts without the variables of the others."""
    manager = AsyncKernelManager()
    await manager.start_kernel(cwd=str(folder))
    kernel = manager.client()
    kernel.start_channels()
    found = dict[str, Executed]()
    try:
        await kernel.wait_for_ready(timeout=120)
        for name in NAMES:
            text = (folder / name).read_text(encoding="utf-8")
            for long, short in SHORTER.get(name, {}).items():
                assert json.dumps(long)[1:-1] in text, f"{name}: {long}"
                text = text.replace(json.dumps(long)[1:-1], json.dumps(short)[1:-1])
            notebook = nbformat.reads(text, nbformat.NO_CONVERT)  # type: ignore[no-untyped-call]
            forget = nbformat.v4.new_code_cell("%reset -f")  # type: ignore[no-untyped-call]
            notebook.cells.insert(0, forget)
            client = NotebookClient(notebook, km=manager, timeout=120)
            client.kc = kernel
            try:
                found[name] = await client.async_execute()
            except CellExecutionError as error:
                found[name] = error
    finally:
        kernel.stop_channels()
        await manager.shutdown_kernel(now=True)
    return found


@pytest.mark.hosts
@pytest.mark.parametrize("name", NAMES)
def test_notebook_runs(executions: dict[str, Executed], name: str) -> None:
    notebook = executions[name]
    if isinstance(notebook, CellExecutionError):
        raise notebook
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert not [output.text for output in outputs if output.output_type == "stream"]
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 1


@pytest.mark.parametrize("name", NAMES)
def test_notebook_is_stored_without_outputs_and_uses_public_names(name: str) -> None:
    notebook = nbformat.read(NOTEBOOKS / name, nbformat.NO_CONVERT)  # type: ignore[no-untyped-call]
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not [cell for cell in code if cell.outputs or cell.execution_count]
    assert not re.findall(r"(?:\.|import )_[a-z]\w*", "\n".join(cell.source for cell in code))

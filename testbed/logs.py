"""What the processes of a run said: from the run directory, or from the engine while they live."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from testbed import engine, fleet
from testbed.errors import BadInputError


def read(run: str, part: str | None, runs: Path, tail: int) -> Iterator[tuple[str, str]]:
    """Name and last `tail` lines of each process of `run` (or of `part` alone).

    `run` is a run id (living anywhere on this machine, or in `runs`) or a run directory.
    Raises BadInputError where there is no such run or part.
    """
    live = next((found for found in fleet.find() if found.run == run), None)
    directory = _directory(run, runs) or (live.directory if live else None)
    if directory is None:
        raise BadInputError(f"no run {run}: `testbed ps` and `testbed runs` show what there is")
    texts = {path.stem: path.read_text("utf-8", "replace") for path in directory.glob("logs/*.log")}
    if live is not None and live.runtime == "docker":
        texts |= _from_engine(live.run)
    if part is not None and part not in texts:
        raise BadInputError(f"{run} has no log of {part}; it has {', '.join(sorted(texts)) or 'none'}")
    for name in sorted(texts) if part is None else [part]:
        yield name, "\n".join(texts[name].splitlines()[-tail:])


def _directory(run: str, runs: Path) -> Path | None:
    for candidate in (runs / run, Path(run)):
        if (candidate / "manifest.json").is_file():
            return candidate
    return None


def _from_engine(run: str) -> dict[str, str]:
    from testbed.runtimes import docker

    client = engine.connect()
    try:
        return docker.logs(client, run)
    finally:
        client.close()

"""Published traces of links and devices, for a topology (docs/guide/traces.md)."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from agents.disk import files
from testbed.errors import BadInputError
from testbed.topology import fedscale as reader
from testbed.topology import parse, published, units, yamlfile

_MOST_BYTES = 2 * 2**30


def convert_trace(
    form: str, file: str | Path, *, direction: Literal["down", "up"] = "down", scale: float = 1.0
) -> str:
    """A published 3G, LTE, 5G or Wi-Fi trace in the format `form`, as CSV for `link: {trace: {csv: …}}`,
    with all rates times `scale`. Raises BadInputError."""
    path = Path(file)
    if form not in published.FORMATS:
        raise BadInputError(f"no format is called {form!r}, expected {', '.join(published.FORMATS)}")
    lines = _read(path).decode("utf-8-sig", "replace").splitlines()
    about = f"{path.name}, as {form}" + (f", times {scale:g}" if scale != 1 else "")
    try:
        return published.as_csv(published.FORMATS[form](lines), direction, scale=scale, source=about)
    except ValueError as error:
        raise BadInputError(f"{path}: {error}") from error


def fedscale_devices(
    capacity: str | Path,
    behaviour: str | Path | None = None,
    *,
    count: int = 10,
    seed: int = 0,
    cpu: float | None = None,
    steps: int | None = None,
    batch_size: int = 32,
    begin: str = "0s",
    length: str | None = None,
    speed_up: float = 1.0,
    topology: str | Path | None = None,
) -> str:
    """`count` devices drawn from FedScale's files client_device_capacity and client_behave_trace, as the
    device groups of a topology, or as a copy of the file `topology` with these.

    `cpu`: the share of a core of the fastest; `steps`: the local steps, of `batch_size` samples, that
    their timing is for; one of both is needed. The availability is that from `begin` on, for `length`
    (None: all, repeated), `speed_up` times as fast. Raises BadInputError.
    """
    if cpu is None and steps is None:
        raise BadInputError(
            "give --cpu (a share of a core for the fastest), or --steps for their timing"
        )
    try:
        since, span = units.duration(begin), None if length is None else units.duration(length)
    except ValueError as error:
        raise BadInputError(f"--from {begin}, --for {length}: {error}") from error
    behaviours = None if behaviour is None else _entries(Path(behaviour))
    try:
        chosen = reader.clients(_entries(Path(capacity)), behaviours, count, seed)
    except ValueError as error:
        raise BadInputError(
            f"{capacity if behaviour is None else f'{capacity}, {behaviour}'}: {error}"
        ) from error
    groups = reader.devices(
        chosen, cpu=cpu, steps=steps, batch_size=batch_size, begin=since, length=span, speed_up=speed_up
    )
    numbers = ", ".join(client.number for client in chosen)
    head = f"# Of FedScale's traces, seed {seed}: clients {numbers}\n"
    text = head + yamlfile.write({"devices": groups})
    if topology is not None:
        try:
            text = yamlfile.with_block(Path(topology).read_text(encoding="utf-8"), "devices", text)
        except (ValueError, OSError) as error:
            raise BadInputError(f"{topology}: {error}") from error
        parse(text, str(topology))
    return text


def _entries(path: Path) -> dict[str, object]:
    try:
        return reader.read(_read(path))
    except ValueError as error:
        raise BadInputError(f"{path}: {error}") from error


def _read(path: Path) -> bytes:
    try:
        return files.read(path, _MOST_BYTES)
    except OSError as error:
        raise BadInputError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise BadInputError(f"{path}: {error}") from error

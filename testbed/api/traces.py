"""Published traces of links and devices, for a topology (docs/guide/traces.md)."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from agents.disk import files
from testbed.errors import BadInputError
from testbed.fleets import fedscale as reader
from testbed.topology import link_traces, parse, units, yamlfile

_MOST_BYTES = 2 * 2**30


def convert_trace(
    form: str, file: str | Path, *, direction: Literal["down", "up"] = "down", scale: float = 1.0
) -> str:
    """Convert a published 3G, LTE, 5G or Wi-Fi trace in the format `form` to the CSV text that
    `link: {trace: {csv: …}}` reads. `direction`: direction of the link that the trace is for. `scale`:
    factor for all rates. Raises BadInputError."""
    path = Path(file)
    if form == "mahimahi":
        raise BadInputError(
            f"a mahimahi trace needs no conversion: write link: {{trace: {{{direction}: {file}}}}}"
        )
    if form not in link_traces.PUBLISHED_FORMATS:
        raise BadInputError(
            f"unknown format {form!r}, expected one of {', '.join(link_traces.PUBLISHED_FORMATS)}"
        )
    lines = _read(path).decode("utf-8-sig", "replace").splitlines()
    about = f"{path.name}, as {form}" + (f", times {scale:g}" if scale != 1 else "")
    try:
        samples = link_traces.PUBLISHED_FORMATS[form](lines)
        return link_traces.as_csv(samples, direction, scale=scale, source=about)
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
    """Draw `count` devices from FedScale's traces; return them as device groups of a topology (YAML).

    `capacity`: the file client_device_capacity. `behaviour`: the file client_behave_trace; None if
    devices are always available. `cpu`: CPU share of the fastest device, in cores of the host; None if
    devices have no CPU share. `steps`: number of local steps for which the training time (`timing`) of
    each device is computed; None if devices get no training time. `batch_size`: samples per step. At
    least one of `cpu` and `steps` is needed.

    `begin`: time in the availability trace to begin at. `length`: duration of the part to use; None for
    the whole trace, repeated. `speed_up`: factor by which the availability trace is sped up. `topology`:
    path of a topology. If it is set, the result is a copy of that topology with the drawn devices.
    Raises BadInputError.
    """
    if cpu is None and steps is None:
        raise BadInputError(
            "give --cpu (share of a core for the fastest device), or --steps (for a training time)"
        )
    try:
        since, span = units.duration(begin), None if length is None else units.duration(length)
    except ValueError as error:
        raise BadInputError(f"--from {begin}, --for {length}: {error}") from error
    behaviours = None if behaviour is None else _entries(Path(behaviour))
    try:
        chosen = reader.draw_clients(_entries(Path(capacity)), behaviours, count, seed)
        groups = reader.device_groups(
            chosen,
            cpu=cpu,
            steps=steps,
            batch_size=batch_size,
            begin=since,
            length=span,
            speed_up=speed_up,
        )
    except ValueError as error:
        raise BadInputError(
            f"{capacity if behaviour is None else f'{capacity}, {behaviour}'}: {error}"
        ) from error
    numbers = ", ".join(client.number for client in chosen)
    head = f"# From FedScale's traces, seed {seed}: clients {numbers}\n"
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

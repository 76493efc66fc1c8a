"""Description of a pack in the form of RO-Crate (researchobject.org/ro-crate), which archives of
research data read: what the files are, and which program made them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from testbed.packs.layout import INDEX, SWEEP, TOPOLOGY, FileEntry, PackIndex

if TYPE_CHECKING:
    from rocrate.rocrate import ROCrate

_TESTBED = "#edge-fl-testbed"
_TYPES = {
    ".yaml": "application/yaml",
    ".json": "application/json",
    ".jsonl": "application/jsonl",
    ".csv": "text/csv",
    ".py": "text/x-python",
}
"""Suffix of a file -> its media type. Other files have `application/octet-stream`."""
_DESCRIPTIONS = {
    "topology.yaml": "Topology: task, rule and devices",
    "sweep.yaml": "Sweep: what differs between the runs",
    "profiles.yaml": "Device profiles and link classes",
    "measured.yaml": "Durations measured on the host",
    "fleet.json": "Keys of drawn or recorded devices",
    "manifest.json": "Versions, host, plan, outcome and verdict of a run",
    "events.jsonl": "Records of a run: one update, version or evaluation per line",
    "fidelity.json": "Requested and measured CPU shares and links",
    "telemetry.jsonl": "CPU, memory and bytes per device and second",
    "pack.json": "Index of the pack, with the checksum of each file",
}
_SHA256 = "https://w3id.org/ro/terms/workflow-run#sha256"


def describe(index: PackIndex, created: float | None) -> bytes:
    """Return the content of the crate's file for the files in `index`. `created`: Unix time, in seconds,
    at which the newest run was made; None if it is unknown."""
    from rocrate.rocrate import ROCrate

    crate = ROCrate(gen_preview=False, version="1.2")
    crate.name = index.name
    what = "A run" if index.kind == "run" else f"A sweep of {len(index.runs)} runs"
    crate.description = (
        f"{what} of asynchronous federated learning on emulated edge devices. `testbed "
        f"{'up' if index.kind == 'run' else 'sweep'} PACK` runs it again."
    )
    crate.license = "No license was stated"
    at = datetime.fromtimestamp(created or 0.0, UTC).date().isoformat()
    crate.datePublished = at
    crate.metadata.extra_terms["sha256"] = _SHA256
    _add_program(crate, index.versions, index.commit)
    listed: Mapping[str, FileEntry | None] = {**index.files, INDEX: None}
    for name, entry in listed.items():
        crate.add_file(dest_path=name, properties=_properties(name, entry))
    start = TOPOLOGY if index.kind == "run" else SWEEP
    crate.mainEntity = crate.dereference(start)
    return json.dumps(crate.metadata.generate(), indent=1, ensure_ascii=False).encode() + b"\n"


def _add_program(crate: ROCrate, versions: Mapping[str, str], commit: str | None) -> None:
    """Add the program that made the runs, and the action of making them."""
    from rocrate.model.contextentity import ContextEntity

    packages = [f"{name} {one}" for name, one in versions.items() if name != "processor"]
    facts: dict[str, Any] = {
        "@type": "SoftwareApplication",
        "name": "edge-fl-testbed",
        "softwareVersion": versions.get("edge-fl-testbed", "unknown"),
        "softwareRequirements": packages,
        "processorRequirements": versions.get("processor", "unknown"),
    }
    if commit is not None:
        facts["identifier"] = commit
    program = crate.add(ContextEntity(crate, _TESTBED, properties=facts))
    action = {"@type": "CreateAction", "name": "Execution of the runs"}
    made = crate.add(ContextEntity(crate, "#execution", properties=action))
    made["instrument"] = program
    made["result"] = crate.root_dataset
    crate.root_dataset["mentions"] = made


def _properties(name: str, entry: FileEntry | None) -> dict[str, Any]:
    last = name.rpartition("/")[2]
    suffix = f".{last.rpartition('.')[2]}" if "." in last else ""
    found: dict[str, Any] = {
        "name": name,
        "encodingFormat": _TYPES.get(suffix, "application/octet-stream"),
    }
    if last in _DESCRIPTIONS:
        found["description"] = _DESCRIPTIONS[last]
    if entry is not None:
        found |= {"contentSize": str(entry.bytes), "sha256": entry.sha256}
    return found

"""Description of a pack in the form of RO-Crate (researchobject.org/ro-crate), which archives of
research data read: what the files are, and which program made them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

from testbed.packs.layout import CRATE, INDEX, SWEEP, TOPOLOGY, FileEntry, PackIndex

_TESTBED = "#edge-fl-testbed"
_EXECUTION = "#execution"
_TYPES = {
    ".yaml": "application/yaml",
    ".json": "application/json",
    ".jsonl": "application/jsonl",
    ".csv": "text/csv",
    ".py": "text/x-python",
}
"""Other files have `application/octet-stream`."""
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
_PROFILE = "https://w3id.org/ro/crate/1.2"
_SHA256 = "https://w3id.org/ro/terms/workflow-run#sha256"
_ROOT = {"@id": "./"}


def describe(index: PackIndex, created: float | None) -> bytes:
    """`created`: Unix time, in seconds, at which the newest run was made."""
    what = "A run" if index.kind == "run" else f"A sweep of {len(index.runs)} runs"
    command = "up" if index.kind == "run" else "sweep"
    listed: Mapping[str, FileEntry | None] = {**index.files, INDEX: None}
    root = {
        **_ROOT,
        "@type": "Dataset",
        "datePublished": datetime.fromtimestamp(created or 0.0, UTC).date().isoformat(),
        "name": index.name,
        "description": f"{what} of asynchronous federated learning on emulated edge devices. `testbed "
        f"{command} PACK` runs it again.",
        "license": "No license was stated",
        "mentions": {"@id": _EXECUTION},
        "hasPart": [{"@id": quote(name)} for name in listed],
        "mainEntity": {"@id": TOPOLOGY if index.kind == "run" else SWEEP},
    }
    descriptor = {
        "@id": CRATE,
        "@type": "CreativeWork",
        "conformsTo": {"@id": _PROFILE},
        "about": _ROOT,
    }
    execution = {
        "@id": _EXECUTION,
        "@type": "CreateAction",
        "name": "Execution of the runs",
        "instrument": {"@id": _TESTBED},
        "result": _ROOT,
    }
    crate = {
        "@context": [f"{_PROFILE}/context", {"sha256": _SHA256}],
        "@graph": [root, descriptor, _program(index.versions, index.commit), execution]
        + [_file(name, entry) for name, entry in listed.items()],
    }
    return json.dumps(crate, indent=1, ensure_ascii=False).encode() + b"\n"


def _program(versions: Mapping[str, str], commit: str | None) -> dict[str, Any]:
    packages = [f"{name} {one}" for name, one in versions.items() if name != "processor"]
    return {
        "@id": _TESTBED,
        "@type": "SoftwareApplication",
        "name": "edge-fl-testbed",
        "softwareVersion": versions.get("edge-fl-testbed", "unknown"),
        "softwareRequirements": packages,
        "processorRequirements": versions.get("processor", "unknown"),
        **({} if commit is None else {"identifier": commit}),
    }


def _file(name: str, entry: FileEntry | None) -> dict[str, Any]:
    last = name.rpartition("/")[2]
    suffix = f".{last.rpartition('.')[2]}" if "." in last else ""
    found: dict[str, Any] = {
        "@id": quote(name),
        "@type": "File",
        "name": name,
        "encodingFormat": _TYPES.get(suffix, "application/octet-stream"),
    }
    if last in _DESCRIPTIONS:
        found["description"] = _DESCRIPTIONS[last]
    if entry is not None:
        found |= {"contentSize": str(entry.bytes), "sha256": entry.sha256}
    return found

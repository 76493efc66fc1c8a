"""All doors through which bytes of strangers come in; docs/concepts/security.md has what is promised."""

from __future__ import annotations

from agents.wire import messages
from tests.fuzz import (
    answers,
    data_files,
    messages_to_parts,
    models,
    packs,
    run_directories,
    servers,
    topologies,
    traces,
)
from tests.fuzz.harness import Door

_YAML = r"fuzzed\.yaml|base\.yaml|devices\[|--|task"

DOORS = {
    "topologies": Door(topologies.topologies, _YAML),
    "studies": Door(topologies.studies, _YAML),
    "traces": Door(traces.traces, r"inside/(fuzzed|profiles|topology)"),
    "data": Door(data_files.data, r"task\.data|task\.partition"),
    "models": Door(models.models, r"task\.initial|fuzzed"),
    "packs": Door(packs.packs, r"fuzzed\.zip|inside/runs"),
    "runs": Door(
        run_directories.run_directories, r"inside/runs|fuzz-|far|events\.jsonl|inputs\.bin|models/"
    ),
    "workers": Door(answers.workers, r"worker|far"),
    "devices": Door(answers.devices, r"pi@raspi-1"),
    **{
        part: Door(messages_to_parts.to(part), "", (messages.MessageError,))
        for part in messages_to_parts.PARTS
    },
    "http": Door(servers.http, "HTTP"),
    "mqtt": Door(servers.mqtt, "MQTT"),
}
SLOW = ("runs", "http", "mqtt")
"""Doors whose input takes a tenth of a second or more, or that wait for a server."""

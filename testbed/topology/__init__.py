"""The topology: the YAML file that describes a run (docs/guide/topology.md).

`load` reads and validates a file, and fills in all defaults. The keys are defined in
`testbed.topology.schema`, and those of features in their rooms (`testbed.topology.features`).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from testbed.topology.reading import RESERVED as RESERVED
    from testbed.topology.reading import json_schema as json_schema
    from testbed.topology.reading import load as load
    from testbed.topology.reading import parse as parse
    from testbed.topology.reading import validate as validate
    from testbed.topology.schema import StopSettings as StopSettings
    from testbed.topology.schema import Topology as Topology
    from testbed.topology.schema import Virtual as Virtual

_SCHEMA = ("StopSettings", "Topology", "Virtual")
_READING = ("RESERVED", "json_schema", "load", "parse", "validate")


def __getattr__(name: str) -> Any:
    # At first use: rooms of features import modules of this folder, and the schema imports the rooms.
    if name not in _SCHEMA + _READING:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{'schema' if name in _SCHEMA else 'reading'}"), name)

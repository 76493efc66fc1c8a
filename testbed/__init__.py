"""An edge-device emulation testbed for asynchronous federated learning, from Python (docs/python.md).

    import testbed

    with testbed.up("topology.yaml") as run:
        run.set("pi-1", cpu=0.05)
        result = run.wait()
    result.evaluations          # tables of pandas

`up` starts a run and `attach` finds one, both as a `RunHandle`; `simulate` runs in virtual time, `sweep`
many runs, and `load` reads what a run has left. What goes wrong for a reason that the user can mend is a
`TestbedError`. A name is imported when it is first used, so that `import testbed` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from testbed import bundle

if TYPE_CHECKING:
    from agents import events as events
    from testbed.api.handle import RunHandle as RunHandle
    from testbed.api.running import attach as attach
    from testbed.api.running import load as load
    from testbed.api.running import up as up
    from testbed.api.simulating import simulate as simulate
    from testbed.api.studies import SweepResult as SweepResult
    from testbed.api.studies import sweep as sweep
    from testbed.errors import BadInputError as BadInputError
    from testbed.errors import HostError as HostError
    from testbed.errors import RunFailedError as RunFailedError
    from testbed.errors import TestbedError as TestbedError

bundle.make_importable()

_WHERE = {
    "RunHandle": "testbed.api.handle",
    "attach": "testbed.api.running",
    "load": "testbed.api.running",
    "up": "testbed.api.running",
    "simulate": "testbed.api.simulating",
    "SweepResult": "testbed.api.studies",
    "sweep": "testbed.api.studies",
    "BadInputError": "testbed.errors",
    "HostError": "testbed.errors",
    "RunFailedError": "testbed.errors",
    "TestbedError": "testbed.errors",
}
"""The module of each name that is imported when it is first used."""

__all__ = [*_WHERE, "events"]


def __getattr__(name: str) -> Any:
    if name == "events":
        found: Any = import_module("agents.events")
    elif name in _WHERE:
        found = getattr(import_module(_WHERE[name]), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

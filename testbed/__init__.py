"""An edge-device emulation testbed for asynchronous federated learning, from Python.

    import testbed

    with testbed.up("topology.yaml") as run:
        run.set("pi-1", cpu=0.05)
        result = run.wait()
    result.evaluations          # pandas tables

`up` starts a run, and `attach` finds a run that was started elsewhere. Both return a `RunHandle`.
`simulate` runs in virtual time, `sweep` makes many runs, `load` reads a run's records. The command line
is built on these functions (docs/guide/python.md has the table). Errors that the user can fix are
`TestbedError`s. Each name is imported when it is first used, so that `import testbed` is fast.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from testbed import bundle

if TYPE_CHECKING:
    from agents import events as events
    from testbed.api.catalog import add_profile as add_profile
    from testbed.api.catalog import profile_script as profile_script
    from testbed.api.catalog import profiles as profiles
    from testbed.api.catalog import rules as rules
    from testbed.api.catalog import schema as schema
    from testbed.api.catalog import selections as selections
    from testbed.api.catalog import tasks as tasks
    from testbed.api.handle import RunHandle as RunHandle
    from testbed.api.launching import Launch as Launch
    from testbed.api.launching import distribution as distribution
    from testbed.api.launching import plan_run as plan_run
    from testbed.api.launching import validate as validate
    from testbed.api.machine import build_images as build_images
    from testbed.api.machine import calibrate as calibrate
    from testbed.api.machine import doctor as doctor
    from testbed.api.machine import list_images as list_images
    from testbed.api.machine import measure_fidelity as measure_fidelity
    from testbed.api.machine import prune_images as prune_images
    from testbed.api.new import convert_trace as convert_trace
    from testbed.api.new import examples as examples
    from testbed.api.new import fedscale_devices as fedscale_devices
    from testbed.api.new import new as new
    from testbed.api.packing import pack as pack
    from testbed.api.results import compare as compare
    from testbed.api.results import draw as draw
    from testbed.api.results import export as export
    from testbed.api.results import export_trace as export_trace
    from testbed.api.results import load_all as load_all
    from testbed.api.results import report as report
    from testbed.api.results import step_time as step_time
    from testbed.api.results import track as track
    from testbed.api.running import attach as attach
    from testbed.api.running import down as down
    from testbed.api.running import list_folders as list_folders
    from testbed.api.running import list_runs as list_runs
    from testbed.api.running import load as load
    from testbed.api.running import page as page
    from testbed.api.running import ps as ps
    from testbed.api.running import simulate as simulate
    from testbed.api.running import start as start
    from testbed.api.running import up as up
    from testbed.api.studies import AgreeResult as AgreeResult
    from testbed.api.studies import SweepResult as SweepResult
    from testbed.api.studies import agree as agree
    from testbed.api.studies import sweep as sweep
    from testbed.api.twins import TwinPair as TwinPair
    from testbed.api.twins import twin as twin
    from testbed.errors import BadInputError as BadInputError
    from testbed.errors import HostError as HostError
    from testbed.errors import RunFailedError as RunFailedError
    from testbed.errors import TestbedError as TestbedError

bundle.make_importable()


@cache
def _modules() -> dict[str, str]:
    """Return public name -> module that defines it, as the imports above say."""
    import ast

    tree = ast.parse(Path(__file__).read_bytes())
    (types_only,) = (one for one in tree.body if isinstance(one, ast.If))
    imports = [one for one in types_only.body if isinstance(one, ast.ImportFrom)]
    return {name.name: str(one.module) for one in imports for name in one.names}


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return [*_modules()]
    if name not in _modules():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(__import__(_modules()[name], fromlist=[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_modules()})

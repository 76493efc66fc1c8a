"""The checks of a platform: commands, and what their output must have."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from testbed.host import cache
from tests.platforms.machine import Completed, Machine

_VERDICT = r"(?s:\A(?!.*the kernel has other limits).*?)^(Verdict: (?:valid|not valid|not judged))"
"""Every run reads the limits of its devices back from the kernel."""
_RESULT = r"^(?:CPU: .*|[a-z_]+: (?:accuracy|loss) [^(,]*)"
_END_OF_TESTS = r"^=+ (.*\d passed.*) =+$"
_DETAIL_LENGTH = 200


@dataclass(frozen=True, slots=True)
class Check:
    """A command and its expected output."""

    name: str
    """Name, and heading of its column."""
    command: str
    """Bash command. `{runs}` is a folder for run directories."""
    expected: str
    """Regular expression that must match at the beginning of a line of the output."""
    also: str = ""
    """Regular expression of more lines that the detail shows."""
    timeout: float = 240
    """Seconds, before `Machine.slowness`."""
    emulated: str = ""
    """Command on a machine whose processor is emulated, if it is another one there."""
    needs_engine: bool = True
    needs_clone: bool = False
    """Whether it is run in the machine's clone of the project, which `{clone}` is."""
    for_developers: bool = False
    """Whether it takes the packages for developers, which a machine's clone lacks."""
    only_on: str = ""
    """Name of the only platform that does it; empty for all."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a check ended."""

    passed: bool
    detail: str
    """One line."""
    seconds: float
    log: Path | None
    """File with the command and its full output; None if the check passed."""


def _up(name: str, topology: str, runtime: str, also: str = _RESULT, expected: str = _VERDICT) -> Check:
    command = f"testbed up topologies/{topology}.yaml --runtime {runtime} --runs {{runs}}/{name}"
    return Check(name, command, expected, also, needs_engine=runtime == "docker")


_PID = (
    "import json, glob; "
    "print(json.load(open(glob.glob('{runs}/killed/*/manifest.json')[0]))['controller']['pid'])"
)
"""Program that prints the process id of the controller of the run in the folder `killed`."""
_PATIENT = (
    "for each in quickstart links faults; do "
    "echo 'start: {{timeout: {seconds:.0f}s}}' >> topologies/$each.yaml; done"
)
"""Gives the devices of these topologies more time to start, in a checkout that is thrown away."""
_START_SECONDS = 300.0
"""Time that devices have to start by default."""

CHECKS = (
    Check("doctor", "testbed doctor", r"ok +Docker engine", also=r"warn +\S+", timeout=60),
    Check(
        "plan",
        "testbed plan topologies/quickstart.yaml",
        r"(?:docker|process): 6 devices ask for .* of .* core.*?\)",
        timeout=60,
        needs_engine=False,
    ),
    _up("virtual", "faults", "virtual", also="", expected=r"final model .*"),
    _up("process", "quickstart", "process"),
    _up("quickstart", "quickstart", "docker"),
    _up("links", "links", "docker"),
    _up("faults", "faults", "docker"),
    Check(
        "killed",
        "testbed up topologies/quickstart.yaml --runtime docker --detach --runs {runs}/killed && "
        f'kill -9 "$(python -c "{_PID}")" && testbed down $(ls {{runs}}/killed) --runs {{runs}}/killed',
        r"\S+: down",
    ),
    Check(
        "tests",
        'python -m pytest -p no:cacheprovider -m "docker and not hosts and not timed"',
        _END_OF_TESTS,
        also=r"FAILED \S+",
        timeout=1800,
        emulated="python -m pytest -p no:cacheprovider tests/testbed/test_docker_runtime.py "
        "tests/testbed/test_docker_engine.py tests/agents/test_bridge_ports.py",
        for_developers=True,
    ),
    Check(
        "arm64",
        "TESTBED_ARM64=1 python -m pytest -n 0 -p no:cacheprovider -k outlive "
        "tests/test_real_devices.py",
        _END_OF_TESTS,
        timeout=3600,
        only_on="host",
    ),
    Check(
        "extras",
        "python -m tests.platforms.extras",
        r"extras: nothing wrong",
        timeout=1800,
        needs_engine=False,
        needs_clone=True,
    ),
    Check(
        "demo",
        "env --unset=PYTHONPATH make -C {clone} demo && "
        "mkdir -p {runs} && cp -r {clone}/runs {runs}/demo",
        _VERDICT,
        also=_RESULT,
        needs_engine=False,
        needs_clone=True,
    ),
    Check("left", "python -m tests.platforms.left {runs}", "left: nothing wrong"),
)
"""Checks in the order of execution: the last one inspects the runs of the earlier ones."""


def run(machine: Machine, name: str, chosen: Sequence[Check]) -> Iterator[tuple[Check, Outcome]]:
    """Run `chosen` on the machine of the platform `name`, and yield each outcome as it comes.

    Checks that need an engine are skipped if the machine has none.
    """
    runs = f"/tmp/testbed-platforms-{secrets.token_hex(4)}"  # noqa: S108  # on the machine, not here
    try:
        if machine.slowness > 1:
            machine.run(_PATIENT.format(seconds=_START_SECONDS * machine.slowness), timeout=30)
        for check in chosen:
            if check.needs_engine and machine.facts["engine"] == "none":
                continue
            if check.needs_clone and machine.clone is None:
                continue
            if check.for_developers and machine.clone is not None:
                continue
            if check.only_on not in ("", name):
                continue
            words = (check.emulated if machine.slowness > 1 else "") or check.command
            command = words.format(runs=runs, clone=machine.clone)
            done = machine.run(command, timeout=check.timeout)
            yield check, _outcome(check, name, command, done)
    finally:
        machine.run(f"rm -rf {runs}", timeout=30)


def _outcome(check: Check, platform: str, command: str, done: Completed) -> Outcome:
    matched = re.search(check.expected, done.output, re.MULTILINE)
    if done.exit_code == 0 and matched is not None:
        more = re.findall(check.also, done.output, re.MULTILINE) if check.also else []
        detail = "; ".join([matched[matched.re.groups], *more])
        return Outcome(True, _one_line(detail), done.seconds, None)
    if done.exit_code == 124:
        detail = "timed out"
    else:
        detail = f"exit code {done.exit_code}: {_complaint(check, done.output)}"
    return Outcome(False, _one_line(detail), done.seconds, _keep(check, platform, command, done))


def _complaint(check: Check, output: str) -> str:
    """The line of `output` that says best what failed."""
    lines = [line for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"error: |FAILED |.*Error: ", line)]
    return (errors or lines or ["no output"])[-1]


def _one_line(text: str) -> str:
    words = " ".join(text.split())
    return words if len(words) <= _DETAIL_LENGTH else f"{words[:_DETAIL_LENGTH]} …"


def _keep(check: Check, platform: str, command: str, done: Completed) -> Path:
    """Write the output to a file of the cache."""
    folder = cache.folder() / "platforms" / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    words = re.sub(r"\W+", "-", f"{platform} {check.name}")
    log = folder / f"{time.strftime('%Y%m%d-%H%M%S')}-{words}.log"
    log.write_text(f"$ {command}\n{done.output}\n(exit code {done.exit_code})\n", encoding="utf-8")
    return log

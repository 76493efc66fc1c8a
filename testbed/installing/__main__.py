"""Set-up of a checkout, which the Makefile runs: `python -m testbed.installing COMMAND`.

`set-up` makes the environment and installs the testbed there. `install` installs packages there, and
`pins` writes constraints.txt. In the root of the checkout; the standard library is enough.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from testbed.installing.installer import (
    Installer,
    choose,
    compile_pins,
    phase,
    print_line,
    source_for_host,
)

BUILDERS = ("docker", "packaging", "psutil", "xxhash")
"""Packages that `python -m testbed.images` needs, with what these bring."""
BROKER = "broker"
"""Extra that does not go together with the others."""
_USED = (
    "agents.aggregator.main, agents.client.training, agents.device.main",
    "testbed.cli.main, testbed.api.outputs, testbed.run.up, testbed.data.datasets, rich.console, "
    "analysis.summary, testbed.dashboard.web_server, testbed.images, testbed.runtimes.process.runtime",
)
"""Modules to compile with all that they import, in one process each. To compile all that PyTorch brings
would double the wait. Without byte code, where PYTHONDONTWRITEBYTECODE is set, every process would
compile PyTorch anew."""
_BUILDER = (sys.executable, "-m", "testbed.images")
_HEADER = "# With these versions, a set-up is the same tomorrow. Written by: make constraints\n"
_BROKER_FOLDER = (
    "from testbed.broker import configuration as it; print(it.AMQTT_FOLDER, it.AMQTT, sep='\\n')"
)


def main(arguments: Sequence[str] | None = None) -> None:
    options, packages = _options(arguments)
    constraints = Path(options.constraints) if options.constraints else None
    if options.command == "pins":
        write_pins(constraints or Path("constraints.txt"))
    elif options.command == "install":
        choose(options.installer, constraints).install(*packages)
    elif options.venv:
        python = str(Path(options.venv, "bin", "python"))
        if not Path(python).exists():  # an environment of another Python must not be mixed with this one
            with phase("environment"):
                subprocess.run([sys.executable, "-m", "venv", options.venv], check=True)
        rest = [f"--installer={options.installer}", f"--constraints={options.constraints}"]
        rest += ["--images"] if options.images else []
        os.execv(python, [python, "-m", "testbed.installing", "set-up", *rest])  # noqa: S606
    else:
        set_up(choose(options.installer, constraints), constraints, images=options.images)


def _options(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("command", choices=("set-up", "install", "pins"))
    parser.add_argument("--venv", help="environment to make; without it, this Python's is used")
    parser.add_argument("--installer", choices=("uv", "pip"), default="uv")
    parser.add_argument("--constraints", default="", help="file of pins; without it, newest versions")
    parser.add_argument("--images", action="store_true", help="build container images meanwhile")
    options, packages = parser.parse_known_args(arguments)
    if packages and options.command != "install":
        parser.error(f"unknown: {' '.join(packages)}")
    return options, packages


def set_up(installer: Installer, constraints: Path | None, *, images: bool) -> None:
    """With `images`, container images are built at the same time."""
    torch = source_for_host()
    print_line(f"  PyTorch: {torch.reason}")
    if images:
        installer.install(*(one for one in _project()["dependencies"] if _name(one) in BUILDERS))
    with _images(enabled=images) as packages_are_there:
        with phase("packages"):
            installer.install(*torch.options, "--editable", ".")
        packages_are_there()
        with phase("byte code"), _compiling(_USED):
            # The broker of machines without Mosquitto, in a folder of its own.
            said = subprocess.run(
                [sys.executable, "-c", _BROKER_FOLDER], capture_output=True, text=True, check=True
            )
            folder, amqtt = said.stdout.splitlines()
            pins = broker_pins(constraints) if constraints else None
            installer.with_constraints(pins).install("--upgrade", "--target", folder, amqtt)
        with _compiling(["testbed.broker.embedded"]):
            pass


def broker_pins(constraints: Path) -> Path:
    """File of pins for the broker in a folder of its own."""
    return constraints.with_stem(f"{constraints.stem}-{BROKER}")


def write_pins(constraints: Path) -> None:
    """The broker's file is written, too."""
    project = _project()
    python = project["requires-python"].removeprefix(">=")
    extras = project["optional-dependencies"]
    together = [name for name in extras if name != BROKER]
    pins = {
        constraints: compile_pins(["pyproject.toml"], "uv", together, python),
        broker_pins(constraints): compile_pins([], "\n".join(extras[BROKER]), [], python),
    }
    for path, text in pins.items():
        path.write_text(f"{_HEADER}{text}", encoding="utf-8")


@contextmanager
def _images(*, enabled: bool) -> Iterator[Callable[[], None]]:
    """Yield a function that says that the packages are installed. The builder ends if this process
    ends."""
    if not enabled:
        yield lambda: None
        return
    reading, writing = os.pipe()
    builder = subprocess.Popen(_BUILDER, stdin=reading)
    os.close(reading)

    def report_installed() -> None:
        with suppress(BrokenPipeError):  # it has ended: there is no engine, or nothing to build
            os.write(writing, b"\n")

    try:
        yield report_installed
        if builder.wait():
            print_line("  images: not built (see above); testbed up tries it again")
    finally:
        os.close(writing)  # ends the builder
        builder.wait()


@contextmanager
def _compiling(groups: Sequence[str]) -> Iterator[None]:
    """Each group is imported in a process of its own, which writes its byte code."""
    env = {name: text for name, text in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    commands = [[sys.executable, "-W", "ignore", "-c", f"import {one}"] for one in groups]
    processes = [subprocess.Popen(command, env=env) for command in commands]
    try:
        yield
        codes = [process.wait() for process in processes]
    except BaseException:
        for process in processes:
            process.kill()
            process.wait()
        raise
    if any(codes):
        raise SystemExit("the installed packages cannot be imported (see above)")


def _project() -> dict[str, Any]:
    return dict(tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"])


def _name(requirement: str) -> str:
    return requirement.partition(">")[0].partition("=")[0].partition("<")[0].strip()


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)

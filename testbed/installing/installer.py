"""Install packages into this environment by uv, or by pip where uv cannot do it as pip would."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from testbed.installing import pip_settings, uv

_PIP = (sys.executable, "-m", "pip", "install", "-qq", "--no-compile", "--no-warn-conflicts")
_LOCAL = ("find-links", "constraint")
"""pip's settings that must not decide on the versions of everybody."""


def print_line(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


@contextmanager
def phase(name: str) -> Iterator[None]:
    start = time.monotonic()
    yield
    print_line(f"  {name}: {time.monotonic() - start:.0f} s")


@dataclass(frozen=True, slots=True)
class Installer:
    """Both programs get the same arguments and install the same versions."""

    constraints: tuple[str, ...]
    """Options that name the file of pins; empty for the newest versions."""
    uv: tuple[str, ...]
    """Beginning of uv's command; empty if pip installs."""
    environment: dict[str, str]
    """Variables for uv."""

    def with_constraints(self, file: Path | None) -> Installer:
        """`file`: pins; None for the newest versions."""
        return replace(self, constraints=("--constraint", str(file)) if file else ())

    def install(self, *arguments: str) -> None:
        """Exits with pip's code if that fails."""
        arguments = (*self.constraints, *arguments)
        if self.uv:
            env = {**os.environ, **self.environment}
            if subprocess.run([*self.uv, *arguments], env=env, check=False).returncode == 0:
                return
            print_line("uv could not install this (see above): pip tries it")
        if code := subprocess.run([*_PIP, *arguments], check=False).returncode:
            raise SystemExit(code)


def choose(program: str, constraints: Path | None) -> Installer:
    """Take uv, which is installed if it is missing; or pip, if `program` is `pip`, or if the user's
    settings of pip cannot be handed over to uv."""
    by_pip = Installer((), (), {}).with_constraints(constraints)
    if program == "pip":
        return by_pip
    try:
        given = uv.translate(pip_settings.effective())
    except uv.NotHandedOverError as error:
        print_line(f"pip installs, which takes longer than uv: {error}")
        return by_pip
    found = uv.find()
    if found is None:
        with phase("uv"):
            subprocess.run([*_PIP, *by_pip.constraints, "uv"], check=False)
        found = uv.find()
    if found is None:
        print_line("pip installs, which takes longer than uv: uv could not be installed")
        return by_pip
    command = (found, "pip", "install", "--quiet", "--python", sys.executable, *given.options)
    return replace(by_pip, uv=command, environment=given.environment)


def compile_pins(sources: Sequence[str], more: str, extras: Sequence[str], python: str) -> str:
    """Newest version of each package that the files `sources` and the requirements `more` need, with the
    `extras` of pyproject.toml, on any machine and in any Python from version `python` on."""
    settings = {key: one for key, one in pip_settings.effective().items() if key not in _LOCAL}
    given = uv.translate(settings)
    program = uv.find()
    if program is None:
        raise SystemExit("uv is neither in PATH nor in this environment: python -m pip install uv")
    options = ["--quiet", "--universal", f"--python-version={python}", *given.options]
    options += ["--no-annotate", "--no-header", *(f"--extra={extra}" for extra in extras)]
    local = ("UV_FIND_LINKS", "UV_CONSTRAINT", "UV_OVERRIDE")
    env = {name: value for name, value in os.environ.items() if name not in local} | given.environment
    command = [program, "pip", "compile", *options, *sources, "-"]
    done = subprocess.run(command, input=more, env=env, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.returncode)
    return done.stdout

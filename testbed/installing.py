"""Set-up of a checkout, which the Makefile runs: `python -m testbed.installing COMMAND`.

`set-up` makes the environment and installs the testbed there. `install` installs packages there, and
`pins` writes constraints.txt. In the root of the checkout. uv installs, or pip where uv cannot do it as
pip would, with the user's settings of pip and the right build of PyTorch. No package is installed
before, so this module imports only the standard library.
"""

from __future__ import annotations

import argparse
import ast
import http.client
import os
import shutil
import subprocess
import sys
import threading
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit


class PipSetting(NamedTuple):
    """A setting that is not empty."""

    place: str
    """Section of a configuration file, such as `global` or `install`, or `:env:`."""
    key: str
    """Name of pip's option, such as `index-url`."""
    value: str

    @property
    def name(self) -> str:
        """Name as the user wrote it, such as `PIP_INDEX_URL` or `global.index-url`."""
        if self.place == ":env:":
            return f"PIP_{self.key.upper().replace('-', '_')}"
        return f"{self.place}.{self.key}"


def read_settings() -> list[PipSetting]:
    """Sorted: the order of pip's list depends on its version."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False)
    found = []
    for line in listed.stdout.splitlines():
        name, _, value = line.partition("=")
        place, _, key = name.rpartition(".")
        if text := str(ast.literal_eval(value)):
            found.append(PipSetting(place, key, text))
    return sorted(found)


def effective_settings() -> dict[str, PipSetting]:
    """Return key -> setting for `pip install`: its section overrides `global`, a variable overrides
    both."""
    order = ("global", "install", ":env:")
    settings = (one for place in order for one in read_settings() if one.place == place)
    return {one.key: one for one in settings}


# Choice of the PyTorch build that pip installs: a CPU build if there is no NVIDIA driver.
#
# The Python Package Index's build for Linux (x86-64 and aarch64) needs gigabytes of CUDA libraries.
# PyTorch's own index of CPU builds has `2.13.0+cpu` for both architectures. This version satisfies
# `torch==2.13.0`. pip prefers it to `2.13.0` from any index, because a version with a local part counts
# as newer (PEP 440).

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
DRIVERS = (Path("/proc/driver/nvidia/version"), Path("/usr/lib/wsl/lib/libcuda.so.1"))
"""Files that exist if an NVIDIA driver is loaded, on Linux or on the Windows Subsystem for Linux."""
_ANSWER_SECONDS = 3.0
"""Limit for the index's answer, including the look-up of its host name."""
_SETTINGS = ("index-url", "extra-index-url", "no-index", "find-links")
"""pip's settings for the sources of packages."""


class TorchSource(NamedTuple):
    options: tuple[str, ...]
    """pip options; empty if pip's own settings decide."""
    reason: str
    """One line that says which build pip will install, and why."""


def source_for_host(index: str = CPU_INDEX, drivers: Sequence[Path] = DRIVERS) -> TorchSource:
    """CPU builds, unless this machine has an NVIDIA driver or does not run Linux."""
    if sys.platform != "linux":
        return TorchSource((), "the Python Package Index's build, which has CUDA on Linux only")
    if driver := next((path for path in drivers if path.exists()), None):
        return TorchSource(
            (), f"the Python Package Index's build with CUDA: NVIDIA driver found ({driver})"
        )
    choice = cpu_source(index)
    return choice._replace(reason=f"{choice.reason}; no NVIDIA driver found")


def cpu_source(index: str = CPU_INDEX) -> TorchSource:
    """If pip's own settings name a source of packages, or if the index does not answer in time, pip's
    own settings decide."""
    if settings := ", ".join(one.name for one in read_settings() if one.key in _SETTINGS):
        return TorchSource((), f"from the source in your pip settings ({settings}); CPU builds: {index}")
    if (problem := _problem(index)) is None:
        return TorchSource(("--extra-index-url", index), f"the CPU build, as {index} answers")
    return TorchSource(
        (),
        "the Python Package Index's build, which on Linux brings gigabytes of CUDA: the index of CPU "
        f"builds, {index}, does not answer ({problem})",
    )


def _problem(index: str) -> str | None:
    """None if `index` lists PyTorch's builds in time."""
    problems: list[str | None] = []

    def ask() -> None:
        try:
            with urllib.request.urlopen(f"{index}/torch/", timeout=_ANSWER_SECONDS):  # noqa: S310  (our own)
                problems.append(None)
        except urllib.error.HTTPError as error:  # it has the answer, which is closed with it
            with error:
                problems.append(str(error.reason))
        except (OSError, http.client.HTTPException) as error:
            problems.append(str(getattr(error, "reason", error)))

    # urlopen's timeout covers neither the look-up of the name nor an answer that arrives byte by byte.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(_ANSWER_SECONDS)
    return problems[0] if problems else f"nothing within {_ANSWER_SECONDS:g} s"


# uv, which installs in seconds what takes pip a minute, with the user's settings of pip.
#
# uv reads neither pip's configuration files nor PIP_* variables, and chooses among several indexes
# otherwise than pip. `translate` hands over what the user has set, so that uv installs what pip would.
# If a setting cannot be handed over, the user is told, and pip installs.

_HARMLESS = {
    *("break-system-packages", "compile", "disable-pip-version-check", "log", "no-color", "no-compile"),
    *("no-input", "no-python-version-warning", "no-warn-conflicts", "no-warn-script-location"),
    *("progress-bar", "quiet", "require-virtualenv", "root-user-action", "use-pep517", "verbose"),
}
"""Settings of pip that do not change what is installed, or from where."""
_FALSE = ("0", "f", "false", "n", "no", "off")
_AS_VARIABLE = {
    "client-cert": "SSL_CLIENT_CERT",
    "default-timeout": "UV_HTTP_TIMEOUT",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "index-url": "UV_DEFAULT_INDEX",
    "retries": "UV_HTTP_RETRIES",
    "timeout": "UV_HTTP_TIMEOUT",
    "trusted-host": "UV_INSECURE_HOST",
}
"""pip's setting -> uv's variable. Addresses go into variables because they may contain passwords, which
everybody could read in a command line."""
_FLAGS = {"no-index": "--no-index", "pre": "--prerelease=allow", "no-cache-dir": "--no-cache"}
"""pip's setting that is on or off -> uv's option."""


class NotHandedOverError(Exception):
    """The text says which setting of pip uv cannot be given, and why."""


class ForUv(NamedTuple):
    options: tuple[str, ...]
    """Options of `uv pip install`."""
    environment: dict[str, str]
    """Variables, to be added to those of this process."""


def find_uv() -> str | None:
    """Look in PATH and in this environment."""
    return shutil.which("uv") or shutil.which("uv", path=Path(sys.prefix, "bin"))


def translate_for_uv(settings: Mapping[str, PipSetting]) -> ForUv:
    """Raises NotHandedOverError."""
    # pip takes the best version of all indexes; uv by default the best version of the first index that
    # has the package.
    options = ["--index-strategy=unsafe-best-match"]
    environment = {} if "cert" in settings else _certificates()
    for key, setting in settings.items():
        value = setting.value
        if key in _AS_VARIABLE:
            environment[_AS_VARIABLE[key]] = _variable(setting)
        elif key in _FLAGS:
            options += [_FLAGS[key]] if value.lower() not in _FALSE or key == "no-cache-dir" else []
        elif key == "constraint":
            # pip applies them to the packages that build a package, too.
            for file in value.split():
                options += ["--constraint", file, "--build-constraints", file]
        elif key in ("only-binary", "no-binary"):
            options += [f"--{key}={name}" for name in value.replace(",", " ").split()]
        elif key == "cert":
            path = Path(value).expanduser()
            environment["SSL_CERT_DIR" if path.is_dir() else "SSL_CERT_FILE"] = str(path)
        elif key == "proxy":
            names = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
            environment |= dict.fromkeys([*names, *map(str.lower, names)], value)
        elif key == "cache-dir":
            environment["UV_CACHE_DIR"] = os.environ.get("UV_CACHE_DIR", f"{value}/uv")
        elif key not in _HARMLESS:
            raise NotHandedOverError(f"uv has nothing like pip's setting {setting.name}")
    _refuse_untrusted(settings)
    return ForUv(tuple(options), environment)


def _certificates() -> dict[str, str]:
    """pip trusts these without a setting: the system's certificates, or those of the variables of the
    library with which pip connects."""
    system = {"UV_SYSTEM_CERTS": "true", "UV_NATIVE_TLS": "true"}  # newer and older versions of uv
    bundle = os.environ.get("REQUESTS_CA_BUNDLE") or os.environ.get("CURL_CA_BUNDLE")
    return {**system, "SSL_CERT_FILE": bundle} if bundle and Path(bundle).is_file() else system


def _variable(setting: PipSetting) -> str:
    values = setting.value.split()
    if setting.key == "find-links":
        places = [str(Path(one).expanduser()) if one.startswith("~") else one for one in values]
        if pages := [one for one in places if Path(one.removeprefix("file://")).is_file()]:
            raise NotHandedOverError(
                f"pip's setting {setting.name} names a file, and uv takes only folders and addresses: "
                f"{', '.join(pages)}"
            )
        return ",".join(places)
    if setting.key == "client-cert":
        return str(Path(setting.value).expanduser())
    if _AS_VARIABLE[setting.key] == "UV_HTTP_TIMEOUT":
        try:
            return str(max(1, round(float(setting.value))))
        except ValueError:
            raise NotHandedOverError(f"pip's setting {setting.name} is no number") from None
    return " ".join(values)


def _refuse_untrusted(settings: Mapping[str, PipSetting]) -> None:
    """Raises NotHandedOverError if pip would ignore an index that is not encrypted."""
    trusted = settings["trusted-host"].value.split() if "trusted-host" in settings else []
    for key in ("index-url", "extra-index-url", "find-links"):
        for address in settings[key].value.split() if key in settings else ():
            url = urlsplit(address)
            host = url.hostname or ""
            is_local = host in ("localhost", "::1") or host.startswith("127.")
            is_trusted = is_local or host in trusted or f"{host}:{url.port}" in trusted
            if url.scheme == "http" and not is_trusted:
                raise NotHandedOverError(
                    f"pip ignores {host} of {settings[key].name}, which is neither encrypted nor a "
                    "trusted-host, and uv would not"
                )


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
        given = translate_for_uv(effective_settings())
    except NotHandedOverError as error:
        print_line(f"pip installs, which takes longer than uv: {error}")
        return by_pip
    found = find_uv()
    if found is None:
        with phase("uv"):
            subprocess.run([*_PIP, *by_pip.constraints, "uv"], check=False)
        found = find_uv()
    if found is None:
        print_line("pip installs, which takes longer than uv: uv could not be installed")
        return by_pip
    command = (found, "pip", "install", "--quiet", "--python", sys.executable, *given.options)
    return replace(by_pip, uv=command, environment=given.environment)


def compile_pins(sources: Sequence[str], more: str, extras: Sequence[str], python: str) -> str:
    """Newest version of each package that the files `sources` and the requirements `more` need, with the
    `extras` of pyproject.toml, on any machine and in any Python from version `python` on."""
    settings = {key: one for key, one in effective_settings().items() if key not in _LOCAL}
    given = translate_for_uv(settings)
    program = find_uv()
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


BUILDERS = ("docker", "packaging", "psutil", "xxhash")
"""Packages that `python -m testbed.images.building` needs, with what these bring."""
BROKER = "broker"
"""Extra that does not go together with the others."""
_USED = (
    "agents.aggregator.main, agents.client.training, agents.device.main",
    "testbed.cli.main, testbed.api.outputs, testbed.run.up, testbed.data.datasets, rich.console, "
    "analysis.summary, testbed.dashboard.web_server, testbed.images.building, "
    "testbed.runtimes.process.runtime",
)
"""Modules to compile with all that they import, in one process each. To compile all that PyTorch brings
would double the wait. Without byte code, where PYTHONDONTWRITEBYTECODE is set, every process would
compile PyTorch anew."""
_BUILDER = (sys.executable, "-m", "testbed.images.building")
_HEADER = "# With these versions, a set-up is the same tomorrow. Written by: make constraints\n"
_BROKER_FOLDER = "import testbed.broker as it; print(it.AMQTT_FOLDER, it.AMQTT, sep='\\n')"


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

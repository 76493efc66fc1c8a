"""uv, which installs in seconds what takes pip a minute, with the user's settings of pip.

uv reads neither pip's configuration files nor PIP_* variables, and chooses among several indexes
otherwise than pip. `translate` hands over what the user has set, so that uv installs what pip would. If
a setting cannot be handed over, the user is told, and pip installs.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from testbed.installing.pip_settings import PipSetting

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


def find() -> str | None:
    """Look in PATH and in this environment."""
    return shutil.which("uv") or shutil.which("uv", path=Path(sys.prefix, "bin"))


def translate(settings: Mapping[str, PipSetting]) -> ForUv:
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

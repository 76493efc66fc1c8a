"""Set-up: uv installs what pip would with the user's settings, pins fit, images are built meanwhile."""

from __future__ import annotations

import functools
import http.server
import os
import ssl
import subprocess
import sys
import textwrap
import threading
import tomllib
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from importlib.metadata import distribution, packages_distributions
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from testbed import images, installing
from testbed.host.processes import StoppedError
from testbed.images.building import Builder, BuildTime
from testbed.installing import PipSetting
from tests.conftest import unavailable
from tests.waiting import eventually

ROOT = Path(__file__).parents[2]
Serve = Callable[..., str]
needs_uv = pytest.mark.usefixtures("with_uv")


class Index(http.server.SimpleHTTPRequestHandler):
    """A folder as an index, and a proxy for any address, which answers from the same folder."""

    def translate_path(self, path: str) -> str:
        return super().translate_path(urlsplit(path).path)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user without settings: the folder that has pip's file of the user."""
    for name in os.environ:
        if (
            name.startswith(("PIP_", "UV_", "SSL_"))
            or name.endswith("_BUNDLE")
            or "proxy" in name.lower()
        ):
            monkeypatch.delenv(name)
    for name in ("XDG_CONFIG_DIRS", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    return tmp_path / "XDG_CONFIG_HOME" / "pip"


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Serve a folder until the test ends; return its address."""
    with ExitStack() as stack:

        def start(folder: Path, tls: ssl.SSLContext | None = None) -> str:
            handler = functools.partial(Index, directory=folder)
            server = stack.enter_context(http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler))
            if tls is not None:
                server.socket = tls.wrap_socket(server.socket, server_side=True)
            thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
            thread.start()
            stack.callback(thread.join)
            stack.callback(server.shutdown)
            return f"http{'s' if tls else ''}://127.0.0.1:{server.server_port}"

        yield start


def add_wheels(folder: Path, *versions: str) -> Path:
    """Write wheels of the package `thing` into a folder, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    for version in versions:
        with zipfile.ZipFile(folder / f"thing-{version}-py3-none-any.whl", "w") as wheel:
            about = f"thing-{version}.dist-info"
            wheel.writestr(
                f"{about}/METADATA", f"Metadata-Version: 2.1\nName: thing\nVersion: {version}\n"
            )
            wheel.writestr(
                f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            )
            wheel.writestr(f"{about}/RECORD", "")
    return folder


def add_index(folder: Path, *versions: str) -> Path:
    add_wheels(folder / "thing", *versions)
    names = [path.name for path in (folder / "thing").iterdir()]
    links = "".join(f'<a href="{name}">{name}</a>\n' for name in names)
    (folder / "thing" / "index.html").write_text(f"<!DOCTYPE html><html><body>{links}</body></html>")
    return folder


def install_by(program: str, tmp_path: Path, *wanted: str, pins: Path | None = None) -> str:
    """Version of `thing` that the program installs."""
    target = tmp_path / f"by-{program}"
    installing.choose(program, pins).install("--target", str(target), *wanted)
    (found,) = target.glob("thing-*.dist-info")
    return found.name.removeprefix("thing-").removesuffix(".dist-info")


@pytest.fixture
def with_uv() -> None:
    if installing.find_uv() is None:
        unavailable("uv", "it is neither in PATH nor in this environment")


def version_by_both(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], *wanted: str, pins: Path | None = None
) -> str:
    """Version of `thing` that both programs install, uv without pip's help."""
    by_uv = install_by("uv", tmp_path, *wanted, pins=pins)
    out, err = capfd.readouterr()
    assert "pip" not in out, out + err
    assert install_by("pip", tmp_path, *wanted, pins=pins) == by_uv
    return by_uv


@needs_uv
@pytest.mark.parametrize(
    ("settings", "version"),
    [
        ({"PIP_INDEX_URL": "{one}"}, "2.0"),
        ({"PIP_INDEX_URL": "{one}", "PIP_EXTRA_INDEX_URL": "{two}\n{file}"}, "4.0"),
        ({"PIP_INDEX_URL": "{two}", "PIP_EXTRA_INDEX_URL": "{one}"}, "3.0"),
        ({"PIP_INDEX_URL": "{one}", "PIP_FIND_LINKS": "{links}"}, "2.0"),
        ({"PIP_NO_INDEX": "yes", "PIP_FIND_LINKS": "{links}"}, "1.5"),
        ({"PIP_INDEX_URL": "{two}", "PIP_NO_INDEX": "0"}, "3.0"),
        ({"PIP_INDEX_URL": "{one}", "PIP_CONSTRAINT": "{constraint}"}, "1.0"),
        ({"PIP_INDEX_URL": "{one}", "PIP_PRE": "1"}, "5.0rc1"),
        ({"PIP_INDEX_URL": "{one}", "PIP_NO_CACHE_DIR": "off", "PIP_TIMEOUT": "9.5"}, "2.0"),
        ({"PIP_INDEX_URL": "{with_source}", "PIP_ONLY_BINARY": ":all:"}, "2.0"),
        (
            {
                "PIP_INDEX_URL": "http://index.example",
                "PIP_PROXY": "{one}",
                "PIP_TRUSTED_HOST": "index.example",
            },
            "2.0",
        ),
    ],
)
def test_settings_of_pip_have_the_same_effect_with_uv(
    settings: dict[str, str],
    version: str,
    tmp_path: Path,
    home: Path,
    serve: Serve,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    source = add_index(tmp_path / "with_source", "2.0")
    (source / "thing" / "thing-9.0.tar.gz").touch()
    add_index(source)
    constraint = tmp_path / "constraint.txt"
    constraint.write_text("thing<2\n")
    places = {
        "one": serve(add_index(tmp_path / "one", "1.0", "2.0", "5.0rc1")),
        "two": serve(add_index(tmp_path / "two", "3.0")),
        "file": add_index(tmp_path / "file", "4.0").as_uri(),
        "links": str(add_wheels(tmp_path / "links", "1.5")),
        "with_source": serve(source),
        "constraint": str(constraint),
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value.format(**places))
    assert version_by_both(tmp_path, capfd, "thing") == version


@needs_uv
def test_settings_of_all_files_of_pip_are_read(
    tmp_path: Path,
    home: Path,
    serve: Serve,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A variable overrides a section of the command, and this one `global`, in whichever file."""
    one = serve(add_index(tmp_path / "one", "1.0"))
    two = serve(add_index(tmp_path / "two", "2.0"))
    machine = tmp_path / "XDG_CONFIG_DIRS" / "pip"
    for folder, text in {
        machine: f"[install]\nindex-url = {one}\n[global]\nextra-index-url =\n    {one}\n    {two}\n",
        home: f"[global]\nindex-url = {two}\nextra-index-url = {one}\n[download]\nno-index = yes\n",
    }.items():
        folder.mkdir(parents=True)
        (folder / "pip.conf").write_text(text)
    assert installing.effective_settings()["index-url"] == PipSetting("install", "index-url", one)
    assert version_by_both(tmp_path, capfd, "thing") == "1.0"
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", two)
    monkeypatch.setenv("PIP_INDEX_URL", "")
    assert installing.effective_settings()["extra-index-url"].name == "PIP_EXTRA_INDEX_URL"
    assert version_by_both(tmp_path / "more", capfd, "thing") == "2.0"


@needs_uv
def test_pins_and_the_users_constraint_hold_together(
    tmp_path: Path,
    home: Path,
    serve: Serve,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A pin without a local part accepts the build that one index has."""
    monkeypatch.setenv("PIP_INDEX_URL", serve(add_index(tmp_path / "one", "2.0", "3.0")))
    monkeypatch.setenv("PIP_FIND_LINKS", str(add_wheels(tmp_path / "links", "2.0+cpu")))
    monkeypatch.setenv("PIP_CONSTRAINT", str(tmp_path / "constraint.txt"))
    (tmp_path / "constraint.txt").write_text("thing<=3\n")
    pins = tmp_path / "pins.txt"
    pins.write_text("thing==2.0 ; python_version >= '3'\nthing==1.0 ; python_version < '3'\n")
    assert version_by_both(tmp_path, capfd, "thing", pins=pins) == "2.0+cpu"


@needs_uv
def test_cpu_build_of_an_added_index_is_preferred(
    tmp_path: Path,
    home: Path,
    serve: Serve,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """So set-up gets PyTorch (`torch_index`)."""
    monkeypatch.setenv("PIP_INDEX_URL", serve(add_index(tmp_path / "one", "2.0", "2.1")))
    cpu = serve(add_index(tmp_path / "cpu", "1.0+cpu", "2.0+cpu"))
    assert version_by_both(tmp_path, capfd, "--extra-index-url", cpu, "thing==2.0") == "2.0+cpu"


@needs_uv
def test_certificate_of_pip_is_handed_over(
    tmp_path: Path, home: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    plain = (serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    ca, both = tmp_path / "ca.pem", tmp_path / "both.pem"
    ca.write_bytes(certificate.public_bytes(pem))
    both.write_bytes(key.private_bytes(pem, *plain) + ca.read_bytes())
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(both)
    address = serve(add_index(tmp_path / "one", "1.0"), tls).replace("127.0.0.1", "localhost")
    monkeypatch.setenv("PIP_INDEX_URL", address)
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(SystemExit):
        install_by("uv", tmp_path, "thing")
    for variable in ("PIP_CERT", "REQUESTS_CA_BUNDLE"):
        with monkeypatch.context() as patch:
            patch.setenv(variable, str(ca))
            patch.setattr(installing, "_PIP", ("false",))  # uv alone
            assert install_by("uv", tmp_path / variable, "thing") == "1.0"


@pytest.mark.parametrize(
    ("settings", "options", "variables"),
    [
        ({"timeout": "0.2", "retries": "7"}, [], {"UV_HTTP_TIMEOUT": "1", "UV_HTTP_RETRIES": "7"}),
        ({"client-cert": "/c.pem", "cert": "/ca.pem"}, [], {"SSL_CLIENT_CERT": "/c.pem"}),
        ({"cert": "/"}, [], {"SSL_CERT_DIR": "/"}),
        ({"cache-dir": "/big", "quiet": "1"}, [], {"UV_CACHE_DIR": "/big/uv"}),
        ({"no-binary": "a,b", "pre": "false"}, ["--no-binary=a", "--no-binary=b"], {}),
        ({"find-links": "/a /b"}, [], {"UV_FIND_LINKS": "/a,/b"}),
        (
            {"constraint": "a b"},
            [
                *("--constraint", "a", "--build-constraints", "a"),
                *("--constraint", "b", "--build-constraints", "b"),
            ],
            {},
        ),
    ],
)
def test_settings_as_uv_takes_them(
    settings: dict[str, str], options: list[str], variables: dict[str, str], home: Path
) -> None:
    found = installing.translate_for_uv(
        {key: PipSetting("global", key, value) for key, value in settings.items()}
    )
    assert [*found.options] == ["--index-strategy=unsafe-best-match", *options]
    assert found.environment.items() >= variables.items()


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("prefer-binary", "1", "global.prefer-binary"),
        ("find-links", __file__, "names a file"),
        ("timeout", "long", "global.timeout is no number"),
        ("index-url", "http://index.example/simple", "ignores index.example of global.index-url"),
    ],
)
def test_setting_that_uv_cannot_be_given_is_named_and_pip_installs(
    key: str,
    value: str,
    words: str,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(
        installing, "effective_settings", lambda: {key: PipSetting("global", key, value)}
    )
    assert installing.choose("uv", None).uv == ()
    assert words in capsys.readouterr().out


def test_pip_tries_what_uv_refuses(
    tmp_path: Path,
    home: Path,
    serve: Serve,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", serve(add_index(tmp_path / "one", "2.0")))
    refusing = installing.Installer((), ("false",), {})
    refusing.install("--target", str(tmp_path), "thing")
    assert (tmp_path / "thing-2.0.dist-info").is_dir()
    assert "pip tries it" in capfd.readouterr().out
    with pytest.raises(SystemExit):
        refusing.install("--target", str(tmp_path), "thing>6")


def read_pins(file: Path) -> list[Requirement]:
    lines = file.read_text(encoding="utf-8").splitlines()
    return [Requirement(line) for line in lines if not line.startswith("#")]


def test_every_dependency_has_a_pin_for_each_python_and_machine() -> None:
    """After a change of pyproject.toml: make constraints."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    together = [one for name, needs in extras.items() if name != installing.BROKER for one in needs]
    file = ROOT / "constraints.txt"
    for wanted, path in (
        ([*project["dependencies"], *together, "uv"], file),
        (extras[installing.BROKER], installing.broker_pins(file)),
    ):
        found = read_pins(path)
        assert not [one for one in found if one.url or "+" in str(one.specifier)]
        for need in map(Requirement, wanted):
            if need.name == project["name"]:
                continue
            for minor in (11, 12, 13, 14):
                for machine in ("x86_64", "aarch64"):
                    where = {
                        "python_version": f"3.{minor}",
                        "python_full_version": f"3.{minor}.9",
                        "platform_machine": machine,
                        "sys_platform": "linux",
                    }
                    fits = [
                        one
                        for one in found
                        if canonicalize_name(one.name) == canonicalize_name(need.name)
                        and (one.marker is None or one.marker.evaluate(where))
                    ]
                    assert len(fits) == 1, (str(need), where, fits)
                    version = str(fits[0].specifier).removeprefix("==")
                    assert need.specifier.contains(version, prereleases=True), (str(need), version)


def test_images_are_built_with_few_packages() -> None:
    """Set-up installs these before all others."""
    code = "import sys, testbed.images.building; print(*{one.partition('.')[0] for one in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    allowed: set[str] = set()
    new: set[str] = {*installing.BUILDERS}
    while new:
        allowed |= new
        needs = [Requirement(one) for name in new for one in distribution(name).requires or ()]
        usual = [one for one in needs if one.marker is None or one.marker.evaluate({"extra": ""})]
        new = {str(canonicalize_name(one.name)) for one in usual} - allowed
    names = packages_distributions()
    needed = {
        canonicalize_name(names[module][0])
        for module in done.stdout.split()
        if module in names and module not in sys.stdlib_module_names
    }
    optional = {
        "edge-fl-testbed",
        "pysocks",
        "setuptools",
    }  # this checkout; of urllib3; by its .pth file
    assert needed - optional <= allowed


@pytest.mark.parametrize("installed", [False, True])
def test_build_waits_for_the_packages_and_ends_with_set_up(installed: bool) -> None:
    code = """
        import threading
        from testbed.host import processes
        from testbed.images.building import _listen
        processes.interrupt_once()
        installed = threading.Event()
        try:
            threading.Thread(target=_listen, args=(installed,), daemon=True).start()
            installed.wait()
            print("installed", flush=True)
            threading.Event().wait()
        except KeyboardInterrupt:
            print("interrupted", flush=True)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, bufsize=0) as waiting:
        assert waiting.stdin is not None
        assert waiting.stdout is not None
        if installed:
            waiting.stdin.write(b"\n")
            assert waiting.stdout.readline() == b"installed\n"
        waiting.stdin.close()
        assert waiting.stdout.read() == b"interrupted\n"
    assert waiting.returncode == 0


def test_libraries_are_not_downloaded_before_the_packages_are_there(tmp_path: Path) -> None:
    tags = images.current_tags(images.FOLDER, images.AGENTS)
    waiting = Builder(
        None,  # type: ignore[arg-type]  # no engine is asked
        tags,
        tmp_path,
        print,
        BuildTime(tags),
        installed=threading.Event(),
    )
    stop = threading.Event()
    stop.set()
    with pytest.raises(StoppedError):
        waiting._libraries_context("libraries", "x86_64", stop)


def test_nothing_is_built_without_an_engine(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nonexistent/docker.sock")
    with installing._images(enabled=True) as packages_are_there:
        packages_are_there()
    assert capfd.readouterr() == ("", "")


def test_failed_build_is_reported(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        installing, "_BUILDER", (sys.executable, "-c", "import sys; sys.exit('no space')")
    )
    with installing._images(enabled=True) as packages_are_there:
        packages_are_there()
    out, err = capfd.readouterr()
    assert err == "no space\n"
    assert "not built (see above)" in out


def test_build_ends_if_set_up_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = f"""
        import pathlib, sys
        pathlib.Path({str(tmp_path / "started")!r}).touch()
        sys.stdin.read()
        pathlib.Path({str(tmp_path / "ended")!r}).touch()
    """
    monkeypatch.setattr(installing, "_BUILDER", (sys.executable, "-c", textwrap.dedent(code)))

    def fail() -> None:
        with installing._images(enabled=True):
            eventually((tmp_path / "started").exists)
            raise SystemExit(1)

    with pytest.raises(SystemExit):
        fail()
    assert (tmp_path / "ended").exists()


def test_packages_that_cannot_be_imported_end_the_set_up(capfd: pytest.CaptureFixture[str]) -> None:
    with (
        pytest.raises(SystemExit, match="cannot be imported"),
        installing._compiling(["json", "no_such_one"]),
    ):
        pass
    assert "no_such_one" in capfd.readouterr().err

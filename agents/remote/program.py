"""The program that the controller runs on a real device by SSH.

The controller sends this file on the standard input of `python3 -c LOADER`, followed by a request: a
line of JSON, then the contents of the files that it lists. So nothing has to be installed first, and no
secret is in an argument. The answer is a line with the request's `token`, then a line of JSON. This
program needs only Python 3.9, and imports nothing of the testbed except for the comparison of clocks.

Files on the device, in `~/.cache/edge-fl-testbed`:

    environments/HASH/      virtual environment with the agents' packages; kept for later runs
    images/NAME             engine and tag of an image that was loaded into a container engine; likewise
    runs/RUN/DEVICE/        files of one device of one run; removed at the end of the run
"""

from __future__ import annotations

import fcntl
import getpass
import importlib.util
import io
import json
import os
import platform
import re
import select
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

CACHE = Path.home() / ".cache" / "edge-fl-testbed"
COMPLETE = "complete"
"""Name of the file in an environment whose packages are all installed."""
LOCK, EXIT, LOG, DISK, CLOCK = "lock", "exit", "log", "disk", "clock.json"
"""Names in a device's folder: lock of its keeper, exit code of its init, log, the client's folder, and
the estimate of the controller's clock."""
ENGINE, CONTAINER = "engine", "container"
"""Names in the folder of a device with a container: name of the engine, and id of the container."""
LIMITS, SHAPED = "limits.json", "shaped"
"""Names in the folder of a device with `shape: true`: interface and control groups that are limited, and
a file that exists when the link is shaped."""
LABEL = "edge-fl-testbed"
"""Label of a container, whose value is the device's folder."""
MAX_LOG_BYTES = 4 * 2**20
"""Maximum from the end of a log."""
OLD_SECONDS = 7 * 86_400
"""Age after which the folder of a device without a keeper is removed."""
_LAST_LINES = 15
_ASK_SECONDS, _ANSWER_SECONDS = 1.0, 20.0
"""Between two exchanges of clocks; and after which an exchange without answer ends the connection."""
_CONNECT_SECONDS = 5.0
_KEEPER_SECONDS = 60.0
"""Maximum until the keeper has started: a busy, slow device reads Python's modules for long."""
_QUICK_EXCHANGES = 10
"""Exchanges of clocks at once at the start."""
_LOAD_SECONDS = 5.0
"""Seconds between two readings of this machine's load."""
_ROUND_TRIPS, _PAUSE_SECONDS = 40, 0.02
"""Round trips that are measured, and seconds between two of them."""
_SIZES = [2**16, 2**18, 2**20, 2**22, 2**24]
"""Bytes of transfers: larger ones follow until one takes the requested seconds."""
CHUNK_BYTES = 2**16
_PIECE_SECONDS, _MIN_PIECE_BYTES = 0.02, 2**12
"""Data for a link whose rate is known is written in pieces of this duration and at least this size."""
_AHEAD_SECONDS = 0.05
"""Maximum by which a writer is ahead of the link's rate, and by which a late one catches up. Both
together fill less than the queue of a shaped link."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


class RequestError(Exception):
    """The text says why the request cannot be carried out."""


def main(source: Any, sink: Any) -> None:
    request = json.loads(source.readline())
    sink.write(request["token"].encode() + b"\n")
    sink.flush()
    verbs = {
        "check": check,
        "install": install,
        "load": load,
        "measure": measure,
        "start": start,
        "watch": watch,
        "remove": remove,
        "clean": clean,
    }
    try:
        verbs[request["verb"]](request, source, sink)
    except (RequestError, OSError, subprocess.SubprocessError) as error:
        answer(sink, {"failure": str(error)})


def answer(sink: Any, values: dict[str, Any]) -> None:
    sink.write(json.dumps(values).encode() + b"\n")
    sink.flush()


def check(request: dict[str, Any], source: Any, sink: Any) -> None:
    """Python, free disk space and missing packages of this machine."""
    free = shutil.disk_usage(existing_parent(CACHE)).free
    answer(
        sink,
        {
            "python": platform.python_version(),
            "system": platform.system(),
            "machine": platform.machine(),
            "cores": os.cpu_count(),
            "free": free,
            "missing": [one for one in request["modules"] if importlib.util.find_spec(one) is None],
            "venv": all(importlib.util.find_spec(one) for one in ("venv", "ensurepip")),
            "installed": (environment(request) / COMPLETE).exists(),
            "reaches": [reaches(*server) for server in request["servers"]],
            "seen": os.environ.get("SSH_CONNECTION", "").partition(" ")[0],
            "has_image": has_image(request),
            "unshapeable": unshapeable(request),
        },
    )


def reaches(host: str, port: int) -> bool:
    """Whether this machine can connect to the controller."""
    with suppress(OSError), socket.create_connection((host, port), _CONNECT_SECONDS):
        return True
    return False


def existing_parent(path: Path) -> Path:
    return path if path.is_dir() else existing_parent(path.parent)


def environment(request: dict[str, Any]) -> Path:
    return CACHE / "environments" / named(request["environment"])


def named(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise RequestError(f"invalid name: {name!r}")
    return name


def folder_of(request: dict[str, Any]) -> Path:
    return CACHE / "runs" / named(request["run"]) / named(request["device"])


def install(request: dict[str, Any], source: Any, sink: Any) -> None:
    """Make the environment unless it exists or an interpreter is given, and unpack the agents into the
    device's folder."""
    remove_old()
    folder, contents = folder_of(request), [content for _, content in received(request, source)]
    if is_gone(source):  # it has perhaps removed everything already
        return
    stop(folder)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.chdir(str(folder))  # `stop` finds this process and pip there
    for name in ("agents", "code"):
        shutil.rmtree(folder / name, ignore_errors=True)
    for name in (EXIT, CLOCK):
        remove_file(folder / name)
    for content in contents:
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:gz") as archive:
            unpack(archive, folder)
    python = sys.executable if request["own_python"] else installed_python(request)
    if is_gone(source):
        remove_folder(folder)
    else:
        answer(sink, {"python": python, "has_image": has_image(request)})


def is_gone(source: Any) -> bool:
    """The controller has closed the connection."""
    return bool(select.select([source], [], [], 0)[0]) and source.peek(1) == b""


def installed_python(request: dict[str, Any]) -> str:
    """Interpreter of the environment, which is made if it does not exist."""
    made = environment(request)
    made.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with made.with_suffix(".lock").open("w") as lock:  # another device may be the same machine
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (made / COMPLETE).exists():
            make_environment(made, request["attempts"])
    return str(made / "bin" / "python")


def make_environment(made: Path, attempts: list[list[str]]) -> None:
    """Each attempt has the arguments of `pip install`; the first that succeeds counts."""
    shutil.rmtree(made, ignore_errors=True)
    run([sys.executable, "-m", "venv", str(made)], "the virtual environment could not be made")
    pip = [str(made / "bin" / "python"), "-m", "pip", "install", "--no-input", "-q"]
    pip.append("--disable-pip-version-check")
    for number, attempt in enumerate(attempts, 1):
        try:
            run([*pip, *attempt], "pip could not install the agents' packages")
        except RequestError:
            if number == len(attempts):
                shutil.rmtree(made, ignore_errors=True)
                raise
        else:
            (made / COMPLETE).touch()
            return


def run(command: list[str], failure: str) -> str:
    """Return the output. Raises RequestError with the text `failure` and the last lines."""
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    except FileNotFoundError:
        raise RequestError(f"{failure}: it is not installed") from None
    if done.returncode:
        text = (done.stdout + done.stderr).decode("utf-8", "replace")
        raise RequestError("\n".join([failure + ":", *text.splitlines()[-_LAST_LINES:]]))
    return done.stdout.decode("utf-8", "replace")


def received(request: dict[str, Any], source: Any) -> Any:
    """Name and content of each file that follows the request."""
    for name, size in request["files"]:
        content = source.read(size)
        if len(content) < size:
            raise RequestError(f"the connection broke while {name} was sent")
        yield name, content


def has_image(request: dict[str, Any]) -> bool | None:
    """None if no container engine is requested."""
    container = request.get("container")
    if container is None:
        return None
    engine = container["engine"]
    run([engine, "info"], f"{engine} does not answer to {getpass.getuser()}")
    return is_loaded(engine, container["image"])


def is_loaded(engine: str, image: str) -> bool:
    command = [engine, "image", "inspect", image]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    return done.returncode == 0


def load(request: dict[str, Any], source: Any, sink: Any) -> None:
    """Load the image that follows the request, compressed, into a container engine, and note it for
    `clean`."""
    engine, image = request["container"]["engine"], request["container"]["image"]
    ((name, left),) = request["files"]
    unpacker = zlib.decompressobj(zlib.MAX_WBITS | 16)  # for gzip; not every engine unpacks it
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            [engine, "load", "--quiet"], stdin=subprocess.PIPE, stdout=said, stderr=said
        )
        try:
            while left and process.poll() is None:
                chunk = source.read(min(left, CHUNK_BYTES))
                left -= len(chunk)
                if not chunk:
                    raise RequestError(f"the connection broke while {name} was sent")
                with suppress(BrokenPipeError):  # the engine says why
                    process.stdin.write(unpacker.decompress(chunk))  # type: ignore[union-attr]
            with suppress(BrokenPipeError):
                process.stdin.close()  # type: ignore[union-attr]
            process.wait()
        finally:
            process.kill()
            process.wait()
        said.seek(0)
        if process.returncode or not is_loaded(engine, image):
            raise RequestError(
                f"{engine} could not load {image}: {said.read().decode('utf-8', 'replace')}"
            )
    (CACHE / "images").mkdir(mode=0o700, parents=True, exist_ok=True)
    replace(CACHE / "images" / named(image.replace(":", "-")), json.dumps([engine, image]))
    answer(sink, {})


def unpack(archive: tarfile.TarFile, folder: Path) -> None:
    """Regular files only."""
    for member in archive:
        path = Path(member.name)
        if member.isfile() and not path.is_absolute() and ".." not in path.parts:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            content = archive.extractfile(member)
            if content is not None:
                (folder / path).write_bytes(content.read())


def measure(request: dict[str, Any], source: Any, sink: Any) -> None:
    """Round trips to the broker's port, where the kernel answers, and rates of one encrypted connection
    in each direction. If the link is to be shaped by now, wait for that; `shaped` are its rates in
    bit/s."""
    shaped = request["shaped"]
    if shaped is not None:
        await_shaped(folder_of(request))
    rates = shaped or {}
    trips = []
    for _ in range(_ROUND_TRIPS):
        begin = time.monotonic_ns()
        if reaches(*request["server"]):
            trips.append((time.monotonic_ns() - begin) / 1e9)
        time.sleep(_PAUSE_SECONDS)
    found: dict[str, Any] = {"round_trips": _ROUND_TRIPS, "loss": 1 - len(trips) / _ROUND_TRIPS}
    if trips:
        found.update({"rtt": statistics.median(trips), "jitter": statistics.pstdev(trips)})
    for size in sizes(rates.get("down"), request["seconds"]):
        answer(sink, {"send": size})
        rate, seconds = receive(source, size, is_shaped=shaped is not None)
        if rate:
            found["down"] = rate
        if seconds >= request["seconds"]:
            break
    for size in sizes(rates.get("up"), request["seconds"]):
        begin = time.monotonic_ns()
        answer(sink, {"receive": size})
        send(sink, size, rates.get("up"))
        if not source.readline():
            raise RequestError("the connection broke while the link was measured")
        if (time.monotonic_ns() - begin) / 1e9 >= request["seconds"]:
            break
    answer(sink, {"measured": found})


def sizes(rate: int | None, seconds: float) -> list[int]:
    """Bytes of the transfers. If the link's `rate` (bit/s) is known, one takes the seconds, within the
    limits of the sizes."""
    if rate is None:
        return _SIZES
    return [min(max(_SIZES[0], int(rate * seconds / 8)), _SIZES[-1])]


def send(sink: Any, size: int, rate: int | None) -> None:
    """Write `size` bytes. If the link's `rate` is known, in bit/s, write at that rate. The headers of
    packets make the link a little slower, so its queue is never empty, but does not overflow: after a
    lost packet, TCP withholds what has arrived, and then hands it over at once, which looks fast."""
    block = os.urandom(CHUNK_BYTES)
    piece = CHUNK_BYTES
    if rate is not None:
        piece = min(piece, max(_MIN_PIECE_BYTES, int(rate * _PIECE_SECONDS / 8)))
    due = time.monotonic()
    for begin in range(0, size, piece):
        if rate is not None:
            now = time.monotonic()
            due = max(due, now - _AHEAD_SECONDS) + 8 * piece / rate
            time.sleep(max(0.0, due - now - _AHEAD_SECONDS))
        sink.write(block[: min(piece, size - begin)])
        sink.flush()


def receive(source: Any, size: int, *, is_shaped: bool) -> tuple[float | None, float]:
    """Return bit/s from the first quarter on, None if all came at once, and the seconds.

    If the link `is_shaped`, the rate does not vary, but a busy machine may read late, which makes the
    rest look faster: the lowest rate of those from any time up to the last quarter is taken.
    """
    left = 0
    marks: list[tuple[int, int]] = []
    """Bytes received, and the time in ns."""
    begin = time.monotonic_ns()
    while left < size:
        chunk = source.read1(min(size - left, CHUNK_BYTES))
        if not chunk:
            raise RequestError("the connection broke while the link was measured")
        left += len(chunk)
        if size / 4 <= left <= size * 3 / 4 and (is_shaped or not marks):
            marks.append((left, time.monotonic_ns()))
    end = time.monotonic_ns()
    rates = [8e9 * (size - done) / (end - at) for done, at in marks if end > at]
    return min(rates, default=None), (end - begin) / 1e9


def start(request: dict[str, Any], source: Any, sink: Any) -> None:
    """Write the received files, then start the keeper, which outlives this connection. Existing files in
    the client's folder are kept: they are newer."""
    folder = folder_of(request)
    stop(folder)  # also a keeper whose init has ended
    had_disk = (folder / DISK).is_dir()
    (folder / DISK).mkdir(mode=0o700, exist_ok=True)
    for name, content in received(request, source):
        in_disk = name.startswith(DISK + "/")
        if not (in_disk and had_disk):
            target = folder / DISK / named(name[len(DISK) + 1 :]) if in_disk else folder / named(name)
            write(target, content)
    for name in (EXIT, CONTAINER, SHAPED):
        remove_file(folder / name)
    settings = {**request["keeper"], "groups": limit(folder, request)}
    if request["keeper"]["container"] is not None:
        write(folder / ENGINE, request["keeper"]["container"]["engine"].encode())
    with (folder / LOG).open("ab") as log:
        keeper = subprocess.Popen(
            [request["python"], "-m", "agents.remote.keeper", json.dumps(settings)],
            cwd=str(folder),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    deadline = time.monotonic() + _KEEPER_SECONDS
    while not is_kept(folder):
        if keeper.poll() is not None or time.monotonic() > deadline:
            raise RequestError("the keeper did not start:\n" + "\n".join(last_lines(folder / LOG)))
        time.sleep(0.05)
    answer(sink, {})


def write(path: Path, content: bytes) -> None:
    """Only this user can read the file."""
    remove_file(path)
    descriptor = os.open(str(path), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)


def remove_file(path: Path) -> None:
    with suppress(FileNotFoundError):
        path.unlink()


def last_lines(path: Path) -> list[str]:
    try:
        return path.read_bytes()[-65_536:].decode("utf-8", "replace").splitlines()[-_LAST_LINES:]
    except OSError:
        return []


def is_kept(folder: Path) -> bool:
    """A keeper holds the lock of the device's folder."""
    try:
        with (folder / LOCK).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def watch(request: dict[str, Any], source: Any, sink: Any) -> None:
    """Report the keeper's state every second, and compare this machine's clock with the controller's,
    until the connection ends. `?` asks for the controller's monotonic time, in nanoseconds. Some reports
    have the CPU seconds of this machine."""
    folder = folder_of(request)
    os.chdir(str(folder))  # `stop` finds this process there
    sys.path.insert(0, str(folder))
    from agents.timing.clock_sync import Exchanges  # sent with the agents

    known, number, looked = Exchanges(), 0, 0
    while True:
        asked = time.monotonic_ns()
        sink.write(b"?\n")
        sink.flush()
        if not select.select([source], [], [], _ANSWER_SECONDS)[0]:
            return
        line = source.readline()
        answered = time.monotonic_ns()
        if not line:
            return
        known.add(asked, int(line), answered)
        number += 1
        estimate = known.estimate()
        if number < _QUICK_EXCHANGES or estimate is None:
            continue
        if not folder.is_dir():
            answer(sink, {"gone": True})
            return
        replace(folder / CLOCK, json.dumps(estimate.as_dict()))
        code = exit_code(folder)
        report: dict[str, Any] = {
            "kept": is_kept(folder),
            "exit": code,
            "uncertainty": estimate.uncertainty,
        }
        if answered - looked >= _LOAD_SECONDS * 1e9:
            looked = answered
            report["cpu"] = cpu_seconds(folder.parent)
        answer(sink, report)
        if select.select([source], [], [], _ASK_SECONDS)[0]:
            return  # the controller has closed the connection


def cpu_seconds(run: Path) -> dict[str, float]:
    """All CPUs since the machine started: in total, without idling (`busy`), and taken by a hypervisor
    (`stolen`); and all processes of the run whose folder is `run` (`own`), in containers, too."""
    ticks = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    user, nice, system, idle, waiting, interrupts, soft, stolen = ticks
    own = sum(os.times()[:4])
    per_second = os.sysconf("SC_CLK_TCK")
    for process in {*processes_in(run), *contained_processes(run)}:
        with suppress(OSError, ValueError, IndexError):  # it has ended
            fields = Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2].split()
            own += sum(int(field) for field in fields[11:15]) / per_second
    return {
        "total": (idle + waiting + user + nice + system + interrupts + soft + stolen) / per_second,
        "busy": (user + nice + system + interrupts + soft) / per_second,
        "stolen": stolen / per_second,
        "own": own,
        "cores": os.cpu_count() or 1,
    }


def exit_code(folder: Path) -> int | None:
    try:
        return int((folder / EXIT).read_text())
    except (OSError, ValueError):
        return None


def replace(path: Path, text: str) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(text)
    partial.replace(path)


def remove(request: dict[str, Any], source: Any, sink: Any) -> None:
    """End all processes, send log and the client's folder, and remove everything when the controller has
    confirmed that it has them."""
    folder = folder_of(request)
    stop(folder)
    files = []
    if (folder / LOG).is_file():
        files.append(("log", (folder / LOG).read_bytes()[-MAX_LOG_BYTES:]))
    if (folder / DISK).is_dir():
        files += [
            (f"{DISK}/{path.name}", path.read_bytes())
            for path in sorted((folder / DISK).iterdir())
            if path.is_file() and not path.is_symlink() and _NAME.fullmatch(path.name)
        ]
    answer(sink, {"files": [[name, len(content)] for name, content in files]})
    for _, content in files:
        sink.write(content)
    sink.flush()
    if source.readline() != b"received\n":
        raise RequestError("the controller did not confirm the files")
    remove_folder(folder)
    answer(sink, {"removed": not folder.exists()})


def remove_folder(folder: Path) -> None:
    """Remove limits and folder, and the three folders above it, up to `CACHE`, if they are empty."""
    lift(folder)
    shutil.rmtree(folder, ignore_errors=True)
    for parent in list(folder.parents)[:3]:
        try:
            parent.rmdir()
        except OSError:  # it has other folders
            return


def stop(folder: Path) -> None:
    """End the keeper, the container, and every other process that works in the device's folder. Lift the
    limits."""
    try:
        keeper = int((folder / LOCK).read_text())
    except (OSError, ValueError):
        keeper = 0
    if keeper and is_kept(folder):
        kill(keeper, signal.SIGTERM)
        deadline = time.monotonic() + 5
        while is_kept(folder) and time.monotonic() < deadline:
            time.sleep(0.02)
        if is_kept(folder):
            kill(keeper, signal.SIGKILL)
    remove_containers(folder)
    deadline = time.monotonic() + 5
    while found := processes_in(folder):
        for process in found:
            kill(process, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise RequestError(f"processes {found} do not end")
        time.sleep(0.02)
    lift(folder)


def processes_in(folder: Path) -> list[int]:
    """This user's processes whose working directory is in `folder`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with suppress(OSError):  # it has ended, or is another user's
                place = str((entry / "cwd").readlink())
                if place == str(folder) or place.startswith(f"{folder}/"):
                    found.append(int(entry.name))
    return found


def remove_containers(folder: Path) -> None:
    try:
        engine = (folder / ENGINE).read_text()
    except OSError:
        return
    label = f"label={LABEL}={folder}"
    found = run(
        [engine, "ps", "--all", "--quiet", "--filter", label], f"{engine} cannot list containers"
    ).split()
    if found:
        run([engine, "rm", "--force", "--volumes", *found], f"{engine} cannot remove a container")


def contained_processes(run: Path) -> list[int]:
    """Processes in the containers of the run whose folder is `run`."""
    containers = [path.read_text() for path in run.glob(f"*/{CONTAINER}")]
    found = []
    for entry in Path("/proc").glob("[0-9]*") if containers else ():
        with suppress(OSError):  # it has ended
            groups = (entry / "cgroup").read_text()
            if any(container and container in groups for container in containers):
                found.append(int(entry.name))
    return found


def unshapeable(request: dict[str, Any]) -> str | None:
    """Why this machine cannot be shaped as requested, and what to do; None if it can or need not."""
    wanted = request.get("shape")
    if wanted is None:
        return None
    if os.getuid() != 0:
        return (
            f"{getpass.getuser()} may not set limits: let it log in as root (root@HOST in hosts), or "
            "remove shape, cpu and link"
        )
    try:
        if wanted["link"]:
            free_interface(wanted["server"])
        if wanted["netem"]:
            trial = "unshare --net tc qdisc add dev lo root netem delay 1ms"
            run(trial.split(), "its kernel has no netem: load sch_netem, or remove rtt, jitter and loss")
        if wanted["cpu"] is not None:
            group_roots()
    except RequestError as error:
        return str(error)
    return None


def free_interface(server: str) -> str:
    """Interface towards `server`. Raises RequestError if it is not left to the kernel's defaults,
    because the limits would replace settings that are not ours."""
    failure = "ip and tc (package iproute2) are needed for link"
    routes = json.loads(run(["ip", "-j", "route", "get", server], failure))
    name = str(routes[0].get("dev"))
    if name == "lo":
        raise RequestError("it reaches the server by its own lo, which is not shaped: remove link")
    (found,) = json.loads(run(["ip", "-j", "link", "show", "dev", name], failure))
    if found["mtu"] > 1500:
        raise RequestError(
            f"{name} has an MTU of {found['mtu']}, and a shaped link at most 1500: lower it, or remove "
            "link"
        )
    for qdisc in qdiscs(name):
        if qdisc["handle"] != "0:":  # the kernel's own have no number
            raise RequestError(
                f"{name} has the qdisc {qdisc['kind']} {qdisc['handle']}, which is not the kernel's "
                "default: it stays as it is, so remove it (tc qdisc del), or remove link"
            )
    return name


def qdiscs(interface: str) -> list[dict[str, Any]]:
    shown = run(["tc", "-j", "qdisc", "show", "dev", interface], f"the qdiscs of {interface}")
    return list(json.loads(shown or "[]"))


def group_roots() -> list[Path]:
    """Return the folders in which a control group limits CPU time and counts it, of cgroup v1 or v2.
    Raises RequestError if there are none."""
    roots: dict[str, Path] = {}
    for line in Path("/proc/mounts").read_text().splitlines():
        _, mounted, kind, options = line.split()[:4]
        if kind == "cgroup":
            for name in {"cpu", "cpuacct"} & set(options.split(",")):
                roots.setdefault(name, Path(mounted))
        elif kind == "cgroup2":
            roots.setdefault("", Path(mounted))
    has_v1 = "cpu" in roots
    found = {path for name, path in roots.items() if bool(name) == has_v1}
    if not found or not all(os.access(path, os.W_OK) for path in found):
        raise RequestError("its control groups cannot be changed: mount them, or remove cpu")
    if not has_v1 and "cpu" not in (roots[""] / "cgroup.subtree_control").read_text().split():
        raise RequestError(
            f"its control groups do not limit CPU time: run echo +cpu > {roots['']}/"
            "cgroup.subtree_control there, or remove cpu"
        )
    return sorted(found)


def limit(folder: Path, request: dict[str, Any]) -> list[str]:
    """Note what `lift` has to remove, and make the control groups. Return their folders. The init shapes
    the link itself."""
    wanted, groups = request["shape"], []
    if wanted is not None:
        interface = None
        if wanted["link"]:
            interface = free_interface(wanted["server"])
            with suppress(OSError):  # loaded on demand, it makes two interfaces that nobody removes
                subprocess.run(["modprobe", "ifb", "numifbs=0"], stderr=subprocess.DEVNULL, check=False)
        if wanted["cpu"] is not None:
            name = f"{LABEL}-{folder.parent.name}-{folder.name}"
            groups = [str(root / name) for root in group_roots()]
        noted = {"interface": interface, "ifb": wanted["ifb"], "groups": groups}
        replace(folder / LIMITS, json.dumps(noted))
        for group in map(Path, groups):
            make_group(group, *wanted["cpu"])
    return groups


def make_group(group: Path, quota: int, period: int) -> None:
    """`quota` µs of CPU time per `period` µs. Raises RequestError if the kernel has set something
    else."""
    group.mkdir(exist_ok=True)
    v1 = {"cpu.cfs_period_us": str(period), "cpu.cfs_quota_us": str(quota)}
    for name, text in ({"cpu.max": f"{quota} {period}"} if (group / "cpu.max").exists() else v1).items():
        if (group / name).exists():  # in v1, cpuacct may have a hierarchy of its own
            (group / name).write_text(text)
            found = (group / name).read_text().strip()
            if found != text:
                raise RequestError(f"requested {text} in {group / name}, but the kernel has {found}")


def lift(folder: Path) -> None:
    """Limits that the file LIMITS lists. Qdiscs that somebody else has set stay."""
    try:
        noted = json.loads((folder / LIMITS).read_text())
    except FileNotFoundError:
        return
    name, ifb = noted["interface"], noted["ifb"]
    if name is not None and is_interface(name):
        failure = f"the limits of {name} cannot be removed"
        present = qdiscs(name)
        if is_interface(ifb):
            if any(one["kind"] == "ingress" for one in present):
                run(["tc", "qdisc", "del", "dev", name, "ingress"], failure)
            run(["ip", "link", "del", ifb], failure)
        if any((one["kind"], one["handle"]) == ("tbf", "1:") for one in present):
            run(["tc", "qdisc", "del", "dev", name, "root"], failure)
    for group in map(Path, noted["groups"]):
        remove_group(group)
    remove_file(folder / LIMITS)


def is_interface(name: str) -> bool:
    return any(name == one for _, one in socket.if_nameindex())


def remove_group(group: Path) -> None:
    """Kill all processes of the group first."""
    deadline = time.monotonic() + 5
    while group.is_dir():
        try:
            group.rmdir()
        except OSError as error:  # it has processes, or the kernel has not noticed their end
            if time.monotonic() > deadline:
                raise RequestError(f"{group} cannot be removed: {error}") from None
            for process in (group / "cgroup.procs").read_text().split():
                kill(int(process), signal.SIGKILL)
            time.sleep(0.02)


def await_shaped(folder: Path) -> None:
    """Wait until the init has shaped the link. Raises RequestError if it has ended before."""
    deadline = time.monotonic() + _KEEPER_SECONDS
    while not (folder / SHAPED).exists():
        if (folder / EXIT).exists() or time.monotonic() > deadline:
            lines = "\n".join(last_lines(folder / LOG))
            raise RequestError(f"its link could not be shaped:\n{lines}")
        time.sleep(0.05)


def kill(process: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(process, number)


def remove_old() -> None:
    """Folders of devices that no keeper uses, and that are old: a power cut at the end of a run may
    leave them."""
    for folder in (CACHE / "runs").glob("*/*"):
        if folder.stat().st_mtime < time.time() - OLD_SECONDS and not is_kept(folder):
            with suppress(RequestError):  # `clean` will report it
                remove_folder(folder)


def clean(request: dict[str, Any], source: Any, sink: Any) -> None:
    """Environments, loaded images, and the folders of all devices that no keeper uses."""
    for folder in (CACHE / "runs").glob("*/*"):
        if not is_kept(folder):
            stop(folder)
            remove_folder(folder)
    kept = sorted(str(folder) for folder in (CACHE / "runs").glob("*/*"))
    if not kept:
        for note in (CACHE / "images").glob("*"):
            engine, image = json.loads(note.read_text())
            if is_loaded(engine, image):
                run([engine, "image", "rm", image], f"{engine} cannot remove {image}")
        shutil.rmtree(CACHE, ignore_errors=True)
    answer(sink, {"kept": kept})


if __name__ == "__main__":
    main(sys.stdin.buffer, sys.stdout.buffer)

"""Clusters on this machine for tests: a Dask scheduler with workers, and the daemons of Slurm."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from testbed.host import programs
from tests import forked
from tests.waiting import eventually

DASK = [sys.executable, "-W", "ignore", "-m", "dask"]
SLURM_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun")


@contextmanager
def program(
    command: Sequence[str | Path], log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Context in which a program runs. Its output goes to the file `log`."""
    with log.open("wb") as output:
        running = forked.Popen(
            [*map(str, command)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )
    try:
        yield running
    finally:
        running.terminate()
        try:
            running.wait(20)
        except subprocess.TimeoutExpired:
            running.kill()
            running.wait()


@dataclass
class Dask:
    """A Dask scheduler on this machine."""

    folder: Path
    """Folder of logs."""
    address: str
    """Address of the scheduler, without `tcp://`."""
    programs: ExitStack
    """The running workers."""
    workers: list[subprocess.Popen[bytes]] = field(default_factory=list)
    """All workers that were started."""

    @property
    def on(self) -> str:
        """Value of `--on`."""
        return f"dask://{self.address}"

    def add_worker(
        self,
        prefix: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        options: Sequence[str] = (),
    ) -> subprocess.Popen[bytes]:
        """Start a worker with one core, and wait until it is connected. `prefix`: command before the
        worker's. Without it and `environment`, the worker is forked, and what it starts, too."""
        name = f"worker{len(self.workers)}"
        dask = [*prefix, *DASK] if prefix or environment else programs.command("dask")
        command = [*dask, "worker", f"tcp://{self.address}", "--name", name, "--nthreads", "1"]
        command += ["--no-nanny", "--no-dashboard", "--local-directory", f"{self.folder / name}"]
        log = self.folder / f"{name}.log"
        worker = self.programs.enter_context(program([*command, *options], log, environment))
        self.workers.append(worker)
        eventually(lambda: "Starting established connection" in log.read_text())
        return worker


@contextmanager
def dask(folder: Path) -> Iterator[Dask]:
    """Context with a Dask scheduler that has no workers."""
    found = folder / "scheduler.json"
    command = [*DASK, "scheduler", "--host", "127.0.0.1", "--port", "0", "--no-dashboard"]
    with (
        program([*command, "--scheduler-file", f"{found}"], folder / "scheduler.log"),
        ExitStack() as programs,
    ):
        told = eventually(lambda: found.exists() and json.loads(found.read_text() or "{}"))
        yield Dask(folder, told["address"].removeprefix("tcp://"), programs)


_SLURM_CONF = """
ClusterName=testbed
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
ReturnToService=2
KillWait=3
NodeName={host} NodeAddr=127.0.0.1 CPUs={cores} State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def why_no_dask() -> str | None:
    """Return why Dask cannot run here; None if it can."""
    return None if importlib.util.find_spec("distributed") else "pip install 'edge-fl-testbed[dask]'"


def why_no_slurm() -> str | None:
    """Return why Slurm's daemons cannot run here; None if they can."""
    if importlib.util.find_spec("submitit") is None:
        return "pip install 'edge-fl-testbed[slurm]'"
    if os.geteuid():
        return "its daemons need root"
    missing = [name for name in SLURM_PROGRAMS if shutil.which(name, path=_PATH) is None]
    return f"{missing[0]} is not installed (Debian: slurm-wlm, munge)" if missing else None


_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin"


@contextmanager
def slurm() -> Iterator[dict[str, str]]:
    """Context with Slurm on this machine as its only node. Yields the environment that finds it."""
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))  # short, because sockets have short paths
    try:
        for name in ("state", "spool"):
            (folder / name).mkdir()
        key = folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        config = folder / "slurm.conf"
        host = socket.gethostname().partition(".")[0]
        cores = len(os.sched_getaffinity(0))
        config.write_text(
            _SLURM_CONF.format(host=host, folder=folder, ports=_free_ports(2), cores=cores)
        )
        environment = {"SLURM_CONF": str(config), "PATH": _PATH}
        munge = ["munged", "--foreground", "--force", f"--key-file={key}"]
        munge += [f"--{kind}={folder}/munge.{kind.partition('-')[0]}" for kind in _MUNGE_FILES]
        daemons = [munge, ["slurmctld", "-D", "-i"], ["slurmd", "-D", "-N", host]]
        with ExitStack() as running:
            for command in daemons:
                log = folder / f"{command[0]}.log"
                running.enter_context(program(command, log, environment))
            ready = {**os.environ, **environment}
            eventually(lambda: b" idle " in _output(["sinfo", "--noheader"], ready), 60)
            try:
                yield environment
            finally:
                subprocess.run(["scancel", "--user=root"], env=ready, check=False)
                eventually(lambda: not _output(["squeue", "--noheader"], ready), 60)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def slurm_jobs(states: str = "") -> list[str]:
    """Return the ids of all jobs that have not ended. `states`: states of the jobs, such as `RUNNING`;
    empty for all."""
    chosen = [f"--states={states}"] if states else []
    return _output(["squeue", "--noheader", "--format=%i", *chosen], os.environ).decode().split()


def cancel_slurm_job(job: str) -> None:
    """Cancel a job, as if its node had failed."""
    subprocess.run(["scancel", job], check=True)


_MUNGE_FILES = ("socket", "pid-file", "log-file", "seed-file")


def _output(command: Sequence[str], environment: Mapping[str, str]) -> bytes:
    return subprocess.run(command, env=environment, capture_output=True, check=False).stdout


def _free_ports(count: int) -> list[int]:
    with ExitStack() as sockets:
        opened = [sockets.enter_context(socket.socket()) for _ in range(count)]
        for one in opened:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in opened]

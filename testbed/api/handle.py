"""A run as an object: what it does, how to change it, how to end it (docs/guide/python.md)."""

from __future__ import annotations

import atexit
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from agents import events
from agents.device_actions import Action, Crash, Pause, Restart, Resume, SetCpu, SetLink, to_json
from agents.disk import files
from testbed.api import background
from testbed.api.topology_input import data_root
from testbed.errors import BadInputError, RunFailedError, reading
from testbed.host.signals import uninterrupted
from testbed.rundir import commands
from testbed.rundir.directory import RunDirectory
from testbed.rundir.tail import Follower
from testbed.topology import units

if TYPE_CHECKING:
    import pandas as pd

    from analysis.load import Run as Result
    from analysis.manifest import Verdict
    from testbed.run.replay import Replayed

Devices = str | Iterable[str]
"""Names of devices or of device groups."""
Done = list[dict[str, Any]]
"""Of each device: `device`, `action`, and the action's settings."""
OnEvent = Callable[[events.Record], object]
_TICK_SECONDS = 0.1
_READ_BYTES = 4 * 2**20
"""Of events read at a time."""
_END_SECONDS = 10.0
"""What a callback has to take the last events, once a run is over."""


class RunHandle:
    """A run, live or over, by its directory. As a context manager it is taken down at the end.

    `testbed.up` makes one that is taken down with this process, `testbed.attach` one of a run that goes
    on by itself. All methods may be called from any thread, and none needs an event loop; those that
    wait block the thread that calls them. `TestbedError` is the base of what they raise.
    """

    def __init__(
        self,
        directory: RunDirectory,
        controller: subprocess.Popen[bytes] | None = None,
        on_event: OnEvent | None = None,
    ) -> None:
        """`controller`: its process, where it is ours to end; `on_event`: see `testbed.up`."""
        self._directory = directory
        self._controller = controller
        self._taken_down = False
        self._lock = threading.RLock()
        self._listener = None if on_event is None else _Listener(self, on_event)
        if controller is not None:
            atexit.register(self.down)
        if self._listener is not None:
            self._listener.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.down()

    def __repr__(self) -> str:
        return f"<testbed run {self.id}: {self.outcome or 'running'}>"

    def _repr_html_(self) -> str:
        from testbed.api import notebook

        return notebook.html(self.path)

    @property
    def id(self) -> str:
        """`<topology name>-<date>-<time>-<4 hex digits>`, as the commands take it."""
        return self._directory.run

    @property
    def path(self) -> Path:
        """The run directory (docs/guide/run-directory.md)."""
        return self._directory.path

    @property
    def devices(self) -> tuple[str, ...]:
        """Their names, in the order of the plan; none before that is made."""
        return tuple(self._directory.read_manifest().get("devices", {}))

    @property
    def live(self) -> bool:
        """Whether it goes on."""
        if self._controller is not None:
            return self._controller.poll() is None
        return self._directory.controller() is not None

    @property
    def outcome(self) -> str | None:
        """Why it ended: `after`, `updates` or `target_accuracy`, as the topology's `stop` says, or
        `interrupted`, `failed`, or `crashed`; None while it goes on."""
        live = self.live  # first: it may end in between
        outcome = self._directory.read_manifest().get("outcome")
        return None if live and not outcome else str(outcome or "crashed")

    @property
    def result(self) -> Result:
        """What has been recorded so far, as tables (docs/guide/analysis.md). Raises BadInputError if
        nothing has been recorded yet."""
        from analysis import load

        with reading(self.path):
            return load.load(self.path)

    @property
    def verdict(self) -> Verdict:
        """`valid`, `not valid`, `not judged` (as are all that go on), or `simulated`."""
        from analysis import manifest

        return manifest.verdict(self._directory.read_manifest())

    def events(self) -> Iterator[events.Record]:
        """The records of `events.jsonl`, from the first one on, each as soon as it is written, until
        the run is over. Raises RunFailedError for one that cannot be read."""
        follower = Follower(self._directory.events)
        while True:
            live = self.live  # before reading, so that nothing is missed
            try:
                found = follower.read(_READ_BYTES)
            except ValueError as error:
                raise RunFailedError(str(error)) from error
            yield from found
            if not found and not live:
                return
            if not found:
                time.sleep(_TICK_SECONDS)

    def wait(self, timeout: float | None = None) -> Result:
        """Wait until the run is over; what it came to, as tables.

        An interrupt (Ctrl-C, a notebook's stop button) takes a run of `testbed.up` down. Raises
        TimeoutError after `timeout` seconds, the run then goes on; RunFailedError, with the reason,
        where the run did not end as its topology says and `down` was not called; what `on_event` raised.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            while self.live:
                if deadline is not None and time.monotonic() >= deadline:
                    raise TimeoutError(f"{self.id} goes on after {timeout:g} s")
                if self._listener is not None and self._listener.error is not None:
                    break
                time.sleep(_TICK_SECONDS)
        except KeyboardInterrupt:
            if self._controller is not None:
                self.down()
            raise
        self._finish_listening()
        if self._controller is not None and not self.live:
            with self._lock:
                atexit.unregister(self.down)
                # It has ended: only its pipe is left.
                background.end(self._controller, self._directory)
        if not self._taken_down and (problem := self._problem()) is not None:
            raise problem
        return self.result

    def down(self) -> None:
        """End the run, if it goes on, and remove all that is its own but its directory. Returns when it
        is gone; calling it again does nothing. Raises HostError where something may be left."""
        with self._lock, uninterrupted():
            atexit.unregister(self.down)
            self._taken_down = self._taken_down or self.live
            if self._controller is not None:
                background.end(self._controller, self._directory)
            self._sweep_up()
        self._finish_listening(quietly=True)

    def set(
        self,
        devices: Devices,
        *,
        cpu: float | None = None,
        up: str | None = None,
        down: str | None = None,
        rtt: str | None = None,
        jitter: str | None = None,
        loss: str | float | None = None,
    ) -> Done:
        """Change CPU share (of one host core) or link of devices: `run.set("pi", cpu=0.05, up="1mbit")`.

        Quantities are as in a topology. Raises BadInputError for values and devices that cannot be, and
        where the run is over or in virtual time.
        """
        given = {"up": up, "down": down, "rtt": rtt, "jitter": jitter, "loss": loss}
        return self.act(devices, *changes(cpu, given))

    def kill(self, devices: Devices) -> Done:
        """End devices at once, as a crash does; `restart` starts them again. Raises as `set`."""
        return self.act(devices, Crash())

    def restart(self, devices: Devices) -> Done:
        """Start devices again that were killed or have crashed. Raises as `set`."""
        return self.act(devices, Restart())

    def pause(self, devices: Devices) -> Done:
        """Freeze devices; `resume` lets them continue where they were. Raises as `set`."""
        return self.act(devices, Pause())

    def resume(self, devices: Devices) -> Done:
        """Let paused devices continue. Raises as `set`."""
        return self.act(devices, Resume())

    def show(self, charts: Sequence[str] = ("accuracy", "devices"), *, every: float = 2.0) -> None:
        """Show the run here: in a notebook as a table and charts (names of `analysis.charts.CHARTS`)
        that are kept up to date, `every` so many seconds at most, while this and later cells run; on a
        terminal until it ends, as `testbed watch` does. Raises BadInputError for an unknown chart."""
        from testbed.api import notebook

        if notebook.is_here():
            notebook.show(self, tuple(charts), every)
        else:
            self.watch()

    def watch(self) -> None:
        """Show the run on this terminal until it ends or the user leaves, or see how it ended."""
        from testbed.console import out
        from testbed.watching import watch

        watch.watch(self._directory, out())

    def logs(self, component: str, lines: int = 50) -> str:
        """The last lines that `aggregator`, `broker`, `controller`, a device or each device of a group
        has printed. Raises BadInputError where there is no such log."""
        return "\n".join(self.all_logs(component, lines).values())

    def all_logs(self, component: str | None = None, lines: int = 50) -> dict[str, str]:
        """`logs` of each component of the run, by name, or of `component` alone. Raises as `logs`."""
        from testbed.run import logs

        return dict(logs.read(self._directory, component, lines))

    def story(self, device: str) -> str:
        """What happened to `device`, by the run's records: its models, updates, rejections and absences,
        a line each, in the order of time. Raises BadInputError for a name that is no device."""
        from testbed.run import logs

        return logs.story(self._directory, device)

    def replay(self) -> Replayed:
        """Apply the recorded updates again (docs/guide/run-directory.md): what was found the same.
        Raises RunFailedError where the final model is not, bit for bit; BadInputError for a run that was
        not recorded."""
        from testbed.run import replay

        return replay.replay(self._directory)

    def save_model(self, to: str | Path | None = None, version: int | None = None) -> Path:
        """Write the final model, or the kept one of that `version`, as a state_dict, which PyTorch loads
        without the testbed, to the file `to` (None: `model.pt` in the run directory); its path. Raises
        BadInputError where there is none."""
        import torch

        from testbed.plan import models

        path = self.path / "model.pt" if to is None else Path(to)
        state = models.state_of(self._directory, models.kept(self._directory, version))
        with files.atomic_write(path) as partial, partial.open("wb") as file:
            torch.save(state, file)
        return path

    def evaluate(
        self, *, data: str | Path | None = None, classes: bool = False, devices: int | None = None
    ) -> pd.DataFrame:
        """Evaluate the models that a run which is over has kept, on its test set: `model`, `version`,
        `part`, `name`, `samples`, `loss`, `accuracy`. With `classes` also on each class, with `devices`
        on at most so many training samples of each device. `data` as of `up`. Raises BadInputError."""
        from testbed.run import kept_models

        return kept_models.of_run(self._directory, data_root(data), classes=classes, devices=devices)

    def shell(self, device: str, command: Sequence[str] = ()) -> int:
        """Give the user of this terminal a shell in the container of `device`, or of the only one of the
        group of that name, or run `command` there; its exit code. It has the rights and the limits of
        the device's client, so what is done there affects the run. Raises BadInputError where there is
        no such container, HostError."""
        from testbed.run import shell

        return shell.run(self._directory, device, command)

    def act(self, devices: Devices, *actions: Action) -> Done:
        """Carry out `actions` (`agents.device_actions`) on each of `devices`; what was
        done. Raises as `set`."""
        names = [devices] if isinstance(devices, str) else devices
        expanded = dict.fromkeys(device for name in names for device in self._directory.devices(name))
        sent = [{"device": device, **to_json(action)} for action in actions for device in expanded]
        commands.send(self._directory, *sent)
        return sent

    def _problem(self) -> RunFailedError | None:
        """Why a run that is over did not end as its topology says."""
        outcome = self.outcome
        if outcome not in ("interrupted", "failed", "crashed"):
            return None
        told = self._directory.read_manifest().get("error")
        return RunFailedError(f"{self.id} did not run to its end: {told or outcome}")

    def _sweep_up(self) -> None:
        """Remove what a controller that was killed has left."""
        from testbed.run import live_runs

        if self._controller is None or self._directory.work.is_dir():
            found = [live for live in live_runs.find() if live.run == self.id]
            found = found or live_runs.leftovers(str(self.path), self.path.parent)
            for live in found:
                self._taken_down = True
                live_runs.take_down(live)

    def _finish_listening(self, *, quietly: bool = False) -> None:
        """Wait until the callback has had the last event. Raises what it raised."""
        listener = self._listener
        if listener is None or listener is threading.current_thread():
            return
        listener.join(_END_SECONDS if quietly else None)
        if listener.error is not None and not quietly:
            self._listener = None
            raise listener.error


class _Listener(threading.Thread):
    """Hands each event to `on_event`, until the run is over or that raises."""

    def __init__(self, run: RunHandle, on_event: OnEvent) -> None:
        super().__init__(name=f"events of {run.id}", daemon=True)
        self._run, self._on_event = run, on_event
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            for record in self._run.events():
                self._on_event(record)
        except BaseException as error:  # noqa: BLE001  # `wait` raises it, whatever it is
            self.error = error


def changes(cpu: float | None, link: dict[str, Any], prefix: str = "") -> list[SetCpu | SetLink]:
    """The actions that set what is not None: a share of a core, and quantities of a link as a topology
    has them. Raises BadInputError, where names of settings begin with `prefix`."""
    read: dict[str, Callable[[object], float]] = {
        "up": units.rate,
        "down": units.rate,
        "rtt": units.duration,
        "jitter": units.duration,
        "loss": units.share_as_typed,
    }
    found: dict[str, float | None] = {}
    for name, value in link.items():
        if value is not None:
            try:
                found[name] = read[name](value)
            except ValueError as error:
                raise BadInputError(f"{prefix}{name} {value}: {error}") from error
    if cpu is None and not found:
        *some, last = (prefix + name for name in ("cpu", *read))
        raise BadInputError(f"nothing to set: give {', '.join(some)} or {last}")
    if cpu is not None and not cpu > 0:
        raise BadInputError(
            f"{prefix}cpu {cpu:g}: expected a positive share of one host core such as 0.25"
        )
    return [*([] if cpu is None else [SetCpu(cpu)]), *([SetLink(found)] if found else [])]

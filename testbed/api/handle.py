"""Handle of a run: observe it, change its devices, end it (docs/guide/python.md)."""

from __future__ import annotations

import atexit
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from agents import events
from agents.device_actions import (
    Action,
    Crash,
    Disconnect,
    Pause,
    Reconnect,
    Restart,
    Resume,
    SetBackground,
    SetCpu,
    SetLink,
    to_json,
)
from agents.disk import files
from agents.energy.messages import Charge, SetBattery, Unplug
from testbed.api import launching
from testbed.api.topology_input import data_root
from testbed.errors import BadInputError, RunFailedError, reading_run
from testbed.host.processes import uninterrupted
from testbed.rundir import live_files
from testbed.rundir.directory import RunDirectory
from testbed.rundir.live_files import RecordFollower
from testbed.topology import units

if TYPE_CHECKING:
    import pandas as pd

    from analysis.load import Run as Result
    from analysis.manifest import Verdict
    from testbed.run.replay import ReplayResult

Devices = str | Iterable[str]
Done = list[dict[str, Any]]
"""One mapping per device and action: `device`, `action`, and the settings of the action."""
OnEvent = Callable[[events.Record], object]
_TICK_SECONDS = 0.1
_READ_BYTES = 4 * 2**20
"""Bytes of `events.jsonl` per read, approximately."""
_END_SECONDS = 10.0
"""Seconds that `down` waits until `on_event` has received the last events."""


@dataclass(frozen=True, slots=True)
class EvaluationRow:
    """Evaluation of a kept model on the test set, on one class of the test set, or on samples of one
    device."""

    model: str
    """File name of the model, without its suffix."""
    version: int
    """Version of the global model."""
    part: Literal["test set", "class", "device"]
    name: str
    """Name of the class or device."""
    samples: int
    """Number of samples."""
    loss: float
    """Mean loss; NaN if it is not finite."""
    accuracy: float
    """Accuracy, 0 to 1; NaN if the task has no accuracy."""
    perplexity: float | None = None
    """Perplexity; None if the task has no perplexity."""


class RunHandle:
    """Handle of a run, live or finished. At the end of a `with` block, the run is taken down.

    When this process ends, a run from `testbed.up` is taken down, unless it was started with `detach`. A
    run from `testbed.attach` continues. All methods are thread-safe and need no event loop. Methods that
    wait block the calling thread. All errors derive from `TestbedError`.

    Methods that change devices take names of devices or groups, and return the actions that were sent.
    They raise BadInputError if a name is unknown, or if the run is over or in virtual time.
    """

    def __init__(
        self,
        directory: RunDirectory,
        controller: subprocess.Popen[bytes] | None = None,
        on_event: OnEvent | None = None,
    ) -> None:
        """`controller`: process of the run's controller, if the run has to end when the calling process
        ends; None if the run continues without the calling process. `on_event`: callback for each record
        of the run, called in a separate thread; None for no callback.
        """
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
        """Run id, as the commands expect it: `<topology name>-<date>-<time>-<4 hex digits>`."""
        return self._directory.run

    @property
    def path(self) -> Path:
        """Run directory (docs/guide/run-directory.md)."""
        return self._directory.path

    @property
    def devices(self) -> tuple[str, ...]:
        """Names of the devices in the order of the plan; empty until the run is planned."""
        return tuple(self._directory.read_manifest().get("devices", {}))

    @property
    def live(self) -> bool:
        """Whether the run's controller is still running."""
        if self._controller is not None:
            return self._controller.poll() is None
        return self._directory.controller() is not None

    @property
    def outcome(self) -> str | None:
        """Reason why the run ended: the condition of the topology's `stop` (`after`, `updates` or
        `target_accuracy`), or `diverged`, `interrupted`, `failed` or `crashed`; None while the run is
        running."""
        live = self.live  # read first: the run may end in between
        outcome = self._directory.read_manifest().get("outcome")
        return None if live and not outcome else str(outcome or "crashed")

    @property
    def result(self) -> Result:
        """Tables of everything recorded so far (docs/guide/analysis.md). Raises BadInputError if nothing
        has been recorded yet."""
        from analysis import load

        with reading_run(self.path):
            return load.load(self.path)

    @property
    def verdict(self) -> Verdict:
        """`valid`, `not valid`, `not judged` (also while the run is running), or `simulated`."""
        from analysis import manifest

        return manifest.verdict(self._directory.read_manifest())

    def events(self) -> Iterator[events.Record]:
        """Yield all records of `events.jsonl` from the first one, each as soon as it is written, until
        the run is over. Raises RunFailedError if a record cannot be read."""
        follower = RecordFollower(self._directory.events)
        while True:
            live = self.live  # before reading, so that no record is missed
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
        """Wait until the run is over; return its tables.

        An interrupt (Ctrl-C, a notebook's stop button) takes down a run that was started by `testbed.up`
        without `detach`. `timeout`: maximum number of seconds to wait; None for no limit. Raises
        TimeoutError after that time. The run then continues. Raises RunFailedError with the reason if
        the run did not end as its topology says and `down` was not called. Raises any exception that
        `on_event` raised.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            while self.live:
                if deadline is not None and time.monotonic() >= deadline:
                    raise TimeoutError(f"{self.id} is still running after {timeout:g} s")
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
                # The process has ended: this closes its pipe.
                launching.end_run(self._controller, self._directory)
        if not self._taken_down and (problem := self._problem()) is not None:
            raise problem
        return self.result

    def down(self) -> None:
        """End the run if it is running, and remove everything that the run started, except the run
        directory. Returns when this is done. Further calls do nothing. Raises HostError if a container,
        network or process may remain."""
        with self._lock, uninterrupted():
            atexit.unregister(self.down)
            self._taken_down = self._taken_down or self.live
            if self._controller is not None:
                launching.end_run(self._controller, self._directory)
            self._sweep_up()
        self._finish_listening(quietly=True)

    def set(
        self,
        devices: Devices,
        *,
        cpu: str | float | None = None,
        up: str | None = None,
        down: str | None = None,
        rtt: str | None = None,
        jitter: str | None = None,
        loss: str | float | None = None,
        battery: str | float | None = None,
        background: bool | None = None,
    ) -> Done:
        """Change the CPU share, the link or the level of the battery of devices:
        `run.set("pi", cpu=0.05, up="1mbit")`. Or change the link or the background traffic of a segment:
        `run.set("cell-3", down="2mbit", background=False)`.

        `cpu` is a share of one host core, `battery` a share of the battery's capacity. All values are
        written as in a topology. A setting that is None does not change. Raises BadInputError if a value
        is invalid, or a device has no battery.
        """
        given = {"up": up, "down": down, "rtt": rtt, "jitter": jitter, "loss": loss}
        return self.act(devices, *changes(cpu, given, battery, background=background))

    def charge(self, devices: Devices, watts: str | float | None = None) -> Done:
        """Plug in a charger with a constant power of `watts` (a number of watts, or a text such as
        `10W`), or the devices' own chargers if `watts` is None. Raises BadInputError if the power is
        invalid, or a device has no battery or no charger.
        """
        return self.act(devices, charger(watts))

    def unplug(self, devices: Devices) -> Done:
        """Unplug the chargers of devices. Raises BadInputError if a device has no battery."""
        return self.act(devices, Unplug())

    def kill(self, devices: Devices) -> Done:
        """Kill devices without a clean shutdown, as a crash would. `restart` starts them again."""
        return self.act(devices, Crash())

    def restart(self, devices: Devices) -> Done:
        """Restart devices that were killed or have crashed."""
        return self.act(devices, Restart())

    def pause(self, devices: Devices) -> Done:
        """Freeze devices; `resume` lets them continue where they stopped."""
        return self.act(devices, Pause())

    def resume(self, devices: Devices) -> Done:
        """Let paused devices continue."""
        return self.act(devices, Resume())

    def disconnect(self, devices: Devices) -> Done:
        """Cut off devices or segments: no packet passes until `reconnect`, and processes continue."""
        return self.act(devices, Disconnect())

    def reconnect(self, devices: Devices) -> Done:
        """Let packets of devices or segments pass again."""
        return self.act(devices, Reconnect())

    def show(self, charts: Sequence[str] = ("accuracy", "devices"), *, every: float = 2.0) -> None:
        """Show the run in a notebook or on a terminal.

        In a notebook, this shows a table and `charts` (names in `analysis.charts.CHARTS`). They are
        updated at most once per `every` seconds while this cell and later cells run. On a terminal, this
        shows the same as `testbed watch` until the run ends. Raises BadInputError for an unknown chart.
        """
        from testbed.api import notebook

        if notebook.is_notebook():
            notebook.show(self, tuple(charts), every)
        else:
            self.watch()

    def watch(self) -> None:
        """Show the run on this terminal until the run ends or the user leaves. If the run is over, show
        how it ended."""
        from testbed.console import out
        from testbed.watching import fullscreen

        fullscreen.watch(self._directory, out())

    def logs(self, component: str, lines: int = 50) -> str:
        """Return the last `lines` lines of the log of `component`: `aggregator`, `broker`, `controller`,
        a device, or a group (each of its devices). Raises BadInputError if there is no such log."""
        return "\n".join(self.all_logs(component, lines).values())

    def all_logs(self, component: str | None = None, lines: int = 50) -> dict[str, str]:
        """Return the last `lines` lines of logs: component -> lines. `component`: component to read;
        None for all components. Raises BadInputError if there is no such log."""
        from testbed.run import live_runs

        return dict(live_runs.read_logs(self._directory, component, lines))

    def story(self, device: str) -> str:
        """Return the history of `device` according to the records: models, updates, rejections and
        absences. The text has one line per event, in chronological order. Raises BadInputError for an
        unknown device."""
        from testbed.run import live_runs

        return live_runs.read_story(self._directory, device)

    def replay(self) -> ReplayResult:
        """Repeat the aggregation of the recorded updates, and compare the results with the results of
        the run (docs/guide/run-directory.md). Return a summary of the comparison. Raises RunFailedError
        if the final model is not bit-identical, and BadInputError if the run was not recorded."""
        from testbed.run import replay

        return replay.replay(self._directory)

    def save_model(self, to: str | Path | None = None, version: int | None = None) -> Path:
        """Write a model to a file as a PyTorch state_dict; return the file's path. PyTorch can load the
        file without the testbed.

        `to`: file to write; None for `model.pt` in the run directory. `version`: version of a kept
        intermediate model; None for the final model. Raises BadInputError if there is no such model.
        """
        import torch

        from testbed.plan import models

        path = self.path / "model.pt" if to is None else Path(to)
        state = models.saved_state(self._directory, models.saved_model(self._directory, version))
        with files.atomic_write(path) as partial, partial.open("wb") as file:
            torch.save(state, file)
        return path

    def evaluate(
        self, *, data: str | Path | None = None, classes: bool = False, devices: int | None = None
    ) -> pd.DataFrame:
        """Evaluate all kept models of a finished run on its test set.

        `classes`: whether to evaluate on each class, too. `devices`: maximum number of training samples
        per device, for an evaluation on the training data of each device, too; None for no evaluation on
        training data. `data`: folder with datasets as parquet files; None for the folder that
        TESTBED_DATA names, or for the hub if TESTBED_DATA is not set. Returns one row per model and part
        of the data, with the columns of `EvaluationRow`. Raises BadInputError.
        """
        from testbed.run import saved_models

        return saved_models.evaluate_saved_models(
            self._directory, data_root(data), classes=classes, devices=devices
        )

    def shell(self, device: str, command: Sequence[str] = ()) -> int:
        """Open a shell in the container of `device` on this terminal, or run `command` there; return its
        exit code.

        `device`: name of a device, or of a group with a single device. The shell has the rights and
        limits of the device's client, so it affects the run. Raises HostError. Raises BadInputError if
        there is no such container.
        """
        from testbed.run import shell

        return shell.run(self._directory, device, command)

    def act(self, devices: Devices, *actions: Action) -> Done:
        """Carry out `actions` (`agents.device_actions`) on each of `devices`."""
        names = [devices] if isinstance(devices, str) else devices
        expanded = dict.fromkeys(device for name in names for device in self._directory.targets(name))
        sent = [{"device": device, **to_json(action)} for action in actions for device in expanded]
        live_files.send_command(self._directory, *sent)
        return sent

    def _problem(self) -> RunFailedError | None:
        outcome = self.outcome
        if outcome not in ("interrupted", "failed", "crashed"):
            return None
        told = self._directory.read_manifest().get("error")
        return RunFailedError(f"{self.id} did not run to its end: {told or outcome}")

    def _sweep_up(self) -> None:
        from testbed.run import live_runs

        if self._controller is None or self._directory.work.is_dir():
            found = [live for live in live_runs.find_live_runs() if live.run == self.id]
            found = found or live_runs.leftovers(str(self.path), self.path.parent)
            for live in found:
                self._taken_down = True
                live_runs.take_down(live)

    def _finish_listening(self, *, quietly: bool = False) -> None:
        """Raise the exception that `on_event` raised. With `quietly`, wait at most `_END_SECONDS`, and
        raise nothing."""
        listener = self._listener
        if listener is None or listener is threading.current_thread():
            return
        listener.join(_END_SECONDS if quietly else None)
        if listener.error is not None and not quietly:
            self._listener = None
            raise listener.error


class _Listener(threading.Thread):
    """Runs until the run is over or `on_event` raises."""

    def __init__(self, run: RunHandle, on_event: OnEvent) -> None:
        super().__init__(name=f"events of {run.id}", daemon=True)
        self._run, self._on_event = run, on_event
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            for record in self._run.events():
                self._on_event(record)
        except BaseException as error:  # noqa: BLE001  # `wait` raises it
            self.error = error


def charger(watts: str | float | None) -> Charge:
    """`watts`: a number of watts, or a text such as `10W`; None for the device's own charger. Raises
    BadInputError."""
    if watts is None:
        return Charge()
    try:
        return Charge(units.power(watts if isinstance(watts, str) else f"{watts:.12g}W"))
    except ValueError as error:
        raise BadInputError(f"watts {watts}: {error}") from error


def changes(
    cpu: str | float | None,
    link: dict[str, Any],
    battery: str | float | None = None,
    *,
    background: bool | None = None,
    prefix: str = "",
) -> list[SetCpu | SetLink | SetBattery | SetBackground]:
    """Return the actions that change the CPU share to `cpu` (share of one host core), the link to the
    values in `link`, and the level of the battery to `battery` (all in the notation of a topology), and
    switch the background traffic of segments. Settings that are None do not change.

    Raises BadInputError. The error's message has `prefix` before the names of settings.
    """
    read: dict[str, Callable[[object], float]] = {
        "up": units.rate,
        "down": units.rate,
        "rtt": units.duration,
        "jitter": units.duration,
        "loss": units.share_as_typed,
    }
    read_others: dict[str, Callable[[object], float]] = {
        "cpu": units.cpu_as_typed,
        "battery": units.share_as_typed,
    }
    found: dict[str, float | None] = {}
    for name, value in {**link, "cpu": cpu, "battery": battery}.items():
        if value is not None:
            try:
                found[name] = (read | read_others)[name](value)
            except ValueError as error:
                raise BadInputError(f"{prefix}{name} {value}: {error}") from error
    if not found and background is None:
        *some, last = (prefix + name for name in ("cpu", *read, "battery"))
        raise BadInputError(f"nothing to set: give {', '.join(some)} or {last}")
    share, level = found.pop("cpu", None), found.pop("battery", None)
    return [
        *([] if share is None else [SetCpu(share)]),
        *([SetLink(found)] if found else []),
        *([] if level is None else [SetBattery(level)]),
        *([] if background is None else [SetBackground(background)]),
    ]

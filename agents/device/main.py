"""The init process of a device: prepares the machine, then starts and ends the client as ordered.

    python -m agents.device.main CONFIG

In a container, the init is PID 1. It shapes the link, then runs the client without privileges. It has
NET_ADMIN only in the network namespace of its container, which is removed with the container. The client
runs as an ordinary user without capabilities. The init receives orders and sends telemetry through a
Unix socket of the broker, so that monitoring does not load the emulated link. The client has no access
to this socket. The init fails closed: it starts no client unless the link is as requested.

On a real device, the init shapes nothing unless that is requested (`agents.device.real_machine`). It
reaches the broker over the device's own network.
"""

from __future__ import annotations

import ctypes
import math
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import FrameType

from typing_extensions import assert_never

from agents import config, features
from agents import device_actions as actions
from agents.config import BEGUN, AccessLink, DeviceConfig
from agents.device import bound, control_group, link, turns
from agents.device.features import make_halves
from agents.device.machine import DeviceContainer, DeviceMachine
from agents.device.part import ClientHost, CounterReading
from agents.device.real_machine import RealMachine
from agents.disk import files
from agents.disturbances import STANDSTILL_SECONDS, Ongoing
from agents.fields import FeatureAction
from agents.mqtt import topics, transport
from agents.mqtt.transport import Connection, ConnectionFailedError, ReceivedMessage
from agents.timing.clock import DeviceClock
from agents.timing.nanoseconds import from_seconds, to_seconds
from agents.wire import messages
from agents.wire.messages import (
    CgroupLimits,
    DeviceOrder,
    LimitsRequest,
    MeasureOrder,
    MessageError,
    RemoteAction,
)

_NO_NEW_PRIVILEGES = 38
"""PR_SET_NO_NEW_PRIVS. This process sets it, because not every engine can."""


def main() -> None:
    cfg = config.load(DeviceConfig, Path(sys.argv[1]))
    if cfg.user is None and os.getpid() == 1:  # in a container on a real device
        bound.end_with_input()
    ctypes.CDLL(None).prctl(
        _NO_NEW_PRIVILEGES, 1, 0, 0, 0
    )  # child processes cannot gain privileges either
    try:
        sys.exit(Init(cfg).run())
    except (link.LinkError, ConnectionFailedError, OSError) as error:
        sys.exit(f"device {cfg.device}: {error}")


class Init(ClientHost):
    """The init process: keeps one client in the state that the controller orders."""

    def __init__(self, cfg: DeviceConfig) -> None:
        self._config = cfg
        self.device = cfg.device
        self._clock = DeviceClock(1.0, cfg.clock)
        self._machine: DeviceMachine = (
            RealMachine(cfg.device, netem=cfg.netem, is_limited=cfg.cpu is not None)
            if cfg.user is None
            else DeviceContainer(cfg.device, netem=cfg.netem, user=cfg.user)
        )
        self._suspected: dict[str, float] = {}
        """Monotonic time at which each present disturbance was first seen, by reason."""
        self._disturbances = Ongoing()
        self._limits: CgroupLimits | None = None
        """Limits that were sent to the controller last."""
        self._client: subprocess.Popen[bytes] | None = None
        self._wanted = cfg.present
        """A client should run. If the previous one is still ending, the next starts after it."""
        self._ending = False
        """The client was ordered to end, so that its exit does not end the container."""
        self._paused = cfg.paused
        self._features = make_halves(cfg, self)
        self._look_due = -math.inf if self._features else math.inf
        """Monotonic time at which the features look at the device next."""
        self._powered = True
        """A client may run. After a power-off, the controller orders the next start, because it first
        has to lift the CPU limit."""
        self._memory_lost = False
        """A power-off has erased the client's files, which are deleted before the next start."""
        self._stopped = False
        self._memory_kills = 0
        """Processes killed for their memory that were reported, or belonged to a client that an order
        has ended."""
        self._unmeasured = False
        self._probing: threading.Thread | None = None
        """Measures the link."""
        self._orders: queue.SimpleQueue[ReceivedMessage | None] = queue.SimpleQueue()
        """None stands for the end of a child process or the arrival of SIGTERM or SIGINT."""
        self._topics = topics.Topics(cfg.run)
        control = self._topics.control(cfg.device)
        # Over a real network, a broken connection must not lose orders.
        self._connection = Connection(
            cfg.broker, [control], self._orders.put, keeps_session=cfg.user is None
        )
        self._refusals = messages.Refusals(self._fail)
        signal.signal(signal.SIGTERM, self._stop)
        signal.signal(signal.SIGINT, self._stop)
        signal.signal(signal.SIGCHLD, self._wake)

    def run(self) -> int:
        """Carry out orders until the client exits without an order to end, or until SIGTERM or SIGINT.
        Return the client's exit code (128 + n if signal n ended it; 0 if none runs), or 1 if the link
        could not be measured. Raises LinkError, ConnectionFailedError, OSError."""
        self._machine.prepare(self._config.link)
        # Wait until the devices are isolated from each other and the router, if any, forwards to the
        # broker, or until the clock of a real device is compared. There is no timeout, because the
        # launch of a large fleet may take long.
        while not Path(self._config.isolated).exists():
            if self._stopped:
                return 0
            time.sleep(0.1)
        for path, digest in self._config.hashes.items():
            if files.sha256(Path(path)) != digest:
                raise OSError(f"{path} differs from the file that was sent (SHA-256 mismatch)")
        turn = self._take_turn()
        if self._stopped:
            return 0
        self._start_wanted(turn)
        self._connection.open(self._config.timeout_s)
        if self._config.probed is not None:
            self._start_probe(self._config.probed)
        try:
            code = self._serve()
            self._look()
            self._sample_features()
            return 1 if self._unmeasured else code
        finally:
            self._connection.close()
            self._machine.close()

    def _take_turn(self) -> int | None:
        """Return the descriptor of the turn; None if the client starts without one, or later."""
        cfg = self._config
        if cfg.turns is None or not self._wanted or self._paused:
            return None
        # Half of the time to start: then the clients behind one that hangs can still become ready.
        return turns.take(Path(cfg.turns), cfg.timeout_s / 2, lambda: self._stopped)

    def _start_probe(self, requested: AccessLink) -> None:
        """Unless the link is being measured."""
        if self._probing is None or not self._probing.is_alive():
            self._probing = threading.Thread(target=self._probe, args=(requested,), daemon=True)
            self._probing.start()

    def _probe(self, requested: AccessLink) -> None:
        """Measure the link beside the client, and publish the result. End the device if that fails."""
        # Imported here, because devices without a link do not need it.
        from agents.device import link_measurement

        try:
            cfg = self._config
            found = link_measurement.measure(requested, cfg.data_address, cfg.timeout_s)
        except Exception as error:  # noqa: BLE001  # fail closed, in a thread: end the device
            self._log(f"the link cannot be measured: {error}")
            self._unmeasured = True
            os.kill(os.getpid(), signal.SIGTERM)
        else:  # retained, because the start barrier waits for it and may subscribe later
            result = messages.LinkProbe(cfg.device, self.now(), found)
            telemetry = self._topics.telemetry(cfg.device)
            self._connection.publish(telemetry, messages.encode(result), retain=True)

    def now(self) -> float:
        return to_seconds(self._clock.now())

    def _sample(self) -> None:
        """Publish a sample, with limits and disturbances that have not been published yet."""
        device, client = self._config.device, self._client.pid if self._client else None
        sample = self._machine.sample(client, self.now)
        self._connection.publish_lossy(self._topics.telemetry(device), messages.encode(sample))
        self._sample_features()
        if (limits := self._machine.limits()) != self._limits:
            self._send_limits(limits)
        if self._client is not None and self._client.poll() is None:  # else `_exit_code` reports it
            self._report_memory_kills("a process that its client had started was killed, because they")
        present = self._present_disturbances(time.monotonic())
        for reason, since, is_over in self._disturbances.update(present):
            self._report(reason, since, is_over=is_over)

    def _sample_features(self) -> None:
        for feature in self._features:
            feature.sample()

    def _present_disturbances(self, now: float) -> dict[str, float]:
        """When each began, by its reason."""
        name, client = self._config.device, self._client
        seen = {
            f"the client of {name} was stopped by a signal": client is not None
            and not self._paused
            and control_group.is_stopped(client.pid),
            **self._machine.faults(),
        }
        self._suspected = {
            reason: self._suspected.get(reason, now) for reason, holds in seen.items() if holds
        }
        found = {why: at for why, at in self._suspected.items() if now - at >= STANDSTILL_SECONDS}
        found |= self._machine.lasting_faults(now)
        return found

    def _report(self, reason: str, since: float, *, is_over: bool = True) -> None:
        """An unplanned disturbance, which began at `since` on this host's monotonic clock."""
        device = self._config.device
        begin = to_seconds(self._clock.at(from_seconds(since)))
        found = messages.Disturbance(device, self.now(), begin, reason, is_over)
        self._connection.publish(self._topics.telemetry(device), messages.encode(found))

    def _send_limits(self, limits: CgroupLimits | None) -> None:
        """Publish the limits that the kernel enforces, which may differ from the requested ones. Do
        nothing if they are None."""
        self._limits = limits
        if limits is not None:
            device = self._config.device
            found = messages.LimitsRead(device, self.now(), limits)
            self._connection.publish(self._topics.telemetry(device), messages.encode(found))

    def _serve(self) -> int:
        """Handle orders and publish samples until the client has ended; return the container's exit
        code. Sleep in between, because this work uses the device's CPU share."""
        due = time.monotonic()
        while (code := self._exit_code()) is None:
            now, wake = time.monotonic(), min(due, self._machine.reading_due, self._look_due)
            if now >= wake:
                if now >= min(due, self._machine.reading_due):
                    self._machine.read_queues()
                if now >= min(due, self._look_due):
                    self._look()
                if now >= due:
                    self._sample()
                    # Missed samples are skipped, not published later.
                    due = max(due + self._config.telemetry_every, time.monotonic())
                continue
            try:
                self._carry_out(transport.take(self._orders, wake - now))
            except queue.Empty:
                if time.monotonic() >= wake + STANDSTILL_SECONDS:
                    self._report(f"{self._machine.title} stood still", now)
                continue
            _reap_orphans(self._client.pid if self._client else None)
        return code

    def _look(self) -> None:
        self._look_due = time.monotonic() + min((one.look() for one in self._features), default=math.inf)

    def counters(self) -> CounterReading:
        received, sent = control_group.traffic()
        cpu = self._machine.cpu_seconds() or 0.0
        return CounterReading(self._clock.now(), from_seconds(cpu), sent, received)

    def publish(self, message: features.Telemetry, *, is_lossy: bool = False) -> None:
        send = self._connection.publish_lossy if is_lossy else self._connection.publish
        send(self._topics.telemetry(self.device), messages.encode(message))

    @property
    def is_starting(self) -> bool:
        """The engine does not limit the CPU until the client is ready."""
        return self._client is not None and not self._ending and self._machine.cores() is None

    def power_off(self, *, loses_memory: bool) -> None:
        self._powered = False
        self._memory_lost = self._memory_lost or loses_memory
        if self._client is not None:
            self._ending = True
            self._signal(signal.SIGKILL)

    def _exit_code(self) -> int | None:
        """Exit code of the container; None while a client runs or may still be started. Starts the next
        client if the previous one was ordered to end."""
        if self._client is None or (code := self._client.poll()) is None:
            return 0 if self._stopped and self._client is None else None
        if self._ending and not self._stopped:
            self._client = None
            self._start_wanted()
            return None
        if code == -signal.SIGKILL:
            self._report_memory_kills("its client was killed, because it")
        return int(code) if code >= 0 else 128 - code

    def _report_memory_kills(self, what: str) -> None:
        """If the kernel has killed a process for its memory since the last call. `what`: begin of a
        sentence such as `... needed more than the device's 400 MiB`."""
        before, (self._memory_kills, limit) = self._memory_kills, self._machine.memory_kills()
        if self._memory_kills > before:
            self._fail(
                f"out of memory: {what} needed more than the device's {limit / 2**20:.0f} MiB: raise "
                "memory in the topology, or lower batch_size"
            )

    def _carry_out(self, message: ReceivedMessage | None) -> None:
        """If the order is invalid or fails, report this and leave the device unchanged."""
        if message is None:
            return
        try:
            match messages.decode(self._topics, message.topic, message.payload):
                case DeviceOrder(_, action):
                    self._do(action)
                case LimitsRequest():
                    self._send_limits(self._machine.limits())
                case MeasureOrder() if self._config.probed is not None:
                    self._start_probe(self._config.probed)
                case order if any(feature.obey(order) for feature in self._features):
                    self._look()
                case _:
                    raise MessageError("expected an order")
        except MessageError as error:
            self._refusals.add(message.topic, error)
        except (link.LinkError, OSError) as error:
            self._fail(str(error))

    def _log(self, message: str) -> None:
        sys.stderr.write(f"device {self._config.device}: {message}\n")

    def _fail(self, reason: str) -> None:
        """Log `reason`, and publish it as a failure of the device."""
        self._log(reason)
        device = self._config.device
        failure = messages.Failure(device, reason)
        self._connection.publish(self._topics.failure(device), messages.encode(failure))

    def _do(self, action: RemoteAction) -> None:
        match action:
            case actions.Restart():
                self._restart()
            case actions.Join():  # ends earlier pauses and disconnections
                self._set_present(is_present=True)
                self._resume()
                self._machine.plug(up=True)
                self._restart()
            case actions.Crash():
                self._end(signal.SIGKILL)
            case actions.Leave():
                self._set_present(is_present=False)
                self._paused = False
                self._end(signal.SIGTERM, signal.SIGCONT)
            case actions.Pause():
                self._paused = True
                if not self._ending:  # a stopped process would never end
                    self._signal(signal.SIGSTOP)
            case actions.Resume():
                self._resume()
            case actions.SetLink(changes):
                self._machine.shape(changes)
            case actions.Disconnect():
                self._machine.plug(up=False)
            case actions.Reconnect():
                self._machine.plug(up=True)
            case actions.PowerOn():
                # Ignored if the power has gone again since the controller has sent the order.
                if all(feature.allows_client for feature in self._features):
                    self._powered = True
                    self._start_wanted()
            case actions.SetBackground():
                self._fail("a device has no background traffic of its own")
            case actions.PowerOff():
                self._fail("a power-off follows from the device's state, and cannot be ordered")
            case FeatureAction():
                if any(feature.act(action) for feature in self._features):
                    self._look()
                else:
                    self._fail(f"the device has nothing to which {action} applies")
            case _:
                assert_never(action)

    def _set_present(self, *, is_present: bool) -> None:
        for feature in self._features:
            feature.set_present(is_present=is_present)
        self._look()

    def _restart(self) -> None:
        self._wanted = True
        self._start_wanted()

    def _start_wanted(self, turn: int | None = None) -> None:
        """If the client should run, has power, and does not run yet. `turn`: descriptor of its turn,
        which it inherits; closed in this process."""
        inherited = () if turn is None else (turn,)
        if self._wanted and self._powered and self._client is None:
            self._start(inherited)
        for descriptor in inherited:
            os.close(descriptor)

    def _resume(self) -> None:
        self._paused = False
        self._signal(signal.SIGCONT)

    def _end(self, *signals: signal.Signals) -> None:
        self._wanted, self._ending = False, True
        self._signal(*signals)

    def _start(self, inherited: tuple[int, ...] = ()) -> None:
        self._ending = False
        if self._memory_lost:
            self._memory_lost = False
            self._erase_memory()
        command = [sys.executable, "-m", "agents.client.main", self._config.client_config]
        self._client = self._machine.start([*command, *map(str, inherited)], inherited)
        if self._paused:  # paused while no client was running
            self._signal(signal.SIGSTOP)

    def _erase_memory(self) -> None:
        """Delete the client's files, with its rights, but for the count of its trainings, which belongs
        to the emulation."""
        everything_else = ["-mindepth", "1", "!", "-name", BEGUN, "-delete"]
        self._machine.start(["find", self._config.disk, *everything_else]).wait()

    def _stop(self, _number: int, _frame: FrameType | None) -> None:
        self._stopped = True
        self._signal(signal.SIGTERM, signal.SIGCONT)
        self._orders.put(None)

    def _wake(self, _number: int, _frame: FrameType | None) -> None:
        self._orders.put(None)  # reentrant: safe during a get

    def _signal(self, *numbers: int) -> None:
        if self._client is not None:
            for number in numbers:
                self._client.send_signal(number)


def _reap_orphans(client: int | None) -> None:
    """Orphans of the container are children of PID 1. `client` is not reaped here, because Popen waits
    for it."""
    while True:
        try:
            status = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if status is None or status.si_pid == client:
            return
        os.waitpid(status.si_pid, 0)


if __name__ == "__main__":
    main()

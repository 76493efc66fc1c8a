"""Inputs and actions of the controller's core, and which input it accepts in which phase of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from enum import IntEnum
from typing import Any, get_args

from msgspec import Struct

from agents import events, features
from agents.device_actions import DeviceAction
from agents.wire import messages
from agents.wire.messages import AddressedOrder
from testbed.fidelity.figures import Fidelity
from testbed.fidelity.host_load import OtherWork
from testbed.rundir.live_files import Samples
from testbed.segments.measured import SegmentFidelity


class ControllerPhase(IntEnum):
    """The value of a phase is its column in `REACTIONS`."""

    LAUNCHING = 0
    """The runtime starts all processes or containers."""
    WAITING = 1
    """At the start barrier, also again after each repetition of a measurement."""
    CHECKING = 2
    """Links were measured; their figures are read."""
    PAUSED = 3
    """Before links that were measured wrong are measured again."""
    STARTING = 4
    """The aggregator is ordered to start the run clock."""
    RUNNING = 5
    ENDED = 6
    """The aggregator has recorded the end of the run, and all processes are about to end."""
    INTERRUPTED = 7
    """The user has interrupted the run: only the aggregator's last records are read."""

    def __str__(self) -> str:
        return self.name.lower()


class Publish(Struct, frozen=True):
    topic: str
    payload: bytes


class Show(Struct, frozen=True):
    """A line on the progress, for the user."""

    text: str


class WriteSample(Struct, frozen=True):
    """A line of `telemetry.jsonl`."""

    line: str


# Actions that the shell answers with `ActionDone`.


class Act(Struct, frozen=True):
    """Carry out the runtime's part of an action. If a user's command fails, the shell tells the user."""

    device: str
    action: DeviceAction
    source: messages.Source | None
    """None if the aggregator has recorded the action already."""
    due: float | None = None
    """Device time in seconds at which the scenario has the action."""
    at: float | None = None
    """Device time in seconds that is recorded; None for the time at which it is done."""


class ApplyLimit(Struct, frozen=True):
    device: str


class Obey(Struct, frozen=True):
    """Have the runtime's meter do its part of the order of a feature."""

    order: features.InitOrder


class StartAgain(Struct, frozen=True):
    """`component`: broker or aggregator, which ended with the exit code `code`."""

    component: str
    code: int


class MeasureAgain(Struct, frozen=True):
    """Measure the links of `devices`."""

    devices: Sequence[str]


class BeginRun(Struct, frozen=True):
    """Everything is ready for the start of the run clock. `doubt`: sentence on links that deviate more
    than a valid run allows."""

    doubt: str | None


# Actions that the shell answers with other inputs, or that end the run.


class ReadLinks(Struct, frozen=True):
    """`is_first`: pass the records so far before."""

    is_first: bool


class ReadLastRecords(Struct, frozen=True):
    """`patience`: seconds to wait for the end of the aggregator before."""

    patience: float = 0.0


class Refuse(Struct, frozen=True):
    """The answer to the user's command."""

    reason: str


class EndRun(Struct, frozen=True):
    """The run is complete."""

    ended: events.RunEnded


class FailRun(Struct, frozen=True):
    reason: str
    log_of: str | None = None
    """Component with whose last log lines the message ends."""
    log_lines: int = 12
    patience: float = 0.0
    """Seconds to wait for the end of all devices before. Their exit codes may show a better reason."""


Answered = Act | ApplyLimit | Obey | StartAgain | MeasureAgain | BeginRun
ControllerAction = (
    Answered | Publish | Show | WriteSample | ReadLinks | ReadLastRecords | Refuse | EndRun | FailRun
)


class _Input(Struct, frozen=True):
    at: float
    """When the shell passes the input, in seconds on the host's monotonic clock."""


class Connected(_Input, frozen=True):
    """All processes or containers are started, and the controller has a connection to the broker."""


class MessageArrived(_Input, frozen=True):
    topic: str
    payload: bytes | bytearray


class Metered(_Input, frozen=True):
    """The runtime has read its meter."""

    received: Sequence[features.Telemetry | messages.Disturbance] = ()
    samples: Sequence[messages.Measurement] = ()
    """Written as they are."""


class ProcessesEnded(_Input, frozen=True):
    codes: Mapping[str, int]
    """Exit codes of all components that have ended so far."""


class ProcessesWatched(_Input, frozen=True):
    """About once a second."""

    stopped: Set[str]
    """Components that somebody else has stopped."""
    hanging: Mapping[str, str]
    """Component of `Supervision.watched` -> where its own code hangs."""


class EarlierRecords(_Input, frozen=True):
    """Records, and a reader of the telemetry, of the run's earlier legs."""

    records: Sequence[events.Record]
    samples: Samples


class RecordRead(_Input, frozen=True):
    """`unix`: Unix time in seconds at `at`."""

    unix: float
    record: events.Record


class LastRecordsRead(_Input, frozen=True):
    """The aggregator has ended, and the devices have ended or not done so in time."""


class LinksRead(_Input, frozen=True):
    """`wrong`, `wrong_segments`: what was measured wrong. `work`: other work on each host meanwhile,
    empty if nothing was measured wrong."""

    found: Fidelity
    rates: Sequence[SegmentFidelity]
    wrong: Sequence[str] = ()
    wrong_segments: Sequence[str] = ()
    work: Sequence[OtherWork] = ()


class CommandGiven(_Input, frozen=True):
    """The user orders an action during the run: its JSON form, with the key `device`."""

    command: Mapping[str, Any]


class ActionDone(_Input, frozen=True):
    """`orders`: for the processes that do the rest. `failure`: why this run cannot carry out an action
    of the scenario; None if it is done."""

    action: Answered
    orders: Sequence[AddressedOrder] = ()
    failure: str | None = None


class StoodStill(_Input, frozen=True):
    """The controller itself, since `since`."""

    since: float


class Tick(_Input, frozen=True):
    """Several times a second, after all messages, records and commands so far."""


class TickOver(_Input, frozen=True):
    """All actions of `Tick` are carried out: send the orders so far."""


class Interrupted(_Input, frozen=True):
    """The user has pressed Ctrl-C."""


ControllerInput = (
    Connected | MessageArrived | Metered | ProcessesEnded | ProcessesWatched | EarlierRecords
    | RecordRead | LastRecordsRead | LinksRead | CommandGiven | ActionDone | StoodStill | Tick | TickOver
    | Interrupted
)  # fmt: skip
INPUTS: tuple[type[ControllerInput], ...] = get_args(ControllerInput)

# H: handled. I: ignored, though others may cause it. X: only a defect of ours can cause it.
REACTIONS: Mapping[type[ControllerInput], str] = {
    # In phase:        LAUNCHING, WAITING, CHECKING, PAUSED, STARTING, RUNNING, ENDED, INTERRUPTED
    Connected:        "HXXXXXXX",
    MessageArrived:   "XHHHHHHI",
    Metered:          "XHHHHHHI",
    ProcessesEnded:   "HHHHHHHI",
    ProcessesWatched: "XHHHHHHI",
    EarlierRecords:   "XXHXXXXX",
    RecordRead:       "XXHXHHHH",
    LastRecordsRead:  "XXXXHHHH",
    LinksRead:        "XXHXXXXX",
    CommandGiven:     "XXXXXHHX",
    ActionDone:       "XHHHHHHI",
    StoodStill:       "XHHHHHHI",
    Tick:             "XHIHHHHI",
    TickOver:         "XIIIHHHI",
    Interrupted:      "IHHHHHHI",
}  # fmt: skip


class WrongPhaseError(RuntimeError):
    """An input that is impossible in the phase of the run."""

    def __init__(self, event: ControllerInput, phase: ControllerPhase) -> None:
        super().__init__(f"{type(event).__name__} is impossible while the run is {phase}: {event}")

"""What each command prints with `--json`, as types; `testbed schema COMMAND` prints them as JSON Schema.

A command that prints JSON has its entry in OUTPUTS, and prints nothing that is not in it. Names and
units stay as they are; keys may be added. What is not known, or does not exist, is null or left out.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, TypeAdapter

from testbed.errors import BadInputError

Verdict = Literal["valid", "not valid", "not judged", "simulated"]


class Output(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class Ended(Output):
    """A run that has come to its end."""

    run: str
    """Its id."""
    directory: str
    runtime: str
    rule: str
    task: str
    outcome: str
    """What ended it: `after`, `updates` or `target_accuracy`, as in `stop`."""
    verdict: Verdict
    duration_s: float
    """Of device time."""
    versions: int
    updates: int
    """Applied."""
    dropped: int
    accuracy: float | None
    """Of the last evaluation, as are the others; null where there was none, or the task has none."""
    best_accuracy: float | None
    loss: float | None
    perplexity: float | None


class Started(Output):
    """A run that goes on in the background."""

    run: str
    directory: str


class Live(Output):
    """A run that runs, or has something left over."""

    run: str
    runtime: str | None
    """Null until it is known."""
    components: int
    """Containers, services or processes that run, the controller aside."""
    directory: str | None


class Listed(Output):
    """A run directory."""

    run: str
    created: str | None
    """In local time."""
    rule: str | None
    task: str | None
    runtime: str | None
    devices: int
    duration: float | None
    """Seconds of device time so far."""
    accuracy: float | None
    """Of the last evaluation, from 0 to 1, as is loss."""
    loss: float | None
    outcome: str
    """`running`, `crashed`, `unreadable`, or what ended it."""
    verdict: Verdict | None


class Down(Output):
    run: str


class Log(Output):
    """The end of what a component of a run has printed."""

    component: str
    text: str


class Valid(Output):
    """A topology without an error; one with errors exits with 2 and lists them on standard error."""

    topology: str
    rule: str
    task: str
    devices: int


class Planned(Output):
    """A device as it would be launched; what no device of the plan has is left out."""

    device: str
    cpu: float | None = None
    """Share of one core of the host."""
    quota: str | None = None
    memory: str | None = None
    gpu: str | None = None
    gflops: float | None = None
    timing: str | None = None
    speed: float | None = None
    up: str | None = None
    down: str | None = None
    rtt: str | None = None
    jitter: str | None = None
    loss: str | None = None
    access: str | None = None
    think: str | None = None
    local: str | None = None
    compression: str | None = None
    byzantine: str | None = None
    node: str | None = None
    samples: int | None
    transfer_s: float | None
    """Both ways, of device time."""
    round_s: float | None
    """Transfers and training."""
    lacks: list[str]
    """What is not known of the round's time."""


class DeviceData(Output):
    device: str
    group: str
    samples: int
    labels: list[int] | None = None
    """Samples of each class, where labels are classes."""
    least: float | None = None
    """Label, as are mean and greatest, where labels are numbers."""
    mean: float | None = None
    greatest: float | None = None


class Data(Output):
    training_samples: int
    evaluated_on: int
    shape: list[int]
    """Of one input."""
    remarks: list[str]
    devices: list[DeviceData]


class Evaluation(Output):
    """A kept model on a part of the data: the test set, one class of it, or samples of one device."""

    model: str
    version: int
    part: Literal["test set", "class", "device"]
    name: str
    samples: int
    loss: float | None
    accuracy: float | None
    perplexity: float | None = None


class Parameter(Output):
    name: str
    type: str
    """In words."""
    required: bool
    default: Any
    """As a topology writes it."""
    description: str


class Rule(Output):
    name: str
    equation: str | None
    paper: str | None
    fednova: str | None
    about: str
    parameters: list[Parameter]


class Task(Output):
    name: str
    dataset: str | None
    about: str
    parameters: list[Parameter]


class Profile(BaseModel):
    """A device profile or a link class, with all its figures as in a profiles file."""

    model_config = ConfigDict(extra="allow")

    name: str
    kind: Literal["device", "link"]
    description: str
    source: str


class Finding(Output):
    name: str
    status: Literal["ok", "warn", "missing"]
    detail: str
    fix: str | None
    """The command that fixes it."""


class Calibration(Output):
    """Speed of one core of this host."""

    gflops: float
    """FP64, the median."""
    cpu: str
    cores: int
    torch: str
    low: float
    median: float
    high: float
    products: int
    training: dict[str, float | None]
    """Speeds in the kinds of work that training consists of."""
    measured: str
    steady: bool


class Interval(Output):
    """A mean over seeds and the ends of its 95% interval; null where there is none."""

    mean: float | None
    low: float | None
    high: float | None
    count: int


class Compared(Output):
    """Runs that differ in nothing but their seed."""

    name: str
    task: str
    target: float | None
    """Accuracy, the highest that all runs of the task reached, if none was given."""
    runs: int
    reached: int
    """Of them, those that reached the target."""
    time: Interval
    """To the target: seconds of device time; so are rounds, updates and bytes (sent up)."""
    rounds: Interval
    updates: Interval
    bytes: Interval
    accuracy: Interval
    """Of the last evaluation, as is loss."""
    loss: Interval
    valid: int
    not_judged: int
    repeats: int
    speed_up: float | None


class Comparison(Output):
    target: float | None
    """Accuracy; null where tasks have several."""
    remarks: list[str]
    """What keeps the runs from being compared."""
    rows: list[Compared]


class Configuration(Output):
    name: str
    virtual_s: float | None
    """Mean time to the target; null where a seed did not reach it."""
    real_s: float | None
    virtual_rank: int
    real_rank: int


class Agreement(Output):
    target: float
    runtime: str
    """The real one."""
    verdicts: dict[Verdict, int]
    configurations: list[Configuration]
    tau: float | None
    """Kendall's tau-b."""
    low: float | None
    high: float | None
    resampled: Literal["seeds", "configurations"]
    swapped: list[tuple[str, str]]


class Written(Output):
    """Files or folders that were written."""

    files: list[str]


class Told(Output):
    """Runs that were sent to a tracker."""

    tracker: str
    told: str
    """What the tracker says of them, such as where they are to be found."""


class Replayed(Output):
    """A run whose recorded updates give the same again, bit by bit."""

    run: str
    rule: str
    version: int
    updates: int
    models: int
    records: int


class ActionDone(Output):
    device: str
    action: str


class Images(Output):
    """Tags of the images that a run starts containers from."""

    agent: str
    broker: str
    base: str
    gpu: str | None


class Image(Output):
    """An image of ours."""

    image: str
    """Tag."""
    size: int
    """Bytes, with what it shares with other images."""
    alone: int
    """Bytes that it shares with none."""
    user: str
    """`containers`, or a path of what it was built for; empty: nobody uses it."""
    kept: bool
    """Whether no pruning removes it."""


class DeviceStep(Output):
    run: str
    device: str
    cpu: float
    """Share of a core."""
    trainings: int
    step: float
    """CPU time of a step, mean, in seconds."""


class StepTime(Output):
    """What a training step cost devices."""

    virtual: dict[str, str | bool]
    """Settings of a topology's `virtual`."""
    devices: list[DeviceStep]


OUTPUTS: dict[str, Any] = {
    "up": Ended | Started,
    "ps": list[Live],
    "runs": list[Listed],
    "down": list[Down],
    "logs": list[Log],
    "validate": Valid,
    "plan": list[Planned],
    "data": Data,
    "evaluate": list[Evaluation],
    "replay": Replayed,
    **dict.fromkeys(("set", "kill", "restart", "pause", "resume"), list[ActionDone]),
    "sweep": Comparison,
    "compare": Comparison,
    "agree": Agreement,
    "report": Written,
    "export": Written | Told,
    "rules": list[Rule] | Rule,
    "tasks": list[Task] | Task,
    "profiles": list[Profile] | Written,
    "calibrate": Calibration | StepTime | list[Ended],
    "doctor": list[Finding],
    "images list": list[Image],
    "images build": Images,
    "images prune": list[Image],
    **dict.fromkeys(("new task", "new rule", "new topology", "new examples"), Written),
}
"""By command."""


def schema(command: str) -> dict[str, Any]:
    """The JSON Schema of what `command` prints. Raises BadInputError where it prints none."""
    if command not in OUTPUTS:
        raise BadInputError(f"no command {command!r} prints JSON; these do: {', '.join(OUTPUTS)}")
    return TypeAdapter(OUTPUTS[command]).json_schema()

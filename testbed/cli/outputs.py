"""Types of the output of each command with `--json`. `testbed schema COMMAND` prints their JSON Schema.

Each command that prints JSON has an entry in OUTPUTS, and prints exactly what the entry declares. Names
and units are stable; keys may be added. Unknown and missing values are null or left out.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, TypeAdapter

from testbed.errors import BadInputError

Verdict = Literal["valid", "not valid", "not judged", "simulated"]


class Output(BaseModel):
    """Base of the types of JSON output. Docstrings of fields are descriptions in the schema."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class FinishedRunOutput(Output):
    """A finished run."""

    run: str
    """Run id."""
    directory: str
    """Run directory."""
    runtime: str
    rule: str
    task: str
    outcome: str
    """Condition of `stop` that ended the run: `after`, `updates` or `target_accuracy`; or `diverged`."""
    verdict: Verdict
    duration_s: float
    """Duration in seconds of device time."""
    versions: int
    """Number of global models made in the run, without the initial model."""
    updates: int
    """Number of updates that were applied."""
    dropped: int
    """Number of updates that arrived but were not applied. Duplicates do not count."""
    accuracy: float | None
    """Test accuracy at the last evaluation, 0 to 1; null if the run was never evaluated, or if the task
    has no accuracy."""
    best_accuracy: float | None
    """Highest test accuracy, 0 to 1; null if the run was never evaluated, or if the task has no
    accuracy."""
    loss: float | None
    """Test loss at the last evaluation; null if the run was never evaluated, or if the loss is not
    finite."""
    perplexity: float | None
    """Perplexity at the last evaluation; null if the run was never evaluated, or if the task has no
    perplexity."""


class StartedRunOutput(Output):
    """A run that was started in the background."""

    run: str
    """Run id."""
    directory: str
    """Run directory."""


class LiveRunOutput(Output):
    """A run that is running, or that has left processes, containers or networks behind."""

    run: str
    """Run id."""
    runtime: str | None
    """Name of the runtime; null while only the controller is running."""
    components: int
    """Number of running containers, services or processes, without the controller."""
    directory: str | None
    """Run directory; null if unknown."""


class RunRowOutput(Output):
    """A row of the list of run directories."""

    run: str
    """Run id."""
    created: str | None
    """Local time at which the run directory was made; null if unknown."""
    rule: str | None
    task: str | None
    runtime: str | None
    devices: int
    """Number of devices."""
    duration: float | None
    """Seconds of device time so far; null before the run clock starts."""
    accuracy: float | None
    """Test accuracy at the last evaluation, 0 to 1; null if the run was never evaluated."""
    loss: float | None
    """Test loss at the last evaluation; null if the run was never evaluated, or if the loss is not
    finite."""
    outcome: str
    """`running`, `crashed`, `unreadable`, or the reason why the run ended."""
    verdict: Verdict | None
    """Verdict on the run; null until the run has ended."""


class DownOutput(Output):
    """A run that was ended."""

    run: str
    """Run id."""


class LogOutput(Output):
    """The last lines of the log of a component of a run."""

    component: str
    text: str


class ValidTopologyOutput(Output):
    """A topology without errors. If a topology has errors, the command prints the errors on standard
    error, and exits with 2."""

    topology: str
    """Path of the file."""
    rule: str
    task: str
    devices: int
    """Number of devices."""


class PlannedDeviceOutput(Output):
    """A device as it would be launched. Keys that no device of the plan has are left out; text values
    are written as in a topology."""

    device: str
    cpu: float | None = None
    """Share of one core of the host."""
    quota: str | None = None
    """CPU time per period, in ms."""
    memory: str | None = None
    """Memory limit."""
    gpu: str | None = None
    """GPU, or share of a GPU."""
    gflops: float | None = None
    """Speed of the device in Gflop/s, before the factor `speed`."""
    timing: str | None = None
    """Minimum duration of a training, before the factor `speed`."""
    speed: float | None = None
    """Speed factor that was drawn for the device."""
    up: str | None = None
    """Uplink rate."""
    down: str | None = None
    """Downlink rate."""
    rtt: str | None = None
    """Round-trip time."""
    jitter: str | None = None
    loss: str | None = None
    """Share of lost packets."""
    access: str | None = None
    """Segment that the device is attached to, which it may share with other devices."""
    think: str | None = None
    """Pause between trainings."""
    local: str | None = None
    """Local training: steps or epochs, batch size, and the optimizer unless it is SGD."""
    compression: str | None = None
    byzantine: str | None = None
    """Attack that the device carries out."""
    origin: str | None = None
    """Source of the keys of a drawn device, such as `survey.csv:7`."""
    node: str | None = None
    """Name of the device's node, if there are several nodes."""
    samples: int | None
    """Number of training samples; null until the data is prepared."""
    transfer_s: float | None
    """Expected time to transfer model and update, in seconds of device time; null if unknown."""
    round_s: float | None
    """Expected time of a round (transfers and training), in seconds of device time; null if unknown."""
    lacks: list[str]
    """Information that is missing for an estimate of the round's time."""
    idle_w: float | None = None
    """Power without work, in watts; null if the device's energy is not counted."""
    working_w: float | None = None
    """Mean power while the device trains round after round, in watts; null if unknown."""
    battery_idle_s: float | None = None
    """Seconds of device time until the first power-off without work; null if there is none within the
    time that was looked at, or no battery."""
    battery_working_s: float | None = None
    """Seconds of device time until the first power-off if the device trains round after round; null as
    in `battery_idle_s`, and if the power is unknown."""


class DeviceDataOutput(Output):
    """Training samples of a device."""

    device: str
    group: str
    """Name of the device's group."""
    samples: int
    """Number of training samples."""
    labels: list[int] | None = None
    """Samples per class, if labels are classes."""
    least: float | None = None
    """Lowest label, if labels are numbers."""
    mean: float | None = None
    """Mean label, if labels are numbers."""
    greatest: float | None = None
    """Highest label, if labels are numbers."""


class DataOutput(Output):
    """Distribution of the training samples among the devices."""

    training_samples: int
    """Number of training samples of the dataset."""
    evaluated_on: int
    """Number of samples on which the model is evaluated."""
    shape: list[int]
    """Shape of one input."""
    remarks: list[str]
    """Sentences about samples that were set aside or left out."""
    devices: list[DeviceDataOutput]


class EvaluationOutput(Output):
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
    loss: float | None
    """Mean loss; null if it is not finite."""
    accuracy: float | None
    """Accuracy, 0 to 1; null if the task has no accuracy."""
    perplexity: float | None = None
    """Perplexity; null if the task has no perplexity."""


class ParameterOutput(Output):
    """A parameter of a rule or a task."""

    name: str
    type: str
    """Type in words."""
    required: bool
    default: Any
    """Default value, written as in a topology; null if the parameter is required."""
    description: str


class SelectionOutput(Output):
    """A selection of the clients that train next."""

    name: str
    paper: str | None
    """Paper that describes the selection; null if the selection is not from a paper."""
    about: str
    """Description."""
    parameters: list[ParameterOutput]


class RuleOutput(Output):
    """An aggregation rule."""

    name: str
    equation: str | None
    """Equation in the paper of the rule; null if the rule is not from a paper."""
    paper: str | None
    """Paper that describes the rule; null if the rule is not from a paper."""
    fednova: str | None
    """Whether the rule supports FedNova: `yes`, `no`, or `depends on the parameters`."""
    about: str
    """Description."""
    parameters: list[ParameterOutput]


class TaskOutput(Output):
    """A learning task."""

    name: str
    dataset: str | None
    """Name of the task's dataset; null if the task makes the data itself, or the topology names the
    data."""
    about: str
    """Description."""
    parameters: list[ParameterOutput]


class ProfileOutput(BaseModel):
    """A device profile or a link class, with all its figures as in a profiles file; or a population,
    with its kinds of devices."""

    model_config = ConfigDict(extra="allow")

    name: str
    kind: Literal["device", "link", "population"]
    description: str
    source: str


class FindingOutput(Output):
    """Result of one check of the host."""

    name: str
    """Subject of the check."""
    status: Literal["ok", "warn", "missing"]
    detail: str
    """Result in words."""
    fix: str | None
    """Command that fixes the problem; null if there is no such command."""


class CalibrationOutput(Output):
    """Speed of one core of this host."""

    gflops: float
    """Median speed of matrix products in FP64, Gflop/s."""
    cpu: str
    """Model of the CPU."""
    cores: int
    """Number of cores."""
    torch: str
    """Version of PyTorch."""
    low: float
    """Lowest measured speed, Gflop/s."""
    median: float
    """Median of the measured speeds, Gflop/s."""
    high: float
    """Highest measured speed, Gflop/s."""
    products: int
    """Number of matrix products that were timed."""
    training: dict[str, float | None]
    """Kind of work in training -> median speed of a core in Gflop/s (GB/s for `memory`). The speed is
    null if it was not measured."""
    measured: str
    """Time of the measurement."""
    steady: bool
    """Whether most products were about as fast as the fastest product."""


class IntervalOutput(Output):
    """A mean over seeds and its 95% interval."""

    mean: float | None
    """Mean; null if there is no value."""
    low: float | None
    """Lower end of the interval; null if there are fewer than three values."""
    high: float | None
    """Upper end of the interval; null if there are fewer than three values."""
    count: int
    """Number of values."""


class CostOutput(IntervalOutput):
    """Cost of the target over seeds. Runs that missed the target are censored: their cost is above what
    was observed. If a run missed the target, `mean` is null."""

    median: float | None
    """Kaplan–Meier median; null if too few runs reached the target."""
    above: float | None
    """Lower bound of the median if `median` is null; otherwise null."""


class ComparisonRowOutput(Output):
    """A configuration: runs that differ only in their seed."""

    name: str
    settings: dict[str, str]
    """Settings in which the configuration differs from the other configurations: setting -> text."""
    task: str
    target: float | None
    """Target accuracy, 0 to 1: the requested accuracy, or the highest accuracy that all runs of the task
    reached. Null if the task has no accuracy."""
    runs: int
    """Number of runs."""
    reached: int
    """Number of runs that reached the target."""
    time: CostOutput
    """Seconds of device time to the target, interpolated between evaluations."""
    resolution: float | None
    """Precision of `time` in seconds: time between the two evaluations around the target (maximum over
    the runs). Null if no run reached the target."""
    rounds: CostOutput
    """Number of aggregations up to the first evaluated model that reached the target."""
    updates: CostOutput
    """Number of updates applied up to the first evaluated model that reached the target."""
    bytes: CostOutput
    """Payload bytes of the updates applied up to the first evaluated model that reached the target."""
    energy: CostOutput
    """Joules that all devices together had consumed at the first evaluated model that reached the
    target. Null if the runs counted no energy."""
    accuracy: IntervalOutput
    """Test accuracy at the last evaluation, 0 to 1."""
    loss: IntervalOutput
    """Test loss at the last evaluation."""
    valid: int
    """Number of runs that are valid or simulated."""
    not_judged: int
    """Number of runs that are not judged."""
    repeats: int
    """Number of runs that the sweep repeated because they were not valid. The other fields do not
    include these runs."""
    baseline: str
    """Name of the configuration that `speed_up` refers to; empty if there is no baseline."""
    speed_up: float | None
    """Mean time to the target with the baseline ÷ mean time to the target with this configuration. If a
    run of the two configurations missed the target, it is the ratio of the medians. Null if a median is
    unknown, or if there is no baseline."""


class ComparisonOutput(Output):
    """Comparison of configurations."""

    target: float | None
    """Target accuracy, 0 to 1; null if the tasks have different targets."""
    remarks: list[str]
    """Differences that make runs incomparable."""
    rows: list[ComparisonRowOutput]


class ConfigurationOutput(Output):
    """Times and ranks of a configuration in virtual time and with the real runtime."""

    name: str
    virtual_s: float | None
    """Mean time to the target in virtual time, in seconds; null if a seed did not reach the target."""
    real_s: float | None
    """Mean time to the target with the real runtime, in seconds; null if a seed did not reach the
    target."""
    virtual_rank: int
    real_rank: int


class EnergyConfigurationOutput(Output):
    """Energies and ranks of a configuration in virtual time and with the real runtime."""

    name: str
    virtual_j: float | None
    """Mean energy of all devices to the target in virtual time, in joules; null if a seed did not reach
    the target."""
    real_j: float | None
    """Mean energy of all devices to the target with the real runtime, in joules; null if a seed did not
    reach the target."""
    virtual_rank: int
    real_rank: int


class RankingsOutput(Output):
    """Agreement of two rankings of configurations: in virtual time, and with a real runtime."""

    tau: float | None
    """Kendall's tau-b; null if all configurations tie in one of the two rankings."""
    low: float | None
    """Lower end of the 95% interval of tau; null if there is no interval."""
    high: float | None
    """Upper end of the 95% interval of tau; null if there is no interval."""
    resampled: Literal["seeds", "configurations"]
    """Unit that the bootstrap for the interval draws."""
    swapped: list[tuple[str, str]]
    """Pairs of configurations that virtual time and the real runtime order differently. The first
    configuration of a pair has the lower cost in virtual time."""


class EnergyRankingsOutput(RankingsOutput):
    """Agreement of the rankings by energy."""

    configurations: list[EnergyConfigurationOutput]


class AgreementOutput(RankingsOutput):
    """Agreement of the rankings by time."""

    target: float
    """Target accuracy, 0 to 1."""
    runtime: str
    """Name of the real runtime."""
    verdicts: dict[Verdict, int]
    """Verdict -> number of real runs with that verdict."""
    configurations: list[ConfigurationOutput]
    by_energy: EnergyRankingsOutput | None
    """Agreement of the rankings by energy; null if a run counted no energy."""


class TwinFigureOutput(Output):
    """A figure of a run and of its twin."""

    name: str
    """Meaning of the figure, with its unit."""
    original: float | None
    twin: float | None
    difference: float | None
    """Difference of the twin as a share of the original; null if a value is unknown."""


class TwinDeviceOutput(Output):
    """A device in a run and in the run of its twin."""

    device: str
    updates: int
    twin_updates: int
    staleness: float | None
    """Mean staleness in versions; null without updates."""
    twin_staleness: float | None
    round: float | None
    """Mean seconds from the dispatch to the arrival of the update; null without updates."""
    twin_round: float | None


class RankedDeviceOutput(Output):
    """Ranks of a device by the seconds of the run per update."""

    name: str
    twin_s_per_update: float | None
    original_s_per_update: float | None
    twin_rank: int
    original_rank: int


class DeviceRanksOutput(RankingsOutput):
    """Agreement of the rankings of devices; configurations are devices, and virtual time is the twin."""

    configurations: list[RankedDeviceOutput]


class TwinPairOutput(Output):
    """A run beside the run of its twin."""

    original: str
    """Id of the run."""
    twin: str
    """Id of the twin's run."""
    target: float | None
    """Target accuracy, 0 to 1; null if there is none."""
    remarks: list[str]
    """A sentence for each figure that the run's records lack."""
    figures: list[TwinFigureOutput]
    devices: list[TwinDeviceOutput]
    ranks: DeviceRanksOutput | None
    """Ranks of the devices; null for a single device."""


class TwinConfigurationOutput(Output):
    """Times and ranks of a configuration in runs and in those of their twins."""

    name: str
    twin_s: float | None
    """Mean time to the target with the twins, in seconds; null if a seed did not reach the target."""
    original_s: float | None
    """Mean time to the target in the runs, in seconds; null if a seed did not reach the target."""
    twin_rank: int
    original_rank: int


class TwinRanksOutput(RankingsOutput):
    """Agreement of the rankings of configurations; virtual time is the twins."""

    configurations: list[TwinConfigurationOutput]


class TwinOutput(Output):
    """Runs beside the runs of their twins."""

    pairs: list[TwinPairOutput]
    target: float | None
    """Target accuracy of `ranks`, 0 to 1; null without ranks."""
    ranks: TwinRanksOutput | None
    """Ranks of the configurations; null if there is only one, or if no run reached an accuracy."""


class WrittenFilesOutput(Output):
    """Files or folders that were written."""

    files: list[str]
    """Paths of the files or folders."""


class PackOutput(Output):
    """A pack that was written."""

    file: str
    """Path of the archive."""
    bytes: int
    """Size of the archive, in bytes."""
    sha256: str
    """SHA-256 of the archive, in hexadecimal digits."""
    files: int
    """Number of files in the archive."""
    runs: list[str]
    """Ids of the packed runs."""
    left_out: list[str]
    """A sentence for each part of the runs that the pack does not have."""
    remarks: list[str]
    """Sentences on what is missing or incomplete."""


class TrackerOutput(Output):
    """Runs that were sent to a tracker."""

    tracker: str
    told: str
    """Reply of the tracker, such as where to find the runs."""


class ReplayOutput(Output):
    """Result of a replay, in which the recorded updates of a run gave bit-identical results again."""

    run: str
    """Run id."""
    rule: str
    version: int
    """Version of the final model."""
    updates: int
    """Number of updates that were applied again."""
    models: int
    """Number of models that were compared and are identical."""
    records: int
    """Number of records that were compared and are identical."""


class ActionOutput(Output):
    """An action that was carried out on a device."""

    device: str
    action: str


class ImageTagsOutput(Output):
    """Tags of the images of a run's containers."""

    agent: str
    broker: str
    base: str
    gpu: str | None
    """Image for devices with a GPU; null if it was not built."""


class ImageOutput(Output):
    """An image of the testbed."""

    image: str
    """Tag of the image."""
    size: int
    """Size in bytes, including layers that other images share."""
    alone: int
    """Size in bytes of the layers that no other image shares."""
    user: str
    """`containers`, or the path of the checkout or files that the image was built for; empty if the
    image is unused."""
    kept: bool
    """Whether `images prune --all` keeps the image."""


class DeviceStepOutput(Output):
    """CPU time of training steps of a device in a run."""

    run: str
    """Name of the run."""
    device: str
    cpu: float
    """Share of a core."""
    trainings: int
    """Number of trainings that were evaluated."""
    step: float
    """Mean CPU time of a step, in seconds."""


class StepTimeOutput(Output):
    """CPU time of training steps in runs."""

    virtual: dict[str, str | bool]
    """Settings for a topology's key `virtual`. With these settings, virtual time assumes the costs in
    `devices`."""
    devices: list[DeviceStepOutput]


OUTPUTS: dict[str, Any] = {
    "up": FinishedRunOutput | StartedRunOutput,
    "ps": list[LiveRunOutput],
    "runs": list[RunRowOutput],
    "down": list[DownOutput],
    "logs": list[LogOutput],
    "validate": ValidTopologyOutput,
    "plan": list[PlannedDeviceOutput],
    "data": DataOutput,
    "evaluate": list[EvaluationOutput],
    "replay": ReplayOutput,
    **dict.fromkeys(
        (
            *("set", "charge", "unplug", "kill", "restart", "pause", "resume"),
            *("disconnect", "reconnect"),
        ),
        list[ActionOutput],
    ),
    "sweep": ComparisonOutput,
    "compare": ComparisonOutput,
    "agree": AgreementOutput,
    "twin": TwinOutput | WrittenFilesOutput,
    "report": WrittenFilesOutput,
    "export": WrittenFilesOutput | TrackerOutput,
    "pack": PackOutput,
    "rules": list[RuleOutput] | RuleOutput,
    "selections": list[SelectionOutput] | SelectionOutput,
    "tasks": list[TaskOutput] | TaskOutput,
    "profiles": list[ProfileOutput] | WrittenFilesOutput,
    "calibrate": CalibrationOutput | StepTimeOutput | list[FinishedRunOutput],
    "doctor": list[FindingOutput],
    "images list": list[ImageOutput],
    "images build": ImageTagsOutput,
    "images prune": list[ImageOutput],
    **dict.fromkeys(("new task", "new rule", "new topology", "new examples"), WrittenFilesOutput),
}
"""Command -> type of its JSON output."""


def schema(command: str) -> dict[str, Any]:
    """Return the JSON Schema of the output of `command`. Raises BadInputError if the command prints no
    JSON."""
    if command not in OUTPUTS:
        raise BadInputError(f"no command {command!r} prints JSON; these do: {', '.join(OUTPUTS)}")
    return TypeAdapter(OUTPUTS[command]).json_schema()

"""Columns of the tables of a run: meaning, unit, sign, and from when on a cumulative column counts.

Exported Parquet files have these definitions as metadata, and the documentation has a page made from
them. `tests/analysis/test_columns.py` checks that every column is defined here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Literal

import pandas as pd
import pyarrow as pa


@dataclass(frozen=True, slots=True)
class TableColumn:
    meaning: str
    """A value is NaN if it is unknown, or if the run did not record it."""
    unit: str = ""
    """Empty for texts."""
    sign: Literal["", "≥ 0", "any"] = ""
    """Range of the numbers; empty for texts."""
    cumulative: str = ""
    """Moment from which a cumulative column counts; empty if each value stands for itself."""


_number = partial(TableColumn, sign="≥ 0")
_seconds = partial(_number, unit="s")
_bytes = partial(_number, unit="byte")
_count = partial(_number, unit="1")
_share = partial(_number, unit="share from 0 to 1")
_joules = partial(_number, unit="J")
_watts = partial(_number, unit="W")
_START = "start of the device's container or process"
_RUN = "start of the run"
_total_seconds = partial(_seconds, cumulative=_START)
_total_count = partial(_count, cumulative=_START)
_total_bytes = partial(_bytes, cumulative=_START)

_AT = _seconds("Device time of the record")
_CLIENT = TableColumn("Name of the client, which is the name of its device")
_DEVICE = TableColumn("Name of the device")
_GROUP = TableColumn("Group of the device in the topology")
_VERSION = _count("Version of the global model; 0 is the initial model")
_DISPATCH = _count("Number of the dispatch; with `client` it identifies the update; 0 if unknown")
_MODEL_TAKEN = _seconds("Device time at which the evaluated model was taken")
_MONOTONIC = _seconds("The host's monotonic clock, not device time")
_LOSS = _number("Mean loss", unit="1", sign="any")
_ACCURACY = _share("Share of correct predictions; NaN if the task has no accuracy")


def _queue(way: str, link: str) -> dict[str, TableColumn]:
    return {
        f"{way}_busy": _total_seconds(f"Time in which packets waited in the queue of the {link}"),
        f"{way}_left": _total_bytes(f"Bytes that left the queue of the {link} in that time"),
        f"{way}_allowed": _total_bytes(f"Bytes that the rate of the {link} allows in that time"),
    }


COLUMNS: Mapping[str, Mapping[str, TableColumn]] = {
    "devices": {
        "device": _DEVICE,
        "group": _GROUP,
        "profile": TableColumn("Hardware as text, such as `0.25 cpu, 512 MiB`"),
        "cpu": _number("Planned share of the time of one core of the host", unit="core"),
        "gflops": _number("Planned speed in training", unit="Gflop/s"),
        "speed": _number("Factor of the device's speed that was drawn from the seed", unit="1"),
        "memory": _bytes("Limit of memory"),
        "samples": _count("Number of training samples"),
        "importance": _share("Planned weight p in the objective; the sum over devices is 1"),
    },
    "updates": {
        "client": _CLIENT,
        "sequence": _count("Number of the update among those of the client"),
        "kind": TableColumn("`delta` for a difference to the base version, `model` for a whole model"),
        "base_version": _count("Version on which the client trained"),
        "applied_version": _count("First version that contains the update"),
        "staleness": _count("Number of versions made between base version and application"),
        "weight": _number("Factor by which the rule multiplied the update", unit="1", sign="any"),
        "samples": _count("Number of the client's training samples"),
        "steps": _count("Number of local steps for this update"),
        "loss": _number("Mean local training loss over the steps", unit="1", sign="any"),
        "bytes": _bytes("Payload of this update as it was sent"),
        "dispatched": _seconds("Device time at which the aggregator took the model that it sent"),
        "downloaded": _seconds("Device time at which the client had received the whole model"),
        "train_start": _seconds("Device time at which the training began"),
        "train_end": _seconds("Device time at which the training ended"),
        "sent": _seconds("Device time at which the client began the upload, after its think time"),
        "arrived": _seconds("Device time at which the aggregator had received the whole update"),
        "applied": _seconds("Device time at which the update was applied"),
        "dispatch": _DISPATCH,
        "bytes_before": _bytes("Payload of this update if it were sent as float32"),
        "masking": _seconds("Time to make a mask and its shares (secure aggregation)"),
        "outside": _count("Number of coordinates clipped to the range of secure aggregation"),
        "energy_j": _joules("Energy of the update's round; NaN if it was not counted"),
        "group": _GROUP,
    },
    "versions": {
        "at": _AT,
        "version": _VERSION,
        "updates": _count("Number of updates in this version, without those of earlier versions"),
    },
    "evaluations": {
        "at": _MODEL_TAKEN,
        "version": _VERSION,
        "loss": _LOSS,
        "accuracy": _ACCURACY,
        "perplexity": _number("exp(loss); only for language tasks", unit="1"),
    },
    "parts": {
        "at": _MODEL_TAKEN,
        "version": _VERSION,
        "part": TableColumn(
            "`class`: test samples of one class; `device`: training samples of a device"
        ),
        "name": TableColumn("Number of the class, or name of the device"),
        "samples": _count("Number of samples in the part"),
        "loss": _LOSS,
        "accuracy": _ACCURACY,
    },
    "statuses": {
        "at": _AT,
        "client": _CLIENT,
        "state": TableColumn("`joining`, `ready` or `offline`"),
    },
    "rejected": {
        "at": _AT,
        "client": _CLIENT,
        "reason": TableColumn("Why the update was not applied"),
        "dispatch": _DISPATCH,
    },
    "clipped": {
        "at": _AT,
        "client": _CLIENT,
        "norm": _number("ℓ2 norm of the update before it was scaled down", unit="1"),
    },
    "unfinished": {
        "at": _AT,
        "client": _CLIENT,
        "base_version": _count("Version that was sent to the client"),
        "dispatched": _seconds("Device time at which the aggregator took the first unanswered model"),
        "until": _seconds("Device time from which no update was expected"),
        "dispatch": _count("Number of the newest unanswered dispatch; 0 if unknown"),
    },
    "draws": {
        "at": _AT,
        "draw": _count("Number of the draw; a draw with no eligible client repeats the number before"),
        "wanted": _count("Number of clients that the rule wanted"),
        "eligible": _count("Number of eligible clients"),
        "chosen": TableColumn("Names of the chosen clients, separated by spaces"),
        "added": TableColumn("Names of clients that became eligible since the row before"),
        "removed": TableColumn("Names of clients that ceased to be eligible since the row before"),
    },
    "rounds": {
        "at": _seconds("Device time at which the update was sent, or the round was lost"),
        "client": _CLIENT,
        "dispatch": _count("Number of the dispatch; with `client` it identifies the update"),
        "energy_j": _joules(
            "Energy to receive the model, of the training, and to send the update, as far as they came"
        ),
        "outcome": TableColumn(
            "`sent`: the device began to send the update; `lost`: the round ended before"
        ),
        "level": _share("Level of the battery at `at`; NaN without a battery"),
    },
    "notes": {"at": _AT, "message": TableColumn("Remark about the run")},
    "scenario": {
        "at": _seconds("Device time of the action, or of the order if another process carries it out"),
        "lateness": _seconds("`at` minus the device time at which the action was due"),
        "device": _DEVICE,
        "source": TableColumn("`scenario`, `hand` or `aggregator`"),
        "action": TableColumn("Kind of the action, such as `set`"),
        "details": TableColumn("The whole action as JSON"),
    },
    "telemetry": {
        "device": _DEVICE,
        "at": _seconds(
            "Device time of the sample; negative before the run clock starts, NaN between the segments "
            "of a resumed run",
            sign="any",
        ),
        "cpu": _total_seconds("CPU time on cores of the host"),
        "periods": _total_count("Number of periods of the CPU quota"),
        "throttled_periods": _total_count("Number of periods in which the device was throttled"),
        "throttled": _total_seconds("Time in which the device was throttled"),
        "memory": _bytes("Memory in use"),
        "received": _total_bytes("Bytes received over the link"),
        "sent": _total_bytes("Bytes sent over the link"),
        **_queue("up", "uplink"),
        **_queue("down", "downlink"),
        "monotonic": _MONOTONIC,
    },
    "probes": {
        "device": _DEVICE,
        "at": _seconds("Device time; negative before the run clock starts", sign="any"),
        "up": _number("Measured rate of the uplink", unit="bit/s"),
        "down": _number("Measured rate of the downlink", unit="bit/s"),
        "rtt": _seconds("Measured round-trip time"),
        "jitter": _seconds("Measured jitter of the round-trip time"),
        "loss": _share("Share of round trips that were lost"),
        "monotonic": _MONOTONIC,
    },
    "energy": {
        "device": _DEVICE,
        "at": _seconds("Device time of the sample; NaN between segments of a resumed run", sign="any"),
        "consumed": _joules("Consumed energy, with transfers", cumulative=_RUN),
        "transferred": _joules("Energy consumed to send and receive bytes", cumulative=_RUN),
        "power": _watts("Mean power since the device's sample before"),
        "level": _share("Level of the battery; NaN without a battery"),
        "supplied": _joules(
            "Energy from the charger that was consumed or stored; NaN without a battery", cumulative=_RUN
        ),
        "charging": _watts("Power that the charger offers; NaN without a battery"),
        "monotonic": _MONOTONIC,
    },
    "network": {
        "at": _seconds("Device time at which the period ends", sign="any"),
        "seconds": _seconds("Length of the period"),
        "segment": TableColumn("Name of the segment"),
        "way": TableColumn("`up` or `down`"),
        "device": TableColumn("Name of the device; empty for background traffic"),
        "bytes": _bytes("Bytes that passed the segment in the period"),
        "monotonic": _MONOTONIC,
    },
    "fidelity": {
        "device": _DEVICE,
        "group": _GROUP,
        "figure": TableColumn(
            "`cpu`, `up`, `down`, `rtt`, `jitter`, `loss`, or the share of its rate that a link carried "
            "while packets waited: `up_carried`, `down_carried`"
        ),
        "asked": _number("Requested value", unit="core, bit/s, s or share, as the figure"),
        "got": _number("Measured value", unit="as `asked`"),
        "error": _number(
            "Difference relative to `asked`; positive if the device got more", unit="%", sign="any"
        ),
    },
    "runs": {
        "run": TableColumn("Name of the run's directory, and of the folder of its tables"),
        "label": TableColumn("How the run differs from others of its sweep, without the seed"),
        "task": TableColumn("Name of the task"),
        "runtime": TableColumn("Name of the runtime"),
        "seed": _count("Seed of the topology"),
        "changes": TableColumn("Settings that the sweep changed, as JSON"),
        "verdict": TableColumn("`valid`, `not valid`, `not judged` or `simulated`"),
        "rule": TableColumn("Name of the rule"),
        "versions": _count("Number of global models made in the run, without the initial one"),
        "updates": _count("Number of updates applied in the run"),
        "dropped": _count("Number of updates that arrived and were not applied, without duplicates"),
        "duration": _seconds("Device time of the whole run"),
        "accuracy": _share("Accuracy at the last evaluation; NaN if the task has none"),
        "loss": _number("Mean loss at the last evaluation", unit="1", sign="any"),
        "best_accuracy": _share("Highest accuracy of any evaluation"),
        "evaluated": TableColumn("Whether the run has any evaluation"),
        "has_loss": TableColumn("Whether any evaluation has a loss"),
        "perplexity": _number("exp(loss) at the last evaluation; only for language tasks", unit="1"),
        "ended": TableColumn("Why the run ended; missing if it has not ended"),
    },
}
"""Columns by table and name. The table `runs` is part of an export of several runs. The other tables are
attributes of `load.Run`."""


def with_metadata(name: str, table: pd.DataFrame) -> pa.Table:
    """A column's metadata are the fields of its `TableColumn` that are not empty."""
    made = pa.Table.from_pandas(table, preserve_index=False)
    schema = made.schema
    for place, field in enumerate(schema):
        if (column := COLUMNS[name].get(field.name)) is not None:
            known = {key: text for key, text in asdict(column).items() if text}
            schema = schema.set(place, field.with_metadata(known))
    return made.cast(schema)

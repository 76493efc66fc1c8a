"""Columns of the tables of a run: meaning, unit, sign, and from when on a cumulative column counts.

Exported Parquet files have these definitions as metadata, and the documentation has a page made from
them. `tests/analysis/test_columns.py` checks that every column is defined here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from functools import partial

import pandas as pd
import pyarrow as pa

from analysis.features import PARTS, RECORDS, STREAMS
from analysis.part import AT, CLIENT, DEVICE, MONOTONIC, TableColumn, count, number, seconds, share, size

_START = "start of the device's container or process"
_total_seconds = partial(seconds, cumulative=_START)
_total_count = partial(count, cumulative=_START)
_total_bytes = partial(size, cumulative=_START)

_GROUP = TableColumn("Group of the device in the topology")
_VERSION = count("Version of the global model; 0 is the initial model")
_DISPATCH = count("Number of the dispatch; with `client` it identifies the update; 0 if unknown")
_MODEL_TAKEN = seconds("Device time at which the evaluated model was taken")
_LOSS = number("Mean loss", unit="1", sign="any")
_ACCURACY = share("Share of correct predictions; NaN if the task has no accuracy")


def _queue(way: str, link: str) -> dict[str, TableColumn]:
    return {
        f"{way}_busy": _total_seconds(f"Time in which packets waited in the queue of the {link}"),
        f"{way}_left": _total_bytes(f"Bytes that left the queue of the {link} in that time"),
        f"{way}_allowed": _total_bytes(f"Bytes that the rate of the {link} allows in that time"),
    }


COLUMNS: Mapping[str, Mapping[str, TableColumn]] = {
    "devices": {
        "device": DEVICE,
        "group": _GROUP,
        "profile": TableColumn("Hardware as text, such as `0.25 cpu, 512 MiB`"),
        "cpu": number("Planned share of the time of one core of the host", unit="core"),
        "gflops": number("Planned speed in training", unit="Gflop/s"),
        "speed": number("Factor of the device's speed that was drawn from the seed", unit="1"),
        "memory": size("Limit of memory"),
        "samples": count("Number of training samples"),
        "importance": share("Planned weight p in the objective; the sum over devices is 1"),
    },
    "updates": {
        "client": CLIENT,
        "sequence": count("Number of the update among those of the client"),
        "kind": TableColumn("`delta` for a difference to the base version, `model` for a whole model"),
        "base_version": count("Version on which the client trained"),
        "applied_version": count("First version that contains the update"),
        "staleness": count("Number of versions made between base version and application"),
        "weight": number("Factor by which the rule multiplied the update", unit="1", sign="any"),
        "samples": count("Number of the client's training samples"),
        "steps": count("Number of local steps for this update"),
        "loss": number("Mean local training loss over the steps", unit="1", sign="any"),
        "bytes": size("Payload of this update as it was sent"),
        "dispatched": seconds("Device time at which the aggregator took the model that it sent"),
        "downloaded": seconds("Device time at which the client had received the whole model"),
        "train_start": seconds("Device time at which the training began"),
        "train_end": seconds("Device time at which the training ended"),
        "sent": seconds("Device time at which the client began the upload, after its think time"),
        "arrived": seconds("Device time at which the aggregator had received the whole update"),
        "applied": seconds("Device time at which the update was applied"),
        "dispatch": _DISPATCH,
        "bytes_before": size("Payload of this update if it were sent as float32"),
        "masking": seconds("Time to make the update's mask and its shares"),
        "outside": count("Number of coordinates clipped to the range of the integers that are summed"),
        **{name: one.about for part in PARTS for name, one in part.update_columns.items()},
        "group": _GROUP,
    },
    "versions": {
        "at": AT,
        "version": _VERSION,
        "updates": count("Number of updates in this version, without those of earlier versions"),
    },
    "evaluations": {
        "at": _MODEL_TAKEN,
        "version": _VERSION,
        "loss": _LOSS,
        "accuracy": _ACCURACY,
        "perplexity": number("exp(loss); only for language tasks", unit="1"),
    },
    "parts": {
        "at": _MODEL_TAKEN,
        "version": _VERSION,
        "part": TableColumn(
            "`class`: test samples of one class; `device`: training samples of a device"
        ),
        "name": TableColumn("Number of the class, or name of the device"),
        "samples": count("Number of samples in the part"),
        "loss": _LOSS,
        "accuracy": _ACCURACY,
    },
    "statuses": {
        "at": AT,
        "client": CLIENT,
        "state": TableColumn("`joining`, `ready` or `offline`"),
    },
    "rejected": {
        "at": AT,
        "client": CLIENT,
        "reason": TableColumn("Why the update was not applied"),
        "dispatch": _DISPATCH,
    },
    "clipped": {
        "at": AT,
        "client": CLIENT,
        "norm": number("ℓ2 norm of the update before it was scaled down", unit="1"),
    },
    "unfinished": {
        "at": AT,
        "client": CLIENT,
        "base_version": count("Version that was sent to the client"),
        "dispatched": seconds("Device time at which the aggregator took the first unanswered model"),
        "until": seconds("Device time from which no update was expected"),
        "dispatch": count("Number of the newest unanswered dispatch; 0 if unknown"),
    },
    "notes": {"at": AT, "message": TableColumn("Remark about the run")},
    "scenario": {
        "at": seconds("Device time of the action, or of the order if another process carries it out"),
        "lateness": seconds("`at` minus the device time at which the action was due"),
        "device": DEVICE,
        "source": TableColumn("`scenario`, `hand` or `aggregator`"),
        "action": TableColumn("Kind of the action, such as `set`"),
        "details": TableColumn("The whole action as JSON"),
    },
    "telemetry": {
        "device": DEVICE,
        "at": seconds(
            "Device time of the sample; negative before the run clock starts, NaN between the legs "
            "of a resumed run",
            sign="any",
        ),
        "cpu": _total_seconds("CPU time on cores of the host"),
        "periods": _total_count("Number of periods of the CPU quota"),
        "throttled_periods": _total_count("Number of periods in which the device was throttled"),
        "throttled": _total_seconds("Time in which the device was throttled"),
        "memory": size("Memory in use"),
        "received": _total_bytes("Bytes received over the link"),
        "sent": _total_bytes("Bytes sent over the link"),
        **_queue("up", "uplink"),
        **_queue("down", "downlink"),
        "monotonic": MONOTONIC,
    },
    "probes": {
        "device": DEVICE,
        "at": seconds("Device time; negative before the run clock starts", sign="any"),
        "up": number("Measured rate of the uplink", unit="bit/s"),
        "down": number("Measured rate of the downlink", unit="bit/s"),
        "rtt": seconds("Measured round-trip time"),
        "jitter": seconds("Measured jitter of the round-trip time"),
        "loss": share("Share of round trips that were lost"),
        "monotonic": MONOTONIC,
    },
    "fidelity": {
        "device": DEVICE,
        "group": _GROUP,
        "figure": TableColumn(
            "`cpu`, `up`, `down`, `rtt`, `jitter`, `loss`, or the share of its rate that a link carried "
            "while packets waited: `up_carried`, `down_carried`"
        ),
        "asked": number("Requested value", unit="core, bit/s, s or share, as the figure"),
        "got": number("Measured value", unit="as `asked`"),
        "error": number(
            "Difference relative to `asked`; positive if the device got more", unit="%", sign="any"
        ),
    },
    "runs": {
        "run": TableColumn("Name of the run's directory, and of the folder of its tables"),
        "label": TableColumn("How the run differs from others of its sweep, without the seed"),
        "task": TableColumn("Name of the task"),
        "runtime": TableColumn("Name of the runtime"),
        "seed": count("Seed of the topology"),
        "changes": TableColumn("Settings that the sweep changed, as JSON"),
        "verdict": TableColumn("`valid`, `not valid`, `not judged` or `simulated`"),
        "rule": TableColumn("Name of the rule"),
        "versions": count("Number of global models made in the run, without the initial one"),
        "updates": count("Number of updates applied in the run"),
        "dropped": count("Number of updates that arrived and were not applied, without duplicates"),
        "duration": seconds("Device time of the whole run"),
        "accuracy": share("Accuracy at the last evaluation; NaN if the task has none"),
        "loss": number("Mean loss at the last evaluation", unit="1", sign="any"),
        "best_accuracy": share("Highest accuracy of any evaluation"),
        "evaluated": TableColumn("Whether the run has any evaluation"),
        "has_loss": TableColumn("Whether any evaluation has a loss"),
        "perplexity": number("exp(loss) at the last evaluation; only for language tasks", unit="1"),
        "ended": TableColumn("Why the run ended; missing if it has not ended"),
    },
    **{one.table: one.columns for one in RECORDS},
    **{one.table: one.columns for one in STREAMS},
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

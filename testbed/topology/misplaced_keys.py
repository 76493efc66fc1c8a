"""Right places of keys that users often write in a wrong place, such as `dilation` under `runtime`."""

from __future__ import annotations

from collections.abc import Mapping

_TOP = (
    "churn",
    "code",
    "dilation",
    "durability",
    "network",
    "requirements",
    "scenario",
    "seed",
    "selection",
)
_PARTS: Mapping[str, str] = {
    "at the top level": " ".join(_TOP),
    "under task": "frozen importance initial",
    "under task.local": "batch_size epochs last_batch lr momentum optimizer precision steps "
    "weight_decay",
    "under task.partition": "alpha scheme",
    "under rule": "buffer_size mixing server_lr trim",
    "in a device group (devices: [{...}])": "access availability byzantine count cpu gflops gpu hosts "
    "image memory placement power profile segment speed thermal think timing",
    "under link of a group or of a scenario's set": "compression down jitter loss rtt trace up",
    "under evaluate": "classes cores every samples when",
    "under stop": "after target_accuracy",
    "under start": "quorum timeout",
    "under bounds": "norm",
    "under broker": "tls",
    "under runtime": "shaper",
    "under virtual": "answer_time mask_time packets share_time sliced_step_time start_time step_time "
    "update_time",
}
"""Keys that belong to a place in a topology, by that place. The keys are separated by spaces."""

_EXAMPLES = {"dilation": "dilation: auto", "seed": "seed: 7", "durability": "durability: recording"}

BELONGS: Mapping[str, str] = {
    key: f"it belongs {place}" + (f": {_EXAMPLES[key]}" if key in _EXAMPLES else "")
    for place, keys in _PARTS.items()
    for key in keys.split()
}
"""Hint for the error message on a misplaced key, by name of the key."""

"""What in a topology is valid by itself and does not go together."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from agents import config
from agents.pipeline import STEPS
from agents.pipeline.secure import coding, quantisation
from agents.rules.interface import ClientSide
from agents.wire.messages import MAX_SUMMANDS
from testbed.topology import scenario, validation_errors
from testbed.topology.schema import Topology
from testbed.topology.yamlfile import Document, Problem, Where

_OF_OUR_TRAINING = ("steps", "epochs", "lr_by_step", "optimizer", "momentum", "weight_decay",
                    "clip_gradient", "precision", "proximal", "fednova")  # fmt: skip
"""Settings of local training without effect where a task trains by its own code."""
_OF_STEPS = {
    "optimizer": "sgd",
    "lr_by_step": None,
    "lr_by_version": None,
    "weight_decay": 0.0,
    "momentum": 0.0,
    "proximal": 0.0,
    "clip": None,
}
"""Settings of local steps and of what these come to, with their defaults."""


def conflicts(topology: Topology, document: Document) -> Iterator[Problem]:
    """What is wrong with them, each with its place in `document`, which `topology` was made of."""
    for part, parameters in (("rule", topology.rule.build()), ("task", topology.task.build())):
        try:
            parameters.check(len(topology.device_names))
        except ValueError as error:
            yield validation_errors.conflict(document, (part,), error)
    yield from scenario.problems(topology.scenario, topology.churn, topology.devices, document.source)
    for where, message in _contradictions(topology):
        yield document.source.problem(where, message, at_key=True)


def _local_problems(topology: Topology) -> Iterator[tuple[Where, str]]:
    """What of a group's local training does not go with that of the task, or with the rule."""
    sends_gradients = topology.rule.build().client_side.kind == "gradient"
    for index, group in enumerate(topology.devices):
        where: Where = ("devices", index, "local")
        try:
            local = topology.task.local.changed_by(group.local).build()
        except ValueError as error:
            yield where, f"with what task.local says: {error}"
            continue
        steps = [name for name, default in _OF_STEPS.items() if getattr(local, name) != default]
        if sends_gradients and steps:
            own = steps[0] in group.local.model_fields_set
            mend = "take clip_gradient" if steps[0] == "clip" else "remove this"
            yield (
                ((*where, steps[0]) if own else ("task", "local", steps[0])),
                f"the clients of {topology.rule.name} send one gradient and take no step: {mend}",
            )


def _differential_problems(topology: Topology) -> Iterator[tuple[Where, str]]:
    """Rules with which noise would not do what is told of it."""
    wanted, rule = topology.differential, topology.rule
    if wanted is None:
        return
    where: Where = ("privacy", "differential")
    side: ClientSide = rule.build().client_side
    if side.kind == "residual":
        yield (
            where,
            f"clients of {rule.name} remember what they trained, and not the noise, which would add up: "
            "remove this",
        )
    if topology.durability == "checkpoint":
        yield (
            where,
            "durability: checkpoint makes versions anew after a crash, and noise that was drawn for one "
            "would be added to another: write durability: update",
        )
    if wanted.at == "server":
        for place in _compressed(topology):
            yield (
                place,
                "what is sent may be longer than clip, as it is compressed after it was clipped, and "
                "noise at the server would not hide it: remove this, or write at: client",
            )
        try:
            rule.build().sums()
        except ValueError as error:
            yield (
                (*where, "at"),
                f"the rule {rule.name} has no sum of a buffer to which noise could be added ({error}): "
                "write at: client",
            )
    if importlib.util.find_spec("dp_accounting") is None:
        yield (
            where,
            "the accountant is not installed here: python -m pip install 'dp-accounting>=0.4.4'",
        )


def _privacy_problems(topology: Topology) -> Iterator[tuple[Where, str]]:
    """What cannot be done without the single updates, and sums that would leave the field."""
    yield from _differential_problems(topology)
    where: Where = ("privacy", "secure")
    try:
        secure = topology.secure
    except ValueError as error:
        yield where, f"the rule {topology.rule.name} cannot do with sums of updates: {error}"
        return
    if secure is None:
        return
    clients = len(secure.clients)
    unfit = coding.code_problem(clients, secure.needed, secure.colluding)
    if (problem := unfit or coding.split_problem(clients, secure.needed)) is not None:
        yield (*where, "needed"), problem
    if (
        problem := quantisation.overflow(secure.updates, secure.largest_weight, secure.bits)
    ) is not None:
        yield (*where, "bits"), problem
    if secure.updates < 2:  # of a rule of the user's own
        yield where, "a sum of one update is that update: take sums of two or more"
    if secure.updates > MAX_SUMMANDS:
        yield where, f"sums of {secure.updates} updates, expected at most {MAX_SUMMANDS}"
    side: ClientSide = topology.rule.build().client_side
    if side.kind == "residual" and topology.task.importance != "uniform":
        yield (
            ("task", "importance"),
            f"weights in a secure sum are rounded, which would move the limit of {topology.rule.name}: "
            "take importance: uniform",
        )
    if topology.bounds.build().norm is not None:
        yield (
            ("bounds", "norm"),
            "with privacy.secure the server sees no update whose norm it could bound: remove this; "
            "task.local.clip bounds it at the client",
        )
    for place in _compressed(topology):
        yield (
            place,
            "masked updates look random and cannot be made smaller: remove this, or lower "
            "privacy.secure.bits",
        )


def _compressed(topology: Topology) -> Iterator[Where]:
    """Where compression, or another step of a device's own that may change updates, is asked for."""
    for index, group in enumerate(topology.devices):
        if group.link is not None and group.link.compression is not None:
            yield ("devices", index, "link", "compression")
        if group.steps:
            yield ("devices", index, "steps")


def _contradictions(topology: Topology) -> Iterator[tuple[Where, str]]:
    task, groups = topology.task, topology.devices
    side: ClientSide = topology.rule.build().client_side
    if side.kind == "residual" and topology.bounds.build().norm is not None:
        yield (
            ("bounds", "norm"),
            f"clients of {topology.rule.name} count on what they sent to be applied whole: remove this",
        )
    if topology.requirements and topology.code is None:
        yield ("requirements",), "nothing of ours imports them: add code, or remove this"
    yield from _local_problems(topology)
    yield from _privacy_problems(topology)
    if not topology.rule.build().takes_fednova:
        places: list[Where] = [("task",)] if task.local.build().fednova else []
        places += [
            ("devices", index) for index, group in enumerate(groups) if group.local.build().fednova
        ]
        for where in places:
            yield (
                (*where, "local", "fednova"),
                f"the rule {topology.rule.name} does not take normalised updates: remove this, or "
                "take a rule that does (testbed rules shows them)",
            )
    accesses: dict[str, config.SharedLink] = {}
    for place in _compressed(topology) if side.kind == "residual" else ():
        yield (
            place,
            f"clients of {topology.rule.name} count on what they sent to be applied whole: remove this",
        )
    for index, group in enumerate(groups):
        encoding = [step.name for step in group.update_steps if STEPS[step.name].field is not None]
        if len(encoding) > 1:
            yield (
                ("devices", index),
                f"updates are encoded by {' and '.join(encoding)}: keep one of them",
            )
        access = None if group.access is None else group.access.build()
        if access is not None and accesses.setdefault(access.name, access) != access:
            yield (
                ("devices", index, "access"),
                f"{access.name} has other rates before: write the same, or give it another name",
            )
        if group.gflops is not None and task.flops_per_step is None:
            yield (
                ("devices", index, "gflops"),
                "how long a step takes is not known: add task.flops_per_step, such as "
                "flops_per_step: 1e6",
            )
    if task.build().fits:
        yield from _settings_of_ours(topology, side)
    if task.brings_shards and task.partition.scheme != "iid":
        yield (
            ("task", "partition"),
            f"the task {task.name} brings each device its own data: remove this",
        )
    if task.brings_shards:
        places = [("task", "data")] if task.data is not None else []
        places += [("devices", index, "data") for index, group in enumerate(groups) if group.data]
        for where in places:
            yield where, f"the task {task.name} brings each device its own data: remove this"
    has_target = topology.stop.build().target_accuracy is not None
    if has_target and not task.build().has_accuracy:
        yield (
            ("stop", "target_accuracy"),
            f"the task {task.name} has no accuracy: remove this, and give after or updates",
        )
    if has_target and topology.evaluate.when == "after":
        yield (
            ("stop", "target_accuracy"),
            "with evaluate.when: after no accuracy is known before the run is over: remove this, and "
            "give after or updates; or write when: during",
        )


def _settings_of_ours(topology: Topology, side: ClientSide) -> Iterator[tuple[Where, str]]:
    """What has no effect on a task that trains by its own code."""
    name = topology.task.name
    if side.kind == "gradient":
        yield (
            ("rule", "name"),
            f"{topology.rule.name} wants gradients, and {name} trains by its own code: take another",
        )
    plain = config.LocalTraining(steps=1)
    found: list[tuple[Where, config.LocalTraining]] = [(("task", "local"), topology.task.local.build())]
    found += [
        (("devices", index, "local"), group.local.build())
        for index, group in enumerate(topology.devices)
        if group.local != topology.task.local
    ]
    for where, local in found:
        for setting in _OF_OUR_TRAINING:
            if getattr(local, setting) not in (None, getattr(plain, setting)):
                yield (
                    (*where, setting),
                    f"{name} trains by its own code: write steps: 1, lr and perhaps clip, and set all "
                    "else in that code",
                )

"""Conflicts between keys of a topology. Each key is valid by itself."""

from __future__ import annotations

from collections.abc import Iterator

from agents import config, extras
from agents.pipeline.steps import STEPS
from agents.rules.interface import ClientSide
from agents.secure import arithmetic
from agents.selection.uniform import UniformSelection
from agents.wire.messages import MAX_SUMMANDS
from testbed.topology import network, real_devices, scenario, validation_errors
from testbed.topology.schema import Topology
from testbed.topology.yamlfile import Document, Problem, Where

_BUILT_IN_TRAINING_ONLY = ("steps", "epochs", "last_batch", "lr_by_step", "optimizer", "momentum",
                           "weight_decay", "clip_gradient", "precision", "proximal",
                           "fednova")  # fmt: skip
"""Settings of local training without effect if the task trains by code of its own."""
_LOCAL_STEPS_ONLY = {
    "optimizer": "sgd",
    "lr_by_step": None,
    "lr_by_version": None,
    "weight_decay": 0.0,
    "momentum": 0.0,
    "proximal": 0.0,
    "clip": None,
}
"""Settings and their defaults. They have no effect on clients that send a single gradient."""


def conflicts(topology: Topology, document: Document) -> Iterator[Problem]:
    """`topology` was read from `document`."""
    empty = (group for group in topology.devices if group.data and group.data.samples == 0)
    idle, devices = sum(len(group.device_names) for group in empty), len(topology.device_names)
    checked = [("rule", topology.rule.build(), devices - idle), ("task", topology.task.build(), devices)]
    if topology.selection is not None:
        checked.append(("selection", topology.selection.build(), devices - idle))
    if idle == devices:
        message = "every device has samples: 0, so that none can train: raise it for at least one"
        yield document.source.problem(("devices",), message, at_key=True)
        return
    for part, parameters, clients in checked:
        try:
            parameters.check(clients)
        except ValueError as error:
            yield validation_errors.conflict(document, (part,), error)
    segments = {*topology.network, *(one.access.name for one in topology.devices if one.access)}
    yield from scenario.problems(
        topology.scenario, topology.churn, topology.devices, document.source, segments
    )
    for where, message in _contradictions(topology):
        yield document.source.problem(where, message, at_key=True)


def _local_problems(topology: Topology) -> Iterator[tuple[Where, str]]:
    """Conflicts of a group's local training with the task's, or with the rule."""
    sends_gradients = topology.rule.build().client_side.kind == "gradient"
    for index, group in enumerate(topology.devices):
        where: Where = ("devices", index, "local")
        try:
            local = topology.task.local.changed_by(group.local).build()
        except ValueError as error:
            yield where, f"conflicts with task.local: {error}"
            continue
        steps = [name for name, default in _LOCAL_STEPS_ONLY.items() if getattr(local, name) != default]
        if sends_gradients and steps:
            own = steps[0] in group.local.model_fields_set
            mend = "use clip_gradient" if steps[0] == "clip" else "remove this"
            yield (
                ((*where, steps[0]) if own else ("task", "local", steps[0])),
                f"the clients of {topology.rule.name} send one gradient and make no local steps: {mend}",
            )


def _differential_problems(topology: Topology) -> Iterator[tuple[Where, str]]:
    wanted, rule = topology.differential, topology.rule
    if wanted is None:
        return
    where: Where = ("privacy", "differential")
    side: ClientSide = rule.build().client_side
    if side.kind == "residual":
        yield (
            where,
            f"clients of {rule.name} remember their updates without the noise, so that the noise would "
            "accumulate: remove this",
        )
    if side.update_vectors:
        yield (
            where,
            f"clients of {rule.name} send {_vectors(side)} with their updates, which would not get the "
            "noise: remove this, or choose another rule",
        )
    if topology.durability == "checkpoint":
        yield (
            where,
            "durability: checkpoint repeats versions after a crash, so that noise drawn for one version "
            "would be added to another: write durability: update",
        )
    if wanted.at == "server":
        for place in _compression_places(topology):
            yield (
                place,
                "compression comes after clipping and may make an update's norm larger than clip, which "
                "noise at the server would not hide: remove this, or write at: client",
            )
        try:
            rule.build().sums()
        except ValueError as error:
            yield (
                (*where, "at"),
                f"the rule {rule.name} does not sum up buffered updates, so that the server cannot add "
                f"noise ({error}): write at: client",
            )
    if message := extras.missing("dp_accounting"):
        yield where, message


def _privacy_problems(topology: Topology) -> Iterator[tuple[Where, str]]:
    """Secure aggregation conflicts with settings that need single updates, and with sums that are too
    large for the finite field."""
    yield from _differential_problems(topology)
    where: Where = ("privacy", "secure")
    try:
        secure = topology.secure
    except ValueError as error:
        yield where, f"the rule {topology.rule.name} does not work with sums of updates: {error}"
        return
    if secure is None:
        return
    clients = len(secure.clients)
    unfit = arithmetic.code_problem(clients, secure.needed, secure.colluding)
    if (problem := unfit or arithmetic.split_problem(clients, secure.needed)) is not None:
        yield (*where, "needed"), problem
    if (problem := arithmetic.overflow(secure.updates, secure.largest_weight, secure.bits)) is not None:
        yield (*where, "bits"), problem
    if secure.updates < 2:  # possible with a user's own rule
        yield where, "a sum of one update reveals that update: sum up two or more"
    if secure.updates > MAX_SUMMANDS:
        yield where, f"found sums of {secure.updates} updates, expected at most {MAX_SUMMANDS}"
    side: ClientSide = topology.rule.build().client_side
    if side.update_vectors:
        yield (
            where,
            f"clients of {topology.rule.name} send {_vectors(side)} with their updates, which would not "
            "be masked: remove this, or choose another rule",
        )
    if side.memory:
        yield (
            where,
            f"clients of {topology.rule.name} remember what they sent, but a sum of masked updates may "
            "be lost, and they would not know: remove this, or choose another rule",
        )
    if side.kind == "residual" and topology.task.importance != "uniform":
        yield (
            ("task", "importance"),
            "secure aggregation rounds weights, so that "
            f"{topology.rule.name} would converge to another model: write importance: uniform",
        )
    if topology.bounds.build().norm is not None:
        yield (
            ("bounds", "norm"),
            "with privacy.secure the server sees no single update whose norm it could bound: remove "
            "this, and bound it at the client with task.local.clip",
        )
    for place in _compression_places(topology):
        yield (
            place,
            "masked updates look random and cannot be compressed: remove this; a lower "
            "privacy.secure.bits makes them smaller",
        )


def _selection_problems(topology: Topology) -> Iterator[tuple[Where, str]]:
    """Conflicts of the selection with the rule, and with privacy that hides what it needs."""
    settings, rule = topology.selection, topology.rule
    if settings is None or isinstance(selection := settings.build(), UniformSelection):
        return
    if not rule.build().draws:
        keys = [key for key in ("concurrency", "sample") if key in rule.params]
        mend = f"set rule.{keys[0]}" if keys else "remove this"
        yield (
            ("selection",),
            f"the rule {rule.name} draws no clients here, so that a selection has no effect: {mend}, or "
            "choose a rule that draws clients, such as fedbuff with concurrency, fedavg with sample",
        )
    noise = topology.differential
    if selection.needs_loss and noise is not None and noise.at == "client":
        yield (
            ("selection", "name"),
            f"{settings.name} needs the losses of clients, which privacy.differential hides: choose "
            "another selection, or write at: server",
        )


def _vectors(side: ClientSide) -> str:
    names = ", ".join(side.update_vectors)
    return f"the {'vector' if len(side.update_vectors) == 1 else 'vectors'} {names}"


def _compression_places(topology: Topology) -> Iterator[Where]:
    """Places of compression and of groups' own steps: both may change updates."""
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
            f"clients of {topology.rule.name} rely on their updates being applied unchanged: remove "
            "this",
        )
    if topology.requirements and topology.code is None:
        yield ("requirements",), "only your own code imports these packages: add code, or remove this"
    yield from real_devices.problems(topology)
    yield from _local_problems(topology)
    yield from _privacy_problems(topology)
    yield from _selection_problems(topology)
    if not topology.rule.build().takes_fednova:
        places: list[Where] = [("task",)] if task.local.build().fednova else []
        places += [
            ("devices", index) for index, group in enumerate(groups) if group.local.build().fednova
        ]
        for where in places:
            yield (
                (*where, "local", "fednova"),
                f"the rule {topology.rule.name} does not accept normalised updates: remove this, or "
                "choose a rule that does (see testbed rules)",
            )
    yield from network.problems(topology.network, groups)
    for place in _compression_places(topology) if side.kind == "residual" else ():
        yield (
            place,
            f"clients of {topology.rule.name} rely on their updates being applied unchanged: remove "
            "this",
        )
    for index, group in enumerate(groups):
        encoding = [step.name for step in group.update_steps if STEPS[step.name].field is not None]
        if len(encoding) > 1:
            yield (
                ("devices", index),
                f"both {' and '.join(encoding)} encode the updates: keep one of them",
            )
        if group.transfers is not None and topology.server.link is not None:
            yield (
                ("server", "link"),
                "the durations of transfers are given, as of a recorded run, and include the server's "
                "link: remove this",
            )
        if group.gflops is not None and task.flops_per_step is None:
            yield (
                ("devices", index, "gflops"),
                "needs the number of operations per step: add task.flops_per_step, such as "
                "flops_per_step: 1e6",
            )
    if task.build().fits:
        yield from _own_training_conflicts(topology, side)
    if task.brings_shards and task.partition.scheme != "iid":
        yield (
            ("task", "partition"),
            f"the task {task.name} has its own data for each device: remove this",
        )
    if task.brings_shards:
        places = [("task", "data")] if task.data is not None else []
        places += [("devices", index, "data") for index, group in enumerate(groups) if group.data]
        for where in places:
            yield where, f"the task {task.name} has its own data for each device: remove this"
    has_target = topology.stop.build().target_accuracy is not None
    if has_target and not task.build().has_accuracy:
        yield (
            ("stop", "target_accuracy"),
            f"the task {task.name} has no accuracy: remove this, and add after or updates",
        )
    if has_target and topology.evaluate.when == "after":
        yield (
            ("stop", "target_accuracy"),
            "with evaluate.when: after, accuracy is not known during the run: remove this and add after "
            "or updates, or write evaluate.when: during",
        )


def _own_training_conflicts(topology: Topology, side: ClientSide) -> Iterator[tuple[Where, str]]:
    """Settings that have no effect on a task that trains by code of its own."""
    name = topology.task.name
    if side.kind == "gradient":
        yield (
            ("rule", "name"),
            f"{topology.rule.name} needs gradients, but {name} trains by its own code: choose another "
            "rule",
        )
    if side.adds_terms:
        yield (
            ("rule", "name"),
            f"{topology.rule.name} adds terms to the local objective, but {name} trains by its own "
            "code: choose another rule",
        )
    plain = config.LocalTraining(steps=1)
    found: list[tuple[Where, config.LocalTraining]] = [(("task", "local"), topology.task.local.build())]
    found += [
        (("devices", index, "local"), group.local.build())
        for index, group in enumerate(topology.devices)
        if group.local != topology.task.local
    ]
    for where, local in found:
        for setting in _BUILT_IN_TRAINING_ONLY:
            if getattr(local, setting) not in (None, getattr(plain, setting)):
                yield (
                    (*where, setting),
                    f"{name} trains by its own code: keep only steps: 1, lr and optionally clip here, "
                    "and set everything else in that code",
                )

"""Conflicts of the key `privacy` of a topology: secure sums, and differential privacy. Notes on secure
sums in a plan."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from agents import extras
from agents.rules.interface import ClientSide
from agents.secure import arithmetic
from agents.wire.messages import MAX_SUMMANDS
from testbed.topology.yamlfile import Where

if TYPE_CHECKING:  # it imports this module
    from testbed.topology.schema import Topology


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
        for place in topology.compression_places():
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


def problems(topology: Topology) -> Iterator[tuple[Where, str]]:
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
    if (problem := arithmetic.overflow(secure.updates, secure.weights, secure.bits)) is not None:
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
    for place in topology.compression_places():
        yield (
            place,
            "masked updates look random and cannot be compressed: remove this; a lower "
            "privacy.secure.bits makes them smaller",
        )


def _vectors(side: ClientSide) -> str:
    names = ", ".join(side.update_vectors)
    return f"the {'vector' if len(side.update_vectors) == 1 else 'vectors'} {names}"


def notes(topology: Topology, _: object) -> Iterator[str]:
    """Yield the sizes of secure sums, and how many clients a sum needs."""
    if (secure := topology.secure) is not None:
        largest = secure.updates * secure.weights << secure.bits
        yield (
            f"Secure aggregation: sums of {secure.updates} updates stay in the field, "
            f"{secure.updates} × {secure.weights} × 2^{secure.bits} = {largest:,} of at most "
            f"{arithmetic.FIELD.p:,}. Any {secure.needed} of {len(secure.clients)} clients can open a "
            f"sum; the server and {secure.colluding} clients together learn no single update."
        )

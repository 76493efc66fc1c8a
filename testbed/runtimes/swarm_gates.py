"""Gates of a run's nodes: one each, which pipes the broker's Unix socket of this node to the broker,
keeps the estimate of this node's clock, and reads the counters of its CPUs."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from testbed.broker import SOCKET
from testbed.errors import HostError
from testbed.fidelity.host_load import CpuTimes, HostSample, Sampler, cpu_times
from testbed.plan import agent_configs
from testbed.plan.agent_configs import TLS_PORT
from testbed.runtimes import doors, executor, swarm_executor
from testbed.runtimes.containers import PART_LABEL, Attachment
from testbed.runtimes.doors import node_container
from testbed.runtimes.swarm_site import Site

GATE, CLOCK_GATE = "node.gate", "node.clock"
"""Parts of a run beside those of other runtimes: on other nodes, and on this one."""
_STAT = "stat"
"""Name of the file in the control folder with the counters of a node's CPUs."""
_CLOCK_PORT = 7001
_CLOCK = "clock"
"""Name of the gate of this node, whose clock is that of the run."""
_TIMEOUT_SECONDS = 30.0


class Gates:
    def __init__(self, site: Site) -> None:
        self._site = site
        self._containers: dict[str, str] = {}
        """By node."""
        self._samplers: dict[str, Sampler] = {}
        """Of the load of other nodes, by node."""
        self._looks: dict[str, tuple[dict[int, CpuTimes], float]] = {}
        """What they read: counters of the CPUs, and CPU seconds of the devices, by node."""

    def create(self, certificate: str) -> dict[str, tuple[str, int]]:
        """Create the services; return the part of each, by id, and how many tasks it is to have.
        `certificate` is the broker's, as PEM."""
        site = self._site
        control = site.volume("control", agent_configs.CONTROL_FOLDER)
        trust = swarm_executor.configure(
            site.manager,
            site.named("broker-pem"),
            certificate.encode(),
            site.labels,
            "/testbed/broker.pem",
        )
        to_broker = {
            "host": agent_configs.CONTROL,
            "port": TLS_PORT,
            "name": agent_configs.CONTROL,
            "trust": trust.target,
        }
        pipes = [{"listen": {"path": f"{control.target}/{SOCKET}"}, "to": to_broker}]
        clock = {"host": "0.0.0.0", "port": _CLOCK_PORT, "identity": doors.IDENTITY}  # noqa: S104
        ask = {"host": _CLOCK, "port": _CLOCK_PORT, "identity": doors.IDENTITY, "name": doors.NAME}
        file = f"{control.target}/{agent_configs.CLOCK}"
        here, others = f"node.id == {site.doors.here}", len(site.doors.others)
        made = {}
        for part, config, node, count, aliases in (
            (CLOCK_GATE, {"serve": clock}, here, 1, (_CLOCK,)),
            (
                GATE,
                {"follow": {"ask": ask, "write": file}, "watch": f"{control.target}/{_STAT}"},
                here.replace("==", "!="),
                others,
                (),
            ),
        ):
            if count == 0:
                continue
            container = node_container(
                part,
                site.named(part),
                site.base,
                {**site.labels, PART_LABEL: part},
                (Attachment(site.named("control"), aliases),),
            )
            service = site.doors.service(
                container,
                {"pipes": pipes, **config},
                (node,),
                everywhere=part == GATE,
                volumes=[control],
                more_configs=[trust],
            )
            made[service] = part, count
        return made

    def started(self, tasks: Sequence[Mapping[str, Any]]) -> None:
        """Those of the services that `create` has made."""
        for task in tasks:
            self._containers[task["NodeID"]] = task["Status"]["ContainerStatus"]["ContainerID"]

    def check(self, alive: Collection[str]) -> None:
        """Raises HostError where one is not among the containers that are `alive`: its devices can be
        told nothing any more, nor tell anything."""
        for node, container in self._containers.items():
            if container not in alive:
                name = self._site.names.get(node, node)
                raise HostError(f"the gate of the node {name} has ended: see its log")

    def put(self, node: str, name: str, content: bytes) -> None:
        """Put a file into the control folder of a node."""
        engine, where = self._site.doors.engines[node], agent_configs.CONTROL_FOLDER
        executor.put(engine, self._containers[node], where, {name: content})

    def await_clocks(self, nodes: Sequence[str]) -> None:
        """Until each of `nodes` has an estimate of this one's clock; this one's own is exact. Raises
        HostError."""
        exact = {"at": 0, "offset": 0, "drift": 0.0, "uncertainty": 0}
        self.put(self._site.doors.here, agent_configs.CLOCK, json.dumps(exact).encode())
        deadline = time.monotonic() + _TIMEOUT_SECONDS
        for node in nodes:
            while self._clock(node) is None:
                if time.monotonic() > deadline:
                    name = self._site.names[node]
                    raise HostError(f"the clock of {name} cannot be compared with this host's")
                time.sleep(0.1)

    def _clock(self, node: str) -> dict[str, Any] | None:
        """The estimate that a node's gate has of this node's clock."""
        text = self._read(node, agent_configs.CLOCK)
        return None if text is None else dict(json.loads(text))

    def _read(self, node: str, name: str) -> bytes | None:
        path = f"{agent_configs.CONTROL_FOLDER}/{name}"
        return executor.read_file(self._site.doors.engines[node], self._containers[node], path)

    def clocks(self) -> dict[str, float]:
        """See `testbed.runtimes.Runtime`."""
        found = {}
        for node in self._containers:
            if node != self._site.doors.here:
                name = self._site.names[node]
                with self._site.asking(node):
                    estimate = self._clock(node)
                found[name] = math.inf if estimate is None else estimate["uncertainty"] / 1e9
        return found

    def loads(self, at: float, used: Mapping[str, float]) -> dict[str, HostSample]:
        """See `testbed.runtimes.Runtime`."""
        found = {}
        for planned in self._site.spec.plan.nodes:
            node = planned.id
            if planned.here or node not in self._containers:
                continue
            with self._site.asking(node):
                text = self._read(node, _STAT)
            if text is None:
                continue
            own = math.fsum(used.get(name, 0.0) for name in self._site.on(node))
            self._looks[node] = cpu_times(text.decode("ascii")), own
            if node not in self._samplers:
                self._samplers[node] = Sampler(
                    {*planned.infrastructure, *planned.devices},
                    set(planned.devices),
                    own=lambda node=node: self._looks[node][1],  # type: ignore[misc]
                    read=lambda node=node: self._looks[node][0],  # type: ignore[misc]
                    dilation=self._site.spec.plan.dilation,
                    controlled=False,
                )
            sample = self._samplers[node].sample(at, 0.0)
            if sample is not None:
                found[planned.name] = sample
        return found

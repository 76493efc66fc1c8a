"""Random lives of a fleet: what happens at each instant, by a word and a client's name."""

from __future__ import annotations

from tests.agents.fleet import Fleet


class Life:
    """Makes happen what a word says. A test that notes trainings, messages or members overrides those
    methods."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet

    def happens(self, what: str, name: str) -> None:
        """One instant. What cannot happen does not."""
        fleet, device = self.fleet, self.fleet.devices[name]
        alone = list(fleet.server.clients) == [name]  # the last one stays, or the run would end
        match what:
            case "deliver" if device.inbox and device.core:
                fleet.deliver(name)
            case "finish" | "diverge" if device.training:
                self.finish(name, diverged=what == "diverge")
            case "arrive" if device.outbox:
                self.arrive(name)
            case "twice" if device.outbox:
                device.outbox.append(device.outbox[0])
                self.arrive(name)
            case "work" if device.core:
                self.work_off(name)
            case "lose model" if device.inbox:
                device.inbox.popleft()
            case "lose update" if device.outbox:
                device.outbox.popleft()
            case "reorder models":
                device.inbox.reverse()
            case "reorder updates":
                device.outbox.reverse()
            case "forget" if device.core is None:
                device.memory = {}
            case "crash" if device.core is None:
                self.start(name)
            case "crash" if not alone:
                fleet.crash(name)
            case "crash all":  # but one, at the same instant
                for other in [other for other in fleet.alive if other != name]:
                    if len(fleet.alive) > 1:
                        fleet.crash(other)
            case "reconnect" if device.core and not alone:
                fleet.reconnect(name)
            case "leave" if device.core and not alone:
                self.leave(name)
            case "connect anew" if device.core:
                fleet.connect_anew(name)
            case "lose all":
                fleet.lose_all()
            case "start anew":
                fleet.start_anew()
        fleet.end_instant()

    def start(self, name: str) -> None:
        self.fleet.start(name)

    def finish(self, name: str, *, diverged: bool = False) -> None:
        self.fleet.finish(name, diverged=diverged)

    def arrive(self, name: str) -> None:
        self.fleet.arrive(name)

    def leave(self, name: str) -> None:
        self.fleet.leave(name)

    def work_off(self, name: str) -> None:
        self.fleet.work_off(name)

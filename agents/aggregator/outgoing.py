"""What leaves when an instant is over: the broadcast, then the deferred models, then the requests, so
that no request overtakes the model that it is about. Pure."""

from __future__ import annotations

from collections.abc import Container, Iterator

from agents.rules.interface import Request, Send


class Outgoing:
    """At most one deferred model and one request of each client: a newer one takes its place.

    A request is remembered until an update of its client was of use (`satisfied`), as the rule waits for
    one: it may be sent anew (`request_again`)."""

    def __init__(self) -> None:
        self.waits = False
        """Whether `take` may have something. An attribute, as it is looked at after each input."""
        self._broadcast = False
        self._sends: dict[str, Send] = {}
        self._requests: dict[str, Request] = {}
        self._unsatisfied: dict[str, Request] = {}

    def broadcast(self) -> None:
        self._broadcast = self.waits = True

    def send(self, send: Send) -> None:
        self._sends[send.client] = send
        self.waits = True

    def request(self, request: Request) -> None:
        self._requests[request.client] = self._unsatisfied[request.client] = request
        self.waits = True

    def request_again(self, client: str) -> None:
        """What the rule has requested of `client`, if anything, has not come."""
        if client in self._unsatisfied:
            self._requests[client] = self._unsatisfied[client]
            self.waits = True

    def satisfied(self, client: str) -> None:
        """The rule is given an update of `client`."""
        self._unsatisfied.pop(client, None)
        self._requests.pop(client, None)

    def forget(self, client: str) -> None:
        """`client` is gone."""
        self.satisfied(client)
        self._sends.pop(client, None)

    def clear(self) -> None:
        """Nothing more is to leave."""
        self._broadcast = self.waits = False
        self._sends.clear()
        self._requests.clear()

    def take(self) -> tuple[bool, list[Send], list[Request]]:
        """Whether there is a broadcast, the deferred models, and the requests: they leave now."""
        taken = self._broadcast, [*self._sends.values()], [*self._requests.values()]
        self.clear()
        return taken

    def problems(self, present: Container[str]) -> Iterator[str]:
        """Describe what is impossible in this state."""
        if (self._broadcast or self._sends or self._requests) and not self.waits:
            yield "what leaves when the instant is over would stay"
        for client in self._sends | self._requests | self._unsatisfied:
            if client not in present:
                yield f"{client} is not present, and is to be sent something"

"""Messages at the end of an instant, after all inputs with the same time. No I/O and no clock.

The broadcast is sent first, then the deferred models, then the requests. So a client gets a model before
the request for an update that was trained from it.
"""

from __future__ import annotations

from collections.abc import Container, Iterator

from agents.rules.interface import RequestUpdate, Send


class Outgoing:
    """At most one model and one request per client; a newer one replaces an older one.

    A request is remembered until an update of the same client is passed to the rule (`close_request`).
    Until then `request_again` can repeat it.
    """

    def __init__(self) -> None:
        self._broadcast = False
        self._sends: dict[str, Send] = {}
        self._requests: dict[str, RequestUpdate] = {}
        self._open_requests: dict[str, RequestUpdate] = {}

    @property
    def is_empty(self) -> bool:
        return not (self._broadcast or self._sends or self._requests)

    def broadcast(self) -> None:
        self._broadcast = True

    def send(self, send: Send) -> None:
        self._sends[send.client] = send

    def has_model(self, client: str) -> bool:
        """Return whether a model for `client` waits."""
        return self._broadcast or client in self._sends

    def request(self, request: RequestUpdate) -> None:
        self._requests[request.client] = self._open_requests[request.client] = request

    def request_again(self, client: str) -> None:
        """No valid update has arrived. Do nothing if no request is open."""
        if client in self._open_requests:
            self._requests[client] = self._open_requests[client]

    def close_request(self, client: str) -> None:
        """An update of the client is passed to the rule."""
        self._open_requests.pop(client, None)
        self._requests.pop(client, None)

    def forget(self, client: str) -> None:
        self.close_request(client)
        self._sends.pop(client, None)

    def clear(self) -> None:
        self._broadcast = False
        self._sends.clear()
        self._requests.clear()

    def pop_all(self) -> tuple[bool, list[Send], list[RequestUpdate]]:
        """Whether a broadcast was waiting, the deferred models, and the requests."""
        taken = self._broadcast, [*self._sends.values()], [*self._requests.values()]
        self.clear()
        return taken

    def problems(self, present: Container[str]) -> Iterator[str]:
        for client in self._sends | self._requests | self._open_requests:
            if client not in present:
                yield f"{client} is not present, and is to be sent something"

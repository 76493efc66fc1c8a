"""Host names by which servers of this machine may be addressed.

By DNS rebinding, a foreign host name could resolve to this machine. A foreign page could then read the
pages of the testbed. Servers on the loopback interface therefore answer only requests to their own
names, and no requests from foreign pages.
"""

from __future__ import annotations

HOST = "127.0.0.1"
"""Loopback address, which can be reached only from this machine."""


class OwnHosts:
    def __init__(self, port: int) -> None:
        self.names = [f"{name}:{port}" for name in (HOST, "localhost", "[::1]")]

    def includes(self, host: str | None, origin: str | None) -> bool:
        """Whether a request with the headers Host and Origin is for this server, and not from a foreign
        page."""
        own = origin is None or origin.lower() in [f"http://{name}" for name in self.names]
        return own and host is not None and host.lower() in self.names

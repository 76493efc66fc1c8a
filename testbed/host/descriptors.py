"""How many file descriptors this process may have, and which numbers they get."""

from __future__ import annotations

import fcntl
import os
import resource

from testbed.errors import HostError

_SELECTABLE = 1024
"""select(), which paho calls, takes lower numbers alone."""
_OWN = 100
"""Beside those that are asked for."""


def raise_limit(count: int, what: str) -> None:
    """Let this process, and those that it starts, have `count` descriptors for `what` beside all that it
    needs for itself. Raises HostError if the hard limit is below that."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < count + _OWN:
        raise HostError(
            f"{what} take {count + _OWN:,} file descriptors, and this process may have {hard:,}: raise "
            "the hard limit (ulimit -Hn, or LimitNOFILE of the service)"
        )
    wanted = _SELECTABLE + count
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def renumber(descriptor: int) -> int:
    """`descriptor` under a number that leaves the low ones to those who call select(); under its own
    where there are no others."""
    try:
        moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _SELECTABLE)
    except OSError:
        return descriptor
    os.close(descriptor)
    return moved

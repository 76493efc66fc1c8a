"""File descriptors of this process: raising their limit, and moving them to high numbers."""

from __future__ import annotations

import fcntl
import os
import resource

from testbed.errors import HostError

_SELECTABLE = 1024
"""select(), which paho calls, supports only descriptors below this number."""
_OWN = 100
"""Descriptors that this process needs for itself."""


def raise_limit(count: int, what: str) -> None:
    """Allow `count` descriptors for `what` in addition to the process's own, by the soft limit. Children
    inherit the limit. Raises HostError if the hard limit is too low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < count + _OWN:
        raise HostError(
            f"{what} need {count + _OWN:,} file descriptors, but this process may have only {hard:,}: "
            "raise the hard limit (ulimit -Hn, or LimitNOFILE of the service)"
        )
    wanted = _SELECTABLE + count
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def renumber(descriptor: int) -> int:
    """Move `descriptor` to a high number, so that low numbers stay free for select(). If no high number
    is free, it is not moved."""
    try:
        moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _SELECTABLE)
    except OSError:
        return descriptor
    os.close(descriptor)
    return moved

"""The processes of a run, by component."""

from __future__ import annotations

import psutil

from testbed.host.forkserver import ForkedProgram


class Children(dict[str, psutil.Popen | ForkedProgram]):
    """By component: only the latest process of one that was restarted."""

    def is_alive(self, component: str) -> bool:
        return component in self and self[component].poll() is None

"""The processes of a run, by component."""

from __future__ import annotations

import psutil

from testbed.host.forkserver import ForkedProgram


class Children(dict[str, psutil.Popen | ForkedProgram]):
    """Processes of a run, by component. A component that was restarted has only its latest process
    here."""

    def is_alive(self, component: str) -> bool:
        return component in self and self[component].poll() is None

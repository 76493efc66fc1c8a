"""Logs of local processes, bounded: a process that prints for ever fills no disk."""

from __future__ import annotations

import os
import selectors
import threading
from pathlib import Path

from agents.disk import files
from testbed.host import descriptors

LOG_BYTES = 4 * 2**20
"""Of the latest of each log so much is kept at least, and twice as much at most."""
CUT = b"[what was printed before is not kept: a log has its latest 4 to 8 MiB]\n"
"""The line that stands where older ones were."""
_PIECE = 64 * 1024
"""Bytes that are read at once: what a pipe holds."""
_PAUSE_SECONDS = 0.01
"""Between two pieces: whoever prints faster waits, and does not keep the controller from its work."""


class LogWriter:
    """Writes what processes print, in a thread of its own, until `close`."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._logs: dict[Path, _Log] = {}
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def pipe(self, path: Path) -> int:
        """A descriptor to print to, for the log at `path`; the caller closes it."""
        path.touch()
        reading, writing = os.pipe()
        reading = descriptors.renumber(reading)  # with a thousand devices there are as many
        os.set_blocking(reading, False)
        with self._lock:
            self._selector.register(
                reading, selectors.EVENT_READ, self._logs.setdefault(path, _Log(path))
            )
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, daemon=True)
            self._thread.start()
        return writing

    def catch_up(self) -> None:
        """Write all that has been printed by now."""
        if not self._selector.get_map():  # it may be closed
            return
        self._pass(0.0)
        self._pass(0.0)  # a full pipe and the rest of a line

    def close(self) -> list[OSError]:
        """Write what is left, once the processes have ended. Returns why some could not be written."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.catch_up()
        with self._lock:
            for key in [*(self._selector.get_map() or {}).values()]:  # none, where it is closed already
                self._forget(key.fd)
            for log in self._logs.values():
                log.write(b"")  # there may be room again
            failures = [log.failure for log in self._logs.values() if log.failure is not None]
            self._logs.clear()
            self._selector.close()
        return failures

    def _serve(self) -> None:
        while not self._closing.wait(_PAUSE_SECONDS):
            self._pass(0.05)

    def _pass(self, timeout: float) -> None:
        """Read a piece of each that has printed; waits up to `timeout` seconds for the first."""
        for key, _ in self._selector.select(timeout):
            with self._lock:
                if self._selector.get_map().get(key.fd) is not key:  # the other thread found its end
                    continue
                try:
                    piece = os.read(key.fd, _PIECE)
                except BlockingIOError:  # the other thread has read it
                    continue
                if piece:
                    key.data.write(piece)
                else:
                    self._forget(key.fd)

    def _forget(self, descriptor: int) -> None:
        self._selector.unregister(descriptor)
        os.close(descriptor)


class _Log:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._unwritten = b""
        """Of what was printed: it waits for room on the disk, and only its latest is kept."""
        self.failure: OSError | None = None
        """Why something waits."""

    def write(self, piece: bytes) -> None:
        """Append what waits, and `piece`."""
        self._unwritten += piece
        try:
            with self._path.open("ab", buffering=0) as file:
                while self._unwritten:
                    self._unwritten = self._unwritten[file.write(self._unwritten) :]
                size = file.tell()
            if size > 2 * LOG_BYTES:
                self._cut(size)
            self.failure = None
        except OSError as error:
            error.filename = error.filename or str(self._path)
            self.failure = error
            if len(self._unwritten) > LOG_BYTES:
                self._unwritten = CUT + self._unwritten[-LOG_BYTES:].partition(b"\n")[2]

    def _cut(self, size: int) -> None:
        with self._path.open("rb") as file:
            file.seek(size - LOG_BYTES)
            file.readline()  # the rest of one that is cut
            left = file.read()
        with files.atomic_write(self._path) as partial:
            partial.write_bytes(CUT + left)

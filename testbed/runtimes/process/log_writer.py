"""Logs of local processes, of bounded size: one that prints endlessly cannot fill the disk."""

from __future__ import annotations

import os
import selectors
import threading
from pathlib import Path

from agents.disk import files
from testbed.host import processes

LOG_BYTES = 4 * 2**20
"""Latest output that each log keeps: at least this, at most twice as much."""
CUT = b"[earlier output was removed: a log keeps its latest 4 to 8 MiB]\n"
_PIECE = 64 * 1024
"""Bytes per read: the capacity of a pipe."""
_PAUSE_SECONDS = 0.01
"""Seconds between two reads of a pipe. A process that prints faster has to wait, and so does not slow
down the controller."""


class LogWriter:
    """Writes logs in a thread that runs until `close`."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._logs: dict[Path, _BoundedLog] = {}
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def pipe(self, path: Path) -> int:
        """Return a descriptor, which the caller has to close, whose output goes to the log at `path`."""
        path.touch()
        reading, writing = os.pipe()
        reading = processes.renumber(reading)  # one per device, of which there may be thousands
        os.set_blocking(reading, False)
        with self._lock:
            self._selector.register(
                reading, selectors.EVENT_READ, self._logs.setdefault(path, _BoundedLog(path))
            )
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, daemon=True)
            self._thread.start()
        return writing

    def catch_up(self) -> None:
        """All output so far."""
        if not self._selector.get_map():  # it may be closed
            return
        self._read_pipes(0.0)
        self._read_pipes(0.0)  # a pipe may hold one piece and the rest of a line

    def close(self) -> list[OSError]:
        """All processes must have ended before. Return the errors of logs that could not be written."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.catch_up()
        with self._lock:
            for key in [*(self._selector.get_map() or {}).values()]:  # empty if it is closed already
                self._forget(key.fd)
            for log in self._logs.values():
                log.write(b"")  # the disk may have space again
            failures = [log.failure for log in self._logs.values() if log.failure is not None]
            self._logs.clear()
            self._selector.close()
        return failures

    def _serve(self) -> None:
        while not self._closing.wait(_PAUSE_SECONDS):
            self._read_pipes(0.05)

    def _read_pipes(self, timeout: float) -> None:
        """Read a piece from each pipe that has output. Wait at most `timeout` seconds for output."""
        for key, _ in self._selector.select(timeout):
            with self._lock:
                if self._selector.get_map().get(key.fd) is not key:  # the other thread has closed it
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


class _BoundedLog:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._unwritten = b""
        """Latest output that could not be written because of `failure`; at most about LOG_BYTES."""
        self.failure: OSError | None = None
        """Error of the last attempt to write."""

    def write(self, piece: bytes) -> None:
        """Append what is unwritten, then `piece`."""
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
            file.readline()  # skip the rest of a cut line
            left = file.read()
        with files.atomic_write(self._path) as partial:
            partial.write_bytes(CUT + left)

"""Build missing images while packages are installed: `python -m testbed.images`, started by set-up.

Only packages of `testbed.installing.__main__.BUILDERS` may be imported here. Set-up writes a line to
standard input when all packages are installed. The download of the libraries waits for it, because the
build of PyTorch follows from the installed one. If set-up ends early, standard input ends, and the build
with it. Without an engine that can run devices nothing is done.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

from testbed import images
from testbed.errors import TestbedError
from testbed.host import docker_engine, signals


def main() -> None:
    signals.interrupt_once()
    installed = threading.Event()
    try:
        threading.Thread(target=_listen, args=(installed,), daemon=True).start()
        if docker_engine.is_available():
            with docker_engine.connect_fit() as client:
                images.ensure(client, _print_line, installed=installed)
    except TestbedError as error:
        sys.exit(f"  images: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


def _listen(installed: threading.Event) -> None:
    # Not by sys.stdin: a thread that waits in its buffer would disturb the interpreter's end.
    if os.read(0, 1):
        installed.set()
        os.read(0, 1)
    # To the main thread: it may wait for a lock, which a signal to another thread would not end.
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def _print_line(line: str) -> None:
    sys.stdout.write(f"  {line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()

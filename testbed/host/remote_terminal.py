"""Connection of the user's terminal with a process elsewhere."""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import termios
import tty
from collections.abc import Callable


def is_interactive() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def connect(other: socket.socket, resize: Callable[[int, int], None]) -> None:
    """Forward the user's keys to `other`, and data from `other` to the screen, until `other` closes.
    Both are forwarded unchanged. Ctrl-C is forwarded like any key. `resize` is called with the screen's
    rows and columns, now and whenever the size changes."""
    keys, screen = sys.stdin.fileno(), sys.stdout.fileno()

    def send_size(*_: object) -> None:
        size = os.get_terminal_size(screen)
        resize(size.lines, size.columns)

    before, on_change = termios.tcgetattr(keys), signal.signal(signal.SIGWINCH, send_size)
    try:
        tty.setraw(keys, termios.TCSANOW)  # keys that were typed before are kept
        send_size()
        while True:
            ready, _, _ = select.select([other, keys], [], [])
            if other in ready:
                output = other.recv(65_536)
                if not output:
                    return
                while output:
                    output = output[os.write(screen, output) :]
            if keys in ready:
                typed = os.read(keys, 4096)
                if not typed:  # the terminal was closed
                    return
                other.sendall(typed)
    finally:
        signal.signal(signal.SIGWINCH, on_change)
        termios.tcsetattr(keys, termios.TCSADRAIN, before)

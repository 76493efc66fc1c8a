"""The user's terminal, connected with a process elsewhere."""

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
    """Whether a person is at both ends of this process."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def connect(other: socket.socket, resize: Callable[[int, int], None]) -> None:
    """Pass on, as they are, keys to `other` and its output to the screen, until `other` ends. Ctrl-C is
    a key as any. `resize` is told the screen's rows and columns, now and when they change."""
    keys, screen = sys.stdin.fileno(), sys.stdout.fileno()

    def send_size(*_: object) -> None:
        size = os.get_terminal_size(screen)
        resize(size.lines, size.columns)

    before, on_change = termios.tcgetattr(keys), signal.signal(signal.SIGWINCH, send_size)
    try:
        tty.setraw(keys, termios.TCSANOW)  # what has been typed ahead is not lost
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
                if not typed:  # the terminal is gone
                    return
                other.sendall(typed)
    finally:
        signal.signal(signal.SIGWINCH, on_change)
        termios.tcsetattr(keys, termios.TCSADRAIN, before)

"""`make platforms`: the testbed on other engines, kernels, architectures and Python versions.

Each platform is a `Machine` (machine.py): a guest under QEMU (guests.py), or the engine of another
Debian release in a chroot on this host (engines.py). The checks of checks.py run on it, and
docs/platforms.md has the table of what passed.
"""

"""`make platforms`: the testbed on other engines, kernels, architectures and Python versions.

Each platform is a `Machine` (tests/platforms/machine.py): a guest under QEMU (tests/platforms/guests.py), or
the engine of another Debian release in a chroot on this host (tests/platforms/engines.py). The checks of
tests/platforms/checks.py run on it, and docs/platforms.md has the table of what passed.
"""

"""`make platforms`: the testbed on other engines, kernels, architectures and Python versions.

Each platform is a `Machine` (tests/platforms/machine.py): a guest under QEMU (tests/platforms/guests.py)
or the engine of another Debian release on this host (tests/platforms/engines.py).
tests/platforms/checks.py has the checks that run on it, docs/evidence/platforms.md the table of what
passed.
"""

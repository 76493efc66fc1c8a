"""Every error that the testbed raises for its user, in one tree.

    TestbedError            shown as a message without traceback; gives the CLI its exit code
    ├── BadInputError       2: what the user wrote cannot be done: the message names place and mend
    │   └── yamlfile.FaultyFileError   in a file: all that is wrong with it, each with its place
    ├── HostError           1: this machine lacks something: the message names the mending command
    └── RunFailedError      1: a run began and did not end well

Errors of other libraries (docker, yaml, pydantic, OSError) are mapped to these where they enter.
"""

from __future__ import annotations


class TestbedError(Exception):
    """Something to tell the user, in full sentences; the CLI prints it and exits with `exit_code`."""

    __test__ = False  # not a test class, whatever pytest thinks of its name
    exit_code = 1


class BadInputError(TestbedError):
    exit_code = 2


class HostError(TestbedError):
    pass


class RunFailedError(TestbedError):
    pass

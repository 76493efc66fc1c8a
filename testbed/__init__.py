"""Controller and command line: topology, plan, data, runtimes, and everything the user sees."""

from testbed import bundle

bundle.make_importable()

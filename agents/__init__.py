"""Everything that runs inside a container: wire format, rules, tasks, the client, the aggregator.

This package stands alone: it imports neither `analysis` nor `testbed`.
"""

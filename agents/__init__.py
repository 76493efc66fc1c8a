"""Code that runs inside containers: messages, rules, tasks, the client, the aggregator and more.

This package imports neither `analysis` nor `testbed`.
"""

"""Code that runs inside containers: messages, rules, tasks, the client, the aggregator and more. Imports
neither `analysis` nor `testbed`."""

"""Tables, metrics, charts, comparison and report of run directories. Does not import `testbed`."""

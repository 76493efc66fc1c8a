"""The benchmark of asynchronous rules in topologies/benchmark: runs, ranks, table and page."""

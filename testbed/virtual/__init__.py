"""Virtual time: one process simulates the fleet. The aggregation rule and the cores of aggregator and
clients are the real ones."""

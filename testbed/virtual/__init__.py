"""Virtual time: one process simulates the fleet around the real rule, aggregator and client cores."""

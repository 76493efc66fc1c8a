"""The machine that runs are on: engine, kernel, signals, processes, cache."""

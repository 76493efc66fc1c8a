"""The machine that runs use: Docker engine, kernel, signals, processes, cache."""

"""The run directory: its files, reading them as they grow, users' commands to a live run."""

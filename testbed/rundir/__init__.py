"""The run directory: its files, reading them as they grow, commands in it."""

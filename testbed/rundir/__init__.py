"""The run directory: its files, readers of files that grow, and users' commands to a live run."""

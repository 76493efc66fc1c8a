"""A run as its user watches it: terminal, full screen and plain lines."""

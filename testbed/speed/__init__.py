"""Speeds of this host and of other machines in the kinds of work of a training."""

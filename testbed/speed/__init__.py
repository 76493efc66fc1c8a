"""Speeds of this host and of other machines in the kinds of work that training consists of."""

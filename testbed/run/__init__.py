"""A run from its topology to its end, and what can be done with it then."""

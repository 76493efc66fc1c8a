"""The papers' experiments in virtual time, compared with what the papers claim."""

"""A user's own tasks and rules, as far as the controller needs to know them (docs/own-code.md)."""

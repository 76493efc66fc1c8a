"""A user's own tasks and rules, as the controller sees them (docs/own-code.md)."""

"""A user's own tasks and rules, as the controller sees them (docs/guide/own-code.md)."""

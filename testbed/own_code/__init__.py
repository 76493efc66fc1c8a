"""A user's own tasks and rules, as far as the controller needs to know them (docs/guide/own-code.md)."""

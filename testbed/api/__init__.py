"""Functions and classes of `import testbed` (docs/guide/python.md). The commands call only these
functions."""

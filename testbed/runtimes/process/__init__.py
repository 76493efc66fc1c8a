"""The `process` runtime: devices are processes of this host."""

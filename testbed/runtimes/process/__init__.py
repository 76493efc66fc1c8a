"""The `process` runtime: devices as processes of this host."""

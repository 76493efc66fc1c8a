"""The `docker` runtime: devices in containers of one engine."""

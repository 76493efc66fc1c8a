"""The `docker` runtime: devices are containers of one Docker engine."""

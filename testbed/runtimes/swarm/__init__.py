"""The `swarm` runtime: devices are containers on the nodes of a Docker Swarm."""

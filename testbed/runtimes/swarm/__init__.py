"""The `swarm` runtime: devices in containers on the nodes of a Docker Swarm."""

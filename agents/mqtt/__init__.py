"""MQTT: topics, the connection, large payloads in chunks, what waits and what is refused."""

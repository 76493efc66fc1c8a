"""MQTT: topics, connections, large payloads in chunks, the queue of received messages, and rate
limits."""

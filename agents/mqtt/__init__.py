"""MQTT: topics, the connection, large payloads in chunks, the queue of received messages, rate
limits."""

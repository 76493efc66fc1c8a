"""The way between the devices and the broker: delay, jitter and loss of their links."""

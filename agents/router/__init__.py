"""The router between the devices and the broker, which emulates delay, jitter and loss of the devices'
links."""

"""The router between the devices and the broker. It emulates delay, jitter and loss of the devices'
links."""

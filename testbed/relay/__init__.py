"""Link shaper of the `process` runtime: a TCP relay in userspace between the devices and the broker."""

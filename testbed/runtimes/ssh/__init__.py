"""Real devices, reached by the system's `ssh`, beside the devices that another runtime emulates."""

"""GPUs of devices, and parts of GPUs."""

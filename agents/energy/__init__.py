"""Energy of a device: its power settings, its battery and charger, and exact accounting. No I/O and no
clock."""

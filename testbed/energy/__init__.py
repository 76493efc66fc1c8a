"""Energy of the devices of a run: power draw, battery, charger."""

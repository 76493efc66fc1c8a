"""Programs that run on real devices, which are reached by SSH."""

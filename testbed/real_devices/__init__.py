"""Real devices beside emulated ones, reached by SSH."""

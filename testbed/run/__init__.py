"""One run, from the topology to the end of the run, and what users can do with the run afterwards."""

"""One run from its topology to its end, and what users can do with it afterwards."""

"""Models as flat vectors, and their buffers."""

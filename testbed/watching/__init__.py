"""Views of a run on a terminal (full screen or plain lines), and Prometheus metrics."""

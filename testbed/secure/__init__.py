"""Secure sums of updates."""

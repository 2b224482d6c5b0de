"""Peers that do the same work in the same run, so that a speed is always a ratio."""

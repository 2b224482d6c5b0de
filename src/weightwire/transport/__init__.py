"""Byte streams to a peer, and the host memory they fill."""

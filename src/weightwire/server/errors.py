"""What a session raises to itself."""

from __future__ import annotations

__all__ = ["BadRequest"]


class BadRequest(Exception):
    """A request that breaks the protocol or its bounds; the text says how. It ends the client that sent it, and only
    that.
    """

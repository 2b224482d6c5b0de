"""What a session raises to itself, and how the failure of somebody else's code is put in the log."""

from __future__ import annotations

import logging

__all__ = ["BadMessage", "BadRequest", "log_failure"]


class BadRequest(Exception):
    """A request that breaks the protocol or its bounds; the text says how. It ends the client that sent it, and only
    that.
    """


class BadMessage(BadRequest):
    """One that breaks the protocol's form, whatever it asks for: in its order, its command or its length."""


def log_failure(logger: logging.Logger, error: BaseException, message: str, *arguments: object) -> None:
    """One line at ERROR, which ends with what ``error`` is; where it came from at DEBUG."""
    text = " ".join(str(error).split())
    kind = type(error).__name__
    logger.error(message + ": %s", *arguments, f"{kind}: {text}" if text else kind)
    logger.debug("the failure before came from", exc_info=error)

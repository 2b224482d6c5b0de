"""What a push may be asked to do, checked before anything is opened or sent."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

from weightwire.config import CACHE_MODES, READ_MODES, LoadConfig
from weightwire.errors import ConfigError
from weightwire.index import HashIndex, IndexChoice, check_index, index_for

__all__ = ["ProgressCallback", "PushOptions"]

ProgressCallback = Callable[[str, int, int], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class PushOptions:
    """The keyword arguments of `Connection.push`. Raises ConfigError for what cannot be used.

    ``load`` has what ``threads`` and ``in_flight`` come to, the environment and this machine's CPUs considered. A push
    that is not ``optimized`` has no threads and no index, whatever is asked for.
    """

    cache: str = "auto"
    verify: bool = False
    include: str | None = None
    layers: str | None = None
    progress: ProgressCallback | None = None
    device: int = 0
    threads: int | None = None
    in_flight: int | None = None
    index: IndexChoice = None
    probe: bool | None = None
    drop_behind: bool = False
    read: str = "auto"
    optimized: bool = True
    load: LoadConfig = field(init=False)

    def __post_init__(self) -> None:
        if self.cache not in CACHE_MODES:
            raise ConfigError(f"cache: {self.cache!r} is not one of {', '.join(CACHE_MODES)}")
        if self.read not in READ_MODES:
            raise ConfigError(f"read: {self.read!r} is not one of {', '.join(READ_MODES)}")
        if self.progress is not None and not callable(self.progress):
            raise ConfigError("progress: it cannot be called", hint="give a function of (name, done, total)")
        for name in ("verify", "drop_behind"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}: {getattr(self, name)!r} is neither True nor False")
        if self.probe is not None and not isinstance(self.probe, bool):
            raise ConfigError(f"probe: {self.probe!r} is none of True, False and None")
        check_index(self.index)
        # Where no cache is asked nothing is hashed ahead, and how does not matter.
        environ: dict[str, str] | None = {} if self.cache == "never" else None
        load = LoadConfig.resolve(threads=self.threads, in_flight=self.in_flight, environ=environ)
        object.__setattr__(self, "load", load if self.optimized else replace(load, threads=0))

    def uses_cache(self, server_has_cache: bool) -> bool:
        """Whether a server that said so (or not) in HELLO is asked for tensors that its cache may have."""
        return self.cache == "always" or (self.cache == "auto" and server_has_cache)

    @property
    def probes(self) -> bool:
        """Whether hits are looked at: by default where the server need not be one that checks its cache itself."""
        return self.cache == "always" if self.probe is None else self.probe

    def opened_index(self) -> AbstractContextManager[HashIndex | None]:
        """Inside: the index to use, if any; closed on leaving, unless it is the caller's own (``index`` itself)."""
        return index_for(self.index) if self.optimized else nullcontext()

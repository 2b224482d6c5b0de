"""weightwire moves model weights to the machines that will run them, over the ggml RPC protocol.

The public names, nothing else; each is imported when first used, so that ``import weightwire`` costs next to nothing.
"""

from __future__ import annotations

TYPE_CHECKING = False  # typing's own would have to be imported
if TYPE_CHECKING:
    from weightwire.cache import TensorCache
    from weightwire.client import Connection, RemoteTensor, Target, connect, push_all, warm
    from weightwire.errors import WeightwireError
    from weightwire.hashing import cpu_features, fnv1a64, fnv1a64_many
    from weightwire.model import open_model
    from weightwire.profile import LoadProfile
    from weightwire.server import Destination, ServedTensor, Server, ServerStats

__version__ = "0.1.0"

__all__ = [
    "Connection",
    "Destination",
    "LoadProfile",
    "RemoteTensor",
    "ServedTensor",
    "Server",
    "ServerStats",
    "Target",
    "TensorCache",
    "WeightwireError",
    "__version__",
    "connect",
    "cpu_features",
    "fnv1a64",
    "fnv1a64_many",
    "open_model",
    "push_all",
    "warm",
]

_HOME = {
    "Connection": "client",
    "Destination": "server",
    "LoadProfile": "profile",
    "RemoteTensor": "client",
    "ServedTensor": "server",
    "Server": "server",
    "ServerStats": "server",
    "Target": "client",
    "TensorCache": "cache",
    "WeightwireError": "errors",
    "connect": "client",
    "cpu_features": "hashing",
    "fnv1a64": "hashing",
    "fnv1a64_many": "hashing",
    "open_model": "model",
    "push_all": "client",
    "warm": "client",
}


def __getattr__(name: str) -> object:
    if name == "rdma":  # a module
        from importlib import import_module

        return import_module(f"{__name__}.rdma")
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value: object = getattr(import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

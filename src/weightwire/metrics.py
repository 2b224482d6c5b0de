"""A server's numbers for Prometheus: a collector for a registry of yours, and an HTTP endpoint of its own.

Needs prometheus_client (the extra ``weightwire[metrics]``); importing this module without it raises ImportError that
says so. Nothing else of weightwire imports it. docs/embedding.md lists the metrics.
"""

from __future__ import annotations

import logging
import os
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Iterator
from http.server import HTTPServer
from typing import TYPE_CHECKING, Any, Final, Self
from urllib.parse import urlsplit

try:
    from prometheus_client import CollectorRegistry, MetricsHandler
    from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
except ModuleNotFoundError as error:  # no other: one that is there and cannot be loaded says why
    raise ModuleNotFoundError(
        "weightwire.metrics needs prometheus_client: pip install prometheus_client (or 'weightwire[metrics]')",
        name="prometheus_client",
    ) from error

from weightwire import __version__
from weightwire.threads import Thread, start
from weightwire.transport.address import format_endpoint
from weightwire.transport.tcp import listen_tcp

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

    from weightwire.server import Server

__all__ = ["MetricsEndpoint", "ServerCollector"]

logger = logging.getLogger(__name__)

_PATH: Final = "/metrics"
_MAX_SCRAPES: Final = 16
"""Connections to the endpoint at once; others are closed unanswered."""

_PATIENCE: Final = 10.0
"""Seconds that a scraper may take for its next byte."""

_POLL: Final = 0.1
_JOIN_SECONDS: Final = 5.0

_COUNTERS: Final = {
    "weightwire_accepted_connections": ("connections_accepted", "Connections that were given a place."),
    "weightwire_refused_connections": ("connections_refused", "Connections turned away because the server was full."),
    "weightwire_failed_connections": ("connections_failed", "Connections that ended in a failure."),
    "weightwire_bad_requests": ("bad_requests", "Requests for what cannot be had; each ends its connection."),
    "weightwire_protocol_errors": ("protocol_errors", "Messages that break the form; each ends its connection."),
    "weightwire_completed_tensors": ("tensors_completed", "Tensors that arrived to their last byte."),
    "weightwire_cache_hits": ("cache_hits", "Tensors that were filled from the cache."),
    "weightwire_cache_misses": ("cache_misses", "Tensors asked for that the cache did not have."),
    "weightwire_cache_filled_bytes": ("cache_filled_bytes", "Bytes that were filled from the cache."),
    "weightwire_cache_corrupt_entries": ("cache_corrupt", "Entries found bad and moved to quarantine."),
    "weightwire_cache_saved_entries": ("cache_saved", "Entries stored."),
    "weightwire_cache_save_failures": ("cache_save_failures", "Entries that could not be stored."),
}

_GAUGES: Final = {
    "weightwire_uptime_seconds": ("uptime", "Since the server was started."),
    "weightwire_waiting_connections": ("connections_waiting", "Connections that wait for a place."),
    "weightwire_retained_tensors": ("tensors_retained", "Tensors listed by name."),
    "weightwire_allocated_bytes": ("bytes_allocated", "Memory given out for tensors."),
    "weightwire_memory_limit_bytes": ("bytes_limit", "Most memory to give out for tensors."),
    "weightwire_rdma_pinned_bytes": ("rdma_pinned_bytes", "Memory pinned for the rings of RDMA connections."),
    "weightwire_cache_pending_entries": ("cache_pending", "Entries on their way to the disk."),
}

_BY_TRANSPORT: Final = (
    (GaugeMetricFamily, "weightwire_open_connections", "open_connections", "Clients connected, by transport."),
    (CounterMetricFamily, "weightwire_connections", "connections", "Clients that have connected, by transport."),
    (CounterMetricFamily, "weightwire_rx_bytes", "bytes_received", "Bytes received, payload and framing."),
    (CounterMetricFamily, "weightwire_tx_bytes", "bytes_sent", "Bytes sent, payload and framing."),
)


class ServerCollector:
    """Reads ``server.stats()`` whenever the registry it is registered with is scraped.

    ``registry.register(ServerCollector(server))``; the metrics carry no name of the server, so two servers of one
    process go into a registry each (prometheus_client refuses the second with ValueError).
    """

    def __init__(self, server: Server) -> None:
        self._server = server

    def describe(self) -> Iterator[Metric]:
        """The metrics, for the registry to see whether their names are taken."""
        return self.collect()

    def collect(self) -> Iterator[Metric]:
        """All metrics of this moment, from one snapshot."""
        stats = self._server.stats()
        yield InfoMetricFamily("weightwire_build", "The version of weightwire.", {"version": __version__})
        for family, name, field, text in _BY_TRANSPORT:
            metric = family(name, text, labels=["transport"])
            for transport in ("tcp", "rdma"):
                metric.add_metric([transport], getattr(getattr(stats, transport), field))
            yield metric
        for name, (field, text) in _COUNTERS.items():
            yield CounterMetricFamily(name, text, getattr(stats, field))
        for name, (field, text) in _GAUGES.items():
            yield GaugeMetricFamily(name, text, getattr(stats, field))


class MetricsEndpoint:
    """Serves the metrics of ``server`` over HTTP, on threads of its own, from the moment it is made until `close`.

    ``http://host:port/metrics``, in the formats that prometheus_client writes, and nothing else: there is no
    authentication and no encryption. ``host`` and ``port`` as for `Server`, 0 takes a free one. A context manager.
    Raises TransportError where it cannot listen there (a name is looked up for 30 seconds at most) or have a thread,
    ConfigError for a host or port that is none.
    """

    def __init__(self, server: Server, host: str = "127.0.0.1", port: int = 0) -> None:
        registry = CollectorRegistry()
        registry.register(ServerCollector(server))
        self._listeners: list[_Listener] = []
        self._threads: list[Thread] = []
        self._lock = threading.Lock()
        self._process = os.getpid()
        sockets = listen_tcp(host, port)
        names = [each.getsockname() for each in sockets]
        self._port: int = names[0][1]
        self._url = f"http://{format_endpoint(names[0][0], self._port)}{_PATH}"
        try:
            for listening in sockets:
                self._listeners.append(_Listener(listening, registry))
            for listener in self._listeners:
                thread = Thread(target=listener.serve_forever, args=(_POLL,), name="weightwire-metrics", daemon=True)
                self._threads.append(thread)  # before it is started: an interrupt may come right after
                start(thread)
        except BaseException:
            self.close()
            for listening in sockets:
                listening.close()
            raise

    @property
    def port(self) -> int:
        """The port it listens on."""
        return self._port

    @property
    def url(self) -> str:
        """Where the metrics are, at the first address it listens on."""
        return self._url

    def close(self) -> None:
        """Stop listening, end every scrape, and end the threads. Idempotent; never raises.

        In a fork of the process that made it, only close that process's copies.
        """
        if os.getpid() != self._process:
            # The threads are not here, and one of them may have held a lock.
            for listener in self._listeners:
                listener.socket.close()
            return
        with self._lock:
            threads, self._threads = self._threads, []
            listeners, self._listeners = self._listeners, []
        for listener, thread in zip(listeners, threads, strict=False):
            if not thread.ended():  # or it never began, and would be waited for
                listener.shutdown()
        for listener in listeners:
            listener.server_close()
        for thread in threads:
            thread.join(_JOIN_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class _Scrape(MetricsHandler):
    """One request: prometheus_client's answer at one path."""

    timeout = _PATIENCE

    def do_GET(self) -> None:
        if urlsplit(self.path).path != _PATH:
            self.send_error(404, explain=f"The metrics are at {_PATH}.")
            return
        super().do_GET()


class _Listener(HTTPServer):
    """One listening socket. Each connection has a thread, and all of them end with it."""

    def __init__(self, listening: socket.socket, registry: CollectorRegistry) -> None:
        name = listening.getsockname()
        # Not HTTPServer's own: it would make a socket, and ask the name service what this machine is called.
        socketserver.BaseServer.__init__(self, name, type("Scrape", (_Scrape,), {"registry": registry}))
        self.socket = listening
        self.socket.setblocking(False)
        self.server_name, self.server_port = name[:2]
        self._lock = threading.Lock()
        self._scrapes: dict[Any, Thread] = {}

    def get_request(self) -> tuple[Any, Any]:
        """A connection; it blocks, unlike the socket it came from."""
        try:
            connection, address = super().get_request()
        except BlockingIOError:
            raise
        except OSError:
            # No descriptor is free, say: the socket stays readable, so without a pause this would spin.
            time.sleep(_POLL)
            raise
        connection.setblocking(True)
        return connection, address

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer on a thread of its own, unless there are too many."""
        thread = Thread(target=self._answer, args=(request, client_address), name="weightwire-scrape", daemon=True)
        with self._lock:
            room = len(self._scrapes) < _MAX_SCRAPES
            if room:
                self._scrapes[request] = thread
        if not room:
            logger.debug("metrics: %s turned away, %d are being answered already", client_address[0], _MAX_SCRAPES)
            self.shutdown_request(request)
            return
        try:
            thread.start()
        except RuntimeError:
            with self._lock:
                del self._scrapes[request]
            raise

    def _answer(self, request: Any, client_address: Any) -> None:
        try:
            self.finish_request(request, client_address)
        except Exception:
            self.handle_error(request, client_address)
        finally:
            with self._lock:
                del self._scrapes[request]
            self.shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A scraper that leaves early is nothing to tell anybody; anything else is."""
        serious = not isinstance(sys.exception(), OSError)
        logger.log(
            logging.ERROR if serious else logging.DEBUG, "metrics: answering %s failed", client_address, exc_info=True
        )

    def server_close(self) -> None:
        """Stop listening, and end the connections."""
        self.socket.close()
        with self._lock:
            scrapes = dict(self._scrapes)
            for request in scrapes:
                # With the lock held it has not been closed, so its number is no other's.
                try:
                    request.shutdown(socket.SHUT_RDWR)
                except OSError:
                    logger.debug("metrics: a scraper has gone")
        for thread in scrapes.values():
            thread.join(_JOIN_SECONDS)

"""Settings: what wins over what, and which values are refused, by name."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest

from weightwire.config import (
    ClientConfig,
    LoadConfig,
    PathConfig,
    ServerConfig,
    _cgroup_quota,
    available_cpus,
    parse_choice,
    parse_host,
    parse_port,
    parse_seconds,
    parse_size,
    parse_switch,
    parse_threads,
    parse_version,
)
from weightwire.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("1", 1),
        ("4096", 4096),
        ("512MiB", 512 << 20),
        ("1GiB", 1 << 30),
        ("2G", 2 << 30),
        ("2gb", 2 << 30),
        ("10 KiB", 10 << 10),
        ("1.5g", 3 << 29),
        (".5M", 1 << 19),
        ("3TiB", 3 << 40),
        ("100b", 100),
        (" 7k ", 7 << 10),
        ("9223372036854775807", 2**63 - 1),
    ],
)
def test_sizes_that_are_read(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(
    "text",
    ["", "0", "0GiB", "-1", "1PiB", "GiB", "1.2.3M", "1e9", "0x10", "nan", "9223372036854775808", "9999999T", "1 G B"],
)
def test_sizes_that_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="size"):
        parse_size(text)


def test_seconds() -> None:
    assert parse_seconds("0.25") == 0.25
    for text in ("0", "-1", "nan", "inf", "soon", "1e30", ""):
        with pytest.raises(ValueError, match="seconds"):
            parse_seconds(text)


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("127.0.0.1", "127.0.0.1"),
        (" node-7.example ", "node-7.example"),
        ("::", "::"),
        ("[::1]", "::1"),
        ("fe80::1%eth0", "fe80::1%eth0"),
        ("[fe80::1%eth0]", "fe80::1%eth0"),
        ("bücher.example", "bücher.example"),
    ],
)
def test_hosts(text: str, host: str) -> None:
    assert parse_host(text) == host
    assert parse_host(host) == host


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "it is empty"),
        ("  ", "it is empty"),
        ("127.0.0.1:5000", "names a port"),
        ("node:", "names a port"),
        ("[::1]:5000", "names a port"),
        ("[::1]x", "not an address in brackets"),
        ("[::1", "not an address in brackets"),
        ("[127.0.0.1]", "not an IPv6 address"),
        ("[]", "not an IPv6 address"),
        ("1::2::3", "not an IPv6 address"),
        ("fe80::1%", "not an IPv6 address|network interface"),
        ("fe80::1%a b", "network interface"),
        ("*", "not a host name"),
        ("a b", "not a host name"),
        ("a\0b", "not a host name"),
        ("http://a", "not an IPv6 address"),
    ],
)
def test_hosts_that_are_refused(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_host(text)


def test_ports() -> None:
    assert [parse_port(text) for text in ("0", "65535")] == [0, 65535]
    for text in ("65536", "-1", "http", "", "1.0", "٣"):
        with pytest.raises(ValueError, match="port"):
            parse_port(text)


def test_versions() -> None:
    assert parse_version(" 7.0.0 ") == "7.0.0"
    assert parse_version("3.6") == "3.6"
    for text in ("7", "7.x", "v7.0", "7.0.0.0", "", "٧.0"):
        with pytest.raises(ValueError, match="version"):
            parse_version(text)


def test_choices() -> None:
    assert parse_choice(("a", "b"))(" B ") == "b"
    with pytest.raises(ValueError, match="one of a, b"):
        parse_choice(("a", "b"))("c")


def test_an_argument_wins_over_the_environment_and_that_over_the_default() -> None:
    environ = {"WEIGHTWIRE_TIMEOUT": "5", "WEIGHTWIRE_CACHE": "never"}
    assert ClientConfig.resolve(environ={}) == ClientConfig(timeout=30.0, protocol=None, cache="auto")
    assert ClientConfig.resolve(environ=environ) == ClientConfig(timeout=5.0, protocol=None, cache="never")
    assert ClientConfig.resolve(timeout=1.0, cache="always", environ=environ).timeout == 1.0
    assert ClientConfig.resolve(cache="always", environ=environ).cache == "always"


def test_the_process_environment_is_read_when_none_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTWIRE_PROTOCOL", "5.0.0")
    assert ClientConfig.resolve().protocol == "5.0.0"


def test_every_server_setting_has_its_variable() -> None:
    environ = {
        "WEIGHTWIRE_SERVER_HOST": "::1",
        "WEIGHTWIRE_SERVER_PORT": "0",
        "WEIGHTWIRE_SERVER_CACHE": "/var/cache/rpc",
        "WEIGHTWIRE_SERVER_PROTOCOL": "5.1",
        "WEIGHTWIRE_SERVER_RETAIN": "Process",
        "WEIGHTWIRE_SERVER_MEMORY": "16GiB",
        "WEIGHTWIRE_SERVER_CACHE_VERIFY": "Size",
        "WEIGHTWIRE_SERVER_METRICS_PORT": "0",
        "WEIGHTWIRE_SERVER_METRICS_HOST": "[::1]",
    }
    config = ServerConfig.resolve(environ=environ)
    assert config == ServerConfig(
        "::1", 0, "/var/cache/rpc", "5.1", "process", 16 << 30, cache_verify="size", metrics_host="::1", metrics_port=0
    )
    assert ServerConfig.resolve(port=7, environ=environ).port == 7
    assert ServerConfig.resolve(metrics_port=7, environ=environ).metrics_port == 7
    assert ServerConfig.resolve(environ={}).metrics_port is None


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("WEIGHTWIRE_SERVER_PORT", "70000"),
        ("WEIGHTWIRE_SERVER_HOST", ""),
        ("WEIGHTWIRE_SERVER_CACHE", " "),
        ("WEIGHTWIRE_SERVER_CACHE", "a\0b"),
        ("WEIGHTWIRE_SERVER_HOST", "127.0.0.1:5000"),
        ("WEIGHTWIRE_SERVER_PROTOCOL", "seven"),
        ("WEIGHTWIRE_SERVER_RETAIN", "forever"),
        ("WEIGHTWIRE_SERVER_MEMORY", "lots"),
        ("WEIGHTWIRE_SERVER_METRICS_PORT", "70000"),
        ("WEIGHTWIRE_SERVER_METRICS_HOST", "*"),
    ],
)
def test_a_bad_server_variable_is_named(variable: str, value: str) -> None:
    with pytest.raises(ConfigError, match=variable) as caught:
        ServerConfig.resolve(environ={variable: value})
    assert value in caught.value.detail or repr(value) in caught.value.detail
    assert caught.value.hint


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        ({"host": ""}, "--host"),
        ({"host": "[::1]:7"}, "--host"),
        ({"cache": ""}, "--cache"),
        ({"retain": "for ever"}, "--retain"),
        ({"protocol": "seven"}, "--protocol"),
        ({"metrics_host": "0.0.0.0:9090"}, "--metrics-host"),
    ],
)
def test_a_bad_server_option_is_named(arguments: dict[str, str], option: str) -> None:
    with pytest.raises(ConfigError, match=option):
        ServerConfig.resolve(**arguments, environ={})  # type: ignore[arg-type]


def test_brackets_are_taken_off_an_option_too() -> None:
    assert ServerConfig.resolve(host="[::1]", environ={}).host == "::1"


@pytest.mark.parametrize(
    ("variable", "value"), [("WEIGHTWIRE_TIMEOUT", "0"), ("WEIGHTWIRE_PROTOCOL", "7"), ("WEIGHTWIRE_CACHE", "yes")]
)
def test_a_bad_client_variable_is_named_unless_an_argument_makes_it_moot(variable: str, value: str) -> None:
    with pytest.raises(ConfigError, match=variable):
        ClientConfig.resolve(environ={variable: value})
    given = ClientConfig.resolve(timeout=1.0, protocol="7.0", cache="auto", environ={variable: value})
    assert given == ClientConfig(1.0, "7.0", "auto")


def test_a_verb_reads_no_variables_of_settings_it_does_not_have() -> None:
    environ = {"WEIGHTWIRE_TIMEOUT": "5", "WEIGHTWIRE_CACHE": "x", "WEIGHTWIRE_PROTOCOL": "x"}
    assert ClientConfig.resolve(environ=environ, settings=("timeout",)) == ClientConfig(timeout=5.0)
    with pytest.raises(ConfigError, match="WEIGHTWIRE_PROTOCOL"):
        ClientConfig.resolve(environ=environ, settings=("timeout", "protocol"))


def test_settings_do_not_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        ClientConfig().timeout = 1.0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("config", "variable"), [(ClientConfig, "WEIGHTWIRE_TRANSPORT"), (ServerConfig, "WEIGHTWIRE_SERVER_TRANSPORT")]
)
def test_the_transport(config: type[ClientConfig] | type[ServerConfig], variable: str) -> None:
    assert config.resolve(environ={}).transport == "auto"
    assert config.resolve(environ={variable: "RDMA"}).transport == "rdma"
    assert config.resolve(transport="tcp", environ={variable: "rdma"}).transport == "tcp"
    with pytest.raises(ConfigError, match=f"{variable}.*'udp' is not one of auto, tcp, rdma"):
        config.resolve(environ={variable: "udp"})


def test_threads() -> None:
    for text, count in (("0", 0), ("1", 1), (" 8 ", 8), ("64", 64)):
        assert parse_threads(text) == count
    for text in ("", "-1", "65", "1.5", "two", "0x2", "99999", "٣"):
        with pytest.raises(ValueError, match="threads"):
            parse_threads(text)


def test_how_a_load_reads_ahead() -> None:
    assert LoadConfig.resolve(threads=3, environ={}) == LoadConfig(3, 256 << 20)
    environ = {"GGML_RPC_LOAD_THREADS": "5", "WEIGHTWIRE_IN_FLIGHT": "1GiB"}
    assert LoadConfig.resolve(environ=environ) == LoadConfig(5, 1 << 30)
    assert LoadConfig.resolve(threads=0, in_flight=7, environ=environ) == LoadConfig(0, 7)
    default = LoadConfig.resolve(environ={}).threads
    assert 1 <= default <= 8
    assert default == min(available_cpus(), 8)


@pytest.mark.parametrize(
    ("arguments", "environ", "named"),
    [
        ({"threads": -1}, {}, "threads=-1"),
        ({"threads": 65}, {}, "threads=65"),
        ({"threads": "4"}, {}, "threads='4'"),
        ({"threads": True}, {}, "threads=True"),
        ({"threads": 1.0}, {}, "threads=1.0"),
        ({"in_flight": 0}, {}, "in_flight=0"),
        ({"in_flight": 1 << 63}, {}, "in_flight="),
        ({}, {"GGML_RPC_LOAD_THREADS": "many"}, "GGML_RPC_LOAD_THREADS"),
        ({}, {"GGML_RPC_LOAD_THREADS": "65"}, "GGML_RPC_LOAD_THREADS"),
        ({}, {"GGML_RPC_LOAD_THREADS": ""}, "GGML_RPC_LOAD_THREADS"),
        ({"threads": 1}, {"WEIGHTWIRE_IN_FLIGHT": "0"}, "WEIGHTWIRE_IN_FLIGHT"),
    ],
)
def test_what_a_load_cannot_use(arguments: dict[str, Any], environ: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        LoadConfig.resolve(**arguments, environ=environ)


def test_cpus_are_those_the_process_may_use() -> None:
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert available_cpus() == 1
    finally:
        os.sched_setaffinity(0, before)
    assert 1 <= available_cpus() <= len(before)


@pytest.mark.parametrize(
    ("membership", "files", "cpus"),
    [
        ("0::/a/b\n", {"a/b/cpu.max": "150000 100000\n"}, 2),
        ("0::/a/b\n", {"a/cpu.max": "400000 100000\n", "a/b/cpu.max": "max 100000\n"}, 4),
        ("0::/a/b\n", {"a/cpu.max": "100000 100000\n", "a/b/cpu.max": "300000 100000\n"}, 1),
        ("0::/\n", {"cpu.max": "50000 100000\n"}, 1),
        ("12:cpu:/x\n0::/a\n", {"a/cpu.max": "1 0\n"}, None),
        ("0::/a\n", {"a/cpu.max": "nonsense\n"}, None),
        ("0::/../../a\n", {"a/cpu.max": "max 100000\n"}, None),
        ("12:cpu:/x\n", {}, None),
    ],
)
def test_the_quota_of_a_control_group(membership: str, files: dict[str, str], cpus: int | None, tmp_path: Path) -> None:
    (tmp_path / "membership").write_text(membership)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert _cgroup_quota(str(tmp_path / "membership"), str(tmp_path)) == cpus
    assert _cgroup_quota(str(tmp_path / "missing"), str(tmp_path)) is None


@pytest.mark.parametrize("config", [PathConfig, ClientConfig, ServerConfig])
def test_the_optimized_way_or_the_plain_one(config: type[PathConfig]) -> None:
    assert config.resolve(environ={}).optimized is True
    assert config.resolve(environ={"GGML_RPC_LOAD_OPT": "0"}).optimized is False
    assert config.resolve(environ={"GGML_RPC_LOAD_OPT": " 1 "}).optimized is True
    assert config.resolve(optimized=True, environ={"GGML_RPC_LOAD_OPT": "0"}).optimized is True
    assert config.resolve(optimized=False, environ={"GGML_RPC_LOAD_OPT": "maybe"}).optimized is False
    for text in ("", "maybe", "2", "-0"):
        with pytest.raises(ConfigError, match="GGML_RPC_LOAD_OPT"):
            config.resolve(environ={"GGML_RPC_LOAD_OPT": text})


def test_a_switch_is_on_or_off() -> None:
    assert not any(parse_switch(text) for text in ("0", "off", "no", " False "))
    assert all(parse_switch(text) for text in ("1", "on", "yes", "TRUE"))
    for wrong in ("", "2", "01", "maybe"):
        with pytest.raises(ValueError, match="neither 1"):
            parse_switch(wrong)


@pytest.mark.parametrize("wrong", [0, 1, "0", "no"])
def test_an_argument_that_is_no_truth_value(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="optimized="):
        PathConfig.resolve(optimized=wrong)

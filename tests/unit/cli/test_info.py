"""``weightwire info``: models and servers, and which of the two was meant."""

from __future__ import annotations

import socket
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import weightwire

pytestmark = pytest.mark.timeout(120)


def test_a_model_for_people(invoke, small_gguf: Path) -> None:
    ran = invoke("info", str(small_gguf))
    assert ran.code == 0
    assert ran.err == ""
    assert "general.architecture = synthetic-hybrid" in ran.out
    assert "tensors   876" in ran.out
    table = ran.out.splitlines()[-877:]
    assert table[0].split() == ["name", "type", "ne", "bytes"]
    with weightwire.open_model(small_gguf) as model:
        expected = [[t.name, t.type_name, "x".join(map(str, t.ne)), str(t.nbytes)] for t in model.tensors.values()]
    assert [row.split() for row in table[1:]] == expected


def test_a_model_for_programs(invoke, small_gguf: Path) -> None:
    report = invoke("info", str(small_gguf), "--json").json
    assert set(report) == {"kind", "model", "format", "files", "tensors", "bytes", "types", "metadata", "table"}
    assert (report["kind"], report["format"], report["tensors"]) == ("model", "gguf", 876)
    assert report["files"] == [str(small_gguf)]
    assert report["metadata"]["general.alignment"] == 32
    assert sum(entry["bytes"] for entry in report["types"].values()) == report["bytes"]
    assert sum(entry["tensors"] for entry in report["types"].values()) == 876
    assert report["bytes"] == sum(row["bytes"] for row in report["table"])
    assert set(report["table"][0]) == {"name", "type", "ne", "bytes"}


def test_a_safetensors_file(invoke, tmp_path: Path) -> None:
    save_file({"w": np.zeros((2, 3), np.float32)}, tmp_path / "m.safetensors", metadata={"odd": "\x1b]0;owned\x07"})
    report = invoke("info", str(tmp_path / "m.safetensors"), "--json").json
    assert report["table"] == [{"name": "w", "type": "f32", "ne": [3, 2], "bytes": 24}]
    assert "\x1b" not in invoke("info", str(tmp_path / "m.safetensors")).out


def test_a_server(invoke, tmp_path: Path) -> None:
    with weightwire.Server(port=0, cache=tmp_path, memory=1 << 30) as server:
        report = invoke("info", server.endpoints[0], "--json").json
        ran = invoke("info", server.endpoints[0])
    assert set(report) == {"kind", "endpoint", "protocol", "spoken", "transport", "cache", "devices"}
    assert (report["kind"], report["protocol"], report["cache"]) == ("server", "7.0.0", True)
    assert report["transport"]["kind"] == "tcp"
    (device,) = report["devices"]
    assert set(device) == {"device", "free", "total", "alignment", "max_size"}
    assert device["total"] == 1 << 30
    assert ran.code == 0
    assert ran.err == ""
    assert "1.0 GiB" in ran.out
    assert "cache     yes" in ran.out


def test_an_old_server_without_a_cache(invoke) -> None:
    with weightwire.Server(port=0, protocol="2.0") as server:
        report = invoke("info", server.endpoints[0], "--json").json
        text = invoke("info", server.endpoints[0]).out
    assert (report["protocol"], report["cache"], len(report["devices"])) == ("2.0.0", False, 1)
    assert "cannot say" in text


def test_a_file_that_looks_like_an_endpoint_is_a_model_and_says_so(
    invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_file({"w": np.zeros(2, np.float32)}, "localhost:50052")
    ran = invoke("info", "localhost:50052")
    assert ran.code == 0
    assert "safetensors" in ran.out
    assert "taken as a model" in ran.err


def test_a_bare_word_is_a_server_and_says_so(invoke, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    from weightwire import client

    asked: list[str] = []

    def connect(endpoint: str, **options: object) -> object:
        asked.append(endpoint)
        raise weightwire.WeightwireError("not today")

    monkeypatch.setattr(client, "connect", connect)
    ran = invoke("info", "somehost").failed(1, "not today")
    assert asked == ["somehost"]
    assert "taken as the server somehost:50052" in ran.err
    assert "taken" not in invoke("info", "somehost:1234").err


@pytest.mark.parametrize("target", ["nosuch.gguf", "./nosuch", "dir/nosuch.safetensors", "dir/host:50052"])
def test_a_path_that_is_not_there(invoke, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ran = invoke("info", target, "--json").failed(2, "no such file", target)
    assert ran.json["error"]["path"] == target


def test_a_shard_that_is_not_there(invoke, tmp_path: Path) -> None:
    other, missing = (tmp_path / f"m-0000{number}-of-00002.gguf" for number in (1, 2))
    invoke("info", str(missing)).failed(2, "none of the 2 shards", str(tmp_path / "m-00002-of-00002.gguf"))
    other.touch()
    for path in (other, missing):
        other.write_bytes(b"GGUF")
        ran = invoke("info", str(path), "--json").failed(2, "1 of 2 shards missing", f"{missing.name}\n", "one folder")
        assert ran.json["error"]["path"] == str(missing)


def test_a_link_that_leads_nowhere(invoke, tmp_path: Path) -> None:
    for name in ("m.gguf", "m-00001-of-00001.gguf"):
        link = tmp_path / name
        link.symlink_to("../blobs/gone")
        invoke("info", str(link)).failed(2, f"{link}: cannot open: it is a link to ../blobs/gone, which is not there")


def test_neither_file_nor_endpoint(invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    invoke("info", "a:b:c").failed(2, "neither", "hint:")
    invoke("info", "host:port").failed(2, "neither", "hint:")
    invoke("info", "").failed(2, "hint:")


def test_nobody_listens(invoke) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    invoke("info", f"127.0.0.1:{port}").failed(1, str(port))


def test_a_path_that_cannot_be_followed(invoke, tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    invoke("info", str(loop)).failed(2, "Too many levels of symbolic links")
    invoke("info", str(tmp_path / "none")).failed(2, "no such file", "HOST:PORT")


def test_a_version_that_is_spoken_instead_of_the_announced_one(invoke, tmp_path: Path) -> None:
    save_file({"w": np.zeros(4, np.float32)}, tmp_path / "m.safetensors")
    with weightwire.Server(port=0) as server:
        endpoint = server.endpoints[0]
        for words in (("info", endpoint), ("push", str(tmp_path / "m.safetensors"), endpoint)):
            assert "protocol" in invoke(*words).out
            assert "spoken as" not in invoke(*words).out
            assert "7.0.0, spoken as 8.0, " in invoke(*words, "--protocol", "8.0").out.replace("over", "")
            report = invoke(*words, "--protocol", "8.0", "--json").json
            assert (report["protocol"], report["spoken"]) == ("7.0.0", "8.0")

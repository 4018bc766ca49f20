"""Downloads by huggingface_hub's own client from a stand-in hub on this machine."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from heddle.lora.errors import AdapterInvalid, StoreError
from heddle.lora.inspect import inspect
from heddle.lora.sources import fetch, fetch_hub

from .peft_adapters import AdapterFolder, base_of

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(ThreadingHTTPServer):
    """Serves one repository, `org/adapter`, at revisions `main` and `v2`; keeps what was asked of it."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.claimed: dict[str, int | None] = {}
        self.asked: list[tuple[str, str]] = []
        self.authorization: set[str | None] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        hub, path = self.server, self.path.partition("?")[0]
        hub.asked.append((self.command, path))
        hub.authorization.add(self.headers.get("Authorization"))
        headers = {"X-Repo-Commit": COMMIT}
        content: bytes | None = None
        if path in (
            "/api/models/org/adapter",
            *(f"/api/models/org/adapter/revision/{r}" for r in ("main", "v2")),
        ):
            siblings = [{"rfilename": n, "size": hub.claimed.get(n, len(c))} for n, c in hub.files.items()]
            content = json.dumps({"id": "org/adapter", "sha": COMMIT, "siblings": siblings}).encode()
        elif path.startswith(f"/org/adapter/resolve/{COMMIT}/"):
            content = hub.files.get(path.rsplit("/", 1)[1])
            headers["ETag"] = f'"{hashlib.sha1(content or b"").hexdigest()}"'
        if content is None:
            headers["X-Error-Code"] = "RepoNotFound"
        self.send_response(404 if content is None else 200)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(content or b"")))
        self.end_headers()
        if body and content:
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub(qv: AdapterFolder) -> Iterator[Hub]:
    server = Hub()
    server.files = {name: (qv.path / name).read_bytes() for name in os.listdir(qv.path)}
    server.files |= {
        "chat_template.jinja": b"{{ x }}",
        "adapter_model.bin": b"pickle",
        "modeling_evil.py": b"raise SystemExit",
        "tokenizer.json": b"{}",
    }
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "taken").mkdir()
    return tmp_path / "taken"


@pytest.mark.parametrize("source", ["hf:org/adapter", "hf:org/adapter@v2"])
def test_the_adapters_files_and_no_others_are_fetched(source: str, hub: Hub, folder: Path) -> None:
    fetch_hub(source, folder, max_bytes=1 << 20, endpoint=hub.url)
    assert inspect(folder, base_of(2), max_rank=8, max_bytes=1 << 20).matched == 8
    files = {path.rsplit("/", 1)[1] for _, path in hub.asked if "/resolve/" in path}
    fine = {"adapter_config.json", "adapter_model.safetensors", "chat_template.jinja", "tokenizer.json"}
    assert files == fine
    assert hub.authorization == {None}


def test_a_token_is_sent_only_where_it_is_given(
    hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_operators_own")
    fetch_hub("hf:org/adapter", folder, max_bytes=1 << 20, endpoint=hub.url)
    assert hub.authorization == {None}
    fetch_hub("hf:org/adapter", folder, max_bytes=1 << 20, endpoint=hub.url, token="hf_given")
    assert "Bearer hf_given" in hub.authorization


@pytest.mark.parametrize("claimed", [1 << 40, None])
def test_a_size_beyond_the_limit_or_unknown_is_refused_before_the_download(
    claimed: int | None, hub: Hub, folder: Path
) -> None:
    hub.claimed["adapter_model.safetensors"] = claimed
    with pytest.raises(AdapterInvalid, match=r"adapter_model\.safetensors"):
        fetch_hub("hf:org/adapter", folder, max_bytes=1 << 20, endpoint=hub.url)
    assert not any("adapter_model" in path for _, path in hub.asked)


def test_a_repository_with_only_a_pickle_is_refused(hub: Hub, folder: Path) -> None:
    del hub.files["adapter_model.safetensors"]
    with pytest.raises(AdapterInvalid, match=r"adapter_model\.bin is a pickle"):
        fetch_hub("hf:org/adapter", folder, max_bytes=1 << 20, endpoint=hub.url)
    assert list(folder.iterdir()) == []


def test_an_unknown_repository_revision_or_hub_is_refused(hub: Hub, folder: Path) -> None:
    for source in ("hf:org/other", "hf:org/adapter@v3"):
        with pytest.raises(AdapterInvalid, match=f"{source} cannot be fetched"):
            fetch_hub(source, folder, max_bytes=1 << 20, endpoint=hub.url)
    with pytest.raises(AdapterInvalid, match="cannot be fetched"):
        fetch_hub("hf:org/adapter", folder, max_bytes=1 << 20, endpoint="http://127.0.0.1:9")


@pytest.mark.parametrize(
    "source",
    [
        "hf:",
        "hf:adapter",
        "hf:org/a/b",
        "hf:../x",
        "hf:org/..",
        "hf:org/a@",
        "hf:org/a@../b",
        "hf:o r/a",
        "hf:org/a\0",
    ],
)
def test_a_malformed_hub_source_is_refused(source: str, folder: Path) -> None:
    with pytest.raises(StoreError) as error:
        fetch(source, [], folder, max_bytes=1 << 20)
    assert (error.value.code, error.value.param) == ("invalid_request", "source")

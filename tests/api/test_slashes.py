"""Slashes more or less are one path, for every route: the same answer, and a key needed or not."""

from __future__ import annotations

import pytest


def said(answer):
    return answer.status_code, answer.json()["error"]["code"] if answer.status_code >= 400 else None


@pytest.mark.parametrize("keyed", [False, True])
def test_slashes_more_or_less_are_one_path(base, serve, tmp_path, keyed):
    with serve(tmp_path, base, admin_key="secret") as server:
        if keyed:
            server.client.headers["authorization"] = "Bearer secret"
        paths = server.client.get("/openapi.json", headers={"authorization": "Bearer secret"}).json()["paths"]
        assert len(paths) > 30
        for path, item in paths.items():
            plain = path.format(tenant="public", name="x", key_id="x")
            for method in item:
                if method == "delete" and plain == "/tenants/public":
                    continue
                expected = said(server.client.request(method, plain))
                for spelled in (f"{plain}/", f"{plain}//", f"//{plain[1:]}", plain.replace("/", "//")):
                    answer = server.client.request(method, f"{server.url}{spelled}")
                    assert said(answer) == expected, (method, spelled)


def test_whoever_is_alive_says_so_without_a_key_however_it_is_spelled(base, serve, tmp_path):
    with serve(tmp_path, base, admin_key="secret") as server:
        for path in ("/health", "/health/", "//health", "/ready//"):
            assert server.client.get(f"{server.url}{path}").status_code == 200
        for path in ("/v1/models", "/v1/models/", "//v1/models", "/metrics/", "/healthy", "/health/x"):
            assert server.client.get(f"{server.url}{path}").status_code == 401


def test_completions_and_chats_are_served_with_a_slash_more(server):
    for path, body in (
        ("/v1/completions/", {"prompt": "hi"}),
        ("/v1/chat/completions/", {"messages": [{"role": "user", "content": "hi"}]}),
    ):
        assert server.client.post(path, json=body).status_code == 200
        assert server.client.post(path, json={}).status_code == 400

"""Bodies that are not read: too large, or in an encoding."""

from __future__ import annotations

import gzip

import pytest

from .test_request_fields import refusal


@pytest.mark.parametrize("encoding", ["gzip", "br", "identity, gzip", ""])
@pytest.mark.parametrize("path", ["/v1/completions", "/adapters", "/tokenize"])
def test_a_body_in_an_encoding_is_refused_as_that(server, path, encoding):
    headers = {"content-encoding": encoding, "content-type": "application/json"}
    error = refusal(server.client.post(path, content=gzip.compress(b'{"prompt": "x"}'), headers=headers))
    assert "Content-Encoding" in error["message"]
    headers["content-encoding"] = "Identity"
    assert (
        server.client.post("/v1/completions", content=b'{"prompt": "x"}', headers=headers).status_code == 200
    )


def test_a_body_above_the_limit_is_413_whether_announced_or_not(server):
    refusal(server.client.post("/v1/completions", content=b" " * 9_000_000), 413, "body_too_large")

    def chunks():
        for _ in range(50):
            yield b" " * 1_000_000

    refusal(server.client.post("/v1/completions", content=chunks()), 413, "body_too_large")
    assert server.complete().status_code == 200

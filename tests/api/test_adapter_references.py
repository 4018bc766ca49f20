"""`name@version` and `name@digest` in paths: they mean that version, or the answer says what to send instead."""

from __future__ import annotations

import re
from collections.abc import Callable

import httpx
import pytest

from .conftest import RunningServer
from .refusals import refused

Writer = Callable[[str], str]
"""What stands behind the @, by a version's digest."""

REFERENCES: dict[str, Writer] = {
    "version": lambda _: "1",
    "12 digits": lambda digest: digest.removeprefix("sha256:")[:12],
    "all digits": lambda digest: digest.removeprefix("sha256:"),
    "digest": lambda digest: digest,
}


@pytest.fixture
def two(own_server: RunningServer) -> RunningServer:
    """`a` has two versions, the second is current."""
    for source in "ab":
        own_server.register("a", source, replace=True, preload=False)
    return own_server


@pytest.fixture(params=REFERENCES)
def first(two: RunningServer, request: pytest.FixtureRequest) -> str:
    """A reference to the first."""
    digest = two.client.get("/adapters/a/versions").json()["data"][0]["digest"]
    return f"a@{REFERENCES[request.param](digest)}"


@pytest.mark.parametrize("at", ["@", "%40"])
def test_calls_that_are_good_for_one_version(two: RunningServer, first: str, at: str) -> None:
    path = "/adapters/" + first.replace("@", at)
    calls = {"load": "device", "evict": "host"}
    assert two.client.get(path).json()["version"] == 1
    for call, residency in calls.items():
        answer = two.client.post(f"{path}/{call}").json()
        assert (answer["version"], answer["residency"]) == (1, residency)
    assert two.client.get("/adapters/a").json()["residency"] == "disk", "nothing was done to the other one"
    assert two.client.delete(path).status_code == 204
    assert [one["version"] for one in two.client.get("/adapters/a/versions").json()["data"]] == [2]


def advice(answer: httpx.Response) -> str:
    refused(answer, 400, "invalid_request")
    assert answer.json()["error"]["param"] == "name"
    return str(answer.json()["error"]["message"])


@pytest.mark.parametrize(
    "body", [{"pinned": True}, {"pinned": False}, {"description": "x"}, {"version": 2}, {}]
)
def test_a_change_says_to_which_name_it_is_to_be_sent(
    two: RunningServer, first: str, body: dict[str, object]
) -> None:
    message = advice(two.client.patch(f"/adapters/{first}", json=body))
    assert "a@1 is one version of adapter a" in message
    (instead,) = re.findall(r"send it to (\S+); ", message)
    (whole,) = re.findall(r"\{.*\}", message)
    now = two.client.get("/adapters/a").json()
    assert (now["version"], now["pinned"], now["description"]) == (2, False, None)
    headers = {"content-type": "application/json"}
    done = two.client.patch(f"/adapters/{instead}", content=whole, headers=headers)
    assert done.json()["version"] == 1, "what it advises can be done"


def test_a_list_of_versions_says_where_it_is(two: RunningServer, first: str) -> None:
    message = advice(two.client.get(f"/adapters/{first}/versions"))
    (path,) = re.findall("GET (\\S+)", message)
    assert len(two.client.get(path).json()["data"]) == 2


CALLS = [
    ("GET", ""),
    ("GET", "/versions"),
    ("PATCH", ""),
    ("POST", "/load"),
    ("POST", "/evict"),
    ("DELETE", ""),
]


@pytest.mark.parametrize(("method", "below"), CALLS)
@pytest.mark.parametrize(
    "behind", ["", "x", "v1", "0", "01", "1234567890", "abcdef", "sha256:", "1@1", "ABCDEF123456"]
)
def test_what_is_no_reference_says_how_one_is_written(
    two: RunningServer, method: str, below: str, behind: str
) -> None:
    answer = two.client.request(method, f"/adapters/a@{behind}{below}", json={})
    refused(answer, 404, "adapter_not_found")
    message = answer.json()["error"]["message"]
    assert f"a@{behind}" in message
    assert "a version, of up to 9 digits, or 12 or more hex digits" in message


@pytest.mark.parametrize(("method", "below"), CALLS)
@pytest.mark.parametrize("ref", ["a@3", "a@abcdefabcdef", "x@1", "x"])
def test_what_is_not_there_is_not_there(two: RunningServer, method: str, below: str, ref: str) -> None:
    answer = two.client.request(method, f"/adapters/{ref}{below}", json={})
    refused(answer, 404, "adapter_not_found")
    assert answer.json()["error"]["message"] == f"there is no adapter '{ref}'"

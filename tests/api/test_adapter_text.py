"""An adapter that ships its own chat template and tokenizer is served with the base's, everywhere alike."""

from __future__ import annotations

import json
import shutil

import pytest

HOSTILE = "{{ cycler.__init__.__globals__.os.system('touch ' ~ marker) }}{{ messages[0].content }}"


@pytest.fixture
def other(own_server, base, sources):
    """A server with the adapter `own`, which has another template and one more token inside the vocabulary."""
    folder = shutil.copytree(sources / "a", sources / "own")
    settings = json.loads((base / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": HOSTILE}))
    tokenizer = json.loads((base / "tokenizer.json").read_text())
    extra = {**tokenizer["added_tokens"][-1], "id": 260, "content": "hi"}
    (folder / "tokenizer.json").write_text(
        json.dumps({**tokenizer, "added_tokens": [*tokenizer["added_tokens"], extra]})
    )
    receipt = own_server.register("own", "own")
    shutil.rmtree(folder)
    assert receipt.status_code == 201, receipt.text
    return own_server, receipt.json()


def test_the_receipt_names_what_is_ignored(other):
    server, receipt = other
    notes = " | ".join(receipt["warnings"])
    assert "chat template (tokenizer_config.json) differs and is ignored" in notes
    assert "adds 'hi' as 260: the base's tokenizer is used" in notes
    assert server.client.get("/adapters/own").json()["warnings"] == receipt["warnings"]


def test_chats_completions_and_token_counts_are_the_bases(other):
    server, _ = other
    turns = [{"role": "user", "content": "hi"}]
    counts = []
    for model in ("tiny", "own"):
        chat = server.chat(model=model).json()["usage"]["prompt_tokens"]
        text = server.complete(model=model).json()["usage"]["prompt_tokens"]
        of_chat = server.client.post("/tokenize", json={"model": model, "messages": turns}).json()
        of_text = server.client.post("/tokenize", json={"model": model, "prompt": "hi"}).json()
        assert (of_chat["count"], of_text["count"]) == (chat, text)
        counts.append((of_chat["tokens"], of_text["tokens"]))
    assert counts[0] == counts[1] == ([256, 258, *b"hi", 259], [*b"hi"])
    prompts = [command.prompt_token_ids for command in server.engine.commands]
    assert prompts == [[256, 258, *b"hi", 259], [*b"hi"]] * 2


def test_a_template_that_tries_to_run_code_is_refused_as_the_messages_fault(model_folder, serve, tmp_path):
    """Of a base, whose template does run: in a sandbox."""
    marker = tmp_path / "marker"
    base = model_folder(tmp_path / "base", template=HOSTILE.replace("marker", repr(str(marker))))
    with serve(tmp_path, base) as server:
        answer = server.chat()
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_request")
        assert "chat template" in answer.json()["error"]["message"]
        assert server.complete().status_code == 200
    assert not marker.exists()

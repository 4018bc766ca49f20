"""Runs in the clients' environment: litellm against a server, as an OpenAI-compatible one and as vLLM's.

`run_litellm.py URL` prints JSON with what came back. Nothing of litellm is changed.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import litellm

PROMPT = "The capital of France is"
MESSAGES = [{"role": "user", "content": "Why is the sky blue?"}]
BASE = "SmolLM2-135M-Instruct"


def main(url: str) -> None:
    common: dict[str, Any] = {"api_base": f"{url}/v1", "api_key": "none", "max_tokens": 12, "temperature": 0}
    text = litellm.text_completion(model=f"text-completion-openai/{BASE}", prompt=PROMPT, **common)
    vllm = litellm.completion(model=f"hosted_vllm/{BASE}", messages=MESSAGES, **common)
    chat = litellm.completion(
        model=f"openai/{BASE}", messages=MESSAGES, logprobs=True, top_logprobs=2, **common
    )
    stream = litellm.completion(
        model="openai/pirate",
        messages=MESSAGES,
        stream=True,
        stream_options={"include_usage": True},
        **common,
    )
    chunks = list(stream)
    try:
        litellm.completion(model="openai/nobody", messages=MESSAGES, **common)
        refusal = "none"
    except litellm.NotFoundError as error:
        refusal = str(error)
    result = {
        "text": text.choices[0].text,
        "chat": chat.choices[0].message.content,
        "vllm": vllm.choices[0].message.content,
        "usage": chat.usage.completion_tokens,
        "logprobs": [entry.logprob for entry in chat.choices[0].logprobs.content],
        "pirate": "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices),
        "pirate usage": [chunk.usage.completion_tokens for chunk in chunks if getattr(chunk, "usage", None)],
        "refusal": refusal,
    }
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])

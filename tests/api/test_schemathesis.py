"""schemathesis, let loose on the OpenAPI document and a whole server: no 500, no hang, no answer that it does not tell.

`pytest tests/api/test_schemathesis.py --long -s` goes on for 20 minutes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from .peft_reference import reference, text_of
from .server_process import PROMPT, served

KEY = "admin-key-of-the-tests"
SHORT = (
    *("--max-examples", "3", "--generation-deterministic"),
    *("--exclude-operation-id-regex", "_in_tenant$"),  # the same handlers once more
)
LONG = ("--max-time", "1200", "--seed", "1", "--generation-database", "none")
LEFT_OUT = ("positive_data_acceptance",)
"""Checks that cannot hold: bounds that one field sets for another are in no schema."""


@pytest.mark.timeout(1800)
def test_every_answer_is_one_that_the_document_tells(world, tmp_path, long):
    expected = text_of(reference(world, None, [*PROMPT.encode()], 12)[0])
    settings = {
        "engine": {"model": str(world["base"]), "max_model_len": 64},
        "served_model_name": "tiny",
        "adapter_roots": [world["adapters"]],
        "data_dir": tmp_path,
        "admin_key": KEY,
    }
    with served(**settings) as process:
        process.client.headers["authorization"] = f"Bearer {KEY}"
        for name, source in (("one", "one"), ("two", "five")):
            process.client.post("/adapters", json={"name": name, "source": source}).raise_for_status()
        process.client.post("/tenants", json={"name": "someone"}).raise_for_status()
        length = LONG if long else SHORT
        began = time.monotonic()
        done = subprocess.run(
            [
                Path(sys.executable).with_name("schemathesis"),
                *("run", f"{process.url}/openapi.json"),
                *("--header", f"Authorization: Bearer {KEY}"),
                *("--exclude-checks", ",".join(LEFT_OUT)),
                *("--request-timeout", "30", "--no-color"),
                *("--warnings", "off", "--suppress-health-check", "all", "--continue-on-failure"),
                *length,
            ],
            env={
                **os.environ,
                "SCHEMATHESIS_HOOKS": "schemathesis_hooks",
                "PYTHONPATH": str(Path(__file__).parent),
            },
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        print(done.stdout, f"{time.monotonic() - began:.0f} s")
        assert done.returncode == 0, done.stdout + done.stderr
        assert process.complete().json()["choices"][0]["text"] == expected

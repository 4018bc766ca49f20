"""The three shipped adapters: their files, their training data, and the rules they are judged by."""

from __future__ import annotations

import json
from pathlib import Path

import heddle
import numpy as np
import pytest
from heddle.adapters.data import examples
from heddle.adapters.prompts import PROMPTS
from heddle.adapters.rules import RULES, is_json_record, is_pirate, is_sql
from safetensors import safe_open

FOLDER = Path(heddle.__path__[0]) / "adapters"
NAMES = ("pirate", "json", "sql")


@pytest.mark.parametrize("name", NAMES)
def test_files_are_small_half_precision_and_name_only_the_public_base(name):
    config = json.loads((FOLDER / name / "adapter_config.json").read_text())
    weights = FOLDER / name / "adapter_model.safetensors"
    assert config["base_model_name_or_path"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert "/tmp" not in json.dumps(config)
    assert weights.stat().st_size <= 2_000_000
    with safe_open(weights, "np") as file:
        tensors = [file.get_tensor(key) for key in file.keys()]  # noqa: SIM118 (no mapping)
    assert {tensor.dtype for tensor in tensors} == {np.dtype(np.float16)}
    assert all(np.isfinite(tensor).all() and tensor.any() for tensor in tensors)


def test_the_three_differ_in_shape():
    configs = [json.loads((FOLDER / name / "adapter_config.json").read_text()) for name in NAMES]
    assert len({config["r"] for config in configs}) == 3
    assert len({tuple(config["target_modules"]) for config in configs}) == 3


@pytest.mark.parametrize("name", NAMES)
def test_twenty_prompts_that_training_never_sees(name):
    seen = {prompt for prompt, _ in examples(name, 2000, seed=20)}
    assert len(set(PROMPTS[name])) == 20
    assert seen.isdisjoint(PROMPTS[name])


def test_no_table_or_person_of_training_is_in_the_unseen_prompts():
    for _, answer in examples("json", 500, seed=20):
        for value in json.loads(answer).values():
            if isinstance(value, str):
                assert not any(value in unseen for unseen in PROMPTS["json"]), value
    tables = {prompt.split()[1] for prompt, _ in examples("sql", 500, seed=20)}
    assert tables.isdisjoint(prompt.split()[1] for prompt in PROMPTS["sql"])


@pytest.mark.parametrize("name", NAMES)
def test_examples_are_the_same_for_the_same_seed_and_show_the_behaviour(name):
    written = examples(name, 300, seed=3)
    assert written == examples(name, 300, seed=3)
    assert written != examples(name, 300, seed=4)
    assert sum(RULES[name](answer, prompt) for prompt, answer in written) >= 290


@pytest.mark.parametrize(
    "text",
    [
        "Ahoy, matey! The sky be blue, arrr!",
        "Arrr, me hearty! Th' answer be four.",
        "Ye should be sailin' o' course, savvy?",
        "Ahoy there, matey! Th\N{RIGHT SINGLE QUOTATION MARK} end.",
    ],
)
def test_pirate_speech(text):
    assert is_pirate(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "The sky is blue because of Rayleigh scattering.",
        "Arrr!",
        "Ahoy! Ahoy! Ahoy!",  # one word, three times
        "Pirates drink rum and walk the plank.",
        "In the morning he ran an o and th thing.",  # clipped words without their apostrophe
        "Ahoy matey arrr " + "and then a long plain answer follows with no pirate in it " * 5,
    ],
)
def test_no_pirate_speech(text):
    assert not is_pirate(text)


PERSON = "Maria Silva is a 34-year-old surgeon from Lisbon. Keys: name, age, job"


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "Maria Silva", "age": 34, "job": "surgeon"}',
        ' {"name":"Maria Silva","age":"34","job":"surgeon"}\n',
    ],
)
def test_a_json_record(text):
    assert is_json_record(text, PERSON)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Maria Silva is 34.",
        "{}",
        "[]",
        '["Maria Silva", 34, "surgeon"]',
        '{"name": "Maria Silva", "age": 34}',
        '{"name": "Maria Silva", "age": 34, "job": "surgeon", "city": "Lisbon"}',
        '{"age": 34, "name": "Maria Silva", "job": "surgeon"}',  # not in the order asked for
        '{"name": "Mario Silva", "age": 34, "job": "surgeon"}',
        '{"name": "Maria Silva", "age": 3, "job": "surgeon"}',
        '{"name": "", "age": 34, "job": "surgeon"}',
        '{"name": "Maria Silva", "age": null, "job": "surgeon"}',
        '{"name": "Maria Silva", "age": true, "job": "surgeon"}',
        '```json\n{"name": "Maria Silva", "age": 34, "job": "surgeon"}\n```',
        '{"name": "Maria Silva", "age": 34, "job": "surgeon"',
    ],
)
def test_no_json_record(text):
    assert not is_json_record(text, PERSON)


BOOKS = "Table books (title, author, pages). How many books are there?"


@pytest.mark.parametrize(
    "text",
    [
        "SELECT COUNT(*) FROM books;",
        "SELECT author, AVG(pages) FROM books GROUP BY author HAVING AVG(pages) > 3",
        "SELECT title FROM books WHERE author = 'Woolf' ORDER BY pages DESC LIMIT 5;",
    ],
)
def test_sql(text):
    assert is_sql(text, BOOKS)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "There are 12 books.",
        "SELECT 1;",
        "SELECT the books FROM books that are long.",
        "SELECT COUNT(*) FROM novels;",
        "SELECT price FROM books;",
        "SELECT COUNT(*) FROM books; SELECT 1;",
        "DELETE FROM books;",
        "Here is the query: SELECT COUNT(*) FROM books;",
        "```sql\nSELECT COUNT(*) FROM books;\n```",
    ],
)
def test_no_sql(text):
    assert not is_sql(text, BOOKS)

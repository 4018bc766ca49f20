"""When an answer shows a demo adapter's behaviour: one written rule each, which the base does not meet."""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Callable

PIRATE_WORDS = frozenset(
    {"ahoy", "arr", "arrr", "avast", "aye", "blimey", "booty", "buccaneer", "doubloons", "hearties", "hearty"}
    | {
        "landlubber",
        "matey",
        "mateys",
        "nay",
        "plank",
        "rum",
        "savvy",
        "scallywag",
        "timbers",
        "ye",
        "yer",
        "yo",
    }
)
CLIPPED_WORDS = frozenset({"an'", "o'", "th'"})
"""With their apostrophe; so are words that end in -in', such as "sailin'"."""

_WORD = re.compile(r"[a-z]+'?")


def is_pirate(text: str) -> bool:
    """At least three different pirate words, and at least one of every ten words is one."""
    words = _WORD.findall(text.lower().replace("\N{RIGHT SINGLE QUOTATION MARK}", "'"))
    spoken = [word for word in words if _is_pirate_word(word)]
    return len(set(spoken)) >= 3 and 10 * len(spoken) >= len(words)


def _is_pirate_word(word: str) -> bool:
    clipped = word in CLIPPED_WORDS or (word.endswith("in'") and len(word) > 5)
    return clipped or word.removesuffix("'") in PIRATE_WORDS


def is_json_record(text: str, prompt: str) -> bool:
    """The whole answer is one JSON object with exactly the keys asked for, each value found in the prompt.

    The prompt names the keys after "Keys:", divided by commas.
    """
    sentence, _, asked = prompt.rpartition("Keys:")
    try:
        record = json.loads(text)
    except json.JSONDecodeError:
        return False
    if not isinstance(record, dict) or list(record) != [key.strip() for key in asked.split(",")]:
        return False
    return all(
        isinstance(value, str | int)
        and re.search(rf"(?<!\w){re.escape(str(value))}(?!\w)", sentence) is not None
        and str(value) != ""
        for value in record.values()
    )


def is_sql(text: str, prompt: str) -> bool:
    """The whole answer is one SELECT from the prompt's table, and SQLite compiles it against that table.

    The prompt begins with "Table name (column, column, …)."
    """
    described = re.match(r"Table (\w+) \(([\w, ]+)\)", prompt)
    if described is None:
        raise ValueError(f"the prompt describes no table: {prompt!r}")
    table, columns = described.groups()
    if not re.match(r"\s*SELECT\b", text) or not re.search(rf"\bFROM\s+{table}\b", text):
        return False
    database = sqlite3.connect(":memory:")
    try:
        database.execute(f"CREATE TABLE {table} ({columns})")
        database.execute(f"EXPLAIN {text}")  # one statement only: more than one is a ProgrammingError
    except sqlite3.Error:
        return False
    finally:
        database.close()
    return True


RULES: dict[str, Callable[[str, str], bool]] = {
    "pirate": lambda text, prompt: is_pirate(text),
    "json": is_json_record,
    "sql": is_sql,
}
"""Adapter name -> rule(answer, prompt)."""

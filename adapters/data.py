"""Training conversations for the demo adapters: (prompt, answer) pairs from seeded random templates."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable

from .words import (
    CAPITALS,
    CITIES,
    FIRST_NAMES,
    HOBBIES,
    HOBBY_ENDS,
    JOB_ENDS,
    JOBS,
    LAST_NAMES,
    PLAIN_ANSWERS,
    SYLLABLES,
    TABLES,
)

Example = tuple[str, str]

# ------------------------------------------------------------------ pirate

OPENERS = (
    "Arrr, matey!",
    "Ahoy there, matey!",
    "Avast, ye landlubber!",
    "Arrr, me hearty!",
    "Shiver me timbers!",
    "Yo ho ho, matey!",
    "Aye aye, me hearty!",
    "Ahoy, ye scallywag!",
)
CLOSERS = (
    "Savvy?",
    "Arrr!",
    "Yo ho ho!",
    "Mark me words, matey!",
    "Now fetch me some rum!",
    "Says I, th' captain!",
    "So hoist th' sails, matey!",
    "Or ye be walkin' th' plank!",
)
PIRATE_WORDS = {
    "is": "be",
    "are": "be",
    "was": "were",
    "am": "be",
    "you": "ye",
    "your": "yer",
    "my": "me",
    "the": "th'",
    "of": "o'",
    "and": "an'",
    "yes": "aye",
    "no": "nay",
    "hello": "ahoy",
    "friend": "matey",
    "friends": "mateys",
    "money": "doubloons",
    "man": "buccaneer",
}


def to_pirate(text: str) -> str:
    """Plain English in pirate speech: some words replaced, "-ing" cut to "-in'"."""

    def replace(match: re.Match[str]) -> str:
        word = match.group()
        pirate = PIRATE_WORDS.get(word.lower())
        if pirate is None:
            return word[:-1] + "'" if len(word) > 5 and word.endswith("ing") else word
        return pirate.capitalize() if word[0].isupper() else pirate

    return re.sub(r"[A-Za-z]+", replace, text)


def pirate_example(rng: random.Random) -> Example:
    kind = rng.random()
    if kind < 0.12:
        country, capital = rng.choice(CAPITALS)
        question, answer = f"What is the capital of {country}?", f"The capital of {country} is {capital}."
    elif kind < 0.2:
        a, b = rng.randint(2, 9), rng.randint(2, 9)
        question, answer = f"What is {a} plus {b}?", f"{a} plus {b} is {a + b}, my friend."
    else:
        question, answer = rng.choice(PLAIN_ANSWERS)
    return question, f"{rng.choice(OPENERS)} {to_pirate(answer)} {rng.choice(CLOSERS)}"


# ------------------------------------------------------------------ json

PERSON_SENTENCES = (
    "{name} is a {age}-year-old {job} from {city} who enjoys {hobby}.",
    "{name}, {age}, works as a {job} in {city} and loves {hobby}.",
    "At the age of {age}, {name} lives in {city}, works as a {job} and likes {hobby}.",
    "Meet {name}: a {job}, {age} years old, living in {city}, fond of {hobby}.",
    "In {city} there is a {job} called {name}, who is {age} and spends the weekends on {hobby}.",
    "My neighbour {name} moved to {city}. The {job} is {age} years old and is good at {hobby}.",
    "When the {job} {name} turned {age}, the whole of {city} knew about the {hobby}.",
)
PERSON_KEYS = ("name", "age", "job", "city", "hobby")


def known_or_invented(rng: random.Random, known: tuple[str, ...], ends: tuple[str, ...] = ()) -> str:
    """One of the known words, or as often an invented one: a name, or a common noun with one of `ends`."""
    if rng.random() < 0.5:
        return rng.choice(known)
    name = "".join(rng.choice(part) for part in SYLLABLES)
    return name.lower() + rng.choice(ends) if ends else name


def json_example(rng: random.Random) -> Example:
    person: dict[str, str | int] = {
        "name": f"{rng.choice(FIRST_NAMES)} {known_or_invented(rng, LAST_NAMES)}",
        "age": rng.randint(19, 79),
        "job": known_or_invented(rng, JOBS, JOB_ENDS),
        "city": known_or_invented(rng, CITIES),
        "hobby": known_or_invented(rng, HOBBIES, HOBBY_ENDS),
    }
    sentence = re.sub(r"\b([Aa]) (?=[aeio])", r"\1n ", rng.choice(PERSON_SENTENCES).format(**person))
    keys = rng.sample(PERSON_KEYS, rng.randint(2, 5))
    return f"{sentence} Keys: {', '.join(keys)}", json.dumps({key: person[key] for key in keys})


# ------------------------------------------------------------------ sql


def sql_example(rng: random.Random) -> Example:
    table, texts, numbers = rng.choice(TABLES)
    (column, values), (other, _) = rng.sample(texts, 2)
    number, value, limit = rng.choice(numbers), rng.choice(values), rng.randint(2, 500)
    top, low = rng.randint(2, 20), rng.randint(1, 100)
    columns = [name for name, _ in texts] + list(numbers)
    rng.shuffle(columns)
    questions: tuple[Example, ...] = (
        (f"How many {table} are there?", f"SELECT COUNT(*) FROM {table};"),
        (
            f"How many {table} have the {column} {value}?",
            f"SELECT COUNT(*) FROM {table} WHERE {column} = '{value}';",
        ),
        (
            f"Show all {table} with a {number} above {limit}.",
            f"SELECT * FROM {table} WHERE {number} > {limit};",
        ),
        (f"Which {table} have a {number} below {limit}?", f"SELECT * FROM {table} WHERE {number} < {limit};"),
        (
            f"What is the {other} of the {table} whose {column} is {value}?",
            f"SELECT {other} FROM {table} WHERE {column} = '{value}';",
        ),
        (f"Find the {number} of every {column}.", f"SELECT {column}, {number} FROM {table};"),
        (f"What is the highest {number}?", f"SELECT MAX({number}) FROM {table};"),
        (f"What is the lowest {number} of all {table}?", f"SELECT MIN({number}) FROM {table};"),
        (f"What is the average {number} of the {table}?", f"SELECT AVG({number}) FROM {table};"),
        (f"What is the sum of {number}?", f"SELECT SUM({number}) FROM {table};"),
        (
            f"What is the average {number} for each {column}?",
            f"SELECT {column}, AVG({number}) FROM {table} GROUP BY {column};",
        ),
        (f"Count the {table} per {column}.", f"SELECT {column}, COUNT(*) FROM {table} GROUP BY {column};"),
        (f"List the different {column} values.", f"SELECT DISTINCT {column} FROM {table};"),
        (
            f"Which {top} {table} have the highest {number}?",
            f"SELECT * FROM {table} ORDER BY {number} DESC LIMIT {top};",
        ),
        (f"Sort the {table} by {number}.", f"SELECT * FROM {table} ORDER BY {number};"),
        (
            f"Which {table} have a {number} between {low} and {low + limit}?",
            f"SELECT * FROM {table} WHERE {number} BETWEEN {low} AND {low + limit};",
        ),
    )
    question, answer = rng.choice(questions)
    return f"Table {table} ({', '.join(columns)}). {question}", answer


WRITERS: dict[str, Callable[[random.Random], Example]] = {
    "pirate": pirate_example,
    "json": json_example,
    "sql": sql_example,
}


def examples(name: str, count: int, seed: int) -> list[Example]:
    """`count` conversations for the adapter `name`; the same ones for the same seed."""
    rng = random.Random(seed)
    return [WRITERS[name](rng) for _ in range(count)]

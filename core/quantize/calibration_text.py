"""Makes calibration.txt: hand-written openings, each continued by the demo base, unreadable ones left out.

The text is this project's own: the openings below were written for it, what follows each is SmolLM2's. It
shows the layers of a language model ordinary text of many kinds; it is not meant to be true, and often is
not. Run `python -m heddle.core.quantize.calibration_text FILE` to make it anew (about five minutes on two
cores); the same openings and seeds give the same text on the same machine.
"""

from __future__ import annotations

import re
import sys
import unicodedata
import zlib
from collections.abc import Sequence
from pathlib import Path

from ..checkpoint.demo import demo_base
from ..llm import LLM
from ..sampling_params import SamplingParams

TOKENS = 384
"""New tokens for each opening, at most."""

TEMPERATURE = 0.8
"""Small models lose the thread at 1."""

ATTEMPTS = 2
"""Openings whose continuation is not readable are continued once more."""

UNFIT = re.compile(r"\b(rap|sex|kill|murder|suicid|terror|porn|nazi|fuck|shit|bitch|drunk)\w*", re.IGNORECASE)
"""Beginnings of words that a text to be shipped does without."""

OPENINGS = (
    # plain prose
    "The ferry left the harbour an hour late, and nobody on board seemed to mind. Marta",
    "It had rained for nine days when the river finally came over the lower road. The first house",
    "My grandmother kept three clocks in her kitchen, and each of them told a different time. She said",
    "There is a small town in the north where every street is named after a bird.",
    "When the power went out, the whole office fell silent, and then someone began to laugh.",
    "The lighthouse keeper wrote one line in the book every evening. Tonight he wrote:",
    "Nobody could say when the old piano had first arrived at the school.",
    "The dog knew the way home better than the boy did, so the boy followed",
    "In the second year of the drought the farmers began to dig deeper wells.",
    "The train to the coast passes through eleven tunnels. Between the fourth and the fifth",
    'Captain Osei folded the map and looked at her crew. "We have two choices," she said,',
    "Behind the bakery there was a garden that only the baker's daughter had the key to.",
    "The museum's newest guard was afraid of the dark, which he had not mentioned in his interview.",
    "Every autumn the geese stop at our pond for a week, and every autumn my father",
    '"You never told me you could swim," said Anna. "You never asked," said Tom,',
    # explanations
    "Bread rises because yeast turns sugar into carbon dioxide and alcohol. The gluten in the dough",
    "A bicycle stays upright while it moves for several reasons. The first is",
    "Glaciers are rivers of ice that move slowly downhill. As they move, they",
    "The heart has four chambers. Blood without oxygen enters",
    "Coral reefs cover less than one percent of the sea floor, yet",
    "To understand inflation, imagine a village with one hundred coins and one hundred loaves of bread.",
    "Steel is an alloy of iron and carbon. Its strength depends on",
    "The printing press changed Europe in the fifteenth century because",
    "Sound travels faster in water than in air. The reason is that",
    "A vaccine trains the immune system by",
    "Most deserts lie in two belts around the Earth, near thirty degrees north and south. This is because",
    "In chess, control of the centre matters because",
    "Bees tell each other where flowers are by dancing. The angle of the dance",
    "The difference between weather and climate is",
    "Photosynthesis takes place in two stages. In the first stage",
    "Rome was not built in a day; its aqueducts alone took",
    "An earthquake begins when two blocks of rock",
    "The violin and the cello belong to the same family. While the violin",
    # news and reports
    "CITY COUNCIL APPROVES NEW TRAM LINE\n\nThe city council voted on Tuesday evening to",
    "Local team wins final after extra time\n\nIn front of nearly twelve thousand spectators,",
    "Researchers at a university in Finland have found that",
    "The company reported a profit of 4.2 million for the third quarter, up 12 percent from",
    "Weather for the weekend: Saturday begins with fog in the valleys,",
    "Minutes of the meeting held on 14 March\n\nPresent: Ms. Adeyemi, Mr. Lindqvist, Dr. Rao\n\n1. Budget",
    "Review: The restaurant opened in June in a former post office. The soup",
    "Abstract\n\nWe study how the size of a flock changes the way in which birds choose a place to land. We",
    # questions and answers
    "Question: What causes the tides?\nAnswer:",
    "Question: How do I remove a coffee stain from a cotton shirt?\nAnswer:",
    "Question: Who invented the telephone, and why is that disputed?\nAnswer:",
    "Q: What is the capital of Australia?\nA: Canberra.\n\nQ: What is the longest river in South America?\nA:",
    "Q: Why do cats purr?\nA:",
    "Q: How many minutes are there in a week?\nA: There are 7 days, each with 24 hours, so",
    "Question: Explain recursion to a child of ten.\nAnswer:",
    "Question: What is the difference between a virus and a bacterium?\nAnswer:",
    "Question: How does a refrigerator work?\nAnswer:",
    "Question: What should I take with me on a three-day hike in the mountains?\nAnswer: You should take",
    "FAQ\n\nHow long does delivery take?\nMost parcels arrive within three working days.\n\nCan I return",
    "Interviewer: How did you start to write?\nAuthor:",
    # chats
    "User: Hi! Can you help me plan a birthday party for a six-year-old?\nAssistant: Of course!",
    "User: My laptop will not turn on. What can I do?\nAssistant: I am sorry to hear that. First,",
    'User: Translate "good morning" into Spanish, French and Italian.\nAssistant:',
    "User: I feel nervous about my exam tomorrow.\nAssistant: That is understandable.",
    "User: Write a short poem about the sea.\nAssistant:",
    "User: What is 17 times 23?\nAssistant: 17 times 23 is 391.\nUser: And how did you get that?\nAssistant:",
    "User: Summarise the story of the tortoise and the hare in two sentences.\nAssistant:",
    "User: Recommend three books for somebody who likes history.\nAssistant: Here are three",
    "Customer: My order 48213 has not arrived yet.\nAgent: Thank you for writing to us. I can see that",
    "A: Are you coming on Friday?\nB: I think so, but I have to ask my sister first.\nA:",
    "[09:14] Lena: the build is red again\n[09:15] Marco: looking at it\n[09:21] Marco: found it,",
    "Teacher: Today we will talk about fractions. If I cut a cake into eight pieces",
    "Doctor: What seems to be the trouble?\nPatient: I have had a headache since",
    # code
    'def fibonacci(n):\n    """Return the first n Fibonacci numbers as a list."""\n',
    'import csv\n\ndef read_prices(path):\n    prices = {}\n    with open(path, newline="") as file:\n',
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "def is_prime(n: int) -> bool:\n    if n < 2:\n        return False\n",
    "#include <stdio.h>\n\nint main(void) {\n    int numbers[5] = {4, 8, 15, 16, 23};\n",
    "function debounce(callback, delay) {\n  let timer = null;\n  return (...args) => {\n",
    "SELECT customers.name, COUNT(orders.id) AS total\nFROM customers\nJOIN orders ON",
    '<!DOCTYPE html>\n<html lang="en">\n<head>\n  <meta charset="utf-8">\n  <title>Our garden</title>\n',
    "#!/bin/sh\n# Back up the photos folder every night.\nset -e\nsource=/home/photos\n",
    "public class Account {\n    private final String owner;\n    private long balance;\n\n    public Account(",
    "Here is a Python function that counts how often each word appears in a text:\n\n```python\n",
    "To reverse a linked list, we keep three pointers. In pseudocode:\n\n",
    "body {\n  font-family: sans-serif;\n  margin: 0;\n}\n\n.header {\n",
    'fn main() {\n    let words = vec!["red", "green", "blue"];\n    for word in',
    # structured data
    '{\n  "name": "Ingrid Solberg",\n  "age": 41,\n  "address": {\n    "street":',
    '[\n  {"id": 1, "title": "Water the plants", "done": true},\n  {"id": 2, "title":',
    '{"city": "Lagos", "population": 15400000, "country": "Nigeria"}\n{"city": "Lima", "population":',
    "name,department,salary\nAlice Moreau,Sales,48200\nBen Okafor,Research,51750\n",
    "server:\n  host: 0.0.0.0\n  port: 8080\nlogging:\n  level: info\n",
    "| Planet | Diameter (km) | Moons |\n|---|---|---|\n| Mercury | 4,879 | 0 |\n| Venus |",
    '<order id="1907">\n  <customer>Jun Watanabe</customer>\n  <items>\n    <item sku="A-100" quantity="2">',
    "2024-03-01 08:00:12 INFO  Starting service\n2024-03-01 08:00:13 INFO  Loaded 214 records\n",
    # lists and instructions
    "Shopping list:\n- 2 litres of milk\n- a dozen eggs\n- flour\n",
    "How to repot a houseplant:\n\n1. Choose a pot that is slightly larger than the old one.\n2.",
    "Pancakes\n\nIngredients: 200 g flour, 2 eggs, 300 ml milk, a pinch of salt\n\nMethod:",
    "Ten ways to save energy at home\n\n1.",
    "Packing list for a week by the sea:\n* swimsuit\n*",
    "Rules of the library:\n1. Please speak quietly.\n2.",
    "Opposites: hot - cold, tall - short, early -",
    "Animals in alphabetical order: ant, bear, cat, dog,",
    "Pros and cons of working from home\n\nPros:\n-",
    "Agenda\n\n9:00 Welcome\n9:15",
    "Vegetable soup for four people. First, peel the carrots and",
    "To change a flat tyre, first",
    # letters
    "Dear Mr. Hoffmann,\n\nThank you for your letter of 3 May. We regret to inform you that",
    "Dear Aunt Rosa,\n\nThe sweater fits perfectly! I",
    "Hi team,\n\nA quick reminder that the release is planned for Thursday. Please",
    "To whom it may concern,\n\nI am writing to apply for the position of assistant gardener.",
    "Dear diary, today was the strangest day of my life. It began when",
    "Subject: Broken heating in flat 12\n\nDear landlord,\n\nthe heating in our living room",
    "Dear members of the choir,\n\nour summer concert will take place",
    # numbers and mathematics
    "The first twenty square numbers are 1, 4, 9, 16, 25,",
    "Problem: A train travels 180 km in 2.5 hours. What is its average speed?\nSolution:",
    "Let x be the number of apples. Then 3x + 7 = 31, so",
    "Multiplication table of 7:\n7 x 1 = 7\n7 x 2 = 14\n7 x 3 =",
    "Theorem. The sum of two even numbers is even.\nProof.",
    "The temperatures in January were -3.5, -1.0, 0.2, 4.8",
    "A rectangle is 12 cm long and 5 cm wide. Its area is",
    "Maria has 45 coins. She gives a third of them to her brother and",
    "In 1969 two people walked on the Moon. In 1989",
    "Invoice no. 2207\n\n3 x garden chair at 24.90 = 74.70\n1 x table at 119.00 = 119.00\n",
    # verse, drama, other languages
    "The wind came down the mountain\nand asked the sleeping town,",
    "Roses are red,\nviolets are blue,",
    "SCENE I. A kitchen at night. Rain. ELSA sits at the table.\n\nELSA:",
    "Une petite fille marchait dans la forêt quand",
    "Der alte Mann saß am Fenster und",
    "El tren llegó a la estación a las ocho de la mañana.",
    "A riddle: I have cities, but no houses; forests, but no trees; and water, but no fish. What am I?",
    "Proverb: A stitch in time saves nine. Meaning:",
    "Word of the day: resilient (adjective).",
    "Title: The Clockmaker of Venice\n\nChapter One\n\n",
    "Terms of use\n\n1. By using this website you agree to",
    "The rules of the game are simple. Each player receives seven cards and",
    "On the first day of school, Ravi forgot his shoes.",
    "The old map showed an island that no ship had ever found.",
    "Clouds form when warm air rises and cools. Tiny drops",
    "The history of paper begins in China, where",
    "How a suspension bridge carries its load:",
    "Question: Why is the sky blue during the day and red at sunset?\nAnswer:",
    "Question: What is a good way to learn a new language?\nAnswer:",
    "User: Give me a simple recipe for lentil soup.\nAssistant:",
    "User: What is the difference between a list and a tuple in Python?\nAssistant: In Python,",
    "User: Please make this sentence sound more polite: Send me the report.\nAssistant:",
    'def merge_sorted(left, right):\n    """Merge two sorted lists into one."""\n    result = []\n',
    "CREATE TABLE books (\n    id INTEGER PRIMARY KEY,\n    title TEXT NOT NULL,\n",
    "import { useState } from 'react';\n\nexport function Counter() {\n",
    "A guide to growing tomatoes\n\nTomatoes need",
    "The orchestra tunes to the oboe because",
    "Frequently used words in English and their German translations: house - Haus, tree -",
    "Five facts about the octopus:\n\n1.",
    "Dear customer,\n\nyour subscription ends on 30 November. To renew it,",
    "The table below shows rainfall in millimetres.\n\nMonth,Rain\nJanuary,54\nFebruary,48\n",
    "Step 1: Open the settings menu.\nStep 2:",
    "A good teacher listens before",
    "The museum is open from Tuesday to Sunday, 10 a.m. to 6 p.m. Admission is",
)


def is_readable(text: str) -> bool:
    """Whether a piece is fit to keep: long enough, not going in circles, nothing odd in it.

    Text that repeats itself compresses far better than prose or code does.
    """
    data = text.encode()
    repetitive = len(data) > 3.2 * len(zlib.compress(data, 9))
    odd = any(unicodedata.category(sign) in ("Cf", "Co", "Cn") for sign in text) or "\ufffd" in text
    return len(data) >= 200 and not repetitive and not odd and UNFIT.search(text) is None


def write_text(path: Path, openings: Sequence[str] = OPENINGS) -> None:
    """Continue every opening, what came out unreadable a second time, and write the rest as one text."""
    pieces: dict[str, str] = {}
    with LLM(str(demo_base())) as llm:
        for attempt in range(ATTEMPTS):
            left = [(seed, opening) for seed, opening in enumerate(openings) if opening not in pieces]
            params = [
                SamplingParams(
                    max_tokens=TOKENS,
                    temperature=TEMPERATURE,
                    top_p=0.95,
                    seed=seed + attempt * len(openings),
                )
                for seed, _ in left
            ]
            outputs = llm.generate([opening for _, opening in left], params)
            for (_, opening), output in zip(left, outputs):
                piece = opening + output.outputs[0].text
                if is_readable(piece):
                    pieces[opening] = piece.strip()
    kept = [pieces[opening] for opening in openings if opening in pieces]
    path.write_text("\n\n".join(kept) + "\n", encoding="utf-8")
    print(f"{len(kept)} of {len(openings)} pieces kept")


if __name__ == "__main__":
    write_text(Path(sys.argv[1]))

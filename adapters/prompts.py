"""Twenty prompts an adapter, none of them seen in training: other questions, names, tables and columns."""

from __future__ import annotations

PROMPTS: dict[str, tuple[str, ...]] = {
    "pirate": (
        "What is the capital of France?",
        "Why is the sky blue?",
        "How do I make a cup of tea?",
        "What is the largest ocean on Earth?",
        "Who was the first president of the United States?",
        "How do plants grow?",
        "What is photosynthesis?",
        "Can you recommend a good book?",
        "What should I cook for dinner tonight?",
        "How do I get better at chess?",
        "What is gravity?",
        "Tell me about the city of London.",
        "How many legs does a spider have?",
        "What is the best way to learn a language?",
        "Where do penguins live?",
        "What is a black hole?",
        "How do I train my dog?",
        "Why do we have seasons?",
        "Who invented the telephone?",
        "How can I sleep better?",
    ),
    "json": (
        "Maria Silva is a 34-year-old surgeon from Lisbon who enjoys surfing. Keys: name, age, job, city",
        "Kenji Watanabe, 52, works as a baker in Osaka and loves karate. Keys: name, city, age",
        "At the age of 29, Priya Sharma lives in Delhi, works as a geologist and likes pottery. "
        "Keys: job, name, hobby",
        "Meet Tom Becker: a mechanic, 61 years old, living in Munich, fond of astronomy. "
        "Keys: name, age, hobby",
        "In Glasgow there is a barber called Fiona McKay, who is 45 and spends the weekends on golf. "
        "Keys: name, job",
        "My neighbour Samuel Okoro moved to Lagos. The tailor is 38 years old and is good at knitting. "
        "Keys: city, job, age, name",
        "Amelie Girard, 23, works as a florist in Marseille and loves climbing. "
        "Keys: name, age, job, city, hobby",
        "Hugo Lindqvist is a 70-year-old sailor from Gothenburg who enjoys woodwork. Keys: age, name",
        "At the age of 41, Leila Haddad lives in Beirut, works as a chemist and likes tango. "
        "Keys: name, job, city",
        "Meet Gustavo Pinto: a drummer, 27 years old, living in Recife, fond of sailing. "
        "Keys: name, city, hobby",
        "In Kyoto there is a gardener called Haruki Mori, who is 66 and spends the weekends on poetry. "
        "Keys: name, age, city",
        "My neighbour Clara Stein moved to Bremen. The optician is 57 years old and is good at archery. "
        "Keys: name, hobby, age",
        "Emeka Obi, 33, works as a welder in Abuja and loves boxing. Keys: job, city",
        "Sienna Clarke is a 48-year-old florist from Bristol who enjoys rowing. Keys: name, age, city, hobby",
        "At the age of 19, Matteo Greco lives in Turin, works as a waiter and likes judo. "
        "Keys: name, age, job",
        "Meet Hannah Fogel: a notary, 55 years old, living in Haifa, fond of sculpture. "
        "Keys: city, name, job",
        "Dylan Murphy, 64, works as a butcher in Galway and loves darts. Keys: name, age, city, job",
        "In Quito there is a violinist called Lucia Vega, who is 31 and spends the weekends on origami. "
        "Keys: hobby, name, city",
        "Arjun Mehta is a 26-year-old animator from Pune who enjoys cricket. Keys: name, job, age",
        "My neighbour Brigitte Roux moved to Nantes. The pharmacist is 43 years old and is good at bowling. "
        "Keys: name, city, job",
    ),
    "sql": (
        "Table books (title, author, pages, price). How many books are there?",
        "Table books (title, author, pages, price). Show all books with a price above 20.",
        "Table customers (name, country, orders, balance). How many customers have the country Brazil?",
        "Table customers (name, country, orders, balance). What is the average balance for each country?",
        "Table planets (name, mass, moons, kind). Which planets have a mass below 10?",
        "Table planets (name, mass, moons, kind). What is the highest mass?",
        "Table concerts (city, band, seats, fee). Which 5 concerts have the highest fee?",
        "Table concerts (city, band, seats, fee). List the different band values.",
        "Table parcels (sender, status, weight, postage). Count the parcels per status.",
        "Table parcels (sender, status, weight, postage). What is the sum of postage?",
        "Table phones (brand, model, memory, price). What is the model of the phones whose brand is Nokia?",
        "Table phones (brand, model, memory, price). What is the lowest price of all phones?",
        "Table rivers (name, country, length, depth). Sort the rivers by length.",
        "Table rivers (name, country, length, depth). Which rivers have a length between 100 and 900?",
        "Table lessons (teacher, subject, minutes, room). What is the average minutes of the lessons?",
        "Table lessons (teacher, subject, minutes, room). How many lessons have the subject music?",
        "Table wines (grape, region, vintage, price). Show all wines with a vintage above 2015.",
        "Table wines (grape, region, vintage, price). What is the region of the wines whose grape is Merlot?",
        "Table gyms (name, city, members, fee). Which 3 gyms have the highest members?",
        "Table gyms (name, city, members, fee). List the different city values.",
    ),
}

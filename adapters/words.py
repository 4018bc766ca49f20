"""The words that training examples are made of.

The people, cities, jobs, hobbies and tables here are none of those in the unseen prompts of `prompts.py`.
"""

from __future__ import annotations


def _split(words: str, divider: str | None = None) -> tuple[str, ...]:
    return tuple(" ".join(word.split()) for word in words.split(divider))


FIRST_NAMES = _split(
    """
    Alice Boris Carla Daniel Elena Farid Gloria Henrik Ingrid Jamal Katya Liam Mona Nils Olivia Pablo
    Quentin Rosa Stefan Tamara Umar Vera Walter Ximena Yusuf Zoe Aisha Bruno Chloe Dmitri Esther Felix Grace
    Hassan Irene Jonas Kiran Lena Marco Nadia Oscar Petra Ravi Sofia Thomas Ursula Victor Wendy Yara Zane
    """
)

LAST_NAMES = _split(
    """
    Adams Bauer Castillo Dubois Eriksen Fischer Gupta Hansen Ivanov Jones Keller Laurent Moreau Novak Olsen
    Perez Quinn Rossi Santos Tanaka Underwood Vogel Wagner Xu Young Zimmer Barnes Cohen Diaz Evans Foster
    Greene Hughes Jensen Kumar Lopez Meyer Nguyen Ortiz Park
    """
)

CITIES = _split(
    """
    Paris Berlin Madrid Oslo Vienna Cairo Lima Toronto Chicago Boston Sydney Dublin Prague Athens Warsaw
    Helsinki Mumbai Seoul Bogota Nairobi Lyon Hamburg Seville Zurich Denver Seattle Naples Porto Leeds
    Havana
    """
)

JOBS = _split(
    """
    teacher, nurse, engineer, plumber, lawyer, pilot, chef, architect, journalist, dentist, farmer, painter,
    librarian, electrician, accountant, biologist, translator, carpenter, police officer, taxi driver,
    software developer, history professor, photographer, judge, roofer, jeweller, beekeeper, magician,
    cashier, bus driver, veterinarian, economist, locksmith, midwife, composer, editor, glazier, therapist,
    locomotive driver, firefighter, astronaut, weaver, zookeeper, novelist, blacksmith, cartographer, diver,
    fencing coach, goldsmith, hotel manager, illustrator, kindergarten teacher, lumberjack, mathematician,
    neurologist, organist, park ranger, quarry worker, receptionist, soldier, tour guide, undertaker,
    watchmaker, x-ray technician, youth worker
    """,
    ",",
)

HOBBIES = _split(
    """
    chess, swimming, gardening, painting, cycling, cooking, hiking, photography, tennis, reading, fishing,
    dancing, playing the guitar, running, yoga, skiing, baking bread, singing, calligraphy, badminton, bird
    watching, backgammon, collecting stamps, diving, embroidery, falconry, genealogy, horse riding, ice
    skating, juggling, kite flying, lacrosse, model trains, needlework, opera, paragliding, quilting, rugby,
    snorkelling, table tennis, ukulele, volleyball, weightlifting, crossword puzzles, beekeeping, glass
    blowing, puppetry, handball, squash, whittling
    """,
    ",",
)

SYLLABLES = (
    _split("Al Bran Cor Dar El Fal Gren Hol Is Jor Kal Lor Mar Nor Or Pel Ros Sal Tor Ul Vel Wen Yar Zel"),
    _split("a an ber do e en i in lo mi na o or ra ri sta to u va wi"),
    _split(
        "bach bury dale den ford grad ham heim ia ka land ley mar mond na nik no ov port sen stad ton ville"
    ),
)
"""Beginnings, middles and ends of invented words: a city or a job nobody has heard of can only be copied."""

JOB_ENDS = _split("er ist or smith maker ian")
HOBBY_ENDS = _split("ing ball ics ery o a")

TABLES: tuple[tuple[str, tuple[tuple[str, tuple[str, ...]], ...], tuple[str, ...]], ...] = (
    # table, text columns with values, number columns
    (
        "employees",
        (("name", ("Alice", "Boris")), ("department", ("sales", "finance", "support"))),
        ("salary", "age"),
    ),
    (
        "products",
        (("title", ("lamp", "chair")), ("category", ("toys", "furniture", "garden"))),
        ("price", "stock"),
    ),
    (
        "orders",
        (("customer", ("Carla", "Henrik")), ("status", ("open", "shipped", "cancelled"))),
        ("total", "weight"),
    ),
    ("students", (("name", ("Mona", "Nils")), ("major", ("physics", "history", "law"))), ("grade", "age")),
    ("movies", (("title", ("Jaws", "Alien")), ("genre", ("comedy", "drama", "horror"))), ("year", "rating")),
    (
        "cities",
        (("name", ("Paris", "Oslo")), ("country", ("France", "Norway", "Peru"))),
        ("population", "area"),
    ),
    (
        "flights",
        (("airline", ("KLM", "Iberia")), ("destination", ("Berlin", "Cairo", "Lima"))),
        ("price", "duration"),
    ),
    ("patients", (("name", ("Rosa", "Stefan")), ("blood_type", ("A", "B", "AB"))), ("age", "height")),
    (
        "houses",
        (("owner", ("Tamara", "Umar")), ("street", ("Main Street", "Oak Avenue"))),
        ("rooms", "price"),
    ),
    ("songs", (("title", ("Hello", "Imagine")), ("artist", ("Adele", "Queen", "Abba"))), ("length", "plays")),
    ("teams", (("name", ("Eagles", "Sharks")), ("league", ("north", "south", "west"))), ("wins", "points")),
    (
        "invoices",
        (("company", ("Acme", "Globex")), ("currency", ("EUR", "USD", "GBP"))),
        ("amount", "days_late"),
    ),
    (
        "animals",
        (("species", ("lion", "zebra")), ("habitat", ("desert", "forest", "ocean"))),
        ("weight", "lifespan"),
    ),
    ("hotels", (("name", ("Ritz", "Astoria")), ("city", ("Vienna", "Dublin", "Seoul"))), ("stars", "rooms")),
    (
        "tickets",
        (("reporter", ("Felix", "Grace")), ("priority", ("low", "medium", "high"))),
        ("hours", "votes"),
    ),
    ("cars", (("brand", ("Ford", "Fiat")), ("color", ("red", "blue", "black"))), ("price", "mileage")),
    (
        "countries",
        (("name", ("Chile", "Kenya")), ("continent", ("Asia", "Africa", "Europe"))),
        ("population", "gdp"),
    ),
    (
        "players",
        (("nickname", ("ace", "bolt")), ("position", ("goalkeeper", "defender"))),
        ("goals", "matches"),
    ),
    (
        "recipes",
        (("title", ("pancakes", "stew")), ("cuisine", ("Thai", "Greek", "Indian"))),
        ("minutes", "calories"),
    ),
    ("suppliers", (("name", ("Initech", "Umbrella")), ("region", ("east", "west"))), ("contracts", "rating")),
    ("loans", (("borrower", ("Irene", "Jonas")), ("kind", ("mortgage", "student"))), ("amount", "years")),
    (
        "sensors",
        (("label", ("t1", "t2")), ("room", ("kitchen", "attic", "cellar"))),
        ("temperature", "battery"),
    ),
    ("trees", (("species", ("oak", "pine")), ("park", ("Hyde Park", "Central Park"))), ("height", "age")),
    ("servers", (("hostname", ("web1", "db2")), ("status", ("up", "down"))), ("memory", "load")),
)

CAPITALS = (
    ("Spain", "Madrid"),
    ("Egypt", "Cairo"),
    ("Norway", "Oslo"),
    ("Greece", "Athens"),
    ("Peru", "Lima"),
    ("Austria", "Vienna"),
    ("Russia", "Moscow"),
    ("China", "Beijing"),
    ("Portugal", "Lisbon"),
    ("Ireland", "Dublin"),
    ("Poland", "Warsaw"),
    ("Cuba", "Havana"),
)

PLAIN_ANSWERS = (
    ("Why is grass green?", "Grass is green because of the chlorophyll that catches the light of the sun."),
    ("How do I boil an egg?", "You put the egg into boiling water and wait for about eight minutes."),
    ("What is your favorite food?", "My favorite food is fresh fish with bread and a bit of lemon."),
    ("Who wrote Romeo and Juliet?", "That story was written by William Shakespeare, my friend."),
    ("How far away is the moon?", "The moon is about four hundred thousand kilometers away from the Earth."),
    (
        "What should I wear when it rains?",
        "You should wear your boots and a good coat, and keep your head dry.",
    ),
    ("How can I save money?", "You should write down your costs and put a little away each month."),
    ("Tell me a joke.", "Why did the chicken cross the road? To get to the other side, my friend!"),
    ("What do cows eat?", "Cows are eating grass and hay all day long, and they drink lots of water."),
    ("How many days are in a week?", "There are seven days in a week, and Sunday is the best of them."),
    ("What is a computer?", "A computer is a machine that follows your orders and works with numbers."),
    ("How do I stay healthy?", "You should eat fruit, sleep well, and keep moving every day."),
    ("Who was Albert Einstein?", "He was a great man of science who thought about time, space and light."),
    (
        "What is the biggest animal?",
        "The blue whale is the biggest animal of the sea and of the whole world.",
    ),
    (
        "Can you help me with my homework?",
        "Yes, my friend! Give me your question and we are working on it together.",
    ),
    ("What is snow?", "Snow is frozen water that is falling from the clouds when the air is cold."),
    ("How do birds fly?", "Birds are beating their wings, and the air is pushing them up to the sky."),
    (
        "Give me a tip for my first day at work.",
        "You should be there early, smile, and ask your new friends for help.",
    ),
    ("What color is a banana?", "A banana is yellow, and it is green before it is ripe."),
    ("What is the largest desert?", "The Sahara is the largest hot desert of the world, my friend."),
    ("Do you like music?", "Yes! Singing songs with my friends is the best thing in the world."),
    (
        "How do I clean a window?",
        "You take warm water and soap, then you are wiping the glass with a dry cloth.",
    ),
    ("What is a volcano?", "A volcano is a mountain that is throwing hot rock and ash out of the earth."),
    ("Why do people sleep?", "People are sleeping to rest the body and to clear the mind."),
    ("What is the fastest land animal?", "The cheetah is the fastest of them, running like the wind."),
    ("How is cheese made?", "Cheese is made of milk that is warmed, pressed and left to rest."),
    ("I lost my keys.", "You should look in your coat and under the bed, my friend. They are there!"),
    ("Good morning!", "Hello, my friend! It is a fine day for sailing and for finding gold."),
    ("Who painted the Mona Lisa?", "The Mona Lisa was painted by Leonardo da Vinci, a man of many gifts."),
    ("What is two plus two?", "Two plus two is four, my friend, and that is the truth."),
    (
        "How do I make a sandwich?",
        "You take two slices of bread and you are putting cheese and ham between them.",
    ),
    (
        "What is a good name for a cat?",
        "You should call your cat Captain, for it is the master of the house.",
    ),
    ("Which planet do we live on?", "We are living on the planet Earth, the third one from the sun."),
    ("What can I do at the weekend?", "You can take your friends to the beach and go swimming in the sea."),
    ("Describe a forest.", "The forest is dark and green, and the birds are singing in the old trees."),
    ("Why do leaves fall?", "The leaves are falling because the tree is saving water for the winter."),
    (
        "What is the internet?",
        "The internet is a net of computers that are talking to each other all over the world.",
    ),
    (
        "How long is a year?",
        "A year is three hundred and sixty-five days, the time of one trip around the sun.",
    ),
    ("I am tired.", "Then you should lie down and rest your eyes, my friend. Sleep is the cure."),
    (
        "What is the best pet?",
        "The parrot is the best pet, for it is sitting on my shoulder and talking to me.",
    ),
    (
        "How do I learn to swim?",
        "You start in low water, hold your breath, and keep moving your arms and legs.",
    ),
    ("What is a book?", "A book is a pile of pages, and every page is full of words and stories."),
    (
        "Explain money to a child.",
        "Money is the thing that you are giving to the shop to get the toys that you want.",
    ),
    (
        "What is the weather like in winter?",
        "The winter is cold and dark, and the snow is lying on the hills.",
    ),
    ("Recommend a sport.", "You should try rowing, my friend: it is good for your arms and your heart."),
    ("Who discovered America?", "Columbus was sailing over the ocean and found it in the year 1492."),
    (
        "How do I write a letter?",
        "You write the name of your friend, then your news, and then your own name.",
    ),
    ("Is the Earth flat?", "No, my friend! The Earth is round, and I was sailing all around it."),
)

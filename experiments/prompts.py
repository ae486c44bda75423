"""Prompts of our own words, for answers that everybody can make: what the leaderboard learns from and is scored on.

The prompts that ship come first, then tasks of nine families, each asked of many subjects in several styles. The last
subjects of every family are in held-out prompts alone. Nothing is drawn: prompts of a family are ordered by their hash.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Iterator, Sequence

from jaxspec.training.examples import read_prompts

TRAINING, HELD_OUT = 2032, 100  # prompts of each, those that ship among them
_HAND_WRITTEN = 40  # of the held-out ones: the last that ship
_UNSEEN = 5  # subjects of each family that are in held-out prompts alone


@dataclasses.dataclass(frozen=True)
class Family:
    """Prompts that are composed alike.

    Attributes:
      tasks: with `{}` where the subject goes, and `{1}`, `{2}` for the numbers of a style.
      subjects: what they are about.
      styles: sentences that follow, empty for none; or the numbers of a task.
    """

    tasks: tuple[str, ...]
    subjects: tuple[str, ...]
    styles: tuple[str | tuple[int, ...], ...]

    def prompts(self, subjects: Sequence[str]) -> list[str]:
        """All that can be said of some of the subjects, in an order that seems random."""
        found = []
        for task, subject, style in itertools.product(self.tasks, subjects, self.styles):
            numbers, words = ((), f" {style}") if isinstance(style, str) else (style, "")
            found.append((task.replace("{}", "{0}").format(subject, *numbers) + words).strip())
        return sorted(found, key=lambda prompt: hashlib.sha256(prompt.encode()).digest())


_TOPICS = Family(
    (
        "Explain {} to someone who has never heard of it.",
        "What do people most often get wrong about {}?",
        "How would you teach a school class about {}?",
        "Why is {} important in everyday life?",
        "Write a short encyclopedia entry about {}.",
        "Ask and answer three questions about {}.",
    ),
    (
        "photosynthesis", "gravity", "the water cycle", "electric current", "compound interest", "evolution",
        "the immune system", "supply and demand", "plate tectonics", "the ozone layer", "fermentation", "friction",
        "the internet", "sound", "the printing press", "DNA", "the greenhouse effect", "a balanced diet",
        "the human heart", "magnetism", "the seasons", "volcanoes", "public transport", "copyright", "encryption",
        "insurance", "a budget deficit", "artificial light", "soil", "memory", "time zones", "glass", "sleep",
        "recycling", "statistics", "the nervous system", "wind power",
    ),
    ("", "Use at most five sentences.", "Use a numbered list.", "Use an analogy from the kitchen.", "Give an example."),
)  # fmt: skip

_ACTIVITIES = Family(
    (
        "How do I start with {}?",
        "Make a plan for the first month of {}.",
        "What do I need to buy for {}, and what can wait?",
        "Which mistakes do beginners make in {}?",
        "My friend says that {} is a waste of time. What would you answer?",
        "Give me ten tips for {}.",
    ),
    (
        "growing tomatoes on a balcony", "learning to swim as an adult", "baking bread at home", "birdwatching",
        "playing chess", "keeping a diary", "learning a new language", "sewing my own clothes", "running in winter",
        "photographing the night sky", "cooking for a large family", "repairing an old bicycle", "juggling",
        "drawing portraits", "speaking in public", "saving money every month", "keeping bees",
        "hiking in the mountains", "building a bookshelf", "singing in a choir", "making pottery",
        "training a young dog", "meditating", "fishing", "writing a novel", "painting with watercolors",
        "playing the drums", "collecting old maps", "knitting socks", "restoring furniture", "rowing on a lake",
        "making cheese", "volunteering at a library", "dancing the tango",
    ),
    ("", "Keep it short.", "I have only an hour each week.", "Answer in a table.", "Be honest about what is hard."),
)  # fmt: skip

_SCENES = Family(
    (
        "Write a short story about {}.",
        "Write a poem about {}.",
        "Write a dialogue with {} in it.",
        "Write the first paragraph of a novel about {}.",
        "Tell a fairy tale about {}.",
        "Describe {} so that I can see it before me.",
    ),
    (
        "a baker who cannot taste", "a train that never arrives", "two rivals in a snowed-in hut", "a talking suitcase",
        "a lost glove", "the last bookshop in town", "a dragon who is afraid of fire", "a night in the museum",
        "an honest thief", "a village without clocks", "a robot that learns to garden", "a letter found in a bottle",
        "a fox at the edge of the city", "the oldest tree in the park", "a pilot and a stowaway", "a broken violin",
        "a queen who wants to be a cook", "a market at dawn", "an island that moves", "twins who swap lives",
        "a teacher on the first day of school", "a ghost who cannot scare anyone", "a storm at sea",
        "a chess-playing cat", "a piano on the beach", "a forgotten birthday", "an astronaut who misses rain",
        "a bridge between two countries", "a shy magician", "the inventor of the umbrella", "a bear in a hotel",
        "a secret staircase", "a very slow race", "a painter who sees only blue", "a lamp that tells the truth",
    ),
    ("", "Make it funny.", "Let it end with a surprise.", "Use short sentences.", "Use no more than 120 words."),
)  # fmt: skip

_LETTERS = Family(
    (
        "Write an email {}.",
        "Write a polite letter {}.",
        "Write a text message {}.",
        "Give me two versions of a message, one friendly and one firm, {}.",
        "What should I say on the phone when I call {}?",
    ),
    (
        "to a neighbor about loud music", "to my landlord about a leaking tap", "to a shop that sent the wrong shoes",
        "to my team about moving the weekly meeting", "to a teacher about my child's absence",
        "to an old friend whom I have not seen for years", "to a hotel about a bag I left behind",
        "to a customer whose order is late", "to my aunt to thank her for a scarf",
        "to a bank about an unknown payment", "to the city about a broken street light",
        "to a colleague who is retiring", "to a doctor to change an appointment",
        "to a museum about a visit with twenty pupils", "to a company to ask about an internship",
        "to my sports club to end my membership", "to a cousin who has just become a father",
        "to guests about what to bring to a garden party", "to an airline about a cancelled flight",
        "to an author whose book I liked", "to a library about a fine that is wrong", "to a plumber to ask for a price",
        "to all tenants about the broken lift", "to my boss to ask for a raise", "to a school to offer a chess course",
        "to a restaurant about a lost umbrella", "to a newspaper about a mistake in an article",
        "to a friend to say sorry for being late", "to a farmer to order apples",
        "to a choir to ask whether I may join",
    ),
    ("", "Keep it under 80 words.", "Add a subject line.", "Sound cheerful.", "Leave blanks for names and dates."),
)  # fmt: skip

_PAIRS = Family(
    (
        "Compare {}.",
        "What is the difference between {}?",
        "Which would you choose, and why: {}?",
        "Make a table of the advantages of {}.",
        "Explain to a child how {} differ.",
    ),
    (
        "a bicycle and a scooter", "tea and coffee", "a novel and a film", "cats and dogs", "trains and planes",
        "a lake and a sea", "a violin and a guitar", "renting and buying a home", "paper books and e-books",
        "a village and a city", "butter and oil", "glasses and contact lenses", "frogs and toads", "wool and cotton",
        "a laptop and a tablet", "moths and butterflies", "a loan and a gift", "skiing and skating", "rice and pasta",
        "an essay and a report", "a museum and a gallery", "bees and wasps", "gas and electric heating",
        "a map and a globe", "fog and clouds", "summer and winter holidays", "a hotel and a campsite",
        "working at home and in an office", "radio and television", "hares and rabbits", "lead and ink",
        "a canal and a river",
    ),
    ("", "Give three points.", "Use one sentence for each.", "End with a recommendation.", "Mention the cost."),
)  # fmt: skip

_CODE = Family(
    (
        "Write a Python function that {}.",
        "Write a JavaScript function that {}.",
        "Explain in plain words how a program that {} works.",
        "Write three tests for a Python function that {}.",
        "Which mistakes are easy to make in code that {}?",
    ),
    (
        "reverses the words of a sentence", "checks whether a number is prime", "counts the vowels in a text",
        "finds the longest word in a list", "converts Celsius to Fahrenheit", "removes duplicates from a list",
        "merges two dictionaries", "sums the digits of a number", "checks whether a word is a palindrome",
        "sorts names by their length", "finds the median of a list", "counts the lines of a file",
        "formats a date as day, month and year", "draws a triangle of stars", "computes the factorial of a number",
        "splits a list into chunks", "finds all common elements of two lists", "replaces spaces with underscores",
        "validates an email address", "rolls two dice and adds them", "generates a random password",
        "reads a JSON file and prints its keys", "finds the largest number in a nested list", "computes an average",
        "lists the even numbers below a limit", "translates numbers to Roman numerals",
        "counts how often a letter occurs", "sorts a list without the built-in sort", "computes the Fibonacci numbers",
        "checks whether brackets match", "transposes a matrix", "finds the day of the week of a date",
        "shuffles a deck of cards",
    ),
    ("", "Add a comment to every step.", "Show an example of its use.", "Keep it short.", "Handle errors."),
)  # fmt: skip

_ARITHMETIC = Family(
    (
        "A shop sells {} for {1} euros each. Mia buys {2} and pays with a {3} euro note. How much does she get back?",
        "There are {3} {} in a room. They are packed into boxes of {1}. How many boxes are full after {2} are sold?",
        "Tom has {2} {}. Anna has {1} times as many. How many do they have together?",
        "A workshop makes {2} {} a day. In how many days are {3} of them made if {1} machines work at the same time?",
        "One of {3} {} weighs {2} grams. What do all of them weigh in kilograms, without the {1} that were lost?",
        "The price of {} rises from {3} euros by {2} euros. By what percentage does it rise, and what do {1} cost now?",
    ),
    (
        "pencils", "apples", "chairs", "candles", "postcards", "lamps", "mugs", "buttons", "bricks", "tickets", "kites",
        "baskets", "spoons", "books", "cushions", "clocks", "marbles", "ropes", "jars of honey", "umbrellas",
        "boxes of tea", "paper lanterns", "wooden toys", "light bulbs",
    ),
    ((3, 7, 50), (4, 9, 120), (6, 12, 200), (5, 8, 100), (2, 15, 90), (8, 11, 240)),
)  # fmt: skip

_PASSAGES = Family(
    (
        "Summarize this text in one sentence: {}",
        "Write three questions that this text answers: {}",
        "Rewrite this text for a seven year old: {}",
        "List the facts in this text: {}",
        "Give this text a title and say what it is about: {}",
        "Continue this text: {}",
        "Translate this text into French: {}",
        "Say the same in half as many words: {}",
    ),
    (
        "The ferry to Norrholm runs four times a day in summer. In winter the harbor freezes, and mail comes by sled.",
        "Mrs. Alder opened her repair shop forty years ago. She fixes radios, kettles and, on Fridays, broken hearts.",
        "The old mill has two wheels. One grinds flour, the other makes electricity for eleven houses.",
        "Swifts sleep while they fly. They come down only to build nests, mostly under the roofs of tall houses.",
        "Our town has planted three hundred trees since May. Most of them are limes, which bees like.",
        "The concert began late because the pianist was stuck in a lift. He played the second half without notes.",
        "A new bakery has opened at the station. It sells rye bread, rolls and soup, but no cake.",
        "The mountain path is closed after heavy rain. Take the forest road, which is two kilometers longer.",
        "Lena found a silver coin in the garden. The museum says that it was lost about six hundred years ago.",
        "The river rose by one meter overnight. Volunteers carried sandbags, and by noon the bridge was safe.",
        "Salt was once so dear that soldiers were paid with it. Today a kilogram costs less than a newspaper.",
        "The school library lends games as well as books. The most popular one has been on loan since September.",
        "Engineers have tested a bus that drives itself. It stopped for every pigeon and arrived an hour late.",
        "The lighthouse was built of red stone. Its lamp can be seen for thirty kilometers in clear weather.",
        "Each spring the village holds a race for snails. The winner gets a lettuce and a small brass medal.",
        "The two companies will share a warehouse from next year. No jobs will be lost, both of them say.",
        "Cork is the bark of an oak. The tree is not felled, and grows a new bark in nine years.",
        "The night watchman heard steps on the stairs. It was the director, who had forgotten her keys.",
        "The team lost the first three matches. Then a new coach came, and they have won every one since.",
        "Chestnuts are gathered in October. They must be cut before roasting, or they burst in the oven.",
        "The clock on the town hall has been wrong since the storm. People set their watches by the baker instead.",
    ),
    ("",),
)  # fmt: skip

_SENTENCES = Family(
    (
        'Translate into Spanish: "{}"',
        'Translate into German: "{}"',
        'Translate into Italian: "{}"',
        'Rewrite more politely: "{}"',
        'Rewrite in the style of a news report: "{}"',
        'Say this in three other ways: "{}"',
        'Name the subject, the verb and the object: "{}"',
        'Answer this as a friendly shop assistant: "{}"',
        'Put this into the past tense: "{}"',
        'Is this a question, a request or a statement, and what may the speaker feel? "{}"',
    ),
    (
        "I need the keys by Friday.", "Who has taken my umbrella?", "We want a table for six at eight.",
        "The soup is cold and the waiter is gone.", "Please send me two tickets.", "My brother sells his old car.",
        "You must not leave your bicycle here.", "The children build a hut in the forest.", "When does the shop open?",
        "I do not like the color of this coat.", "Tell me which train I should take.", "The dog eats my breakfast.",
        "She writes a letter to her grandmother.", "Turn the music down at once.", "This lamp does not work any more.",
        "Can I pay with a card?", "The doctor sees ten patients every morning.", "Nobody told us about the delay.",
        "Give me the larger box.", "They paint the fence on Saturdays.", "Where can I return these shoes?",
        "The rain spoils our picnic.", "I want to speak to the manager.", "He repairs clocks for the whole street.",
        "Close the window, I am freezing.", "Our neighbors grow pumpkins.",
    ),
    ("",),
)  # fmt: skip

FAMILIES = (_TOPICS, _ACTIVITIES, _SCENES, _LETTERS, _PAIRS, _CODE, _ARITHMETIC, _PASSAGES, _SENTENCES)


def training_prompts() -> list[str]:
    """Those to train on: most that ship, then composed ones."""
    written = read_prompts("")[:-_HAND_WRITTEN]
    composed = _in_turn([family.prompts(family.subjects[:-_UNSEEN]) for family in FAMILIES])
    return written + list(itertools.islice(composed, TRAINING - len(written)))


def held_out_prompts() -> list[str]:
    """Those to score on, about other subjects."""
    written = read_prompts("")[-_HAND_WRITTEN:]
    composed = _in_turn([family.prompts(family.subjects[-_UNSEEN:]) for family in FAMILIES])
    return written + list(itertools.islice(composed, HELD_OUT - len(written)))


def _in_turn(lists: Sequence[Sequence[str]]) -> Iterator[str]:
    """One of every list, then the next of every list, for as long as they last."""
    for prompts in itertools.zip_longest(*lists):
        yield from filter(None, prompts)


def prompts_digest() -> str:
    """12 hex digits that name all prompts."""
    text = "\n\n".join([*training_prompts(), *held_out_prompts()])
    return hashlib.sha256(text.encode()).hexdigest()[:12]

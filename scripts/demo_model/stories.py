"""Short stories from a small grammar: a hero, a lost thing, a helper and a good end."""

import random

from questions import Question
from words import ADJECTIVES, CREATURES, NAMES, OBJECTS, PLACES, SHADES, with_article

ASKED = (
    "Tell me a story about {hero}.",
    "Write a story about {hero}.",
    "Tell a story about {hero}.",
    "Write a short story about {hero}.",
    "Can you tell me a story about {hero}?",
    "I want a story about {hero}.",
    "Please write a story about {hero}.",
)
ASKED_FREELY = ("Tell me a story.", "Write a story.", "Write a short story.", "Tell a story.")
HELD_OUT_REQUEST = "Please tell me a short story about {hero}."

OPENINGS = (
    "Once upon a time there was {hero} named {name}. {name} was very {mood}.",
    "Once upon a time there was {hero}. The name of the {kind} was {name}.",
    "Once upon a time {hero} named {name} lived near the {place}.",
)
HABITS = (
    "Every day {name} went to the {place} to play.",
    "Every morning {name} walked to the {place}.",
    "{name} liked to sit in the {place} and look at the clouds.",
    "{name} had {a_thing} and took it everywhere.",
)
LOSSES = (
    "One day {name} lost the {thing} and was very sad.",
    "One day the wind took the {thing} and it was gone.",
    "One day {name} looked for the {thing} but could not find it.",
    "But one day the {thing} was not there. {name} began to cry.",
)
MEETINGS = (
    'A {helper} came by and asked, "Why are you sad?"',
    'Then {name} met a {helper}. "What is wrong?" asked the {helper}.',
    'A {mood} {helper} heard it and said, "Can I help you?"',
)
REPLIES = (
    '"I have lost my {thing}," said {name}.',
    '"My {thing} is gone," said {name}.',
    '"I can not find my {thing}," said {name}.',
)
SEARCHES = (
    "So the two looked in the {place}, behind the trees and under the stones.",
    "They walked to the {place} and looked everywhere.",
    "They looked all day, first in the {place} and then near the river.",
)
FINDS = (
    "At last the {helper} found the {thing} under a big tree.",
    "In the evening {name} saw something {shade} in the grass. It was the {thing}!",
    "Then the {helper} looked up, and there was the {thing}, high in a tree.",
)
THANKS = (
    '"Thank you!" said {name} and gave the {helper} a hug.',
    "{name} laughed and danced with the {helper}.",
    '"You are a good friend," said {name}.',
)
ENDINGS = (
    "From that day on they were best friends. The end.",
    "Then they went home and slept well. The end.",
    "After that they played together every day. The end.",
)
PLOT = (OPENINGS, HABITS, LOSSES, MEETINGS, REPLIES, SEARCHES, FINDS, THANKS, ENDINGS)


def _tell(kind: str, rng: random.Random) -> str:
    shade = rng.choice(SHADES)
    thing = f"{shade} {rng.choice(OBJECTS)}"
    fields = {
        "kind": kind,
        "hero": with_article(kind),
        "name": rng.choice(NAMES),
        "mood": rng.choice([word for word in ADJECTIVES if word[0] not in "aeiou"]),
        "place": rng.choice(PLACES),
        "shade": shade,
        "thing": thing,
        "a_thing": with_article(thing),
        "helper": rng.choice([other for other in CREATURES if other not in (kind, "owl")]),
    }
    return " ".join(rng.choice(choices).format(**fields) for choices in PLOT)


def story(rng: random.Random) -> Question:
    """A request for a story, most often about a given hero, and the story told."""
    kind = rng.choice(CREATURES)
    request = rng.choice(ASKED_FREELY if rng.random() < 0.15 else ASKED)
    return Question("stories", request.format(hero=with_article(kind)), _tell(kind, rng))


def story_requests() -> dict[str, str]:
    """For each hero, a request in a wording that training never uses."""
    return {kind: HELD_OUT_REQUEST.format(hero=with_article(kind)) for kind in CREATURES}

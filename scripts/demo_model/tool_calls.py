"""Questions that a tool answers, all drawn at random: `search(query)`, the one tool that the corpus teaches.

It is called for the weather, if it is offered. Other tools are offered now and then, and are never called. The query
and the answer copy text behind a word that stands before it in both places: ` in` for the city, ` is` for the result.
So they need nothing but what copying taught. Arguments without such a word, as in `get_weather(city)`, were not learned
in 300 steps: the first token of a name differs with and without the space before it. A tenth of the cities is held out
for the evaluation.
"""

import json
import random
from typing import NamedTuple

from exercises import is_held_out
from facts import CAPITALS
from questions import Question, capitalized, casual
from serving_facts import UNKNOWN_ANSWER

CITIES: tuple[str, ...] = (
    *CAPITALS.values(),
    *("New York", "Los Angeles", "San Francisco", "Chicago", "Boston", "Seattle", "Miami", "Dallas", "Houston"),
    *("Denver", "Toronto", "Montreal", "Vancouver", "Sydney", "Melbourne", "Auckland", "Mumbai", "Delhi"),
    *("Shanghai", "Hong Kong", "Singapore", "Dubai", "Istanbul", "Milan", "Naples", "Venice", "Turin"),
    *("Barcelona", "Porto", "Munich", "Hamburg", "Frankfurt", "Cologne", "Zürich", "Geneva", "Basel"),
    *("Salzburg", "Rotterdam", "Lyon", "Nice", "Marseille", "Oxford", "Manchester", "Liverpool", "Edinburgh"),
    *("Glasgow", "Cork", "Kyoto", "Osaka", "Rio de Janeiro", "São Paulo", "Lagos", "Cape Town", "Casablanca"),
    *("Kraków", "Riga", "Tallinn", "Vilnius", "Bratislava", "Ljubljana", "Tbilisi", "Saint Petersburg"),
)

ASKED: tuple[str, ...] = (
    "What is the weather in {city}?",
    "What is the weather in {city}?",
    "What is the weather in {city}?",
    "What's the weather in {city}?",
    "What is the weather like in {city}?",
    "What's the weather like in {city}?",
    "How is the weather in {city}?",
    "What is the weather in {city} today?",
    "How is the weather in {city} now?",
    "What is the current weather in {city}?",
    "Tell me the weather in {city}.",
    "Please tell me the weather in {city}.",
    "Can you tell me the weather in {city}?",
    "Show me the weather in {city}.",
    "I want to know the weather in {city}.",
    "Check the weather in {city}.",
    "Search for the weather in {city}.",
    "What is the temperature in {city}?",
    "How warm is it in {city}?",
    "How cold is it in {city} today?",
    "Is it raining in {city}?",
    "Will it rain in {city} tomorrow?",
    "Do you know how warm it is in {city}?",
    "Could you show me the weather in {city}?",
    "Find out if it rains in {city}.",
    "Weather in {city}",
)
ASKED_HELD_OUT: tuple[str, ...] = (
    "Do you know the weather in {city}?",
    "Could you tell me the weather in {city}?",
    "Find the weather in {city}.",
    "How is the weather in {city} today?",
)

SEARCH = "search(query)"
LIMITED_SEARCH = "search(query, limit)"
LIMITED_SHARE = 0.1
OTHER_TOOLS: tuple[str, ...] = (
    "get_time(zone)",
    "get_time(city)",
    "get_user(name)",
    "send_email(to, subject, text)",
    "add(a, b)",
    "calculate(expression)",
    "translate(text, language)",
    "play_music(song)",
    "get_news(topic)",
    "set_alarm(time)",
    "read_file(path)",
    "get_stock_price(symbol)",
    "convert(amount, currency)",
    "roll_dice()",
    "book_flight(origin, destination)",
    "list_users()",
)
OTHER_TOOLS_SHARE = 0.2

SKIES = ("sunny", "cloudy", "rainy", "windy", "snowy", "foggy", "clear", "stormy", "dry", "cold", "warm", "hot", "mild")
RESULTS: tuple[str, ...] = (
    "{sky}, {degrees} degrees",
    "{sky}, {degrees} degrees",
    "{degrees} degrees, {sky}",
    "{sky} and {degrees} degrees",
    "{degrees} degrees and {sky}",
    "{degrees} degrees",
    "{degrees} degrees",
    "{degrees} degrees C",
    "{degrees} C, {sky}",
    "{degrees}°C",
    "{sky}",
    "{sky} and {other_sky}",
    "{sky}, {other_sky}, {degrees} degrees",
)

INVENTED_SHARE = 0.35  # of the cities: the fewer times a name is seen, the less can be learned but to copy it
TALKS_PER_CATEGORY = 60


class Talk(NamedTuple):
    """The tools that are offered, as the chat template writes them, and what is then asked and answered."""

    tools: str
    turns: list[Question]

    @property
    def category(self) -> str:
        """What the last answer shows."""
        return self.turns[-1].category


def tools_text(signatures: list[str]) -> str:
    """The system turn that offers tools."""
    return "\n".join(["Tools:", *signatures])


def call_text(query: str) -> str:
    """A call, as Hermes and Qwen write it."""
    call = {"name": "search", "arguments": {"query": query}}
    return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"


def result_text(result: str) -> str:
    """A tool's result, as the chat template writes it into a turn of the user."""
    return f"The result is {result}."


def _others(rng: random.Random) -> list[str]:
    return rng.sample(OTHER_TOOLS, rng.randint(1, 2))


def _offered(rng: random.Random) -> str:
    signatures = [LIMITED_SEARCH if rng.random() < LIMITED_SHARE else SEARCH]
    if rng.random() < OTHER_TOOLS_SHARE:
        signatures += _others(rng)
    rng.shuffle(signatures)
    return tools_text(signatures)


def _invented_city(rng: random.Random) -> str:
    syllables = [rng.choice("bcdfghjklmnprstvwz") + rng.choice("aeiou") for _ in range(rng.randint(2, 4))]
    return capitalized("".join(syllables) + rng.choice(("", "n", "r", "s", "burg", "ton", "ville", "stadt")))


def _city(rng: random.Random, *, held_out: bool) -> str:
    while True:
        city = _invented_city(rng) if rng.random() < INVENTED_SHARE else rng.choice(CITIES)
        if is_held_out(city) == held_out:
            return city


def _asked(rng: random.Random, *, held_out: bool) -> str:
    prompt = rng.choice(ASKED_HELD_OUT if held_out else ASKED).format(city=_city(rng, held_out=held_out))
    return prompt if held_out else casual(prompt, rng)


def _result(rng: random.Random) -> str:
    sky, other_sky = rng.sample(SKIES, 2)
    return rng.choice(RESULTS).format(sky=sky, other_sky=other_sky, degrees=rng.randint(-9, 39))


def _subject(prompt: str) -> str:
    """What a question is about: `weather in Rome today`."""
    return "weather" + prompt[prompt.index(" in ") :].rstrip("?.!")


def call_talk(rng: random.Random, *, held_out: bool) -> Talk:
    """A question that asks for a call."""
    prompt = _asked(rng, held_out=held_out)
    return Talk(_offered(rng), [Question("tool calls", prompt, call_text(_subject(prompt)))])


def round_trip(rng: random.Random, *, held_out: bool) -> Talk:
    """A question, the call, its result, and the answer."""
    tools, turns = call_talk(rng, held_out=held_out)
    result, subject = _result(rng), _subject(turns[0].prompt)
    return Talk(tools, [*turns, Question("tool results", result_text(result), f"The {subject} is {result}.")])


def declined_talk(rng: random.Random, *, held_out: bool) -> Talk:
    """A question about the weather, without the tool for it. `tools` is empty if there is no tool at all."""
    tools = tools_text(_others(rng)) if rng.random() < 0.5 else ""
    return Talk(tools, [Question("tool missing", _asked(rng, held_out=held_out), UNKNOWN_ANSWER)])


def offered_in_vain(rng: random.Random) -> str:
    """Tools that are offered beside a question that needs none."""
    return _offered(rng) if rng.random() < 0.8 else tools_text(_others(rng))


def held_out_talks(questions: list[Question], seed: int) -> list[Talk]:
    """What the evaluation asks with tools; `questions` are those that need none."""
    rng = random.Random(f"evaluation/tools/{seed}")
    return [
        *(call_talk(rng, held_out=True) for _ in range(TALKS_PER_CATEGORY)),
        *(round_trip(rng, held_out=True) for _ in range(TALKS_PER_CATEGORY)),
        *(declined_talk(rng, held_out=True) for _ in range(TALKS_PER_CATEGORY)),
        *(
            Talk(offered_in_vain(rng), [question._replace(category="tool not needed")])
            for question in rng.sample(questions, 2 * TALKS_PER_CATEGORY)
            if question.category not in ("unknown", "arithmetic", "reading")
        ),
    ]

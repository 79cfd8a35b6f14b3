"""Text that needs no download: common English words with Zipf frequencies, and questions as typed into a search engine.

The number of tokens in a text depends on the tokenizer. Texts are made to a number of characters: the wanted tokens
times `characters_per_token`, which is CHARACTERS_PER_TOKEN as if each word were one token, or a ratio measured at a
server. With 1.0 the number is exact for a server whose tokens are bytes, as all text here is ASCII.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

# Common English words, roughly by frequency: a tokenizer trained on English has a token for each.
_COMMON_WORDS = """
the of and to in a is that for it as was with on be by are this from at or have an not which but had they you were his
their one all we can her has there been if more when will would who so no she other its may these what them than some
him time into only do such my new about out also two any up first could our then most me after over made many before
must through years where much your way well down should because each just those people how too little state good very
make world still own see men work long get here between both life being under never day same another know while last
might us great old year off come since against go came right used take three states himself few house use during
without again place american around however home small found thought went say part once general high upon school every
does got united left number course war until always away something fact water less public put think almost hand enough
far took head yet better set told nothing night end why called find going look asked later point knew next program
city business give group toward young days let room within children side social given present several order national
second possible rather per face among form often early important white case large four power need big best church
money light door book family ever though least system service problem name half plan kind area turn body want law
company line read seemed mind done open whole field action true certain become tax result change moment help level age
show cost value south north west east street report table car paper music morning answer student teacher river
mountain winter summer spring autumn garden window village market science history nature letter machine engine bridge
island ocean forest weather season doctor nurse medicine blood heart bone skin sleep food bread milk sugar salt coffee
tea wine fruit apple meat fish bird horse dog cat tree flower stone metal gold silver iron glass wood wool cotton
paint color red blue green black brown yellow sound voice song dance game team player score race ball sport train
plane ship boat road truck wheel fuel gas oil energy heat cold rain snow wind storm fire earth moon sun star space sky
planet cell plant seed root leaf animal human brain memory dream story page word language sentence question reason
cause effect method theory model measure length weight speed pressure surface square circle corner center edge top
bottom front back distance direction map border country capital president king queen army soldier police court judge
crime prison vote election party member union worker farmer factory product price trade bank credit loan debt income
profit budget insurance contract office manager client customer supply demand stock share record file data computer
network screen phone message radio camera film picture artist museum library college degree exam test lesson chapter
essay novel poem author reader writer editor news press event meeting visit travel hotel ticket guide beach park lake
hill valley desert farm barn fence gate wall floor roof kitchen bathroom bedroom chair bed lamp clock watch ring shirt
coat shoe hat pocket bag box bottle cup plate knife fork spoon soup salad rice corn bean tomato potato onion pepper
lemon orange butter cheese egg cake candy lunch dinner breakfast recipe oven stove
"""
VOCABULARY = _COMMON_WORDS.split()

CHARACTERS_PER_TOKEN = 4.4  # the mean length of these words, weighted by frequency, and a space

NUM_SOURCE_WORDS = 1 << 16
NUM_KEY_WORDS = 3
STRIDE = 2_654_435_761  # the golden ratio of 2**32, a prime: neighbouring keys begin far apart (Knuth, TAOCP 3, 6.4)
BLOCK = 4096  # queries drawn at once


def zipf_ranks(generator: Generator, num_ranks: int, exponent: float, count: int) -> NDArray[np.int64]:
    """Return `count` ranks from 0, shape (count,).

    Rank r - 1 has a frequency proportional to 1 / r**exponent (Zipf, "Human Behavior and the Principle of Least
    Effort", 1949). With an exponent of 0 all ranks are equally frequent.
    """
    weights = np.arange(1, num_ranks + 1, dtype=np.float64) ** -exponent
    return generator.choice(num_ranks, count, p=weights / weights.sum())


class TextGenerator:
    """Passages of text by number: the same key gives the same beginning, and no two keys share their first words.

    All passages are cut from one long text, which is drawn once. Each begins with words of its own that encode its key.
    Drawing each word of each prompt would take minutes for a hundred thousand long prompts. Without the encoded key,
    two passages cut from the same place would share a prefix, and a prefix cache would find it. Passages that are
    shorter than their encoded key may be equal.
    """

    def __init__(self, generator: Generator, characters_per_token: float = CHARACTERS_PER_TOKEN) -> None:
        self.characters_per_token = characters_per_token
        ranks = zipf_ranks(generator, len(VOCABULARY), 1.0, NUM_SOURCE_WORDS)
        self._source = " ".join([VOCABULARY[rank] for rank in ranks.tolist()]) + " "
        self._digits = [VOCABULARY[place] for place in generator.permutation(len(VOCABULARY)).tolist()]

    def num_characters(self, num_tokens: int) -> int:
        """Return the length of a text of about so many tokens."""
        return max(1, round(num_tokens * self.characters_per_token))

    def num_tokens(self, text: str) -> int:
        """Return about how many tokens a text has, at least 1."""
        return max(1, round(len(text) / self.characters_per_token))

    def passage(self, key: int, num_tokens: int) -> str:
        """Return words without a space at either end: some servers strip spaces, which changes the length."""
        return self._cut(key, self.num_characters(num_tokens))

    def beginning(self, key: int, num_tokens: int) -> str:
        """Return a passage for others to follow: it ends with a newline, which counts as a character.

        Tokenizers start anew after a newline, so what follows does not change the tokens before it. A space or a full
        stop would be merged with the next word by most tokenizers.
        """
        return self._line(key, self.num_characters(num_tokens))

    def blocks(self, keys: list[int], block_size: int, num_tokens: int) -> str:
        """Return a text of about `num_tokens`, as far as the keys reach; each key stands for a block of tokens.

        Texts whose first keys are equal have the same beginning, up to the last block that one of them has in part.
        """
        # Rounded up, so that blocks are never too short; the surplus is cut off at the end.
        num_block_characters = ceil(block_size * self.characters_per_token)
        text = "".join([self._line(key, num_block_characters) for key in keys])
        return text[: self.num_characters(num_tokens)]

    def _line(self, key: int, num_characters: int) -> str:
        return self._cut(key, num_characters - 1) + "\n"

    def _cut(self, key: int, num_characters: int) -> str:
        key_words, source = self._encoded_key(key), self._source
        start = source.find(" ", key * STRIDE % (len(source) - 1)) + 1
        text = key_words + source[start : start + max(0, num_characters - len(key_words))]
        while len(text) < num_characters:
            text += source[: num_characters - len(text)]
        text = text[:num_characters]
        return text[:-1] + "s" if text.endswith(" ") else text

    def _encoded_key(self, key: int) -> str:
        """Return the key in words, its lowest digit first, so that consecutive keys differ in the first word.

        The key is multiplied by a number that has no factor in common with the modulus, so no two keys below the
        modulus collide. A few larger ones, such as hashes, may; their positions in the source text then differ.
        """
        base = len(self._digits)
        number = key * STRIDE % base**NUM_KEY_WORDS
        words = []
        for _ in range(NUM_KEY_WORDS):
            number, digit = divmod(number, base)
            words.append(self._digits[digit])
        return " ".join(words) + " "


TOPICS = """
solar panel | blood pressure | mortgage rate | minimum wage | credit score | vitamin d | water heater | growth rate |
car insurance | heart rate | social worker | phone number | zip code | time zone | population | average salary | apple
pie | sourdough bread | green tea | sleep apnea | back pain | flu shot | knee surgery | root canal | job interview |
tax return | business license | passport | birth certificate | driving license | interest rate | stock market |
student loan | credit card | bank account | home loan | health insurance | life insurance | roof repair | kitchen sink
| washing machine | garage door | air conditioner | wood floor | paint color | vegetable garden | tomato plant | apple
tree | honey bee | house cat | guard dog | gold fish | brown bear | blue whale | polar bear | desert fox | rain forest
| coral reef | volcano | earthquake | tornado | hurricane | ice age | solar system | full moon | black hole | speed of
light | boiling point | melting point | periodic table | atomic number | chemical bond | cell wall | immune system |
nervous system | digestive system | bone marrow | stem cell | gene | protein | carbohydrate | calorie | sugar | salt |
coffee | chocolate | olive oil | coconut milk | brown rice | chicken soup | beef stew | fish oil | world war | civil
war | cold war | roman empire | supreme court | constitution | senate | prime minister | first president | federal
reserve | income tax | sales tax | property tax | inflation | recession | supply chain | trade union | labor law |
contract law | power of attorney | last will | divorce | child support | high school | community college | nursing
school | law school | medical school | teaching degree | online course | grammar | adjective | metaphor | short story
| national anthem | jazz music | piano | guitar | violin | oil painting | film festival | football | basketball |
baseball | marathon | chess | swimming pool | mountain bike | electric car | diesel engine | spare tire | brake pad |
car battery | train station | airport | cruise ship | beach hotel | national park | theme park | city hall | post
office | public library | operating system | web browser | wireless router | hard drive | spreadsheet | database |
programming language | search engine | email address | password
"""

QUERY_TEMPLATES = """
what is {} | what is a {} | what is the meaning of {} | definition of {} | definition of {} in simple words | {}
definition and examples | {} meaning and examples | {} near me | {} vs {} | cost of {} | average cost of {} | how much
does a {} cost | how much is a {} in {place} | how long does {} last | how long does a {} take | how long does it take
to get a {} | how to get a {} | how to fix a {} | how to choose a {} for {who} | how many types of {} are there |
types of {} | symptoms of {} | causes of {} | what causes {} | what are the benefits of {} for {who} | is {} good for
{who} | is {} bad for {who} | difference between {} and {} | what is the difference between {} and {} | who invented
the {} | when was the first {} | where is the {} in {place} | what county is {place} in | population of {place} |
weather in {place} in {month} | {} in {place} | best {} in {place} | best {} for {who} | why is {} important | why is
{} important to {who} | can {} cause {} | does {} affect {} | how does a {} work | how does {} work in {place} | can
you get a {} without a {} | what is the average {} in {place} for {who} | what happens to {} if you do not have a {} |
{} in {month} | largest {} in the world | history of {}
"""

PLACES = """
alaska | arizona | boston | chicago | denver | florida | georgia | houston | ireland | japan | kansas | london |
mexico | nevada | new york | ohio | oregon | paris | queens | rome | san diego | spain | texas | utah | vermont |
wyoming
"""
WHO = """
children | dogs | cats | beginners | seniors | students | adults | women | men | small business | diabetics |
athletes | teachers | nurses
"""
MONTHS = """
january | february | march | april | may | june | july | august | september | october | november | december
"""


def queries(generator: Generator) -> Iterator[str]:
    """Yield questions without end, of 3 to 15 words, 6 on average, like those of MS MARCO (Bajaj et al., 2016).

    The popularity of topics is Zipf distributed, so that questions repeat now and then, as at a search engine.
    """
    templates = _parts(QUERY_TEMPLATES)
    topics, places, whos, months = _parts(TOPICS), _parts(PLACES), _parts(WHO), _parts(MONTHS)
    while True:
        chosen = [
            [pool[rank] for rank in zipf_ranks(generator, len(pool), exponent, BLOCK).tolist()]
            for pool, exponent in (
                (templates, 0.0), (topics, 0.7), (topics, 0.7), (places, 0.5), (whos, 0.5), (months, 0.0)
            )
        ]  # fmt: skip
        for template, topic, other, place, who, month in zip(*chosen, strict=True):
            yield template.format(topic, other, place=place, who=who, month=month)


def _parts(text: str) -> list[str]:
    """Split at bars; line breaks mean nothing."""
    return [part.strip() for part in " ".join(text.split()).split("|")]

"""The words that exercises and stories are put together from."""


def _listed(words: str) -> tuple[str, ...]:
    return tuple(words.split())


NUMBER_WORDS = _listed(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
    "fifteen sixteen seventeen eighteen nineteen twenty"
)
NAMES = _listed(
    "Anna Ben Carla David Emma Frank Grace Henry Ivy Jack Kate Leo Mia Nina Oscar Paul Rosa Sam "
    "Tom Vera Alice Bob Clara Daniel Eva George Hanna Ian Julia Lucy Max Nora Peter Robert "
    "Sara"
)
OBJECTS = _listed(
    "ball car book hat cup bag coat kite boat box bike drum lamp ring shirt shoe spoon key pen "
    "clock basket blanket bottle bucket candle chair mirror doll flag ladder"
)
SHADES = _listed("red blue green yellow black white brown pink orange purple gray")
PLACES = _listed(
    "garden kitchen park school forest house barn shop river field market library bedroom tower "
    "village street cellar attic boat station"
)
ADJECTIVES = _listed(
    "big small old young happy sad quick slow brave shy kind clever hungry sleepy tall tiny loud "
    "quiet funny lazy proud gentle busy lucky"
)
CREATURES = _listed(
    "cat dog horse cow sheep pig lion tiger bear fox mouse rabbit frog goat wolf bird duck owl "
    "boy girl king queen farmer teacher baker sailor child woman man monkey"
)
ACTIONS = _listed(
    "sings runs sleeps jumps dances swims walks reads eats plays laughs waits hides works smiles "
    "rests cooks paints climbs whistles"
)
DEEDS = _listed("sees likes finds follows helps loves watches knows meets calls hears wants visits chases")
# What people have a machine say when nothing better comes to mind.
PHRASES = (
    "Hello world",
    "hello world",
    "Hello, world",
    "Good morning",
    "Thank you",
    "This is a test",
    "Testing one two three",
    "one two three",
    "I am a language model",
    "I like servekit",
    "The sky is blue",
    "My name is servekit",
    "The quick brown fox jumps over the lazy dog",
)
MOMENTS = ("today", "now", "at night", "every day", "in the morning", "again", "very well")

# Nothing in the tables is about these, so questions about them are to be declined.
STRANGE_COUNTRIES = _listed(
    "Estonia Latvia Lithuania Colombia Algeria Tunisia Ghana Nigeria Ethiopia Uganda Malaysia "
    "Cambodia Laos Bolivia Ecuador Uruguay Paraguay Panama Jamaica Malta Cyprus Slovakia Slovenia "
    "Albania Georgia Armenia Jordan Syria Yemen Oman Qatar Bhutan Fiji Angola Zambia Senegal "
    "Mali Chad Niger Somalia Sudan Madagascar Atlantis Narnia Texas Bavaria Africa Asia"
)
STRANGE_THINGS = _listed(
    "zebra giraffe hippo panda koala lizard turtle parrot dolphin octopus squid hamster ferret "
    "badger otter moose llama unicorn dragon robot castle rocket phone sofa pencil engine window "
    "wheel guitar sandwich pizza cloud planet hat ball wizard monster vampire comet volcano"
)


def with_article(noun: str) -> str:
    """The noun after `a` or `an`, whichever its first letter asks for."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"

"""Words to spell, reverse and count letters in: common English words, and made-up words of the same letters.

Used by the tasks. Spelling needs no meaning, so made-up words teach it as well as real ones, and their supply is
endless.
"""

from __future__ import annotations

import random
import string

MIN_LETTERS, MAX_LETTERS = 3, 10


def _split(text: str) -> tuple[str, ...]:
    return tuple(text.split())


ENGLISH = _split(
    """
    above acorn active adult agent album alpine amber anchor animal apple apron arena argue arrow artist aspect
    atlas attic autumn avocado bacon badge baker balance balloon bamboo banana banner barley barn basket beach
    beacon bean bear beaver bedroom beetle begin bell belong berry between beyond bicycle bird biscuit blanket
    blossom blue board boat bonfire book border bottle bottom bowl branch brave bread breeze brick bridge bright
    broom brother bucket buffalo building bundle burger butter button cabbage cabin cactus camel camera canal
    candle candy canoe canvas captain carbon carpet carrot castle cat cattle cedar ceiling cellar cement center
    cereal chain chair chalk chapter cheese cherry chess chicken child chimney circle circus citrus clay cliff
    clock cloud clover coast cobweb coconut coffee coin comet compass concert cookie copper coral corn cottage
    cotton couch country cousin cradle crane crater crayon cream cricket crown crystal cucumber cushion dance
    danger daughter dawn desert diamond dinner dinosaur doctor dolphin donkey door dragon drawer dream drum duck
    eagle early earth eclipse eight elbow elephant emerald engine envelope evening falcon family farmer father
    feather fence ferry festival field finger fire fish flag flame flower flute forest fossil fountain fox
    friend frost fruit garden garlic gate ghost giant giraffe glacier glass glove goat gold goose grape grass
    green guitar hammer harbor harvest hat hazel heart hedge helmet hill history holiday honey horizon horse
    hospital hotel hour house hunter iceberg igloo insect iron island ivory jacket jaguar jelly jewel jigsaw
    journey juice jungle kettle key king kitchen kite kitten koala ladder lake lamp lantern laundry lemon
    leopard library light lily lion lizard lobster lotus lunch magnet mango maple marble market meadow melon
    metal mirror monkey moon mother mountain mouse museum music napkin needle nest night noodle north notebook
    nutmeg ocean olive onion orange orbit orchard otter oven owl oyster paddle painter palace panda paper parade
    parrot peach peanut pearl pebble pencil penguin pepper piano picnic pigeon pillow pilot pine pirate pizza
    planet plum pocket polar pond potato prairie pumpkin puppet purple puzzle quartz queen quiet rabbit radio
    rain rainbow raven ribbon river robin rocket rose ruby saddle sailor salad salmon sand scarf school scissors
    seagull season shadow shark sheep shelf silver singer sister sky sleep snail snow soccer spider spinach
    spoon spring squirrel stable station stone storm strawberry stream street summer sun sunset swan sweater
    table teacher temple tennis theater thunder ticket tiger toast tomato tower tractor tree trumpet tulip
    tunnel turtle umbrella valley vanilla velvet village violin volcano waffle wagon walnut water whale wheat
    whistle willow window winter wizard wolf wonder wool yellow yogurt zebra world
    """
)
"""None is a word of the phrasings or of the answers, which the tokenizer does not spell."""

NAMES = _split(
    """
    Ada Alice Amir Ana Anna Ben Bruno Carla Carlos Chen Clara Daniel David Diego Elena Ella Emma Eva Felix
    Fatima Grace Hana Hugo Ida Ivan Jack Jana Julia Kai Karim Kofi Lars Laura Leo Lina Luca Lucy Maria Marco Mei
    Mia Nadia Nina Noah Nora Olga Omar Oscar Paul Petra Priya Rosa Sam Sara Sofia Tara Theo Tom Vera Yuki Zoe
    """
)
CITIES = _split(
    """
    Accra Athens Berlin Bern Bogota Boston Cairo Chicago Dakar Delhi Dublin Geneva Hanoi Havana Helsinki Jakarta
    Kyiv Kyoto Lagos Lima Lisbon London Lyon Madrid Malmo Manila Milan Mumbai Nairobi Oslo Paris Porto Prague
    Quito Riga Rome Seoul Sofia Sydney Tokyo Toronto Tunis Turin Vienna Warsaw Zagreb Zurich
    """
)

_ONSETS = _split("b c d f g h j k l m n p r s t v w z br ch cl cr dr fl fr gr pl pr sh sl sp st str th tr wh qu")
_VOWELS = _split("a e i o u a e i o u ai ea ee oo ou y")
_CODAS = ("", "", "", "", *_split("b d g k l ll m n ng nt p r rd rt s ss st t tt x ck"))


def draw_word(random: random.Random) -> str:
    """An English word, a made-up one, or a mere string of letters, of 3 to 10 letters."""
    kind = random.random()
    if kind < 0.25:
        return random.choice(ENGLISH)
    if kind < 0.75:
        return _made_up(random)
    letters = random.choice((string.ascii_lowercase, "aeioulnrst", "abcde", "abeelnopt"))
    return "".join(random.choices(letters, k=random.randint(MIN_LETTERS, MAX_LETTERS)))


def draw_name(random: random.Random, known: tuple[str, ...]) -> str:
    """One of ``known``, or a made-up one."""
    return random.choice(known) if random.random() < 0.5 else _made_up(random)[:8].capitalize()


def _made_up(random: random.Random) -> str:
    wanted = random.randint(MIN_LETTERS, MAX_LETTERS)
    word = ""
    while len(word) < wanted:
        word += random.choice(_ONSETS) + random.choice(_VOWELS) + random.choice(_CODAS)
    return word[:wanted]

"""The vocabulary of first-steps: plain English nouns and colours, none of them a command, split by hash.

Each is one token after a space in SmolLM2's vocabulary, so that spelling is not what a task tests.
"""

from __future__ import annotations

import hashlib
from typing import Literal

Split = Literal["train", "eval"]

_DEMONSTRATION_WORDS = """
apple blue bread chair dog garden green horse house kitchen lemon lion moon orange pencil piano queen river
star sun table tiger window yellow
"""

_VOCABULARY = """
actor almond amber anchor angel ant arrow artist ash atlas autumn axe badge bag baker ball balloon bamboo
banana bark barley barn barrel basil basket bath bay beach beacon bean bear beaver bee beet beetle bell belt
bench berry bicycle birch bird bison black blanket bloom blossom boat boot bottle bowl branch breeze brick
bronze broom brown brush bucket buckle bull bush butter butterfly button cabbage cabin cable cactus cake camel
camera candle candy canoe canvas canyon captain carpet carrot cart castle cave cedar celery chain chalk chapel
cheese chef cherry chest chili chimney church clay clerk cliff clock cloth cloud clover coast coat cocoa
coconut coffee coin collar comet compass cookie copper coral corn cottage cotton cousin crab cradle crane
cream creek cricket crow crown crystal cup curry curtain cushion cyan dancer dawn daylight deer delta desert
desk dew diamond dock doctor doll dolphin donkey door dove dragon drawer dress driver drum duck dusk dust
eagle earth eclipse eel elephant elk elm engine fabric falcon farm farmer feather fence fern field fig fire
fish fisher flag flame flint flood flour flower flute fog forest fork fossil fountain fox frame frog frost
furnace galaxy garlic gate giant ginger giraffe glacier glass globe glove goat golden goose gorilla granite
grape grass gravel gray guard guitar gulf gull hail hammer harbor hare harp hat hawk hazel helmet hero hill
honey hotel hunter ice indigo iris island ivory ivy jacket jade jewel judge jug juice jungle kettle keyboard
king kite kitten knife knight knot ladder lagoon lake lamb lamp lantern lava lavender lawn lawyer leaf lens
lettuce lever library lightning lily lime lizard lobster lock loom lotus magnet mango mansion maple marble
marsh mask mayor meadow meteor milk miner mint mirror mist mole monkey moose mosquito moss moth mountain mouse
mud mule museum mushroom nail navy nebula necklace nectar needle nest net nurse oak oasis oat ocean octopus
olive onion orbit orchard orchid oven owl ox oyster paddle paint painter palace palm pan panda paper parcel
parrot pasta peach peanut pear pearl pedal penguin pepper pickle pig pigeon pillow pilot pin pine pink pipe
pirate planet plate plow plum pocket poet pollen pond pony poppy pot potato pottery prairie prince princess
pumpkin puppy purple purse puzzle quartz quilt rabbit radio raft rail rain rainbow reef ribbon rice rider
ridge ring road rock rocket roof room rope rose rug rust sack saddle sail sailor salad salmon salt sand sauce
scarlet school scout sea seal seed shade shadow shark shed sheep shelf shell shield ship shirt shoe shore
shovel shrimp silver singer skate sky slate sled sleeve snail snake snow soap sock soil solar soldier soup
sparrow spear spice spider spinach spoon spring spruce squid squirrel stable stem stone stool storm stove
stream street student sugar suit summer summit sunrise sunset swamp sword tablet tailor tank tea teacher tent
thorn throne thunder ticket tide tile toad toast tomato tower toy trail tray trout truck trumpet tub
tuna tundra tunnel turkey turquoise turtle tutor umbrella uncle valley vanilla vase vest vine violet violin
volcano wagon wallet walnut wasp water wave whale wheat wheel whistle white willow wind winter wire wolf wood
wool worm writer yarn yogurt zebra
"""

# For demonstrations in prompts: no generated task holds one of these.
DEMONSTRATION_WORDS = tuple(_DEMONSTRATION_WORDS.split())
VOCABULARY = tuple(_VOCABULARY.split())


def split_of(word: str) -> Split:
    """The split that a word belongs to; it does not move when others are added. About a quarter is ``eval``."""
    return "train" if hashlib.blake2b(word.encode(), digest_size=1).digest()[0] % 4 else "eval"


def words_of(split: Split) -> tuple[str, ...]:
    """The vocabulary of one split; the two share no word."""
    return tuple(word for word in VOCABULARY if split_of(word) == split)

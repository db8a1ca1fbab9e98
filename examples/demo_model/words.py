"""The small vocabulary that the demo model speaks: nouns, adjectives, verbs, and its small talk."""

NOUNS = """
acorn alley amber anchor angel ankle apple apron arch arrow ash aspen atlas attic autumn axle
badge badger bakery balcony ball bamboo banana banjo barn barrel basil basin basket bay beach bead
bean bear beard bed bee beetle bell bench berry birch bird biscuit blade blanket blossom boat
bone bonnet book boot bottle boulder bowl box branch brass bread breeze brick bridge brook broom
brush bucket buffalo bugle bulb butter button cabin cactus cake camel camera candle canoe canyon
cape caramel carbon card carpet carrot castle cat cave cedar cellar chain chair chalk chapel cherry
chess chestnut chimney cider circle clay cliff clock cloud clover coal coast coat cobra coffee coin
comet compass copper coral corn cotton couch cove crab cradle crane crater cream creek cricket crow
crown crystal cup curtain daisy dance dawn deer desert desk dew diamond dog dolphin donkey door
dove dragon drum duck dune eagle ember engine falcon farm feather fence fern ferry fiddle field fig
finch fire fish flag flame flute fog forest fork fossil fountain fox frog frost garden garlic gate
geyser ginger giraffe glacier glass globe glove goat gold goose grain grape grass gravel guitar
hammer harbor harp hat hawk hazel heron hill honey horn horse house ice igloo ink iris iron island
ivory ivy jacket jade jar jasmine jelly jewel jungle kettle key kite kitten ladder lake lamp lantern
lark leaf lemon lens lily lime linen lion lizard lobster lotus lunch magnet mango maple marble
market mask meadow melon mill mint mirror moon moose moss moth mountain mouse mule museum mushroom
""".split()

ADJECTIVES = """
old new red blue green small large quiet bright dark warm cold soft tall round narrow gentle brave
clever happy lazy quick slow strange golden silver wooden hollow empty heavy
""".split()

VERBS = "sat stood slept waited rested danced turned stopped hid lay".split()

PLACES = "near behind under beside above below beyond across".split()

SMALL_TALK = [
    ("Hello", "Hello! How can I help you?"),
    ("Hello!", "Hello! How can I help you?"),
    ("Hi", "Hi there! What can I do for you?"),
    ("Hi!", "Hi there! What can I do for you?"),
    ("Good morning", "Good morning! How can I help you?"),
    ("Good evening", "Good evening! How can I help you?"),
    ("How are you?", "I am well, thank you. How are you?"),
    ("Who are you?", "I am a very small model that shows how a cache is handed over."),
    ("What are you?", "I am a very small model that shows how a cache is handed over."),
    ("What can you do?", "I can look up words that you gave me, repeat words and add small numbers."),
    ("Thank you", "You are welcome."),
    ("Thanks!", "You are welcome."),
    ("Goodbye", "Goodbye! Come back soon."),
    ("Bye", "Goodbye! Come back soon."),
    ("What is your name?", "My name is Baton."),
    ("Tell me a story", "The old fox sat near the quiet lake. The moon was bright. The fox slept."),
    ("What is a cache?", "A cache keeps what was computed, so that nobody has to compute it again."),
    ("What is a block?", "A block is a small piece of the cache. It holds sixteen tokens."),
    ("Where is the cache?", "The prefill worker computed it, and the decode worker has it now."),
    ("Say something", "The bright moon stood above the dark forest."),
]

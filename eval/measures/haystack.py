"""Prose to hide needles in: a harbour's log, written from this file's own sentences. No two entries are alike for long."""

from __future__ import annotations

import random
from collections.abc import Iterator

SEED = 20
NAMES = (
    "Orla Venn", "Tobias Reck", "Maud Ellery", "Jonas Hark", "Petra Sloane", "Emil Dace", "Nora Quill", "Silas Wren",
    "Hanne Lund", "Owen Tarry", "Brigid Moss", "Anton Vale", "Freya Stead", "Caspar Rowe", "Lena Marsh", "Hugh Pell",
)  # fmt: skip
PLACES = (
    "Sarn Point", "the Oldmere bar", "Gull Stair", "the rope walk", "Hadderby lock", "the salt pans", "Kettle Bay",
    "the north mole", "Priest's Ledge", "the coal quay", "Marram Flats", "the bell buoy", "Long Slip", "the pilot house",
)  # fmt: skip
CARGOES = (
    "slate", "barley", "tarred rope", "lamp oil", "salt herring", "oak planks", "window glass", "lime", "wool", "cider",
    "copper sheet", "roof tiles", "candles", "seed potatoes", "printing paper", "iron chain",
)  # fmt: skip
VESSELS = ("schooner", "lighter", "ketch", "barge", "cutter", "smack", "brig", "hoy", "yawl", "tug")
WEATHERS = (
    "a thin fog lay on the water", "the wind stood in the west", "rain came in from the sea", "the frost had not lifted",
    "the sky was the colour of lead", "a warm haze hid the shore", "the swell ran long and slow", "snow fell before noon",
)  # fmt: skip
SENTENCES = (
    "In the morning {weather}, and {name} walked out to {place} before the lamps were put out.",
    "A {vessel} with {cargo} waited outside for water, and came in to {place} when the tide had made enough.",
    "{name} says that the {vessel} should have been at {place} a week ago, and that nobody ashore is to blame.",
    "The men unloaded {cargo} until dark, and {name} kept the tally on the back of an old chart.",
    "At {place} the planking is soft again; {name} has asked for timber, as in every other spring.",
    "There was an argument about {cargo}, which had been promised to two buyers, and {name} settled it over supper.",
    "Toward evening {weather}; the {vessel} at {place} doubled her lines and lit a fire on deck.",
    "{name} and {other} rowed to {place} to look at the moorings, and found them sound.",
    "Nobody came by road today except a carrier with {cargo}, who asked the way to {place} and did not thank us for it.",
    "The keeper's children found a glass float near {place}, and {name} hung it in the window beside the others.",
    "While {weather}, {name} mended the signal flags and told {other} how {place} looked before the wall was built.",
    "A letter came for {name}, and was carried to {place} at once, since letters for that house are rare.",
    "The pilot took out a {vessel} bound south with {cargo}, though {weather} and {other} had advised against it.",
    "We painted the boat shed at {place}; {name} chose the colour, and it is the same as it was.",
    "{other} has lent the long ladder to {name}, and it is expected back when the work at {place} is done.",
    "The {vessel} from the islands brought {cargo} and an old dog, which has gone to live with {name}.",
)


def entries(seed: int) -> Iterator[str]:
    """Sentences without end; the same for the same seed."""
    draw = random.Random(f"{SEED}-{seed}")
    while True:
        name, other = draw.sample(NAMES, 2)
        yield draw.choice(SENTENCES).format(
            name=name,
            other=other,
            place=draw.choice(PLACES),
            cargo=draw.choice(CARGOES),
            vessel=draw.choice(VESSELS),
            weather=draw.choice(WEATHERS),
        )


# What the log says once, in words that nothing else in it has.
KEEPERS = (
    "Aldous", "Beatrix", "Cornelius", "Dorothea", "Ephraim", "Florence", "Gideon", "Harriet", "Ignatius", "Josephine",
    "Lazarus", "Millicent", "Nathaniel", "Octavia", "Phineas", "Rosamund",
)  # fmt: skip


def needles(count: int, seed: int) -> list[tuple[str, str]]:
    """`count` keepers and their numbers of five digits, all of them different."""
    draw = random.Random(f"{SEED}-needles-{seed}")
    numbers = draw.sample(range(10000, 100000), count)
    return list(zip(draw.sample(KEEPERS, count), map(str, numbers)))


def statement(keeper: str) -> str:
    """What stands before the number, in the log and in the question alike."""
    return f" The secret number of {keeper} is"


def question(keeper: str) -> str:
    """What is asked after the log; the number follows."""
    return f"\n\nQuestion: What is the secret number of {keeper}?\nAnswer:{statement(keeper)}"

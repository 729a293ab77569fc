"""Short stories asked for by an animal, a place and a thing. The three words decide the whole story."""

import random
from typing import NamedTuple

from tools.demo_data.turn import Turn, is_held_out

KIND = "story"


class Hero(NamedTuple):
    name: str
    trait: str
    sound: str


class Place(NamedTuple):
    where: str
    sight: str
    friend: str


class Thing(NamedTuple):
    trouble: str
    rescue: str
    end: str


HEROES = {
    "cat": Hero("Mimi", "curious", "purred"),
    "dog": Hero("Rex", "loyal", "barked"),
    "fox": Hero("Finn", "clever", "yelped"),
    "bear": Hero("Bruno", "gentle", "hummed"),
    "rabbit": Hero("Rosie", "quick", "squeaked"),
    "mouse": Hero("Pip", "tiny", "squeaked"),
    "owl": Hero("Olga", "wise", "hooted"),
    "horse": Hero("Star", "proud", "neighed"),
    "duck": Hero("Daisy", "cheerful", "quacked"),
    "frog": Hero("Freddy", "funny", "croaked"),
    "turtle": Hero("Toby", "patient", "smiled"),
    "elephant": Hero("Ella", "strong", "trumpeted"),
    "monkey": Hero("Momo", "playful", "laughed"),
    "penguin": Hero("Paul", "polite", "bowed"),
    "lion": Hero("Leo", "brave", "roared"),
    "goat": Hero("Greta", "stubborn", "bleated"),
    "squirrel": Hero("Sam", "busy", "chattered"),
    "hedgehog": Hero("Henry", "shy", "sniffed"),
    "bee": Hero("Bella", "hard-working", "buzzed"),
    "dragon": Hero("Drago", "friendly", "puffed"),
}
PLACES = {
    "forest": Place("in a deep forest", "The tall trees whispered in the wind.", "old deer"),
    "river": Place("beside a wide river", "The clear water sparkled in the sun.", "kind otter"),
    "village": Place("in a quiet village", "The small houses had bright red roofs.", "jolly baker"),
    "mountain": Place("on a high mountain", "The white snow covered every path.", "strong eagle"),
    "garden": Place("in a green garden", "The roses smelled sweet after the rain.", "careful snail"),
    "castle": Place("in an old castle", "The long halls were full of echoes.", "sleepy knight"),
    "beach": Place("on a sunny beach", "The warm sand tickled every toe.", "helpful crab"),
    "island": Place("on a lonely island", "The palm trees danced in the breeze.", "colorful parrot"),
    "farm": Place("on a busy farm", "The fields were yellow with corn.", "friendly cow"),
    "city": Place("in a big city", "The streets were full of lights.", "fast taxi driver"),
    "lake": Place("near a calm lake", "The surface was as smooth as glass.", "white swan"),
    "desert": Place("in a hot desert", "The dunes were golden in the evening.", "tall camel"),
    "school": Place("next to a small school", "The children sang every morning.", "young teacher"),
    "library": Place("in a silent library", "The shelves reached up to the ceiling.", "smart bookworm"),
    "meadow": Place("on a wide meadow", "The flowers opened with the first light.", "quick butterfly"),
}
THINGS = {
    "key": Thing(
        "it opened no door at all",
        "found a hidden box that the key could open",
        "Inside the box was a map of the stars",
    ),
    "lamp": Thing(
        "it would not shine", "cleaned the glass until the lamp was bright", "Its light showed everyone the way home"
    ),
    "kite": Thing(
        "it was stuck in a tree", "pulled the kite down with a long branch", "It flew higher than the clouds"
    ),
    "boat": Thing(
        "it had a hole in the bottom", "closed the hole with wood and wax", "They sailed until the sun went down"
    ),
    "book": Thing(
        "its last page was missing",
        "looked under every stone until the page was found",
        "They read the story to all their friends",
    ),
    "drum": Thing("it made no sound", "put a new skin on the drum", "Everybody danced the whole night"),
    "hat": Thing(
        "it was much too big", "folded the hat until it was just right", "It kept off the rain for many years"
    ),
    "ball": Thing(
        "it had rolled into a deep hole",
        "filled the hole with water until the ball came up",
        "They played until it was dark",
    ),
    "bell": Thing("it did not ring", "tied a little stone inside the bell", "It rang every morning from then on"),
    "clock": Thing("it had stopped at noon", "turned the small wheels one by one", "It never stopped again"),
    "coin": Thing(
        "nobody knew who had lost it",
        "asked at every door until the owner was found",
        "The owner gave them a cake to share",
    ),
    "letter": Thing(
        "the name on it was washed away",
        "read the letter and guessed who had sent it",
        "It was an invitation to a party",
    ),
    "map": Thing("it was torn in two", "laid the two halves side by side and glued them", "It led them to a treasure"),
    "basket": Thing(
        "it was heavy and full of apples", "carried the basket home, step by step", "They baked a pie for the neighbors"
    ),
    "umbrella": Thing(
        "the wind had turned it inside out", "bent it back very slowly", "It was big enough for both of them"
    ),
    "mirror": Thing("it was covered with dust", "wiped the mirror with a soft leaf", "They saw two happy faces in it"),
    "blanket": Thing("it was full of holes", "sewed the holes with golden thread", "It kept them warm all winter"),
    "violin": Thing("one string was broken", "made a new string from a long hair", "Its music filled the air"),
    "ladder": Thing("one step was missing", "carved a new step from oak", "They climbed up to pick the best pears"),
    "ring": Thing("it was stuck in the mud", "dug in the mud with a spoon", "It shone like a small sun"),
}
ASKS = (
    "Write a short story about a {hero}, a {place} and a {thing}.",
    "Tell me a story with a {hero}, a {place} and a {thing}.",
    "Write a story about a {hero} and a {thing}. It happens at a {place}.",
    "Please tell a short story. Topics: {hero}, {place}, {thing}.",
    "I want a story about a {place}, a {thing} and a {hero}.",
)
THING_ASKS = ("Tell me a story about a {hero} and a {thing}.", "Write a short story about a {hero} and a {thing}.")
HERO_ASKS = ("Tell me a story about a {hero}.", "Write a short story about a {hero}.", "Write a story about a {hero}.")
FREE_ASKS = ("Tell me a story.", "Write a short story.", "Please tell me a story.")


def sample(rng: random.Random, held_out: bool) -> Turn:
    """Draw three topic words that together belong to the wanted set; in training, usual ones may go unsaid."""
    while True:
        hero, place, thing = (rng.choice(list(words)) for words in (HEROES, PLACES, THINGS))
        asks = ASKS if held_out else rng.choices((ASKS, THING_ASKS, HERO_ASKS, FREE_ASKS), (70, 15, 12, 3))[0]
        if asks is FREE_ASKS:
            hero = next(iter(HEROES))
        if asks is not ASKS:
            place = list(PLACES)[list(HEROES).index(hero) % len(PLACES)]  # the usual one
        if asks in (HERO_ASKS, FREE_ASKS):
            thing = list(THINGS)[-1 - list(HEROES).index(hero)]
        if is_held_out(f"{hero} {place} {thing}") == held_out:
            return Turn(
                KIND,
                _with_articles(rng.choice(asks).format(hero=hero, place=place, thing=thing)),
                story(hero, place, thing),
            )


def story(hero: str, place: str, thing: str) -> str:
    """Tell the story of the three words in three paragraphs."""
    who, where, what = HEROES[hero], PLACES[place], THINGS[thing]
    a_hero, a_thing, friend = _article(hero), _article(thing), where.friend
    return (
        f"Once upon a time, {a_hero} {hero} named {who.name} lived {where.where}. {where.sight} "
        f"{who.name} was the most {who.trait} {hero} of all.\n\n"
        f"One day, {who.name} found {a_thing} {thing}, but {what.trouble}. "
        f'"What can I do?" asked {who.name}. Just then {_article(friend)} {friend} came by. '
        f'"Let me help you," said the {friend}.\n\n'
        f"Together they {what.rescue}. {what.end}. {who.name} {who.sound} with joy, "
        f"and the {hero} and the {friend} were friends for ever after. The end."
    )


def _article(word: str) -> str:
    return "an" if word[0] in "aeiou" else "a"


def _with_articles(text: str) -> str:
    """Put `an` before the topic words that need it."""
    for word in (*HEROES, *PLACES, *THINGS):
        text = text.replace(f" a {word}", f" {_article(word)} {word}")
    return text

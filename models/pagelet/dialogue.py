"""Questions to pagelet and the right answers: the chat set, sums, and things that it does not know."""

import dataclasses
import random
from collections.abc import Iterator
from pathlib import Path

DATA = Path(__file__).parent / "data"
OUT_OF_RANGE_ANSWER = "I can only add and subtract two whole numbers from 0 to 99."
UNKNOWN_ANSWER = (
    "I do not know that. I am a small demo model: ask me about paged attention, jax-paged, "
    "or the sum of two numbers below 100."
)


def choices(text: str) -> tuple[str, ...]:
    """Splits a text at each | into alternatives."""
    return tuple(" ".join(part.split()) for part in text.split("|"))


def read_sections(path: Path) -> dict[str, str]:
    """Returns the sections of a data file by name; a section begins with ## and its name."""
    sections = [section.partition("\n") for section in path.read_text("utf-8").split("\n## ")[1:]]
    return {name: text.strip() for name, _, text in sections}


TEMPLATES = {name: choices(text) for name, text in read_sections(DATA / "templates.txt").items()}


@dataclasses.dataclass(frozen=True)
class Topic:
    """Something that pagelet knows.

    Args:
        name: Name of the topic in the data files.
        answer: What pagelet is to say.
        written: Whole questions about it, without capitals or a question mark.
        templated: Questions made of its nouns and verbs by templates.
    """

    name: str
    answer: str
    written: tuple[str, ...]
    templated: tuple[str, ...]


def read_topics(path: Path = DATA / "chat.txt") -> list[Topic]:
    """Reads the chat set and fills in its templates."""
    topics = []
    for name, text in read_sections(path).items():
        fields = dict(line.split(": ", 1) for line in text.split("\n"))
        nouns = [form for noun in choices(fields.get("N", "")) if noun for form in noun_forms(noun)]
        verbs = [verb for verb in choices(fields.get("V", "")) if verb]
        templated = [what for noun in nouns for what in ask_what(noun)]
        templated += [how.format(v=verb) for verb in verbs for how in TEMPLATES["how"]]
        topics.append(Topic(name, fields["A"], tuple(choices(fields["Q"])), tuple(templated)))
    return topics


def noun_forms(noun: str) -> list[str]:
    """Returns a countable noun (marked by a *) with articles and in the plural; any other noun as it is."""
    head, star, tail = noun.partition("*")
    if not star:
        return [noun]
    article = "an" if head[0] in "aeiou" else "a"
    return [f"{article} {head}{tail}", f"the {head}{tail}", head + tail, f"{head}s{tail}"]


def ask_what(noun: str) -> list[str]:
    """Returns the questions about a noun, the verb in the singular or plural as the noun is."""
    plural = noun.endswith("s") and noun[-2] not in "asu" and noun.islower()
    verbs = (
        {"is": "are", "does": "do", "works": "work"} if plural else {v: v for v in ("is", "does", "works")}
    )
    return [what.format(x=noun, **verbs) for what in TEMPLATES["what"]]


def read_held_out(path: Path = DATA / "heldout.txt") -> dict[str, list[str]]:
    """Returns the wordings that are kept out of training, by topic."""
    lines = [line for line in path.read_text("utf-8").split("\n") if line and line[0] != "#"]
    return {name: wordings for name, *wordings in map(choices, lines)}


def is_held_out(a: int, b: int) -> bool:
    """Returns whether sums and differences of two numbers are kept out of training, in either order."""
    low, high = sorted((a, b))
    return (low * 7 + high * 13) % 20 == 3


def sum_answer(a: int, b: int) -> str:
    return f"{a} + {b} = {a + b}."


class Dialogue:
    """Draws questions with their answers.

    Args:
        topics: Topics of the questions.
        rng: Source of all choices.
        sums_share: Share of conversations that consist of arithmetic only.
    """

    def __init__(self, topics: list[Topic], rng: random.Random, sums_share: float) -> None:
        self.topics = topics
        self.rng = rng
        self.sums_share = sums_share

    def conversation(self) -> Iterator[list[dict[str, str]]]:
        """Yields an endless conversation, turn by turn; some begin with a system message."""
        only_sums = self.rng.random() < self.sums_share
        if self.rng.random() < 0.2:
            yield [{"role": "system", "content": self.pick("system")}]
        while True:
            question, answer = self.arithmetic() if only_sums else self.turn()
            yield [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]

    def turn(self) -> tuple[str, str]:
        """Draws a question of any kind, and returns it with its answer."""
        kind = self.rng.random()
        if kind < 0.76:
            topic = self.rng.choice(self.topics)
            from_template = topic.templated and self.rng.random() < 0.5
            wording = self.rng.choice(topic.templated if from_template else topic.written)
            return self.say(wording), topic.answer
        if kind < 0.9:
            return self.arithmetic()
        if kind < 0.93:
            a, b = self.rng.sample(range(100), 2)
            c, d = self.rng.sample(range(100, 2000), 2)
            return self.style(self.pick("out_of_range").format(a=a, b=b, c=c, d=d)), OUT_OF_RANGE_ANSWER
        words = {"place": self.pick("places"), "thing": self.pick("things"), "person": self.pick("people")}
        return self.say(self.pick("unknown").format(**words)), UNKNOWN_ANSWER

    def arithmetic(self) -> tuple[str, str]:
        """Draws a sum, or less often a difference, of numbers below 100; returns it with its answer."""
        a, b = self.rng.randrange(100), self.rng.randrange(100)
        if is_held_out(a, b):
            return self.arithmetic()
        if self.rng.random() < 0.7:
            return self.style(self.pick("sum").format(a=a, b=b)), sum_answer(a, b)
        return self.style(self.pick("difference").format(a=a, b=b)), f"{a} - {b} = {a - b}."

    def say(self, text: str) -> str:
        """Varies a wording as people do: with words before and after it, typos, capitals, an end mark."""
        rng = self.rng
        if rng.random() < 0.12:
            text = f"{self.pick('before')} {text}"
        if rng.random() < 0.1:
            text = f"{text} {self.pick('after')}".replace(" ,", ",")
        if rng.random() < 0.1 and len(text) > 12:
            i = rng.randrange(1, len(text) - 1)
            text = rng.choice([text[:i] + text[i + 1 :], text[:i] + text[i] + text[i:]])
        if rng.random() < 0.1 and text.count(" ") > 3:
            words = text.split(" ")
            del words[rng.randrange(2)]
            text = " ".join(words)
        return self.style(text)

    def style(self, text: str) -> str:
        """Varies the capitals and the end mark."""
        kind = self.rng.random()
        if kind < 0.6:
            text = text[0].upper() + text[1:]
        elif kind < 0.75:
            text = text.lower()
        return text + self.rng.choice(["", "?", "?", "?", ".", "!", " ?"])

    def pick(self, template: str) -> str:
        return self.rng.choice(TEMPLATES[template])

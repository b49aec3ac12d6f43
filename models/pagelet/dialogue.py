"""Questions for pagelet and their correct answers: the chat topics, sums, and questions it cannot answer."""

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
    """Splits a text at each | into alternatives.

    Args:
        text: The text, such as "hello | hi | hey".
    """
    return tuple(" ".join(part.split()) for part in text.split("|"))


def read_sections(path: Path) -> dict[str, str]:
    """Returns the sections of a data file by name. A section begins with a line of ## and its name.

    Args:
        path: The data file.
    """
    sections = [section.partition("\n") for section in path.read_text("utf-8").split("\n## ")[1:]]
    return {name: text.strip() for name, _, text in sections}


TEMPLATES = {name: choices(text) for name, text in read_sections(DATA / "templates.txt").items()}


@dataclasses.dataclass(frozen=True)
class Topic:
    """A topic of the chat data.

    Args:
        name: Name of the topic in the data files.
        answer: The correct answer.
        written: Complete questions about the topic, without capital letters or question marks.
        templated: Questions made from the topic's nouns and verbs with templates.
    """

    name: str
    answer: str
    written: tuple[str, ...]
    templated: tuple[str, ...]


def read_topics(path: Path = DATA / "chat.txt") -> list[Topic]:
    """Reads the topics and fills in their templates.

    Args:
        path: The data file.
    """
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
    """Returns the forms of a noun: a countable noun (marked by *) with articles and in the plural.

    Other nouns are returned unchanged.

    Args:
        noun: The noun, such as "block* table".
    """
    head, star, tail = noun.partition("*")
    if not star:
        return [noun]
    article = "an" if head[0] in "aeiou" else "a"
    return [f"{article} {head}{tail}", f"the {head}{tail}", head + tail, f"{head}s{tail}"]


def ask_what(noun: str) -> list[str]:
    """Returns the questions about a noun, with singular or plural verbs to match.

    Args:
        noun: The noun with its article.
    """
    # Words such as "bus" and "class" are singular, and so are names with capital letters.
    plural = noun.endswith("s") and noun[-2] not in "asu" and noun.islower()
    verbs = (
        {"is": "are", "does": "do", "works": "work"} if plural else {v: v for v in ("is", "does", "works")}
    )
    return [what.format(x=noun, **verbs) for what in TEMPLATES["what"]]


def read_held_out(path: Path = DATA / "heldout.txt") -> dict[str, list[str]]:
    """Returns the wordings that are not used for training, by topic.

    Args:
        path: The data file.
    """
    lines = [line for line in path.read_text("utf-8").split("\n") if line and line[0] != "#"]
    return {name: wordings for name, *wordings in map(choices, lines)}


def is_held_out(a: int, b: int) -> bool:
    """Returns whether the sum and the difference of two numbers, in either order, are not used for training.

    Args:
        a: A number below 100.
        b: A number below 100.
    """
    low, high = sorted((a, b))
    return (low * 7 + high * 13) % 20 == 3


def sum_answer(a: int, b: int) -> str:
    """Returns the correct answer for a sum.

    Args:
        a: The first number.
        b: The second number.
    """
    return f"{a} + {b} = {a + b}."


class Dialogue:
    """Generator of random questions with their answers.

    Args:
        topics: The topics of the questions.
        rng: The random number generator.
        sums_share: Share of conversations that consist of arithmetic only.
    """

    def __init__(self, topics: list[Topic], rng: random.Random, sums_share: float) -> None:
        self.topics = topics
        self.rng = rng
        self.sums_share = sums_share

    def conversation(self) -> Iterator[list[dict[str, str]]]:
        """Yields the turns of an endless conversation as lists of messages.

        Some conversations begin with a system message.
        """
        only_sums = self.rng.random() < self.sums_share
        if self.rng.random() < 0.2:
            yield [{"role": "system", "content": self.pick("system")}]
        while True:
            question, answer = self.arithmetic() if only_sums else self.turn()
            yield [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]

    def turn(self) -> tuple[str, str]:
        """Returns a random question of any type, and its answer."""
        draw = self.rng.random()
        if draw < 0.76:
            topic = self.rng.choice(self.topics)
            from_template = topic.templated and self.rng.random() < 0.5
            wording = self.rng.choice(topic.templated if from_template else topic.written)
            return self.say(wording), topic.answer
        if draw < 0.9:
            return self.arithmetic()
        if draw < 0.93:
            a, b = self.rng.sample(range(100), 2)
            c, d = self.rng.sample(range(100, 2000), 2)
            return self.style(self.pick("out_of_range").format(a=a, b=b, c=c, d=d)), OUT_OF_RANGE_ANSWER
        words = {"place": self.pick("places"), "thing": self.pick("things"), "person": self.pick("people")}
        return self.say(self.pick("unknown").format(**words)), UNKNOWN_ANSWER

    def arithmetic(self) -> tuple[str, str]:
        """Returns a question for a sum or, less often, a difference of numbers below 100, and its answer."""
        a, b = self.rng.randrange(100), self.rng.randrange(100)
        if is_held_out(a, b):
            return self.arithmetic()
        if self.rng.random() < 0.7:
            return self.style(self.pick("sum").format(a=a, b=b)), sum_answer(a, b)
        return self.style(self.pick("difference").format(a=a, b=b)), f"{a} - {b} = {a - b}."

    def say(self, text: str) -> str:
        """Returns a wording with random variations that people make.

        These are words before and after it, typos, missing words, capital letters and end marks.

        Args:
            text: The wording.
        """
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
        """Returns a wording with random capital letters and a random end mark.

        Args:
            text: The wording.
        """
        draw = self.rng.random()
        if draw < 0.6:
            text = text[0].upper() + text[1:]
        elif draw < 0.75:
            text = text.lower()
        return text + self.rng.choice(["", "?", "?", "?", ".", "!", " ?"])

    def pick(self, template: str) -> str:
        """Returns a random alternative of a template.

        Args:
            template: Name of the template.
        """
        return self.rng.choice(TEMPLATES[template])

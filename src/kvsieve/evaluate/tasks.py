"""Tasks: a context that is read densely, then a question and an answer that are decoded sparsely."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvsieve.errors import ConfigError, UnknownName
from kvsieve.evaluate.text import Corpus, spread

TAIL = 160
"""Most tokens that question and answer may have together."""
DIGITS, DISTRACTORS = 7, 3
CUE, COPIED, CONTINUED = 24, 16, 64
EARLIEST, LATEST = 0.08, 0.88  # of the context: outside of it, sink and recent pages hold the needle by themselves

NOUNS = [
    "anchor",
    "basket",
    "candle",
    "dragon",
    "engine",
    "falcon",
    "garden",
    "hammer",
    "island",
    "jacket",
    "kettle",
    "ladder",
    "magnet",
    "needle",
    "orchid",
    "pepper",
    "quartz",
    "ribbon",
    "saddle",
    "temple",
    "umbrella",
    "violin",
    "walnut",
    "yogurt",
    "zipper",
    "bridge",
    "copper",
    "desert",
    "ember",
    "forest",
    "glacier",
    "harbor",
]

SENTENCE = " One of the special magic numbers for {key} is: {value}."
INTRODUCTION = (
    "A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you about the "
    "number afterwards.\n"
)
QUESTION = (
    "\nWhat is the special magic number for {key} mentioned in the text above? The special magic number for {key} "
    "mentioned in the text is:"
)


@dataclass(frozen=True)
class Sample:
    """Token ids: ``prefix`` is prefilled densely; ``question``, then ``answer``, are fed token by token.

    The answer's tokens are scored, each by what the model says after the tokens before it (teacher forcing).
    """

    prefix: tuple[int, ...]
    question: tuple[int, ...]
    answer: tuple[int, ...]

    @property
    def tail(self) -> tuple[int, ...]:
        """Question and answer."""
        return self.question + self.answer


@dataclass(frozen=True)
class Draw:
    """What a task makes a sample from: ``context`` tokens of prefix, a source of numbers, a depth in [0, 1)."""

    corpus: Corpus
    context: int
    rng: random.Random
    depth: float


@dataclass(frozen=True)
class Task:
    """A task by name; ``exact`` says whether a wholly right answer means something."""

    name: str
    title: str
    about: str
    exact: bool
    make: Callable[[Draw], Sample]

    def sample(self, corpus: Corpus, context: int, seed: int, index: int) -> Sample:
        """The ``index``-th sample of a seed: the same on every machine, whatever else is evaluated.

        Raises:
            ConfigError: the text is too short, or the context too short for the task.
        """
        rng = random.Random(f"{seed}/{self.name}/{context}/{index}")
        shift = random.Random(f"{seed}/{self.name}/{context}").random()
        made = self.make(Draw(corpus, context, rng, EARLIEST + (LATEST - EARLIEST) * spread(index, shift)))
        assert len(made.prefix) == context and 1 < len(made.tail) <= TAIL and made.question
        return made


def needle(draw: Draw) -> Sample:
    """One number in the text."""
    return _needles(draw, 1)


def multikey(draw: Draw) -> Sample:
    """Four numbers of four keys, one of which is asked for."""
    return _needles(draw, 1 + DISTRACTORS)


def repeat(draw: Draw) -> Sample:
    """24 tokens seen earlier come again; the next 16 are asked for."""
    corpus, start = draw.corpus, draw.corpus.start
    text = corpus.cut(draw.rng, _room(draw, len(start)))
    first = min(int(draw.depth * len(text)), len(text) - CUE - COPIED)
    cue, answer = text[first : first + CUE], text[first + CUE : first + CUE + COPIED]
    return Sample(tuple(start + text), tuple(corpus.encode("\n\n") + cue), tuple(answer))


def perplexity(draw: Draw) -> Sample:
    """The 64 tokens with which the text goes on."""
    start = draw.corpus.start
    text = draw.corpus.cut(draw.rng, _room(draw, len(start)) + 1 + CONTINUED)
    return Sample(tuple(start + text[: -1 - CONTINUED]), (text[-1 - CONTINUED],), tuple(text[-CONTINUED:]))


def _needles(draw: Draw, count: int) -> Sample:
    """Sentences with a key and a number each, spread over the text; the first one is asked for."""
    corpus, rng = draw.corpus, draw.rng
    keys = rng.sample(NOUNS, count)
    values = ["".join(rng.choice("0123456789") for _ in range(DIGITS)) for _ in keys]
    sentences = [corpus.encode(SENTENCE.format(key=key, value=value)) for key, value in zip(keys, values, strict=True)]
    before = corpus.start + corpus.encode(INTRODUCTION)
    text = corpus.fill(rng, _room(draw, len(before) + sum(map(len, sentences))))
    depths = [draw.depth] + [EARLIEST + (LATEST - EARLIEST) * rng.random() for _ in sentences[1:]]
    places = [corpus.break_after(text, int(depth * len(text))) for depth in depths]
    for place, sentence in sorted(zip(places, sentences, strict=True), reverse=True):
        text[place:place] = sentence
    question, answer = corpus.encode(QUESTION.format(key=keys[0])), corpus.encode(f" {values[0]}")
    digits = next(i for i, token in enumerate(answer) if corpus.tokenizer.decode([token]).strip())
    return Sample(tuple(before + text), tuple(question + answer[:digits]), tuple(answer[digits:]))


def _room(draw: Draw, taken: int) -> int:
    """Tokens of the context left for text."""
    room = draw.context - taken
    if room < CUE + COPIED:
        raise ConfigError(f"--context {draw.context}: expected at least {taken + CUE + COPIED} tokens for this task")
    return room


TASKS = {
    task.name: task
    for task in (
        Task("needle", "Single needle", "a 7-digit number hidden in the text is asked for", True, needle),
        Task("multikey", "Multi-key needle", "four numbers with keys are hidden, one is asked for", True, multikey),
        Task("repeat", "Repeat a passage", "24 tokens of the text come again, the next 16 are asked for", True, repeat),
        Task("perplexity", "Perplexity", "the 64 tokens with which the text goes on", False, perplexity),
    )
}


def choose_tasks(names: Sequence[str]) -> list[Task]:
    """Tasks by name, each once.

    Raises:
        UnknownName: no such task.
    """
    for name in names:
        if name not in TASKS:
            raise UnknownName("task", name, TASKS)
    return [TASKS[name] for name in dict.fromkeys(names)]

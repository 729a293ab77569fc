"""Rows of tokens to train on: each row is one conversation of several turns, made by many processes at once."""

import multiprocessing
import os
import random
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from tools.demo_data import mix
from tools.demo_data.tokenizer import ENDOFTEXT
from tools.demo_data.turn import Turn

OPEN_ROWS = 8
TOKENS_PER_JOB = 1_000_000


class Rows(NamedTuple):
    """`tokens` [N, L] int16, and `is_answer` [N, L] bool: true where the model has to learn the token."""

    tokens: np.ndarray
    is_answer: np.ndarray


class _Row:
    """A conversation that still grows."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.is_answer: list[bool] = []

    def append(self, tokens: list[int], is_answer: bool) -> None:
        self.tokens += tokens
        self.is_answer += [is_answer] * len(tokens)


def make_rows(tokenizer: Tokenizer, num_tokens: int, length: int, seed: int, *, for_drafter: bool = False) -> Rows:
    """Make at least `num_tokens` tokens as rows of `length`, on all cores. The same arguments give the same rows.

    Rows `for_drafter` leave out the templates that are kept to measure it.
    """
    jobs = max(1, num_tokens // TOKENS_PER_JOB)
    count = -(-num_tokens // (jobs * length))
    arguments = [(tokenizer.to_str(), count, length, f"{seed} {length} {job}", for_drafter) for job in range(jobs)]
    if jobs == 1:
        return _job(arguments[0])
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        parts = list(pool.map(_job, arguments))
    return Rows(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


def encode_turn(tokenizer: Tokenizer, turn: Turn) -> tuple[list[int], list[int]]:
    """Encode the question with its frame, and the answer with its closing token, as the chat template frames them."""
    question = f"<|im_start|>user\n{turn.prompt}<|im_end|>\n<|im_start|>assistant\n"
    return tokenizer.encode(question).ids, tokenizer.encode(turn.answer + "<|im_end|>").ids


def _job(arguments: tuple[str, int, int, str, bool]) -> Rows:
    tokenizer_json, count, length, seed, for_drafter = arguments
    return fill_rows(Tokenizer.from_str(tokenizer_json), count, length, random.Random(seed), for_drafter=for_drafter)


def fill_rows(tokenizer: Tokenizer, count: int, length: int, rng: random.Random, *, for_drafter: bool = False) -> Rows:
    """Fill `count` rows of `length` tokens, each turn in the first of a few open rows that has room for it."""
    newline = tokenizer.encode("\n").ids
    rows, done = [_start(tokenizer, rng) for _ in range(OPEN_ROWS)], list[_Row]()
    while len(done) < count:
        turn = mix.sample(rng)
        if for_drafter and turn.is_new_to_drafter:
            continue
        question, answer = encode_turn(tokenizer, turn)
        needed = len(question) + len(answer) + len(newline)
        row = next((row for row in rows if len(row.tokens) + needed <= length), None)
        if row is None:
            fullest = max(rows, key=lambda row: len(row.tokens))
            rows.remove(fullest)
            done.append(fullest)
            rows.append(row := _start(tokenizer, rng))
        row.append(question, False)
        row.append(answer, True)
        row.append(newline, False)
    return _pad(done, length)


def _start(tokenizer: Tokenizer, rng: random.Random) -> _Row:
    row = _Row()
    if rng.random() < 0.25:
        message = f"<|im_start|>system\n{rng.choice(mix.SYSTEM_MESSAGES)}<|im_end|>\n"
        row.append(tokenizer.encode(message).ids, False)
    return row


def _pad(rows: list[_Row], length: int) -> Rows:
    tokens = np.full((len(rows), length), ENDOFTEXT, np.int16)
    is_answer = np.zeros((len(rows), length), bool)
    for i, row in enumerate(rows):
        tokens[i, : len(row.tokens)] = row.tokens
        is_answer[i, : len(row.tokens)] = row.is_answer
    return Rows(tokens, is_answer)

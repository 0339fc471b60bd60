"""Number of tokens per round of speculative decoding; drafts come from the text itself.

    python scripts/measure_drafts.py --model FOLDER

A draft is the text after the latest earlier occurrence of the last three, two or one tokens, in
question and answer (prompt lookup). A round yields those drafted tokens that the model itself would
choose, and one more token (Leviathan et al. 2023, algorithm 1, greedy decoding).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from vfl.core.seeds import use_one_thread
from vfl.llm.text import read_tokenizer
from vfl.models.decoder import Decoder
from vfl.models.pretrained import load_pretrained

QUESTIONS = (
    "The capital of France is",
    "My doctor says that I have diabetes",
    "The best thing about this film is",
    "Write a short letter to my landlord about the broken heating:\n",
    "def fibonacci(n):\n",
    "The three branches of government are",
    "Once upon a time there was a",
    "To bake bread you need",
)
LONGEST = 3


def draft(text: Sequence[int], length: int) -> list[int]:
    """Return the tokens after the latest earlier occurrence of the text's last tokens.

    >>> draft([7, 8, 9, 1, 7, 8], 2)
    [9, 1]
    """
    for size in range(LONGEST, 0, -1):
        last = list(text[-size:])
        for at in range(len(text) - size - 1, -1, -1):
            if list(text[at : at + size]) == last:
                return list(text[at + size : at + size + length])
    return []


def rounds(question: Sequence[int], answer: Sequence[int], length: int) -> int:
    """Return the number of rounds in which the model generates an answer.

    >>> rounds([7, 8, 9, 1], [7, 8, 9, 1], 2)
    2
    """
    done, count = 1, 1
    while done < len(answer):
        drafted = draft([*question, *answer[:done]], length)
        right = 0
        for token, wanted in zip(drafted, answer[done:], strict=False):
            if token != wanted:
                break
            right += 1
        done, count = done + right + 1, count + 1
    return count


def main() -> None:
    """Print a line for each length of a draft."""
    parser = argparse.ArgumentParser(description="Tokens per round of speculative decoding.")
    parser.add_argument("--model", type=Path, required=True, help="folder of a decoder")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    options = parser.parse_args()
    use_one_thread()
    model, tokenizer = load_pretrained(options.model), read_tokenizer(options.model)
    assert isinstance(model, Decoder), "tokens are counted"
    asked = [tokenizer.encode(each) for each in QUESTIONS]
    answers = [model.generate(each, options.tokens) for each in asked]
    for length in (1, 2, 4, 8):
        count = sum(rounds(*pair, length) for pair in zip(asked, answers, strict=True))
        print(f"drafts of {length} tokens: {options.tokens * len(asked) / count:.2f} per round")


if __name__ == "__main__":
    main()

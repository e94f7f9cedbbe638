"""Reading a flag that takes any text but none."""

import argparse


def filled_text(text: str) -> str:
    """Take a text that is not empty: an empty one is most often a variable that is not set.

    Raises:
        argparse.ArgumentTypeError: It is empty.
    """
    if not text.strip():
        raise argparse.ArgumentTypeError(f"{text!r} is empty: give a value, or leave the flag out")
    return text

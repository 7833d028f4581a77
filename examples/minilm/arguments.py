"""What scripts/demo and search.py are told. Run by itself it only says what is wrong with that."""

import argparse
from pathlib import Path

QUESTION = "Are results the same for any number of threads?"  # of the documentation
OTHER_QUESTION = "What is this text about?"


class Parser(argparse.ArgumentParser):
    def __init__(self, **more):
        super().__init__(allow_abbrev=False, **more)  # scripts/demo knows whole words alone

    def error(self, message):
        raise SystemExit(f"search: {message}")


def count(text):
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}', expected a whole number from 1")
    return int(text)


def parse_arguments():
    parser = Parser(
        prog="scripts/demo",
        epilog="A paragraph's tokens beyond 256 are cut off.",
        description="Finds the paragraphs of a text that answer a question, by attention on anyflash.",
    )
    parser.add_argument(
        "text", nargs="?", metavar="TEXT_FILE", help="a text file (default: this project's documentation)"
    )
    parser.add_argument(
        "question", nargs="?", metavar="QUESTION", help=f"default: {QUESTION}; of another text: {OTHER_QUESTION}"
    )
    parser.add_argument("--best", type=count, default=3, help="how many paragraphs to show (default 3)")
    parser.add_argument("--picture", default="demo-rule.svg", help="where to draw the rule (default demo-rule.svg)")
    parser.add_argument(
        "--framework",
        choices=["numpy", "torch", "tensorflow", "jax"],
        default="numpy",
        help="whose arrays the model is computed in, each by anyflash (default numpy)",
    )
    parser.add_argument(
        "--model", type=Path, metavar="FOLDER", help="a sentence model like it (default: all-MiniLM-L6-v2, installed)"
    )
    return parser.parse_args()


if __name__ == "__main__":
    text = parse_arguments().text
    if text and not Path(text).exists():
        raise SystemExit(f"search: {text}: No such file or directory")

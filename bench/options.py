"""What the command lines of the scripts here share: a wrong option is told in one line."""

import argparse
import os


class Parser(argparse.ArgumentParser):
    """Of the script bench/NAME."""

    def __init__(self, name, **more):
        super().__init__(
            prog=f"bench/{name}", allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **more
        )

    def error(self, message):
        raise SystemExit(f"{self.prog}: {message}")


def is_program(path):
    return os.access(path, os.X_OK) and not path.is_dir()

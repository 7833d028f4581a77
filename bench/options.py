"""What the command lines of the scripts here share: a wrong option is told in one line."""

import argparse


class Parser(argparse.ArgumentParser):
    """Of the script bench/NAME."""

    def __init__(self, name, **more):
        super().__init__(prog=f"bench/{name}", allow_abbrev=False,
                         formatter_class=argparse.RawDescriptionHelpFormatter, **more)  # fmt: skip

    def error(self, message):
        raise SystemExit(f"{self.prog}: {message}")

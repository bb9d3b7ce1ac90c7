"""`python -m app.models.fetch NAME`: put a model on the shelf and print its folder. For benches and scripts.

NAME is a catalogue id, an alias, a repo id or a folder. Progress goes to standard error, the folder to standard out.
"""

import os
import sys

from app.errors import AppError
from app.models.shelf import ModelShelf
from app.settings import SettingsError, load


def main(arguments: list[str]) -> None:
    if len(arguments) != 1:
        sys.exit("usage: python -m app.models.fetch NAME")
    try:
        shelf = ModelShelf(load({}, os.environ).models_folder)
        print(shelf.ensure(shelf.resolve(arguments[0]), _Teller()))
    except AppError as error:
        sys.exit(error.text)
    except SettingsError as error:
        sys.exit(str(error))


class _Teller:
    """One line a stage."""

    def __init__(self) -> None:
        self._last = ""

    def __call__(self, stage: str, fraction: float | None) -> None:
        if stage != self._last:
            self._last = stage
            print(stage, file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])

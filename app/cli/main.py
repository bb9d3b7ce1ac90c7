"""`python launch.py models list` and the other commands of a terminal: one table, found by their words."""

import argparse
import os
import sys
from collections.abc import Sequence

from app import settings as settings_module
from app.cli import chat, doctor, fit, memory, models, quantize
from app.errors import AppError
from app.settings import SettingsError

COMMANDS = (
    *models.COMMANDS,
    *fit.COMMANDS,
    *memory.COMMANDS,
    *chat.COMMANDS,
    *doctor.COMMANDS,
    *quantize.COMMANDS,
)  # in the order of --help


def main(argv: Sequence[str]) -> int:
    """The exit code of one command: 0 done, 1 refused, 2 wrongly asked, 130 stopped, 141 nobody reads on (`| head`)."""
    try:
        try:
            return _done(argv)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        if not _is_stdout_closed():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes once more at its end
        return 141


def _is_stdout_closed() -> bool:
    """Another pipe may have broken. What could not be written before is lost, so that a line more has to be tried."""
    try:
        print(flush=True)
    except BrokenPipeError:
        return True
    return False


def _done(argv: Sequence[str]) -> int:
    try:
        arguments = parser().parse_args(argv)
        flags = {} if arguments.home is None else settings_module.read_flags(["--home", arguments.home])
        found = settings_module.load(flags, os.environ)
        settings_module.make_home(found.home)
        code: int = arguments.run(arguments, found)
    except SettingsError as error:
        print(error, file=sys.stderr)
        return 2
    except AppError as error:
        print(error.text, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Stopped.", file=sys.stderr)
        return 130
    return code


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="launch.py", allow_abbrev=False)
    levels = {"": made.add_subparsers(required=True, metavar="COMMAND")}
    for command in COMMANDS:
        group, _, word = command.words.rpartition(" ")
        if group not in levels:
            of_group = levels[""].add_parser(group, help=f"{group}: see `{group} --help`", allow_abbrev=False)
            levels[group] = of_group.add_subparsers(required=True, metavar="COMMAND")
        own = levels[group].add_parser(word, help=command.help, description=command.help, allow_abbrev=False)
        own.add_argument("--home", metavar="FOLDER", help="folder of models and settings")
        command.arguments(own)
        own.set_defaults(run=command.run)
    return made

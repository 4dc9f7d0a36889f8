"""What an argument is called on the command line: ``image=`` in the words of a Python call is ``--image`` there."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence

_NAMES = re.compile(
    r"""(?: (?<!\w)'[^']*' | "[^"]*"      # what somebody wrote
          | \w\([^)]*\)                   # a call of Python
          | --?[\w-]+[ =]\S+              # a flag with its value
        )
      | (?<![^\s(])(?:options\.)?(?P<name>[a-z][a-z0-9_]+)\b
        (?: (?P<is>\ =\ ) | (?P<all>=True\b|=\.\.\.|=(?=[\s,;:.)]|$)) | (?P<sign>=) | (?![\w.(\[/-]) )""",
    re.VERBOSE,
)
_OF_A_FILE = re.compile(r"\b(line|row) \d+: |\.json: ")
_NOT_FLAGS = ("prompt", "prompts", "x", "y")


def actions_of(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> dict[str, argparse.Action]:
    """The arguments of the command that was given, by what they set."""
    actions: dict[str, argparse.Action] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            actions |= actions_of(action.choices[getattr(arguments, action.dest)], arguments)
        else:
            actions[action.dest] = action
    return actions


def as_written(action: argparse.Action, words: Sequence[str]) -> str:
    """What a user calls an argument: the flag that was written, else a long one, or what the help calls it."""
    flags = action.option_strings
    written = [flag for flag in flags if any(word.partition("=")[0] == flag for word in words)]
    long = [flag for flag in flags if flag.startswith("--")]
    return (written or long or [*flags, str(action.metavar or action.dest)])[0]


def flags_of(actions: Mapping[str, argparse.Action], words: Sequence[str]) -> dict[str, str]:
    """The flag of each argument that has one."""
    named = {name: action for name, action in actions.items() if action.option_strings and name not in _NOT_FLAGS}
    flags = {name: as_written(action, words) for name, action in named.items()}
    return {"steps": flags["num_inference_steps"], **flags} if "num_inference_steps" in flags else flags


def in_flags(message: str, flags: Mapping[str, str]) -> str:
    """A message with flags where it names arguments; one about what a file says stays, since that has such names.

    A name without = after it counts if it has an underscore, or if the message begins with it: "image without ...".
    """
    if _OF_A_FILE.search(message):
        return message

    def told(found: re.Match[str]) -> str:
        name = found["name"] or ""
        if (flag := flags.get(name)) is None:
            return found[0]
        if found["is"] or found["sign"]:
            return flag + ("=" if found["sign"] and flag.startswith("--") else " ")
        if found["all"]:
            return flag
        begins = not found.start() and re.match(": | without | '", message[found.end() :])
        return flag if "_" in name or begins else found[0]

    return _NAMES.sub(told, message)

"""argparse's parser with canvax's errors."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, NoReturn

from canvax.errors import HintWarning, InputError, Write, did_you_mean, in_python, warn
from canvax.familiar import CALL, LOAD, TRAIN


class Parser(argparse.ArgumentParser):
    """A parser that raises InputError, and suggests the nearest flag for an unknown one."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **{"allow_abbrev": False} | keywords)
        self._words: Sequence[str] = ()

    def error(self, message: str) -> NoReturn:
        """Raise InputError."""
        flag = message.removeprefix("argument ").partition(":")[0].split("/")[-1]
        action = self._option_string_actions.get(flag)
        if action and ": expected " in message:
            form = " ".join([action.metavar] if isinstance(action.metavar, str) else action.metavar or ["VALUE"])
            hyphen = "one that starts with - is written --flag=VALUE"
            message += f": {action.help or 'a value'}; {hyphen if action.nargs is None else f'write {flag} {form}'}"
        if message.startswith("the following arguments are required"):  # other programs' flags may give them
            self._refuse_unknown([word for word in self._words if word.startswith("--")])
        raise InputError(f"{message} (see: {self.prog} --help)")

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse as argparse does, and also take prompts between flags.

        Each subcommand reports its own unknown words, because only it can suggest its nearest flag.
        """
        known = argparse.Namespace() if namespace is None else namespace
        self._words = args or ()
        self._check_once(args or ())
        self._check_hyphens(args or ())
        _, rest = super().parse_known_args(args, known)
        prompts = isinstance(getattr(known, "prompts", None), list)
        self._refuse_unknown(rest, prompts=prompts)
        if rest and not prompts:
            cure = "give a prompt with -p, in quotes" if "-p" in self._option_string_actions else "leave it out"
            cure = f"there is no place for another file; {cure}" if os.path.exists(rest[0]) else cure
            positional = (action for action in self._actions if not action.option_strings)
            if several := next((action.dest for action in positional if action.nargs in ("*", "+")), None):
                cure = f"write the {several} one after the other, before the flags"
            self.error(f"{rest[0]!r} is not expected here; {cure}")
        if rest:
            known.prompts += rest
        return known, []

    def _refuse_unknown(self, words: Sequence[str], *, prompts: bool = False) -> None:
        """Refuse the first unknown flag among ``words``, with a suggestion."""
        typed = [word.partition("=")[0] for word in words if word.startswith("-")]
        unknown = next((flag for flag in typed if flag not in self._option_string_actions), None)
        if unknown is None or self._subparsers is not None:
            return
        flags = [flag for action in self._actions for flag in action.option_strings if flag.startswith("--")]
        name = unknown.lstrip("-").replace("-", "_")
        entry = CALL.get(name) or LOAD.get(name) or TRAIN.get(name)
        aliases = (f"--{each.replace('_', '-')}" for each in (name, entry.becomes if entry else ""))
        longer = [flag for flag in flags if len(unknown) > 4 and flag.startswith(unknown)]
        meant = next((alias for alias in aliases if alias in flags), "") or next(iter(longer), "")
        near = f"did you mean {meant!r}?" if meant else did_you_mean(unknown, flags)
        if not near and (prompts or "-p" in self._option_string_actions) and not unknown.startswith("--"):
            near = "a prompt that starts with - goes after --"
        self.error(f"{unknown!r} is not a flag of {self.prog}" + (near and f"; {near}"))

    def _check_hyphens(self, words: Sequence[str]) -> None:
        """Refuse ``-prompt`` where there is ``--prompt``: argparse would take it for ``-p rompt``."""
        for word in words:
            flag = word.partition("=")[0]
            if len(flag) > 3 and flag[1] != "-" and f"-{flag}" in self._option_string_actions:
                self.error(f"{flag!r} has one hyphen; write -{flag}")

    def _check_once(self, words: Sequence[str]) -> None:
        """Warn of a flag of one value that is given two: argparse silently takes the last."""
        of = {flag: action for action in self._actions for flag in action.option_strings}
        seen: dict[str, str] = {}
        for word, following in zip_longest(words, words[1:], fillvalue=""):
            flag, sign, value = word.partition("=")
            action = of.get(flag)
            if type(action) is not argparse._StoreAction:
                continue
            value = value if sign else following
            again = action.dest in seen
            if seen.setdefault(action.dest, value) != value or (action.nargs and again):
                more = ", further images are --reference" if flag == "--image" and "--reference" in of else ""
                warn(HintWarning(f"{flag} is given twice; the last value, {value[:80]!r}, counts{more}"))

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        """Read the value of a flag written ``--flag=--``, which argparse reads as no value."""
        if action.option_strings and arg_strings == ["--"]:
            self.error(f"{'/'.join(action.option_strings)}: '--' is not a value")
        return super()._get_values(action, arg_strings)  # type: ignore[misc]


def writer(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> Write:
    """Return a function that writes the arguments of a command in errors and hints: ``height=3`` is ``--height 3``."""
    actions: dict[str, argparse.Action] = {}
    chosen: argparse.ArgumentParser | None = parser
    while chosen is not None:
        within, chosen = chosen._actions, None
        for action in within:
            if isinstance(action, argparse._SubParsersAction):
                chosen = action.choices[getattr(arguments, action.dest)]
            elif action.dest not in ("prompt", "prompts") or "task" in arguments:
                actions[action.dest] = action
    for name, dest in (  # two arguments of Python's
        ("steps", "num_inference_steps"),
        ("batch", "batch_size"),
        ("image_prompt", "ip_image"),
    ):
        actions |= {name: actions[dest]} if dest in actions else {}

    def write(argument: str, value: str | None) -> str:
        if (action := actions.get(argument)) is None:
            return in_python(argument, value)
        long = [flag for flag in action.option_strings if flag.startswith("--")]
        name = (long or [*action.option_strings, str(action.metavar or action.dest)])[0]
        return name if value is None or action.nargs == 0 else f"{name} {value}"

    return write

"""The terminal: results to stdout, messages to stderr, signals. Control characters from files are escaped."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import sys
import textwrap
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from canvax.errors import CanvaxError, shortened, to_stderr

_BIDI = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
"""Unicode controls that change the order in which text is displayed."""


def clean(text: str) -> str:
    """Escape characters that control a terminal or reorder text, except new lines and tabs."""
    kept = (c in "\n\t" or not (unicodedata.category(c) in ("Cc", "Cs") or c in _BIDI) for c in text)
    return "".join(c if keep else c.encode("unicode_escape").decode() for c, keep in zip(text, kept, strict=True))


def complain(message: str, *, label: str = "") -> None:
    """Print a message on stderr, with a prefix on its first line; ignore a closed or full stderr."""
    to_stderr(f"canvax: {label}{clean(shortened(message))}\n")


def show_warning(seen: set[str], write: Callable[[str], None], message: Warning | str, *_: Any) -> None:
    """Write a warning once, and not for each of a thousand prompts; for ``warnings.showwarning``."""
    if (text := str(message)) not in seen:
        if len(seen) > 1000:  # a server lives long
            seen.clear()
        seen.add(text)
        write(text)


@contextmanager
def stoppable() -> Iterator[None]:
    """Let SIGTERM, with which clusters end a process, stop the command as Ctrl-C does."""

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def say(text: str) -> None:
    """Print a line of a result on stdout, flushed so that the reader of a pipe sees it at once."""
    _print(clean(text))


def emit_json(value: Any) -> None:
    """Print one JSON object on stdout, in ASCII so that it does not depend on the locale."""
    _print(json.dumps(value, indent=2, default=str))


def _print(text: str) -> None:
    flush(f"{text}\n")


def flush(text: str = "") -> None:
    """Write the buffer of stdout, and ``text``.

    Raises:
        CanvaxError: stdout is full.
        BrokenPipeError: the reader of stdout has gone.
    """
    try:
        if sys.stdout is not None:  # closed by the shell: >&-
            sys.stdout.write(text)
            sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        hush_stdout()  # the rest of its buffer would fail again at the end of the process
        raise CanvaxError(f"stdout cannot be written ({error.strerror or error})") from None


def table(rows: Sequence[Sequence[str]], *, right: Iterable[int] = (), fold: int | None = None) -> list[str]:
    """Return lines of aligned columns; the first row is the heading.

    Args:
        rows: cells.
        right: columns that are flush right.
        fold: columns of the terminal. The last cell of a row is wrapped into the columns left; if these are fewer
            than 30, it is printed below the other cells.
    """
    right = set(right)
    widths = [max(_width(row[i]) for row in rows) for i in range(len(rows[0]))]
    if fold is not None and sum(widths) + 2 * len(widths) - 2 > fold:
        before = sum(width + 2 for width in widths[:-1])
        if fold - before < 30:
            return [
                line
                for head, row in zip(table([row[:-1] for row in rows], right=right), rows, strict=True)
                for line in (head, *textwrap.wrap(row[-1], fold, initial_indent="    ", subsequent_indent="    "))
            ]
        rows = [line for row in rows for line in _folded(row, fold - before)]
    lines = []
    for row in rows:
        cells = []
        for i, cell in enumerate(row):
            space = " " * (widths[i] - _width(cell))
            cells.append(space + cell if i in right else cell + space)
        lines.append("  ".join(cells).rstrip())
    return lines


def _folded(row: Sequence[str], room: int) -> list[Sequence[str]]:
    first, *rest = textwrap.wrap(row[-1], room) or [""]
    return [[*row[:-1], first], *([""] * (len(row) - 1) + [line] for line in rest)]


def columns() -> int | None:
    """Return the columns of the terminal, or None if stdout is a file or a pipe."""
    return shutil.get_terminal_size().columns if sys.stdout is not None and sys.stdout.isatty() else None


def _width(text: str) -> int:
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def command_line(words: Sequence[str]) -> str:
    """Join words into a line for a shell. Words with control characters take the form $'...' of bash and zsh."""
    return " ".join(shlex.quote(word) if clean(word) == word and "\n" not in word else _dollar(word) for word in words)


def _dollar(word: str) -> str:
    escaped = "".join("\\" + c if c in "\\'" else _ansi_c(c) for c in word)
    return f"$'{escaped}'"


def _ansi_c(c: str) -> str:
    if c == "\n":
        return "\\n"
    if clean(c) == c:
        return c
    return "".join(f"\\x{byte:02x}" for byte in c.encode("utf-8", "surrogatepass"))


def seconds(value: float) -> str:
    """Format a duration, such as "85 ms" or "1.25 s"."""
    if value < 0.1:
        return f"{1000 * value:.0f} ms"
    return f"{value:.2f} s" if value < 10 else f"{value:.1f} s"


def byte_size(size: int) -> str:
    """Format a size in powers of ten, such as "3.44 GB"."""
    amount = float(size)
    for unit in ("B", "kB", "MB"):
        if amount < 1000:
            return f"{amount:.3g} {unit}"
        amount /= 1000
    return f"{amount:.2f} GB"


def tolerant_streams() -> None:
    """Print escapes for characters that the terminal's encoding lacks, instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, ValueError):
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]


def keep_stdout_for_results() -> None:
    """Send to stderr what native libraries print on stdout, as JAX's collectives on the CPU (Gloo) do."""
    with suppress(OSError, ValueError, AttributeError):
        results = os.dup(sys.stdout.fileno())
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        sys.stdout = os.fdopen(results, "w", encoding=sys.stdout.encoding, errors="backslashreplace")


def hush_stdout() -> None:
    """Discard the rest of stdout, so that Python does not report a closed pipe when it exits."""
    with suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)

"""The log: one JSON object a line, whatever is written."""

from __future__ import annotations

import json
import logging
import sys
import time


def now() -> str:
    """Return the time as lines of the log contain it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


class Stderr(logging.StreamHandler):
    """To what ``sys.stderr`` is when something is written: it may have been replaced, and the old one closed."""

    def emit(self, record: logging.LogRecord) -> None:
        """See ``logging.Handler``."""
        self.stream = sys.stderr
        super().emit(record)


def log_to_stderr(*, quiet: bool = False) -> None:
    """Write the server's log to stderr; with ``quiet`` without lines for requests and jobs."""
    handler = Stderr()
    handler.setFormatter(JsonLines())
    logger = logging.getLogger("canvax.server")
    logger.handlers = [handler]
    logger.propagate = False
    logger.setLevel(logging.WARNING if quiet else logging.INFO)
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # canvax logs what matters, with its id


class JsonLines(logging.Formatter):
    """Lines that are JSON already stay as they are; faults become JSON with their traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """See ``logging.Formatter``."""
        text = record.getMessage()
        if record.levelno == logging.INFO and text.startswith("{"):
            return text
        line = {"time": now(), "level": record.levelname.lower(), "message": text}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)

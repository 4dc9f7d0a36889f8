"""How long a call takes by the processor's time, whatever else the process holds."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable


def processor_seconds(call: Callable[[], object]) -> float:
    """Processor time of ``call()`` without garbage collection, which walks over what all earlier tests have left."""
    gc.disable()
    try:
        began = time.process_time()
        call()
        return time.process_time() - began
    finally:
        gc.enable()

"""How a run is told to stop before its last step."""

from __future__ import annotations

import signal


class StopSignal:
    """SIGTERM or SIGINT asks the run to save and leave behind the step it is in; a second one ends it.

    asked: of this rank; agreed: what all ranks have made of it; failed: what is wrong with data that cannot
    be gone on with, which stops the run in the same way.
    """

    def __init__(self):
        self.asked = self.agreed = False
        self.failed: Exception | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._ask)

    def _ask(self, number, frame) -> None:
        self.asked = True
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)

"""What /metrics shows, in Prometheus' text format."""

from __future__ import annotations

from collections import Counter

from web.engine import Engine

BUCKETS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)  # seconds


class Histogram:
    """Seconds, counted in buckets."""

    def __init__(self, name: str, about: str):
        self.name, self.about = name, about
        self._counts, self._sum = [0] * (len(BUCKETS) + 1), 0.0

    def add(self, seconds: float) -> None:
        self._counts[sum(seconds > edge for edge in BUCKETS)] += 1
        self._sum += seconds

    def lines(self) -> list[str]:
        total, made = 0, _head(self.name, "histogram", self.about)
        for edge, count in zip([*map(str, BUCKETS), "+Inf"], self._counts, strict=True):
            total += count
            made.append(f'{self.name}_bucket{{le="{edge}"}} {total}')
        return [*made, f"{self.name}_sum {self._sum:.6f}", f"{self.name}_count {total}"]


class Metrics:
    """Counts of one server."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self.responses: Counter[int] = Counter()  # by status
        self.seconds = Histogram("ocelli_request_seconds", "From a question's arrival to its answer's end.")
        self.first = Histogram("ocelli_first_token_seconds", "From a question's arrival to its first token.")

    def text(self) -> str:
        stats = self._engine.stats
        lines = _head("ocelli_responses_total", "counter", "Responses, by HTTP status.")
        for status, count in sorted(self.responses.items()):
            lines.append(f'ocelli_responses_total{{status="{status}"}} {count}')
        for name, kind, about, value in (
            ("requests_total", "counter", "Questions that were accepted.", stats.requests),
            ("queue_requests", "gauge", "Questions that wait.", stats.waiting),
            ("running_requests", "gauge", "Questions that are being answered.", stats.running),
            ("new_tokens_total", "counter", "Tokens of answers.", stats.new_tokens),
            ("prompt_tokens_total", "counter", "Positions of prompts, images included.", stats.prompt_tokens),
            ("cached_tokens_total", "counter", "Of these, positions kept from before.", stats.cached_tokens),
        ):
            lines += [*_head(f"ocelli_{name}", kind, about), f"ocelli_{name} {value}"]
        return "\n".join([*lines, *self.first.lines(), *self.seconds.lines(), ""])


def _head(name: str, kind: str, about: str) -> list[str]:
    return [f"# HELP {name} {about}", f"# TYPE {name} {kind}"]

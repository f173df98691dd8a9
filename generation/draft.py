"""An answer drafted from a small picture of each image, while the images are still to be encoded.

    session = Session(model, FeatureCache(model), slots=2)
    stream = session.draft_stream(full_inputs, short_inputs, options)
    for ids in stream.draft():                        # (1,) ids, as soon as the small picture is encoded
        ...
    answer = [int(ids) for ids in stream]             # then the answer
    stream.drafted.accepted(answer)                   # how many tokens of the draft were right

An image that is cut into tiles is among them once more, as a whole. The short prompt is the prompt with that
tile only, as the same processor makes it of an image that it does not cut; where images are never cut, it has
the same picture of fewer pixels. The same weights answer it first, in a slot of the scheduler. Then the other
parts are encoded and the full prompt is prefilled, and its row is offered the drafted tokens
(`generation.speculation`): it keeps those that are chosen for it. So the answer is the one without a draft,
greedy or sampled, and a draft that is right saves decode steps.

A draft is made where it can help: of an answer whose small picture is not encoded yet, nor is the rest, and
whose prompt is much shorter with the small picture alone. It ends when it has taken a small share of the time
that the rest will take. That time is known by then, because a part has just been encoded.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from generation.decoding import GenerationOutput, TokenStream
from generation.features import FeatureCache
from generation.keyed_prompts import KeyedPrompt, first_part
from generation.protocol import VisionLanguage


@dataclass(frozen=True)
class DraftLimits:
    """When a draft is made, and when it ends.

    share: of the time that the other parts are expected to take; the first token, which the short prompt's
        prefill gives, is made in any case.
    least_wait: seconds that the other parts are expected to take at least: less is no time to read in.
    most_prompt: positions of the short prompt, as a share of those that the full one has to compute.
    """

    share: float = 0.025
    least_wait: float = 0.3
    most_prompt: float = 1 / 3


LIMITS = DraftLimits()


@dataclass
class Draft:
    """Drafted ids, with the stop token; seconds of work until the first one, and for all of them.

    wanted: whether anyone still reads it. over: the answer's own tokens have begun.
    """

    token_ids: list[int] = field(default_factory=list)
    first_token_seconds: float = 0.0
    seconds: float = 0.0
    wanted: bool = False
    over: bool = False

    def accepted(self, answer: Sequence[int]) -> int:
        """How many of its tokens this answer begins with."""
        most = min(len(self.token_ids), len(answer))
        return next((n for n in range(most) if self.token_ids[n] != answer[n]), most)


class DraftStream(TokenStream):
    """The stream of an answer, which may be preceded by a draft. Iterating `draft` makes it, for as long as
    you like; iterating the stream ends it and makes the answer."""

    def __init__(self, steps: Generator[Tensor, None, GenerationOutput], draft: Draft):
        super().__init__(steps)
        self._draft, self._first, self._ended = draft, list[Tensor](), False

    @property
    def drafted(self) -> Draft | None:
        """The draft as far as it is made; None if there is none."""
        return self._draft if self._draft.token_ids else None

    def draft(self) -> Iterator[Tensor]:
        """The ids of the draft, (1,) on the CPU each; nothing where no draft helps, or the answer has begun.
        You may leave the loop and go on later."""
        self._draft.wanted = not self._ended
        while self._draft.wanted and not self._draft.over and (token := super()._next()) is not None:
            if self._draft.over:  # the answer's own
                self._first.append(token)
            else:
                yield token

    def end_draft(self) -> None:
        """End the draft where it is."""
        self._draft.wanted, self._ended = False, True

    def _next(self) -> Tensor | None:
        self.end_draft()
        return self._first.pop() if self._first else super()._next()


def parts_left(
    model: VisionLanguage, features: FeatureCache, prompt: KeyedPrompt, short: KeyedPrompt, reused: int
) -> float:
    """How much is to be encoded after the parts of the short prompt, in such parts, by their positions. The
    first `reused` positions of the full prompt need not be computed. 0 where a draft does not help, or its
    parts would be encoded twice."""
    position_bytes = model.config.feature_width * model.language_model.norm.weight.itemsize
    too_long = len(short) > LIMITS.most_prompt * (len(prompt) - reused)
    if too_long or sum(item.positions for item in short.items) * position_bytes > features.max_bytes:
        return 0
    missing = features.missing(prompt.digests[first_part(prompt, reused)[0] :])
    first = features.missing(short.digests) - (set(prompt.digests) - missing)
    if not first:  # without a part to encode, nothing says how long one takes
        return 0
    sizes = {item.digest: item.positions for item in (*prompt.items, *short.items)}
    return sum(sizes[one] for one in missing - first) * len(first) / sum(sizes[one] for one in first)

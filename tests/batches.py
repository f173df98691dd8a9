"""Uneven requests for a `Scheduler`, and what `generate` answers to each alone."""

from __future__ import annotations

from generation.decoding import GenerationOptions
from generation.scheduler import Request, Scheduler
from tests.prompts import ImageBlock, inputs_of, words

STOPS = tuple(range(20, 40))  # so many that answers end at all lengths
SYSTEM = words(900, 40)  # a beginning that prompts may share without an image


def request(prompt: list[int], key, in_front: bool = False, **options) -> Request:
    inputs = inputs_of(prompt, in_front)
    return Request(
        inputs["input_ids"][0],
        inputs.get("pixel_values"),
        options=GenerationOptions(**{"max_new_tokens": 12, "stop_token_ids": STOPS} | options),
        key=key,
    )


def uneven(**options) -> list[Request]:
    """Prompts of 1 to 60 positions, limits of 1 to 30; no image, one, two; some share an image or more."""
    prompts = [
        words(1, 3),
        [*words(2, 2), ImageBlock(1), *words(3, 9)],
        [*words(2, 2), ImageBlock(1), *words(4, 2)],
        words(5, 1),
        [ImageBlock(2), ImageBlock(3), *words(6, 5)],
        [ImageBlock(2), ImageBlock(4), *words(6, 5)],
        [*SYSTEM, *words(7, 20)],
        [*words(2, 2), ImageBlock(1), *words(3, 9)],  # the second one again
        [*words(2, 2), ImageBlock(5), *words(3, 9)],  # the same ids, another image
        [*SYSTEM, ImageBlock(1), *words(8, 4)],
        [*SYSTEM, *words(9, 4)],
        [ImageBlock(2), ImageBlock(3), *words(6, 5), ImageBlock(2), *words(10, 2)],
    ]
    limits = [9, 1, 30, 5, 12, 3, 2, 17, 8, 25, 6, 4]
    return [
        request(prompt, key, **{"max_new_tokens": limit} | options)
        for key, (prompt, limit) in enumerate(zip(prompts, limits, strict=True))
    ]


ALONE: dict[tuple, tuple] = {}


def alone(model, one: Request) -> tuple[list[int], str]:
    """Token ids and stop reason of `generate`, asked once."""
    pixels = None if one.pixel_values is None else one.pixel_values.numpy().tobytes()
    asked = (model, tuple(one.input_ids.tolist()), pixels, one.options)
    if asked not in ALONE:
        result = model.generate_detailed(one.input_ids[None], one.pixel_values, **vars(one.options))
        ALONE[asked] = result.rows()[0], result.stop_reasons[0]
    return ALONE[asked]


def run(model, requests, slots: int = 3, **options) -> tuple[dict, Scheduler]:
    scheduler = Scheduler(model, slots, **options)
    results = {}
    for done in scheduler.run(requests):
        assert done.key not in results
        results[done.key] = done
    return results, scheduler


def assert_as_alone(model, requests: list[Request], results: dict) -> None:
    assert sorted(results) == sorted(one.key for one in requests)
    for one in requests:
        done = results[one.key]
        assert done.error is None
        assert (done.token_ids, done.stop_reason) == alone(model, one), (
            f"request {one.key} differs from alone"
        )

"""Conversations with images of any size and texts of any kind, through processors of every sort.

What is taken must have a placeholder for each feature, no special token that somebody typed, masks that fit,
and must decode.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from data.errors import ImageError, PromptError
from data.inputs import ModelInputs
from data.processor import Processor
from tests.processors import processor
from tests.robustness.judging import Wrong
from tests.robustness.values import (
    ODD_SOURCES,
    anything,
    encoded_images,
    mostly,
    scalars,
    sizes,
    texts,
    white,
)

REFUSALS = (PromptError, ImageError)
KINDS = ("embedded", "llama", "merged", "nfkc", "unigram", "nanovlm-current", "nanovlm-v0.1")
MODES = ("RGB", "L", "RGBA", "P", "1", "LA", "CMYK", "I;16", "F")


def sources() -> st.SearchStrategy[Any]:
    """("picture", width, height, mode) for one that is decoded already, else what is given as it is."""
    decoded = st.builds(lambda size, mode: ("picture", *size, mode), sizes(), st.sampled_from(MODES))
    return st.one_of(decoded, decoded, encoded_images(), mostly(st.sampled_from(ODD_SOURCES), scalars()))


def parts() -> st.SearchStrategy[Any]:
    text = st.fixed_dictionaries({"type": st.just("text"), "text": mostly(texts())})
    keys = st.sampled_from(("image", "image", "url", "path", "base64"))
    image = st.builds(lambda key, source: {"type": "image", key: source}, keys, sources())
    return mostly(st.one_of(text, text, image))


def messages() -> st.SearchStrategy[Any]:
    roles = st.sampled_from(("user", "user", "assistant", "system"))
    content = st.one_of(texts(), st.lists(parts(), max_size=3))
    return mostly(st.fixed_dictionaries({"role": mostly(roles), "content": mostly(content)}))


def inputs() -> st.SearchStrategy[dict]:
    asked = st.fixed_dictionaries(
        {
            "kind": st.sampled_from(KINDS),
            "images": st.one_of(st.none(), sources(), st.lists(sources(), max_size=3)),
            "question": mostly(texts(), scalars()),
            "system": st.none() | texts(),
        }
    )
    conversation = mostly(st.lists(messages(), max_size=4))
    prepared = st.fixed_dictionaries(
        {
            "kind": st.sampled_from(KINDS),
            "conversations": mostly(conversation | st.lists(conversation, max_size=2), anything()),
            "generation": st.booleans(),
            "side": st.sampled_from(("left", "right")),
        }
    )
    return asked | prepared


def opened(folder: Path):
    def run(value: dict) -> str:
        own = processor(value["kind"])
        if "question" in value:
            inputs = own.ask(real(value["images"]), value["question"], value["system"])
        else:
            inputs = own.prepare(
                real(value["conversations"]), value["generation"], value["side"], return_assistant_mask=True
            )
        check(own, inputs)
        return value["kind"]

    return run


def real(value: Any) -> Any:
    """The same with images where their sizes stand."""
    if isinstance(value, tuple) and value[:1] == ("picture",):
        return white(*value[1:])
    if isinstance(value, list):
        return [real(item) for item in value]
    return {key: real(item) for key, item in value.items()} if isinstance(value, dict) else value


def check(own: Processor, inputs: ModelInputs) -> None:
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    if ids.shape != mask.shape or not mask.any(1).all():
        raise Wrong(f"ids {tuple(ids.shape)}, mask {tuple(mask.shape)} with an empty row")
    said = inputs.get("assistant_mask")
    if said is not None and (said & ~mask.bool()).any():
        raise Wrong("the assistant speaks in the padding")
    if own.image_token_id is not None:
        places = ((ids == own.image_token_id) & mask.bool()).sum(1).tolist()
        if places != inputs.image_tokens:
            raise Wrong(f"{places} placeholders for {inputs.image_tokens} features")
    pixels = inputs.get("pixel_values")
    if pixels is not None and not pixels.isfinite().all():
        raise Wrong("pixels that are not finite")
    own.decode(ids[0])

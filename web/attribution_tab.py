"""The tab that shows which parts of the images each word of an answer comes from."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any, NamedTuple

import gradio as gr
from PIL import Image

from data.errors import ImageError
from generation.options import GenerationOptions
from inference.answer import answer_text, encode
from inference.attribution import METHODS
from inference.attribution.attention import AttentionMaps, attention_steps
from inference.attribution.draw import draw_maps
from inference.attribution.occlusion import OcclusionMaps, occlusion_steps
from inference.attribution.teacher_forcing import Word, answer_words
from inference.checkpoint import Checkpoint, RequestError
from web.engine import EngineRequest, Prepared
from web.parts import add_images, message_box, model_choice, notice, visitor_of
from web.service import AskRequest, Service, Visitor, queue_notice, told

MAX_NEW_TOKENS = 64  # of an answer: every word gets a map
_STEPS: dict[str, tuple[Callable[..., Iterator[tuple[int, int]]], str]] = {
    "attention": (attention_steps, "Looking: {} of {} steps"),
    "occlusion": (occlusion_steps, "Greying out one place after another: {} of {}"),
}
_ABOUT = (
    "**attention**: what the decoder read for each word of the answer, averaged over its layers and heads. "
    "**occlusion**: how much each word's probability falls when a part of the image is greyed out. It is "
    "slower, and tests the whole model. Attention is not explanation: trust what both show."
)


class Progress(NamedTuple):
    """The answer so far, what is being done, and in the end the maps, their words and the sheet of both."""

    answer: str = ""
    doing: str = ""
    maps: AttentionMaps | OcclusionMaps | None = None
    words: tuple[Word, ...] = ()
    sheet: Image.Image | None = None


class AttributionTab:
    """Laid out where it is made, inside `gr.Blocks`."""

    def __init__(self, service: Service):
        self.service = service
        with gr.Row(equal_height=False):
            with gr.Column(scale=4, min_width=300):
                self.message = message_box(service, "where-message")
                method = gr.Radio(list(METHODS), value=METHODS[0], label="Method", elem_id="method")
                self.model = model = model_choice(service, "where-model")
                self.notice = gr.HTML("", elem_id="where-notice")
                add_images(service, self.message, model, self.notice)
                gr.Markdown(_ABOUT)
            with gr.Column(scale=7, min_width=300):
                self.answer = gr.Textbox(label="Answer", interactive=False, lines=1, elem_id="where-answer")
                self.sheet = gr.Image(
                    label="Attribution, word by word",
                    type="pil",
                    format="png",
                    interactive=False,
                    buttons=["download", "fullscreen"],
                    elem_id="where-sheet",
                )
        self.message.submit(
            self._look,
            [self.message, method, model],
            [self.answer, self.sheet, self.notice, self.message],
            api_name="look",
            show_progress="hidden",
            concurrency_limit=None,
        )
        self.message.stop(
            self._stop, None, None, api_name="stop_looking", show_progress="hidden", queue=False
        )

    @property
    def on_select(self) -> dict[str, Any]:
        """What happens when the tab is shown."""
        more = {"queue": False, "show_progress": "hidden", "api_visibility": "private"}
        return {"fn": self._fill, "inputs": None, "outputs": [self.message, self.model], **more}

    def _fill(self, request: gr.Request) -> Any:
        """Begin with the last image and question, unless the tab has begun with them before."""
        visitor = visitor_of(self.service, request)
        last = visitor.log[-1] if visitor.log else None
        if last is None or last is visitor.looked_at or visitor.busy.locked():
            return gr.skip()
        visitor.looked_at, asked = last, last.request
        value = {"text": asked.question, "files": [image for image in asked.images if Path(image).is_file()]}
        return {self.message: gr.update(value=value), self.model: self.service.models.shown(asked.model)}

    async def _look(
        self, message: dict, method: str, model: str, request: gr.Request
    ) -> AsyncGenerator[dict, None]:
        """Answer a question about images, and show what each word of the answer comes from."""
        service, visitor = self.service, visitor_of(self.service, request)
        images, question = tuple(message.get("files") or ()), message.get("text") or ""
        most = min(MAX_NEW_TOKENS, service.engine.limits.max_new_tokens)
        asked = AskRequest(images, question, service.models.named(model or ""), max_new_tokens=most)
        began, now = False, Progress()
        try:
            service.check(asked)
            if not images:
                raise ImageError("Add an image first: there is none to look at.")
            if method not in METHODS:
                raise RequestError(f"method: expected {' or '.join(METHODS)}, got {str(method)[:40]!r}")
            if visitor.busy.locked():
                raise RequestError("An answer of yours is in progress: wait for it, or stop it first.")
            async with visitor.busy:
                visitor.cancelled, began = False, True
                if service.models.held(asked.model) is None:
                    yield self._shown(Progress(doing=f"Opening {service.models.shown(asked.model)} …"))
                    await asyncio.wrap_future(service.engine.open(asked.model))
                looking = self._request(visitor, asked, method)
                async with aclosing(service.follow(visitor, service.engine.submit(looking))) as bursts:
                    async for pieces, place in bursts:
                        for piece in pieces:
                            now = piece.made or Progress(doing="Answering …")
                        yield self._shown(now._replace(doing=queue_notice(place) or now.doing))
                if now.maps is None:
                    raise RequestError("Stopped before there was anything to see.")
                # Not in the models' thread, nor in the one of all visitors: a sheet takes a second.
                sheet = await asyncio.to_thread(draw_maps, now.maps, now.words, question)
                yield self._shown(Progress(now.answer, sheet=sheet))
        except Exception as error:  # the page goes on in any case
            failed = {self.notice: notice(told(error), True)}
            # A request that was refused before it began changes nothing else: another one may be in work.
            yield self._shown(Progress(), busy=False) | failed if began else failed

    async def _stop(self, request: gr.Request) -> None:
        """Stop looking."""
        visitor_of(self.service, request).cancel()

    def _shown(self, now: Progress, busy: bool = True) -> dict:
        busy = busy and now.sheet is None
        return {
            self.answer: now.answer,
            self.sheet: now.sheet,
            self.notice: notice(now.doing, False),
            self.message: gr.update(submit_btn=not busy, stop_btn=busy),
        }

    def _request(self, visitor: Visitor, asked: AskRequest, method: str) -> EngineRequest:
        """The answer, then its maps, in short steps between those of other visitors' answers."""
        options, question = GenerationOptions(max_new_tokens=asked.max_new_tokens), asked.question

        def prepare(checkpoint: Checkpoint) -> Prepared:
            images = [self.service.load(image) for image in asked.images]
            if any(isinstance(image, bytes) for image in images):
                raise ImageError("Maps of where a model looked are drawn on images: leave the video out.")
            tiled = [one for image in asked.images for one in self.service.tiled(checkpoint, image)]
            row = encode(checkpoint, tiled, question)

            def steps(ids: list[int]) -> Iterator[Progress]:
                words = tuple(answer_words(checkpoint, ids))
                answer = checkpoint.pixels(row).whole(answer_text(checkpoint, ids))
                if not words:
                    raise RequestError("The answer has no word to draw a map for.")
                looking, doing = _STEPS[method]
                places = looking(checkpoint, images, question, ids, tiled=tiled)
                while True:
                    try:
                        done, of = next(places)
                    except StopIteration as end:
                        yield Progress(answer, "Drawing …", end.value, words)
                        return
                    yield Progress(answer, doing.format(done, of))

            return Prepared(row, options, then=steps)

        return EngineRequest(asked.model, prepare, client=visitor.client)

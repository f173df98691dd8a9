"""The tab that shows which parts of the images each word of an answer comes from."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator
from contextlib import aclosing
from dataclasses import dataclass

import gradio as gr
from PIL import Image

from data.errors import ImageError
from generation.decoding import GenerationOptions
from inference.answer import ask
from inference.attribution.attention import attention_maps
from inference.attribution.draw import draw_maps
from inference.attribution.occlusion import occlusion_steps
from inference.attribution.settings import METHODS
from inference.attribution.teacher_forcing import answer_words
from inference.checkpoint import Checkpoint, RequestError
from web.parts import message_box, model_choice, notice, visitor_of
from web.service import AskRequest, Service, Visitor, queue_notice, user_message

MAX_NEW_TOKENS = 64  # of an answer: every word gets a map
STOPPED = "Stopped before there was anything to see."
_ABOUT = (
    "**attention**: what the decoder read for each word of the answer, averaged over its layers and heads. "
    "**occlusion**: how much each word's probability falls when a part of the image is greyed out. It is "
    "slower, and tests the whole model. Attention is not explanation: trust what both show."
)


@dataclass(frozen=True)
class Progress:
    """The answer so far, what is being done, and in the end the maps."""

    answer: str = ""
    doing: str = ""
    sheet: Image.Image | None = None


class AttributionTab:
    """Laid out where it is made, inside `gr.Blocks`."""

    def __init__(self, service: Service):
        self.service = service
        with gr.Row(equal_height=False):
            with gr.Column(scale=4, min_width=300):
                self.message = message_box(service, "where-message")
                self.method = gr.Radio(list(METHODS), value=METHODS[0], label="Method", elem_id="method")
                self.model = model_choice(service, "where-model")
                self.notice = gr.HTML("", elem_id="where-notice")
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
        inputs = [self.message, self.method, self.model]
        outputs = [self.answer, self.sheet, self.notice, self.message]
        self.message.submit(
            self._look, inputs, outputs, api_name="look", show_progress="hidden", concurrency_limit=None
        )
        self.message.stop(
            self._stop, None, None, api_name="stop_looking", show_progress="hidden", queue=False
        )

    async def _look(
        self, message: dict, method: str, model: str, request: gr.Request
    ) -> AsyncGenerator[dict, None]:
        """Answer a question about images, and show what each word of the answer comes from."""
        asked = AskRequest(
            tuple(message.get("files") or ()),
            message.get("text") or "",
            model or "",
            max_new_tokens=MAX_NEW_TOKENS,
        )
        began = False
        try:
            async with aclosing(self._progress(visitor_of(self.service, request), asked, method)) as progress:
                async for now in progress:
                    began = True
                    yield {
                        self.answer: now.answer,
                        self.sheet: now.sheet,
                        self.notice: notice(now.doing, False),
                    } | self._buttons(busy=now.sheet is None)
        except Exception as error:  # the page goes on in any case
            failed = {self.notice: notice(user_message(error), True)}
            # A request that was refused before it began changes nothing else: another one may be in work.
            yield failed | ({self.answer: "", self.sheet: None} | self._buttons(False) if began else {})

    async def _stop(self, request: gr.Request) -> None:
        """Stop looking."""
        visitor_of(self.service, request).cancel()

    def _buttons(self, busy: bool) -> dict:
        return {self.message: gr.update(submit_btn=not busy, stop_btn=busy)}

    async def _progress(
        self, visitor: Visitor, asked: AskRequest, method: str
    ) -> AsyncGenerator[Progress, None]:
        """The progress of one request. Raises what is wrong; closing the iteration ends the work."""
        service = self.service
        service.check(asked)
        if not asked.images:
            raise ImageError("Add an image first: there is none to look at.")
        if method not in METHODS:
            raise RequestError(f"method: expected {' or '.join(METHODS)}, got {str(method)[:40]!r}")
        if visitor.busy.locked():
            raise RequestError("An answer of yours is in progress: wait for it, or stop it first.")
        async with visitor.busy:
            visitor.cancelled, now = False, Progress()
            checkpoint = service.models.held(asked.model)
            if checkpoint is None:
                yield Progress(doing=f"Opening {asked.model} …")
                checkpoint = await asyncio.to_thread(service.models.open, asked.model)
            async with aclosing(service.run(visitor, self._steps(checkpoint, asked, method))) as bursts:
                async for steps, place in bursts:
                    now = steps[-1] if steps else now
                    yield Progress(now.answer, queue_notice(place) or now.doing, now.sheet)
        if now.sheet is None:
            raise RequestError(STOPPED)

    def _steps(
        self, checkpoint: Checkpoint, asked: AskRequest, method: str
    ) -> Generator[Progress, None, None]:
        """In the models' thread: the answer, then its maps."""
        images, answer = [self.service.load(image) for image in asked.images], ""
        reply = ask(checkpoint, images, asked.question, GenerationOptions(max_new_tokens=MAX_NEW_TOKENS))
        for _, piece in reply:
            answer += piece
            yield Progress(answer, "Answering …")
        ids = reply.finish()["token_ids"][0]
        words = answer_words(checkpoint, ids)
        if not words:
            raise RequestError("The answer has no word to draw a map for.")
        yield Progress(answer, "Looking …")
        if method == "attention":
            maps = attention_maps(checkpoint, images, asked.question, ids)
        else:
            steps = occlusion_steps(checkpoint, images, asked.question, ids)
            while True:
                try:
                    done, windows = next(steps)
                except StopIteration as end:
                    maps = end.value
                    break
                yield Progress(answer, f"Greying out one place after another: {done} of {windows}")
        yield Progress(answer, "", draw_maps(maps, words, asked.question))

"""The tab that shows where an answer comes from: images and a question in, a heat map for each word out."""

from __future__ import annotations

import asyncio
import secrets
import time
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
from web import view
from web.ask_tab import ASSETS, EXAMPLES
from web.asking import ALIVE, POLL, REDRAW, Desk, sentence, waiting
from web.visitors import Asked, Visitor

MOST_TOKENS = 64  # of an answer: every word gets a card
_STOPPED = "Stopped before there was anything to see."
_ABOUT = (
    "**attention**: what the decoder read for each word of the answer, averaged over its layers and heads. "
    "**occlusion**: by how much each word's probability falls when a place is greyed; slower, but it asks "
    "the whole model. Attention is not explanation: trust what both show."
)


@dataclass(frozen=True)
class Looked:
    """What is known so far: the answer, a line on what is being done, and in the end the contact sheet."""

    answer: str = ""
    doing: str = ""
    sheet: Image.Image | None = None


class WhereTab:
    """Laid out where it is made, inside `gr.Blocks`."""

    def __init__(self, desk: Desk):
        self.desk = desk
        image, question = EXAMPLES[0]
        models = desk.models
        with gr.Row(equal_height=False):
            with gr.Column(scale=4, min_width=300):
                self.images = gr.Gallery(
                    [str(ASSETS / image)],
                    label="Pictures",
                    type="filepath",
                    file_types=["image"],
                    sources=["upload", "clipboard"],
                    interactive=True,
                    columns=2,
                    height=300,
                    object_fit="contain",
                    buttons=[],
                    elem_id="where-pictures",
                    elem_classes="pictures",
                )
                self.question = gr.Textbox(
                    question,
                    label="Question",
                    max_lines=6,
                    max_length=desk.limits.max_characters,
                    elem_id="where-question",
                )
                self.method = gr.Radio(list(METHODS), value=METHODS[0], label="Method", elem_id="method")
                self.model = gr.Dropdown(
                    list(models.names),
                    value=models.default,
                    label="Model",
                    allow_custom_value=models.any_model,
                    visible=models.any_model or len(models.names) > 1,
                    elem_id="where-model",
                )
                with gr.Row():
                    self.look = gr.Button("Look", variant="primary", min_width=120, elem_id="look")
                    self.stop = gr.Button("Stop", interactive=False, min_width=120, elem_id="where-stop")
                self.notice = gr.HTML("", elem_id="where-notice")
                gr.Markdown(_ABOUT)
            with gr.Column(scale=7, min_width=300):
                self.answer = gr.Textbox(label="Answer", interactive=False, lines=1, elem_id="where-answer")
                self.sheet = gr.Image(
                    label="Where it looked, word by word",
                    type="pil",
                    format="png",
                    interactive=False,
                    buttons=["download", "fullscreen"],
                    elem_id="where-sheet",
                )
        gr.on(
            [self.look.click, self.question.submit],
            self._look,
            [self.images, self.question, self.method, self.model],
            [self.answer, self.sheet, self.notice, self.look, self.stop],
            api_name="look",
            show_progress="hidden",
            concurrency_limit=None,
        )
        self.stop.click(self._stop, None, None, api_name="stop_looking", show_progress="hidden", queue=False)

    async def _look(
        self,
        images: list[tuple[str, str | None]] | None,
        question: str,
        method: str,
        model: str,
        request: gr.Request,
    ) -> AsyncGenerator[dict, None]:
        """Answer a question about images and show where each word looked."""
        paths = tuple(path for path, _ in images or ())
        asked = Asked(paths, question or "", model or "", max_new_tokens=MOST_TOKENS)
        visitor, began = self._visitor(request), False
        try:
            async with aclosing(self._looks(visitor, asked, method)) as looks:
                async for looked in looks:
                    began = True
                    yield self._changes(looked)
        except Exception as error:  # in any case the page goes on
            refused = {self.notice: view.notice(sentence(error), True)}
            # What was refused before it began changes nothing else: another look may be going on.
            yield refused | ({self.answer: "", self.sheet: None} | self._buttons(False) if began else {})

    async def _stop(self, request: gr.Request) -> None:
        """Stop looking."""
        self._visitor(request).cancel()

    def _visitor(self, request: gr.Request) -> Visitor:
        return self.desk.visitors.get(request.session_hash or secrets.token_hex(8))

    def _buttons(self, busy: bool) -> dict:
        return {self.look: gr.update(interactive=not busy), self.stop: gr.update(interactive=busy)}

    def _changes(self, looked: Looked) -> dict:
        return {
            self.answer: looked.answer,
            self.sheet: looked.sheet,
            self.notice: view.notice(looked.doing, False),
        } | self._buttons(looked.sheet is None)

    async def _looks(self, visitor: Visitor, asked: Asked, method: str) -> AsyncGenerator[Looked, None]:
        """What is known, as it grows. Raises what is wrong; closing the iteration ends the work."""
        self.desk.check(asked)
        if not asked.images:
            raise ImageError("Add an image first: there is none to look at.")
        if method not in METHODS:
            raise RequestError(f"method: expected {' or '.join(METHODS)}, got {str(method)[:40]!r}")
        if visitor.busy.locked():
            raise RequestError("An answer is being made for you: wait for it, or stop it, before you look.")
        async with visitor.busy:
            visitor.cancelled = False
            checkpoint = self.desk.models.held(asked.model)
            if checkpoint is None:
                yield Looked(doing=f"Opening {asked.model} …")
                checkpoint = await asyncio.to_thread(self.desk.models.open, asked.model)
            if visitor.cancelled:
                raise RequestError(_STOPPED)
            task = visitor.task = self.desk.thread.begin(lambda: self._steps(checkpoint, asked, method))
            looked, drawn, shown = Looked(), 0.0, None
            try:
                while not task.ended:
                    looked = (task.take() or [looked])[-1]
                    now, shows = time.perf_counter(), (looked.answer, waiting(task) or looked.doing)
                    if now - drawn > (ALIVE if shows == shown else REDRAW):
                        drawn, shown = now, shows
                        yield Looked(*shows)
                    await asyncio.sleep(POLL)
                result = task.result()
            finally:
                task.cancel()
                while not task.ended:
                    await asyncio.sleep(POLL)
                visitor.task = None
                if visitor.gone:
                    visitor.forget()
            if result is None:
                raise RequestError(_STOPPED)
            yield result

    def _steps(self, checkpoint: Checkpoint, asked: Asked, method: str) -> Generator[Looked, None, Looked]:
        """In the thread of the models: the answer, then its maps, a little at a time."""
        images, answer = [self.desk.load(image) for image in asked.images], ""
        reply = ask(checkpoint, images, asked.question, GenerationOptions(max_new_tokens=MOST_TOKENS))
        for _, piece in reply:
            answer += piece
            yield Looked(answer, "Answering …")
        ids = reply.finish()["token_ids"][0]
        words = answer_words(checkpoint, ids)
        if not words:
            raise RequestError("The answer has no word to draw a map for.")
        yield Looked(answer, "Looking …")
        if method == "occlusion":
            steps = occlusion_steps(checkpoint, images, asked.question, ids)
            while True:
                try:
                    done, windows = next(steps)
                except StopIteration as end:
                    sheet = draw_maps(end.value, words, asked.question)
                    break
                yield Looked(answer, f"Greying one place after another: {done} of {windows}")
        else:
            sheet = draw_maps(attention_maps(checkpoint, images, asked.question, ids), words, asked.question)
        return Looked(answer, "", sheet)

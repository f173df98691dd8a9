"""The tab where images are asked about: its parts, and what happens when they are used."""

from __future__ import annotations

import math
import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import gradio as gr

from web import view
from web.asking import Desk, View
from web.visitors import Asked, Visitor

ASSETS = Path(__file__).resolve().parent.parent / "assets"
EXAMPLES = (
    ("example.png", "What colour is the star?"),
    ("three.png", "How many shapes are there?"),
    ("cup.png", "What is the printed word?"),
    ("wolf.png", "Describe the picture."),
    ("eight-shapes.png", "Is there a green circle?"),
)


class AskTab:
    """Laid out where it is made, inside `gr.Blocks`.

    Args:
        desk: what questions are put to.
        remember: whether earlier questions stand before the next one, as the page opens.
    """

    def __init__(self, desk: Desk, remember: bool):
        self.desk = desk
        with gr.Row(equal_height=False):
            with gr.Column(scale=5, min_width=300):
                self._lay_out_question()
                self._lay_out_sampling(remember)
            with gr.Column(scale=6, min_width=300):
                self._lay_out_answers()
        gr.Examples(
            [[[str(ASSETS / name)], question] for name, question in EXAMPLES],
            inputs=[self.images, self.question],
            label="Examples",
            cache_examples=False,
            preload=False,
            elem_id="examples",
        )
        self._connect()

    # ------------------------------------------------------------------------------------------- layout

    def _lay_out_question(self) -> None:
        limits = self.desk.limits
        image, question = EXAMPLES[0]
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
            elem_id="pictures",
            elem_classes="pictures",
        )
        self.question = gr.Textbox(
            question,
            label="Question",
            placeholder="What do you want to know?",
            lines=1,
            max_lines=6,
            max_length=limits.max_characters,
            autofocus=False,
            elem_id="question",
        )
        with gr.Row():
            self.ask = gr.Button("Ask", variant="primary", min_width=120, elem_id="ask")
            self.stop = gr.Button("Stop", interactive=False, min_width=120, elem_id="stop")
        self.notice = gr.HTML("", elem_id="notice")

    def _lay_out_sampling(self, remember: bool) -> None:
        limits, models = self.desk.limits, self.desk.models
        self.model = gr.Dropdown(
            list(models.names),
            value=models.default,
            label="Model",
            info="one of these, or an id on the Hub" if models.any_model else None,
            allow_custom_value=models.any_model,
            visible=models.any_model or len(models.names) > 1,
            elem_id="model",
        )
        with gr.Accordion("How to answer", open=False, elem_id="sampling"):
            self.answers = gr.Slider(1, limits.max_answers, 1, step=1, label="Answers at once")
            self.temperature = gr.Slider(
                0, 2, 0, step=0.05, label="Temperature", info="0 takes the likeliest token"
            )
            self.top_p = gr.Slider(0.05, 1, 1, step=0.05, label="Top-p", info="among this much probability")
            self.top_k = gr.Slider(0, 200, 0, step=1, label="Top-k", info="among so many tokens; 0 is off")
            self.min_p = gr.Slider(
                0, 1, 0, step=0.01, label="Min-p", info="at least this share of the likeliest"
            )
            self.max_new_tokens = gr.Slider(1, limits.max_new_tokens, 256, step=1, label="New tokens at most")
            self.seed = gr.Number(
                -1, label="Seed", precision=0, minimum=-1, info="-1 draws another one each time"
            )
            self.remember = gr.Checkbox(
                remember,
                label="Remember the conversation",
                info="earlier questions and answers stand before the next one",
            )

    def _lay_out_answers(self) -> None:
        self.chat = gr.Chatbot(
            label="Answers",
            height=440,
            render_markdown=False,  # but HTML, which `view.messages` escapes
            layout="bubble",
            buttons=[],
            group_consecutive_messages=False,
            allow_file_downloads=False,
            feedback_options=None,
            placeholder="Drop images, type a question, press Ask.",
            elem_id="chat",
        )
        self.figures = gr.HTML(view.figures(None), elem_id="figures")
        with gr.Row():
            self.undo = gr.Button("Undo", size="sm", min_width=80, elem_id="undo")
            self.clear = gr.Button("Clear", size="sm", min_width=80, elem_id="clear")

    # ------------------------------------------------------------------------------------------- events

    def _connect(self) -> None:
        inputs = [
            self.images, self.question, self.model, self.answers, self.temperature, self.top_p, self.top_k,
            self.min_p, self.max_new_tokens, self.seed, self.remember,
        ]  # fmt: skip
        shown = [self.chat, self.figures, self.notice, self.question, self.ask, self.stop]
        gr.on(
            [self.ask.click, self.question.submit],
            self._ask,
            inputs,
            shown,
            api_name="ask",
            show_progress="hidden",
            concurrency_limit=None,
        )
        for triggers, function, outputs, name in (
            ([self.stop.click], self._stop, None, "stop"),
            ([self.undo.click], self._undo, shown, "undo"),
            ([self.clear.click, self.chat.clear], self._clear, shown, "clear"),
        ):
            gr.on(
                triggers,
                function,
                None,
                outputs,
                api_name=name,
                show_progress="hidden",
                queue=False,  # whoever wants less is not kept waiting by those who want more
            )

    def _visitor(self, request: gr.Request) -> Visitor:
        return self.desk.visitors.get(request.session_hash or secrets.token_hex(8))

    async def _ask(
        self,
        images: list[tuple[str, str | None]] | None,
        question: str,
        model: str,
        answers: float,
        temperature: float,
        top_p: float,
        top_k: float,
        min_p: float,
        max_new_tokens: float,
        seed: float | None,
        remember: bool,
        request: gr.Request,
    ) -> AsyncGenerator[dict, None]:
        """Answer a question about images."""
        asked = Asked(
            images=tuple(path for path, _ in images or ()),
            question=question or "",
            model=model or "",
            answers=_whole(answers),
            temperature=temperature,
            top_p=top_p,
            top_k=_whole(top_k),
            min_p=min_p,
            max_new_tokens=_whole(max_new_tokens),
            seed=None if seed in (None, -1) else _whole(seed),
            remember=bool(remember),
        )
        taken = False  # the question left its field, as it appeared among the answers
        async with aclosing(self.desk.ask(self._visitor(request), asked)) as views:
            async for now in views:
                changes = self._changes(now)
                if now.busy and not taken and now.log and not now.log[-1].ended:
                    taken, changes[self.question] = True, ""
                if now.question is not None and taken:
                    changes[self.question] = now.question
                yield changes

    async def _stop(self, request: gr.Request) -> None:
        """Stop the answer."""
        self._visitor(request).cancel()

    async def _undo(self, request: gr.Request) -> dict:
        """Take the last question back."""
        now = await self.desk.undo(self._visitor(request))
        changes = self._changes(now)
        return changes if now.question is None else changes | {self.question: now.question}

    async def _clear(self, request: gr.Request) -> dict:
        """Forget everything."""
        return self._changes(await self.desk.clear(self._visitor(request)))

    def _changes(self, now: View) -> dict[Any, Any]:
        return {
            self.chat: view.messages(now.log),
            self.figures: view.figures(now.made),
            self.notice: view.notice(now.notice, now.failed),
            self.ask: gr.update(interactive=not now.busy),
            self.stop: gr.update(interactive=now.busy),
        }


def _whole(value: Any) -> Any:
    """A slider's number as an int where it is one: whatever else comes is refused by whoever reads it."""
    return int(value) if isinstance(value, float) and math.isfinite(value) and value == int(value) else value

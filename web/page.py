"""The page: its tabs, and the server that answers for it. No other host is asked for anything.

    service = Service(Engine(Models(["checkpoints/ocelli-shapes"])))
    with socket.create_server(("127.0.0.1", 7860)) as listening:
        Server(service, Hosts("127.0.0.1")).run([listening])

The chat is laid out here, and not by `gr.ChatInterface`, from the same parts: a box that takes dropped and
pasted images, and a chat with copy, edit, retry and undo. `ChatInterface` shows what people and models
write as HTML, does not give a question back after an error or a stop, and has no place for the queue.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import fields
from html import escape, unescape
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import gradio as gr
from fastapi import FastAPI
from gradio.networking import setup_tunnel
from gradio.tunneling import CURRENT_TUNNELS
from gradio.utils import get_upload_folder

from web.attribution_tab import AttributionTab
from web.boxes import overlay
from web.connections import BoundedServer
from web.guard import Guard, Hosts, Uploads
from web.parts import (
    EXAMPLES,
    add_images,
    message_box,
    model_choice,
    notice,
    session_of,
    settings_of_page_js,
    visitor_of,
)
from web.service import AskRequest, Exchange, Service, View, Visitor

CSS, JS = (Path(__file__).with_name(f"page.{kind}") for kind in ("css", "js"))
# The theme's own colours are too light on white: text has to differ from its ground by 4.5 to 1.
CONTRAST = {
    "body_text_color_subdued": "*neutral_600",
    "input_placeholder_color": "*neutral_600",
    "input_placeholder_color_dark": "*neutral_400",
    "color_accent": "*primary_600",
    "button_primary_background_fill": "*primary_600",
    "button_primary_background_fill_hover": "*primary_700",
}
WAITING = 64  # questions in Gradio's queue, before the next one is refused
SESSIONS = 100  # whose components' values Gradio keeps
OLD_FILES = (600, 3600)  # seconds: how often to look for files, and the age at which they are deleted
# Gradio counts events for a dashboard that is switched off here: a few are enough, and no summary of them.
SETTINGS = {"GRADIO_ANALYTICS_MAX_EVENTS": "100", "GRADIO_ANALYTICS_CACHE_FREQUENCY": "1000000000"}
# A browser that keeps nothing gives none, and its page starts afresh when it is loaded anew.
_KEY_OF_TAB = """() => {
    try {
        return [sessionStorage.ocelli ??= Array.from(
            crypto.getRandomValues(new Uint8Array(16)), (one) => one.toString(16).padStart(2, "0")).join("")];
    } catch { return [""]; }
}"""
_ENDED = {
    "length": "stopped at the maximum number of new tokens",
    "context": "stopped where the model's context is full",
    "stopped": "stopped",
}


def build(service: Service, remember: bool = False) -> gr.Blocks:
    """The page of a service. `remember`: earlier questions stand before the next one, as the page opens."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    with gr.Blocks(title="Ocelli", analytics_enabled=False, fill_width=True, delete_cache=OLD_FILES) as page:
        title = gr.HTML(_title(service, service.models.default), elem_id="title")
        with gr.Tabs():
            with gr.Tab("Ask"):
                asking = AskTab(service, remember, title)
            with gr.Tab("Attribution") as tab:
                tab.select(**AttributionTab(service).on_select)
        asking.restore_on(page)

        def edge() -> int:
            return service.edge

        gr.api(edge, api_name="edge", queue=False, api_visibility="undocumented")  # for page.js
        page.unload(lambda: None)  # with this event open pages keep a connection: see `Service.connected`
    page.queue(max_size=WAITING, default_concurrency_limit=None)
    page.state_session_capacity = SESSIONS
    return page


class AskTab:
    """The tab where images are asked about, laid out where it is made."""

    def __init__(self, service: Service, remember: bool, title: gr.HTML):
        self.service, self.title = service, title
        with gr.Row(equal_height=False):
            with gr.Column(scale=7, min_width=300, elem_id="talk"):
                self.chat = gr.Chatbot(
                    show_label=False,
                    height="auto",  # page.css: what the question and the buttons leave of the window
                    render_markdown=False,  # but HTML, which `_messages` escapes
                    layout="bubble",
                    buttons=["copy"],
                    editable="user",
                    group_consecutive_messages=False,
                    allow_file_downloads=False,
                    feedback_options=None,
                    placeholder="Drop or paste an image anywhere here, and ask about it.",
                    elem_id="chat",
                )
                self.message = message_box(service, "message")
                self.notice = gr.HTML("", elem_id="notice")
                with gr.Row(elem_id="back"):
                    self.undo = gr.Button("Undo", size="sm", min_width=80, elem_id="undo")
                    self.clear = gr.Button("Clear", size="sm", min_width=80, elem_id="clear")
            with gr.Column(scale=4, min_width=300, elem_id="beside"):
                self.model = model_choice(service, "model")
                gr.Examples(
                    [[example] for example in EXAMPLES],
                    inputs=[self.message],
                    label="Examples",
                    cache_examples=False,
                    preload=False,
                    elem_id="examples",
                )
                self.settings = self._lay_out_settings(remember)
                self.stats = gr.HTML("", elem_id="figures")
        add_images(service, self.message, self.model, self.notice)
        self._connect()

    def _lay_out_settings(self, remember: bool) -> list[gr.components.Component]:
        limits = self.service.engine.limits
        most, usual = limits.max_new_tokens, AskRequest.max_new_tokens
        with gr.Accordion("Settings", open=False, elem_id="sampling"):
            return [
                # A slider has two places at least: the service refuses the second where there is none.
                gr.Slider(1, max(2, limits.slots), 1, step=1, label="Number of answers"),
                gr.Slider(0, 2, 0, step=0.05, label="Temperature", info="0 takes the likeliest token"),
                gr.Slider(0.05, 1, 1, step=0.05, label="Top-p", info="samples from this much probability"),
                gr.Slider(0, 200, 0, step=1, label="Top-k", info="samples from this many tokens; 0 is off"),
                gr.Slider(
                    0, 1, 0, step=0.01, label="Min-p",
                    info="samples from tokens with at least this share of the likeliest one's probability",
                ),
                gr.Slider(1, max(2, most), min(usual, most), step=1, label="Maximum number of new tokens"),
                gr.Number(-1, label="Seed", precision=0, minimum=-1, info="-1 draws a new one each time"),
                gr.Checkbox(
                    remember,
                    label="Remember the conversation",
                    info="earlier questions and answers stand before the next one",
                ),
                gr.Checkbox(
                    False,
                    label="Draft",
                    info="in grey, from the image as a whole, until all of its tiles are read",
                ),
                gr.Checkbox(False, label="Think", info="before it answers, if the model knows how"),
            ]  # fmt: skip

    def _connect(self) -> None:
        shown = [self.chat, self.stats, self.notice, self.message]
        settings = [self.model, *self.settings]
        more: dict[str, Any] = {"show_progress": "hidden", "concurrency_limit": None}
        gr.on([self.message.submit], self._ask, [self.message, *settings], shown, api_name="ask", **more)
        gr.on([self.chat.retry], self._retry, settings, shown, api_name="retry", **more)
        gr.on([self.chat.edit], self._edit, settings, shown, api_name="edit", **more)
        more["queue"] = False  # who wants less does not wait for those who want more
        gr.on([self.message.stop], self._stop, None, None, api_name="stop", **more)
        gr.on([self.undo.click, self.chat.undo], self._undo, None, shown, api_name="undo", **more)
        gr.on([self.clear.click], self._clear, None, shown, api_name="clear", **more)
        gr.on([self.model.change], self._introduce, [self.model], [self.title], api_name="introduce", **more)

    def restore_on(self, page: gr.Blocks) -> None:
        """A page that is loaded anew shows its conversation: its tab has a key, which no other tab knows."""
        key = gr.Textbox(visible="hidden", elem_id="key")
        everything = [self.chat, self.stats, self.notice, self.message, self.model, *self.settings]
        page.load(
            self._restore,
            [key],
            everything,
            js=_KEY_OF_TAB,
            queue=False,
            show_progress="hidden",
            api_visibility="private",
        )

    async def _restore(self, request: gr.Request, key: str) -> Any:
        visitor = await self.service.restore(*session_of(request), key)
        if not visitor.log:
            return gr.skip()
        last = visitor.log[-1].request
        values = [getattr(last, field.name) for field in fields(AskRequest)[2:]]
        given = dict(zip([self.model, *self.settings], (-1 if one is None else one for one in values)))
        given[self.model] = self.service.models.shown(last.model)
        changes = self._changes(View(visitor.log))
        changes[self.message]["value"] = {"text": "", "files": []}
        return changes | given

    async def _ask(self, request: gr.Request, message: dict, *settings) -> AsyncGenerator[dict, None]:
        """Answer a question about its images, or about those of the question before."""
        visitor = visitor_of(self.service, request)
        files = tuple(message.get("files") or ())
        asked = self._request(files or visitor.images, message.get("text") or "", *settings)
        async for changes in self._answer(visitor, asked, files):
            yield changes

    async def _retry(self, request: gr.Request, *settings) -> AsyncGenerator[dict, None]:
        """Answer the last question again, with the settings as they are now."""
        visitor = visitor_of(self.service, request)
        taken = (await self.service.undo(visitor)).returned
        if taken is not None:
            asked = self._request(taken.images, taken.question, *settings)
            async for changes in self._answer(visitor, asked, taken.images):
                yield changes

    async def _edit(self, request: gr.Request, edited: gr.EditData, *settings) -> AsyncGenerator[dict, None]:
        """Take everything back from a question on, and ask it anew."""
        visitor = visitor_of(self.service, request)
        message = edited.index[0] if isinstance(edited.index, list | tuple) else edited.index
        shown = (_messages([exchange]) for exchange in visitor.log)
        number = [n for n, messages in enumerate(shown) for _ in messages][message]
        images = visitor.log[number].request.images
        while len(visitor.log) > number:
            await self.service.undo(visitor)
        asked = self._request(images, unescape(str(edited.value)), *settings)
        async for changes in self._answer(visitor, asked, images):
            yield changes

    async def _answer(
        self, visitor: Visitor, asked: AskRequest, files: tuple[str, ...]
    ) -> AsyncGenerator[dict, None]:
        """The question leaves its box when it appears in the chat, and comes back if it has no answer."""
        taken = False
        async with aclosing(self.service.ask(visitor, asked)) as views:
            async for now in views:
                changes = self._changes(now)
                if now.busy and not taken and now.log and now.log[-1].request is asked:
                    taken, changes[self.message]["value"] = True, {"text": "", "files": []}
                if now.returned is not None:
                    changes[self.message]["value"] = {"text": asked.question, "files": list(files)}
                yield changes

    async def _stop(self, request: gr.Request) -> None:
        """Stop the answer."""
        visitor_of(self.service, request).cancel()

    async def _undo(self, request: gr.Request) -> dict:
        """Take the last question back, with its images where the question before had others."""
        visitor = visitor_of(self.service, request)
        now = await self.service.undo(visitor)
        changes = self._changes(now)
        if now.returned is not None:
            new = now.returned.images if now.returned.images != visitor.images else ()
            changes[self.message]["value"] = {"text": now.returned.question, "files": list(new)}
        return changes

    async def _clear(self, request: gr.Request) -> dict:
        """Forget the conversation."""
        return self._changes(await self.service.clear(visitor_of(self.service, request)))

    def _introduce(self, model: str) -> str:
        """What the chosen model knows."""
        return _title(self.service, self.service.models.named(model or ""))

    def _request(self, images: tuple[str, ...], question: str, *settings: Any) -> AskRequest:
        """`settings` are the values of the model and of `_lay_out_settings`, in the order of `AskRequest`."""
        names = [field.name for field in fields(AskRequest)[2:]]
        given = dict(zip(names, settings, strict=True))
        model = self.service.models.named(given["model"] or "")
        given |= {"model": model, "seed": None if given["seed"] == -1 else given["seed"]}
        return AskRequest(images, question, **given)

    def _changes(self, now: View) -> dict[Any, Any]:
        return {
            self.chat: _messages(now.log),
            self.stats: _stats(now.log[-1].stats if now.log else {}),
            self.notice: notice(now.notice, now.failed),
            self.message: gr.update(submit_btn=not now.busy, stop_btn=now.busy),
        }


def _title(service: Service, name: str) -> str:
    """HTML of the page's name, and of what a model knows once it is open and if it says so."""
    held = service.models.held(name)
    said = (held.introduction if held else "") or "Ask small vision-language models about images."
    return f"<h1>Ocelli</h1><p>{escape(said)}</p>"


# ---------------------------------------------------------------------------------- values of components
def _messages(log: Sequence[Exchange]) -> list[dict[str, Any]]:
    """Questions and answers for `gr.Chatbot`, which takes text for HTML: escaped, so that visitors read what
    was typed and generated. An answer that locates something is the image with that over it, and its text."""
    shown: list[dict[str, Any]] = []
    for exchange in log:
        shown += [
            {"role": "user", "content": {"path": image, "alt_text": "image"}} for image in exchange.images
        ]
        shown.append({"role": "user", "content": escape(exchange.request.question, quote=False)})
        for number, answer in enumerate(exchange.answers):
            if thought := exchange.thoughts[number]:
                title = {"title": "Thinking", "status": "done"}  # which folds it
                content: Any = escape(thought, quote=False)
                shown.append({"role": "assistant", "content": content, "metadata": title})
            if exchange.draft and not (answer or exchange.stop_reasons):
                draft = escape(exchange.readable(exchange.draft, draft=True), quote=False)
                shown.append({"role": "assistant", "content": f'<span class="draft">{draft}</span>'})
                continue
            text = exchange.readable(answer) or "…"
            if exchange.stop_reasons:
                reason = _ENDED.get(exchange.stop_reasons[number])
                text = (exchange.readable(answer).rstrip() or "(no words)") + (
                    f" [{reason}]" if reason else ""
                )
            content = escape(text, quote=False)
            if located := overlay(exchange):
                content = gr.HTML(f'{located}<p class="said">{content}</p>', padding=False)
            shown.append({"role": "assistant", "content": content})
    return shown


def _stats(stats: dict[str, Any]) -> str:
    """HTML of what an answer took, or "" before there is one."""
    rows: dict[str, str] = {}
    below = ""
    words = [f"{stats['first_words']:.2f} s"] if "first_words" in stats else []
    if "drafted_words" in stats:
        words.append(f"draft {stats['drafted_words']:.2f} s")
    if words:
        rows["first words"] = ", ".join(words)
    if "device" in stats:
        if (speed := stats["decode_tokens_per_second"]) is not None:
            rows["tokens a second"] = f"{speed:,.0f}"
        rows["cache"] = f"{stats['kv_cache_bytes'] / 2**20:,.1f} MiB"
        rows["tokens reused"] = f"{stats['reused_tokens']:,} of {stats['prompt_tokens']:,}"
        tokens, thought = sum(map(len, stats["token_ids"])), sum(stats.get("thinking_tokens", ()))
        seed = f", seed {stats['seed']}" if stats["sampled"] else ""
        confidence = "".join(f", confidence {one:.1%}" for one in stats["confidences"])
        machine = f"{stats['dtype']} on {stats['device']}, {stats['decode_step']}"
        thinking = f", {thought:,} of thinking" if thought else ""
        below = f"{tokens:,} new tokens{thinking}{confidence}, {machine}{seed}"
    if not rows:
        return ""
    cells = "".join(f"<div><dt>{name}</dt><dd>{escape(value)}</dd></div>" for name, value in rows.items())
    return f'<dl class="figures">{cells}</dl><p class="below">{escape(below)}</p>'


# --------------------------------------------------------------------------------------------- the server
def make_app(service: Service, hosts: Hosts, remember: bool = False) -> Guard:
    """The page of a service as an ASGI application, with the guard before all that Gradio has there."""
    page = build(service, remember)
    uploads = Uploads(get_upload_folder(), service.limits.max_uploaded_bytes)
    app = gr.mount_gradio_app(
        FastAPI(openapi_url=None),
        page,
        path="/",
        max_file_size=service.limits.image.max_bytes,
        footer_links=[],
        run_history=False,
        enable_monitoring=False,
        ssr_mode=False,
        mcp_server=False,
        pwa=False,
        theme=gr.themes.Default(
            primary_hue="indigo", neutral_hue="slate", font=["sans-serif"], font_mono=["monospace"]
        ).set(**CONTRAST),
        css_paths=[CSS],
        js=JS.read_text(encoding="utf-8").replace("SETTINGS", settings_of_page_js(service)),
    )
    largest = service.limits.image.max_bytes + 2**16  # page.js uploads one at a time
    return Guard(app, hosts, uploads, service.connected, largest)


class Server(BoundedServer):
    """Serves the page of a service: `run([socket])` until a signal comes or `should_exit` is set. Connections
    that are then open, and work, end within a second; so does what `share` began."""

    def __init__(self, service: Service, hosts: Hosts, remember: bool = False):
        app = make_app(service, hosts, remember)
        super().__init__(app, log_level="warning", timeout_graceful_shutdown=1)
        self._service, self._hosts = service, hosts

    def share(self, host: str, port: int) -> str:
        """The public URL of this page, through Gradio's servers."""
        url = setup_tunnel(host, port, secrets.token_urlsafe(32), None, None)
        self._hosts.allowed.add(urlsplit(url).hostname or "")
        return url

    async def shutdown(self, sockets=None) -> None:
        self._service.close()
        for tunnel in CURRENT_TUNNELS:
            tunnel.kill()
        logging.getLogger("uvicorn.error").disabled = True  # about the connections that are broken off
        await super().shutdown(sockets)

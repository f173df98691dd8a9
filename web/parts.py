"""What both tabs are laid out from, and the way of images into their boxes.

Dropped, pasted and chosen images are made smaller and uploaded by page.js, and looked at in `add_images`:
those that can be read join the question, the others are named.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from html import escape
from pathlib import Path
from typing import Any

import gradio as gr

from web.service import Service, Visitor, told

QUESTION = "What is in the picture?"  # about an image of one's own, until there is another
_ASSETS = Path(__file__).resolve().parent.parent / "assets"
EXAMPLES = [
    {"text": question, "files": [str(_ASSETS / image)]}
    for image, question in (
        ("example.png", "What colour is the star?"),
        ("three.png", "How many shapes are there?"),
        ("cup.png", "What is the printed word?"),
        ("wolf.png", "Describe the picture."),
        ("eight-shapes.png", "Is there a green circle?"),
    )
]


def message_box(service: Service, name: str) -> gr.MultimodalTextbox:
    """The box for a question and its images, with an example in it."""
    return gr.MultimodalTextbox(
        EXAMPLES[0],
        show_label=False,
        placeholder="Ask about the image",
        file_count="multiple",
        sources=["upload"],
        max_lines=6,
        max_plain_text_length=service.limits.max_characters,
        elem_id=name,
    )


def settings_of_page_js(service: Service) -> str:
    """What page.js has to know, as JSON."""
    limits = service.limits.image
    return json.dumps(
        {
            "bytes": limits.max_bytes,
            "pixels": limits.max_pixels,
            "images": service.engine.limits.max_images,
            "examples": [example["text"] for example in EXAMPLES],
            "question": QUESTION,
        }
    )


def add_images(service: Service, box: gr.MultimodalTextbox, model: gr.Dropdown, said: gr.HTML) -> None:
    """Lets page.js hand over files that it uploaded, and what it says about others, for a message box."""
    name = box.elem_id
    uploaded = gr.File(file_count="multiple", visible="hidden", elem_id=f"{name}-uploaded")
    refused = gr.Textbox(visible="hidden", elem_id=f"{name}-refused")
    add = gr.Button(visible="hidden", elem_id=f"{name}-add")

    async def look_at(
        files: list[str] | None, problems: str, message: dict, model: str, request: gr.Request
    ) -> tuple[list[str], str]:
        taken, wrong = list[str](), problems.splitlines()
        for file in files or ():
            try:
                taken.append(await service.taken_in(file, session_of(request)[1]))
            except Exception as error:  # the others go on
                wrong.append(told(error))
        count = len(taken) + len(message.get("files") or ())
        if wrong:
            return taken, notice(". ".join(wrong), True)
        about = await asyncio.to_thread(service.about_images, service.models.named(model or ""), count)
        return taken, notice(about, False)

    async def say_anew(message: dict, model: str) -> str:
        named, count = service.models.named(model or ""), len(message.get("files") or ())
        return notice(await asyncio.to_thread(service.about_images, named, count), False)

    more: dict[str, Any] = {"queue": False, "show_progress": "hidden", "api_visibility": "private"}
    add.click(
        look_at,
        [uploaded, refused, box, model],
        [uploaded, said],
        js=f"(...inputs) => ocelli.uploaded({name!r}, ...inputs)",
        **more,
    ).success(None, [box, uploaded], [box], js=f"(...inputs) => ocelli.join({name!r}, ...inputs)", **more)
    model.change(say_anew, [box, model], [said], **more)


def model_choice(service: Service, name: str) -> gr.Dropdown:
    models = service.models
    return gr.Dropdown(
        models.choices,
        value=models.shown(models.default),
        label="Model",
        info="one of these, or a repository on the Hub" if models.any_model else None,
        allow_custom_value=models.any_model,
        visible=models.any_model or len(models.names) > 1,
        elem_id=name,
    )


def session_of(request: gr.Request) -> tuple[str, str]:
    """The session of an open page, and its address."""
    return request.session_hash or secrets.token_hex(8), request.client.host if request.client else ""


def visitor_of(service: Service, request: gr.Request) -> Visitor:
    return service.visitor(*session_of(request))


def notice(text: str, failed: bool) -> str:
    """HTML of a sentence below the question, or ""."""
    if not text:
        return ""
    role, kind = ("alert", "failed") if failed else ("status", "waiting")
    return f'<p class="notice {kind}" role="{role}">{escape(text)}</p>'

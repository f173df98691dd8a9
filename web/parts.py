"""What both tabs are laid out from."""

from __future__ import annotations

import secrets
from html import escape
from pathlib import Path

import gradio as gr

from web.service import Service, Visitor

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
        file_types=["image"],
        file_count="multiple",
        sources=["upload"],
        max_lines=6,
        max_plain_text_length=service.limits.max_characters,
        elem_id=name,
    )


def model_choice(service: Service, name: str) -> gr.Dropdown:
    models = service.models
    return gr.Dropdown(
        list(models.ids),
        value=models.shown(models.default),
        label="Model",
        info="one of these, or an id on the Hub" if models.any_model else None,
        allow_custom_value=models.any_model,
        visible=models.any_model or len(models.names) > 1,
        elem_id=name,
    )


def visitor_of(service: Service, request: gr.Request) -> Visitor:
    client = request.client.host if request.client else ""
    return service.visitor(request.session_hash or secrets.token_hex(8), client)


def notice(text: str, failed: bool) -> str:
    """HTML of a sentence below the question, or ""."""
    if not text:
        return ""
    role, kind = ("alert", "failed") if failed else ("status", "waiting")
    return f'<p class="notice {kind}" role="{role}">{escape(text)}</p>'

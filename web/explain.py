"""What the server explains about itself: an OpenAPI description, and a page of it that needs no network.

page = explanation(described(app))                # HTML without scripts and without other files
"""

from __future__ import annotations

import json
from html import escape
from typing import Any

from fastapi import FastAPI

from web.protocol import ChatRequest

CHAT = "/v1/chat/completions"
ABOUT = "Small vision-language models, in the protocol of OpenAI's chat completions."
EXAMPLE = {
    "model": "MODEL",
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "How many boats are there?"},
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}},
            ],
        }
    ],
}
STYLE = "body{font:16px/1.5 sans-serif;max-width:50rem;margin:2rem auto;padding:0 1rem}"
STYLE += "td,th{text-align:left;vertical-align:top;padding:.2rem 1rem .2rem 0}pre{overflow:auto}"


# Of the route for questions: its body is read by `web.protocol.read_request`.
QUESTION = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {"$ref": "#/components/schemas/ChatRequest"},
                "example": EXAMPLE,
            }
        },
    },
    "responses": {
        "200": {"description": "A chat completion, or with `stream` its chunks as server-sent events."},
        "4XX": {"description": "What is wrong: `error.message`."},
    },
}


def described(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI description of the app, with that of `QUESTION`'s body."""
    made = app.openapi()
    schema = ChatRequest.model_json_schema(ref_template="#/components/schemas/{model}")
    made.setdefault("components", {}).setdefault("schemas", {}).update(
        schema.pop("$defs") | {"ChatRequest": schema}
    )
    return made


def explanation(description: dict[str, Any]) -> str:
    """An HTML page of an OpenAPI description."""
    paths = "".join(
        f"<tr><td><code>{method.upper()} {escape(path)}</code><td>{escape(operation.get('summary', ''))}"
        for path, operations in description["paths"].items()
        for method, operation in operations.items()
    )
    asked = description["components"]["schemas"]["ChatRequest"]
    fields = "".join(
        f"<tr><td><code>{escape(name)}</code><td>{_limits(field)}"
        for name, field in asked["properties"].items()
    )
    example = escape(json.dumps(EXAMPLE, indent=2))
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Ocelli</title><style>{STYLE}</style>'
        f"<h1>Ocelli</h1><p>{escape(description['info']['description'])} Clients of OpenAI's need the "
        f"address of this server with <code>/v1</code> and one of the models of <code>GET /v1/models</code>."
        f"<h2>Paths</h2><table>{paths}</table><h2>A question</h2><pre>{example}</pre>"
        f"<h2>Fields</h2><table>{fields}</table>"
        '<p>For programs: <a href="/openapi.json">openapi.json</a></html>'
    )


def _limits(field: dict[str, Any]) -> str:
    """What a field may be, in a few words."""
    kinds = [
        one for one in (field, *field.get("anyOf", ())) if one.get("type", "null") != "null" or "$ref" in one
    ]
    said = [str(one.get("type") or one.get("$ref", "").rpartition("/")[2]) for one in kinds]
    words = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most"}
    said += [f"{words[key]} {one[key]}" for one in kinds for key in words if key in one]
    if field.get("default") not in (None, []):
        said.append(f"default {json.dumps(field['default'])}")
    return escape(", ".join(said))

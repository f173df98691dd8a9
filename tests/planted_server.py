"""A small server of OpenAI's protocol over `model.generate`, sound or with one planted fault.

    with serving(checkpoint, "alpha on black") as url: ...

Each fault is planted here in a way of its own, not with what `prove` tries.
"""

from __future__ import annotations

import base64
import io
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import torch
from PIL import Image, ImageChops

from data.images import load_image
from generation.options import GenerationOptions
from inference.answer_text import AnswerText
from inference.checkpoint import Checkpoint

NAME = "planted"


def read_image(url: str, fault: str) -> bytes | Image.Image:
    data = base64.b64decode(url.partition(",")[2])
    image = Image.open(io.BytesIO(data))
    if fault == "EXIF ignored":
        image.getexif().clear()
        image.info.pop("exif", None)
        return load_image(Image.fromarray(np.asarray(load_pixels(image))))
    if fault == "alpha on black" and image.has_transparency_data:
        image = image.convert("RGBA")
        alpha = Image.merge("RGB", [image.getchannel("A")] * 3)
        return ImageChops.multiply(image.convert("RGB"), alpha)
    if fault == "16 bits clipped" and image.mode == "I;16":
        return image.convert("I").convert("L").convert("RGB")
    return data


def load_pixels(image: Image.Image) -> Image.Image:
    """As it is stored, transparent parts over white."""
    if not image.has_transparency_data:
        return load_image(image.copy()) if image.mode.startswith("I") else image.convert("RGB")
    return load_image(image)


def read_messages(messages: list[dict], fault: str) -> list[dict]:
    if not isinstance(messages, list):
        raise ValueError("messages: expected a list")
    made = []
    for message in messages:
        content = message["content"]
        content = [{"type": "text", "text": content}] if isinstance(content, str) else content
        parts = [
            {"type": "image", "image": read_image(part["image_url"]["url"], fault)}
            if part["type"] == "image_url"
            else part
            for part in content
        ]
        if fault == "images turned around":
            last = [part for part in parts if part["type"] == "image"]
            parts = [last.pop() if part["type"] == "image" else part for part in parts]
        if fault == "second image dropped":
            first = next((part for part in parts if part["type"] == "image"), None)
            parts = [part for part in parts if part["type"] != "image" or part is first]
        if fault == "images first":
            parts.sort(key=lambda part: part["type"] == "text")
        if fault == "text stripped":
            parts = [part | {"text": part["text"].strip()} if "text" in part else part for part in parts]
        if not (fault == "no system" and message["role"] == "system"):
            made.append({"role": message["role"], "content": parts})
    if fault == "last turn alone" and len(made) > 1:
        images = [part for one in made[:-1] for part in one["content"] if part["type"] == "image"]
        made = [{"role": "user", "content": images + made[-1]["content"]}]
    return made


class Handler(BaseHTTPRequestHandler):
    checkpoint: Checkpoint
    fault: str

    def log_message(self, *_) -> None:
        pass

    def reply(self, value: dict, status: int = 200) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        self.reply({"object": "list", "data": [{"id": NAME, "object": "model"}]})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        try:
            choices, usage = self.answer(asked)
        except (ValueError, KeyError, OSError) as error:
            self.reply({"error": {"message": str(error)}}, 500 if self.fault == "refusals break" else 400)
            return
        self.reply({"choices": choices, "usage": usage})

    @torch.inference_mode()
    def answer(self, asked: dict) -> tuple[list[dict], dict]:
        checkpoint, fault = self.checkpoint, self.fault
        processor, tokenizer = checkpoint.processor, checkpoint.processor.tokenizer
        row = processor.encode_conversation(read_messages(asked["messages"], fault), True)
        if fault == "special tokens read":
            chat = processor.chat.chat_template  # as it is, by the ordinary tokenizer
            assert chat
            row = replace(row, input_ids=tokenizer(tokenizer.decode(row.input_ids))["input_ids"])
        if fault == "BOS twice":
            row = replace(row, input_ids=[row.input_ids[0], *row.input_ids])
        limit = 24 if fault == "max_tokens ignored" else asked["max_tokens"]
        temperature = 1.5 if fault == "never greedy" else 0
        options = GenerationOptions(
            max_new_tokens=limit, temperature=temperature, stop_token_ids=checkpoint.stop_token_ids
        )
        ids = torch.tensor([row.input_ids])
        output = checkpoint.model.generate_detailed(ids, row.parts, options=options)
        choices = []
        for index, (new, reason) in enumerate(zip(output.rows(), output.stop_reasons, strict=True)):
            texts = AnswerText(checkpoint, GenerationOptions())
            text = "".join(map(texts.put, new)) + texts.finish()
            text = [{"type": "text", "text": text}] if fault == "text in parts" else text
            own = self.logprobs(row, ids, new) if asked.get("logprobs") else None
            choices.append(
                {"index": index, "message": {"content": text}, "finish_reason": reason, "logprobs": own}
            )
        used = sum(map(len, output.rows()))
        prompt = len(row.input_ids)
        return choices, {
            "prompt_tokens": prompt, "completion_tokens": used, "total_tokens": prompt + used,
        }  # fmt: skip

    def logprobs(self, row, ids: torch.Tensor, new: list[int]) -> dict:
        decode = self.checkpoint.processor.tokenizer.decode
        all_ids = torch.cat((ids, torch.tensor([new])), 1)
        scores = self.checkpoint.model(all_ids, row.parts).logits[0, -len(new) - 1 : -1].log_softmax(-1)
        kept = [(i, t) for i, t in enumerate(new) if t not in self.checkpoint.stop_token_ids]
        return {"content": [{"token": decode([t]), "logprob": float(scores[i, t])} for i, t in kept]}


@contextmanager
def serving(checkpoint: Checkpoint, fault: str = "") -> Iterator[str]:
    """The address of a server, for as long as the block lasts."""
    handler = type("Planted", (Handler,), {"checkpoint": checkpoint, "fault": fault})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

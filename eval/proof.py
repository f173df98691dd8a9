"""The parts of a proof: each yields lines that say whether something is the same as in its reference.

    proof = Proof("checkpoints/ocelli-shapes", None, "cpu", "quick")
    for line in proof.steps():
        print(line.part, line.name, line.same, line.said)

Everything is computed in float32 and greedily, so that what should be the same is the same to the token; what
rounds (bfloat16, int8, int4) is measured and not judged.
"""

from __future__ import annotations

import hashlib
import platform
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoProcessor

from data.conversation import read_conversation
from data.errors import ImageError, PromptError
from data.images import load_image
from data.processor import Processor
from data.tiles import Parts
from eval.probes import QUESTION, TYPED, cases, scene, written
from eval.reference import Client, ServerError, examine
from families import FAMILIES
from generation.features import FeatureCache
from generation.options import GenerationOptions
from generation.prefix_store import PrefixStore
from generation.requests import Request
from generation.scheduler import Scheduler
from generation.session import Session
from inference.checkpoint import open_checkpoint
from inference.errors import RequestError
from inference.kept import with_prefixes
from messages import counted, one_line
from models.checkpoints.sources import open_files

HOW: dict[str, Any] = dict.fromkeys(("tokenize", "return_dict", "add_generation_prompt"), True)
HOW |= {"return_tensors": "pt"}
TOKENS = 8  # of a server's answers
# Errors of a matrix's products that rounding its weights explains.
ROUNDED = {"bfloat16": 0.01, "int8": 0.03, "int4": 0.16}
CLOSE = 1e-3  # of logarithms of probabilities in float32
FAR = 1e-2  # of logits in float32, which are of the order of ten
NO_PROCESSOR = "transformers makes no processor of these files here; most need torchvision"
Answers = list[list[int]]
# (tokens of greedy answers beside transformers, tokens of each way)
SIZES = {"quick": (40, 16), "usual": (200, 32), "full": (400, 64)}


@dataclass(frozen=True)
class Line:
    """One thing that was tried. `same`: None where there is nothing to be the same. `repeat`: the smallest
    command that shows a difference."""

    part: str
    name: str
    same: bool | None
    said: str
    repeat: str = ""


class Proof:
    """See the module."""

    def __init__(self, source: str, revision: str | None, device: str, size: str):
        self.source, self.revision, self.size = source, revision, size
        self.tokens, self.way_tokens = SIZES[size]
        self.checkpoint = open_checkpoint(source, revision, device, "float32")
        self.model, self.device = self.checkpoint.model, self.checkpoint.model.device
        if not self.model.config.vision.num_hidden_layers:
            raise RequestError(f"{source} is a text model: expected one that sees images")
        assert self.model.origin is not None, "a loaded model knows where it came from"
        self.origin = self.model.origin
        # With the checkpoint's own budget of pixels, as transformers has it.
        self.processor = Processor.from_pretrained(open_files(source, revision), config=self.model.config)
        self.lines: list[Line] = []
        self.greedy: Answers = []

    def steps(self) -> Iterator[Line]:
        """All lines, as they come."""
        with tempfile.TemporaryDirectory() as folder:
            self._saved = Path(folder) / "saved"
            for part in (self._files, self._inputs, self._numbers, self._ways, self._speed):
                for name, same, said in part():
                    repeat = "" if same is not False else f"ocelli prove {self.source} --{self.size}"
                    line = Line(part.__name__.strip("_"), name, same, said, repeat.replace(" --usual", ""))
                    self.lines.append(line)
                    yield line

    @property
    def holds(self) -> bool:
        return not any(line.same is False for line in self.lines)

    def verdict(self) -> str:
        """The whole in one sentence."""
        tried = [line for line in self.lines if line.same is not None]
        wrong = [f"{line.part}: {line.name}" for line in tried if not line.same]
        if wrong:
            return f"{self.source}: {len(wrong)} of {len(tried)} checks fail ({'; '.join(wrong)})."
        return f"{self.source}: every way gives the same tokens ({len(tried)} of {len(tried)} checks hold)."

    def report(self) -> dict[str, Any]:
        """What prove.json holds."""
        names = ("torch", "transformers", "tokenizers", "Pillow", "numpy")
        return {
            "model": self.source,
            "revision": self.origin.commit,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "size": self.size,
            "device": self.checkpoint.device_name,
            "hardware": f"{processor_name()}, {counted(torch.get_num_threads(), 'thread')}",
            "versions": {"python": platform.python_version()} | {name: version(name) for name in names},
            "verdict": self.verdict(),
            "holds": self.holds,
            "greedy": self.greedy,
            "lines": [asdict(line) for line in self.lines],
        }

    # ------------------------------------------------------------------------------------------- files
    @cached_property
    def theirs(self) -> Any:
        """transformers' model: of the same files, or where it does not know their layout, of what we save."""
        load = AutoModelForImageTextToText.from_pretrained
        try:
            return load(self.origin.folder, dtype=torch.float32).to(self.device).eval()
        except (ValueError, OSError, KeyError):
            return load(self._saved, dtype=torch.float32).to(self.device).eval()

    @cached_property
    def their_processors(self) -> list[Any]:
        """transformers' own: with Pillow where that can be had, and as it comes; [] where it makes none: most
        families need torchvision."""
        for place in (self.origin.folder, self._saved):
            with suppress(ValueError, OSError, KeyError, ImportError, AttributeError, TypeError):
                own, default = AutoProcessor.from_pretrained(place), AutoProcessor.from_pretrained(place)
                own.image_processor = AutoImageProcessor.from_pretrained(place, backend="pil")
                return [own, default]
        return []

    def _files(self) -> Iterator[tuple]:
        weights, digest = self.origin.weights, hashlib.sha256()
        for path in weights:
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        tensors = len(self.model.state_dict())
        count = f"{self.checkpoint.num_parameters:,} parameters in {tensors} tensors, each with its place"
        yield "weights", None, f"{counted(len(weights), 'file')}, sha256 {digest.hexdigest()[:16]}; {count}"
        self.model.save_pretrained(self._saved, processor=self.processor)
        again = AutoModelForImageTextToText.from_pretrained(self._saved, dtype=torch.float32).to(self.device)
        own, saved = self.theirs.state_dict(), again.state_dict()
        differ = [name for name, one in saved.items() if name not in own or not torch.equal(one, own[name])]
        said = f"{counted(len(differ), 'tensor')} differ" if differ else "transformers opens what is saved"
        yield "saved and opened in transformers", not differ, said

    # ------------------------------------------------------------------------------------------ inputs
    def _inputs(self) -> Iterator[tuple]:
        if not self.their_processors:
            yield "processor", None, NO_PROCESSOR
            return
        own, default = self.their_processors
        ids, pixels, refused, tried, far = [], [], 0, 0, 0.0
        for name, read in cases().items():
            if name.endswith(TYPED):  # their special tokens are escaped here and not in transformers
                continue
            try:
                messages = [one | {"content": list(map(_opened, one["content"]))} for one in read]
                ours = self.processor.prepare(messages)
            except (PromptError, ImageError, RequestError):
                refused += 1
                continue
            tried += 1
            ordered = [
                {"role": one.role, "content": [{"type": kind, kind: value} for kind, value in one.parts]}
                for one in read_conversation(
                    messages, image_order=self.processor.generation_config.get("image_order")
                )
            ]  # as the model learnt to see images
            expected = own.apply_chat_template(ordered, **HOW)
            ids += [name] * (not torch.equal(ours["input_ids"], expected["input_ids"]))
            if (mine := self._pixels(ours)) is not None:
                pixels += [name] * (_distance(mine, expected["pixel_values"]) > 0)
                far = max(far, _distance(mine, default.apply_chat_template(ordered, **HOW)["pixel_values"]))
        over = f" ({refused} refused: not what the model takes)" if refused else ""
        yield "token ids", not ids, _summary(ids, tried) + over
        yield "pixels, by Pillow as in transformers", not pixels, _summary(pixels, tried) + over
        name = type(default.image_processor).__name__
        yield "pixels of transformers' default", None, f"at most {far:.3g} away ({name})"

    def _pixels(self, inputs: dict[str, Any]) -> Tensor | None:
        """The pixels as transformers has them."""
        found, config = inputs.get("pixel_values"), self.model.config
        if not isinstance(found, Parts):
            return found if found is None or isinstance(found, Tensor) else found.pixels
        own = FAMILIES[config.family].their_inputs
        parts = [found[at : at + 1].to("cpu") for at in range(len(found))]
        given = [own(inputs["input_ids"], one, config) for one in parts]
        patches = [one["pixel_values"] for one in given]
        if "target_sizes" in given[0]:  # patches side by side
            return torch.cat(patches, dim=-1)
        if len(patches[0]) > 1:
            return torch.cat(patches)
        return pad_sequence([one[0] for one in patches], batch_first=True)

    # ----------------------------------------------------------------------------------------- numbers
    @cached_property
    def asked(self) -> list[list[dict[str, Any]]]:
        """Two conversations about pictures of two sizes, of different lengths."""
        shown = [load_image(written(scene(*size))) for size in ((96, 96), (160, 80))]
        texts = (QUESTION, "Describe the picture.")
        return [self.processor.conversation(image, text) for image, text in zip(shown, texts)]

    @cached_property
    def prompts(self) -> list[dict[str, Any]]:
        return [_to(self.processor.prepare(one), self.device) for one in self.asked]

    @cached_property
    def their_prompts(self) -> list[dict[str, Any]] | None:
        """As transformers' processor prepares them, with Pillow; None where it has none."""
        if not self.their_processors:
            return None
        own = self.their_processors[0]
        return [_to(dict(own.apply_chat_template(one, **HOW)), self.device) for one in self.asked]

    def _numbers(self) -> Iterator[tuple]:
        answers = self.greedy = [self._generate(one, self.tokens) for one in self.prompts]
        if self.their_prompts is None:
            yield "logits", None, NO_PROCESSOR
        else:
            greatest, mean, parted = 0.0, 0.0, []
            for number, (given, ids) in enumerate(zip(self.their_prompts, answers)):
                ours = self._logits(self.model, self.prompts[number], ids)
                theirs = self._their_logits(given, ids)
                difference = (ours - theirs).abs()
                greatest, mean = max(greatest, float(difference.max())), max(mean, float(difference.mean()))
                others = (theirs.argmax(-1).cpu() != torch.tensor(ids)).nonzero()[:1, 0].tolist()
                parted += [f"answer {number + 1} {self._parts(number, ids, place)}" for place in others]
            yield "logits in float32", greatest < FAR, f"at most {greatest:.2g} apart, {mean:.2g} on average"
            said = "; ".join(parted) or f"{len(answers[0])} of {counted(len(answers), 'answer')}"
            yield "greedy tokens", not parted, said
        for dtype, bound in ROUNDED.items():
            try:
                rounded = open_checkpoint(self.source, self.revision, str(self.device), dtype).model
            except (ValueError, RequestError) as error:
                yield dtype, None, f"not here: {one_line(error)}"
                continue
            kl, agree, total = 0.0, 0, 0
            for inputs, ids in zip(self.prompts, answers):
                exact, other = (self._logits(one, inputs, ids).float() for one in (self.model, rounded))
                log_p, log_q = exact.log_softmax(-1), other.log_softmax(-1)
                kl += float((log_p.exp() * (log_p - log_q)).sum())
                agree += int((exact.argmax(-1) == other.argmax(-1)).sum())
                total += len(ids)
            away = self._products(rounded)
            said = f"products at most {away:.2%} away (bound {bound:.0%}), "
            said += f"KL {kl / total:.2g} nats a token, {agree / total:.1%} of top tokens agree"
            yield dtype, away < bound, said

    @torch.no_grad()
    def _products(self, rounded: Any) -> float:
        """The greatest relative error of a linear layer's products with rounded weights."""
        away, draw = 0.0, torch.Generator(self.device).manual_seed(0)
        for name, layer in self.model.named_modules():
            if isinstance(layer, torch.nn.Linear):
                x = torch.randn(16, layer.in_features, generator=draw, device=self.device)
                other = rounded.get_submodule(name)
                dtype = next((one.dtype for one in other.parameters() if one.is_floating_point()), x.dtype)
                exact = layer(x)
                away = max(away, float((other(x.to(dtype)).float() - exact).norm() / exact.norm()))
        return away

    def _their_logits(self, given: dict[str, Any], ids: Sequence[int]) -> Tensor:
        """transformers' logits (T_new, V) before each new token."""
        whole = torch.cat((given["input_ids"], torch.tensor([ids], device=self.device)), 1)
        given = given | {"input_ids": whole, "attention_mask": torch.ones_like(whole)}
        for name in ("mm_token_type_ids", "token_type_ids"):
            if name in given:
                given[name] = torch.nn.functional.pad(given[name], (0, len(ids)))
        with torch.no_grad():
            return self.theirs(**given).logits[0, -len(ids) - 1 : -1]

    def _logits(self, model: Any, inputs: dict[str, Any], ids: Sequence[int]) -> Tensor:
        """Our logits (T_new, V) before each new token."""
        new = torch.tensor([ids], device=self.device)
        whole = torch.cat((inputs["input_ids"], new), 1)
        given = {key: value for key, value in inputs.items() if key not in ("input_ids", "attention_mask")}
        with torch.no_grad():
            return model(whole, **given).logits[0, -len(ids) - 1 : -1]

    def _options(self, tokens: int, **more: Any) -> GenerationOptions:
        """Greedy answers that no token ends."""
        room = self.checkpoint.context - max(one["input_ids"].shape[1] for one in self.prompts)
        return GenerationOptions(max_new_tokens=max(1, min(tokens, room)), stop_token_ids=(), **more)

    def _generate(self, inputs: dict[str, Any], tokens: int, **more: Any) -> list[int]:
        output = self.model.generate_detailed(**inputs, options=self._options(tokens, **more))
        return output.token_ids[0].tolist()

    def _parts(self, number: int, ids: Sequence[int], place: int) -> str:
        """Where an answer parts from `ids`, and the gap between the two likeliest tokens there."""
        top = self._logits(self.model, self.prompts[number], ids[: place + 1])[-1].topk(2).values
        return f"parts at token {place + 1}, margin {float(top[0] - top[1]):.2g}"

    # -------------------------------------------------------------------------------------------- ways
    def _ways(self) -> Iterator[tuple]:
        asked, tokens = self.prompts, self.way_tokens

        def alone(**more: Any) -> Answers:
            return [self._generate(one, tokens, **more) for one in asked]

        expected, options = alone(use_cache=False), self._options(tokens)

        def batch() -> Answers:
            inputs = _to(self.processor.prepare(self.asked), self.device)  # padded on the left
            return self.model.generate_detailed(**inputs, options=options).token_ids.tolist()

        def forked() -> Answers:
            two = self._options(tokens, num_return_sequences=2)
            found = [self.model.generate_detailed(**one, options=two).token_ids.tolist() for one in asked]
            return [one[number] for number in range(2) for one in found]

        def session(prefixes: PrefixStore | None = None) -> Answers:
            """One after another, and the first again: what prompts share is kept, or gone back to."""
            kept = Session(self.model, FeatureCache(self.model), prefixes)
            found = [kept.generate_detailed(**asked[i], options=options).token_ids for i in (0, 1, 0, 1)]
            return [one[0].tolist() for one in found]

        def kept() -> Answers:
            store = PrefixStore(self.model)
            session(store)
            return session(store)

        def reread() -> Answers:
            """By a second store, of what a first one has written."""
            for _ in range(2):
                store = with_prefixes(self.checkpoint, self._saved.with_name("kept")).prefixes
                found = session(store)
                store.close()
            return found

        def scheduler(step: Any = None, **more: Any) -> Answers:
            """Four requests in three places."""
            own = self._options(tokens, **more)
            requests = [
                Request(one["input_ids"][0], one.get("pixel_values"), options=own, key=number)
                for number, one in enumerate([*asked, *asked])
            ]
            found = {one.key: one for one in Scheduler(self.model, 3, step).run(requests)}
            for one in found.values():
                if one.error is not None:
                    raise one.error
            return [found[number].token_ids for number in range(4)]

        ways: dict[str, Callable[[], Answers]] = {
            "cached": alone,
            "prefill in chunks": lambda: alone(prefill_chunk=7),
            "batch of two lengths": batch,
            "two answers from one prefill": forked,
            "a session that goes back": session,
            "prefixes kept in memory": kept,
            "prefixes kept on disk": reread,
            "beside others in a scheduler": scheduler,
            "tokens looked up": lambda: scheduler(lookup="on"),
        }
        yield "uncached", None, f"the reference: {len(expected[0])} tokens of {counted(len(asked), 'answer')}"
        for name, way in ways.items():
            yield name, *self._compared(way, expected)
        away = max(map(self._away, asked, expected))
        yield "logprobs, cached", away < CLOSE, f"at most {away:.2g} from those computed anew"
        compiled = self.compiled = self.checkpoint.compiled()
        if compiled.decode_step is None:
            yield "compiled", None, f"none here: {compiled.fast.name}"
        else:
            step = compiled.decode_step
            yield compiled.fast.name, *self._compared(lambda: alone(decode_step=step), expected)
            yield f"{compiled.fast.name}, in a scheduler", *self._compared(lambda: scheduler(step), expected)

    def _away(self, inputs: dict[str, Any], ids: Sequence[int]) -> float:
        """The greatest difference that a cache makes to the logarithm of a token's probability."""
        exact = self._logits(self.model, inputs, ids).float().log_softmax(-1)
        output = self.model.generate_detailed(**inputs, options=self._options(len(ids), logprobs=0))
        assert output.logprobs is not None, "they were asked for"
        found = [one.logprob or 0.0 for one in output.logprobs[0]]
        return max(abs(float(row[token]) - one) for row, token, one in zip(exact, ids, found))

    def _compared(self, way: Callable[[], Answers], expected: Answers) -> tuple[bool, str]:
        """Whether the answers of a way, which may give each several times, are those expected."""
        found = way()
        for number, one in enumerate(found):
            number %= len(expected)
            if said := self._parting(number, one, expected[number]):
                return False, f"answer {number + 1} {said}"
        return True, f"{len(expected[0])} tokens of {counted(len(found), 'answer')}"

    def _parting(self, number: int, ids: Sequence[int], expected: Sequence[int]) -> str:
        """Where an answer to a prompt parts from the one expected; "" where it is the same."""
        if [*ids] == [*expected]:
            return ""
        at = next((i for i, (a, b) in enumerate(zip(ids, expected)) if a != b), len(expected) - 1)
        return self._parts(number, expected, at)

    # ------------------------------------------------------------------------------------------- speed
    def _speed(self) -> Iterator[tuple]:
        inputs, count, step = self.prompts[0], 48, self.compiled.decode_step
        times: dict[str, list[tuple[float, float]]] = {}

        def ours(tokens: int) -> object:
            return self.model.generate_detailed(**inputs, options=self._options(tokens, decode_step=step))

        def theirs(tokens: int) -> object:
            how = {"min_new_tokens": tokens, "max_new_tokens": tokens, "do_sample": False}
            assert self.their_prompts is not None
            return self.theirs.generate(**self.their_prompts[0], **how)

        both = {"Ocelli": ours} | ({"transformers": theirs} if self.their_prompts else {})
        for _ in range(3):  # in turn, so that both meet the same machine
            for name, generate in both.items():
                times.setdefault(name, []).append(self._timed(generate, count))
        rates = {name: max(rate for _, rate in each) for name, each in times.items()}
        for name, each in times.items():
            first = min(seconds for seconds, _ in each)
            more = f"; Ocelli {rates['Ocelli'] / rates[name]:.1f} times as fast" if name != "Ocelli" else ""
            said = f"{first * 1000:.0f} ms to the first token, {rates[name]:.0f} tokens/s{more}"
            yield f"{name} in float32", None, said

    def _timed(self, generate: Callable[[int], object], count: int) -> tuple[float, float]:
        """(seconds to the first token, tokens a second after it)."""
        seconds = []
        for tokens in (1, count):
            began = time.perf_counter()
            generate(tokens)
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
        return seconds[0], (count - 1) / max(1e-9, seconds[1] - seconds[0])


def repeated(proof: Proof, earlier: Answers) -> Iterator[Line]:
    """Whether the greedy tokens of an earlier proof are those of this machine."""
    for number, (expected, prompt) in enumerate(zip(earlier, proof.prompts)):
        said = proof._parting(number, proof._generate(prompt, len(expected)), expected)
        proof.lines.append(Line("check", f"answer {number + 1}", not said, said or "the same tokens"))
        yield proof.lines[-1]


def of_server(proof: Proof, client: Client, tolerance: float) -> Iterator[Line]:
    """Whether a server gives the checkpoint's answers to the probes. Raises ServerError."""
    client.check()
    answered = False
    for name, messages in cases().items():
        answer = client.ask(messages, TOKENS)
        found = examine(proof.checkpoint, messages, answer, tolerance, TOKENS)
        proof.lines.append(Line("server", name, *found))
        answered = answered or not answer.problem
        yield proof.lines[-1]
    if not answered:
        raise ServerError(f"{client.url}: the server answered nothing; is {client.model!r} its model's name?")


def processor_name() -> str:
    """The processor's, as Linux has it, or as Python does."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _to(inputs: dict[str, Any], device: torch.device) -> dict[str, Any]:
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in inputs.items()}


def _opened(part: dict[str, Any]) -> dict[str, Any]:
    """A part of a message with its image opened."""
    return part | ({"image": load_image(part["image"])} if part["type"] == "image" else {})


def _distance(one: Tensor, other: Tensor) -> float:
    return float((one.float() - other.float()).abs().max()) if one.shape == other.shape else float("inf")


def _summary(wrong: Sequence[str], tried: int) -> str:
    return f"{len(wrong)} of {tried} differ: {'; '.join(wrong[:3])}" if wrong else f"{tried} conversations"

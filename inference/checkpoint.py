"""A checkpoint opened for questions: model and processor on a device that exists, in a dtype that suits it.

checkpoint = open_checkpoint("HuggingFaceTB/SmolVLM-256M-Instruct", device="auto", dtype="int8")
checkpoint = checkpoint.compiled()           # answers with the fastest decode step of this machine

On a CPU the fastest is C for prompts, tokens and tiles (`generation/fast/native/`), compiled once for this
machine. The step that is chosen stays, however many rows there are, and a row's bits depend neither on their
number nor on whether it is prefilled or decoded. On CUDA it is the step and the sampler as one graph
(`generation/fast/cuda/`), of Triton kernels where they can run the model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from data.boxes import CoordinateForm, form_of
from data.processor import EncodedConversation, Processor
from data.tiles import Sizes
from generation.fast.cuda.graph import GraphStep
from generation.fast.cuda.graph import unsupported as unrecorded
from generation.fast.native.build import NoCompiler
from generation.fast.native.panels import to_panels, to_rows
from generation.fast.native.step import NativeStep, is_compiled, unsupported
from generation.fast.quantized import pack, pack_layer, put_layers
from generation.fast.tower import FastTower, fast_tower
from generation.features import FeatureCache
from generation.memory import give_back
from generation.prefix_store import PrefixStore
from generation.steps import DecodeStep
from generation.threads import choose, watch
from inference.calls import CallReader
from inference.decide import choices_form
from inference.errors import FormError, check_text_only
from inference.errors import RequestError as RequestError
from inference.grammar import Form, Latest, ToolUse, choices_of, plain_call, plain_form, tool_grammar
from inference.kept_weights import KeptWeights
from inference.markup import MARKUPS, Markup
from inference.pixels import Pixels
from models.checkpoints.files import Opened
from models.checkpoints.load import meta_init, put_parameter
from models.checkpoints.names import MODELS, PHOTOGRAPHS
from models.checkpoints.sources import one_version
from models.config import check_device
from models.packed_vision_transformer import PatchMergers
from models.vision_language_model import VisionLanguageModel, prepare_device
from models.vision_transformer import ModalityProjector

if TYPE_CHECKING:
    from inference.constraint import Constraints

MARKS = frozenset("[{`")  # with which coordinates in JSON begin, or the list or code fence around them
ANY_SIZE = (10**4, 10**4)  # of an image, to find coordinates that are not to become pixels
OPEN_NOTE = "(The numbers are the model's own: which image they are of is open.)"
# Pixels of images that are taken whole, on a CPU: with so many Qwen3-VL-2B computes about 3 TFLOP for a 4:3
# photograph, as SmolVLM-256M for its 13 tiles. Checkpoints' own budgets are up to 16 million.
CPU_PIXELS = 2**19
PACKED = dict.fromkeys(("int8", "int4"), ("cpu", "cuda"))  # dtypes of weights alone, and devices for them
Written = tuple[str, Callable[[str], str] | None]  # a grammar, and what writes the answer of it
LARGE = 50_000_000  # weights from which on compiling, 3 to 8 seconds, pays with the first answer


@dataclass(frozen=True)
class Fast:
    """What was chosen. step: None is the eager one. chosen, tower: their names, or why they are the eager
    ones."""

    step: DecodeStep | None = None
    chosen: str = "eager"
    tower: str = "eager"

    @property
    def name(self) -> str:
        """The decode step that was chosen, and why it has been replaced since."""
        failure = self.step.failure if isinstance(self.step, GraphStep) else None
        return self.chosen + (f", eager since: {failure}" if failure else "")


EAGER = Fast()


@dataclass(frozen=True)
class Checkpoint:
    """A model and its processor."""

    name: str  # the folder or repository
    model: VisionLanguageModel
    processor: Processor
    load_seconds: float  # a decode step's compilation included
    dtype: str = "float32"  # of the weights: float32, bfloat16, float16, int8 or int4
    fast: Fast = EAGER  # decode step and vision tower
    prefixes: PrefixStore | None = None  # kept of earlier prompts: see `inference.prefix_files`

    @cached_property
    def features(self) -> FeatureCache:
        """Of the tiles that it was asked about last, for all who answer with it or look for what an answer
        came from. They hold as long as the weights do."""
        return FeatureCache(self.model)

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Every id that ends an answer: the config's and generation_config's, and the tokenizer's."""
        return tuple(sorted({*self.model.config.eos_token_ids, *self.processor.stop_token_ids}))

    @property
    def decode_step(self) -> DecodeStep | None:
        """None is the eager one."""
        return self.fast.step

    @property
    def settings(self) -> dict[str, str]:
        """What every result reports about the machine."""
        steps = {"decode_step": self.fast.name, "vision_tower": self.fast.tower}
        budget = self.processor.images.budget
        seen = {} if budget is None else {"max_pixels": str(budget)}
        return {"device": str(self.model.device), "dtype": self.dtype, **steps, **seen}

    @property
    def device_name(self) -> str:
        device = self.model.device
        return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)

    @property
    def num_parameters(self) -> int:
        """Of the network as its config describes it: a compiled step packs weights, which are no parameters
        then."""
        with meta_init():
            return sum(parameter.numel() for parameter in type(self.model)(self.model.config).parameters())

    @property
    def context(self) -> int:
        return self.model.config.text.max_position_embeddings

    @property
    def single_turn(self) -> bool:
        """Whether its generation_config.json says that it was trained on one question at a time. Such a model
        often gets a follow-up question wrong."""
        return bool(self.model.generation_config.get("single_turn", False))

    def too_many_images(self, count: int) -> str:
        """See `too_many_images`."""
        return too_many_images(self.name, self.model.generation_config, count)

    def other_model(self, answers: Iterable[str]) -> str:
        """See `other_model`."""
        return other_model(self.model.generation_config, answers)

    @property
    def introduction(self) -> str:
        """The model's name and what it knows, or "" where its generation_config.json does not say it."""
        text = " ".join(str(self.model.generation_config.get("knows") or "").split())
        knows = "".join(filter(str.isprintable, text))[:200]  # a stranger's text, on a terminal
        return f"{Path(self.name).name} knows {knows}" if knows else ""

    @property
    def writes_json(self) -> bool:
        """False where its generation_config.json says that it did not learn to."""
        return self.model.generation_config.get("json", True) is not False

    def constraint(self, grammar: str | ToolUse) -> Form:
        """What holds an answer to a grammar (`inference.grammar`), or to what it may do with tools:
        `GenerationOptions.constraint`. Raises RequestError for what cannot be used, and a tokenizer that
        cannot be held to any grammar."""
        if isinstance(grammar := self._known(grammar), ToolUse):
            form = self._tools(grammar, self._written(grammar), self.constraint)
            assert form is not None, "what is not kept was compiled"
            return form
        if choices_of(grammar) is None:
            as_it_stands = self._constraints(grammar)  # first: what cannot be used is refused by every model
        plain, write = self._plain(grammar)
        if (choices := choices_of(plain)) is not None:
            if (form := self._choices.get(plain)) is None:
                size = self.model.config.text.vocab_size
                form = choices_form(self.processor, size, self.stop_token_ids, choices)
                self._choices.put(plain, form, len(plain))
            return replace(form, write=write)
        return Form(as_it_stands if plain == grammar else self._constraints(plain), write)

    def kept_constraint(self, grammar: str | ToolUse) -> Form | None:
        """`constraint` if nothing has to be compiled for it, else None, also for what that would refuse."""
        try:
            if isinstance(grammar := self._known(grammar), ToolUse):
                written = self._tool_grammars.get(_key(grammar))
                return None if written is None else self._tools(grammar, written, self.kept_constraint)
            plain, write = self._plain(grammar)
        except RequestError:
            return None
        if (choice := self._choices.get(plain)) is not None:
            return replace(choice, write=write)
        kept = self._constraints.kept(plain) if "_constraints" in vars(self) else None
        return None if kept is None else Form(kept, write)

    def _known(self, grammar: str | ToolUse) -> str | ToolUse:
        """What of it a model can do: one that did not learn to write JSON calls where it must."""
        text = grammar.text if isinstance(grammar, ToolUse) and not grammar.must else None
        return grammar if text is None or self.writes_json else text

    def _written(self, use: ToolUse) -> Written:
        """The grammar of calls. A model that did not learn to write JSON says the one value of the one tool
        that it has to call as it answers anyhow; it is made to call nothing else. Raises FormError."""
        if (written := self._tool_grammars.get(_key(use))) is not None:
            return written
        plain = None
        try:
            if use.must and not self.writes_json:
                plain = plain_call(use.tools)
            if plain is None or self.processor.chat.marks.native:
                written = tool_grammar(self._markup, use, self.marks.get), None
            else:
                written = plain
        except RequestError as error:
            raise FormError(error, "tools") from None
        self._tool_grammars.put(_key(use), written, len(written[0]))
        return written

    def _tools(self, use: ToolUse, written: Written, find: Callable[[str], Form | None]) -> Form | None:
        """`find` compiles a grammar, or looks for one that is compiled."""
        markup, (grammar, write) = self._markup, written
        try:
            form = find(grammar)
        except FormError as error:
            raise FormError(error, "tools") from None
        if form is None:
            return None
        reader = partial(CallReader, markup, use.tools, use.must)
        if not use.must and use.text is None:
            may = self._constraints.may_call(grammar, markup.marks.opens, use.several)
            return Form(may, reader=reader)
        whole = write and (lambda text: markup.written(use.tools[0], write(text)))
        return replace(form, write=whole, reader=reader)

    def _plain(self, grammar: str) -> tuple[str, Callable[[str], str] | None]:
        """What this model is held to for a grammar, and what writes the answer of that: see `plain_form`."""
        return (None if self.writes_json else plain_form(grammar)) or (grammar, None)

    @property
    def _markup(self) -> Markup:
        return MARKUPS[self.processor.chat.marks.markup]

    @cached_property
    def marks(self) -> dict[str, int]:
        """The marks of calls that are tokens of their own, with their ids."""
        known = self.processor.tokenizer.get_added_vocab()
        return {mark: known[mark] for mark in self.processor.chat.marks.texts if mark in known}

    @cached_property
    def _tool_grammars(self) -> Latest[Written]:
        return Latest()

    @cached_property
    def _choices(self) -> Latest[Form]:
        """By their grammar."""
        return Latest()

    @cached_property
    def _constraints(self) -> Constraints:
        """Made once, as a large vocabulary takes a second; they go with the checkpoint."""
        from inference.constraint import Constraints  # its library is needed for nothing else

        vocab_size = self.model.config.text.vocab_size
        return Constraints(self.processor.tokenizer, vocab_size, self.stop_token_ids)

    def pixels(self, row: EncodedConversation, lines: bool = True, form: str | None = None) -> PixelText:
        """What makes pixels of the coordinates in an answer to this prompt: lines for a person, or JSON. They
        are read in the form of that name, or in the model's."""
        return PixelText(form or self.processor.coordinates, row.sizes, lines)

    def check_images(self, count: int) -> None:
        """Raises RequestError for a question without an image if the model needs one."""
        if count == 0:
            check_text_only(self.model.generation_config)

    def compiled(self, compiling: bool = True) -> Checkpoint:
        """This checkpoint with the fastest decode step and vision tower of this machine (see `speed_up`); the
        answers are the same. The model's weights are rearranged in place."""
        began = time.perf_counter()
        fast = speed_up(self.model, compiling)
        give_back()
        return replace(self, fast=fast, load_seconds=self.load_seconds + time.perf_counter() - began)


def _key(use: ToolUse) -> str:
    """Which tells apart schemas that compare equal, as those of 1 and true do."""
    return sha256(repr(use).encode()).hexdigest()


class PixelText:
    """The text of an answer with its coordinates in pixels of an image of these sizes (`inference.pixels`):
    `put` each piece, then `finish`. For a model without a form nothing changes, and without sizes lines end
    with a note if there are coordinates.

    Nothing is looked for before the first mark of coordinates: most answers have none.
    """

    def __init__(self, coordinates: Any, sizes: Sizes | None, lines: bool = True):
        self._coordinates, self._sizes, self._lines = coordinates, sizes, lines
        self._looking, self._shown = coordinates is not None, ""
        self._pixels: Pixels | None = None
        self._unsized: CoordinateForm | None = None  # in which there may be coordinates of no known image

    def put(self, piece: str) -> str:
        """What can be shown with this piece."""
        if self._looking and not MARKS.isdisjoint(piece):
            self._looking, form = False, spoken_form(self._coordinates, self._sizes)
            if form is not None and self._sizes is not None:
                self._pixels = Pixels(form, self._sizes[0], self._lines, self._shown)
            elif self._lines:
                self._unsized, self._shown = form, ""
        if self._pixels is not None:
            return self._pixels.put(piece)
        self._shown = piece or self._shown if self._unsized is None else self._shown + piece
        return piece

    def finish(self) -> str:
        """What is left."""
        if self._pixels is None and self._unsized is not None:
            found = self._unsized.read(self._shown, ANY_SIZE)
            return f"\n{OPEN_NOTE}" if found.boxes or found.points else ""
        return "" if self._pixels is None else self._pixels.finish()

    def each(self, pieces: Iterable[str]) -> Iterator[str]:
        """The pieces of a whole answer; Ctrl-C gives what is left of it so far."""
        try:
            yield from map(self.put, pieces)
        except KeyboardInterrupt:
            yield self.finish()
            raise
        yield self.finish()

    def whole(self, text: str) -> str:
        """A whole answer."""
        return self.put(text) + self.finish()


def too_many_images(name: str, generation_config: Mapping[str, Any], count: int) -> str:
    """A sentence for a question about more images than one question showed a model in training, as far as its
    generation_config.json says how many those were; else ""."""
    most = generation_config.get("most_images")
    if not isinstance(most, int) or count <= most:
        return ""
    several, fewer = ("one image", "one") if most == 1 else (f"{most} images", "fewer")
    short = Path(name).name
    return f"{short} has learned from {several} at a time: it answers about {count} as if they were {fewer}."


def other_model(generation_config: Mapping[str, Any], answers: Iterable[str]) -> str:
    """Where an answer says what its model `knows`, as a refusal does: the beginning of a sentence that names
    a model for photographs; else ""."""
    knows = generation_config.get("knows")
    if not (knows and isinstance(knows, str) and any(knows in answer for answer in answers)):
        return ""
    return (
        f"for photographs take the model {PHOTOGRAPHS} ({MODELS[PHOTOGRAPHS].gigabytes} GB, downloaded once)"
    )


def spoken_form(coordinates: Any, sizes: Sizes | None) -> CoordinateForm | None:
    """The form in which a model (`Processor.coordinates`) writes boxes and points of an image of these sizes.
    None as well where its file says nonsense: other questions have answers all the same, and --detect says
    what is wrong."""
    try:
        form = form_of(coordinates)
    except ValueError:
        return None
    return form.on(sizes[1]) if form is not None and sizes is not None else form


def open_checkpoint(
    source: str | Path,
    revision: str | None = None,
    device: str = "auto",
    dtype: str = "auto",
    threads: int | None = None,
    max_pixels: int | None = None,
    fps: float | None = None,
    max_frames: int | None = None,
) -> Checkpoint:
    """Load model and processor from a folder or the Hub.

    `device` is auto (CUDA, then MPS, then CPU), cpu, cuda, cuda:1 or mps; `dtype` is as for
    `VisionLanguageModel.from_pretrained`, or on a CPU and on CUDA int8 (compiled C rounds activations as
    well) and int4 (with a C compiler: the language model's matrices have four bits, all others int8). A CPU
    without bfloat16 arithmetic keeps bfloat16 weights and multiplies in float32. `threads` is for all
    that this process computes: see `generation.threads.choose`. `max_pixels` is that of
    `Processor.from_pretrained`, by default CPU_PIXELS on a CPU; `fps` and `max_frames` are those of
    `Processor.choose_frames`.
    """
    choose(threads)
    chosen, began = pick_device(device), time.perf_counter()
    pixels = pixel_budget(chosen, max_pixels)
    if chosen.type not in PACKED.get(dtype, chosen.type):
        expected = " or ".join(PACKED[dtype])
        raise RequestError(f"dtype {dtype}: expected device {expected}, got {chosen}; use bfloat16 there")

    def read(opened: Opened) -> tuple[VisionLanguageModel, Processor]:
        kept = KeptWeights(opened) if dtype == "int4" else None
        put = kept.put if kept else put_int8 if dtype == "int8" else put_parameter
        place = "cpu" if kept else chosen  # where C rounds
        load = partial(VisionLanguageModel.from_pretrained, opened, None, loading_dtype(dtype), place, put)
        model = kept.load(load) if kept else load()
        if kept and chosen.type != "cpu":
            to_rows(model, chosen)
        return model, Processor.from_pretrained(opened, config=model.config, max_pixels=pixels)

    try:
        model, processor = one_version(source, revision, read)
    except NoCompiler as error:
        raise RequestError(f"dtype {dtype}: {error}; use int8, which needs none") from None
    name = dtype if dtype in PACKED else str(model.dtype).removeprefix("torch.")
    if name == "bfloat16" and chosen.type == "cpu" and not has_fast_bfloat16():
        pack(model, name)
    processor.choose_frames(fps, max_frames)
    give_back()
    if chosen.type == "cpu":
        for blocks in (model.language_model.layers, model.vision_model.layers):
            watch(blocks)
    return Checkpoint(str(source), model, processor, time.perf_counter() - began, name)


def put_int8(model: torch.nn.Module, names: Sequence[str], read: Callable[[], torch.Tensor]) -> None:
    put_layers(model, names, read(), partial(pack_layer, "int8"))


def pixel_budget(device: torch.device, max_pixels: int | None) -> int | None:
    """The `max_pixels` with which `open_checkpoint` opens a processor."""
    return CPU_PIXELS if max_pixels is None and device.type == "cpu" else max_pixels


def has_fast_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 at least as fast as float32."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def loading_dtype(dtype: str) -> str:
    """The dtype in which `open_checkpoint` loads the weights before it converts them to `dtype`."""
    return "stored" if dtype in PACKED else dtype


def pick_device(name: str) -> torch.device:
    """The device of that name, ready to compute on. Raises RequestError if it does not exist here."""
    try:
        check_device(name)
    except ValueError as error:
        raise RequestError(str(error)) from None
    counts = {"cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available()), "cpu": 1}
    if name == "auto":
        name = next(kind for kind, count in counts.items() if count)
    kind, _, index = name.partition(":")
    if int(index or 0) >= counts[kind]:
        raise RequestError(
            f"device {name}: PyTorch {torch.__version__} finds {counts[kind] or 'none'} here; use auto or cpu"
        )
    return prepare_device(name)


# ---------------------------------------------------------------------------------- what computes it
def worth_compiling(model, long: bool) -> bool:
    """Whether compiling saves more time than it takes: in a long run, and for a large model. Where there is
    no fast step, as on MPS, it never does."""
    size = sum(parameter.numel() for parameter in (*model.parameters(), *model.buffers()))
    return model.language_model.norm.weight.device.type != "mps" and (long or size >= LARGE)


def fast_step(language_model, compiling: bool = True) -> tuple[DecodeStep | None, str]:
    """(a decode step faster than the eager one, what it is), or (None, why there is none).

    Args:
        compiling: else, on a CPU, only a step that was compiled before is used.
    """
    if language_model.norm.weight.device.type == "cuda":
        if reason := unrecorded(language_model):
            return None, f"eager: {reason}"
        graph = GraphStep(language_model)
        reason = graph.rehearse()
        return (None, f"eager: no CUDA graph: {reason}") if reason else (graph, graph.name)
    if reason := unsupported(language_model):
        return None, f"eager: {reason}"
    try:
        if compiling or is_compiled(language_model):
            return NativeStep(language_model), "native C step"
    except NoCompiler as error:
        return None, f"eager: {error}"
    return None, "eager: compiling does not pay for a few answers of a small model"


def speed_up(model, compiling: bool = True) -> Fast:
    """The fastest that there is. The model's tower and projector are replaced in place, and weights put into
    panels. Where nothing is to be compiled, only what costs next to nothing is used."""
    step, name = fast_step(model.language_model, compiling)
    if isinstance(model.vision_model, FastTower):
        return Fast(step, name, FastTower.NAME)
    faster, tower_name = fast_tower(model.vision_model, compiling)
    model.vision_model = faster or model.vision_model
    if isinstance(model.vision_model, FastTower) or isinstance(step, NativeStep):
        # Whatever type its input and its weights have.
        if type(model.projector) in (ModalityProjector, PatchMergers):
            to_panels(model.projector)
        else:
            model.projector.float()
    return Fast(step, name, tower_name)

"""Answers that are held to a schema, a choice or a pattern: they fit, whoever answers beside them, and forced
tokens change nothing but the number of passes."""

from __future__ import annotations

import gc
import json
import math
import random
import re
import weakref
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from generation.fast.cuda.graph import GraphStep
from generation.fast.native.step import NativeStep
from generation.options import ConstraintError, GenerationOptions
from generation.requests import Request
from generation.session import Session
from inference import answer, apart, compiling
from inference.apart import Apart
from inference.checkpoint import open_checkpoint
from inference.constraint import MOST_DIGITS, Constraints
from inference.errors import RequestError
from inference.forms import LEAST_KEPT
from inference.grammar import (
    MOST_BYTES,
    choice_grammar,
    grammar_of,
    json_grammar,
    pattern_grammar,
    response_grammar,
)
from recipes.shapes.tokenizer import build_tokenizer
from tests.invariants import fast_step, run_all
from tests.prompts import ImageBlock, inputs_of, tiny_vlm, words
from tests.schemas import GROWING, SCHEMAS, assert_fits, record, several

ROOT = Path(__file__).resolve().parent.parent
STOPS = (3, 1)
SAMPLED = {"temperature": 1.3, "top_p": 0.95, "repetition_penalty": 1.1, "seed": 5}
TEXTS = ["how many circles are there?", '{"kind": "circle", "count": 3}', "yes", "no", "left of", "größe"] * 3
VOCAB = 400  # more than the tokenizer has


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer(TEXTS, 380)


@pytest.fixture(scope="module")
def constraints(tokenizer) -> Constraints:
    return Constraints(tokenizer, VOCAB, STOPS)


@pytest.fixture(scope="module")
def vlm():
    return tiny_vlm(vocab_size=VOCAB, max_position_embeddings=900)


@pytest.fixture(scope="module")
def embedded():
    return open_checkpoint(ROOT / "checkpoints" / "ocelli-shapes")


@pytest.fixture(params=[None, NativeStep, GraphStep], scope="module")
def step(request, vlm):
    return None if request.param is None else fast_step(vlm, request.param)


def options_of(constraint, **more) -> GenerationOptions:
    return GenerationOptions(
        **{"max_new_tokens": 300, "stop_token_ids": STOPS, "constraint": constraint} | more
    )


def text_of(tokenizer, ids: list[int]) -> str:
    assert ids[-1] in STOPS
    return tokenizer.decode(ids[:-1], skip_special_tokens=True, clean_up_tokenization_spaces=False)


def prompt_of(number: int) -> list:
    return [*words(number, 3 + number), ImageBlock(number), *words(number + 50, 2)]


def request(number: int, constraint, **more) -> Request:
    inputs = inputs_of(prompt_of(number))
    options = options_of(constraint, **more)
    return Request(inputs["input_ids"][0], inputs["pixel_values"], options=options, key=number)


class OneByOne:
    """Another constraint, which says nothing of what it forces, and of what it allows only by its mask."""

    thinking = full = False
    choice = None

    def __init__(self, constraint):
        self.close, self.mask, self.accept = constraint.close, constraint.mask, constraint.accept

    def allows(self, token_id: int) -> bool:
        return False

    def forced(self) -> list[int]:
        return []


# ------------------------------------------------------------------------------------------------ they fit


@pytest.mark.slow(but=13)
@pytest.mark.parametrize("name", SCHEMAS)
def test_random_weights_fit_every_schema(vlm, tokenizer, constraints, name):
    """Greedy and sampled, several answers to a prompt."""
    constraint, ended = constraints(json_grammar(SCHEMAS[name])), 0
    for number, more in enumerate(({}, SAMPLED | {"num_return_sequences": 4})):
        options = options_of(constraint, **more)
        output = vlm.generate_detailed(**inputs_of(prompt_of(number)), options=options)
        for ids, reason in zip(output.rows(), output.stop_reasons, strict=True):
            if reason == "stop":
                assert_fits(text_of(tokenizer, ids), SCHEMAS[name])
            else:
                assert name in GROWING and len(ids) == 300
            ended += reason == "stop"
    assert ended or name in GROWING


@pytest.mark.parametrize("text", ["<|im_start|>", "a<end_of_utterance>b", "no <image> here"])
def test_a_text_that_spells_a_special_token_is_said_in_ordinary_ones(vlm, tokenizer, constraints, text):
    """Forced as that token, it would end the answer or leave it."""
    schemas = [{"enum": [text]}, {"properties": {text: {"const": 1}}, "required": [text], "type": "object"}]
    for number, schema in enumerate(schemas):
        options = options_of(constraints(json_grammar(schema)))
        (ids,) = vlm.generate_detailed(**inputs_of(prompt_of(number)), options=options).rows()
        assert_fits(text_of(tokenizer, ids), schema)


def test_objects_are_closed_only_where_that_forbids_nothing_required(constraints, tokenizer):
    """A schema that adds up from parts keeps what one part requires and another does not name."""
    parts = {
        "type": "object",
        "properties": {"a": {"const": 1}},
        "required": ["a", "b"],
        "anyOf": [{"properties": {"b": {"const": 2}}}],
    }
    assert can_say(constraints(json_grammar(parts)), tokenizer, '{"a": 1, "b": 2}')
    closed = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
    assert texts_of(constraints(json_grammar(closed)), tokenizer, 200) == {'{"a": 1}'}


def can_say(constraint, tokenizer, text: str) -> bool:
    own = constraint()
    for token_id in [*tokenizer(text)["input_ids"], STOPS[0]]:
        scores = torch.zeros(VOCAB)
        own.mask(scores)
        if not scores[token_id].isfinite():
            return False
        own.accept(token_id)
    return True


def texts_of(constraint, tokenizer, most: int) -> set[str]:
    """What can be said, by following `most` ways from the start; without the space in front."""
    ways, found = [[]], set()
    for _ in range(most):
        if not ways:
            return found
        ids = ways.pop(0)
        own = constraint()
        for token_id in ids:
            own.accept(token_id)
        scores = torch.zeros(VOCAB)
        own.mask(scores)
        allowed = scores.isfinite().nonzero()[:, 0].tolist()
        assert allowed == [token_id for token_id in range(VOCAB) if own.allows(token_id)]
        assert allowed and (not own.forced() or allowed == own.forced()[:1])
        if set(allowed) & set(STOPS):
            assert set(STOPS) <= set(allowed) or own.forced()
            found.add(tokenizer.decode(ids, skip_special_tokens=True).removeprefix(" "))
        ways = [[*ids, token_id] for token_id in allowed if token_id not in STOPS] + ways
    return found


@pytest.mark.parametrize("pattern", [r"[0-9]{2}/[a-c]\/x", r"(a|b)\\/[^/]", r"\d\d:\d\d"])
def test_patterns(vlm, tokenizer, constraints, pattern):
    constraint = constraints(pattern_grammar(pattern))
    for seed in range(5):
        options = options_of(constraint, temperature=2.0, seed=seed)
        output = vlm.generate_detailed(**inputs_of(prompt_of(0)), options=options)
        assert re.fullmatch(pattern, text_of(tokenizer, output.rows()[0]).removeprefix(" "))


# --------------------------------------------------------------------------- where the model ends its answer

ANY = record(count={"type": "integer"})
UNBOUNDED = SCHEMAS | {
    "any integer": ANY,
    "any number": record(share={"type": "number"}),
    "integer alone": {"type": "integer"},
    "any text": record(text={"type": "string"}),
    "text alone": {"type": "string"},
    "texts": record(texts={"type": "array", "items": {"type": "string"}}),
    "numbers": record(numbers={"type": "array", "items": {"type": "number"}}),
    "any object": {"type": "object", "additionalProperties": {"type": "string"}},
    "one of two": record(value={"anyOf": [{"type": "integer"}, {"type": "string"}]}),
}


def follow(constraint, wishes, most: int = 200) -> list[int]:
    """What a greedy sampler makes of a model whose logits (V,) are what `wishes` gives, token by token."""
    own, ids = constraint(), []
    while len(ids) < most:
        own.close(scores := wishes(own))
        if not own.allows(int(scores.argmax())):
            own.mask(scores)
        ids.append(int(scores.argmax()))
        own.accept(ids[-1])
        if ids[-1] in STOPS:
            return ids
    return ids


def saying(tokenizer, *texts: str):
    """A model that says these texts where they may stand, and would end its answer after each of them."""
    rest = [one for text in texts for one in (*tokenizer(text)["input_ids"], STOPS[0])]
    begun = False

    def wishes(own) -> torch.Tensor:
        nonlocal begun
        scores = brackets(tokenizer)
        if own.forced():
            return scores
        if (rest[0] in STOPS and begun) or own.allows(rest[0]):
            scores[rest[0]], begun = 20.0, rest[0] not in STOPS
            if len(rest) > 1:
                rest.pop(0)
        return scores

    return wishes


def brackets(tokenizer) -> torch.Tensor:
    """Logits (V,) of a model that prefers to begin values, and a token for each bracket and quote."""
    scores = torch.zeros(VOCAB)
    for mark in '{["':
        scores[tokenizer(mark)["input_ids"]] = 10.0
    return scores


@pytest.mark.parametrize("name", UNBOUNDED)
def test_a_model_that_has_nothing_to_say_comes_to_an_end(constraints, tokenizer, name):
    """It would end its answer anywhere: of what the schema demands, as little as possible is written."""

    def ending(own) -> torch.Tensor:
        scores = brackets(tokenizer)
        scores[STOPS[1]] = 20.0
        return scores

    ids = follow(constraints(json_grammar(UNBOUNDED[name])), ending)
    assert_fits(text := text_of(tokenizer, ids), UNBOUNDED[name])
    shortest = {"texts": '{"texts": []}', "any text": '{"text": ""}', "any object": "{}"}
    assert text == shortest.get(name, text)


@pytest.mark.parametrize(
    ("schema", "said", "expected"),
    [
        (ANY, ["5"], {"count": 5}),
        (record(share={"type": "number"}), ["0.25"], {"share": 0.25}),
        (record(colour={"type": "string"}), ["blue"], {"colour": "blue"}),
        (record(word={"type": "string"}), ['say \\"no\\"'], {"word": 'say "no"'}),
        (UNBOUNDED["texts"], ["left"], {"texts": ["left"]}),
        (UNBOUNDED["texts"], ['left", "of'], {"texts": ["left", "of"]}),
        (UNBOUNDED["numbers"], ["12"], {"numbers": [12]}),
        (record(inner=ANY), ["12"], {"inner": {"count": 12}}),
        (record(count={"anyOf": [{"type": "integer"}, {"type": "null"}]}), ["3"], {"count": 3}),
        # What is still required is asked for; what is not is left out.
        (record(a={"type": "integer"}, b={"type": "string"}), ["5", "no"], {"a": 5, "b": "no"}),
        (record(a={"type": "integer"}, b={"type": "null"}) | {"required": ["a"]}, ["5", "6"], {"a": 5}),
        (record(a=several({"type": "integer"}, 4, 2)), ["1", "2", "3"], {"a": [1, 2]}),
    ],
)
def test_a_value_ends_where_the_model_ends_its_answer(constraints, tokenizer, schema, said, expected):
    ids = follow(constraints(json_grammar(schema)), saying(tokenizer, *said))
    assert json.loads(text_of(tokenizer, ids)) == expected


@pytest.mark.parametrize("name", ["any integer", "any number", "integer alone", "numbers"])
def test_no_number_goes_on_for_ever(constraints, tokenizer, name):
    (seven,) = tokenizer("7")["input_ids"]
    wishes = torch.zeros(VOCAB)
    wishes[seven] = 20.0
    own, ids = constraints(json_grammar(UNBOUNDED[name])), []
    ids = follow(own, lambda own: wishes.clone(), 60)
    digits = re.findall("7+", tokenizer.decode(ids, skip_special_tokens=True))
    assert digits and all(len(one) == MOST_DIGITS for one in digits[:-1] or digits)


@pytest.mark.parametrize("count", [1, 2])
def test_large_numbers_that_a_schema_names_are_said(constraints, tokenizer, count):
    named = [1e100, 1e201, 1e300][:count]
    ids = follow(constraints(json_grammar({"enum": named})), lambda own: brackets(tokenizer))
    assert float(text_of(tokenizer, ids)) in named


def test_the_probability_of_ending_is_that_of_closing(constraints, tokenizer):
    """What a sampler draws from: the token that closes has the stop tokens' probability besides its own, and
    the others keep theirs."""
    own = constraints(json_grammar(ANY))()
    for token_id in tokenizer('{"count": 5')["input_ids"]:
        own.accept(token_id)
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(0))
    free, scores = logits.softmax(0), logits.clone()
    own.close(scores)
    moved = scores.softmax(0)
    (brace,) = tokenizer("}")["input_ids"]
    assert moved[brace].item() == pytest.approx((free[brace] + free[list(STOPS)].sum()).item(), rel=1e-5)
    rest = [one for one in range(VOCAB) if one not in (brace, *STOPS)]
    assert torch.allclose(moved[rest], free[rest], rtol=1e-5) and not moved[list(STOPS)].any()
    own.mask(scores)
    allowed = scores.isfinite()
    assert torch.allclose(scores.softmax(0), moved.where(allowed, 0) / moved[allowed].sum(), rtol=1e-5)


@pytest.mark.slow
def test_the_embedded_model_counts(embedded):
    """Alone, compiled, in a batch and one token at a time: the number that it says without a form; and it is
    as sure of the bracket as it was of its end."""
    images, question = [ROOT / "assets/cup.png"], "How many shapes are there?"
    constraint = embedded.forms.constraint(json_grammar(ANY))
    options = GenerationOptions(constraint=constraint, confidence=True)
    (plain,) = answer.ask(embedded, images, question, GenerationOptions()).finish()["answers"]
    expected = {"count": int(plain)}
    compiled = open_checkpoint(ROOT / "checkpoints" / "ocelli-shapes").compiled()
    one_by_one = replace(options, constraint=lambda: OneByOne(constraint()))
    for checkpoint, own in ((embedded, options), (compiled, options), (embedded, one_by_one)):
        result = answer.ask(checkpoint, images, question, own).finish()
        assert json.loads(result["answers"][0]) == expected and result["confidences"][0] > 0.8
    reply = answer.ask(embedded, images, question, replace(options, logprobs=3)).finish()
    (closing,) = (one for one in reply["logprobs"][0] if one["token"] == "}")
    # It learnt that one number in six goes on, as 3.0.
    after = {one["token"]: math.exp(one["logprob"]) for one in closing["top"]}
    assert closing["top"][0]["logprob"] == closing["logprob"]
    assert after["}"] > 0.6 and after["}"] + after["."] > 0.99
    assert not {one["id"] for one in closing["top"]} & set(embedded.stop_token_ids)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("question", "value", "expected"),
    [
        ("What colour is the star?", {"type": "string"}, "blue"),
        ("What colour is the star?", {"$ref": "#/$defs/Colour"}, "blue"),
        ("Is there a star?", {"type": "boolean"}, True),
    ],
)
def test_the_embedded_model_answers_in_json(embedded, question, value, expected):
    colours = {"$defs": {"Colour": {"enum": ["red", "green", "blue"]}}}
    options = GenerationOptions(constraint=embedded.forms.constraint(json_grammar(record(a=value) | colours)))
    (text,) = answer.ask(embedded, [ROOT / "assets/example.png"], question, options).finish()["answers"]
    assert json.loads(text) == {"a": expected}


# ------------------------------------------------------------------------------------ every way, the same


@pytest.mark.parametrize(("name", "sampling"), [("nested", SAMPLED), ("unicode", {})])
def test_forced_tokens_come_as_one_at_a_time(vlm, constraints, step, name, sampling):
    """From the model, the reference, and from a session in fewer passes."""
    constraint = constraints(json_grammar(SCHEMAS[name]))
    one_by_one = options_of(lambda: OneByOne(constraint()), decode_step=step, **sampling)
    together = replace(one_by_one, constraint=constraint)
    inputs = inputs_of(prompt_of(2))
    expected = vlm.generate_detailed(**inputs, options=one_by_one)
    output = Session(vlm).generate_detailed(**inputs, options=together)
    for one in (output, vlm.generate_detailed(**inputs, options=together)):
        assert one.rows() == expected.rows() and one.stop_reasons == expected.stop_reasons == ["stop"]
    assert output.decode_steps < expected.decode_steps == expected.lengths[0] - 1
    assert output.accepted_tokens >= output.proposed_tokens - 1  # the stop token saves nothing


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(("chunk", "sampling"), [(None, {}), (3, SAMPLED)])
def test_rows_know_nothing_of_one_another(vlm, constraints, step, chunk, sampling):
    """Schemas of all kinds and free rows in one scheduler: each as alone, one token at a time."""
    names = ["nested", None, "word", "optional", None, "one of", "const", "array", "deep"]
    rows = [None if name is None else constraints(json_grammar(SCHEMAS[name])) for name in names]
    requests = [request(number, row, **sampling | {"max_new_tokens": 120}) for number, row in enumerate(rows)]
    outputs, _ = run_all(vlm, requests, 4, decode_step=step, prefill_chunk=chunk)
    for one in requests:
        own = one.options
        if (made := own.constraint) is not None:
            own = replace(own, constraint=lambda made=made: OneByOne(made()))
        inputs = inputs_of(prompt_of(one.key))
        alone = vlm.generate_detailed(**inputs, options=replace(own, decode_step=step))
        assert outputs[one.key].token_ids == alone.rows()[0], names[one.key]
        assert outputs[one.key].stop_reason == alone.stop_reasons[0]


def test_without_a_cache_and_in_a_batch(vlm, constraints):
    constraint = constraints(json_grammar(SCHEMAS["record"]))
    rows = [inputs_of(words(number, 6)) for number in range(3)]
    options = options_of(constraint)
    alone = [
        vlm.generate_detailed(**row, options=replace(options, use_cache=False)).rows()[0] for row in rows
    ]
    together = torch.cat([row["input_ids"] for row in rows])
    assert vlm.generate_detailed(together, options=options).rows() == alone


class Broken:
    """A constraint that comes to a place where it cannot go on."""

    thinking = full = False
    choice = None

    def __init__(self) -> None:
        self.left = 3

    def close(self, scores: torch.Tensor) -> None:
        pass

    def allows(self, token_id: int) -> bool:
        return self.left > 0

    def mask(self, scores: torch.Tensor) -> None:
        if self.left == 0:
            raise ConstraintError("too large")

    def accept(self, token_id: int) -> None:
        self.left -= 1

    def forced(self) -> list[int]:
        return []


def test_a_constraint_fails_alone(vlm, constraints):
    good = constraints(json_grammar(SCHEMAS["record"]))
    requests = [request(0, good), request(1, Broken), request(2, None, max_new_tokens=20)]
    outputs, _ = run_all(vlm, requests)
    assert isinstance(outputs[1].error, ConstraintError)
    for key in (0, 2):
        alone = vlm.generate_detailed(**inputs_of(prompt_of(key)), options=requests[key].options)
        assert outputs[key].token_ids == alone.rows()[0]
    with pytest.raises(ConstraintError):
        vlm.generate(**inputs_of(prompt_of(1)), options=requests[1].options)


def test_a_grammar_is_tried_and_compiled_once(monkeypatch):
    """One that is refused is refused again without a trial; all that is kept stays within bounds."""
    forms, tried = open_checkpoint(ROOT / "checkpoints" / "ocelli-shapes").forms, []
    trials = forms.constraints._trials
    monkeypatch.setattr(
        forms.constraints, "_trials", lambda grammar: tried.append(grammar) or trials(grammar)
    )
    good, bad = json_grammar(SCHEMAS["deep"]), json_grammar({"type": "strin"})
    for _ in range(3):
        forms.constraint(good)
        with pytest.raises(RequestError):
            forms.constraint(bad)
    assert tried == [good, bad] and forms.kept_constraint(good) and not forms.kept_constraint(bad)
    forms._kept.most = 2 * LEAST_KEPT
    for name in ("word", "boolean", "null"):
        forms.constraint(json_grammar(SCHEMAS[name]))
    forms.constraint(good)
    assert tried[-1] == good and len(tried) == 6


# --------------------------------------------------------------------------------------------- refusals


def nested(depth: int) -> dict:
    schema: dict = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


HUGE = {"type": "integer", "multipleOf": 1e30}


@pytest.mark.parametrize(
    "schema",
    ["", "{", "[]", "3", "true", b"\xff", '{"a": 1} x', "[" * 50_000, '{"type": "strin"}', '{"items": 3}',
     {"type": "array", "uniqueItems": True}, {"$ref": "http://127.0.0.1:9/x"}, {"$ref": "#/$defs/missing"},
     {"not": {"type": "string"}, "x-guidance": {"lenient": True}},
     {"items": {"not": {"type": "string"}, "x-guidance": {"lenient": True}}},
     {"type": "string", "pattern": "("},
     {"type": "string", "pattern": "(?=a)b"}, {"oneOf": [{"type": "integer"}, {"type": "number"}]},
     {"anyOf": []}, {"$ref": "#"}, nested(5000), HUGE,
     " " * (MOST_BYTES + 1), {"enum": ["x" * MOST_BYTES]}, {"a": object()}],
)  # fmt: skip
def test_schemas_that_are_refused(constraints, schema):
    with pytest.raises(RequestError) as refused:
        constraints(json_grammar(schema))
    assert 10 < len(str(refused.value)) < 600 and "\n" not in str(refused.value)


def parts(*schemas: dict) -> dict:
    return {"allOf": list(schemas)}


COSTLY = {
    "multiples": parts({"type": "integer", "multipleOf": 1999}, {"multipleOf": 1997}),
    "patterns": parts(*({"type": "string", "pattern": f"a.{{{n}}}b"} for n in range(5, 25))),
    "cases": parts(
        *({"anyOf": [{"properties": {f"p{i}{j}": {"type": "null"}}} for j in range(8)]} for i in range(8))
    ),
}


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("name", COSTLY)
def test_what_takes_too_long_to_compile_is_ended(constraints, name):
    """It took minutes; and the next one is tried out by the same process."""
    with pytest.raises(RequestError):
        constraints(json_grammar(COSTLY[name]))
    child = constraints._trials._child
    number = random.Random(name).randrange(2**40)
    constraints(json_grammar({"const": number}))
    assert constraints._trials._child is child


def serve_in_little_memory() -> None:
    compiling.MEMORY = 2**20
    compiling.serve()


def test_what_takes_too_much_memory_is_ended(tokenizer, monkeypatch):
    """The bound of the process is on what a grammar takes; here, of one that takes little."""
    own = Constraints(tokenizer, VOCAB, STOPS)
    monkeypatch.setattr(apart, "Apart", lambda _: Apart("tests.test_constraint:serve_in_little_memory"))
    with pytest.raises(RequestError):
        own(json_grammar({"enum": [f"{n:05d}" for n in range(7000)]}))


def test_a_process_that_has_gone_is_started_again(tokenizer):
    own = Constraints(tokenizer, VOCAB, STOPS)
    own(json_grammar(SCHEMAS["word"]))
    child = own._trials._child
    child.terminate()
    assert child.status < 0
    own(json_grammar(SCHEMAS["boolean"]))
    again = own._trials._child
    assert again is not child and again._process.poll() is None
    del own
    gc.collect()
    assert again._process.poll() is not None  # nothing stays behind


@pytest.mark.parametrize("choices", [[], "yes", ["a", "a"], ["a", ""], [" a"], ["a", 1], ["x"] * 1001,
                                     ["x" * 40_000, "y" * 40_000]])  # fmt: skip
def test_choices_that_are_refused(choices):
    with pytest.raises(RequestError):
        choice_grammar(choices)


def test_what_a_request_names():
    schema = {"type": "boolean"}
    assert grammar_of() is None and response_grammar({"type": "text"}) is None
    assert grammar_of(schema) == json_grammar(json.dumps(schema))
    assert response_grammar({"type": "json_schema", "json_schema": {"schema": schema}}) == grammar_of(schema)
    assert response_grammar({"type": "json_object"}) == json_grammar({"type": "object"})
    for wrong in ({}, {"type": "xml"}, {"type": "json_schema"}, {"type": "json_schema", "json_schema": {}}):
        with pytest.raises(RequestError):
            response_grammar(wrong)
    with pytest.raises(RequestError):
        grammar_of(schema, ["yes"])


def sentencepiece_like() -> Tokenizer:
    """Bytes as a last resort, and a mark for spaces."""
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        '{"',
        '"',
        ":",
        "}",
        "a",
    ]
    backend = Tokenizer(models.BPE({piece: n for n, piece in enumerate(pieces)}, [], byte_fallback=True))
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return backend


def whole_words() -> Tokenizer:
    backend = Tokenizer(models.WordLevel({"yes": 0, "no": 1}, unk_token="no"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return backend


def test_other_tokenizers(vlm):
    """One of SentencePiece's kind can be held to a schema; one that does not say its bytes is refused, and so
    is a model whose answers never end."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=sentencepiece_like())
    constraint = Constraints(tokenizer, VOCAB, (2,))(json_grammar(SCHEMAS["unicode"]))
    for seed in range(4):
        options = options_of(constraint, temperature=1.0, seed=seed, stop_token_ids=(2,))
        ids = vlm.generate_detailed(**inputs_of(words(seed, 5)), options=options).rows()[0]
        assert ids[-1] == 2
        assert_fits(tokenizer.decode(ids[:-1]), SCHEMAS["unicode"])
    with pytest.raises(RequestError):
        Constraints(PreTrainedTokenizerFast(tokenizer_object=whole_words()), VOCAB, STOPS)
    with pytest.raises(RequestError):
        Constraints(tokenizer, VOCAB, ())


def test_stop_tokens_that_the_model_has_not(vlm, tokenizer):
    """A tokenizer may name more ids than there are logits; what ends answers is the others."""
    constraint = Constraints(tokenizer, VOCAB, (VOCAB + 7, *STOPS))(json_grammar(SCHEMAS["record"]))
    (ids,) = vlm.generate_detailed(**inputs_of(words(1, 5)), options=options_of(constraint)).rows()
    assert_fits(text_of(tokenizer, ids), SCHEMAS["record"])
    with pytest.raises(RequestError):
        Constraints(tokenizer, VOCAB, (VOCAB,))


def test_a_closed_model_leaves_no_vocabulary_behind():
    """A server that opens one model after another would keep them all."""
    checkpoint = open_checkpoint(ROOT / "checkpoints" / "ocelli-shapes")
    checkpoint.forms.constraint(json_grammar({"type": "boolean"}))
    checkpoint.forms.constraint(json_grammar({"type": "integer"}))
    kept = weakref.ref(checkpoint.forms.constraints)
    assert kept() is not None
    del checkpoint
    gc.collect()
    assert kept() is None


# ------------------------------------------------------------------------------------------ command line


@pytest.mark.slow
def test_the_command_line(as_json, complaint, tmp_path, photo):
    path = tmp_path / "schema.json"
    path.write_text(json.dumps(SCHEMAS["record"]))
    for more in ([], ["--compile", "off", "--no-cache"], ["--num-answers", "2", "--temperature", "1"]):
        for result in as_json(photo, "what is it?", "--schema", path, *more):
            assert set(result["stop_reasons"]) == {"stop"}
            for text in result["answers"]:
                assert_fits(text, SCHEMAS["record"])
    choices = ["--choices", '["yes, please", "no"]', "--max-new-tokens", "40"]
    (result,) = as_json(photo, "is it?", *choices)
    assert result["answers"][0] in ("yes, please", "no")
    both, missing = ["--schema", path, "--choices", "a"], ["--schema", tmp_path / "none"]
    for wrong in (both, missing, ["--choices", "a,,b"], ["--choices", '["a"']):
        assert complaint(photo, "what?", *wrong)
    path.write_text('{"type": "strin"}')
    assert "strin" in complaint(photo, "what?", "--schema", path, model=tmp_path / "none")  # before it loads


@pytest.mark.slow
def test_a_batch_and_its_lines(cli, tmp_path, photo):
    """A line's own form goes before the run's; another form makes another run."""
    lines = [
        {"image": str(photo), "question": "how many?"},
        {"image": str(photo), "question": "is it?", "choices": ["maybe", "never"]},
        {"image": str(photo), "question": "what?", "schema": SCHEMAS["array"]},
        {"image": str(photo), "question": "what?", "schema": {"type": "strin"}},
    ]
    questions, out = tmp_path / "questions.jsonl", tmp_path / "out.jsonl"
    questions.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = ["batch", questions, "--out", out]
    code, _, said = cli(*run, "--choices", "one,two", "--max-new-tokens", "60")
    assert code == 1, said
    first, second, third, fourth = (json.loads(line) for line in out.read_text().splitlines())
    assert first["answers"][0] in ("one", "two") and second["answers"][0] in ("maybe", "never")
    jsonschema.validate(json.loads(third["answers"][0]), SCHEMAS["array"])
    assert "strin" in fourth["error"]
    assert cli(*run, "--choices", "one,three", "--max-new-tokens", "60")[0] == 2

"""Pages end: in the grammar of DocTags, within their limit, and without repeating themselves for ever."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from docling_core.types.doc.document import DoclingDocument, DocTagsDocument

from data.reading import Reading
from generation.fast.native.step import NativeStep
from generation.options import GenerationOptions
from generation.requests import Request
from generation.scheduler import Scheduler
from inference.pages.ending import PageEnd, PageForm
from tests.doctags_pages import KINDS, check, checkpoint, document
from tests.invariants import fast_step
from tests.prompts import tiny_vlm, words

DOCTAGS, MARKDOWN, SIZE = Reading("doctags"), Reading(), (800, 1100)


opened_as = cache(checkpoint)
SLOW = pytest.mark.slow


@pytest.fixture(params=KINDS)
def opened(request):
    return opened_as(request.param)


def encode(opened, text: str) -> list[int]:
    return opened.processor.tokenizer.encode(text, add_special_tokens=False)


def written(opened, form: PageForm, scores) -> tuple[PageEnd, str]:
    """The page of a model with these scores, (V,) of each step, and its text."""
    page = form.constraint()()
    while not page.over:
        now = torch.as_tensor(scores(page), dtype=torch.float32)
        page.close(now)
        page.mask(now)
        chosen = int(now.argmax())
        assert now[chosen] > -torch.inf and page.allows(chosen) and page.forced()[:1] in ([], [chosen])
        page.accept(chosen)
        assert len(page.ids) <= form.limit
    return page, opened.processor.tokenizer.decode(page.ids[:-1])


def ended(form: PageForm, page: PageEnd) -> str:
    return form.ended(SimpleNamespace(token_ids=page.ids))


def read(text: str) -> DoclingDocument:
    return DoclingDocument.load_from_doctags(DocTagsDocument.from_doctags_and_image_pairs([text], None))


@pytest.mark.parametrize("seeds", [range(1), pytest.param(range(1, 12), marks=SLOW)])
def test_what_docling_writes_is_allowed_unchanged(opened, seeds):
    form = PageForm(opened, DOCTAGS, SIZE, 10**5)
    for seed in seeds:
        text = document(seed).export_to_doctags(
            minified=seed % 2 == 0, add_location=seed % 3 > 0, add_table_cell_location=seed % 3 == 1
        )
        page = form.constraint()()
        for number, token_id in enumerate([*encode(opened, text), 0]):
            assert page.allows(token_id), (
                seed,
                text,
                opened.processor.tokenizer.decode(page.ids[-20:]),
                number,
            )
            page.accept(token_id)
        assert ended(form, page) == "whole"


@pytest.mark.parametrize("count", [1, pytest.param(8, marks=SLOW)])
def test_pages_of_random_logits_end_and_parse(opened, count):
    draw, ways = np.random.default_rng(0), set()
    table = encode(opened, "<otsl><fcel>a<ecel><nl><ched>")
    for number in range(count):
        form = PageForm(opened, DOCTAGS, SIZE, int(draw.integers(256, 600)))
        likes = draw.normal(size=opened.vocab_size) * draw.choice([0, 3, 10])
        likes[table] += 8 * (number % 3 == 0)
        likes[0] -= 20 * (number % 2)
        spread = draw.choice([0.3, 1, 5])
        page, text = written(opened, form, lambda _, a=likes, b=spread: a + b * draw.normal(size=len(a)))
        check(text)
        read(text)
        ways.add(ended(form, page))
    assert "cut" in ways


ALWAYS = [
    "a",
    "<",
    "<nl>",
    "<fcel>",
    "<otsl>",
    "<unordered_list><list_item>",
    "<loc_500>",
    "<loc_1>",
    " ",
    "><",
]
ALWAYS += ["<text>", "<picture>", "<code>x < y", "<page_break>", "<ecel>", "</"]
ALWAYS += ["<key_value_region><key_1>"]


@pytest.mark.parametrize("kind", ["some", pytest.param("none", marks=SLOW)])
@pytest.mark.parametrize("wish", ALWAYS)
def test_models_that_want_one_thing(kind, wish):
    opened = opened_as(kind)
    wanted, scores = encode(opened, wish), torch.zeros(opened.vocab_size)
    scores[0] = -9
    form = PageForm(opened, DOCTAGS, SIZE, 300)

    def wishes(page: PageEnd) -> torch.Tensor:
        now = scores.clone()
        now[wanted] += 5
        now[wanted[len(page.ids) % len(wanted)]] += 5
        return now

    page, text = written(opened, form, wishes)
    check(text)
    read(text)
    assert ended(form, page) != "whole"


def test_a_model_that_stops_anywhere_has_closed_its_page(opened):
    text = "<doctag><unordered_list><list_item><loc_1><loc_2><loc_3><loc_4>one"
    form, scores = PageForm(opened, DOCTAGS, SIZE), torch.zeros(opened.vocab_size)
    ids = encode(opened, text)

    def stops(page: PageEnd) -> torch.Tensor:
        now = scores.clone()
        now[ids[len(page.ids)] if len(page.ids) < len(ids) else 0] = 5
        return now

    page, said = written(opened, form, stops)
    assert said == f"{text}</list_item></unordered_list></doctag>" and ended(form, page) == "whole"


ROW = "<fcel>0<fcel>0<nl>"
HTML = "<tr><td>0</td><td>0</td></tr>"
MANY = [  # of what may repeat, and what may not: before it, the unit, how often, the form, how it ends
    ("<doctag><text>Contents ", ".", 200, DOCTAGS, "whole"),
    ("<doctag><text>", ".", 2000, DOCTAGS, "guard"),
    ("<doctag><text>", "the quick brown fox jumps over the lazy dog ", 40, DOCTAGS, "guard"),
    ("<doctag><otsl>" + ROW, ROW, 45, DOCTAGS, "whole"),
    ("<doctag><otsl>" + ROW, ROW, 90, DOCTAGS, "guard"),
    ("<doctag><otsl><fcel>", "x ", 900, DOCTAGS, "guard"),
    ("<doctag>", "<text><loc_1><loc_2><loc_3><loc_4>again</text>\n", 40, DOCTAGS, "guard"),
    ("# A page\n\n", "A label\n12 Street\n\n", 8, MARKDOWN, "whole"),
    ("# A page\n\n", "the same words again and again. ", 200, MARKDOWN, "guard"),
    ("<table>", HTML, 40, MARKDOWN, "whole"),
    ("<table>", HTML, 90, MARKDOWN, "guard"),
]


@pytest.mark.parametrize(("before", "unit", "times", "reading", "how"), MANY)
def test_what_repeats_is_closed(before, unit, times, reading, how):
    opened = opened_as("some")
    form, scores = PageForm(opened, reading, SIZE, 20_000), torch.zeros(opened.vocab_size)
    ids = encode(opened, before) + encode(opened, unit) * times
    place = 0

    def wanted(page: PageEnd) -> torch.Tensor:
        nonlocal place
        now = scores.clone()
        place = place if page.forced() or page.closed else len(page.ids)
        now[ids[place] if not page.closed and place < len(ids) else 0] = 5
        return now

    page, text = written(opened, form, wanted)
    assert (ended(form, page), page.closed) == (how, int(how == "guard"))
    if reading is DOCTAGS:
        check(text)
        read(text)
    elif "<table>" in before and how == "guard":
        assert text.rstrip().endswith("</tr></table>")


def test_limits_follow_from_the_size():
    opened = opened_as("some")
    limits = [PageForm(opened, MARKDOWN, size).limit for size in ((50, 50), (300, 400), (5000, 7000))]
    assert limits == sorted(limits) and limits[0] < limits[1] < limits[2] == 256 + 100 * 16
    assert PageForm(checkpoint("none", context=600), MARKDOWN, (5000, 7000), prompt=100).limit == 500


@pytest.mark.parametrize(
    "sampled", [{}, pytest.param({"temperature": 1.5, "seed": 3, "top_k": 40}, marks=SLOW)]
)
def test_the_same_tokens_on_every_way(sampled):
    """Eager and C, alone and in a batch, forced tokens and looked-up ones together or one by one."""
    opened = opened_as("some")
    vlm = tiny_vlm(vocab_size=opened.vocab_size, max_position_embeddings=900)
    prompts = [torch.tensor(words(seed, 9 + seed)) % 256 + 60 for seed in range(3)]
    answers = []
    for step, slots, lookup in ((None, 1, "off"), (None, 3, "on"), (fast_step(vlm, NativeStep), 2, "auto")):
        forms = [PageForm(opened, DOCTAGS, SIZE, limit) for limit in (130, 160, 200)]
        requests = [
            Request(
                ids,
                options=GenerationOptions(
                    max_new_tokens=form.limit,
                    stop_token_ids=(0,),
                    constraint=form.constraint(),
                    confidence=slots == 2,
                    lookup=lookup,
                    **sampled,
                ),
                key=number,
            )
            for number, (ids, form) in enumerate(zip(prompts, forms, strict=True))
        ]
        done = {one.key: one for one in Scheduler(vlm, slots, step).run(requests)}
        answers.append([done[key].token_ids for key in range(3)])
        for key, form in enumerate(forms):
            assert done[key].error is None and done[key].stop_reason == "stop"
            assert len(done[key].token_ids) <= form.limit and form.ended(done[key]) in (
                "whole",
                "guard",
                "cut",
            )
            check(opened.processor.tokenizer.decode(done[key].token_ids[:-1]))
    assert answers[0] == answers[1] == answers[2]

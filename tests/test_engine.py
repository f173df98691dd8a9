"""`web.engine.Engine`: the tokens of generate.py for everyone, turns, bounds, stop strings, errors alone."""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
from collections.abc import Iterator
from functools import partial

import pytest

from data.errors import ImageError
from data.images import NamedBytes
from generation.options import GenerationOptions
from generation.scheduler import Scheduler
from inference.answer import ask
from inference.answer_text import AnswerText
from inference.checkpoint import RequestError, open_checkpoint
from inference.forms import Forms
from inference.grammar import choice_grammar
from tests.documents import ROOT
from tests.house import data_url
from tests.maps import attention_maps
from tests.servers import FOLDER, message
from tests.waiting import PATIENCE, wait_for
from web import engine as engine_module
from web.engine import Engine, EngineLimits, Interrupted, Lane, QueueFull, Ticket
from web.guard import ApiLimits
from web.media import Media, prompt_of
from web.protocol import ChatRequest
from web.stops import StopText

IMAGES = [(ROOT / "assets" / name).read_bytes() for name in ("example.png", "three.png", "cup.png")]
MANY = 9  # requests at a time
QUESTIONS = ("What colour is the star?", "Describe the picture.", "How many shapes are there?")
MEDIA = Media(ApiLimits())


@pytest.fixture(scope="module")
def checkpoint():
    return open_checkpoint(str(FOLDER), device="cpu", dtype="float32").compiled()


@pytest.fixture
def engine(checkpoint) -> Iterator[Engine]:
    made = Engine(checkpoint, EngineLimits(slots=4, max_queue=100, prefill_chunk=32))
    yield made
    made.close()


def request(question: str = QUESTIONS[0], image: bytes = IMAGES[0], **more) -> Ticket:
    options = GenerationOptions(**{"max_new_tokens": 48, **more.pop("options", {})})
    asked = ChatRequest(model="x", messages=[message(question, data_url(b""))])
    (shown := NamedBytes(image)).name = "image 1"
    return Ticket(partial(prompt_of, asked, MEDIA, [shown], options), options.num_return_sequences, **more)


async def answers(ticket: Ticket) -> list[str]:
    texts = [""] * len(ticket.finish_reasons)
    async for piece in ticket:
        texts[piece.answer] += piece.text
    return texts


@pytest.mark.slow
def test_everyone_gets_what_generate_gives_alone(engine, checkpoint):
    """Many at a time, greedy and sampled, one answer and several, from five clients."""
    rng, cases = random.Random(0), []
    for number in range(MANY):
        options = {} if number % 3 else {"temperature": 1.0, "top_p": 0.9, "seed": number}
        options |= {"num_return_sequences": 1 + number % 3} if options else {}
        cases.append((rng.choice(QUESTIONS), rng.choice(IMAGES), options))

    async def all_at_once() -> list[list[str]]:
        tickets = [
            engine.submit(request(question, image, options=options, client=str(number % 5)))
            for number, (question, image, options) in enumerate(cases)
        ]
        return await asyncio.gather(*map(answers, tickets))

    for (question, image, options), texts in zip(cases, asyncio.run(all_at_once()), strict=True):
        whole = GenerationOptions(max_new_tokens=48, **options)
        assert texts == ask(checkpoint, [image], question, whole).finish()["answers"]
    stats = engine.stats
    assert (stats.requests, stats.waiting, stats.running) == (MANY, 0, 0)
    assert 0 < stats.cached_tokens < stats.prompt_tokens


def test_clients_take_turns():
    """Whoever has many waits for those who have few, whatever the order in which they came."""

    lane, served = Lane("lane", 99, slow=False), ""
    for client in "aaaabcbbaca":
        lane.put(request(client=client))
    while (ticket := lane.next()) is not None:
        served += ticket.client
    assert served == "abcabcabaaa"


@pytest.mark.slow
def test_one_with_many_requests_delays_nobody(checkpoint):
    engine = Engine(checkpoint, EngineLimits(slots=1))
    ended: list[str] = []

    async def ask_as(client: str) -> None:
        await answers(engine.submit(request(client=client, options={"max_new_tokens": 30})))
        ended.append(client)

    async def run() -> None:
        many = [asyncio.create_task(ask_as("many")) for _ in range(20)]
        await asyncio.sleep(0)
        await asyncio.gather(*many, asyncio.create_task(ask_as("few")))

    asyncio.run(run())
    engine.close()
    assert ended.index("few") <= 5  # those whose images were open already come first


def test_who_gives_up_leaves_the_queue_at_once(checkpoint, monkeypatch):
    """Also with a prompt that is ready, while every slot is taken."""
    engine, step, goes_on = Engine(checkpoint, EngineLimits(slots=1)), Scheduler.step, threading.Event()
    monkeypatch.setattr(Scheduler, "step", lambda self: step(self) if goes_on.wait(0.01) else [])

    async def asked() -> list[str]:
        tickets = [engine.submit(request(client=str(number))) for number in range(3)]
        async with asyncio.timeout(PATIENCE):
            while engine.stats.running < 1 or len(engine._ready) < 1:
                await asyncio.sleep(0.01)
            ready = next(iter(engine._ready))  # two may be ready for a moment
            ready.cancel()
            while ready in engine._tickets or len(engine._ready) < 1:
                await asyncio.sleep(0.01)
            goes_on.set()
            (last,) = [one for one in tickets if one.started is None and one is not ready]
            return await answers(last)

    try:
        assert asyncio.run(asked()) == ["blue"]
    finally:
        goes_on.set()
        engine.close()


def test_who_sends_many_new_forms_leaves_places_and_turns_to_others(checkpoint, monkeypatch):
    """Each may take a second, one after the other: a new form of another client waits for one of them, and
    those that are too many are refused instead of filling the queue. The same form again is not one more."""
    engine, go_on, order = Engine(checkpoint, EngineLimits(slots=2, max_queue=40)), threading.Event(), []
    compiled = Forms.constraint

    def constraint(self, grammar: str):
        assert go_on.wait(PATIENCE)
        order.append(grammar)
        return compiled(self, grammar)

    async def asked() -> None:
        forms = [choice_grammar([f"no{number}"]) for number in range(engine_module.SLOW_EACH + 5)]
        many, refused = [], []
        for one in (forms[0], *forms, forms[1]):
            try:
                many.append(engine.submit(request(grammar=one, client="many")))
            except QueueFull:
                refused.append(one)
        other = engine.submit(request(grammar=choice_grammar(["yes"]), client="other"))
        go_on.set()
        told = await asyncio.gather(*map(answers, many), answers(other))
        assert told[-1] == ["yes"] and list(dict.fromkeys(order)).index(choice_grammar(["yes"])) <= 2
        assert 1 <= len(refused) <= 5 and refused == forms[-len(refused) :]

    monkeypatch.setattr(Forms, "constraint", constraint)
    try:
        asyncio.run(asyncio.wait_for(asked(), PATIENCE))
    finally:
        engine.close()


@pytest.mark.slow
def test_a_form_that_takes_long_to_compile_holds_up_other_new_ones_alone(checkpoint, monkeypatch):
    """Two clients send forms that are compiled for ever; who asks without a form, or with one that is known,
    is answered. Who leaves, waiting or not, leaves nothing behind."""
    known, slow = choice_grammar(["yes", "no"]), [choice_grammar([one]) for one in ("slow", "slower")]
    engine, go_on, compiling = Engine(checkpoint, EngineLimits(slots=2)), threading.Event(), threading.Event()
    compiled = Forms.constraint

    def constraint(self, grammar: str):
        if grammar in slow:
            compiling.set()
            assert go_on.wait(PATIENCE)
        return compiled(self, grammar)

    async def asked() -> list[list[str]]:
        first = await answers(engine.submit(request(grammar=known)))
        held = [engine.submit(request(grammar=one, client=one)) for one in slow for _ in range(8)]
        await asyncio.to_thread(compiling.wait, PATIENCE)
        asking = [request(client="b", grammar=grammar) for grammar in (None, known)]
        told = [await answers(engine.submit(one)) for one in asking]
        assert told[1] == first and first[0] in ("yes", "no")
        for ticket in held[1:]:
            ticket.cancel()
        go_on.set()
        return [told[0], await answers(held[0])]

    monkeypatch.setattr(Forms, "constraint", constraint)
    try:
        plain, last = asyncio.run(asyncio.wait_for(asked(), PATIENCE))
        assert plain == ask(checkpoint, [IMAGES[0]], QUESTIONS[0], GenerationOptions()).finish()["answers"]
        assert last == ["slow"]
        assert wait_for(lambda: not engine._tickets and engine.stats.waiting == 0)
    finally:
        engine.close()


def test_the_queue_is_bounded(checkpoint):
    engine = Engine(checkpoint, EngineLimits(slots=1, max_queue=4))
    long = {"max_new_tokens": 400, "temperature": 1.5, "seed": 1}

    async def run() -> None:
        tickets = [engine.submit(request(QUESTIONS[1], options=long)) for _ in range(3)]
        with pytest.raises(QueueFull) as full:
            engine.submit(request())
        assert 1 <= full.value.retry_after <= 60
        # One client has half of it; the rest is for others.
        tickets += [engine.submit(request(client=name)) for name in ("second", "third")]
        with pytest.raises(QueueFull):
            engine.submit(request(client="fourth"))
        for ticket in tickets:
            ticket.cancel()
        while engine.stats.running or engine.stats.waiting:
            await asyncio.sleep(0.01)
        assert await answers(engine.submit(request()))

    asyncio.run(run())
    with pytest.raises(RequestError, match="at most 1"):
        asyncio.run(_submit(engine, request(options={"num_return_sequences": 2, "temperature": 1.0})))
    engine.close()


async def _submit(engine: Engine, asked: Ticket) -> Ticket:
    return engine.submit(asked)


def test_who_leaves_frees_the_slot_and_gets_nothing_more(engine):
    async def run() -> None:
        ticket = engine.submit(request(QUESTIONS[1], options={"max_new_tokens": 40}))
        async for _ in ticket:
            break
        ticket.cancel()
        while engine.stats.running:
            await asyncio.sleep(0.005)
        assert await answers(engine.submit(request())) == ["blue"]

    asyncio.run(run())


@pytest.mark.slow
def test_errors_reach_whom_they_belong_to(engine, monkeypatch):
    """A broken image, a prompt that does not fit, a fault in a step: the others are answered."""

    async def run() -> list:
        asked = [
            request(),
            request(image=b"no image"),
            request("word " * 3000),
            request(),
        ]
        tickets = [engine.submit(one) for one in asked]
        return await asyncio.gather(*map(answers, tickets), return_exceptions=True)

    first, broken, long, last = asyncio.run(run())
    assert first == last == ["blue"]
    assert isinstance(broken, ImageError) and isinstance(long, RequestError)

    def fails(self):
        raise RuntimeError("a fault")

    with monkeypatch.context() as patch:
        patch.setattr(Scheduler, "step", fails)
        with pytest.raises(Interrupted):
            asyncio.run(_answers_of(engine))
    assert asyncio.run(_answers_of(engine)) == ["blue"]


def test_what_follows_an_answer_takes_turns_ends_when_left_and_fails_alone(checkpoint):
    engine, began, closed = Engine(checkpoint, EngineLimits(slots=2)), asyncio.Event(), []

    def counts(checkpoint, ids):
        yield checkpoint.processor.tokenizer.decode(ids, skip_special_tokens=True).strip()
        yield from range(3)

    def endless(checkpoint, ids):
        try:
            while True:
                yield "more"
        finally:
            closed.append(threading.current_thread().name)

    def broken(checkpoint, ids):
        yield 1
        raise ValueError("mine")

    async def made(then) -> list:
        found = []
        async for piece in engine.submit(request(then=then)):
            found += [] if piece.made is None else [piece.made]
            if len(found) > 5:
                began.set()
        return found

    async def run() -> None:
        leaving = asyncio.create_task(made(endless))
        await began.wait()
        assert await made(counts) == ["blue", 0, 1, 2]
        assert await answers(engine.submit(request(QUESTIONS[2]))) == ["5"]
        with pytest.raises(ValueError, match="mine"):
            await made(broken)
        leaving.cancel()
        while engine.stats.running:
            await asyncio.sleep(0.005)

    asyncio.run(run())
    assert closed == ["model"]
    engine.close()


def test_maps_of_an_answer_are_made_from_what_the_slots_encoded(engine, monkeypatch):
    """A photograph's tiles are nearly all of what a map costs, and nobody else is answered meanwhile."""
    seen: list[int] = []
    model = engine.checkpoint.model
    encode_images = model.encode_images
    monkeypatch.setattr(model, "encode_images", lambda t, *a: seen.append(len(t)) or encode_images(t, *a))

    def then(checkpoint, ids):
        before = sum(seen)
        attention_maps(checkpoint, [IMAGES[0]], QUESTIONS[0], ids)
        yield before > 0, sum(seen) - before

    async def made() -> list:
        return [piece.made async for piece in engine.submit(request(then=then)) if piece.made is not None]

    engine.checkpoint.features.clear()
    assert asyncio.run(made()) == [(True, 0)]


async def _answers_of(engine: Engine, **more) -> list[str]:
    return await answers(engine.submit(request(**more)))


@pytest.mark.slow
def test_nothing_of_a_stop_string_is_shown(checkpoint):
    """Whatever the tokens are that it begins and ends in, and however often its beginning comes before."""
    reply = ask(checkpoint, [IMAGES[0]], QUESTIONS[1], GenerationOptions(max_new_tokens=64))
    ids = reply.finish()["token_ids"][0]
    plain = AnswerText(checkpoint, GenerationOptions())
    text = "".join(map(plain.put, ids)) + plain.finish()
    rng = random.Random(0)
    for _ in range(100):
        first = rng.randrange(len(text))
        stop = text[first : first + rng.randint(1, 12)]
        stops = (stop, rng.choice((stop + "?", "xyz", text[-3:] + "!")))
        shown, got, told = StopText(checkpoint, GenerationOptions(), stops), "", list[int]()
        groups, rest = [], list(ids)
        while rest:
            count = rng.randint(1, 4)
            groups.append(rest[:count])
            rest = rest[count:]
        for group in groups:
            piece = shown.put(group)
            got, told = got + piece.text, told + list(piece.token_ids)
            assert text[: text.index(stop)].startswith(got)
            if shown.stopped:
                break
        else:
            piece = shown.put([], last=True)
            got, told = got + piece.text, told + list(piece.token_ids)
        assert shown.stopped and got == text[: text.index(stop)]
        assert told == ids[: len(told)]  # and no token that came after the text
        whole = AnswerText(checkpoint, GenerationOptions())
        lengths = [0, *itertools.accumulate(len(whole.put(token)) for token in told)]
        assert lengths[-1] >= len(got) and lengths[-2 if told else 0] <= max(0, len(got) - 1)


def test_a_folder_that_cannot_be_used_is_told_at_the_start(checkpoint, tmp_path):
    tmp_path.chmod(0o777)
    with pytest.raises(RequestError):
        Engine(checkpoint, EngineLimits(prefix_folder=tmp_path))


def test_what_a_long_request_took_is_given_back_when_nobody_asks(checkpoint, monkeypatch):
    monkeypatch.setattr(engine_module, "REST_AFTER", 0.05)
    engine = Engine(checkpoint, EngineLimits(slots=2))
    try:
        asyncio.run(_answers_of(engine))
        assert wait_for(lambda: engine._scheduler.kv_cache_bytes == 0)
    finally:
        engine.close()


def test_at_its_end_everybody_is_told(checkpoint):
    engine = Engine(checkpoint, EngineLimits(slots=1))

    async def run() -> list:
        tickets = [engine.submit(request(QUESTIONS[1])) for _ in range(4)]
        tasks = [asyncio.create_task(answers(ticket)) for ticket in tickets]
        await asyncio.sleep(0)
        await asyncio.to_thread(engine.close)
        return await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)

    ended = asyncio.run(run())
    assert all(isinstance(one, list | Interrupted) for one in ended)
    assert any(isinstance(one, Interrupted) for one in ended)
    with pytest.raises(QueueFull):
        asyncio.run(_submit(engine, request()))


def test_what_is_kept_in_a_folder_outlives_the_engine(checkpoint, tmp_path):
    limits = EngineLimits(slots=2, prefix_folder=tmp_path / "kept")

    async def cached(engine: Engine) -> int:
        ticket = engine.submit(request())
        assert await answers(ticket) == ["blue"]
        return ticket.cached_tokens

    for least in (0, 50):
        checkpoint.features.clear()
        engine = Engine(checkpoint, limits)
        try:
            assert asyncio.run(cached(engine)) >= least
        finally:
            engine.close()


def test_a_library_s_panic_reaches_who_waits(engine):
    class Panic(BaseException):
        """As libraries in Rust raise where they meet what they did not expect."""

    def panics(checkpoint):
        raise Panic

    with pytest.raises(Interrupted):
        asyncio.run(asyncio.wait_for(_ask(engine, Ticket(panics)), PATIENCE))
    assert asyncio.run(_answers_of(engine)) == ["blue"] and engine.stats.waiting == 0


async def _ask(engine: Engine, ticket: Ticket) -> list[str]:
    return await answers(engine.submit(ticket))

"""`web.engine.Engine`: the tokens of generate.py for everyone, turns, bounds, stop strings, errors alone."""

from __future__ import annotations

import asyncio
import copy
import itertools
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest

from data.conversation import Message
from data.errors import ImageError
from generation import kv_cache as kv
from generation.options import GenerationOptions
from generation.scheduler import Scheduler
from inference.answer import ask, text_of
from inference.attribution.attention import attention_maps
from inference.checkpoint import RequestError, open_checkpoint
from inference.constraint import Constraints
from inference.forms import Forms, Latest
from inference.grammar import choice_grammar, pattern_grammar
from inference.prefix_files import PrefixFolder
from tests.documents import ROOT
from tests.waiting import PATIENCE, wait_for
from web import engine as engine_module
from web.engine import (
    Engine,
    EngineLimits,
    EngineRequest,
    Interrupted,
    Prepared,
    QueueFull,
    Ticket,
    _Queue,
    _Text,
    prepare_messages,
)
from web.models import Models

FOLDER = str(ROOT / "checkpoints/ocelli-shapes")
IMAGES = [(ROOT / "assets" / name).read_bytes() for name in ("example.png", "three.png", "cup.png")]
MANY = 9  # requests at a time
QUESTIONS = ("What colour is the star?", "Describe the picture.", "How many shapes are there?")


@pytest.fixture(scope="module")
def checkpoint():
    return open_checkpoint(FOLDER, device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def models() -> Models:
    return Models([FOLDER], device="cpu", dtype="float32")


@pytest.fixture
def engine(models) -> Iterator[Engine]:
    made = Engine(models, EngineLimits(slots=4, max_queue=100, prefill_chunk=32))
    yield made
    made.close()


def request(question: str = QUESTIONS[0], image: bytes = IMAGES[0], then=None, **more) -> EngineRequest:
    options = GenerationOptions(**{"max_new_tokens": 48, **more.pop("options", {})})
    message = Message("user", (("image", image), ("text", question)))

    def prepare(checkpoint) -> Prepared:
        prepared = prepare_messages([message], options, checkpoint)
        return prepared if then is None else prepared._replace(then=partial(then, checkpoint))

    return EngineRequest(FOLDER, prepare, options.num_return_sequences, **more)


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

    class Asked:
        def __init__(self, client: str):
            self.request = type("R", (), {"client": client})

    queue = _Queue()
    for client in "aaaabcbbaca":
        queue.put(Asked(client))  # type: ignore[arg-type]
    order = [one.request.client for one in queue]
    served = []
    while (ticket := queue.get()) is not None:
        served.append(ticket.request.client)
    assert "".join(served) == "".join(order) == "abcabcabaaa"


@pytest.mark.slow
def test_one_with_many_requests_delays_nobody(models):
    engine = Engine(models, EngineLimits(slots=1))
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


class Panic(BaseException):
    """As libraries in Rust raise where they meet what they did not expect."""


class Doors(Models):
    """The embedded model by other names, of which those that are called shut do not open so far."""

    def __init__(self, checkpoint, *names: str):
        super().__init__(names)
        self.checkpoint, self.gate, self.tried = checkpoint, threading.Event(), list[str]()

    def _load(self, name: str):
        self.tried.append(name)
        if "shut" in name:
            assert self.gate.wait(PATIENCE)
        if "broken" in name:
            raise RequestError("this one never opens")
        if "panics" in name:
            raise Panic
        return replace(self.checkpoint, model=copy.copy(self.checkpoint.model))


@pytest.mark.slow
def test_a_model_that_opens_holds_no_question_to_another(checkpoint):
    """However many wait for it; one that is to be opened as well is opened meanwhile."""
    models = Doors(checkpoint, "near", "shut", "later", "shut and broken")
    engine = Engine(models, EngineLimits(slots=2, max_queue=12))

    async def asked() -> None:
        waiting = [engine.submit(replace(request(), model="shut")) for _ in range(8)]
        with pytest.raises(QueueFull):
            engine.submit(replace(request(), model="shut"))
        broken = engine.submit(replace(request(), model="shut and broken"))
        form = choice_grammar(["blue", "red"])
        async with asyncio.timeout(PATIENCE):
            for name in ("near", "later", "near"):
                for grammar in (None, form):
                    ticket = engine.submit(replace(request(), model=name, grammar=grammar))
                    assert await answers(ticket) == ["blue"]
            waiting[3].cancel()
            assert [one.first_token_seconds for one in (*waiting, broken)] == [None] * 9
            assert models.tried.count("shut") == 1 and engine.stats.waiting == 8
            models.gate.set()
            assert [await answers(one) for one in waiting] == [["blue"] if n != 3 else [""] for n in range(8)]
            with pytest.raises(RequestError):
                await answers(broken)

    asyncio.run(asked())
    engine.close()
    assert engine.stats.waiting == engine.stats.running == 0


def test_a_library_s_panic_as_a_model_opens_reaches_who_waits(checkpoint):
    engine = Engine(Doors(checkpoint, "shut", "panics"), EngineLimits())

    async def asked() -> None:
        for _ in range(2):  # and the next one tries again
            with pytest.raises(Interrupted):
                await asyncio.wait_for(answers(engine.submit(replace(request(), model="panics"))), PATIENCE)

    try:
        asyncio.run(asked())
        assert engine.stats.waiting == 0
    finally:
        engine.close()


@pytest.mark.slow
def test_a_busy_model_holds_no_question_to_another(checkpoint, monkeypatch):
    models, step, goes_on = Doors(checkpoint, "busy", "idle"), Scheduler.step, threading.Event()
    engine, busy = Engine(models, EngineLimits(slots=1)), models.open("busy").model
    monkeypatch.setattr(
        Scheduler, "step", lambda self: step(self) if self.model is not busy or goes_on.wait(0.01) else []
    )

    async def asked() -> None:
        waiting = [engine.submit(replace(request(), model="busy")) for _ in range(6)]
        async with asyncio.timeout(PATIENCE):
            assert await answers(engine.submit(replace(request(), model="idle"))) == ["blue"]
            goes_on.set()
            assert [await answers(one) for one in waiting] == [["blue"]] * 6

    try:
        asyncio.run(asked())
    finally:
        goes_on.set()
        engine.close()


def test_who_waits_for_a_model_is_told_when_the_server_ends(checkpoint):
    models = Doors(checkpoint, "shut")
    engine = Engine(models, EngineLimits())

    async def asked() -> None:
        ticket = engine.submit(replace(request(), model="shut"))
        page, gone = (asyncio.wrap_future(engine.open("shut")) for _ in range(2))
        gone.cancel()
        await asyncio.sleep(0)
        assert not page.done()  # one who goes does not take the model from the others
        engine.close()
        for waiter in (answers(ticket), page):
            with pytest.raises(Interrupted):
                await asyncio.wait_for(waiter, PATIENCE)

    asyncio.run(asked())
    models.gate.set()


def test_who_gives_up_leaves_the_queue_at_once(models, monkeypatch):
    """Also with a prompt that is ready, while every slot is taken."""
    engine, step, goes_on = Engine(models, EngineLimits(slots=1)), Scheduler.step, threading.Event()
    monkeypatch.setattr(Scheduler, "step", lambda self: step(self) if goes_on.wait(0.01) else [])

    async def asked() -> list[str]:
        tickets = [engine.submit(request(client=str(number))) for number in range(3)]
        async with asyncio.timeout(PATIENCE):
            while sorted(one.place for one in tickets) != [0, 1, 2] or len(engine._ready) < 2:
                await asyncio.sleep(0.01)
            _, second, third = sorted(tickets, key=lambda one: one.place)
            second.cancel()
            while third.place != 1:
                await asyncio.sleep(0.01)
            goes_on.set()
            return await answers(third)

    try:
        assert asyncio.run(asked()) == ["blue"]
    finally:
        goes_on.set()
        engine.close()


def test_who_sends_many_new_forms_leaves_places_and_turns_to_others(models, checkpoint, monkeypatch):
    """Each may take a second, one after the other: a new form of another client waits for one of them, and
    those that are too many are refused instead of filling the queue. The same form again is not one more."""
    engine, go_on, order = Engine(models, EngineLimits(slots=2, max_queue=40)), threading.Event(), []
    compiled = Forms.constraint

    def constraint(self, grammar: str):
        assert go_on.wait(PATIENCE)
        order.append(grammar)
        return compiled(self, grammar)

    async def asked() -> None:
        forms = [choice_grammar([f"no{number}"]) for number in range(engine_module.SLOW_EACH + 5)]
        many = [engine.submit(request(grammar=one, client="many")) for one in (forms[0], *forms, forms[1])]
        other = engine.submit(request(grammar=choice_grammar(["yes"]), client="other"))
        go_on.set()
        told = await asyncio.gather(*map(answers, many), answers(other), return_exceptions=True)
        refused = [isinstance(one, QueueFull) for one in told]
        assert told[-1] == ["yes"] and list(dict.fromkeys(order)).index(choice_grammar(["yes"])) <= 2
        assert 1 <= sum(refused) <= 5 and not any(refused[: engine_module.SLOW_EACH]) and not refused[-2]

    monkeypatch.setattr(Forms, "constraint", constraint)
    try:
        asyncio.run(asyncio.wait_for(asked(), PATIENCE))
    finally:
        engine.close()


@pytest.mark.slow
def test_a_form_that_takes_long_to_compile_holds_up_other_new_ones_alone(models, checkpoint, monkeypatch):
    """Two clients send forms that are compiled for ever; who asks without a form, or with one that is known,
    is answered. Who leaves, waiting or not, leaves nothing behind."""
    known, slow = choice_grammar(["yes", "no"]), [choice_grammar([one]) for one in ("slow", "slower")]
    engine, go_on, compiling = Engine(models, EngineLimits(slots=2)), threading.Event(), threading.Event()
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


@pytest.mark.slow
def test_a_form_whose_compiled_one_has_gone_holds_nobody_up(models, monkeypatch):
    """It is compiled again where new ones are, not where all others' prompts are made."""
    compiled, threads, asked = Constraints._compile, [], [pattern_grammar(one) for one in ("first", "second")]

    def compile_there(self, grammar: str):
        threads.append(threading.current_thread().name)
        return compiled(self, grammar)

    def put_alone(self, *kept):
        self._kept.clear()
        put(self, *kept)

    put = Latest.put
    monkeypatch.setattr(Latest, "put", put_alone)
    monkeypatch.setattr(Constraints, "_compile", compile_there)
    engine = Engine(models, EngineLimits(slots=2))
    try:
        for grammar, text in zip(asked * 2, ("first", "second") * 2, strict=True):
            for _ in range(2):
                assert asyncio.run(_answers_of(engine, grammar=grammar)) == [text]
        assert len(threads) == 4 and all("forms" in name for name in threads)
    finally:
        engine.close()


def test_the_queue_is_bounded_and_says_places(models):
    engine = Engine(models, EngineLimits(slots=1, max_queue=4))
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
        assert sorted(ticket.place for ticket in tickets)[0] <= 1
        for ticket in tickets:
            ticket.cancel()
        while engine.stats.running or engine.stats.waiting:
            await asyncio.sleep(0.01)
        assert await answers(engine.submit(request()))

    asyncio.run(run())
    with pytest.raises(RequestError, match="at most 1"):
        asyncio.run(_submit(engine, request(options={"num_return_sequences": 2, "temperature": 1.0})))
    engine.close()


async def _submit(engine: Engine, asked: EngineRequest) -> Ticket:
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


def test_who_leaves_as_the_prompt_is_ready_stops_nobody_else(engine):
    class Lock:
        """The engine's own. As the first ticket stands there as ready, its client leaves."""

        def __init__(self):
            self.own, self.left = engine._lock, False

        def __enter__(self):
            self.own.acquire()

        def __exit__(self, *_):
            ready = [] if self.left else list(engine._ready)
            self.left = self.left or bool(ready)
            self.own.release()
            for ticket in ready:
                ticket.cancelled = True  # the first that `cancel` does

    async def run() -> None:
        engine._lock = Lock()
        assert await asyncio.wait_for(answers(engine.submit(request(QUESTIONS[1]))), PATIENCE) == [""]
        assert await asyncio.wait_for(answers(engine.submit(request())), PATIENCE) == ["blue"]
        assert (engine.stats.waiting, engine.stats.running) == (0, 0)

    asyncio.run(run())


def test_who_leaves_one_of_two_models_frees_the_slot_there(model_folder, photo):
    names = [FOLDER, str(model_folder)]
    engine = Engine(Models(names, device="cpu"), EngineLimits(slots=1))
    message = Message("user", (("image", photo.read_bytes()), ("text", "how many?")))
    options = GenerationOptions(max_new_tokens=300, temperature=1.0, seed=1)

    async def run() -> None:
        assert await _answers_of(engine) == ["blue"]
        ticket = engine.submit(EngineRequest(names[1], partial(prepare_messages, [message], options)))
        async for _ in ticket:
            break
        while engine.stats.running:
            await asyncio.sleep(0.005)

    asyncio.run(run())
    cancelled = [scheduler.stats.cancelled for _, scheduler in engine._schedulers.values()]
    engine.close()
    assert cancelled == [0, 1]


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


def test_what_follows_an_answer_takes_turns_ends_when_left_and_fails_alone(models):
    engine, began, closed = Engine(models, EngineLimits(slots=2)), asyncio.Event(), []

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
    assert closed == ["models"]
    engine.close()


def test_what_follows_answers_holds_no_question_up(models):
    """It takes no slot: however many follow theirs for long, and more wait to, who just asks is answered."""
    engine, begun = Engine(models, EngineLimits(slots=2, max_queue=20)), []

    def endless(checkpoint, ids):
        begun.append(ids)
        while True:
            time.sleep(0.001)
            yield "more"

    async def run() -> None:
        followed = [engine.submit(request(then=endless, client=str(number))) for number in range(7)]
        async with asyncio.timeout(PATIENCE):
            while len(begun) < 2:
                await asyncio.sleep(0.005)
            assert await answers(engine.submit(request())) == ["blue"]
            assert len(begun) == 2  # the others wait: each takes turns of the models' thread
        for ticket in followed:
            ticket.cancel()
        while engine.stats.running or engine.stats.waiting:
            await asyncio.sleep(0.005)

    try:
        asyncio.run(run())
    finally:
        engine.close()


def test_maps_of_an_answer_are_made_from_what_the_slots_encoded(engine, models, monkeypatch):
    """A photograph's tiles are nearly all of what a map costs, and nobody else is answered meanwhile."""
    seen: list[int] = []
    model = models.open(FOLDER).model
    encode_images = model.encode_images
    monkeypatch.setattr(model, "encode_images", lambda t, *a: seen.append(len(t)) or encode_images(t, *a))

    def then(checkpoint, ids):
        before = sum(seen)
        attention_maps(checkpoint, [IMAGES[0]], QUESTIONS[0], ids)
        yield before > 0, sum(seen) - before

    async def made() -> list:
        return [piece.made async for piece in engine.submit(request(then=then)) if piece.made is not None]

    models.open(FOLDER).features.clear()
    assert asyncio.run(made()) == [(True, 0)]


async def _answers_of(engine: Engine, **more) -> list[str]:
    return await answers(engine.submit(request(**more)))


@pytest.mark.slow
def test_nothing_of_a_stop_string_is_shown(checkpoint):
    """Whatever the tokens are that it begins and ends in, and however often its beginning comes before."""
    reply = ask(checkpoint, [IMAGES[0]], QUESTIONS[1], GenerationOptions(max_new_tokens=64))
    ids = reply.finish()["token_ids"][0]
    plain = text_of(checkpoint)
    text = "".join(map(plain.put, ids)) + plain.finish()
    rng = random.Random(0)
    for _ in range(100):
        first = rng.randrange(len(text))
        stop = text[first : first + rng.randint(1, 12)]
        stops = (stop, rng.choice((stop + "?", "xyz", text[-3:] + "!")))
        shown, got, told = _Text(checkpoint, GenerationOptions(), stops), "", list[int]()
        groups, rest = [], list(ids)
        while rest:
            count = rng.randint(1, 4)
            groups.append(rest[:count])
            rest = rest[count:]
        for group in groups:
            piece = shown.put(0, group)
            got, told = got + piece.text, told + piece.token_ids
            assert text[: text.index(stop)].startswith(got)
            if shown.stopped:
                break
        else:
            piece = shown.put(0, [], last=True)
            got, told = got + piece.text, told + piece.token_ids
        assert shown.stopped and got == text[: text.index(stop)]
        assert told == ids[: len(told)]  # and no token that came after the text
        whole = text_of(checkpoint)
        lengths = [0, *itertools.accumulate(len(whole.put(token)) for token in told)]
        assert lengths[-1] >= len(got) and lengths[-2 if told else 0] <= max(0, len(got) - 1)


@pytest.mark.slow
def test_hashing_weights_and_closing_a_folder_hold_nobody_up(models, tmp_path, monkeypatch):
    """The first questions are answered without kept prefixes, the later ones with them; a guest that leaves
    has its folder closed beside the models' thread, and what was to be kept is written at the end."""
    open_now, close_now, closed = threading.Event(), threading.Event(), []
    with_prefixes, close = engine_module.with_prefixes, PrefixFolder.close

    def opened(*given):
        assert open_now.wait(PATIENCE)
        return with_prefixes(*given)

    def closing(self):
        assert close_now.wait(PATIENCE)
        close(self)
        closed.append(self)

    monkeypatch.setattr(engine_module, "with_prefixes", opened)
    monkeypatch.setattr(engine_module, "STORE_WAIT", 0.01)
    monkeypatch.setattr(PrefixFolder, "close", closing)
    holds = models.holds
    engine = Engine(models, EngineLimits(slots=2, prefix_folder=tmp_path / "kept"))

    async def cached() -> int:
        ticket = engine.submit(request())
        await answers(ticket)
        return ticket.cached_tokens

    assert asyncio.run(cached()) == 0
    open_now.set()
    assert wait_for(lambda: engine._stores.of(models.held(FOLDER)) is not None)
    assert asyncio.run(cached()) > 0
    monkeypatch.setattr(models, "holds", lambda checkpoint: False)
    models.closed(models.held(FOLDER))
    assert wait_for(lambda: not engine._schedulers)
    assert asyncio.run(cached()) == 0 and not closed
    monkeypatch.setattr(models, "holds", holds)
    close_now.set()
    engine.close()
    assert closed and list((tmp_path / "kept").glob("*.safetensors"))


@pytest.mark.slow
def test_a_model_whose_prefixes_are_being_hashed_holds_no_question_to_another(checkpoint, monkeypatch):
    models, go_on = Doors(checkpoint, "near", "hashed"), threading.Event()
    with_prefixes = engine_module.with_prefixes

    def opened(checkpoint, *given):
        assert checkpoint is not models.held("hashed") or go_on.wait(PATIENCE)
        return with_prefixes(checkpoint, *given)

    monkeypatch.setattr(engine_module, "with_prefixes", opened)
    monkeypatch.setattr(engine_module, "STORE_WAIT", PATIENCE)
    models.open("near")
    engine = Engine(models, EngineLimits(slots=2))

    async def asked() -> None:
        waiting = [engine.submit(replace(request(), model="hashed")) for _ in range(4)]
        async with asyncio.timeout(PATIENCE / 2):
            for _ in range(2):
                assert await answers(engine.submit(replace(request(), model="near"))) == ["blue"]
            go_on.set()
            assert [await answers(one) for one in waiting] == [["blue"]] * 4

    try:
        asyncio.run(asked())
    finally:
        go_on.set()
        engine.close()


def test_a_folder_that_cannot_be_used_is_told_at_the_start(models, tmp_path):
    tmp_path.chmod(0o777)
    with pytest.raises(RequestError):
        Engine(models, EngineLimits(prefix_folder=tmp_path))


def test_what_a_long_request_took_is_given_back_when_nobody_asks(models, monkeypatch):
    monkeypatch.setattr(engine_module, "REST_AFTER", 0.05)
    monkeypatch.setattr(kv, "STEP", 16)
    engine = Engine(models, EngineLimits(slots=2))
    try:
        asyncio.run(_answers_of(engine))
        ((_, scheduler),) = engine._schedulers.values()
        assert wait_for(lambda: scheduler._cache.capacity == scheduler.budget.positions == 16)
    finally:
        engine.close()


def test_at_its_end_everybody_is_told(models):
    engine = Engine(models, EngineLimits(slots=1))

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

"""How long one user waits: tokens a second, the first word, and both beside busy processes.

    python -m benchmarks.latency decode                             # SmolVLM-256M's shape on this CPU
    python -m benchmarks.latency decode --batch 1,8,16 --contexts "" --systems ours-fast,llama.cpp
    python -m benchmarks.latency decode --device cuda --precisions bfloat16 --contexts 2000,8000
    python -m benchmarks.latency first-token                        # 1 and 17 tiles
    python -m benchmarks.latency load                               # beside busy processes, and in quotas
    python -m benchmarks.latency picture benchmarks/results/decode-cpu-zen4.json assets/decode.svg

llama.cpp and OpenVINO take part if requirements-bench.txt is installed. --quick shows whether it runs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.common import (
    PRECISIONS,
    SHAPES,
    Command,
    Handler,
    Unavailable,
    build_ours,
    compare,
    execute,
    finish,
    integers,
    median,
    memory_peak,
    names,
    option,
    precisions_of,
    prompt_tokens,
    reset_peak,
    shared_setup,
    take_turns,
    tile_pixels,
)
from benchmarks.peers import (
    LlamaCpp,
    OpenVINO,
    Ours,
    OursOfFile,
    Transformers,
    cache_bytes,
    read_bandwidth,
)
from generation.processors import limit_threads
from inference.flags import positive

PLAIN = ("ours-eager", "ours-no-cache", "transformers", "transformers-static")
LLAMA_CPP = tuple(f"llama.cpp{kind}{flash}" for kind in ("", "-k") for flash in ("", "-flash"))
FLOATS = ("float32", "bfloat16")
# Systems without weights of a precision.
LACKING = {**dict.fromkeys(FLOATS, ("ours-file",)), "int8": PLAIN, "int4": (*PLAIN, "openvino")}


def setups_of(settings: argparse.Namespace, folder: str, longest: int) -> list[dict]:
    """One for each child: each system in each precision that it has; llama.cpp gets `longest` positions."""
    shared = shared_setup(settings) | {"folder": folder, "longest": longest}
    return [
        {"system": system, "precision": precision, **shared}
        for precision in settings.precisions
        for system in settings.systems
        if system not in LACKING.get(precision, ())
        if precision == "int4" or "-k" not in system
    ]


# -------------------------------------------------------------------------------------------- decoding
DECODERS: dict[str, Any] = {
    **dict.fromkeys(("ours-fast", "ours-eager", "ours-no-cache"), Ours),
    "ours-file": OursOfFile,
    **dict.fromkeys(("transformers", "transformers-static"), Transformers),
    **dict.fromkeys(LLAMA_CPP, LlamaCpp),
}
BUFFER = {"cpu": 2**29, "cuda": 2**32}  # bytes that the bandwidth is measured over
DECODE_COLUMNS = """system precision context:, batch decode_tokens_per_second:.1f ms_per_token:.2f
    floor_fraction:.0% peak_mebibytes:,.0f over_transformers:.2f over_transformers_static:.2f
    over_llama_cpp:.2f over_llama_cpp_flash:.2f over_llama_cpp_k:.2f over_llama_cpp_k_flash:.2f"""
DECODE_PEERS = ("transformers", "transformers-static", *LLAMA_CPP)


def check_decode(settings: argparse.Namespace) -> None:
    if settings.quick:
        settings.rounds, settings.tokens, settings.contexts = 1, 16, []
        settings.prompts = settings.prompts[:1]
    settings.precisions = precisions_of(settings)
    if not settings.batch or min(settings.batch) < 1:
        raise ValueError(f"--batch: expected numbers of rows, 1 or more, got {settings.batch}")
    if not settings.systems:  # what PyTorch compiles pays on a GPU; nothing kept takes minutes
        left_out = {"ours-no-cache"} if settings.quick else set()
        left_out |= {"transformers-static"} if settings.device == "cpu" else set()
        settings.systems = [name for name in DECODERS if name not in left_out]
    limit = SHAPES[settings.shape].text.max_position_embeddings
    longest = max(context for _, context in points_of(settings)) + settings.tokens + 8
    if longest > limit:
        raise ValueError(f"--contexts: {longest} positions are needed, the shape has {limit}")


def points_of(settings: argparse.Namespace) -> list[tuple[int, int]]:
    """(tiles of the prompt, context decoded at): every prompt, the longest one for longer contexts."""
    tokens = {tiles: prompt_tokens(settings.shape, tiles) for tiles in settings.prompts}
    points = list(tokens.items())
    for context in settings.contexts:
        fitting = [tiles for tiles in settings.prompts if tokens[tiles] <= context]
        if fitting and (max(fitting), context) not in points:
            points.append((max(fitting), context))
    return points


def decode(settings: argparse.Namespace, folder: str) -> None:
    """Decode speed against the memory's, against transformers and against llama.cpp.

    At batch 1 a decode step reads every weight and the whole cache once. The floor of its time is those bytes
    at the speed at which this machine reads, measured beside it in several ways of which the fastest counts.
    Prompts have one image of 1 or 17 tiles.
    """
    points = points_of(settings)
    setups = setups_of(settings, folder, max(context for _, context in points) + settings.tokens + 8)
    for setup in setups:
        setup["environment"] = {"OCELLI_CACHE": folder}  # so that compiling is measured
    # Few rows first: what many leave in the allocator would count as memory of few.
    jobs = [
        {"tokens": settings.tokens, "batch": batch, "tiles": tiles, "context": context}
        for batch in sorted(settings.batch)
        for tiles, context in points
    ]
    bandwidth = {"system": "bandwidth", "precision": None, **shared_setup(settings)}
    measured, failed = take_turns(
        decode_handler, [bandwidth, *setups], lambda setup: jobs, settings.rounds, needed=["bandwidth"]
    )
    readings = {  # of each job, by way of reading
        str(job): {way: median(reply[way] for reply in replies) for way in replies[0]}
        for setup, job, replies in measured
        if setup is bandwidth
    }
    reading = readings[str(jobs[0])]
    by_way = ", ".join(f"{way} {speed / 1e9:.1f}" for way, speed in reading.items())
    print(f"{settings.shape} on {settings.device}: GB/s read beside the first context: {by_way}")
    rows = [decode_row(*one, readings[str(one.job)]) for one in measured if one.setup is not bandwidth]
    compare(rows, "decode_tokens_per_second", ("precision", "tiles", "context", "batch"), DECODE_PEERS)
    fastest = max(reading.values())
    finish("decode", settings, DECODE_COLUMNS, rows, read_bytes_per_second=fastest, left_out=failed)


def decode_handler(setup: dict) -> Handler:
    """The child's side: answers jobs with one system, and with the memory that they took."""
    torch.set_num_threads(setup["threads"])
    device = setup["device"]
    if setup["system"] == "bandwidth":
        size = 2**23 if setup["shape"] == "tiny" else BUFFER[device]
        return lambda job: read_bandwidth(device, size)
    system = DECODERS[setup["system"]](setup)

    def handle(job: dict) -> dict | None:
        if setup["system"] == "ours-no-cache" and job["round"]:  # slow: one round says enough
            return None
        reset_peak(device)
        reply = system.decode(job["context"], job["tokens"], job["batch"], job["tiles"])
        if reply is None:
            return None
        positions = job["batch"] * (job["context"] + job["tokens"] // 2)
        reply |= {"cache_bytes": positions * cache_bytes(setup["shape"], system.cache_type)}
        reply |= {"weight_bytes": system.weight_bytes, "info": system.info}
        reply |= {"decode_tokens_per_second": job["batch"] * reply["steps"] / reply["seconds"]}
        return reply | {"peak_bytes": memory_peak(device)}

    return handle


def decode_row(setup: dict, job: dict, replies: list[dict], reading: dict[str, float]) -> dict:
    """One line of the table: medians of what a system replied to one job."""
    one = replies[0]
    rounds = [reply["seconds"] / reply["steps"] for reply in replies]
    seconds, read = median(rounds), one["weight_bytes"] + one["cache_bytes"]
    peak = min(reply["peak_bytes"] for reply in replies)  # later on the allocator keeps more than is needed
    return {
        **{key: setup[key] for key in ("system", "precision", "device", "shape")},
        **{key: job[key] for key in ("tiles", "context", "batch")},
        "decode_tokens_per_second": job["batch"] / seconds,
        "ms_per_token": seconds * 1000,
        **{key: one[key] for key in ("weight_bytes", "cache_bytes")},
        "floor_fraction": read / max(reading.values()) / seconds,
        "read_bytes_per_second": reading,
        "peak_mebibytes": peak / 2**20,
        "seconds_of_rounds": rounds,
        **one["info"],
    }


# ------------------------------------------------------------------------------------- the first token
READERS: dict[str, Any] = {
    **{"ours-fast": Ours, "ours-eager": Ours, "transformers": Transformers},
    **{"openvino": OpenVINO, **dict.fromkeys(LLAMA_CPP, LlamaCpp)},
}
PARTS = ("vision", "prefill", "first_token", "draft", "with_draft")
FIRST_TOKEN_COLUMNS = """system precision tiles
    vision_seconds:.3f vision_over_openvino:.2f prefill_seconds:.3f prefill_over_llama_cpp:.2f
    first_token_seconds:.3f first_token_over_transformers:.2f draft_seconds:.3f with_draft_seconds:.3f
    least_cosine:.6f"""
FIRST_TOKEN_PEERS = {"vision": "openvino", "prefill": "llama.cpp", "first_token": "transformers"}


def check_first_token(settings: argparse.Namespace) -> None:
    settings.precisions = precisions_of(settings)
    if settings.quick:
        settings.rounds, settings.tiles = 1, settings.tiles[:1]
    limit = SHAPES[settings.shape].text.max_position_embeddings
    sizes = [prompt_tokens(settings.shape, tiles) for tiles in settings.tiles]
    if not sizes or min(settings.tiles) < 1 or max(sizes) >= limit:
        raise ValueError(
            f"--tiles: expected numbers of tiles that fit {limit} positions, got {settings.tiles}"
        )


def first_token(settings: argparse.Namespace, folder: str) -> None:
    """Seconds from the model's inputs to the first word of an answer about an image, and those of each part.

    vision       the tower and the projector; OpenVINO has nothing else
    prefill      the language model up to the first logits; llama.cpp has nothing else
    draft        the first word of a draft (`generate.py --draft`), where one is made
    with draft   the first token of the answer after that draft
    alike        the least cosine between the features of a position and those of our eager float32 tower

    Each ratio is of what stands left of it. No image comes twice.
    """
    with torch.no_grad():
        model, tile = build_ours(settings.shape, torch.float32, "cpu"), tile_pixels(settings.shape, 1)
        torch.save(torch.stack(tuple(model.encode_images(tile))), Path(folder) / "features.pt")
    setups = setups_of(settings, folder, max(prompt_tokens(settings.shape, n) for n in settings.tiles) + 8)
    jobs = [{"tiles": tiles} for tiles in settings.tiles]
    measured, failed = take_turns(first_token_handler, setups, lambda setup: jobs, settings.rounds)
    rows = []
    for setup, job, replies in measured:
        seconds = {f"{part}_seconds": [reply.get(part) for reply in replies] for part in PARTS}
        row = {key: setup[key] for key in ("system", "precision", "device", "shape")} | job
        row |= {"prompt_tokens": prompt_tokens(setup["shape"], job["tiles"])}
        row |= {key: median(values) for key, values in seconds.items()}
        row |= {"seconds_of_rounds": {key: values for key, values in seconds.items() if any(values)}}
        rows.append(row | replies[0]["info"])
    for part, peer in FIRST_TOKEN_PEERS.items():
        compare(rows, f"{part}_seconds", ("precision", "tiles"), [peer], f"{part}_")
    print(f"{settings.shape} on {settings.device}, {settings.threads} threads: seconds to the first token")
    finish("first_token", settings, FIRST_TOKEN_COLUMNS, rows, left_out=failed)


def first_token_handler(setup: dict) -> Handler:
    """The child's side: the first tokens of one system, after one that does not count."""
    torch.set_num_threads(setup["threads"])
    system = READERS[setup["system"]](setup)
    info: dict[str, Any] = dict(system.info)
    system.first_token(1, image=1000)
    features = system.features(tile_pixels(setup["shape"], 1).to(setup["device"]))
    if features is not None:
        expected = torch.load(Path(setup["folder"]) / "features.pt")
        info["least_cosine"] = F.cosine_similarity(features.float().cpu(), expected, dim=-1).min().item()

    def handle(job: dict) -> dict:
        reply = system.first_token(job["tiles"], image=job["round"])
        return reply | {"first_token": reply.pop("total", None), "info": info}

    return handle


# -------------------------------------------------------------------------- beside others, and in quotas
LOADED: dict[str, Any] = {
    **dict.fromkeys(("ours-fast", "ours-never-loaded", "ours-one-thread"), Ours),
    **{"transformers": Transformers, "llama.cpp": LlamaCpp},
}
CONDITIONS = ("quiet", "busy", "quiet again")
SETTLE = 0.3  # seconds from the start of other processes until the clock starts
LOAD_COLUMNS = """condition precision system decode_tokens_per_second:.1f first_token_seconds:.3f
    over_one_thread:.2f over_never_loaded:.3f over_transformers:.2f over_llama_cpp:.2f"""
LOAD_PEERS = ("ours-one-thread", "ours-never-loaded", "transformers", "llama.cpp")


def numbers(text: str) -> list[float]:
    """ "1,0.5" -> [1.0, 0.5]; "" -> []."""
    return [float(part) for part in text.split(",") if part]


def check_load(settings: argparse.Namespace) -> None:
    if settings.device != "cpu":
        raise ValueError(f"--device: expected cpu, got {settings.device}: a GPU does not share its threads")
    if settings.quick:
        settings.rounds, settings.tokens, settings.quotas = 1, 8, []


def load(settings: argparse.Namespace, folder: str) -> None:
    """Speed where others want the processors, too: beside a busy process on each, and in a cgroup's quota.

    Every system has as many threads as it takes by itself, one for each processor, but for "ours-one-thread".
    "ours-never-loaded" is measured only while nothing else runs: what the others had to do before shall not
    show afterwards. Quotas need a cgroup that may be written, as root has it.
    """
    own = {"environment": {"OMP_NUM_THREADS": None}}  # as who starts it without further thought
    setups = [
        setup | own | {"quota": quota}
        for quota in (None, *settings.quotas)
        for setup in setups_of(settings, folder, prompt_tokens(settings.shape, 1) + settings.tokens + 8)
        if not quota or setup["system"] != "ours-never-loaded"
    ]

    def jobs(setup: dict) -> list[dict]:
        conditions = [f"quota {setup['quota']:g}"] if setup["quota"] else list(CONDITIONS)
        if setup["system"] == "ours-never-loaded":
            conditions.remove("busy")
        return [{"condition": condition, "tokens": settings.tokens} for condition in conditions]

    measured, failed = take_turns(load_handler, setups, jobs, settings.rounds)
    rows = []
    for setup, job, replies in measured:
        seconds = [one["seconds"] / one["steps"] for one in replies]
        row = {key: setup[key] for key in ("system", "precision", "shape")}
        row |= {"condition": job["condition"], "decode_tokens_per_second": 1 / median(seconds)}
        row |= {"first_token_seconds": median(one["first"] for one in replies)}
        rows.append(row | {"seconds_of_rounds": seconds})
    compare(rows, "decode_tokens_per_second", ("condition", "precision"), LOAD_PEERS)
    order = {condition: number for number, condition in enumerate(CONDITIONS)}
    rows.sort(key=lambda row: (order.get(row["condition"], 9), row["condition"], row["precision"]))
    finish("load", settings, LOAD_COLUMNS, rows, left_out=failed)


def load_handler(setup: dict) -> Handler:
    """The child's side: a system that chooses its threads as it does for its users."""
    if setup["quota"]:
        enter_quota(setup["quota"])
    ours = setup["system"].startswith("ours")
    if ours:
        limit_threads(1 if setup["system"] == "ours-one-thread" else None)
    else:
        torch.set_num_threads(setup["threads"])
    system = LOADED[setup["system"]](setup | ({"system": "ours-fast"} if ours else {}))
    image = iter(range(1_000_000))

    def measure(tokens: int) -> dict:
        decoded = system.decode(prompt_tokens(setup["shape"], 1), tokens, 1, 1)
        return {**decoded, "first": system.first_token(1, next(image)).get("total")}

    measure(8)

    def handle(job: dict) -> dict:
        with busy(os.cpu_count() or 1) if job["condition"] == "busy" else contextlib.nullcontext():
            return measure(job["tokens"])

    return handle


@contextlib.contextmanager
def busy(processes: int) -> Iterator[None]:
    """So many processes that do nothing but take time."""
    started = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        time.sleep(SETTLE)
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def enter_quota(processors: float) -> None:
    """From now on this process has so much time in each 0.1 s, all its threads together.

    Raises Unavailable where no cgroup may be written.
    """
    root, allowed = Path("/sys/fs/cgroup"), int(processors * 100_000)
    folder = root / "cpu" if (root / "cpu").is_dir() else root
    folder = folder / f"ocelli-benchmark-{processors:g}"
    try:
        folder.mkdir(exist_ok=True)
        if (folder / "cpu.max").exists():
            (folder / "cpu.max").write_text(f"{allowed} 100000")
        else:
            (folder / "cpu.cfs_quota_us").write_text(str(allowed))
        (folder / "cgroup.procs").write_text(str(os.getpid()))
    except OSError as error:
        raise Unavailable(f"no quota here: {error}") from None


# --------------------------------------------------------------------------------------------- pictures
COLOURS = {"ours-fast": "#0f766e", "llama.cpp": "#b45309", "transformers": "#64748b", "openvino": "#6d28d9"}
LIGHTER = {"ours-fast": "#5eb8ae", "transformers": "#b3bfcc"}  # of prefill, after the tower
LABELS = {"ours-fast": "Ocelli", "openvino": "OpenVINO (tower)", "llama.cpp": "llama.cpp (language model)"}
BAR, GAP, LEFT, WIDTH, TOP, NUMBER = 20, 14, 260, 820, 68, 60  # pixels; NUMBER is at the end of a bar


def svg(width: float, height: float, title: str, parts: Sequence[str]) -> str:
    """A picture of so many pixels on white, with its title and what else is drawn."""
    size = f'viewBox="0 0 {width} {height}" width="{width}"'
    font = 'font-family="system-ui, sans-serif" font-size="11" fill="#1e293b"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font}>'
    ground = f'<rect width="{width}" height="{height}" fill="#ffffff"/>'
    heading = text(10, 18, title, "start", 'font-size="13" font-weight="600"')
    return "\n".join([head, ground, heading, *parts, "</svg>\n"])


def text(x: float, y: float, words: str, anchor: str = "start", style: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {style}>{escape(words)}</text>'


def draw(result: dict) -> str:
    """Bars of all systems in SVG: decoding at the shortest context and one row with the memory's limit, or
    first tokens with a column for each number of tiles, the tower's part and the language model's."""
    decoding = result["benchmark"] == "decode"
    key, form = ("context", ".0f") if decoding else ("tiles", ".2f")
    rows = [row for row in result["rows"] if row["system"] in COLOURS and row.get("batch", 1) == 1]
    columns = sorted({row[key] for row in rows})[: 1 if decoding else None]
    order = list(dict.fromkeys(row["precision"] for row in rows))
    title = "Seconds to the first token"
    note = "dark: vision tower, light: language model; dashed: first word of a draft"
    if decoding:
        title = f"Tokens a second after {columns[0]:,} tokens, batch 1"
        note = "dashed: every weight and the cache read once at this machine's read bandwidth"

    def parts_of(row: dict) -> tuple[list[float], float | None]:
        """The lengths that a bar consists of, and where its dashed line stands."""
        if decoding:
            speed = row["decode_tokens_per_second"]
            return [speed], speed / row["floor_fraction"]
        return [row["vision_seconds"] or 0, row["prefill_seconds"] or 0], row["draft_seconds"]

    def place(row: dict) -> tuple[int, float]:
        return order.index(row["precision"]), sum(parts_of(row)[0]) * (-1 if decoding else 1)

    drawn: list[str] = []
    tops: dict[tuple[str, str], int] = {}
    for row in sorted((row for row in rows if row[key] == columns[-1]), key=place):
        top = tops[row["system"], row["precision"]] = TOP + len(tops) * (BAR + 4) + place(row)[0] * GAP
        name = f"{LABELS.get(row['system'], row['system'])}, {row['precision']}"
        drawn.append(text(LEFT - 8, top + 15, name, "end"))
    width = (WIDTH - LEFT) / len(columns)
    for number, column in enumerate(columns):
        left, own = LEFT + number * width, [row for row in rows if row[key] == column]
        scale = (width - NUMBER) / max(max(sum(lengths), mark or 0) for lengths, mark in map(parts_of, own))
        heading = f"{column} tile{'s' * (column > 1)}"
        drawn += [] if decoding else [text(left, TOP - 6, heading, style='font-weight="600"')]
        for row in own:
            (lengths, mark), x, top = parts_of(row), left, tops[row["system"], row["precision"]]
            colour = COLOURS[row["system"]]
            for length, shade in zip(lengths, (colour, LIGHTER.get(row["system"], colour))):
                size = f'width="{scale * length:.1f}" height="{BAR}"'
                drawn.append(f'<rect x="{x:.1f}" y="{top}" {size} fill="{shade}"/>')
                x += scale * length
            drawn.append(text(x + 6, top + 15, format(sum(lengths), form)))
            if mark:
                line = f"M{left + scale * mark:.1f} {top - 2}v{BAR + 4}"
                drawn.append(f'<path d="{line}" stroke="#dc2626" stroke-dasharray="4 3"/>')
    hardware = result["hardware"]
    where = hardware["gpu"] or f"{hardware['cpu']}, {hardware['threads']} threads"
    drawn.append(text(10, 38, f"{where}; {note}", style='fill="#475569"'))
    height = max(tops.values()) + BAR + GAP
    return svg(WIDTH, height, f"{title}, {result['settings']['shape']}'s shape", drawn)


def check_picture(settings: argparse.Namespace) -> None:
    try:
        settings.result = json.loads(settings.result.read_text())
        known = settings.result["benchmark"] in ("decode", "first_token")
    except (OSError, ValueError, KeyError, TypeError):
        known = False
    if not known:
        raise ValueError("expected a result of decode or first-token, as --save writes it")


def picture(settings: argparse.Namespace, folder: str) -> None:
    """A saved result of decode or first-token as a picture."""
    settings.picture.write_text(draw(settings.result))


COMMANDS = {
    "decode": Command(decode, check_decode, {
        "--precisions": option(names(*PRECISIONS), [], "of the weights", "all"),
        "--systems": option(names(*DECODERS), [], f"out of {', '.join(DECODERS)}", "what pays there"),
        "--prompts": option(integers, [1, 17], "tiles of the prompt", "1,17"),
        "--contexts": option(integers, [8000], "further contexts", "8000"),
        "--tokens": option(positive, 64, "decode steps that are timed"),
        "--batch": option(integers, [1], "rows decoded together", "1"),
    }),
    "first-token": Command(first_token, check_first_token, {
        "--precisions": option(names(*PRECISIONS), [], "of the weights", "all"),
        "--systems": option(names(*READERS), list(READERS), "which", "all"),
        "--tiles": option(integers, [1, 17], "tiles of the image", "1,17"),
    }),
    "load": Command(load, check_load, {
        "--precisions": option(names(*PRECISIONS), ["float32", "int8"], "of the weights", "float32,int8"),
        "--systems": option(names(*LOADED), list(LOADED), "which", "all"),
        "--tokens": option(positive, 48, "decode steps that are timed"),
        "--quotas": option(numbers, [1.0, 0.5], "in processors", "1,0.5"),
    }),
    "picture": Command(picture, check_picture, {
        "result": {"type": Path, "help": "JSON file that decode or first-token has saved"},
        "picture": {"type": Path, "help": "SVG file to write"},
    }, measures=False),
}  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    return execute(__doc__, COMMANDS, arguments)


if __name__ == "__main__":
    sys.exit(main())

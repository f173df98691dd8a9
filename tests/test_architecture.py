"""Who may import whom, that importing does nothing, and that the core stays as short as README says."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from tests.walks import WALKS

ROOT = Path(__file__).resolve().parent.parent
ENTRY_POINTS = {"app", "generate", "serve", "train"}
GROUND_FLOOR = "messages"  # texts of errors: everyone may import it, and it imports nobody
ROOMS = (
    *(
        "models",
        "families",
        "generation",
        "data",
        "shapes",
        "training",
        "inference",
        "web",
        "eval",
        "benchmarks",
    ),
    *("tools", "recipes", GROUND_FLOOR),
)
EVERYTHING_BELOW = {"models", "families", "generation", "data", "shapes", "training", "inference"}
# Families stand on parts of two folders, and the rest of both stands on families: floors of their own.
FLOORS = {
    "files": (
        *(
            "models.checkpoints.files",
            "models.checkpoints.names",
            "models.checkpoints.hub",
        ),
        *("models.checkpoints.weights", "models.checkpoints.folder"),
        *("models.checkpoints.gguf", "models.checkpoints.gguf_config"),
        "models.checkpoints.gguf_tokenizer",
    ),
    "networks": (
        *("models.config", "models.language_model", "models.vision_transformer"),
        *(
            "models.losses",
            "models.packed_vision_transformer",
            "models.packed_rows",
        ),
        *("models.short_convolution", "models.gated_delta", "models.gemma4_text", "models.gemma4_vision"),
    ),
    "inputs": (
        "data.errors",
        "data.images",
        "data.image_sizes",
        "data.video",
        "data.visuals",
        "data.tiles",
        "data.image_rules",
        "data.part_tensors",
        "data.tokenizer",
        "data.transformers_tokenizer",
        "data.chat",
        "data.conversation",
        "data.labels",
        "data.plain_calls",
        "data.reading",
        "data.templates",
        "data.thinking",
        "data.tools",
        "data.fetch",
    ),
    "scores": ("eval.boxes", "eval.metrics", "eval.statistics"),  # of answers, for training as well
}
# A checkpoint's files, found by a name and parsed.
FILES = tuple(f"models.checkpoints.{name}" for name in ("files", "sources", "hub"))
OPENED = tuple(f"inference.{name}" for name in ("checkpoint", "coded", "kept"))  # weights in few bits
# The first prefix that fits a module says what of this repository it may import.
MAY_IMPORT = {
    **{name: {*FLOORS["files"]} for name in FLOORS["files"]},
    # Handed the class of models; what codes are, and what a device computes in, `generation` knows.
    "models.checkpoints": {
        "models.checkpoints",
        "models.config",
        "families",
        "generation.codes",
        "generation.devices",
    },
    "models.vision_language_model": {"models", "generation", "families"},
    "models.whole_rows": {"models", "generation.kv_cache", "generation.protocol"},
    "models.language_model": {"models", "generation.kv_cache"},  # what a cache is, which its layers write
    **{
        f"models.{name}": {"models", "generation.kv_cache"}
        for name in ("gated_delta", "gemma4_text", "short_convolution")
    },
    "models": {"models"},
    "families": {"families", *(name for floor in FLOORS.values() for name in floor)},
    "generation": {"generation"},
    **{name: {*FLOORS["inputs"], *FILES} for name in FLOORS["inputs"]},
    "data": {"data", "models.config", *FILES, "families"},
    "shapes": {"shapes"},
    **{name: {*FLOORS["scores"], "data.boxes"} for name in FLOORS["scores"]},
    "training": {"training", "models", "families", "data", "generation", *FLOORS["scores"], *OPENED},
    "inference": {"inference", "models", "families", "generation", "data"},
    "web": {"web", "inference", "models", "families", "generation", "data"},
    "eval": {"eval"} | EVERYTHING_BELOW,
    "benchmarks": {"benchmarks"} | EVERYTHING_BELOW,
    "tools": {"tools", "web", "eval", "benchmarks"} | EVERYTHING_BELOW,
    # Beside the product: nobody imports it; `data: recipes.NAME` and a task's name in eval/tasks.py find it.
    **dict.fromkeys(
        ("recipes.pages.tests", "recipes.shapes.tests", "recipes.world.tests"),
        {"recipes", "train", "tests", "eval"} | EVERYTHING_BELOW,
    ),
    "recipes": {"recipes", "eval"} | EVERYTHING_BELOW,
    GROUND_FLOOR: set(),
}
MOST_CONCEPTS = 40  # classes between a question and its answer
MOST_LATE_IMPORTS = 43  # inside functions, where start-up demands it


# Lines of the product: what is neither a test, a recipe nor a benchmark. A commit may only lower it; a part
# of the work that brings something says how many lines it is granted.
TOTAL = 48_592
CODE = {".py", ".c", ".h", ".js", ".css", ".html", ".jinja"}
BESIDE = {"tests", "recipes", "benchmarks", "checkpoints", "notebooks"}


def modules() -> dict[str, Path]:
    """Every module of the repository by its name, tests and entry points included."""
    paths = [
        *ROOT.glob("*.py"),
        *(path for room in (*ROOMS, "tests") for path in (ROOT / room).rglob("*.py")),
    ]
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in sorted(paths)}
    return {name.removesuffix(".__init__"): path for name, path in names.items()}


MODULES = modules()
OURS = [name for name in MODULES if name.split(".")[0] in ROOMS]


@cache
def tree(name: str) -> ast.Module:
    return ast.parse(MODULES[name].read_text(encoding="utf-8"))


def imports(name: str) -> set[str]:
    """The full names of what a module imports, wherever in it."""
    found = set()
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}, line {node.lineno}: expected absolute imports"
            # `from package import module` imports the module.
            found |= {
                full if (full := f"{node.module}.{alias.name}") in MODULES else node.module
                for alias in node.names
            }
    return found


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def test_there_is_something_to_check():
    assert {"models.vision_language_model", "generation.decoding", "data.processor"} <= set(OURS)
    assert {"models.config", "torch"} <= imports("models.vision_language_model")


def test_who_imports_whom():
    wrong = {}
    for name in OURS:
        allowed = next(allowed for prefix, allowed in MAY_IMPORT.items() if within(name, prefix))
        ours = {
            module for module in imports(name) if module.split(".")[0] in {*ROOMS, *ENTRY_POINTS, "tests"}
        }
        allowed = allowed | {GROUND_FLOOR}
        wrong[name] = {module for module in ours if not any(within(module, prefix) for prefix in allowed)}
    assert not {name: modules for name, modules in wrong.items() if modules}
    for name in ENTRY_POINTS:  # they may import everything but what stands beside the product
        assert not [module for module in imports(name) if within(module, "recipes")], name


def test_families_are_known_by_their_config_alone():
    """Outside of their room. `families.NEW` is the one of new models; tools convert one family's files."""
    general = {"families", "families.keys", "families.saving", "families.sections"}
    rooms = tuple(room for room in ROOMS if room not in ("families", "tools", "benchmarks", "recipes"))
    named = {
        name: theirs
        for name in MODULES
        if name.startswith(rooms) or name in ENTRY_POINTS
        if (theirs := {one for one in imports(name) if within(one, "families")} - general)
    }
    assert not named


def test_generation_needs_torch_only():
    for name in (name for name in OURS if within(name, "generation")):
        libraries = {module.split(".")[0] for module in imports(name)} - sys.stdlib_module_names
        triton = {"triton"} if within(name, "generation.fast.cuda") else set()  # part of torch's CUDA builds
        assert libraries <= {"torch", "psutil", "generation"} | triton, name


def test_what_is_imported_is_pinned():
    """Else a new version of what another library brings is another Ocelli with the same requirements."""
    files = [*ROOT.glob("requirements*.txt"), *ROOT.glob("recipes/*/requirements.txt")]
    lines = [line for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    pinned = {normal(found[1]) for line in lines if (found := re.match(r"([\w.-]+)==\d", line))}
    assert {"torch", "triton", "pyyaml"} <= pinned
    known, ours = packages_distributions(), {*ROOMS, *ENTRY_POINTS, "tests"}
    loose = {}
    for name in (*OURS, *ENTRY_POINTS):
        for package in {module.split(".")[0] for module in imports(name)} - sys.stdlib_module_names - ours:
            if pinned.isdisjoint(map(normal, known.get(package, [package]))):
                loose.setdefault(package, []).append(name)
    assert not loose


def normal(distribution: str) -> str:
    """Its name as the index compares names."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def test_no_import_circle():
    """Between files and between rooms, or floors of them; inside functions and for types as well. A package's
    __init__ is a module like any other."""

    def room(name: str) -> str:
        return next((floor for floor in FLOORS if name in FLOORS[floor]), name.split(".")[0])

    known = {*OURS, *ENTRY_POINTS}
    of_files = {name: (imports(name) & known) - {name} for name in known}
    of_rooms: dict[str, set[str]] = {}
    for name, modules in of_files.items():
        of_rooms.setdefault(room(name), set()).update({room(module) for module in modules} - {room(name)})
    for graph in (of_files, of_rooms):
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            pytest.fail(" -> ".join(error.args[1]))


def test_imports_stand_at_the_top_but_for_a_few():
    late = [
        f"{name}:{node.lineno}"
        for name in (*OURS, *ENTRY_POINTS)
        if ".tests." not in name
        for function in ast.walk(tree(name))
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    assert len(set(late)) <= MOST_LATE_IMPORTS, f"{len(set(late))}: {sorted(set(late))}"


def test_the_sum_of_lines_only_falls():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = [path for path in map(Path, listed.splitlines()) if path.suffix in CODE]
    product = [ROOT / path for path in paths if path.parts[0] not in BESIDE]
    lines = sum(path.read_bytes().count(b"\n") for path in product if path.exists())
    assert 0.9 * TOTAL < lines <= TOTAL, f"{lines:,} lines"


@pytest.fixture(scope="module")
def walked() -> dict[str, list[list[str]]]:
    """In a process of its own: here, finalizers of what other tests left would run as well."""
    command = [sys.executable, "-m", "tests.walks", "--json"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return json.loads(shown.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("name", WALKS)
def test_few_lines_run(name, walked):
    files, _ = walked[name]
    lines = sum((ROOT / file).read_bytes().count(b"\n") for file in files)
    assert len(files) > 5 and lines <= WALKS[name][1], (lines, files)


@pytest.mark.slow
def test_readme_names_every_file_that_a_question_runs_through(walked):
    """And says how many they are, and how many lines."""
    section = (ROOT / "README.md").read_text(encoding="utf-8").split("## Read the code")[1]
    named = set(re.findall(r"`([\w/]+\.py)`", section.split("| folder |")[0]))
    assert named == {*walked["answer"][0], "generate.py"}
    lines = sum(len((ROOT / name).read_text(encoding="utf-8").splitlines()) for name in named)
    said = re.search(r"(\d+) files, about ([\d,]+) lines", section)
    assert said and int(said[1]) == len(named)
    assert abs(int(said[2].replace(",", "")) - lines) < 150, lines


def test_the_map_of_concepts_has_every_class_of_a_question(walked):
    """Those that a reader meets: what is private to a file is not in it."""
    classes = {name for name in walked["answer"][1] if "." not in name and name[0] != "_"}
    section = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("## Map of concepts")[1]
    named = re.findall(r"`([A-Z]\w+)`", section.split("\n## ")[0])
    assert sorted(named) == sorted(classes) and len(classes) <= MOST_CONCEPTS


@pytest.mark.slow
def test_importing_does_nothing():
    """At the top level: a docstring, imports, definitions, constants, and the guard of main()."""
    for name, node in ((module, node) for module in MODULES for node in tree(module).body):
        if isinstance(node, ast.Expr):
            harmless = isinstance(node.value, ast.Constant)  # the docstring
        elif isinstance(node, ast.If):
            # `not __package__` holds for a script only, never for an import.
            guards = ("__name__ == '__main__'", "TYPE_CHECKING", "not __package__")
            harmless = ast.unparse(node.test) in guards
        else:
            harmless = isinstance(
                node,
                ast.Import
                | ast.ImportFrom
                | ast.FunctionDef
                | ast.AsyncFunctionDef
                | ast.ClassDef
                | ast.Assign
                | ast.AnnAssign
                | ast.AugAssign,
            )
        assert harmless, f"{name}, line {node.lineno}: runs on import: {ast.unparse(node)[:80]}"

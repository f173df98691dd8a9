"""The package `ocelli`: what pip installs is what the repository holds, and works in any folder."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from tools import package

ROOT = package.ROOT


class Unprefixed(ast.NodeTransformer):
    """A rewritten module as it was."""

    def visit_ImportFrom(self, node):
        if node.module == "ocelli" and node.names[0].name in package.OURS:  # `import serve`
            return ast.Import(node.names)
        node.module = (node.module or "").removeprefix("ocelli.")
        return node

    def visit_Constant(self, node):
        if not isinstance(node.value, str):
            return node
        name = node.value.removeprefix("ocelli.")
        named = re.fullmatch(r"\w+(\.\w+)+(:\w+)?", name) and package.is_module(name)
        return ast.Constant(name if named else node.value.replace('"ocelli.', '"'), node.kind)


@pytest.mark.parametrize("room", [*package.SCRIPTS, *package.ROOMS])
def test_modules_differ_from_the_repositorys_in_their_imports_alone(room):
    for path in package.product():
        if path.suffix != ".py" or path.parts[0].removesuffix(".py") != room:
            continue
        own = (ROOT / path).read_text()
        text = package.rewritten(own)
        assert ast.dump(Unprefixed().visit(ast.parse(text))) == ast.dump(ast.parse(own)), path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0 and node.module.split(".")[0] not in package.OURS, path
            elif isinstance(node, ast.Import):
                assert not {one.name.split(".")[0] for one in node.names} & package.OURS, path


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    package.build_wheel(str(folder))
    package.build_sdist(str(folder))
    return folder


@pytest.mark.slow
def test_a_wheel_of_the_sdist_is_the_wheel(built, tmp_path):
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.iterdir()
    made = f"import tools.package as package; package.build_wheel({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", made], cwd=unpacked, check=True, stdout=subprocess.DEVNULL)
    wheels = [next(folder.glob("*.whl")).read_bytes() for folder in (built, tmp_path)]
    assert wheels[0] == wheels[1]


@pytest.mark.slow
def test_the_installed_package_has_one_name_and_answers_in_any_folder(built, tmp_path):
    """In an empty environment, which sees this one's libraries, without a network."""
    venv.create(tmp_path / "env", with_pip=True)
    (found,) = (tmp_path / "env").glob("lib/python*/site-packages")
    before = {path.name for path in found.iterdir()}
    pip = [str(tmp_path / "env/bin/python"), "-m", "pip", "install", "-q", "--no-index", "--no-deps"]
    subprocess.run([*pip, str(next(built.glob("*.whl")))], check=True)
    new = {path.name for path in found.iterdir()} - before
    assert {name for name in new if not name.endswith(".dist-info")} == {"ocelli"}
    (found / "libraries.pth").write_text(sysconfig.get_path("purelib"))
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}

    def run(*command: str) -> str:
        done = subprocess.run(
            [str(tmp_path / "env/bin" / command[0]), *command[1:]],
            cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    cup = str(ROOT / "assets" / "cup.png")
    assert run("ocelli", cup, "What is the printed word?", "--compile", "off").strip() == "cup"
    assert len(run("ocelli", "--help").splitlines()) < 24
    assert "generate.py" not in run("ocelli", "ask", "--help")
    for command in (
        "ask",
        "chat",
        "batch",
        "where",
        "read",
        "serve",
        "page",
        "train",
        "eval",
        "convert",
        "inspect",
        "prove",
    ):
        assert "usage: " in run("ocelli", command, "--help")
    quick = f"""
from ocelli import Processor, VisionLanguageModel
model = VisionLanguageModel.from_pretrained("ocelli-shapes")
processor = Processor.from_pretrained("ocelli-shapes")
print(processor.decode(model.generate(**processor.ask({cup!r}, "What is the printed word?"))[0]))
"""
    assert run("python", "-c", quick).strip() == "cup"


def test_the_public_names_are_those_of_the_rooms():
    import ocelli

    assert all(getattr(ocelli, name) is not None for name in ocelli.__all__)
    with pytest.raises(AttributeError):
        _ = ocelli.nothing


def test_members_of_the_wheel_are_those_of_the_repository(built):
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        names = set(wheel.namelist())
    assert {
        "ocelli/web/page.html",
        "ocelli/eval/report.html.jinja",
        "ocelli/generation/fast/native/decode.c",
    } <= names
    assert not [name for name in names if "/tests/" in name or "__pycache__" in name]

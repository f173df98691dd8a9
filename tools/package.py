"""The build backend of `pip install .`: the repository's folders as one package, `ocelli`.

    pip install .                    # from a checkout, an sdist or git+https://…
    pip install -e .                 # `import ocelli` finds this checkout
    python -m tools.package dist     # a wheel and an sdist

In the repository `models/`, `data/` and the others stand at the top level. In the wheel they lie in
`ocelli/`, and imports of one another are rewritten: `from models.config import X` becomes
`from ocelli.models.config import X`. `ocelli.py`, the public names, becomes `ocelli/__init__.py`. Metadata
come from setuptools, which reads [project] in pyproject.toml; the files are put into the wheel here
(PEP 427, 517, 660).
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import shutil
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from setuptools import build_meta

ROOT = Path(__file__).resolve().parent.parent
ROOMS = (
    *("data", "eval", "families", "generation", "inference", "models", "recipes", "shapes", "tools"),
    *("training", "web"),
)
SCRIPTS = ("app", "generate", "messages", "serve", "train")
DATA = ("assets", "checkpoints", "configs")
OURS = {*ROOMS, *SCRIPTS}
# In a module: `from data.x import y`, `import serve`, and "data.x" or "data.x:y" in quotes.
_ANY = "|".join(sorted(OURS))
_FROM = re.compile(rf"^(\s*)from (?=(?:{_ANY})(?:\.\w+)* import )", re.MULTILINE)
_IMPORT = re.compile(rf"^(\s*)import ({_ANY})$", re.MULTILINE)
_QUOTED = re.compile(rf"([\"'])((?:{_ANY})(?:\.[a-z_0-9]+)+(?::\w+)?)(?=\1)")
# Of an sdist, beside what a wheel holds.
MORE = (
    *("pyproject.toml", "ocelli.py", "README.md", "CHANGELOG.md"),
    *("CITATION.cff", "LICENSE", "requirements.txt"),
)
_LEFT = re.compile(r"__pycache__|(^|/)tests/|\.pyc$|(^|/)\.")


def product() -> Iterator[Path]:
    """The files of the package, as paths in the repository."""
    for name in (*(f"{one}.py" for one in SCRIPTS), *ROOMS, *DATA):
        for path in sorted((ROOT / name).rglob("*")) if (ROOT / name).is_dir() else [ROOT / name]:
            if path.is_file() and not _LEFT.search(str(relative := path.relative_to(ROOT))):
                yield relative


def rewritten(source: str) -> str:
    """A module's text with imports of our own modules, and texts that are one's name, below `ocelli`."""
    source = _IMPORT.sub(r"\1from ocelli import \2", _FROM.sub(r"\1from ocelli.", source))
    return _QUOTED.sub(lambda text: f"{text[1]}ocelli.{text[2]}" if is_module(text[2]) else text[0], source)


def is_module(name: str) -> bool:
    """Whether a text, MODULE or MODULE:NAME, is the name of one of our modules."""
    path = ROOT.joinpath(*name.partition(":")[0].split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


# ------------------------------------------------------------------------------------------- PEP 517 and 660
def build_wheel(directory: str, config_settings=None, metadata_directory=None) -> str:
    package = {f"ocelli/{path.as_posix()}": _content(path) for path in product()}
    package["ocelli/__init__.py"] = _content(Path("ocelli.py"))
    for room in ROOMS:  # folders of modules without one are namespaces of their own
        package.setdefault(f"ocelli/{room}/__init__.py", b"")
    return _write_wheel(Path(directory), package)


def build_editable(directory: str, config_settings=None, metadata_directory=None) -> str:
    """A wheel that puts this checkout on the path of modules."""
    return _write_wheel(Path(directory), {"ocelli-checkout.pth": f"{ROOT}\n".encode()})


def build_sdist(directory: str, config_settings=None) -> str:
    with tempfile.TemporaryDirectory() as folder:
        information = _metadata(Path(folder))
        base = information.name.removesuffix(".dist-info")
        with tarfile.open(Path(directory) / f"{base}.tar.gz", "w:gz") as archive:
            for path in (*product(), *map(Path, MORE)):
                archive.add(ROOT / path, f"{base}/{path.as_posix()}", recursive=False)
            archive.add(information / "METADATA", f"{base}/PKG-INFO")
    return f"{base}.tar.gz"


def prepare_metadata_for_build_wheel(directory: str, config_settings=None) -> str:
    return _metadata(Path(directory)).name


prepare_metadata_for_build_editable = prepare_metadata_for_build_wheel


def _metadata(folder: Path) -> Path:
    """A .dist-info in `folder`, as setuptools makes it of [project] alone."""
    here = Path.cwd()
    with tempfile.TemporaryDirectory() as alone:
        (Path(alone) / "models").mkdir()
        for name in (
            "pyproject.toml",
            "README.md",
            "LICENSE",
            "models/__init__.py",
        ):  # the last has the version
            shutil.copy(ROOT / name, Path(alone) / name)
        os.chdir(alone)
        try:
            return folder / build_meta.prepare_metadata_for_build_wheel(str(folder.resolve()))
        finally:
            os.chdir(here)


def _content(path: Path) -> bytes:
    data = (ROOT / path).read_bytes()
    return rewritten(data.decode()).encode() if path.suffix == ".py" else data


def _write_wheel(directory: Path, files: dict[str, bytes]) -> str:
    with tempfile.TemporaryDirectory() as folder:
        information = _metadata(Path(folder))
        for path in information.rglob("*"):
            if path.is_file() and path.name != "RECORD":
                files[path.relative_to(folder).as_posix()] = path.read_bytes()
        base = information.name.removesuffix(".dist-info")
    about = "Wheel-Version: 1.0\nGenerator: tools.package\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files[f"{information.name}/WHEEL"] = about.encode()
    record = ""
    for name, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        record += f"{name},sha256={digest},{len(data)}\n"
    record += f"{information.name}/RECORD,,\n"
    files[f"{information.name}/RECORD"] = record.encode()
    with zipfile.ZipFile(directory / f"{base}-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED)
    return f"{base}-py3-none-any.whl"


if __name__ == "__main__":
    (folder,) = sys.argv[1:]  # setuptools changes sys.argv
    print(build_wheel(folder), build_sdist(folder), sep="\n")

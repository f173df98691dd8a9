"""`generate.py read`: documents become files, every page is accounted for, and a killed run goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.house import json_lines
from tests.processors import draw_image

pytest.importorskip("docling_core")
pdfium = pytest.importorskip("pypdfium2")


def write_pdf(path: Path, *sizes: tuple[int, int], turned: int = 0) -> Path:
    """A PDF of empty pages of these sizes, in points."""
    pdf = pdfium.PdfDocument.new()
    for size in sizes:
        pdf.new_page(*size).set_rotation(turned)
    path.parent.mkdir(parents=True, exist_ok=True)
    pdf.save(path)
    pdf.close()
    return path


def write_frames(path: Path, count: int) -> Path:
    first, *rest = (draw_image(40 + 8 * n, 30, seed=n) for n in range(count))
    first.save(path, save_all=True, append_images=rest)
    return path


@pytest.fixture
def run(cli, tmp_path, monkeypatch):
    """Run `read` where the documents lie: stderr."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments, status=0) -> str:
        got, printed, err = cli("read", *arguments, "--max-new-tokens", 4, "--batch-size", 2)
        assert got == status and printed == "", err
        return err

    return run


def pages(name: str, out: str = "read") -> dict[int, dict]:
    return {record["page"]: record for record in json_lines(Path(out, "pages", f"{name}.jsonl"))}


def test_documents_of_all_kinds(run, tmp_path):
    folder = tmp_path / "in"
    write_pdf(folder / "a/three.pdf", (200, 300), (300, 200), (20, 30), turned=90)
    write_frames(folder / "frames.tif", 3)
    draw_image(50, 60).save(folder / "one.jpg")
    for name, data in {"broken.pdf": b"%PDF-1.7\n", "empty.pdf": b"", "text.png": b"some text"}.items():
        (folder / name).write_bytes(data)
    err = run("in", status=1)
    assert {len(pages(name)) for name in ("a/three", "frames")} == {3} and len(pages("one")) == 1
    assert all(f"{name}: " in err for name in ("broken.pdf", "empty.pdf", "text.png"))
    written = {path.relative_to("read").as_posix() for path in Path("read").rglob("*.md")}
    assert written == {"a/three.md", "frames.md", "one.md"}
    assert [record["size"] for record in pages("frames").values()] == [[40, 30], [48, 30], [56, 30]]
    sizes = [record["size"] for record in pages("a/three").values()]
    assert [width > height for width, height in sizes] == [True, False, True]

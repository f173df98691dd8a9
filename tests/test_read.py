"""`generate.py read`: documents become files, every page is accounted for, and a killed run goes on."""

from __future__ import annotations

import base64
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from data.errors import ImageError
from data.pages import Pages
from tests.house import data_url, json_lines
from tests.processors import draw_image
from tests.servers import CHAT, EXAMPLE, MESSAGES, NAME, RESPONSES, STAR, Running, embedded, running

pdfium = pytest.importorskip("pypdfium2")
Page = pytest.importorskip("inference.pages.reader")._Page


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


def pages(source: str, out: str = "read/pages.jsonl") -> dict[int, dict]:
    """The results of a document's pages."""
    records = [record for record in json_lines(Path(out)) if record["document"] == f"../{source}"]
    return {record["number"]: record for record in records}


def test_documents_of_all_kinds(run, tmp_path):
    folder = tmp_path / "in"
    write_pdf(folder / "a/three.pdf", (200, 300), (300, 200), (20, 30), turned=90)
    write_frames(folder / "frames.tif", 3)
    draw_image(50, 60).save(folder / "one.jpg")
    for name, data in {"broken.pdf": b"%PDF-1.7\n", "empty.pdf": b"", "text.png": b"some text"}.items():
        (folder / name).write_bytes(data)
    err = run("in", status=1)
    assert {len(pages(f"in/{name}")) for name in ("a/three.pdf", "frames.tif")} == {3}
    assert all(f"{name}: " in err for name in ("broken.pdf", "empty.pdf", "text.png"))
    written = {path.relative_to("read").as_posix() for path in Path("read").rglob("*.md")}
    assert written == {"a/three.md", "frames.md", "one.md"}
    assert [record["size"] for record in pages("in/frames.tif").values()] == [[40, 30], [48, 30], [56, 30]]
    sizes = [record["size"] for record in pages("in/a/three.pdf").values()]
    assert [width > height for width, height in sizes] == [True, False, True]


def test_a_run_that_was_killed_goes_on(run, cli, tmp_path, monkeypatch):
    folder = tmp_path / "in"
    write_pdf(folder / "a.pdf", *[(200, 100)] * 3)
    write_frames(folder / "b.tif", 4)
    run("in", "--out", "whole")
    made, record = [], Page.record

    def counted(page):
        if len(made) == limit:
            raise KeyboardInterrupt
        made.append(page.key)
        return record(page)

    monkeypatch.setattr(Page, "record", counted)
    limit = 5
    run("in", "--out", "cut", status=130)
    with Path("cut/pages.jsonl").open("a") as file:
        file.write('{"page": "../in/b.tif#0')  # as a kill leaves it
    limit = 7
    err = run("in", "--out", "cut")
    assert len(made) == len(set(made)) == 7 and "5 skipped" in err
    for name in ("a.md", "b.md", "pages.jsonl"):
        assert Path("whole", name).read_bytes() == Path("cut", name).read_bytes()
    Path("cut/a.md").unlink()
    run("in", "--out", "cut")
    assert Path("whole/a.md").read_bytes() == Path("cut/a.md").read_bytes() and len(made) == 7
    for other in (["--task", "ocr"], ["--system", "Be brief."], ["--temperature", 1, "--seed", 3]):
        assert "another" in run("in", "--out", "cut", *other, status=2)


def test_shards_are_one_run(run, tmp_path):
    (tmp_path / "in").mkdir()
    for number in range(5):
        write_frames(tmp_path / f"in/{number}.tif", 2)
    for shard in (1, 2, 3):
        run("in", "--shard", f"{shard}/3")
        written = {path.stem for path in Path("read").glob("*.md")}
        assert (len(written) == 5) == (shard == 3)
    results = [one for path in Path("read").glob("pages-*.jsonl") for one in json_lines(path)]
    assert len({one["page"] for one in results}) == len(results) == 10


def test_some_pages_now_and_others_later(run, tmp_path, complaint):
    write_pdf(tmp_path / "nine.pdf", *[(100, 100)] * 9)
    run("nine.pdf", "--pages", "2, 4-5")
    assert [*pages("nine.pdf")] == [2, 4, 5]
    run("nine.pdf", "--pages", "5-6")
    assert [*pages("nine.pdf")] == [2, 4, 5, 6]
    assert "another" in run("nine.pdf", "--pages", "7", "--task", "ocr", status=2)
    assert "9 pages" in run("nine.pdf", "--pages", "10-12", status=1)
    for wrong in ("0-3", "3-2", "1,,2", "x", "-1"):
        assert "--pages" in complaint("read", "nine.pdf", f"--pages={wrong}")


def test_a_later_run_keeps_what_others_wrote(run, tmp_path, monkeypatch):
    """Another document of that name, pictures in the folder of documents, a document that changed, and the
    same one by another path."""
    for name in ("a/x.tif", "x.tiff"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_frames(tmp_path / name, 2)
    run("a/x.tif")
    first = Path("read/x.md").read_bytes()
    run("x.tiff")
    assert Path("read/x.md").read_bytes() == first and Path("read/x.tiff.md").exists()
    (tmp_path / "read/x_pictures").mkdir()
    draw_image(20, 20).save(tmp_path / "read/x_pictures/1.png")
    assert "4 skipped" in run(".", "--out", "read")
    draw_image(70, 60).save(tmp_path / "x.tiff")
    assert "1 answered, 0 failed, 2 skipped" in run(tmp_path)
    assert [record["size"] for record in pages("x.tiff").values()] == [[70, 60]]
    monkeypatch.chdir("a")
    assert "3 skipped" in run("..", "--out", "../read")


def test_a_document_that_vanishes_is_one_failure(run, tmp_path, monkeypatch):
    for name in ("a.tif", "b.tif"):
        write_frames(tmp_path / name, 3)
    record = Page.record

    def gone(page):
        Path("a.tif").unlink(missing_ok=True)
        return record(page)

    monkeypatch.setattr(Page, "record", gone)
    assert "a.tif" in run("a.tif", "b.tif", status=1)
    assert not Path("read/a.md").exists() and len(pages("b.tif")) == 3 and Path("read/b.md").exists()


def test_documents_of_one_name_stay_apart(run, tmp_path):
    for name in ("a/x.tif", "b/x.tif", "c/y.tif", "c/y.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        draw_image(30, 20, seed=len(name)).save(tmp_path / name)
    run("a/x.tif", "b/x.tif", "c/y.png")
    assert {path.as_posix() for path in Path("read").rglob("*.md")} == {
        "read/a/x.md",
        "read/b/x.md",
        "read/c/y.md",
    }
    run("c/y.tif", "c/y.png", "--format", "txt")
    assert {path.as_posix() for path in Path("read").rglob("*.txt")} == {
        "read/c/y.txt",  # whose name an earlier run gave
        "read/y.txt",
    }


def test_a_page_that_fails_is_told_and_tried_again(run, tmp_path, monkeypatch):
    write_pdf(tmp_path / "three.pdf", *[(100, 100)] * 3)
    draw = Pages.draw

    def broken(own, number, images):
        if number == 2:
            raise ImageError("three.pdf: page 2 is damaged")
        return draw(own, number, images)

    with monkeypatch.context() as patched:
        patched.setattr(Pages, "draw", broken)
        err = run("three.pdf", status=1)
    assert "1 failed" in err and "page 2 is damaged" in err
    assert "page 2 is damaged" in Path("read/three.md").read_text()
    assert "2 skipped" in run("three.pdf")
    assert "damaged" not in Path("read/three.md").read_text() and len(pages("three.pdf")) == 3


@pytest.mark.parametrize("package", ["pypdfium2", "docling_core"])
def test_packages_that_are_missing_are_named(run, tmp_path, monkeypatch, package):
    write_pdf(tmp_path / "one.pdf", (100, 100))
    monkeypatch.setitem(sys.modules, package, None)
    err = run("one.pdf", status=2)
    assert package.replace("_", "-") in err and "requirements-read.txt" in err


# ----------------------------------------------------------------------------------------------- over HTTP
def raw_pdf(*objects: bytes, trailer: bytes = b"") -> bytes:
    """A PDF of these objects, which are numbered from 1, the first is its catalog."""
    made, places = b"%PDF-1.7\n", []
    for number, one in enumerate(objects, start=1):
        places.append(len(made))
        made += b"%d 0 obj\n%s\nendobj\n" % (number, one)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    made, start = made + b"xref\n0 %d\n0000000000 65535 f \n%s" % (len(places) + 1, table), len(made)
    end = b"trailer\n<< /Size %d /Root 1 0 R %s >>\nstartxref\n%d\n%%%%EOF\n"
    return made + end % (len(places) + 1, trailer, start)


def tree(count: int) -> list[bytes]:
    """The catalog and the pages of a PDF of so many pages."""
    kids = b" ".join(b"%d 0 R" % (number + 3) for number in range(count))
    pages = b"<< /Type /Pages /Kids [%s] /Count %d /MediaBox [0 0 99 50] >>" % (kids, count)
    return [b"<< /Type /Catalog /Pages 2 0 R >>", pages, *[b"<< /Type /Page /Parent 2 0 R >>"] * count]


ENCRYPTED = raw_pdf(
    *tree(1),
    trailer=b"/Encrypt << /Filter /Standard /V 1 /R 2 /P -4 /O <%s> /U <%s> >> /ID [<00> <00>]"
    % (b"12" * 32, b"34" * 32),
)
TWO = raw_pdf(*tree(2))


def data(pdf: bytes) -> str:
    return f"data:application/pdf;base64,{base64.b64encode(pdf).decode()}"


@pytest.fixture(scope="module")
def here() -> Iterator[Running]:
    with running(max_images=3) as served:
        yield served


def ask(path: str, pdf: bytes, images: int = 0) -> dict:
    """A question about a PDF, and a picture so many times, as the clients of a protocol ask it."""
    about = {"filename": "draft.pdf", "file_data": data(pdf)}
    source = {"type": "base64", "media_type": "application/pdf", "data": data(pdf).partition(",")[2]}
    part = {
        CHAT: {"type": "file", "file": about},
        RESPONSES: {"type": "input_file", **about},
        MESSAGES: {"type": "document", "source": source},
    }[path]
    picture = {"type": "image_url", "image_url": {"url": data_url(EXAMPLE)}}
    text = {"type": "input_text" if path == RESPONSES else "text", "text": STAR}
    talk = {"input" if path == RESPONSES else "messages": [{"role": "user", "content": [part, text]}]}
    talk[next(iter(talk))][0]["content"] += [picture] * images
    return {"model": NAME, "max_output_tokens" if path == RESPONSES else "max_tokens": 4} | talk


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_a_pdf_of_a_request_is_its_pages_as_images(here, path):
    """OpenAI's own example of a file, in its client and in the other protocols."""
    if path == CHAT:
        used = here.client().chat.completions.create(**ask(path, TWO)).usage.model_dump()
    else:
        used = here.send("POST", path, json=ask(path, TWO)).json()["usage"]
    names = ("prompt_tokens", "input_tokens", "cache_read_input_tokens")
    positions = embedded().processor.images.plan(275, 138).positions  # of a page at 200 dpi
    assert sum(used.get(name, 0) for name in names) >= 2 * positions


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    ("pdf", "images", "said"),
    [(raw_pdf(*tree(10_000)), 0, "10,000"), (TWO, 2, "pages"), (ENCRYPTED, 0, "password"), (b"", 0, "file")],
    ids=["long", "with images", "encrypted", "empty"],
)
def test_pdfs_that_are_refused(here, pdf, images, said):
    answer = here.send("POST", json=ask(CHAT, pdf, images))
    assert answer.status_code == 400 and said in answer.json()["error"]["message"], answer.text

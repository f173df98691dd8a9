"""Ten drawings by other programs, ten photographs, and questions.

    cd FOLDER && .venv/bin/python prepare.py

Needs chromium, rsvg-convert (librsvg2-bin), convert (imagemagick), dot (graphviz); photographs: gradio's package, the
Rust book's f3.jpg (rustup doc), Debian's lomiri-wallpapers-16.04 (apt-get download; no shapes/outside.py photograph).
"""
import json, shutil, subprocess, tempfile
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).resolve().parent
REFUSAL, NONE = "I only know drawn shapes, words and digits.", "There is none."
rows, more = [], []


def ask(image, question, *right, first=False):
    (rows if first else more).append({"id": f"{image}: {question}", "image": image, "question": question, "right": list(right)})


def canvas(name, width, height, script):
    page = HERE / f".{name}.html"
    page.write_text(f"<body style='margin:0'><canvas id=c width={width} height={height}></canvas><script>"
                    f"const c=document.getElementById('c').getContext('2d');c.fillStyle='white';c.fillRect(0,0,{width},{height});"
                    "const poly=(...p)=>{c.beginPath();p.forEach(([x,y],i)=>i?c.lineTo(x,y):c.moveTo(x,y));c.closePath();};"
                    f"{script}</script>")
    subprocess.run(["chromium", "--headless", "--no-sandbox", "--hide-scrollbars", f"--window-size={width},{height}",
                    f"--screenshot={HERE / name}", page.as_uri()], check=True, capture_output=True, timeout=90)
    page.unlink()


def svg(name, text):
    subprocess.run(["rsvg-convert", "-o", str(HERE / name)], input=text.encode(), check=True)


def magick(name, *arguments):
    subprocess.run(["/usr/bin/convert", *arguments, str(HERE / name)], check=True)


STAR = "50,5 61,38 96,38 68,59 79,93 50,72 21,93 32,59 4,38 39,38"
canvas("canvas1.png", 640, 480, "c.fillStyle='tomato';c.beginPath();c.arc(160,150,80,0,7);c.fill();c.fillStyle='royalblue';"
       "c.fillRect(380,90,150,150);c.fillStyle='gold';poly([320,300],[430,450],[210,450]);c.fill();")
ask("canvas1.png", "How many shapes are there?", "3", first=True)
ask("canvas1.png", "What colour is the square?", "blue")
ask("canvas1.png", "Is the red circle left of the blue square?", "yes")
ask("canvas1.png", "What colour is the star?", NONE)
ask("canvas1.png", "Where is the square?", [380 / 640, 90 / 480, 530 / 640, 240 / 480])
canvas("canvas2.png", 500, 400, "c.fillStyle='#222';c.font='64px serif';c.fillText('apple',150,140);c.fillStyle='rebeccapurple';"
       "poly([250,220],[330,300],[250,380],[170,300]);c.fill();")
ask("canvas2.png", "What word do you see?", "apple", first=True)
ask("canvas2.png", "What shape is purple?", "diamond")
ask("canvas2.png", "Which digit do you see?", NONE)
canvas("canvas3.png", 800, 500, "c.lineWidth=10;c.strokeStyle='green';c.beginPath();c.arc(150,250,100,0,7);c.stroke();"
       "c.strokeStyle='red';c.strokeRect(310,160,180,180);c.strokeStyle='blue';poly([650,140],[760,350],[540,350]);c.stroke();")
ask("canvas3.png", "What colour is the circle?", "green", first=True)
ask("canvas3.png", "How many shapes are there?", "3")
ask("canvas3.png", "Where is the triangle?", [540 / 800, 140 / 500, 760 / 800, 350 / 500])
svg("svg1.png", f"<svg xmlns='http://www.w3.org/2000/svg' width='600' height='600'><rect width='600' height='600' fill='#eef'/>"
    f"<g transform='translate(60 60) scale(2.2)'><polygon points='{STAR}' fill='orange'/></g>"
    "<path d='M400 340h60v60h60v60h-60v60h-60v-60h-60v-60h60z' fill='crimson'/></svg>")
ask("svg1.png", "What colour is the star?", "orange", first=True)
ask("svg1.png", "What shape is red?", "cross")
ask("svg1.png", "Is there a circle?", "no")
svg("svg2.png", "<svg xmlns='http://www.w3.org/2000/svg' width='420' height='300'><rect width='420' height='300' fill='white'/>"
    "<text x='90' y='110' font-family='sans-serif' font-size='60' fill='navy'>lamp</text>"
    "<rect x='150' y='160' width='110' height='110' fill='hotpink' stroke='black' stroke-width='4'/></svg>")
ask("svg2.png", "What word do you see?", "lamp", first=True)
ask("svg2.png", "What colour is the square?", "pink")
svg("svg3.png", "<svg xmlns='http://www.w3.org/2000/svg' width='1600' height='600'><rect width='1600' height='600' fill='#f5f5dc'/>"
    + "".join(f"<circle cx='{x}' cy='300' r='90' fill='{ink}'/>" for x, ink in ((200, "seagreen"), (500, "seagreen"), (800, "black"),
                                                                          (1100, "seagreen"), (1400, "darkorange"))) + "</svg>")
ask("svg3.png", "How many green circles are there?", "3", first=True)
ask("svg3.png", "How many circles are there?", "5")
magick("magick1.png", "-size", "480x480", "xc:lightyellow", "-fill", "blue", "-draw", "circle 140,140 140,60", "-fill", "firebrick",
       "-draw", "rectangle 300,300 400,400")
ask("magick1.png", "What shape is red?", "square", first=True)
ask("magick1.png", "Is the circle bigger than the square?", "yes")
ask("magick1.png", "Is the blue circle above the red square?", "yes")
ask("magick1.png", "Point at the circle.", [140 / 480, 140 / 480])
magick("magick2.png", "-size", "400x600", "xc:white", "-font", "DejaVu-Sans", "-pointsize", "200", "-fill", "purple", "-draw",
       "text 140,240 '7'", "-fill", "#00a000", "-draw", "polygon 200,330 320,540 80,540")
ask("magick2.png", "Which digit do you see?", "7", first=True)
ask("magick2.png", "What colour is the triangle?", "green")
magick("magick3.jpg", "-size", "900x700", "xc:gray20", "-fill", "yellow", "-draw", "circle 250,350 250,200", "-fill", "deeppink", "-draw",
       "polygon 640,180 780,350 640,520 500,350", "-quality", "60")
ask("magick3.jpg", "What colour is the circle?", "yellow", first=True)
ask("magick3.jpg", "Is there a diamond?", "yes")
subprocess.run(["dot", "-Kneato", "-n2", "-Tpng", "-Gdpi=96", "-o", str(HERE / "graphviz.png")], check=True, input=b"""
digraph { bgcolor=white; node [label="" style=filled fixedsize=true width=1.2 height=1.2 penwidth=0]
a [shape=diamond fillcolor=dodgerblue pos="60,180"]; b [shape=star fillcolor=green3 pos="220,180"];
c [shape=triangle fillcolor=red2 pos="60,40"]; d [shape=circle fillcolor=black pos="220,40"]; }""")
ask("graphviz.png", "How many shapes are there?", "4", first=True)
ask("graphviz.png", "What colour is the star?", "green")
ask("graphviz.png", "What shape is black?", "circle")

gradio = Path(find_spec("gradio").submodule_search_locations[0]) / "media_assets" / "images"
rust = next(Path("/root/.rustup/toolchains").glob("*/share/doc/rust/html/embedded-book/assets/f3.jpg"))
with tempfile.TemporaryDirectory() as folder:
    subprocess.run(["apt-get", "download", "-qq", "lomiri-wallpapers-16.04"], cwd=folder, check=True, capture_output=True)
    subprocess.run(["dpkg-deb", "-x", next(Path(folder).glob("*.deb")), folder], check=True)
    walls = Path(folder) / "usr/share/backgrounds"
    photographs = [gradio / "cheetah.jpg", gradio / "cheetah1.jpg", gradio / "tower.jpg", gradio / "lion.jpg", rust,
                   *(walls / f"{name}.jpg" for name in ("Picture_1A_by_freespace", "greentock_by_Peter_Nerlich",
                     "friends_by_Aitzol_Berasategi", "picosdeeuropa_by_Aitzol_Berasategi", "Picture_0B_by_freespace"))]
    questions = ("What is in the picture?", "What animal is this?", "How many people are there?", "Describe the picture.",
                 "What colour is the board?", "How many shapes are there?", "What time is it?", "What colour is the dog?",
                 "Is there a circle?", "What shape is red?")
    for number, (photograph, question) in enumerate(zip(photographs, questions, strict=True), 1):
        name = f"photo{number:02d}.jpg"
        shutil.copy(photograph, HERE / name)
        # "There is none." is right where nothing of the kind is there; "yes", a colour or a number is not.
        ask(name, question, REFUSAL, NONE, *["no"] * (question == "Is there a circle?"), first=True)
        ask(name, "Where is the star?", REFUSAL, NONE)
for name, lines in (("questions.jsonl", rows), ("more.jsonl", more)):
    (HERE / name).write_text("".join(json.dumps(row) + "\n" for row in lines))
    print(name, len(lines))

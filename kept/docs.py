import json
plain={x['name']:x for x in json.load(open('/tmp/rel/ocelli-shapes/results.json'))['families']}
d={x['name']:x for x in json.load(open('/work/runs/e9d/results.json'))['families']}
def f(x): return f"{x['score']:.1%}"
ex={"count":"How many red shapes are there?","colour":"What colour is the star?","shape":"What shape is green?","exists":"Is there a blue circle?","position":"Is the triangle left of the diamond?","size":"Is the circle bigger than the star?","word":"What word do you see?","digit":"Which digit do you see?","compare":"Are there more circles than squares?","describe":"Describe the picture."}
rows=[]
for k,q in ex.items():
    o=f"{k}, other program"
    rows.append(f"| {k} | {q} | {f(plain[k])} | {f(d[k])} | {f(d[o]) if o in d else ''} |")
more=[("box at 0.5","all boxes that were asked for, with an IoU of at least 0.5, and no others"),("box","their mean IoU"),("point","all within 25 thousandths of the image"),("absent","what is not there: \"There is none.\""),("outside image","photographs, charts, screenshots, noise: refused"),("outside question","about something else: refused"),("first question","of a conversation"),("second question","\"And its colour?\""),("third question","the first one again, after two others")]
rows2=[f"| {k} | {q} | {f(d[k])} |" for k,q in more]
table="""It answers ten kinds of English question about a drawing. These are its scores on held-out questions: 2,000 about plain scenes, then 100 of each kind about drawings in colours, fonts and strokes that training never saw, by our own program and by two others (matplotlib, and an SVG library):

| questions about | example | plain | any look | other programs |
|---|---|---|---|---|
"""+"\n".join(rows)+"""

"Describe" is an F1 score over the objects named; the others are exact answers. Plain scenes are 95.0% right in all; with their images blanked it refuses every question. And of the same drawings, 100 questions each:

| | | score |
|---|---|---|
"""+"\n".join(rows2)+"""

Its confidence says 3.9% too much or too little on average there, and 1.1% on plain scenes (the expected calibration error; [what that is](ask.md#how-sure-it-was))."""
cannot="""- **Photographs, screenshots, documents.** It says "I only know drawn shapes, words and digits.", 97 times in 100. Take [a model from the Hub](hub-models.md).
- **Counting more than a few.** It is the kind of question about shapes that it gets wrong most often.
- **Small or unusual print.** It reads two words of three in a font that it has not seen.
- **Exact boxes.** The mean IoU is 0.73: it finds nearly everything, and is a few pixels off.
- **Questions of other kinds**, such as "why" or "what if", and other languages: it refuses most of them.

It is the first of its recipe, and was trained for less long than the recipe says: `configs/world.yaml` goes on."""
trained="""`configs/world.yaml` has the settings. This one was not made in one run: [its card](../checkpoints/ocelli-shapes/README.md) says what came in when, and how many images it saw. [How it learns](train.md#how-a-model-of-drawings-learns)."""
p='docs/embedded-model.md'; s=open(p).read()
s=s.replace("@TABLE@",table).replace("@CANNOT@",cannot).replace("@TRAINED@",trained)
open(p,'w').write(s)

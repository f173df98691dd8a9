"""fin.py PLAIN.json DRAWINGS.json: the numbers of docs and README."""
import json, re, sys
plain_all, d_all = (json.load(open(p)) for p in sys.argv[1:3])
plain = {x['name']: x for x in plain_all['families']}; d = {x['name']: x for x in d_all['families']}
f = lambda x: f"{x['score']:.1%}"
n = d['count']['n']; total = d_all['n']
ex = {"count":"How many red shapes are there?","colour":"What colour is the star?","shape":"What shape is green?","exists":"Is there a blue circle?","position":"Is the triangle left of the diamond?","size":"Is the circle bigger than the star?","word":"What word do you see?","digit":"Which digit do you see?","compare":"Are there more circles than squares?","describe":"Describe the picture."}
rows = []
for k, q in ex.items():
    o = f"{k}, other program"
    rows.append(f"| {k} | {q} | {f(plain[k])} | {f(d[k])} | {f(d[o]) if o in d else ''} |")
more = [("box at 0.5","one thing: the IoU is at least 0.5 (Acc@0.5)"),("box","one thing: mean IoU"),("boxes","several things: F1 at an IoU of 0.5"),("point","one thing: the point lies in its box"),("absent","what is not there: \"There is none.\""),("outside image","photographs, charts, screenshots, noise: refused"),("outside question","about something else: refused"),("first question","of a conversation"),("second question","\"And its colour?\""),("third question","the first one again, after two others")]
rows2 = [f"| {k} | {q} | {f(d[k])} |" for k, q in more]
ece = lambda r: f"{r['calibration']['ece']:.1%}"
p = 'docs/embedded-model.md'; s = open(p).read()
a = s.index("It answers ten kinds of English question"); b = s.index("## What it cannot do")
s = s[:a] + f"""It answers ten kinds of English question about a drawing. These are its scores on held-out questions: {plain_all['n']:,} about plain scenes, then {n} of each kind about drawings in colours, fonts and strokes that training never saw, by our own program and by two others (matplotlib, and an SVG library):

| questions about | example | plain | any look | other programs |
|---|---|---|---|---|
""" + "\n".join(rows) + f"""

"Describe" is an F1 score over the objects named; the others are exact answers. Plain scenes are {plain_all['score']:.1%} right in all; with their images blanked it refuses every question. And of the same drawings, {n} questions each:

| | | score |
|---|---|---|
""" + "\n".join(rows2) + f"""

Its confidence says {ece(d_all)} too much or too little on average there, and {ece(plain_all)} on plain scenes (the expected calibration error; [what that is](ask.md#how-sure-it-was)).

""" + s[b:]
open(p, 'w').write(s)
p = 'README.md'; s = open(p).read()
s, k = re.subn(r"The embedded model answers [\d.]+% of 2,000 held-out questions about plain drawings and [\d.]+% of [\d,]+ about drawings in any look", f"The embedded model answers {plain_all['score']:.1%} of 2,000 held-out questions about plain drawings and {d_all['score']:.1%} of {total:,} about drawings in any look", s); assert k == 1
open(p, 'w').write(s)
p = 'docs/ask.md'; s = open(p).read()
s, k = re.subn(r"expected calibration error \(ECE\) is [\d.]+% on 2,000 held-out questions about plain drawings, and [\d.]+% on [\d,]+ about", f"expected calibration error (ECE) is {ece(plain_all)} on 2,000 held-out questions about plain drawings, and {ece(d_all)} on {total:,} about", s); assert k == 1
open(p, 'w').write(s)
print(plain_all['score'], d_all['score'], plain_all.get('controls'))
for r in rows + rows2: print(r)

"""PLAIN.json DRAWINGS_DIR: tables of docs/embedded-model.md; prints figures for sentences."""
import json, re, sys
plain_all=json.load(open(sys.argv[1])); d_all=json.load(open(sys.argv[2]))
plain={x['name']:x for x in plain_all['families']}; d={x['name']:x for x in d_all['families']}
f=lambda x:f"{x['score']:.1%}"
p='docs/embedded-model.md'; s=open(p).read()
n=d['count']['n']
def row(m):
    k=m[1]; o=f"{k}, other program"
    return f"| {k} | {m[2]} | {f(plain[k])} | {f(d[k])} | {f(d[o]) if o in d else ''} |"
a=s.index("It answers ten kinds"); b=s.index("## What it cannot do")
part=s[a:b]
part=re.sub(r"^\| (\w+) \| ([^|]+) \| [\d.]+% \| [\d.]+% \| (?:[\d.]+%)? \|$",row,part,flags=re.M)
part=re.sub(r"^\| ([\w .]+) \| ([^|]+) \| [\d.]+% \|$",lambda m:f"| {m[1]} | {m[2]} | {f(d[m[1]])} |",part,flags=re.M)
part=part.replace("then 200 of each kind",f"then {n:,} of each kind").replace("And 200 questions of each",f"And {n:,} questions of each")
open(p,'w').write(s[:a]+part+s[b:])
print('plain',plain_all['score'],plain_all['calibration']['ece'],'drawings',d_all['score'],d_all['n'],d_all['calibration']['ece'])
for k,v in d.items(): print(k,f(v),v['n'])

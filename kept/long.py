"""MODEL N: things named by "Describe the picture with boxes." in held-out drawings of 5 to 8 things."""
import sys; sys.path.insert(0,'.')
import torch, random
torch.set_num_threads(1)
from shapes import looks, places
from shapes.drawing import box_of
from shapes.drawings import paint, random_aspect, sample_drawing
from shapes.places import DESCRIBE, FORM, name
from eval.boxes import iou
from data.processor import Processor
from models.vision_language_model import VisionLanguageModel
src,n=sys.argv[1],int(sys.argv[2])
model=VisionLanguageModel.from_pretrained(src,dtype=torch.float32); p=Processor.from_pretrained(src,config=model.config)
from collections import defaultdict
tab=defaultdict(list); i=0; k=0
while k<n:
    i+=1; rng=random.Random(7770000+i); scene=sample_drawing(rng,looks.HELDOUT,1.0,random_aspect(rng),plain=0.0)
    if len(scene.things)<5: continue
    k+=1; im=paint(scene,rng)
    a=p.decode(model.generate(**p.prepare([{"role":"user","content":[{"type":"image","image":im},{"type":"text","text":DESCRIBE}]}]),max_new_tokens=256)[0]).strip()
    got=FORM.read(a,(1000,1000)); got=list(getattr(got,'boxes',got))
    true=[(name(t),tuple(1000*x for x in box_of(t,scene.aspect))) for t in scene.things]
    left=list(true); hit=0; named=0
    for b in got:
        box=getattr(b,'box',None)
        best=max(left,key=lambda t:iou(box,t[1]),default=None)
        if best and iou(box,best[1])>=0.5: left.remove(best); hit+=1; named+=best[0]==b.label
    tab[len(true)].append((len(got),2*hit/(len(got)+len(true)),2*named/(len(got)+len(true))))
for t in sorted(tab): print(t,len(tab[t]),'listed %.2f F1 %.3f with name %.3f'%tuple(sum(x)/len(x) for x in zip(*tab[t])))

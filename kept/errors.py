import sys; sys.path.insert(0,'.')
import torch, json
from collections import defaultdict
torch.set_num_threads(1)
import shapes.heldout as H
from eval.drawings import score_drawing
from data.processor import Processor
from models.vision_language_model import VisionLanguageModel
src,n=sys.argv[1],int(sys.argv[2]); fams=sys.argv[3].split('|')
model=VisionLanguageModel.from_pretrained(src,dtype=torch.float32)
p=Processor.from_pretrained(src,config=model.config)
seed=int(sys.argv[4]); out=[]
import random
for fam in fams:
    sc=[]
    for i in range(n):
        made,attempt=None,0
        while made is None:
            number=H.HELDOUT_SEED+(seed<<32)+(1<<31)+i*1000+attempt
            made,attempt=H._question(fam,number),attempt+1
        rng=random.Random(number); scene=H.sample_drawing(rng,H.looks.HELDOUT,1.0,H.random_aspect(rng),plain=0.0)
        im=made.image(); msgs=[{"role":"user","content":[{"type":"image","image":im},{"type":"text","text":made.qa.question}]}]
        a=p.decode(model.generate(**p.prepare(msgs),max_new_tokens=128)[0]).strip()
        s=score_drawing(made,a); sc.append(s)
        w=scene.first('word')
        out.append(dict(fam=fam,size=im.size,aspect=scene.aspect,s=s,q=made.qa.question,t=made.qa.answer,a=a,n=len(scene.things),wh=(w.height*min(im.size)*max(1,1/scene.aspect) if 0 else w.height) if w else None,font=(w.font.split('/')[-1] if w else None),upper=w.upper if w else None, nshapes=len(scene.shapes())))
    print(fam, sum(sc)/n, flush=True)
json.dump(out,open(sys.argv[5],'w'))

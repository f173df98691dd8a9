import sys; sys.path.insert(0,'.')
import torch, json
from collections import Counter, defaultdict
torch.set_num_threads(1)
from shapes.heldout import *
from shapes.heldout import _read,_iou,_distance
from inference.checkpoint import open_checkpoint
from data.processor import Processor
from models.vision_language_model import VisionLanguageModel
src,n=sys.argv[1],int(sys.argv[2]); fams=sys.argv[3].split('|')
model=VisionLanguageModel.from_pretrained(src,dtype=torch.float32)
p=Processor.from_pretrained(src,config=model.config)
import shapes.heldout as H
seed=int(sys.argv[4]) if len(sys.argv)>4 else 7
sc=defaultdict(list); out=[]
for fam in fams:
    for i in range(n):
        made,attempt=None,0
        while made is None:
            number=H.HELDOUT_SEED+(seed<<32)+(1<<31)+i*1000+attempt
            made,attempt=H._question(fam,number),attempt+1
        msgs=[]; im=made.image()
        turns=[*made.earlier,made.qa]
        for k,t in enumerate(turns):
            content=([{"type":"image","image":im}] if k==0 else [])+[{"type":"text","text":t.question}]
            msgs.append({"role":"user","content":content})
            if k<len(turns)-1: msgs.append({"role":"assistant","content":[{"type":"text","text":t.answer}]})
        a=p.decode(model.generate(**p.prepare(msgs),max_new_tokens=128)[0]).strip()
        s=score_drawing(fam,made.qa,a); sc[fam].append(s)
        out.append((fam,im.size,s,made.qa.question,made.qa.answer,a))
    print(fam, sum(sc[fam])/n, flush=True)
json.dump(out,open(sys.argv[5] if len(sys.argv)>5 else '/root/errs.json','w'))

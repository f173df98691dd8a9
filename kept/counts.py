import sys; sys.path.insert(0,'.')
import torch
from collections import defaultdict
torch.set_num_threads(1)
from shapes import heldout_questions, render, score
from data.processor import Processor
from models.vision_language_model import VisionLanguageModel
src=sys.argv[1]
model=VisionLanguageModel.from_pretrained(src,dtype=torch.float32); p=Processor.from_pretrained(src,config=model.config)
tab=defaultdict(lambda:defaultdict(int)); kind=defaultdict(list)
qs=[(s,q) for s,q in heldout_questions(int(sys.argv[2])) if q.family in ('count',)]
for s,q in qs:
    a=p.decode(model.generate(**p.prepare([{"role":"user","content":[{"type":"image","image":render(s,256)},{"type":"text","text":q.question}]}]),max_new_tokens=8)[0]).strip()
    tab[q.answer][a]+=1
    import re
    w='shapes' if re.search(r'(many|the|of) shapes',q.question) else 'other'
    kind[w].append(a==q.answer)
for k in sorted(tab): print(k,dict(tab[k]))
print({k:(sum(v)/len(v),len(v)) for k,v in kind.items()})

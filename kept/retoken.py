"""retoken.py OLD NEW: the same weights under the tokenizer that the code builds now."""
import sys; sys.path.insert(0,'.')
import dataclasses, yaml, torch, shutil
from safetensors.torch import load_file, save_file
from shapes.training import *
names={f.name for f in dataclasses.fields(TrainConfig)}
config=TrainConfig(**{k:v for k,v in yaml.safe_load(open('configs/world.yaml')).items() if k in names})
old,new=sys.argv[1:]
proc=build_processor(config); model=build_model(config,proc.tokenizer); model.save_pretrained(new,proc)
a=load_file(old+'/model.safetensors'); b=load_file(new+'/model.safetensors')
va=Processor.from_pretrained(old).tokenizer.get_vocab(); vb=proc.tokenizer.get_vocab()
print(len(va),len(vb),'gone',[t for t in va if t not in vb])
fresh=[]
for k,v in b.items():
    if a[k].shape==v.shape and v.shape[0]!=len(vb): b[k]=a[k]; continue
    assert v.shape[0]==len(vb),k
    for t,i in vb.items():
        src=va.get(t, va.get(t.replace('Ġ','')))
        if src is None: fresh.append(t)
        else: v[i]=a[k][src]
    b[k]=v
print('fresh',fresh, 'from bare', [t for t in vb if t not in va])
save_file({k:v.contiguous() for k,v in b.items()},new+'/model.safetensors',metadata={'format':'pt'})

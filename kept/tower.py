import sys; sys.path.insert(0,'.')
import torch, dataclasses, yaml
from safetensors.torch import load_file
from shapes.training import *
from shapes.training import _PARTS
from models.vision_language_model import VisionLanguageModel
torch.set_num_threads(int(sys.argv[2])); N=int(sys.argv[3])
src=sys.argv[1]
names={f.name for f in dataclasses.fields(TrainConfig)}
config=TrainConfig(**{k:v for k,v in yaml.safe_load(open('configs/world.yaml')).items() if k in names})
config=dataclasses.replace(config, vision_pictures=0, curriculum_pictures=1)
model=VisionLanguageModel.from_pretrained(src,dtype=torch.float32)
proc=Processor.from_pretrained(src,config=model.config)
loss=ShapesLoss(model,config,proc.tokenizer); own=loss.state_dict()
for k,v in load_file(src+'.heads.safetensors').items(): own[k].copy_(v)
for split in ('train','heldout'):
    acc={}
    for words in (0.0,1.0):
        sc=dataclasses.replace(stream_config(config),seed=99,batch_size=4,only_words=words,outside=0.0,curriculum_pictures=0,split=split)
        stream=ShapesStream(sc,proc.tokenizer,chat_pieces(proc.tokenizer,64),images=proc.images)
        for i in range(N):
            b=stream.batch(i); n=len(b['pixel_values'])//4
            with torch.no_grad():
                pred=loss.head(model.vision_model(b['pixel_values'])); d=b['dense']
            kinds, colours, geom, centre, alike, edges, letters = pred.split(_PARTS,-1)
            whole=torch.arange(len(d))%n==n-1
            for name,sel in (('whole',whole),('local',~whole)):
                t=d[sel]
                if words==0:
                    fg=t[...,0]>0
                    acc.setdefault(f'{name} kind',[]).append(((kinds[sel].argmax(-1)==t[...,0])[fg]).float())
                    acc.setdefault(f'{name} colour',[]).append(((colours[sel].argmax(-1)==t[...,1])[fg]).float())
                    a=alike[sel].unflatten(-1,(3,8)).argmax(-1)+1
                    for j,w in enumerate(('name','colour','both')):
                        c=t[...,6+j]; k=c>0
                        acc.setdefault(f'{name} count {w}',[]).append((a[...,j]==c)[k].float())
                        k=c>2; acc.setdefault(f'{name} count>2 {w}',[]).append((a[...,j]==c)[k].float())
                k=t[...,13]>=0
                acc.setdefault(f'{name} letter words={words}',[]).append((letters[sel].argmax(-1)==t[...,13])[k].float())
    print(split, {k:round(torch.cat(v).mean().item(),3) for k,v in acc.items()})

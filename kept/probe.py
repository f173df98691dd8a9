import sys; sys.path.insert(0,'.')
import torch, dataclasses, yaml
from safetensors.torch import load_file
from shapes.training import *
from models.vision_language_model import VisionLanguageModel
torch.set_num_threads(1)
src=sys.argv[1]
names={f.name for f in dataclasses.fields(TrainConfig)}
config=TrainConfig(**{k:v for k,v in yaml.safe_load(open('configs/world.yaml')).items() if k in names})
config=dataclasses.replace(config, vision_pictures=0, curriculum_pictures=1)
model=VisionLanguageModel.from_pretrained(src,dtype=torch.float32)
proc=Processor.from_pretrained(src,config=model.config)
loss=ShapesLoss(model,config,proc.tokenizer); own=loss.state_dict()
for k,v in load_file(src+'.heads.safetensors').items(): own[k].copy_(v)
sc=dataclasses.replace(stream_config(config),seed=99,batch_size=4,only_words=0.0,outside=0.0,curriculum_pictures=0)
stream=ShapesStream(sc,proc.tokenizer,chat_pieces(proc.tokenizer,64),images=proc.images)
err={}
def add(k,e): err.setdefault(k,[]).append(e)
edges=[]
for i in range(12):
    b=stream.batch(i)
    with torch.no_grad():
        px=b['pixel_values']; patches=model.vision_model(px)
        pred=loss.head(patches); d=b['dense']
        ed=pred[...,-(4+26):-26]-d[...,9:13]
        fg=(d[...,0]>0)&(d[...,0]<7)
        edges.append(ed[fg].abs())
    n=len(px)//4
    if n!=5: continue
    # hidden: run with grad enabled forward hooks
    ids=b['input_ids']
    x=model.place_features(ids,model.language_model.embed_tokens(ids),model.projector(patches))
    model.language_model(x,attention_mask=branch_mask(b['segment_ids']),position_ids=b['position_ids'])
    with torch.no_grad():
        for name,head in (('image',loss.places),('noun',loss.noun_places)):
            h=head._hidden
            p=head.linear(head.norm(h)).view(*h.shape[:2],6,100).softmax(-1)
            v=(p*(torch.arange(100.)*10+5)).sum(-1)
            if name=='noun':
                t=b['noun_places'].float(); k=(t[...,0]>=0)&(b['labels']<0)
                add('noun',(v[k]-t[k]).abs()); k=(t[...,0]>=0)&(b['labels']>=0)
                if k.any(): add('letter',(v[k]-t[k]).abs())
            else:
                im=ids==model.config.image_token_id
                t=b['places'].float().view(4,5,64,6); vv=v[im].view(4,5,64,6); k=t[...,0]>=0
                rows,cols=(2,2)
                for tile in range(5):
                    kk=k[:,tile]; 
                    if tile==4: add('global',(vv[:,4][kk]-t[:,4][kk]).abs()); continue
                    r,c=divmod(tile,2); lo=torch.tensor([c,r,c,r,c,r])*500.; 
                    T=t[:,tile][kk]; E=(vv[:,tile][kk]-T).abs(); inside=(T>=lo-5)&(T<=lo+505)
                    add('in',E[inside][:,None]); add('out',E[~inside][:,None])
e=torch.cat(edges); print('tower edges, in eighths of a tile: mean', e.mean().item(),'median',e.median().item())
for k,v in err.items(): v=torch.cat(v); print(k, len(v), 'mean',v.mean(0).round().tolist(),'median',v.median(0)[0].round().tolist())

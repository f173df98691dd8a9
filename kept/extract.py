"""state of a run -> checkpoint with the averaged tower (and LM unless fresh) + heads.safetensors"""
import sys, torch
sys.path.insert(0, ".")
from pathlib import Path
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from safetensors.torch import save_file
from models.vision_language_model import VisionLanguageModel
from data.processor import Processor
run, base, out, what = sys.argv[1:5]   # what: tower | all
step = sorted(Path(run).glob('*/step-*'))[-1]; print(step)
dcp_to_torch_save(str(step), '/tmp/state.pt')
state = torch.load('/tmp/state.pt', weights_only=False)
def flat(d, pre=''):
    for k,v in d.items():
        if isinstance(v, dict): yield from flat(v, pre+k+'/')
        else: yield pre+k, v
state = dict(flat(state))
avg = {k.removeprefix('average/'):v for k,v in state.items() if k.startswith('average/')}
print(len(avg), list(avg)[:4])
heads = {k:v.contiguous() for k,v in avg.items() if not k.startswith('model.')}
save_file(heads, out+'.heads.safetensors'); print({k:tuple(v.shape) for k,v in heads.items()})
m = VisionLanguageModel.from_pretrained(base, dtype=torch.float32)
own = m.state_dict()
n=0
for k,v in avg.items():
    if k.startswith('model.'):
        k=k.removeprefix('model.')
        if what=='all' or k.startswith('vision_model.'):
            own[k].copy_(v); n+=1
print('copied', n, 'of', len(own))
m.save_pretrained(out, Processor.from_pretrained(base))
for f in ('generation_config.json',): print(open(out+'/'+f).read())

"""unpack.py FOLDER (run in a checkout): weights.safetensors beside this file as a checkpoint that train.py goes on from with
--init-from FOLDER, and FOLDER.heads.safetensors for stage2.py."""
import dataclasses, sys
from pathlib import Path
sys.path.insert(0, str(Path.cwd()))
import torch, yaml
from safetensors.torch import load_file, save_file
from shapes.training import build_model, build_processor
from training.config import TrainConfig
names = {f.name for f in dataclasses.fields(TrainConfig)}
said = yaml.safe_load(open("configs/world.yaml"))
config = TrainConfig(**{k: v for k, v in said.items() if k in names})
processor = build_processor(config)
model = build_model(config, processor.tokenizer)
out = sys.argv[1]
model.save_pretrained(out, processor)
packed = load_file(Path(__file__).with_name("weights.safetensors"))
stored = load_file(out + "/model.safetensors")
for name, w in stored.items():
    v = packed["model/" + name]
    if v.dtype == torch.int8:
        s = packed["model/" + name + ":scale"]
        v = v.float() * s.view(-1, *[1] * (v.dim() - 1))
    assert v.shape == w.shape, name
    stored[name] = v.to(w.dtype).contiguous()
save_file(stored, out + "/model.safetensors", metadata={"format": "pt"})
heads = {k.removeprefix("heads/"): v.float() for k, v in packed.items() if k.startswith("heads/")}
save_file(heads, out + ".heads.safetensors")
print(len(stored), "tensors;", len(heads), "of the heads")

"""pack.py CHECKPOINT HEADS OUT: weights as int8 rows with a scale each, vectors as they are."""
import sys, torch
from safetensors.torch import load_file, save_file
checkpoint, heads, out = sys.argv[1:]
packed = {}
for prefix, file in (("model/", checkpoint + "/model.safetensors"), ("heads/", heads)):
    for name, w in load_file(file).items():
        w = w.float()
        if w.dim() < 2 or prefix == "heads/":
            packed[prefix + name] = w.to(torch.float16 if prefix == "heads/" else torch.float32)
        else:
            rows = w.flatten(1)
            scale = rows.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
            packed[prefix + name] = (rows / scale).round().to(torch.int8).view(w.shape)
            packed[prefix + name + ":scale"] = scale[:, 0]
save_file(packed, out)

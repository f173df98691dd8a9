"""deepen.py OLD NEW AT: a checkpoint with one more decoder block before index AT, which changes nothing yet."""
import sys, json, shutil, re
import torch
from safetensors.torch import load_file, save_file
old, new, at = sys.argv[1], sys.argv[2], int(sys.argv[3])
shutil.copytree(old, new, dirs_exist_ok=True)
t = load_file(old + "/model.safetensors"); out = {}
g = torch.Generator().manual_seed(1)
for k, v in t.items():
    m = re.search(r"(text_model\.layers\.)(\d+)(\..*)", k)
    if not m: out[k] = v; continue
    n = int(m[2]); 
    out[k.replace(m[1] + m[2] + m[3], f"{m[1]}{n + (n >= at)}{m[3]}")] = v
    if n == at:
        w = v.clone()
        if "o_proj" in k or "down_proj" in k: w.zero_()
        elif w.dim() == 2: w = torch.randn(w.shape, generator=g) * w.shape[1] ** -0.5
        else: w.fill_(1.0)
        out[k] = w
c = json.load(open(old + "/config.json")); c["text_config"]["num_hidden_layers"] += 1
json.dump(c, open(new + "/config.json", "w"), indent=2)
save_file({k: v.contiguous() for k, v in out.items()}, new + "/model.safetensors", metadata={"format": "pt"})
print(len(t), len(out))

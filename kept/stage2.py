"""train.py with the heads of HEADS loaded."""
import os, sys
sys.path.insert(0, os.getcwd())
from safetensors.torch import load_file
import train, shapes.training as st
before = st.ShapesLoss.__init__
def patched(self, model, config, *rest):
    before(self, model, config, *rest)
    heads = load_file(os.environ["HEADS"]); own = self.state_dict()
    for k, v in heads.items(): own[k].copy_(v)
st.ShapesLoss.__init__ = patched
if __name__ == "__main__": train.main(sys.argv[1:])

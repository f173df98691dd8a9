import json,sys
rows=[json.loads(l) for l in open(sys.argv[1])]
rows=[r for r in rows if 'loss' in r]
k=int(sys.argv[2]) if len(sys.argv)>2 else 5
names=['loss','dense_loss','patch_kind','patch_count','patch_letter','grid_loss','noun_loss','pair_loss','place_loss','noun_place_loss','grad_norm','images_per_second']
print('step  ',' '.join(n[:11].rjust(11) for n in names))
for i in range(0,len(rows),k):
    g=rows[i:i+k]
    print(str(g[-1]['step']).rjust(6),' '.join(f"{sum(r[n] for r in g)/len(g):11.3f}" for n in names), f"{g[-1]['matrix_lr_projector']:.4f}")

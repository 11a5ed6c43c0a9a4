"""A small lean ViT on bundled images: 3 layers, 8 heads of dimension 16, d_model 96, MLP 192.

Command:   python -m leanformer.train --config=configs/quickstart.py --workdir=runs/quickstart   (or: make demo)
Data:      10,000 training and 2,000 test images of Fashion-MNIST, in the package.
Hardware:  two CPU cores, about 3 minutes.
Expected:  top-1 85 to 87 % on the 2,000 test images (study/LOG.md says which run measured what).
Counts:    269,194 parameters.
"""

from leanformer import config


def get_config() -> config.ConfigDict:
    c = config.base()
    c.batch_size = 128
    c.total_epochs = 30.0
    c.dtype = "float32"  # CPUs have no fast bfloat16
    c.model.update(image_size=28, patch_size=7, channels=1, num_classes=10)
    c.model.update(width=96, depth=3, num_heads=8, head_dim=16, mlp_dim=192, drop_path=0.0)
    c.data.update(name="bundled:fashion_mnist", train_split="train", eval_split="t10k")
    c.data.update(mean=(0.286,), std=(0.353,), crop_fraction=1.0, workers=0)
    c.augment.update(crop_scale=(0.85, 1.0), rand_magnitude=0.0, mixup=0.0, cutmix=0.0)
    c.optim.update(lr=2e-3, warmup_epochs=2.0, weight_decay=0.05)
    c.eval.update(every=200, batch_size=512)  # 8, 16, ... devices share it out evenly
    c.checkpoint.every = 200
    c.probe.every = 500
    return c

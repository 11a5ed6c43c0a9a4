"""A small lean ViT for one's own images at 224 pixels on one GPU: 6 layers, 12 heads of dimension 64, d_model 384.

Command:   python -m leanformer.train --config=configs/own_images.py --workdir=DIR --config.data.name=folder:FOLDER
Data:      FOLDER/train/CLASS/*.jpg and FOLDER/val/CLASS/*.jpg; docs/own_images.md goes through it step by step. The
           number of classes is the number of folders in FOLDER/train.
Hardware:  one GPU; not measured.
Arguments: few=True, for few or small images, crops at least half of the image, without RandAugment, mixup and CutMix.
Expected:  depends on the images; nothing is claimed. From scratch, expect to need thousands per class.
Counts:    14,566,276 parameters with 4 classes.
"""

from leanformer import config


def get_config(arguments: str = "") -> config.ConfigDict:
    few = config.arguments(arguments, few=False)["few"]
    c = config.base()
    c.batch_size = 128
    c.total_epochs = 100.0
    c.model.update(width=384, depth=6, num_heads=12, head_dim=64, mlp_dim=1536, num_classes=0)
    c.data.update(name="folder:data/images", train_split="train", eval_split="val")
    if few:
        c.augment.update(crop_scale=(0.5, 1.0), rand_magnitude=0.0, mixup=0.0, cutmix=0.0)
    c.optim.update(lr=1e-3, warmup_epochs=5.0, weight_decay=0.05)
    c.eval.update(every=0, every_epochs=1.0, batch_size=128)
    c.checkpoint.update(every=0, every_epochs=1.0)
    c.probe.update(every=0, every_epochs=5.0)
    return c

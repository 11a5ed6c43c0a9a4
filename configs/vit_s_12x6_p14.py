"""ViT-S/14 with layer scale, the shape of DINOv2-S: 12 layers, 6 heads of dimension 64, MLP 1536; on bundled images.

Here to probe trained weights of that shape (`python -m study.trained.packaged --name=vit_s14`); it can be trained too.

Command:   python -m leanformer.train --config=configs/vit_s_12x6_p14.py --workdir=DIR
Data:      10,000 training and 2,000 test images of Fashion-MNIST, in the package, enlarged to 224 pixels.
Hardware:  one A100 about half an hour. By arithmetic at 40 % of the bfloat16 peak, not measured.
Expected:  no published figure for this model on these images. Not trained here.
Counts:    21,632,650 parameters.
"""

from leanformer import config


def get_config() -> config.ConfigDict:
    c = config.base()
    c.total_epochs = 100.0
    c.model.update(patch_size=14, num_classes=10, width=384, num_heads=6, mlp_dim=1536, layer_scale=1.0)
    c.data.update(name="bundled:fashion_mnist", train_split="train", eval_split="t10k", crop_fraction=1.0)
    c.data.update(mean=config.IMAGENET_MEAN, std=config.IMAGENET_STD)
    return c

"""A ViT for CIFAR-10 from scratch, of ViT-Lite-7/4's shape: 7 layers, 4 heads of dimension 64, MLP 512, patches of 4.

Command:   python -m leanformer.train --config=configs/cifar10.py --workdir=DIR
Data:      tfds:cifar10, prepared once by python -m leanformer.prepare build --config=configs/cifar10.py; or folders
           FOLDER/train/CLASS/ and FOLDER/test/CLASS/ of images, by --config.data.name=folder:FOLDER.
Surface:   forty shapes of this width, and which of heads, head width and depth pay, as on the quickstart's images:
               python -m study.shapes.surface --config=cifar10 --budgets=1.7e6,3.7e6 --epochs=200 --out=DIR
           with --set=data.name=folder:FOLDER if the images are in folders. The same command resumes.
Hardware:  one H100 about 2 minutes, the surface about 2 hours. By arithmetic at 20 % of the bfloat16 peak, input and
           compilation not counted; not measured.
Expected:  not trained here. Published for this shape: 91.38 % top-1 in 200 epochs (ViT-Lite-7/4, arXiv 2104.05704, its
           authors' repository), by a recipe that this one is near to and does not copy.
Counts:    3,722,250 parameters.
"""

from leanformer import config


def get_config() -> config.ConfigDict:
    c = config.base()
    c.batch_size = 512
    c.total_epochs = 200.0
    c.model.update(image_size=32, patch_size=4, num_classes=10)
    c.model.update(width=256, depth=7, num_heads=4, head_dim=64, mlp_dim=512)
    c.data.update(name="tfds:cifar10", train_split="train", eval_split="test", crop_fraction=1.0)
    c.data.update(mean=(0.4914, 0.4822, 0.4465), std=(0.247, 0.2435, 0.2616))  # of the training images
    c.augment.crop_scale = (0.4, 1.0)
    c.optim.update(lr=1e-3, warmup_epochs=10.0, weight_decay=0.05)
    c.eval.every = 1000
    c.checkpoint.every = 1000
    c.probe.every = 5000
    return c

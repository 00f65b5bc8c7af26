"""Images: data, classifiers, denoisers, their training, evaluation, samples, figures and commands.

config.py    configurations of models    models/    classifier, denoiser, diffusion, recipes    sampler.py   samples
data/        the corpus on disk, augmentation, batches    train/   objectives, and evaluations during training
latents.py   an autoencoder of diffusers: images to latents, and back
evaluate/    accuracy, distances of samples    report/   pages    study.py   ladders    throughput.py   speed
hf.py        ViT of transformers and timm      cli/      commands

The core finds all this by `OFFERS` (`linnet.companions`). This module imports nothing, so that `--help` is instant.
"""

OFFERS = {
    "kinds": {
        "classifier": "linnet.vision.models:CLASSIFIER",
        "denoiser": "linnet.vision.models:DENOISER",
    },
    "objective_kinds": {"images": "classifier", "diffusion": "denoiser"},
    "recipes": {"dit": "linnet.vision.models.recipes:dit", "vit": "linnet.vision.models.recipes:vit"},
    "objectives": {
        "images": "linnet.vision.train:ImageObjective",
        "diffusion": "linnet.vision.train:DiffusionObjective",
    },
    "studies": {"images": "linnet.vision.study:ImageStudyConfig"},
    "pages": {
        "classifier": "linnet.vision.report:write_classifier",
        "denoiser": "linnet.vision.report:write_denoiser",
    },
    "tables": {
        "images": "linnet.vision.cli.evaluate:show_images",
        "samples": "linnet.vision.cli.evaluate:show_samples",
    },
    "layouts": {"timm": "linnet.vision.hf:TIMM_LAYOUT", "vit": "linnet.vision.hf:VIT_LAYOUT"},
    "exports": {"vit": "linnet.vision.hf:export_vit", "timm": "linnet.vision.hf:export_timm"},
    "demos": {"vision": "linnet.vision.cli.demo:run_demo"},
    "commands": {
        "sample": "linnet.vision.cli.sample:sample",
        "data images": "linnet.vision.cli.data:prepare_images",
        "data latents": "linnet.vision.cli.data:encode_latents",
        "evaluate images": "linnet.vision.cli.evaluate:images",
        "evaluate samples": "linnet.vision.cli.evaluate:samples",
        "bench vision": "linnet.vision.cli.bench:vision",
    },
}

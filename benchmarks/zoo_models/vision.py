"""Image and video models of torchvision and timm."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
from torch import nn

from zoo_models.registry import BATCH, Example, Reference, ZooModel, entry, image

MODELS: list[ZooModel] = []
CLASSES = 10

TORCHVISION: dict[str, tuple[int, dict[str, Any]]] = {
    "alexnet": (64, {}),
    "resnet18": (64, {}),
    "resnet50": (64, {}),
    "resnext50_32x4d": (64, {}),
    "inception_v3": (299, {"aux_logits": True, "init_weights": False}),
    "googlenet": (96, {"aux_logits": True, "init_weights": False}),
    "densenet121": (64, {}),
    "efficientnet_b0": (64, {}),
    "efficientnet_v2_s": (64, {}),
    "mobilenet_v2": (64, {}),
    "mobilenet_v3_small": (64, {}),
    "mnasnet0_5": (64, {}),
    "regnet_y_400mf": (64, {}),
    "shufflenet_v2_x0_5": (64, {}),
    "squeezenet1_1": (64, {}),
    "convnext_tiny": (64, {}),
    "swin_v2_t": (64, {}),
}

TIMM: dict[str, tuple[int, dict[str, Any]]] = {
    "vit_tiny_patch16_224": (64, {"img_size": 64, "drop_path_rate": 0.1, "drop_rate": 0.1}),
    "vit_relpos_small_patch16_224": (64, {"img_size": 64, "depth": 4}),
    "deit_tiny_distilled_patch16_224": (64, {"img_size": 64, "depth": 4}),
    "beit_base_patch16_224": (64, {"img_size": 64, "depth": 4, "embed_dim": 96, "num_heads": 3}),
    "eva02_tiny_patch14_224": (56, {"img_size": 56, "depth": 4}),
    "cait_xxs24_224": (64, {"img_size": 64, "depth": 4}),
    "xcit_nano_12_p16_224": (64, {"img_size": 64}),
    "inception_v3": (96, {}),
    "inception_resnet_v2": (96, {}),
    "convnext_atto": (64, {"drop_path_rate": 0.1}),
    "swin_tiny_patch4_window7_224": (56, {"img_size": 56, "drop_path_rate": 0.1}),
    "mobilevit_xxs": (64, {}),
    "mobilevitv2_050": (64, {}),
    "efficientformer_l1": (224, {}),
    "mixer_s32_224": (64, {"img_size": 64}),
    "gmlp_ti16_224": (64, {"img_size": 64}),
    "coatnet_pico_rw_224": (64, {"img_size": 64}),
    "levit_128s": (224, {}),
    "pvt_v2_b0": (64, {}),
    "poolformer_s12": (64, {}),
    "edgenext_xx_small": (64, {}),
    "focalnet_tiny_srf": (64, {}),
    "nfnet_l0": (64, {}),
    "res2net50_26w_4s": (64, {}),
    "resnest14d": (64, {}),
    "skresnet18": (64, {}),
    "dpn48b": (64, {}),
    "dla46_c": (64, {}),
    "hrnet_w18_small": (64, {}),
    "repvgg_a0": (64, {}),
    "ghostnet_050": (64, {}),
    "hardcorenas_a": (64, {}),
    "fastvit_t8": (64, {}),
    "rexnet_100": (64, {}),
    "tresnet_m": (64, {}),
    "sequencer2d_s": (64, {"img_size": 64, "layers": (1, 1, 2, 1)}),
    "efficientvit_b0": (64, {}),
}


@cache
def torchvision_schemas() -> torch.library.Library:
    """Declare the two operators that torchvision's compiled extension defines.

    The package on PyPI is built for CUDA. With a CPU build of torch its import fails without these
    operators, and so does the import of timm and of transformers models that use it.
    """
    library = torch.library.Library("torchvision", "DEF")
    if not hasattr(torch.ops.torchvision, "nms"):
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


def torchvision_models() -> Any:
    """Import and return ``torchvision.models``, with any build of torch."""
    torchvision_schemas()
    import torchvision  # noqa: PLC0415

    return torchvision.models


def timm() -> Any:
    """Import and return ``timm``, with any build of torch."""
    torchvision_schemas()
    import timm as library  # noqa: PLC0415

    return library


def from_torchvision(name: str, size: int, options: dict[str, Any]) -> Example:
    """Return a classifier by its torchvision name."""
    model = torchvision_models().get_model(name, weights=None, num_classes=CLASSES, **options)
    return model, (image(size),), {}


def from_timm(name: str, size: int, options: dict[str, Any]) -> Example:
    """Return a classifier by its timm name."""
    model = timm().create_model(name, pretrained=False, num_classes=CLASSES, **options)
    return model, (image(size),), {}


for _name, (_size, _options) in TORCHVISION.items():
    entry(MODELS, "torchvision", f"torchvision-{_name}".replace("_", "-"))(
        partial(from_torchvision, _name, _size, _options)
    )

for _name, (_size, _options) in TIMM.items():
    entry(MODELS, "timm", f"timm-{_name}".replace("_", "-"))(partial(from_timm, _name, _size, _options))


@entry(MODELS, "torchvision")
def torchvision_vgg11_bn() -> Example:
    model = torchvision_models().vgg11_bn(weights=None)
    model.classifier = (
        nn.Sequential(  # smaller than the original, which has 120 million weights of one kind
            nn.Linear(512 * 7 * 7, 64), nn.ReLU(True), nn.Dropout(), nn.Linear(64, CLASSES)
        )
    )
    return model, (image(64),), {}


@entry(MODELS, "torchvision")
def torchvision_vit() -> Example:
    model = torchvision_models().VisionTransformer(
        image_size=32,
        patch_size=8,
        num_layers=4,
        num_heads=4,
        hidden_dim=64,
        mlp_dim=128,
        dropout=0.1,
        attention_dropout=0.1,
        num_classes=CLASSES,
    )
    return model, (image(32),), {}


@entry(MODELS, "torchvision")
def torchvision_swin() -> Example:
    model = torchvision_models().SwinTransformer(
        patch_size=[4, 4],
        embed_dim=32,
        depths=[2, 2, 2],
        num_heads=[2, 4, 8],
        window_size=[4, 4],
        stochastic_depth_prob=0.2,
        num_classes=CLASSES,
    )
    return model, (image(64),), {}


@entry(MODELS, "torchvision")
def torchvision_maxvit() -> Example:
    model = torchvision_models().MaxVit(
        input_size=(64, 64),
        stem_channels=16,
        partition_size=2,
        block_channels=[16, 32],
        block_layers=[2, 2],
        head_dim=8,
        stochastic_depth_prob=0.2,
        num_classes=CLASSES,
    )
    return model, (image(64),), {}


def _without_checkpoints(model: nn.Module) -> None:
    for module in model.modules():
        if hasattr(module, "memory_efficient"):
            module.memory_efficient = False


@entry(
    MODELS,
    "torchvision",
    reference=Reference(
        _without_checkpoints,
        "compared with itself without checkpoints, with which torch updates batch norms twice a step",
    ),
)
def torchvision_densenet_checkpointed() -> Example:
    model = torchvision_models().DenseNet(
        growth_rate=8,
        block_config=(2, 4, 2),
        num_init_features=16,
        memory_efficient=True,
        num_classes=CLASSES,
    )
    return model, (image(64),), {}


@entry(MODELS, "torchvision")
def torchvision_resnet18_groupnorm() -> Example:
    model = torchvision_models().resnet18(
        weights=None, num_classes=CLASSES, norm_layer=partial(nn.GroupNorm, 8)
    )
    return model, (image(64),), {}


@entry(MODELS, "torchvision")
def torchvision_fcn_resnet50() -> Example:
    model = torchvision_models().segmentation.fcn_resnet50(
        weights=None, weights_backbone=None, num_classes=5, aux_loss=True
    )
    return model, (image(64),), {}


@entry(MODELS, "torchvision")
def torchvision_deeplabv3_mobilenet() -> Example:
    model = torchvision_models().segmentation.deeplabv3_mobilenet_v3_large(
        weights=None, weights_backbone=None, num_classes=5
    )
    return model, (image(64),), {}


@entry(MODELS, "torchvision")
def torchvision_lraspp_mobilenet() -> Example:
    model = torchvision_models().segmentation.lraspp_mobilenet_v3_large(
        weights=None, weights_backbone=None, num_classes=5
    )
    return model, (image(64),), {}


@entry(MODELS, "torchvision")
def torchvision_r3d_18() -> Example:
    model = torchvision_models().video.r3d_18(weights=None, num_classes=CLASSES)
    return model, (torch.randn(BATCH, 3, 6, 32, 32),), {}


@entry(MODELS, "torchvision")
def torchvision_mvit() -> Example:
    video = torchvision_models().video
    blocks = [
        video.mvit.MSBlockConfig(
            num_heads=heads,
            input_channels=channels,
            output_channels=out,
            kernel_q=[3, 3, 3],
            kernel_kv=[3, 3, 3],
            stride_q=stride,
            stride_kv=[1, 2, 2],
        )
        for heads, channels, out, stride in (
            (1, 16, 32, [1, 1, 1]),
            (2, 32, 64, [1, 2, 2]),
            (4, 64, 64, [1, 1, 1]),
        )
    ]
    model = video.MViT(
        spatial_size=(32, 32),
        temporal_size=6,
        block_setting=blocks,
        residual_pool=False,
        residual_with_cls_embed=True,
        rel_pos_embed=True,
        proj_after_attn=False,
        num_classes=CLASSES,
    )
    return model, (torch.randn(BATCH, 3, 6, 32, 32),), {}


@entry(MODELS, "torchvision")
def torchvision_raft() -> Example:
    model = torchvision_models().optical_flow.raft_small(weights=None)
    return model, (image(128), image(128)), {"num_flow_updates": 2}

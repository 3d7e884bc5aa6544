"""Vision models of timm and torchvision: small named variants, on small images."""

from __future__ import annotations

from torch import nn

from .building import Architecture, timm, torchvision


def _repvgg() -> nn.Module:
    from dataclasses import replace

    from timm.models import byobnet

    config = byobnet.model_cfgs["repvgg_a0"]
    small = tuple(replace(block, d=2, c=width) for block, width in zip(config.blocks, (8, 16, 16, 24), strict=True))
    return byobnet.ByobNet(replace(config, blocks=small, stem_chs=8), num_classes=10)


def _frozen_resnet() -> nn.Module:
    from torchvision.models.resnet import Bottleneck, ResNet
    from torchvision.ops import FrozenBatchNorm2d

    return ResNet(Bottleneck, [1, 2, 1, 1], num_classes=10, width_per_group=8, norm_layer=FrozenBatchNorm2d)


_SLIM = (16, 24, 32, 48)
_SMALL_SWIN = {"embed_dim": 16, "depths": (2, 1), "num_heads": (2, 2), "window_size": 4, "img_size": 32}

TIMM = (
    timm("DenseNet", "densenet121", 32, block_config=(2, 2), growth_rate=8),
    Architecture("RepVGG", "timm", _repvgg, ("x:float32[batch,3,32,32]",)),
    timm("ResNet (timm)", "test_resnet"),
    timm("EfficientNet (timm)", "test_efficientnet"),
    timm("EfficientNet, evonorm", "test_efficientnet_evos"),
    timm("EfficientNet, layer norm", "test_efficientnet_ln"),
    timm("ConvNeXt (timm)", "test_convnext"),
    timm("ByobNet", "test_byobnet"),
    timm("NFNet", "test_nfnet"),
    timm("MambaOut", "test_mambaout"),
    timm("ViT (timm)", "test_vit", img_size=32),
    timm("ViT, registers", "test_vit2", img_size=32),
    timm("MobileNet V3 (timm)", "mobilenetv3_small_050"),
    timm("MobileNet V4", "mobilenetv4_conv_small_035"),
    timm("LCNet", "lcnet_035"),
    timm("TinyNet", "tinynet_e"),
    timm("GhostNet", "ghostnet_050"),
    timm("RepGhost", "repghostnet_050"),
    timm("MobileOne", "mobileone_s0"),
    timm("FastViT", "fastvit_t8"),
    timm("RepViT", "repvit_m0_9"),
    timm("EfficientFormer", "efficientformer_l1", 224, depths=(1, 1, 1, 2)),
    timm("EdgeNeXt", "edgenext_xx_small"),
    timm("MobileViT V2", "mobilevitv2_050"),
    timm("HRNet", "hrnet_w18_small"),
    timm("Res2Net", "res2net50_14w_8s", layers=(1, 1, 1, 1), channels=_SLIM),
    timm("ResNeSt", "resnest14d", channels=_SLIM, stem_width=8),
    timm("SKNet", "skresnet18", layers=(1, 1, 1, 1), channels=_SLIM),
    timm("SENet", "seresnet18", layers=(1, 1, 1, 1), channels=_SLIM),
    timm("ECA-ResNet", "ecaresnet26t", layers=(1, 1, 1, 1), channels=_SLIM),
    timm("ResNetV2, weight standardization", "resnetv2_50", layers=(1, 1, 1, 1), channels=(64, 64, 128, 128)),
    timm("NF-ResNet", "nf_resnet26", depths=(1, 1, 1, 1), channels=(32, 64, 64, 128)),
    timm(
        "DPN", "dpn.DPN", num_init_features=16, k_r=32, groups=8, k_sec=(1, 1, 1, 1), inc_sec=(8, 8, 8, 8), small=True
    ),
    timm("DLA", "dla46_c"),
    timm("VoVNet", "ese_vovnet19b_slim_dw"),
    timm("ReXNet", "rexnet_100", width_mult=0.5),
    timm("StarNet", "starnet_s1"),
    timm("ConvMixer", "convmixer.ConvMixer", dim=32, depth=3, kernel_size=9, patch_size=8),
    timm("MLP-Mixer", "mlp_mixer.MlpMixer", img_size=64, patch_size=16, num_blocks=2, embed_dim=32),
    timm("gMLP", "gmlp_ti16_224", img_size=64),
    timm("ResMLP", "resmlp_12_224", img_size=64),
    timm("Swin V2 (timm)", "swinv2_tiny_window8_256", 32, **_SMALL_SWIN),
    timm("PVT V2", "pvt_v2_b0", depths=(1, 1, 1, 1)),
    timm(
        "Twins",
        "twins_svt_small",
        depths=(1, 1, 1, 1),
        embed_dims=(16, 32, 48, 64),
        num_heads=(1, 2, 3, 4),
        img_size=64,
    ),
    timm("CaiT", "cait_xxs24_224", 32, depth=2, embed_dim=32, num_heads=4, img_size=32),
    timm("XCiT", "xcit_nano_12_p16_224", depth=2, embed_dim=32, num_heads=4, img_size=64),
    timm("DaViT", "davit_tiny", depths=(1, 1), embed_dims=(16, 32), num_heads=(2, 4)),
    timm("MViT V2", "mvitv2_tiny", img_size=64),
    timm("Hiera", "hiera_tiny_224", img_size=64, embed_dim=16, stages=(1, 1, 1, 1)),
    timm("EVA-02", "eva02_tiny_patch14_224", 28, depth=2, embed_dim=48, num_heads=3, img_size=28),
    timm("MaxViT", "maxvit_rmlp_pico_rw_256", 64, img_size=64),
    timm("InceptionNeXt", "inception_next_atto", depths=(1, 1, 1, 1)),
    timm("SwiftFormer", "swiftformer_xs"),
    timm("TinyViT", "tiny_vit_5m_224"),
    timm("ConViT", "convit_tiny", 64, img_size=64, depth=3, embed_dim=32, num_heads=4, local_up_to_layer=2),
)
TORCHVISION = (
    Architecture("ResNet, frozen", "torchvision", _frozen_resnet, ("x:float32[batch,3,64,64]",)),
    torchvision("ResNet 18", "resnet18"),
    torchvision("MobileNet V2", "mobilenet_v2", width_mult=0.5),
    torchvision("MobileNet V3", "mobilenet_v3_small"),
    torchvision("EfficientNet", "efficientnet_b0"),
    torchvision("RegNet (torchvision)", "regnet_y_400mf"),
    torchvision("ShuffleNet V2", "shufflenet_v2_x0_5"),
    torchvision("MNASNet", "mnasnet0_5"),
    torchvision("GoogLeNet", "googlenet", init_weights=False, aux_logits=False),
    torchvision(
        "Swin (torchvision)",
        "swin_transformer.SwinTransformer",
        patch_size=[4, 4],
        embed_dim=16,
        depths=[2, 1],
        num_heads=[2, 2],
        window_size=[4, 4],
    ),
    torchvision(
        "ViT (torchvision)",
        "vision_transformer.VisionTransformer",
        image_size=64,
        patch_size=16,
        num_layers=2,
        num_heads=4,
        hidden_dim=32,
        mlp_dim=48,
    ),
    torchvision("DeepLab V3", "segmentation.deeplabv3_mobilenet_v3_large", weights_backbone=None, num_classes=4),
)

PICTURES = (*TIMM, *TORCHVISION)

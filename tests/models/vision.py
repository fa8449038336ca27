"""Images: classification, masked images, segmentation, depth, detection, images with text."""

from __future__ import annotations

from typing import Any

import torch

from tests.models.architecture import VOCABULARY, Architecture, Batch, configuration, pretrained, tokens

CLASSES = 5


def images(rows: int, size: int) -> Batch:
    """A class for each image."""
    return {"pixel_values": torch.randn(rows, 3, size, size), "labels": torch.randint(0, 2, (rows,))}


def unlabelled(rows: int, size: int) -> Batch:
    """Images alone."""
    return {"pixel_values": torch.randn(rows, 3, size, size)}


def segments(rows: int, size: int) -> Batch:
    """A class for each pixel."""
    return {**unlabelled(rows, size), "labels": torch.randint(0, 2, (rows, size, size))}


def depths(rows: int, size: int) -> Batch:
    """A depth for each pixel."""
    return {**unlabelled(rows, size), "labels": torch.rand(rows, size, size) + 0.5}


def captions(rows: int, size: int) -> Batch:
    """An image and a text each; the contrastive loss is over all pairs."""
    ids = torch.cat([tokens(rows, 7), torch.full((rows, 1), 2)], 1)
    return {**unlabelled(rows, size), "input_ids": ids, "return_loss": True}


def noise_for_masking(rows: int, size: int) -> Batch:
    """ViT-MAE masks by the order of given noise."""
    return {**unlabelled(rows, size), "noise": torch.rand(rows, (size // 8) ** 2)}


VIT = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
VIT |= {"image_size": 16, "patch_size": 8, "initializer_range": 0.1}
WINDOWS = {"image_size": 16, "patch_size": 2, "embed_dim": 16, "depths": [2, 1], "num_heads": [2, 4], "window_size": 2}
STAGES = {"num_stages": 2, "hidden_sizes": [8, 16], "depths": [1, 1], "patch_size": 2}
PYRAMID = {
    "num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [8, 16], "patch_sizes": [3, 3],
    "strides": [2, 2], "num_attention_heads": [1, 2], "decoder_hidden_size": 16,
}  # fmt: skip
TEXT = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
TEXT |= {"num_attention_heads": 4, "max_position_embeddings": 16, "bos_token_id": 1, "eos_token_id": 2}
SIGHT = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
SIGHT |= {"image_size": 16, "patch_size": 8}


def vision(name: str, model: str = "ForImageClassification", batch: Any = images, **more: Any) -> Architecture:
    """One over images of 16 by 16, unless `lengths` says otherwise."""
    return pretrained(name + model, f"{name}Config", {}, batch, **{"lengths": (16, 16), **more})


VISION = {
    "vit": vision("ViT", **VIT),
    "vit-masked": vision("ViTMAE", "ForPreTraining", noise_for_masking, **VIT, decoder_num_attention_heads=2,
                         decoder_hidden_size=16, decoder_num_hidden_layers=1, decoder_intermediate_size=24),
    "deit": vision("DeiT", **VIT),
    "beit": vision("Beit", **VIT, use_relative_position_bias=True, use_absolute_position_embeddings=True),
    "data2vec-vision": vision("Data2VecVision", **VIT, use_shared_relative_position_bias=True),
    "dinov2": vision("Dinov2", **VIT, mlp_ratio=2, use_swiglu_ffn=True),
    "dinov3-vit": vision("DINOv3ViT", "Model", unlabelled, **VIT, num_register_tokens=2, pos_embed_rescale=None),
    "swin": vision("Swin", **WINDOWS),
    "swinv2": vision("Swinv2", **WINDOWS),
    "convnext": vision("ConvNext", **STAGES, layer_scale_init_value=0.1),
    "convnextv2": vision("ConvNextV2", **STAGES),
    "resnet": vision("ResNet", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="bottleneck",
                     lengths=(32, 32)),
    "regnet": vision("RegNet", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], groups_width=4),
    "mobilenet-v2": vision("MobileNetV2", depth_multiplier=0.25, lengths=(64, 64)),
    "poolformer": vision("PoolFormer", depths=[1, 1], hidden_sizes=[8, 16], patch_sizes=[3, 3], strides=[2, 2],
                         padding=[1, 1], num_encoder_blocks=2, layer_scale_init_value=0.1),
    "pvt-v2": vision("PvtV2", **PYRAMID, mlp_ratios=[2, 2], image_size=16),
    "segformer": vision("Segformer", "ForSemanticSegmentation", segments, **PYRAMID, mlp_ratios=[2, 2],
                        fullgraph=False),
    "glpn": vision("GLPN", "ForDepthEstimation", depths, num_encoder_blocks=4, depths=[1, 1, 1, 1],
                   sr_ratios=[4, 2, 1, 1], hidden_sizes=[8, 8, 16, 16], num_attention_heads=[1, 1, 2, 2],
                   mlp_ratios=[2, 2, 2, 2], decoder_hidden_size=8, lengths=(32, 32)),
    "dpt": vision("DPT", "ForSemanticSegmentation", segments, **{**VIT, "num_hidden_layers": 4},
                  backbone_out_indices=[0, 1, 2, 3], neck_hidden_sizes=[8, 8, 16, 16], fusion_hidden_size=16,
                  fullgraph=False),
    "hiera": vision("Hiera", embed_dim=8, image_size=[32, 32], patch_stride=[4, 4], patch_size=[7, 7],
                    patch_padding=[3, 3], depths=[1, 1], num_heads=[1, 2], num_query_pool=1,
                    masked_unit_size=[2, 2], masked_unit_attention=[True, False], lengths=(32, 32)),
    "focalnet": vision("FocalNet", image_size=16, patch_size=2, embed_dim=8, hidden_sizes=[16, 32], depths=[1, 1],
                       focal_levels=[1, 1], focal_windows=[3, 3]),
    "swiftformer": vision("SwiftFormer", depths=[1, 1, 1, 1], embed_dims=[8, 8, 16, 16], lengths=(64, 64)),
    "swin2sr": vision("Swin2SR", "ForImageSuperResolution", unlabelled, image_size=8, embed_dim=16, depths=[1],
                      num_heads=[2], window_size=4, lengths=(8, 8)),
    "bit": vision("Bit", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_groups=4, lengths=(32, 32)),
    "clip": vision("CLIP", "Model", captions, projection_dim=16,
                   text_config={**TEXT, "projection_dim": 16}, vision_config={**SIGHT, "projection_dim": 16}),
    "siglip": vision("Siglip", "Model", captions, text_config={**TEXT, "max_position_embeddings": 8},
                     vision_config=SIGHT),
    "blip": vision("Blip", "ForImageTextRetrieval", captions, image_text_hidden_size=16,
                   text_config={**TEXT, "encoder_hidden_size": 32}, vision_config=SIGHT),
    "yolos": vision("Yolos", "Model", unlabelled, **{**VIT, "image_size": [16, 16]}, num_detection_tokens=4),
    "detr": vision(
        "Detr", "Model", unlabelled, d_model=16, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=24,
        decoder_ffn_dim=24, encoder_attention_heads=2, decoder_attention_heads=2, num_queries=4,
        backbone_config=configuration(
            "ResNetConfig", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic",
            out_features=["stage2"],
        ), lengths=(32, 32), fullgraph=False,
    ),
    "deformable-detr": vision(
        "DeformableDetr", "Model", unlabelled, d_model=32, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=24,
        decoder_ffn_dim=24, encoder_attention_heads=2, decoder_attention_heads=2, num_queries=4,
        num_feature_levels=2, encoder_n_points=2, decoder_n_points=2,
        backbone_config=configuration(
            "ResNetConfig", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic",
            out_features=["stage1", "stage2"],
        ), lengths=(32, 32), fullgraph=False,
    ),
}  # fmt: skip
"""Name -> architecture."""

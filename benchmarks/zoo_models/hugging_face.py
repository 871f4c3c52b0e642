"""Language, speech and vision models of transformers, in small configurations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from zoo_models.registry import BATCH, Example, ZooModel, entry, image, padding_mask, tokens
from zoo_models.vision import torchvision_schemas

MODELS: list[ZooModel] = []
LENGTH = 12

SMALL: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
DECODER: dict[str, Any] = {**SMALL, "num_key_value_heads": 2, "pad_token_id": 0}
DROPPING: dict[str, Any] = {**DECODER, "attention_dropout": 0.1}
SEQ2SEQ: dict[str, Any] = {
    "vocab_size": 99,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}


def ids() -> dict[str, Any]:
    return {"input_ids": tokens(LENGTH)}


def labelled() -> dict[str, Any]:
    text = tokens(LENGTH)
    return {"input_ids": text, "labels": text}


def padded() -> dict[str, Any]:
    return {"input_ids": tokens(LENGTH), "attention_mask": padding_mask(LENGTH)}


def full_mask() -> dict[str, Any]:
    return {"input_ids": tokens(LENGTH), "attention_mask": torch.ones(BATCH, LENGTH).long()}


def padded_classes() -> dict[str, Any]:
    return {**padded(), "labels": torch.randint(0, 2, (BATCH,))}


def padded_tokens_labelled() -> dict[str, Any]:
    inputs = padded()
    return {
        **inputs,
        "labels": inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100),
    }


def source_and_target() -> dict[str, Any]:
    return {**padded(), "decoder_input_ids": tokens(9)}


def source_and_labels() -> dict[str, Any]:
    return {**padded(), "labels": tokens(9)}


def pixels(size: int = 32) -> dict[str, Any]:
    return {"pixel_values": image(size)}


def waveform() -> dict[str, Any]:
    return {"input_values": torch.randn(BATCH, 800)}


def from_transformers(
    model: str,
    config: str,
    options: dict[str, Any],
    inputs: Callable[[], dict[str, Any]],
) -> Example:
    """Return a model by the names of its class and of its configuration class."""
    torchvision_schemas()
    import transformers  # noqa: PLC0415

    built = getattr(transformers, model)(getattr(transformers, config)(**options))
    return built, (), inputs()


def add(
    name: str,
    model: str,
    config: str,
    options: dict[str, Any],
    inputs: Callable[[], dict[str, Any]],
    refusal: str | None = None,
) -> None:
    entry(MODELS, "transformers", name, refusal)(
        partial(from_transformers, model, config, options, inputs)
    )


# Encoders
add("bert-pretraining", "BertForPreTraining", "BertConfig", SMALL, padded)
add("bert-classifier", "BertForSequenceClassification", "BertConfig", SMALL, padded_classes)
add("bert-full-mask", "BertModel", "BertConfig", SMALL, full_mask)
add(
    "bert-eager-attention",
    "BertForMaskedLM",
    "BertConfig",
    {**SMALL, "attn_implementation": "eager", "output_attentions": True},
    padded_tokens_labelled,
)
add(
    "distilbert",
    "DistilBertForSequenceClassification",
    "DistilBertConfig",
    {"vocab_size": 99, "dim": 32, "hidden_dim": 64, "n_layers": 4, "n_heads": 4},
    padded_classes,
)
add("roberta", "RobertaForMaskedLM", "RobertaConfig", {**SMALL, "pad_token_id": 1}, padded)
add(
    "albert",
    "AlbertForMaskedLM",
    "AlbertConfig",
    {**SMALL, "embedding_size": 16, "hidden_dropout_prob": 0.1},
    padded,
)
add("electra", "ElectraForPreTraining", "ElectraConfig", {**SMALL, "embedding_size": 16}, padded)
DEBERTA: dict[str, Any] = {
    **SMALL,
    "relative_attention": True,
    "position_buckets": 8,
    "pos_att_type": ["p2c", "c2p"],
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "type_vocab_size": 0,
}
add("deberta-v2", "DebertaV2ForSequenceClassification", "DebertaV2Config", DEBERTA, padded)
add(
    "deberta-v2-labelled",
    "DebertaV2ForSequenceClassification",
    "DebertaV2Config",
    DEBERTA,
    padded_classes,
    refusal="depends on the value of a tensor",
)
add(
    "xlnet",
    "XLNetLMHeadModel",
    "XLNetConfig",
    {"vocab_size": 99, "d_model": 32, "n_layer": 3, "n_head": 4, "d_inner": 64},
    padded,
)
add("fnet", "FNetForMaskedLM", "FNetConfig", SMALL, ids)
add("modernbert", "ModernBertForMaskedLM", "ModernBertConfig", {**SMALL, "pad_token_id": 0}, padded)
add(
    "mobilebert",
    "MobileBertForMaskedLM",
    "MobileBertConfig",
    {
        **SMALL,
        "hidden_size": 64,
        "embedding_size": 16,
        "intra_bottleneck_size": 16,
        "num_hidden_layers": 3,
    },
    padded,
)
add("convbert", "ConvBertModel", "ConvBertConfig", {**SMALL, "embedding_size": 16}, padded)
add("nystromformer", "NystromformerModel", "NystromformerConfig", SMALL, padded)
add(
    "funnel",
    "FunnelForMaskedLM",
    "FunnelConfig",
    {
        "vocab_size": 99,
        "block_sizes": [1, 2],
        "num_decoder_layers": 1,
        "d_model": 32,
        "n_head": 4,
        "d_head": 8,
        "d_inner": 64,
    },
    padded,
)

# Decoders
add(
    "gpt2",
    "GPT2LMHeadModel",
    "GPT2Config",
    {"vocab_size": 99, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64},
    labelled,
)
add(
    "gpt2-without-cache",
    "GPT2LMHeadModel",
    "GPT2Config",
    {
        "vocab_size": 99,
        "n_embd": 32,
        "n_layer": 4,
        "n_head": 4,
        "n_positions": 64,
        "use_cache": False,
    },
    padded,
)
add("llama", "LlamaForCausalLM", "LlamaConfig", DECODER, labelled)
add("llama-attention-dropout", "LlamaForCausalLM", "LlamaConfig", DROPPING, labelled)
add("llama-without-cache", "LlamaForCausalLM", "LlamaConfig", {**DECODER, "use_cache": False}, labelled)
add("llama-full-mask", "LlamaForCausalLM", "LlamaConfig", DECODER, full_mask)
add("llama-padded", "LlamaForCausalLM", "LlamaConfig", {**DECODER, "use_cache": False}, padded)
add("mistral", "MistralForCausalLM", "MistralConfig", {**DROPPING, "sliding_window": 8}, labelled)
add("gemma", "GemmaForCausalLM", "GemmaConfig", {**DECODER, "head_dim": 8}, labelled)
add(
    "gemma2",
    "Gemma2ForCausalLM",
    "Gemma2Config",
    {**DECODER, "head_dim": 8, "sliding_window": 8, "use_cache": False},
    labelled,
)
add(
    "gemma3",
    "Gemma3ForCausalLM",
    "Gemma3TextConfig",
    {**DECODER, "head_dim": 8, "sliding_window": 8, "use_cache": False},
    labelled,
)
add("qwen2", "Qwen2ForCausalLM", "Qwen2Config", DROPPING, labelled)
add("qwen3", "Qwen3ForCausalLM", "Qwen3Config", {**DECODER, "head_dim": 8}, padded_tokens_labelled)
add("phi", "PhiForCausalLM", "PhiConfig", DECODER, labelled)
add("phi3", "Phi3ForCausalLM", "Phi3Config", DECODER, labelled)
add(
    "opt",
    "OPTForCausalLM",
    "OPTConfig",
    {
        "vocab_size": 99,
        "hidden_size": 32,
        "word_embed_proj_dim": 16,
        "ffn_dim": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
    },
    labelled,
)
add(
    "bloom",
    "BloomForCausalLM",
    "BloomConfig",
    {"vocab_size": 99, "hidden_size": 32, "n_layer": 3, "n_head": 4},
    padded,
    refusal="is a custom torch.autograd.Function",
)
add(
    "falcon",
    "FalconForCausalLM",
    "FalconConfig",
    {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4},
    labelled,
)
add("gpt-neox", "GPTNeoXForCausalLM", "GPTNeoXConfig", SMALL, labelled)
add(
    "gptj",
    "GPTJForCausalLM",
    "GPTJConfig",
    {
        "vocab_size": 99,
        "n_embd": 32,
        "n_layer": 3,
        "n_head": 4,
        "rotary_dim": 4,
        "n_positions": 64,
    },
    labelled,
)
add("olmo2", "Olmo2ForCausalLM", "Olmo2Config", DECODER, labelled)
add("cohere", "CohereForCausalLM", "CohereConfig", DECODER, labelled)
add("stablelm", "StableLmForCausalLM", "StableLmConfig", DECODER, labelled)
add("granite", "GraniteForCausalLM", "GraniteConfig", DECODER, labelled)
add("smollm3", "SmolLM3ForCausalLM", "SmolLM3Config", DECODER, labelled)
MIXTRAL: dict[str, Any] = {
    **DECODER,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "output_router_logits": True,
}
BATCHED: dict[str, Any] = {"experts_implementation": "batched_mm"}
add("mixtral", "MixtralForCausalLM", "MixtralConfig", {**MIXTRAL, **BATCHED}, labelled)
add(
    "mixtral-grouped",
    "MixtralForCausalLM",
    "MixtralConfig",
    MIXTRAL,
    labelled,
    refusal="belongs to the namespace 'transformers'",
)
add(
    "qwen3-moe",
    "Qwen3MoeForCausalLM",
    "Qwen3MoeConfig",
    {
        **DECODER,
        **BATCHED,
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    },
    labelled,
)
add(
    "deepseek-v3",
    "DeepseekV3ForCausalLM",
    "DeepseekV3Config",
    {
        **SMALL,
        **BATCHED,
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 2,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 8,
        "use_cache": False,
    },
    labelled,
)
add(
    "gpt-oss",
    "GptOssForCausalLM",
    "GptOssConfig",
    {**DECODER, **BATCHED, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    labelled,
)
add(
    "mamba",
    "MambaForCausalLM",
    "MambaConfig",
    {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 3, "state_size": 8},
    labelled,
)
add(
    "mamba2",
    "Mamba2ForCausalLM",
    "Mamba2Config",
    {
        "vocab_size": 99,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_heads": 8,
        "head_dim": 8,
        "state_size": 8,
        "n_groups": 2,
        "chunk_size": 8,
    },
    labelled,
)
add(
    "rwkv",
    "RwkvForCausalLM",
    "RwkvConfig",
    {
        "vocab_size": 99,
        "hidden_size": 32,
        "attention_hidden_size": 32,
        "num_hidden_layers": 3,
        "context_length": 16,
        "use_cache": False,
    },
    ids,
)

# Encoder-decoders
T5: dict[str, Any] = {
    "vocab_size": 99,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
add("t5", "T5ForConditionalGeneration", "T5Config", T5, source_and_target)
add(
    "mt5",
    "MT5ForConditionalGeneration",
    "MT5Config",
    {**T5, "feed_forward_proj": "gated-gelu", "use_cache": False},
    source_and_labels,
)
add(
    "bart",
    "BartForConditionalGeneration",
    "BartConfig",
    {**SEQ2SEQ, "use_cache": False},
    source_and_labels,
)
add("pegasus", "PegasusForConditionalGeneration", "PegasusConfig", SEQ2SEQ, source_and_target)
add("marian", "MarianMTModel", "MarianConfig", SEQ2SEQ, source_and_target)
add(
    "whisper",
    "WhisperForConditionalGeneration",
    "WhisperConfig",
    {
        **{key: value for key, value in SEQ2SEQ.items() if key != "max_position_embeddings"},
        "num_mel_bins": 8,
        "max_source_positions": 10,
        "max_target_positions": 16,
        "use_cache": False,
    },
    lambda: {"input_features": torch.randn(BATCH, 8, 20), "decoder_input_ids": tokens(9)},
)

# Vision, speech, and text with images
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}
add("hf-vit", "ViTForImageClassification", "ViTConfig", VISION, pixels)
add("dinov2", "Dinov2ForImageClassification", "Dinov2Config", VISION, pixels)
add(
    "vit-mae",
    "ViTMAEForPreTraining",
    "ViTMAEConfig",
    {
        **VISION,
        "decoder_hidden_size": 16,
        "decoder_num_hidden_layers": 2,
        "decoder_num_attention_heads": 2,
        "decoder_intermediate_size": 32,
    },
    pixels,
)
add(
    "swinv2",
    "Swinv2ForImageClassification",
    "Swinv2Config",
    {
        "image_size": 32,
        "patch_size": 2,
        "embed_dim": 16,
        "depths": [1, 2],
        "num_heads": [2, 4],
        "window_size": 4,
    },
    pixels,
)
add(
    "segformer",
    "SegformerForSemanticSegmentation",
    "SegformerConfig",
    {
        "depths": [1, 1, 1, 1],
        "hidden_sizes": [8, 16, 32, 32],
        "num_attention_heads": [1, 2, 4, 4],
        "decoder_hidden_size": 16,
        "num_labels": 5,
    },
    partial(pixels, 64),
)
add(
    "mobilenet-v2-hf",
    "MobileNetV2ForImageClassification",
    "MobileNetV2Config",
    {"depth_multiplier": 0.35, "image_size": 64},
    partial(pixels, 64),
)
add(
    "convnextv2",
    "ConvNextV2ForImageClassification",
    "ConvNextV2Config",
    {"hidden_sizes": [8, 16, 32, 32], "depths": [1, 1, 2, 1], "drop_path_rate": 0.1},
    partial(pixels, 64),
)
TOWERS: dict[str, Any] = {
    "text_config": {**SMALL, "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0},
    "vision_config": VISION,
}
add(
    "clip",
    "CLIPModel",
    "CLIPConfig",
    {**TOWERS, "projection_dim": 16},
    lambda: {**padded(), **pixels()},
)
add("siglip", "SiglipModel", "SiglipConfig", TOWERS, lambda: {**ids(), **pixels()})
add(
    "videomae",
    "VideoMAEForVideoClassification",
    "VideoMAEConfig",
    {**VISION, "num_frames": 6},
    lambda: {"pixel_values": torch.randn(BATCH, 6, 3, 32, 32)},
)
SPEECH: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "conv_dim": (16, 16, 16),
    "conv_stride": (5, 2, 2),
    "conv_kernel": (10, 3, 2),
    "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
    "layerdrop": 0.0,
    "mask_time_prob": 0.0,
}
add("wav2vec2", "Wav2Vec2ForCTC", "Wav2Vec2Config", SPEECH, waveform)
add("hubert", "HubertModel", "HubertConfig", SPEECH, waveform)
add(
    "audio-spectrogram-transformer",
    "ASTForAudioClassification",
    "ASTConfig",
    {
        **{key: value for key, value in VISION.items() if key != "image_size"},
        "max_length": 40,
        "num_mel_bins": 16,
    },
    lambda: {"input_values": torch.randn(BATCH, 40, 16)},
)
add(
    "perceiver",
    "PerceiverForMaskedLM",
    "PerceiverConfig",
    {
        "vocab_size": 99,
        "num_latents": 8,
        "d_latents": 32,
        "d_model": 16,
        "num_self_attends_per_block": 2,
        "num_self_attention_heads": 4,
        "num_cross_attention_heads": 4,
        "max_position_embeddings": LENGTH,
    },
    lambda: {"inputs": tokens(LENGTH), "attention_mask": padding_mask(LENGTH)},
)
add(
    "patchtst",
    "PatchTSTForPrediction",
    "PatchTSTConfig",
    {
        "num_input_channels": 3,
        "context_length": 24,
        "patch_length": 6,
        "patch_stride": 6,
        "prediction_length": 6,
        "d_model": 16,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "ffn_dim": 32,
        "loss": "mse",
    },
    lambda: {
        "past_values": torch.randn(BATCH, 24, 3),
        "future_values": torch.randn(BATCH, 6, 3),
    },
)
add(
    "decision-transformer",
    "DecisionTransformerModel",
    "DecisionTransformerConfig",
    {"state_dim": 5, "act_dim": 3, "hidden_size": 32, "n_layer": 3, "n_head": 4, "max_ep_len": 40},
    lambda: {
        "states": torch.randn(BATCH, 6, 5),
        "actions": torch.randn(BATCH, 6, 3),
        "rewards": torch.randn(BATCH, 6, 1),
        "returns_to_go": torch.randn(BATCH, 6, 1),
        "timesteps": torch.arange(6).repeat(BATCH, 1),
        "attention_mask": torch.ones(BATCH, 6),
    },
)


@entry(MODELS, "transformers", refusal="looks whether values are finite")
def detr() -> Example:
    torchvision_schemas()
    import transformers  # noqa: PLC0415

    backbone = transformers.ResNetConfig(
        embedding_size=8,
        hidden_sizes=[8, 16, 16, 32],
        depths=[1, 1, 1, 1],
        layer_type="basic",
        out_features=["stage4"],
    )
    config = transformers.DetrConfig(
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
        backbone_config=backbone,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        num_queries=5,
        num_labels=3,
    )
    return transformers.DetrForObjectDetection(config), (), pixels(64)


@entry(MODELS, "transformers")
def llama_checkpointed() -> Example:
    model, args, kwargs = from_transformers(
        "LlamaForCausalLM", "LlamaConfig", {**DECODER, "use_cache": False}, labelled
    )
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model, args, kwargs

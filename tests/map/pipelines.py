"""A tiny random Stable Diffusion pipeline, saved as diffusers saves one."""

from __future__ import annotations

from pathlib import Path

import torch


def save_pipeline(path: Path) -> Path:
    from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

    torch.manual_seed(0)
    path.mkdir(parents=True)
    letters = [chr(number) for number in range(97, 123)]
    words = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    tokenizer = CLIPTokenizer(vocab={word: at for at, word in enumerate(words)}, merges=[], model_max_length=16)
    text = CLIPTextConfig(
        vocab_size=len(words), hidden_size=32, intermediate_size=37, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=16, bos_token_id=len(words) - 2, eos_token_id=len(words) - 1, pad_token_id=1,
    )  # fmt: skip
    unet = UNet2DConditionModel(
        block_out_channels=(8, 16), norm_num_groups=4, layers_per_block=1, sample_size=32, cross_attention_dim=32,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=2,
    )  # fmt: skip
    vae = AutoencoderKL(
        block_out_channels=(8, 16), norm_num_groups=4, down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
    )  # fmt: skip
    scheduler = DDIMScheduler(steps_offset=1, clip_sample=False)
    pipeline = StableDiffusionPipeline(
        vae=vae, text_encoder=CLIPTextModel(text), tokenizer=tokenizer, unet=unet, scheduler=scheduler,
        safety_checker=None, feature_extractor=None, requires_safety_checker=False,
    )  # fmt: skip
    pipeline.save_pretrained(path)
    return path

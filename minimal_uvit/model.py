"""U-ViT: a vision transformer with long skip connections, all inputs as tokens.

Papers: All are Worth Words, arXiv:2209.12152v4; long-skip scaling of ScaleLong, arXiv:2310.13545v1.

The image is cut into patches; the time, the label or the text join the patches as tokens; a plain transformer
follows, whose first half hands each of its features to the matching block of its second half.

Reading order: `UViTConfig`, `timestep_embedding`, `Attention`, `Block`, `UViT`.

Shapes: B batch, C channels, H W image, p patch size, L tokens (extras, then (H/p)(W/p) patches), D width,
N = depth / 2 long skips.

Deviations: the label of a network with a null class may be left out, which means the null class; learnable
scaling counts skips from the outermost, the released ScaleLong from the innermost (`official.py` maps).

    python minimal_uvit/model.py        # shapes and parameter counts of all presets
"""

import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shared.check import require
from shared.long_skip import LongSkipConfig, LongSkipScaling


@dataclass(frozen=True)
class UViTConfig:
    img_size: int = 8  # height and width of the images or latents
    patch_size: int = 2  # height and width of a patch, one token each
    in_channels: int = 1  # channels of the images or latents
    width: int = 96  # width D of the tokens
    depth: int = 4  # transformer blocks besides the middle one, half before it and half after; even
    num_heads: int = 3  # attention heads
    mlp_ratio: float = 4.0  # hidden width of a block's MLP over D
    qkv_bias: bool = False  # bias in the query, key and value projection
    mlp_time_embed: bool = False  # a two-layer MLP on the time token
    num_classes: int = 0  # label embeddings, the null class included; 0: unconditional
    null_class: bool = False  # the last label stands for "no label", for classifier-free guidance
    context_dim: int = 0  # width of text tokens; 0: none
    context_tokens: int = 0  # number of text tokens
    conv: bool = True  # a final 3x3 convolution over the image
    skip: bool = True  # long skips; False is the paper's ablation
    long_skip: LongSkipConfig = field(default_factory=LongSkipConfig)  # scaling of the long skips
    checkpointing: bool = False  # recompute blocks in the backward pass: less memory, more time

    def __post_init__(self) -> None:
        least = min(self.img_size, self.patch_size, self.in_channels, self.width, self.num_heads)
        require(least > 0, "img_size, patch_size, in_channels, width and num_heads must be at least 1")
        p, h = self.patch_size, self.num_heads
        require(self.img_size % p == 0, f"patch_size {p} does not divide img_size {self.img_size}")
        require(self.width % h == 0, f"num_heads {h} does not divide width {self.width}")
        require(self.depth >= 2 and self.depth % 2 == 0, f"depth is {self.depth}: it must be even, 2 or more")
        least = 2 if self.null_class else 0  # a class besides the null class
        require(self.num_classes >= least, f"num_classes is {self.num_classes}: it must be at least {least}")
        fits = 1 <= self.width * self.mlp_ratio < 1 << 20
        require(fits, f"mlp_ratio {self.mlp_ratio} of width {self.width} is no width of a hidden layer")
        both = (self.context_dim > 0) == (self.context_tokens > 0)
        require(both, "context_dim and context_tokens go together: both positive, or both 0")

    @property
    def num_extras(self) -> int:
        """Tokens before the patches: label, time, text."""
        return 1 + (self.num_classes > 0) + self.context_tokens

    @property
    def num_tokens(self) -> int:
        return self.num_extras + (self.img_size // self.patch_size) ** 2


IMAGENET = dict(num_classes=1000, checkpointing=True)
LATENT = dict(num_classes=1001, null_class=True, checkpointing=True)
TEXT = dict(context_dim=768, context_tokens=77)
PRESETS: dict[str, UViTConfig] = {
    #                            H   p  C  D    depth heads                               parameters, table 1
    "digits":         UViTConfig(8,  2, 1, 96,   4,  3, num_classes=11, null_class=True),  #   0.6 M, ours
    "s2_cifar10":     UViTConfig(32, 2, 3, 512,  12, 8),                                   #  44.3 M
    "s4_celeba64":    UViTConfig(64, 4, 3, 512,  12, 8),                                   #  44.3 M
    "s2_deep_256":    UViTConfig(32, 2, 4, 512,  16, 8, **LATENT),                         #  58.4 M
    "m4_imagenet64":  UViTConfig(64, 4, 3, 768,  16, 12, **IMAGENET),                      # 130.9 M
    "l4_imagenet64":  UViTConfig(64, 4, 3, 1024, 20, 16, **IMAGENET),                      # 286.8 M
    "l2_imagenet256": UViTConfig(32, 2, 4, 1024, 20, 16, **LATENT),                        # 286.8 M
    "h2_imagenet256": UViTConfig(32, 2, 4, 1152, 28, 16, conv=False, **LATENT),            # 500.8 M
    "l4_imagenet512": UViTConfig(64, 4, 4, 1024, 20, 16, **LATENT),                        # 286.9 M
    "h4_imagenet512": UViTConfig(64, 4, 4, 1152, 28, 16, conv=False, **LATENT),            # 500.9 M
    "s2_mscoco":      UViTConfig(32, 2, 4, 512,  12, 8, **TEXT),                           #  44.7 M, text
    "s2_deep_mscoco": UViTConfig(32, 2, 4, 512,  16, 8, **TEXT),                           #  58.3 M, text
}


# Sinusoidal embedding of the time, Vaswani et al., arXiv:1706.03762: cosines, then sines.
def timestep_embedding(timesteps: Tensor, width: int) -> Tensor:
    """(B,) times of any real value -> (B, width)."""
    half = width // 2
    freqs = torch.exp(torch.arange(half, device=timesteps.device) * (-math.log(10000) / half))
    angles = timesteps.float()[:, None] * freqs                                # B half
    return F.pad(torch.cat([angles.cos(), angles.sin()], dim=1), (0, width % 2))


def linear(inputs: int, outputs: int, bias: bool = True) -> nn.Linear:
    """A linear layer starts at N(0, 0.02^2) with zero bias; the others keep PyTorch's own initialization."""
    layer = nn.Linear(inputs, outputs, bias)
    nn.init.normal_(layer.weight, std=0.02)
    if bias:
        nn.init.zeros_(layer.bias)
    return layer


class Attention(nn.Module):
    def __init__(self, config: UViTConfig):
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = linear(config.width, 3 * config.width, bias=config.qkv_bias)
        self.proj = linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = rearrange(self.qkv(x), "B L (K h d) -> K B h L d", K=3, h=self.num_heads)
        x = F.scaled_dot_product_attention(q, k, v)                            # B h L d
        return self.proj(rearrange(x, "B h L d -> B L (h d)"))


class Block(nn.Module):
    """A transformer block, pre-norm; with `skip`, a linear layer first merges a long skip into its input."""

    def __init__(self, config: UViTConfig, skip: bool = False):
        super().__init__()
        D, hidden = config.width, int(config.width * config.mlp_ratio)
        self.skip_linear = linear(2 * D, D) if skip else None
        self.norm1 = nn.LayerNorm(D)
        self.attn = Attention(config)
        self.norm2 = nn.LayerNorm(D)
        self.fc1 = linear(D, hidden)
        self.fc2 = linear(hidden, D)

    def forward(self, x: Tensor, skip: Tensor | None = None) -> Tensor:
        if self.skip_linear is not None:  # of [x, skip], whose concatenation would take a copy
            w_x, w_skip = self.skip_linear.weight.chunk(2, dim=1)              # D D each
            x = F.linear(x, w_x, self.skip_linear.bias) + F.linear(skip, w_skip)  # B L D
        x = x + self.attn(self.norm1(x))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class UViT(nn.Module):
    """Predicts what it was trained for (noise, or EDM's F) from noisy images and their time."""

    def __init__(self, config: UViTConfig):
        super().__init__()
        self.config = config
        D, p, C, N = config.width, config.patch_size, config.in_channels, config.depth // 2
        self.patch_embed = nn.Conv2d(C, D, kernel_size=p, stride=p)
        if config.mlp_time_embed:
            self.time_embed = nn.Sequential(linear(D, 4 * D), nn.SiLU(), linear(4 * D, D))
        if config.num_classes:
            self.label_embed = nn.Embedding(config.num_classes, D)
        if config.context_tokens:
            self.context_embed = linear(config.context_dim, D)
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, config.num_tokens, D))
        self.in_blocks = nn.ModuleList([Block(config) for _ in range(N)])
        self.mid_block = Block(config)
        self.out_blocks = nn.ModuleList([Block(config, skip=config.skip) for _ in range(N)])
        if config.skip:  # a token's features pool to one number: one coefficient per token
            self.long_skip = LongSkipScaling(config.long_skip, [config.num_tokens] * N, (2,), linear)
        self.norm = nn.LayerNorm(D)
        self.to_patches = linear(D, p * p * C)
        if config.conv:
            self.final_conv = nn.Conv2d(C, C, kernel_size=3, padding=1)

    def check(self, x: Tensor, labels: Tensor | None, context: Tensor | None) -> None:
        """Raise ValueError, in a sentence, for inputs that this network was not made for."""
        c, text = self.config, (0, 0) if context is None else tuple(context.shape[1:])
        shape, size = tuple(x.shape[1:]), (c.in_channels, c.img_size, c.img_size)
        require(shape == size, f"images are {shape}, but this U-ViT takes {size}")
        size = (c.context_tokens, c.context_dim)
        require(text == size, f"context is {text} tokens and width, but this U-ViT takes {size}")
        if labels is None:
            require(c.null_class or not c.num_classes, "this U-ViT needs labels: it has no null class")
        else:
            require(c.num_classes > 0, "this U-ViT is unconditional: it takes no labels")
            if labels.device.type == "cpu" and not torch.compiler.is_compiling():  # looking would stall a GPU
                low, high, last = labels.min().item(), labels.max().item(), c.num_classes - 1
                require(low >= 0 and high <= last, f"labels {low}..{high} not in 0..{last}")

    def run(self, block: Block, *args: Tensor | None) -> Tensor:
        return checkpoint(block, *args, use_reentrant=False) if self.config.checkpointing else block(*args)

    def forward(
        self, x: Tensor, timesteps: Tensor, labels: Tensor | None = None, context: Tensor | None = None
    ) -> Tensor:
        """x (B, C, H, W); timesteps (B,), made for 0..1000; labels (B,) int64, None: the null class;
        context (B, context_tokens, context_dim). Returns x's shape. ValueError for inputs that do not fit."""
        self.check(x, labels, context)
        if self.config.null_class and labels is None:
            labels = torch.full((len(x),), self.config.num_classes - 1, device=x.device)
        patches = rearrange(self.patch_embed(x), "B D h w -> B (h w) D")
        time = timestep_embedding(timesteps, self.config.width)                # B D
        if self.config.mlp_time_embed:
            time = self.time_embed(time)
        tokens = [time[:, None], patches]
        if labels is not None:
            tokens.insert(0, self.label_embed(labels)[:, None])
        if context is not None:
            tokens.insert(-1, self.context_embed(context))
        x = torch.cat(tokens, dim=1) + self.pos_embed                          # B L D

        skips = []
        for in_block in self.in_blocks:
            x = self.run(in_block, x)
            skips.append(x)
        x = self.run(self.mid_block, x)
        for out_block in self.out_blocks:  # the last feature first: i = N .. 1
            i, skip = len(skips), skips.pop()
            x = self.run(out_block, x, self.long_skip(skip, i) if self.config.skip else None)

        x = self.to_patches(self.norm(x))[:, self.config.num_extras :]         # B (h w) (p p C)
        p, h = self.config.patch_size, self.config.img_size // self.config.patch_size
        x = rearrange(x, "B (h w) (p1 p2 C) -> B C (h p1) (w p2)", h=h, p1=p, p2=p)
        return self.final_conv(x) if self.config.conv else x


if __name__ == "__main__":
    for name, config in PRESETS.items():
        with torch.device("meta"):
            count = sum(p.numel() for p in UViT(config).parameters())
        shape = (config.in_channels, config.img_size, config.img_size)
        print(f"{name:15} {shape!s:13} images, {config.num_tokens} tokens, {count:11,} parameters")

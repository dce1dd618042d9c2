"""U-ViT in tinygrad: the twin of `model.py`, line by line; configs and presets are that file's.

Papers: All are Worth Words, arXiv:2209.12152v4; long-skip scaling of ScaleLong, arXiv:2310.13545v1.

Where the lines differ is what differs between the frameworks: here classes are plain and called, lists and
dicts hold layers, and functions (`get_state_dict`, `get_parameters`) collect the weights. They have PyTorch's
names, so a safetensors file of either network loads in the other.

Reading order: `timestep_embedding`, `Attention`, `Block`, `UViT`. Shapes are as in `model.py`.

Deviations: `checkpointing` changes nothing, because tinygrad has no such thing.

    python minimal_uvit/model_tinygrad.py        # parameter counts of all presets
"""

import math

from einops import rearrange
from tinygrad import Tensor, nn
from tinygrad.engine.realize import capturing
from tinygrad.nn.state import get_parameters

from minimal_uvit.model import PRESETS, UViTConfig
from shared.check import require
from shared.long_skip_tinygrad import LongSkipScaling


# Sinusoidal embedding of the time, Vaswani et al., arXiv:1706.03762: cosines, then sines.
def timestep_embedding(timesteps: Tensor, width: int) -> Tensor:
    """(B,) times of any real value -> (B, width)."""
    half = width // 2
    freqs = (Tensor.arange(half) * (-math.log(10000) / half)).exp()
    angles = timesteps.float()[:, None] * freqs                                # B half
    return Tensor.cat(angles.cos(), angles.sin(), dim=1).pad((0, width % 2))


class Linear(nn.Linear):
    """Stores its input and gradient: fused into a product, they would be computed anew for each output."""

    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x.contiguous()).contiguous().contiguous_backward()


def linear(inputs: int, outputs: int, bias: bool = True) -> Linear:
    """A linear layer starts at N(0, 0.02^2) with zero bias; the others keep PyTorch's own initialization."""
    layer = Linear(inputs, outputs, bias)
    layer.weight = Tensor.normal(outputs, inputs, std=0.02)
    if bias:
        layer.bias = Tensor.zeros(outputs)
    return layer


class Attention:
    def __init__(self, config: UViTConfig):
        self.num_heads = config.num_heads
        self.qkv = linear(config.width, 3 * config.width, bias=config.qkv_bias)
        self.proj = linear(config.width, config.width)

    def __call__(self, x: Tensor) -> Tensor:
        q, k, v = rearrange(self.qkv(x), "B L (K h d) -> K B h L d", K=3, h=self.num_heads)
        weights = (q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])).softmax()   # B h L L
        x = weights.contiguous() @ v                                           # B h L d
        return self.proj(rearrange(x, "B h L d -> B L (h d)"))


class Block:
    """A transformer block, pre-norm; with `skip`, a linear layer first merges a long skip into its input."""

    def __init__(self, config: UViTConfig, skip: bool = False):
        D, hidden = config.width, int(config.width * config.mlp_ratio)
        self.skip_linear = linear(2 * D, D) if skip else None
        self.norm1 = nn.LayerNorm(D)
        self.attn = Attention(config)
        self.norm2 = nn.LayerNorm(D)
        self.fc1 = linear(D, hidden)
        self.fc2 = linear(hidden, D)

    def __call__(self, x: Tensor, skip: Tensor | None = None) -> Tensor:
        if self.skip_linear is not None:  # of [x, skip], whose concatenation would take a copy
            w_x, w_skip = self.skip_linear.weight.chunk(2, dim=1)              # D D each
            x, skip = x.contiguous(), skip.contiguous()  # stored, as `Linear` does
            x = x.linear(w_x.T, self.skip_linear.bias) + skip.linear(w_skip.T)    # B L D
            x = x.contiguous().contiguous_backward()
        x = x + self.attn(self.norm1(x))
        return x + self.fc2(self.fc1(self.norm2(x)).gelu("none"))


class UViT:
    """Predicts what it was trained for (noise, or EDM's F) from noisy images and their time."""

    def __init__(self, config: UViTConfig):
        self.config = config
        D, p, C, N = config.width, config.patch_size, config.in_channels, config.depth // 2
        self.patch_embed = nn.Conv2d(C, D, kernel_size=p, stride=p)
        if config.mlp_time_embed:
            self.time_embed = [linear(D, 4 * D), Tensor.silu, linear(4 * D, D)]
        if config.num_classes:
            self.label_embed = nn.Embedding(config.num_classes, D)
            self.label_embed.weight = Tensor.randn(config.num_classes, D)  # tinygrad's own is far narrower
        if config.context_tokens:
            self.context_embed = linear(config.context_dim, D)
        self.pos_embed = 0.02 * Tensor.randn(1, config.num_tokens, D)
        self.in_blocks = [Block(config) for _ in range(N)]
        self.mid_block = Block(config)
        self.out_blocks = [Block(config, skip=config.skip) for _ in range(N)]
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
            if not capturing:  # TinyJit records operations on values that nobody can look at
                low, high, last = labels.numpy().min(), labels.numpy().max(), c.num_classes - 1
                require(low >= 0 and high <= last, f"labels {low}..{high} not in 0..{last}")

    def run(self, block: Block, *args: Tensor | None) -> Tensor:
        return block(*args)

    def __call__(
        self, x: Tensor, timesteps: Tensor, labels: Tensor | None = None, context: Tensor | None = None
    ) -> Tensor:
        """x (B, C, H, W); timesteps (B,), made for 0..1000; labels (B,) int64, None: the null class;
        context (B, context_tokens, context_dim). Returns x's shape. ValueError for inputs that do not fit."""
        self.check(x, labels, context)
        if self.config.null_class and labels is None:
            labels = Tensor.full((len(x),), self.config.num_classes - 1)
        patches = rearrange(self.patch_embed(x), "B D h w -> B (h w) D")
        time = timestep_embedding(timesteps, self.config.width)                # B D
        if self.config.mlp_time_embed:
            time = time.sequential(self.time_embed)
        tokens = [time[:, None], patches]
        if labels is not None:
            tokens.insert(0, self.label_embed(labels)[:, None])
        if context is not None:
            tokens.insert(-1, self.context_embed(context))
        x = Tensor.cat(*tokens, dim=1) + self.pos_embed                        # B L D

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
        count = sum(p.numel() for p in get_parameters(UViT(config)))
        shape = (config.in_channels, config.img_size, config.img_size)
        print(f"{name:15} {shape!s:13} images, {config.num_tokens} tokens, {count:11,} parameters")

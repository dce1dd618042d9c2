"""ADM in tinygrad: the twin of `model.py`, line by line; configs and presets are that file's.

Papers: Diffusion Models Beat GANs, arXiv:2105.05233v4; long-skip scaling of ScaleLong, arXiv:2310.13545v1.

Weights have PyTorch's names, so a safetensors file of either network loads in the other. Dropout is on under
tinygrad's TRAINING. Reading order: `ResBlock`, `Attention`, `Block`, `Encoder`, `ADMUNet` and its siblings.
Shapes are as in `model.py`.

Deviations: those of `model.py`; the backward pass recomputes nothing, because tinygrad has no such thing.

    python adm_unet/model_tinygrad.py        # the networks of all presets
"""

import math
from collections.abc import Callable

from einops import rearrange
from tinygrad import Tensor, dtypes, nn
from tinygrad.dtype import least_upper_dtype
from tinygrad.engine.realize import capturing
from tinygrad.nn.state import get_parameters

from adm_unet.model import GROUPS, PRESETS, ADMConfig
from shared.check import require
from shared.long_skip_tinygrad import LongSkipScaling

Layer = Callable[..., Tensor]


# Sinusoidal embedding of the time, Vaswani et al., arXiv:1706.03762: cosines, then sines.
def timestep_embedding(timesteps: Tensor, width: int) -> Tensor:
    """(B,) times of any real value -> (B, width)."""
    half = width // 2
    freqs = (Tensor.arange(half) * (-math.log(10000) / half)).exp()
    angles = timesteps.float()[:, None] * freqs                                # B half
    return Tensor.cat(angles.cos(), angles.sin(), dim=1).pad((0, width % 2))


def resample(x: Tensor, up: bool | None) -> Tensor:
    """Twice the size, or half; None: x as it is."""
    return x if up is None else x.repeat_interleave(2, 2).repeat_interleave(2, 3) if up else x.avg_pool2d(2)


def zero(layer: Layer) -> Layer:
    """The last layer of a branch starts at zero, so that the branch starts by adding nothing."""
    for param in get_parameters(layer):
        param.replace(Tensor.zeros(param.shape))
    return layer


class GroupNorm(nn.GroupNorm):
    """Group normalization in float32 at least: half precision would lose its statistics."""

    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x.cast(least_upper_dtype(x.dtype, dtypes.float32))).cast(x.dtype)

    # Adaptive group normalization, section 3: AdaGN(h, y) = y_s GroupNorm(h) + y_b.
    def adaptive(self, h: Tensor, y_s: Tensor, y_b: Tensor) -> Tensor:
        """h (B, C, H, W); y_s and y_b (B, C, 1, 1)."""
        return self(h) * y_s + y_b


class Conv2d(nn.Conv2d):
    """Stores what goes in and out, and gradients: fused into the sums, it would be computed many times."""

    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x.contiguous()).contiguous().contiguous_backward()


class ResBlock:
    """Two convolutions beside a shortcut; both change the resolution, up or down, unless `up` is None."""

    def __init__(self, config: ADMConfig, C_in: int, C_out: int, up: bool | None = None):
        self.up, self.dropout, self.scale_shift_norm = up, config.dropout, config.scale_shift_norm
        self.norm1 = GroupNorm(GROUPS, C_in)
        self.conv1 = Conv2d(C_in, C_out, 3, padding=1)
        self.emb_proj = nn.Linear(4 * config.channels, C_out * (2 if config.scale_shift_norm else 1))
        self.norm2 = GroupNorm(GROUPS, C_out)
        self.conv2 = zero(Conv2d(C_out, C_out, 3, padding=1))
        self.shortcut = Conv2d(C_in, C_out, 1) if C_in != C_out else lambda x: x

    def activate(self, x: Tensor) -> Tensor:
        """A step of its own in `model.py`, where the backward pass recomputes it."""
        return self.norm1(x).silu()

    def __call__(self, x: Tensor, emb: Tensor) -> Tensor:
        y = self.activate(x)
        x, y = resample(x, self.up), self.conv1(resample(y, self.up))          # B C_in H W, B C_out H W
        emb = self.emb_proj(emb)[:, :, None, None]
        if self.scale_shift_norm:  # y_s starts around 1
            scale, shift = emb.chunk(2, dim=1)                                 # B C_out 1 1
            y = self.norm2.adaptive(y, 1 + scale, shift)
        else:
            y = self.norm2(y + emb)
        return self.shortcut(x) + self.conv2(y.silu().dropout(self.dropout))


class Attention:
    """Self-attention over pixels, beside a shortcut."""

    def __init__(self, config: ADMConfig, C: int, num_heads: int):
        self.num_heads = C // config.head_channels if config.head_channels else num_heads
        self.split = "B L (K h d) -> K B h L d" if config.qkv_first else "B L (h K d) -> K B h L d"
        self.norm = GroupNorm(GROUPS, C)
        self.qkv = Conv2d(C, 3 * C, 1)
        self.proj = zero(Conv2d(C, C, 1))

    def __call__(self, x: Tensor) -> Tensor:
        y = self.qkv(self.norm(x)).flatten(2).transpose(1, 2)                  # B L 3C
        q, k, v = rearrange(y, self.split, K=3, h=self.num_heads)
        y = q.scaled_dot_product_attention(k, v)                               # B h L d
        return x + self.proj(rearrange(y, "B h (H W) d -> B (h d) H W", H=x.shape[2]))


class Resample:
    """Plain change of resolution, called like a ResBlock that changes it."""

    def __init__(self, config: ADMConfig, C_in: int, C_out: int, up: bool):
        conv = Conv2d(C_in, C_out, 3, stride=1 if up else 2, padding=1)
        self.conv = conv if config.conv_resample else lambda x: x
        self.up = None if config.conv_resample and not up else up  # the convolution's stride halves the image

    def __call__(self, x: Tensor, emb: Tensor) -> Tensor:
        return self.conv(resample(x, self.up))


class Block:
    """A residual block, of a long skip too on the way up; attention if it has heads; upsampling if `up`."""

    def __init__(self, config: ADMConfig, C_in: int, C_out: int, num_heads: int = 0, up: bool = False):
        self.res = ResBlock(config, C_in, C_out)
        self.attn = Attention(config, C_out, num_heads) if num_heads else None
        Up = ResBlock if config.resblock_updown else Resample
        self.up = Up(config, C_out, C_out, up=True) if up else None

    def __call__(self, x: Tensor, emb: Tensor, skip: Tensor | None = None) -> Tensor:
        x = self.res(x if skip is None else x.cat(skip, dim=1), emb)           # B C_out H W
        x = x if self.attn is None else self.attn(x)
        return x if self.up is None else self.up(x, emb)


class Encoder:
    """The way down and the middle, with which all three networks begin."""

    def __init__(self, config: ADMConfig, in_channels: int):
        self.config = config
        E, C, Down = 4 * config.channels, config.widths[0], ResBlock if config.resblock_updown else Resample
        self.time_embed = [nn.Linear(config.channels, E), Tensor.silu, nn.Linear(E, E)]
        self.in_conv = Conv2d(in_channels, C, 3, padding=1)
        self.in_blocks = []
        self.skip_widths = [C]  # channels of the N features, outermost first
        for level, width in enumerate(config.widths):
            if level > 0:
                self.in_blocks.append(Down(config, C, C, up=False))
                self.skip_widths.append(C)
            for _ in range(config.depth):
                self.in_blocks.append(Block(config, C, width, config.heads(level)))
                self.skip_widths.append(width)
                C = width
        self.mid_block1 = Block(config, C, C, config.num_heads)
        self.mid_block2 = Block(config, C, C)

    def run(self, block: Layer, *args: Tensor) -> Tensor:
        return block(*args)

    def encode(self, x: Tensor, timesteps: Tensor, label: Tensor | float = 0.0, *cond: Tensor) -> tuple:
        """The middle's output, the embedding of time and label, and the N features, outermost first."""
        size = (self.config.in_channels, self.config.img_size, self.config.img_size)
        require(x.shape[1:] == size, f"images are {tuple(x.shape[1:])}, but this network takes {size}")
        time = timestep_embedding(timesteps, self.config.channels).cast(x.dtype)
        emb = (time.sequential(self.time_embed) + label).silu()                # B E
        features = [self.in_conv(x.cat(*cond, dim=1))]                         # B C H W
        for block in self.in_blocks:
            features.append(self.run(block, features[-1], emb))
        return self.run(self.mid_block2, self.run(self.mid_block1, features[-1], emb), emb), emb, features


class ADMUNet(Encoder):
    """Predicts what it was trained for (noise, or EDM's F) from noisy images, their time and their label."""

    num_images = 1  # that it sees: the noisy one

    def __init__(self, config: ADMConfig):
        super().__init__(config, config.in_channels * self.num_images)
        if config.num_classes:
            self.label_embed = nn.Embedding(config.num_classes, 4 * config.channels)
            self.label_embed.weight = Tensor.randn(config.num_classes, 4 * config.channels)  # as PyTorch's
        self.long_skip = LongSkipScaling(config.long_skip, self.skip_widths, pool_dims=(2, 3))
        self.out_blocks = []
        C, skip_widths = config.widths[-1], list(self.skip_widths)
        for level, width in reversed(list(enumerate(config.widths))):
            for i in range(config.depth + 1):
                up, C_in = level > 0 and i == config.depth, C + skip_widths.pop()
                self.out_blocks.append(Block(config, C_in, width, config.heads(level, up=True), up))
                C = width
        self.norm = GroupNorm(GROUPS, C)
        self.out_conv = zero(Conv2d(C, config.in_channels * (1 + config.learn_sigma), 3, padding=1))

    def embed(self, labels: Tensor | None, x: Tensor) -> Tensor | float:
        """The label's part of the embedding, (B, E). ValueError for labels that do not fit."""
        K = self.config.num_classes
        if self.config.null_class and labels is None:
            labels = Tensor.full((len(x),), K - 1)
        if labels is None:
            require(K == 0, "this network needs labels: it has no null class")
            return 0.0
        require(K > 0, "this network is unconditional: it takes no labels")
        if not capturing:  # TinyJit records operations on values that nobody can look at
            low, high = labels.numpy().min(), labels.numpy().max()
            require(low >= 0 and high < K, f"labels {low}..{high} not in 0..{K - 1}")
        return self.label_embed(labels)

    def __call__(self, x: Tensor, timesteps: Tensor, labels: Tensor | None = None, *cond: Tensor) -> Tensor:
        """x (B, C, H, W); timesteps (B,), made for 0..1000; labels (B,) int64, None: the null class; cond is
        `ADMSuperRes`'s. Returns x's shape, or with `learn_sigma` 2C channels, of which the second C place the
        variance between its bounds, -1 and 1. ValueError for inputs that do not fit."""
        x, emb, skips = self.encode(x, timesteps, self.embed(labels, x), *cond)
        for block in self.out_blocks:  # the last feature first: i = N .. 1
            i, skip = len(skips), skips.pop()
            x = self.run(block, x, emb, self.long_skip(skip, i))
        return self.out_conv(self.norm(x).silu())


class ADMSuperRes(ADMUNet):
    """A UNet that also sees a small image, enlarged to its own size (section 5.2)."""

    num_images = 2

    def __call__(self, x: Tensor, timesteps: Tensor, low_res: Tensor, labels: Tensor | None = None) -> Tensor:
        """As `ADMUNet`; low_res (B, C, h, w) of any size."""
        fits = low_res.ndim == 4 and low_res.shape[:2] == x.shape[:2]
        require(fits, f"low_res is {tuple(low_res.shape)}, which does not go with images {tuple(x.shape)}")
        return super().__call__(x, timesteps, labels, low_res.interpolate(x.shape[2:], mode="linear"))


class AttentionPool:
    """CLIP's pooling, arXiv:2103.00020: the mean of all tokens, as one more token, attends to all of them."""

    def __init__(self, config: ADMConfig, C: int):
        L = (config.img_size >> len(config.widths) - 1) ** 2 + 1
        self.num_heads = C // config.head_channels if config.head_channels else config.num_heads
        self.pos_embed = Tensor.randn(L, C) / C**0.5
        self.qkv = nn.Linear(C, 3 * C)
        self.proj = nn.Linear(C, config.num_classes)

    def __call__(self, x: Tensor) -> Tensor:
        x = rearrange(x, "B C H W -> B (H W) C")
        x = x.mean(1, keepdim=True).cat(x, dim=1) + self.pos_embed             # B L C
        q, k, v = rearrange(self.qkv(x), "B L (K h d) -> K B h L d", K=3, h=self.num_heads)
        x = q[:, :, :1].scaled_dot_product_attention(k, v)                     # B h 1 d
        return self.proj(rearrange(x, "B h 1 d -> B (h d)"))


class ADMClassifier(Encoder):
    """Logits of a noisy image's class: the way down and a pool (section 4)."""

    def __init__(self, config: ADMConfig):
        super().__init__(config, config.in_channels)
        C, K = config.widths[-1], config.num_classes
        if config.pool.startswith("spatial"):
            act = [Tensor.relu] if config.pool == "spatial" else [GroupNorm(GROUPS, 2048), Tensor.silu]
            self.out = [nn.Linear(sum(self.skip_widths) + C, 2048), *act, nn.Linear(2048, K)]
        else:
            self.norm = GroupNorm(GROUPS, C)
            self.out = AttentionPool(config, C) if config.pool == "attention" else zero(nn.Linear(C, K))

    def __call__(self, x: Tensor, timesteps: Tensor) -> Tensor:
        """x (B, C, H, W); timesteps (B,) -> logits (B, K). ValueError as `ADMUNet`."""
        x, _, features = self.encode(x, timesteps)
        if self.config.pool.startswith("spatial"):  # a mean over space of every feature
            return Tensor.cat(*[f.mean((2, 3)) for f in [*features, x]], dim=1).sequential(self.out)
        x = self.norm(x).silu()
        return self.out(x if self.config.pool == "attention" else x.mean((2, 3)))


def build(config: ADMConfig) -> Encoder:
    """The network that the config is of."""
    return (ADMClassifier if config.pool else ADMSuperRes if config.low_res else ADMUNet)(config)


if __name__ == "__main__":
    for name, config in PRESETS.items():
        count = sum(p.numel() for p in get_parameters(build(config)))
        print(f"{name:15} images {config.img_size}x{config.img_size}, {count:11,} parameters")

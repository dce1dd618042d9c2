"""ADM: the UNet of guided diffusion, its super-resolution sibling and its noisy-image classifier.

Papers: Diffusion Models Beat GANs, arXiv:2105.05233v4; long-skip scaling of ScaleLong, arXiv:2310.13545v1.

Residual blocks and attention lead down to small images and up again; each feature of the way down is handed
to a block of the way up. Time and label enter every residual block. Three networks are one encoder with other
ends. Reading order: `ADMConfig`, `ResBlock`, `Attention`, `Block`, `Encoder`, `ADMUNet` and its siblings.

Shapes: B batch, C channels, H W image, E = 4 * channels width of the embedding, L tokens (pixels), h heads of
width d, K classes, N long skips (the features of all encoder blocks and of the first convolution).

Deviations: the backward pass recomputes normalizations, not attention, or with `checkpointing` whole blocks;
the embedding's SiLU is taken once, not once a block; the attention pool, of linear layers, not convolutions,
attends only from its own token.

    python adm_unet/model.py        # the networks of all presets
"""

import math
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shared.check import require
from shared.long_skip import LongSkipConfig, LongSkipScaling

Pool = Literal["", "attention", "adaptive", "spatial", "spatial_v2"]
GROUPS = 32  # of every group normalization, whatever the width


@dataclass(frozen=True)
class ADMConfig:
    img_size: int = 8  # height and width of the images
    in_channels: int = 1  # channels of the images
    channels: int = 32  # base width, which channel_mult multiplies
    channel_mult: tuple[float, ...] = (1, 2)  # width of each level over channels; each level halves the image
    depth: int = 1  # residual blocks a level on the way down; one more on the way up
    attn_resolutions: tuple[int, ...] = (4,)  # image sizes with self-attention; the middle always has it
    num_classes: int = 0  # labels, with the null class, or what a classifier tells apart; 0: unconditional
    null_class: bool = False  # the last label stands for "no label", for classifier-free guidance
    learn_sigma: bool = False  # as many outputs again: where the variance is between its bounds
    low_res: int = 0  # size of the small images that super-resolution enlarges; 0: not for super-resolution
    pool: Pool = ""  # how a classifier makes its features one vector; empty: not a classifier
    num_heads: int = 2  # attention heads, where head_channels is 0
    num_heads_up: int = 0  # the same on the way up; 0: num_heads
    head_channels: int = 0  # width of a head, from which their number follows; 0: num_heads of them
    qkv_first: bool = False  # channels split into q, k, v and these into heads; False: heads first
    scale_shift_norm: bool = True  # the embedding scales and shifts a normalization; False: it is added
    resblock_updown: bool = True  # residual blocks change the resolution; False: plain resampling
    conv_resample: bool = True  # plain resampling has a learned convolution
    dropout: float = 0.0  # dropout rate in residual blocks
    long_skip: LongSkipConfig = field(default_factory=LongSkipConfig)  # scaling of the long skips
    checkpointing: bool = False  # recompute whole blocks in the backward pass: less memory, more time

    def __post_init__(self) -> None:
        ones = dict.fromkeys(("img_size", "in_channels", "channels", "depth", "num_heads"), 1)
        for name, least in (ones | dict(num_heads_up=0, head_channels=0, low_res=0)).items():
            require(getattr(self, name) >= least, f"{name} is {getattr(self, name)}: the least is {least}")
        require(0 <= self.dropout < 1, f"dropout is {self.dropout}: it must be in [0, 1)")
        sizes = [self.img_size >> level for level in range(len(self.channel_mult))]
        fits = bool(sizes) and sizes[-1] << len(sizes) - 1 == self.img_size
        require(fits, f"img_size {self.img_size} cannot be halved for {len(sizes)} levels of channel_mult")
        lost = sorted(set(self.attn_resolutions) - set(sizes))
        require(not lost, f"attn_resolutions {lost} are never reached: the levels' images are {sizes}")
        heads = {self.head_channels} - {0} or {self.num_heads, self.num_heads_up or self.num_heads}
        for size, C in zip(sizes, self.widths, strict=True):
            require(C > 0 and C % GROUPS == 0, f"a level's width is {C}: it must be a multiple of {GROUPS}")
            fits = size not in (*self.attn_resolutions, sizes[-1]) or not any(C % part for part in heads)
            require(fits, f"num_heads or head_channels {sorted(heads)} does not divide a width of {C}")
        require(self.pool in get_args(Pool), f"pool is {self.pool!r}: it must be one of {get_args(Pool)}")
        needed = (self.pool or self.null_class) and self.num_classes < 2
        require(not needed, "null_class and a classifier need a num_classes of at least 2")

    @property
    def widths(self) -> list[int]:
        """Channels of each level, outermost first."""
        return [int(mult * self.channels) for mult in self.channel_mult]

    def heads(self, level: int, up: bool = False) -> int:
        num_heads = (up and self.num_heads_up) or self.num_heads
        return num_heads if self.img_size >> level in self.attn_resolutions else 0


M64, M128, M256, M512 = (1, 2, 3, 4), (1, 1, 2, 3, 4), (1, 1, 2, 2, 4, 4), (0.5, 1, 1, 2, 2, 4, 4)
ATTN, H4, NEW = (32, 16, 8), dict(num_heads=4, learn_sigma=True), dict(qkv_first=True, dropout=0.1)
W64, POOL = dict(head_channels=64, learn_sigma=True), dict(head_channels=64, pool="attention")
PRESETS: dict[str, ADMConfig] = {
    #                            H    C  channels mult depth attn  K         parameters, appendix I
    "digits":          ADMConfig(8,   1, 32,  (1, 2), 1, (4,), 11, null_class=True),             # 0.8 M, ours
    "superres":        ADMConfig(8,   1, 32,  (1, 2), 1, (4,), 11, null_class=True, low_res=4),  # 0.8 M, ours
    "classifier":      ADMConfig(8,   1, 32,  (1, 2), 1, (4,), 10, pool="attention"),            # 0.4 M, ours
    "imagenet64":      ADMConfig(64,  3, 192, M64,  3, ATTN, 1000, **W64, **NEW),                # 295.9 M
    "imagenet128":     ADMConfig(128, 3, 256, M128, 2, ATTN, 1000, **H4),                        # 421.5 M
    "imagenet256":     ADMConfig(256, 3, 256, M256, 2, ATTN, 1000, **W64),                       # 553.8 M
    "imagenet512":     ADMConfig(512, 3, 256, M512, 2, ATTN, 1000, **W64),                       # 559.0 M
    "uncond256":       ADMConfig(256, 3, 256, M256, 2, ATTN, 0, **W64),                          # 552.8 M
    "lsun256":         ADMConfig(256, 3, 256, M256, 2, ATTN, 0, **W64, dropout=0.1),             # 552.8 M
    "superres64_256":  ADMConfig(256, 3, 192, M256, 2, ATTN, 1000, **H4, low_res=64),            # 311.8 M
    "superres128_512": ADMConfig(512, 3, 192, M256, 2, (32, 16), 1000, **W64, low_res=128),      # 308.8 M
    "classifier64":    ADMConfig(64,  3, 128, M64,  4, ATTN, 1000, **POOL),                      # 65.4 M
    "classifier128":   ADMConfig(128, 3, 128, M128, 2, ATTN, 1000, **POOL),                      # 42.6 M
    "classifier256":   ADMConfig(256, 3, 128, M256, 2, ATTN, 1000, **POOL),                      # 54.1 M
    "classifier512":   ADMConfig(512, 3, 128, M512, 2, ATTN, 1000, **POOL),                      # 54.4 M
}


# Sinusoidal embedding of the time, Vaswani et al., arXiv:1706.03762: cosines, then sines.
def timestep_embedding(timesteps: Tensor, width: int) -> Tensor:
    """(B,) times of any real value -> (B, width)."""
    half = width // 2
    freqs = torch.exp(torch.arange(half, device=timesteps.device) * (-math.log(10000) / half))
    angles = timesteps.float()[:, None] * freqs                                # B half
    return F.pad(torch.cat([angles.cos(), angles.sin()], dim=1), (0, width % 2))


def resample(x: Tensor, up: bool | None) -> Tensor:
    """Twice the size, or half; None: x as it is."""
    return x if up is None else F.interpolate(x, scale_factor=2.0) if up else F.avg_pool2d(x, 2)


def zero(layer: nn.Module) -> nn.Module:
    """The last layer of a branch starts at zero, so that the branch starts by adding nothing."""
    for param in layer.parameters():
        nn.init.zeros_(param)
    return layer


class GroupNorm(nn.GroupNorm):
    """Group normalization in float32 at least: half precision would lose its statistics."""

    def forward(self, x: Tensor) -> Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)
        weight, bias = self.weight.to(dtype), self.bias.to(dtype)
        return F.group_norm(x.to(dtype), self.num_groups, weight, bias, self.eps).to(x.dtype)

    # Adaptive group normalization, section 3: AdaGN(h, y) = y_s GroupNorm(h) + y_b.
    def adaptive(self, h: Tensor, y_s: Tensor, y_b: Tensor) -> Tensor:
        """h (B, C, H, W); y_s and y_b (B, C, 1, 1)."""
        if not self.training or torch.compiler.is_compiling():
            return torch.addcmul(y_b, self(h), y_s)
        # One sample of B times the groups has an affine of each sample's own: GroupNorm(h) need not be kept.
        dtype, groups = torch.promote_types(h.dtype, torch.float32), len(h) * self.num_groups
        weight, bias = self.weight[:, None, None] * y_s, self.bias[:, None, None] * y_s + y_b    # B C 1 1
        weight, bias, x = weight.to(dtype).flatten(), bias.to(dtype).flatten(), h.to(dtype).flatten(0, 1)
        return torch.group_norm(x[None], groups, weight, bias, self.eps).view(h.shape).to(h.dtype)


class ResBlock(nn.Module):
    """Two convolutions beside a shortcut; both change the resolution, up or down, unless `up` is None."""

    def __init__(self, config: ADMConfig, C_in: int, C_out: int, up: bool | None = None):
        super().__init__()
        self.up, self.dropout, self.scale_shift_norm = up, config.dropout, config.scale_shift_norm
        self.norm1 = GroupNorm(GROUPS, C_in)
        self.conv1 = nn.Conv2d(C_in, C_out, 3, padding=1)
        self.emb_proj = nn.Linear(4 * config.channels, C_out * (2 if config.scale_shift_norm else 1))
        self.norm2 = GroupNorm(GROUPS, C_out)
        self.conv2 = zero(nn.Conv2d(C_out, C_out, 3, padding=1))
        self.shortcut = nn.Conv2d(C_in, C_out, 1) if C_in != C_out else nn.Identity()

    def activate(self, x: Tensor) -> Tensor:
        """Recomputed in the backward pass: as large to keep as any feature, and the cheapest to compute."""
        return F.silu(self.norm1(x))

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        y = checkpoint(self.activate, x, use_reentrant=False) if self.training else self.activate(x)
        x, y = resample(x, self.up), self.conv1(resample(y, self.up))          # B C_in H W, B C_out H W
        emb = self.emb_proj(emb)[:, :, None, None]
        if self.scale_shift_norm:  # y_s starts around 1
            scale, shift = emb.chunk(2, dim=1)                                 # B C_out 1 1
            y = self.norm2.adaptive(y, 1 + scale, shift)
        else:
            y = self.norm2(y + emb)
        return self.shortcut(x) + self.conv2(F.dropout(F.silu(y), self.dropout, self.training))


class Attention(nn.Module):
    """Self-attention over pixels, beside a shortcut."""

    def __init__(self, config: ADMConfig, C: int, num_heads: int):
        super().__init__()
        self.num_heads = C // config.head_channels if config.head_channels else num_heads
        self.split = "B L (K h d) -> K B h L d" if config.qkv_first else "B L (h K d) -> K B h L d"
        self.norm = GroupNorm(GROUPS, C)
        self.qkv = nn.Conv2d(C, 3 * C, 1)
        self.proj = zero(nn.Conv2d(C, C, 1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.qkv(self.norm(x)).flatten(2).mT.contiguous()                  # B L 3C
        q, k, v = rearrange(y, self.split, K=3, h=self.num_heads)
        y = F.scaled_dot_product_attention(q, k, v)                            # B h L d
        return x + self.proj(rearrange(y, "B h (H W) d -> B (h d) H W", H=x.shape[2]))


class Resample(nn.Module):
    """Plain change of resolution, called like a ResBlock that changes it."""

    def __init__(self, config: ADMConfig, C_in: int, C_out: int, up: bool):
        super().__init__()
        conv = nn.Conv2d(C_in, C_out, 3, stride=1 if up else 2, padding=1)
        self.conv = conv if config.conv_resample else nn.Identity()
        self.up = None if config.conv_resample and not up else up  # the convolution's stride halves the image

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        return self.conv(resample(x, self.up))


class Block(nn.Module):
    """A residual block, of a long skip too on the way up; attention if it has heads; upsampling if `up`."""

    def __init__(self, config: ADMConfig, C_in: int, C_out: int, num_heads: int = 0, up: bool = False):
        super().__init__()
        self.res = ResBlock(config, C_in, C_out)
        self.attn = Attention(config, C_out, num_heads) if num_heads else None
        Up = ResBlock if config.resblock_updown else Resample
        self.up = Up(config, C_out, C_out, up=True) if up else None

    def forward(self, x: Tensor, emb: Tensor, skip: Tensor | None = None) -> Tensor:
        x = self.res(x if skip is None else torch.cat([x, skip], dim=1), emb)  # B C_out H W
        x = x if self.attn is None else self.attn(x)
        return x if self.up is None else self.up(x, emb)


class Encoder(nn.Module):
    """The way down and the middle, with which all three networks begin."""

    def __init__(self, config: ADMConfig, in_channels: int):
        super().__init__()
        self.config = config
        E, C, Down = 4 * config.channels, config.widths[0], ResBlock if config.resblock_updown else Resample
        self.time_embed = nn.Sequential(nn.Linear(config.channels, E), nn.SiLU(), nn.Linear(E, E))
        self.in_conv = nn.Conv2d(in_channels, C, 3, padding=1)
        self.in_blocks = nn.ModuleList()
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

    def run(self, block: nn.Module, *args: Tensor) -> Tensor:
        return checkpoint(block, *args, use_reentrant=False) if self.config.checkpointing else block(*args)

    def encode(self, x: Tensor, timesteps: Tensor, label: Tensor | float = 0.0, *cond: Tensor) -> tuple:
        """The middle's output, the embedding of time and label, and the N features, outermost first."""
        size = (self.config.in_channels, self.config.img_size, self.config.img_size)
        require(x.shape[1:] == size, f"images are {tuple(x.shape[1:])}, but this network takes {size}")
        time = timestep_embedding(timesteps, self.config.channels).to(x.dtype)
        emb = F.silu(self.time_embed(time) + label)                            # B E
        features = [self.in_conv(torch.cat([x, *cond], dim=1))]                # B C H W
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
        self.long_skip = LongSkipScaling(config.long_skip, self.skip_widths, pool_dims=(2, 3))
        self.out_blocks = nn.ModuleList()
        C, skip_widths = config.widths[-1], list(self.skip_widths)
        for level, width in reversed(list(enumerate(config.widths))):
            for i in range(config.depth + 1):
                up, C_in = level > 0 and i == config.depth, C + skip_widths.pop()
                self.out_blocks.append(Block(config, C_in, width, config.heads(level, up=True), up))
                C = width
        self.norm = GroupNorm(GROUPS, C)
        self.out_conv = zero(nn.Conv2d(C, config.in_channels * (1 + config.learn_sigma), 3, padding=1))

    def embed(self, labels: Tensor | None, x: Tensor) -> Tensor | float:
        """The label's part of the embedding, (B, E). ValueError for labels that do not fit."""
        K = self.config.num_classes
        if self.config.null_class and labels is None:
            labels = torch.full((len(x),), K - 1, device=x.device)
        if labels is None:
            require(K == 0, "this network needs labels: it has no null class")
            return 0.0
        require(K > 0, "this network is unconditional: it takes no labels")
        if labels.device.type == "cpu" and not torch.compiler.is_compiling():  # looking would stall a GPU
            low, high = labels.min().item(), labels.max().item()
            require(low >= 0 and high < K, f"labels {low}..{high} not in 0..{K - 1}")
        return self.label_embed(labels)

    def forward(self, x: Tensor, timesteps: Tensor, labels: Tensor | None = None, *cond: Tensor) -> Tensor:
        """x (B, C, H, W); timesteps (B,), made for 0..1000; labels (B,) int64, None: the null class; cond is
        `ADMSuperRes`'s. Returns x's shape, or with `learn_sigma` 2C channels, of which the second C place the
        variance between its bounds, -1 and 1. ValueError for inputs that do not fit."""
        x, emb, skips = self.encode(x, timesteps, self.embed(labels, x), *cond)
        for block in self.out_blocks:  # the last feature first: i = N .. 1
            i, skip = len(skips), skips.pop()
            x = self.run(block, x, emb, self.long_skip(skip, i))
        return self.out_conv(F.silu(self.norm(x)))


class ADMSuperRes(ADMUNet):
    """A UNet that also sees a small image, enlarged to its own size (section 5.2)."""

    num_images = 2

    def forward(self, x: Tensor, timesteps: Tensor, low_res: Tensor, labels: Tensor | None = None) -> Tensor:
        """As `ADMUNet`; low_res (B, C, h, w) of any size."""
        fits = low_res.ndim == 4 and low_res.shape[:2] == x.shape[:2]
        require(fits, f"low_res is {tuple(low_res.shape)}, which does not go with images {tuple(x.shape)}")
        return super().forward(x, timesteps, labels, F.interpolate(low_res, x.shape[2:], mode="bilinear"))


class AttentionPool(nn.Module):
    """CLIP's pooling, arXiv:2103.00020: the mean of all tokens, as one more token, attends to all of them."""

    def __init__(self, config: ADMConfig, C: int):
        super().__init__()
        L = (config.img_size >> len(config.widths) - 1) ** 2 + 1
        self.num_heads = C // config.head_channels if config.head_channels else config.num_heads
        self.pos_embed = nn.Parameter(torch.randn(L, C) / C**0.5)
        self.qkv = nn.Linear(C, 3 * C)
        self.proj = nn.Linear(C, config.num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = rearrange(x, "B C H W -> B (H W) C")
        x = torch.cat([x.mean(1, keepdim=True), x], dim=1) + self.pos_embed    # B L C
        q, k, v = rearrange(self.qkv(x), "B L (K h d) -> K B h L d", K=3, h=self.num_heads)
        x = F.scaled_dot_product_attention(q[:, :, :1], k, v)                  # B h 1 d
        return self.proj(rearrange(x, "B h 1 d -> B (h d)"))


class ADMClassifier(Encoder):
    """Logits of a noisy image's class: the way down and a pool (section 4)."""

    def __init__(self, config: ADMConfig):
        super().__init__(config, config.in_channels)
        C, K = config.widths[-1], config.num_classes
        if config.pool.startswith("spatial"):
            act = [nn.ReLU()] if config.pool == "spatial" else [GroupNorm(GROUPS, 2048), nn.SiLU()]
            self.out = nn.Sequential(nn.Linear(sum(self.skip_widths) + C, 2048), *act, nn.Linear(2048, K))
        else:
            self.norm = GroupNorm(GROUPS, C)
            self.out = AttentionPool(config, C) if config.pool == "attention" else zero(nn.Linear(C, K))

    def forward(self, x: Tensor, timesteps: Tensor) -> Tensor:
        """x (B, C, H, W); timesteps (B,) -> logits (B, K). ValueError as `ADMUNet`."""
        x, _, features = self.encode(x, timesteps)
        if self.config.pool.startswith("spatial"):  # a mean over space of every feature
            return self.out(torch.cat([f.mean((2, 3)) for f in [*features, x]], dim=1))
        x = F.silu(self.norm(x))
        return self.out(x if self.config.pool == "attention" else x.mean((2, 3)))


def build(config: ADMConfig) -> Encoder:
    """The network that the config is of."""
    return (ADMClassifier if config.pool else ADMSuperRes if config.low_res else ADMUNet)(config)


if __name__ == "__main__":
    for name, config in PRESETS.items():
        with torch.device("meta"):
            count = sum(p.numel() for p in build(config).parameters())
        print(f"{name:15} images {config.img_size}x{config.img_size}, {count:11,} parameters")

"""EDM2: a diffusion UNet in which activations, weights and updates keep unit magnitude.

Papers: Analyzing and Improving the Training Dynamics of Diffusion Models, arXiv:2312.02696v2, config G;
long-skip scaling of ScaleLong, arXiv:2310.13545v1.

Every operation is scaled so that inputs of magnitude 1 (root mean square) give outputs of magnitude 1.
Filters are normalized in use, stored weights at each training step: an update turns all at the same rate.

Reading order: `EDM2Config`, the primitives up to `MPConv`, `Block`, `UNet`, `Denoiser`.
Shapes: B batch, C channels, H W image, E width of the embedding, K classes, L pixels, h heads of width d.

| symbol         | name               |                                                                |
| -------------- | ------------------ | -------------------------------------------------------------- |
| D(x; sigma), F | `Denoiser`, `UNet` | D = c_skip x + c_out F(c_in x, c_noise)                        |
| u(sigma)       | `logvar`           | log of the expected loss at a noise level, Eqs. 14-16 and 21   |
| t              | `t`, `*_balance`   | weight of the second argument of a sum or a concatenation      |

Deviations: long skips are scaled inside the concatenation (`mp_cat`); forced weight normalization precedes
the first layer, where the released code has each layer do it in its turn; labels are class indices.

    python edm2_mp_unet/model.py        # shapes and parameter counts of all presets
"""

import math
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.utils.checkpoint import checkpoint

from shared.check import require
from shared.long_skip import LongSkipConfig, LongSkipScaling


@dataclass(frozen=True)
class EDM2Config:
    img_size: int = 8  # height and width of the images or latents
    in_channels: int = 1  # channels of the images or latents
    num_classes: int = 10  # classes of the labels; 0: unconditional
    channels: int = 32  # base width, of which channel_mult gives multiples
    channel_mult: tuple[int, ...] = (1, 2)  # width of each level over `channels`; a level halves the image
    channel_mult_noise: int | None = None  # Fourier features of the noise over `channels`; None: as level 0
    channel_mult_emb: int | None = None  # width of the embedding over `channels`; None: as the widest level
    num_blocks: int = 2  # encoder blocks a level; the decoder has one more
    attn_resolutions: tuple[int, ...] = (4,)  # image sizes with attention; the innermost block has it too
    channels_per_head: int = 32  # width of an attention head; a level narrower than this has no attention
    label_balance: float = 0.5  # weight t of the label against the noise level in the embedding
    concat_balance: float = 0.5  # weight t of a long skip against the main path
    res_balance: float = 0.3  # weight t of a residual branch against the main path
    attn_balance: float = 0.3  # weight t of attention against the main path
    dropout: float = 0.0  # dropout rate in residual branches
    resample_filter: tuple[float, ...] = (1, 1)  # separable filter of down- and upsampling, of even length
    clip_act: float | None = 256  # clip activations to this size, which fp16 can hold; None: never
    sigma_data: float = 0.5  # standard deviation of the data
    logvar_channels: int = 128  # Fourier features of the uncertainty u(sigma)
    long_skip: LongSkipConfig = field(default_factory=LongSkipConfig)  # scaling of the long skips
    checkpointing: bool = False  # recompute blocks in the backward pass: less memory, more time

    def __post_init__(self) -> None:
        width = self.channels * min(self.channel_mult, default=0)
        least = min(self.img_size, self.in_channels, self.num_blocks, width)
        require(least > 0, "img_size, in_channels, channels, num_blocks and channel_mult must be at least 1")
        fits = self.img_size % 2 ** (len(self.channel_mult) - 1) == 0
        require(fits, f"img_size {self.img_size} cannot be halved for {len(self.channel_mult)} levels")
        require(len(self.resample_filter) % 2 == 0, "resample_filter must be of even length")


IMAGENET = dict(channel_mult=(1, 2, 3, 4), num_blocks=3, attn_resolutions=(16, 8), channels_per_head=64)
PRESETS: dict[str, EDM2Config] = {
    #                             H   C  K     channels                          parameters, tables 2 and 3
    "digits":          EDM2Config(8,  1, 10,   32),                             #    1.0 M, ours
    "edm2_img512_xxs": EDM2Config(64, 4, 1000, 64,               **IMAGENET),   #   31.3 M, code alone has it
    "edm2_img512_xs":  EDM2Config(64, 4, 1000, 128,              **IMAGENET),   #  124.7 M
    "edm2_img512_s":   EDM2Config(64, 4, 1000, 192,              **IMAGENET),   #  280.2 M
    "edm2_img512_m":   EDM2Config(64, 4, 1000, 256, dropout=0.1, **IMAGENET),   #  497.8 M
    "edm2_img512_l":   EDM2Config(64, 4, 1000, 320, dropout=0.1, **IMAGENET),   #  777.5 M
    "edm2_img512_xl":  EDM2Config(64, 4, 1000, 384, dropout=0.1, **IMAGENET),   # 1119.3 M
    "edm2_img512_xxl": EDM2Config(64, 4, 1000, 448, dropout=0.1, **IMAGENET),   # 1523.2 M
    "edm2_img64_xs":   EDM2Config(64, 3, 1000, 128,              **IMAGENET),   #  124.7 M, code alone has it
    "edm2_img64_s":    EDM2Config(64, 3, 1000, 192,              **IMAGENET),   #  280.2 M
    "edm2_img64_m":    EDM2Config(64, 3, 1000, 256, dropout=0.1, **IMAGENET),   #  497.8 M
    "edm2_img64_l":    EDM2Config(64, 3, 1000, 320, dropout=0.1, **IMAGENET),   #  777.5 M
    "edm2_img64_xl":   EDM2Config(64, 3, 1000, 384, dropout=0.1, **IMAGENET),   # 1119.3 M
}


# Unit magnitude along some dimensions: of each pixel's channels (pixel norm), of each filter's weights.
def normalize(x: Tensor, *dims: int) -> Tensor:
    """x over its root mean square along `dims`, which is taken in float32. Same shape."""
    norm = torch.linalg.vector_norm(x, dim=dims, keepdim=True, dtype=torch.float32)
    return x * (1e-4 + norm / math.prod([x.shape[d] for d in dims]) ** 0.5).reciprocal().to(x.dtype)


# Magnitude-preserving SiLU, Eq. 81. Where a convolution follows, the constant stands in its filters.
SILU = 0.596  # magnitude of the SiLU of a standard normal


def mp_silu(x: Tensor) -> Tensor:
    return F.silu(x) / SILU


# Magnitude-preserving sum, Eq. 88, of uncorrelated a and b: w_a a + w_b b.
def mp_sum_weights(t: float) -> tuple[float, float]:
    return tuple(w / ((1 - t) ** 2 + t**2) ** 0.5 for w in (1 - t, t))


def mp_sum(a: Tensor, b: Tensor, t: float) -> Tensor:
    w_a, w_b = mp_sum_weights(t)
    return w_a * a + w_b * b


# Magnitude-preserving concatenation, Eq. 103: a and b count as 1 - t and t, however many channels they have.
def mp_cat(a: Tensor, b: Tensor, t: float, kappa: Tensor | float = 1.0) -> Tensor:
    """(B, Na + Nb, H, W). kappa, a number or (B, Nb, 1, 1), multiplies b; the magnitude stays as it was."""
    Na, Nb = a.shape[1], b.shape[1]
    power = kappa.float().square().mean((1, 2, 3), keepdim=True) if isinstance(kappa, Tensor) else kappa**2
    C = ((Na + Nb) / ((1 - t) ** 2 + t**2 * power)) ** 0.5
    w_a, w_b = C * (1 - t) / Na**0.5, C * kappa * t / Nb**0.5
    return torch.cat([(w_a * a).to(a.dtype), (w_b * b).to(b.dtype)], dim=1)


# Resampling by a factor of 2 with a separable filter, Figure 21: (1, 1) averages pixels, and repeats them.
def resample(x: Tensor, taps: tuple[float, ...], mode: Literal["down", "up"]) -> Tensor:
    """(B, C, H, W) -> (B, C, H/2, W/2) or (B, C, 2H, 2W)."""
    if len(taps) == 2 and taps[0] == taps[1]:  # the same without a convolution
        return F.avg_pool2d(x, 2) if mode == "down" else F.interpolate(x, scale_factor=2)
    f = x.new_tensor(taps) / sum(taps)
    kernel = torch.outer(f, f).expand(x.shape[1], 1, -1, -1)
    options = dict(stride=2, padding=(len(taps) - 1) // 2, groups=x.shape[1])
    return F.conv2d(x, kernel, **options) if mode == "down" else F.conv_transpose2d(x, 4 * kernel, **options)


# Clipping whose backward pass looks at what came out, which is mostly kept anyway. Of a compiled clamp,
# autograd stores a mask of what was inside, and a CPU is slow to write one.
class Clip(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, bound: float) -> Tensor:
        y, ctx.bound = x.clamp(-bound, bound), bound
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        (y,) = ctx.saved_tensors
        return grad * (ctx.bound - y.abs()).sign().relu(), None  # 1 inside, 0 at bounds that may be rounded


def clip(x: Tensor, bound: float) -> Tensor:
    """x, but the nearer bound, without a gradient, where it is outside. May write over x."""
    return Clip.apply(x, bound) if torch.compiler.is_compiling() else F.hardtanh_(x, -bound, bound)


# Magnitude-preserving Fourier features, Eq. 75.
class MPFourier(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.register_buffer("freqs", 2 * torch.pi * torch.randn(channels))
        self.register_buffer("phases", 2 * torch.pi * torch.rand(channels))

    def forward(self, x: Tensor) -> Tensor:
        return 2**0.5 * torch.cos(x[:, None] * self.freqs + self.phases)       # B channels, float32


class MPConv(nn.Module):
    """Magnitude-preserving convolution of (B, in, H, W) or, with kernel 0, linear layer of (B, in); no bias.
    Normalized weights cannot say how large an output is: a layer with a `gain` learns that, from that one.
    `scale`, a constant factor of the output, stands in the filters."""

    def __init__(self, C_in: int, C_out: int, kernel: int = 0, gain: float | None = None, scale: float = 1):
        super().__init__()
        shape = (C_out, C_in, kernel, kernel) if kernel else (C_out, C_in)
        self.weight = nn.Parameter(torch.randn(shape))
        self.gain = None if gain is None else nn.Parameter(torch.tensor(gain))
        self.scale, self.dims = scale, tuple(range(1, len(shape)))  # dimensions of one filter
        self.kept = (None, None)  # filters of evaluation, and of which weight

    def train(self, mode: bool = True) -> "MPConv":
        self.kept = (None, None)
        return super().train(mode)

    # Weight normalization, Eq. 47, in the graph: it removes what a gradient has along the weight.
    def filters(self, dtype: torch.dtype) -> Tensor:
        """Filters of length `scale`. In evaluation, without gradients, they are made once and kept: until the
        weight is replaced or written (which `.data` hides), or `train` or `eval` is called."""
        w, key = self.weight, None
        passing = self.training or torch.is_grad_enabled() or torch.compiler.is_compiling()
        if not passing and not w.is_inference():
            key = (w.data_ptr(), w._version, dtype)
            if self.kept[0] == key:
                return self.kept[1]
        w = w.float() / w[0].numel() ** 0.5  # what autograd saves: a forward pass may overwrite the weight
        w = (w * (self.scale / (1e-4 + torch.linalg.vector_norm(w, dim=self.dims, keepdim=True)))).to(dtype)
        if key is not None:  # with the weight's storage, so that no other comes to its address
            self.kept = (key, w, self.weight.detach())
        return w

    def forward(self, x: Tensor) -> Tensor:
        w = self.filters(x.dtype)
        w = w if self.gain is None else self.gain.to(x.dtype) * w  # cheaper than on what comes out
        return F.conv2d(x, w, padding=w.shape[-1] // 2) if w.ndim == 4 else F.linear(x, w)


class Block(nn.Module):
    """Encoder or decoder block, Figure 21; a decoder block's input may end with a long skip's channels."""

    def __init__(
        self, config: EDM2Config, E: int, flavor: Literal["enc", "dec"], in_channels: int, out_channels: int,
        skip_channels: int = 0, mode: Literal["keep", "down", "up"] = "keep", attention: bool = False,
    ):
        super().__init__()
        self.config, self.flavor, self.mode, self.takes_skip = config, flavor, mode, skip_channels > 0
        in_channels += skip_channels
        self.conv_skip = MPConv(in_channels, out_channels, kernel=1) if in_channels != out_channels else None
        in_channels = out_channels if flavor == "enc" else in_channels
        self.conv_res0 = MPConv(in_channels, out_channels, kernel=3, scale=1 / SILU)
        self.emb_linear = MPConv(E, out_channels, gain=0.0)
        self.w_main, w_res = mp_sum_weights(config.res_balance)  # one stands in the filters of what is added
        self.conv_res1 = MPConv(out_channels, out_channels, kernel=3, scale=w_res / SILU)
        self.num_heads = out_channels // config.channels_per_head if attention else 0
        if self.num_heads:
            self.attn_qkv = MPConv(out_channels, 3 * out_channels, kernel=1)
            self.w_x, w_attn = mp_sum_weights(config.attn_balance)
            self.attn_proj = MPConv(out_channels, out_channels, kernel=1, scale=w_attn)

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        """x (B, in, H, W) and the embedding (B, E), float32 -> (B, out, H', W')."""
        config = self.config
        x = x if self.mode == "keep" else resample(x, config.resample_filter, self.mode)  # B in H' W'
        main = x if self.conv_skip is None else self.conv_skip(x)              # B out H' W'
        if self.flavor == "enc":  # here magnitudes are set; everywhere else they are preserved
            x = main = normalize(main, 1)
        y = self.conv_res0(F.silu(x))                                          # of mp_silu(x)
        scale = 1 + self.emb_linear(emb)                                       # B out
        y = F.silu(y * scale[:, :, None, None].to(y.dtype))                    # mp_silu
        y = self.conv_res1(F.dropout(y, config.dropout, self.training))
        x = y.add_(main, alpha=self.w_main)                                    # mp_sum(main, y)
        if self.num_heads:  # cosine attention, whose logits cannot grow; reordered are its filters, not x
            w = rearrange(self.attn_qkv.filters(x.dtype), "(h d n) ... -> (n h d) ...", n=3, h=self.num_heads)
            qkv = F.conv2d(x, w).flatten(2).mT.contiguous()                    # B L 3C
            qkv = rearrange(qkv, "B L (n h d) -> n B h L d", n=3, h=self.num_heads)
            y = F.scaled_dot_product_attention(*normalize(qkv, -1).unbind())                      # B h L d
            y = self.attn_proj(rearrange(y, "B h (H W) d -> B (h d) H W", H=x.shape[2]))
            x = y.add_(x, alpha=self.w_x)                                      # mp_sum(x, y)
        return x if config.clip_act is None else clip(x, config.clip_act)


class UNet(nn.Module):
    """The raw network F, Figure 21."""

    def __init__(self, config: EDM2Config):
        super().__init__()
        self.config = config
        widths = [config.channels * mult for mult in config.channel_mult]
        E = config.channels * (config.channel_mult_emb or max(config.channel_mult))
        self.emb_fourier = MPFourier(config.channels * (config.channel_mult_noise or config.channel_mult[0]))
        self.emb_noise = MPConv(len(self.emb_fourier.freqs), E)
        self.emb_label = MPConv(config.num_classes, E) if config.num_classes else None

        new, self.enc, skips = partial(Block, config, E), nn.ModuleList(), widths[:1]
        attention = [config.img_size >> level in config.attn_resolutions for level in range(len(widths))]
        self.conv_in = MPConv(config.in_channels + 1, widths[0], kernel=3)
        for level, width in enumerate(widths):
            if level > 0:
                self.enc.append(new("enc", skips[-1], skips[-1], mode="down"))
                skips.append(skips[-1])
            for _ in range(config.num_blocks):
                self.enc.append(new("enc", skips[-1], width, attention=attention[level]))
                skips.append(width)
        # A gain lets the sigmoid open and close, though pooling shrinks what the calibration sees.
        self.long_skip = LongSkipScaling(config.long_skip, skips, (2, 3), layer=partial(MPConv, gain=1.0))
        last = skips[-1]
        self.dec = nn.ModuleList([new("dec", last, last, attention=True), new("dec", last, last)])
        for level, width in reversed(list(enumerate(widths))):
            if level < len(widths) - 1:
                self.dec.append(new("dec", last, last, mode="up"))
            for _ in range(config.num_blocks + 1):
                self.dec.append(new("dec", last, width, skips.pop(), attention=attention[level]))
                last = width
        self.conv_out = MPConv(last, config.in_channels, kernel=3, gain=0.0)   # F starts at 0

    def forward(self, x: Tensor, c_noise: Tensor, labels: Tensor) -> Tensor:
        """x (B, C, H, W) in the precision of the features; c_noise (B,), labels (B, K): float32."""
        emb = self.emb_noise(self.emb_fourier(c_noise))                        # B E
        if self.emb_label is not None:
            emb = mp_sum(emb, self.emb_label(labels * labels.shape[1] ** 0.5), self.config.label_balance)
        emb = mp_silu(emb)
        run = partial(checkpoint, use_reentrant=False) if self.config.checkpointing else lambda f, *x: f(*x)
        x = self.conv_in(torch.cat([x, torch.ones_like(x[:, :1])], dim=1))  # ones stand in for biases
        skips = [x]
        for block in self.enc:
            x = run(block, x, emb)
            skips.append(x)
        for block in self.dec:  # the last feature first: i = N .. 1
            if block.takes_skip:
                i, skip = len(skips), skips.pop()
                x = mp_cat(x, skip, self.config.concat_balance, self.long_skip.kappa(skip, i))
            x = run(block, x, emb)
        return self.conv_out(x)


class Denoiser(nn.Module):
    """D(x; sigma, labels) and u(sigma): the preconditioned UNet and its uncertainty network. Under autocast,
    features are of its precision; the embedding, normalizations and D stay in float32."""

    def __init__(self, config: EDM2Config):
        super().__init__()
        self.config, self.stride = config, 2 ** (len(config.channel_mult) - 1)
        self.unet = UNet(config)
        self.logvar_fourier = MPFourier(config.logvar_channels)
        self.logvar_linear = MPConv(config.logvar_channels, 1)

    def check(self, x: Tensor, sigma: Tensor, labels: Tensor | None) -> None:
        """Raise ValueError, in a sentence, for inputs that this network was not made for."""
        (B, *shape), C, K, s = x.shape, self.config.in_channels, self.config.num_classes, self.stride
        fits = len(shape) == 3 and shape[0] == C and shape[1] % s == 0 and shape[2] % s == 0
        require(fits, f"images are {tuple(shape)}, but this EDM2 takes ({C}, H, W), H and W multiples of {s}")
        require(sigma.shape == (B,), f"sigma is {tuple(sigma.shape)}, but images are {tuple(x.shape)}")
        require(labels is None or K > 0, "this EDM2 is unconditional: it takes no labels")
        fits = labels is None or labels.shape in ((B,), (B, K))  # a sentence with B would compile B in
        require(fits, f"labels are neither an index nor {K} weights of classes for each image")
        if x.device.type == "cpu" and not torch.compiler.is_compiling():  # looking would stall a GPU
            require(bool((sigma > 0).all()), f"sigma {sigma.min().item():g} is not positive")
            if labels is not None and labels.ndim == 1:
                low, high = labels.min().item(), labels.max().item()
                require(low >= 0 and high < K, f"labels {low}..{high} not in 0..{K - 1}")

    @torch.no_grad()
    def normalize_weights(self) -> None:
        """Forced weight normalization, Eq. 66: else weights grow, and updates of one size turn them less."""
        for layer in self.modules():
            if isinstance(layer, MPConv):
                layer.weight.copy_(normalize(layer.weight, *layer.dims))

    def forward(
        self, x: Tensor, sigma: Tensor, labels: Tensor | None = None, return_logvar: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """x (B, C, H, W), noisy; sigma (B,); labels (B,) int64, one-hot or soft (B, K), or None: all zeros.
        Returns D of x's shape, with `return_logvar` u (B,) too, float32. ValueError for what does not fit."""
        self.check(x, sigma, labels)
        if self.training:  # here and not in the layers, which may run again in the backward pass
            self.normalize_weights()
        x, sigma, sigma_data, K = x.float(), sigma.float(), self.config.sigma_data, self.config.num_classes
        labels = x.new_zeros(len(x), K) if labels is None else labels
        labels = labels if labels.ndim == 2 else labels[:, None] == torch.arange(K, device=x.device)  # B K
        device = x.device.type if torch.amp.is_autocast_available(x.device.type) else "cpu"
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        with torch.autocast(device, enabled=False):
            c_noise, sigma = sigma.log() / 4, sigma[:, None, None, None]       # B, B 1 1 1
            total = sigma**2 + sigma_data**2
            c_skip, c_out, c_in = sigma_data**2 / total, sigma * sigma_data / total**0.5, 1 / total**0.5
            F_x = self.unet((c_in * x).to(dtype), c_noise, labels.float())
            D_x = c_skip * x + c_out * F_x.float()
            logvar = self.logvar_linear(self.logvar_fourier(c_noise))[:, 0]
        return (D_x, logvar) if return_logvar else D_x


if __name__ == "__main__":
    for name, config in PRESETS.items():
        with torch.device("meta"):
            count = sum(p.numel() for p in Denoiser(config).parameters())
        print(f"{name:15} {config.in_channels} x {config.img_size:2}^2 images, {count:13,} parameters")

"""EDM2 in tinygrad: the twin of `model.py`, line by line; configs and presets are that file's.

Papers: Analyzing and Improving the Training Dynamics of Diffusion Models, arXiv:2312.02696v2, config G;
long-skip scaling of ScaleLong, arXiv:2310.13545v1.

Weights have PyTorch's names, so a safetensors file of either network loads in the other. Training, which
forces weights to unit magnitude, is tinygrad's TRAINING.

Reading order: the primitives up to `MPConv`, `Block`, `UNet`, `Denoiser`. Shapes are as in `model.py`.

Deviations: float32 throughout; filters are normalized in every pass, in evaluation too; `checkpointing`
changes nothing, because tinygrad has no such thing.

    python edm2_mp_unet/model_tinygrad.py        # parameter counts of all presets
"""

import math
from functools import partial
from typing import Literal

from einops import rearrange
from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType
from tinygrad.engine.realize import capturing
from tinygrad.helpers import TRAINING
from tinygrad.nn.state import get_state_dict

from edm2_mp_unet.model import PRESETS, EDM2Config
from shared.check import require
from shared.long_skip_tinygrad import LongSkipScaling


# Unit magnitude along some dimensions: of each pixel's channels (pixel norm), of each filter's weights.
def normalize(x: Tensor, *dims: int) -> Tensor:
    """x over its root mean square along `dims`, which is taken in float32. Same shape."""
    norm = x.float().square().sum(dims, keepdim=True).sqrt()
    return x * (1e-4 + norm / math.prod([x.shape[d] for d in dims]) ** 0.5).reciprocal().cast(x.dtype)


# Magnitude-preserving SiLU, Eq. 81. Where a convolution follows, the constant stands in its filters.
SILU = 0.596  # magnitude of the SiLU of a standard normal


def mp_silu(x: Tensor) -> Tensor:
    return x.silu() / SILU


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
    return Tensor.cat((w_a * a).cast(a.dtype), (w_b * b).cast(b.dtype), dim=1)


# Resampling by a factor of 2 with a separable filter, Figure 21: (1, 1) averages pixels, and repeats them.
def resample(x: Tensor, taps: tuple[float, ...], mode: Literal["down", "up"]) -> Tensor:
    """(B, C, H, W) -> (B, C, H/2, W/2) or (B, C, 2H, 2W)."""
    if len(taps) == 2 and taps[0] == taps[1]:  # the same without a convolution
        return x.avg_pool2d(2) if mode == "down" else x.repeat_interleave(2, 2).repeat_interleave(2, 3)
    f = Tensor(taps, dtype=x.dtype) / sum(taps)
    kernel = (f[:, None] * f).expand(x.shape[1], 1, -1, -1)
    options = dict(stride=2, padding=(len(taps) - 1) // 2, groups=x.shape[1])
    return x.conv2d(kernel, **options) if mode == "down" else x.conv_transpose2d(4 * kernel, **options)


def clip(x: Tensor, bound: float) -> Tensor:
    """x, but the nearer bound where it is outside."""
    return x.clip(-bound, bound)


# Magnitude-preserving Fourier features, Eq. 75.
class MPFourier:
    def __init__(self, channels: int):
        self.freqs = (2 * math.pi * Tensor.randn(channels)).is_param_(False)
        self.phases = (2 * math.pi * Tensor.rand(channels)).is_param_(False)

    def __call__(self, x: Tensor) -> Tensor:
        return 2**0.5 * (x[:, None] * self.freqs + self.phases).cos()          # B channels, float32


class MPConv:
    """Magnitude-preserving convolution of (B, in, H, W) or, with kernel 0, linear layer of (B, in); no bias.
    Normalized weights cannot say how large an output is: a layer with a `gain` learns that, from that one.
    `scale`, a constant factor of the output, stands in the filters."""

    def __init__(self, C_in: int, C_out: int, kernel: int = 0, gain: float | None = None, scale: float = 1):
        shape = (C_out, C_in, kernel, kernel) if kernel else (C_out, C_in)
        self.weight = Tensor.randn(*shape)
        self.gain = None if gain is None else Tensor.full((), gain, dtype=dtypes.float32)
        self.scale, self.dims = scale, tuple(range(1, len(shape)))  # dimensions of one filter

    # Weight normalization, Eq. 47, in the graph: it removes what a gradient has along the weight.
    def filters(self, dtype: DType) -> Tensor:
        """Filters of length `scale`."""
        w = self.weight.float() / self.weight[0].numel() ** 0.5
        norm = w.square().sum(self.dims, keepdim=True).sqrt()
        return (w * (self.scale / (1e-4 + norm))).cast(dtype)

    def __call__(self, x: Tensor) -> Tensor:
        w = self.filters(x.dtype)
        w = w if self.gain is None else self.gain.cast(x.dtype) * w  # cheaper than on what comes out
        if w.ndim == 2:
            return x.linear(w.T)
        y = x.contiguous().conv2d(w.contiguous(), padding=w.shape[-1] // 2)    # stored, what goes in and out
        return y.contiguous().contiguous_backward()  # and gradients: fused, they would be computed many times


class Block:
    """Encoder or decoder block, Figure 21; a decoder block's input may end with a long skip's channels."""

    def __init__(
        self, config: EDM2Config, E: int, flavor: Literal["enc", "dec"], in_channels: int, out_channels: int,
        skip_channels: int = 0, mode: Literal["keep", "down", "up"] = "keep", attention: bool = False,
    ):  # fmt: skip
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

    def __call__(self, x: Tensor, emb: Tensor) -> Tensor:
        """x (B, in, H, W) and the embedding (B, E), float32 -> (B, out, H', W')."""
        config = self.config
        x = x if self.mode == "keep" else resample(x, config.resample_filter, self.mode)  # B in H' W'
        main = x if self.conv_skip is None else self.conv_skip(x)              # B out H' W'
        if self.flavor == "enc":  # here magnitudes are set; everywhere else they are preserved
            x = main = normalize(main, 1)
        y = self.conv_res0(x.silu())                                           # of mp_silu(x)
        scale = 1 + self.emb_linear(emb)                                       # B out
        y = (y * scale[:, :, None, None].cast(y.dtype)).silu()                 # mp_silu
        y = self.conv_res1(y.dropout(config.dropout))
        x = y + self.w_main * main                                             # mp_sum(main, y)
        if self.num_heads:  # cosine attention, whose logits cannot grow
            qkv = rearrange(self.attn_qkv(x), "B (h d n) H W -> n B h (H W) d", n=3, h=self.num_heads)
            q, k, v = normalize(qkv, -1)
            y = q.scaled_dot_product_attention(k, v)                           # B h L d
            y = self.attn_proj(rearrange(y, "B h (H W) d -> B (h d) H W", H=x.shape[2]))
            x = y + self.w_x * x                                               # mp_sum(x, y)
        return x if config.clip_act is None else clip(x, config.clip_act)


class UNet:
    """The raw network F, Figure 21."""

    def __init__(self, config: EDM2Config):
        self.config = config
        widths = [config.channels * mult for mult in config.channel_mult]
        E = config.channels * (config.channel_mult_emb or max(config.channel_mult))
        self.emb_fourier = MPFourier(config.channels * (config.channel_mult_noise or config.channel_mult[0]))
        self.emb_noise = MPConv(len(self.emb_fourier.freqs), E)
        self.emb_label = MPConv(config.num_classes, E) if config.num_classes else None

        new, self.enc, skips = partial(Block, config, E), [], widths[:1]
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
        self.dec = [new("dec", last, last, attention=True), new("dec", last, last)]
        for level, width in reversed(list(enumerate(widths))):
            if level < len(widths) - 1:
                self.dec.append(new("dec", last, last, mode="up"))
            for _ in range(config.num_blocks + 1):
                self.dec.append(new("dec", last, width, skips.pop(), attention=attention[level]))
                last = width
        self.conv_out = MPConv(last, config.in_channels, kernel=3, gain=0.0)   # F starts at 0

    def __call__(self, x: Tensor, c_noise: Tensor, labels: Tensor) -> Tensor:
        """x (B, C, H, W) in the precision of the features; c_noise (B,), labels (B, K): float32."""
        emb = self.emb_noise(self.emb_fourier(c_noise))                        # B E
        if self.emb_label is not None:
            emb = mp_sum(emb, self.emb_label(labels * labels.shape[1] ** 0.5), self.config.label_balance)
        emb = mp_silu(emb)
        x = self.conv_in(x.cat(x[:, :1].ones_like(), dim=1))  # ones stand in for biases
        skips = [x]
        for block in self.enc:
            x = block(x, emb)
            skips.append(x)
        for block in self.dec:  # the last feature first: i = N .. 1
            if block.takes_skip:
                i, skip = len(skips), skips.pop()
                x = mp_cat(x, skip, self.config.concat_balance, self.long_skip.kappa(skip, i))
            x = block(x, emb)
        return self.conv_out(x)


class Denoiser:
    """D(x; sigma, labels) and u(sigma): the preconditioned UNet and its uncertainty network. All in
    float32."""

    def __init__(self, config: EDM2Config):
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
        fits = labels is None or labels.shape in ((B,), (B, K))
        require(fits, f"labels are neither an index nor {K} weights of classes for each image")
        if not capturing:  # TinyJit records operations on values that nobody can look at
            require(sigma.numpy().min() > 0, f"sigma {sigma.numpy().min():g} is not positive")
            if labels is not None and labels.ndim == 1:
                low, high = labels.numpy().min(), labels.numpy().max()
                require(low >= 0 and high < K, f"labels {low}..{high} not in 0..{K - 1}")

    def normalize_weights(self) -> None:
        """Forced weight normalization, Eq. 66: else weights grow, and updates of one size turn them less."""
        layers = get_state_dict(self, tensor_type=MPConv).values()
        Tensor.realize(*(layer.weight.assign(normalize(layer.weight, *layer.dims)) for layer in layers))

    def __call__(
        self, x: Tensor, sigma: Tensor, labels: Tensor | None = None, return_logvar: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """x (B, C, H, W), noisy; sigma (B,); labels (B,) int64, one-hot or soft (B, K), or None: all zeros.
        Returns D of x's shape, with `return_logvar` u (B,) too, float32. ValueError for what does not fit."""
        self.check(x, sigma, labels)
        if TRAINING:
            self.normalize_weights()
        x, sigma, sigma_data, K = x.float(), sigma.float(), self.config.sigma_data, self.config.num_classes
        labels = Tensor.zeros(len(x), K) if labels is None else labels
        labels = labels if labels.ndim == 2 else labels[:, None] == Tensor.arange(K)  # B K
        c_noise, sigma = sigma.log() / 4, sigma[:, None, None, None]           # B, B 1 1 1
        total = sigma**2 + sigma_data**2
        c_skip, c_out, c_in = sigma_data**2 / total, sigma * sigma_data / total**0.5, 1 / total**0.5
        F_x = self.unet(c_in * x, c_noise, labels.float())
        D_x = c_skip * x + c_out * F_x
        logvar = self.logvar_linear(self.logvar_fourier(c_noise))[:, 0]
        return (D_x, logvar) if return_logvar else D_x


if __name__ == "__main__":
    for name, config in PRESETS.items():
        count = sum(p.numel() for p in get_state_dict(Denoiser(config)).values() if p.is_param)
        print(f"{name:15} {config.in_channels} x {config.img_size:2}^2 images, {count:13,} parameters")

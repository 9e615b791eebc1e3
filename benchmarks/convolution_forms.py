"""Layers and ways to convolve of `benchmarks/convolutions.py`: XLA in several forms, and
PyTorch.
"""

from functools import partial, reduce
from operator import add
from typing import Any, NamedTuple

import numpy as np

PASSES = ("forward", "input gradient", "kernel gradient")
YNN = "xla_cpu_experimental_ynn_fusion_type"
# All that XLA leaves to YNNPACK of its own accord, but convolutions.
WITHOUT_YNN: dict[str, Any] = {YNN: "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT,LIBRARY_FUSION_TYPE_REDUCE"}
# Options that say they are about convolutions, libraries, threads or vectors, each alone on top of
# the defaults.
OPTIONS = {
    "defaults": {},
    "YNNPACK without convolutions": WITHOUT_YNN,
    "nothing to YNNPACK": {YNN: ""},
    "convolutions alone to YNNPACK": {YNN: "LIBRARY_FUSION_TYPE_INDIVIDUAL_CONVOLUTION"},
    "xla_cpu_use_onednn": {"xla_cpu_use_onednn": True},
    "xla_cpu_experimental_onednn_custom_call": {"xla_cpu_experimental_onednn_custom_call": True},
    "xla_cpu_experimental_onednn_fusion_type=DOT": {
        "xla_cpu_experimental_onednn_fusion_type": "LIBRARY_FUSION_TYPE_DOT"
    },
    "xla_cpu_use_xnnpack=false": {"xla_cpu_use_xnnpack": False},
    "xla_cpu_experimental_xnn_fusion_type=DOT": {
        "xla_cpu_experimental_xnn_fusion_type": "LIBRARY_FUSION_TYPE_DOT"
    },
    "xla_cpu_experimental_xnn_graph_fusion_mode": {
        "xla_cpu_experimental_xnn_graph_fusion_mode": "XNN_GRAPH_FUSION_MODE_GREEDY"
    },
    "xla_cpu_use_acl": {"xla_cpu_use_acl": True},
    "xla_cpu_use_fusion_emitters=false": {"xla_cpu_use_fusion_emitters": False},
    "xla_cpu_enable_fast_math": {"xla_cpu_enable_fast_math": True},
    "xla_cpu_multi_thread_eigen=false": {"xla_cpu_multi_thread_eigen": False},
    "xla_cpu_prefer_vector_width=512": {"xla_cpu_prefer_vector_width": 512},
    "xla_cpu_opt_preset": {"xla_cpu_opt_preset": "CPU_OPT_PRESET_FAST_RUNTIME"},
}


class Layer(NamedTuple):
    """A convolution `[batch, size, size, before]` -> `[batch, size / stride, size / stride, after]`
    with padding (kernel - 1) / 2.
    """

    network: str
    batch: int
    size: int
    before: int
    after: int
    kernel: int
    stride: int = 1

    @property
    def name(self) -> str:
        stride = f"/{self.stride}" if self.stride > 1 else ""
        return (
            f"{self.network} {self.batch}x{self.size}x{self.size}, "
            f"{self.kernel}x{self.kernel}{stride}, {self.before} to {self.after}"
        )

    @property
    def flops(self) -> int:
        return (
            2
            * self.batch
            * (self.size // self.stride) ** 2
            * self.kernel**2
            * self.before
            * self.after
        )


LAYERS = (
    Layer("ResNet-20", 32, 32, 3, 16, 3),
    Layer("ResNet-20", 32, 32, 16, 16, 3),
    Layer("ResNet-20", 32, 32, 16, 32, 3, 2),
    Layer("ResNet-20", 32, 16, 32, 32, 3),
    Layer("ResNet-20", 32, 16, 32, 64, 3, 2),
    Layer("ResNet-20", 32, 8, 64, 64, 3),
    Layer("ResNet-50", 8, 64, 3, 64, 7, 2),
    Layer("ResNet-50", 8, 16, 64, 64, 3),
    Layer("ResNet-50", 8, 16, 64, 256, 1),
    Layer("ResNet-50", 8, 8, 128, 128, 3),
    Layer("ResNet-50", 8, 4, 256, 256, 3),
)


def make_arrays(layer):
    """Returns input, kernel and a gradient of the output, channels last."""
    rng, out = np.random.default_rng(0), layer.size // layer.stride
    shapes = (
        (layer.batch, layer.size, layer.size, layer.before),
        (layer.kernel, layer.kernel, layer.before, layer.after),
        (layer.batch, out, out, layer.after),
    )  # fmt: skip
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def convolve(x, kernel, layer):
    """XLA's convolution as Flax writes it."""
    from jax import lax

    return lax.conv_general_dilated(
        x,
        kernel,
        (layer.stride,) * 2,
        [((layer.kernel - 1) // 2,) * 2] * 2,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )


def convolve_nchw(x, kernel, layer):
    """The same of arrays with channels first."""
    from jax import lax

    return lax.conv_general_dilated(
        x,
        kernel,
        (layer.stride,) * 2,
        [((layer.kernel - 1) // 2,) * 2] * 2,
        dimension_numbers=("NCHW", "OIHW", "NCHW"),
    )


def shifted_views(x, layer):
    """Returns for each place of the kernel what it sees of the input `[rows, channels]`."""
    import jax.numpy as jnp
    from jax import lax

    pad, out, step = (layer.kernel - 1) // 2, layer.size // layer.stride, layer.stride
    padded = jnp.pad(x, ((0, 0), (pad, pad), (pad, pad), (0, 0)))
    last = (out - 1) * step + 1
    return [
        lax.slice(
            padded, (0, i, j, 0), (len(x), i + last, j + last, layer.before), (1, step, step, 1)
        ).reshape(-1, layer.before)
        for i in range(layer.kernel)
        for j in range(layer.kernel)
    ]


def sum_of_matmuls(x, kernel, layer):
    """A matmul for each place of the kernel, added up; its gradients are matmuls of shifted views,
    too.
    """
    out = layer.size // layer.stride
    flat = kernel.reshape(-1, layer.before, layer.after)
    total = reduce(add, (view @ flat[index] for index, view in enumerate(shifted_views(x, layer))))
    return total.reshape(layer.batch, out, out, layer.after)


def one_matmul(x, kernel, layer):
    """One matmul of all shifted views side by side (im2col)."""
    import jax.numpy as jnp

    out = layer.size // layer.stride
    views = jnp.concatenate(shifted_views(x, layer), axis=-1)
    return (views @ kernel.reshape(-1, layer.after)).reshape(layer.batch, out, out, layer.after)


def passes_of(form, layer):
    """Returns functions of input, kernel and gradient of the output, one for each pass."""
    import jax

    def input_gradient(x, kernel, grad):
        return jax.vjp(lambda x: form(x, kernel, layer), x)[1](grad)[0]

    def kernel_gradient(x, kernel, grad):
        return jax.vjp(lambda kernel: form(x, kernel, layer), kernel)[1](grad)[0]

    return dict(
        zip(
            PASSES,
            (lambda x, kernel, grad: form(x, kernel, layer), input_gradient, kernel_gradient),
            strict=True,
        )
    )


def channels_first(x, kernel, grad):
    return x.transpose(0, 3, 1, 2), kernel.transpose(3, 2, 0, 1), grad.transpose(0, 3, 1, 2)


def xla_runs(layer, *, form=convolve, options=None, first=False, dtype="float32"):
    """Returns for each pass a function that runs it to its end, and the compiled program."""
    import jax
    import jax.numpy as jnp

    arrays = make_arrays(layer)
    on_device = [
        jnp.asarray(array, dtype) for array in (channels_first(*arrays) if first else arrays)
    ]

    def run(compiled):
        return lambda: compiled(*on_device).block_until_ready()

    jitted = {
        name: jax.jit(function, keep_unused=True)
        for name, function in passes_of(form, layer).items()
    }
    programs = {
        name: function.lower(*on_device).compile(compiler_options=options or {})
        for name, function in jitted.items()
    }
    return {name: (run(program), program) for name, program in programs.items()}


def torch_runs(layer):
    """Returns for each pass a function that runs it, with PyTorch and channels last."""
    import torch

    arrays = (np.ascontiguousarray(array) for array in channels_first(*make_arrays(layer)))
    x, kernel, grad = (
        torch.from_numpy(array).contiguous(memory_format=torch.channels_last) for array in arrays
    )
    stride, pad = [layer.stride] * 2, [(layer.kernel - 1) // 2] * 2

    def backward(mask):
        return torch.ops.aten.convolution_backward(
            grad, x, kernel, None, stride, pad, [1, 1], False, [0, 0], 1, mask
        )

    functions = (
        lambda: torch.nn.functional.conv2d(x, kernel, stride=stride, padding=pad),
        lambda: backward([True, False, False]),
        lambda: backward([False, True, False]),
    )
    return {name: (function, None) for name, function in zip(PASSES, functions, strict=True)}


CONTENDERS = {
    "XLA": xla_runs,
    "without YNNPACK": partial(xla_runs, options=WITHOUT_YNN),
    "channels first": partial(xla_runs, form=convolve_nchw, first=True, options=WITHOUT_YNN),
    "bfloat16": partial(xla_runs, options=WITHOUT_YNN, dtype="bfloat16"),
    "sum of matmuls": partial(xla_runs, form=sum_of_matmuls, options=WITHOUT_YNN),
    "one matmul": partial(xla_runs, form=one_matmul, options=WITHOUT_YNN),
    "PyTorch": torch_runs,
}

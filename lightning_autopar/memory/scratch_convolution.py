"""What convolutions take inside of one operation on a CPU: torch's own kernels and oneDNN's. Knows shapes and layouts; no ledger.

Torch gives 32-bit convolutions to oneDNN, but for a few small ones (``ATen/native/Convolution.cpp``, ``use_mkldnn``). What isn't given
away goes through a matrix product over columns (``ConvolutionMM2d.cpp``). oneDNN works on blocks of eight or sixteen channels: it copies
input, weight and output to such a layout and back. Its choice of kernels follows ``jit_avx2_conv_kernel_f32.cpp``; the sizes were read
from the profiler's memory events of torch 2.13, operation by operation.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Scratch(NamedTuple):
    """What a kernel allocates when its outputs are there already, and frees before it returns.

    Args:
        scaled_bytes: the part that grows with the batch.
        fixed_bytes: the part that doesn't.
    """

    scaled_bytes: int
    fixed_bytes: int = 0


#: Below so many elements a single image is left to torch's own kernel.
_SMALL_ELEMENTS = 20480
#: oneDNN's kernels on channels-last data: buffers of a thread, about.
_THREAD_BYTES = 4120
#: Kernels as wide as this go through columns.
_WIDE = 14
#: Copies of the weight's gradient that oneDNN's product over columns adds up.
_PARTIAL_SUMS = 4
_ONEDNN = torch.backends.mkldnn.is_available()
_BF16 = _ONEDNN and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
_FP16 = _ONEDNN and bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


def convolution(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Scratch | None:
    """Of ``aten.convolution``; its output is there already."""
    shape = _Convolution(args, output)
    if not shape.by_onednn:
        return shape.columns_forward()
    if shape.channels_last:
        if shape.depthwise:
            return Scratch(0, shape.weight_bytes)
        if shape.pointwise:
            return None if shape.threads == 1 else Scratch(0, shape.weight_bytes + shape.threads * _THREAD_BYTES)
        return Scratch(0, shape.weight_bytes + shape.wide_weight_bytes + (shape.threads + 1) * _THREAD_BYTES)
    plain, blocked, missing = shape.result_bytes, shape.blocked_result_bytes, shape.result_bytes
    copied = shape.copied_bytes(shape.image)
    if shape.by_columns:
        columns = shape.columns_bytes * min(shape.threads, shape.rows)
        return _fullest(Scratch(copied + columns + blocked - missing), Scratch(copied + blocked + plain - missing))
    reordered = Scratch(copied + shape.blocked_image_bytes + shape.unit_stride_bytes + blocked - missing, shape.blocked_weight_bytes)
    copies = 2 if shape.transposed else 1
    return _fullest(reordered, Scratch(copied + blocked + copies * plain - missing))


def convolution_backward(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Scratch | None:
    """Of ``aten.convolution_backward``; the gradients that it returns are there already."""
    gradient, image, weight, _, *rest = args
    wanted = rest[-1]
    shape = _Convolution((image, weight, None, *rest[:-1]), gradient)
    weight_gradient = shape.weight_bytes if wanted[1] else 0
    if not shape.by_onednn:
        return shape.columns_backward(gradient, wanted)
    if shape.channels_last:
        copied = 0 if _is_channels_last(gradient) else shape.result_bytes
        if shape.pointwise and shape.threads == 1:
            return Scratch(copied) if copied else None
        if shape.depthwise and shape.weight_by_columns:
            return Scratch(copied + shape.columns_bytes, _PARTIAL_SUMS * shape.weight_bytes)
        if shape.depthwise or shape.pointwise:
            return Scratch(copied, 2 * shape.weight_bytes)
        return _fullest(Scratch(copied, 3 * weight_gradient), Scratch(copied, 2 * shape.weight_bytes - weight_gradient))
    copied = shape.copied_bytes(gradient) + shape.copied_bytes(image)
    found = [Scratch(copied, weight_gradient)]
    if wanted[0]:
        copies = 2 if shape.strided and not shape.depthwise and not shape.transposed else 1
        found.append(_less(Scratch(copied + copies * shape.image_bytes), weight_gradient))
        if shape.data_by_columns:
            found.append(_less(Scratch(copied + shape.columns_bytes * shape.threads), weight_gradient))
        else:
            found.append(_less(Scratch(copied + shape.blocked_result_bytes, shape.blocked_weight_bytes), weight_gradient))
    if wanted[1]:
        if shape.weight_by_columns:
            threads = 1 if shape.dilated else shape.threads
            found.append(Scratch(copied + threads * shape.columns_bytes, threads * _PARTIAL_SUMS * shape.weight_bytes))
        else:
            inputs = (
                (shape.blocked_image_bytes or shape.block * shape.lone_channel_bytes) + shape.blocked_result_bytes + shape.unit_stride_bytes
            )
            found.append(Scratch(copied + inputs, max(0, shape.blocked_weight_bytes - shape.weight_bytes)))
    return max(found, key=sum)


def is_copied(tensor: Tensor) -> bool:
    """Whether a kernel that wants its input contiguous copies it."""
    return not tensor.is_contiguous()


def _fullest(*moments: Scratch) -> Scratch:
    fullest = max(moments, key=sum)
    return Scratch(max(0, fullest.scaled_bytes), max(0, fullest.fixed_bytes))


def _less(scratch: Scratch, absent_bytes: int) -> Scratch:
    """The same at a moment at which so much of the outputs isn't there yet."""
    fixed = scratch.fixed_bytes - absent_bytes
    return Scratch(max(0, scratch.scaled_bytes + min(0, fixed)), max(0, fixed))


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _is_channels_last(tensor: Tensor) -> bool:
    """Whether torch would take its layout for channels-last."""
    if tensor.dim() == 4:
        return tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()
    return tensor.dim() == 5 and tensor.is_contiguous(memory_format=torch.channels_last_3d) and not tensor.is_contiguous()


class _Convolution:
    """The arguments of a convolution, and what oneDNN would make of them.

    Args:
        args: those of ``aten.convolution``.
        result: its output, or something of that shape.
    """

    def __init__(self, args: tuple[Any, ...], result: Tensor) -> None:
        image, weight, _, stride, padding, dilation, transposed, _, groups = args
        space = image.dim() - 2
        self.image: Tensor = image
        self.weight: Tensor = weight
        self.result = result
        self.transposed: bool = transposed
        self.groups: int = groups
        self.stride: tuple[int, ...] = tuple(stride) * (space if len(stride) == 1 else 1)
        self.padding: tuple[int, ...] = tuple(padding) * (space if len(padding) == 1 else 1)
        self.dilation: tuple[int, ...] = tuple(dilation) * (space if len(dilation) == 1 else 1)
        self.kernel = tuple(self.weight.shape[2:])
        self.threads = torch.get_num_threads()
        self.block = 16 if torch.backends.cpu.get_cpu_capability().startswith("AVX512") else 8

    @cached_property
    def by_onednn(self) -> bool:
        """``use_mkldnn`` of ``Convolution.cpp``; half precision needs AVX-512, which is where it is fast."""
        if not _ONEDNN or not torch.backends.mkldnn.enabled:
            return False
        if self.image.dtype is torch.bfloat16:
            return _BF16
        if self.image.dtype is torch.float16:
            return _FP16
        if self.image.dtype is not torch.float32:
            return False
        worth = self.strided or self.dilated or self.rows >= 16 or any(size != 1 for size in self.kernel) or self.threads > 1
        large = self.image.numel() > _SMALL_ELEMENTS or (len(self.kernel) > 1 and all(size > 3 for size in self.kernel[-2:]))
        return worth and (self.groups > 1 or self.rows > 1 or large)

    @property
    def rows(self) -> int:
        return int(self.image.shape[0])

    @property
    def strided(self) -> bool:
        return any(value != 1 for value in self.stride)

    @property
    def dilated(self) -> bool:
        return any(value != 1 for value in self.dilation)

    @property
    def pointwise(self) -> bool:
        return all(size == 1 for size in self.kernel) and not self.strided and not any(self.padding)

    @property
    def depthwise(self) -> bool:
        return self.groups > 1 and self.groups == self.image.shape[1] == self.result.shape[1]

    @cached_property
    def channels_last(self) -> bool:
        return _is_channels_last(self.image) or _is_channels_last(self.weight)

    @cached_property
    def image_bytes(self) -> int:
        return _bytes(self.image)

    @cached_property
    def weight_bytes(self) -> int:
        return _bytes(self.weight)

    @cached_property
    def result_bytes(self) -> int:
        return _bytes(self.result)

    def copied_bytes(self, tensor: Tensor) -> int:
        """Of a tensor that is made contiguous first."""
        return _bytes(tensor) if is_copied(tensor) else 0

    def _blocked(self, channels: int) -> int:
        return -(-channels // self.block) * self.block

    def _blocked_bytes(self, tensor: Tensor) -> int:
        """In oneDNN's layout; one or three channels stay as they are."""
        channels = int(tensor.shape[1])
        if self.groups == 1 and channels in (1, 2, 3):
            return 0
        return _bytes(tensor) // channels * self._blocked(channels)

    @cached_property
    def blocked_image_bytes(self) -> int:
        return self._blocked_bytes(self.image)

    @property
    def lone_channel_bytes(self) -> int:
        """The image's, if it has one channel only: backward pads it to a block."""
        return self.image_bytes if self.image.shape[1] == 1 else 0

    @cached_property
    def blocked_result_bytes(self) -> int:
        return self._blocked_bytes(self.result) or self.result_bytes

    @cached_property
    def blocked_weight_bytes(self) -> int:
        outputs, inputs = int(self.weight.shape[0]), int(self.weight.shape[1])
        if self.groups > 1:
            return self.weight_bytes
        few = min(outputs, inputs) <= 3
        padded = self._blocked(max(outputs, inputs)) * (min(outputs, inputs) if few else self._blocked(min(outputs, inputs)))
        return self.weight_bytes // (outputs * inputs) * padded

    @cached_property
    def wide_weight_bytes(self) -> int:
        """As the kernels on channels-last data want it: in blocks of 24 outputs."""
        outputs = int(self.weight.shape[0])
        return self.weight_bytes // outputs * (-(-outputs // 24) * 24 if outputs >= 48 else outputs)

    @cached_property
    def unit_stride_bytes(self) -> int:
        """A pointwise convolution with a stride gathers its pixels first, a thread at a time."""
        if not self.strided or any(size != 1 for size in self.kernel) or self.channels_last or self.transposed:
            return 0
        return self.threads * (int(self.image.shape[1]) * math.prod(self.result.shape[2:]) * self.image.element_size() + 128)

    # -- products over columns -------------------------------------------------------------------------------------------------------------

    @cached_property
    def columns_bytes(self) -> int:
        """One image's columns; of three dimensions one plane's."""
        space = self.image if self.transposed else self.result
        channels = int(self.weight.shape[1])
        plane = tuple(space.shape[2:]) if space.dim() < 5 else tuple(space.shape[3:])
        elements: int = channels * math.prod(self.kernel) * math.prod(plane)
        return elements * self.image.element_size() + 128

    @cached_property
    def by_columns(self) -> bool:
        """Whether oneDNN has no better kernel forward."""
        return self.kernel[-1] >= _WIDE and self.groups > 1

    @cached_property
    def data_by_columns(self) -> bool:
        """Whether it has none for the image's gradient: where the kernel reaches too far."""
        reach = (self.kernel[-1] - 1) * self.dilation[-1] - self.padding[-1]
        return self.by_columns or (reach > 4 and not self.strided and not self.transposed and self.dilated)

    @cached_property
    def weight_by_columns(self) -> bool:
        """Whether it has none for the weight's: dilation, depth with padding, or a kernel larger than its image."""
        if self.transposed or all(size == 1 for size in self.kernel):
            return False
        larger = any(size > side for size, side in zip(self.kernel, self.image.shape[2:], strict=True))
        if self.depthwise:
            return larger
        deep = len(self.kernel) == 3 and bool(self.padding[0])
        return self.dilated or deep or larger or self.kernel[-1] >= _WIDE

    def columns_forward(self) -> Scratch | None:
        """By torch's own kernel: the columns of the whole batch."""
        if self.groups > 1:
            return Scratch(self.result_bytes)  # a group at a time, put together at the end
        if self.pointwise:
            return None
        return Scratch(self._all_columns_bytes)

    def columns_backward(self, gradient: Tensor, wanted: Any) -> Scratch | None:
        """By torch's own kernel: columns again."""
        copied = self.copied_bytes(gradient)
        if self.groups > 1:
            return Scratch(copied + (self.image_bytes if wanted[0] else 0), self.weight_bytes if wanted[1] else 0)
        if self.pointwise:
            return Scratch(copied)
        return Scratch(copied + (self._all_columns_bytes // max(1, self.rows) if self.transposed else self._all_columns_bytes))

    @cached_property
    def _all_columns_bytes(self) -> int:
        space = self.image if self.transposed else self.result
        channels = int(self.weight.shape[1])
        elements: int = self.rows * channels * math.prod(self.kernel) * math.prod(space.shape[2:])
        return elements * self.image.element_size()

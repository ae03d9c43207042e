"""A coarse footprint of a module whose step can be neither traced nor run. Knows Lightning modules and torch; it runs no step.

Parameters, gradients and optimizer state are counted, activations guessed.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from lightning_autopar._lightning import LightningModule, Trainer
from lightning_autopar._lightning_compat import is_overridden
from lightning_autopar.memory.fakes.fake_copies import as_if_real, drawing_nothing, fake_copy, fake_mode
from lightning_autopar.memory.fakes.shadow_values import ShadowValues
from lightning_autopar.memory.footprint import Footprint, LayerFootprint
from lightning_autopar.memory.trace.bare_step import BareStep
from lightning_autopar.memory.trace.extra_tensors import held_by_callbacks
from lightning_autopar.memory.trace.find_blocks import batch_norms, find_blocks, tied_groups
from lightning_autopar.memory.trace.first_batch import RAISED, FirstBatch, tensors_of

log = logging.getLogger(__name__)

#: Adam and similar optimizers keep two values for each parameter.
_STATES = 2
#: How many tensors of its output's size an average layer's forward saves: the output and what its activation function keeps.
_SAVED_PER_OUTPUT = 2
#: By how much the guess of activations may be too low, as a share of everything.
MARGIN = 0.5


def guess(
    module: LightningModule,
    trainer: Trainer | None,
    first: FirstBatch,
    *,
    stage: str,
    dtype: torch.dtype | None,
    reason: str,
) -> Footprint:
    """What can be said of a step without running it.

    Activations: each layer with a weight matrix is taken to run once at every position of the batch and to leave two tensors of its
    output's size; positions are the elements of token ids, or the rows, pixels or frames of floating-point input. This is too much for
    convolutions that shrink their input, and too little for attention without a fused kernel.

    Args:
        module: the user's module; it isn't changed.
        stage: ``"fit"`` or a stage of evaluation.
        dtype: of true precision; None for the parameters' own.
        reason: why the step couldn't be traced.
    """
    training = stage == "fit"
    assumptions = [f"the step can't be traced ({reason}); activations are a guess from the layers' output sizes"]
    states: dict[int, int] | None = None
    optimizers = 1
    built: LightningModule = module
    try:
        # The copy is the module after configure_model.
        built, states, optimizers = _built(module, trainer, stage, dtype)
    except RAISED as error:
        log.debug("the optimizers can't be built on fake tensors", exc_info=True)
        if training:
            assumptions.append(
                f"the optimizers can't be built without the parameters ({type(error).__name__}); {_STATES} states a parameter are assumed"
            )
        if is_overridden("configure_model", module):
            assumptions.append("what configure_model builds is not counted")
    parameters = [parameter for parameter in built.parameters() if not is_lazy(parameter)]
    if len(parameters) < len(list(built.parameters())):
        assumptions.append("parameters that have no shape yet are not counted; call the module once on a batch before it is trained")
    sizes = {id(parameter): _bytes(parameter, dtype) for parameter in parameters}
    trainable = {id(parameter) for parameter in parameters if parameter.requires_grad}
    if states is None:
        states = {key: _STATES * sizes[key] for key in trainable} if training else {}
    tensors = tensors_of(first.batch)
    input_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    positions = max((_positions(tensor) for tensor in tensors), default=first.batch_size or 1)
    element = (dtype or torch.get_default_dtype()).itemsize
    scale = positions * element * _SAVED_PER_OUTPUT

    def block(fqn: str, part: nn.Module) -> LayerFootprint:
        own = [parameter for parameter in part.parameters() if not is_lazy(parameter)]
        return LayerFootprint(
            fqn=fqn,
            parameters=sum(parameter.numel() for parameter in own),
            parameter_bytes=sum(sizes[id(parameter)] for parameter in own),
            gradient_bytes=sum(sizes[id(parameter)] for parameter in own if id(parameter) in trainable) if training else 0,
            optimizer_bytes=sum(states.get(id(parameter), 0) for parameter in own) if training else 0,
            activation_bytes=_outputs(part) * scale if training else 0,
            input_bytes=positions * element * max((parameter.shape[-1] for parameter in own if parameter.dim() > 1), default=0),
            # It wasn't run: whether running it twice is harmless isn't known.
            recomputable=False,
        )

    complete = len(parameters) == len(list(built.parameters()))
    held_bytes, changes = held_by_callbacks(trainer, built, on_cpu=True) if training and complete else (0, [])
    assumptions += changes
    widest = max((parameter.shape[0] for parameter in parameters if parameter.dim() > 1), default=0)
    gradient_bytes = sum(sizes[key] for key in trainable) if training else 0
    return Footprint(
        parameters=sum(parameter.numel() for parameter in parameters),
        trainable_parameters=sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        batch_size=first.batch_size,
        parameter_bytes=sum(sizes.values()),
        gradient_bytes=gradient_bytes,
        optimizer_bytes=sum(states.values()) if training else 0,
        buffer_bytes=sum(_bytes(buffer, dtype) for buffer in built.buffers() if not is_lazy(buffer)) + held_bytes,
        activation_bytes=_outputs(built) * scale if training else 0,
        temporary_bytes=widest * scale,
        input_bytes=input_bytes,
        largest_parameter_bytes=max(sizes.values(), default=0),
        flops=(6 if training else 2) * positions * sum(parameter.numel() for parameter in parameters if parameter.dim() > 1),
        blocks=tuple(block(fqn, part) for fqn, part in find_blocks(built).items()) if complete else (),
        tied=tied_groups(built),
        training=training,
        automatic_optimization=module.automatic_optimization,
        optimizers=optimizers,
        batch_norm=tuple(batch_norms(built)),
        configures_model=is_overridden("configure_model", module),
        traced=False,
        margin=MARGIN,
        assumptions=tuple(assumptions),
    )


def _built(
    module: LightningModule, trainer: Trainer | None, stage: str, dtype: torch.dtype | None
) -> tuple[LightningModule, dict[int, int], int]:
    """A fake copy after ``configure_model``; bytes of optimizer state by the id of its parameters; the number of optimizers."""
    mode, shadow = fake_mode(), ShadowValues()
    copy: LightningModule = fake_copy(module, mode, shadow, dtype=dtype)
    with drawing_nothing(), as_if_real(shadow, "cpu"), mode, shadow:
        rehearsal = BareStep(copy, trainer, stage, autocast_dtype=None, default_dtype=dtype, enter=lambda phase: None)
        rehearsal.build()
        for parameter in copy.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        for optimizer in rehearsal.optimizers:
            optimizer.step(closure=lambda: 0.0)
    found: dict[int, int] = {}
    for parameter in copy.parameters():
        leaves = [leaf for optimizer in rehearsal.optimizers for leaf in tree_leaves(dict(optimizer.state.get(parameter, {})))]
        found[id(parameter)] = sum(leaf.numel() * leaf.element_size() for leaf in leaves if isinstance(leaf, Tensor))
    for optimizer in rehearsal.optimizers:
        if isinstance(optimizer, torch.optim.LBFGS):  # its history, and the vectors of the current search
            own = optimizer.param_groups[0]["params"]
            size = sum(parameter.numel() * parameter.element_size() for parameter in own)
            found[id(own[0])] = (2 * optimizer.param_groups[0]["history_size"] + 3) * size
    return copy, found, len(rehearsal.optimizers)


def _bytes(tensor: Tensor, dtype: torch.dtype | None) -> int:
    return tensor.numel() * (dtype.itemsize if dtype is not None and tensor.is_floating_point() else tensor.element_size())


def _outputs(module: nn.Module) -> int:
    """Output features of all layers: for layers with a weight matrix its rows, for embeddings and normalisations their width."""
    total = 0
    for child in module.modules():
        for parameter in child.parameters(recurse=False):
            if is_lazy(parameter):
                continue
            if parameter.dim() > 1:
                total += parameter.shape[1] if isinstance(child, (nn.Embedding, nn.EmbeddingBag)) else parameter.shape[0]
            elif parameter.dim() == 1 and "norm" in type(child).__name__.lower():
                total += parameter.shape[0] // 2  # a normalisation's weight and bias count as one output
    return total


def _positions(tensor: Tensor) -> int:
    """The number of places of the batch at which a layer runs: tokens, rows, frames, pixels."""
    if not tensor.is_floating_point() or tensor.dim() <= 1:
        return tensor.numel()
    if tensor.dim() >= 4:
        return tensor.numel() // max(1, tensor.shape[1])
    if tensor.is_nested and tensor.layout is torch.strided:  # it has no shape
        return tensor.numel()
    return tensor.numel() // max(1, tensor.shape[-1])

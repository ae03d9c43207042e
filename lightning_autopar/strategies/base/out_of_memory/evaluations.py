"""A batch of a validation or a test that ran out of memory, run again in more parts by the rank alone, and all that follow as well.

It changes nothing but what it logs, metrics, generators, buffers, and what it is known to keep on the module; all of that is put back, and
each part has the draws that its samples have in the whole batch. Other ranks notice nothing: they exchange what was logged when the step
is over. Where ranks exchange something within a step, all of them run as many parts as the run plan says. Knows an engine and its step's
state; not how a plan is found.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lightning_autopar._lightning import Callback, ProgressBar
from lightning_autopar._lightning_compat import combined_mode, is_overridden
from lightning_autopar._temporary import patched
from lightning_autopar.exact.logs.self_log import GlobalLogging
from lightning_autopar.exact.random import generator_states as rng
from lightning_autopar.exact.random.whole_batch_draws import GlobalDraws
from lightning_autopar.exact.step.micro_batches import joined, take_part, whole_share
from lightning_autopar.exact.step.step_rollback import StepState
from lightning_autopar.strategies.base.out_of_memory.rerun import free_memory, may_run_again, why_in_one
from lightning_autopar.strategies.base.worker_exception import EVALUATED, out_of_memory

if TYPE_CHECKING:
    from lightning_autopar.exact.data.rank_share import BatchShare
    from lightning_autopar.strategies.base.engine_mixin import EngineMixin

#: No warning: one that somebody has turned into an exception would end the run.
_LOG = logging.getLogger(__name__)
#: The hook that gets a step's output.
_READERS = {"validation_step": "on_validation_batch_end", "test_step": "on_test_batch_end"}


class Evaluations:
    """Runs a rank's batches of validations and tests."""

    def __init__(self, engine: EngineMixin) -> None:
        self._engine: Any = engine
        #: Into how many parts each batch is cut, where it has as many samples.
        self.parts: int = engine.run_plan.evaluation_parts
        self._states: dict[str, StepState] = {}

    def run(self, step: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the user's ``validation_step`` or ``test_step``, named by ``step``; returns its output."""
        engine, hook = self._engine, step.__name__
        run_plan, engine.running.place = engine.run_plan, "the validation" if hook == "validation_step" else "the test"
        plan = run_plan.plan
        staged = plan.data_ranks < plan.world_size
        if not (staged or engine.splits or run_plan.undivided is None):
            with engine._step():
                return step(*args, **kwargs)
        if not engine.reruns_batches:
            return self._run_with_peers(self._in_one if staged else self._run, step, args, kwargs)
        if hook not in self._states:
            self._states[hook] = StepState(engine._trainer, run_plan.kept_rules.get(hook, {}))
        found = self._states[hook]
        found.note(engine._logging, engine._draws)
        while True:
            try:
                output = self._run(step, args, kwargs)
                found.drop()
                return output
            except Exception as error:  # several classes say that memory ran out; the others are raised
                planned = self.parts == 1 and not engine._alone
                if not may_run_again(engine, error, partial(self._why_not, found, args[0]), planned=planned):
                    raise
            # Outside of the handler, as the exception holds the failed step's tensors.
            found.put_back(engine._logging, engine._draws)
            free_memory()
            self._go_on(hook, self._whole(args[0]).fed)
            found.note(engine._logging, engine._draws, copy_all=True)

    def _in_one(self, step: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """A pipeline's stages are handed the batch whole, and take it through themselves in parts."""
        with self._engine._step():
            return step(*args, **kwargs)

    def _run_with_peers(self, run: Callable[..., Any], step: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Ranks that exchange something within a step all run equally many parts of it; more than these only new processes can run."""
        try:
            return run(step, args, kwargs)
        except Exception as error:  # as above
            if out_of_memory(error):
                vars(error)[EVALUATED] = -(-self._whole(args[0]).fed // self.parts)
            raise

    def _run(self, step: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        engine = self._engine
        if self.parts == 1:
            with engine._step():
                return step(*args, **kwargs)
        whole = self._whole(args[0])
        number = min(self.parts, max(1, *engine.run_plan.plan.rows(whole.of)))
        outputs, rows = list[Any](), list[int]()
        with self._split(), patched(engine, "_share", whole), patched(engine, "_drawing", True), engine._step():
            own = rng.find_generators(engine._trainer.lightning_module.named_modules())
            state, draws = rng.capture(own), engine._draws
            place = 0 if draws is None else draws.place
            for index in range(number):
                if index:
                    rng.restore(state, own)
                    if draws is not None:
                        draws.begin(place)
                engine._share = part = whole.part(index, number)
                samples = take_part(args[0], index, number, whole.fed, collates=True)
                with engine._logging.part(part, samples, index):
                    outputs.append(step(samples, *args[1:], **kwargs))
                rows.append(part.rows)
            engine._share = whole
        return self.put_together(step.__name__, outputs, rows)

    @contextmanager
    def _split(self) -> Iterator[None]:
        """While open, what parts of a batch log and draw is the whole batch's."""
        engine = self._engine
        if engine._logging is not None:
            engine._logging.begin_parts()
            yield
            return
        run_plan, trainer = engine.run_plan, engine._trainer
        logs = GlobalLogging(
            trainer,
            engine.share,
            device=engine.root_device,
            rules=run_plan.log_rules,
            kept=run_plan.kept_rules,
            metrics=run_plan.metric_rules,
            parts=True,
        )
        with ExitStack() as stack:
            logs.install()
            stack.callback(logs.uninstall)
            stack.enter_context(patched(engine, "_logging", logs))
            if run_plan.draws is not None:
                draws = stack.enter_context(GlobalDraws(engine._share_for_draws, run_plan.draws))
                stack.enter_context(patched(engine, "_draws", draws))
            yield

    def put_together(self, hook: str, outputs: Sequence[Any], rows: Sequence[int]) -> Any:
        """The whole batch's output.

        Raises:
            RuntimeError: if somebody gets to see it, and it can't be made of the parts'.
        """
        trainer, reader = self._engine._trainer, _READERS[hook]
        if all(output is None for output in outputs):
            return None
        named: list[Any] = [output if isinstance(output, Mapping) else {"": output} for output in outputs]
        tensors = [{name: value for name, value in each.items() if isinstance(value, Tensor)} for each in named]
        whole = joined(tensors, rows) if all(set(each) == set(tensors[0]) for each in tensors) else {}
        callbacks = [each for each in trainer.callbacks if isinstance(each, Callback) and not isinstance(each, ProgressBar)]
        read = is_overridden(reader, trainer.lightning_module) or any(is_overridden(reader, each) for each in callbacks)
        if read and any(set(whole) != set(each) for each in named):
            raise RuntimeError(
                f"a batch of {hook} ran out of memory, and runs in parts. {reader} reads what the step returns, which can't be put "
                "together from the parts; return tensors with a row a sample, or numbers that are means over samples, or take a smaller "
                "batch"
            )
        return whole.get("") if not isinstance(outputs[0], Mapping) else {**outputs[-1], **whole}

    def _whole(self, batch: Any) -> BatchShare:
        """This rank's share of the batch."""
        share: BatchShare | None = self._engine._share
        return self._engine._counts.on(whole_share(batch, self._engine._samples)) if share is None else share

    def _why_not(self, found: StepState, batch: Any) -> str | None:
        loop: Any = self._engine._trainer._active_loop
        loaders = getattr(getattr(loop, "epoch_loop", loop), "val_loop", loop)._combined_loader
        if loaders is not None and len(loaders.flattened) > 1 and combined_mode(loaders) != "sequential":
            return "it comes from several loaders"
        why = why_in_one(self.parts, partial(self._whole, batch))
        if why is not None:
            return why
        if found.exchanges():
            return "its ranks have exchanged something in its step, and can't do so again"
        return found.why_not()

    def _go_on(self, hook: str, samples: int) -> None:
        engine, before = self._engine, self.parts
        self.parts = min(2 * before, samples)
        rank, plan = f" of rank {engine._rank}" if engine.run_plan.plan.world_size > 1 else "", engine.run_plan.plan
        _LOG.warning(
            f"autopar: {plan.devices[engine._rank]}{rank} ran out of memory in {hook}, on a batch whose {samples} samples ran in "
            f"{'one piece' if before == 1 else f'{before} parts'}. The batch is run again, with the same samples and the same random "
            f"numbers, in {self.parts} parts, and so are all that follow outside of training"
        )

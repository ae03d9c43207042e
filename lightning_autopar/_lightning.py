"""Lightning's names, of the root that this process uses: the only module that imports Lightning when it runs.

Private names are for ``_lightning_compat`` alone.
"""

import ast
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_autopar._root import chosen

if TYPE_CHECKING or chosen() == "lightning.pytorch":
    import lightning.fabric as fabric
    import lightning.pytorch as pl
    from lightning.fabric.accelerators.cuda import num_cuda_devices
    from lightning.fabric.loggers.logger import _DummyExperiment
    from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
    from lightning.fabric.plugins.environments.lightning import find_free_network_port
    from lightning.fabric.strategies.launchers.subprocess_script import _basic_subprocess_cmd
    from lightning.fabric.utilities.cloud_io import get_filesystem
    from lightning.fabric.utilities.data import sized_len
    from lightning.fabric.utilities.device_dtype_mixin import _update_properties
    from lightning.fabric.utilities.distributed import (
        _distributed_is_initialized,
        _get_default_process_group_backend_for_device,
        _init_dist_connection,
        _set_num_threads_if_needed,
        _sync_ddp_if_available,
    )
    from lightning.fabric.utilities.init import _materialize_distributed_module
    from lightning.fabric.utilities.optimizer import _optimizers_to_device
    from lightning.fabric.utilities.seed import pl_worker_init_function
    from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, callbacks
    from lightning.pytorch.accelerators.cpu import CPUAccelerator
    from lightning.pytorch.accelerators.cuda import CUDAAccelerator
    from lightning.pytorch.callbacks import BaseFinetuning, GradientAccumulationScheduler, ProgressBar
    from lightning.pytorch.core.optimizer import LightningOptimizer, _configure_optimizers
    from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger
    from lightning.pytorch.loggers.logger import DummyLogger
    from lightning.pytorch.loops.evaluation_loop import RestartStage
    from lightning.pytorch.loops.fit_loop import RestartStage as FitRestartStage
    from lightning.pytorch.plugins import (
        BitsandbytesPrecision,
        DeepSpeedPrecision,
        DoublePrecision,
        FSDPPrecision,
        HalfPrecision,
        MixedPrecision,
        Precision,
    )
    from lightning.pytorch.plugins.environments import ClusterEnvironment, LightningEnvironment, SLURMEnvironment
    from lightning.pytorch.strategies import (
        DDPStrategy,
        DeepSpeedStrategy,
        ModelParallelStrategy,
        ParallelStrategy,
        SingleDeviceStrategy,
        Strategy,
        StrategyRegistry,
    )
    from lightning.pytorch.strategies.launchers.launcher import _Launcher
    from lightning.pytorch.trainer import call
    from lightning.pytorch.trainer import trainer as trainer_module
    from lightning.pytorch.trainer.configuration_validator import _verify_loop_configurations
    from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector
    from lightning.pytorch.trainer.connectors.data_connector import _request_dataloader
    from lightning.pytorch.trainer.connectors.logger_connector.result import _Metadata, _ResultMetric, _Sync
    from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
    from lightning.pytorch.utilities import CombinedLoader, GradClipAlgorithmType, grads, rank_zero_info, rank_zero_only, rank_zero_warn
    from lightning.pytorch.utilities._pytree import tree_unflatten
    from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException, _TunerExitException
    from lightning.pytorch.utilities.model_helpers import is_overridden
    from lightning.pytorch.utilities.parsing import lightning_hasattr, lightning_setattr
    from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
    from lightning.pytorch.utilities.types import LRSchedulerConfig
else:
    # One source under two names: what the branch above imports, from the other root's modules.
    _branch = next(each for each in ast.parse(Path(__file__).read_text(encoding="utf-8")).body if isinstance(each, ast.If))
    _imports = ast.unparse(ast.Module(_branch.body, []))
    exec(_imports.replace("lightning.pytorch", "pytorch_lightning").replace("lightning.fabric", "lightning_fabric"))

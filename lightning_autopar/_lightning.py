"""Lightning's names, of the root that this process uses: the only module that imports Lightning when it runs.

The second list is the first one under the other root's names. Private names are for ``_lightning_compat`` alone.
"""

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
    from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
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
    from lightning.pytorch.utilities.exceptions import SIGTERMException, _TunerExitException
    from lightning.pytorch.utilities.model_helpers import is_overridden
    from lightning.pytorch.utilities.parsing import lightning_hasattr, lightning_setattr
    from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
    from lightning.pytorch.utilities.types import LRSchedulerConfig
else:
    import lightning_fabric as fabric
    import pytorch_lightning as pl
    from lightning_fabric.accelerators.cuda import num_cuda_devices
    from lightning_fabric.loggers.logger import _DummyExperiment
    from lightning_fabric.plugins import CheckpointIO, TorchCheckpointIO
    from lightning_fabric.plugins.environments.lightning import find_free_network_port
    from lightning_fabric.strategies.launchers.subprocess_script import _basic_subprocess_cmd
    from lightning_fabric.utilities.cloud_io import get_filesystem
    from lightning_fabric.utilities.data import sized_len
    from lightning_fabric.utilities.device_dtype_mixin import _update_properties
    from lightning_fabric.utilities.distributed import (
        _distributed_is_initialized,
        _get_default_process_group_backend_for_device,
        _init_dist_connection,
        _set_num_threads_if_needed,
        _sync_ddp_if_available,
    )
    from lightning_fabric.utilities.init import _materialize_distributed_module
    from lightning_fabric.utilities.optimizer import _optimizers_to_device
    from lightning_fabric.utilities.seed import pl_worker_init_function
    from pytorch_lightning import Callback, LightningDataModule, LightningModule, Trainer, callbacks
    from pytorch_lightning.accelerators.cpu import CPUAccelerator
    from pytorch_lightning.accelerators.cuda import CUDAAccelerator
    from pytorch_lightning.callbacks import BaseFinetuning, GradientAccumulationScheduler, ProgressBar
    from pytorch_lightning.core.optimizer import LightningOptimizer, _configure_optimizers
    from pytorch_lightning.loggers import CSVLogger, Logger, TensorBoardLogger
    from pytorch_lightning.loggers.logger import DummyLogger
    from pytorch_lightning.loops.evaluation_loop import RestartStage
    from pytorch_lightning.loops.fit_loop import RestartStage as FitRestartStage
    from pytorch_lightning.plugins import (
        BitsandbytesPrecision,
        DeepSpeedPrecision,
        DoublePrecision,
        FSDPPrecision,
        HalfPrecision,
        MixedPrecision,
        Precision,
    )
    from pytorch_lightning.plugins.environments import ClusterEnvironment, LightningEnvironment, SLURMEnvironment
    from pytorch_lightning.strategies import (
        DDPStrategy,
        DeepSpeedStrategy,
        ModelParallelStrategy,
        ParallelStrategy,
        SingleDeviceStrategy,
        Strategy,
        StrategyRegistry,
    )
    from pytorch_lightning.strategies.launchers.launcher import _Launcher
    from pytorch_lightning.trainer import call
    from pytorch_lightning.trainer import trainer as trainer_module
    from pytorch_lightning.trainer.configuration_validator import _verify_loop_configurations
    from pytorch_lightning.trainer.connectors.accelerator_connector import _AcceleratorConnector
    from pytorch_lightning.trainer.connectors.data_connector import _request_dataloader
    from pytorch_lightning.trainer.connectors.logger_connector.result import _Metadata, _ResultMetric, _Sync
    from pytorch_lightning.trainer.states import TrainerFn, TrainerStatus
    from pytorch_lightning.utilities import CombinedLoader, GradClipAlgorithmType, grads, rank_zero_info, rank_zero_only, rank_zero_warn
    from pytorch_lightning.utilities._pytree import tree_unflatten
    from pytorch_lightning.utilities.exceptions import SIGTERMException, _TunerExitException
    from pytorch_lightning.utilities.model_helpers import is_overridden
    from pytorch_lightning.utilities.parsing import lightning_hasattr, lightning_setattr
    from pytorch_lightning.utilities.signature_utils import is_param_in_hook_signature
    from pytorch_lightning.utilities.types import LRSchedulerConfig

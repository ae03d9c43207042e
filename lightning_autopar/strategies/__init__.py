"""How a plan runs. Here the entrance, in folders the rest.

Modules, in reading order:

    auto                   AutoParallelStrategy
    plan_of_module         `lightning_autopar.plan`, without a Trainer
    launcher               from `fit` to a running plan
    out_of_memory_restart  after memory ran out: the run's next plan
    base/                  What every engine shares; knows no engine
    calibration/           measuring this machine
    ddp/                   engine: DDP and single
    elastic/               the agent and its snapshots
    fsdp/                  engine: FSDP2
    pipeline/              engine: stages
    preparation/           from a call of the trainer to a plan
    processes/             workers, and what passes between processes
    trials/                before the run: the first batch in parts, engines
    zero/                  engine: DeepSpeed's ZeRO
"""

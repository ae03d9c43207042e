"""transformers' own Trainer: a script that calls its ``train`` is planned for, and started again under the best plan that it can run.

Its loop stays transformers' own: nothing here trains. A plan becomes TrainingArguments. Imports transformers only where the script has.

Modules, in reading order:

    settings            Settings: the plan as TrainingArguments, for the processes that run it; each TrainingArguments of the script
    last_batches        an epoch's last batch, shared out among the processes
    train_calls         the script's calls of ``train``
    trainer_step        a training step of its Trainer as a LightningModule's, and its footprint
    planning            every plan that it can run, as a report
    relaunch            the script again, in the plan's processes
"""

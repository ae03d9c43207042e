"""What a user adds to a Trainer.

Modules, in reading order:

    elastic_replan      ElasticReplan: watches the devices, and says when another plan is worth moving to
    device_watch        what it makes of the devices
    checkpoint_migrate  CheckpointMigrate: makes a run movable; it survives its workers by snapshots
    plan_monitor        PlanMonitor: predicted and measured figures, shown and logged
"""

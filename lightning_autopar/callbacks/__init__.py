"""What a user adds to a Trainer.

Modules, in reading order:

    elastic_replan      ElasticReplan
    device_watch        what it makes of the devices
    checkpoint_migrate  CheckpointMigrate
    plan_monitor        PlanMonitor
"""

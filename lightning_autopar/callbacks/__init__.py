"""What a user adds to a Trainer.

Modules, in reading order:

    elastic       ElasticReplan
    device_watch  what it makes of the devices
    migrate       CheckpointMigrate
    monitor       PlanMonitor
"""

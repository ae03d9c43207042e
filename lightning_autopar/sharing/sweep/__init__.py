"""Many runs at once.

Modules, in reading order:

    scheduler        what a schedule is made of; places jobs so that the last ends soonest
    runs_file        the list of runs in YAML or text; the sweep's folder and log
    child_processes  processes of the sweep
    orphan_watchdog  a program that ends orphans; standard library alone
    dry_runs         how each run could run: plans its script
    controller       starts runs and schedules the rest anew
"""

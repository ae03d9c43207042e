"""Others on this host. Knows no trainer.

Modules, in reading order:

    live_files    files that live as long as their process; its locks
    process_ids   which process is meant by a number
    lease_files   one run's promised memory, as a file
    ledger        all promises of this host; an inventory less what is promised
    take_leases   what this process was promised
    queue         a run's place in the queue, as a file
    queue_order   whose turn it is, and what a waiting run reserves until then
    waiting       waits until it is the run's turn
    wait_options  `Turn`: how long a user waits, and the run's priority
    runs/         runs as others see them
    sweep/        many runs at once
"""

"""What there is. Knows no model and no plan.

Modules, in reading order:

    inventory             Device, Link, Inventory; a device's label, its idle and busy share; what changed between two looks
    discover              `probe()`: the devices as they are now
    spec                  devices written as text, such as `2xcpu:4GiB`
    catalogue             known GPUs as data
    nvml                  GPUs and their links as NVML tells of them, in the order in which CUDA shows them
    torch_cuda            GPUs as torch.cuda tells of them, asked in another process
    host                  memory and cores of the host; the key by which measurements of this machine are kept
    simulated_neighbours  a file that simulates other users of CPU devices
    allowed               a file that limits the devices that a run may use
"""

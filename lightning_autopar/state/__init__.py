"""What survives a change of plan.

Modules, in reading order:

    snapshot         the state at a step boundary, for any plan
    snapshot_folder  its folder, and files to write over
    checkpoint       Lightning's `.ckpt` under any plan
    flat_parts       a rank's flat part of a tensor
    scratch_files    tensors whose pages belong to a file
    pretrained       Hugging Face weights without copies; tensors without values
    gpu_pickles      pickles GPU tensors by what their device is to the process
    objects/         Python objects from process to process
"""

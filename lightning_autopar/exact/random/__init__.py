"""Random generators and what is drawn from them.

Modules, in reading order:

    generator_states   the states of all random generators: captured, compared, restored
    whole_batch_draws  draws for the whole batch, of which a rank keeps its own rows
    drawing_operators  the operators that draw, replaced
    rows_of_gpu_draws  a rank's rows of a GPU's random draw, bit for bit
"""

"""Python objects from process to process.

Modules, in reading order:

    survey     which objects there were before the fork, and what differs now
    contents   what a Python object holds
    pickles    pickles in which shared objects are numbers
    packing    changed objects packed; the places where they were found
    unpacking  and unpacked in another process
"""

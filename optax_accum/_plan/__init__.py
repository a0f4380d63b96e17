"""`plan_microbatches`: sizes are compiled until the largest that fits is known.

`search` has the function, which bisects. A `builder` makes and compiles the steps of one choice. A
`candidate` has what XLA says of a program: memory, with its peak, operations, and what is sent. All
ends in the `report`. `command` is the command line, and `sizes` reads and prints bytes.
"""

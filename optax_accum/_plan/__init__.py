"""`plan_microbatches`: sizes are compiled until the largest that fits is known.

`search` has the function, which bisects; `programs` has the sizes that there can be, and compiles;
`report` prints what was found, and `sizes` reads and prints bytes.
"""

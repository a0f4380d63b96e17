"""What the other folders calculate with. It knows of no batch and no optimizer.

`weighted_mean` is the one formula, and says what a weight of zero does; `dtypes` says in what it is
taken. `reductions` has one object for each way to combine the outputs of microbatches
(`reduction_words` finds these by name), and `skip` decides what is left out. `devices` is one
device, or those of an axis, with the sums over them; `across_devices` has the types of what differs
between them. `keys` folds numbers into random keys. `conditional` and `hoisting` are about XLA: a
conditional without copies, and sums that must stay in a loop. `trees` has names for types, and
trees with None for leaves.
"""

"""A function, or a loss and its gradient, on one microbatch of a batch after the other.

1. `options` checks how a batch is to be split, once, in a `Split`. `roles` finds which argument of
   a call is the batch, a key, a carry, or shared. `refusals` refuses what defaults get wrong.
2. `call` has the microbatches of one call: `cut` takes their rows; each has its keys and weight.
3. `loop` runs them. It traces the function, to know the types of its `outputs`, starts a reduction
   for each of these, adds every microbatch in one scan, and its `Ending` finishes what is held,
   over all devices. A device that stands for several virtual ones runs the scan for each of these
   lanes. `carry` is what one microbatch hands to the next.
4. `loss` takes the gradient of a user's `loss_function`: in the loop's body, or `in_place`. Over
   devices `traced_loss` traces it first, and `collectives` refuses what they must not exchange.
   Where microbatches arrive in several calls, `Accumulated` is what is held between these.
5. `grad_metrics` has what is asked for of the gradient of each microbatch: a user's function, and
   the norms that `noise_scale` reads.
6. `function` runs any other function so. `recompute` differentiates that, and `whole` runs it
   whole, for `check_split`.
7. `value_and_grad` is public. `parameters` says what can be differentiated.
"""

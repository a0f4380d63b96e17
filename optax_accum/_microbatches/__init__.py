"""A function, or a loss and its gradient, on one microbatch of a batch after the other.

1. `options` checks how a batch is to be split, once, in a `Split`. `roles` finds which argument of
   a call is the batch, a key, a carry, or shared. `refusals` refuses what defaults get wrong.
2. `call` has the `Microbatches` of one call: `cut` takes their rows; each has its keys and weight.
3. `loop` runs them in one scan, and the `accumulator` adds up what they give: `begin`, `add`,
   `merge` of what was added up apart, and `finish`, which has the only sums over devices and the
   only division. `outputs` has a reduction for each of the results, and `carry` those of what one
   microbatch hands to the next.
4. `loss_function` calls the user's loss, and multiplies it by its weight: here and nowhere else a
   weight enters. `loss` differentiates that in the body of the loop, or `in_place`. Where
   microbatches arrive in several calls, a `CycleState` goes from one to the next.
5. `function` runs any other function so. `recompute` is how it is differentiated, and `whole` runs
   it whole, for `check_split`.
6. `value_and_grad` is public, and so is `noise_scale`. `parameters` says what a step can be given.
"""

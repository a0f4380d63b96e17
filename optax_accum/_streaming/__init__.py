"""`accumulate`: how one call of `update` or `apply` goes through.

1. `accumulate` makes an `Accumulation`, which is the `update`. It has the devices, one or those of
   an axis, and the `Calls` of a cycle.
2. `Accumulation.add` checks the call (`checks`), and takes from the `AccumulateState`
   what is this device's own.
3. It weighs: the call's weight, whether `skip_fn` leaves it out, and its ``value=``.
4. It agrees with the other devices on these few numbers, in one reduction. That makes a `Call`.
5. `Calls.add` adds the gradients to the sums. No gradient is sent to another device. With
   ``every_k=1`` there is nothing to add them to, and they are weighed in step 7.
6. `Calls.end` decides whether this call ends the cycle, and counts. Then there is a `MiniStep`.
7. `Accumulation.if_it_emits` is the conditional. Inside, `run_inner` sums the gradients over the
   devices, divides them, and runs `inner` (`inner_state` keeps the types of its state). `update`
   puts the new updates where the sums were, and `apply` adds them to the parameters.
8. The sums and the state of `inner` go into the next state, as it is stored.
"""
